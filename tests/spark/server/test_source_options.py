"""Options of the source `pgoutput` in queries that run: what comes is what the server has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from support.expected_errors import expect_error
from support.postgres.replayed import replay
from support.sparks.source_queries import Queries
from support.waiting import wait_until

from pgoutput_fast.embedded import EmbeddedServer

pytestmark = [
    pytest.mark.server, pytest.mark.spark, pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]  # fmt: skip

COLUMNS = "id, v, n, at, day, f, y, m, a, b"
ROWS = (
    "SELECT g, 'v' || g, g / 4.0, timestamptz '2024-02-29 12:00+02' + g * interval '1 s 1 us',"
    " date '2024-01-01' + g, g / 3.0::float8, decode(md5(g::text), 'hex'),"
    " (ARRAY['sad', 'glad'])[1 + g % 2]::mood, ARRAY[g, NULL, -g], g % 3 = 0"
)


@pytest.fixture
def shop(pg18: EmbeddedServer, make_database: Callable[..., Any]) -> Any:
    """A database whose server streams what is larger than 64 kB."""
    database = make_database(pg18)
    database.execute(
        f"ALTER DATABASE {database.name} SET logical_decoding_work_mem = '64kB'",
        "CREATE TYPE mood AS ENUM ('sad', 'glad')",
        "CREATE TABLE t (id int PRIMARY KEY, v text, n numeric(10, 2), at timestamptz, day date,"
        " f float8, y bytea, m mood, a int[], b bool)",
        "ALTER TABLE t ALTER v SET STORAGE EXTERNAL",
        f"INSERT INTO t {ROWS} FROM generate_series(1, 100) AS g",
        "UPDATE t SET v = repeat('big', 1000) WHERE id = 50",
        "CREATE PUBLICATION p FOR TABLE t",
    )
    return database


def write(database: Any) -> None:
    """Transactions of all kinds, of which two are open at a time."""
    gid = database.name
    with database.connect() as one, database.connect() as other:
        one.execute("BEGIN")
        one.execute(f"INSERT INTO t {ROWS} FROM generate_series(1000, 2999) AS g".encode())
        one.execute("SAVEPOINT a")
        one.execute(f"INSERT INTO t {ROWS} FROM generate_series(3000, 3999) AS g".encode())
        other.execute("UPDATE t SET n = 0 WHERE id = 50")  # v is not sent
        other.execute("BEGIN")
        other.execute(f"INSERT INTO t {ROWS} FROM generate_series(5000, 6999) AS g".encode())
        one.execute("ROLLBACK TO a")
        one.execute("UPDATE t SET id = -id WHERE id < 1500 AND id >= 1000")
        other.execute("ROLLBACK")
        other.execute("DELETE FROM t WHERE id = 7")
        one.execute("COMMIT")
    large = f"INSERT INTO t {ROWS} FROM"
    database.execute(
        f"BEGIN; {large} generate_series(7000, 8999) AS g; PREPARE TRANSACTION '{gid}_kept'",
        f"BEGIN; DELETE FROM t WHERE id > 2000; PREPARE TRANSACTION '{gid}_gone'",
        "UPDATE t SET v = 'between' WHERE id = 8",
        f"ROLLBACK PREPARED '{gid}_gone'",
        f"COMMIT PREPARED '{gid}_kept'",
        "UPDATE t SET f = 'Infinity' WHERE id = 9",
    )  # fmt: skip


def rows(database: Any) -> list[Any]:
    return sorted(database.execute(f"SELECT {COLUMNS} FROM t"), key=repr)


@pytest.mark.parametrize(
    ("protocol", "binary", "two_phase"),
    [("1", False, False), ("2", True, False), ("4", False, False), ("4", True, True)],
)
def test_how_transactions_come(
    spark: Any, shop: Any, tmp_path: Path,
    protocol: str, binary: bool, two_phase: bool,
) -> None:  # fmt: skip
    slot = f"slot_{shop.name}"
    shop.execute(
        f"SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput', false, {two_phase})"
    )
    queries = Queries(
        spark,
        shop,
        tmp_path,
        protocol=protocol,
        binary=str(binary).lower(),
        adoptSlot="true",
        twoPhase="true" if two_phase else None,
    )
    running = queries.start()
    try:
        wait_until(lambda: len(queries.changes()) == 101 or running.exception())
        write(shop)
        wait_until(
            lambda: any(one["op"] == "update" and one["after"]["id"] == 9
                        for one in queries.changes()) or running.exception()
        )  # fmt: skip
    finally:
        running.stop()
    found = queries.run()
    assert replay(found) == rows(shop)
    # A change for each row that a committed transaction has changed.
    assert len(found) == 101 + 2000 + 500 + 1 + 1 + 2000 + 1 + 1
    ((streamed, prepared),) = shop.execute(
        f"SELECT stream_txns > 0, two_phase FROM pg_stat_replication_slots JOIN"
        f" pg_replication_slots USING (slot_name) WHERE slot_name = '{slot}'"
    )
    assert (streamed, prepared) == (protocol != "1", two_phase)


def test_a_query_without_a_snapshot(spark: Any, shop: Any, tmp_path: Path) -> None:
    """It has what is committed once there is a slot, and no row of before."""
    queries = Queries(spark, shop, tmp_path, snapshot="never")
    assert queries.run() == []
    running = queries.start()
    try:
        shop.execute(
            f"INSERT INTO t {ROWS} FROM generate_series(200, 209) AS g",
            "UPDATE t SET b = NULL WHERE id = 200", "DELETE FROM t WHERE id IN (3, 201)",
        )  # fmt: skip
        wait_until(lambda: len(queries.changes()) == 13 or running.exception())
    finally:
        running.stop()
    found = queries.run()
    found.sort(key=lambda one: (one["commit_lsn"], one["seq"]))
    assert [one["op"] for one in found] == [*["insert"] * 10, "update", "delete", "delete"]
    # Row 3 was there before the slot.
    (deleted,) = (one for one in found if one["op"] == "delete" and one["before"]["id"] == 3)
    found.remove(deleted)
    wanted = shop.execute(f"SELECT {COLUMNS} FROM t WHERE id BETWEEN 200 AND 209")
    assert replay(found) == sorted(wanted, key=repr)


def test_values_that_a_column_can_not_hold(spark: Any, shop: Any, tmp_path: Path) -> None:
    """They end a query, which goes on where it was with another policy."""
    queries = Queries(spark, shop, tmp_path)
    assert len(queries.run()) == 101
    shop.execute(
        "UPDATE t SET day = 'infinity' WHERE id = 1",
        "UPDATE t SET n = 'NaN' WHERE id = 2",
        "UPDATE t SET day = '2025-01-01' WHERE id = 3",
    )
    with expect_error(StreamingQueryException, code="out_of_range", column="day"):
        queries.run()
    assert len(queries.changes()) == 101
    with expect_error(StreamingQueryException, code="out_of_range", column="n"):
        queries.run(policies="infinity=null")
    found = queries.run(policies="infinity=null;special_values=null")
    wanted = shop.execute(
        "SELECT id, v, NULLIF(n, 'NaN'), at, NULLIF(day, 'infinity'), f, y, m, a, b FROM t"
    )
    assert replay(found) == sorted(wanted, key=repr)
    # As text from the beginning, in another query.
    found = queries.run("text", policies="infinity=text;special_values=text", consumer="text")
    wanted = shop.execute("SELECT id, n::text, day::text FROM t")
    assert sorted((row[0], row[2], row[4]) for row in replay(found)) == sorted(wanted)
