"""Decode bool, integers, floats, numeric, money, and the types whose values are OIDs."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable
from decimal import MAX_EMAX, MAX_PREC, MIN_EMIN, Context, Decimal, InvalidOperation

from .base import Codec, CodecOf, NoTextForm, expect_size, show_bytes, wrong_size

_int16 = struct.Struct(">h").unpack
_int32 = struct.Struct(">i").unpack
_int64 = struct.Struct(">q").unpack
_uint32 = struct.Struct(">I").unpack
_uint64 = struct.Struct(">Q").unpack
_float32 = struct.Struct(">f")
_float64 = struct.Struct(">d").unpack


def _integer(name: str, unpack: Callable[[bytes], tuple[int]], low: int, high: int) -> Codec:
    size = ((high - low + 1).bit_length() - 1) // 8

    digits = len(str(high)) - 1

    def text(raw: bytes) -> int:
        if len(raw) <= digits and raw.isdigit():
            return int(raw)
        if not (raw.isdigit() or (raw[:1] == b"-" and raw[1:].isdigit())) or len(raw) > 20:
            raise ValueError(f"{show_bytes(raw)} is no {name}")
        value = int(raw)
        if not low <= value <= high:
            raise ValueError(f"{show_bytes(raw)} does not fit into {name}")
        return value

    def binary(raw: bytes) -> int:
        try:
            return unpack(raw)[0]
        except struct.error:
            raise wrong_size(raw, size, name) from None

    return Codec(text, binary, lambda raw: str(binary(raw)))


def _bool_text(raw: bytes) -> bool:
    if raw == b"t":
        return True
    if raw == b"f":
        return False
    raise ValueError(f"{show_bytes(raw)} is no bool; expected t or f")


def _bool_binary(raw: bytes) -> bool:
    if raw == b"\x01":
        return True
    if raw == b"\x00":
        return False
    raise ValueError(f"{show_bytes(raw)} is no binary bool; expected one byte, 0 or 1")


_FLOAT_NAMES = {
    b"NaN": float("nan"),
    b"Infinity": float("inf"),
    b"-Infinity": float("-inf"),
}


# With a lower extra_float_digits the greatest floats are rounded up to more than the type holds.
_ROUNDED = "; the session's extra_float_digits must be 1"


def _float8_text(raw: bytes) -> float:
    if raw.strip(b"0123456789.-+e"):
        if raw in _FLOAT_NAMES:
            return _FLOAT_NAMES[raw]
        raise ValueError(f"{show_bytes(raw)} is no float8")
    try:
        value = float(raw)
    except ValueError:
        raise ValueError(f"{show_bytes(raw)} is no float8") from None
    if math.isinf(value):
        raise ValueError(f"{show_bytes(raw)} does not fit into float8{_ROUNDED}")
    return value


def _float4_text(raw: bytes) -> float:
    value = _float8_text(raw)
    try:
        # The nearest float32 is taken, so that text and binary format give the same value.
        rounded: float = _float32.unpack(_float32.pack(value))[0]
    except OverflowError:
        raise ValueError(f"{show_bytes(raw)} does not fit into float4{_ROUNDED}") from None
    return rounded


def _float4_binary(raw: bytes) -> float:
    expect_size(raw, 4, "float4")
    value: float = _float32.unpack(raw)[0]
    return value


def _float8_binary(raw: bytes) -> float:
    try:
        value: float = _float64(raw)[0]
        return value
    except struct.error:
        raise wrong_size(raw, 8, "float8") from None


def _shortest_between(value: float, before: float, after: float, surviving: int) -> tuple[str, int]:
    """The fewest digits that identify `value` among its neighbours, and the first digit's exponent.

    The server finds them by the algorithm Ryu: the decimal lies strictly between the midpoints of
    `value` and its two neighbours. Python's repr also accepts a midpoint if reading it rounds to
    `value`, so it prints 1e23 where the server prints 9.999999999999999e+22. The lower neighbour
    of a power of two is nearer than the upper one, so the decimal nearest to `value` may lie
    outside while the next one above it lies inside.

    `surviving` is how many digits always survive the conversion from text to a float and back, so
    that a shorter result has zeros at its end; 1 if there is no such number.
    """
    from fractions import Fraction  # imports slowly, and few values need it

    exact = Fraction(value)
    low = (exact + Fraction(before)) / 2
    # The greatest float has no finite neighbour above. One is assumed at the distance of the one
    # below.
    high = (exact + Fraction(after)) / 2 if after < math.inf else 2 * exact - low
    exponent = int(f"{value:.20e}".partition("e")[2])
    for last in range(exponent - surviving + 1, exponent - 20, -1):
        unit = Fraction(10) ** last
        below = exact // unit
        inside = [n for n in (below, below + 1) if low < n * unit < high]
        if inside:
            break
    digits = str(min(inside, key=lambda n: (abs(n * unit - exact), n % 2)))
    return digits.rstrip("0"), last + len(digits) - 1


def _float_layout(sign: str, digits: str, exponent: int, fixed_below: int) -> str:
    """A float's digits as the server prints them: in scientific notation from 10**`fixed_below`."""
    if not -4 <= exponent < fixed_below:
        point = "." if len(digits) > 1 else ""
        return f"{sign}{digits[0]}{point}{digits[1:]}e{exponent:+03d}"
    if exponent < 0:
        return f"{sign}0.{'0' * (-exponent - 1)}{digits}"
    whole, fraction = digits[: exponent + 1].ljust(exponent + 1, "0"), digits[exponent + 1 :]
    return f"{sign}{whole}.{fraction}" if fraction else sign + whole


_FLOAT_WORDS = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}


def _shortest_float8(size: float) -> tuple[str, int]:
    """The digits of a float from 1e15 to 1e41, and the exponent of the first digit."""
    mantissa, _, exponent_text = repr(size).partition("e")
    whole, _, fraction = mantissa.partition(".")
    digits = (whole + fraction).rstrip("0")
    exponent = int(exponent_text or 0) + len(whole) - 1
    if size < 1 << 53:
        return digits, exponent
    # From 2**53 to 1e41 all floats and the midpoints between them are integers. A midpoint can have
    # as few digits as its neighbours, so repr() can be a midpoint, which the server does not print.
    exact, step = int(size), int(math.ulp(size))
    off = 2 * (int(digits) * 10 ** (exponent - len(digits) + 1) - exact)
    if -(step // 2 if exact & (exact - 1) == 0 else step) < off < step:
        return digits, exponent
    return _shortest_between(size, math.nextafter(size, 0), math.nextafter(size, math.inf), 15)


def float8_text(value: float) -> str:
    """Return `value` as the server prints a float8 with extra_float_digits 1."""
    size = abs(value)
    if 1e15 <= size < 1e41:
        return _float_layout("-" if value < 0 else "", *_shortest_float8(size), 15)
    text = repr(value)
    if text[-2:] == ".0":
        return text[:-2]
    return _FLOAT_WORDS.get(text, text)


def float4_text(value: float) -> str:
    """Return `value`, a float32, as the server prints a float4 with extra_float_digits 1."""
    size = abs(value)
    if not size < math.inf or not size:
        return float8_text(value)
    packed = _float32.pack(size)
    bits = _uint32(packed)[0]
    # From 2**21 to 1e20 a midpoint of two float32 can have as few digits as they have.
    if bits & 0x7FFFFF and bits >> 23 and not 2097152 <= size < 1e20:
        # Six digits always survive the conversion to a float32 and back, so fewer need not be
        # tried: they show as zeros at the end of six.
        for digits in range(6, 10):
            shortest = float(f"{size:.{digits}g}")
            try:
                if _float32.pack(shortest) == packed:
                    break
            except OverflowError:
                continue
        text = repr(shortest)
        if 1e6 <= size < 1e16:
            text = f"{shortest:.{digits - 1}e}"
            mantissa, _, exponent_text = text.partition("e")
            text = mantissa.rstrip("0").rstrip(".") + "e" + exponent_text
        elif text[-2:] == ".0":
            text = text[:-2]
        return "-" + text if value < 0 else text
    before = _float32.unpack(struct.pack(">I", bits - 1))[0]
    after = _float32.unpack(struct.pack(">I", bits + 1))[0]
    shortest_digits = _shortest_between(size, before, after, 6 if bits >> 23 else 1)
    return _float_layout("-" if value < 0 else "", *shortest_digits, 6)


def _float8_form(raw: bytes) -> str:
    return float8_text(_float8_binary(raw))


def _float4_form(raw: bytes) -> str:
    return float4_text(_float4_binary(raw))


_NUMERIC_SPECIAL = {0xC000: "NaN", 0xD000: "Infinity", 0xF000: "-Infinity"}
_NUMERIC_NAMES = frozenset({b"NaN", b"Infinity", b"-Infinity"})
# A context that never rounds, and raises an error for text that is no number. Decimal() uses the
# thread's context instead, and returns NaN if the trap is switched off there.
_decimal = Context(
    prec=MAX_PREC, Emin=MIN_EMIN, Emax=MAX_EMAX, capitals=1, clamp=0, flags=[],
    traps=[InvalidOperation],
).create_decimal  # fmt: skip


def _numeric_text(raw: bytes) -> Decimal:
    if raw.strip(b"0123456789.-") and raw not in _NUMERIC_NAMES:
        raise ValueError(f"{show_bytes(raw)} is no numeric")
    try:
        return _decimal(raw.decode())
    except InvalidOperation:
        raise ValueError(f"{show_bytes(raw)} is no numeric") from None


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


def _money(encoding: str) -> Codec:
    """The type money: in text format a str in the form of lc_monetary, in binary format an int.

    The binary format has only the amount in the smallest unit of the currency. In text format a
    locale can put any letters and signs before, after and between the digits. So the only check is
    that there is a digit.
    """

    def text(raw: bytes) -> str:
        if not _DIGIT(raw):
            raise ValueError(f"{show_bytes(raw)} is no money")
        return raw.decode(encoding)

    def binary(raw: bytes) -> int:
        expect_size(raw, 8, "money")
        amount: int = _int64(raw)[0]
        return amount

    def form(raw: bytes) -> str:
        raise NoTextForm(
            f"the text of the money with {binary(raw)} of the smallest unit depends on the "
            "server's lc_monetary, which is not known"
        )

    return Codec(text, binary, form)


_DIGIT = re.compile(rb"\d").search


def _reg(encoding: str) -> Codec:
    """Types such as regclass: an OID, which text format shows as the name of its object."""

    def text(raw: bytes) -> str:
        if not raw:
            raise ValueError("an OID's name is empty")
        return raw.decode(encoding)

    def binary(raw: bytes) -> str:
        # As the server does for an OID that no object has, and accepts as input.
        return str(_UINT4.binary(raw))

    def form(raw: bytes) -> str:
        raise NoTextForm(f"the name of OID {binary(raw)} is known to its server alone")

    return Codec(text, binary, form)


_INT2 = _integer("int2", _int16, -0x8000, 0x7FFF)
_INT4 = _integer("int4", _int32, -0x80000000, 0x7FFFFFFF)
_INT8 = _integer("int8", _int64, -0x8000000000000000, 0x7FFFFFFFFFFFFFFF)
_UINT4 = _integer("an unsigned 32-bit integer", _uint32, 0, 0xFFFFFFFF)
_UINT8 = _integer("xid8", _uint64, 0, 0xFFFFFFFFFFFFFFFF)

CODECS: dict[str, CodecOf] = {
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
    "money": lambda policies, encoding: _money(encoding),
    "reg": lambda policies, encoding: _reg(encoding),
    "numeric": lambda policies, encoding: Codec(_numeric_text, _numeric_binary, _numeric_form),
}
