"""The proof: a current-state table against the server's own COPY of the same table.

Nothing here knows pgoutput, nor this package's types: the server prints its values, in CSV, Spark
casts them to the types of the state table, and the two are compared row by row, column by column.
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
    """None where a side has not got the row at all."""
    server: str
    state: str

    def __str__(self) -> str:
        where = f"{self.table}, row {self.row}"
        if self.column is not None:
            where += f", column {self.column}"
        return f"{where}: the server has {self.server}, the state table {self.state}"


class Comparison(NamedTuple):
    """What came of comparing one table."""

    rows: int
    """Of the server."""
    checks: int
    """Values that were compared."""
    differing: int
    """Rows that differ, or that only one side has."""
    first: Difference | None


def copy_table(connection: psycopg.Connection[Any], table: str, path: Path) -> int:
    """Have the server print a table as CSV into a file, with a header. Returns its rows.

    All values are quoted but NULL, so that NULL and an empty string differ.
    """
    from psycopg import sql

    namespace, name = table.split(".", 1)
    statement = sql.SQL(
        "COPY (SELECT * FROM {}) TO STDOUT (FORMAT csv, HEADER, FORCE_QUOTE *, ENCODING 'UTF8')"
    ).format(sql.Identifier(namespace, name))
    with connection.cursor() as cursor:
        with cursor.copy(statement) as copy, path.open("wb") as file:
            for block in copy:
                file.write(block)
        return cursor.rowcount


def server_rows(spark: SparkSession, csv: Path, parquet: Path, row_type: T.StructType) -> DataFrame:
    """The rows of such a file, as the types of a state table."""
    _to_parquet(csv, parquet)
    texts = spark.read.parquet(str(parquet))
    if texts.columns != row_type.fieldNames():
        raise PgOutputError(
            f"the server's table has the columns {', '.join(texts.columns)}, the state table "
            f"{', '.join(row_type.fieldNames())}"
        )
    return texts.select(*(_typed(F.col(_quoted(field.name)), field) for field in row_type.fields))


def _to_parquet(csv: Path, parquet: Path) -> None:
    """By Arrow: Spark's own CSV reader can't tell NULL from an empty string."""
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
            # Small groups, so that Spark has more than one part of a file to give out.
            writer.write_batch(batch, row_group_size=10_000)


def _typed(text: Column, field: T.StructField) -> Column:
    if isinstance(field.dataType, T.BinaryType):
        value = F.unhex(F.substring(text, 3, 1 << 30))  # after \x
    else:
        value = text.cast(field.dataType)
    return value.alias(field.name)


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def _comparable(column: Column, data_type: T.DataType) -> Column:
    # Spark takes -0.0 for 0.0; by their text they differ, and NaN equals itself.
    if isinstance(data_type, (T.FloatType, T.DoubleType)):
        return column.cast("string")
    return column


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
                    _comparable(F.col(_quoted(field.name)), field.dataType).alias(f"c{i}")
                    for i, field in enumerate(fields)
                )
            ).alias(side),
        )
        for side, frame in (("server", server), ("state", state))
    ]
    # Not eqNullSafe of the structs: that would take a row that one side lacks for a row of NULLs.
    same = F.col("server").isNotNull() & F.col("state").isNotNull()
    for i in range(len(fields)):
        same &= F.col(f"server.c{i}").eqNullSafe(F.col(f"state.c{i}"))
    joined = sides[0].join(sides[1], "key", "full").withColumn("same", same)
    counts = joined.agg(
        F.count("server").alias("rows"),
        F.count(F.when(F.col("server").isNotNull() & F.col("state").isNotNull(), 1)).alias("pairs"),
        F.count(F.when(~F.col("same"), 1)).alias("differing"),
    ).collect()[0]
    first = None
    if counts.differing:
        row = joined.filter("not same").orderBy("key").limit(1).collect()[0]
        shown = ", ".join(f"{name}={row.key[f'k{i}']}" for i, name in enumerate(key))
        first = _difference(table, shown, [field.name for field in fields], row.server, row.state)
    return Comparison(counts.rows, counts.pairs * len(fields), counts.differing, first)


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
    raise AssertionError("Spark and Python do not agree on what differs")


def _shown(value: Any) -> str:
    shown = "NULL" if value is None else repr(value)
    return shown if len(shown) <= 200 else f"{shown[:200]}… ({len(shown)} characters)"


def _as_multisets(table: str, server: DataFrame, state: DataFrame) -> Comparison:
    fields = state.schema.fields
    sides = [
        frame.select(
            *(
                _comparable(F.col(_quoted(field.name)), field.dataType).alias(f"c{i}")
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
            # Where a value is wrong, both sides have a row that the other one has not.
            for name, column in zip(names, columns, strict=True):
                if row[column] != other[column]:
                    first = Difference(
                        table, f"({shown})", name, _shown(row[column]), _shown(other[column])
                    )
                    break
    return Comparison(rows, rows * len(fields), differing, first)
