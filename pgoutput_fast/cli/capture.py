"""`pgoutput-fast capture`: write a slot's changes to a change log, as a service or by hand."""

from __future__ import annotations

import contextlib
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import click

from .. import PgOutputError
from ..capture_options import CaptureOptions
from ..connections import ConnectionParameters
from ..errors import counted
from ..lsn import format_lsn
from ..replication import capture
from ..replication.capture import check_local
from ..watching.figures import Lag
from ._dsn import dsn_of, publications_option, server_command
from ._live import LiveView, LogView, status_text
from ._options import chosen, options_from, text_by
from ._position import PositionWatch
from ._service import STATUS_INTERVAL, ServiceOptions, checked_until, serve

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..replication import CaptureProgress
    from ..watching.figures import Figures
    from ..watching.metrics import Collector
    from ._live import NumbersView
    from ._service import Service
    from ._systemd import Notifier

_log = logging.getLogger(__name__)


class _CaptureWatcher:
    """Passes the progress of a capture to everything that shows it.

    Parameters
    ----------
    view : NumbersView
    notifier : Notifier
    position : PositionWatch
    """

    def __init__(self, view: NumbersView, notifier: Notifier, position: PositionWatch) -> None:
        self._view = view
        self._notifier = notifier
        self._position = position
        self._lag = Lag()
        self._progress: CaptureProgress | None = None
        self._next_status = 0.0

    def figures(self) -> Figures | None:
        """Return the present numbers; None before the stream has begun. Any thread may call it."""
        progress = self._progress
        return None if progress is None else self._lag.figures(progress, self._position.latest)

    def __call__(self, progress: CaptureProgress) -> None:
        """Show a new progress; the capture's loop calls this."""
        before, self._progress = self._progress, progress
        if before is None:
            self._notifier.ready()
            self._position.tell_refusals()
            _log.info("streaming from %s", format_lsn(progress.durable_lsn),
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
        """Show the last numbers."""
        self._progress = progress
        self._notifier.ready()  # so that an immediate end does not count as a failed start
        self._notifier.stopping()
        figures = self._lag.figures(progress, self._position.latest)
        self._view.end(figures)
        _log.info(
            "the capture ends: %s of %s in %s, durable up to %s",
            counted(progress.changes, "change"), counted(progress.transactions, "transaction"),
            counted(progress.segments, "segment"), format_lsn(progress.durable_lsn),
            extra={"event": "stop", "numbers": figures.as_dict()},
        )  # fmt: skip


@server_command(
    groups={
        "Server": "dsn dsn_file slot publications adopt_slot",
        "What to capture": "snapshot",
        "Target": "directory upload",
        "Limits": "until",
        "Output": "metrics_port metrics_host log_format",
    },
    examples=(
        """pgoutput-fast capture --dsn postgresql:///shop --slot s --publication p \\
      --out captured --snapshot initial""",
        "pgoutput-fast capture --config capture.toml --out captured --until now",
    ),
)
@click.option("--slot", metavar="NAME", required=True, help="Slot that only this change log uses.")
@publications_option(required=True, help="Publication to read; repeatable.")
@click.option(
    "--out",
    "directory",
    metavar="DIR",
    required=True,
    type=click.Path(),  # a text: as a Path, an empty text would be the current directory
    help="Directory of the change log, new or to continue.",
)
@click.option(
    "--until",
    metavar="now|LSN",
    callback=checked_until,
    help="End with the commits up to now, or before an LSN.",
)
@options_from(CaptureOptions, ServiceOptions)
@click.pass_context
def command(
    context: click.Context,
    /,
    dsn: str | None,
    dsn_file: Path | None,
    slot: str,
    publications: tuple[str, ...],
    directory: str,
    until: int | Literal["now"] | None,
    **flags: Any,
) -> int:
    """Write the changes of a slot to a change log, a directory of Arrow files.

    Capture acknowledges only what is on disk. If capture was killed, start it again: no change is
    lost or doubled. It reconnects after a lost connection.

    SIGTERM and Ctrl-C end capture once all whole transactions are on disk. Exit codes: 0 success; 1
    a lasting error; 2 wrong usage; 75 a temporary error; 130 Ctrl-C.
    """
    values = {
        "create_slot": True,
        "two_phase": None,
        **chosen(context, flags, CaptureOptions),
    }
    try:
        options = CaptureOptions(**values)
        service_options = ServiceOptions(**chosen(context, flags, ServiceOptions))
        check_local(directory)
    except PgOutputError as error:
        raise click.UsageError(text_by(context.command, error)) from None

    def run(view: NumbersView, service: Service) -> int:
        parameters = ConnectionParameters(dsn_of(context, dsn, dsn_file, _log.warning))
        service.hide_secrets(parameters)
        source = Slot(parameters, slot, publications, directory, until)
        return _run(source, options, view, service)

    return serve(context, "capture", service_options, (LiveView, LogView), run)


class Slot(NamedTuple):
    """The slot to capture, where to write, and where to end."""

    parameters: ConnectionParameters
    slot: str
    publications: Sequence[str]
    directory: str
    until: int | Literal["now"] | None


def _run(source: Slot, options: CaptureOptions, view: NumbersView, service: Service) -> int:
    """Capture a slot, and return the exit code."""
    parameters, slot, publications, directory, until = source
    stop, notifier = service.stop, service.notifier

    with contextlib.ExitStack() as stack:
        position = PositionWatch(parameters)
        watcher = _CaptureWatcher(view, notifier, position)

        def collectors() -> list[Collector]:
            from ..watching.metrics import capture_collector

            return [capture_collector(watcher.figures, lambda: position.latest, slot)]

        stack.enter_context(service.metrics(collectors))
        _log.info(
            "capture of slot %s, publications %s, into %s", slot, ", ".join(publications),
            directory,
            extra={"event": "start", "numbers": {
                "slot": slot, "publications": publications, "directory": directory,
            }},
        )  # fmt: skip
        notifier.status("connecting")
        position.start()
        stack.callback(position.close)
        ended = capture(
            parameters, slot=slot, publications=publications, directory=directory,
            until_lsn=until, stop=stop.event, progress=watcher,
            capture_options=options,
        )  # fmt: skip
        watcher.end(ended)
    return stop.exit_code
