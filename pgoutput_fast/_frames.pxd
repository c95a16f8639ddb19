# Frames from outside, as the compiled modules read them.

from libc.stdint cimport int64_t, uint8_t

# Frames in one piece of memory, between offsets, or each at a place of its own.
cdef struct Source:
    Py_ssize_t count
    const int64_t *offsets  # count + 1; NULL where pointers are
    const uint8_t *base
    const uint8_t *end
    const uint8_t **pointers
    const int64_t *lengths

# A frame, and the bytes around it that may be read.
cdef struct Frame:
    const uint8_t *at
    int64_t length
    const uint8_t *floor
    const uint8_t *ceiling


cdef inline void take_frame(const Source *source, Py_ssize_t i, Frame *frame) noexcept nogil:
    if source.offsets != NULL:
        frame.at = source.base + source.offsets[i]
        frame.length = source.offsets[i + 1] - source.offsets[i]
        frame.floor = source.base
        frame.ceiling = source.end
    else:
        frame.at = source.pointers[i]
        frame.length = source.lengths[i]
        frame.floor = frame.at
        frame.ceiling = frame.at + frame.length


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
