"""Decode many frames into Arrow columns, in plain Python: the twin of ``_engine.pyx``.

Every value is converted by the functions of :mod:`pgoutput_fast.columnar.mapping`. The columns are
byte buffers until pyarrow makes arrays of them. A row is appended to its columns only when all its
values are converted, so that a refused row leaves nothing behind.
"""

from __future__ import annotations

import struct
from array import array
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from .._pure import Begin, Delete, Insert, _Stumble, make_fixed, make_row
from ..diagnose import UNKNOWN_HINT, diagnose
from ..errors import DecodeError, fail
from ..messages import Truncate, decode_rare
from ..plan import RelationPlan, refuse_value
from ._pure_input import Piece, pieces_of
from .arrays import (
    MOST_ROWS,
    TWO_FORMS,
    UNSENT_BEFORE,
    Column,
    array_of,
    bits_of,
    column_of,
    commit_of,
    dictionary_of,
    fixed_column,
    lsns_of,
    pyarrow,
    refuse_time,
    validity,
    variable_column,
)
from .fields import EPOCH_SHIFT, Field
from .packed import NewLabel
from .pyarrow_bridge import arrow_array, schema_of
from .schema import Layout, version_of

if TYPE_CHECKING:
    from ..messages import Message, Relation
    from ..state import StreamState
    from .options import Options

_uint32 = struct.Struct(">I").unpack_from
_event = struct.Struct("=qQQqIIB7x").pack

_OPS = {"I": b"insert", "U": b"update", "D": b"delete"}
_WITH_AFTER = frozenset({b"insert", b"update"})
_BINARY, _NULL, _UNCHANGED = b"bnu"
_MOST_OFFSET = 0x7FFFFFFF
_GREATEST_TIME = 0x7FFFFFFFFFFFFFFF - EPOCH_SHIFT

Stored = list["bytes | None"]


# --- columns under construction ------------------------------------------------------------------


class _Values:
    """One column of a relation, with a value for each row."""

    def __init__(self, field: Field) -> None:
        self.field = field
        self.width = field.width
        self.present = bytearray()
        self.data = bytearray()
        self.ends = array("i", [0])

    def put(self, stored: bytes | None) -> None:
        self.present.append(stored is not None)
        self.data += bytes(self.width or 1) if stored is None and self.width >= 0 else stored or b""
        if self.width < 0:
            self.ends.append(len(self.data))

    def pad(self, count: int) -> None:
        """Append `count` nulls."""
        self.present += bytes(count)
        if self.width < 0:
            self.ends.extend([len(self.data)] * count)
        else:
            self.data += bytes(count * (self.width or 1))

    def column(self) -> Column:
        if self.field.is_nested:
            spans = zip(self.present, self.ends, self.ends[1:], strict=False)
            data = bytes(self.data)
            return column_of(self.field, [data[a:b] if there else None for there, a, b in spans])
        bits = validity(self.present)
        data = bits_of(self.data) if self.width == 0 else bytes(self.data)
        buffers = (bits, self.ends.tobytes(), data) if self.width < 0 else (bits, data)
        null_count = self.present.count(0)
        dictionary = dictionary_of(self.field)
        return Column(len(self.present), null_count, buffers, dictionary=dictionary)


class _Side:
    """The columns of the old rows (`before`) or of the new rows (`after`)."""

    def __init__(self, layout: Layout) -> None:
        self.columns = [_Values(field) for field in layout.columns]
        self.present = bytearray()
        self._missing = 0  # rows without a tuple whose nulls are not yet in the columns

    def put(self, values: Stored | None) -> None:
        self.present.append(values is not None)
        if values is None:
            self._missing += 1
            return
        self._catch_up()
        for column, value in zip(self.columns, values, strict=True):
            column.put(value)

    def is_full(self, values: Stored | None) -> bool:
        """Whether a column of these values would outgrow Arrow's offsets of 32 bits."""
        return any(
            len(column.data) + len(value or b"") > _MOST_OFFSET
            for column, value in zip(self.columns, values or (), strict=False)
            if column.width < 0
        )

    def column(self) -> Column:
        self._catch_up()
        children = tuple([column.column() for column in self.columns])
        present = self.present
        return Column(len(present), present.count(0), (validity(present),), children)

    def _catch_up(self) -> None:
        if self._missing:
            for column in self.columns:
                column.pad(self._missing)
            self._missing = 0


class _Relation:
    """The rows of one version of a relation that arrived since its last record batch."""

    def __init__(self, plan: RelationPlan, layout: Layout | None) -> None:
        self.plan = plan
        self.wanted = layout is not None
        self.layout = layout or Layout(plan, (), (), {})
        self.names = [field.name.encode() for field in self.layout.columns]
        self.clear()

    def clear(self) -> None:
        self.heads: list[tuple[Any, ...]] = []
        self.before, self.after = _Side(self.layout), _Side(self.layout)
        self.unchanged: dict[int, list[bytes]] = {}  # row → names
        self.unchanged_bytes = 0  # the length of the names, and one byte for each
        self.forms: dict[int, bool] = {}  # columns with by_format: whether they are in binary
        self.bytes = 0
        self.row_bytes = self.layout.row_bytes

    def unchanged_column(self) -> Column:
        count = len(self.heads)
        ends, names = array("i", [0]), list[bytes]()
        for row in range(count):
            names += self.unchanged.get(row, ())
            ends.append(len(names))
        present = [row in self.unchanged for row in range(count)]
        buffers = (validity(present), ends.tobytes())
        return Column(count, count - sum(present), buffers, (variable_column(names),))


# --- the engine ----------------------------------------------------------------------------------


class Engine:
    """Decodes frames into rows of Arrow columns, for :class:`pgoutput_fast.ColumnarDecoder`.

    Parameters
    ----------
    state : StreamState
    options : pgoutput_fast.columnar.options.Options
    """

    def __init__(self, state: StreamState, options: Options) -> None:
        self._options = options
        self._max_rows = min(options.max_rows, MOST_ROWS)
        self._wide = options.target == "spark"  # xids and LSNs are Spark's longs
        self._pieces: list[Piece] = []
        self._at = self._before = 0
        self._lsns: Any = None
        # By OID: the relations whose plan is current. By version: all that have been seen. By OID:
        # those that hold rows.
        self._cached: dict[int, _Relation] = {}
        self._known: dict[tuple[object, ...], _Relation] = {}
        self._open: dict[int, _Relation] = {}
        self._held = 0  # bytes of the rows of all relations
        self._ready: list[ChangeBatch] = []
        self._events = bytearray()
        self.messages: dict[int, Message] = {}
        self.adopt(state)

    # --- what the leading class asks for

    def load(self, data: Any, offsets: Any, lsns: Any) -> None:
        """Take frames, without decoding any yet."""
        pieces = pieces_of(data, offsets)
        self._lsns = None if lsns is None else lsns_of(lsns, sum(map(len, pieces)))
        self._pieces = list(pieces)
        self._at = self._before = 0
        self._events = bytearray()
        self.messages = {}

    def unload(self) -> None:
        """Forget the frames."""
        self._pieces = []
        self._lsns = None

    @property
    def position(self) -> int:
        """Index of the next frame."""
        return self._before + self._at

    def frame(self) -> bytes:
        """The next frame."""
        return self._pieces[0][self._at]

    def lsn(self) -> int | None:
        """The LSN of the next frame; None if no LSNs were given."""
        return None if self._lsns is None else int(self._lsns[self.position])

    def skip(self, rows: int) -> None:
        """Skip the next frame, which was refused; `rows` is how many rows it would have made."""
        self.state.row += rows
        self._at += 1

    def run(self) -> list[ChangeBatch] | None:
        """Decode until record batches are complete, and return them; None after the last frame.

        Raises
        ------
        DecodeError
            The next frame is malformed or can't be stored. The engine is as it was before it.
        """
        while self._pieces:
            if self._at == len(self._pieces[0]):
                self._before += self._at
                self._at = 0
                del self._pieces[0]
                continue
            frame = self.frame()
            try:
                self._receive(frame)
            except DecodeError as error:
                error.frame = self.position
                raise
            if self._ready:
                ready, self._ready = self._ready, []
                return ready
        return None

    def flush(self) -> list[ChangeBatch]:
        """Make record batches of all rows that are held, in the order of their first rows."""
        batches = [self._close(relation) for relation in list(self._open.values())]
        return [batch for batch in batches if batch is not None]

    def drop(self) -> None:
        """Forget all rows that were not yet returned in a batch."""
        for relation in self._open.values():
            relation.clear()
        self._open = {}
        self._ready = []
        self._held = 0
        self._cached = {}

    def take_events(self) -> np.ndarray[Any, Any]:
        """The events (frames other than Begin, Insert, Update and Delete), as an array."""
        return array_of("events", bytearray(self._events))

    def adopt(self, state: StreamState) -> None:
        """Go on from a stream state."""
        self.state = state
        self._cached = {}

    def sync(self) -> None:
        """Write what the engine keeps by itself back into the state."""  # the twin keeps nothing

    # --- frames

    def _receive(self, frame: bytes) -> None:
        """Take the next frame, or close the record batch that it does not fit into."""
        tag = frame[:1]
        if tag in (b"I", b"U", b"D"):
            self._change(frame)
        elif tag in (b"B", b"C"):
            self._bound(frame)
        else:
            self._rare(frame)

    def _bound(self, frame: bytes) -> None:
        state = self.state
        state.check_order(frame)
        message = make_fixed(frame, False)
        if isinstance(message, Begin):
            if self._wide and message.final_lsn >> 63:
                refuse_time(frame, 1, "commit_lsn", message.final_lsn)
            if message.commit_time > _GREATEST_TIME:
                refuse_time(frame, 9, "commit_time", message.commit_time)
            state.begin(message.xid, message.final_lsn, message.commit_time)
        else:
            self._event(message, state.xid, None)
            state.end()
        self._at += 1

    def _change(self, frame: bytes) -> None:
        """Take an Insert, Update or Delete."""
        state, options = self.state, self._options
        in_stream = state.open_xid is not None
        start = 5 if in_stream else 1
        if len(frame) < start + 7:
            diagnose(frame, in_stream, state.plan)
        relation_id: int = _uint32(frame, start)[0]
        relation = self._cached.get(relation_id)
        if relation is None:
            plan = state.plan(relation_id)
            if plan is None:
                diagnose(frame, in_stream, state.plan)
            relation = self._cached[relation_id] = self._relation_of(plan)
            if self._ready:
                return
        lsn_is_sound = self._lsn_is_sound()
        if relation.wanted and lsn_is_sound and len(relation.heads) == self._max_rows:
            self._give(relation)
            return
        known = relation.plan
        try:
            row = make_row(frame, in_stream, lambda relation_id: known)
        except (IndexError, struct.error, _Stumble):
            diagnose(frame, in_stream, state.plan)
        if not lsn_is_sound:
            refuse_time(frame, 0, "lsn", self.lsn() or 0)
        if not relation.wanted:
            state.row += 1
            self._at += 1
            return
        taken = _Taken(relation, frame)
        old_kind = None if isinstance(row, Insert) else row.old_kind
        before = after = None
        try:
            if old_kind is not None:
                before = taken.values(row._old or (), None, True)
            if not isinstance(row, Delete):
                filled = old_kind == "O" and options.fill_unchanged
                after = taken.values(row._new or (), row._old if filled else None, False)
        except _OtherForm:
            self._give(relation)
            return
        except NewLabel as new:
            self._give(relation)
            new.labels.add(new.label)
            return
        size = relation.row_bytes + taken.bytes
        side_bytes = 0
        if before is not None and relation.row_bytes == relation.layout.row_bytes:
            # The columns of `before` take memory from the first old tuple on, and then for all
            # rows of the batch, those without an old tuple included.
            side_bytes = relation.layout.side_bytes
            size += side_bytes * (len(relation.heads) + 1)
        names = sum([1 + len(name) for name in taken.unchanged])
        is_full = self._held > 0 and (
            self._held + size > options.max_bytes or relation.unchanged_bytes + names > _MOST_OFFSET
        )
        if is_full or relation.before.is_full(before) or relation.after.is_full(after):
            self._ready += self.flush()
            return
        relation.row_bytes += side_bytes
        relation.forms.update(taken.forms)
        if taken.unchanged:
            relation.unchanged[len(relation.heads)] = taken.unchanged
            relation.unchanged_bytes += names
        xid: int | None = row.xid
        self._put(relation, _OPS[row.tag], xid, old_kind, before, after, size)
        self._at += 1

    def _lsn_is_sound(self) -> bool:
        return not (self._wide and self._lsns is not None and self._lsns[self.position] >> 63)

    def _put(
        self,
        relation: _Relation,
        op: bytes,
        subxid: int | None,
        old_kind: str | None,
        before: Stored | None,
        after: Stored | None,
        size: int,
    ) -> None:
        """Append a row to its relation's columns."""
        state = self.state
        xid, commit_lsn, commit_time = state.open_xid, None, None
        if xid is None and state.xid is not None:
            xid, commit_lsn, commit_time = state.xid, state.commit_lsn, state.commit_time
        relation.heads.append(
            (
                op,
                xid,
                subxid,
                self.lsn(),
                commit_lsn,
                None if commit_time is None else commit_time + EPOCH_SHIFT,
                state.row,
                None if old_kind is None else old_kind.encode(),
            )
        )
        relation.before.put(before)
        relation.after.put(after)
        relation.bytes += size
        self._held += size
        state.row += 1

    def _rare(self, frame: bytes) -> None:
        """Take a frame that is neither an Insert, Update or Delete nor a Begin or Commit."""
        state = self.state
        open_xid, in_transaction = state.open_xid, state.xid
        if frame[:1] == b"T":
            message: Any = decode_rare(frame, open_xid is not None, state.settings.encoding)
            self._truncate(message)
        else:
            message = state.receive(frame)
        if message.tag not in ("M", "O", "T"):
            self._cached = {}
        top = open_xid if open_xid is not None else in_transaction
        xid = getattr(message, "xid", None)
        if xid is None or open_xid is not None:
            subxid, xid = xid, top
        else:
            subxid = getattr(message, "subxid", None)
        self._event(message, xid, subxid)
        self.messages[self.position] = message
        self._at += 1

    def _truncate(self, message: Truncate) -> None:
        """Append a row for each relation of a Truncate; all of them must have been announced."""
        start = 10 if message.in_stream else 6
        plans = []
        for i, relation_id in enumerate(message.relation_ids):
            plan = self.state.plan(relation_id)
            if plan is None:
                fail(
                    "unknown_relation",
                    message.frame,
                    start + 4 * i,
                    relation_id=relation_id,
                    hint=UNKNOWN_HINT,
                )
            plans.append(plan)
        if not self._lsn_is_sound():
            refuse_time(message.frame, 0, "lsn", self.lsn() or 0)
        for plan in plans:
            relation = self._relation_of(plan)
            if not relation.wanted:
                self.state.row += 1
                continue
            if len(relation.heads) == self._max_rows:
                self._give(relation)
                self._relation_of(plan)
            elif self._held > 0 and self._held + relation.row_bytes > self._options.max_bytes:
                self._ready += self.flush()
                self._relation_of(plan)
            size = relation.row_bytes
            self._put(relation, b"truncate", message.xid, None, None, None, size)

    def _event(self, message: Any, xid: int | None, subxid: int | None) -> None:
        self._events += _event(
            self.position,
            getattr(message, "commit_lsn", None) or 0,
            getattr(message, "end_lsn", None) or 0,
            getattr(message, "commit_time", None) or 0,
            xid or 0,
            subxid or 0,
            ord(message.tag),
        )

    # --- relations

    def _relation_of(self, plan: RelationPlan) -> _Relation:
        """The rows of the version of a relation that a plan stands for, open from now on.

        Rows of another version of the relation become a record batch first.
        """
        key = version_of(plan)
        relation = self._known.get(key)
        if relation is None:
            relation = self._known[key] = _Relation(plan, self._options.layout(plan))
        relation_id = plan.relation.relation_id
        other = self._open.get(relation_id)
        if other is not relation:
            if other is not None:
                self._give(other)
            self._open[relation_id] = relation
        return relation

    def _give(self, relation: _Relation) -> None:
        batch = self._close(relation)
        if batch is not None:
            self._ready.append(batch)

    def _close(self, relation: _Relation) -> ChangeBatch | None:
        """Make a record batch of a relation's rows; None if it has none."""
        self._open.pop(relation.plan.relation.relation_id, None)
        self._cached = {}
        if not relation.heads:
            return None
        self._held -= relation.bytes
        batch = _batch_of(relation, self._options.target)
        relation.clear()
        return batch


class _OtherForm(Exception):
    """A value is in text format and those before it in its column in binary, or vice versa."""


class _Taken:
    """The converted values of one row, and what the relation has to note of them."""

    def __init__(self, relation: _Relation, frame: bytes) -> None:
        self._relation = relation
        self._frame = frame
        self.bytes = 0
        self.forms: dict[int, bool] = {}
        self.unchanged: list[bytes] = []

    def values(self, positions: Any, old: Any, is_before: bool) -> Stored:
        """The bytes that the columns store of a tuple.

        Values that the server did not send (unchanged TOAST) are taken from the tuple `old`.
        """
        relation, frame = self._relation, self._frame
        taken: Stored = []
        for i, field in enumerate(relation.layout.columns):
            start, end = positions[field.position], positions[field.position + 1]
            kind = frame[start]
            if kind == _UNCHANGED and is_before:
                self._refuse(start + 1, field, ValueError(UNSENT_BEFORE))
            if kind == _UNCHANGED and old is not None:
                start, end = old[field.position], old[field.position + 1]
                if frame[start] != _NULL:
                    kind = frame[start]
            if kind == _UNCHANGED:
                self.unchanged.append(relation.names[i])
                self.bytes += 4 + len(relation.names[i])
            if kind == _UNCHANGED or kind == _NULL:
                taken.append(None)
                continue
            stored = self._stored(i, field, start + 5, end, kind == _BINARY)
            if stored is not None and field.width < 0:
                self.bytes += len(stored)
            taken.append(stored)
        return taken

    def _stored(self, i: int, field: Field, start: int, end: int, binary: bool) -> bytes | None:
        if field.by_format:
            form = self.forms.get(i, self._relation.forms.get(i))
            if form is None:
                self.forms[i] = binary
            elif form != binary:
                if self._relation.heads:
                    raise _OtherForm
                self._refuse(start, field, ValueError(TWO_FORMS))
        store: Any = field.binary if binary else field.text
        try:
            stored: bytes | None = store(self._frame[start:end])
        except NewLabel:
            raise
        except Exception as error:
            self._refuse(start, field, error)
        return stored

    def _refuse(self, offset: int, field: Field, error: Exception) -> NoReturn:
        refuse_value(self._frame, offset, field.position, error, self._relation.plan)


# --- batches -------------------------------------------------------------------------------------


class ChangeBatch:
    """Changed rows of one version of a relation, as an Arrow record batch.

    A library that supports the Arrow PyCapsule interface reads it without a copy:
    ``pyarrow.record_batch(changes)``, ``polars.DataFrame(changes)``. It stays valid when its
    decoder is gone.
    """

    __slots__ = ("_columns", "_target", "binary", "layout", "num_rows")
    layout: Layout
    binary: tuple[int, ...]
    num_rows: int
    _columns: Column
    _target: str

    def __init__(self) -> None:
        raise TypeError("a ChangeBatch is made by decoding frames")

    def __len__(self) -> int:
        return self.num_rows

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a ChangeBatch is not pickled; what pyarrow.record_batch() makes of it can be"
        )

    def __repr__(self) -> str:
        relation = self.relation
        return f"<ChangeBatch: {self.num_rows} rows of {relation.namespace}.{relation.name}>"

    @property
    def relation(self) -> Relation:
        """The Relation message that describes the rows."""
        return self.layout.plan.relation

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the batch holds."""
        return _size(self._columns)

    def __arrow_c_schema__(self) -> object:
        """The schema, as a capsule of the Arrow C data interface."""
        return schema_of(self.layout.schema(self.binary)).__arrow_c_schema__()

    def __arrow_c_array__(self, requested_schema: object = None) -> tuple[object, object]:
        """Schema and batch as capsules. `requested_schema` is ignored, as the interface allows."""
        return export(self.layout.schema(self.binary), self._columns)

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """A stream with this batch alone; :class:`ChangeStream` makes a stream of several."""
        return export_stream([self])

    def with_commit(self, commit_lsn: int, commit_time: int) -> ChangeBatch:
        """The same rows with commit LSN and commit time filled in where they are null.

        Rows of a streamed transaction have nulls there, as their commit is known only at the end
        of the transaction. The new batch shares all other buffers with this one.

        Parameters
        ----------
        commit_lsn : int
        commit_time : int
            In microseconds since 2000-01-01.

        Raises
        ------
        TypeError
            An argument is no int.
        OverflowError
            A value does not fit into its column.
        """
        commit = commit_of(commit_lsn, commit_time, self._target)
        columns = list(self._columns.children)
        for i, letter, value in ((4, "u8", commit[0]), (5, "i8", commit[1])):
            bits, data = columns[i].buffers
            values = np.frombuffer(data or b"", letter).copy()
            if bits is not None:
                known = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little")
                values[known[: self.num_rows] == 0] = value
            columns[i] = Column(self.num_rows, 0, (None, values.tobytes()))
        return _made(self.layout, self.binary, self._target, tuple(columns))


def _batch_of(relation: _Relation, target: str) -> ChangeBatch:
    head = list(zip(*relation.heads, strict=True))
    unsigned4, unsigned8 = ("q", "q") if target == "spark" else ("I", "Q")
    columns = (
        variable_column(head[0]),
        fixed_column(unsigned4, head[1]),
        fixed_column(unsigned4, head[2]),
        fixed_column(unsigned8, head[3]),
        fixed_column(unsigned8, head[4]),
        fixed_column("q", head[5]),
        fixed_column("q", head[6]),
        variable_column(head[7]),
        relation.before.column(),
        relation.after.column(),
        relation.unchanged_column(),
    )
    binary = tuple(sorted(i for i, is_binary in relation.forms.items() if is_binary))
    return _made(relation.layout, binary, target, columns)


def _made(
    layout: Layout, binary: tuple[int, ...], target: str, columns: tuple[Column, ...]
) -> ChangeBatch:
    batch = ChangeBatch.__new__(ChangeBatch)
    batch.layout = layout
    batch.binary = binary
    batch.num_rows = columns[0].length
    batch._target = target
    batch._columns = Column(batch.num_rows, 0, (None,), columns)
    return batch


def _size(column: Column) -> int:
    return sum(len(buffer or b"") for buffer in column.buffers) + sum(map(_size, column.children))


# --- export --------------------------------------------------------------------------------------


def export(field: Field, column: Column) -> tuple[object, object]:
    """Export a column whose buffers are bytes as the capsules of its Arrow schema and array.

    Parameters
    ----------
    field : Field
    column : pgoutput_fast.columnar.arrays.Column
    """
    capsules: tuple[object, object] = _record_batch(field, column).__arrow_c_array__()
    return capsules


def export_stream(batches: list[ChangeBatch]) -> object:
    """Export one or more batches, all with the same schema, as the capsule of an Arrow stream."""
    field = batches[0].layout.schema(batches[0].binary)
    made = (_record_batch(field, batch._columns) for batch in list(batches))
    reader = pyarrow().RecordBatchReader.from_batches(schema_of(field), made)
    return reader.__arrow_c_stream__()


def _record_batch(field: Field, column: Column) -> Any:
    arrays = [arrow_array(*pair) for pair in zip(field.children, column.children, strict=True)]
    return pyarrow().RecordBatch.from_arrays(arrays, schema=schema_of(field))
