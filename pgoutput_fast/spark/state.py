"""Current-state tables: what a table holds after its changes.

The input is the DataFrame of one table's changes, as :func:`pgoutput_fast.spark.read_segments`
gives it, the output the rows that are left. All of it is Spark's own operators: nothing of the
table's size passes through the driver, and the order in which Spark reads the changes is of no
account, for ``(commit_lsn, seq)`` orders them without ties.

A table with a key
    Its changes are *touches* of keys: an insert and the target of a key-changing update arrive at a
    key, a delete and the source of such an update leave it. Between an arrival and the next leave a
    key is *occupied* by one row. A key-changing update continues the row of the occupation that it
    ends in the one that it begins; following these links back to where they start (by pointer
    doubling, so that a row which moved n times takes log2(n) joins of the moves alone) gives every
    touch the row that it belongs to. A row's value of a column is then the last one that was sent:
    an unchanged TOAST value was sent at an earlier touch, maybe under another key.
A table without a key
    It is a multiset: with REPLICA IDENTITY FULL a delete brings the whole old row and removes one
    row like it.

Values that no change holds are taken from the catalogue (a column added with a default), or are an
error that names the row: never null by assumption.
"""

from __future__ import annotations

import datetime
import uuid
from collections.abc import Sequence
from dataclasses import replace
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F  # noqa: N812 - its usual name
from pyspark.sql import types as T  # noqa: N812
from pyspark.sql.window import Window

from pgoutput_fast.columnar.arrays import column_of
from pgoutput_fast.columnar.pyarrow_bridge import arrow_array
from pgoutput_fast.errors import PgOutputError
from pgoutput_fast.names import qualified
from pgoutput_fast.policies import Policies
from pgoutput_fast.settings import Settings
from pgoutput_fast.types import column_type

from ._column_types import column_field, is_text, policies_for

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pyspark.sql import Column, DataFrame

    from pgoutput_fast.catalog import CatalogColumn, CatalogTable
    from pgoutput_fast.types import TypeRegistry

_UNSENT = "no change of this row brings it: the row was written before the stream began, or its \
column was added with a value that neither stream nor catalogue holds; take a new copy of the table"


def current_state(
    changes: DataFrame,
    table: CatalogTable,
    *,
    registry: TypeRegistry | None = None,
    policies: Policies | None = None,
) -> DataFrame:
    """The rows that a table holds after all of its changes, by what the catalogue knows of it.

    Parameters
    ----------
    changes : DataFrame
        All changes of one table from its first row on, with the columns of a change batch.
        It is read several times: give one that is stored, a Parquet change table say.
    table : CatalogTable
        ``catalog.table("public.accounts")``, read from the server after the last of the changes.
    registry, policies : optional
        As for the changes: by them the defaults of columns that were added are read.

    Returns
    -------
    DataFrame
        The table's columns. Evaluating it raises an error that names table, row and column where a
        value, a key or a commit position is unknown.

    Raises
    ------
    PgOutputError
        The changes are not of the table, or a default does not fit into its column.
    """
    name = qualified(table)
    row_type = changes.schema["after"].dataType
    columns = {column.name: column for column in table.columns}
    _check_table(name, changes, columns)
    settings = Settings(policies or Policies(), registry=registry)
    added: dict[str, Any] = {}
    for field in row_type.fields if isinstance(row_type, T.StructType) else ():
        if field.name in table.added_values:
            text = table.added_values[field.name]
            where = f"{name}, default of the column {field.name}"
            added[field.name] = (
                None
                if text is None
                else _default(text, columns[field.name], field, settings, where)
            )
    return rows_after(changes, table=name, key=table.key, added=added)


def _check_table(name: str, changes: DataFrame, columns: Mapping[str, CatalogColumn]) -> None:
    """Refuse changes that are another table's, as far as its columns tell.

    The table may have got columns since its last change, or lost some.
    """
    row_type = changes.schema["after"].dataType
    sent = set(row_type.fieldNames()) if isinstance(row_type, T.StructType) else set()
    published = {shown for shown, column in columns.items() if not column.generated}
    if sent - set(columns) and published - sent:
        raise PgOutputError(
            f"the changes have the columns {', '.join(sorted(sent - set(columns)))}, which {name} "
            f"has not, and lack its {', '.join(sorted(published - sent))}: they are not of {name}, "
            "or the catalogue is not of the time after them"
        )


def _default(
    text: str, column: CatalogColumn, field: T.StructField, settings: Settings, where: str
) -> Any:
    """A value that the catalogue has as text, as Spark's type of its column takes it."""
    wanted = field.dataType.simpleString()
    type_ = column_type(column.type_id, column.type_modifier, registry=settings.registry)
    fitting = policies_for(type_, wanted, settings.policies)
    if fitting is None:
        if isinstance(field.dataType, T.AtomicType):
            return text  # of a domain, or from before the type was altered: Spark reads it
        raise PgOutputError(f"{where}: its type is not known to be {wanted}; give registry=")
    if is_text(type_, wanted):
        return text
    used = replace(settings, policies=fitting[0])
    try:
        stored_as = column_field(type_, used, wanted, binary=fitting[1])
        stored = stored_as.text(text.encode()) if stored_as.text is not None else None
    except ValueError as error:
        raise PgOutputError(f"{where}: {error}") from error
    (value,) = arrow_array(stored_as, column_of(stored_as, [stored])).to_pylist()
    return _as_tuples(value, field.dataType)


def _as_tuples(value: Any, data_type: T.DataType) -> Any:
    """A value of pyarrow's, of nested types as tuples."""
    if value is None:
        return None
    if isinstance(data_type, T.ArrayType):
        return tuple(_as_tuples(item, data_type.elementType) for item in value)
    if isinstance(data_type, T.StructType):
        return tuple(_as_tuples(value[part.name], part.dataType) for part in data_type.fields)
    if isinstance(data_type, T.MapType):
        return tuple(value)
    return value


def rows_after(
    changes: DataFrame,
    *,
    table: str,
    key: Sequence[str],
    added: Mapping[str, Any],
) -> DataFrame:
    """As :func:`current_state`, with what the catalogue knows given one by one.

    Parameters
    ----------
    changes : DataFrame
    table : str
        What errors call the table.
    key : sequence of str
        The key's columns: the replica identity's, or the primary key where that is FULL. Empty for
        a table without: its rows are a multiset.
    added : mapping of str to value
        Columns that rows older than the column may lack, with the value that they then have: a
        Python value, of nested types a tuple, or None. A column that is missing here must have been
        sent for every row.
    """
    row_type = changes.schema["after"].dataType
    if not isinstance(row_type, T.StructType):
        raise PgOutputError(f"{table}: the column after is no struct; give changes of one table")
    for name in (*key, *added):
        if name not in row_type.fieldNames():
            raise PgOutputError(f"{table} has no column {name!r} in its changes")
    defaults = {
        name: None if value is None else _literal(value, row_type[name].dataType)
        for name, value in added.items()
    }
    positioned = changes.withColumn(
        "position",
        F.struct(
            _required("commit_lsn", f"{table}: a change without its commit LSN"),
            _required("seq", f"{table}: a change without its position in its transaction"),
        ),
    )
    truncated = positioned.filter("op = 'truncate'").agg(F.max("position").alias("truncated"))
    rows = positioned.filter("op <> 'truncate'").join(
        F.broadcast(truncated), F.col("truncated").isNull() | (F.expr("position > truncated"))
    )
    if key:
        return _keyed(rows, table, row_type, list(key), defaults)
    return _multiset(rows, table, row_type, defaults)


def _required(name: str, sentence: str) -> Column:
    message = (
        f"{sentence}; changes must come from segments, or from frames with the columns commit_lsn "
        "and seq"
    )
    return F.coalesce(F.col(name), F.raise_error(F.lit(message)).cast("bigint")).alias(name)


def _brings_row() -> Column:
    """Whether a change brings a row that was not there, as an insert or as a row of a snapshot."""
    return F.col("op").isin("insert", "read")


def _unsent(name: str) -> Column:
    """Whether the change says nothing of a column's new value."""
    return F.expr(_unsent_sql(name))


def _quoted(text: str) -> str:
    """A literal of Spark SQL; in place of ${…} Spark would put a setting."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'").replace("$", "\\u0024")
    return f"'{escaped}'"


def _unsent_sql(name: str) -> str:
    return f"coalesce(array_contains(unchanged, {_quoted(name)}), false)"


def _field(tuple_: str, name: str) -> Column:
    # By literal: a column's name may hold dots and backticks.
    return F.col(tuple_).getItem(name)


# --- tables with a key ---------------------------------------------------------------------------


def _keyed(
    rows: DataFrame,
    table: str,
    row_type: T.StructType,
    key: list[str],
    defaults: Mapping[str, Column | None],
) -> DataFrame:
    touches = _occupations(_touches(_filled(rows, row_type), table, key))

    row_key = _shown_key(key)

    def columns(known: Callable[[int, str], str], value: Callable[[int, str], str]) -> list[Column]:
        """Of each column the value, where the condition says that it is known."""
        result = []
        for i, name in enumerate(row_type.fieldNames()):
            if name in key:
                column = _field("key", f"k{key.index(name)}")
            else:
                lost = f"concat({_quoted(f'{table}, row ')}, {row_key}, "
                lost = f"raise_error({lost}{_quoted(f', column {name}: {_UNSENT}')}))"
                case = f"CASE WHEN {known(i, name)} THEN {value(i, name)}"
                if name not in defaults:
                    column = F.expr(f"{case} ELSE {lost} END")
                # A row whose insert was seen lacks only what its table had not yet then.
                elif defaults[name] is None:
                    column = F.expr(f"{case} WHEN born THEN NULL ELSE {lost} END")
                else:
                    column = F.when(F.expr(known(i, name)), F.expr(value(i, name))).when(
                        F.col("born"), defaults[name]
                    )
                    column = column.otherwise(F.expr(lost))
            result.append(column.alias(name))
        return result

    # What comes last says everything, or is the insert itself: no history is needed.
    settled = "final and (unchanged is null or born)"
    followed = not touches.filter(f"final and not ({settled})").isEmpty()
    if followed:
        # Read from several sides below, each of which would sort the changes again.
        touches = touches.localCheckpoint()
    current = touches.filter(settled).select(
        *columns(
            lambda _, name: f"NOT {_unsent_sql(name)}", lambda _, name: f"after[{_quoted(name)}]"
        )
    )
    if not followed:
        return current

    moves = (
        touches.filter("leaves and moves")
        .filter("occupation <> position")  # of a row that was never seen: it begins here
        .select(F.col("position").alias("child"), F.col("occupation").alias("parent"))
    )
    histories = (
        touches.filter("not (leaves and moves)")
        .join(_origins(moves), F.col("occupation") == F.col("child"), "left")
        .withColumn("row_id", F.coalesce("parent", "occupation"))
    )
    unsettled = histories.filter(f"final and not ({settled})").select("row_id")
    latest = [
        # max_by passes over rows that have no position
        F.expr(
            f"max_by(named_struct('value', after[{_quoted(name)}]), "
            f"CASE WHEN after IS NOT NULL AND NOT {_unsent_sql(name)} THEN position END) AS v{i}"
        )
        for i, name in enumerate(row_type.fieldNames())
        if name not in key
    ]
    completed = (
        histories.join(unsettled, "row_id", "left_semi")
        .groupBy("row_id")
        .agg(
            F.max_by("key", F.when(F.col("final"), F.col("position"))).alias("key"),
            F.bool_or("born").alias("born"),
            *latest,
        )
        .select(*columns(lambda i, _: f"v{i} IS NOT NULL", lambda i, _: f"v{i}.value"))
    )
    return current.unionByName(completed)


def _shown_key(key: list[str]) -> str:
    """The expression for a row's key as errors show it."""
    parts = []
    for i, name in enumerate(key):
        parts += [_quoted(f"{', ' if i else ''}{name}="), f"cast(key.k{i} AS string)"]
    return f"concat({', '.join(parts)})"


def _filled(rows: DataFrame, row_type: T.StructType) -> DataFrame:
    """Takes what an update did not send from its old row, where that is whole."""
    whole = (F.col("old_kind") == "O") & F.col("unchanged").isNotNull() & F.col("after").isNotNull()
    if rows.filter(whole).isEmpty():
        return rows  # Spark would put the expression below into each of as many columns
    names = row_type.fieldNames()
    after = F.struct(
        *(
            F.when(_unsent(name), _field("before", name))
            .otherwise(_field("after", name))
            .alias(name)
            for name in names
        )
    )
    # What the old row has not got either is no TOAST value: the column did not exist yet.
    still = F.array_compact(
        F.array(
            *(
                F.when(_unsent(name) & _field("before", name).isNull(), F.lit(name))
                for name in names
            )
        )
    )
    return rows.withColumns(
        {
            "after": F.when(whole, after).otherwise(F.col("after")),
            "unchanged": F.when(whole, still).otherwise(F.col("unchanged")),
        }
    )


def _touches(rows: DataFrame, table: str, key: list[str]) -> DataFrame:
    """One row per key that a change touches: two where an update changes the key."""

    def known(name: str, value: Column) -> Column:
        message = F.concat(
            F.lit(f"{table}: the change at commit LSN "),
            F.col("commit_lsn").cast("string"),
            F.lit(", seq "),
            F.col("seq").cast("string"),
            F.lit(
                f" has no value of the key's column {name}; has the table's replica identity "
                "changed since? Then take a new copy of the table"
            ),
        )
        return F.coalesce(value, F.raise_error(message).cast("string"))

    old, new = [], []
    for i, name in enumerate(key):
        # Without an old tuple the key stayed; in the new one a key column that is stored out of
        # line may be missing, and then stands in the old one.
        before = _field("before", name)
        after = F.when(_unsent(name), before).otherwise(_field("after", name))
        old.append(
            known(name, F.when(F.col("before").isNull(), after).otherwise(before)).alias(f"k{i}")
        )
        new.append(known(name, after).alias(f"k{i}"))
    old_key, new_key = F.struct(*old), F.struct(*new)

    def touch(where: Column, *, arrives: bool, leaves: bool, moves: bool = False) -> Column:
        return F.struct(
            where.alias("key"),
            F.lit(arrives).alias("arrives"),
            F.lit(leaves).alias("leaves"),
            F.lit(moves).alias("moves"),
        )

    touches = (
        F.when(_brings_row(), F.array(touch(new_key, arrives=True, leaves=False)))
        .when(F.col("op") == "delete", F.array(touch(old_key, arrives=False, leaves=True)))
        .when(old_key == new_key, F.array(touch(new_key, arrives=False, leaves=False)))
        .otherwise(
            F.array(
                touch(old_key, arrives=False, leaves=True, moves=True),
                touch(new_key, arrives=True, leaves=False, moves=True),
            )
        )
    )
    return rows.select(
        "position",
        "after",
        "unchanged",
        _brings_row().alias("born"),
        F.explode(touches).alias("touch"),
    ).select(
        "position",
        "touch.*",
        "born",
        F.when(F.expr("not touch.leaves"), F.col("after")).alias("after"),
        F.when(F.expr("not touch.leaves"), F.col("unchanged")).alias("unchanged"),
    )


def _occupations(touches: DataFrame) -> DataFrame:
    """Adds which occupation of its key a touch belongs to, and whether it is the key's last word.

    An occupation is named by the position of its first touch: an arrival, or whatever comes first
    at a key that no seen row occupies. Where two keys are touched at one position, an occupation of
    the old key that begins there is the same, never seen row's.
    """
    at_key = Window.partitionBy("key").orderBy("position")
    begins = F.col("arrives") | F.coalesce(F.lag("leaves").over(at_key), F.lit(True))
    return (
        touches.withColumn("begins", begins)
        .withColumn("final", ~F.col("leaves") & F.lead("position").over(at_key).isNull())
        .withColumn(
            "occupation",
            F.last(F.when(F.col("begins"), F.col("position")), ignorenulls=True).over(at_key),
        )
    )


def _origins(moves: DataFrame) -> DataFrame:
    """From links (child, parent) between occupations to links (child, first of the chain).

    Each round joins the links with themselves, which doubles how far they reach.
    """
    # A checkpoint, since a plan that is joined with itself doubles too.
    links = moves.localCheckpoint()
    while True:
        further = links.select(F.col("child").alias("parent"), F.col("parent").alias("origin"))
        longer = (
            links.join(further, "parent", "left")
            .select("child", F.coalesce("origin", "parent").alias("parent"), "origin")
            .localCheckpoint()
        )
        links = longer.select("child", "parent")
        if longer.filter("origin is not null").isEmpty():
            return links


# --- tables without a key ------------------------------------------------------------------------


def _multiset(
    rows: DataFrame, table: str, row_type: T.StructType, defaults: Mapping[str, Column | None]
) -> DataFrame:
    def at(text: str) -> Column:
        return F.concat(
            F.lit(f"{table}: the change at commit LSN "), F.col("commit_lsn").cast("string"),
            F.lit(", seq "), F.col("seq").cast("string"), F.lit(text),
        )  # fmt: skip

    def lacking(field: T.StructField) -> Column:
        if field.name in defaults:
            default = defaults[field.name]
            return F.lit(None) if default is None else default
        return F.raise_error(at(f", column {field.name}: {_UNSENT}")).cast(field.dataType)

    def whole(new: bool) -> Column:
        fields = []
        for field in row_type.fields:
            before, after = _field("before", field.name), _field("after", field.name)
            # Not sent, and not in the old row either: the schema had not got the column yet. What
            # is unchanged TOAST stands in the old row.
            unsent = F.coalesce(before, lacking(field))
            fields.append(
                F.when(_unsent(field.name), unsent)
                .otherwise(after if new else before)
                .alias(field.name)
            )
        return F.struct(*fields)

    needs_old = F.when(F.coalesce(F.col("old_kind"), F.lit("")) == "O", F.lit(-1)).otherwise(
        F.raise_error(
            at(" has no whole old row; a table without key needs REPLICA IDENTITY FULL")
        ).cast("int")
    )
    added = F.struct(F.lit(1).alias("step"), F.lit(1).alias("count"), whole(True).alias("row"))
    removed = F.struct(F.lit(0).alias("step"), needs_old.alias("count"), whole(False).alias("row"))
    steps = rows.select(
        "position",
        F.explode(
            F.when(_brings_row(), F.array(added))
            .when(F.col("op") == "delete", F.array(removed))
            .otherwise(F.array(removed, added))
        ).alias("change"),
    ).select("position", "change.*")
    steps = steps.withColumn(
        "like",
        F.struct(
            *(
                exact(_field("row", field.name), field.dataType).alias(f"c{i}")
                for i, field in enumerate(row_type.fields)
            )
        ),
    )
    # A delete of a row that was never seen removes none: the count does not go below zero.
    alike = Window.partitionBy("like").orderBy("position", "step")
    counted = (
        steps.withColumn("total", F.sum("count").over(alike))
        .groupBy("like")
        .agg(
            F.first("row").alias("row"),
            F.max_by("total", F.struct("position", "step")).alias("total"),
            F.least(F.min("total"), F.lit(0)).alias("never_seen"),
        )
        .withColumn("rows", (F.col("total") - F.col("never_seen")).cast("int"))
        .filter("rows > 0")
    )
    return counted.select("row", F.explode(F.array_repeat(F.lit(0), F.col("rows")))).select(
        *(_field("row", field.name).alias(field.name) for field in row_type.fields)
    )


def exact(value: Column, data_type: T.DataType) -> Column:
    """What is equal in Spark if and only if the values are the same in PostgreSQL.

    Spark takes -0.0 for 0.0, which PostgreSQL stores apart; their texts differ.
    """
    if isinstance(data_type, (T.FloatType, T.DoubleType, T.VariantType)):
        return value.cast("string")
    if isinstance(data_type, T.ArrayType):
        return F.transform(value, lambda item: exact(item, data_type.elementType))
    if isinstance(data_type, T.StructType):
        fields = [
            exact(value.getItem(f.name), f.dataType).alias(f"c{i}")
            for i, f in enumerate(data_type.fields)
        ]
        return F.when(value.isNotNull(), F.struct(*fields))
    if isinstance(data_type, T.MapType):
        entries = F.array_sort(F.map_entries(value))
        return exact(entries, T.ArrayType(_entry(data_type)))
    return value


def _entry(data_type: T.MapType) -> T.StructType:
    fields = [("key", data_type.keyType), ("value", data_type.valueType)]
    return T.StructType([T.StructField(name, part) for name, part in fields])


# --- values of the catalogue ---------------------------------------------------------------------


def _literal(value: Any, data_type: T.DataType) -> Column:
    """A Python value, as pyarrow would take it, as a constant of a column's type."""
    return _constant(value, data_type).cast(data_type)


def _constant(value: Any, data_type: T.DataType) -> Column:
    if value is None:
        return F.lit(None)
    if isinstance(data_type, T.ArrayType):
        return F.array(*(_literal(item, data_type.elementType) for item in value))
    if isinstance(data_type, T.StructType):
        parts = zip(data_type.fields, value, strict=True)
        return F.struct(*(_literal(part, f.dataType).alias(f.name) for f, part in parts))
    if isinstance(data_type, T.MapType):
        return F.map_from_entries(_constant(value, T.ArrayType(_entry(data_type))))
    if isinstance(value, datetime.datetime):
        value = value.isoformat(" ")
    elif isinstance(value, (datetime.date, datetime.time)):
        value = value.isoformat()
    elif isinstance(value, (uuid.UUID, Decimal)):
        value = str(value)
    return F.lit(value)
