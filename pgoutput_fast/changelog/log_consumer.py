"""A consumer of a change log for programs that store changes themselves."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from ..columnar.decoder import ColumnarDecoder
from ..errors import PgOutputError
from ..lsn import format_lsn
from ..policies import Policies
from .changes import ChangeReader
from .consumers import Consumer, claim_consumer
from .read_frames import chunks

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

_POLL = 0.1  # seconds between two looks at a change log that nothing has come to


class NextChanges:
    """Whole transactions, and snapshots of tables; iterate to get their changes by table.

    Attributes
    ----------
    position : Position
        The consumer's position once it has stored these changes. ``position.to_json()`` is text to
        store with them.
    """

    def __init__(self, view: View, plan: ReadPlan, reader: ChangeReader) -> None:
        self._view, self._plan, self._reader = view, plan, reader
        self.position: Position = plan.after

    def __iter__(self) -> Iterator[tuple[ChangeBatch, pa.RecordBatch]]:
        """Yield each batch of changes, and its columns.

        ``changes.relation`` of the batch says which table it is. The columns are those of
        docs/reference/change-columns.md. A snapshot is a Truncate, and then its rows with
        the operation "read". The changes of a table come in the order of the stream, and
        ``(commit_lsn, seq)`` orders those of all tables.

        Raises
        ------
        PgOutputError
            A file can't be read or is damaged, or a value is refused.
        """
        for read in self._plan.reads:
            for chunk in chunks(read, self._view.metadata):
                yield from self._reader.changes(chunk)


class LogConsumer:
    """Reads a change log under a name; a context manager. `ChangeLog.consumer` makes it.

    The change log keeps what the consumer has not read yet: see docs/how-to/capture.md.
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
        ColumnarDecoder(**self._decoding)  # refuses wrong arguments
        self._consumer = Consumer(directory, name, position)
        self._lock: int | None = claim_consumer(directory, name, "consumer")
        if position is not None:
            self._consumer.position = position

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let another process read under the name."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @property
    def position(self) -> Position:
        """The position before which the consumer has stored everything."""
        return self._consumer.position

    def next(self, max_bytes: int = 64 << 20) -> NextChanges | None:
        """Return what comes behind the position; None if nothing is there yet.

        Parameters
        ----------
        max_bytes : int
            Approximate limit, in bytes of files. A transaction is not cut.

        Raises
        ------
        PgOutputError
            The change log can't be read, ends before the position, or lacks changes behind it.
        """
        view, position = self._view(), self._consumer.position
        if position.lsn > view.end:
            raise PgOutputError(
                f"the consumer is at {format_lsn(position.lsn)}, and {view.where} ends at "
                f"{format_lsn(view.end)}",
                code="another_history",
                path=view.where,
                hint="Restore the change log, or begin anew with another consumer",
            )
        plan = view.plan(position, max_bytes)
        if plan is None:
            return None
        reader = ChangeReader(self._decoding, self._history(), self._policy)
        return NextChanges(view, plan, reader)

    def follow(
        self, stop: threading.Event | None = None, max_bytes: int = 64 << 20
    ) -> Iterator[NextChanges]:
        """Yield what comes, and wait for more, until `stop` is set.

        Call `advance` before the next iteration, else the same changes come again.
        """
        while stop is None or not stop.is_set():
            found = self.next(max_bytes)
            if found is not None:
                yield found
            elif stop is None:
                time.sleep(_POLL)
            else:
                stop.wait(_POLL)

    def advance(self, position: Position) -> None:
        """Say that everything before a position is stored; the change log may delete it.

        Raises
        ------
        PgOutputError
            The disk refuses, or the consumer was removed meanwhile.
        """
        self._consumer.advance(position)
