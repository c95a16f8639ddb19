"""Tables that `apply.sync` keeps up to date with a server's; the truth is what SELECT says."""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import duckdb
import pytest
from support.expected_errors import expect_error
from support.targets.synced_database import Synced
from support.targets.synced_tables import TABLES, DuckdbTables
from support.waiting import wait_until

import pgoutput_fast as pf
from pgoutput_fast import apply, cli
from pgoutput_fast.apply.options import TargetOptions
from pgoutput_fast.apply.synchronize import open_target
from pgoutput_fast.changelog.consumers import consumers
from pgoutput_fast.changelog.requests import request_copy
from pgoutput_fast.replication.history import HistoryWatch
from pgoutput_fast.verify import verify

pytest.importorskip("duckdb")
pytest.importorskip("deltalake")

pytestmark = [
    pytest.mark.server, pytest.mark.usefixtures("quick_upkeep")
]  # fmt: skip


@pytest.mark.slow
def test_what_rows_go_through(synced: Synced) -> None:
    synced.sync()
    assert synced.compare("t", "id, v, n, d") == 50
    assert synced.compare("bag", "a, b") == 20
    synced.database.execute(
        "UPDATE t SET n = 0 WHERE id < 10",  # v is stored out of line, and is not sent
        "UPDATE t SET id = id + 1000 WHERE id BETWEEN 5 AND 15",
        "BEGIN; UPDATE t SET id = -1 WHERE id = 1; UPDATE t SET id = 1 WHERE id = 2;"
        " UPDATE t SET id = 2 WHERE id = -1; COMMIT",
        "DELETE FROM t WHERE id > 40 AND id < 45",
        "DELETE FROM t WHERE id = 30; INSERT INTO t VALUES (30, 'again', 1, 'x')",
        "UPDATE bag SET b = 'u' WHERE a = 1",
        "DELETE FROM bag WHERE ctid IN (SELECT ctid FROM bag WHERE a = 2 LIMIT 1)",
        "INSERT INTO bag VALUES (7, NULL), (7, NULL)",
    )
    assert synced.sync().stale == {}
    synced.compare("t", "id, v, n, d")
    synced.compare("bag", "a, b")
    synced.database.execute("TRUNCATE t, bag", "INSERT INTO t VALUES (1, 'new', 2, 'y')")
    synced.sync()
    assert synced.compare("t", "id, v, n, d") == 1
    assert synced.tables.state("public.bag").num_rows == 0
    progress = synced.tables.progress().values()
    assert {row["table"] for row in progress} == {"t", "bag"}
    assert len({row["lsn"] for row in progress}) == 1


@pytest.mark.slow
def test_a_key_in_place_of_one_that_is_equal(synced: Synced) -> None:
    """The server tells an update of 0 to -0 as one of the key."""
    synced.database.execute(
        "CREATE TABLE equals (k float8 PRIMARY KEY, v text)",
        "INSERT INTO equals VALUES (0, 'a'), (7, 'b')",
    )
    synced.sync()
    for told in (
        "UPDATE equals SET k = '-0', v = 'c' WHERE k = 0",
        "UPDATE equals SET k = 0 WHERE k = 0",
        "UPDATE equals SET k = '-0', v = NULL WHERE k = 0; UPDATE equals SET k = -7 WHERE k = 7",
        "DELETE FROM equals WHERE k = 0",
        "INSERT INTO equals VALUES ('-0', 'd')",
        "DELETE FROM equals WHERE k = 0; INSERT INTO equals VALUES (0, 'e')",
    ):
        synced.database.execute(told)
        assert synced.sync(on_error="stop").stale == {}
        truth = synced.database.execute("SELECT k, v FROM equals")
        # As text, as here too 0 is equal to -0.
        assert sorted(map(repr, synced.rows("public.equals", "k", "v"))) == sorted(map(repr, truth))


@pytest.mark.slow
def test_a_new_column_of_a_type_of_ones_own(synced: Synced) -> None:
    """What older rows have in it is decoded by what was known of the type at that time."""
    synced.database.execute("CREATE TYPE place AS (name text, at float8[], mood text)")
    synced.sync()
    synced.database.execute(
        "ALTER TABLE t ADD spot place DEFAULT ROW('x', '{1.5,NULL}', NULL)::place",
        "INSERT INTO t VALUES (51, 'new', 1, 'x', ROW(NULL, NULL, 'glad'))",
        "UPDATE t SET n = 7 WHERE id = 2",
    )
    synced.sync()
    found = dict(synced.rows("public.t", "id", "spot"))
    default = {"name": "x", "at": [1.5, None], "mood": None}
    assert found.pop(51) == {"name": None, "at": None, "mood": "glad"}
    assert found == dict.fromkeys(range(1, 51), default)


@pytest.mark.slow
def test_columns_that_change_names_with_each_other(synced: Synced) -> None:
    synced.database.execute("ALTER TABLE t ADD w text DEFAULT 'w'")
    synced.sync()
    synced.database.execute(
        "INSERT INTO t VALUES (100, 'v', 1, 'd', 'w')",
        "ALTER TABLE t RENAME v TO x; ALTER TABLE t RENAME w TO v; ALTER TABLE t RENAME x TO w",
        "INSERT INTO t VALUES (101, 'first', 1, 'd', 'last')",
    )
    synced.settle()
    assert synced.compare("t", "id, v, w") == 52


@pytest.mark.slow
def test_names_that_differ_in_case_from_former_ones(synced: Synced, tmp_path: Path) -> None:
    """Neither DuckDB nor Delta has both in one table, so that change tables go on in another."""
    run = synced.database.execute
    run(
        'CREATE TABLE k (id int PRIMARY KEY, "A" int, a int)', "INSERT INTO k VALUES (1, 10, 20)",
        "CREATE TABLE q (id int, c int)", "ALTER TABLE q REPLICA IDENTITY FULL",
        "INSERT INTO q VALUES (1, 5)",
    )  # fmt: skip
    synced.sync()
    run("ALTER TABLE t RENAME d TO \"D\"", "UPDATE t SET \"D\" = 'new' WHERE id < 4",
        'ALTER TABLE q RENAME c TO "C"', 'UPDATE q SET "C" = 6',
        'ALTER TABLE k DROP "A"', "UPDATE k SET a = 21")  # fmt: skip
    synced.settle()
    assert synced.compare("t", "id, v, n, D") == 50
    assert synced.rows("public.q", "id", "C") == [(1, 6)]
    progress = {row["stored"]: row for row in synced.tables.progress().values()}
    assert synced.rows("public.k", "id", "a_") == [(1, 21)]
    versions = {name: progress[f"public.{name}"]["version"] for name in ("t", "k", "q")}
    assert versions == {"t": 2, "k": 1, "q": 2}
    assert set(synced.tables.changes("public.t", 2).column("op").to_pylist()) >= {"update"}
    # A new copy has the name that is free now.
    (relation_id,) = (one for one, row in synced.tables.progress().items() if row["table"] == "k")
    directory = open_target(synced.tables.target, TargetOptions()).directory(None)
    request_copy(directory, relation_id, ["public", "k"], "a test asks")
    run("UPDATE k SET a = 22")
    synced.settle()
    run("INSERT INTO k VALUES (2, 23)")
    synced.settle()
    assert synced.rows("public.k", "id", "a") == [(1, 22), (2, 23)]
    assert synced.tables.progress()[relation_id]["version"] == 2
    report = verify(synced.database.dsn, publications=["p"], target=synced.tables.target)
    assert {one.name: one.state for one in report.tables} == dict.fromkeys(
        ("bag", "k", "q", "t"), "equal"
    )


@pytest.mark.slow
def test_names_inside_of_composites(synced: Synced) -> None:
    """They get names that every reader tells apart, as those of columns."""
    synced.database.execute(
        'CREATE TYPE inner_ AS ("Y" text, y int)',
        'CREATE TYPE pair AS ("X" int, x inner_[], "b.c" int, b inner_)',
        'CREATE TABLE k (id int PRIMARY KEY, a pair, "a.b" int, "A" pair, "a.element" int)',
        """INSERT INTO k VALUES (1, (1, '{"(l,2)"}', 3, ('m', 4)), 5, NULL, 6)""",
    )
    synced.sync()
    synced.database.execute(
        """INSERT INTO k VALUES (2, NULL, 7, (8, '{}', NULL, ('n', 9)), NULL)""",
        """UPDATE k SET a = (1, '{"(l,20)"}', 3, ('m', 40)) WHERE id = 1""",
    )
    synced.sync()
    inner = {"X": 1, "x_": [{"Y": "l", "y_": 20}], "b.c": 3, "b_": {"Y": "m", "y_": 40}}
    other = {"X": 8, "x_": [], "b.c": None, "b_": {"Y": "n", "y_": 9}}
    assert synced.rows("public.k", "id", "a", "a_b", "A_", "a_element") == [
        (1, inner, 5, None, 6), (2, None, 7, other, None)
    ]  # fmt: skip
    assert synced.tables.changes("public.k").num_rows >= 4
    synced.database.execute(
        'ALTER TYPE pair DROP ATTRIBUTE "X"', "UPDATE k SET id = 3 WHERE id = 2"
    )
    synced.settle()
    report = verify(synced.database.dsn, publications=["p"], target=synced.tables.target)
    assert {one.state for one in report.tables} == {"equal"}, report


@pytest.mark.slow
def test_a_target_that_is_refused_leaves_no_slot(synced: Synced, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    (tmp_path / "file.duckdb").write_text("something else")
    for target, code in (
        (str(tmp_path / "other"), "not_ours"),
        (f"duckdb:{tmp_path / 'file.duckdb'}", "io_failed"),
    ):
        with expect_error(code=code):
            synced.sync(target=target, iceberg=None, changes=None)
    busy = f"duckdb:{tmp_path / 'busy.duckdb'}"
    with contextlib.closing(open_target(busy, TargetOptions()).target) as other:
        other.claim()
        with expect_error(code="in_use"):
            synced.sync(target=busy, iceberg=None, changes=None)
    nowhere = {"type": "sql", "uri": f"sqlite:///{tmp_path}/none/catalogue.db"}
    with expect_error(code="io_failed"):
        synced.sync(target=str(tmp_path / "iceberg"), iceberg=nowhere, changes=None)
    query = "SELECT count(*) FROM pg_replication_slots WHERE database = current_database()"
    assert synced.database.execute(query) == [(0,)]
    for target in ("postgres:x", "gs://bucket/x", "tables.duckdb", f"duckdb:/{tmp_path}/x"):
        with expect_error(code="bad_option", parameter="target"):
            synced.sync(target=target, iceberg=None, changes=None)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [True, False])
def test_a_state_table_that_was_deleted(synced: Synced, tmp_path: Path, changes: bool) -> None:
    """It is copied again, whether changes come for it or not, and the others go on."""
    synced.sync()
    if isinstance(synced.tables, DuckdbTables):
        with contextlib.closing(duckdb.connect(str(synced.tables.path))) as connection:
            connection.execute('DROP TABLE state."public.t"')
    else:
        shutil.rmtree(tmp_path / "lake" / "state" / "public.t")
    if changes:
        synced.database.execute(
            "UPDATE t SET n = 0 WHERE id = 1", "INSERT INTO bag VALUES (9, 'x')"
        )
    with expect_error(code="stale", table="public.t"):
        synced.sync(on_error="stop")
    synced.settle()
    assert synced.settle() == []
    assert synced.compare("t", "id, v, n, d") == 50
    synced.compare("bag", "a, b")


@pytest.mark.slow
def test_a_target_that_goes_away_under_a_sync(synced: Synced, tmp_path: Path) -> None:
    """As with its disk; one that runs does not make another one in its place."""
    place = Path(str(synced.tables.given["target"]).removeprefix("duckdb:"))
    gone = tmp_path / "gone"

    def note(progress: apply.SyncProgress) -> None:
        if progress.windows and not gone.exists():
            place.rename(gone)
            synced.database.execute("INSERT INTO t (id, d) VALUES (60, 'd')")

    with expect_error(
        code="missing_path" if "duckdb:" in str(synced.tables.given["target"]) else "io_failed"
    ):
        synced.sync(until=None, progress=note)
    if place.is_dir():  # what was begun of a file, or what a catalogue elsewhere counts on
        if "iceberg" in synced.tables.given:
            shutil.copytree(place, gone, dirs_exist_ok=True)
        shutil.rmtree(place)
    assert not place.exists()
    gone.rename(place)
    assert synced.sync().stale == {}
    assert synced.compare("t", "id, v, n, d") == 51


@pytest.mark.slow
def test_a_table_without_columns_gets_one(synced: Synced) -> None:
    """Neither DuckDB nor Parquet has such a table: it gets a column, which is null."""
    synced.database.execute("CREATE TABLE nothing ()", "INSERT INTO nothing DEFAULT VALUES")
    synced.sync()
    synced.database.execute("INSERT INTO nothing DEFAULT VALUES")
    assert synced.sync().stale == {}
    assert synced.rows("public.nothing", "no columns") == [(None,), (None,)]
    synced.database.execute("ALTER TABLE nothing ADD x int", "INSERT INTO nothing VALUES (3)")
    assert len(synced.settle()) == 1
    assert synced.rows("public.nothing", "x") == [(3,), (None,), (None,)]


@pytest.mark.slow
def test_a_catalogue_that_is_read_late_is_waited_for(
    make_database: Any, server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The capture does not wait for it, and no table is copied again for that."""
    database = make_database(server)
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, v text)",
        "INSERT INTO t VALUES (1, 'a')",
        "CREATE PUBLICATION p FOR ALL TABLES",
    )
    synced = Synced(database, TABLES["duckdb"](tmp_path))
    synced.sync()
    look = HistoryWatch._look

    def late(watch: HistoryWatch) -> None:
        time.sleep(1)
        look(watch)

    monkeypatch.setattr(HistoryWatch, "_look", late)
    database.execute("ALTER TABLE t ADD c int DEFAULT 5", "INSERT INTO t VALUES (2, 'b', 6)")
    assert synced.sync().stale == {}
    assert synced.compare("t", "id, v, c") == 2
    assert [row["copy_lsn"] < row["lsn"] for row in synced.tables.progress().values()] == [True]
    ops = synced.tables.changes("public.t").column("op").to_pylist()
    assert sorted(ops) == ["insert", "read", "truncate"]


@pytest.mark.slow
def test_a_table_that_was_rewritten_before_another_one_was_altered(synced: Synced) -> None:
    """Between the two, the catalogue was read: the first look at a column is not the one before."""
    synced.sync()
    synced.database.execute(
        "ALTER TABLE t ADD c int DEFAULT 5", "VACUUM FULL t", "ALTER TABLE t ALTER c DROP DEFAULT"
    )
    reasons = [*synced.sync().stale.values()]
    synced.database.execute("ALTER TABLE bag ADD y int")
    synced.sync()
    synced.database.execute("UPDATE t SET n = 0 WHERE id = 1", "INSERT INTO bag VALUES (8)")
    assert len(reasons + synced.settle()) == 1
    assert synced.compare("t", "id, v, n, d, c") == 50
    synced.compare("bag", "a, b, y")
    # What was not rewritten needs no copy, whatever was altered since.
    synced.database.execute("ALTER TABLE t ADD e int")
    synced.sync()
    synced.database.execute("ALTER TABLE bag ADD x int")
    synced.sync()
    synced.database.execute("UPDATE t SET n = 1 WHERE id = 1")
    assert synced.settle() == []
    assert synced.compare("t", "id, v, n, d, c, e") == 50


@pytest.mark.everyday("duckdb")
def test_snapshots_that_only_a_later_call_takes(synced: Synced) -> None:
    """The capture requests them while the sync begins, which must not come first."""
    synced.sync(snapshot="never")
    synced.database.execute("INSERT INTO bag VALUES (7)", "UPDATE t SET n = 9 WHERE id = 3")
    with expect_error(code="no_snapshot"):
        synced.sync(snapshot="never")
    assert synced.sync().stale == {}
    synced.compare("t", "id, v, n, d")
    synced.compare("bag", "a, b")


@pytest.mark.everyday("delta")
def test_a_table_that_is_dropped_and_made_again(synced: Synced) -> None:
    synced.sync()
    ((old,),) = synced.database.execute("SELECT 't'::regclass::oid::bigint")
    synced.database.execute(
        "DROP TABLE t", "CREATE TABLE t (id text PRIMARY KEY)", "INSERT INTO t VALUES ('a')"
    )
    synced.settle()
    assert synced.compare("t", "id") == 1
    # What the former one had stays aside.
    assert synced.tables.state(f"public.t~{old}").num_rows == 50


@pytest.mark.slow
def test_partitions_without_the_replica_identity_of_their_root(synced: Synced) -> None:
    """What the server calls a whole old row has the partition's key alone, and NULL beside it."""
    synced.database.execute(
        "CREATE TABLE parts (id int, k int, big text, n int, PRIMARY KEY (id, k)) "
        "PARTITION BY LIST (k)",
        "CREATE TABLE one PARTITION OF parts FOR VALUES IN (1)",
        "CREATE TABLE other PARTITION OF parts FOR VALUES IN (2)",
        "ALTER TABLE one ALTER big SET STORAGE EXTERNAL",
        "ALTER TABLE other ALTER big SET STORAGE EXTERNAL",
        "ALTER TABLE parts REPLICA IDENTITY FULL",
        "ALTER TABLE other REPLICA IDENTITY FULL",
        "INSERT INTO parts SELECT g, 1 + g % 2, repeat(g::text, 3000), g "
        "FROM generate_series(1, 9) g",
        "ALTER PUBLICATION p SET (publish_via_partition_root)",
    )
    synced.settle()
    synced.database.execute(
        "UPDATE parts SET id = id + 20 WHERE id IN (1, 2, 3)",
        "UPDATE parts SET n = -n WHERE id IN (4, 5)",
        "UPDATE parts SET big = NULL, id = id + 20 WHERE id IN (6, 7)",
        "DELETE FROM parts WHERE id > 7 AND id < 20",
    )
    assert synced.sync().stale == {}
    assert synced.compare("parts", "id, k, big, n") == 7


@pytest.mark.slow
def test_a_replica_identity_that_changes(synced: Synced) -> None:
    synced.sync()
    synced.database.execute(
        "UPDATE t SET n = 1 WHERE id < 4",
        "ALTER TABLE t ALTER n SET NOT NULL, ADD CONSTRAINT k UNIQUE (n, id)",
        "ALTER TABLE t REPLICA IDENTITY USING INDEX k",
        "UPDATE t SET n = 2, id = id + 500 WHERE id < 4",
        "ALTER TABLE t REPLICA IDENTITY FULL",
        "UPDATE t SET d = 'full' WHERE id < 9",
        "DELETE FROM t WHERE id > 45 AND id < 400",
    )
    synced.settle()
    synced.compare("t", "id, v, n, d")


@pytest.mark.everyday("duckdb")
def test_tables_that_join_and_a_restart(synced: Synced, tmp_path: Path) -> None:
    """A sync that goes on while tables join."""
    stop = threading.Event()
    seen: list[apply.SyncProgress] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            synced.sync(until=None, stop=stop, progress=seen.append)
        except BaseException as error:  # noqa: BLE001 - it is told below
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        wait_until(
            lambda: failed or (seen and {"public.t", "public.bag"} <= seen[-1].tables.keys())
        )
        synced.database.execute(
            "CREATE TABLE later (id int PRIMARY KEY)",
            "INSERT INTO later SELECT generate_series(1, 9)",
        )
        wait_until(lambda: failed or seen[-1].tables.get("public.later"))
        synced.database.execute(
            "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots"
            f" WHERE slot_name = '{synced.options['slot']}'",
            "UPDATE t SET n = 7",
        )
        wait_until(lambda: failed or seen[-1].tables["public.t"] >= 100)
        with expect_error(code="in_use"):
            synced.sync()
        # Into another target, from the directory of the one that goes on.
        directory = Path(f"{synced.tables.path}.segments")
        (tmp_path / "other").mkdir()
        other = type(synced.tables)(tmp_path / "other")
        with expect_error(code="in_use"):
            synced.sync(directory=directory, **other.given)
        assert other.progress() == {}
        assert len(consumers(directory)) == 1
    finally:
        stop.set()
        thread.join(30)
    assert failed == []
    synced.sync()
    synced.compare("t", "id, v, n, d")
    assert synced.compare("later", "id") == 9


@pytest.mark.slow
def test_another_binary_than_before(synced: Synced) -> None:
    """Tables with money are copied again, in the form of the server's text; others go on."""
    synced.database.execute(
        "CREATE TABLE prices (id int PRIMARY KEY, v money, kind regtype[])",
        "INSERT INTO prices VALUES (1, '12.34', '{int4}')",
    )
    synced.sync(binary=True)
    synced.database.execute("INSERT INTO prices VALUES (2, '0.05', NULL)",
                            "INSERT INTO bag VALUES (8, 'x')")  # fmt: skip
    synced.sync(binary=True)
    columns = ("id", "v", "kind")
    assert synced.rows("public.prices", *columns) == [(1, "1234", ["23"]), (2, "5", None)]
    synced.database.execute("INSERT INTO prices VALUES (3, '7', '{text}')",
                            "INSERT INTO bag VALUES (9, 'y')")  # fmt: skip
    ended = synced.sync()
    assert [*ended.stale] == ["public.prices"] == [*ended.asked]
    assert synced.sync().stale == {}
    assert synced.rows("public.prices", *columns) == [
        (1, "$12.34", ["integer"]), (2, "$0.05", None), (3, "$7.00", ["text"])
    ]  # fmt: skip
    assert synced.compare("bag", "a, b") == 22
    versions = [
        {row["after"]["v"] for row in synced.tables.changes("public.prices", version).to_pylist()
         if row["after"]} for version in (1, 2)
    ]  # fmt: skip
    assert versions == [{"1234", "5"}, {"$12.34", "$0.05", "$7.00"}]


@pytest.mark.slow
@pytest.mark.parametrize("refused", ["change", "snapshot"])
def test_a_new_snapshot_ends_a_pause(refused: str, synced: Synced) -> None:
    """The row that is refused is not on the server any more, and its insert still waits."""
    synced.database.execute("CREATE TABLE days (id int PRIMARY KEY, day date)")
    if refused == "change":
        synced.sync()
    synced.database.execute("INSERT INTO days VALUES (1, 'infinity'), (2, '2020-01-02')")
    assert [*synced.sync().paused] == ["public.days"]
    synced.database.execute("DELETE FROM days WHERE id = 1")
    assert [*synced.sync().paused] == ["public.days"]
    directory = f"{synced.tables.path}.segments"
    assert cli.main(["snapshot", "--dir", directory, "--table", "public.days"]) == 0
    synced.sync()  # it has the snapshot made, and tried the table before that
    ended = synced.sync()
    assert (ended.paused, ended.stale) == ({}, {})
    assert synced.compare("days", "id, day") == 1
    synced.database.execute("INSERT INTO days VALUES (3, '2020-01-03')")
    synced.sync()
    assert synced.compare("days", "id, day") == 2


@pytest.mark.slow
def test_targets_and_directories_of_others(
    synced: Synced, make_database: Any, server: Any, tmp_path: Path
) -> None:
    synced.sync()
    other = make_database(server)
    other.execute("CREATE TABLE t (id int PRIMARY KEY)", "CREATE PUBLICATION p FOR TABLE t")
    with expect_error(code="another_history"):
        apply.sync(other.dsn, **{**synced.options, "slot": f"slot_{other.name}", "until": "now",
                                 "directory": tmp_path / "other"})  # fmt: skip
    # A new slot, whose changes begin later than those that the target has: copied anew.
    synced.database.execute("UPDATE t SET n = 9 WHERE id = 3")
    synced.sync(slot=f"slot_{synced.database.name}_2", directory=tmp_path / "second")
    synced.compare("t", "id, v, n, d")
    synced.database.execute("UPDATE t SET n = 10 WHERE id = 3")
    with expect_error(code="changes_missing", path=str(tmp_path / "third")):
        # This one begins now, without copies: what came between is in no directory of its own.
        synced.sync(directory=tmp_path / "third", snapshot="never", slot="slot_none",
                    create_slot=True)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "tables",
    [pytest.param(one, marks=[] if one == "delta" else pytest.mark.slow)
     for one in ("duckdb", "delta", "distributed")], indirect=True,
)  # fmt: skip
def test_keys_of_which_a_policy_makes_null(synced: Synced) -> None:
    """Several rows of a snapshot would be one to the changes that come."""
    database, policies = synced.database, pf.Policies(infinity="null")
    database.execute(
        "CREATE TABLE days (day date PRIMARY KEY, until date)",
        "INSERT INTO days VALUES ('2024-05-01', 'infinity'), ('infinity', NULL)",
    )
    with expect_error(code="null_key", table="public.days"):
        synced.sync(policies=policies, on_error="stop")
    assert synced.sync(policies=pf.Policies(infinity="text"), change_policies=True).stale == {}
    found = synced.rows("public.days", "day", "until")
    assert found == [("2024-05-01", "infinity"), ("infinity", None)]
