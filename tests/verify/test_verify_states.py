"""verify of the tables that `apply.sync` keeps up to date."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import duckdb
import psycopg
import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
from support.expected_errors import expect_error
from support.postgres.snapshots import peek
from support.targets.in_process import InProcessEngine
from support.values.type_values import TYPES, VALUES
from support.waiting import wait_until

import pgoutput_fast as pf
from pgoutput_fast import cli
from pgoutput_fast.apply import sync
from pgoutput_fast.errors import Argument
from pgoutput_fast.replication import slots
from pgoutput_fast.spark import SparkEngine
from pgoutput_fast.types import TypeRegistry
from pgoutput_fast.verify import Report, TableResult, VerifyProgress, verify
from pgoutput_fast.verify.distributed_states import StateFiles, StateTask, grouped_files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pgoutput_fast.embedded import EmbeddedServer

pytestmark = pytest.mark.server

SCHEMA = (
    "CREATE TABLE a (id int PRIMARY KEY, t text, f float8, big text)",
    "ALTER TABLE a ALTER big SET STORAGE EXTERNAL",
    'CREATE TABLE "M.x" (x int, y text, "Y" text)',
    'ALTER TABLE "M.x" REPLICA IDENTITY FULL',
    "CREATE TABLE altered (id int PRIMARY KEY, t text, gone text, n int)",
    "CREATE TABLE later (id int PRIMARY KEY, t text)",
    "CREATE TABLE nothing (id int PRIMARY KEY)",
    "CREATE TABLE leaves (id int PRIMARY KEY)",
    "CREATE TABLE chosen (id int PRIMARY KEY, v int, hidden text)",
    """INSERT INTO a SELECT i, 't' || i, i / 3.0, repeat('x', 3000) || i
        FROM generate_series(1, 200) AS i""",
    "INSERT INTO altered SELECT i, 't', 'g', i FROM generate_series(1, 20) AS i",
    "INSERT INTO later SELECT i, 't' FROM generate_series(1, 20) AS i",
    'CREATE TABLE "{0}" (id int PRIMARY KEY, tags text[])',
    "INSERT INTO \"{0}\" VALUES (1, '{}'), (2, '{1}'), (3, '{2,NULL}')",
    """CREATE PUBLICATION p FOR TABLE a, "M.x", altered, later, nothing, leaves,
        chosen (id, v) WHERE (id % 2 = 0), "{0}" WHERE (tags <> '{}')""",
)
CHANGES = (
    """INSERT INTO a SELECT i, 't' || i, i / 3.0, repeat('x', 3000) || i
        FROM generate_series(201, 300) AS i""",
    "UPDATE a SET t = NULL WHERE id = 3",
    "UPDATE a SET id = id + 1000 WHERE id BETWEEN 10 AND 19",
    "DELETE FROM a WHERE id = 20",
    """INSERT INTO "M.x" SELECT i % 5, CASE WHEN i % 5 > 0 THEN 'a,\\b' END, 'Y'
        FROM generate_series(1, 50) AS i""",
    "DELETE FROM \"M.x\" WHERE ctid = '(0,7)'",
    "ALTER TABLE altered DROP gone, ADD added int DEFAULT 7",
    "ALTER TABLE altered RENAME t TO renamed",
    "UPDATE altered SET n = -1 WHERE id = 1",
    "INSERT INTO chosen SELECT i, i, 'h' FROM generate_series(1, 20) AS i",
    "INSERT INTO leaves VALUES (1)",
    # No change follows that would bring the columns to the target.
    "ALTER TABLE later ADD added int DEFAULT 7",
    "ALTER TABLE later ALTER t TYPE varchar",
    "ALTER TABLE later RENAME t TO renamed",
    "ALTER PUBLICATION p DROP TABLE leaves",
)
ROWS = {"{0}": 2, "M.x": 49, "a": 299, "altered": 20, "chosen": 10, "later": 20, "nothing": 0}


class Synced(NamedTuple):
    """A database, and the file that a sync keeps."""

    dsn: str
    path: Path

    def verify(self, path: Path | None = None, **options: Any) -> Report:
        # An idle capture asks the server for its position every 10 s.
        options.setdefault("timeout", 30)
        # A copy of the file has no segments beside it.
        options.setdefault("segments", None if path is None else f"{self.path}.segments")
        return verify(self.dsn, publications=["p"], target=f"duckdb:{path or self.path}", **options)


def run(dsn: str, *statements: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        for one in statements:
            connection.execute(one.encode())


@pytest.fixture(scope="module")
def synced(pg16: EmbeddedServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Synced]:
    path = tmp_path_factory.mktemp("states") / "tables.duckdb"
    run(pg16.dsn(), "CREATE DATABASE synced")
    dsn = pg16.dsn("synced")
    run(dsn, *SCHEMA)
    options: dict[str, Any] = {"target": f"duckdb:{path}", "slot": "synced", "publications": ["p"]}
    sync(dsn, until="now", **options)
    run(dsn, *CHANGES)
    sync(dsn, until="now", **options)
    yield Synced(dsn, path)
    slots.drop(dsn, "synced")


@pytest.fixture
def broken(synced: Synced, tmp_path: Path) -> Callable[..., TableResult]:
    """Change the file, and verify it: the result of the table that differs."""

    def result(statement: str, name: str = "a") -> TableResult:
        path = tmp_path / "tables.duckdb"
        shutil.copy(synced.path, path)
        with duckdb.connect(str(path)) as connection:
            connection.execute(statement)
        report = synced.verify(path)
        assert report.exit_code == 1
        assert [one.name for one in report.tables if one.state != "equal"] == [name]
        (found,) = (one for one in report.tables if one.name == name)
        return found

    return result


@pytest.mark.slow
def test_what_is_equal_in_states(synced: Synced) -> None:
    report = synced.verify()
    assert {one.name: (one.state, one.why) for one in report.tables} == dict.fromkeys(
        ROWS, ("equal", "")
    )
    assert {one.name: one.rows for one in report.tables} == ROWS
    assert {one.name: one.target_rows for one in report.tables} == ROWS
    assert report.exit_code == 0
    assert report.only_in_target == ("public.leaves",)


def test_one_value_in_states(broken: Callable[..., TableResult]) -> None:
    found = broken("UPDATE state.\"public.a\" SET t = 'T7' WHERE id = 7")
    (one,) = found.differences
    assert (found.differing, one.kind, one.key) == (1, "different", {"id": "7"})
    assert one.columns == {"t": ("t7", "T7")}


def test_null_is_not_an_empty_text_in_states(broken: Callable[..., TableResult]) -> None:
    (one,) = broken("UPDATE state.\"public.a\" SET t = '' WHERE id = 3").differences
    assert (one.key, one.columns) == ({"id": "3"}, {"t": (None, "")})


def test_a_column_that_was_renamed(broken: Callable[..., TableResult]) -> None:
    statement = "UPDATE state.\"public.altered\" SET renamed = 'T' WHERE id = 7"
    (one,) = broken(statement, "altered").differences
    assert one.columns == {"renamed": ("t", "T")}


def test_a_row_that_is_missing_in_states(broken: Callable[..., TableResult]) -> None:
    found = broken('DELETE FROM state."public.a" WHERE id = 7')
    (one,) = found.differences
    assert (one.kind, one.key, one.times) == ("missing", {"id": "7"}, (1, 0))
    assert (found.rows, found.target_rows) == (299, 298)


def test_a_row_too_many_in_states(broken: Callable[..., TableResult]) -> None:
    found = broken("INSERT INTO state.\"public.a\" VALUES (20, 't', 1, '')")
    (one,) = found.differences
    assert (one.kind, one.key, one.times) == ("extra", {"id": "20"}, (0, 1))


def test_a_row_twice_in_states(broken: Callable[..., TableResult]) -> None:
    statement = 'INSERT INTO state."public.a" FROM state."public.a" WHERE id = 7'
    (one,) = broken(statement).differences
    assert (one.kind, one.key, one.times) == ("doubled", {"id": "7"}, (1, 2))


def test_rows_of_a_multiset_in_states(broken: Callable[..., TableResult]) -> None:
    rows = 'FROM state."public.M%2Ex" WHERE x = 2'
    statement = f"DELETE {rows} AND rowid = (SELECT min(rowid) {rows})"
    (one,) = broken(statement, "M.x").differences
    assert (one.kind, one.key) == ("too few", {"x": "2", "y": "a,\\b", "Y": "Y"})
    assert one.times == (9, 8)


def test_many_rows_in_states(broken: Callable[..., TableResult]) -> None:
    found = broken("UPDATE state.\"public.a\" SET t = t || '!' WHERE id > 250")
    assert (found.differing, len(found.differences), found.differing_is_least) == (60, 10, False)


# --- Delta tables --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lake(pg16: EmbeddedServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Synced]:
    path = tmp_path_factory.mktemp("states") / "lake"
    run(pg16.dsn(), "CREATE DATABASE lake")
    dsn = pg16.dsn("lake")
    run(dsn, *SCHEMA)
    options: dict[str, Any] = {
        "target": path, "slot": "lake", "publications": ["p"], "soft_deletes": "deleted at"
    }  # fmt: skip
    sync(dsn, until="now", **options)
    run(dsn, *CHANGES)
    sync(dsn, until="now", **options)
    yield Synced(dsn, path)
    slots.drop(dsn, "lake")


def verify_lake(lake: Synced, path: Path | None = None, engine: Any = None) -> Report:
    segments = f"{lake.path}.segments"
    target = str(path or lake.path)
    return verify(
        lake.dsn, publications=["p"], target=target, segments=segments, timeout=10, engine=engine
    )


ENGINES = pytest.mark.parametrize("tasks", [False, True], ids=["here", "tasks"])


def engine_of(tasks: bool) -> Any:
    """What reads the rows: this process, or tasks that it runs."""
    return InProcessEngine() if tasks else None


@ENGINES
def test_delta_tables_that_are_equal(lake: Synced, tasks: bool) -> None:
    engine = engine_of(tasks)
    report = verify_lake(lake, engine=engine)
    if tasks:
        # All tables with rows, and those alone.
        assert {Path(task.of.uri).name for task in engine.jobs.tasks} == {
            "public.@7B0@7D", "public.M@2Ex", "public.a", "public.altered", "public.chosen",
            "public.later",
        }  # fmt: skip
    assert {one.name: (one.state, one.why) for one in report.tables} == dict.fromkeys(
        ROWS, ("equal", "")
    )
    assert {one.name: one.target_rows for one in report.tables} == ROWS
    assert report.only_in_target == ("public.leaves",)


def one_value(table: DeltaTable) -> None:
    table.update({"t": "'T7'"}, predicate="id = 7")


def missing(table: DeltaTable) -> None:
    table.delete("id = 7")


def doubled(table: DeltaTable) -> None:
    rows = table.to_pyarrow_table(filters=[("id", "=", 7)])
    write_deltalake(table, rows, mode="append")


def extra(table: DeltaTable) -> None:
    rows = table.to_pyarrow_table(filters=[("id", "=", 7)])
    column = pa.array([20], rows.schema.field("id").type)
    write_deltalake(table, rows.set_column(0, rows.schema.field(0), column), mode="append")


@pytest.mark.everyday("here")
@pytest.mark.parametrize(
    ("damage", "kind", "key", "times"),
    [
        (one_value, "different", "7", (1, 1)),
        (missing, "missing", "7", (1, 0)),
        (doubled, "doubled", "7", (1, 2)),
        (extra, "extra", "20", (0, 1)),
    ],
)
@ENGINES
def test_delta_tables_that_differ(
    lake: Synced, tmp_path: Path, damage: Any, kind: str, key: str, times: tuple[int, int],
    tasks: bool,
) -> None:  # fmt: skip
    shutil.copytree(lake.path, tmp_path / "lake")
    damage(DeltaTable(str(tmp_path / "lake" / "state" / "public.a")))
    report = verify_lake(lake, tmp_path / "lake", engine_of(tasks))
    (found,) = (one for one in report.tables if one.state != "equal")
    (one,) = found.differences
    assert (found.name, found.state, one.kind) == ("a", "different", kind)
    assert (one.key, one.times) == ({"id": key}, times)
    assert one.columns == ({"t": ("t7", "T7")} if kind == "different" else {})


@pytest.mark.slow
@ENGINES
def test_a_delta_table_that_is_further_than_its_progress(
    lake: Synced, tmp_path: Path, tasks: bool
) -> None:
    """As between two commits of a window: the older version is read, which the columns fit."""
    shutil.copytree(lake.path, tmp_path / "lake")
    directory = tmp_path / "lake" / "state" / "public.a"
    table = DeltaTable(str(directory))
    described = json.loads(DeltaTable(str(tmp_path / "lake" / "_progress")).metadata().description)
    with psycopg.connect(lake.dsn) as connection:
        (oid,) = connection.execute("SELECT 'a'::regclass::oid::int8").fetchone() or (0,)
    app = f"pgoutput_fast/{described['system_identifier']}/lake/{oid}"
    assert table.transaction_version(app) is not None
    properties = CommitProperties(app_transactions=[Transaction(app, 1 << 60)])
    table.delete("id < 100", commit_properties=properties)
    report = verify_lake(lake, tmp_path / "lake", engine_of(tasks))
    assert {one.state for one in report.tables} == {"equal"}


@pytest.mark.slow
def test_small_tables_are_read_by_this_process(lake: Synced) -> None:
    engine = InProcessEngine()
    directory = lake.path / "state" / "public.a"
    table = DeltaTable(str(directory))
    whole = sum((directory / one).stat().st_size for one in table.to_pyarrow_dataset().files)
    engine.driver_bytes = whole - 1  # other tables have less
    assert verify_lake(lake, engine=engine).exit_code == 0
    assert {Path(task.of.uri).name for task in engine.jobs.tasks} == {"public.a"}
    engine = InProcessEngine()
    engine.driver_bytes = whole
    assert verify_lake(lake, engine=engine).exit_code == 0
    assert engine.jobs.tasks == []


@pytest.mark.slow
def test_tasks_of_a_table_have_some_of_its_files(lake: Synced, tmp_path: Path) -> None:
    """Rows of several files, and equal rows in two of them, add up."""
    shutil.copytree(lake.path, tmp_path / "lake")
    table = DeltaTable(str(tmp_path / "lake" / "state" / "public.M@2Ex"))
    rows = table.to_pyarrow_table()
    for number in range(5):
        some = rows.slice(number * 10, 10)
        write_deltalake(table, some, mode="append" if number else "overwrite")
    engine = InProcessEngine()
    assert verify_lake(lake, tmp_path / "lake", engine).exit_code == 0
    tasks = [task.of for task in engine.jobs.tasks if "M@2Ex" in task.of.uri]
    assert {len(one.files) for one in tasks} == {2, 3}
    # Where all is equal, sums are enough.
    assert {task.method for task in engine.jobs.tasks} == {"sums"}
    assert len({one for task in tasks for one in task.files}) == 5
    # A table of which a file is gone.
    write_deltalake(table, rows.slice(0, 3), mode="append")
    (found,) = (
        one for one in verify_lake(lake, tmp_path / "lake", engine).tables if one.state != "equal"
    )
    assert (found.name, found.rows, found.target_rows) == ("M.x", 49, 52)
    assert {one.kind for one in found.differences} == {"doubled"}


def test_files_that_are_gone(lake: Synced, tmp_path: Path) -> None:
    shutil.copytree(lake.path, tmp_path / "lake")
    for path in (tmp_path / "lake" / "state" / "public.a").rglob("*.parquet"):
        path.unlink()
    for engine in (None, InProcessEngine()):
        with expect_error(code="io_failed"):
            verify_lake(lake, tmp_path / "lake", engine)


def test_groups_of_files() -> None:
    sizes = {"a": 5, "b": 1, "c": 4, "d": 3}
    assert grouped_files(sizes, 2) == [("a", "b"), ("c", "d")]
    assert grouped_files(sizes, 9) == [("a",), ("c",), ("d",), ("b",)]
    large = {str(number): 200 << 20 for number in range(10)}
    assert [len(one) for one in grouped_files(large, 2)] == [2, 2, 1, 1, 1, 1, 1, 1]


def test_secrets_are_not_shown_with_files() -> None:
    files = StateFiles("s3://bucket/lake", 7, ("a", "b"), {"AWS_SECRET_ACCESS_KEY": "secret"})
    assert repr(files) == "StateFiles('s3://bucket/lake', 7, 2 files)"
    task = StateTask(files, (), "state_rows", {}, (), "sums", (3, None))
    assert "secret" not in repr(task)


def test_targets_that_another_engine_does_not_read(
    synced: Synced, capsys: pytest.CaptureFixture[str]
) -> None:
    for target in (f"duckdb:{synced.path}", f"{synced.path}.segments"):
        with expect_error(code="bad_option", parameter="engine"):
            verify(synced.dsn, publications=["p"], target=target, engine=InProcessEngine())
    given = ["verify", "--dsn", synced.dsn, "--publication", "p", "--target", "lake"]
    assert cli.main([*given, "--master", "local"]) == 2
    errors = capsys.readouterr().err
    for option in ("--master ", "--engine spark"):
        assert option in errors


@pytest.mark.slow
@pytest.mark.spark
def test_with_spark(lake: Synced, spark: Any, tmp_path: Path) -> None:
    engine = SparkEngine(spark, driver_bytes=0)
    report = verify_lake(lake, engine=engine)
    assert {one.name: (one.state, one.target_rows) for one in report.tables} == {
        name: ("equal", rows) for name, rows in ROWS.items()
    }  # fmt: skip
    shutil.copytree(lake.path, tmp_path / "lake")
    one_value(DeltaTable(str(tmp_path / "lake" / "state" / "public.a")))
    here, there = (verify_lake(lake, tmp_path / "lake", one).tables for one in (None, engine))
    assert here == there
    for path in (tmp_path / "lake" / "state" / "public.a").rglob("*.parquet"):
        path.unlink()
    with expect_error(code="io_failed"):
        verify_lake(lake, tmp_path / "lake", engine)


@pytest.mark.slow
@pytest.mark.spark
def test_the_command_verifies_with_spark(lake: Synced, tmp_path: Path) -> None:
    """The same report as without, and nothing of what Spark prints."""
    shutil.copytree(lake.path, tmp_path / "lake")
    missing(DeltaTable(str(tmp_path / "lake" / "state" / "public.a")))
    command = [
        sys.executable, "-m", "pgoutput_fast", "verify", "--dsn", lake.dsn, "--publication", "p",
        "--target", str(tmp_path / "lake"), "--segments", f"{lake.path}.segments",
    ]  # fmt: skip
    engine = ["--engine", "spark", "--master", "local[2]", "--conf", "spark.ui.enabled=false"]
    here, there = (
        subprocess.run([*command, *more], capture_output=True, text=True, check=False, timeout=200)
        for more in ([], engine)
    )
    # The positions are those of two moments.
    assert here.stdout.splitlines()[:-1] == there.stdout.splitlines()[:-1]
    assert "id='7': missing in the target" in there.stdout
    assert (here.returncode, there.returncode) == (1, 1)
    assert [line for line in there.stderr.splitlines() if not line.startswith("making")] == []


# --- what can't be compared ----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("statement", "why"),
    [
        ("SET stale = 'a column is new'", "it is stale: a column is new"),
        ("SET lsn = 16", "it has been waiting for its snapshot since 0/10"),
        ("SET copy_lsn = 0", "the target does not have its snapshot of .* yet"),
    ],
)
def test_a_table_that_can_not_be_compared(
    synced: Synced, tmp_path: Path, statement: str, why: str
) -> None:
    path = tmp_path / "tables.duckdb"
    shutil.copy(synced.path, path)
    with duckdb.connect(str(path)) as connection:
        connection.execute(f"UPDATE _progress {statement} WHERE \"table\" = 'a'")
        connection.execute("DELETE FROM _progress WHERE \"table\" = 'chosen'")
    report = synced.verify(path)
    found = {one.name: one for one in report.tables if one.state != "equal"}
    assert (set(found), report.exit_code) == ({"a", "chosen"}, 2)
    assert {one.state for one in found.values()} == {"not compared"}
    assert re.fullmatch(why, found["a"].why)
    assert found["chosen"].why.startswith("the target does not have its snapshot of")


def test_a_file_alone(synced: Synced, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without its segments it does not tell that nothing was committed since its last window."""
    path = tmp_path / "alone.duckdb"
    shutil.copy(synced.path, path)
    with expect_error(code="timed_out", options=[Argument("segments")]):
        synced.verify(path, segments=None, timeout=0.1)
    command = ["verify", "--dsn", synced.dsn, "--publication", "p", "--target", f"duckdb:{path}"]
    assert cli.main([*command, "--timeout", "0.1"]) == 2
    assert "give the directory of the capture or the sync as --segments" in (
        capsys.readouterr().err
    )
    with psycopg.connect(synced.dsn) as server, duckdb.connect(str(path)) as connection:
        (lsn,) = server.execute("SELECT pg_current_wal_lsn() - '0/0'").fetchone() or (0,)
        for name in ("_source", "_progress"):
            connection.execute(f"UPDATE {name} SET lsn = {lsn + 100_000}")
        connection.execute("DELETE FROM _progress WHERE \"table\" IN ('chosen', 'nothing')")

    def progress(told: VerifyProgress) -> None:
        if told.doing == "waiting for the target":  # the server comes to where the file is
            run(synced.dsn, "SELECT pg_switch_wal()", "CHECKPOINT")

    report = synced.verify(path, segments=None, progress=progress)
    found = {one.name: one for one in report.tables}
    # A table that has no rows on the server is not missed.
    assert {name: one.state for name, one in found.items()} == {
        **dict.fromkeys(ROWS, "equal"), "chosen": "different",
    }  # fmt: skip
    assert (found["chosen"].differing, report.only_in_target) == (10, ("public.leaves",))
    assert {one.kind for one in found["chosen"].differences} == {"missing"}


def test_another_database_in_states(synced: Synced, pg16: EmbeddedServer, tmp_path: Path) -> None:
    run(pg16.dsn(), "CREATE PUBLICATION p")
    try:
        with expect_error(code="another_history"):
            synced._replace(dsn=pg16.dsn()).verify()
    finally:
        run(pg16.dsn(), "DROP PUBLICATION p")
    shutil.copy(synced.path, tmp_path / "other.duckdb")
    with duckdb.connect(str(tmp_path / "other.duckdb")) as connection:
        connection.execute("UPDATE _source SET database = 'other'")
    with expect_error(code="another_history", path=str(tmp_path / "other.duckdb")):
        synced.verify(tmp_path / "other.duckdb")
    with duckdb.connect(str(tmp_path / "other.duckdb")) as connection:
        connection.execute("UPDATE _source SET format = 9")
    with expect_error(code="not_supported", path=str(tmp_path / "other.duckdb")):
        synced.verify(tmp_path / "other.duckdb")
    with duckdb.connect(str(tmp_path / "other.duckdb")) as connection:
        connection.execute("DROP TABLE _source")
    with expect_error(parameter="target", path=str(tmp_path / "other.duckdb")):
        synced.verify(tmp_path / "other.duckdb")


def test_as_a_command(synced: Synced, capsys: pytest.CaptureFixture[str]) -> None:
    code = cli.main(
        ["verify", "--dsn", synced.dsn, "--publication", "p", "--target", f"duckdb:{synced.path}"]
    )
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    assert out.splitlines()[1] == "public.a        equal, 299 rows"


# --- values of every type ------------------------------------------------------------------------

TEXT = pf.Policies(infinity="text", out_of_range="text", special_values="text", arrays="text")


class Typed(NamedTuple):
    """A database with a table for each type."""

    dsn: str
    names: list[str]

    def verify(self, target: str, engine: Any = None) -> dict[str, str]:
        """The types whose table is not equal, and what was said of it."""
        report = verify(self.dsn, publications=["p"], target=target, timeout=10, engine=engine)
        assert len(report.tables) == len(self.names)
        return {
            self.names[int(one.name[1:])]: f"{one.state} {one.why} {one.differences}"
            for one in report.tables
            if one.state != "equal"
        }


def typed(database: Any) -> Typed:
    database.execute(*TYPES)
    names = list(VALUES)
    for number, name in enumerate(names):
        database.execute(f"CREATE TABLE t{number} (id int PRIMARY KEY, v {name})")
    database.execute("CREATE PUBLICATION p FOR ALL TABLES")
    return Typed(database.dsn, names)


def insert(database: Any, first: int) -> None:
    with psycopg.connect(database.dsn) as connection:
        for number, (name, values) in enumerate(VALUES.items()):
            for i, value in enumerate([*values, None]):
                connection.execute(
                    f"INSERT INTO t{number} VALUES (%s, %s::{name})".encode(), [first + i, value]
                )


def delete_refused(database: Any) -> int:
    """Delete what columns can't hold without a policy; how many rows that is."""
    frames = peek(database, "tried", "p", binary=False)
    with psycopg.connect(database.dsn, autocommit=True) as connection:
        registry = TypeRegistry.from_connection(connection)
        relation, refused = b"", 0
        table, key = "", 0
        for frame in frames:
            if frame[:1] == b"R":
                relation, table, key = frame, pf.decode(frame).name, 0
            elif frame[:1] == b"I":
                decoder = pf.ColumnarDecoder(registry=registry, target="portable")
                try:
                    list(decoder.decode([relation, frame]))
                except pf.PgOutputError:
                    connection.execute(f"DELETE FROM {table} WHERE id = {key}".encode())
                    refused += 1
                key += 1
    return refused


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "policies"),
    [("duckdb", None), ("delta", TEXT), ("tasks", None), ("tasks", TEXT)],
    ids=["duckdb-default", "delta-text", "tasks-default", "tasks-text"],
)
def test_every_type_is_equal(
    pg16: EmbeddedServer, make_database: Callable[..., Any], tmp_path: Path, policies: Any,
    kind: str,
) -> None:  # fmt: skip
    """As a snapshot brings the values, and as a stream does."""
    database = make_database(pg16)
    made = typed(database)
    database.execute("SELECT pg_create_logical_replication_slot('tried', 'pgoutput')")
    insert(database, 0)
    if policies is None:
        assert delete_refused(database) > 10
    target = f"duckdb:{tmp_path / 'tables.duckdb'}" if kind == "duckdb" else str(tmp_path / "lake")
    options: dict[str, Any] = {
        "target": target, "slot": "typed", "publications": ["p"], "until": "now",
        "policies": policies, "soft_deletes": None if policies is None else "gone",
    }  # fmt: skip
    engine = engine_of(kind == "tasks")
    sync(database.dsn, **options)
    assert made.verify(target, engine) == {}
    for number in range(len(made.names)):
        database.execute(f"INSERT INTO t{number} SELECT id + 1000, v FROM t{number}")
    sync(database.dsn, **options)
    assert made.verify(target, engine) == {}


# --- while both move -----------------------------------------------------------------------------


@pytest.fixture
def moving(
    pg16: EmbeddedServer, make_database: Callable[..., Any], tmp_path: Path,
) -> Iterator[Synced]:  # fmt: skip
    """A database with a sync that runs."""
    database = make_database(pg16)
    database.execute(*SCHEMA)
    stop = threading.Event()
    found = Synced(database.dsn, tmp_path / "tables.duckdb")
    failed: list[BaseException] = []

    def run_sync() -> None:
        try:
            sync(
                found.dsn, target=f"duckdb:{found.path}", slot="moving", publications=["p"],
                stop=stop, interval=0.1, max_delay=0.1,
            )  # fmt: skip
        except BaseException as error:
            failed.append(error)
            raise

    thread = threading.Thread(target=run_sync)
    thread.start()
    wait_until(lambda: found.path.exists() or failed)
    yield found
    stop.set()
    thread.join()
    assert not failed


@contextlib.contextmanager
def writing(dsn: str, step: Callable[[Any, int], None]) -> Iterator[None]:
    """Run a step over and over, in another thread."""
    stop = threading.Event()

    def write() -> None:
        with psycopg.connect(dsn, autocommit=True) as connection:
            number = 0
            while not stop.is_set():
                step(connection, number)
                number += 1
                time.sleep(0.01)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@pytest.mark.slow
def test_equal_while_both_move_in_states(moving: Synced) -> None:
    def step(connection: Any, number: int) -> None:
        key = number * 7919 % 3000
        with connection.transaction():
            connection.execute("DELETE FROM a WHERE id = %s", [key + 1])
            connection.execute(
                "INSERT INTO a VALUES (%s, %s, 1, repeat('z', 3000)) ON CONFLICT (id) DO UPDATE "
                "SET t = excluded.t", [key, str(number)],
            )  # fmt: skip
            connection.execute('INSERT INTO "M.x" VALUES (%s)', [number % 50])
        if number % 10 == 0:
            connection.execute("UPDATE a SET id = -id WHERE id = %s", [key])

    def has_begun() -> bool:
        with psycopg.connect(moving.dsn) as connection:
            (rows,) = connection.execute("SELECT count(*) FROM a").fetchone() or (0,)
        return bool(rows > 220)

    with writing(moving.dsn, step):
        wait_until(has_begun)
        report = moving.verify(rounds=30)
    found = {one.name: one for one in report.tables}
    assert {one.state for one in report.tables} <= {"equal", "unsettled"}
    assert found["a"].state == "equal"
    assert found["a"].rows > 220
    assert found["a"].looked_again > 0


@pytest.mark.slow
def test_a_key_that_never_stands_still_in_states(moving: Synced) -> None:
    def step(connection: Any, number: int) -> None:
        connection.execute("UPDATE a SET t = %s WHERE id = 30", [str(number)])

    # Before its tables are copied there is nothing to compare.
    wait_until(lambda: moving.verify().exit_code == 0)
    with writing(moving.dsn, step):
        report = moving.verify(rounds=2)
    found = {one.name: one for one in report.tables}
    assert (found["a"].state, found["a"].unsettled) == ("unsettled", 1)
    assert found["later"].state == "equal"
    assert report.exit_code == 2


@pytest.mark.slow
def test_a_table_without_columns_while_it_grows(moving: Synced) -> None:
    def step(connection: Any, number: int) -> None:
        connection.execute("INSERT INTO bare DEFAULT VALUES")

    # With a row it is equal only once the target has it, and not before it was copied.
    run(moving.dsn, "CREATE TABLE bare ()", "INSERT INTO bare DEFAULT VALUES",
        "ALTER PUBLICATION p ADD TABLE bare")  # fmt: skip
    wait_until(lambda: moving.verify().exit_code == 0)
    with writing(moving.dsn, step):
        report = moving.verify(rounds=2)
    (found,) = (one for one in report.tables if one.name == "bare")
    # All of its rows are the same, so that none stands still.
    assert (found.state, found.unsettled) == ("unsettled", 1)
    assert moving.verify().exit_code == 0


def test_a_target_of_some_tables(pg16: EmbeddedServer, make_database: Any, tmp_path: Path) -> None:
    """Those for which it was not made are left out, unless they are asked for."""
    database = make_database(pg16)
    database.execute("CREATE TABLE t (id int PRIMARY KEY)", "CREATE TABLE u (id int PRIMARY KEY)",
                     "INSERT INTO t VALUES (1)", "CREATE PUBLICATION p FOR TABLE t, u")  # fmt: skip
    target = f"duckdb:{tmp_path / 'tables.duckdb'}"
    given: dict[str, Any] = {"publications": ["p"], "target": target}
    slot = f"slot_{database.name}"
    sync(database.dsn, slot=slot, tables="public.t", until="now", **given)
    report = verify(database.dsn, timeout=10, **given)
    assert [(one.name, one.state, one.rows) for one in report.tables] == [("t", "equal", 1)]
    report = verify(database.dsn, timeout=10, tables=["public.u"], **given)
    assert [(one.name, one.state) for one in report.tables] == [("u", "not compared")]


def test_a_paused_table_is_not_waited_for(
    pg16: EmbeddedServer, make_database: Any, tmp_path: Path
) -> None:
    """The target has nothing, and comes no further before somebody acts."""
    database = make_database(pg16)
    database.execute("CREATE TABLE t (id int PRIMARY KEY, d date)",
                     "INSERT INTO t VALUES (1, 'infinity')",
                     "CREATE PUBLICATION p FOR TABLE t")  # fmt: skip
    target = f"duckdb:{tmp_path / 'tables.duckdb'}"
    given: dict[str, Any] = {"publications": ["p"], "target": target}
    slot = f"slot_{database.name}"
    assert [*sync(database.dsn, slot=slot, until="now", **given).paused] == ["public.t"]
    (found,) = verify(database.dsn, timeout=5, **given).tables
    assert (found.name, found.state) == ("t", "not compared")
    assert "paused" in found.why
    assert "infinity" in found.why


def test_policies_belong_to_a_syncs_target(synced: Synced) -> None:
    segments = f"{synced.path}.segments"
    with expect_error(code="bad_option", parameter="policies"):
        verify(synced.dsn, publications=["p"], target=segments, policies=pf.Policies())
    wrong: Any = "infinity=null"
    with pytest.raises(TypeError, match="policies"):
        verify(synced.dsn, publications=["p"], target=segments, policies=wrong)
