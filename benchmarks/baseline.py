"""The plain decoder with which the benchmarks compare all others. KEPT FIXED.

It decodes pgoutput in pure Python as a programmer would write it for a project of their own: it
dispatches on the tag, uses `struct.Struct` objects, loops over the columns, has a small class for
each message, and makes the obvious checks (lengths, markers, kinds, the relation's number of
columns, nothing left over). It is neither crippled nor tuned, and imports nothing of the project.
**Do not make it faster or slower**: measurements of different versions are compared by it. Change
it only if it decodes something wrongly.

It supports protocol versions 1 and 2 (not two-phase commit). The columns of a row are decoded at
once, in one of three ways:

- `columns="bytes"`: bytes as sent;
- `columns="texts"`: str (only for values in text format);
- `columns="typed"`: by the column's OID, for the types that the workloads have (jsonb is str), with
  timestamps as a server prints them with DateStyle ISO and TimeZone UTC.

NULL is None, an unchanged TOAST value is `UNCHANGED`.
"""

from __future__ import annotations

import struct
import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any, Literal, NamedTuple

_INT16 = struct.Struct(">h")
_INT32 = struct.Struct(">i")
_UINT32 = struct.Struct(">I")
_INT64 = struct.Struct(">q")
_FLOAT8 = struct.Struct(">d")
_BEGIN = struct.Struct(">QqI")
_COMMIT = struct.Struct(">BQQq")
_STREAM_START = struct.Struct(">IB")
_STREAM_COMMIT = struct.Struct(">IBQQq")
_STREAM_ABORT = struct.Struct(">II")
_TRUNCATE = struct.Struct(">iB")
_ROW = struct.Struct(">Ic")
_COLUMN_TYPE = struct.Struct(">Ii")
_NUMERIC = struct.Struct(">hhHH")

_NULL, _UNCHANGED, _TEXT, _BINARY = b"nutb"


class BaselineError(ValueError):
    """A frame is malformed, or can't come at its place in the stream."""


class Unchanged:
    def __repr__(self) -> str:
        return "UNCHANGED"


UNCHANGED = Unchanged()


# --- Messages -------------------------------------------------------------------------------------


class Column(NamedTuple):
    flags: int
    name: str
    type_id: int
    type_modifier: int


@dataclass
class Relation:
    __slots__ = (
        "columns",
        "name",
        "namespace",
        "relation_id",
        "replica_identity",
        "xid",
    )
    xid: int | None
    relation_id: int
    namespace: str
    name: str
    replica_identity: str
    columns: list[Column]


@dataclass
class Type:
    __slots__ = ("name", "namespace", "type_id", "xid")
    xid: int | None
    type_id: int
    namespace: str
    name: str


@dataclass
class Begin:
    __slots__ = ("commit_time", "final_lsn", "xid")
    final_lsn: int
    commit_time: int
    xid: int


@dataclass
class Commit:
    __slots__ = ("commit_lsn", "commit_time", "end_lsn", "flags")
    flags: int
    commit_lsn: int
    end_lsn: int
    commit_time: int


@dataclass
class Origin:
    __slots__ = ("commit_lsn", "name")
    commit_lsn: int
    name: str


@dataclass
class Insert:
    __slots__ = ("new", "relation_id", "xid")
    xid: int | None
    relation_id: int
    new: list[Any]


@dataclass
class Update:
    __slots__ = ("new", "old", "old_kind", "relation_id", "xid")
    xid: int | None
    relation_id: int
    old_kind: str | None
    old: list[Any] | None
    new: list[Any]


@dataclass
class Delete:
    __slots__ = ("old", "old_kind", "relation_id", "xid")
    xid: int | None
    relation_id: int
    old_kind: str
    old: list[Any]


@dataclass
class Truncate:
    __slots__ = ("options", "relation_ids", "xid")
    xid: int | None
    relation_ids: list[int]
    options: int


@dataclass
class LogicalMessage:
    __slots__ = ("content", "flags", "lsn", "prefix", "xid")
    xid: int | None
    flags: int
    lsn: int
    prefix: str
    content: bytes


@dataclass
class StreamStart:
    __slots__ = ("first_segment", "xid")
    xid: int
    first_segment: int


@dataclass
class StreamStop:
    __slots__ = ()


@dataclass
class StreamCommit:
    __slots__ = ("commit_lsn", "commit_time", "end_lsn", "flags", "xid")
    xid: int
    flags: int
    commit_lsn: int
    end_lsn: int
    commit_time: int


@dataclass
class StreamAbort:
    __slots__ = ("subxid", "xid")
    xid: int
    subxid: int


# --- Values ---------------------------------------------------------------------------------------

_EPOCH = datetime(2000, 1, 1, tzinfo=timezone.utc)
_EPOCH_ORDINAL = _EPOCH.toordinal()


def _text(data: bytes) -> str:
    return data.decode()


def _text_bool(data: bytes) -> bool:
    if data == b"t":
        return True
    if data == b"f":
        return False
    raise ValueError(f"not a bool: {data!r}")


def _text_numeric(data: bytes) -> Decimal:
    return Decimal(data.decode())


def _text_date(data: bytes) -> date:
    return date.fromisoformat(data.decode())


def _text_timestamptz(data: bytes) -> datetime:
    text = data.decode()
    if sys.version_info < (3, 11):
        # This Python's fromisoformat reads only fractions of three or six digits, and only offsets
        # that have minutes.
        text = text.removesuffix("+00")
        if "." in text:
            text = text.ljust(26, "0")
        text += "+00:00"
    return datetime.fromisoformat(text)


def _text_uuid(data: bytes) -> uuid.UUID:
    return uuid.UUID(data.decode())


def _text_bytea(data: bytes) -> bytes:
    if not data.startswith(b"\\x"):
        raise ValueError("bytea_output is not hex")
    return bytes.fromhex(data[2:].decode())


def _binary_bool(data: bytes) -> bool:
    return data != b"\x00"


def _binary_int2(data: bytes) -> int:
    value: int = _INT16.unpack(data)[0]
    return value


def _binary_int4(data: bytes) -> int:
    value: int = _INT32.unpack(data)[0]
    return value


def _binary_int8(data: bytes) -> int:
    value: int = _INT64.unpack(data)[0]
    return value


def _binary_float8(data: bytes) -> float:
    value: float = _FLOAT8.unpack(data)[0]
    return value


def _binary_numeric(data: bytes) -> Decimal:
    count, weight, sign, scale = _NUMERIC.unpack_from(data)
    if sign not in (0x0000, 0x4000):
        return Decimal({0xC000: "NaN", 0xD000: "Infinity", 0xF000: "-Infinity"}[sign])
    value = 0
    for digit in struct.unpack_from(f">{count}H", data, _NUMERIC.size):
        value = value * 10_000 + digit
    shift = (weight + 1 - count) * 4 + scale
    value = value * 10**shift if shift >= 0 else value // 10**-shift
    return Decimal(f"{'-' if sign else ''}{value}E-{scale}")


def _binary_date(data: bytes) -> date:
    return date.fromordinal(_EPOCH_ORDINAL + _INT32.unpack(data)[0])


def _binary_timestamptz(data: bytes) -> datetime:
    return _EPOCH + timedelta(microseconds=_INT64.unpack(data)[0])


def _binary_uuid(data: bytes) -> uuid.UUID:
    return uuid.UUID(bytes=data)


def _binary_bytea(data: bytes) -> bytes:
    return data


def _binary_jsonb(data: bytes) -> str:
    if data[0] != 1:
        raise ValueError(f"jsonb of version {data[0]}")
    return data[1:].decode()


_Converter = Callable[[bytes], Any]

_FROM_TEXT: dict[int, _Converter] = {
    16: _text_bool,
    17: _text_bytea,
    20: int,
    21: int,
    23: int,
    701: float,
    1082: _text_date,
    1184: _text_timestamptz,
    1700: _text_numeric,
    2950: _text_uuid,
}

_FROM_BINARY: dict[int, _Converter] = {
    16: _binary_bool,
    17: _binary_bytea,
    20: _binary_int8,
    21: _binary_int2,
    23: _binary_int4,
    701: _binary_float8,
    1082: _binary_date,
    1184: _binary_timestamptz,
    1700: _binary_numeric,
    2950: _binary_uuid,
    3802: _binary_jsonb,
}


# --- The decoder ----------------------------------------------------------------------------------


def _read_string(frame: bytes, pos: int) -> tuple[str, int]:
    end = frame.find(b"\0", pos)
    if end < 0:
        raise BaselineError(f"unterminated string at byte {pos}")
    return frame[pos:end].decode(), end + 1


def _check_end(frame: bytes, pos: int) -> None:
    if pos != len(frame):
        raise BaselineError(f"{len(frame) - pos} bytes left over at byte {pos}")


class Decoder:
    """Decodes one frame after the other; keeps the relations, and whether a chunk is open."""

    def __init__(self, columns: Literal["bytes", "texts", "typed"] = "bytes") -> None:
        self.relations: dict[int, Relation] = {}
        self.in_stream = False
        self._converters: dict[int, list[tuple[_Converter, _Converter]]] = {}
        self._read_columns = {
            "bytes": self._read_bytes,
            "texts": self._read_texts,
            "typed": self._read_typed,
        }[columns]
        self._handlers: dict[int, Callable[[bytes], Any]] = {
            ord("B"): self._begin,
            ord("C"): self._commit,
            ord("O"): self._origin,
            ord("R"): self._relation,
            ord("Y"): self._type,
            ord("I"): self._insert,
            ord("U"): self._update,
            ord("D"): self._delete,
            ord("T"): self._truncate,
            ord("M"): self._message,
            ord("S"): self._stream_start,
            ord("E"): self._stream_stop,
            ord("c"): self._stream_commit,
            ord("A"): self._stream_abort,
        }

    def decode(self, frame: bytes) -> Any:
        """Decode one frame. Raises BaselineError if it is malformed."""
        if not frame:
            raise BaselineError("empty frame")
        handler = self._handlers.get(frame[0])
        if handler is None:
            raise BaselineError(f"unknown tag {frame[:1]!r}")
        try:
            return handler(frame)
        except (struct.error, IndexError) as error:
            raise BaselineError(f"frame of {len(frame)} bytes is too short") from error

    # A tuple is the number of columns and, for each column, a kind. The kinds "t" and "b" are
    # followed by a length and data.

    def _read_bytes(self, frame: bytes, pos: int, relation_id: int) -> tuple[list[Any], int]:
        relation = self.relations.get(relation_id)
        if relation is None:
            raise BaselineError(f"no Relation message has come for relation {relation_id}")
        (count,) = _INT16.unpack_from(frame, pos)
        pos += 2
        if count != len(relation.columns):
            raise BaselineError(f"{count} columns, the relation has {len(relation.columns)}")
        values: list[Any] = []
        for _ in range(count):
            kind = frame[pos]
            pos += 1
            if kind == _TEXT or kind == _BINARY:  # noqa: SIM109
                (length,) = _INT32.unpack_from(frame, pos)
                pos += 4
                end = pos + length
                if length < 0 or end > len(frame):
                    raise BaselineError(f"length {length} at byte {pos - 4} does not fit")
                values.append(frame[pos:end])
                pos = end
            elif kind == _NULL:
                values.append(None)
            elif kind == _UNCHANGED:
                values.append(UNCHANGED)
            else:
                raise BaselineError(f"unknown column kind {kind} at byte {pos - 1}")
        return values, pos

    def _read_texts(self, frame: bytes, pos: int, relation_id: int) -> tuple[list[Any], int]:
        relation = self.relations.get(relation_id)
        if relation is None:
            raise BaselineError(f"no Relation message has come for relation {relation_id}")
        (count,) = _INT16.unpack_from(frame, pos)
        pos += 2
        if count != len(relation.columns):
            raise BaselineError(f"{count} columns, the relation has {len(relation.columns)}")
        values: list[Any] = []
        for _ in range(count):
            kind = frame[pos]
            pos += 1
            if kind == _TEXT:
                (length,) = _INT32.unpack_from(frame, pos)
                pos += 4
                end = pos + length
                if length < 0 or end > len(frame):
                    raise BaselineError(f"length {length} at byte {pos - 4} does not fit")
                values.append(frame[pos:end].decode())
                pos = end
            elif kind == _NULL:
                values.append(None)
            elif kind == _UNCHANGED:
                values.append(UNCHANGED)
            else:
                raise BaselineError(f"column kind {kind} at byte {pos - 1} is no text")
        return values, pos

    def _read_typed(self, frame: bytes, pos: int, relation_id: int) -> tuple[list[Any], int]:
        relation = self.relations.get(relation_id)
        if relation is None:
            raise BaselineError(f"no Relation message has come for relation {relation_id}")
        (count,) = _INT16.unpack_from(frame, pos)
        pos += 2
        if count != len(relation.columns):
            raise BaselineError(f"{count} columns, the relation has {len(relation.columns)}")
        values: list[Any] = []
        for from_text, from_binary in self._converters[relation_id]:
            kind = frame[pos]
            pos += 1
            if kind == _TEXT or kind == _BINARY:  # noqa: SIM109
                (length,) = _INT32.unpack_from(frame, pos)
                pos += 4
                end = pos + length
                if length < 0 or end > len(frame):
                    raise BaselineError(f"length {length} at byte {pos - 4} does not fit")
                data = frame[pos:end]
                values.append(from_text(data) if kind == _TEXT else from_binary(data))
                pos = end
            elif kind == _NULL:
                values.append(None)
            elif kind == _UNCHANGED:
                values.append(UNCHANGED)
            else:
                raise BaselineError(f"unknown column kind {kind} at byte {pos - 1}")
        return values, pos

    def _insert(self, frame: bytes) -> Insert:
        xid, pos = None, 1
        if self.in_stream:
            (xid,) = _UINT32.unpack_from(frame, 1)
            pos = 5
        relation_id, marker = _ROW.unpack_from(frame, pos)
        if marker != b"N":
            raise BaselineError(f"expected N at byte {pos + 4}, not {marker!r}")
        new, pos = self._read_columns(frame, pos + 5, relation_id)
        if pos != len(frame):
            raise BaselineError(f"{len(frame) - pos} bytes left over at byte {pos}")
        return Insert(xid, relation_id, new)

    def _update(self, frame: bytes) -> Update:
        xid, pos = None, 1
        if self.in_stream:
            (xid,) = _UINT32.unpack_from(frame, 1)
            pos = 5
        relation_id, marker = _ROW.unpack_from(frame, pos)
        pos += 5
        old_kind = old = None
        if marker == b"K" or marker == b"O":
            old_kind = marker.decode()
            old, pos = self._read_columns(frame, pos, relation_id)
            marker = frame[pos : pos + 1]
            pos += 1
        if marker != b"N":
            raise BaselineError(f"expected N at byte {pos - 1}, not {marker!r}")
        new, pos = self._read_columns(frame, pos, relation_id)
        if pos != len(frame):
            raise BaselineError(f"{len(frame) - pos} bytes left over at byte {pos}")
        return Update(xid, relation_id, old_kind, old, new)

    def _delete(self, frame: bytes) -> Delete:
        xid, pos = None, 1
        if self.in_stream:
            (xid,) = _UINT32.unpack_from(frame, 1)
            pos = 5
        relation_id, marker = _ROW.unpack_from(frame, pos)
        if marker != b"K" and marker != b"O":
            raise BaselineError(f"expected K or O at byte {pos + 4}, not {marker!r}")
        old, pos = self._read_columns(frame, pos + 5, relation_id)
        if pos != len(frame):
            raise BaselineError(f"{len(frame) - pos} bytes left over at byte {pos}")
        return Delete(xid, relation_id, marker.decode(), old)

    def _begin(self, frame: bytes) -> Begin:
        final_lsn, commit_time, xid = _BEGIN.unpack_from(frame, 1)
        _check_end(frame, 1 + _BEGIN.size)
        return Begin(final_lsn, commit_time, xid)

    def _commit(self, frame: bytes) -> Commit:
        flags, commit_lsn, end_lsn, commit_time = _COMMIT.unpack_from(frame, 1)
        _check_end(frame, 1 + _COMMIT.size)
        return Commit(flags, commit_lsn, end_lsn, commit_time)

    def _origin(self, frame: bytes) -> Origin:
        commit_lsn = _INT64.unpack_from(frame, 1)[0]
        name, pos = _read_string(frame, 9)
        _check_end(frame, pos)
        return Origin(commit_lsn, name)

    def _relation(self, frame: bytes) -> Relation:
        xid, pos = None, 1
        if self.in_stream:
            (xid,) = _UINT32.unpack_from(frame, 1)
            pos = 5
        relation_id = _UINT32.unpack_from(frame, pos)[0]
        namespace, pos = _read_string(frame, pos + 4)
        name, pos = _read_string(frame, pos)
        replica_identity = chr(frame[pos])
        count = _INT16.unpack_from(frame, pos + 1)[0]
        pos += 3
        columns = []
        for _ in range(count):
            flags = frame[pos]
            column_name, pos = _read_string(frame, pos + 1)
            type_id, type_modifier = _COLUMN_TYPE.unpack_from(frame, pos)
            pos += _COLUMN_TYPE.size
            columns.append(Column(flags, column_name, type_id, type_modifier))
        _check_end(frame, pos)
        relation = Relation(xid, relation_id, namespace, name, replica_identity, columns)
        self.relations[relation_id] = relation
        self._converters[relation_id] = [
            (_FROM_TEXT.get(column.type_id, _text), _FROM_BINARY.get(column.type_id, _text))
            for column in columns
        ]
        return relation

    def _type(self, frame: bytes) -> Type:
        xid, pos = None, 1
        if self.in_stream:
            (xid,) = _UINT32.unpack_from(frame, 1)
            pos = 5
        type_id = _UINT32.unpack_from(frame, pos)[0]
        namespace, pos = _read_string(frame, pos + 4)
        name, pos = _read_string(frame, pos)
        _check_end(frame, pos)
        return Type(xid, type_id, namespace, name)

    def _truncate(self, frame: bytes) -> Truncate:
        xid, pos = None, 1
        if self.in_stream:
            (xid,) = _UINT32.unpack_from(frame, 1)
            pos = 5
        count, options = _TRUNCATE.unpack_from(frame, pos)
        pos += _TRUNCATE.size
        _check_end(frame, pos + 4 * count)
        relation_ids = list(struct.unpack_from(f">{count}I", frame, pos))
        return Truncate(xid, relation_ids, options)

    def _message(self, frame: bytes) -> LogicalMessage:
        xid, pos = None, 1
        if self.in_stream:
            (xid,) = _UINT32.unpack_from(frame, 1)
            pos = 5
        flags = frame[pos]
        lsn = _INT64.unpack_from(frame, pos + 1)[0]
        prefix, pos = _read_string(frame, pos + 9)
        (length,) = _INT32.unpack_from(frame, pos)
        pos += 4
        _check_end(frame, pos + length)
        return LogicalMessage(xid, flags, lsn, prefix, frame[pos:])

    def _stream_start(self, frame: bytes) -> StreamStart:
        if self.in_stream:
            raise BaselineError("stream start inside a stream")
        xid, first_segment = _STREAM_START.unpack_from(frame, 1)
        _check_end(frame, 1 + _STREAM_START.size)
        self.in_stream = True
        return StreamStart(xid, first_segment)

    def _stream_stop(self, frame: bytes) -> StreamStop:
        if not self.in_stream:
            raise BaselineError("stream stop outside a stream")
        _check_end(frame, 1)
        self.in_stream = False
        return StreamStop()

    def _stream_commit(self, frame: bytes) -> StreamCommit:
        xid, flags, commit_lsn, end_lsn, commit_time = _STREAM_COMMIT.unpack_from(frame, 1)
        _check_end(frame, 1 + _STREAM_COMMIT.size)
        return StreamCommit(xid, flags, commit_lsn, end_lsn, commit_time)

    def _stream_abort(self, frame: bytes) -> StreamAbort:
        xid, subxid = _STREAM_ABORT.unpack_from(frame, 1)
        _check_end(frame, 1 + _STREAM_ABORT.size)
        return StreamAbort(xid, subxid)
