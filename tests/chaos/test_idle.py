"""What a stream costs while its own tables are idle, or over a long time: log kept, and memory.

`LOG_MB` and `MINUTES` in the environment ask for more than the short forms.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psycopg
import pytest

from pgoutput_fast.embedded import EmbeddedServer
from pgoutput_fast.replication import connect

pytestmark = [pytest.mark.integration, pytest.mark.slow]

LOG_MB = int(os.environ.get("LOG_MB", "128"))
MINUTES = float(os.environ.get("MINUTES", "0.5"))


def execute(dsn: str, *statements: str) -> list[tuple[Any, ...]]:
    rows: list[tuple[Any, ...]] = []
    with psycopg.connect(dsn, autocommit=True) as connection:
        for statement in statements:
            cursor = connection.execute(statement.encode())
            rows = cursor.fetchall() if cursor.description else []
    return rows


def test_another_databases_log_is_not_kept() -> None:
    """Within 30 s after the writing has ended, the slot of idle tables keeps less than 32 MB."""
    settings = {"checkpoint_timeout": "30s", "max_wal_size": "256MB", "log_min_messages": "fatal"}
    with EmbeddedServer(18, settings) as server:
        execute(server.dsn(), "CREATE TABLE t (id int)", "CREATE PUBLICATION p FOR TABLE t")
        execute(server.dsn(), "CREATE DATABASE other")
        stop = threading.Event()
        given: list[Any] = []
        with connect(server.dsn(), slot="s", publications=["p"], create_slot=True) as stream:

            def consume() -> None:
                for transaction in stream.transactions(stop=stop):
                    given.append(transaction)
                    stream.acknowledge(transaction)

            thread = threading.Thread(target=consume)
            thread.start()
            try:
                execute(server.dsn(), "INSERT INTO t VALUES (1)")
                execute(server.dsn("other"), "CREATE TABLE big (body text)")
                query = (
                    "SELECT pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')::int8,"
                    " pg_wal_lsn_diff(pg_current_wal_lsn(), restart_lsn)::int8"
                    " FROM pg_replication_slots"
                )
                ((begin, _),) = execute(server.dsn(), query)
                end = begin
                while end - begin < LOG_MB << 20:
                    execute(
                        server.dsn("other"),
                        "INSERT INTO big SELECT repeat('x', 1000) FROM generate_series(1, 20000)",
                        "TRUNCATE big",
                    )
                    ((end, retained),) = execute(server.dsn(), query)
                deadline = time.monotonic() + 30
                while retained >= 32 << 20 and time.monotonic() < deadline:
                    time.sleep(0.5)
                    ((_, retained),) = execute(server.dsn(), query)
                assert retained < 32 << 20
            finally:
                stop.set()
                thread.join()
        assert len(given) == 1


CONSUMER = """
import sys
from pgoutput_fast.replication import connect
with connect(sys.argv[1], slot="s", publications=["p"], create_slot=True) as stream:
    for transaction in stream.transactions():
        for changes in transaction.batches():
            len(changes)
        stream.acknowledge(transaction)
"""


def resident(pid: int) -> int:
    """Bytes of memory that a process has."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(sys.platform != "linux", reason="memory is looked up in /proc")
def test_memory_stays_flat() -> None:
    """Transactions as pgbench has them: after all of the time as much as after half of it."""
    with EmbeddedServer(18, {"log_min_messages": "fatal"}) as server:
        execute(
            server.dsn(),
            "CREATE TABLE accounts (id int PRIMARY KEY, balance int)",
            "INSERT INTO accounts SELECT g, 0 FROM generate_series(1, 10000) g",
            "CREATE TABLE history (account int, delta int, at timestamptz, filler char(22))",
            "CREATE PUBLICATION p FOR ALL TABLES",
        )
        consumer = subprocess.Popen([sys.executable, "-c", CONSUMER, server.dsn()])
        try:
            sizes = []
            with psycopg.connect(server.dsn()) as connection:
                begin = time.monotonic()
                count = 0
                for part in (0.5, 1.0):
                    while time.monotonic() - begin < part * MINUTES * 60:
                        count += 1
                        connection.execute(
                            "UPDATE accounts SET balance = balance + 1 WHERE id = %s",
                            [count % 10000 + 1],
                        )
                        connection.execute(
                            "INSERT INTO history VALUES (%s, 1, now(), 'x')", [count]
                        )
                        connection.commit()
                    sizes.append(resident(consumer.pid))
            assert consumer.poll() is None
            ((behind,),) = execute(
                server.dsn(),
                "SELECT pg_wal_lsn_diff(pg_current_wal_lsn(), confirmed_flush_lsn)::int8"
                " FROM pg_replication_slots",
            )
            assert behind < 32 << 20
            print(f"{count} transactions, {[size >> 20 for size in sizes]} MB")
            assert sizes[1] - sizes[0] < 4 << 20
        finally:
            consumer.kill()
            consumer.wait()
