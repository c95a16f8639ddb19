"""Show a running sync's numbers: in live lines on a terminal, else in lines of the log."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Protocol

from rich.console import Group
from rich.text import Text

from ..errors import counted, printable
from ..lsn import format_lsn
from ..watching.sync_figures import SyncMeter
from ._live import copies_text, folded, lag_text

if TYPE_CHECKING:
    from collections.abc import Collection

    from rich.live import Live

    from ..apply import SyncProgress
    from ..watching.sync_figures import SyncFigures, SyncRates

_REFRESH = 0.25  # seconds between two updates of the lines
_MEASURE = 1.0  # seconds over which rates are measured
_BUSIEST = 5  # tables with lines of their own
_NAMED = 3  # tables that the last line names
_REASONS = 5  # tables that are not up to date, shown with the reason

_log = logging.getLogger(__name__)


class SyncView(Protocol):
    """Shows the numbers of a sync. It is called often and decides when to show them."""

    def show(self, figures: SyncFigures) -> None:
        """Show the numbers if it is time."""

    def end(self, figures: SyncFigures) -> None:
        """Show the last numbers."""


def sync_status(figures: SyncFigures) -> str:
    """Return the lag for `systemctl status`."""
    capture = figures.capture
    lost = "" if capture is None or capture.progress.connected else "no connection, "
    lag = lag_text(figures.lag_bytes, figures.lag_seconds)
    return f"{lost}lag {lag}, tables up to {format_lsn(figures.progress.lsn)}"


def _capture_text(figures: SyncFigures) -> str:
    """Return how far the capture is; empty if another program captures."""
    capture = figures.capture
    if capture is None:
        return ""
    if not capture.progress.connected:
        return "capture: no connection"
    copies = copies_text(capture)
    return f"capture lag {lag_text(capture.lag_bytes, capture.lag_seconds)}" + (
        f", {copies}" if copies else ""
    )


def _states_text(figures: SyncFigures) -> str:
    """Return how many tables are waiting, stale and paused; empty if all are up to date."""
    progress = figures.progress
    parts = []
    if progress.waiting:
        parts.append(f"{counted(len(progress.waiting), 'table')} waiting for a snapshot")
    if progress.stale:
        parts.append(f"{counted(len(progress.stale), 'table')} stale")
    if progress.paused:
        parts.append(f"{counted(len(progress.paused), 'table')} paused")
    return ", ".join(parts)


def behind_text(progress: SyncProgress, copying: str) -> str:
    """Return which tables are not up to date at the end, and what takes their snapshots.

    Parameters
    ----------
    progress : SyncProgress
    copying : str
        What takes the snapshots of tables that wait for one or asked for one.
    """
    behind = sorted({*progress.stale, *progress.waiting, *progress.paused})
    if not behind:
        return ""
    more = f" and {len(behind) - _NAMED} more" if len(behind) > _NAMED else ""
    text = f"; {counted(len(behind), 'table')} not up to date: {', '.join(behind[:_NAMED])}{more}"

    def which(tables: Collection[str]) -> str:
        all_of_them = "it" if len(behind) == 1 else "them"
        return all_of_them if len(tables) == len(behind) else f"{len(tables)} of them"

    if copied := {*progress.waiting, *progress.asked}:
        snapshots = "a snapshot" if len(copied) == 1 else "snapshots"
        text += f"; {copying} takes {snapshots} of {which(copied)}"
    if over := progress.over_limit:
        text += f"; sync requests no snapshot of {which(over)}, after too many within a day"
    return text


class SyncLogView:
    """Logs the numbers at intervals.

    Parameters
    ----------
    interval : float
        Seconds between two records.
    """

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._meter = SyncMeter()
        self._next = time.monotonic() + interval

    def show(self, figures: SyncFigures) -> None:
        """Log the numbers if the interval is over."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + self._interval
        rates = self._meter.rates(figures.progress)
        parts = [
            sync_status(figures),
            f"{rates.all:,.0f} changes/s",
            f"last window {figures.progress.write_seconds:.2f} s",
            _capture_text(figures),
            _states_text(figures),
        ]
        _log.info(
            "%s", "; ".join(part for part in parts if part),
            extra={"event": "progress", "numbers": {
                **figures.as_dict(), "changes_per_second": round(rates.all, 1),
            }},
        )  # fmt: skip

    def end(self, figures: SyncFigures) -> None:
        """Do nothing: the command logs its end itself."""


class SyncLiveView:
    """Updates lines on a terminal: totals, the busiest tables, and tables not up to date.

    Parameters
    ----------
    live : rich.live.Live
    """

    def __init__(self, live: Live) -> None:
        self._live = live
        self._meter = SyncMeter()
        self._rates: SyncRates | None = None
        self._measured = self._next = time.monotonic()

    def show(self, figures: SyncFigures) -> None:
        """Update the lines, unless they were updated a moment ago."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _REFRESH
        if self._rates is None or now - self._measured >= _MEASURE:
            self._measured = now
            self._rates = self._meter.rates(figures.progress)
        self._show(figures, self._rates)

    def end(self, figures: SyncFigures) -> None:
        """Leave the last numbers on the terminal."""
        self._show(figures, self._rates or self._meter.rates(figures.progress))

    def _show(self, figures: SyncFigures, rates: SyncRates) -> None:
        progress = figures.progress
        lag = f"lag {lag_text(figures.lag_bytes, figures.lag_seconds)}"
        parts = [
            (lag, "bold green" if figures.lag_bytes == 0 else "bold yellow"),
            (f"{rates.all:,.0f} changes/s", ""),
            (f"{counted(progress.changes, 'change')} in {counted(progress.windows, 'window')}", ""),
            (f"last window {progress.write_seconds:.2f} s", ""),
            (_capture_text(figures), ""),
            (format_lsn(progress.lsn), "dim"),
        ]
        width = self._live.console.width
        lines = [folded(parts, width), *_busiest(figures, rates), *_behind_lines(figures)]
        for line in lines:
            line.no_wrap, line.overflow = True, "ellipsis"
        self._live.update(Group(*lines), refresh=True)


def _busiest(figures: SyncFigures, rates: SyncRates) -> list[Text]:
    progress = figures.progress
    names = sorted(
        progress.tables, key=lambda name: (-rates.tables.get(name, 0.0), -progress.tables[name])
    )
    shown = names[:_BUSIEST]
    width = max((len(printable(name)) for name in shown), default=0)
    lines = [
        Text(
            f"  {printable(name):<{width}}  {progress.tables[name]:>12,} "
            f"{'change' if progress.tables[name] == 1 else 'changes'}  "
            f"{rates.tables.get(name, 0.0):>9,.0f}/s  {progress.seconds.get(name, 0.0):>8.2f} s"
        )
        for name in shown
    ]
    if len(names) > _BUSIEST:
        lines.append(Text(f"  and {counted(len(names) - _BUSIEST, 'table')} more", "dim"))
    return lines


def _behind_lines(figures: SyncFigures) -> list[Text]:
    progress = figures.progress
    waits = [f"  {printable(name)} waits for its snapshot" for name in progress.waiting]
    stale = [f"  {printable(name)}: {printable(why)}" for name, why in progress.stale.items()]
    paused = [f"  {printable(name)} is paused: {printable(why)}"
              for name, why in progress.paused.items()]  # fmt: skip
    lines = [Text(text, "yellow") for text in [*paused, *stale, *waits][:_REASONS]]
    more = len(waits) + len(stale) + len(paused) - _REASONS
    if more > 0:
        lines.append(Text(f"  and {counted(more, 'table')} more that are not up to date", "yellow"))
    return lines
