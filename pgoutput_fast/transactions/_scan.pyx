# cython: annotation_typing=False, cdivision=True
"""Find transactions and relations in a buffer of frames: the twin of ``_pure_scan.py``."""

from __future__ import annotations

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytearray cimport PyByteArray_AS_STRING, PyByteArray_Resize
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy

import numpy as np

from pgoutput_fast._loads cimport load_uint32, load_uint64
from pgoutput_fast.protocol._wire cimport (
    BEGIN_LENGTH, BEGIN_XID, COMMIT_END_LSN, COMMIT_LENGTH, COMMIT_LSN, COMMIT_TIME, ROW_MARKER,
    ROW_RELATION_ID, TRUNCATE_RELATION_IDS, XID, XID_SIZE,
)
from pgoutput_fast.columnar._input cimport Frame, Piece, pieces_of, take_frame

cdef enum:
    # Numbers per transaction in the result of `whole`.
    FIELDS = 5


@cython.final
cdef class _Frames:
    """The buffers of frames and of their offsets, locked while this object lives."""

    cdef Py_buffer data, ends
    cdef bint has_data, has_ends
    cdef const uint8_t *at
    cdef const int64_t *offsets
    cdef Py_ssize_t count

    def __cinit__(self, data, offsets):
        PyObject_GetBuffer(data, &self.data, PyBUF_SIMPLE)
        self.has_data = True
        PyObject_GetBuffer(offsets, &self.ends, PyBUF_SIMPLE)
        self.has_ends = True
        self.at = <const uint8_t *> self.data.buf
        self.offsets = <const int64_t *> self.ends.buf
        self.count = self.ends.len // 8 - 1

    def __dealloc__(self):
        if self.has_data:
            PyBuffer_Release(&self.data)
        if self.has_ends:
            PyBuffer_Release(&self.ends)


cdef inline bint is_row(uint8_t tag) noexcept:
    return tag == c'I' or tag == c'U' or tag == c'D' or tag == c'T'


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
    cdef Piece piece
    cdef Frame frame
    cdef Py_ssize_t i
    cdef int64_t size
    cdef bytes copy
    cdef int64_t *to
    pieces = pieces_of(data, offsets)
    if offsets is not None:
        return [(memoryview(data).cast("B"), np.ascontiguousarray(offsets, np.int64))]
    found = []
    for one in pieces:
        piece = one
        ends = bytearray(8 * (piece.source.count + 1))
        to = <int64_t *> <char *> ends
        size = 0
        for i in range(piece.source.count):
            take_frame(&piece.source, i, &frame)
            to[i] = size
            size += frame.length
        to[piece.source.count] = size
        copy = PyBytes_FromStringAndSize(NULL, size)
        for i in range(piece.source.count):
            take_frame(&piece.source, i, &frame)
            memcpy(PyBytes_AS_STRING(copy) + to[i], frame.at, frame.length)
        found.append((copy, np.frombuffer(ends, np.int64)))
    return found


def whole(data: Any, offsets: Any, Py_ssize_t start) -> tuple[Any, int]:
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
    cdef _Frames frames = _Frames(data, offsets)
    cdef Py_ssize_t i = start, begin
    cdef const uint8_t *frame
    cdef int64_t length
    cdef Py_ssize_t count = 0, room = 0
    cdef uint64_t *to = NULL
    cdef bytearray found = bytearray()
    while i < frames.count:
        frame = frames.at + frames.offsets[i]
        if frames.offsets[i + 1] - frames.offsets[i] != BEGIN_LENGTH or frame[0] != c'B':
            break
        begin = i
        i += 1
        while i < frames.count:
            length = frames.offsets[i + 1] - frames.offsets[i]
            if length == 0 or not is_row(frames.at[frames.offsets[i]]):
                break
            i += 1
        if i == frames.count or length != COMMIT_LENGTH or frames.at[frames.offsets[i]] != c'C':
            i = begin
            break
        if count == room:
            room = 2 * room + 64
            PyByteArray_Resize(found, 8 * FIELDS * room)
            to = <uint64_t *> PyByteArray_AS_STRING(found)
        to[FIELDS * count] = begin
        to[FIELDS * count + 1] = load_uint32(frame + BEGIN_XID)
        frame = frames.at + frames.offsets[i]
        to[FIELDS * count + 2] = load_uint64(frame + COMMIT_LSN)
        to[FIELDS * count + 3] = load_uint64(frame + COMMIT_END_LSN)
        to[FIELDS * count + 4] = load_uint64(frame + COMMIT_TIME)
        count += 1
        i += 1
    return np.frombuffer(found, np.uint64, FIELDS * count).reshape(count, FIELDS), i


def scan(
    data: Any, offsets: Any, Py_ssize_t start, bint in_chunk
) -> tuple[list[tuple[int, int]], int]:
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
    cdef _Frames frames = _Frames(data, offsets)
    cdef list marks = []
    cdef Py_ssize_t i
    cdef int64_t at, length
    cdef uint8_t tag
    cdef uint32_t xid, before = 0
    cdef bint has_before = False
    for i in range(start, frames.count):
        at = frames.offsets[i]
        length = frames.offsets[i + 1] - at
        tag = frames.at[at] if length > 0 else 0
        if not is_row(tag):
            marks.append((i, tag))
            if tag == c'C' or tag == c'S' or tag == c'E':
                return marks, i + 1
        elif in_chunk:
            if length < XID + XID_SIZE:
                marks.append((i, tag))
                has_before = False
                continue
            xid = load_uint32(frames.at + at + XID)
            if xid != before or not has_before:
                marks.append((i, tag))
                before = xid
                has_before = True
    return marks, frames.count


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
    cdef _Frames frames = _Frames(data, offsets)
    cdef dict found = {}
    cdef Py_ssize_t i
    cdef int64_t at, end
    cdef uint8_t tag
    cdef uint32_t relation_id, before = 0
    cdef bint has_before = False
    for i in range(frames.count):
        at, end = frames.offsets[i], frames.offsets[i + 1]
        tag = frames.at[at] if at < end else 0
        if not is_row(tag):
            continue
        if tag != c'T':
            end = min(end, at + ROW_MARKER)
        at += TRUNCATE_RELATION_IDS if tag == c'T' else ROW_RELATION_ID
        while at + 4 <= end:
            relation_id = load_uint32(frames.at + at)
            at += 4
            # Most rows follow a row of the same relation, and need no lookup in the dict.
            if has_before and relation_id == before:
                continue
            before, has_before = relation_id, True
            if relation_id in relation_ids and relation_id not in found:
                found[relation_id] = i
    return list(found.items())
