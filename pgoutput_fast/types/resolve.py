"""How the type of a column is found: by its OID, its Type message and a registry, if there is one.

Built-in types are found by OID; a user's type by its Type message, which names the base type, and
wholly by a catalogue of types, where there is one. A type that is found in none of them is str from
text and bytes from binary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from .table import BY_ARRAY_OID, BY_NAME, BY_OID, EXTENSION_BY_NAME, PgType

Converter = Callable[[bytes], Any]


@dataclass(frozen=True, slots=True)
class RegisteredType:
    """What a user registered for a type: a decoder of each format, None where there is none.

    Attributes
    ----------
    text, binary : callable or None
    arrow : object
        The Arrow type of the values in columns, None where the user named none.
    """

    text: Converter | None
    binary: Converter | None
    arrow: object = None


@dataclass(frozen=True, slots=True)
class ColumnType:
    """The type of a column, or of a part of one: a tree, of which the plan of a relation is made.

    Attributes
    ----------
    kind : {"base", "array", "vector", "range", "multirange", "composite", "enum", "unknown"}
        Domains are not among them: they look like what they are made of.
    oid : int
        The column's own, a domain's too; 0 where only the name is known.
    namespace, name : str
        As the catalogue or the Type message says, a domain's base type's; "" where neither did.
    entry : PgType or None
        The table's row; None for arrays, composites, enums, users' ranges and unknown types.
    modifier : int
        ``atttypmod``, or a domain's ``typtypmod``; -1 for none. An array's is its elements'.
    element : ColumnType or None
        Of an array or vector its elements', of a range its subtype's, of a multirange its range's.
    delimiter : str
        Between the elements of an array.
    fields : tuple of (str, ColumnType)
        Of a composite.
    labels : tuple of str
        Of an enum, in their order.
    registered : RegisteredType or None
        What the user registered for the type; it goes before everything else.
    """

    kind: str
    oid: int
    namespace: str = ""
    name: str = ""
    entry: PgType | None = None
    modifier: int = -1
    element: ColumnType | None = None
    delimiter: str = ","
    fields: tuple[tuple[str, ColumnType], ...] = ()
    labels: tuple[str, ...] = ()
    registered: RegisteredType | None = None


class Registry(Protocol):
    """What is asked of a :class:`pgoutput_fast.TypeRegistry` here."""

    def find(self, oid: int, namespace: str, name: str) -> RegisteredType | None:
        """What a user registered for a type."""

    def known(self, oid: int, modifier: int = -1) -> ColumnType:
        """The type of an OID by the table and the catalogue."""

    def base_name(self, oid: int) -> tuple[str, str] | None:
        """Namespace and name that a Type message has by the catalogue."""


def column_type(
    oid: int,
    modifier: int = -1,
    *,
    announced: tuple[str, str] | None = None,
    registry: Registry | None = None,
) -> ColumnType:
    """The type of a column.

    Parameters
    ----------
    oid, modifier : int
        ``atttypid`` and ``atttypmod``, as the Relation has them.
    announced : (str, str), optional
        Namespace and name of its Type message. It carries the *column's* OID and the *base*
        type's name, so that a domain over int4 comes as ``("", "int4")``.
    registry : TypeRegistry, optional
        Users' types, and the catalogue where there is one.
    """
    builtin = builtin_type(oid, modifier, registry)
    if builtin is not None:
        return builtin
    if announced is None:
        if registry is not None:
            return registry.known(oid, modifier)
        return ColumnType("unknown", oid, modifier=modifier)
    namespace, name = announced[0] or "pg_catalog", announced[1]
    if registry is not None and registry.base_name(oid) == (namespace, name):
        return registry.known(oid, modifier)
    found = _named(namespace, name, modifier, registry)
    registered = found.registered
    if registered is None and registry is not None:
        registered = registry.find(oid, namespace, name)
    return replace(found, oid=oid, namespace=namespace, name=name, registered=registered)


def builtin_type(oid: int, modifier: int, registry: Registry | None) -> ColumnType | None:
    """The type of an OID of the table, or of an array of one; None if it is in none."""
    entry = BY_OID.get(oid)
    if entry is not None:
        registered = registry.find(oid, "pg_catalog", entry.name) if registry is not None else None
        return ColumnType(
            _BUILTIN_KINDS.get(entry.codec, "base"),
            oid,
            "pg_catalog",
            entry.name,
            entry,
            modifier,
            builtin_type(entry.element, -1, registry) if entry.element else None,
            registered=registered,
        )
    entry = BY_ARRAY_OID.get(oid)
    if entry is None:
        return None
    name = f"_{entry.name}"
    return ColumnType(
        "array",
        oid,
        "pg_catalog",
        name,
        modifier=modifier,
        element=builtin_type(entry.oid, modifier, registry),
        delimiter=entry.delimiter,
        registered=registry.find(oid, "pg_catalog", name) if registry is not None else None,
    )


_BUILTIN_KINDS = {"range": "range", "multirange": "multirange", "vector": "vector"}


def _named(namespace: str, name: str, modifier: int, registry: Registry | None) -> ColumnType:
    """The type of a name, for which there is no catalogue; of kind "unknown" if none is known."""
    if namespace == "pg_catalog":
        entry = BY_NAME.get(name)
        if entry is not None:
            found = builtin_type(entry.oid, modifier, registry)
        else:
            entry = BY_NAME.get(name[1:]) if name[:1] == "_" else None
            found = builtin_type(entry.array_oid, modifier, registry) if entry is not None else None
        return found or ColumnType("unknown", 0, modifier=modifier)
    entry = EXTENSION_BY_NAME.get(name)
    if entry is not None:
        return ColumnType(
            "base",
            0,
            namespace,
            name,
            entry,
            modifier,
            registered=registry.find(0, namespace, name) if registry is not None else None,
        )
    if name[:1] == "_" and name[1:] in EXTENSION_BY_NAME:
        return ColumnType(
            "array",
            0,
            namespace,
            name,
            modifier=modifier,
            element=_named(namespace, name[1:], modifier, registry),
            delimiter=EXTENSION_BY_NAME[name[1:]].delimiter,
        )
    return ColumnType("unknown", 0, namespace, name, modifier=modifier)


def extension_by_name(type: ColumnType, registry: Registry | None) -> str:
    """The extension for whose type a column's was taken by its name alone, "" if for none."""
    entry = (type.element or type).entry
    told = registry is not None and registry.base_name(type.oid) == (type.namespace, type.name)
    return "" if entry is None or told else entry.extension


def numeric_modifier(type_modifier: int) -> tuple[int, int] | None:
    """(precision, scale) of a numeric's type modifier, None for a numeric without.

    From PostgreSQL 15 on the scale may be negative or greater than the precision.
    """
    if type_modifier < 4:
        return None
    packed = type_modifier - 4
    precision, scale = packed >> 16 & 0xFFFF, packed & 0x7FF
    if precision == 0:
        return None  # which no server sends
    return precision, scale - 0x800 if scale & 0x400 else scale


def decimal_shape(type_modifier: int) -> tuple[int, int] | None:
    """(precision, scale) of the decimal that holds every value of the column; None if unbounded."""
    modifier = numeric_modifier(type_modifier)
    if modifier is None:
        return None
    precision, scale = modifier
    if scale < 0:
        return precision - scale, 0
    return max(precision, scale), scale
