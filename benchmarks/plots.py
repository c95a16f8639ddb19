"""Plot stored results, as SVG and PNG.

Costs are dots on a logarithmic scale, as they span five powers of ten. On such a scale the length
of a bar would have no meaning. Whiskers reach from the least sample to the greatest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot as plt

from .goals import verdicts
from .harness import Results

_OURS, _PLAIN, _OTHERS, _BAD = "#0b6e4f", "#8a8f98", "#c46a1b", "#b3261e"
_STYLE: Any = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "axes.grid.axis": "x",
    "grid.color": "#e3e5e8",
    "axes.axisbelow": True,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "ytick.left": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "pgoutput_fast",
    "savefig.bbox": "tight",
    "figure.dpi": 110,
}

Row = tuple[str, str, Sequence[float]]
"""A label, its colour, and its samples in the unit of the axis."""


def _dots(axes: Any, rows: Sequence[Row], title: str, label: str, digits: int = 3) -> None:
    """Draw rows of one dot each, the first on top, with the median of each as a number."""
    axes.set_title(title)
    axes.set_xscale("log")
    medians = [sorted(samples)[len(samples) // 2] for _, _, samples in rows]
    for at, ((_, colour, samples), median) in enumerate(zip(rows, medians, strict=True)):
        axes.plot([min(samples), max(samples)], [at, at], color=colour, lw=1.2, alpha=0.6)
        axes.plot(median, at, "o", color=colour, ms=6)
        axes.annotate(
            f"{median:,.{max(0, digits - 1 - math.floor(math.log10(median)))}f}",
            (max(samples), at),
            xytext=(7, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            color=colour,
        )
    axes.set_yticks(range(len(rows)), [name for name, _, _ in rows])
    for tick, (_, colour, _) in zip(axes.get_yticklabels(), rows, strict=True):
        tick.set_color(colour)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(min(medians) / 2, max(max(samples) for _, _, samples in rows) * 3)
    axes.set_xlabel(label)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}" if value < 1 else f"{value:,.0f}")
    axes.xaxis.set_minor_formatter(mpl.ticker.NullFormatter())


def _samples(results: Results, name: str, scale: float, metric: str = "cpu") -> list[float]:
    return [value * scale for value in results.samples.get((name, metric), ())]


def _panels(count: int, rows: int) -> tuple[Any, Sequence[Any]]:
    figure, axes = plt.subplots(
        1, count, figsize=(5.4 * count, 0.9 + 0.24 * rows), layout="constrained", squeeze=False
    )
    return figure, axes[0]


_MESSAGES = {
    "cython": ("pgoutput_fast", _OURS),
    "python": ("pgoutput_fast, Python twin", _OURS),
    "baseline": ("plain struct decoder", _PLAIN),
    "psycopg": ("psycopg's loaders, split already", _OTHERS),
    "pypgoutput": ("pypgoutput", _OTHERS),
    "walflux": ("walflux", _OTHERS),
}
_COLUMNS = {
    "C walk": _PLAIN,
    "C layout": _PLAIN,
    "headers": _OURS,
    "Arrow": _OURS,
    "Arrow, kept": _OURS,
    "Arrow, in pyarrow": _OURS,
    "ADBC COPY": _OTHERS,
    "pyarrow.csv": _OTHERS,
    "polars CSV": _OTHERS,
    "duckdb CSV": _OTHERS,
    "baseline": _PLAIN,
    "Arrow, twin": _OURS,
}


def messages(results: Results) -> Any | None:
    """Plot the cost of a row as Python objects."""
    panels = {}
    for workload in ("narrow/text", "wide/text"):
        rows = [
            (f"{level}: {label}", colour, samples)
            for level in ("message", "texts", "values")
            for who, (label, colour) in _MESSAGES.items()
            if (samples := _samples(results, f"{workload}/{level}/{who}", 1e9))
        ]
        if rows:
            panels[workload] = rows
    return _figure(panels, "CPU time per frame, ns (log scale; less is better)")


def columns(results: Results) -> Any | None:
    """Plot the cost of a row as columns."""
    panels = {}
    for workload in ("narrow/text", "wide/text", "wide/binary"):
        rows = [
            ("plain struct decoder, objects" if who == "baseline" else who, colour, samples)
            for who, colour in _COLUMNS.items()
            if (samples := _samples(results, f"{workload}/columns/{who}", 1e9))
        ]
        if rows:
            panels[workload] = rows
    return _figure(panels, "CPU time per frame, ns (log scale; less is better)")


def live(results: Results) -> Any | None:
    """Plot what it costs a client to receive and decode a change."""
    panels = {}
    for workload in ("live/narrow", "live/mixed"):
        names = [name for name in results.names() if name.startswith(workload + "/")]
        names.sort(key=lambda name: results.median(name) or 0)
        panels[f"{workload}: {results.described.get(workload, '')}"] = [
            (
                who + (" (receives only)" if who in _RECEIVING else ""),
                _colour(who),
                _samples(results, name, 1e6),
            )
            for name in names
            if (who := name.rpartition("/")[2])
        ]
    panels = {title: rows for title, rows in panels.items() if rows}
    return _figure(panels, "client CPU per change, µs (log scale; less is better)")


def _colour(who: str) -> str:
    if who.startswith("pgoutput_fast"):
        return _OURS
    return _PLAIN if who in _RECEIVING else _OTHERS


_RECEIVING = {
    *("pg_recvlogical", "psycopg2, receive", "psycopg 3, receive", "pg_walstream, raw"),
    "psycopg 3, SO_RCVLOWAT",
}


def memory(results: Results) -> Any | None:
    """Plot the greatest resident size of each live client."""
    panels = {}
    for workload in ("live/narrow", "live/mixed"):
        names = [name for name in results.names() if name.startswith(workload + "/")]
        names.sort(key=lambda name: results.median(name, "memory") or 0)
        panels[workload] = [
            (
                who,
                _colour(who),
                _samples(results, name, 1e-6, "memory"),
            )
            for name in names
            if (who := name.rpartition("/")[2])
        ]
    panels = {title: rows for title, rows in panels.items() if rows}
    return _figure(panels, "peak resident memory, MB (log scale; less is better)")


def spark(results: Results) -> Any | None:
    """Plot how many changes a second Spark reads."""
    names = [name for name in results.names() if name.startswith("spark/")]
    names.sort(key=lambda name: results.median(name, "wall") or 0)
    panels: dict[str, list[Row]] = {}
    for name in names:
        _, workload, who = name.split("/", 2)
        rates = [1 / value / 1e3 for value in results.samples[name, "wall"]]
        colour = _PLAIN if "twin" in who else _OTHERS if "pypgoutput" in who else _OURS
        panels.setdefault(workload, []).append((who, colour, rates))
    return _figure(panels, "changes a second, thousands (log scale; more is better)")


def goals(results: Results) -> Any | None:
    """Plot by how much each goal was exceeded or missed."""
    rows: list[Row] = []
    for verdict in verdicts(results):
        if verdict.got is None:
            continue
        share = verdict.got / verdict.bound
        share = 1 / share if verdict.goal.at_most else share
        against = f" against {verdict.against}" if verdict.goal.theirs else ""
        rows.append(
            (
                f"{verdict.goal.level}{against}, {verdict.workload}",
                _OURS if verdict.met else _BAD,
                [share],
            )
        )
    if not rows:
        return None
    figure, (axes,) = _panels(1, len(rows))
    figure.set_size_inches(9, 0.9 + 0.21 * len(rows))
    _dots(axes, rows, "", "times what is asked (log scale; 1 meets the goal)", digits=2)
    axes.axvline(1, color="#333", lw=1)
    return figure


def _figure(panels: Mapping[str, Sequence[Row]], label: str) -> Any | None:
    if not panels:
        return None
    figure, axes = _panels(len(panels), max(map(len, panels.values())))
    for one, (title, rows) in zip(axes, panels.items(), strict=True):
        _dots(one, rows, title, label)
    return figure


PLOTS = {
    "messages": ("A row as Python objects", messages),
    "columns": ("Rows as columns", columns),
    "live": ("Live: receive and decode", live),
    "memory": ("Live: memory", memory),
    "spark": ("Spark", spark),
    "goals": ("Goals", goals),
}


def draw(results: Results, directory: Path) -> Iterator[tuple[str, str]]:
    """Write all plots for which there are samples, and yield their names and titles."""
    mpl.use("agg")
    with mpl.rc_context(_STYLE):
        for name, (title, plot) in PLOTS.items():
            figure = plot(results)
            if figure is None:
                continue
            caption = ", ".join(
                results.described[key] for key in ("machine", "date") if key in results.described
            )
            figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
            figure.text(0.01, -0.02, caption, fontsize=7, color="#666", va="top")
            figure.savefig(directory / f"{name}.svg", metadata={"Date": None})
            figure.savefig(directory / f"{name}.png", dpi=100)
            plt.close(figure)
            yield name, title
