"""Merges into state tables that Spark's executors share: what SELECT says is the truth."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.targets.synced_tables import DeltaTables

from pgoutput_fast import apply
from pgoutput_fast.apply import delta_target
from pgoutput_fast.embedded import EmbeddedServer
from pgoutput_fast.spark import SparkEngine, _merge_steps, sync_engine
from pgoutput_fast.spark._jobs import SparkJobs
from pgoutput_fast.spark._staged_files import STAGED
from pgoutput_fast.verify import verify

pytest.importorskip("deltalake")

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.spark]

SHARED = {"find rows of a state table", "write files of a state table"}
LONG = "repeat('é', 3000)"
NONE_FAR = "NOT EXISTS (SELECT FROM t AS o WHERE o.id > 900)"
FREE_BELOW = "id > 1000 AND id - 1000 NOT IN (SELECT id FROM t)"


class Killed(BaseException):
    """The process ends here."""


class Synced:
    """A database, and Delta tables that have its tables."""

    def __init__(
        self, database: Any, root: Path, spark: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.database = database
        self.spark = spark
        self.monkeypatch = monkeypatch
        self.tables = DeltaTables(root)
        self.options: dict[str, Any] = {
            "slot": f"slot_{database.name}", "publications": ["p"], "target": self.tables.target,
            "until": "now", "max_delay": 0.05, "interval": 0.05,
            "partition_by": {"public.f": ["part"]},
        }  # fmt: skip
        self.jobs: list[str] = []
        run = SparkJobs.run

        def noted(jobs: SparkJobs, what: str, *given: Any) -> Any:
            self.jobs.append(what)
            return run(jobs, what, *given)

        monkeypatch.setattr(SparkJobs, "run", noted)

    def sync(self, how: str, **options: Any) -> apply.SyncProgress:
        """By executors ("shared", or "driver" if the driver folds), by tasks, or here."""
        least = 1 << 40 if how == "task" else 1
        self.monkeypatch.setattr(sync_engine, "_SHARED_BYTES", least)
        bytes_of = None if how == "driver" else 0
        engine = None if how == "local" else SparkEngine(self.spark, driver_bytes=bytes_of)
        self.jobs.clear()
        return apply.sync(self.database.dsn, engine=engine, **{**self.options, **options})

    def compare(self) -> None:
        """All tables are the server's, value by value."""
        report = verify(self.database.dsn, publications=["p"], target=self.tables.target)
        found = {one.name: one.state for one in report.tables}
        assert found == dict.fromkeys(("t", "bag", "f"), "equal"), report
        assert not [*(self.tables.path / STAGED).rglob("*.*")]

    def changes(self) -> list[tuple[int, int]]:
        rows = self.tables.changes("public.t").select(["commit_lsn", "seq"]).to_pylist()
        found = sorted((row["commit_lsn"], row["seq"]) for row in rows)
        assert len({*found}) == len(found)
        return found


@pytest.fixture
def synced(
    pg18: EmbeddedServer, make_database: Callable[..., Any], tmp_path: Path, spark: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> Synced:  # fmt: skip
    database = make_database(pg18)
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, v text, n numeric(6, 2), at timestamp)",
        "ALTER TABLE t ALTER v SET STORAGE EXTERNAL",
        "INSERT INTO t SELECT g, repeat(g::text, 3000), g, '2024-01-01'"
        " FROM generate_series(1, 50) g",
        "CREATE TABLE bag (a int)", "ALTER TABLE bag REPLICA IDENTITY FULL",
        "INSERT INTO bag SELECT g % 5 FROM generate_series(1, 40) g",
        "CREATE TABLE f (id float8 PRIMARY KEY, part text, v int)",
        "INSERT INTO f VALUES ('NaN', 'a', 1), (0, 'b', 2), (1, NULL, 3)",
        "CREATE PUBLICATION p FOR ALL TABLES",
    )  # fmt: skip
    return Synced(database, tmp_path, spark, monkeypatch)


@pytest.mark.parametrize("how", ["shared", "driver"])
def test_rows_that_executors_merge(synced: Synced, how: str) -> None:
    synced.sync(how)
    synced.compare()
    assert not SHARED & {*synced.jobs}  # its rows came as they are
    synced.database.execute(
        "UPDATE t SET n = 0 WHERE id < 10",  # v is stored out of line, and is not sent
        "UPDATE t SET id = id + 1000 WHERE id BETWEEN 5 AND 15",
        "BEGIN; UPDATE t SET id = -1 WHERE id = 1; UPDATE t SET id = 1 WHERE id = 2;"
        " UPDATE t SET id = 2 WHERE id = -1; COMMIT",
        "DELETE FROM t WHERE id > 40 AND id < 45",
        "DELETE FROM t WHERE id = 30; INSERT INTO t VALUES (30, 'again', 1, NULL)",
        "DELETE FROM bag WHERE ctid IN (SELECT ctid FROM bag WHERE a = 3 LIMIT 2)",
        "UPDATE f SET v = 9 WHERE id = 'NaN'", "UPDATE f SET part = 'b' WHERE id = 1",
    )  # fmt: skip
    ended = synced.sync(how)
    assert ended.stale == {}
    assert ended.seconds["public.t"] > 0
    synced.compare()
    assert {*synced.jobs} >= SHARED
    synced.database.execute("TRUNCATE t", "INSERT INTO t VALUES (1, 'new', 2, now())")
    synced.sync(how)
    synced.compare()
    assert not SHARED & {*synced.jobs}  # no file is written anew


def test_from_one_way_to_another_with_each_window(synced: Synced) -> None:
    """At random: keys that move and swap, values that are not sent, truncates, new columns."""
    chance = random.Random(11)
    synced.sync("shared")
    added = 0
    for number in range(12):
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
                    f"UPDATE bag SET a = {low % 7} WHERE a = {low % 5}",
                ])
            )  # fmt: skip
        if number == 6:
            statements.insert(1, "TRUNCATE t")
        if number in (4, 9):
            added += 1
            statements.append(f"ALTER TABLE t ADD c{added} int[] DEFAULT '{{1,NULL}}'")
            statements.append(f"UPDATE t SET c{added} = NULL WHERE id % 3 = 0")
        synced.database.execute(*statements)
        how = chance.choice(["shared", "task", "local", "driver"])
        assert synced.sync(how).stale == {}, (number, how)
        synced.compare()
        synced.changes()


@pytest.mark.parametrize(
    ("how", "moment", "then"),
    [
        ("shared", "searched", "shared"),
        ("shared", "merged", "local"),
        ("driver", "searched", "local"),
        ("driver", "merged", "shared"),
    ],
)
def test_a_crash(synced: Synced, how: str, moment: str, then: str) -> None:
    synced.sync("shared")
    synced.database.execute("UPDATE t SET n = 1 WHERE id < 9", "UPDATE t SET id = 99 WHERE id = 3")

    def killed(*_: Any, **__: Any) -> None:
        raise Killed

    with synced.monkeypatch.context() as patch:
        if moment == "searched":
            patch.setattr(_merge_steps.SparkSteps, "rewrite", killed)
        else:
            patch.setattr(delta_target.DeltaTarget, "commit", killed)
        # Nothing is given up, as by a process that is no more.
        patch.setattr("pgoutput_fast.spark._staged_files._delete", lambda *_: None)
        with pytest.raises(Killed):
            synced.sync(how)
    assert [*(synced.tables.path / STAGED).rglob("*.arrow")]
    synced.database.execute("UPDATE t SET n = n + 1 WHERE id IN (5, 99)")
    assert synced.sync(then).stale == {}
    assert len(synced.changes()) == 51 + 8 + 1 + 2  # with the truncate before the copy
    synced.sync("shared")
    synced.compare()
