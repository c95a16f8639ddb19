"""The server's side of a comparison: its tables in one snapshot at P, and the changes from P on."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import psycopg

from .. import Begin, Decoder, Delete, Insert, Relation, Truncate, Update
from ..capture_options import StreamOptions
from ..catalog import CatalogTable, catalog_of
from ..connections import ConnectionParameters, server_error
from ..errors import DecodeError, PgOutputError
from ..lsn import format_lsn, parse_lsn
from ..names import qualified
from ..objects import UNCHANGED
from ..publications import Publications, read_attributes, row_filters
from ..replication import ReplicationConnection
from ..replication.negotiation import negotiate
from ..replication.receiver import ReceivedFrames, Receiver
from ..replication.server_position import check_target
from ..replication.snapshot import open_snapshot
from ..types import ColumnType, TypeRegistry, column_type
from .sums import Sum
from .texts import NotComparable, joined, literal, quoted

if TYPE_CHECKING:
    from .texts import Texts

_LOCK_TIMEOUT = 10.0  # seconds
_MOST_CHANGED = 200_000
"""Maximum number of changed rows of a table. A table with more is unsettled."""
_PLANNING = (
    "max_parallel_workers_per_gather",
    "jit",
    "enable_seqscan",
    "enable_indexscan",
    "enable_indexonlyscan",
    "enable_bitmapscan",
    "synchronize_seqscans",
)
_NO_TEXT = (
    "it has text that is not valid UTF-8, as in a database with the encoding SQL_ASCII: exclude "
    "the column, or sync with the policy invalid_text=binary"
)
_AT_ONCE = 1000  # rows whose names one statement computes


class ServerTable(NamedTuple):
    """A published table in the server's catalogue at P.

    Attributes
    ----------
    table : CatalogTable
    columns : tuple of str
        The published columns, in the table's order.
    types : dict of str to ColumnType
    key : tuple of str
        Empty if the rows are a multiset: the table has no key, or does not publish all of it.
    row_filter : str
        A condition in SQL; "" for none.
    refused : str
        Why the table can't be compared; "" if it can.
    is_moving : bool
        Whether `refused` is only due to a change of the table at this moment.
    """

    table: CatalogTable
    columns: tuple[str, ...]
    types: dict[str, ColumnType]
    key: tuple[str, ...]
    row_filter: str
    refused: str
    is_moving: bool

    @property
    def source(self) -> str:
        """The table as an SQL source. A partitioned table includes its partitions."""
        only = "" if self.table.kind == "p" else "ONLY "
        return f"{only}{quoted(self.table.namespace)}.{quoted(self.table.name)}"


class Changes(NamedTuple):
    """The changes of a table from P up to a position.

    Attributes
    ----------
    names : set of str
        Names of the changed rows, from before and after each change.
    why : str
        Why the table can't be settled; "" if it can.
    """

    names: set[str]
    why: str


class Moment:
    """The server at P: a temporary slot that begins at P, and the slot's exported snapshot.

    Parameters
    ----------
    parameters : ConnectionParameters
    publications : sequence of str
    timeout : float
        Seconds to wait until the server has created the slot.
    relation_ids : collection of int, optional
        Only these tables.
    check : callable, optional
        Called with the system identifier and the database before the slot is created; it may raise.

    Attributes
    ----------
    lsn : int
        P.
    system_identifier, database : str
    tables : list of ServerTable
        Sorted by name.

    Raises
    ------
    PgOutputError
        The server can't be reached or refuses, or a publication does not exist.
    """

    def __init__(
        self,
        parameters: ConnectionParameters,
        publications: Sequence[str],
        timeout: float,
        relation_ids: Collection[int] | None = None,
        check: Callable[[str, str], None] | None = None,
    ) -> None:
        self._publications = tuple(publications)
        self._slot = f"pgoutput_fast_verify_{os.getpid()}_{secrets.token_hex(4)}"
        self._receiver: Receiver | None = None
        with contextlib.ExitStack() as stack:
            self._replication = stack.enter_context(ReplicationConnection(parameters))
            self.system_identifier = self._replication.system_identifier
            self.database = self._replication.database
            if check is not None:
                check(self.system_identifier, self.database)
            self._replication.check_publications(publications)
            slot = self._replication.make_slot(
                self._slot, temporary=True, snapshot=True, timeout=timeout
            )
            self.lsn = slot.lsn
            # A DSN may name several servers. Only the server of this connection has the snapshot.
            used = self._replication.pgconn
            self._parameters = parameters.of_server(used.host, used.hostaddr, used.port)
            # This locks the tables, and finds tables that have been altered since P.
            snapshot = stack.enter_context(
                open_snapshot(
                    self._parameters, publications, relation_ids=relation_ids, connections=1,
                    exported=slot, lock_timeout=_LOCK_TIMEOUT,
                )
            )  # fmt: skip
            # Read through this connection: another one would wait behind an ALTER TABLE that waits
            # for these locks.
            self.connection = snapshot.connection
            with refusals("can't read at the snapshot"):
                for statement in (
                    # Row security would leave rows out silently. With "off" it raises an error.
                    "SET row_security = off",
                    "SET search_path = ''",
                    "SET standard_conforming_strings = on",
                    # `open_snapshot` sets these to read whole tables; verify also looks up rows.
                    *(f"RESET {name}" for name in _PLANNING),
                ):
                    self.connection.execute(statement.encode())
            self.tables = self._tables(
                {table.relation_id for table in snapshot.tables}, snapshot.lost
            )
            self._resources = stack.pop_all()

    def close(self) -> None:
        """Close the connections, which drops the slot and the locks."""
        if self._receiver is not None:
            self._receiver.close()
        self._resources.close()

    def _tables(self, locked: Collection[int], lost: Mapping[int, str]) -> list[ServerTable]:
        """Return the locked tables, and the lost ones with the reason in `refused`."""
        catalog = catalog_of(self.connection, self._publications).by_id()
        with refusals("can't read the catalogue"):
            registry = TypeRegistry.from_connection(self.connection)
            publications = Publications(self.connection, self._publications)
            attributes = read_attributes(self.connection, list(catalog))
        tables = []
        for published in publications.published():
            relation_id = published.table.oid
            if relation_id not in locked and relation_id not in lost:
                continue  # not selected
            table = catalog[relation_id]
            columns = tuple(
                column.name for column in publications.columns(published, attributes[relation_id])
            )
            types = {
                column.name: column_type(column.type_id, column.type_modifier, registry=registry)
                for column in table.columns
            }
            key = table.key if set(table.key) <= set(columns) else ()
            why, is_moving, row_filter = _lacking(published.actions), False, ""
            if relation_id in lost:
                why, is_moving = lost[relation_id], True
            elif filtered := publications.filters(published):
                # With several publications, a row is published if one of the filters lets it pass.
                with refusals("can't read a row filter"):
                    filters = list(row_filters(self.connection, relation_id, filtered))
                row_filter = " OR ".join(f"({condition})" for condition in filters)
            tables.append(ServerTable(table, columns, types, key, row_filter, why, is_moving))
        return tables

    def confirmed(self, slot: str) -> int:
        """Return the LSN before which a slot's reader has stored all changes.

        That is the acknowledged LSN. If nobody reads the slot now, the server also says whether the
        slot has any change left before P; if not, the result is P.
        """
        with self._parameters.open(replication=False) as connection, refusals("can't ask"):
            row: Any = connection.execute(
                "SELECT confirmed_flush_lsn::text, active FROM pg_catalog.pg_replication_slots "
                "WHERE slot_name = %s AND plugin = 'pgoutput' AND database = current_database()",
                [slot],
            ).fetchone()
            if row is None or row[0] is None:
                return 0
            confirmed = parse_lsn(row[0])
            if row[1] or confirmed >= self.lsn:
                return confirmed
            try:
                options = StreamOptions(protocol=1, streaming=False)
                negotiated = negotiate(
                    options, self._publications, connection.info.server_version
                ).options
                answer = connection.execute(
                    "SELECT EXISTS (SELECT FROM pg_catalog.pg_logical_slot_peek_binary_changes("
                    "%s, %s::pg_lsn, 1, VARIADIC %s))",
                    [
                        slot,
                        format_lsn(self.lsn),
                        [item for pair in negotiated.items() for item in pair],
                    ],
                ).fetchone()
            except psycopg.Error:
                return confirmed  # somebody reads it by now, or it has prepared transactions
            return self.lsn if answer == (False,) else confirmed

    # --- changes ---------------------------------------------------------------------------------

    def check(self, position: int) -> None:
        """Refuse a target's position that is beyond the server's log."""
        # Not by the snapshot's connection: if that is lost, each table gets an error of its own.
        check_target(
            position, self._replication.current_lsn(), in_recovery=self._replication.in_recovery
        )

    def changes(
        self, tables: dict[int, tuple[ServerTable, ServerRows]], until: int, timeout: float
    ) -> dict[int, Changes]:
        """Return the changes of tables in transactions whose commit LSN is in [P, until).

        Parameters
        ----------
        tables : dict
            The compared tables and their rows, by relation id.
        until : int
        timeout : float
            Seconds without progress of the stream after which to give up.

        Raises
        ------
        PgOutputError
            The connection is lost, or the stream makes no progress.
        """
        collectors = {
            relation_id: _ChangeCollector(table, rows)
            for relation_id, (table, rows) in tables.items()
        }
        if until <= self.lsn:
            return {
                relation_id: collector.result() for relation_id, collector in collectors.items()
            }
        self.check(until)
        options = StreamOptions(protocol=1, streaming=False)
        negotiated = negotiate(
            options, self._publications, self._replication.server_version
        ).options
        self._replication.start(self._slot, self.lsn, negotiated)
        receiver = self._receiver = Receiver(self._replication, self.lsn)
        decoder = Decoder()
        deadline = time.monotonic() + timeout
        reached = 0
        while True:
            received = ReceivedFrames()
            receiver.receive(received, 1.0)
            for _, _, _, frame in received.frames:
                message = decoder.decode(frame)
                if isinstance(message, Begin):
                    if message.final_lsn >= until:
                        return {key: collector.result() for key, collector in collectors.items()}
                elif isinstance(message, Truncate):
                    for relation_id in message.relation_ids:
                        if relation_id in collectors:
                            collectors[relation_id].truncate()
                elif (
                    isinstance(message, (Insert, Update, Delete, Relation))
                    and message.relation_id in collectors
                ):
                    collectors[message.relation_id].take(message)
            if received.keepalive is not None and received.keepalive >= until:
                return {key: collector.result() for key, collector in collectors.items()}
            if received.frames or (received.keepalive or 0) > reached:
                reached = max(reached, received.keepalive or 0)
                deadline = time.monotonic() + timeout
            elif time.monotonic() > deadline:
                raise PgOutputError(
                    f"the server's stream did not reach {format_lsn(until)} within {timeout:g} s",
                    code="timed_out",
                )
            receiver.ask_for_keepalive()


class _ChangeCollector:
    """Collects the names of a table's changed rows."""

    def __init__(self, table: ServerTable, rows: ServerRows) -> None:
        self._table, self._rows = table, rows
        self._wanted = table.key or table.columns
        self._indexes: list[int] = []
        self._key: set[int] = set()
        self._pending: list[tuple[str | None, ...]] = []
        self._names: set[str] = set()
        self._why = ""

    def take(self, message: Insert | Update | Delete | Relation) -> None:
        if isinstance(message, Relation):
            self._relation(message)
        elif not self._why:
            try:
                self._take_row(message)
            except DecodeError as error:
                self._why = f"a row changed, and verify can't read its key: {error}"

    def _take_row(self, message: Insert | Update | Delete) -> None:
        before = after = None
        sent_columns: set[int] = set()  # of the old row
        if not isinstance(message, Insert) and message.old is not None:
            before = list(message.old.texts())
            sent_columns = set(range(len(before))) if message.old_kind == "O" else self._key
        if not isinstance(message, Delete):
            after = list(message.new.texts())
            if before is not None:
                for i in sent_columns:
                    # The value did not change: take it from the old row. If a partition has another
                    # replica identity than its root, the old row may have NULL instead.
                    if after[i] is UNCHANGED and before[i] is not None:
                        after[i] = before[i]
        if not isinstance(message, Insert) and not (
            sent_columns.issuperset(self._indexes) if before is not None else self._table.key
        ):
            self._why = "a row changed meanwhile, and the change does not identify it"
            return
        for row in (before, after):
            if row is not None:
                self._add([row[i] for i in self._indexes])

    def _relation(self, relation: Relation) -> None:
        types = {column.name: column.type_id for column in relation.columns}
        here = {column.name: column.type_id for column in self._table.table.columns}
        if types != {name: here[name] for name in self._table.columns}:
            self._why = self._why or "its columns were changed meanwhile"
            return
        order = [column.name for column in relation.columns]
        self._indexes = [order.index(name) for name in self._wanted]
        self._key = {i for i, column in enumerate(relation.columns) if column.is_key}

    def _add(self, values: list[Any]) -> None:
        if UNCHANGED in values:
            self._why = "a row changed meanwhile, and the change does not identify it"
            return
        self._pending.append(tuple(values))
        if len(self._pending) >= _AT_ONCE:
            self._flush()

    def truncate(self) -> None:
        self._why = self._why or "it was truncated meanwhile"

    def _flush(self) -> None:
        if self._pending and not self._why:
            try:
                self._names.update(self._rows.names_of(self._wanted, self._pending))
            except psycopg.Error as error:
                said = str(error).strip().partition("\n")[0]
                self._why = f"the server can't parse a value that it sent: {said}"
            if len(self._names) > _MOST_CHANGED:
                self._why = f"more than {_MOST_CHANGED:,} rows changed meanwhile"
        self._pending = []

    def result(self) -> Changes:
        self._flush()
        return Changes(self._names, self._why)


class ServerRows:
    """The rows of a table at P; see `sums.Rows`.

    Parameters
    ----------
    connection : psycopg.Connection
        In the transaction that has imported the snapshot.
    table : ServerTable
    texts : dict of str to Texts
        The canonical texts of the compared columns, by name, for the values of :meth:`value`.
    """

    def __init__(
        self,
        connection: psycopg.Connection[tuple[object, ...]],
        table: ServerTable,
        texts: dict[str, Texts],
    ) -> None:
        self._connection, self._table, self._texts = connection, table, texts
        every = joined(text.server for text in texts.values())
        name = joined(texts[column].server for column in table.key) if table.key else every
        condition = f" WHERE {table.row_filter}" if table.row_filter else ""
        self._name = _md5(name)
        rows = f"FROM {table.source}{condition}"
        self._digested = f"SELECT {_md5(name)} AS n, {_md5(every)} AS d {rows}"
        self._with_parts = f"SELECT {_md5(name)} AS n, {every} AS d {rows}"

    @staticmethod
    def value(column: str) -> str:
        """Return the SQL expression for a column."""
        return quoted(column)

    def sums(self, digits: int, within: Sequence[str] | None) -> dict[str, Sum]:
        """See `Rows`."""
        number = "sum(('x' || substr(d, {}, 16))::bit(64)::bigint)"
        query = (
            f"SELECT substr(n, 1, {digits}), count(*), {number.format(1)}, {number.format(17)} "  # noqa: S608
            f"FROM ({self._digested}) AS r{self._within(within)} GROUP BY 1"
        )
        return {row[0]: Sum(int(row[1]), int(row[2]), int(row[3])) for row in self._run(query)}

    def digests(self, within: Sequence[str]) -> Iterator[tuple[str, str, int]]:
        """See `Rows`."""
        yield from self._run(self._row_query(self._digested, self._within(within)))

    def named(self, names: Iterable[str]) -> Iterator[tuple[str, str, int]]:
        """See `Rows`."""
        yield from self._run(self._row_query(self._digested, f" WHERE n = {_any(names)}"))

    def parts(self, names: Iterable[str]) -> Iterator[tuple[str, str, int]]:
        """See `Rows`."""
        yield from self._run(self._row_query(self._with_parts, f" WHERE n = {_any(names)}"))

    @staticmethod
    def _within(within: Sequence[str] | None) -> str:
        return f" WHERE substr(n, 1, {len(within[0])}) = {_any(within)}" if within else ""

    @staticmethod
    def _row_query(rows: str, condition: str) -> str:
        return f"SELECT n, d, count(*) FROM ({rows}) AS r{condition} GROUP BY 1, 2"  # noqa: S608

    def _run(self, query: str) -> Iterator[Any]:
        with refusals(f"can't read {qualified(self._table.table)}"):
            try:
                with self._connection.transaction():  # after an error, go on with other tables
                    cursor = self._connection.execute(query.encode())
            except psycopg.errors.CharacterNotInRepertoire as error:
                raise NotComparable(_NO_TEXT) from error
            yield from cursor

    def names_of(
        self, columns: Sequence[str], rows: Sequence[Sequence[str | None]]
    ) -> Iterator[str]:
        """Yield the names of rows, from the stream's texts of some columns.

        Raises
        ------
        psycopg.Error
            The server can't read a text.
        """
        if not columns:  # all rows of a table without columns are equal
            columns, rows = ("",), [(None,)] * len(rows)
        types = {column.name: column.type_name for column in self._table.table.columns} | {
            "": "text"
        }
        values = ", ".join(
            "("
            + ", ".join(
                ("NULL" if text is None else literal(text)) + f"::{types[column]}"
                for column, text in zip(columns, row, strict=True)
            )
            + ")"
            for row in rows
        )
        named = ", ".join(quoted(column or "none") for column in columns)
        query = f"SELECT {self._name} FROM (VALUES {values}) AS r({named})"  # noqa: S608
        with self._connection.transaction():
            for row in self._connection.execute(query.encode()).fetchall():
                yield str(row[0])

    def part_of(self, column: str, text: str | None) -> str:
        """Return the part of a value whose text is in the catalogue."""
        (type_name,) = (
            candidate.type_name
            for candidate in self._table.table.columns
            if candidate.name == column
        )
        value = "NULL" if text is None else literal(text)
        query = (
            f"SELECT {joined([self._texts[column].server])} "  # noqa: S608
            f"FROM (SELECT {value}::{type_name} AS {quoted(column)}) AS r"
        )
        with refusals(f"can't read the default of {column}"):
            (row,) = self._connection.execute(query.encode()).fetchall()
        return str(row[0])


def _lacking(actions: Collection[str]) -> str:
    """Return why no target can have a table's rows; "" if all its changes are published."""
    which = " and ".join(
        f"{action}s"
        for action in ("insert", "update", "delete", "truncate")
        if action not in actions
    )
    return which and f"its {which} are not published, so no target can have its rows"


def _any(names: Iterable[str]) -> str:
    """Return names or their beginnings as an SQL array; they need no quotes, being hexadecimal."""
    return f"ANY('{{{','.join(names)}}}'::text[])"


def _md5(text: str) -> str:
    return f"md5(convert_to({text}, 'UTF8'))"


@contextlib.contextmanager
def refusals(what: str) -> Iterator[None]:
    """Translate psycopg's errors to `PgOutputError`."""
    try:
        yield
    except psycopg.Error as error:
        raise server_error(what, str(error), error.sqlstate) from error
