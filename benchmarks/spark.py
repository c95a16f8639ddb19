"""`python -m benchmarks.spark`: how fast Spark gets the columns of landed changes.

The frames of a workload are landed by the project's own writer, as often as it takes. Then Spark
reads all columns of all changes and throws them away (its sink "noop"): from the segments, and from
a Parquet table of the same frames. Beside the time of day stands the CPU time of the processes, to
tell who limits whom, and what the steps of a Python worker cost by themselves, in this process.
"""

from __future__ import annotations

import argparse
import os
import statistics
import struct
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql.pandas.types import to_arrow_schema

from benchmarks import workloads
from pgoutput_fast.segments import SegmentMetadata, SegmentReader, SegmentWriter, list_segments
from pgoutput_fast.spark import decode_frames, read_segments, session
from pgoutput_fast.spark._decode import Target, change_batches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

GENERATED = 100_000  # rows; more are the same ones again, at other LSNs
_BEGIN = struct.Struct(">cQqI")
_COMMIT = struct.Struct(">cBQQq")


def frames_of(workload: workloads.Workload, changes: int) -> Iterator[bytes]:
    """The frames of at least as many changes, their LSNs rising."""
    preamble = workload.frames[: workload.preamble]
    body = workload.frames[workload.preamble :]
    first, last = _BEGIN.unpack(body[0])[1], _COMMIT.unpack(body[-1])[3]
    yield from preamble
    for shift in range(0, -(-changes // len(workload.rows)) * (last - first), last - first):
        for frame in body:
            if frame[:1] == b"B":
                tag, lsn, at, xid = _BEGIN.unpack(frame)
                yield _BEGIN.pack(tag, lsn + shift, at, xid)
            elif frame[:1] == b"C":
                tag, flags, lsn, end, at = _COMMIT.unpack(frame)
                yield _COMMIT.pack(tag, flags, lsn + shift, end + shift, at)
            else:
                yield frame


def land(workload: workloads.Workload, changes: int, directory: Path) -> None:
    """Segments, and Parquet files of the same frames."""
    metadata = SegmentMetadata(
        "1", "bench", "bench", ("bench",), 160000, "UTF8",
        {"binary": "true" if workload.tuple_format == "binary" else "false"},
        {"proto_version": "1"},
    )  # fmt: skip
    with SegmentWriter(directory / "segments", metadata, confirmed_flush_lsn=0) as writer:
        lsn = 0
        for frame in frames_of(workload, changes):
            if frame[:1] == b"B":
                lsn = _BEGIN.unpack(frame)[1]
            writer.write(0 if frame[:1] == b"R" else lsn, frame)
        writer.flush()
    (directory / "frames").mkdir()
    for segment in list_segments(directory / "segments"):
        with SegmentReader(segment.path) as reader:
            batches = list(reader)
            schema = batches[0].schema
            path = directory / "frames" / f"{segment.path.stem}.parquet"
            with pq.ParquetWriter(path, schema, compression="none", use_dictionary=False) as file:
                for batch in batches:
                    file.write_batch(batch)


def cpu_times() -> dict[str, float]:
    """Seconds of CPU of this process's descendants so far, by what they run."""
    parents, used = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                head, _, tail = (entry / "stat").read_text().rpartition(")")
            except OSError:
                continue
            fields = tail.split()
            parents[int(entry.name)] = int(fields[1])
            # With those of its children that have ended.
            used[int(entry.name)] = head.partition("(")[2], sum(map(int, fields[11:15]))
    found = {"java": 0.0, "python": 0.0}
    for pid, (name, ticks) in used.items():
        above = parents[pid]
        while above in parents and above != os.getpid():
            above = parents[above]
        if above == os.getpid():
            name = "java" if name == "java" else "python"
            found[name] += ticks / os.sysconf("SC_CLK_TCK")
    return found


def measured(run: Callable[[], Any], rounds: int) -> tuple[float, dict[str, float]]:
    """The median round's seconds, and the CPU seconds of a round on average."""
    before = cpu_times()
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    after = cpu_times()
    return statistics.median(seconds), {k: (after[k] - before[k]) / rounds for k in after}


def target_of(changes: DataFrame, table: str) -> Target:
    """What the workers are told of the changes of a table."""
    columns = cast("StructType", changes.schema["after"].dataType)
    return Target(
        table,
        tuple((field.name, field.dataType.simpleString()) for field in columns),
        to_arrow_schema(changes.schema, timezone="UTC"),
    )


def steps(directory: Path, target: Target) -> Iterator[tuple[str, float]]:
    """What the steps of a worker cost in this process, CPU seconds."""
    paths = [segment.path for segment in list_segments(directory / "segments")]

    def batches() -> Iterator[tuple[str, pa.RecordBatch]]:
        for path in paths:
            with SegmentReader(path) as reader:
                yield from ((str(path), batch) for batch in reader)

    start = time.process_time()
    for _ in batches():
        pass
    yield "segments read and their checksums compared", time.process_time() - start
    start = time.process_time()
    with pa.ipc.new_stream(pa.MockOutputStream(), target.schema) as stream:
        decode = 0.0
        changes = change_batches(batches(), target)
        while True:
            at = time.process_time()
            batch = next(changes, None)
            decode += time.process_time() - at
            if batch is None:
                break
            stream.write_batch(batch)
    yield "the same, and decoded", decode
    yield "the same, and written as Arrow IPC", time.process_time() - start


def main() -> int:
    """Land, read, print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.spark", description=__doc__)
    parser.add_argument("--changes", type=int, default=5_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workload", choices=workloads.NAMES, default="narrow")
    parser.add_argument("--format", choices=workloads.FORMATS, default="text")
    parser.add_argument("--directory", type=Path, help="where landed frames are, or are to be")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = options.directory or Path(temporary)
        workload = workloads.generate(options.workload, options.format, GENERATED)
        if not (directory / "frames").exists():
            land(workload, options.changes, directory)
        report(directory, workload, options)
    return 0


def report(directory: Path, workload: workloads.Workload, options: argparse.Namespace) -> None:
    """Measure and print."""
    table = f"public.{workload.table.name}"
    spark = session("local[2]", "pgoutput_fast benchmarks", {"spark.driver.memory": "2g"})
    relations = workload.frames[: workload.preamble]
    cases: dict[str, Callable[[], DataFrame]] = {
        "read_segments": lambda: read_segments(spark, directory / "segments", table),
        "decode_frames": lambda: decode_frames(
            spark.read.parquet(str(directory / "frames")), table, relations
        ),
    }
    print(f"{workload.name}, {workload.tuple_format}; load {os.getloadavg()[0]:.1f}")
    for name, make in cases.items():
        changes = make().count()  # the first job is always slow

        def run(make: Any = make) -> None:
            make().write.format("noop").mode("overwrite").save()

        run()
        seconds, cpu = measured(run, options.rounds)
        used = ", ".join(f"{who} {at / changes * 1e6:.3f}" for who, at in cpu.items())
        print(
            f"{name}: {changes:,} changes, {changes / seconds:,.0f} a second; CPU µs per change: "
            f"{used}; load {os.getloadavg()[0]:.1f}"
        )
    target = target_of(cases["read_segments"](), table)
    for name, seconds in steps(directory, target):
        print(f"{name}: {seconds / changes * 1e6:.3f} CPU µs per change")
    spark.stop()


if __name__ == "__main__":
    sys.exit(main())
