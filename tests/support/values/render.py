"""Prints Python values as a server prints them, by nothing but its catalogue.

This is the way back, written without the package's own ``text_form``: what comes out is compared
with the server's COPY, or handed to a server. The session's settings are DateStyle ISO, TimeZone
UTC, IntervalStyle postgres and bytea_output hex.
"""

from __future__ import annotations

import datetime
import decimal
import functools
import ipaddress
import math
import re
import socket
import struct
from collections.abc import Callable, Iterable
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pgoutput_fast as pf

if TYPE_CHECKING:
    from pgoutput_fast.types import ColumnType

__all__ = ["Renderer", "printed"]

FLOATS = {"float4", "float8"}
PRINTED_FLOATS = {"point", "lseg", "path", "box", "polygon", "line", "circle", "cube"}
"""Types whose values are the server's text, in which there are floats."""
DATES = {"date", "time", "timetz", "timestamp", "timestamptz", "interval"}
BEYOND_PYTHON = re.compile(r"infinity| BC\Z|(?<!:\d\d\.)(?<!\d)\d{5,}|\A24:00")
"""Dates and times that Python's types do not hold, in any DateStyle."""
_POSTGIS = {"geometry", "geography"}


class Renderer:
    """Renders values of the types in `rows`.

    Parameters
    ----------
    rows : iterable of dict
        ``oid``, ``name``, ``typtype``, ``typelem``, ``typcategory``, ``typdelim``, ``typbasetype``,
        ``range_subtype``, ``attributes`` (each: number, name, type's OID, modifier) and
        ``format_type``; of a multirange ``range_oid``, or its range is found by its name.
    extra_float_digits : int
        As in the session.
    """

    def __init__(self, rows: Iterable[dict[str, Any]], extra_float_digits: int = 1) -> None:
        self.types = {int(row["oid"]): row for row in rows}
        self.digits = extra_float_digits

    def name(self, oid: int) -> str:
        """The type as ``format_type`` shows it."""
        return str(self.types[oid]["format_type"])

    def base(self, oid: int) -> dict[str, Any]:
        """The type that a domain is over, down to the last one."""
        row = self.types[oid]
        while row["typtype"] == "d":
            row = self.types[int(row["typbasetype"])]
        return row

    def scalars(self, oid: int) -> set[str]:
        """Names of the types that values of this one are made of in the end."""
        row = self.base(oid)
        if row["typtype"] == "c":
            return set().union(*(self.scalars(int(part[2])) for part in row["attributes"] or []))
        if row["typtype"] == "r":
            return self.scalars(int(row["range_subtype"]))
        if row["typtype"] == "m":
            return self.scalars(self._range_of(row))
        if row["typcategory"] == "A" and row["typelem"]:
            return self.scalars(int(row["typelem"]))
        return {"enum" if row["typtype"] == "e" else str(row["name"])}

    def __call__(self, value: Any, oid: int) -> str:
        """The text of `value`, which is not NULL."""
        row = self.base(oid)
        kind, name = row["typtype"], row["name"]
        if kind == "c":
            return self._record(value, [int(part[2]) for part in row["attributes"] or []])
        if kind == "e":
            return _is(str, value)
        if kind == "r":
            return self._range(value, int(row["range_subtype"]))
        if kind == "m":
            subtype = self._range_of(row)
            return "{" + ",".join(self(part, subtype) for part in value) + "}"
        if name in ("int2vector", "oidvector"):
            return " ".join(str(_is(int, part)) for part in value)
        if row["typcategory"] == "A" and row["typelem"]:
            return self._array(value, int(row["typelem"]))
        if isinstance(value, str) and name in DATES:
            assert BEYOND_PYTHON.search(value), f"{value!r} is a str"
            return value  # by a policy
        if name in FLOATS:
            return self._float(value, name)
        return SCALARS.get(name, _text)(value)

    def _range_of(self, row: dict[str, Any]) -> int:
        name = row["name"].replace("multirange", "range", 1)
        for other in self.types.values():
            if other["typtype"] == "r" and (
                other["name"] == name or str(row.get("range_oid")) == str(other["oid"])
            ):
                return int(other["oid"])
        raise AssertionError(f"the range of {row['name']} is not in the catalogue")

    def _float(self, value: float, name: str) -> str:
        _is(float, value)
        if math.isnan(value):
            return "NaN"
        if math.isinf(value):
            return "Infinity" if value > 0 else "-Infinity"
        if self.digits > 0:
            return shortest(value, name == "float4")
        # %g of C, as before version 12
        return f"{value:.{max(1, (6 if name == 'float4' else 15) + self.digits)}g}"

    def _record(self, value: Any, types: list[int]) -> str:
        assert isinstance(value, tuple), value
        assert len(value) == len(types), value
        words = []
        for part, oid in zip(value, types, strict=True):
            if part is None:
                words.append("")
                continue
            text = self(part, oid)
            if not text or re.search(r'[\s"\\(),]', text, re.ASCII):
                text = '"' + text.replace("\\", "\\\\").replace('"', '""') + '"'
            words.append(text)
        return f"({','.join(words)})"

    def _range(self, value: Any, subtype: int) -> str:
        assert isinstance(value, pf.Range), value
        if value.empty:
            return "empty"
        ends = []
        for end in (value.lower, value.upper):
            text = "" if end is None else self(end, subtype)
            if end is not None and (not text or re.search(r'[\s"\\()\[\],]', text, re.ASCII)):
                text = '"' + text.replace("\\", "\\\\").replace('"', '""') + '"'
            ends.append(text)
        return (
            ("[" if value.lower_inc else "(") + ",".join(ends) + ("]" if value.upper_inc else ")")
        )

    def _array(self, value: Any, element: int) -> str:
        assert isinstance(value, list), value
        if not value:
            return "{}"
        base = self.base(element)
        # Elements can be lists themselves: vectors, multiranges, domains over arrays.
        lists = base["typtype"] == "m" or base["name"] in LISTS
        if isinstance(value, pf.Array):
            dimensions = len(value.lower_bounds)
        elif base["typcategory"] == "A" and base["name"] not in LISTS:
            # Arrays within arrays: only one number of dimensions makes all of them rectangular.
            for dimensions in range(1, 7):
                try:
                    return self._braces(value, element, dimensions)
                except AssertionError:
                    continue
            raise AssertionError("no array of arrays")
        else:
            # No list that is an element has NULLs in it.
            dimensions = level_of_null(value) or max(depth(value) - lists, 1)
        shown = self._braces(value, element, dimensions)
        if not isinstance(value, pf.Array):
            return shown
        bounds = []
        inner: Any = value
        for lower in value.lower_bounds:
            bounds.append(f"[{lower}:{lower + len(inner) - 1}]")
            inner = inner[0]
        return "".join(bounds) + "=" + shown

    def _braces(self, value: Any, element: int, dimensions: int) -> str:
        delimiter = self.base(element)["typdelim"]

        def show(part: Any, level: int) -> str:
            if level:
                assert isinstance(part, list), part
                assert part, "an empty dimension"
                assert level == 1 or len({len(inner or ()) for inner in part}) == 1
                return "{" + delimiter.join(show(inner, level - 1) for inner in part) + "}"
            if part is None:
                return "NULL"
            text = self(part, element)
            special = re.search(rf'[ \t\n\r\v\f"\\{{}}{delimiter}]', text)
            if special or not text or text.upper() == "NULL":
                text = '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
            return text

        return show(value, dimensions)


LISTS = {"vector", "halfvec", "int2vector", "oidvector"}


def depth(value: Any) -> int:
    """How many lists are in one another."""
    return 1 + max(map(depth, value), default=0) if isinstance(value, list) else 0


def level_of_null(value: Any) -> int:
    """How many lists a None is in, 0 if there is none."""
    if None in value:
        return 1
    levels = [level_of_null(part) for part in value if isinstance(part, list)]
    return 1 + max(levels) if any(levels) else 0


def _is(kind: type, value: Any) -> Any:
    assert type(value) is kind, f"{value!r} is a {type(value).__name__}, expected {kind.__name__}"
    return value


def _text(value: Any) -> str:
    return str(_is(str, value))


def shortest(value: float, single: bool) -> str:
    """The fewest digits that lie between the midpoints to both neighbours, the nearest of those."""
    sign = "-" if math.copysign(1.0, value) < 0 else ""
    size = abs(value)
    if size == 0:
        return sign + "0"
    form, integer = (">f", ">I") if single else (">d", ">Q")
    (bits,) = struct.unpack(integer, struct.pack(form, size))

    def beside(step: int) -> Decimal | None:
        (other,) = struct.unpack(form, struct.pack(integer, bits + step))
        return None if math.isinf(other) else Decimal(other)

    with decimal.localcontext(decimal.Context(prec=1200)):
        exact = Decimal(size)
        before = beside(-1) or Decimal(0)
        after = beside(1) or 2 * exact - before
        low, high = (exact + before) / 2, (exact + after) / 2
        exponent = exact.adjusted()
        for digits in range(1, 19):
            unit = Decimal(1).scaleb(exponent - digits + 1)
            below = (exact / unit).to_integral_value(decimal.ROUND_FLOOR)
            inside = [n for n in (below, below + 1) if low < n * unit < high]
            if inside:
                best = min(inside, key=lambda n: (abs(n * unit - exact), n % 2)) * unit
                break
        figures = "".join(map(str, best.as_tuple().digits)).rstrip("0") or "0"
        exponent = best.adjusted()
    if not -4 <= exponent < (6 if single else 15):
        fraction = "." + figures[1:] if figures[1:] else ""
        return f"{sign}{figures[0]}{fraction}e{'-' if exponent < 0 else '+'}{abs(exponent):02d}"
    return sign + f"{Decimal(figures).scaleb(exponent - len(figures) + 1):f}"


def _number(value: Any) -> str:
    _is(Decimal, value)
    if value.is_nan():
        return "NaN"
    if value.is_infinite():
        return "-Infinity" if value < 0 else "Infinity"
    return f"{value:f}"


def _bool(value: Any) -> str:
    return "t" if _is(bool, value) else "f"


def _integer(value: Any) -> str:
    return str(_is(int, value))


def _char(value: Any) -> str:
    (byte,) = _is(bytes, value)
    return "" if byte == 0 else f"\\{byte:03o}" if byte > 127 else chr(byte)


def _clock(value: datetime.time | datetime.datetime) -> str:
    fraction = f".{value.microsecond:06d}".rstrip("0") if value.microsecond else ""
    return f"{value.hour:02d}:{value.minute:02d}:{value.second:02d}{fraction}"


def _day(value: datetime.date) -> str:
    return f"{value.year:04d}-{value.month:02d}-{value.day:02d}"


def _date(value: Any) -> str:
    return _day(_is(datetime.date, value))


def _time(value: Any) -> str:
    assert _is(datetime.time, value).tzinfo is None
    return _clock(value)


def _timestamp(value: Any) -> str:
    assert _is(datetime.datetime, value).tzinfo is None
    return f"{_day(value)} {_clock(value)}"


def _timestamptz(value: Any) -> str:
    assert _is(datetime.datetime, value).tzinfo is datetime.timezone.utc
    return f"{_day(value)} {_clock(value)}+00"


def _timetz(value: Any) -> str:
    offset = int(_is(datetime.time, value).utcoffset().total_seconds())
    hours, rest = divmod(abs(offset), 3600)
    minutes, seconds = divmod(rest, 60)
    zone = f"{'-' if offset < 0 else '+'}{hours:02d}"
    if minutes or seconds:
        zone += f":{minutes:02d}"
    return _clock(value) + zone + (f":{seconds:02d}" if seconds else "")


def _interval(value: Any) -> str:
    """IntervalStyle postgres: a part after a negative one has its sign, a plus too."""
    _is(pf.Interval, value)
    parts = []
    negative = False
    years = int(value.months / 12)
    for number, unit in ((years, "year"), (value.months - 12 * years, "mon"), (value.days, "day")):
        if number:
            parts.append(f"{'+' if negative and number > 0 else ''}{number} {unit}")
            parts[-1] += "" if number == 1 else "s"
            negative = number < 0
    if value.microseconds or not parts:
        seconds, fraction = divmod(abs(value.microseconds), 10**6)
        sign = "-" if value.microseconds < 0 else "+" if negative else ""
        clock = f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
        parts.append(sign + clock + (f".{fraction:06d}".rstrip("0") if fraction else ""))
    return " ".join(parts)


def _bytea(value: Any) -> str:
    return "\\x" + _is(bytes, value).hex()


def _money(value: Any) -> str:
    """From text as it is; from binary the amount in cents, as lc_monetary C prints it."""
    if isinstance(value, str):
        return value
    whole, cents = divmod(abs(_is(int, value)), 100)
    return f"{'-' if value < 0 else ''}${whole:,}.{cents:02d}"


def _address(value: Any) -> str:
    """By the C library, which has an IPv4 address inside an IPv6 one where the server has it."""
    family = socket.AF_INET if value.version == 4 else socket.AF_INET6
    return socket.inet_ntop(family, value.packed)


def _inet(value: Any) -> str:
    if isinstance(value, (ipaddress.IPv4Interface, ipaddress.IPv6Interface)):
        return f"{_address(value.ip)}/{value.network.prefixlen}"
    return _address(value)


def _cidr(value: Any) -> str:
    return f"{_address(value.network_address)}/{value.prefixlen}"


def _hstore(value: Any) -> str:
    def word(text: str | None) -> str:
        if text is None:
            return "NULL"
        return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'

    return ", ".join(f"{word(key)}=>{word(part)}" for key, part in _is(dict, value).items())


def _uuid(value: Any) -> str:
    assert type(value).__name__ == "UUID"
    return str(value)


def _dense(value: Any) -> str:
    return "[" + ",".join(shortest(part, True) for part in value) + "]"


def _sparse(value: Any) -> str:
    pairs = zip(value.indices, value.values, strict=True)
    return "{" + ",".join(f"{i + 1}:{shortest(v, True)}" for i, v in pairs) + f"}}/{value.dim}"


def _ewkb(value: Any) -> str:
    return str(_is(bytes, value).hex()).upper()


SCALARS: dict[str, Callable[[Any], str]] = {
    "bool": _bool,
    **dict.fromkeys(("int2", "int4", "int8", "oid", "xid", "cid", "xid8"), _integer),
    "numeric": _number,
    "char": _char,
    "bytea": _bytea,
    "date": _date,
    "time": _time,
    "timetz": _timetz,
    "timestamp": _timestamp,
    "timestamptz": _timestamptz,
    "interval": _interval,
    "uuid": _uuid,
    "money": _money,
    "inet": _inet,
    "cidr": _cidr,
    "hstore": _hstore,
    "vector": _dense,
    "halfvec": _dense,
    "sparsevec": _sparse,
    **dict.fromkeys(_POSTGIS, _ewkb),
}
"""Name of a type → how a value of it is printed. Values of all others are str: the text itself."""


def printed(value: Any, type_: ColumnType) -> str:
    """The text of `value`, which is not NULL, of a type that is told as a column's."""
    return _renderer(type_)(value)


@functools.cache
def _renderer(type_: ColumnType) -> Callable[[Any], str]:
    """With a catalogue of the type and its parts, whose OIDs are their numbers in it."""
    rows: list[dict[str, Any]] = []
    kinds = {"range": "r", "multirange": "m", "composite": "c", "enum": "e"}

    def add(one: ColumnType) -> int:
        inner = 0
        if one.element is not None:
            inner = add(one.element)
            rows[inner - 1]["typdelim"] = one.delimiter
        fields = [(at, name, add(field), -1) for at, (name, field) in enumerate(one.fields)]
        rows.append(
            {
                "oid": len(rows) + 1, "name": one.name, "format_type": one.name,
                "typtype": kinds.get(one.kind, "b"), "typdelim": one.delimiter,
                "typcategory": "A" if one.kind == "array" else "U", "typelem": inner,
                "range_subtype": inner, "range_oid": inner, "attributes": fields,
            }
        )  # fmt: skip
        return len(rows)

    oid = add(type_)
    renderer = Renderer(rows)
    return lambda value: renderer(value, oid)
