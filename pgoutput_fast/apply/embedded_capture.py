"""A capture in a thread beside what reads its directory."""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..errors import PgOutputError
from ..segments.listing import has_begun, metadata_of

if TYPE_CHECKING:
    from ..replication import CaptureProgress

_POLL = 0.01  # seconds between two looks whether the capture has begun
_KEPT = 600.0
"""Seconds for which segments stay that every consumer has read, if nothing else is asked for."""


def libpq_keywords(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a capture that are parameters of libpq."""
    from ..replication import capture

    own = inspect.signature(capture).parameters
    return {name: value for name, value in options.items() if name not in own}


def check_slot(directory: Path, slot: str) -> None:
    """Refuse a directory that has the changes of another slot, before anything of it is read.

    Raises
    ------
    PgOutputError
        It has, or it can't be read.
    """
    found = metadata_of(directory) if has_begun(directory) else None
    if found is not None and found.slot != slot:
        raise PgOutputError(
            f"{directory} has the changes of slot {found.slot!r}, not of {slot!r}: give "
            f"slot={found.slot!r} to go on with them, or another directory= for slot {slot!r}"
        )


class EmbeddedCapture:
    """A capture in a thread of its own."""

    def __init__(
        self,
        dsn: str | None,
        directory: Path,
        stop: threading.Event,
        until: int | Literal["now"] | None,
        **options: Any,
    ) -> None:
        self._directory = directory
        self._dsn = dsn
        self._until = until
        self._stop = stop
        self._own = threading.Event()
        options.setdefault("create_slot", True)
        options.setdefault("keep_seconds", _KEPT)
        self._options = options
        self._progress: CaptureProgress | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="pgoutput_fast-capture")
        self._watch = threading.Thread(target=self._pass_on, daemon=True)

    def start(self) -> None:
        """Begin, and wait until there is a directory that can be read."""
        self._thread.start()
        self._watch.start()
        while not has_begun(self._directory):
            if not self._thread.is_alive():
                self.result()
                raise PgOutputError(f"the capture into {self._directory} ended before it began")
            time.sleep(_POLL)

    def _pass_on(self) -> None:
        self._stop.wait()
        self._own.set()

    def _run(self) -> None:
        from ..connections import ConnectionParameters
        from ..replication import capture
        from ..replication.server_position import end_of_commits

        try:
            until = self._until
            if until == "now":
                until = end_of_commits(
                    ConnectionParameters(self._dsn, libpq_keywords(self._options))
                )
            capture(
                self._dsn, directory=self._directory, until_lsn=until, stop=self._own,
                progress=self._note, **self._options,
            )  # fmt: skip
        except BaseException as error:  # noqa: BLE001 - it is raised by the thread that waits
            self._error = error

    def _note(self, progress: CaptureProgress) -> None:
        self._progress = progress

    def latest(self) -> CaptureProgress | None:
        """How far it is; None before the stream has begun."""
        return self._progress

    def is_over(self) -> bool:
        """Whether nothing more comes."""
        return not self._thread.is_alive()

    def result(self) -> None:
        """Raise the error with which it ended."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    def end(self) -> None:
        """Have it end."""
        self._own.set()
        self._thread.join()
