"""Snapshots as columns: what the batches have, and how an iterator ends."""

from __future__ import annotations

import gc
import threading
from typing import TYPE_CHECKING, Any

import psycopg
import pyarrow as pa
import pytest
from support.expected_errors import expect_error
from support.waiting import wait_until

import pgoutput_fast as pf
from pgoutput_fast.replication import ReplicationConnection, RetryableError, slots, snapshot

if TYPE_CHECKING:
    pass

pytestmark = [pytest.mark.server]


@pytest.fixture
def shop(database: Any) -> Any:
    database.execute(
        "CREATE TABLE items (id int PRIMARY KEY, v text)",
        "INSERT INTO items SELECT g, repeat('v', g % 200) FROM generate_series(1, 5000) g",
        "CREATE TABLE none (id int)",
        "CREATE SCHEMA other",
        "CREATE TABLE other.things (id int, m money)",
        "INSERT INTO other.things VALUES (1, 12.5)",
        "CREATE PUBLICATION p FOR ALL TABLES",
    )
    return database


def threads() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name.startswith("pgoutput_fast-snap")]


def test_each_table_begins_with_a_truncate(shop: Any) -> None:
    with snapshot(shop.dsn, ["p"], range_bytes=64 << 10, connections=2) as batches:
        lsn = batches.lsn
        names = sorted(table.name for table in batches.tables)
        found: dict[str, list[dict[str, Any]]] = {}
        for batch in batches:
            found.setdefault(batch.relation.name, []).extend(pa.record_batch(batch).to_pylist())
    assert names == sorted(found) == ["items", "none", "things"]
    for rows in found.values():
        first, *rest = rows
        assert (first["op"], first["seq"], first["after"]) == ("truncate", 0, None)
        assert {row["op"] for row in rest} <= {"read"}
        assert {(row["xid"], row["commit_lsn"]) for row in rows} == {(None, lsn - 1)}
        assert len({row["seq"] for row in rows}) == len(rows)
    by_range: dict[int, list[int]] = {}
    for row in found["items"][1:]:
        by_range.setdefault(row["seq"] >> 32, []).append(row["seq"] & 0xFFFFFFFF)
    assert sorted(by_range) == list(range(1, len(by_range) + 1))
    assert len(by_range) > 3
    assert all(sorted(seqs) == list(range(len(seqs))) for seqs in by_range.values())
    expected = shop.execute("SELECT id, v FROM items ORDER BY id")
    assert sorted(tuple(row["after"].values()) for row in found["items"][1:]) == expected
    assert [row["after"] for row in found["things"][1:]] == [{"id": 1, "m": "$12.50"}]
    assert (threads(), shop.slots()) == ([], {})


def test_a_position_between_snapshot_and_stream(shop: Any) -> None:
    """The snapshot's rows come before every change of the stream of the slot."""
    slot = f"{shop.name}_s"
    with ReplicationConnection(shop.dsn) as connection:
        made = slots.create(connection, slot, snapshot=True)
        batches = snapshot(shop.dsn, ["p"], exported=made, tables="other.*")
    shop.execute("INSERT INTO other.things VALUES (2, 3)")
    with batches:
        assert batches.lsn == made.lsn
        rows = [row for batch in batches for row in pa.record_batch(batch).to_pylist()]
    assert [row["op"] for row in rows] == ["truncate", "read"]
    with pf.replication.connect(shop.dsn, slot=slot, publications=["p"]) as stream:
        for transaction in stream.transactions(idle_timeout=10):
            (batch,) = transaction.batches()
            rows += pa.record_batch(batch).to_pylist()
            break
    assert [row["after"] and row["after"]["id"] for row in rows] == [None, 1, 2]
    places = [(row["commit_lsn"], row["seq"]) for row in rows]
    assert places == sorted(set(places))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["close", "forget", "error", "end"])
def test_an_iterator_ends_its_threads_and_connections(shop: Any, how: str) -> None:
    batches = snapshot(shop.dsn, ["p"], range_bytes=8192, connections=3)
    for _ in range(5):
        next(batches)
    assert threads()
    if how == "close":
        batches.close()
        assert next(batches, None) is None
    elif how == "forget":
        del batches
        gc.collect()
    elif how == "error":
        shop.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
            " AND datname = current_database() AND backend_type = 'client backend'"
        )
        with expect_error(RetryableError, code="connection_lost"):
            list(batches)
    else:
        list(batches)
        assert next(batches, None) is None
    assert threads() == []
    wait_until(
        lambda: (
            shop.execute(
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
                " AND backend_type = 'client backend'"
            )
            == [(1,)]
        )
    )


def test_what_is_refused(shop: Any) -> None:
    with expect_error(code="no_table", parameter="tables"):
        snapshot(shop.dsn, ["p"], tables="public.no")
    with expect_error(code="bad_option", parameter="tables"):
        snapshot(shop.dsn, ["p"], tables="items")
    with expect_error(parameter="target"):
        snapshot(shop.dsn, ["p"], target="other")  # type: ignore[arg-type]
    with ReplicationConnection(shop.dsn) as connection:
        made = slots.create(connection, f"{shop.name}_s", temporary=True, snapshot=True)
        shop.execute("TRUNCATE items")
        with expect_error(RetryableError, code="conflict"):
            snapshot(shop.dsn, ["p"], exported=made)
    assert threads() == []


def test_a_value_that_no_column_holds_ends_it(shop: Any) -> None:
    shop.execute("CREATE TABLE dates (d date)", "INSERT INTO dates VALUES ('infinity')")
    with expect_error(pf.DecodeError, code="out_of_range"):
        list(snapshot(shop.dsn, ["p"], tables="public.dates"))
    policies = pf.Policies(infinity="null")
    rows = [
        row["after"]
        for batch in snapshot(shop.dsn, ["p"], tables="public.dates", policies=policies)
        for row in pa.record_batch(batch).to_pylist()
    ]
    assert rows == [None, {"d": None}]
    assert threads() == []


def test_a_password_is_not_shown(shop: Any) -> None:
    dsn = psycopg.conninfo.make_conninfo(shop.dsn, password="secret-word")
    with snapshot(dsn, ["p"]) as batches:
        assert "secret" not in repr(batches)
