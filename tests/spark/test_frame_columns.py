"""Columns of frames that stand alone, and Arrow frames as a DataFrame."""

from __future__ import annotations

import datetime
import decimal
import json

import pyarrow as pa
import pyspark
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql import types as T  # noqa: N812
from support.expected_errors import expect_error
from support.sparks.spark_frames import (
    INT4,
    INT8,
    JSONB,
    NUMERIC,
    TEXT,
    TIMESTAMPTZ,
    begin,
    commit,
    insert,
    land,
    partitions,
    relation,
    transaction,
    update,
)

from pgoutput_fast import testing
from pgoutput_fast.policies import Policies
from pgoutput_fast.segments import SegmentReader, list_segments
from pgoutput_fast.spark import _executor, decode_frames, decode_udf, error_of, frames_dataframe
from pgoutput_fast.spark.frame_columns import _value

pytestmark = pytest.mark.spark

OLD = relation(1, "t", {"id": INT4, "a": TEXT, "b": TEXT})
NEW = relation(1, "t", {"id": INT4, "b": TEXT, "c": TEXT})
OTHER = relation(2, "other", {"id": INT8})


def plain(row):
    """A struct's values without the names."""
    return tuple(plain(one) if isinstance(one, tuple) else one for one in row)


@pytest.fixture(params=["arrow", "rows"])
def call(request, monkeypatch):
    """How Spark calls the function: with arrays, or as Spark 4.0 does for each row."""
    if request.param == "rows":
        monkeypatch.delattr(F, "arrow_udf", raising=False)
    elif not hasattr(F, "arrow_udf"):
        pytest.skip(f"PySpark {pyspark.__version__} has no functions of arrays")


@pytest.mark.slow
@pytest.mark.usefixtures("call")
def test_each_frame_is_decoded_by_itself(spark):
    frames = [
        (1, begin(100, 7)),
        (2, update(1, ["2", "b2", "c2"], ["1", None, None])),
        (3, insert(2, "5")),
        (4, NEW),
        (5, None),
        (6, insert(1, "1", "b1", None)),
        (7, testing.truncate([2, 1])),
        (8, testing.truncate([2])),
        (9, testing.delete(1, ["1", None, None])),
        (10, b""),
        (11, commit(100)),
    ]
    found = partitions(spark, frames, frames[::-1], columns="n int, data binary")
    changes = found.select("n", decode_udf("data", "public.t", [NEW, OTHER]).alias("change"))
    kind = changes.schema["change"].dataType.simpleString()
    row = "struct<id:int,b:string,c:string>"
    assert kind == (
        f"struct<op:string,old_kind:string,before:{row},after:{row},unchanged:array<string>>"
    )
    collected = [(one.n, one.change and plain(one.change)) for one in changes.collect()]
    assert collected[11:] == collected[:11][::-1]
    assert dict(collected[:11]) == dict.fromkeys(range(1, 12)) | {
        2: ("update", "K", (1, None, None), (2, "b2", "c2"), None),
        6: ("insert", None, None, (1, "b1", None), None),
        7: ("truncate", None, None, None, None),
        9: ("delete", "K", (1, None, None), None, None),
    }


@pytest.mark.usefixtures("call")
def test_values_are_those_of_decode_frames(spark):
    columns = {
        "id": INT4, "n": NUMERIC, "at": TIMESTAMPTZ, "numbers": (1007, -1), "raw": (17, -1),
        "doc": JSONB, "day": (1082, -1), "here": (1114, -1),
    }  # fmt: skip
    table = relation(3, "v", columns)
    rows = [
        insert(3, "1", "12345.67", "2024-02-29 12:00:00.5+00", "{1,NULL,3}", r"\x00ff", '{"a": 1}',
               "2024-02-29", "2024-02-29 01:02:03"),
        insert(3, "2", *[None] * 7),
    ]  # fmt: skip
    frames = partitions(spark, rows)
    known = decode_frames(frames, "public.v", [table]).select("after").collect()
    found = frames.select(decode_udf("data", "public.v", [table]).alias("change"))
    assert [row.change.after for row in found.collect()] == [row.after for row in known]
    assert known[0].after.n == decimal.Decimal("12345.67")
    assert known[0].after.at.replace(tzinfo=None) == datetime.datetime(
        2024, 2, 29, 12, 0, 0, 500000
    )


def test_changes_of_several_tables_in_one_variant(spark):
    frames = partitions(spark, [insert(2, "5"), insert(1, "1", "b1", "c1"), begin(1, 1)])
    tables = [decode_udf("data", f"public.{name}", [NEW, OTHER]) for name in ("t", "other")]
    changes = frames.select(F.coalesce(*map(F.to_variant_object, tables)).alias("change"))
    assert changes.schema["change"].dataType.simpleString() == "variant"
    found = changes.select(F.to_json("change"), F.try_variant_get("change", "$.after.id", "int"))
    texts, ids = zip(*found.collect(), strict=True)
    assert ids == (5, 1, None)
    assert [text and json.loads(text)["after"] for text in texts] == [
        {"id": 5},
        {"id": 1, "b": "b1", "c": "c1"},
        None,
    ]


@pytest.mark.usefixtures("call")
def test_json_that_is_parsed(spark):
    table = relation(3, "v", {"id": INT4, "doc": JSONB})
    frames = partitions(spark, [insert(3, "1", '{"a": [1, 2]}')])
    change = decode_udf("data", "public.v", [table], policies=Policies(json="parse"))
    found = frames.select(change.alias("change"))
    assert found.select(F.variant_get("change.after.doc", "$.a[1]", "int")).collect() == [(2,)]


@pytest.mark.slow
@pytest.mark.usefixtures("call")
def test_frames_that_can_not_be_decoded_are_refused(spark):
    def error(*frames):
        with pytest.raises(PySparkException) as raised:
            partitions(spark, frames).select(decode_udf("data", "public.t", [NEW])).collect()
        return error_of(raised.value)

    good = insert(1, "1", "b", "c")
    bad = error(begin(1, 1), good, insert(1, "x", "b", "c"))
    assert (bad.code, bad.offset, bad.tag) == ("bad_value", 13, "I")
    short = error(good, good[:4])
    assert (short.code, short.tag) == ("truncated", "I")
    # What comes from inside a stream chunk is no null, which would lose the row.
    for streamed, code in (good, "unknown_relation"), (testing.truncate([1]), "bad_count"):
        found = error(testing.in_stream(streamed, 700))
        assert (found.code, found.frame) == (code, 0)
        assert _executor._IN_A_CHUNK[0] in str(found)
    # What is of another version of the table.
    row, announced = error(good, insert(1, "1", "b")), error(good, OLD)
    assert (row.code, row.tag) == ("column_count", "I")
    assert (announced.code, announced.tag) == ("column_count", "R")


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(F, "arrow_udf"), reason="Spark 4.0 gives frames one by one")
def test_the_index_of_a_frame_is_that_in_its_batch(spark):
    rows = [begin(1, 1), insert(1, "1", "a", "b"), NEW]
    for bad in (insert(1, "x", "b", "c"), OLD, b"T\0\0"):
        frames = partitions(spark, [*rows, bad])
        with pytest.raises(PySparkException) as raised:
            frames.select(decode_udf("data", "public.t", [NEW])).collect()
        assert error_of(raised.value).frame == 3
        assert "partition 0, frame 3" in str(error_of(raised.value))


def test_what_can_not_be_told_is_refused(spark):
    assert spark
    with expect_error(parameter="relations", table="public.u"):
        decode_udf("data", "public.u", [NEW], "id int")
    with expect_error(parameter="relations", table="public.t"):
        decode_udf("data", "public.t", [OLD, NEW])
    assert decode_udf("data", "public.t", [NEW, NEW]) is not None


def test_a_row_in_the_form_of_a_function_in_python():
    """Of Arrow a map comes as pairs, and Spark takes a dict."""
    map_ = T.StructType.fromDDL("m map<string, array<int>>, n struct<v: variant>")
    found = _value({"m": [("k", [1, None])], "n": {"v": {"value": b"v", "metadata": b"m"}}}, map_)
    assert found["m"] == {"k": [1, None]}
    assert (found["n"]["v"].value, found["n"]["v"].metadata) == (b"v", b"m")
    assert _value({"m": None, "n": None}, map_) == {"m": None, "n": None}


# --- frames in Arrow -----------------------------------------------------------------------------

STREAM = [
    OTHER, OLD, *transaction(1100, 7, *(insert(1, str(n), "a", "b") for n in range(50))),
    NEW, *transaction(1200, 8, *(insert(1, str(n), "b", "c") for n in range(50, 100))),
]  # fmt: skip


def test_segments_by_way_of_arrow(spark, tmp_path):
    """Their LSNs are unsigned, and each row needs the Relation before it."""
    directory = land(tmp_path / "s", STREAM)
    with SegmentReader(list_segments(directory)[0].path) as reader:
        batches = [batch.select(["lsn", "commit_lsn", "xid", "seq", "data"]) for batch in reader]
    assert batches[0].schema.field("lsn").type == pa.uint64()
    frames = frames_dataframe(spark, batches)
    kinds = "struct<lsn:bigint,commit_lsn:bigint,xid:bigint,seq:bigint,data:binary>"
    assert frames.schema.simpleString() == kinds
    assert frames.rdd.getNumPartitions() == 1
    assert [row.data for row in frames.collect()] == [
        bytearray(frame) for batch in batches for frame in batch["data"].to_pylist()
    ]
    changes = decode_frames(frames, "public.t")
    known = [(n, None if n < 50 else "c") for n in range(100)]
    assert [(row.after.id, row.after.c) for row in changes.collect()] == known


def test_forms_of_arrow_frames(spark):
    data = pa.array([NEW, insert(1, "1", "b", "c")], pa.large_binary())
    batch = pa.record_batch({"lsn": pa.array([0, None], pa.uint64()), "data": data, "n": [1, 2]})
    known = [(0, bytearray(NEW), 1), (None, bytearray(insert(1, "1", "b", "c")), 2)]
    for form in (batch, [batch], pa.table(batch), pa.table(batch).to_reader()):
        assert [tuple(row) for row in frames_dataframe(spark, form).collect()] == known
    empty = frames_dataframe(spark, batch.slice(0, 0))
    assert (empty.columns, empty.count()) == (["lsn", "data", "n"], 0)
    with expect_error(code="unfit_input"):
        frames_dataframe(spark, batch.select(["n"]))
    great = pa.record_batch({"lsn": pa.array([1 << 63, 0], pa.uint64()), "data": data})
    with expect_error(code="unfit_input"):
        frames_dataframe(spark, great)
