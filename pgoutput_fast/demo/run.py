"""Run the demo: start a server under load, sync its tables through a kill, and compare them."""

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
"""Transactions per second: as many as two cores manage beside everything else."""
_PAUSES = {"spark": 1.0, "local": 0.3}  # seconds between two steps of the live load
_BEFORE_KILL = 0.7  # seconds after a large change; the kill then comes in the middle of its work
_READY = 120.0  # seconds within which Spark must start and the snapshot must be written
_CAUGHT_UP = 300.0  # seconds within which the sync must catch up


@dataclass
class TableRun:
    """The results for one table.

    Attributes
    ----------
    rows : int
        The server's rows, with which the target's rows were compared.
    state, why : str
        The result of the comparison.
    changes, doubled : int
        The rows of the change table, and the surplus rows with another row's commit LSN and seq.
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
        The program that writes the tables, with its version.
    seconds : float
        The duration of the whole run.
    caught_up_seconds : float
        The time from the restart until the tables had all commits made before it.
    backlog : int
        Changes that were made while no sync was running.
    events : list of (float, str)
        Events of tables and processes, with the second of the run.
    lags : list of (float, float or None)
        The lag of the tables in seconds, after the second of the run; None: unknown.
    exit_code : int
        The exit code of `verify`: 0 if and only if every table equals the server's.
    """

    server_version: str = ""
    writer: str = ""
    seconds: float = 0.0
    caught_up_seconds: float = 0.0
    backlog: int = 0
    tables: list[TableRun] = field(default_factory=list)
    events: list[tuple[float, str]] = field(default_factory=list)
    lags: list[tuple[float, float | None]] = field(default_factory=list)
    exit_code: int = 2

    @property
    def changes(self) -> int:
        """The number of rows in all change tables."""
        return sum(table.changes for table in self.tables)

    @property
    def doubled(self) -> int:
        """The number of changes that a change table has more than once."""
        return sum(table.doubled for table in self.tables)

    @property
    def is_right(self) -> bool:
        """Whether all tables equal the server's, and no change is there twice."""
        return self.exit_code == 0 and not self.doubled

    @property
    def versions(self) -> str:
        """The versions of the programs, as a line."""
        why = f" ({pf.FALLBACK_REASON})" if pf.FALLBACK_REASON else ""
        return f"PostgreSQL {self.server_version}, {self.writer}, decoder {pf.IMPLEMENTATION}{why}"

    @property
    def verdict(self) -> str:
        """The result of the comparison, as a sentence."""
        for table in self.tables:
            if table.state != "equal":
                return (
                    f"Not proved: {table.name} is {table.state}{table.why and f' ({table.why})'}."
                )
        if self.doubled:
            return f"Not exactly once: {self.doubled:,} changes are in a change table twice."
        return (
            f"All {len(self.tables)} tables equal the server's, and each of {self.changes:,} "
            "changes is there exactly once."
        )


class DemoProgress:
    """Receives the progress of a run. This class does nothing; subclasses show the progress."""

    def phase(self, name: str) -> None:
        """Begin a phase."""

    def note(self, text: str) -> None:
        """Report the present step."""

    def event(self, text: str) -> None:
        """Report an event."""


def run(
    changes: int,
    *,
    directory: Path,
    engine: str = "spark",
    progress: DemoProgress | None = None,
) -> Result:
    """Run the demo.

    Parameters
    ----------
    changes : int
        The approximate number of changes to the demo's own tables.
    directory : path
        An empty directory. It gets ``segments``, ``sync.log``, and ``tables`` (Delta) or
        ``tables.duckdb``.
    engine : {'spark', 'local'}
        "spark" writes Delta tables, "local" writes DuckDB tables.
    progress : DemoProgress, optional
        Receives the progress of the run.

    Returns
    -------
    Result
        Its `is_right` says whether every table equals the server's.

    Raises
    ------
    PgOutputError
        Something other than a difference went wrong. All started processes have ended.
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
        self.start_time = time.perf_counter()
        self.result = Result(tables=[TableRun(name, about) for name, about in TABLES.items()])

    def run(self) -> Result:
        # Import first, so that a missing extra is reported before the server starts.
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
                    f"the embedded PostgreSQL server reported an error: {error}",
                    code="server_refused",
                ) from error
        self.result.seconds = self.now()
        return self.result

    def in_database(self, connection: psycopg.Connection[Any]) -> None:
        self.result.server_version = connection.info.parameter_status("server_version") or ""
        # psycopg's types accept only literal strings. All statements are this package's own.
        self.execute = cast("Callable[[str], Any]", connection.execute)
        self.progress.phase("create the tables and their first rows")
        with self.pgbench("-i", "-q", "-s", str(self.work.scale)) as process:
            _, said = process.communicate()
        if process.returncode:
            raise PgOutputError(f"pgbench failed: {reason(said)}", code="process_failed")
        for step in self.work.first:
            self.do(step)
        self.follow()
        self.prove()

    def now(self) -> float:
        """Return the seconds since the run began."""
        return time.perf_counter() - self.start_time

    def event(self, text: str) -> None:
        self.result.events.append((self.now(), text))
        self.progress.event(text)

    # --- the server's load -----------------------------------------------------------------------

    def do(self, step: WorkloadStep) -> None:
        self.progress.note(step.title)
        for statement in step.statements():
            self.execute(statement)

    @contextlib.contextmanager
    def pgbench(self, *arguments: str) -> Iterator[subprocess.Popen[str]]:
        """Start pgbench, and kill it at the end of the block."""
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
        """Return the number of rows inserted, updated and deleted in published tables until now."""
        self.execute("SELECT pg_stat_force_next_flush()")
        row = self.execute(
            "SELECT sum(n_tup_ins + n_tup_upd + n_tup_del)::bigint "
            "FROM pg_stat_user_tables WHERE schemaname = 'demo' OR relname LIKE 'pgbench%'"
        ).fetchone()
        return int(row[0])

    # --- the sync --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def driver(self) -> Iterator[Driver]:
        """Start a run of the sync, and kill it at the end of the block."""
        driver = Driver(
            self.dsn, self.engine, self.target, self.directory, self.temporary, self.take
        )
        try:
            yield driver
        finally:
            driver.kill()

    def take(self, line: dict[str, Any]) -> None:
        """Process a line of a sync's log."""
        if line.get("event") == "table" and not str(line["message"]).endswith(" is new"):
            self.event(str(line["message"]))
        if line.get("event") in ("progress", "stop"):
            lag = line["lag_seconds"]
            self.result.lags.append((self.now(), lag))
            behind = "" if lag is None else f", {lag:.1f} s behind"
            self.progress.note(f"{line['changes']:,} changes in the tables{behind}")

    def follow(self) -> None:
        """Sync the tables, with a kill in the middle."""
        with self.pgbench("-n", "-c", "2", "-T", "3600", "-R", str(_PGBENCH_RATE)) as load:
            with self.driver() as driver:
                self.progress.phase("start the sync, load the snapshots")
                driver.wait_until(
                    lambda: driver.tables >= TABLES.keys() and not driver.waiting, _READY,
                    "the tables did not get their snapshots",
                )  # fmt: skip
                self.progress.phase("live load, with the sync")
                for step in self.work.live:
                    self.do(step)
                    if step.title in ("truncate", "new columns"):
                        self.event(step.title)
                    time.sleep(self.pause)
                    driver.check()
                self.execute("UPDATE demo.accounts SET branch = branch + 1")
                time.sleep(_BEFORE_KILL)
            self.event("kill -9 of the sync")
            self.progress.phase("changes without the sync")
            before = self.changed()
            self.do(self.work.backlog)
            self.result.backlog = self.changed() - before
            self.event(f"the sync is started again; {self.result.backlog:,} changes wait")
            self.progress.phase("start again, catch up with the server")
            with self.driver() as driver:
                begin = self.now()
                self.catch_up(driver)
                self.result.caught_up_seconds = self.now() - begin
                self.event("the tables have caught up")
                time.sleep(2 * self.pause)
                if load.poll() is not None:
                    raise PgOutputError(
                        f"pgbench ended too early: {reason(load.communicate()[1])}",
                        code="process_failed",
                    )
                load.send_signal(signal.SIGTERM)
                load.wait()
                self.catch_up(driver)
                driver.stop()

    def catch_up(self, driver: Driver) -> None:
        """Wait until the tables have all present commits of the server."""
        end = pf.parse_lsn(self.execute("SELECT pg_current_wal_insert_lsn()").fetchone()[0])
        driver.wait_until(lambda: driver.has(end), _CAUGHT_UP, "the tables did not catch up")

    # --- the proof -------------------------------------------------------------------------------

    def prove(self) -> None:
        from pgoutput_fast.verify import verify

        self.progress.phase("verify: compare every row with the server")
        report = verify(
            self.dsn, publications=[PUBLICATION], target=self.target,
            segments=str(self.directory / "segments"),
            progress=lambda step: self.progress.note(f"{step.doing} {step.table}"),
        )  # fmt: skip
        self.take_report(report)
        self.progress.phase("count changes")
        for table in self.result.tables:
            table.changes, table.doubled = changes_of(self.target, table.name)

    def take_report(self, report: Report) -> None:
        self.result.exit_code = report.exit_code
        table_results = {
            f"{table_result.namespace}.{table_result.name}": table_result
            for table_result in report.tables
        }
        for table in self.result.tables:
            table_result = table_results.get(table.name)
            if table_result is None:
                self.result.exit_code = self.result.exit_code or 2
                continue
            table.rows, table.state, table.why = (
                table_result.rows,
                table_result.state,
                table_result.why,
            )
            for difference in table_result.differences[:1]:
                table.why = json.dumps({"key": difference.key, "columns": difference.columns})


def changes_of(target: str, name: str) -> tuple[int, int]:
    """Count the rows of a change table, and the changes that it has more than once.

    Snapshot rows and truncates are not checked for doubles: their commit LSN and seq are not
    unique.
    """
    import duckdb

    file = target.removeprefix("duckdb:")
    own = "FILTER (op NOT IN ('read', 'truncate'))"
    counts = f"count(*), count(*) {own} - count(DISTINCT (commit_lsn, seq)) {own}"
    with duckdb.connect(
        ":memory:" if file == target else file, read_only=file != target
    ) as connection:
        if file != target:
            rows = connection.sql(f'FROM changes."{name}"')
        else:
            from deltalake import DeltaTable

            files = DeltaTable(str(Path(target, "changes", name))).file_uris()
            if not files:
                return 0, 0
            rows = connection.read_parquet(files)
        ((count, doubled),) = rows.aggregate(counts).fetchall()
    return count, doubled
