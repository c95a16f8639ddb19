"""The one table of types, and how the type of a column is found.

Everything that treats a type specially reads it here: the decoders of both implementations (through
:mod:`pgoutput_fast.plan`), the columns, the Spark reader, the documentation. Built-in types are
found by OID; a user's type by its Type message, which names the base type, and wholly by a
catalogue (:class:`TypeRegistry`), where there is one. A type that is found in none of them is str
from text and bytes from binary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .errors import PgOutputError

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
    arrow, spark : str
        The column's type as Arrow and Spark SQL write it. Ask :func:`arrow_type` and
        :func:`spark_type`: a numeric's depends on its modifier, a range's on its subtype.
    policies : tuple of str
        The fields of :class:`Policies` that have a say in its values.
    element : int
        OID of the subtype of a range, of the range of a multirange, of a vector's elements.
    delimiter : str
        What stands between the elements of its arrays in text.
    """

    oid: int
    name: str
    array_oid: int
    category: str
    codec: str
    arrow: str
    spark: str
    policies: tuple[str, ...] = ()
    element: int = 0
    delimiter: str = ","


BUILTIN_TYPES: tuple[PgType, ...] = (
    PgType(16, "bool", 1000, "B", "bool", "bool", "boolean"),
    PgType(17, "bytea", 1001, "U", "bytea", "binary", "binary"),
    PgType(18, "char", 1002, "Z", "char", "utf8", "string"),
    PgType(19, "name", 1003, "S", "text", "utf8", "string"),
    PgType(20, "int8", 1016, "N", "int8", "int64", "bigint"),
    PgType(21, "int2", 1005, "N", "int2", "int16", "smallint"),
    PgType(22, "int2vector", 1006, "A", "vector", "list", "array", element=21),
    PgType(23, "int4", 1007, "N", "int4", "int32", "int"),
    PgType(24, "regproc", 1008, "N", "reg", "utf8", "string"),
    PgType(25, "text", 1009, "S", "text", "utf8", "string"),
    PgType(26, "oid", 1028, "N", "uint4", "uint32", "bigint"),
    PgType(27, "tid", 1010, "U", "tid", "utf8", "string"),
    PgType(28, "xid", 1011, "U", "uint4", "uint32", "bigint"),
    PgType(29, "cid", 1012, "U", "uint4", "uint32", "bigint"),
    PgType(30, "oidvector", 1013, "A", "vector", "list", "array", element=26),
    PgType(114, "json", 199, "U", "json", "arrow.json", "string", policies=("json",)),
    PgType(142, "xml", 143, "U", "text", "utf8", "string"),
    PgType(194, "pg_node_tree", 0, "Z", "other", "", ""),
    PgType(600, "point", 1017, "G", "point", "utf8", "string"),
    PgType(601, "lseg", 1018, "G", "lseg", "utf8", "string"),
    PgType(602, "path", 1019, "G", "path", "utf8", "string"),
    PgType(603, "box", 1020, "G", "box", "utf8", "string", delimiter=";"),
    PgType(604, "polygon", 1027, "G", "polygon", "utf8", "string"),
    PgType(628, "line", 629, "G", "line", "utf8", "string"),
    PgType(650, "cidr", 651, "I", "cidr", "utf8", "string"),
    PgType(700, "float4", 1021, "N", "float4", "float32", "float"),
    PgType(701, "float8", 1022, "N", "float8", "float64", "double"),
    PgType(705, "unknown", 0, "X", "text", "utf8", "string"),
    PgType(718, "circle", 719, "G", "circle", "utf8", "string"),
    PgType(774, "macaddr8", 775, "U", "macaddr8", "utf8", "string"),
    PgType(790, "money", 791, "N", "money", "utf8", "string"),
    PgType(829, "macaddr", 1040, "U", "macaddr", "utf8", "string"),
    PgType(869, "inet", 1041, "I", "inet", "utf8", "string"),
    PgType(1033, "aclitem", 1034, "U", "aclitem", "utf8", "string"),
    PgType(1042, "bpchar", 1014, "S", "text", "utf8", "string"),
    PgType(1043, "varchar", 1015, "S", "text", "utf8", "string"),
    PgType(
        1082, "date", 1182, "D", "date", "date32", "date", policies=("infinity", "out_of_range")
    ),
    PgType(1083, "time", 1183, "D", "time", "time64[us]", "time", policies=("out_of_range",)),
    PgType(
        1114,
        "timestamp",
        1115,
        "D",
        "timestamp",
        "timestamp[us]",
        "timestamp_ntz",
        policies=("infinity", "out_of_range"),
    ),
    PgType(
        1184,
        "timestamptz",
        1185,
        "D",
        "timestamptz",
        "timestamp[us, UTC]",
        "timestamp",
        policies=("infinity", "out_of_range"),
    ),
    PgType(
        1186,
        "interval",
        1187,
        "T",
        "interval",
        "month_day_nano_interval",
        "string",
        policies=("infinity", "out_of_range"),
    ),
    PgType(1266, "timetz", 1270, "D", "timetz", "utf8", "string", policies=("out_of_range",)),
    PgType(1560, "bit", 1561, "V", "bit", "utf8", "string"),
    PgType(1562, "varbit", 1563, "V", "varbit", "utf8", "string"),
    PgType(
        1700,
        "numeric",
        1231,
        "N",
        "numeric",
        "decimal128",
        "decimal",
        policies=("special_values", "numeric"),
    ),
    PgType(1790, "refcursor", 2201, "U", "text", "utf8", "string"),
    PgType(2202, "regprocedure", 2207, "N", "reg", "utf8", "string"),
    PgType(2203, "regoper", 2208, "N", "reg", "utf8", "string"),
    PgType(2204, "regoperator", 2209, "N", "reg", "utf8", "string"),
    PgType(2205, "regclass", 2210, "N", "reg", "utf8", "string"),
    PgType(2206, "regtype", 2211, "N", "reg", "utf8", "string"),
    PgType(2950, "uuid", 2951, "U", "uuid", "arrow.uuid", "string"),
    PgType(2970, "txid_snapshot", 2949, "U", "snapshot", "utf8", "string"),
    PgType(3220, "pg_lsn", 3221, "U", "pg_lsn", "utf8", "string"),
    PgType(3361, "pg_ndistinct", 0, "Z", "other", "", ""),
    PgType(3402, "pg_dependencies", 0, "Z", "other", "", ""),
    PgType(3614, "tsvector", 3643, "U", "tsvector", "utf8", "string"),
    PgType(3615, "tsquery", 3645, "U", "tsquery", "utf8", "string"),
    PgType(3642, "gtsvector", 3644, "U", "other", "", ""),
    PgType(3734, "regconfig", 3735, "N", "reg", "utf8", "string"),
    PgType(3769, "regdictionary", 3770, "N", "reg", "utf8", "string"),
    PgType(3802, "jsonb", 3807, "U", "jsonb", "arrow.json", "string", policies=("json",)),
    PgType(3904, "int4range", 3905, "R", "range", "struct", "struct", element=23),
    PgType(3906, "numrange", 3907, "R", "range", "struct", "struct", element=1700),
    PgType(3908, "tsrange", 3909, "R", "range", "struct", "struct", element=1114),
    PgType(3910, "tstzrange", 3911, "R", "range", "struct", "struct", element=1184),
    PgType(3912, "daterange", 3913, "R", "range", "struct", "struct", element=1082),
    PgType(3926, "int8range", 3927, "R", "range", "struct", "struct", element=20),
    PgType(4072, "jsonpath", 4073, "U", "jsonpath", "utf8", "string"),
    PgType(4089, "regnamespace", 4090, "N", "reg", "utf8", "string"),
    PgType(4096, "regrole", 4097, "N", "reg", "utf8", "string"),
    PgType(4191, "regcollation", 4192, "N", "reg", "utf8", "string"),
    PgType(4451, "int4multirange", 6150, "R", "multirange", "list", "array", element=3904),
    PgType(4532, "nummultirange", 6151, "R", "multirange", "list", "array", element=3906),
    PgType(4533, "tsmultirange", 6152, "R", "multirange", "list", "array", element=3908),
    PgType(4534, "tstzmultirange", 6153, "R", "multirange", "list", "array", element=3910),
    PgType(4535, "datemultirange", 6155, "R", "multirange", "list", "array", element=3912),
    PgType(4536, "int8multirange", 6157, "R", "multirange", "list", "array", element=3926),
    PgType(4600, "pg_brin_bloom_summary", 0, "Z", "other", "", ""),
    PgType(4601, "pg_brin_minmax_multi_summary", 0, "Z", "other", "", ""),
    PgType(5017, "pg_mcv_list", 0, "Z", "other", "", ""),
    PgType(5038, "pg_snapshot", 5039, "U", "snapshot", "utf8", "string"),
    PgType(5069, "xid8", 271, "U", "uint8", "uint64", "decimal(20,0)"),
)
"""Every type that a server is born with, but pseudo-types and the rows of system catalogues."""

EXTENSION_TYPES: tuple[PgType, ...] = (
    PgType(0, "citext", 0, "S", "text", "utf8", "string"),
    PgType(0, "hstore", 0, "U", "hstore", "map<utf8, utf8>", "map<string,string>"),
    PgType(0, "ltree", 0, "U", "versioned_text", "utf8", "string"),
    PgType(0, "lquery", 0, "U", "versioned_text", "utf8", "string"),
    PgType(0, "ltxtquery", 0, "U", "versioned_text", "utf8", "string"),
    PgType(0, "cube", 0, "U", "cube", "utf8", "string"),
    PgType(0, "vector", 0, "U", "pgvector", "list<float32>", "array<float>"),
    PgType(0, "halfvec", 0, "U", "halfvec", "list<float32>", "array<float>"),
    PgType(0, "sparsevec", 0, "U", "sparsevec", "struct", "struct"),
    PgType(0, "geometry", 0, "U", "ewkb", "geoarrow.wkb", "binary"),
    PgType(0, "geography", 0, "U", "ewkb", "geoarrow.wkb", "binary"),
)
"""Types of extensions, found by name: their OIDs differ from database to database."""

_BY_OID: dict[int, PgType] = {entry.oid: entry for entry in BUILTIN_TYPES}
_BY_ARRAY_OID: dict[int, PgType] = {e.array_oid: e for e in BUILTIN_TYPES if e.array_oid}
_BY_NAME: dict[str, PgType] = {entry.name: entry for entry in BUILTIN_TYPES}
_EXTENSION: dict[str, PgType] = {entry.name: entry for entry in EXTENSION_TYPES}

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


@dataclass(frozen=True, slots=True)
class ColumnType:
    """The type of a column, or of a part of one: a tree, of which the plan of a relation is made.

    Attributes
    ----------
    kind : {"base", "array", "vector", "range", "multirange", "composite", "enum", "unknown"}
        Domains are not among them: they look like what they are made of.
    oid : int
    namespace, name : str
        As the catalogue or the Type message says; "" where neither did.
    entry : PgType or None
        The table's row; None for arrays, composites, enums, users' ranges and unknown types.
    modifier : int
        ``atttypmod``, or a domain's ``typtypmod``; -1 for none.
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


@dataclass(frozen=True, slots=True)
class CatalogType:
    """A type as ``pg_type`` and its neighbours describe it.

    Attributes
    ----------
    oid : int
    namespace, name : str
    kind : {"b", "c", "d", "e", "r", "m"}
        ``typtype``: base, composite, domain, enum, range, multirange.
    element : int
        OID of an array's elements, a range's subtype, a multirange's range, a domain's base type.
    modifier : int
        A domain's ``typtypmod``.
    delimiter : str
        ``typdelim``.
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


MOST_NESTED = 32
"""Levels of a type within a type that are followed; a catalogue's cycle ends here."""


def column_type(
    oid: int,
    modifier: int = -1,
    *,
    announced: tuple[str, str] | None = None,
    registry: TypeRegistry | None = None,
    depth: int = 0,
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

    Raises
    ------
    PgOutputError
        The catalogue nests types deeper than :data:`MOST_NESTED`.
    """
    raise NotImplementedError


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
