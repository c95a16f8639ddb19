"""Changes from segments and from landed frames, made of frames written by hand."""

from __future__ import annotations

import contextlib
import datetime as dt
import struct
import warnings
from dataclasses import replace
from decimal import Decimal

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark.errors import PySparkAttributeError, PySparkException
from support import paths
from support.changelogs.made_directory import MadeDirectory
from support.expected_errors import expect_error
from support.recordings.corpus_files import captures
from support.sparks.spark_frames import (
    BYTEA,
    DATE,
    INT4,
    INT8,
    JSONB,
    NUMERIC,
    TEXT,
    TIME,
    TIMESTAMP,
    TIMESTAMPTZ,
    UUID,
    begin,
    commit,
    insert,
    land,
    landed,
    needs_time,
    partitions,
    relation,
    rows,
    transaction,
    update,
)

import pgoutput_fast as pf
from pgoutput_fast import testing
from pgoutput_fast.changelog.retention import Keep, retain
from pgoutput_fast.errors import Argument
from pgoutput_fast.names import shown_table
from pgoutput_fast.settings import Settings
from pgoutput_fast.spark import _executor, decode_frames, error_of, read_segments
from pgoutput_fast.spark._column_types import arrow_schema
from pgoutput_fast.spark._executor import ExecutorTarget, change_batches, column_types

pytestmark = pytest.mark.spark

RECORDED = paths.DATA


def delete(oid, old, kind="K"):
    return testing.delete(oid, old, kind)


def truncate(*oids):
    return testing.truncate(oids)


def streamed(xid, *frames, first=True):
    """A stream segment: its frames have the xid behind the tag."""
    inside = [testing.in_stream(frame, xid) for frame in frames]
    return [testing.stream_start(xid, first), *inside, testing.stream_stop()]


def stream_commit(xid, lsn, time=86_400_000_000):
    return testing.stream_commit(xid, lsn, lsn + 8, time)


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


@pytest.fixture(autouse=True)
def _no_pandas_warning():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning, module="pyspark")
        yield


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


@pytest.mark.slow
@pytest.mark.parametrize("segment_bytes", [1, 1 << 20])
def test_changes_of_one_table_in_segments(spark, tmp_path, segment_bytes):
    directory = land(tmp_path / "s", STREAM, segment_bytes=segment_bytes)
    found = rows(read_segments(spark, directory, "public.t"))
    assert without_lsn(found) == EXPECTED
    assert [row[3] for row in found] == [1003, 1005, 1008, 1009, 1013, 1014, 1015]
    assert read_segments(spark, directory, "public.t").schema["after"].dataType.simpleString() == (
        "struct<id:int,a:string,b:decimal(12,2)>"
    )


class ConnectClient:
    """A session as a client of Spark Connect has it: it can't give the SparkContext."""

    def __init__(self, spark):
        self._spark = spark

    def __getattr__(self, name):
        return getattr(self._spark, name)

    @property
    def sparkContext(self):  # noqa: N802 - PySpark's name
        raise PySparkAttributeError(
            errorClass="JVM_ATTRIBUTE_NOT_SUPPORTED",
            messageParameters={"attr_name": "sparkContext"},
        )


def test_a_client_of_spark_connect_reads_in_as_many_tasks(spark, tmp_path):
    directory = land(tmp_path / "s", STREAM, segment_bytes=1)
    client, expected = (
        read_segments(session, directory, "public.t") for session in (ConnectClient(spark), spark)
    )
    assert rows(client) == rows(expected)
    assert client.rdd.getNumPartitions() == expected.rdd.getNumPartitions() > 1


@needs_time
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("type_", "text", "code"),
    [
        (NUMERIC, "NaN", "out_of_range"),
        (DATE, "infinity", "out_of_range"),
        pytest.param(TIME, "24:00:00", "out_of_range", marks=needs_time),
        (TIMESTAMPTZ, "0044-03-15 12:00:00+00 BC", "out_of_range"),
        (INT4, "x", "bad_value"),
    ],
)
def test_values_that_do_not_fit_are_errors_and_readable_as_string(
    spark, tmp_path, type_, text, code
):
    frames = [
        relation(1, "t", {"id": INT4, "v": type_}),
        *transaction(100, 7, insert(1, "1", text)),
    ]
    directory = land(tmp_path / "s", frames)
    with expect_error(PySparkException, code=code, column="v"):
        read_segments(spark, directory, "public.t").collect()
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
    with expect_error(PySparkException, code="unfit_schema", table="public.t"):
        read_segments(spark, directory, "public.t").collect()


@pytest.mark.slow
def test_tables_are_listed_without_a_table(spark, tmp_path):
    """Each as it is named last; a name that another table had before counts once."""
    stream = [
        *STREAM,
        relation(2, "renamed", {"id": INT4, "odd` name": TEXT}),
        *transaction(400, 10, insert(2, "6", "x")),
        relation(3, "other", {"at": TIMESTAMPTZ}),
        *transaction(500, 11, insert(3, "2024-01-01 00:00:00+00")),
    ]
    directory = land(tmp_path / "s", stream)
    listed = read_segments(spark, directory)
    found = {row.table: (row.relation_id, row.schema) for row in listed.collect()}
    assert found == {
        "public.other": (3, "`at` timestamp"),
        "public.renamed": (2, "`id` int, `odd`` name` string"),
        "public.t": (1, "`id` int, `a` string, `b` decimal(12,2)"),
    }
    for table, (_, schema) in found.items():
        changes = read_segments(spark, directory, table)
        after = changes.schema["after"].dataType
        assert after == spark.createDataFrame([], schema).schema
    with expect_error(parameter="partitions", options=[Argument("table")]):
        read_segments(spark, directory, partitions=2)


def test_a_table_that_is_not_there(spark, tmp_path):
    directory = land(tmp_path / "s", STREAM)
    with expect_error(code="no_table", table="public.T"):
        read_segments(spark, directory, "public.T")
    (tmp_path / "empty").mkdir()
    with expect_error(code="not_begun", path=str(tmp_path / "empty")):
        read_segments(spark, tmp_path / "empty", "public.t")


@pytest.mark.parametrize(
    "schema", ["ID int, a string, Balance string", "id int, id int"], ids=["others", "twice"]
)
def test_columns_that_the_table_never_had_are_no_nulls(spark, tmp_path, schema):
    directory = land(tmp_path / "s", STREAM)
    with expect_error(code="bad_option", parameter="schema"):
        read_segments(spark, directory, "public.t", schema)


def test_binary_values_whose_text_is_the_servers_secret_are_digits(spark, tmp_path):
    frames = [
        relation(1, "t", {"m": (790, -1), "r": (2205, -1)}, key=()),
        *transaction(100, 7, insert(1, struct.pack(">q", 1234), struct.pack(">I", 16433))),
    ]
    changes = read_segments(spark, land(tmp_path / "s", frames), "public.t")
    assert changes.first().after == ("1234", "16433")


def test_frames_in_one_partition(spark):
    frames = spark.createDataFrame([(frame,) for frame in STREAM], "data binary").coalesce(1)
    found = rows(decode_frames(frames, "public.t"))
    assert without_lsn(found) == EXPECTED
    assert {row[3] for row in found} == {None}


@pytest.mark.slow
def test_frames_in_many_partitions_need_relations(spark, tmp_path):
    frames = landed(spark, tmp_path, STREAM)
    with expect_error(PySparkException, code="unknown_relation", options=[Argument("relations")]):
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_frames_of_no_use(spark):
    with expect_error(code="unfit_input"):
        decode_frames(spark.range(1), "public.t")
    frames = spark.createDataFrame([(b"R",), (None,)], "data binary").coalesce(1)
    with expect_error(PySparkException, code="truncated", frame=0, offset=1):
        decode_frames(frames, "public.t", schema="id int").collect()
    frames = spark.createDataFrame([(None,)], "data binary")
    with expect_error(PySparkException, code="unfit_input", table="public.t"):
        decode_frames(frames, "public.t", schema="id int").collect()


@pytest.mark.slow
def test_an_lsn_past_what_a_long_holds_is_an_error(spark):
    frames = [relation(1, "t", {"id": INT4}), *transaction(2**63, 7, insert(1, "1"))]
    frame = spark.createDataFrame([(data,) for data in frames], "data binary").coalesce(1)
    with expect_error(PySparkException, code="out_of_range", frame=1, tag="B"):
        decode_frames(frame, "public.t").collect()


def test_a_codec_that_hangs_is_refused(spark, tmp_path):
    name = "spark.sql.execution.arrow.compression.codec"
    spark.conf.set(name, "lz4")
    try:
        with expect_error(code="not_supported"):
            read_segments(spark, tmp_path, "public.t")
    finally:
        spark.conf.unset(name)


def test_relations_are_found_inside_streams(spark):
    frames = [
        *streamed(77, relation(1, "t", OLD), insert(1, "1", "one"), insert(1, "2", "two")),
        stream_commit(77, 100),
    ]
    changes = decode_frames(partitions(spark, frames), "public.t")
    assert changes.schema["after"].dataType.simpleString() == "struct<id:int,a:string>"
    assert sorted(
        (row.xid, row.subxid, row.seq, tuple(row.after)) for row in changes.collect()
    ) == [
        (77, 77, 0, (1, "one")),
        (77, 77, 1, (2, "two")),
    ]


@pytest.mark.slow
def test_the_last_relation_is_found_and_its_domains(spark):
    domain = testing.type_(testing.UserType(50000, "positive"))
    int_domain = testing.type_(testing.UserType(23, "positive", "pg_catalog"))
    first = [*streamed(77, relation(1, "t", OLD)), stream_commit(77, 100)]
    # An aborted transaction's rows come too, and chunks of several may take turns.
    second = [
        *streamed(78, domain, int_domain, relation(1, "t", NEW), relation(2, "other", OLD)),
        *streamed(79, relation(3, "t", OLD, namespace="s")),
        *streamed(78, insert(1, "1", "one", "1.50"), first=False),
        testing.stream_abort(78),
    ]
    changes = decode_frames(partitions(spark, first, second), "public.t")
    assert changes.schema["after"].dataType.simpleString() == (
        "struct<id:int,a:string,b:decimal(12,2)>"
    )
    assert [tuple(row.after) for row in changes.collect()] == [(1, "one", Decimal("1.50"))]


def test_relations_inside_a_stream_without_its_start(spark):
    start, *rest = streamed(77, relation(1, "t", OLD), insert(1, "1", "one"))
    frames = partitions(spark, [start], rest)
    with expect_error(PySparkException, tag="R"):
        decode_frames(frames, "public.t").collect()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("frames", "code", "hint"),
    [
        ([b"E"], "stream_order", _executor._IN_ORDER),
        (streamed(77, insert(1, "1", "one"))[1:], "unknown_relation", _executor._IN_A_CHUNK),
        (streamed(77, truncate(1))[1:], None, _executor._IN_A_CHUNK),
        (streamed(77, insert(9, "1"))[:2], "unknown_relation", _executor._ALL_RELATIONS),
        ([truncate(9)], "unknown_relation", _executor._ALL_RELATIONS),
        ([insert(1, "1")], "column_count", _executor._ALTERED),
        ([*streamed(77)[:1], begin(100, 7)], "stream_order", _executor._IN_ORDER),
    ],
)
def test_a_partition_without_its_context_says_what_to_do(spark, frames, code, hint):
    fields = {} if code is None else {"code": code}
    with expect_error(PySparkException, **fields) as refused:
        decode_frames(partitions(spark, frames), "public.t", [relation(1, "t", OLD)]).collect()
    # It is of the executor's making.
    assert "".join(map(str, hint)) in str(error_of(refused.value))


@pytest.mark.slow
def test_a_streamed_transaction_in_two_partitions_needs_seq(spark):
    first = streamed(77, insert(1, "1", "one"), insert(1, "2", "two"))
    second = [
        *streamed(77, insert(2, "9"), first=False),  # no row of the table: nothing to be told
        *streamed(77, insert(1, "3", "three"), truncate(2, 1), first=False),
        stream_commit(77, 100),
    ]
    relations = [relation(1, "t", OLD), relation(2, "other", {"id": INT4})]
    whole = partitions(spark, first + second)
    assert [row.seq for row in decode_frames(whole, "public.t", relations).collect()] == [
        0,
        1,
        3,
        5,
    ]
    split = decode_frames(partitions(spark, first, second), "public.t", relations)
    with expect_error(PySparkException, code="stream_order", frame=4):
        split.collect()
    seqs = iter([0, 1, 2, 3, 4])
    numbered = [
        [(frame, next(seqs) if frame[:1] in b"IT" else None) for frame in part]
        for part in (first, second)
    ]
    given = partitions(spark, *numbered, columns="data binary, seq bigint")
    found = decode_frames(given, "public.t", relations).collect()
    assert [row.seq for row in found] == [0, 1, 3, 5]
    # What is over does not go on: this would be another transaction with the same xid.
    whole = [*first, stream_commit(77, 100)]
    torn = whole + streamed(77, insert(1, "3", "three"), first=False)
    with expect_error(PySparkException, code="stream_order", frame=6):
        decode_frames(partitions(spark, torn), "public.t", relations).collect()


# --- columns -------------------------------------------------------------------------------------


def target_of(spark, columns, *, policies=None, registry=None, encoding="utf-8", relations=()):
    """The target of a table public.t, whose columns are given as DDL."""
    settings = Settings(policies or pf.Policies(), encoding, registry)
    schema = decode_frames(spark.createDataFrame([], "data binary"), "public.t", (), columns).schema
    return ExecutorTarget(
        table="public.t",
        columns=tuple(
            (field.name, field.dataType.simpleString()) for field in schema["after"].dataType
        ),
        schema=arrow_schema(schema),
        relations=relations,
        settings=settings,
    )


def changes_of(target, frames, *, cut=None, **given):
    """The record batches of frames, in batches of `cut` frames, as one table."""
    whole = pa.record_batch({"data": pa.array(frames, pa.binary()), **given})
    step = cut or len(frames)
    batches = [(f"batch {n}", whole.slice(n, step)) for n in range(0, len(frames), step)]
    found = list(change_batches(batches, target))
    assert all(batch.schema.equals(target.schema) for batch in found)
    return found


def expected_value(data, position, ddl):
    """What a column is to have, by the message level."""
    raw = data.raw(position)
    if raw is None or raw is pf.UNCHANGED:
        return None
    if ddl == "string":
        return data.text(position)
    value = data[position]
    if ddl.startswith("decimal("):
        value = Decimal(value)
        return value if value.is_finite() else None
    if ddl == "binary" and isinstance(value, str):
        return value.encode()  # of a type that has no binary format
    if ddl == "float":
        return struct.unpack("=f", struct.pack("=f", value))[0]
    return value


@pytest.mark.everyday("v1_bin")
@needs_time
@pytest.mark.parametrize("optionset", ["v1_text", "v1_bin"])
def test_columns_of_every_type_are_what_the_messages_have(spark, optionset):
    (capture,) = captures(RECORDED, instance="16", scenario="all_types", optionset=optionset)
    frames = [frame for _, frame in capture.rows()]
    policies = pf.Policies(infinity="null", out_of_range="null", special_values="null")
    decoder = pf.Decoder(policies)
    rows, plans = {}, {}
    for message in decoder.decode_many(frames):
        if isinstance(message, pf.Insert):
            table = shown_table(message.relation)
            plans[table] = decoder.state.plan(message.relation_id)
            rows.setdefault(table, []).append(message.new)
    compared = set()
    for table, plan in plans.items():
        # The text of binary money and names of OIDs is not known; they are errors.
        textless = ("money", "reg") if optionset == "v1_bin" else ()
        columns = [
            (name, ddl)
            for (name, ddl), type_ in zip(
                column_types(plan, binary=optionset == "v1_bin"), plan.column_types, strict=True
            )
            if not ddl.startswith(("array", "struct", "map"))
            and not type_.name.startswith(textless)
        ]
        ddl = ", ".join(f"`{name}` {type_}" for name, type_ in columns)
        target = replace(target_of(spark, ddl, policies=policies), table=table)
        found = pa.Table.from_batches(changes_of(target, frames, cut=1000), target.schema)
        found = found.filter(pc.equal(found["op"], "insert"))["after"].to_pylist()
        assert len(found) == len(rows[table])
        for name, type_ in columns:
            position = plan.names.index(name)
            if plan.column_types[position].name == "interval":
                continue
            compared.add((plan.column_types[position].name, type_))
            for row, data in zip(found, rows[table], strict=True):
                expected = expected_value(data, position, type_)
                if isinstance(expected, float) and expected != expected:
                    assert row[name] != row[name]
                else:
                    assert row[name] == expected, (table, name)
                    assert type(row[name]) is type(expected)
    # Types, each with the one that Spark has for it.
    assert len(compared) > 30
    assert {("int4", "int"), ("oid", "bigint"), ("xid8", "decimal(20,0)"), ("uuid", "string"),
            ("time", "time"), ("jsonb", "string"), ("bytea", "binary")} <= compared  # fmt: skip


def test_columns_in_another_order_and_wider(spark):
    frames = [
        relation(1, "t", {"i": INT4, "r": (700, -1), "n": NUMERIC, "a": TEXT, "more": TEXT}),
        *transaction(100, 7, insert(1, "-1", "1.5", "1.50", "ä", "x")),
        begin(200, 8),
        insert(1, struct.pack(">i", -2), struct.pack(">f", 2.5), None, "ö".encode(), b"y"),
        update(1, ["3", pf.UNCHANGED, "Infinity", pf.UNCHANGED, pf.UNCHANGED], ["4"] + [None] * 4),
        commit(200),
    ]
    target = target_of(
        spark,
        "a string, gone date, n decimal(20,4), r double, i bigint",
        policies=pf.Policies(special_values="clamp"),
    )
    (batch,) = changes_of(target, frames)
    assert [list(row.values()) for row in batch.column("after").to_pylist()] == [
        ["ä", None, Decimal("1.5000"), 1.5, -1],
        ["ö", None, None, 2.5, -2],
        [None, None, Decimal("9999999999999999.9999"), None, 3],
    ]
    assert batch.column("before").to_pylist()[:2] == [None, None]
    assert list(batch.column("before")[2].as_py().values()) == [None, None, None, None, 4]
    assert batch.column("unchanged").to_pylist() == [["gone"], ["gone"], ["gone", "r", "a"]]


def test_columns_in_both_formats_and_in_another_encoding(spark):
    columns = {"v": (1007, -1), "j": JSONB, "what": (99999, -1), "a": TEXT, "n": (1700, -1)}
    array = (
        struct.pack(">iiI", 1, 0, 23) + struct.pack(">ii", 2, 1) + struct.pack(">iiii", 4, 5, 4, 6)
    )
    one = struct.pack(">hhhhh", 1, 0, 0, 1, 5)  # 5.0
    frames = [
        relation(1, "t", columns, key=()),
        begin(100, 7),
        insert(1, "{1,2}", '"x"', "seven", "plain", "1.0"),
        insert(1, array, b'\1"\xe4"', None, b"\xe4", one),
        insert(1, None, None, "eight", None, None),
        commit(100),
    ]
    ddl = "v array<int>, j string, what string, a string, n string"
    batches = changes_of(target_of(spark, ddl, encoding="iso8859-1"), frames)
    found = [tuple(row["after"].values()) for batch in batches for row in batch.to_pylist()]
    assert found == [
        ([1, 2], '"x"', "seven", "plain", "1.0"),
        ([5, 6], '"ä"', None, "ä", "5.0"),
        (None, None, "eight", None, None),
    ]
    target = target_of(spark, "what binary", encoding="iso8859-1")
    frames[3] = insert(1, array, b"\1{}", b"\0\xff", b"", one)
    found = [row["after"]["what"] for b in changes_of(target, frames) for row in b.to_pylist()]
    assert found == [b"seven", b"\0\xff", b"eight"]
    # The server's text of a binary value of a type that nobody knows is not known either.
    with expect_error(code="no_text_form", frame=3, column="what"):
        changes_of(target_of(spark, "what string"), frames)


def test_an_interval_is_iso_whatever_it_is(spark):
    frames = [
        relation(1, "t", {"v": (1186, -1)}, key=()),
        begin(100, 7),
        insert(1, "-1 mons +2 days 03:00:00"),
        insert(1, "-infinity"),
        insert(1, struct.pack(">qii", 1_500_000, 0, -14)),
        commit(100),
    ]
    (batch,) = changes_of(target_of(spark, "v string"), frames)
    assert [row["v"] for row in batch.column("after").to_pylist()] == [
        "P-1M2DT3H", "-infinity", "P-1Y-2MT1.5S",
    ]  # fmt: skip


def test_huge_values_are_cut_into_batches(spark):
    sizes = [3 << 20, 0, 6 << 20, 1, 20 << 20, 2]
    frames = [
        relation(1, "t", {"v": TEXT}, key=()),
        *transaction(100, 7, *(insert(1, "x" * size) for size in sizes)),
    ]
    batches = changes_of(target_of(spark, "v string"), frames)
    assert [[len(row["v"]) for row in batch.column("after").to_pylist()] for batch in batches] == [
        sizes[:2],
        sizes[2:4],
        sizes[4:5],
        sizes[5:],
    ]
    assert [seq for batch in batches for seq in batch.column("seq").to_pylist()] == list(range(6))


@pytest.mark.parametrize("cut", [None, 1, 3])
def test_what_is_given_beside_the_frames_goes_before_what_they_say(spark, cut):
    relations = (relation(1, "t", {"id": INT4}), relation(2, "other", {"id": INT4}))
    frames = [
        insert(1, "1"),  # of a transaction that began elsewhere
        truncate(2, 1),
        commit(100),
        begin(200, 8, time=5),
        insert(1, "2"),
        truncate(1),
        truncate(2, 1),
        commit(200, time=5),
        *streamed(9, insert(1, "3"), truncate(2, 1)),
        stream_commit(9, 300),
        insert(1, "4"),  # of no transaction that is known
    ]
    n = len(frames)

    def given(values):
        return pa.array([values.get(i) for i in range(n)], pa.int64())

    context = {
        "lsn": pa.array(range(1000, 1000 + n), pa.uint64()),
        "commit_lsn": given({0: 100, 1: 100, 4: 201, 9: 300}),
        "xid": given({0: 7, 1: 7, 9: 10}),
        "seq": given({0: 40, 1: 41, 5: 10, 6: 20, 10: 60}),
        "commit_time": pa.array(
            [dt.datetime(2020, 1, 1) if i == 0 else None for i in range(n)], pa.timestamp("us")
        ),
    }
    target = target_of(spark, "id int", relations=relations)
    found = pa.Table.from_batches(changes_of(target, frames, cut=cut, **context))
    zone = dt.timezone.utc
    first, second = dt.datetime(2020, 1, 1, tzinfo=zone), dt.datetime(2000, 1, 1, 0, 0, 0, 5, zone)
    assert [tuple(row.values())[:7] for row in found.to_pylist()] == [
        ("insert", 7, None, 1000, 100, first, 40),
        ("truncate", 7, None, 1001, 100, None, 42),
        ("insert", 8, None, 1004, 201, second, 0),
        ("truncate", 8, None, 1005, 200, second, 10),
        ("truncate", 8, None, 1006, 200, second, 21),
        ("insert", 9, 9, 1009, 300, None, 0),
        ("truncate", 9, 9, 1010, None, None, 61),
        ("insert", None, None, 1013, None, None, None),
    ]


def test_what_is_given_and_does_not_fit_is_an_error(spark):
    target = target_of(spark, "id int")
    frames = [relation(1, "t", {"id": INT4}), *transaction(100, 7, insert(1, "1"))]
    for name, value in (("lsn", 2**63), ("commit_time", 2**63 - 1)):
        given = {name: pa.array([value] * len(frames), pa.uint64())}
        with expect_error(code="unfit_value", table="public.t"):
            changes_of(target, frames, **given)


def test_an_error_names_the_frame_and_what_to_do(spark):
    frames = [
        relation(1, "t", {"d": DATE, "v": (1007, -1)}, key=()),
        *transaction(
            100, 7, insert(1, None, "{1}"), insert(1, None, "{x}"), insert(1, "infinity", "{}")
        ),
    ]
    with expect_error(code="bad_value", frame=3, column="v"):
        changes_of(target_of(spark, "d date, v array<int>"), frames)
    del frames[3]
    with expect_error(code="out_of_range", frame=3, column="d"):
        changes_of(target_of(spark, "d date, v array<int>"), frames)
    # A column that nobody asks for is not read.
    assert len(changes_of(target_of(spark, "v array<int>"), frames)[0]) == 2


# --- directories with snapshots ------------------------------------------------------------------


def test_a_snapshot_is_read_with_the_changes_around_it(spark, tmp_path):
    table = testing.Table("t", {"id": "int4", "note": "text"}, 16390, key=["id"])
    wide = testing.Table("t2", {"id": "int4", "note": "text", "more": "int4"}, 16390, key=["id"])
    empty = testing.Table("empty", {"id": "int4"}, 16391, key=["id"])
    with contextlib.closing(MadeDirectory(tmp_path)) as made:
        for one in (table, empty):
            made.wait(one, 999)
        made.copy(empty, 1001)
        # A segment within which the table was copied; nothing before the copy counts.
        for lsn, frames in (
            (1140, [table.relation(), testing.insert(table, [8, "before"])]),
            (1160, [testing.update(table, [1, "new"])]),
        ):
            made.write((lsn, testing.begin(7, lsn, 0)))
            made.write(*((0 if one[:1] == b"R" else lsn, one) for one in frames))
            made.write((lsn + 4, testing.commit(lsn, lsn + 4, 0)))
        made.writer.flush()
        assert read_segments(spark, tmp_path, "public.t").count() == 0  # it waits
        made.copy(table, 1151, [[1, "one"]], [[2, None]])
        changes = rows(read_segments(spark, tmp_path, "public.t"))
        reads = dt.datetime(2000, 1, 1, 0, 0, 5)
        assert [(row[0], row[1], *row[3:5], row[6], row[9]) for row in changes] == [
            ("truncate", None, 1150, 1150, 0, None),
            ("read", None, 1150, 1150, 1 << 32, (1, "one")),
            ("read", None, 1150, 1150, 2 << 32, (2, None)),
            ("update", 7, 1160, 1160, 0, (1, "new")),
        ]
        assert {row[5].replace(tzinfo=None) for row in changes[:3]} == {reads}
        # Renamed, with one column more; that is only in the copy, behind which nothing changed.
        made.wait(table, 1164, first=False)
        made.commit(1200, testing.insert(table, [5, "held"]))
        made.copy(wide, 1251, [[1, "new", 3]])
        made.commit(1300, empty.relation(), testing.insert(empty, [1]))
        for name in ("public.t", "public.t2"):
            changes = read_segments(spark, tmp_path, name)
            assert [(row[0], row[9]) for row in rows(changes)] == [
                ("truncate", None), ("read", (1, "new", 3)),
            ]  # fmt: skip
        assert [row[0] for row in rows(read_segments(spark, tmp_path, "public.empty"))] == [
            "truncate", "insert",
        ]  # fmt: skip
        # What comes behind the copy is deleted.
        retain(tmp_path, Keep(bytes=0), made.writer.store_position)
        made.commit(1400, testing.insert(empty, [2]))
        with expect_error(code="changes_missing", path=str(tmp_path)):
            read_segments(spark, tmp_path, "public.empty")
