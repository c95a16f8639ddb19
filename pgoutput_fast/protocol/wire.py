"""The wire layout of every message: which fields a frame has, in which order, and how each is read.

The layouts are those of "Logical Replication Message Formats" in PostgreSQL's documentation,
https://www.postgresql.org/docs/current/protocol-logicalrep-message-formats.html. All code that
reads or writes frames uses this table, or a test compares it with the table.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

from ..errors import MAX_FRAME_LENGTH, fail

if TYPE_CHECKING:
    from collections.abc import Callable

_type_and_modifier = struct.Struct(">Ii").unpack_from
_uint32 = struct.Struct(">I").unpack_from
_int32 = struct.Struct(">i").unpack_from
_int16 = struct.Struct(">h").unpack_from
_uint64 = struct.Struct(">Q").unpack_from
_int64 = struct.Struct(">q").unpack_from


class Column(NamedTuple):
    """One column of a Relation message.

    Fields in wire order: flags (bit 0: the column is part of the replica identity), name, type_id
    (the OID of its type), type_modifier (``atttypmod``, -1 if it has none).
    """

    flags: int
    name: str
    type_id: int
    type_modifier: int

    @property
    def is_key(self) -> bool:
        """Whether the column is part of the replica identity, which need not be the primary key."""
        return bool(self.flags & 1)


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
"""Tag → the fields that follow it, in wire order: name, and how it is read.

How a field is read is the name of a method of :class:`Cursor`, or describes a tuple with the marker
before it: "N", "K or O", "optional K or O".
"""

TAGS = "".join(sorted(LAYOUTS))

_FIXED = {
    "uint8": "B", "bool": "B", "char": "B", "uint32": "I", "lsn": "Q", "time": "q",
    "truncate_count": "i",
}  # fmt: skip
"""How a field is read → its format in :mod:`struct`; only fields that always have one size."""


MAX_COLUMNS = 0x7FFF
"""The most columns that a tuple can have: their number is a signed 16-bit integer."""

XID_SIZE = 4
"""Bytes of a "stream_xid", by which the fields behind it lie further back in a stream chunk."""

TUPLE_HEAD = 3
"""Bytes in front of a tuple's columns: its marker, and the number of its columns (int16)."""

VALUE_HEAD = 5
"""Bytes in front of a column's value: its kind, "t" or "b", and its length (int32)."""


def offset_of(tag: str, field: str, in_stream: bool = False) -> int:
    """Return where a field begins in frames with this tag; all fields before it have fixed sizes.

    Parameters
    ----------
    tag : str
    field : str
        A name from `LAYOUTS`, or ``"end"`` for where the last field ends.
    in_stream : bool
        Whether the frames come from inside stream chunks.
    """
    offset = 1
    for name, kind in LAYOUTS[tag]:
        if name == field:
            return offset
        if kind != "stream_xid":
            offset += struct.calcsize(_FIXED[kind])
        elif in_stream:
            offset += XID_SIZE
    if field != "end":
        raise KeyError(field)
    return offset


RELATION_ID = offset_of("I", "relation_id")
RELATION_ID_IN_STREAM = offset_of("I", "relation_id", in_stream=True)
"""Where an Insert, Update or Delete has its relation's OID, and a Relation or Type its own."""


def relation_id_of(frame: bytes, in_stream: bool) -> int | None:
    """Return the OID that `RELATION_ID` finds in a frame; None if the frame ends before it does."""
    start = RELATION_ID_IN_STREAM if in_stream else RELATION_ID
    return int(_uint32(frame, start)[0]) if len(frame) >= start + 4 else None


def fields_reader(tag: str, *fields: str) -> Callable[[bytes], tuple[int, ...]]:
    """Make a function that reads only some fields of a frame from outside stream chunks.

    Parameters
    ----------
    tag : str
    fields : str
        Names from `LAYOUTS`, in wire order. All fields up to the last of them must be numbers.

    Returns
    -------
    callable
        Takes a frame with this tag and returns the values of `fields`. Raises a DecodeError if the
        frame ends before the last of them.
    """
    layout = [(name, kind) for name, kind in LAYOUTS[tag] if kind != "stream_xid"]
    layout = layout[: [name for name, _ in layout].index(fields[-1]) + 1]
    format_ = [
        _FIXED[kind] if name in fields else f"{struct.calcsize(_FIXED[kind])}x"
        for name, kind in layout
    ]
    unpack = struct.Struct(">x" + "".join(format_)).unpack_from

    def read(frame: bytes) -> tuple[int, ...]:
        try:
            return unpack(frame)
        except struct.error:
            cursor = Cursor(frame, in_stream=False, encoding="utf-8")
            for name, kind in layout:
                cursor.need(struct.calcsize(_FIXED[kind]), name)
            raise

    return read


class Cursor:
    """A position in a frame, from which fields are read one after the other.

    Each method checks that its field is whole before it reads it. If it is not, the method raises a
    DecodeError whose offset is the field's first byte.
    """

    __slots__ = ("encoding", "end", "frame", "in_stream", "position", "starts")

    def __init__(self, frame: bytes, in_stream: bool, encoding: str) -> None:
        self.frame = frame
        self.in_stream = in_stream
        self.encoding = encoding
        self.position = 1
        self.end = len(frame)
        self.starts: dict[str, int] = {}

    def need(self, size: int, field: str) -> int:
        """Skip a field of `size` bytes and return the position at which it begins."""
        position = self.position
        if size > self.end - position:
            found = self.end - position
            fail("truncated", self.frame, position, field=field, expected=size, found=found)
        self.position = position + size
        return position

    def uint8(self, field: str) -> int:
        """Read an unsigned byte."""
        return self.frame[self.need(1, field)]

    def char(self, field: str) -> str:
        """Read a byte as the character that it encodes."""
        return chr(self.uint8(field))

    def bool(self, field: str) -> bool:
        """Read a byte as a flag: its lowest bit."""
        return bool(self.uint8(field) & 1)

    def int16(self, field: str) -> int:
        """Read a signed 16-bit integer."""
        value: int = _int16(self.frame, self.need(2, field))[0]
        return value

    def uint32(self, field: str) -> int:
        """Read an unsigned 32-bit integer: an OID or xid."""
        value: int = _uint32(self.frame, self.need(4, field))[0]
        return value

    def int32(self, field: str) -> int:
        """Read a signed 32-bit integer."""
        value: int = _int32(self.frame, self.need(4, field))[0]
        return value

    def lsn(self, field: str) -> int:
        """Read an unsigned 64-bit integer."""
        value: int = _uint64(self.frame, self.need(8, field))[0]
        return value

    def time(self, field: str) -> int:
        """Read a signed 64-bit integer: microseconds since 2000-01-01."""
        value: int = _int64(self.frame, self.need(8, field))[0]
        return value

    def stream_xid(self, field: str) -> int | None:
        """Read the xid, which only frames inside stream chunks have; None outside."""
        return self.uint32(field) if self.in_stream else None

    def optional_lsn(self, field: str) -> int | None:
        """Read the LSN of a Stream Abort; None if the frame ends before it.

        A server sends it only with ``streaming 'parallel'``, in protocol version 4 too. No frame
        tells the value of that option, so the number of bytes that are left decides.
        """
        return self.lsn(field) if self.position < self.end else None

    def optional_time(self, field: str) -> int | None:
        """Read the time of a Stream Abort; None if the frame has no LSN either."""
        return self.time(field) if self.starts["abort_lsn"] < self.end else None

    def string(self, field: str) -> str:
        """Read a string that ends with a NUL byte."""
        start = self.position
        stop = self.frame.find(0, start)
        if stop < 0:
            fail("unterminated_string", self.frame, start, field=field)
        self.position = stop + 1
        # A name that is no text in the encoding is no reason to refuse the frame: lone surrogates
        # stand for such bytes.
        return self.frame[start:stop].decode(self.encoding, "surrogateescape")

    def count(self, value: int, size: int, start: int, field: str) -> int:
        """Check a count that was read at byte `start`, of items of at least `size` bytes each."""
        most = (self.end - self.position) // size
        if not 0 <= value <= most:
            fail("bad_count", self.frame, start, field=field, found=value, expected=most)
        return value

    def columns(self, field: str) -> tuple[Column, ...]:
        """Read the columns of a Relation, after their number (int16)."""
        start = self.position
        count = self.count(self.int16("the number of columns"), 10, start, "the number of columns")
        return tuple([self.column(i) for i in range(count)])

    def column(self, i: int) -> Column:
        """Read a column of a Relation: flags (uint8), name, type OID (uint32), modifier (int32)."""
        start = self.position
        stop = self.frame.find(0, start + 1)
        if stop < 0 or stop + 9 > self.end:
            # The frame is cut off within this column. Each field is read by itself, so that the
            # error names the first one that is incomplete.
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
        """Read the number of relations of a Truncate; the options lie between it and the OIDs."""
        start = self.position
        value = self.int32("the number of relations")
        most = max(self.end - self.position - 1, 0) // 4
        if not 0 <= value <= most:
            name = "the number of relations"
            fail("bad_count", self.frame, start, field=name, found=value, expected=most)
        return value

    def oids(self, field: str) -> tuple[int, ...]:
        """Read the OIDs of a Truncate, as many as its number of relations says."""
        count = _int32(self.frame, self.starts["relation_count"])[0]
        return struct.unpack_from(f">{count}I", self.frame, self.need(4 * count, field))

    def sized_bytes(self, field: str) -> bytes:
        """Read an int32 length, then that many bytes."""
        start = self.position
        length = self.int32(f"the length of {field}")
        left = self.end - self.position
        if not 0 <= length <= left:
            name = f"the length of {field}"
            fail("bad_length", self.frame, start, field=name, found=length, expected=left)
        position = self.need(length, field)
        return self.frame[position : position + length]

    def finish(self) -> None:
        """Raise a DecodeError if bytes are left over."""
        if self.position != self.end:
            fail("trailing_bytes", self.frame, self.position, found=self.end - self.position)


def check_size(frame: bytes) -> None:
    """Refuse a frame longer than a server can send: column slices store no offsets beyond that."""
    if len(frame) > MAX_FRAME_LENGTH:
        fail(
            "bad_length", frame, 0,
            field="the frame's length", found=len(frame), expected=MAX_FRAME_LENGTH,
        )  # fmt: skip
