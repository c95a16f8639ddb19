"""Convert whole Arrow columns to JSON, without a Python object for each value.

The texts are meant to equal those of Debezium with ``decimal.handling.mode=string``,
``time.precision.mode=isostring`` and ``binary.handling.mode=base64``.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

_NOTHING = pa.scalar("")
_NULL = pa.scalar("null")
_ALPHABET = np.frombuffer(
    b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/", np.uint8
)


def json_column(array: Any) -> Any:
    """Convert each value to JSON: an array of utf8 without nulls, where null is ``null``.

    Integers, finite floats and booleans become numbers and booleans. Numerics become strings, so
    that no digit is lost. NaN and infinities become strings because JSON lacks them. Dates, times
    and timestamps become strings of ISO 8601 with ``Z``, bytes become strings of base64. Lists
    become arrays; structs and maps become objects.
    """
    type_ = array.type
    if isinstance(array, pa.ExtensionArray):
        is_uuid = type_.extension_name == "arrow.uuid"
        return json_column(array.cast(pa.string()) if is_uuid else array.storage)
    if pa.types.is_dictionary(type_):
        return json_column(array.dictionary_decode())
    if array.null_count == len(array):
        return pc.fill_null(pa.nulls(len(array), pa.string()), _NULL)
    return pc.fill_null(_valid_json(array), _NULL)


def json_string(text: Any) -> Any:
    """Return texts, an array of utf8, as JSON strings; null stays null."""
    return joined('"', escaped(text), '"')


def joined(*parts: Any) -> Any:
    """Concatenate texts row by row; null where one of them is null."""
    texts = [pa.scalar(part) if isinstance(part, str) else part for part in parts]
    return pc.binary_join_element_wise(*texts, _NOTHING)


def json_name(name: str) -> str:
    """Return a text as a JSON string, such as the name of a field."""
    return json.dumps(name, ensure_ascii=False)


def escaped(text: Any) -> Any:
    r"""Escape quotes, backslashes and control characters of texts."""
    codes = _bytes_of(text)
    special = np.unique(codes[(codes < 0x20) | (codes == 0x22) | (codes == 0x5C)])
    # Backslashes first: the escapes of the other characters contain one.
    for byte in sorted(special.tolist(), key=lambda byte: byte != 0x5C):
        character = chr(byte)
        text = pc.replace_substring(text, character, json.dumps(character)[1:-1])
    return text


def _bytes_of(array: Any) -> Any:
    """Return the bytes of all values of an array of utf8 or binary."""
    _, offsets, data = array.buffers()
    bounds = _bounds(array, offsets)
    # Arrow may omit the buffer of the values if all of them are empty.
    return np.frombuffer(data or b"", np.uint8)[bounds[0] : bounds[-1]]


def _bounds(array: Any, offsets: Any) -> Any:
    return np.frombuffer(offsets, np.int32)[array.offset :][: len(array) + 1]


def _valid_json(array: Any) -> Any:
    """Return the values as JSON; null stays null."""
    type_ = array.type
    if pa.types.is_string(type_):
        return json_string(array)
    if pa.types.is_boolean(type_) or pa.types.is_integer(type_):
        return array.cast(pa.string())
    if pa.types.is_floating(type_):
        return _float_json(array)
    if pa.types.is_decimal(type_):
        return joined('"', _decimal_text(array), '"')
    if pa.types.is_date(type_):
        return joined('"', array.cast(pa.string()), 'Z"')
    if pa.types.is_timestamp(type_):
        # Arrow takes thirty times as long to print a timestamp with a time zone, here always UTC.
        plain = array.cast(pa.timestamp(type_.unit)).cast(pa.string())
        return joined('"', _short(pc.replace_substring(plain, " ", "T")), 'Z"')
    if pa.types.is_time(type_):
        return joined('"', _short(array.cast(pa.string())), 'Z"')
    if pa.types.is_binary(type_):
        return joined('"', base64_text(array), '"')
    if pa.types.is_map(type_):
        entries = joined(_key_json(array.keys), ":", json_column(array.items))
        return _lists(array, entries, "{", "}")
    if pa.types.is_list(type_):
        return _lists(array, json_column(array.values), "[", "]")
    if pa.types.is_struct(type_):
        return _object(array)
    return json_string(array.cast(pa.string()))


def _key_json(keys: Any) -> Any:
    """Return keys of a map as the names of an object's fields."""
    return json_string(keys if pa.types.is_string(keys.type) else keys.cast(pa.string()))


def _lists(array: Any, values: Any, begin: str, end: str) -> Any:
    """Join the texts of a list's or map's elements."""
    parts = pa.Array.from_buffers(
        pa.list_(pa.string()), len(array), array.buffers()[:2], array.null_count, array.offset,
        children=[values],
    )  # fmt: skip
    return joined(begin, pc.binary_join(parts, ","), end)


def _object(array: Any) -> Any:
    """Join the texts of a struct's fields."""
    pieces: list[Any] = ["{"]
    for field, column in zip(array.type, array.flatten(), strict=True):
        comma = "," if len(pieces) > 1 else ""
        pieces += [f"{comma}{json_name(field.name)}:", json_column(column)]
    if len(pieces) == 1:
        return pc.if_else(array.is_valid(), pa.scalar("{}"), pa.scalar(None, pa.string()))
    text = joined(*pieces, "}")
    return pc.if_else(array.is_valid(), text, pa.scalar(None, pa.string()))


def _float_json(array: Any) -> Any:
    text = array.cast(pa.string())
    # Many parsers read -0 as the integer 0.
    text = pc.if_else(pc.equal(text, "-0"), "-0.0", text)
    finite = pc.is_finite(array)
    if pc.all(finite).as_py() is not False:
        return text
    for word, wanted in (("nan", "NaN"), ("-inf", "-Infinity"), ("inf", "Infinity")):
        text = pc.if_else(pc.equal(text, word), f'"{wanted}"', text)
    # Arrow prints NaN's sign bit. PostgreSQL has one NaN only.
    return pc.if_else(pc.equal(text, "-nan"), '"NaN"', text)


def _decimal_text(array: Any) -> Any:
    """Return the digits of numerics; Arrow prints very small numerics with an exponent."""
    text = array.cast(pa.string())
    odd = pc.match_substring(text, "E")
    if not pc.any(odd).as_py():
        return text
    shown = pa.array([format(number, "f") for number in array.filter(odd).to_pylist()], pa.string())
    return pc.replace_with_mask(text, pc.fill_null(odd, False), shown)


def _short(text: Any) -> Any:
    """Strip the zeros at the end of the fractions, which Arrow always prints."""
    return pc.utf8_rtrim(pc.utf8_rtrim(text, "0"), ".") if _has_fraction(text) else text


def _has_fraction(text: Any) -> bool:
    first = text.drop_null()[:1].to_pylist()
    return bool(first) and "." in first[0]


def base64_text(array: Any) -> Any:
    """Return the base64 of each value of an array of binary; null stays null."""
    _, offsets, _ = array.buffers()
    bounds = _bounds(array, offsets).astype(np.int64)
    lengths = np.diff(bounds)
    groups = (lengths + 2) // 3
    ends = np.cumsum(groups)
    padded = np.zeros(3 * int(groups.sum()), np.uint8)
    shift = 3 * (ends - groups) - (bounds[:-1] - bounds[0])
    padded[np.arange(lengths.sum()) + np.repeat(shift, lengths)] = _bytes_of(array)
    parts = padded.reshape(-1, 3).astype(np.uint32)
    bits = parts[:, 0] << 16 | parts[:, 1] << 8 | parts[:, 2]
    sextets = np.stack([bits >> 18, bits >> 12 & 63, bits >> 6 & 63, bits & 63], 1)
    text = _ALPHABET[sextets].reshape(-1)
    missing = 3 * groups - lengths
    text[4 * ends[missing >= 1] - 1] = ord("=")
    text[4 * ends[missing == 2] - 2] = ord("=")
    byte_offsets = np.zeros(len(array) + 1, np.int64)
    byte_offsets[1:] = 4 * ends
    plain = pa.LargeStringArray.from_buffers(
        len(array), pa.py_buffer(byte_offsets), pa.py_buffer(text)
    )
    texts = plain.cast(pa.string())
    return pc.if_else(array.is_valid(), texts, pa.scalar(None, pa.string()))
