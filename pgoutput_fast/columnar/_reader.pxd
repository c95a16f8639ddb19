# Store rows of frames in the columns of their relations.

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

from pgoutput_fast.columnar._columns cimport Rows, Stream
from pgoutput_fast.columnar._input cimport Frame, Source

# An event. columnar/arrays.py describes the same layout to NumPy.
cdef struct Event:
    int64_t frame
    uint64_t commit_lsn
    uint64_t end_lsn
    int64_t commit_time
    uint32_t xid
    uint32_t subxid
    uint8_t tag
    uint8_t[7] unused

cdef struct EventArray:
    Event *at
    int64_t count
    int64_t room

cdef enum Status:
    DONE
    RARE  # the Python decoder must read this frame
    UNKNOWN  # the row's relation is not in the cache
    FULL  # with this row, the rows exceed max_bytes, or a column exceeds 32-bit offsets
    FULL_ROWS  # the relation has max_rows rows
    OTHER_FORM  # text after binary values, or the reverse, in a column whose type depends on that
    NEW_LABEL  # the value is a label that is not in its enum's dictionary
    FAULT  # the frame is malformed, or a value is refused
    NO_MEMORY


cdef class Reader:
    cdef bint fill_unchanged
    cdef int64_t max_rows
    # The index of the next frame in its piece, and the number of frames in the pieces before it.
    cdef Py_ssize_t at, before
    cdef const uint64_t *lsns
    cdef Stream stream
    # Where and why read_rows stopped.
    cdef uint32_t wanted_id  # for UNKNOWN: the OID of the relation
    cdef Rows *stopped  # the rows of the frame's relation
    cdef object error  # the exception if a value was refused; else None
    cdef int32_t error_column
    cdef int64_t error_offset  # in bytes, in the frame
    cdef EventArray events

cdef Status read_rows(Reader self, const Source *source, Py_ssize_t end) noexcept nogil
cdef void put_row(Reader self, Rows *rows, uint8_t flags, const Frame *frame) noexcept nogil
cdef bint event(
    Reader self, uint8_t tag, uint32_t xid, uint32_t subxid, uint64_t commit_lsn, uint64_t end_lsn,
    int64_t commit_time,
) noexcept nogil
