"""Describe a column of a record batch, or a part of one: its Arrow type and its converters.

A :class:`Field` has its Arrow type in the notation of the C data interface, and functions that
convert the bytes of a value to the bytes that the column stores. Fields form a tree, as Arrow's
types do. Both implementations use the same fields. The compiled one converts usual values by
itself, with the converter whose number is `text_code` or `binary_code`, and calls the functions for
unusual values. The Python one calls the functions for all values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from ..errors import Argument, PgOutputError
from .packed import Labels

Store = Callable[[bytes], "bytes | None"]

Target = Literal["arrow", "spark", "portable", "duckdb"]
TARGETS: tuple[Target, ...] = get_args(Target)
"""Sets of column types: Arrow's richest, Spark's, or those that polars and duckdb support too."""

CONVERTERS = {
    name: number
    for number, name in enumerate(
        (
            "slow", "int2_text", "uint4_text", "uint4_wide_text", "same2", "uint4_wide",
            "float4_text", "numeric_text", "numeric_binary", "ascii", "bytes", "bytea_text",
            "uuid_utf8_text", "uuid_utf8_binary", "time_text", "time_binary", "time_ns_text",
            "time_ns_binary", "interval_binary", "char_text", "char_binary", "label",
            "nested_text", "nested_binary",
            # Those that rows are full of.
            "skip", "same4", "same8", "date_binary", "timestamp_binary", "int4_text", "int8_text",
            "bool_text", "bool_binary", "decimal_text", "decimal_binary", "timestamp_text",
            "timestamptz_text", "date_text", "float8_text", "uuid_text", "uuid_binary", "utf8",
            "jsonb_binary",
        )
    )
}  # fmt: skip
"""The converters of the compiled implementation, in the order of the tables in ``_columns.h``.

The converter "slow" calls the field's function for all values.
"""

SYNTAXES = {
    name: number
    for number, name in enumerate(("", "array", "range", "composite", "vector", "multirange"))
}
"""The kinds of nested values that the compiled implementation reads by itself; "" is none."""

EPOCH_SHIFT = 946_684_800_000_000
"""Microseconds from 1970-01-01, the epoch of Arrow, to 2000-01-01, the epoch of PostgreSQL."""

ARROW_TYPES = {
    "b": "bool", "c": "int8", "C": "uint8", "s": "int16", "S": "uint16", "i": "int32",
    "I": "uint32", "l": "int64", "L": "uint64", "e": "float16", "f": "float32", "g": "float64",
    "u": "utf8", "z": "binary", "tdD": "date32", "tdm": "date64", "tts": "time32[s]",
    "ttm": "time32[ms]", "ttu": "time64[us]", "ttn": "time64[ns]", "tin": "month_day_nano_interval",
}  # fmt: skip
"""Format in the C data interface → name of the type, for types without parameters."""

_SPARK_TYPES = {
    "b": "boolean", "c": "tinyint", "s": "smallint", "i": "int", "l": "bigint", "f": "float",
    "g": "double", "u": "string", "z": "binary", "w": "binary", "tdD": "date", "ttu": "time",
    "ttn": "time",
}  # fmt: skip
_UNITS = {"s": "s", "m": "ms", "u": "us", "n": "ns"}

VARIANT = {b"variant": b"true"}
"""Metadata of the last field of a struct that is a variant for Spark."""

EXTENSION_NAME = b"ARROW:extension:name"
"""Key in a field's metadata of the name of its Arrow extension type."""


@dataclass(frozen=True, slots=True, eq=False)
class Field:
    """A column of a record batch, or a part of one.

    Attributes
    ----------
    name : str
    format : str
        The Arrow type, as the C data interface writes it.
    metadata : dict of bytes to bytes
    children : tuple of Field
    width : int
        Bytes that the column stores of each value; 0 for a bit, -1 if values differ in size. That
        is so for nested values too, which are kept packed (see the module ``packed``).
    text, binary : callable or None
        Functions from the bytes of a value in text or binary format to the bytes that the column
        stores, or None for null. They raise the errors of the codecs in
        :mod:`pgoutput_fast.values`. A bool is stored as a byte, 0 or 1; numbers have the machine's
        byte order.
    text_code, binary_code : int
        The compiled converters for the two formats, numbers of :data:`CONVERTERS`.
    precision, scale : int
        The precision and scale of a decimal.
    by_format : bool
        Whether the type, or the type of a part, is not known, so that the column is of Arrow's type
        binary if values come in binary format, and utf8 if they come in text format.
    labels : Labels or None
        The labels of an enum, whose column is a dictionary of utf8.
    nullable : bool
    syntax : str
        The kind of nested values, a key of :data:`SYNTAXES`.
    delimiter : str
        The character between the elements of an array in text format.
    type_id : int
        Of a part: the OID of its type, with which the OID in binary values is compared; 0 if it is
        not known.
    position : int
        Position among the relation's columns; -1 if it is none of them.
    """

    name: str
    format: str
    metadata: Mapping[bytes, bytes] = field(default_factory=dict)
    children: tuple[Field, ...] = ()
    width: int = -1
    text: Store | None = None
    binary: Store | None = None
    text_code: int = 0
    binary_code: int = 0
    precision: int = 0
    scale: int = 0
    by_format: bool = False
    labels: Labels | None = None
    nullable: bool = True
    syntax: str = ""
    delimiter: str = ","
    type_id: int = 0
    position: int = -1

    @property
    def is_nested(self) -> bool:
        """Whether the values contain values; a composite without fields counts too."""
        return self.format.startswith("+")

    @property
    def arrow_type(self) -> str:
        """The type as Arrow prints it; of an extension type only the name."""
        if EXTENSION_NAME in self.metadata:
            return self.metadata[EXTENSION_NAME].decode()
        kind, _, parameters = self.format.partition(":")
        if self.labels is not None:
            return f"dictionary<{ARROW_TYPES[kind]}, utf8>"
        if kind in ARROW_TYPES:
            return ARROW_TYPES[kind]
        if kind == "d":
            precision, scale, *bits = parameters.split(",")
            return f"decimal{bits[0] if bits else 128}({precision}, {scale})"
        if kind == "w":
            return f"fixed_size_binary[{parameters}]"
        if kind[:2] == "ts":
            zone = f", {parameters}" if parameters else ""
            return f"timestamp[{_UNITS[kind[2]]}{zone}]"
        if kind == "+s":
            parts = [f"{child.name}: {child.arrow_type}" for child in self.children]
            return f"struct<{', '.join(parts)}>"
        (child,) = self.children
        if kind == "+m":
            key, value = child.children
            return f"map<{key.arrow_type}, {value.arrow_type}>"
        if kind == "+w":
            return f"fixed_size_list<{child.arrow_type}>[{parameters}]"
        return f"list<{child.arrow_type}>"

    @property
    def spark_type(self) -> str:
        """The type as Spark SQL prints it.

        Raises
        ------
        PgOutputError
            Spark has no such type.
        """
        kind, _, parameters = self.format.partition(":")
        if kind in _SPARK_TYPES and self.labels is None:
            return _SPARK_TYPES[kind]
        if kind == "d" and self.width == 16:
            return f"decimal({parameters})"
        if kind[:2] == "ts":
            return "timestamp" if parameters else "timestamp_ntz"
        if kind == "+s":
            if self.children and self.children[-1].metadata == VARIANT:
                return "variant"
            parts = [
                f"`{child.name.replace('`', '``')}`:{child.spark_type}" for child in self.children
            ]
            return f"struct<{','.join(parts)}>"
        if kind == "+m":
            key, value = self.children[0].children
            return f"map<{key.spark_type},{value.spark_type}>"
        if kind in ("+l", "+w"):
            return f"array<{self.children[0].spark_type}>"
        raise PgOutputError(
            f"Spark has no type for Arrow's {self.arrow_type}",
            code="unfit_schema",
            hint=("Register another type with ", Argument("arrow")),
        )

    def in_binary(self) -> Field:
        """Return the field for values in binary format, which differs if `by_format` is true."""
        if not self.by_format:
            return self
        if not self.children:
            return replace(self, format="z")
        return replace(self, children=tuple([child.in_binary() for child in self.children]))


LABEL_FIELD = Field("", "u")
"""The field of the labels in the dictionary of an enum's column."""
