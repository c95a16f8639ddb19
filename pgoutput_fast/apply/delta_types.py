"""Convert Arrow columns to the types of Delta tables.

The decoder's target "spark" gives almost only types that Delta has. Delta has no type for times:
they become the server's text. Functions that users have registered may give any Arrow type.
"""

from __future__ import annotations

import base64
from collections.abc import Callable

import pyarrow as pa
import pyarrow.compute as pc

from ..errors import PgOutputError
from ..names import distinct_names

DECODED_FOR = "spark"
"""The target for which `ColumnarDecoder` decodes."""

_MICROSECONDS = pa.timestamp("us")
_DIGITS = 38
"""Maximum precision of a decimal."""
_PLAIN = {
    pa.uint8(): pa.int16(),
    pa.uint16(): pa.int32(),
    pa.uint32(): pa.int64(),
    pa.uint64(): pa.decimal128(20, 0),
    pa.float16(): pa.float32(),
    pa.large_string(): pa.string(),
    pa.string_view(): pa.string(),
    pa.large_binary(): pa.binary(),
    pa.binary_view(): pa.binary(),
    pa.date64(): pa.date32(),
    pa.time32("s"): pa.string(),
    pa.time32("ms"): pa.string(),
    pa.time64("us"): pa.string(),
    pa.time64("ns"): pa.string(),
    pa.null(): pa.string(),
}
_SAME = {
    pa.bool_(), pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.float32(), pa.float64(),
    pa.string(), pa.binary(), pa.date32(),
}  # fmt: skip


def stored_type(type_: pa.DataType) -> pa.DataType:
    """Return the type that a column has in a Delta table.

    Raises
    ------
    PgOutputError
        Delta has no type for these values.
    """
    types = pa.types
    if isinstance(type_, pa.BaseExtensionType):
        return stored_type(type_.storage_type)
    if type_ in _SAME:
        return type_
    if type_ in _PLAIN:
        return _PLAIN[type_]
    if types.is_dictionary(type_):
        return stored_type(type_.value_type)
    if types.is_fixed_size_binary(type_):
        return pa.binary()
    if types.is_timestamp(type_):
        return _MICROSECONDS if type_.tz is None else pa.timestamp("us", "UTC")
    if types.is_decimal(type_):
        fits = type_.precision <= _DIGITS and 0 <= type_.scale <= type_.precision
        return pa.decimal128(type_.precision, type_.scale) if fits else pa.string()
    if types.is_struct(type_):
        return pa.struct([stored_field(type_.field(i)) for i in range(type_.num_fields)])
    if types.is_map(type_):
        return pa.map_(stored_type(type_.key_type), stored_type(type_.item_type))
    if types.is_list(type_) or types.is_large_list(type_) or types.is_fixed_size_list(type_):
        return pa.list_(stored_type(type_.value_type))
    raise PgOutputError(
        f"a Delta table can't have values of Arrow's type {type_}", code="unfit_schema"
    )


def stored_field(field: pa.Field) -> pa.Field:
    """Return a field with its type in a Delta table; all fields are nullable."""
    return pa.field(field.name, stored_type(field.type))


def stored_schema(schema: pa.Schema) -> pa.Schema:
    """Return the schema of a Delta table for rows of a schema."""
    return pa.schema([stored_field(field) for field in schema])


def schema_text(schema: pa.Schema) -> str:
    """Return a schema as a text for a log."""
    return base64.b64encode(schema.serialize().to_pybytes()).decode()


def schema_of(text: str) -> pa.Schema:
    """Return the schema from a text of `schema_text`.

    Raises
    ------
    ValueError
        The text is not valid.
    """
    return pa.ipc.read_schema(pa.BufferReader(base64.b64decode(text, validate=True)))


def stored_array(column: pa.Array, type_: pa.DataType) -> pa.Array:
    """Convert a column to the type of a Delta table's column.

    Parameters
    ----------
    column : pyarrow.Array
    type_ : pyarrow.DataType
        The type of the table's column. Struct fields that `column` lacks become null.

    Raises
    ------
    PgOutputError
        A value does not fit the type.
    """
    if column.type == type_:
        return column
    try:
        return _converted(column, type_)
    except pa.ArrowInvalid as error:
        raise PgOutputError(
            f"{column.type} does not fit a Delta table's {type_}: {error}", code="unfit_value"
        ) from None


def _converted(column: pa.Array, type_: pa.DataType) -> pa.Array:
    types = pa.types
    if column.type == type_:
        return column
    if isinstance(column.type, pa.BaseExtensionType):
        return _converted(column.storage, type_)
    if types.is_dictionary(column.type):
        return _converted(column.dictionary_decode(), type_)
    if types.is_time(column.type) and types.is_string(type_):
        return _times(column)
    if types.is_struct(column.type) and types.is_struct(type_):
        return _struct(column, type_)
    if types.is_map(column.type) and types.is_map(type_):
        converted = pa.MapArray.from_arrays(
            column.offsets,
            _converted(column.keys, type_.key_type),
            _converted(column.items, type_.item_type),
        )
        return _nulls_of(column, converted)
    if types.is_fixed_size_list(column.type):
        column = column.cast(pa.list_(column.type.value_type))
    if types.is_large_list(column.type):
        column = column.cast(pa.list_(column.type.value_type))
    if types.is_list(column.type) and types.is_list(type_):
        converted = pa.ListArray.from_arrays(
            column.offsets, _converted(column.values, type_.value_type)
        )
        return _nulls_of(column, converted)
    return column.cast(type_)


def _struct(column: pa.StructArray, type_: pa.StructType) -> pa.StructArray:
    children = {column.type.field(i).name: part for i, part in enumerate(column.flatten())}
    fields = [type_.field(i) for i in range(type_.num_fields)]
    parts = [
        _converted(children[field.name], field.type)
        if field.name in children
        else pa.nulls(len(column), field.type)
        for field in fields
    ]
    return pa.StructArray.from_arrays(parts, fields=fields, mask=column.is_null())


def _nulls_of(column: pa.Array, array: pa.Array) -> pa.Array:
    """Return lists or maps that are null where `column` is."""
    if not column.null_count:
        return array
    return pc.if_else(column.is_valid(), array, pa.scalar(None, array.type))


def _times(column: pa.Array) -> pa.Array:
    """Return times as the server prints them, without trailing zeros in fractions of a second."""
    text = column.cast(pa.time64("us")).cast(pa.string())
    return pc.replace_substring_regex(text, r"\.?0{0,6}$", "")


def conformed(rows: pa.RecordBatch | pa.Table, schema: pa.Schema) -> pa.RecordBatch:
    """Return rows with all columns of a table; columns that the rows lack are null."""
    if isinstance(rows, pa.Table):
        rows = rows.combine_chunks()
        (rows,) = rows.to_batches() or [pa.RecordBatch.from_pylist([], rows.schema)]
    columns = []
    for field in schema:
        at = rows.schema.get_field_index(field.name)
        columns.append(
            pa.nulls(rows.num_rows, field.type)
            if at < 0
            else stored_array(rows.column(at), field.type)
        )
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def merged_schema(schema: pa.Schema, more: pa.Schema) -> pa.Schema | None:
    """Return the columns of two schemas together, and merge the fields of structs at any depth.

    Returns None if two columns of the same name have different types, or if names are not distinct
    for every reader.
    """
    fields = _merged(list(schema), list(more))
    return None if fields is None else pa.schema(fields)


def _merged(base: list[pa.Field], more: list[pa.Field]) -> list[pa.Field] | None:
    fields = {field.name: field for field in base}
    for field in more:
        old = fields.setdefault(field.name, field)
        type_ = old.type
        if type_ == field.type:
            continue
        if not (pa.types.is_struct(type_) and pa.types.is_struct(field.type)):
            return None
        parts = _merged(list(type_), list(field.type))
        if parts is None:
            return None
        fields[field.name] = pa.field(field.name, pa.struct(parts))
    old_names = [field.name for field in base]
    new_names = [*fields][len(old_names) :]
    is_clear = distinct_names(new_names, old_names) == new_names
    return list(fields.values()) if is_clear else None


def has_type(schema: pa.Schema, is_so: Callable[[pa.DataType], bool]) -> bool:
    """Whether `is_so` holds for the type of any column, or of any nested part."""
    return any(_has(field.type, is_so) for field in schema)


def _has(type_: pa.DataType, is_so: Callable[[pa.DataType], bool]) -> bool:
    if is_so(type_):
        return True
    if pa.types.is_map(type_):
        return _has(type_.key_type, is_so) or _has(type_.item_type, is_so)
    return any(_has(type_.field(i).type, is_so) for i in range(type_.num_fields))
