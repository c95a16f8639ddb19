"""Changes in Spark whose columns change, have types of users, or are decoded by policies."""

from __future__ import annotations

import datetime as dt
import itertools
import json
import re
import warnings
from decimal import Decimal

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql.types import VariantVal
from support.expected_errors import expect_error
from support.sparks.spark_frames import (
    DATE,
    INT4,
    INT8,
    JSONB,
    NUMERIC,
    TEXT,
    TIME,
    TIMESTAMP,
    insert,
    land,
    needs_time,
    partitions,
    relation,
    rows,
    transaction,
    update,
)

import pgoutput_fast as pf
from pgoutput_fast.catalog import CatalogColumn, CatalogTable
from pgoutput_fast.errors import PgOutputError
from pgoutput_fast.settings import Settings
from pgoutput_fast.spark import current_state, decode_frames, read_segments
from pgoutput_fast.spark._column_types import arrow_schema
from pgoutput_fast.spark._executor import ExecutorTarget, change_batches

pytestmark = pytest.mark.spark


@pytest.fixture(autouse=True)
def _no_pandas_warning():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning, module="pyspark")
        yield


# --- versions of a table -------------------------------------------------------------------------


def versions(old, new, *, oid=1):
    """A table's frames before and after an ALTER TABLE, a row each."""

    def row(columns):
        return ["2024-01-01" if type_ == DATE else "1" for type_ in columns.values()]

    return [
        [relation(1, "t", old), *transaction(100, 7, insert(1, *row(old)))],
        [relation(oid, "t", new), *transaction(200, 8, insert(oid, *row(new)))],
    ]


ABC = {"id": INT4, "a": TEXT, "b": INT8, "c": TEXT}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("new", "lacking"),
    [
        ({**ABC, "d": TEXT}, ["d"]),
        ({**ABC, "d": TEXT, "e": INT4}, ["d", "e"]),
        ({"id": INT4, "a": TEXT, "c": TEXT}, None),
        ({"id": INT4, "c": TEXT, "d": TEXT}, ["d"]),  # a, b dropped, d added
        ({"id": INT4, "a": TEXT, "b": INT8, "d": DATE}, ["d"]),  # c dropped, d added
        ({"c": TEXT}, None),
    ],
    ids=["add", "add two", "drop", "drop and add", "drop last and add", "drop first"],
)
def test_columns_added_and_dropped(spark, tmp_path, new, lacking):
    directory = land(tmp_path / "s", itertools.chain(*versions(ABC, new)), segment_bytes=1)
    changes = read_segments(spark, directory, "public.t")
    assert [row.unchanged for row in changes.orderBy("commit_lsn").collect()] == [lacking, None]


RENAMED = [
    {"id": INT4, "x": TEXT, "b": INT8, "c": TEXT},
    {"id": INT4, "x": DATE, "b": INT8, "c": TEXT},
    {"id": INT4, "x": TEXT, "c": TEXT},  # and b dropped
    {"id": INT4, "x": TEXT, "b": INT8, "c": TEXT, "d": TEXT},
    {"id": INT4, "a": TEXT, "b": INT8, "x": TEXT},
    {"id": INT4, "a": TEXT, "b": INT8, "x": TEXT, "d": TEXT},
    {"id": INT4, "a": TEXT, "x": TEXT},
    {"id": INT4, "b": INT8, "x": TEXT, "y": DATE},
    {"x": INT4, "a": TEXT, "b": INT8, "c": TEXT},
    {"x": TEXT},
    {"id": INT4, "c": TEXT, "b": INT8, "a": TEXT},
    {"id": INT4, "a": TEXT, "n": TEXT, "b": INT8, "c": TEXT},
]


@pytest.mark.everyday("new0", "new11")
@pytest.mark.parametrize("new", RENAMED)
def test_a_column_that_may_have_been_renamed_is_an_error(spark, tmp_path, new):
    directory = land(tmp_path / "s", itertools.chain(*versions(ABC, new)), segment_bytes=1)
    with expect_error(PySparkException, code="unfit_schema", table="public.t"):
        read_segments(spark, directory, "public.t").collect()


@pytest.mark.slow
def test_a_renamed_column_in_frames_and_with_a_schema(spark, tmp_path):
    frames = versions(ABC, {"id": INT4, "x": TEXT, "b": INT8, "c": TEXT})
    with expect_error(PySparkException, code="unfit_schema", table="public.t"):
        decode_frames(partitions(spark, *frames), "public.t").collect()
    directory = land(tmp_path / "s", itertools.chain(*frames))
    with expect_error(PySparkException, code="unfit_schema", table="public.t"):
        read_segments(spark, directory, "public.t", "id string, x string").collect()


@pytest.mark.slow
def test_a_renamed_column_with_relations_of_either_version(spark):
    new = {"id": INT4, "x": TEXT, "b": INT8, "c": TEXT}
    frames = partitions(spark, *versions(ABC, new))
    for given in (new, ABC):
        for schema in (None, "id int, a string", "x string"):
            changes = decode_frames(frames, "public.t", [relation(1, "t", given)], schema)
            with expect_error(PySparkException, code="unfit_schema", table="public.t"):
                changes.collect()
    # What was dropped after the relations given is no other column's old name.
    dropped = {"id": INT4, "a": TEXT, "c": TEXT}
    frames = partitions(spark, *versions(ABC, dropped))
    changes = decode_frames(frames, "public.t", [relation(1, "t", ABC)])
    assert {row.commit_lsn: row.unchanged for row in changes.collect()} == {100: None, 200: ["b"]}


def test_both_names_of_a_renamed_column_can_be_read(spark, tmp_path):
    new = {"id": INT4, "x": TEXT, "b": INT8, "c": TEXT}
    directory = land(tmp_path / "s", itertools.chain(*versions(ABC, new)))
    changes = read_segments(spark, directory, "public.t", "id int, a string, x string")
    assert rows(changes)[0][-2:] == ((1, "1", None), ["x"])
    assert rows(changes)[1][-2:] == ((1, None, "1"), ["a"])
    # A column that is not asked for does not matter.
    assert read_segments(spark, directory, "public.t", "id int, c string").count() == 2


def test_a_table_that_was_made_anew_is_another_one(spark, tmp_path):
    frames = versions(ABC, {"id": INT4, "x": TEXT, "b": INT8, "c": TEXT}, oid=2)
    changes = read_segments(spark, land(tmp_path / "s", itertools.chain(*frames)), "public.t")
    assert [row[-2:] for row in rows(changes)] == [((1, "1", 1, "1"), None)]


# --- users' types, nested types, policies --------------------------------------------------------


def catalog_type(oid, name, kind="b", **more):
    return {
        "oid": oid, "namespace": "public", "name": name, "kind": kind, "element": 0,
        "modifier": -1, "delimiter": ",", "extension": "", "labels": [], "fields": [], **more,
    }  # fmt: skip


MOOD, PLACE, PLACES, PRICES, HSTORE, SPARSE = 50001, 50002, 50003, 50004, 50005, 50006
REGISTRY = pf.TypeRegistry.from_json(
    json.dumps(
        {
            "format_version": 1,
            "types": [
                catalog_type(MOOD, "mood", "e", labels=["sad", "so, so"]),
                catalog_type(
                    PLACE,
                    "place",
                    "c",
                    fields=[["a `name`", 25, -1], ["mood", MOOD, -1], ["days", 3912, -1],
                            ["tags", 1009, -1]],
                ),
                catalog_type(PLACES, "_place", element=PLACE),
                catalog_type(PRICES, "prices", "d", element=1231, modifier=NUMERIC[1]),
                catalog_type(HSTORE, "hstore", extension="hstore"),
                catalog_type(SPARSE, "sparsevec", extension="vector"),
            ],
        }
    )
)  # fmt: skip
RANGE = "lower_inc:boolean,upper_inc:boolean,empty:boolean"
DAYS = f"struct<lower:date,upper:date,{RANGE}>"
PLACES_TEXT = r'{"(x,\"so, so\",\"[2024-01-01,2024-01-02)\",\"{a,\"\"b c\"\"}\")",NULL,"(,,,)"}'
NESTED = [
    # type OID, text, Spark's type, value
    (1007, "{1,NULL,3}", "array<int>", [1, None, 3]),
    (1009, '{"a\\"b",NULL,"NULL",""}', "array<string>", ['a"b', None, "NULL", ""]),
    (1001, '{"\\\\x00ff"}', "array<binary>", [b"\0\xff"]),
    (22, "1 -2", "array<smallint>", [1, -2]),
    (3904, "[1,5)", f"struct<lower:int,upper:int,{RANGE}>", (1, 5, True, False, False)),
    (3904, "empty", f"struct<lower:int,upper:int,{RANGE}>", (None, None, False, False, True)),
    (3906, "(,1.50]", f"struct<lower:string,upper:string,{RANGE}>",
     (None, "1.50", False, True, False)),
    (4451, "{[1,2),[7,)}", f"array<struct<lower:int,upper:int,{RANGE}>>",
     [(1, 2, True, False, False), (7, None, True, False, False)]),
    (1186, "1 year 2 mons -3 days -00:00:01.5", "string", "P1Y2M-3DT-1.5S"),
    (1186, "infinity", "string", "infinity"),
    (1187, "{00:00:00}", "array<string>", ["PT0S"]),
    (MOOD, "so, so", "string", "so, so"),
    (PRICES, "{1.50,NULL}", "array<decimal(12,2)>", [Decimal("1.50"), None]),
    (HSTORE, '"a"=>"1", "b"=>NULL', "map<string,string>", {"a": "1", "b": None}),
    (SPARSE, "{1:1.5,3:-2}/4", "struct<dim:int,indices:array<int>,values:array<float>>",
     (4, [0, 2], [1.5, -2.0])),
    (PLACES, PLACES_TEXT,
     f"array<struct<a `name`:string,mood:string,days:{DAYS},tags:array<string>>>",
     [("x", "so, so", (dt.date(2024, 1, 1), dt.date(2024, 1, 2), True, False, False), ["a", "b c"]),
      None, (None, None, None, None)]),
]  # fmt: skip


@pytest.mark.slow
def test_nested_types_and_users_types(spark, tmp_path):
    columns = {"id": INT4, **{f"c{n}": (oid, -1) for n, (oid, *_) in enumerate(NESTED)}}
    texts = [text for _, text, _, _ in NESTED]
    frames = [
        relation(1, "t", columns),
        *transaction(100, 7, insert(1, "1", *texts), insert(1, "2", *[None] * len(texts))),
        *transaction(200, 8, update(1, ["1", *[pf.UNCHANGED] * len(texts)])),
    ]
    directory = land(tmp_path / "s", frames)
    changes = read_segments(spark, directory, "public.t", registry=REGISTRY)
    found = changes.schema["after"].dataType
    assert [field.dataType.simpleString() for field in found.fields[1:]] == [
        type_ for _, _, type_, _ in NESTED
    ]
    first, second, third = changes.orderBy("commit_lsn", "seq").collect()
    assert list(first.after[1:]) == [value for _, _, _, value in NESTED]
    assert list(second.after[1:]) == [None] * len(NESTED)
    assert third.unchanged == list(columns)[1:]
    framed = spark.createDataFrame([(frame,) for frame in frames], "data binary").coalesce(1)
    assert decode_frames(framed, "public.t", registry=REGISTRY).first().after == first.after
    # Without a catalogue a user's type is its text.
    plain = read_segments(spark, directory, "public.t").orderBy("commit_lsn", "seq").first().after
    users = [oid >= MOOD for oid, *_ in NESTED]
    assert list(plain[1:]) == [
        text if user else value for user, (_, text, _, value) in zip(users, NESTED, strict=True)
    ]


@needs_time
@pytest.mark.slow
@pytest.mark.parametrize("key", [("id",), ()], ids=["key", "multiset"])
def test_values_of_every_kind_are_kept_and_added(spark, tmp_path, key):
    """By current_state, and as the catalogue has them for rows that are older than the columns."""
    kinds = [
        (1184, "2024-02-29 23:59:59.999999+00"), (1114, "0001-01-01 00:00:00"), (17, "\\x00ff"),
        (1083, "23:59:59.999999"), (3802, '{"a": [1, null]}'), (701, "-0"), (99999, "any"),
        *((oid, text) for oid, text, *_ in NESTED),
    ]  # fmt: skip
    columns = {"id": INT4, **{f"c{n}": (oid, -1) for n, (oid, _) in enumerate(kinds)}}
    texts = [text for _, text in kinds]
    added = zip(columns.items(), [None, *texts], strict=True)
    table = CatalogTable(
        1, "public", "t", "r", "d", None, (), key, (),
        tuple(
            CatalogColumn(name, oid, "", modifier, False, False, "", text is not None, text, number)
            for number, ((name, (oid, modifier)), text) in enumerate(added, 1)
        ), (1,),
    )  # fmt: skip
    options = {"registry": REGISTRY, "policies": pf.Policies(json="parse")}
    frames = [
        relation(1, "t", {"id": INT4}), *transaction(100, 7, insert(1, "1")),
        relation(1, "t", columns), *transaction(200, 8, insert(1, "2", *texts)),
    ]  # fmt: skip
    changes = read_segments(spark, land(tmp_path / "s", frames), "public.t", **options).cache()
    found = current_state(changes, table, **options).orderBy("id").collect()
    sent = changes.where("commit_lsn = 200").collect()[0].after
    assert repr(found[1]) == repr(sent)
    assert repr(found[0][1:]) == repr(sent[1:])
    changes.unpersist()


POLICIES = [
    # type, text, policies, Spark's type, value or what the error says
    ((1007, -1), "{{1,2},{3,NULL}}", {}, "array<int>", "2 dimensions"),
    ((1007, -1), "[0:1]={1,2}", {}, "array<int>", "counted from (0,)"),
    ((1007, -1), "[0:1]={1,2}", {"arrays": "text"}, "string", "[0:1]={1,2}"),
    ((1007, -1), "{{1,2},{3,NULL}}", {"arrays": 2}, "array<array<int>>", [[1, 2], [3, None]]),
    ((1007, -1), "{1}", {"arrays": 2}, "array<array<int>>", "1 dimension"),
    ((1007, -1), "{}", {"arrays": 2}, "array<array<int>>", []),
    (NUMERIC, "NaN", {}, "decimal(12,2)", "NaN"),
    (NUMERIC, "NaN", {"special_values": "null"}, "decimal(12,2)", None),
    (NUMERIC, "NaN", {"special_values": "clamp"}, "decimal(12,2)", "nor is it near"),
    (NUMERIC, "-Infinity", {"special_values": "clamp"}, "decimal(12,2)", Decimal("-9999999999.99")),
    (NUMERIC, "NaN", {"special_values": "text"}, "string", "NaN"),
    ((1231, NUMERIC[1]), "{Infinity,1.00}", {"special_values": "clamp"}, "array<decimal(12,2)>",
     [Decimal("9999999999.99"), Decimal("1.00")]),
    ((1700, -1), "1.50", {"numeric": (10, 3)}, "decimal(10,3)", Decimal("1.500")),
    ((1700, -1), "1.5001", {"numeric": (10, 3)}, "decimal(10,3)", "1.5001"),
    (DATE, "infinity", {"infinity": "text"}, "string", "infinity"),
    (DATE, "-infinity", {"infinity": "clamp"}, "date", dt.date(1, 1, 1)),
    ((1182, -1), "{infinity,2024-01-01}", {"infinity": "null"}, "array<date>",
     [None, dt.date(2024, 1, 1)]),
    ((1182, -1), "{infinity}", {"infinity": "text"}, "array<string>", ["infinity"]),
    ((1182, -1), "{infinity}", {}, "array<date>", " policy infinity "),
    (TIME, "24:00:00", {"out_of_range": "text"}, "string", "24:00:00"),
    (TIMESTAMP, "0044-03-15 00:00:00 BC", {"out_of_range": "null"}, "timestamp_ntz", None),
    (JSONB, '{"a": [1, 2.50]}', {"json": "parse"}, "variant", {"a": [1, Decimal("2.50")]}),
    (JSONB, '{"a": 1}', {}, "string", '{"a": 1}'),
]  # fmt: skip


@pytest.mark.parametrize(("type_", "text", "chosen", "ddl", "expected"), POLICIES)
def test_policies(spark, type_, text, chosen, ddl, expected):
    frames = [relation(1, "t", {"v": type_}, key=()), *transaction(100, 7, insert(1, text))]
    policies = pf.Policies(**chosen)
    landed = spark.createDataFrame([], "data binary")
    schema = decode_frames(landed, "public.t", frames[:1], policies=policies).schema
    assert schema["after"].dataType.simpleString() == f"struct<v:{ddl}>"
    # What the executors do, without a job for each value.
    target = ExecutorTarget(
        table="public.t",
        columns=(("v", ddl),),
        schema=arrow_schema(schema),
        settings=Settings(policies),
    )
    batches = change_batches([("here", pa.record_batch({"data": frames}))], target)
    if ddl != "string" and isinstance(expected, str):
        with pytest.raises(PgOutputError) as error:
            list(batches)
        for part in (expected, "public.t"):
            assert part in str(error.value)
        assert re.search(r"column '?v\b", str(error.value))
        return
    value = next(batches).to_pylist()[0]["after"]["v"]
    if ddl == "variant":
        value = VariantVal(value["value"], value["metadata"]).toPython()
    assert value == expected


def test_policies_travel_to_the_executors(spark, tmp_path):
    columns = {"a": DATE, "b": NUMERIC, "c": JSONB}
    frames = [
        relation(1, "t", columns, key=()),
        *transaction(100, 7, insert(1, "infinity", "NaN", '{"a": 1}')),
    ]
    policies = pf.Policies(infinity="text", special_values="null", json="parse")
    changes = read_segments(spark, land(tmp_path / "s", frames), "public.t", policies=policies)
    row = changes.first().after
    assert (row.a, row.b, row.c.toPython()) == ("infinity", None, {"a": 1})


@pytest.mark.slow
def test_schema_chooses_the_dimensions_of_a_column(spark, tmp_path):
    frames = [
        relation(1, "t", {"a": (1007, -1), "b": (1007, -1), "r": (3904, -1)}, key=()),
        *transaction(100, 7, insert(1, "{1}", "{{1},{2}}", "[1,2)")),
    ]
    directory = land(tmp_path / "s", frames)
    schema = "a array<int>, b array<array<int>>, r string"
    changes = read_segments(spark, directory, "public.t", schema)
    assert changes.first().after == ([1], [[1], [2]], "[1,2)")
    with expect_error(PySparkException, code="unfit_schema", table="public.t"):
        read_segments(spark, directory, "public.t", "r int").collect()


def test_registered_types_come_as_their_arrow_type(spark, tmp_path):
    registry = pf.TypeRegistry().merge(REGISTRY)
    registry.register("mood", text=lambda raw: len(raw), arrow=pa.int32())
    registry.register("int4", text=lambda raw: complex(int(raw)))  # without: not used here
    frames = [
        relation(1, "t", {"m": (MOOD, -1), "i": INT4}, key=()),
        *transaction(100, 7, insert(1, "so, so", "5")),
    ]
    changes = read_segments(spark, land(tmp_path / "s", frames), "public.t", registry=registry)
    assert changes.schema["after"].dataType.simpleString() == "struct<m:int,i:int>"
    assert changes.first().after == (6, 5)
    registry.register("mood", text=len, arrow="floaty")
    with expect_error(parameter="arrow"):
        read_segments(spark, tmp_path / "s", "public.t", registry=registry)
