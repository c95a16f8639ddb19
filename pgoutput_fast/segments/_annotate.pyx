# cython: annotation_typing=False, cdivision=True
"""What stands beside each frame in a segment, compiled. The twin of ``_pure_annotate.py``."""

from __future__ import annotations

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

import numpy as np

from pgoutput_fast._loads cimport load_uint32, load_uint64
from pgoutput_fast.protocol._wire cimport (
    BEGIN_COMMIT_TIME, BEGIN_FINAL_LSN, BEGIN_LENGTH, BEGIN_XID, COMMIT_END_LSN, COMMIT_LSN,
    COMMIT_TIME, MESSAGE_LSN, MESSAGE_PREFIX, TRUNCATE_OPTIONS, TRUNCATE_RELATION_COUNT,
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
    cdef bint is_open = open_ is not None
    cdef uint64_t lsn = 0
    cdef int64_t time = 0, next_seq = 0, length
    cdef uint32_t number = 0
    cdef const uint8_t *frame
    cdef uint8_t tag
    cdef str wrong = None
    if is_open:
        lsn, time, number, next_seq = open_
    for i in range(count):
        frame = at + starts[i]
        length = starts[i + 1] - starts[i]
        tag = frame[0] if length > 0 else 0
        seq[i] = -1
        within[i] = is_open
        if tag == c'I' or tag == c'U' or tag == c'D':
            if not is_open:
                wrong = "outside of a transaction"
                break
            seq[i] = next_seq
            next_seq += 1
        elif tag == c'B':
            if is_open:
                wrong = "within a transaction"
                break
            if length < BEGIN_LENGTH:
                wrong = "too short"
                break
            lsn = load_uint64(frame + BEGIN_FINAL_LSN)
            time = <int64_t> load_uint64(frame + BEGIN_COMMIT_TIME)
            number = load_uint32(frame + BEGIN_XID)
            if lsn < end_lsn:
                wrong = "of a transaction that was committed before what came already"
                break
            next_seq = 0
            is_open = within[i] = True
        elif tag == c'C':
            if not is_open:
                wrong = "without a Begin"
                break
            if length < COMMIT_TIME:
                wrong = "too short"
                break
            if load_uint64(frame + COMMIT_LSN) != lsn:
                wrong = "of another transaction than the Begin before it"
                break
            end_lsn = load_uint64(frame + COMMIT_END_LSN)
            is_open = False
            commit_index[commits] = i
            commits += 1
        elif tag == c'R' or tag == c'Y':
            marks.append((i, tag))
        elif tag == c'M' and not is_open:
            if length < MESSAGE_PREFIX:
                wrong = "too short"
                break
            end_lsn = max(end_lsn, load_uint64(frame + MESSAGE_LSN))
            marks.append((i, tag))
        elif not is_open:
            wrong = "outside of a transaction"
            break
        elif tag == c'T':
            if length < TRUNCATE_OPTIONS:
                wrong = "too short"
                break
            seq[i] = next_seq
            next_seq += load_uint32(frame + TRUNCATE_RELATION_COUNT)
        elif tag != c'M' and tag != c'O':
            wrong = "not of protocol version 1"
            break
        if within[i]:
            commit_lsn[i], commit_time[i], xid[i] = lsn, time, number
        else:
            commit_lsn[i] = commit_time[i] = xid[i] = 0
    return (
        columns, marks, ends[:commits], (lsn, time, number, next_seq) if is_open else None, end_lsn,
        None if wrong is None else (i, wrong),
    )
