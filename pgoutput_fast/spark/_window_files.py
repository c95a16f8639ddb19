"""What executors write of a window of a sync: files of changes, and of the rows of snapshots.

They write into the directories of the tables, in the columns that the driver takes the tables to
have. Nobody sees these files before the driver has registered them. Where a table turns out to be
another one than was thought, the driver does not take them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from pgoutput_fast.apply.delta_files import DeltaFileWriter, Written
from pgoutput_fast.apply.delta_place import DeltaPlace, directory_of
from pgoutput_fast.apply.delta_table import LakeTable
from pgoutput_fast.apply.delta_target import version_suffix
from pgoutput_fast.apply.delta_types import conformed, merged_schema, stored_schema
from pgoutput_fast.apply.evolution import turns_digits
from pgoutput_fast.apply.naming import free_column, free_name, stored_table
from pgoutput_fast.apply.stored_changes import (
    Form,
    as_taken,
    check_copied_keys,
    stored_version,
)
from pgoutput_fast.apply.targets import DELETED_AT, StoredColumn
from pgoutput_fast.apply.versions import Version
from pgoutput_fast.changelog.changes import ChangeReader
from pgoutput_fast.changelog.history import history_of
from pgoutput_fast.changelog.read_frames import chunks
from pgoutput_fast.errors import PgOutputError

from ._staged_files import taken

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pgoutput_fast.changelog.copies import Copy
    from pgoutput_fast.changelog.history import HistoryPolicy
    from pgoutput_fast.changelog.read_plan import Read
    from pgoutput_fast.segments import SegmentMetadata

_PENDING = 128 << 20
"""Bytes of changes of all tables that wait in memory."""


class Expected(NamedTuple):
    """What a table of the target is taken to be.

    Attributes
    ----------
    stored : str
        Its name there.
    version : int
        Of its change table.
    columns : tuple of StoredColumn
        Of its state table.
    schema : pyarrow.Schema or None
        The columns of its change table; None: it has none, or they are not known.
    partition_by : tuple of str or None
        The columns by which the state table is partitioned that is there; None: there is none.
    """

    stored: str
    version: int = 1
    columns: tuple[StoredColumn, ...] = ()
    schema: pa.Schema | None = None
    partition_by: tuple[str, ...] | None = None


class Files(NamedTuple):
    """Files of one table. Fields: directory, schema (of their columns), partition_by, files."""

    directory: str
    schema: pa.Schema
    partition_by: tuple[str, ...]
    files: Written


class FileRun(NamedTuple):
    """Changes of one table that have the same columns, and the files that have them.

    Attributes
    ----------
    read : int
        The number of the read in the plan with which they begin.
    relation : Relation
    schema : pyarrow.Schema
        That of their batches.
    form : pyarrow.Schema
        The one that a target's batches were taken to have.
    changes : Files
    rows : int
    first_lsn, last_lsn : int
        The least and the greatest `commit_lsn`.
    commit_time : int
        Of the last change, in microseconds since 1970.
    state : Files or None
        The rows of a snapshot; None: these are changes of the stream, or there is no state table.
    """

    read: int
    relation: Any
    schema: pa.Schema
    form: pa.Schema
    changes: Files
    rows: int
    first_lsn: int
    last_lsn: int
    commit_time: int
    state: Files | None


class WriteTask(NamedTuple):
    """A part of a window that one task of Spark writes.

    Attributes
    ----------
    reads : list of (int, Read)
        With their numbers in the plan.
    metadata : SegmentMetadata
    directory : str
        Of the segments, whose history has the types.
    decoding : dict
        Arguments of the decoder, without the registry.
    history : {"newer", "older", "error"}
    uri : str
        Of the target.
    storage_options : dict of str to str, or None
    retention_hours : int
    marker : str or None
        The column of state tables in which deleted rows are marked.
    partition_by : dict of str to list of str
    tables : dict of int to Expected
        By relation id.
    change_tables : type of LakeTable
        What writes the files of change tables.
    has_state : bool
        Whether the target keeps state tables.
    staged : str or None
        The directory in the target that has the files of the reads; None: they are where they say.
    """

    reads: Sequence[tuple[int, Read]]
    metadata: SegmentMetadata
    directory: str
    decoding: dict[str, Any]
    history: HistoryPolicy
    uri: str
    storage_options: dict[str, str] | None
    retention_hours: int
    marker: str | None
    partition_by: Mapping[str, list[str]]
    tables: Mapping[int, Expected]
    change_tables: type[LakeTable]
    has_state: bool
    staged: str | None = None

    def __repr__(self) -> str:
        return f"WriteTask({len(self.reads)} reads, {self.uri!r})"


def followed(columns: Sequence[StoredColumn], version: Version) -> tuple[StoredColumn, ...]:
    """The columns of a state table when its table has those of a version, if none was renamed."""
    names = {one.name for one in version.columns}
    made = [one for one in columns if one.name in names]
    live = {one.name: i for i, one in enumerate(made)}
    for column in version.columns:
        if column.name in live:
            at = live[column.name]
            made[at] = made[at]._replace(form=column.form)
        else:
            stored = free_column(column.name, made)
            made.append(StoredColumn(column.name, stored, 0, -1, column.form))
    return tuple(made)


def new_name(relation: Any) -> str:
    """The name of a table that the target has not, if no other one has it."""
    return free_name(stored_table(relation.namespace, relation.name), relation.relation_id, ())


class _FileRuns:
    """Changes of one table that are being written."""

    def __init__(
        self, task: WriteTask, read: int, relation: Any, schema: pa.Schema, expected: Expected,
        *, is_copy: bool,
    ) -> None:  # fmt: skip
        self.schema = schema
        self._read, self._relation = read, relation
        version = stored_version(schema)
        columns = followed(() if is_copy else expected.columns, version)
        self.form = Form.of(schema, columns)
        wanted = stored_schema(self.form.schema)
        merged = wanted if expected.schema is None else merged_schema(expected.schema, wanted)
        number = expected.version
        if merged is None or turns_digits(expected.columns, version):
            number, merged = number + 1, wanted
        self.expected = expected._replace(version=number, columns=columns, schema=merged)
        name = expected.stored + version_suffix(number)
        place = DeltaPlace(task.uri, task.storage_options)
        table = task.change_tables(place, f"changes/{directory_of(name)}", "", task.retention_hours)
        self._changes = _OpenFiles(table, merged, ())
        self._state: _OpenFiles | None = None
        if is_copy and task.has_state:
            row = pa.schema(list(self.form.schema.field("after").type))
            if task.marker is not None:
                row = row.append(pa.field(task.marker, DELETED_AT))
            given = expected.partition_by
            if given is None:
                given = tuple(task.partition_by.get(f"{relation.namespace}.{relation.name}", ()))
                stored = {one.name: one.stored for one in columns}
                given = tuple(stored.get(one, one) for one in given)
            else:  # a column that the server dropped is no partition any more
                given = tuple(one for one in given if one in row.names)
            table = LakeTable(
                place, f"state/{directory_of(expected.stored)}", "", task.retention_hours
            )
            self._state = _OpenFiles(table, stored_schema(row), given)
        self._rows = 0
        self._first = self._last = self._time = 0

    def add(self, batch: pa.RecordBatch) -> None:
        """Take changes."""
        if self._state is not None:
            check_copied_keys(batch)
        rows = self.form.batch(batch)
        lsns = rows.column("commit_lsn")
        if not self._rows:
            self._first = lsns[0].as_py()
            self._changes.begin(f"{self._relation.relation_id}-{self._first or 0:016X}")
        self._last = lsns[-1].as_py()
        self._time = rows.column("commit_time")[-1].cast(pa.int64()).as_py()
        self._rows += rows.num_rows
        self._changes.write(rows)
        if self._state is not None:
            self._state.begin(str(self._relation.relation_id))
            read = rows.filter(pc.equal(rows.column("op"), "read"))
            if read.num_rows:
                after = read.column("after")
                self._state.write(
                    pa.RecordBatch.from_arrays(after.flatten(), schema=pa.schema(list(after.type)))
                )

    @property
    def pending(self) -> int:
        """Bytes that wait in memory."""
        return self._changes.pending + (0 if self._state is None else self._state.pending)

    def flush(self) -> None:
        """Write what waits."""
        self._changes.flush()
        if self._state is not None:
            self._state.flush()

    def finish(self) -> FileRun:
        """What was written."""
        return FileRun(
            self._read, self._relation, self.schema, self.form.schema, self._changes.finish(),
            self._rows, self._first, self._last, self._time,
            None if self._state is None else self._state.finish(),
        )  # fmt: skip

    def discard(self) -> None:
        """Delete it."""
        self._changes.discard()
        if self._state is not None:
            self._state.discard()


class _OpenFiles:
    """Files of one table that are being written."""

    def __init__(self, table: LakeTable, schema: pa.Schema, partition_by: tuple[str, ...]) -> None:
        self._table = table
        self._schema, self._partition_by = schema, partition_by
        self._writer: DeltaFileWriter | None = None

    def begin(self, prefix: str) -> None:
        """Begin the first file, by what its name begins with."""
        if self._writer is None:
            self._writer = DeltaFileWriter(self._table, self._schema, self._partition_by, prefix)

    def write(self, rows: pa.RecordBatch) -> None:
        """Write rows behind those before."""
        if self._writer is None:
            raise PgOutputError("begin() was not called", code="unfit_input")
        with self._table.refusals():
            self._writer.write(conformed(rows, self._schema))

    @property
    def pending(self) -> int:
        """Bytes that wait in memory."""
        return 0 if self._writer is None else self._writer.pending_bytes

    def flush(self) -> None:
        """Write what waits."""
        if self._writer is not None:
            with self._table.refusals():
                self._writer.flush()

    def finish(self) -> Files:
        """What was written."""
        files: Written = []
        if self._writer is not None:
            with self._table.refusals():
                files = self._writer.finish()
        return Files(self._table.directory, self._schema, self._partition_by, files)

    def discard(self) -> None:
        """Delete what was written."""
        if self._writer is not None:
            self._writer.discard()


def write_window(task: WriteTask) -> list[FileRun]:
    """Write the changes of a task's reads.

    Returns
    -------
    list of Run
        In the order in which they begin; those of one table in the order of the stream.

    Raises
    ------
    PgOutputError
        A frame or a value is refused, or the files can't be read or written.
    """
    if task.staged is None:
        return _write(task)
    place = DeltaPlace(task.uri, task.storage_options)
    with taken(place, task.staged, task.directory, task.reads) as (directory, reads):
        return _write(task._replace(directory=str(directory), reads=reads))


def _write(task: WriteTask) -> list[FileRun]:
    written = _WindowWritten(task)
    try:
        reader = ChangeReader(task.decoding, history_of([task.directory]), task.history)
        copying: Copy | None = None
        for number, read in task.reads:
            copy = read.snapshot
            if copy != copying:
                written.close_all()
                copying = copy
            for chunk in chunks(read, task.metadata):
                for changes, decoded in reader.changes(chunk):
                    batch = as_taken(changes, decoded, is_binary=chunk.is_binary)
                    written.add(number, changes.relation, batch, is_copy=copy is not None)
        return written.finish()
    except BaseException:
        written.discard()
        raise


class _WindowWritten:
    """The runs of a task."""

    def __init__(self, task: WriteTask) -> None:
        self._task = task
        self._tables = dict(task.tables)
        self._open: dict[int, tuple[int, _FileRuns]] = {}
        self._runs: list[tuple[int, FileRun]] = []
        self._number = 0

    def add(self, read: int, relation: Any, batch: pa.RecordBatch, *, is_copy: bool) -> None:
        """Take changes of a table."""
        relation_id = relation.relation_id
        found = self._open.get(relation_id)
        schema = batch.schema
        if found is None or not found[1].schema.equals(schema, check_metadata=True):
            self._close(relation_id)
            expected = self._tables.get(relation_id) or Expected(new_name(relation))
            run = _FileRuns(self._task, read, relation, schema, expected, is_copy=is_copy)
            self._tables[relation_id] = run.expected
            found = self._open[relation_id] = self._number, run
            self._number += 1
        found[1].add(batch)
        runs = [run for _, run in self._open.values()]
        if sum(run.pending for run in runs) > _PENDING:
            max(runs, key=lambda run: run.pending).flush()

    def _close(self, relation_id: int) -> None:
        if relation_id in self._open:
            number, run = self._open[relation_id]
            self._runs.append((number, run.finish()))
            del self._open[relation_id]

    def close_all(self) -> None:
        """What comes next begins runs of its own."""
        for relation_id in [*self._open]:
            self._close(relation_id)

    def finish(self) -> list[FileRun]:
        """All runs, in the order in which they begin."""
        self.close_all()
        return [run for _, run in sorted(self._runs, key=lambda one: one[0])]

    def discard(self) -> None:
        """Delete what was written."""
        for _, run in self._open.values():
            run.discard()
        for _, done in self._runs:
            delete_run(self._task, done)


def delete_run(task: WriteTask, run: FileRun) -> None:
    """Delete the files of a run, as far as that is possible."""
    place = DeltaPlace(task.uri, task.storage_options)
    for files in (run.changes, run.state):
        if files is not None:
            LakeTable(place, files.directory, "", task.retention_hours).delete_files(files.files)
