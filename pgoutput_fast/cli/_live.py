"""What a running capture shows of itself: a live line on a terminal, lines of a log elsewhere."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from typing import TYPE_CHECKING, Protocol, TypeVar

from rich.console import Console
from rich.filesize import decimal
from rich.live import Live
from rich.text import Text

from ..errors import counted
from ..lsn import format_lsn
from ..watching.figures import Meter
from ..watching.logs import RecordFormatter, logged

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from ..watching.figures import Figures, Rates
    from ..watching.logs import LogFormat

_REFRESH = 0.25  # seconds between two changes of the live line
_MEASURE = 1.0  # seconds over which its rates are measured
_SEPARATOR = " │ "

_View = TypeVar("_View")

_log = logging.getLogger(__name__)


class NumbersView(Protocol):
    """Shows the numbers of a capture. It is given them often, and decides when to show them."""

    def show(self, figures: Figures) -> None:
        """Show them, if it is time."""

    def end(self, figures: Figures) -> None:
        """Show those of the end."""


def status_text(figures: Figures) -> str:
    """The lag, as `systemctl status` shows it."""
    if not figures.progress.connected:
        return f"no connection, durable up to {format_lsn(figures.progress.durable_lsn)}"
    return f"lag {_lag(figures)}, durable up to {format_lsn(figures.progress.durable_lsn)}"


def lag_text(lag_bytes: int | None, lag_seconds: float | None) -> str:
    """How far something is behind; None: that is not known."""
    if lag_bytes is None and lag_seconds is None:
        return "unknown"
    size = "unknown" if lag_bytes is None else decimal(lag_bytes)
    seconds = "unknown" if lag_seconds is None else f"{lag_seconds:.1f} s"
    return f"{size}, {seconds}"


def _lag(figures: Figures) -> str:
    return lag_text(figures.lag_bytes, figures.lag_seconds)


def _rates(rates: Rates) -> str:
    return (
        f"{rates.changes_per_second:,.0f} changes/s, "
        f"{rates.bytes_per_second / 1e6:,.1f} MB/s, "
        f"{rates.transactions_per_second:,.0f} transactions/s"
    )


def _open(figures: Figures) -> str:
    progress = figures.progress
    spilled = f", {decimal(progress.spilled_bytes)} spilled" if progress.spilled_bytes else ""
    return f"{progress.open_transactions} open{spilled}"


def copies_text(figures: Figures) -> str:
    """How far the copies of tables are; empty if no table waits for one."""
    progress, copying = figures.progress, figures.progress.copying
    if copying is None:
        waiting = progress.waiting_tables
        return "" if not waiting else "1 table waits" if waiting == 1 else f"{waiting} tables wait"
    left = figures.copy_seconds_left
    return (
        f"copying: {copying.tables_done} of {counted(copying.tables, 'table')}, "
        f"{counted(copying.rows, 'row')}, "
        f"{decimal(copying.bytes_done)} of {decimal(copying.bytes)}"
        + ("" if left is None else f", {left:.0f} s left")
    )


def _uploads(figures: Figures) -> str:
    """How much is not in object storage; empty if nothing is to be there."""
    if figures.progress.uploaded_lsn is None:
        return ""
    lag = figures.upload_lag_bytes
    return ", nothing uploaded" if lag is None else f", {decimal(lag)} to upload"


class LogView:
    """A record of the log every so many seconds.

    Parameters
    ----------
    interval : float
        Seconds.
    """

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._meter = Meter()
        self._next = time.monotonic() + interval

    def show(self, figures: Figures) -> None:
        """Log the numbers, if the interval is over."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + self._interval
        rates = self._meter.rates(figures.progress)
        numbers = {name: round(rate, 1) for name, rate in rates._asdict().items()}
        _log.info(
            "%s: %s; %s; %s%s%s",
            status_text(figures), _rates(rates), _open(figures),
            counted(figures.progress.segments, "segment"), _uploads(figures),
            f"; {copies}" if (copies := copies_text(figures)) else "",
            extra={"event": "progress", "numbers": figures.as_dict() | numbers},
        )  # fmt: skip

    def end(self, figures: Figures) -> None:
        """Nothing: the end is logged by itself."""


class LiveView:
    """A line of a terminal that changes, or several where it is narrow.

    Parameters
    ----------
    live : rich.live.Live
    """

    def __init__(self, live: Live) -> None:
        self._live = live
        self._meter = Meter()
        self._rates: Rates | None = None
        self._measured = self._next = time.monotonic()

    def show(self, figures: Figures) -> None:
        """Change the line, unless that was done a moment ago."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _REFRESH
        # Rates of a quarter of a second are too restless to be read.
        if self._rates is None or now - self._measured >= _MEASURE:
            self._measured = now
            self._rates = self._meter.rates(figures.progress)
        self._show(figures, self._rates)

    def end(self, figures: Figures) -> None:
        """Leave the numbers of the end."""
        self._show(figures, self._rates or self._meter.rates(figures.progress))

    def _show(self, figures: Figures, rates: Rates) -> None:
        progress = figures.progress
        lag = "no connection" if not progress.connected else f"lag {_lag(figures)}"
        parts = [
            (lag, "bold green" if figures.lag_bytes == 0 else "bold yellow"),
            (copies_text(figures), "bold"),
            (_rates(rates), ""),
            (_open(figures), ""),
            (counted(progress.segments, "segment") + _uploads(figures), ""),
            (format_lsn(progress.durable_lsn), "dim"),
        ]
        self._live.update(folded(parts, self._live.console.width), refresh=True)


def folded(parts: Iterable[tuple[str, str]], width: int) -> Text:
    """Texts with their styles in a line, or in as many as a terminal of this width needs.

    Only a text that is wider than the terminal is cut. Empty ones are left out.
    """
    lines: list[Text] = []
    for part in (Text(*one) for one in parts if one[0]):
        if lines and lines[-1].cell_len + len(_SEPARATOR) + part.cell_len <= width:
            lines[-1].append(_SEPARATOR).append_text(part)
        else:
            lines.append(Text().append_text(part))
    found = Text("\n").join(lines)
    found.no_wrap, found.overflow = True, "ellipsis"
    return found


@contextlib.contextmanager
def shown(
    formatter: RecordFormatter,
    kind: LogFormat,
    interval: float,
    live_view: Callable[[Live], _View],
    log_view: Callable[[float], _View],
) -> Iterator[_View]:
    """Show a command's log and numbers on standard error: with a live line if it is a terminal.

    Parameters
    ----------
    formatter : RecordFormatter
        Makes the lines of the log.
    kind : {"text", "json"}
        JSON is never beside a live line.
    interval : float
        Seconds between two records with numbers, where there is no live line.
    live_view, log_view : callable
        Make what shows the numbers, of the live line or of that interval.
    """
    console = Console(stderr=True, highlight=False)
    if kind == "json" or not sys.stderr.isatty() or console.is_dumb_terminal:
        with logged(formatter):
            yield log_view(interval)
        return

    def write(text: str) -> None:
        console.print(Text(text), soft_wrap=True)

    # The line changes when the loop of the capture turns, and stands still when that hangs.
    live = Live(console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
    with logged(formatter, write), live:
        yield live_view(live)
