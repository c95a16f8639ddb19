"""Records of `mode=envelope` beside those that Debezium made of the same transactions."""

from __future__ import annotations

import gzip
import json
import shutil
from typing import Any

import pytest
from support import paths

from pgoutput_fast.spark import PgOutputDataSource

pytestmark = [pytest.mark.spark]

DATA = paths.DATA / "debezium"
TOPICS = [f"shop.public.{name}" for name in ("kinds", "odd__name", "toast", "full_row")]
OTHER: dict[str, tuple[Any, Any]] = {
    "r": ("[1,5)", {"lower": 1, "upper": 5, "lower_inc": True, "upper_inc": False, "empty": False}),
    "co": ("KDEseCk=", {"a": 1, "b": "x"}),
    "vb": ("Cw==", "1011"),
    "bt": ("BQ==", "101"),
    "pt": (
        {"x": 1.5, "y": -2.0, "wkb": "AQEAAAAAAAAAAAD4PwAAAAAAAADA", "srid": None}, "(1.5,-2)",
    ),
    "tr": (
        '["2024-01-01 00:00:00+00",)',
        {"lower": "2024-01-01T00:00:00Z", "upper": None, "lower_inc": True, "upper_inc": False,
         "empty": False},
    ),
    "mr": (
        "e1sxLDMpLFs1LDcpfQ==",
        [{"lower": one, "upper": one + 2, "lower_inc": True, "upper_inc": False, "empty": False}
         for one in (1, 5)],
    ),
    "tmtz": ("10:00:00Z", "12:00:00+02"),
    "tz": ("2024-02-29T21:59:59.120000Z", "2024-02-29T21:59:59.12Z"),
    "mn": ("12.34", "$12.34"),
    "iv": ("P0Y-1M0DT0H0M-1S", "P-1MT-1S"),
}  # fmt: skip
"""Columns whose values have another form: a value of Debezium's, and ours."""
UNSENT = "y"
"""A bytea that is not sent in an update; Debezium sends null."""
SOURCE = {"connector", "name", "db", "schema", "table", "xmin"}
"""Fields of `source` that are the same in all records."""
OF_THE_STREAM = {"ts_ms", "ts_us", "ts_ns", "snapshot", "txId", "lsn"}
"""Those that are the same but in rows of a snapshot, which each tool has read for itself."""

Record = tuple[str, Any, Any]


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Record, Record]]:
    """The records of Debezium, and ours, of the same changes."""
    lines = gzip.decompress((DATA / "debezium.txt.gz").read_bytes()).decode().split("\n")
    theirs = [
        (lines[i], json.loads(lines[i + 1]), json.loads(lines[i + 2]))
        for i in range(0, len(lines) - 2, 3)
    ]
    directory = shutil.copytree(DATA / "segments", tmp_path_factory.mktemp("d") / "segments")
    given = {"mode": "envelope", "segments": str(directory), "topicPrefix": "shop",
             "tombstones": "true"}  # fmt: skip
    reader = PgOutputDataSource(given).reader(None)  # type: ignore[arg-type]
    rows: list[Any] = [
        one for part in reader.partitions() for batch in reader.read(part)
        for one in batch.to_pylist()
    ]  # fmt: skip
    rows.sort(key=lambda one: (one["commit_lsn"], one["seq"], one["part"]))
    ours = [
        (one["topic"], json.loads(one["key"] or "null"), json.loads(one["value"] or "null"))
        for one in rows
    ]
    found = []
    for topic in TOPICS:
        wanted = [one for one in theirs if one[0] == topic]
        # The TRUNCATE before the rows of a snapshot is ours alone.
        given_by_us = [one for one in ours if one[0] == topic][1:]
        found += zip(wanted, given_by_us, strict=True)
    return found


def test_records_are_those_of_debezium(records: list[tuple[Record, Record]]) -> None:
    assert [compared(one) for _, one in records] == [compared(one) for one, _ in records]


def compared(record: Record) -> Any:
    """The parts of a record that are the same."""
    topic, key, value = record
    if value is None:
        return topic, key, None
    sides = [
        value[side] and {k: v for k, v in value[side].items() if k not in {*OTHER, UNSENT}}
        for side in ("before", "after")
    ]
    return topic, key, value["op"], value["transaction"], sides


def test_records_say_as_debezium_where_they_come_from(
    records: list[tuple[Record, Record]],
) -> None:
    kinds = set()
    for (_, _, theirs), (_, _, ours) in records:
        if theirs is None:
            continue
        kinds.add(theirs["op"])
        same = SOURCE if theirs["op"] == "r" else SOURCE | OF_THE_STREAM
        for name in same:
            assert ours["source"][name] == theirs["source"][name], (name, theirs)
        assert set(theirs) == set(ours)
        # Their fields that we have not are null here.
        rest = set(theirs["source"]) - set(ours["source"])
        assert rest == {"origin", "origin_lsn"}
        assert {theirs["source"][name] for name in rest} == {None}
        assert set(ours["source"]) - SOURCE - OF_THE_STREAM == {"version", "sequence"}
        # The time is that of the commit, here too.
        for name in ("ts_ms", "ts_us", "ts_ns"):
            assert ours[name] == ours["source"][name]
    assert kinds == {"c", "u", "d", "t", "r"}


def test_values_of_other_forms_are_those_that_are_told(
    records: list[tuple[Record, Record]],
) -> None:
    differ: dict[str, list[tuple[Any, Any]]] = {}
    for (topic, _, theirs), (_, _, ours) in records:
        if topic != TOPICS[0] or theirs is None:
            continue
        for side in ("before", "after"):
            for name, value in (theirs[side] or {}).items():
                if value != ours[side][name]:
                    differ.setdefault(name, []).append((value, ours[side][name]))
    assert set(differ) - {UNSENT} == set(OTHER)
    for name, pair in OTHER.items():
        assert pair in differ[name], name
    placeholder = "X19kZWJleml1bV91bmF2YWlsYWJsZV92YWx1ZQ=="
    assert set(differ.get(UNSENT, [])) <= {(None, placeholder)}
