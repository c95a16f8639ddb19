"""The rare messages: their classes, and the one decoder that both implementations use for them.

Begin, Commit, Insert, Update and Delete are the frequent messages, so they alone are implemented
twice (``decoding/_core.pyx`` and ``_pure.py``). All others are decoded here, along the table of the
wire layout.
"""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, cast

from ..errors import STATELESS_HINT, UNKNOWN_HINT, Hint, fail, printable
from ..lsn import format_lsn
from ..values import EPOCH_UTC, timestamp_form
from .wire import LAYOUTS, TAGS, XID_SIZE, Column, Cursor, check_size

if TYPE_CHECKING:
    from typing_extensions import Self


# --- what every message has ----------------------------------------------------------------------


class _FieldDateTime:
    """A property: a time field as an aware datetime; None if the frame lacks the field."""

    def __init__(self, field: str) -> None:
        self.field = field
        self.__doc__ = (
            f"`{field}` as an aware datetime in UTC. A DecodeError (``out_of_range``) if it is "
            "before year 1 or after year 9999."
        )

    def __get__(self, message: Any, owner: type[object] | None = None) -> Any:
        if message is None:
            return self
        return to_datetime(message, self.field)


def to_datetime(message: Any, field: str) -> datetime.datetime | None:
    """Return the time `field` of `message`, in microseconds since 2000-01-01, as an aware datetime.

    Raises
    ------
    DecodeError
        ``out_of_range``: the time is before year 1 or after year 9999.
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
    """Base class of the rare messages. Messages are made by decoding and can't be changed.

    `frame` is the bytes of the frame, `in_stream` whether the frame came inside a stream chunk. Two
    messages are equal if they have the same class, `frame` and `in_stream`.
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
    """The replication origin of a transaction: the server on which it was made.

    Fields in wire order: commit_lsn (of the transaction on that server; 0 in streamed
    transactions), name (of the origin).

    https://www.postgresql.org/docs/current/protocol-logicalrep-message-formats.html#PROTOCOL-LOGICALREP-MESSAGE-FORMATS-ORIGIN
    """

    __slots__ = ("commit_lsn", "name")
    __match_args__ = ("commit_lsn", "name")
    tag = "O"
    commit_lsn: int
    name: str


class Relation(Message):
    """The description of a table, which holds for the rows that follow.

    Fields in wire order: xid (only inside stream chunks, else None; also None in the decoder's
    `relations`), relation_id, namespace ("" for pg_catalog), name, replica_identity ("d", "n", "f"
    or "i", as ``pg_class.relreplident``), columns (their number as int16, then for each a
    :class:`Column`).

    https://www.postgresql.org/docs/current/protocol-logicalrep-message-formats.html#PROTOCOL-LOGICALREP-MESSAGE-FORMATS-RELATION
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
    """The name of a type that is not built in, sent before a Relation that uses it.

    Fields in wire order: xid (only inside stream chunks, else None), type_id (the OID that columns
    have), namespace and name. For a domain, namespace and name are those of its base type, as
    servers send them. The namespace is "" for pg_catalog.

    https://www.postgresql.org/docs/current/protocol-logicalrep-message-formats.html#PROTOCOL-LOGICALREP-MESSAGE-FORMATS-TYPE
    """

    __slots__ = ("name", "namespace", "type_id", "xid")
    __match_args__ = ("xid", "type_id", "namespace", "name")
    tag = "Y"
    xid: int | None
    type_id: int
    namespace: str
    name: str


class Truncate(Message):
    """A TRUNCATE of one or more tables.

    Fields in wire order: xid (only inside stream chunks, else None), the number of relations
    (int32, which is the length of relation_ids), options (bit 0 CASCADE, bit 1 RESTART IDENTITY;
    other bits are kept), relation_ids (tuple of int). `relations` are the tables' Relation
    messages, in the order of relation_ids.

    https://www.postgresql.org/docs/current/protocol-logicalrep-message-formats.html#PROTOCOL-LOGICALREP-MESSAGE-FORMATS-TRUNCATE
    """

    __slots__ = ("_relations", "options", "relation_ids", "xid")
    __match_args__ = ("xid", "relation_ids", "options")
    tag = "T"
    xid: int | None
    relation_ids: tuple[int, ...]
    options: int
    # None for a table that was not announced; unset if the frame was decoded without a Decoder.
    _relations: tuple[Relation | None, ...]

    def __reduce__(self) -> tuple[object, ...]:
        relations = getattr(self, "_relations", None)
        return restore_truncate, (self.frame, self.in_stream, self._encoding, relations)

    @property
    def relations(self) -> tuple[Relation, ...]:
        """The Relation messages that announced the tables.

        Raises
        ------
        DecodeError
            ``unknown_relation``: one was not announced, or the frame was decoded without a Decoder.
        """
        relations = getattr(self, "_relations", None)
        if relations is None and self.relation_ids:
            fail_unannounced(self, 0, STATELESS_HINT)
        found = []
        for index, relation in enumerate(relations or ()):
            if relation is None:
                fail_unannounced(self, index, UNKNOWN_HINT)
            found.append(relation)
        return tuple(found)

    @property
    def cascade(self) -> bool:
        """Whether the command was TRUNCATE … CASCADE."""
        return bool(self.options & 1)

    @property
    def restart_identity(self) -> bool:
        """Whether the command was TRUNCATE … RESTART IDENTITY."""
        return bool(self.options & 2)


def set_relations(message: Truncate, relations: tuple[Relation | None, ...]) -> None:
    """Give a Truncate what was announced of its tables when it was decoded, None for nothing."""
    object.__setattr__(message, "_relations", relations)


def restore_truncate(
    frame: bytes, in_stream: bool, encoding: str, relations: tuple[Relation | None, ...] | None
) -> Message:
    """Return the message in a pickled frame; `relations` is None if no Decoder decoded it."""
    message = decode_rare(frame, in_stream, encoding)
    if relations is not None:
        set_relations(cast("Truncate", message), relations)
    return message


def fail_unannounced(message: Truncate, index: int, hint: Hint) -> NoReturn:
    """Raise ``unknown_relation`` for one of the tables of a Truncate."""
    count = len(message.relation_ids)
    start = len(message.frame) - 4 * (count - index)  # the OIDs are at the end
    oid = message.relation_ids[index]
    fail("unknown_relation", message.frame, start, relation_id=oid, hint=hint)


class LogicalMessage(Message):
    """A message that a session sent by ``pg_logical_emit_message``.

    Fields in wire order: xid (only inside stream chunks, of the top-level transaction, else None),
    flags, lsn (of the message), prefix (str), content (any bytes, after their number as int32).

    https://www.postgresql.org/docs/current/protocol-logicalrep-message-formats.html#PROTOCOL-LOGICALREP-MESSAGE-FORMATS-MESSAGE
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
        """Whether the message is part of a transaction; if not, it is sent outside of any."""
        return bool(self.flags & 1)


class StreamStart(Message):
    """The begin of a stream chunk: changes of a transaction that is still in progress follow.

    Fields in wire order: xid (of the top-level transaction), first_segment (bool: whether this is
    the transaction's first chunk). PostgreSQL calls a chunk a stream segment; in this package a
    segment is a file of a capture.

    https://www.postgresql.org/docs/current/protocol-logicalrep-message-formats.html#PROTOCOL-LOGICALREP-MESSAGE-FORMATS-STREAM-START
    """

    __slots__ = ("first_segment", "xid")
    __match_args__ = ("xid", "first_segment")
    tag = "S"
    xid: int
    first_segment: bool


class StreamStop(Message):
    """The end of a stream chunk; the transaction may continue in another chunk. It has no fields.

    https://www.postgresql.org/docs/current/protocol-logicalrep-message-formats.html#PROTOCOL-LOGICALREP-MESSAGE-FORMATS-STREAM-STOP
    """

    __slots__ = ()
    __match_args__ = ()
    tag = "E"


class StreamCommit(Message):
    """The commit of a streamed transaction.

    Fields in wire order: xid, flags (unused), commit_lsn, end_lsn (the LSN after the transaction),
    commit_time (µs since 2000-01-01 UTC; `commit_datetime` as an aware datetime).

    https://www.postgresql.org/docs/current/protocol-logicalrep-message-formats.html#PROTOCOL-LOGICALREP-MESSAGE-FORMATS-STREAM-COMMIT
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
    """The rollback of a streamed transaction (subxid = xid) or of one of its subtransactions.

    Fields in wire order: xid (of the top-level transaction), subxid, abort_lsn, abort_time (µs
    since 2000-01-01 UTC; `abort_datetime` as an aware datetime). The last two are sent only with
    ``streaming 'parallel'``, else None.

    https://www.postgresql.org/docs/current/protocol-logicalrep-message-formats.html#PROTOCOL-LOGICALREP-MESSAGE-FORMATS-STREAM-ABORT
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
    """The begin of a prepared transaction, whose changes follow.

    Fields in wire order: prepare_lsn, end_lsn (the LSN after the PREPARE), prepare_time (µs since
    2000-01-01 UTC; `prepare_datetime` as an aware datetime), xid, gid (the name that the user gave
    to the prepared transaction).

    https://www.postgresql.org/docs/current/protocol-logicalrep-message-formats.html#PROTOCOL-LOGICALREP-MESSAGE-FORMATS-BEGIN-PREPARE
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
    """The PREPARE of a transaction, which a later message commits or rolls back.

    Fields in wire order: flags (unused), prepare_lsn, end_lsn (the LSN after the PREPARE),
    prepare_time (µs since 2000-01-01 UTC; `prepare_datetime` as an aware datetime), xid, gid (the
    name that the user gave to the prepared transaction; may be empty).

    https://www.postgresql.org/docs/current/protocol-logicalrep-message-formats.html#PROTOCOL-LOGICALREP-MESSAGE-FORMATS-PREPARE
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
    """The PREPARE of a streamed transaction.

    Its fields are those of :class:`Prepare`, in the same order.

    https://www.postgresql.org/docs/current/protocol-logicalrep-message-formats.html#PROTOCOL-LOGICALREP-MESSAGE-FORMATS-STREAM-PREPARE
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
    """The commit of a prepared transaction.

    Fields in wire order: flags (unused), commit_lsn, end_lsn (the LSN after the commit),
    commit_time (µs since 2000-01-01 UTC; `commit_datetime` as an aware datetime), xid, gid.

    https://www.postgresql.org/docs/current/protocol-logicalrep-message-formats.html#PROTOCOL-LOGICALREP-MESSAGE-FORMATS-COMMIT-PREPARED
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
    """The rollback of a prepared transaction.

    Fields in wire order: flags (unused), prepare_end_lsn (the LSN after the PREPARE),
    rollback_end_lsn (the LSN after the rollback), prepare_time, rollback_time (µs since 2000-01-01
    UTC; `prepare_datetime` and `rollback_datetime` as aware datetimes), xid, gid.

    https://www.postgresql.org/docs/current/protocol-logicalrep-message-formats.html#PROTOCOL-LOGICALREP-MESSAGE-FORMATS-ROLLBACK-PREPARED
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
    """Decode a frame whose tag is none of B, C, I, U and D.

    The tag is followed by the fields that :data:`.wire.LAYOUTS` lists for it; each
    message's class describes them.

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
    """Return whether a frame from outside stream chunks equals that of a decoded message."""
    return known.frame == frame and known._encoding == encoding


def published(message: Any) -> Any:
    """Return a Relation or Type from a stream chunk as a server sends it outside: without xid."""
    frame = message.frame[:1] + message.frame[1 + XID_SIZE :]
    return decode_rare(frame, False, message._encoding)


# --- representation ------------------------------------------------------------------------------

SHOWN_CHARACTERS = 40
"""The most characters or bytes of one value that a repr shows."""


def describe(message: Any, tag: str) -> str:
    """Return the repr of a message: its fields in wire order, with LSNs and times as text."""
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
    """Return the repr of bytes, cut after :data:`SHOWN_CHARACTERS`."""
    return repr(raw[:SHOWN_CHARACTERS]) + ("…" if len(raw) > SHOWN_CHARACTERS else "")
