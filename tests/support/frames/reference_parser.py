"""A second reading of the documentation: pgoutput frames to plain dictionaries.

It is written from the pages "Logical Replication Message Formats" of the PostgreSQL documentation
alone and shares nothing with the package, so that the vectors it fills in can contradict the
package's decoders. It is meant to be compared with those pages line by line; it is not fast.

`parse` raises `WireError` with the code, the offset (first byte of the field that fails) and the
tag that the package's DecodeError promises.
"""

from __future__ import annotations

import datetime
import decimal
import json
import math
import struct
import uuid
from typing import Any

__all__ = [
    "LAYOUTS",
    "ReferenceStream",
    "WireError",
    "binary_value",
    "parse",
    "text_value",
]


class WireError(Exception):
    """The frame is malformed: `code`, `offset` in bytes, `tag` (None for an empty frame)."""

    def __init__(self, code: str, offset: int, tag: str | None) -> None:
        super().__init__(f"{code} at byte {offset} of a {tag!r} frame")
        self.code = code
        self.offset = offset
        self.tag = tag


# Message formats, in the order of the documentation's page. "xid?" is the field that is there
# between Stream Start and Stream Stop only.
LAYOUTS: dict[str, tuple[str, list[tuple[str, str]]]] = {
    "B": ("Begin", [("final_lsn", "lsn"), ("commit_time", "time"), ("xid", "xid")]),
    "M": (
        "LogicalMessage",
        [
            ("xid", "xid?"),
            ("flags", "int8"),
            ("lsn", "lsn"),
            ("prefix", "string"),
            ("content", "bytes"),
        ],
    ),
    "C": (
        "Commit",
        [
            ("flags", "int8"),
            ("commit_lsn", "lsn"),
            ("end_lsn", "lsn"),
            ("commit_time", "time"),
        ],
    ),
    "O": ("Origin", [("commit_lsn", "lsn"), ("name", "string")]),
    "R": (
        "Relation",
        [
            ("xid", "xid?"),
            ("relation_id", "oid"),
            ("namespace", "string"),
            ("name", "string"),
            ("replica_identity", "char"),
            ("columns", "columns"),
        ],
    ),
    "Y": (
        "Type",
        [("xid", "xid?"), ("type_id", "oid"), ("namespace", "string"), ("name", "string")],
    ),
    "I": ("Insert", [("xid", "xid?"), ("relation_id", "oid"), ("new", "new")]),
    "U": ("Update", [("xid", "xid?"), ("relation_id", "oid"), ("tuples", "old and new")]),
    "D": ("Delete", [("xid", "xid?"), ("relation_id", "oid"), ("old", "old")]),
    "T": ("Truncate", [("xid", "xid?"), ("relation_ids", "truncate")]),
    "S": ("StreamStart", [("xid", "xid"), ("first_segment", "bool")]),
    "E": ("StreamStop", []),
    "c": (
        "StreamCommit",
        [
            ("xid", "xid"),
            ("flags", "int8"),
            ("commit_lsn", "lsn"),
            ("end_lsn", "lsn"),
            ("commit_time", "time"),
        ],
    ),
    "A": ("StreamAbort", [("xid", "xid"), ("subxid", "xid"), ("abort_lsn", "abort")]),
    "b": (
        "BeginPrepare",
        [
            ("prepare_lsn", "lsn"),
            ("end_lsn", "lsn"),
            ("prepare_time", "time"),
            ("xid", "xid"),
            ("gid", "string"),
        ],
    ),
    "P": (
        "Prepare",
        [
            ("flags", "int8"),
            ("prepare_lsn", "lsn"),
            ("end_lsn", "lsn"),
            ("prepare_time", "time"),
            ("xid", "xid"),
            ("gid", "string"),
        ],
    ),
    "K": (
        "CommitPrepared",
        [
            ("flags", "int8"),
            ("commit_lsn", "lsn"),
            ("end_lsn", "lsn"),
            ("commit_time", "time"),
            ("xid", "xid"),
            ("gid", "string"),
        ],
    ),
    "r": (
        "RollbackPrepared",
        [
            ("flags", "int8"),
            ("prepare_end_lsn", "lsn"),
            ("rollback_end_lsn", "lsn"),
            ("prepare_time", "time"),
            ("rollback_time", "time"),
            ("xid", "xid"),
            ("gid", "string"),
        ],
    ),
    "p": (
        "StreamPrepare",
        [
            ("flags", "int8"),
            ("prepare_lsn", "lsn"),
            ("end_lsn", "lsn"),
            ("prepare_time", "time"),
            ("xid", "xid"),
            ("gid", "string"),
        ],
    ),
}

# Messages that can't stand between Stream Start and Stream Stop, and the one that can't outside.
OUTSIDE_ONLY = frozenset("SBCbPKrcAp")
INSIDE_ONLY = frozenset("E")

_INTEGERS = {
    "int8": ">B",
    "lsn": ">Q",
    "time": ">q",
    "xid": ">I",
    "oid": ">I",
    "int16": ">h",
    "int32": ">i",
}


class _Reader:
    def __init__(self, frame: bytes, in_stream: bool, encoding: str) -> None:
        self.frame = frame
        self.in_stream = in_stream
        self.encoding = encoding
        self.at = 1
        self.tag = chr(frame[0])

    def fail(self, code: str, offset: int) -> WireError:
        return WireError(code, offset, self.tag)

    @property
    def left(self) -> int:
        return len(self.frame) - self.at

    def integer(self, kind: str) -> int:
        layout = _INTEGERS[kind]
        size = struct.calcsize(layout)
        if self.left < size:
            raise self.fail("truncated", self.at)
        (value,) = struct.unpack_from(layout, self.frame, self.at)
        self.at += size
        return int(value)

    def string(self) -> str:
        end = self.frame.find(b"\0", self.at)
        if end < 0:
            raise self.fail("unterminated_string", self.at)
        value = self.frame[self.at : end].decode(self.encoding, "surrogateescape")
        self.at = end + 1
        return value

    def content(self) -> tuple[int, int]:
        """An Int32 length and as many bytes: their offset and length."""
        field = self.at
        length = self.integer("int32")
        if length < 0 or length > self.left:
            raise self.fail("bad_length", field)
        start = self.at
        self.at += length
        return start, length

    def columns(self) -> list[list[Any]]:
        field = self.at
        count = self.integer("int16")
        # a column is a flag byte, a name's NUL, an OID and a modifier at the least
        if count < 0 or count > self.left // 10:
            raise self.fail("bad_count", field)
        columns = []
        for _ in range(count):
            flags = self.integer("int8")
            name = self.string()
            type_id = self.integer("oid")
            columns.append([flags, name, type_id, self.integer("int32")])
        return columns

    def tuple_data(self) -> dict[str, Any]:
        """TupleData: `columns` as [kind, offset, length] (no offset for n and u)."""
        field = self.at
        count = self.integer("int16")
        if count < 0 or count > self.left:
            raise self.fail("bad_count", field)
        columns: list[list[Any]] = []
        for _ in range(count):
            if not self.left:
                raise self.fail("truncated", self.at)
            kind = chr(self.frame[self.at])
            if kind not in "nutb":
                raise self.fail("bad_column_kind", self.at)
            self.at += 1
            columns.append([kind] if kind in "nu" else [kind, *self.content()])
        return {"at": field, "columns": columns}

    def marker(self, allowed: str) -> str:
        if not self.left:
            raise self.fail("truncated", self.at)
        found = chr(self.frame[self.at])
        if found not in allowed:
            raise self.fail("bad_marker", self.at)
        self.at += 1
        return found


def parse(frame: bytes, in_stream: bool = False, encoding: str = "utf-8") -> dict[str, Any]:
    """The message as a dictionary: "class", "fields", and "tuples" with the columns' places."""
    if not frame:
        raise WireError("empty_frame", 0, None)
    if chr(frame[0]) not in LAYOUTS:
        raise WireError("unknown_tag", 0, chr(frame[0]))
    reader = _Reader(frame, in_stream, encoding)
    name, layout = LAYOUTS[reader.tag]
    fields: dict[str, Any] = {}
    tuples: dict[str, dict[str, Any]] = {}
    for field, kind in layout:
        if kind in _INTEGERS:
            fields[field] = reader.integer(kind)
        elif kind == "xid?":
            fields[field] = reader.integer("xid") if in_stream else None
        elif kind == "bool":
            fields[field] = reader.integer("int8") != 0
        elif kind == "char":
            fields[field] = chr(reader.integer("int8"))
        elif kind == "string":
            fields[field] = reader.string()
        elif kind == "bytes":
            start, length = reader.content()
            fields[field] = {"bytes": frame[start : start + length].hex()}
        elif kind == "columns":
            fields[field] = reader.columns()
        elif kind == "new":
            reader.marker("N")
            tuples["new"] = reader.tuple_data()
        elif kind == "old":
            fields["old_kind"] = reader.marker("KO")
            tuples["old"] = reader.tuple_data()
        elif kind == "old and new":
            marker = reader.marker("KON")
            fields["old_kind"] = None if marker == "N" else marker
            if marker != "N":
                tuples["old"] = reader.tuple_data()
                reader.marker("N")
            tuples["new"] = reader.tuple_data()
        elif kind == "truncate":
            at = reader.at
            count = reader.integer("int32")
            if count < 0 or count > max(0, reader.left - 1) // 4:
                raise reader.fail("bad_count", at)
            fields["options"] = reader.integer("int8")
            fields[field] = [reader.integer("oid") for _ in range(count)]
        else:
            assert kind == "abort"
            more = reader.left > 0
            fields["abort_lsn"] = reader.integer("lsn") if more else None
            fields["abort_time"] = reader.integer("time") if more else None
    if reader.left:
        raise reader.fail("trailing_bytes", reader.at)
    return {"class": name, "tag": reader.tag, "fields": fields, "tuples": tuples}


class ReferenceStream:
    """What a decoder of a connection has to remember, kept the plainest way.

    Relations and types are kept by the xid of the stream that announced them, None for those that
    count for every transaction.
    """

    def __init__(self, encoding: str = "utf-8") -> None:
        self.encoding = encoding
        self.open_xid: int | None = None
        self._start = b""
        # id -> (fields, frame, whether the frame has a stream's xid)
        self._types: dict[int | None, dict[int, tuple[dict[str, Any], bytes, bool]]] = {}
        self._relations: dict[int | None, dict[int, tuple[dict[str, Any], bytes, bool]]] = {}

    def feed(self, frame: bytes) -> dict[str, Any]:
        """The frame's message, with "in_stream" and "stream_xid"; `WireError` as `parse`."""
        tag = frame[:1].decode("latin-1")
        in_stream = self.open_xid is not None
        if (tag in OUTSIDE_ONLY and in_stream) or (tag in INSIDE_ONLY and not in_stream):
            raise WireError("stream_order", 0, tag)
        message = parse(frame, in_stream, self.encoding)
        message["in_stream"] = in_stream
        message["stream_xid"] = self.open_xid
        fields = message["fields"]
        for data in message["tuples"].values():
            relation = self.relation(fields["relation_id"])
            if relation is None:
                raise WireError("unknown_relation", 5 if in_stream else 1, tag)
            if len(relation["columns"]) != len(data["columns"]):
                raise WireError("column_count", data["at"], tag)
            message["relation"] = relation
        if tag == "S":
            self.open_xid = fields["xid"]
            self._start = frame
        elif tag == "E":
            self.open_xid = None
        elif tag in "RY":
            kept = self._relations if tag == "R" else self._types
            key = fields["relation_id" if tag == "R" else "type_id"]
            kept.setdefault(self.open_xid, {})[key] = (fields, frame, in_stream)
        elif tag in "cpA":
            if tag == "A" and fields["xid"] != fields["subxid"]:
                return message
            for kept in (self._types, self._relations):
                announced = kept.pop(fields["xid"], {})
                if tag == "c":
                    kept.setdefault(None, {}).update(announced)
        return message

    def reset(self) -> None:
        """A new connection: what open streams announced is dropped."""
        self.open_xid = None
        for kept in (self._types, self._relations):
            for xid in [xid for xid in kept if xid is not None]:
                del kept[xid]

    def _find(
        self, kept: dict[int | None, dict[int, tuple[dict[str, Any], bytes, bool]]], key: int
    ) -> tuple[dict[str, Any], bytes, bool] | None:
        own = kept.get(self.open_xid, {})
        return own[key] if key in own else kept.get(None, {}).get(key)

    def relation(self, relation_id: int) -> dict[str, Any] | None:
        found = self._find(self._relations, relation_id)
        return None if found is None else found[0]

    def published(self) -> dict[str, list[Any]]:
        """Of each relation that counts for every transaction: namespace, name, column names."""
        return {
            str(key): [fields["namespace"], fields["name"], [c[1] for c in fields["columns"]]]
            for key, (fields, _, _) in sorted(self._relations.get(None, {}).items())
        }

    def base_type(self, type_id: int) -> str | None:
        """The name of the built-in type of which `type_id` is said to be a domain."""
        found = self._find(self._types, type_id)
        if found is None or found[0]["namespace"] != "":
            return None
        return str(found[0]["name"])

    def context(self, relation_id: int) -> list[bytes]:
        """Frames to feed to a new decoder, so that it can take a frame of this relation next.

        What the open stream announced follows a Stream Start; the rest comes before, without xid.
        """
        before: list[bytes] = []
        inside: list[bytes] = []

        def add(
            kept: dict[int | None, dict[int, tuple[dict[str, Any], bytes, bool]]], key: int
        ) -> None:
            found = self._find(kept, key)
            if found is None:
                return
            _, frame, streamed = found
            if self.open_xid is not None and kept.get(self.open_xid, {}).get(key) is found:
                inside.append(frame)
            else:
                before.append(frame[:1] + frame[5:] if streamed else frame)

        relation = self.relation(relation_id)
        if relation is not None:
            for type_id in dict.fromkeys(column[2] for column in relation["columns"]):
                add(self._types, type_id)
            add(self._relations, relation_id)
        return before if self.open_xid is None else [*before, self._start, *inside]


# --- typed values -------------------------------------------------------------------------------
# Python values in JSON: [type name, text that makes it]; None for a value whose Python form this
# parser does not settle. Only what types.md calls a typed value of these types.

_EPOCH = datetime.datetime(2000, 1, 1)
_TEXT_TYPES = (19, 25, 114, 142, 705, 1042, 1043)
_INTEGER_TYPES = {21: ">h", 23: ">i", 20: ">q", 26: ">I", 28: ">I", 29: ">I", 5069: ">Q"}

OUT_OF_RANGE = ["error", "out_of_range"]


def _float(value: float) -> list[str]:
    if math.isnan(value):
        return ["float", "nan"]
    return ["float", value.hex()]


def _datetime(microseconds: int, zone: bool) -> list[str]:
    if microseconds in (-(2**63), 2**63 - 1):
        return OUT_OF_RANGE
    try:
        moment = _EPOCH + datetime.timedelta(microseconds=microseconds)
    except OverflowError:
        return OUT_OF_RANGE
    if zone:
        moment = moment.replace(tzinfo=datetime.timezone.utc)
    return ["datetime", moment.isoformat()]


def binary_value(type_id: int, data: bytes, encoding: str) -> list[str] | None:
    """What a value in the type's send format is in Python; texts are in client_encoding."""
    try:
        return _binary_value(type_id, data, encoding)
    except UnicodeDecodeError:
        return ["error", "bad_encoding"]


def _binary_value(type_id: int, data: bytes, encoding: str) -> list[str] | None:
    if type_id == 142 and data.startswith(b"<?xml"):
        return None  # xml_send declares an encoding other than UTF-8, xml_out does not
    if type_id == 16:
        return ["bool", str(data != b"\0")]
    if type_id in _INTEGER_TYPES:
        return ["int", str(struct.unpack(_INTEGER_TYPES[type_id], data)[0])]
    if type_id == 700:
        return _float(struct.unpack(">f", data)[0])
    if type_id == 701:
        return _float(struct.unpack(">d", data)[0])
    if type_id == 1700:
        return _binary_numeric(data)
    if type_id in _TEXT_TYPES:
        return ["str", data.decode(encoding)]
    if type_id in (17, 18):
        return ["bytes", data.hex()]
    if type_id == 3802 and data[:1] == b"\1":
        return ["str", data[1:].decode(encoding)]
    if type_id == 2950:
        return ["UUID", str(uuid.UUID(bytes=data))]
    if type_id == 1082:
        (days,) = struct.unpack(">i", data)
        try:
            if days in (-(2**31), 2**31 - 1):
                return OUT_OF_RANGE
            return ["date", (_EPOCH.date() + datetime.timedelta(days=days)).isoformat()]
        except OverflowError:
            return OUT_OF_RANGE
    if type_id == 1083:
        (microseconds,) = struct.unpack(">q", data)
        if microseconds == 86_400_000_000:
            return OUT_OF_RANGE
        moment = _EPOCH + datetime.timedelta(microseconds=microseconds)
        return ["time", moment.time().isoformat()]
    if type_id in (1114, 1184):
        return _datetime(struct.unpack(">q", data)[0], type_id == 1184)
    return None


_SPECIAL_NUMERICS = {0xC000: "NaN", 0xD000: "Infinity", 0xF000: "-Infinity"}


def _binary_numeric(data: bytes) -> list[str] | None:
    count, weight, sign, scale = struct.unpack_from(">hhHh", data)
    if sign in _SPECIAL_NUMERICS:
        return ["Decimal", _SPECIAL_NUMERICS[sign]]
    with decimal.localcontext() as context:
        context.prec = decimal.MAX_PREC
        context.Emax, context.Emin = decimal.MAX_EMAX, decimal.MIN_EMIN
        total = 0
        for (digit,) in struct.iter_unpack(">h", data[8 : 8 + 2 * count]):
            total = total * 10000 + digit
        exponent = 4 * (weight - count + 1)  # of the last digit group
        # `scale` digits after the point are shown, whatever the groups hold
        shift = exponent + scale
        total = total * 10**shift if shift >= 0 else total // 10**-shift
        value = decimal.Decimal(-total if sign else total).scaleb(-scale)
    text = format(value, "f")
    return ["Decimal", text] if len(text) < 2000 else None


def text_value(type_id: int, data: bytes, encoding: str) -> list[str] | None:
    """What a value in the type's text output is in Python, under the session settings ISO, UTC."""
    try:
        text = data.decode(encoding)
    except UnicodeDecodeError:
        # version 14 sends a high "char" as the byte itself
        return ["bytes", data.hex()] if type_id == 18 else ["error", "bad_encoding"]
    if type_id == 16:
        return ["bool", str(text == "t")]
    if type_id in _INTEGER_TYPES:
        return ["int", text]
    if type_id == 700:
        return _float(struct.unpack(">f", struct.pack(">f", float(text)))[0])
    if type_id == 701:
        return _float(float(text))
    if type_id == 1700:
        return ["Decimal", text] if len(text) < 2000 else None
    if type_id in _TEXT_TYPES or type_id == 3802:
        return ["str", text]
    if type_id == 18:  # "char": one byte, a high one as \\ooo from version 15 on, none for 0
        if len(text) == 4 and text.startswith("\\"):
            return ["bytes", f"{int(text[1:], 8):02x}"]
        return ["bytes", data.hex() or "00"]
    if type_id == 17 and text.startswith("\\x"):
        return ["bytes", text[2:]]
    if type_id == 2950:
        return ["UUID", text]
    if type_id in (1082, 1083, 1114, 1184):
        return _text_moment(type_id, text)
    return None


def _text_moment(type_id: int, text: str) -> list[str]:
    if text.endswith(" BC") or text in ("infinity", "-infinity") or text == "24:00:00":
        return OUT_OF_RANGE
    if type_id != 1083 and len(text.split("-")[0]) > 4:
        return OUT_OF_RANGE
    if type_id == 1082:
        return ["date", datetime.date.fromisoformat(text).isoformat()]
    clock, _, fraction = text.partition(".")
    zone = ""
    if type_id == 1184:
        body = fraction or clock
        sign = max(body.rfind("+"), body.rfind("-"))
        zone = body[sign:]
        assert zone == "+00", text
        clock, fraction = (clock, fraction[:sign]) if fraction else (clock[:sign], "")
    clock += "." + fraction.ljust(6, "0") if fraction else ""
    if type_id == 1083:
        return ["time", datetime.time.fromisoformat(clock).isoformat()]
    moment = datetime.datetime.fromisoformat(clock)
    if type_id == 1184:
        moment = moment.replace(tzinfo=datetime.timezone.utc)
    return ["datetime", moment.isoformat()]


def dumps(value: Any) -> str:
    """JSON as the vector files have it: one line, the same bytes on every run."""
    return json.dumps(value, ensure_ascii=True, separators=(",", ":"))
