"""What commands share that run until they are told to end: signals, log, metrics, exit codes."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

from .. import PgOutputError, parse_lsn
from ..errors import RetryableError
from ..watching.logs import Formatter
from ._live import shown
from ._named import in_options
from ._quantities import Seconds
from ._systemd import Notifier

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.live import Live

    from ..connections import ConnectionParameters
    from ..watching.logs import LogFormat
    from ..watching.metrics import Collector

EX_TEMPFAIL = 75
"""The exit code of <sysexits.h> for what may succeed later."""

STATUS_INTERVAL = 5.0
"""Seconds between two states for the service manager."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_log = logging.getLogger(__name__)

_Command = TypeVar("_Command", bound=Callable[..., Any])


def checked_until(_: click.Context, __: click.Parameter, value: str | None) -> int | str | None:
    """The word "now", or an LSN as an int."""
    if value is None or value == "now":
        return value
    try:
        return parse_lsn(value)
    except PgOutputError as error:
        raise click.BadParameter(f"{error}, or 'now'") from None


def service_options(function: _Command) -> _Command:
    """Give a command the options of metrics and of the log."""
    for option in (
        click.option(
            "--log-interval",
            type=Seconds(),
            default=10.0,
            show_default=True,
            metavar="SECONDS",
            help="Between two lines with numbers, where there is no terminal.",
        ),
        click.option(
            "--log-format",
            type=click.Choice(["text", "json"]),
            default="text",
            show_default=True,
            help="Of the log, on standard error.",
        ),
        click.option(
            "--metrics-host",
            default="127.0.0.1",
            show_default=True,
            help="The address to serve them at. Nothing asks who reads them.",
        ),
        click.option(
            "--metrics-port",
            type=click.IntRange(0, 65535),
            help="Serve metrics for Prometheus there; 0 takes a free port, which is logged.",
        ),
    ):
        function = option(function)
    return function


class Stop:
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
        """That of a command that has ended in good order."""
        return 130 if self.signal == signal.SIGINT else 0


class Service(NamedTuple):
    """What a command has while it runs.

    Fields: context (click's), formatter (of its log), notifier, stop.
    """

    context: click.Context
    formatter: Formatter
    notifier: Notifier
    stop: Stop

    def hide_secrets(self, parameters: ConnectionParameters) -> None:
        """Show none of these parameters' secrets in the log."""
        self.formatter.change = lambda text: in_options(
            parameters.without_secrets(text), self.context.command
        )

    @contextlib.contextmanager
    def metrics(
        self, host: str, port: int | None, collectors: Callable[[], Sequence[Collector]]
    ) -> Iterator[None]:
        """Serve metrics for Prometheus, if there is a port.

        Parameters
        ----------
        host, port
            Of the options.
        collectors : callable
            Gives what makes the metrics.

        Raises
        ------
        PgOutputError
            Nothing can listen there, or the extra is missing.
        """
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
    log_format: LogFormat,
    log_interval: float,
    views: tuple[Callable[[Live], Any], Callable[[float], Any]],
    run: Callable[[Any, Service], int],
) -> int:
    """Run a command until it ends or a signal comes, and return its exit code.

    Parameters
    ----------
    context : click.Context
    name : str
        What the log calls it.
    log_format, log_interval
        Of the options.
    views : tuple of callable
        Make what shows numbers: on a terminal, and in a log.
    run : callable
        Does the work, and returns the exit code.
    """
    formatter = Formatter(log_format)
    formatter.change = lambda text: in_options(text, context.command)
    with contextlib.ExitStack() as held:
        view = held.enter_context(shown(formatter, log_format, log_interval, *views))
        notifier = Notifier()
        held.callback(notifier.close)
        stop = Stop(notifier)
        held.enter_context(stop.on_signals())
        try:
            return run(view, Service(context, formatter, notifier, stop))
        except (click.ClickException, KeyboardInterrupt):
            raise
        except RetryableError as error:
            if stop.event.is_set():
                _log.info("the %s ends: %s", name, error, extra={"event": "stop"})
                return stop.exit_code
            _log.error("%s", error, extra={"event": "error", "numbers": {"retryable": True}})
            return EX_TEMPFAIL
        except PgOutputError as error:
            _log.error("%s", error, extra={"event": "error", "numbers": {"retryable": False}})
        except Exception:  # noqa: BLE001 - the log is the only place where it is looked for
            _log.critical("the %s has failed by a fault of this program", name, exc_info=True,
                          extra={"event": "error", "numbers": {"retryable": False}})  # fmt: skip
        return 1
