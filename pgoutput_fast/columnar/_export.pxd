# Export arrays through the Arrow C data interface, and count references to their memory.

from libc.stdint cimport int32_t, int64_t

cdef extern from "_arrow.h" nogil:
    enum:
        ARROW_FLAG_NULLABLE
    struct ArrowSchema:
        const char *format
        const char *name
        const char *metadata
        int64_t flags
        int64_t n_children
        ArrowSchema **children
        ArrowSchema *dictionary
        void (*release)(ArrowSchema *) noexcept nogil
        void *private_data
    struct ArrowArray:
        int64_t length
        int64_t null_count
        int64_t offset
        int64_t n_buffers
        int64_t n_children
        const void **buffers
        ArrowArray **children
        ArrowArray *dictionary
        void (*release)(ArrowArray *) noexcept nogil
        void *private_data
    struct ArrowArrayStream:
        int (*get_schema)(ArrowArrayStream *, ArrowSchema *) noexcept
        int (*get_next)(ArrowArrayStream *, ArrowArray *) noexcept
        const char *(*get_last_error)(ArrowArrayStream *) noexcept
        void (*release)(ArrowArrayStream *) noexcept
        void *private_data

ctypedef const void *Address

# Memory that a batch and all arrays exported from it share. The last of them frees it.
cdef struct Arena:
    int64_t references
    int64_t size
    Py_ssize_t count
    void **blocks

# An Arrow array in an arena. export_array() makes an ArrowArray of it.
cdef struct Node:
    int64_t length
    int64_t offset  # of the first value, in a part of a batch
    int64_t null_count
    int32_t n_buffers
    int32_t n_children
    Address[3] buffers
    Node *children
    Node *dictionary
    Arena *arena


cdef class Schema:
    cdef ArrowSchema schema

cdef Arena *make_arena(Py_ssize_t most) noexcept nogil
cdef void keep(Arena *arena) noexcept nogil
cdef void drop(Arena *arena) noexcept nogil
cdef void *own(Arena *arena, void *block, int64_t size) noexcept nogil
cdef bint export_array(const Node *node, ArrowArray *array) noexcept nogil
cdef int copy_schema(const ArrowSchema *schema, ArrowSchema *to) except -1
cdef Schema schema_of(object field)
cdef object schema_capsule(Schema known)
cdef object array_capsule(const Node *root)
