"""A connection that has imported a snapshot, and copies tables as the snapshot sees them."""

from __future__ import annotations

import contextlib
import dataclasses
import select
from typing import TYPE_CHECKING, Any, NamedTuple

import psycopg
from psycopg import pq, sql

from .._impl import twin
from ..connections import (
    ConnectionParameters,
    answered,
    frame_encoding,
    result_error,
    server_error,
)
from ..errors import PgOutputError
from ..names import qualified
from ..transcode import inserts_of_copy
from .waiter import COPY_NAP, IDLE_POLL, Waiter, forget_notifications, take_input, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ..transcode import InsertFrames

_FRAMES_BYTES = 2 << 20  # bytes of COPY data that become one buffer of frames
_MOST_ROWS = 1 << 32  # a row's number in its range is the lower half of an int64, `seq`

# The settings of a connection that copies. No timeout may end its commands. The planner has to read
# a range of blocks by a TID range scan, whatever the statistics say. With an empty search_path, the
# server qualifies all names.
_COPY_SETTINGS = {
    "row_security": "off",
    "search_path": "",
    "statement_timeout": "0",
    "idle_in_transaction_session_timeout": "0",
    "lock_timeout": "0",
    "synchronize_seqscans": "off",
    "max_parallel_workers_per_gather": "0",
    "jit": "off",
    "enable_seqscan": "off",
    "enable_indexscan": "off",
    "enable_indexonlyscan": "off",
    "enable_bitmapscan": "off",
}

# Only rows come in the encoding of frames. Commands and messages are in UTF-8.
_BEGIN_COPY = sql.SQL("SAVEPOINT copying; SET LOCAL client_encoding = {}")
_UNDO_COPY = sql.SQL("ROLLBACK TO SAVEPOINT copying; RELEASE SAVEPOINT copying")
_END_COPY = sql.SQL("RELEASE SAVEPOINT copying; SET LOCAL client_encoding = 'UTF8'")

SEE_DOCTOR = "Run pgoutput-fast doctor for all rights that it lacks, and the SQL to grant them"
_OTHER_COMMAND = "Keep the connection that made the slot open, and run no other command in it"
ADVICE = {
    "22021": (
        "Rename the tables, columns and types whose names are not valid UTF-8. A database with "
        "the encoding SQL_ASCII allows such names"
    ),
    "22023": _OTHER_COMMAND,
    "42704": _OTHER_COMMAND,
    "42501": f"Grant the role SELECT on the table. {SEE_DOCTOR}",
    "53200": "Raise max_locks_per_transaction: each table that is copied is locked",
    "57014": "Take the snapshot again: an administrator or a timeout has cancelled the copy",
}
CODES = {"22023": "unfit_input", "42704": "unfit_input"}


@dataclasses.dataclass(frozen=True)
class SnapshotTable:
    """A table of a snapshot.

    Attributes
    ----------
    relation_id : int
        The OID in the table's changes. For partitions that are published by their root, the root's.
    namespace, name : str
    announced : tuple of bytes
        The frames with which a stream announces the table, in the form of protocol version 1: Type
        messages, then the Relation.
    rows : int or None
        The number of rows in the server's statistics; None if there are no statistics.
    bytes : int
        The size of the rows on the server's disk, without TOAST.
    ranges : int
        The number of ranges in which the table is copied.
    """

    relation_id: int
    namespace: str
    name: str
    announced: tuple[bytes, ...]
    rows: int | None
    bytes: int
    ranges: int


class SnapshotRange(NamedTuple):
    """A range of blocks of one table, which one COPY reads.

    Attributes
    ----------
    table : SnapshotTable
    number : int
        The number of the range in the table, from 1, counted across all partitions.
    relation_id : int
        The OID of the table that stores the rows: a partition, or `table` itself.
    first_block : int
    end_block : int or None
        The block after the last one; None if the range has all blocks from `first_block` on.
    """

    table: SnapshotTable
    number: int
    relation_id: int
    first_block: int
    end_block: int | None


class CopySource(NamedTuple):
    """How to read one table that stores rows: a partition, or a table without partitions."""

    name: sql.Identifier
    columns: sql.Composable
    filter: sql.Composable | None
    formats: str


class CopyPlan(NamedTuple):
    """How to copy a table: the tables that store its rows, by OID, and their ranges."""

    table: SnapshotTable
    sources: dict[int, CopySource]
    ranges: list[SnapshotRange]


class Reader:
    """A connection that has imported an exported snapshot.

    Parameters
    ----------
    parameters : ConnectionParameters
    snapshot : str
        The name of the exported snapshot.
    """

    def __init__(self, parameters: ConnectionParameters, snapshot: str) -> None:
        self.connection = parameters.open(replication=False)
        self.locked: set[int] = set()
        self.refused: set[int] = set()
        """OIDs of tables that this connection can't lock without waiting."""
        self.refusal: PgOutputError | None = None
        """The error of a refused table; the connection can still copy other tables."""
        self._has_path = False
        try:
            with asking("can't import the snapshot", self.connection):
                settings = dict(_COPY_SETTINGS)
                if self.connection.info.server_version >= 170000:
                    settings["transaction_timeout"] = "0"
                for name, value in settings.items():
                    self.run(sql.SQL("SET {} = {}").format(sql.Identifier(name), value))
                self.run(sql.SQL("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"))
                self.run(sql.SQL("SET TRANSACTION SNAPSHOT {}").format(snapshot))
            self._waiter = Waiter(self.connection.pgconn, COPY_NAP)
        except BaseException:
            self.connection.close()
            raise

    def run(self, command: sql.Composable) -> list[tuple[object, ...]]:
        """Run a command; return its rows, or those of the first of several commands."""
        cursor = self.connection.execute(command.as_bytes(self.connection))
        return cursor.fetchall() if cursor.description else []

    def close(self) -> None:
        """Close the connection, which releases its locks."""
        self._waiter.close()
        self.connection.close()

    def give_up(self) -> None:
        """Cancel the running command, and close the connection."""
        with contextlib.suppress(psycopg.Error):
            if self.is_busy:
                self.connection.pgconn.get_cancel().cancel()
        self.connection.close()

    @property
    def is_busy(self) -> bool:
        """Whether a command is still running."""
        status = self.connection.pgconn.transaction_status
        return status == pq.TransactionStatus.ACTIVE

    def lock(self, relation_id: int, name: sql.Identifier, seconds: float) -> None:
        """Lock a table ACCESS SHARE, and check that its rows can be read.

        Raises
        ------
        psycopg.Error
            The rows can't be read, or the lock was not free within `seconds`. The transaction is
            still usable.
        RetryableError
            The server does not answer.
        """
        try:
            with answered(self.connection.pgconn, works=seconds):
                self.run(
                    sql.SQL(
                        "SAVEPOINT locking; SET LOCAL lock_timeout = {}; "
                        "SELECT FROM ONLY {} LIMIT 0; SET LOCAL lock_timeout = 0; "
                        "RELEASE SAVEPOINT locking"
                    ).format(max(1, round(seconds * 1000)), name)
                )
        except psycopg.Error:
            if not self.connection.closed:
                self.run(sql.SQL("ROLLBACK TO SAVEPOINT locking; RELEASE SAVEPOINT locking"))
            raise
        self.locked.add(relation_id)

    def use_path(self, *, of_stream: bool) -> None:
        """Set the search_path: the default one, as in a stream's session, or the empty one.

        The path matters for names in values, such as a regclass: the server qualifies a name if the
        path does not have its schema.
        """
        if of_stream != self._has_path:
            path = "RESET search_path" if of_stream else "SET search_path = ''"
            self.run(sql.SQL(path))
            self._has_path = of_stream

    def frames(
        self, source: CopySource, part: SnapshotRange, check: Callable[[], None]
    ) -> Iterator[InsertFrames]:
        """Copy a range, and yield its rows as Insert frames. While waiting, call `check`.

        Raises
        ------
        PgOutputError
            The server refuses, the connection is lost, or `check` raises.
        """
        table = qualified(part.table)
        doing = f"can't copy table {table}"
        pgconn, pack = self.connection.pgconn, twin("replication._libpq_frames").pack_copy_rows
        try:
            self.use_path(of_stream="t" in source.formats)
            command = _copy_command(source, part).as_bytes(self.connection)
            self.run(_BEGIN_COPY.format(frame_encoding(pgconn)))
            pgconn.send_query(command)
            self._expect(pq.ExecStatus.COPY_OUT, table, check)
            data = bytearray()
            header, ended = True, False
            rows = length = came = 0
            while length >= 0:
                check()
                length = pack(pgconn, data, max(_FRAMES_BYTES - len(data), 1))
                forget_notifications(pgconn)
                if length == 0:
                    self._waiter.wait(None, collects=bool(data), came=len(data) > came)
                    came = len(data)
                    continue
                inserts = inserts_of_copy(
                    data, part.table.relation_id, source.formats, header=header
                )
                del data[: inserts.consumed]
                came, ended = len(data), inserts.ended
                header = header and inserts.consumed == 0
                if len(inserts.offsets) > 1:
                    rows += len(inserts.offsets) - 1
                    if rows > _MOST_ROWS:
                        raise PgOutputError(
                            f"{doing}: range {part.number} has over {_MOST_ROWS} rows",
                            code="out_of_memory",
                            table=table,
                            hint="Give a smaller range_bytes",
                        )
                    yield inserts
            self._waiter.rest()
            sent = self._expect(pq.ExecStatus.COMMAND_OK, table, check).command_tuples
            if not ended or data or rows != sent:
                raise PgOutputError(
                    f"{doing}: the server sent {sent} rows, but {rows} arrived, "
                    f"{'with' if ended else 'without'} the end of the data: something between "
                    f"server and client has changed the data",
                    code="incomplete",
                    table=table,
                )
            while self._result(check) is not None:
                pass
            self.run(_END_COPY)
        except psycopg.Error as error:
            raise server_error(doing, str(error), error.sqlstate, ADVICE, CODES, table) from error
        finally:
            # The next answers are small, and psycopg itself waits for them.
            with contextlib.suppress(OSError):  # the connection may be closed
                self._waiter.rest()

    def _expect(
        self, status: pq.ExecStatus, table: str, check: Callable[[], None]
    ) -> pq.abc.PGresult:
        doing = f"can't copy table {table}"
        result = self._result(check)
        if result is None:
            raise PgOutputError(
                f"{doing}: the server sent no result", code="server_refused", table=table
            )
        if result.status != status:
            error = result_error(doing, result, ADVICE, CODES, table)
            while self._result(check) is not None:
                pass
            # Unless the server has ended the connection.
            if self.connection.pgconn.transaction_status == pq.TransactionStatus.INERROR:
                self.run(_UNDO_COPY)
                self.refusal = error
            raise error
        return result

    def _result(self, check: Callable[[], None]) -> pq.abc.PGresult | None:
        pgconn = self.connection.pgconn
        while pgconn.is_busy():
            check()
            wait_for(pgconn, select.POLLIN, IDLE_POLL)
            take_input(pgconn)
        return pgconn.get_result()


def ask(
    connection: psycopg.Connection[tuple[object, ...]], query: str, *parameters: object
) -> list[Any]:
    """Run a query, and return its rows."""
    return connection.execute(query.encode(), parameters).fetchall()


@contextlib.contextmanager
def asking(doing: str, connection: psycopg.Connection[tuple[object, ...]]) -> Iterator[None]:
    """Raise an error of the server in this block, or its silence, as a PgOutputError."""
    try:
        with answered(connection.pgconn):
            yield
    except psycopg.Error as error:
        raise server_error(doing, str(error), error.sqlstate, ADVICE, CODES) from error


def _copy_command(source: CopySource, part: SnapshotRange) -> sql.Composed:
    """Return the COPY command of a range."""
    conditions = []
    for operator, block in ((">=", part.first_block or None), ("<", part.end_block)):
        if block is not None:
            conditions.append(
                sql.SQL("ctid OPERATOR(pg_catalog.{}) {}::pg_catalog.tid").format(
                    sql.SQL(operator), f"({block},0)"
                )
            )
    if source.filter is not None:
        conditions.append(sql.SQL("({})").format(source.filter))
    where = sql.SQL(" WHERE ") if conditions else sql.SQL("")
    return sql.SQL("COPY (SELECT {} FROM ONLY {}{}{}) TO STDOUT (FORMAT binary)").format(
        source.columns, source.name, where, sql.SQL(" AND ").join(conditions)
    )
