# cython: annotation_typing=False, cdivision=True
"""Going through frames that lie in one buffer, compiled. The twin of ``_pure_scan.py``."""

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
    # The numbers that `whole` gives for each transaction.
    FIELDS = 5


@cython.final
cdef class _Frames:
    """The buffers of frames and of their offsets, for as long as they are looked at."""

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
    """Frames as :func:`pgoutput_fast.decode_batch` takes them, as buffers with their offsets.

    Returns
    -------
    list of (buffer, int64[n + 1])
        Frames that lie in one buffer already are not copied.
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
            # Rows of one relation mostly follow each other, so that most need no look into a dict.
            if has_before and relation_id == before:
                continue
            before, has_before = relation_id, True
            if relation_id in relation_ids and relation_id not in found:
                found[relation_id] = i
    return list(found.items())
