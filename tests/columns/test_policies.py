"""Which choices a user has, that each is checked when it is made, and what it makes of values."""

from __future__ import annotations

import datetime
import pickle
import struct
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest
from support.expected_errors import expect_error
from support.values.value_rows import OIDS, row_of, same

import pgoutput_fast as pf
from pgoutput_fast.types import BUILTIN_TYPES, EXTENSION_TYPES

if TYPE_CHECKING:
    from types import ModuleType

UTC = datetime.timezone.utc
WEST = datetime.timezone(datetime.timedelta(seconds=-57_599))
INT4_MAX, INT4_MIN, INT8_MAX, INT8_MIN = 2**31 - 1, -(2**31), 2**63 - 1, -(2**63)


@pytest.mark.parametrize("numeric", [None, (1, 0), (38, 38), (10, 2)])
def test_shapes_of_numerics(numeric: tuple[int, int] | None) -> None:
    policies = pf.Policies(numeric=numeric)
    assert policies.numeric == numeric
    assert pickle.loads(pickle.dumps(policies)) == policies


@pytest.mark.parametrize(
    "numeric",
    [
        (0, 0),
        (39, 0),
        (10, 11),
        (10, -1),
        (10,),
        (10, 2, 1),
        [10, 2],
        10,
        "10,2",
        (10.0, 2),
        (True, 0),
        ("10", "2"),
    ],
)
def test_shapes_that_no_column_has(numeric: Any) -> None:
    with expect_error(parameter="numeric"):
        pf.Policies(numeric=numeric)


@pytest.mark.parametrize("arrays", ["error", "text", 1, 6])
def test_arrays_in_columns(arrays: str | int) -> None:
    assert pf.Policies(arrays=arrays).arrays == arrays


@pytest.mark.parametrize("arrays", ["null", 0, 7, -1, True, 1.0, None, "1", [1]])
def test_arrays_that_no_column_takes(arrays: Any) -> None:
    with expect_error(parameter="arrays"):
        pf.Policies(arrays=arrays)


@pytest.mark.parametrize("name", ["infinity", "out_of_range", "special_values"])
def test_choices(name: str) -> None:
    for choice in ("error", "null", "clamp", "text"):
        assert getattr(pf.Policies(**{name: choice}), name) == choice
    for choice in (None, 1, []):
        with pytest.raises(TypeError):
            pf.Policies(**{name: choice})
    for choice in ("", "ERROR"):
        with expect_error(parameter=name):
            pf.Policies(**{name: choice})  # type: ignore[arg-type]


def i4(value: int) -> bytes:
    return struct.pack(">i", value)


def i8(value: int) -> bytes:
    return struct.pack(">q", value)


# values that Python cannot hold: type, policy, text, binary, clamped
LIMITS: list[tuple[str, str, bytes, bytes, Any]] = [
    ("date", "infinity", b"infinity", i4(INT4_MAX), datetime.date.max),
    ("date", "infinity", b"-infinity", i4(INT4_MIN), datetime.date.min),
    ("date", "out_of_range", b"4714-11-24 BC", i4(-2451545), datetime.date.min),
    ("date", "out_of_range", b"31.12.0001 BC", i4(-730120), datetime.date.min),
    ("date", "out_of_range", b"5874897-12-31", i4(2145031948), datetime.date.max),
    ("time", "out_of_range", b"24:00:00", i8(86_400_000_000), datetime.time.max),
    ("timetz", "out_of_range", b"24:00:00-15:59:59", i8(86_400_000_000) + i4(57_599),
     datetime.time.max.replace(tzinfo=WEST)),
    ("timestamp", "infinity", b"infinity", i8(INT8_MAX), datetime.datetime.max),
    ("timestamp", "infinity", b"-infinity", i8(INT8_MIN), datetime.datetime.min),
    ("timestamp", "out_of_range", b"0044-03-15 12:00:00 BC", i8(-64_464_465_600_000_000),
     datetime.datetime.min),
    ("timestamp", "out_of_range", b"10000-01-01 00:00:00", i8(252_455_616_000_000_000),
     datetime.datetime.max),
    ("timestamptz", "infinity", b"infinity", i8(INT8_MAX),
     datetime.datetime.max.replace(tzinfo=UTC)),
    ("timestamptz", "infinity", b"-infinity", i8(INT8_MIN),
     datetime.datetime.min.replace(tzinfo=UTC)),
    ("timestamptz", "out_of_range", b"0001-12-31 23:59:59+00 BC", i8(-63_082_281_601_000_000),
     datetime.datetime.min.replace(tzinfo=UTC)),
    ("timestamptz", "out_of_range", b"294276-12-31 23:59:59.999999+00",
     i8(9_223_371_331_199_999_999), datetime.datetime.max.replace(tzinfo=UTC)),
    ("timestamptz", "out_of_range", b"Sat Jan 01 00:00:00 10000 GMT", i8(252_455_616_000_000_000),
     datetime.datetime.max.replace(tzinfo=UTC)),
    ("interval", "infinity", b"infinity", i8(INT8_MAX) + i4(INT4_MAX) * 2,
     pf.Interval(INT4_MAX, INT4_MAX, INT8_MAX)),
    ("interval", "infinity", b"-infinity", i8(INT8_MIN) + i4(INT4_MIN) * 2,
     pf.Interval(INT4_MIN, INT4_MIN, INT8_MIN)),
]  # fmt: skip
HELD_BY_PYTHON = {
    ("interval", "out_of_range"),
    ("numeric", "special_values"),
    ("numeric", "numeric"),
}
"""What only columns cannot hold."""


def test_each_policy_of_the_table_is_tried() -> None:
    table = {
        (entry.name, policy)
        for entry in BUILTIN_TYPES + EXTENSION_TYPES
        for policy in entry.policies
        if policy not in ("json", "invalid_text")
    }
    assert {(name, policy) for name, policy, *_ in LIMITS} == table - HELD_BY_PYTHON


@pytest.mark.parametrize(
    ("name", "policy", "text", "binary", "clamped"), LIMITS, ids=lambda v: str(v)[:24]
)
@pytest.mark.parametrize("kind", [b"t", b"b"], ids=["text", "binary"])
@pytest.mark.parametrize("within", ["", "array"])
def test_what_python_cannot_hold(
    impl: ModuleType,
    within: str,
    kind: bytes,
    name: str,
    policy: str,
    text: bytes,
    binary: bytes,
    clamped: Any,
) -> None:
    shown = row_of(impl, name, text if kind == b"t" else binary, kind).text(0)
    type_: str | int = name
    if within:
        type_ = next(entry.array_oid for entry in BUILTIN_TYPES if entry.name == name)
        text = b'{"' + text + b'",NULL}'
        elements = i4(len(binary)) + binary + i4(-1)
        binary = i4(1) + i4(1) + i4(OIDS[name]) + i4(2) + i4(1) + elements
    value = text if kind == b"t" else binary

    def decoded(choice: str) -> Any:
        made = row_of(impl, type_, value, kind, pf.Policies(**{policy: choice}))[0]
        if not within:
            return made
        assert made[1] is None
        return made[0]

    assert decoded("null") is None
    # Of a binary value it is the text in the style ISO, whatever the text's was.
    assert decoded("text") == shown
    assert same(decoded("clamp"), clamped)
    # The other policy does not apply, and the bytes are always there.
    other = {"infinity": "out_of_range", "out_of_range": "infinity"}[policy]
    for policies in (None, pf.Policies(**{policy: "error"}), pf.Policies(**{other: "null"})):
        row = row_of(impl, type_, value, kind, policies)
        for attempt in (lambda row=row: row["c"], row.values, row.as_dict):
            with pytest.raises(pf.DecodeError) as caught:
                attempt()
            assert (caught.value.code, caught.value.offset) == ("out_of_range", 13)
            assert caught.value.column == "c"
            for part in ("public.t", name, f" {shown} ", f" {policy} "):
                assert part in str(caught.value)
        assert row.raw(0) == value


# The range of each type that has one, and of that a multirange: what a policy makes of an end.
@pytest.mark.parametrize(
    ("name", "end", "start"),
    [
        ("daterange", b"infinity", b"2024-01-01"),
        ("tsrange", b'"10000-01-01 00:00:00"', b'"2024-01-01 00:00:00"'),
        ("tstzrange", b"infinity", b'"2024-01-01 00:00:00+00"'),
    ],
)
def test_what_ends_of_ranges_cannot_hold(
    impl: ModuleType, name: str, end: bytes, start: bytes
) -> None:
    policy = "infinity" if end == b"infinity" else "out_of_range"
    value = b"[" + start + b"," + end + b")"
    multirange = name.replace("range", "multirange")
    for type_, sent in ((name, value), (multirange, b"{" + value + b"}")):

        def decoded(choice: str, type_: str = type_, sent: bytes = sent) -> Any:
            made = row_of(impl, type_, sent, policies=pf.Policies(**{policy: choice}))[0]
            return made if type_ == name else made[0]

        # None for an end would mean that there is none.
        assert decoded("null") is None
        assert decoded("text").upper == end.decode().strip('"')
        assert decoded("clamp").upper.year == 9999
        with pytest.raises(pf.DecodeError) as caught:
            decoded("error")
        shown = end.decode().strip('"')
        assert (caught.value.code, caught.value.column) == ("out_of_range", "c")
        for part in ("public.t", type_, f" {shown} ", f" {policy} "):
            assert part in str(caught.value)


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity"])
@pytest.mark.parametrize("choice", ["error", "null", "clamp", "text"])
def test_a_decimal_asks_no_policy(impl: ModuleType, text: str, choice: str) -> None:
    policies = pf.Policies(special_values=choice, numeric=(3, 1))
    sign = {"NaN": 0xC000, "Infinity": 0xD000, "-Infinity": 0xF000}[text]
    binary = struct.pack(">hhHH", 0, 0, sign, 0)
    for kind, value in ((b"t", text.encode()), (b"b", binary)):
        assert same(row_of(impl, "numeric", value, kind, policies)[0], Decimal(text))


@pytest.mark.parametrize(
    ("name", "kind", "prefix"), [("json", b"t", b""), ("json", b"b", b""),
                                 ("jsonb", b"t", b""), ("jsonb", b"b", b"\1")],
)  # fmt: skip
def test_json_that_python_refuses(impl: ModuleType, name: str, kind: bytes, prefix: bytes) -> None:
    parse = pf.Policies(json="parse")
    for bad in (b"[" * 200_000, b"1" * 5000, b'{"a": nul'):
        row = row_of(impl, name, prefix + bad, kind, parse)
        with pytest.raises(pf.DecodeError) as caught:
            row.values()
        assert (caught.value.code, caught.value.offset) == ("bad_value", 13)
        assert caught.value.column == "c"
        for part in ("public.t", name, bad[:9].decode(), "json=text"):
            assert part in str(caught.value)
        assert len(str(caught.value)) < 400
        assert row.text(0) == bad.decode()
        assert row_of(impl, name, prefix + bad, kind)[0] == bad.decode()
