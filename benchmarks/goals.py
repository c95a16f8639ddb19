"""The goals of the benchmarks, each a ratio within one run, and whether a run meets them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from .harness import Results, table, times
from .peers.ways import WAYS

RECEIVE_ONLY = ("pg_recvlogical", "psycopg2, receive", "psycopg 3, receive", "pg_walstream, raw")
"""Peers of the live benchmark that receive frames without decoding them."""


@dataclasses.dataclass(frozen=True)
class Goal:
    """A comparison of the case `ours` with the cases `theirs` of a workload, as ``level/who``.

    `bounds` has a number for each ``workload/format``: how many times as fast as theirs ours must
    be at least or, if `at_most`, how many times as long ours may take. If `theirs` is empty, the
    bounds are seconds. Of several cases in `theirs` the fastest one is compared.
    """

    level: str
    ours: str
    theirs: str | tuple[str, ...]
    bounds: Mapping[str, float]
    at_most: bool = False
    metric: str = "cpu"


def _all(value: float, names: str = "narrow wide") -> dict[str, float]:
    return {f"{name}/{form}": value for name in names.split() for form in ("text", "binary")}


def _ways(narrow: float, mixed: float) -> dict[str, float]:
    """A bound for each way on which changes come live: narrow rows or mixed ones."""
    return {
        f"way: {name}": mixed if way.traffic == "mixed" else narrow for name, way in WAYS.items()
    }


_TWIN = [
    Goal(
        f"twin: {level}", f"{level}/python", f"{level}/baseline", _all(1, "narrow wide fat")
    )
    for level in ("message", "message, one by one", "texts", "values")
]  # fmt: skip

GOALS = [
    Goal("a good C walk", "columns/C walk", "columns/memcpy",
         _all(1.7, "narrow") | {"wide/text": 2.5}, at_most=True),
    Goal("headers and slices, packed", "columns/headers", "columns/C walk", _all(0.85)),
    Goal("headers and slices, list[bytes]", "columns/headers of a list", "columns/C walk",
         _all(4.5, "narrow") | _all(3, "wide"), at_most=True),
    Goal("message object", "message/cython", "message/baseline",
         _all(25, "narrow") | _all(40, "wide")),
    Goal("message object", "message/cython", "message/pypgoutput",
         {"narrow/text": 120, "wide/text": 250}),
    Goal("all columns as str", "texts/cython", "texts/baseline",
         {"narrow/text": 8.5, "wide/text": 8.5}),
    Goal("all columns as str", "texts/cython", "texts/pypgoutput",
         {"narrow/text": 40, "wide/text": 40}),
    Goal("all columns typed", "values/cython", "values/baseline",
         _all(10, "narrow") | {"wide/text": 7.5, "wide/binary": 14}),
    Goal("all columns typed", "values/cython", "values/psycopg",
         {"narrow/text": 1.2, "wide/text": 1.7}),
    Goal("typed Arrow, exported", "columns/Arrow", "columns/C layout",
         _all(0.70, "narrow narrow_varied wide_varied")
         | {"wide/text": 0.75, "wide/binary": 0.70}),
    Goal("typed Arrow, text, kept", "columns/Arrow, kept", "columns/pyarrow.csv, kept",
         {"narrow/text": 2.2, "wide/text": 3.8}),
    Goal("typed Arrow, text, streamed", "columns/Arrow", "columns/pyarrow.csv",
         {"narrow/text": 3, "wide/text": 4.5, "narrow_varied/text": 3, "wide_varied/text": 4}),
    Goal("typed Arrow, text, streamed", "columns/Arrow", "columns/polars CSV",
         {"narrow/text": 1.8, "wide/text": 3.5}),
    Goal("typed Arrow, text, streamed", "columns/Arrow", "columns/duckdb CSV",
         {"narrow/text": 4.5, "wide/text": 6.5}),
    Goal("typed Arrow, binary", "columns/Arrow", "columns/ADBC COPY",
         {"narrow/binary": 10, "wide/binary": 10}),
    Goal("typed Arrow, fat", "columns/Arrow", "columns/C layout", _all(0.50, "fat")),
    Goal("two threads", "columns/Arrow, two threads", "columns/Arrow, one thread",
         {"wide/text": 1.7}, metric="wall"),
    *_TWIN,
    Goal("live: receive, decode, typed Arrow", "pgoutput_fast", "",
         {"live/narrow": 1.0e-6, "live/mixed": 1.5e-6}, at_most=True),
    Goal("live: CPU, bare receive loops", "pgoutput_fast", RECEIVE_ONLY,
         {"live/narrow": 1, "live/mixed": 1}),
    Goal("live: CPU", "pgoutput_fast", "Debezium, SourceRecord",
         {"live/narrow": 25, "live/mixed": 50}),
    Goal("live: at the walsender's rate", "pgoutput_fast", "pg_recvlogical",
         {"live/narrow": 1, "live/mixed": 1}, metric="wall"),
    Goal("live: transactions, typed", "pgoutput_fast, groups", "psycopg 3, SO_RCVLOWAT",
         {"live/narrow": 1.35, "live/mixed": 1.7}, at_most=True),
    Goal("live: transactions, one by one", "pgoutput_fast, transactions, counted",
         "psycopg 3, SO_RCVLOWAT", {"live/narrow": 3, "live/mixed": 3}, at_most=True),
    Goal("live: capture to durable segments", "pgoutput_fast, capture", "psycopg 3, SO_RCVLOWAT",
         {"live/narrow": 2.0, "live/mixed": 3.0}, at_most=True),
    Goal("live: the newest protocol", "pgoutput_fast, groups", "pgoutput_fast, groups, protocol 1",
         {"live/narrow": 1.3, "live/mixed": 1.3}, at_most=True),
    Goal("typed columns", "groups", "receive only", _ways(1.35, 1.7), at_most=True),
    Goal("capture to durable segments", "capture", "receive only", _ways(2, 3), at_most=True),
    Goal("the newest protocol", "groups", "groups, protocol 1", _ways(1.3, 1.3), at_most=True),
    Goal("pace: pauses, typed", "groups", "receive only", {"pace: pauses": 1.7}, at_most=True),
    Goal("pace: from COMMIT to transactions", "transactions", "", {"pace: alone": 10e-3},
         at_most=True, metric="median"),
    Goal("pace: from COMMIT to transactions, p99", "transactions", "",
         {"pace: 5,000 a second": 50e-3}, at_most=True, metric="p99"),
    Goal("fold", "fold", "",
         {"fold: int key": 0.5e-6, "fold: text key": 1e-6}, at_most=True),
    Goal("fold, beside decoding", "fold", "decoding",
         {f"fold: {name}": 2 for name in ("int key", "text key", "two columns")}, at_most=True),
    Goal("segments to tables, by the clock", "DuckDB", "",
         {"sync: 4 tables": 1 / 300e3}, at_most=True, metric="wall"),
    Goal("slot to tables, by slope", "DuckDB", "DuckDB, floor",
         {"slot: narrow": 1.5, "slot: mixed": 1.5}, at_most=True),
    Goal("slot to tables, by slope", "Delta", "Delta, floor",
         {"slot: narrow": 1.5, "slot: mixed": 1.5}, at_most=True),
    Goal("slot to state tables alone, by slope", "DuckDB, state alone", "DuckDB",
         {"slot: narrow": 0.85, "slot: mixed": 0.85}, at_most=True),
    Goal("segments to files of changes by Spark", "mode manifest", "",
         {"segments: 4 tables": 1 / 1.5e6}, at_most=True, metric="wall"),
    Goal("segments to files of changes by Spark", "mode manifest", "Spark's own writer",
         {"segments: 4 tables": 4}, metric="wall"),
    Goal("slot to change tables by Spark, CPU of a change", "spark, changes", "",
         {"backlog: narrow": 3e-6, "backlog: mixed": 8e-6}, at_most=True),
    Goal("a backlog into change tables by Spark, beside capture", "spark, changes", "capture",
         {"backlog: narrow": 1 / 0.85, "backlog: mixed": 1 / 0.85}, at_most=True, metric="wall"),
    Goal("a backlog into state tables too by Spark, beside capture", "spark", "capture",
         {"backlog: narrow": 1 / 0.85, "backlog: mixed": 1 / 0.85}, at_most=True, metric="wall"),
    Goal("many tables by Spark", "200 tables", "1 table", {"segments by Spark": 3},
         at_most=True, metric="wall"),
    Goal("from COMMIT to a change table", "spark", "", {"delay: 5,000 changes/s": 1},
         at_most=True, metric="median"),
    Goal("from COMMIT to a change table, p95", "spark", "", {"delay: 5,000 changes/s": 2},
         at_most=True, metric="p95"),
]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The result for a goal and a workload; `got` and `met` are None if it was not measured."""

    goal: Goal
    workload: str
    bound: float
    against: str
    got: float | None

    @property
    def met(self) -> bool | None:
        if self.got is None:
            return None
        return self.got <= self.bound if self.goal.at_most else self.got >= self.bound


def verdicts(results: Results) -> Iterator[Verdict]:
    """The verdicts on all goals and their workloads."""
    for goal in GOALS:
        for workload, bound in goal.bounds.items():
            if goal.ours.startswith("texts/") and workload.endswith("/binary"):
                continue  # texts of binary values are not measured
            ours = f"{workload}/{goal.ours}"
            names = (goal.theirs,) if isinstance(goal.theirs, str) else goal.theirs
            against = " / ".join(name.partition("/")[2] or name for name in names)
            got = results.median(ours, goal.metric)
            if goal.theirs:
                found = {
                    name: ratio
                    for name in names
                    if (ratio := results.ratio(ours, f"{workload}/{name}", goal.metric)) is not None
                }
                got = None
                if found:
                    # The fastest of theirs is the one with the greatest ratio.
                    name = max(found, key=lambda name: found[name])
                    against = name.partition("/")[2] or name
                    got = found[name] if goal.at_most else 1 / max(found[name], 1e-15)
            yield Verdict(goal, workload, bound, against, got)


def goal_table(results: Results) -> str:
    """A table of all goals, what was measured, and whether each is met."""
    lines = [["goal", "workload", "against", "asked", "got", ""]]
    for verdict in verdicts(results):
        sign = "≤" if verdict.goal.at_most else "≥"
        show = times if verdict.goal.theirs else lambda value: f"{value * 1e6:.2f} µs"
        said = {True: "met", False: "**missed**", None: "not measured"}[verdict.met]
        got = "" if verdict.got is None else show(verdict.got)
        lines.append(
            [
                *(verdict.goal.level, verdict.workload, verdict.against),
                *(f"{sign} {show(verdict.bound)}", got, said),
            ]
        )
    return table(lines, left=3)
