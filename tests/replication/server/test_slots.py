"""Slots: made, dropped, listed, advanced; and each of their states told apart, with advice."""

from __future__ import annotations

import time
import types
from typing import Any

import psycopg
import pytest
from support.expected_errors import expect_error
from support.waiting import wait_until

import pgoutput_fast as pf
from pgoutput_fast.embedded import EmbeddedServer
from pgoutput_fast.replication import (
    ReplicationConnection,
    ReplicationError,
    RetryableError,
    capture,
    connect,
    slots,
    source,
    walsender,
)

pytestmark = pytest.mark.server


@pytest.fixture
def shop(database: Any) -> Any:
    """A database with a table t, and the name of a slot, which is not there."""
    database.execute("CREATE TABLE t (id int PRIMARY KEY)", "CREATE PUBLICATION p FOR TABLE t")
    database.slot = f"slot_{database.name}"
    return database


def now(database: Any) -> int:
    ((lsn,),) = database.execute("SELECT pg_current_wal_lsn()::text")
    return pf.parse_lsn(lsn)


def named(database: Any) -> Any:
    (found,) = (slot for slot in slots.list(database.dsn) if slot.name == database.slot)
    return found


def test_made_listed_advanced_dropped(shop: Any) -> None:
    made = slots.create(shop.dsn, shop.slot)
    assert (made.name, made.snapshot) == (shop.slot, None)
    found = named(shop)
    assert found == slots.SlotState(
        plugin="pgoutput", database=shop.name, confirmed_flush_lsn=made.lsn, active_pid=None,
        wal_status="reserved", name=shop.slot, restart_lsn=found.restart_lsn,
    )  # fmt: skip
    assert 0 < found.restart_lsn <= made.lsn
    with expect_error(ReplicationError, code="already_exists", sqlstate="42710"):
        slots.create(shop.dsn, shop.slot)
    shop.execute("INSERT INTO t VALUES (1)")
    end = now(shop)
    shop.execute("INSERT INTO t VALUES (2)")
    assert made.lsn < slots.advance(shop.dsn, shop.slot, end) <= end
    with expect_error(code="bad_option"):
        slots.advance(shop.dsn, shop.slot, made.lsn)
    with expect_error(code="bad_option"):
        slots.advance(shop.dsn, shop.slot, 0xFFF << 32)
    with pytest.raises(TypeError, match="lsn"):
        slots.advance(shop.dsn, shop.slot, "0/1")  # type: ignore[arg-type]
    with connect(shop.dsn, slot=shop.slot, publications=["p"]) as stream:
        decoder = pf.Decoder()
        ids = [
            m.new["id"] for m in map(decoder.decode, frames(stream, 4)) if isinstance(m, pf.Insert)
        ]
    assert ids == [2]
    slots.drop(shop.dsn, shop.slot)
    assert shop.slots() == {}
    with expect_error(ReplicationError, code="no_slot", sqlstate="42704"):
        slots.drop(shop.dsn, shop.slot)
    with expect_error(code="no_slot"):
        slots.advance(shop.dsn, shop.slot, 1)


def frames(stream: Any, count: int) -> list[bytes]:
    found: list[bytes] = []
    while len(found) < count:
        batch = stream.receive(30)
        assert batch is not None
        assert batch.frames or batch.keepalive_lsn is not None, "waited in vain"
        found += [frame for *_, frame in batch.frames]
    return found


def test_temporary_slots_and_snapshots_belong_to_a_connection(shop: Any) -> None:
    for option in ("temporary", "snapshot"):
        with expect_error(code="unfit_input"):
            slots.create(shop.dsn, shop.slot, **{option: True})
    shop.execute("INSERT INTO t VALUES (1)")
    with ReplicationConnection(shop.dsn) as connection:
        made = slots.create(connection, shop.slot, temporary=True, snapshot=True)
        shop.execute("INSERT INTO t VALUES (2)")
        with shop.connect() as other:
            other.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
            other.execute(psycopg.sql.SQL("SET TRANSACTION SNAPSHOT {}").format(made.snapshot))
            assert other.execute("SELECT id FROM t").fetchall() == [(1,)]
            other.execute("ROLLBACK")
        assert [slot.temporary for slot in slots.list(connection) if slot.name == shop.slot] == [
            True
        ]
    # The server drops it when it has noticed that the connection has ended.
    wait_until(lambda: shop.slots() == {})


def test_a_slot_that_is_marked_two_phase(shop: Any) -> None:
    slots.create(shop.dsn, shop.slot, two_phase=True)
    assert named(shop).two_phase
    given: Any = {"slot": shop.slot, "publications": ["p"]}
    with expect_error(code="bad_option", parameter="two_phase"):
        connect(shop.dsn, **given)
    with expect_error(code="bad_option", parameter="two_phase"):
        capture(shop.dsn, directory="/nonexistent", adopt_slot=True, **given)
    shop.execute(
        "BEGIN; INSERT INTO t VALUES (1); PREPARE TRANSACTION 'one'", "COMMIT PREPARED 'one'"
    )
    for two_phase in (None, True):
        with connect(shop.dsn, two_phase=two_phase, **given) as stream:
            assert [frame[:1] for frame in frames(stream, 5)] == [b"b", b"R", b"I", b"P", b"K"]
    slots.drop(shop.dsn, shop.slot)
    with connect(shop.dsn, two_phase=True, create_slot=True, **given):
        assert named(shop).two_phase
    slots.drop(shop.dsn, shop.slot)
    with connect(shop.dsn, two_phase=None, create_slot=True, **given):
        assert not named(shop).two_phase


def test_failover_slots(shop: Any) -> None:
    if shop.server.version < 17:
        with expect_error(parameter="failover"):
            slots.create(shop.dsn, shop.slot, failover=True)
    else:
        slots.create(shop.dsn, shop.slot, failover=True)
        assert named(shop).failover


def test_an_unknown_option_leaves_the_slot_alone(shop: Any) -> None:
    options: Any = {"protocol": 1, "streaming": "on"}
    with expect_error(code="bad_option", parameter="streaming"):
        connect(shop.dsn, slot=shop.slot, publications=["p"], create_slot=True, **options)
    assert shop.slots() == {}


def test_positions_from_which_the_server_cannot_go_on(shop: Any) -> None:
    begins = slots.create(shop.dsn, shop.slot).lsn
    given: Any = {"slot": shop.slot, "publications": ["p"]}
    with expect_error(code="changes_missing"):
        connect(shop.dsn, start_lsn=begins - 1, **given)
    with expect_error(code="another_history"):
        connect(shop.dsn, start_lsn=123 << 32, **given)
    with expect_error(code="another_history"):
        connect(shop.dsn, start_lsn=begins, start_timeline=7, **given)
    with connect(shop.dsn, start_lsn=begins, start_timeline=1, **given) as stream:
        assert stream.timeline == 1
        assert stream.protocol == 4
        assert stream.acknowledged_lsn == begins


HISTORY = "1\t0/5000000\tno recovery target\n\n2\t0/6000000\tbefore 2026\n"


class Restored:
    """A connection to a server on timeline 3."""

    timeline = 3
    in_recovery = False
    end_lsn = 0x7000000
    end_of_timeline = ReplicationConnection.end_of_timeline

    def query(self, command: str) -> list[Any]:
        assert command == "TIMELINE_HISTORY 3"
        return [("00000003.history", HISTORY.encode())]


@pytest.mark.parametrize(
    ("timeline", "position", "is_refused"),
    [
        (1, 0x5000000, False),
        (1, 0x5000001, True),
        (2, 0x6000000, False),
        (2, 0x6000001, True),
        (3, 0x6500000, False),
        (None, 0x6500000, False),
        (4, 0x1, True),
        (3, 0x7000001, True),
    ],
)
def test_another_timeline(timeline: Any, position: int, is_refused: bool) -> None:
    connection: Any = Restored()
    if not is_refused:
        source.check_position(connection, "s", 0, position, timeline)
        return
    with expect_error(code="another_history") as caught:
        source.check_position(connection, "s", 0, position, timeline)
    assert not isinstance(caught.value, RetryableError)


def test_a_standby_that_has_not_come_so_far_yet() -> None:
    connection: Any = Restored()
    connection.in_recovery = True
    with expect_error(RetryableError, code="standby"):
        source.check_position(connection, "s", 0, 0x7000001)


def state(**fields: Any) -> Any:
    return slots.SlotState("pgoutput", "d", 5, None, "reserved", name="s")._replace(**fields)


@pytest.mark.parametrize(
    ("fields", "code", "passes"),
    [
        ({"wal_status": "lost"}, "changes_missing", False),
        ({"invalidation_reason": "idle_timeout"}, "changes_missing", False),
        ({"invalidation_reason": "rows_removed"}, "changes_missing", False),
        ({"invalidation_reason": "wal_level_insufficient"}, "changes_missing", False),
        ({"invalidation_reason": "new"}, "changes_missing", False),
        ({"plugin": None}, "not_ours", False),
        ({"plugin": "test_decoding"}, "not_ours", False),
        ({"database": "other"}, "not_ours", False),
        ({"confirmed_flush_lsn": None}, "in_use", True),
        ({"synced": True}, "standby", True),
    ],
)
def test_states_of_slots(
    fields: dict[str, Any], code: str, passes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = ReplicationConnection.__new__(ReplicationConnection)
    connection.database, connection.in_recovery = "d", True
    found = [state(**fields)]
    monkeypatch.setattr(connection, "slots", lambda name: found)
    with expect_error(code=code) as caught:
        connection.slot("s")
    assert isinstance(caught.value, RetryableError) is passes
    found[:] = [state()]
    assert connection.slot("s") == state()
    found.clear()
    assert connection.slot("s") is None


def test_a_slot_that_another_makes_meanwhile_is_not_dropped(
    shop: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between a capture's look at the slot and its making of one."""
    found = ReplicationConnection.slot

    def slot(self: Any, name: str) -> Any:
        seen = found(self, name)
        if seen is None:
            slots.create(shop.dsn, name)
        return seen

    monkeypatch.setattr(ReplicationConnection, "slot", slot)
    with expect_error(ReplicationError, code="already_exists"):
        capture(shop.dsn, slot=shop.slot, publications=["p"], directory=tmp_path, create_slot=True)
    # Nor does the directory take it later on.
    with expect_error(code="not_ours", path=str(tmp_path)):
        capture(shop.dsn, slot=shop.slot, publications=["p"], directory=tmp_path, create_slot=True)
    assert shop.slots() == {shop.slot: False}


def test_a_slot_in_use_is_an_error_that_passes(shop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walsender, "_BUSY_WAITS", (0.01,))
    given: Any = {"slot": shop.slot, "publications": ["p"]}
    with (
        connect(shop.dsn, create_slot=True, **given),
        expect_error(RetryableError, code="in_use", sqlstate="55006"),
    ):
        connect(shop.dsn, **given)


def test_a_slot_that_is_moved_on_while_it_is_in_use(
    shop: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waits for a slot looks where it is when it is free: what was read meanwhile is gone."""
    given: Any = {"slot": shop.slot, "publications": ["p"]}
    with connect(shop.dsn, create_slot=True, **given) as first:
        begins = first.acknowledged_lsn
        shop.execute("INSERT INTO t VALUES (1)")
        transaction = next(first.transactions())

        def read_on(seconds: float) -> None:
            first.acknowledge(transaction)
            first.close()

        # Not the module's own function, by which threads of other tests may sleep.
        clock = types.SimpleNamespace(**{**vars(time), "sleep": read_on})
        monkeypatch.setattr(walsender, "time", clock)
        with expect_error(code="changes_missing"):
            connect(shop.dsn, start_lsn=begins, **given)
    monkeypatch.undo()
    with connect(shop.dsn, start_lsn=transaction.end_lsn, **given) as stream:
        assert stream.acknowledged_lsn == transaction.end_lsn


@pytest.mark.slow
def test_version_15_has_protocol_3(tmp_path: Any) -> None:
    try:
        server = EmbeddedServer(15)
        server.start()
    except pf.PgOutputError as error:
        pytest.skip(str(error))
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute("CREATE PUBLICATION p FOR ALL TABLES")
    try:
        slots.create(server.dsn(), "marked", two_phase=True)
        assert [(s.name, s.two_phase, s.failover) for s in slots.list(server.dsn())] == [
            ("marked", True, False)
        ]
        given: Any = {"publications": ["p"], "temporary": True}
        with connect(server.dsn(), slot="s", **given) as stream:
            assert stream.protocol == 3
        with expect_error(code="not_supported", parameter="origin"):
            connect(server.dsn(), slot="s", origin="none", **given)
    finally:
        server.stop()
