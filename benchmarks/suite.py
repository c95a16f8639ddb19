"""The command ``python -m benchmarks``: measure, print, store and report."""

from __future__ import annotations

import argparse
import contextlib
import functools
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from . import columns, copies, decoders, growth, harness, report, workloads
from .harness import Case, NotMeasured, Results

HERE = Path(__file__).parent

# Workload → number of rows, so that a batch has up to 16 thousand frames, fewer if they are long.
ROWS = {
    "narrow": 8_000,
    "wide": 8_000,
    "fat": 1_000,
    "narrow_varied": 8_000,
    "wide_varied": 8_000,
}

# --- Decoding, in this process --------------------------------------------------------------------


def _rows(options: argparse.Namespace, name: str) -> int:
    return max(10, round(ROWS[name] * (options.scale or 1)))


def streams(options: argparse.Namespace) -> Iterator[workloads.Workload]:
    """The workloads that the options name, generated and recorded ones."""
    for name in options.workload:
        for tuple_format in workloads.FORMATS:
            yield workloads.generate(name, tuple_format, _rows(options, name))
    for path in options.capture:
        yield workloads.recorded(path)


def decode_loops(
    workload: workloads.Workload, missing: dict[str, str], check: bool
) -> Iterator[tuple[str, Callable[[], object]]]:
    """The name and loop of each competitor over a workload's frames."""
    if workload.name not in workloads.VARIED:
        for loop in decoders.loops(workload, missing, check):
            yield f"{workload}/{loop.level}/{loop.who}", loop.run
    if check:
        columns.check(workload)
    for who, run in columns.loops(workload, missing):
        yield f"{workload}/columns/{who}", run


def decode(options: argparse.Namespace, results: Results) -> None:
    """Measure messages and columns in one interleaved run; then the memory that each takes."""
    seconds = 0.006 if options.quick else 0.025
    cases: list[Case] = []
    items: dict[str, workloads.Workload] = {}
    for workload in streams(options):
        harness.progress(f"checking {workload}")
        frames = len(workload.frames)
        for name, run in decode_loops(workload, results.missing, check=True):
            # Loops of columns also decode the Relations at the begin.
            count = frames if "/columns/" in name else frames - workload.preamble
            cases.append(harness.timed(name, run, count, seconds))
            items[name] = workload
    if "wide" in options.workload:
        cases += columns.thread_cases(workloads.generate("wide", "text", _rows(options, "wide")))
    with contextlib.ExitStack() as stack:
        tables = {
            name: workloads.generate(name, "binary", _rows(options, name))
            for name in ("narrow", "wide")
            if name in options.workload
        }
        try:
            cases += stack.enter_context(copies.cases(tables, seconds))
        except NotMeasured as reason:
            results.missing["ADBC COPY"] = str(reason)
        harness.measure(cases, options.rounds or (5 if options.quick else 15), results)
    if not options.quick:
        for name, workload in items.items():
            harness.progress(f"memory of {name}")
            prepare = functools.partial(one_loop, name, workload)
            try:
                results.add(name, {"memory": harness.peak_memory(prepare)})
            except NotMeasured as reason:
                results.missing[f"{name}, memory"] = str(reason)
        for name, sample in columns.scaling(round(1_000_000 * (options.scale or 1))).items():
            results.add(name, sample)


def one_loop(name: str, workload: workloads.Workload) -> Callable[[], object]:
    """The loop of one competitor, with a new decoder."""
    return next(run for one, run in decode_loops(workload, {}, check=False) if one == name)


# --- All ------------------------------------------------------------------------------------------


def live(options: argparse.Namespace, results: Results) -> None:
    from .peers import drain

    drain.run(options, results)


def ways(options: argparse.Namespace, results: Results) -> None:
    from .peers import ways as measuring

    measuring.run(options, results)


def pace(options: argparse.Namespace, results: Results) -> None:
    from .peers import pace as measuring

    measuring.run(options, results)


def apply(options: argparse.Namespace, results: Results) -> None:
    from . import applying

    applying.run(options, results)


def spark(options: argparse.Namespace, results: Results) -> None:
    harness.optional_module("pyspark")
    from . import spark as measuring

    measuring.run(options, results)


def tables(options: argparse.Namespace, results: Results) -> None:
    harness.optional_module("pyspark")
    from . import distributed

    distributed.run(options, results)


PARTS: dict[str, Callable[[argparse.Namespace, Results], None]] = {
    "decode": decode,
    "live": live,
    "ways": ways,
    "pace": pace,
    "apply": apply,
    "spark": spark,
    "tables": tables,
    "growth": growth.run,
}

_LONG = ("ways", "spark", "tables", "growth")
"""Parts that a quick run has only where they are asked for."""


def show(results: Results) -> None:
    """Print the results, and at the end the goals."""
    for name, value in results.described.items():
        print(f"{name}: {value}")
    for who, why in harness.grouped(results.missing).items():
        print(f"not measured: {who} ({why})")
    goals, _, *others = report.sections(results)
    for title, text in (*others, goals):
        print(f"\n{title}\n{text}")


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
    parser.add_argument("--way", action="append", help="ways, this one only (repeatable)")
    parser.add_argument(
        "--scale", type=float, help="of what is measured; 1 is live a million changes"
    )
    parser.add_argument("--rounds", type=int, help="rounds of each part")
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="store all samples in FILE; with --part, what it has of the others stays",
    )
    parser.add_argument(
        "--report", action="store_true", help="write report/README.md and its plots of this run"
    )
    options = parser.parse_args(arguments)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
    options.workload = options.workload or list(workloads.NAMES)
    if options.capture is None:
        options.capture = sorted((HERE / "captures").glob("*.arrow"))
    results = Results(harness.describe())
    status = 0
    for part in options.part or [name for name in PARTS if not (options.quick and name in _LONG)]:
        begin = time.perf_counter()
        try:
            PARTS[part](options, results)
        except NotMeasured as reason:
            results.missing[part] = str(reason)
        except decoders.WrongResult as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        except Exception:  # noqa: BLE001 - the other parts took an hour
            traceback.print_exc()
            status = 1
        print(f"{part}: {(time.perf_counter() - begin) / 60:.0f} minutes", file=sys.stderr)
    if options.part and options.json is not None and options.json.exists():
        stored = Results.load(options.json)
        whole = {key: stored.described[key] for key in ("date", "load", "machine")}
        stored.update(results)
        # It may be another machine: ratios are those of one run, and carry over.
        where = f"{results.described['date']} on {results.described['machine']}"
        anew = {f"{part}, measured anew": where for part in options.part}
        stored.described |= whole | anew
        results = stored
    show(results)
    if options.json is not None:
        results.dump(options.json)
        print(f"\nstored in {options.json}")
    if options.report:
        report.write(results)
        print(f"written: {report.DIRECTORY / 'README.md'}")
    return status
