"""The table of PostgreSQL's types: what the package knows of each, by its OID or its name.

It is used by all code that treats types differently: the decoders of both implementations, the
Arrow columns, the Spark reader, the documentation.
"""

from __future__ import annotations

from typing import NamedTuple


class PgType(NamedTuple):
    """One row of the table: a scalar type, or a built-in range, multirange or vector type.

    Attributes
    ----------
    oid : int
        ``pg_type.oid``; 0 for types of extensions, whose OIDs differ from database to database.
    name : str
        ``pg_type.typname``.
    array_oid : int
        OID of the type of its arrays; 0 if there is none.
    codec : str
        The functions that decode its values: a key of :data:`pgoutput_fast.values.CODECS`, or
        "range", "multirange", "vector" or "other", which have no entry there.
    policies : tuple of str
        The fields of :class:`Policies` that its values depend on.
    element : int
        OID of a range's subtype, of a multirange's range, or of a vector's elements; else 0.
    delimiter : str
        The character between the elements of its arrays in text format.
    extension : str
        The extension that creates the type; "" for built-in types.
    """

    oid: int
    name: str
    array_oid: int
    codec: str
    policies: tuple[str, ...] = ()
    element: int = 0
    delimiter: str = ","
    extension: str = ""


BUILTIN_TYPES: tuple[PgType, ...] = (
    PgType(16, "bool", 1000, "bool"),
    PgType(17, "bytea", 1001, "bytea"),
    PgType(18, "char", 1002, "char"),
    PgType(19, "name", 1003, "text", policies=("invalid_text",)),
    PgType(20, "int8", 1016, "int8"),
    PgType(21, "int2", 1005, "int2"),
    PgType(22, "int2vector", 1006, "vector", element=21),
    PgType(23, "int4", 1007, "int4"),
    PgType(24, "regproc", 1008, "reg"),
    PgType(25, "text", 1009, "text", policies=("invalid_text",)),
    PgType(26, "oid", 1028, "uint4"),
    PgType(27, "tid", 1010, "tid"),
    PgType(28, "xid", 1011, "uint4"),
    PgType(29, "cid", 1012, "uint4"),
    PgType(30, "oidvector", 1013, "vector", element=26),
    PgType(114, "json", 199, "json", policies=("json", "invalid_text")),
    PgType(142, "xml", 143, "xml", policies=("invalid_text",)),
    PgType(194, "pg_node_tree", 0, "other"),
    PgType(600, "point", 1017, "point"),
    PgType(601, "lseg", 1018, "lseg"),
    PgType(602, "path", 1019, "path"),
    PgType(603, "box", 1020, "box", delimiter=";"),
    PgType(604, "polygon", 1027, "polygon"),
    PgType(628, "line", 629, "line"),
    PgType(650, "cidr", 651, "cidr"),
    PgType(700, "float4", 1021, "float4"),
    PgType(701, "float8", 1022, "float8"),
    PgType(705, "unknown", 0, "text", policies=("invalid_text",)),
    PgType(718, "circle", 719, "circle"),
    PgType(774, "macaddr8", 775, "macaddr8"),
    PgType(790, "money", 791, "money"),
    PgType(829, "macaddr", 1040, "macaddr"),
    PgType(869, "inet", 1041, "inet"),
    PgType(1033, "aclitem", 1034, "aclitem"),
    PgType(1042, "bpchar", 1014, "text", policies=("invalid_text",)),
    PgType(1043, "varchar", 1015, "text", policies=("invalid_text",)),
    PgType(1082, "date", 1182, "date", policies=("infinity", "out_of_range")),
    PgType(1083, "time", 1183, "time", policies=("out_of_range",)),
    PgType(1114, "timestamp", 1115, "timestamp", policies=("infinity", "out_of_range")),
    PgType(1184, "timestamptz", 1185, "timestamptz", policies=("infinity", "out_of_range")),
    PgType(1186, "interval", 1187, "interval", policies=("infinity", "out_of_range")),
    PgType(1266, "timetz", 1270, "timetz", policies=("out_of_range",)),
    PgType(1560, "bit", 1561, "bit"),
    PgType(1562, "varbit", 1563, "varbit"),
    PgType(1700, "numeric", 1231, "numeric", policies=("special_values", "numeric")),
    PgType(1790, "refcursor", 2201, "text", policies=("invalid_text",)),
    PgType(2202, "regprocedure", 2207, "reg"),
    PgType(2203, "regoper", 2208, "reg"),
    PgType(2204, "regoperator", 2209, "reg"),
    PgType(2205, "regclass", 2210, "reg"),
    PgType(2206, "regtype", 2211, "reg"),
    PgType(2950, "uuid", 2951, "uuid"),
    PgType(2970, "txid_snapshot", 2949, "snapshot"),
    PgType(3220, "pg_lsn", 3221, "pg_lsn"),
    PgType(3361, "pg_ndistinct", 0, "other"),
    PgType(3402, "pg_dependencies", 0, "other"),
    PgType(3614, "tsvector", 3643, "tsvector"),
    PgType(3615, "tsquery", 3645, "tsquery"),
    PgType(3642, "gtsvector", 3644, "other"),
    PgType(3734, "regconfig", 3735, "reg"),
    PgType(3769, "regdictionary", 3770, "reg"),
    PgType(3802, "jsonb", 3807, "jsonb", policies=("json", "invalid_text")),
    PgType(3904, "int4range", 3905, "range", element=23),
    PgType(3906, "numrange", 3907, "range", element=1700),
    PgType(3908, "tsrange", 3909, "range", element=1114),
    PgType(3910, "tstzrange", 3911, "range", element=1184),
    PgType(3912, "daterange", 3913, "range", element=1082),
    PgType(3926, "int8range", 3927, "range", element=20),
    PgType(4072, "jsonpath", 4073, "jsonpath"),
    PgType(4089, "regnamespace", 4090, "reg"),
    PgType(4096, "regrole", 4097, "reg"),
    PgType(4191, "regcollation", 4192, "reg"),
    PgType(4451, "int4multirange", 6150, "multirange", element=3904),
    PgType(4532, "nummultirange", 6151, "multirange", element=3906),
    PgType(4533, "tsmultirange", 6152, "multirange", element=3908),
    PgType(4534, "tstzmultirange", 6153, "multirange", element=3910),
    PgType(4535, "datemultirange", 6155, "multirange", element=3912),
    PgType(4536, "int8multirange", 6157, "multirange", element=3926),
    PgType(4600, "pg_brin_bloom_summary", 0, "other"),
    PgType(4601, "pg_brin_minmax_multi_summary", 0, "other"),
    PgType(5017, "pg_mcv_list", 0, "other"),
    PgType(5038, "pg_snapshot", 5039, "snapshot"),
    PgType(5069, "xid8", 271, "uint8"),
)
"""All built-in types except pseudo-types and the row types of system catalogues."""

EXTENSION_TYPES: tuple[PgType, ...] = (
    PgType(0, "citext", 0, "text", extension="citext", policies=("invalid_text",)),
    PgType(0, "hstore", 0, "hstore", extension="hstore"),
    PgType(0, "ltree", 0, "versioned_text", extension="ltree"),
    PgType(0, "lquery", 0, "versioned_text", extension="ltree"),
    PgType(0, "ltxtquery", 0, "versioned_text", extension="ltree"),
    PgType(0, "cube", 0, "cube", extension="cube"),
    PgType(0, "vector", 0, "pgvector", extension="vector"),
    PgType(0, "halfvec", 0, "halfvec", extension="vector"),
    PgType(0, "sparsevec", 0, "sparsevec", extension="vector"),
    PgType(0, "geometry", 0, "ewkb", delimiter=":", extension="postgis"),
    PgType(0, "geography", 0, "ewkb", delimiter=":", extension="postgis"),
)
"""Types of extensions, which are found by name, as their OIDs differ from database to database."""

BY_OID: dict[int, PgType] = {entry.oid: entry for entry in BUILTIN_TYPES}
BY_ARRAY_OID: dict[int, PgType] = {e.array_oid: e for e in BUILTIN_TYPES if e.array_oid}
BY_NAME: dict[str, PgType] = {entry.name: entry for entry in BUILTIN_TYPES}
EXTENSION_BY_NAME: dict[str, PgType] = {entry.name: entry for entry in EXTENSION_TYPES}
