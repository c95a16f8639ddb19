"""What all benchmarks share: the loop that measures, its results, and how they are stored.

A case gives one sample of each of its metrics when it is called: seconds per item (`cpu`, `wall`,
…) or bytes (`memory`). An item is a frame if frames are decoded, and a change if a server is read.
`measure` interleaves cases: in every round it calls each of them once, and each round begins one
case later. So if the machine becomes slower or has other work, all cases suffer alike.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import gc
import importlib
import importlib.metadata
import json
import os
import platform
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

UNITS = {
    "cpu": "second",
    "wall": "second",
    "process": "second",
    "server": "second",
    "java": "second",
    "python": "second",
    "memory": "byte",
    "median": "second",
    "p95": "second",
    "p99": "second",
}
"""Metric → its unit, as pyperf names it."""

# The packages whose versions are stored with a run, if they are installed.
DISTRIBUTIONS = (
    *("Cython", "numpy", "pyarrow", "psycopg", "polars", "duckdb", "adbc-driver-postgresql"),
    *("pypgoutput", "walflux", "psycopg2-binary", "pyspark", "pandas"),
)


_NOT_INSTALLED = "not installed"
_MEMORY_TIMEOUT = 10  # seconds


class NotMeasured(Exception):
    """A case can't be measured on this machine; the message says why."""


@dataclasses.dataclass
class Case:
    """One measurement: a competitor on a workload, named ``workload/format/level/who``."""

    name: str
    sample: Callable[[], Mapping[str, float]]
    warm_up: Callable[[], object] = lambda: None


class Results:
    """Samples by case and metric, the environment they were taken in, and what was not measured."""

    def __init__(self, described: Mapping[str, str] | None = None) -> None:
        self.described = dict(described or {})
        self.samples: dict[tuple[str, str], list[float]] = {}
        self.versions: dict[str, str] = {}
        """Case → version, of competitors that report it themselves."""
        self.missing: dict[str, str] = {}
        """Case that was not measured → the reason."""
        self.checks: dict[str, set[int]] = {}
        """Checksums of the results of peers for the same bytes, which are compared; not stored."""

    def add(self, name: str, sample: Mapping[str, float]) -> None:
        """Add a sample of each metric. Zeros are left out: the clock was too coarse for them."""
        for metric, value in sample.items():
            if value > 0:
                self.samples.setdefault((name, metric), []).append(value)

    def update(self, other: Results) -> None:
        """Add another run's results, which replace those of the same cases.

        What was not installed then was not measured either, and stays as it was told before.
        """
        self.described |= {
            name: told
            for name, told in other.described.items()
            if told != _NOT_INSTALLED or name not in self.described
        }
        self.samples |= other.samples
        self.versions |= other.versions
        self.missing |= other.missing

    def names(self) -> list[str]:
        return list(dict.fromkeys(name for name, _ in self.samples))

    def median(self, name: str, metric: str = "cpu") -> float | None:
        found = self.samples.get((name, metric))
        return statistics.median(found) if found else None

    def spread(self, name: str, metric: str = "cpu") -> float:
        """The distance between the quartiles, divided by the median."""
        found = self.samples[name, metric]
        if len(found) < 2:
            return 0.0
        low, _, high = statistics.quantiles(found, n=4, method="inclusive")
        return (high - low) / max(statistics.median(found), 1e-15)

    def ratio(self, name: str, base: str, metric: str = "cpu") -> float | None:
        """How many times as long `name` takes as `base`; None if either was not measured.

        It is the median of the ratios within each round, which does not change if the machine
        becomes slower between rounds. If the cases were not measured in the same rounds, it is the
        ratio of their medians.
        """
        ones, others = self.samples.get((name, metric)), self.samples.get((base, metric))
        if not ones or not others:
            return None
        if len(ones) != len(others):
            return statistics.median(ones) / statistics.median(others)
        return statistics.median(
            one / max(other, 1e-15) for one, other in zip(ones, others, strict=True)
        )

    # Results are stored as a suite of pyperf, with all that its format does not provide for in the
    # metadata.

    def dump(self, path: Path) -> None:
        """Store the results in pyperf's JSON format."""
        document = {
            "version": "1.0",
            "metadata": {
                **self.described,
                "missing": json.dumps(self.missing),
                "versions": json.dumps(self.versions),
            },
            "benchmarks": [
                {
                    "metadata": {"name": f"{name} [{metric}]", "unit": UNITS[metric]},
                    "runs": [{"values": values}],
                }
                for (name, metric), values in self.samples.items()
            ],
        }
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Results:
        """Read results that `dump` has stored."""
        document = json.loads(path.read_text(encoding="utf-8"))
        described = document["metadata"]
        missing = json.loads(described.pop("missing"))
        versions = json.loads(described.pop("versions"))
        results = cls(described)
        results.missing = missing
        results.versions = versions
        for benchmark in document["benchmarks"]:
            name, _, metric = benchmark["metadata"]["name"].rpartition(" [")
            values = [value for run in benchmark["runs"] for value in run["values"]]
            results.samples[name, metric.rstrip("]")] = values
        return results


# --- The loop -------------------------------------------------------------------------------------


def timed(name: str, run: Callable[[], object], items: int, seconds: float) -> Case:
    """A case that measures this process's CPU time, in loops of about `seconds` or more."""
    loops = 0

    def once() -> float:
        start = time.process_time_ns()
        for _ in range(loops):
            run()
        return (time.process_time_ns() - start) / 1e9 / loops

    def calibrate() -> None:
        nonlocal loops
        run()
        loops = 1
        # The time of one call may be 0, if the clock is coarse.
        loops = max(1, round(seconds / max(once(), 1e-9)))

    return Case(name, lambda: {"cpu": once() / items}, calibrate)


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """A context without garbage collection; cases free by themselves what they make."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def measure(cases: Iterable[Case], rounds: int, results: Results) -> None:
    """Measure the cases, interleaved. Those that can't be measured go into `missing`."""
    left = list(cases)

    def attempt(case: Case, call: Callable[[], object]) -> None:
        try:
            call()
        except NotMeasured as reason:
            results.missing[case.name] = str(reason)
            left.remove(case)

    for case in list(left):
        attempt(case, case.warm_up)
    with no_garbage_collection():
        for number in range(rounds):
            first = number % max(len(left), 1)
            for case in left[first:] + left[:first]:
                progress(f"round {number + 1} of {rounds}: {case.name}")
                attempt(case, lambda case=case: results.add(case.name, case.sample()))  # type: ignore[misc]
    progress("")


def progress(text: str) -> None:
    """Show on a terminal what is being measured."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text[:100]}", end="", file=sys.stderr, flush=True)


def peak_memory(prepare: Callable[[], Callable[[], object]]) -> float:
    """The most bytes by which a call makes its process grow. Linux only.

    A new process is forked for it. `prepare` is called there first, and returns the call to
    measure; the memory that it needs itself is not counted.

    Raises
    ------
    NotMeasured
        The system does not report the size of processes, or the call fails.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        # In the child, which must not run the parent's clean-up or handlers.
        try:
            # A library that had threads in the parent may wait for them here for ever.
            signal.alarm(_MEMORY_TIMEOUT)
            run = prepare()
            gc.collect()
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
            before = _status("VmRSS")
            run()
            os.write(writer, str(_status("VmHWM") - before).encode())
        except BaseException as error:  # noqa: BLE001 - the parent is told
            os.write(writer, f"{type(error).__name__}: {error}"[:500].encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:  # noqa: PTH123 - a descriptor
        told = pipe.read().decode()
    os.waitpid(child, 0)
    if not told.isdigit():
        raise NotMeasured(told or "the forked process died, or hung")
    return float(told)


def peak_of(pid: int) -> int:
    """The greatest resident size of a process so far, in bytes; 0 if it has ended."""
    try:
        return _status("VmHWM", pid)
    except NotMeasured:
        return 0


def _status(field: str, pid: int | str = "self") -> int:
    """A size from /proc/PID/status, in bytes."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise NotMeasured(f"the system does not tell {field}")


# --- What is measured where -----------------------------------------------------------------------


def optional_module(name: str) -> Any:
    """Import an optional module.

    Raises
    ------
    NotMeasured
        It can't be imported; the message says why.
    """
    try:
        if name.startswith("psycopg_binary"):
            importlib.import_module("psycopg")  # must be imported before its parts
        return importlib.import_module(name)
    except ImportError as error:
        raise NotMeasured(f"{type(error).__name__}: {error}") from None


def describe() -> dict[str, str]:
    """The machine, the time and the versions of a run."""
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
        "load": f"{os.getloadavg()[0]:.1f}",
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "pgoutput_fast": package.__version__,
    }
    for name in DISTRIBUTIONS:
        found = next(iter(importlib.metadata.distributions(name=name)), None)
        described[name] = _NOT_INSTALLED if found is None else found.version
    return described


def grouped(missing: Mapping[str, str]) -> dict[str, str]:
    """The cases that were not measured; those of one competitor with one reason become one."""
    found: dict[tuple[str, str], list[str]] = {}
    for name, why in missing.items():
        found.setdefault((name.rpartition("/")[2], why), []).append(name)
    return {
        names[0] if len(names) == 1 else f"{who}, {len(names)} cases": why
        for (who, why), names in found.items()
    }


# --- Tables ---------------------------------------------------------------------------------------


def table(lines: Sequence[Sequence[str]], left: int = 1) -> str:
    """A table for the terminal and for Markdown; the first `left` columns are aligned left."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rule = ["-" * w if i < left else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
    return "\n".join(
        "| "
        + " | ".join(
            text.ljust(width) if i < left else text.rjust(width)
            for i, (text, width) in enumerate(zip(line, widths, strict=True))
        )
        + " |"
        for line in (lines[0], rule, *lines[1:])
    )


def times(ratio: float) -> str:
    """A ratio as text, with its significant digits."""
    return f"{ratio:.{0 if ratio >= 100 else 1 if ratio >= 10 else 2}f}×"


def nanoseconds(seconds: float) -> str:
    """Seconds as nanoseconds, without the unit."""
    value = seconds * 1e9
    return f"{value:,.{1 if value < 100 else 0}f}"
