"""PostgreSQL's types: the table of known types, and how to find the type of a column.

A column's type comes from its OID, its Type message, and a :class:`TypeRegistry`. The registry has
the user-defined types of a database, and functions that users register for types.
"""

from __future__ import annotations

from .registry import MOST_NESTED, MOST_PARTS, CatalogType, TypeRegistry
from .resolve import (
    ColumnType,
    Converter,
    RegisteredType,
    column_type,
    decimal_shape,
    extension_by_name,
    numeric_modifier,
)
from .table import BUILTIN_TYPES, EXTENSION_TYPES, PgType

__all__ = [
    "BUILTIN_TYPES",
    "EXTENSION_TYPES",
    "MOST_NESTED",
    "MOST_PARTS",
    "CatalogType",
    "ColumnType",
    "Converter",
    "PgType",
    "RegisteredType",
    "TypeRegistry",
    "column_type",
    "decimal_shape",
    "extension_by_name",
    "numeric_modifier",
]
