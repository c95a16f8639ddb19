"""`python -m benchmarks`: measure, print, store, report."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from . import columns, decoders, goals, harness, report, workloads
from .harness import Case, NotMeasured, Results

HERE = Path(__file__).parent
REPORT = HERE / "report"
RESULTS = REPORT / "results.json"

# Rows of a workload: 4 to 16 thousand frames in a batch, of fat ones fewer.
ROWS = {"narrow": 8_000, "wide": 8_000, "fat": 1_000}

PARTS = ("decode", "live", "spark")


# --- Decoding, in this process --------------------------------------------------------------------


def streams(options: argparse.Namespace) -> Iterator[workloads.Workload]:
    """The workloads that are asked for, generated and recorded."""
    for name in options.workload:
        for tuple_format in workloads.FORMATS:
            yield workloads.generate(name, tuple_format, ROWS[name])
    for path in options.capture:
        yield workloads.recorded(path)


def decode_loops(
    workload: workloads.Workload, missing: dict[str, str], check: bool
) -> Iterator[tuple[str, Callable[[], object]]]:
    """Names and loops of all competitors over a workload's frames."""
    for loop in decoders.loops(workload, missing, check):
        yield f"{workload}/{loop.level}/{loop.who}", loop.run
    if check:
        columns.check(workload)
    for who, run in columns.loops(workload, missing):
        yield f"{workload}/columns/{who}", run


def decode(options: argparse.Namespace, results: Results) -> None:
    """Message objects and columns, in one interleaved run; then what memory each takes."""
    seconds = 0.006 if options.quick else 0.025
    cases: list[Case] = []
    items: dict[str, workloads.Workload] = {}
    for workload in streams(options):
        harness.progress(f"checking {workload}")
        frames = len(workload.frames)
        for name, run in decode_loops(workload, results.missing, check=True):
            # Columns go through the Relations in front too.
            count = frames if "/columns/" in name else frames - workload.preamble
            cases.append(harness.timed(name, run, count, seconds))
            items[name] = workload
    if "wide" in options.workload:
        cases += columns.thread_cases(workloads.generate("wide", "text", ROWS["wide"]))
    harness.measure(cases, options.rounds or (5 if options.quick else 15), results)
    if not options.quick:
        for name, workload in items.items():
            harness.progress(f"memory of {name}")
            prepare = functools.partial(one_loop, name, workload)
            try:
                results.add(name, {"memory": harness.peak_memory(prepare)})
            except NotMeasured as reason:
                results.missing[f"{name}, memory"] = str(reason)
        for name, sample in columns.scaling(1_000_000).items():
            results.add(name, sample)


def one_loop(name: str, workload: workloads.Workload) -> Callable[[], object]:
    """One competitor's loop, made anew."""
    return dict(decode_loops(workload, {}, check=False))[name]


# --- All ------------------------------------------------------------------------------------------


def parts(options: argparse.Namespace) -> dict[str, Callable[[], Any]]:
    def live(results: Results) -> None:
        from .peers import drain

        drain.run(options, results)

    def spark(results: Results) -> None:
        from . import spark

        spark.run(options, results)

    return {"decode": lambda results: decode(options, results), "live": live, "spark": spark}


def show(results: Results) -> None:
    """Print what was found."""
    for name, value in results.described.items():
        print(f"{name}: {value}")
    for who, why in harness.grouped(results.missing).items():
        print(f"not measured: {who} ({why})")
    for level, text in report.level_tables(results):
        meaning = (decoders.LEVELS | columns.LEVELS).get(level, "")
        print(f"\n{level}: {meaning}\nCPU ns per frame ± quartile distance (times as fast as the "
              f"{report.REFERENCES.get(level, 'baseline')})\n\n{text}")  # fmt: skip
    for workload, text in report.live_tables(results):
        print(f"\n{workload}: {results.described[workload]}\n\n{text}")
    print(f"\n{goals.goal_table(results)}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure pgoutput_fast beside others, as ratios in one run.",
    )
    parser.add_argument("--quick", action="store_true", help="few short rounds: a rough look")
    parser.add_argument("--part", action="append", choices=PARTS, help="this one only (repeatable)")
    parser.add_argument(
        "--workload", action="append", choices=workloads.NAMES, help="this one only (repeatable)"
    )
    parser.add_argument(
        "--capture", action="append", type=Path, metavar="FILE",
        help="a recorded stream to decode too (repeatable; default: those in captures/)",
    )  # fmt: skip
    parser.add_argument(
        "--peer", action="append", help="live, this one only, by its name in drain.py (repeatable)"
    )
    parser.add_argument("--scale", type=float, help="live: 1 is a million changes")
    parser.add_argument("--rounds", type=int, help="rounds of each part")
    parser.add_argument("--json", type=Path, metavar="FILE", help="store all samples in FILE")
    parser.add_argument(
        "--report", action="store_true", help="write the report from what is stored, and this run"
    )
    options = parser.parse_args(arguments)
    if options.json is not None and not options.json.parent.is_dir():
        parser.error(f"--json: there is no directory {str(options.json.parent)!r}")
    options.workload = options.workload or list(workloads.NAMES)
    if options.capture is None:
        options.capture = sorted((HERE / "captures").glob("*.arrow"))
    results = Results(harness.describe())
    run = parts(options)
    for part in options.part or PARTS[: 2 if options.quick else None]:
        try:
            run[part](results)
        except NotMeasured as reason:
            results.missing[part] = str(reason)
        except decoders.WrongResult as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    show(results)
    if options.json is not None:
        results.dump(options.json)
        print(f"\nstored in {options.json}")
    return 0
