"""The rare messages: their classes, and the one decoder that both implementations use for them.

A transaction brings rows by the thousand and of everything else a handful, so only Begin, Commit,
Insert, Update and Delete exist twice (:mod:`pgoutput_fast._pure`, ``_core``). What both share
beside that is here too: the wire layout of every message, representation and restoring.

The layouts are those of "Logical Replication Message Formats" in PostgreSQL's documentation.
"""

from __future__ import annotations

import datetime
import struct
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, NoReturn

from .errors import MAX_FRAME_LENGTH, fail, printable
from .lsn import format_lsn
from .values import EPOCH_UTC, timestamp_form

if TYPE_CHECKING:
    from typing_extensions import Self

    from .plan import RelationPlan

_type_and_modifier = struct.Struct(">Ii").unpack_from
_uint32 = struct.Struct(">I").unpack_from
_int32 = struct.Struct(">i").unpack_from
_int16 = struct.Struct(">h").unpack_from
_uint64 = struct.Struct(">Q").unpack_from
_int64 = struct.Struct(">q").unpack_from


class Unchanged:
    """The type of :data:`UNCHANGED`: the value exists and was not sent (unchanged TOAST).

    It is not None. It has no truth value, as nothing is known of the value it stands for.
    """

    __slots__ = ()
    _instance: ClassVar[Any] = None

    def __new__(cls) -> Self:
        """Return the one instance."""
        if cls._instance is None:
            cls._instance = super().__new__(cls)
        instance: Self = cls._instance
        return instance

    def __repr__(self) -> str:
        return "UNCHANGED"

    def __bool__(self) -> NoReturn:
        raise TypeError("UNCHANGED is neither true nor false; compare with `is pf.UNCHANGED`")

    def __reduce__(self) -> tuple[object, ...]:
        return Unchanged, ()


UNCHANGED = Unchanged()

# --- the wire layout -----------------------------------------------------------------------------

LAYOUTS: dict[str, tuple[tuple[str, str], ...]] = {
    "B": (("final_lsn", "lsn"), ("commit_time", "time"), ("xid", "uint32")),
    "C": (("flags", "uint8"), ("commit_lsn", "lsn"), ("end_lsn", "lsn"), ("commit_time", "time")),
    "O": (("commit_lsn", "lsn"), ("name", "string")),
    "R": (
        ("xid", "stream_xid"), ("relation_id", "uint32"), ("namespace", "string"),
        ("name", "string"), ("replica_identity", "char"), ("columns", "columns"),
    ),
    "Y": (
        ("xid", "stream_xid"), ("type_id", "uint32"), ("namespace", "string"), ("name", "string"),
    ),
    "I": (("xid", "stream_xid"), ("relation_id", "uint32"), ("new", "N")),
    "U": (
        ("xid", "stream_xid"), ("relation_id", "uint32"), ("old", "optional K or O"), ("new", "N"),
    ),
    "D": (("xid", "stream_xid"), ("relation_id", "uint32"), ("old", "K or O")),
    "T": (
        ("xid", "stream_xid"), ("relation_count", "truncate_count"), ("options", "uint8"),
        ("relation_ids", "oids"),
    ),
    "M": (
        ("xid", "stream_xid"), ("flags", "uint8"), ("lsn", "lsn"), ("prefix", "string"),
        ("content", "sized_bytes"),
    ),
    "S": (("xid", "uint32"), ("first_segment", "bool")),
    "E": (),
    "c": (
        ("xid", "uint32"), ("flags", "uint8"), ("commit_lsn", "lsn"), ("end_lsn", "lsn"),
        ("commit_time", "time"),
    ),
    "A": (
        ("xid", "uint32"), ("subxid", "uint32"), ("abort_lsn", "optional_lsn"),
        ("abort_time", "optional_time"),
    ),
    "b": (
        ("prepare_lsn", "lsn"), ("end_lsn", "lsn"), ("prepare_time", "time"), ("xid", "uint32"),
        ("gid", "string"),
    ),
    "P": (
        ("flags", "uint8"), ("prepare_lsn", "lsn"), ("end_lsn", "lsn"), ("prepare_time", "time"),
        ("xid", "uint32"), ("gid", "string"),
    ),
    "K": (
        ("flags", "uint8"), ("commit_lsn", "lsn"), ("end_lsn", "lsn"), ("commit_time", "time"),
        ("xid", "uint32"), ("gid", "string"),
    ),
    "r": (
        ("flags", "uint8"), ("prepare_end_lsn", "lsn"), ("rollback_end_lsn", "lsn"),
        ("prepare_time", "time"), ("rollback_time", "time"), ("xid", "uint32"), ("gid", "string"),
    ),
}  # fmt: skip
LAYOUTS["p"] = LAYOUTS["P"]
"""Tag → the fields behind it, in the order of the wire, and how each is read."""

TAGS = "".join(sorted(LAYOUTS))


class Cursor:
    """A place in a frame. Every read checks first, and fails at the field's own first byte."""

    __slots__ = ("encoding", "end", "frame", "in_stream", "position", "starts")

    def __init__(self, frame: bytes, in_stream: bool, encoding: str) -> None:
        self.frame = frame
        self.in_stream = in_stream
        self.encoding = encoding
        self.position = 1
        self.end = len(frame)
        self.starts: dict[str, int] = {}

    def need(self, size: int, field: str) -> int:
        """The position of a field of `size` bytes, which is passed."""
        position = self.position
        if size > self.end - position:
            found = self.end - position
            fail("truncated", self.frame, position, field=field, expected=size, found=found)
        self.position = position + size
        return position

    def uint8(self, field: str) -> int:
        """An unsigned byte."""
        return self.frame[self.need(1, field)]

    def char(self, field: str) -> str:
        """A byte as the character it stands for."""
        return chr(self.uint8(field))

    def bool(self, field: str) -> bool:
        """A byte as a flag: its lowest bit."""
        return bool(self.uint8(field) & 1)

    def int16(self, field: str) -> int:
        """A signed 16-bit integer."""
        value: int = _int16(self.frame, self.need(2, field))[0]
        return value

    def uint32(self, field: str) -> int:
        """An unsigned 32-bit integer: an OID or xid."""
        value: int = _uint32(self.frame, self.need(4, field))[0]
        return value

    def int32(self, field: str) -> int:
        """A signed 32-bit integer."""
        value: int = _int32(self.frame, self.need(4, field))[0]
        return value

    def lsn(self, field: str) -> int:
        """An unsigned 64-bit integer."""
        value: int = _uint64(self.frame, self.need(8, field))[0]
        return value

    def time(self, field: str) -> int:
        """A signed 64-bit integer: microseconds since 2000-01-01."""
        value: int = _int64(self.frame, self.need(8, field))[0]
        return value

    def stream_xid(self, field: str) -> int | None:
        """The xid that is there inside stream segments alone."""
        return self.uint32(field) if self.in_stream else None

    def optional_lsn(self, field: str) -> int | None:
        """The LSN of a Stream Abort, None where the frame ends before it.

        Whether it is there depends on ``streaming 'parallel'``, which no frame tells; protocol
        version 4 with ``streaming 'on'`` has none. So what is left decides.
        """
        return self.lsn(field) if self.position < self.end else None

    def optional_time(self, field: str) -> int | None:
        """The time of a Stream Abort, which is there where the LSN is."""
        return self.time(field) if self.starts["abort_lsn"] < self.end else None

    def string(self, field: str) -> str:
        """A string with a NUL at its end."""
        start = self.position
        stop = self.frame.find(0, start)
        if stop < 0:
            fail("unterminated_string", self.frame, start, field=field)
        self.position = stop + 1
        # A name that is no text must not cost the frame; surrogates keep its bytes.
        return self.frame[start:stop].decode(self.encoding, "surrogateescape")

    def count(self, value: int, size: int, start: int, field: str) -> int:
        """`value`, a count at byte `start` of items that take at least `size` bytes each."""
        most = (self.end - self.position) // size
        if not 0 <= value <= most:
            fail("bad_count", self.frame, start, field=field, found=value, expected=most)
        return value

    def columns(self, field: str) -> tuple[Column, ...]:
        """A count, then the columns of a Relation."""
        start = self.position
        count = self.count(self.int16("the number of columns"), 10, start, "the number of columns")
        return tuple([self.column(i) for i in range(count)])

    def column(self, i: int) -> Column:
        """A column of a Relation."""
        start = self.position
        stop = self.frame.find(0, start + 1)
        if stop < 0 or stop + 9 > self.end:
            # It is cut off: field by field, as the error names the one.
            return Column(
                self.uint8(f"the flags of column {i}"),
                self.string(f"the name of column {i}"),
                self.uint32(f"the type OID of column {i}"),
                self.int32(f"the type modifier of column {i}"),
            )
        self.position = stop + 9
        name = self.frame[start + 1 : stop].decode(self.encoding, "surrogateescape")
        return Column(self.frame[start], name, *_type_and_modifier(self.frame, stop + 1))

    def truncate_count(self, field: str) -> int:
        """The number of relations of a Truncate, behind which the options come first."""
        start = self.position
        value = self.int32("the number of relations")
        most = max(self.end - self.position - 1, 0) // 4
        if not 0 <= value <= most:
            name = "the number of relations"
            fail("bad_count", self.frame, start, field=name, found=value, expected=most)
        return value

    def oids(self, field: str) -> tuple[int, ...]:
        """As many OIDs as the count said that was read before."""
        count = _int32(self.frame, self.starts["relation_count"])[0]
        return struct.unpack_from(f">{count}I", self.frame, self.need(4 * count, field))

    def sized_bytes(self, field: str) -> bytes:
        """An int32 length, then that many bytes."""
        start = self.position
        length = self.int32(f"the length of {field}")
        left = self.end - self.position
        if not 0 <= length <= left:
            name = f"the length of {field}"
            fail("bad_length", self.frame, start, field=name, found=length, expected=left)
        position = self.need(length, field)
        return self.frame[position : position + length]

    def finish(self) -> None:
        """Refuse bytes that are left over."""
        if self.position != self.end:
            fail("trailing_bytes", self.frame, self.position, found=self.end - self.position)


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

    Two are equal when their classes, their frames, and whether they came inside a stream segment
    are. `frame` is the frame's bytes, `in_stream` whether it came inside a stream segment.
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
        return restore, (self.frame, self.in_stream, self._encoding)

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


class Column(NamedTuple):
    """One column of a Relation.

    Fields: flags (bit 0: part of the replica identity), name, type_id (OID), type_modifier
    (``atttypmod``, -1 for none).
    """

    flags: int
    name: str
    type_id: int
    type_modifier: int

    @property
    def is_key(self) -> bool:
        """Whether the column is part of the replica identity, which need not be the primary key."""
        return bool(self.flags & 1)


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
    """A segment of a transaction still in progress begins.

    Fields: xid (top-level), first_segment (bool).
    """

    __slots__ = ("first_segment", "xid")
    __match_args__ = ("xid", "first_segment")
    tag = "S"
    xid: int
    first_segment: bool


class StreamStop(Message):
    """The open segment ends; the transaction may go on in another one."""

    __slots__ = ()
    __match_args__ = ()
    tag = "E"


class StreamCommit(Message):
    """A streamed transaction is committed.

    Fields: xid, flags, commit_lsn, end_lsn, commit_time (µs since 2000-01-01 UTC).
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

    Fields: xid, subxid, abort_lsn, abort_time (both None unless ``streaming 'parallel'``).
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

    Fields: prepare_lsn, end_lsn, prepare_time (µs since 2000-01-01 UTC), xid, gid.
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

    Fields: flags, prepare_lsn, end_lsn, prepare_time (µs since 2000-01-01 UTC), xid, gid (may be
    empty).
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

    Fields: flags, commit_lsn, end_lsn, commit_time (µs since 2000-01-01 UTC), xid, gid.
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
    2000-01-01 UTC), xid, gid.
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


def check_size(frame: bytes) -> None:
    """Refuse a frame that no server can send; offsets in it would not fit into a slice."""
    if len(frame) > MAX_FRAME_LENGTH:
        fail(
            "bad_length", frame, 0,
            field="the frame's length", found=len(frame), expected=MAX_FRAME_LENGTH,
        )  # fmt: skip


def is_repeated(known: Message, frame: bytes, encoding: str) -> bool:
    """Whether a frame from outside of streams is that of a message that is known."""
    return known.frame == frame and known._encoding == encoding


def published(message: Any) -> Any:
    """A Relation or Type from inside a stream as the server would send it outside: no xid."""
    frame = message.frame[:1] + message.frame[5:]
    return decode_rare(frame, False, message._encoding)


def restore(frame: bytes, in_stream: bool, context: Any) -> Any:
    """The message of a pickled frame, by whichever implementation is chosen here.

    `context` is the relation's plan for rows, None for rows decoded without one, and the encoding
    of names for every other message.
    """
    from ._impl import implementation

    if isinstance(context, str):
        return decode_rare(frame, in_stream, context)
    return implementation.restore(frame, in_stream, context)


def restore_tuple(frame: bytes, in_stream: bool, plan: RelationPlan | None, which: str) -> Any:
    """The tuple `which` ("old" or "new") of the message in a pickled frame."""
    return getattr(restore(frame, in_stream, plan), which)


# --- representation ------------------------------------------------------------------------------

_SHOWN_COLUMNS = 20
_SHOWN_CHARACTERS = 40


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
            shown = _shown_bytes(value)
        else:
            shown = repr(value)
        parts.append(f"{field}={shown}")
    return f"{type(message).__name__}({', '.join(parts)})"


def describe_tuple(tuple_data: Any, plan: RelationPlan | None) -> str:
    """The repr of a tuple: name and text of each column, long ones cut."""
    encoding = plan.settings.encoding if plan is not None else "utf-8"
    parts = []
    for position in range(min(len(tuple_data), _SHOWN_COLUMNS)):
        kind = tuple_data.kind(position)
        if kind == "n":
            shown = "NULL"
        elif kind == "u":
            shown = "UNCHANGED"
        else:
            raw = tuple_data.raw(position)
            if kind == "b":
                shown = _shown_bytes(raw)
            else:
                # A character has at most four bytes, so this cut takes none that is shown.
                most = 4 * (_SHOWN_CHARACTERS + 1)
                text = raw[:most].decode(encoding, "backslashreplace")
                more = len(text) > _SHOWN_CHARACTERS or len(raw) > most
                shown = repr(text[:_SHOWN_CHARACTERS]) + ("…" if more else "")
        parts.append(f"{printable(plan.names[position])}={shown}" if plan is not None else shown)
    if len(tuple_data) > _SHOWN_COLUMNS:
        parts.append(f"… {len(tuple_data) - _SHOWN_COLUMNS} more")
    return f"TupleData({', '.join(parts)})"


def _shown_column(column: Column) -> str:
    key = " key" if column.is_key else ""
    return f"{printable(column.name)} {column.type_id}{key}"


def _shown_bytes(raw: bytes) -> str:
    return repr(raw[:_SHOWN_CHARACTERS]) + ("…" if len(raw) > _SHOWN_CHARACTERS else "")
