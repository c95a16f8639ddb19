"""The examples, killed and started again while rows are written: nothing is lost or doubled."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import duckdb
import psycopg
import pytest
from support import paths
from support.postgres.servers import NewServer
from support.waiting import wait_until
from typing_extensions import Self

from pgoutput_fast.embedded import EmbeddedServer

pytestmark = pytest.mark.server

EXAMPLES = paths.ROOT / "examples"
# `body` is stored beside the row, so that an update of another column does not send it.
TABLES = """
CREATE TABLE docs (id int PRIMARY KEY, "the title" text, body text);
ALTER TABLE docs ALTER body SET STORAGE EXTERNAL;
CREATE SCHEMA other;
CREATE TABLE other.pairs (a int, op text, n numeric(9, 2), PRIMARY KEY (a, op));
"""
# Rows that are there at the end, whatever chance has left: of each a value was not sent at last.
LAST = (
    b"DELETE FROM docs",
    b"INSERT INTO docs SELECT g, 'new', repeat('body ', 1000) FROM generate_series(1, 20) g",
    b"""UPDATE docs SET "the title" = NULL WHERE id <= 10""",
    b"UPDATE docs SET id = -id WHERE id > 5",
    b"INSERT INTO other.pairs VALUES (0, '', NULL)",
)
ROWS = {"docs": "SELECT * FROM docs ORDER BY 1", "pairs": "SELECT * FROM other.pairs ORDER BY 1, 2"}


@pytest.fixture
def source() -> Iterator[EmbeddedServer]:
    with NewServer(18) as server:
        with psycopg.connect(server.dsn(), autocommit=True) as connection:
            connection.execute(TABLES)
            connection.execute("CREATE PUBLICATION shop FOR TABLE docs, other.pairs")
        yield server


class Writer:
    """Commits transactions of many changes until it is ended."""

    def __init__(self, dsn: str, *others: str) -> None:
        self._dsn, self._others = dsn, others
        self._chance = random.Random(7)
        self._stop = threading.Event()
        self.error: psycopg.Error | None = None
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            with psycopg.connect(self._dsn) as connection:
                number = 0
                while not self._stop.wait(0.002):
                    number += 1
                    for _ in range(self._chance.choice((1, 2, 5))):
                        connection.execute(self._statement(number).encode())
                        number += 1
                    if self._chance.random() < 0.1:
                        connection.rollback()
                    connection.commit()
        except psycopg.Error as error:
            self.error = error

    def _statement(self, number: int) -> str:
        some = self._chance.randrange(1, 40)
        if number % 400 == 399:
            return "TRUNCATE docs, other.pairs"
        return self._chance.choice(
            (
                *self._others,
                f"""INSERT INTO docs VALUES ({some}, 'é', repeat('{number} ', 1500))
                ON CONFLICT (id) DO UPDATE SET "the title" = 'again {number}'""",
                f"UPDATE docs SET \"the title\" = 'title {number}' WHERE id % 9 = {some % 9}",
                f"""UPDATE docs SET body = NULLIF(repeat('{number} ', 1000 * {some % 3}), '')
                WHERE id = {some}""",
                f"UPDATE docs SET id = {number + 100} WHERE id = {some}",
                f"DELETE FROM docs WHERE id % 7 = {some % 7}",
                f"INSERT INTO other.pairs SELECT {number}, g, {some} FROM generate_series(1, 3) g",
                f"UPDATE other.pairs SET n = NULL WHERE a % 5 = {some % 5}",
                f"UPDATE other.pairs SET op = op || '+' WHERE a % 50 = {some}",
                f"DELETE FROM other.pairs WHERE a % 3 = {some % 3}",
            )
        )


def run_killed(
    source: EmbeddedServer, arguments: list[str], stored: Callable[[], object], *others: str
) -> None:
    """Run an example while rows are written, kill it several times, and end it once it has all.

    `stored` gives where the example's target is: its position.
    """
    command = [sys.executable, "-W", "error", str(EXAMPLES / arguments[0]), *arguments[1:]]
    slot = "SELECT 1 FROM pg_replication_slots WHERE active AND confirmed_flush_lsn > '0/0'"
    with psycopg.connect(source.dsn(), autocommit=True) as connection:
        reading = subprocess.Popen(command, stderr=subprocess.PIPE)

        def wait(condition: Callable[[], object]) -> None:
            wait_until(condition, 60, process=reading)

        try:
            wait(lambda: connection.execute(slot).fetchone())
            with Writer(source.dsn(), *others) as writer:
                for number in range(3):
                    before = stored()
                    wait(lambda before=before: stored() != before)
                    time.sleep(0.05 * number)
                    reading.kill()
                    reading.communicate()
                    reading = subprocess.Popen(command, stderr=subprocess.PIPE)
                before = stored()
                wait(lambda: stored() != before)
            assert writer.error is None
            for statement in LAST:
                connection.execute(statement)
            (end,) = connection.execute("SELECT pg_current_wal_lsn()").fetchone() or ()
            behind = f"SELECT 1 FROM pg_replication_slots WHERE confirmed_flush_lsn >= '{end}'"
            wait(lambda: connection.execute(behind.encode()).fetchone())
            reading.send_signal(signal.SIGTERM)
            _, errors = reading.communicate(timeout=30)
            assert reading.returncode == 0, errors
        finally:
            reading.kill()
            reading.communicate()


def rows(dsn: str) -> dict[str, list[tuple[Any, ...]]]:
    with psycopg.connect(dsn) as connection:
        return {name: connection.execute(query.encode()).fetchall() for name, query in ROWS.items()}


@pytest.mark.slow
def test_into_postgres(source: EmbeddedServer) -> None:
    """Also a table whose whole rows are its identity, with NULLs and with rows that are equal."""
    with psycopg.connect(source.dsn(), autocommit=True) as connection:
        connection.execute("CREATE DATABASE copy")
        full = "CREATE TABLE full_rows (a int, b text)"
        connection.execute(full)
        connection.execute("ALTER TABLE full_rows REPLICA IDENTITY FULL")
        connection.execute("ALTER PUBLICATION shop ADD TABLE full_rows")
    target = source.dsn("copy")
    with psycopg.connect(target, autocommit=True) as reader:
        reader.execute(TABLES)
        reader.execute(full)

        def stored() -> object:
            try:
                return reader.execute("SELECT lsn FROM consumed").fetchone()
            except psycopg.errors.UndefinedTable:
                return None

        run_killed(
            source,
            ["into_postgres.py", source.dsn(), "shop", target],
            stored,
            "INSERT INTO full_rows SELECT NULLIF(g % 3, 1), NULL FROM generate_series(1, 5) g",
            "DELETE FROM full_rows WHERE ctid IN (SELECT ctid FROM full_rows LIMIT 7)",
            "UPDATE full_rows SET b = 'x' WHERE ctid IN (SELECT ctid FROM full_rows LIMIT 3)",
        )
    expected = rows(source.dsn())
    assert rows(target) == expected
    assert expected["docs"]
    assert expected["pairs"]
    query = b"SELECT a, b, count(*) FROM full_rows GROUP BY 1, 2 ORDER BY 1, 2"
    with psycopg.connect(source.dsn()) as first, psycopg.connect(target) as second:
        assert second.execute(query).fetchall() == first.execute(query).fetchall()


@pytest.mark.slow
def test_into_duckdb(source: EmbeddedServer, tmp_path: Path) -> None:
    file = tmp_path / "shop.duckdb"

    def stored() -> object:
        # The file is the example's alone: what it has stored, it acknowledges.
        with psycopg.connect(source.dsn()) as connection:
            return connection.execute(
                "SELECT confirmed_flush_lsn FROM pg_replication_slots"
            ).fetchone()

    run_killed(source, ["into_duckdb.py", source.dsn(), "shop", str(file)], stored)
    expected = rows(source.dsn())
    with duckdb.connect(str(file)) as store:
        store.execute("SET schema = 'public'")
        found = {name: store.execute(query).fetchall() for name, query in ROWS.items()}
    assert found == expected
    assert expected["docs"]
    assert expected["pairs"]


@pytest.mark.slow
def test_two_minimal_consumers_with_one_file(source: EmbeddedServer, tmp_path: Path) -> None:
    """The second waits for the slot, and has looked at the position before that."""
    file = tmp_path / "consumed.sqlite"
    script = str(EXAMPLES / "minimal_consumer.py")
    command = [sys.executable, "-W", "error", script, source.dsn(), "shop", str(file)]
    with psycopg.connect(source.dsn(), autocommit=True) as connection:

        def stored() -> list[int]:
            with contextlib.closing(sqlite3.connect(file)) as reader:
                found = reader.execute("SELECT row FROM changes ORDER BY rowid").fetchall()
            return [json.loads(row)["id"] for (row,) in found]

        first = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        second: subprocess.Popen[str] | None = None
        try:
            active = "SELECT count(*) FROM pg_replication_slots WHERE slot_name = 'shop' AND active"
            wait_until(lambda: connection.execute(active).fetchone() == (1,), process=first)
            second = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
            assert second.stderr is not None
            until(second.stderr, "trying again in")
            connection.execute("INSERT INTO docs VALUES (1)")
            wait_until(stored, process=first)
            first.kill()  # most likely before it has told the server what it has stored
            first.communicate(timeout=30)
            connection.execute("INSERT INTO docs VALUES (2)")
            _, errors = second.communicate(timeout=60)
            assert "another consumer has written to the file" in errors
            assert second.returncode == 1
            second = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
            wait_until(lambda: 2 in stored(), process=second)
            assert stored() == [1, 2]
        finally:
            for process in (first, second):
                if process is not None:
                    process.kill()
                    process.communicate()


def until(lines: IO[str], words: str) -> None:
    """Read lines up to one that has certain words."""
    assert any(words in line for line in lines)
