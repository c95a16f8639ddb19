"""Compare a current-state table with the server's own COPY of the same table.

This is independent of the rest of the package: the server prints its values as CSV, Spark casts
them to the types of the state table, and the two are compared row by row and column by column. The
server prints a value that is made of others, such as an array, as JSON of the texts of its parts.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from pyspark.sql import functions as F  # noqa: N812 - its usual name
from pyspark.sql import types as T  # noqa: N812

from pgoutput_fast.errors import PgOutputError

if TYPE_CHECKING:
    import psycopg
    from pyspark.sql import Column, DataFrame, Row, SparkSession


class Difference(NamedTuple):
    """The first row that is not the same on both sides."""

    table: str
    row: str
    column: str | None
    """The column that differs; None if one side does not have the row."""
    server: str
    state: str

    def __str__(self) -> str:
        where = f"{self.table}, row {self.row}"
        if self.column is not None:
            where += f", column {self.column}"
        return f"{where}: the server has {self.server}, the state table {self.state}"


class Comparison(NamedTuple):
    """The result of comparing one table."""

    rows: int
    """Rows of the server's table."""
    checks: int
    """Values that were compared."""
    values: dict[str, int]
    """Column → how many of those are not NULL on the server."""
    differing: int
    """Rows that differ, or that only one side has."""
    first: Difference | None


def copy_table(
    connection: psycopg.Connection[Any], table: str, path: Path
) -> tuple[int, dict[str, str]]:
    """Have the server print a table as CSV into a file, with a header.

    All values except NULL are quoted, so that NULL and an empty string differ.

    Returns
    -------
    int
        The table's rows.
    dict of str to str
        Column → family of its type.
    """
    from psycopg import sql

    namespace, name = table.split(".", 1)
    types = _types(connection)
    columns = connection.execute(_COLUMNS, [namespace, name]).fetchall()
    selected = ", ".join(_printed(name, types, oid) for name, oid, _ in columns)
    connection.execute("SET IntervalStyle = iso_8601")  # as Spark has intervals
    statement = sql.SQL(
        "COPY (SELECT {} FROM {} AS t) TO STDOUT (FORMAT csv, HEADER, FORCE_QUOTE *, "
        "ENCODING 'UTF8')"
    ).format(sql.SQL(selected), sql.Identifier(namespace, name))
    with connection.cursor() as cursor:
        with cursor.copy(statement) as copy, path.open("wb") as file:
            for block in copy:
                file.write(block)
        return cursor.rowcount, {name: _family(types[oid], bare) for name, oid, bare in columns}


class _Type(NamedTuple):
    name: str
    kind: str
    """The type's ``typtype``, or "a" for an array."""
    part: int
    """OID of the type of its elements, of a domain's base type, or of a range's subtype."""
    fields: list[tuple[str, int]]


_TYPES = """
SELECT t.oid::bigint, t.typname,
    CASE WHEN t.typcategory = 'A' AND t.typtype = 'b' THEN 'a' ELSE t.typtype END,
    CASE t.typtype WHEN 'd' THEN t.typbasetype WHEN 'r' THEN r.rngsubtype WHEN 'm' THEN r.rngtypid
        ELSE t.typelem END::bigint,
    coalesce((SELECT json_agg(json_build_array(a.attname, a.atttypid::bigint) ORDER BY a.attnum)
        FROM pg_catalog.pg_attribute AS a
        WHERE t.typrelid <> 0 AND a.attrelid = t.typrelid AND a.attnum > 0 AND NOT a.attisdropped),
        '[]')
FROM pg_catalog.pg_type AS t
LEFT JOIN pg_catalog.pg_range AS r ON t.oid IN (r.rngtypid, r.rngmultitypid)
"""

_COLUMNS = """
SELECT a.attname, a.atttypid::bigint, a.atttypmod < 0
FROM pg_catalog.pg_attribute AS a
JOIN pg_catalog.pg_class AS c ON c.oid = a.attrelid
JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
WHERE n.nspname = %s AND c.relname = %s AND a.attnum > 0 AND NOT a.attisdropped
ORDER BY a.attnum
"""


def _types(connection: psycopg.Connection[Any]) -> dict[int, _Type]:
    return {oid: _Type(*rest) for oid, *rest in connection.execute(_TYPES).fetchall()}


def _printed(name: str, types: dict[int, _Type], oid: int) -> str:
    """A column of the SELECT that prints a table."""
    quoted = '"' + name.replace('"', '""') + '"'
    return f"{_json(f't.{quoted}', types, oid, 0) or f't.{quoted}'} AS {quoted}"


def _json(value: str, types: dict[int, _Type], oid: int, depth: int) -> str | None:
    """The SQL expression for a value's JSON, None if the value has no parts.

    It uses IS DISTINCT FROM NULL, because a composite IS NULL if all of its fields are.
    """

    def json(part: str, type_: int) -> str:
        return _json(part, types, type_, depth + 1) or f"({part})::text"

    found = types[oid]
    if found.kind == "d":
        return _json(value, types, found.part, depth)
    i, item = f"i{depth}", f"e{depth}"
    if found.kind == "a":
        if found.name in ("int2vector", "oidvector"):
            value = f"{value}::{found.name[:-6]}[]"
        elif _json("", types, found.part, depth) is not None:
            part = json(f"({value})[{i}]", found.part)
            made = f"(SELECT coalesce(json_agg({part} ORDER BY {i}), '[]')"
            made += f" FROM generate_subscripts({value}, 1) AS {i})"
            return f"CASE WHEN {value} IS DISTINCT FROM NULL THEN {made} END"
        return f"to_json(({value})::text[])"  # of any number of dimensions
    if found.kind == "m":
        made = f"(SELECT coalesce(json_agg({json(item, found.part)} ORDER BY {i}), '[]')"
        made += f" FROM unnest({value}) WITH ORDINALITY AS u{depth}({item}, {i}))"
    elif found.kind == "r":
        ends = [f"'{end}', {json(f'{end}({value})', found.part)}" for end in ("lower", "upper")]
        ends += [f"'{end}', {end}({value})" for end in ("lower_inc", "upper_inc")]
        made = f"json_build_object({', '.join(ends)}, 'empty', isempty({value}))"
    elif found.kind == "c":
        fields = [
            f"""'{name.replace("'", "''")}', """
            + json(f'({value})."{name.replace(chr(34), chr(34) * 2)}"', type_)
            for name, type_ in found.fields
        ]
        made = f"json_build_object({', '.join(fields)})"
    elif found.name in ("vector", "halfvec"):
        return f"to_json({value}::real[]::text[])"
    elif found.name == "sparsevec":
        numbers = f"(SELECT coalesce(json_agg({{}} ORDER BY {i}), '[]') FROM "
        numbers += f"unnest({value}::demo.vector::real[]) WITH ORDINALITY AS u({item}, {i}) "
        numbers += f"WHERE {item} <> 0)"
        made = f"json_build_object('dim', demo.vector_dims({value}::demo.vector), "
        made += (
            f"'indices', {numbers.format(f'{i} - 1')}, 'values', {numbers.format(f'{item}::text')})"
        )
    else:
        return None
    return f"CASE WHEN {value} IS DISTINCT FROM NULL THEN {made} END"


_FAMILIES = {
    **dict.fromkeys(("int2", "int4", "int8"), "int2, int4, int8"),
    **dict.fromkeys(("oid", "xid", "cid", "xid8"), "oid, xid, cid, xid8"),
    **dict.fromkeys(("float4", "float8"), "float4, float8"),
    **dict.fromkeys(("text", "varchar", "bpchar", "name"), "text, varchar, char, name"),
    **dict.fromkeys(("json", "jsonb"), "json, jsonb"),
    **dict.fromkeys(("timestamp", "timestamptz"), "timestamp, timestamptz"),
    **dict.fromkeys(("time", "timetz"), "time, timetz"),
    **dict.fromkeys(("inet", "cidr", "macaddr", "macaddr8"), "network addresses"),
    **dict.fromkeys(("point", "line", "lseg", "box", "path", "polygon", "circle"), "geometric"),
    **dict.fromkeys(("bit", "varbit"), "bit, varbit"),
    **dict.fromkeys(("tsvector", "tsquery"), "tsvector, tsquery"),
    **dict.fromkeys(("pg_lsn", "pg_snapshot", "tid"), "pg_lsn, pg_snapshot, tid"),
    **dict.fromkeys(("regclass", "regtype"), "reg*"),
    **dict.fromkeys(("vector", "halfvec", "sparsevec"), "pgvector"),
    "char": '"char"',
}
_KINDS = {"a": "arrays", "c": "composites", "d": "domains", "e": "enums", "r": "ranges"}


def _family(type_: _Type, bare: bool) -> str:
    """The family of types under which the report counts a column's values."""
    if type_.name == "numeric":
        return "numeric without precision" if bare else "numeric(p,s)"
    kinds = {**_KINDS, "m": "multiranges"}
    return kinds.get(type_.kind) or _FAMILIES.get(type_.name, type_.name)


def server_rows(spark: SparkSession, csv: Path, parquet: Path, row_type: T.StructType) -> DataFrame:
    """The rows of a file that :func:`copy_table` made, in the types of a state table."""
    _to_parquet(csv, parquet)
    texts = spark.read.parquet(str(parquet))
    if texts.columns != row_type.fieldNames():
        raise PgOutputError(
            f"the server's table has the columns {', '.join(texts.columns)}, the state table "
            f"{', '.join(row_type.fieldNames())}"
        )
    return texts.select(*(_typed(F.col(_quoted(field.name)), field) for field in row_type.fields))


def _to_parquet(csv: Path, parquet: Path) -> None:
    """Write a CSV file as Parquet, with Arrow: Spark's reader takes an empty string for NULL."""
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.parquet

    with csv.open("rb") as file:
        names = file.readline().decode().rstrip("\n").split(",")
    reader = pa.csv.open_csv(
        str(csv),
        read_options=pa.csv.ReadOptions(block_size=16 << 20),
        parse_options=pa.csv.ParseOptions(newlines_in_values=True),
        convert_options=pa.csv.ConvertOptions(
            column_types={name: pa.string() for name in names},
            null_values=[""],
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
        ),
    )
    with reader, pa.parquet.ParquetWriter(parquet, reader.schema) as writer:
        for batch in reader:
            # Small row groups, so that Spark can read a file in more than one task.
            writer.write_batch(batch, row_group_size=10_000)


def _typed(text: Column, field: T.StructField) -> Column:
    if isinstance(field.dataType, (T.ArrayType, T.StructType)):
        texts = F.from_json(text, _of_texts(field.dataType), {"mode": "FAILFAST"})
        return _value(texts, field.dataType).alias(field.name)
    return _value(text, field.dataType).alias(field.name)


def _of_texts(data_type: T.DataType) -> Any:
    """The type with every part that has no parts of its own replaced by string."""
    if isinstance(data_type, T.ArrayType):
        return T.ArrayType(_of_texts(data_type.elementType))
    if isinstance(data_type, T.StructType):
        return T.StructType([T.StructField(f.name, _of_texts(f.dataType)) for f in data_type])
    return T.StringType()


def _value(text: Column, data_type: T.DataType) -> Column:
    """A value of the type, from its text, or from the texts of its parts."""
    if isinstance(data_type, T.ArrayType):
        return F.transform(text, lambda item: _value(item, data_type.elementType))
    if isinstance(data_type, T.StructType):
        fields = (_value(text.getItem(f.name), f.dataType).alias(f.name) for f in data_type)
        return F.when(text.isNotNull(), F.struct(*fields))
    if isinstance(data_type, T.BinaryType):
        return F.unhex(F.substring(text, 3, 1 << 30))  # after \x
    return text.cast(data_type)


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def compare(table: str, server: DataFrame, state: DataFrame, key: list[str]) -> Comparison:
    """Compare the rows of the server with those of a state table, by key or as multisets."""
    if key:
        return _by_key(table, server, state, key)
    return _as_multisets(table, server, state)


def _by_key(table: str, server: DataFrame, state: DataFrame, key: list[str]) -> Comparison:
    fields = state.schema.fields
    sides = [
        frame.select(
            F.struct(*(F.col(_quoted(name)).alias(f"k{i}") for i, name in enumerate(key))).alias(
                "key"
            ),
            F.struct(
                *(
                    _exact(F.col(_quoted(field.name)), field.dataType).alias(f"c{i}")
                    for i, field in enumerate(fields)
                )
            ).alias(side),
        )
        for side, frame in (("server", server), ("state", state))
    ]
    # eqNullSafe of the structs would take a row that one side lacks for a row of NULLs.
    same = paired = F.col("server").isNotNull() & F.col("state").isNotNull()
    for i in range(len(fields)):
        same &= F.col(f"server.c{i}").eqNullSafe(F.col(f"state.c{i}"))
    joined = sides[0].join(sides[1], "key", "full").withColumn("same", same)
    counts = joined.agg(
        F.count("server").alias("rows"),
        F.count(F.when(paired, 1)).alias("pairs"),
        F.count(F.when(~F.col("same"), 1)).alias("differing"),
        *(
            F.count(F.when(paired, F.col(f"server.c{i}"))).alias(f"v{i}")
            for i in range(len(fields))
        ),
    ).collect()[0]
    first = None
    if counts.differing:
        row = joined.filter("not same").orderBy("key").limit(1).collect()[0]
        shown = ", ".join(f"{name}={row.key[f'k{i}']}" for i, name in enumerate(key))
        first = _difference(table, shown, [field.name for field in fields], row.server, row.state)
    values = {field.name: counts[f"v{i}"] for i, field in enumerate(fields)}
    return Comparison(counts.rows, counts.pairs * len(fields), values, counts.differing, first)


def _difference(table: str, row: str, names: list[str], server: Any, state: Any) -> Difference:
    if server is None or state is None:
        lacking, there = "no such row", "the row"
        return Difference(
            table,
            row,
            None,
            lacking if server is None else there,
            lacking if state is None else there,
        )
    for name, here, found in zip(names, server, state, strict=True):
        if here != found:
            return Difference(table, row, name, _shown(here), _shown(found))
    raise PgOutputError(
        f"{table}, row {row}: Spark finds that the server's row and the state table's differ, and "
        "Python does not see in which column"
    )


def _shown(value: Any) -> str:
    shown = "NULL" if value is None else repr(value)
    return shown if len(shown) <= 200 else f"{shown[:200]}… ({len(shown)} characters)"


def _as_multisets(table: str, server: DataFrame, state: DataFrame) -> Comparison:
    fields = state.schema.fields
    sides = [
        frame.select(
            *(
                _exact(F.col(_quoted(field.name)), field.dataType).alias(f"c{i}")
                for i, field in enumerate(fields)
            ),
            F.lit(count).alias("count"),
        )
        for count, frame in ((1, server), (-1, state))
    ]
    columns = [f"c{i}" for i in range(len(fields))]
    counted = (
        sides[0]
        .unionByName(sides[1])
        .groupBy(*columns)
        .agg(F.sum("count").alias("more"), F.count(F.when(F.col("count") == 1, 1)).alias("rows"))
    )
    total = counted.agg(
        F.sum("rows").alias("rows"),
        F.sum(F.when(F.col("more") != 0, F.abs("more")).otherwise(0)).alias("differing"),
        *(F.sum(F.when(F.col(name).isNotNull(), F.col("rows"))).alias(name) for name in columns),
    ).collect()[0]
    rows, differing = total.rows or 0, total.differing or 0
    first = None
    if differing:
        only = {
            side: next(iter(counted.filter(condition).orderBy(*columns).limit(1).collect()), None)
            for side, condition in (("server", "more > 0"), ("state", "more < 0"))
        }
        row = cast("Row", only["server"] or only["state"])
        names = [field.name for field in fields]
        shown = ", ".join(
            f"{name}={_shown(row[column])}" for name, column in zip(names, columns, strict=True)
        )
        first = Difference(
            table,
            f"({shown})",
            None,
            f"{row['rows']} times",
            f"{row['rows'] - row.more} times",
        )
        other = only["state"]
        if only["server"] is not None and other is not None:
            # If a value is wrong, each side has a row that the other side lacks.
            for name, column in zip(names, columns, strict=True):
                if row[column] != other[column]:
                    first = Difference(
                        table, f"({shown})", name, _shown(row[column]), _shown(other[column])
                    )
                    break
    values = {field.name: total[f"c{i}"] or 0 for i, field in enumerate(fields)}
    return Comparison(rows, rows * len(fields), values, differing, first)


def _exact(value: Column, data_type: T.DataType) -> Column:
    """What is equal in Spark if and only if the values are the same in PostgreSQL.

    Spark takes -0.0 for 0.0, which PostgreSQL stores apart; their texts differ.
    """
    if isinstance(data_type, (T.FloatType, T.DoubleType, T.VariantType)):
        return value.cast("string")
    if isinstance(data_type, T.ArrayType):
        return F.transform(value, lambda item: _exact(item, data_type.elementType))
    if isinstance(data_type, T.StructType):
        fields = [
            _exact(value.getItem(f.name), f.dataType).alias(f"c{i}")
            for i, f in enumerate(data_type.fields)
        ]
        return F.when(value.isNotNull(), F.struct(*fields))
    if isinstance(data_type, T.MapType):
        entries = F.array_sort(F.map_entries(value))
        return _exact(entries, T.ArrayType(_entry(data_type)))
    return value


def _entry(data_type: T.MapType) -> T.StructType:
    fields = [("key", data_type.keyType), ("value", data_type.valueType)]
    return T.StructType([T.StructField(name, part) for name, part in fields])
