"""Values of the rarer scalar types: from text, from binary, and the text of a binary one.

Texts and binary forms are those of servers (SELECT x::text, typesend(x)), and as their sources
describe them.
"""

from __future__ import annotations

import datetime
import decimal
import ipaddress
import pickle
import struct
from typing import TYPE_CHECKING, Any

import pytest
from support.expected_errors import expect_error
from support.values.value_rows import check_both_forms, check_refused, row_of, same

import pgoutput_fast as pf
from pgoutput_fast.objects import Interval, SparseVector
from pgoutput_fast.types import BUILTIN_TYPES, EXTENSION_TYPES
from pgoutput_fast.values import CODECS
from pgoutput_fast.values.numbers import float4_text, float8_text

if TYPE_CHECKING:
    from types import ModuleType

UTC = datetime.timezone.utc
INT4_MAX, INT4_MIN, INT8_MAX, INT8_MIN = 2**31 - 1, -(2**31), 2**63 - 1, -(2**63)


def interval(months: int, days: int, microseconds: int) -> bytes:
    return struct.pack(">qii", microseconds, days, months)


def timetz(microseconds: int, seconds_west: int) -> bytes:
    return struct.pack(">qi", microseconds, seconds_west)


def offset(seconds: int) -> datetime.timezone:
    return datetime.timezone(datetime.timedelta(seconds=seconds))


def floats(*numbers: float) -> bytes:
    return struct.pack(f">{len(numbers)}d", *numbers)


def counted(*items: bytes) -> bytes:
    return struct.pack(">i", len(items)) + b"".join(items)


def sized(value: bytes) -> bytes:
    return struct.pack(">i", len(value)) + value


def lexeme(text: str, *positions: int) -> bytes:
    return text.encode() + b"\0" + struct.pack(f">H{len(positions)}H", len(positions), *positions)


def word(text: str, weights: int = 0, prefix: int = 0) -> bytes:
    return bytes([1, weights, prefix]) + text.encode() + b"\0"


NOT, AND, OR = b"\2\1", b"\2\2", b"\2\3"


def phrase(distance: int = 1) -> bytes:
    return b"\2\4" + struct.pack(">H", distance)


def half(*numbers: float) -> bytes:
    return struct.pack(f">hh{len(numbers)}e", len(numbers), 0, *numbers)


def vector(*numbers: float) -> bytes:
    return struct.pack(f">hh{len(numbers)}f", len(numbers), 0, *numbers)


def float32(number: float) -> float:
    rounded: float = struct.unpack(">f", struct.pack(">f", number))[0]
    return rounded


POINT_EWKB = bytes.fromhex("0101000020E6100000000000000000F03F0000000000000040")

# type, the server's text, the binary form, the Python value
VALUES: list[tuple[str, bytes, bytes, Any]] = [
    ("interval", b"00:00:00", interval(0, 0, 0), Interval()),
    ("interval", b"1 day", interval(0, 1, 0), Interval(0, 1, 0)),
    ("interval", b"1 mon", interval(1, 0, 0), Interval(1)),
    ("interval", b"-1 years -1 mons", interval(-13, 0, 0), Interval(-13)),
    ("interval", b"1 year 2 mons 3 days 04:05:06.789", interval(14, 3, 14706789000),
     Interval(14, 3, 14706789000)),
    ("interval", b"-1 years -2 mons +3 days -04:05:06.789", interval(-14, 3, -14706789000),
     Interval(-14, 3, -14706789000)),
    ("interval", b"1 mon -1 days +00:00:01", interval(1, -1, 1000000), Interval(1, -1, 1000000)),
    ("interval", b"-00:00:00.000001", interval(0, 0, -1), Interval(0, 0, -1)),
    ("interval", b"-2562047788:00:54.775808", interval(0, 0, INT8_MIN), Interval(0, 0, INT8_MIN)),
    ("interval", b"178956970 years 7 mons 2147483647 days", interval(INT4_MAX, INT4_MAX, 0),
     Interval(INT4_MAX, INT4_MAX, 0)),
    ("interval", b"-178956970 years -8 mons", interval(INT4_MIN, 0, 0), Interval(INT4_MIN)),
    ("timetz", b"00:00:00+00", timetz(0, 0), datetime.time(0, tzinfo=UTC)),
    ("timetz", b"12:34:56.7+05:45", timetz(45_296_700_000, -20_700),
     datetime.time(12, 34, 56, 700_000, offset(20_700))),
    ("timetz", b"01:02:03-08", timetz(3_723_000_000, 28_800),
     datetime.time(1, 2, 3, tzinfo=offset(-28_800))),
    ("timetz", b"12:00:00-00:00:01", timetz(43_200_000_000, 1),
     datetime.time(12, tzinfo=offset(-1))),
    ("timetz", b"23:59:59.999999+15:59:59", timetz(86_399_999_999, -57_599),
     datetime.time(23, 59, 59, 999_999, offset(57_599))),
    ("bit", b"101", b"\0\0\0\3\xa0", "101"),
    ("bit", b"100000001", b"\0\0\0\x09\x80\x80", "100000001"),
    ("varbit", b"", bytes(4), ""),
    ("varbit", b"00000000", b"\0\0\0\x08\0", "00000000"),
    ("tid", b"(4294967295,65535)", b"\xff" * 6, "(4294967295,65535)"),
    ("pg_lsn", b"16/B374D848", bytes.fromhex("00000016b374d848"), "16/B374D848"),
    ("pg_lsn", b"0/0", bytes(8), "0/0"),
    ("pg_snapshot", b"10:20:10,14,15", struct.pack(">i5Q", 3, 10, 20, 10, 14, 15),
     "10:20:10,14,15"),
    ("txid_snapshot", b"1:1:", struct.pack(">iQQ", 0, 1, 1), "1:1:"),
    ("macaddr", b"08:00:2b:01:02:03", bytes.fromhex("08002b010203"), "08:00:2b:01:02:03"),
    ("macaddr8", b"08:00:2b:ff:fe:01:02:03", bytes.fromhex("08002bfffe010203"),
     "08:00:2b:ff:fe:01:02:03"),
    ("inet", b"192.168.1.1", b"\2\x20\0\4\xc0\xa8\1\1", ipaddress.IPv4Address("192.168.1.1")),
    ("inet", b"192.168.1.1/24", b"\2\x18\0\4\xc0\xa8\1\1",
     ipaddress.IPv4Interface("192.168.1.1/24")),
    ("inet", b"0.0.0.0/0", b"\2\0\0\4\0\0\0\0", ipaddress.IPv4Interface("0.0.0.0/0")),
    ("inet", b"::", b"\3\x80\0\x10" + bytes(16), ipaddress.IPv6Address("::")),
    ("inet", b"::1", b"\3\x80\0\x10" + bytes(15) + b"\1", ipaddress.IPv6Address("::1")),
    ("inet", b"::ffff:1.2.3.4", b"\3\x80\0\x10" + bytes(10) + b"\xff\xff\1\2\3\4",
     ipaddress.IPv6Address("::ffff:1.2.3.4")),
    ("inet", b"::1.2.3.4/100", b"\3\x64\0\x10" + bytes(12) + b"\1\2\3\4",
     ipaddress.IPv6Interface("::102:304/100")),
    ("inet", b"1:0:0:2::3", b"\3\x80\0\x10" + struct.pack(">8H", 1, 0, 0, 2, 0, 0, 0, 3),
     ipaddress.IPv6Address("1:0:0:2::3")),
    ("inet", b"1::2:0:0:3:4", b"\3\x80\0\x10" + struct.pack(">8H", 1, 0, 0, 2, 0, 0, 3, 4),
     ipaddress.IPv6Address("1::2:0:0:3:4")),
    ("inet", b"1:0:2:3:4:5:6:7", b"\3\x80\0\x10" + struct.pack(">8H", 1, 0, 2, 3, 4, 5, 6, 7),
     ipaddress.IPv6Address("1:0:2:3:4:5:6:7")),
    ("cidr", b"10.0.0.0/8", b"\2\x08\1\4\x0a\0\0\0", ipaddress.IPv4Network("10.0.0.0/8")),
    ("cidr", b"10.1.2.3/32", b"\2\x20\1\4\x0a\1\2\3", ipaddress.IPv4Network("10.1.2.3/32")),
    ("cidr", b"2001:db8::/32", b"\3\x20\1\x10\x20\1\x0d\xb8" + bytes(12),
     ipaddress.IPv6Network("2001:db8::/32")),
    ("point", b"(NaN,Infinity)", floats(float("nan"), float("inf")), "(NaN,Infinity)"),
    ("point", b"(-0,1e+300)", floats(-0.0, 1e300), "(-0,1e+300)"),
    ("point", b"(0.1,1e-05)", floats(0.1, 1e-5), "(0.1,1e-05)"),
    ("lseg", b"[(1.5,2),(-3,40000000000)]", floats(1.5, 2, -3, 4e10), "[(1.5,2),(-3,40000000000)]"),
    ("box", b"(3,4),(1,2)", floats(3, 4, 1, 2), "(3,4),(1,2)"),
    ("path", b"((0,0),(1,1))", b"\1" + struct.pack(">i", 2) + floats(0, 0, 1, 1), "((0,0),(1,1))"),
    ("path", b"[(0,0)]", b"\0" + struct.pack(">i", 1) + floats(0, 0), "[(0,0)]"),
    ("polygon", b"((0.1,0.2))", struct.pack(">i", 1) + floats(0.1, 0.2), "((0.1,0.2))"),
    ("line", b"{-1.5,0,1e-300}", floats(-1.5, 0, 1e-300), "{-1.5,0,1e-300}"),
    ("circle", b"<(1.5,-2.5),Infinity>", floats(1.5, -2.5, float("inf")), "<(1.5,-2.5),Infinity>"),
    ("tsvector", b"", counted(), ""),
    ("tsvector", "'a':1A 'fat':2B,4C 'é''\\\\':16383".encode(),
     counted(lexeme("a", 0xC001), lexeme("fat", 0x8002, 0x4004), lexeme("é'\\", 0x3FFF)),
     "'a':1A 'fat':2B,4C 'é''\\\\':16383"),
    ("tsquery", b"", counted(), ""),
    ("tsquery", b"'a':*AD & !( 'b' | 'c''\\\\' )",
     counted(AND, NOT, OR, word("c'\\"), word("b"), word("a", 9, 1)),
     "'a':*AD & !( 'b' | 'c''\\\\' )"),
    ("tsquery", b"'a' <-> 'b' <3> 'c'",
     counted(phrase(3), word("c"), phrase(), word("b"), word("a")), "'a' <-> 'b' <3> 'c'"),
    ("tsquery", b"'a' <-> ( 'b' <-> 'c' )",
     counted(phrase(), phrase(), word("c"), word("b"), word("a")), "'a' <-> ( 'b' <-> 'c' )"),
    ("tsquery", b"( 'a' | 'b' ) & 'c' & 'd'",
     counted(AND, word("d"), AND, word("c"), OR, word("b"), word("a")),
     "( 'a' | 'b' ) & 'c' & 'd'"),
    ("tsquery", b"!!'a'", counted(NOT, NOT, word("a")), "!!'a'"),
    ("jsonpath", b"strict $.\"k k\".size()", b"\1strict $.\"k k\".size()",
     'strict $."k k".size()'),
    ("hstore", b"", counted(), {}),
    ("hstore", '"a"=>"1", "n"=>NULL, "q\\"\\\\"=>"é", ""=>""'.encode(),
     counted(sized(b"a") + sized(b"1"), sized(b"n") + b"\xff" * 4,
             sized(b'q"\\') + sized("é".encode()), sized(b"") + sized(b"")),
     {"a": "1", "n": None, 'q"\\': "é", "": ""}),
    ("ltree", b"Top.Science", b"\1Top.Science", "Top.Science"),
    ("lquery", b"*.a{1,2}", b"\1*.a{1,2}", "*.a{1,2}"),
    ("ltxtquery", b"a & !b", b"\1a & !b", "a & !b"),
    ("citext", "Äh".encode(), "Äh".encode(), "Äh"),
    ("cube", b"(1.5, 2)", b"\x80\0\0\2" + floats(1.5, 2), "(1.5, 2)"),
    ("cube", b"(1, 2),(3, 1e+20)", b"\0\0\0\2" + floats(1, 2, 3, 1e20), "(1, 2),(3, 1e+20)"),
    ("cube", b"(7)", b"\0\0\0\1" + floats(7, 7), "(7)"),
    ("cube", b"()", b"\x80\0\0\0", "()"),
    ("vector", b"[1,0.1,-2.5e-09]", vector(1, 0.1, -2.5e-9), [1.0, float32(0.1), float32(-2.5e-9)]),
    ("halfvec", b"[1,0.099975586,65504]", half(1, 0.1, 65504), [1.0, 0.0999755859375, 65504.0]),
    ("sparsevec", b"{1:1.5,3:2}/5", struct.pack(">3i2i2f", 5, 2, 0, 0, 2, 1.5, 2),
     SparseVector(5, (0, 2), (1.5, 2.0))),
    ("sparsevec", b"{}/1000000000", struct.pack(">3i", 10**9, 0, 0), SparseVector(10**9, (), ())),
    ("geometry", POINT_EWKB.hex().upper().encode(), POINT_EWKB, POINT_EWKB),
    ("geography", POINT_EWKB.hex().upper().encode(), POINT_EWKB, POINT_EWKB),
]  # fmt: skip


@pytest.mark.parametrize(
    ("type_name", "text", "binary", "value"),
    VALUES,
    ids=[f"{v[0]}-{v[1][:24].decode(errors='replace')}" for v in VALUES],
)
def test_rare_text_equals_binary(
    impl: ModuleType, type_name: str, text: bytes, binary: bytes, value: Any
) -> None:
    from_text, from_binary = check_both_forms(impl, type_name, text, binary, value)
    for row in (from_text, from_binary):
        assert row.texts() == (text.decode(),)
    assert same(pickle.loads(pickle.dumps(from_binary))[0], value)


def test_every_codec_of_a_scalar_has_functions() -> None:
    nested = {"range", "multirange", "vector"}
    named = {entry.codec for entry in BUILTIN_TYPES + EXTENSION_TYPES}
    assert named - set(CODECS) <= nested


def test_inet_with_a_whole_prefix(impl: ModuleType) -> None:
    # inet::text has it, what replication sends has not.
    assert same(row_of(impl, "inet", b"1.2.3.4/32")[0], ipaddress.IPv4Address("1.2.3.4"))
    assert same(row_of(impl, "inet", b"::1/128")[0], ipaddress.IPv6Address("::1"))


def test_money_differs_by_format(impl: ModuleType) -> None:
    assert row_of(impl, "money", b"-$1,234.56")[0] == "-$1,234.56"
    row = row_of(impl, "money", struct.pack(">q", -123456), b"b")
    assert same(row[0], -123456)
    with expect_error(pf.DecodeError, code="no_text_form"):
        row.text(0)
    assert row_of(impl, "money", "1,00 €".encode("iso8859-15"), encoding="LATIN9")[0] == "1,00 €"


@pytest.mark.parametrize("type_name", ["regclass", "regtype", "regproc", "regrole", "regconfig"])
def test_aliases_of_oid_differ_by_format(impl: ModuleType, type_name: str) -> None:
    assert row_of(impl, type_name, b'pg_catalog."Name"')[0] == 'pg_catalog."Name"'
    row = row_of(impl, type_name, b"\xff\xff\xff\xff", b"b")
    assert same(row[0], "4294967295")
    with expect_error(pf.DecodeError, code="no_text_form"):
        row.text(0)


def test_types_without_binary_functions(impl: ModuleType) -> None:
    assert row_of(impl, "aclitem", b"a=r/b")[0] == "a=r/b"
    row = row_of(impl, "pg_ndistinct", b"\1\2", b"b")
    assert same(row[0], b"\1\2")
    with pytest.raises(pf.DecodeError) as caught:
        row.text(0)
    assert caught.value.code == "no_text_form"


# texts of other IntervalStyles: sql_standard, postgres_verbose, iso_8601
STYLES = {
    Interval(): ("0", "@ 0", "PT0S"),
    Interval(14): ("1-2", "@ 1 year 2 mons", "P1Y2M"),
    Interval(-13): ("-1-1", "@ 1 year 1 mon ago", "P-1Y-1M"),
    Interval(0, -1): ("-1 0:00:00", "@ 1 day ago", "P-1D"),
    Interval(0, 1, 7384568000): ("1 2:03:04.568", "@ 1 day 2 hours 3 mins 4.568 secs",
                                 "P1DT2H3M4.568S"),
    Interval(0, -1, -7384568000): ("-1 2:03:04.568", "@ 1 day 2 hours 3 mins 4.568 secs ago",
                                   "P-1DT-2H-3M-4.568S"),
    Interval(0, -1, 1000000): ("+0-0 -1 +0:00:01", "@ 1 day -1 sec ago", "P-1DT1S"),
    Interval(-14, 3, -14706789000): ("-1-2 +3 -4:05:06.789",
                                     "@ 1 year 2 mons -3 days 4 hours 5 mins 6.789 secs ago",
                                     "P-1Y-2M3DT-4H-5M-6.789S"),
    Interval(0, 0, -1): ("-0:00:00.000001", "@ 0.000001 secs ago", "PT-0.000001S"),
    Interval(0, 1, -500000): ("+0-0 +1 -0:00:00.5", "@ 1 day -0.5 secs", "P1DT-0.5S"),
    Interval(0, INT4_MIN): ("-2147483648 0:00:00", "@ 2147483648 days ago", "P-2147483648D"),
    Interval(0, 0, -360000500000): ("-100:00:00.5", "@ 100 hours 0.5 secs ago", "PT-100H-0.5S"),
}  # fmt: skip


@pytest.mark.parametrize("value", STYLES, ids=str)
def test_interval_styles(impl: ModuleType, value: Interval) -> None:
    for text in STYLES[value]:
        assert same(row_of(impl, "interval", text.encode())[0], value)


NOON = datetime.datetime(2024, 6, 15, 12, 0, 0, 700_000)
NOON_UTC = NOON.replace(tzinfo=UTC)


@pytest.mark.parametrize(
    ("type_name", "text", "value"),
    [
        ("date", "29.02.2024", datetime.date(2024, 2, 29)),
        ("date", "12/31/1999", datetime.date(1999, 12, 31)),
        ("date", "31-12-1999", datetime.date(1999, 12, 31)),
        ("date", "05/05/1999", datetime.date(1999, 5, 5)),
        ("timestamp", "15.06.2024 12:00:00.7", NOON),
        ("timestamp", "15/06/2024 12:00:00.7", NOON),
        ("timestamptz", "06/15/2024 12:00:00.7 UTC", NOON_UTC),
        ("timestamp", "Sat Jun 15 12:00:00.7 2024", NOON),
        ("timestamp", "Sat 15 Jun 12:00:00.7 2024", NOON),
        ("timestamptz", "15.06.2024 12:00:00.7 UTC", NOON_UTC),
        ("timestamptz", "15.06.2024 17:45:00.7 +0545", NOON_UTC),
        ("timestamptz", "15.06.2024 17:45:00.7+05:45", NOON_UTC),
        ("timestamptz", "Sat Jun 15 12:00:00.7 2024 GMT", NOON_UTC),
        ("timestamptz", "Sat 15 Jun 09:00:00.7 2024 -03", NOON_UTC),
    ],
)
def test_date_styles_that_tell(impl: ModuleType, type_name: str, text: str, value: Any) -> None:
    assert same(row_of(impl, type_name, text.encode())[0], value)


@pytest.mark.parametrize(
    ("type_name", "text", "settings"),
    [
        ("date", "01/02/2024", ("DateStyle",)),
        ("date", "12-11-1999", ("DateStyle",)),
        ("date", "03/12/0001 BC", ("DateStyle",)),
        ("timestamp", "01/02/2024 12:00:00.5", ("DateStyle",)),
        ("timestamptz", "01/02/2024 12:00:00 EST", ("DateStyle",)),
        ("timestamptz", "15/06/2024 07:07:55 CET", ("DateStyle", "TimeZone")),
        ("timestamptz", "15.06.2024 07:07:55 LMT", ("DateStyle", "TimeZone")),
        ("timestamptz", "Sat Jun 15 07:49:56.7 2024 BST", ("DateStyle", "TimeZone")),
        ("timestamptz", "Fri Mar 15 11:58:45 0044 LMT BC", ("DateStyle", "TimeZone")),
        ("interval", "1 fortnight", ("IntervalStyle",)),
        ("float8", "1.79769313486232e+308", ("extra_float_digits",)),
    ],
)
def test_styles_that_hide_the_value_are_refused(
    impl: ModuleType, type_name: str, text: str, settings: tuple[str, ...]
) -> None:
    row = row_of(impl, type_name, text.encode())
    with pytest.raises(pf.DecodeError) as caught:
        row.values()
    assert caught.value.code == "bad_value"
    for setting in settings:
        assert setting in str(caught.value)


def test_the_days_beside_pythons_calendar(impl: ModuleType) -> None:
    last = datetime.datetime(9999, 12, 31, 21, 15, tzinfo=UTC)
    first = datetime.datetime(1, 1, 1, 4, tzinfo=UTC)
    assert row_of(impl, "timestamptz", b"10000-01-01 03:00:00+05:45")[0] == last
    assert row_of(impl, "timestamptz", b"0001-12-31 20:00:00-08 BC")[0] == first
    last = datetime.datetime(9999, 12, 31, 22, tzinfo=UTC)
    assert row_of(impl, "timestamptz", b"9999-12-31 23:00:00+01")[0] == last
    null = pf.Policies(out_of_range="null")
    for text in (
        b"10000-01-01 05:45:00+05:45", b"0001-12-31 20:00:00+00 BC", b"0001-12-31 15:59:59-08 BC",
        b"9999-12-31 23:00:00-01", b"0001-01-01 00:30:00+01", b"10000-01-02 01:00:00+05:45",
    ):  # fmt: skip
        assert row_of(impl, "timestamptz", text, policies=null)[0] is None


MALFORMED: list[tuple[str, bytes, bytes]] = [
    ("interval", b"", b"t"), ("interval", b" 1 day", b"t"), ("interval", b"1 year1 mon", b"t"),
    ("interval", b"1 days 1 year", b"t"), ("interval", b"P", b"t"), ("interval", b"P1DT", b"t"),
    ("interval", b"@", b"t"), ("interval", b"@ ago", b"t"), ("interval", b"00:60:00", b"t"),
    ("interval", b"2147483648 days", b"t"), ("interval", b"200000000 years", b"t"),
    ("interval", b"2562047788:00:54.775808", b"t"), ("interval", b"9" * 5000, b"t"),
    ("interval", b"1-2 3", b"t"), ("interval", bytes(15), b"b"), ("interval", bytes(17), b"b"),
    ("timetz", b"12:00:00", b"t"), ("timetz", b"25:00:00+00", b"t"),
    ("timetz", b"12:00:00+16", b"t"), ("timetz", b"24:00:00.000001+00", b"t"),
    ("timetz", timetz(86_400_000_001, 0), b"b"), ("timetz", timetz(0, 57_600), b"b"),
    ("timetz", timetz(-1, 0), b"b"), ("timetz", bytes(8), b"b"),
    ("date", b"30.02.2024", b"t"), ("date", b"1.2.2024", b"t"), ("date", b"2020-02-30", b"t"),
    ("date", b"0000-01-01", b"t"), ("date", b"0000-01-01 BC", b"t"), ("date", b"10001-02-29", b"t"),
    ("date", b"4714-11-23 BC", b"t"), ("date", b"5874898-01-01", b"t"),
    ("date", b"9999999-12-31", b"t"), ("date", b"0006-02-29 BC", b"t"),
    ("date", b"12345-13-01", b"t"), ("time", b"24:00:01", b"t"), ("time", b"12:60:00", b"t"),
    ("date", struct.pack(">i", INT4_MAX - 1), b"b"),
    ("timestamp", b"Sat Jux 15 12:00:00 2024", b"t"), ("timestamp", b"15.06.2024 UTC", b"t"),
    ("timestamp", b"4714-11-23 23:59:59.999999 BC", b"t"),
    ("timestamp", b"0000-01-01 00:00:00", b"t"),
    ("timestamp", b"294277-01-01 00:00:00", b"t"), ("timestamp", b"10001-02-29 00:00:00", b"t"),
    ("timestamp", b"0044-03-15 24:00:00 BC", b"t"), ("timestamp", b"2024-01-01 24:00:00", b"t"),
    ("timestamptz", b"2024-01-01 24:00:00+00", b"t"),
    ("timestamptz", b"2024-01-01 00:00:00-24:60", b"t"),
    ("timestamptz", b"2024-01-01 00:00:00+25:61:61", b"t"),
    ("timestamptz", b"2024-01-01 00:00:00+01:00:60", b"t"),
    ("timestamptz", b"2024-01-01 00:00:00+168", b"t"),
    ("timestamptz", b"2024-01-01 00:00:00+1", b"t"),
    ("timestamptz", b"2024-01-01 00:00:000+00", b"t"), ("timestamp", b"2024-01-01 00:00:000", b"t"),
    ("timestamptz", b"294277-01-01 00:00:00-01", b"t"),
    ("timestamptz", b"4714-11-24 00:00:00+01 BC", b"t"),
    ("timetz", b"12:00:00+15:60", b"t"), ("timetz", b"12:00:00+25:61:61", b"t"),
    ("timetz", b"24:00:01+00", b"t"), ("float8", b"1-1", b"t"), ("float8", b"", b"t"),
    ("numeric", b"1-1", b"t"), ("numeric", b"1.2.3", b"t"), ("numeric", b"", b"t"),
    ("bytea", b"\\x 4142 ", b"t"), ("bytea", b"\\x41 42", b"t"), ("bytea", b"\\x4", b"t"),
    ("bytea", b"\\x\xc3\xa4", b"t"),
    ("timestamp", b"15.06.2024 12:00:00 UTC", b"t"), ("timestamptz", b"15.06.2024 12:00:00", b"t"),
    ("timestamp", struct.pack(">q", INT8_MAX - 1), b"b"),
    ("timestamptz", struct.pack(">q", INT8_MIN + 1), b"b"),
    ("money", b"", b"t"), ("money", b"$", b"t"), ("money", bytes(7), b"b"),
    ("regclass", b"", b"t"), ("regclass", bytes(3), b"b"),
    ("bit", b"012", b"t"), ("bit", b"\0\0\0\3\xb0", b"b"), ("bit", b"\0\0\0\x09\0", b"b"),
    ("bit", b"\x7f\xff\xff\xff", b"b"), ("varbit", b"\xff\xff\xff\xff", b"b"),
    ("varbit", b"\0", b"b"),
    ("tid", b"(1,2", b"t"), ("tid", b"(4294967296,1)", b"t"), ("tid", b"(1,65536)", b"t"),
    ("tid", bytes(8), b"b"), ("pg_lsn", b"0", b"t"), ("pg_lsn", b"g/0", b"t"),
    ("pg_lsn", b"123456789/0", b"t"), ("pg_lsn", bytes(7), b"b"),
    ("pg_snapshot", b"2:1:", b"t"), ("pg_snapshot", b"1:9:5,4", b"t"),
    ("pg_snapshot", b"1:9:9", b"t"), ("pg_snapshot", b"1:2", b"t"), ("pg_snapshot", b"0:0:", b"t"),
    ("pg_snapshot", struct.pack(">iQQ", INT4_MAX, 1, 1), b"b"),
    ("pg_snapshot", struct.pack(">iQQ", -1, 1, 1), b"b"),
    ("pg_snapshot", struct.pack(">iQQ", 0, 2, 1), b"b"), ("pg_snapshot", bytes(4), b"b"),
    ("macaddr", b"08:00:2b:01:02", b"t"), ("macaddr", b"08:00:2B:01:02:03", b"t"),
    ("macaddr", bytes(5), b"b"), ("macaddr8", bytes(6), b"b"),
    ("inet", b"1.2.3", b"t"), ("inet", b"1.2.3.4/33", b"t"), ("inet", b"1.2.3.4/255.0.0.0", b"t"),
    ("inet", b"fe80::1%eth0", b"t"), ("inet", b"::1/129", b"t"), ("inet", b"1.2.3.4/024", b"t"),
    ("inet", b"", b"t"), ("inet", b"\2\x21\0\4\1\2\3\4", b"b"),
    ("inet", b"\3\x20\0\4\1\2\3\4", b"b"),
    ("inet", b"\2\x20\1\4\1\2\3\4", b"b"), ("inet", b"\2\x20\0\4\1\2\3", b"b"),
    ("cidr", b"10.0.0.1/8", b"t"), ("cidr", b"10.0.0.0", b"t"),
    ("cidr", b"\2\x08\1\4\x0a\0\0\1", b"b"), ("cidr", b"\2\x08\0\4\x0a\0\0\0", b"b"),
    ("point", b"(1,2", b"t"), ("point", b"(1, 2)", b"t"), ("point", b"(nan,1)", b"t"),
    ("point", bytes(15), b"b"), ("lseg", b"(0,0),(1,1)", b"t"), ("lseg", bytes(24), b"b"),
    ("box", b"(1,1)", b"t"), ("box", bytes(16), b"b"), ("line", b"{1,2}", b"t"),
    ("line", bytes(16), b"b"), ("circle", b"<(1,2)>", b"t"), ("circle", bytes(32), b"b"),
    ("path", b"((1,2)]", b"t"), ("path", b"()", b"t"), ("path", b"\2\0\0\0\1" + bytes(16), b"b"),
    ("path", b"\1\0\0\0\0", b"b"), ("path", b"\1\x0f\xff\xff\xff", b"b"), ("path", b"", b"b"),
    ("polygon", b"[(1,2)]", b"t"), ("polygon", b"\0\0\0\2" + bytes(16), b"b"),
    ("polygon", b"\xff\xff\xff\xff", b"b"),
    ("tsvector", "'a':１".encode(), b"t"), ("tsquery", "'a' <１> 'b'".encode(), b"t"),
    ("tsvector", b"a", b"t"), ("tsvector", b"'a", b"t"), ("tsvector", b"'a':", b"t"),
    ("tsvector", b"'a':1D", b"t"), ("tsvector", b"'a'  'b'", b"t"), ("tsvector", b"'a\\'", b"t"),
    ("tsvector", b"\x7f\xff\xff\xff", b"b"), ("tsvector", b"\xff\xff\xff\xff", b"b"),
    ("tsvector", b"\0\0\0\1abcd", b"b"), ("tsvector", b"\0\0\0\1a\0\0\5\0\1", b"b"),
    ("tsvector", counted(lexeme("a")) + b"x", b"b"), ("tsvector", b"\0\0", b"b"),
    ("tsquery", b"a", b"t"), ("tsquery", b"'a' &", b"t"), ("tsquery", b"'a' 'b'", b"t"),
    ("tsquery", b"( 'a'", b"t"), ("tsquery", b"'a' ) & ( 'b'", b"t"), ("tsquery", b"'a':", b"t"),
    ("tsquery", counted(AND, word("a")), b"b"), ("tsquery", counted(NOT), b"b"),
    ("tsquery", counted(word("a"), word("b")), b"b"), ("tsquery", counted(b"\3\0\0"), b"b"),
    ("tsquery", counted(b"\2\5", word("a"), word("b")), b"b"), ("tsquery", counted(b"\1\0"), b"b"),
    ("tsquery", counted(word("a", 16)), b"b"), ("tsquery", b"\x7f\xff\xff\xff", b"b"),
    ("tsquery", counted(word("a")) + b"x", b"b"), ("tsquery", counted(b"\2\4\0"), b"b"),
    ("jsonpath", b"\2$", b"b"), ("jsonpath", b"", b"b"), ("ltree", b"a", b"b"),
    ("hstore", b'"a"', b"t"), ("hstore", b'"a"=>1', b"t"), ("hstore", b'"a"=>"1",', b"t"),
    ("hstore", b'"a"=>"1", ', b"t"), ("hstore", b'"a"=>"1", "a"=>"2"', b"t"),
    ("hstore", b'"a\\b"=>"1"', b"t"), ("hstore", b"\x7f\xff\xff\xff", b"b"),
    ("hstore", counted(sized(b"a") + b"\xff\xff\xff\xfe"), b"b"),
    ("hstore", counted(b"\xff\xff\xff\xff" + sized(b"a")), b"b"),
    ("hstore", counted(sized(b"a") + b"\0\0\0\x09bcd"), b"b"),
    ("hstore", counted(sized(b"a") + sized(b"b")) + b"x", b"b"),
    ("hstore", counted(sized(b"a") + sized(b"b"), sized(b"a") + sized(b"b")), b"b"),
    ("cube", b"(1,2)", b"t"), ("cube", b"(1, 2),", b"t"), ("cube", b"\0\0\0\1" + floats(1), b"b"),
    ("cube", b"\x7f\xff\xff\xff", b"b"), ("cube", b"", b"b"),
    ("vector", b"[]", b"t"), ("vector", b"1,2", b"t"), ("vector", b"[1,]", b"t"),
    ("vector", b"[nan]", b"t"), ("vector", b"[1e39]", b"t"), ("vector", b"[1 ]", b"t"),
    ("vector", b"\0\2\0\0" + bytes(4), b"b"), ("vector", bytes(4), b"b"),
    ("vector", b"\0\1\0\1" + bytes(4), b"b"), ("vector", vector(float("inf")), b"b"),
    ("vector", b"[" + b"0," * 16_000 + b"0]", b"t"), ("halfvec", b"[65520]", b"t"),
    ("halfvec", b"\x3e\x81\0\0" + bytes(2 * 16_001), b"b"), ("halfvec", b"", b"b"),
    ("sparsevec", b"{1:1}", b"t"), ("sparsevec", b"{0:1}/2", b"t"), ("sparsevec", b"{3:1}/2", b"t"),
    ("sparsevec", b"{2:1,1:1}/2", b"t"), ("sparsevec", b"{1:0}/2", b"t"),
    ("sparsevec", b"{}/0", b"t"), ("sparsevec", b"{}/1000000001", b"t"),
    ("sparsevec", struct.pack(">3i", 10**9, INT4_MAX, 0), b"b"),
    ("sparsevec", struct.pack(">3i", 10**9, -1, 0), b"b"),
    ("sparsevec", struct.pack(">3i", 1, 0, 1), b"b"), ("sparsevec", bytes(8), b"b"),
    ("sparsevec", struct.pack(">3iif", 1, 1, 0, -1, 1.0), b"b"),
    ("sparsevec", struct.pack(">3iif", 1, 1, 0, 0, float("nan")), b"b"),
    ("geometry", b"0101", b"t"), ("geometry", b"010100000Z", b"t"), ("geometry", b"", b"b"),
    ("geometry", b"\2\1\0\0\0", b"b"), ("geography", b"01010000000", b"t"),
]  # fmt: skip


SHOWN = {"date", "time", "timetz", "timestamp", "timestamptz", "inet", "cidr", "float8", "numeric"}
"""Types whose errors always show a value that is short."""


@pytest.mark.parametrize(("type_name", "value", "kind"), MALFORMED, ids=lambda v: str(v)[:30])
def test_malformed_rare_values(impl: ModuleType, type_name: str, value: bytes, kind: bytes) -> None:
    row = row_of(impl, type_name, value, kind)
    more = [row.texts] if kind == b"b" and type_name != "money" else []
    for sentence in check_refused(row, value, *more):
        assert len(sentence) < 500
        if kind == b"t" and type_name in SHOWN:
            assert repr(value)[1:] in sentence


def test_text_in_the_sessions_encoding(impl: ModuleType) -> None:
    # In Shift JIS the second half of a character can look like a backslash, of which "表" has one.
    for type_name, text, binary, value in (
        ("tsvector", "'表'", "表\0", "'表'"),
        ("tsquery", "'表'", "表\0", "'表'"),
        ("hstore", '"表"=>"表"', "", {"表": "表"}),
        ("ltree", "表", "表", "表"),
    ):
        row = row_of(impl, type_name, text.encode("shift_jis"), encoding="SJIS")
        assert row[0] == value
        body = binary.encode("shift_jis")
        sent = {
            "tsvector": b"\0\0\0\1" + body + b"\0\0",
            "tsquery": b"\0\0\0\1\1\0\0" + body,
            "hstore": counted(sized("表".encode("shift_jis")) * 2),
            "ltree": b"\1" + body,
        }[type_name]
        row = row_of(impl, type_name, sent, b"b", encoding="SJIS")
        assert row[0] == value
        assert row.text(0) == text
        with pytest.raises(pf.DecodeError) as caught:
            row_of(impl, type_name, sent, b"b").values()
        assert caught.value.code == "bad_encoding"


@pytest.mark.slow
def test_deep_and_wide_values_need_no_recursion(impl: ModuleType) -> None:
    depth = 50_000
    row = row_of(impl, "tsquery", counted(*[NOT] * depth, word("a")), b"b")
    assert row[0] == "!" * depth + "'a'"
    items = [part for i in range(depth) for part in (AND, OR, word("r"))] + [word("l")] * (
        depth + 1
    )
    row = row_of(impl, "tsquery", counted(*items), b"b")
    assert row[0].count("( ") == depth
    for type_name, text in (
        ("hstore", b'"' + b'\\"' * depth), ("tsvector", b"'" + b"''" * depth),
        ("tsquery", b"( " * depth + b"'a'"), ("path", b"(" + b"(1,2)," * depth),
        ("interval", b"1 year " * depth), ("sparsevec", b"{" + b"1:1," * depth + b"}/5"),
    ):  # fmt: skip
        with pytest.raises(pf.DecodeError):
            row_of(impl, type_name, text).values()


def test_the_widest_vectors(impl: ModuleType) -> None:
    for type_name, binary in (("vector", vector(*[1] * 16_000)), ("halfvec", half(*[1] * 16_000))):
        text = b"[" + b"1," * 15_999 + b"1]"
        row = row_of(impl, type_name, binary, b"b")
        assert row[0] == row_of(impl, type_name, text)[0] == [1.0] * 16_000
        assert row.text(0) == text.decode()


def test_floats_that_repr_writes_otherwise() -> None:
    # Seen from 18.4: repr has a midpoint, or beside a power of two the digits of another float.
    for number, text in (
        (1e23, "9.999999999999999e+22"), (2.0**-1017, "7.120236347223045e-307"),
        (1e15, "1e+15"), (123456789012345.0, "123456789012345"), (2.0**53, "9.007199254740992e+15"),
        (1e-5, "1e-05"), (1e22, "1e+22"), (-1e41, "-1e+41"), (2e15, "2e+15"),
        (2251799813685249.5, "2.2517998136852495e+15"),
        (float("inf"), "Infinity"), (float("nan"), "NaN"), (-0.0, "-0"), (5e-324, "5e-324"),
    ):  # fmt: skip
        assert float8_text(number) == text
    for bits, text in (
        (0x4A5609AF, "3.5067958e+06"), (0x0F800000, "1.2621775e-29"), (0x6B000000, "1.5474251e+26"),
        (0x00000001, "1e-45"), (0x7F7FFFFF, "3.4028235e+38"), (0x49742400, "1e+06"),
        (0x497423FF, "999999.94"), (0x3DCCCCCD, "0.1"), (0xBDCCCCCD, "-0.1"), (0x80000000, "-0"),
        (0x4B800000, "1.6777216e+07"), (0x7F800000, "Infinity"), (0x38D1B717, "0.0001"),
    ):  # fmt: skip
        number = struct.unpack(">f", struct.pack(">I", bits))[0]
        assert float4_text(number) == text


def test_time_zones_that_only_a_server_has(impl: ModuleType) -> None:
    # TimeZone can be UTC-25 or UTC+167: the server prints such offsets, which it does not read.
    noon = datetime.datetime(2024, 6, 15, 12, tzinfo=UTC)
    for text in (
        b"2024-06-14 20:00:00-16", b"2024-06-16 13:00:00+25", b"2024-06-08 13:00:00-167",
        b"2024-06-15 12:00:01+00:00:01",
    ):  # fmt: skip
        assert same(row_of(impl, "timestamptz", text)[0], noon)


def test_the_ends_of_the_servers_calendar(impl: ModuleType) -> None:
    text = pf.Policies(out_of_range="text")
    for type_name, shown in (
        ("date", b"4714-11-24 BC"), ("date", b"5874897-12-31"), ("date", b"0005-02-29 BC"),
        ("date", b"10000-02-29"), ("date", b"0001-12-31 BC"),
        ("timestamp", b"4714-11-24 00:00:00 BC"), ("timestamp", b"294276-12-31 23:59:59.999999"),
        ("timestamptz", b"4714-11-23 14:00:00-10 BC"),
        ("timestamptz", b"294277-01-01 09:59:59.999999+10"),
    ):  # fmt: skip
        assert row_of(impl, type_name, shown, policies=text)[0] == shown.decode()


def test_numerics_do_not_ask_the_threads_context(impl: ModuleType) -> None:
    with decimal.localcontext() as context:
        context.traps[decimal.InvalidOperation] = False
        context.prec = 3
        with expect_error(pf.DecodeError, code="bad_value"):
            row_of(impl, "numeric", b"1.2.3").values()
        value = row_of(impl, "numeric", b"1" * 40 + b".50")[0]
    assert same(value, decimal.Decimal("1" * 40 + ".50"))


def test_infinity_may_be_an_interval_of_before_17(impl: ModuleType) -> None:
    binary = interval(INT4_MAX, INT4_MAX, INT8_MAX)
    with expect_error(pf.DecodeError, code="out_of_range"):
        row_of(impl, "interval", binary, b"b").values()
    with pytest.raises(pf.DecodeError) as caught:
        row_of(impl, "interval", b"infinity").values()
    assert " 17" not in str(caught.value)
    # One of 16's that Python holds, as text tells them apart.
    text = b"178956970 years 7 mons 2147483647 days 2562047788:00:54.775807"
    extremes = Interval(INT4_MAX, INT4_MAX, INT8_MAX)
    assert same(row_of(impl, "interval", text)[0], extremes)
    clamp = pf.Policies(infinity="clamp")
    assert same(row_of(impl, "interval", binary, b"b", clamp)[0], extremes)


def test_binary_hstore_of_a_database_in_another_encoding(impl: ModuleType) -> None:
    # hstore_send counts the two bytes of UTF8, and then sends one of LATIN1.
    sent = counted(b"\0\0\0\2" + "ä".encode("latin-1") + sized(b"x"))
    for value in (sent, counted(sized(b"x") + b"\0\0\0\2" + "ä".encode("latin-1"))):
        row = row_of(impl, "hstore", value, b"b", encoding="LATIN1")
        with expect_error(pf.DecodeError, code="bad_value"):
            row.values()
    assert row_of(impl, "hstore", '"ä"=>"x"'.encode("latin-1"), encoding="LATIN1")[0] == {"ä": "x"}


def test_arrays_of_postgis(impl: ModuleType) -> None:
    value = POINT_EWKB.hex().upper().encode()
    for name in ("_geometry", "_geography"):
        row = row_of(impl, name, b"{" + value + b":NULL:" + value + b"}")
        assert row[0] == [POINT_EWKB, None, POINT_EWKB]
        element = struct.pack(">i", len(POINT_EWKB)) + POINT_EWKB
        sent = struct.pack(">5i", 1, 0, 17_001, 2, 1) + element * 2
        row = row_of(impl, name, sent, b"b")
        assert row[0] == [POINT_EWKB] * 2
        assert row.texts() == (f"{{{value.decode()}:{value.decode()}}}",)
