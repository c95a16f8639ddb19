"""The report of a sync: one HTML file, with everything in it."""

from __future__ import annotations

import datetime
from html import escape
from typing import TYPE_CHECKING, NamedTuple

from rich.filesize import decimal

from .._disk import write_whole
from .._version import __version__
from ..errors import PgOutputError, counted, printable
from ..lsn import format_lsn
from ..names import qualified

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from ..apply.syncing import SyncProgress
    from ..apply.targets import Held
    from ..watching.sync_figures import SyncFigures


class Moment(NamedTuple):
    """Something that happened to a table. Fields: time (seconds since 1970), table, text."""

    time: float
    table: str
    text: str


class Written(NamedTuple):
    """A window that was written. Fields: time (seconds since 1970), changes, seconds."""

    time: float
    changes: int
    seconds: float


class Report(NamedTuple):
    """What a report says.

    Attributes
    ----------
    source, target : str
    begun, made : float
        When the command began, and when this was made, in seconds since 1970.
    figures : SyncFigures or None
        None: it ended before it had looked at the tables.
    events : list of Moment
        The newest.
    windows : list of Written
        The newest.
    is_over : bool
        Whether the command has ended.
    error : str or None
        That by which it ended.
    passes : bool
        Whether this may pass by itself.
    """

    source: str
    target: str
    begun: float
    made: float
    figures: SyncFigures | None
    events: list[Moment]
    windows: list[Written]
    is_over: bool
    error: str | None = None
    passes: bool = False


_PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
{refresh}<title>pgoutput-fast sync</title>
<style>
:root {{
  color-scheme: light dark;
  --page: #f6f7f9; --card: #ffffff; --ink: #1b2330; --soft: #5d6879; --line: #dfe3ea;
  --good: #17803d; --bad: #c0262d; --wait: #9a5b00; --bar: #2563a8;
}}
@media (prefers-color-scheme: dark) {{
  :root {{
    --page: #12161c; --card: #1b2129; --ink: #e6eaf0; --soft: #9aa5b5; --line: #2f3843;
    --good: #4cc776; --bad: #ff7a76; --wait: #e3aa4e; --bar: #6aa9ee;
  }}
}}
* {{ box-sizing: border-box; }}
body {{ margin: 0; padding: 24px 16px 48px; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }}
main {{ max-width: 1400px; margin: 0 auto; }}
h1 {{ font-size: 24px; line-height: 1.25; margin: 0 0 4px; overflow-wrap: anywhere; }}
h2 {{ font-size: 16px; margin: 0 0 2px; }}
p {{ margin: 0 0 12px; color: var(--soft); overflow-wrap: anywhere; }}
.verdict {{ font-weight: 600; }}
section {{ background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 16px 18px; margin-top: 16px; }}
.figures {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(145px, 1fr)); gap: 12px;
  margin-top: 16px; }}
.figures div {{ background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 10px 12px; color: var(--soft); font-size: 13px; }}
.figures b {{ display: block; font-size: 17px; line-height: 1.3; color: var(--ink);
  overflow-wrap: anywhere; }}
svg {{ display: block; width: 100%; }}
rect {{ fill: var(--bar); }}
.scroll {{ overflow-x: auto; }}
table {{ border-collapse: collapse; width: 100%; font-size: 13px;
  font-variant-numeric: tabular-nums; }}
th, td {{ padding: 6px 10px; text-align: right; border-bottom: 1px solid var(--line);
  white-space: nowrap; }}
th {{ color: var(--soft); font-weight: 500; }}
th:first-child, td:first-child {{ padding-left: 0; }}
.left {{ text-align: left; }}
.name, .long {{ white-space: normal; overflow-wrap: anywhere; }}
.name {{ min-width: 130px; }}
.time {{ white-space: normal; min-width: 100px; }}
.long {{ min-width: 160px; }}
tr:last-child td {{ border-bottom: 0; }}
.good {{ color: var(--good); }} .bad {{ color: var(--bad); }} .wait {{ color: var(--wait); }}
</style>
</head>
<body>
<main>
<h1>{target}</h1>
<p>From {source}. pgoutput-fast {version}, from {begun} to {made}{goes_on}.</p>
{verdict}
{content}
</main>
</body>
</html>
"""

_CONTENT = """\
<div class="figures">{figures}</div>
<section>
<h2>Tables</h2>
<p>Changes and seconds are those of this run. What was committed before its LSN is in a table.</p>
<div class="scroll">{tables}</div>
</section>
<section>
<h2>Write times</h2>
<p>{windows}</p>
{chart}
</section>
<section>
<h2>What happened to tables</h2>
{events}
</section>"""


def write_report(report: Report, path: Path) -> None:
    """Write a report; one that is there is replaced at once.

    Raises
    ------
    PgOutputError
        The file can't be written.
    """
    try:
        write_whole(path, [make_report(report)])
    except OSError as error:
        raise PgOutputError(f"can't write the report {path}: {error.strerror or error}") from error


def make_report(report: Report) -> str:
    """The report, as HTML."""
    return _PAGE.format(
        target=_text(report.target),
        source=_text(report.source),
        version=escape(__version__),
        begun=_time(report.begun),
        made=_time(report.made),
        refresh="" if report.is_over else '<meta http-equiv="refresh" content="60">\n',
        goes_on="" if report.is_over else "; it goes on, and this page is renewed each minute",
        verdict="\n".join(_verdict(report)),
        content="" if report.figures is None else _content(report, report.figures),
    )


def _content(report: Report, figures: SyncFigures) -> str:
    return _CONTENT.format(
        figures="".join(_figures(report, figures)),
        tables=_tables(figures.progress, has_failed=report.error is not None),
        windows=_windows_text(report.windows),
        chart=_chart(report.windows),
        events=_events(report.events),
    )


def _verdict(report: Report) -> Iterator[str]:
    """What is to be known first, as paragraphs."""
    progress = None if report.figures is None else report.figures.progress
    wrong: list[str] = []
    if progress is not None:
        wrong += [f"{counted(len(progress.stale), 'table')} not kept up to date"] * bool(
            progress.stale
        )
        wrong += [f"{counted(len(progress.paused), 'table')} paused"] * bool(progress.paused)
        wrong += [f"{counted(len(progress.waiting), 'table')} to be copied"] * bool(
            progress.waiting
        )
    if report.error is None:
        which = "All published tables" if progress and progress.left else "All tables"
        is_bad = progress is not None and bool(progress.stale or progress.paused)
        kind = "bad" if is_bad else "wait" if wrong else "good"
        text = ", ".join(wrong) or f"{which} are kept up to date."
        yield f'<p class="verdict {kind}">{escape(text)}</p>'
        return
    ended = f"The sync ended by an error at {_time(report.made)}: {printable(report.error)}"
    yield f'<p class="verdict bad">{escape(ended)}</p>'
    stand = "It had not looked at the tables yet, and has written nothing."
    goes_on = "The next call begins again."
    if progress is not None:
        stand = f"The tables stand as of {format_lsn(progress.lsn)}, and nothing comes into them."
        stand += f" Of them {' and '.join(wrong)}." if wrong else ""
        goes_on = "The next call goes on from there."
    again = (
        "The error may pass by itself."
        if report.passes
        else "The error does not pass by itself: do first what it says."
    )
    yield f"<p>{escape(stand)} {goes_on} {again}</p>"


def _text(text: str) -> str:
    """A text of elsewhere, such as a name, as HTML."""
    return escape(printable(text))


def _time(moment: float) -> str:
    made = datetime.datetime.fromtimestamp(moment, datetime.timezone.utc)
    return f"{made:%Y-%m-%d %H:%M:%S} UTC"


def _figures(report: Report, figures: SyncFigures) -> Iterator[str]:
    progress = figures.progress
    seconds = max(report.made - report.begun, 1e-3)
    lag_bytes, lag_seconds = figures.lag_bytes, figures.lag_seconds
    for value, label in (
        (f"{progress.changes:,}", "changes written"),
        (f"{progress.changes / seconds:,.0f}/s", "on average"),
        (f"{len(progress.held):,}", "tables"),
        (f"{progress.windows:,}", "windows"),
        ("unknown" if lag_bytes is None else decimal(lag_bytes), "of the log behind"),
        ("unknown" if lag_seconds is None else f"{lag_seconds:.1f} s", "behind"),
        (format_lsn(progress.lsn), "is where the tables are"),
    ):
        yield f"<div><b>{value}</b>{label}</div>"


def _table(heads: Iterable[str], rows: Iterable[str]) -> str:
    return f"<table><thead><tr>{''.join(heads)}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _tables(progress: SyncProgress, *, has_failed: bool) -> str:
    if not progress.held:
        return "<p>None has come yet.</p>"
    heads = ["<th class=left>table</th>", "<th class=left>in the target</th>"]
    heads += [
        f"<th>{head}</th>"
        for head in ("columns", "changes", "seconds", "LSN", "copied as of", "newest commit")
    ]
    heads.append("<th class=left>state</th>")
    ordered = sorted(
        progress.held, key=lambda one: (-progress.tables.get(qualified(one), 0), qualified(one))
    )
    return _table(heads, (_row(progress, one, has_failed=has_failed) for one in ordered))


def _row(progress: SyncProgress, held: Held, *, has_failed: bool) -> str:
    name = qualified(held)
    stored = progress.names[held.relation_id]
    has_left = stored in progress.left
    if held.paused is not None:
        since = f"paused since {_time(held.paused.since)}: {held.paused.reason}"
        state = f'<td class="left long bad">{_text(since)}</td>'
    elif held.stale is not None:
        state = f'<td class="left long bad">{_text(held.stale)}</td>'
    elif has_left:
        state = '<td class="left long">not published any more, or dropped: it stays as it is</td>'
    elif name in progress.waiting:
        state = '<td class="left wait">waits until it is copied</td>'
    elif has_failed:
        state = f'<td class="left wait">stands as of {format_lsn(held.lsn)}</td>'
    else:
        state = '<td class="left good">up to date</td>'
    if held.version > 1:
        stored = f"{stored} (version {held.version})"
    if held.gap is not None:
        stored += f"; another program changed its changes before {format_lsn(held.gap)}"
    cells = (
        f"{len(held.columns):,}",
        # By name: another table may have that of one that has left.
        "–" if has_left else f"{progress.tables.get(name, 0):,}",
        "–" if has_left else f"{progress.seconds.get(name, 0.0):.2f}",
        format_lsn(held.lsn),
        format_lsn(held.copy_lsn) if held.copy_lsn else "–",
    )
    newest = _time(held.commit_time / 1e6) if held.commit_time is not None else "–"
    return (
        f'<tr><td class="left name"><b>{_text(name)}</b></td>'
        f'<td class="left name">{_text(stored)}</td>'
        + "".join(f"<td>{cell}</td>" for cell in cells)
        + f"<td class=time>{newest}</td>{state}</tr>"
    )


def _windows_text(windows: Sequence[Written]) -> str:
    if not windows:
        return "Nothing was written."
    seconds = sorted(one.seconds for one in windows)
    middle = seconds[len(seconds) // 2]
    return (
        f"The last {counted(len(windows), 'window')}: {middle:.2f} s in the middle, "
        f"{seconds[-1]:.2f} s at most, {sum(seconds):.1f} s together."
    )


_BARS = 300  # the most that a chart has


def _chart(windows: Sequence[Written]) -> str:
    """Bars of seconds, in the order of windows; where there are many, the longest of some."""
    if not windows:
        return ""
    each = -(-len(windows) // _BARS)
    groups = [windows[i : i + each] for i in range(0, len(windows), each)]
    longest = max(1e-9, *(one.seconds for one in windows))
    bars = []
    for number, group in enumerate(groups):
        most = max(group, key=lambda one: one.seconds)
        height = max(100 * most.seconds / longest, 1.0)
        bars.append(
            f'<rect x="{100 * number / len(groups):.3f}%" y="{100 - height:.1f}%" '
            f'width="{80 / len(groups):.3f}%" height="{height:.1f}%"><title>{_time(most.time)}: '
            f"{counted(most.changes, 'change')} in {most.seconds:.2f} s</title></rect>"
        )
    return f'<svg height="120" role="img" aria-label="Write times">{"".join(bars)}</svg>'


def _events(events: Sequence[Moment]) -> str:
    if not events:
        return "<p>Nothing but changes came.</p>"
    heads = [f"<th class=left>{head}</th>" for head in ("when", "table", "what")]
    rows = (
        f"<tr><td class=left>{_time(one.time)}</td>"
        f'<td class="left name">{_text(one.table)}</td>'
        f'<td class="left long">{_text(one.text)}</td></tr>'
        for one in reversed(events)
    )
    return f'<div class="scroll">{_table(heads, rows)}</div>'
