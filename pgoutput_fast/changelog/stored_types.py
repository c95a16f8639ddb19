"""Convert Arrow types that files and databases lack: enums, intervals, and empty structs."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from ..errors import PgOutputError
from ..names import distinct_names
from ..objects import Interval
from ..values.temporal import interval_iso


def parts(type_: Any) -> list[Any]:
    """Return the fields of a nested type."""
    return [type_.field(i) for i in range(type_.num_fields)]


_EMPTY = "()"
"""The server's text of a composite without fields, for which Parquet has no type."""


def _is_empty_struct(type_: Any) -> bool:
    return bool(pa.types.is_struct(type_)) and type_.num_fields == 0


def stored_type(type_: Any) -> Any:
    """Return the type that a column of an Arrow type has in files.

    Intervals and structs without fields become utf8. Dictionaries become the type of their values.
    The parts of nested types are converted too. The fields of structs get names that every reader
    tells apart.

    Raises
    ------
    PgOutputError
        Files can't have columns of this type.
    """
    if pa.types.is_dictionary(type_):
        return stored_type(type_.value_type)
    if pa.types.is_interval(type_) or _is_empty_struct(type_):
        return pa.utf8()
    if not pa.types.is_nested(type_):
        return type_
    before = parts(type_)
    after = [field.with_type(stored_type(field.type)) for field in before]
    if pa.types.is_struct(type_):
        names = distinct_names(field.name for field in after)
        after = [field.with_name(name) for field, name in zip(after, names, strict=True)]
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
    raise PgOutputError(f"no file can have columns of the Arrow type {type_}", code="unfit_schema")


def to_stored_type(array: Any) -> Any:
    """Convert an array to the type that :func:`stored_type` returns."""
    type_ = array.type
    wanted = stored_type(type_)
    if wanted == type_:
        return array
    if pa.types.is_dictionary(type_):
        return to_stored_type(array.dictionary_decode())
    if pa.types.is_interval(type_):
        return pa.array(interval_texts(array), pa.utf8())
    if _is_empty_struct(type_):
        return pc.if_else(array.is_valid(), _EMPTY, pa.scalar(None, pa.utf8()))
    if array.offset:
        array = pa.concat_arrays([array.slice(0, 0), array])
    if pa.types.is_struct(type_):
        children = [array.field(i) for i in range(type_.num_fields)]
        own = 1
    elif pa.types.is_map(type_):
        entries = [type_.key_field, type_.item_field]
        children = [pa.StructArray.from_arrays([array.keys, array.items], fields=entries)]
        own = 2
    else:
        children = [array.values]
        own = 1 if pa.types.is_fixed_size_list(type_) else 2
    return pa.Array.from_buffers(
        wanted, len(array), array.buffers()[:own], array.null_count,
        children=[to_stored_type(child) for child in children],
    )  # fmt: skip


def interval_texts(array: Any) -> list[str | None]:
    """Return intervals as texts of ISO 8601."""
    # Arrow counts nanoseconds, PostgreSQL microseconds.
    return [
        None
        if value is None
        else interval_iso(Interval(value.months, value.days, value.nanoseconds // 1000))
        for value in array.to_pylist()
    ]


def renamed(lists: Any, names: dict[str, str]) -> Any:
    """Replace names in a column of lists of names."""
    values = lists.values
    encoded = pc.dictionary_encode(values)
    labels = [names.get(label, label) for label in encoded.dictionary.to_pylist()]
    plain = pa.DictionaryArray.from_arrays(encoded.indices, pa.array(labels, pa.utf8()))
    return pa.Array.from_buffers(
        lists.type, len(lists), lists.buffers()[:2], lists.null_count, lists.offset,
        children=[plain.dictionary_decode()],
    )  # fmt: skip
