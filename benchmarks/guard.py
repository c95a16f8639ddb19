"""Compare instruction counts with stored ones (`make bench-guard`), to notice a slower decoder.

Fixed cases run under ``valgrind --tool=callgrind``, whose counts of instructions are the same in
each run, whatever else the machine does. Each case runs once and then twice; the difference does
not contain the cost of counting. The counts per frame are compared with those in guard.json. They
were taken with one compiler and one Python. With others the counts are shown, but never fail.

    python -m benchmarks.guard           # compare; fail if a case takes over 4 % more
    python -m benchmarks.guard --write   # store the counts of this run
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import gc
import importlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pgoutput_fast as pf
from pgoutput_fast.transcode import inserts_of_copy, without_xids

from . import native, workloads
from .harness import NotMeasured, table

COUNTS = Path(__file__).with_name("guard.json")
TOLERANCE = 0.04

_ROWS = {"narrow": 2_000, "wide": 500, "fat": 50, "narrow_varied": 2_000, "wide_varied": 500}

_REQUESTS = r"""
#include <valgrind/callgrind.h>
void begin(void) { CALLGRIND_START_INSTRUMENTATION; CALLGRIND_ZERO_STATS; }
void end(const char *name) { CALLGRIND_DUMP_STATS_AT(name); }
"""


def cases() -> dict[str, tuple[Callable[[], object], int]]:
    """Loops over the frames of small workloads, and the number of frames of each."""
    import pgoutput_fast as pf

    from .decoders import own_loop

    core = importlib.import_module("pgoutput_fast.decoding._core")

    if pf.IMPLEMENTATION != "cython":
        raise NotMeasured("the extension is not built")
    found: dict[str, tuple[Callable[[], object], int]] = {}
    for name, tuple_format in (
        ("narrow", "text"), ("narrow", "binary"), ("wide", "text"), ("wide", "binary"),
        ("fat", "text"), ("narrow_varied", "text"), ("wide_varied", "text"),
    ):  # fmt: skip
        workload = workloads.generate(name, tuple_format, _ROWS[name])
        frames = len(workload.frames)
        levels = ("message", "texts", "values", "iteration", "tuple")
        for level in () if name in workloads.VARIED else levels:
            if level == "texts" and tuple_format == "binary":
                continue
            if level in {"iteration", "tuple"} and (name == "fat" or tuple_format == "binary"):
                continue
            found[f"{workload}/{level}"] = (
                own_loop(workload, level, "cython", core).run,
                frames - workload.preamble,
            )
        # The Relation is decoded beforehand: Python code does it, which would cost more than all
        # rows of so small a batch.
        data, offsets = workload.packed()
        start = offsets[workload.preamble]
        data, offsets = data[start:], offsets[workload.preamble :] - start
        decoder = pf.ColumnarDecoder()
        list(decoder.decode(workload.frames[: workload.preamble]))
        count = len(offsets) - 1
        found[f"{workload}/decode_batch"] = functools.partial(pf.decode_batch, data, offsets), count
        found[f"{workload}/ColumnarDecoder"] = (
            functools.partial(_export, decoder, data, offsets),
            count,
        )
        if tuple_format == "binary":
            found |= _transcoded(workload)
    return found


def _transcoded(workload: workloads.Workload) -> dict[str, tuple[Callable[[], object], int]]:
    """The workload's rows from COPY to Insert frames, and from a stream chunk to protocol 1."""
    assert workload.table is not None
    copied, formats = workload.copied(), "b" * len(workload.table.columns)
    inside = inserts_of_copy(copied, workload.table.oid, formats, xid=1)
    count = len(workload.rows)
    make = functools.partial(inserts_of_copy, copied, workload.table.oid, formats)
    cut = functools.partial(without_xids, inside.data, inside.offsets)
    return {f"{workload}/inserts_of_copy": (make, count), f"{workload}/without_xids": (cut, count)}


def _export(decoder: pf.ColumnarDecoder, data: bytes, offsets: Any) -> None:
    for batch in decoder.decode(data, offsets):
        batch.__arrow_c_array__()


def _counted(library: str) -> None:
    """Run each case inside valgrind, and tell callgrind where it begins and ends."""
    requests = ctypes.CDLL(library)
    runs = cases()
    gc.disable()
    for name, (run, frames) in runs.items():
        run()
        run()
        for loops in (1, 2):
            requests.begin()
            for _ in range(loops):
                run()
            requests.end(f"{name} {frames * loops}".encode())


def count() -> dict[str, float]:
    """Instructions per frame of each case.

    Raises
    ------
    NotMeasured
        valgrind, its headers, a C compiler or the extension is missing.
    """
    valgrind = shutil.which("valgrind")
    if valgrind is None:
        raise NotMeasured("valgrind is not installed")
    with tempfile.TemporaryDirectory() as directory:
        source, library = Path(directory, "requests.c"), Path(directory, "requests.so")
        source.write_text(_REQUESTS, encoding="ascii")
        try:
            subprocess.run(
                [*native.compiler(), "-O2", "-shared", "-fPIC", source, "-o", library],
                check=True,
                capture_output=True,
            )
        except (OSError, subprocess.CalledProcessError) as error:
            raise NotMeasured(f"valgrind's headers or a C compiler are missing: {error}") from None
        done = subprocess.run(
            [
                *(valgrind, "--tool=callgrind", "--instr-atstart=no", "--quiet"),
                f"--callgrind-out-file={directory}/out",
                *(sys.executable, "-m", "benchmarks.guard", "--counted", library),
            ],
            env={
                **os.environ,
                "PYTHONHASHSEED": "0",
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                "PGOUTPUT_FAST_IMPL": "cython",
                "OPENBLAS_NUM_THREADS": "1",
            },
            cwd=Path(__file__).parents[1],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise NotMeasured(f"valgrind ended with {done.returncode}: {done.stderr[-500:]}")
        totals: dict[str, list[tuple[int, int]]] = {}
        for path in Path(directory).glob("out.*"):
            text = path.read_text(encoding="utf-8", errors="replace")
            trigger = re.search(r"^desc: Trigger: Client Request: (.*) (\d+)$", text, re.MULTILINE)
            total = re.search(r"^(?:totals|summary): (\d+)", text, re.MULTILINE)
            if trigger and total:
                totals.setdefault(trigger[1], []).append((int(trigger[2]), int(total[1])))
    return per_frame(totals)


def per_frame(totals: Mapping[str, list[tuple[int, int]]]) -> dict[str, float]:
    """Instructions per frame, from pairs (frames, instructions) for few frames and for more."""
    found = {}
    for name, runs in totals.items():
        (few, least), (many, most) = sorted(runs)
        found[name] = round((most - least) / (many - few), 2)
    return found


def environment() -> dict[str, str]:
    """The compiler and Python on which the counts depend."""
    told = subprocess.run(
        [*native.compiler(), "--version"], capture_output=True, text=True, check=False
    ).stdout.splitlines()
    release = re.search(r"(\d+)\.\d+\.\d+", told[0]) if told else None
    return {
        "machine": f"{platform.system()} {platform.machine()}",
        "python": ".".join(platform.python_version_tuple()[:2]),
        "compiler": f"{Path(native.compiler()[0]).name} {release[1] if release else 'unknown'}",
        "cython": ".".join(version("cython").split(".")[:2]),
    }


def compare(
    counts: Mapping[str, float], known: Mapping[str, float]
) -> tuple[str, list[str], list[str]]:
    """A table, the cases that are slower, and those that are new or missing."""
    lines = [["case", "instructions per frame", "before", "change"]]
    slower = []
    for name, got in sorted(counts.items()):
        before = known.get(name)
        change = "" if before is None else f"{got / before - 1:+.1%}"
        if before is not None and got > before * (1 + TOLERANCE):
            slower.append(name)
        lines.append([name, f"{got:,.1f}", "" if before is None else f"{before:,.1f}", change])
    return table(lines), slower, sorted(counts.keys() ^ known.keys())


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.guard",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--write", action="store_true", help="store this run's counts")
    parser.add_argument("--counted", metavar="LIBRARY", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.counted:
        _counted(options.counted)
        return 0
    here = environment()
    try:
        counts = count()
    except NotMeasured as reason:
        print(f"not measured: {reason}", file=sys.stderr)
        return 1
    stored: dict[str, Any] = {"environment": {}, "counts": {}}
    if COUNTS.exists():
        stored = json.loads(COUNTS.read_text(encoding="utf-8"))
    elif not options.write:
        print(f"error: there is no {COUNTS} to compare with; --write makes it", file=sys.stderr)
        return 1
    text, slower, unknown = compare(counts, stored["counts"])
    print(text)
    if options.write:
        document = {"environment": here, "counts": dict(sorted(counts.items()))}
        COUNTS.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        print(f"\nstored in {COUNTS}")
        return 0
    if here != stored["environment"]:
        print(f"\nNot judged: these are of {here}, the stored ones of {stored['environment']}")
        return 0
    if slower:
        print(f"\nOver {TOLERANCE:.0%} more instructions: {', '.join(slower)}. If that is meant, "
              "store the new counts with --write.", file=sys.stderr)  # fmt: skip
    if unknown:
        print(
            f"\nNew or gone: {', '.join(unknown)}; store the counts with --write.", file=sys.stderr
        )
    return 1 if slower or unknown else 0


if __name__ == "__main__":
    sys.exit(main())
