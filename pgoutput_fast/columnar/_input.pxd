# The memory in which callers pass frames.

from libc.stdint cimport int64_t, uint8_t

cdef extern from "_input.h" nogil:
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


# Frames in one piece of memory, or in a list.
cdef class Piece:
    cdef Source source
    cdef object owner  # the Python object that owns the frames' memory
    cdef void *owned  # offsets, or pointers and lengths, which the piece frees; or NULL

    cdef bytes frame(self, Py_ssize_t i)

cdef list pieces_of(object data, object offsets)
