"""Many frames at once, in plain Python: what they come in, and their headers and slices as arrays.

The twin of ``_frames.pyx``.
"""

from __future__ import annotations

import operator
import struct
from typing import TYPE_CHECKING, Any

import numpy as np

from .._pure import Begin, Commit, Delete, Insert, Update, decode
from ..copydata import XLOG_DATA, XLOG_DATA_TAG
from ..errors import DecodeError, frame_bytes
from ..messages import Message, Relation
from ..settings import make_settings
from ..state import StreamState
from .arrays import (
    FrameBatch,
    array_of,
    check_offsets,
    null_frame,
    pyarrow,
    refuse_input,
    refuse_offset,
)

if TYPE_CHECKING:
    from collections.abc import Callable

_head = struct.Struct("=BBHHHIIQ").pack
_slice = struct.Struct("=II").pack
_begin = struct.Struct("=qQqII").pack
_commit = struct.Struct("=qQQqB7x").pack


_KINDS = {ord("n"): 0, ord("u"): 1, ord("t"): 2, ord("b"): 3}


# --- where frames come from ----------------------------------------------------------------------


class _Packed:
    """Frames in one buffer."""

    def __init__(self, data: Any, offsets: object) -> None:
        try:
            self._bytes = np.frombuffer(data, np.uint8)
        except (AttributeError, BufferError, ValueError) as error:
            raise TypeError(f"frames must lie in a contiguous buffer: {error}") from None
        self._offsets = checked = check_offsets(offsets)
        before = np.concatenate(([0], checked[:-1]))
        wrong = np.flatnonzero((checked < before) | (checked > len(self._bytes)))
        if len(wrong):
            first = wrong[0]
            refuse_offset(first, checked[first], before[first], len(self._bytes))

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, i: int) -> bytes:
        return self._bytes[self._offsets[i] : self._offsets[i + 1]].tobytes()


class _Arrow:
    """Frames in an array of pyarrow; `before`: frames that come before these in the stream."""

    def __init__(self, array: Any, before: int) -> None:
        pa = pyarrow()
        if isinstance(array.type, pa.BaseExtensionType):
            array = array.storage
        if array.type not in (pa.binary(), pa.large_binary(), pa.binary_view()):
            refuse_input(str(array.type))
        array.validate(full=True)
        if array.null_count:
            null_frame(before + array.is_null().to_pylist().index(True))
        self._array = array

    def __len__(self) -> int:
        return len(self._array)

    def __getitem__(self, i: int) -> bytes:
        frame: bytes = self._array[i].as_py()
        return frame


Piece = _Packed | _Arrow | tuple[bytes, ...]


def pieces_of(data: Any, offsets: Any) -> list[Piece]:
    """The frames in `data`, as of :func:`decode_batch`."""
    if isinstance(data, FrameBatch):
        if offsets is not None:
            raise TypeError("a decode_batch() result has its offsets")
        return data.pieces
    if offsets is not None:
        return [_Packed(data, offsets)]
    if hasattr(data, "__arrow_c_array__"):
        return [_Arrow(pyarrow().array(data), 0)]
    if hasattr(data, "__arrow_c_stream__"):
        pieces: list[Piece] = []
        before = 0
        for chunk in pyarrow().chunked_array(data).chunks:
            pieces.append(_Arrow(chunk, before))
            before += len(chunk)
        return pieces
    refuse_input(data)
    return [tuple([frame_bytes(frame) for frame in data])]


# --- headers and slices --------------------------------------------------------------------------


def decode_batch(data: Any, offsets: Any = None, in_stream: int | bool = False) -> FrameBatch:
    """As :func:`pgoutput_fast.decode_batch`, which calls it."""
    pieces = pieces_of(data, offsets)
    state = StreamState(make_settings())
    state.open_xid = None if in_stream is False else _xid(in_stream)
    # A chunk that was open before may be of an xid that nobody told.
    opened: Any = in_stream if isinstance(in_stream, bool) else state.open_xid
    heads, slices, begins, commits = bytearray(), bytearray(), bytearray(), bytearray()
    messages: dict[int, Message] = {}
    index = 0
    for piece in pieces:
        for i in range(len(piece)):
            frame = piece[i]
            try:
                state.check_order(frame)
                message = decode(frame, state.open_xid is not None)
            except DecodeError as error:
                error.frame = index
                raise
            first_slice = len(slices) >> 3
            relation_id = old_kind = old_columns = new_columns = 0
            xid = getattr(message, "xid", None) or 0
            tag = message.tag
            if isinstance(message, (Insert, Update, Delete)):
                relation_id = message.relation_id
                if not isinstance(message, Insert) and message.old_kind is not None:
                    old_kind = ord(message.old_kind)
                    old_columns = _add_slices(slices, frame, message._old)
                if not isinstance(message, Delete):
                    new_columns = _add_slices(slices, frame, message._new)
            elif isinstance(message, Begin):
                begins += _begin(index, message.final_lsn, message.commit_time, xid, 0)
                state.xid = xid
            elif isinstance(message, Commit):
                commits += _commit(
                    index, message.commit_lsn, message.end_lsn, message.commit_time, message.flags
                )
                state.xid = None
            else:
                messages[index] = message
                if isinstance(message, Relation):
                    relation_id = message.relation_id
                elif tag == "S":
                    state.open_xid = opened = xid
                elif tag == "E":
                    state.open_xid = None
                elif tag == "b":
                    state.xid = xid
                elif tag == "P":
                    state.xid = None
            heads += _head(
                ord(tag), old_kind, old_columns, new_columns, 0, relation_id, xid, first_slice
            )
            index += 1
    return FrameBatch(
        pieces,
        array_of("heads", heads),
        array_of("slices", slices),
        array_of("begins", begins),
        array_of("commits", commits),
        messages,
        False if state.open_xid is None else opened,
    )


def _xid(in_stream: int) -> int:
    xid = operator.index(in_stream)
    if not 0 <= xid <= 0xFFFFFFFF:
        raise OverflowError(f"in_stream={xid}: no xid is that large, or negative")
    return xid


def _add_slices(slices: bytearray, frame: bytes, positions: Any) -> int:
    """Append the slices of a tuple, as the walk found them; the number of its columns."""
    start, *ends = positions
    for end in ends:
        kind = _KINDS[frame[start]]
        offset = start + (5 if kind >= 2 else 1)
        slices += _slice(offset, end - offset << 2 | kind)
        start = end
    return len(ends)


# --- what libpq has received ---------------------------------------------------------------------


def take_copy_data(
    get_copy_data: Callable[[int], tuple[int, memoryview]],
    frames: list[tuple[int, int, int, bytes]],
    most: int,
) -> tuple[int, int, int, memoryview | None]:
    """Take XLogData from libpq until there is something else, or so many bytes were taken.

    As of the compiled twin.
    """
    size = received = 0
    while True:
        length, data = get_copy_data(1)
        if length < XLOG_DATA.size or data[0] != XLOG_DATA_TAG:
            return size, received, length, data
        lsn, wal_end, send_time = XLOG_DATA.unpack_from(data)
        # A slice of bytes costs less than one of a memoryview.
        frames.append((lsn, wal_end, send_time, data.tobytes()[XLOG_DATA.size :]))
        size += length
        if lsn > received:
            received = lsn
        if size >= most:
            return size, received, length, None
