"""A capture that runs in a thread of the process that reads its change log."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ..capture_options import CaptureOptions
from ..errors import Argument, PgOutputError
from ..segments.listing import has_begun, metadata_of

if TYPE_CHECKING:
    from ..connections import ConnectionParameters
    from ..replication import CaptureProgress

DEFAULT_CAPTURE = CaptureOptions(snapshot="initial", create_slot=True, keep_seconds=600.0)
"""The default options of the capture of a sync."""


def check_slot(directory: Path, slot: str) -> None:
    """Refuse a directory that has the changes of another slot.

    Raises
    ------
    PgOutputError
        The directory has the changes of another slot, or can't be read.
    """
    metadata = metadata_of(directory) if has_begun(directory) else None
    if metadata is not None and metadata.slot != slot:
        raise PgOutputError(
            f"{directory} has the changes of slot {metadata.slot!r}, not of {slot!r}",
            code="another_history", path=str(directory),
            parameter="slot",
            hint=("Give ", Argument("slot", metadata.slot), " to continue with them, or another ",
                  Argument("directory"), f" for slot {slot!r}"),
        )  # fmt: skip


class EmbeddedCapture:
    """A capture in a thread of its own."""

    def __init__(
        self,
        parameters: ConnectionParameters,
        directory: Path,
        stop: threading.Event,
        until: int | Literal["now"] | None,
        slot: str,
        publications: Sequence[str],
        options: CaptureOptions,
    ) -> None:
        self._directory = directory
        self._parameters = parameters
        self._slot = slot
        self._publications = publications
        self._until = until
        self._stop = stop
        self._own = threading.Event()
        self._news = threading.Event()
        self._options = options
        self._progress: CaptureProgress | None = None
        self._error: BaseException | None = None
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="pgoutput_fast-capture")
        self._watch = threading.Thread(target=self._pass_on, daemon=True)

    def start(self) -> None:
        """Start the capture, and wait until it streams or has ended.

        Before it streams, it requests the snapshots that the change log lacks.
        """
        self._thread.start()
        self._watch.start()
        while self._progress is None and not self._is_over:
            self.wait(None)
        if not has_begun(self._directory):
            self.result()
            raise PgOutputError(
                f"the capture into {self._directory} ended before it was ready",
                code="stopped",
                path=str(self._directory),
            )

    def _pass_on(self) -> None:
        self._stop.wait()
        self._own.set()
        self._news.set()

    def _run(self) -> None:
        from ..replication import capture

        try:
            capture(
                self._parameters, slot=self._slot, publications=self._publications,
                directory=self._directory, until_lsn=self._until, stop=self._own,
                progress=self._note, capture_options=self._options,
            )  # fmt: skip
        except BaseException as error:  # noqa: BLE001 - it is raised by the thread that waits
            self._error = error
        finally:
            self._is_over = True
            self._news.set()

    def _note(self, progress: CaptureProgress) -> None:
        before, self._progress = self._progress, progress
        if before is None or before.durable_lsn != progress.durable_lsn:
            self._news.set()

    def wait(self, seconds: float | None) -> bool:
        """Wait for new changes, the capture's end or a stop; False if the time passed first."""
        is_set = self._news.wait(seconds)
        self._news.clear()
        return is_set

    def latest(self) -> CaptureProgress | None:
        """Return the capture's progress; None before it streams."""
        return self._progress

    def is_over(self) -> bool:
        """Whether the capture has ended."""
        return self._is_over

    def result(self) -> None:
        """Wait for the capture's end, and raise its error."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    def end(self) -> None:
        """Stop the capture, and wait for its end."""
        self._own.set()
        self._thread.join()
