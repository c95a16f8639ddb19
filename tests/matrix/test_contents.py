"""Transactions of every server version, held against what the server itself tells of them."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from support.recordings.decoding_output import told, truth

import pgoutput_fast as pf
from pgoutput_fast.replication import connect

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Needs = Callable[[int, str], None]

pytestmark = [pytest.mark.server, pytest.mark.slow]


@pytest.fixture
def shop(database: Any) -> Any:
    """A database with tables, all published, and a slot of each plugin."""
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, body text, note text)",
        "CREATE TABLE u (id int PRIMARY KEY, body text)",
        "CREATE TABLE w (id int, body text)",
        "ALTER TABLE w REPLICA IDENTITY FULL",
        "ALTER TABLE t ALTER body SET STORAGE EXTERNAL",
        "CREATE PUBLICATION p FOR ALL TABLES",
    )
    database.slot = f"{database.name}_ours"
    database.execute(f"SELECT pg_create_logical_replication_slot('{database.slot}', 'pgoutput')")
    database.truth = f"{database.name}_truth"
    try:
        database.execute(
            f"SELECT pg_create_logical_replication_slot('{database.truth}', 'test_decoding')"
        )
    except psycopg.errors.UndefinedFile:
        pytest.skip("this server comes without the plugin test_decoding")
    return database


def now(database: Any) -> int:
    ((lsn,),) = database.execute("SELECT pg_current_wal_lsn()::text")
    return pf.parse_lsn(lsn)


def write(database: Any) -> None:
    """Transactions of all kinds: small and large ones, interleaved, rolled back in part."""
    gid = database.name
    database.execute(
        "INSERT INTO t VALUES (1, 'it''s', NULL), (2, repeat('x', 5000), 'n')",
        "UPDATE t SET note = 'changed' WHERE id = 2",
        "UPDATE t SET id = 3 WHERE id = 1",
        "INSERT INTO w VALUES (1, NULL), (2, 'two')",
        "UPDATE w SET body = 'zwei' WHERE id = 2",
        "DELETE FROM w WHERE id = 1",
        "DELETE FROM t WHERE id = 3",
        "TRUNCATE t, w",
        "TRUNCATE u RESTART IDENTITY CASCADE",
        "SELECT pg_logical_emit_message(false, 'outside', 'one')",
        "BEGIN; SELECT pg_logical_emit_message(true, 'inside', 'two');"
        " INSERT INTO u VALUES (0, 'x');"
        " SELECT pg_logical_emit_message(true, 'inside', 'three'); COMMIT",
        # Savepoints that are rolled back, before, between and inside of ones that stay.
        "BEGIN; INSERT INTO u SELECT g, repeat('a', 90) FROM generate_series(1000, 1999) g;"
        " SAVEPOINT a; INSERT INTO u SELECT g, repeat('b', 90) FROM generate_series(2000, 2999) g;"
        " SAVEPOINT b; INSERT INTO t SELECT g, repeat('c', 90) FROM generate_series(3000, 3999) g;"
        " ROLLBACK TO b; INSERT INTO u VALUES (4000, 'd'); RELEASE a; SAVEPOINT c;"
        " INSERT INTO w SELECT g, repeat('e', 90) FROM generate_series(5000, 5999) g;"
        " ROLLBACK TO c; INSERT INTO t VALUES (6000, 'f'); COMMIT",
        # What is rolled back altogether, and what has nothing left.
        "BEGIN; INSERT INTO u SELECT g, repeat('g', 90) FROM generate_series(1, 999) g; ROLLBACK",
        "BEGIN; SAVEPOINT a; INSERT INTO u SELECT g, repeat('g', 90) FROM"
        " generate_series(7000, 7999) g; ROLLBACK TO a; COMMIT",
        # Tables that are altered, made and dropped while their rows are streamed.
        "BEGIN; INSERT INTO u SELECT g, repeat('h', 90) FROM generate_series(8000, 8999) g;"
        " ALTER TABLE u ADD COLUMN more int DEFAULT 7;"
        " INSERT INTO u SELECT g, repeat('i', 90), g FROM generate_series(9000, 9999) g;"
        " CREATE TABLE fresh (id int PRIMARY KEY, body text);"
        " INSERT INTO fresh SELECT g, repeat('j', 90) FROM generate_series(1, 999) g;"
        " ALTER TABLE u RENAME COLUMN body TO content; UPDATE u SET more = 8 WHERE id < 1500;"
        " ALTER TABLE u DROP COLUMN more; INSERT INTO u VALUES (10000, 'k'); COMMIT",
        "BEGIN; CREATE TABLE brief (id int); INSERT INTO brief SELECT generate_series(1, 3000);"
        " DROP TABLE brief; INSERT INTO u VALUES (10001, 'l'); COMMIT",
        # A rolled back savepoint with DDL: the table has its old form again.
        "BEGIN; INSERT INTO u SELECT g, repeat('m', 90) FROM generate_series(11000, 11999) g;"
        " SAVEPOINT a; ALTER TABLE u ADD COLUMN gone text;"
        " INSERT INTO u SELECT g, 'n', repeat('n', 90) FROM generate_series(12000, 12999) g;"
        " ROLLBACK TO a;"
        " INSERT INTO u SELECT g, repeat('o', 90) FROM generate_series(13000, 13999) g; COMMIT",
        f"BEGIN; INSERT INTO u VALUES (20000, 'p'); PREPARE TRANSACTION '{gid}_a'",
        f"BEGIN; INSERT INTO t SELECT g, repeat('q', 90) FROM generate_series(21000, 21999) g;"
        f" SAVEPOINT a; INSERT INTO t SELECT g, 'r' FROM generate_series(22000, 22999) g;"
        f" ROLLBACK TO a; PREPARE TRANSACTION '{gid}_b'",
        f"BEGIN; INSERT INTO w SELECT g, repeat('q', 90) FROM generate_series(1, 1999) g;"
        f" PREPARE TRANSACTION '{gid}_c'",
        "INSERT INTO fresh VALUES (0, 'between')",
        f"COMMIT PREPARED '{gid}_b'",
        f"ROLLBACK PREPARED '{gid}_c'",
        f"COMMIT PREPARED '{gid}_a'",
    )
    with database.connect() as one, database.connect() as other, database.connect() as third:
        for connection in (one, other, third):
            connection.execute("BEGIN")
        for begin in range(30000, 36000, 500):
            for at, connection in enumerate((one, other, third)):
                connection.execute(
                    "INSERT INTO fresh SELECT g, md5(g::text) FROM generate_series(%s::int, %s) g",
                    [begin + at * 10000, begin + at * 10000 + 499],
                )
        other.execute("COMMIT")
        one.execute("ROLLBACK")
        third.execute("COMMIT")
    database.execute(
        "BEGIN; INSERT INTO w SELECT g, md5(g::text) FROM generate_series(1, 12000) g;"
        " UPDATE w SET body = 'u' WHERE id % 3 = 0; DELETE FROM w WHERE id % 2 = 0; COMMIT"
    )


def ways(version: int) -> list[dict[str, Any]]:
    """Each way in which a server of this version can send it; two_phase at last, as it stays."""
    newest = {14: 2, 15: 3}.get(version, 4)
    found: list[dict[str, Any]] = [{}, {"binary": True, "max_memory": 0}]
    for protocol in range(1, newest + 1):
        found.append({"protocol": protocol, "streaming": False})
        if protocol >= 2:
            found.append({"protocol": protocol, "streaming": "on"})
    if newest >= 4:
        found.append({"protocol": 4, "streaming": "parallel"})
    if newest >= 3:
        found += [
            {"protocol": protocol, "two_phase": True, "max_memory": max_memory}
            for protocol, max_memory in itertools.product(range(3, newest + 1), (0, 64 << 20))
        ]
    return found


def test_transactions_are_those_of_the_server(shop: Any, version: int) -> None:
    write(shop)
    end = now(shop)
    expected = truth(shop, shop.truth)
    assert len(expected) > 20
    assert sum(len(lines) for _, lines in expected) > 30_000
    seen = []
    for way in ways(version):
        with connect(shop.dsn, slot=shop.slot, publications=["p"], messages=True, **way) as stream:
            found = told(stream.transactions(stop_at=end))
        for (transaction, lines), theirs in zip(found, expected, strict=True):
            assert (transaction.xid, lines) == theirs, way
        given = [transaction for transaction, _ in found]
        positions = [one.commit_lsn for one in given if one.kind == "commit"]
        assert positions == sorted(set(positions))
        seen.append([(one.xid, one.commit_lsn, one.end_lsn, one.commit_time) for one in given])
    assert all(one == seen[0] for one in seen)


@pytest.fixture
def replicated(shop: Any) -> Iterator[Any]:
    """The same with two transactions that were replicated to it, and one of its own."""
    shop.execute(f"SELECT pg_replication_origin_create('{shop.name}')")
    with shop.connect() as replayed:
        replayed.execute("SELECT pg_replication_origin_session_setup(%s)", [shop.name])
        for number, size in ((1, 1), (100, 3000)):
            replayed.execute("BEGIN")
            replayed.execute(
                "SELECT pg_replication_origin_xact_setup(%s::pg_lsn, now())", [f"0/{number}"]
            )
            replayed.execute(
                "INSERT INTO t SELECT g, repeat('x', 90) FROM generate_series(%s::int, %s) g",
                [number, number + size - 1],
            )
            replayed.execute("COMMIT")
    shop.execute("INSERT INTO t VALUES (2)")
    yield shop
    shop.execute(f"SELECT pg_replication_origin_drop('{shop.name}')")


def test_only_changes_without_an_origin_come(replicated: Any, version: int) -> None:
    shop, end = replicated, now(replicated)
    for way in ways(version):
        with connect(shop.dsn, slot=shop.slot, publications=["p"], **way) as stream:
            found = told(stream.transactions(stop_at=end))
        assert [(one.origin, len(lines)) for one, lines in found] == [
            (shop.name, 1),
            (shop.name, 3000),
            (None, 1),
        ], way


def test_what_was_replicated_can_be_left_out(replicated: Any, needs: Needs) -> None:
    shop, end = replicated, now(replicated)
    needs(16, "origin='none'")
    for streaming in (True, False):
        with connect(
            shop.dsn, slot=shop.slot, publications=["p"], origin="none", streaming=streaming
        ) as stream:
            found = told(stream.transactions(stop_at=end))
        assert [(one.origin, len(lines)) for one, lines in found] == [(None, 1)]


def rows(transactions: Any) -> list[dict[str, Any]]:
    """What a table has after its inserted, updated and deleted rows, whose key is `id`."""
    state: dict[int, dict[str, Any]] = {}
    for transaction in transactions:
        for message in transaction:
            if isinstance(message, (pf.Insert, pf.Update)):
                if isinstance(message, pf.Update) and message.old is not None:
                    state.pop(message.old["id"])
                row = message.new.as_dict()
                state[row["id"]] = row
            elif isinstance(message, pf.Delete):
                state.pop(message.old["id"])
    return [state[key] for key in sorted(state)]


def test_row_filters_and_column_lists(shop: Any, version: int, needs: Needs) -> None:
    """The rows that arrive are those that the server finds by the same condition."""
    needs(15, "a publication with a row filter or a column list")
    condition = "id % 3 = 0 AND id < 4000"
    shop.execute(f"CREATE PUBLICATION part FOR TABLE u (id), t (id, note) WHERE ({condition})")
    shop.execute(
        "BEGIN; INSERT INTO t SELECT g, repeat('x', 90), 'n' || g FROM generate_series(1, 5000) g;"
        " SAVEPOINT a; DELETE FROM t WHERE id < 100; ROLLBACK TO a; COMMIT",
        "UPDATE t SET note = 'new' WHERE id % 5 = 0",
        "UPDATE t SET id = id + 10000 WHERE id % 9 = 0",  # leave it
        "UPDATE t SET id = id - 10000 WHERE id > 10000 AND id % 7 = 0",  # come again
        "DELETE FROM t WHERE id % 4 = 0",
    )
    end = now(shop)
    expected = [
        {"id": number, "note": note}
        for number, note in shop.execute(f"SELECT id, note FROM t WHERE {condition} ORDER BY id")
    ]
    assert len(expected) > 500
    for way in ways(version):
        with connect(shop.dsn, slot=shop.slot, publications=["part"], **way) as stream:
            assert rows(stream.transactions(stop_at=end)) == expected, way
