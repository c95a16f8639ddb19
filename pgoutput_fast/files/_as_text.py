"""Convert values of any Arrow type to text for CSV, where nested values are JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pgoutput_fast.captured.stored import interval_texts, parts


def is_nested(type_: Any) -> bool:
    """Whether values of the type contain other values."""
    return bool(pa.types.is_nested(_storage_type(type_)))


def _storage_type(type_: Any) -> Any:
    return type_.storage_type if isinstance(type_, pa.BaseExtensionType) else type_


def printed(array: Any) -> Any:
    r"""Convert each value to its text in a CSV file, an array of large_utf8; null stays null.

    Binary values become ``\x`` and hexadecimal digits, intervals ISO 8601, nested values JSON. All
    other values become what Arrow prints of them.
    """
    type_ = array.type
    if array.null_count == len(array):
        return pa.nulls(len(array), _TEXT)
    if isinstance(array, pa.ExtensionArray) and type_.extension_name != "arrow.uuid":
        return printed(array.storage)
    if pa.types.is_dictionary(type_):
        return printed(array.dictionary_decode())
    if _is_binary(type_):
        return _hexadecimal(array)
    if _is_zoned(type_):
        # The text that Arrow prints; with a time zone Arrow takes thirty times as long for it.
        plain = array.cast(pa.timestamp(type_.unit)).cast(_TEXT)
        return pc.binary_join_element_wise(plain, pa.scalar("Z", _TEXT), _NOTHING)
    if pa.types.is_interval(type_) or is_nested(type_) or isinstance(array, pa.ExtensionArray):
        return _one_by_one(array)
    return array.cast(_TEXT)


_TEXT = pa.large_utf8()
"""Its offsets have 64 bits, as the hexadecimal digits of a value of 1 GiB are 2 GiB."""
_NOTHING = pa.scalar("", _TEXT)


def _is_zoned(type_: Any) -> bool:
    """Whether the type is a timestamp with time zone, which is always UTC here."""
    return bool(pa.types.is_timestamp(type_)) and type_.tz is not None


_DIGITS = np.frombuffer(b"".join(b"%02x" % byte for byte in range(256)), np.uint16)


def _hexadecimal(array: Any) -> Any:
    array = array.cast(pa.large_binary())
    _, offsets, data = array.buffers()
    bounds = np.frombuffer(offsets, np.int64)[array.offset :][: len(array) + 1]
    # Arrow may leave out the buffer of the values if all of them are empty.
    bytes_ = np.frombuffer(data or b"", np.uint8)[bounds[0] : bounds[-1]]
    digits = pa.LargeStringArray.from_buffers(
        len(array), pa.py_buffer((bounds - bounds[0]) * 2), pa.py_buffer(_DIGITS[bytes_])
    )
    found = pc.binary_join_element_wise(pa.scalar("\\x", _TEXT), digits, _NOTHING)
    return pc.if_else(array.is_valid(), found, pa.scalar(None, _TEXT))


def _one_by_one(array: Any) -> Any:
    """Convert values to text in Python one by one, which is not done for nulls."""
    if array.null_count:
        valid = array.is_valid()
        places = pc.subtract(pc.cumulative_sum(valid.cast(pa.int64())), 1)
        return _one_by_one(array.filter(valid)).take(pc.if_else(valid, places, None))
    if pa.types.is_interval(array.type):
        found: list[Any] = interval_texts(array)
    elif is_nested(array.type):
        found = json_texts(array)
    else:
        found = list(map(str, array.to_pylist()))
    return pa.array(found, _TEXT)


def _is_binary(type_: Any) -> bool:
    return bool(
        pa.types.is_binary(type_)
        or pa.types.is_large_binary(type_)
        or pa.types.is_binary_view(type_)
        or pa.types.is_fixed_size_binary(type_)
    )


def json_texts(array: Any) -> list[str]:
    """Convert each value to JSON in ASCII; null becomes ``null``.

    Numbers and booleans become numbers and booleans of JSON. NaN and infinities, which JSON does
    not have, and all other values that are not nested become strings with the text of
    :func:`printed`. Lists become arrays, and structs objects. Maps become objects, or arrays of
    pairs if their keys are no text.
    """
    type_ = array.type
    if isinstance(array, pa.ExtensionArray) and is_nested(type_):
        return json_texts(array.storage)
    if pa.types.is_dictionary(type_):
        return json_texts(array.dictionary_decode())
    if not is_nested(type_):
        show = _leaf(type_)
        return ["null" if text is None else show(text) for text in printed(array).to_pylist()]
    valid = array.is_valid().to_pylist()
    if pa.types.is_struct(type_):
        names = [json.dumps(field.name) for field in parts(type_)]
        columns = [json_texts(array.field(i)) for i in range(len(names))]
        shown = [
            "{" + ", ".join(f"{n}: {v}" for n, v in zip(names, row, strict=True)) + "}"
            for row in (zip(*columns, strict=True) if columns else [()] * len(array))
        ]
    else:
        shown = _joined(array)
    return [text if is_valid else "null" for text, is_valid in zip(shown, valid, strict=True)]


def _leaf(type_: Any) -> Callable[[str], str]:
    if pa.types.is_integer(type_) or pa.types.is_decimal(type_) or pa.types.is_boolean(type_):
        return str
    if pa.types.is_floating(type_):
        return lambda text: text if math.isfinite(float(text)) else json.dumps(text)
    return json.JSONEncoder().encode  # the same as json.dumps for a str, in a third of the time


def _joined(array: Any) -> list[str]:
    """Convert lists and maps to JSON; the text of those that are null has no meaning."""
    type_ = array.type
    if pa.types.is_map(type_):
        keys, items = json_texts(array.keys), json_texts(array.items)
        named = _is_text(type_.key_type)
        values = [
            f"{key}: {item}" if named else f"[{key}, {item}]"
            for key, item in zip(keys, items, strict=True)
        ]
        start, end = ("{", "}") if named else ("[", "]")
    else:
        values = json_texts(array.values)
        start, end = "[", "]"
    if pa.types.is_fixed_size_list(type_):
        size = type_.list_size
        bounds = [(array.offset + i) * size for i in range(len(array) + 1)]
    else:
        bounds = array.offsets.to_pylist()
    return [start + ", ".join(values[bounds[i] : bounds[i + 1]]) + end for i in range(len(array))]


def _is_text(type_: Any) -> bool:
    if pa.types.is_dictionary(type_):
        type_ = type_.value_type
    return bool(pa.types.is_string(type_) or pa.types.is_large_string(type_))


def csv_type(type_: Any) -> Any:
    """The type of a column for Arrow's CSV writer: its own, or text that :func:`printed` makes."""
    plain = (
        pa.types.is_boolean(type_)
        or pa.types.is_integer(type_)
        or pa.types.is_floating(type_)
        or pa.types.is_decimal(type_)
        or pa.types.is_temporal(type_)
        or _is_text(type_)
    )
    if plain and not (
        pa.types.is_interval(type_) or pa.types.is_dictionary(type_) or _is_zoned(type_)
    ):
        return type_
    return _TEXT


def csv_column(array: Any) -> Any:
    """Convert a column for Arrow's CSV writer, to the type of :func:`csv_type`."""
    return array if csv_type(array.type) == array.type else printed(array)
