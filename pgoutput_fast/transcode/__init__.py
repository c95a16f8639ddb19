"""Make many frames from other bytes: whole buffers at once, without a Python object for each row.

:func:`inserts_of_copy` makes Insert frames from rows that COPY sent in binary format.
:func:`without_xids` converts frames of stream chunks to the form of protocol version 1. Both return
a buffer and offsets into it, as :func:`pgoutput_fast.decode_batch` takes them.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, NamedTuple

from .._impl import twin
from ..columnar.arrays import check_offsets, check_rising
from ..errors import MAX_FRAME_LENGTH, PgOutputError
from ..protocol.encode import encode_fields
from ..protocol.wire import LAYOUTS
from .faults import refuse_copy

if TYPE_CHECKING:
    import numpy as np

__all__ = ["InsertFrames", "PackedFrames", "inserts_of_copy", "without_xids"]

COPY_SIGNATURE = b"PGCOPY\n\xff\r\n\0"
"""The first bytes of COPY's binary format; flags and a header extension with its length follow."""

_flags_and_length = struct.Struct(">Ii")

_NO_PLACE = 0xFF

_XID_LENGTHS = bytearray([_NO_PLACE] * 256)
"""For each tag the length of the xid that a frame has only inside a stream chunk."""
for _tag, _fields in LAYOUTS.items():
    if _fields[:1] == (("xid", "stream_xid"),):
        _XID_LENGTHS[ord(_tag)] = 4
_XID_LENGTHS[ord("O")] = 0  # an Origin has no xid there


class InsertFrames(NamedTuple):
    """Insert frames of the rows of a COPY.

    Fields: data (bytes), offsets (int64[n + 1], where each frame begins and the last one ends),
    consumed (how many bytes of the input are in the frames: a row that is cut off at the end is
    left for the next call), ended (whether COPY's trailer was reached).
    """

    data: bytes
    offsets: np.ndarray[Any, Any]
    consumed: int
    ended: bool


class PackedFrames(NamedTuple):
    """Frames in one buffer.

    Fields: data (bytes), offsets (int64[n + 1]).
    """

    data: bytes
    offsets: np.ndarray[Any, Any]


def inserts_of_copy(
    data: Any, relation_id: int, formats: str, *, xid: int | None = None, header: bool = False
) -> InsertFrames:
    """Insert frames of the rows of ``COPY … TO STDOUT (FORMAT binary)``.

    Parameters
    ----------
    data : buffer
        Rows, the last of which may be cut off, and at their end COPY's trailer.
    relation_id : int
        The relation's OID.
    formats : str
        "b" or "t" for each column: the format, binary or text, that the frames state for its
        values. The bytes stay as they are.
    xid : int, optional
        With it the frames have this xid, as frames inside a stream chunk do.
    header : bool
        Whether `data` begins with COPY's file header. It may be cut off too: then nothing is
        consumed, and the next call must be given the header again.

    Raises
    ------
    PgOutputError
        The bytes are no rows of so many columns in COPY's binary format.
    TypeError
        `data` is no contiguous buffer, or `formats` no str.
    """
    if not isinstance(formats, str):
        raise TypeError(f"formats must be a str, not {type(formats).__name__}")
    if formats.strip("bt"):
        raise PgOutputError(
            f"{formats!r} is not 'b' or 't' for each column", code="bad_option", parameter="formats"
        )
    _size_of(data)
    width = len(formats)
    # The frame of a row of NULLs ends with a byte for each column; what comes before is the head.
    nulls = encode_fields("I", xid=xid, relation_id=relation_id, new=[None] * width)
    head = nulls[: len(nulls) - width]
    start = 0
    if header:
        found = _header_length(data)
        if found is None:
            return InsertFrames(b"", _offsets(bytes(8)), 0, False)
        start = found
    made, offsets, consumed, ended = twin("transcode._bulk").copy_rows(
        data, start, head, formats.encode("ascii")
    )
    return InsertFrames(made, _offsets(offsets), consumed, ended)


def without_xids(data: Any, offsets: Any) -> PackedFrames:
    """Turn frames from inside stream chunks into those of protocol version 1, without xids.

    Parameters
    ----------
    data : buffer
    offsets : array of int
        Where each frame begins and the last one ends, n + 1 for n frames.

    Raises
    ------
    DecodeError
        A frame has no xid that could be cut out, or its message cannot be inside a stream chunk;
        `frame` is its index.
    TypeError, ValueError
        `data` is no contiguous buffer, or the offsets fall or leave it.
    """
    checked = check_offsets(offsets)
    check_rising(checked, _size_of(data))
    made, ends = twin("transcode._bulk").cut_xids(data, checked, bytes(_XID_LENGTHS))
    return PackedFrames(made, _offsets(ends))


def _offsets(memory: bytes) -> np.ndarray[Any, Any]:
    import numpy as np

    return np.frombuffer(memory, np.int64)


def _size_of(data: Any) -> int:
    """Bytes of a buffer.

    Raises
    ------
    TypeError
        `data` is no buffer, or not a contiguous one.
    """
    with memoryview(data) as view:
        if not view.c_contiguous:
            raise TypeError("data must be a contiguous buffer")
        return view.nbytes


def _header_length(data: Any) -> int | None:
    """Bytes of the file header at the start of `data`, None where it is cut off."""
    with memoryview(data) as view, view.cast("B") as flat:
        size = len(COPY_SIGNATURE)
        fixed = size + _flags_and_length.size
        found = bytes(flat[:fixed])
        if found[:size] != COPY_SIGNATURE[: len(found)]:
            refuse_copy("signature", 0, found[:size])
        if len(found) < fixed:
            return None
        flags, length = _flags_and_length.unpack_from(found, size)
        # PostgreSQL's documentation: a reader ignores flags of the lower 16 bits that it does not
        # know, and stops at unknown ones of the upper 16 bits.
        if flags >> 16:
            refuse_copy("flags", size, flags)
        if not 0 <= length <= MAX_FRAME_LENGTH:
            refuse_copy("extension", size + 4, length)
        return fixed + length if fixed + length <= len(flat) else None
