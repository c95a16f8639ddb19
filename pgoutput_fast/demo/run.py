"""The run of the demonstration: server, workload, capture, Spark's tables, and the comparison."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pgoutput_fast as pf
from pgoutput_fast.errors import PgOutputError

from .workload import PUBLICATION, SCHEMA, SLOT, SPARK_TYPES, TABLES, steps

if TYPE_CHECKING:
    from types import FrameType

    import psycopg
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
"""Cores that Spark may use. Each takes a Python worker of some 200 MB."""

_FEW_CHANGES = 5_000
"""With fewer changes, interpreting Spark's expressions takes less time than compiling them."""

_SAMPLE_SECONDS = 0.25

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
class Family:
    """How much was compared of one family of types.

    Attributes
    ----------
    columns, values, nulls : int
        The number of columns, of values that are not NULL, and of NULLs.
    """

    columns: int = 0
    values: int = 0
    nulls: int = 0


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
    compare_seconds: float = 0.0
    differing: int = 0
    difference: Difference | None = None
    operations: dict[str, int] = field(default_factory=dict)
    families: dict[str, Family] = field(default_factory=dict)


@dataclass
class Phase:
    """A phase of the run; `start` and `end` are seconds since the start of the run."""

    name: str
    start: float
    end: float = 0.0


@dataclass
class Span:
    """Work on `amount` changes or rows; its times are seconds since the start of the run."""

    stage: str
    table: str
    start: float
    end: float
    amount: int


@dataclass
class Result:
    """The results of a run."""

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
    spans: list[Span] = field(default_factory=list)

    @property
    def families(self) -> dict[str, Family]:
        """How much was compared of each family of types in all tables."""
        found: dict[str, Family] = {}
        for table in self.tables:
            for name, family in table.families.items():
                total = found.setdefault(name, Family())
                total.columns += family.columns
                total.values += family.values
                total.nulls += family.nulls
        return dict(sorted(found.items()))

    @property
    def difference(self) -> Difference | None:
        """The first row that differs, None where everything is equal."""
        return next((table.difference for table in self.tables if table.difference), None)


class Progress:
    """Receives how far a run has come. This class does nothing; subclasses show it."""

    def phase(self, name: str, total: int | None = None) -> None:
        """Begin a phase with `total` units of work; None if their number is not known."""

    def advance(self, done: int, note: str = "") -> None:
        """Note that `done` units of the phase are done in all."""


@contextlib.contextmanager
def deferred_interrupt() -> Iterator[None]:
    """Hold back Ctrl-C until the end of the block, as half a start can't be undone.

    SIGTERM is held back too if it has a handler, as the command gives it one; at the end it raises
    KeyboardInterrupt as Ctrl-C does.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        received.append(number)

    signals = [signal.SIGINT]
    if callable(signal.getsignal(signal.SIGTERM)):
        signals.append(signal.SIGTERM)
    previous = [signal.signal(number, note) for number in signals]
    try:
        yield
    finally:
        for number, handler in zip(signals, previous, strict=True):
            signal.signal(number, handler)
    if received:
        raise KeyboardInterrupt


@contextlib.contextmanager
def _no_log_of_interrupts() -> Iterator[None]:
    """Keep py4j from logging tracebacks of a KeyboardInterrupt, which is no error.

    Its other records are logged as before.
    """

    def is_another(record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        while error is not None and not isinstance(error, KeyboardInterrupt):
            error = error.__context__
        return error is None

    # py4j logs through the root logger too. Filters see only the records of their own logger.
    loggers = [logging.getLogger(name) for name in (None, "py4j.clientserver", "py4j.java_gateway")]
    for logger in loggers:
        logger.addFilter(is_another)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(is_another)


@contextlib.contextmanager
def _spark(directory: Path, log: Path) -> Iterator[SparkSession]:
    """A Spark session within the block. After it, Spark's JVM and workers have ended."""
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
        # The JVM lives for a minute only, and its second compiler would take most of the
        # processors' time.
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC "
        f"-XX:-UsePerfData -Djava.io.tmpdir={temporary} -Dlog4j2.configurationFile={log4j}",
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
) -> Result:
    """Run the demonstration.

    Parameters
    ----------
    changes : int
        How many changes the server is to make, at least.
    directory : path
        An empty directory, in which ``segments``, ``changes``, ``state`` and ``copies`` (of the
        server's tables) are made.
    seed : int
        The seed of the workload's random numbers.
    progress : Progress, optional
        Is told how far the run has come.

    Returns
    -------
    Result
        Its `difference` is None if and only if every table equals the server's.

    Raises
    ------
    PgOutputError
        Something other than a difference went wrong. Whatever was started has ended.
    """
    return _Run(changes, directory, seed, progress or Progress()).run()


class _Run:
    def __init__(
        self,
        changes: int,
        directory: Path,
        seed: int,
        progress: Progress,
    ) -> None:
        self.changes = changes
        self.directory = directory
        self.progress = progress
        self.family_of: dict[str, dict[str, str]] = {}
        """Table → column → family of its type."""
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
        # These imports come first, so that a missing extra is reported before the server starts.
        import pgoutput_fast.replication
        import pgoutput_fast.spark  # noqa: F401
        from pgoutput_fast.embedded import EmbeddedServer

        with contextlib.ExitStack() as stack:
            with self.phase("start PostgreSQL"):
                server = stack.enter_context(EmbeddedServer(version=18))
            self.on_server(server.dsn())
        with contextlib.ExitStack() as stack:
            temporary = stack.enter_context(tempfile.TemporaryDirectory(prefix="pgoutput-fast-"))
            stack.enter_context(_no_log_of_interrupts())
            with self.phase("start Spark"):
                spark = stack.enter_context(_spark(Path(temporary), self.directory / "spark.log"))
                self.result.spark_version = spark.version
            self.in_spark(spark)
        self.result.seconds = self.now()
        return self.result

    def now(self) -> float:
        """Seconds since the run began."""
        return time.perf_counter() - self.begun

    @contextlib.contextmanager
    def phase(self, name: str, total: int | None = None) -> Iterator[Phase]:
        self.progress.phase(name, total)
        phase = Phase(name, self.now())
        self.result.phases.append(phase)
        yield phase
        phase.end = self.now()

    # The server's part

    def on_server(self, dsn: str) -> None:
        import psycopg

        from pgoutput_fast.catalog import read_catalog

        result, segments = self.result, self.directory / "segments"
        try:
            with psycopg.connect(dsn, autocommit=True) as connection:
                result.server_version = connection.info.parameter_status("server_version") or ""
                until = self.make_changes(connection, dsn)
                self.capture(dsn, segments, until)
                self.catalog = read_catalog(dsn, [PUBLICATION])
                self.catalog.save(segments / "catalog.json")
                self.registry = pf.TypeRegistry.from_connection(connection)
                (segments / "types.json").write_text(self.registry.to_json())
                self.copy(connection)
        except psycopg.Error as error:
            raise PgOutputError(f"the embedded server refused: {error}") from error

    def make_changes(self, connection: psycopg.Connection[Any], dsn: str) -> int:
        """Make tables, publication and slot, and run the workload. Returns the LSN after it."""
        from pgoutput_fast.replication import ReplicationConnection

        # psycopg's types ask for literal strings. The statements are this package's own.
        execute = cast("Callable[[str], Any]", connection.execute)
        execute(SCHEMA)
        with ReplicationConnection(dsn) as replication:
            replication.create_slot(SLOT)
        work = list(steps(self.changes, self.result.seed))
        done = 0
        with self.phase("make changes", sum(len(step.statements) for step in work)) as phase:
            for step in work:
                for statement in step.statements:
                    execute(statement)
                    done += 1
                    self.progress.advance(done, step.title)
        self.made = Span("make", "", phase.start, phase.end, 0)
        self.result.spans.append(self.made)
        return pf.parse_lsn(execute("SELECT pg_current_wal_insert_lsn()").fetchone()[0])

    def capture(self, dsn: str, segments: Path, until: int) -> None:
        from pgoutput_fast.replication import CaptureProgress, capture

        result = self.result
        sampled = (self.now(), 0)

        def sample(captured: CaptureProgress) -> None:
            nonlocal sampled
            self.progress.advance(captured.frames)
            now = self.now()
            if now - sampled[0] >= _SAMPLE_SECONDS:
                result.spans.append(
                    Span("capture", "", sampled[0], now, captured.frames - sampled[1])
                )
                sampled = (now, captured.frames)

        with self.phase("capture") as phase:
            captured = capture(
                dsn,
                slot=SLOT,
                publications=[PUBLICATION],
                directory=segments,
                adopt_slot=True,
                until_lsn=until,
                progress=sample,
            )
        result.capture_seconds = phase.end - phase.start
        result.frames, result.transactions = captured.frames, captured.transactions
        result.frame_bytes = captured.bytes
        files = list(segments.glob("*.arrow"))
        result.segments = len(files)
        result.segment_bytes = sum(file.stat().st_size for file in files)

    def copy(self, connection: psycopg.Connection[Any]) -> None:
        from .verify import copy_table

        copies = self.directory / "copies"
        copies.mkdir()
        with self.phase("COPY", len(self.result.tables)):
            for n, table in enumerate(self.result.tables, 1):
                copy = copies / f"{table.name}.csv"
                table.rows, self.family_of[table.name] = copy_table(connection, table.name, copy)
                self.progress.advance(n, table.name)

    # Spark's part

    def in_spark(self, spark: SparkSession) -> None:
        from py4j.protocol import Py4JError  # type: ignore[import-untyped]
        from pyspark.errors import PySparkException

        try:
            self.each_table("decode into change tables", "decode", spark, self.write_changes)
            self.made.amount = self.result.changes = sum(t.changes for t in self.result.tables)
            if self.result.changes < self.changes:
                raise PgOutputError(
                    f"{self.result.changes} changes came of the {self.changes} at least that the "
                    "server was to make"
                )
            self.each_table("make current-state tables", "state", spark, self.write_state)
            self.each_table("compare with the server", "compare", spark, self.compare)
        except (PySparkException, Py4JError) as error:
            raise PgOutputError(
                f"Spark failed: {_reason(error)}; its log is {self.directory / 'spark.log'}"
            ) from error

    def each_table(
        self,
        title: str,
        stage: str,
        spark: SparkSession,
        work: Callable[[SparkSession, TableResult], int],
    ) -> None:
        tables = self.result.tables
        with self.phase(title, len(tables)):
            for n, table in enumerate(tables, 1):
                start = self.now()
                compiled = table.changes >= _FEW_CHANGES
                spark.conf.set("spark.sql.codegen.wholeStage", str(compiled).lower())
                spark.conf.set(
                    "spark.sql.codegen.factoryMode", "FALLBACK" if compiled else "NO_CODEGEN"
                )
                amount = work(spark, table)
                span = Span(stage, table.name, start, self.now(), amount)
                self.result.spans.append(span)
                setattr(table, f"{stage}_seconds", span.end - span.start)
                self.progress.advance(n, table.name)

    def write_changes(self, spark: SparkSession, table: TableResult) -> int:
        from pyspark.sql import types as T  # noqa: N812 - its usual name

        from pgoutput_fast.spark import read_segments

        path = self.directory / "changes" / table.name
        segments = self.directory / "segments"
        changes = read_segments(spark, segments, table.name, registry=self.registry)
        if wanted := SPARK_TYPES.get(table.name):
            row = cast("T.StructType", changes.schema["after"].dataType)
            schema = T.StructType(
                [
                    T.StructField(
                        field.name,
                        T.DataType.fromDDL(wanted[field.name])
                        if field.name in wanted
                        else field.dataType,
                    )
                    for field in row
                ]
            )
            changes = read_segments(spark, segments, table.name, schema, registry=self.registry)
        changes.write.parquet(str(path))
        table.change_bytes = _size(path)
        counts = spark.read.parquet(str(path)).groupBy("op").count().collect()
        table.operations = {row.op: row["count"] for row in counts}
        table.changes = sum(table.operations.values())
        return table.changes

    def write_state(self, spark: SparkSession, table: TableResult) -> int:
        from pgoutput_fast.spark import current_state

        changes = spark.read.parquet(str(self.directory / "changes" / table.name))
        path = self.directory / "state" / table.name
        state = current_state(changes, self.catalog.table(table.name), registry=self.registry)
        state.write.parquet(str(path))
        table.state_bytes = _size(path)
        return table.changes

    def compare(self, spark: SparkSession, table: TableResult) -> int:
        from .verify import compare, server_rows

        copies = self.directory / "copies"
        state = spark.read.parquet(str(self.directory / "state" / table.name))
        csv, parquet = (copies / f"{table.name}.{kind}" for kind in ("csv", "parquet"))
        server = server_rows(spark, csv, parquet, state.schema)
        key = list(self.catalog.table(table.name).primary_key)
        comparison = compare(table.name, server, state, key)
        if comparison.rows != table.rows:
            raise PgOutputError(
                f"{table.name}: {comparison.rows} rows were read from the {table.rows} of the COPY"
            )
        table.checks, table.differing = comparison.checks, comparison.differing
        table.difference = comparison.first
        for column, family in self.family_of[table.name].items():
            entry = table.families.setdefault(family, Family())
            entry.columns += 1
            entry.values += comparison.values[column]
            entry.nulls += comparison.checks // len(comparison.values) - comparison.values[column]
        return table.rows


def _reason(error: Exception) -> str:
    """The sentence in an exception of Spark's that says what is wrong, without the tracebacks."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - a Java exception asks the JVM, which may be gone
        return type(error).__name__
    own = re.findall(r"^pgoutput_fast\.\w+: (.*)$", text, re.MULTILINE)
    return own[-1] if own else text.strip().split("\n")[0]


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*.parquet"))
