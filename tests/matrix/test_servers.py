"""Servers of every version that restart, wait for the client, are restored, or are standbys."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, Literal

import pytest
from support.expected_errors import expect_error
from support.postgres.servers import (
    CopiedServer,
    backup,
    execute,
    now,
    on_standby,
    replayed,
    standby,
)
from support.waiting import wait_until

import pgoutput_fast as pf
from pgoutput_fast.embedded import EmbeddedServer
from pgoutput_fast.replication import RetryableError, connect, slots

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Needs = Callable[[int, str], None]

pytestmark = [pytest.mark.server, pytest.mark.slow]

GIVEN: dict[str, Any] = {"slot": "s", "publications": ["p"], "retry_for": 30}


def ids(transaction: Any) -> list[int]:
    return [message.new["id"] for message in transaction if isinstance(message, pf.Insert)]


@pytest.fixture
def shop(own: EmbeddedServer) -> EmbeddedServer:
    """A server that no other test uses, with a table and a slot."""
    execute(
        own,
        "CREATE TABLE t (id int PRIMARY KEY, body text)",
        "CREATE PUBLICATION p FOR TABLE t",
        "SELECT pg_create_logical_replication_slot('s', 'pgoutput')",
    )
    return own


@pytest.mark.parametrize("two_phase", [False, True])
@pytest.mark.parametrize("mode", ["immediate", "kill"])
def test_prepared_transactions_outlive_client_and_server(
    shop: EmbeddedServer, needs: Needs, two_phase: bool, mode: Literal["immediate", "kill"]
) -> None:
    """Small and large ones, prepared before a restart of the server and a new client's begin."""
    if two_phase:
        needs(15, "two_phase")
    given = {**GIVEN, "two_phase": two_phase}
    execute(
        shop,
        "BEGIN; INSERT INTO t VALUES (1); PREPARE TRANSACTION 'small'",
        "BEGIN; INSERT INTO t SELECT g, repeat('x', 90) FROM generate_series(1000, 2999) g;"
        " PREPARE TRANSACTION 'large'",
        "BEGIN; INSERT INTO t SELECT g, repeat('x', 90) FROM generate_series(3000, 4999) g;"
        " PREPARE TRANSACTION 'gone'",
        "INSERT INTO t VALUES (2)",
    )
    stored: list[list[int]] = []
    with connect(shop.dsn(), **given) as stream:
        for transaction in stream.transactions():
            stored.append(ids(transaction))
            stream.acknowledge(transaction)
            if stored[-1] == [2]:
                break
        # The stream goes on over the restart, and has what was prepared before it.
        thread = threading.Thread(target=shop.restart, args=(mode,))
        thread.start()
        assert list(stream.transactions(idle_timeout=1)) == []
        thread.join()
        execute(shop, "COMMIT PREPARED 'small'")
        transaction = next(stream.transactions())
        stored.append(ids(transaction))
        stream.acknowledge(transaction)
    # A client that is new has to be sent the rows again, as 'large' was not committed before.
    shop.restart()
    execute(shop, "ROLLBACK PREPARED 'gone'", "COMMIT PREPARED 'large'", "INSERT INTO t VALUES (3)")
    with connect(
        shop.dsn(), start_lsn=transaction.end_lsn, start_timeline=stream.timeline, **given
    ) as stream:
        stored += [ids(transaction) for transaction in stream.transactions(stop_at=now(shop))]
    assert [one for one in stored if one] == [[2], [1], list(range(1000, 3000)), [3]]


def test_commits_wait_for_a_client_that_is_a_synchronous_standby(shop: EmbeddedServer) -> None:
    """A commit returns once its transaction was acknowledged, and not before."""

    def waiting() -> bool:
        return execute(
            shop, "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
        ) == [(1,)]

    with connect(shop.dsn(), application_name="our_client", **GIVEN) as stream:
        execute(
            shop,
            "ALTER SYSTEM SET synchronous_standby_names = 'our_client'",
            "SELECT pg_reload_conf()",
        )
        wait_until(
            lambda: (
                execute(shop, "SHOW synchronous_standby_names") == [("our_client",)]
                and execute(shop, "SELECT sync_state FROM pg_stat_replication") == [("sync",)]
            )
        )
        transactions = stream.transactions()
        for number in range(3):
            statement = f"INSERT INTO t VALUES ({number})"
            writer = threading.Thread(target=execute, args=(shop, statement))
            writer.start()
            transaction = next(transactions)
            assert ids(transaction) == [number]
            wait_until(waiting)
            stream.acknowledge(transaction)
            # The thread that keeps the connection alive tells it, also while nobody receives.
            writer.join(30)
            assert not writer.is_alive()
            assert not waiting()


def restored(server: EmbeddedServer, programs: Path) -> CopiedServer:
    """A server as it is now, which comes up later on another timeline."""
    return CopiedServer(
        backup(server, slots=True),
        "recovery.signal",
        {"restore_command": "false", "log_min_messages": "fatal"},
        programs,
    )


def test_a_restore_to_an_earlier_point_is_refused(shop: EmbeddedServer, programs: Path) -> None:
    execute(shop, "INSERT INTO t VALUES (1)")
    earlier = restored(shop, programs)
    execute(shop, "INSERT INTO t VALUES (2)", "INSERT INTO t VALUES (3)")
    with connect(shop.dsn(), **GIVEN) as stream:
        found = list(stream.transactions(stop_at=now(shop)))
        assert [ids(one) for one in found] == [[1], [2], [3]]
        timeline = stream.timeline
    positions = [one.end_lsn for one in found]
    with earlier:
        wait_until(lambda: execute(earlier, "SELECT pg_is_in_recovery()") == [(False,)])
        # While the log is still shorter than the position, and when it is long again.
        for rows in (0, 2000):
            execute(
                earlier,
                f"INSERT INTO t SELECT g, 'x' FROM generate_series(100001, 100000 + {rows}) g",
                "DELETE FROM t WHERE id > 100000",
            )
            with expect_error(code="another_history") as caught:
                connect(earlier.dsn(), start_lsn=positions[-1], start_timeline=timeline, **GIVEN)
            assert not isinstance(caught.value, RetryableError)
        assert now(earlier) > positions[-1]
        # What was received up to the copy did happen there.
        with connect(
            earlier.dsn(), start_lsn=positions[0], start_timeline=timeline, **GIVEN
        ) as stream:
            assert stream.timeline == timeline + 1
            later = list(stream.transactions(stop_at=now(earlier)))
        assert len(ids(later[-2])) == 2000


def test_a_slot_on_a_standby(shop: EmbeddedServer, programs: Path, version: int) -> None:
    """From 16 on; it stays when the standby is promoted."""
    with standby(shop, programs) as other:
        if version < 16:
            with expect_error(code="standby"):
                connect(other.dsn(), create_slot=True, slot="s", publications=["p"])
            return
        with on_standby(shop, other, **GIVEN) as stream:
            execute(
                shop,
                "INSERT INTO t VALUES (1)",
                "INSERT INTO t SELECT g, repeat('x', 90) FROM generate_series(1000, 2999) g",
            )
            end = now(shop)
            wait_until(lambda: replayed(other) >= end)
            found = list(stream.transactions(stop_at=end))
            assert [ids(one) for one in found] == [[1], list(range(1000, 3000))]
            stream.acknowledge(found[-1])
            assert list(stream.transactions(idle_timeout=0.3)) == []
            execute(other, "SELECT pg_promote()", "INSERT INTO t VALUES (2)")
            assert ids(next(stream.transactions())) == [2]


def test_a_failover_slot_after_the_standby_is_promoted(
    shop: EmbeddedServer, programs: Path, needs: Needs
) -> None:
    """One stream goes on at the standby, by a connection string that names both servers."""
    needs(17, "a failover slot")
    slots.drop(shop.dsn(), "s")
    with standby(shop, programs, sync_replication_slots="on") as other:
        # The standby can copy no slot that needs more of the log than it has itself.
        slots.create(shop.dsn(), "s", failover=True)
        execute(
            shop,
            "ALTER SYSTEM SET synchronized_standby_slots = 'physical'",
            "SELECT pg_reload_conf()",
        )
        both = (
            f"host={shop.directory},{other.directory} port={shop.port},{other.port} user=postgres"
            " dbname=postgres target_session_attrs=read-write"
        )
        found: list[int] = []
        with connect(both, **GIVEN) as stream:
            transactions = stream.transactions()

            def synced() -> bool:
                """Whether the standby's copy can be used; some more is written and acknowledged."""
                time.sleep(0.2)
                with pytest.raises(pf.PgOutputError) as caught:
                    connect(other.dsn(), slot="s", publications=["p"])
                assert caught.value.code in {"standby", "no_slot", "in_use"}
                execute(shop, f"INSERT INTO t VALUES ({len(found)})")
                transaction = next(transactions)
                found.extend(ids(transaction))
                stream.acknowledge(transaction)
                return (True,) in execute(
                    other,
                    "SELECT synced AND NOT temporary AND confirmed_flush_lsn IS NOT NULL"
                    " FROM pg_replication_slots",
                )

            wait_until(synced, timeout=60)
            # What was delivered and not acknowledged is not delivered again at the standby.
            for _ in range(3):
                execute(shop, f"INSERT INTO t VALUES ({len(found)})")
                found += ids(next(transactions))
            end = now(shop)
            wait_until(lambda: replayed(other) >= end)
            shop.stop()
            last = len(found)
            execute(other, "SELECT pg_promote()", f"INSERT INTO t VALUES ({last})")
            found += ids(next(transactions))
            assert found == list(range(last + 1))
            assert stream.timeline == 2
