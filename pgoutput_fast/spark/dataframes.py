"""Make DataFrames of changes from segments, or from frames in a DataFrame."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from pyspark.errors import PySparkAttributeError
from pyspark.sql import functions as F  # noqa: N812 - its usual name
from pyspark.sql import types as T  # noqa: N812

import pgoutput_fast as pf
from pgoutput_fast.changelog.history import HistoryPolicy, check_policy, history_of
from pgoutput_fast.errors import Argument, DecodeError, PgOutputError
from pgoutput_fast.names import shown_name, shown_table
from pgoutput_fast.policies import Policies
from pgoutput_fast.protocol.encode import encode_fields
from pgoutput_fast.protocol.messages import Relation, Type, published
from pgoutput_fast.settings import Settings, make_settings

from ._column_types import arrow_schema, explicit, parsed
from ._executor import (
    ExecutorTarget,
    FixedVersion,
    change_batches,
    column_types,
    decoder_of,
    explained,
)
from ._planning import Planned, read_batches
from ._worker_errors import worker_errors

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

    from pgoutput_fast.catalog import Catalog
    from pgoutput_fast.changelog.history import History
    from pgoutput_fast.changelog.read_plan import Read
    from pgoutput_fast.decoding.plan import RelationPlan
    from pgoutput_fast.segments import SegmentMetadata
    from pgoutput_fast.types import TypeRegistry

Relations = Mapping[int, Relation] | Iterable["Relation | Type | bytes"]
Paths = str | os.PathLike[str] | Iterable["str | os.PathLike[str]"]

_MOST_TASKS = 1 << 16

_CHANGE_COLUMNS: Mapping[str, T.DataType | None] = {
    "op": T.StringType(),
    "xid": T.LongType(),
    "subxid": T.LongType(),
    "lsn": T.LongType(),
    "commit_lsn": T.LongType(),
    "commit_time": T.TimestampType(),
    "seq": T.LongType(),
    "old_kind": T.StringType(),
    "before": None,
    "after": None,
    "unchanged": T.ArrayType(T.StringType()),
    "relation": T.StringType(),
}
"""The columns of a change and their types; None: a struct of the table's columns."""


def read_segments(
    spark: SparkSession,
    path: Paths,
    table: str = "",
    schema: T.StructType | str | None = None,
    *,
    partitions: int | None = None,
    registry: TypeRegistry | None = None,
    history: HistoryPolicy = "error",
    policies: Policies | None = None,
    encoding: str | None = None,
) -> DataFrame:
    """Return the changes of one table in segments, and the rows of its snapshot.

    The executors decode whole files. This call chooses the files; Spark reads them whenever it
    evaluates the result.

    Parameters
    ----------
    spark : SparkSession
    path : path or iterable of paths
        A change log, or consecutive files of segments: see
        :func:`~pgoutput_fast.segments.list_segments`. The executors must reach them by the same
        names. A change log gives the table's newest snapshot and all changes since. It gives no
        changes of a table that waits for its first snapshot, and none after the point where a table
        waits for another snapshot.
    table : str
        ``namespace.name``, spelled as in the server's catalogue. If several tables had this name,
        the newest is read, under all of its names. Without `table`, the result lists the tables.
        For several tables in one pass over the files, use ``format("pgoutput")`` with ``mode``
        "envelope" or "manifest".
    schema : StructType or str, optional
        The table's columns and their types. The default is the columns of the table's newest
        Relation in the files. For a table without changes, and so without a Relation, the default
        comes from the newest catalogue of the change log. You may declare any column as string: it
        then has the server's text. An array may have any number of dimensions.
    partitions : int, optional
        The number of tasks; by default Spark's ``defaultParallelism``. A client of Spark Connect
        runs a small job to learn it.
    registry : TypeRegistry, optional
        Users' types. With a registry, enums, arrays, composites, ranges and the types of extensions
        become Spark's types. Without a registry they become strings, or binary if the server sent
        binary format. A type that was registered with `arrow` becomes that type. Functions that
        were registered without `arrow` are not used. The default is the types of the change log's
        schema history, if it has one.
    history : {"error", "older", "newer"}
        What to do with a value whose type was altered at about the same time: "error" refuses it,
        "older" and "newer" decode it by the type's older or newer definition.
    policies : Policies, optional
        What to do with values that Spark's types can't hold. With "text", a column becomes a string
        if its type has such values. With `json` "parse", JSON becomes a variant, whose numbers may
        be less exact than PostgreSQL's.
    encoding : str, optional
        The client_encoding of the session; by default the segments' own.

    Returns
    -------
    DataFrame
        The columns op, xid, subxid, lsn, commit_lsn, commit_time, seq, old_kind, before, after,
        unchanged and relation. ``(commit_lsn, seq)`` orders all changes, without ties. Rows of a
        snapshot have "read" as `op`, and follow a row "truncate". `unchanged` names the columns
        whose value the change lacks: large values that an update did not change, and columns that
        the table did not have yet. `relation` describes the table from this change on: the metadata
        of change batches, as JSON. It is null if nothing is new. A value that its type can't hold
        makes the query fail with an error that names table, column and value. Without `table`, the
        result has a row for each table, in the order of names: ``table``, ``relation_id``, and
        ``schema``, which has its columns and their types as DDL.

    Notes
    -----
    The stream does not say that a column was renamed: the table's next Relation merely has another
    name in the same place. The query then fails, unless `schema` has both names. With both names,
    each change has its value under the column's name at the time, and the other name in
    `unchanged`. The query also fails if the last column was dropped and a column of the same type
    added, because this looks the same. Two cases are not noticed. First, the last column is renamed
    and gets another type before the table's next change. Second, it is dropped and added again
    under the same name.

    Raises
    ------
    PgOutputError
        Segments are missing, are damaged or don't belong together; changes since the table's
        snapshot are deleted; or the segments do not have the table.
    """
    check_session(spark)
    check_policy(history)
    if not table:
        if schema is not None or partitions is not None:
            raise PgOutputError(
                "it applies only to one table",
                code="bad_option",
                parameter="partitions" if schema is None else "schema",
                hint=("Give ", Argument("table"), " too"),
            )
        decoding = {"registry": registry, "policies": policies, "encoding": encoding}
        return _tables_there(spark, path, decoding)
    found_table = find_table(path, table, registry=registry, policies=policies, encoding=encoding)
    chosen = found_table.chosen(schema, history)
    changes, target, metadata = chosen.changes, chosen.target, chosen.metadata
    groups = read_groups(chosen.reads(), partitions or _default_tasks(spark))

    def decode(numbers: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with worker_errors():
            for batch in numbers:
                for number in batch.column(0).to_pylist():
                    for read in groups[number]:
                        yield from read_batches(read, metadata, target)

    return spark.range(0, len(groups), 1, len(groups)).mapInArrow(decode, changes)


def _tables_there(spark: SparkSession, path: Paths, decoding: dict[str, Any]) -> DataFrame:
    """Return the list of the tables in segments, for :func:`read_segments`."""
    path = path if isinstance(path, (str, os.PathLike)) else list(path)
    rows = []
    for name in find_table(path, "", **decoding).others():
        table = find_table(path, name, **decoding)
        columns = ", ".join(f"{_quoted(column)} {type_}" for column, type_ in table.columns)
        # A table that was renamed is listed under its newest name only.
        if table.plan is not None and shown_table(table.plan.relation) == name:
            rows.append((name, table.plan.relation.relation_id, columns))
    return spark.createDataFrame(rows, "table string, relation_id bigint, schema string")


class FoundTable(NamedTuple):
    """A table and the facts that are known about it.

    Attributes
    ----------
    name : str
        ``namespace.name``.
    plan : RelationPlan or None
        The plan of its newest version; None if no version is known.
    settings : Settings
    binary : bool
        Whether its values have binary format.
    planned : Planned or None
        The segments; None: there are none yet.
    history : History or None
        The schema history that has its types; None: the settings have them.
    as_of : int
        The LSN for which `plan` is known to be the newest.
    """

    name: str
    plan: RelationPlan | None
    settings: Settings
    binary: bool
    planned: Planned | None = None
    history: History | None = None
    as_of: int = 0

    @property
    def columns(self) -> list[tuple[str, str]]:
        """The name of each column, and its type in Spark as DDL.

        Raises
        ------
        PgOutputError
            No version of the table is known.
        """
        if self.plan is None:
            if self.name in self.others():
                raise PgOutputError(
                    f"the change log has no changes and no snapshot of {self.name}: they were "
                    "deleted, or the first snapshot is not complete",
                    code="changes_missing",
                    hint="Wait for the first snapshot, or request one with pgoutput-fast snapshot",
                    table=self.name,
                )
            names = ", ".join(self.others()) or "none"
            raise PgOutputError(
                f"the change log has no table {self.name}; its tables are: {names}",
                code="no_table",
                hint="Check the name: schema.table, case counts. Check that the table is "
                "published, and has changed since the slot was created",
                table=self.name,
            )
        return [*column_types(self.plan, binary=self.binary)]

    def others(self) -> list[str]:
        """Return the names of all tables in the segments and in the schema history."""
        names = set() if self.planned is None else self.planned.tables()
        if self.history is not None and not self.history.is_empty:
            names |= {shown_table(table) for table in self.history.newest_tables.tables}
        return sorted(names)

    def chosen(
        self, schema: T.StructType | str | None, history: HistoryPolicy, *, may_lack: bool = False
    ) -> ChosenTable:
        """Return the table with the schema of its changes.

        Parameters
        ----------
        schema, history
            As in :func:`read_segments`.
        may_lack : bool
            Whether the table may still be unknown; `schema` then has its columns.
        """
        version = (
            FixedVersion.of(self.plan.relation, newest=True) if self.plan is not None else None
        )
        changes, target = _target(
            self.name, schema or _struct(self.columns), settings=self.settings, version=version,
            by_id=True,
        )  # fmt: skip
        target = replace(target, history=self.history, history_policy=history)
        if self.planned is not None and (version is not None or not may_lack):
            _check_columns(target, self.planned)
        return ChosenTable(changes, target, self.planned, self.as_of)


class ChosenTable(NamedTuple):
    """A table and the schema of its changes.

    Attributes
    ----------
    changes : StructType
        The columns of the DataFrame.
    target : ExecutorTarget
        The same for the executors.
    planned : Planned or None
    as_of : int
        As in :class:`FoundTable`.
    """

    changes: T.StructType
    target: ExecutorTarget
    planned: Planned | None
    as_of: int

    @property
    def metadata(self) -> SegmentMetadata:
        """The metadata of the segments."""
        if self.planned is None:
            raise PgOutputError(
                f"there are no segments of {self.target.table} yet",
                code="not_begun",
                table=self.target.table,
            )
        return self.planned.metadata

    def reads(self, start: int | None = None, end: int | None = None) -> list[Read]:
        """Return the reads of the table's changes between two LSNs, each of one file."""
        return [] if self.planned is None else self.planned.reads(self.relation_id, start, end)

    @property
    def relation_id(self) -> int | None:
        """The table's OID; None if the segments have nothing of the table."""
        return None if self.target.version is None else self.target.version.relation_id


def find_table(
    path: Paths,
    table: str,
    *,
    registry: TypeRegistry | None = None,
    policies: Policies | None = None,
    encoding: str | None = None,
) -> FoundTable:
    """Find a table in segments.

    The parameters and errors are those of :func:`read_segments`.
    """
    paths = [path] if isinstance(path, (str, os.PathLike)) else list(path)
    planned = Planned(path if isinstance(path, (str, os.PathLike)) else paths)
    metadata, as_of = planned.metadata, 0
    history = history_of(paths)  # after the view: it must cover what is read
    followed = None if registry is not None else history
    if followed is not None:
        registry = followed.newest
    settings = settings_of(registry, policies, encoding or metadata.encoding)
    binary = metadata.options.get("binary", "false") in ("true", "on", "1")
    plan = planned.newest(table, settings, history)
    if plan is not None:
        as_of = planned.as_of(plan.relation.relation_id)
    elif history is not None and not history.is_empty:
        plan = catalogued(history.newest_tables, table, settings)
    return FoundTable(table, plan, settings, binary, planned, followed, as_of)


def published_table(
    dsn: str | None,
    publications: Sequence[str],
    table: str,
    policies: Policies,
    *,
    binary: bool,
    registry: TypeRegistry | None = None,
) -> FoundTable:
    """Return a published table of a server whose capture has not begun.

    Parameters
    ----------
    dsn : str or None
    publications : sequence of str
    table : str
        ``namespace.name``.
    policies : Policies
    binary : bool
        Whether the values will have binary format.
    registry : TypeRegistry, optional
        Users' types; by default those of the server.

    Raises
    ------
    PgOutputError
        The server can't be reached, or no publication has the table.
    """
    from pgoutput_fast.apply.unpublished import did_you_mean
    from pgoutput_fast.catalog import catalog_of
    from pgoutput_fast.connections import ConnectionParameters, frame_encoding

    with ConnectionParameters(dsn).open(replication=False) as connection:
        if registry is None:
            registry = pf.TypeRegistry.from_connection(connection)
        catalog = catalog_of(connection, publications)
        encoding = frame_encoding(connection.pgconn)
    settings = settings_of(registry, policies, encoding)
    plan = catalogued(catalog, table, settings)
    if plan is None:
        raise PgOutputError(
            f"the publications have no table {table}"
            f"{did_you_mean(table, [*map(shown_table, catalog.tables)])}",
            code="no_table",
            hint="Give the name as schema.table; case counts",
            table=table,
        )
    return FoundTable(table, plan, settings, binary)


def catalogued(catalog: Catalog, table: str, settings: Settings) -> RelationPlan | None:
    """Return the plan of a published table without changes; None if the catalogue lacks it."""
    for entry in catalog.tables:
        if shown_table(entry) == table:
            break
    else:
        return None
    columns = [
        (int(column.name in entry.key), column.name, column.type_id, column.type_modifier)
        for column in entry.columns
        if column.is_published
    ]
    decoder = decoder_of(settings)
    frame = encode_fields(
        "R", settings.encoding, relation_id=entry.relation_id, namespace=entry.namespace,
        name=entry.name, replica_identity=entry.replica_identity, columns=columns,
    )  # fmt: skip
    decoder.decode(frame)
    return decoder.state.plan(entry.relation_id)


def decode_frames(
    frames: DataFrame,
    table: str,
    relations: Relations | None = None,
    schema: T.StructType | str | None = None,
    *,
    encoding: str = "utf-8",
    registry: TypeRegistry | None = None,
    policies: Policies | None = None,
) -> DataFrame:
    """Return the changes of one table in a DataFrame of frames.

    Within a partition the frames must be in the order of the stream. The Relation of each of their
    tables must be known: from `relations`, or from a frame before the table's rows in the same
    partition. A row with another number of columns than its Relation is refused. A row does not
    contain the names of its columns. So after ``DROP a, ADD c``, nothing shows that an older row is
    decoded by the newer Relation. If a table was altered, keep the stream's Relations before the
    rows, or decode the frames before and after the alteration in two calls.

    A partition need not begin with a Begin. Changes before its first Begin have `xid`,
    `commit_lsn`, `commit_time` and `seq` from the columns beside the frames, or null. All chunks of
    a streamed transaction must be in one partition, unless there is a column `seq`. With that
    column, it is enough that each chunk is complete, from its Stream Start to its Stream Stop.

    Parameters
    ----------
    frames : DataFrame
        The column `data` (binary) has the frames, without CopyData and XLogData headers. The
        columns `lsn`, `commit_lsn`, `commit_time` (timestamp, or microseconds since 2000 as in a
        frame), `xid` and `seq` (of the frame's first row) are used where they exist.
    table : str
        ``namespace.name``, spelled as in the server's catalogue. The function reads the table that
        has, or last had, this name under all of its names, if a Relation identifies it.
    relations : mapping or iterable of Relation, optional
        One Relation for each table, such as ``decoder.relations``. It may include Type messages,
        which describe domains, and both kinds may be given as frames. These Relations decode the
        rows that have no Relation before them in their partition, so no such row may be older than
        them. If several tables had the name one after the other, the last one is read.
    schema : StructType or str, optional
        As in :func:`read_segments`. The default is the table's last Relation in `relations`, or
        else the last one in the frames, in the order of the partitions. To find it there, the
        function reads the frames one more time.
    encoding : str
        The client_encoding of the session that sent the frames.
    registry, policies : optional
        As in :func:`read_segments`; without `registry`, users' types become strings.

    Returns
    -------
    DataFrame
        As in :func:`read_segments`. With `schema`, renamed columns are noticed only if `relations`
        has the table. `commit_lsn` is null in rows of streamed and of prepared transactions: the
        frames do not say whether these were committed.

    Raises
    ------
    PgOutputError
        The table is neither in `relations` nor in the frames, `relations` has two versions of a
        table, or there is no column `data`.
    """
    check_session(frames.sparkSession)
    if "data" not in frames.columns or frames.schema["data"].dataType != T.BinaryType():
        raise PgOutputError(
            "the frames must be in a binary column named data; there are "
            + ", ".join(
                f"{field.name} ({field.dataType.simpleString()})" for field in frames.schema
            ),
            code="unfit_input",
        )
    settings = settings_of(registry, policies, encoding)
    changes, target = frames_target(
        table, relations, schema, settings, lambda: _frames_of_relations(frames, table, encoding)
    )
    names = [
        name
        for name in ("data", "lsn", "commit_lsn", "commit_time", "xid", "seq")
        if name in frames.columns
    ]

    def decode(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        where = partition()
        numbered = ((f"{where}, batch {n}", batch) for n, batch in enumerate(batches))
        with worker_errors():
            yield from change_batches(numbered, target)

    return frames.select(*names).mapInArrow(decode, changes)


def frames_target(
    table: str,
    relations: Relations | None,
    schema: T.StructType | str | None,
    settings: Settings,
    among: Callable[[], Iterable[bytes]],
) -> tuple[T.StructType, ExecutorTarget]:
    """Return the schema of a table's changes in frames, and the target for the executors.

    Parameters
    ----------
    table, relations, schema
        As in :func:`decode_frames`.
    settings : Settings
    among : callable
        Returns the Types and Relations among the frames. It is called if neither `relations` nor
        `schema` has the table's columns.

    Raises
    ------
    PgOutputError
        The table's columns are in none of them.
    """
    relation_frames = _relation_frames(relations)
    plan = _announced(relation_frames, table, settings)
    newest = plan is None
    if schema is None:
        if plan is None:
            plan = _announced(among(), table, settings)
        if plan is None:
            raise PgOutputError(
                f"neither the given relations nor the frames have a Relation of {table}",
                code="bad_option",
                parameter="relations",
                hint=(
                    "Give ", Argument("relations"), " or ", Argument("schema"),
                    ", and check the table's name",
                ),
                table=table,
            )  # fmt: skip
        schema = _struct(column_types(plan, binary=False))
    version = FixedVersion.of(plan.relation, newest=newest) if plan is not None else None
    return _target(
        table,
        schema,
        settings=settings,
        relations=relation_frames,
        version=version,
        by_id=bool(version),
    )


# --- schema --------------------------------------------------------------------------------------


def settings_of(
    registry: TypeRegistry | None, policies: Policies | None, encoding: str
) -> Settings:
    """Return the settings of decoders for these arguments."""
    return make_settings(policies, encoding, registry)


def changes_ddl(columns: Iterable[tuple[str, str]], comment: str) -> str:
    """Return the columns of a change as DDL, with a comment on `after`; this needs no session."""
    listed = ", ".join(f"{_quoted(name)}: {type_}" for name, type_ in columns)
    columns_ddl = ", ".join(
        f"{name} {f'struct<{listed}>' if type_ is None else type_.simpleString()}"
        + f" COMMENT '{comment}'" * (name == "after")
        for name, type_ in _CHANGE_COLUMNS.items()
    )
    return explicit(columns_ddl)


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def _struct(columns: Iterable[tuple[str, str]]) -> T.StructType:
    return T.StructType([T.StructField(name, parsed(name, type_)) for name, type_ in columns])


def _target(
    table: str,
    schema: T.StructType | str,
    *,
    settings: Settings,
    version: FixedVersion | None,
    relations: tuple[bytes, ...] = (),
    by_id: bool = False,
) -> tuple[T.StructType, ExecutorTarget]:
    """Return the schema of the changes, and the target for the executors."""
    columns = T.StructType.fromDDL(schema) if isinstance(schema, str) else schema
    if not isinstance(columns, T.StructType):
        raise PgOutputError(
            f"{schema!r} is not a StructType or its DDL", code="bad_option", parameter="schema"
        )
    columns = T.StructType([T.StructField(field.name, field.dataType) for field in columns])
    for name, count in Counter(columns.fieldNames()).items():
        if count > 1:
            raise PgOutputError(
                f"it has the column {name} {count} times", code="bad_option", parameter="schema"
            )
    changes = T.StructType(
        [T.StructField(name, type_ or columns) for name, type_ in _CHANGE_COLUMNS.items()]
    )
    if any("time(" in field.dataType.simpleString() for field in columns):
        _check_time(table)
    target = ExecutorTarget(
        table=table,
        columns=tuple((field.name, field.dataType.simpleString()) for field in columns),
        schema=arrow_schema(changes),
        relations=relations,
        settings=settings,
        version=version,
        by_id=by_id,
    )
    return changes, target


def check_session(spark: SparkSession) -> None:
    """Refuse a setting that makes PySpark's workers hang."""
    codec = spark.conf.get("spark.sql.execution.arrow.compression.codec", "none")
    if codec == "lz4":
        raise PgOutputError(
            "spark.sql.execution.arrow.compression.codec=lz4 hangs in PySpark's workers",
            code="not_supported",
            hint="Set it to none",
        )


def _check_time(table: str) -> None:
    from pyspark.sql import SparkSession

    spark = SparkSession.getActiveSession()
    if spark is None:  # in a process that Spark has started to plan a query
        return
    if spark.conf.get("spark.sql.timeType.enabled", "false") != "true":
        warnings.warn(
            f"{table} has columns of type time, which Spark writes to Parquet only with "
            "spark.sql.timeType.enabled=true. Set it, or declare these columns as string in "
            "schema=",
            stacklevel=4,
        )


# --- segments ------------------------------------------------------------------------------------


def _default_tasks(spark: SparkSession) -> int:
    """Return how many tasks Spark runs at once.

    A client of Spark Connect can't ask the SparkContext. It counts the partitions into which Spark
    divides a range, with a small job.
    """
    try:
        return int(spark.sparkContext.defaultParallelism)
    except PySparkAttributeError:
        return spark.range(_MOST_TASKS).select(F.spark_partition_id()).distinct().count()


def read_groups(reads: list[Read], count: int) -> list[list[Read]]:
    """Divide the files into at most `count` groups of similar size.

    More and smaller tasks would be slower: each task costs 60 ms before it reads a byte.
    """
    groups: list[list[Read]] = [[] for _ in range(max(1, min(count, len(reads))))]
    sizes = [0] * len(groups)
    for read in sorted(reads, key=lambda read: (read.size, read.files), reverse=True):
        smallest = sizes.index(min(sizes))
        groups[smallest].append(read)
        sizes[smallest] += read.size
    return groups


def _check_columns(target: ExecutorTarget, planned: Planned) -> None:
    """Refuse columns that no version of the table has: they would be null in every row."""
    version = target.version
    all_names = set() if version is None else set(version.columns)
    missing = {name for name, _ in target.columns} - all_names
    for relation in planned.relations(version.relation_id, target.settings) if version else ():
        if not missing:
            return
        names = {shown_name(column.name) for column in relation.columns}
        missing -= names
        all_names |= names
    if missing:
        raise PgOutputError(
            f"in the change log, {target.table} never had the columns "
            f"{', '.join(sorted(missing))}; it had {', '.join(sorted(all_names))} (case counts)",
            code="bad_option",
            parameter="schema",
            table=target.table,
        )


def _announced(frames: Iterable[bytes], table: str, settings: Settings) -> RelationPlan | None:
    """Return the plan of the table's last Relation among frames of Types and Relations."""
    decoder = decoder_of(settings)
    plan = None
    for frame in frames:
        message = decoder.decode(frame)
        if isinstance(message, Relation) and shown_table(message) == table:
            plan = decoder.state.plan(message.relation_id)
    return plan


# --- frames --------------------------------------------------------------------------------------


def _relation_frames(relations: Relations | None) -> tuple[bytes, ...]:
    """Return the frames of the Types, then of the Relations, at most one for each table."""
    items = relations.values() if isinstance(relations, Mapping) else relations or ()
    types: list[bytes] = []
    others: dict[int, bytes] = {}
    for item in items:
        message = pf.decode(item) if isinstance(item, bytes) else item
        if not isinstance(message, (Relation, Type)):
            raise PgOutputError(
                f"{message!r} is not a Relation or Type message",
                code="unfit_input",
                parameter="relations",
            )
        if message.in_stream:
            message = published(message)
        if isinstance(message, Type):
            types.append(message.frame)
        elif others.setdefault(message.relation_id, message.frame) != message.frame:
            raise PgOutputError(
                f"{shown_table(message)} has two Relations, and a row does not say which of them "
                "it has",
                code="unfit_input",
                parameter="relations",
                hint="Give one Relation for each table, and decode the frames before and after the "
                "alteration in two calls. Or, with decode_frames, keep each Relation before its "
                "rows among the frames",
                table=shown_table(message),
            )
    return (*types, *others.values())  # a Relation's types must be known when it is decoded


def _frames_of_relations(frames: DataFrame, table: str, encoding: str) -> list[bytes]:
    """Return all Types in a DataFrame, and after them the table's different Relations.

    Both are in the order of their last occurrences. Frames from inside stream chunks are converted
    to the form that they have outside.
    """
    # Relations and Types, and the messages that begin or end stream chunks and streamed
    # transactions.
    tags = [bytearray([tag]) for tag in b"RYSEcAp"]

    def find(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        decoder = pf.Decoder(encoding=encoding)
        first_places: dict[bytes, int] = {}
        for batch in batches:
            for frame, place in zip(*(column.to_pylist() for column in batch), strict=True):
                try:
                    message = decoder.decode(frame)
                except DecodeError as error:
                    where = f"{table}: {partition()}"
                    with worker_errors():
                        raise explained(where, error, decoder.state, None) from error
                if isinstance(message, Type) or (
                    isinstance(message, Relation) and shown_table(message) == table
                ):
                    outside = published(message) if message.in_stream else message
                    first_places[outside.frame] = place
        yield pa.RecordBatch.from_arrays(
            [
                pa.array(list(first_places), pa.binary()),
                pa.array(list(first_places.values()), pa.int64()),
            ],
            names=["data", "place"],
        )

    rows = (
        frames.filter(F.substring("data", 1, 1).isin(tags))
        .select("data", F.monotonically_increasing_id().alias("place"))
        .mapInArrow(find, "data binary, place bigint")
        .groupBy("data")
        .agg(F.max("place").alias("place"))
        .orderBy(F.substring("data", 1, 1) == bytearray(b"R"), "place")
        .collect()
    )
    return [bytes(row.data) for row in rows]


def partition() -> str:
    """Return the name of the partition that the executor works on, for errors."""
    from pyspark import TaskContext

    task = TaskContext.get()
    return f"partition {task.partitionId() if task is not None else '?'}"
