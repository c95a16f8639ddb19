# Frames into the columns of their relations.

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

from pgoutput_fast.columnar._columns cimport Rows, Stream
from pgoutput_fast.columnar._input cimport Frame, Source

# An event as pgoutput_fast.columnar.arrays describes it to NumPy.
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
    RARE  # a frame for the Python decoder
    UNKNOWN  # a relation that is not at hand
    FULL  # the row would pass max_bytes, or what offsets of 32 bits can count
    FULL_ROWS
    OTHER_FORM  # a value in the other format than its column
    NEW_LABEL  # of an enum, which its dictionary lacks
    FAULT
    NO_MEMORY


cdef class Reader:
    cdef bint fill_unchanged
    cdef int64_t max_rows
    # The frame that comes next, among those of its piece, and how many came in the pieces before.
    cdef Py_ssize_t at, before
    cdef const uint64_t *lsns
    cdef Stream stream
    # What a run leaves behind when it stops.
    cdef uint32_t wanted_id
    cdef Rows *stopped
    cdef object error
    cdef int32_t error_column
    cdef int64_t error_offset
    cdef EventArray events

cdef Status read_rows(Reader self, const Source *source, Py_ssize_t end) noexcept nogil
cdef void put_row(Reader self, Rows *rows, uint8_t flags, const Frame *frame) noexcept nogil
cdef bint event(
    Reader self, uint8_t tag, uint32_t xid, uint32_t subxid, uint64_t commit_lsn, uint64_t end_lsn,
    int64_t commit_time,
) noexcept nogil
