"""Make Insert frames of rows of COPY, and cut xids out of frames, in plain Python.

The twin of ``_bulk.pyx``.
"""

from __future__ import annotations

import struct
from array import array
from typing import Any

from ..errors import MAX_FRAME_LENGTH
from .faults import refuse_copy, refuse_frame

_int16 = struct.Struct(">h").unpack_from
_int32 = struct.Struct(">i").unpack_from
_NULL = ord("n")


def copy_rows(data: Any, start: int, head: bytes, formats: bytes) -> tuple[bytes, bytes, int, bool]:
    """Make Insert frames of rows in COPY's binary format.

    Parameters
    ----------
    data : buffer
    start : int
        The byte of `data` at which the first row begins.
    head : bytes
        The beginning of each frame, up to the number of columns inclusive.
    formats : bytes
        For each column the kind byte of its values, "t" or "b".

    Returns
    -------
    bytes
        The frames.
    bytes
        Their offsets as int64[n + 1].
    int
        The byte of `data` behind the last complete row, or behind COPY's trailer.
    bool
        Whether COPY's trailer was reached.

    Raises
    ------
    PgOutputError
        A row is malformed, or its frame would be too long.
    """
    with memoryview(data) as view:
        source = view.tobytes()
    at = start
    made = bytearray()
    offsets = array("q", [0])
    while len(source) - at >= 2:
        count = _int16(source, at)[0]
        if count == -1:
            left = len(source) - at - 2
            if left:
                refuse_copy("end", at + 2, left)
            return bytes(made), offsets.tobytes(), at + 2, True
        if count != len(formats):
            refuse_copy("columns", at, count, expected=len(formats))
        row = _columns(source, at + 2, len(head), formats)
        if row is None:
            break
        columns, at = row
        made += head
        made += columns
        offsets.append(len(made))
    return bytes(made), offsets.tobytes(), at, False


def _columns(
    source: bytes, at: int, head_length: int, formats: bytes
) -> tuple[bytearray, int] | None:
    """The columns of a frame, and the byte at which their row ends; None if the row is cut off."""
    made = bytearray()
    for column, kind in enumerate(formats):
        if len(source) - at < 4:
            return None
        length = _int32(source, at)[0]
        if length == -1:
            made.append(_NULL)
            at += 4
            continue
        if length < 0:
            refuse_copy("length", at, length, column=column)
        if head_length + len(made) + 5 + length > MAX_FRAME_LENGTH:
            refuse_copy("frame", at, length, column=column)
        if len(source) - at - 4 < length:
            return None
        # COPY and frames have the same length field: copy it together with the value.
        made.append(kind)
        made += source[at : at + 4 + length]
        at += 4 + length
    return made, at


def cut_xids(data: Any, offsets: Any, lengths: bytes) -> tuple[bytes, bytes]:
    """Cut the xids out of frames.

    Parameters
    ----------
    data : buffer
    offsets : int64[n + 1]
    lengths : bytes
        For each tag the length of the xid behind it, in bytes. 255: frames with this tag are
        refused.

    Returns
    -------
    bytes
        The frames without their xids.
    bytes
        Their offsets as int64[n + 1].

    Raises
    ------
    DecodeError
        A frame is too short, or its tag is refused.
    """
    with memoryview(data) as view:
        source = view.tobytes()
    made = bytearray()
    ends = array("q", [0])
    begin = int(offsets[0])
    for index, end in enumerate(offsets[1:].tolist()):
        frame = source[begin:end]
        length = lengths[frame[0]] if frame else 0
        if len(frame) < 1 + length or length == 0xFF:
            refuse_frame(frame, index, length)
        made += frame[:1]
        made += frame[1 + length :]
        ends.append(len(made))
        begin = end
    return bytes(made), ends.tobytes()
