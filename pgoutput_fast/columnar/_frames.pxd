# Frames from outside, as the compiled modules read them.

from libc.stdint cimport int64_t, uint8_t

cdef extern from "_frames.h" nogil:
    enum:
        MAX_FRAME "PGF_MAX_FRAME"
    ctypedef struct Source "pgf_source":
        int64_t count
        const int64_t *offsets
        const uint8_t *base
        const uint8_t *end
        const uint8_t **pointers
        const int64_t *lengths
    ctypedef struct Frame "pgf_frame":
        const uint8_t *at
        int64_t length
        const uint8_t *floor
        const uint8_t *ceiling
    void take_frame "pgf_take_frame"(const Source *source, int64_t i, Frame *frame) noexcept


cdef class Piece:
    cdef Source source
    cdef object owner
    cdef void *owned

    cdef bytes frame(self, Py_ssize_t i)


cdef class Memory:
    cdef void *at
    cdef Py_ssize_t size

cdef list pieces_of(object data, object offsets)
cdef void expect_memory(int64_t size) noexcept nogil
