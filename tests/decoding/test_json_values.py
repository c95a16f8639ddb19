"""What json makes of values with the function that the package has for it."""

from __future__ import annotations

import datetime
import ipaddress
import json
import uuid
from decimal import Decimal
from types import ModuleType
from typing import Any

import pytest
from support.frames.made_vectors import NULL, SAME, insert, relation, text

import pgoutput_fast as pf

UTC = datetime.timezone.utc

VALUES: list[tuple[Any, Any]] = [
    (pf.UNCHANGED, {"unchanged": True}),
    (b"\0\xff", {"hex": "00ff"}),
    (Decimal("1.10"), "1.10"),
    (Decimal("NaN"), "NaN"),
    (Decimal("12345678901234567890123456789.10"), "12345678901234567890123456789.10"),
    (datetime.date(2026, 1, 31), "2026-01-31"),
    (datetime.time(1, 2, 3, 4), "01:02:03.000004"),
    (datetime.datetime(2026, 1, 31, 12, tzinfo=UTC), "2026-01-31T12:00:00+00:00"),
    (datetime.datetime(2026, 1, 31, 12, 0, 0, 1), "2026-01-31T12:00:00.000001"),
    (uuid.UUID(int=1), "00000000-0000-0000-0000-000000000001"),
    (pf.Interval(1, -2, 3), {"months": 1, "days": -2, "microseconds": 3}),
    (pf.Range(1, 5), {"lower": 1, "upper": 5, "bounds": "[)"}),
    (pf.Range(Decimal("1.5"), None, "(]"), {"lower": "1.5", "upper": None, "bounds": "()"}),
    (pf.Range(None, 5, "(]"), {"lower": None, "upper": 5, "bounds": "(]"}),
    (pf.Range(None, None), {"lower": None, "upper": None, "bounds": "()"}),
    (pf.Range(empty=True), {"empty": True}),
    (pf.SparseVector(3, (0, 2), (0.5, 1.0)), {"dim": 3, "indices": [0, 2], "values": [0.5, 1.0]}),
    (ipaddress.ip_interface("10.0.0.1/8"), "10.0.0.1/8"),
    (ipaddress.ip_network("::/8"), "::/8"),
]


@pytest.mark.parametrize(("value", "expected"), VALUES, ids=[str(i) for i in range(len(VALUES))])
def test_each_class(value: Any, expected: Any) -> None:
    made = json.dumps([value], default=pf.json_default)
    assert json.loads(made) == [expected]


def test_what_no_type_decodes_to() -> None:
    for value in (object(), {1}, 1j):
        with pytest.raises(TypeError):
            json.dumps(value, default=pf.json_default)


def test_a_row(impl: ModuleType) -> None:
    """Every value of a row, the one that was not sent apart from NULL."""
    columns = [
        ("id", 23), ("price", 1700), ("day", 1082), ("at", 1184), ("raw", 17), ("span", 3904),
        ("big", 25), ("none", 25),
    ]  # fmt: skip
    values = ["1", "99.50", "2026-01-31", "2026-01-31 12:00:00+00", "\\x00ff", "[1,5)"]
    frames = [relation(columns), insert(*map(text, values), SAME, NULL)]
    _, message = impl.Decoder().decode_many(frames)
    assert json.dumps(message.new.as_dict(), default=pf.json_default) == (
        '{"id": 1, "price": "99.50", "day": "2026-01-31", "at": "2026-01-31T12:00:00+00:00", '
        '"raw": {"hex": "00ff"}, "span": {"lower": 1, "upper": 5, "bounds": "[)"}, '
        '"big": {"unchanged": true}, "none": null}'
    )
