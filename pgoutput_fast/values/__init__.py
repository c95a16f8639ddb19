"""Convert the bytes of a value to a Python object, and of a binary value to the server's text.

The table of :mod:`pgoutput_fast.types` names a codec for each type. This package has the functions
of these codecs. They never return a guess.

The functions raise a ValueError for bytes that are not a value of the type. If the policy is
"error", they raise :class:`OutOfRange` for a valid value that a Python object or a column cannot
store. The caller adds the name of the column to the error.

Binary forms are those of the types' ``*_send`` functions in PostgreSQL's ``src/backend/utils/adt``.
Texts are those that the server prints with DateStyle ISO, TimeZone UTC, bytea_output hex and
extra_float_digits 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..types import ColumnType
from . import extensions, geometry, nested, network, numbers, raw, search, temporal, text
from .base import CODES, Codec, CodecOf, NoTextForm, OutOfRange, fields_of
from .temporal import EPOCH_UTC, timestamp_form

if TYPE_CHECKING:
    from ..settings import Settings

__all__ = [
    "CODECS",
    "CODES",
    "EPOCH_UTC",
    "NO_ASCII",
    "Codec",
    "NoTextForm",
    "OutOfRange",
    "codec_of",
    "fields_of",
    "timestamp_form",
]

CODECS: dict[str, CodecOf] = {
    **extensions.CODECS,
    **geometry.CODECS,
    **network.CODECS,
    **numbers.CODECS,
    **raw.CODECS,
    **search.CODECS,
    **temporal.CODECS,
    **text.CODECS,
}
"""Codec → a function that makes its :class:`Codec` for given policies and a Python encoding."""


NO_ASCII = frozenset({"cp932", "cp949", "gb18030", "gbk", "johab"})
"""Encodings, by Python's names, in which an ASCII byte can be the second half of a character."""


def codec_of(type: ColumnType, settings: Settings) -> Codec:
    """Return the functions for values of a type. Those of a nested type call those of its parts."""
    return _codec_of(type, settings, settings.encoding)


def _codec_of(type: ColumnType, settings: Settings, encoding: str) -> Codec:
    element = type.element
    if type.kind == "base" and type.entry is not None:
        codec = CODECS[type.entry.codec](settings.policies, encoding)
        if type.entry.codec == "text" and settings.text_is_bytes:
            codec = codec._replace(text=bytes, binary=bytes)
    elif type.kind == "enum":
        # Labels are not compared with the catalogue's: one could have been added since.
        codec = CODECS["text"](settings.policies, encoding)
    elif element is None and type.kind != "composite":
        codec = CODECS["other"](settings.policies, encoding)
    else:
        codec = _nested(type, settings, encoding)
        if encoding in NO_ASCII:
            # The functions of nested types look for quotes and braces among the bytes, where in
            # these encodings they can be parts of other characters. So they are given UTF-8.
            in_utf8 = _nested(type, settings, "utf-8").text
            codec = codec._replace(text=lambda raw: in_utf8(raw.decode(encoding).encode()))
    registered = type.registered
    if registered is not None:
        codec = codec._replace(
            text=registered.text or codec.text, binary=registered.binary or codec.binary
        )
    return codec


def _nested(type: ColumnType, settings: Settings, encoding: str) -> Codec:
    if type.element is None:
        fields = [_codec_of(field, settings, encoding) for _, field in type.fields]
        return nested.composite(type, fields)
    return _NESTED[type.kind](type, _codec_of(type.element, settings, encoding))


_NESTED = {
    "array": nested.array,
    "multirange": lambda _, element: nested.multirange(element),
    "range": lambda _, element: nested.range_(element),
    "vector": nested.vector,
}
