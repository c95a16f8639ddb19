"""The target that keeps Delta tables in a directory or in object storage.

Each Delta table has its own commits, and its position in its own log. The table `_progress` is
committed last in a window. After a crash in between, some tables have a later LSN than
`_progress`. The next window then brings changes that these tables have already, and their positions
tell which to skip.
"""

from __future__ import annotations

import itertools
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
from pyarrow import fs

from .._disk import claim_directory
from ..errors import PgOutputError, RetryableError
from ..segments.reader import CommitRecord
from .delta_files import DeltaFileWriter
from .delta_joins import Joins
from .delta_place import DeltaPlace, directory_of, require_deltalake
from .delta_table import LakeTable
from .delta_types import DECODED_FOR, conformed
from .delta_writers import DeltaChanges, DeltaState, local_steps
from .progress_rows import PROGRESS_SCHEMA, progress_rows, table_states_of
from .targets import (
    CHANGED,
    CHANGES_ALONE,
    CHANGES_DELETED,
    CHANGES_PUT_BACK,
    DELETED,
    PUT_BACK,
    RENAMED,
    TARGET_FORMAT,
    NoChanges,
    RememberedOptions,
    TableState,
    TargetOrigin,
    TargetState,
    check_kind,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from .iceberg_table import IcebergCatalog
    from .targets import ChangeWriter

__all__ = ["DECODED_FOR", "DeltaTarget"]

_PROGRESS = "_progress"
_BUFFERED = 256 << 20
"""Maximum bytes of changes in memory, for all tables together."""
_RETENTION = 6
_NO_OPTIONS = RememberedOptions()
_NEWEST = ("newest_lsn", "newest_time")
"""Names of transaction numbers in the log of `_progress`, which store `TargetState.newest`."""

_PROGRESS_SCHEMA = pa.schema(
    [
        *PROGRESS_SCHEMA,
        pa.field("moves", pa.string()),
        pa.field("own", pa.string()),
        pa.field("gap", pa.int64()),
    ]
)


class Positions(NamedTuple):
    """The positions of a change table and a state table in their own logs, as `_progress` has them.

    A table state's LSN moves on without changes, so it does not show that one of the two tables was
    restored from a backup. A comparison of these positions with the tables' own logs does.

    Attributes
    ----------
    changes, state : tuple of int, or None
        The LSN and the snapshot LSN of the newest change table, and of the state table; None if not
        known.
    """

    changes: tuple[int, int] | None = None
    state: tuple[int, int] | None = None

    @classmethod
    def parse(cls, text: str) -> Positions:
        """Return the positions from their JSON text in `_progress`."""
        return cls(*(position and (position[0], position[1]) for position in json.loads(text)))


class DeltaTarget:
    """A `Target` of Delta tables.

    Parameters
    ----------
    uri : str or pathlib.Path
        A directory, or a URL such as ``s3://bucket/lake``. On object storage, a second sync can
        begin. Both syncs have to move the same position, so the commit of one of them is refused.
    storage_options : mapping of str to str, optional
        Options of delta-rs for object storage.
    partition_by : mapping of str to sequence of str, optional
        By ``schema.table``: the columns by which a new state table is partitioned.
    retention_hours : int, optional
        Hours for which the files of older versions stay, for readers of these versions. If rows of
        a large table change all the time, each commit leaves many such files.
    threads : int, optional
        Maximum number of tables that are written at a time.
    remembered : RememberedOptions
    maintenance : bool
        See `TargetOptions`.
    iceberg : str or mapping of str to str, optional
        See `TargetOptions`.

    Attributes
    ----------
    change_tables : type of LakeTable
        The class of change tables.
    steps : callable
        See `DeltaState`.
    """

    is_transactional = False
    change_tables = LakeTable
    _kind = "delta"

    def __init__(
        self,
        uri: str | Path,
        storage_options: Mapping[str, str] | None = None,
        *,
        partition_by: Mapping[str, Sequence[str]] | None = None,
        retention_hours: int = _RETENTION,
        threads: int | None = None,
        remembered: RememberedOptions = _NO_OPTIONS,
        maintenance: bool = True,
        iceberg: str | Mapping[str, str] | None = None,
    ) -> None:
        require_deltalake()
        self._catalog: IcebergCatalog | None = None
        if iceberg is not None:
            from .iceberg_table import IcebergCatalog

            self._kind = "iceberg"
            self._catalog = IcebergCatalog(iceberg)
        self.threads = threads or min(4, os.cpu_count() or 1)
        self.place = DeltaPlace(str(uri), storage_options)
        self._partition_by = {name: list(of) for name, of in (partition_by or {}).items()}
        self._retention = retention_hours
        self.remembered = remembered
        self.maintains = maintenance
        self._lock: int | None = None
        self._origin: TargetOrigin | None = None
        self._tables: dict[str, LakeTable] = {}
        self._writers: list[DeltaChanges | DeltaState] = []
        self._moves: list[Move] = []  # of this window
        self._unmoved: list[Move] = []  # stored in `_progress`, and not all done
        self.troubles: dict[int, PgOutputError] = {}
        self._own: dict[int, Positions] = {}
        self._guard = threading.Lock()
        self.steps = local_steps
        self._joins = Joins()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.place.uri!r})"

    # --- the target ------------------------------------------------------------------------------

    def claim(self) -> None:
        """See `Target`."""
        if self._lock is None and self.place.path is not None:
            self._lock = claim_directory(self.place.path, "sync", "tables")
        if self._catalog is not None:
            _ = self._catalog.opened  # refuses a wrong catalog before anything is written

    def open(self, origin: TargetOrigin) -> TargetState:
        """See `Target`."""
        self.claim()
        self._origin = origin
        self._tables.clear()
        self.troubles = {}
        progress = LakeTable(self.place, _PROGRESS, "pgoutput_fast", self._retention)
        progress.load()
        is_new = not progress.exists
        if is_new:
            self._refuse_other_things()
            progress.create(_PROGRESS_SCHEMA, (0, 0), description=self._description(origin))
        target_state = self._checked(progress, origin)
        if not target_state.lsn:
            # No change was skipped yet under other options, so the target may take new ones.
            progress.describe(self._description(origin))
        self._tables[_PROGRESS] = progress
        self._do_moves()
        target_state = target_state._replace(
            tables=self._with_own(target_state.tables), is_new=is_new
        )
        for table_state in target_state.tables.values():
            is_fit = table_state.stale is None and table_state.relation_id not in self.troubles
            if f"{table_state.namespace}.{table_state.name}" in self._partition_by and is_fit:
                self.state(table_state)  # refuses other partition columns than the table has
        self._writers = []
        return target_state

    def attached(self, origin: TargetOrigin) -> DeltaTarget:
        """Use this target without a claim, to write tables for the process that has claimed it."""
        self._origin = origin
        return self

    @property
    def origin(self) -> TargetOrigin:
        """The database from which the changes come; known once the target is open."""
        if self._origin is None:
            raise PgOutputError("open() was not called", code="unfit_input")
        return self._origin

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments by which another process makes this target to write state tables.

        The storage options among them may have secrets.
        """
        return {
            "uri": self.place.uri, "storage_options": self.place.options or None,
            "partition_by": self._partition_by, "retention_hours": self._retention,
            "remembered": self.remembered, "maintenance": self.maintains, "threads": self.threads,
        }  # fmt: skip

    def partitions(self, namespace: str, name: str) -> list[str]:
        """Return the columns by which a new state table is partitioned."""
        return self._partition_by.get(f"{namespace}.{name}", [])

    def _description(self, origin: TargetOrigin) -> str:
        options = {"soft_deletes": self.remembered.soft_deletes, "tables": self.remembered.tables,
                   "policies": self.remembered.policy_texts,
                   "keep": self.remembered.keep or "both", "changes": self._kind}  # fmt: skip
        return json.dumps({"format": TARGET_FORMAT, **origin._asdict(), **options})

    def keep(self) -> None:
        """See `Target`."""
        self._tables[_PROGRESS].describe(self._description(self.origin))

    def peek(self, origin: TargetOrigin) -> TargetState:
        """See `Target`."""
        progress = LakeTable(self.place, _PROGRESS, "pgoutput_fast", self._retention)
        progress.load()
        if not progress.exists:
            self._refuse_other_things()
            return TargetState(0, {})
        return self._checked(progress, origin)

    def _refuse_other_things(self) -> None:
        with self.place.refusals("the target"):
            infos = self.place.filesystem().get_file_info(fs.FileSelector("", allow_not_found=True))
        other = sorted(info.base_name for info in infos if info.base_name != _PROGRESS)
        if {*other} & {"changes", "state"}:
            raise PgOutputError(
                f"{self.place.uri} has tables, but {_PROGRESS} with their positions is missing",
                code="damaged",
                path=self.place.uri,
                hint=f"Restore {_PROGRESS}, or move the whole target away to start with a new one",
            )
        if other:
            raise PgOutputError(
                f"{self.place.uri} is not a sync target: it has other files, such as {other[0]!r}",
                code="not_ours",
                path=self.place.uri,
                hint="Give another target",
            )

    def _checked(self, progress: LakeTable, origin: TargetOrigin) -> TargetState:
        """Return the target state in `_progress`; refuse another format, database or option."""
        description = json.loads(progress.delta.metadata().description)
        if description["format"] != TARGET_FORMAT:
            raise PgOutputError(
                f"{self.place.uri} has target format {description['format']}, but this version of "
                f"pgoutput_fast needs {TARGET_FORMAT}",
                code="not_supported",
                path=self.place.uri,
                hint="Use the version that wrote it, or start with a new target",
            )
        if (description["system_identifier"], description["database"]) != tuple(origin):
            raise PgOutputError(
                f"{self.place.uri} has tables of database {description['database']!r} "
                f"(system identifier {description['system_identifier']}), but the changes come "
                f"from {origin.database!r} ({origin.system_identifier})",
                code="another_history",
                path=self.place.uri,
                hint="Give another target",
            )
        tables = self._read(progress)
        remembered = RememberedOptions.of(
            description["soft_deletes"],
            description["tables"],
            description["policies"],
            description["keep"],
        )
        if not tables and not (
            self.remembered.is_like(remembered) and description["changes"] == self._kind
        ):
            return TargetState(0, {})
        check_kind(self.place.uri, self._kind, description["changes"])
        self.remembered = self.remembered.check(self.place.uri, remembered)
        # Only in a local directory: in object storage, a request for each table takes too long.
        if self.remembered.has_state and self.place.path is not None:
            tables = {
                relation_id: self._with_state(self.place.path, table)
                for relation_id, table in tables.items()
            }
        lsn, time = (progress.transaction(name) or 0 for name in _NEWEST)
        newest = CommitRecord(lsn, time) if lsn else None
        return TargetState(progress.position[0], tables, newest, policies=remembered.policies)

    def _with_state(self, path: Path, table_state: TableState) -> TableState:
        """Return a table state, stale if its state table is missing."""
        names = [table_state.stored_name, *(move.old for move in self._unmoved
                                       if move.relation_id == table_state.relation_id)]  # fmt: skip
        logs = (path / "state" / directory_of(name) / "_delta_log" for name in names)
        is_there = (
            table_state.stale is not None
            or not table_state.version
            or any(log.is_dir() for log in logs)
        )
        return table_state if is_there else table_state._replace(stale=DELETED)

    def _with_own(self, tables: Mapping[int, TableState]) -> dict[int, TableState]:
        """Return table states, stale where another program or a restore has changed a table.

        All tables are loaded. Nothing else would find out about a table that gets no changes.
        """

        def checked_state(table_state: TableState) -> TableState:
            if not table_state.version or table_state.relation_id in self.troubles:
                return table_state
            try:
                lake_tables = self._loaded(table_state)
            except RetryableError:
                raise
            except PgOutputError as error:
                self.troubles[table_state.relation_id] = error
                return table_state
            positions = self._own.get(table_state.relation_id, Positions())
            changes, state = lake_tables.get("changes"), lake_tables.get("state")
            own = Positions(
                None if changes is None else changes.position,
                None if state is None else state.position,
            )
            self._own[table_state.relation_id] = own
            lost = None
            if changes is not None:
                table_state = table_state._replace(gap=changes.gap or table_state.gap)
            if state is not None and table_state.stale is None and _is_less(state, positions.state):
                lost = PUT_BACK if state.exists else DELETED
            elif state is not None and table_state.stale is None and state.changed is not None:
                lost = f"{CHANGED}: {state.directory}, {state.changed}"
            elif (
                changes is not None
                and table_state.stale in (None, CHANGES_ALONE)
                and _is_less(changes, positions.changes)
            ):
                lost = CHANGES_PUT_BACK if changes.exists else CHANGES_DELETED
            return table_state if lost is None else table_state._replace(stale=lost)

        with ThreadPoolExecutor(self.threads) as pool:
            return dict(zip(tables, pool.map(checked_state, tables.values()), strict=True))

    def _loaded(self, table_state: TableState) -> dict[str, LakeTable]:
        """Load the newest change table and the state table, as far as the target has these kinds.

        They are not cached, so that only tables with changes take memory.
        """
        names = {}
        if self.remembered.has_changes:
            names["changes"] = table_state.stored_name + version_suffix(table_state.version)
        if self.remembered.has_state:
            names["state"] = table_state.stored_name
        tables = {
            kind: self._unloaded_table(kind, name, table_state.relation_id)
            for kind, name in names.items()
        }
        for table in tables.values():
            try:
                table.load()
            except RetryableError:
                raise
            except PgOutputError as error:
                raise PgOutputError(
                    error.message,
                    code=error.code,
                    parameter=error.parameter,
                    hint=error.hint
                    or (
                        f"Restore {table.directory}, or delete it and start sync again: the table "
                        "gets a new snapshot"
                    ),
                    path=error.path,
                ) from error
        return tables

    def retry(self, table_state: TableState) -> None:
        """See `Target`."""
        if table_state.relation_id in self.troubles:
            self._do_moves()
        if table_state.relation_id in self.troubles:
            raise self.troubles[table_state.relation_id]
        if table_state.version:
            self._loaded(table_state)

    def _read(self, progress: LakeTable) -> dict[int, TableState]:
        tables = {}
        moves = []
        self._own = {}
        with progress.refusals():
            for file in progress.files():
                for rows in progress.rows(file, _PROGRESS_SCHEMA):
                    for table_state, row in table_states_of(rows):
                        moves += [(at, Move(*fields)) for at, *fields in json.loads(row["moves"])]
                        self._own[table_state.relation_id] = Positions.parse(row["own"])
                        tables[table_state.relation_id] = table_state
        self._unmoved = [move for _, move in sorted(moves)]
        return tables

    def close(self) -> None:
        """See `Target`."""
        self.abort()
        self._joins.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    # --- windows ---------------------------------------------------------------------------------

    def begin(self) -> None:
        """See `Target`."""
        self._writers = []

    def shown(self, stored_name: str) -> str:
        """See `Target`: the name of the tables' directories."""
        return directory_of(stored_name)

    def changes(self, table_state: TableState) -> ChangeWriter:
        """See `Target`."""
        if not self.remembered.has_changes:
            return NoChanges(table_state)
        name = table_state.stored_name + version_suffix(table_state.version)
        writer = DeltaChanges(
            self._table("changes", name, table_state.relation_id), table_state, self.make_room
        )
        with self._guard:
            self._writers.append(writer)
        return writer

    def state(self, table_state: TableState) -> DeltaState:
        """See `Target`."""
        partition_by = self.partitions(table_state.namespace, table_state.name)
        table = self._table("state", table_state.stored_name, table_state.relation_id)
        writer = DeltaState(table, table_state, partition_by, self.remembered.soft_deletes)
        writer.steps = self.steps
        with self._guard:
            self._writers.append(writer)
        return writer

    def _table(self, kind: str, name: str, relation_id: int) -> LakeTable:
        if relation_id in self.troubles:
            raise self.troubles[relation_id]
        directory = f"{kind}/{directory_of(name)}"
        with self._guard:
            table = self._tables.get(directory)
            if table is None:
                table = self._tables[directory] = self._unloaded_table(kind, name, relation_id)
        table.load()
        return table

    def _unloaded_table(self, kind: str, name: str, relation_id: int) -> LakeTable:
        """Return a table that is not loaded yet."""
        arguments = (
            self.place, f"{kind}/{directory_of(name)}", self._app(relation_id), self._retention,
        )  # fmt: skip
        if kind == "state":
            table = LakeTable(*arguments)
            if self.place.path is None:  # a renamed table's directory stays, and is replaced
                table.replaced = [self._app(other) for other in self._own if other != relation_id]
            return table
        if self._catalog is None:
            return self.change_tables(*arguments)
        from .iceberg_table import IcebergTable

        return IcebergTable(*arguments, self._catalog, name)

    def _app(self, relation_id: int) -> str:
        """Return the application id by which a Delta table's log says whose changes it has."""
        return "/".join(["pgoutput_fast", *self.origin, str(relation_id)])

    def make_room(self) -> None:
        """Flush the largest buffers of changes if all buffers have more than `_BUFFERED` bytes."""
        with self._guard:
            writers = [writer for writer in self._writers if isinstance(writer, DeltaChanges)]
            while sum(writer.pending_bytes for writer in writers) > _BUFFERED:
                max(writers, key=lambda writer: writer.pending_bytes).flush()

    def commit(self, target_state: TargetState) -> None:
        """See `Target`."""
        progress = self._tables[_PROGRESS]
        table_states = list(target_state.tables.values())
        for table_writer in self._writers:
            relation_id = table_writer.table_state.relation_id
            positions = self._own.get(relation_id, Positions())
            self._own[relation_id] = positions._replace(**{table_writer.kind: table_writer.own})
        moves: dict[int, list[Any]] = {}
        for at, move in enumerate([*self._unmoved, *self._moves]):
            moves.setdefault(move.relation_id, []).append((at, *move))
        listed = [
            json.dumps(moves.get(table_state.relation_id, [])) for table_state in table_states
        ]
        own = [
            json.dumps(self._own.get(table_state.relation_id, ())) for table_state in table_states
        ]
        rows = progress_rows(table_states)
        rows = rows.append_column("moves", pa.array(listed, pa.string()))
        rows = rows.append_column("own", pa.array(own, pa.string()))
        rows = rows.append_column(
            "gap", pa.array([table_state.gap for table_state in table_states], pa.int64())
        )
        with (
            progress.refusals(),
            DeltaFileWriter(progress, _PROGRESS_SCHEMA, (), "progress") as writer,
        ):
            writer.write(conformed(rows, _PROGRESS_SCHEMA))
            newest = zip(_NEWEST, target_state.newest or (0, 0), strict=True)
            before, after = progress.position, (target_state.lsn, 0)
            files, more = writer.finish(), dict(newest)

        def commit() -> None:
            progress.check_position(before)
            progress.commit(files, [], after, schema=_PROGRESS_SCHEMA, **more)

        progress.until_it_stands(commit)
        written = [
            table_writer.table
            for table_writer in self._writers
            if not table_writer.is_written_by_executor
        ]
        self._writers = []
        self._do_moves()
        tables = {id(table): table for table in self._tables.values()}
        for table in [*dict.fromkeys(written), progress] if self.maintains else []:
            if id(table) in tables:  # not if it was moved
                is_added_to = table.directory.startswith("changes/")
                table.maintain(self._joins if is_added_to else None)

    def abort(self) -> None:
        """See `Target`."""
        writers, self._writers, self._moves = self._writers, [], []
        for writer in writers:
            writer.discard()
        progress = self._tables.get(_PROGRESS)
        self._tables.clear()
        if progress is not None:
            self._tables[_PROGRESS] = progress

    def new_table_state(self, table_state: TableState) -> TableState:
        """See `Target`. In object storage, an earlier table of the name may have left changes."""
        if self.place.path is not None:
            return table_state
        return table_state._replace(
            version=self._free_version(table_state, table_state.stored_name, may_be_own=True)
        )

    def rename(self, table_state: TableState, stored_name: str) -> TableState:
        """See `Target`.

        Object storage can't move a table. There, the table gets a new snapshot under the new name,
        which replaces the rows of an earlier table of that name. Its changes go on in a free
        version of the change table. The former tables stay under the former name.
        """
        if self.place.path is not None:
            self._moves.append(
                Move(
                    table_state.relation_id,
                    table_state.stored_name,
                    stored_name,
                    table_state.version,
                )
            )
            return table_state._replace(stored_name=stored_name)
        self._writers = [
            table_writer
            for table_writer in self._writers
            if table_writer.table_state.relation_id != table_state.relation_id
        ]
        self._tables.pop(f"state/{directory_of(table_state.stored_name)}", None)
        self._own[table_state.relation_id] = Positions()
        if not table_state.version:
            return table_state._replace(stored_name=stored_name)
        version = self._free_version(table_state, stored_name, may_be_own=False)
        stale = table_state.stale or RENAMED if self.remembered.has_state else table_state.stale
        return table_state._replace(stored_name=stored_name, version=version, stale=stale)

    def _free_version(self, table_state: TableState, stored_name: str, *, may_be_own: bool) -> int:
        """Return the first version of a change table whose directory is empty."""
        for version in itertools.count(1):
            table = self._unloaded_table(
                "changes", stored_name + version_suffix(version), table_state.relation_id
            )
            is_free = not self.place.has_files(table.directory)
            if is_free or (may_be_own and table.is_its_own()):
                break
        return version

    def _do_moves(self) -> None:
        """Move the directories of renamed tables.

        `_progress` stores the moves before they are done, so an interrupted call repeats them. A
        directory that is missing or has another table is skipped. If a move fails, `troubles` gets
        its table, and all moves stay stored, because later moves may depend on the failed one.
        """
        moves, self._moves = [*self._unmoved, *self._moves], []
        if moves:
            self._joins.wait()  # it may join files of a table that is moved
        self.troubles = {}
        for move in moves:
            try:
                self._do_move(move)
            except RetryableError:
                raise
            except PgOutputError as error:
                self.troubles.setdefault(move.relation_id, error)
        self._unmoved = moves if self.troubles else []

    def _do_move(self, move: Move) -> None:
        """Move the directories of one table. After an error, the next call moves the others."""
        names = [("state", "")]
        names += [("changes", version_suffix(i)) for i in range(1, move.version + 1)]
        for kind, suffix in names:
            for name in (move.old, move.new):
                self._tables.pop(f"{kind}/{directory_of(name + suffix)}", None)
            table = self._unloaded_table(kind, move.old + suffix, move.relation_id)
            if table.is_its_own():
                table.rename(move.new + suffix)


class Move(NamedTuple):
    """A table is renamed. Fields: relation_id, old and new stored name, version (newest one)."""

    relation_id: int
    old: str
    new: str
    version: int


def version_suffix(version: int) -> str:
    """Return the suffix of a change table's name for a version."""
    return "" if version == 1 else f".v{version}"


def _is_less(table: LakeTable, position: tuple[int, int] | None) -> bool:
    """Whether a table is before a position."""
    lsn, copy_lsn = table.position
    return position is not None and (lsn < position[0] or copy_lsn < position[1])
