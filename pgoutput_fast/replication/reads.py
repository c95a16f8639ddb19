"""The function `snapshot`, which reads published tables as Arrow batches, and its iterator."""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
from typing import TYPE_CHECKING, Any, Literal

from ..connections import ConnectionParameters
from ..errors import PgOutputError, RetryableError
from ..options import arguments_of
from ..protocol.encode import encode_fields
from .snapshot import open_snapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from typing_extensions import Self

    from ..columnar._pure_batch import ChangeBatch
    from ..policies import Policies
    from ..transcode import InsertFrames
    from ..types import TypeRegistry
    from .imported import SnapshotRange, SnapshotTable
    from .snapshot import ServerSnapshot
    from .walsender import CreatedSlot

_BATCHES = 2  # batches per connection that may wait for the consumer
_POLL = 0.1  # seconds between two checks whether the other side has ended


class SnapshotBatches:
    """Batches of the rows of a snapshot; made by `snapshot`.

    It is an iterator of :class:`pgoutput_fast.ChangeBatch`, and a context manager. The connections
    and threads end at the end of the iteration, after an error, and when you close the iterator.

    Attributes
    ----------
    lsn : int
        The snapshot's LSN. The rows are those of all transactions that were committed before it.
        Their `commit_lsn` is `lsn` - 1.
    time : int
        When the snapshot was taken, in microseconds since 2000-01-01 UTC.
    tables : tuple of SnapshotTable
    """

    def __init__(
        self, server: ServerSnapshot, make_decoder: Callable[[], Any], connections: int
    ) -> None:
        self.lsn = server.lsn
        self.time = server.time
        self.tables = server.tables
        self._copying = _Copying(server, make_decoder, connections)
        self._batches = _batches(server, make_decoder, self._copying)
        # The threads hold no reference to this object, so that they end when the caller drops it.
        self._finalizer = weakref.finalize(self, self._copying.close)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> ChangeBatch:
        if not self._finalizer.alive:
            raise StopIteration
        try:
            return next(self._batches)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<SnapshotBatches of {len(self.tables)} tables>"

    def close(self) -> None:
        """End the connections and threads; drop the batches that were not read."""
        self._finalizer()


class _Copying:
    """The thread that copies, and the queue of batches for the consumer."""

    def __init__(
        self, server: ServerSnapshot, make_decoder: Callable[[], Any], connections: int
    ) -> None:
        self._server = server
        self._make_decoder = make_decoder
        self._waiting: queue.Queue[ChangeBatch] = queue.Queue(_BATCHES * connections)
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(
            target=self._run, name="pgoutput_fast-snapshot", daemon=True
        )

    def batches(self) -> Iterator[ChangeBatch]:
        """Start the copy of all tables, and yield its batches."""
        self._thread.start()
        while True:
            alive = self._thread.is_alive()
            try:
                yield self._waiting.get(timeout=_POLL if alive else 0)
            except queue.Empty:
                if not alive:
                    break
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        self._server.close()

    def _run(self) -> None:
        try:
            self._server.copy(self._take, stop=self._stop)
        except BaseException as error:  # noqa: BLE001 - `batches` raises it
            self._error = error

    def _take(self, part: SnapshotRange, frames: Iterator[InsertFrames]) -> None:
        lsn, time = self._server.lsn - 1, self._server.time
        seq = part.number << 32
        decoder = self._make_decoder()
        for _ in decoder.decode(list(part.table.announced)):
            pass
        for inserts in frames:
            for batch in decoder.decode(inserts.data, inserts.offsets):
                self._put(batch.as_read(lsn, time, seq))
                seq += batch.num_rows

    def _put(self, batch: ChangeBatch) -> None:
        while True:
            with contextlib.suppress(queue.Full):
                self._waiting.put(batch, timeout=_POLL)
                return
            if self._stop.is_set():
                raise RetryableError(
                    "the snapshot was closed before all rows were read", code="stopped"
                )


def _batches(
    server: ServerSnapshot, make_decoder: Callable[[], Any], copying: _Copying
) -> Iterator[ChangeBatch]:
    for table in server.tables:
        yield from _truncate(table, server, make_decoder())
    yield from copying.batches()


def _truncate(table: SnapshotTable, server: ServerSnapshot, decoder: Any) -> Iterator[ChangeBatch]:
    frame = encode_fields("T", options=0, relation_ids=(table.relation_id,))
    for batch in decoder.decode([*table.announced, frame]):
        yield batch.as_read(server.lsn - 1, server.time, 0)


def snapshot(
    dsn: str | None = None,
    publications: Sequence[str] = (),
    *,
    tables: str | Iterable[str] | None = None,
    connections: int = 2,
    binary: bool = False,
    exported: CreatedSlot | None = None,
    range_bytes: int = 64 << 20,
    lock_timeout: float = 30.0,
    slot_timeout: float | None = None,
    policies: Policies | None = None,
    registry: TypeRegistry | None = None,
    target: Literal["arrow", "spark", "portable"] = "arrow",
    columns: Iterable[str] | Mapping[str, Iterable[str]] | None = None,
    **keywords: object,
) -> SnapshotBatches:
    """Read published tables as of one LSN, from which a stream can continue.

    Each table begins with a batch of one row with the operation "truncate", which empties an older
    copy in your target. Then the table's rows come, with the operation "read", in any order, and
    mixed with rows of other tables. `seq` orders the rows of a table: its upper 32 bits are the
    number of the range of blocks from which the row comes.

    Parameters
    ----------
    dsn : str, optional
        Connection string of libpq, or URL.
    publications : list or tuple of str
        Their row filters, column lists and options apply, as to a stream.
    tables : str or iterable of str, optional
        Patterns of ``namespace.name``, with ``*``, ``?`` and ``[...]``. By default all tables.
    connections : int
        How many connections read at the same time. One more makes the temporary slot.
    binary : bool
        Whether the stream that continues from the snapshot has the option `binary`. Columns of
        unknown types then have the same Arrow type as in that stream.
    exported : CreatedSlot, optional
        The slot from which a stream will continue. Make it with
        ``slots.create(connection, …, snapshot=True)`` just before this call, and keep the
        connection open. By default this function makes a temporary slot, and drops it before it
        returns.
    range_bytes : int
        How many bytes of a table one COPY reads. From a server before PostgreSQL 14, one COPY reads
        a whole table.
    lock_timeout : float
        Seconds to wait for the lock of each table, ACCESS SHARE.
    slot_timeout : float, optional
        Seconds to wait until the server has made the temporary slot. The server first waits for the
        end of all transactions that run. By default there is no limit.
    policies, registry, target, columns
        See :class:`pgoutput_fast.ColumnarDecoder`.
    **keywords
        Parameters of libpq by name, which override those of `dsn`.

    Returns
    -------
    SnapshotBatches
        An iterator of ChangeBatch. Its attribute `lsn` is the snapshot's LSN.

    Raises
    ------
    RetryableError
        The server can't be reached now, a time limit passed, or a table was altered at this moment.
    PgOutputError
        The server refuses, an argument is wrong, or no table is selected.
    TypeError
        An argument is of a wrong type.
    """
    from ..columnar.decoder import ColumnarDecoder

    def make_decoder() -> ColumnarDecoder:
        return ColumnarDecoder(
            policies, target=target, columns=columns, encoding=encoding, registry=registry
        )

    encoding = "utf-8"
    make_decoder()  # refuses wrong arguments
    server = open_snapshot(
        ConnectionParameters(dsn, keywords, arguments_of(snapshot)),
        publications,
        tables=tables,
        binary=binary,
        connections=connections,
        exported=exported,
        range_bytes=range_bytes,
        lock_timeout=lock_timeout,
        slot_timeout=slot_timeout,
    )
    encoding = server.encoding
    try:
        if server.lost:
            reasons = "; ".join(sorted(server.lost.values()))
            raise RetryableError(
                f"tables were altered just now ({reasons})",
                code="conflict",
                hint="Take the snapshot again",
            )
        if tables is not None and not server.tables:
            raise PgOutputError(
                f"{tables!r} matches no table that {', '.join(publications)} publishes",
                code="no_table",
                parameter="tables",
            )
        return SnapshotBatches(server, make_decoder, connections)
    except BaseException:
        server.close()
        raise
