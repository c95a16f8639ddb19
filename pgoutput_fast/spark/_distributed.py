"""Run on the driver: write a window with Spark's executors, and commit their files.

The driver first plans where the files of each table go, and with which columns. The first job
writes the window's changes to files. The second job applies the net changes to the state tables.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa

from pgoutput_fast.apply.delta_merge import balanced
from pgoutput_fast.apply.delta_target import DeltaTarget
from pgoutput_fast.apply.stored_changes import target_batch
from pgoutput_fast.apply.table_window import TableWindow
from pgoutput_fast.apply.targets import IncompleteError, TableState, UnplannedError
from pgoutput_fast.apply.window_writer import WindowWriter, run_all
from pgoutput_fast.columnar.decoder import ColumnarDecoder
from pgoutput_fast.errors import Argument, PgOutputError
from pgoutput_fast.names import qualified
from pgoutput_fast.protocol.encode import encode_fields
from pgoutput_fast.protocol.messages import decode_rare

from ._folds import Folded, FoldedFile, FoldedPart, FoldTask, FoldTasks, LeftMerge, fold_tables
from ._layouts import sections, table_layouts
from ._merge_steps import Staging, opened_net, spark_steps
from ._staged_files import staged, staging
from ._window_files import Destination, FileRun, TableWrite, WriteTask, delete_run, write_window

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pgoutput_fast.apply.delta_files import AddedFile
    from pgoutput_fast.apply.delta_table import LakeTable
    from pgoutput_fast.apply.evolution import TableInCatalog
    from pgoutput_fast.apply.stored_changes import BatchConversion
    from pgoutput_fast.changelog.read_plan import Read, ReadPlan
    from pgoutput_fast.changelog.snapshot_states import Snapshot
    from pgoutput_fast.changelog.view import View

    from ._jobs import Jobs
    from ._layouts import TableLayout

_TASK_BYTES = 256 << 20
"""Bytes of segments for one task. A window with more bytes per core has more tasks than cores."""
_TABLE_BYTES = 1 << 20
"""Added to the size of each file of changes, in bytes: a commit takes as long as so many bytes."""


class _RunFile(NamedTuple):
    """A file of changes. Fields: table (its change table), file, schema (of its changes)."""

    table: LakeTable
    file: AddedFile
    schema: pa.Schema

    def committed(self) -> FoldedFile:
        """Return the file for a fold, after the change table has committed it."""
        return FoldedFile(self.table.committed(self.file), self.file.size, self.schema)


class _Section(NamedTuple):
    """The changes of one table in one section of a window.

    Fields: write (for the executors); changes and state (the tables' writers); folded (the files to
    fold, which `take` adds to). `state` is None but for a snapshot, `folded` is None if nothing is
    to be folded.
    """

    write: TableWrite
    changes: Any
    state: Any
    folded: list[_RunFile] | None


class TableOfFiles(TableWindow):
    """A table in a window whose changes executors write to files.

    First all sections of the window are planned, in order. Then their files are taken.
    """

    _target: DeltaTarget

    def __init__(
        self, target: DeltaTarget, table_state: TableState, *arguments: Any, **options: Any
    ) -> None:
        super().__init__(target, table_state, *arguments, **options)
        self._before = table_state
        self._files: list[list[_RunFile]] = []
        self._has_copied = False

    def plan_changes(
        self, schema: pa.Schema, layout: TableLayout, catalog_at: Callable[[int], TableInCatalog]
    ) -> _Section:
        """Plan how to write changes of the stream.

        Raises
        ------
        UnplannedError
            The target has some of the changes already.
        """
        writer: Any = self._writer
        state_lsn = layout.first_lsn if self._state is None else self._state.lsn
        if layout.first_lsn < max(self.table_state.lsn, writer.lsn, state_lsn):
            raise self._partly()
        _, conversion = self._meet(schema, layout.first_lsn, catalog_at)
        folded = None
        if self._state is not None and self._parts:
            self._files += [[] for _ in range(len(self._parts) - len(self._files))]
            folded = self._files[-1]
            self._folded = layout.last_lsn
        return self._section(schema, conversion, folded=folded)

    def plan_snapshot(
        self, schema: pa.Schema, catalog_at: Callable[[int], TableInCatalog], snapshot: Snapshot
    ) -> _Section:
        """Plan how to write the rows of a snapshot.

        Raises
        ------
        UnplannedError
            The target has the snapshot already, or the window has another one of the table.
        """
        self._files = []
        plan = self._snapshot = self._begin_snapshot(schema, catalog_at(snapshot.lsn), snapshot)
        needs = self._copies_changes, plan.needs_rows
        if needs != (True, self._rules.has_state) or self._has_copied:
            raise self._partly()
        self._has_copied = True
        return self._section(schema, plan.conversion, state=self._state)

    def _section(
        self,
        schema: pa.Schema,
        conversion: BatchConversion,
        state: Any = None,
        folded: list[_RunFile] | None = None,
    ) -> _Section:
        changes: Any = self._writer
        rows = None
        if state is not None:
            rows = Destination(state.table.directory, state.loading, tuple(state.partition_by))
        columns = changes.add_columns(conversion.schema)
        write = TableWrite(schema, conversion, Destination(changes.table.directory, columns), rows)
        return _Section(write, changes, state, folded)

    def _partly(self) -> UnplannedError:
        name = qualified(self.table_state)
        return UnplannedError(f"the target has changes of {name} already", table=name)

    def _commit_snapshot(self) -> None:
        """See `TableWindow`; `load_snapshot` commits, once the files are there."""
        self._before = self.table_state

    def take(self, section: _Section, run: FileRun) -> None:
        """Take the files of a section."""
        section.changes.add_files(run.changes)
        self.changes += run.rows
        self.table_state = self.table_state._replace(commit_time=run.commit_time)
        if section.folded is not None:
            table, schema = section.changes.table, section.write.conversion.schema
            section.folded.extend(_RunFile(table, file, schema) for file in run.changes)
        if run.state:
            section.state.add_files(run.state)

    def load_snapshot(self, section: _Section) -> None:
        """Commit the state table at a snapshot whose files were taken."""
        if section.state is not None:
            section.state.loaded(self._before._replace(commit_time=self.table_state.commit_time))

    def fold_task(self, lsn: int) -> FoldTask | None:
        """Return the task that applies the net changes to the state table; None: nothing to do.

        Parameters
        ----------
        lsn : int
            The end of the window: all its changes have a smaller commit LSN.
        """
        state: Any = self._state
        if state is None:
            return None
        first = self._first if self._is_new else None
        if not self._parts and first is None:
            return None
        ends = [*(part.begins for part in self._parts), lsn][1:]
        files = self._files + [[] for _ in range(len(self._parts) - len(self._files))]
        parts = [
            FoldedPart(
                part.alterations,
                part.key,
                end,
                part.schema,
                [run_file.committed() for run_file in of],
            )
            for part, end, of in zip(self._parts, ends, files, strict=True)
            if part.alterations or of
        ]
        if first is None and not parts:
            return None
        state.is_written_by_executor = True
        return FoldTask(self._before, self.table_state, first, parts)

    def folded(self, position: tuple[int, int]) -> None:
        """Record the LSN and the snapshot LSN of the state table after its task."""
        state: Any = self._state
        state.own = position

    def merge(self, jobs: Jobs, left: LeftMerge) -> None:
        """Do the merge that a task has left to the driver."""
        state: Any = self._state
        state.table.load()  # a task may have written the table
        # The task has found that the merge is large: share every step, from 0 bytes on.
        state.steps = functools.partial(spark_steps, jobs, 0, left.net)
        net = opened_net(self._target.place, left.net)
        state.apply(left.alterations, net, left.table_state)
        state.is_written_by_executor = (
            False  # the driver wrote the table: it also joins its small files
        )

    def fail(self, error: IncompleteError) -> None:
        """Mark the table as stale, because changes do not fit the rows of its state table.

        Raises
        ------
        IncompleteError
            `error`, if a table must not become stale.
        """
        self._make_stale_by(error)


class DistributedWindow(WindowWriter):
    """Writes a window with Spark's executors.

    Parameters
    ----------
    jobs : Jobs
    given
        The arguments of `WindowWriter`.
    stages : bool
        Whether to copy segments into the target's storage, because executors can't read the change
        log.
    shared_bytes : int, optional
        If a merge may rewrite at least this many bytes of files, all executors share it. By
        default, one task does each merge.
    """

    _table_window = TableOfFiles
    _target: DeltaTarget

    def __init__(
        self, jobs: Jobs, *arguments: Any, stages: bool = False, shared_bytes: int | None = None
    ) -> None:
        super().__init__(*arguments)
        self._jobs = jobs
        self._stages = stages
        self._shared_bytes = shared_bytes

    # --- the first job: files --------------------------------------------------------------------

    def _take_all(self, view: View, plan: ReadPlan) -> None:
        planned = self._plan_sections(plan)
        tasks = self._write_tasks(view, plan, planned)
        with contextlib.ExitStack() as resources:
            if self._stages:
                place = self._target.place
                prefix = resources.enter_context(
                    staged(place, self._directory.absolute(), plan.reads)
                )
                tasks = [task._replace(staged=prefix) for task in tasks]
            results = self._jobs.run("decode and write changes", write_window, tasks, self._tell)
        # Those of one section stay in the order of the stream.
        runs = deque(
            sorted((run for result in results for run in result), key=lambda run: run.key[0])
        )
        try:
            self._take_runs(plan, planned, runs)
        except BaseException:
            # These runs have no table yet. Tables discard the files of their runs themselves.
            for run in runs:
                delete_run(tasks[0], run)
            raise

    def _plan_sections(self, plan: ReadPlan) -> dict[tuple[int, int], _Section]:
        """Plan how to write each table in each section of the window, by number and relation id."""
        plans: dict[tuple[int, int], _Section] = {}
        for number, (snapshot, reads) in enumerate(sections(plan)):
            for relation_id, layout in table_layouts(reads).items():
                decoded = self._decoded(layout)
                if decoded is None:
                    continue  # not one of the tables to sync
                schema, relation = decoded
                window: Any = self._table(relation, layout.first_lsn, snapshot)
                catalog_at = functools.partial(self._known, relation)
                if snapshot is None:
                    plans[number, relation_id] = window.plan_changes(schema, layout, catalog_at)
                else:
                    plans[number, relation_id] = window.plan_snapshot(schema, catalog_at, snapshot)
            self._end_snapshot(snapshot)
            self._tell()
        return plans

    def _decoded(self, layout: TableLayout) -> tuple[pa.Schema, Any] | None:
        """Return the schema of decoded changes and their Relation; None for an unwanted table."""
        self._go_to(layout.first_lsn)
        relation: Any = decode_rare(layout.relation, in_stream=False, encoding="latin-1")
        nothing = [None] * len(relation.columns)
        row = encode_fields("I", relation_id=relation.relation_id, new=nothing)
        decoder = ColumnarDecoder(**{**self._decoding, "encoding": layout.encoding})
        for changes in decoder.decode([*layout.types, layout.relation, row]):
            batch = target_batch(changes, pa.record_batch(changes), is_binary=layout.is_binary)
            return batch.schema, changes.relation
        return None

    def _take_runs(
        self,
        plan: ReadPlan,
        planned: Mapping[tuple[int, int], _Section],
        runs: deque[FileRun],
    ) -> None:
        """Give all runs to their tables. A run leaves `runs` when its table has it."""
        for number, (snapshot, _) in enumerate(sections(plan)):
            while runs and runs[0].key[0] == number:
                window: Any = self._open[runs[0].key[1]]
                window.take(planned[runs[0].key], runs[0])
                runs.popleft()
            if snapshot is not None and (number, snapshot.relation_id) in planned:
                window = self._open[snapshot.relation_id]
                window.load_snapshot(planned[number, snapshot.relation_id])
            self._tell()

    def _write_tasks(
        self, view: View, plan: ReadPlan, planned: Mapping[tuple[int, int], _Section]
    ) -> list[WriteTask]:
        target, options = self._target, self._options
        decoding = {name: value for name, value in self._decoding.items() if name != "registry"}
        arguments = target.arguments
        tables = {key: section.write for key, section in planned.items()}
        reads = [(number, read) for number, (_, some) in enumerate(sections(plan)) for read in some]
        return [
            WriteTask(
                group, view.metadata, str(self._directory.absolute()), decoding, options.history,
                arguments["uri"], arguments["storage_options"], arguments["retention_hours"],
                tables, target.change_tables,
            )
            for group in grouped(reads, self._jobs.cores)
        ]  # fmt: skip

    def _known(self, relation: Any, lsn: int) -> TableInCatalog:
        """See `WindowWriter`.

        The driver decodes no frames: it takes the types in force from the schema history.
        """
        self._go_to(lsn)
        return super()._known(relation, lsn)

    def _go_to(self, lsn: int) -> None:
        if self._reader.follower is not None:
            self._reader.follower.go_to(lsn)

    # --- the second job: state tables ------------------------------------------------------------

    def _finish_all(self, ends: dict[int, int]) -> None:
        windows: dict[int, Any] = {**self._open}
        # Tables without a fold task take no more time.
        self.seconds.update({qualified(window.table_state): 0.0 for window in self._open.values()})
        tables = [
            task for relation_id, end in ends.items()
            if (task := windows[relation_id].fold_task(end)) is not None
        ]  # fmt: skip
        if not tables:
            return
        with contextlib.ExitStack() as resources:
            place = None
            if self._shared_bytes is not None:
                prefix = resources.enter_context(staging(self._target.place))
                place = Staging(prefix, self._shared_bytes)
            sizes = [sum(_TABLE_BYTES + file.size for part in window.parts for file in part.files)
                     for window in tables]  # fmt: skip
            tasks = [
                FoldTasks(group, self._target.arguments, self._target.origin, place)
                for group in balanced(tables, sizes, self._jobs.cores)
            ]
            action = "fold changes into state tables"
            results = self._jobs.run(action, fold_tables, tasks, self._tell)
            done = [folded for result in results for folded in result]
            for folded in done:
                self._note(windows[folded.relation_id], folded)
            left = [
                (windows[folded.relation_id], folded.left)
                for folded in done
                if folded.left is not None
            ]
            run_all(self._target.threads, self._merge, left, self._tell)

    def _note(self, window: TableOfFiles, folded: Folded) -> None:
        self.seconds[qualified(window.table_state)] = folded.seconds
        window.folded(folded.position)
        if folded.incomplete is not None:
            window.fail(folded.incomplete)

    def _merge(self, window: TableOfFiles, left: LeftMerge) -> None:
        begin = time.perf_counter()
        try:
            window.merge(self._jobs, left)
        except IncompleteError as error:
            window.fail(error)
            return
        self.seconds[qualified(window.table_state)] += time.perf_counter() - begin


def grouped(reads: Sequence[tuple[int, Read]], cores: int) -> list[list[tuple[int, Read]]]:
    """Divide numbered reads, in their order, into groups of about the same size."""
    total = sum(read.size for _, read in reads)
    count = min(len(reads), max(cores, -(-total // _TASK_BYTES)))
    groups: list[list[tuple[int, Read]]] = []
    done = 0
    for number, read in reads:
        # A read belongs to the group in which its middle lies.
        at = min(count - 1, (done + read.size // 2) * count // max(1, total))
        if not groups or (at >= len(groups) and groups[-1]):
            groups.append([])
        groups[-1].append((number, read))
        done += read.size
    return groups


def checked_target(target: Any) -> DeltaTarget:
    """Return a target that executors can write.

    Raises
    ------
    PgOutputError
        ``bad_option``: the target does not keep Delta tables, or has no change tables.
    """
    if not isinstance(target, DeltaTarget):
        raise PgOutputError(
            f"{target!r} has no Delta tables, and Spark's engine writes only Delta tables",
            code="bad_option",
            parameter="target",
            hint="Give a directory or a URL for Delta tables",
        )
    if not target.remembered.has_changes:
        raise PgOutputError(
            "Spark's engine makes state tables from change tables, and this target has no change "
            "tables",
            code="bad_option",
            parameter="keep",
            hint=("Leave out ", Argument("engine")),
        )
    return target
