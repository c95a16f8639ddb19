"""Values of any Arrow type as text: for CSV, and as JSON where they are nested.

Also what files cannot have otherwise: intervals as ISO 8601, and enums' labels as plain text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pgoutput_fast.errors import PgOutputError
from pgoutput_fast.objects import Interval
from pgoutput_fast.values.temporal import interval_iso


def is_nested(type_: Any) -> bool:
    """Whether values of the type are made of others."""
    return bool(pa.types.is_nested(_storage_type(type_)))


def _storage_type(type_: Any) -> Any:
    return type_.storage_type if isinstance(type_, pa.BaseExtensionType) else type_


def _parts(type_: Any) -> list[Any]:
    """The fields that a nested type is made of."""
    return [type_.field(i) for i in range(type_.num_fields)]


_EMPTY = "()"
"""The server's text of a composite without fields, for which Parquet has no type."""


def _is_empty_struct(type_: Any) -> bool:
    return bool(pa.types.is_struct(type_)) and type_.num_fields == 0


def stored_type(type_: Any) -> Any:
    """The type that columns of a type have in files: utf8 for intervals and structs without fields,
    and for dictionaries their values' own, in nested types too.
    """  # noqa: D205 - one sentence
    if pa.types.is_dictionary(type_):
        return stored_type(type_.value_type)
    if pa.types.is_interval(type_) or _is_empty_struct(type_):
        return pa.utf8()
    if not pa.types.is_nested(type_):
        return type_
    before = _parts(type_)
    after = [field.with_type(stored_type(field.type)) for field in before]
    if before == after:
        return type_
    if pa.types.is_struct(type_):
        return pa.struct(after)
    if pa.types.is_map(type_):
        entries = after[0].type
        return pa.map_(entries.field(0), entries.field(1), keys_sorted=type_.keys_sorted)
    if pa.types.is_fixed_size_list(type_):
        return pa.list_(after[0], type_.list_size)
    if pa.types.is_large_list(type_):
        return pa.large_list(after[0])
    if pa.types.is_list(type_):
        return pa.list_(after[0])
    raise PgOutputError(f"no file can have columns of the Arrow type {type_}")


def stored(array: Any) -> Any:
    """An array as files have it: of :func:`stored_type`."""
    type_ = array.type
    wanted = stored_type(type_)
    if wanted == type_:
        return array
    if pa.types.is_dictionary(type_):
        return stored(array.dictionary_decode())
    if pa.types.is_interval(type_):
        return pa.array(_interval_texts(array), pa.utf8())
    if _is_empty_struct(type_):
        return pc.if_else(array.is_valid(), _EMPTY, pa.scalar(None, pa.utf8()))
    if array.offset:
        array = pa.concat_arrays([array.slice(0, 0), array])
    if pa.types.is_struct(type_):
        children = [array.field(i) for i in range(type_.num_fields)]
        own = 1
    elif pa.types.is_map(type_):
        children = [pa.StructArray.from_arrays([array.keys, array.items], fields=_entries(type_))]
        own = 2
    else:
        children = [array.values]
        own = 1 if pa.types.is_fixed_size_list(type_) else 2
    return pa.Array.from_buffers(
        wanted, len(array), array.buffers()[:own], array.null_count,
        children=[stored(child) for child in children],
    )  # fmt: skip


def _entries(type_: Any) -> list[Any]:
    return [type_.key_field, type_.item_field]


def _interval_texts(array: Any) -> list[str | None]:
    # Arrow has nanoseconds where PostgreSQL has microseconds.
    return [
        None
        if value is None
        else interval_iso(Interval(value.months, value.days, value.nanoseconds // 1000))
        for value in array.to_pylist()
    ]


def printed(array: Any) -> Any:
    r"""Each value as it stands in a CSV file, null for null; an array of large_utf8.

    Binary values are ``\x`` and hexadecimal digits, intervals ISO 8601, nested values JSON; all
    others are as Arrow prints them.
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
        # What Arrow prints, which takes it thirty times as long with a time zone.
        plain = array.cast(pa.timestamp(type_.unit)).cast(_TEXT)
        return pc.binary_join_element_wise(plain, pa.scalar("Z", _TEXT), _NOTHING)
    if pa.types.is_interval(type_) or is_nested(type_) or isinstance(array, pa.ExtensionArray):
        return _one_by_one(array)
    return array.cast(_TEXT)


_TEXT = pa.large_utf8()
"""With 64-bit offsets: a value of 1 GB has 2 GiB of hexadecimal digits."""
_NOTHING = pa.scalar("", _TEXT)


def _is_zoned(type_: Any) -> bool:
    """Whether it is timestamptz, which is UTC always."""
    return bool(pa.types.is_timestamp(type_)) and type_.tz is not None


_DIGITS = np.frombuffer(b"".join(b"%02x" % byte for byte in range(256)), np.uint16)


def _hexadecimal(array: Any) -> Any:
    array = array.cast(pa.large_binary())
    _, offsets, data = array.buffers()
    bounds = np.frombuffer(offsets, np.int64)[array.offset :][: len(array) + 1]
    # Arrow may leave the values' buffer out where there are none.
    bytes_ = np.frombuffer(data or b"", np.uint8)[bounds[0] : bounds[-1]]
    digits = pa.LargeStringArray.from_buffers(
        len(array), pa.py_buffer((bounds - bounds[0]) * 2), pa.py_buffer(_DIGITS[bytes_])
    )
    found = pc.binary_join_element_wise(pa.scalar("\\x", _TEXT), digits, _NOTHING)
    return pc.if_else(array.is_valid(), found, pa.scalar(None, _TEXT))


def _one_by_one(array: Any) -> Any:
    """Values that Python makes text, which nulls are not."""
    if array.null_count:
        valid = array.is_valid()
        places = pc.subtract(pc.cumulative_sum(valid.cast(pa.int64())), 1)
        return _one_by_one(array.filter(valid)).take(pc.if_else(valid, places, None))
    if pa.types.is_interval(array.type):
        found: list[Any] = _interval_texts(array)
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
    """Each value as JSON, in ASCII; null for null.

    Numbers and booleans are JSON's own, but for NaN and infinities, which JSON has not: those and
    all else that is not nested are strings, as :func:`printed` gives them. Lists are arrays,
    structs objects; maps are objects, or arrays of pairs where keys are no text.
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
        names = [json.dumps(field.name) for field in _parts(type_)]
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
    return json.JSONEncoder().encode  # what json.dumps comes to for a text, in a third of the time


def _joined(array: Any) -> list[str]:
    """Lists and maps, whatever stands for those that are null."""
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
    """The type of a column as it is handed to Arrow's writer of CSV, which prints the others."""
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
    """A column as it is handed to Arrow's writer of CSV: of :func:`csv_type`."""
    return array if csv_type(array.type) == array.type else printed(array)


def renamed(lists: Any, names: dict[str, str]) -> Any:
    """A column of lists of names, in which some are replaced."""
    values = lists.values
    encoded = pc.dictionary_encode(values)
    labels = [names.get(label, label) for label in encoded.dictionary.to_pylist()]
    plain = pa.DictionaryArray.from_arrays(encoded.indices, pa.array(labels, pa.utf8()))
    return pa.Array.from_buffers(
        lists.type, len(lists), lists.buffers()[:2], lists.null_count, lists.offset,
        children=[plain.dictionary_decode()],
    )  # fmt: skip
