"""Memory of a capture and of a consumer while pgbench writes: flat, however long that takes.

    python tests/chaos/steady.py [--what streams|syncs|spark] [--seconds N] [--scale N]
                                 [--clients N] [--rate N]

`capture` and `groups()` with columns, or syncs into DuckDB and Delta tables, read beside each
other, in processes of their own; or one sync whose windows Spark's executors write, and the memory
of the driver and of its Java process is looked at. It is looked up each second. Its median in the
last part of the time must be that of the first part, but for some megabytes; a part is a minute, or
a third of a shorter time. At the end both must have read everything.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

import psycopg
from support.waiting import wait_until

from pgoutput_fast.embedded import EmbeddedServer, find_server_bindir

VERSION = 18
ALLOWED = {"streams": 4 << 20, "syncs": 64 << 20, "spark": 64 << 20}
"""Bytes of growth. duckdb, delta-rs and pyarrow keep some memory for themselves."""
WARM_UP = {"streams": 5, "syncs": 120, "spark": 300}
"""Seconds in which modules are loaded and buffers made, and old rows copied. Java takes its whole
heap in time, and Spark keeps what it knows of its last 1,000 jobs."""

READERS = {
    "capture": """
import sys
from pgoutput_fast.replication import capture
capture(sys.argv[1], slot="capture", publications=["p"], directory=sys.argv[2], create_slot=True)
""",
    "groups": """
import sys
import pyarrow as pa
from pgoutput_fast.replication import connect
with connect(sys.argv[1], slot="groups", publications=["p"], create_slot=True) as stream:
    for group in stream.groups():
        for changes in group.batches():
            pa.record_batch(changes)
        stream.acknowledge(group)
""",
}
SYNC = """
import sys
from pgoutput_fast import apply
apply.sync(sys.argv[1], slot={slot!r}, publications=["p"], target={target!r} % sys.argv[2])
"""
SYNCS = {
    "sync_duckdb": SYNC.format(slot="sync_duckdb", target="duckdb:%s.duckdb"),
    "sync_delta": SYNC.format(slot="sync_delta", target="%s.lake"),
}
SPARK = {
    "driver": """
import functools, os, sys
os.environ["ARROW_DEFAULT_MEMORY_POOL"] = "jemalloc"  # as the command does, before it is imported
from pgoutput_fast import spark
from pgoutput_fast.cli import main
# All windows by executors, also the small ones that the driver would write by itself.
spark.SparkEngine = functools.partial(spark.SparkEngine, driver_bytes=0)
main([
    "sync", "--dsn", sys.argv[1], "--slot", "sync_spark", "--publication", "p",
    "--to", sys.argv[2] + ".lake", "--engine", "spark", "--master", "local[2]",
    "--conf", "spark.driver.memory=512m",
])
"""
}
CODES = {"streams": READERS, "syncs": SYNCS, "spark": SPARK}


def execute(dsn: str, *statements: str) -> list[tuple[Any, ...]]:
    rows: list[tuple[Any, ...]] = []
    with psycopg.connect(dsn, autocommit=True) as connection:
        for statement in statements:
            cursor = connection.execute(statement.encode())
            rows = cursor.fetchall() if cursor.description else []
    return rows


def resident(pid: int) -> int:
    """Bytes of memory that a process has."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def java_of(pid: int) -> int | None:
    """The Java process that a driver has started."""
    children = Path(f"/proc/{pid}/task").glob("*/children")
    for child in " ".join(path.read_text() for path in children).split():
        if Path(f"/proc/{child}/comm").read_text().strip() == "java":
            return int(child)
    return None


def tenths(samples: list[int]) -> list[list[int]]:
    """Samples in ten parts, or in as many as there are."""
    size = -(-len(samples) // 10)
    return [samples[at : at + size] for at in range(0, len(samples), size)]


def wait_for(dsn: str, query: str, wanted: object, readers: dict[str, Any]) -> None:
    def is_met() -> bool:
        for name, reader in readers.items():
            assert reader.poll() is None, f"{name} has ended"
        return execute(dsn, query) == [(wanted,)]

    wait_until(is_met, 120, log=lambda: query)


def samples_while(
    bench: subprocess.Popen[str], readers: dict[str, subprocess.Popen[bytes]]
) -> dict[str, list[int]]:
    """The memory of the readers each second, until pgbench ends."""
    found: dict[str, list[int]] = {name: [] for name in readers}
    while bench.poll() is None:
        time.sleep(1)
        for name, reader in readers.items():
            assert reader.poll() is None, f"{name} has ended"
            found[name].append(resident(reader.pid))
            java = java_of(reader.pid)
            if java is not None:
                found.setdefault(f"{name}'s Java", []).append(resident(java))
    return found


def run(what: str, seconds: int, scale: int, clients: int, rate: int) -> None:
    codes, warm_up = CODES[what], WARM_UP[what]
    pgbench = str(find_server_bindir(VERSION) / "pgbench")
    settings = {"log_min_messages": "fatal", "max_wal_size": "256MB", "checkpoint_timeout": "30s"}
    readers: dict[str, subprocess.Popen[bytes]] = {}
    with tempfile.TemporaryDirectory() as directory, EmbeddedServer(VERSION, settings) as server:
        dsn = server.dsn()
        filling = [pgbench, "-i", "-q", "-s", str(scale), dsn]
        subprocess.run(filling, check=True, capture_output=True)
        execute(dsn, "CREATE PUBLICATION p FOR ALL TABLES")
        command = [pgbench, "-n", "-c", str(clients), "-T", str(warm_up + seconds)]
        command += [*(("-R", str(rate)) if rate else ()), dsn]
        try:
            for name, code in codes.items():
                arguments = [sys.executable, "-c", code, dsn, str(Path(directory) / "segments")]
                readers[name] = subprocess.Popen(arguments)
            active = "SELECT count(*) FROM pg_replication_slots WHERE active"
            wait_for(dsn, active, len(readers), readers)
            bench = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            found = samples_while(bench, readers)
            said, _ = bench.communicate()
            assert bench.returncode == 0, said
            ((end,),) = execute(dsn, "SELECT pg_current_wal_lsn()::text")
            begin = time.monotonic()
            query = "SELECT count(*) FROM pg_replication_slots WHERE confirmed_flush_lsn"
            wait_for(dsn, f"{query} < '{end}'", 0, readers)
            print(
                *(line for line in said.splitlines() if "processed" in line or line[:3] == "tps"),
                f"all was read {time.monotonic() - begin:.1f} s after the end",
                sep="\n",
            )
        finally:
            for reader in readers.values():
                reader.kill()
                reader.wait()
    for name, samples in found.items():
        part = max(1, min(60, seconds // 3))
        first = statistics.median(samples[warm_up : warm_up + part])
        last = statistics.median(samples[-part:])
        print(
            f"{name}: median of the first {part} s {first / 2**20:.1f} MB, of the last {part} s "
            f"{last / 2**20:.1f} MB, most {max(samples) / 2**20:.1f} MB; of each tenth of all",
            *(f"{statistics.median(tenth) / 2**20:.0f}" for tenth in tenths(samples)),
            flush=True,
        )
        assert last - first < ALLOWED[what], f"{name} has grown by {(last - first) / 2**20:.1f} MB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--what", choices=ALLOWED, default="streams")
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument("--scale", type=int, default=5)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--rate", type=int, default=0, help="transactions a second")
    run(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
