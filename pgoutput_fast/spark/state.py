"""Current-state tables: the rows that a table holds after its changes.

The input is the DataFrame of one table's changes, as :func:`pgoutput_fast.spark.read_segments`
returns it. The output is the remaining rows. One task sorts the changes by ``(commit_lsn, seq)``
and folds them once (:mod:`pgoutput_fast.apply`). Many changes take several tasks, and each task
gets different keys. Keys between which rows have moved are grouped before, so that each row is in
one task.

The column `relation` of the changes has each new Relation. It divides the changes into spans: the
changes of a span have the same columns. :func:`pgoutput_fast.apply.evolution.evolve` says what the
server did to the rows between two spans, as for the state tables of a sync. If the catalogue does
not say it, an error names a row: no value is guessed.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import pyarrow as pa
from pyspark.sql import functions as F  # noqa: N812 - its usual name
from pyspark.sql import types as T  # noqa: N812

from pgoutput_fast.apply.evolution import TableInCatalog, evolve, new_columns
from pgoutput_fast.apply.versions import ColumnVersion, Version, version_of
from pgoutput_fast.catalog import CatalogColumn
from pgoutput_fast.columnar.arrays import column_of
from pgoutput_fast.columnar.pyarrow_bridge import arrow_array
from pgoutput_fast.errors import Argument, PgOutputError
from pgoutput_fast.lsn import format_lsn
from pgoutput_fast.names import qualified, shown_name
from pgoutput_fast.options import count
from pgoutput_fast.policies import Policies
from pgoutput_fast.settings import Settings
from pgoutput_fast.types import column_type

from ._column_types import (
    arrow_schema,
    column_ddl,
    column_field,
    is_text,
    parsed,
    policies_for,
)
from ._state_rows import CHANGE, Position, StateSpan, StateSpans, altered, rows_of, united
from ._worker_errors import worker_errors

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pyspark.sql import Column, DataFrame

    from pgoutput_fast.apply.targets import Alteration, StateColumn
    from pgoutput_fast.catalog import CatalogTable
    from pgoutput_fast.types import ColumnType, TypeRegistry

_CHANGES_OF_A_TASK = 2_000_000


def current_state(
    changes: DataFrame,
    table: CatalogTable,
    *,
    registry: TypeRegistry | None = None,
    policies: Policies | None = None,
    before: CatalogTable | None = None,
    partitions: int | None = None,
) -> DataFrame:
    """Return the rows that a table has after all of its changes, as a DataFrame.

    Parameters
    ----------
    changes : DataFrame
        All changes of one table from its first row on, or from a snapshot on, with the columns of
        :func:`read_segments`. This call reads it, and Spark reads it again whenever the result is
        evaluated. So store it first, for example as a Parquet table.
    table : CatalogTable
        ``catalog.table("public.accounts")``, read from the server after the last change.
    registry, policies : optional
        As for the changes. They decode the defaults of columns that were added.
    before : CatalogTable, optional
        The same table, read before columns were added or altered. If the server has ever rewritten
        the table, only `before` shows that a column without a default is null in older rows, and
        that an altered type did not change the values.
    partitions : int, optional
        The number of tasks; by default one for each 2,000,000 changes. A task keeps the rows of its
        keys in memory. A table without a key takes one task.

    Returns
    -------
    DataFrame
        The table's columns. If names differ in case only, the later names get a ``_`` at the end,
        because Spark takes the names as equal. If changes are missing or an alteration makes rows
        unknown, the evaluation raises an error that names the table and a row.

    Raises
    ------
    PgOutputError
        The changes belong to another table or are not committed, or a default does not fit its
        column.
    """
    if partitions is not None:
        count(1).check("partitions", partitions)
    row = changes.schema["after"].dataType
    if not isinstance(row, T.StructType):
        raise PgOutputError(
            f"{qualified(table)}: the column after is not a struct",
            code="unfit_input",
            table=qualified(table),
            hint="Give changes of one table",
        )
    table = _shown(table)
    published = {column.name for column in table.columns if column.is_published}
    for name in table.key:
        if name not in published.intersection(row.fieldNames()):
            raise PgOutputError(
                f"{qualified(table)}: the changes lack the key's column {name!r}",
                code="unfit_input",
                table=qualified(table),
            )
    if "relation" not in changes.columns:
        raise PgOutputError(
            f"{qualified(table)}: the changes lack the column relation, which describes the table",
            code="unfit_input",
            table=qualified(table),
            hint="Give changes as read_segments or decode_frames returns them",
        )
    keys = _StateKeys(changes, row, table.key)
    summary = _summary(changes, table, keys)
    settings = Settings(policies or Policies(), registry=registry)
    spans = _Spans(summary, table, None if before is None else _shown(before), row, settings)
    zone = changes.sparkSession.conf.get("spark.sql.session.timeZone") or "UTC"
    result = spans.result()
    state = StateSpans(
        qualified(table), spans.key(), tuple(spans.spans), arrow_schema(result, zone)
    )
    wanted = changes.select(*CHANGE).filter("op <> 'truncate'")
    if summary.truncated is not None:
        wanted = wanted.filter(~_is_up_to(summary.truncated))
    wanted = _in_stream_order(wanted, keys, summary, partitions)

    def fold(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with worker_errors():
            yield from rows_of(batches, state)

    return wanted.select(*CHANGE).mapInArrow(fold, result)


def _is_up_to(position: Position) -> Column:
    lsn, seq = F.col("commit_lsn"), F.col("seq")
    return (lsn < position[0]) | ((lsn == position[0]) & (seq <= position[1]))


# --- what the changes are ------------------------------------------------------------------------


class _StateKeys:
    """The keys of changes, as columns of Spark."""

    def __init__(self, changes: DataFrame, row: T.StructType, key: Sequence[str]) -> None:
        names = [name.casefold() for name in row.fieldNames()]
        # Spark ignores case when it finds a field by name, so equal names are replaced by numbers.
        alike = len(set(names)) < len(names)
        numbered = T.StructType(
            [T.StructField(f"c{i}", field.dataType) for i, field in enumerate(row.fields)]
        )
        self._old, self._new = [], []
        for name in key:
            shown = f"c{row.fieldNames().index(name)}" if alike else name
            before, after = (
                (changes[side].cast(numbered) if alike else changes[side]).getItem(shown)
                for side in ("before", "after")
            )
            self._old.append(before)
            unsent = F.coalesce(F.array_contains("unchanged", name), F.lit(False))
            self._new.append(F.when(unsent, before).otherwise(after))
        types = [row[row.fieldNames().index(name)].dataType for name in key]
        self.is_hashable = bool(key) and not any(map(_is_opaque, types))

    @property
    def moves(self) -> Column:
        """Whether a change is an update of the key."""
        same = F.lit(True)
        for old, new in zip(self._old, self._new, strict=True):
            same = same & old.eqNullSafe(new)
        return (F.col("op") == "update") & F.col("old_kind").isNotNull() & ~same

    @property
    def old(self) -> Column:
        """The hash of the key before a change."""
        return F.xxhash64(*self._old)

    @property
    def new(self) -> Column:
        """The hash of the key after a change; for a delete, of the deleted row's key."""
        ends = zip(self._old, self._new, strict=True)
        return F.xxhash64(*(F.when(F.col("op") == "delete", old).otherwise(new)
                            for old, new in ends))  # fmt: skip


def _is_opaque(data_type: T.DataType) -> bool:
    """Return whether Spark can't hash a type."""
    if isinstance(data_type, T.ArrayType):
        return _is_opaque(data_type.elementType)
    if isinstance(data_type, T.StructType):
        return any(_is_opaque(field.dataType) for field in data_type.fields)
    return isinstance(data_type, (T.MapType, T.VariantType))


class _ChangeSummary(NamedTuple):
    """A summary of all changes.

    Fields: number (of changes), truncated (the position of the last Truncate), relations (each new
    Relation and its position), moves (whether a change updates a key).
    """

    number: int
    truncated: Position | None
    relations: list[tuple[Position, str]]
    moves: bool


def _summary(changes: DataFrame, table: CatalogTable, keys: _StateKeys) -> _ChangeSummary:
    """Read all changes once and summarize them.

    Raises
    ------
    PgOutputError
        A change lacks its commit LSN or its seq.
    """
    position = F.struct("commit_lsn", "seq")
    relation = F.struct("commit_lsn", "seq", "relation")
    row = changes.agg(
        F.count("*").alias("number"),
        F.count_if(F.col("commit_lsn").isNull() | F.col("seq").isNull()).alias("unplaced"),
        F.max(F.when(F.col("op") == "truncate", position)).alias("truncated"),
        F.collect_list(F.when(F.col("relation").isNotNull(), relation)).alias("relations"),
        F.max(keys.moves).alias("moves"),
    ).collect()[0]
    if row.unplaced:
        raise PgOutputError(
            f"{qualified(table)}: {row.unplaced} changes lack commit_lsn or seq",
            code="unfit_input",
            hint="Read the changes from a change log, or from frames with the columns commit_lsn "
            "and seq",
            table=qualified(table),
        )
    return _ChangeSummary(
        row.number,
        None if row.truncated is None else tuple(row.truncated),
        sorted(((entry.commit_lsn, entry.seq), entry.relation) for entry in row.relations),
        bool(row.moves),
    )


def _in_stream_order(
    changes: DataFrame, keys: _StateKeys, summary: _ChangeSummary, partitions: int | None
) -> DataFrame:
    """Return the changes in stream order, with all changes of a key in one partition."""
    count = partitions or max(1, -(-summary.number // _CHANGES_OF_A_TASK))
    if count == 1 or not keys.is_hashable:
        partitioned_changes = changes.repartition(1)
    elif not summary.moves:
        partitioned_changes = changes.repartition(count, keys.new)
    else:
        moves = changes.filter(keys.moves).select(keys.old.alias("old"), keys.new.alias("new"))
        places = moves.distinct().repartition(1).mapInArrow(united, "hash bigint, place bigint")
        partitioned_changes = (
            changes.withColumn("hash", keys.new)
            .join(places, "hash", "left")
            .repartition(count, F.coalesce("place", "hash"))
        )
    return partitioned_changes.sortWithinPartitions("commit_lsn", "seq")


# --- the spans of the changes --------------------------------------------------------------------


class _Spans:
    """Finds the spans of a table's changes, and how the table was altered between them.

    Parameters
    ----------
    summary : _ChangeSummary
    table, before : CatalogTable
        As for `current_state`.
    row : pyspark.sql.types.StructType
        The columns of the changes.
    settings : Settings

    Attributes
    ----------
    spans : list of StateSpan
        The last one begins after all changes.

    Raises
    ------
    PgOutputError
        The changes are of other tables.
    """

    def __init__(
        self, summary: _ChangeSummary, table: CatalogTable, before: CatalogTable | None,
        row: T.StructType, settings: Settings,
    ) -> None:  # fmt: skip
        self._table = table
        self._sent = {field.name: field.dataType for field in row.fields}
        self._settings = settings
        self._columns: tuple[StateColumn, ...] = ()
        # Of the rows so far, by name in the state table.
        self._types: dict[str, T.DataType | None] = {}
        self._last: Version | None = None
        self._key: tuple[str, ...] = ()  # the last key of a Relation
        versions = [(position, _version(text)) for position, text in summary.relations]
        ids = {version.relation_id for _, version in versions}
        if ids and table.relation_id not in ids:
            raise PgOutputError(
                f"the changes of {versions[-1][1].table} have relation id "
                f"{', '.join(map(str, sorted(filter(None, ids))))}, and {qualified(table)} in the "
                f"catalogue has {table.relation_id}: it is another table, or the table was dropped "
                "and created again",
                code="another_history",
                table=qualified(table),
                hint="Give a catalogue that was read after the last change",
            )
        if summary.truncated is not None:  # alterations before that concern no row
            first = [i for i, (position, _) in enumerate(versions) if position <= summary.truncated]
            versions = versions[max(first, default=0) :]
        own = (version for _, version in versions if version.relation_id == table.relation_id)
        self._before = before or _as_created(table, next(own, None))
        self.spans = [self._span(position, version) for position, version in versions]
        now = tuple(
            ColumnVersion(column.name, pa.null(), column.type_id, column.type_modifier)
            for column in table.columns
            if column.is_published
        )
        self.spans.append(
            self._span(None, Version(qualified(table), table.relation_id, "d", table.key, now))
        )

    def result(self) -> T.StructType:
        """Return the schema of the result."""
        return T.StructType(
            [
                T.StructField(
                    column.stored_name, self._types.get(column.stored_name) or self._natural(column)
                )
                for column in self._columns
            ]
        )

    def key(self) -> tuple[str, ...]:
        """Return the key's columns, by their names in the result."""
        stored_names = {column.name: column.stored_name for column in self._columns}
        return tuple(stored_names[name] for name in self._table.key)

    def _span(self, position: Position | None, version: Version) -> StateSpan:
        """Return the span that begins at a position with a version of the table."""
        if version.relation_id != self._table.relation_id:
            return StateSpan(position, {}, is_other=True)
        last, self._last = self._last, version
        table_in_catalog = self._table_in_catalog(version, is_sent=position is not None)
        alterations: list[Alteration] = []
        unknown = self._other_key(version)
        if self._before is not None and last is not None:
            evolved = evolve(self._columns, version, table_in_catalog)
            unknown = evolved.unknown or unknown
            if unknown is None:
                self._columns, alterations = evolved.columns, evolved.alterations
                self._types = altered(self._types, alterations, lambda _: None)
        elif last is not None and last.columns != version.columns:
            unknown = (
                "its columns were altered. By their numbers, the table also lost columns, and only "
                "an earlier catalogue, given as before, says which"
            )
        if last is None or unknown is not None:
            self._columns, self._types = new_columns(version, table_in_catalog), {}
        columns = {
            column.name: column.stored_name for column in self._columns if column.name in self._sent
        }
        if position is not None:
            lost = [name for name, stored_name in columns.items() if stored_name not in self._types]
            if last is not None and unknown is None and lost:
                unknown = (
                    f"column {lost[0]} got its name, and the changes do not have its values from "
                    "before"
                )
        if position is not None or not self._types:
            self._types = {stored_name: self._sent[name] for name, stored_name in columns.items()}
        if unknown is not None:
            return StateSpan(position, columns, unknown=f"{_where(position)}, {unknown}")
        return StateSpan(position, columns, tuple(alterations))

    def _other_key(self, version: Version) -> str | None:
        """Return how the key changed with a version; None if it did not.

        Without a key there are only inserts, which go with any later key. With REPLICA IDENTITY
        FULL, a Relation does not tell the key.
        """
        if version.replica_identity in ("f", "n") or not version.key:
            return None
        last, self._key = self._key, version.key
        if not last or set(last) == set(version.key):
            return None
        return f"the key changed from ({', '.join(last)}) to ({', '.join(version.key)})"

    def _table_in_catalog(self, version: Version, *, is_sent: bool) -> TableInCatalog:
        """Return what the catalogue says; `is_sent`: changes with this version were sent."""
        before = self._before
        columns = {column.name: column for column in version.columns}

        def value(name: str, text: str | None) -> pa.Array:
            if is_sent and name not in self._sent:
                return pa.nulls(1)  # the column was dropped since
            return self._value(text, columns[name], self._sent[name] if is_sent else None)

        return TableInCatalog(
            self._table, before, value, lambda: iter([] if before is None else [before]),
            is_certain=False,
        )  # fmt: skip

    def _type(self, column: ColumnVersion | StateColumn) -> ColumnType:
        return column_type(
            column.type_id or 0,
            -1 if column.type_modifier is None else column.type_modifier,
            registry=self._settings.registry,
        )

    def _natural(self, column: ColumnVersion | StateColumn) -> T.DataType:
        """Return the type of a column that no change has."""
        return parsed(column.name, column_ddl(self._type(column), self._settings, binary=False))

    def _value(self, text: str | None, column: ColumnVersion, sent: T.DataType | None) -> pa.Array:
        """Return the value of older rows in a column, from the catalogue, in an array of length 1.

        Parameters
        ----------
        text : str or None
        column : ColumnVersion
        sent : pyspark.sql.types.DataType or None
            The column's type in the changes; None if no change has the column.
        """
        if text is None:
            return pa.nulls(1)
        where = f"{qualified(self._table)}, default of the column {column.name}"
        wanted = (sent or self._natural(column)).simpleString()
        type_ = self._type(column)
        fitting = policies_for(type_, wanted, self._settings)
        if fitting is None:
            raise PgOutputError(
                f"{where}: the column's type is unknown, so it can't become {wanted}",
                code="schema_unknown",
                hint=("Give ", Argument("registry")),
                table=qualified(self._table),
            )
        if is_text(type_, wanted):
            return pa.array([text])
        used = replace(self._settings, policies=fitting[0])
        try:
            field = column_field(type_, used, wanted, binary=fitting[1])
            value = field.text(text.encode()) if field.text is not None else None
        except ValueError as error:
            raise PgOutputError(
                f"{where}: {error}", code="unfit_value", table=qualified(self._table)
            ) from error
        return arrow_array(field, column_of(field, [value]))


def _as_created(table: CatalogTable, version: Version | None) -> CatalogTable | None:
    """Return the table as the server created it; None if it had other columns at its first change.

    The server numbers columns from 1, and never uses a number again. Its first file node is the
    table's OID.
    """
    if version is None:
        return None
    numbers = {column.name: column.number for column in table.columns}
    columns = []
    for number, column in enumerate(version.columns, 1):
        if numbers.get(column.name, number) != number:
            return None
        modifier = -1 if column.type_modifier is None else column.type_modifier
        columns.append(
            CatalogColumn(
                column.name, column.type_id or 0, "", modifier, not_null=False, has_default=False,
                generated="", has_missing=False, missing=None, number=number,
            )
        )  # fmt: skip
    oids = (table.relation_id, *table.partition_ids)
    first_nodes = tuple(
        oid if node else 0 for oid, node in zip(oids, table.file_nodes, strict=False)
    )
    return replace(table, columns=tuple(columns), file_nodes=first_nodes)


def _where(position: Position | None) -> str:
    if position is None:
        return "after the last change"
    return f"at change {position[1]} of the transaction committed at {format_lsn(position[0])}"


def _version(relation: str) -> Version:
    """Parse the column `relation` of a change."""
    metadata = json.loads(relation)
    names = [column["name"] for column in json.loads(metadata["pgoutput.columns"])]
    row = pa.struct([(name, pa.null()) for name in names])
    return version_of(pa.schema([("after", row)], metadata))


def _shown(table: CatalogTable) -> CatalogTable:
    """Return a table with its names as Unicode, as changes have them."""
    return replace(
        table,
        namespace=shown_name(table.namespace),
        name=shown_name(table.name),
        primary_key=tuple(map(shown_name, table.primary_key)),
        identity_index=tuple(map(shown_name, table.identity_index)),
        columns=tuple(replace(column, name=shown_name(column.name)) for column in table.columns),
    )
