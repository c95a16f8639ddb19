"""The one table of types: OID, name, decoder code, Arrow type, Spark type.

Everything that treats a type specially reads it here: the decoders of both implementations (through
:mod:`pgoutput_fast.plan`), the columns, the Spark reader. A type that is in no row of
:data:`BUILTIN_TYPES` and in no registry is str from text and bytes from binary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .errors import PgOutputError

Converter = Callable[[bytes], Any]


@dataclass(frozen=True, slots=True)
class PgType:
    """One type.

    Attributes
    ----------
    oid : int
        ``pg_type.oid``.
    name : str
        ``pg_type.typname``.
    codec : str
        Which decoder reads it, a key of :data:`pgoutput_fast.values.CODECS`.
    arrow, spark : str
        The column's type as Arrow and Spark SQL write it. A numeric's depends on the column's type
        modifier: ask :func:`arrow_type` and :func:`spark_type`.
    """

    oid: int
    name: str
    codec: str
    arrow: str
    spark: str


BUILTIN_TYPES: tuple[PgType, ...] = (
    PgType(16, "bool", "bool", "bool", "boolean"),
    PgType(17, "bytea", "bytea", "binary", "binary"),
    PgType(18, "char", "char", "utf8", "string"),
    PgType(19, "name", "text", "utf8", "string"),
    PgType(20, "int8", "int8", "int64", "bigint"),
    PgType(21, "int2", "int2", "int16", "smallint"),
    PgType(23, "int4", "int4", "int32", "int"),
    PgType(25, "text", "text", "utf8", "string"),
    PgType(26, "oid", "uint4", "uint32", "bigint"),
    PgType(28, "xid", "uint4", "uint32", "bigint"),
    PgType(29, "cid", "uint4", "uint32", "bigint"),
    PgType(114, "json", "json", "utf8", "string"),
    PgType(142, "xml", "xml", "utf8", "string"),
    PgType(700, "float4", "float4", "float32", "float"),
    PgType(701, "float8", "float8", "float64", "double"),
    PgType(705, "unknown", "text", "utf8", "string"),
    PgType(1042, "bpchar", "text", "utf8", "string"),
    PgType(1043, "varchar", "text", "utf8", "string"),
    PgType(1082, "date", "date", "date32", "date"),
    PgType(1083, "time", "time", "time64[us]", "time"),
    PgType(1114, "timestamp", "timestamp", "timestamp[us]", "timestamp_ntz"),
    PgType(1184, "timestamptz", "timestamptz", "timestamp[us, UTC]", "timestamp"),
    PgType(1700, "numeric", "numeric", "decimal128", "decimal"),
    PgType(2950, "uuid", "uuid", "fixed_size_binary(16)", "string"),
    PgType(3802, "jsonb", "jsonb", "utf8", "string"),
    PgType(5069, "xid8", "uint8", "uint64", "decimal(20,0)"),
)

_BY_OID: dict[int, PgType] = {entry.oid: entry for entry in BUILTIN_TYPES}
_BY_NAME: dict[str, PgType] = {entry.name: entry for entry in BUILTIN_TYPES}

FIRST_USER_OID = 16384
"""OIDs from here on belong to users' objects (``FirstNormalObjectId``)."""


@dataclass(frozen=True, slots=True)
class RegisteredType:
    """What a user registered for a type: a decoder of each format, None where there is none."""

    text: Converter | None
    binary: Converter | None


class TypeRegistry:
    """Decoders of users' own types, by OID or by name; travels by pickle if its functions do.

    >>> registry = TypeRegistry()
    >>> registry.register("complex", text=lambda raw: complex(raw.decode()))
    """

    def __init__(self) -> None:
        self._types: dict[int | str, RegisteredType] = {}

    def register(
        self,
        type: int | str,
        *,
        text: Converter | None = None,
        binary: Converter | None = None,
    ) -> None:
        """Decode values of `type` by `text` and `binary`, each a function from bytes to a value.

        Parameters
        ----------
        type : int or str
            An OID, or a type's name as the server's Type message gives it, ``name`` or
            ``schema.name``. An OID goes before a qualified name, that before a bare one.
        text, binary : callable, optional
            A ValueError that one raises becomes a :class:`DecodeError` that names the column.

        Raises
        ------
        PgOutputError
            Neither function is given.
        TypeError
            `type` is neither int nor str, or a function is not callable.
        """
        if not isinstance(type, (int, str)):
            raise TypeError(f"a type is registered by OID or name, not {type!r}")
        if text is None and binary is None:
            raise PgOutputError(f"register({type!r}) needs text= or binary=")
        for function in (text, binary):
            if function is not None and not callable(function):
                raise TypeError(f"register({type!r}): {function!r} is not callable")
        self._types[type] = RegisteredType(text, binary)

    def find(self, oid: int, namespace: str | None, name: str | None) -> RegisteredType | None:
        """What is registered for a type; `namespace` and `name` are of its Type message or None."""
        for key in (oid, f"{namespace}.{name}", name):
            if key is not None and (found := self._types.get(key)) is not None:
                return found
        return None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TypeRegistry):
            return NotImplemented
        return self._types == other._types

    __hash__ = None  # type: ignore[assignment]  # it changes

    def __repr__(self) -> str:
        return f"TypeRegistry({sorted(map(str, self._types))})"


def builtin_type(oid: int, namespace: str | None = None, name: str | None = None) -> PgType | None:
    """The table's row for a column of type `oid`, None where there is none.

    `namespace` and `name` are those of the Type message, if one came: it carries the *column's*
    OID and the *base* type's name, so that a domain over int4 comes as ``("", "int4")``.
    """
    if name is not None and namespace in ("", "pg_catalog"):
        return _BY_NAME.get(name)
    return _BY_OID.get(oid)


def numeric_modifier(type_modifier: int) -> tuple[int, int] | None:
    """(precision, scale) of a numeric's type modifier, None for a numeric without.

    From PostgreSQL 15 on the scale may be negative or greater than the precision.
    """
    if type_modifier < 4:
        return None
    packed = type_modifier - 4
    scale = packed & 0x7FF
    return packed >> 16 & 0xFFFF, scale - 0x800 if scale & 0x400 else scale


def decimal_shape(type_modifier: int) -> tuple[int, int] | None:
    """(precision, scale) of the decimal that holds every value of the column; None if unbounded."""
    modifier = numeric_modifier(type_modifier)
    if modifier is None:
        return None
    precision, scale = modifier
    if scale < 0:
        return precision - scale, 0
    return max(precision, scale), scale


def arrow_type(entry: PgType | None, type_modifier: int, *, binary: bool = False) -> str:
    """The Arrow type of a column, as Arrow writes it.

    Parameters
    ----------
    entry : PgType or None
        The table's row; None for a type that is not in it.
    type_modifier : int
        ``atttypmod`` of the column.
    binary : bool
        Whether values come in binary format: without a row they are ``binary``, else ``utf8``.
    """
    if entry is None:
        return "binary" if binary else "utf8"
    if entry.codec != "numeric":
        return entry.arrow
    shape = decimal_shape(type_modifier)
    if shape is None or shape[0] > 76:
        return "utf8"
    return f"decimal{128 if shape[0] <= 38 else 256}({shape[0]}, {shape[1]})"


def spark_type(entry: PgType | None, type_modifier: int, *, binary: bool = False) -> str:
    """The Spark SQL type of a column; parameters as of :func:`arrow_type`."""
    if entry is None:
        return "binary" if binary else "string"
    if entry.codec != "numeric":
        return entry.spark
    shape = decimal_shape(type_modifier)
    if shape is None or shape[0] > 38:
        return "string"
    return f"decimal({shape[0]},{shape[1]})"
