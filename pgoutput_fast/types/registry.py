"""Keep what is known of users' types: a database's catalogue of types, and registered functions."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from ..errors import Argument, PgOutputError
from .resolve import ColumnType, Converter, RegisteredType, builtin_type
from .table import BY_OID, EXTENSION_BY_NAME


class CatalogType(NamedTuple):
    """A type as ``pg_type`` and other tables of the system catalogue describe it.

    Attributes
    ----------
    oid : int
    namespace, name : str
    kind : {"b", "c", "d", "e", "r", "m"}
        ``typtype``: base, composite, domain, enum, range, multirange. An array is a base type that
        has an element.
    element : int
        OID of an array's elements, a range's subtype, a multirange's range or a domain's base type;
        0 for other types.
    modifier : int
        ``typtypmod`` of a domain; -1 if it has none.
    delimiter : str
        ``typdelim``: the character between values of the type in the text of an array.
    extension : str
        The extension that created the type; "" if none did.
    labels : tuple of str
        The labels of an enum, in ``enumsortorder``.
    fields : tuple of (str, int, int)
        Name, type OID and modifier of each field of a composite, without dropped ones.
    """

    oid: int
    namespace: str
    name: str
    kind: str
    element: int = 0
    modifier: int = -1
    delimiter: str = ","
    extension: str = ""
    labels: tuple[str, ...] = ()
    fields: tuple[tuple[str, int, int], ...] = ()


class TypeRegistry:
    """User-defined types: registered decoders, and the catalogue of a database.

    >>> registry = TypeRegistry()
    >>> registry.register("complex", text=lambda raw: complex(raw.decode()))

    The catalogue describes the types as they were when it was read. A stream does not announce an
    altered type. What happens to its values depends on the alteration:

    - A label that was added to an enum, or renamed, is decoded to its str.
    - A domain keeps its base type. No other alteration of a domain changes how values are decoded.
    - If a composite has another number of fields, or in binary format a field or element of another
      type, its values are errors. If the catalogue is older than the value, call
      :meth:`update_from`. If it is newer, decode with a registry that was read before the type was
      altered.
    - If the stream gives a type another name than the catalogue, or its OID is not in the catalogue
      (as after it was dropped and made again), it may be another type. Then only its name counts.
      If the name is unknown, values are str from text and bytes from binary format. This happens to
      a renamed type too, because the stream keeps its old name.

    One alteration can't be noticed: a field of a composite was renamed, or was dropped while
    another field (in binary format, of the same type) was added. The values are then right but have
    the old names. After such an alteration call :meth:`update_from` before values of the new form
    are decoded; it returns the types that were altered. Without a catalogue, composites are text.
    """

    def __init__(self) -> None:
        self._registered: dict[int | str, RegisteredType] = {}
        self._catalog: dict[int, CatalogType] = {}
        self._changed()

    def _changed(self) -> None:
        self._known: dict[tuple[int, int], ColumnType] = {}
        self._too_deep = _too_deep(self._catalog)
        # The last step: other threads keep what they find under the version that they see.
        self._version = getattr(self, "_version", 0) + 1

    @property
    def version(self) -> int:
        """A number that grows with every change of the registry."""
        return self._version

    @property
    def catalog(self) -> Mapping[int, CatalogType]:
        """The types of the catalogue, by OID; empty if none was read."""
        return MappingProxyType(self._catalog)

    def register(
        self,
        type: int | str,
        *,
        text: Converter | None = None,
        binary: Converter | None = None,
        arrow: object = None,
    ) -> None:
        """Decode values of `type` by `text` and `binary`, each a function from bytes to a value.

        The functions are also used for domains over the type, and for arrays, composites and ranges
        of it if they are in the catalogue. Register a built-in type before its values are decoded:
        the decoders of a relation's columns of built-in types are found only once.

        Parameters
        ----------
        type : int or str
            An OID, or a type's name as the server's Type message gives it, ``name`` or
            ``schema.name``. If several fit a type, an OID goes before a qualified name, and a
            qualified name before a bare one.
        text, binary : callable, optional
            Functions for values in text format and in binary format. An exception in them becomes a
            :class:`DecodeError` that names the column.
        arrow : str or pyarrow.DataType, optional
            The Arrow type of the values in columns, as a pyarrow type or an alias of one. Without
            it the functions are not used for columns.

        Raises
        ------
        PgOutputError
            Neither function is given, the name is empty, or the number is no OID.
        TypeError
            `type` is neither int nor str, or a function is not callable.
        """
        if isinstance(type, bool) or not isinstance(type, (int, str)):
            raise TypeError(f"a type is registered by OID or name, not {type!r}")
        if type == "" or (isinstance(type, int) and not 0 < type < 1 << 32):
            raise PgOutputError(
                f"register({type!r}): no type has that OID or name", code="unfit_input"
            )
        if text is None and binary is None:
            raise PgOutputError(
                f"nothing reads the type {type!r}",
                code="bad_option",
                hint=("Give ", Argument("text"), " or ", Argument("binary")),
            )
        for function in (text, binary):
            if function is not None and not callable(function):
                raise TypeError(f"register({type!r}): {function!r} is not callable")
        self._registered[type] = RegisteredType(text, binary, arrow)
        self._changed()

    def find(self, oid: int, namespace: str, name: str) -> RegisteredType | None:
        """Return what is registered for a type; `namespace` "" means pg_catalog, as in messages."""
        for key in (oid, f"{namespace or 'pg_catalog'}.{name}", name):
            if (found := self._registered.get(key)) is not None:
                return found
        return None

    @classmethod
    def from_connection(cls, connection: Any) -> TypeRegistry:
        """Read the catalogue of a database.

        Parameters
        ----------
        connection : psycopg.Connection
            An ordinary connection (not a replication connection) to the database of the replication
            slot. If a transaction is open, it stays open; else none is open afterwards.

        Returns
        -------
        TypeRegistry
            The types of users and extensions. Row types of tables are among them only if a column
            has such a type.

        Raises
        ------
        psycopg.Error
            The server refuses a query, or the connection fails.
        TypeError
            `connection` is no psycopg.Connection (a psycopg.AsyncConnection is none).
        """
        if not hasattr(connection, "transaction") or inspect.iscoroutinefunction(
            getattr(connection, "execute", None)
        ):
            raise TypeError(
                f"from_connection needs a psycopg.Connection, not {type(connection).__name__}"
            )
        with connection.transaction():
            cursor = connection.cursor(row_factory=lambda cursor: tuple)
            rows = cursor.execute(_CATALOG_QUERY).fetchall()
        # psycopg returns bytes where the client_encoding is SQL_ASCII.
        texts = [
            row[0].decode("utf-8", "surrogateescape") if isinstance(row[0], bytes) else row[0]
            for row in rows
        ]
        return cls._of(_catalog_type(json.loads(text)) for text in texts)

    @classmethod
    def _of(cls, types: Iterable[CatalogType]) -> TypeRegistry:
        registry = cls()
        registry._catalog = {found.oid: found for found in types}
        registry._changed()
        return registry

    def update_from(self, connection: Any) -> tuple[CatalogType, ...]:
        """Read the catalogue again; decoders that use this registry follow it at once.

        Types that no longer exist are kept, because frames with their values may still come.
        Parameters and errors are those of :meth:`from_connection`.

        Returns
        -------
        tuple of CatalogType
            The types that were altered since the last time, as they are now, without new ones.
            Composite values that were decoded in between may have the old names of fields.
        """
        before = self._catalog
        self.merge(type(self).from_connection(connection))
        return tuple(
            [
                found
                for oid, found in sorted(self._catalog.items())
                if before.get(oid, found) != found
            ]
        )

    def merge(self, other: TypeRegistry) -> TypeRegistry:
        """Add the types of `other`, which replace types that both have. Return self."""
        self._catalog = {**self._catalog, **other._catalog}
        self._registered.update(other._registered)
        self._changed()
        return self

    def replace_catalog(self, other: TypeRegistry) -> None:
        """Take the catalogue of `other` in place of this one; registered functions stay."""
        if self._catalog != other._catalog:
            self._catalog = dict(other._catalog)
            self._changed()

    def contained(self, oids: Iterable[int]) -> set[int]:
        """Return these types and all that they contain: elements, fields, base types."""
        found: set[int] = set()
        waiting = list(oids)
        while waiting:
            oid = waiting.pop()
            if oid in found:
                continue
            found.add(oid)
            entry = self._catalog.get(oid)
            if entry is not None:
                waiting += [
                    part for part in (entry.element, *(one[1] for one in entry.fields)) if part
                ]
        return found

    def within(self, oids: Iterable[int]) -> TypeRegistry:
        """Return a registry with these types of the catalogue and all that they contain."""
        return self.only(self.contained(oids))

    def only(self, oids: Iterable[int]) -> TypeRegistry:
        """Return a registry with only these types of the catalogue; it leaves out unknown ones."""
        return self._of(self._catalog[oid] for oid in oids if oid in self._catalog)

    def to_json(self) -> str:
        """Return the catalogue as JSON for :meth:`from_json`, without registered functions."""
        types = [self._catalog[oid]._asdict() for oid in sorted(self._catalog)]
        return json.dumps({"format_version": FORMAT_VERSION, "types": types})

    @classmethod
    def from_json(cls, text: str | bytes) -> TypeRegistry:
        """Make a registry from JSON that :meth:`to_json` wrote.

        Raises
        ------
        PgOutputError
            `text` is something else, or of another format version.
        """
        try:
            content = json.loads(text)
            version = content["format_version"]
            if type(version) is int and version == FORMAT_VERSION:
                return cls._of(map(_catalog_type, content["types"]))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise PgOutputError(
                f"this is not a catalogue of types ({type(error).__name__}: {error})",
                code="damaged",
                hint="Write it again with TypeRegistry.to_json",
            ) from error
        raise PgOutputError(
            f"the format version of the catalogue of types is {version!r}, this version of "
            f"pgoutput_fast reads {FORMAT_VERSION}; update pgoutput_fast",
            code="not_supported",
        )

    def known(self, oid: int, modifier: int = -1) -> ColumnType:
        """Return the type of an OID, from the table or the catalogue; its kind may be "unknown"."""
        found = self._known.get((oid, modifier))
        if found is None:
            found = self._known[oid, modifier] = self._resolve(oid, modifier)
        return found

    def _resolve(self, oid: int, modifier: int) -> ColumnType:
        builtin = builtin_type(oid, modifier, self)
        if builtin is not None:
            return builtin
        entry = self._catalog.get(oid)
        if entry is None:
            return ColumnType("unknown", oid, modifier=modifier, registered=self.find(oid, "", ""))
        registered = self.find(oid, entry.namespace, entry.name)
        named = ColumnType(
            "unknown", oid, entry.namespace, entry.name, modifier=modifier, registered=registered
        )
        if oid in self._too_deep:
            return named
        if entry.kind == "d":
            base = self.known(entry.element, modifier if entry.modifier < 0 else entry.modifier)
            return base._replace(oid=oid, registered=registered or base.registered)
        if entry.kind == "e":
            return named._replace(kind="enum", labels=entry.labels)
        if entry.kind == "c":
            fields = tuple((name, self.known(*field)) for name, *field in entry.fields)
            return named._replace(kind="composite", fields=fields)
        if entry.kind in _ELEMENT_KINDS:
            return named._replace(
                kind=_ELEMENT_KINDS[entry.kind], element=self.known(entry.element)
            )
        if entry.element:
            return named._replace(
                kind="array",
                element=self.known(entry.element, modifier),
                delimiter=self._delimiter(entry.element),
            )
        extension = EXTENSION_BY_NAME.get(entry.name)
        if extension is not None and extension.extension == entry.extension:
            return named._replace(kind="base", entry=extension)
        return named

    def _delimiter(self, oid: int) -> str:
        """The character between values of the type in the text of an array."""
        entry = self._catalog.get(oid) or BY_OID.get(oid)
        return entry.delimiter if entry is not None else ","

    def base_name(self, oid: int) -> tuple[str, str] | None:
        """Return the namespace and name for a Type message: for a domain its base type's.

        None if the type is neither in the catalogue nor in the table.
        """
        entry = self._catalog.get(oid)
        while entry is not None and entry.kind == "d" and oid not in self._too_deep:
            oid = entry.element
            entry = self._catalog.get(oid)
        if entry is not None:
            return entry.namespace, entry.name
        builtin = builtin_type(oid, -1, None)
        return None if builtin is None else (builtin.namespace, builtin.name)

    def __getstate__(self) -> dict[str, Any]:
        return {"_registered": self._registered, "_catalog": self._catalog}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._changed()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TypeRegistry):
            return NotImplemented
        return self._registered == other._registered and self._catalog == other._catalog

    __hash__ = None  # type: ignore[assignment]  # registries can be changed

    def __repr__(self) -> str:
        registered = ", ".join(sorted(map(str, self._registered)))
        return f"<TypeRegistry: {len(self._catalog)} types of a catalogue, registered: " + (
            f"{registered}>" if registered else "none>"
        )


FORMAT_VERSION = 1

MOST_NESTED = 32
"""The most levels of types within a type, domains included; a type with more is unknown."""

MOST_PARTS = 100_000
"""The most parts of a type at all its levels together; a type with more is unknown.

The parts of a range count twice, as columns have both bounds."""

_ELEMENT_KINDS = {"r": "range", "m": "multirange"}

_CATALOG_QUERY = """
WITH RECURSIVE wanted(oid) AS (
    SELECT t.oid
    FROM pg_catalog.pg_type AS t
    LEFT JOIN pg_catalog.pg_type AS e ON e.oid = t.typelem AND e.typarray = t.oid
    LEFT JOIN pg_catalog.pg_class AS c
        ON c.oid = CASE WHEN t.typrelid <> 0 THEN t.typrelid ELSE e.typrelid END
    WHERE t.oid >= 10000 AND (c.oid IS NULL OR c.relkind = 'c')
  UNION
    SELECT a.atttypid
    FROM pg_catalog.pg_attribute AS a
    WHERE a.attrelid >= 16384 AND a.attnum > 0 AND NOT a.attisdropped AND a.atttypid >= 10000
  UNION
    SELECT part.oid
    FROM wanted AS w
    JOIN pg_catalog.pg_type AS t ON t.oid = w.oid
    LEFT JOIN pg_catalog.pg_range AS r ON t.oid IN (r.rngtypid, r.rngmultitypid)
    CROSS JOIN LATERAL (
        SELECT unnest(ARRAY[t.typelem, t.typbasetype, r.rngsubtype, r.rngtypid])
        UNION ALL
        SELECT a.atttypid
        FROM pg_catalog.pg_attribute AS a
        WHERE t.typrelid <> 0 AND a.attrelid = t.typrelid AND a.attnum > 0 AND NOT a.attisdropped
    ) AS part(oid)
    WHERE part.oid >= 10000
)
SELECT pg_catalog.json_build_object(
    'oid', t.oid::bigint,
    'namespace', n.nspname,
    'name', t.typname,
    'kind', t.typtype,
    'element', CASE t.typtype
        WHEN 'd' THEN t.typbasetype
        WHEN 'r' THEN r.rngsubtype
        WHEN 'm' THEN r.rngtypid
        ELSE coalesce(e.oid, 0)
    END::bigint,
    'modifier', t.typtypmod,
    'delimiter', t.typdelim,
    'extension', coalesce(x.extname, ''),
    'labels', coalesce((
        SELECT pg_catalog.json_agg(l.enumlabel ORDER BY l.enumsortorder)
        FROM pg_catalog.pg_enum AS l
        WHERE l.enumtypid = t.oid
    ), '[]'),
    'fields', coalesce((
        SELECT pg_catalog.json_agg(
            pg_catalog.json_build_array(a.attname, a.atttypid::bigint, a.atttypmod)
            ORDER BY a.attnum
        )
        FROM pg_catalog.pg_attribute AS a
        WHERE t.typrelid <> 0 AND a.attrelid = t.typrelid AND a.attnum > 0 AND NOT a.attisdropped
    ), '[]')
)::text
FROM wanted AS w
JOIN pg_catalog.pg_type AS t ON t.oid = w.oid
JOIN pg_catalog.pg_namespace AS n ON n.oid = t.typnamespace
LEFT JOIN pg_catalog.pg_type AS e ON e.oid = t.typelem AND e.typarray = t.oid
LEFT JOIN pg_catalog.pg_range AS r ON t.oid IN (r.rngtypid, r.rngmultitypid)
LEFT JOIN pg_catalog.pg_depend AS d
    ON d.classid = 'pg_catalog.pg_type'::regclass AND d.objid = t.oid AND d.deptype = 'e'
    AND d.refclassid = 'pg_catalog.pg_extension'::regclass
LEFT JOIN pg_catalog.pg_extension AS x ON x.oid = d.refobjid
WHERE t.typtype IN ('b', 'c', 'd', 'e', 'r', 'm') AND t.typisdefined
"""


def _catalog_type(fields: Any) -> CatalogType:
    """Make a type from JSON. Raises a ValueError, KeyError or TypeError if it is malformed."""
    if not isinstance(fields["labels"], list) or not isinstance(fields["fields"], list):
        raise TypeError("labels and fields are lists")
    made = CatalogType(
        **{
            **fields,
            "labels": tuple(fields["labels"]),
            "fields": tuple((name, oid, modifier) for name, oid, modifier in fields["fields"]),
        }
    )
    numbers = [made.oid, made.element, made.modifier]
    strings = [made.namespace, made.name, made.kind, made.delimiter, made.extension, *made.labels]
    for name, oid, modifier in made.fields:
        numbers += [oid, modifier]
        strings.append(name)
    if not all(type(number) is int and -1 <= number < 1 << 32 for number in numbers):
        raise ValueError(f"an OID or modifier of type {made.name!r} is no 32-bit integer")
    if not all(isinstance(string, str) for string in strings):
        raise ValueError(f"a name, label or other text of type {made.name!r} is no string")
    if made.kind not in ("b", "c", "d", "e", "r", "m"):
        raise ValueError(f"type {made.name!r} is of kind {made.kind!r}")
    if len(made.delimiter) != 1 or not made.delimiter.isascii() or made.delimiter in '"\\{}':
        raise ValueError(f"type {made.name!r} has the delimiter {made.delimiter!r}")
    return made


def _too_deep(catalog: Mapping[int, CatalogType]) -> frozenset[int]:
    """OIDs of types that contain themselves or exceed the limits, and of types that contain them.

    With these left out, the work for any type is bounded, even if the catalogue is hostile.
    """
    endless = MOST_NESTED + 1, 0
    measured: dict[int, tuple[int, int]] = {}  # levels and parts of a type
    for first in catalog:
        waiting = [first]
        entered: set[int] = set()
        while waiting:
            oid = waiting[-1]
            entry = catalog[oid]
            parts = [
                part for part in (entry.element, *(f[1] for f in entry.fields)) if part in catalog
            ]
            missing = [part for part in parts if part not in measured]
            if missing and oid not in entered:
                entered.add(oid)
                waiting += missing
                continue
            waiting.pop()
            if missing:  # the type contains itself
                measured[oid] = endless
                continue
            below = [measured[part] for part in parts]
            levels = 1 + max((levels for levels, _ in below), default=0)
            count = 1 + len(entry.fields) + sum(count for _, count in below)
            if entry.kind == "r":
                count *= 2  # columns have the subtype twice, for the lower and the upper bound
            fits = levels <= MOST_NESTED and count <= MOST_PARTS
            measured[oid] = (levels, count) if fits else endless
    return frozenset(oid for oid, size in measured.items() if size == endless)
