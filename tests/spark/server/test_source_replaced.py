"""Tables, slots and directories that are others than a query took them for.

What comes is right, or an error says what is wrong; nothing is lost, and nothing is there twice.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from support.expected_errors import expect_error
from support.postgres.replayed import change_of, replay
from support.postgres.servers import ImagedServer, execute, now
from support.sparks.source_queries import MODES, Queries
from support.targets.synced_tables import DeltaTables
from support.waiting import wait_until

import pgoutput_fast as pf
from pgoutput_fast.embedded import EmbeddedServer
from pgoutput_fast.replication import capture
from pgoutput_fast.spark.dataframes import published_table

pytest.importorskip("deltalake")

pytestmark = [
    pytest.mark.server, pytest.mark.spark, pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]  # fmt: skip


@pytest.fixture
def shop(pg18: EmbeddedServer, make_database: Callable[..., Any]) -> Any:
    database = make_database(pg18)
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, v text)",
        "INSERT INTO t SELECT g, 'v' || g FROM generate_series(1, 30) AS g",
        "CREATE PUBLICATION p FOR ALL TABLES",
    )
    return database


def rows(database: Any, table: str = "t") -> list[Any]:
    return sorted(database.execute(f"SELECT * FROM {table}"), key=repr)


def make_anew(database: Any) -> None:
    """Drop the slot, and make another one of its name; what is written meanwhile is in neither."""
    slot = f"slot_{database.name}"
    database.execute(
        f"SELECT pg_drop_replication_slot('{slot}')",
        "INSERT INTO t SELECT g, 'between' FROM generate_series(500, 509) AS g",
        "UPDATE t SET v = 'between' WHERE id = 1", "DELETE FROM t WHERE id = 2",
        f"SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')",
        "INSERT INTO t VALUES (600, 'behind')",
    )  # fmt: skip


# --- tables --------------------------------------------------------------------------------------


def test_a_table_that_is_renamed_under_a_query(spark: Any, shop: Any, tmp_path: Path) -> None:
    """A query goes on with the table, and finds it under its new name and its old one."""
    queries = Queries(spark, shop, tmp_path)
    running = queries.start()
    try:
        wait_until(lambda: len(queries.changes()) == 31 or running.exception())
        shop.execute("UPDATE t SET v = 'before' WHERE id = 1", "ALTER TABLE t RENAME TO t2",
                     "UPDATE t2 SET v = 'behind' WHERE id = 2")  # fmt: skip
        wait_until(lambda: len(queries.changes()) == 33 or running.exception())
        assert running.exception() is None
    finally:
        running.stop()
    shop.execute("DELETE FROM t2 WHERE id = 3")
    assert replay(queries.run(table="public.t2")) == rows(shop, "t2")
    # Another table has the name.
    shop.execute("CREATE TABLE t (id int PRIMARY KEY, v text)", "INSERT INTO t VALUES (1, 'new')",
                 "INSERT INTO t2 VALUES (1000, 'x')")  # fmt: skip
    found = queries.run(table="public.t2")
    assert replay(found) == rows(shop, "t2")
    assert replay(queries.run("new", table="public.t", consumer="new")) == rows(shop)


def test_a_renamed_table_in_records(spark: Any, shop: Any, tmp_path: Path) -> None:
    """Its records go to the topic of the name that it has."""
    queries = Queries(spark, shop, tmp_path, mode="envelope", topicPrefix="s")
    running = queries.start()

    def records() -> list[dict[str, Any]]:
        return [row for batch in [*queries.batches.values()] for row in batch]

    try:
        wait_until(lambda: len(records()) == 31 or running.exception())
        shop.execute("UPDATE t SET v = 'before' WHERE id = 1", "ALTER TABLE t RENAME TO t2",
                     "UPDATE t2 SET v = 'behind' WHERE id = 2")  # fmt: skip
        wait_until(lambda: len(records()) == 33 or running.exception())
    finally:
        running.stop()
    shop.execute("DELETE FROM t2 WHERE id = 3")
    queries.run()
    ordered = sorted(records(), key=lambda row: (row["commit_lsn"], row["seq"]))
    assert [row["topic"] for row in ordered] == ["s.public.t"] * 32 + ["s.public.t2"] * 2
    assert replay(map(change_of, ordered)) == rows(shop, "t2")


def test_a_table_that_is_renamed_under_a_sync(spark: Any, shop: Any, tmp_path: Path) -> None:
    from pgoutput_fast.spark import sync

    tables, stop = DeltaTables(tmp_path), threading.Event()
    seen: list[Any] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            sync(spark, shop.dsn, slot=f"slot_{shop.name}", publications=["p"], stop=stop,
                 target=tables.target, driver_bytes=0, max_delay=0.05, interval=0.05,
                 progress=seen.append)  # fmt: skip
        except BaseException as error:  # noqa: BLE001 - it is told below
            failed.append(error)

    def changes() -> int:
        return sum(seen[-1].tables.values()) if seen else 0

    thread = threading.Thread(target=run)
    thread.start()
    try:
        wait_until(lambda: failed or changes() == 30)
        shop.execute("UPDATE t SET v = 'before' WHERE id = 1", "ALTER TABLE t RENAME TO t2",
                     "UPDATE t2 SET v = 'behind' WHERE id = 2")  # fmt: skip
        wait_until(lambda: failed or changes() == 32)
    finally:
        stop.set()
        thread.join(60)
    assert failed == []
    ((relation_id, held),) = tables.progress().items()
    assert (held["table"], held["stored"], held["stale"]) == ("t2", "public.t2", None), relation_id
    found = [tuple(row.values()) for row in tables.state("public.t2").to_pylist()]
    assert sorted(found, key=repr) == rows(shop, "t2")
    assert replay(tables.changes("public.t2").to_pylist()) == rows(shop, "t2")


def test_another_table_gets_the_name_while_a_query_runs(
    spark: Any, shop: Any, tmp_path: Path
) -> None:
    queries = Queries(spark, shop, tmp_path)
    running = queries.start()
    try:
        wait_until(lambda: len(queries.changes()) == 31 or running.exception())
        shop.execute("ALTER TABLE t RENAME TO t2", "CREATE TABLE t (id int PRIMARY KEY, v text)",
                     "INSERT INTO t VALUES (1, 'new')", "DELETE FROM t2 WHERE id = 1")  # fmt: skip
        wait_until(lambda: len(queries.changes()) == 32 or running.exception())
    finally:
        running.stop()
    failed = running.exception()
    if failed is not None:  # the query says that the name is another table's now
        assert "another_history" in str(failed)
    else:
        assert replay(queries.changes()) == rows(shop, "t2")
    # Whoever starts it again asks for another table than the checkpoint's, which is refused.
    with expect_error(StreamingQueryException, code="another_history", table="public.t"):
        queries.run()
    queries.run(table="public.t2")
    assert replay(queries.changes()) == rows(shop, "t2")


@pytest.mark.parametrize("mode", ["table", "envelope"])
def test_a_stream_of_a_published_table_without_changes(
    spark: Any, shop: Any, tmp_path: Path, mode: str
) -> None:
    """It has its columns, and no rows, whether its directory is there already or not."""
    shop.execute("CREATE TABLE quiet (id int PRIMARY KEY, n numeric(10, 2))")
    tables = None if mode == "table" else "public.quiet"
    queries = Queries(
        spark, shop, tmp_path, table="quiet", mode=mode, snapshot="never", tables=tables
    )
    for _ in range(2):
        frame = queries.load()
        assert queries.run() == []
        if mode == "table":
            assert frame.schema["after"].dataType.simpleString() == "struct<id:int,n:decimal(10,2)>"
        shop.execute("INSERT INTO t SELECT max(id) + 1 FROM t")
    shop.execute("INSERT INTO quiet VALUES (1, 2.5)")
    ((id_, n),) = replay(queries.run())
    assert (id_, float(n)) == (1, 2.5)


@pytest.mark.parametrize("name", ["quiet", "public.quite", "public.Quiet"])
def test_a_misspelled_table_of_a_query_is_told_with_one_like_it(shop: Any, name: str) -> None:
    shop.execute("CREATE TABLE quiet (id int PRIMARY KEY)")
    with expect_error(code="no_table", table=name):
        published_table(shop.dsn, ["p"], name, pf.Policies(), binary=False)


# --- slots and checkpoints -----------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["manifest"])
def test_a_slot_that_was_made_again(spark: Any, shop: Any, tmp_path: Path, mode: str) -> None:
    """An old checkpoint is refused with it, whichever directory it is given."""
    queries = Queries(spark, shop, tmp_path, mode=mode)
    queries.run()
    shop.execute("INSERT INTO t VALUES (100, 'x')")
    assert replay(queries.run()) == rows(shop)
    before = queries.changes()
    make_anew(shop)
    with expect_error(StreamingQueryException, code="changes_missing"):
        queries.run()
    other = {"segments": str(tmp_path / "other"), "adoptSlot": "true"}
    for _ in range(2):
        with expect_error(StreamingQueryException, code="changes_missing"):
            queries.run(**other)
    assert queries.changes() == before
    # With a new checkpoint all comes, and each change once.
    assert replay(queries.run("new", **other)) == rows(shop)


@pytest.mark.parametrize("mode", ["envelope"])
def test_an_old_checkpoint_and_a_slot_of_another_name(
    spark: Any, shop: Any, tmp_path: Path, mode: str
) -> None:
    queries = Queries(spark, shop, tmp_path, mode=mode)
    queries.run()
    before = queries.changes()
    shop.execute("INSERT INTO t VALUES (100, 'x')")
    name = f"slot_{shop.name}_2"
    with expect_error(StreamingQueryException, code="another_history"):
        queries.run(slot=name)  # the directory is of the other one
    with expect_error(StreamingQueryException, code="another_history", parameter="slot"):
        queries.run(slot=name, segments=str(tmp_path / "other"))
    assert queries.changes() == before
    assert replay(queries.run()) == rows(shop)
    found = queries.run("new", slot=name, segments=str(tmp_path / "other"))
    assert replay(found) == rows(shop)


@pytest.mark.parametrize("mode", ["table"])
def test_a_directory_that_is_lost(spark: Any, shop: Any, tmp_path: Path, mode: str) -> None:
    """What the slot was told to be on disk does not come again: an old checkpoint is refused."""
    queries = Queries(spark, shop, tmp_path, mode=mode)
    queries.run()
    shop.execute("INSERT INTO t VALUES (100, 'x')")
    queries.run()
    before = queries.changes()
    shutil.rmtree(tmp_path / "segments")
    shop.execute("INSERT INTO t VALUES (101, 'x')")
    with expect_error(StreamingQueryException, code="not_ours"):
        queries.run()
    # The slot is where the checkpoint is: it goes on behind a new copy.
    assert replay(queries.run(adoptSlot="true")) == rows(shop)
    found = queries.changes()
    assert len(found) > len(before)
    assert [one for one in found if one in before] == before
    assert replay(queries.run("new", adoptSlot="true")) == rows(shop)


@pytest.mark.parametrize("mode", MODES)
def test_a_new_checkpoint_and_an_old_target(
    spark: Any, shop: Any, tmp_path: Path, mode: str
) -> None:
    """It begins with the newest snapshot, behind a truncate, so that no row is there twice."""
    queries = Queries(spark, shop, tmp_path, mode=mode)
    queries.run()
    shop.execute("UPDATE t SET v = 'new' WHERE id = 1", "DELETE FROM t WHERE id = 2")
    first = queries.run()
    shop.execute("INSERT INTO t VALUES (100, 'x')")
    second = queries.run("new")
    assert replay(second) == rows(shop)
    # What the target has already comes again under its place, by which it is known.
    known = {(one["commit_lsn"], one["seq"]): one for one in first}
    again = [one for one in second if (one["commit_lsn"], one["seq"]) in known]
    assert len(again) == len(known) == 33
    assert all(known[one["commit_lsn"], one["seq"]] == one for one in again)
    assert len(second) == 34


def test_a_target_and_another_directory(spark: Any, shop: Any, tmp_path: Path) -> None:
    """Tables go on with a new directory only where no change can be missing."""
    from pgoutput_fast.spark import sync

    tables = DeltaTables(tmp_path)

    def run(**options: Any) -> Any:
        given: dict[str, Any] = {
            "slot": f"slot_{shop.name}", "publications": ["p"], "target": tables.target,
            "driver_bytes": 0, "until": "now", "max_delay": 0.05, **options,
        }  # fmt: skip
        return sync(spark, shop.dsn, **given)

    def check() -> None:
        found = [tuple(row.values()) for row in tables.state("public.t").to_pylist()]
        assert sorted(found, key=repr) == rows(shop)
        assert replay(tables.changes("public.t").to_pylist()) == rows(shop)

    run()
    shop.execute("UPDATE t SET v = 'new' WHERE id = 1")
    run()
    check()
    # The directory is lost, and the slot is where it was.
    shutil.rmtree(tmp_path / "lake.segments")
    shop.execute("INSERT INTO t VALUES (100, 'x')")
    with expect_error(code="not_ours"):
        run()
    run(adopt_slot=True)
    check()
    # The slot is another one, of the same name.
    make_anew(shop)
    with expect_error(code="changes_missing"):
        run()
    run(directory=tmp_path / "second", adopt_slot=True)
    check()
    # And one of another name.
    shop.execute("DELETE FROM t WHERE id = 3")
    run(directory=tmp_path / "third", slot=f"slot_{shop.name}_3")
    check()


@pytest.mark.parametrize(
    ("mode", "again"), [("table", False), ("envelope", False), ("manifest", True)]
)
def test_a_checkpoint_newer_than_a_directory_that_was_put_back(
    spark: Any, tmp_path: Path, again: bool, mode: str
) -> None:
    """Its newest transaction is not there, also where a batch comes again.

    The server was put back too, and a capture has gone on meanwhile.
    """
    segments = tmp_path / "segments"
    with ImagedServer(segments) as server:
        database = SimpleNamespace(dsn=server.dsn(), name="x")
        queries = Queries(spark, database, tmp_path, mode=mode)
        assert len(queries.run()) == 10
        server.keep()
        statements = ["INSERT INTO t VALUES (100)", "DELETE FROM t WHERE id = 1"]
        execute(server, *statements)
        assert len(queries.run()) == 12
        server.go_back()
        capture(server.dsn(), slot="slot_x", publications=["p"], directory=segments,
                until_lsn=now(server))  # fmt: skip
        if again:
            max((tmp_path / "checkpoint" / "commits").glob("[0-9]*"), key=by_number).unlink()
        before = dict(queries.batches)
        with expect_error(StreamingQueryException, code="another_history"):
            queries.run()
        assert queries.batches == before
        found = queries.run("new", consumer="new")
        assert sorted(replay(found)) == execute(server, "SELECT id FROM t ORDER BY id")


def by_number(path: Path) -> int:
    return int(path.name)
