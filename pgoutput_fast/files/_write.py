"""Write rows: first all together into a temporary file, then table by table into files.

The rows of a step come in batches that may be tiny, of thousands of tables in turn. The temporary
file takes them as they come, so that neither memory nor open files grow with the number of tables.
Then each table is written in one go, in row groups of a good size. Of rows that lie in a file of
one table already, those of its copy, only their place is kept until then.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa

from pgoutput_fast._disk import create_file, fsync_path, read_json_file, write_whole
from pgoutput_fast.errors import PgOutputError

from ._as_text import csv_column, csv_type
from ._manifest import (
    EXPORTED,
    NAME,
    SPILLED,
    TEMPORARY,
    checked,
    clear,
    file_names,
    file_stem,
    first_names,
    folded,
    give_names,
    manifest_lines,
    unique,
)

if TYPE_CHECKING:
    from pgoutput_fast.captured.units import Unit

DATABASE = "changes.duckdb"
_CATALOG = "changes"
"""What duckdb calls the database in a file of this name; statements name it, as a schema may have
the same name."""

# Rows of a row group. While a table is written, one row group of it is in memory.
_GROUP_ROWS = 122_880
_GROUP_BYTES = 16 << 20
_CSV_ROWS = 16_384  # rows whose text is in memory at once
_DUCKDB_MEGABYTES = 256
# A table that is made takes 53 kB until its transaction ends (duckdb 2.0, 12 columns).
_DUCKDB_MEGABYTES_PER_TABLE = 0.2
_DUCKDB_TABLES = 500  # the limit is raised for this many tables at once

Entry = dict[str, Any]


class Spill:
    """Batches of many schemas, in a temporary file."""

    def __init__(self, path: Path) -> None:
        self._file = create_file(path, buffering=1 << 20)
        self._places: dict[int, list[int | Unit]] = {}

    def close(self) -> None:
        """Delete the file."""
        self._file.truncate(0)
        self._file.close()

    def add(self, key: int, batch: Any) -> None:
        """Append a batch to those of its key."""
        self._places.setdefault(key, []).append(self._file.tell())
        with pa.ipc.new_stream(self._file, batch.schema) as writer:
            writer.write_batch(batch)

    def put_off(self, key: int, unit: Unit) -> None:
        """Have batches of a unit follow those of a key, whose rows are not kept here."""
        self._places.setdefault(key, []).append(unit)

    def waiting(self) -> Iterator[Unit]:
        """The units that were put off."""
        for places in self._places.values():
            yield from (place for place in places if not isinstance(place, int))

    def __iter__(self) -> Iterator[int]:
        """The keys, in the order in which they came first."""
        return iter(self._places)

    def batches(
        self, key: int, decode: Callable[[int, Unit], Iterator[Any]] | None = None
    ) -> Iterator[Any]:
        """The batches of a key in their order; one is in memory at a time.

        `decode` gives those of a unit that was put off.
        """
        self._file.flush()
        for place in self._places[key]:
            if isinstance(place, int):
                self._file.seek(place)
                yield pa.ipc.open_stream(self._file).read_next_batch()
            elif decode is not None:
                yield from decode(key, place)


def grouped(batches: Iterable[Any]) -> Iterator[list[Any]]:
    """Batches that make a row group together."""
    pending: list[Any] = []
    rows = size = 0
    for batch in batches:
        if pending and (rows + len(batch) > _GROUP_ROWS or size + batch.nbytes > _GROUP_BYTES):
            yield pending
            pending, rows, size = [], 0, 0
        pending.append(batch)
        rows += len(batch)
        size += batch.nbytes
    if pending:
        yield pending


def joined(schema: Any, batches: Iterable[Any]) -> Iterator[Any]:
    """Join small batches, so that each result makes a row group."""
    for group in grouped(batches):
        if len(group) == 1:
            yield group[0]
            continue
        columns = [pa.concat_arrays([one.column(i) for one in group]) for i in range(len(schema))]
        yield pa.RecordBatch.from_arrays(columns, schema=schema)


class Store(Protocol):
    """A directory of tables, of one format."""

    fold: bool
    """Whether names of columns that differ in case alone are the same."""
    raises: bool
    """Whether an error of the batches that `table` takes is raised as it is."""

    def load(self) -> Entry | None:
        """Finish or drop what a killed process left, and return the manifest, None without one."""

    def table(self, table: Entry, version: Entry, schema: Any, batches: Any) -> int:
        """Write rows of a version of a table, and return their number."""

    def beside(self, manifest: Entry, what: str, schema: Any, batches: Any) -> int:
        """Write events or errors, as `what` says, and return their number."""

    def commit(self, manifest: Entry) -> None:
        """Make what was written durable and visible, together with the manifest."""

    def close(self) -> None:
        """Drop what was not committed."""

    def discard(self, manifest: Entry) -> None:
        """Delete all that was committed, and nothing else; the store is closed."""


@contextlib.contextmanager
def refusals(what: str) -> Iterator[None]:
    """Raise errors of the operating system and of the format's library as this package's error."""
    try:
        yield
    except OSError as error:
        raise PgOutputError(
            f"can't write {what}: {error.strerror or error}; what was finished before is kept, and "
            f"the same call goes on from there"
        ) from error
    except pa.ArrowException as error:
        raise PgOutputError(f"can't write {what}: {error}") from error


class _Counted:
    """Batches, counted as they are taken."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self._batches = batches
        self.rows = 0

    def __iter__(self) -> Iterator[Any]:
        for batch in self._batches:
            self.rows += len(batch)
            yield batch


class FileStore:
    """One file per table, version of its schema, and part."""

    fold = False
    raises = True

    def __init__(self, directory: Path, format: str) -> None:
        self._directory = directory
        self._format = format
        self._write = _WRITERS[format]
        self._names: list[str] = []
        self._stems: set[str] = set()
        self._given: set[str] = set()  # the same, not folded

    def load(self) -> Entry | None:
        """See `Store`."""
        path = self._directory / NAME
        found = None
        if path.exists():
            found = checked(read_json_file(path), str(path))
            give_names(self._directory, found["publishing"])
            self._given = {one["files"] for one in found["tables"]}
            self._stems = set(map(folded, self._given))
        clear(self._directory)
        return found

    def table(self, table: Entry, version: Entry, schema: Any, batches: Any) -> int:
        """See `Store`."""
        if "files" not in table:
            stem = file_stem(*first_names(table))
            if stem in self._given:
                # A table that had this name was dropped or renamed.
                stem += f"~{table['relation_id']}"
            table["files"] = unique(stem, self._stems)
            self._given.add(table["files"])
        number = version["version"]
        stem = table["files"] + (f".v{number}" if number > 1 else "")
        return self._part(version["parts"], stem, schema, batches)

    def beside(self, manifest: Entry, what: str, schema: Any, batches: Any) -> int:
        """See `Store`."""
        return self._part(manifest[what], f"_{what}", schema, batches)

    def _part(self, parts: list[Entry], stem: str, schema: Any, batches: Any) -> int:
        part = f".part{len(parts) + 1}" if parts else ""
        name = f"{stem}{part}.{self._format}"
        path = TEMPORARY.path(self._directory) / name
        counted = _Counted(batches)
        with refusals(str(self._directory / name)):
            self._write(path, schema, counted)
        self._names.append(name)
        parts.append({"file": name, "rows": counted.rows, "bytes": path.stat().st_size})
        return counted.rows

    def commit(self, manifest: Entry) -> None:
        """See `Store`."""
        manifest["publishing"] = self._names
        temporary = TEMPORARY.path(self._directory)
        # All files are synced together: with many tables that takes far less time than to sync each
        # when it is written.
        for name in self._names:
            with refusals(str(self._directory / name)):
                fsync_path(temporary / name)
        with refusals(str(self._directory / NAME)):
            fsync_path(temporary)
            write_whole(self._directory / NAME, manifest_lines(manifest), temporary)
            give_names(self._directory, self._names)
        self._names = []

    def close(self) -> None:
        """See `Store`."""
        clear(self._directory)

    def discard(self, manifest: Entry) -> None:
        """See `Store`."""
        # The manifest is deleted first, as it lists the other files.
        for name in (NAME, *file_names(manifest)):
            EXPORTED.delete(self._directory, name, missing_ok=True)


# Columns of a change whose values hardly ever repeat.
_UNIQUE = ("lsn", "seq")


def _write_parquet(path: Path, schema: Any, batches: Iterable[Any]) -> None:
    import pyarrow.parquet as pq

    # A dictionary of values that do not repeat costs much time, and more bytes than it saves.
    dictionaries = [
        leaf
        for field in schema
        if not (
            field.name in _UNIQUE
            or (pa.types.is_timestamp(field.type) and field.name != "commit_time")
        )
        for leaf in _leaves(field.name, field.type)
    ]
    with (
        create_file(path) as file,
        pq.ParquetWriter(file, schema, compression="zstd", use_dictionary=dictionaries) as writer,
    ):
        for group in grouped(batches):
            table = pa.Table.from_batches(group, schema)
            writer.write_table(table, row_group_size=max(1, len(table)))
            # What compressing needed would stay with the process beside what decoding needs.
            pa.default_memory_pool().release_unused()


def _leaves(path: str, type_: Any) -> Iterator[str]:
    """The paths of the columns that Parquet makes of a column of an Arrow type."""
    if isinstance(type_, pa.BaseExtensionType):
        yield from _leaves(path, type_.storage_type)
    elif pa.types.is_struct(type_):
        for field in type_:
            yield from _leaves(f"{path}.{field.name}", field.type)
    elif pa.types.is_map(type_):
        yield from _leaves(f"{path}.key_value.key", type_.key_type)
        yield from _leaves(f"{path}.key_value.value", type_.item_type)
    elif pa.types.is_nested(type_):
        yield from _leaves(f"{path}.list.element", type_.value_type)
    else:
        yield path


def _write_arrow(path: Path, schema: Any, batches: Iterable[Any]) -> None:
    with create_file(path) as file, pa.ipc.new_file(file, schema) as writer:
        for batch in joined(schema, batches):
            writer.write_batch(batch)


def _write_csv(path: Path, schema: Any, batches: Iterable[Any]) -> None:
    from pyarrow import csv

    printed = pa.schema([pa.field(field.name, csv_type(field.type)) for field in schema])
    with create_file(path) as file, csv.CSVWriter(file, printed) as writer:
        for batch in joined(schema, batches):
            for start in range(0, len(batch), _CSV_ROWS):
                columns = [csv_column(one) for one in batch.slice(start, _CSV_ROWS).columns]
                writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=printed))


_WRITERS: dict[str, Callable[[Path, Any, Iterable[Any]], None]] = {
    "parquet": _write_parquet,
    "arrow": _write_arrow,
    "csv": _write_csv,
}


def _quoted(*names: str) -> str:
    return ".".join('"' + name.replace('"', '""') + '"' for name in names)


_RESERVED = {"pgoutput_fast", "information_schema", "pg_catalog"}
"""Schemas of the duckdb database that no tables of the server go to."""


class DuckdbStore:
    """One duckdb file, in which each step is a transaction."""

    fold = True
    raises = False  # duckdb makes an error of its own of it

    def __init__(self, directory: Path) -> None:
        try:
            import duckdb
        except ImportError as error:
            raise PgOutputError(
                f"duckdb is not installed ({error}); install the extra pgoutput-fast[duckdb]"
            ) from error
        self._duckdb = duckdb
        self._directory = directory
        self._path = directory / DATABASE
        self._connection: Any = None
        self._is_new = False
        self._made = 0  # tables written in the transaction
        # The names of the database's schemas: by the server's schema, and all of them. Then the
        # names of the tables in each.
        self._schemas: dict[str, str] = {}
        self._names = {folded(name) for name in _RESERVED}
        self._tables: dict[str, set[str]] = {}
        self._given: set[tuple[str, str]] = set()  # the same, not folded

    @contextlib.contextmanager
    def _refusals(self) -> Iterator[None]:
        try:
            yield
        except self._duckdb.Error as error:
            raise PgOutputError(f"can't write {self._path}: {error}") from error

    def _open(self) -> Any:
        """The connection, in a transaction."""
        if self._connection is None:
            self._is_new = not self._path.exists()
            path = TEMPORARY.path(self._directory) / DATABASE if self._is_new else self._path
            with self._refusals():
                self._connection = self._duckdb.connect(
                    str(path),
                    config={
                        # One thread keeps rows in their order and takes little memory. Extensions
                        # are not downloaded.
                        "threads": 1,
                        "memory_limit": f"{_DUCKDB_MEGABYTES}MB",
                        "temp_directory": str(SPILLED.path(self._directory)),
                        "autoinstall_known_extensions": False,
                        # Small tables take a few blocks each, by default of 256 kB. Blocks of 64 kB
                        # make large tables no larger; still smaller blocks would.
                        "default_block_size": 65536,
                    },
                )
                self._connection.execute("BEGIN")
            self._made = 0
        return self._connection

    def load(self) -> Entry | None:
        """See `Store`."""
        clear(self._directory)
        if not self._path.exists():
            return None
        TEMPORARY.make(self._directory)
        try:
            found = self._open().execute(f"FROM {_CATALOG}.pgoutput_fast.manifest").fetchall()
        except self._duckdb.CatalogException as error:
            self.close()
            raise PgOutputError(
                f"{self._path} was made by something else; give another directory"
            ) from error
        except self._duckdb.Error as error:
            self.close()
            raise PgOutputError(f"can't read {self._path}: {error}") from error
        manifest = checked(found[0][0] if found else "", f"the manifest in {self._path}")
        for table in manifest["tables"]:
            for version in table["versions"]:
                schema, name = version["table"]
                self._schemas[first_names(table)[0] or "pg_catalog"] = schema
                self._names.add(folded(schema))
                self._take(schema, name)
        return manifest

    def table(self, table: Entry, version: Entry, schema: Any, batches: Any) -> int:
        """See `Store`."""
        if "table" not in version:
            namespace, name = first_names(table)
            namespace, number = namespace or "pg_catalog", version["version"]
            if namespace not in self._schemas:
                self._schemas[namespace] = unique(namespace, self._names)
            schema_name = self._schemas[namespace]
            if (schema_name, name) in self._given and table["versions"][0].get("table") != [
                schema_name, name
            ]:  # fmt: skip
                # A table that had this name was dropped or renamed.
                name += f"__{table['relation_id']}"
            name += f"__v{number}" if number > 1 else ""
            version["table"] = [schema_name, self._take(schema_name, name)]
        return self._rows(version["parts"], version["table"], schema, batches)

    def _take(self, schema: str, name: str) -> str:
        """A name for a table that no other one has."""
        found = unique(name, self._tables.setdefault(schema, set()))
        self._given.add((schema, found))
        return found

    def beside(self, manifest: Entry, what: str, schema: Any, batches: Any) -> int:
        """See `Store`."""
        return self._rows(manifest[what], ["pgoutput_fast", what], schema, batches)

    def _rows(self, parts: list[Entry], name: list[str], schema: Any, batches: Any) -> int:
        connection = self._open()
        counted, full_name = _Counted(batches), _quoted(_CATALOG, *name)
        with refusals(f"table {_quoted(*name)} of {self._path}"), self._refusals():
            reader = pa.RecordBatchReader.from_batches(schema, joined(schema, counted))
            connection.register("pgoutput_fast_rows", reader)
            self._made += 1
            if self._made % _DUCKDB_TABLES == 0 and self._is_new:
                # The file is new, so nobody sees it before it is whole.
                connection.execute("COMMIT")
                connection.execute("CHECKPOINT")
                connection.execute("BEGIN")
            elif self._made % _DUCKDB_TABLES == 0:
                limit = _DUCKDB_MEGABYTES + int(self._made * _DUCKDB_MEGABYTES_PER_TABLE)
                connection.execute(f"SET memory_limit='{limit}MB'")
            if parts:
                connection.execute(f"INSERT INTO {full_name} FROM pgoutput_fast_rows")
            else:
                schema_name = _quoted(_CATALOG, name[0])
                connection.execute(f"CREATE SCHEMA IF NOT EXISTS {schema_name}")
                connection.execute(f"CREATE TABLE {full_name} AS FROM pgoutput_fast_rows")
            connection.unregister("pgoutput_fast_rows")
        parts.append({"rows": counted.rows})
        return counted.rows

    def commit(self, manifest: Entry) -> None:
        """See `Store`."""
        connection = self._open()
        with refusals(str(self._path)), self._refusals():
            connection.execute(f"CREATE SCHEMA IF NOT EXISTS {_CATALOG}.pgoutput_fast")
            connection.execute(
                f"CREATE OR REPLACE TABLE {_CATALOG}.pgoutput_fast.manifest AS "
                "SELECT ?::VARCHAR AS manifest",
                [json.dumps(manifest)],
            )
            connection.execute("COMMIT")
            # After closing, everything is in the one file. The next step opens it again.
            connection.close()
            self._connection = None
            if self._is_new:
                written = TEMPORARY.path(self._directory) / DATABASE
                fsync_path(written)
                written.rename(self._path)
                fsync_path(self._directory)

    def close(self) -> None:
        """See `Store`."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        clear(self._directory)

    def discard(self, manifest: Entry) -> None:
        """See `Store`."""
        del manifest  # it is in the database
        for name in (DATABASE, f"{DATABASE}.wal"):
            EXPORTED.delete(self._directory, name, missing_ok=True)


def open_store(directory: Path, format: str) -> Store:
    """Make the store of a format.

    Raises
    ------
    PgOutputError
        The library that writes the format is not installed.
    """
    return DuckdbStore(directory) if format == "duckdb" else FileStore(directory, format)
