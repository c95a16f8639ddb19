"""Encode messages into frames: the inverse of decoding, along the same table of the wire layout.

:func:`encode` makes a frame from the fields of a decoded message, :func:`encode_fields` from fields
that are given one by one. :mod:`pgoutput_fast.transcode` makes frames of many rows at once.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from ..errors import MAX_FRAME_LENGTH, PgOutputError
from ..objects import UNCHANGED
from .wire import LAYOUTS, MAX_COLUMNS, TAGS, Column

_INTEGERS: dict[str, tuple[struct.Struct, int, int]] = {
    "uint8": (struct.Struct(">B"), 0, 0xFF),
    "count": (struct.Struct(">h"), 0, MAX_COLUMNS),
    "uint32": (struct.Struct(">I"), 0, 0xFFFFFFFF),
    "int32": (struct.Struct(">i"), -0x80000000, 0x7FFFFFFF),
    "lsn": (struct.Struct(">Q"), 0, 0xFFFFFFFFFFFFFFFF),
    "time": (struct.Struct(">q"), -0x8000000000000000, 0x7FFFFFFFFFFFFFFF),
}


def encode(message: Any) -> bytes:
    """Make the frame of a decoded message, or the bytes of a decoded tuple, from its fields.

    For every frame that a server sends, ``encode(decode(frame)) == frame``, although the frame that
    the message was decoded from is not used. There are two exceptions. If the encoding has several
    byte sequences for one character (as Shift JIS for some), a name may be encoded as another of
    them. And the flag of Stream Start is always encoded as 0 or 1.

    Parameters
    ----------
    message : object
        A message of any class, or a TupleData.
        From either implementation.

    Raises
    ------
    TypeError
        `message` is neither a message nor a tuple.
    """
    tag = getattr(message, "tag", None)
    if tag is None:
        if not hasattr(message, "raws"):
            raise TypeError(f"expected a message or a tuple, not {type(message).__name__}")
        return encode_tuple(message)
    names = [name for name, kind in LAYOUTS[tag] if kind != "truncate_count"]
    if "old" in names:
        names.append("old_kind")
    fields = {name: getattr(message, name) for name in names}
    # Only the rare messages have text in their fields, and they remember its encoding.
    return encode_fields(tag, getattr(message, "_encoding", "utf-8"), **fields)


def encode_fields(tag: str, encoding: str = "utf-8", /, **fields: Any) -> bytes:
    """Make a frame from fields that are given one by one.

    Parameters
    ----------
    tag : str
        The message's tag, such as "B" for Begin.
    encoding : str
        The encoding of names, prefixes, GIDs, and values given as str. Lone surrogates stand for
        bytes that are no text in it, as in decoded messages.
    **fields
        The message's attributes by their names: LSNs (int), times (int, microseconds since
        2000-01-01 UTC), xids and so on. The following may be None or left out: `xid` if the message
        has one only inside stream chunks, `old` and `old_kind` of an Update, `abort_lsn` and
        `abort_time`. `new` and `old` are tuples as :func:`encode_tuple` takes them; `columns` of a
        Relation are (flags, name, type_id, type_modifier).

    Raises
    ------
    PgOutputError
        The tag is unknown, a value does not fit into its field, or the frame would be too long.
    TypeError
        A field is missing, or the message has no field of that name.
    """
    if tag not in LAYOUTS:
        raise PgOutputError(
            f"there is no message with the tag {tag!r}, only {' '.join(TAGS)}", code="unfit_input"
        )
    writer = _FrameWriter(tag, encoding, fields)
    parts = [tag.encode("ascii")]
    for name, kind in LAYOUTS[tag]:
        write = getattr(writer, _TUPLE_KINDS.get(kind, kind))
        parts.append(write(name))
    writer.finish()
    frame = b"".join(parts)
    if len(frame) > MAX_FRAME_LENGTH:
        raise PgOutputError(
            f"a {tag!r} frame would have {len(frame)} bytes, and at most {MAX_FRAME_LENGTH} can be "
            "sent",
            code="out_of_memory",
        )
    return frame


def encode_tuple(columns: Any, encoding: str = "utf-8") -> bytes:
    """Make the bytes of a tuple: an int16 count of columns, then for each its kind and value.

    The kind is a byte. The kinds "t" and "b" are followed by an int32 length and that many bytes.

    Parameters
    ----------
    columns : TupleData or iterable
        A decoded tuple, or one item for each column: None is NULL, :data:`UNCHANGED` is an
        unchanged TOAST value, str is a value in text format, bytes are a value in binary format. A
        pair of kind and value, such as ``("t", b"1")``, sets the format.
    encoding : str
        The encoding of values that are given as str.

    Raises
    ------
    PgOutputError
        A column is none of these, or there are too many columns.
    """
    return _tuple(columns, encoding, "the tuple")


_TUPLE_KINDS = {"N": "new_tuple", "K or O": "old_tuple", "optional K or O": "optional_old_tuple"}
"""The kinds of fields in `LAYOUTS` that are no identifiers → the methods that write them."""


class _FrameWriter:
    """The fields of a frame, with a method for each kind of field that returns its bytes.

    :class:`.wire.Cursor` has the methods of the same names that read the fields.
    """

    __slots__ = ("encoding", "fields", "seen", "tag")

    def __init__(self, tag: str, encoding: str, fields: Mapping[str, Any]) -> None:
        self.tag = tag
        self.encoding = encoding
        self.fields = fields
        self.seen: set[str] = set()

    def value(self, name: str) -> Any:
        """The value of the field `name`, which must be given."""
        try:
            value = self.fields[name]
        except KeyError:
            raise TypeError(f"a {self.tag!r} frame needs the field {name!r}") from None
        self.seen.add(name)
        return value

    def optional(self, name: str) -> Any:
        """The value of the field `name`; None if it was left out."""
        self.seen.add(name)
        return self.fields.get(name)

    def finish(self) -> None:
        """Raise a TypeError if a field was given that the message does not have."""
        unknown = self.fields.keys() - self.seen
        if unknown:
            raise TypeError(f"a {self.tag!r} frame has no field {min(unknown)!r}")

    def where(self, name: str) -> str:
        """The field as error messages name it."""
        return f"{name} of a {self.tag!r} frame"

    def uint8(self, name: str) -> bytes:
        """An unsigned byte."""
        return _integer("uint8", self.value(name), self.where(name))

    def char(self, name: str) -> bytes:
        """A character as the byte that encodes it."""
        value = self.value(name)
        if not isinstance(value, str) or len(value) != 1 or ord(value) > 0xFF:
            _refuse(value, self.where(name), "one character up to U+00FF")
        return value.encode("latin-1")

    def bool(self, name: str) -> bytes:
        """A flag as a byte, 1 or 0."""
        return b"\1" if self.value(name) else b"\0"

    def uint32(self, name: str) -> bytes:
        """An unsigned 32-bit integer: an OID or xid."""
        return _integer("uint32", self.value(name), self.where(name))

    def lsn(self, name: str) -> bytes:
        """An unsigned 64-bit integer."""
        return _integer("lsn", self.value(name), self.where(name))

    def time(self, name: str) -> bytes:
        """A signed 64-bit integer: microseconds since 2000-01-01."""
        return _integer("time", self.value(name), self.where(name))

    def stream_xid(self, name: str) -> bytes:
        """The xid, which only frames inside stream chunks have; no bytes for None."""
        value = self.optional(name)
        return b"" if value is None else _integer("uint32", value, self.where(name))

    def optional_lsn(self, name: str) -> bytes:
        """The LSN of a Stream Abort; no bytes for None."""
        value = self.optional(name)
        if (value is None) != (self.fields.get("abort_time") is None):
            raise PgOutputError(
                "abort_lsn and abort_time of an 'A' frame go together", code="unfit_input"
            )
        return b"" if value is None else _integer("lsn", value, self.where(name))

    def optional_time(self, name: str) -> bytes:
        """The time of a Stream Abort; no bytes for None."""
        value = self.optional(name)
        return b"" if value is None else _integer("time", value, self.where(name))

    def string(self, name: str) -> bytes:
        """A string that ends with a NUL byte."""
        return _string(self.value(name), self.encoding, self.where(name))

    def columns(self, name: str) -> bytes:
        """The columns of a Relation, after their number (int16)."""
        columns = list(self.value(name))
        parts = [_integer("count", len(columns), f"the number of {self.where(name)}")]
        for i, column in enumerate(columns):
            where = f"column {i} of an 'R' frame"
            try:
                flags, text, type_id, modifier = column
            except (TypeError, ValueError):
                _refuse(column, where, ", ".join(Column._fields))
            parts += [
                _integer("uint8", flags, f"the flags of {where}"),
                _string(text, self.encoding, f"the name of {where}"),
                _integer("uint32", type_id, f"the type OID of {where}"),
                _integer("int32", modifier, f"the type modifier of {where}"),
            ]
        return b"".join(parts)

    def truncate_count(self, name: str) -> bytes:
        """The number of relations of a Truncate; the options lie between it and the OIDs."""
        return _integer("int32", len(self.value("relation_ids")), self.where(name))

    def oids(self, name: str) -> bytes:
        """The OIDs of a Truncate."""
        where = self.where(name)
        return b"".join([_integer("uint32", oid, where) for oid in self.value(name)])

    def sized_bytes(self, name: str) -> bytes:
        """An int32 length, then that many bytes."""
        value = self.value(name)
        if not isinstance(value, (bytes, bytearray, memoryview)):
            _refuse(value, self.where(name), "bytes")
        content = bytes(value)
        return _integer("int32", len(content), f"the length of {self.where(name)}") + content

    def new_tuple(self, name: str) -> bytes:
        """The marker "N" and a tuple."""
        return b"N" + _tuple(self.value(name), self.encoding, self.where(name))

    def old_tuple(self, name: str) -> bytes:
        """The marker "K" or "O", which is `old_kind`, and a tuple."""
        kind: str = self.value("old_kind")
        if kind not in ("K", "O"):
            _refuse(kind, self.where("old_kind"), "'K' or 'O'")
        return kind.encode("ascii") + _tuple(self.value(name), self.encoding, self.where(name))

    def optional_old_tuple(self, name: str) -> bytes:
        """The same as :meth:`old_tuple`; no bytes if both fields are None."""
        if self.optional(name) is None and self.optional("old_kind") is None:
            return b""
        return self.old_tuple(name)


# --- parts of frames -----------------------------------------------------------------------------


def _refuse(value: object, where: str, expected: str) -> NoReturn:
    shown = repr(value)
    if len(shown) > 60:
        shown = f"{shown[:60]}…"
    raise PgOutputError(f"{where}: expected {expected}, not {shown}", code="unfit_input")


def _integer(kind: str, value: Any, where: str) -> bytes:
    form, least, most = _INTEGERS[kind]
    try:
        return form.pack(operator.index(value))
    except (TypeError, struct.error):
        _refuse(value, where, f"an integer from {least} to {most}")


def _string(value: Any, encoding: str, where: str) -> bytes:
    if not isinstance(value, str):
        _refuse(value, where, "str")
    try:
        encoded = value.encode(encoding, "surrogateescape")
    except UnicodeEncodeError:
        _refuse(value, where, f"text that {encoding} has characters for")
    if b"\0" in encoded:
        _refuse(value, where, "text without NUL, which ends it")
    return encoded + b"\0"


def _tuple(columns: Any, encoding: str, where: str) -> bytes:
    if hasattr(columns, "raws"):
        columns = [(columns.kind(i), raw) for i, raw in enumerate(columns.raws())]
    elif isinstance(columns, (str, bytes, Mapping)) or not isinstance(columns, Iterable):
        _refuse(columns, where, "a sequence with one item for each column")
    parts = [_column(value, encoding, where, i) for i, value in enumerate(columns)]
    count = _integer("count", len(parts), f"the number of columns of {where}")
    return count + b"".join(parts)


def _column(given: Any, encoding: str, where: str, i: int) -> bytes:
    """The bytes of a column: its kind and, unless NULL or unchanged, its length and value."""
    if given is None:
        return b"n"
    if given is UNCHANGED:
        return b"u"
    where = f"column {i} of {where}"
    kind, value = "t" if isinstance(given, str) else "b", given
    if isinstance(given, tuple) and len(given) == 2:
        kind, value = given
        if (kind == "n" and value is None) or (kind == "u" and value is UNCHANGED):
            return b"n" if value is None else b"u"
    if kind == "t" and isinstance(value, str):
        try:
            value = value.encode(encoding, "surrogateescape")
        except UnicodeEncodeError:
            _refuse(given, where, f"text that {encoding} has characters for")
    if kind not in ("t", "b") or not isinstance(value, (bytes, bytearray, memoryview)):
        _refuse(given, where, "None, UNCHANGED, str, bytes, or a pair of 't' or 'b' and a value")
    data = bytes(value)
    marker = b"t" if kind == "t" else b"b"
    return marker + _integer("int32", len(data), f"the length of {where}") + data
