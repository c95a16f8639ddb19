"""`pgoutput-fast sync`: tables that are kept up to date, as a service does it or by hand."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from ..apply import sync
from ..apply.duckdb_file import LEAST_MEMORY
from ..connections import ConnectionParameters
from ..errors import PgOutputError, RetryableError, counted
from ..history import POLICIES
from ..html_page import write_page
from ..lsn import format_lsn
from ..watching.sync_figures import SyncLag
from ._capturing import CAPTURE_OPTIONS, capture_options
from ._dsn import dsn_options, given_dsn, publications_option
from ._inspect_to import policies_option, table_patterns
from ._named import in_options
from ._position import PositionWatch
from ._quantities import ByteCount, Seconds
from ._service import STATUS_INTERVAL, checked_until, serve, service_options
from ._spark_engine import check_options, running_engine, spark_options
from ._sync_events import table_events
from ._sync_plan import OF_THE_TARGET, check_arguments, print_plan
from ._sync_report import Moment, Report, Written, make_report
from ._sync_views import SyncLiveView, SyncLogView, not_kept_text, sync_status

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..apply import SyncProgress
    from ..replication.server_position import Position
    from ..spark._merges import MergeBy
    from ..watching.logs import LogFormat
    from ..watching.metrics import Collector
    from ..watching.sync_figures import SyncFigures
    from ._service import Service
    from ._sync_views import SyncView
    from ._systemd import Notifier

_REPORT_INTERVAL = 60.0  # seconds between two reports
_NOT_ALL = 3  # the exit code if tables are paused or stale at the end
_EVENTS = 1000  # the newest that a report has
_WINDOWS = 2000
_SWITCH_INTERVAL = 0.001  # seconds
# So long threads that write tables keep the interpreter while the capture's thread waits for it.
# With Python's own 5 ms the socket is full meanwhile, and the server waits: a backlog came at 81 to
# 86 % of the rate of a capture by itself, and comes at 90 %.

# What belongs to a slot that the command captures itself.
_OF_THE_SLOT = ("dsn", "dsn_file", "slot", "publications", "directory", "snapshot")

_log = logging.getLogger(__name__)


class _Watcher:
    """Takes the progress of a sync to everything that shows it.

    Parameters
    ----------
    view : SyncView
    notifier : Notifier
    position : callable, optional
        Where the server is; without, the source is a directory that another capture writes.
    """

    def __init__(
        self, view: SyncView, notifier: Notifier, position: Callable[[], Position | None] | None
    ) -> None:
        self._view = view
        self._notifier = notifier
        self._position = position
        self._lag = SyncLag(asks_server=position is not None)
        self._progress: SyncProgress | None = None
        self._next_status = 0.0
        self.begun = time.time()
        self.events: deque[Moment] = deque(maxlen=_EVENTS)
        self.windows: deque[Written] = deque(maxlen=_WINDOWS)
        self.on_progress: Callable[[SyncFigures], None] = lambda _: None

    def figures(self) -> SyncFigures | None:
        """The present numbers; None before the first look. Any thread may call it."""
        progress = self._progress
        return None if progress is None else self._figures(progress)

    def _figures(self, progress: SyncProgress) -> SyncFigures:
        return self._lag.figures(progress, None if self._position is None else self._position())

    def __call__(self, progress: SyncProgress) -> None:
        """Take a new progress."""
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
            has = counted(len(progress.held), "table") if progress.held else "no table yet"
            _log.info("the target has %s; the changes are read from %s on", has,
                      format_lsn(progress.lsn), extra={"event": "syncing"})  # fmt: skip
            return
        if progress.windows > before.windows:
            changes = progress.changes - before.changes
            self.windows.append(Written(time.time(), changes, progress.write_seconds))
        for table, text in table_events(before, progress):
            _log.info("%s %s", table, text, extra={"event": "table", "numbers": {"table": table}})
            self.events.append(Moment(time.time(), table, text))
        for table, why in progress.stale.items():
            if before.stale.get(table) != why:
                self.events.append(Moment(time.time(), table, f"is not kept up to date: {why}"))
        for table, why in progress.paused.items():
            if before.paused.get(table) != why:
                self.events.append(Moment(time.time(), table, f"is paused: {why}"))
        for table in before.paused.keys() - progress.paused.keys():
            self.events.append(Moment(time.time(), table, "is not paused any more"))

    def end(self, progress: SyncProgress) -> SyncFigures:
        """Show the numbers of the end."""
        self._note(progress)
        self._notifier.stopping()
        figures = self._figures(progress)
        self._view.end(figures)
        copying = "the next call" if self._position is not None else "the directory's capture"
        _log.info(
            "the sync ends: %s in %s, tables up to %s%s", counted(progress.changes, "change"),
            counted(progress.windows, "window"), format_lsn(progress.lsn),
            not_kept_text(progress, copying),
            extra={"event": "stop", "numbers": figures.as_dict()},
        )  # fmt: skip
        return figures


def _partitions(
    context: click.Context, parameter: click.Parameter, values: tuple[str, ...]
) -> dict[str, list[str]] | None:
    """The columns by table."""
    del context, parameter
    found: dict[str, list[str]] = {}
    for value in values:
        table, _, columns = value.partition("=")
        found[table] = columns.split(",")
        if not table or not all(found[table]):
            raise click.BadParameter(f"{value!r}: expected schema.name=COLUMN or =COLUMN,COLUMN")
    return found or None


@click.command(context_settings={"allow_extra_args": True})
@dsn_options
@click.option("--slot", help="The replication slot to capture, for this target alone.")
@publications_option(help="One or more.")
@click.option(
    "--segments",
    metavar="DIR",
    type=click.Path(),
    help="The directory of another capture, in place of a slot.",
)
@click.option(
    "--to",
    "target",
    metavar="DIR|duckdb:FILE",
    required=True,
    help="Where the tables are: a directory or s3://bucket/prefix has Delta tables. What is there "
    "is continued.",
)
@spark_options
@click.option(
    "--stage/--no-stage",
    default=None,
    help="Whether segments are copied into the target's storage for executors that don't see "
    "--dir; by default if the target is a URL and Spark runs on a cluster.",
)
@click.option(
    "--merge-by",
    type=click.Choice(["auto", "delta-rs", "spark"]),
    help="What changes the rows of state tables with --engine spark: a task for each table, or "
    "Spark's MERGE. By default the latter does where much of a table is written anew.",
)
@click.option(
    "--dir",
    "directory",
    metavar="DIR",
    type=click.Path(),
    help="Where the slot is captured; by default beside the target, with .segments behind its "
    "name.",
)
@click.option(
    "--snapshot",
    type=click.Choice(["initial", "never"]),
    default="initial",
    show_default=True,
    help="Whether the rows come too that the tables had before.",
)
@click.option(
    "--until",
    metavar="now|LSN",
    callback=checked_until,
    help="End once the tables have what is committed by now, or was committed before an LSN.",
)
@click.option(
    "--interval",
    type=Seconds(min_open=False),
    default=1.0,
    show_default=True,
    metavar="TIME",
    help="From the begin of one window of changes that are written together to the next one's.",
)
@click.option(
    "--table",
    "tables",
    multiple=True,
    metavar="PATTERN",
    help="Only these tables: name or schema.name, with *, ? and [...] in the shell's quotes; a "
    "name in SQL's double quotes is no pattern.",
)
@click.option(
    "--schema-changes",
    type=click.Choice(["evolve", "fail"]),
    default="evolve",
    show_default=True,
    help="Whether tables follow when columns are added, dropped, renamed and altered.",
)
@click.option(
    "--on-error",
    type=click.Choice(["pause", "stop"]),
    default="pause",
    show_default=True,
    help="What to do when one table can't go on, as a value or a commit is refused or changes are "
    "missing: pause that table (or have it copied again) while the others go on, or end.",
)
@click.option(
    "--pause-bytes",
    type=ByteCount(),
    default="10GB",
    show_default=True,
    metavar="BYTES",
    help="So much of the captured changes is kept for a paused table. Beyond that its changes are "
    "passed over, and it is copied again.",
)
@click.option(
    "--pause-time",
    type=Seconds(min_open=False),
    default="3d",
    show_default=True,
    metavar="TIME",
    help="For so long they are kept.",
)
@click.option(
    "--uncopied",
    type=click.Choice(["error", "empty", "changes"]),
    default="error",
    show_default=True,
    help="What to do with a table without a snapshot: end, take it that it was empty, or keep its "
    "changes alone.",
)
@click.option(
    "--history",
    type=click.Choice(POLICIES),
    default="newer",
    show_default=True,
    help="By which form values are decoded whose type was altered at about the same time.",
)
@policies_option(
    "What to do with values that a column can't hold, e.g. infinity=null; numeric=20,4 makes "
    "decimals of numerics without precision. A target keeps to what it began with."
)
@click.option(
    "--change-policies",
    is_flag=True,
    help="Have the policies of this call hold from now on; tables that they concern get a new "
    "snapshot.",
)
@click.option(
    "--window-bytes",
    type=ByteCount(1),
    metavar="BYTES",
    help="About so much is written together at most; by default 64MB, or 256MB where Spark has "
    "more than two cores.",
)
@click.option(
    "--consumer",
    metavar="NAME",
    help="The name by which the directory keeps what the tables lack; by default made of --to.",
)
@click.option(
    "--soft-deletes",
    metavar="COLUMN",
    help="Have deleted rows stay in the state tables, with the time of that in this column.",
)
@click.option(
    "--partition-by",
    metavar="TABLE=COLUMN,…",
    multiple=True,
    callback=_partitions,
    help="The columns by which a Delta state table, schema.name, is partitioned when it is made.",
)
@click.option(
    "--retention-hours",
    type=click.IntRange(0),
    metavar="HOURS",
    help="Files that Delta tables need no more are deleted after so long; 6 by default.",
)
@click.option(
    "--maintenance/--no-maintenance",
    default=None,
    help="Whether small files of Delta tables are joined, and old ones deleted; they are by "
    "default.",
)
@click.option(
    "--iceberg",
    metavar="CATALOG",
    help="Have the change tables be Iceberg tables of this catalogue, which pyiceberg's "
    "configuration has.",
)
@click.option(
    "--changes",
    type=click.Choice(["delta", "parquet"]),
    help="Whether change tables are Delta tables, the default, or directories of Parquet files "
    "without a table's log.",
)
@click.option(
    "--duckdb-memory",
    type=ByteCount(LEAST_MEMORY),
    metavar="BYTES",
    help="What DuckDB may take; by default a quarter of the memory of the machine or the "
    "container, but 384MB at least and 4GB at most. One transaction has to fit in it.",
)
@click.option(
    "--lock-timeout",
    type=Seconds(min_open=False),
    metavar="TIME",
    help="End after a DuckDB file was open in another process for so long. By default windows "
    "wait until it is closed there, and the capture goes on. One process can have the file open: "
    "readers open it for a query and close it again, and sync closes it after each window.",
)
@click.option("--dry-run", is_flag=True, help="Say what would be done, and write nothing.")
@click.option(
    "--report",
    metavar="FILE.html",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write a report there at the end, and each minute.",
)
@capture_options
@service_options
@click.pass_context
def command(
    context: click.Context,
    /,
    dsn: str | None,
    dsn_file: Path | None,
    engine: str,
    master: str | None,
    conf: dict[str, str],
    stage: bool | None,
    merge_by: MergeBy | None,
    tables: tuple[str, ...],
    dry_run: bool,
    log_format: LogFormat,
    log_interval: float,
    **options: Any,
) -> int:
    """Keep tables up to date with a server's, each change exactly once, until a signal or --until.

    Each table of the server becomes two in the target: all its changes, and the rows that it has.
    A slot is captured, or the directory of another capture is read. However it ends, even by a
    kill, the next call goes on.

    SIGTERM, SIGHUP and Ctrl-C end it after the window that is being written. Exit codes: 0 it ended
    as it was told to; 3 so it did with --until, but tables are paused, or wait for a new copy as
    they are stale; 75 an error that may pass, so try again later; 1 an error that does not pass by
    itself; 2 wrong usage; 130 Ctrl-C.
    """
    check_options(engine, master, conf)
    if stage is not None and engine != "spark":
        raise click.UsageError("--stage and --no-stage are for --engine spark")
    if merge_by is not None and engine != "spark":
        raise click.UsageError("--merge-by is for --engine spark")
    if engine == "spark" and options["target"].startswith("duckdb:"):
        raise click.UsageError(
            "--engine spark keeps Delta tables, and a DuckDB file is written by one process: "
            "give a directory or a URL in --to"
        )
    arguments = _arguments(context, options)
    arguments["tables"] = table_patterns(tables) if tables else None
    captures = arguments["segments"] is None
    report = options["report"]
    if report is not None and not report.absolute().parent.is_dir():
        raise click.UsageError(f"--report: there is no directory {report.absolute().parent}")

    def change(text: str) -> str:
        return in_options(text, context.command)

    try:
        check_arguments(arguments)
    except PgOutputError as error:
        raise click.UsageError(change(str(error))) from None
    if dry_run:
        given = given_dsn(context, dsn, dsn_file) if captures else None
        return print_plan(given, arguments, change)

    def run(view: SyncView, service: Service) -> int:
        parameters = None
        if captures:
            given = given_dsn(context, dsn, dsn_file, _log.warning)
            parameters = ConnectionParameters(given)
            service.hide_secrets(parameters)
            arguments["dsn"] = given
        with running_engine(
            "sync", engine, master, conf, stage=stage, merge_by=merge_by
        ) as arguments["engine"]:
            return _run(parameters, view, service, arguments, options)

    return serve(context, "sync", log_format, log_interval, (SyncLiveView, SyncLogView), run)


def _arguments(context: click.Context, options: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `sync` that options stand for, but for the DSN.

    Raises
    ------
    click.UsageError
        Options do not go together.
    """
    named = {
        one.name: one.opts[0]
        for one in context.command.params
        if one.name and context.get_parameter_source(one.name) == ParameterSource.COMMANDLINE
    }
    capturing = [name for name in CAPTURE_OPTIONS if name in named]
    if options["segments"] is not None:
        if context.args:
            raise click.UsageError("unexpected extra argument; a DSN follows --dsn, in quotes")
        wrong = [name for name in (*_OF_THE_SLOT, *capturing) if name in named]
        if wrong:
            raise click.UsageError(f"{named[wrong[0]]} does not go together with --segments")
    elif options["slot"] is None or not options["publications"]:
        raise click.UsageError("give --slot and --publication, or --segments")
    found = {
        name: options[name]
        for name in (
            "target", "segments", "until", "interval", "history", "policies", "schema_changes",
            "on_error", "uncopied", "window_bytes", "pause_bytes", "pause_time", "consumer",
            *OF_THE_TARGET,
        )
    }  # fmt: skip
    if options["segments"] is None:
        found |= {name: options[name] for name in ("slot", "publications", "directory", "snapshot")}
        # Of the rest sync and capture have defaults of their own.
        found |= {name: options[name] for name in capturing}
    return found


def _run(
    parameters: ConnectionParameters | None,
    view: SyncView,
    service: Service,
    arguments: dict[str, Any],
    options: dict[str, Any],
) -> int:
    """Sync, and return the exit code."""
    stop, notifier = service.stop, service.notifier
    target = arguments["target"]
    with contextlib.ExitStack() as held:
        position = None if parameters is None else PositionWatch(parameters)
        watcher = _Watcher(view, notifier, None if position is None else lambda: position.latest)

        def collectors() -> list[Collector]:
            from ..watching.metrics import capture_collector, sync_collector

            made = [sync_collector(watcher.figures, target)]
            if position is not None:
                made.append(
                    capture_collector(
                        lambda: (found := watcher.figures()) and found.capture,
                        lambda: position.latest,
                        arguments["slot"],
                    )
                )
            return made

        held.enter_context(
            service.metrics(options["metrics_host"], options["metrics_port"], collectors)
        )
        source = _source(arguments)
        _log.info("sync of %s to %s", source, target, extra={"event": "start", "numbers": {
            name: arguments[name] for name in ("slot", "publications", "segments", "target")
            if arguments.get(name) is not None
        }})  # fmt: skip
        notifier.status("connecting")
        if position is not None:
            position.start()
            held.callback(position.close)
            held.callback(sys.setswitchinterval, sys.getswitchinterval())
            sys.setswitchinterval(_SWITCH_INTERVAL)
        report = _Reporting(options["report"], source, target, watcher, service.formatter.shown)
        watcher.on_progress = report.renew
        try:
            ended = sync(**arguments, stop=stop.event, progress=watcher)
        except Exception as error:
            report.fail(error)
            raise
        report.write(watcher.end(ended), is_over=True)
    if stop.signal is None and (ended.paused or ended.asked):
        return _NOT_ALL
    return stop.exit_code


def _source(arguments: dict[str, Any]) -> str:
    if arguments["segments"] is not None:
        return f"directory {arguments['segments']}"
    return f"slot {arguments['slot']}, publications {', '.join(arguments['publications'])}"


class _Reporting:
    """Writes the report, from time to time and at the end."""

    def __init__(
        self,
        path: Path | None,
        source: str,
        target: str,
        watcher: _Watcher,
        shown: Callable[[str], str],
    ) -> None:
        self._path = path
        self._names = source, target
        self._watcher = watcher
        self._shown = shown
        self._next = time.monotonic() + _REPORT_INTERVAL

    def renew(self, figures: SyncFigures) -> None:
        """Write it, if that was not done a moment ago."""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _REPORT_INTERVAL
            try:
                self.write(figures, is_over=False)
            except PgOutputError as error:  # the tables go on without it
                _log.warning("%s", error)

    def fail(self, error: Exception) -> None:
        """Write it with the error that ends the sync, which is not to be lost by another one."""
        is_known = isinstance(error, PgOutputError)
        text = str(error) if is_known else f"a fault of this program ({error!r}), see its log"
        self._watcher.events.append(Moment(time.time(), "", f"the sync ended by an error: {text}"))
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
        """Write it, if there is a place for it."""
        if self._path is None:
            return
        watcher = self._watcher
        # As the log has them, with options in place of arguments, and without secrets.
        events = [one._replace(text=self._shown(one.text)) for one in watcher.events]
        report = Report(
            *self._names, watcher.begun, time.time(), figures, events, list(watcher.windows),
            is_over, None if error is None else self._shown(error), passes,
        )  # fmt: skip
        write_page(make_report(report), self._path)
