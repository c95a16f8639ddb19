"""Look through frames that lie in one buffer, in plain Python. The twin of ``_scan.pyx``."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from ..columnar._pure_input import pieces_of
from ..protocol.wire import RELATION_ID, XID_SIZE, fields_reader, offset_of

_ROWS = frozenset(b"IUDT")
_BEGIN_LENGTH, _COMMIT_LENGTH = offset_of("B", "end"), offset_of("C", "end")
_XID = offset_of("I", "xid", in_stream=True)
_RELATION_ID = slice(RELATION_ID, RELATION_ID + 4)
_TRUNCATED = offset_of("T", "relation_ids")

_read_begin = fields_reader("B", "xid")
_read_commit = fields_reader("C", "commit_lsn", "end_lsn", "commit_time")


def packed(data: Any, offsets: Any) -> list[tuple[Any, Any]]:
    """Frames as :func:`pgoutput_fast.decode_batch` takes them, as buffers with their offsets.

    Returns
    -------
    list of (buffer, int64[n + 1])
        Frames that lie in one buffer already are not copied.
    """
    if offsets is not None:
        pieces_of(data, offsets)  # which refuses wrong arguments
        return [(memoryview(data).cast("B"), np.ascontiguousarray(offsets, np.int64))]
    found = []
    for piece in pieces_of(data, None):
        frames = [piece[i] for i in range(len(piece))]
        ends = np.cumsum([0, *map(len, frames)], dtype=np.int64)
        found.append((b"".join(frames), ends))
    return found


def whole(data: Any, offsets: Any, start: int) -> tuple[Any, int]:
    """The whole transactions, one behind the other, that are nothing but rows.

    Parameters
    ----------
    data : buffer
    offsets : int64[n + 1]
    start : int
        Index of the first frame to look at, which stands outside of transactions.

    Returns
    -------
    uint64[k, 5]
        Of each transaction the index of its Begin, its xid, commit LSN, end LSN, and its commit
        time, which is a signed number.
    int
        Index of the first frame that is not one of these transactions.
    """
    found: list[tuple[int, ...]] = []
    ends = offsets.tolist()
    count = len(ends) - 1
    while start < count:
        if ends[start + 1] - ends[start] != _BEGIN_LENGTH or data[ends[start]] != ord("B"):
            break
        i = start + 1
        while i < count and ends[i] < ends[i + 1] and data[ends[i]] in _ROWS:
            i += 1
        if i == count or ends[i + 1] - ends[i] != _COMMIT_LENGTH or data[ends[i]] != ord("C"):
            break
        begin = bytes(data[ends[start] : ends[start + 1]])
        commit_lsn, end_lsn, time = _read_commit(bytes(data[ends[i] : ends[i + 1]]))
        found.append((start, *_read_begin(begin), commit_lsn, end_lsn, time & (1 << 64) - 1))
        start = i + 1
    return np.array(found, np.uint64).reshape(len(found), 5), start


def scan(data: Any, offsets: Any, start: int, in_chunk: bool) -> tuple[list[tuple[int, int]], int]:
    """Where frames are something else than rows.

    Parameters
    ----------
    data : buffer
    offsets : int64[n + 1]
    start : int
        Index of the first frame to look at.
    in_chunk : bool
        Whether it stands in a stream chunk.

    Returns
    -------
    list of (int, int)
        Index and tag (0 of an empty frame) of each frame that is no row. In a stream chunk also of
        each row with another xid than the row before it, and of rows that are too short for one.
    int
        Where it ended: behind the first frame that ends a transaction, or begins or ends a stream
        chunk; or behind the last.
    """
    marks = []
    before = b""
    for i in range(start, len(offsets) - 1):
        at, end = int(offsets[i]), int(offsets[i + 1])
        tag = data[at] if at < end else 0
        if tag not in _ROWS:
            marks.append((i, tag))
            if tag in b"CSE":
                return marks, i + 1
        elif in_chunk:
            xid = bytes(data[at + _XID : min(at + _XID + XID_SIZE, end)])
            if xid != before or len(xid) < XID_SIZE:
                marks.append((i, tag))
                before = xid
    return marks, len(offsets) - 1


def first_uses(data: Any, offsets: Any, relation_ids: Collection[int]) -> list[tuple[int, int]]:
    """Which relations have rows, in frames as they are outside of stream chunks.

    Parameters
    ----------
    data : buffer
    offsets : int64[n + 1]
    relation_ids : collection of int
        The relations that are looked for.

    Returns
    -------
    list of (int, int)
        Relation and index of its first frame, in the order of the frames.
    """
    found: dict[int, int] = {}
    for i in range(len(offsets) - 1):
        at, end = int(offsets[i]), int(offsets[i + 1])
        if at == end or data[at] not in _ROWS:
            continue
        frame = bytes(data[at:end])
        step = slice(_TRUNCATED, end - at) if frame[0] == ord("T") else _RELATION_ID
        part = frame[step]
        for start in range(0, len(part) - 3, 4):
            relation_id = int.from_bytes(part[start : start + 4], "big")
            if relation_id in relation_ids:
                found.setdefault(relation_id, i)
    return list(found.items())
