"""Current-state tables: the rows that a table holds after its changes.

The input is the DataFrame of one table's changes, as :func:`pgoutput_fast.spark.read_segments`
returns it. The output is the remaining rows. One task sorts the changes by ``(commit_lsn, seq)``
and folds them once (:mod:`pgoutput_fast.apply`). Many changes take several tasks, and each task
gets different keys. Keys between which rows have moved are grouped before, so that each row is in
one task.

Each new Relation is in the column `relation` of the changes. It says which table a change belongs
to, and which columns were altered between which changes. If neither stream nor catalogue has a
value, an error names the row: null is never assumed.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

import pyarrow as pa
from pyspark.sql import functions as F  # noqa: N812 - its usual name
from pyspark.sql import types as T  # noqa: N812

from pgoutput_fast.apply.evolution import is_rewritten, new_columns
from pgoutput_fast.apply.versions import ColumnVersion, Version, check_follows, version_of
from pgoutput_fast.columnar.arrays import column_of
from pgoutput_fast.columnar.pyarrow_bridge import arrow_array
from pgoutput_fast.errors import Argument, PgOutputError
from pgoutput_fast.lsn import format_lsn
from pgoutput_fast.names import qualified, shown_name
from pgoutput_fast.options import choice, count
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
from ._state_rows import CHANGE, Break, Output, Position, State, rows_of, united
from ._told_errors import telling

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import Column, DataFrame, SparkSession

    from pgoutput_fast.catalog import CatalogColumn, CatalogTable
    from pgoutput_fast.types import TypeRegistry

Rewritten = Literal["error", "keep"]

_CHANGES_OF_A_TASK = 2_000_000


def current_state(
    changes: DataFrame,
    table: CatalogTable,
    *,
    registry: TypeRegistry | None = None,
    policies: Policies | None = None,
    before: CatalogTable | None = None,
    rewritten: Rewritten = "error",
    partitions: int | None = None,
) -> DataFrame:
    """Return the rows that a table has after all of its changes, as a DataFrame.

    Parameters
    ----------
    changes : DataFrame
        All changes of one table from its first row on, or from a snapshot on, with the columns of
        :func:`read_segments`. This call reads it, and Spark reads it again whenever the result is
        evaluated. So store it first, for example as a Parquet table. Without the column `relation`,
        the function does not notice altered types, nor a table that was dropped and created again.
    table : CatalogTable
        ``catalog.table("public.accounts")``, read from the server after the last change.
    registry, policies : optional
        As for the changes. They decode the defaults of columns that were added.
    before : CatalogTable, optional
        The same table, read before columns were added or altered. If the server has ever rewritten
        the table, only `before` shows that a column without a default is null in older rows, and
        that an altered type did not change the values.
    rewritten : {"error", "keep"}
        What to do if the server rewrote rows because a type was altered. Because of ``ALTER TYPE …
        USING``, the rows' values are then unknown. "error" raises an error, unless a snapshot
        follows. "keep" states that the values are the same in the new type.
    partitions : int, optional
        The number of tasks; by default one for each 2,000,000 changes. A task keeps the rows of its
        keys in memory. A table without a key takes one task.

    Returns
    -------
    DataFrame
        The table's columns. If names differ in case only, the later names get a ``_`` at the end,
        because Spark takes the names as equal. If changes are missing or a value is unknown, the
        evaluation raises an error that names the table and the row.

    Raises
    ------
    PgOutputError
        The changes belong to another table or are not committed, or a default does not fit its
        column.
    """
    choice(*get_args(Rewritten)).check("rewritten", rewritten)
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
    key = tuple(shown_name(name) for name in table.key)
    for name in key:
        if name not in row.fieldNames():
            raise PgOutputError(
                f"{qualified(table)}: the changes lack the key's column {name!r}",
                code="unfit_input",
                table=qualified(table),
            )
    seen = _look(changes, table, _StateKeys(changes, row, key))
    told = _Told(seen.relations, table, seen.truncated)
    told.check_columns(row.fieldNames())
    settings = Settings(policies or Policies(), registry=registry)
    planned = _StatePlan(changes.sparkSession, table, row, told, settings, before)
    state = planned.state(key, seen.lacking, rewritten)
    wanted = changes.select(*CHANGE).filter("op <> 'truncate'")
    if (behind := told.behind) is not None:
        wanted = wanted.filter(behind)
    wanted = _placed(wanted, _StateKeys(changes, row, key), seen, partitions)

    def fold(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with telling():
            yield from rows_of(batches, state)

    return wanted.select(*CHANGE).mapInArrow(fold, planned.result())


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


class _SeenChanges(NamedTuple):
    """A summary of all changes.

    Fields: number (of changes), truncated (the position of the last Truncate), relations (each new
    Relation and its position), lacking (columns that inserted rows lack), moves (whether a change
    updates a key).
    """

    number: int
    truncated: Position | None
    relations: list[tuple[Position, str]]
    lacking: set[str]
    moves: bool


def _look(changes: DataFrame, table: CatalogTable, keys: _StateKeys) -> _SeenChanges:
    """Read all changes once and summarize them.

    Raises
    ------
    PgOutputError
        A change lacks its commit LSN or its seq.
    """
    place = F.struct("commit_lsn", "seq")
    relation = F.col("relation") if "relation" in changes.columns else F.lit(None).cast("string")
    told = F.struct("commit_lsn", "seq", relation.alias("relation"))
    row = changes.agg(
        F.count("*").alias("number"),
        F.count_if(F.col("commit_lsn").isNull() | F.col("seq").isNull()).alias("unplaced"),
        F.max(F.when(F.col("op") == "truncate", place)).alias("truncated"),
        F.collect_list(F.when(relation.isNotNull(), told)).alias("relations"),
        F.collect_set(F.when(F.col("op").isin("insert", "read"), F.col("unchanged"))).alias(
            "lacking"
        ),
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
    return _SeenChanges(
        row.number,
        None if row.truncated is None else tuple(row.truncated),
        sorted(((entry.commit_lsn, entry.seq), entry.relation) for entry in row.relations),
        set(itertools.chain.from_iterable(row.lacking)),
        bool(row.moves),
    )


def _placed(
    changes: DataFrame, keys: _StateKeys, seen: _SeenChanges, partitions: int | None
) -> DataFrame:
    """Return the changes in stream order, with all changes of a key in one partition."""
    count = partitions or max(1, -(-seen.number // _CHANGES_OF_A_TASK))
    if count == 1 or not keys.is_hashable:
        placed = changes.repartition(1)
    elif not seen.moves:
        placed = changes.repartition(count, keys.new)
    else:
        moves = changes.filter(keys.moves).select(keys.old.alias("old"), keys.new.alias("new"))
        places = moves.distinct().repartition(1).mapInArrow(united, "hash bigint, place bigint")
        placed = (
            changes.withColumn("hash", keys.new)
            .join(places, "hash", "left")
            .repartition(count, F.coalesce("place", "hash"))
        )
    return placed.sortWithinPartitions("commit_lsn", "seq")


# --- what Relations tell -------------------------------------------------------------------------


class _RelationSince(NamedTuple):
    """A version of the table, and the position of its first change."""

    position: Position
    version: Version


class _Told:
    """The versions of the table, as the Relations among the changes describe them.

    Parameters
    ----------
    relations : list of (Position, str)
        In stream order.
    table : CatalogTable
    truncated : Position or None
        The last Truncate; changes before it have no effect.

    Raises
    ------
    PgOutputError
        The Relations belong to other tables.
    """

    def __init__(
        self,
        relations: list[tuple[Position, str]],
        table: CatalogTable,
        truncated: Position | None,
    ) -> None:
        self._table = table
        self._truncated = truncated
        stretches = [_RelationSince(place, _version(text)) for place, text in relations]
        ids = {entry.version.relation_id for entry in stretches}
        if ids and table.relation_id not in ids:
            raise PgOutputError(
                f"the changes of {stretches[-1].version.table} have relation id "
                f"{', '.join(map(str, sorted(filter(None, ids))))}, and {qualified(table)} in the "
                f"catalogue has {table.relation_id}: it is another table, or the table was dropped "
                "and created again",
                code="another_history",
                table=qualified(table),
                hint="Give a catalogue that was read after the last change",
            )
        self._others = stretches if len(ids) > 1 else []
        self.versions: list[_RelationSince] = []
        """The versions since the last Truncate, each with its first position."""
        for entry in stretches:
            if entry.version.relation_id != table.relation_id:
                continue
            if truncated is not None and entry.position <= truncated:
                self.versions = []
            if not self.versions or self.versions[-1].version != entry.version:
                self.versions.append(entry)

    @property
    def behind(self) -> Column | None:
        """The condition for changes with an effect: the table's own, since it was last empty."""
        conditions = []
        if self._truncated is not None:
            conditions.append(~_before(self._truncated) & ~_is_at(self._truncated))
        ends = [entry.position for entry in self._others[1:]]
        for entry, end in itertools.zip_longest(self._others, ends):
            if entry.version.relation_id != self._table.relation_id:
                before = _before(entry.position)
                conditions.append(before if end is None else before | ~_before(end))
        conjunction = None
        for condition in conditions:
            conjunction = condition if conjunction is None else conjunction & condition
        return conjunction

    @property
    def last(self) -> Version | None:
        """The newest version; None without Relations."""
        return self.versions[-1].version if self.versions else None

    def check_columns(self, names: Sequence[str]) -> None:
        """Refuse changes whose columns show that they belong to another table.

        The table may have gained columns since its last change, or lost some, but not both.
        """
        name, last = qualified(self._table), self.last
        old_names = set(names) if last is None else {column.name for column in last.columns}
        columns = {shown_name(column.name): column for column in self._table.columns}
        gone = old_names - set(columns)
        come = {shown for shown, column in columns.items() if column.is_published} - old_names
        if gone and come:
            raise PgOutputError(
                f"{name} in the catalogue lacks the changes' columns {', '.join(sorted(gone))}, "
                f"and the changes lack its columns {', '.join(sorted(come))}: the changes are of "
                "another table, columns were renamed after the last change, or the catalogue is "
                "too old",
                code="unfit_schema",
                hint="Give changes of this table, and a catalogue that was read after the last "
                "change",
                table=name,
            )

    def born(self) -> dict[str, Position]:
        """Return the first position of each column whose name an earlier column had."""
        positions = {}
        names = [{column.name for column in entry.version.columns} for entry in self.versions]
        for name in names[-1] if names else ():
            lacking = [i for i, version in enumerate(names) if name not in version]
            if lacking and any(name in version for version in names[: lacking[-1]]):
                positions[name] = self.versions[lacking[-1] + 1].position
        return positions

    def renamed(self) -> set[str]:
        """Return columns that replaced a column of the same type: that column may be renamed."""
        names: set[str] = set()
        for previous, following in itertools.pairwise(self.versions):
            old_types, new_types = (
                {column.name: (column.type_id, column.type_modifier) for column in version.columns}
                for version in (previous.version, following.version)
            )
            gone = {old_types[name] for name in old_types if name not in new_types}
            names |= {
                name for name, type_ in new_types.items() if name not in old_types and type_ in gone
            }
        return names

    def breaks(self, rewritten: Rewritten, before: CatalogTable | None) -> list[Break]:
        """Return the positions after which rows from before are unknown."""
        last = self.last
        if last is None:
            return []
        now = Version(
            qualified(self._table), self._table.relation_id, self._table.replica_identity,
            tuple(shown_name(name) for name in self._table.key),
            tuple(
                ColumnVersion(
                    shown_name(column.name), pa.null(), column.type_id, column.type_modifier
                )
                for column in self._table.columns
            ),
        )  # fmt: skip
        breaks = []
        versions: list[tuple[Position | None, Version]] = [*self.versions, (None, now)]
        key: tuple[str, ...] = ()
        for i, (position, version) in enumerate(versions):
            where = _where(position)
            if version.replica_identity not in ("f", "n") or position is None:
                # While there is no key there are only inserts, which go with any later key.
                if key and version.key and set(key) != set(version.key):
                    breaks.append(
                        Break(
                            position,
                            f"{where}, the key changed from ({', '.join(key)}) to "
                            f"({', '.join(version.key)})",
                            ("Take a new snapshot of the table after that",),
                        )
                    )
                key = version.key
            if i and rewritten == "error":
                try:
                    check_follows(versions[i - 1][1], version)
                    _check_files(versions[i - 1][1], version, self._table, before)
                except PgOutputError as error:
                    breaks.append(
                        Break(
                            position,
                            f"{where}, {error.message}",
                            (
                                *error.hint,
                                ". Or give " if error.hint else "Give ",
                                Argument("rewritten", "keep"),
                                " if the values stayed the same in the new type",
                            ),
                        )
                    )
        return breaks


def _check_files(
    old: Version, new: Version, table: CatalogTable, before: CatalogTable | None
) -> None:
    """Refuse an altered type or modifier, unless the server never rewrote the table's files.

    ``ALTER TYPE … USING`` rewrites rows even where the new type could keep their values.
    """
    if _has_first_files(table):
        return
    types = {column.name: column[2:4] for column in old.columns}
    for column in new.columns:
        then = types.get(column.name)
        if then is None or None in then or then == column[2:4]:
            continue
        was = () if before is None else before.columns
        is_older = then in [
            (candidate.type_id, candidate.type_modifier)
            for candidate in was
            if shown_name(candidate.name) == column.name
        ]
        if not is_older or is_rewritten(table, before):
            raise PgOutputError(
                f"the type of column {column.name} was altered, and the table's rows may have been "
                "rewritten with other values (USING)",
                code="unfit_schema",
                table=qualified(table),
                hint=(
                    "Take a new snapshot of the table, or give its catalogue entry from before as ",
                    Argument("before"),
                ),
            )


def _has_first_files(table: CatalogTable) -> bool:
    """Return whether the server never rewrote the table and its partitions.

    A table's first filenode equals the table's OID; a partitioned table has no files.
    """
    ids = (table.relation_id, *table.partition_ids)
    return len(table.file_nodes) == len(ids) and all(
        node in (0, id_) for node, id_ in zip(table.file_nodes, ids, strict=True)
    )


def _where(position: Position | None) -> str:
    if position is None:
        return "after the last change"
    return f"at change {position[1]} of the transaction committed at {format_lsn(position[0])}"


def _version(told: str) -> Version:
    """Parse the column `relation` of a change."""
    metadata = json.loads(told)
    names = [column["name"] for column in json.loads(metadata["pgoutput.columns"])]
    row = pa.struct([(name, pa.null()) for name in names])
    return version_of(pa.schema([("after", row)], metadata))


def _before(place: Position) -> Column:
    lsn, seq = F.col("commit_lsn"), F.col("seq")
    return (lsn < place[0]) | ((lsn == place[0]) & (seq < place[1]))


def _is_at(place: Position) -> Column:
    return (F.col("commit_lsn") == place[0]) & (F.col("seq") == place[1])


# --- columns and their values --------------------------------------------------------------------


@dataclass(frozen=True)
class _StatePlan:
    """Plans the columns of the result and the state of the tasks."""

    spark: SparkSession
    table: CatalogTable
    row: T.StructType
    told: _Told
    settings: Settings
    before: CatalogTable | None

    @property
    def _columns(self) -> dict[str, CatalogColumn]:
        return {shown_name(column.name): column for column in self.table.columns}

    def _kept(self) -> list[T.StructField]:
        """Return the columns of the changes that the table still has."""
        return [field for field in self.row.fields if field.name in self._columns]

    def _later(self) -> list[T.StructField]:
        """Return the columns that the table got after the last change."""
        if self.told.last is None:
            return []
        had = {column.name for entry in self.told.versions for column in entry.version.columns}
        had |= set(self.row.fieldNames())
        fields = []
        for name, column in self._columns.items():
            if name not in had and column.is_published:
                type_ = column_type(
                    column.type_id, column.type_modifier, registry=self.settings.registry
                )
                ddl = column_ddl(type_, self.settings, binary=False)
                fields.append(T.StructField(name, parsed(name, ddl)))
        return fields

    def result(self) -> T.StructType:
        """Return the schema of the result."""
        fields = [*self._kept(), *self._later()]
        columns = new_columns(
            Version("", None, None, (), tuple(
                ColumnVersion(field.name, pa.null(), None, None) for field in fields
            ))
        )  # fmt: skip
        return T.StructType(
            [
                T.StructField(column.stored, field.dataType)
                for column, field in zip(columns, fields, strict=True)
            ]
        )

    def state(self, key: tuple[str, ...], lacking: set[str], rewritten: Rewritten) -> State:
        """Return the facts about the table that the tasks need."""
        kept, later = self._kept(), self._later()
        breaks, born = self.told.breaks(rewritten, self.before), self.told.born()
        fields = {field.name: field for field in (*kept, *later)}
        wanted = (lacking | set(born)) & set(fields) | {field.name for field in later}
        values = self._values(wanted - set(key), fields)
        for field in later:
            if field.name not in values:
                breaks.append(
                    Break(
                        None,
                        f"column {field.name} was added, and the catalogue does not have its value "
                        "in older rows",
                        ("Take a new snapshot of the table",),
                    )
                )
        result = self.result()
        zone = self.spark.conf.get("spark.sql.session.timeZone") or "UTC"
        outputs = [Output(field.name, field.name, None) for field in kept]
        outputs += [Output(field.name, None, values.get(field.name)) for field in later]
        return State(
            namespace=shown_name(self.table.namespace),
            name=shown_name(self.table.name),
            key=key,
            columns=tuple(field.name for field in kept),
            defaults=values,
            unknown=tuple(
                field.name
                for field in kept
                if field.name in wanted and field.name not in (*values, *key)
            ),
            born=born,
            breaks=tuple(breaks),
            outputs=tuple(outputs),
            schema=arrow_schema(result, zone),
        )

    def _values(self, names: set[str], fields: dict[str, T.StructField]) -> dict[str, pa.Array]:
        """Return the known values that older rows have in columns that were added later."""
        values: dict[str, pa.Array] = {}
        added = {shown_name(name): text for name, text in self.table.added_values.items()}
        for name in names - self.told.renamed():
            if name not in added:
                continue
            text = added[name]
            if text is not None:
                values[name] = self._default(text, self._columns[name], fields[name])
            elif self._is_as_it_was(name):
                values[name] = pa.nulls(1)
        return values

    def _is_as_it_was(self, name: str) -> bool:
        """Return whether the server has not rewritten the table since a column was added.

        A rewrite may have stored the values of a default that was dropped since.
        """
        if _has_first_files(self.table):
            return True
        older = itertools.takewhile(
            lambda column: shown_name(column.name) != name, self.table.columns
        )
        if not self.table.partition_ids and any(column.has_missing for column in older):
            # A rewrite drops the catalogue's stored values for rows older than their column.
            return True
        if self.before is None or name in {
            shown_name(column.name) for column in self.before.columns
        }:
            return False
        return not is_rewritten(self.table, self.before)

    def _default(self, text: str, column: CatalogColumn, field: T.StructField) -> pa.Array:
        """Parse a value that the catalogue has as text, into an array of length 1."""
        where = f"{qualified(self.table)}, default of the column {field.name}"
        wanted = field.dataType.simpleString()
        type_ = column_type(column.type_id, column.type_modifier, registry=self.settings.registry)
        fitting = policies_for(type_, wanted, self.settings)
        if fitting is None:
            if not isinstance(field.dataType, T.AtomicType):
                raise PgOutputError(
                    f"{where}: the column's type is unknown, so it can't become {wanted}",
                    code="schema_unknown",
                    hint=("Give ", Argument("registry")),
                    table=qualified(self.table),
                )
            # The type is a domain, or was altered since: let Spark parse the text.
            dataframe = self.spark.sql("SELECT 1").select(
                F.lit(text).cast(field.dataType).alias("value")
            )
            return dataframe.toArrow().column("value").combine_chunks()
        if is_text(type_, wanted):
            return pa.array([text])
        used = replace(self.settings, policies=fitting[0])
        try:
            stored_as = column_field(type_, used, wanted, binary=fitting[1])
            stored = stored_as.text(text.encode()) if stored_as.text is not None else None
        except ValueError as error:
            raise PgOutputError(
                f"{where}: {error}", code="unfit_value", table=qualified(self.table)
            ) from error
        return arrow_array(stored_as, column_of(stored_as, [stored]))
