"""Standbys that are promoted: streams and captures go on there, and nowhere else."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from support.expected_errors import expect_error
from support.postgres.servers import execute, now, on_standby, replayed, standby
from support.waiting import wait_until

import pgoutput_fast as pf
from pgoutput_fast.replication import capture, connect, slots
from pgoutput_fast.segments import SegmentReader, list_segments

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pgoutput_fast.embedded import EmbeddedServer

    Needs = Callable[[int, str], None]

pytestmark = [pytest.mark.server, pytest.mark.slow]

GIVEN: dict[str, Any] = {"slot": "s", "publications": ["p"]}


@pytest.fixture
def shop(own: EmbeddedServer) -> EmbeddedServer:
    """A server that no other test uses, with a table."""
    execute(own, "CREATE TABLE t (id int PRIMARY KEY)", "CREATE PUBLICATION p FOR TABLE t")
    return own


def ids(transaction: Any) -> list[int]:
    return [message.new["id"] for message in transaction if isinstance(message, pf.Insert)]


def landed(directory: Path) -> list[tuple[int, int]]:
    """Timeline and id of each row in segments."""
    found = []
    for segment in list_segments(directory):
        decoder = pf.Decoder()
        with SegmentReader(segment.path) as reader:
            for batch in reader:
                for frame in batch["data"].to_pylist():
                    message = decoder.decode(frame)
                    if isinstance(message, pf.Insert):
                        found.append((reader.metadata.timeline, message.new["id"]))
    return found


def test_a_capture_follows_a_promotion_and_never_goes_back(
    shop: EmbeddedServer, programs: Path, needs: Needs, tmp_path: Path
) -> None:
    """The name of the service moves to the standby; the old primary was never told, and goes on."""
    needs(17, "a failover slot")
    directory, name = tmp_path / "segments", tmp_path / "name"
    given: Any = {**GIVEN, "directory": directory, "adopt_slot": True, "max_delay": 0.1}
    dsn = f"host={name} port={shop.port} user=postgres dbname=postgres"
    with standby(shop, programs, sync_replication_slots="on") as other:
        slots.create(shop.dsn(), "s", failover=True)
        name.symlink_to(shop.directory)
        stop = threading.Event()
        capturing = threading.Thread(target=lambda: capture(dsn, stop=stop, **given))
        capturing.start()
        written = 0

        def synced() -> bool:
            nonlocal written
            execute(shop, f"INSERT INTO t VALUES ({written})")
            written += 1
            time.sleep(0.5)
            return (True,) in execute(
                other,
                "SELECT synced AND NOT temporary AND confirmed_flush_lsn IS NOT NULL"
                " FROM pg_replication_slots",
            )

        wait_until(synced, timeout=60)
        end = now(shop)
        wait_until(lambda: replayed(other) >= end and len(landed(directory)) == written)
        execute(other, "SELECT pg_promote()")
        name.unlink()
        name.symlink_to(other.directory)
        execute(shop, "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots")
        execute(other, *[f"INSERT INTO t VALUES ({1000 + number})" for number in range(5)])
        wait_until(lambda: len(landed(directory)) == written + 5)
        stop.set()
        capturing.join()
        truth = [(1, number) for number in range(written)]
        truth += [(2, 1000 + number) for number in range(5)]
        assert landed(directory) == truth
        # The old primary's log is beyond the end of the directory, and so is its slot's.
        execute(shop, *[f"INSERT INTO t VALUES ({2000 + number})" for number in range(50)])
        with expect_error(code="another_history"):
            capture(shop.dsn(), until_lsn=now(shop), **given)
        # At the new one it goes on.
        execute(other, "INSERT INTO t VALUES (1005)")
        capture(other.dsn(), until_lsn=now(other), **given)
        assert landed(directory) == [*truth, (2, 1005)]


def test_a_promotion_that_leaves_the_connection_alone(
    shop: EmbeddedServer, programs: Path, needs: Needs
) -> None:
    """Logical decoding on a standby goes on; the stream knows its timeline all the same."""
    needs(16, "logical decoding on a standby")
    with standby(shop, programs) as other:
        with on_standby(shop, other, **GIVEN) as stream:
            execute(shop, "INSERT INTO t VALUES (1)")
            end = now(shop)
            wait_until(lambda: replayed(other) >= end)
            (transaction,) = stream.transactions(stop_at=end)
            assert (ids(transaction), stream.timeline) == ([1], 1)
            readers = "SELECT active_pid FROM pg_replication_slots"
            before = execute(other, readers)
            execute(other, "SELECT pg_promote()", "INSERT INTO t VALUES (2)")
            transaction = next(stream.transactions())
            assert execute(other, readers) == before
            assert (ids(transaction), stream.timeline) == ([2], 2)
            # The connection is lost, and with it the server's run.
            other.restart("immediate")
            execute(other, "INSERT INTO t VALUES (3)")
            transaction = next(stream.transactions())
            assert (ids(transaction), stream.timeline) == ([3], 2)
            stream.acknowledge(transaction)
            stored = {"start_lsn": transaction.end_lsn, "start_timeline": stream.timeline}
        with connect(other.dsn(), **GIVEN, **stored) as stream:
            execute(other, "INSERT INTO t VALUES (4)")
            assert ids(next(stream.transactions())) == [4]


def test_another_server_does_not_tell_the_timeline(
    shop: EmbeddedServer, programs: Path, needs: Needs, tmp_path: Path
) -> None:
    """Where a name leads to another server meanwhile, what a standby sent is not given."""
    needs(16, "logical decoding on a standby")
    with standby(shop, programs) as other:
        on_standby(shop, other, **GIVEN).close()
        name = tmp_path / "name"
        name.symlink_to(other.directory)
        dsn = f"host={name} port={shop.port} user=postgres dbname=postgres"
        with connect(dsn, **GIVEN) as stream:
            name.unlink()
            name.symlink_to(shop.directory)
            execute(shop, "INSERT INTO t VALUES (1)")
            end = now(shop)
            wait_until(lambda: replayed(other) >= end)
            # The stream looks for its slot there, as after each loss.
            with expect_error(code="no_slot", parameter="slot"):
                list(stream.transactions())
        with connect(other.dsn(), **GIVEN) as stream:
            assert ids(next(stream.transactions())) == [1]
