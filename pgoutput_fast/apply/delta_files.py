"""Write the Parquet files of a Delta table. Readers ignore them until a commit adds them."""

from __future__ import annotations

import contextlib
import datetime
import re
import uuid
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from .._disk import fsync_path
from ..errors import PgOutputError
from .delta_statistics import FileStatistics, bounded_leaves, repeating

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from typing_extensions import Self

    from .delta_place import DeltaPlace

_FILE_BYTES = 64 << 20
"""About the size of a file. A changed row costs a rewrite of its whole file."""
_GROUP_ROWS = 1 << 17
_GROUP_BYTES = 32 << 20
"""Bytes in memory after which a row group is written."""
_SPECIAL = re.compile(r"""[\x00-\x1f"#%'*/:=?\\{}\[\]^\x7f]""")
"""Characters that Hive escapes in the directory names of partitions."""
_LONGEST = 255
"""Maximum length of such a name with its slash, in bytes."""
_OPEN_PARTITIONS = 32
"""Maximum number of partitions with an open file."""


class Directory(Protocol):
    """The directory of a table; see `LakeTable`."""

    place: DeltaPlace
    directory: str
    uncommitted: str

    @property
    def filesystem(self) -> Any:
        """The file system of the directory."""


class AddedFile(NamedTuple):
    """A new file, with the facts that a commit writes to the log."""

    path: str
    size: int
    partition: dict[str, str | None]
    statistics: str


Written = list[AddedFile]


def is_small(size: int) -> bool:
    """Whether a file with a size in bytes may be joined with other files."""
    return size < _FILE_BYTES // 2


class DeltaFileWriter:
    """Writes rows to new files of a table, which readers ignore until a commit adds them.

    Parameters
    ----------
    table : Directory
    schema : pyarrow.Schema
    partition_by : sequence of str
    prefix : str
        Beginning of the files' names.

    Raises
    ------
    PgOutputError
        The schema lacks a partition column.
    """

    def __init__(
        self, table: Directory, schema: pa.Schema, partition_by: Sequence[str], prefix: str
    ) -> None:
        if gone := [name for name in partition_by if name not in schema.names]:
            raise PgOutputError(
                f"{table.directory} is partitioned by {gone[0]!r}, but the server no longer has "
                "this column",
                code="unfit_schema",
                parameter="partition_by",
                hint="Give columns that the table has, delete this directory, and start sync "
                "again: the table gets a new snapshot",
            )
        self._table = table
        self.schema = schema
        self.partition_by = list(partition_by)
        self._prefix = prefix
        self._open: dict[tuple[Any, ...], _Open] = {}
        self._written: Written = []
        self._pending: list[pa.RecordBatch] = []
        self._pending_rows = 0
        self.pending_bytes = 0
        self._finished = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if not self._finished:
            self.discard()

    def write(self, *parts: pa.RecordBatch, size: int | None = None) -> None:
        """Write rows, which have all columns of the schema.

        Parameters
        ----------
        parts
            Batches of rows.
        size : int, optional
            Total bytes of the batches, if known; saves the time to measure slices.
        """
        self._pending += [part for part in parts if part.num_rows]
        self._pending_rows += sum(part.num_rows for part in parts)
        self.pending_bytes += sum(part.nbytes for part in parts) if size is None else size
        if self._pending_rows >= _GROUP_ROWS or self.pending_bytes >= _GROUP_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write the rows in memory to files."""
        if not self._pending:
            return
        rows = pa.Table.from_batches(self._pending, self.schema)
        self._pending, self._pending_rows, self.pending_bytes = [], 0, 0
        for partition, part in self._parts(rows):
            opened = self._open.get(partition)
            if opened is None:
                if len(self._open) >= _OPEN_PARTITIONS:
                    self._close_all()
                opened = self._open[partition] = _Open(
                    self._table,
                    part.schema,
                    self._prefix,
                    dict(zip(self.partition_by, partition, strict=True)),
                )
            opened.write(part)
            if opened.bytes >= _FILE_BYTES:
                self._written.append(self._open.pop(partition).close())

    def _parts(self, rows: pa.Table) -> Iterator[tuple[tuple[Any, ...], pa.Table]]:
        """Split rows by partition, without the partition columns."""
        names = self.partition_by
        if not names:
            yield (), rows
            return
        numbered = rows.select(names).append_column("#", pa.array(range(len(rows)), pa.int64()))
        groups = numbered.group_by(names, use_threads=False).aggregate([("#", "list")])
        rest = rows.drop_columns(names)
        for group in range(groups.num_rows):
            values = tuple(groups.column(name)[group].as_py() for name in names)
            yield values, rest.take(groups.column("#_list")[group].values)

    def finish(self) -> Written:
        """Close all files, and return them for a commit."""
        self.flush()
        self._close_all()
        self._finished = True
        return self._written

    def end_of_file(self) -> None:
        """Begin new files for the next rows, if an open file is large enough."""
        if any(not is_small(file.bytes) for file in self._open.values()):
            self.flush()
            self._close_all()

    def _close_all(self) -> None:
        while self._open:
            self._written.append(self._open.popitem()[1].close())

    def discard(self) -> None:
        """Delete all files; errors are ignored."""
        self._pending, self._pending_rows, self.pending_bytes = [], 0, 0
        paths = [file.path for file in self._written]
        for opened in self._open.values():
            with contextlib.suppress(Exception):
                opened.close()
            paths.append(opened.path)
        self._open.clear()
        self._written = []
        for path in paths:
            with contextlib.suppress(Exception):
                self._table.filesystem.delete_file(path)


class _Open:
    """A file that is being written."""

    def __init__(
        self, table: Directory, schema: pa.Schema, prefix: str, partition: dict[str, Any]
    ) -> None:
        self._table = table
        self._partition = partition
        try:
            directory = partition_directory(partition)
        except PgOutputError as error:
            raise PgOutputError(
                f"{table.directory}: {error.message}",
                code=error.code,
                parameter="partition_by",
                hint="Give other columns, delete this directory if it exists, and start sync "
                "again: the table gets a new snapshot",
            ) from None
        directory = table.uncommitted + directory
        if directory and table.place.path is not None:
            (table.place.path / table.directory / directory).mkdir(parents=True, exist_ok=True)
        self.path = f"{directory}{prefix}-{uuid.uuid4().hex}.parquet"
        self._schema = schema
        self._statistics = FileStatistics(schema)
        self._sink = table.filesystem.open_output_stream(self.path)
        self._writer: pq.ParquetWriter | None = None

    def write(self, rows: pa.Table) -> None:
        if self._writer is None:
            self._writer = pq.ParquetWriter(
                self._sink,
                self._schema,
                compression="zstd",
                use_dictionary=repeating(rows),
                write_statistics=bounded_leaves(self._schema),
            )
        self._writer.write_table(rows, row_group_size=_GROUP_ROWS)
        self._statistics.add(rows)

    @property
    def bytes(self) -> int:
        """Bytes that were written to the file so far."""
        return int(self._sink.tell())

    def close(self) -> AddedFile:
        if self._writer is None:
            # Unreachable: a file is opened only for its first rows.
            raise PgOutputError(f"{self.path} has no rows", code="unfit_input")
        self._writer.close()
        size = self.bytes
        self._sink.close()
        local = self._table.place.path
        if local is not None:
            fsync_path(local / self._table.directory / self.path)
        return AddedFile(self.path, size, partition_texts(self._partition), str(self._statistics))


def partition_texts(partition: Mapping[str, Any]) -> dict[str, str | None]:
    """Return partition values in the text form of the log."""
    return {name: _partition_text(name, value) for name, value in partition.items()}


def partition_directory(partition: Mapping[str, Any]) -> str:
    """Return the directory of a partition, such as ``day=2024-05-01/``, as Hive and Spark name it.

    The log has the same values, but some readers, such as polars, take them from this path.
    """
    parts = []
    for name, text in partition_texts(partition).items():
        shown = "__HIVE_DEFAULT_PARTITION__" if text is None else _escaped(text)
        parts.append(f"{_escaped(name)}={shown}/")
    if any(len(part.encode()) > _LONGEST for part in parts):
        return ""  # no file system has such a name
    return "".join(parts)


def _escaped(text: str) -> str:
    """Escape Hive's special characters as ``%XX``. Readers may not decode other escapes."""
    return _SPECIAL.sub(lambda match: f"%{ord(match[0]):02X}", text)


def _partition_text(name: str, value: Any) -> str | None:
    if value is None:
        return None
    if value == "":
        raise PgOutputError(
            f"column {name} has an empty text, and Delta cannot tell it from NULL in a partition "
            "column",
            code="unfit_value",
        )
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, datetime.datetime):
        return value.replace(tzinfo=None).isoformat(" ", "microseconds")
    return str(value)
