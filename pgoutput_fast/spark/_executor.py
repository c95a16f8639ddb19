"""Run on Spark's executors: decode frames into record batches of one table's changes.

The readers call :func:`change_batches`. A ColumnarDecoder makes columns of Spark's types. This
module then gives whole columns the form of the DataFrame: it adds columns that an older version of
the table lacks, and fills in the values of the columns beside the frames.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

import pgoutput_fast as pf
from pgoutput_fast.columnar.fields import EPOCH_SHIFT
from pgoutput_fast.columnar.schema import Layout, head_fields, relation_metadata
from pgoutput_fast.errors import Argument, DecodeError, Hint, PgOutputError, fail
from pgoutput_fast.lsn import format_lsn
from pgoutput_fast.names import shown_name, shown_table
from pgoutput_fast.protocol.messages import (
    Relation,
    StreamAbort,
    StreamCommit,
    StreamPrepare,
    StreamStart,
    Truncate,
)
from pgoutput_fast.settings import Settings

from ._column_types import column_ddl, column_field, policies_for

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pgoutput_fast.changelog.history import History, HistoryFollower, HistoryPolicy
    from pgoutput_fast.decoding.plan import RelationPlan
    from pgoutput_fast.decoding.state import StreamState
    from pgoutput_fast.protocol.messages import Message


# The decoder returns a record batch when the batch has this many rows or bytes, and at the end of
# each batch of frames.
_BATCH_ROWS = 65_536
_BATCH_BYTES = 8 << 20

# Parts of hints. Spark functions and the source write the argument `schema` in two ways.
_OWN_SCHEMA = ("Give a schema (", Argument("schema"), ", or .schema() of a source)")
_SNAPSHOT = "take a new snapshot of the table (pgoutput-fast snapshot) and begin there"

# A frame inside a stream chunk has an xid, a frame outside lacks it. A frame from inside that is
# decoded as one from outside raises one of these errors.
_MISREAD = frozenset(
    ("bad_column_kind", "bad_count", "bad_length", "bad_marker", "trailing_bytes", "truncated",
     "unknown_relation", "unterminated_string")
)  # fmt: skip


@dataclass(frozen=True)
class FixedVersion:
    """The version of the table from which the DataFrame's schema was made.

    Attributes
    ----------
    relation_id : int
        The table's OID.
    columns : dict of str to int
        The OIDs of the columns' types by column name, in the order of the columns.
    newest : bool
        Whether the frames have no later version of the table.
    """

    relation_id: int
    columns: dict[str, int]
    newest: bool

    @classmethod
    def of(cls, relation: Relation, *, newest: bool) -> FixedVersion:
        columns = {shown_name(column.name): column.type_id for column in relation.columns}
        return cls(relation.relation_id, columns, newest)


@dataclass(frozen=True)
class ExecutorTarget:
    """What the executors decode, and the form of the record batches.

    Attributes
    ----------
    table : str
        ``namespace.name`` of the table.
    columns : tuple of (name, Spark's type)
        The columns of `before` and `after`.
    schema : pyarrow.Schema
        The schema of the record batches.
    relations : tuple of bytes
        Frames of Relation and Type messages that the decoder gets before all others.
    settings : Settings
        The session's client_encoding, and the user's policies and types.
    version : FixedVersion, optional
        The version with which other versions are compared to find renamed columns.
    by_id : bool
        Whether the relation id of `version` identifies the table, instead of its name.
    history : History, optional
        The schema history, whose types replace those of `settings`.
    history_policy : {"error", "older", "newer"}
        What to do with a value whose type was altered at about the same time.
    since : int, optional
        Changes from this commit LSN on are refused if they have a column that is not in
        `columns_at_since`.
    columns_at_since : frozenset of str
        The names of the table's columns at `since`.
    is_settled : bool
        Whether the table was chosen by its name when all of the frames were already there. Then
        any other table with this name among the frames had the name earlier, and is skipped.
    """

    table: str
    columns: tuple[tuple[str, str], ...]
    schema: pa.Schema
    relations: tuple[bytes, ...] = ()
    settings: Settings = field(default_factory=Settings)
    version: FixedVersion | None = None
    by_id: bool = False
    history: History | None = None
    history_policy: HistoryPolicy = "error"
    since: int | None = None
    columns_at_since: frozenset[str] = frozenset()
    is_settled: bool = False

    def has(self, relation: Relation) -> bool:
        """Return whether a relation is the wanted table."""
        if self.by_id:
            return self.version is not None and relation.relation_id == self.version.relation_id
        return shown_table(relation) == self.table


def decoder_of(settings: Settings) -> pf.Decoder:
    """Make a decoder with these settings."""
    return pf.Decoder(
        settings.policies, encoding=settings.client_encoding, registry=settings.registry
    )


def column_types(plan: RelationPlan, *, binary: bool) -> Iterator[tuple[str, str]]:
    """Yield the name of each column of a relation, and its type in Spark as DDL."""
    for column, type_ in zip(plan.relation.columns, plan.column_types, strict=True):
        yield shown_name(column.name), column_ddl(type_, plan.settings, binary=binary)


def change_batches(
    batches: Iterable[tuple[str, pa.RecordBatch]],
    target: ExecutorTarget,
    *,
    read: bool = False,
    follower: HistoryFollower | None = None,
    path: str | None = None,
) -> Iterator[pa.RecordBatch]:
    """Decode the changes of one table from a stream of frames.

    Parameters
    ----------
    batches : iterable of (str, pyarrow.RecordBatch)
        Frames in the order of the stream, and the origin of each batch, for errors. The column
        `data` has the frames. Beside it there may be `lsn`, `commit_lsn`, `commit_time`
        (microseconds since 2000-01-01), `xid` and `seq` (of the frame's first row). These columns
        may have any integer type, and may have nulls.
    target : ExecutorTarget
    read : bool
        Whether the frames are a snapshot's, with `commit_lsn` and `commit_time` beside them. Their
        inserts become rows with "read" as `op`.
    follower : HistoryFollower, optional
        Keeps the registry of the settings at the types of the batch that is decoded.
    path : str, optional
        The file of all batches.

    Yields
    ------
    pyarrow.RecordBatch
        With the schema ``target.schema``. `xid`, `commit_lsn`, `commit_time` and `seq` are null
        where neither the columns beside the frames nor a Begin among the frames has them.

    Raises
    ------
    PgOutputError
        A frame or a value was refused, or a Relation or Begin before a frame is missing. The error
        names the frame and says what to do.
    """
    reader = FrameReader(target, read=read, follower=follower, path=path)
    for where, batch in batches:
        yield from reader.read(where, batch)


def _check_names(relation: Relation, target: ExecutorTarget) -> None:
    """Refuse a version of the table in which a wanted column seems to have another name.

    A Relation names the columns, but does not say that a column was renamed. Their order shows it:
    columns keep their order, and a new column comes last. So if two versions have different names
    between the same two neighbours, the column was renamed. After the last column that both
    versions have, one column may instead have been dropped and another added. This function
    assumes so if the two types differ, because ALTER TABLE RENAME keeps the type.

    Raises
    ------
    PgOutputError
        A column was renamed, or older rows had unpublished values of a column.
    """
    version = target.version
    if version is None or relation.relation_id != version.relation_id:
        return
    columns, relation_columns = version.columns, FixedVersion.of(relation, newest=False).columns
    wanted = {name for name, _ in target.columns}
    common = [name for name in columns if name in relation_columns]
    for column, other in zip(
        common, (name for name in relation_columns if name in columns), strict=True
    ):
        if column != other and not wanted.isdisjoint((column, other)):
            raise PgOutputError(
                f"{target.table}: the columns {other} and {column} changed places between two "
                "Relation messages, so a name moved from one column to another",
                code="unfit_schema",
                hint=_SNAPSHOT.capitalize(),
                table=target.table,
            )
    candidates_after = _gaps(relation_columns, columns)
    for neighbour, names in _gaps(columns, relation_columns).items():
        others = candidates_after.get(neighbour, [])
        last = not common or neighbour == common[-1]
        for name in names:
            like = [other for other in others if relation_columns[other] == columns[name]]
            candidates = like if like or last else others
            group = {name, *candidates}
            if wanted.isdisjoint(group) or (candidates and wanted >= group):
                continue
            if candidates:
                raise PgOutputError(
                    f"{target.table}: the column {name} seems to be renamed: another version of "
                    f"the table has {' or '.join(candidates)} in its place",
                    code="unfit_schema",
                    hint=(
                        *_OWN_SCHEMA,
                        " with all of these names, and combine these columns in the query, or ",
                        _SNAPSHOT,
                    ),
                    table=target.table,
                )
            if not last and version.newest:
                raise PgOutputError(
                    f"{target.table}: older changes lack the column {name}. The table had the "
                    "column already, but it was not published",
                    code="unfit_schema",
                    hint=(*_OWN_SCHEMA, f" without {name}, or {_SNAPSHOT}"),
                    table=target.table,
                )


def _gaps(columns: Iterable[str], others: Container[str]) -> dict[str | None, list[str]]:
    """List the columns that `others` lacks, under the last column before them that it has."""
    gaps: dict[str | None, list[str]] = {}
    neighbour = None
    for name in columns:
        if name in others:
            neighbour = name
        else:
            gaps.setdefault(neighbour, []).append(name)
    return gaps


_IN_ORDER: Hint = (
    (
        "Keep the frames of each partition in the order of the stream. Put all stream chunks of a "
        "transaction into one partition, or add the column seq and keep each chunk whole, from "
        "Stream Start to Stream Stop"
    ),
)
_IN_A_CHUNK: Hint = (
    "A frame from inside a stream chunk needs its Stream Start in the same partition",
)
_ALL_RELATIONS: Hint = (
    "Each partition needs the Relations of all its tables. Give ",
    Argument("relations"),
    ", such as decoder.relations, or keep the stream's Relations before the rows in each partition",
)
_ALTERED: Hint = (
    (
        "If the table was altered, keep each Relation before its rows, or decode the frames "
        "before and after the alteration in two calls, each with its own "
    ),
    Argument("relations"),
)
_AS_STRING: Hint = ("To get the text, declare the column as string in ", Argument("schema"))


def explained(
    place: str, error: DecodeError, state: StreamState, frame: int | None, path: str | None = None
) -> PgOutputError:
    """Return the error of a refused frame, with advice on what to do.

    Parameters
    ----------
    place : str
        The error's name for the frame.
    error : DecodeError
    state : StreamState
        The state of the decoder that refused the frame.
    frame : int or None
        The frame's index in its batch of frames.
    path : str, optional
        The file of the frame.
    """
    hints = [error.hint] if error.hint else []
    if error.code == "stream_order":
        hints.append(_IN_ORDER)
    elif error.code in _MISREAD and state.open_xid is None and state.xid is None:
        hints.append(_IN_A_CHUNK)
    if error.code == "unknown_relation":
        hints.append(_ALL_RELATIONS)
    if error.code == "column_count":
        hints.append(_ALTERED)
    if error.code == "out_of_range" and error.tag not in ("B", "b"):
        hints.append(_AS_STRING)
    hint = [part for pieces in hints for part in (". ", *pieces)][1:]
    return PgOutputError(f"{place}: {error.message}", hint=hint).locate(error, frame, path)


class _Mapping:
    """Makes the target's columns from the columns of one version of the table.

    Attributes
    ----------
    layout : Layout
        The target's columns that this version has.
    lacking : list of str
        The names of the target's columns that this version lacks.
    added : list of str
        The names of this version's columns that are not in the target's `columns_at_since`.
    relation : str
        The metadata of the relation, as change batches have it, as JSON.
    """

    added: list[str]

    def __init__(self, plan: RelationPlan, target: ExecutorTarget) -> None:
        _check_names(plan.relation, target)
        self.target = target
        positions = {shown_name(name): i for i, name in reversed(list(enumerate(plan.names)))}
        self.lacking = [name for name, _ in target.columns if name not in positions]
        fields = {}
        for name, wanted in target.columns:
            if name not in positions:
                continue
            position = positions[name]
            type_ = plan.column_types[position]
            fitting = policies_for(type_, wanted, plan.settings)
            if fitting is None:
                own_ddl = column_ddl(type_, plan.settings, binary=True)
                other = f"the column {name} is {own_ddl}, but {wanted} in the schema"
                if target.version is not None and not (target.version.newest or target.relations):
                    raise PgOutputError(
                        f"{target.table}: in the changes, {other}",
                        code="unfit_schema",
                        hint="If the type was altered after the query began, start the query again "
                        "to get the new type. If these changes are older, give .schema() with "
                        f"{name} as string in before and after. A string holds values of both "
                        "types as text",
                        table=target.table,
                    )
                if target.version is not None and target.version == FixedVersion.of(
                    plan.relation, newest=target.version.newest
                ):
                    raise PgOutputError(
                        f"{target.table}: the column {name} is {own_ddl}, but {wanted} in the "
                        "schema, which cannot hold every value",
                        code="unfit_schema",
                        hint="Declare the column as string in the schema to get the text",
                        table=target.table,
                    )
                raise PgOutputError(
                    f"{target.table}: in older changes, {other}",
                    code="unfit_schema",
                    hint=(
                        *_OWN_SCHEMA,
                        f" with {name} as string, which holds values of both types as text, or ",
                        _SNAPSHOT,
                    ),
                    table=target.table,
                )
            policies, binary = fitting
            settings = replace(plan.settings, policies=policies)
            new_field = column_field(type_, settings, wanted, binary=binary)
            fields[position] = replace(new_field, name=name, position=position)
        columns = tuple(fields[position] for position in sorted(fields))
        self.layout = Layout(plan, columns, head_fields("spark"), {})
        self.added = [name for name in positions if name not in target.columns_at_since]
        metadata = relation_metadata(plan)
        self.relation = json.dumps({name.decode(): metadata[name].decode() for name in metadata})

    def tuples(self, array: pa.StructArray, type_: pa.StructType) -> pa.StructArray:
        """Convert a batch's `before` or `after` to the target's struct."""
        if array.type == type_:
            return array
        children = []
        for wanted in type_:
            position = array.type.get_field_index(wanted.name)
            if position < 0:
                children.append(pa.nulls(len(array), wanted.type))
                continue
            child = array.field(position)
            if child.type != wanted.type:
                child = child.cast(wanted.type)  # an older version had a smaller type
            children.append(child)
        mask = array.is_null() if array.null_count else None
        return pa.StructArray.from_arrays(children, fields=list(type_), mask=mask)

    def unchanged(self, array: pa.ListArray, ops: pa.StringArray) -> pa.ListArray:
        """Return `unchanged` with the names of the columns that this version lacks put first."""
        count = len(self.lacking)
        if not count:
            return array
        counts = pc.fill_null(array.value_lengths(), 0).to_numpy()
        is_row_change = pc.not_equal(ops, "truncate").to_numpy(zero_copy_only=False)
        offsets = np.zeros(len(array) + 1, np.int32)
        offsets[1:] = np.cumsum(counts + is_row_change * count)
        # Each index points into the missing names, followed by the values of `array`.
        indices = np.empty(offsets[-1], np.int64)
        free = np.ones(offsets[-1], bool)
        for i in range(count):
            indices[offsets[:-1][is_row_change] + i] = i
            free[offsets[:-1][is_row_change] + i] = False
        values = array.flatten()
        indices[free] = np.arange(len(values)) + count
        names = pa.concat_arrays([pa.array(self.lacking, pa.string()), values])
        return pa.ListArray.from_arrays(
            pa.array(offsets),
            names.take(pa.array(indices)),
            mask=pa.array(offsets[1:] == offsets[:-1]),
        )


class FrameReader:
    """Decodes batches of frames, and fills in the values of the columns beside the frames."""

    places: NDArray[np.uint64]  # the index of each frame of a call in its batch of frames

    def __init__(
        self,
        target: ExecutorTarget,
        *,
        read: bool = False,
        follower: HistoryFollower | None = None,
        path: str | None = None,
    ) -> None:
        self.target = target
        self.path = path
        self.follower = follower
        self.where = ""
        self.lsns: pa.Array | None = None  # the LSNs of a batch's frames, where they are known
        self.is_read = read
        self.mappings: dict[Layout, _Mapping] = {}
        self.last_relation = ""  # the relation of the last batch, so that only a new one is written
        decoder = decoder_of(target.settings)
        announced = [decoder.decode(frame) for frame in target.relations]
        self.announced_ids = {
            message.relation_id for message in announced if isinstance(message, Relation)
        }
        self.decoder = pf.ColumnarDecoder(
            decoder=decoder,
            target="spark",
            max_rows=_BATCH_ROWS,
            max_bytes=_BATCH_BYTES,
            layouts=self.layout,
        )
        # The xids of streamed transactions in progress whose first chunk was read here: their rows
        # have been counted from the first one on. `counted` says so of the open chunk.
        self.streamed: set[int] = set()
        self.counted = False

    def layout(self, plan: RelationPlan) -> Layout | None:
        """Return the layout for a version of the wanted table; None for other tables."""
        if not self.target.has(plan.relation):
            self.check_other(plan.relation)
            return None
        mapping = _Mapping(plan, self.target)
        self.mappings[mapping.layout] = mapping
        return mapping.layout

    def check_other(self, relation: Relation) -> None:
        """Refuse another table that may have taken over the wanted name."""
        version = self.target.version
        if version is None or relation.relation_id in self.announced_ids or self.target.is_settled:
            return
        if version.newest:
            return
        if shown_table(relation) != self.target.table:
            return
        has_relations = bool(self.target.relations)
        fix = (
            "Give the Relations of both tables: first the older one's, then that of the table that "
            "has the name now"
            if has_relations
            else "Start the query again: it then reads the table that has the name now"
        )
        raise PgOutputError(
            f"{self.target.table}: {self.where} has changes of relation id "
            f"{relation.relation_id}, but this name belonged to relation id {version.relation_id} "
            "before: the table was dropped and created again, or renamed",
            code="another_history",
            parameter="relations" if has_relations else None,
            hint=fix,
            table=self.target.table,
        )

    def read(
        self, where: str, batch: pa.RecordBatch, rows: NDArray[np.int64] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Yield the changes in a batch of frames, or in those with the indices `rows`."""
        self.where = where
        names = batch.schema.names
        frames = batch.column(names.index("data"))
        frame_fields = {
            name: batch.column(names.index(name)) for name in _FRAME_FIELDS if name in names
        }
        self.lsns = frame_fields.get("lsn")
        count = len(frames)
        if rows is not None:
            chosen, places = frames.take(pa.array(rows)), rows
        else:
            if frames.null_count:
                count = pc.index(frames.is_null(), True).as_py()
            chosen, places = frames.slice(0, count), np.arange(count)
        for change in self.decoded(chosen, places.astype(np.uint64)):
            try:
                changes = self.finished(change, frames, frame_fields)
            except DecodeError as error:
                raise self.refused(error, error.frame) from error
            yield changes
        *_, self.counted = self.chunks(self.streamed)[1]
        if count < len(frames):
            null = PgOutputError(
                f"{self.target.table}: {where}, frame {count}: the frame is null",
                code="unfit_input",
                table=self.target.table,
            )
            null.frame, null.path = count, self.path
            raise null

    def decoded(self, frames: pa.Array, places: NDArray[np.uint64]) -> Iterator[Any]:
        """Decode frames into batches of changes.

        Parameters
        ----------
        frames : pyarrow.BinaryArray
            With n frames.
        places : uint64[n]
            The index of each frame in its batch of frames.

        Yields
        ------
        ChangeBatch
            Its column `lsn` has the index of each row's frame instead of an LSN.
        """
        self.places = places
        self.first_rows: dict[int, int] = {}
        # The index in the column lsn later finds a row's values in the columns beside the frames.
        try:
            yield from self.decoder.decode(frames, lsns=places)
        except DecodeError as error:
            frame = None if error.frame is None else int(places[error.frame])
            raise self.refused(error, frame) from error

    def refused(self, error: DecodeError, frame: int | None) -> PgOutputError:
        """Return the error of a frame, with the frame's index in its batch of frames."""
        if self.follower is not None and self.target.version is not None:
            self.follower.check(self.target.version.relation_id, self.where)
        error.frame = None  # `place` names the frame already
        place = f"{self.target.table}: {self.where}, frame {frame}"
        refusal = explained(place, error, self.decoder.state, frame, self.path)
        if self.lsns is not None and frame is not None:
            lsn = self.lsns[frame].as_py()
            if lsn is not None and lsn >= 0:
                refusal.args = (f"{refusal.message}; the frame has the LSN {format_lsn(lsn)}",)
        return refusal

    @property
    def messages(self) -> dict[int, Message]:
        """The messages of this call other than rows, by the frame's index in its batch."""
        messages = self.decoder.events.messages
        return {int(self.places[frame]): message for frame, message in messages.items()}

    def chunks(self, streamed: set[int]) -> tuple[list[int], list[bool]]:
        """Return where stream chunks begin in this call, and whether their rows can be counted.

        Parameters
        ----------
        streamed : set of int
            The xids of streamed transactions whose rows are counted. The method adds transactions
            that begin in this call, and removes those that end.

        Returns
        -------
        list of int
            The index of each chunk's first frame; -1 stands for a chunk that was already open.
        list of bool
            Whether the rows of each chunk can be counted.
        """
        starts, counted = [-1], [self.counted]
        for frame, message in self.messages.items():
            if isinstance(message, StreamStart):
                if message.first_segment:
                    streamed.add(message.xid)
                starts.append(frame)
                counted.append(message.xid in streamed)
            elif isinstance(message, (StreamCommit, StreamPrepare)) or (
                isinstance(message, StreamAbort) and message.subxid == message.xid
            ):
                streamed.discard(message.xid)
        return starts, counted

    def finished(
        self, change: Any, frames: pa.Array, frame_fields: dict[str, pa.Array]
    ) -> pa.RecordBatch:
        """Return a decoded batch in the form of the target."""
        layout = change.layout
        if self.is_read:
            commit = (frame_fields[name][-1].as_py() for name in ("commit_lsn", "commit_time"))
            change = change.as_read(*commit, 0)  # the column beside the frames has the seq
        batch = pa.record_batch(change)
        if self.follower is not None:
            self.follower.check_batch(layout, batch, self.where)
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        schema = self.target.schema
        mapping = self.mappings[layout]
        for name in ("before", "after"):
            columns[name] = mapping.tuples(columns[name], schema.field(name).type)
        columns["unchanged"] = mapping.unchanged(columns["unchanged"], columns["op"])
        first = [] if self.last_relation == mapping.relation else [mapping.relation]
        columns["relation"] = pa.array(first + [None] * (len(batch) - len(first)), pa.string())
        self.last_relation = mapping.relation
        self.fill(columns, change, frames, frame_fields)
        self.check_added(mapping, columns["commit_lsn"])
        arrays = [columns[field.name] for field in schema]
        for array, expected in zip(arrays, schema, strict=True):
            if array.type != expected.type:
                raise PgOutputError(
                    f"{self.target.table}: the column {expected.name} is {array.type}, but "
                    f"{expected.type} in the DataFrame's schema",
                    code="unfit_schema",
                    table=self.target.table,
                )
        return pa.RecordBatch.from_arrays(arrays, schema=schema)

    def check_added(self, mapping: _Mapping, lsns: pa.Array) -> None:
        """Refuse columns added since the query began: the DataFrame would drop their values."""
        since = self.target.since
        if since is None or not mapping.added or not len(lsns):
            return
        last = pc.max(lsns).as_py()
        if last is not None and last >= since:
            raise PgOutputError(
                f"{self.target.table} got the column {', '.join(mapping.added)} after the query "
                "began",
                code="unfit_schema",
                hint="Start the query again to get the column, or set the option "
                "newColumns=ignore to continue without it",
                table=self.target.table,
            )

    def fill(
        self,
        columns: dict[str, pa.Array],
        change: Any,
        frames: pa.Array,
        frame_fields: dict[str, pa.Array],
    ) -> None:
        """Fill in the columns that came beside the frames."""
        indices = columns["lsn"]
        beside = {
            name: self.as_type(name, values.take(indices), self.target.schema.field(name).type)
            for name, values in frame_fields.items()
            if values.null_count < len(values)
        }
        columns["lsn"] = pa.nulls(len(indices), pa.int64())
        if "seq" in beside:
            beside["seq"] = self.stepped(beside["seq"], columns["seq"], indices, change)
        if columns["xid"].null_count:
            # seq counts the rows of a transaction. These rows have no known transaction.
            columns["seq"] = pc.if_else(columns["xid"].is_valid(), columns["seq"], None)
        if columns["subxid"].null_count < len(indices):
            in_stream = columns["subxid"].is_valid()
            unknown = in_stream
            if "seq" in beside:
                unknown = pc.and_(in_stream, beside["seq"].is_null())
            self.check_counted(unknown, indices, columns["xid"], frames)
            if "xid" in beside:
                # Frames of a streamed transaction carry its xid themselves.
                beside["xid"] = pc.if_else(in_stream, None, beside["xid"])
        for name, values in beside.items():
            columns[name] = pc.coalesce(values, columns[name]) if values.null_count else values

    def as_type(self, name: str, values: pa.Array, type_: pa.DataType) -> pa.Array:
        """Convert a column beside the frames to the type of the DataFrame's column."""
        try:
            if name == "commit_time" and pa.types.is_integer(values.type):
                values = pc.add_checked(values.cast(pa.int64()), EPOCH_SHIFT)
            return values.cast(type_)
        except pa.ArrowException as error:
            raise PgOutputError(
                f"{self.target.table}: a value in the frames' column {name} does not fit into "
                f"{type_}: {error}",
                code="unfit_value",
                table=self.target.table,
            ) from error

    def stepped(self, seqs: pa.Array, rows: pa.Array, indices: pa.Array, change: Any) -> pa.Array:
        """Return the seq of each row; the columns beside the frames have that of the first row.

        A TRUNCATE of several tables makes several rows, so a row may not be its frame's first.
        """
        truncates = {
            frame: message
            for frame, message in self.messages.items()
            if isinstance(message, Truncate)
        }
        if not truncates or seqs.null_count == len(seqs):
            return seqs
        steps = np.zeros(len(seqs), np.int64)
        for row in np.flatnonzero(np.isin(indices.to_numpy(), list(truncates))):
            frame = indices[row].as_py()
            first = self.first_rows.get(frame)
            if first is None:
                place = truncates[frame].relation_ids.index(change.relation.relation_id)
                first = self.first_rows[frame] = rows[row].as_py() - place
            steps[row] = rows[row].as_py() - first
        return pc.add_checked(seqs, pa.array(steps))

    def check_counted(
        self, unknown: pa.Array, indices: pa.Array, xids: pa.Array, frames: pa.Array
    ) -> None:
        """Refuse rows of a streamed transaction whose first chunk was not read here.

        The number of rows before them is unknown, so their seq is unknown too.
        """
        starts, counted = self.chunks(set(self.streamed))
        rows = np.flatnonzero(unknown.to_numpy(zero_copy_only=False))
        chunks = np.searchsorted(starts, indices.to_numpy()[rows], "right") - 1
        refused = rows[~np.array(counted)[chunks]]
        if not len(refused):
            return
        frame = indices[refused[0]].as_py()
        xid = xids[refused[0]].as_py()
        text = (
            f"the first stream chunk of xid {xid} is not in this partition, so the change's seq "
            "is unknown"
        )
        try:
            fail("stream_order", frames[frame].as_py(), 0, found=text)
        except DecodeError as error:
            error.frame = frame
            raise


_FRAME_FIELDS = ("lsn", "commit_lsn", "commit_time", "xid", "seq")
