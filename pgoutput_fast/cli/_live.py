"""Show a running capture's numbers: in a live line on a terminal, else in lines of the log."""

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

_REFRESH = 0.25  # seconds between two updates of the live line
_MEASURE = 1.0  # seconds over which the rates in the line are measured
_SEPARATOR = " │ "

_View = TypeVar("_View")

_log = logging.getLogger(__name__)


class NumbersView(Protocol):
    """Shows the numbers of a capture. It is called often and decides when to show them."""

    def show(self, figures: Figures) -> None:
        """Show the numbers if it is time."""

    def end(self, figures: Figures) -> None:
        """Show the last numbers."""


def status_text(figures: Figures) -> str:
    """Return the lag for `systemctl status`."""
    if not figures.progress.connected:
        return f"no connection, durable up to {format_lsn(figures.progress.durable_lsn)}"
    return f"lag {_lag(figures)}, durable up to {format_lsn(figures.progress.durable_lsn)}"


def lag_text(lag_bytes: int | None, lag_seconds: float | None) -> str:
    """Return a lag as text; None stands for an unknown number."""
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
    """Return the progress of the snapshots; empty if no table waits for a snapshot."""
    progress, copying = figures.progress, figures.progress.copying
    if copying is None:
        waiting = progress.waiting_tables
        return f"{counted(waiting, 'table')} waiting for a snapshot" if waiting else ""
    left = figures.copy_seconds_left
    return (
        f"copying: {copying.tables_done} of {counted(copying.tables, 'table')}, "
        f"{counted(copying.rows, 'row')}, "
        f"{decimal(copying.bytes_done)} of {decimal(copying.bytes)}"
        + ("" if left is None else f", {left:.0f} s left")
    )


def _uploads(figures: Figures) -> str:
    """Return how much is not in object storage yet; empty without object storage."""
    if figures.progress.uploaded_lsn is None:
        return ""
    lag = figures.upload_lag_bytes
    return ", nothing uploaded" if lag is None else f", {decimal(lag)} to upload"


class LogView:
    """Logs the numbers at intervals.

    Parameters
    ----------
    interval : float
        Seconds between two records.
    """

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._meter = Meter()
        self._next = time.monotonic() + interval

    def show(self, figures: Figures) -> None:
        """Log the numbers if the interval is over."""
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
        """Do nothing: the command logs its end itself."""


class LiveView:
    """Updates a line on a terminal, or several lines on a narrow terminal.

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
        """Update the line, unless it was updated a moment ago."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _REFRESH
        # A rate over a quarter of a second varies too much to be read.
        if self._rates is None or now - self._measured >= _MEASURE:
            self._measured = now
            self._rates = self._meter.rates(figures.progress)
        self._show(figures, self._rates)

    def end(self, figures: Figures) -> None:
        """Leave the last numbers on the terminal."""
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
    """Join styled texts into one line, or into as many as a terminal of this width needs.

    Only a text that is wider than the terminal is cut. Empty texts are left out.
    """
    lines: list[Text] = []
    for part in (Text(*pair) for pair in parts if pair[0]):
        if lines and lines[-1].cell_len + len(_SEPARATOR) + part.cell_len <= width:
            lines[-1].append(_SEPARATOR).append_text(part)
        else:
            lines.append(Text().append_text(part))
    text = Text("\n").join(lines)
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


@contextlib.contextmanager
def shown(
    formatter: RecordFormatter,
    kind: LogFormat,
    interval: float,
    live_view: Callable[[Live], _View],
    log_view: Callable[[float], _View],
) -> Iterator[_View]:
    """Show a command's log and numbers on standard error; on a terminal, with a live line.

    Parameters
    ----------
    formatter : RecordFormatter
        Formats the lines of the log.
    kind : {"text", "json"}
        The live line is shown only with "text".
    interval : float
        Seconds between two records with numbers, if there is no live line.
    live_view, log_view : callable
        Make the object that shows the numbers: on a live line, or in the log at the interval.
    """
    console = Console(stderr=True, highlight=False)
    if kind == "json" or not sys.stderr.isatty() or console.is_dumb_terminal:
        with logged(formatter):
            yield log_view(interval)
        return

    def write(text: str) -> None:
        console.print(Text(text), soft_wrap=True)

    # The command's own loop updates the line. So the line stands still if the loop hangs.
    live = Live(console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
    with logged(formatter, write), live:
        yield live_view(live)
