"""One Delta table: its files, what a commit does to them, and what keeps it small.

Rows are written as Parquet files first, under names that nobody else takes. They are the table's
when one commit registers them, which has the table's position too. Files that nobody registers are
deleted by a vacuum, at the latest.
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
from .delta_log import look_since
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
"""Files of about one size are joined when there are so many; sizes a factor apart are another."""
_MAINTAINED, VACUUMED = 64, 640
"""Commits after which small files are joined, and after which old ones are deleted."""
_ATTEMPTS = 6
"""To commit, if other programs commit meanwhile."""
_LOG_HOURS = 1
"""Of commits that a checkpoint has. All that are there are listed at every commit."""
_FEATURES = {"timestampNtz", "appendOnly", "invariants", "variantType"}
"""Of tables whose files have their rows as they are: what we know.

delta-rs 1.6 adds the last one, which needs nothing of a table without such a column, to a table
with features when it sets a property.
"""
# Names of this package, delta-rs and Spark: all have a UUID.
_DATA = re.compile(r".*[0-9a-f]{8}(?:-?[0-9a-f]{4}){3}-?[0-9a-f]{12}.*\.(?:parquet|bin)")
_DELETING = 8  # threads


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
        Bounds of the values of columns; of those with bounds that hold whoever wrote them.
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
        Its directory in the place.
    app : str
        By which the table knows whose changes it has. Its version in the log is the position.
    retention_hours : int
        What was replaced stays for so long, for readers of older versions.

    Attributes
    ----------
    changed : str or None
        What another program changed in its rows since our last commit; None: nothing.
    commit_time : int or None
        The server's time of the newest change, in microseconds since 1970, for the commits that
        come: a position and this time stand in Delta's history.
    replaced : collection of str
        Apps whose table counts as none, and is replaced in one commit when this one is made.
    """

    replaced: Collection[str] = ()

    uncommitted = ""
    """Where in its directory files lie until a commit has them; by default where they stay."""

    def __init__(self, place: DeltaPlace, directory: str, app: str, retention_hours: int) -> None:
        self.place = place
        self.directory = directory
        self.app = app
        self._retention = retention_hours
        self._filesystem: Any = None
        self.delta: Any = None
        self._maintained_at = 0
        self._on_disk = -1
        self._looked_at = -1
        self.changed: str | None = None
        self.commit_time: int | None = None

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
        """See `DeltaPlace`."""
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
            if own is None and any(delta.transaction_version(one) for one in self.replaced):
                return
        self._check(delta)
        self.delta = delta
        self._maintained_at = self._on_disk = delta.version()
        with self.refusals():
            self._look()

    def _update(self) -> None:
        """Load the newest version, which another program may have made."""
        self.delta.update_incremental()
        self._look()

    def _look(self) -> None:
        """See what other programs did since our last commit."""
        newest = self.version
        if newest <= self._looked_at:
            return
        since = look_since(self.filesystem, newest, self._looked_at, self.app)
        if since.has_foreign:
            self._check(self.delta)
        self._looked_at = newest
        # Our newest commit stands on what other programs had done before.
        if since.has_ours or since.changed is not None:
            self.changed = since.changed

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
                f"{directory} has files and is no Delta table",
                code="not_ours",
                path=str(directory),
                hint="Give another target, or delete it",
            )

    def _check(self, delta: Any) -> None:
        if delta.transaction_version(self.app) is None:
            raise self.is_foreign()
        protocol = delta.protocol()
        features = {*(protocol.reader_features or ()), *(protocol.writer_features or ())}
        if unknown := sorted(features - _FEATURES):
            raise PgOutputError(
                f"the table in {self.uri} was given features that a sync does not know: "
                f"{', '.join(unknown)}",
                code="not_supported",
                path=self.uri,
                hint="Take them away, or delete the table, which has it copied again",
            )

    def is_foreign(self) -> PgOutputError:
        """The error that it is not the app's."""
        return PgOutputError(
            f"the table in {self.uri} is not of this sync ({self.app})",
            code="not_ours",
            path=self.uri,
            hint="Move it away, or give another target",
        )

    @property
    def position(self) -> tuple[int, int]:
        """The LSN up to which it has changes, and that of its snapshot."""
        if self.delta is None:
            return 0, 0
        with self.refusals():
            found = [self.delta.transaction_version(app) for app in (self.app, self._snapshots)]
        return found[0] or 0, found[1] or 0

    @property
    def version(self) -> Any:
        """Which version was loaded; -1: none, as there is no table."""
        return -1 if self.delta is None else self.delta.version()

    @property
    def gap(self) -> int | None:
        """The LSN before which another program changed its changes; None: that did not happen."""
        return self.transaction("gap") if self.changed is None else self.position[0]

    @property
    def _snapshots(self) -> str:
        return f"{self.app}/snapshot"

    def transaction(self, suffix: str) -> int | None:
        """A number that commits have under another name of the app."""
        found: int | None = None
        if self.delta is not None:
            with self.refusals():
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
        names = bounded_columns(self.schema)

        def bounds(of: dict[str, Any] | None) -> dict[str, Any]:
            return {name: of[name] for name in names if name in of} if of else {}

        return [
            File(
                unquote(one["path"]), one["size_bytes"],
                -1 if one.get("num_records") is None else one["num_records"],
                one.get("partition") or {}, bounds(one.get("min")), bounds(one.get("max")),
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
        files: Sequence[AddedFile] = (),
    ) -> None:
        """Make the table by one commit, which has its first files, also where one is there."""
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
            self._look()
            self._have_on_disk()

    def describe(self, description: str) -> None:
        """Have another description, if it is another one."""
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
        told = {}
        if position is not None:
            told["pgoutput_fast.lsn"] = format_lsn(position[0])
            if self.commit_time is not None:
                told["pgoutput_fast.commit_time"] = (
                    _UNIX_EPOCH + datetime.timedelta(microseconds=self.commit_time)
                ).isoformat()
        # By its retries delta-rs would commit behind what another program has done meanwhile.
        return CommitProperties(
            app_transactions=transactions, custom_metadata=told, max_commit_retries=0
        )

    def _stood(self) -> None:
        """See what is there behind a commit, which stood on the version that was loaded."""
        self._looked_at += 1
        self._update()
        self._have_on_disk()

    def check_position(self, position: tuple[int, int]) -> None:
        """Refuse a table that another sync has written since it had a position."""
        if self.position != position:
            raise self.place.conflict(self.directory)

    def until_it_stands(self, commit: Callable[[], None]) -> None:
        """Read and commit, again and again if other programs commit between the two.

        Parameters
        ----------
        commit : callable
            Reads what the commit depends on from the version that is loaded, and commits.

        Raises
        ------
        ConflictError
            Other programs were first each time.
        """
        for _ in range(_ATTEMPTS - 1):
            version = self.version
            try:
                commit()
            except PgOutputError:
                self.load()
                # Files that it was reading may have been deleted, too.
                if self.version == version:
                    raise
            else:
                return
        commit()

    def add_columns(self, schema: pa.Schema) -> None:
        """Have all columns of a schema that has those of the table; new ones are null.

        It comes before the rows are read, as it is a commit of its own.
        """
        import deltalake

        there = self.schema
        old = {field.name: field.type for field in there}
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
        """Let an overwrite bring these columns, before the rows are read.

        Timestamps without zone are a feature of a table, which an overwrite does not add. Columns
        that can't have bounds as these must not be named by the table.
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
        """Have files be the table's, and others not.

        It stands on the version that was loaded: if the table has a newer one, it is refused.

        Parameters
        ----------
        files : Written
        removed : sequence of File
        position : tuple of int, or None
            None: the rows are the same.
        schema : pyarrow.Schema, optional
            All other files are removed, and these are the columns, which `allow` has let in.
        more
            Numbers for :meth:`transaction`.
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
            if changes:
                self.changed = None
            self._stood()
        # Fewer bounds than there are harm nobody, if another program is at the properties.
        with contextlib.suppress(ConflictError), self.refusals():
            # After an overwrite all files are new, and have all bounds that there can be.
            self._bound(self.schema, self._bounded if schema is None else schema.names)

    @property
    def _bounded(self) -> list[str]:
        """The columns that have bounds in all files."""
        return names_in(self.delta.metadata().configuration.get(BOUNDED_COLUMNS, ""))

    def _bound(self, schema: pa.Schema, names: Sequence[str]) -> None:
        """Have the table name those columns among some that can have bounds in a schema."""
        wanted = [name for name in bounded_columns(schema, self.partition_by) if name in names]
        there = self.delta.metadata().configuration.get(BOUNDED_COLUMNS)
        if there is not None and "timestampNtz" in (self.delta.protocol().reader_features or ()):
            # With a change of properties, delta-rs 1.6 gives such a table the feature variantType,
            # which many readers lack. So the list of such a table only gets shorter.
            wanted = [name for name in wanted if name in names_in(there)]
        if there is None or {*names_in(there)} != {*wanted}:
            self.delta.alter.set_table_properties({BOUNDED_COLUMNS: property_of(wanted)})
            self._update()

    def _have_on_disk(self) -> None:
        """Wait until what was committed is on the local disk, as delta-rs does not."""
        before, self._on_disk = self._on_disk, self.delta.version()
        if self.place.path is not None:
            log = self.place.path / self.directory / "_delta_log"
            # The last commit may be a join of files, which came behind the one that this is for.
            for version in range(before + 1, self._on_disk + 1):
                fsync_path(log / f"{version:020}.json")
            fsync_path(log)

    def committed(self, file: AddedFile) -> str:
        """Where in the place a file is that the last commit has."""
        return f"{self.directory}/{file.path}"

    # --- maintenance -----------------------------------------------------------------------------

    def maintain(self, joins: Joins | None = None) -> None:
        """Join small files and delete old ones, if it is time for that.

        Parameters
        ----------
        joins : Joins, optional
            Which join them while this goes on. They have no place for it while they are busy; it
            stays time for it then.
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
                joins.wait()  # the files that it has written are nobody's yet
                self.load()  # and now they are this table's, which a vacuum has to know
            self.vacuum()
        if joins is None or joins.begin(self._compact_beside):
            self._maintained_at = now

    def _compact_beside(self) -> None:
        """Join small files while the table is written."""
        table = LakeTable(self.place, self.directory, self.app, self._retention)
        table.load()
        table._compact_unless_changed()

    def _compact_unless_changed(self) -> None:
        """Join small files; another time if other programs are at it."""
        with contextlib.suppress(ConflictError):
            self.compact()

    def compact(self) -> None:
        """Join files of about one size where there are many."""
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
                # In the order in which they came.
                for file in sorted(files, key=lambda one: str(one.least.get("commit_lsn", ""))):
                    for rows in self.rows(file, schema):
                        writer.write(rows)
                joined = writer.finish()
            self.until_it_stands(functools.partial(self._replace, files, joined))

    def _replace(self, files: Sequence[File], joined: Written) -> None:
        """Have a file instead of others, which hold the same rows."""
        if not {one.path for one in files} <= {one.path for one in self.files()}:
            raise self.place.conflict(self.directory)
        self.commit(joined, files, None)

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
        """Delete the files that the table has no more, and those that it never had.

        Only files that a writer of Delta tables has named are deleted. delta-rs itself would delete
        whatever somebody else has put there.
        """
        with self.refusals():
            found = self.delta.vacuum(
                retention_hours=self._retention,
                dry_run=True,
                enforce_retention_duration=False,
                full=True,
            )
            own = [path for path in found if _DATA.fullmatch(path.rpartition("/")[2])]
            with ThreadPoolExecutor(_DELETING) as pool:
                list(pool.map(self._delete, own))

    def _delete(self, path: str) -> None:
        # delta-rs also lists files that an earlier vacuum has deleted.
        with contextlib.suppress(FileNotFoundError):
            self.filesystem.delete_file(path)


def _add_actions(files: Sequence[AddedFile], *, changes: bool = True) -> list[Any]:
    """What the log gets of files; `changes` says whether they have rows that are new."""
    from deltalake.transaction import AddAction

    now = int(time.time() * 1000)
    return [
        AddAction(one.path, one.size, one.partition, now, changes, one.statistics) for one in files
    ]
