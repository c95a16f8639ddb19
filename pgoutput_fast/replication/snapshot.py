"""Read published tables as of one LSN, over several connections, as Insert frames.

The LSN is where a replication slot begins. When the server makes a slot, it exports a snapshot that
has exactly the transactions that the slot will not send. Each connection imports the snapshot, and
the connections share the ranges of the tables' blocks. Rows come by COPY in binary format, and
become frames without a Python object for each row.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import sql

from ..columnar.selection import Selection
from ..connections import (
    SESSION_SETTINGS,
    ConnectionParameters,
    check_publication_names,
    frame_encoding,
    server_error,
)
from ..errors import Argument, PgOutputError, RetryableError
from ..names import qualified
from ..options import count, seconds
from .attempt import unless_stopped
from .imported import ADVICE, CopyPlan, CopySource, Reader, SnapshotRange, SnapshotTable, asking
from .locking import Locking
from .published import read_published
from .walsender import CreatedSlot, ReplicationConnection

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from typing_extensions import Self

    from ..transcode import InsertFrames

    Take = Callable[[SnapshotRange, Iterator[InsertFrames]], object]
    Refused = Callable[[SnapshotTable, PgOutputError], object]

# The first connection has locked all tables. Another connection copies a table only if it gets the
# lock almost at once. Otherwise an ALTER TABLE may wait for the first connection, this connection
# would wait behind the ALTER TABLE, and the copy would never end.
_SHARED_LOCK_TIMEOUT = 0.1  # seconds

_ABOUT = """
SELECT pg_catalog.current_database()::text,
    (SELECT system_identifier::text FROM pg_catalog.pg_control_system()),
    (extract(epoch FROM pg_catalog.transaction_timestamp()) * 1000000)::bigint - 946684800000000,
    pg_catalog.current_setting('block_size')::int
"""


class _Stopped(Exception):
    """Another thread failed, or the snapshot was closed."""


class ServerSnapshot:
    """Published tables as of one LSN; `open_snapshot` makes it.

    It keeps its connections and their locks on the tables until it is closed. It is a context
    manager.

    Attributes
    ----------
    lsn : int
        The snapshot's LSN: a stream from there sends exactly the transactions that are not in the
        snapshot.
    time : int
        When the snapshot was taken, by the server's clock, in microseconds since 2000-01-01 UTC.
    tables : tuple of SnapshotTable
        The tables that can be copied.
    lost : dict of int to str
        By OID: why a table can't be copied from this snapshot, for example because it was rewritten
        since. A later snapshot can have it.
    settings : dict of str to str
        The settings that decide how values look as text, as in a stream's session.
    encoding : str
        The client_encoding, one of these settings.
    server_version : int
    system_identifier, database : str
    """

    def __init__(
        self,
        readers: list[Reader],
        lsn: int,
        about: Sequence[Any],
        lost: dict[int, str],
        plans: Sequence[CopyPlan],
    ) -> None:
        self._readers = readers
        self.lsn = lsn
        self.database, self.system_identifier, self.time, _ = about
        self.server_version = readers[0].connection.info.server_version
        self.settings = {
            name: str(readers[0].run(sql.SQL("SHOW {}").format(sql.Identifier(name)))[0][0])
            for name in SESSION_SETTINGS
        }
        self.encoding = frame_encoding(readers[0].connection.pgconn)
        self.settings["client_encoding"] = self.encoding
        self.lost = lost
        self.tables = tuple(table for table, _, _ in plans)
        self._sources = {oid: source for _, sources, _ in plans for oid, source in sources.items()}
        self._work = _Work([part for _, _, parts in plans for part in parts])
        self._copied = False
        self._closed = threading.Event()
        self._running: list[threading.Thread] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def connection(self) -> psycopg.Connection[tuple[object, ...]]:
        """The first connection, whose transaction has the snapshot and all locks.

        Use it only while nothing is copied. Any other connection may wait for ever behind an ALTER
        TABLE that waits for the locks of this one.
        """
        return self._readers[0].connection

    def __repr__(self) -> str:
        return f"<ServerSnapshot of {len(self.tables)} tables in {self.database!r}>"

    def close(self) -> None:
        """Close the connections. A running `copy` in another thread ends with an error."""
        self._closed.set()
        for thread in self._running:
            if thread is not threading.current_thread():
                thread.join()
        for reader in self._readers:
            reader.close()

    def copy(
        self,
        take: Take,
        finished: Callable[[SnapshotTable], object] | None = None,
        stop: threading.Event | None = None,
        refused: Refused | None = None,
    ) -> None:
        """Copy all tables, with a thread for each connection.

        Parameters
        ----------
        take : callable
            ``take(range, frames)`` is called in one of the threads for each range. `frames` yields
            :class:`pgoutput_fast.transcode.InsertFrames` of some MiB. `take` must read all of them.
        finished : callable, optional
            ``finished(table)`` is called in one of the threads after all ranges of a table were
            taken. For a table without rows, it is called before the copy begins.
        stop : threading.Event, optional
            Set it to end the copy.
        refused : callable, optional
            ``refused(table, error)`` is called in one of the threads when the server refuses to
            copy a table, for example at a damaged row. Ranges of the table may have been taken. The
            other tables are still copied. By default the error is raised.

        Raises
        ------
        RetryableError
            `stop` was set, or the snapshot was closed.
        PgOutputError
            The server refuses, or a connection is lost. An error of `take` or `finished` is raised
            as it is. The first error ends all threads.
        """
        if self._copied:
            raise PgOutputError("a snapshot can be copied only once", code="unfit_input")
        self._copied = True
        errors: list[BaseException] = []

        def check() -> None:
            if errors:
                raise _Stopped
            if self._closed.is_set():
                raise RetryableError("the snapshot was closed before it was copied", code="stopped")
            if stop is not None and stop.is_set():
                raise RetryableError("stopped before the snapshot was copied", code="stopped")

        def run(reader: Reader) -> None:
            try:
                self._copy(reader, take, finished, check, refused)
            except BaseException as error:  # noqa: BLE001 - `copy` raises it
                if not isinstance(error, _Stopped):
                    errors.append(error)
                self._work.stop()
                reader.give_up()

        for table in self.tables:
            if table.ranges == 0 and finished is not None:
                finished(table)
        self._running = [
            threading.Thread(
                target=run, args=[reader], name=f"pgoutput_fast-snapshot-{i}", daemon=True
            )
            for i, reader in enumerate(self._readers)
        ]
        try:
            for thread in self._running:
                thread.start()
            for thread in self._running:
                thread.join()
        except BaseException:
            self._closed.set()
            raise
        if errors:
            raise errors[0]

    def _copy(
        self,
        reader: Reader,
        take: Take,
        finished: Callable[[SnapshotTable], object] | None,
        check: Callable[[], None],
        refused: Refused | None,
    ) -> None:
        """Copy ranges until none is left for this connection; one of the threads."""
        while (part := self._work.next(reader)) is not None:
            check()
            try:
                is_done = self._copy_range(reader, part, take, check)
            except PgOutputError as error:
                if refused is None or error is not reader.refusal:
                    raise
                if self._work.drop(part.table):
                    refused(part.table, error)
                continue
            if is_done and finished is not None:
                finished(part.table)

    def _copy_range(
        self, reader: Reader, part: SnapshotRange, take: Take, check: Callable[[], None]
    ) -> bool:
        """Copy a range, or leave it to the first connection; return whether the table is done."""
        source = self._sources[part.relation_id]
        if part.relation_id not in reader.locked and not self._can_share(reader, part, source):
            return False
        frames = reader.frames(source, part, check)
        take(part, frames)
        if next(frames, None) is not None or reader.is_busy:
            raise PgOutputError(
                f"the function `take` returned before it had read all rows of "
                f"{qualified(part.table)}, range {part.number}",
                code="unfit_input",
                table=qualified(part.table),
            )
        return self._work.done(part)

    def _can_share(self, reader: Reader, part: SnapshotRange, source: CopySource) -> bool:
        """Lock a table on this connection; if this fails at once, give the range back."""
        try:
            reader.lock(part.relation_id, source.name, _SHARED_LOCK_TIMEOUT)
        except psycopg.errors.LockNotAvailable:
            reader.refused.add(part.relation_id)
            self._work.give_back(part)
            return False
        except psycopg.Error as error:
            doing = f"can't copy table {qualified(part.table)}"
            refusal = server_error(
                doing, str(error), error.sqlstate, ADVICE, table=qualified(part.table)
            )
            if not reader.connection.closed:
                reader.refusal = refusal
            self._work.keep()
            raise refusal from error
        self._work.keep()
        return True


class _Work:
    """Shares ranges among connections.

    A connection that can't lock a table gives its range back. The first connection has locked all
    tables. It does not end while others try to lock one, as they may give ranges back.
    """

    def __init__(self, ranges: Iterable[SnapshotRange]) -> None:
        self._waiting: dict[int, deque[SnapshotRange]] = {}
        self._left: dict[int, int] = {}
        for part in ranges:
            self._waiting.setdefault(part.relation_id, deque()).append(part)
            self._left[part.table.relation_id] = self._left.get(part.table.relation_id, 0) + 1
        self._changed = threading.Condition()
        self._tried = 0
        self._stopped = False

    def next(self, reader: Reader) -> SnapshotRange | None:
        """Return a range for a connection; None if there will be no more for it."""
        with self._changed:
            while not self._stopped:
                for relation_id, ranges in self._waiting.items():
                    if relation_id not in reader.refused:
                        part = ranges.popleft()
                        if not ranges:
                            del self._waiting[relation_id]
                        self._tried += relation_id not in reader.locked
                        return part
                if self._waiting or not self._tried:
                    return None
                self._changed.wait()
            return None

    def keep(self) -> None:
        """Note that a connection keeps a range whose table it tried to lock."""
        with self._changed:
            self._tried -= 1
            self._changed.notify_all()

    def give_back(self, part: SnapshotRange) -> None:
        """Take a range back from a connection that could not lock its table."""
        with self._changed:
            if part.table.relation_id in self._left:
                self._waiting.setdefault(part.relation_id, deque()).appendleft(part)
            self._tried -= 1
            self._changed.notify_all()

    def done(self, part: SnapshotRange) -> bool:
        """Note that a range was copied; return whether it was the last one of its table."""
        with self._changed:
            if part.table.relation_id not in self._left:
                return False
            self._left[part.table.relation_id] -= 1
            return self._left[part.table.relation_id] == 0

    def drop(self, table: SnapshotTable) -> bool:
        """Give out no more ranges of a table; return False if it was dropped before."""
        with self._changed:
            self._waiting = {
                oid: ranges for oid, ranges in self._waiting.items() if ranges[0].table != table
            }
            self._changed.notify_all()
            return self._left.pop(table.relation_id, None) is not None

    def stop(self) -> None:
        """Give out no more ranges."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()


def open_snapshot(
    parameters: ConnectionParameters | str | None,
    publications: Sequence[str],
    *,
    relation_ids: Collection[int] | None = None,
    tables: str | Iterable[str] | None = None,
    binary: bool = False,
    connections: int = 2,
    exported: CreatedSlot | None = None,
    range_bytes: int = 64 << 20,
    lock_timeout: float = 30.0,
    slot_timeout: float | None = None,
    stop: threading.Event | None = None,
    refused: dict[int, PgOutputError] | None = None,
) -> ServerSnapshot:
    """Open a snapshot of the tables that publications publish.

    On return, all connections have imported the snapshot, and all tables are locked. So the
    connection that exported the snapshot can run other commands then.

    Parameters
    ----------
    parameters : ConnectionParameters or str or None
        How to connect to the server on which the slot was made.
    publications : list or tuple of str
    relation_ids : collection of int, optional
        Only these tables, by the relation ids in their changes.
    tables : str or iterable of str, optional
        Only these tables, as patterns of ``namespace.name`` with ``*``, ``?`` and ``[...]``.
    binary : bool
        Whether the stream that continues from the snapshot has the option `binary`.
    connections : int
    exported : CreatedSlot, optional
        A slot that was just made with ``snapshot=True``. Keep its connection open. By default this
        function makes a temporary slot, and drops it after the snapshot is imported.
    range_bytes : int
        How many bytes of a table one COPY reads. From a server before PostgreSQL 14, one COPY reads
        a whole table.
    lock_timeout : float
        Seconds to wait for the lock of each table, ACCESS SHARE. If other sessions keep a table
        locked for longer, the table is put into `lost`.
    slot_timeout : float, optional
        Seconds to wait until the server has made the temporary slot. The server first waits for the
        end of all transactions that run. By default there is no limit.
    stop : threading.Event, optional
        Set it to give up.
    refused : dict of int to PgOutputError, optional
        This function adds the errors of tables that the role may not read, by relation id, and
        leaves these tables out. By default it raises the first error.

    Raises
    ------
    RetryableError
        `stop` was set, a time limit has passed, or the server can't be reached at the moment.
    PgOutputError
        An argument is wrong, the server refuses, or the role may not read a table.
    TypeError
        An argument is of a wrong type.
    """
    check_publication_names(publications)
    for option, wait in (("lock_timeout", lock_timeout), ("slot_timeout", slot_timeout)):
        if wait is not None:
            seconds().check(option, wait)
    selection = Selection(tables)
    for option, number in (("connections", connections), ("range_bytes", range_bytes)):
        count(1).check(option, number)
    if type(binary) is not bool:
        raise TypeError(f"binary must be a bool, not {type(binary).__name__}")
    if not isinstance(parameters, ConnectionParameters):
        parameters = ConnectionParameters(parameters)

    def check_stop() -> None:
        if stop is not None and stop.is_set():
            raise RetryableError("stopped before the snapshot was opened", code="stopped")

    with contextlib.ExitStack() as exporting, contextlib.ExitStack() as stack:
        if exported is None:
            slot = unless_stopped(
                lambda: ReplicationConnection(parameters), ReplicationConnection.close, stop
            )
            exporting.enter_context(slot)
            slot.check_publications(publications)
            exported = slot.make_slot(
                f"pgoutput_fast_snapshot_{secrets.token_hex(8)}",
                temporary=True, snapshot=True, stop=stop, timeout=slot_timeout,
            )  # fmt: skip
            used = slot.pgconn
            parameters = parameters.of_server(used.host, used.hostaddr, used.port)
        name = exported.snapshot
        if name is None:
            raise PgOutputError(
                f"slot {exported.name!r} was made without a snapshot",
                code="unfit_input",
                parameter="exported",
                hint=("Make a slot with ", Argument("snapshot", True)),
            )
        readers = []
        for _ in range(connections):
            reader = unless_stopped(lambda: Reader(parameters, name), Reader.close, stop)
            stack.callback(reader.close)
            readers.append(reader)
        exporting.close()
        with asking("can't read the catalogue", readers[0].connection):
            published = read_published(readers[0].connection, publications, binary=binary)
            about: Any = readers[0].run(sql.SQL(_ABOUT))[0]
        published = [table for table in published if selection.wants(table)]
        lost = {}
        if relation_ids is not None:
            wanted = set(relation_ids)
            missing = wanted.difference(table.relation_id for table in published)
            lost = dict.fromkeys(missing, "it is not published, or not selected")
            published = [table for table in published if table.relation_id in wanted]
        with parameters.open(replication=False) as beside:
            locking = Locking(readers[0], beside, lock_timeout, check_stop, refused)
            plans = list(locking.plans(published, lost, max(range_bytes // about[3], 1)))
        snapshot = ServerSnapshot(readers, exported.lsn, about, lost, plans)
        stack.pop_all()
        return snapshot
