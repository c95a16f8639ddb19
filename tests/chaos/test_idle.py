"""The log that a stream keeps while its own tables are idle.

`LOG_MB` in the environment asks for more than the short form.
"""

from __future__ import annotations

import os
import threading
from typing import Any

import psycopg
import pytest
from support.waiting import wait_until

from pgoutput_fast.embedded import EmbeddedServer
from pgoutput_fast.replication import connect

pytestmark = [pytest.mark.server, pytest.mark.slow]

LOG_MB = int(os.environ.get("LOG_MB", "128"))


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
                    ((end, _),) = execute(server.dsn(), query)
                wait_until(lambda: execute(server.dsn(), query)[0][1] < 32 << 20)
            finally:
                stop.set()
                thread.join()
        assert len(given) == 1
