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
    RARE  # the Python decoder reads this kind of frames
    UNKNOWN  # the row's relation is not among the cached ones
    FULL  # the row would pass max_bytes, or what offsets of 32 bits can count
    FULL_ROWS  # the relation has max_rows rows
    OTHER_FORM  # the value has another format than those before it in a column by format
    NEW_LABEL  # the value is a label that the dictionary of its enum lacks
    FAULT  # the frame is malformed, or a value is refused
    NO_MEMORY


cdef class Reader:
    cdef bint fill_unchanged
    cdef int64_t max_rows
    # The index of the next frame in its piece, and the number of frames in the pieces before it.
    cdef Py_ssize_t at, before
    cdef const uint64_t *lsns
    cdef Stream stream
    # What read_rows leaves behind when it stops.
    cdef uint32_t wanted_id  # of UNKNOWN: the OID of the relation
    cdef Rows *stopped  # the rows to which the frame belongs
    cdef object error  # the exception if a value was refused; else None
    cdef int32_t error_column
    cdef int64_t error_offset  # in the frame
    cdef EventArray events

cdef Status read_rows(Reader self, const Source *source, Py_ssize_t end) noexcept nogil
cdef void put_row(Reader self, Rows *rows, uint8_t flags, const Frame *frame) noexcept nogil
cdef bint event(
    Reader self, uint8_t tag, uint32_t xid, uint32_t subxid, uint64_t commit_lsn, uint64_t end_lsn,
    int64_t commit_time,
) noexcept nogil
