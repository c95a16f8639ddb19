"""The target that keeps tables in a DuckDB file. Each window is one transaction.

The file is open only while a window is written, because no other process can read it meanwhile.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from .._disk import claim_directory, fsync_path
from ..errors import Argument, PgOutputError
from ..names import distinct_names, qualified
from ..segments.reader import CommitRecord
from .duckdb_file import DuckdbFile, lacks_memory
from .duckdb_sql import PROGRESS_TABLE, SOURCE_TABLE, empty, quoted, same, versioned
from .duckdb_views import remake_views
from .progress_rows import progress_rows, table_states_of
from .stored_changes import joined
from .targets import (
    CHANGES_ALONE,
    CHANGES_DELETED,
    DELETED,
    DELETED_AT,
    TARGET_FORMAT,
    AddedColumn,
    IncompleteError,
    NoChanges,
    RememberedOptions,
    Removed,
    Renamed,
    Retyped,
    TableError,
    TableState,
    TargetError,
    TargetOrigin,
    TargetState,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from concurrent.futures import Future
    from pathlib import Path

    from .folding import NetChanges
    from .targets import Alteration, ChangeWriter

DECODED_FOR = "duckdb"
"""The target for which `ColumnarDecoder` decodes."""

_MOST_PENDING_WRITES = 2
"""Maximum number of writes that wait while the next changes are read."""
_FLUSHED = 8 << 20
"""Bytes of a table's changes after which they are written."""
_SHOWN = 3
"""Number of rows that an error shows."""

_NO_OPTIONS = RememberedOptions()
# Extra columns beside those of a table. The server's names have at most 63 bytes: no conflict.
_COUNT, _ROW, _TIME, _PRESENT, _ABSENT, _UPSERT = (
    f"{'#' * 64}{name}" for name in ("count", "row", "time", "present", "absent", "upsert")
)


class DuckdbTarget:
    """A `Target` in a DuckDB file.

    Parameters
    ----------
    path : pathlib.Path
        The file, which is created if it does not exist.
    remembered : RememberedOptions
    memory, lock_timeout
        See `DuckdbFile`.

    Attributes
    ----------
    file : DuckdbFile
    """

    threads = 2
    """Two: one table is folded while another one is written."""
    is_transactional = True

    def __init__(
        self,
        path: Path,
        remembered: RememberedOptions = _NO_OPTIONS,
        *,
        memory: int | None = None,
        lock_timeout: float | None = None,
    ) -> None:
        try:
            import duckdb
        except ImportError as error:
            raise PgOutputError(
                f"duckdb is not installed ({error})", code="missing_package",
                hint="Install the extra pgoutput-fast[duckdb]",
            ) from error  # fmt: skip
        self._duckdb = duckdb
        self.path = path
        self.file = DuckdbFile(path, memory, lock_timeout)
        self.remembered = remembered
        self.troubles: dict[int, PgOutputError] = {}
        self._connection: Any = None
        self._catalog = ""
        self._has_written = False
        self._lock: int | None = None
        self._writers: list[_DuckdbChanges] = []
        self._guard = threading.RLock()
        self._behind = ThreadPoolExecutor(1, "pgoutput_fast-duckdb")
        self._coming: deque[Future[None]] = deque()
        self._failed: TableError | None = None  # the first error of the open transaction
        self._tables: set[tuple[str, str]] = set()  # schema and name of each table, in a window
        self.altered: set[str] = set()  # state tables whose columns or names a window has changed
        # Caches of what DuckDB says of its tables and types. Only this target changes these.
        self.fields: dict[str, dict[str, str]] = {}
        self._types: dict[pa.DataType, str] = {}

    # --- the file --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def refusals(self) -> Iterator[None]:
        """Translate DuckDB's errors to `PgOutputError`."""
        try:
            yield
        except self._duckdb.Error as error:
            if lacks_memory(error):
                said = str(error).partition("\n")[0]
                raise TargetError(
                    f"can't write {self.path}: DuckDB needs more than {self.file.memory} bytes of "
                    f"memory ({said}). It holds 2,048 rows of each table with long values, and all "
                    "tables that a transaction creates or alters",
                    code="out_of_memory", path=str(self.path),
                    hint=("Nothing is lost. Give more ", Argument("duckdb_memory"),
                          (". If a window creates or alters tables in several transactions, "
                           "a smaller "), Argument("window_bytes"), " helps, too"),
                ) from error  # fmt: skip
            whole = self._duckdb.IOException, self._duckdb.FatalException
            kind = TargetError if isinstance(error, whole) else PgOutputError
            code = "unfit_value" if isinstance(error, self._duckdb.DataError) else "io_failed"
            raise kind(f"can't write {self.path}: {error}", code=code) from error

    @contextlib.contextmanager
    def telling(self, table_state: TableState) -> Iterator[None]:
        """Add the table to an error, because the error may come out in a call for another table.

        After the first error, DuckDB refuses all further statements of the transaction. So each
        later call raises the first error again.
        """
        try:
            yield
        except (TargetError, IncompleteError, TableError):
            raise
        except PgOutputError as error:
            if self._failed is None:
                self._failed = TableError(
                    table_state,
                    error.message,
                    code=error.code,
                    hint=error.hint,
                    table=qualified(table_state),
                )
            raise self._failed from error

    def _connect(self, *, read_only: bool = False) -> Any:
        connection = self.file.connect(self._duckdb, read_only=read_only)
        ((self._catalog,),) = connection.execute("SELECT current_database()").fetchall()
        return connection

    def claim(self) -> None:
        """See `Target`."""
        if self._lock is None:
            # A lock beside the file: DuckDB locks the file itself only while it is open.
            self._lock = claim_directory(
                self.path.with_name(f"{self.path.name}.lock"), "sync", "tables", str(self.path)
            )

    def open(self, origin: TargetOrigin) -> TargetState:
        """See `Target`."""
        self.claim()
        is_new = not self.path.exists()
        with self.refusals(), contextlib.closing(self._connect()) as connection:
            names = {name for (name,) in connection.execute(
                "SELECT schema_name || '.' || table_name FROM duckdb_tables()"
            ).fetchall()}  # fmt: skip
            if not names:
                connection.execute("BEGIN")
                schemas = (f"CREATE SCHEMA {self.named(schema)}" for schema in ("changes", "state"))
                for statement in (PROGRESS_TABLE, SOURCE_TABLE, *schemas):
                    connection.execute(statement)
                connection.execute(
                    "INSERT INTO _source VALUES (?, ?, ?, 0, ?, ?, NULL, NULL, ?, ?)",
                    [TARGET_FORMAT, *origin, *self._described],
                )
                connection.execute("COMMIT")
            else:
                self._check_own(names)
            if is_new:
                fsync_path(self.path.parent)
            target_state = self._read(connection, origin, names)
            if not target_state.lsn:
                # No change was skipped yet under other options, so the target may take new ones.
                connection.execute(
                    "UPDATE _source SET lsn = 0, soft_deletes = ?, tables = ?, newest_lsn = NULL, "
                    "policies = ?, keep = ?",
                    self._described,
                )
            return target_state._replace(is_new=is_new)

    @property
    def _described(self) -> list[Any]:
        """The values of `remembered` in the table `_source`."""
        remembered = self.remembered
        return [
            remembered.soft_deletes,
            remembered.listed,
            remembered.policy_texts,
            remembered.keep or "both",
        ]

    def peek(self, origin: TargetOrigin) -> TargetState:
        """See `Target`."""
        if not self.path.exists():
            return TargetState(0, {})
        with self.refusals(), contextlib.closing(self._connect(read_only=True)) as connection:
            rows = connection.execute(
                "SELECT schema_name || '.' || table_name FROM duckdb_tables()"
            ).fetchall()
            if not rows:
                return TargetState(0, {})
            names = {name for (name,) in rows}
            self._check_own(names)
            return self._read(connection, origin, names)

    def _check_own(self, names: set[str]) -> None:
        """Refuse a file that no sync has made."""
        if "main._source" not in names:
            raise PgOutputError(
                f"{self.path} is not a sync target: it has other tables", code="not_ours",
                path=str(self.path), hint="Give another file",
            )  # fmt: skip

    def _read(self, connection: Any, origin: TargetOrigin, names: set[str]) -> TargetState:
        (source,) = connection.execute("FROM _source").fetchall()
        if source[0] != TARGET_FORMAT:
            raise PgOutputError(
                f"{self.path} has target format {source[0]}, but this version of pgoutput_fast "
                f"needs {TARGET_FORMAT}",
                code="not_supported", path=str(self.path),
                hint="Use the version that wrote it, or start with a new target",
            )  # fmt: skip
        if source[1:3] != tuple(origin):
            raise PgOutputError(
                f"{self.path} has tables of database {source[2]!r} (system identifier "
                f"{source[1]}), but the changes come from {origin.database!r} "
                f"({origin.system_identifier})",
                code="another_history", path=str(self.path), hint="Give another file",
            )  # fmt: skip
        remembered = RememberedOptions.of(source[4], source[5], source[8], source[9])
        tables = {}
        progress_rows = connection.sql("FROM _progress").to_arrow_table()
        for table_state, _ in table_states_of(progress_rows):
            lost = _lost(table_state, remembered, names)
            tables[table_state.relation_id] = (
                table_state._replace(stale=lost) if lost else table_state
            )
        if not tables and not self.remembered.is_like(remembered):
            return TargetState(0, {})
        self.remembered = self.remembered.check(str(self.path), remembered)
        lsn, time_ = source[6:8]
        newest = CommitRecord(lsn, time_) if lsn else None
        return TargetState(source[3], tables, newest, policies=remembered.policies)

    def close(self) -> None:
        """See `Target`."""
        self.abort()
        self._behind.shutdown()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    # --- windows ---------------------------------------------------------------------------------

    def begin(self) -> None:
        """See `Target`."""
        if self._has_written and not self.path.exists():
            raise PgOutputError(
                f"{self.path} was removed or renamed while sync was running",
                code="missing_path", path=str(self.path),
                hint="Restore it, and start sync again; without this file, sync starts with a new "
                "target",
            )  # fmt: skip
        with self.refusals():
            self._connection = self._connect()
            self._connection.execute("BEGIN")
            self._tables = set(
                self._connection.execute(
                    "SELECT schema_name, table_name FROM duckdb_tables()"
                ).fetchall()
            )

    def abort(self) -> None:
        """See `Target`."""
        self._writers = []
        self.fields.clear()
        self.altered.clear()
        self._close()
        self._failed = None

    def _close(self) -> None:
        """Close the file, so that other processes can read it."""
        while self._coming:
            self._coming.popleft().exception()
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def commit(self, target_state: TargetState) -> None:
        """See `Target`."""
        for writer in self._writers:
            writer.flush()
        with self.alone():
            self._commit(target_state)
        self._has_written = True
        self.altered.clear()
        self._writers = []
        self._close()

    def _commit(self, target_state: TargetState) -> None:
        rows = pa.Table.from_batches([progress_rows(target_state.tables.values())])
        self.run("DELETE FROM _progress")
        self.run("INSERT INTO _progress BY NAME FROM rows", rows=rows)
        lsn, time_ = ("NULL", "NULL") if target_state.newest is None else target_state.newest
        self.run(
            f"UPDATE _source SET lsn = {target_state.lsn}, newest_lsn = {lsn}, "
            f"newest_time = {time_}"
        )
        remake_views(
            self.run, self._catalog, self._tables, target_state.tables.values(), self.altered
        )
        self.run("COMMIT")

    def keep(self) -> None:
        """See `Target`."""
        with self.refusals(), contextlib.closing(self._connect()) as connection:
            connection.execute("UPDATE _source SET policies = ?", [self.remembered.policy_texts])

    def later(self, write: Callable[[], None]) -> None:
        """Write in the background, after the writes that were given before.

        A later call raises the errors of the write.
        """
        while len(self._coming) >= _MOST_PENDING_WRITES:
            self._coming.popleft().result()
        self._coming.append(self._behind.submit(write))

    @contextlib.contextmanager
    def alone(self, table_state: TableState | None = None) -> Iterator[None]:
        """Exclude other threads, after all writes that were given to :meth:`later` are done.

        Parameters
        ----------
        table_state : TableState, optional
            The table that errors in this context concern.
        """
        with self._guard:
            while self._coming:
                self._coming.popleft().result()
            if self._failed is not None:
                raise self._failed
            with contextlib.nullcontext() if table_state is None else self.telling(table_state):
                yield

    def run(self, statement: str, **tables: Any) -> Any:
        """Execute a statement that reads Arrow tables by name.

        DuckDB finds the tables as Python variables. DuckDB's `register` would make a view of each
        table, which keeps the table in memory until the transaction ends.
        """
        with self.refusals():
            names = {"connection": self._connection, "statement": statement, **tables}
            result = eval("connection.execute(statement)", {}, names)  # noqa: S307
            return result.fetchall() if tables else result

    def named(self, schema: str, *table: str) -> str:
        """Return the full name of a schema or a table, with the catalogue.

        The catalogue has the name of the file without suffix. If a schema has the same name, DuckDB
        refuses the schema's name alone as ambiguous.
        """
        return quoted(self._catalog, schema, *table)

    def types_of(self, schema: pa.Schema) -> dict[str, str]:
        """Return DuckDB's types for Arrow columns; DuckDB is asked once for each type."""
        new = {field.type for field in schema} - self._types.keys()
        if new:
            asked = empty(pa.schema([(f"c{number}", type_) for number, type_ in enumerate(new)]))
            rows = self.run("DESCRIBE FROM columns_of", columns_of=asked)
            self._types.update(zip(new, (row[1] for row in rows), strict=True))
        return {field.name: self._types[field.type] for field in schema}

    def has(self, schema: str, name: str) -> bool:
        """Whether a table exists."""
        return (schema, name) in self._tables

    def add_table(self, schema: str, name: str) -> None:
        """Note that a table was created."""
        self._tables.add((schema, name))
        if schema == "state":
            self.altered.add(name)

    def shown(self, stored_name: str) -> str:
        """See `Target`: tables have their stored names."""
        return stored_name

    def retry(self, table_state: TableState) -> None:
        """See `Target`: only a write can show whether the file takes a table."""

    def changes(self, table_state: TableState) -> ChangeWriter:
        """See `Target`."""
        if not self.remembered.has_changes:
            return NoChanges(table_state)
        writer = _DuckdbChanges(self, table_state)
        self._writers.append(writer)
        return writer

    def state(self, table_state: TableState) -> _DuckdbState:
        """See `Target`."""
        return _DuckdbState(self, table_state)

    def new_table_state(self, table_state: TableState) -> TableState:
        """See `Target`."""
        return table_state

    def rename(self, table_state: TableState, stored_name: str) -> TableState:
        """See `Target`."""
        with self.alone():
            for version in range(1, table_state.version + 1):
                self._move(
                    "changes",
                    versioned(table_state.stored_name, version),
                    versioned(stored_name, version),
                )
            self._move("state", table_state.stored_name, stored_name)
        return table_state._replace(stored_name=stored_name)

    def _move(self, schema: str, old: str, new: str) -> None:
        if self.has(schema, old):
            self.fields.pop(old, None)
            self.run(f"ALTER TABLE {self.named(schema, old)} RENAME TO {quoted(new)}")
            self._tables.remove((schema, old))
            self.add_table(schema, new)


def _lost(table_state: TableState, remembered: RememberedOptions, names: set[str]) -> str | None:
    """Return why a table is stale: somebody dropped its state table or change table; else None."""
    if not table_state.version:
        return None
    if (
        remembered.has_state
        and table_state.stale is None
        and f"state.{table_state.stored_name}" not in names
    ):
        return DELETED
    has_changes = remembered.has_changes and (
        table_state.commit_time is not None or table_state.copy_lsn
    )
    is_there = f"changes.{versioned(table_state.stored_name, table_state.version)}" in names
    if has_changes and not is_there and table_state.stale in (None, CHANGES_ALONE):
        return CHANGES_DELETED
    return None


class _DuckdbChanges:
    """A `ChangeWriter` of a DuckDB table."""

    gap = None  # changes by other programs are not detected

    def __init__(self, target: DuckdbTarget, table_state: TableState) -> None:
        self._target = target
        self._table_state = table_state
        self._name = versioned(table_state.stored_name, table_state.version)
        self.lsn, self.copy_lsn = table_state.lsn, table_state.copy_lsn
        self._pending: list[pa.RecordBatch] = []
        self._bytes = 0
        # Names and types of the fields of rows, once all pending changes are written.
        self._fields: dict[str, str] | None = None
        self._schema: pa.Schema | None = None  # schema of the last changes

    def fits(self, schema: pa.Schema) -> bool:
        """See `ChangeWriter`."""
        columns, wanted = self._current_fields(), self._wanted(schema)
        new = [name for name in wanted if name not in columns]
        if columns and new and distinct_names(new, columns) != new:
            return False  # DuckDB ignores case, so two names would be the same
        return all(columns.get(name, type_) == type_ for name, type_ in wanted.items())

    def _current_fields(self) -> dict[str, str]:
        if self._fields is None:
            with self._target.alone(self._table_state):
                self._fields = dict(self._stored_fields())
        return self._fields

    def _stored_fields(self) -> dict[str, str]:
        """Return names and types of the fields of rows; empty if there is no table yet."""
        fields = self._target.fields
        if self._name not in fields:
            if not self._target.has("changes", self._name):
                return {}
            rows = self._target.run(
                f"DESCRIBE SELECT unnest(after) FROM {self._target.named('changes', self._name)}"
            ).fetchall()
            fields[self._name] = {row[0]: row[1] for row in rows}
        return fields[self._name]

    def _wanted(self, schema: pa.Schema) -> dict[str, str]:
        with self._target.alone(self._table_state):
            return self._target.types_of(pa.schema(list(schema.field("after").type)))

    def append(self, changes: pa.RecordBatch) -> None:
        """See `ChangeWriter`."""
        if changes.schema != self._schema:
            self._fields = {**self._current_fields(), **self._wanted(changes.schema)}
            self._schema = changes.schema
        self._pending.append(changes)
        self._bytes += changes.nbytes
        if self._bytes > _FLUSHED:
            self.flush()

    def flush(self) -> None:
        """Write the changes in memory."""
        if self._pending:
            parts = joined(self._pending)
            self._pending, self._bytes = [], 0
            self._target.later(functools.partial(self._write, parts, self._current_fields()))

    def _write(self, parts: list[pa.Table], fields: dict[str, str]) -> None:
        with self._target.telling(self._table_state):
            self._insert(parts, fields)

    def _insert(self, parts: list[pa.Table], fields: dict[str, str]) -> None:
        name = self._target.named("changes", self._name)
        names = {*self._stored_fields()}
        if not names:
            self._target.run(f"CREATE TABLE {name} AS FROM rows", rows=parts[0])
            self._target.add_table("changes", self._name)
            names = {field.name for field in parts[0].schema.field("after").type}
            parts = parts[1:]
        if fields.keys() - names:
            # Alter once for all parts: DuckDB keeps a copy of the rows from before each alteration
            # until the commit.
            types = ", ".join(f"{quoted(field)} {type_}" for field, type_ in fields.items())
            # This cast matches fields by name. ADD COLUMN before.field fails in DuckDB 2.0.1 if the
            # field is a struct and rows have no `before`.
            for side in ("before", "after"):
                self._target.run(f"ALTER TABLE {name} ALTER {side} TYPE STRUCT({types})")
        self._target.fields[self._name] = fields
        for rows in parts:
            # DuckDB matches fields of structs by name, and sets missing ones to NULL.
            self._target.run(f"INSERT INTO {name} BY NAME FROM rows", rows=rows)

    def commit(self, table_state: TableState) -> None:
        """See `ChangeWriter`."""
        del table_state  # the target's commit stores it
        self.flush()


class _DuckdbState:
    """A `StateWriter` of a DuckDB table."""

    def __init__(self, target: DuckdbTarget, table_state: TableState) -> None:
        self._target = target
        self._table_state = table_state
        self._table = self._live = target.named("state", table_state.stored_name)
        self._marker = None
        if target.remembered.soft_deletes is not None:
            self._marker = quoted(target.remembered.soft_deletes)
            self._live = f"(FROM {self._table} WHERE {self._marker} IS NULL)"
        self.lsn, self.copy_lsn = table_state.lsn, table_state.copy_lsn
        self._is_empty = False  # True only if the table is certainly empty

    def create(self, schema: pa.Schema) -> None:
        """See `StateWriter`."""
        if self._target.remembered.soft_deletes is not None:
            schema = schema.append(pa.field(self._target.remembered.soft_deletes, DELETED_AT))
        with self._target.alone(self._table_state):
            self._target.run(
                f"CREATE OR REPLACE TABLE {self._table} AS FROM rows", rows=empty(schema)
            )
            self._target.add_table("state", self._table_state.stored_name)
        self._is_empty = True

    load = create

    def append(self, rows: pa.RecordBatch) -> None:
        """See `StateWriter`."""
        self._is_empty = False
        with self._target.alone(self._table_state):
            self._target.run(
                f"INSERT INTO {self._table} BY NAME FROM rows", rows=pa.Table.from_batches([rows])
            )

    def loaded(self, table_state: TableState) -> None:
        """See `StateWriter`."""
        self.copy_lsn = table_state.copy_lsn

    def apply(
        self, alterations: Sequence[Alteration], net: NetChanges, table_state: TableState
    ) -> None:
        """See `StateWriter`."""
        del table_state  # the target's commit stores it
        with self._target.alone(self._table_state):
            self._apply(alterations, net)
        self._is_empty = False

    def _apply(self, alterations: Sequence[Alteration], net: NetChanges) -> None:
        for alteration in alterations:
            self._target.altered.add(self._table_state.stored_name)
            self._alter(alteration)
        if net.truncated and self._marker is None:
            self._target.run(f"DELETE FROM {self._table}")
        elif net.truncated:
            self._target.run(
                f"UPDATE {self._table} SET {self._marker} = make_timestamptz({net.truncated_at}) "
                f"WHERE {self._marker} IS NULL"
            )
        if not net.num_rows:
            return
        if net.key:
            self._merge(net)
        else:
            self._count(net)

    def _alter(self, alteration: Alteration) -> None:
        run, column = self._target.run, quoted(alteration.column)
        if isinstance(alteration, Removed):
            run(f"ALTER TABLE {self._table} DROP COLUMN {column}")
        elif isinstance(alteration, Retyped):
            type_ = self._type(alteration.type)
            run(f"ALTER TABLE {self._table} ALTER COLUMN {column} TYPE {type_}")
        elif isinstance(alteration, Renamed):
            run(f"ALTER TABLE {self._table} RENAME COLUMN {column} TO {quoted(alteration.name)}")
        elif isinstance(alteration, AddedColumn):
            value = alteration.value
            run(f"ALTER TABLE {self._table} ADD COLUMN {column} {self._type(value.type)}")
            if value.is_valid()[0].as_py():
                default_value = pa.table({"value": value})
                run(
                    f"UPDATE {self._table} SET {column} = (SELECT value FROM default_value)",
                    default_value=default_value,
                )

    def _type(self, type_: pa.DataType) -> str:
        return self._target.types_of(pa.schema([pa.field("value", type_)]))["value"]

    # --- rows with a key -------------------------------------------------------------------------

    def _merge(self, net: NetChanges) -> None:
        """Merge net rows by key: check what they expect, delete rows, insert rows."""
        row = net.schema.field("row").type
        keys, unsent = self._keys(net)
        joined = same(row, net.key)
        self._check(net, keys, joined)
        if unsent:
            self._fill(net, unsent)
        upsert = keys.column(_UPSERT)
        gone = keys.filter(keys.column(_PRESENT))
        if self._marker is not None:
            self._mark_deleted(gone, joined)
            # A new row replaces a row with the same key that is marked as deleted.
            gone = keys.filter(upsert)
        if gone.num_rows:
            self._target.run(f"DELETE FROM {self._table} s USING gone n WHERE {joined}", gone=gone)
        if pc.any(upsert).as_py():
            insert = f"INSERT INTO {self._table} BY NAME"
            self._target.run(
                f"{insert} SELECT {_columns(row)} FROM net n WHERE n.op = 'upsert' "
                "AND n.unchanged IS NULL",
                net=_reader(net),
            )
            if unsent:
                self._target.run(f"{insert} FROM filled")
                self._target.run("DROP TABLE filled")

    def _keys(self, net: NetChanges) -> tuple[pa.Table, set[str]]:
        """Return the keys of net rows with flags; and the columns that some rows lack."""
        batches, unsent = [], set()
        for rows in net.batches():
            row = rows.column("row")
            unsent.update(rows.column("unchanged").flatten().unique().to_pylist())
            columns = {name: row.field(row.type.get_field_index(name)) for name in net.key}
            columns[_PRESENT] = pc.equal(rows.column("expects"), "present")
            columns[_ABSENT] = pc.equal(rows.column("expects"), "absent")
            columns[_UPSERT] = pc.equal(rows.column("op"), "upsert")
            if self._marker is not None:
                columns[_TIME] = rows.column("commit_time")
            batches.append(pa.record_batch(columns))
        return pa.Table.from_batches(batches), unsent

    def _mark_deleted(self, present: pa.Table, joined: str) -> None:
        """Mark rows as deleted."""
        gone = present.filter(pc.invert(present.column(_UPSERT)))
        if gone.num_rows:
            self._target.run(
                f"UPDATE {self._table} s SET {self._marker} = n.{quoted(_TIME)} FROM gone n "
                f"WHERE {joined} AND s.{self._marker} IS NULL",
                gone=gone,
            )

    def _check(self, net: NetChanges, keys: pa.Table, joined: str) -> None:
        """Refuse net rows whose key the table lacks but should have, or has but should lack."""
        present = keys.column(_PRESENT)
        wanted = keys.filter(pc.or_(present, keys.column(_ABSENT)))
        if not wanted.num_rows or (self._is_empty and not pc.any(present).as_py()):
            return
        names, flag = ", ".join(f"n.{quoted(name)}" for name in net.key), f"n.{quoted(_PRESENT)}"
        joined = f"JOIN {self._live} s ON {joined}"
        ((matches, too_many),) = self._target.run(
            f"SELECT count(*) FILTER ({flag}), count(*) FILTER (NOT {flag}) "
            f"FROM wanted n SEMI {joined}",
            wanted=wanted,
        )
        if too_many or matches != pc.sum(present).as_py():
            kind, problem = ("SEMI", "it already has a row with") if too_many else (
                "ANTI", "it has no row with"
            )  # fmt: skip
            rows = self._target.run(
                f"SELECT {names} FROM wanted n {kind} {joined} WHERE "
                f"{flag} = {not too_many} LIMIT {_SHOWN + 1}",
                wanted=wanted,
            )
            raise self._incomplete(net, problem, rows)

    def _incomplete(self, net: NetChanges, problem: str, rows: list[Any]) -> IncompleteError:
        shown = "; ".join("(" + ", ".join(map(repr, row)) + ")" for row in rows[:_SHOWN])
        more = " and more" if len(rows) > _SHOWN else ""
        return IncompleteError(
            f"the changes of {net.table} do not fit its state table "
            f"{self._table_state.stored_name!r} in {self._target.path}: {problem} "
            f"({', '.join(net.key)}) = {shown}{more}. Changes are missing, or the table began "
            "without its existing rows",
            code="unfit_row", table=net.table, hint="Request a new snapshot of the table",
        )  # fmt: skip

    def _fill(self, net: NetChanges, unsent: set[str]) -> None:
        """Write net rows with values that were not sent to `filled`, with the table's values."""
        row = net.schema.field("row").type
        chosen = []
        for name in (field.name for field in row):
            value = f"n.{quoted('row', name)}"
            if name in unsent:
                text = name.replace("'", "''")
                value = (
                    f"CASE WHEN list_contains(n.unchanged, '{text}') THEN s.{quoted(name)} "
                    f"ELSE {value} END"
                )
            chosen.append(f"{value} AS {quoted(name)}")
        names = [f"{_ROW}{i}" for i in range(len(net.key))]
        keys = ", ".join(
            f"coalesce(net.from_.{quoted(name)}, net.{quoted('row', name)}) AS {quoted(key_name)}"
            for name, key_name in zip(net.key, names, strict=True)
        )
        # A row that was inserted in this window has no row `s`. `with_added` has already filled the
        # columns that were added after the insert.
        self._target.run(
            f"CREATE OR REPLACE TEMP TABLE filled AS SELECT {', '.join(chosen)} FROM "
            f"(SELECT *, {keys} FROM net WHERE op = 'upsert' AND unchanged IS NOT NULL) n "
            f"LEFT JOIN {self._live} s ON {same(row, net.key, names)}",
            net=_reader(net),
        )

    # --- rows without a key ----------------------------------------------------------------------

    def _count(self, net: NetChanges) -> None:
        """Merge the net rows of a multiset: remove and add as many equal rows as they say."""
        row = net.schema.field("row").type
        count, time_, number = quoted(_COUNT), quoted(_TIME), quoted(_ROW)
        self._target.run(
            f"CREATE OR REPLACE TEMP TABLE gone AS SELECT {_columns(row)}, n.count AS {count}, "
            f"n.commit_time AS {time_}, row_number() OVER () AS {number} "
            "FROM net n WHERE n.op = 'delete'",
            net=_reader(net),
        )
        if self._target.run("FROM gone LIMIT 1").fetchall():
            self._take_away(net, [field.name for field in row])
        self._target.run("DROP TABLE gone")
        self._target.run(
            f"INSERT INTO {self._table} BY NAME SELECT {_columns(row)} FROM net n, "
            "LATERAL (SELECT unnest(range(n.count))) WHERE n.op = 'upsert'",
            net=_reader(net),
        )

    def _take_away(self, net: NetChanges, names: list[str]) -> None:
        alike = same(net.schema.field("row").type, names, nulls=True)
        still = "" if self._marker is None else f" AND s.{self._marker} IS NULL"
        number, count, time_ = quoted(_ROW), quoted(_COUNT), quoted(_TIME)
        self._target.run(
            "CREATE OR REPLACE TEMP TABLE gone_rows AS SELECT s.rowid AS id, "
            f"n.{number} AS number, n.{count} AS count, n.{time_} AS time, "
            f"row_number() OVER (PARTITION BY n.{number} ORDER BY s.rowid) AS place "
            f"FROM {self._table} s JOIN gone n ON {alike}{still}"
        )
        rows = self._target.run(
            f"SELECT n.* EXCLUDE ({number}, {count}, {time_}) FROM gone n WHERE n.{count} > "
            f"(SELECT count(*) FROM gone_rows g WHERE g.number = n.{number}) "
            f"LIMIT {_SHOWN + 1}"
        ).fetchall()
        if rows:
            raise self._incomplete(net._replace(key=tuple(names)), "it has too few rows with", rows)
        if self._marker is None:
            self._target.run(
                f"DELETE FROM {self._table} WHERE rowid IN "
                "(SELECT id FROM gone_rows WHERE place <= count)"
            )
        else:
            self._target.run(
                f"UPDATE {self._table} s SET {self._marker} = g.time FROM gone_rows g "
                "WHERE s.rowid = g.id AND g.place <= g.count"
            )
        self._target.run("DROP TABLE gone_rows")


def _reader(net: NetChanges) -> pa.RecordBatchReader:
    """Return a reader of net rows, which DuckDB can read once."""
    return pa.RecordBatchReader.from_batches(net.schema, net.batches())


def _columns(row: pa.StructType) -> str:
    """Return the SQL list of the columns of net rows `n`."""
    names = [field.name for field in row]
    return ", ".join(f"n.{quoted('row', name)} AS {quoted(name)}" for name in names)
