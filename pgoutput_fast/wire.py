"""The wire layout of every message: which fields a frame has, in which order, and how each is read.

The layouts are those of "Logical Replication Message Formats" in PostgreSQL's documentation,
https://www.postgresql.org/docs/current/protocol-logicalrep-message-formats.html. Whatever reads or
writes frames stands on this table or is compared with it by a test.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NamedTuple

from .errors import MAX_FRAME_LENGTH, fail

if TYPE_CHECKING:
    from collections.abc import Callable

_type_and_modifier = struct.Struct(">Ii").unpack_from
_uint32 = struct.Struct(">I").unpack_from
_int32 = struct.Struct(">i").unpack_from
_int16 = struct.Struct(">h").unpack_from
_uint64 = struct.Struct(">Q").unpack_from
_int64 = struct.Struct(">q").unpack_from


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

_FIXED = {"uint8": "B", "uint32": "I", "lsn": "Q", "time": "q", "truncate_count": "i"}
"""How a field is read → the format of `struct`, of fields whose size no frame changes."""


def fields_reader(tag: str, *fields: str) -> Callable[[bytes], tuple[int, ...]]:
    """A function that reads some numbers of a frame from outside of stream chunks, and no more.

    Parameters
    ----------
    tag : str
    fields : str
        Names of `LAYOUTS`, in its order; before the last of them, all fields are numbers.

    Returns
    -------
    callable
        From a frame with this tag to the values. It raises DecodeError if the frame ends before.
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
        """The xid that is there inside stream chunks alone."""
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


def check_size(frame: bytes) -> None:
    """Refuse a frame that no server can send; offsets in it would not fit into a slice."""
    if len(frame) > MAX_FRAME_LENGTH:
        fail(
            "bad_length", frame, 0,
            field="the frame's length", found=len(frame), expected=MAX_FRAME_LENGTH,
        )  # fmt: skip
