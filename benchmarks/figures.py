"""Put measured figures into the README and the docs, from the stored results of the report.

python -m benchmarks.figures     # rewrites the blocks between the marks in the pages

A block stands between ``<!-- figures: NAME -->`` and ``<!-- end of figures -->``. A test compares
the pages with what this makes.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from .goals import verdicts
from .harness import NotMeasured, Results
from .report import RESULTS

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    *(ROOT / "docs" / "explanation" / name for name in ("comparison.md", "benchmarks.md")),
    ROOT / "docs" / "how-to" / "sizing.md",
]

_MARKED = re.compile(
    r"(<!-- figures: (\w+) -->\n).*?(<!-- end of figures -->)", re.DOTALL | re.MULTILINE
)

# Case of the live benchmark → what a reader calls it. The stored results say what it does.
_LIVE = {
    "pgoutput_fast": "**pgoutput_fast**",
    "pg_recvlogical": "pg_recvlogical (C)",
    "pglogrepl, typed": "pglogrepl (Go)",
    "pypgoutput, decoders": "pypgoutput (Python)",
    "Debezium, SourceRecord": "Debezium engine (Java)",
}


def speed(results: Results) -> Iterator[str]:
    """Return the table of the README: the live clients, then a few figures of single stages."""
    machine = _shown_machine(results, "live")
    yield f"| CPU time per change, {machine} | 6 columns | mixed, up to 30 columns |"
    yield "|---|--:|--:|"
    yield from _live_rows(results)
    yield ""
    yield "| changes a second by the clock, on 2 cores | | measured on |"
    yield "|---|--:|---|"
    for name, shown, part in (
        ("sync, second window: 4 tables/DuckDB", "change log into a DuckDB file", "apply"),
        ("backlog: narrow/local", "slot into a Delta table, one process", "tables"),
        ("spark/narrow/read_segments", "change log into a Spark DataFrame", "spark"),
    ):
        yield f"| {shown} | {_rate(results, name)} | {_shown_machine(results, part)} |"


def live(results: Results) -> Iterator[str]:
    """Return what each live client took: time by the clock and memory, for both workloads."""
    yield "| changes a second | does per change | 6 columns | mixed, up to 30 | memory |"
    yield "|---|---|--:|--:|--:|"
    for case, shown in _LIVE.items():
        rates = [_rate(results, f"live/{rows}/{case}") for rows in ("narrow", "mixed")]
        memory = _median(results, f"live/narrow/{case}", "memory")
        does = results.versions[f"{case}, does"]
        version = results.versions[case].partition("-")[0]
        yield f"| {shown} {version} | {does} | {rates[0]} | {rates[1]} | {memory / 1e6:,.0f} MB |"


def decoder(results: Results) -> Iterator[str]:
    """Return how many times as fast as a plain decoder with `struct` the compiled one is."""
    yield "| speedup over a plain `struct` decoder in Python | 4 columns | 30 columns |"
    yield "|---|--:|--:|"
    for shown, ours, theirs, form in (
        ("messages, column values not read", "message/cython", "message/baseline", "text"),
        ("all columns as `str`", "texts/cython", "texts/baseline", "text"),
        ("all columns as typed Python objects, from text", "values/cython", "values/baseline",
         "text"),
        ("the same, from binary", "values/cython", "values/baseline", "binary"),
        ("Arrow columns, from text", "columns/Arrow", "columns/baseline", "text"),
        ("the same, from binary", "columns/Arrow", "columns/baseline", "binary"),
        ("Python implementation: messages", "message/python", "message/baseline", "text"),
        ("Python implementation: typed values", "values/python", "values/baseline", "text"),
    ):  # fmt: skip
        cells = []
        for rows in ("narrow", "wide"):
            ratio = results.ratio(f"{rows}/{form}/{ours}", f"{rows}/{form}/{theirs}")
            if ratio is None:
                raise NotMeasured(f"{rows}/{form}/{ours}")
            cells.append(f"{1 / ratio:.0f}×" if ratio < 0.1 else f"{1 / ratio:.1f}×")
        yield f"| {shown} | {cells[0]} | {cells[1]} |"


def goals(results: Results) -> Iterator[str]:
    """Return a sentence on how many goals this run met."""
    met = [verdict.met for verdict in verdicts(results)]
    yield f"The stored run meets {met.count(True)} goals and misses {met.count(False)}."


def sizing(results: Results) -> Iterator[str]:
    """Return what one process and Spark take for the same tables."""

    def rates(name: str) -> str:
        return " / ".join(_rate(results, f"backlog: {rows}/{name}") for rows in ("narrow", "mixed"))

    def cpu(name: str) -> str:
        cases = (f"backlog: {rows}/{name}" for rows in ("narrow", "mixed"))
        return " / ".join(f"{_median(results, case, 'cpu') * 1e6:.1f}" for case in cases)

    def late(name: str) -> str:
        case = f"delay: 5,000 changes/s/{name}"
        return " / ".join(
            f"{_median(results, case, metric) * 1e3:.0f}" for metric in ("median", "p95")
        )

    local, spark = (
        _rate(results, name)
        for name in ("segments: 4 tables/sync, local", "segments by Spark/4 tables")
    )
    yield from _lines(
        ("", "one process", "Spark, two cores"),
        ("---", "---", "---"),
        ("change log to tables, 4 tables, changes/s", local, spark),
        ("backlog of a slot, narrow / mixed rows, changes/s", rates("local"), rates("spark")),
        ("the capture alone, narrow / mixed, changes/s", rates("capture"), ""),
        ("CPU time of a change from the slot, narrow / mixed, µs", cpu("local"), cpu("spark")),
        (
            "from commit to change table at 5,000 changes/s, median / p95, ms",
            *(late("local"), late("spark")),
        ),
    )


def growth(results: Results) -> Iterator[str]:
    """Return what a sync costs as it has more tables, segments or columns."""

    def spent(name: str) -> float:
        return _median(results, f"growth: {name}", "cpu")

    copies = [spent(f"first copy/{n} tables") / n * 1e3 for n in (10, 100, 1000)]
    idle = {
        of: f"{spent(f'idle, each second/{of}'):.1%}".replace("%", " %")
        for of in ("10 tables", "1000 tables", "10000 segments")
    }
    window = {
        of: f"{spent(f'a window of one row/{of}') * 1e3:,.0f} ms"
        for of in ("10 tables", "1000 tables", "500 columns", "1500 columns")
    }
    each = spent("a row in each table/1000 tables") / 1000
    yield from _lines(
        ("what", "CPU time"),
        ("---", "---"),
        ("first copy of a small table", f"{min(copies):.0f} to {max(copies):.0f} ms"),
        (
            "idle, with 10 / 1,000 tables, of a core",
            f"{idle['10 tables']} / {idle['1000 tables']}",
        ),
        ("idle, with 10,000 segments, of a core", idle["10000 segments"]),
        (
            "a window of one row, with 10 / 1,000 tables",
            f"{window['10 tables']} / {window['1000 tables']}",
        ),
        ("a changed table in a window", f"{each * 1e3:.0f} ms"),
        (
            "a window of one row, with 500 / 1,500 columns",
            f"{window['500 columns']} / {window['1500 columns']}",
        ),
        ("merging a segment", f"{spent('merges/10000 segments') / 10_000 * 1e3:.1f} ms"),
    )


BLOCKS: dict[str, Callable[[Results], Iterator[str]]] = {
    "speed": speed,
    "live": live,
    "decoder": decoder,
    "goals": goals,
    "sizing": sizing,
    "growth": growth,
}


def _lines(*rows: tuple[str, ...]) -> Iterator[str]:
    for row in rows:
        yield f"| {' | '.join(row)} |"


def _live_rows(results: Results) -> Iterator[str]:
    for case, shown in _LIVE.items():
        narrow, mixed = (
            f"{_median(results, f'live/{rows}/{case}', 'cpu') * 1e6:.1f} µs"
            for rows in ("narrow", "mixed")
        )
        yield f"| {shown}: {results.versions[f'{case}, does']} | {narrow} | {mixed} |"


def _shown_machine(results: Results, part: str = "") -> str:
    """Return the processor and the day of the run, or of a part that was measured later."""
    day, _, machine = results.described.get(f"{part}, measured anew", "").partition(" on ")
    processor = (machine or results.described["machine"]).split(", ")[2]
    processor = processor.replace("(R)", "").removesuffix(" Processor")
    return f"{processor}, {(day or results.described['date'])[:10]}"


def _rate(results: Results, name: str) -> str:
    return f"{round(1 / _median(results, name, 'wall'), -3):,.0f}"


def _median(results: Results, name: str, metric: str) -> float:
    value = results.median(name, metric)
    if value is None:
        raise NotMeasured(f"{name} [{metric}]")
    return value


def filled(page: str, results: Results) -> str:
    """Return the text of a page with the figures in its blocks."""

    def block(found: re.Match[str]) -> str:
        begin, name, end = found.groups()
        text = "\n".join(BLOCKS[name](results))
        return f"{begin}{text}\n{end}"

    return _MARKED.sub(block, page)


def main() -> int:
    """Rewrite the pages."""
    results = Results.load(RESULTS)
    try:
        pages = {path: filled(path.read_text(encoding="utf-8"), results) for path in PAGES}
    except NotMeasured as error:
        print(f"error: {RESULTS} lacks {error}: run make bench-peers and make bench-full first",
              file=sys.stderr)  # fmt: skip
        return 1
    for path, text in pages.items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
