"""What `capture` and `sync` share: signals, log, metrics, and exit codes."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from .. import PgOutputError, parse_lsn
from ..errors import RetryableError, options_shown_as
from ..options import Options, choice, count, option, seconds, text
from ..watching.logs import LogFormat, RecordFormatter
from ._dsn import naming_doctor
from ._live import shown
from ._options import shown_by
from ._systemd import Notifier

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.live import Live

    from ..connections import ConnectionParameters
    from ..watching.metrics import Collector

EX_TEMPFAIL = 75
"""The exit code of <sysexits.h> for an error that may pass."""

STATUS_INTERVAL = 5.0
"""Seconds between two status texts for the service manager."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_log = logging.getLogger(__name__)


def checked_until(_: click.Context, __: click.Parameter, value: str | None) -> int | str | None:
    """Return the word "now", or an LSN as an int."""
    if value is None or value == "now":
        return value
    try:
        return parse_lsn(value)
    except PgOutputError as error:
        raise click.BadParameter(f"{error}, or 'now'") from None


@dataclass(frozen=True)
class ServiceOptions(Options):
    """Options of what a command reports while it runs."""

    metrics_port: int | None = option(
        count(0, 65535), None,
        "Serve Prometheus metrics; 0 takes a free port. The log names the port.",
        flag=True,
    )  # fmt: skip
    metrics_host: str = option(
        text("ADDRESS"), "127.0.0.1",
        "Address of the metrics. Anybody who can reach it can read them.",
        flag=True,
    )  # fmt: skip
    log_format: LogFormat = option(
        choice("text", "json"), "text", "Format of the log on standard error.", flag=True
    )
    log_interval: float = option(seconds(), 10.0, "Time between two lines of progress in the log.")


class Stop:
    """Tells a command to end when a signal arrives.

    A second signal ends the process at once, as if there were no handler.
    """

    def __init__(self, notifier: Notifier) -> None:
        self.event = threading.Event()
        self.signal: int | None = None
        self._notifier = notifier

    @contextlib.contextmanager
    def on_signals(self) -> Iterator[None]:
        """Handle the signals for the length of the block."""
        before = {number: signal.getsignal(number) for number in _SIGNALS}
        try:
            for number, handler in before.items():
                if handler != signal.SIG_IGN:  # nohup sets it for SIGHUP
                    signal.signal(number, self._take)
            yield
        finally:
            for number, handler in before.items():
                # None stands for a handler that was not installed from Python.
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
        """The exit code of a command that has ended normally."""
        return 130 if self.signal == signal.SIGINT else 0


class Service(NamedTuple):
    """What a command uses while it runs.

    Fields: context (click's), options, formatter (of its log), notifier, stop.
    """

    context: click.Context
    options: ServiceOptions
    formatter: RecordFormatter
    notifier: Notifier
    stop: Stop

    def hide_secrets(self, parameters: ConnectionParameters) -> None:
        """Remove the secrets of connection parameters from the log."""
        self.formatter.change = parameters.without_secrets

    @contextlib.contextmanager
    def metrics(self, collectors: Callable[[], Sequence[Collector]]) -> Iterator[None]:
        """Serve metrics for Prometheus if the options have a port.

        Parameters
        ----------
        collectors : callable
            Returns the collectors of the metrics.

        Raises
        ------
        PgOutputError
            The address can't be used, or the extra is missing.
        """
        host, port = self.options.metrics_host, self.options.metrics_port
        if port is None:
            yield
            return
        from ..watching.metrics import MetricsServer

        with contextlib.closing(MetricsServer(host, port, collectors())) as server:
            _log.info("metrics are at %s", server.url,
                      extra={"event": "metrics", "numbers": {"url": server.url}})  # fmt: skip
            yield


def serve(
    context: click.Context,
    name: str,
    options: ServiceOptions,
    views: tuple[Callable[[Live], Any], Callable[[float], Any]],
    run: Callable[[Any, Service], int],
) -> int:
    """Run a command until it ends or a signal comes, and return its exit code.

    Parameters
    ----------
    context : click.Context
    name : str
        The command's name in the log.
    options : ServiceOptions
    views : tuple of callable
        Make the object that shows numbers: on a terminal, and in a log.
    run : callable
        Does the work and returns the exit code.
    """
    formatter = RecordFormatter(options.log_format)
    formatter.name_option = shown_by(context.command)
    with contextlib.ExitStack() as stack:
        stack.enter_context(options_shown_as(formatter.name_option))
        view = stack.enter_context(
            shown(formatter, options.log_format, options.log_interval, *views)
        )
        notifier = Notifier()
        stack.callback(notifier.close)
        stop = Stop(notifier)
        stack.enter_context(stop.on_signals())
        try:
            with naming_doctor(context.params.get("publications") or ()):
                return run(view, Service(context, options, formatter, notifier, stop))
        except (click.ClickException, KeyboardInterrupt):
            raise
        except RetryableError as error:
            if stop.event.is_set():
                _log.info("the %s ends: %s", name, error, extra={"event": "stop"})
                return stop.exit_code
            _log_error(error, retryable=True)
            return EX_TEMPFAIL
        except PgOutputError as error:
            _log_error(error, retryable=False)
        except Exception:  # noqa: BLE001 - the log is the only place where it is looked for
            _log.critical("the %s ended by an internal error", name, exc_info=True,
                          extra={"event": "error", "numbers": {"retryable": False}})  # fmt: skip
        return 1


def _log_error(error: PgOutputError, *, retryable: bool) -> None:
    numbers = {"retryable": retryable, "code": error.code}
    _log.error("%s", error, extra={"event": "error", "numbers": numbers})
