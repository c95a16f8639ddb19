"""Write rows: first all together into a temporary file, then table by table into files.

The rows of a step come in batches that may be tiny, of thousands of tables in turn. The temporary
file takes them as they come, so that neither memory nor open files grow with the number of tables.
Then each table is written in one go, in row groups of a good size. Of rows that lie in a file of
one table already, those of its copy, only their place is kept until then.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from pgoutput_fast._disk import create_file, fsync_path, read_json_file, write_whole
from pgoutput_fast.errors import PgOutputError

from ._manifest import (
    EXPORTED,
    NAME,
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

# Rows of a row group. While a table is written, one row group of it is in memory.
_GROUP_ROWS = 122_880
_GROUP_BYTES = 16 << 20

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


@contextlib.contextmanager
def refusals(what: str) -> Iterator[None]:
    """Raise errors of the operating system and of the format's library as this package's error."""
    try:
        yield
    except OSError as error:
        raise PgOutputError(
            f"can't write {what}: {error.strerror or error}; what was finished before is kept, and "
            f"the same call goes on from there",
            code="io_failed",
            path=what,
        ) from error
    except pa.ArrowException as error:
        raise PgOutputError(
            f"can't write {what}: {error}", code="unfit_value", path=what
        ) from error


class _Counted:
    """Batches, counted as they are taken."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self._batches = batches
        self.rows = 0

    def __iter__(self) -> Iterator[Any]:
        for batch in self._batches:
            self.rows += len(batch)
            yield batch


class Store:
    """A directory with one file per table, version of its schema, and part."""

    def __init__(self, directory: Path, format: str) -> None:
        self._directory = directory
        self._format = format
        self._names: list[str] = []
        self._stems: set[str] = set()
        self._given: set[str] = set()  # the same, not folded

    def load(self) -> Entry | None:
        """Finish or drop what a killed process left, and return the manifest, None without one."""
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
        """Write rows of a version of a table, and return their number."""
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
        """Write events or errors, as `what` says, and return their number."""
        return self._part(manifest[what], f"_{what}", schema, batches)

    def _part(self, parts: list[Entry], stem: str, schema: Any, batches: Any) -> int:
        part = f".part{len(parts) + 1}" if parts else ""
        name = f"{stem}{part}.{self._format}"
        path = TEMPORARY.path(self._directory) / name
        counted = _Counted(batches)
        with refusals(str(self._directory / name)):
            _write_parquet(path, schema, counted)
        self._names.append(name)
        parts.append({"file": name, "rows": counted.rows, "bytes": path.stat().st_size})
        return counted.rows

    def commit(self, manifest: Entry) -> None:
        """Make what was written durable and visible, together with the manifest."""
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
        """Drop what was not committed."""
        clear(self._directory)

    def discard(self, manifest: Entry) -> None:
        """Delete all that was committed, and nothing else; the store is closed."""
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
