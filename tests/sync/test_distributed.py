"""Windows of a sync that are written by tasks: what happens when they are not as was foreseen."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.changelogs.made_directory import MadeDirectory, catalog_read
from support.expected_errors import expect_error
from support.targets.in_process import InProcessEngine, InProcessJobs
from support.targets.synced_tables import DeltaTables

from pgoutput_fast import apply, testing
from pgoutput_fast.apply import delta_target
from pgoutput_fast.apply.delta_place import DeltaPlace
from pgoutput_fast.apply.targets import ConflictError, IncompleteError, UnplannedError
from pgoutput_fast.apply.window_writer import WindowWriter
from pgoutput_fast.changelog.read_plan import Read
from pgoutput_fast.changelog.schema_history import HistoryWriter
from pgoutput_fast.errors import RetryableError
from pgoutput_fast.spark import _folds, _merge_steps
from pgoutput_fast.spark._distributed import DistributedWindow, TableOfFiles, grouped
from pgoutput_fast.spark._folds import Folded, fold_tables
from pgoutput_fast.spark._staged_files import STAGED, clear

pytest.importorskip("deltalake")

THINGS = testing.Table("things", {"id": "int4", "note": "text"}, 16390, key=["id"])
ROWS = [{"id": 1, "note": "a"}, {"id": 2, "note": "B"}, {"id": 3, "note": "c"}]


@pytest.fixture
def made(tmp_path: Path) -> Iterator[MadeDirectory]:
    with contextlib.closing(MadeDirectory(tmp_path / "segments")) as found:
        yield found


@pytest.fixture
def tables(made: MadeDirectory, tmp_path: Path) -> DeltaTables:
    """Two rows, and two changes that are not in the tables yet."""
    found = DeltaTables(tmp_path)
    made.wait(THINGS, 1000)
    made.copy(THINGS, 1100, [[1, "a"]])
    made.commit(1150, THINGS.relation(), testing.insert(THINGS, [2, "b"]))
    apply.sync(segments=made.directory, target=found.target, until="now")
    made.commit(1200, THINGS.relation(), testing.update(THINGS, [2, "B"]),
                testing.insert(THINGS, [3, "c"]))  # fmt: skip
    return found


def sync(
    made: MadeDirectory, tables: DeltaTables, engine: Any, **options: Any
) -> apply.SyncProgress:
    return apply.sync(
        segments=made.directory, target=tables.target, until="now", engine=engine, **options
    )


def rows(tables: DeltaTables) -> list[dict[str, Any]]:
    return sorted(tables.state("public.things").to_pylist(), key=lambda row: row["id"])


def changes(tables: DeltaTables) -> list[str]:
    found = tables.changes("public.things").to_pylist()
    return [row["op"] for row in sorted(found, key=lambda row: (row["commit_lsn"], row["seq"]))]


OPERATIONS = ["truncate", "read", "insert", "update", "insert"]


def test_a_task_that_goes_on_while_another_one_does_the_same(
    made: MadeDirectory, tables: DeltaTables, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both fold and write; one commits, the other one finds that nothing is left."""
    folded: list[list[Folded]] = []
    commits = []
    commit = delta_target.LakeTable.commit

    def late(self: Any, *given: Any, **more: Any) -> None:
        if self.directory.startswith("state") and not folded:
            folded.append([])  # it is not done a third time
            folded[0] = fold_tables(task)
        commits.append(self.directory)
        commit(self, *given, **more)

    fold = fold_tables

    def seen(tasks: Any) -> list[Folded]:
        nonlocal task
        task = tasks
        return fold(tasks)

    task: Any = None
    monkeypatch.setattr(delta_target.LakeTable, "commit", late)
    monkeypatch.setattr("pgoutput_fast.spark._distributed.fold_tables", seen)
    ended = sync(made, tables, InProcessEngine())
    assert (ended.stale, ended.changes) == ({}, 2)
    assert [one.incomplete for one in folded[0]] == [None]
    # The first attempt of the second task was refused by Delta's log.
    assert commits.count("state/public.things") == 2
    assert (rows(tables), changes(tables)) == (ROWS, OPERATIONS)


def test_times_of_folds_come_from_their_tasks(
    made: MadeDirectory, tables: DeltaTables, monkeypatch: pytest.MonkeyPatch
) -> None:
    fold = _folds._fold_once
    monkeypatch.setattr(_folds, "_fold_once", lambda *given: fold(*given)._replace(seconds=7.5))
    other = testing.Table("copied", {"id": "int4"}, 16391, key=["id"])
    made.wait(other, 1220)
    made.copy(other, 1230, [[1]])
    made.commit(1250, THINGS.relation(), testing.update(THINGS, [2, "C"]))
    ended = sync(made, tables, InProcessEngine())
    # A table that was copied, and not changed, needs no fold.
    assert ended.seconds == {"public.things": 7.5, "public.copied": 0.0}
    assert ended.tables == {"public.things": 3, "public.copied": 1}


def test_a_table_that_others_write_all_the_time(
    made: MadeDirectory, tables: DeltaTables, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That passes, once tasks of a sync that was killed have ended: the next call goes on."""
    attempts = []
    commit = delta_target.LakeTable.commit

    def refused(self: Any, *given: Any, **more: Any) -> None:
        if self.directory.startswith("state"):
            attempts.append(self.directory)
            raise ConflictError("another program has written it")
        commit(self, *given, **more)

    with monkeypatch.context() as patch:
        patch.setattr(delta_target.LakeTable, "commit", refused)
        with expect_error(RetryableError, code="conflict"):
            sync(made, tables, InProcessEngine())
    assert len(attempts) == _folds._ATTEMPTS
    assert changes(tables) == OPERATIONS
    assert rows(tables) == [{"id": 1, "note": "a"}, {"id": 2, "note": "b"}]
    sync(made, tables, InProcessEngine())
    assert (rows(tables), changes(tables)) == (ROWS, OPERATIONS)


def test_a_window_that_the_driver_has_to_write(
    made: MadeDirectory, tables: DeltaTables, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """The change table has the changes already, as a call was killed behind its commit."""
    caplog.set_level("INFO")

    def killed(self: Any, ends: Any) -> None:
        raise KeyboardInterrupt

    engine = InProcessEngine()
    with monkeypatch.context() as patch:
        patch.setattr(DistributedWindow, "_finish_all", killed)
        with pytest.raises(KeyboardInterrupt):
            sync(made, tables, engine)
    assert changes(tables) == OPERATIONS
    files = sorted(tables.path.glob("*/public.things/*.parquet"))
    made.commit(1300, THINGS.relation(), testing.delete(THINGS, [1, None], "K"))
    ended = sync(made, tables, engine)
    assert (ended.changes, ended.windows) == (1, 1)
    assert "so this process writes it: the target has changes" in caplog.text
    assert (rows(tables), changes(tables)) == (ROWS[1:], [*OPERATIONS, "delete"])
    # Nothing is left of what the tasks have written for it.
    assert len({*tables.path.glob("*/public.things/*.parquet")} - {*files}) == 2


def test_a_snapshot_that_stands_when_the_driver_has_to_write_the_rest(
    made: MadeDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = DeltaTables(tmp_path)
    made.wait(THINGS, 1000)
    made.copy(THINGS, 1100, [[1, "a"], [2, "b"]])
    made.commit(1200, THINGS.relation(), testing.update(THINGS, [2, "B"]),
                testing.insert(THINGS, [3, "c"]))  # fmt: skip
    stood = []

    take = TableOfFiles.take

    def refused(self: Any, section: Any, run: Any) -> None:
        if section.state is not None:
            take(self, section, run)
            return
        stood.append(rows(tables))
        raise UnplannedError("it is another table")

    monkeypatch.setattr(TableOfFiles, "take", refused)
    sync(made, tables, InProcessEngine())
    assert stood == [[{"id": 1, "note": "a"}, {"id": 2, "note": "b"}]]
    assert (rows(tables), changes(tables)) == (
        ROWS, ["truncate", "read", "read", "update", "insert"]
    )  # fmt: skip


def test_a_snapshot_that_stands_when_the_driver_has_to_rename_a_column(
    made: MadeDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table of rows is at the snapshot, so it has the columns of that, and no later ones."""
    tables = DeltaTables(tmp_path)
    renamed = testing.Table("things", {"id": "int4", "text": "text"}, 16390, key=["id"])
    history = HistoryWriter(made.directory, None)
    made.wait(THINGS, 1000)
    made.copy(THINGS, 1100, [[1, "a"], [2, "b"]])
    history.note(catalog_read(900, THINGS))
    made.commit(1200, renamed.relation(), testing.update(renamed, [2, "B"]))
    history.note(catalog_read(1300, renamed))

    take = TableOfFiles.take

    def refused(self: Any, section: Any, run: Any) -> None:
        if section.state is not None:
            take(self, section, run)
            return
        assert rows(tables) == [{"id": 1, "note": "a"}, {"id": 2, "note": "b"}]
        raise UnplannedError("it is another table")

    monkeypatch.setattr(TableOfFiles, "take", refused)
    ended = apply.sync(
        segments=made.directory, target=tables.target, until="now", engine=InProcessEngine(),
        on_error="stop",
    )  # fmt: skip
    assert ended.stale == {}
    assert rows(tables) == [{"id": 1, "text": "a"}, {"id": 2, "text": "B"}]


def renamed_column(made: MadeDirectory) -> testing.Table:
    """Commit a change of the renamed column `note`; the catalogue is read before and after."""
    renamed = testing.Table("things", {"id": "int4", "text": "text"}, 16390, key=["id"])
    history = HistoryWriter(made.directory, None)
    history.note(catalog_read(900, THINGS))
    made.commit(1300, renamed.relation(), testing.update(renamed, [2, "bb"]))
    history.note(catalog_read(1300, renamed))
    return renamed


def test_a_window_ends_before_a_layout_change(made: MadeDirectory, tables: DeltaTables) -> None:
    renamed = renamed_column(made)
    engine = InProcessEngine()
    ended = sync(made, tables, engine)
    assert (ended.stale, ended.changes, ended.windows, len(engine.windows)) == ({}, 3, 2, 2)
    assert rows(tables) == [
        {"id": 1, "text": "a"}, {"id": 2, "text": "bb"}, {"id": 3, "text": "c"}
    ]  # fmt: skip
    assert changes(tables) == [*OPERATIONS, "update"]
    # Changes of one layout are one window.
    made.commit(1400, renamed.relation(), testing.delete(renamed, [1, None], "K"))
    made.commit(1500, renamed.relation(), testing.delete(renamed, [3, None], "K"))
    assert sync(made, tables, engine).windows == 1
    assert rows(tables) == [{"id": 2, "text": "bb"}]


def test_the_driver_writes_a_transaction_with_a_layout_change(
    made: MadeDirectory, tables: DeltaTables
) -> None:
    longer = testing.Table("things", {"id": "int8", "note": "text"}, 16390, key=["id"])
    made.commit(1300, THINGS.relation(), testing.insert(THINGS, [4, "d"]),
                longer.relation(), testing.insert(longer, [5, "e"]))  # fmt: skip
    engine = InProcessEngine()
    ended = sync(made, tables, engine)
    assert (ended.changes, ended.windows, len(engine.windows)) == (4, 2, 1)
    assert list(ended.stale) == ["public.things"]  # its rows were rewritten
    assert changes(tables) == [*OPERATIONS, "insert"]
    assert [row["op"] for row in tables.changes("public.things", 2).to_pylist()] == ["insert"]


class _Elsewhere(InProcessJobs):
    """Tasks on machines that do not see the directory of the segments."""

    def __init__(self, directory: Path) -> None:
        super().__init__(twice=True)
        self._directory = directory
        self.staged: list[list[str]] = []

    def run(self, action: str, function: Any, tasks: Any, tell: Any) -> list[Any]:
        hidden = self._directory.with_name("hidden")
        self._directory.rename(hidden)
        try:
            for task in tasks:
                if (prefix := getattr(task, "staged", None)) is not None:
                    root = Path(task.uri) / prefix
                    found = (str(one.relative_to(root)) for one in root.rglob("*.*"))
                    self.staged.append(sorted(found))
            return super().run(action, function, tasks, tell)
        finally:
            hidden.rename(self._directory)


def test_executors_that_do_not_see_the_segments(made: MadeDirectory, tmp_path: Path) -> None:
    """The same tables come of it, by the history of types too; nothing is left in the target."""
    tables = DeltaTables(tmp_path)
    made.wait(THINGS, 1000)
    made.copy(THINGS, 1100, [[1, "a"]])
    made.commit(1150, THINGS.relation(), testing.insert(THINGS, [2, "b"]))
    engine = InProcessEngine(stages=True)
    engine.jobs = jobs = _Elsewhere(made.directory)
    sync(made, tables, engine)
    assert not list((Path(tables.target) / STAGED).rglob("*.*"))
    made.commit(1200, THINGS.relation(), testing.update(THINGS, [2, "B"]),
                testing.insert(THINGS, [3, "c"]))  # fmt: skip
    sync(made, tables, engine)
    assert not list((Path(tables.target) / STAGED).rglob("*.*"))
    assert rows(tables) == ROWS
    assert changes(tables) == OPERATIONS
    assert any(name.startswith("snapshots/") for names in jobs.staged for name in names)
    # Without, they would need the directory.
    made.commit(1300, THINGS.relation(), testing.insert(THINGS, [4, "d"]))
    engine = InProcessEngine()
    engine.jobs = jobs
    with expect_error(code="missing_path"):
        sync(made, tables, engine, on_error="stop")


def test_a_refused_frame_is_named_as_the_driver_has_it(
    made: MadeDirectory, tables: DeltaTables
) -> None:
    made.commit(1300, THINGS.relation(), testing.insert(THINGS, ["no number", "d"]))
    with expect_error(code="bad_value", column="id"):
        sync(made, tables, InProcessEngine(stages=True), on_error="stop")
    assert not list((Path(tables.target) / STAGED).rglob("*.*"))


def test_what_a_killed_driver_has_staged_is_deleted(tmp_path: Path) -> None:
    place = DeltaPlace(str(tmp_path))
    left = tmp_path / STAGED / ("a" * 32) / "history"
    left.mkdir(parents=True)
    (left / "seen.json").touch()
    (tmp_path / "changes").mkdir()
    clear(place)
    clear(place)
    assert [one.name for one in tmp_path.iterdir()] == ["changes"]


# --- merges that all tasks share -----------------------------------------------------------------


def staged(tables: DeltaTables) -> list[Path]:
    return [*(Path(tables.target) / STAGED).rglob("*.*")]


def names(engine: InProcessEngine) -> list[str]:
    """The tasks of an engine, in their order."""
    return [type(task).__name__ for task in engine.jobs.tasks]


def test_a_merge_that_all_tasks_share(made: MadeDirectory, tables: DeltaTables) -> None:
    engine = InProcessEngine(twice=True, shared_bytes=1)
    ended = sync(made, tables, engine)
    assert (ended.stale, ended.changes) == ({}, 2)
    assert names(engine) == ["WriteTask", "FoldTasks", "FindTask", "RewriteTask"]
    assert (rows(tables), changes(tables)) == (ROWS, OPERATIONS)
    assert staged(tables) == []
    # A small table is merged by the task that folds it.
    engine = InProcessEngine(shared_bytes=1 << 30)
    made.commit(1300, THINGS.relation(), testing.delete(THINGS, [1, None], "K"))
    sync(made, tables, engine)
    assert names(engine) == ["WriteTask", "FoldTasks"]
    assert rows(tables) == ROWS[1:]


def test_the_driver_has_the_merge_of_its_own_window_shared(
    made: MadeDirectory, tables: DeltaTables
) -> None:
    class Driver(InProcessEngine):
        def writer(self, plan: Any, *given: Any) -> WindowWriter:
            return WindowWriter(*given)

    engine = Driver(shared_bytes=1)
    sync(made, tables, engine)
    assert names(engine) == ["FindTask", "RewriteTask"]
    assert (rows(tables), staged(tables)) == (ROWS, [])


@pytest.mark.parametrize("task", ["find_hits", "rewrite_files"])
def test_a_step_of_a_merge_that_fails(
    made: MadeDirectory, tables: DeltaTables, monkeypatch: pytest.MonkeyPatch, task: str
) -> None:
    def refused(_: Any) -> Any:
        raise RetryableError("the storage does not answer", code="io_failed")

    before = rows(tables)
    with monkeypatch.context() as patch:
        patch.setattr(_merge_steps, task, refused)
        with expect_error(RetryableError, code="io_failed"):
            sync(made, tables, InProcessEngine(shared_bytes=1))
    assert (rows(tables), staged(tables)) == (before, [])
    # The change table is ahead then, so this process writes the window.
    sync(made, tables, InProcessEngine(shared_bytes=1))
    assert (rows(tables), changes(tables)) == (ROWS, OPERATIONS)


@pytest.mark.parametrize("on_error", ["pause", "stop"])
def test_a_shared_merge_that_finds_other_rows(
    made: MadeDirectory, tables: DeltaTables, on_error: Any
) -> None:
    """The table waits for a copy, or that is an error: the same as without tasks."""
    made.commit(1250, THINGS.relation(), testing.update(THINGS, [7, "g"]))
    given: dict[str, Any] = {
        "segments": made.directory, "target": tables.target, "until": "now", "on_error": on_error,
        "engine": InProcessEngine(shared_bytes=1),
    }  # fmt: skip
    if on_error == "stop":
        with expect_error(IncompleteError, code="unfit_row"):
            apply.sync(**given)
    else:
        (reason,) = apply.sync(**given).stale.values()
        assert "(id) = (7)" in reason
    assert staged(tables) == []


def test_another_program_writes_between_the_steps(
    made: MadeDirectory, tables: DeltaTables, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The merge is done again on what is there then."""
    import deltalake

    path = str(tables.path / "state" / "public.things")
    rewrite, left = _merge_steps.rewrite_files, [True]

    def beside(task: Any) -> Any:
        if left:
            left.pop()
            deltalake.DeltaTable(path).optimize.compact()
        return rewrite(task)

    monkeypatch.setattr(_merge_steps, "rewrite_files", beside)
    engine = InProcessEngine(shared_bytes=1)
    ended = sync(made, tables, engine)
    assert ended.stale == {}
    assert (rows(tables), changes(tables)) == (ROWS, OPERATIONS)


def test_tasks_have_about_as_much_to_do() -> None:
    def sizes(cores: int, *given: int) -> list[list[int]]:
        reads = [(i, Read((Path(f"{i}"),), size, None, {}, (0, 0))) for i, size in enumerate(given)]
        found = grouped(reads, cores)
        assert [number for group in found for number, _ in group] == [*range(len(reads))]
        return [[read.size for _, read in group] for group in found]

    assert sizes(2, 10, 10, 10, 10) == [[10, 10], [10, 10]]
    assert sizes(2, 10) == [[10]]
    assert sizes(4, 1, 1) == [[1], [1]]
    assert sizes(2, 1, 1, 1, 90) == [[1, 1, 1], [90]]
    assert sizes(2, 90, 1, 1, 1) == [[90], [1, 1, 1]]
    assert sizes(2, 0, 0) == [[0, 0]]
    # More than there are cores, where a task would take too long.
    assert len(sizes(2, *[128 << 20] * 16)) == 8
