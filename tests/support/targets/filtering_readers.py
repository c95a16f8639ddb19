"""Readers of files and tables that filter: each is asked by a filter, and by a whole read.

A reader passes over files and row groups by bounds when it filters. It looks at all rows when it
computes the same condition as a column. So the two answers of one reader are equal if the bounds
hold for this reader, whatever it makes of NaN or of texts.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset

Rows = list[Any]
"""The ids of rows, sorted."""


class Condition(NamedTuple):
    """A condition on a column.

    Fields: path (the column, and fields inside of it), type (of Arrow), op (one of `OPS`), values
    (pyarrow scalars: one, or two for "in").
    """

    path: tuple[str, ...]
    type: pa.DataType
    op: str
    values: tuple[pa.Scalar, ...] = ()

    def __str__(self) -> str:
        return f"{'.'.join(self.path)} ({self.type}) {self.op} {[*map(str, self.values)]}"


OPS = ("=", "<", ">", "in", "not", "is null", "is not null")
_TOGETHER = 20
"""Conditions in a query of Spark."""
_PYTHON = {"=": operator.eq, "<": operator.lt, ">": operator.gt, "not": operator.ne}


def leaves(schema: pa.Schema, root: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The columns, and the fields of structs, with their types."""
    for field in schema:
        path = (*root, field.name)
        yield path, field.type
        if pa.types.is_struct(field.type):
            yield from leaves(pa.schema([*field.type]), path)


def conditions(rows: pa.Table, *, most: int) -> Iterator[Condition]:
    """Conditions on all columns, with at most so many of their values each."""
    for path, type_ in leaves(rows.schema):
        column = _column(rows, path)
        yield Condition(path, type_, "is null")
        yield Condition(path, type_, "is not null")
        if pa.types.is_nested(type_):
            continue
        values = [one for one in column.unique() if one.is_valid]
        if len(values) > most:
            values = [*values[: most - 1], values[-1]]
        for value in values:
            for op in ("=", "<", ">", "not"):
                yield Condition(path, type_, op, (value,))
        if values:
            yield Condition(path, type_, "in", (values[0], values[-1]))


def _column(rows: pa.Table, path: tuple[str, ...]) -> pa.ChunkedArray:
    column = rows.column(path[0])
    for name in path[1:]:
        column = pc.struct_field(column, [name])
    return column


def quoted(path: tuple[str, ...], quote: str = '"') -> str:
    return ".".join(quote + one.replace(quote, quote * 2) + quote for one in path)


def _sql(condition: Condition, column: str, literal: Callable[[pa.Scalar], str]) -> str:
    if condition.op in ("is null", "is not null"):
        return f"{column} {condition.op}"
    values = [literal(one) for one in condition.values]
    if condition.op == "in":
        return f"{column} IN ({', '.join(values)})"
    if condition.op == "not":
        return f"NOT ({column} = {values[0]})"
    return f"{column} {condition.op} {values[0]}"


def _text(value: pa.Scalar) -> str:
    if pa.types.is_decimal(value.type):
        text = f"{value.as_py():f}"  # not every reader takes exponents
    elif pa.types.is_string(value.type):
        text = value.as_py()
    else:
        text = str(value.cast(pa.string()))
    return "'" + text.replace("'", "''") + "'"


class Reader:
    """A reader: `filtered` and `computed` give the ids of the rows that fulfil a condition."""

    inexpressible: Callable[[Condition], bool] = staticmethod(lambda condition: False)
    """Conditions that the reader has no words for, or that it refuses by an error."""

    def filtered(self, condition: Condition) -> Rows:
        raise NotImplementedError

    def computed(self, condition: Condition) -> Rows:
        raise NotImplementedError

    def wrong(self, conditions: Sequence[Condition]) -> list[str]:
        """Where the two differ, and how."""
        answers = ((one, self.filtered(one), self.computed(one)) for one in conditions)
        return [_difference(*one) for one in answers if one[1] != one[2]]


def _difference(condition: Condition, found: Rows, truth: Rows) -> str:
    return f"{condition}: {found}, should be {truth}"


def _ids(column: Any) -> Rows:
    return sorted(column.to_pylist(), key=repr)


class Dataset(Reader):
    """A dataset of pyarrow, as `DeltaTable.to_pyarrow_dataset()` gives one."""

    def __init__(self, dataset: Any, key: tuple[str, ...]) -> None:
        self._dataset, self._key = dataset, key

    def _expression(self, condition: Condition) -> Any:
        column = pc.field(*condition.path)
        if condition.op == "is null":
            return column.is_null()
        if condition.op == "is not null":
            return column.is_valid()
        if condition.op == "in":
            return column.isin(pa.array(condition.values, condition.type))
        if condition.op == "not":
            return ~(column == condition.values[0])
        return _PYTHON[condition.op](column, condition.values[0])

    def filtered(self, condition: Condition) -> Rows:
        columns = {"k": pc.field(*self._key)}
        rows = self._dataset.to_table(columns=columns, filter=self._expression(condition))
        return _ids(rows.column("k"))

    def computed(self, condition: Condition) -> Rows:
        columns = {"k": pc.field(*self._key), "m": self._expression(condition)}
        return _ids(self._dataset.to_table(columns=columns).filter(pc.field("m")).column("k"))


class Filters(Dataset):
    """`DeltaTable.to_pyarrow_table(filters=)`, which knows no fields of structs."""

    inexpressible = staticmethod(
        lambda condition: len(condition.path) > 1 or condition.op.startswith("is")
    )

    def __init__(self, table: Any, key: tuple[str, ...]) -> None:
        super().__init__(table.to_pyarrow_dataset(), key)
        self._table = table

    def filtered(self, condition: Condition) -> Rows:
        values = condition.values
        given = [*values] if condition.op == "in" else values[0]
        if condition.op == "in":
            given = [one.as_py() for one in values]
        op = "!=" if condition.op == "not" else condition.op
        filters = [(condition.path[0], op, given)]
        rows = self._table.to_pyarrow_table(columns=[self._key[0]], filters=filters)
        return _ids(_column(rows, self._key))


class DataFusion(Reader):
    """The QueryBuilder of deltalake."""

    inexpressible = staticmethod(
        # arrow_cast() makes no binary values, and 0x literals no empty one
        lambda condition: pa.types.is_binary(condition.type) and not condition.op.startswith("is")
    )

    def __init__(self, table: Any, key: tuple[str, ...]) -> None:
        from deltalake import QueryBuilder

        self._builder = QueryBuilder().register("t", table)
        self._key = self._path(key)

    @staticmethod
    def _path(path: tuple[str, ...]) -> str:
        first, *more = path
        inner = "".join("['" + one.replace("'", "''") + "']" for one in more)
        return quoted((first,)) + inner

    @staticmethod
    def _literal(value: pa.Scalar) -> str:
        type_ = value.type
        plain = {"string": "Utf8", "float": "Float32", "double": "Float64", "bool": "Boolean",
                 "date32[day]": "Date32"}  # fmt: skip
        if pa.types.is_timestamp(type_):
            zone = "None" if type_.tz is None else f'"{type_.tz}"'
            name = f"Timestamp(Microsecond, {zone})"
            return f"arrow_cast(arrow_cast({value.value}, 'Int64'), '{name}')"
        if pa.types.is_decimal(type_):
            name = f"Decimal128({type_.precision}, {type_.scale})"
        else:
            name = plain.get(str(type_), str(type_).capitalize())
        return f"arrow_cast({_text(value)}, '{name}')"

    def _run(self, query: str) -> Rows:
        rows = pa.table(self._builder.execute(query))
        return _ids(rows.column(0))

    def filtered(self, condition: Condition) -> Rows:
        where = _sql(condition, self._path(condition.path), self._literal)
        return self._run(f"SELECT {self._key} FROM t WHERE {where}")

    def computed(self, condition: Condition) -> Rows:
        where = _sql(condition, self._path(condition.path), self._literal)
        rows = pa.table(self._builder.execute(f"SELECT {self._key} AS k, {where} AS m FROM t"))
        return _ids(rows.filter(pc.field("m")).column("k"))


class Polars(Reader):
    """polars, which scans lazily."""

    def __init__(self, frame: Any, key: tuple[str, ...]) -> None:
        self._frame, self._key = frame, self._column(key)

    @staticmethod
    def _column(path: tuple[str, ...]) -> Any:
        import polars as pl

        return functools.reduce(lambda one, name: one.struct.field(name), path[1:], pl.col(path[0]))

    def _expression(self, condition: Condition) -> Any:
        import polars as pl

        column = self._column(condition.path)
        if condition.op == "is null":
            return column.is_null()
        if condition.op == "is not null":
            return column.is_not_null()
        literals = [pl.from_arrow(pa.array([one], condition.type)) for one in condition.values]
        if condition.op == "in":
            return column.is_in(pl.concat(literals).implode())
        literal = pl.lit(literals[0]).first()
        if condition.op == "not":
            return ~(column == literal)
        return _PYTHON[condition.op](column, literal)

    def filtered(self, condition: Condition) -> Rows:
        rows = self._frame.filter(self._expression(condition)).select(self._key).collect()
        return _ids(rows.to_arrow().column(0))

    def computed(self, condition: Condition) -> Rows:
        made = self._expression(condition).alias("m")
        rows = self._frame.select(self._key.alias("k"), made).collect().to_arrow()
        return _ids(rows.filter(pc.field("m")).column("k"))


class DuckDB(Reader):
    """DuckDB, over what `relation` names: a dataset of pyarrow, or files."""

    def __init__(self, relation: Any, key: tuple[str, ...]) -> None:
        import duckdb

        self._connection = duckdb.connect()
        self._connection.execute("SET TimeZone = 'UTC'")
        if isinstance(relation, str):
            self._from = relation
        else:
            self._connection.register("t", relation)
            self._from = "t"
        self._key = quoted(key)

    def _literal(self, value: pa.Scalar) -> str:
        type_ = value.type
        if pa.types.is_binary(type_):
            return "'" + "".join(f"\\x{byte:02X}" for byte in value.as_py()) + "'::BLOB"
        if pa.types.is_timestamp(type_):
            made = f"make_timestamp({value.value})"
            return made if type_.tz is None else f"({made} AT TIME ZONE 'UTC')"
        if pa.types.is_date(type_):
            return f"(DATE '1970-01-01' + ({value.value})::INTEGER)"
        names = {"int16": "SMALLINT", "int32": "INTEGER", "int64": "BIGINT", "double": "DOUBLE",
                 "float": "FLOAT", "string": "VARCHAR", "bool": "BOOLEAN"}  # fmt: skip
        if pa.types.is_decimal(type_):
            return f"{_text(value)}::DECIMAL({type_.precision}, {type_.scale})"
        return f"{_text(value)}::{names[str(type_)]}"

    def _rows(self, query: str) -> pa.Table:
        return self._connection.sql(query).to_arrow_table()

    def filtered(self, condition: Condition) -> Rows:
        where = _sql(condition, quoted(condition.path), self._literal)
        return _ids(self._rows(f"SELECT {self._key} FROM {self._from} WHERE {where}").column(0))

    def computed(self, condition: Condition) -> Rows:
        where = _sql(condition, quoted(condition.path), self._literal)
        rows = self._rows(f"SELECT {self._key} AS k, ({where}) AS m FROM {self._from}")
        return _ids(rows.filter(pc.field("m")).column("k"))


class Spark(Reader):
    """Spark with Delta's connector, or over Parquet files."""

    def __init__(self, frame: Any, key: tuple[str, ...]) -> None:
        self._frame, self._key = frame, quoted(key, "`")

    @staticmethod
    def _literal(value: pa.Scalar) -> str:
        type_ = value.type
        if pa.types.is_binary(type_):
            return f"X'{value.as_py().hex()}'"
        if pa.types.is_timestamp(type_):
            made = f"timestamp_micros({value.value})"
            return made if type_.tz is not None else f"CAST({made} AS TIMESTAMP_NTZ)"
        if pa.types.is_date(type_):
            return f"date_from_unix_date({value.value})"
        if pa.types.is_string(type_):
            return f"CAST(unhex('{value.as_py().encode().hex()}') AS STRING)"
        names = {"int16": "SMALLINT", "int32": "INT", "int64": "BIGINT", "double": "DOUBLE",
                 "float": "FLOAT", "bool": "BOOLEAN"}  # fmt: skip
        if pa.types.is_decimal(type_):
            return f"CAST({_text(value)} AS DECIMAL({type_.precision}, {type_.scale}))"
        text = _text(value).replace("inf", "Infinity").replace("nan", "NaN")
        return f"CAST({text} AS {names[str(type_)]})"

    def _where(self, condition: Condition) -> str:
        return _sql(condition, quoted(condition.path, "`"), self._literal)

    def wrong(self, conditions: Sequence[Condition]) -> list[str]:
        """As of `Reader`; a query asks for several conditions, as each costs much."""
        named = [f"({self._where(one)}) AS m{i}" for i, one in enumerate(conditions)]
        rows = self._frame.selectExpr(f"{self._key} AS k", *named).collect()
        truth = [sorted((row.k for row in rows if row[f"m{i}"]), key=repr)
                 for i in range(len(conditions))]  # fmt: skip
        found: list[Rows] = [[] for _ in conditions]
        for start in range(0, len(conditions), _TOGETHER):
            parts = [
                self._frame.where(self._where(one)).selectExpr(f"{self._key} AS k", f"{i} AS i")
                for i, one in enumerate(conditions[start : start + _TOGETHER], start)
            ]
            for row in functools.reduce(lambda one, other: one.unionAll(other), parts).collect():
                found[row.i].append(row.k)
        return [
            _difference(condition, sorted(one, key=repr), right)
            for condition, one, right in zip(conditions, found, truth, strict=True)
            if sorted(one, key=repr) != right
        ]


class Iceberg(Reader):
    """pyiceberg: a scan with a filter."""

    def __init__(self, table: Any, key: tuple[str, ...]) -> None:
        self._table, self._key = table, key
        self._whole = Dataset(pa.dataset.dataset(table.scan().to_arrow()), key)

    inexpressible = staticmethod(
        # It has no literal for NaN, and can't select lists and maps by themselves.
        lambda condition: (
            any(str(one) == "nan" for one in condition.values)
            or pa.types.is_list(condition.type)
            or pa.types.is_map(condition.type)
        )
    )

    def filtered(self, condition: Condition) -> Rows:
        from pyiceberg import expressions as e

        name = ".".join(condition.path)
        values = [one.as_py() for one in condition.values]
        made = {
            "is null": e.IsNull, "is not null": e.NotNull, "=": e.EqualTo, "<": e.LessThan,
            "in": e.In, ">": e.GreaterThan,
            "not": lambda column, value: e.Not(e.EqualTo(column, value)),
        }[condition.op]  # fmt: skip
        given = (
            ()
            if condition.op.startswith("is")
            else (values if condition.op == "in" else values[0],)
        )
        fields = (".".join(self._key),)
        rows = self._table.scan(row_filter=made(name, *given), selected_fields=fields).to_arrow()
        return _ids(_column(rows, self._key))

    def computed(self, condition: Condition) -> Rows:
        return self._whole.computed(condition)


def delta_readers(path: Path, key: tuple[str, ...]) -> dict[str, Reader]:
    """The readers of a Delta table but for Spark."""
    import polars as pl
    from deltalake import DeltaTable

    table = DeltaTable(str(path))
    return {
        "dataset": Dataset(table.to_pyarrow_dataset(), key),
        "filters": Filters(table, key),
        "datafusion": DataFusion(table, key),
        "polars": Polars(pl.scan_delta(str(path)), key),
        "duckdb": DuckDB(table.to_pyarrow_dataset(), key),
    }


def parquet_readers(path: Path, key: tuple[str, ...]) -> dict[str, Reader]:
    """The readers of a directory of Parquet files but for Spark."""
    import polars as pl

    files = f"{path}/*.parquet"
    return {
        "dataset": Dataset(pa.dataset.dataset(str(path), format="parquet"), key),
        "polars": Polars(pl.scan_parquet(files), key),
        "duckdb": DuckDB(f"read_parquet('{files}')", key),
    }


def iceberg_readers(table: Any, key: tuple[str, ...]) -> dict[str, Reader]:
    """The readers of an Iceberg table; DuckDB reads the files that the table names."""
    import polars as pl

    files = ", ".join(_text(pa.scalar(one.file.file_path)) for one in table.scan().plan_files())
    return {
        "pyiceberg": Iceberg(table, key),
        "polars": Polars(pl.scan_iceberg(table), key),
        "duckdb": DuckDB(f"read_parquet([{files}], union_by_name = true)", key),
    }
