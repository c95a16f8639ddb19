"""The table of types against the servers' own, and how the type of a column is found."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from support import paths
from support.values.value_rows import row_of

import pgoutput_fast as pf
from pgoutput_fast.columnar.mapping import arrow_type, spark_type
from pgoutput_fast.policies import policies_of
from pgoutput_fast.types import BUILTIN_TYPES, EXTENSION_TYPES, ColumnType, column_type
from pgoutput_fast.values import CODECS

PG_TYPE = json.loads((paths.DATA / "pg_type.json").read_text())
VERSIONS = ("14", "16", "18")
TABLE = {entry.oid: entry for entry in BUILTIN_TYPES}


def rows_of(version: str) -> dict[int, dict[str, Any]]:
    """The server's built-in types by OID, without pseudo-types and rows of system catalogues.

    `unknown` is a pseudo-type by name, which columns had until PostgreSQL 10.
    """
    every = [dict(zip(PG_TYPE["columns"], row, strict=True)) for row in PG_TYPE[version]]
    outside = {row["oid"] for row in every if row["typtype"] in ("p", "c") and row["oid"] != 705}
    return {
        row["oid"]: row
        for row in every
        if row["oid"] not in outside
        and not (row["typcategory"] == "A" and row["typelem"] in outside)
    }


@pytest.mark.parametrize("version", VERSIONS)
def test_no_type_of_the_server_is_missing(version: str) -> None:
    rows = rows_of(version)
    assert len(rows) > 150
    arrays = {entry.array_oid: entry for entry in BUILTIN_TYPES if entry.array_oid}
    assert set(rows) == set(TABLE) | set(arrays)
    for oid, row in rows.items():
        entry = TABLE.get(oid)
        if entry is None:
            element = arrays[oid]
            assert row["typcategory"] == "A"
            assert (row["name"], row["typelem"]) == (f"_{element.name}", element.oid)
            assert row["typdelim"] == element.delimiter
            continue
        assert (entry.name, entry.array_oid, entry.delimiter) == (
            row["name"], row["typarray"], row["typdelim"],
        )  # fmt: skip
        if entry.codec in ("vector", "range"):
            assert entry.element in TABLE
        if entry.codec == "vector":
            assert row["typelem"] == entry.element
        assert (row["typtype"] == "r") == (entry.codec == "range")
        assert (row["typtype"] == "m") == (entry.codec == "multirange")


def test_each_type_has_a_codec() -> None:
    nested = {"range", "multirange", "vector"}
    assert {entry.codec for entry in BUILTIN_TYPES + EXTENSION_TYPES} - nested <= set(CODECS)
    assert all(entry.extension for entry in EXTENSION_TYPES)
    fields = set(pf.Policies.__dataclass_fields__)
    for entry in BUILTIN_TYPES:
        assert fields >= set(entry.policies)


def shape(type: ColumnType) -> Any:
    """A type as nested tuples, for comparison."""
    if type.element is not None:
        return type.kind, shape(type.element)
    if type.fields:
        return type.kind, tuple((name, shape(field)) for name, field in type.fields)
    return type.kind if type.entry is None else type.entry.name


# oid, Type message → shape
FOUND: list[tuple[int, tuple[str, str] | None, Any]] = [
    (23, None, "int4"),
    (1007, None, ("array", "int4")),
    (1020, None, ("array", "box")),
    (22, None, ("vector", "int2")),
    (1006, None, ("array", ("vector", "int2"))),
    (3904, None, ("range", "int4")),
    (4451, None, ("multirange", ("range", "int4"))),
    (6150, None, ("array", ("multirange", ("range", "int4")))),
    (16400, None, "unknown"),
    (16400, ("", "int4"), "int4"),
    (16400, ("pg_catalog", "int4"), "int4"),
    (16400, ("public", "int4"), "unknown"),
    (16400, ("", "_int4"), ("array", "int4")),
    (16400, ("", "tsrange"), ("range", "timestamp")),
    (16400, ("", "_"), "unknown"),
    (16400, ("", "no_such_type"), "unknown"),
    (16400, ("ext", "hstore"), "hstore"),
    (16400, ("ext", "_hstore"), ("array", "hstore")),
    (16400, ("", "hstore"), "unknown"),
    (16400, ("public", "mood"), "unknown"),
    (16400, ("public", "_mood"), "unknown"),
    (16400, ("public", ""), "unknown"),
]


@pytest.mark.parametrize(("oid", "announced", "expected"), FOUND, ids=str)
@pytest.mark.parametrize("registry", [None, pf.TypeRegistry()], ids=["bare", "registry"])
def test_types_are_found_without_a_catalogue(
    oid: int, announced: tuple[str, str] | None, expected: Any, registry: pf.TypeRegistry | None
) -> None:
    found = column_type(oid, announced=announced, registry=registry)
    assert shape(found) == expected
    assert found.oid == oid
    if announced is not None:
        assert (found.namespace, found.name) == (announced[0] or "pg_catalog", announced[1])


def test_an_array_has_its_elements_delimiter_and_modifier() -> None:
    assert column_type(1020).delimiter == ";"
    found = column_type(1231, 655366)  # numeric(10,2)[]
    assert found.delimiter == ","
    assert found.element is not None
    assert found.element.modifier == 655366


def test_arrow_and_spark_types() -> None:
    mood = ColumnType("enum", 16400, "public", "mood", labels=("sad", "ok"))
    numeric = column_type(1700, 655366)
    pair = ColumnType("composite", 16401, fields=(("a", numeric), ("b`c", mood)))
    (vector,) = [entry for entry in EXTENSION_TYPES if entry.name == "vector"]
    expected = [
        (column_type(23), "int32", "int"),
        (numeric, "decimal128(10, 2)", "decimal(10,2)"),
        (column_type(1700), "utf8", "string"),
        (column_type(1231, 655366), "list<decimal128(10, 2)>", "array<decimal(10,2)>"),
        (column_type(22), "list<int16>", "array<smallint>"),
        (mood, "dictionary<int32, utf8>", "string"),
        (
            pair,
            "struct<a: decimal128(10, 2), b`c: dictionary<int32, utf8>>",
            "struct<`a`:decimal(10,2),`b``c`:string>",
        ),
        (
            column_type(4535),
            ("list<struct<lower: date32, upper: date32, lower_inc: bool, upper_inc: bool, "
            "empty: bool>>"),
            ("array<struct<`lower`:date,`upper`:date,`lower_inc`:boolean,`upper_inc`:boolean,"
            "`empty`:boolean>>"),
        ),
        (ColumnType("base", 1, entry=vector, modifier=3), "fixed_size_list<float32>[3]",
         "array<float>"),
        (ColumnType("base", 1, entry=vector), "list<float32>", "array<float>"),
        (column_type(16400), "utf8", "string"),
        (column_type(194), "utf8", "string"),
    ]  # fmt: skip
    for found, arrow, spark in expected:
        assert (arrow_type(found), spark_type(found)) == (arrow, spark)
    for unknown in (column_type(16400), column_type(194)):
        assert (arrow_type(unknown, binary=True), spark_type(unknown, binary=True)) == (
            "binary", "binary",
        )  # fmt: skip


REFERENCE = paths.ROOT / "docs" / "reference"
DOCUMENT = (REFERENCE / "types.md").read_text()
MADE = {
    "a composite": ColumnType(
        "composite", 1, fields=(("x", column_type(23)), ("y", column_type(25)))
    ),
    "an enum": ColumnType("enum", 1, labels=("a",)),
}
NOT_RECORDED = {
    "unknown": b"x", "gtsvector": b"x", "pg_brin_bloom_summary": b"x",
    "pg_brin_minmax_multi_summary": b"x", "vector": b"[1]", "halfvec": b"[1]",
    "sparsevec": b"{1:1}/3", "geometry": b"0101000000", "geography": b"0101000000",
}  # fmt: skip
"""Values of types of which the recorded stream has none."""


def section(title: str) -> list[list[str]]:
    """The rows of the table under a title, a list of cells each."""
    text = DOCUMENT.split(f"\n## {title}\n")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def words(cell: str) -> list[str]:
    """What stands in backquotes, outside of parentheses."""
    plain = re.sub(r" \((?:[^()`]|`[^`]*`|\([^()]*\))*\)", "", cell)
    return [found.strip("`") for found in re.findall(r"``.+?``(?!`)|`[^`]+`", plain)]


def spelled(found: ColumnType) -> tuple[str, str]:
    return arrow_type(found), spark_type(found)


def test_the_document_has_every_type() -> None:
    seen = []
    for types, _, arrow, spark, *policies in section("Built-in types, and those of extensions"):
        for name in words(types):
            entry = next(e for e in BUILTIN_TYPES + EXTENSION_TYPES if e.name == name)
            found = column_type(entry.oid) if entry.oid else ColumnType("base", 1, entry=entry)
            assert [list(spelled(found)), list(entry.policies)] == [
                words(arrow) + words(spark), words(policies[0]),
            ], name  # fmt: skip
            seen.append(name)
    ranges = [e.name for e in BUILTIN_TYPES if e.codec in ("range", "multirange")]
    assert sorted(seen + ranges) == sorted(e.name for e in BUILTIN_TYPES + EXTENSION_TYPES)
    assert all(f"`{name}`" in DOCUMENT for name in ranges)


def test_the_document_of_numerics() -> None:
    rows = section("Numeric")
    assert len(rows) == 7
    for cells in rows:
        name, arrow, spark = (words(cell)[0] for cell in cells)
        precision, scale = map(int, re.findall(r"-?\d+", name) or (-1, 0))
        modifier = -1 if precision < 0 else (precision << 16 | scale & 0x7FF) + 4
        assert spelled(column_type(1700, modifier)) == (arrow, spark)


def test_the_document_of_types_made_of_types() -> None:
    rows = {row[0]: row for row in section("Nested types, enums and domains")}
    named = {"an array: `int4[]`": 1007, "a range: `int4range`": 3904}
    for title, oid in named.items():
        assert spelled(column_type(oid)) == (words(rows[title][2])[0], words(rows[title][3])[0])
    for title, made in MADE.items():
        (row,) = [row for name, row in rows.items() if name.startswith(title)]
        assert spelled(made) == (words(row[2])[0], words(row[3])[0])


def test_the_document_of_policies() -> None:
    text = (REFERENCE / "policies.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \|.*\|(.*)\|$", text, re.MULTILINE))
    assert rows.keys() == set(pf.Policies.__dataclass_fields__)
    for policy, choices in rows.items():
        for choice in words(choices):
            pf.Policies(**{policy: choice})  # type: ignore[arg-type]
    given = re.findall(r"^\| `--policy (.*)` \| `(.*)` \|$", text, re.MULTILINE)
    assert [option.partition("=")[0] for option, _ in given] == list(rows)
    for option, call in given:
        assert policies_of([option]) == eval(call, {"Policies": pf.Policies})


def test_the_documents_python_types() -> None:
    pytest.importorskip("pyarrow", reason="captures are Arrow files")
    from support.recordings.corpus_files import captures
    from support.values.catalog_types import registry_of

    data = paths.DATA / "final"
    (capture,) = captures(data, instance="18", scenario="all_types", optionset="v1_text")
    assert capture.truth is not None
    registry = registry_of(capture.truth)
    decoder = pf.Decoder(pf.Policies(infinity="null", out_of_range="null"), registry=registry)
    found: dict[str, set[str]] = {
        name: {type(row_of(pf, name, value)[0]).__name__}  # type: ignore[arg-type]
        for name, value in NOT_RECORDED.items()
    }
    for message in decoder.decode_many(frame for _, frame in capture.rows()):
        if message.tag in "IU":
            for column, value in zip(message.relation.columns, message.new, strict=True):
                entry = registry.known(column.type_id).entry
                if entry is not None and value is not None:
                    found.setdefault(entry.name, set()).add(type(value).__name__)
    for types, python, *_ in section("Built-in types, and those of extensions"):
        for name in words(types):
            assert found[name] == set(words(python)), name


def test_no_type_of_the_table_is_left_out() -> None:
    """The live round trip tries every type of which somebody can insert a value."""
    pytest.importorskip("hypothesis")
    from support.values.random_values import NOT_MADE, VALUES

    tried = {name.partition("(")[0].strip('"') for name in VALUES}
    table = {entry.name for entry in BUILTIN_TYPES + EXTENSION_TYPES}
    assert table - tried == set(NOT_MADE)
