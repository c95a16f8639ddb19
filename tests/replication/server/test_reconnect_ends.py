"""While a server is away, or silent: what ends an iteration or a capture, and what is told."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from support.postgres.proxy import Proxy
from support.postgres.servers import NewServer, execute
from support.waiting import wait_until

import pgoutput_fast as pf
from pgoutput_fast.embedded import EmbeddedServer
from pgoutput_fast.replication import RetryableError, capture, connect, walsender

pytestmark = pytest.mark.server

GIVEN: dict[str, Any] = {"slot": "s", "publications": ["p"]}


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedServer]:
    with NewServer(18, {"log_min_messages": "fatal"}) as running:
        execute(running, "CREATE TABLE t (id int)", "CREATE PUBLICATION p FOR TABLE t")
        yield running


@pytest.fixture
def slot(server: EmbeddedServer) -> Iterator[None]:
    execute(server, "SELECT pg_create_logical_replication_slot('s', 'pgoutput')")
    yield
    wait_until(lambda: not execute(server, "SELECT FROM pg_replication_slots WHERE active"))
    execute(server, "SELECT pg_drop_replication_slot('s')")


@pytest.fixture
def proxy(server: EmbeddedServer) -> Iterator[Proxy]:
    with Proxy(str(server.directory / f".s.PGSQL.{server.port}")) as made:
        yield made


def through(proxy: Proxy) -> str:
    return f"host=127.0.0.1 port={proxy.port} user=postgres dbname=postgres sslmode=disable"


class Capturing:
    """A capture in a thread of its own."""

    def __init__(self, dsn: str, directory: Path, **options: Any) -> None:
        self.stop = threading.Event()
        self.told: list[Any] = []
        self.result: Any = None
        given = {**GIVEN, "directory": directory, "progress": self.told.append, **options}
        self._thread = threading.Thread(target=self._run, args=(dsn, given))
        self._thread.start()

    def _run(self, dsn: str, given: dict[str, Any]) -> None:
        try:
            self.result = capture(dsn, stop=self.stop, **given)
        except pf.PgOutputError as error:
            self.result = error

    def end(self) -> Any:
        """Tell it to end, which it does long before a silent server is given up."""
        self.stop.set()
        self._thread.join(20)
        assert not self._thread.is_alive()
        return self.result


def ids(transaction: Any) -> list[int]:
    return [message.new["id"] for message in transaction if isinstance(message, pf.Insert)]


@pytest.mark.slow
@pytest.mark.usefixtures("slot")
def test_an_outage_is_time_without_changes(server: EmbeddedServer, proxy: Proxy) -> None:
    with connect(through(proxy), **GIVEN) as stream:
        assert list(stream.transactions(idle_timeout=0.2)) == []
        proxy.refuses = True
        proxy.cut()
        assert list(stream.transactions(idle_timeout=0.5)) == []
        tried = proxy.connections
        # It goes on with each iteration, however short that is.
        while proxy.connections < tried + 2:
            assert list(stream.transactions(idle_timeout=0.05)) == []
        proxy.refuses = False
        execute(server, "INSERT INTO t VALUES (1)")
        found: list[Any] = []
        while not found:
            found += stream.transactions(idle_timeout=0.05)
        assert [ids(one) for one in found] == [[1]]
        stream.acknowledge(found[-1])


@pytest.mark.usefixtures("slot")
def test_a_capture_tells_its_progress_in_an_outage(
    proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["pgoutput_fast.replication.landing"], "_IDLE_PROGRESS", 0.0)
    running = Capturing(through(proxy), tmp_path, adopt_slot=True)
    wait_until(lambda: running.told)
    proxy.refuses = True
    proxy.cut()
    before = proxy.connections
    wait_until(lambda: proxy.connections > before)
    told = len(running.told)
    wait_until(lambda: len(running.told) > told + 5)
    assert running.end().frames == 0


@pytest.mark.slow
@pytest.mark.usefixtures("slot")
def test_an_order_to_end_is_heard_while_the_server_is_silent(proxy: Proxy, tmp_path: Path) -> None:
    """When a lost connection is made again, and when the first one is made."""
    running = Capturing(through(proxy), tmp_path, adopt_slot=True)
    wait_until(lambda: running.told)
    proxy.silent_after = 0
    before = proxy.connections
    proxy.cut()
    wait_until(lambda: proxy.connections > before)
    time.sleep(0.2)
    assert running.end().frames == 0
    again = Capturing(through(proxy), tmp_path)
    wait_until(lambda: proxy.connections > before + 1)
    time.sleep(0.2)
    assert isinstance(again.end(), RetryableError)
    proxy.cut()
    proxy.silent_after = None
    stop = threading.Event()
    with connect(through(proxy), **GIVEN) as stream:
        assert list(stream.transactions(idle_timeout=0.2)) == []
        proxy.silent_after = 0
        proxy.cut()
        ended: list[Any] = []
        thread = threading.Thread(target=lambda: ended.append(list(stream.transactions(stop=stop))))
        before = proxy.connections
        thread.start()
        wait_until(lambda: proxy.connections > before)
        stop.set()
        thread.join(20)
        assert ended == [[]]
    proxy.cut()


def test_an_order_to_end_is_heard_while_the_slot_is_made(
    server: EmbeddedServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(walsender, "_TELL_AFTER", 0.1)
    with psycopg.connect(server.dsn()) as connection:
        connection.execute("INSERT INTO t VALUES (0)")
        running = Capturing(server.dsn(), tmp_path, create_slot=True, slot="waits")
        told = "the server makes slot waits when all running transactions have ended"
        wait_until(lambda: told in caplog.text)
        assert isinstance(running.end(), RetryableError)
        wait_until(lambda: not execute(server, "SELECT FROM pg_replication_slots"))
        connection.rollback()
    # The next call makes it.
    again = Capturing(server.dsn(), tmp_path, create_slot=True, slot="waits")
    wait_until(lambda: again.told)
    assert again.end().frames == 0
    execute(server, "SELECT pg_drop_replication_slot('waits')")
