"""One Delta table: its files, its commits, and its maintenance.

Rows are first written to Parquet files with unique names. One commit then adds these files to the
table, and moves the table's position. A vacuum deletes files that no commit has added.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import re
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq

from .._disk import fsync_path
from ..errors import PgOutputError
from ..lsn import format_lsn
from .delta_files import DeltaFileWriter, is_small, partition_texts
from .delta_log import commits_since
from .delta_place import directory_of, require_deltalake
from .delta_statistics import BOUNDED_COLUMNS, bounded_columns, names_in, property_of
from .delta_types import conformed, has_type, stored_schema
from .targets import ConflictError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence
    from pathlib import Path

    from .delta_files import AddedFile, Written
    from .delta_joins import Joins
    from .delta_place import DeltaPlace

_PER_TIER, _TIER_FACTOR, _LEAST_TIER = 8, 8, 1 << 16
"""Tiers of file sizes: eight files of a tier are joined; each tier is eight times as large as the
one before, and the first one ends at 64 KB."""
_MAINTAINED, VACUUMED = 64, 640
"""Commits between two joins of small files, and between two vacuums."""
_ATTEMPTS = 6
"""Attempts to commit while other programs commit, too."""
_LOG_HOURS = 1
"""Hours for which commits stay in the log after a checkpoint covers them. Each commit lists all."""
_FEATURES = {"timestampNtz", "appendOnly", "invariants", "variantType"}
"""Table features with which files still hold the table's rows as they are.

delta-rs 1.6 adds variantType to a table with features when it sets a property. In a table without
a variant column, this feature changes nothing.
"""
# File names of this package, delta-rs and Spark: all contain a UUID.
_DATA = re.compile(r".*[0-9a-f]{8}(?:-?[0-9a-f]{4}){3}-?[0-9a-f]{12}.*\.(?:parquet|bin)")
_DELETING = 8  # threads


class File(NamedTuple):
    """A file of a table.

    Attributes
    ----------
    path : str
        The path in the log.
    size, rows : int
        Bytes and rows; rows is -1 if the log lacks it.
    partition : dict of str to object
        The values of partition columns, which the file lacks.
    least, greatest : dict of str to object
        Bounds of values by column, for the columns of `bounded_columns`.
    """

    path: str
    size: int
    rows: int
    partition: dict[str, Any]
    least: dict[str, Any]
    greatest: dict[str, Any]


_UNIX_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)


class LakeTable:
    """A Delta table.

    Parameters
    ----------
    place : DeltaPlace
    directory : str
        The table's directory in the place.
    app : str
        The application id of our transactions in the log. Its version is the table's LSN.
    retention_hours : int
        Hours for which replaced files stay, for readers of older versions.

    Attributes
    ----------
    changed : str or None
        How another program has changed rows since our last commit; None if none has.
    commit_time : int or None
        The commit time of the newest change on the server, in microseconds since 1970. The next
        commits show it in Delta's history, beside the LSN.
    replaced : collection of str
        Application ids of tables that count as missing. `create` replaces such a table in one
        commit.
    """

    replaced: Collection[str] = ()

    uncommitted = ""
    """Subdirectory for files before their commit; empty if they have their final path at once."""

    def __init__(self, place: DeltaPlace, directory: str, app: str, retention_hours: int) -> None:
        self.place = place
        self.directory = directory
        self.app = app
        self._retention = retention_hours
        self._filesystem: Any = None
        self.delta: Any = None
        self._maintained_at = 0
        self._on_disk = -1
        self._checked_version = -1
        self.changed: str | None = None
        self.commit_time: int | None = None

    @property
    def uri(self) -> str:
        """The table's path or URL for delta-rs."""
        return f"{self.place.uri}/{self.directory}"

    @property
    def exists(self) -> bool:
        """Whether the table exists, as of the last `load` or `create`."""
        return self.delta is not None

    @property
    def filesystem(self) -> Any:
        """The file system of the table's directory."""
        if self._filesystem is None:
            if self.place.path is not None:
                (self.place.path / self.directory).mkdir(parents=True, exist_ok=True)
            self._filesystem = self.place.filesystem(self.directory)
        return self._filesystem

    def refusals(self) -> Any:
        """See `DeltaPlace`."""
        return self.place.refusals(self.directory)

    # --- what is there ---------------------------------------------------------------------------

    def load(self) -> None:
        """Load the newest version of the table, if the table exists.

        Raises
        ------
        PgOutputError
            The directory or the table is not of this sync, or can't be read.
        """
        deltalake = require_deltalake()
        with self.refusals():
            if self.delta is not None:
                self._update()
                return
            local = self.place.path
            if local is not None and not (local / self.directory / "_delta_log").is_dir():
                if (local / self.directory).is_dir() and any((local / self.directory).iterdir()):
                    self._has_files_alone(local / self.directory)
                return
            if not deltalake.DeltaTable.is_deltatable(self.uri, self.place.options):
                return
            delta = deltalake.DeltaTable(self.uri, storage_options=self.place.options)
            own = delta.transaction_version(self.app)
            if own is None and any(delta.transaction_version(app) for app in self.replaced):
                return
        self._check(delta)
        self.delta = delta
        self._maintained_at = self._on_disk = delta.version()
        with self.refusals():
            self._check_foreign_commits()

    def _update(self) -> None:
        """Load the newest version, which another program may have made."""
        self.delta.update_incremental()
        self._check_foreign_commits()

    def _check_foreign_commits(self) -> None:
        """Find out what other programs did since our last commit."""
        newest = self.version
        if newest <= self._checked_version:
            return
        since = commits_since(self.filesystem, newest, self._checked_version, self.app)
        if since.has_foreign:
            self._check(self.delta)
        self._checked_version = newest
        # Our newest commit has accepted what other programs did before it.
        if since.has_ours or since.changed is not None:
            self.changed = since.changed

    def is_its_own(self) -> bool:
        """Whether the table exists and has transactions of `app`."""
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
        """Rename the table: move its directory to one of the new name beside it."""
        kind = self.directory.partition("/")[0]
        self.place.move(self.directory, f"{kind}/{directory_of(name)}")

    def _has_files_alone(self, directory: Path) -> None:
        """Refuse files of others. Parquet files are ours: an attempt ended before its commit."""
        if any(path.suffix != ".parquet" for path in directory.rglob("*") if not path.is_dir()):
            raise PgOutputError(
                f"{directory} has files, but is not a Delta table",
                code="not_ours",
                path=str(directory),
                hint="Give another target, or delete this directory",
            )

    def _check(self, delta: Any) -> None:
        if delta.transaction_version(self.app) is None:
            raise self.is_foreign()
        protocol = delta.protocol()
        features = {*(protocol.reader_features or ()), *(protocol.writer_features or ())}
        if unknown := sorted(features - _FEATURES):
            raise PgOutputError(
                f"the Delta table in {self.uri} has features that sync does not support: "
                f"{', '.join(unknown)}",
                code="not_supported",
                path=self.uri,
                hint="Remove these features, or delete the table and start sync again: it gets a "
                "new snapshot",
            )

    def is_foreign(self) -> PgOutputError:
        """Return the error that the table has no transactions of `app`."""
        return PgOutputError(
            f"the table in {self.uri} does not belong to this sync ({self.app})",
            code="not_ours",
            path=self.uri,
            hint="Move it away, or give another target",
        )

    @property
    def position(self) -> tuple[int, int]:
        """The table's LSN and its snapshot LSN."""
        if self.delta is None:
            return 0, 0
        with self.refusals():
            versions = [self.delta.transaction_version(app) for app in (self.app, self._snapshots)]
        return versions[0] or 0, versions[1] or 0

    @property
    def version(self) -> Any:
        """The loaded version of the table; -1 if there is no table."""
        return -1 if self.delta is None else self.delta.version()

    @property
    def gap(self) -> int | None:
        """The LSN before which another program has changed the table's changes; else None."""
        return self.transaction("gap") if self.changed is None else self.position[0]

    @property
    def _snapshots(self) -> str:
        return f"{self.app}/snapshot"

    def transaction(self, suffix: str) -> int | None:
        """Return the newest transaction number under the id of `app` with a suffix."""
        version: int | None = None
        if self.delta is not None:
            with self.refusals():
                version = self.delta.transaction_version(f"{self.app}/{suffix}")
        return version

    @property
    def schema(self) -> pa.Schema:
        """The table's columns."""
        # `stored_schema` names the parts of lists and maps as pyarrow does.
        return stored_schema(pa.schema(self.delta.schema().to_arrow()))

    @property
    def partition_by(self) -> list[str]:
        """The partition columns. Files lack them, as all rows of a file have the same values."""
        return list(self.delta.metadata().partition_columns)

    def files(self) -> list[File]:
        """Return the files of the loaded version."""
        actions = pa.table(self.delta.get_add_actions()).to_pylist()
        names = bounded_columns(self.schema)

        def bounds(of: dict[str, Any] | None) -> dict[str, Any]:
            return {name: of[name] for name in names if name in of} if of else {}

        return [
            File(
                unquote(action["path"]), action["size_bytes"],
                -1 if action.get("num_records") is None else action["num_records"],
                action.get("partition") or {}, bounds(action.get("min")), bounds(action.get("max")),
            )
            for action in actions
        ]  # fmt: skip

    def open_file(self, file: File) -> pq.ParquetFile:
        """Open a file to read it."""
        return pq.ParquetFile(self.filesystem.open_input_file(file.path), pre_buffer=True)

    # --- changing it -----------------------------------------------------------------------------

    def create(
        self,
        schema: pa.Schema,
        position: tuple[int, int],
        partition_by: Sequence[str] = (),
        description: str | None = None,
        files: Sequence[AddedFile] = (),
    ) -> None:
        """Create the table with its first files in one commit; an existing table is replaced."""
        deltalake = require_deltalake()
        from deltalake.transaction import create_table_with_add_actions

        hours = f"interval {self._retention} hours"
        log_hours = f"interval {min(self._retention, _LOG_HOURS)} hours"
        with self.refusals():
            if self.place.path is not None:
                (self.place.path / self.directory).mkdir(parents=True, exist_ok=True)
            create_table_with_add_actions(
                self.uri,
                deltalake.Schema.from_arrow(schema),
                _add_actions(files),
                mode="overwrite" if self.exists or self.replaced else "error",
                partition_by=list(partition_by),
                description=description,
                configuration={
                    "delta.logRetentionDuration": log_hours,
                    "delta.deletedFileRetentionDuration": hours,
                    BOUNDED_COLUMNS: property_of(bounded_columns(schema, partition_by)),
                },
                storage_options=self.place.options,
                commit_properties=self._properties(position, altered=0),
            )
            self.delta = deltalake.DeltaTable(self.uri, storage_options=self.place.options)
            self._check_foreign_commits()
            self._have_on_disk()

    def describe(self, description: str) -> None:
        """Set the table's description, if it differs."""
        if self.delta.metadata().description != description:
            with self.refusals():
                self.delta.alter.set_table_description(
                    description, commit_properties=self._properties(None)
                )
                self._stood()

    def _properties(self, position: tuple[int, int] | None, **more: int) -> Any:
        from deltalake import CommitProperties, Transaction

        transactions = [Transaction(f"{self.app}/{name}", value) for name, value in more.items()]
        if position is not None:
            transactions.append(Transaction(self.app, position[0]))
            transactions.append(Transaction(self._snapshots, position[1]))
        metadata = {}
        if position is not None:
            metadata["pgoutput_fast.lsn"] = format_lsn(position[0])
            if self.commit_time is not None:
                metadata["pgoutput_fast.commit_time"] = (
                    _UNIX_EPOCH + datetime.timedelta(microseconds=self.commit_time)
                ).isoformat()
        # With retries, delta-rs would commit after other programs' commits that we have not seen.
        return CommitProperties(
            app_transactions=transactions, custom_metadata=metadata, max_commit_retries=0
        )

    def _stood(self) -> None:
        """Load the version that our commit has made, and flush it to disk."""
        self._checked_version += 1
        self._update()
        self._have_on_disk()

    def check_position(self, position: tuple[int, int]) -> None:
        """Refuse a table that another sync has written, by its position."""
        if self.position != position:
            raise self.place.conflict(self.directory)

    def until_it_stands(self, commit: Callable[[], None]) -> None:
        """Read and commit; repeat this if other programs commit in between.

        Parameters
        ----------
        commit : callable
            Reads the loaded version, and commits on it.

        Raises
        ------
        ConflictError
            In each of `_ATTEMPTS` attempts, another program committed first.
        """
        for _ in range(_ATTEMPTS - 1):
            version = self.version
            try:
                commit()
            except PgOutputError:
                self.load()
                # Any error may come of another program's commit, which may have deleted files.
                if self.version == version:
                    raise
            else:
                return
        commit()

    def add_columns(self, schema: pa.Schema) -> None:
        """Add the columns that a schema has and the table lacks; existing rows are null there.

        Call it before you read rows, because it is a commit of its own.
        """
        import deltalake

        own_schema = self.schema
        old = {field.name: field.type for field in own_schema}
        fields = [
            field
            for field, plain in zip(deltalake.Schema.from_arrow(schema).fields, schema, strict=True)
            if old.get(plain.name) != plain.type
        ]
        if fields:
            with self.refusals():
                self.delta.alter.add_columns(fields, commit_properties=self._properties(None))
                self._stood()

    def allow(self, schema: pa.Schema) -> None:
        """Prepare the table for an overwrite with these columns. Call it before you read rows.

        Timestamps without time zone need a table feature, which an overwrite does not add. Columns
        that can't have bounds with their new types leave the table's list of bounded columns.
        """
        from deltalake import TableFeatures

        is_so = has_type(schema, lambda type_: type_ == pa.timestamp("us"))
        if is_so and "timestampNtz" not in (self.delta.protocol().reader_features or ()):
            with self.refusals():
                self.delta.alter.add_feature(
                    TableFeatures.TimestampWithoutTimezone,
                    allow_protocol_versions_increase=True,
                    commit_properties=self._properties(None),
                )
                self._stood()
        with self.refusals():
            self._bound(schema, self._bounded)

    def commit(
        self,
        files: Written,
        removed: Sequence[File],
        position: tuple[int, int] | None,
        *,
        schema: pa.Schema | None = None,
        **more: int,
    ) -> None:
        """Add and remove files in one commit on the loaded version.

        Parameters
        ----------
        files : Written
        removed : sequence of File
        position : tuple of int, or None
            The new LSN and snapshot LSN. None if the rows stay the same, as in a join of files.
        schema : pyarrow.Schema, optional
            Overwrite: remove all other files, and take these columns. Call `allow` before.
        more
            Numbers for :meth:`transaction`.

        Raises
        ------
        ConflictError
            The table has a newer version than the loaded one.
        """
        from deltalake import Schema
        from deltalake.transaction import RemoveAction

        changes = position is not None
        actions = _add_actions(files, changes=changes)
        if changes and schema is None and self.changed is not None:
            more["gap"] = self.position[0]
        with self.refusals():
            if schema is None:
                now = int(time.time() * 1000)
                actions += [
                    RemoveAction(
                        file.path, changes, now, file.size, partition_texts(file.partition)
                    )
                    for file in removed
                ]
            self.delta.create_write_transaction(
                actions,
                "append" if schema is None else "overwrite",
                self.delta.schema() if schema is None else Schema.from_arrow(schema),
                partition_by=self.partition_by,
                commit_properties=self._properties(position, **more),
            )
            if changes:
                self.changed = None
            self._stood()
        # If another program changes the properties, fewer columns are listed than have bounds,
        # which does no harm.
        with contextlib.suppress(ConflictError), self.refusals():
            # After an overwrite, all files are new and have bounds of all possible columns.
            self._bound(self.schema, self._bounded if schema is None else schema.names)

    @property
    def _bounded(self) -> list[str]:
        """The columns that have bounds in all files, by the table's property."""
        return names_in(self.delta.metadata().configuration.get(BOUNDED_COLUMNS, ""))

    def _bound(self, schema: pa.Schema, names: Sequence[str]) -> None:
        """Set the table's list of bounded columns to those of `names` that can have bounds."""
        wanted = [name for name in bounded_columns(schema, self.partition_by) if name in names]
        setting = self.delta.metadata().configuration.get(BOUNDED_COLUMNS)
        if setting is not None and "timestampNtz" in (self.delta.protocol().reader_features or ()):
            # When delta-rs 1.6 changes properties of a table with features, it adds the feature
            # variantType, which many readers lack. So change this list only to shorten it.
            wanted = [name for name in wanted if name in names_in(setting)]
        if setting is None or {*names_in(setting)} != {*wanted}:
            self.delta.alter.set_table_properties({BOUNDED_COLUMNS: property_of(wanted)})
            self._update()

    def _have_on_disk(self) -> None:
        """Flush our commits to the local disk, because delta-rs does not."""
        before, self._on_disk = self._on_disk, self.delta.version()
        if self.place.path is not None:
            log = self.place.path / self.directory / "_delta_log"
            # Several commits: a join of files may have followed the commit that this is for.
            for version in range(before + 1, self._on_disk + 1):
                fsync_path(log / f"{version:020}.json")
            fsync_path(log)

    def committed(self, file: AddedFile) -> str:
        """Return the path of a committed file in the place."""
        return f"{self.directory}/{file.path}"

    # --- maintenance -----------------------------------------------------------------------------

    def maintain(self, joins: Joins | None = None) -> None:
        """Join small files and delete old ones, if enough commits were made.

        Parameters
        ----------
        joins : Joins, optional
            Joins files in a thread while the sync goes on. While it is busy, the next call tries
            again.
        """
        if self.delta is None:
            return
        before, now = self._maintained_at, self.delta.version()
        if before // _MAINTAINED == now // _MAINTAINED:
            return
        if joins is None:
            self._compact_unless_changed()
        is_old = before // VACUUMED != now // VACUUMED
        if is_old:
            if joins is not None:
                joins.wait()  # a vacuum would delete its files, which are not committed yet
                self.load()  # a vacuum has to know them once they are committed
            self.vacuum()
        if joins is None or joins.begin(self._compact_beside):
            self._maintained_at = now

    def _compact_beside(self) -> None:
        """Join small files while another thread writes the table."""
        table = LakeTable(self.place, self.directory, self.app, self._retention)
        table.load()
        table._compact_unless_changed()

    def _compact_unless_changed(self) -> None:
        """Join small files; give up if another program commits."""
        with contextlib.suppress(ConflictError):
            self.compact()

    def compact(self) -> None:
        """Join the small files of each partition and size tier that has at least `_PER_TIER`."""
        tiers: dict[Any, list[File]] = {}
        for file in self.files():
            tier, most = 0, _LEAST_TIER
            while file.size > most:
                tier, most = tier + 1, most * _TIER_FACTOR
            if is_small(file.size):
                partition = tuple(sorted(partition_texts(file.partition).items()))
                tiers.setdefault((partition, tier), []).append(file)
        schema, partition_by = self.schema, self.partition_by
        for files in tiers.values():
            if len(files) < _PER_TIER:
                continue
            with self.refusals(), DeltaFileWriter(self, schema, partition_by, "joined") as writer:
                # In the order of their changes.
                for file in sorted(files, key=lambda file: str(file.least.get("commit_lsn", ""))):
                    for rows in self.rows(file, schema):
                        writer.write(rows)
                joined = writer.finish()
            self.until_it_stands(functools.partial(self._replace, files, joined))

    def _replace(self, files: Sequence[File], joined: Written) -> None:
        """Replace files by a file with the same rows."""
        if not {file.path for file in files} <= {file.path for file in self.files()}:
            raise self.place.conflict(self.directory)
        self.commit(joined, files, None)

    def rows(self, file: File, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """Iterate over the row groups of a file, with the columns of a schema."""
        with self.open_file(file) as opened:
            for group in range(opened.num_row_groups):
                yield self.group(file, opened, group, schema)

    def group(
        self, file: File, opened: pq.ParquetFile, group: int, schema: pa.Schema
    ) -> pa.RecordBatch:
        """Read a row group of an open file, with the columns of a schema."""
        stored_names = set(opened.schema_arrow.names)
        names = [field.name for field in schema if field.name in stored_names]
        if stored_names <= set(names):
            rows = opened.read_row_group(group)
        else:
            rows = opened.read_row_group(group, columns=names).select(names)
        count = opened.metadata.row_group(group).num_rows
        for name, value in file.partition.items():
            at = schema.get_field_index(name)
            if at >= 0 and name not in stored_names:
                constant = pa.repeat(pa.scalar(value, schema.field(at).type), count)
                rows = rows.append_column(name, constant)
        if not rows.num_columns:
            rows = pa.table({"": pa.nulls(count)})
        return conformed(rows, schema)

    def delete_files(self, files: Written) -> None:
        """Delete files that no commit has; errors are ignored."""
        for file in files:
            with contextlib.suppress(Exception):
                self.filesystem.delete_file(file.path)

    def vacuum(self) -> None:
        """Delete files that the table no longer has, or never had, after the retention time.

        Only files with the name of a Delta writer are deleted. delta-rs itself would delete
        any file that somebody has put into the directory.
        """
        with self.refusals():
            paths = self.delta.vacuum(
                retention_hours=self._retention,
                dry_run=True,
                enforce_retention_duration=False,
                full=True,
            )
            own = [path for path in paths if _DATA.fullmatch(path.rpartition("/")[2])]
            with ThreadPoolExecutor(_DELETING) as pool:
                list(pool.map(self._delete, own))

    def _delete(self, path: str) -> None:
        # delta-rs also lists files that an earlier vacuum has deleted.
        with contextlib.suppress(FileNotFoundError):
            self.filesystem.delete_file(path)


def _add_actions(files: Sequence[AddedFile], *, changes: bool = True) -> list[Any]:
    """Return the log's add actions of files; `changes` says whether they have new rows."""
    from deltalake.transaction import AddAction

    now = int(time.time() * 1000)
    return [
        AddAction(file.path, file.size, file.partition, now, changes, file.statistics)
        for file in files
    ]
