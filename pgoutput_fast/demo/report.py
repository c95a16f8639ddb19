"""Make the report of a run of the demo: one HTML file without references to other files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pgoutput_fast import html_page as html

if TYPE_CHECKING:
    from .run import Result, TableRun

_SLOTS = 120  # bars in the chart


def make_report(result: Result) -> str:
    """Return the report of a run as HTML."""
    kind = "good" if result.is_right else "bad"
    events = (
        html.cell(f"{at:.1f} s") + html.cell(html.text(label), "left long")
        for at, label in result.events
    )
    return html.page(
        "pgoutput-fast demo",
        f"From PostgreSQL to {result.writer.split()[0]} tables, each change exactly once",
        result.versions,
        f'<p class="verdict {kind}">{html.text(result.verdict)}</p>',
        html.figures(
            (f"{result.changes:,}", "changes in the tables"),
            (f"{sum(table.rows for table in result.tables):,}", "rows compared with the server's"),
            (f"{result.backlog:,}", "changes made while the sync was down"),
            (f"{result.caught_up_seconds:.1f} s", "to catch up after the restart"),
            (f"{result.seconds:.0f} s", "from start to end"),
        ),
        html.section(
            "Lag: how far the tables were behind the server",
            "Seconds of lag, from the start of the run to its end. The highest bar is "
            f"{_most(result):.1f} s. There is no bar where no sync ran.",
            html.bars("Seconds behind", _lags(result)),
        ),
        html.section("What happened", "", html.table((), events)),
        html.section(
            "Tables",
            "verify compared each row of the server with the row in the target.",
            html.table(
                (
                    html.cell("table", "left", "th"),
                    *(html.cell(head, tag="th") for head in ("rows", "changes", "equal")),
                ),
                map(_row, result.tables),
            ),
        ),
    )


def _lags(result: Result) -> list[tuple[float | None, str]]:
    """Return the largest lag in each of `_SLOTS` equal parts of the run, with a label."""
    slot = max(result.seconds, 1e-9) / _SLOTS
    most: list[float | None] = [None] * _SLOTS
    for at, lag in result.lags:
        if lag is not None:
            i = min(int(at / slot), _SLOTS - 1)
            most[i] = max(most[i] or 0.0, lag)
    return [(lag, f"{i * slot:.0f} s: {lag or 0.0:.1f} s behind") for i, lag in enumerate(most)]


def _most(result: Result) -> float:
    return max((lag for _, lag in result.lags if lag is not None), default=0.0)


def _row(table: TableRun) -> str:
    equal = table.state == "equal"
    return (
        html.cell(f"<b>{html.text(table.name)}</b><br>{html.text(table.about)}", "left name")
        + html.cell(f"{table.rows:,}")
        + html.cell(f"{table.changes:,}")
        + html.cell("✓" if equal else html.text(table.state), "good" if equal else "bad")
    )
