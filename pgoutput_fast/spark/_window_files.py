"""Run on Spark's executors: write the changes of a window, and the rows of snapshots, to files.

The driver has planned where the files go and which columns they have. Nobody sees them before the
driver has registered them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from pgoutput_fast.apply.delta_files import DeltaFileWriter, Written
from pgoutput_fast.apply.delta_place import DeltaPlace
from pgoutput_fast.apply.delta_table import LakeTable
from pgoutput_fast.apply.delta_types import conformed
from pgoutput_fast.apply.stored_changes import BatchConversion, check_copied_keys, target_batch
from pgoutput_fast.apply.targets import UnplannedError
from pgoutput_fast.changelog.changes import ChangeReader
from pgoutput_fast.changelog.history import history_of
from pgoutput_fast.names import qualified

from ._staged_files import downloaded

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pgoutput_fast.changelog.history import HistoryPolicy
    from pgoutput_fast.changelog.read_plan import Read
    from pgoutput_fast.segments import SegmentMetadata

_PENDING = 128 << 20
"""Bytes of changes of all tables that wait in memory."""


class Destination(NamedTuple):
    """Where files of one table go. Fields: directory, schema (their columns), partition_by."""

    directory: str
    schema: pa.Schema
    partition_by: tuple[str, ...] = ()


class TableWrite(NamedTuple):
    """How to write the changes of one table in one section of a window.

    Attributes
    ----------
    schema : pyarrow.Schema
        The schema of the decoded batches.
    conversion : BatchConversion
        Converts them to the target's batches.
    changes : Destination
    state : Destination or None
        Where the rows of a snapshot go; None: these are no rows of a snapshot, or the target keeps
        no state tables.
    """

    schema: pa.Schema
    conversion: BatchConversion
    changes: Destination
    state: Destination | None


_Key = tuple[int, int]
"""The number of a section in its window, and a relation id."""


class FileRun(NamedTuple):
    """Files that a task has written, with changes of one table in one section.

    Attributes
    ----------
    key : tuple of int
        The number of the section in the window, and the relation id.
    changes : list of files
    rows : int
        How many changes these are.
    commit_time : int
        Of the last change, in microseconds since 1970.
    state : list of files
        The files with the rows of a snapshot.
    """

    key: _Key
    changes: Written
    rows: int
    commit_time: int
    state: Written


class WriteTask(NamedTuple):
    """A part of a window that one task of Spark writes.

    Attributes
    ----------
    reads : list of (int, Read)
        Each with the number of its section.
    metadata : SegmentMetadata
    directory : str
        The change log, whose schema history has the types.
    decoding : dict
        Arguments of the decoder, without the registry.
    history : {"newer", "older", "error"}
    uri : str
        The target.
    storage_options : dict of str to str, or None
    retention_hours : int
    tables : dict of (int, int) to TableWrite
        By section and relation id.
    change_tables : type of LakeTable
        What writes the files of change tables.
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
    tables: Mapping[_Key, TableWrite]
    change_tables: type[LakeTable]
    staged: str | None = None

    def __repr__(self) -> str:
        return f"WriteTask({len(self.reads)} reads, {self.uri!r})"

    def files(self, output: Destination, table: type[LakeTable]) -> _OpenFiles:
        """Return a writer of files of one table."""
        place = DeltaPlace(self.uri, self.storage_options)
        return _OpenFiles(table(place, output.directory, "", self.retention_hours), output)


class _FileRuns:
    """Changes of one table in one section that are being written."""

    def __init__(self, task: WriteTask, key: _Key, write: TableWrite) -> None:
        self._key, self._write = key, write
        self._changes = task.files(write.changes, task.change_tables)
        self._state = None if write.state is None else task.files(write.state, LakeTable)
        self._rows = self._time = 0

    def add(self, changes: Any, batch: pa.RecordBatch) -> None:
        """Take changes.

        Raises
        ------
        UnplannedError
            They do not have the planned columns: a type was altered in this section.
        """
        if not batch.schema.equals(self._write.schema, check_metadata=True):
            raise _unplanned(changes.relation)
        if self._state is not None:
            check_copied_keys(batch)
        rows = self._write.conversion.batch(batch)
        first = rows.column("commit_lsn")[0].as_py() or 0
        self._time = rows.column("commit_time")[-1].cast(pa.int64()).as_py()
        self._rows += rows.num_rows
        self._changes.write(rows, f"{self._key[1]}-{first:016X}")
        if self._state is not None:
            read = rows.filter(pc.equal(rows.column("op"), "read"))
            if read.num_rows:
                after = read.column("after")
                state = pa.schema(list(after.type))
                self._state.write(
                    pa.RecordBatch.from_arrays(after.flatten(), schema=state), str(self._key[1])
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
        """Close the files and return them."""
        state = [] if self._state is None else self._state.finish()
        return FileRun(self._key, self._changes.finish(), self._rows, self._time, state)

    def discard(self) -> None:
        """Delete the files."""
        self._changes.discard()
        if self._state is not None:
            self._state.discard()


def _unplanned(relation: Any) -> UnplannedError:
    """Return the error for changes that do not have the planned columns."""
    name = qualified(relation)
    return UnplannedError(
        f"changes of {name} have other types than planned: a type was altered", table=name
    )


class _OpenFiles:
    """Files of one table that are being written."""

    def __init__(self, table: LakeTable, output: Destination) -> None:
        self._table, self._output = table, output
        self._writer: DeltaFileWriter | None = None

    def write(self, rows: pa.RecordBatch, prefix: str) -> None:
        """Write rows after those before; `prefix` begins the names of the files."""
        _, schema, partition_by = self._output
        if self._writer is None:
            self._writer = DeltaFileWriter(self._table, schema, partition_by, prefix)
        with self._table.refusals():
            self._writer.write(conformed(rows, schema))

    @property
    def pending(self) -> int:
        """Bytes that wait in memory."""
        return 0 if self._writer is None else self._writer.pending_bytes

    def flush(self) -> None:
        """Write what waits."""
        if self._writer is not None:
            with self._table.refusals():
                self._writer.flush()

    def finish(self) -> Written:
        """Close the files and return them."""
        if self._writer is None:
            return []
        with self._table.refusals():
            return self._writer.finish()

    def discard(self) -> None:
        """Delete what was written."""
        if self._writer is not None:
            self._writer.discard()


def write_window(task: WriteTask) -> list[FileRun]:
    """Write the changes of a task's reads.

    Returns
    -------
    list of FileRun
        In the order in which they begin.

    Raises
    ------
    PgOutputError
        A frame or a value is refused, or the files can't be read or written.
    UnplannedError
        Changes do not have the planned columns.
    """
    if task.staged is None:
        return _write(task)
    place = DeltaPlace(task.uri, task.storage_options)
    with downloaded(place, task.staged, task.directory, task.reads) as (directory, reads):
        return _write(task._replace(directory=str(directory), reads=reads))


def _write(task: WriteTask) -> list[FileRun]:
    written: dict[_Key, _FileRuns] = {}
    done: list[FileRun] = []
    try:
        reader = ChangeReader(task.decoding, history_of([task.directory]), task.history)
        for section, read in task.reads:
            for frame_run in reader.frame_runs(read, task.metadata):
                for changes, decoded in reader.changes(frame_run):
                    batch = target_batch(changes, decoded, is_binary=frame_run.is_binary)
                    key = section, changes.relation.relation_id
                    if key not in written:
                        if key not in task.tables:
                            raise _unplanned(changes.relation)
                        written[key] = _FileRuns(task, key, task.tables[key])
                    written[key].add(changes, batch)
                    runs = written.values()
                    if sum(run.pending for run in runs) > _PENDING:
                        max(runs, key=lambda run: run.pending).flush()
        for run in written.values():
            done.append(run.finish())  # noqa: PERF401 - an error leaves those before in the list
        return done
    except BaseException:
        for run in written.values():
            run.discard()
        for finished in done:
            delete_run(task, finished)
        raise


def delete_run(task: WriteTask, run: FileRun) -> None:
    """Delete the files of a run, as far as that is possible."""
    write = task.tables[run.key]
    for output, files in ((write.changes, run.changes), (write.state, run.state)):
        if output is not None:
            place = DeltaPlace(task.uri, task.storage_options)
            LakeTable(place, output.directory, "", task.retention_hours).delete_files(files)
