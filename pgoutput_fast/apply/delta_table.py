"""One Delta table: its files, what a commit does to them, and what keeps it small.

Rows are written as Parquet files first, under names that nobody else takes. They are the table's
when one commit registers them, which has the table's position too. Files that nobody registers are
deleted by a vacuum, at the latest.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import re
import time
import uuid
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq

from .._disk import fsync_path
from ..errors import PgOutputError
from .delta_place import directory_of, require_deltalake
from .delta_types import conformed, has_type, stored_schema

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from typing_extensions import Self

    from .delta_place import Place

_FILE_BYTES = 64 << 20
"""Of a file, about. A changed row has its whole file written anew."""
_GROUP_ROWS = 1 << 17
_GROUP_BYTES = 32 << 20
"""Of a group of rows in a file: so much of it is in memory."""
_SPECIAL = re.compile(r"""[\x00-\x1f"#%'*/:=?\\{}\[\]^\x7f]""")
"""Characters that Hive escapes in the names of partitions' directories."""
_LONGEST = 255
"""Bytes of such a name and its slash, at most."""
_SAMPLED = 4096
"""Rows by which it is decided how a file holds a column."""
_OPEN_PARTITIONS = 32
"""So many partitions have an open file."""
_INDEXED = 32
"""Columns of which the log has the least and greatest values."""
_SHOWN_CHARACTERS = 32
"""Of texts among them."""
_PER_TIER, _TIER_FACTOR, _LEAST_TIER = 8, 8, 1 << 16
"""Files of about one size are joined when there are so many; sizes a factor apart are another."""
_MAINTAINED, _VACUUMED = 64, 640
"""Commits after which small files are joined, and after which old ones are deleted."""
_LOG_HOURS = 1
"""Of commits that a checkpoint has. All that are there are listed at every commit."""
_FEATURES = {"timestampNtz", "appendOnly", "invariants"}
"""Of tables whose files have their rows as they are: what we know."""


class File(NamedTuple):
    """A file of a table.

    Attributes
    ----------
    path : str
        As the log has it.
    size, rows : int
        rows is -1 where the log does not tell.
    partition : dict of str to object
        The values of columns that the file lacks.
    least, greatest : dict of str to object
        What the log has of the values of columns.
    """

    path: str
    size: int
    rows: int
    partition: dict[str, Any]
    least: dict[str, Any]
    greatest: dict[str, Any]


class Table:
    """A Delta table.

    Parameters
    ----------
    place : Place
    directory : str
        Its directory in the place.
    app : str
        By which the table knows whose changes it has. Its version in the log is the position.
    retention_hours : int
        What was replaced stays for so long, for readers of older versions.
    """

    def __init__(self, place: Place, directory: str, app: str, retention_hours: int) -> None:
        self.place = place
        self.directory = directory
        self.app = app
        self._retention = retention_hours
        self._filesystem: Any = None
        self.delta: Any = None
        self._maintained_at = 0

    @property
    def uri(self) -> str:
        """For delta-rs."""
        return f"{self.place.uri}/{self.directory}"

    @property
    def exists(self) -> bool:
        """Whether it was made."""
        return self.delta is not None

    @property
    def filesystem(self) -> Any:
        """Its files."""
        if self._filesystem is None:
            if self.place.path is not None:
                (self.place.path / self.directory).mkdir(parents=True, exist_ok=True)
            self._filesystem = self.place.filesystem(self.directory)
        return self._filesystem

    def refusals(self) -> Any:
        """See `Place`."""
        return self.place.refusals(self.directory)

    # --- what is there ---------------------------------------------------------------------------

    def load(self) -> None:
        """Look at what is there now.

        Raises
        ------
        PgOutputError
            It is something else's.
        """
        deltalake = require_deltalake()
        with self.refusals():
            if self.delta is not None:
                self.delta.update_incremental()
                return
            local = self.place.path
            if local is not None and not (local / self.directory / "_delta_log").is_dir():
                if (local / self.directory).is_dir() and any((local / self.directory).iterdir()):
                    self._has_files_alone(local / self.directory)
                return
            if not deltalake.DeltaTable.is_deltatable(self.uri, self.place.options):
                return
            delta = deltalake.DeltaTable(self.uri, storage_options=self.place.options)
        self._check(delta)
        self.delta = delta
        self._maintained_at = delta.version()

    def is_its_own(self) -> bool:
        """Whether there is a table, and it has the changes of the app."""
        deltalake = require_deltalake()
        with self.refusals():
            local = self.place.path
            if local is not None and not (local / self.directory / "_delta_log").is_dir():
                return False
            if not deltalake.DeltaTable.is_deltatable(self.uri, self.place.options):
                return False
            delta = deltalake.DeltaTable(self.uri, storage_options=self.place.options)
            return delta.transaction_version(self.app) is not None

    def rename(self, name: str) -> None:
        """Have another name, and with it another directory beside this one."""
        kind = self.directory.partition("/")[0]
        self.place.move(self.directory, f"{kind}/{directory_of(name)}")

    def _has_files_alone(self, directory: Path) -> None:
        """Files of an attempt that ended before its first commit are ours; others are not."""
        if any(one.suffix != ".parquet" for one in directory.rglob("*") if not one.is_dir()):
            raise PgOutputError(
                f"{directory} has files and is no Delta table: give another target, or delete it"
            )

    def _check(self, delta: Any) -> None:
        if delta.transaction_version(self.app) is None:
            raise PgOutputError(
                f"the table in {self.uri} is not of this sync ({self.app}): move it away, or give "
                "another target"
            )
        protocol = delta.protocol()
        features = {*(protocol.reader_features or ()), *(protocol.writer_features or ())}
        if unknown := sorted(features - _FEATURES):
            raise PgOutputError(
                f"the table in {self.uri} was given features that a sync does not know: "
                f"{', '.join(unknown)}. Take them away, or delete the table and copy it again"
            )

    @property
    def position(self) -> tuple[int, int]:
        """The LSN up to which it has changes, and that of its snapshot."""
        if self.delta is None:
            return 0, 0
        found = [self.delta.transaction_version(app) for app in (self.app, self._snapshots)]
        return found[0] or 0, found[1] or 0

    @property
    def _snapshots(self) -> str:
        return f"{self.app}/snapshot"

    def transaction(self, suffix: str) -> int | None:
        """A number that commits have under another name of the app."""
        found: int | None = None
        if self.delta is not None:
            found = self.delta.transaction_version(f"{self.app}/{suffix}")
        return found

    @property
    def schema(self) -> pa.Schema:
        """Its columns."""
        # Lists and maps as pyarrow itself names their parts.
        return stored_schema(pa.schema(self.delta.schema().to_arrow()))

    @property
    def partition_by(self) -> list[str]:
        """The columns that its files lack, as all rows of one have the same values there."""
        return list(self.delta.metadata().partition_columns)

    def files(self) -> list[File]:
        """The files that it has."""
        found = pa.table(self.delta.get_add_actions()).to_pylist()
        return [
            File(
                unquote(one["path"]), one["size_bytes"],
                -1 if one.get("num_records") is None else one["num_records"],
                one.get("partition") or {}, one.get("min") or {}, one.get("max") or {},
            )
            for one in found
        ]  # fmt: skip

    def open_file(self, file: File) -> pq.ParquetFile:
        """Open one of them to read it."""
        return pq.ParquetFile(self.filesystem.open_input_file(file.path), pre_buffer=True)

    # --- changing it -----------------------------------------------------------------------------

    def create(
        self,
        schema: pa.Schema,
        position: tuple[int, int],
        partition_by: Sequence[str] = (),
        description: str | None = None,
    ) -> None:
        """Make the table, without rows."""
        deltalake = require_deltalake()
        hours = f"interval {self._retention} hours"
        log_hours = f"interval {min(self._retention, _LOG_HOURS)} hours"
        with self.refusals():
            if self.place.path is not None:
                (self.place.path / self.directory).mkdir(parents=True, exist_ok=True)
            self.delta = deltalake.DeltaTable.create(
                self.uri,
                deltalake.Schema.from_arrow(schema),
                partition_by=list(partition_by),
                description=description,
                configuration={
                    "delta.logRetentionDuration": log_hours,
                    "delta.deletedFileRetentionDuration": hours,
                },
                storage_options=self.place.options,
                commit_properties=self._properties(position),
            )
            self._have_on_disk()

    def describe(self, description: str) -> None:
        """Have another description, if it is another one."""
        if self.delta.metadata().description != description:
            with self.refusals():
                self.delta.alter.set_table_description(description)
                self.delta.update_incremental()
                self._have_on_disk()

    def _properties(self, position: tuple[int, int] | None, **more: int) -> Any:
        from deltalake import CommitProperties, Transaction

        transactions = [Transaction(f"{self.app}/{name}", value) for name, value in more.items()]
        if position is not None:
            transactions.append(Transaction(self.app, position[0]))
            transactions.append(Transaction(self._snapshots, position[1]))
        return CommitProperties(app_transactions=transactions)

    def add_columns(self, schema: pa.Schema) -> None:
        """Have all columns of a schema that has those of the table; new ones are null."""
        import deltalake

        there = self.schema
        if schema == there:
            return
        old = {field.name: field.type for field in there}
        fields = [
            field
            for field, plain in zip(deltalake.Schema.from_arrow(schema).fields, schema, strict=True)
            if old.get(plain.name) != plain.type
        ]
        with self.refusals():
            self.delta.alter.add_columns(fields)
            self.delta.update_incremental()
            self._have_on_disk()

    def commit(
        self,
        files: Written,
        removed: Sequence[File],
        position: tuple[int, int] | None,
        *,
        schema: pa.Schema | None = None,
        **more: int,
    ) -> None:
        """Have files be the table's, and others not.

        It is refused if another program has moved the position since the table was looked at.

        Parameters
        ----------
        files : Written
        removed : sequence of File
        position : tuple of int, or None
            None: the rows are the same.
        schema : pyarrow.Schema, optional
            All other files are removed, and these are the columns.
        more
            Numbers for :meth:`transaction`.
        """
        from deltalake import Schema
        from deltalake.transaction import AddAction, RemoveAction

        now = int(time.time() * 1000)
        changes = position is not None
        actions: list[Any] = [
            AddAction(one.path, one.size, one.partition, now, changes, one.statistics)
            for one in files
        ]
        with self.refusals():
            if schema is not None:
                self._allow(schema)
            else:
                actions += [
                    RemoveAction(one.path, changes, now, one.size, partition_texts(one.partition))
                    for one in removed
                ]
            self.delta.create_write_transaction(
                actions,
                "append" if schema is None else "overwrite",
                self.delta.schema() if schema is None else Schema.from_arrow(schema),
                partition_by=self.partition_by,
                commit_properties=self._properties(position, **more),
            )
            self.delta.update_incremental()
            self._have_on_disk()

    def _allow(self, schema: pa.Schema) -> None:
        """Timestamps without zone are a feature of a table, which an overwrite does not add."""
        from deltalake import TableFeatures

        is_so = has_type(schema, lambda type_: type_ == pa.timestamp("us"))
        if is_so and "timestampNtz" not in (self.delta.protocol().reader_features or ()):
            self.delta.alter.add_feature(
                TableFeatures.TimestampWithoutTimezone, allow_protocol_versions_increase=True
            )
            self.delta.update_incremental()

    def _have_on_disk(self) -> None:
        """Wait until the last commit is on the local disk, as delta-rs does not."""
        if self.place.path is not None:
            log = self.place.path / self.directory / "_delta_log"
            fsync_path(log / f"{self.delta.version():020}.json")
            fsync_path(log)

    # --- maintenance -----------------------------------------------------------------------------

    def maintain(self) -> None:
        """Join small files and delete old ones, if it is time for that."""
        if self.delta is None:
            return
        before, now = self._maintained_at, self.delta.version()
        if before // _MAINTAINED == now // _MAINTAINED:
            return
        self._maintained_at = now
        self.compact()
        if before // _VACUUMED != now // _VACUUMED:
            self.vacuum()

    def compact(self) -> None:
        """Join files of about one size where there are many."""
        tiers: dict[Any, list[File]] = {}
        for file in self.files():
            tier, most = 0, _LEAST_TIER
            while file.size > most:
                tier, most = tier + 1, most * _TIER_FACTOR
            if file.size < _FILE_BYTES // 2:
                partition = tuple(sorted(partition_texts(file.partition).items()))
                tiers.setdefault((partition, tier), []).append(file)
        schema, partition_by = self.schema, self.partition_by
        for files in tiers.values():
            if len(files) < _PER_TIER:
                continue
            with self.refusals(), Writer(self, schema, partition_by, "joined") as writer:
                # In the order in which they came.
                for file in sorted(files, key=lambda one: str(one.least.get("commit_lsn", ""))):
                    for rows in self.rows(file, schema):
                        writer.write(rows)
                self.commit(writer.finish(), files, None)

    def rows(self, file: File, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """The rows of a file, group by group, with these columns."""
        with self.open_file(file) as opened:
            for group in range(opened.num_row_groups):
                yield self.group(file, opened, group, schema)

    def group(
        self, file: File, opened: pq.ParquetFile, group: int, schema: pa.Schema
    ) -> pa.RecordBatch:
        """Some columns of a group of a file's rows."""
        there = set(opened.schema_arrow.names)
        names = [field.name for field in schema if field.name in there]
        if there <= set(names):
            rows = opened.read_row_group(group)
        else:
            rows = opened.read_row_group(group, columns=names).select(names)
        count = opened.metadata.row_group(group).num_rows
        for name, value in file.partition.items():
            at = schema.get_field_index(name)
            if at >= 0 and name not in there:
                constant = pa.repeat(pa.scalar(value, schema.field(at).type), count)
                rows = rows.append_column(name, constant)
        if not rows.num_columns:
            rows = pa.table({"": pa.nulls(count)})
        return conformed(rows, schema)

    def delete_files(self, files: Written) -> None:
        """Delete files that no commit has, as far as that is possible."""
        for one in files:
            with contextlib.suppress(Exception):
                self.filesystem.delete_file(one.path)

    def vacuum(self) -> None:
        """Delete the files that the table has no more, and those that it never had."""
        with self.refusals():
            self.delta.vacuum(
                retention_hours=self._retention,
                dry_run=False,
                enforce_retention_duration=False,
                full=True,
            )
            self.delta.update_incremental()


class Added(NamedTuple):
    """A file that was written, and what the log gets of it."""

    path: str
    size: int
    partition: dict[str, str | None]
    statistics: str


Written = list[Added]


class Writer:
    """Writes rows into new files of a table; nobody sees them before a commit.

    Parameters
    ----------
    table : Table
    schema : pyarrow.Schema
    partition_by : sequence of str
    prefix : str
        Of the files' names.
    """

    def __init__(
        self, table: Table, schema: pa.Schema, partition_by: Sequence[str], prefix: str
    ) -> None:
        self._table = table
        self.schema = schema
        self._partition_by = list(partition_by)
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
            Batches of rows, which are few, or parts of a group.
        size : int, optional
            Their bytes together, if that is known.
        """
        self._pending += [one for one in parts if one.num_rows]
        self._pending_rows += sum(one.num_rows for one in parts)
        self.pending_bytes += sum(one.nbytes for one in parts) if size is None else size
        if self._pending_rows >= _GROUP_ROWS or self.pending_bytes >= _GROUP_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what is kept in memory."""
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
                    dict(zip(self._partition_by, partition, strict=True)),
                )
            opened.write(part)
            if opened.bytes >= _FILE_BYTES:
                self._written.append(self._open.pop(partition).close())

    def _parts(self, rows: pa.Table) -> Iterator[tuple[tuple[Any, ...], pa.Table]]:
        """The rows of each partition, without its columns."""
        names = self._partition_by
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
        """Close all files; what they are, for a commit."""
        self.flush()
        self._close_all()
        self._finished = True
        return self._written

    def end_of_file(self) -> None:
        """What is written next may go into another file, if this one is large enough."""
        if any(one.bytes >= _FILE_BYTES // 2 for one in self._open.values()):
            self.flush()
            self._close_all()

    def _close_all(self) -> None:
        while self._open:
            self._written.append(self._open.popitem()[1].close())

    def discard(self) -> None:
        """Delete what was written, as far as that is possible."""
        self._pending, self._pending_rows, self.pending_bytes = [], 0, 0
        paths = [one.path for one in self._written]
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
        self, table: Table, schema: pa.Schema, prefix: str, partition: dict[str, Any]
    ) -> None:
        self._table = table
        self._partition = partition
        try:
            directory = partition_directory(partition)
        except PgOutputError as error:
            raise PgOutputError(
                f"{table.directory}: {error}: give partition_by= with other columns, delete this "
                "directory if it is there, and call sync again, which has the table copied"
            ) from None
        if directory and table.place.path is not None:
            (table.place.path / table.directory / directory).mkdir(parents=True, exist_ok=True)
        self.path = f"{directory}{prefix}-{uuid.uuid4().hex}.parquet"
        self._schema = schema
        self._metadata: list[Any] = []
        self._sink = table.filesystem.open_output_stream(self.path)
        self._writer: pq.ParquetWriter | None = None

    def write(self, rows: pa.Table) -> None:
        if self._writer is None:
            self._writer = pq.ParquetWriter(
                self._sink,
                self._schema,
                compression="zstd",
                use_dictionary=_repeating(rows),
                metadata_collector=self._metadata,
            )
        self._writer.write_table(rows, row_group_size=_GROUP_ROWS)

    @property
    def bytes(self) -> int:
        """Bytes that it has already."""
        return int(self._sink.tell())

    def close(self) -> Added:
        if self._writer is None:
            raise PgOutputError(f"{self.path} has no rows")  # it is made for its first ones
        self._writer.close()
        size = self.bytes
        self._sink.close()
        local = self._table.place.path
        if local is not None:
            fsync_path(local / self._table.directory / self.path)
        statistics = json.dumps(_statistics(self._schema, self._metadata[0]))
        return Added(self.path, size, partition_texts(self._partition), statistics)


def partition_texts(partition: Mapping[str, Any]) -> dict[str, str | None]:
    """Values of partitions as the log has them."""
    return {name: _partition_text(name, value) for name, value in partition.items()}


def partition_directory(partition: Mapping[str, Any]) -> str:
    """Where files of a partition lie: ``day=2024-05-01/``, as Hive and Spark have it.

    The log says the same of a file, but there are readers, such as polars, that look here.
    """
    parts = []
    for name, text in partition_texts(partition).items():
        shown = "__HIVE_DEFAULT_PARTITION__" if text is None else _escaped(text)
        parts.append(f"{_escaped(name)}={shown}/")
    if any(len(part.encode()) > _LONGEST for part in parts):
        return ""  # no file system has such a name
    return "".join(parts)


def _escaped(text: str) -> str:
    """A text of which Hive's special characters are ``%XX``; others readers may not decode."""
    return _SPECIAL.sub(lambda match: f"%{ord(match[0]):02X}", text)


def _partition_text(name: str, value: Any) -> str | None:
    if value is None:
        return None
    if value == "":
        raise PgOutputError(
            f"column {name} has an empty text, which Delta can't tell from null in a column by "
            "which a table is partitioned"
        )
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, datetime.datetime):
        return value.replace(tzinfo=None).isoformat(" ", "microseconds")
    return str(value)


def _statistics(schema: pa.Schema, metadata: Any) -> dict[str, Any]:
    """What the log has of a file: how many rows, and the values of columns."""
    least: dict[str, Any] = {}
    greatest: dict[str, Any] = {}
    nulls: dict[str, int] = {}
    leaf = 0
    for field in schema:
        if not pa.types.is_nested(field.type) and len(nulls) < _INDEXED:
            _add_statistics(field.name, metadata, leaf, least, greatest, nulls)
        leaf += len(_leaves(field))
    return {
        "numRecords": metadata.num_rows,
        "minValues": {name: _as_json(value) for name, value in least.items()},
        "maxValues": {name: _as_json(value, is_most=True) for name, value in greatest.items()},
        "nullCount": nulls,
    }


def _leaves(field: pa.Field, name: str | None = None) -> list[str]:
    """The names of a field's columns in a Parquet file."""
    name, type_ = name or field.name, field.type
    if pa.types.is_map(type_):
        parts = {"key_value.key": type_.key_field, "key_value.value": type_.item_field}
    elif pa.types.is_list(type_):
        parts = {"list.element": type_.value_field}
    elif pa.types.is_struct(type_):
        parts = {type_.field(i).name: type_.field(i) for i in range(type_.num_fields)}
    else:
        return [name]
    return [leaf for part, one in parts.items() for leaf in _leaves(one, f"{name}.{part}")]


def _repeating(rows: pa.Table) -> list[str]:
    """The columns whose first values repeat, which files hold once; the rest is faster plain."""
    names: list[str] = []
    for field in rows.schema:
        first = rows.column(field.name).slice(0, _SAMPLED)
        nested = pa.types.is_nested(field.type)
        if nested or 2 * len(first.unique()) <= len(first):
            names += _leaves(field)
    return names


def _add_statistics(
    name: str,
    metadata: Any,
    leaf: int,
    least: dict[str, Any],
    greatest: dict[str, Any],
    nulls: dict[str, int],
) -> None:
    found = [metadata.row_group(i).column(leaf) for i in range(metadata.num_row_groups)]
    parts = [one.statistics for one in found]
    if any(one is None or not one.has_null_count for one in parts):
        return
    nulls[name] = sum(one.null_count for one in parts)
    # A group of nulls alone has no values; another one without them has some that are not known.
    valued = [
        one for one, group in zip(parts, found, strict=True) if one.null_count < group.num_values
    ]
    if not valued or not all(one.has_min_max for one in valued):
        return
    low, high = min(one.min for one in valued), max(one.max for one in valued)
    if isinstance(low, (int, str, datetime.date)) and not isinstance(low, bool):
        least[name], greatest[name] = low, high


def _as_json(value: Any, *, is_most: bool = False) -> Any:
    if isinstance(value, datetime.datetime):
        zone = "" if value.tzinfo is None else "Z"
        return value.replace(tzinfo=None).isoformat("T", "microseconds") + zone
    if isinstance(value, datetime.date):
        return value.isoformat()
    if isinstance(value, str) and len(value) > _SHOWN_CHARACTERS:
        # Nothing with these first characters is greater than the last of all behind them.
        return value[:_SHOWN_CHARACTERS] + ("\U0010ffff" if is_most else "")
    return value
