"""A Spark driver that is killed all the while: each change is in its batches once."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support import paths
from support.waiting import wait_until

from pgoutput_fast.embedded import EmbeddedServer

pytestmark = [pytest.mark.server, pytest.mark.spark, pytest.mark.slow]

DRIVER = paths.SUPPORT / "sparks" / "source_driver.py"
KILLS = 2


@contextlib.contextmanager
def writing(dsn: str) -> Iterator[list[int]]:
    """Insert rows, a transaction after the other, in another thread; gives how many are there."""
    stop, count = threading.Event(), [0]

    def write() -> None:
        with psycopg.connect(dsn, autocommit=True) as connection:
            while not stop.wait(0.03):
                connection.execute(
                    "INSERT INTO t SELECT i, 'v' FROM generate_series(%s::int, %s::int) AS i",
                    [count[0] + 1, count[0] + 20],
                )
                count[0] += 20

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield count
    finally:
        stop.set()
        thread.join()


@contextlib.contextmanager
def started(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A driver, killed at the end with the JVM and Python's workers, which are in its group.

    So it is when the test fails too: leaving Popen's own block waits for a driver that never ends.
    """
    with log.open("wb") as file, subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=file, start_new_session=True
    ) as driver:  # fmt: skip
        try:
            yield driver
        finally:
            os.killpg(driver.pid, signal.SIGKILL)


def test_a_driver_that_is_killed(
    pg16: EmbeddedServer, make_database: Callable[..., Any], tmp_path: Path
) -> None:
    database = make_database(pg16)
    database.execute("CREATE TABLE t (id int PRIMARY KEY, v text)",
                     "INSERT INTO t SELECT -i, 'old' FROM generate_series(1, 5000) AS i",
                     "CREATE PUBLICATION p FOR TABLE t")  # fmt: skip
    command = [sys.executable, str(DRIVER), database.dsn, f"slot_{database.name}", str(tmp_path)]
    chance = random.Random(5)
    out = tmp_path / "out"
    with writing(database.dsn) as count:
        for _ in range(KILLS):
            with started(command, tmp_path / "log") as driver:
                seen = len([*out.glob("*.parquet")]) if out.exists() else 0
                # On a busy machine, a JVM's start alone takes most of a minute.
                wait_until(
                    lambda seen=seen: len([*out.glob("*.parquet")]) >= seen + 2, 240,
                    process=driver, log=(tmp_path / "log").read_text,
                )  # fmt: skip
                time.sleep(chance.random() * 2)
                assert driver.poll() is None
    ended = subprocess.run([*command, "end"], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    changes = pa.concat_tables(pq.read_table(path) for path in out.glob("*.parquet"))
    found = [(row["op"], row["id"]) for row in changes.to_pylist()]
    places = {(row["commit_lsn"], row["seq"]) for row in changes.to_pylist()}
    assert len(places) == len(found)
    # The snapshot has what was inserted before the slot was made.
    rows = sorted(one for op, one in found if op in ("read", "insert"))
    assert rows == [*range(-5000, 0), *range(1, count[0] + 1)]
    read = [one for op, one in found if op == "read"]
    assert min(one for op, one in found if op == "insert") == max(*read, 0) + 1
    assert [op for op, _ in found].count("truncate") == 1
    assert len(found) == 5001 + count[0]
