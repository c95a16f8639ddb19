"""Measure tables that Spark's executors write: from segments, and from a slot.

Segments are read by the source's mode `manifest`, by Spark's own writer, and by a sync with Spark's
engine. From a slot, the command `sync` runs as users run it; all its processes are stopped while
the server makes a backlog, and then it is measured how long they take for it, and how much CPU.
Spark has started and its workers are warm by then.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pgoutput_fast as pf
from pgoutput_fast import apply

from . import harness
from .applying import write_segments
from .harness import Case, Results, optional_module, progress
from .peers import site

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TABLES = (1, 4, 200)
_WAIT = 600.0  # seconds that anything may take
_POLL = 0.01  # seconds
_BACKLOGS = {"narrow": 5.0, "mixed": 5.0}  # how many times the changes of the scale they have
_PACE = 5_000  # changes each second, of the measurement of delays
_ROWS = 50  # changes of a transaction there
_SETTINGS = {**site.SETTINGS, "wal_sender_timeout": 0}


# --- from segments -------------------------------------------------------------------------------


def segment_cases(spark: SparkSession, root: Path, count: int) -> Iterator[Case]:
    """Each way from segments to tables, for some numbers of tables with as many changes in all."""
    for tables in TABLES:
        write_segments(root / f"{tables}", tables, count)
    for tables in TABLES:
        segments = root / f"{tables}"
        ways = {
            "mode manifest": functools.partial(_manifest, spark, segments, root / "files"),
            "sync, Spark": functools.partial(_sync, spark, segments, root / "lake"),
            "sync, local": functools.partial(_sync, None, segments, root / "lake"),
        }
        if tables <= 4:
            ways["Spark's own writer"] = functools.partial(
                _own_writer, spark, segments, tables, root / "files"
            )
        for way, run in ways.items():
            sample = functools.partial(_timed, run, count // tables * tables)
            of = f"{tables} table{'s' * (tables > 1)}"
            yield Case(
                f"segments by Spark/{of}" if way == "sync, Spark" else f"segments: {of}/{way}",
                sample, sample,
            )  # fmt: skip


def _timed(run: Any, changes: int) -> dict[str, float]:
    """The time of what `run` gives; it makes room before."""
    work = run()
    begin = time.perf_counter()
    found = work()
    wall = time.perf_counter() - begin
    assert found in (None, changes), (found, changes)
    return {"wall": wall / changes}


def _manifest(spark: SparkSession, segments: Path, files: Path) -> Any:
    shutil.rmtree(files, ignore_errors=True)

    def work() -> int:
        manifests = (
            spark.read.format("pgoutput")
            .options(capture="external", segments=str(segments), mode="manifest", output=str(files))
            .load()
        )
        return sum(row.rows for row in manifests.select("rows").collect())

    return work


def _own_writer(spark: SparkSession, segments: Path, tables: int, files: Path) -> Any:
    from pgoutput_fast.spark import read_segments

    shutil.rmtree(files, ignore_errors=True)

    def work() -> None:
        for n in range(tables):
            changes = read_segments(spark, segments, f"public.t{n}")
            changes.write.parquet(str(files / f"t{n}"))

    return work


def _sync(spark: SparkSession | None, segments: Path, lake: Path) -> Any:
    from pgoutput_fast.spark import SparkEngine

    shutil.rmtree(lake, ignore_errors=True)

    def work() -> int:
        engine = None if spark is None else SparkEngine(spark, driver_bytes=0)
        done = apply.sync(
            segments=segments, target=str(lake), uncopied="empty", until="now",
            window_bytes=1 << 30, engine=engine,
        )  # fmt: skip
        return done.changes

    return work


# --- from a slot ---------------------------------------------------------------------------------


class Running:
    """A command that runs until it is told to end, with what it says.

    Parameters
    ----------
    arguments : list of str
        Of ``pgoutput-fast``.
    """

    def __init__(self, arguments: list[str], options: str) -> None:
        self.numbers: dict[str, Any] = {}
        # No table has its rows if changes alone are kept.
        self._lacks_rows = "never" in arguments
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "pgoutput_fast", *arguments),
                *("--log-format", "json", "--config", options),
            ],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
        self._said: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            with contextlib.suppress(ValueError):
                found = json.loads(line)
                if found.get("event") in ("progress", "stop"):
                    self.numbers = found
                    continue
            self._said = [*self._said[-20:], line]

    def has(self, lsn: int) -> bool:
        """Whether what was committed before an LSN is in the tables, or in segments."""
        told = self.numbers.get("lsn") or self.numbers.get("durable_lsn") or "0/0"
        behind = self.numbers.get("waiting")
        if not self._lacks_rows:
            behind = behind or self.numbers.get("stale")
        return pf.parse_lsn(told) >= lsn and not behind

    def wait(self, lsn: int) -> None:
        """Wait until that is so."""
        end = time.monotonic() + _WAIT
        while not self.has(lsn):
            if self._process.poll() is not None or time.monotonic() > end:
                raise RuntimeError("".join(self._said))
            time.sleep(_POLL)

    def processes(self) -> Iterator[tuple[str, list[str]]]:
        """Name, and the fields of ``/proc/PID/stat`` behind it, of all of its processes."""
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                head, _, tail = path.read_text().rpartition(")")
                fields = [head.partition(" ")[0], *tail.split()]
                if int(fields[4]) == self._process.pid:  # the session
                    yield head.partition("(")[2], fields

    def cpu(self) -> float:
        """Seconds of CPU that they have used, those included that have ended."""
        ticks = sum(sum(map(int, fields[12:16])) for _, fields in self.processes())
        return ticks / os.sysconf("SC_CLK_TCK")

    def memory(self) -> dict[str, int]:
        """Bytes of physical memory: of the command, of Java, of the workers."""
        found = {"driver": 0, "java": 0, "workers": 0}
        for name, fields in self.processes():
            own = "driver" if fields[0] == str(self._process.pid) else "workers"
            found["java" if name == "java" else own] += int(fields[22]) * os.sysconf("SC_PAGE_SIZE")
        return found

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all of its processes."""
        for _, fields in list(self.processes()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(fields[0]), number)

    def end(self) -> None:
        """End it, and wait until all of its processes have ended."""
        self.signal(signal.SIGKILL)
        self._process.wait()
        self._reader.join()


@contextlib.contextmanager
def _running(server: Any, place: Path, kind: str) -> Iterator[tuple[Running, Any]]:
    """A command that has the tables of a new database, with a connection to that."""
    psycopg = optional_module("psycopg")
    name = f"d{place.name}"
    place.mkdir()
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
    with psycopg.connect(server.dsn(name), autocommit=True) as connection:
        connection.execute(site.TABLES)
        connection.execute("CREATE PUBLICATION p FOR ALL TABLES")
        given = ["--dsn", server.dsn(name), "--slot", name, "--publication", "p"]
        if kind == "capture":
            command = ["capture", *given, "--out", str(place / "segments")]
        else:
            engine, _, states = kind.partition(", ")
            command = ["sync", *given, "--to", str(place / "lake"), "--engine", engine]
            command += ["--master", "local[2]"] * (engine == "spark")
            if states:  # no state tables are made
                command += ["--snapshot", "never"]
        options = place / "options.toml"
        options.parent.mkdir(parents=True, exist_ok=True)
        options.write_text(
            "log_interval = 0.1\n"
            + "max_delay = 0.2\ninterval = 0.2\n" * (kind != "capture")
            + 'uncopied = "changes"\n' * ("--snapshot" in command)
        )
        running = Running(command, str(options))
        try:
            # Its workers are warm then, and it has written some windows.
            for n in range(3):
                connection.execute(
                    "INSERT INTO narrow SELECT -g, 1, repeat('x', g % 60), 2, now(), true "
                    f"FROM generate_series({n * 100_000 + 1}, {(n + 1) * 100_000}) g"
                )
                running.wait(_lsn(connection))
            yield running, connection
        finally:
            running.end()
            shutil.rmtree(place)


def _lsn(connection: Any) -> int:
    """Where the server's log is."""
    return pf.parse_lsn(connection.execute("SELECT pg_current_wal_insert_lsn()").fetchone()[0])


@contextlib.contextmanager
def slot_cases(scale: float) -> Iterator[list[Case]]:
    """A backlog that is worked off: by the clock, and the CPU of all processes but the server's."""
    from pgoutput_fast.embedded import EmbeddedServer

    numbers = iter(range(1_000_000))
    with (
        tempfile.TemporaryDirectory() as directory,
        EmbeddedServer(bindir=site.find_server(), settings=_SETTINGS) as server,
    ):

        def sample(name: str, factor: float, kind: str) -> dict[str, float]:
            with _running(server, Path(directory, f"{next(numbers)}"), kind) as given:
                running, connection = given
                running.signal(signal.SIGSTOP)
                for statement in site.parts(site.statements(name, factor * scale)):
                    connection.execute(statement)
                connection.execute("CHECKPOINT")  # or some of the ways have one beside them
                end, before, done = _lsn(connection), running.cpu(), running.numbers["changes"]
                begin = time.perf_counter()
                running.signal(signal.SIGCONT)
                running.wait(end)
                wall, cpu = time.perf_counter() - begin, running.cpu() - before
                changes = running.numbers["changes"] - done
                return {"cpu": cpu / changes, "wall": wall / changes}

        kinds = ("capture", "local", "spark", "spark, changes")
        yield [
            Case(
                f"backlog: {name}/{kind}",
                functools.partial(sample, name, factor, kind),
                lambda: None,
            )
            for name, factor in _BACKLOGS.items()
            for kind in kinds
        ]


# --- delays and memory ---------------------------------------------------------------------------


def delays(kind: str, seconds: float) -> tuple[list[float], list[dict[str, int]]]:
    """How late changes are in a change table while a writer keeps a pace.

    Parameters
    ----------
    kind : str
        As of the cases of slots: "local" or "spark".
    seconds : float

    Returns
    -------
    list of float
        For each transaction the seconds from its commit until a version of the table has it.
    list of dict
        The memory of the processes, twenty times.
    """
    from pgoutput_fast.embedded import EmbeddedServer

    memory: list[dict[str, int]] = []
    with (
        tempfile.TemporaryDirectory() as directory,
        EmbeddedServer(bindir=site.find_server(), settings=_SETTINGS) as server,
        _running(server, Path(directory, "0"), kind) as (running, connection),
    ):
        begin, n, told = time.monotonic(), 0, 0
        first = connection.execute("SELECT clock_timestamp()").fetchone()[0]
        while (now := time.monotonic() - begin) < seconds:
            if now >= n * _ROWS / _PACE:
                connection.execute(
                    "INSERT INTO narrow SELECT g, 1, repeat('x', g % 60), 2, now(), true "
                    f"FROM generate_series({n * _ROWS + 1}, {(n + 1) * _ROWS}) g"
                )
                n += 1
            else:
                time.sleep(0.001)
            if now >= told * seconds / 20:
                memory.append(running.memory())
                told += 1
                progress(f"{now:.0f} s: " + json.dumps(memory[-1]))
        running.wait(_lsn(connection))
        found = _seen(Path(directory, "0", "lake", "changes", "public.narrow"), first)
    assert len(found) == n, (len(found), n)
    return found, memory


def _seen(table: Path, first: Any) -> list[float]:
    """For each commit since a time, how long it took until the table had it."""
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    found = []
    for entry in sorted((table / "_delta_log").glob("*.json")):
        seen = entry.stat().st_mtime
        added = [json.loads(line).get("add") for line in entry.read_text().splitlines()]
        for one in filter(None, added):
            if not one["dataChange"]:
                continue  # small files that were joined
            path = table / one["path"]
            commits = pc.unique(pq.read_table(path, columns=["commit_time"]).column(0))
            found += [seen - at.timestamp() for at in commits.to_pylist() if at >= first]
    return found


def run(options: argparse.Namespace, results: Results) -> None:
    """Measure all of it."""
    optional_module("pyspark")
    optional_module("deltalake")
    from .spark import spark_session

    scale = options.scale or (0.1 if options.quick else 1.0)
    rounds = options.rounds or (1 if options.quick else 3)
    count = int(4_000_000 * scale)
    with tempfile.TemporaryDirectory() as directory, spark_session() as spark:
        harness.measure(segment_cases(spark, Path(directory), count), rounds, results)
    with slot_cases(scale) as cases:
        harness.measure(cases, rounds, results)
    seconds = max(5.0, 60 * scale)
    for kind in ("local", "spark"):
        late = sorted(delays(kind, seconds)[0])
        name = f"delay: {_PACE:,} changes/s/{kind}"
        results.add(name, {"median": late[len(late) // 2], "p95": late[len(late) * 95 // 100]})
    results.described["tables by Spark"] = (
        f"{count:,} changes of {', '.join(map(str, TABLES))} tables with 6 columns in segments; "
        f"a backlog of {_BACKLOGS['narrow'] * scale * 1_000_000:,.0f} changes (narrow) of a slot; "
        "local[2]"
    )
