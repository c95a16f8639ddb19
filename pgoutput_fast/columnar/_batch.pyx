# cython: annotation_typing=False, cdivision=True
"""Make an Arrow record batch of a relation's rows, compiled: the twin of ``_pure_batch.py``.

A batch takes over the memory of its rows, so that most columns are not copied. It makes only the
columns `op`, `old_kind` and `unchanged`, validity bitmaps, dictionaries, and the arrays of nested
values.
"""

from __future__ import annotations

cimport cython
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_New
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.errno cimport EINVAL, ENOMEM
from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memset, strlen

from pgoutput_fast._public cimport name_type
from pgoutput_fast.columnar._columns cimport (
    HAS_AFTER, HAS_COMMIT, HAS_XID, IN_STREAM, OLD_KEY, OLD_ROW, OP, PGF_FIXED, PGF_FIXED_LIST,
    PGF_LIST, PGF_STRUCT, PGF_VARIABLE, SKIP, SLACK, TRUNCATE, Column, LabelTable, Part, Rows, Side,
    flag_bits,
)
from pgoutput_fast.columnar._export cimport (
    Arena, ArrowArray, ArrowArrayStream, ArrowSchema, Node, array_capsule, copy_schema, drop,
    export_array, keep, make_arena, own, schema_capsule,
)
from pgoutput_fast.columnar._memory cimport expect_memory, grow
from pgoutput_fast.columnar._relation cimport forget_rows, free_side, pad

from ..names import qualified
from .arrays import OPERATIONS, READ, commit_of, first_seq_of, refuse_part, refuse_read

cdef extern from "_parts.h" nogil:
    bint put_part "pgf_put"(Part *part, const uint8_t *at, int32_t size) noexcept
    void forget_part "pgf_forget_part"(Part *part) noexcept
    void free_part "pgf_free_part"(Part *part) noexcept

ctypedef const char *Name

cdef enum:
    COLUMNS = 11
    SHRUNK = 65_536  # bytes at a column's end that may stay unused, beyond twice the used bytes


# Free memory at the end of a variable column if its values, `used` bytes, need far less.
cdef void shrink(Column *column, int64_t used) noexcept nogil:
    if column.room > 2 * used + SHRUNK and grow(<void **> &column.data, used + SLACK):
        column.room = used + SLACK


cdef int64_t count_null(const uint8_t *validity, int64_t length) noexcept nogil:
    cdef int64_t valid = 0, i
    cdef uint8_t bits
    for i in range(length >> 3):
        bits = validity[i]
        valid += POPULATION[bits]
    for i in range(length & ~7, length):
        valid += validity[i >> 3] >> (i & 7) & 1
    return length - valid


cdef uint8_t[256] POPULATION
for _i in range(256):
    POPULATION[_i] = _i.bit_count() if hasattr(_i, "bit_count") else bin(_i).count("1")


cdef struct Finish:
    Rows *rows
    Arena *arena
    int64_t length
    const uint8_t *zeros  # zero bytes: every buffer of a column of nulls points here
    uint8_t any  # the flags that at least one row has
    uint8_t all  # the flags that all rows have


# Make the validity bitmap of a column with values in the rows that have one of the flags in `mask`.
# `found` is NULL if all rows have a value, and `zeros` if no row has one. Return False without
# memory.
cdef bint bits_of(Finish *f, uint8_t mask, const uint8_t **found) noexcept nogil:
    cdef uint8_t *bits
    found[0] = NULL
    if not f.any & mask:
        found[0] = f.zeros
    elif not f.all & mask:
        bits = <uint8_t *> own(f.arena, calloc(f.length // 8 + 1, 1), f.length // 8 + 1)
        if bits == NULL:
            return False
        flag_bits(bits, f.rows.flags, f.length, mask)
        found[0] = bits
    return True


cdef void plain(
    Finish *f, Node *node, const uint8_t *validity, const void *data, int64_t null_count
) noexcept nogil:
    node.arena = f.arena
    node.length = f.length
    node.n_buffers = 2
    node.buffers[0] = validity
    node.buffers[1] = data
    node.null_count = null_count


cdef int64_t nulls_of(Finish *f, const uint8_t *validity) noexcept nogil:
    if validity == NULL:
        return 0
    if validity == f.zeros:
        return f.length
    return count_null(validity, f.length)


# Make a column of four or eight bytes per row. It has values in the rows with one of the flags in
# `mask`; in all rows if `mask` is 0. The arena takes over `data`.
cdef bint head(Finish *f, Node *node, uint8_t mask, void *data, int64_t size) noexcept nogil:
    cdef const uint8_t *validity = NULL
    if mask:
        if not f.any & mask:
            free(data)
            plain(f, node, f.zeros, f.zeros, f.length)
            return True
        if not bits_of(f, mask, &validity):
            free(data)
            return False
    own(f.arena, data, f.length * size)
    plain(f, node, validity, data, nulls_of(f, validity))
    return True


# Only rows of stream chunks have a subxid. Store 0 in the other rows: their memory is
# uninitialized.
cdef void fill_subxids(Finish *f, int64_t size) noexcept nogil:
    cdef int64_t i
    if f.any & IN_STREAM and not f.all & IN_STREAM:
        for i in range(f.length):
            if not f.rows.flags[i] & IN_STREAM:
                memset(f.rows.subxids + i * size, 0, size)


# Make the column `op`: "insert", "update", "delete" or "truncate". Without a TRUNCATE all texts
# have six letters, so that the offsets are multiples of six.
cdef bint op_column(Finish *f, Node *node) noexcept nogil:
    cdef int64_t i, at = 0
    cdef int32_t *ends = <int32_t *> own(
        f.arena, malloc((f.length + 1) * 4), (f.length + 1) * 4
    )
    cdef char *text = <char *> own(f.arena, malloc(f.length * 8 + 8), f.length * 8 + 8)
    cdef uint8_t op
    if ends == NULL or text == NULL:
        return False
    if not f.rows.truncated:
        for i in range(f.length):
            memcpy(text + 6 * i, OPS[f.rows.flags[i] & OP], 8)
        for i in range(f.length + 1):
            ends[i] = <int32_t> (6 * i)
    else:
        for i in range(f.length):
            op = f.rows.flags[i] & OP
            ends[i] = <int32_t> at
            memcpy(text + at, OPS[op], 8)
            at += 8 if op == TRUNCATE else 6
        ends[f.length] = <int32_t> at
    plain(f, node, NULL, ends, 0)
    node.n_buffers = 3
    node.buffers[2] = text
    return True


# The names of operations, padded to eight bytes. OPS points to them.
_OPS = tuple(name.encode().ljust(8, b"\0") for name in OPERATIONS.values())
cdef Name[4] OPS
OPS[0], OPS[1], OPS[2], OPS[3] = _OPS
cdef bytes READ_OP = READ.encode()
if [len(name) for name in OPERATIONS.values()] != [6, 6, 6, 8] or len(READ_OP) != 4:
    raise ImportError("op_column() counts on the lengths of these names")


cdef bint old_kind_column(Finish *f, Node *node) noexcept nogil:
    cdef int64_t i
    cdef int32_t at = 0
    cdef int32_t *ends
    cdef char *text
    cdef const uint8_t *validity = NULL
    cdef uint8_t flags
    if not f.any & (OLD_KEY | OLD_ROW):
        plain(f, node, f.zeros, f.zeros, f.length)
        node.n_buffers = 3
        node.buffers[2] = f.zeros
        return True
    ends = <int32_t *> own(f.arena, malloc((f.length + 1) * 4), (f.length + 1) * 4)
    text = <char *> own(f.arena, malloc(f.length + 1), f.length + 1)
    if ends == NULL or text == NULL or not bits_of(f, OLD_KEY | OLD_ROW, &validity):
        return False
    for i in range(f.length):
        flags = f.rows.flags[i]
        ends[i] = at
        # A branch would be mispredicted. In a row without an old tuple, the next row overwrites
        # this byte.
        text[at] = c'K' if flags & OLD_KEY else c'O'
        at += flags & (OLD_KEY | OLD_ROW) != 0
    ends[f.length] = at
    plain(f, node, validity, ends, nulls_of(f, validity))
    node.n_buffers = 3
    node.buffers[2] = text
    return True


# Make the struct `before` or `after`. The rows with one of the flags in `mask` have a value. The
# arena takes over the memory of the columns.
cdef bint side_column(Finish *f, Node *node, Side *side, uint8_t mask) noexcept nogil:
    cdef Rows *rows = f.rows
    cdef Column *column
    cdef Part *part
    cdef Node *child
    cdef int32_t c, n = 0
    cdef const uint8_t *present = NULL
    cdef bint used
    if not bits_of(f, mask, &present):
        return False
    if side.filled > 0 and not pad(rows, side, f.length):
        return False
    for c in range(rows.width):
        n += side.columns[c].codes[1] != SKIP
    plain(f, node, present, NULL, nulls_of(f, present))
    node.n_buffers = 1
    node.n_children = n
    node.children = <Node *> own(f.arena, calloc(n + 1, sizeof(Node)), (n + 1) * sizeof(Node))
    if node.children == NULL:
        return False
    n = 0
    for c in range(rows.width):
        column = &side.columns[c]
        if column.codes[1] == SKIP:
            continue
        child = &node.children[n]
        n += 1
        # A column has no value on a side without tuples. In `before`, other columns may have none.
        used = side.filled > 0 and column.data != NULL
        part = &rows.parts[c]
        if part.shape >= PGF_LIST:
            if used and not nested_column(f, child, part, column):
                return False
            if not used and not no_values(f, child, part, f.length):
                return False
            continue
        if part.labels != NULL and not dictionary(f, child, part.labels):
            return False
        if not used:
            plain(f, child, f.zeros, f.zeros, f.length)
            if column.width < 0:
                child.n_buffers = 3
                child.buffers[2] = f.zeros
            continue
        if column.width < 0:
            shrink(column, column.offsets[f.length])
        own(f.arena, column.validity, f.length // 8 + 1)
        own(f.arena, column.data, 0)
        own(f.arena, column.offsets, 0)
        plain(
            f, child, column.validity, column.offsets if column.width < 0 else <void *> column.data,
            nulls_of(f, column.validity),
        )
        if column.width < 0:
            child.n_buffers = 3
            child.buffers[2] = column.data
            f.arena.size += column.room + 4 * f.length
        else:
            f.arena.size += f.length * column.width
    return True


# Make a nested column from its packed values.
cdef bint nested_column(Finish *f, Node *node, Part *part, Column *column) noexcept nogil:
    cdef int64_t i
    cdef int32_t size
    cdef bint sound = True
    for i in range(f.length):
        size = column.offsets[i + 1] - column.offsets[i]
        if column.validity != NULL and not column.validity[i >> 3] >> (i & 7) & 1:
            size = -1
        if not put_part(part, column.data + column.offsets[i], size):
            sound = False
            break
    free(column.validity)
    free(column.data)
    free(column.offsets)
    column.validity = column.data = NULL
    column.offsets = NULL
    sound = sound and part_column(f, node, part)
    if not sound:
        free_part(part)
    return sound


# Make the array of a part of a nested column. The arena takes over its memory.
cdef bint part_column(Finish *f, Node *node, Part *part) noexcept nogil:
    cdef int32_t i
    cdef bint sound = True
    node.arena = f.arena
    node.length = part.count
    node.null_count = part.nulls
    node.n_buffers = 1
    node.buffers[0] = own(f.arena, part.validity, (part.count + 7) // 8)
    if part.shape == PGF_FIXED:
        node.n_buffers = 2
        node.buffers[1] = own(f.arena, part.data, (part.count * part.width * 8 + 7) // 8)
    elif part.shape == PGF_VARIABLE or part.shape == PGF_LIST:
        node.n_buffers = 2 if part.shape == PGF_LIST else 3
        node.buffers[1] = own(f.arena, part.offsets, 4 * (part.count + 1))
        node.buffers[2] = own(f.arena, part.data, part.data_room)
    # Without values, there may be no buffer.
    for i in range(1, node.n_buffers):
        if node.buffers[i] == NULL:
            node.buffers[i] = f.zeros
    forget_part(part)
    if part.labels != NULL and not dictionary(f, node, part.labels):
        return False
    if not part_children(f, node, part):
        return False
    for i in range(part.n_children):
        sound = sound and part_column(f, &node.children[i], &part.children[i])
    return sound


# Make the array of a part if the whole nested column is null in the batch.
cdef bint no_values(Finish *f, Node *node, Part *part, int64_t length) noexcept nogil:
    cdef int32_t i
    cdef int64_t below = length
    node.arena = f.arena
    node.length = node.null_count = length
    node.buffers[0] = node.buffers[1] = node.buffers[2] = f.zeros
    node.n_buffers = 3 if part.shape == PGF_VARIABLE else 2
    if part.shape == PGF_STRUCT or part.shape == PGF_FIXED_LIST:
        node.n_buffers = 1
    if part.shape == PGF_LIST:
        below = 0
    elif part.shape == PGF_FIXED_LIST:
        below = length * part.width
    if length == 0:
        node.buffers[0] = NULL
    if part.labels != NULL and not dictionary(f, node, part.labels):
        return False
    if not part_children(f, node, part):
        return False
    for i in range(part.n_children):
        if not no_values(f, &node.children[i], &part.children[i], below):
            return False
    return True


cdef bint part_children(Finish *f, Node *node, Part *part) noexcept nogil:
    cdef int64_t size = part.n_children * sizeof(Node)
    if part.n_children == 0:
        return True
    node.n_children = part.n_children
    node.children = <Node *> own(f.arena, calloc(part.n_children, sizeof(Node)), size)
    return node.children != NULL


# Return the most bytes per row that a buffer has in a part that is all null.
cdef int64_t widest_of(const Part *part) noexcept nogil:
    cdef int32_t i
    cdef int64_t widest = max(4, part.width)
    cdef int64_t times = part.width if part.shape == PGF_FIXED_LIST else 1
    for i in range(part.n_children):
        widest = max(widest, times * widest_of(&part.children[i]))
    return widest


# Make the dictionary of an enum's column: its labels.
cdef bint dictionary(Finish *f, Node *node, const LabelTable *labels) noexcept nogil:
    cdef int64_t size = labels.ends[labels.count]
    cdef Node *made = <Node *> own(f.arena, calloc(1, sizeof(Node)), sizeof(Node))
    cdef int32_t *ends = <int32_t *> own(
        f.arena, malloc((labels.count + 1) * 4), (labels.count + 1) * 4
    )
    cdef uint8_t *text = <uint8_t *> own(f.arena, malloc(size + 1), size + 1)
    if made == NULL or ends == NULL or text == NULL:
        return False
    memcpy(ends, labels.ends, (labels.count + 1) * 4)
    memcpy(text, labels.text, size)
    plain(f, made, NULL, ends, 0)
    made.length = labels.count
    made.n_buffers = 3
    made.buffers[2] = text
    node.dictionary = made
    return True


cdef bint unchanged_column(Finish *f, Node *node) noexcept nogil:
    cdef Rows *rows = f.rows
    cdef Node *child = <Node *> own(f.arena, calloc(1, sizeof(Node)), sizeof(Node))
    cdef uint8_t *bits
    cdef int32_t *ends
    cdef char *text
    cdef int64_t i, size = 0
    cdef int32_t at = 0, name_length
    if child == NULL:
        return False
    node.n_children = 1
    node.children = child
    if rows.unchanged_count == 0:
        plain(f, node, f.zeros, f.zeros, f.length)
        plain(f, child, NULL, f.zeros, 0)
        child.length = 0
        child.n_buffers = 3
        child.buffers[2] = f.zeros
        return True
    bits = <uint8_t *> own(f.arena, calloc(f.length // 8 + 1, 1), f.length // 8 + 1)
    if bits == NULL:
        return False
    for i in range(rows.unchanged_filled, f.length):
        rows.unchanged_ends[i + 1] = rows.unchanged_ends[i]
    rows.unchanged_filled = f.length
    for i in range(f.length):
        bits[i >> 3] |= (rows.unchanged_ends[i + 1] > rows.unchanged_ends[i]) << (i & 7)
    own(f.arena, rows.unchanged_ends, (f.length + 1) * 4)
    plain(f, node, bits, rows.unchanged_ends, nulls_of(f, bits))
    rows.unchanged_ends = NULL
    for i in range(rows.unchanged_count):
        size += strlen(rows.names[rows.unchanged[i]])
    ends = <int32_t *> own(
        f.arena, malloc((rows.unchanged_count + 1) * 4), (rows.unchanged_count + 1) * 4
    )
    text = <char *> own(f.arena, malloc(size + 1), size + 1)
    if ends == NULL or text == NULL:
        return False
    for i in range(rows.unchanged_count):
        ends[i] = at
        name_length = <int32_t> strlen(rows.names[rows.unchanged[i]])
        memcpy(text + at, rows.names[rows.unchanged[i]], name_length)
        at += name_length
    ends[rows.unchanged_count] = at
    plain(f, child, NULL, ends, 0)
    child.length = rows.unchanged_count
    child.n_buffers = 3
    child.buffers[2] = text
    return True


cdef void gather_flags(
    const uint8_t *flags, int64_t count, uint8_t *any, uint8_t *all
) noexcept nogil:
    # Local variables let compilers vectorize the loop: the pointers might overlap the flags.
    cdef uint8_t one = 0, each = 0xFF
    cdef int64_t i
    for i in range(count):
        one |= flags[i]
        each &= flags[i]
    any[0] = one
    all[0] = each


# Hand the rows over to a batch, which owns their memory from now on. Return False without memory:
# then the rows are lost.
cdef bint finish(Rows *rows, ChangeBatch batch, bint has_lsns) noexcept nogil:
    cdef Finish f
    cdef Node *nodes
    cdef int64_t widest = 8, size
    cdef int32_t c
    cdef bint sound
    f.rows = rows
    f.length = rows.count
    f.arena = make_arena(rows.blocks)
    if f.arena == NULL:
        return False
    batch.arena = f.arena
    for c in range(rows.width):
        size = widest_of(&rows.parts[c]) if rows.parts[c].shape >= PGF_LIST else 0
        widest = max(widest, size, <int64_t> rows.after.columns[c].width)
    size = (f.length + 1) * widest
    # Pages from calloc() that are only read take no memory.
    f.zeros = <const uint8_t *> own(f.arena, calloc(size, 1), 0)
    nodes = <Node *> own(f.arena, calloc(COLUMNS, sizeof(Node)), COLUMNS * sizeof(Node))
    if f.zeros == NULL or nodes == NULL:
        return False
    gather_flags(rows.flags, f.length, &f.any, &f.all)
    size = 8 if batch.wide else 4
    fill_subxids(&f, size)
    sound = (
        op_column(&f, nodes)
        and head(&f, nodes + 1, HAS_XID, rows.xids, size)
        and head(&f, nodes + 2, IN_STREAM, rows.subxids, size)
    )
    rows.xids = rows.subxids = NULL
    if has_lsns:
        sound = sound and head(&f, nodes + 3, 0, rows.lsns, 8)
    else:
        free(rows.lsns)
        plain(&f, nodes + 3, f.zeros, f.zeros, f.length)
    rows.lsns = NULL
    sound = (
        sound
        and head(&f, nodes + 4, HAS_COMMIT, rows.commit_lsns, 8)
        and head(&f, nodes + 5, HAS_COMMIT, rows.commit_times, 8)
        and head(&f, nodes + 6, 0, rows.seqs, 8)
        and old_kind_column(&f, nodes + 7)
        and side_column(&f, nodes + 8, &rows.before, OLD_KEY | OLD_ROW)
        and side_column(&f, nodes + 9, &rows.after, HAS_AFTER)
        and unchanged_column(&f, nodes + 10)
    )
    free(rows.flags)
    free(rows.unchanged_ends)
    free(rows.unchanged)
    if rows.before.filled == 0:
        free_side(rows, &rows.before)
    if rows.after.filled == 0:
        free_side(rows, &rows.after)
    forget_rows(rows)
    if not sound:
        return False
    batch.root.length = f.length
    batch.root.null_count = 0
    batch.root.n_buffers = 1
    batch.root.n_children = COLUMNS
    batch.root.children = nodes
    batch.root.arena = f.arena
    batch.size = f.arena.size
    expect_memory(f.arena.size)
    return True


@cython.final
cdef class ChangeBatch:
    """Changed rows of one version of a relation, as an Arrow record batch.

    Libraries that support the Arrow PyCapsule interface read it without a copy, such as
    ``pyarrow.record_batch(changes)`` and ``polars.DataFrame(changes)``. A batch stays valid after
    its decoder is gone.
    """

    def __init__(self):
        raise TypeError("a ChangeBatch is made by decoding frames")

    def __dealloc__(self):
        drop(self.arena)
        drop(self.commit_arena)

    def __len__(self):
        return self.num_rows

    def __reduce__(self):
        raise TypeError(
            "a ChangeBatch is not pickled; what pyarrow.record_batch() makes of it can be"
        )

    def __repr__(self):
        return f"<ChangeBatch: {self.num_rows} rows of {qualified(self.relation)}>"

    @property
    def relation(self):
        """The Relation message that describes the rows."""
        return self.layout.plan.relation

    @property
    def nbytes(self):
        """Bytes of the batch's buffers; of a part, its share of them by rows."""
        return self.size

    def __arrow_c_schema__(self):
        """Return the schema as a capsule of the Arrow C data interface."""
        return schema_capsule(self.schema)

    def __arrow_c_array__(self, requested_schema=None):
        """Return capsules of schema and batch, and ignore `requested_schema`, as is allowed."""
        return self.__arrow_c_schema__(), array_capsule(&self.root)

    def __arrow_c_stream__(self, requested_schema=None):
        """Return a stream of this batch alone. :class:`ChangeStream` makes a stream of several."""
        return export_stream([self])

    def with_commit(self, commit_lsn: int, commit_time: int) -> ChangeBatch:
        """Return the same rows, with commit LSN and commit time filled in where they are null.

        They are null in rows of a streamed transaction, because the server sends its commit only at
        the end. The new batch shares all other buffers with this batch.

        Parameters
        ----------
        commit_lsn : int
            LSN of the commit record.
        commit_time : int
            In microseconds since 2000-01-01 UTC.

        Raises
        ------
        TypeError
            An argument is not an int.
        OverflowError
            A value does not fit into its column.
        """
        cdef ChangeBatch made
        cdef int64_t i, at
        cdef Node *nodes
        cdef uint64_t *lsns
        cdef int64_t *times
        cdef const uint8_t *validity
        cdef uint64_t lsn
        cdef int64_t time
        lsn, time = commit_of(commit_lsn, commit_time, "spark" if self.wide else "arrow")
        made = shared(self, 2)
        nodes = made.root.children
        lsns = <uint64_t *> filled(made, &nodes[4])
        times = <int64_t *> filled(made, &nodes[5])
        nodes = self.root.children
        validity = <const uint8_t *> nodes[4].buffers[0]
        for i in range(self.num_rows):
            at = nodes[4].offset + i
            if validity == NULL or validity[at >> 3] >> (at & 7) & 1:
                lsns[i] = (<const uint64_t *> nodes[4].buffers[1])[at]
                times[i] = (<const int64_t *> nodes[5].buffers[1])[at]
            else:
                lsns[i] = lsn
                times[i] = time
        return made

    def as_read(self, commit_lsn: int, commit_time: int, first_seq: int) -> ChangeBatch:
        """Return the same rows as rows of a snapshot: with the operation "read", not "insert".

        Their xid is null, and their `seq` counts up from `first_seq`. A TRUNCATE stays a TRUNCATE:
        it deletes the rows from before the snapshot. The new batch shares all other buffers with
        this batch.

        Parameters
        ----------
        commit_lsn : int
            Stored in all rows.
        commit_time : int
            Stored in all rows, in microseconds since 2000-01-01 UTC.
        first_seq : int
            The `seq` of the first row.

        Raises
        ------
        PgOutputError
            ``unfit_input``: a row is an update or a delete.
        TypeError
            An argument is not an int.
        OverflowError
            A value does not fit into its column.
        """
        cdef ChangeBatch made
        cdef Node *nodes
        cdef int32_t *ends
        cdef const int32_t *old_ends
        cdef const char *old_text
        cdef char *text
        cdef uint64_t *lsns
        cdef int64_t *times
        cdef int64_t *seqs
        cdef void *zeros
        cdef int64_t i, first
        cdef int32_t at = 0
        cdef uint64_t lsn
        cdef int64_t time
        lsn, time = commit_of(commit_lsn, commit_time, "spark" if self.wide else "arrow")
        first = first_seq_of(first_seq, self.num_rows)
        made = shared(self, 6)
        nodes = made.root.children
        old_ends = <const int32_t *> nodes[0].buffers[1] + nodes[0].offset
        old_text = <const char *> nodes[0].buffers[2]
        ends = <int32_t *> block(made, (self.num_rows + 1) * 4)
        text = <char *> block(made, self.num_rows * 8 + 8)
        zeros = block(made, self.num_rows * 8)
        lsns = <uint64_t *> filled(made, &nodes[4])
        times = <int64_t *> filled(made, &nodes[5])
        seqs = <int64_t *> filled(made, &nodes[6])
        memset(zeros, 0, self.num_rows * 8)
        for i in range(self.num_rows):
            ends[i] = at
            if old_text[old_ends[i]] == c't':
                memcpy(text + at, OPS[TRUNCATE], 8)
                at += 8
            elif old_text[old_ends[i]] == c'i' or old_text[old_ends[i]] == c'r':
                memcpy(text + at, <const char *> READ_OP, 4)
                at += 4
            else:
                refuse_read(i, (old_text + old_ends[i])[:old_ends[i + 1] - old_ends[i]])
            lsns[i] = lsn
            times[i] = time
            seqs[i] = first + i
        ends[self.num_rows] = at
        nodes[0].arena = nodes[1].arena = made.commit_arena
        nodes[0].offset = nodes[1].offset = 0
        nodes[0].buffers[1] = ends
        nodes[0].buffers[2] = text
        nodes[1].buffers[0] = nodes[1].buffers[1] = zeros
        nodes[1].null_count = self.num_rows
        return made

    def part(self, int64_t start, int64_t end) -> ChangeBatch:
        """Return the rows from `start` to before `end` as a batch that shares all buffers.

        Parameters
        ----------
        start, end : int
            Indices of rows.

        Raises
        ------
        IndexError
            There are no such rows.
        """
        cdef ChangeBatch made
        cdef Node *node
        cdef int32_t c
        if not 0 <= start <= end <= self.num_rows:
            refuse_part(start, end, self.num_rows)
        made = shared(self, 0)
        made.num_rows = made.root.length = end - start
        made.size = self.size * made.num_rows // max(self.num_rows, 1)
        for c in range(COLUMNS):
            node = &made.root.children[c]
            if node.null_count == node.length:
                node.null_count = made.num_rows
            elif node.null_count > 0:
                node.null_count = nulls_in(
                    <const uint8_t *> node.buffers[0], node.offset + start, node.offset + end
                )
            node.offset += start
            node.length = made.num_rows
        return made


# Count the nulls in a range of a column.
cdef int64_t nulls_in(const uint8_t *validity, int64_t start, int64_t end) noexcept nogil:
    cdef int64_t nulls = 0, i
    for i in range(start, end):
        nulls += not validity[i >> 3] >> (i & 7) & 1
    return nulls


# Make a batch with the same columns, but its own nodes, and room for `blocks` new buffers.
cdef ChangeBatch shared(ChangeBatch batch, int blocks):
    cdef ChangeBatch made = ChangeBatch.__new__(ChangeBatch)
    made.layout = batch.layout
    made.schema = batch.schema
    made.binary = batch.binary
    made.wide = batch.wide
    made.num_rows = batch.num_rows
    made.size = batch.size
    made.root = batch.root
    made.base = batch if batch.commit_arena != NULL else None
    keep(batch.arena)
    made.arena = batch.arena
    made.commit_arena = make_arena(blocks + 1)
    if made.commit_arena == NULL:
        raise MemoryError
    made.root.children = <Node *> block(made, COLUMNS * sizeof(Node))
    memcpy(made.root.children, batch.root.children, COLUMNS * sizeof(Node))
    return made


cdef void *block(ChangeBatch made, int64_t size) except NULL:
    cdef void *found = own(made.commit_arena, malloc(size), size)
    if found == NULL:
        raise MemoryError
    return found


# Make a new buffer of eight bytes per row for a column without nulls.
cdef void *filled(ChangeBatch made, Node *node) except NULL:
    cdef void *data = block(made, made.num_rows * 8)
    node.arena = made.commit_arena
    node.offset = 0
    node.buffers[0] = NULL
    node.buffers[1] = data
    node.null_count = 0
    return data


# --- transactions ------------------------------------------------------------------------------

@cython.boundscheck(True)
def rows_by_commit(
    ChangeBatch batch, const uint64_t[::1] commit_lsns
) -> list[tuple[int, int, int, int]]:
    """Find the rows of each transaction, in a batch whose rows all have a commit LSN.

    Parameters
    ----------
    batch : ChangeBatch
    commit_lsns : uint64[k]
        The commit LSNs of the transactions, each greater than the one before.

    Returns
    -------
    list of (int, int, int, int)
        For each transaction with rows: its index in `commit_lsns`, the `seq` of its first row, and
        the indices of its first row and of the row behind its last.
    """
    cdef const uint64_t *lsns = <const uint64_t *> batch.root.children[4].buffers[1]
    cdef const int64_t *seqs = <const int64_t *> batch.root.children[6].buffers[1]
    cdef int64_t start = 0, end
    cdef Py_ssize_t i = 0
    cdef list found = []
    while start < batch.num_rows:
        end = start + 1
        while end < batch.num_rows and lsns[end] == lsns[start]:
            end += 1
        while commit_lsns[i] != lsns[start]:
            i += 1
        found.append((i, seqs[start], start, end))
        start = end
    return found


# --- streams -------------------------------------------------------------------------------------

cdef struct Streamed:
    void *batches  # a list, owned
    int64_t next


cdef void release_stream(ArrowArrayStream *stream) noexcept with gil:
    cdef Streamed *streamed = <Streamed *> stream.private_data
    Py_DECREF(<object> streamed.batches)
    free(streamed)
    stream.release = NULL


cdef int stream_schema(ArrowArrayStream *stream, ArrowSchema *schema) noexcept with gil:
    cdef Streamed *streamed = <Streamed *> stream.private_data
    cdef ChangeBatch batch
    try:
        batch = (<list> streamed.batches)[0]
        copy_schema(&batch.schema.schema, schema)
    except MemoryError:
        return ENOMEM
    except Exception:
        return EINVAL
    return 0


cdef int stream_next(ArrowArrayStream *stream, ArrowArray *array) noexcept with gil:
    cdef Streamed *streamed = <Streamed *> stream.private_data
    cdef list batches = <list> streamed.batches
    cdef ChangeBatch batch
    if streamed.next == len(batches):
        memset(array, 0, sizeof(ArrowArray))
        return 0
    batch = batches[streamed.next]
    streamed.next += 1
    return 0 if export_array(&batch.root, array) else ENOMEM


cdef const char *stream_error(ArrowArrayStream *stream) noexcept nogil:
    return NULL


cdef void free_stream_capsule(object capsule) noexcept:
    cdef ArrowArrayStream *stream = <ArrowArrayStream *> PyCapsule_GetPointer(
        capsule, "arrow_array_stream"
    )
    if stream.release != NULL:
        stream.release(stream)
    free(stream)


def export_stream(batches: list[ChangeBatch]) -> object:
    """Export one or more batches, all with the same schema, as the capsule of an Arrow stream."""
    cdef ArrowArrayStream *stream = <ArrowArrayStream *> calloc(1, sizeof(ArrowArrayStream))
    cdef Streamed *streamed = <Streamed *> calloc(1, sizeof(Streamed))
    cdef list kept = list(batches)
    if stream == NULL or streamed == NULL:
        free(stream)
        free(streamed)
        raise MemoryError
    Py_INCREF(kept)
    streamed.batches = <void *> kept
    stream.get_schema = stream_schema
    stream.get_next = stream_next
    stream.get_last_error = stream_error
    stream.release = release_stream
    stream.private_data = streamed
    return PyCapsule_New(stream, "arrow_array_stream", free_stream_capsule)


# help() shows the package from which users import the class.
name_type(ChangeBatch, b"pgoutput_fast.ChangeBatch")
