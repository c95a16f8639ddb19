"""Measure the decoders side by side and print ratios to the plain decoder of baseline.py.

All cases of one run are interleaved: every round measures each case once, so that a machine that
grows slower, or is shared, is so for all of them alike. A figure is the median over the rounds of
the process's CPU time per frame; Begin and Commit count as frames, the Relation is not timed.

Before anything is timed, each case's results are compared with the baseline's, and the baseline's
with the values that the workload was made of: a decoder that is fast and wrong does not win.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import gc
import importlib
import importlib.metadata
import itertools
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import baseline, workloads

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

# Rows of a workload: few enough for the frames of each (0.5 to 1.7 MB) to stay in the processor's
# caches, which is what the frames that a socket just delivered do.
ROWS = {"narrow": 10_000, "wide": 2_500, "fat": 200}

LEVELS = {
    "message": "message object, validated, columns lazy: decoder.decode_many(frames)",
    "message, one by one": "the same through decoder.decode(frame)",
    "texts": "decode_many, and texts() of each row",
    "values": "decode_many, and values() of each row",
}

# Of the compiled implementation: at least this many times as fast as the baseline. The twin's goal
# is to be as fast, everywhere.
GOALS: dict[tuple[str, str, str], float] = {
    ("narrow", "text", "message"): 25,
    ("narrow", "binary", "message"): 25,
    ("wide", "text", "message"): 40,
    ("wide", "binary", "message"): 40,
    ("narrow", "text", "texts"): 8.5,
    ("wide", "text", "texts"): 8.5,
    ("narrow", "text", "values"): 10,
    ("narrow", "binary", "values"): 10,
    ("wide", "text", "values"): 7.5,
    ("wide", "binary", "values"): 14,
}
TWIN_GOAL = 1.0

BASELINE, TWIN, COMPILED, PEER = "baseline", "python", "cython", "pypgoutput"
# psycopg's compiled loaders: not a decoder, but what makes the values of a SELECT.
LOADERS = "psycopg"
LOADERS_GOALS = {"narrow": 1.2, "wide": 1.7}


@dataclasses.dataclass
class Case:
    """One competitor at one level of one workload.

    `run` decodes the frames once; `result` does the same and returns what was decoded, in the form
    of :func:`expected`.
    """

    workload: workloads.Workload
    level: str
    competitor: str
    run: Callable[[], None]
    result: Callable[[], list[Any]]
    loops: int = 1
    samples: list[float] = dataclasses.field(default_factory=list)

    @property
    def key(self) -> tuple[str, str, str]:
        return self.workload.name, self.workload.tuple_format, self.level

    @property
    def name(self) -> str:
        return "/".join((*self.key, self.competitor))

    @property
    def frames(self) -> int:
        return len(self.workload.frames) - self.workload.preamble

    @property
    def median(self) -> float:
        """Nanoseconds per frame."""
        return statistics.median(self.samples)

    @property
    def spread(self) -> float:
        """The distance between the quartiles, as a share of the median."""
        low, _, high = statistics.quantiles(self.samples, n=4)
        return (high - low) / max(self.median, 1e-9)

    def measure(self) -> None:
        run = self.run
        start = time.process_time_ns()
        for _ in range(self.loops):
            run()
        self.samples.append((time.process_time_ns() - start) / self.loops / self.frames)

    def calibrate(self, seconds: float) -> None:
        """Warm up, and let a measurement take at least about this long."""
        self.run()
        self.measure()
        once = self.samples.pop() * self.frames
        # Within one tick of the processor's clock it may have taken no time at all.
        self.loops = max(1, round(seconds * 1e9 / max(once, 1)))


# --- Competitors ----------------------------------------------------------------------------------

# Each loop has the same shape: an iterator of messages (a C-level map over the frames where the
# decoder has no decode_many), which compress() reduces to the rows where rows are what is asked
# for. Nothing is kept, so that objects are freed as in a consumer that goes through a stream.


def exhaust(messages: Iterable[Any]) -> None:
    for _ in messages:
        pass


def stream_of(workload: workloads.Workload) -> tuple[list[bytes], list[bytes], list[bool]]:
    """The Relations in front, the frames after them, and which of these are rows."""
    preamble, frames = (
        workload.frames[: workload.preamble],
        workload.frames[workload.preamble :],
    )
    return preamble, frames, [frame[:1] in {b"I", b"U"} for frame in frames]


def fields(message: Any, columns: Callable[[Any], Any]) -> tuple[Any, ...]:
    """What a message says, from the names that the baseline and pgoutput_fast have in common."""
    kind = type(message).__name__
    if kind == "Begin":
        return kind, message.final_lsn, message.commit_time, message.xid
    if kind == "Commit":
        return (
            *(kind, message.flags),
            *(message.commit_lsn, message.end_lsn, message.commit_time),
        )
    new = tuple(columns(message.new))
    if kind == "Insert":
        return kind, message.xid, message.relation_id, new
    old = None if message.old is None else tuple(columns(message.old))
    return kind, message.xid, message.relation_id, message.old_kind, old, new


def baseline_case(workload: workloads.Workload, level: str) -> Case:
    preamble, frames, rows = stream_of(workload)
    decoder = baseline.Decoder(
        "typed" if level == "values" else "texts" if level == "texts" else "bytes"
    )
    exhaust(map(decoder.decode, preamble))

    def run_messages() -> None:
        for _message in map(decoder.decode, frames):
            pass

    def run_rows() -> None:
        for message in itertools.compress(map(decoder.decode, frames), rows):
            message.new  # noqa: B018

    def result() -> list[Any]:
        return [fields(message, tuple) for message in map(decoder.decode, frames)]

    run = run_messages if level.startswith("message") else run_rows
    return Case(workload, level, BASELINE, run, result)


def own_case(workload: workloads.Workload, level: str, competitor: str, module: Any) -> Case:
    preamble, frames, rows = stream_of(workload)
    decoder = module.Decoder()
    exhaust(decoder.decode_many(preamble))

    def run_messages() -> None:
        for _message in decoder.decode_many(frames):
            pass

    def run_one_by_one() -> None:
        for _message in map(decoder.decode, frames):
            pass

    def run_texts() -> None:
        for message in itertools.compress(decoder.decode_many(frames), rows):
            message.new.texts()

    def run_values() -> None:
        for message in itertools.compress(decoder.decode_many(frames), rows):
            message.new.values()

    def result() -> list[Any]:
        if level == "message, one by one":
            messages: Iterable[Any] = map(decoder.decode, frames)
        else:
            messages = decoder.decode_many(frames)
        if level == "texts":
            return [fields(message, lambda row: row.texts()) for message in messages]
        if level == "values":
            return [fields(message, lambda row: row.values()) for message in messages]
        return [fields(message, lambda row: row.raws()) for message in messages]

    run = {
        "message": run_messages,
        "message, one by one": run_one_by_one,
        "texts": run_texts,
        "values": run_values,
    }[level]
    return Case(workload, level, competitor, run, result)


def peer_case(workload: workloads.Workload, level: str, decoders: Any) -> Case | None:
    """pypgoutput: each row's columns are str at once, whatever is asked for; text tuples only."""
    if workload.tuple_format != "text" or level not in {"message", "texts"}:
        return None
    _, frames, rows = stream_of(workload)
    classes = {
        ord("B"): decoders.Begin,
        ord("C"): decoders.Commit,
        ord("I"): decoders.Insert,
        ord("U"): decoders.Update,
    }

    def decode(frame: bytes) -> Any:
        return classes[frame[0]](frame)

    def run_messages() -> None:
        for _message in map(decode, frames):
            pass

    def run_rows() -> None:
        for message in itertools.compress(map(decode, frames), rows):
            message.new_tuple.column_data  # noqa: B018

    epoch = datetime.datetime(2000, 1, 1, tzinfo=datetime.timezone.utc)
    microsecond = datetime.timedelta(microseconds=1)

    def result() -> list[Any]:
        found: list[Any] = []
        for message in map(decode, frames):
            kind = type(message).__name__
            if kind == "Begin":
                commit_time = (message.commit_ts - epoch) // microsecond
                found.append((kind, message.lsn, commit_time, message.tx_xid))
            elif kind == "Commit":
                commit_time = (message.commit_ts - epoch) // microsecond
                found.append((kind, message.flags, message.lsn_commit, message.lsn, commit_time))
            else:
                texts: Iterable[Any] = (data.col_data for data in message.new_tuple.column_data)
                if level == "message":
                    texts = (None if text is None else text.encode() for text in texts)
                old = (None, None) if kind == "Update" else ()
                found.append((kind, None, message.relation_id, *old, tuple(texts)))
        return found

    return Case(workload, level, PEER, run_messages if level == "message" else run_rows, result)


def loaders_case(workload: workloads.Workload, level: str, module: Any) -> Case | None:
    """Call psycopg's loaders, given each row's text values split already: no frame is read."""
    if workload.tuple_format != "text" or level != "values":
        return None
    split = baseline_case(workload, "message").result()
    split_rows = [message[-1] for message in split if message[0] in {"Insert", "Update"}]
    transformer = module.Transformer()
    # Of jsonb the text, as everywhere here: psycopg would parse it.
    oids = [25 if c.type.oid == 3802 else c.type.oid for c in workload.table.columns]
    transformer.set_loader_types(oids, 0)
    load = transformer.load_sequence

    def run() -> None:
        for row in split_rows:
            load(row)

    def result() -> list[Any]:
        loaded = iter([tuple(load(row)) for row in split_rows])
        return [
            (*message[:-1], next(loaded)) if message[0] in {"Insert", "Update"} else message
            for message in split
        ]

    return Case(workload, level, LOADERS, run, result)


# --- Checking -------------------------------------------------------------------------------------


class WrongResult(Exception):
    """A competitor decoded something else than the baseline."""


def check_baseline(workload: workloads.Workload, level: str, result: list[Any]) -> None:
    """Hold the baseline's rows against what the workload was made of."""
    columns = workload.table.columns
    if level == "values":
        rows = workload.rows
    else:
        text = workload.tuple_format == "text"
        rows = [
            tuple(
                None
                if value is None
                else (column.type.text(value).encode() if text else column.type.binary(value))
                for column, value in zip(columns, row, strict=True)
            )
            for row in workload.rows
        ]
        if level == "texts":
            rows = [
                tuple(None if value is None else value.decode() for value in row) for row in rows
            ]
    _, _, is_row = stream_of(workload)
    compare(
        f"{workload.name}/{workload.tuple_format}/{level}/{BASELINE}",
        [found[-1] for found in itertools.compress(result, is_row)],
        rows,
    )


def compare(name: str, found: list[Any], expected: list[Any]) -> None:
    """Raise WrongResult at the first difference, of type too: 1 is not True, nor 1.0."""
    if len(found) != len(expected):
        raise WrongResult(f"{name}: {len(found)} results, expected {len(expected)}")
    for i, (one, other) in enumerate(zip(found, expected, strict=True)):
        if not same(one, other):
            raise WrongResult(f"{name}, frame {i}: {one!r:.500}, expected {other!r:.500}")


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


# --- The run --------------------------------------------------------------------------------------


def optional_module(name: str) -> tuple[Any, str]:
    """The module, or None and the reason why it can't be had."""
    try:
        if name.startswith("psycopg_binary"):
            importlib.import_module("psycopg")  # which must come first
        return importlib.import_module(name), ""
    except ImportError as error:
        return None, f"{type(error).__name__}: {error}"


def make_cases(names: list[str], modules: dict[str, Any]) -> list[Case]:
    """All cases, checked."""
    cases: list[Case] = []
    for name, tuple_format in itertools.product(names, workloads.FORMATS):
        workload = workloads.generate(name, tuple_format, ROWS[name])
        for level in LEVELS:
            # The plain decoder has no text of binary values to compare with.
            if level == "texts" and tuple_format == "binary":
                continue
            base = baseline_case(workload, level)
            expected = base.result()
            check_baseline(workload, level, expected)
            cases.append(base)
            for competitor, module in modules.items():
                if competitor == PEER:
                    case = peer_case(workload, level, module)
                elif competitor == LOADERS:
                    case = loaders_case(workload, level, module)
                else:
                    case = own_case(workload, level, competitor, module)
                if case is not None:
                    compare(case.name, case.result(), expected)
                    cases.append(case)
    return cases


def measure(cases: list[Case], rounds: int, seconds: float, progress: bool) -> None:
    for case in cases:
        case.calibrate(seconds)
    # What is alive now stays; what a case makes, it also drops.
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        for number in range(rounds):
            if progress:
                print(f"\rround {number + 1} of {rounds}", end="", file=sys.stderr, flush=True)
            for case in cases:
                case.measure()
    finally:
        gc.enable()
        gc.unfreeze()
        if progress:
            print(file=sys.stderr)


def table(cases: list[Case], competitors: list[str]) -> str:
    """The results as a table that is Markdown too."""
    header = ["workload", "tuples", "level", "baseline ns"]
    if TWIN in competitors:
        header += ["python ns", "ratio"]
    if COMPILED in competitors:
        header += ["cython ns", "ratio", "goal", ""]
    if PEER in competitors:
        header += ["pypgoutput ns", "baseline faster"]
        if COMPILED in competitors:
            header += ["cython faster"]
    if LOADERS in competitors:
        header += ["psycopg ns"]
        if COMPILED in competitors:
            header += ["cython faster", "goal"]
    lines = [header]
    by_key: dict[tuple[str, str, str], dict[str, Case]] = {}
    for case in cases:
        by_key.setdefault(case.key, {})[case.competitor] = case
    for key, row in by_key.items():
        base = row[BASELINE].median
        line = [*key, cell(row[BASELINE])]
        if TWIN in competitors:
            ratio = base / row[TWIN].median
            line += [cell(row[TWIN]), times(ratio) + ("" if ratio >= TWIN_GOAL else " (below 1)")]
        if COMPILED in competitors:
            ratio, goal = base / row[COMPILED].median, GOALS.get(key)
            verdict = "" if goal is None else "met" if ratio >= goal else "missed"
            line += [cell(row[COMPILED]), times(ratio), f"≥ {goal:g}×" if goal else "", verdict]
        if PEER in competitors:
            if PEER in row:
                peer = row[PEER].median
                line += [cell(row[PEER]), times(peer / base)]
                if COMPILED in competitors:
                    line += [times(peer / row[COMPILED].median)]
            else:
                line += [""] * (3 if COMPILED in competitors else 2)
        if LOADERS in row:
            loaders = row[LOADERS].median
            line += [cell(row[LOADERS])]
            if COMPILED in competitors:
                goal = LOADERS_GOALS.get(key[0])
                line += [times(loaders / row[COMPILED].median), f"≥ {goal:g}×" if goal else ""]
        line += [""] * (len(header) - len(line))
        lines.append(line)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    left = 3
    lines.insert(1, ["-" * w if i < left else "-" * (w - 1) + ":" for i, w in enumerate(widths)])
    return "\n".join(
        "| "
        + " | ".join(
            text.ljust(width) if i < left else text.rjust(width)
            for i, (text, width) in enumerate(zip(line, widths, strict=True))
        )
        + " |"
        for line in lines
    )


def cell(case: Case) -> str:
    digits = 1 if case.median < 100 else 0
    return f"{case.median:,.{digits}f} ±{case.spread:.0%}"


def times(ratio: float) -> str:
    return f"{ratio:.{0 if ratio >= 100 else 1 if ratio >= 10 else 2}f}×"


def describe() -> dict[str, str]:
    """Where and with what this was measured."""
    processor = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                processor = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    package = importlib.import_module("pgoutput_fast")
    described = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(" ", "seconds"),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs, {processor}",
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "pgoutput_fast": package.__version__,
    }
    for name in ("cython", "psycopg", "pypgoutput", "pyperf"):
        found = next(iter(importlib.metadata.distributions(name=name)), None)
        described[name] = "not installed" if found is None else found.version
    return described


def write_json(path: Path, cases: list[Case], described: dict[str, str]) -> str:
    """Store all samples, as pyperf does where it is installed; return the name of the format."""
    pyperf, _ = optional_module("pyperf")
    if pyperf is None:
        benchmarks = [
            {
                "name": case.name,
                "frames": case.frames,
                "loops": case.loops,
                "nanoseconds_per_frame": case.samples,
            }
            for case in cases
        ]
        document = {"metadata": described, "benchmarks": benchmarks}
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        return "plain JSON"
    suite = pyperf.BenchmarkSuite(
        [
            pyperf.Benchmark(
                [
                    pyperf.Run(
                        [sample / 1e9 for sample in case.samples],
                        metadata={
                            **described,
                            "name": case.name,
                            "unit": "second",
                            "loops": case.loops,
                            "inner_loops": case.frames,
                        },
                        collect_metadata=False,
                    )
                ]
            )
            for case in cases
        ]
    )
    suite.dump(str(path), replace=True)
    return "pyperf's JSON"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure both implementations against a plain decoder, as ratios in one run.",
    )
    parser.add_argument("--quick", action="store_true", help="few short rounds: a rough look")
    parser.add_argument("--json", metavar="FILE", type=Path, help="store all samples in FILE")
    parser.add_argument(
        "--workload", action="append", choices=workloads.NAMES, help="this one only (repeatable)"
    )
    options = parser.parse_args(arguments)
    if options.json is not None and not options.json.parent.is_dir():
        parser.error(f"--json: there is no directory {str(options.json.parent)!r}")
    rounds, seconds = (5, 0.004) if options.quick else (15, 0.025)

    modules: dict[str, Any] = {}
    missing: list[str] = []
    for competitor, module_name in (
        (TWIN, "pgoutput_fast._pure"),
        (COMPILED, "pgoutput_fast._core"),
        (PEER, "pypgoutput.decoders"),
        (LOADERS, "psycopg_binary._psycopg"),
    ):
        module, reason = optional_module(module_name)
        if module is None:
            missing.append(f"not measured: {competitor} ({reason})")
        else:
            modules[competitor] = module
    described = describe()
    for name, value in described.items():
        print(f"{name}: {value}")
    for line in missing:
        print(line)
    try:
        cases = make_cases(options.workload or list(workloads.NAMES), modules)
    except WrongResult as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    measure(cases, rounds, seconds, progress=sys.stderr.isatty())
    print(f"\nCPU time per frame in ns, median ± quartile distance of {rounds} interleaved rounds")
    print(f"ratio: times as fast as the baseline; goal of python: ≥ {TWIN_GOAL:g}×\n")
    print(table(cases, [BASELINE, *modules]))
    print()
    for level, meaning in LEVELS.items():
        print(f"{level}: {meaning}")
    if options.json is not None:
        print(f"\nstored as {write_json(options.json, cases, described)} in {options.json}")
    return 0
