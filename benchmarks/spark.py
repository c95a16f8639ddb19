"""Measure how fast Spark reads the columns of captured changes.

The frames of a workload are written into segments by the project's own writer, repeated until there
are enough. Then Spark reads all columns of all changes and throws them away (its sink "noop"), from
the segments and from a Parquet table of the same frames. In the same rounds it reads record batches
of the same columns that were made before, which shows what Spark alone costs. Beside the wall clock
time, the CPU time of the processes is measured, which shows what limits the speed, and the cost of
each step of a Python worker, run in this process.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql.pandas.types import to_arrow_schema

import pgoutput_fast as pf
from pgoutput_fast import testing
from pgoutput_fast.segments import SegmentMetadata, SegmentReader, SegmentWriter, list_segments
from pgoutput_fast.spark import decode_frames, read_segments, session
from pgoutput_fast.spark._executor import ExecutorTarget, change_batches

from . import spark_udfs, workloads
from .decoders import WrongResult
from .harness import Case, Results, measure, optional_module, progress

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

GENERATED = 100_000  # rows; more changes are the same rows again with other LSNs


def frames_of(workload: workloads.Workload, changes: int) -> Iterator[bytes]:
    """The frames of at least `changes` changes, with rising LSNs."""
    preamble = workload.frames[: workload.preamble]
    body = workload.frames[workload.preamble :]
    ends: tuple[Any, Any] = (pf.decode(body[0]), pf.decode(body[-1]))
    first, last = ends[0].final_lsn, ends[1].end_lsn
    yield from preamble
    for shift in range(0, -(-changes // len(workload.rows)) * (last - first), last - first):
        for frame in body:
            if frame[:1] == b"B":
                begin: Any = pf.decode(frame)
                yield testing.begin(begin.xid, begin.final_lsn + shift, begin.commit_time)
            elif frame[:1] == b"C":
                commit: Any = pf.decode(frame)
                yield testing.commit(
                    commit.commit_lsn + shift, commit.end_lsn + shift, commit.commit_time
                )
            else:
                yield frame


def land(workload: workloads.Workload, changes: int, directory: Path) -> None:
    """Write segments, and Parquet files of the same frames."""
    metadata = SegmentMetadata(
        "1", "bench", "bench", ("bench",), 160000, "UTF8",
        {"binary": "true" if workload.tuple_format == "binary" else "false"},
        {"proto_version": "1"},
    )  # fmt: skip
    with SegmentWriter(directory / "segments", metadata, confirmed_flush_lsn=0) as writer:
        lsn = 0
        for frame in frames_of(workload, changes):
            if frame[:1] == b"B":
                begin: Any = pf.decode(frame)
                lsn = begin.final_lsn
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
    """Seconds of CPU that this process's descendants have used, by the program that they run."""
    parents, used = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                head, _, tail = (entry / "stat").read_text().rpartition(")")
            except OSError:
                continue
            fields = tail.split()
            parents[int(entry.name)] = int(fields[1])
            # The fields include the times of its children that have ended.
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


def target_of(changes: DataFrame, table: str) -> ExecutorTarget:
    """The description of a table's changes that the workers are given."""
    columns = cast("StructType", changes.schema["after"].dataType)
    return ExecutorTarget(
        table,
        tuple((field.name, field.dataType.simpleString()) for field in columns),
        to_arrow_schema(changes.schema, timezone="UTC"),
    )


def made_batches(directory: Path, changes: DataFrame, table: str, count: int) -> DataFrame:
    """At least `count` changes: the record batches of one segment repeated, without decoding."""
    path = directory / "made.arrow"
    target = target_of(changes, table)
    segment = list_segments(directory / "segments")[0].path
    rows = 0
    with (
        SegmentReader(segment) as reader,
        pa.ipc.new_file(str(path), target.schema) as file,
    ):
        for batch in change_batches(((str(segment), frames) for frames in reader), target):
            file.write_batch(batch)
            rows += batch.num_rows

    def give(numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        times = sum(batch.num_rows for batch in numbers)
        with pa.ipc.open_file(pa.memory_map(str(path))) as file:
            made = [file.get_batch(i) for i in range(file.num_record_batches)]
        for _ in range(times):
            yield from made

    times = -(-count // rows)
    return changes.sparkSession.range(0, times, 1, 2).mapInArrow(give, changes.schema)


def steps(directory: Path, target: ExecutorTarget) -> Iterator[tuple[str, float]]:
    """The steps of a worker, run in this process, and the CPU seconds of each."""
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


def job(make: Callable[[], DataFrame], changes: int) -> Mapping[str, float]:
    """One sample: write a DataFrame into Spark's sink "noop"; seconds per change."""
    before = cpu_times()
    start = time.perf_counter()
    make().write.format("noop").mode("overwrite").save()
    wall = time.perf_counter() - start
    used = {who: at - before[who] for who, at in cpu_times().items()}
    return {metric: value / changes for metric, value in {"wall": wall, **used}.items()}


def run(options: argparse.Namespace, results: Results) -> None:
    """Write the segments, measure all ways of reading them, and the steps of a worker."""
    scale = options.scale or (0.1 if options.quick else 1.0)
    rounds = options.rounds or (2 if options.quick else 5)
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        workload = workloads.generate("narrow", "text", GENERATED)
        progress("landing frames")
        land(workload, round(5_000_000 * scale), directory)
        (directory / "few").mkdir()
        land(workload, round(200_000 * scale), directory / "few")
        rows_of(workload, directory / "rows")
        with spark_session() as spark:
            cases = list(landed_cases(spark, workload, directory))
            cases += udf_cases(spark, workload, directory, scale)
            results.missing[f"spark/{workload.name}/read_segments, pypgoutput"] = (
                "it reads no segments"
            )
            measure(cases, rounds, results)
            changes = read_segments(spark, directory / "segments", _table(workload)).count()
            target = target_of(
                read_segments(spark, directory / "segments", _table(workload)), _table(workload)
            )
        results.described["spark"] = (
            f"{workload}, local[2]; read_segments and decode_frames {changes:,} changes, "
            "UDFs as many as take a while"
        )
        for name, seconds in steps(directory, target):
            results.add(f"{workload}/steps/{name}", {"cpu": seconds / changes})


@contextlib.contextmanager
def spark_session() -> Iterator[SparkSession]:
    """A Spark session on two cores, whose workers can import the benchmarks."""
    before = os.environ.get("PYTHONPATH")
    root = str(Path(__file__).parents[1])
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [root, before]))
    spark = session("local[2]", "pgoutput_fast benchmarks", {"spark.driver.memory": "2g"})
    spark.sparkContext.setLogLevel("ERROR")
    try:
        yield spark
    finally:
        spark.stop()
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def _table(workload: workloads.Workload) -> str:
    assert workload.table is not None
    return f"public.{workload.table.name}"


def landed_cases(
    spark: SparkSession, workload: workloads.Workload, directory: Path
) -> Iterator[Case]:
    """The cases of the package's own readers."""
    relations = workload.frames[: workload.preamble]
    ways: dict[str, Callable[[], DataFrame]] = {
        "read_segments": lambda: read_segments(spark, directory / "segments", _table(workload)),
        "decode_frames": lambda: decode_frames(
            spark.read.parquet(str(directory / "frames")), _table(workload), relations
        ),
    }
    changes = ways["read_segments"]().count()
    made = made_batches(directory, ways["read_segments"](), _table(workload), changes)
    ways["batches made before"] = lambda: made
    few = directory / "few"

    def by_twin() -> DataFrame:
        # Spark starts other worker processes for another environment.
        environment = spark.sparkContext.environment
        environment["PGOUTPUT_FAST_IMPL"] = "python"
        try:
            return read_segments(spark, few / "segments", _table(workload))
        finally:
            del environment["PGOUTPUT_FAST_IMPL"]

    ways["read_segments, twin"] = by_twin
    for name, make in ways.items():
        changes = make().count()
        sample = functools.partial(job, make, changes)
        yield Case(f"spark/{workload.name}/{name}", sample, sample)


PART = 100_000  # rows of a file


def rows_of(workload: workloads.Workload, directory: Path) -> None:
    """Write only the frames of rows into twenty Parquet files, of which slow ways read fewer."""
    directory.mkdir()
    frames = [frame for frame in workload.frames if frame[:1] in (b"I", b"U")]
    table = pa.table({"data": pa.array(frames[:PART], pa.binary())})
    for number in range(20):
        pq.write_table(table, directory / f"{number:02}.parquet", compression="none",
                       use_dictionary=False)  # fmt: skip


def udf_cases(
    spark: SparkSession, workload: workloads.Workload, directory: Path, scale: float
) -> Iterator[Case]:
    """A case for every way in which Spark calls Python, with every decoder."""
    from pyspark.sql.types import StringType, StructField, StructType

    relations = tuple(workload.frames[: workload.preamble])
    assert workload.table is not None
    names = [column.name for column in workload.table.columns]
    changes = read_segments(spark, directory / "segments", _table(workload))
    typed = cast("StructType", changes.schema["after"].dataType)
    texts = StructType([StructField(name, StringType()) for name in names])
    for way, make in spark_udfs.WAYS.items():
        for who in spark_udfs.DECODERS:
            is_fast = who == "pgoutput_fast" and way != "pickled UDF"
            files = max(2, round((20 if is_fast else 2) * scale))
            paths = [str(directory / "rows" / f"{number:02}.parquet") for number in range(files)]

            def frames(make: Any = make, who: str = who, paths: list[str] = paths) -> DataFrame:
                schema = texts if who == "pypgoutput" else typed
                return make(spark.read.parquet(*paths), schema, who, relations)  # type: ignore[no-any-return]

            def warm_up(frames: Any = frames, way: str = way, who: str = who) -> None:
                if who == "pypgoutput":
                    optional_module("pypgoutput.decoders")
                found = [tuple(row) for row in frames().limit(5).collect()]
                rows = [tuple(map(str, row)) for row in workload.rows[:5]]
                if [tuple(map(str, row)) for row in found] != rows:
                    raise WrongResult(f"spark, {way}, {who}: {found[0]}, expected {rows[0]}")

            sample = functools.partial(job, frames, files * PART)
            yield Case(f"spark/{workload.name}/{way}, {who}", sample, warm_up)
