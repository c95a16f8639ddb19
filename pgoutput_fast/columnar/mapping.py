"""Map PostgreSQL's types to columns of Arrow's types, under a user's policies.

No other module decides which column a type gets, for any target. The functions of a field first
convert the bytes of a value to a Python object, by :mod:`pgoutput_fast.values`, and then that
object to the bytes that the column stores.
"""

from __future__ import annotations

import datetime
import operator
import struct
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from decimal import Decimal
from typing import Any, NamedTuple

from ..names import shown_name
from ..objects import Interval
from ..policies import Policies
from ..settings import Settings
from ..types import ColumnType, decimal_shape
from ..values import (
    EPOCH_UTC,
    NO_ASCII,
    Codec,
    NoTextForm,
    OutOfRange,
    codec_of,
    timestamp_form,
)
from ..values.base import limited
from ..values.temporal import EPOCH, interval_form, interval_iso
from .fields import CONVERTERS, EXTENSION_NAME, SYNTAXES, Field, Store
from .packed import (
    Labels,
    dimensions_of,
    pack_floats,
    pack_map,
    pack_sparse,
    packing,
    then,
)
from .registered import registered_field

_ORDER: Any = sys.byteorder

_JSON = {EXTENSION_NAME: b"arrow.json", b"ARROW:extension:metadata": b""}
_UUID = {EXTENSION_NAME: b"arrow.uuid", b"ARROW:extension:metadata": b""}
_WKB = {EXTENSION_NAME: b"geoarrow.wkb", b"ARROW:extension:metadata": b"{}"}

Special = Callable[[ColumnType, "Settings"], "Field | None"]
"""Makes the field of a type that is stored in an unusual way; returns None for all other types."""


def field_of(
    type: ColumnType,
    settings: Settings,
    target: str,
    labels: dict[int, Labels] | None = None,
    special: Special | None = None,
) -> Field:
    """Make the field of the column for values of a type. Its name is empty.

    Parameters
    ----------
    type, settings, target
    labels : dict of int to Labels, optional
        The labels of enums by OID, which all columns of a relation share.
    special : callable, optional
        A :data:`Special` that is called for the type and for each part of it.

    Raises
    ------
    PgOutputError
        A type was registered with an Arrow type that columns can't have.
    """
    return _Maker(settings, target, {} if labels is None else labels, special).field(
        without_functions(type)
    )


def without_functions(type: ColumnType) -> ColumnType:
    """Return the type without functions that were registered without an Arrow type."""
    registered = type.registered
    if registered is not None and registered.arrow is None:
        registered = None
    return type._replace(
        registered=registered,
        element=None if type.element is None else without_functions(type.element),
        fields=tuple([(name, without_functions(field)) for name, field in type.fields]),
    )


class _Maker(NamedTuple):
    """Makes the field of a column and, recursively, the fields of its parts."""

    settings: Settings
    target: str
    labels: dict[int, Labels]
    special: Special | None

    def field(self, type: ColumnType) -> Field:
        settings = self.settings
        found = None if self.special is None else self.special(type, settings)
        if found is not None:
            return found
        if type.registered is not None:
            return registered_field(type, codec_of(type, settings), type.registered.arrow)
        if type.kind == "base" and type.entry is not None:
            make = _FIELDS.get(type.entry.codec)
            if make is not None and not _as_text(type, settings.policies):
                return make(type, codec_of(type, settings), settings, self.target)
            if type.entry.codec != "other":
                return _server_text(type, codec_of(type, settings), settings)
        elif type.kind == "enum":
            return self.enum(type)
        elif type.kind == "array" and settings.policies.arrays == "text":
            if has_text(type):
                return _server_text(type, codec_of(type, settings), settings)
        elif type.element is not None or type.kind == "composite":
            return self.made_of_parts(type)
        return _unknown(settings)

    def enum(self, type: ColumnType) -> Field:
        codec = codec_of(type, self.settings)
        if self.target == "spark":
            return _plain_text(self.settings)
        labels = self.labels.get(type.oid)
        if labels is None:
            # A label that is no text can be in the catalogue, but no value of it can be decoded.
            names = [shown_name(label).encode() for label in type.labels]
            labels = self.labels[type.oid] = Labels(names)
        number = labels.store
        code = "label" if self.settings.encoding == "utf-8" else "slow"
        made = _stored(codec, lambda label: number(label.encode()), "i", 4, code, code)
        return replace(made, labels=labels)

    def made_of_parts(self, type: ColumnType) -> Field:
        if type.kind == "composite":
            children = [(shown_name(name), self.part(part)) for name, part in type.fields]
            parts = [field for _, field in children]
            kind = "+s"
        else:
            parts = [self.part(_element_of(type))]
            children = [("item", parts[0])]
            kind = "+l"
            if type.kind == "range":
                kind = "+s"
                flag = Field("", "b", width=0)
                children = [("lower", parts[0]), ("upper", parts[0])]
                children += [(name, flag) for name in ("lower_inc", "upper_inc", "empty")]
        functions = [Codec(*_functions_of(field), _no_form) for field in parts]
        text, binary = packing(type, functions, self.settings.policies)
        encoding = self.settings.encoding
        if encoding in NO_ASCII:
            # The functions of nested types look for quotes and braces among the bytes, where in
            # these encodings they can be parts of other characters. So they are given UTF-8.
            in_utf8 = self._replace(settings=replace(self.settings, encoding="utf-8"))
            inner, _ = _functions_of(in_utf8.made_of_parts(type))

            def text(raw: bytes) -> bytes | None:
                return inner(raw.decode(encoding).encode())

        made = _nested(kind, children, text, binary)
        if type.kind == "array":
            dimensions = dimensions_of(self.settings.policies)
            if dimensions > 1:
                for _ in range(dimensions - 1):
                    made = replace(made, children=(replace(made, name="item"),))
                return made
        # The kind "vector" stands for int2vector and oidvector here, the syntax "vector" for the
        # vectors of pgvector, which have another form.
        if type.kind in SYNTAXES and type.kind != "vector" and encoding == "utf-8":
            made = _compiled(made, type.kind)
        return replace(made, delimiter=type.delimiter)

    def part(self, type: ColumnType) -> Field:
        return replace(self.field(type), type_id=type.oid)


def _element_of(type: ColumnType) -> ColumnType:
    if type.element is None:
        raise TypeError(f"{type.kind} without an element")
    return type.element


def _functions_of(field: Field) -> tuple[Store, Store]:
    if field.text is None or field.binary is None:
        raise TypeError(f"a field {field.format} without functions")
    return field.text, field.binary


def _no_form(raw: bytes) -> str:
    raise NoTextForm("what a column stores has no text of the server's")


def _nested(
    format: str,
    children: Iterable[tuple[str, Field]],
    text: Store | None = None,
    binary: Store | None = None,
) -> Field:
    named = tuple([replace(field, name=name) for name, field in children])
    by_format = any(field.by_format for field in named)
    return Field("", format, {}, named, text=text, binary=binary, by_format=by_format)


def text_field(type: ColumnType, settings: Settings) -> Field:
    """Return the field, without a name, of a column for the server's text of any type."""
    codec = codec_of(type, settings)
    natural = field_of(type, settings, "spark")
    binary_code = 0
    if natural.format == "u" and not natural.by_format:
        binary_code = natural.binary_code

    return Field(
        "", "u", text=_transcoded(settings), binary=lambda raw: _binary_text(codec, raw),
        text_code=_text_code(settings), binary_code=binary_code,
    )  # fmt: skip


def _binary_text(codec: Codec, raw: bytes) -> bytes:
    """The server's text of a binary value, or digits if only the server knows the text.

    That is so for money and for types such as regclass, whose text is the name of an object.
    """
    try:
        form: str = codec.text_form(raw)
    except NoTextForm:
        value = codec.binary(raw)
        if not isinstance(value, (int, str)):
            raise
        form = str(value)
    return form.encode()


def has_text(type: ColumnType) -> bool:
    """Return whether the server's text is known for all binary values of a type and its parts."""
    if type.registered is not None or type.kind == "unknown":
        return False
    if type.entry is not None and type.entry.codec in (*_DIGITS, "other"):
        return False
    return all(map(has_text, _parts(type)))


def is_digits(type: ColumnType) -> bool:
    """Return whether values, or parts of them, are text in text format, and digits in binary.

    Their column has the same type from both.
    """
    if type.entry is not None and type.entry.codec in _DIGITS:
        return True
    return type.registered is None and any(map(is_digits, _parts(type)))


_DIGITS = ("money", "reg")
"""Codecs of types whose text only the server knows: of binary values columns have digits."""


def _parts(type: ColumnType) -> list[ColumnType]:
    """The types of the values in a value."""
    element = [] if type.element is None else [type.element]
    return [*(field for _, field in type.fields), *element]


def _as_text(type: ColumnType, policies: Policies) -> bool:
    """Whether a policy asks for the text of some values, so that the whole column is text."""
    return type.entry is not None and any(
        getattr(policies, name) == "text"
        for name in type.entry.policies
        if name in ("infinity", "out_of_range", "special_values")
    )


def _transcoded(settings: Settings) -> Callable[[bytes], bytes]:
    encoding = settings.encoding

    def transcoded(raw: bytes) -> bytes:
        return raw.decode(encoding).encode()

    return transcoded


def _text_code(settings: Settings) -> int:
    """The converter of text: ASCII bytes can be copied if they mean ASCII in the encoding too."""
    if settings.encoding == "utf-8":
        return CONVERTERS["utf8"]
    ascii_ = bytes(range(128))
    try:
        same = ascii_.decode(settings.encoding) == ascii_.decode("ascii")
    except UnicodeDecodeError:
        same = False
    # In some of these encodings an ASCII byte may be the second half of a character. But the
    # converter copies only values that consist of ASCII bytes, where no byte is a first half.
    return CONVERTERS["ascii"] if same else CONVERTERS["slow"]


def _plain_text(settings: Settings) -> Field:
    """A column of text, for types whose values are the text itself in both formats."""
    code = _text_code(settings)
    transcoded = _transcoded(settings)
    return Field("", "u", text=transcoded, binary=transcoded, text_code=code, binary_code=code)


def _unknown(settings: Settings) -> Field:
    return Field(
        "",
        "u",
        text=_transcoded(settings),
        binary=bytes,
        text_code=_text_code(settings),
        binary_code=CONVERTERS["bytes"],
        by_format=True,
    )


def _server_text(type: ColumnType, codec: Codec, settings: Settings) -> Field:
    """A column of the server's text, for types whose values in binary format are no text."""
    clamped = _CLAMPED.get(type.entry.codec) if type.entry is not None else None

    def text(raw: bytes) -> bytes | None:
        value = codec.text(raw)
        if value is None:
            return None
        if clamped is not None:
            return (value if isinstance(value, str) else clamped(value)).encode()
        return raw.decode(settings.encoding).encode()

    def binary(raw: bytes) -> bytes | None:
        value = codec.binary(raw)
        if value is None:
            return None
        if clamped is not None:
            return (value if isinstance(value, str) else clamped(value)).encode()
        return _binary_text(codec, raw)

    return Field("", "u", text=text, binary=binary)


def _timetz(type: ColumnType, codec: Codec, settings: Settings, target: str) -> Field:
    # Text can hold 24:00 too, which Python's time cannot: the policy does not apply.
    policies = replace(settings.policies, out_of_range="text")
    as_text = replace(settings, policies=policies)
    return _server_text(type, codec_of(type, as_text), as_text)


def _timestamp_text(value: datetime.datetime) -> str:
    if value.tzinfo is None:
        return timestamp_form((value - EPOCH) // _MICROSECOND)
    return timestamp_form((value - EPOCH_UTC) // _MICROSECOND, "+00")


_MICROSECOND = datetime.timedelta(microseconds=1)

_CLAMPED: dict[str, Callable[[Any], str]] = {
    "date": datetime.date.isoformat,
    "time": lambda value: value.isoformat().rstrip("0") if value.microsecond else str(value),
    "timestamp": _timestamp_text,
    "timestamptz": _timestamp_text,
    "interval": interval_form,
    "numeric": lambda value: format(value, "f"),
}
"""Codec → a function that gives the server's text of a value that a policy may have clamped."""


def _stored(
    codec: Codec, store: Callable[[Any], bytes | None], format: str, width: int, code: str = "slow",
    binary_code: str = "slow", metadata: Mapping[bytes, bytes] | None = None,
) -> Field:  # fmt: skip
    """A column that stores the bytes that `store` makes of Python objects, None for null."""
    from_text, from_binary = codec.text, codec.binary

    def text(raw: bytes) -> bytes | None:
        value = from_text(raw)
        return None if value is None else store(value)

    def binary(raw: bytes) -> bytes | None:
        value = from_binary(raw)
        return None if value is None else store(value)

    return Field(
        "",
        format,
        metadata or {},
        width=width,
        text=text,
        binary=binary,
        text_code=CONVERTERS[code],
        binary_code=CONVERTERS[binary_code],
    )


def _fixed(format: str, letter: str, code: str, binary_code: str) -> Any:
    packed = struct.Struct(f"={letter}")

    def make(type: ColumnType, codec: Codec, settings: Settings, target: str) -> Field:
        return _stored(codec, packed.pack, format, packed.size, code, binary_code)

    return make


def _float4(type: ColumnType, codec: Codec, settings: Settings, target: str) -> Field:
    def binary(raw: bytes) -> bytes:
        codec.binary(raw)  # checks the size
        # A Python float is a double: through it, a signalling NaN would become a quiet one.
        return int.from_bytes(raw, "big").to_bytes(4, _ORDER)

    field = _stored(codec, struct.Struct("=f").pack, "f", 4, "float4_text", "same4")
    return replace(field, binary=binary)


def _bool(type: ColumnType, codec: Codec, settings: Settings, target: str) -> Field:
    return _stored(
        codec, lambda value: b"\1" if value else b"\0", "b", 0, "bool_text", "bool_binary"
    )


def _uint4(type: ColumnType, codec: Codec, settings: Settings, target: str) -> Field:
    if target == "spark":
        return _stored(codec, _int64, "l", 8, "uint4_wide_text", "uint4_wide")
    return _stored(codec, struct.Struct("=I").pack, "I", 4, "uint4_text", "same4")


def _uint8(type: ColumnType, codec: Codec, settings: Settings, target: str) -> Field:
    if target == "spark":
        return _stored(codec, lambda value: value.to_bytes(16, _ORDER), "d:20,0", 16)
    return _stored(codec, struct.Struct("=Q").pack, "L", 8, "slow", "same8")


_int64 = struct.Struct("=q").pack


def _numeric(type: ColumnType, codec: Codec, settings: Settings, target: str) -> Field:
    shape = decimal_shape(type.modifier)
    if type.modifier < 4:
        shape = settings.policies.numeric
    most = 76 if target == "arrow" else 38
    if shape is None or shape[0] > most:

        def text(raw: bytes) -> bytes:
            codec.text(raw)
            return raw

        def binary(raw: bytes) -> bytes:
            return bytes(codec.text_form(raw), "ascii")

        return Field(
            "",
            "u",
            text=text,
            binary=binary,
            text_code=CONVERTERS["numeric_text"],
            binary_code=CONVERTERS["numeric_binary"],
        )
    precision, scale = shape
    width = 16 if precision <= 38 else 32
    limit = 10**precision
    choice = settings.policies.special_values
    separator = "," if target == "spark" else ", "
    name = f"decimal({precision}{separator}{scale})"
    by_policy = "" if type.modifier >= 4 else "; the policy numeric sets precision and scale"
    wider = None if type.modifier >= 4 else ("numeric", None)

    def store(value: Decimal) -> bytes | None:
        if not value.is_finite():
            if choice in ("error", "clamp") and value.is_nan():
                raise OutOfRange(
                    f"NaN does not fit into {name}, nor is it near to any value of it; the policy "
                    "special_values can be 'null' or 'text'",
                    ("special_values", "null"),
                )
            clamped = 1 - limit if value.is_signed() else limit - 1
            kept = limited(choice, "special_values", _numeric_word(value), clamped, name)
            return None if kept is None else kept.to_bytes(width, _ORDER, signed=True)
        sign, digits, _ = value.as_tuple()
        exponent = int(value.as_tuple().exponent)
        # A numeric has up to 131,072 digits before the point: refuse a number that is too long
        # before it is made into an integer.
        if len(digits) + exponent > precision - scale and any(digits):
            raise OutOfRange(f"{_abridged(value)} does not fit into {name}{by_policy}", wider)
        unscaled, rest = int("".join(map(str, digits)) or 0) if any(digits) else 0, 0
        if unscaled:
            shift = exponent + scale
            if shift >= 0:
                unscaled *= 10**shift
            else:
                unscaled, rest = divmod(unscaled, 10**-shift)
        if rest or unscaled >= limit:
            raise OutOfRange(f"{_abridged(value)} does not fit into {name}{by_policy}", wider)
        return (-unscaled if sign else unscaled).to_bytes(width, _ORDER, signed=True)

    bits = ",256" if width == 32 else ""
    made = _stored(
        codec, store, f"d:{precision},{scale}{bits}", width, "decimal_text", "decimal_binary"
    )
    return replace(made, precision=precision, scale=scale)


def _numeric_word(value: Decimal) -> str:
    return "NaN" if value.is_nan() else "-Infinity" if value.is_signed() else "Infinity"


def _abridged(value: Decimal) -> str:
    shown = f"{value:f}" if value.adjusted() < 100 and len(value.as_tuple().digits) < 100 else ""
    return shown if 0 < len(shown) <= 100 else "a number of many digits"


def _date(type: ColumnType, codec: Codec, settings: Settings, target: str) -> Field:
    packed = struct.Struct("=i").pack
    epoch = datetime.date(1970, 1, 1).toordinal()
    return _stored(
        codec, lambda value: packed(value.toordinal() - epoch), "tdD", 4, "date_text", "date_binary"
    )


def _time(type: ColumnType, codec: Codec, settings: Settings, target: str) -> Field:
    scale = 1000 if target == "spark" else 1

    def store(value: datetime.time) -> bytes:
        seconds = (value.hour * 60 + value.minute) * 60 + value.second
        return _int64((seconds * 1_000_000 + value.microsecond) * scale)

    if target == "spark":
        return _stored(codec, store, "ttn", 8, "time_ns_text", "time_ns_binary")
    return _stored(codec, store, "ttu", 8, "time_text", "time_binary")


def _timestamp(type: ColumnType, codec: Codec, settings: Settings, target: str) -> Field:
    epoch = datetime.datetime(1970, 1, 1)
    return _stored(
        codec, lambda value: _int64((value - epoch) // _MICROSECOND), "tsu:", 8,
        "timestamp_text", "timestamp_binary",
    )  # fmt: skip


def _timestamptz(type: ColumnType, codec: Codec, settings: Settings, target: str) -> Field:
    epoch = datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)
    return _stored(
        codec, lambda value: _int64((value - epoch) // _MICROSECOND), "tsu:UTC", 8,
        "timestamptz_text", "timestamp_binary",
    )  # fmt: skip


def _interval(type: ColumnType, codec: Codec, settings: Settings, target: str) -> Field:
    if target != "arrow":
        return _stored(codec, lambda value: interval_iso(value).encode(), "u", -1)
    choice = settings.policies.out_of_range
    packed = struct.Struct("=iiq").pack

    def store(value: Interval) -> bytes | None:
        nanoseconds = value.microseconds * 1000
        if not _LEAST_INT64 <= nanoseconds <= _GREATEST_INT64:
            nearest = _LEAST_INT64 if nanoseconds < 0 else _GREATEST_INT64
            if value.months not in (0x7FFFFFFF, -0x80000000) or settings.policies.infinity != (
                "clamp"
            ):
                shown = interval_form(value)
                name = "an interval of nanoseconds"
                if limited(choice, "out_of_range", shown, nearest, name) is None:
                    return None
            nanoseconds = nearest
        return packed(value.months, value.days, nanoseconds)

    return _stored(codec, store, "tin", 16, "slow", "interval_binary")


_LEAST_INT64, _GREATEST_INT64 = -0x8000000000000000, 0x7FFFFFFFFFFFFFFF


def _uuid(type: ColumnType, codec: Codec, settings: Settings, target: str) -> Field:
    if target in ("arrow", "duckdb"):
        return _stored(
            codec,
            operator.attrgetter("bytes"),
            "w:16",
            16,
            "uuid_text",
            "uuid_binary",
            _UUID,
        )
    return _stored(
        codec, lambda value: str(value).encode(), "u", -1, "uuid_utf8_text", "uuid_utf8_binary"
    )


def _json(type: ColumnType, codec: Codec, settings: Settings, target: str) -> Field:
    transcoded = _transcoded(settings)

    def binary(raw: bytes) -> bytes:
        form: str = codec.text_form(raw)
        return form.encode()

    code = _text_code(settings)
    binary_code = code
    is_jsonb = type.entry is not None and type.entry.codec == "jsonb"
    # DuckDB's JSON refuses some values of json, and takes all of jsonb.
    has_type = target == "arrow" or (target == "duckdb" and is_jsonb)
    if is_jsonb:
        utf8 = settings.encoding == "utf-8"
        binary_code = CONVERTERS["jsonb_binary"] if utf8 else CONVERTERS["slow"]
    return Field(
        "", "u", _JSON if has_type else {}, text=transcoded, binary=binary,
        text_code=code, binary_code=binary_code,
    )  # fmt: skip


def _text(type: ColumnType, codec: Codec, settings: Settings, target: str) -> Field:
    if settings.text_is_bytes:
        return _stored(codec, bytes, "z", -1, "bytes", "bytes")
    return _plain_text(settings)


def _char(type: ColumnType, codec: Codec, settings: Settings, target: str) -> Field:
    def store(value: bytes) -> bytes:
        form: str = codec.text_form(value)
        return form.encode()

    return _stored(codec, store, "u", -1, "char_text", "char_binary")


def _bytea(type: ColumnType, codec: Codec, settings: Settings, target: str) -> Field:
    return _stored(codec, bytes, "z", -1, "bytea_text", "bytes")


def _ewkb(type: ColumnType, codec: Codec, settings: Settings, target: str) -> Field:
    return _stored(codec, bytes, "z", -1, metadata=_WKB if target == "arrow" else {})


def _compiled(field: Field, syntax: str) -> Field:
    """The field with compiled converters for the formats in which all its parts have them."""
    slow = CONVERTERS["slow"]
    parts = [child for child in field.children if child.text is not None or syntax == "vector"]
    text = all(child.text_code != slow for child in parts)
    binary = all(child.binary_code != slow for child in parts)
    return replace(
        field,
        syntax=syntax,
        text_code=CONVERTERS["nested_text"] if text else slow,
        binary_code=CONVERTERS["nested_binary"] if binary else slow,
    )


def _hstore(type: ColumnType, codec: Codec, settings: Settings, target: str) -> Field:
    utf8 = Field("", "u")
    entry = _nested("+s", [("key", replace(utf8, nullable=False)), ("value", utf8)])
    return _nested(
        "+m",
        [("entries", replace(entry, nullable=False))],
        then(codec.text, pack_map),
        then(codec.binary, pack_map),
    )


_FLOAT32 = Field(
    "", "f", width=4, text_code=CONVERTERS["float4_text"], binary_code=CONVERTERS["same4"]
)


def _vector(type: ColumnType, codec: Codec, settings: Settings, target: str) -> Field:
    # The modifier is the number of dimensions.
    dimensions = max(type.modifier, 0) if target != "spark" else 0
    pack = pack_floats(dimensions)
    made = _nested(
        f"+w:{dimensions}" if dimensions else "+l",
        [("item", _FLOAT32)],
        then(codec.text, pack),
        then(codec.binary, pack),
    )
    # The elements of a halfvec are rounded to 16 bits first, which no compiled converter does.
    is_vector = type.entry is not None and type.entry.codec == "pgvector"
    return _compiled(made, "vector") if is_vector else made


def _sparsevec(type: ColumnType, codec: Codec, settings: Settings, target: str) -> Field:
    number = Field("", "i", width=4)
    return _nested(
        "+s",
        [
            ("dim", number),
            ("indices", _nested("+l", [("item", number)])),
            ("values", _nested("+l", [("item", _FLOAT32)])),
        ],
        then(codec.text, pack_sparse),
        then(codec.binary, pack_sparse),
    )


_FIELDS: dict[str, Callable[[ColumnType, Codec, Settings, str], Field]] = {
    "bool": _bool,
    "int2": _fixed("s", "h", "int2_text", "same2"),
    "int4": _fixed("i", "i", "int4_text", "same4"),
    "int8": _fixed("l", "q", "int8_text", "same8"),
    "uint4": _uint4,
    "uint8": _uint8,
    "float4": _float4,
    "float8": _fixed("g", "d", "float8_text", "same8"),
    "numeric": _numeric,
    "text": _text,
    "json": _json,
    "jsonb": _json,
    "char": _char,
    "bytea": _bytea,
    "ewkb": _ewkb,
    "date": _date,
    "time": _time,
    "timestamp": _timestamp,
    "timestamptz": _timestamptz,
    "timetz": _timetz,
    "interval": _interval,
    "uuid": _uuid,
    "hstore": _hstore,
    "pgvector": _vector,
    "halfvec": _vector,
    "sparsevec": _sparsevec,
}
"""Codec → a function that makes the column. The columns of all other codecs hold the server's text.
"""


def arrow_type(
    type: ColumnType,
    *,
    binary: bool = False,
    policies: Policies | None = None,
    target: str = "arrow",
) -> str:
    """Return the type of a column, as Arrow prints it; of an extension type only the name.

    Parameters
    ----------
    type : ColumnType
    binary : bool
        Whether values come in binary format: then columns of unknown types are ``binary``, else
        ``utf8``.
    policies : Policies, optional
    target : {"arrow", "spark", "portable"}
        The `target` of the :class:`ColumnarDecoder`.

    Raises
    ------
    PgOutputError
        A type was registered with an Arrow type that columns can't have, or pyarrow, which
        describes that type, is not installed.
    """
    return _field(type, binary, policies, target).arrow_type


def spark_type(type: ColumnType, *, binary: bool = False, policies: Policies | None = None) -> str:
    """Return the Spark SQL type of a column that is decoded with ``target="spark"``.

    Parameters and errors are those of :func:`arrow_type`. It also raises a PgOutputError if a type
    was registered with an Arrow type that Spark does not have.
    """
    return _field(type, binary, policies, "spark").spark_type


def _field(type: ColumnType, binary: bool, policies: Policies | None, target: str) -> Field:
    settings = Settings() if policies is None else Settings(policies)
    found = field_of(type, settings, target)
    return found.in_binary() if binary else found
