"""On the executors: frames in, record batches of one table's changes out.

:func:`change_batches` is all that the readers know of decoding. What is behind it builds rows, one
Python object per value.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pyarrow as pa

import pgoutput_fast as pf
from pgoutput_fast.diagnose import UNKNOWN_HINT
from pgoutput_fast.errors import DecodeError, PgOutputError, fail
from pgoutput_fast.messages import UNCHANGED, Relation
from pgoutput_fast.plan import Settings

from ._columns import (
    column_codec,
    column_ddl,
    decimal_check,
    is_plain,
    is_text,
    policies_for,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from pgoutput_fast.plan import RelationPlan
    from pgoutput_fast.state import StreamState

# A record batch is given out when one of them is reached. Bytes count the frames.
_BATCH_ROWS = 16384
_BATCH_BYTES = 8 << 20

EPOCH_SHIFT = 946_684_800_000_000
"""Microseconds from 1970, where Arrow's timestamps begin, to 2000, where PostgreSQL's do."""

_OPS = {pf.Insert: "insert", pf.Update: "update", pf.Delete: "delete"}

# What a frame from inside a stream, which has an xid more, looks like if it is read as another.
_MISREAD = frozenset(
    ("bad_column_kind", "bad_count", "bad_length", "bad_marker", "trailing_bytes", "truncated",
     "unknown_relation", "unterminated_string")
)  # fmt: skip


@dataclass(frozen=True)
class Version:
    """The version of a table that the schema was made for.

    Attributes
    ----------
    relation_id : int
    columns : dict of str to int
        Name → OID of the type, in their order.
    newest : bool
        There is none after it among the frames.
    """

    relation_id: int
    columns: dict[str, int]
    newest: bool

    @classmethod
    def of(cls, relation: Relation, *, newest: bool) -> Version:
        columns = {shown_name(column.name): column.type_id for column in relation.columns}
        return cls(relation.relation_id, columns, newest)


@dataclass(frozen=True)
class Target:
    """What the record batches are to be.

    Attributes
    ----------
    table : str
        ``namespace.name``.
    columns : tuple of (name, Spark's type)
        Of `before` and `after`.
    schema : pyarrow.Schema
        Of the record batches.
    relations : tuple of bytes
        Frames of Relation and Type messages to begin with.
    settings : Settings
        The session's client_encoding, the user's policies and types.
    version : Version, optional
        Other versions of the table are compared with it, for columns that were renamed.
    """

    table: str
    columns: tuple[tuple[str, str], ...]
    schema: pa.Schema
    relations: tuple[bytes, ...] = ()
    settings: Settings = field(default_factory=Settings)
    version: Version | None = None


def table_name(relation: Relation) -> str:
    """What `table=` must be for a relation."""
    return f"{shown_name(relation.namespace)}.{shown_name(relation.name)}"


def shown_name(name: str) -> str:
    r"""A name as Spark can take it: bytes that are no text in the encoding as ``\xNN``."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def decoder_of(settings: Settings) -> pf.Decoder:
    """A decoder with these settings."""
    return pf.Decoder(settings.policies, encoding=settings.encoding, registry=settings.registry)


def column_types(plan: RelationPlan, *, binary: bool) -> Iterator[tuple[str, str]]:
    """Name and Spark's type, as DDL, of each column of a relation."""
    policies = plan.settings.policies
    for column, type_ in zip(plan.relation.columns, plan.column_types, strict=True):
        yield shown_name(column.name), column_ddl(type_, policies, binary=binary)


def change_batches(
    batches: Iterable[tuple[str, pa.RecordBatch]], target: Target
) -> Iterator[pa.RecordBatch]:
    """The changes of one table in a stream of frames.

    Parameters
    ----------
    batches : iterable of (str, pyarrow.RecordBatch)
        The frames in the order of the stream, and where they come from, for errors. The column
        `data` holds them; `lsn`, `commit_lsn`, `commit_time` (microseconds since 2000), `xid` and
        `seq` (of the frame's first row) may be there, of any integer type, nulls allowed.
    target : Target

    Yields
    ------
    pyarrow.RecordBatch
        Of ``target.schema``. Where neither the columns nor a Begin among the frames tells `xid`,
        `commit_lsn`, `commit_time` or `seq`, they are null.

    Raises
    ------
    PgOutputError
        A frame or a value that is refused, or lacks context; the error says which and what to do.
    """
    reader = _Reader(target)
    for where, batch in batches:
        yield from reader.read(where, batch)
    yield from reader.flush()


class Refused(PgOutputError):
    """A value that Spark's type of its column does not take."""


class _Mapping:
    """How the columns of one version of the table become those of the target."""

    def __init__(self, plan: RelationPlan, target: Target) -> None:
        _check_names(plan.relation, target)
        self.plan, self.target = plan, target
        found = {shown_name(name): i for i, name in reversed(list(enumerate(plan.names)))}
        self.lacking = [name for name, _ in target.columns if name not in found]
        self.positions: list[int | None] = [found.get(name) for name, _ in target.columns]
        self.found = [name for name, _ in target.columns if name in found]
        self.getters = [
            self.getter(found[name], name, wanted)
            for name, wanted in target.columns
            if name in found
        ]

    def getter(self, position: int, name: str, wanted: str) -> Callable[[Any], Any]:
        """The function that takes a column's value from a tuple."""
        plan, table = self.plan, self.target.table
        type_ = plan.column_types[position]
        fitting = policies_for(type_, wanted, plan.settings.policies)
        if fitting is None:
            found = column_ddl(type_, plan.settings.policies, binary=True)
            raise PgOutputError(
                f"{table}: older changes have the column {name} as {found}, the schema has it as "
                f"{wanted}; give schema= with {name} as string, which takes the text of both, or "
                "begin after the change with a new snapshot"
            )
        if is_text(type_, wanted):
            return lambda tuple_: tuple_.text(position)
        shown = f"column {name!r} of {table} ({type_.name or type_.oid})"
        policies, binary = fitting
        if wanted != "string" and is_plain(type_):
            if not wanted.startswith("decimal("):
                return lambda tuple_: tuple_[position]
            check = decimal_check(wanted, policies.special_values)

            def checked(tuple_: Any) -> Any:
                value = tuple_[position]
                if not isinstance(value, Decimal) or value.is_finite():
                    return value
                try:
                    return check(value)
                except ValueError as error:
                    raise Refused(f"{shown}: {error}") from error

            return checked
        codec = column_codec(
            type_, replace(plan.settings, policies=policies), wanted, binary=binary
        )

        def converted(tuple_: Any) -> Any:
            raw = tuple_.raw(position)
            if raw is None or raw is UNCHANGED:
                return raw
            try:
                return (codec.binary if tuple_.kind(position) == "b" else codec.text)(raw)
            except Exception as error:
                raise Refused(f"{shown}: {error}") from error

        return converted

    def row(self, tuple_: Any) -> list[Any]:
        """The values of the columns that are not lacking."""
        return [get(tuple_) for get in self.getters]


def _check_names(relation: Relation, target: Target) -> None:
    """Refuse a version of the table if a column of the target may be one of its own, renamed.

    A Relation says names, not which column bears them. But columns keep their order for as long as
    they live, and a new one comes behind all others. So, between the same two neighbours, a column
    of the one version and a column of the other are the same one, renamed. Behind the last common
    column they may as well be one that was dropped and one that was added: where their types
    differ they are taken for that, as ALTER TABLE RENAME keeps the type.

    Raises
    ------
    PgOutputError
    """
    version = target.version
    if version is None or relation.relation_id != version.relation_id:
        return
    there, here = version.columns, Version.of(relation, newest=False).columns
    wanted = {name for name, _ in target.columns}
    common = [name for name in there if name in here]
    for one, other in zip(common, (name for name in here if name in there), strict=True):
        if one != other and not wanted.isdisjoint((one, other)):
            raise PgOutputError(
                f"{target.table}: the columns {other} and {one} have changed places in its "
                "Relation messages, so that a name has gone from one column to another; begin "
                "after the change with a new snapshot"
            )
    candidates_after = _gaps(here, there)
    for neighbour, names in _gaps(there, here).items():
        found = candidates_after.get(neighbour, [])
        last = not common or neighbour == common[-1]
        for name in names:
            like = [other for other in found if here[other] == there[name]]
            candidates = like if like or last else found
            group = {name, *candidates}
            if wanted.isdisjoint(group) or (candidates and wanted >= group):
                continue
            if candidates:
                raise PgOutputError(
                    f"{target.table}: another version of the table has the column "
                    f"{' or '.join(candidates)} in the place of {name}, which looks like ALTER "
                    "TABLE RENAME COLUMN; give schema= with all of these names and make one column "
                    "of them, or begin after the change with a new snapshot"
                )
            if not last and version.newest:
                raise PgOutputError(
                    f"{target.table}: an older version of the table lacks the column {name}, which "
                    "ADD COLUMN would have put last: its rows had a value that was not published; "
                    f"begin after the change with a new snapshot, or give schema= without {name}"
                )


def _gaps(columns: Iterable[str], others: Container[str]) -> dict[str | None, list[str]]:
    """The columns that `others` lacks, by the last one before them that it has."""
    gaps: dict[str | None, list[str]] = {}
    neighbour = None
    for name in columns:
        if name in others:
            neighbour = name
        else:
            gaps.setdefault(neighbour, []).append(name)
    return gaps


def explained(place: str, error: DecodeError, state: StreamState) -> PgOutputError:
    """What to do about a frame that can't be read where it is."""
    advice = []
    if error.code == "stream_order":
        advice.append(
            "frames must be in the order of the stream, and all segments of a streamed transaction "
            "in one partition, each from its Stream Start to its Stream Stop, so repartition them; "
            "a column seq may stand in for the transaction's other segments"
        )
    elif error.code in _MISREAD and state.open_xid is None and state.xid is None:
        advice.append(
            "if the frame comes from inside a stream segment, it needs its Stream Start in the "
            "same partition"
        )
    if error.code == "unknown_relation":
        advice.append(
            "frames of a partition need the relations of all tables among them: give relations=, "
            "those of the stream's decoder for example, or partitions that begin with the stream"
        )
    return PgOutputError("; ".join([f"{place}: {error}", *advice]))


class _Reader:
    """Reads frames with a decoder, and collects rows until they make a record batch."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.decoder = decoder_of(target.settings)
        for frame in target.relations:
            self.decoder.decode(frame)
        self.mappings: dict[int, tuple[RelationPlan, _Mapping | None]] = {}
        self.mapping: _Mapping | None = None  # of the rows collected
        # Streamed transactions in progress whose rows are counted from the first one on.
        self.streamed: set[int] = set()
        self.clear()

    def clear(self) -> None:
        self.heads: list[tuple[Any, ...]] = []
        self.before: list[list[Any] | None] = []
        self.after: list[list[Any] | None] = []
        self.unchanged: list[list[str] | None] = []
        self.bytes = 0

    def read(self, where: str, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        names = batch.schema.names
        frames = batch.column(names.index("data")).to_pylist()
        nothing = [None] * len(frames)
        context = zip(
            *(
                batch.column(names.index(name)).to_pylist() if name in names else nothing
                for name in ("lsn", "xid", "commit_lsn", "commit_time", "seq")
            ),
            strict=True,
        )
        decode = self.decoder.decode
        for n, (frame, given) in enumerate(zip(frames, context, strict=True)):
            if frame is None:
                raise PgOutputError(f"{self.target.table}: {where}, frame {n}: it is null")
            try:
                message = decode(frame)
                if isinstance(message, (pf.Insert, pf.Update, pf.Delete)):
                    mapping = self.mapping_of(message.relation_id)
                    if mapping is None:
                        continue
                    if mapping is not self.mapping:
                        yield from self.flush()
                        self.mapping = mapping
                    self.add_row(mapping, message, given)
                elif isinstance(message, pf.Truncate):
                    self.add_truncate(message, given)
                else:
                    self.follow(message)
                    continue
            except (DecodeError, Refused) as error:
                place = f"{self.target.table}: {where}, frame {n}"
                if isinstance(error, Refused):
                    raise PgOutputError(f"{place}: {error}") from error
                raise explained(place, error, self.decoder.state) from error
            self.bytes += len(frame)
            if len(self.heads) >= _BATCH_ROWS or self.bytes >= _BATCH_BYTES:
                yield from self.flush()

    def follow(self, message: Any) -> None:
        """Take note of where streamed transactions begin and end."""
        if isinstance(message, pf.StreamStart):
            if message.first_segment:
                self.streamed.add(message.xid)
        elif isinstance(message, (pf.StreamCommit, pf.StreamPrepare)) or (
            isinstance(message, pf.StreamAbort) and message.subxid == message.xid
        ):
            self.streamed.discard(message.xid)

    def mapping_of(self, relation_id: int) -> _Mapping | None:
        """How to read a relation's rows; None if it is another table, or unknown."""
        plan = self.decoder.state.plan(relation_id)
        if plan is None:
            return None
        known = self.mappings.get(relation_id)
        if known is None or known[0] is not plan:
            wanted = table_name(plan.relation) == self.target.table
            known = (plan, _Mapping(plan, self.target) if wanted else None)
            self.mappings[relation_id] = known
        return known[1]

    def add_row(self, mapping: _Mapping, message: Any, given: tuple[Any, ...]) -> None:
        old_kind = None
        before = after = None
        unchanged = mapping.lacking
        if not isinstance(message, pf.Insert):
            old_kind = message.old_kind
            if old_kind is not None:
                before = mapping.row(message.old)
        if not isinstance(message, pf.Delete):
            after = mapping.row(message.new)
            if any(value is UNCHANGED for value in after):
                unchanged = list(mapping.lacking)
                for i, name in enumerate(mapping.found):
                    if after[i] is UNCHANGED:
                        after[i] = None
                        unchanged.append(name)
        self.add_head(_OPS[type(message)], message, old_kind, given)
        self.before.append(before)
        self.after.append(after)
        self.unchanged.append(unchanged or None)

    def add_truncate(self, message: pf.Truncate, given: tuple[Any, ...]) -> None:
        """A row for each time that a TRUNCATE names the table, which is once or not at all."""
        count = len(message.relation_ids)
        for step, relation_id in enumerate(message.relation_ids):
            if self.decoder.state.plan(relation_id) is None:
                fail(
                    "unknown_relation", message.frame, 0, relation_id=relation_id, hint=UNKNOWN_HINT
                )
            if self.mapping_of(relation_id) is not None:
                self.add_head("truncate", message, None, given, step=step, count=count)
                self.before.append(None)
                self.after.append(None)
                self.unchanged.append(None)

    def add_head(
        self,
        op: str,
        message: Any,
        old_kind: str | None,
        given: tuple[Any, ...],
        *,
        step: int = 0,
        count: int = 1,
    ) -> None:
        """What stands beside the tuples: row `step` of the `count` that the frame makes."""
        state = self.decoder.state
        lsn, xid, commit_lsn, commit_time, seq = given
        subxid = None
        if state.open_xid is not None:
            xid, subxid = state.open_xid, message.xid
        elif state.xid is not None:
            xid = state.xid if xid is None else xid
            commit_lsn = state.commit_lsn if commit_lsn is None else commit_lsn
            commit_time = state.commit_time if commit_time is None else commit_time
        if seq is not None:
            seq += step
        elif state.open_xid is not None or state.xid is not None:
            if state.open_xid is not None and state.open_xid not in self.streamed:
                found = (
                    f"the stream of xid {state.open_xid} did not begin in this partition, so that "
                    "the change's seq is not known"
                )
                fail("stream_order", message.frame, 0, found=found)
            # The frame is counted already.
            seq = state.row - count + step
        self.heads.append((op, xid, subxid, lsn, commit_lsn, commit_time, seq, old_kind))

    def flush(self) -> Iterator[pa.RecordBatch]:
        if not self.heads:
            return
        schema = self.target.schema
        heads = zip(*self.heads, strict=True)
        columns = [
            self.commit_times(list(values), field.type)
            if field.name == "commit_time"
            else self.array(f"{field.name} of a change", list(values), field.type)
            for field, values in zip(list(schema)[:8], heads, strict=True)
        ]
        columns.append(self.tuples(self.before, schema.field("before").type))
        columns.append(self.tuples(self.after, schema.field("after").type))
        columns.append(pa.array(self.unchanged, schema.field("unchanged").type))
        self.clear()
        yield pa.RecordBatch.from_arrays(columns, schema=schema)

    def commit_times(self, times: list[Any], type_: pa.DataType) -> pa.Array:
        """Microseconds since 2000, or timestamps already, as timestamps."""
        if not any(isinstance(time, int) for time in times):
            return self.array("commit_time of a change", times, type_)
        moved = [None if time is None else time + EPOCH_SHIFT for time in times]
        return self.array("commit_time of a change", moved, pa.int64()).cast(type_)

    def tuples(self, rows: list[list[Any] | None], type_: pa.DataType) -> pa.Array:
        """The struct column of rows, None where there is none."""
        mapping = self.mapping
        if mapping is None or all(row is None for row in rows):
            return pa.nulls(len(rows), type_)
        if not type_.num_fields:
            return pa.array([None if row is None else {} for row in rows], type_)
        blank = [None] * len(mapping.found)
        mask = pa.array([row is None for row in rows], pa.bool_())
        found = zip(*(blank if row is None else row for row in rows), strict=True)
        children = [
            pa.nulls(len(rows), field.type)
            if position is None
            else self.array(f"column {field.name}", list(next(found)), field.type)
            for field, position in zip(type_, mapping.positions, strict=True)
        ]
        return pa.StructArray.from_arrays(children, fields=list(type_), mask=mask)

    def array(self, name: str, values: list[Any], type_: pa.DataType) -> pa.Array:
        try:
            return pa.array(values, type_)
        except (pa.ArrowException, ValueError, TypeError, OverflowError):
            # Which one it was Arrow does not say.
            for value in values:
                try:
                    pa.array([value], type_)
                except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
                    raise PgOutputError(
                        f"{self.target.table}, {name}: {_abridged(value)} does not fit into "
                        f"{type_} ({error}); schema= with the column as string takes its text"
                    ) from error
            raise


def _abridged(value: Any) -> str:
    shown = repr(value) if value is not UNCHANGED else "a value that the server did not send"
    return shown if len(shown) <= 100 else f"{shown[:100]}…"
