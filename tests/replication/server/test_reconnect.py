"""Streams that stay up: over restarts, crashes and bad networks nothing is lost or comes twice."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from support.expected_errors import expect_error
from support.nightly import nightly
from support.postgres.proxy import Proxy
from support.postgres.servers import NewServer, execute
from support.waiting import wait_until

import pgoutput_fast as pf
from pgoutput_fast.embedded import EmbeddedServer
from pgoutput_fast.replication import RetryableError, capture, connect, slots
from pgoutput_fast.segments import SegmentReader

pytestmark = pytest.mark.server

GIVEN: dict[str, Any] = {"slot": "s", "publications": ["p"], "retry_for": 30}


@pytest.fixture(params=[16, 18], ids="pg{}".format)
def own(request: pytest.FixtureRequest) -> Iterator[EmbeddedServer]:
    """A server that no other test uses, with a table and a slot."""
    with NewServer(request.param, {"log_min_messages": "fatal"}) as server:
        yield prepared(server)


@pytest.fixture
def own18() -> Iterator[EmbeddedServer]:
    with NewServer(18, {"log_min_messages": "fatal"}) as server:
        yield prepared(server)


@pytest.fixture
def proxy(own18: EmbeddedServer) -> Iterator[Proxy]:
    with Proxy(str(own18.directory / f".s.PGSQL.{own18.port}")) as made:
        yield made


def prepared(server: EmbeddedServer) -> EmbeddedServer:
    execute(
        server,
        "CREATE TABLE t (id int, part int)",
        "CREATE PUBLICATION p FOR TABLE t",
        "SELECT pg_create_logical_replication_slot('s', 'pgoutput')",
    )
    return server


def through(proxy: Proxy) -> str:
    return f"host=127.0.0.1 port={proxy.port} user=postgres dbname=postgres sslmode=disable"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pgoutput_fast.replication.link._LONGEST_WAIT", 0.5)


class Writer:
    """Writes transactions of several rows without a pause, also after failures."""

    def __init__(self, server: EmbeddedServer) -> None:
        self._server = server
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        number = 0
        while not self._stop.is_set():
            with (
                contextlib.suppress(psycopg.Error, pf.PgOutputError),
                psycopg.connect(self._server.dsn(), autocommit=True) as connection,
            ):
                while not self._stop.wait(0.002):
                    number += 1
                    connection.execute(
                        "INSERT INTO t SELECT %s::int, g FROM generate_series(1, %s::int) g",
                        [number, 300 if number % 40 == 0 else 3],
                    )
            time.sleep(0.02)

    def end(self) -> int:
        """Stop; the LSN behind all that was written."""
        self._stop.set()
        self._thread.join()
        ((lsn,),) = execute(self._server, "SELECT pg_current_wal_lsn()::text")
        return pf.parse_lsn(lsn)


def rows_of(transaction: Any) -> list[tuple[int, int]]:
    return [
        (message.new["id"], message.new["part"])
        for message in transaction
        if isinstance(message, pf.Insert)
    ]


def check(server: EmbeddedServer, found: list[list[tuple[int, int]]]) -> None:
    """Each transaction that was committed came once, whole and in order."""
    truth = execute(server, "SELECT id, part FROM t ORDER BY id, part")
    assert [row for rows in found for row in rows] == truth
    assert len(found) > 10


@pytest.mark.everyday("pg18")
@pytest.mark.parametrize("mode", ["kill", *nightly("fast", "immediate")])
def test_restarts_lose_and_double_nothing(own: EmbeddedServer, mode: Any) -> None:
    writer = Writer(own)
    found: list[list[tuple[int, int]]] = []
    restarts = 0
    with connect(own.dsn(), options="-c logical_decoding_work_mem=64kB", **GIVEN) as stream:
        stop_at = None
        while stop_at is None:
            for transaction in stream.transactions():
                found.append(rows_of(transaction))
                # An orderly restart waits until all is acknowledged.
                if mode == "fast" or len(found) % 7 == 0:
                    stream.acknowledge(transaction)
                if len(found) >= 60 * (restarts + 1):
                    break
            restarts += 1
            if restarts > 2:
                stop_at = writer.end()
                continue
            thread = threading.Thread(target=own.restart, args=(mode,))
            thread.start()
            for transaction in stream.transactions(idle_timeout=0.5):
                found.append(rows_of(transaction))
                if mode == "fast":
                    stream.acknowledge(transaction)
                if not thread.is_alive():
                    break
            thread.join()
        found += [rows_of(transaction) for transaction in stream.transactions(stop_at=stop_at)]
    check(own, found)


@pytest.mark.slow
def test_a_process_that_is_killed_makes_the_server_recover(own18: EmbeddedServer) -> None:
    """A walsender that is killed takes all other processes of the server with it."""
    writer = Writer(own18)
    found: list[list[tuple[int, int]]] = []
    with connect(own18.dsn(), **GIVEN) as stream:
        for transaction in stream.transactions():
            found.append(rows_of(transaction))
            if len(found) == 30:
                ((pid,),) = execute(
                    own18, "SELECT active_pid FROM pg_replication_slots WHERE slot_name = 's'"
                )
                os.kill(pid, signal.SIGKILL)
            if len(found) == 90:
                break
        stop_at = writer.end()
        found += [rows_of(transaction) for transaction in stream.transactions(stop_at=stop_at)]
    check(own18, found)


@pytest.mark.slow
def test_a_network_that_cuts_delays_and_halves(own18: EmbeddedServer, proxy: Proxy) -> None:
    writer = Writer(own18)
    chance = random.Random(7)
    found: list[list[tuple[int, int]]] = []
    with connect(through(proxy), **GIVEN) as stream:
        before = 0
        for cut in range(15):
            proxy.delay = 0.001 if cut % 3 == 0 else 0.0
            wanted = len(found) + chance.randint(1, 25)
            for transaction in stream.transactions():
                found.append(rows_of(transaction))
                if chance.random() < 0.2:
                    stream.acknowledge(transaction)
                if len(found) >= wanted and proxy.connections > before:
                    break
            before = proxy.connections
            proxy.cut()
        proxy.delay = 0.0
        stop_at = writer.end()
        found += [rows_of(transaction) for transaction in stream.transactions(stop_at=stop_at)]
    check(own18, found)
    assert proxy.connections >= 15


@pytest.mark.slow
def test_a_network_that_says_nothing(own18: EmbeddedServer, proxy: Proxy) -> None:
    dsn = through(proxy) + " options='-c wal_sender_timeout=3s'"
    with connect(dsn, silence_timeout=1.5, **GIVEN) as stream:
        transactions = stream.transactions()
        execute(own18, "INSERT INTO t VALUES (1)")
        assert rows_of(next(transactions)) == [(1, None)]
        # Idle, but there: it answers when it is asked.
        assert list(stream.transactions(idle_timeout=4)) == []
        assert proxy.connections == 1
        proxy.freeze()
        execute(own18, "INSERT INTO t VALUES (2)")
        assert rows_of(next(stream.transactions())) == [(2, None)]
        assert proxy.connections >= 2
        proxy.cut()


def outage(stream: Any, proxy: Proxy, server: EmbeddedServer) -> None:
    """The stream's connection is cut, and no other one comes through."""
    proxy.refuses = True
    proxy.cut()
    wait_until(lambda: not execute(server, "SELECT FROM pg_replication_slots WHERE active"))


@pytest.mark.everyday("DROP PUBLICATION")
@pytest.mark.parametrize(
    ("meanwhile", "code"),
    [
        ("SELECT pg_drop_replication_slot('s')", "no_slot"),
        (
            "SELECT pg_replication_slot_advance('s', pg_current_wal_lsn())",
            "changes_missing",
        ),
        ("DROP PUBLICATION p", "no_publication"),
        ("ALTER ROLE postgres NOLOGIN", "connection_refused"),
    ],
)
def test_what_stays_ends_it(own18: EmbeddedServer, proxy: Proxy, meanwhile: str, code: str) -> None:
    execute(own18, "CREATE ROLE other SUPERUSER LOGIN")
    with connect(through(proxy), **GIVEN) as stream:
        assert list(stream.transactions(idle_timeout=0.2)) == []
        outage(stream, proxy, own18)
        execute(own18, "INSERT INTO t VALUES (1)", meanwhile)
        proxy.refuses = False
        with expect_error(code=code) as caught:
            list(stream.transactions())
    assert not isinstance(caught.value, RetryableError)


@pytest.mark.slow
def test_a_server_that_does_not_come_back(own18: EmbeddedServer, proxy: Proxy) -> None:
    with connect(through(proxy), **{**GIVEN, "retry_for": 1.0}) as stream:
        assert list(stream.transactions(idle_timeout=0.2)) == []
        outage(stream, proxy, own18)
        with expect_error(RetryableError, code="connection_lost"):
            list(stream.transactions())
    assert proxy.connections > 2


@pytest.mark.slow
def test_the_first_connection_is_tried_again_if_that_is_wanted(
    own18: EmbeddedServer, proxy: Proxy, tmp_path: Path
) -> None:
    """For as long as `retry_for` says, where the error may pass; by default it is tried once."""
    given: Any = {"slot": "s", "publications": ["p"]}
    landing: Any = {**given, "directory": tmp_path, "adopt_slot": True}
    execute(own18, "INSERT INTO t VALUES (1)")
    ((end,),) = execute(own18, "SELECT pg_current_wal_lsn()::text")
    proxy.refuses = True
    for begin in (
        lambda **more: connect(through(proxy), **given, **more).close(),
        lambda **more: capture(through(proxy), until_lsn=pf.parse_lsn(end), **landing, **more),
    ):
        proxy.refuses = True
        before = proxy.connections
        with pytest.raises(RetryableError):
            begin()
        assert proxy.connections == before + 1
        with pytest.raises(RetryableError):
            begin(retry_for=1)
        assert proxy.connections > before + 2
        timer = threading.Timer(0.5, setattr, (proxy, "refuses", False))
        timer.start()
        begin(retry_for=60)
        timer.join()
    with SegmentReader(next(tmp_path.glob("[0-9A-F]*.arrow"))) as reader:
        frames = [frame for batch in reader for frame in batch["data"].to_pylist()]
    assert [frame[:1] for frame in frames] == [b"B", b"R", b"I", b"C"]
    # An order to end is heard meanwhile, and errors that stay are not tried again.
    stop = threading.Event()
    stop.set()
    proxy.refuses = True
    before = proxy.connections
    with pytest.raises(RetryableError):
        capture(through(proxy), retry_for=600, stop=stop, **landing)
    assert proxy.connections <= before + 1
    proxy.refuses = False
    for wrong in ({"dbname": "none"}, {"user": "nobody"}, {"slot": "none"}):
        before = proxy.connections
        with pytest.raises(pf.PgOutputError) as refused:
            connect(through(proxy), retry_for=600, **{**given, **wrong})
        assert not isinstance(refused.value, RetryableError)
        assert proxy.connections == before + 1


@pytest.mark.slow
def test_a_temporary_slot_goes_with_its_connection(own18: EmbeddedServer, proxy: Proxy) -> None:
    with connect(through(proxy), slot="temp", publications=["p"], temporary=True) as stream:
        assert list(stream.transactions(idle_timeout=0.2)) == []
        proxy.cut()
        with expect_error(code="changes_missing"):
            list(stream.transactions())


@pytest.mark.slow
def test_a_prepared_transaction_outlives_its_connection(
    own18: EmbeddedServer, proxy: Proxy
) -> None:
    execute(
        own18,
        "BEGIN; INSERT INTO t VALUES (1); PREPARE TRANSACTION 'one'",
        "INSERT INTO t VALUES (2)",
    )
    with connect(through(proxy), two_phase=True, **GIVEN) as stream:
        transaction = next(stream.transactions())
        assert rows_of(transaction) == [(2, None)]
        stream.acknowledge(transaction)
        time.sleep(1.2)  # until it is told
        proxy.cut()
        assert list(stream.transactions(idle_timeout=1.5)) == []
        # The new connection has not let the server forget what a later client needs of 'one'.
        (state,) = slots.list(own18.dsn())
        assert state.confirmed_flush_lsn < transaction.commit_lsn
        execute(own18, "COMMIT PREPARED 'one'")
        transaction = next(stream.transactions())
        assert (rows_of(transaction), transaction.gid) == ([(1, None)], "one")
        stream.acknowledge(transaction)
    (state,) = slots.list(own18.dsn())
    assert state.confirmed_flush_lsn == transaction.end_lsn


@pytest.mark.slow
def test_a_prepared_transaction_that_was_committed_meanwhile(
    own18: EmbeddedServer, proxy: Proxy
) -> None:
    """An older one that waits lets the server send the commit again, without the rows."""
    execute(
        own18,
        "BEGIN; INSERT INTO t VALUES (1); PREPARE TRANSACTION 'one'",
        "BEGIN; INSERT INTO t VALUES (2); PREPARE TRANSACTION 'two'",
        "COMMIT PREPARED 'one'",
        "INSERT INTO t VALUES (3)",
    )
    with connect(through(proxy), two_phase=True, **GIVEN) as stream:
        for expected, transaction in zip((1, 3), stream.transactions(), strict=False):
            assert rows_of(transaction) == [(expected, None)]
            stream.acknowledge(transaction)
        time.sleep(1.2)  # until it is told
        proxy.cut()
        assert list(stream.transactions(idle_timeout=1.5)) == []
    given: Any = {"two_phase": True, "start_lsn": transaction.end_lsn, **GIVEN}
    with connect(own18.dsn(), **given) as stream:
        assert list(stream.transactions(idle_timeout=1.5)) == []
        execute(own18, "COMMIT PREPARED 'two'")
        assert rows_of(next(stream.transactions())) == [(2, None)]


@pytest.mark.slow
@pytest.mark.parametrize("queries", [0, *nightly(7, 13, 17, 18)])
def test_a_server_that_hangs_before_the_stream_begins(
    own18: EmbeddedServer, monkeypatch: pytest.MonkeyPatch, queries: int
) -> None:
    """After the login, and after some of its answers: `connect` does not wait for ever."""
    monkeypatch.setattr("pgoutput_fast.connections._ANSWER_TIMEOUT", 0.3)
    server = str(own18.directory / f".s.PGSQL.{own18.port}")
    with Proxy(server) as proxy:
        proxy.silent_after = queries
        with expect_error(RetryableError, code="connection_lost"):
            connect(through(proxy), **{**GIVEN, "retry_for": None})
        proxy.silent_after = None
        with connect(through(proxy), **GIVEN):
            pass
