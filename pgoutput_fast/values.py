"""From the bytes of one value to a Python object, and from a binary value to the server's text.

A codec is a name in :mod:`pgoutput_fast.types`; here it gets its functions. They raise ValueError
for bytes that are no value of the type, :class:`OutOfRange` for a value that Python cannot hold
(after the user's policy said so), and never return a guess. The caller names the column.

The binary forms are those of the types' ``*_send`` functions in PostgreSQL's
``src/backend/utils/adt``; the texts are what the server prints with DateStyle ISO, TimeZone UTC,
bytea_output hex and extra_float_digits 1.
"""

from __future__ import annotations

import binascii
import datetime
import json
import math
import re
import struct
import sys
import uuid
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from typing import Any, NamedTuple

from .policies import Policies
from .types import Converter

UTC = datetime.timezone.utc
EPOCH = datetime.datetime(2000, 1, 1)
EPOCH_UTC = EPOCH.replace(tzinfo=UTC)
_EPOCH_ORDINAL = EPOCH.toordinal()
_DAY = 86_400_000_000  # microseconds

_int16 = struct.Struct(">h").unpack
_int32 = struct.Struct(">i").unpack
_int64 = struct.Struct(">q").unpack
_uint32 = struct.Struct(">I").unpack
_uint64 = struct.Struct(">Q").unpack
_float32 = struct.Struct(">f")
_float64 = struct.Struct(">d").unpack


class OutOfRange(ValueError):
    """A legal value of PostgreSQL's that Python's type cannot hold."""


class Codec(NamedTuple):
    """The functions of one codec, made for a session's policies and encoding."""

    text: Converter
    binary: Converter
    text_form: Converter  # binary value → the server's text


# --- integers, bool, oid -------------------------------------------------------------------------


def _integer(name: str, unpack: Callable[[bytes], tuple[int]], low: int, high: int) -> Codec:
    size = ((high - low + 1).bit_length() - 1) // 8

    digits = len(str(high)) - 1

    def text(raw: bytes) -> int:
        if len(raw) <= digits and raw.isdigit():
            return int(raw)
        if not (raw.isdigit() or (raw[:1] == b"-" and raw[1:].isdigit())) or len(raw) > 20:
            raise ValueError(f"{_shown(raw)} is no {name}")
        value = int(raw)
        if not low <= value <= high:
            raise ValueError(f"{_shown(raw)} does not fit into {name}")
        return value

    def binary(raw: bytes) -> int:
        try:
            return unpack(raw)[0]
        except struct.error:
            raise _wrong_size(raw, size, name) from None

    return Codec(text, binary, lambda raw: str(binary(raw)))


def _bool_text(raw: bytes) -> bool:
    if raw == b"t":
        return True
    if raw == b"f":
        return False
    raise ValueError(f"{_shown(raw)} is no bool; expected t or f")


def _bool_binary(raw: bytes) -> bool:
    if raw == b"\x01":
        return True
    if raw == b"\x00":
        return False
    raise ValueError(f"{_shown(raw)} is no binary bool; expected one byte, 0 or 1")


# --- floats --------------------------------------------------------------------------------------

# With fewer digits than it takes, the greatest float is printed as a number beyond it.
_DIGITS = "; the session's extra_float_digits must be 1 or more"
_FLOAT_NAMES = {
    b"NaN": float("nan"),
    b"Infinity": float("inf"),
    b"-Infinity": float("-inf"),
}


def _float8_text(raw: bytes) -> float:
    if raw.strip(b"0123456789.-+e"):
        if raw in _FLOAT_NAMES:
            return _FLOAT_NAMES[raw]
        raise ValueError(f"{_shown(raw)} is no float8")
    value = float(raw)
    if math.isinf(value):
        raise ValueError(f"{_shown(raw)} is past the greatest float8{_DIGITS}")
    return value


def _float4_text(raw: bytes) -> float:
    value = _float8_text(raw)
    try:
        # The nearest float32, so that text gives what the binary format gives.
        rounded: float = _float32.unpack(_float32.pack(value))[0]
    except OverflowError:
        raise ValueError(f"{_shown(raw)} is past the greatest float4{_DIGITS}") from None
    return rounded


def _float4_binary(raw: bytes) -> float:
    _expect_size(raw, 4, "float4")
    value: float = _float32.unpack(raw)[0]
    return value


def _float8_binary(raw: bytes) -> float:
    try:
        value: float = _float64(raw)[0]
        return value
    except struct.error:
        raise _wrong_size(raw, 8, "float8") from None


def _shortest(value: float, before: float, after: float, most: int) -> str:
    """The fewest digits, in scientific notation, that name `value` and none of its neighbours.

    The server's digits lie strictly between the midpoints to both neighbours. Python's repr takes
    a midpoint too where reading it back rounds to `value`: 1e23 is 9.999999999999999e+22 there.
    """
    exact = Fraction(value)
    low = (exact + Fraction(before)) / 2
    # The greatest float has no finite neighbour above: it would be as far as the one below.
    high = (exact + Fraction(after)) / 2 if after < math.inf else 2 * exact - low
    for digits in range(most):
        scientific = f"{value:.{digits}e}"
        if low < Fraction(scientific) < high:
            break
    return scientific


def _float_form(value: float, shortest: Callable[[float], str], fixed_below: int) -> str:
    """`value` as the server prints it, in scientific notation from 10**`fixed_below` on."""
    if value != value:
        return "NaN"
    if value in (float("inf"), float("-inf")):
        return "Infinity" if value > 0 else "-Infinity"
    sign = "-" if math.copysign(1, value) < 0 else ""
    if value == 0:
        return sign + "0"
    mantissa, _, exponent_text = shortest(abs(value)).partition("e")
    exponent = int(exponent_text)
    digits = mantissa.replace(".", "").rstrip("0")
    if not -4 <= exponent < fixed_below:
        point = "." if len(digits) > 1 else ""
        return f"{sign}{digits[0]}{point}{digits[1:]}e{exponent:+03d}"
    if exponent < 0:
        return f"{sign}0.{'0' * (-exponent - 1)}{digits}"
    whole, fraction = digits[: exponent + 1].ljust(exponent + 1, "0"), digits[exponent + 1 :]
    return f"{sign}{whole}.{fraction}" if fraction else sign + whole


def _shortest_float8(value: float) -> str:
    return _shortest(value, math.nextafter(value, 0), math.nextafter(value, math.inf), 18)


def _shortest_float4(value: float) -> str:
    bits = _uint32(_float32.pack(value))[0]
    before = _float32.unpack(struct.pack(">I", bits - 1))[0]
    after = _float32.unpack(struct.pack(">I", bits + 1))[0]
    return _shortest(value, before, after, 10)


def _float8_form(raw: bytes) -> str:
    return _float_form(_float8_binary(raw), _shortest_float8, 15)


def _float4_form(raw: bytes) -> str:
    return _float_form(_float4_binary(raw), _shortest_float4, 6)


# --- numeric -------------------------------------------------------------------------------------

_NUMERIC_SPECIAL = {0xC000: "NaN", 0xD000: "Infinity", 0xF000: "-Infinity"}
_NUMERIC_NAMES = frozenset({b"NaN", b"Infinity", b"-Infinity"})


def _numeric_text(raw: bytes) -> Decimal:
    if raw.strip(b"0123456789.-") and raw not in _NUMERIC_NAMES:
        raise ValueError(f"{_shown(raw)} is no numeric")
    try:
        return Decimal(raw.decode())
    except InvalidOperation:
        raise ValueError(f"{_shown(raw)} is no numeric") from None


def _numeric_form(raw: bytes) -> str:
    if len(raw) < 8:
        raise ValueError(f"a binary numeric has at least 8 bytes, found {len(raw)}")
    count, weight, sign, scale = struct.unpack_from(">HhHH", raw)
    if len(raw) != 8 + 2 * count:
        raise ValueError(f"a binary numeric of {count} digits has {8 + 2 * count} bytes, "
                         f"found {len(raw)}")  # fmt: skip
    if sign in _NUMERIC_SPECIAL:
        return _NUMERIC_SPECIAL[sign]
    if sign not in (0, 0x4000) or scale > 0x3FFF:
        raise ValueError(f"a binary numeric with sign 0x{sign:04X} and scale {scale}")
    digits = struct.unpack_from(f">{count}H", raw, 8)
    if any(digit > 9999 for digit in digits):
        raise ValueError(f"a binary numeric with the base-10000 digit {max(digits)}")
    text = "".join([f"{digit:04d}" for digit in digits])
    before = 4 * (weight + 1)  # decimal digits before the point
    if before <= 0:
        whole, fraction = "0", "0" * -before + text
    else:
        whole, fraction = text[:before].ljust(before, "0").lstrip("0") or "0", text[before:]
    if fraction[scale:].strip("0"):
        raise ValueError(f"a binary numeric with digits after its scale {scale}")
    fraction = fraction[:scale].ljust(scale, "0")
    negative = "-" if sign and (whole + fraction).strip("0") else ""
    return f"{negative}{whole}.{fraction}" if scale else negative + whole


_numeric_header = struct.Struct(">HhHH").unpack_from
_POWERS = [10**i for i in range(40)]
_NUMERIC_DIGITS = [struct.Struct(f">8x{count}H").unpack for count in range(9)]


def _numeric_binary(raw: bytes) -> Decimal:
    try:
        count, weight, sign, scale = _numeric_header(raw)
        digits = _NUMERIC_DIGITS[count](raw)
    except (struct.error, IndexError):
        return Decimal(_numeric_form(raw))
    value = 0
    for digit in digits:
        value = value * 10_000 + digit
    shift = (weight + 1 - count) * 4 + scale
    if (
        sign not in (0, 0x4000)
        or not -4 < shift < 40
        or scale > 0x3FFF
        or max(digits, default=0) > 9999
    ):
        return Decimal(_numeric_form(raw))
    if shift >= 0:
        value *= _POWERS[shift]
    else:
        value, rest = divmod(value, _POWERS[-shift])
        if rest:
            return Decimal(_numeric_form(raw))
    return Decimal(f"-{value}E-{scale}" if sign and value else f"{value}E-{scale}")


# --- bytes, uuid ---------------------------------------------------------------------------------


def _bytea_text(raw: bytes) -> bytes:
    if raw[:2] == b"\\x":
        try:
            if len(raw) % 2 == 0:
                return bytes.fromhex(raw[2:].decode("latin-1"))
        except ValueError:
            pass
        raise ValueError(f"{_shown(raw)} is no bytea in hex format")
    if b"\\" not in raw:
        return raw
    if _ESCAPED.fullmatch(raw) is None:
        raise ValueError(f"{_shown(raw)} is no bytea in escape format")
    return _ESCAPE.sub(lambda match: bytes([int(match[1], 8)]) if match[1] else b"\\", raw)


_ESCAPE = re.compile(rb"\\(?:\\|([0-3][0-7]{2}))")
_ESCAPED = re.compile(rb"(?:[^\\]|\\\\|\\[0-3][0-7]{2})*", re.DOTALL)


def _char_text(raw: bytes) -> bytes:
    if not raw:
        return b"\0"
    if len(raw) == 1:
        return raw
    if len(raw) == 4 and (match := _ESCAPE.fullmatch(raw)) is not None and match[1]:
        return bytes([int(match[1], 8)])
    raise ValueError(f'{_shown(raw)} is no "char"')


def _char_binary(raw: bytes) -> bytes:
    _expect_size(raw, 1, '"char"')
    return raw


def _char_form(raw: bytes) -> str:
    byte = _char_binary(raw)[0]
    if byte == 0:
        return ""
    return chr(byte) if byte < 128 else f"\\{byte:03o}"


def _uuid_text(raw: bytes) -> uuid.UUID:
    if len(raw) == 36 and raw[8:24:5] == b"----":
        try:
            sixteen = _unhexlify(raw.replace(b"-", b""))
            if len(sixteen) == 16:
                return _make_uuid(_from_bytes(sixteen, "big"))
        except ValueError:
            pass
    raise ValueError(f"{_shown(raw)} is no uuid")


def _uuid_binary(raw: bytes) -> uuid.UUID:
    if len(raw) != 16:
        raise _wrong_size(raw, 16, "uuid")
    return _make_uuid(_from_bytes(raw, "big"))


_from_bytes = int.from_bytes
_unhexlify = binascii.unhexlify
_new = object.__new__
_set = object.__setattr__
_UUID_CLASS = uuid.UUID
_UNKNOWN_SAFETY = uuid.SafeUUID.unknown


def _make_uuid(value: int) -> uuid.UUID:
    """uuid.UUID(int=value) without its constructor, which takes three times as long."""
    made = _new(_UUID_CLASS)
    _set(made, "int", value)
    _set(made, "is_safe", _UNKNOWN_SAFETY)
    return made


# --- dates and times -----------------------------------------------------------------------------

_DATE = re.compile(rb"(\d{4,7})-(\d\d)-(\d\d)( BC)?")
_TIME = re.compile(rb"(\d\d):(\d\d):(\d\d)(?:\.(\d{1,6}))?")
_TIMESTAMP = re.compile(
    rb"(\d{4,6})-(\d\d)-(\d\d) (\d\d):(\d\d):(\d\d)(?:\.(\d{1,6}))?"
    rb"(?:([+-])(\d\d)(?::(\d\d)(?::(\d\d))?)?)?( BC)?"
)
_FAST_ISO = sys.version_info >= (3, 11)  # fromisoformat reads "+00" and any number of digits
_STYLE = "; the session's DateStyle must be ISO"
_INFINITE = frozenset({b"infinity", b"-infinity"})


def _limited(choice: str, policy: str, shown: str, clamp: Any, name: str) -> Any:
    """What the policy makes of a value that Python's type cannot hold."""
    if choice == "null":
        return None
    if choice == "clamp":
        return clamp
    if choice == "text":
        return shown
    raise OutOfRange(
        f"{shown} does not fit into Python's {name}; Policies({policy}=...) can make it None, "
        "the nearest value or text"
    )


def _date(policies: Policies) -> Codec:
    least, greatest = datetime.date.min, datetime.date.max

    fromisoformat = datetime.date.fromisoformat

    def text(raw: bytes) -> Any:
        if len(raw) == 10 and raw[4:8:3] == b"--":
            try:
                return fromisoformat(raw.decode())
            except ValueError:
                pass
        match = _DATE.fullmatch(raw)
        if match is not None:
            year, month, day, era = match.groups()
            if era is None and len(year) == 4:
                return datetime.date(int(year), int(month), int(day))
            _civil_check(int(month), int(day))
            clamp = least if era else greatest
            return _limited(policies.out_of_range, "out_of_range", raw.decode(), clamp, "date")
        if raw in _INFINITE:
            clamp = least if raw[:1] == b"-" else greatest
            return _limited(policies.infinity, "infinity", raw.decode(), clamp, "date")
        raise ValueError(f"{_shown(raw)} is no date{_STYLE}")

    def form(raw: bytes) -> str:
        _expect_size(raw, 4, "date")
        days = _int32(raw)[0]
        if days in (0x7FFFFFFF, -0x80000000):
            return "infinity" if days > 0 else "-infinity"
        return "{}-{:02d}-{:02d}{}".format(*_civil(days))

    def binary(raw: bytes) -> Any:
        try:
            ordinal = _EPOCH_ORDINAL + _int32(raw)[0]
        except struct.error:
            raise _wrong_size(raw, 4, "date") from None
        if 1 <= ordinal <= 3_652_059:
            return datetime.date.fromordinal(ordinal)
        return text(form(raw).encode())

    return Codec(text, binary, form)


def _time(policies: Policies) -> Codec:
    def limited(shown: str) -> Any:
        return _limited(policies.out_of_range, "out_of_range", shown, datetime.time.max, "time")

    def text(raw: bytes) -> Any:
        match = _TIME.fullmatch(raw)
        if match is None:
            raise ValueError(f"{_shown(raw)} is no time")
        hour, minute, second, fraction = match.groups()
        if hour == b"24" and not int(minute) and not int(second) and not int(fraction or 0):
            return limited(raw.decode())
        return datetime.time(int(hour), int(minute), int(second), _microseconds(fraction))

    def form(raw: bytes) -> str:
        _expect_size(raw, 8, "time")
        value = _int64(raw)[0]
        if not 0 <= value <= _DAY:
            raise ValueError(f"a binary time of {value} microseconds; a day has {_DAY}")
        return _clock(value)

    def binary(raw: bytes) -> Any:
        return text(form(raw).encode())

    return Codec(text, binary, form)


def _timestamp(policies: Policies, zoned: bool) -> Codec:
    name = "timestamptz" if zoned else "timestamp"
    timedelta = datetime.timedelta
    epoch = EPOCH_UTC if zoned else EPOCH
    zone = UTC if zoned else None
    least = datetime.datetime.min.replace(tzinfo=zone)
    greatest = datetime.datetime.max.replace(tzinfo=zone)
    fromisoformat = datetime.datetime.fromisoformat
    # Past six digits of a fraction, fromisoformat ignores whatever comes.
    longest = 29 if zoned else 26

    def text(raw: bytes) -> Any:
        if (
            len(raw) <= longest
            and raw[4:17:3] == b"-- ::"
            and (not zoned or raw[-3:] == b"+00")
            and 44 not in raw  # a comma, which fromisoformat takes for a point
        ):
            try:
                value = fromisoformat(raw.decode())
            except ValueError:
                return slow(raw)
            if value.tzinfo is zone:
                return value
        return slow(raw)

    def slow(raw: bytes) -> Any:
        match = _TIMESTAMP.fullmatch(raw)
        if match is None:
            if raw in _INFINITE:
                clamp = least if raw[:1] == b"-" else greatest
                return _limited(policies.infinity, "infinity", raw.decode(), clamp, "datetime")
            raise ValueError(f"{_shown(raw)} is no {name}{_STYLE}")
        year, month, day, hour, minute, second, fraction, sign, *offset, era = match.groups()
        if zoned is (sign is None):
            raise ValueError(f"{_shown(raw)} is no {name}{_STYLE}")
        clamp = least if era else greatest
        shown = raw.decode()
        if era is not None or len(year) > 4:
            _civil_check(int(month), int(day))
            datetime.time(int(hour), int(minute), int(second))
            return _limited(policies.out_of_range, "out_of_range", shown, clamp, "datetime")
        value = datetime.datetime(
            int(year), int(month), int(day), int(hour), int(minute), int(second),
            _microseconds(fraction), zone,
        )  # fmt: skip
        if zoned:
            hours, minutes, seconds = (int(part or 0) for part in offset)
            shift = datetime.timedelta(hours=hours, minutes=minutes, seconds=seconds)
            try:
                return value + shift if sign == b"-" else value - shift
            except OverflowError:
                clamp = greatest if sign == b"-" else least
                return _limited(policies.out_of_range, "out_of_range", shown, clamp, "datetime")
        return value

    def form(raw: bytes) -> str:
        _expect_size(raw, 8, name)
        value = _int64(raw)[0]
        if value in (0x7FFFFFFFFFFFFFFF, -0x8000000000000000):
            return "infinity" if value > 0 else "-infinity"
        return timestamp_form(value, "+00" if zoned else "")

    def binary(raw: bytes) -> Any:
        try:
            return epoch + timedelta(0, 0, _int64(raw)[0])
        except struct.error:
            raise _wrong_size(raw, 8, name) from None
        except OverflowError:
            return text(form(raw).encode())

    return Codec(text if _FAST_ISO else slow, binary, form)


def timestamp_form(microseconds: int, zone: str = "") -> str:
    """`microseconds` since 2000-01-01 as the server prints a timestamp, in any year."""
    days, rest = divmod(microseconds, _DAY)
    year, month, day, era = _civil(days)
    return f"{year}-{month:02d}-{day:02d} {_clock(rest)}{zone}{era}"


def _microseconds(fraction: bytes | None) -> int:
    return int(fraction.ljust(6, b"0")) if fraction else 0


def _clock(microseconds: int) -> str:
    seconds, fraction = divmod(microseconds, 1_000_000)
    tail = f".{fraction:06d}".rstrip("0") if fraction else ""
    return f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}{tail}"


def _civil_check(month: int, day: int) -> None:
    """Refuse what is no month and day; in a year that Python cannot hold, 29 February passes."""
    datetime.date(2000, month, day)


def _civil(days: int) -> tuple[str, int, int, str]:
    """Year, month, day and era of the day `days` after 2000-01-01, in any year.

    Python's calendar ends at both sides of what PostgreSQL's holds, and the Gregorian one repeats
    itself every 400 years of 146,097 days.
    """
    cycles, rest = divmod(days, 146_097)
    date = datetime.date.fromordinal(_EPOCH_ORDINAL + rest)
    year = date.year + 400 * cycles
    era = ""
    if year <= 0:
        year, era = 1 - year, " BC"
    return f"{year:04d}", date.month, date.day, era


# --- text, json ----------------------------------------------------------------------------------


def _text(encoding: str) -> Codec:
    if encoding == "utf-8":
        # Without arguments bytes.decode takes a shorter way through the interpreter.
        return Codec(bytes.decode, bytes.decode, bytes.decode)

    def decode(raw: bytes) -> str:
        return raw.decode(encoding)

    return Codec(decode, decode, decode)


_XML_DECLARATION = re.compile(r'<\?xml version="([^"]*)" encoding="[^"]*"([^?]*)\?>')


def _xml(encoding: str) -> Codec:
    decode = _text(encoding).text

    def form(raw: bytes) -> str:
        """The text of a binary xml, before which xml_send writes the session's encoding."""
        text: str = decode(raw)
        match = _XML_DECLARATION.match(text)
        if match is None:
            return text
        version, more = match.groups()
        rest = text[match.end() :]
        return rest if version == "1.0" and not more else f'<?xml version="{version}"{more}?>{rest}'

    return Codec(decode, form, form)


def _json(policies: Policies, encoding: str, binary_prefix: bytes) -> Codec:
    decode = _text(encoding).text
    skipped = len(binary_prefix)
    parse: Callable[[str], Any] = json.loads if policies.json == "parse" else str

    def form(raw: bytes) -> str:
        if not raw.startswith(binary_prefix):
            raise ValueError(f"{_shown(raw[:1])} is no version of binary jsonb; expected 1")
        text: str = decode(raw[skipped:])
        return text

    if parse is str:
        return Codec(decode, form, form)
    return Codec(lambda raw: parse(decode(raw)), lambda raw: parse(form(raw)), form)


# --- the table -----------------------------------------------------------------------------------

_INT2 = _integer("int2", _int16, -0x8000, 0x7FFF)
_INT4 = _integer("int4", _int32, -0x80000000, 0x7FFFFFFF)
_INT8 = _integer("int8", _int64, -0x8000000000000000, 0x7FFFFFFFFFFFFFFF)
_UINT4 = _integer("an unsigned 32-bit integer", _uint32, 0, 0xFFFFFFFF)
_UINT8 = _integer("xid8", _uint64, 0, 0xFFFFFFFFFFFFFFFF)

CODECS: dict[str, Callable[[Policies, str], Codec]] = {
    "bool": lambda policies, encoding: Codec(
        _bool_text, _bool_binary, lambda raw: "t" if _bool_binary(raw) else "f"
    ),
    "int2": lambda policies, encoding: _INT2,
    "int4": lambda policies, encoding: _INT4,
    "int8": lambda policies, encoding: _INT8,
    "uint4": lambda policies, encoding: _UINT4,
    "uint8": lambda policies, encoding: _UINT8,
    "float4": lambda policies, encoding: Codec(_float4_text, _float4_binary, _float4_form),
    "float8": lambda policies, encoding: Codec(_float8_text, _float8_binary, _float8_form),
    "numeric": lambda policies, encoding: Codec(_numeric_text, _numeric_binary, _numeric_form),
    "bytea": lambda policies, encoding: Codec(
        _bytea_text, lambda raw: raw, lambda raw: "\\x" + raw.hex()
    ),
    "char": lambda policies, encoding: Codec(_char_text, _char_binary, _char_form),
    "uuid": lambda policies, encoding: Codec(
        _uuid_text, _uuid_binary, lambda raw: str(_uuid_binary(raw))
    ),
    "date": lambda policies, encoding: _date(policies),
    "time": lambda policies, encoding: _time(policies),
    "timestamp": lambda policies, encoding: _timestamp(policies, False),
    "timestamptz": lambda policies, encoding: _timestamp(policies, True),
    "text": lambda policies, encoding: _text(encoding),
    "xml": lambda policies, encoding: _xml(encoding),
    "json": lambda policies, encoding: _json(policies, encoding, b""),
    "jsonb": lambda policies, encoding: _json(policies, encoding, b"\x01"),
}
"""Codec → its functions for given policies and a Python encoding."""


def _wrong_size(raw: bytes, size: int, name: str) -> ValueError:
    return ValueError(f"a binary {name} has {size} bytes, found {len(raw)}")


def _expect_size(raw: bytes, size: int, name: str) -> None:
    if len(raw) != size:
        raise ValueError(f"a binary {name} has {size} bytes, found {len(raw)}")


def _shown(raw: bytes) -> str:
    return repr(raw if len(raw) <= 40 else raw[:40] + b"...")[1:]
