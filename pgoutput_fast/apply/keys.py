"""Convert key columns from Arrow to integers or bytes, which are equal exactly if the keys are.

All conversions work on whole columns, in pyarrow and numpy.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from .._impl import twin
from .steps import Keys

_EMPTY = pa.scalar(b"", pa.large_binary())


def is_integer(types: list[pa.DataType]) -> bool:
    """Whether keys are integers: a single column of an integer, date or time type."""
    if len(types) != 1:
        return False
    return pa.types.is_integer(types[0]) or pa.types.is_date(types[0]) or _is_time(types[0])


def _is_time(type_: pa.DataType) -> bool:
    return bool(pa.types.is_timestamp(type_) or pa.types.is_time(type_))


def keys_of(columns: list[pa.Array], count: int) -> Keys:
    """Return the keys of `count` rows. In an integer key, null counts as 0.

    Parameters
    ----------
    columns : list of pyarrow.Array
    count : int
    """
    types = [column.type for column in columns]
    if is_integer(types):
        (column,) = columns
        width = column.type.bit_width
        signed = pa.types.is_signed_integer(column.type) or not pa.types.is_integer(column.type)
        # uint64 keeps its bits as int64, which is still a unique key.
        plain = column.view(f"{'' if signed else 'u'}int{width}")
        return Keys(plain.fill_null(0).to_numpy().astype(np.int64, copy=False))
    if not columns:
        return Keys(np.zeros(0, np.uint8), np.zeros(count + 1, np.int64))
    return _bytes_and_ends(_packed(columns[0]) if len(columns) == 1 else _joined(columns))


def _bytes_and_ends(packed: pa.Array) -> Keys:
    """Return binary values as keys, without a copy."""
    packed = packed.cast(pa.large_binary())
    _, ends, data = packed.buffers()
    count, first = len(packed), packed.offset
    offsets = (
        np.frombuffer(ends, np.int64, count + 1, first * 8) if count else np.zeros(1, np.int64)
    )
    return Keys(np.frombuffer(data or b"", np.uint8), offsets)


def digests_of(columns: list[pa.Array], count: int) -> Any:
    """Return two hashes for each row, which equal rows share; null equals null."""
    return twin("apply._folder").digests(*_bytes_and_ends(rows_as_bytes(columns, count)))


def rows_as_bytes(columns: list[pa.Array], count: int) -> pa.Array:
    """Return each row as bytes that are equal exactly if all values are; null equals null."""
    return _joined(columns) if columns else pa.array([b""] * count, pa.large_binary())


def _joined(columns: list[pa.Array]) -> pa.Array:
    """Join several columns to one: null flags, lengths and fixed-size values come first."""
    count = len(columns[0])
    packed = [_packed(column) for column in columns]
    # Parts with one size for all rows come first, so that numpy can lay them out in one block.
    fixed, others = [], []
    for value in packed:
        if pa.types.is_fixed_size_binary(value.type):
            fixed.append(value.is_null().cast(pa.uint8()).to_numpy().reshape(count, 1))
            fixed.append(_bytes_of(value.fill_null(bytes(value.type.byte_width))))
        else:
            size = pc.binary_length(value).cast(pa.int64()).fill_null(-1).to_numpy()
            fixed.append(np.ascontiguousarray(size).view(np.uint8).reshape(count, 8))
            others.append(value.fill_null(_EMPTY))
    block = np.ascontiguousarray(np.concatenate(fixed, axis=1))
    head = pa.Array.from_buffers(
        pa.binary(block.shape[1]), count, [None, pa.py_buffer(block)]
    ).cast(pa.large_binary())
    return pc.binary_join_element_wise(head, *others, _EMPTY) if others else head


def _bytes_of(column: pa.Array) -> Any:
    """Return the values of a fixed-size column as an array of shape (n, size)."""
    size, (_, data) = column.type.byte_width, column.buffers()
    flat = np.frombuffer(data or b"", np.uint8, len(column) * size, column.offset * size)
    return flat.reshape(len(column), size)


def _packed(column: pa.Array) -> pa.Array:
    """Return a column of any type as binary values, of fixed or variable size; nulls stay."""
    type_ = column.type
    if isinstance(type_, pa.BaseExtensionType):
        return _packed(column.storage)
    if pa.types.is_dictionary(type_):
        return _packed(column.dictionary_decode())
    if pa.types.is_null(type_):
        return column.cast(pa.large_binary())
    if pa.types.is_struct(type_):
        return _with_nulls_of(column, _joined(column.flatten()))
    if pa.types.is_map(type_):
        # Maps come from hstore, which sorts its entries: equal maps have the same order.
        entries = pa.StructArray.from_arrays([column.keys, column.items], ["key", "value"])
        return _list(pa.ListArray.from_arrays(column.offsets, entries), column)
    if pa.types.is_fixed_size_list(type_):
        size = type_.list_size
        offsets = pa.array(np.arange(len(column) + 1, dtype=np.int64) * size)
        items = column.values.slice(column.offset * size, len(column) * size)
        return _list(pa.LargeListArray.from_arrays(offsets, items), column)
    if pa.types.is_list(type_) or pa.types.is_large_list(type_):
        return _list(column, column)
    if pa.types.is_boolean(type_):
        return _packed(column.cast(pa.uint8()))
    if _is_text(type_):
        return column.cast(pa.large_binary())
    if pa.types.is_float32(type_) or pa.types.is_float64(type_):
        # The server's text of each NaN is "NaN"; only the binary format has NaNs of other bits.
        column = pc.if_else(pc.is_nan(column), pa.scalar(float("nan"), type_), column)
    return column.view(pa.binary(type_.bit_width // 8))


def _is_text(type_: pa.DataType) -> bool:
    types = pa.types
    return bool(
        types.is_string(type_)
        or types.is_large_string(type_)
        or types.is_string_view(type_)
        or types.is_binary(type_)
        or types.is_large_binary(type_)
        or types.is_binary_view(type_)
    )


def _list(lists: pa.Array, column: pa.Array) -> pa.Array:
    """Return lists as binary values: the items in order, each with its length."""
    items = _joined([lists.values])
    offsets = lists.offsets.cast(pa.int64())
    # A null list may have any items in Arrow; `_with_nulls_of` makes it null again.
    joined = pc.binary_join(pa.LargeListArray.from_arrays(offsets, items), _EMPTY)
    return _with_nulls_of(column, joined)


def _with_nulls_of(column: pa.Array, packed: pa.Array) -> pa.Array:
    if not column.null_count:
        return packed
    return pc.if_else(column.is_valid(), packed, pa.scalar(None, packed.type))
