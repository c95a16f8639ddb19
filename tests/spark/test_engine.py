"""`sync` by Spark's executors: the same tables as by one process, and the same errors."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support import paths
from support.changelogs.made_directory import MadeDirectory, catalog_read
from support.expected_errors import expect_error
from support.targets.object_storage import KEY_ID, SECRET
from support.targets.synced_tables import DeltaTables, IcebergTables, ParquetTables

import pgoutput_fast as pf
from pgoutput_fast import testing
from pgoutput_fast.apply import sync as sync_here
from pgoutput_fast.apply import window_writer
from pgoutput_fast.apply.delta_target import DeltaTarget
from pgoutput_fast.changelog.schema_history import HistoryWriter
from pgoutput_fast.errors import RetryableError
from pgoutput_fast.spark import SparkEngine, sync
from pgoutput_fast.spark import _distributed as distributed
from pgoutput_fast.spark._jobs import SparkJobs

pytestmark = pytest.mark.spark

THINGS = testing.Table("things", {"id": "int4", "note": "text"}, 16390, key=["id"])
BAG = testing.Table("bag", {"n": "int4"}, 16391, replica_identity="f")


@pytest.fixture
def made(tmp_path: Path) -> Iterator[MadeDirectory]:
    with contextlib.closing(MadeDirectory(tmp_path / "segments")) as found:
        yield found


def rows(tables: DeltaTables, table: str) -> list[tuple[Any, ...]]:
    found = tables.state(table).to_pylist()
    return sorted(tuple(row.values()) for row in found)


def places(tables: DeltaTables, table: str) -> list[tuple[int, int, str]]:
    found = tables.changes(table).to_pylist()
    return sorted((row["commit_lsn"], row["seq"], row["op"]) for row in found)


def test_a_target_goes_from_one_engine_to_the_other(
    spark: Any, made: MadeDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = []
    take = distributed.DistributedWindow._take_runs
    monkeypatch.setattr(
        distributed.DistributedWindow, "_take_runs",
        lambda self, plan, planned, runs: (take(self, plan, planned, runs), written.append(1)),
    )  # fmt: skip
    tables = DeltaTables(tmp_path)
    made.wait(THINGS, 1000)
    made.copy(THINGS, 1100, [[1, "a"], [2, "b"], [3, "c"]])
    made.commit(1200, THINGS.relation(), testing.update(THINGS, [2, "B"]),
                testing.insert(THINGS, [4, "d"]))  # fmt: skip
    given: dict[str, Any] = {
        "target": tables.target, "segments": made.directory, "until": "now", "uncopied": "empty",
    }  # fmt: skip
    ended = sync(spark, **given, driver_bytes=0)
    assert (ended.windows, ended.tables, ended.stale) == (1, {"public.things": 5}, {})
    assert len(written) == 1
    assert rows(tables, "public.things") == [(1, "a"), (2, "B"), (3, "c"), (4, "d")]
    made.commit(1300, THINGS.relation(), testing.delete(THINGS, [1, None], "K"),
                BAG.relation(), testing.insert(BAG, [7]), testing.insert(BAG, [7]))  # fmt: skip
    assert sync_here(**given).tables == {"public.bag": 2, "public.things": 1}
    made.commit(1400, THINGS.relation(), testing.truncate([THINGS.relation_id]),
                testing.insert(THINGS, [9, "z"]),
                BAG.relation(), testing.delete(BAG, [7], "O"))  # fmt: skip
    assert sync(spark, **given, driver_bytes=0).tables == {"public.bag": 1, "public.things": 2}
    assert len(written) == 2
    # A small window is the driver's.
    made.commit(1500, BAG.relation(), testing.insert(BAG, [8]))
    assert sync(spark, **given).tables == {"public.bag": 1}
    assert len(written) == 2
    assert rows(tables, "public.things") == [(9, "z")]
    assert rows(tables, "public.bag") == [(7,), (8,)]
    assert [op for _, _, op in places(tables, "public.things")] == [
        "truncate", "read", "read", "read", "update", "insert", "delete", "truncate", "insert",
    ]  # fmt: skip
    here = DeltaTables(tmp_path / "here")
    here.path.parent.mkdir()
    sync_here(**{**given, "target": here.target}, consumer="here")
    for name in ("public.things", "public.bag"):
        assert here.state(name).sort_by(here.state(name).column_names[0]) == tables.state(
            name
        ).sort_by(here.state(name).column_names[0])
        assert places(here, name) == places(tables, name)
    assert here.progress() == tables.progress()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [ParquetTables, IcebergTables])
def test_change_tables_of_other_kinds(
    spark: Any, made: MadeDirectory, tmp_path: Path, kind: type[DeltaTables],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Executors write their files, in turns with one process; all is as one process writes it."""
    monkeypatch.setattr(window_writer, "_CATALOG_TIMEOUT", 0.2)  # it never comes here
    if kind is IcebergTables:
        pytest.importorskip("pyiceberg")
    tables = kind(tmp_path)
    given: dict[str, Any] = {
        **tables.given, "segments": made.directory, "until": "now", "uncopied": "empty",
    }  # fmt: skip
    made.wait(THINGS, 1000)
    made.copy(THINGS, 1100, [[1, "a"], [2, "b"]], [[3, "c"]])
    made.commit(1200, THINGS.relation(), testing.update(THINGS, [2, "B"]),
                testing.insert(THINGS, [4, "d"]))  # fmt: skip
    columns = {"id": "int4", "note": "text", "n": "int4"}
    wider, renamed = (
        testing.Table(name, columns, 16390, key=["id"]) for name in ("things", "others")
    )
    history = HistoryWriter(made.directory, None)
    history.note(catalog_read(1050, THINGS))
    history.note(catalog_read(1250, wider, n="7"))
    assert sync(spark, **given, driver_bytes=0).tables == {"public.things": 5}
    made.commit(1300, wider.relation(), testing.insert(wider, [5, "e", 50]),
                BAG.relation(), testing.insert(BAG, [7]), testing.insert(BAG, [7]))  # fmt: skip
    made.commit(1400, wider.relation(), testing.delete(wider, [1, None, None], "K"))
    assert sync(spark, **given, driver_bytes=0).tables == {"public.bag": 2, "public.things": 2}
    made.commit(1500, wider.relation(), testing.update(wider, [5, "E", 51]))
    assert sync_here(**given).tables == {"public.things": 1}
    made.commit(1600, renamed.relation(), testing.insert(renamed, [6, "f", 60]),
                BAG.relation(), testing.delete(BAG, [7], "O"))  # fmt: skip
    assert sync(spark, **given, driver_bytes=0).tables == {"public.bag": 1, "public.others": 1}
    (tmp_path / "here").mkdir()
    here = kind(tmp_path / "here")
    sync_here(**{**given, **here.given}, consumer="here")
    for name in ("public.others", "public.bag"):
        if tables.has_state:
            found, expected = (one.state(name).to_pylist() for one in (tables, here))
            assert sorted(found, key=repr) == sorted(expected, key=repr)
        found, expected = (one.changes(name).to_pylist() for one in (tables, here))
        assert sorted(found, key=repr) == sorted(expected, key=repr)
    if tables.has_state:
        assert rows(tables, "public.others") == [
            (2, "B", 7), (3, "c", 7), (4, "d", 7), (5, "E", 51), (6, "f", 60)
        ]  # fmt: skip
    assert [op for _, _, op in places(tables, "public.others")] == [
        "truncate", "read", "read", "read", "update", "insert", "insert", "delete", "update",
        "insert",
    ]  # fmt: skip
    assert places(tables, "public.bag")[-1] == (1600, 1, "delete")
    if kind is IcebergTables:
        return
    # No file waits, and Spark reads the directory as it is.
    assert not [*tables.path.glob("changes/*/_uncommitted/*")]
    frame = spark.read.option("mergeSchema", "true").parquet(f"{tables.path}/changes/public.others")
    shown = frame.where("op = 'insert'").orderBy("commit_lsn", "seq").select("after.id", "after.n")
    assert [tuple(row) for row in shown.collect()] == [(4, None), (5, 50), (6, 60)]


def test_what_another_sync_has_in_the_target_stays(
    spark: Any, made: MadeDirectory, tmp_path: Path
) -> None:
    """Until the target is this sync's own; then it is what one that was killed has left."""
    tables = DeltaTables(tmp_path)
    given: dict[str, Any] = {
        "target": tables.target, "segments": made.directory, "until": "now", "uncopied": "empty",
    }  # fmt: skip
    made.commit(1200, BAG.relation(), testing.insert(BAG, [7]))
    sync_here(**given)
    made.commit(1300, BAG.relation(), testing.insert(BAG, [8]))
    other = DeltaTarget(tables.target)
    other.claim()
    staged = Path(tables.target, "_staged", "1" * 32, f"1-{'0' * 32}.arrow")
    staged.parent.mkdir(parents=True)
    staged.touch()
    with expect_error(code="in_use"):
        sync(spark, **given)
    assert staged.exists()
    other.close()
    assert sync(spark, **given).tables == {"public.bag": 1}
    assert not staged.exists()


def test_what_executors_refuse(spark: Any, made: MadeDirectory, tmp_path: Path) -> None:
    """The error is the one of this process, and Spark does not run the task again."""
    made.commit(1200, THINGS.relation(), testing.insert(THINGS, [b"no number", "a"]))
    given: dict[str, Any] = {
        "segments": made.directory, "until": "now", "uncopied": "empty", "on_error": "stop",
    }  # fmt: skip
    found = []
    for engine in ({"engine": SparkEngine(spark, driver_bytes=0)}, {}):
        with pytest.raises(pf.PgOutputError) as caught:
            sync_here(**given, target=tmp_path / "lake", **engine)
        found.append(caught.value)
    assert str(found[0]) == str(found[1])
    assert found[0].code == "bad_value"
    assert not list((tmp_path / "lake").glob("changes/*/*.parquet"))


def test_functions_that_fail(spark: Any) -> None:
    jobs = SparkJobs(spark)
    told: list[int] = []
    assert jobs.run("count", len, ["a", "bb", ""], lambda: told.append(1)) == [1, 2, 0]
    # An error of a function is no outage: it would come again.
    with expect_error(code="io_failed") as bad:
        jobs.run("parse", int, ["1", "x"], lambda: None)
    assert not isinstance(bad.value, RetryableError)
    with expect_error(RetryableError, code="io_failed"):
        jobs.run("end", os._exit, [3], lambda: None)


@pytest.mark.parametrize(
    ("master", "cores", "window_bytes", "driver_bytes"),
    [
        ("local", 1, 64 << 20, 256 << 20),
        ("local[2,4]", 2, 64 << 20, 256 << 20),
        ("local[3]", 3, 256 << 20, 32 << 20),
        ("local-cluster[2,1,1024]", 2, 256 << 20, 32 << 20),
        ("spark://host:7077", 2, 256 << 20, 32 << 20),
    ],
)
def test_executors_write_less_where_the_driver_has_their_cores(
    master: str, cores: int, window_bytes: int, driver_bytes: int
) -> None:
    session: Any = SimpleNamespace(
        sparkContext=SimpleNamespace(master=master, defaultParallelism=cores)
    )
    engine = SparkEngine(session)
    assert (engine.window_bytes, engine.driver_bytes) == (window_bytes, driver_bytes)
    assert SparkEngine(session, driver_bytes=7).driver_bytes == 7


def test_targets_and_options_that_spark_can_not_have(
    spark: Any, made: MadeDirectory, tmp_path: Path
) -> None:
    made.commit(1200, THINGS.relation(), testing.insert(THINGS, [1, "a"]))
    with expect_error(code="bad_option"):
        sync(spark, target=f"duckdb:{tmp_path / 'a.duckdb'}", segments=made.directory)
    assert not (tmp_path / "a.duckdb").exists()
    with expect_error(code="bad_option", parameter="keep"):
        sync(spark, target=tmp_path / "lake", segments=made.directory, keep="state", until="now")
    with expect_error(code="bad_option"):
        SparkEngine(spark, driver_bytes=-1)
    with pytest.raises(TypeError, match="driver_bytes"):
        SparkEngine(spark, driver_bytes=1.5)  # type: ignore[arg-type]
    assert repr(SparkEngine(spark)) == "SparkEngine('local[2]')"


@pytest.mark.slow
def test_object_storage_by_executors(spark: Any, made: MadeDirectory, tmp_path: Path) -> None:
    pytest.importorskip("moto")
    from deltalake import DeltaTable
    from pyarrow import fs

    made.wait(THINGS, 1000)
    made.copy(THINGS, 1100, [[1, "a"], [2, "b"]])
    made.commit(1200, THINGS.relation(), testing.update(THINGS, [2, "B"]))
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
        storage = {
            "AWS_ACCESS_KEY_ID": KEY_ID, "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1", "AWS_ENDPOINT_URL": endpoint, "AWS_ALLOW_HTTP": "true",
        }  # fmt: skip
        given: dict[str, Any] = {
            "target": "s3://bucket/lake", "segments": made.directory, "until": "now",
            "storage_options": storage, "driver_bytes": 0,
        }  # fmt: skip
        assert sync(spark, **given).tables == {"public.things": 3}
        made.commit(1300, THINGS.relation(), testing.delete(THINGS, [1, None], "K"))
        assert sync(spark, **given).tables == {"public.things": 1}
        state = DeltaTable("s3://bucket/lake/state/public.things", storage_options=storage)
        assert state.to_pyarrow_table().to_pylist() == [{"id": 2, "note": "B"}]
        server.stdin.close()
        server.wait()
        made.commit(1400, THINGS.relation(), testing.insert(THINGS, [3, "c"]))
        with pytest.raises(RetryableError) as refused:
            sync(spark, **given)
    assert SECRET not in str(refused.value)
    assert KEY_ID not in str(refused.value)
