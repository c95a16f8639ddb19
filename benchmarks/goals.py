"""The goals of the benchmarks, each a ratio within one run, and whether a run meets them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from .harness import UNITS, Results, table, times
from .peers.ways import WAYS


@dataclasses.dataclass(frozen=True)
class Goal:
    """A comparison of the case `ours` with the case `theirs` of a workload, as ``level/who``.

    `bounds` has a number for each ``workload/format``: how many times as fast as theirs ours must
    be at least or, if `at_most`, how many times as long ours may take. If `theirs` is empty, the
    bounds are seconds, or bytes of memory.
    """

    level: str
    ours: str
    theirs: str
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


# The twin's rows are lazy: reading their columns is a second pass, which the baseline has not.
_TWIN = [
    Goal(
        f"twin: {level}", f"{level}/python", f"{level}/baseline", _all(bound, "narrow wide fat")
    )
    for level, bound in (
        ("message", 1), ("message, one by one", 1), ("texts", 0.6), ("values", 0.6)
    )
]  # fmt: skip

_SNAPSHOT = [
    goal
    for target in ("DuckDB", "Delta")
    for goal in (
        Goal(f"a row of 19 columns in a snapshot to {target}", target, "",
             {"snapshot": 1.2e-6}, at_most=True),
        Goal("snapshot to tables, by slope", target, f"{target}, floor", {"snapshot": 1.5},
             at_most=True),
        Goal(f"memory of a snapshot to {target}", target, "", {"snapshot": 500e6},
             at_most=True, metric="memory"),
    )
]  # fmt: skip

GOALS = [
    Goal("headers and slices, packed", "columns/headers", "columns/C walk", _all(0.85)),
    Goal("headers and slices, list[bytes]", "columns/headers of a list", "columns/C walk",
         _all(4.5, "narrow") | _all(3, "wide"), at_most=True),
    Goal("message object", "message/cython", "message/baseline",
         _all(25, "narrow") | _all(40, "wide")),
    Goal("message object", "message/cython", "message/pypgoutput",
         {"narrow/text": 120, "wide/text": 250}),
    Goal("all columns as str", "texts/cython", "texts/baseline",
         {"narrow/text": 8.5, "wide/text": 8.5}),
    Goal("all columns as str, one by one", "texts, one by one/cython",
         "texts, one by one/baseline", {"narrow/text": 8.5, "wide/text": 8.5}),
    Goal("all columns as str", "texts/cython", "texts/pypgoutput",
         {"narrow/text": 40, "wide/text": 40}),
    Goal("all columns typed", "values/cython", "values/baseline",
         _all(10, "narrow") | {"wide/text": 7.5, "wide/binary": 14}),
    Goal("all columns typed", "values/cython", "values/psycopg",
         {"narrow/text": 1.2, "wide/text": 1.7}),
    Goal("typed Arrow, exported", "columns/Arrow", "columns/C layout",
         {"narrow/text": 0.70, "narrow_varied/text": 0.70, "narrow/binary": 0.65,
          "narrow_varied/binary": 0.65} | _all(0.75, "wide wide_varied")),
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
    Goal("live: CPU", "pgoutput_fast", "Debezium, SourceRecord",
         {"live/narrow": 25, "live/mixed": 50}),
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
    Goal("fold, beside decoding", "fold", "decoding",
         {f"fold: {name}": 2 for name in ("int key", "text key", "two columns")}, at_most=True),
    Goal("slot to tables, by slope", "DuckDB", "DuckDB, floor",
         {"slot: narrow": 1.5, "slot: mixed": 1.5}, at_most=True),
    Goal("slot to tables, by slope", "Delta", "Delta, floor",
         {"slot: narrow": 1.5, "slot: mixed": 1.5}, at_most=True),
    Goal("slot to state tables alone, by slope", "DuckDB, state alone", "DuckDB",
         {"slot: narrow": 0.85, "slot: mixed": 0.85}, at_most=True),
    *(Goal(f"slot to {target}, beside Debezium to JSON", target, "Debezium, JSON",
           {"slot: narrow": 1 / 8, "slot: mixed": 1 / 10}, at_most=True)
      for target in ("DuckDB", "Delta")),
    *_SNAPSHOT,
    Goal("segments to files of changes by Spark", "mode manifest", "Spark's own writer",
         {"segments: 4 tables": 4}, metric="wall"),
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

LIMITS: dict[str, str] = {
    "headers and slices, packed": "within the spread of the run. By instructions, `decode_batch` "
    "takes 1.4 times what C walk does for narrow rows and 1.1 times for wide ones: it checks "
    "all bounds and knows every message.",
    "all columns typed": "narrow text rows beside psycopg, whose loaders get each row's values "
    "split already; ours read the frame first.",
    "typed Arrow, exported": "narrow rows alone. The engine takes 1.25 times the instructions of "
    "C layout, and writes 37 bytes more for each row: operation, transaction, LSNs, commit time "
    "and number, which C layout leaves out.",
    "typed Arrow, binary": "narrow rows alone, for the same reason: ADBC's rows have nothing but "
    "their four values.",
    "twin: message": "narrow rows, within the spread of the run. The refusal of a second thread "
    "takes 25 ns a message, which the baseline does not have.",
    "twin: message, one by one": "narrow rows, as above.",
    "twin: values": "narrow text rows, for which the second pass over the columns weighs most.",
    "typed columns": "narrow rows over TCP, within the spread: it took 0.82 an hour before, and "
    "0.74 in the drain of all clients.",
    "the newest protocol": "transactions of one row, within the spread: it took 0.96 an hour "
    "before.",
    "slot to tables, by slope": "narrow rows. Into DuckDB, commits and checkpoints take half of "
    "the time: the file is closed after each window, so that others can read it. With one "
    "checkpoint in place of a log and a checkpoint it took as long. Into Delta, 1.50 is the "
    "bound itself.",
    "slot to DuckDB, beside Debezium to JSON": "cannot hold. The floor alone, to receive the "
    "frames and to have DuckDB write the tables' rows once, takes 0.17 of Debezium's time for "
    "narrow rows and 0.11 for mixed ones.",
    "slot to Delta, beside Debezium to JSON": "narrow rows. The floor takes 0.10; the rest is "
    "decoding, net changes, and the second write of the changes.",
    "a row of 19 columns in a snapshot to DuckDB": "cannot hold. To receive a row by COPY takes "
    "1.0 µs alone; DuckDB writes it into two tables in 8.",
    "memory of a snapshot to DuckDB": "DuckDB's own buffers, within its memory limit "
    "(`duckdb_memory`), grow with the rows of a transaction.",
    "a row of 19 columns in a snapshot to Delta": "cannot hold. To receive a row by COPY takes "
    "1.0 µs alone; Parquet is written twice, compressed, in 2.6.",
    "segments to files of changes by Spark": "two cores, on which the JVM's tasks and their Python "
    "workers share the time.",
    "a backlog into change tables by Spark, beside capture": "narrow rows, within the spread of "
    "two rounds: with state tables too it took 0.99.",
    "a backlog into state tables too by Spark, beside capture": "mixed rows. The capture and "
    "Spark share two cores, and merges read the rows that a table has.",
}
"""Level of a goal that the stored run misses → why, and what the limit is."""


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
            ours, theirs = f"{workload}/{goal.ours}", f"{workload}/{goal.theirs}"
            if not goal.theirs:
                got = results.median(ours, goal.metric)
            elif (ratio := results.ratio(ours, theirs, goal.metric)) is None:
                got = None
            else:
                got = ratio if goal.at_most else 1 / max(ratio, 1e-15)
            against = goal.theirs.partition("/")[2] or goal.theirs
            yield Verdict(goal, workload, bound, against, got)


def _seconds(value: float) -> str:
    return f"{value * 1e6:.2f} µs" if value < 1e-3 else f"{value * 1e3:,.0f} ms"


_SHOWN = {"second": _seconds, "byte": lambda value: f"{value / 1e6:,.0f} MB"}


def goal_table(results: Results) -> str:
    """A table of all goals, what was measured, and whether each is met."""
    lines = [["goal", "workload", "against", "asked", "got", ""]]
    for verdict in verdicts(results):
        sign = "≤" if verdict.goal.at_most else "≥"
        show = times if verdict.goal.theirs else _SHOWN[UNITS[verdict.goal.metric]]
        said = {True: "met", False: "**missed**", None: "not measured"}[verdict.met]
        got = "" if verdict.got is None else show(verdict.got)
        lines.append(
            [
                *(verdict.goal.level, verdict.workload, verdict.against),
                *(f"{sign} {show(verdict.bound)}", got, said),
            ]
        )
    return table(lines, left=3)


def limits(results: Results) -> Iterator[str]:
    """Yield a line for each level of which a goal is missed: why, and what the limit is."""
    missed = [verdict.goal.level for verdict in verdicts(results) if verdict.met is False]
    for level in dict.fromkeys(missed):
        yield f"- {level}: {LIMITS.get(level, 'not explained')}"
