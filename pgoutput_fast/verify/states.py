"""State tables that :func:`pgoutput_fast.apply.sync` keeps up to date, as targets of verify.

Their rows are compared as they are; nothing is folded. A target stores the position of each table
with the table's rows. So verify reads rows and position together, table by table, and no table has
to wait for another one.
"""

from __future__ import annotations

import contextlib
import json
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..apply.delta_place import DeltaPlace, directory_of, require_deltalake
from ..apply.naming import free_name, stored_table
from ..apply.progress_rows import table_states_of
from ..apply.stored_changes import NO_COLUMN
from ..apply.targets import TARGET_FORMAT
from ..changelog.snapshot_states import SnapshotStates
from ..errors import PgOutputError
from ..lsn import format_lsn
from ..names import shown_table
from ..policies import Policies, policies_of
from ..segments.listing import contents, metadata_of
from .databases import ATTACHED, Database, types_of
from .sums import Sum
from .targets import TargetTable, Tell, ignored
from .texts import NotComparable, NotTheTable, Texts, TextsOf, ValueStorage, literal, part, quoted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from ..apply.targets import TableState
    from ..changelog.snapshot_states import TableSnapshots
    from .moment import ServerTable
    from .sums import Rows

_COPIED = "copied"
_APP = "pgoutput_fast"
"""Beginning of the application id of a sync's commits in the log of a Delta table."""
STATE_ROWS = "state_rows"
"""The name under which DuckDB reads the rows of a Delta table."""
_AT_ONCE = 1000  # rows that are fetched from DuckDB at a time


class TargetTables(NamedTuple):
    """The target state of a sync, as a target stores it.

    Attributes
    ----------
    system_identifier, database : str
        The database from which the changes come.
    lsn : int
        The target's position.
    soft_deletes : str or None
        The column that marks deleted rows.
    patterns : tuple of str or None
        The patterns of the selected tables; None selects all.
    tables : dict of int to TableState
        The table states by relation id.
    policies : Policies
        The policies by which values were written.
    """

    system_identifier: str
    database: str
    lsn: int
    soft_deletes: str | None
    patterns: tuple[str, ...] | None
    tables: dict[int, TableState]
    policies: Policies

    def live(self, rows: str) -> str:
        """Return an SQL source with the rows that are not marked as deleted."""
        if self.soft_deletes is None:
            return rows
        return f"(FROM {rows} WHERE {quoted(self.soft_deletes)} IS NULL)"


class States:
    """State tables. Each is copied at one version; see `VerifiedTarget`.

    Parameters
    ----------
    path : pathlib.Path
        The target.
    segments : pathlib.Path, optional
        The change log from which a sync keeps the target up to date.

    Attributes
    ----------
    policies : Policies or None
        The policies for the comparison; None: those that the target stores.
    """

    def __init__(self, path: Path, segments: Path | None) -> None:
        self._path, self._segments = path, segments
        self.system_identifier = self.database = self.slot = ""
        self.tables: dict[tuple[str, str], int] = {}
        self.paused: frozenset[int] = frozenset()
        self.policies: Policies | None = None
        self.furthest = 0
        self._lsn = self._position = 0
        self._states: Mapping[int, TableSnapshots] = {}
        # Relation id → stored name of each compared column; None if the target lacks the column.
        self._names: dict[int, dict[str, str | None]] = {}
        self._patterns: tuple[str, ...] | None = None
        self._database = Database(path)
        try:
            self._connection = self._database.connection
            with self._database.refusals():
                rows = str(self._database.directory / "rows")
                self._connection.execute(f"ATTACH {literal(rows)} AS {_COPIED}")
                self._connection.execute("SET preserve_insertion_order = false")
        except BaseException:
            self._database.close()
            raise

    def close(self) -> None:
        """See `VerifiedTarget`."""
        self._database.close()

    # --- for subclasses --------------------------------------------------------------------------

    def _reading(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which the target's tables can be read."""
        raise NotImplementedError

    def _source(self) -> TargetTables:
        """Read the target state."""
        raise NotImplementedError

    def _state(self, table_state: TableState, source: TargetTables) -> str:
        """Return an SQL source with the rows of a state table, at the position of `source`."""
        raise NotImplementedError

    def _check_format(self, number: int) -> None:
        if number != TARGET_FORMAT:
            raise PgOutputError(
                f"{self._path} has format {number}, but this version of pgoutput_fast needs "
                f"{TARGET_FORMAT}",
                code="not_supported",
                path=str(self._path),
                hint="Use the version that wrote it",
            )

    # --- the target ------------------------------------------------------------------------------

    def limit_memory(self, memory: int) -> None:
        """Set DuckDB's memory limit in bytes."""
        self._database.limit_memory(memory)

    def identify(self) -> None:
        """See `VerifiedTarget`."""
        with self._reading():
            source = self._source()
        self.system_identifier, self.database = source.system_identifier, source.database
        self._patterns = source.patterns
        metadata = None if self._segments is None else metadata_of(self._segments)
        if metadata is None:
            return
        if (metadata.system_identifier, metadata.database) != source[:2]:
            raise PgOutputError(
                f"{self._path} was not written from the change log {self._segments}, which belongs "
                f"to database {metadata.database!r} of system {metadata.system_identifier}",
                code="another_history",
                path=str(self._path),
            )
        self.slot = metadata.slot

    def wants(self, table: ServerTable) -> bool:
        """See `VerifiedTarget`."""
        name = shown_table(table.table)
        return self._patterns is None or any(
            fnmatchcase(name, pattern) for pattern in self._patterns
        )

    def refresh(self, confirmed: int, tell: Tell = ignored) -> int:  # noqa: ARG002
        """See `VerifiedTarget`."""
        begin = end = 0
        if self._segments is not None:
            # Read the change log before the target, so that the target is not behind this state.
            self._states = SnapshotStates(self._segments).read()
            listing = contents(self._segments)
            begin = listing.segments[-1].end_lsn if listing.segments else listing.begin
            end = max(listing.end, confirmed)
        with self._reading():
            source = self._source()
        self._lsn = self._position = source.lsn
        if source.lsn and source.lsn >= begin:
            # The target has all segments, and no change came between the last one and the end.
            self._position = max(source.lsn, end)
        self.tables = _by_name(source.tables.values())
        self.paused = frozenset(
            key for key, table_state in source.tables.items() if table_state.paused
        )
        self.furthest = max(
            self._position, *(table_state.lsn for table_state in source.tables.values()), 0
        )
        return self._position

    def table(self, table: ServerTable) -> TargetTable:
        """See `VerifiedTarget`."""
        relation_id = table.table.relation_id
        with self._reading():
            source = self._source()
            table_state = source.tables.get(relation_id)
            self._check(relation_id, table_state, source)
            _check_name(table, table_state, source)
            rows = None if table_state is None else self._state(table_state, source)
            storages = {} if rows is None else types_of(self._connection.sql(f"FROM {rows}"))
            names = self._columns(table, table_state)
            _check_no_more({*storages} - {*names.values(), source.soft_deletes, NO_COLUMN})
            texts, left_out = _texts(
                table, table_state, names, storages, self.policies or source.policies
            )
            self._names[relation_id] = names = {name: names[name] for name in texts}
            copied = ", ".join(quoted(name) for name in names.values() if name is not None)
            wanted = f"{copied or 'NULL AS nothing'} FROM {rows}" if rows else "NULL WHERE false"
            self._copy(relation_id, wanted)
        return TargetTable(texts, left_out)

    def _copy(self, relation_id: int, wanted: str) -> None:
        """Copy the selected rows of a table to the temporary database."""
        copy = _copy_of(relation_id)
        self._connection.execute(f"CREATE OR REPLACE TABLE {copy} AS SELECT {wanted}")

    def _check(
        self, relation_id: int, table_state: TableState | None, source: TargetTables
    ) -> None:
        """Refuse a table whose rows can't be compared at the position; update `furthest`."""
        if table_state is not None and table_state.paused is not None:
            raise NotComparable(
                f"it is paused, and its changes wait in the change log: {table_state.paused.reason}"
            )
        if table_state is not None and table_state.stale is not None:
            raise NotComparable(f"it is stale: {table_state.stale}")
        state = self._states.get(relation_id)
        copied = state.snapshots[-1].lsn if state is not None and state.snapshots else 0
        if copied > (0 if table_state is None else table_state.copy_lsn):
            raise NotComparable(
                f"the target does not have its snapshot of {format_lsn(copied)} yet"
            )
        if state is not None and state.all_snapshots[-1].state == "gone":
            raise NotComparable(
                "it left the publications before the capture's last check, and got no snapshot "
                "since then"
            )
        waits = None if state is None else state.waits_from
        if table_state is None:
            if waits is not None:
                raise NotComparable(
                    f"it has been waiting for its snapshot since {format_lsn(waits)}"
                )
            return
        # The target does not store that a table without new changes is up to date.
        lsn = (
            max(table_state.lsn, self._position)
            if table_state.lsn >= self._lsn
            else table_state.lsn
        )
        if lsn < self._position:
            raise NotComparable(f"it has been waiting for its snapshot since {format_lsn(lsn)}")
        self.furthest = max(self.furthest, lsn, source.lsn)

    @staticmethod
    def _columns(table: ServerTable, table_state: TableState | None) -> dict[str, str | None]:
        """Return the stored name of each published column; None if the target lacks the column."""
        live = () if table_state is None else table_state.columns
        by_number = {
            column.number: column.stored_name for column in live if column.number is not None
        }
        by_name = {column.name: column.stored_name for column in live if column.number is None}
        stored: dict[str, str | None] = {}
        for column in table.table.columns:
            stored[column.name] = by_number.get(column.number or 0) or by_name.get(column.name)
        other = [name for name in table.columns if stored[name] is None and name in
                 {column.name for column in live}]  # fmt: skip
        if other:
            raise NotComparable(
                f"the target has an older column {other[0]}: on the server, a column of this name "
                "was created later"
            )
        return {name: stored[name] for name in table.columns}

    def rows(
        self,
        table: ServerTable,
        compared: TargetTable,
        part_of: Callable[[str, str | None], str],
        tell: Tell = ignored,  # noqa: ARG002
    ) -> Rows:
        """See `VerifiedTarget`."""
        relation_id = table.table.relation_id
        return self._rows(relation_id, self._parts(table, compared, part_of), table.key)

    def _rows(self, relation_id: int, parts: dict[str, str], key: Sequence[str]) -> Rows:
        """Return the copied rows of a table."""
        return StateRows(self._database, _copy_of(relation_id), parts, key)

    def _parts(
        self,
        table: ServerTable,
        compared: TargetTable,
        part_of: Callable[[str, str | None], str],
    ) -> dict[str, str]:
        """Return the SQL expression for the part of each compared column."""
        relation_id = table.table.relation_id
        names, added = self._names[relation_id], table.table.added_values
        return {
            column: part(texts.target)
            if names[column] is not None
            # The target lacks the column, so all of its rows are older: any later change would have
            # added the column.
            else literal(part_of(column, added.get(column)))
            for column, texts in compared.texts.items()
        }


class DuckdbStates(States):
    """The state tables in a DuckDB file.

    A sync can't write the file while it is open here. So it is open only while one table is copied
    together with its position.
    """

    def _reading(self) -> contextlib.AbstractContextManager[Any]:
        return self._database.attached()

    def _source(self) -> TargetTables:
        (source,) = self._connection.sql(f"FROM {ATTACHED}._source").to_arrow_table().to_pylist()
        self._check_format(source["format"])
        if source["keep"] == "changes":
            raise without_rows(str(self._path))
        rows = self._connection.sql(f"FROM {ATTACHED}._progress").to_arrow_table()
        return TargetTables(
            source["system_identifier"],
            source["database"],
            source["lsn"],
            source["soft_deletes"],
            None if source["tables"] is None else tuple(source["tables"]),
            {table_state.relation_id: table_state for table_state, _ in table_states_of(rows)},
            policies_of(source["policies"]),
        )

    def _state(self, table_state: TableState, source: TargetTables) -> str:
        return source.live(f"{ATTACHED}.{quoted('state')}.{quoted(table_state.stored_name)}")


class DeltaStates(States):
    """The state tables of a Delta target.

    A table may be ahead of `_progress`, which has the names of its columns. Then an older version
    of the table is read, the one at the position in `_progress`.
    """

    def __init__(self, place: DeltaPlace, segments: Path | None) -> None:
        self._deltalake = require_deltalake()
        self._place = place
        super().__init__(place.path or Path(place.uri), segments)

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        with self._database.refusals(), self._place.refusals("the tables"):
            yield

    def _open(self, directory: str) -> Any:
        uri = f"{self._place.uri}/{directory}"
        return self._deltalake.DeltaTable(uri, storage_options=self._place.options)

    def _is_there(self, directory: str) -> bool:
        uri = f"{self._place.uri}/{directory}"
        return bool(self._deltalake.DeltaTable.is_deltatable(uri, self._place.options))

    def _source(self) -> TargetTables:
        if not self._is_there("_progress"):
            raise PgOutputError(
                f"{self._place.uri} has no tables of a sync", code="not_ours", path=self._place.uri
            )
        progress = self._open("_progress")
        described = json.loads(progress.metadata().description)
        self._check_format(described["format"])
        if described["keep"] == "changes":
            raise without_rows(self._place.uri)
        pairs = [*table_states_of(progress.to_pyarrow_dataset().to_table())]
        self._moved = {
            table_state.relation_id: json.loads(row["moves"]) for table_state, row in pairs
        }
        tables = {table_state.relation_id: table_state for table_state, _ in pairs}
        return TargetTables(
            described["system_identifier"],
            described["database"],
            progress.transaction_version(_APP) or 0,
            described["soft_deletes"],
            None if described["tables"] is None else tuple(described["tables"]),
            tables,
            policies_of(described.get("policies", ())),
        )

    def _state(self, table_state: TableState, source: TargetTables) -> str:
        self._connection.register(
            STATE_ROWS, self._loaded(table_state, source).to_pyarrow_dataset()
        )
        return source.live(STATE_ROWS)

    def _loaded(self, table_state: TableState, source: TargetTables) -> Any:
        """Load a state table at its position in `_progress`."""
        app = "/".join(
            (_APP, source.system_identifier, source.database, str(table_state.relation_id))
        )
        table = self._table(table_state, app)
        while (table.transaction_version(app) or 0) > table_state.lsn:
            table.load_as_version(table.version() - 1)
        return table

    def _table(self, table_state: TableState, app: str) -> Any:
        """Open a table, which may not have been moved to its new name yet."""
        names = [
            table_state.stored_name,
            *(move[2] for move in self._moved[table_state.relation_id]),
        ]
        for name in names:
            directory = f"state/{directory_of(name)}"
            if self._is_there(directory):
                table = self._open(directory)
                if table.transaction_version(app) is not None:
                    return table
        raise NotComparable(
            f"the target has no table state/{directory_of(table_state.stored_name)}"
        )


def without_rows(where: str) -> PgOutputError:
    """Return the error for a target that has only change tables."""
    return PgOutputError(
        f"{where} has only change tables, and no state tables to compare",
        code="not_supported",
        parameter="target",
        hint="Verify the change log that the sync reads",
    )


def _check_name(table: ServerTable, table_state: TableState | None, source: TargetTables) -> None:
    """Refuse a table whose name in the target belongs to another table."""
    relation_id = table.table.relation_id
    name = stored_table(table.table.namespace, table.table.name)
    other = next(
        (candidate for candidate in source.tables.values() if candidate.stored_name == name), None
    )
    if other is not None and other.relation_id != relation_id:
        raise NotTheTable(
            f"the target has another table under {name}, of relation id {other.relation_id}; the "
            f"server's table of this name has relation id {relation_id}"
        )
    own = (free_name(name, relation_id, ()), f"{name}~{relation_id}")
    if table_state is not None and table_state.stored_name not in own:
        raise NotTheTable(f"the target has it under its former name {table_state.stored_name}")


def _check_no_more(columns: set[str]) -> None:
    """Refuse a table that has more columns in the target than the server publishes."""
    if columns:
        raise NotTheTable(
            f"the target has column {min(columns)}, which the server's table does not publish"
        )


def _copy_of(relation_id: int) -> str:
    return f"{_COPIED}.t{relation_id}"


def _by_name(tables: Iterable[TableState]) -> dict[tuple[str, str], int]:
    """Return relation ids by names; a replaced table has ``~`` and its relation id at the end."""
    relation_ids: dict[tuple[str, str], int] = {}
    for table_state in tables:
        is_replaced = table_state.stored_name.endswith(f"~{table_state.relation_id}")
        name = (table_state.namespace, table_state.name)
        if is_replaced:
            name = (table_state.namespace, f"{table_state.name}~{table_state.relation_id}")
        relation_ids[name] = table_state.relation_id
    return relation_ids


def _texts(
    table: ServerTable,
    table_state: TableState | None,
    names: Mapping[str, str | None],
    storages: Mapping[str, ValueStorage],
    policies: Policies,
) -> tuple[dict[str, Texts], dict[str, str]]:
    """Return the canonical texts of columns, and the reasons why other columns have none."""
    texts: dict[str, Texts] = {}
    left_out: dict[str, str] = {}
    followed = set(names.values())
    is_renamed = table_state is not None and any(
        column.number is None and column.stored_name not in followed
        for column in table_state.columns
    )
    for column, name in names.items():
        has_value = column in table.table.added_values and not is_renamed
        if table_state is not None and name is None and not has_value:
            left_out[column] = (
                "it was added or renamed after the target's last change of the table, so its "
                "values in the target's rows are unknown"
            )
            continue
        try:
            # Without a column in the target, the storage does not matter.
            kind = ValueStorage("varchar") if name is None else storages[name]
            texts[column] = TextsOf(policies).column(
                table.types[column], kind, quoted(column), quoted(name or column)
            )
        except NotComparable as error:
            left_out[column] = error.message
    return texts, left_out


def _joined(parts: Sequence[str]) -> str:
    """Join the parts of a row, as a tree: DuckDB refuses expressions that are 1000 deep."""
    if len(parts) < 2:
        return "".join(parts)
    half = len(parts) // 2
    return f"({_joined(parts[:half])} || {_joined(parts[half:])})"


class StateRows:
    """The rows of a table that DuckDB reads; see `sums.Rows`.

    Parameters
    ----------
    database : Database
    source : str
        The rows as an SQL source, for FROM.
    parts : dict of str to str
        The SQL expression for the part of each compared column, in order.
    key : sequence of str
        Empty for a multiset.
    named_rows : mapping of str to object, optional
        Further objects that `source` may name, such as Arrow datasets.
    """

    def __init__(
        self,
        database: Database,
        source: str,
        parts: Mapping[str, str],
        key: Sequence[str],
        named_rows: Mapping[str, Any] | None = None,
    ) -> None:
        self._database = database
        self._named_rows = dict(named_rows or {})
        every = _joined([*parts.values()]) or "''"
        name = _joined([parts[column] for column in key]) or every
        self._digested = f"(SELECT md5({name}) AS n, md5({every}) AS d FROM {source})"  # noqa: S608
        self._with_parts = f"(SELECT md5({name}) AS n, {every} AS d FROM {source})"  # noqa: S608

    def sums(self, digits: int, within: Sequence[str] | None) -> dict[str, Sum]:
        """See `Rows`."""
        halves = ", ".join(
            # A half is a signed integer of 64 bits. HUGEINT has room for the sum.
            f"sum(CASE WHEN {half} >= {1 << 63} THEN {half} - {1 << 64} ELSE {half} END)"
            for half in (f"('0x' || substr(d, {at}, 16))::UBIGINT::HUGEINT" for at in (1, 17))
        )
        query = f"SELECT substr(n, 1, {digits}), count(*), {halves} FROM {self._digested}"  # noqa: S608
        rows = self._run(f"{query}{_beginning(within)} GROUP BY 1", within)
        return {row[0]: Sum(row[1], row[2], row[3]) for row in rows}

    def digests(self, within: Sequence[str]) -> Iterator[tuple[str, str, int]]:
        """See `Rows`."""
        return self._distinct_rows(self._digested, _beginning(within), within)

    def named(self, names: Iterable[str]) -> Iterator[tuple[str, str, int]]:
        """See `Rows`."""
        return self._distinct_rows(self._digested, _NAMED, list(names))

    def parts(self, names: Iterable[str]) -> Iterator[tuple[str, str, int]]:
        """See `Rows`."""
        return self._distinct_rows(self._with_parts, _NAMED, list(names))

    def _distinct_rows(
        self, rows: str, condition: str, names: Sequence[str]
    ) -> Iterator[tuple[str, str, int]]:
        query = f"SELECT n, d, count(*) FROM {rows}{condition} GROUP BY ALL"  # noqa: S608
        return self._run(query, names)

    def _run(self, query: str, names: Sequence[str] | None) -> Iterator[Any]:
        parameters = [] if names is None else [list(names)]
        # A cursor of its own: another result of the connection may still be read.
        with self._database.refusals(), self._database.connection.cursor() as cursor:
            for name, rows in self._named_rows.items():
                cursor.register(name, rows)
            result = cursor.execute(query, parameters)
            while some := result.fetchmany(_AT_ONCE):
                yield from some


_NAMED = " WHERE n IN (SELECT unnest(?::VARCHAR[]))"


def _beginning(within: Sequence[str] | None) -> str:
    if within is None:
        return ""
    length = len(within[0]) if within else 0
    return f" WHERE substr(n, 1, {length}) IN (SELECT unnest(?::VARCHAR[]))"


__all__ = ["STATE_ROWS", "DeltaStates", "DuckdbStates", "StateRows", "States", "TargetTables"]
