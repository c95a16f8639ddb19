"""Decode the headers of many frames, and the offsets of their columns, into arrays.

The twin of ``_headers.pyx``.
"""

from __future__ import annotations

import operator
import struct
from typing import Any

from ..decoding._pure import Begin, Commit, Delete, Insert, Update, decode
from ..decoding.state import StreamState
from ..errors import DecodeError
from ..protocol.messages import Message, Relation
from ..protocol.wire import VALUE_HEAD
from ..settings import make_settings
from ._pure_input import pieces_of
from .arrays import FrameBatch, array_of

_head = struct.Struct("=BBHHHIIQ").pack
_slice = struct.Struct("=II").pack
_begin = struct.Struct("=qQqII").pack
_commit = struct.Struct("=qQQqB7x").pack

_KINDS = {ord("n"): 0, ord("u"): 1, ord("t"): 2, ord("b"): 3}


def decode_batch(data: Any, offsets: Any = None, in_stream: int | bool = False) -> FrameBatch:
    """Implement :func:`pgoutput_fast.decode_batch`, which documents arguments and errors."""
    pieces = pieces_of(data, offsets)
    state = StreamState(make_settings())
    state.open_xid = None if in_stream is False else _xid(in_stream)
    # in_stream=True says that a stream chunk was open before, but not the xid of its transaction.
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
    """Append a slice for each column of a tuple, and return the number of columns.

    `positions` are those of the columns' kind bytes in the frame, and the end of the tuple.
    """
    start, *ends = positions
    for end in ends:
        kind = _KINDS[frame[start]]
        offset = start + (VALUE_HEAD if kind >= 2 else 1)
        slices += _slice(offset, end - offset << 2 | kind)
        start = end
    return len(ends)
