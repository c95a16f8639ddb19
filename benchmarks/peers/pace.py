"""Live streams with a rhythm: how late transactions come, and what pauses cost.

A writer commits at a pace, while a consumer in a process of its own takes what comes. Each row says
when it was sent, by the clock of the machine that both run on.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psycopg
from psycopg import pq

from pgoutput_fast.embedded import EmbeddedServer
from pgoutput_fast.errors import PgOutputError
from pgoutput_fast.replication import CaptureProgress, capture, connect, slots

from ..harness import Case, Results, measure

_TABLE = "CREATE TABLE paced (id int8 PRIMARY KEY, sent float8, note text)"
_INSERT = (
    "INSERT INTO paced SELECT g, %s, md5(g::text) FROM generate_series(%s::int8, %s::int8 - 1) g"
)
_SETTLED = 0.5  # seconds for the threads that NumPy makes to go to sleep


class Pace(NamedTuple):
    """How a writer commits."""

    commits: int
    """In all."""
    rows: int
    """Of each transaction."""
    burst: int
    """Transactions that are committed one after the other without a pause."""
    every: float
    """Seconds from the begin of a burst to that of the next."""

    @property
    def changes(self) -> int:
        """In all."""
        return self.commits * self.rows


PACES = {
    "alone": Pace(100, 1, 1, 0.05),
    "5,000 a second": Pace(5_000, 10, 1, 0.002),
    "pauses": Pace(2_000, 50, 20, 0.1),
}
CONSUMERS = ("receive only", "transactions", "groups", "groups, protocol 1", "capture")


def run(options: argparse.Namespace, results: Results) -> None:
    """Measure each consumer at each pace."""
    scale = options.scale or (0.2 if options.quick else 1)
    with EmbeddedServer(tcp=True) as server:
        with psycopg.connect(server.dsn(), autocommit=True) as connection:
            connection.execute(_TABLE)
            connection.execute("CREATE PUBLICATION paced FOR TABLE paced")
        cases = []
        for name, whole in PACES.items():
            bursts = max(1, round(whole.commits / whole.burst * scale))
            pace = whole._replace(commits=bursts * whole.burst)
            for consumer in CONSUMERS:
                key = f"pace: {name}/{consumer}"

                def sample(pace: Pace = pace, consumer: str = consumer) -> dict[str, float]:
                    return _sample(server, pace, consumer)

                cases.append(Case(key, sample))
        measure(cases, options.rounds or (1 if options.quick else 3), results)


def _sample(server: EmbeddedServer, pace: Pace, consumer: str) -> dict[str, float]:
    """Seconds of CPU per change; and how late rows came, in seconds."""
    dsn = server.dsn(tcp=True)
    slots.create(server.dsn(), "paced")
    child = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.peers.pace", consumer, str(pace.commits)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PACE_DSN": dsn},
        cwd=Path(__file__).parents[2],
    )
    try:
        assert child.stdout is not None
        child.stdout.readline()
        with psycopg.connect(server.dsn(), autocommit=True) as connection:
            _write(connection, pace)
            answer = json.loads(child.stdout.readline())
            connection.execute("TRUNCATE paced")
    finally:
        child.kill()
        child.communicate()
        _drop(server)
    return {"cpu": answer.pop("cpu") / pace.changes, **answer}


def _drop(server: EmbeddedServer) -> None:
    deadline = time.monotonic() + 10
    while True:
        try:
            slots.drop(server.dsn(), "paced")
        except PgOutputError:  # the server has not noticed yet that its reader is gone
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return


def _write(connection: psycopg.Connection[Any], pace: Pace) -> None:
    begin = time.monotonic()
    for number in range(pace.commits):
        if number % pace.burst == 0:
            wait = begin + number // pace.burst * pace.every - time.monotonic()
            if wait > 0:
                time.sleep(wait)
        first = number * pace.rows
        connection.execute(_INSERT, [time.time(), first, first + pace.rows], prepare=True)


# --- In the consumer's process --------------------------------------------------------------------


def _cpu() -> float:
    return time.process_time()


def _receive_only(dsn: str, commits: int) -> Iterator[float]:
    """The bare loop of libpq, woken for 64 KiB or after 5 ms, as the peer of this name has it."""
    connection = pq.PGconn.connect(f"{dsn} replication=database".encode())
    connection.exec_(
        b"START_REPLICATION SLOT paced LOGICAL 0/0 (proto_version '1', publication_names 'paced')"
    )
    low_water = socket.socket(fileno=os.dup(connection.socket))
    low_water.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 65536)
    poll = select.poll()
    poll.register(low_water, select.POLLIN)
    print("ready", flush=True)
    yield _cpu()
    while commits:
        length, data = connection.get_copy_data(1)
        if length > 0:
            commits -= data[0] == 0x77 and data[25] == ord("C")
            continue
        poll.poll(5)
        connection.consume_input()
    yield _cpu()


def _consume(dsn: str, how: str, commits: int, late: list[float]) -> Iterator[float]:
    """What `transactions` or `groups` give, all columns typed."""
    import pyarrow as pa

    # pyarrow imports pandas at the first of these.
    pa.record_batch({"sent": [0.0]}).column(0).to_numpy()
    method, _, protocol = how.partition(", protocol ")
    with connect(
        dsn, slot="paced", publications=["paced"], protocol=int(protocol) if protocol else "auto"
    ) as stream:  # fmt: skip
        time.sleep(_SETTLED)
        print("ready", flush=True)
        yield _cpu()
        for found in getattr(stream, method)():
            for batch in found.batches():
                sent = pa.record_batch(batch).column("after").field("sent").to_numpy()
                late += (time.time() - sent).tolist()
            stream.acknowledge(found)
            commits -= found.commits
            if commits <= 0:
                break
        yield _cpu()


def _capture(dsn: str, commits: int) -> Iterator[float]:
    """A capture to durable segments, on the disk that the checkout is on."""
    marks: list[float] = []
    stop = threading.Event()

    def tell(progress: CaptureProgress) -> None:
        if not marks:  # nothing comes yet
            print("ready", flush=True)
            marks.append(_cpu())
        if progress.transactions >= commits:
            stop.set()

    with tempfile.TemporaryDirectory(dir=Path(__file__).parent) as directory:
        capture(
            dsn, slot="paced", publications=["paced"], directory=directory, adopt_slot=True,
            progress=tell, stop=stop,
        )  # fmt: skip
        marks.append(_cpu())
    yield from marks


def main() -> None:
    consumer, commits, dsn = sys.argv[1], int(sys.argv[2]), os.environ["PACE_DSN"]
    late: list[float] = []
    if consumer == "receive only":
        begin, end = _receive_only(dsn, commits)
    elif consumer == "capture":
        begin, end = _capture(dsn, commits)
    else:
        begin, end = _consume(dsn, consumer, commits, late)
    told = {"cpu": end - begin}
    if late:
        told |= {"median": float(np.median(late)), "p99": float(np.quantile(late, 0.99))}
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
