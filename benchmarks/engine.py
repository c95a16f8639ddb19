"""Measure the columnar engine beside plain C on the same frames, and CSV readers on its values.

As in run.py all cases are interleaved, figures are medians of CPU time per frame, and results are
checked before anything is timed. ``python -m benchmarks.engine``.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import gc
import io
import itertools
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import pyarrow as pa
import pyarrow.csv

import pgoutput_fast as pf

from . import baseline, native, workloads
from .run import describe, optional_module, times

# Rows of a call: 4 to 16 thousand frames; of fat ones few.
ROWS = {"narrow": 8_000, "wide": 8_000, "fat": 1_000}

# Competitor → what of it is asked for: at least (or for "most" at most) this many times.
GOALS: dict[tuple[str, str], dict[str, float]] = {
    ("headers", "walk"): {"narrow": 0.85, "wide": 0.85},
    ("headers of a list", "walk"): {"narrow": 1 / 4.5, "wide": 1 / 3},
    ("Arrow", "layout"): {
        "narrow/text": 0.70, "narrow/binary": 0.70, "wide/text": 0.75, "wide/binary": 0.70,
        "fat": 0.50,
    },
    ("Arrow, kept", "pyarrow.csv, kept"): {"narrow": 2.2, "wide": 3.8},
    ("Arrow", "pyarrow.csv"): {"narrow": 3, "wide": 4.5},
    ("Arrow", "polars CSV"): {"narrow": 1.8, "wide": 3.5},
    ("Arrow", "duckdb CSV"): {"narrow": 4.5, "wide": 6.5},
}  # fmt: skip


@dataclasses.dataclass
class Case:
    """One loop over a workload's frames."""

    workload: workloads.Workload
    name: str
    run: Callable[[], object]
    loops: int = 1
    samples: list[float] = dataclasses.field(default_factory=list)

    @property
    def median(self) -> float:
        """Nanoseconds per frame."""
        return statistics.median(self.samples)

    def measure(self) -> None:
        start = time.process_time_ns()
        for _ in range(self.loops):
            self.run()
        spent = time.process_time_ns() - start
        self.samples.append(spent / self.loops / len(self.workload.frames))

    def calibrate(self, seconds: float) -> None:
        self.run()
        self.measure()
        once = self.samples.pop() * len(self.workload.frames)
        self.loops = max(1, round(seconds * 1e9 / max(once, 1)))


def arrow_types(workload: workloads.Workload) -> pa.Schema:
    """The types that the engine gives the workload's columns."""
    decoder = pf.ColumnarDecoder()
    [batch] = decoder.decode(workload.frames)
    return pa.schema(list(pa.record_batch(batch).schema.field("after").type))


def check(workload: workloads.Workload) -> None:
    """Hold the engine's rows against what the workload was made of."""
    decoder = pf.ColumnarDecoder()
    found = [
        tuple(row["after"].values())
        for batch in decoder.decode(*workload.packed())
        for row in pa.record_batch(batch).to_pylist()
    ]
    if found != workload.rows:
        raise SystemExit(f"{workload.name}: the engine's rows are not the workload's")


def csv_of(workload: workloads.Workload) -> bytes:
    """The workload's rows as CSV, NULL as an empty field."""
    text = io.StringIO()
    writer = csv.writer(text)
    for row in workload.rows:
        writer.writerow(
            "" if value is None else column.type.text(value).removesuffix("+00")
            for column, value in zip(workload.table.columns, row, strict=True)
        )
    return text.getvalue().encode()


def csv_readers(workload: workloads.Workload) -> dict[str, Callable[[], object]]:
    """CSV readers, each to the engine's types as far as it has them."""
    data = csv_of(workload)
    types = {
        field.name: pa.string() if isinstance(field.type, pa.BaseExtensionType) else field.type
        for field in arrow_types(workload)
    }
    names = list(types)
    for name, kind in types.items():
        if pa.types.is_timestamp(kind):
            types[name] = pa.timestamp("us")
    options = {
        "read_options": pa.csv.ReadOptions(column_names=names, use_threads=False),
        "convert_options": pa.csv.ConvertOptions(
            column_types=types, strings_can_be_null=True, true_values=["t"], false_values=["f"]
        ),
    }

    def by_pyarrow() -> object:
        return pa.csv.read_csv(io.BytesIO(data), **options)

    readers: dict[str, Callable[[], object]] = {"pyarrow.csv": by_pyarrow}
    polars, _ = optional_module("polars")
    if polars is not None:
        frame = polars.from_arrow(by_pyarrow())
        # It has no parser of "t" and "f".
        schema = {
            name: polars.String if kind == polars.Boolean else kind
            for name, kind in frame.schema.items()
        }
        readers["polars CSV"] = lambda: polars.read_csv(
            io.BytesIO(data), has_header=False, new_columns=names, schema=schema,
        )  # fmt: skip
    duckdb, _ = optional_module("duckdb")
    if duckdb is not None:
        connection = duckdb.connect()
        connection.execute("SET threads = 1")
        columns = {
            name: str(kind)
            for name, kind in zip(
                names, connection.from_arrow(by_pyarrow()).types, strict=True
            )
        }  # fmt: skip
        # It reads files alone; this one is in the page cache.
        file = tempfile.NamedTemporaryFile(suffix=".csv")  # noqa: SIM115 - as long as the reader
        file.write(data)
        file.flush()
        readers["duckdb CSV"] = lambda: connection.read_csv(
            file.name, header=False, columns=columns
        ).to_arrow_table()
    return readers


def cases_of(workload: workloads.Workload) -> list[Case]:
    data, offsets = workload.packed()
    frames = workload.frames
    decoder = pf.ColumnarDecoder()
    plain = baseline.Decoder("typed")

    def streamed() -> None:
        for batch in decoder.decode(data, offsets):
            batch.__arrow_c_array__()

    kept: list[Any] = []

    def hold() -> None:
        kept[:] = list(decoder.decode(data, offsets))

    def imported() -> None:
        for batch in decoder.decode(data, offsets):
            pa.record_batch(batch)

    def by_baseline() -> None:
        for frame in frames:
            plain.decode(frame)

    loops: dict[str, Callable[[], object]] = {
        **native.loops(workload),
        "headers": lambda: pf.decode_batch(data, offsets),
        "headers of a list": lambda: pf.decode_batch(frames),
        "Arrow": streamed,
        "Arrow, kept": hold,
        "Arrow, in pyarrow": imported,
        "baseline": by_baseline,
    }
    if workload.tuple_format == "text" and workload.name != "fat":
        readers = csv_readers(workload)
        table: list[Any] = []

        def hold_table() -> None:
            table[:] = [readers["pyarrow.csv"]()]

        loops = {**loops, "pyarrow.csv, kept": hold_table, **readers}
    return [Case(workload, name, loop) for name, loop in loops.items()]


def goal_of(goals: dict[str, float], workload: workloads.Workload) -> float | None:
    return goals.get(f"{workload.name}/{workload.tuple_format}", goals.get(workload.name))


def report(cases: Iterable[Case]) -> None:
    for _, group in itertools.groupby(cases, key=lambda case: id(case.workload)):
        found = {case.name: case for case in group}
        workload = next(iter(found.values())).workload
        print(f"\n{workload.name}, {workload.tuple_format}, ns per frame:")
        print("  " + ", ".join(f"{name} {case.median:,.1f}" for name, case in found.items()))
        for (ours, theirs), goals in GOALS.items():
            if ours in found and theirs in found:
                ratio = found[theirs].median / found[ours].median
                goal = goal_of(goals, workload)
                verdict = ""
                if goal is not None:
                    verdict = f", goal ≥ {goal:.2f}: {'met' if ratio >= goal else 'missed'}"
                print(f"  {ours} against {theirs}: {times(ratio)}{verdict}")
        ratio = found["baseline"].median / found["Arrow"].median
        print(f"  Arrow against the baseline: {times(ratio)}")


def two_threads() -> float:
    """How many times as much two decoders in two threads do, by the wall clock."""
    workload = workloads.generate("wide", "text", ROWS["wide"])
    data, offsets = workload.packed()

    def work() -> None:
        decoder = pf.ColumnarDecoder()
        for _ in range(60):
            for batch in decoder.decode(data, offsets):
                batch.__arrow_c_array__()

    def wall(count: int) -> float:
        threads = [threading.Thread(target=work) for _ in range(count)]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - start

    work()
    return statistics.median(2 * wall(1) / wall(2) for _ in range(5))


def growth(most: int) -> list[tuple[int, float]]:
    """Nanoseconds per frame of ten thousand frames and more in one call, up to `most`."""
    import numpy as np

    workload = workloads.generate("narrow", "text", 8_000)
    data, offsets = workload.packed()
    found = []
    count = 1
    while count * len(workload.frames) <= most:
        again = np.concatenate([offsets[:-1] + i * len(data) for i in range(count)] + [
            np.array([count * len(data)], np.int64)
        ])  # fmt: skip
        repeated = data * count
        samples = []
        for _ in range(max(3, 200 // count)):
            decoder = pf.ColumnarDecoder()
            start = time.process_time_ns()
            for batch in decoder.decode(repeated, again):
                batch.__arrow_c_array__()
            samples.append((time.process_time_ns() - start) / (len(again) - 1))
        found.append((len(again) - 1, statistics.median(samples)))
        count *= 10
    return found


def relations(known: int) -> float:
    """Nanoseconds per frame with `known` relations announced, and 8 of them in traffic."""
    workload = workloads.generate("narrow", "text", 8_000)
    relation, *frames = workload.frames

    def of(oid: int, frame: bytes) -> bytes:
        if frame[:1] not in (b"I", b"U", b"R"):
            return frame
        return frame[:1] + oid.to_bytes(4, "big") + frame[5:]

    decoder = pf.ColumnarDecoder()
    for _ in decoder.decode([of(20_000 + i, relation) for i in range(known)]):
        pass
    step = known // 8
    traffic = [of(20_000 + i % 8 * step, frame) for i, frame in enumerate(frames)]
    samples = []
    for _ in range(30):
        start = time.process_time_ns()
        for batch in decoder.decode(traffic):
            batch.__arrow_c_array__()
        samples.append((time.process_time_ns() - start) / len(traffic))
    return statistics.median(samples)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engine",
        description="Measure the columnar engine against plain C and CSV readers.",
    )
    parser.add_argument("--quick", action="store_true", help="few short rounds: a rough look")
    parser.add_argument("--workload", action="append", choices=workloads.NAMES)
    parser.add_argument(
        "--frames", type=int, default=1_000_000, help="most frames of a call (10000000 takes 1 GB)"
    )
    options = parser.parse_args(arguments)
    rounds, seconds = (5, 0.005) if options.quick else (15, 0.03)
    try:
        native.load()
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"error: no C compiler to compare with: {error}", file=sys.stderr)
        return 1
    for name, value in describe().items():
        print(f"{name}: {value}")
    cases = []
    for name in options.workload or workloads.NAMES:
        for tuple_format in workloads.FORMATS:
            workload = workloads.generate(name, tuple_format, ROWS[name])
            if tuple_format == "text" and name == "narrow":
                check(workload)
            cases += cases_of(workload)
    for case in cases:
        case.calibrate(seconds)
    gc.collect()
    gc.freeze()
    for _ in range(rounds):
        for case in cases:
            case.measure()
    gc.unfreeze()
    report(cases)
    print(f"\ntwo threads, wide text: {two_threads():.2f}× one, goal ≥ 1.70")
    few, many = relations(8), relations(10_000)
    print(f"8 relations in traffic: {few:.1f} ns per frame; of 10,000 known: {many:.1f}")
    for count, cost in growth(options.frames):
        print(f"{count:,} frames in one call: {cost:.1f} ns per frame")
    return 0


if __name__ == "__main__":
    sys.exit(main())
