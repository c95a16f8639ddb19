"""Write the report: tables and plots of stored results.

python -m benchmarks.report     # report/README.md and its plots, from report/results.json
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from . import columns, decoders, features
from .goals import goal_table, limits
from .harness import Results, grouped, nanoseconds, table, times
from .peers.ways import OURS, WAYS

DIRECTORY = Path(__file__).with_name("report")
RESULTS = DIRECTORY / "results.json"

# Level → the case by which the others are divided; "baseline" for all other levels.
REFERENCES = {"columns": "C layout"}


def level_tables(results: Results, metric: str = "cpu") -> Iterator[tuple[str, str]]:
    """Each level and its table: ns per item ± the distance of the quartiles, and the ratios."""
    cells: dict[str, dict[str, dict[str, str]]] = {}
    for name in results.names():
        parts = name.split("/")
        if len(parts) != 4 or results.median(name, metric) is None:
            continue
        workload, level, who = "/".join(parts[:2]), parts[2], parts[3]
        value = results.median(name, metric)
        assert value is not None
        if metric == "memory":
            text = f"{value / 1e6:,.1f} MB"
        else:
            text = f"{nanoseconds(value)} ±{results.spread(name, metric):.0%}"
            reference = REFERENCES.get(level, "baseline")
            ratio = results.ratio(f"{workload}/{level}/{reference}", name, metric)
            if ratio is not None and who != reference:
                text += f" ({times(ratio)})"
        cells.setdefault(level, {}).setdefault(who, {})[workload] = text
    for level, rows in cells.items():
        workloads = list(dict.fromkeys(name for row in rows.values() for name in row))
        lines = [["", *workloads]]
        lines += [[who, *(row.get(name, "") for name in workloads)] for who, row in rows.items()]
        yield level, table(lines)


def live_tables(results: Results) -> Iterator[tuple[str, str]]:
    """Each workload of the live benchmark and its table."""
    for workload in ("live/narrow", "live/mixed"):
        names = [name for name in results.names() if name.startswith(workload + "/")]
        if not names:
            continue
        lines = [
            ["peer", "version", "per change", "changes/s", "CPU µs/change", "whole process",
             "walsender", "peak RSS MB"],
        ]  # fmt: skip
        for name in sorted(names, key=lambda name: results.median(name) or 0):
            who = name.rpartition("/")[2]
            server = results.median(name, "server")
            wall, memory = results.median(name, "wall"), results.median(name, "memory")
            assert wall is not None
            assert memory is not None
            lines.append(
                [
                    *(who, results.versions.get(who, ""), results.versions.get(f"{who}, does", "")),
                    *(f"{1 / wall:,.0f}", microseconds(results.median(name))),
                    *(microseconds(results.median(name, "process")), microseconds(server)),
                    f"{memory / 1e6:,.0f}",
                ]
            )
        yield workload, table(lines, left=3)


def microseconds(seconds: float | None) -> str:
    """Seconds as microseconds, without the unit; "" for None."""
    return "" if seconds is None else f"{seconds * 1e6:,.2f}"


def spark_table(results: Results) -> str:
    """A table of the ways in which Spark reads changes, the fastest first."""
    lines = [["", "changes/s", "Python CPU µs/change", "JVM CPU µs/change"]]
    names = [name for name in results.names() if name.startswith("spark/")]
    for name in sorted(names, key=lambda name: results.median(name, "wall") or 0):
        wall = results.median(name, "wall")
        assert wall is not None
        lines.append(
            [
                *(name.partition("/")[2], f"{1 / wall:,.0f}"),
                microseconds(results.median(name, "python")),
                microseconds(results.median(name, "java")),
            ]
        )
    return table(lines) if len(lines) > 1 else ""


def pace_table(results: Results) -> str:
    """A table of consumers at the paces of a writer."""
    lines = [["", "CPU µs/change", "late, median ms", "late, p99 ms"]]
    for name in results.names():
        if name.startswith("pace: "):
            late = (results.median(name, metric) for metric in ("median", "p99"))
            lines.append(
                [
                    *(name.removeprefix("pace: "), microseconds(results.median(name))),
                    *("" if one is None else f"{one * 1e3:,.1f}" for one in late),
                ]
            )
    return table(lines) if len(lines) > 1 else ""


def ways_table(results: Results) -> str:
    """A table of what consumers take on each way, as ratios to the loop that only receives."""
    lines = [["", "receive only, CPU µs/change", *OURS, "protocol 4 to 1"]]
    for name in WAYS:
        bare, *cases = (f"way: {name}/{who}" for who in ("receive only", *OURS))
        ratios = [results.ratio(case, bare) for case in cases]
        ratios.append(results.ratio(f"way: {name}/groups", f"way: {name}/groups, protocol 1"))
        if results.median(bare) is not None:
            shown = ("" if ratio is None else times(ratio) for ratio in ratios)
            lines.append([name, microseconds(results.median(bare)), *shown])
    return table(lines) if len(lines) > 1 else ""


def apply_table(results: Results) -> str:
    """A table of folds and of tables that are kept up to date."""
    lines = [["", "CPU ns/change", "changes/s by the clock"]]
    for name in results.names():
        if name.startswith(("fold: ", "sync: ", "sync, ", "slot: ")):
            cpu, wall = results.median(name), results.median(name, "wall")
            assert cpu is not None
            lines.append([name, nanoseconds(cpu), "" if wall is None else f"{1 / wall:,.0f}"])
    return table(lines) if len(lines) > 1 else ""


def tables_table(results: Results) -> str:
    """A table of tables that Spark's executors write, beside what else makes such tables."""
    lines = [["", "changes/s by the clock", "CPU µs/change", "late, median ms", "late, p95 ms"]]
    for name in results.names():
        if name.startswith(("segments", "backlog: ", "delay: ")):
            wall = results.median(name, "wall")
            late = (results.median(name, metric) for metric in ("median", "p95"))
            lines.append(
                [
                    name,
                    "" if wall is None else f"{1 / wall:,.0f}",
                    microseconds(results.median(name)),
                    *("" if one is None else f"{one * 1e3:,.0f}" for one in late),
                ]
            )
    return table(lines) if len(lines) > 1 else ""


def growth_table(results: Results) -> str:
    """A table of what a sync costs as it has more tables, segments or columns."""
    lines = [["", "CPU ms"]]
    for name in results.names():
        cpu = results.median(name)
        if name.startswith("growth: ") and cpu is not None:
            lines.append([name.removeprefix("growth: "), f"{cpu * 1e3:,.1f}"])
    return table(lines) if len(lines) > 1 else ""


def sections(results: Results) -> Iterator[tuple[str, str]]:
    """Title and text of each section of the report."""
    yield "Goals", goal_table(results)
    yield "Why goals are missed", "\n".join(limits(results))
    for metric, what in (
        ("cpu", "CPU ns per frame ± quartile distance"),
        ("memory", "peak memory"),
    ):
        for level, text in level_tables(results, metric):
            meaning = (decoders.LEVELS | columns.LEVELS).get(level, "")
            if metric == "cpu":
                what += f" (times as fast as the {REFERENCES.get(level, 'baseline')})"
            yield f"{level}: {what}", f"{meaning}\n\n{text}".strip()
            what = what.partition(" (times")[0]
    for workload, text in live_tables(results):
        yield workload, f"{results.described[workload]}\n\n{text}"
    if text := ways_table(results):
        yield "Live, by transport and size of transactions: CPU as ratio to receiving", text
    if text := pace_table(results):
        yield "Live, at a pace", text
    if text := apply_table(results):
        yield "Net changes and tables", f"{results.described.get('apply', '')}\n\n{text}"
    if text := spark_table(results):
        yield "Spark", f"{results.described.get('spark', '')}\n\n{text}"
    if text := tables_table(results):
        yield "Tables by Spark", f"{results.described.get('tables by Spark', '')}\n\n{text}"
    if text := growth_table(results):
        yield "Growth", f"{results.described.get('growth', '')}\n\n{text}"


def write(results: Results, directory: Path = DIRECTORY) -> None:
    """Write README.md and the plots."""
    from .peers import drain
    from .plots import draw

    directory.mkdir(exist_ok=True)
    lines = ["# What was measured", ""]
    lines += [f"- {name}: {value}" for name, value in results.described.items()]
    lines += ["", "How to read it, and how it is measured: [benchmarks](../README.md).", ""]
    for name, title in draw(results, directory):
        lines += [f"![{title}]({name}.svg)", ""]
    for title, text in sections(results):
        lines += [f"## {title}", "", text, ""]
    lines += ["## What decoders can do", ""]
    lines += ["Found out by running each on frames that need it (features.py).", ""]
    lines += [table(list(features.rows())), ""]
    lines += ["What live clients do not do, as they are run here:", ""]
    lacking = [[name, peer.lacks] for name, peer in drain.peers().items()]
    lines += [table([["client", "does not"], *lacking], left=2), ""]
    lines += ["## What was not measured", ""]
    lines += [f"- {who}: {why}" for who, why in grouped(results.missing).items()] or ["Nothing."]
    (directory / "README.md").write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


def main() -> int:
    """Write the report of the stored results."""
    if not RESULTS.exists():
        print(f"error: there is no {RESULTS}; python -m benchmarks --json {RESULTS}",
              file=sys.stderr)  # fmt: skip
        return 1
    write(Results.load(RESULTS))
    print(f"written: {DIRECTORY / 'README.md'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
