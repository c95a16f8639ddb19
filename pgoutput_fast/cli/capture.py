"""`pgoutput-fast capture`: a slot's changes into a directory, as a service runs it or by hand."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .. import PgOutputError, parse_lsn
from ..connections import ConnectionParameters, RetryableError
from ..errors import counted
from ..lsn import format_lsn
from ..replication import capture
from ..replication.attempt import unless_stopped
from ..replication.capture import check_combined
from ..replication.link import first_connection
from ..replication.server_position import end_of_commits
from ._dsn import dsn_options, given_dsn, publications_option
from ._figures import Lag
from ._live import shown, status_text
from ._logs import Formatter
from ._named import in_options
from ._position import PositionWatch
from ._quantities import ByteCount, Seconds
from ._systemd import Notifier

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..replication import CaptureProgress
    from ._figures import Figures
    from ._live import View
    from ._logs import LogFormat

EX_TEMPFAIL = 75
"""The exit code of <sysexits.h> for what may succeed later."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_STATUS_INTERVAL = 5.0  # seconds between two states for the service manager

# What is checked before the log begins, as wrong usage.
_COMBINED = (
    "directory", "upload", "upload_endpoint", "upload_keep", "silent_after", "give_up",
)  # fmt: skip

_log = logging.getLogger(__name__)


def _checked_until(_: click.Context, __: click.Parameter, value: str | None) -> int | str | None:
    """The word "now", or an LSN as an int."""
    if value is None or value == "now":
        return value
    try:
        return parse_lsn(value)
    except PgOutputError as error:
        raise click.BadParameter(f"{error}, or 'now'") from None


class _Stop:
    """The order to end, which a signal gives.

    A second signal ends the process at once, as it would without this.
    """

    def __init__(self, notifier: Notifier) -> None:
        self.event = threading.Event()
        self.signal: int | None = None
        self._notifier = notifier

    @contextlib.contextmanager
    def on_signals(self) -> Iterator[None]:
        """Have signals give the order."""
        before = {number: signal.getsignal(number) for number in _SIGNALS}
        try:
            for number, handler in before.items():
                if handler != signal.SIG_IGN:  # as SIGHUP is under nohup
                    signal.signal(number, self._take)
            yield
        finally:
            for number, handler in before.items():
                # None: a handler that is not Python's.
                signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _take(self, number: int, _frame: object) -> None:
        self.signal = number
        self.event.set()
        for other in _SIGNALS:
            if signal.getsignal(other) == self._take:
                default = signal.default_int_handler if other == signal.SIGINT else signal.SIG_DFL
                signal.signal(other, default)
        self._notifier.stopping()

    @property
    def exit_code(self) -> int:
        """That of a capture that has ended in good order."""
        return 130 if self.signal == signal.SIGINT else 0


class _Watcher:
    """Takes the progress of a capture to everything that shows it.

    Parameters
    ----------
    view : View
    notifier : Notifier
    position : PositionWatch
    """

    def __init__(self, view: View, notifier: Notifier, position: PositionWatch) -> None:
        self._view = view
        self._notifier = notifier
        self._position = position
        self._lag = Lag()
        self._progress: CaptureProgress | None = None
        self._next_status = 0.0

    def figures(self) -> Figures | None:
        """The present numbers; None before the stream has begun. Any thread may call it."""
        progress = self._progress
        return None if progress is None else self._lag.figures(progress, self._position.latest)

    def __call__(self, progress: CaptureProgress) -> None:
        """Take a new progress: the loop of the capture has turned."""
        before, self._progress = self._progress, progress
        if before is None:
            self._notifier.ready()
            self._position.tell_refusals()
            _log.info("streaming, from %s on", format_lsn(progress.durable_lsn),
                      extra={"event": "streaming"})  # fmt: skip
        elif progress.reconnects > before.reconnects:
            _log.info("connected again", extra={"event": "reconnected"})
        self._notifier.beat()
        figures = self._lag.figures(progress, self._position.latest)
        self._view.show(figures)
        if time.monotonic() >= self._next_status:
            self._next_status = time.monotonic() + _STATUS_INTERVAL
            self._notifier.status(status_text(figures))

    def end(self, progress: CaptureProgress) -> None:
        """Show the numbers of the end."""
        self._progress = progress
        self._notifier.ready()  # an end that comes at once is no failed start
        self._notifier.stopping()
        figures = self._lag.figures(progress, self._position.latest)
        self._view.end(figures)
        _log.info(
            "the capture ends: %s of %s in %s, durable up to %s",
            counted(progress.changes, "change"), counted(progress.transactions, "transaction"),
            counted(progress.segments, "segment"), format_lsn(progress.durable_lsn),
            extra={"event": "stop", "numbers": figures.as_dict()},
        )  # fmt: skip


@click.command(context_settings={"allow_extra_args": True})
@dsn_options
@click.option("--slot", required=True, help="The replication slot, of this directory alone.")
@publications_option(required=True, help="One or more.")
@click.option(
    "--out",
    "directory",
    metavar="DIR",
    required=True,
    type=click.Path(),  # as text, since a Path makes the current directory of nothing
    help="The directory of segments. If it has some, they are continued.",
)
@click.option(
    "--create-slot/--no-create-slot",
    default=True,
    show_default=True,
    help="Whether to make the slot if it is not there and the directory is new.",
)
@click.option(
    "--adopt-slot",
    is_flag=True,
    help="Begin a new directory with a slot that is there already, or go on in a directory that "
    "was downloaded, as the original is lost.",
)
@click.option(
    "--until",
    metavar="now|LSN",
    callback=_checked_until,
    help="End with what is committed by now, or was committed before an LSN.",
)
@click.option(
    "--snapshot",
    type=click.Choice(["never", "initial", "only"]),
    default="never",
    show_default=True,
    help="Whether the rows come too that the tables had before; with only, nothing else comes yet.",
)
@click.option(
    "--connections",
    type=click.IntRange(1),
    default=2,
    show_default=True,
    help="So many read tables that are copied, beside the stream's.",
)
@click.option("--binary", is_flag=True, help="Ask for values in binary form.")
@click.option("--messages", is_flag=True, help="Logical messages too.")
@click.option(
    "--two-phase",
    is_flag=True,
    help="Take prepared transactions when they are prepared; a slot that is made is marked so. "
    "Without, as the slot is.",
)
@click.option(
    "--max-delay",
    type=Seconds(min_open=False),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="After so long a commit is in a segment on disk.",
)
@click.option(
    "--segment-bytes",
    metavar="BYTES",
    type=ByteCount(1),
    default="16MB",
    show_default=True,
    help="A segment ends with the first commit after so much.",
)
@click.option("--compression", type=click.Choice(["lz4", "zstd"]), help="Of segments; else none.")
@click.option(
    "--merge/--no-merge",
    default=True,
    show_default=True,
    help="Whether small segments are merged, up to --segment-bytes.",
)
@click.option(
    "--grace",
    type=Seconds(),
    default=3600.0,
    show_default=True,
    metavar="SECONDS",
    help="For so long a file stays after it was merged into another one.",
)
@click.option(
    "--keep-seconds",
    type=Seconds(),
    metavar="SECONDS",
    help="Delete segments that are older, once all consumers have read them.",
)
@click.option(
    "--keep-bytes",
    metavar="BYTES",
    type=ByteCount(),
    help="Delete the oldest segments beyond so much, once all consumers have read them.",
)
@click.option(
    "--silent-after",
    type=Seconds(),
    metavar="SECONDS",
    help="Report consumers that have not moved for so long.",
)
@click.option(
    "--give-up",
    is_flag=True,
    help="With --silent-after: remove such consumers, so that nothing is kept for them.",
)
@click.option(
    "--min-free",
    metavar="BYTES",
    type=ByteCount(),
    default="256MB",
    show_default=True,
    help="End with an error when less is free on the disk.",
)
@click.option(
    "--history/--no-history",
    default=True,
    show_default=True,
    help="Whether the catalogue of types and tables is read beside the stream, for its history.",
)
@click.option(
    "--upload",
    metavar="s3://BUCKET/PREFIX",
    help="Copy the directory there, for readers elsewhere. Credentials are those of the AWS SDK.",
)
@click.option(
    "--upload-endpoint",
    metavar="URL",
    help="Of S3-compatible storage; by default AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, or AWS.",
)
@click.option(
    "--upload-keep",
    type=click.Choice(["all", "local"]),
    default="all",
    show_default=True,
    help="With local, what is deleted from the directory is then deleted from its copy.",
)
@click.option(
    "--max-memory",
    metavar="BYTES",
    type=ByteCount(),
    default="64MB",
    show_default=True,
    help="For transactions that have not ended. Beyond it they go to files without a name.",
)
@click.option(
    "--retry-for",
    type=Seconds(),
    metavar="SECONDS",
    help="How long connecting is tried again. Without, the first connection is tried once, and one "
    "that was lost is made again without end.",
)
@click.option(
    "--silence-timeout",
    type=Seconds(),
    metavar="SECONDS",
    help="A server that is silent for so long is given up; by default twice wal_sender_timeout.",
)
@click.option(
    "--metrics-port",
    type=click.IntRange(0, 65535),
    help="Serve metrics for Prometheus there; 0 takes a free port, which is logged.",
)
@click.option(
    "--metrics-host",
    default="127.0.0.1",
    show_default=True,
    help="The address to serve them at. Nothing asks who reads them.",
)
@click.option(
    "--log-format",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="Of the log, on standard error.",
)
@click.option(
    "--log-interval",
    type=Seconds(),
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="Between two lines with numbers, where there is no terminal.",
)
@click.pass_context
def command(
    context: click.Context,
    /,
    dsn: str | None,
    dsn_file: Path | None,
    log_format: LogFormat,
    log_interval: float,
    **options: Any,
) -> int:
    """Write a slot's changes to a directory of segments, until a signal or --until.

    Only what is on disk is acknowledged to the server. However it ends, even by a kill, the next
    call goes on where the directory ends, and nothing is lost or there twice. A connection that is
    lost is made again.

    SIGTERM, SIGHUP and Ctrl-C end it once all that came whole is on disk. Exit codes: 0 it ended as
    it was told to; 75 an error that may pass, so try again later; 1 an error that does not pass by
    itself; 2 wrong usage; 130 Ctrl-C.
    """
    try:
        check_combined(**{name: options[name] for name in _COMBINED})
    except PgOutputError as error:
        raise click.UsageError(in_options(str(error), context.command)) from None
    formatter = Formatter(log_format)
    with contextlib.ExitStack() as held:
        view = held.enter_context(shown(formatter, log_format, log_interval))
        notifier = Notifier()
        held.callback(notifier.close)
        stop = _Stop(notifier)
        held.enter_context(stop.on_signals())
        try:
            given = given_dsn(context, dsn, dsn_file, _log.warning)
            parameters = ConnectionParameters(given)
            formatter.change = lambda text: in_options(
                parameters.without_secrets(text), context.command
            )
            return _run(given, parameters, view, notifier, stop, options)
        except (click.ClickException, KeyboardInterrupt):
            raise
        except RetryableError as error:
            if stop.event.is_set():
                _log.info("the capture ends: %s", error, extra={"event": "stop"})
                return stop.exit_code
            _log.error("%s", error, extra={"event": "error", "numbers": {"retryable": True}})
            return EX_TEMPFAIL
        except PgOutputError as error:
            _log.error("%s", error, extra={"event": "error", "numbers": {"retryable": False}})
        except Exception:  # noqa: BLE001 - the log is the only place where it is looked for
            _log.critical("the capture has failed by a fault of this program", exc_info=True,
                          extra={"event": "error", "numbers": {"retryable": False}})  # fmt: skip
        return 1


def _run(
    dsn: str | None,
    parameters: ConnectionParameters,
    view: View,
    notifier: Notifier,
    stop: _Stop,
    options: dict[str, Any],
) -> int:
    """Capture, and return the exit code."""
    until, host, port = (options.pop(name) for name in ("until", "metrics_host", "metrics_port"))
    options["two_phase"] = True if options["two_phase"] else None

    def ask() -> int:
        return unless_stopped(lambda: end_of_commits(parameters), lambda _: None, stop.event)

    with contextlib.ExitStack() as held:
        position = PositionWatch(parameters)
        watcher = _Watcher(view, notifier, position)
        if port is not None:
            from ._metrics import MetricsServer

            server = MetricsServer(
                host, port, watcher.figures, lambda: position.latest, options["slot"]
            )
            held.callback(server.close)
            _log.info("metrics are at %s", server.url,
                      extra={"event": "metrics", "numbers": {"url": server.url}})  # fmt: skip
        _log.info(
            "capture of slot %s, publications %s, into %s",
            options["slot"], ", ".join(options["publications"]), options["directory"],
            extra={"event": "start", "numbers": {
                "slot": options["slot"], "publications": options["publications"],
                "directory": options["directory"],
            }},
        )  # fmt: skip
        notifier.status("connecting")
        position.start()
        held.callback(position.close)
        if until == "now":
            until = first_connection(ask, options["retry_for"], stop.event)
        ended = capture(dsn, until_lsn=until, stop=stop.event, progress=watcher, **options)
        watcher.end(ended)
    return stop.exit_code
