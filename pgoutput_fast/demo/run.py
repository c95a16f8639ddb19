"""The run of the demonstration: a server under load, the sync that follows it, and the proof."""

from __future__ import annotations

import contextlib
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

from .driver import Driver, reason
from .workload import PUBLICATION, TABLES, Workload, WorkloadStep

if TYPE_CHECKING:
    import psycopg

    from pgoutput_fast.verify import Report

_PGBENCH_RATE = 250
"""Transactions a second: as many as two cores do beside everything else."""
_PAUSES = {"spark": 1.0, "local": 0.3}  # seconds between two steps of the live load
_BEFORE_KILL = 0.7  # seconds after a large change at which the kill comes in the middle of its work
_READY = 120.0  # seconds that Spark may take to start, and the snapshot to be written
_CAUGHT_UP = 300.0  # seconds that a backlog may take


@dataclass
class TableRun:
    """What is known of one table at the end.

    Attributes
    ----------
    rows : int
        Of the server, with which the target's rows were compared.
    state, why : str
        What the comparison says.
    changes, doubled : int
        Rows of the change table; those that are there more than once, by commit and number.
    """

    name: str
    about: str
    rows: int = 0
    state: str = "not compared"
    why: str = ""
    changes: int = 0
    doubled: int = 0


@dataclass
class Result:
    """The results of a run.

    Attributes
    ----------
    writer : str
        What writes the tables, with its version.
    seconds : float
        Of the whole run.
    caught_up_seconds : float
        From the restart until the tables had all that had been committed meanwhile.
    backlog : int
        Changes that were made while nobody read.
    marks : list of (float, str)
        What happened to tables or processes, at which second of the run.
    lags : list of (float, float or None)
        By how many seconds the tables were behind, at which second of the run; None: unknown.
    exit_code : int
        That of `verify`: 0 if and only if every table equals the server's.
    """

    server_version: str = ""
    writer: str = ""
    seconds: float = 0.0
    caught_up_seconds: float = 0.0
    backlog: int = 0
    tables: list[TableRun] = field(default_factory=list)
    marks: list[tuple[float, str]] = field(default_factory=list)
    lags: list[tuple[float, float | None]] = field(default_factory=list)
    exit_code: int = 2

    @property
    def changes(self) -> int:
        """Rows of all change tables."""
        return sum(table.changes for table in self.tables)

    @property
    def doubled(self) -> int:
        """Changes that a change table has more than once."""
        return sum(table.doubled for table in self.tables)

    @property
    def is_right(self) -> bool:
        """Whether all tables equal the server's, and no change is there twice."""
        return self.exit_code == 0 and not self.doubled

    @property
    def versions(self) -> str:
        """What ran, as a line."""
        why = f" ({pf.FALLBACK_REASON})" if pf.FALLBACK_REASON else ""
        return f"PostgreSQL {self.server_version}, {self.writer}, decoder {pf.IMPLEMENTATION}{why}"

    @property
    def verdict(self) -> str:
        """What came of the comparison, as a sentence."""
        for one in self.tables:
            if one.state != "equal":
                return f"Not proved: {one.name} is {one.state}{one.why and f' ({one.why})'}."
        if self.doubled:
            return f"Not exactly once: {self.doubled:,} changes are in a change table twice."
        return (
            f"All {len(self.tables)} tables equal the server's, and each of {self.changes:,} "
            "changes is there exactly once."
        )


class DemoProgress:
    """Receives how far a run has come. This class does nothing; subclasses show it."""

    def phase(self, name: str) -> None:
        """Begin a phase."""

    def note(self, text: str) -> None:
        """Say what is being done now."""

    def mark(self, text: str) -> None:
        """Tell of something that has happened."""


def run(
    changes: int,
    *,
    directory: Path,
    engine: str = "spark",
    progress: DemoProgress | None = None,
) -> Result:
    """Run the demonstration.

    Parameters
    ----------
    changes : int
        About how many changes the demonstration's own tables get.
    directory : path
        An empty directory. It gets ``segments``, ``sync.log``, and ``tables`` (Delta) or
        ``tables.duckdb``.
    engine : {'spark', 'local'}
        Spark writes Delta tables; without Spark, the tables are in DuckDB.
    progress : DemoProgress, optional
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
    return _Demonstration(changes, directory, engine, progress or DemoProgress()).run()


class _Demonstration:
    def __init__(self, changes: int, directory: Path, engine: str, progress: DemoProgress) -> None:
        self.directory = directory
        self.engine = engine
        self.pause = _PAUSES[engine]
        path = directory / ("tables" if engine == "spark" else "tables.duckdb")
        self.target = str(path) if engine == "spark" else f"duckdb:{path}"
        self.progress = progress
        self.work = Workload(changes)
        self.begun = time.perf_counter()
        self.result = Result(tables=[TableRun(name, about) for name, about in TABLES.items()])

    def run(self) -> Result:
        # These imports come first, so that a missing extra is reported before the server starts.
        try:
            import duckdb
            import psycopg

            self.result.writer = f"DuckDB {duckdb.__version__}"
            if self.engine == "spark":
                import deltalake  # noqa: F401
                import pyspark

                self.result.writer = f"Spark {pyspark.__version__}"
        except ImportError as error:
            extra = "demo" if self.engine == "spark" else "demo-local"
            raise PgOutputError(
                f"the demo needs a package: {error}",
                code="missing_package",
                hint=f"Install the extra pgoutput-fast[{extra}]",
            ) from error
        from pgoutput_fast.embedded import EmbeddedServer, find_server_bindir

        self.bindir = find_server_bindir(18)
        with contextlib.ExitStack() as stack:
            self.progress.phase("start PostgreSQL")
            self.dsn = stack.enter_context(EmbeddedServer(version=18)).dsn()
            temporary = stack.enter_context(tempfile.TemporaryDirectory(prefix="pgoutput-fast-"))
            self.temporary = Path(temporary)
            try:
                connection = stack.enter_context(psycopg.connect(self.dsn, autocommit=True))
                self.in_database(connection)
            except psycopg.Error as error:
                raise PgOutputError(
                    f"the embedded server refused: {error}", code="server_refused"
                ) from error
        self.result.seconds = self.now()
        return self.result

    def in_database(self, connection: psycopg.Connection[Any]) -> None:
        self.result.server_version = connection.info.parameter_status("server_version") or ""
        # psycopg's types ask for literal strings. The statements are this package's own.
        self.execute = cast("Callable[[str], Any]", connection.execute)
        self.progress.phase("make tables and their first rows")
        with self.pgbench("-i", "-q", "-s", str(self.work.scale)) as process:
            _, said = process.communicate()
        if process.returncode:
            raise PgOutputError(f"pgbench failed: {reason(said)}", code="process_failed")
        for step in self.work.first:
            self.do(step)
        self.follow()
        self.prove()

    def now(self) -> float:
        """Seconds since the run began."""
        return time.perf_counter() - self.begun

    def mark(self, text: str) -> None:
        self.result.marks.append((self.now(), text))
        self.progress.mark(text)

    # --- the server's load -----------------------------------------------------------------------

    def do(self, step: WorkloadStep) -> None:
        self.progress.note(step.title)
        for statement in step.statements():
            self.execute(statement)

    @contextlib.contextmanager
    def pgbench(self, *arguments: str) -> Iterator[subprocess.Popen[str]]:
        """Run the program, for as long as the block takes at most."""
        try:
            process = subprocess.Popen(
                [self.bindir / "pgbench", *arguments, "-d", self.dsn],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                text=True, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise PgOutputError(f"can't run pgbench: {error}", code="io_failed") from error
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    def changed(self) -> int:
        """Rows that were inserted, updated and deleted in published tables until now."""
        self.execute("SELECT pg_stat_force_next_flush()")
        row = self.execute(
            "SELECT sum(n_tup_ins + n_tup_upd + n_tup_del)::bigint "
            "FROM pg_stat_user_tables WHERE schemaname = 'demo' OR relname LIKE 'pgbench%'"
        ).fetchone()
        return int(row[0])

    # --- the sync --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def driver(self) -> Iterator[Driver]:
        """A run of the sync, which has ended behind the block."""
        driver = Driver(
            self.dsn, self.engine, self.target, self.directory, self.temporary, self.take
        )
        try:
            yield driver
        finally:
            driver.kill()

    def take(self, line: dict[str, Any]) -> None:
        """Take a line of the log of a sync."""
        if line.get("event") == "table" and not str(line["message"]).endswith(" is new"):
            self.mark(str(line["message"]))
        if line.get("event") in ("progress", "stop"):
            lag = line["lag_seconds"]
            self.result.lags.append((self.now(), lag))
            behind = "" if lag is None else f", {lag:.1f} s behind"
            self.progress.note(f"{line['changes']:,} changes in the tables{behind}")

    def follow(self) -> None:
        """Have tables follow the server, through a kill in the middle."""
        with self.pgbench("-n", "-c", "2", "-T", "3600", "-R", str(_PGBENCH_RATE)) as load:
            with self.driver() as driver:
                self.progress.phase("start the sync, copy the tables")
                driver.wait_until(
                    lambda: driver.tables >= TABLES.keys() and not driver.waiting, _READY,
                    "expected the snapshot to be in the tables",
                )  # fmt: skip
                self.progress.phase("live load, followed")
                for step in self.work.live:
                    self.do(step)
                    if step.title in ("truncate", "new columns"):
                        self.mark(step.title)
                    time.sleep(self.pause)
                    driver.check()
                self.execute("UPDATE demo.accounts SET branch = branch + 1")
                time.sleep(_BEFORE_KILL)
            self.mark("kill -9 of the sync")
            self.progress.phase("changes without a sync")
            before = self.changed()
            self.do(self.work.backlog)
            self.result.backlog = self.changed() - before
            self.mark(f"the sync is started again; {self.result.backlog:,} changes wait")
            self.progress.phase("start again, catch up")
            with self.driver() as driver:
                begin = self.now()
                self.catch_up(driver)
                self.result.caught_up_seconds = self.now() - begin
                self.mark("the tables have caught up")
                time.sleep(2 * self.pause)
                if load.poll() is not None:
                    raise PgOutputError(
                        f"pgbench ended by itself: {reason(load.communicate()[1])}",
                        code="process_failed",
                    )
                load.send_signal(signal.SIGTERM)
                load.wait()
                self.catch_up(driver)
                driver.stop()

    def catch_up(self, driver: Driver) -> None:
        """Wait until the tables have what the server has now."""
        end = pf.parse_lsn(self.execute("SELECT pg_current_wal_insert_lsn()").fetchone()[0])
        driver.wait_until(lambda: driver.has(end), _CAUGHT_UP, "expected the tables to catch up")

    # --- the proof -------------------------------------------------------------------------------

    def prove(self) -> None:
        from pgoutput_fast.verify import verify

        self.progress.phase("verify: every row, with the server's")
        report = verify(
            self.dsn, publications=[PUBLICATION], target=self.target,
            segments=str(self.directory / "segments"),
            progress=lambda told: self.progress.note(f"{told.doing} {told.table}"),
        )  # fmt: skip
        self.take_report(report)
        self.progress.phase("count changes")
        for table in self.result.tables:
            table.changes, table.doubled = changes_of(self.target, table.name)

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


def changes_of(target: str, name: str) -> tuple[int, int]:
    """Count the rows of a change table, and those that are there twice.

    A row of a snapshot has the LSN of the snapshot, and a truncate has no number of its own.
    """
    import duckdb

    file = target.removeprefix("duckdb:")
    own = "FILTER (op NOT IN ('read', 'truncate'))"
    counts = f"count(*), count(*) {own} - count(DISTINCT (commit_lsn, seq)) {own}"
    with duckdb.connect(":memory:" if file == target else file, read_only=file != target) as found:
        if file != target:
            rows = found.sql(f'FROM changes."{name}"')
        else:
            from deltalake import DeltaTable

            files = DeltaTable(str(Path(target, "changes", name))).file_uris()
            if not files:
                return 0, 0
            rows = found.read_parquet(files)
        ((count, doubled),) = rows.aggregate(counts).fetchall()
    return count, doubled
