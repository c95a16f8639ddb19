"""Simulate a server: the frames that it sends, and the transactions that these frames commit.

A :class:`Server` has a log (WAL). Each change is appended to the log as a record when it is made,
so transactions that are open at the same time interleave. The server sends frames of its log as
PostgreSQL does, in the same order and with the same LSNs in the headers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Literal, NamedTuple

from ..errors import PgOutputError
from . import frames
from .tables import Row, Table

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

_RECORD = 0x40
"""Bytes of a change's WAL record, without its values."""

_PREPARE_RECORD = 0x100
"""Bytes of the WAL record of PREPARE TRANSACTION, which is longer than a commit's record."""


class Sent(NamedTuple):
    """A frame that was sent.

    Fields: lsn (the start and end of the WAL data in the XLogData header; 0 if the server has none
    for the frame), frame, seq (the position of the frame's first row in its transaction, as counted
    from the frames; None if the frame has no rows).
    """

    lsn: int
    frame: bytes
    seq: int | None = None


class MadeChange(NamedTuple):
    """A changed row, Truncate or transactional message of a committed transaction.

    Fields: frame (in the form outside stream chunks, without an xid), lsn (of its WAL record), seq
    (the position of its first row in the transaction; None for a message), tables, subxid.
    """

    frame: bytes
    lsn: int
    seq: int | None
    tables: tuple[Table, ...]
    subxid: int


class CommittedTransaction(NamedTuple):
    """A committed transaction as a consumer must have received it, however it was sent.

    Fields: xid, commit_lsn, end_lsn, commit_time, origin (None or str), gid (None or str), changes.
    """

    xid: int
    commit_lsn: int
    end_lsn: int
    commit_time: int
    origin: str | None
    gid: str | None
    changes: tuple[MadeChange, ...]


class Server:
    """A simulated server with a log and one replication connection.

    >>> server = Server()
    >>> accounts = Table("accounts", {"id": "int4", "note": "text"})
    >>> with server.begin() as transaction:
    ...     transaction.insert(accounts, [1, "a"])
    >>> [chr(sent.frame[0]) for sent in server.sent]
    ['B', 'R', 'I', 'C']

    Parameters
    ----------
    lsn : int
        The LSN at which the log begins.
    xid : int
        The xid of the first transaction.
    time : int
        The time at which the log begins, in microseconds since 2000-01-01 UTC.
    streaming : {"on", "parallel"}
        With "parallel", Stream Aborts have an LSN and a time.
    version : int
        The server's major version. Versions before 15 also send transactions without a change.

    Attributes
    ----------
    sent : list of Sent
        All sent frames.
    committed : list of CommittedTransaction
        All committed transactions, in the order of their commits: what a consumer must have
        received.
    lsn, time : int
        The end of the log, and the clock, which advances by a millisecond at the end of each
        transaction. Both may be set, but the LSN must not decrease.
    """

    def __init__(
        self,
        *,
        lsn: int = 0x1000000,
        xid: int = 700,
        time: int = 800_000_000_000_000,
        streaming: Literal["on", "parallel"] = "on",
        version: int = 18,
    ) -> None:
        self.lsn = lsn
        self.time = time
        self.sent: list[Sent] = []
        self.committed: list[CommittedTransaction] = []
        self._next_xid = xid
        self._parallel = streaming == "parallel"
        self._sends_empty = version < 15
        self._announced: dict[int, list[bytes]] = {}
        self._open: list[MadeTransaction] = []

    @property
    def frames(self) -> list[bytes]:
        """The frames of `sent`."""
        return [sent.frame for sent in self.sent]

    @property
    def lsns(self) -> list[int]:
        """The LSN of each frame of `sent`."""
        return [sent.lsn for sent in self.sent]

    def copy_data(self) -> Iterator[bytes]:
        """Yield the XLogData messages of all frames of `sent`, as a connection receives them."""
        for sent in self.sent:
            yield frames.xlog_data(sent.frame, sent.lsn, send_time=self.time)

    def begin(self, origin: str | None = None, origin_lsn: int = 0) -> MadeTransaction:
        """Begin a transaction.

        The methods of the result end it. A ``with`` block commits it, or aborts it on an exception.

        Parameters
        ----------
        origin : str, optional
            The name of the transaction's replication origin.
        origin_lsn : int
            The transaction's commit LSN on the server of the origin.
        """
        transaction = MadeTransaction(self, self._take_xid(), origin, origin_lsn)
        self._open.append(transaction)
        return transaction

    def message(self, prefix: str, content: bytes) -> None:
        """Send a message that belongs to no transaction, at once.

        Parameters
        ----------
        prefix : str
        content : bytes
        """
        self._write(_RECORD + len(content))
        self._send(self.lsn, frames.message(prefix, content, self.lsn))

    def reconnect(self) -> None:
        """End the connection, and begin another connection at the same position.

        The server then announces relations again, and streams open transactions again from their
        first change on. Nothing in `sent` shows where the new connection begins: tell the consumer.
        """
        self._announced.clear()
        for transaction in self._open:
            transaction._rewind()

    def _take_xid(self) -> int:
        xid = self._next_xid
        self._next_xid = xid + 1 if xid < 0xFFFFFFFF else 3
        return xid

    def _write(self, size: int) -> int:
        """Write a record of at least `size` bytes, and return its start LSN."""
        start = self.lsn
        self.lsn = start + (size + 7 & ~7)
        return start

    def _end_record(self, size: int) -> tuple[int, int, int]:
        """Write the record of a transaction's end; return its start LSN, its end LSN, its time."""
        self.time += 1000
        return self._write(size), self.lsn, self.time

    def _send(self, lsn: int, frame: bytes, seq: int | None = None) -> None:
        self.sent.append(Sent(lsn, frame, seq))


class MadeTransaction:
    """A transaction of a :class:`Server`, open until it is committed, aborted or prepared.

    The server sends it as a whole when it ends, unless :meth:`stream` was called before. Then it is
    a streamed transaction, and a last stream chunk has the changes that were not yet sent.

    Methods raise a PgOutputError if the values don't fit, or if the transaction is not open.
    :meth:`commit` and :meth:`abort` also accept a prepared transaction.

    Attributes
    ----------
    xid : int
    origin : str or None
        The name of the replication origin.
    gid : str or None
        The global identifier, once the transaction is prepared.
    """

    def __init__(self, server: Server, xid: int, origin: str | None, origin_lsn: int) -> None:
        self.xid = xid
        self.origin = origin
        self.gid: str | None = None
        self._server = server
        self._origin_lsn = origin_lsn
        self._state: Literal["open", "prepared", "ended"] = "open"
        self._prepare_end = 0
        self._prepare_time = 0
        self._savepoints: list[Savepoint] = []
        self._waiting: list[MadeChange] = []  # changes that were not yet sent
        self._streamed: list[MadeChange] = []  # changes sent in chunks and not rolled back
        self._streamed_xids: list[int] = []  # their subxids, each once, in the order of the changes
        self._is_streamed = False
        self._announced: dict[int, list[bytes]] = {}  # tables announced in its stream chunks
        self._rows = 0  # number of rows that were sent

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._state == "open":
            if kind is None:
                self.commit()
            else:
                self.abort()

    # Changes.

    def insert(self, table: Table, values: Row) -> None:
        """Insert a row.

        Parameters
        ----------
        table : Table
        values : sequence or mapping
            The row, as :meth:`Table.row` takes it.
        """
        self._change(frames.insert(table, values), (table,))

    def update(
        self, table: Table, values: Row, old: Row | None = None, old_kind: str | None = None
    ) -> None:
        """Update a row.

        Parameters
        ----------
        table : Table
        values, old, old_kind
            As for :func:`pgoutput_fast.testing.update`.
        """
        self._change(frames.update(table, values, old, old_kind), (table,))

    def delete(self, table: Table, old: Row, old_kind: str | None = None) -> None:
        """Delete a row.

        Parameters
        ----------
        table : Table
        old, old_kind
            As for :func:`pgoutput_fast.testing.delete`.
        """
        self._change(frames.delete(table, old, old_kind), (table,))

    def truncate(self, tables: Iterable[Table], options: int = 0) -> None:
        """Truncate tables.

        Parameters
        ----------
        tables : iterable of Table
        options : int
            The sum of 1 for CASCADE and 2 for RESTART IDENTITY.
        """
        named = tuple(tables)
        self._change(frames.truncate(named, options), named)

    def message(self, prefix: str, content: bytes) -> None:
        """Emit a transactional message.

        Parameters
        ----------
        prefix : str
        content : bytes
        """
        self._must_be("open")
        # A server sends such a message with the LSN at the end of its WAL record.
        self._server._write(_RECORD + len(content))
        lsn = self._server.lsn
        frame = frames.message(prefix, content, lsn, flags=1)
        self._waiting.append(MadeChange(frame, lsn, None, (), self._subxid))

    def savepoint(self) -> Savepoint:
        """Begin a subtransaction; all changes belong to it until it ends."""
        self._must_be("open")
        savepoint = Savepoint(self, self._server._take_xid())
        for outer in self._savepoints:
            outer._inside.append(savepoint.xid)
        self._savepoints.append(savepoint)
        return savepoint

    # What is sent.

    def stream(self) -> None:
        """Send the changes that were not yet sent as a stream chunk, which may be empty."""
        self._must_be("open")
        server = self._server
        lsn = self._waiting[0].lsn if self._waiting else server.lsn
        sends_origin = self.origin is not None and not self._is_streamed
        server._send(
            0 if sends_origin else lsn, frames.stream_start(self.xid, not self._is_streamed)
        )
        if sends_origin:
            self._send_origin(lsn, 0)
        self._is_streamed = True
        for change in self._waiting:
            lsn = change.lsn
            if change.subxid not in self._streamed_xids:
                self._streamed_xids.append(change.subxid)
            # A message has the xid of the top-level transaction, a row has its subtransaction's.
            xid = change.subxid if change.tables else self.xid
            for table in change.tables:
                self._announce(table, self._announced, xid)
                if server._announced.get(table.relation_id) != table.announcement():
                    # The table was altered: other transactions must announce it again.
                    server._announced.pop(table.relation_id, None)
            self._send_change(change, frames.in_stream(change.frame, xid))
        server._send(lsn, frames.stream_stop())
        self._streamed += self._waiting
        self._waiting = []

    def commit(self) -> None:
        """Commit the transaction; it may be prepared."""
        server = self._server
        if self._state == "prepared":
            commit_lsn, end_lsn, time = server._end_record(frames.COMMIT_RECORD)
            frame = frames.commit_prepared(self.xid, self.gid or "", commit_lsn, end_lsn, time)
        else:
            self._must_be("open")
            commit_lsn, end_lsn, time = server._end_record(frames.COMMIT_RECORD)
            if self._is_streamed:
                self._send_rest()
                server._announced |= self._announced
                frame = frames.stream_commit(self.xid, commit_lsn, end_lsn, time)
            elif self._waiting or server._sends_empty:
                self._send_whole(commit_lsn, frames.begin(self.xid, commit_lsn, time))
                frame = frames.commit(commit_lsn, end_lsn, time)
            else:
                self._end()
                return
        server._send(end_lsn, frame)
        self._end()
        changes = tuple(_numbered([*self._streamed, *self._waiting]))
        server.committed.append(
            CommittedTransaction(
                self.xid, commit_lsn, end_lsn, time, self.origin, self.gid, changes
            )
        )

    def abort(self) -> None:
        """Roll back the transaction; it may be prepared."""
        server = self._server
        _, end_lsn, time = server._end_record(frames.COMMIT_RECORD)
        if self._state == "prepared":
            frame = frames.rollback_prepared(
                self.xid, self.gid or "", self._prepare_end, end_lsn, self._prepare_time, time
            )
            server._send(end_lsn, frame)
        else:
            self._must_be("open")
            if self._is_streamed:
                subxids = [xid for xid in self._streamed_xids if xid != self.xid]
                self._send_aborts([*subxids, self.xid], end_lsn)
        self._end()

    def prepare(self, gid: str) -> None:
        """Prepare the transaction; :meth:`commit` or :meth:`abort` ends it later.

        Parameters
        ----------
        gid : str
            The transaction's global identifier.
        """
        self._must_be("open")
        server = self._server
        prepare_lsn, end_lsn, time = server._end_record(_PREPARE_RECORD)
        fields = (self.xid, gid, prepare_lsn, end_lsn, time)
        if self._is_streamed:
            self._send_rest()
            server._send(end_lsn, frames.stream_prepare(*fields))
        else:
            self._send_whole(prepare_lsn, frames.begin_prepare(*fields))
            server._send(end_lsn, frames.prepare(*fields))
        self.gid = gid
        self._prepare_end, self._prepare_time = end_lsn, time
        self._end("prepared")

    # Parts of these.

    @property
    def _subxid(self) -> int:
        return self._savepoints[-1].xid if self._savepoints else self.xid

    def _must_be(self, state: str) -> None:
        if self._state != state:
            raise PgOutputError(
                f"the transaction {self.xid} is {self._state}, not {state}", code="unfit_input"
            )

    def _end(self, state: Literal["prepared", "ended"] = "ended") -> None:
        if self._state == "open":
            self._server._open.remove(self)
        self._state = state
        self._savepoints.clear()

    def _rewind(self) -> None:
        """Mark all changes as not yet sent."""
        self._waiting = [*self._streamed, *self._waiting]
        self._streamed.clear()
        self._streamed_xids.clear()
        self._is_streamed = False
        self._announced.clear()
        self._rows = 0

    def _change(self, frame: bytes, tables: tuple[Table, ...]) -> None:
        self._must_be("open")
        lsn = self._server._write(_RECORD + len(frame))
        self._waiting.append(MadeChange(frame, lsn, None, tables, self._subxid))

    def _announce(
        self, table: Table, announcements: dict[int, list[bytes]], xid: int | None = None
    ) -> None:
        """Announce a table, unless this version of it was already announced."""
        announced = table.announcement()
        if announcements.get(table.relation_id) != announced:
            announcements[table.relation_id] = announced
            for frame in table.announcement(xid):
                self._server._send(0, frame)

    def _send_origin(self, lsn: int, origin_lsn: int) -> None:
        if self.origin is not None:
            self._server._send(lsn, frames.origin(self.origin, origin_lsn))

    def _send_change(self, change: MadeChange, frame: bytes) -> None:
        self._server._send(change.lsn, frame, self._rows if change.tables else None)
        self._rows += len(change.tables)

    def _send_whole(self, end: int, begin: bytes) -> None:
        """Send the begin and all changes; without changes, the begin has the LSN of the end."""
        lsn = self._waiting[0].lsn if self._waiting else end
        self._server._send(0 if self.origin is not None else lsn, begin)
        self._send_origin(lsn, self._origin_lsn)
        for change in self._waiting:
            for table in change.tables:
                self._announce(table, self._server._announced)
            self._send_change(change, change.frame)

    def _send_rest(self) -> None:
        if self._waiting:
            self.stream()

    def _send_aborts(self, xids: Iterable[int], lsn: int) -> None:
        time = self._server.time
        fields = (lsn, time) if self._server._parallel else (None, None)
        for xid in xids:
            self._server._send(lsn, frames.stream_abort(self.xid, xid, *fields))

    def _roll_back(self, savepoint: Savepoint) -> None:
        """Roll back a subtransaction and those inside it."""
        self._release(savepoint)
        server = self._server
        server._write(frames.COMMIT_RECORD)
        gone = [*savepoint._inside, savepoint.xid]
        self._waiting = [change for change in self._waiting if change.subxid not in gone]
        aborted = [xid for xid in gone if xid in self._streamed_xids]
        if not aborted:
            return
        # A message carries the xid of the top-level transaction. So messages before the first row
        # of the subtransaction stay: no consumer can know that they belonged to it.
        for i, change in enumerate(self._streamed):
            if change.tables and change.subxid in gone:
                del self._streamed[i:]
                break
        self._streamed_xids = [xid for xid in self._streamed_xids if xid not in gone]
        self._announced.clear()
        self._send_aborts(aborted, server.lsn)

    def _release(self, savepoint: Savepoint) -> None:
        self._must_be("open")
        if savepoint not in self._savepoints:
            raise PgOutputError(
                f"the subtransaction {savepoint.xid} has ended before", code="unfit_input"
            )
        del self._savepoints[self._savepoints.index(savepoint) :]


class Savepoint:
    """A subtransaction of a :class:`MadeTransaction`.

    A ``with`` block releases it at the end, or rolls it back on an exception.

    Attributes
    ----------
    xid : int
    """

    def __init__(self, transaction: MadeTransaction, xid: int) -> None:
        self.xid = xid
        self._transaction = transaction
        self._inside: list[int] = []  # xids of the subtransactions inside it

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self in self._transaction._savepoints:
            if kind is None:
                self.release()
            else:
                self.rollback()

    def release(self) -> None:
        """End the subtransaction; its changes become its parent's.

        Raises
        ------
        PgOutputError
            The subtransaction has ended already.
        """
        self._transaction._release(self)

    def rollback(self) -> None:
        """Roll back its changes, and those of the subtransactions inside it.

        The server sends a Stream Abort for each subtransaction with streamed changes.

        Raises
        ------
        PgOutputError
            The subtransaction has ended already.
        """
        self._transaction._roll_back(self)


def _numbered(changes: Iterable[MadeChange]) -> Iterator[MadeChange]:
    """Number the changes: `seq` is the position of their first row in the transaction."""
    seq = 0
    for change in changes:
        yield change._replace(seq=seq) if change.tables else change
        seq += len(change.tables)
