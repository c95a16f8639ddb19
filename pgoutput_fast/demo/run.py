"""The demonstration: a server, a workload, its capture, Spark's tables, the proof, the report."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pgoutput_fast as pf
from pgoutput_fast.errors import PgOutputError

from .workload import PUBLICATION, SCHEMA, SLOT, TABLES, steps

if TYPE_CHECKING:
    from types import FrameType

    from pyspark.sql import SparkSession

    from .verify import Difference

_SPARK = {
    "spark.driver.memory": "1g",
    "spark.sql.shuffle.partitions": "2",
    # A partition of these tables fits into a worker many times over, so there is no need for more.
    "spark.sql.adaptive.coalescePartitions.enabled": "false",
    "spark.python.worker.reuse": "true",
}
_MAX_CORES = 4
"""Each core takes a Python worker of some 200 MB."""

_LOG4J = """\
rootLogger.level = error
rootLogger.appenderRef.stderr.ref = stderr
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = %d{HH:mm:ss} %p %c{1}: %m%n%ex
"""


@dataclass
class TableResult:
    """What was done with one table."""

    name: str
    about: str
    changes: int = 0
    rows: int = 0
    checks: int = 0
    change_bytes: int = 0
    state_bytes: int = 0
    decode_seconds: float = 0.0
    state_seconds: float = 0.0
    verify_seconds: float = 0.0
    differing: int = 0
    difference: Difference | None = None
    operations: dict[str, int] = field(default_factory=dict)


@dataclass
class Phase:
    """A stretch of the run, in seconds since its start."""

    name: str
    start: float
    end: float = 0.0


@dataclass
class Result:
    """What came of a run."""

    implementation: str
    fallback_reason: str | None
    server_version: str
    spark_version: str
    seed: int
    changes: int = 0
    frames: int = 0
    transactions: int = 0
    frame_bytes: int = 0
    segments: int = 0
    segment_bytes: int = 0
    capture_seconds: float = 0.0
    seconds: float = 0.0
    tables: list[TableResult] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)
    samples: list[tuple[float, int]] = field(default_factory=list)
    """Of the capture: seconds since the start of the run, frames so far."""

    @property
    def difference(self) -> Difference | None:
        """The first row that differs, None where everything is equal."""
        return next((table.difference for table in self.tables if table.difference), None)


class Progress:
    """What a run tells while it goes on; this one keeps silent."""

    def phase(self, name: str, total: float | None = None) -> None:
        """A stretch begins, of `total` units of whatever it does."""

    def advance(self, done: float, note: str = "") -> None:
        """So much of the stretch is done, in all."""


@contextlib.contextmanager
def deferred_interrupt() -> Iterator[None]:
    """Hold back Ctrl-C until the end of the block: half a start can't be undone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        received.append(number)

    previous = signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if received:
        raise KeyboardInterrupt


@contextlib.contextmanager
def _spark(directory: Path, log: Path) -> Iterator[SparkSession]:
    """Spark for the time of the block; afterwards its JVM and workers are gone."""
    from pyspark import SparkContext

    from pgoutput_fast.spark import session

    if SparkContext._gateway is not None:  # noqa: SLF001 - there is no other way to ask
        raise PgOutputError("Spark runs in this process already; run the demo in one of its own")
    temporary = directory / "spark"
    temporary.mkdir()
    log4j = temporary / "log4j2.properties"
    log4j.write_text(_LOG4J)
    settings = {
        **_SPARK,
        "spark.local.dir": str(temporary),
        "spark.sql.warehouse.dir": str(temporary / "warehouse"),
        "spark.driver.extraJavaOptions": f"-Djava.io.tmpdir={temporary} "
        f"-Dlog4j2.configurationFile={log4j}",
    }
    cores = min(len(os.sched_getaffinity(0)), _MAX_CORES)
    try:
        with deferred_interrupt(), _stderr_to(log):  # the JVM and its workers inherit it
            spark = session(f"local[{cores}]", "pgoutput-fast demo", settings)
        yield spark
    finally:
        with deferred_interrupt():
            _end_spark()


def _end_spark() -> None:
    """Stop Spark, and wait for its JVM, which outlives a stopped session."""
    from pyspark import SparkContext

    gateway: Any = SparkContext._gateway  # noqa: SLF001
    if gateway is None:
        return
    try:
        if (context := SparkContext._active_spark_context) is not None:  # noqa: SLF001
            context.stop()
    except Exception:  # noqa: BLE001, S110 - the JVM is ended all the same
        pass
    gateway.shutdown()
    process = gateway.proc
    process.stdin.close()  # at which the JVM ends, and with it the Python workers
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    SparkContext._gateway = SparkContext._jvm = None  # noqa: SLF001


@contextlib.contextmanager
def _stderr_to(path: Path) -> Iterator[None]:
    sys.stderr.flush()
    saved = os.dup(2)
    try:
        with path.open("ab") as file:
            os.dup2(file.fileno(), 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)


def run(
    changes: int,
    *,
    directory: Path,
    seed: int = 1,
    progress: Progress | None = None,
    tamper: Callable[[Path], None] | None = None,
) -> Result:
    """Run the demonstration.

    Parameters
    ----------
    changes : int
        How many changes the server is to make, at least.
    directory : path
        An empty directory: for ``segments/``, ``changes/``, ``state/`` and the server's ``copies/``.
    seed : int
        Of the workload.
    progress : Progress, optional
        Is told what goes on.
    tamper : callable, optional
        Is given the directory of the state tables before they are compared, so that a test can put
        something wrong into them.

    Returns
    -------
    Result
        Its `difference` is None if and only if every table equals the server's.

    Raises
    ------
    PgOutputError
        Something else went wrong. Whatever was started has ended.
    """
    return _Run(changes, directory, seed, progress or Progress(), tamper).run()


class _Run:
    def __init__(
        self,
        changes: int,
        directory: Path,
        seed: int,
        progress: Progress,
        tamper: Callable[[Path], None] | None,
    ) -> None:
        self.changes = changes
        self.directory = directory
        self.progress = progress
        self.tamper = tamper
        self.begun = time.perf_counter()
        self.result = Result(
            implementation=pf.IMPLEMENTATION,
            fallback_reason=pf.FALLBACK_REASON,
            server_version="",
            spark_version="",
            seed=seed,
            tables=[TableResult(*table) for table in TABLES],
        )

    def run(self) -> Result:
        from pgoutput_fast.embedded import EmbeddedServer

        with contextlib.ExitStack() as stack:
            with self.phase("start PostgreSQL"):
                server = stack.enter_context(EmbeddedServer(version=18))
            self.on_server(server.dsn())
        with contextlib.ExitStack() as stack:
            temporary = Path(
                stack.enter_context(tempfile.TemporaryDirectory(prefix="pgoutput-fast-demo-"))
            )
            with self.phase("start Spark"):
                spark = stack.enter_context(_spark(temporary, self.directory / "spark.log"))
                self.result.spark_version = spark.version
            self.in_spark(spark)
        self.result.seconds = time.perf_counter() - self.begun
        return self.result

    @contextlib.contextmanager
    def phase(self, name: str, total: float | None = None) -> Iterator[None]:
        self.progress.phase(name, total)
        phase = Phase(name, time.perf_counter() - self.begun)
        self.result.phases.append(phase)
        yield
        phase.end = time.perf_counter() - self.begun

    # The server's part

    def on_server(self, dsn: str) -> None:
        import psycopg

        from pgoutput_fast.replication import CaptureProgress, ReplicationConnection, capture

        from .verify import copy_table

        result, segments = self.result, self.directory / "segments"
        with psycopg.connect(dsn, autocommit=True) as connection:
            result.server_version = str(connection.info.server_version // 10000)
            connection.execute(SCHEMA)
            with ReplicationConnection(dsn) as replication:
                replication.create_slot(SLOT)
            work = list(steps(self.changes, result.seed))
            statements = sum(len(step.statements) for step in work)
            done = 0
            with self.phase("make changes", statements):
                for step in work:
                    for statement in step.statements:
                        connection.execute(statement)
                        done += 1
                        self.progress.advance(done, step.title)
            row = connection.execute("SELECT pg_current_wal_insert_lsn()").fetchone()
            assert row is not None
            until = pf.parse_lsn(row[0])

            def sample(captured: CaptureProgress) -> None:
                result.samples.append((time.perf_counter() - self.begun, captured.frames))
                self.progress.advance(captured.frames)

            with self.phase("capture"):
                captured = capture(
                    dsn,
                    slot=SLOT,
                    publications=[PUBLICATION],
                    directory=segments,
                    until_lsn=until,
                    progress=sample,
                )
            phase = result.phases[-1]
            result.capture_seconds = phase.end - phase.start
            result.frames, result.transactions = captured.frames, captured.transactions
            result.frame_bytes = captured.bytes
            files = list(segments.glob("*.arrow"))
            result.segments = len(files)
            result.segment_bytes = sum(file.stat().st_size for file in files)
            self.catalogue = {t.name: _facts(connection, t.name) for t in TABLES}
            copies = self.directory / "copies"
            copies.mkdir()
            with self.phase("COPY", len(result.tables)):
                for n, table in enumerate(result.tables, 1):
                    table.rows = copy_table(connection, table.name, copies / f"{table.name}.csv")
                    self.progress.advance(n, table.name)

    # Spark's part

    def in_spark(self, spark: SparkSession) -> None:
        tables = self.result.tables
        for title, work in (
            ("decode into change tables", self.write_changes),
            ("make current-state tables", self.write_state),
        ):
            with self.phase(title, len(tables)):
                for n, table in enumerate(tables, 1):
                    work(spark, table)
                    self.progress.advance(n, table.name)
        self.result.changes = sum(table.changes for table in tables)
        if self.tamper is not None:
            self.tamper(self.directory / "state")
        with self.phase("compare with the server", len(tables)):
            for n, table in enumerate(tables, 1):
                self.compare(spark, table)
                self.progress.advance(n, table.name)

    def write_changes(self, spark: SparkSession, table: TableResult) -> None:
        from pgoutput_fast.spark import read_segments

        begun = time.perf_counter()
        path = self.directory / "changes" / table.name
        read_segments(spark, self.directory / "segments", table.name).write.parquet(str(path))
        table.decode_seconds = time.perf_counter() - begun
        table.change_bytes = _size(path)
        counts = spark.read.parquet(str(path)).groupBy("op").count().collect()
        table.operations = {row.op: row["count"] for row in counts}
        table.changes = sum(table.operations.values())

    def write_state(self, spark: SparkSession, table: TableResult) -> None:
        from pgoutput_fast.spark import rows_after

        begun = time.perf_counter()
        changes = spark.read.parquet(str(self.directory / "changes" / table.name))
        key, added = self.catalogue[table.name]
        path = self.directory / "state" / table.name
        rows_after(changes, table=table.name, key=key, added=added).write.parquet(str(path))
        table.state_seconds = time.perf_counter() - begun
        table.state_bytes = _size(path)

    def compare(self, spark: SparkSession, table: TableResult) -> None:
        from .verify import compare, server_rows

        begun = time.perf_counter()
        copies = self.directory / "copies"
        state = spark.read.parquet(str(self.directory / "state" / table.name))
        csv, parquet = (copies / f"{table.name}.{kind}" for kind in ("csv", "parquet"))
        server = server_rows(spark, csv, parquet, state.schema)
        key, _ = self.catalogue[table.name]
        comparison = compare(table.name, server, state, key)
        table.checks, table.differing = comparison.checks, comparison.differing
        table.difference = comparison.first
        if comparison.rows != table.rows:
            raise PgOutputError(
                f"{table.name}: {comparison.rows} rows were read from the {table.rows} of the COPY"
            )
        table.verify_seconds = time.perf_counter() - begun


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*.parquet"))


def peak_memory() -> int:
    """Bytes that this process and those that it waited for had at their highest, each on its own."""
    return 1024 * max(
        resource.getrusage(who).ru_maxrss
        for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )


def _facts(connection, name):
    from pgoutput_fast.plan import Settings
    from pgoutput_fast.types import column_type
    from pgoutput_fast.values import codec_of

    key = [
        r[0]
        for r in connection.execute(
            "select a.attname from pg_index i join pg_attribute a on a.attrelid=i.indrelid and a.attnum=any(i.indkey) where i.indrelid=%s::regclass and i.indisprimary order by array_position(i.indkey::int2[],a.attnum)",
            (name,),
        )
    ]
    added = {}
    for n, o, missing, v, hasdef, nn in connection.execute(
        "select attname,atttypid::int8,atthasmissing,(attmissingval::text::text[])[1],atthasdef,attnotnull from pg_attribute where attrelid=any(select %s::regclass union all select inhrelid from pg_inherits where inhparent=%s::regclass) and attnum>0 and not attisdropped order by atthasmissing",
        (name, name),
    ):
        if missing:
            added[n] = codec_of(column_type(o), Settings()).text(v.encode())
        elif not hasdef and not nn:
            added[n] = None
    return key, added
