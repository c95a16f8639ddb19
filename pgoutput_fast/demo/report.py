"""The report of a run of the demonstration: one HTML file, with everything in it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from pgoutput_fast.columnar.arrays import OPERATIONS
from pgoutput_fast.errors import PgOutputError, counted

if TYPE_CHECKING:
    from .run import Result, Span

_STAGES = {
    "make": "changes made by the server",
    "capture": "capture (frames)",
    "decode": "decode into change tables (changes)",
    "state": "current-state tables (changes)",
    "compare": "compare with the server (rows)",
}

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
  --make: #7a8698; --capture: #2563a8; --decode: #b45f06; --state: #6b4fa3; --compare: #2b7a64;
  --insert: #3573b9; --update: #d08a1d; --delete: #b0413e; --truncate: #6b7280;
}}
@media (prefers-color-scheme: dark) {{
  :root {{
    --page: #12161c; --card: #1b2129; --ink: #e6eaf0; --soft: #9aa5b5; --line: #2f3843;
    --good: #4cc776; --bad: #ff7a76;
    --make: #8d99aa; --capture: #6aa9ee; --decode: #e79a4c; --state: #ad93e6; --compare: #5cbfa3;
    --insert: #5b9be0; --update: #e3aa4e; --delete: #dc7671; --truncate: #97a1b0;
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
.figures {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(140px, 1fr)); gap: 12px;
  margin-top: 16px; }}
.figures div {{ background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 10px 14px; color: var(--soft); font-size: 13px; }}
.figures b {{ display: block; font-size: 21px; line-height: 1.3; color: var(--ink); }}
svg {{ display: block; width: 100%; overflow: visible; }}
svg text {{ font: 12px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif;
  fill: var(--soft); }}
.grid {{ stroke: var(--line); stroke-width: 1; }}
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
<h1>From PostgreSQL's log to Spark's tables</h1>
<p>PostgreSQL {server}, Spark {spark}, decoder {implementation}{fallback}, seed {seed}</p>
<p class="verdict{bad}">{verdict}</p>
<div class="figures">{figures}</div>
<section>
<h2>Throughput over time</h2>
<p>Per second, on a logarithmic scale. Spark works on one table after the other.</p>
<div class="legend">{stages}</div>
<div class="chart">{throughput}</div>
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
<p>A check is one value of one row that was compared with what the server's COPY says.</p>
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
        path.write_text(make_report(result), encoding="utf-8")
    except OSError as error:
        raise PgOutputError(f"can't write the report {path}: {error.strerror}") from error


def make_report(result: Result) -> str:
    """The report of a run, as HTML."""
    difference = result.difference
    checks = sum(table.checks for table in result.tables)
    if difference is None:
        verdict = f"All {len(result.tables)} tables equal the server's: {checks:,} values compared."
    else:
        verdict = f"Not equal. {difference}"
    return _PAGE.format(
        server=escape(result.server_version),
        spark=escape(result.spark_version),
        implementation=escape(result.implementation),
        fallback=f" ({escape(result.fallback_reason)})" if result.fallback_reason else "",
        seed=result.seed,
        bad="" if difference is None else " bad",
        verdict=escape(verdict),
        figures="".join(_figures(result, checks)),
        stages=_legend((name, label) for name, label in _STAGES.items()),
        throughput=_throughput(result.spans, result.seconds),
        operations=_legend((name, name) for name in OPERATIONS.values()),
        bars="".join(_operation_bars(result)),
        seconds=result.seconds,
        phases="".join(_phase_bars(result)),
        table=_table(result),
        families=_families(result),
    )


def _figures(result: Result, checks: int) -> Iterable[str]:
    for value, label in (
        (f"{result.changes:,}", "changes decoded"),
        (f"{result.transactions:,}", "transactions"),
        (f"{sum(table.rows for table in result.tables):,}", "rows left in the tables"),
        (f"{checks:,}", "values compared"),
        (
            f"{result.frame_bytes / 1e6:,.1f} MB",
            f"of frames, in {counted(result.segments, 'segment')}",
        ),
        (f"{_per_second(result.frames, result.capture_seconds)}/s", "frames captured"),
    ):
        yield f"<div><b>{value}</b>{label}</div>"


def _per_second(amount: int, seconds: float) -> str:
    return f"{amount / seconds:,.0f}" if seconds > 0 else "–"


def _legend(entries: Iterable[tuple[str, str]]) -> str:
    return "".join(
        f'<span><i style="background:var(--{name})"></i>{escape(label)}</span>'
        for name, label in entries
    )


_HEIGHT = 220  # pixels of the chart's area


def _throughput(spans: list[Span], seconds: float) -> str:
    """A chart of rates over time.

    Horizontal positions are percentages, so that text keeps its size.
    """
    rates = [(span, span.amount / max(span.end - span.start, 1e-9)) for span in spans]
    exponents = [math.log10(max(rate, 1)) for _, rate in rates] or [0.0]
    low = math.floor(min(exponents))
    high = max(math.ceil(max(exponents)), low + 1)
    parts = [f'<svg height="{_HEIGHT + 28}" role="img" aria-label="Throughput over time">']
    for exponent in range(low, high + 1):
        y = _HEIGHT - _HEIGHT * (exponent - low) / (high - low)
        parts.append(f'<line class="grid" x1="0" x2="100%" y1="{y:.1f}" y2="{y:.1f}"/>')
        label = _short(10**exponent)
        parts.append(f'<text x="-8" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    end = max(seconds, 1e-9)
    tick = _round_up(end / 6)
    at = 0.0
    while at <= end:
        x = 100 * at / end
        parts.append(f'<text x="{x:.2f}%" y="{_HEIGHT + 20}" text-anchor="middle">{at:g} s</text>')
        at += tick
    for span, rate in rates:
        height = max(_HEIGHT * (math.log10(max(rate, 1)) - low) / (high - low), 1)
        parts.append(
            f'<rect x="{100 * span.start / end:.3f}%" y="{_HEIGHT - height:.1f}" '
            f'width="{100 * (span.end - span.start) / end:.3f}%" height="{height:.1f}" '
            f'fill="var(--{span.stage})" fill-opacity="0.85">'
            f"<title>{escape(span.table or span.stage)}: {rate:,.0f}/s "
            f"({span.amount:,} in {span.end - span.start:.2f} s)</title></rect>"
        )
    parts.append("</svg>")
    return "".join(parts)


def _round_up(value: float) -> float:
    """The least of 1, 2, 2.5 or 5 times a power of ten that is not less than `value`."""
    power = 1.0
    while power * 10 <= value:
        power *= 10
    while power > value and power > 1e-6:
        power /= 10
    return next(
        (power * factor for factor in (1, 2, 2.5, 5) if power * factor >= value), power * 10
    )


def _short(value: float) -> str:
    for size, letter in ((1_000_000, "M"), (1000, "k")):
        if value >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"


def _operation_bars(result: Result) -> Iterable[str]:
    most = max((table.changes for table in result.tables), default=0) or 1
    for table in sorted(result.tables, key=lambda table: -table.changes):
        x = 0.0
        rects = []
        for operation in OPERATIONS.values():
            count = table.operations.get(operation, 0)
            width = 100 * count / most
            if count:
                rects.append(
                    f'<rect x="{x:.3f}%" y="0" width="{width:.3f}%" height="18" '
                    f'fill="var(--{operation})"><title>{count:,} × {operation}</title></rect>'
                )
            x += width
        yield _bar(table.name, "".join(rects), f"{table.changes:,}")


def _phase_bars(result: Result) -> Iterable[str]:
    end = max(result.seconds, 1e-9)
    for phase in result.phases:
        yield _bar(
            phase.name,
            f'<rect x="{100 * phase.start / end:.3f}%" y="0" '
            f'width="{max(100 * (phase.end - phase.start) / end, 0.2):.3f}%" height="18" '
            'fill="var(--capture)" fill-opacity="0.85"/>',
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
        for heading in (
            "table", "rows", "changes", "checks", "changes MB", "state MB", "decode/s", "state/s",
            "equal",
        )
    )  # fmt: skip
    rows = []
    for table in result.tables:
        equal = (
            f'<td class="no">{table.differing:,} differ</td>'
            if table.differing
            else '<td class="yes">✓</td>'
        )
        cells = (
            f"{escape(table.name)}<small>{escape(table.about)}</small>",
            f"{table.rows:,}",
            f"{table.changes:,}",
            f"{table.checks:,}",
            f"{table.change_bytes / 1e6:.1f}",
            f"{table.state_bytes / 1e6:.1f}",
            _per_second(table.changes, table.decode_seconds),
            _per_second(table.changes, table.state_seconds),
        )
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + equal + "</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _families(result: Result) -> str:
    rows = "".join(
        f"<tr><td>{escape(name)}</td><td>{family.columns:,}</td><td>{family.values:,}</td>"
        f"<td>{family.nulls:,}</td></tr>"
        for name, family in result.families.items()
    )
    head = "<th>family</th><th>columns</th><th>values compared</th><th>and NULLs</th>"
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
