"""The one table of types, and how the type of a column is found.

Everything that treats a type specially reads it here: the decoders of both implementations (through
:mod:`pgoutput_fast.plan`), the columns, the Spark reader, the documentation. Built-in types are
found by OID; a user's type by its Type message, which names the base type, and wholly by a
catalogue (:class:`TypeRegistry`), where there is one. A type that is found in none of them is str
from text and bytes from binary.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from .errors import PgOutputError

if TYPE_CHECKING:
    from .columnar.layout import Field
    from .policies import Policies

Converter = Callable[[bytes], Any]


@dataclass(frozen=True, slots=True)
class PgType:
    """One row of the table: a type of which a value is not made of others, or a range of one.

    Attributes
    ----------
    oid : int
        ``pg_type.oid``; 0 for types of extensions, which have another in every database.
    name : str
        ``pg_type.typname``.
    array_oid : int
        OID of the type of its arrays, 0 where there is none.
    category : str
        ``pg_type.typcategory`` of PostgreSQL 16 and later.
    codec : str
        Which functions read it, a key of :data:`pgoutput_fast.values.CODECS`; "range",
        "multirange", "vector" and "other" are no scalars.
    policies : tuple of str
        The fields of :class:`Policies` that have a say in its values.
    element : int
        OID of the subtype of a range, of the range of a multirange, of a vector's elements.
    delimiter : str
        What stands between the elements of its arrays in text.
    extension : str
        The extension that makes it, "" for built-in types.
    """

    oid: int
    name: str
    array_oid: int
    category: str
    codec: str
    policies: tuple[str, ...] = ()
    element: int = 0
    delimiter: str = ","
    extension: str = ""


BUILTIN_TYPES: tuple[PgType, ...] = (
    PgType(16, "bool", 1000, "B", "bool"),
    PgType(17, "bytea", 1001, "U", "bytea"),
    PgType(18, "char", 1002, "Z", "char"),
    PgType(19, "name", 1003, "S", "text"),
    PgType(20, "int8", 1016, "N", "int8"),
    PgType(21, "int2", 1005, "N", "int2"),
    PgType(22, "int2vector", 1006, "A", "vector", element=21),
    PgType(23, "int4", 1007, "N", "int4"),
    PgType(24, "regproc", 1008, "N", "reg"),
    PgType(25, "text", 1009, "S", "text"),
    PgType(26, "oid", 1028, "N", "uint4"),
    PgType(27, "tid", 1010, "U", "tid"),
    PgType(28, "xid", 1011, "U", "uint4"),
    PgType(29, "cid", 1012, "U", "uint4"),
    PgType(30, "oidvector", 1013, "A", "vector", element=26),
    PgType(114, "json", 199, "U", "json", policies=("json",)),
    PgType(142, "xml", 143, "U", "xml"),
    PgType(194, "pg_node_tree", 0, "Z", "other"),
    PgType(600, "point", 1017, "G", "point"),
    PgType(601, "lseg", 1018, "G", "lseg"),
    PgType(602, "path", 1019, "G", "path"),
    PgType(603, "box", 1020, "G", "box", delimiter=";"),
    PgType(604, "polygon", 1027, "G", "polygon"),
    PgType(628, "line", 629, "G", "line"),
    PgType(650, "cidr", 651, "I", "cidr"),
    PgType(700, "float4", 1021, "N", "float4"),
    PgType(701, "float8", 1022, "N", "float8"),
    PgType(705, "unknown", 0, "X", "text"),
    PgType(718, "circle", 719, "G", "circle"),
    PgType(774, "macaddr8", 775, "U", "macaddr8"),
    PgType(790, "money", 791, "N", "money"),
    PgType(829, "macaddr", 1040, "U", "macaddr"),
    PgType(869, "inet", 1041, "I", "inet"),
    PgType(1033, "aclitem", 1034, "U", "aclitem"),
    PgType(1042, "bpchar", 1014, "S", "text"),
    PgType(1043, "varchar", 1015, "S", "text"),
    PgType(1082, "date", 1182, "D", "date", policies=("infinity", "out_of_range")),
    PgType(1083, "time", 1183, "D", "time", policies=("out_of_range",)),
    PgType(1114, "timestamp", 1115, "D", "timestamp", policies=("infinity", "out_of_range")),
    PgType(1184, "timestamptz", 1185, "D", "timestamptz", policies=("infinity", "out_of_range")),
    PgType(1186, "interval", 1187, "T", "interval", policies=("infinity", "out_of_range")),
    PgType(1266, "timetz", 1270, "D", "timetz", policies=("out_of_range",)),
    PgType(1560, "bit", 1561, "V", "bit"),
    PgType(1562, "varbit", 1563, "V", "varbit"),
    PgType(1700, "numeric", 1231, "N", "numeric", policies=("special_values", "numeric")),
    PgType(1790, "refcursor", 2201, "U", "text"),
    PgType(2202, "regprocedure", 2207, "N", "reg"),
    PgType(2203, "regoper", 2208, "N", "reg"),
    PgType(2204, "regoperator", 2209, "N", "reg"),
    PgType(2205, "regclass", 2210, "N", "reg"),
    PgType(2206, "regtype", 2211, "N", "reg"),
    PgType(2950, "uuid", 2951, "U", "uuid"),
    PgType(2970, "txid_snapshot", 2949, "U", "snapshot"),
    PgType(3220, "pg_lsn", 3221, "U", "pg_lsn"),
    PgType(3361, "pg_ndistinct", 0, "Z", "other"),
    PgType(3402, "pg_dependencies", 0, "Z", "other"),
    PgType(3614, "tsvector", 3643, "U", "tsvector"),
    PgType(3615, "tsquery", 3645, "U", "tsquery"),
    PgType(3642, "gtsvector", 3644, "U", "other"),
    PgType(3734, "regconfig", 3735, "N", "reg"),
    PgType(3769, "regdictionary", 3770, "N", "reg"),
    PgType(3802, "jsonb", 3807, "U", "jsonb", policies=("json",)),
    PgType(3904, "int4range", 3905, "R", "range", element=23),
    PgType(3906, "numrange", 3907, "R", "range", element=1700),
    PgType(3908, "tsrange", 3909, "R", "range", element=1114),
    PgType(3910, "tstzrange", 3911, "R", "range", element=1184),
    PgType(3912, "daterange", 3913, "R", "range", element=1082),
    PgType(3926, "int8range", 3927, "R", "range", element=20),
    PgType(4072, "jsonpath", 4073, "U", "jsonpath"),
    PgType(4089, "regnamespace", 4090, "N", "reg"),
    PgType(4096, "regrole", 4097, "N", "reg"),
    PgType(4191, "regcollation", 4192, "N", "reg"),
    PgType(4451, "int4multirange", 6150, "R", "multirange", element=3904),
    PgType(4532, "nummultirange", 6151, "R", "multirange", element=3906),
    PgType(4533, "tsmultirange", 6152, "R", "multirange", element=3908),
    PgType(4534, "tstzmultirange", 6153, "R", "multirange", element=3910),
    PgType(4535, "datemultirange", 6155, "R", "multirange", element=3912),
    PgType(4536, "int8multirange", 6157, "R", "multirange", element=3926),
    PgType(4600, "pg_brin_bloom_summary", 0, "Z", "other"),
    PgType(4601, "pg_brin_minmax_multi_summary", 0, "Z", "other"),
    PgType(5017, "pg_mcv_list", 0, "Z", "other"),
    PgType(5038, "pg_snapshot", 5039, "U", "snapshot"),
    PgType(5069, "xid8", 271, "U", "uint8"),
)
"""Every type that a server is born with, but pseudo-types and the rows of system catalogues."""

EXTENSION_TYPES: tuple[PgType, ...] = (
    PgType(0, "citext", 0, "S", "text", extension="citext"),
    PgType(0, "hstore", 0, "U", "hstore", extension="hstore"),
    PgType(0, "ltree", 0, "U", "versioned_text", extension="ltree"),
    PgType(0, "lquery", 0, "U", "versioned_text", extension="ltree"),
    PgType(0, "ltxtquery", 0, "U", "versioned_text", extension="ltree"),
    PgType(0, "cube", 0, "U", "cube", extension="cube"),
    PgType(0, "vector", 0, "U", "pgvector", extension="vector"),
    PgType(0, "halfvec", 0, "U", "halfvec", extension="vector"),
    PgType(0, "sparsevec", 0, "U", "sparsevec", extension="vector"),
    PgType(0, "geometry", 0, "U", "ewkb", delimiter=":", extension="postgis"),
    PgType(0, "geography", 0, "U", "ewkb", delimiter=":", extension="postgis"),
)
"""Types of extensions, found by name: their OIDs differ from database to database."""

_BY_OID: dict[int, PgType] = {entry.oid: entry for entry in BUILTIN_TYPES}
_BY_ARRAY_OID: dict[int, PgType] = {e.array_oid: e for e in BUILTIN_TYPES if e.array_oid}
_BY_NAME: dict[str, PgType] = {entry.name: entry for entry in BUILTIN_TYPES}
_EXTENSION: dict[str, PgType] = {entry.name: entry for entry in EXTENSION_TYPES}


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
class CatalogType:
    """A type as ``pg_type`` and its neighbours describe it.

    Attributes
    ----------
    oid : int
    namespace, name : str
    kind : {"b", "c", "d", "e", "r", "m"}
        ``typtype``: base, composite, domain, enum, range, multirange. An array is a base type that
        has an element.
    element : int
        OID of an array's elements, a range's subtype, a multirange's range, a domain's base type;
        0 for none.
    modifier : int
        A domain's ``typtypmod``, -1 for none.
    delimiter : str
        ``typdelim``: what stands between values of the type in the text of an array.
    extension : str
        The extension that made it, "" for none.
    labels : tuple of str
        An enum's, in ``enumsortorder``.
    fields : tuple of (str, int, int)
        A composite's: name, type OID and modifier of each that is not dropped.
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


class TypeRegistry:
    """What is known of users' types: decoders for them, and what the catalogue says of them.

    >>> registry = TypeRegistry()
    >>> registry.register("complex", text=lambda raw: complex(raw.decode()))

    The catalogue is as of one moment. A stream never tells that a type was altered, so what is
    found then depends on what was done:

    - a label that was added to an enum, or renamed, is the str that it is;
    - a domain keeps its base type; what was altered of it says nothing of how values are read;
    - a composite that has another number of fields, and in binary format any field or element of
      another type, is an error that says to look the types up again (:meth:`update_from`);
    - a type that the stream calls by another name than the catalogue, or whose OID it does not know
      (one that was dropped and made again), may be another type, of which only the name is known:
      without more, its values are str from text and bytes from binary. A type that was renamed is
      such a one, as the stream goes on with its old name.

    One thing nothing shows: a field of a composite that was renamed, or that was dropped while
    another one was added (in binary format, another one of the same type). The values are then
    those of the fields in their order, under names of before. Whoever alters composites so should
    call :meth:`update_from` after it, and before values of the new form are read; it says which
    types were altered. Or leave the catalogue away: without one, composites are text.
    """

    def __init__(self) -> None:
        self._registered: dict[int | str, RegisteredType] = {}
        self._catalog: dict[int, CatalogType] = {}
        self._changed()

    def _changed(self) -> None:
        self._version = getattr(self, "_version", 0) + 1
        self._known: dict[tuple[int, int], ColumnType] = {}
        self._too_deep = _too_deep(self._catalog)

    @property
    def version(self) -> int:
        """Grows with every change, for whoever keeps what was found."""
        return self._version

    @property
    def catalog(self) -> Mapping[int, CatalogType]:
        """What the catalogue says, by OID; empty where none was read."""
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

        It counts for domains over the type too, and for arrays, composites and ranges of it where
        the catalogue tells of them. Register a built-in type before its values are decoded: a
        relation's decoders of those are found once.

        Parameters
        ----------
        type : int or str
            An OID, or a type's name as the server's Type message gives it, ``name`` or
            ``schema.name``. An OID goes before a qualified name, that before a bare one.
        text, binary : callable, optional
            A ValueError that one raises becomes a :class:`DecodeError` that names the column.
        arrow : str or pyarrow.DataType, optional
            The type that values have in columns, an alias as pyarrow knows it; columns ask pyarrow
            for it. Without, the functions are not for columns, which have what they would have
            without them.

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
            raise PgOutputError(f"register({type!r}): no type has that OID or name")
        if text is None and binary is None:
            raise PgOutputError(f"register({type!r}) needs text= or binary=")
        for function in (text, binary):
            if function is not None and not callable(function):
                raise TypeError(f"register({type!r}): {function!r} is not callable")
        self._registered[type] = RegisteredType(text, binary, arrow)
        self._changed()

    def find(self, oid: int, namespace: str, name: str) -> RegisteredType | None:
        """What is registered for a type; `namespace` "" is pg_catalog, as in Type messages."""
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
            To the database of the replication slot, not a replication connection. Its transaction,
            if one is open, goes on; else there is none afterwards.

        Returns
        -------
        TypeRegistry
            Types of users and extensions; of tables' row types those that a column has.

        Raises
        ------
        psycopg.Error
            As the connection raises it.
        TypeError
            `connection` is something else, a psycopg.AsyncConnection too.
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
        # In SQL_ASCII psycopg gives bytes.
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
        """Look the catalogue up again; decoders that use this registry see it at once.

        Types that are no more are kept: frames from before they were dropped may still come. For
        parameters and errors see :meth:`from_connection`.

        Returns
        -------
        tuple of CatalogType
            The types that were altered since, as they are now, without those that are new. What was
            read of them before, with the names of before, may want another look.
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
        """Take in what `other` has; where both know a type, `other` counts. Returns self."""
        self._catalog = {**self._catalog, **other._catalog}
        self._registered.update(other._registered)
        self._changed()
        return self

    def to_json(self) -> str:
        """The catalogue as JSON, which :meth:`from_json` reads. Functions are not in it."""
        types = [dataclasses.asdict(self._catalog[oid]) for oid in sorted(self._catalog)]
        return json.dumps({"format_version": FORMAT_VERSION, "types": types})

    @classmethod
    def from_json(cls, text: str | bytes) -> TypeRegistry:
        """Read what :meth:`to_json` wrote.

        Raises
        ------
        PgOutputError
            It is something else, or of a newer format version.
        """
        try:
            content = json.loads(text)
            version = content["format_version"]
            if type(version) is int and version == FORMAT_VERSION:
                return cls._of(map(_catalog_type, content["types"]))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise PgOutputError(
                f"this is no catalogue of types ({type(error).__name__}: {error}); "
                "write it anew with TypeRegistry.to_json"
            ) from error
        raise PgOutputError(
            f"the format version of the catalogue of types is {version!r}, this version of "
            f"pgoutput_fast reads {FORMAT_VERSION}; update pgoutput_fast"
        )

    def known(self, oid: int, modifier: int = -1) -> ColumnType:
        """The type of an OID by the table and the catalogue, of kind "unknown" if in neither."""
        found = self._known.get((oid, modifier))
        if found is None:
            found = self._known[oid, modifier] = self._resolve(oid, modifier)
        return found

    def _resolve(self, oid: int, modifier: int) -> ColumnType:
        builtin = _builtin(oid, modifier, self)
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
            return replace(base, oid=oid, registered=registered or base.registered)
        if entry.kind == "e":
            return replace(named, kind="enum", labels=entry.labels)
        if entry.kind == "c":
            fields = tuple((name, self.known(*field)) for name, *field in entry.fields)
            return replace(named, kind="composite", fields=fields)
        if entry.kind in _ELEMENT_KINDS:
            return replace(
                named, kind=_ELEMENT_KINDS[entry.kind], element=self.known(entry.element)
            )
        if entry.element:
            return replace(
                named,
                kind="array",
                element=self.known(entry.element, modifier),
                delimiter=self._delimiter(entry.element),
            )
        extension = _EXTENSION.get(entry.name)
        if extension is not None and extension.extension == entry.extension:
            return replace(named, kind="base", entry=extension)
        return named

    def _delimiter(self, oid: int) -> str:
        """What stands between values of the type in an array."""
        entry = self._catalog.get(oid) or _BY_OID.get(oid)
        return entry.delimiter if entry is not None else ","

    def base_name(self, oid: int) -> tuple[str, str] | None:
        """Namespace and name that a Type message has by the catalogue: a domain's base type's."""
        entry = self._catalog.get(oid)
        while entry is not None and entry.kind == "d" and oid not in self._too_deep:
            oid = entry.element
            entry = self._catalog.get(oid)
        if entry is not None:
            return entry.namespace, entry.name
        builtin = _builtin(oid, -1, None)
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

    __hash__ = None  # type: ignore[assignment]  # it changes

    def __repr__(self) -> str:
        registered = ", ".join(sorted(map(str, self._registered)))
        return f"<TypeRegistry: {len(self._catalog)} types of a catalogue, registered: " + (
            f"{registered}>" if registered else "none>"
        )


FORMAT_VERSION = 1

MOST_NESTED = 32
"""Levels of a type within a type, domains included; a type that has more is unknown."""

MOST_PARTS = 100_000
"""Types that one type is made of at all its levels, a range's twice; one of more is unknown."""

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
    """A type as JSON has it, checked; ValueError, KeyError or TypeError if it is none."""
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
        raise ValueError(f"type {made.name!r} has something for a number that is none")
    if not all(isinstance(string, str) for string in strings):
        raise ValueError(f"type {made.name!r} has something for a string that is none")
    if made.kind not in ("b", "c", "d", "e", "r", "m"):
        raise ValueError(f"type {made.name!r} is of kind {made.kind!r}")
    if len(made.delimiter) != 1 or not made.delimiter.isascii() or made.delimiter in '"\\{}':
        raise ValueError(f"type {made.name!r} has the delimiter {made.delimiter!r}")
    return made


def _too_deep(catalog: Mapping[int, CatalogType]) -> frozenset[int]:
    """OIDs of the types that nest without end or past all use, and of what is made of them.

    Without them the work for a type has bounds, whoever wrote the catalogue.
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
            if missing:  # it is a part of itself
                measured[oid] = endless
                continue
            below = [measured[part] for part in parts]
            levels = 1 + max((levels for levels, _ in below), default=0)
            count = 1 + len(entry.fields) + sum(count for _, count in below)
            if entry.kind == "r":
                count *= 2  # columns have its subtype for either end
            fits = levels <= MOST_NESTED and count <= MOST_PARTS
            measured[oid] = (levels, count) if fits else endless
    return frozenset(oid for oid, size in measured.items() if size == endless)


def column_type(
    oid: int,
    modifier: int = -1,
    *,
    announced: tuple[str, str] | None = None,
    registry: TypeRegistry | None = None,
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
    builtin = _builtin(oid, modifier, registry)
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


def _builtin(oid: int, modifier: int, registry: TypeRegistry | None) -> ColumnType | None:
    """The type of an OID of the table, or of an array of one; None if it is in none."""
    entry = _BY_OID.get(oid)
    if entry is not None:
        registered = registry.find(oid, "pg_catalog", entry.name) if registry is not None else None
        return ColumnType(
            _BUILTIN_KINDS.get(entry.codec, "base"),
            oid,
            "pg_catalog",
            entry.name,
            entry,
            modifier,
            _builtin(entry.element, -1, registry) if entry.element else None,
            registered=registered,
        )
    entry = _BY_ARRAY_OID.get(oid)
    if entry is None:
        return None
    name = f"_{entry.name}"
    return ColumnType(
        "array",
        oid,
        "pg_catalog",
        name,
        modifier=modifier,
        element=_builtin(entry.oid, modifier, registry),
        delimiter=entry.delimiter,
        registered=registry.find(oid, "pg_catalog", name) if registry is not None else None,
    )


_BUILTIN_KINDS = {"range": "range", "multirange": "multirange", "vector": "vector"}


def _named(namespace: str, name: str, modifier: int, registry: TypeRegistry | None) -> ColumnType:
    """The type of a name, for which there is no catalogue; of kind "unknown" if none is known."""
    if namespace == "pg_catalog":
        entry = _BY_NAME.get(name)
        if entry is not None:
            found = _builtin(entry.oid, modifier, registry)
        else:
            entry = _BY_NAME.get(name[1:]) if name[:1] == "_" else None
            found = _builtin(entry.array_oid, modifier, registry) if entry is not None else None
        return found or ColumnType("unknown", 0, modifier=modifier)
    entry = _EXTENSION.get(name)
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
    if name[:1] == "_" and name[1:] in _EXTENSION:
        return ColumnType(
            "array",
            0,
            namespace,
            name,
            modifier=modifier,
            element=_named(namespace, name[1:], modifier, registry),
            delimiter=_EXTENSION[name[1:]].delimiter,
        )
    return ColumnType("unknown", 0, namespace, name, modifier=modifier)


def extension_by_name(type: ColumnType, registry: TypeRegistry | None) -> str:
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


def arrow_type(
    type: ColumnType,
    *,
    binary: bool = False,
    policies: Policies | None = None,
    target: str = "arrow",
) -> str:
    """The Arrow type of a column, as Arrow writes it; the name of an extension type alone.

    Parameters
    ----------
    type : ColumnType
    binary : bool
        Whether values come in binary format: those of unknown types are ``binary``, else ``utf8``.
    policies : Policies, optional
    target : {"arrow", "spark", "portable"}
        As of :class:`ColumnarDecoder`, whose columns have this type.

    Raises
    ------
    PgOutputError
        A type was registered with what is no Arrow type of a column, or there is no pyarrow to ask.
    """
    return _field(type, binary, policies, target).arrow_type


def spark_type(type: ColumnType, *, binary: bool = False, policies: Policies | None = None) -> str:
    """The Spark SQL type of a column that is decoded with ``target="spark"``.

    Parameters and errors are those of :func:`arrow_type`; an Arrow type that Spark does not have,
    with which a type was registered, is an error too.
    """
    return _field(type, binary, policies, "spark").spark_type


def _field(type: ColumnType, binary: bool, policies: Policies | None, target: str) -> Field:
    from .columnar.layout import field_of  # it is made of what is here
    from .plan import Settings

    settings = Settings() if policies is None else Settings(policies)
    found = field_of(type, settings, target)
    return found.in_binary() if binary else found
