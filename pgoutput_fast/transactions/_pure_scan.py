"""Find transactions and relations in a buffer of frames: the twin of ``_scan.pyx``."""

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
    """Return frames as buffers with offsets.

    Parameters
    ----------
    data, offsets
        Frames, as :func:`pgoutput_fast.decode_batch` takes them.

    Returns
    -------
    list of (buffer, int64[n + 1])
        Frame i of a buffer lies from offset i to offset i + 1, in bytes. With `offsets`, the frames
        are not copied.
    """
    if offsets is not None:
        pieces_of(data, offsets)  # which refuses wrong arguments
        return [(memoryview(data).cast("B"), np.ascontiguousarray(offsets, np.int64))]
    buffers = []
    for piece in pieces_of(data, None):
        frames = [piece[i] for i in range(len(piece))]
        ends = np.cumsum([0, *map(len, frames)], dtype=np.int64)
        buffers.append((b"".join(frames), ends))
    return buffers


def whole(data: Any, offsets: Any, start: int) -> tuple[Any, int]:
    """Find the complete transactions from frame `start` on that contain only rows.

    Parameters
    ----------
    data : buffer
    offsets : int64[n + 1]
    start : int
        Index of the first frame. It must stand outside transactions.

    Returns
    -------
    uint64[k, 5]
        For each transaction: the index of its Begin, xid, commit LSN, end LSN, and commit time in
        microseconds since 2000-01-01. The commit time is an int64 stored as uint64.
    int
        Index of the first frame behind these transactions.
    """
    transactions: list[tuple[int, ...]] = []
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
        transactions.append((start, *_read_begin(begin), commit_lsn, end_lsn, time & (1 << 64) - 1))
        start = i + 1
    return np.array(transactions, np.uint64).reshape(len(transactions), 5), start


def scan(data: Any, offsets: Any, start: int, in_chunk: bool) -> tuple[list[tuple[int, int]], int]:
    """List the frames that are not rows, up to the next end of a transaction or stream chunk.

    Rows are Insert, Update, Delete and Truncate.

    Parameters
    ----------
    data : buffer
    offsets : int64[n + 1]
    start : int
        Index of the first frame.
    in_chunk : bool
        Whether the first frame stands in a stream chunk.

    Returns
    -------
    list of (int, int)
        Index and tag of each frame that is not a row; the tag of an empty frame is 0. In a stream
        chunk also each row whose xid differs from the row before, and each row that is too short to
        have an xid.
    int
        Index of the frame behind the first Commit, Stream Start or Stream Stop; without one, the
        number of frames.
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
    """Find the first row of each relation, in frames outside stream chunks.

    Parameters
    ----------
    data : buffer
    offsets : int64[n + 1]
    relation_ids : collection of int
        OIDs of the relations to find.

    Returns
    -------
    list of (int, int)
        OID of a relation and index of its first row, in the order of the frames. A Truncate is a
        row of each of its relations.
    """
    first_rows: dict[int, int] = {}
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
                first_rows.setdefault(relation_id, i)
    return list(first_rows.items())
