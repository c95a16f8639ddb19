# cython: annotation_typing=False, cdivision=True
"""What stands beside each frame in a segment, compiled. The twin of ``_pure_annotate.py``."""

from __future__ import annotations

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memset

import numpy as np

from pgoutput_fast._loads cimport load_uint32, load_uint64
from pgoutput_fast.protocol._wire cimport (
    BEGIN_COMMIT_TIME, BEGIN_FINAL_LSN, BEGIN_LENGTH, BEGIN_XID, COMMIT_END_LSN, COMMIT_LSN,
    COMMIT_TIME, MESSAGE_LSN, MESSAGE_PREFIX, TRUNCATE_RELATION_COUNT, TRUNCATE_RELATION_IDS,
)

# The columns as a structure of arrays: the same names in the same order as in the twin.
_TYPES = (np.uint64, np.int64, np.uint32, np.int64, np.uint8)


cdef class _Buffers:
    """The memory of arrays, for as long as it is written to."""

    cdef Py_buffer views[7]
    cdef int count

    cdef void *add(self, object owner, int flags) except? NULL:
        PyObject_GetBuffer(owner, &self.views[self.count], flags)
        self.count += 1
        return self.views[self.count - 1].buf

    def __dealloc__(self):
        for i in range(self.count):
            PyBuffer_Release(&self.views[i])


# Where a stream is: the transaction that is open, and the end of the last one.
cdef struct Place:
    uint64_t lsn, end_lsn
    int64_t time, next_seq
    uint32_t xid
    bint is_open


# Go on by one frame, whose seq goes to `seq`. What is wrong with it; NULL if nothing is.
cdef const char *step(
    Place *place, uint8_t tag, const uint8_t *frame, int64_t length, int64_t *seq
) noexcept nogil:
    seq[0] = -1
    if tag == c'B':
        if place.is_open:
            return b"within a transaction"
        if length < BEGIN_LENGTH:
            return b"too short"
        place.lsn = load_uint64(frame + BEGIN_FINAL_LSN)
        place.time = <int64_t> load_uint64(frame + BEGIN_COMMIT_TIME)
        place.xid = load_uint32(frame + BEGIN_XID)
        if place.lsn < place.end_lsn:
            return b"of a transaction that was committed before what came already"
        place.next_seq = 0
        place.is_open = True
    elif tag == c'C':
        if not place.is_open:
            return b"without a Begin"
        if length < COMMIT_TIME:
            return b"too short"
        if load_uint64(frame + COMMIT_LSN) != place.lsn:
            return b"of another transaction than the Begin before it"
        place.end_lsn = load_uint64(frame + COMMIT_END_LSN)
        place.is_open = False
    elif tag == c'M' and not place.is_open:
        if length < MESSAGE_PREFIX:
            return b"too short"
        place.end_lsn = max(place.end_lsn, load_uint64(frame + MESSAGE_LSN))
    elif tag == c'R' or tag == c'Y':
        pass
    elif not place.is_open:
        return b"outside of a transaction"
    elif tag == c'I' or tag == c'U' or tag == c'D':
        seq[0] = place.next_seq
        place.next_seq += 1
    elif tag == c'T':
        if length < TRUNCATE_RELATION_IDS:
            return b"too short"
        # A negative count is a large one here, for which no frame is long enough.
        if load_uint32(frame + TRUNCATE_RELATION_COUNT) > (length - TRUNCATE_RELATION_IDS) // 4:
            return b"too short"
        seq[0] = place.next_seq
        place.next_seq += load_uint32(frame + TRUNCATE_RELATION_COUNT)
    elif tag != c'M' and tag != c'O':
        return b"not of protocol version 1"
    return NULL


def annotate(
    data: Any, offsets: Any, open_: tuple[int, int, int, int] | None, uint64_t end_lsn
) -> tuple[tuple[Any, ...], list[tuple[int, int]], Any, Any, int, tuple[int, str] | None]:
    """Go through frames of protocol version 1.

    Parameters
    ----------
    data : buffer
    offsets : int64[n + 1]
    open_ : (int, int, int, int) or None
        Commit LSN, commit time, xid and the next seq of the transaction that is open before the
        first frame.
    end_lsn : int
        The end of the last transaction before it.

    Returns
    -------
    tuple of arrays
        commit_lsn uint64[n], commit_time int64[n], xid uint32[n], seq int64[n], in which -1 stands
        for none, and within uint8[n]: whether the frame is one of a transaction.
    list of (int, int)
        Index and tag of each Relation and Type, and of each message outside of transactions.
    int64[k]
        Indices of the Commits.
    (int, int, int, int) or None
        The transaction that is open behind the last frame.
    int
        The end of the last transaction, or the LSN of a message behind it.
    (int, str) or None
        The first frame that is out of place or too short, and what is wrong with it; nothing behind
        it was looked at.
    """
    cdef _Buffers buffers = _Buffers()
    cdef Py_ssize_t i = 0, count = len(offsets) - 1, commits = 0
    columns = tuple([np.empty(count, type_) for type_ in _TYPES])
    ends = np.empty(count, np.int64)
    cdef const uint8_t *at = <const uint8_t *> buffers.add(data, PyBUF_SIMPLE)
    cdef const int64_t *starts = <const int64_t *> buffers.add(offsets, PyBUF_SIMPLE)
    cdef uint64_t *commit_lsn = <uint64_t *> buffers.add(columns[0], PyBUF_WRITABLE)
    cdef int64_t *commit_time = <int64_t *> buffers.add(columns[1], PyBUF_WRITABLE)
    cdef uint32_t *xid = <uint32_t *> buffers.add(columns[2], PyBUF_WRITABLE)
    cdef int64_t *seq = <int64_t *> buffers.add(columns[3], PyBUF_WRITABLE)
    cdef uint8_t *within = <uint8_t *> buffers.add(columns[4], PyBUF_WRITABLE)
    cdef int64_t[::1] commit_index = ends
    cdef list marks = []
    cdef Place place
    cdef uint8_t tag
    cdef bint was_open
    cdef const char *wrong = NULL
    memset(&place, 0, sizeof(place))
    place.end_lsn = end_lsn
    if open_ is not None:
        place.is_open = True
        place.lsn, place.time, place.xid, place.next_seq = open_
    for i in range(count):
        tag = at[starts[i]] if starts[i] < starts[i + 1] else 0
        was_open = place.is_open
        wrong = step(&place, tag, at + starts[i], starts[i + 1] - starts[i], seq + i)
        if wrong != NULL:
            break
        within[i] = was_open or place.is_open
        if within[i]:
            commit_lsn[i], commit_time[i], xid[i] = place.lsn, place.time, place.xid
        else:
            commit_lsn[i] = commit_time[i] = xid[i] = 0
        if tag == c'C':
            commit_index[commits] = i
            commits += 1
        elif tag == c'R' or tag == c'Y' or (tag == c'M' and not was_open):
            marks.append((i, tag))
    now = (place.lsn, place.time, place.xid, place.next_seq) if place.is_open else None
    return (
        columns, marks, ends[:commits], now, place.end_lsn,
        None if wrong == NULL else (i, wrong.decode("ascii")),
    )
