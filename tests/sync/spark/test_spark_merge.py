"""State tables by Spark's MERGE, with a real server: what SELECT says is the truth."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from support.expected_errors import expect_error
from support.targets.synced_tables import DeltaTables
from support.values.type_values import TYPES, VALUES

import pgoutput_fast as pf
from pgoutput_fast import apply
from pgoutput_fast.apply import delta_target
from pgoutput_fast.embedded import EmbeddedServer
from pgoutput_fast.spark import SparkEngine
from pgoutput_fast.spark import _merges as merges
from pgoutput_fast.spark._staged_files import STAGED
from pgoutput_fast.verify import verify

pytest.importorskip("deltalake")

pytestmark = [
    pytest.mark.server, pytest.mark.slow, pytest.mark.spark, pytest.mark.delta_spark
]  # fmt: skip


LONG = "repeat('é', 3000)"
NONE_FAR = "NOT EXISTS (SELECT FROM t AS o WHERE o.id > 900)"
FREE_BELOW = "id > 1000 AND id - 1000 NOT IN (SELECT id FROM t)"


class Killed(BaseException):
    """The process ends here."""


class Synced:
    """A database, and Delta tables that have its tables."""

    def __init__(self, database: Any, root: Path, spark: Any) -> None:
        self.database = database
        self.spark = spark
        self.tables = DeltaTables(root)
        self.options: dict[str, Any] = {
            "slot": f"slot_{database.name}", "publications": ["p"], "target": self.tables.target,
            "until": "now", "max_delay": 0.05, "interval": 0.05,
        }  # fmt: skip

    def sync(self, how: str = "spark", **options: Any) -> apply.SyncProgress:
        """By Spark's MERGE ("spark", or "driver" if the driver folds), by tasks, or here."""
        engine = {
            "spark": lambda: SparkEngine(self.spark, driver_bytes=0, merge_by="spark"),
            "driver": lambda: SparkEngine(self.spark, merge_by="spark"),
            "task": lambda: SparkEngine(self.spark, driver_bytes=0, merge_by="task"),
            "local": lambda: None,
        }[how]()
        return apply.sync(self.database.dsn, engine=engine, **{**self.options, **options})

    def compare(self, *, tables: int = 1) -> None:
        """All tables are the server's, value by value."""
        report = verify(self.database.dsn, publications=["p"], target=self.tables.target)
        found = [(one.name, one.state) for one in report.tables]
        assert len(found) == tables
        assert {state for _, state in found} == {"equal"}, report

    def changes(self, table: str = "public.t") -> list[tuple[int, int]]:
        rows = self.tables.changes(table).select(["commit_lsn", "seq"]).to_pylist()
        found = sorted((row["commit_lsn"], row["seq"]) for row in rows)
        assert len({*found}) == len(found)
        return found

    def commits(self, table: str = "public.t") -> list[str]:
        """Who has made the newest commits of a state table: a task or Spark."""
        log = self.tables.path / "state" / table / "_delta_log"
        found = []
        for path in sorted(log.glob("*.json")):
            actions = [json.loads(line) for line in path.read_text().splitlines()]
            (info,) = (one["commitInfo"] for one in actions if "commitInfo" in one)
            found.append("spark" if info["operation"] == "MERGE" else "task")
        return found


@pytest.fixture
def synced(
    pg18: EmbeddedServer, make_database: Callable[..., Any], tmp_path: Path, delta_spark: Any
) -> Synced:
    database = make_database(pg18)
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, v text, n numeric(6, 2), at timestamp)",
        "ALTER TABLE t ALTER v SET STORAGE EXTERNAL",
        "INSERT INTO t SELECT g, repeat(g::text, 3000), g, '2024-01-01'"
        " FROM generate_series(1, 50) g",
        "CREATE PUBLICATION p FOR ALL TABLES",
    )
    return Synced(database, tmp_path, delta_spark)


@pytest.mark.parametrize("how", ["spark", "driver"])
def test_rows_that_spark_merges(synced: Synced, how: str) -> None:
    synced.sync(how)
    synced.compare()
    assert "spark" not in synced.commits()  # its rows came as they are
    synced.database.execute(
        "UPDATE t SET n = 0 WHERE id < 10",  # v is stored out of line, and is not sent
        "UPDATE t SET id = id + 1000 WHERE id BETWEEN 5 AND 15",
        "BEGIN; UPDATE t SET id = -1 WHERE id = 1; UPDATE t SET id = 1 WHERE id = 2;"
        " UPDATE t SET id = 2 WHERE id = -1; COMMIT",
        "DELETE FROM t WHERE id > 40 AND id < 45",
        "DELETE FROM t WHERE id = 30; INSERT INTO t VALUES (30, 'again', 1, NULL)",
        "INSERT INTO t VALUES (77, NULL, NULL, '1900-01-01 00:00:00.000001')",
    )
    ended = synced.sync(how)
    assert ended.stale == {}
    assert ended.seconds["public.t"] > 0
    synced.compare()
    assert synced.commits()[-1] == "spark"
    synced.database.execute("TRUNCATE t", "INSERT INTO t VALUES (1, 'new', 2, now())")
    synced.sync(how)
    synced.compare()
    assert synced.commits()[-1] == "spark"
    assert synced.tables.state("public.t").num_rows == 1
    synced.database.execute("TRUNCATE t")
    synced.sync(how)
    assert synced.commits()[-1] == "spark"
    assert synced.tables.state("public.t").num_rows == 0
    assert not [*(synced.tables.path / STAGED).rglob("*.*")]
    # Nothing lies beside the table's files of which delta-rs does not know.
    assert not [*(synced.tables.path / "state").rglob(".*")]


def test_from_one_way_to_another_with_each_window(synced: Synced) -> None:
    """At random: keys that move and swap, values that are not sent, truncates, new columns."""
    chance = random.Random(11)
    synced.sync()
    ways = ["spark", "task", "local", "driver"]
    added = 0
    for number in range(14):
        statements = []
        for _ in range(chance.randint(1, 6)):
            low = chance.randint(-20, 90)
            span = f"id BETWEEN {low} AND {low + chance.randint(0, 15)}"
            moved, rows = chance.choice([1000, 2000]), f"generate_series({low}, {low + 9})"
            statements.append(
                chance.choice([
                    f"UPDATE t SET n = {low} WHERE {span}",
                    f"UPDATE t SET v = repeat('{low}', 2500), at = NULL WHERE {span}",
                    f"UPDATE t SET id = id + {moved} WHERE {span} AND {NONE_FAR}",
                    f"UPDATE t SET id = id - 1000 WHERE {FREE_BELOW}",
                    f"DELETE FROM t WHERE {span}",
                    f"INSERT INTO t (id, v) SELECT g, {LONG} FROM {rows} g ON CONFLICT DO NOTHING",
                ])
            )  # fmt: skip
        if number == 6:
            statements.insert(1, "TRUNCATE t")
        if number in (4, 9):
            added += 1
            statements.append(f"ALTER TABLE t ADD c{added} int[] DEFAULT '{{1,NULL}}'")
            statements.append(f"UPDATE t SET c{added} = NULL WHERE id % 3 = 0")
        synced.database.execute(*statements)
        how = chance.choice(ways)
        assert synced.sync(how).stale == {}, (number, how)
        synced.compare()
        synced.changes()
    assert {*synced.commits()} == {"spark", "task"}


def test_values_of_all_types(synced: Synced, tmp_path: Path) -> None:
    """They are those that are written without Spark, whatever its zone, and of the same types."""
    database = synced.database
    types = [one for one in VALUES if one != "aclitem"]
    columns = [f"c{i} {name}" for i, name in enumerate(types)]
    database.execute(
        *TYPES,
        f"CREATE TABLE every (id int PRIMARY KEY, {', '.join(columns)})",
        "INSERT INTO every (id) VALUES (0)",
    )
    policies = pf.Policies(infinity="null", out_of_range="null", special_values="null")
    synced.sync(policies=policies)
    for number in range(1, max(map(len, VALUES.values())) + 1):
        values = [VALUES[name][number % len(VALUES[name])] for name in types]
        literals = ", ".join("'" + value.replace("'", "''") + "'" for value in values)
        database.execute(f"INSERT INTO every VALUES ({number}, {literals})")
    synced.spark.conf.set("spark.sql.session.timeZone", "Pacific/Chatham")
    synced.spark.conf.set("spark.sql.parquet.outputTimestampType", "INT96")
    try:
        synced.sync(policies=policies)
        # Those that stay in a file that is written anew come from a file of Spark's.
        database.execute("UPDATE every SET id = -id WHERE id % 3 = 1")
        synced.sync(policies=policies)
    finally:
        synced.spark.conf.set("spark.sql.session.timeZone", "UTC")
        synced.spark.conf.set("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")
    assert synced.commits("public.every")[-2:] == ["spark", "spark"]
    (tmp_path / "here").mkdir()
    here = DeltaTables(tmp_path / "here")
    segments = f"{synced.tables.target}.segments"
    apply.sync(segments=segments, target=here.target, until="now", policies=policies, consumer="h")
    found, wanted = (one.state("public.every").sort_by("id") for one in (synced.tables, here))
    assert found.num_rows == 1 + max(map(len, VALUES.values()))
    assert found.schema == wanted.schema
    for name in found.column_names:
        assert repr(found.column(name).to_pylist()) == repr(wanted.column(name).to_pylist()), name


@pytest.mark.parametrize(
    ("how", "moment", "then"),
    [
        ("spark", "staged", "spark"),
        ("spark", "merged", "spark"),
        ("spark", "merged", "task"),
        ("spark", "merged", "local"),
        ("driver", "staged", "local"),
        ("driver", "merged", "driver"),
    ],
)
def test_a_crash(
    synced: Synced, monkeypatch: pytest.MonkeyPatch, how: str, moment: str, then: str
) -> None:
    synced.sync()
    synced.database.execute("UPDATE t SET n = 1 WHERE id < 9", "UPDATE t SET id = 99 WHERE id = 3")

    def killed(*_: Any, **__: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        if moment == "staged":
            patch.setattr(merges.SparkMerger, "merge", killed)
        else:
            patch.setattr(delta_target.DeltaTarget, "commit", killed)
        # Nothing is given up, as by a process that is no more.
        patch.setattr("pgoutput_fast.spark._staged_files._delete", lambda *_: None)
        with pytest.raises(Killed):
            synced.sync(how)
    assert [*(synced.tables.path / STAGED).rglob("*.parquet")]
    assert (synced.commits()[-1] == "spark") == (moment == "merged")
    synced.database.execute("UPDATE t SET n = n + 1 WHERE id IN (5, 99)")
    assert synced.sync(then).stale == {}
    synced.compare()
    assert len(synced.changes()) == 51 + 8 + 1 + 2  # with the truncate before the copy
    synced.sync()
    assert not [*(synced.tables.path / STAGED).rglob("*.*")]


@pytest.mark.parametrize("how", ["spark", "driver"])
def test_rows_that_are_not_there(synced: Synced, how: str) -> None:
    """The error is the one of a merge without Spark, and nothing is written."""
    synced.sync()
    synced.database.execute("UPDATE t SET id = 200 WHERE id = 40")
    import deltalake

    path = str(synced.tables.path / "state" / "public.t")
    deltalake.DeltaTable(path).delete("id IN (4, 6, 40)")
    synced.database.execute("UPDATE t SET n = 5 WHERE id IN (4, 5)")
    said = []
    for one in (how, "local"):
        with expect_error(code="unfit_row") as caught:
            synced.sync(one, on_error="stop")
        said.append(str(caught.value))
    assert said[0] == said[1]
    assert "= (40); (4)." in said[0]
    found = synced.tables.state("public.t").select(["id", "n"]).to_pylist()
    assert len(found) == 47
    assert {"id": 5, "n": 5} in found
    # By default the table waits for a copy.
    (reason,) = synced.sync(how).stale.values()
    assert reason == said[1]


def test_two_tables_are_merged_beside_each_other(
    synced: Synced, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each with its own position, though that is a setting of Spark's."""
    synced.database.execute(
        "CREATE TABLE u (id int PRIMARY KEY, v text)", "INSERT INTO u VALUES (1, 'a')"
    )
    synced.sync()
    both = threading.Barrier(2, timeout=60)
    merge = merges.SparkMerger.merge

    def together(self: merges.SparkMerger, net: Any) -> None:
        both.wait()
        merge(self, net)

    monkeypatch.setattr(merges.SparkMerger, "merge", together)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    for number in range(3):
        synced.database.execute(f"UPDATE u SET v = '{number}'", f"UPDATE t SET n = {number}")
        synced.sync("driver" if number == 1 else "spark")
        synced.compare(tables=2)
    assert synced.commits("public.u")[-3:] == ["spark"] * 3 == synced.commits()[-3:]


def test_what_spark_can_not_merge(synced: Synced) -> None:
    """Tables without a key, and with keys that Spark compares otherwise, are merged by tasks."""
    synced.database.execute(
        "CREATE TABLE bag (a int)", "ALTER TABLE bag REPLICA IDENTITY FULL",
        "CREATE TABLE f (id float8 PRIMARY KEY, v int)",
        "INSERT INTO f VALUES ('NaN', 1), (1, 2)", "INSERT INTO bag VALUES (1), (1), (2)",
    )  # fmt: skip
    synced.sync()
    synced.database.execute(
        "UPDATE f SET v = 3 WHERE id = 'NaN'", "DELETE FROM bag WHERE ctid = '(0,1)'",
        "ALTER TABLE t ADD e text", "UPDATE t SET e = 'e' WHERE id = 1",
    )  # fmt: skip
    synced.sync()
    synced.compare(tables=3)
    assert {*synced.commits("public.f"), *synced.commits("public.bag")} == {"task"}
    assert {*synced.commits()} == {"task"}
    # The number that the log has of the alteration goes with the next commit of a task.
    for last in ("task", "spark"):
        synced.database.execute("UPDATE t SET e = 'f' WHERE id = 2")
        synced.sync()
        synced.compare(tables=3)
        assert synced.commits()[-1] == last


def test_partitions_by_numbers(synced: Synced) -> None:
    synced.options |= {"partition_by": {"public.t": ["id"]}}
    synced.database.execute("DELETE FROM t WHERE id > 5")
    synced.sync()
    synced.database.execute(
        "UPDATE t SET id = 70, n = 1 WHERE id = 3", "UPDATE t SET n = 2 WHERE id = 4"
    )
    synced.sync()
    synced.compare()
    assert synced.commits()[-1] == "spark"
    synced.database.execute("UPDATE t SET id = 71, n = 1 WHERE id = 70")
    synced.sync("local")
    synced.compare()


def test_times_as_keys(synced: Synced) -> None:
    """Spark's statistics of files have milliseconds; a merge without it still finds the rows."""
    synced.database.execute(
        "CREATE TABLE k (at timestamp PRIMARY KEY, v int)",
        "INSERT INTO k VALUES ('2024-01-01 00:00:00.000001', 1)",
    )
    synced.sync()
    synced.database.execute(
        "INSERT INTO k SELECT '2024-02-01 00:00:00.123456'::timestamp + g * '1us'::interval, g"
        " FROM generate_series(1, 5) g"
    )
    synced.sync()
    assert synced.commits("public.k")[-1] == "spark"
    synced.database.execute("UPDATE k SET v = -v")
    assert synced.sync("local").stale == {}
    synced.compare(tables=2)


def test_the_way_is_chosen_by_what_may_be_written_anew(
    synced: Synced, monkeypatch: pytest.MonkeyPatch
) -> None:
    import deltalake

    synced.sync()
    engine = SparkEngine(synced.spark, driver_bytes=0)

    def size() -> int:
        table = deltalake.DeltaTable(str(synced.tables.path / "state" / "public.t"))
        return sum(pa.table(table.get_add_actions()).column("size_bytes").to_pylist())

    def merged(least: int | None, statement: str) -> str:
        monkeypatch.setattr("pgoutput_fast.spark.sync_engine.bytes_for_spark", lambda _: least)
        synced.database.execute(statement)
        apply.sync(synced.database.dsn, engine=engine, **synced.options)
        synced.compare()
        return synced.commits()[-1]

    assert merged(size() + 1, "UPDATE t SET n = 1 WHERE id = 1") == "task"
    assert merged(size(), "UPDATE t SET n = 2 WHERE id = 1") == "spark"
    assert merged(None, "UPDATE t SET n = 3 WHERE id = 1") == "task"
    # No file has such a key, and after a truncate none is written anew.
    assert merged(1, "INSERT INTO t VALUES (1000, 'a')") == "task"
    assert merged(1, "TRUNCATE t") == "task"


def test_a_session_without_the_connector(synced: Synced) -> None:
    other = synced.spark.newSession()
    other.conf.set("spark.sql.catalog.spark_catalog", "another.Catalog")
    engine = SparkEngine(other, merge_by="spark")
    with expect_error(code="bad_option"):
        apply.sync(synced.database.dsn, engine=engine, **synced.options)
    assert not synced.tables.path.exists()
    assert synced.database.slots() == {}
    apply.sync(synced.database.dsn, engine=SparkEngine(other), **synced.options)
    synced.compare()
