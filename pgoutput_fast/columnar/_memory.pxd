# Memory that grows while a batch is made. NumPy or Arrow owns it afterwards.

from libc.stdint cimport int64_t
from libc.stdlib cimport realloc


cdef class Memory:
    cdef void *at
    cdef Py_ssize_t size


# An array that grows.
cdef struct Growing:
    void *at
    size_t item
    size_t count
    size_t capacity


# Resize a block to `size` + 1 bytes, so that no block is empty. Return False without memory.
cdef inline bint grow(void **block, int64_t size) noexcept nogil:
    cdef void *moved = realloc(block[0], size + 1)
    if moved == NULL:
        return False
    block[0] = moved
    return True


cdef int enlarge(Growing *array, size_t more) noexcept nogil


# Make room in an array for `more` items. Return -1 without memory.
cdef inline int room(Growing *array, size_t more) noexcept nogil:
    return 0 if array.count + more <= array.capacity else enlarge(array, more)


cdef object numpy_of(Growing *array, str name)
cdef void expect_memory(int64_t size) noexcept nogil
