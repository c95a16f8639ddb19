"""What `arrow_type` and `spark_type` say of a type is the type that columns of it have."""

from __future__ import annotations

import struct

import pytest
from support import paths
from support.expected_errors import expect_error
from support.nightly import nightly

pytest.importorskip("pyarrow", reason="reads the batches")

import pyarrow as pa
from support.columns.columnar import IMPLEMENTATIONS, chosen
from support.frames.made_vectors import NULL, binary, insert, relation
from support.recordings.corpus_files import captures
from support.values.catalog_types import registry_of

import pgoutput_fast as pf
from pgoutput_fast.columnar.fields import TARGETS
from pgoutput_fast.columnar.mapping import arrow_type, spark_type
from pgoutput_fast.errors import Argument
from pgoutput_fast.types import BUILTIN_TYPES, CatalogType, ColumnType, column_type

DATA = paths.DATA / "final"
FIRST = 900_000
MADE = [
    # numerics and vectors by their modifiers, which a domain has
    *(
        CatalogType(FIRST + n, "public", f"n{n}", "d", 1700, (p << 16 | s & 0x7FF) + 4)
        for n, (p, s) in enumerate([(10, 2), (38, 38), (5, -3), (3, 5), (50, 2), (77, 0)])
    ),
    CatalogType(FIRST + 10, "public", "vector", "b", extension="vector"),
    CatalogType(FIRST + 11, "public", "v3", "d", FIRST + 10, 3),
    CatalogType(FIRST + 12, "public", "halfvec", "b", extension="vector"),
    CatalogType(FIRST + 13, "public", "sparsevec", "b", extension="vector"),
    CatalogType(FIRST + 14, "public", "geometry", "b", extension="postgis"),
    CatalogType(FIRST + 20, "public", "nothing", "c"),
    CatalogType(
        FIRST + 21, "public", "odd", "c",
        fields=(("b`c", 23, -1), ("x", 99_999, -1), ("n", FIRST, -1), ("a", FIRST + 25, -1)),
    ),
    CatalogType(FIRST + 22, "public", "_odd", "b", FIRST + 21),
    CatalogType(FIRST + 23, "public", "oddrange", "r", FIRST + 21),
    CatalogType(FIRST + 24, "public", "oddmultirange", "m", FIRST + 23),
    CatalogType(FIRST + 25, "public", "_int", "b", 23),
    CatalogType(FIRST + 30, "public", "mine", "b"),
    CatalogType(FIRST + 31, "public", "_mine", "b", FIRST + 30),
    CatalogType(FIRST + 32, "public", "yours", "b"),
    CatalogType(FIRST + 33, "public", "theirs", "b"),
]  # fmt: skip

POLICIES = [
    pf.Policies(),
    *(
        pf.Policies(**{name: choice})  # type: ignore[arg-type]
        for name in ("infinity", "out_of_range", "special_values")
        for choice in ("null", "clamp", "text")
    ),
    pf.Policies(json="parse"),
    pf.Policies(numeric=(20, 4)),
    pf.Policies(numeric=(38, 0), special_values="text"),
    *(pf.Policies(arrays=arrays) for arrays in ("text", 1, 3)),
    pf.Policies(infinity="text", out_of_range="text", special_values="text", arrays="text"),
]


def registry() -> pf.TypeRegistry:
    """What the catalogue of the recorded all_types says, and more."""
    (capture,) = captures(DATA, instance="18", scenario="all_types", optionset="v1_text")
    assert capture.truth is not None
    found = registry_of(capture.truth).merge(pf.TypeRegistry._of(MADE))
    found.register("mine", text=int, arrow="float32")
    found.register("yours", text=int, arrow=pa.struct([("a", pa.map_(pa.utf8(), pa.list_(
        pa.timestamp("us"), 2
    ))), ("b", pa.timestamp("ms", "UTC")), ("c", pa.int8())]))  # fmt: skip
    found.register("theirs", text=int)
    return found


REGISTRY = registry()
OIDS = sorted(
    {entry.oid for entry in BUILTIN_TYPES}
    | {entry.array_oid for entry in BUILTIN_TYPES if entry.array_oid}
    | {*REGISTRY.catalog}
    | {99_999}
)

TYPES = [column_type(oid, registry=REGISTRY) for oid in OIDS]


def least(type_: ColumnType) -> bytes:
    """A binary value of the type, without a value in it where there can be none."""
    if type_.kind == "array":
        assert type_.element is not None
        return struct.pack(">iiI", 0, 0, type_.element.oid)
    if type_.kind == "composite":
        nulls = [struct.pack(">Ii", field.oid, -1) for _, field in type_.fields]
        return struct.pack(">i", len(nulls)) + b"".join(nulls)
    return {"range": b"\1", "multirange": bytes(4)}.get(type_.kind, b"x")


def spelled(kind: pa.DataType) -> str:
    """A type as Arrow's documentation writes it."""
    if isinstance(kind, pa.BaseExtensionType):
        return str(kind.extension_name)
    is_ = pa.types
    if is_.is_struct(kind):
        return f"struct<{', '.join(f'{part.name}: {spelled(part.type)}' for part in kind)}>"
    if is_.is_map(kind):
        return f"map<{spelled(kind.key_type)}, {spelled(kind.item_type)}>"
    if is_.is_fixed_size_list(kind):
        return f"fixed_size_list<{spelled(kind.value_type)}>[{kind.list_size}]"
    if is_.is_list(kind):
        return f"list<{spelled(kind.value_type)}>"
    if is_.is_dictionary(kind):
        return f"dictionary<{spelled(kind.index_type)}, {spelled(kind.value_type)}>"
    if is_.is_timestamp(kind) and kind.tz:
        return f"timestamp[{kind.unit}, {kind.tz}]"
    return {
        "string": "utf8", "float": "float32", "double": "float64", "date32[day]": "date32",
    }.get(str(kind), str(kind))  # fmt: skip


def types_of_columns(policies: pf.Policies, target: str) -> list[list[pa.Field]]:
    """The columns of a decoder with these settings, of text and of binary values."""
    decoder = pf.ColumnarDecoder(policies, target=target, registry=REGISTRY)
    frame = relation([(f"c{oid}", oid) for oid in OIDS])
    (in_text,) = decoder.decode([frame, insert(*[NULL] * len(OIDS))])
    values = [
        binary(least(type_)) if field.by_format else NULL
        for type_, field in zip(TYPES, in_text.layout.columns, strict=True)
    ]
    (in_binary,) = decoder.decode([insert(*values)])
    return [list(pa.record_batch(one).schema.field("after").type) for one in (in_text, in_binary)]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("policies", [POLICIES[0], *nightly(*POLICIES[1:])], ids=str)
def test_every_type(policies: pf.Policies, target: str) -> None:
    """By one implementation in turn: they have the layout in common."""
    turn = POLICIES.index(policies) + TARGETS.index(target)
    with chosen(IMPLEMENTATIONS[turn % 2]):
        found = types_of_columns(policies, target)
    for in_binary, fields in enumerate(found):
        for type_, field in zip(TYPES, fields, strict=True):
            # Of an extension that pyarrow does not know, the field's metadata tell.
            extension = (field.metadata or {}).get(b"ARROW:extension:name", b"").decode()
            told = arrow_type(type_, binary=bool(in_binary), policies=policies, target=target)
            assert told == (extension or spelled(field.type)), type_
            if target == "spark":
                told = spark_type(type_, binary=bool(in_binary), policies=policies)
                assert told.replace("`", "") == in_spark(field.type), type_


def in_spark(kind: pa.DataType) -> str:
    """What Spark makes of an Arrow type."""
    types = pytest.importorskip("pyspark.sql.pandas.types")
    shown: str = types.from_arrow_type(kind, prefer_timestamp_ntz=True).simpleString()
    return shown.replace("`", "").replace("time(6)", "time")


def test_every_arrow_type_is_spelled() -> None:
    types = pf.TypeRegistry()
    for kind, shown, in_spark in (
        (pa.uint8(), "uint8", None), (pa.uint16(), "uint16", None), (pa.float16(), "float16", None),
        (pa.date64(), "date64", None), (pa.time32("s"), "time32[s]", None),
        (pa.time32("ms"), "time32[ms]", None), (pa.decimal256(50, -2), "decimal256(50, -2)", None),
        (pa.int8(), "int8", "tinyint"), (pa.binary(3), "fixed_size_binary[3]", "binary"),
        (pa.time64("ns"), "time64[ns]", "time"),
        (pa.timestamp("s"), "timestamp[s]", "timestamp_ntz"),
        (pa.timestamp("ns", "+01:00"), "timestamp[ns, +01:00]", "timestamp"),
        (pa.list_(pa.utf8(), 2), "fixed_size_list<utf8>[2]", "array<string>"),
    ):  # fmt: skip
        types.register("int4", text=int, arrow=kind)
        found = column_type(23, registry=types)
        assert arrow_type(found) == shown
        if in_spark is None:
            with expect_error(options=[Argument("arrow")]):
                spark_type(found)
        else:
            assert spark_type(found) == in_spark
    types.register("int4", text=int, arrow="floaty")
    with expect_error(parameter="arrow"):
        arrow_type(column_type(23, registry=types))
