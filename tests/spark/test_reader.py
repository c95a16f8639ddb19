"""Changes from segments and from landed frames, made of frames written by hand."""

from __future__ import annotations

import datetime as dt
import struct
import warnings
from decimal import Decimal

import pytest
from pyspark.errors import PySparkException

import pgoutput_fast as pf
from pgoutput_fast.errors import PgOutputError
from pgoutput_fast.segments import SegmentMetadata, SegmentWriter
from pgoutput_fast.spark import decode_frames, read_segments

pytestmark = pytest.mark.spark

INT4, INT8, TEXT, NUMERIC, TIME, DATE, UUID, JSONB, BYTEA, TIMESTAMPTZ, TIMESTAMP = (
    (23, -1), (20, -1), (25, -1), (1700, (12 << 16 | 2) + 4), (1083, -1), (1082, -1), (2950, -1),
    (3802, -1), (17, -1), (1184, -1), (1114, -1),
)  # fmt: skip


def relation(oid, name, columns, *, namespace="public", identity="d", key=("id",)):
    frame = b"R" + struct.pack(">I", oid) + f"{namespace}\0{name}\0{identity}".encode()
    frame += struct.pack(">H", len(columns))
    for column, (type_id, modifier) in columns.items():
        frame += bytes([column in key]) + column.encode() + b"\0"
        frame += struct.pack(">Ii", type_id, modifier)
    return frame


def tuple_data(values):
    data = struct.pack(">H", len(values))
    for value in values:
        if value is None:
            data += b"n"
        elif value is pf.UNCHANGED:
            data += b"u"
        else:
            raw = value.encode()
            data += b"t" + struct.pack(">I", len(raw)) + raw
    return data


def insert(oid, *values):
    return b"I" + struct.pack(">I", oid) + b"N" + tuple_data(values)


def update(oid, values, old=None, kind=b"K"):
    before = b"" if old is None else kind + tuple_data(old)
    return b"U" + struct.pack(">I", oid) + before + b"N" + tuple_data(values)


def delete(oid, old, kind=b"K"):
    return b"D" + struct.pack(">I", oid) + kind + tuple_data(old)


def truncate(*oids):
    return b"T" + struct.pack(f">IB{len(oids)}I", len(oids), 0, *oids)


def begin(lsn, xid, time=86_400_000_000):
    return b"B" + struct.pack(">QqI", lsn, time, xid)


def commit(lsn, time=86_400_000_000):
    return b"C" + struct.pack(">BQQq", 0, lsn, lsn + 8, time)


def transaction(lsn, xid, *frames):
    return [begin(lsn, xid), *frames, commit(lsn)]


COMMIT_TIME = dt.datetime(2000, 1, 2)  # in the session's time zone, which is UTC
OLD = {"id": INT4, "a": TEXT}
NEW = {"id": INT4, "a": TEXT, "b": NUMERIC}
STREAM = [
    relation(1, "t", OLD),
    relation(2, "other", {"id": INT4}),
    *transaction(100, 7, insert(1, "1", "one"), insert(2, "5"), insert(1, "2", None)),
    *transaction(200, 8, update(1, ["10", pf.UNCHANGED], ["1", None]), truncate(2, 1)),
    relation(1, "t", NEW),
    *transaction(300, 9, truncate(1, 2), insert(1, "3", "x", "1.50"), delete(1, ["3", None, None])),
]
COLUMNS = ["op", "xid", "subxid", "lsn", "commit_lsn", "commit_time", "seq", "old_kind"]


@pytest.fixture(autouse=True)
def _no_pandas_warning():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning, module="pyspark")
        yield


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
    assert frame.columns == [*COLUMNS, "before", "after", "unchanged"]
    return [tuple(row[i] if i < 8 or i == 10 else row[i] and tuple(row[i]) for i in range(11))
            for row in collected]  # fmt: skip


# op, xid, subxid, commit LSN, commit time, seq, old_kind, before, after, unchanged
EXPECTED = [
    ("insert", 7, None, 100, COMMIT_TIME, 0, None, None, (1, "one", None), ["b"]),
    ("insert", 7, None, 100, COMMIT_TIME, 2, None, None, (2, None, None), ["b"]),
    ("update", 8, None, 200, COMMIT_TIME, 0, "K", (1, None, None), (10, None, None), ["b", "a"]),
    ("truncate", 8, None, 200, COMMIT_TIME, 2, None, None, None, None),
    ("truncate", 9, None, 300, COMMIT_TIME, 0, None, None, None, None),
    ("insert", 9, None, 300, COMMIT_TIME, 2, None, None, (3, "x", Decimal("1.50")), None),
    ("delete", 9, None, 300, COMMIT_TIME, 3, "K", (3, None, None), None, None),
]


def without_lsn(found):
    return [row[:3] + row[4:] for row in found]


@pytest.mark.parametrize("segment_bytes", [1, 1 << 20])
def test_changes_of_one_table_in_segments(spark, tmp_path, segment_bytes):
    directory = land(tmp_path / "s", STREAM, segment_bytes=segment_bytes)
    found = rows(read_segments(spark, directory, "public.t"))
    assert without_lsn(found) == EXPECTED
    assert [row[3] for row in found] == [1003, 1005, 1008, 1009, 1013, 1014, 1015]
    assert read_segments(spark, directory, "public.t").schema["after"].dataType.simpleString() == (
        "struct<id:int,a:string,b:decimal(12,2)>"
    )


def test_types_are_sparks(spark, tmp_path):
    columns = {
        "id": INT4, "n": INT8, "free": (1700, -1), "at": TIMESTAMPTZ, "local": TIMESTAMP,
        "d": DATE, "t": TIME, "u": UUID, "j": JSONB, "raw": BYTEA, "o": (26, -1), "b": (16, -1),
        "f": (700, -1), "point": (600, -1), "unknown": (99999, -1),
    }  # fmt: skip
    values = [
        "1", "-9223372036854775808", "1.10", "2024-02-29 23:59:59.999999+00", "0001-01-01 00:00:00",
        "9999-12-31", "23:59:59.999999", "00000000-0000-4000-8000-00000000000a", '{"a": 1}',
        "\\x00ff", "4294967295", "t", "1.1", "(1,2)", "anything",
    ]  # fmt: skip
    frames = [relation(1, "t", columns), *transaction(100, 7, insert(1, *values))]
    changes = read_segments(spark, land(tmp_path / "s", frames), "public.t")
    assert [field.dataType.simpleString() for field in changes.schema["after"].dataType] == [
        "int", "bigint", "string", "timestamp", "timestamp_ntz", "date", "time(6)", "string",
        "string", "binary", "bigint", "boolean", "float", "string", "string",
    ]  # fmt: skip
    row = changes.selectExpr("after.*", "cast(after.at as string) as at_text").first()
    assert tuple(row)[:3] == (1, -(2**63), "1.10")
    assert row.at_text == "2024-02-29 23:59:59.999999"
    assert tuple(row)[4:9] == (
        dt.datetime(1, 1, 1),
        dt.date(9999, 12, 31),
        dt.time(23, 59, 59, 999999),
        "00000000-0000-4000-8000-00000000000a",
        '{"a": 1}',
    )
    assert tuple(row)[9:12] == (b"\0\xff", 4294967295, True)
    assert tuple(row)[12] == pytest.approx(1.1, rel=1e-7)
    assert tuple(row)[13:15] == ("(1,2)", "anything")


@pytest.mark.parametrize(
    ("type_", "text", "named"),
    [
        (NUMERIC, "NaN", "column v: Decimal('NaN') does not fit into decimal128(12, 2)"),
        (DATE, "infinity", "'v' of public.t (date)"),
        (TIME, "24:00:00", "'v' of public.t (time)"),
        (TIMESTAMPTZ, "0044-03-15 12:00:00+00 BC", "'v' of public.t (timestamptz)"),
        (INT4, "x", "'v' of public.t (int4)"),
    ],
)
def test_values_that_do_not_fit_are_errors_and_readable_as_string(
    spark, tmp_path, type_, text, named
):
    frames = [
        relation(1, "t", {"id": INT4, "v": type_}),
        *transaction(100, 7, insert(1, "1", text)),
    ]
    directory = land(tmp_path / "s", frames)
    with pytest.raises(PySparkException) as error:
        read_segments(spark, directory, "public.t").collect()
    assert named in str(error.value)
    assert "public.t" in str(error.value)
    changes = read_segments(spark, directory, "public.t", "id int, v string")
    assert changes.first().after == (1, text)


def test_a_changed_type(spark, tmp_path):
    frames = [
        relation(1, "t", {"id": INT4, "v": INT4}),
        *transaction(100, 7, insert(1, "1", "5")),
        relation(1, "t", {"id": INT8, "v": TEXT}),
        *transaction(200, 8, insert(1, "2", "five")),
    ]
    directory = land(tmp_path / "s", frames)
    assert [row.after for row in read_segments(spark, directory, "public.t").collect()] == [
        (1, "5"),
        (2, "five"),
    ]
    frames[4], frames[6] = relation(1, "t", {"id": INT4, "v": DATE}), insert(1, "2", "2024-01-01")
    directory = land(tmp_path / "narrow", frames)
    with pytest.raises(PySparkException, match="column v as int, the schema has it as date"):
        read_segments(spark, directory, "public.t").collect()


def test_a_table_that_is_not_there(spark, tmp_path):
    directory = land(tmp_path / "s", STREAM)
    with pytest.raises(PgOutputError, match=r"no Relation of public\.T is in the segments"):
        read_segments(spark, directory, "public.T")
    (tmp_path / "empty").mkdir()
    with pytest.raises(PgOutputError, match="no segments"):
        read_segments(spark, tmp_path / "empty", "public.t")


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


def test_frames_in_one_partition(spark):
    frames = spark.createDataFrame([(frame,) for frame in STREAM], "data binary").coalesce(1)
    found = rows(decode_frames(frames, "public.t"))
    assert without_lsn(found) == EXPECTED
    assert {row[3] for row in found} == {None}


def test_frames_in_many_partitions_need_relations(spark, tmp_path):
    frames = landed(spark, tmp_path, STREAM)
    with pytest.raises(PySparkException, match="give relations="):
        decode_frames(frames.repartition(8, "n"), "public.t").collect()
    stream = pf.Decoder()
    list(stream.decode_many(STREAM))
    tail = frames.filter("n >= 13").repartition(3, "n")
    found = decode_frames(tail, "public.t", stream.relations).collect()
    assert sorted((row.op, row.after and tuple(row.after)) for row in found) == [
        ("delete", None),
        ("insert", (3, "x", Decimal("1.50"))),
        ("truncate", None),
    ]
    # What lies before a partition's first Begin is not known, and not guessed.
    assert {(row.commit_lsn, row.seq) for row in found} <= {(None, None), (300, 0)}


def test_columns_beside_the_frames_give_what_a_partition_lacks(spark, tmp_path):
    context = [(None, None, None)] * len(STREAM)
    for n, (commit_lsn, xid, seq) in {
        3: (100, 7, 0), 4: (100, 7, 1), 5: (100, 7, 2), 8: (200, 8, 0), 9: (200, 8, 1),
        13: (300, 9, 0), 14: (300, 9, 2), 15: (300, 9, 3),
    }.items():  # fmt: skip
        context[n] = commit_lsn, xid, seq
    commit_lsns, xids, seqs = zip(*context, strict=True)
    times = [None if lsn is None else 86_400_000_000 for lsn in commit_lsns]
    frames = landed(
        spark, tmp_path, STREAM, commit_lsn=commit_lsns, xid=xids, seq=seqs, commit_time=times
    )
    rows_of_new = frames.filter("n >= 13").repartition(4, "n")
    relations = [STREAM[1], STREAM[11]]
    found = rows(decode_frames(rows_of_new, "public.t", relations))
    assert without_lsn(found) == EXPECTED[4:]


def test_frames_of_no_use(spark):
    with pytest.raises(PgOutputError, match=r"binary column named data; there are id \(bigint\)"):
        decode_frames(spark.range(1), "public.t")
    frames = spark.createDataFrame([(b"R",), (None,)], "data binary").coalesce(1)
    with pytest.raises(PySparkException, match=r"public\.t: .*frame 0: 'R' frame of 1 bytes"):
        decode_frames(frames, "public.t", schema="id int").collect()
    frames = spark.createDataFrame([(None,)], "data binary")
    with pytest.raises(PySparkException, match="it is null"):
        decode_frames(frames, "public.t", schema="id int").collect()


def test_an_lsn_past_what_a_long_holds_is_an_error(spark):
    frames = [relation(1, "t", {"id": INT4}), *transaction(2**63, 7, insert(1, "1"))]
    frame = spark.createDataFrame([(data,) for data in frames], "data binary").coalesce(1)
    with pytest.raises(PySparkException, match="commit_lsn of a change"):
        decode_frames(frame, "public.t").collect()


def test_a_codec_that_hangs_is_refused(spark, tmp_path):
    name = "spark.sql.execution.arrow.compression.codec"
    spark.conf.set(name, "lz4")
    try:
        with pytest.raises(PgOutputError, match="lz4 hangs"):
            read_segments(spark, tmp_path, "public.t")
    finally:
        spark.conf.unset(name)
