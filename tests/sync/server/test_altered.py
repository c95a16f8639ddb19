"""Tables that are altered while `apply.sync` follows them; the truth is what SELECT says."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.targets.altered_tables import EVOLVED, REUSED
from support.targets.synced_database import Synced, synced_with
from support.targets.synced_tables import TABLES
from support.waiting import wait_until

from pgoutput_fast import apply
from pgoutput_fast.changelog.requests import request_copy
from pgoutput_fast.replication.history import HistoryWatch
from pgoutput_fast.verify import verify

pytest.importorskip("duckdb")
pytest.importorskip("deltalake")

pytestmark = [
    pytest.mark.server, pytest.mark.usefixtures("quick_upkeep")
]  # fmt: skip

PLACES = [
    (18, "duckdb"), (18, "delta"), pytest.param(18, "distributed", marks=pytest.mark.slow),
]  # fmt: skip
"""Versions of the server do not differ in what an engine makes of a stream, so one has them all."""


@pytest.fixture
def synced(version: int, kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> Synced:
    make_database: Any = request.getfixturevalue("make_database")
    server = request.getfixturevalue(f"pg{version}")
    return synced_with(make_database(server), TABLES[kind](tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize(("version", "kind"), PLACES)
@pytest.mark.parametrize("is_one", [False, True])
@pytest.mark.parametrize("statements", REUSED)
def test_a_name_that_another_column_gets(synced: Synced, statements: str, is_one: bool) -> None:
    """Among changes, of which none tells it."""
    synced.sync()
    run = ["INSERT INTO t (id, v, d) VALUES (200, 'v', 'd')", *statements.split("; "),
           "INSERT INTO t (id, d) VALUES (202, 'e')"]  # fmt: skip
    synced.database.execute(*(["BEGIN; " + "; ".join(run) + "; COMMIT"] if is_one else run))
    synced.settle()
    names = synced.database.execute(
        "SELECT attname FROM pg_attribute WHERE attrelid = 't'::regclass AND attnum > 0 "
        "AND NOT attisdropped"
    )
    assert synced.compare("t", ", ".join(name for (name,) in names)) in (52, 53)


QUICK = (0, 3, 5, 10)
"""Of these cases, into DuckDB."""


@pytest.mark.everyday("True-18-duckdb")
@pytest.mark.parametrize(
    ("statement", "columns"),
    [
        pytest.param(*case, id=case[0], marks=() if i in QUICK else pytest.mark.slow)
        for i, case in enumerate(EVOLVED)
    ],
)
@pytest.mark.parametrize(("version", "kind"), PLACES)
@pytest.mark.parametrize("again", [False, True])
def test_tables_that_are_altered(
    synced: Synced, statement: str, columns: str | None, again: bool
) -> None:
    """What can be followed is followed; else the table is copied again, and never is it wrong."""
    synced.sync()
    synced.database.execute(
        "UPDATE t SET n = n + 1 WHERE id < 5", *statement.split("; "),
    )  # fmt: skip
    table = "t2" if statement.endswith("t2") else "t"
    reasons = [*synced.sync().stale.values()] if again else []
    synced.database.execute(
        f"UPDATE {table} SET id = -id WHERE id = 20",
        f"DELETE FROM {table} WHERE id = 21",
        f"INSERT INTO {table} (id, d) VALUES (999999, 'born')"
        if "RENAME d" not in statement
        else f"INSERT INTO {table} (id, v) VALUES (999999, 'born')",
    )
    reasons += synced.settle()
    names = synced.database.execute(
        f"SELECT attname FROM pg_attribute WHERE attrelid = '{table}'::regclass AND attnum > 0"
        " AND NOT attisdropped"
    )
    if columns is not None:
        assert reasons == []
        synced.compare(table, columns)
    else:
        assert len(reasons) == 1
        synced.compare(table, ", ".join(name for (name,) in names))
    if '"ID"' in statement:
        truth = synced.database.execute('SELECT id, "ID" FROM t')
        assert synced.rows("public.t", "id", "ID_") == sorted(truth, key=repr)


@contextlib.contextmanager
def going_on(synced: Synced) -> Iterator[tuple[threading.Thread, list[apply.SyncProgress]]]:
    """Have a sync go on in a thread, and list what it tells."""
    stop = threading.Event()
    seen: list[apply.SyncProgress] = []
    thread = threading.Thread(
        target=synced.sync, kwargs={"until": None, "stop": stop, "progress": seen.append}
    )
    thread.start()
    try:
        yield thread, seen
    finally:
        stop.set()
        thread.join()


@pytest.mark.slow
@pytest.mark.parametrize(("version", "kind"), PLACES)
def test_a_key_that_no_change_tells(synced: Synced, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the former key the rows of a window do not go together: the table is copied again."""
    reading, look = threading.Lock(), HistoryWatch._look

    def one_at_a_time(watch: HistoryWatch) -> None:
        with reading:
            look(watch)

    monkeypatch.setattr(HistoryWatch, "_look", one_at_a_time)
    synced.database.execute("ALTER TABLE t REPLICA IDENTITY FULL")
    with going_on(synced) as (thread, seen):
        wait_until(lambda: seen and seen[-1].tables.keys() >= {"public.t", "public.bag"})
        synced.database.execute("UPDATE t SET v = 'w' WHERE id = 1")
        wait_until(lambda: seen[-1].tables["public.t"] == 51)
        with reading:  # so that the catalogue is not read, which no Relation asks for
            synced.database.execute(
                "ALTER TABLE t DROP CONSTRAINT t_pkey, ADD PRIMARY KEY (id, d)",
                "INSERT INTO t (id, d) VALUES (301, 'd'), (301, 'e')",
                "INSERT INTO bag VALUES (9, 'x')",
            )
            wait_until(lambda: not thread.is_alive() or any(one.stale for one in seen))
        assert thread.is_alive()
        (reason,) = next(one.stale for one in seen if one.stale).values()
        assert "row (id) = (301)" in reason
        assert "a row with this key exists already" in reason
        wait_until(lambda: not thread.is_alive() or not seen[-1].stale)
    assert synced.settle() == []
    assert synced.compare("t", "id, v, n, d") == 52
    assert synced.compare("bag", "a, b") == 21


@pytest.mark.slow
@pytest.mark.parametrize(
    ("version", "kind"), [(18, "delta"), pytest.param(18, "distributed", marks=pytest.mark.slow)]
)
def test_a_copy_without_the_column_of_partitions(synced: Synced) -> None:
    synced.options.update(partition_by={"public.t": ["v"]}, on_error="stop")
    synced.sync()
    synced.database.execute("ALTER TABLE t DROP v")
    ((relation_id,),) = synced.database.execute("SELECT 't'::regclass::oid::bigint")
    request_copy(
        Path(f"{synced.tables.path}.segments"), relation_id, ["public", "t"], "a test asks"
    )
    synced.settle()
    assert synced.compare("t", "id, n, d") == 50


@pytest.mark.slow
@pytest.mark.parametrize(("version", "kind"), PLACES)
def test_a_composite_that_gets_a_field(synced: Synced) -> None:
    """Values of the new form come before the catalogue was read."""
    synced.database.execute(
        "CREATE TYPE pair AS (x int, y text)", "CREATE TABLE c (id int PRIMARY KEY, p pair)",
        "INSERT INTO c VALUES (1, (1, 'one'))",
    )  # fmt: skip
    with going_on(synced) as (thread, seen):
        wait_until(lambda: seen and "public.c" in seen[-1].tables)
        synced.database.execute("INSERT INTO c VALUES (2, (2, 'two'))")
        wait_until(lambda: seen[-1].tables["public.c"] == 2)
        synced.database.execute(
            "ALTER TYPE pair ADD ATTRIBUTE z int", "INSERT INTO c VALUES (3, (3, 'three', 3))"
        )
        wait_until(lambda: not thread.is_alive() or seen[-1].tables["public.c"] >= 3)
        assert thread.is_alive()
    synced.settle()
    report = verify(synced.database.dsn, publications=["p"], target=synced.tables.target)
    assert {one.name: (one.state, one.rows) for one in report.tables}["c"] == ("equal", 3)


@pytest.mark.slow
@pytest.mark.parametrize(("version", "kind"), PLACES)
@pytest.mark.parametrize("statement", ["UPDATE g SET a = 3 WHERE id = 2", ""])
def test_a_generated_column_that_gets_another_expression(synced: Synced, statement: str) -> None:
    """No change tells of it, whether one of another row comes or none."""
    stored = "GENERATED ALWAYS AS (a * 2) STORED"
    synced.database.execute(
        f"CREATE TABLE g (id int PRIMARY KEY, a int DEFAULT 1, s int {stored})",
        "INSERT INTO g VALUES (1, 1), (2, 2)",
        "CREATE PUBLICATION stored FOR TABLE g WITH (publish_generated_columns = stored)",
    )
    synced.options["publications"] = ["stored"]
    synced.sync()
    synced.database.execute("ALTER TABLE g ALTER s SET EXPRESSION AS (a * 7)", statement)
    assert synced.settle() == []
    assert synced.compare("g", "id, a, s") == 2
    # The default of another column makes no values of rows that are there.
    synced.database.execute("ALTER TABLE g ALTER a SET DEFAULT 5", "INSERT INTO g VALUES (3)")
    assert synced.settle() == []
    assert synced.compare("g", "id, a, s") == 3
    ops = synced.tables.changes("public.g").column("op").to_pylist()
    assert ops.count("truncate") == 2
