"""Tables as Delta tables, in a directory or in object storage.

Each table has its position in its own log, and is written by commits of its own. The table
`_progress` follows at the end of a window. So a crash between two commits leaves tables that are
further than `_progress` says: what they have already is left out when the changes come again.
"""

from __future__ import annotations

import json
import os
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
from pyarrow import fs

from .._disk import claim_directory
from ..errors import PgOutputError
from ..lsn import format_lsn
from ..segments.reader import Commit
from .delta_files import Writer, Written
from .delta_joins import Joins
from .delta_merge import Merge, shape_of
from .delta_place import Place, directory_of, require_deltalake
from .delta_table import Table
from .delta_types import DECODED_FOR, conformed, merged_schema, stored_schema
from .own_positions import OwnPositions, Positioned
from .parquet_table import ParquetTable
from .targets import (
    DELETED,
    DELETED_AT,
    TARGET_FORMAT,
    Column,
    Held,
    IncompleteError,
    Kept,
    NotForeseenError,
    Origin,
    Removed,
    Renamed,
    Stored,
    check_kind,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from .folding import NetChanges
    from .iceberg_table import Catalog
    from .targets import Alteration

__all__ = ["DECODED_FOR", "DeltaTarget"]

_PROGRESS = "_progress"
_BUFFERED = 256 << 20
"""Bytes of changes in memory, of all tables together."""
_RETENTION = 6
_SOME_BITS = (1 << 63) - 1
_NOTHING_KEPT = Kept()
_NEWEST = ("newest_lsn", "newest_time", "slot")
"""Numbers in the log of `_progress`, beside the position: `Stored.newest`, and `Stored.slot`."""

_PROGRESS_SCHEMA = pa.schema(
    {
        "schema": pa.string(),
        "table": pa.string(),
        "relation_id": pa.int64(),
        "stored": pa.string(),
        "version": pa.int32(),
        "lsn": pa.int64(),
        "copy_lsn": pa.int64(),
        "commit_time": pa.timestamp("us", "UTC"),
        "stale": pa.string(),
        "columns": pa.string(),
        "moves": pa.string(),
        "own": pa.string(),
    }
)


class DeltaTarget:
    """See `Target`.

    Parameters
    ----------
    uri : str or pathlib.Path
        A directory, or a URL such as ``s3://bucket/lake``. On object storage nothing keeps a second
        sync from beginning; the commit of one of the two is refused then, as both have to move the
        same position.
    storage_options : mapping of str to str, optional
        Of delta-rs, for object storage.
    partition_by : mapping of str to sequence of str, optional
        The columns by which state tables are partitioned when they are made, by ``schema.table``.
    retention_hours : int, optional
        For so long the files of older versions stay, for readers that have begun with one. Where
        rows of a large table change all the time, each commit leaves many.
    threads : int, optional
        So many tables are written at a time.
    kept : Kept
    maintenance : bool
        As of `sync`.
    iceberg : str or mapping of str to str, optional
        As of `sync`.
    changes : {"delta", "parquet"}
        As of `sync`.

    Attributes
    ----------
    change_tables : type of Table
        What writes the files of change tables.
    """

    def __init__(
        self,
        uri: str | Path,
        storage_options: Mapping[str, str] | None = None,
        *,
        partition_by: Mapping[str, Sequence[str]] | None = None,
        retention_hours: int = _RETENTION,
        threads: int | None = None,
        kept: Kept = _NOTHING_KEPT,
        maintenance: bool = True,
        iceberg: str | Mapping[str, str] | None = None,
        changes: str = "delta",
    ) -> None:
        require_deltalake()
        self.change_tables = ParquetTable if changes == "parquet" else Table
        self._kind = changes if iceberg is None else "iceberg"
        self._catalog: Catalog | None = None
        if iceberg is not None:
            from .iceberg_table import Catalog

            self._catalog = Catalog(iceberg)
        self.threads = threads or min(4, os.cpu_count() or 1)
        self.place = Place(str(uri), storage_options)
        self._partition_by = {name: list(of) for name, of in (partition_by or {}).items()}
        self._retention = retention_hours
        self.kept = kept
        self.maintains = maintenance
        self._lock: int | None = None
        self._origin: Origin | None = None
        self._tables: dict[str, Table] = {}
        self._writers: list[_Changes | _State] = []
        self._moves: list[Move] = []
        self._own: dict[int, OwnPositions] = {}
        self._guard = threading.Lock()
        self._joins = Joins()

    def __repr__(self) -> str:
        return f"DeltaTarget({self.place.uri!r})"

    # --- the target ------------------------------------------------------------------------------

    def claim(self) -> None:
        """See `Target`."""
        if self._lock is None and self.place.path is not None:
            self._lock = claim_directory(self.place.path, "sync", "tables")
        if self._catalog is not None:
            _ = self._catalog.opened  # which refuses what is wrong, before anything is written

    def open(self, origin: Origin) -> Stored:
        """See `Target`."""
        self.claim()
        self._origin = origin
        self._tables.clear()
        progress = Table(self.place, _PROGRESS, "pgoutput_fast", self._retention)
        progress.load()
        is_new = not progress.exists
        if is_new:
            self._refuse_other_things()
            progress.create(_PROGRESS_SCHEMA, (0, 0), description=self._description(origin))
        stored = self._checked(progress, origin)
        if not stored.lsn:
            # Nothing was passed over yet that would be missing: it begins anew.
            progress.describe(self._description(origin))
        self._tables[_PROGRESS] = progress
        self._do_moves()
        stored = stored._replace(tables=self._with_own(stored.tables), is_new=is_new)
        for held in stored.tables.values():
            if f"{held.namespace}.{held.name}" in self._partition_by and held.stale is None:
                self.state(held)  # which refuses other partitions than those that it has
        self._writers = []
        return stored

    def attached(self, origin: Origin, own: Mapping[int, OwnPositions]) -> DeltaTarget:
        """It, without a claim, to write tables for a process that has it open."""
        self._origin = origin
        self._own = dict(own)
        return self

    @property
    def origin(self) -> Origin:
        """The database from which the changes come; it is open."""
        if self._origin is None:
            raise PgOutputError("open() was not called")
        return self._origin

    @property
    def arguments(self) -> dict[str, Any]:
        """What another process makes it by to write state tables.

        The storage's options may have secrets.
        """
        return {
            "uri": self.place.uri, "storage_options": self.place.options or None,
            "partition_by": self._partition_by, "retention_hours": self._retention,
            "kept": self.kept, "maintenance": self.maintains, "threads": self.threads,
        }  # fmt: skip

    def seen(
        self, held: Held, *, with_state: bool
    ) -> tuple[pa.Schema | None, tuple[str, ...] | None]:
        """The columns of the change table of a table, and the partitions of its rows.

        Both as they were when this process has looked at them last; None: there is none.

        Parameters
        ----------
        held : Held
        with_state : bool
            Whether the partitions are wanted.
        """
        names = {"changes": held.stored + version_suffix(held.version), "state": held.stored}
        found = []
        for kind in names if with_state else ["changes"]:
            directory = f"{kind}/{directory_of(names[kind])}"
            with self._guard:
                table = self._tables.get(directory)
            if table is None or not table.exists:
                table = self._table(kind, names[kind], held.relation_id)
            found.append(table)
        changes, *state = found
        is_there = bool(state) and state[0].exists
        return (
            changes.schema if changes.exists else None,
            tuple(state[0].partition_by) if is_there else None,
        )

    def partitions(self, namespace: str, name: str) -> list[str]:
        """The columns by which the state table of a table is partitioned when it is made."""
        return self._partition_by.get(f"{namespace}.{name}", [])

    def _description(self, origin: Origin) -> str:
        kept = {"soft_deletes": self.kept.soft_deletes, "tables": self.kept.tables,
                "policies": self.kept.policy_texts, "changes": self._kind}  # fmt: skip
        return json.dumps({"format": TARGET_FORMAT, **origin._asdict(), **kept})

    def keep(self) -> None:
        """See `Target`."""
        self._tables[_PROGRESS].describe(self._description(self.origin))

    def peek(self, origin: Origin) -> Stored:
        """See `Target`."""
        progress = Table(self.place, _PROGRESS, "pgoutput_fast", self._retention)
        progress.load()
        if not progress.exists:
            self._refuse_other_things()
            return Stored(0, {})
        return self._checked(progress, origin)

    def _refuse_other_things(self) -> None:
        with self.place.refusals("the target"):
            found = self.place.filesystem().get_file_info(fs.FileSelector("", allow_not_found=True))
        other = sorted(one.base_name for one in found if one.base_name != _PROGRESS)
        if {*other} & {"changes", "state"}:
            raise PgOutputError(
                f"{self.place.uri} has tables, and not {_PROGRESS}, which says how far they are: "
                "restore that, or move the whole target away, and it begins anew"
            )
        if other:
            raise PgOutputError(
                f"{self.place.uri} has other things, such as {other[0]!r}, and no tables of a "
                "sync: give another place"
            )

    def _checked(self, progress: Table, origin: Origin) -> Stored:
        """What a sync before has stored last."""
        found = json.loads(progress.delta.metadata().description)
        if found["format"] != TARGET_FORMAT:
            raise PgOutputError(
                f"{self.place.uri} has format {found['format']}, and this version knows "
                f"{TARGET_FORMAT}: use a newer one"
            )
        if (found["system_identifier"], found["database"]) != tuple(origin):
            raise PgOutputError(
                f"{self.place.uri} has tables of database {found['database']!r} of system "
                f"{found['system_identifier']}, and the changes are of {origin.database!r} of "
                f"{origin.system_identifier}: give another place"
            )
        held = self._read(progress)
        kept = Kept.of(found["soft_deletes"], found["tables"], found.get("policies"))
        if not held and not (self.kept.is_like(kept) and found.get("changes") == self._kind):
            return Stored(0, {})
        self.kept = self.kept.check(self.place.uri, kept)
        # Before this was stored there were no Parquet files, and tables tell the others apart.
        other = "delta" if self._kind == "parquet" else self._kind
        check_kind(self.place.uri, self._kind, found.get("changes", other))
        if self.place.path is not None:  # in object storage each question takes its time
            held = {one: self._with_state(self.place.path, table) for one, table in held.items()}
        lsn, time, slot = (progress.transaction(name) or 0 for name in _NEWEST)
        newest = Commit(lsn, time) if lsn else None
        return Stored(progress.position[0], held, newest, slot, policies=kept.policies)

    def _with_state(self, path: Path, held: Held) -> Held:
        """What is held of a table; it is stale if its state table is not there."""
        names = [held.stored, *(one.old for one in self._moves
                                if one.relation_id == held.relation_id)]  # fmt: skip
        logs = (path / "state" / directory_of(name) / "_delta_log" for name in names)
        is_there = held.stale is not None or any(log.is_dir() for log in logs)
        return held if is_there else held._replace(stale=DELETED)

    def _with_own(self, tables: Mapping[int, Held]) -> dict[int, Held]:
        """What is held of tables; those are stale of which there is less than was written.

        Each is looked at: if nothing happens to it, nobody else would find out.
        """

        def look(held: Held) -> Held:
            names = {"changes": held.stored + version_suffix(held.version), "state": held.stored}
            # They are not kept: nothing of a table is in memory before it changes.
            changes, state = (self._made(*one, held.relation_id) for one in names.items())
            known = self._own[held.relation_id]
            self._own[held.relation_id], lost = known.look(held, changes, state)
            return held if lost is None else held._replace(stale=lost)

        with ThreadPoolExecutor(self.threads) as pool:
            return dict(zip(tables, pool.map(look, tables.values()), strict=True))

    def _read(self, progress: Table) -> dict[int, Held]:
        tables = {}
        moves = []
        self._own = {}
        with progress.refusals():
            for file in progress.files():
                for rows in progress.rows(file, _PROGRESS_SCHEMA):
                    times = rows.column("commit_time").cast(pa.int64()).to_pylist()
                    for row, time in zip(rows.to_pylist(), times, strict=True):
                        columns = tuple(Column(*one) for one in json.loads(row["columns"]))
                        moves += [(at, Move(*one)) for at, *one in json.loads(row["moves"])]
                        self._own[row["relation_id"]] = OwnPositions.parse(row["own"])
                        tables[row["relation_id"]] = Held(
                            row["relation_id"], row["schema"], row["table"], row["stored"],
                            row["version"], row["lsn"], row["copy_lsn"], time, row["stale"],
                            columns,
                        )  # fmt: skip
        self._moves = [move for _, move in sorted(moves)]
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

    def shown(self, stored: str) -> str:
        """See `Target`: the name of their directories."""
        return directory_of(stored)

    def changes(self, held: Held) -> _Changes:
        """See `Target`."""
        name = held.stored + version_suffix(held.version)
        writer = _Changes(self, self._table("changes", name, held.relation_id), held)
        with self._guard:
            self._writers.append(writer)
        return writer

    def state(self, held: Held) -> _State:
        """See `Target`."""
        partition_by = self.partitions(held.namespace, held.name)
        table = self._table("state", held.stored, held.relation_id)
        writer = _State(table, held, partition_by, self.kept.soft_deletes)
        with self._guard:
            self._writers.append(writer)
        return writer

    def _table(self, kind: str, name: str, relation_id: int) -> Table:
        directory = f"{kind}/{directory_of(name)}"
        with self._guard:
            table = self._tables.get(directory)
            if table is None:
                table = self._tables[directory] = self._made(kind, name, relation_id)
        is_new = not table.exists
        table.load()
        known = getattr(self.own(relation_id), kind)
        if is_new and known is not None:
            table.look_back(known.mark)
        return table

    def own(self, relation_id: int) -> OwnPositions:
        """How far a table's two tables are known to be."""
        return self._own.get(relation_id, OwnPositions())

    def _made(self, kind: str, name: str, relation_id: int) -> Table:
        """A table that was not looked at yet."""
        given = (
            self.place, f"{kind}/{directory_of(name)}", self._app(relation_id), self._retention,
        )  # fmt: skip
        if kind == "state":
            return Table(*given)
        if self._catalog is None:
            return self.change_tables(*given)
        from .iceberg_table import IcebergTable

        return IcebergTable(*given, self._catalog, name)

    def _app(self, relation_id: int) -> str:
        """By which tables know whose changes they have."""
        return "/".join(["pgoutput_fast", *self.origin, str(relation_id)])

    def make_room(self) -> None:
        """Write the most of what is kept in memory, if that is much."""
        with self._guard:
            writers = [one for one in self._writers if isinstance(one, _Changes)]
            while sum(one.pending_bytes for one in writers) > _BUFFERED:
                max(writers, key=lambda one: one.pending_bytes).flush()

    def commit(self, stored: Stored) -> None:
        """See `Target`."""
        progress = self._tables[_PROGRESS]
        held = list(stored.tables.values())
        for one in self._writers:
            relation_id = one.held.relation_id
            self._own[relation_id] = self.own(relation_id).moved(one.kind, one.own)
        moves: dict[int, list[Any]] = {}
        for at, move in enumerate(self._moves):
            moves.setdefault(move.relation_id, []).append((at, *move))
        rows = pa.record_batch(
            [
                pa.array([one.namespace for one in held]),
                pa.array([one.name for one in held]),
                pa.array([one.relation_id for one in held]),
                pa.array([one.stored for one in held]),
                pa.array([one.version for one in held], pa.int32()),
                pa.array([one.lsn for one in held]),
                pa.array([one.copy_lsn for one in held]),
                pa.array([one.commit_time for one in held], pa.timestamp("us", "UTC")),
                pa.array([one.stale for one in held], pa.string()),
                pa.array([json.dumps(one.columns) for one in held]),
                pa.array([json.dumps(moves.get(one.relation_id, [])) for one in held]),
                pa.array([str(self.own(one.relation_id)) for one in held]),
            ],
            names=_PROGRESS_SCHEMA.names,
        )
        with progress.refusals(), Writer(progress, _PROGRESS_SCHEMA, (), "progress") as writer:
            writer.write(conformed(rows, _PROGRESS_SCHEMA))
            newest = zip(_NEWEST, (*(stored.newest or (0, 0)), stored.slot), strict=True)
            progress.commit(
                writer.finish(), [], (stored.lsn, 0), schema=_PROGRESS_SCHEMA, **dict(newest)
            )
        written = [one.table for one in self._writers if not one.is_elsewhere]
        self._writers = []
        self._do_moves()
        tables = {id(table): table for table in self._tables.values()}
        for table in [*dict.fromkeys(written), progress] if self.maintains else []:
            if id(table) in tables:  # not one that was moved
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

    def rename(self, held: Held, stored: str) -> None:
        """See `Target`."""
        self._moves.append(Move(held.relation_id, held.stored, stored, held.version))

    def _do_moves(self) -> None:
        """Move the directories of tables that have other names.

        `_progress` has the moves first. So they are done again if not all of them were done; a
        directory that has another table already, or none, is left alone.
        """
        if self._moves:
            self._joins.wait()  # of a table that may be moved
        for move in self._moves:
            names = [("state", "")]
            names += [("changes", version_suffix(i)) for i in range(1, move.version + 1)]
            for kind, suffix in names:
                for name in (move.old, move.new):
                    self._tables.pop(f"{kind}/{directory_of(name + suffix)}", None)
                table = self._made(kind, move.old + suffix, move.relation_id)
                if table.is_its_own():
                    table.rename(move.new + suffix)
        self._moves = []


class Move(NamedTuple):
    """A table gets another name: what it had, what it gets, and how many change tables it has."""

    relation_id: int
    old: str
    new: str
    version: int


def version_suffix(version: int) -> str:
    """What is behind the name of a change table."""
    return "" if version == 1 else f".v{version}"


class _Changes(Positioned):
    """See `ChangeWriter`."""

    kind = "changes"

    def __init__(self, target: DeltaTarget, table: Table, held: Held) -> None:
        self._target = target
        self.table = table
        self.held = held
        self.own = table.own
        self._schema: pa.Schema | None = table.schema if table.exists else None
        self._writers: list[Writer] = []
        self._files: Written = []
        self.is_elsewhere = False

    @property
    def pending_bytes(self) -> int:
        """Bytes that are kept in memory."""
        return self._writers[-1].pending_bytes if self._writers else 0

    def fits(self, schema: pa.Schema) -> bool:
        """See `ChangeWriter`."""
        there = self._schema
        return there is None or merged_schema(there, stored_schema(schema)) is not None

    def append(self, changes: pa.RecordBatch) -> None:
        """See `ChangeWriter`."""
        schema = stored_schema(changes.schema)
        if self._schema is not None:
            merged = merged_schema(self._schema, schema)
            if merged is None:
                raise PgOutputError(
                    f"the changes of {self.held.namespace}.{self.held.name} have columns of "
                    f"other types than its change table {self.table.directory}"
                )
            schema = merged
        if not self._writers or schema != self._schema:
            self._begin_file(schema, changes)
        with self.table.refusals():
            self._writers[-1].write(conformed(changes, schema))
        self._target.make_room()

    def _begin_file(self, schema: pa.Schema, changes: pa.RecordBatch) -> None:
        self.flush()
        first = changes.column("commit_lsn")[0].as_py() if changes.num_rows else 0
        prefix = f"{self.held.relation_id}-{first or 0:016X}"
        self._writers.append(Writer(self.table, schema, (), prefix))
        self._schema = schema

    @property
    def schema(self) -> pa.Schema | None:
        """The columns that the table has; None: it has none yet."""
        return self._schema

    def add_files(self, schema: pa.Schema, files: Written) -> None:
        """Have files of changes that were written elsewhere, in the table's directory.

        Raises
        ------
        NotForeseenError
            They have not all columns that the table has.
        """
        merged = schema if self._schema is None else merged_schema(self._schema, schema)
        if merged != schema:
            raise NotForeseenError(f"{self.table.directory} has other columns")
        self._schema = schema
        self._files += files

    def flush(self) -> None:
        """Write what is kept in memory into its file."""
        if self._writers:
            with self.table.refusals():
                self._writers[-1].flush()

    def commit(self, held: Held) -> None:
        """See `ChangeWriter`."""
        table = self.table
        with table.refusals():
            files = [file for writer in self._writers for file in writer.finish()]
        files += self._files
        # They are not deleted from here on: nobody knows whether a commit that fails stands.
        self._writers, self._files = [], []
        if not files and (self._schema is None or held.copy_lsn <= self.copy_lsn):
            return
        if held.lsn <= self.lsn and held.copy_lsn <= self.copy_lsn:
            raise PgOutputError(
                f"{table.directory} has the changes before {format_lsn(self.lsn)} already, and is "
                f"given others up to {format_lsn(held.lsn)}"
            )
        position = max(held.lsn, self.lsn), max(held.copy_lsn, self.copy_lsn)
        if table.exists:
            table.add_columns(self._schema)
            table.commit(files, [], position)
        else:
            table.create(self._schema, position, files=files)
        self.own = table.own

    def discard(self) -> None:
        """Delete what was written and does not stand."""
        for writer in self._writers:
            writer.discard()
        self.table.delete_files(self._files)
        self._writers, self._files = [], []


class _State(Positioned):
    """See `StateWriter`."""

    kind = "state"

    def __init__(
        self, table: Table, held: Held, partition_by: Sequence[str], marker: str | None
    ) -> None:
        self.table = table
        self.held = held
        self.marker = marker
        self.own = table.own
        # At a copy it has that alone, and so its columns.
        self.is_ahead = self.lsn > held.lsn and self.lsn != self.copy_lsn
        """Of a call before that was cut short: alterations may come that it has."""
        self.is_elsewhere = False
        """Whether another process writes it in this window."""
        self._partition_by = table.partition_by if table.exists else list(partition_by)
        stored = {one.name: one.stored for one in held.columns if not one.is_dropped}
        wanted = [stored.get(name, name) for name in partition_by]
        if wanted and wanted != self._partition_by and table.exists:
            raise PgOutputError(
                f"{table.directory} is partitioned by {', '.join(self._partition_by) or 'nothing'} "
                f"and not by {', '.join(wanted)}, as partition_by= says: leave that out, or delete "
                "this directory and call sync again, which has the table copied"
            )
        self._writer: Writer | None = None
        self._files: Written = []

    @property
    def partition_by(self) -> list[str]:
        """The columns by which it is partitioned."""
        return self._partition_by

    def create(self, schema: pa.Schema) -> None:
        """See `StateWriter`."""
        # One that is there already was made before a crash, and may have rows since.
        if not self.table.exists:
            self._create(self._stored(schema), self.held.columns)

    def _stored(self, schema: pa.Schema) -> pa.Schema:
        """The columns of the table for rows of the server's."""
        if self.marker is not None:
            schema = schema.append(pa.field(self.marker, DELETED_AT))
        return stored_schema(schema)

    def _create(self, schema: pa.Schema, columns: Sequence[Column]) -> None:
        stored = {column.name: column.stored for column in columns if not column.is_dropped}
        self._partition_by = [stored.get(name, name) for name in self._partition_by]
        for name in self._partition_by:
            at = schema.get_field_index(name)
            if at < 0 or not _can_partition(schema.field(at).type):
                raise PgOutputError(
                    f"{self.held.namespace}.{self.held.name} can't be partitioned by {name!r}: "
                    "it has no such column of integers, text, booleans, dates or timestamps"
                )
        self.table.create(schema, (0, 0), self._partition_by)

    def load(self, schema: pa.Schema) -> None:
        """See `StateWriter`."""
        schema = self._stored(schema)
        if not self.table.exists:
            self._create(schema, self.held.columns)
        self._writer = self._new_writer(schema)

    def _new_writer(self, schema: pa.Schema) -> Writer:
        return Writer(self.table, schema, self._partition_by, f"{self.held.relation_id}")

    def append(self, rows: pa.RecordBatch) -> None:
        """See `StateWriter`."""
        if self._writer is None:
            raise PgOutputError("load() was not called")
        with self.table.refusals():
            self._writer.write(conformed(rows, self._writer.schema))

    def add_files(self, schema: pa.Schema, partition_by: Sequence[str], files: Written) -> None:
        """Have files of the snapshot's rows that were written elsewhere, in its directory.

        Raises
        ------
        NotForeseenError
            They have other columns or partitions than the table is to have.
        """
        if self._writer is None:
            raise PgOutputError("load() was not called")
        if schema != self._writer.schema or list(partition_by) != self._partition_by:
            raise NotForeseenError(f"{self.table.directory} has other columns or partitions")
        self._files += files

    def loaded(self, held: Held) -> None:
        """See `StateWriter`."""
        if self._writer is None:
            raise PgOutputError("load() was not called")
        with self.table.refusals():
            files = self._writer.finish() + self._files
        self._files = []
        schema, self._writer = self._writer.schema, None
        self.table.commit(files, [], (held.lsn, held.copy_lsn), schema=schema, altered=0)
        self.is_ahead = False
        self.own = self.table.own

    def apply(self, alterations: Sequence[Alteration], net: NetChanges, held: Held) -> None:
        """See `StateWriter`."""
        table = self.table
        if held.lsn <= self.lsn:
            if net.truncated or net.rows.num_rows:
                raise PgOutputError(
                    f"{table.directory} has the changes before {format_lsn(self.lsn)} already, and "
                    f"is given others up to {format_lsn(held.lsn)}"
                )
            return
        if not table.exists:
            raise IncompleteError(
                f"its table {table.directory} in {table.place.uri} was deleted: copy it again"
            )
        altered = _number(alterations)
        if self.is_ahead and table.transaction("altered") == altered:
            alterations = []
        elif self.is_ahead and any(isinstance(one, (Removed, Renamed)) for one in alterations):
            raise IncompleteError(
                f"{table.directory} has changes before {format_lsn(self.lsn)} of a sync that was "
                "cut short, and nobody knows whether its columns have their names from before or "
                "after a column was renamed, or dropped and made again: copy the table again"
            )
        if not (alterations or net.truncated or net.rows.num_rows):
            return
        shape = shape_of(table.schema, alterations)
        position = held.lsn, max(held.copy_lsn, self.copy_lsn)
        with table.refusals(), self._new_writer(shape.schema) as writer:
            merge = Merge(table, shape, net, directory_of(self.held.stored), self.marker)
            merge.write(writer)
            files = writer.finish()
            whole = net.truncated or shape.rewrites
            if not whole:
                table.add_columns(shape.schema)
            table.commit(
                files,
                [] if whole else merge.files,
                position,
                schema=shape.schema if whole else None,
                altered=altered,
            )
        self.own = table.own

    def discard(self) -> None:
        """Delete what was written and does not stand."""
        if self._writer is not None:
            self._writer.discard()
            self._writer = None
        self.table.delete_files(self._files)
        self._files = []


def _can_partition(type_: pa.DataType) -> bool:
    """Whether partitions can have such values; delta-rs 1.6 can't read negative decimals there."""
    types = pa.types
    plain = types.is_integer(type_) or types.is_string(type_) or types.is_boolean(type_)
    return bool(plain or types.is_date(type_) or types.is_timestamp(type_))


def _number(alterations: Sequence[Alteration]) -> int:
    """A number for the log by which alterations are known again; 0 if there is none."""
    if not alterations:
        return 0
    text = repr(
        [(type(one).__name__, *(str(part) for part in one)) for one in alterations]
    ).encode()
    return (zlib.crc32(text) << 32 | zlib.adler32(text)) & _SOME_BITS
