"""The frequent messages and the decoder, in plain Python: the twin of ``_core.pyx``.

The frequent messages are Begin, Commit, Insert, Update and Delete. Both modules have the same
classes and functions in the same order, and give the same values and the same errors. When a row is
decoded, its frame is walked once, and the positions of its columns are kept. The walk checks
little: any fault raises an exception in it, or makes it end at another byte than the frame. Then
:func:`.diagnose.diagnose` reads the frame again and raises the error of its first
fault.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from ..errors import MAX_FRAME_LENGTH, DecodeError, frame_bytes, refuse_another_thread
from ..policies import Policies
from ..protocol.messages import Message, Relation, decode_rare, describe, to_datetime
from ..protocol.wire import (
    MAX_COLUMNS,
    RELATION_ID,
    RELATION_ID_IN_STREAM,
    TUPLE_HEAD,
    VALUE_HEAD,
    offset_of,
)
from ..settings import make_settings
from ..types import TypeRegistry
from ._pure_tuples import TupleData, fail_stateless, make_tuple, marker_of
from .diagnose import diagnose
from .plan import RelationPlan
from .state import StreamState
from .views import describe_decoder, restore_decoder
from .views import restore as restore_message

__all__ = [
    "IMPLEMENTATION",
    "Begin",
    "Commit",
    "Decoder",
    "Delete",
    "Insert",
    "TupleData",
    "Update",
    "decode",
    "decoder_of",
    "restore",
]

IMPLEMENTATION = "python"

_count = struct.Struct(">H").unpack_from
_uint32 = struct.Struct(">I").unpack_from
_uint64 = struct.Struct(">Q").unpack_from
_int64 = struct.Struct(">q").unpack_from
_row_header = struct.Struct(">IBH").unpack_from  # relation id, marker, number of columns
_new: Any = object.__new__

_B, _C, _D, _I, _K, _N, _O, _U = b"BCDIKNOU"
_BINARY, _NULL, _TEXT, _UNCHANGED = b"bntu"

BEGIN_LENGTH = offset_of("B", "end")
COMMIT_LENGTH = offset_of("C", "end")

_BEGIN_FINAL_LSN = offset_of("B", "final_lsn")
_BEGIN_COMMIT_TIME = offset_of("B", "commit_time")
_BEGIN_XID = offset_of("B", "xid")
_COMMIT_FLAGS = offset_of("C", "flags")
_COMMIT_LSN = offset_of("C", "commit_lsn")
_COMMIT_END_LSN = offset_of("C", "end_lsn")
_COMMIT_TIME = offset_of("C", "commit_time")
_STREAM_XID = offset_of("I", "xid", in_stream=True)
_COLUMNS = offset_of("I", "new") + TUPLE_HEAD
_COLUMNS_IN_STREAM = offset_of("I", "new", in_stream=True) + TUPLE_HEAD


class _Stumble(Exception):
    """The walk over a frame found that the frame is malformed."""


def walk(frame: bytes, position: int, count: int) -> list[int]:
    """Return the positions at which `count` columns begin, from byte `position` on, and their end.

    A column is a kind byte and, for the kinds ``t`` and ``b``, an int32 length and that many bytes
    (https://www.postgresql.org/docs/current/protocol-logicalrep-message-formats.html#PROTOCOL-LOGICALREP-MESSAGE-FORMATS-TUPLEDATA).
    Lengths are read as unsigned, so that a negative length leads past the end of every frame.
    Raises IndexError, struct.error or _Stumble if the columns are malformed.
    """
    positions = [position]
    append = positions.append
    for _ in range(count):
        kind = frame[position]
        if kind == _TEXT or kind == _BINARY:
            position += VALUE_HEAD + _uint32(frame, position + 1)[0]
        elif kind == _NULL or kind == _UNCHANGED:
            position += 1
        else:
            raise _Stumble
        append(position)
    return positions


class _RowMessage:
    """Base class of Insert, Update and Delete: the frame, and the positions of its columns."""

    __slots__ = ("_frame", "_in_stream", "_new", "_old", "_plan")
    tag: str
    _frame: bytes
    _in_stream: bool
    _plan: RelationPlan | None
    _old: list[int] | None  # the positions that walk() returned
    _new: list[int] | None

    def __init__(self) -> None:
        raise TypeError(f"{type(self).__name__} messages are made by decoding a frame")

    @property
    def frame(self) -> bytes:
        """The frame's bytes."""
        return self._frame

    @property
    def in_stream(self) -> bool:
        """Whether the frame came inside a stream chunk."""
        return self._in_stream

    @property
    def xid(self) -> int | None:
        """The xid of the (sub)transaction in a stream chunk, None outside."""
        if not self._in_stream:
            return None
        xid: int = _uint32(self._frame, _STREAM_XID)[0]
        return xid

    @property
    def relation_id(self) -> int:
        """OID of the relation."""
        start = RELATION_ID_IN_STREAM if self._in_stream else RELATION_ID
        relation_id: int = _uint32(self._frame, start)[0]
        return relation_id

    @property
    def relation(self) -> Relation:
        """The Relation message that announced the row's table.

        Raises
        ------
        DecodeError
            ``unknown_relation``: the frame was decoded without a Decoder.
        """
        if self._plan is None:
            fail_stateless(self)
        return self._plan.relation

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self._frame == other._frame and self._in_stream == other._in_stream

    def __hash__(self) -> int:
        return hash((self._frame, self._in_stream))

    def __reduce__(self) -> tuple[object, ...]:
        return restore_message, (self._frame, self._in_stream, self._plan)

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: object) -> Any:
        return self

    def __repr__(self) -> str:
        return describe(self, self.tag)


class Insert(_RowMessage):
    """An inserted row.

    Fields in wire order: xid (only inside stream chunks, else None), relation_id (the OID of the
    table), the marker "N", new (the row). `relation` is the table's Relation message.

    https://www.postgresql.org/docs/current/protocol-logicalrep-message-formats.html#PROTOCOL-LOGICALREP-MESSAGE-FORMATS-INSERT
    """

    __slots__ = ()
    __match_args__ = ("xid", "relation_id", "new")
    tag = "I"

    @property
    def new(self) -> TupleData:
        """The row."""
        return make_tuple(self, self._new)


class Update(_RowMessage):
    """An updated row.

    Fields in wire order: xid (only inside stream chunks, else None), relation_id (the OID of the
    table), old_kind ("K" or "O", if an old row is sent), old, the marker "N", new (the row).
    `relation` is the table's Relation message.

    https://www.postgresql.org/docs/current/protocol-logicalrep-message-formats.html#PROTOCOL-LOGICALREP-MESSAGE-FORMATS-UPDATE
    """

    __slots__ = ()
    __match_args__ = ("xid", "relation_id", "old_kind", "old", "new")
    tag = "U"

    @property
    def old_kind(self) -> str | None:
        """The kind of `old`: "K" the key, "O" the whole row, None without an old row."""
        return None if self._old is None else chr(marker_of(self))

    @property
    def old(self) -> TupleData | None:
        """The row before the update, or its key: see `old_kind`."""
        return None if self._old is None else make_tuple(self, self._old)

    @property
    def new(self) -> TupleData:
        """The row after the update."""
        return make_tuple(self, self._new)


class Delete(_RowMessage):
    """A deleted row.

    Fields in wire order: xid (only inside stream chunks, else None), relation_id (the OID of the
    table), old_kind ("K" or "O"), old. `relation` is the table's Relation message.

    https://www.postgresql.org/docs/current/protocol-logicalrep-message-formats.html#PROTOCOL-LOGICALREP-MESSAGE-FORMATS-DELETE
    """

    __slots__ = ()
    __match_args__ = ("xid", "relation_id", "old_kind", "old")
    tag = "D"

    @property
    def old_kind(self) -> str:
        """The kind of `old`: "K" the key, "O" the whole row."""
        return chr(marker_of(self))

    @property
    def old(self) -> TupleData:
        """The deleted row, or its key: see `old_kind`."""
        return make_tuple(self, self._old)


class _Fixed:
    """Base class of Begin and Commit, whose frames have a fixed length.

    Their fields are read from the frame when they are accessed.
    """

    __slots__ = ("_frame", "_in_stream")
    tag: str
    _frame: bytes
    _in_stream: bool

    def __init__(self) -> None:
        raise TypeError(f"{type(self).__name__} messages are made by decoding a frame")

    @property
    def frame(self) -> bytes:
        """The frame's bytes."""
        return self._frame

    @property
    def in_stream(self) -> bool:
        """Whether the frame was decoded with `in_stream`."""
        return self._in_stream

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self._frame == other._frame and self._in_stream == other._in_stream

    def __hash__(self) -> int:
        return hash((self._frame, self._in_stream))

    def __reduce__(self) -> tuple[object, ...]:
        return restore_message, (self._frame, self._in_stream, None)

    def __copy__(self) -> Any:
        return self

    def __deepcopy__(self, memo: object) -> Any:
        return self

    def __repr__(self) -> str:
        return describe(self, self.tag)


class Begin(_Fixed):
    """The begin of a transaction. The server sends it after the commit.

    Fields in wire order: final_lsn, commit_time (µs since 2000-01-01 UTC; as a datetime:
    `commit_datetime`), xid.

    https://www.postgresql.org/docs/current/protocol-logicalrep-message-formats.html#PROTOCOL-LOGICALREP-MESSAGE-FORMATS-BEGIN
    """

    __slots__ = ()
    __match_args__ = ("final_lsn", "commit_time", "xid")
    tag = "B"

    @property
    def final_lsn(self) -> int:
        """LSN of the transaction's commit record."""
        lsn: int = _uint64(self._frame, _BEGIN_FINAL_LSN)[0]
        return lsn

    @property
    def commit_time(self) -> int:
        """Time of the commit, in microseconds since 2000-01-01 UTC."""
        time: int = _int64(self._frame, _BEGIN_COMMIT_TIME)[0]
        return time

    @property
    def commit_datetime(self) -> Any:
        """`commit_time` as an aware datetime in UTC.

        Raises
        ------
        DecodeError
            ``out_of_range``: the time is before year 1 or after year 9999.
        """
        return to_datetime(self, "commit_time")

    @property
    def xid(self) -> int:
        """The transaction's xid."""
        xid: int = _uint32(self._frame, _BEGIN_XID)[0]
        return xid


class Commit(_Fixed):
    """The end of a committed transaction.

    Fields in wire order: flags, commit_lsn, end_lsn, commit_time (µs since 2000-01-01 UTC; as a
    datetime: `commit_datetime`).

    https://www.postgresql.org/docs/current/protocol-logicalrep-message-formats.html#PROTOCOL-LOGICALREP-MESSAGE-FORMATS-COMMIT
    """

    __slots__ = ()
    __match_args__ = ("flags", "commit_lsn", "end_lsn", "commit_time")
    tag = "C"

    @property
    def flags(self) -> int:
        """Flags; no server version uses them so far."""
        return self._frame[_COMMIT_FLAGS]

    @property
    def commit_lsn(self) -> int:
        """LSN of the commit record."""
        lsn: int = _uint64(self._frame, _COMMIT_LSN)[0]
        return lsn

    @property
    def end_lsn(self) -> int:
        """LSN behind the transaction: acknowledge this LSN to the server."""
        lsn: int = _uint64(self._frame, _COMMIT_END_LSN)[0]
        return lsn

    @property
    def commit_time(self) -> int:
        """Time of the commit, in microseconds since 2000-01-01 UTC."""
        time: int = _int64(self._frame, _COMMIT_TIME)[0]
        return time

    @property
    def commit_datetime(self) -> Any:
        """`commit_time` as an aware datetime in UTC.

        Raises
        ------
        DecodeError
            ``out_of_range``: the time is before year 1 or after year 9999.
        """
        return to_datetime(self, "commit_time")


def make_fixed(frame: bytes, in_stream: bool) -> Begin | Commit:
    """Return the Begin or Commit in a frame; raise a DecodeError if its length is wrong."""
    if len(frame) != (BEGIN_LENGTH if frame[0] == _B else COMMIT_LENGTH):
        diagnose(frame, in_stream, None)
    message: Begin | Commit
    message = _new(Begin) if frame[0] == _B else _new(Commit)
    message._frame = frame
    message._in_stream = in_stream
    return message


def make_row(
    frame: bytes, in_stream: bool, plan_of: Callable[[int], RelationPlan | None] | None
) -> Insert | Update | Delete:
    """Return the Insert, Update or Delete in a frame.

    `plan_of` finds the plan of a relation. It is None if the frame is decoded without a Decoder.
    Raises IndexError, struct.error or _Stumble if the frame is malformed.
    """
    start = RELATION_ID_IN_STREAM if in_stream else RELATION_ID
    relation_id, marker, count = _row_header(frame, start)
    if plan_of is None:
        plan = None
        if count > MAX_COLUMNS:
            raise _Stumble
    else:
        plan = plan_of(relation_id)
        if plan is None or count != plan.width:
            raise _Stumble
    positions = walk(frame, _COLUMNS_IN_STREAM if in_stream else _COLUMNS, count)
    tag = frame[0]
    row: Insert | Update | Delete
    if tag == _I:
        row = _new(Insert)
        sound = marker == _N
        row._new = positions
    elif tag == _U:
        row = _new(Update)
        if marker == _N:
            sound = True
            row._old = None
        else:
            end = positions[-1]
            new_count = _count(frame, end + 1)[0]
            sound = (marker == _K or marker == _O) and frame[end] == _N
            # Without a plan, nothing says how many columns the two tuples have.
            sound = sound and (new_count == count or (plan is None and new_count <= MAX_COLUMNS))
            row._old = positions
            positions = walk(frame, end + TUPLE_HEAD, new_count)
        row._new = positions
    else:
        row = _new(Delete)
        sound = marker == _K or marker == _O
        row._old = positions
    if not sound or positions[-1] != len(frame) or positions[-1] > MAX_FRAME_LENGTH:
        raise _Stumble
    row._frame = frame
    row._in_stream = in_stream
    row._plan = plan
    return row


AnyMessage = Begin | Commit | Insert | Update | Delete | Message


def decode(frame: Any, in_stream: bool = False) -> AnyMessage:
    """Decode one frame by itself, without the state of a :class:`Decoder`.

    Without its relation, a row has bytes and texts, but no values.

    Parameters
    ----------
    frame : bytes-like
        One pgoutput message, without CopyData and XLogData headers. The message keeps an object of
        the class `bytes`. It copies any other contiguous buffer.
    in_stream : bool
        Whether the frame stands inside a stream chunk, between Stream Start and Stream Stop. Such a
        frame has an xid as its second field, and nothing in the frame says so.

    Returns
    -------
    message
        An object of the class for the frame's tag.

    Raises
    ------
    DecodeError
        The frame is malformed.
    TypeError
        `frame` is not a contiguous buffer.
    """
    frame = frame_bytes(frame)
    in_stream = bool(in_stream)
    tag = frame[0] if frame else None
    if tag == _I or tag == _U or tag == _D:
        return restore(frame, in_stream, None)
    if tag == _B or tag == _C:
        return make_fixed(frame, in_stream)
    return decode_rare(frame, in_stream, "utf-8")


def restore(frame: bytes, in_stream: bool, plan: RelationPlan | None) -> AnyMessage:
    """Make the Begin, Commit, Insert, Update or Delete of a frame; `plan` is its relation's."""
    if frame[0] == _B or frame[0] == _C:
        return make_fixed(frame, in_stream)
    plan_of = None if plan is None else lambda relation_id: plan
    try:
        return make_row(frame, in_stream, plan_of)
    except (IndexError, struct.error, _Stumble):
        pass
    return diagnose(frame, in_stream, plan_of)


class Decoder:
    """Decodes the frames of one replication stream in their order.

    A decoder remembers the relations and types that earlier frames announced, and the open
    transaction. Only one thread at a time may use a decoder; a call during another is refused.

    Parameters
    ----------
    policies : Policies, optional
        What to do with values that Python cannot hold.
    encoding : str
        The session's client_encoding, by Python's or PostgreSQL's name.
    registry : TypeRegistry, optional
        Decoders of users' own types.

    Raises
    ------
    PgOutputError
        The encoding is unknown or unusable.
    TypeError
        An argument has a wrong type.
    """

    __slots__ = ("_idle", "_state")

    def __init__(
        self,
        policies: Policies | None = None,
        encoding: str = "utf-8",
        registry: TypeRegistry | None = None,
    ) -> None:
        self._adopt(StreamState(make_settings(policies, encoding, registry)))

    @property
    def state(self) -> StreamState:
        """The state from earlier frames: relations, types, the open transaction.

        Raises
        ------
        PgOutputError
            Another thread is decoding with this decoder.
        """
        self._take()
        try:
            return self._state
        finally:
            self._idle.append(None)

    @property
    def relations(self) -> Mapping[int, Relation]:
        """The relations announced so far, by OID, except in streamed transactions in progress."""
        return MappingProxyType(self._state.relations)

    def reset(self) -> None:
        """Begin a new connection: forget open transactions and their streamed relations.

        Raises
        ------
        PgOutputError
            Another thread is decoding with this decoder.
        """
        self._take()
        try:
            self._state.reset()
        finally:
            self._idle.append(None)

    def decode(self, frame: Any) -> AnyMessage:
        """Decode the stream's next frame.

        Parameters
        ----------
        frame : bytes-like
            One pgoutput message, as :func:`decode` takes it.

        Raises
        ------
        DecodeError
            The frame is malformed, or its message can't come now. The decoder has not changed.
        PgOutputError
            Another thread is decoding with this decoder.
        TypeError
            `frame` is not a contiguous buffer.
        """
        if type(frame) is not bytes:
            frame = frame_bytes(frame)
        self._take()
        try:
            return self._decode(frame)
        finally:
            self._idle.append(None)

    def _decode(self, frame: bytes) -> AnyMessage:
        state = self._state
        tag = frame[0] if frame else None
        if tag == _I or tag == _U or tag == _D:
            in_stream = state.open_xid is not None
            try:
                row = make_row(frame, in_stream, state.plan if in_stream else state.plans.get)
            except (IndexError, struct.error, _Stumble):
                pass
            else:
                state.row += 1
                return row
            diagnose(frame, in_stream, state.plan)
        if tag == _B or tag == _C:
            state.check_order(frame)
            message = make_fixed(frame, False)
            if isinstance(message, Begin):
                state.begin(message.xid, message.final_lsn, message.commit_time)
            else:
                state.end()
            return message
        return state.receive(frame)

    def decode_many(self, frames: Iterable[Any]) -> Iterator[AnyMessage]:
        """Return an iterator that decodes frames one after the other.

        Raises
        ------
        DecodeError
            As :meth:`decode` does. The error's attribute `frame` is the index in `frames`. The
            decoder has not changed since the frame before.
        TypeError
            `frames` is not iterable, or a frame is not a contiguous buffer.
        """
        return self._decode_many(iter(frames))

    def _decode_many(self, frames: Iterator[Any]) -> Iterator[AnyMessage]:
        decode = self.decode
        for i, frame in enumerate(frames):
            try:
                message = decode(frame)
            except DecodeError as error:
                error.frame = i
                raise
            yield message

    def _adopt(self, state: StreamState) -> None:
        self._state = state
        # Empty during a call. pop() and append() are atomic, and cost a tenth of a lock.
        self._idle: list[None] = [None]

    def _take(self) -> None:
        try:
            self._idle.pop()
            return
        except IndexError:
            pass
        refuse_another_thread()

    def __reduce__(self) -> tuple[object, ...]:
        return restore_decoder, (self.state,)

    def __copy__(self) -> Decoder:
        return decoder_of(self.state.copy())

    def __deepcopy__(self, memo: object) -> Decoder:
        return decoder_of(self.state.copy())

    def __repr__(self) -> str:
        return describe_decoder(self)


def decoder_of(state: StreamState) -> Decoder:
    """Return a decoder that decodes the next frames from `state` on."""
    decoder = Decoder.__new__(Decoder)
    decoder._adopt(state)
    return decoder
