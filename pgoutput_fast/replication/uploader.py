"""Upload a capture's directory to object storage, in a thread beside the stream."""

from __future__ import annotations

import logging
import random
import threading
import time
from typing import TYPE_CHECKING, cast

from ..changelog.remote import RemoteError
from ..changelog.uploading import Upload
from ..errors import PgOutputError, RetryableError
from ..lsn import format_lsn

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ..capture_options import CaptureOptions

_INTERVAL = 0.5  # seconds until the next check for new files, after all were uploaded
_FIRST_WAIT = 0.5  # seconds before the next try after an error: first, and at most
_LONGEST_WAIT = 60.0

_log = logging.getLogger(__name__)


class Uploader:
    """Uploads a directory, until it is closed.

    Parameters
    ----------
    directory : pathlib.Path
    options : CaptureOptions
        Options whose `upload` is set.

    Attributes
    ----------
    position : int
        Everything before this LSN is in object storage.
    error : PgOutputError or None
        Why the upload can't go on.

    Raises
    ------
    RetryableError
        The storage can't be reached, and no upload of this directory has begun. If one has begun,
        the thread tries again without an error.
    PgOutputError
        The storage refuses, or has something else under this URL, or an option is malformed.
    """

    def __init__(self, directory: Path, options: CaptureOptions) -> None:
        self._directory = directory
        self._upload = Upload(
            directory, cast("str", options.upload), options.upload_endpoint, options.upload_keep
        )
        self._has_begun = False
        self._failures = 0
        self._failing_since: float | None = None
        # `_asked` counts the calls of `ask`. `_answered` is its value at the beginning of the last
        # round that uploaded everything.
        self._asked = self._answered = 0
        self._stop = threading.Event()
        self.error: PgOutputError | None = None
        self._thread: threading.Thread | None = None
        self._at_once(self._upload.check)

    @property
    def position(self) -> int:
        """Everything before this LSN is in object storage; 0 while that is not known."""
        return self._upload.position

    @property
    def url(self) -> str:
        """The URL of the copy in object storage."""
        return self._upload.url

    @property
    def failing_for(self) -> float:
        """Seconds for which the storage has refused, or could not be reached; 0 if it works."""
        since = self._failing_since
        return 0.0 if since is None else time.monotonic() - since

    def start(self) -> None:
        """Start the thread, after a capture has begun in the directory."""
        self._has_begun = self._at_once(self._upload.begin)
        self._thread = threading.Thread(target=self._run, name="pgoutput_fast-upload", daemon=True)
        self._thread.start()

    def _at_once(self, action: Callable[[], None]) -> bool:
        """Run an action in the caller's thread; False if the storage is away but known."""
        try:
            action()
        except RemoteError as error:
            if not error.passes:
                raise
            if not self._upload.is_registered:
                raise RetryableError(error.message, code=error.code, hint=error.hint) from error
            _log.warning("the upload waits: %s", error)
            return False
        return True

    def ask(self) -> None:
        """Ask for the upload of everything that is in the directory now."""
        self._asked += 1

    @property
    def is_idle(self) -> bool:
        """Whether all files that the last call of `ask` found are uploaded."""
        return self._answered == self._asked

    def close(self) -> None:
        """End the thread after the file that it uploads now."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                asked = self._asked
                try:
                    if not self._has_begun:
                        self._upload.begin()
                        self._has_begun = True
                    more = self._upload.round(self._stop)
                except RemoteError as error:
                    self._wait_after(error)
                    continue
                self._failing_since = None
                if self._failures:
                    _log.info("the upload continues at %s", format_lsn(self.position))
                    self._failures = 0
                if not more:
                    self._answered = asked
                    self._stop.wait(_INTERVAL)
        except Exception as error:  # noqa: BLE001 - raised in the capture's thread
            unexpected = f"can't upload {self._directory} to {self._upload.url}: {error!r}"
            self.error = (
                error
                if isinstance(error, PgOutputError)
                else PgOutputError(unexpected, code="internal")
            )

    def _wait_after(self, error: RemoteError) -> None:
        """Wait before the next try; somebody may repair the storage meanwhile."""
        wait = min(_FIRST_WAIT * 2**self._failures, _LONGEST_WAIT)
        wait *= random.uniform(0.5, 1.0)  # noqa: S311
        self._failures = min(self._failures + 1, 20)
        self._failing_since = self._failing_since or time.monotonic()
        if not self._stop.is_set():
            _log.warning("the upload waits: %s; trying again in %.0f s", error, wait)
            self._stop.wait(wait)
