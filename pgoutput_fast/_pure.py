"""The messages that come by the thousand, in plain Python: the twin of ``_core.pyx``.

Both have the same classes and functions in the same order, and give the same values and the same
errors. A frame is walked once when it is decoded; what the walk keeps is where each column begins.
The walk checks little: whatever is wrong makes it stumble, or end elsewhere than the frame does,
and then :func:`pgoutput_fast.diagnose.diagnose` reads the frame again and names the first fault.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from ._pure_tuples import TupleData, fail_stateless, make_tuple, marker_of
from .diagnose import diagnose
from .errors import MAX_FRAME_LENGTH, DecodeError, frame_bytes
from .messages import Message, Relation, decode_rare, describe, to_datetime
from .plan import RelationPlan
from .policies import Policies
from .settings import make_settings
from .state import StreamState
from .types import TypeRegistry
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

BEGIN_LENGTH = 21
COMMIT_LENGTH = 26


class _Stumble(Exception):
    """The fast walk met what no sound frame has."""


def walk(frame: bytes, position: int, count: int) -> list[int]:
    """Where each of `count` columns begins, the first one at byte `position`, and where they end.

    A column is a kind byte and, for the kinds ``t`` and ``b``, an int32 length and that many bytes.
    Lengths are read as unsigned, so that a negative one leads past the end of every frame.
    """
    positions = [position]
    append = positions.append
    for _ in range(count):
        kind = frame[position]
        if kind == _TEXT or kind == _BINARY:
            position += 5 + _uint32(frame, position + 1)[0]
        elif kind == _NULL or kind == _UNCHANGED:
            position += 1
        else:
            raise _Stumble
        append(position)
    return positions


class _Row:
    """What Insert, Update and Delete share: the frame, and where its columns begin."""

    __slots__ = ("_frame", "_in_stream", "_new", "_old", "_plan")
    tag: str
    _frame: bytes
    _in_stream: bool
    _plan: RelationPlan | None
    _old: list[int] | None  # what walk() returned
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
        """The subtransaction's xid in a stream chunk, None outside."""
        if not self._in_stream:
            return None
        xid: int = _uint32(self._frame, 1)[0]
        return xid

    @property
    def relation_id(self) -> int:
        """OID of the relation."""
        relation_id: int = _uint32(self._frame, 5 if self._in_stream else 1)[0]
        return relation_id

    @property
    def relation(self) -> Relation:
        """The relation as it was announced.

        Raises
        ------
        DecodeError
            ``unknown_relation``: the frame was decoded alone.
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


class Insert(_Row):
    """A row inserted. Fields: xid, relation_id, new; `relation`."""

    __slots__ = ()
    __match_args__ = ("xid", "relation_id", "new")
    tag = "I"

    @property
    def new(self) -> TupleData:
        """The row."""
        return make_tuple(self, self._new)


class Update(_Row):
    """A row updated. Fields: xid, relation_id, old_kind, old, new; `relation`."""

    __slots__ = ()
    __match_args__ = ("xid", "relation_id", "old_kind", "old", "new")
    tag = "U"

    @property
    def old_kind(self) -> str | None:
        """What `old` is: "K" the key, "O" the whole row; None where it was not sent."""
        return None if self._old is None else chr(marker_of(self))

    @property
    def old(self) -> TupleData | None:
        """The row as it was, or its key: see `old_kind`."""
        return None if self._old is None else make_tuple(self, self._old)

    @property
    def new(self) -> TupleData:
        """The row as it is."""
        return make_tuple(self, self._new)


class Delete(_Row):
    """A row deleted. Fields: xid, relation_id, old_kind, old; `relation`."""

    __slots__ = ()
    __match_args__ = ("xid", "relation_id", "old_kind", "old")
    tag = "D"

    @property
    def old_kind(self) -> str:
        """What `old` is: "K" the key, "O" the whole row."""
        return chr(marker_of(self))

    @property
    def old(self) -> TupleData:
        """The row as it was, or its key: see `old_kind`."""
        return make_tuple(self, self._old)


class _Fixed:
    """What Begin and Commit share: a frame of fixed length, its fields read when asked for."""

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
        """Whether the frame was decoded as one from inside a stream chunk."""
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
    """A transaction begins. Fields: final_lsn, commit_time, xid."""

    __slots__ = ()
    __match_args__ = ("final_lsn", "commit_time", "xid")
    tag = "B"

    @property
    def final_lsn(self) -> int:
        """LSN of the transaction's commit record."""
        lsn: int = _uint64(self._frame, 1)[0]
        return lsn

    @property
    def commit_time(self) -> int:
        """Time of the commit, in microseconds since 2000-01-01 UTC."""
        time: int = _int64(self._frame, 9)[0]
        return time

    @property
    def commit_datetime(self) -> Any:
        """`commit_time` as an aware datetime in UTC, where Python's can hold it."""
        return to_datetime(self, "commit_time")

    @property
    def xid(self) -> int:
        """The transaction's xid."""
        xid: int = _uint32(self._frame, 17)[0]
        return xid


class Commit(_Fixed):
    """A transaction is committed. Fields: flags, commit_lsn, end_lsn, commit_time."""

    __slots__ = ()
    __match_args__ = ("flags", "commit_lsn", "end_lsn", "commit_time")
    tag = "C"

    @property
    def flags(self) -> int:
        """Unused by servers so far."""
        return self._frame[1]

    @property
    def commit_lsn(self) -> int:
        """LSN of the commit record."""
        lsn: int = _uint64(self._frame, 2)[0]
        return lsn

    @property
    def end_lsn(self) -> int:
        """LSN after the transaction: what to acknowledge."""
        lsn: int = _uint64(self._frame, 10)[0]
        return lsn

    @property
    def commit_time(self) -> int:
        """Time of the commit, in microseconds since 2000-01-01 UTC."""
        time: int = _int64(self._frame, 18)[0]
        return time

    @property
    def commit_datetime(self) -> Any:
        """`commit_time` as an aware datetime in UTC, where Python's can hold it."""
        return to_datetime(self, "commit_time")


def make_fixed(frame: bytes, in_stream: bool) -> Begin | Commit:
    """The Begin or Commit in a frame."""
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
    """The Insert, Update or Delete in a frame; IndexError, struct.error or _Stumble if malformed.

    `plan_of` finds the plan of a relation, None where none are known (a frame decoded alone).
    """
    relation_id, marker, count = _row_header(frame, 5 if in_stream else 1)
    if plan_of is None:
        plan = None
        if count > 0x7FFF:  # it is signed
            raise _Stumble
    else:
        plan = plan_of(relation_id)
        if plan is None or count != plan.width:
            raise _Stumble
    positions = walk(frame, 12 if in_stream else 8, count)
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
            # Decoded alone, the two tuples may be of any width.
            sound = sound and (new_count == count or (plan is None and new_count <= 0x7FFF))
            row._old = positions
            positions = walk(frame, end + 3, new_count)
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
    """Decode one frame on its own, without what earlier frames said.

    Parameters
    ----------
    frame : bytes-like
        One pgoutput message, without CopyData and XLogData headers. Exact `bytes` is kept; any
        other contiguous buffer is copied.
    in_stream : bool
        Whether it comes from between Stream Start and Stream Stop, which no frame tells by itself.

    Returns
    -------
    message
        An instance of the class of its tag.

    Raises
    ------
    DecodeError
        The frame is malformed.
    TypeError
        `frame` is no contiguous buffer.
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
    """The Begin, Commit, Insert, Update or Delete in a frame, whose relation's plan is known."""
    if frame[0] == _B or frame[0] == _C:
        return make_fixed(frame, in_stream)
    plan_of = None if plan is None else lambda relation_id: plan
    try:
        return make_row(frame, in_stream, plan_of)
    except (IndexError, struct.error, _Stumble):
        pass
    return diagnose(frame, in_stream, plan_of)


class Decoder:
    """Decodes the frames of one stream, in order, and knows what the earlier ones said.

    Parameters
    ----------
    policies : Policies
        What to do with values that Python cannot hold.
    encoding : str
        The session's client_encoding, by Python's or PostgreSQL's name.
    registry : TypeRegistry, optional
        Decoders of users' own types.

    Raises
    ------
    PgOutputError
        The encoding is unknown.
    """

    __slots__ = ("_state",)

    def __init__(
        self,
        policies: Policies | None = None,
        encoding: str = "utf-8",
        registry: TypeRegistry | None = None,
    ) -> None:
        self._state = StreamState(make_settings(policies, encoding, registry))

    @property
    def state(self) -> StreamState:
        """What the decoder knows: relations, types, the open transaction."""
        return self._state

    @property
    def relations(self) -> Mapping[int, Relation]:
        """The relations announced so far, by OID; not those of streams still in progress."""
        return MappingProxyType(self._state.relations)

    def reset(self) -> None:
        """Begin a new connection: open streams and what they announced are dropped."""
        self._state.reset()

    def decode(self, frame: Any) -> AnyMessage:
        """Decode the stream's next frame.

        Parameters
        ----------
        frame : bytes-like
            As of :func:`decode`.

        Raises
        ------
        DecodeError
            The frame is malformed, or cannot come here; the decoder is as it was before.
        TypeError
            `frame` is no contiguous buffer.
        """
        if type(frame) is not bytes:
            frame = frame_bytes(frame)
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
        """Decode frames one after the other, as the result is iterated.

        Raises
        ------
        DecodeError
            As of :meth:`decode`, with `.frame`, the index in `frames`; the decoder is as it was
            before that frame.
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

    def __reduce__(self) -> tuple[object, ...]:
        return restore_decoder, (self.state,)

    def __copy__(self) -> Decoder:
        return decoder_of(self.state.copy())

    def __deepcopy__(self, memo: object) -> Decoder:
        return decoder_of(self.state.copy())

    def __repr__(self) -> str:
        return describe_decoder(self)


def decoder_of(state: StreamState) -> Decoder:
    """A decoder that goes on from `state`."""
    decoder = Decoder.__new__(Decoder)
    decoder._state = state
    return decoder
