"""The report of a run of the demonstration: one HTML file, with everything in it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from pgoutput_fast._disk import write_whole
from pgoutput_fast.columnar.arrays import OPERATIONS, READ
from pgoutput_fast.errors import PgOutputError

if TYPE_CHECKING:
    from .run import Mark, Result, Sample

_OPERATIONS = (READ, *OPERATIONS.values())
"""A row of the snapshot is read."""

_LINES = {"tables": "in the tables", "captured": "captured"}

_PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>pgoutput-fast demo</title>
<style>
:root {{
  color-scheme: light dark;
  --page: #f6f7f9; --card: #ffffff; --ink: #1b2330; --soft: #5d6879; --line: #dfe3ea;
  --good: #17803d; --bad: #c0262d;
  --tables: #6b4fa3; --captured: #2563a8; --lag: #b45f06; --phase: #2563a8;
  --read: #2b7a64; --insert: #3573b9; --update: #d08a1d; --delete: #b0413e; --truncate: #6b7280;
}}
@media (prefers-color-scheme: dark) {{
  :root {{
    --page: #12161c; --card: #1b2129; --ink: #e6eaf0; --soft: #9aa5b5; --line: #2f3843;
    --good: #4cc776; --bad: #ff7a76;
    --tables: #ad93e6; --captured: #6aa9ee; --lag: #e79a4c; --phase: #6aa9ee;
    --read: #5cbfa3; --insert: #5b9be0; --update: #e3aa4e; --delete: #dc7671; --truncate: #97a1b0;
  }}
}}
* {{ box-sizing: border-box; }}
body {{ margin: 0; padding: 24px 16px 48px; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }}
main {{ max-width: 980px; margin: 0 auto; }}
h1 {{ font-size: 24px; line-height: 1.25; margin: 0 0 4px; }}
h2 {{ font-size: 16px; margin: 0 0 2px; }}
p {{ margin: 0 0 12px; color: var(--soft); }}
.verdict {{ font-weight: 600; color: var(--good); }}
.verdict.bad {{ color: var(--bad); overflow-wrap: anywhere; }}
section {{ background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 16px 18px; margin-top: 16px; }}
.figures {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(200px, 1fr)); gap: 12px;
  margin-top: 16px; }}
.figures div {{ background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 10px 14px; color: var(--soft); font-size: 13px; }}
.figures b {{ display: block; font-size: 21px; line-height: 1.3; color: var(--ink); }}
svg {{ display: block; width: 100%; overflow: visible; }}
svg text {{ font: 12px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif;
  fill: var(--soft); }}
.grid {{ stroke: var(--line); stroke-width: 1; }}
.mark {{ stroke: var(--soft); stroke-width: 1; stroke-dasharray: 2 3; }}
.legend {{ display: flex; flex-wrap: wrap; gap: 4px 18px; margin: 8px 0 10px; font-size: 13px;
  color: var(--soft); }}
.legend i {{ display: inline-block; width: 11px; height: 11px; border-radius: 3px;
  margin-right: 6px; }}
.chart {{ padding-left: 44px; }}
.bars {{ display: grid; grid-template-columns: max-content 1fr max-content; gap: 7px 12px;
  align-items: center; font-size: 13px; }}
.bars span {{ color: var(--soft); font-variant-numeric: tabular-nums; text-align: right; }}
.bar {{ display: contents; }}
.scroll {{ overflow-x: auto; }}
table {{ border-collapse: collapse; width: 100%; font-size: 13px;
  font-variant-numeric: tabular-nums; }}
th, td {{ padding: 6px 10px; text-align: right; border-bottom: 1px solid var(--line);
  white-space: nowrap; }}
th {{ color: var(--soft); font-weight: 500; }}
th:first-child, td:first-child {{ text-align: left; padding-left: 0; }}
td.text {{ text-align: left; white-space: normal; }}
tr:last-child td {{ border-bottom: 0; }}
td small {{ display: block; color: var(--soft); white-space: normal; min-width: 150px; }}
.yes {{ color: var(--good); }} .no {{ color: var(--bad); }}
@media (max-width: 560px) {{
  .bars {{ display: block; }}
  .bar {{ display: grid; grid-template-columns: 1fr max-content; gap: 2px 12px; }}
  .bar svg {{ grid-column: 1 / -1; grid-row: 2; margin-bottom: 9px; }}
  td small {{ display: none; }}
}}
</style>
</head>
<body>
<main>
<h1>From PostgreSQL's log to Delta tables, exactly once</h1>
<p>PostgreSQL {server}, Spark {spark}, decoder {implementation}{fallback}, seed {seed}</p>
<p class="verdict{bad}">{verdict}</p>
<div class="figures">{figures}</div>
<section>
<h2>How far the tables were behind</h2>
<p>In seconds: all that was committed so long ago was in the tables. The lines are what happened;
their texts are below.</p>
<div class="chart">{lag}</div>
</section>
<section>
<h2>Changes in the tables</h2>
<p>Of each of the two processes, as the first was killed: in the tables, and captured on the way
there. The rows of the snapshot count once they are in the tables.</p>
<div class="legend">{lines}</div>
<div class="chart">{progress}</div>
</section>
<section>
<h2>What happened</h2>
<div class="scroll">{marks}</div>
</section>
<section>
<h2>Changes per table</h2>
<div class="legend">{operations}</div>
<div class="bars">{bars}</div>
</section>
<section>
<h2>Where the time went</h2>
<p>{seconds:.1f} seconds in all.</p>
<div class="bars">{phases}</div>
</section>
<section>
<h2>Tables</h2>
<p>Each row of the server's tables was compared with the row of the Delta table.</p>
<div class="scroll">{table}</div>
</section>
<section>
<h2>Types</h2>
<p>The values of all tables, by the families of PostgreSQL's types.</p>
<div class="scroll">{families}</div>
</section>
</main>
</body>
</html>
"""


def write_report(result: Result, path: Path) -> None:
    """Write the report of a run.

    Raises
    ------
    PgOutputError
        The file can't be written.
    """
    try:
        write_whole(path, [make_report(result)])
    except OSError as error:
        raise PgOutputError(f"can't write the report {path}: {error.strerror}") from error


def make_report(result: Result) -> str:
    """The report of a run, as HTML."""
    return _PAGE.format(
        server=escape(result.server_version),
        spark=escape(result.spark_version),
        implementation=escape(result.implementation),
        fallback=f" ({escape(result.fallback_reason)})" if result.fallback_reason else "",
        seed=result.seed,
        bad="" if result.is_right else " bad",
        verdict=escape(result.verdict),
        figures="".join(_figures(result)),
        lag=_chart(
            "Seconds behind",
            [("lag", _of_runs(result.samples, lambda one: one.lag_seconds))],
            result.marks, result.seconds,
        ),
        lines=_legend(_LINES.items()),
        progress=_chart(
            "Changes",
            [
                ("captured", _of_runs(result.samples, lambda one: one.captured)),
                ("tables", _of_runs(result.samples, lambda one: one.changes)),
            ],
            result.marks, result.seconds,
        ),
        marks=_marks(result.marks),
        operations=_legend((name, name) for name in _OPERATIONS),
        bars="".join(_operation_bars(result)),
        seconds=result.seconds,
        phases="".join(_phase_bars(result)),
        table=_table(result),
        families=_families(result),
    )  # fmt: skip


def _figures(result: Result) -> Iterable[str]:
    rates = result.rates
    for value, label in (
        (f"{result.changes:,}", "changes in the tables"),
        (f"{rates.capture:,.0f}/s", "changes captured, while a backlog was worked off"),
        (f"{rates.decode:,.0f}/s", "changes decoded into Arrow columns, by one thread"),
        (f"{rates.change_tables:,.0f}/s", "changes into change tables, decoding included"),
        (f"{rates.state_tables:,.0f}/s", "changes from there into state tables"),
        (
            f"{result.caught_up_seconds:.1f} s",
            f"from the restart to the last of {result.backlog:,} changes that waited",
        ),
        (f"{sum(table.rows for table in result.tables):,}", "rows compared with the server's"),
    ):
        yield f"<div><b>{value}</b>{label}</div>"


def _legend(entries: Iterable[tuple[str, str]]) -> str:
    return "".join(
        f'<span><i style="background:var(--{name})"></i>{escape(label)}</span>'
        for name, label in entries
    )


_HEIGHT = 180  # pixels of a chart's area

_Line = list[tuple[float, float]]


def _of_runs(samples: Sequence[Sample], value: Callable[[Sample], float | None]) -> list[_Line]:
    """A line of each run of the sync: seconds, and a value where it is known."""
    lines: dict[int, _Line] = {}
    for one in samples:
        found = value(one)
        if found is not None:
            lines.setdefault(one.run, []).append((one.at, found))
    return list(lines.values())


def _chart(
    title: str, lines: Sequence[tuple[str, list[_Line]]], marks: Sequence[Mark], seconds: float
) -> str:
    """A chart of values over time.

    Horizontal positions are percentages, so that text keeps its size. Hence a line consists of
    short ones: the points of a polyline can't be given so.
    """
    end = max(seconds, 1e-9)
    top = max((y for _, of in lines for line in of for _, y in line), default=0.0)
    step = _round_up(max(top, 1e-9) / 4)
    high = step * max(1, math.ceil(top / step))
    parts = [f'<svg height="{_HEIGHT + 28}" role="img" aria-label="{escape(title)}">']
    for n in range(round(high / step) + 1):
        y = _y(n * step, high)
        parts.append(f'<line class="grid" x1="0" x2="100%" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="-8" y="{y + 4:.1f}" text-anchor="end">{_short(n * step)}</text>')
    tick = _round_up(end / 6)
    for n in range(int(end / tick) + 1):
        x = 100 * n * tick / end
        parts.append(
            f'<text x="{x:.2f}%" y="{_HEIGHT + 20}" text-anchor="middle">{n * tick:g} s</text>'
        )
    for mark in marks:
        x = 100 * mark.at / end
        parts.append(
            f'<line class="mark" x1="{x:.2f}%" x2="{x:.2f}%" y1="0" y2="{_HEIGHT}">'
            f"<title>{escape(mark.text)}</title></line>"
        )
    for name, of in lines:
        for line in of:
            parts += _segments(name, line, end, high)
    parts.append("</svg>")
    return "".join(parts)


def _segments(name: str, line: _Line, end: float, high: float) -> Iterable[str]:
    for (x1, y1), (x2, y2) in itertools.pairwise(line):
        yield (
            f'<line x1="{100 * x1 / end:.3f}%" x2="{100 * x2 / end:.3f}%" y1="{_y(y1, high):.1f}" '
            f'y2="{_y(y2, high):.1f}" stroke="var(--{name})" stroke-width="2" '
            'stroke-linecap="round"/>'
        )


def _y(value: float, high: float) -> float:
    return _HEIGHT - _HEIGHT * value / high


def _round_up(value: float) -> float:
    """The least of 1, 2, 2.5 or 5 times a power of ten that is not less than `value`."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(
        (power * factor for factor in (1, 2, 2.5, 5) if power * factor >= value), power * 10
    )


def _short(value: float) -> str:
    for size, letter in ((1_000_000, "M"), (1000, "k")):
        if value >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"


def _marks(marks: Sequence[Mark]) -> str:
    rows = "".join(
        f'<tr><td>{mark.at:.1f} s</td><td class="text">{escape(mark.text)}</td></tr>'
        for mark in marks
    )
    return f"<table><tbody>{rows}</tbody></table>"


def _operation_bars(result: Result) -> Iterable[str]:
    most = max((table.contents.changes for table in result.tables), default=0) or 1
    for table in sorted(result.tables, key=lambda table: -table.contents.changes):
        x = 0.0
        rects = []
        for operation in _OPERATIONS:
            count = table.contents.operations.get(operation, 0)
            width = 100 * count / most
            if count:
                rects.append(
                    f'<rect x="{x:.3f}%" y="0" width="{width:.3f}%" height="18" '
                    f'fill="var(--{operation})"><title>{count:,} × {operation}</title></rect>'
                )
            x += width
        yield _bar(table.name, "".join(rects), f"{table.contents.changes:,}")


def _phase_bars(result: Result) -> Iterable[str]:
    end = max(result.seconds, 1e-9)
    for phase in result.phases:
        yield _bar(
            phase.name,
            f'<rect x="{100 * phase.start / end:.3f}%" y="0" '
            f'width="{max(100 * (phase.end - phase.start) / end, 0.2):.3f}%" height="18" '
            'fill="var(--phase)" fill-opacity="0.85"/>',
            f"{phase.end - phase.start:.1f} s",
        )


def _bar(name: str, rects: str, figure: str) -> str:
    return (
        f'<div class="bar"><b>{escape(name)}</b><svg height="18">{rects}</svg>'
        f"<span>{figure}</span></div>"
    )


def _table(result: Result) -> str:
    head = "".join(
        f"<th>{heading}</th>"
        for heading in ("table", "rows", "changes", "changes MB", "rows MB", "equal")
    )
    rows = []
    for table in result.tables:
        equal = (
            '<td class="yes">✓</td>'
            if table.state == "equal"
            else f'<td class="no">{escape(table.state)}</td>'
        )
        contents = table.contents
        cells = (
            f"{escape(table.name)}<small>{escape(table.about)}</small>",
            f"{table.rows:,}",
            f"{contents.changes:,}",
            f"{contents.change_bytes / 1e6:.1f}",
            f"{contents.state_bytes / 1e6:.1f}",
        )
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + equal + "</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _families(result: Result) -> str:
    rows = "".join(
        f"<tr><td>{escape(name)}</td><td>{family.columns:,}</td><td>{family.values:,}</td>"
        f"<td>{family.nulls:,}</td></tr>"
        for name, family in result.families.items()
    )
    head = "<th>family</th><th>columns</th><th>values</th><th>and NULLs</th>"
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
