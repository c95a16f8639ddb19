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
    # Bytes. Half as much again is asked for; freeing more than 32 MiB does not change glibc's
    # limits.
    MOST_EXPECTED = 20 << 20


cdef class Memory:
    """A block of memory that it owns, as a buffer for NumPy."""

    def __dealloc__(self):
        free(self.at)

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        PyBuffer_FillInfo(buffer, self, self.at, self.size, 0, flags)


# The rare part of room(), for which it calls: at least twice as many items. -1: no memory.
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


# Let glibc keep `size` bytes of freed memory for the next batch. A batch is many blocks, which are
# freed together. glibc returns freed memory to the system if it is more than twice the largest
# block that was ever freed; the next batch would get it back page by page, which takes longer than
# to fill the pages. So one large block is allocated and freed.
cdef void expect_memory(int64_t size) noexcept nogil:
    if size > MOST_EXPECTED:
        size = MOST_EXPECTED
    if size > load_number(&_expected):
        size += size >> 1
        store_number(&_expected, size)
        # Compilers remove a malloc() that is freed at once; they do not see that this is one.
        PyMem_RawFree(PyMem_RawMalloc(size))
