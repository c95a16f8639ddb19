"""Make pyarrow's arrays and schemas from columns whose buffers are bytes.

The Python implementation exports its record batches this way.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .arrays import ArrayBuffers, pyarrow
from .fields import ARROW_TYPES, LABEL_FIELD, Field


def arrow_array(field: Field, column: ArrayBuffers) -> Any:
    """Return a pyarrow array with the buffers of a column."""
    pa = pyarrow()
    made = pa.Array.from_buffers(
        _type(replace(field, labels=None)),
        column.length,
        [None if buffer is None else pa.py_buffer(buffer) for buffer in column.buffers],
        column.null_count,
        column.offset,
        children=[arrow_array(*both) for both in zip(field.children, column.children, strict=True)],
    )
    if column.dictionary is None:
        return made
    return pa.DictionaryArray.from_arrays(made, arrow_array(LABEL_FIELD, column.dictionary))


def schema_of(field: Field) -> Any:
    """Return a pyarrow schema with the columns and metadata of a struct."""
    return pyarrow().schema([_field(child) for child in field.children], dict(field.metadata))


def _field(field: Field) -> Any:
    metadata = dict(field.metadata) or None
    return pyarrow().field(field.name, _type(field), field.nullable, metadata)


def _type(field: Field) -> Any:
    pa = pyarrow()
    kind, _, detail = field.format.partition(":")
    if field.labels is not None:
        return pa.dictionary(pa.int32(), pa.utf8())
    if kind == "+s":
        return pa.struct([_field(child) for child in field.children])
    if kind == "+l":
        return pa.list_(_field(field.children[0]))
    if kind == "+w":
        return pa.list_(_field(field.children[0]), int(detail))
    if kind == "+m":
        return pa.map_(*map(_field, field.children[0].children))
    if kind == "d":
        precision, scale, *bits = map(int, detail.split(","))
        return (pa.decimal256 if bits else pa.decimal128)(precision, scale)
    if kind == "w":
        return pa.binary(int(detail))
    if kind in _TIMESTAMPS:
        return pa.timestamp(_TIMESTAMPS[kind], detail or None)
    # "time64[us]" is pyarrow's time64("us"); its bool is called bool_ in Python.
    name, _, unit = ARROW_TYPES[kind].rstrip("]").partition("[")
    return getattr(pa, {"bool": "bool_"}.get(name, name))(*filter(None, [unit]))


_TIMESTAMPS = {"tss": "s", "tsm": "ms", "tsu": "us", "tsn": "ns"}
