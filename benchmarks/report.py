"""The report: tables and plots of what runs have stored."""

from __future__ import annotations

from collections.abc import Iterator

from .harness import Results, nanoseconds, table, times

# Who the others of a level are shown as multiples of.
REFERENCES = {"columns": "C layout"}


def level_tables(results: Results, metric: str = "cpu") -> Iterator[tuple[str, str]]:
    """Levels and their tables, ns per item ± the quartiles' distance, and times as fast."""
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
    """The live workloads and their tables."""
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
    """Without the unit; nothing for None."""
    return "" if seconds is None else f"{seconds * 1e6:,.2f}"
