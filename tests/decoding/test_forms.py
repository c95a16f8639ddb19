"""JSON that is read back: of the form that its types say, or refused with the place that is not."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, TypedDict

import pytest
from support.expected_errors import expect_error

from pgoutput_fast._forms import of_form
from pgoutput_fast.catalog import Catalog, CatalogColumn, CatalogTable
from pgoutput_fast.segments import SegmentMetadata

COLUMN = CatalogColumn("id", 23, "int4", -1, True, False, "", False, None)
TABLE = CatalogTable(7, "public", "t", "r", "d", None, (8,), ("id",), (), (COLUMN,))
CATALOG = Catalog("1", "shop", ("p",), (TABLE,))
METADATA = SegmentMetadata("1", "shop", "s", ("p",), 180004, "UTF8", {"TimeZone": "UTC"}, {}, 50)


class Both(TypedDict, total=False):
    may: int


class Entry(Both):
    must: list[str]


@dataclasses.dataclass
class Point:
    x: int
    y: int | None = None


@pytest.mark.parametrize(
    ("value", "form", "expected"),
    [
        (1, int, 1),
        (None, str | None, None),
        ("a", str | None, "a"),
        ([1, 2], tuple[int, ...], (1, 2)),
        ({"a": [1]}, dict[str, list[int]], {"a": [1]}),
        ({"x": 1}, Point, Point(1)),
        ({"x": 1, "y": 2}, Point, Point(1, 2)),
        ({"must": ["a"]}, Entry, {"must": ["a"]}),
        ({"must": [], "may": 1}, Entry, {"must": [], "may": 1}),
        ([[1], "anything"], Any, [[1], "anything"]),
        ([1], list[int] | None, [1]),
    ],
)
def test_what_fits_is_made(value: object, form: Any, expected: object) -> None:
    made = of_form(value, form)
    assert (made, type(made)) == (expected, type(expected))


@pytest.mark.parametrize(
    ("value", "form", "message"),
    [
        ("1", int, "it is '1', expected int"),
        (True, int, "it is True, expected int"),
        (1, bool, "it is 1, expected bool"),
        (1, str | None, r"it is 1, expected str \| None"),
        ({}, list[int], "it is {}, expected"),
        ([1, "2"], list[int], r"\[1\] is '2', expected int"),
        ({"a": {"b": 1}}, dict[str, dict[str, str]], r"a\.b is 1, expected str"),
        ({"y": 1}, Point, "it lacks 'x'"),
        ({"x": 1, "z": 1}, Point, "it has an unknown 'z'"),
        ({"may": 1}, Entry, "it lacks 'must'"),
        ([{"must": "a"}], list[Entry], r"\[0\]\.must is 'a', expected"),
        ([], Entry, r"it is \[\], expected Entry"),
    ],
)
def test_what_does_not_fit_is_refused_by_its_place(value: object, form: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        of_form(value, form)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("tables", 0, "relation_id"), "7"),
        (("tables", 0, "relation_id"), True),
        (("tables", 0, "root_id"), "x"),
        (("tables", 0, "partition_ids"), "ab"),
        (("tables", 0, "primary_key"), [1]),
        (("tables", 0, "columns", 0, "not_null"), "no"),
        (("tables", 0, "columns", 0, "missing"), 5),
        (("publications",), "p"),
        (("database",), None),
    ],
)
def test_a_catalogue_of_other_types_is_refused(place: tuple[Any, ...], value: object) -> None:
    fields = json.loads(CATALOG.to_json())
    assert Catalog.from_json(json.dumps(fields)) == CATALOG
    *path, last = place
    inner = fields
    for step in path:
        inner = inner[step]
    inner[last] = value
    with expect_error(code="damaged"):
        Catalog.from_json(json.dumps(fields))


@pytest.mark.parametrize(
    ("name", "value"),
    [("slot", 5), ("settings", {"TimeZone": 1}), ("publications", "p"), ("server_version", "18")],
)
def test_metadata_of_other_types_are_refused(name: str, value: object) -> None:
    fields = json.loads(METADATA.to_json())
    assert SegmentMetadata.from_json(json.dumps(fields)) == METADATA
    fields[name] = value
    with expect_error(code="damaged"):
        SegmentMetadata.from_json(json.dumps(fields))


@pytest.mark.parametrize("read", [Catalog.from_json, SegmentMetadata.from_json])
def test_json_that_is_too_deep_is_refused(read: Any) -> None:
    with expect_error(code="damaged"):
        read("[" * 100_000)
