"""`pgoutput-fast sync`: keep tables up to date with a server, as a service or by hand."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..apply import sync
from ..apply.embedded_capture import DEFAULT_CAPTURE
from ..apply.options import SyncOptions, TargetOptions
from ..capture_options import CaptureOptions
from ..connections import ConnectionParameters
from ..errors import PgOutputError, RetryableError, counted
from ..html_page import write_page
from ..lsn import format_lsn
from ..watching.sync_figures import SyncLag
from ._dsn import dsn_of, publications_option, server_command
from ._options import chosen, options_from, text_by
from ._position import PositionWatch
from ._service import STATUS_INTERVAL, ServiceOptions, checked_until, serve
from ._spark_engine import SparkOptions, check_options, running_engine, spark_options
from ._sync_events import table_events
from ._sync_plan import SyncCall, call_of, print_plan
from ._sync_report import ReportedEvent, SyncReport, Written, make_report
from ._sync_views import SyncLiveView, SyncLogView, behind_text, sync_status

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..apply import SyncProgress
    from ..apply.syncing import Engine
    from ..replication.server_position import ServerPosition
    from ..watching.logs import RecordFormatter
    from ..watching.metrics import Collector
    from ..watching.sync_figures import SyncFigures
    from ._service import Service
    from ._sync_views import SyncView
    from ._systemd import Notifier

_REPORT_INTERVAL = 60.0  # seconds between two reports
_NOT_ALL = 3  # the exit code if tables are paused or stale at the end
_EVENTS = 1000  # the largest number of events in a report
_WINDOWS = 2000  # the largest number of windows in a report
_SWITCH_INTERVAL = 0.001  # seconds
# Threads that write tables hold the interpreter for this long while the capture's thread waits for
# it. With Python's default of 5 ms, the socket fills up meanwhile and the server waits. A backlog
# then came at 81 to 86 % of the rate of a capture alone; with 1 ms it comes at 90 %.

_OPTIONS = (SyncOptions, TargetOptions, CaptureOptions, SparkOptions, ServiceOptions)

_GROUPS = {
    "Server": "dsn dsn_file slot publications adopt_slot",
    "What to sync": "segments directory snapshot tables policies change_policies",
    "Target": "target keep soft_deletes partition_by duckdb_memory",
    "Spark": "engine master conf",
    "Limits": "interval until on_error",
    "Output": "dry_run report metrics_port metrics_host log_format",
}
_EXAMPLES = (
    """pgoutput-fast sync --dsn postgresql:///shop --slot s --publication p \\
      --to duckdb:shop.duckdb""",
    "pgoutput-fast sync --segments captured --to s3://bucket/lake --until now",
    "pgoutput-fast sync --segments captured --to parquet:files --until now",
    "pgoutput-fast sync --config sync.toml --to lake --engine spark",
)

_log = logging.getLogger(__name__)


class _SyncWatcher:
    """Passes the progress of a sync to everything that shows it.

    Parameters
    ----------
    view : SyncView
    notifier : Notifier
    position : callable, optional
        Returns the server's position. None: the source is the change log of another capture.
    """

    def __init__(
        self,
        view: SyncView,
        notifier: Notifier,
        position: Callable[[], ServerPosition | None] | None,
    ) -> None:
        self._view = view
        self._notifier = notifier
        self._position = position
        self._lag = SyncLag(asks_server=position is not None)
        self._progress: SyncProgress | None = None
        self._next_status = 0.0
        self.start_time = time.time()
        self.events: deque[ReportedEvent] = deque(maxlen=_EVENTS)
        self.windows: deque[Written] = deque(maxlen=_WINDOWS)
        self.on_progress: Callable[[SyncFigures], None] = lambda _: None

    def figures(self) -> SyncFigures | None:
        """Return the present numbers; None before the first progress. Any thread may call it."""
        progress = self._progress
        return None if progress is None else self._figures(progress)

    def _figures(self, progress: SyncProgress) -> SyncFigures:
        return self._lag.figures(progress, None if self._position is None else self._position())

    def __call__(self, progress: SyncProgress) -> None:
        """Show a new progress."""
        self._note(progress)
        self._notifier.beat()
        figures = self._figures(progress)
        self._view.show(figures)
        if time.monotonic() >= self._next_status:
            self._next_status = time.monotonic() + STATUS_INTERVAL
            self._notifier.status(sync_status(figures))
        self.on_progress(figures)

    def _note(self, progress: SyncProgress) -> None:
        before, self._progress = self._progress, progress
        if before is None:
            self._notifier.ready()
            return
        if progress.windows > before.windows:
            changes = progress.changes - before.changes
            self.windows.append(Written(time.time(), changes, progress.write_seconds))
        for table, text in table_events(before, progress):
            _log.info("%s %s", table, text, extra={"event": "table", "numbers": {"table": table}})
            self.events.append(ReportedEvent(time.time(), table, text))
        for table, why in progress.stale.items():
            if before.stale.get(table) != why:
                self.events.append(
                    ReportedEvent(time.time(), table, f"is not kept up to date: {why}")
                )
        for table, why in progress.paused.items():
            if before.paused.get(table) != why:
                self.events.append(ReportedEvent(time.time(), table, f"is paused: {why}"))
        for table in before.paused.keys() - progress.paused.keys():
            self.events.append(ReportedEvent(time.time(), table, "is not paused any more"))

    def end(self, progress: SyncProgress) -> SyncFigures:
        """Show the last numbers."""
        self._note(progress)
        self._notifier.stopping()
        figures = self._figures(progress)
        self._view.end(figures)
        copying = "the next call" if self._position is not None else "the capture"
        _log.info(
            "the sync ends: %s in %s, tables up to %s%s", counted(progress.changes, "change"),
            counted(progress.windows, "window"), format_lsn(progress.lsn),
            behind_text(progress, copying),
            extra={"event": "stop", "numbers": figures.as_dict()},
        )  # fmt: skip
        return figures


@server_command(groups=_GROUPS, examples=_EXAMPLES)
@click.option("--slot", metavar="NAME", help="Replication slot that only this target uses.")
@publications_option(help="Publication to read; repeatable.")
@click.option(
    "--segments",
    metavar="DIR",
    type=click.Path(),
    help="Change log of another capture, not a slot.",
)
@click.option(
    "--to",
    "target",
    metavar="TARGET",
    required=True,
    help="duckdb:FILE, DIR, URL, parquet:DIR.",
)
@spark_options
@click.option(
    "--dir",
    "directory",
    metavar="DIR",
    type=click.Path(),
    help="Slot's change log. [default: TARGET.segments]",
)
@click.option(
    "--until",
    metavar="now|LSN",
    callback=checked_until,
    help="End with the commits up to now, or before an LSN.",
)
@click.option("--dry-run", is_flag=True, help="Print what sync would do, and write nothing.")
@click.option(
    "--report",
    metavar="FILE.html",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write a report each minute and at the end.",
)
@options_from(*_OPTIONS, defaults=DEFAULT_CAPTURE, no_flags=["upload"])
@click.pass_context
def command(
    context: click.Context,
    /,
    dsn: str | None,
    dsn_file: Path | None,
    engine: str,
    master: str | None,
    conf: dict[str, str],
    dry_run: bool,
    report: Path | None,
    **flags: Any,
) -> int:
    """Keep tables in DuckDB or Delta up to date with a server, each change exactly once.

    Each published table becomes two tables in the target: its changes, and its current rows. A
    target is duckdb:FILE, a directory or s3:// URL for Delta tables, or parquet:DIR for Parquet
    files with only the changes. Sync reads a slot, or the change log of another capture. If sync
    was killed, start it again.

    SIGTERM and Ctrl-C end sync after the current window. Exit codes: 0 success; 1 a lasting error;
    2 wrong usage; 3 success with --until, but tables are paused or stale; 75 a temporary error; 130
    Ctrl-C.
    """
    check_options(engine, master, conf)
    if report is not None and not report.absolute().parent.is_dir():
        raise click.UsageError(f"--report: there is no directory {report.absolute().parent}")
    try:
        options = [chosen(context, flags, kind) for kind in _OPTIONS]
        call = call_of(context, options, **flags)
        spark, service_options = SparkOptions(**options[-2]), ServiceOptions(**options[-1])
        if engine != "spark" and spark != SparkOptions():
            raise PgOutputError(
                "it is for --engine spark", code="bad_option", parameter=next(iter(options[-2]))
            )
        if engine == "spark" and call.target.startswith("duckdb:"):
            raise PgOutputError(
                "--engine spark writes Delta tables, and can't write a DuckDB file",
                code="bad_option", parameter="target", hint="Give a directory or a URL",
            )  # fmt: skip
        opened = call.open()
    except PgOutputError as error:
        raise click.UsageError(text_by(context.command, error)) from None
    if dry_run:
        parameters = None
        if call.captures:
            parameters = ConnectionParameters(dsn_of(context, dsn, dsn_file))
        return print_plan(parameters, call, opened)

    def run(view: SyncView, service: Service) -> int:
        parameters = None
        if call.captures:
            parameters = ConnectionParameters(dsn_of(context, dsn, dsn_file, _log.warning))
            service.hide_secrets(parameters)
        with running_engine("sync", engine, master, conf, stage=spark.stage) as running:
            return _run(parameters, call, view, service, running, report)

    return serve(context, "sync", service_options, (SyncLiveView, SyncLogView), run)


def _run(
    parameters: ConnectionParameters | None,
    call: SyncCall,
    view: SyncView,
    service: Service,
    engine: Engine | None,
    report_path: Path | None,
) -> int:
    """Run the sync, and return the exit code."""
    stop, notifier = service.stop, service.notifier
    with contextlib.ExitStack() as stack:
        position = None if parameters is None else PositionWatch(parameters)
        watcher = _SyncWatcher(
            view, notifier, None if position is None else lambda: position.latest
        )

        def collectors() -> list[Collector]:
            from ..watching.metrics import capture_collector, sync_collector

            all_collectors = [sync_collector(watcher.figures, call.target)]
            if position is not None:
                all_collectors.append(
                    capture_collector(
                        lambda: (figures := watcher.figures()) and figures.capture,
                        lambda: position.latest,
                        call.slot or "",
                    )
                )
            return all_collectors

        stack.enter_context(service.metrics(collectors))
        _log.info("sync of %s to %s", call.source, call.target,
                  extra={"event": "start", "numbers": call.names})  # fmt: skip
        notifier.status("connecting")
        if position is not None:
            position.start()
            stack.callback(position.close)
            stack.callback(sys.setswitchinterval, sys.getswitchinterval())
            sys.setswitchinterval(_SWITCH_INTERVAL)
        report = _Reporting(report_path, call.source, call.target, watcher, service.formatter)
        watcher.on_progress = report.renew
        try:
            ended = sync(
                parameters, target=call.target, slot=call.slot, publications=call.publications,
                segments=call.segments, directory=call.directory, until=call.until,
                sync_options=call.options, target_options=call.target_options,
                capture_options=call.capture_options, engine=engine, stop=stop.event,
                progress=watcher,
            )  # fmt: skip
        except Exception as error:
            report.fail(error)
            raise
        report.write(watcher.end(ended), is_over=True)
    if stop.signal is None and (ended.paused or ended.asked or ended.over_limit):
        return _NOT_ALL
    return stop.exit_code


class _Reporting:
    """Writes the report at intervals and at the end."""

    def __init__(
        self,
        path: Path | None,
        source: str,
        target: str,
        watcher: _SyncWatcher,
        formatter: RecordFormatter,
    ) -> None:
        self._path = path
        self._names = source, target
        self._watcher = watcher
        self._formatter = formatter
        self._next = time.monotonic() + _REPORT_INTERVAL

    def renew(self, figures: SyncFigures) -> None:
        """Write the report, unless it was written a moment ago."""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _REPORT_INTERVAL
            try:
                self.write(figures, is_over=False)
            except PgOutputError as error:  # the sync goes on without a report
                _log.warning("%s", error)

    def fail(self, error: Exception) -> None:
        """Write the report with the error that ends the sync; no other error may replace it."""
        text = f"an internal error ({error!r}), see the log"
        if isinstance(error, PgOutputError):
            text = error.text(self._formatter.name_option)
        self._watcher.events.append(
            ReportedEvent(time.time(), "", f"the sync ended by an error: {text}")
        )
        with contextlib.suppress(PgOutputError):
            self.write(
                self._watcher.figures(), is_over=True, error=text,
                passes=isinstance(error, RetryableError),
            )  # fmt: skip

    def write(
        self,
        figures: SyncFigures | None,
        *,
        is_over: bool,
        error: str | None = None,
        passes: bool = False,
    ) -> None:
        """Write the report if a path was given."""
        if self._path is None:
            return
        watcher = self._watcher
        # Use the log's wording: options instead of arguments, and no secrets.
        events = [
            event._replace(text=self._formatter.shown(event.text)) for event in watcher.events
        ]
        report = SyncReport(
            *self._names, watcher.start_time, time.time(), figures, events, list(watcher.windows),
            is_over, None if error is None else self._formatter.shown(error), passes,
        )  # fmt: skip
        write_page(make_report(report), self._path)
