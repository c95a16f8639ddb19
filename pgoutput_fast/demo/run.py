"""The run of the demonstration: a server under load, the sync that follows it, and the proof."""

from __future__ import annotations

import contextlib
import itertools
import json
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pgoutput_fast as pf
from pgoutput_fast.errors import PgOutputError

from .contents import Contents, Family, contents_of, families_of
from .driver import Driver, reason
from .workload import NOT_COMPARED, PGBENCH, PUBLICATION, SCHEMA, TABLES, Step, Workload

if TYPE_CHECKING:
    import psycopg

    from pgoutput_fast.verify import Report, VerifyProgress

_PGBENCH_RATE = 250
"""Transactions a second: as many as two cores do beside everything else."""
_PAUSE = 1.0  # seconds between two steps of the live load
_BEFORE_KILL = 0.7  # seconds after a large change at which the kill comes in the middle of its work
_READY = 120.0  # seconds that Spark may take to start, and the snapshot to be written
_CAUGHT_UP = 300.0  # seconds that a backlog may take


@dataclass
class TableRun:
    """What is known of one table at the end."""

    name: str
    about: str
    rows: int = 0
    """Of the server, with which the target's rows were compared."""
    state: str = "not compared"
    why: str = ""
    contents: Contents = field(default_factory=Contents)


@dataclass
class Phase:
    """A phase of the run; `start` and `end` are seconds since the start of the run."""

    name: str
    start: float
    end: float = 0.0


@dataclass
class Mark:
    """Something that happened to the tables or the processes, at a second of the run."""

    at: float
    text: str


@dataclass
class Sample:
    """What the sync said at a second of the run.

    Attributes
    ----------
    at : float
    run : int
        Which run of the sync said it, from 0; the others count from the start of that run.
    changes, captured : int
        Changes in the tables, and in segments.
    lag_bytes, lag_seconds : float or None
        How far the tables are behind; None where that is not known.
    """

    at: float
    run: int
    changes: int
    captured: int
    lag_bytes: float | None
    lag_seconds: float | None


@dataclass
class Rates:
    """Changes for each second."""

    capture: float = 0.0
    """From the server into segments, while the backlog was worked off."""
    decode: float = 0.0
    """From segments to Arrow columns, by one thread with nothing else to do."""
    change_tables: float = 0.0
    """From segments into change tables, decoding included, in the largest window."""
    state_tables: float = 0.0
    """From change tables into state tables, in the same window."""


@dataclass
class Result:
    """The results of a run."""

    implementation: str
    fallback_reason: str | None
    seed: int
    server_version: str = ""
    spark_version: str = ""
    seconds: float = 0.0
    caught_up_seconds: float = 0.0
    """From the restart until the tables had all that had been committed meanwhile."""
    backlog: int = 0
    """Changes that were made while nobody read."""
    transactions: int = 0
    rates: Rates = field(default_factory=Rates)
    tables: list[TableRun] = field(default_factory=list)
    families: dict[str, Family] = field(default_factory=dict)
    phases: list[Phase] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    exit_code: int = 2
    """That of `verify`: 0 if and only if every table equals the server's."""

    @property
    def changes(self) -> int:
        """Rows of all change tables."""
        return sum(table.contents.changes for table in self.tables)

    @property
    def doubled(self) -> int:
        """Changes that a change table has more than once."""
        return sum(table.contents.doubled for table in self.tables)

    @property
    def is_right(self) -> bool:
        """Whether all tables equal the server's, and no change is there twice."""
        return self.exit_code == 0 and not self.doubled

    @property
    def verdict(self) -> str:
        """What came of the comparison, as a sentence."""
        wrong = [table for table in self.tables if table.state != "equal"]
        if wrong:
            one = wrong[0]
            return f"Not proved: {one.name} is {one.state}{one.why and f' ({one.why})'}."
        if self.doubled:
            return f"Not exactly once: {self.doubled:,} changes are in a change table twice."
        return (
            f"All {len(self.tables)} tables equal the server's, and each of {self.changes:,} "
            f"changes is there exactly once. ({len(NOT_COMPARED)} columns of the types reg* and of "
            "pgvector were not compared.)"
        )


class Progress:
    """Receives how far a run has come. This class does nothing; subclasses show it."""

    def phase(self, name: str) -> None:
        """Begin a phase."""

    def note(self, text: str) -> None:
        """Say what is being done now."""

    def mark(self, text: str) -> None:
        """Tell of something that has happened."""


def run(
    changes: int, *, directory: Path, seed: int = 1, progress: Progress | None = None
) -> Result:
    """Run the demonstration.

    Parameters
    ----------
    changes : int
        About how many changes the demonstration's own tables get.
    directory : path
        An empty directory. ``segments``, ``tables`` (Delta) and ``sync.log`` are made in it.
    seed : int
        The seed of the workload's random numbers.
    progress : Progress, optional
        Is told how far the run has come.

    Returns
    -------
    Result
        Its `is_right` says whether every table equals the server's.

    Raises
    ------
    PgOutputError
        Something other than a difference went wrong. Whatever was started has ended.
    """
    return _Run(changes, directory, seed, progress or Progress()).run()


class _Run:
    def __init__(self, changes: int, directory: Path, seed: int, progress: Progress) -> None:
        self.directory = directory
        self.progress = progress
        self.work = Workload(changes, seed)
        self.begun = time.perf_counter()
        self.runs = -1
        self.stages = [(0, 0.0, 0.0)]
        """Of the present run of the sync, each time that it told: the changes until then, and the
        seconds that were spent on change tables and on state tables."""
        self.result = Result(
            pf.IMPLEMENTATION, pf.FALLBACK_REASON, seed,
            tables=[TableRun(*table) for table in TABLES],
        )  # fmt: skip

    def run(self) -> Result:
        # These imports come first, so that a missing extra is reported before the server starts.
        try:
            import deltalake  # noqa: F401
            import duckdb  # noqa: F401
            import psycopg
        except ImportError as error:
            raise PgOutputError(
                f"a package is missing ({error}); install the extra pgoutput-fast[demo]"
            ) from error
        import pgoutput_fast.replication
        import pgoutput_fast.spark  # noqa: F401
        from pgoutput_fast.embedded import EmbeddedServer, find_server_bindir

        self.bindir = find_server_bindir(18)
        with contextlib.ExitStack() as stack:
            with self.phase("start PostgreSQL"):
                server = stack.enter_context(EmbeddedServer(version=18))
            self.dsn = server.dsn()
            temporary = stack.enter_context(tempfile.TemporaryDirectory(prefix="pgoutput-fast-"))
            self.temporary = Path(temporary)
            try:
                connection = stack.enter_context(psycopg.connect(self.dsn, autocommit=True))
                self.in_database(connection)
            except psycopg.Error as error:
                raise PgOutputError(f"the embedded server refused: {error}") from error
        self.result.seconds = self.now()
        return self.result

    def in_database(self, connection: psycopg.Connection[Any]) -> None:
        self.result.server_version = connection.info.parameter_status("server_version") or ""
        self.result.spark_version = _spark_version()
        # psycopg's types ask for literal strings. The statements are this package's own.
        self.execute = cast("Callable[[str], Any]", connection.execute)
        self.make_tables()
        self.follow()
        self.prove(connection)

    # --- the clock -------------------------------------------------------------------------------

    def now(self) -> float:
        """Seconds since the run began."""
        return time.perf_counter() - self.begun

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[Phase]:
        self.progress.phase(name)
        phase = Phase(name, self.now())
        self.result.phases.append(phase)
        yield phase
        phase.end = self.now()

    def mark(self, text: str) -> None:
        self.result.marks.append(Mark(self.now(), text))
        self.progress.mark(text)

    # --- the server's load -----------------------------------------------------------------------

    def make_tables(self) -> None:
        with self.phase("make tables and their first rows"):
            self.pgbench("-i", "-q", "-s", str(self.work.scale))
            self.execute(SCHEMA)
            self.execute(PGBENCH)
            for step in self.work.first:
                self.do(step)

    def do(self, step: Step) -> None:
        self.progress.note(step.title)
        for statement in step.statements:
            self.execute(statement)

    def pgbench(self, *arguments: str) -> None:
        """Run the program, and wait for its end."""
        with self.running_pgbench(*arguments) as process:
            _, said = process.communicate()
        if process.returncode:
            raise PgOutputError(f"pgbench failed: {reason(said)}")

    @contextlib.contextmanager
    def running_pgbench(self, *arguments: str) -> Iterator[subprocess.Popen[str]]:
        """Run the program, for as long as the block takes."""
        try:
            process = subprocess.Popen(
                [self.bindir / "pgbench", *arguments, "-d", self.dsn],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                text=True, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise PgOutputError(f"can't run pgbench: {error}") from error
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    def lsn(self) -> int:
        """Where the server's log is."""
        return pf.parse_lsn(self.execute("SELECT pg_current_wal_insert_lsn()").fetchone()[0])

    # --- the sync --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def driver(self) -> Iterator[Driver]:
        """A run of the sync, which has ended behind the block."""
        self.runs += 1
        number = self.runs
        self.stages = [(0, 0.0, 0.0)]

        def take(line: dict[str, Any]) -> None:
            self.take(number, line)

        driver = Driver(self.dsn, self.directory, self.temporary, take)
        try:
            yield driver
        finally:
            driver.kill()

    def take(self, run: int, line: dict[str, Any]) -> None:
        """Take a line of the log of a sync."""
        if line.get("event") == "table" and not str(line["message"]).endswith(" is new"):
            self.mark(str(line["message"]))
        if line.get("event") not in ("progress", "stop"):
            return
        captured = (line.get("capture") or {}).get("changes", 0)
        self.result.samples.append(
            Sample(
                self.now(), run, line["changes"], captured, line["lag_bytes"], line["lag_seconds"]
            )
        )
        self.stages.append((line["changes"], line["change_seconds"], line["state_seconds"]))
        lag = "" if line["lag_seconds"] is None else f", {line['lag_seconds']:.1f} s behind"
        rate = f", {line['changes_per_second']:,.0f}/s" if "changes_per_second" in line else ""
        self.progress.note(f"{line['changes']:,} changes in the tables{rate}{lag}")

    def follow(self) -> None:
        """Have tables follow the server, through a kill in the middle."""
        names = {table.name for table in self.result.tables}
        with self.running_pgbench("-n", "-c", "2", "-T", "3600", "-R", str(_PGBENCH_RATE)) as load:
            with self.driver() as driver:
                with self.phase("start Spark, snapshot into tables"):
                    driver.wait_until(
                        lambda: driver.tables >= names and not driver.waiting, _READY,
                        "expected the snapshot to be in the tables",
                    )  # fmt: skip
                with self.phase("live load, followed"):
                    for step in self.work.live:
                        self.do(step)
                        if step.title in ("truncate", "new columns"):
                            self.mark(step.title)
                        time.sleep(_PAUSE)
                        driver.check()
                    self.execute("UPDATE demo.accounts SET branch = branch + 1")
                    time.sleep(_BEFORE_KILL)
            self.mark("kill -9 of the driver, with Spark's JVM")
            with self.phase("nobody reads"):
                before = self.changed()
                for step in self.work.backlog:
                    self.do(step)
                self.result.backlog = self.changed() - before
            self.mark(f"the driver is started again; {self.result.backlog:,} changes wait")
            with self.phase("start again, catch up"), self.driver() as driver:
                begin = self.now()
                end = self.lsn()
                driver.wait_until(
                    lambda: driver.has(end), _CAUGHT_UP, "expected the tables to catch up"
                )
                self.result.caught_up_seconds = self.now() - begin
                self.mark("the tables have caught up")
                time.sleep(2 * _PAUSE)
                _end_load(load)
                end = self.lsn()
                driver.wait_until(
                    lambda: driver.has(end), _CAUGHT_UP, "expected the tables to follow"
                )
                driver.stop()
        self.take_rates()

    def changed(self) -> int:
        """Rows that were inserted, updated and deleted in published tables until now."""
        self.execute("SELECT pg_stat_force_next_flush()")
        row = self.execute(
            "SELECT sum(n_tup_ins + n_tup_upd + n_tup_del)::bigint "
            "FROM pg_stat_user_tables WHERE schemaname = 'demo' OR relname LIKE 'pgbench%'"
        ).fetchone()
        return int(row[0])

    def take_rates(self) -> None:
        """How fast the stages were."""
        rates = self.result.rates
        windows = [
            tuple(now - before for now, before in zip(other, one, strict=True))
            for one, other in itertools.pairwise(self.stages)
        ]
        changes, into_changes, into_states = max(windows)
        rates.change_tables = changes / into_changes if into_changes else 0.0
        rates.state_tables = changes / into_states if into_states else 0.0
        own = [one for one in self.result.samples if one.run == self.runs]
        begun = next((one for one in own if one.captured), None)
        done = next((one for one in own if one.captured >= 0.9 * self.result.backlog), None)
        if begun is not None and done is not None and done.at > begun.at:
            rates.capture = (done.captured - begun.captured) / (done.at - begun.at)

    # --- the proof -------------------------------------------------------------------------------

    def prove(self, connection: psycopg.Connection[Any]) -> None:
        from pgoutput_fast.verify import verify

        tables = self.directory / "tables"
        with self.phase("verify: every row, with the server's"):

            def tell(progress: VerifyProgress) -> None:
                self.progress.note(f"{progress.doing} {progress.table}")

            report = verify(
                self.dsn, publications=[PUBLICATION], target=str(tables),
                segments=str(self.directory / "segments"), exclude=NOT_COMPARED, progress=tell,
            )  # fmt: skip
            self.take_report(report)
        with self.phase("count changes, decode them once more"):
            for table in self.result.tables:
                table.contents = contents_of(tables, table.name)
            self.result.families = families_of(
                connection, [table.name for table in self.result.tables]
            )
            self.decode_again(connection)

    def take_report(self, report: Report) -> None:
        self.result.exit_code = report.exit_code
        found = {f"{one.namespace}.{one.name}": one for one in report.tables}
        for table in self.result.tables:
            one = found.get(table.name)
            if one is None:
                self.result.exit_code = self.result.exit_code or 2
                continue
            table.rows, table.state, table.why = one.rows, one.state, one.why
            for difference in one.differences[:1]:
                table.why = json.dumps({"key": difference.key, "columns": difference.columns})

    def decode_again(self, connection: psycopg.Connection[Any]) -> None:
        """Decode what was captured, to measure that alone."""
        from pgoutput_fast.segments import SegmentReader, list_segments

        decoder = pf.ColumnarDecoder(registry=pf.TypeRegistry.from_connection(connection))
        changes, seconds = 0, 0.0
        for segment in list_segments(self.directory / "segments"):
            with SegmentReader(segment.path) as reader:
                for batch in reader:
                    frames, lsns = batch.column("data"), batch.column("lsn").to_numpy()
                    begin = time.perf_counter()
                    for found in decoder.decode(frames, lsns=lsns):
                        changes += found.num_rows
                    seconds += time.perf_counter() - begin
        self.result.rates.decode = changes / seconds if seconds else 0.0


def _spark_version() -> str:
    import pyspark

    return str(pyspark.__version__)


def _end_load(load: subprocess.Popen[str]) -> None:
    """End the load that runs.

    Raises
    ------
    PgOutputError
        It has ended by itself.
    """
    if load.poll() is not None:
        _, said = load.communicate()
        raise PgOutputError(f"pgbench ended by itself: {reason(said)}")
    load.send_signal(signal.SIGTERM)
    load.wait()
