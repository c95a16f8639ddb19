"""Whole transactions of real servers: the same from each protocol version, and resumed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from support.expected_errors import expect_error

import pgoutput_fast as pf
from pgoutput_fast.replication import capture, connect, slots

if TYPE_CHECKING:
    from pathlib import Path


pytestmark = pytest.mark.server

GIVEN: dict[str, Any] = {"publications": ["p"]}


@pytest.fixture
def shop(database: Any) -> Any:
    """A database with a table and a slot."""
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, body text)",
        "CREATE TABLE other (id int)",
        "CREATE PUBLICATION p FOR TABLE t",
    )
    database.slot = f"slot_{database.name}"
    database.execute(f"SELECT pg_create_logical_replication_slot('{database.slot}', 'pgoutput')")
    return database


def now(database: Any) -> int:
    ((lsn,),) = database.execute("SELECT pg_current_wal_lsn()::text")
    return pf.parse_lsn(lsn)


def confirmed(database: Any) -> int:
    ((lsn,),) = database.execute(
        "SELECT confirmed_flush_lsn::text FROM pg_replication_slots"
        f" WHERE slot_name = '{database.slot}'"
    )
    return pf.parse_lsn(lsn)


def ids(transaction: Any) -> list[int]:
    """Of the inserted rows, by its columns."""
    found: list[int] = []
    for batch in transaction.batches():
        rows = pa.record_batch(batch).to_pylist()
        assert {row["commit_lsn"] for row in rows} == {transaction.commit_lsn}
        assert {row["xid"] for row in rows} == {transaction.xid}
        found += [row["after"]["id"] for row in rows]
    return found


SCENARIO = (
    "INSERT INTO t VALUES (1, 'x')",
    (
        "BEGIN; INSERT INTO t SELECT g, repeat('x', 200) FROM generate_series(100, 2099) g;"
        " SAVEPOINT s; INSERT INTO t SELECT g, repeat('y', 200) FROM generate_series(3000, 3999) g;"
        " ROLLBACK TO s; INSERT INTO t VALUES (4000, 'z'); COMMIT"
    ),
    "BEGIN; INSERT INTO t SELECT g, repeat('x', 200) FROM generate_series(5000, 6000) g; ROLLBACK",
    "BEGIN; INSERT INTO t VALUES (2, 'x'); PREPARE TRANSACTION '{0}_a'",
    "INSERT INTO t VALUES (3, 'x')",
    (
        "BEGIN; INSERT INTO t SELECT g, repeat('x', 200) FROM generate_series(7000, 7999) g;"
        " PREPARE TRANSACTION '{0}_b'"
    ),
    "COMMIT PREPARED '{0}_a'",
    "ROLLBACK PREPARED '{0}_b'",
    "SELECT pg_logical_emit_message(false, 'outside', 'one')",
    "INSERT INTO t VALUES (4, 'x')",
)
EXPECTED = [
    [1],
    [*range(100, 2100), 4000],
    [3],
    [2],
    [],
    [4],
]


def test_each_protocol_brings_the_same(shop: Any) -> None:
    shop.execute(*(statement.format(shop.name) for statement in SCENARIO))
    end = now(shop)
    seen = []
    ways: list[dict[str, Any]] = [
        {"protocol": 1},
        {"protocol": 2, "binary": True},
        {"protocol": 3, "streaming": False},
        {"streaming": "on"},
        {},
        {"two_phase": True},  # at last, as it stays
        {"two_phase": None, "binary": True, "max_memory": 0},
    ]
    for way in ways:
        with connect(
            shop.dsn, slot=shop.slot, messages=True, options="-c logical_decoding_work_mem=64kB",
            **GIVEN, **way,
        ) as stream:  # fmt: skip
            found = list(stream.transactions(stop_at=end))
            assert [ids(transaction) for transaction in found] == EXPECTED, way
            assert [transaction.kind for transaction in found].index("message") == 4
            gids = [transaction.gid for transaction in found]
            assert gids[3] == (f"{shop.name}_a" if "two_phase" in way else None)
            seen.append([(one.xid, one.commit_lsn, one.end_lsn, one.commit_time) for one in found])
    assert all(one == seen[0] for one in seen)


def test_large_transactions_come_while_they_are_in_progress(shop: Any) -> None:
    with (
        connect(
            shop.dsn, slot=shop.slot, options="-c logical_decoding_work_mem=64kB", **GIVEN
        ) as stream,
        shop.connect() as writer,
    ):
        writer.execute("BEGIN")
        writer.execute("INSERT INTO t SELECT g, repeat('x', 200) FROM generate_series(1, 3000) g")
        assert next(iter(stream)).frame[:1] == b"S"
        writer.execute("ROLLBACK")


def test_what_is_acknowledged_does_not_come_again(shop: Any) -> None:
    shop.execute(*(f"INSERT INTO t VALUES ({number}, 'x')" for number in range(4)))
    end = now(shop)
    with connect(shop.dsn, slot=shop.slot, **GIVEN) as stream:
        for transaction in stream.transactions():
            if ids(transaction) == [1]:
                stream.acknowledge(transaction)
                break
    assert confirmed(shop) == transaction.end_lsn
    with connect(shop.dsn, slot=shop.slot, **GIVEN) as stream:
        assert [ids(one) for one in stream.transactions(stop_at=end)] == [[2], [3]]


def test_a_consumer_that_stores_its_position_has_everything_once(shop: Any) -> None:
    """It is told nothing of what was acknowledged, and may be ended anywhere."""
    shop.execute(*(f"INSERT INTO t VALUES ({number}, 'x')" for number in range(6)))
    end = now(shop)
    stored: list[int] = []
    position = timeline = None
    for count in (1, 2, 3):
        with connect(
            shop.dsn, slot=shop.slot, start_lsn=position, start_timeline=timeline, **GIVEN
        ) as stream:
            for transaction, _ in zip(stream.transactions(stop_at=end), range(count), strict=False):
                stored += ids(transaction)
                position, timeline = transaction.end_lsn, stream.timeline
    assert stored == [0, 1, 2, 3, 4, 5]


def test_with_prepared_transactions_the_client_leaves_out_what_it_has(shop: Any) -> None:
    """The stream begins where the slot stands, before what was prepared and not yet committed."""
    shop.execute(
        f"BEGIN; INSERT INTO t VALUES (1, 'x'); PREPARE TRANSACTION '{shop.name}'",
        "INSERT INTO t VALUES (2, 'x')",
        "INSERT INTO t VALUES (3, 'x')",
    )
    end = now(shop)
    with connect(shop.dsn, slot=shop.slot, two_phase=True, **GIVEN) as stream:
        first = next(stream.transactions())
        assert ids(first) == [2]
        stream.acknowledge(first)
    assert confirmed(shop) < first.commit_lsn
    with connect(
        shop.dsn, slot=shop.slot, two_phase=True, start_lsn=first.end_lsn, **GIVEN
    ) as stream:
        transactions = stream.transactions()
        third = next(transactions)
        assert ids(third) == [3]
        stream.acknowledge(third)
        shop.execute(f"COMMIT PREPARED '{shop.name}'")
        committed = next(transactions)
        assert (ids(committed), committed.gid) == ([1], shop.name)
        stream.acknowledge(committed)
    assert confirmed(shop) == committed.end_lsn > end
    # Beyond its PREPARE, the commit of a prepared transaction has no rows.
    shop.execute(f"BEGIN; INSERT INTO t VALUES (4, 'x'); PREPARE TRANSACTION '{shop.name}'")
    shop.execute(f"SELECT pg_replication_slot_advance('{shop.slot}', pg_current_wal_lsn())")
    shop.execute(f"COMMIT PREPARED '{shop.name}'")
    with (
        connect(shop.dsn, slot=shop.slot, two_phase=True, **GIVEN) as stream,
        expect_error(code="changes_missing"),
    ):
        next(stream.transactions())
    # Nor does a keepalive behind it pass for the end of what there is.
    with (
        connect(shop.dsn, slot=shop.slot, two_phase=True, **GIVEN) as stream,
        expect_error(code="changes_missing"),
    ):
        list(stream.transactions(stop_at=now(shop)))
    with connect(
        shop.dsn, slot=shop.slot, two_phase=True, unknown_prepared="empty", **GIVEN
    ) as stream:
        assert ids(next(stream.transactions())) == []


def test_prepared_transactions_that_overlap(shop: Any) -> None:
    """A consumer without a position of its own begins again where none was prepared."""
    one, two = f"{shop.name} 1", f"{shop.name} 2"
    shop.execute(
        f"BEGIN; INSERT INTO t VALUES (1, 'x'); PREPARE TRANSACTION '{one}'",
        f"BEGIN; INSERT INTO t VALUES (2, 'x'); PREPARE TRANSACTION '{two}'",
        f"COMMIT PREPARED '{one}'",
        "INSERT INTO t VALUES (3, 'x')",
    )
    end = now(shop)
    for _ in range(2):
        with connect(shop.dsn, slot=shop.slot, two_phase=True, **GIVEN) as stream:
            for transaction, row in zip(stream.transactions(stop_at=end), (1, 3), strict=True):
                assert ids(transaction) == [row]
                stream.acknowledge(transaction)
    shop.execute(f"COMMIT PREPARED '{two}'")
    with connect(shop.dsn, slot=shop.slot, two_phase=True, **GIVEN) as stream:
        found = list(stream.transactions(stop_at=now(shop)))
        assert [ids(transaction) for transaction in found] == [[1], [3], [2]]
        stream.acknowledge(found[-1])
    assert confirmed(shop) == found[-1].end_lsn


@pytest.mark.parametrize("prepared", ["commit", "prepare"])
def test_a_table_altered_around_prepared_transactions(shop: Any, prepared: Any) -> None:
    """What a prepared transaction announced is not announced again, unless it altered the table."""
    prepare, roll_back = f"PREPARE TRANSACTION '{shop.name}'", f"ROLLBACK PREPARED '{shop.name}'"
    rows = "INSERT INTO t SELECT g, repeat('x', 200) FROM generate_series(100, 1099) g"
    alter = "ALTER TABLE t ADD c int"
    statements = [
        # The first that announces the table, and then one that has rows before and after ALTER.
        f"BEGIN; INSERT INTO t VALUES (1, 'x'); {prepare}", roll_back,
        f"BEGIN; INSERT INTO t VALUES (2, 'x'); {alter}; INSERT INTO t VALUES (3, 'x', 5); COMMIT",
        # Altered before it.
        "ALTER TABLE t ADD d int DEFAULT 6",
        f"BEGIN; INSERT INTO t VALUES (4, 'x'); {prepare}", roll_back,
        "INSERT INTO t VALUES (5, 'x')",
        # Altered in it, whole and streamed.
        f"BEGIN; ALTER TABLE t DROP c; INSERT INTO t VALUES (6, 'x'); {prepare}", roll_back,
        "INSERT INTO t VALUES (7, 'x')",
        f"BEGIN; ALTER TABLE t DROP d; {rows}; {prepare}", roll_back,
        "INSERT INTO t VALUES (8, 'x')",
    ]  # fmt: skip
    found: dict[int, dict[str, Any]] = {}
    with connect(
        shop.dsn, slot=shop.slot, two_phase=True, prepared=prepared,
        options="-c logical_decoding_work_mem=64kB", **GIVEN,
    ) as stream:  # fmt: skip
        for statement in statements:
            shop.execute(statement)
            # At once, as a server leaves out what was rolled back before it is sent.
            for one in stream.transactions(stop_at=now(shop)):
                if one.kind == "commit":
                    new = [message.new for message in one if isinstance(message, pf.Insert)]
                    found |= {row["id"]: row.as_dict() for row in new}
    with shop.connect() as connection:
        cursor = connection.execute("SELECT * FROM t WHERE id > 3")
        names = [column.name for column in cursor.description]
        expected = {row[0]: dict(zip(names, row, strict=True)) for row in cursor}
    expected[2] = {"id": 2, "body": "x"}  # as it was before the columns were added
    expected[3] = {"id": 3, "body": "x", "c": 5}
    assert found == expected


def test_an_idle_slot_moves_on(shop: Any) -> None:
    """The log of other tables is let go, once everything that was given is acknowledged."""
    shop.execute("INSERT INTO t VALUES (1, 'x')")
    with connect(shop.dsn, slot=shop.slot, **GIVEN) as stream:
        (transaction,) = stream.transactions(idle_timeout=1)
        shop.execute("INSERT INTO other VALUES (1)")
        stream.acknowledge(transaction)
        end = now(shop)
        assert list(stream.transactions(stop_at=end)) == []
        assert list(stream.transactions(idle_timeout=0.5)) == []
    assert confirmed(shop) >= end > transaction.end_lsn


def test_a_stored_position_follows_an_idle_slot(shop: Any) -> None:
    """The server is told of an idle stretch only once the consumer has stored that it is there."""
    stored: list[int] = []
    shop.execute("INSERT INTO t VALUES (1, 'x')")

    def store(lsn: int) -> None:
        assert confirmed(shop) < lsn
        stored.append(lsn)

    with connect(shop.dsn, slot=shop.slot, on_idle=store, **GIVEN) as stream:
        (transaction,) = stream.transactions(idle_timeout=1)
        shop.execute("INSERT INTO other VALUES (1)")
        end = now(shop)
        assert list(stream.transactions(idle_timeout=1.5)) == []
        assert stored == []  # the transaction is not acknowledged
        stream.acknowledge(transaction)
        while not stored or stored[-1] < end:
            assert list(stream.transactions(idle_timeout=1)) == []
    assert confirmed(shop) == stored[-1]
    with connect(shop.dsn, slot=shop.slot, start_lsn=stored[-1], **GIVEN) as stream:
        shop.execute("INSERT INTO other VALUES (2)")
        assert list(stream.transactions(idle_timeout=2)) == []
        assert confirmed(shop) == stored[-1]  # nothing would store another position
        shop.execute("INSERT INTO t VALUES (2, 'x')")
        (transaction,) = stream.transactions(idle_timeout=2)
        assert ids(transaction) == [2]
    with expect_error(code="changes_missing"):
        connect(shop.dsn, slot=shop.slot, start_lsn=stored[-1] - 8, **GIVEN)


def test_a_publication_that_is_dropped_meanwhile(database18: Any, tmp_path: Path) -> None:
    """PostgreSQL 18 warns and leaves its changes out; older servers end the stream."""
    database18.execute(
        "CREATE TABLE kept (id int PRIMARY KEY)",
        "CREATE TABLE gone (id int PRIMARY KEY)",
        "CREATE PUBLICATION stays FOR TABLE kept",
        "CREATE PUBLICATION goes FOR TABLE gone",
    )
    # Sessions of some role or database may be sent no warnings.
    dsn = database18.dsn + " options='-c client_min_messages=error'"
    given: Any = {"slot": "left_out", "publications": ["stays", "goes"]}
    with connect(dsn, create_slot=True, **given) as s:
        database18.execute("INSERT INTO gone VALUES (1)", "INSERT INTO kept VALUES (1)")
        assert len(list(s.transactions(stop_at=now(database18)))) == 2
        database18.execute(
            "INSERT INTO kept VALUES (2)",
            "DROP PUBLICATION goes",
            "INSERT INTO gone VALUES (2)",
            "CREATE PUBLICATION goes FOR TABLE gone",
            "INSERT INTO kept VALUES (3)",
        )
        found = []

        def consume() -> None:
            for transaction in s.transactions(stop_at=now(database18)):
                found.extend(message.new["id"] for message in transaction if message.tag == "I")
                s.acknowledge(transaction)

        with expect_error(code="no_publication"):
            consume()
    assert found == [2]
    # The slot stays before it, and says so again, to readers of frames and to a capture too.
    with connect(dsn, protocol=1, **given) as s:
        with expect_error(code="no_publication"):
            next(iter(s))  # a keepalive may come first, and by itself: a batch without frames
        with expect_error(code="no_publication"):
            s.receive(10)
    with expect_error(code="no_publication"):
        capture(dsn, directory=tmp_path, adopt_slot=True, **given)
    slots.drop(database18.dsn, "left_out")
