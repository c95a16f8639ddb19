"""Values of the types that are typed, from text and from binary; policies; users' own types."""

from __future__ import annotations

import copy
import datetime
import math
import pickle
import struct
import sys
import uuid
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest
from support.expected_errors import expect_error
from support.frames.make_frames import insert, relation, type_frame
from support.values.value_rows import check_both_forms, check_refused, row_of

import pgoutput_fast as pf
from pgoutput_fast.errors import Argument

if TYPE_CHECKING:
    from types import ModuleType

UTC = datetime.timezone.utc


def us(value: int) -> bytes:
    return struct.pack(">q", value)


# type, the server's text, the binary form, the Python value
VALUES: list[tuple[str, bytes, bytes, Any]] = [
    ("bool", b"t", b"\1", True),
    ("bool", b"f", b"\0", False),
    ("int2", b"-32768", b"\x80\0", -32768),
    ("int4", b"2147483647", b"\x7f\xff\xff\xff", 2147483647),
    ("int8", b"-9223372036854775808", b"\x80" + bytes(7), -(2**63)),
    ("oid", b"4294967295", b"\xff\xff\xff\xff", 4294967295),
    ("xid", b"0", bytes(4), 0),
    ("xid8", b"18446744073709551615", b"\xff" * 8, 2**64 - 1),
    ("float8", b"0.1", struct.pack(">d", 0.1), 0.1),
    ("float8", b"-0", struct.pack(">d", -0.0), -0.0),
    ("float8", b"1e+15", struct.pack(">d", 1e15), 1e15),
    ("float8", b"9.999999999999999e+22", struct.pack(">d", 1e23), 1e23),
    ("float8", b"1.7976931348623157e+308", struct.pack(">d", 1.7976931348623157e308),
     1.7976931348623157e308),
    ("float8", b"5e-324", struct.pack(">d", 5e-324), 5e-324),
    ("float8", b"NaN", struct.pack(">d", math.nan), math.nan),
    ("float8", b"-Infinity", struct.pack(">d", -math.inf), -math.inf),
    ("float4", b"0.1", struct.pack(">f", 0.1), struct.unpack(">f", struct.pack(">f", 0.1))[0]),
    ("float4", b"3.4028235e+38", b"\x7f\x7f\xff\xff", 3.4028234663852886e38),
    ("float4", b"1e-45", b"\0\0\0\1", 1.401298464324817e-45),
    ("float4", b"Infinity", struct.pack(">f", math.inf), math.inf),
    ("numeric", b"0", struct.pack(">hhHH", 0, 0, 0, 0), Decimal(0)),
    ("numeric", b"0.000", struct.pack(">hhHH", 0, 0, 0, 3), Decimal("0.000")),
    ("numeric", b"-12345.678", struct.pack(">hhHH3h", 3, 1, 0x4000, 3, 1, 2345, 6780),
     Decimal("-12345.678")),
    ("numeric", b"0.00010", struct.pack(">hhHHh", 1, -1, 0, 5, 1), Decimal("0.00010")),
    ("numeric", b"120000000", struct.pack(">hhHH2h", 2, 2, 0, 0, 1, 2000), Decimal(120000000)),
    ("numeric", b"9999999999999999999", struct.pack(">hhHH5h", 5, 4, 0, 0, 999, *[9999] * 4),
     Decimal(10**19 - 1)),
    ("numeric", b"-10000000000000000000", struct.pack(">hhHHh", 1, 4, 0x4000, 0, 1000),
     Decimal(-(10**19))),
    ("numeric", b"3.3333333333333333", struct.pack(">hhHH5h", 5, 0, 0, 16, 3, *[3333] * 4),
     Decimal("3.3333333333333333")),
    ("numeric", b"1234567890123456.7", struct.pack(">hhHH5h", 5, 3, 0, 1, 1234, 5678, 9012, 3456,
                                                   7000), Decimal("1234567890123456.7")),
    ("numeric", b"NaN", struct.pack(">hhHH", 0, 0, 0xC000, 0), Decimal("NaN")),
    ("numeric", b"Infinity", struct.pack(">hhHH", 0, 0, 0xD000, 0), Decimal("Infinity")),
    ("numeric", b"-Infinity", struct.pack(">hhHH", 0, 0, 0xF000, 0), Decimal("-Infinity")),
    ("text", "grüße\0".encode(), "grüße\0".encode(), "grüße\0"),
    ("bpchar", b"ab  ", b"ab  ", "ab  "),
    ("varchar", b"", b"", ""),
    ("name", b"pg_class", b"pg_class", "pg_class"),
    ("xml", b"<a/>", b"<a/>", "<a/>"),
    ("char", b"x", b"x", b"x"),
    ("char", b"", b"\0", b"\0"),
    ("char", b"\\351", b"\xe9", b"\xe9"),
    ("bytea", b"\\x00ff5c", b"\x00\xff\\", b"\x00\xff\\"),
    ("bytea", b"\\x", b"", b""),
    ("uuid", b"a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11",
     bytes.fromhex("a0eebc999c0b4ef8bb6d6bb9bd380a11"),
     uuid.UUID("a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11")),
    ("date", b"2000-01-01", bytes(4), datetime.date(2000, 1, 1)),
    ("date", b"0001-01-01", struct.pack(">i", -730119), datetime.date.min),
    ("date", b"9999-12-31", struct.pack(">i", 2921939), datetime.date.max),
    ("time", b"23:59:59.999999", us(86_399_999_999), datetime.time.max),
    ("time", b"12:34:56.7", us(45_296_700_000), datetime.time(12, 34, 56, 700_000)),
    ("timestamp", b"2000-01-01 00:00:00", us(0), datetime.datetime(2000, 1, 1)),
    ("timestamp", b"1999-12-31 23:59:59.999999", us(-1),
     datetime.datetime(1999, 12, 31, 23, 59, 59, 999_999)),
    ("timestamptz", b"2024-02-29 12:00:00.5+00", us(762_523_200_500_000),
     datetime.datetime(2024, 2, 29, 12, 0, 0, 500_000, UTC)),
    ("json", b'{"a":  1}', b'{"a":  1}', '{"a":  1}'),
    ("jsonb", b'{"a": 1}', b'\1{"a": 1}', '{"a": 1}'),
]  # fmt: skip


@pytest.mark.parametrize(
    ("type_name", "text", "binary", "value"),
    VALUES,
    ids=[f"{v[0]}-{v[1][:24].decode(errors='replace')}" for v in VALUES],
)
def test_text_equals_binary(
    impl: ModuleType, type_name: str, text: bytes, binary: bytes, value: Any
) -> None:
    from_text, from_binary = check_both_forms(impl, type_name, text, binary, value)
    if type_name != "char":  # its text is the server's for either, its value is bytes
        assert from_text.text(0) == text.decode()
    assert from_binary.text(0) == text.decode()
    assert from_binary.texts() == (text.decode(),)
    assert (from_text.raw(0), from_binary.raw(0)) == (text, binary)


def test_time_zones_are_converted(impl: ModuleType) -> None:
    noon = datetime.datetime(2024, 6, 1, 12, tzinfo=UTC)
    for text in (
        b"2024-06-01 12:00:00+00", b"2024-06-01 17:45:00+05:45", b"2024-06-01 08:30:00-03:30",
        b"2024-06-01 12:19:32+00:19:32",
    ):  # fmt: skip
        value = row_of(impl, "timestamptz", text)[0]
        assert value == noon
        assert value.tzinfo is UTC


def test_bytea_in_escape_format(impl: ModuleType) -> None:
    assert row_of(impl, "bytea", rb"a\\b\000\377 c")[0] == b"a\\b\0\xff c"


MALFORMED: list[tuple[str, bytes, bytes]] = [
    ("bool", b"true", b"t"), ("bool", b"", b"t"), ("bool", b"\2", b"b"), ("bool", b"", b"b"),
    ("int2", b"32768", b"t"), ("int4", b"1_0", b"t"), ("int4", b" 1", b"t"), ("int4", b"", b"t"),
    ("int4", b"+1", b"t"), ("int4", "１".encode(), b"t"), ("int8", b"9" * 5000, b"t"),
    ("int8", b"-", b"t"), ("int2", b"\0", b"b"), ("int4", bytes(5), b"b"), ("int8", b"", b"b"),
    ("oid", b"-1", b"t"), ("oid", b"4294967296", b"t"), ("xid8", bytes(7), b"b"),
    ("float8", b"1_0", b"t"), ("float8", b"nan", b"t"), ("float8", b"", b"t"),
    ("float8", b"0x1p3", b"t"), ("float8", bytes(7), b"b"), ("float4", b"1e39", b"t"),
    ("float4", bytes(8), b"b"), ("numeric", b"1_0", b"t"), ("numeric", b"sNaN", b"t"),
    ("numeric", b"--1", b"t"), ("numeric", b"1.2.3", b"t"), ("numeric", b"", b"t"),
    ("numeric", bytes(7), b"b"), ("numeric", struct.pack(">hhHH", 1, 0, 0, 0), b"b"),
    ("numeric", struct.pack(">hhHHh", 1, 0, 0, 0, 10000), b"b"),
    ("numeric", struct.pack(">hhHHh", 1, 0, 0, 0, -1), b"b"),
    ("numeric", struct.pack(">hhHHh", 1, 0, 0x1234, 0, 1), b"b"),
    ("numeric", struct.pack(">hhHHh", 1, 0, 0, 0x4000, 1), b"b"),
    ("numeric", struct.pack(">hhHHh", 1, -1, 0, 2, 1), b"b"),
    ("bytea", b"\\x0", b"t"), ("bytea", b"\\xzz", b"t"), ("bytea", b"\\9", b"t"),
    ("bytea", b"\\x 0a", b"t"),
    ("char", b"ab", b"t"), ("char", b"\\999", b"t"), ("char", b"", b"b"), ("char", b"ab", b"b"),
    ("uuid", b"a0eebc99", b"t"), ("uuid", b"{a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a1}", b"t"),
    ("uuid", bytes(15), b"b"), ("date", b"2024-13-01", b"t"), ("date", b"2023-02-29", b"t"),
    ("date", b"01/02/2024", b"t"), ("date", b"20240101", b"t"), ("date", b"12024-13-01", b"t"),
    ("date", bytes(8), b"b"), ("time", b"25:00:00", b"t"), ("time", b"24:00:01", b"t"),
    ("time", b"1:2:3", b"t"), ("time", us(-1), b"b"), ("time", us(86_400_000_001), b"b"),
    ("time", bytes(4), b"b"), ("timestamp", b"2024-01-01T00:00:00", b"t"),
    ("timestamp", b"2024-01-01 00:00:00+00", b"t"), ("timestamp", b"2024-01-01", b"t"),
    ("timestamp", b"12024-01-01 25:00:00", b"t"), ("timestamp", b"", b"t"),
    ("timestamptz", b"2024-12-06 17:25:20.997176 junk+00", b"t"),
    ("timestamptz", b"2024-12-06 17:25:20.9971761+00", b"t"),
    ("timestamptz", b"2024-12-06 17:25:20,997+00", b"t"),
    ("timestamptz", b"2024-12-06 17:25:20Z", b"t"),
    ("timestamp", b"2024-12-06 17:25:20.9971761", b"t"), ("date", b"2024-W01-1", b"t"),
    ("timestamptz", b"2024-01-01 00:00:00", b"t"), ("timestamptz", b"Mon Jan 01 2024", b"t"),
    ("timestamptz", bytes(7), b"b"), ("jsonb", b'\2{"a": 1}', b"b"), ("jsonb", b"", b"b"),
]  # fmt: skip


@pytest.mark.parametrize(("type_name", "value", "kind"), MALFORMED, ids=lambda v: str(v)[:30])
def test_malformed_values(impl: ModuleType, type_name: str, value: bytes, kind: bytes) -> None:
    assert max(map(len, check_refused(row_of(impl, type_name, value, kind), value))) < 400


@pytest.mark.parametrize("digits", range(1, 25))
@pytest.mark.parametrize("scale", [0, 1, 2, 18])
def test_numerics_are_whole_decimals(impl: ModuleType, digits: int, scale: int) -> None:
    for sign in (0, 1):
        expected = Decimal(
            (sign, (9, *range(8, 0, -1), 0, *range(10), *range(1, 9))[:digits], -scale)
        )
        value = row_of(impl, "numeric", f"{expected:f}".encode()).values()[0]
        assert value.as_tuple() == expected.as_tuple()
        assert (repr(value), f"{value:.3f}") == (repr(expected), f"{expected:.3f}")
        assert hash(value) == hash(expected)
        assert sys.getsizeof(value) == sys.getsizeof(Decimal(repr(expected)[9:-2]))
        for other in (copy.copy(value), copy.deepcopy(value), pickle.loads(pickle.dumps(value))):
            assert other.as_tuple() == expected.as_tuple()
        assert value * value - value / 3 == expected * expected - expected / 3
        assert (-value, abs(value), value + 0) == (-expected, abs(expected), expected + 0)
        assert value.scaleb(30).as_tuple() == expected.scaleb(30).as_tuple()


@pytest.mark.parametrize("digits", range(1, 21))
def test_integers_of_every_length(impl: ModuleType, digits: int) -> None:
    for value in (10 ** (digits - 1), 10**digits - 1, int("1234567890" * 2) // 10 ** (20 - digits)):
        for number in (value, -value):
            text = str(number).encode()
            for type_name, limit in (("int2", 2**15), ("int4", 2**31), ("int8", 2**63)):
                row = row_of(impl, type_name, text)
                if -limit <= number < limit:
                    assert row.values() == (number,)
                else:
                    with expect_error(pf.DecodeError, code="bad_value", column="c"):
                        row.values()
            # the bytes beside those of digits, at every place
            for at in range(number < 0, len(text)):
                for wrong in (b"/", b":", b"\xb0", b" ", b"\0"):
                    with expect_error(pf.DecodeError, code="bad_value", column="c"):
                        row_of(impl, "int8", text[:at] + wrong + text[at + 1 :]).values()


def test_text_that_is_none(impl: ModuleType) -> None:
    row = row_of(impl, "text", b"caf\xe9")
    for attempt in (row.texts, row.values, lambda: row.text(0), lambda: row["c"]):
        with pytest.raises(pf.DecodeError) as caught:
            attempt()
        assert (caught.value.code, caught.value.offset) == ("bad_encoding", 13)
    assert row.raws() == (b"caf\xe9",)
    assert "caf\\\\xe9" in repr(row)


def test_json_can_be_parsed(impl: ModuleType) -> None:
    parse = pf.Policies(json="parse")
    assert row_of(impl, "json", b'{"a": [1, null]}', policies=parse)[0] == {"a": [1, None]}
    assert row_of(impl, "jsonb", b"\1[1.5]", b"b", policies=parse)[0] == [1.5]
    assert row_of(impl, "jsonb", b"\1[1.5]", b"b", policies=parse).text(0) == "[1.5]"
    numbers = b"[1e308, -1.0, 0.1, 1e-400, 12345678901234567890]"
    parsed = row_of(impl, "json", numbers, policies=parse)[0]
    assert repr(parsed) == "[1e+308, -1.0, 0.1, 0.0, 12345678901234567890]"
    for bad in (
        b"[" * 200_000, b"1" * 5000, b"{", b"NaN", b"[Infinity]", b'{"a": -Infinity}', b"1e309",
        b"-1e999",
    ):  # fmt: skip
        with expect_error(pf.DecodeError, code="bad_value", column="c"):
            row_of(impl, "json", bad, policies=parse)["c"]


def test_types_that_are_none_of_these(impl: ModuleType) -> None:
    assert row_of(impl, 3361, b"(1,2)")[0] == "(1,2)"
    row = row_of(impl, 3361, bytes(16), b"b")
    assert row[0] == bytes(16)
    with pytest.raises(pf.DecodeError) as caught:
        row.text(0)
    assert (caught.value.code, caught.value.offset) == ("no_text_form", 13)


def double(raw: bytes) -> int:
    return 2 * int(raw)


def test_registered_types(impl: ModuleType) -> None:
    registry = pf.TypeRegistry()
    registry.register(16999, text=double)
    assert row_of(impl, 16999, b"21", registry=registry)[0] == 42
    # There is no function for binary values: they stay what they would be.
    assert row_of(impl, 16999, b"21", b"b", registry=registry)[0] == b"21"
    assert row_of(impl, 16998, b"21", registry=registry)[0] == "21"
    with expect_error(pf.DecodeError, code="bad_value", column="c"):
        row_of(impl, 16999, b"x", registry=registry).values()


def test_registered_by_name(impl: ModuleType) -> None:
    registry = pf.TypeRegistry()
    registry.register("mood", text=lambda raw: ("bare", raw))
    registry.register("other.mood", text=lambda raw: ("qualified", raw))

    def decoded(namespace: str, name: str) -> Any:
        decoder = impl.Decoder(registry=registry)
        decoder.decode(type_frame(16500, namespace, name))
        decoder.decode(relation("c", type_id=16500))
        return decoder.decode(insert(b"x")).new[0]

    assert decoded("public", "mood") == ("bare", b"x")
    assert decoded("other", "mood") == ("qualified", b"x")
    assert decoded("public", "moody") == "x"


def test_a_registered_function_may_raise_anything(impl: ModuleType) -> None:
    def fails(raw: bytes) -> Any:
        raise KeyError("inside")

    registry = pf.TypeRegistry()
    registry.register("int4", text=fails)
    with expect_error(pf.DecodeError, code="bad_value", column="c") as caught:
        row_of(impl, "int4", b"1", registry=registry).values()
    assert isinstance(caught.value.__cause__, KeyError)


def test_registry_refuses_what_it_cannot_use() -> None:
    registry = pf.TypeRegistry()
    with expect_error(options=[Argument("text"), Argument("binary")]):
        registry.register("mood")
    with pytest.raises(TypeError):
        registry.register("mood", text="int")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        registry.register(1.5, text=double)  # type: ignore[arg-type]


def test_registry_travels(impl: ModuleType) -> None:
    registry = pf.TypeRegistry()
    registry.register(16999, text=double)
    assert pickle.loads(pickle.dumps(registry)) == registry


def test_policies_are_checked() -> None:
    assert pickle.loads(pickle.dumps(pf.Policies(json="parse"))) == pf.Policies(json="parse")


def test_lsn() -> None:
    assert pf.parse_lsn("16/B374D848") == 0x16B374D848
    assert pf.format_lsn(0x16B374D848) == "16/B374D848"
    assert pf.format_lsn(2**64 - 1) == "FFFFFFFF/FFFFFFFF"
    assert pf.parse_lsn("0/0") == 0
    for bad in ("", "16", "16/", "/1", "g/0", "1/123456789", "0/0 ", " 0/0", "１/0", "0/0\n"):
        with expect_error(code="unfit_input"):
            pf.parse_lsn(bad)
    for number in (-1, 2**64):
        with expect_error(code="unfit_input"):
            pf.format_lsn(number)
    with pytest.raises(TypeError):
        pf.parse_lsn(b"0/0")  # type: ignore[arg-type]
    for wrong in ("0/1", 1.5, None):
        with pytest.raises(TypeError):
            pf.format_lsn(wrong)  # type: ignore[arg-type]
