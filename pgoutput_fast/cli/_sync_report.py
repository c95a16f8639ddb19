"""Make the report of a sync: one HTML file without references to other files."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING, NamedTuple

from rich.filesize import decimal

from .. import html_page as html
from .._version import __version__
from ..errors import counted
from ..lsn import format_lsn
from ..names import qualified

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ..apply.syncing import SyncProgress
    from ..apply.targets import TableState
    from ..watching.sync_figures import SyncFigures


class ReportedEvent(NamedTuple):
    """Something that happened to a table. Fields: time (seconds since 1970), table, text."""

    time: float
    table: str
    text: str


class Written(NamedTuple):
    """A written window. Fields: time (seconds since 1970), changes, seconds (of the write)."""

    time: float
    changes: int
    seconds: float


class SyncReport(NamedTuple):
    """The content of a report.

    Attributes
    ----------
    source, target : str
    start_time, report_time : float
        When the command began and when the report was made, in seconds since 1970.
    figures : SyncFigures or None
        None: the command ended before it had read the tables' state.
    events : list of ReportedEvent
        The newest events.
    windows : list of Written
        The newest windows.
    is_over : bool
        Whether the command has ended.
    error : str or None
        The error that ended the command.
    passes : bool
        Whether the error may pass by itself.
    """

    source: str
    target: str
    start_time: float
    report_time: float
    figures: SyncFigures | None
    events: list[ReportedEvent]
    windows: list[Written]
    is_over: bool
    error: str | None = None
    passes: bool = False


def make_report(report: SyncReport) -> str:
    """Return the report as HTML."""
    goes_on = "" if report.is_over else "; sync is running, and updates this page each minute"
    figures = report.figures
    return html.page(
        "pgoutput-fast sync",
        html.text(report.target),
        f"From {html.text(report.source)}. pgoutput-fast {__version__}, from "
        f"{_time(report.start_time)} to {_time(report.report_time)}{goes_on}.",
        *_verdict(report),
        *(() if figures is None else _content(report, figures)),
        refresh=None if report.is_over else 60,
    )


def _content(report: SyncReport, figures: SyncFigures) -> Iterator[str]:
    yield html.figures(*_figures(report, figures))
    yield html.section(
        "Tables",
        "Changes and seconds are those of this run. A table has everything that was committed "
        "before its LSN.",
        _tables(figures.progress, has_failed=report.error is not None),
    )
    yield html.section("Write times", _windows_text(report.windows), _chart(report.windows))
    yield html.section("What happened to tables", "", _events(report.events))


def _verdict(report: SyncReport) -> Iterator[str]:
    """Yield the most important facts as paragraphs."""
    progress = None if report.figures is None else report.figures.progress
    wrong: list[str] = []
    if progress is not None:
        wrong += [f"{counted(len(progress.stale), 'table')} not kept up to date"] * bool(
            progress.stale
        )
        wrong += [f"{counted(len(progress.paused), 'table')} paused"] * bool(progress.paused)
        wrong += [f"{counted(len(progress.waiting), 'table')} waiting for a snapshot"] * bool(
            progress.waiting
        )
    if report.error is None:
        which = "All published tables" if progress and progress.left else "All tables"
        is_bad = progress is not None and bool(progress.stale or progress.paused)
        kind = "bad" if is_bad else "wait" if wrong else "good"
        state = ", ".join(wrong) or f"{which} are kept up to date."
        yield f'<p class="verdict {kind}">{state}</p>'
        return
    ended = f"The sync ended by an error at {_time(report.report_time)}: {report.error}"
    yield f'<p class="verdict bad">{html.text(ended)}</p>'
    stand = "It ended before it read the tables, and wrote nothing."
    goes_on = "The next call starts again."
    if progress is not None:
        stand = f"The tables are as of {format_lsn(progress.lsn)}, and get no more changes."
        stand += f" Not up to date: {' and '.join(wrong)}." if wrong else ""
        goes_on = "The next call continues from there."
    again = (
        "The error may pass by itself: try again."
        if report.passes
        else "The error does not pass by itself: first do what it says."
    )
    yield f"<p>{stand} {goes_on} {again}</p>"


def _time(moment: float) -> str:
    utc_time = datetime.datetime.fromtimestamp(moment, datetime.timezone.utc)
    return f"{utc_time:%Y-%m-%d %H:%M:%S} UTC"


def _figures(report: SyncReport, figures: SyncFigures) -> Iterable[tuple[str, str]]:
    progress = figures.progress
    seconds = max(report.report_time - report.start_time, 1e-3)
    lag_bytes, lag_seconds = figures.lag_bytes, figures.lag_seconds
    return (
        (f"{progress.changes:,}", "changes written"),
        (f"{progress.changes / seconds:,.0f}/s", "on average"),
        (f"{len(progress.table_states):,}", "tables"),
        (f"{progress.windows:,}", "windows"),
        ("unknown" if lag_bytes is None else decimal(lag_bytes), "of the log behind"),
        ("unknown" if lag_seconds is None else f"{lag_seconds:.1f} s", "behind"),
        (format_lsn(progress.lsn), "LSN of the tables"),
    )


def _tables(progress: SyncProgress, *, has_failed: bool) -> str:
    if not progress.table_states:
        return "<p>There are no tables yet.</p>"
    heads = [
        html.cell(head, "left" if head in ("table", "in the target", "state") else "", "th")
        for head in ("table", "in the target", "columns", "changes", "seconds", "LSN",
                     "copied as of", "newest commit", "state")
    ]  # fmt: skip
    ordered = sorted(
        progress.table_states,
        key=lambda table: (-progress.tables.get(qualified(table), 0), qualified(table)),
    )
    return html.table(heads, (_row(progress, table, has_failed=has_failed) for table in ordered))


def _row(progress: SyncProgress, table: TableState, *, has_failed: bool) -> str:
    name = qualified(table)
    shown_name = progress.names[table.relation_id]
    has_left = shown_name in progress.left
    if table.paused is not None:
        since = f"paused since {_time(table.paused.since)}: {table.paused.reason}"
        state = html.cell(html.text(since), "left long bad")
    elif table.stale is not None:
        state = html.cell(html.text(table.stale), "left long bad")
    elif has_left:
        state = html.cell("not published any more, or dropped: it stays as it is", "left long")
    elif name in progress.waiting:
        state = html.cell("waits for its snapshot", "left wait")
    elif has_failed:
        state = html.cell(f"as of {format_lsn(table.lsn)}", "left wait")
    else:
        state = html.cell("up to date", "left good")
    if table.version > 1:
        shown_name = f"{shown_name} (version {table.version})"
    if table.gap is not None:
        shown_name += f"; another program changed its changes before {format_lsn(table.gap)}"
    cells = (
        f"{len(table.columns):,}",
        # Numbers are by name: a name that a table has given up may be another table's now.
        "–" if has_left else f"{progress.tables.get(name, 0):,}",
        "–" if has_left else f"{progress.seconds.get(name, 0.0):.2f}",
        format_lsn(table.lsn),
        format_lsn(table.copy_lsn) if table.copy_lsn else "–",
    )
    newest = _time(table.commit_time / 1e6) if table.commit_time is not None else "–"
    return "".join(
        [
            html.cell(f"<b>{html.text(name)}</b>", "left name"),
            html.cell(html.text(shown_name), "left name"),
            *map(html.cell, cells),
            html.cell(newest, "time"),
            state,
        ]
    )


def _windows_text(windows: Sequence[Written]) -> str:
    if not windows:
        return "Nothing was written."
    seconds = sorted(window.seconds for window in windows)
    middle = seconds[len(seconds) // 2]
    return (
        f"The last {counted(len(windows), 'window')}: median {middle:.2f} s, "
        f"longest {seconds[-1]:.2f} s, total {sum(seconds):.1f} s."
    )


_BARS = 300  # the largest number of bars in a chart


def _chart(windows: Sequence[Written]) -> str:
    """Return a bar of seconds for each window; with many windows, for the slowest of each group."""
    if not windows:
        return ""
    each = -(-len(windows) // _BARS)
    groups = (windows[i : i + each] for i in range(0, len(windows), each))
    longest = (max(group, key=lambda window: window.seconds) for group in groups)
    return html.bars(
        "Write times",
        [
            (
                window.seconds,
                f"{_time(window.time)}: {window.changes:,} changes in {window.seconds:.2f} s",
            )
            for window in longest
        ],
    )


def _events(events: Sequence[ReportedEvent]) -> str:
    if not events:
        return "<p>Nothing happened to tables but changes.</p>"
    return html.table(
        (html.cell(head, "left", "th") for head in ("when", "table", "what")),
        (
            html.cell(_time(event.time), "left")
            + html.cell(html.text(event.table), "left name")
            + html.cell(html.text(event.text), "left long")
            for event in reversed(events)
        ),
    )
