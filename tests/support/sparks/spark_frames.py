"""Frames for tests of Spark, the segments that they land in, and rows."""

from __future__ import annotations

import pytest
from pyspark.sql import types as T  # noqa: N812

from pgoutput_fast import testing
from pgoutput_fast.segments import SegmentMetadata, SegmentWriter

INT4, INT8, TEXT, NUMERIC, TIME, DATE, UUID, JSONB, BYTEA, TIMESTAMPTZ, TIMESTAMP = (
    (23, -1), (20, -1), (25, -1), (1700, (12 << 16 | 2) + 4), (1083, -1), (1082, -1), (2950, -1),
    (3802, -1), (17, -1), (1184, -1), (1114, -1),
)  # fmt: skip

needs_time = pytest.mark.skipif(not hasattr(T, "TimeType"), reason="Spark has TIME from 4.1 on")


def relation(oid, name, columns, *, namespace="public", identity="d", key=("id",)):
    table = testing.Table(
        name, columns, oid, namespace=namespace, replica_identity=identity,
        key=[column for column in columns if column in key],
    )  # fmt: skip
    return table.relation()


def insert(oid, *values):
    return testing.insert(oid, values)


def update(oid, values, old=None, kind="K"):
    return testing.update(oid, values, old, None if old is None else kind)


def begin(lsn, xid, time=86_400_000_000):
    return testing.begin(xid, lsn, time)


def commit(lsn, time=86_400_000_000):
    return testing.commit(lsn, lsn + 8, time)


def transaction(lsn, xid, *frames):
    return [begin(lsn, xid), *frames, commit(lsn)]


COLUMNS = ["op", "xid", "subxid", "lsn", "commit_lsn", "commit_time", "seq", "old_kind"]


def land(directory, frames, *, segment_bytes=1 << 20, encoding="UTF8"):
    metadata = SegmentMetadata("1", "d", "s", ("p",), 180000, encoding, {}, {"proto_version": "1"})
    with SegmentWriter(
        directory, metadata, confirmed_flush_lsn=0, segment_bytes=segment_bytes
    ) as writer:
        for lsn, frame in enumerate(frames, 1000):
            writer.write(0 if frame[:1] in b"RY" else lsn, frame)
        writer.flush()
    return directory


def rows(frame):
    collected = frame.orderBy("commit_lsn", "seq").collect()
    assert frame.columns == [*COLUMNS, "before", "after", "unchanged", "relation"]
    return [tuple(row[i] if i < 8 or i == 10 else row[i] and tuple(row[i]) for i in range(11))
            for row in collected]  # fmt: skip


def landed(spark, tmp_path, frames, **columns):
    """A Parquet table of frames, in as many files as there are frames."""
    names = ["n", "data", *columns]
    values = [
        (n, frame, *(column[n] for column in columns.values())) for n, frame in enumerate(frames)
    ]
    kinds = "n int, data binary" + "".join(f", {name} bigint" for name in columns)
    path = str(tmp_path / "frames")
    spark.createDataFrame(values, kinds).repartitionByRange(len(frames), "n").write.parquet(path)
    frame = spark.read.option("maxPartitionBytes", 1).parquet(path)
    assert frame.columns == names
    return frame


# --- streamed transactions -----------------------------------------------------------------------


def partitions(spark, *groups, columns="data binary"):
    """A DataFrame of frames, each group a partition."""
    context = spark.sparkContext
    parts = [
        context.parallelize([frame if isinstance(frame, tuple) else (frame,) for frame in group], 1)
        for group in groups
    ]
    return spark.createDataFrame(context.union(parts), columns)
