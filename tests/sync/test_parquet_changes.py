"""Change tables as plain Parquet files: what readers see meanwhile, kills, and what is refused."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import fs
from support import paths
from support.changelogs.made_directory import MadeDirectory, catalog_read
from support.commands.option_files import config
from support.expected_errors import expect_error
from support.nightly import cases
from support.targets.in_process import InProcessEngine
from support.targets.object_storage import ENVIRONMENT, SECRET
from support.targets.synced_tables import ParquetTables

from pgoutput_fast import UNCHANGED, apply, testing
from pgoutput_fast.apply import parquet_table, window_writer
from pgoutput_fast.apply.delta_files import AddedFile
from pgoutput_fast.apply.delta_place import DeltaPlace
from pgoutput_fast.apply.parquet_table import ParquetTable
from pgoutput_fast.apply.targets import ConflictError
from pgoutput_fast.changelog.schema_history import HistoryWriter
from pgoutput_fast.cli import main
from pgoutput_fast.errors import Argument, PgOutputError
from pgoutput_fast.verify import verify

duckdb = pytest.importorskip("duckdb")
deltalake_fs = pytest.importorskip("deltalake.fs")

COLUMNS = {"id": "int4", "note": "text"}
THINGS = testing.Table("things", COLUMNS, 16390, key=["id"])
WIDER = testing.Table("things", {**COLUMNS, "n": "int4"}, 16390, key=["id"])
OTHERS = testing.Table("others", {**COLUMNS, "n": "int4"}, 16390, key=["id"])
ENGINES = pytest.mark.parametrize("engine", ["local", "distributed"])


@pytest.fixture(autouse=True)
def _no_catalogue_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window_writer, "_CATALOG_TIMEOUT", 0.2)


@pytest.fixture
def made(tmp_path: Path) -> Iterator[MadeDirectory]:
    with contextlib.closing(MadeDirectory(tmp_path / "segments")) as found:
        yield found


@pytest.fixture
def tables(made: MadeDirectory, tmp_path: Path) -> ParquetTables:
    """Of two rows, a change, and two in a window that is not there yet."""
    found = ParquetTables(tmp_path)
    made.wait(THINGS, 1000)
    made.copy(THINGS, 1100, [[1, "a"], [2, "b"]])
    made.commit(1200, THINGS.relation(), testing.insert(THINGS, [3, "c"]))
    sync(made, found)
    made.commit(1300, THINGS.relation(), testing.update(THINGS, [2, "B"]))
    # Of other columns, so that they are in another file.
    HistoryWriter(made.directory, None).note(catalog_read(1350, WIDER, n="7"))
    made.commit(1400, WIDER.relation(), testing.insert(WIDER, [4, "d", 7]))
    return found


def sync(made: MadeDirectory, tables: ParquetTables, **options: Any) -> apply.SyncProgress:
    return apply.sync(segments=made.directory, until="now", **{**tables.given, **options})


def directory(tables: ParquetTables) -> Path:
    return tables.path / "changes" / "public.things"


def names(where: Path) -> list[str]:
    return sorted(one.name for one in where.iterdir())


FIRST = [("truncate", None, None), ("read", 1, None), ("read", 2, None), ("insert", 3, None)]
SECOND = [("update", 2, None), ("insert", 4, 7)]


def globbed(tables: ParquetTables) -> list[tuple[Any, ...]]:
    """What a reader without any knowledge of the tables sees."""
    found = f"read_parquet('{directory(tables)}/*.parquet', union_by_name = true)"
    rows = duckdb.sql(f"SELECT op, after.* FROM {found} ORDER BY commit_lsn, seq").to_arrow_table()
    return [(row["op"], row["id"], row.get("n")) for row in rows.to_pylist()]


# --- what is there -------------------------------------------------------------------------------


@pytest.mark.slow
@ENGINES
def test_files_are_named_by_their_commits(
    made: MadeDirectory, tables: ParquetTables, engine: str
) -> None:
    options = {} if engine == "local" else {"engine": InProcessEngine(twice=True)}
    assert names(directory(tables)) == [
        "000000000000044B-00000000000004B0-00000000.parquet", "_log", "_uncommitted"
    ]  # fmt: skip
    assert globbed(tables) == FIRST
    sync(made, tables, **options)
    assert names(directory(tables)) == [
        "000000000000044B-00000000000004B0-00000000.parquet",
        "0000000000000514-0000000000000514-00000001.parquet",
        "0000000000000578-0000000000000578-00000002.parquet",
        "_log", "_uncommitted",
    ]  # fmt: skip
    assert globbed(tables) == FIRST + SECOND
    # A window that goes through the log leaves one entry, which has the position.
    (entry,) = (directory(tables) / "_log").iterdir()
    # Spark's windows end before the altered layout.
    assert entry.name == f"{2 if engine == 'local' else 3:020}.json"
    assert (json.loads(entry.read_text())["lsn"], json.loads(entry.read_text())["copy_lsn"]) == (
        1410, 1100
    )  # fmt: skip
    left = names(directory(tables) / "_uncommitted")
    # Of tasks that ran twice the first attempt is left.
    assert len(left) == (0 if engine == "local" else 2)
    assert names(tables.path) == ["_progress", "changes"]


def test_the_newest_file_has_all_columns(made: MadeDirectory, tables: ParquetTables) -> None:
    sync(made, tables)
    found = tables.changes("public.things").sort_by([("commit_lsn", "ascending")]).to_pylist()
    assert [row["after"] for row in found][-3:] == [
        {"id": 3, "note": "c", "n": None}, {"id": 2, "note": "B", "n": None},
        {"id": 4, "note": "d", "n": 7},
    ]  # fmt: skip
    # Also where the column is gone again.
    made.commit(1500, THINGS.relation(), testing.insert(THINGS, [5, "e"]))
    sync(made, tables)
    found = tables.changes("public.things").sort_by([("commit_lsn", "ascending")]).to_pylist()
    assert found[-1]["after"] == {"id": 5, "note": "e", "n": None}


@ENGINES
def test_a_table_without_snapshot_and_key(
    made: MadeDirectory, tables: ParquetTables, engine: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody asks for its rows, so that nothing of it is missing."""
    options = {} if engine == "local" else {"engine": InProcessEngine(twice=True)}
    bare = testing.Table("bare", {"id": "int4"}, 16500)
    made.commit(1500, bare.relation(), testing.insert(bare, [1]), testing.insert(bare, [1]))
    assert (
        main(["sync", "--segments", str(made.directory), "--to", tables.target, "--dry-run"]) == 0
    )
    assert "no snapshot: only its changes are kept" in capsys.readouterr().out
    progress = sync(made, tables, **options)
    assert (progress.stale, progress.asked, progress.changes) == ({}, (), len(SECOND) + 2)
    # A column that is renamed, or made anew under a name, is another one in the change table.
    other = testing.Table("bare", {"n": "int4"}, 16500)
    made.commit(1600, other.relation(), testing.insert(other, [2]))
    assert sync(made, tables, **options).stale == {}
    found = tables.changes("public.bare").sort_by("commit_lsn").column("after").to_pylist()
    assert found == [{"id": 1, "n": None}, {"id": 1, "n": None}, {"id": None, "n": 2}]
    assert names(tables.path) == ["_progress", "changes"]


@pytest.mark.slow
@pytest.mark.parametrize("changes", ["delta", "parquet"])
def test_the_net_effect_of_stored_changes(
    made: MadeDirectory, tables: ParquetTables, changes: str
) -> None:
    """No change table says which columns are the key."""
    from deltalake import DeltaTable

    made.commit(1500, WIDER.relation(), testing.delete(WIDER, [1, None, None], "K"),
                testing.update(WIDER, [20, UNCHANGED, 5], old={"id": 2}))  # fmt: skip
    if changes == "delta":
        tables.remove()
        tables.given["target"] = str(tables.path)
    sync(made, tables)
    if changes == "delta":
        rows = [DeltaTable(str(directory(tables))).to_pyarrow_table()]
        rows = [rows[0].sort_by([("commit_lsn", "ascending"), ("seq", "ascending")])]
    else:
        rows = [pq.read_table(one) for one in sorted(directory(tables).glob("*.parquet"))]
    with expect_error(options=[Argument("key")]):
        apply.fold(rows)
    net = apply.fold(rows, key=["id"])
    assert net.truncated
    # Files tell of a column that rows were written without; in a table it is null.
    without = None if changes == "delta" else ["n"]
    assert [(row["row"], row["unchanged"]) for row in net.rows.to_pylist()] == [
        ({"id": 3, "note": "c", "n": None}, without), ({"id": 4, "note": "d", "n": 7}, None),
        ({"id": 20, "note": "B", "n": 5}, None),
    ]  # fmt: skip


def test_another_type_begins_another_directory(made: MadeDirectory, tables: ParquetTables) -> None:
    sync(made, tables)
    other = testing.Table("things", {"id": "int4", "note": "int8"}, 16390, key=["id"])
    made.commit(1500, other.relation(), testing.insert(other, [5, 6]))
    sync(made, tables)
    assert globbed(tables) == FIRST + SECOND
    assert tables.changes("public.things", 2).column("after").to_pylist() == [
        {"id": 5, "note": 6}
    ]  # fmt: skip


def test_a_table_that_is_renamed(made: MadeDirectory, tables: ParquetTables) -> None:
    renamed = OTHERS
    made.commit(1500, renamed.relation(), testing.insert(renamed, [5, "e", 8]))
    sync(made, tables)
    assert names(tables.path / "changes") == ["public.others"]
    assert tables.changes("public.others").num_rows == len(FIRST + SECOND) + 1
    made.commit(1600, renamed.relation(), testing.delete(renamed, [5, None, None], "K"))
    sync(made, tables)
    assert tables.changes("public.others").num_rows == len(FIRST + SECOND) + 2


def test_a_table_that_cant_be_written(
    made: MadeDirectory, tables: ParquetTables, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is paused, and the others go on."""
    original = ParquetTable.commit

    def failing(self: ParquetTable, *given: Any, **named: Any) -> None:
        if self.directory == "changes/public.things":
            raise PgOutputError("permission denied")
        original(self, *given, **named)

    bare = testing.Table("bare", {"id": "int4"}, 16500)
    made.commit(1500, bare.relation(), testing.insert(bare, [1]))
    with monkeypatch.context() as patch:
        patch.setattr(ParquetTable, "commit", failing)
        assert [*sync(made, tables).paused] == ["public.things"]
    assert tables.changes("public.bare").num_rows == 1
    assert globbed(tables) == FIRST
    found = sync(made, tables)
    assert (found.paused, found.stale, globbed(tables)) == ({}, {}, FIRST + SECOND)


# --- kills ---------------------------------------------------------------------------------------

KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {tools!r})
from support.targets.in_process import InProcessEngine
from pgoutput_fast import apply
from pgoutput_fast.apply import delta_target, parquet_table

owner, name, left = getattr({module}, {owner!r}), {name!r}, {left}
original = getattr(owner, name)

def called(*given, **named):
    global left
    if {behind}:
        original(*given, **named)
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    left -= 1
    if not {behind}:
        return original(*given, **named)

setattr(owner, name, called)
options = dict(engine=InProcessEngine()) if {engine!r} == "distributed" else dict()
apply.sync(segments={segments!r}, target={target!r}, until="now", **options)
"""
UNCOMMITTED = 2
KILLS = {
    # Where it is killed; what a reader sees then, and how many files wait.
    "before the entry": ("parquet_table", "ParquetTable", "_put", 0, False, 0, 2),
    "behind the entry": ("parquet_table", "ParquetTable", "_put", 0, True, 0, 2),
    "between the moves": ("parquet_table", "ParquetTable", "_move", 1, False, 1, 1),
    "behind the moves": ("parquet_table", "ParquetTable", "_move", 1, True, 2, 0),
    "behind the commit": ("parquet_table", "ParquetTable", "commit", 0, True, 2, 0),
    "before the end": ("delta_target", "DeltaTarget", "commit", 0, False, 2, 0),
    "behind the end": ("delta_target", "DeltaTarget", "commit", 0, True, 2, 0),
}


# Spark's windows end before the altered layout, so each of them has one file.
OF_SPARK = {
    "before the entry": (0, 1),
    "behind the entry": (0, 1),
    "behind the commit": (1, 0),
    "before the end": (1, 0),
    "behind the end": (1, 0),
}


@pytest.mark.everyday("local")
@ENGINES
@pytest.mark.parametrize("where", cases(KILLS, ["between the moves"]))
def test_kill_9(made: MadeDirectory, tables: ParquetTables, where: str, engine: str) -> None:
    module, owner, name, left, behind, seen, waiting = KILLS[where]
    if engine == "distributed":
        seen, waiting = OF_SPARK.get(where, (seen, waiting))
    program = KILLED.format(
        tools=str(paths.TESTS), module=module, owner=owner, name=name,
        left=left, behind=behind, engine=engine, segments=str(made.directory),
        target=tables.target,
    )  # fmt: skip
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False
    )
    assert ran.returncode == -signal.SIGKILL, ran.stderr
    assert globbed(tables) == (FIRST + SECOND)[: len(FIRST) + seen]
    there = {one.name for one in directory(tables).glob("*.parquet")}
    left_over = {*names(directory(tables) / "_uncommitted")}
    assert len(left_over) == waiting
    # Two more, so that windows are cut otherwise.
    made.commit(1500, WIDER.relation(), testing.insert(WIDER, [5, "e", 8]))
    sync(made, tables, **({} if engine == "local" else {"engine": InProcessEngine()}))
    assert globbed(tables) == [*FIRST, *SECOND, ("insert", 5, 8)]
    assert there < {one.name for one in directory(tables).glob("*.parquet")}
    assert len([*(directory(tables) / "_log").iterdir()]) == 1
    # What came to no commit waits for its deletion, and nothing else does.
    still = {*names(directory(tables) / "_uncommitted")}
    assert still == (left_over if where == "before the entry" else set())


@pytest.mark.slow
def test_what_no_commit_has_is_deleted_after_a_while(
    made: MadeDirectory, tables: ParquetTables, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = directory(tables) / "_uncommitted"
    old, new = f"changes-{'0' * 32}.parquet", f"changes-{'1' * 32}.parquet"
    log = f".{7:020}.json.{'0' * 16}.tmp"
    for name, hours in ((old, 7), (log, 7), (new, 5), ("theirs.parquet", 7)):
        (left / name).touch()
        then = time.time() - 3600 * hours
        os.utime(left / name, (then, then))
    sync(made, tables)
    monkeypatch.setattr(parquet_table, "VACUUMED", 2)
    for number, (options, there) in enumerate([
        ({"maintenance": False}, [log, old, new, "theirs.parquet"]),
        ({}, [new, "theirs.parquet"]),
        ({"retention_hours": 5}, [new, "theirs.parquet"]),  # it is not yet time again
        ({"retention_hours": 4}, ["theirs.parquet"]),
    ]):  # fmt: skip
        made.commit(1500 + 100 * number, WIDER.relation(),
                    testing.insert(WIDER, [10 + number, "e", 8]))  # fmt: skip
        sync(made, tables, **options)
        assert names(left) == there
    assert tables.changes("public.things").num_rows == len(FIRST + SECOND) + 4


# --- whose it is ---------------------------------------------------------------------------------


def test_a_target_keeps_to_plain_files(made: MadeDirectory, tables: ParquetTables) -> None:
    def content() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in tables.path.rglob("*") if path.is_file()}

    before = content()
    iceberg = {"iceberg": {"type": "sql", "uri": f"sqlite:///{tables.path}.db"}}
    for given, others in ({}, []), (iceberg, [Argument("iceberg")]):
        fix = [Argument("target", tables.target), *others]
        with expect_error(code="bad_option", options=fix):
            sync(made, tables, target=tables.path, **given)
    assert content() == before
    tables.remove()
    sync(made, tables, target=tables.path)
    before = content()
    with expect_error(code="bad_option", options=[Argument("target", str(tables.path))]):
        sync(made, tables)
    assert content() == before


def test_a_second_sync_of_files_is_refused(made: MadeDirectory, tables: ParquetTables) -> None:
    from pgoutput_fast.apply.options import TargetOptions
    from pgoutput_fast.apply.synchronize import open_target

    with contextlib.closing(open_target(tables.target, TargetOptions()).target) as other:
        other.claim()
        with expect_error(code="in_use"):
            sync(made, tables)
    assert globbed(tables) == FIRST


def test_another_log_that_goes_on_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in object storage, where nothing is locked."""
    place = DeltaPlace(str(tmp_path / "lake"))
    one, other = (ParquetTable(place, "changes/t", "app", 6) for _ in range(2))
    schema = pa.schema({"commit_lsn": pa.int64()})
    one.load()
    one.create(schema, (0, 0))
    other.load()
    statistics = json.dumps({"minValues": {"commit_lsn": 3}, "maxValues": {"commit_lsn": 4}})
    for name in "ab":
        path = tmp_path / "lake" / "changes" / "t" / "_uncommitted" / f"{name}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"commit_lsn": pa.array([3, 4], pa.int64())}), path)
    one.commit([AddedFile("_uncommitted/a.parquet", 1, {}, statistics)], [], (5, 0))
    assert (one.position, other.position) == ((5, 0), (0, 0))
    file = AddedFile("_uncommitted/b.parquet", 1, {}, statistics)
    # Between the look at the log and the entry.
    with monkeypatch.context() as patch:
        patch.setattr(other, "_versions", lambda: [1])
        with expect_error(ConflictError, code="conflict"):
            other.commit([file], [], (6, 0))
    # Long before it, so that the entry of its number is not there any more.
    one.commit([], [], (5, 1))
    assert names(tmp_path / "lake" / "changes" / "t" / "_log") == ["00000000000000000003.json"]
    with expect_error(ConflictError, code="conflict"):
        other.commit([file], [], (6, 0))
    other.load()
    assert other.position == (5, 1)
    assert [one.name for one in (tmp_path / "lake" / "changes" / "t").glob("*.parquet")] == [
        "0000000000000003-0000000000000004-00000000.parquet"
    ]
    with expect_error(code="not_supported"):
        other.commit([], [], None)


def test_what_is_something_elses(made: MadeDirectory, tables: ParquetTables) -> None:
    given = DeltaPlace(str(tables.path)), "changes/public.things"
    foreign = ParquetTable(*given, "pgoutput_fast/other", 6)
    with expect_error(code="not_ours"):
        foreign.load()
    assert not foreign.is_its_own()
    letters = ParquetTable(DeltaPlace(str(tables.path)), "changes/public.letters", "app", 6)
    letters.load()
    assert not letters.is_its_own()
    assert not (tables.path / "changes" / "public.letters").exists()
    (tables.path / "changes" / "public.letters").mkdir()
    (tables.path / "changes" / "public.letters" / "rows.parquet").touch()
    with expect_error(code="not_ours", path=str(tables.path / "changes" / "public.letters")):
        letters.load()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "code"),
    [
        ("", "damaged"),
        ("[]", "damaged"),
        ('{"format": 2}', "not_supported"),
        ({"lsn": "1210"}, "damaged"),
        ({"schema": "AAAA"}, "damaged"),
        ({"schema": "?"}, "damaged"),
        ({"files": {"../../../state/a.parquet": "b.parquet"}}, "damaged"),
        ({"files": {"a.parquet": "/tmp/b.parquet"}}, "damaged"),
    ],
)
def test_a_log_that_is_damaged(
    made: MadeDirectory, tables: ParquetTables, damage: Any, code: str
) -> None:
    (entry,) = (directory(tables) / "_log").iterdir()
    whole = entry.read_text()
    text = damage if isinstance(damage, str) else json.dumps({**json.loads(whole), **damage})
    entry.write_text(text)
    with expect_error(code=code, path=str(entry)):
        sync(made, tables, on_error="stop")
    entry.write_text(whole)
    sync(made, tables)
    assert globbed(tables) == FIRST + SECOND


def test_arguments_of_plain_files(
    made: MadeDirectory, tables: ParquetTables, capsys: pytest.CaptureFixture[str]
) -> None:
    others: list[dict[str, Any]] = [
        {"iceberg": "shop"}, {"soft_deletes": "gone"}, {"partition_by": {"public.things": ["id"]}},
        {"duckdb_memory": 1 << 30},
    ]  # fmt: skip
    for given in others:
        with expect_error(code="bad_option", parameter=next(iter(given)), options=[]):
            sync(made, tables, **given)
    for target in ("parquet:", "parquet:gs://bucket/files", f"parquet:{__file__}"):
        with expect_error(code="bad_option", parameter="target"):
            sync(made, tables, target=target)
    with expect_error(code="missing_path", parameter="target"):
        sync(made, tables, target="parquet:nowhere/files")
    for given in (tables.target, str(tables.path)):
        with expect_error(code="not_supported", parameter="target"):
            verify("", publications=["p"], target=given)
    command = ["sync", "--segments", str(made.directory), "--until", "now", "--to"]
    assert main([*command, tables.target, *config(iceberg="shop")]) == 2
    assert "[bad_option]" in capsys.readouterr().err
    for dry_run in ([], ["--dry-run"]):
        assert main([*command, str(tables.path), *dry_run]) == 1
        assert f"Give --to {tables.target}, or start" in " ".join(capsys.readouterr().err.split())
    assert main([*command, tables.target]) == 0
    assert globbed(tables) == FIRST + SECOND


# --- object storage ------------------------------------------------------------------------------


class StoredTables(ParquetTables):
    """The same in object storage."""

    def __init__(self, root: Path, endpoint: str) -> None:
        super().__init__(root)
        self.target = self.given["target"] = "parquet:s3://bucket/lake"
        options = {**ENVIRONMENT, "AWS_ENDPOINT_URL": endpoint, "AWS_ALLOW_HTTP": "true"}
        self.given["storage_options"] = options
        self.place = DeltaPlace("s3://bucket/lake", options)

    def names(self, where: str = "") -> list[str]:
        """Of all files of change tables, or in a directory."""
        files = self.place.filesystem("changes")
        chosen = fs.FileSelector(where, recursive=True, allow_not_found=True)
        return sorted(one.path for one in files.get_file_info(chosen) if one.is_file)

    def copy_one(self) -> None:
        """Copy the first file of the newest entry to its name, as a move does that is cut short."""
        files = self.place.filesystem("changes")
        (entry,) = sorted(one for one in self.names() if "/_log/" in one)[-1:]
        moves = json.loads(files.open_input_file(entry).read())["files"]
        name, final = next(iter(moves.items()))
        directory = entry.partition("/")[0]
        content = files.open_input_file(f"{directory}/_uncommitted/{name}").read()
        with files.open_output_stream(f"{directory}/{final}", buffer_size=1 << 20) as file:
            file.write(content)

    def rows(self) -> list[tuple[int, str]]:
        """The commits and operations of all changes that a reader sees."""
        files = self.place.filesystem("changes")
        found = []
        for name in self.names():
            if "/_" not in name:
                with files.open_input_file(name) as file:
                    table = pq.read_table(file, columns=["commit_lsn", "seq", "op"])
                found += [tuple(row.values()) for row in table.to_pylist()]
        return [(lsn, op) for lsn, _, op in sorted(found)]


@pytest.fixture
def stored(tmp_path: Path) -> Iterator[StoredTables]:
    """The server is another process, as delta-rs waits for it without letting others run."""
    pytest.importorskip("moto")
    script = paths.SUPPORT / "targets" / "object_storage.py"
    with subprocess.Popen(
        [sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        assert server.stdin is not None
        endpoint = server.stdout.readline().strip()
        fs.S3FileSystem(
            endpoint_override=endpoint, access_key="k", secret_key="s", allow_bucket_creation=True
        ).create_dir("bucket")
        yield StoredTables(tmp_path, endpoint)
        server.stdin.close()


class KilledError(BaseException):
    """The process was killed."""


def killed_at(patch: pytest.MonkeyPatch, owner: Any, name: str, count: int) -> list[int]:
    """Have a call of a function end the process, after so many."""
    original, left = getattr(owner, name), [count]

    def called(*given: Any, **named: Any) -> Any:
        if left[0] == 0:
            raise KilledError
        left[0] -= 1
        return original(*given, **named)

    patch.setattr(owner, name, called)
    return left


@ENGINES
@pytest.mark.slow
def test_plain_files_in_object_storage(
    made: MadeDirectory, stored: StoredTables, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files are copied and deleted there, also if that is cut short; tables are not moved."""
    options = {} if engine == "local" else {"engine": InProcessEngine(stages=True)}
    windows = 1 if engine == "local" else 2  # Spark's end before an altered layout
    made.wait(THINGS, 1000)
    made.copy(THINGS, 1100, [[1, "a"], [2, "b"]])
    made.commit(1150, THINGS.relation(), testing.insert(THINGS, [3, "c"]))
    sync(made, stored, **options)
    expected = [(1099, "truncate"), (1099, "read"), (1099, "read"), (1150, "insert")]
    assert stored.rows() == expected
    # A window of two files for each step at which it may end.
    ends = [("_move", 0, 0), ("_move", 1, 1), ("_put", 0, 0), ("_settle", 2, 0)]
    for number, (name, count, moved) in enumerate(ends):
        lsn = 1200 + 100 * number
        wider = testing.Table("things", {**COLUMNS, f"n{number}": "int4"}, 16390, key=["id"])
        made.commit(lsn, THINGS.relation(), testing.insert(THINGS, [lsn, "c"]))
        made.commit(lsn + 50, wider.relation(), testing.update(wider, [lsn, "c", number]))
        expected += [(lsn, "insert"), (lsn + 50, "update")]
        with monkeypatch.context() as patch:
            killed_at(patch, ParquetTable, name, count)
            with pytest.raises(KilledError):
                sync(made, stored, **options)
        assert stored.rows() == expected[: len(expected) - 2 + moved]
        if name == "_settle":
            # The storage had copied a file already, and not deleted it.
            stored.copy_one()
            assert stored.rows() == expected[:-1]
        sync(made, stored, **options)
        assert stored.rows() == expected
        assert [one for one in stored.names() if "/_log/" in one] == [
            f"public.things/_log/{1 + windows * (number + 1):020}.json"
        ]
    waiting = [one for one in stored.names() if "/_uncommitted/" in one]
    assert len(waiting) == 2 // windows  # of the attempt that came to no entry
    # A table of another name, whose changes go on there. The files of attempts go first.
    made.commit(2000, THINGS.relation(), testing.insert(THINGS, [2000, "c"]))
    with monkeypatch.context() as patch:
        patch.setattr(parquet_table, "VACUUMED", 1)
        sync(made, stored, retention_hours=0)
    assert not [one for one in stored.names() if "/_uncommitted/" in one]
    there = stored.names()
    renamed = OTHERS
    made.commit(2100, renamed.relation(), testing.insert(renamed, [10, "f", 9]))
    expected += [(2000, "insert"), (2100, "insert")]
    assert sync(made, stored, **options).stale == {}
    assert stored.rows() == expected
    made.commit(2200, renamed.relation(), testing.insert(renamed, [11, "g", 9]))
    expected.append((2200, "insert"))
    sync(made, stored, **options)
    assert stored.rows() == expected
    assert {one for one in there if "/_log/" not in one} < {*stored.names()}
    assert "public.others" in {one.partition("/")[0] for one in stored.names()}
    # Nobody else may begin another kind there.
    with expect_error(code="bad_option", options=[Argument("target", stored.target)]):
        sync(made, stored, target="s3://bucket/lake")
    (entry,) = (one for one in stored.names() if one.startswith("public.others/_log/"))
    with stored.place.filesystem("changes").open_output_stream(entry, buffer_size=9) as file:
        file.write(b"{")
    made.commit(2300, renamed.relation(), testing.insert(renamed, [12, "h", 9]))
    (reason,) = sync(made, stored, **options).paused.values()
    assert "s3://bucket/lake/changes/public.others/_log/" in reason
    assert SECRET not in reason
