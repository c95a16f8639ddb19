"""The consumer of a change log for programs that store changes themselves."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from ..columnar.decoder import ColumnarDecoder
from ..errors import PgOutputError, RetryableError
from ..lsn import format_lsn
from ..policies import Policies
from .changes import ChangeReader
from .consumers import Consumer, claim_consumer

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    import pyarrow as pa
    from typing_extensions import Self

    from ..columnar._pure_batch import ChangeBatch
    from .history import History, HistoryPolicy
    from .read_plan import Position, ReadPlan
    from .view import View

_POLL = 0.1  # seconds between two polls of a change log without new changes


class NextChanges:
    """Changes of whole transactions and snapshots. Iterate to get a batch for each table.

    Attributes
    ----------
    position : Position
        The consumer's position after these changes. Store ``position.to_json()`` together with
        them.
    """

    def __init__(self, view: View, plan: ReadPlan, reader: ChangeReader) -> None:
        self._view, self._plan, self._reader = view, plan, reader
        self.position: Position = plan.after

    def __iter__(self) -> Iterator[tuple[ChangeBatch, pa.RecordBatch]]:
        """Yield each batch of changes, and its record batch.

        ``changes.relation`` names the table of a batch. docs/reference/change-columns.md lists the
        columns of the record batch. A snapshot is a Truncate and then rows with the operation
        "read". The changes of one table come in the order of the stream. ``(commit_lsn, seq)``
        orders the changes of all tables.

        Raises
        ------
        RetryableError
            A value is refused, and its type may have been altered since the capture has read the
            catalogue. Call `next` again after some seconds.
        PgOutputError
            A file can't be read or is damaged, or a value is refused.
        """
        try:
            for read in self._plan.reads:
                for frame_run in self._reader.frame_runs(read, self._view.metadata):
                    yield from self._reader.changes(frame_run)
        except PgOutputError as error:
            history = self._reader.history
            if error.code != "bad_value" or history is None:
                raise
            if history.confirmed >= self.position.lsn:
                raise
            raise RetryableError(
                f"{error.message}. Its type may have been altered since the capture has read the "
                "catalogue",
                code=error.code,
                path=error.path,
                hint="Call `next` again after some seconds",
            ) from error


class LogConsumer:
    """Reads a change log under a name. `ChangeLog.consumer` creates it; it is a context manager.

    The change log keeps all changes that the consumer has not read yet: see docs/how-to/capture.md.
    """

    def __init__(
        self,
        directory: Path,
        name: str,
        view: Callable[[], View],
        history: Callable[[], History | None],
        *,
        position: Position | None,
        tables: Sequence[str] | None,
        policies: Policies | None,
        target: str,
        policy: HistoryPolicy,
    ) -> None:
        self._view, self._history, self._policy = view, history, policy
        self._decoding: dict[str, Any] = {
            "policies": policies or Policies(), "target": target, "tables": tables,
            "on_error": "raise", "max_bytes": 16 << 20,
        }  # fmt: skip
        ColumnarDecoder(**self._decoding)  # to refuse wrong arguments now
        view()  # to refuse a directory without a change log before a lock is made in it
        # First the lock: another process may move the stored position until it releases the name.
        self._lock: int | None = claim_consumer(directory, name, "consumer")
        try:
            self._consumer = Consumer(directory, name, position)
        except BaseException:
            self.close()
            raise
        if position is not None:
            self._consumer.position = position

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the name, so that another process can read under it."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _check_open(self) -> None:
        if self._lock is None:
            raise PgOutputError(
                "the consumer is closed, and another process may read under its name",
                code="unfit_input",
                hint="Make another consumer",
            )

    @property
    def position(self) -> Position:
        """The consumer's position: it has stored everything before."""
        return self._consumer.position

    def next(self, max_bytes: int = 64 << 20) -> NextChanges | None:
        """Return the next changes after the position; None if there are none yet.

        Parameters
        ----------
        max_bytes : int
            Approximate limit, in bytes of files. A transaction is never split.

        Raises
        ------
        PgOutputError
            The change log can't be read, ends before the position, or lacks changes after it. The
            consumer is closed.
        """
        self._check_open()
        view, position = self._view(), self._consumer.position
        if position.lsn > view.end:
            raise PgOutputError(
                f"the consumer is at {format_lsn(position.lsn)}, but {view.where} ends at "
                f"{format_lsn(view.end)}",
                code="another_history",
                path=view.where,
                hint="Restore the change log, or start with another consumer",
            )
        plan = view.plan(position, max_bytes)
        if plan is None:
            return None
        reader = ChangeReader(self._decoding, self._history(), self._policy)
        return NextChanges(view, plan, reader)

    def follow(
        self, stop: threading.Event | None = None, max_bytes: int = 64 << 20
    ) -> Iterator[NextChanges]:
        """Yield the next changes, and wait for more, until `stop` is set.

        Call `advance` before the next iteration. Otherwise the same changes come again.
        """
        while stop is None or not stop.is_set():
            changes = self.next(max_bytes)
            if changes is not None:
                yield changes
            elif stop is None:
                time.sleep(_POLL)
            else:
                stop.wait(_POLL)

    def advance(self, position: Position) -> None:
        """Store that you have everything before a position; the change log may then delete it.

        Raises
        ------
        PgOutputError
            The position can't be written, or the consumer was removed meanwhile. The change log
            ends before the position. The consumer is closed.
        """
        self._check_open()
        end = self._view().end
        if position.lsn > end:
            raise PgOutputError(
                f"the change log ends at {format_lsn(end)}, before {format_lsn(position.lsn)}",
                code="unfit_input",
                hint="Give the `position` of changes that this consumer has returned",
            )
        self._consumer.advance(position)
