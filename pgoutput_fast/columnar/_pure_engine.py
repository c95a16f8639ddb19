"""Decode many frames into Arrow columns, in plain Python.

The twin of ``_engine.pyx`` and of ``_reader.pyx``. Every value is converted by the functions of
:mod:`pgoutput_fast.columnar.mapping`. A row is appended to its columns only when all its values are
converted, so that a refused row leaves nothing behind.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, NoReturn

from ..decoding._pure import Begin, Delete, Insert, _Stumble, make_fixed, make_row
from ..decoding.diagnose import diagnose
from ..decoding.plan import RelationPlan, refuse_value
from ..errors import DecodeError
from ..protocol.messages import Truncate, decode_rare
from ..protocol.wire import (
    RELATION_ID,
    RELATION_ID_IN_STREAM,
    TUPLE_HEAD,
    VALUE_HEAD,
    offset_of,
)
from ._pure_batch import ChangeBatch, batch_of
from ._pure_input import Piece, pieces_of
from ._pure_relation import MOST_OFFSET, RelationRows, TargetState
from .arrays import (
    MOST_ROWS,
    OPERATIONS,
    TWO_FORMS,
    UNSENT_BEFORE,
    array_of,
    lsns_of,
    refuse_time,
)
from .fields import EPOCH_SHIFT, Field
from .packed import NewLabel
from .rare import NEW_VERSIONS, event_of, outdated, plans_of
from .schema import version_of

if TYPE_CHECKING:
    import numpy as np

    from ..decoding.state import StreamState
    from ..protocol.messages import Message
    from .options import DecoderOptions

_uint32 = struct.Struct(">I").unpack_from
_event = struct.Struct("=qQQqIIB7x").pack

_OPS = {tag: name.encode() for tag, name in OPERATIONS.items()}
_BINARY, _NULL, _UNCHANGED = b"bnu"
_FINAL_LSN = offset_of("B", "final_lsn")
_COMMIT_TIME = offset_of("B", "commit_time")
_GREATEST_TIME = 0x7FFFFFFFFFFFFFFF - EPOCH_SHIFT


class ColumnEngine:
    """Decodes frames into rows of Arrow columns, for :class:`pgoutput_fast.ColumnarDecoder`.

    Parameters
    ----------
    state : StreamState
    options : pgoutput_fast.columnar.options.DecoderOptions
    """

    def __init__(self, state: StreamState, options: DecoderOptions) -> None:
        self._options = options
        self._max_rows = min(options.max_rows, MOST_ROWS)
        self._wide = options.target == "spark"  # xids and LSNs are Spark's longs
        self._pieces: list[Piece] = []
        self._at = self._before = 0
        self._lsns: Any = None
        # The rows of relations, in three mappings: by OID those whose plan is current, by version
        # all that have been seen, and by OID those that hold rows.
        self._cached: dict[int, RelationRows] = {}
        self._known: dict[tuple[object, ...], RelationRows] = {}
        self._open: dict[int, RelationRows] = {}
        self._new_versions = 0  # since those that are out of date were forgotten
        self._held = 0  # bytes of the rows of all relations
        self._ready: list[ChangeBatch] = []
        self._events = bytearray()
        self.messages: dict[int, Message] = {}
        self.adopt(state)

    # --- what ColumnarDecoder calls

    def load(self, data: Any, offsets: Any, lsns: Any) -> None:
        """Set the frames to decode. This decodes none."""
        pieces = pieces_of(data, offsets)
        self._lsns = None if lsns is None else lsns_of(lsns, sum(map(len, pieces)))
        self._pieces = list(pieces)
        self._at = self._before = 0
        self._events = bytearray()
        self.messages = {}

    def unload(self) -> None:
        """Release the frames."""
        self._pieces = []
        self._lsns = None

    @property
    def position(self) -> int:
        """Index of the next frame."""
        return self._before + self._at

    def frame(self) -> bytes:
        """Return the next frame."""
        return self._pieces[0][self._at]

    def lsn(self) -> int | None:
        """Return the LSN of the next frame; None without LSNs."""
        return None if self._lsns is None else int(self._lsns[self.position])

    def skip(self, rows: int) -> None:
        """Skip the next frame, which was refused. Without the error, it would make `rows` rows."""
        self.state.row += rows
        self._at += 1

    def run(self) -> list[ChangeBatch] | None:
        """Decode until batches are complete, and return them. Return None after the last frame.

        Raises
        ------
        DecodeError
            The next frame is malformed, or its values can't be stored. The engine has not changed
            since the frame before.
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
        """Make record batches of all collected rows, in the order of their first rows."""
        batches = [self._close(relation) for relation in list(self._open.values())]
        return [batch for batch in batches if batch is not None]

    def drop(self) -> None:
        """Forget all rows that are not yet returned in a batch."""
        for relation in self._open.values():
            relation.clear()
        self._open = {}
        self._ready = []
        self._held = 0
        self._cached = {}

    def take_events(self) -> np.ndarray[Any, Any]:
        """Return the events as an array: frames other than Begin, Insert, Update and Delete."""
        return array_of("events", bytearray(self._events))

    def adopt(self, state: StreamState) -> None:
        """Decode the next frames from `state` on."""
        self.state = state
        self._cached = {}

    def sync(self) -> None:
        """Write the open transaction back to the stream state."""  # the twin keeps nothing

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
                refuse_time(frame, _FINAL_LSN, "commit_lsn", message.final_lsn)
            if message.commit_time > _GREATEST_TIME:
                refuse_time(frame, _COMMIT_TIME, "commit_time", message.commit_time)
            state.begin(message.xid, message.final_lsn, message.commit_time)
        else:
            self._event(message, None, state.xid)
            state.end()
        self._at += 1

    def _change(self, frame: bytes) -> None:
        """Take an Insert, Update or Delete."""
        state, options = self.state, self._options
        in_stream = state.open_xid is not None
        start = RELATION_ID_IN_STREAM if in_stream else RELATION_ID
        if len(frame) < start + 4 + TUPLE_HEAD:
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
        taken = _TakenRow(relation, frame)
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
            self._held + size > options.max_bytes or relation.unchanged_bytes + names > MOST_OFFSET
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
        relation: RelationRows,
        op: bytes,
        subxid: int | None,
        old_kind: str | None,
        before: TargetState | None,
        after: TargetState | None,
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
        self._event(message, open_xid, in_transaction)
        self.messages[self.position] = message
        self._at += 1

    def _truncate(self, message: Truncate) -> None:
        """Append a row for each relation of a Truncate; all of them must have been announced."""
        plans = plans_of(message, self.state)
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
            self._put(relation, _OPS[message.tag], message.xid, None, None, None, size)

    def _event(self, message: Any, open_xid: int | None, in_transaction: int | None) -> None:
        xid, subxid, *commit = event_of(message, open_xid, in_transaction)
        self._events += _event(self.position, *commit, xid, subxid, ord(message.tag))

    # --- relations

    def _relation_of(self, plan: RelationPlan) -> RelationRows:
        """The rows of the version of a relation to which a plan belongs.

        New rows of the relation are appended to them from now on.

        Rows of another version of the relation become a record batch first.
        """
        key = version_of(plan)
        relation = self._known.get(key)
        if relation is None:
            relation = self._known[key] = RelationRows(plan, self._options.layout(plan))
            self._forget_outdated(plan)
        relation_id = plan.relation.relation_id
        other = self._open.get(relation_id)
        if other is not relation:
            if other is not None:
                self._give(other)
            self._open[relation_id] = relation
        return relation

    def _forget_outdated(self, plan: RelationPlan) -> None:
        """Forget versions of relations that are out of date, once there are many new ones.

        The version to which `plan` belongs is kept.
        """
        self._new_versions += 1
        if self._new_versions < NEW_VERSIONS:
            return
        self._new_versions = 0
        with_rows = [relation.plan for relation in self._open.values()]
        for version in outdated(self._known, [plan, *with_rows], self.state):
            del self._known[version]
        self._cached = {}

    def _give(self, relation: RelationRows) -> None:
        batch = self._close(relation)
        if batch is not None:
            self._ready.append(batch)

    def _close(self, relation: RelationRows) -> ChangeBatch | None:
        """Make a record batch of a relation's rows; None if it has none."""
        self._open.pop(relation.plan.relation.relation_id, None)
        self._cached = {}
        if not relation.heads:
            return None
        self._held -= relation.bytes
        batch = batch_of(relation, self._options.target)
        relation.clear()
        return batch


class _OtherForm(Exception):
    """A value is in text format and those before it in its column in binary, or vice versa."""


class _TakenRow:
    """The converted values of one row, and what the relation has to note of them."""

    def __init__(self, relation: RelationRows, frame: bytes) -> None:
        self._relation = relation
        self._frame = frame
        self.bytes = 0
        self.forms: dict[int, bool] = {}
        self.unchanged: list[bytes] = []

    def values(self, positions: Any, old: Any, is_before: bool) -> TargetState:
        """The bytes that the columns store of a tuple.

        Values that the server did not send (unchanged TOAST) are taken from the tuple `old`.
        """
        relation, frame = self._relation, self._frame
        taken: TargetState = []
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
            stored = self._stored(i, field, start + VALUE_HEAD, end, kind == _BINARY)
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
