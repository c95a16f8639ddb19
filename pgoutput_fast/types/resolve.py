"""Find the type of a column: by its OID, its Type message, and a registry if there is one.

Built-in types are found by OID. Of a user's type, the Type message gives the name of the base type,
and a catalogue of types gives the whole description. Values of a type that is not found are str
from text format and bytes from binary format.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from .table import BY_ARRAY_OID, BY_NAME, BY_OID, EXTENSION_BY_NAME, PgType

Converter = Callable[[bytes], Any]


class RegisteredType(NamedTuple):
    """What a user registered for a type.

    Attributes
    ----------
    text, binary : callable or None
        The functions that decode values in text format and in binary format.
    arrow : object
        The Arrow type of the values in columns; None if the user gave none.
    """

    text: Converter | None
    binary: Converter | None
    arrow: object = None


class ColumnType(NamedTuple):
    """The type of a column, as a tree with the types of its elements and fields.

    Attributes
    ----------
    kind : {"base", "array", "vector", "range", "multirange", "composite", "enum", "unknown"}
        A domain has the kind of its base type.
    oid : int
        The OID of the column's type, also if it is a domain; 0 if only the name is known.
    namespace, name : str
        The names in the catalogue or the Type message (for a domain, those of its base type); ""
        if the type is in neither.
    entry : PgType or None
        The row of the table of types; None for arrays, composites, enums, users' ranges and unknown
        types.
    modifier : int
        ``atttypmod``, or a domain's ``typtypmod``; -1 if there is none. For an array it applies to
        the elements.
    element : ColumnType or None
        The type of an array's or vector's elements, of a range's bounds, or of a multirange's
        ranges.
    delimiter : str
        The character between the elements of an array in text format.
    fields : tuple of (str, ColumnType)
        The fields of a composite.
    labels : tuple of str
        The labels of an enum, in their order.
    registered : RegisteredType or None
        What the user registered for the type, which goes before everything else.
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
    """The methods of :class:`pgoutput_fast.TypeRegistry` that are used here."""

    def find(self, oid: int, namespace: str, name: str) -> RegisteredType | None:
        """Return what a user registered for a type."""

    def known(self, oid: int, modifier: int = -1) -> ColumnType:
        """Return the type of an OID, from the table or the catalogue."""

    def base_name(self, oid: int) -> tuple[str, str] | None:
        """Return the namespace and name that a Type message should have, by the catalogue."""


def column_type(
    oid: int,
    modifier: int = -1,
    *,
    announced: tuple[str, str] | None = None,
    registry: Registry | None = None,
) -> ColumnType:
    """Find the type of a column.

    Parameters
    ----------
    oid, modifier : int
        ``atttypid`` and ``atttypmod``, as in the Relation message.
    announced : (str, str), optional
        Namespace and name in the Type message of the OID. For a domain they are those of the base
        type: ``("", "int4")`` for a domain over int4.
    registry : TypeRegistry, optional
        Users' types, and the catalogue if it was read.
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
    return found._replace(oid=oid, namespace=namespace, name=name, registered=registered)


def builtin_type(oid: int, modifier: int, registry: Registry | None) -> ColumnType | None:
    """Return the built-in type of an OID, or the array of one; None for another OID."""
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
    """The type of a name without help of a catalogue; of kind "unknown" if the name is unknown."""
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
    """Return the extension that a column's type is taken for by its name alone, or ""."""
    entry = (type.element or type).entry
    told = registry is not None and registry.base_name(type.oid) == (type.namespace, type.name)
    return "" if entry is None or told else entry.extension


def numeric_modifier(type_modifier: int) -> tuple[int, int] | None:
    """(precision, scale) of the type modifier of a numeric; None if it was declared without.

    From PostgreSQL 15 on the scale may be negative or greater than the precision.
    """
    if type_modifier < 4:
        return None
    packed = type_modifier - 4
    precision, scale = packed >> 16 & 0xFFFF, packed & 0x7FF
    if precision == 0:
        return None  # no server sends such a modifier
    return precision, scale - 0x800 if scale & 0x400 else scale


def decimal_shape(type_modifier: int) -> tuple[int, int] | None:
    """(precision, scale) of a decimal type that holds every value; None without a modifier."""
    modifier = numeric_modifier(type_modifier)
    if modifier is None:
        return None
    precision, scale = modifier
    if scale < 0:
        return precision - scale, 0
    return max(precision, scale), scale
