# cython: annotation_typing=False
"""Manage memory that grows while a batch is made. NumPy or Arrow owns it afterwards.

This module has no twin: the Python implementation uses bytearrays.
"""

from __future__ import annotations

from cpython.buffer cimport PyBuffer_FillInfo
from cpython.mem cimport PyMem_RawFree, PyMem_RawMalloc
from libc.stdint cimport int64_t
from libc.stdlib cimport free, realloc

from .arrays import array_of

cdef extern from *:
    """
    /* Threads without the GIL read and write the number, in any order. */
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
    # In bytes. expect_memory() frees 1.5 times as much. glibc adapts its limits to freed blocks of
    # up to 32 MiB.
    MOST_EXPECTED = 20 << 20


cdef class Memory:
    """Owns a block of memory, and gives it to NumPy as a buffer."""

    def __dealloc__(self):
        free(self.at)

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        PyBuffer_FillInfo(buffer, self, self.at, self.size, 0, flags)


# Grow an array for room(), at least to twice its capacity. Return -1 without memory.
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


# Let glibc keep `size` bytes of freed memory for the next batch. A batch consists of many blocks,
# which are freed together. glibc returns freed memory to the system if it exceeds twice the largest
# block ever freed. The next batch would get it back page by page, which takes longer than filling
# the pages. Therefore this allocates and frees one large block.
cdef void expect_memory(int64_t size) noexcept nogil:
    if size > MOST_EXPECTED:
        size = MOST_EXPECTED
    if size > load_number(&_expected):
        size += size >> 1
        store_number(&_expected, size)
        # Compilers remove a malloc() that is freed at once. They do not know PyMem_RawMalloc().
        PyMem_RawFree(PyMem_RawMalloc(size))
