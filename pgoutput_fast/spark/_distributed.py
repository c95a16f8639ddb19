"""A window of a sync that Spark's executors write; the driver registers what they have written."""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

from pgoutput_fast.apply.delta_merge import balanced
from pgoutput_fast.apply.delta_target import DeltaTarget
from pgoutput_fast.apply.table_window import TableWindow
from pgoutput_fast.apply.targets import Held, IncompleteError, NotForeseenError
from pgoutput_fast.apply.window_writer import WindowWriter, run_all
from pgoutput_fast.errors import Argument, PgOutputError
from pgoutput_fast.names import qualified

from ._folds import Folded, FoldedFile, FoldedPart, FoldTask, FoldTasks, LeftMerge, fold_tables
from ._merge_steps import Staging, opened_net, spark_steps
from ._staged_files import staged, staging
from ._window_files import Expected, FileRun, WriteTask, delete_run, write_window

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import pyarrow as pa

    from pgoutput_fast.apply.delta_files import AddedFile
    from pgoutput_fast.apply.delta_table import LakeTable
    from pgoutput_fast.apply.evolution import Known
    from pgoutput_fast.changelog.copies import Copy
    from pgoutput_fast.changelog.read_plan import Read, ReadPlan
    from pgoutput_fast.changelog.view import View

    from ._jobs import Jobs

_TASK_BYTES = 256 << 20
"""Of segments: larger windows have more tasks than there are cores."""
_TABLE_BYTES = 1 << 20
"""Of changes, which take as long as a commit."""


class _RunFile(NamedTuple):
    """A file of a run. Fields: table (which has it), file, form (of the run)."""

    table: LakeTable
    file: AddedFile
    form: pa.Schema

    def committed(self) -> FoldedFile:
        """What is told of it, once the table's commit has it."""
        return FoldedFile(self.table.committed(self.file), self.file.size, self.form)


class TableOfFiles(TableWindow):
    """A table in a window whose changes are in files that executors have written."""

    _target: DeltaTarget

    def __init__(self, target: DeltaTarget, held: Held, **options: Any) -> None:
        super().__init__(target, held, **options)
        self._before = held
        self._files: list[list[_RunFile]] = []

    def add_run(self, run: FileRun, known: Callable[[int], Known]) -> None:
        """Take changes of the stream.

        Raises
        ------
        NotForeseenError
            Executors took the table to be another one than it is.
        """
        if run.last_lsn < self.held.lsn or not run.rows:
            raise NotForeseenError(f"the target has changes of {qualified(self.held)} already")
        last = self._last
        if last is None or not last[0].equals(run.schema, check_metadata=True):
            last = self._meet(run.schema, run.first_lsn, known)
        self._register(run, last[1].schema)
        if self._state is None or not self._parts:
            return
        if run.first_lsn < self._state.lsn:
            raise NotForeseenError(f"the target has changes of {qualified(self.held)} already")
        self._files += [[] for _ in range(len(self._parts) - len(self._files))]
        writer: Any = self._writers[-1]
        self._files[-1] += [_RunFile(writer.table, one, run.form) for one in run.changes.files]
        self._folded = run.last_lsn

    def _register(self, run: FileRun, form: pa.Schema) -> None:
        """Have the files be the change table's, when that is committed."""
        writer: Any = self._writers[-1]
        if writer.table.directory != run.changes.directory:
            raise NotForeseenError(
                f"{qualified(self.held)} is in {writer.table.directory}, and executors wrote to "
                f"{run.changes.directory}"
            )
        if not form.equals(run.form, check_metadata=True):
            raise NotForeseenError(
                f"{qualified(self.held)} has other columns than the files of the executors"
            )
        if run.first_lsn < writer.lsn:
            raise NotForeseenError(f"the target has changes of {qualified(self.held)} already")
        writer.add_files(run.changes.schema, run.changes.files)
        self.changes += run.rows
        self.held = self.held._replace(commit_time=run.commit_time)

    def add_copied_run(self, run: FileRun, known: Callable[[int], Known], copy: Copy) -> None:
        """Take rows of a snapshot; the first run begins with a Truncate."""
        if self._copying is None:
            self._copying = self._begin_copy(run.schema, known(copy.lsn), copy)
        wants_changes, wants_rows = self._copying
        has_rows = wants_rows and run.state is not None
        if not wants_changes or has_rows != self._target.kept.has_state:
            raise NotForeseenError(f"the target has a snapshot of {qualified(self.held)} already")
        last = self._last
        if last is None or not last[0].equals(run.schema, check_metadata=True):
            last = self._last = self._layout(run.schema, self.held.columns)
        self._register(run, last[1].schema)
        state: Any = self._state
        if run.state is not None and run.state.files:
            if state.table.directory != run.state.directory:
                raise NotForeseenError(
                    f"{qualified(self.held)} is in {state.table.directory}, and executors wrote to "
                    f"{run.state.directory}"
                )
            state.add_files(run.state.schema, run.state.partition_by, run.state.files)

    def _begin_copy(self, schema: pa.Schema, known: Known, copy: Copy) -> tuple[bool, bool]:
        self._files = []
        return super()._begin_copy(schema, known, copy)

    def end_copy(self, copy: Copy) -> None:
        """The rows of a snapshot came."""
        super().end_copy(copy)
        self._before = self.held

    def fold_task(self, lsn: int) -> FoldTask | None:
        """What is to be done to the state table; None: nothing."""
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
                part.alterations, part.key, end, part.schema, [one.committed() for one in of]
            )
            for part, end, of in zip(self._parts, ends, files, strict=True)
            if part.alterations or of
        ]
        if first is None and not parts:
            return None
        state.is_elsewhere = True
        return FoldTask(self._before, self.held, first, parts)

    def folded(self, position: tuple[int, int]) -> None:
        """See how far a task has brought its state table."""
        state: Any = self._state
        state.own = position

    def merge(self, jobs: Jobs, left: LeftMerge) -> None:
        """Merge what a task has left."""
        state: Any = self._state
        state.table.load()  # which a task has written
        # Every step is shared that has as much as the task found.
        state.steps = functools.partial(spark_steps, jobs, 0, left.net)
        net = opened_net(self._target.place, left.net)
        state.apply(left.alterations, net, left.held)
        state.is_elsewhere = False  # nobody else has its small files joined

    def fail(self, error: IncompleteError) -> None:
        """Say that its changes do not fit what its state table has."""
        self._stop_by(error)


class DistributedWindow(WindowWriter):
    """What is written together, by Spark's executors.

    Parameters
    ----------
    jobs : Jobs
    given
        As of `WindowWriter`.
    stages : bool
        Whether executors do not see the directory of the segments.
    shared_bytes : int, optional
        From so many bytes of files on, all executors share the merge of a table; by default none.
    """

    _table_window = TableOfFiles
    _target: DeltaTarget

    def __init__(
        self, jobs: Jobs, *given: Any, stages: bool = False, shared_bytes: int | None = None
    ) -> None:
        super().__init__(*given)
        self._jobs = jobs
        self._stages = stages
        self._shared_bytes = shared_bytes

    # --- the first job: files --------------------------------------------------------------------

    def _take_all(self, view: View, plan: ReadPlan) -> None:
        tasks = self._write_tasks(view, plan)
        with contextlib.ExitStack() as held:
            if self._stages:
                place = self._target.place
                prefix = held.enter_context(staged(place, self._directory.absolute(), plan.reads))
                tasks = [task._replace(staged=prefix) for task in tasks]
            found = self._jobs.run("decode and write changes", write_window, tasks, self._tell)
        runs = deque(run for one in found for run in one)
        try:
            self._take_runs(plan, runs)
        except BaseException:
            # Of the others the tables know what stands already.
            for run in runs:
                delete_run(tasks[0], run)
            raise

    def _take_runs(self, plan: ReadPlan, runs: deque[FileRun]) -> None:
        """Give all runs to their tables; a run is there until its table has it."""
        first = 0
        for copy, reads in itertools.groupby(plan.reads, lambda read: read.snapshot):
            first += sum(1 for _ in reads)
            while runs and (run := runs[0]).read < first:
                one: Any = self._table(run.relation, run.first_lsn)
                known = functools.partial(self._known, run.relation)
                if copy is None:
                    one.add_run(run, known)
                else:
                    one.add_copied_run(run, known, copy)
                runs.popleft()
            self._end_copy(copy)
            self._tell()

    def _write_tasks(self, view: View, plan: ReadPlan) -> list[WriteTask]:
        target, options = self._target, self._options
        decoding = {name: value for name, value in self._decoding.items() if name != "registry"}
        arguments = target.arguments
        tables = self._tables_expected(plan)
        return [
            WriteTask(
                reads, view.metadata, str(self._directory.absolute()), decoding, options.history,
                arguments["uri"], arguments["storage_options"], arguments["retention_hours"],
                target.kept.soft_deletes, arguments["partition_by"], tables,
                target.change_tables, target.kept.has_state,
            )
            for reads in grouped(plan.reads, self._jobs.cores)
        ]  # fmt: skip

    def _tables_expected(self, plan: ReadPlan) -> dict[int, Expected]:
        """What each table is taken to be."""
        copied = {read.snapshot.relation_id for read in plan.reads if read.snapshot is not None}

        def expected(held: Held) -> Expected:
            with_state = self._target.kept.has_state and held.relation_id in copied
            schema, partition_by = self._target.seen(held, with_state=with_state)
            return Expected(held.stored, held.version, held.columns, schema, partition_by)

        with ThreadPoolExecutor(self._target.threads) as pool:
            return dict(zip(self._held, pool.map(expected, self._held.values()), strict=True))

    def _known(self, relation: Any, lsn: int) -> Known:
        """See `WindowWriter`; no frame that was read here has told the types of that time."""
        if self._reader.follower is not None:
            self._reader.follower.go_to(lsn)
        return super()._known(relation, lsn)

    # --- the second job: state tables ------------------------------------------------------------

    def _finish_all(self, ends: dict[int, int]) -> None:
        windows: dict[int, Any] = {**self._open}
        # Of tables that need no fold nothing is left to be done.
        self.seconds.update({qualified(one.held): 0.0 for one in self._open.values()})
        tables = [
            task for relation_id, end in ends.items()
            if (task := windows[relation_id].fold_task(end)) is not None
        ]  # fmt: skip
        if not tables:
            return
        with contextlib.ExitStack() as held:
            place = None
            if self._shared_bytes is not None:
                prefix = held.enter_context(staging(self._target.place))
                place = Staging(prefix, self._shared_bytes)
            sizes = [sum(_TABLE_BYTES + file.size for part in one.parts for file in part.files)
                     for one in tables]  # fmt: skip
            tasks = [
                FoldTasks(group, self._target.arguments, self._target.origin, place)
                for group in balanced(tables, sizes, self._jobs.cores)
            ]
            what = "fold changes into state tables"
            found = self._jobs.run(what, fold_tables, tasks, self._tell)
            done = [folded for result in found for folded in result]
            for folded in done:
                self._note(windows[folded.relation_id], folded)
            left = [
                (windows[folded.relation_id], folded.left)
                for folded in done
                if folded.left is not None
            ]
            run_all(self._target.threads, self._merge, left, self._tell)

    def _note(self, one: TableOfFiles, folded: Folded) -> None:
        self.seconds[qualified(one.held)] = folded.seconds
        one.folded(folded.position)
        if folded.incomplete is not None:
            one.fail(folded.incomplete)

    def _merge(self, one: TableOfFiles, left: LeftMerge) -> None:
        begin = time.perf_counter()
        try:
            one.merge(self._jobs, left)
        except IncompleteError as error:
            one.fail(error)
            return
        self.seconds[qualified(one.held)] += time.perf_counter() - begin


def grouped(reads: Sequence[Read], cores: int) -> list[list[tuple[int, Read]]]:
    """Units with their numbers, in groups of about one size that follow each other."""
    total = sum(read.size for read in reads)
    count = min(len(reads), max(cores, -(-total // _TASK_BYTES)))
    groups: list[list[tuple[int, Read]]] = []
    done = 0
    for number, read in enumerate(reads):
        # The group in which the middle of the read is.
        at = min(count - 1, (done + read.size // 2) * count // max(1, total))
        if not groups or (at >= len(groups) and groups[-1]):
            groups.append([])
        groups[-1].append((number, read))
        done += read.size
    return groups


def checked_target(target: Any) -> DeltaTarget:
    """Refuse a target that executors can't write.

    Raises
    ------
    PgOutputError
        It is a DuckDB file, or has no change tables.
    """
    if not isinstance(target, DeltaTarget):
        raise PgOutputError(
            f"{target!r} has no Delta tables, and Spark's engine writes only Delta tables",
            code="bad_option",
            parameter="target",
            hint="Give a directory or a URL for Delta tables",
        )
    if not target.kept.has_changes:
        raise PgOutputError(
            "Spark's engine makes state tables from change tables, and this target has no change "
            "tables",
            code="bad_option",
            parameter="keep",
            hint=("Leave out ", Argument("engine")),
        )
    return target
