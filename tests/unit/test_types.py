"""The table of types against the servers' own, and how the type of a column is found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import pgoutput_fast as pf
from pgoutput_fast.types import (
    BUILTIN_TYPES,
    EXTENSION_TYPES,
    ColumnType,
    PgType,
    arrow_type,
    column_type,
    spark_type,
)
from pgoutput_fast.values import CODECS

PG_TYPE = json.loads((Path(__file__).parents[1] / "data" / "pg_type.json").read_text())
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
        # Category Z came with 15.
        assert entry.category == row["typcategory"] or (version, entry.category) == ("14", "Z")
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
    registry = pf.TypeRegistry()
    registry.register("complex", text=float, arrow="float64")
    mood = ColumnType("enum", 16400, "public", "mood", labels=("sad", "ok"))
    numeric = column_type(1700, 655366)
    pair = ColumnType("composite", 16401, fields=(("a", numeric), ("b`c", mood)))
    vector = PgType(
        0, "vector", 0, "U", "pgvector", "list<float32>", "array<float>", extension="vector"
    )
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
            ("array<struct<lower:date,upper:date,lower_inc:boolean,upper_inc:boolean,"
            "empty:boolean>>"),
        ),
        (ColumnType("base", 1, entry=vector, modifier=3), "fixed_size_list<float32>[3]",
         "array<float>"),
        (ColumnType("base", 1, entry=vector), "list<float32>", "array<float>"),
        (column_type(16400), "utf8", "string"),
        (column_type(194), "utf8", "string"),
        (column_type(16400, announced=("public", "complex"), registry=registry), "float64",
         "string"),
    ]  # fmt: skip
    for found, arrow, spark in expected:
        assert (arrow_type(found), spark_type(found)) == (arrow, spark)
    for unknown in (column_type(16400), column_type(194)):
        assert (arrow_type(unknown, binary=True), spark_type(unknown, binary=True)) == (
            "binary", "binary",
        )  # fmt: skip
