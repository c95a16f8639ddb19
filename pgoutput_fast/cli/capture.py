"""`pgoutput-fast capture`: a slot's changes into a directory, as a service runs it or by hand."""

from __future__ import annotations

import contextlib
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .. import PgOutputError
from ..connections import ConnectionParameters
from ..errors import counted
from ..lsn import format_lsn
from ..replication import capture
from ..replication.attempt import unless_stopped
from ..replication.capture import check_combined
from ..replication.link import first_connection
from ..replication.server_position import end_of_commits
from ..watching.figures import Lag
from ._capturing import capture_options
from ._dsn import dsn_options, given_dsn, publications_option
from ._live import LiveView, LogView, status_text
from ._named import in_options
from ._position import PositionWatch
from ._quantities import Seconds
from ._service import STATUS_INTERVAL, checked_until, serve, service_options

if TYPE_CHECKING:
    from ..replication import CaptureProgress
    from ..watching.figures import Figures
    from ..watching.logs import LogFormat
    from ..watching.metrics import Collector
    from ._live import View
    from ._service import Service
    from ._systemd import Notifier

# What is checked before the log begins, as wrong usage.
_COMBINED = (
    "directory", "upload", "upload_endpoint", "upload_keep", "silent_after", "give_up",
)  # fmt: skip

_log = logging.getLogger(__name__)


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
            self._next_status = time.monotonic() + STATUS_INTERVAL
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
    "--until",
    metavar="now|LSN",
    callback=checked_until,
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
    "--silent-after",
    type=Seconds(),
    metavar="SECONDS",
    help="Report consumers that have something left to read and have not moved for so long; by "
    "default two days.",
)
@click.option(
    "--give-up",
    is_flag=True,
    help="With --silent-after: remove such consumers, so that nothing is kept for them.",
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
@capture_options
@service_options
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

    def run(view: View, service: Service) -> int:
        given = given_dsn(context, dsn, dsn_file, _log.warning)
        parameters = ConnectionParameters(given)
        service.hide_secrets(parameters)
        return _run(given, parameters, view, service, options)

    return serve(context, "capture", log_format, log_interval, (LiveView, LogView), run)


def _run(
    dsn: str | None,
    parameters: ConnectionParameters,
    view: View,
    service: Service,
    options: dict[str, Any],
) -> int:
    """Capture, and return the exit code."""
    until, host, port = (options.pop(name) for name in ("until", "metrics_host", "metrics_port"))
    options["two_phase"] = True if options["two_phase"] else None
    stop, notifier = service.stop, service.notifier

    def ask() -> int:
        return unless_stopped(lambda: end_of_commits(parameters), lambda _: None, stop.event)

    with contextlib.ExitStack() as held:
        position = PositionWatch(parameters)
        watcher = _Watcher(view, notifier, position)

        def collectors() -> list[Collector]:
            from ..watching.metrics import capture_collector

            return [capture_collector(watcher.figures, lambda: position.latest, options["slot"])]

        held.enter_context(service.metrics(host, port, collectors))
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
