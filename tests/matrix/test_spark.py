"""The recorded scenarios, and tables that are altered, live through `sync` by Spark's executors."""

from __future__ import annotations

import os
import re
import subprocess
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
from psycopg import sql
from support.recordings.corpus_files import POLICIES
from support.recordings.scenario_scripts import Sessions, changes_told, read_script
from support.targets.altered_tables import EVOLVED, MADE, REUSED
from support.targets.synced_tables import DeltaTables

from pgoutput_fast.embedded import EmbeddedServer, find_server_bindir
from pgoutput_fast.replication import upkeep
from pgoutput_fast.verify import verify

pytest.importorskip("deltalake")

pytestmark = [
    pytest.mark.server, pytest.mark.spark, pytest.mark.slow,
    pytest.mark.parametrize("version", [15, 18], indirect=True, ids="pg{}".format, scope="session"),
]  # fmt: skip

SCENARIOS = (
    "all_types", "dml", "encoding_latin1", "encoding_utf8", "fuzz_a", "messages", "origin",
    "partitions", "schema_evolution", "streaming", "two_phase",
)  # fmt: skip
RENAMED = dict.fromkeys(("public.ev_renamed", "other.ev_renamed", "other2.ev_renamed"), "public.ev")
"""Names that a table had for a while."""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_TICK", "_MERGE_INTERVAL", "_TIDY_INTERVAL", "_WATCH_INTERVAL"):
        monkeypatch.setattr(upkeep, name, 0.05)


class Synced:
    """A database, and Delta tables that executors keep up to date with it."""

    def __init__(self, spark: Any, database: Any, root: Path, **options: Any) -> None:
        self._spark, self.database, self.tables = spark, database, DeltaTables(root)
        self._options: dict[str, Any] = {
            "slot": f"slot_{database.name}", "publications": ["p"], "target": self.tables.target,
            "driver_bytes": 0, "until": "now", "max_delay": 0.05, **options,
        }  # fmt: skip

    def sync(self) -> dict[str, str]:
        """Which tables wait for a copy afterwards, and why."""
        from pgoutput_fast.spark import sync

        return sync(self._spark, self.database.dsn, **self._options).stale

    def settle(self) -> None:
        stale = {"": "not looked yet"}
        for _ in range(10):
            stale = self.sync()
            if not stale:
                return
        pytest.fail(f"still to be copied: {stale}")

    def held(self) -> dict[str, Any]:
        """The row of `_progress` of each table that is there now, by its name."""
        return {one["table"]: one for one in self.tables.progress().values()
                if "~" not in one["stored"]}  # fmt: skip

    def ops(self, held: dict[str, Any]) -> Counter[str]:
        """How many changes of each kind a table has, each of which is there once."""
        places, ops = [], []
        for version in range(1, held["version"] + 1):
            found = self.tables.changes(held["stored"], version)
            for row in found.select(["commit_lsn", "seq", "op"]).to_pylist():
                places.append((row["commit_lsn"], row["seq"]))
                ops.append(row["op"])
        assert len(set(places)) == len(places)
        return Counter(ops)


only_with_all_servers = pytest.mark.skipif(
    not os.environ.get("PGOUTPUT_FAST_REQUIRE_SERVERS"), reason="make test-matrix runs these"
)


@only_with_all_servers
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_scenarios_that_were_recorded(
    spark: Any, server: EmbeddedServer, version: int, scenario: str,
    make_database: Callable[..., Any], tmp_path: Path,
) -> None:  # fmt: skip
    recorded = 18 if scenario == "all_types" and version >= 17 else 16
    # The same statements were recorded in databases of both encodings.
    script = read_script(f"{recorded}/{scenario.replace('utf8', 'latin1')}", version)
    encoding = "LATIN1" if scenario == "encoding_latin1" else "UTF8"
    database = make_database(server, encoding)
    options: dict[str, Any] = {"publications": ["pub"], "policies": POLICIES.get(scenario)}
    if scenario == "schema_evolution":
        # Of `ty` a type is altered, and altered again before anyone looks: that is an error.
        options["tables"] = ("[!p]*.*", "public.[!t]*")
    synced = Synced(spark, database, tmp_path, **options)
    told = f"{database.name}_truth"
    with Sessions(database) as sessions:
        sessions.run([("main", statement) for statement in script.setup])
        database.execute(f"SELECT pg_create_logical_replication_slot('{told}', 'test_decoding')")
        first = set(published(database))
        synced.sync()
        for piece in script.halves():
            sessions.run(piece)
            # A copy waits for all transactions that run, those that are prepared too.
            for (gid,) in database.execute(
                "SELECT gid FROM pg_prepared_xacts WHERE database = current_database()"
            ):
                database.execute(f"COMMIT PREPARED '{gid}'")
            synced.sync()
    synced.settle()

    assert differences(synced, told, first) == {}
    report = verify(database.dsn, publications=["pub"], target=synced.tables.target)
    states = {(one.namespace, one.name): one.state for one in report.tables}
    states.pop(("public", "t_reg"), None)  # names of things of the server are not compared
    assert states == {name: "equal" for name in published(database) if name[1] != "t_reg"}


@only_with_all_servers
def test_pgbench(
    spark: Any, server: EmbeddedServer, make_database: Callable[..., Any], tmp_path: Path
) -> None:
    """Tables that pgbench makes and fills anew under the sync, and its transactions."""
    database = make_database(server)

    def pgbench(*options: str) -> None:
        program = find_server_bindir(18) / "pgbench"
        subprocess.run([program, *options, database.dsn], check=True, capture_output=True)

    database.execute("CREATE PUBLICATION pub FOR ALL TABLES")
    pgbench("-i", "-s", "1", "-I", "dtgp")
    told = f"{database.name}_truth"
    database.execute(f"SELECT pg_create_logical_replication_slot('{told}', 'test_decoding')")
    synced = Synced(spark, database, tmp_path, publications=["pub"])
    first = set(published(database))
    synced.sync()
    pgbench("-n", "-c", "4", "-t", "300", "-M", "prepared", "--random-seed=42")
    synced.sync()
    pgbench("-n", "-c", "4", "-t", "300", "--random-seed=43")
    synced.settle()
    assert len(first) == 4
    assert differences(synced, told, first) == {}
    report = verify(database.dsn, publications=["pub"], target=synced.tables.target)
    assert [one.state for one in report.tables] == ["equal"] * 4


def differences(
    synced: Synced, told: str, first: Collection[tuple[str, str]]
) -> dict[tuple[str, str], Any]:
    """Tables with other numbers of rows than the server's, or of changes than test_decoding's.

    Changes are counted of the tables that were there at first.
    """
    database = synced.database
    progress = {(one["schema"], one["table"]): one for one in synced.tables.progress().values()}
    expected: dict[str, Counter[str]] = defaultdict(Counter)
    for (table, op), count in changes_told(database, told).items():
        expected[RENAMED.get(table, table)][op] += count
    assert sum(sum(one.values()) for one in expected.values()) > 10
    wrong = {}
    for name in published(database):
        held = progress[name]
        table = sql.Identifier(*name).as_string()
        (rows,) = database.execute(f"SELECT count(*) FROM ONLY {table}")
        found = synced.tables.state(held["stored"]).num_rows
        if found != rows[0]:
            wrong[name] = (found, rows[0])
        ops = synced.ops(held)
        changed = {op: ops[op] for op in ("insert", "update", "delete") if ops[op]}
        if name in first and changed != expected[".".join(name)]:
            wrong[name] = (changed, expected[".".join(name)])
    return wrong


def published(database: Any) -> Iterator[tuple[str, str]]:
    yield from database.execute(
        "SELECT schemaname, tablename FROM pg_publication_tables WHERE pubname = 'pub'"
        " AND tablename <> 'ty' ORDER BY 1, 2"
    )


OTHERS: tuple[tuple[str, ...], ...] = (
    (
        "ALTER TABLE t ALTER n SET NOT NULL, ADD CONSTRAINT t_k UNIQUE (n, id)",
        "ALTER TABLE t REPLICA IDENTITY USING INDEX t_k",
        "UPDATE t SET n = 2, id = id + 500 WHERE id < 4", "ALTER TABLE t REPLICA IDENTITY FULL",
        "UPDATE t SET d = 'full' WHERE id BETWEEN 4 AND 9",
        "DELETE FROM t WHERE id BETWEEN 45 AND 400", "ALTER TABLE t ALTER n SET DEFAULT 0",
    ),
    (
        "UPDATE t SET id = id + 1000 WHERE id BETWEEN 5 AND 15",
        "DELETE FROM t WHERE id BETWEEN 30 AND 40", "INSERT INTO t (id) VALUES (30)",
    ),
    ("TRUNCATE t", "INSERT INTO t VALUES (1, 'new', 2, 'y')"),
    (
        "DROP TABLE t", "CREATE TABLE t (id text PRIMARY KEY, d int)",
        "INSERT INTO t VALUES ('a')",
    ),
)  # fmt: skip
"""Other things that happen to a table."""


def test_tables_that_are_altered(
    spark: Any, server: EmbeddedServer, make_database: Callable[..., Any], tmp_path: Path
) -> None:
    """Those of `test_sync_live`, all in one sync: what no change tells is copied again."""
    database = make_database(server)
    database.execute("CREATE PUBLICATION p FOR ALL TABLES")
    synced = Synced(spark, database, tmp_path)
    # By each table's name: what is done to it, in which of two windows, and the columns that are
    # compared; None: all, as it has to be copied again; "*": all, whether it is copied or not.
    cases: dict[str, tuple[list[str], bool, str | None]] = {}
    for number, (statements, columns) in enumerate(EVOLVED):
        for again in (False, True):
            run = ["UPDATE t SET n = n + 1 WHERE id < 5", *statements.split("; ")]
            cases[f"e{number}_{again:d}"] = (run, again, columns)
    for number, statements in enumerate(REUSED):
        for as_one in (False, True):
            run = ["INSERT INTO t (id, v, d) VALUES (200, 'v', 'd')", *statements.split("; ")]
            cases[f"r{number}_{as_one:d}"] = (
                ["; ".join(run)] if as_one else run, False, "*"
            )  # fmt: skip
    for number, statements in enumerate(OTHERS):
        cases[f"o{number}"] = ([*statements], bool(number % 2), "*")
    for name in cases:
        database.execute(*(of(name, one) for one in MADE))
    synced.settle()
    first = synced.held()
    for turn in (True, False):
        for name, (statements, again, _) in cases.items():
            if again is turn:
                database.execute(*(of(name, one) for one in statements))
        if turn:
            synced.sync()
    for name in cases:
        table = f"{name}2" if "TO t2" in "".join(cases[name][0]) else name
        if name[0] == "e":
            filled = "v" if "RENAME d" in "".join(cases[name][0]) else "d"
            database.execute(
                f"UPDATE {table} SET id = -id WHERE id = 20",
                f"DELETE FROM {table} WHERE id = 21",
                f"INSERT INTO {table} (id, {filled}) VALUES (999999, 'born')",
            )
        else:
            database.execute(f"INSERT INTO {table} (id) VALUES (202)")
    synced.settle()

    progress = synced.held()
    wrong: dict[str, Any] = {}
    for name, (statements, _, columns) in cases.items():
        table = f"{name}2" if "TO t2" in "".join(statements) else name
        names = [] if columns in (None, "*") else columns.split(", ")
        if not names:
            names = [one for (one,) in database.execute(
                f"SELECT attname FROM pg_attribute WHERE attrelid = '{table}'::regclass"
                " AND attnum > 0 AND NOT attisdropped ORDER BY attnum"
            )]  # fmt: skip
        truth = database.execute(f"SELECT {', '.join(names)} FROM {table}")
        held = progress[table]
        rows = synced.tables.state(held["stored"]).select(names).to_pylist()
        found = [tuple(row.values()) for row in rows]
        if sorted(found, key=repr) != sorted(truth, key=repr):
            wrong[name] = (statements, len(found), len(truth))
        synced.ops(held)
        # Where no change tells what rows are, they were copied. On a busy machine, where the
        # catalogue is read late, others may be too.
        if columns is None and not held["copy_lsn"] > first[name]["copy_lsn"]:
            wrong[name] = (statements, held["copy_lsn"])
    assert wrong == {}


def of(table: str, statement: str) -> str:
    """A statement of the table `t`, for a table of another name."""
    return re.sub(r"\bt(2?|_k)\b", rf"{table}\1", statement)
