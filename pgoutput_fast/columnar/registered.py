"""Make the columns of types for which a user registered functions and an Arrow type.

pyarrow describes the Arrow type, and converts the objects that the functions return.
"""

from __future__ import annotations

from typing import Any

from ..errors import PgOutputError, printable
from ..types import ColumnType
from ..values import Codec, OutOfRange
from .arrays import pyarrow
from .fields import ARROW_TYPES, Field
from .packed import TargetState, packed, then


def registered_field(type: ColumnType, codec: Codec, arrow: Any) -> Field:
    """Return the column of the objects that the functions of `codec` return.

    Parameters
    ----------
    type : ColumnType
        The type for which it was registered, which errors name.
    codec : Codec
    arrow : str or pyarrow.DataType
        The type of the column.

    Raises
    ------
    PgOutputError
        pyarrow is not installed, or `arrow` is no Arrow type, or none that a column can have.
    """
    pa = pyarrow()
    try:
        type_ = pa.type_for_alias(arrow) if isinstance(arrow, str) else arrow
        field = field_of_type(type_)
    except (ValueError, TypeError) as error:
        raise PgOutputError(
            f"the type {printable(type.name) or type.oid} was registered with {arrow!r}, and no "
            f"column can have this Arrow type: {error}",
            code="bad_option",
            parameter="arrow",
        ) from error

    def store(value: Any) -> TargetState:
        try:
            array = pa.array([value], type_)
        except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
            shown = repr(value)
            shown = shown if len(shown) <= 100 else f"{shown[:100]}…"
            raise OutOfRange(f"{shown} does not fit into {type_} ({error})") from error
        return _stored(array, 0, field)

    return Field(
        "", field.format, field.metadata, field.children, field.width,
        text=then(codec.text, store), binary=then(codec.binary, store),
    )  # fmt: skip


def field_of_type(type_: Any, name: str = "", *, nullable: bool = True) -> Field:
    """Return the field of a pyarrow type, without functions.

    Raises
    ------
    ValueError
        Columns can't have the type.
    TypeError
        `type_` is no pyarrow.DataType.
    """
    pa = pyarrow()
    if not isinstance(type_, pa.DataType):
        raise TypeError(f"{type_!r} is no pyarrow.DataType")
    metadata = {}
    if isinstance(type_, pa.BaseExtensionType):
        metadata = {
            b"ARROW:extension:name": type_.extension_name.encode(),
            b"ARROW:extension:metadata": type_.__arrow_ext_serialize__(),
        }
        type_ = type_.storage_type
    is_ = pa.types
    children: tuple[Any, ...] = ()
    width = -1
    if is_.is_struct(type_):
        kind, children = "+s", tuple(type_)
    elif is_.is_map(type_):
        entries = pa.struct([type_.key_field, type_.item_field])
        kind, children = "+m", (pa.field("entries", entries, nullable=False),)
    elif is_.is_list(type_):
        kind, children = "+l", (type_.value_field,)
    elif is_.is_fixed_size_list(type_):
        kind, children = f"+w:{type_.list_size}", (type_.value_field,)
    elif is_.is_decimal128(type_) or is_.is_decimal256(type_):
        width = type_.bit_width // 8
        bits = ",256" if width == 32 else ""
        kind = f"d:{type_.precision},{type_.scale}{bits}"
    elif is_.is_fixed_size_binary(type_):
        kind, width = f"w:{type_.byte_width}", type_.byte_width
    elif is_.is_timestamp(type_):
        kind, width = f"ts{type_.unit[0]}:{type_.tz or ''}", 8
    else:
        formats = {pa.type_for_alias(name): kind for kind, name in ARROW_TYPES.items()}
        try:
            kind = formats[type_]
        except KeyError:
            raise ValueError(f"{type_} is none of the types that columns have") from None
        if kind not in ("u", "z"):
            width = type_.bit_width // 8
    fields = [field_of_type(one.type, one.name, nullable=one.nullable) for one in children]
    return Field(name, kind, metadata, tuple(fields), width, nullable=nullable)


def _stored(array: Any, i: int, field: Field) -> TargetState:
    """The bytes that a column stores of value `i` of an array, whose offset in buffers is 0."""
    array = getattr(array, "storage", array)
    if not array[i].is_valid:
        return None
    if field.format == "+s":
        return packed(_stored(array.field(n), i, child) for n, child in enumerate(field.children))
    if field.format == "+m":
        first, last = array.offsets[i].as_py(), array.offsets[i + 1].as_py()
        columns = (array.keys, array.items)
        return packed(
            packed(
                _stored(column, at, child)
                for column, child in zip(columns, field.children[0].children, strict=True)
            )
            for at in range(first, last)
        )
    if field.children:
        values = array.values
        if field.format == "+l":
            first, last = array.offsets[i].as_py(), array.offsets[i + 1].as_py()
        else:
            size = array.type.list_size
            first, last = i * size, (i + 1) * size
        return packed(_stored(values, at, field.children[0]) for at in range(first, last))
    if field.width < 0:
        raw: bytes = array[i].as_buffer().to_pybytes()
        return raw
    if field.width == 0:
        return b"\1" if array[i].as_py() else b"\0"
    at = i * field.width
    stored: bytes = array.buffers()[1].slice(at, field.width).to_pybytes()
    return stored
