"""The writers of Delta change tables and state tables: see `ChangeWriter` and `StateWriter`."""

from __future__ import annotations

import logging
import zlib
from contextlib import nullcontext
from typing import TYPE_CHECKING

import pyarrow as pa

from ..errors import Argument, PgOutputError
from ..lsn import format_lsn
from ..names import qualified
from .delta_files import DeltaFileWriter, Written
from .delta_merge import LocalSteps, Merge
from .delta_place import directory_of
from .delta_shape import shape_of
from .delta_types import conformed, merged_schema, stored_schema
from .targets import (
    CHANGED,
    DELETED_AT,
    IncompleteError,
    Removed,
    Renamed,
    TableState,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from .delta_merge import MergeSteps
    from .delta_table import LakeTable
    from .folding import NetChanges
    from .targets import Alteration

_log = logging.getLogger(__name__)

_SOME_BITS = (1 << 63) - 1


def local_steps() -> AbstractContextManager[MergeSteps]:
    """Return a context in which this process does the steps of a merge."""
    return nullcontext(LocalSteps())


class Positioned:
    """A writer that has the position of its table."""

    own: tuple[int, int]

    @property
    def lsn(self) -> int:
        """See `ChangeWriter`."""
        return self.own[0]

    @property
    def copy_lsn(self) -> int:
        """See `ChangeWriter`."""
        return self.own[1]


class DeltaChanges(Positioned):
    """A `ChangeWriter` of a Delta table."""

    kind = "changes"

    def __init__(
        self, table: LakeTable, table_state: TableState, make_room: Callable[[], None]
    ) -> None:
        self._make_room = make_room
        self.table = table
        self.table_state = table_state
        self.own = table.position
        self._schema: pa.Schema | None = table.schema if table.exists else None
        self._writers: list[DeltaFileWriter] = []
        self._files: Written = []
        self.is_written_by_executor = False

    @property
    def pending_bytes(self) -> int:
        """Bytes of changes in memory, which no file has yet."""
        return self._writers[-1].pending_bytes if self._writers else 0

    @property
    def gap(self) -> int | None:
        """See `ChangeWriter`."""
        return self.table.gap

    def fits(self, schema: pa.Schema) -> bool:
        """See `ChangeWriter`."""
        own_schema = self._schema
        return own_schema is None or merged_schema(own_schema, stored_schema(schema)) is not None

    def append(self, changes: pa.RecordBatch) -> None:
        """See `ChangeWriter`."""
        before = self._schema
        schema = self.add_columns(changes.schema)
        if not self._writers or schema != before:
            self._begin_file(schema, changes)
        with self.table.refusals():
            self._writers[-1].write(conformed(changes, schema))
        self._make_room()

    def _begin_file(self, schema: pa.Schema, changes: pa.RecordBatch) -> None:
        self.flush()
        first = changes.column("commit_lsn")[0].as_py() if changes.num_rows else 0
        prefix = f"{self.table_state.relation_id}-{first or 0:016X}"
        self._writers.append(DeltaFileWriter(self.table, schema, (), prefix))

    def _unfit(self) -> PgOutputError:
        return PgOutputError(
            f"the changes of {qualified(self.table_state)} do not fit its change table "
            f"{self.table.directory}: columns have other types",
            code="unfit_schema",
            table=qualified(self.table_state),
        )

    @property
    def schema(self) -> pa.Schema | None:
        """The table's columns after this window's commit; None before the first changes."""
        return self._schema

    def add_columns(self, schema: pa.Schema) -> pa.Schema:
        """Return the table's columns with those of changes that `fits` accepts, for their files."""
        wanted = stored_schema(schema)
        merged = wanted if self._schema is None else merged_schema(self._schema, wanted)
        if merged is None:
            raise self._unfit()
        self._schema = merged
        return merged

    def add_files(self, files: Written) -> None:
        """Take files that other processes wrote, with the columns that `add_columns` returned."""
        self._files += files

    def flush(self) -> None:
        """Write the changes in memory to their file."""
        if self._writers:
            with self.table.refusals():
                self._writers[-1].flush()

    def commit(self, table_state: TableState) -> None:
        """See `ChangeWriter`."""
        table = self.table
        with table.refusals():
            files = [file for writer in self._writers for file in writer.finish()]
        files += self._files
        # From here on, do not delete the files: a commit that fails may have succeeded.
        self._writers, self._files = [], []
        if not files and (self._schema is None or table_state.copy_lsn <= self.copy_lsn):
            return
        if table_state.lsn <= self.lsn and table_state.copy_lsn <= self.copy_lsn:
            raise PgOutputError(
                f"{table.directory} already has the changes before {format_lsn(self.lsn)}, but got "
                f"changes up to {format_lsn(table_state.lsn)}",
                code="unfit_input",
                table=qualified(table_state),
            )
        position = max(table_state.lsn, self.lsn), max(table_state.copy_lsn, self.copy_lsn)
        table.commit_time = table_state.commit_time

        def append() -> None:
            table.check_position(self.own)
            table.add_columns(self._schema)
            table.commit(files, [], position)

        if table.exists:
            table.until_it_stands(append)
        else:
            table.create(self._schema, position, files=files)
        self.own = table.position

    def discard(self) -> None:
        """Delete the files that no commit has."""
        for writer in self._writers:
            writer.discard()
        self.table.delete_files(self._files)
        self._writers, self._files = [], []


class DeltaState(Positioned):
    """A `StateWriter` of a Delta table.

    Attributes
    ----------
    steps : callable
        Returns a context manager, whose value does the steps of a merge.
    """

    kind = "state"

    def __init__(
        self,
        table: LakeTable,
        table_state: TableState,
        partition_by: Sequence[str],
        marker: str | None,
    ) -> None:
        self.table = table
        self.table_state = table_state
        self.marker = marker
        self.own = table.position
        # At the LSN of a snapshot, the table has the columns of that snapshot for certain.
        self.has_interrupted_write = self.lsn > table_state.lsn and self.lsn != self.copy_lsn
        """Whether an interrupted call has written the table, which may have alterations already."""
        self.is_written_by_executor = False
        """Whether an executor writes the table in this window, and not this process."""
        self.steps: Callable[[], AbstractContextManager[MergeSteps]] = local_steps
        self._wanted = list(partition_by)
        self._partition_by = table.partition_by if table.exists else self._wanted
        stored_names = {column.name: column.stored_name for column in table_state.columns}
        # Dropped columns don't count. A stale table may differ: a new snapshot gets these columns.
        wanted = [
            stored_names.get(name, name)
            for name in partition_by
            if not stored_names or name in stored_names
        ]
        is_current = table_state.stale is None and table.exists
        if wanted and wanted != self._partition_by and is_current:
            raise PgOutputError(
                f"{table.directory} is partitioned by {', '.join(self._partition_by) or 'nothing'} "
                f"and not by {', '.join(wanted)}",
                code="bad_option",
                table=qualified(table_state),
                parameter="partition_by",
                hint=(
                    "Leave out ",
                    Argument("partition_by"),
                    (
                        ", or delete this directory and start sync again: the table gets a new "
                        "snapshot"
                    ),
                ),
            )
        self._writer: DeltaFileWriter | None = None
        self._files: Written = []

    @property
    def partition_by(self) -> list[str]:
        """The partition columns of the table."""
        return self._partition_by

    def create(self, schema: pa.Schema) -> None:
        """See `StateWriter`."""
        # An existing table was created before a crash, and may have rows already.
        if not self.table.exists:
            schema = self._table_schema(schema)
            self.table.create(schema, (0, 0), self._partitions(schema))

    def _table_schema(self, schema: pa.Schema) -> pa.Schema:
        """Return the table's schema for the server's columns."""
        if self.marker is not None:
            schema = schema.append(pa.field(self.marker, DELETED_AT))
        return stored_schema(schema)

    def _partitions(self, schema: pa.Schema) -> list[str]:
        """Choose the partition columns of a table that gets all of its rows."""
        stored_names = {column.name: column.stored_name for column in self.table_state.columns}
        names = [stored_names.get(name, name) for name in self._wanted] or self._partition_by
        if self.table.exists:
            gone = [name for name in names if name not in schema.names]
            names = [name for name in names if name in schema.names]
            if gone:
                _log.warning(
                    "%s is now partitioned by %s: the server no longer has column %s",
                    self.table.directory, ", ".join(names) or "nothing", ", ".join(gone),
                )  # fmt: skip
        for name in names:
            at = schema.get_field_index(name)
            if at < 0 or not _can_partition(schema.field(at).type):
                raise PgOutputError(
                    f"{qualified(self.table_state)} can't be partitioned by {name!r}: it "
                    "has no column of this name with integers, text, booleans, dates or "
                    "timestamps",
                    code="bad_option",
                    parameter="partition_by",
                    table=qualified(self.table_state),
                )
        self._partition_by = names
        return names

    def load(self, schema: pa.Schema) -> None:
        """See `StateWriter`."""
        schema = self._table_schema(schema)
        self._partitions(schema)
        self._writer = self._new_writer(schema)

    def _new_writer(self, schema: pa.Schema) -> DeltaFileWriter:
        return DeltaFileWriter(
            self.table, schema, self._partition_by, f"{self.table_state.relation_id}"
        )

    def append(self, rows: pa.RecordBatch) -> None:
        """See `StateWriter`."""
        if self._writer is None:
            raise PgOutputError("load() was not called", code="unfit_input")
        with self.table.refusals():
            self._writer.write(conformed(rows, self._writer.schema))

    @property
    def loading(self) -> pa.Schema:
        """The columns of the files of a snapshot's rows, since `load`."""
        if self._writer is None:
            raise PgOutputError("load() was not called", code="unfit_input")
        return self._writer.schema

    def add_files(self, files: Written) -> None:
        """Take files of a snapshot's rows that other processes wrote, with columns `loading`."""
        self._files += files

    def loaded(self, table_state: TableState) -> None:
        """See `StateWriter`."""
        if self._writer is None:
            raise PgOutputError("load() was not called", code="unfit_input")
        with self.table.refusals():
            files = self._writer.finish() + self._files
        self._files = []
        schema, self._writer = self._writer.schema, None
        position = table_state.lsn, table_state.copy_lsn
        self.table.commit_time = table_state.commit_time

        def replace() -> None:
            self.table.check_position(self.own)
            if not self.table.exists or self.table.partition_by != self._partition_by:
                self.table.create(schema, position, self._partition_by, files=files)
                return
            self.table.allow(schema)
            self.table.commit(files, [], position, schema=schema, altered=0)

        self.table.until_it_stands(replace)
        self.has_interrupted_write = False
        self.own = self.table.position

    def apply(
        self, alterations: Sequence[Alteration], net: NetChanges, table_state: TableState
    ) -> None:
        """See `StateWriter`."""
        table = self.table
        is_same = table_state.lsn == self.lsn
        if table_state.lsn <= self.lsn and not (is_same and alterations):
            if net.truncated or net.num_rows:
                raise PgOutputError(
                    f"{table.directory} already has the changes before {format_lsn(self.lsn)}, but "
                    f"got changes up to {format_lsn(table_state.lsn)}",
                    code="unfit_input",
                    table=qualified(table_state),
                )
            return
        if not table.exists:
            raise IncompleteError(
                f"its state table {table.directory} in {table.place.uri} was deleted. The table "
                "needs a new snapshot",
                table=qualified(table_state),
            )
        altered = _number(alterations)
        if (self.has_interrupted_write or is_same) and table.transaction("altered") == altered:
            alterations = []
        elif self.has_interrupted_write and any(
            isinstance(alteration, (Removed, Renamed)) for alteration in alterations
        ):
            raise IncompleteError(
                f"an interrupted sync wrote changes before {format_lsn(self.lsn)} to "
                f"{table.directory}, and a column was renamed or dropped among these changes. Sync "
                "cannot tell the columns apart, so the table needs a new snapshot",
                table=qualified(table_state),
            )
        if not (alterations or net.truncated or net.num_rows):
            return
        changed = {
            alteration.column
            for alteration in alterations
            if isinstance(alteration, (Removed, Renamed))
        }
        if gone := [name for name in self._partition_by if name in changed]:
            raise IncompleteError(
                f"column {gone[0]} was dropped or renamed, but {table.directory} is partitioned by "
                "it. The table needs a new snapshot",
                table=qualified(table_state),
            )
        position = table_state.lsn, max(table_state.copy_lsn, self.copy_lsn)
        table.commit_time = table_state.commit_time
        table.until_it_stands(lambda: self._merge(alterations, net, position, altered))
        self.own = table.position

    def _merge(
        self,
        alterations: Sequence[Alteration],
        net: NetChanges,
        position: tuple[int, int],
        altered: int,
    ) -> None:
        """Merge net changes into the version that is loaded."""
        table = self.table
        shape = shape_of(table.schema, alterations)
        whole = net.truncated or shape.rewrites
        if shape.rewrites:
            size = sum(file.size for file in table.files())
            _log.info("rewriting %s (%d bytes), because its columns change", table.directory, size)
        if whole:
            table.allow(shape.schema)
        else:
            table.add_columns(shape.schema)
        self.check_rows()
        name = directory_of(self.table_state.stored_name)
        with table.refusals(), self._new_writer(shape.schema) as writer, self.steps() as steps:
            merge = Merge(table, shape, net, name, self.marker, steps)
            table.commit(
                merge.write(writer),
                [] if whole else merge.files,
                position,
                schema=shape.schema if whole else None,
                altered=altered,
            )

    def check_rows(self) -> None:
        """Refuse a table whose rows are not those that this sync has written.

        Raises
        ------
        IncompleteError
            Another program has changed rows.
        ConflictError
            Another sync has moved the position.
        """
        self.table.check_position(self.own)
        if self.table.changed is not None:
            raise IncompleteError(
                f"{CHANGED}: {self.table.directory}, {self.table.changed}",
                table=qualified(self.table_state),
            )

    def discard(self) -> None:
        """Delete the files that no commit has."""
        if self._writer is not None:
            self._writer.discard()
            self._writer = None
        self.table.delete_files(self._files)
        self._files = []


def _can_partition(type_: pa.DataType) -> bool:
    """Whether partition values can have a type. delta-rs 1.6 can't read negative decimals there."""
    types = pa.types
    plain = types.is_integer(type_) or types.is_string(type_) or types.is_boolean(type_)
    return bool(plain or types.is_date(type_) or types.is_timestamp(type_))


def _number(alterations: Sequence[Alteration]) -> int:
    """Return a checksum by which the log says that it has these alterations; 0 for none."""
    if not alterations:
        return 0
    text = repr(
        [
            (type(alteration).__name__, *(str(part) for part in alteration))
            for alteration in alterations
        ]
    ).encode()
    return (zlib.crc32(text) << 32 | zlib.adler32(text)) & _SOME_BITS
