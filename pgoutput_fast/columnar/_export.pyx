# cython: annotation_typing=False
"""Export arrays through the Arrow C data interface, compiled: the twin of ``_pure_export.py``.

The columns of a batch lie in one arena. The batch and every array exported from it share the arena.
The last of them frees it, in any thread.
"""

from __future__ import annotations

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_New
from libc.stdint cimport int32_t, int64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memset, strlen

from .arrays import metadata_bytes
from .fields import LABEL_FIELD

cdef extern from "_arrow.h" nogil:
    int64_t pgf_add(int64_t *count, int64_t change) noexcept


# --- arenas --------------------------------------------------------------------------------------

cdef int64_t _live_arenas = 0


def live_arenas() -> int:
    """Return the number of arenas that are not freed yet, for the tests.

    A batch has one arena. One from with_commit(), as_read() or part() has a second for what is
    its own.
    """
    return pgf_add(&_live_arenas, 0)


cdef Arena *make_arena(Py_ssize_t most) noexcept nogil:
    cdef Arena *arena = <Arena *> calloc(1, sizeof(Arena))
    if arena == NULL:
        return NULL
    arena.blocks = <void **> malloc((most + 1) * sizeof(void *))
    if arena.blocks == NULL:
        free(arena)
        return NULL
    arena.references = 1
    pgf_add(&_live_arenas, 1)
    return arena


cdef void keep(Arena *arena) noexcept nogil:
    pgf_add(&arena.references, 1)


cdef void drop(Arena *arena) noexcept nogil:
    cdef Py_ssize_t i
    if arena == NULL or pgf_add(&arena.references, -1) > 0:
        return
    for i in range(arena.count):
        free(arena.blocks[i])
    free(arena.blocks)
    free(arena)
    pgf_add(&_live_arenas, -1)


# Let an arena own a block, and return the block. NULL, from a failed malloc(), is only returned.
cdef void *own(Arena *arena, void *block, int64_t size) noexcept nogil:
    if block != NULL:
        arena.blocks[arena.count] = block
        arena.count += 1
        arena.size += size
    return block


# --- arrays and schemas --------------------------------------------------------------------------

cdef struct Exported:
    Arena *arena
    ArrowArray *children
    ArrowArray **pointers
    ArrowArray dictionary
    Address[3] buffers


cdef void release_array(ArrowArray *array) noexcept nogil:
    cdef Exported *exported = <Exported *> array.private_data
    cdef int64_t i
    for i in range(array.n_children):
        if array.children[i].release != NULL:
            array.children[i].release(array.children[i])
    if array.dictionary != NULL and array.dictionary.release != NULL:
        array.dictionary.release(array.dictionary)
    drop(exported.arena)
    free(exported.children)
    free(exported.pointers)
    free(exported)
    array.release = NULL


cdef bint export_array(const Node *node, ArrowArray *array) noexcept nogil:
    cdef Exported *exported = <Exported *> calloc(1, sizeof(Exported))
    cdef int32_t i
    memset(array, 0, sizeof(ArrowArray))
    if exported == NULL:
        return False
    exported.children = <ArrowArray *> calloc(node.n_children + 1, sizeof(ArrowArray))
    exported.pointers = <ArrowArray **> calloc(node.n_children + 1, sizeof(ArrowArray *))
    if exported.children == NULL or exported.pointers == NULL:
        free(exported.children)
        free(exported.pointers)
        free(exported)
        return False
    exported.arena = node.arena
    keep(node.arena)
    for i in range(3):
        exported.buffers[i] = node.buffers[i]
    array.length = node.length
    array.offset = node.offset
    array.null_count = node.null_count
    array.n_buffers = node.n_buffers
    array.buffers = exported.buffers
    array.private_data = exported
    array.release = release_array
    array.children = exported.pointers
    for i in range(node.n_children):
        exported.pointers[i] = &exported.children[i]
        array.n_children = i + 1
        if not export_array(&node.children[i], exported.pointers[i]):
            array.release(array)
            return False
    if node.dictionary != NULL:
        array.dictionary = &exported.dictionary
        if not export_array(node.dictionary, array.dictionary):
            array.release(array)
            return False
    return True


cdef void release_schema(ArrowSchema *schema) noexcept nogil:
    cdef int64_t i
    for i in range(schema.n_children):
        if schema.children[i].release != NULL:
            schema.children[i].release(schema.children[i])
        free(schema.children[i])
    free(schema.children)
    if schema.dictionary != NULL:
        if schema.dictionary.release != NULL:
            schema.dictionary.release(schema.dictionary)
        free(schema.dictionary)
    free(<void *> schema.format)
    free(<void *> schema.name)
    free(<void *> schema.metadata)
    schema.release = NULL


cdef char *copied(const char *text, Py_ssize_t size) except NULL:
    cdef char *copy = <char *> malloc(size + 1)
    if copy == NULL:
        raise MemoryError
    memcpy(copy, text, size)
    copy[size] = 0
    return copy


cdef char *copied_bytes(bytes text) except NULL:
    return copied(PyBytes_AS_STRING(text), PyBytes_GET_SIZE(text))


cdef int export_schema(object field, ArrowSchema *schema) except -1:
    memset(schema, 0, sizeof(ArrowSchema))
    schema.release = release_schema
    cdef Py_ssize_t count = len(field.children)
    try:
        schema.format = copied_bytes(field.format.encode())
        schema.name = copied_bytes(field.name.encode())
        if field.metadata:
            schema.metadata = copied_bytes(metadata_bytes(field.metadata))
        schema.flags = ARROW_FLAG_NULLABLE if field.nullable else 0
        schema.children = <ArrowSchema **> calloc(count + 1, sizeof(ArrowSchema *))
        if schema.children == NULL:
            raise MemoryError
        for child in field.children:
            schema.children[schema.n_children] = <ArrowSchema *> calloc(1, sizeof(ArrowSchema))
            if schema.children[schema.n_children] == NULL:
                raise MemoryError
            schema.n_children += 1
            export_schema(child, schema.children[schema.n_children - 1])
        if field.labels is not None:
            schema.dictionary = <ArrowSchema *> calloc(1, sizeof(ArrowSchema))
            if schema.dictionary == NULL:
                raise MemoryError
            export_schema(LABEL_FIELD, schema.dictionary)
    except BaseException:
        schema.release(schema)
        raise
    return 0


cdef void free_schema_capsule(object capsule) noexcept:
    cdef ArrowSchema *schema = <ArrowSchema *> PyCapsule_GetPointer(capsule, "arrow_schema")
    if schema.release != NULL:
        schema.release(schema)
    free(schema)


cdef void free_array_capsule(object capsule) noexcept:
    cdef ArrowArray *array = <ArrowArray *> PyCapsule_GetPointer(capsule, "arrow_array")
    if array.release != NULL:
        array.release(array)
    free(array)


@cython.final
cdef class Schema:
    """An Arrow schema, made once. Copying it for each export is far faster than making it."""

    def __dealloc__(self):
        if self.schema.release != NULL:
            self.schema.release(&self.schema)


cdef Schema schema_of(object field):
    cdef Schema made = Schema.__new__(Schema)
    export_schema(field, &made.schema)
    return made


cdef int copy_schema(const ArrowSchema *schema, ArrowSchema *to) except -1:
    cdef int64_t i
    memset(to, 0, sizeof(ArrowSchema))
    to.release = release_schema
    try:
        to.format = copied(schema.format, strlen(schema.format))
        to.name = copied(schema.name, strlen(schema.name))
        if schema.metadata != NULL:
            to.metadata = copied(schema.metadata, metadata_size(schema.metadata))
        to.flags = schema.flags
        to.children = <ArrowSchema **> calloc(schema.n_children + 1, sizeof(ArrowSchema *))
        if to.children == NULL:
            raise MemoryError
        for i in range(schema.n_children):
            to.children[i] = <ArrowSchema *> calloc(1, sizeof(ArrowSchema))
            if to.children[i] == NULL:
                raise MemoryError
            to.n_children = i + 1
            copy_schema(schema.children[i], to.children[i])
        if schema.dictionary != NULL:
            to.dictionary = <ArrowSchema *> calloc(1, sizeof(ArrowSchema))
            if to.dictionary == NULL:
                raise MemoryError
            copy_schema(schema.dictionary, to.dictionary)
    except BaseException:
        to.release(to)
        raise
    return 0


cdef int64_t metadata_size(const char *metadata) noexcept nogil:
    cdef int32_t pairs, length
    cdef int64_t at = 4
    cdef int32_t _i
    memcpy(&pairs, metadata, 4)
    for _i in range(2 * pairs):
        memcpy(&length, metadata + at, 4)
        at += 4 + length
    return at


cdef object schema_capsule(Schema known):
    cdef ArrowSchema *schema = <ArrowSchema *> calloc(1, sizeof(ArrowSchema))
    if schema == NULL:
        raise MemoryError
    try:
        copy_schema(&known.schema, schema)
        return PyCapsule_New(schema, "arrow_schema", free_schema_capsule)
    except BaseException:
        free(schema)
        raise


cdef object array_capsule(const Node *root):
    cdef ArrowArray *array = <ArrowArray *> calloc(1, sizeof(ArrowArray))
    if array == NULL or not export_array(root, array):
        free(array)
        raise MemoryError
    return PyCapsule_New(array, "arrow_array", free_array_capsule)


def export(field: Field, column: ArrayBuffers) -> tuple[object, object]:
    """Export a column whose buffers are bytes as capsules of its Arrow schema and array.

    Parameters
    ----------
    field : Field
    column : pgoutput_fast.columnar.arrays.ArrayBuffers
    """
    cdef Arena *arena = make_arena(count_blocks(column))
    cdef Node root
    if arena == NULL:
        raise MemoryError
    try:
        copy_column(column, &root, arena)
        return schema_capsule(schema_of(field)), array_capsule(&root)
    finally:
        drop(arena)


cdef Py_ssize_t count_blocks(object column):
    return 4 + sum([count_blocks(child) for child in column.children])


cdef int copy_column(object column, Node *node, Arena *arena) except -1:
    cdef bytes buffer
    cdef void *copy
    cdef Py_ssize_t i
    memset(node, 0, sizeof(Node))
    node.length = column.length
    node.offset = column.offset
    node.null_count = column.null_count
    node.arena = arena
    node.n_buffers = len(column.buffers)
    for i in range(node.n_buffers):
        buffer = column.buffers[i]
        if buffer is not None:
            copy = own(arena, malloc(PyBytes_GET_SIZE(buffer) + 1), PyBytes_GET_SIZE(buffer))
            if copy == NULL:
                raise MemoryError
            memcpy(copy, PyBytes_AS_STRING(buffer), PyBytes_GET_SIZE(buffer))
            node.buffers[i] = copy
    node.n_children = len(column.children)
    node.children = <Node *> own(arena, calloc(node.n_children + 1, sizeof(Node)), 0)
    if node.children == NULL:
        raise MemoryError
    for i in range(node.n_children):
        copy_column(column.children[i], &node.children[i], arena)
    return 0
