"""The rare messages: their classes, and the one decoder that both implementations use for them.

A transaction brings rows by the thousand and of everything else a handful, so only Begin, Commit,
Insert, Update and Delete exist twice (:mod:`pgoutput_fast._pure`, ``_core``). All others are
decoded here, by the table of the wire layout.
"""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from .errors import fail, printable
from .lsn import format_lsn
from .values import EPOCH_UTC, timestamp_form
from .wire import LAYOUTS, TAGS, Column, Cursor, check_size

if TYPE_CHECKING:
    from typing_extensions import Self


# --- what every message has ----------------------------------------------------------------------


class _FieldDateTime:
    """A property: a time field of the frame as an aware datetime, None where the frame has none."""

    def __init__(self, field: str) -> None:
        self.field = field
        self.__doc__ = f"`{field}` as an aware datetime in UTC, where Python's can hold it."

    def __get__(self, message: Any, owner: type[object] | None = None) -> Any:
        if message is None:
            return self
        return to_datetime(message, self.field)


def to_datetime(message: Any, field: str) -> datetime.datetime | None:
    """The time `field` of `message`, in microseconds since 2000-01-01, as an aware datetime.

    Raises
    ------
    DecodeError
        ``out_of_range``: before year 1 or after year 9999.
    """
    microseconds: int | None = getattr(message, field)
    if microseconds is None:
        return None
    try:
        return EPOCH_UTC + datetime.timedelta(microseconds=microseconds)
    except OverflowError:
        pass
    frame = message.frame
    cursor = Cursor(frame, message.in_stream, "latin-1")
    for name, kind in LAYOUTS[chr(frame[0])]:
        if name == field:
            break
        getattr(cursor, kind)(name)
    found = f"{microseconds} microseconds since 2000-01-01 do not fit into Python's datetime"
    fail("out_of_range", frame, cursor.position, column=field, found=found)


class Message:
    """What the classes of rare messages share. Messages are made by decoding, and do not change.

    Two are equal when their classes, their frames, and whether they came inside a stream chunk
    are. `frame` is the frame's bytes, `in_stream` whether it came inside a stream chunk.
    """

    __slots__ = ("_encoding", "frame", "in_stream")
    tag: ClassVar[str]
    frame: bytes
    in_stream: bool
    _encoding: str

    def __init__(self) -> None:
        raise TypeError(f"{type(self).__name__} messages are made by decoding a frame")

    @classmethod
    def _decode(cls, cursor: Cursor) -> Self:
        message = cls.__new__(cls)
        put = object.__setattr__
        for field, kind in LAYOUTS[cls.tag]:
            cursor.starts[field] = cursor.position
            value = getattr(cursor, kind)(field)
            if kind != "truncate_count":
                put(message, field, value)
        cursor.finish()
        put(message, "frame", cursor.frame)
        put(message, "in_stream", cursor.in_stream)
        put(message, "_encoding", cursor.encoding)
        return message

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"{type(self).__name__}.{name} cannot be set: messages do not change")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{type(self).__name__}.{name} cannot be deleted")

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self.frame == other.frame and self.in_stream == other.in_stream

    def __hash__(self) -> int:
        return hash((self.frame, self.in_stream))

    def __reduce__(self) -> tuple[object, ...]:
        return decode_rare, (self.frame, self.in_stream, self._encoding)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self

    def __repr__(self) -> str:
        return describe(self, self.tag)


class Origin(Message):
    """Where a transaction came from first.

    Fields: commit_lsn (there; 0 in streams), name.
    """

    __slots__ = ("commit_lsn", "name")
    __match_args__ = ("commit_lsn", "name")
    tag = "O"
    commit_lsn: int
    name: str


class Relation(Message):
    """A table as its next rows come.

    Fields: xid (None outside streams, and once published), relation_id, namespace, name,
    replica_identity ("d", "n", "f" or "i"), columns.
    """

    __slots__ = ("columns", "name", "namespace", "relation_id", "replica_identity", "xid")
    __match_args__ = ("xid", "relation_id", "namespace", "name", "replica_identity", "columns")
    tag = "R"
    xid: int | None
    relation_id: int
    namespace: str
    name: str
    replica_identity: str
    columns: tuple[Column, ...]


class Type(Message):
    """The type of a column to come.

    Fields: xid, type_id (the column's own OID), namespace, name (both of the *base* type: a domain
    looks like what it is made of; "" for pg_catalog).
    """

    __slots__ = ("name", "namespace", "type_id", "xid")
    __match_args__ = ("xid", "type_id", "namespace", "name")
    tag = "Y"
    xid: int | None
    type_id: int
    namespace: str
    name: str


class Truncate(Message):
    """Tables emptied.

    Fields: xid, relation_ids (tuple of int), options (bit 0 CASCADE, bit 1 RESTART IDENTITY;
    unknown bits pass through).
    """

    __slots__ = ("options", "relation_ids", "xid")
    __match_args__ = ("xid", "relation_ids", "options")
    tag = "T"
    xid: int | None
    relation_ids: tuple[int, ...]
    options: int

    @property
    def cascade(self) -> bool:
        """Whether it was TRUNCATE … CASCADE."""
        return bool(self.options & 1)

    @property
    def restart_identity(self) -> bool:
        """Whether it was TRUNCATE … RESTART IDENTITY."""
        return bool(self.options & 2)


class LogicalMessage(Message):
    """What ``pg_logical_emit_message`` sent.

    Fields: xid (in streams, of the top-level transaction), flags, lsn, prefix (str), content
    (bytes, any).
    """

    __slots__ = ("content", "flags", "lsn", "prefix", "xid")
    __match_args__ = ("xid", "flags", "lsn", "prefix", "content")
    tag = "M"
    xid: int | None
    flags: int
    lsn: int
    prefix: str
    content: bytes

    @property
    def transactional(self) -> bool:
        """Whether it belongs to a transaction; if not, it comes outside of any."""
        return bool(self.flags & 1)


class StreamStart(Message):
    """A chunk of a transaction still in progress begins.

    Fields: xid (top-level), first_segment (bool: the transaction's first chunk). PostgreSQL calls
    a chunk a stream segment; in this package a segment is a file of a capture.
    """

    __slots__ = ("first_segment", "xid")
    __match_args__ = ("xid", "first_segment")
    tag = "S"
    xid: int
    first_segment: bool


class StreamStop(Message):
    """The open chunk ends; the transaction may go on in another one."""

    __slots__ = ()
    __match_args__ = ()
    tag = "E"


class StreamCommit(Message):
    """A streamed transaction is committed.

    Fields: xid, flags, commit_lsn, end_lsn, commit_time (µs since 2000-01-01 UTC; as a datetime:
    `commit_datetime`).
    """

    __slots__ = ("commit_lsn", "commit_time", "end_lsn", "flags", "xid")
    __match_args__ = ("xid", "flags", "commit_lsn", "end_lsn", "commit_time")
    tag = "c"
    xid: int
    flags: int
    commit_lsn: int
    end_lsn: int
    commit_time: int
    commit_datetime = _FieldDateTime("commit_time")


class StreamAbort(Message):
    """A streamed transaction (xid = subxid) or a subtransaction of it is taken back.

    Fields: xid, subxid, abort_lsn, abort_time (µs since 2000-01-01 UTC; as a datetime:
    `abort_datetime`). The last two are None unless ``streaming 'parallel'``.
    """

    __slots__ = ("abort_lsn", "abort_time", "subxid", "xid")
    __match_args__ = ("xid", "subxid", "abort_lsn", "abort_time")
    tag = "A"
    xid: int
    subxid: int
    abort_lsn: int | None
    abort_time: int | None
    abort_datetime = _FieldDateTime("abort_time")


class BeginPrepare(Message):
    """The changes of a prepared transaction follow.

    Fields: prepare_lsn, end_lsn, prepare_time (µs since 2000-01-01 UTC; as a datetime:
    `prepare_datetime`), xid, gid.
    """

    __slots__ = ("end_lsn", "gid", "prepare_lsn", "prepare_time", "xid")
    __match_args__ = ("prepare_lsn", "end_lsn", "prepare_time", "xid", "gid")
    tag = "b"
    prepare_lsn: int
    end_lsn: int
    prepare_time: int
    xid: int
    gid: str
    prepare_datetime = _FieldDateTime("prepare_time")


class Prepare(Message):
    """A transaction is prepared; its end is decided later.

    Fields: flags, prepare_lsn, end_lsn, prepare_time (µs since 2000-01-01 UTC; as a datetime:
    `prepare_datetime`), xid, gid (may be empty).
    """

    __slots__ = ("end_lsn", "flags", "gid", "prepare_lsn", "prepare_time", "xid")
    __match_args__ = ("flags", "prepare_lsn", "end_lsn", "prepare_time", "xid", "gid")
    tag = "P"
    flags: int
    prepare_lsn: int
    end_lsn: int
    prepare_time: int
    xid: int
    gid: str
    prepare_datetime = _FieldDateTime("prepare_time")


class StreamPrepare(Message):
    """A streamed transaction is prepared.

    Fields: as of :class:`Prepare`.
    """

    __slots__ = Prepare.__slots__
    __match_args__ = Prepare.__match_args__
    tag = "p"
    flags: int
    prepare_lsn: int
    end_lsn: int
    prepare_time: int
    xid: int
    gid: str
    prepare_datetime = _FieldDateTime("prepare_time")


class CommitPrepared(Message):
    """A prepared transaction is committed.

    Fields: flags, commit_lsn, end_lsn, commit_time (µs since 2000-01-01 UTC; as a datetime:
    `commit_datetime`), xid, gid.
    """

    __slots__ = ("commit_lsn", "commit_time", "end_lsn", "flags", "gid", "xid")
    __match_args__ = ("flags", "commit_lsn", "end_lsn", "commit_time", "xid", "gid")
    tag = "K"
    flags: int
    commit_lsn: int
    end_lsn: int
    commit_time: int
    xid: int
    gid: str
    commit_datetime = _FieldDateTime("commit_time")


class RollbackPrepared(Message):
    """A prepared transaction is rolled back.

    Fields: flags, prepare_end_lsn, rollback_end_lsn, prepare_time, rollback_time (µs since
    2000-01-01 UTC; as datetimes: `prepare_datetime`, `rollback_datetime`), xid, gid.
    """

    __slots__ = (
        "flags",
        "gid",
        "prepare_end_lsn",
        "prepare_time",
        "rollback_end_lsn",
        "rollback_time",
        "xid",
    )
    __match_args__ = (
        "flags",
        "prepare_end_lsn",
        "rollback_end_lsn",
        "prepare_time",
        "rollback_time",
        "xid",
        "gid",
    )
    tag = "r"
    flags: int
    prepare_end_lsn: int
    rollback_end_lsn: int
    prepare_time: int
    rollback_time: int
    xid: int
    gid: str
    prepare_datetime = _FieldDateTime("prepare_time")
    rollback_datetime = _FieldDateTime("rollback_time")


RARE_CLASSES: tuple[type[Message], ...] = (
    Origin, Relation, Type, Truncate, LogicalMessage, StreamStart, StreamStop, StreamCommit,
    StreamAbort, BeginPrepare, Prepare, StreamPrepare, CommitPrepared, RollbackPrepared,
)  # fmt: skip
_CLASS_OF_TAG = {ord(cls.tag): cls for cls in RARE_CLASSES}


def decode_rare(frame: bytes, in_stream: bool, encoding: str) -> Message:
    """The message in a frame that is none of B, C, I, U, D.

    Raises
    ------
    DecodeError
        The frame is malformed, or its tag is unknown.
    """
    if not frame:
        fail("empty_frame", frame, 0)
    cls = _CLASS_OF_TAG.get(frame[0])
    if cls is None:
        expected = " ".join(TAGS)
        fail("unknown_tag", frame, 0, expected=expected, found=f"byte 0x{frame[0]:02X}")
    check_size(frame)
    return cls._decode(Cursor(frame, in_stream, encoding))


def is_repeated(known: Message, frame: bytes, encoding: str) -> bool:
    """Whether a frame from outside of streams is that of a message that is known."""
    return known.frame == frame and known._encoding == encoding


def published(message: Any) -> Any:
    """A Relation or Type from inside a stream as the server would send it outside: no xid."""
    frame = message.frame[:1] + message.frame[5:]
    return decode_rare(frame, False, message._encoding)


# --- representation ------------------------------------------------------------------------------

SHOWN_CHARACTERS = 40
"""Of a text or of bytes in a repr, at most."""


def describe(message: Any, tag: str) -> str:
    """The repr of a message: fields in wire order, LSNs and times as PostgreSQL prints them."""
    parts = []
    for field, kind in LAYOUTS[tag]:
        if kind == "truncate_count":
            continue
        value = getattr(message, field)
        if value is None:
            continue
        if kind.endswith("lsn"):
            shown = format_lsn(value)
        elif kind.endswith("time"):
            shown = timestamp_form(value, "+00")
        elif kind.endswith("K or O"):
            shown = f"{message.old_kind} {value!r}"
        elif kind == "columns":
            shown = f"({', '.join(_shown_column(column) for column in value)})"
        elif isinstance(value, bytes):
            shown = shown_bytes(value)
        else:
            shown = repr(value)
        parts.append(f"{field}={shown}")
    return f"{type(message).__name__}({', '.join(parts)})"


def _shown_column(column: Column) -> str:
    key = " key" if column.is_key else ""
    return f"{printable(column.name)} {column.type_id}{key}"


def shown_bytes(raw: bytes) -> str:
    """Bytes as a repr shows them, cut where they are many."""
    return repr(raw[:SHOWN_CHARACTERS]) + ("…" if len(raw) > SHOWN_CHARACTERS else "")
