"""The rows of many frames as Arrow columns, in plain Python: the twin of ``_engine.pyx``.

Every value goes through the functions of :mod:`pgoutput_fast.columnar.mapping`, and columns are
bytes until pyarrow makes arrays of them. A row is put into its columns when all of it is there.
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
    """A column of a relation's, with a value for each row."""

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
        """Put as many nulls."""
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
    """The columns of `before` or of `after`."""

    def __init__(self, layout: Layout) -> None:
        self.columns = [_Values(field) for field in layout.columns]
        self.present = bytearray()
        self._missing = 0  # rows without a tuple, that the columns do not have yet

    def put(self, values: Stored | None) -> None:
        self.present.append(values is not None)
        if values is None:
            self._missing += 1
            return
        self._catch_up()
        for column, value in zip(self.columns, values, strict=True):
            column.put(value)

    def is_full(self, values: Stored | None) -> bool:
        """Whether the values would pass what offsets of 32 bits can count."""
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
    """The rows of one version of a relation that have come since its last batch."""

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
        self.unchanged_bytes = 0  # of the names, and one for each
        self.forms: dict[int, bool] = {}  # whether a column that is by_format is binary
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
    """Turns frames into rows of columns; :class:`pgoutput_fast.ColumnarDecoder` leads it.

    Parameters
    ----------
    state : StreamState
    options : pgoutput_fast.columnar.decoder.Options
    """

    def __init__(self, state: StreamState, options: Options) -> None:
        self._options = options
        self._max_rows = min(options.max_rows, MOST_ROWS)
        self._wide = options.target == "spark"  # xids and LSNs are Spark's longs
        self._pieces: list[Piece] = []
        self._at = self._before = 0
        self._lsns: Any = None
        # By OID those at hand, by version those known, by OID those that have rows.
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
        """Take frames; nothing is decoded yet."""
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
        """Index of the frame that comes next."""
        return self._before + self._at

    def frame(self) -> bytes:
        """The frame that comes next."""
        return self._pieces[0][self._at]

    def lsn(self) -> int | None:
        """Its LSN, None where they were not given."""
        return None if self._lsns is None else int(self._lsns[self.position])

    def skip(self, rows: int) -> None:
        """Pass over the frame that comes next, which is refused and would have had `rows`."""
        self.state.row += rows
        self._at += 1

    def run(self) -> list[ChangeBatch] | None:
        """Decode until there are batches to give, which are returned; None at the end.

        Raises
        ------
        DecodeError
            The frame that comes next is refused; everything is as it was before it.
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
        """The batches of all relations that have rows, in the order of their first rows."""
        batches = [self._close(relation) for relation in list(self._open.values())]
        return [batch for batch in batches if batch is not None]

    def drop(self) -> None:
        """Forget rows that were not given out."""
        for relation in self._open.values():
            relation.clear()
        self._open = {}
        self._ready = []
        self._held = 0
        self._cached = {}

    def take_events(self) -> np.ndarray[Any, Any]:
        """What came that is no row, as an array."""
        return array_of("events", bytearray(self._events))

    def adopt(self, state: StreamState) -> None:
        """Take over a state, all of what it says."""
        self.state = state
        self._cached = {}

    def sync(self) -> None:
        """Bring the state up to date."""  # it always is

    # --- frames

    def _receive(self, frame: bytes) -> None:
        """Take the frame that comes next, or close the batch that it does not fit into."""
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
            # From the first old tuple on, all rows have their place in the columns of `before`.
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
        """Put a row into its relation's columns."""
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
        """Take a frame that is neither a row, nor Begin, nor Commit."""
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
        """A row for each table that a TRUNCATE names. All of them must be known."""
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
        """The rows of a plan's version of its relation, which are open from now on.

        Those of another version end: they come first.
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
        """The rows of a relation as a batch; None if it has none."""
        self._open.pop(relation.plan.relation.relation_id, None)
        self._cached = {}
        if not relation.heads:
            return None
        self._held -= relation.bytes
        batch = _batch_of(relation, self._options.target)
        relation.clear()
        return batch


class _OtherForm(Exception):
    """A value in the other format than the ones before it in its column."""


class _Taken:
    """The values of a row, and what follows from them."""

    def __init__(self, relation: _Relation, frame: bytes) -> None:
        self._relation = relation
        self._frame = frame
        self.bytes = 0
        self.forms: dict[int, bool] = {}
        self.unchanged: list[bytes] = []

    def values(self, positions: Any, old: Any, is_before: bool) -> Stored:
        """What the columns store of a tuple; `old` is the one that has what was not sent."""
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
    """Rows of one version of a relation, as columns: an Arrow record batch.

    Anything that takes the Arrow PyCapsule interface reads it without a copy:
    ``pyarrow.record_batch(changes)``, ``polars.DataFrame(changes)``. It outlives its decoder.
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
        """The relation as it was announced."""
        return self.layout.plan.relation

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the batch keeps."""
        return _size(self._columns)

    def __arrow_c_schema__(self) -> object:
        """The schema, as a capsule of the Arrow C data interface."""
        return schema_of(self.layout.schema(self.binary)).__arrow_c_schema__()

    def __arrow_c_array__(self, requested_schema: object = None) -> tuple[object, object]:
        """Schema and batch as capsules; `requested_schema` is not looked at, as it may be."""
        return export(self.layout.schema(self.binary), self._columns)

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """A stream of this batch alone; :class:`ChangeStream` makes one of several."""
        return export_stream([self])

    def with_commit(self, commit_lsn: int, commit_time: int) -> ChangeBatch:
        """The same rows, their buffers shared, with the commit filled in where it was not known.

        Parameters
        ----------
        commit_lsn : int
        commit_time : int
            In microseconds since 2000-01-01.

        Raises
        ------
        OverflowError
            One does not fit into its column.
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
    """Schema and array as capsules, from buffers that are bytes.

    Parameters
    ----------
    field : Field
    column : pgoutput_fast.columnar.arrays.Column
    """
    capsules: tuple[object, object] = _record_batch(field, column).__arrow_c_array__()
    return capsules


def export_stream(batches: list[ChangeBatch]) -> object:
    """One batch or more, of one schema, as the capsule of a stream."""
    field = batches[0].layout.schema(batches[0].binary)
    made = (_record_batch(field, batch._columns) for batch in list(batches))
    reader = pyarrow().RecordBatchReader.from_batches(schema_of(field), made)
    return reader.__arrow_c_stream__()


def _record_batch(field: Field, column: Column) -> Any:
    arrays = [arrow_array(*pair) for pair in zip(field.children, column.children, strict=True)]
    return pyarrow().RecordBatch.from_arrays(arrays, schema=schema_of(field))
