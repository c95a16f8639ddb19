# cython: annotation_typing=False
"""Memory that grows while a batch is made, and is then handed to NumPy or to Arrow.

There is no twin of this: Python's own bytearrays grow.
"""

from __future__ import annotations

from cpython.buffer cimport PyBuffer_FillInfo
from cpython.mem cimport PyMem_RawFree, PyMem_RawMalloc
from libc.stdint cimport int64_t
from libc.stdlib cimport free, realloc

from .arrays import array_of

cdef extern from *:
    """
    /* Threads without the GIL read and write the number; any order will do. */
    #if defined(_MSC_VER)
    #include <intrin.h>
    #define PGF_LOAD(number) _InterlockedOr64(number, 0)
    #define PGF_STORE(number, value) ((void)_InterlockedExchange64(number, value))
    #else
    #define PGF_LOAD(number) __atomic_load_n(number, __ATOMIC_RELAXED)
    #define PGF_STORE(number, value) __atomic_store_n(number, value, __ATOMIC_RELAXED)
    #endif
    """
    int64_t load_number "PGF_LOAD"(const int64_t *number) noexcept nogil
    void store_number "PGF_STORE"(int64_t *number, int64_t value) noexcept nogil

cdef enum:
    MOST_EXPECTED = 20 << 20  # bytes; glibc learns nothing from blocks of more than 32 MiB


cdef class Memory:
    """Memory of this module's making, as a buffer."""

    def __dealloc__(self):
        free(self.at)

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        PyBuffer_FillInfo(buffer, self, self.at, self.size, 0, flags)


# The part of room() that is not inlined.
cdef int enlarge(Growing *array, size_t more) noexcept nogil:
    cdef size_t capacity
    cdef void *moved
    capacity = array.capacity * 2
    if capacity < array.count + more:
        capacity = array.count + more
    if capacity < 64:
        capacity = 64
    moved = realloc(array.at, capacity * array.item)
    if moved == NULL:
        return -1
    array.at = moved
    array.capacity = capacity
    return 0


cdef object numpy_of(Growing *array, str name):
    cdef Memory memory = Memory.__new__(Memory)
    cdef void *shrunk
    if array.count < array.capacity:
        shrunk = realloc(array.at, array.count * array.item + 1)
        if shrunk != NULL:
            array.at = shrunk
    memory.at = array.at
    memory.size = array.count * array.item
    array.at = NULL
    return array_of(name, memory)


cdef int64_t _expected = 0


# As many bytes will be freed, and asked for again by the next batch. glibc gives back what lies
# idle beyond twice the largest block that it saw freed, while a batch is many blocks; and to fault
# pages in anew takes longer than to fill them.
cdef void expect_memory(int64_t size) noexcept nogil:
    if size > MOST_EXPECTED:
        size = MOST_EXPECTED
    if size > load_number(&_expected):
        size += size >> 1
        store_number(&_expected, size)
        # malloc(), but by a way that compilers do not see through: they would take it away.
        PyMem_RawFree(PyMem_RawMalloc(size))
