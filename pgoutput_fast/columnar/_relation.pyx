# cython: annotation_typing=False, cdivision=True
"""Collect the rows of one version of a relation: the twin of ``_pure_relation.py``.

Columns grow by realloc(). A row is counted after its last value is stored. Until then, undo() can
remove it.
"""

from __future__ import annotations

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from libc.stdint cimport int32_t, int64_t, uint8_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memset, strlen

from pgoutput_fast.columnar._columns cimport (
    END, FORM, PGF_FIXED, PGF_FIXED_LIST, PGF_LIST, PGF_STRUCT, PGF_VARIABLE, SKIP, SLACK, SLOW,
    Column, LabelTable, Part, Rows, Side, put_null, put_nulls, roomy, slot_of,
)
from pgoutput_fast.columnar._memory cimport grow

from ..names import shown_name
from .fields import SYNTAXES

cdef enum:
    FIRST_ROWS = 16


# --- columns -------------------------------------------------------------------------------------

# Make room for `capacity` rows in the columns of a side.
cdef bint grow_side(Rows *rows, Side *side, int64_t capacity) noexcept nogil:
    cdef Column *column
    cdef int32_t c
    for c in range(rows.width):
        column = &side.columns[c]
        if column.codes[1] == SKIP or (side == &rows.before and column.data == NULL):
            continue
        if not grow_column(rows, column, c, side.capacity, capacity):
            return False
    side.capacity = capacity
    return True


# Make room for `capacity` rows in a column that has room for `before` rows.
cdef bint grow_column(
    Rows *rows, Column *column, int32_t c, int64_t before, int64_t capacity
) noexcept nogil:
    if column.validity != NULL and not grow_validity(column, before, capacity):
        return False
    if column.width == 0:
        return grow(<void **> &column.data, (capacity + 7) // 8 + SLACK)
    if column.width > 0:
        return grow(<void **> &column.data, capacity * column.width + SLACK)
    if not grow(<void **> &column.offsets, (capacity + 1) * 4):
        return False
    if before == 0:
        column.offsets[0] = 0
    if column.data == NULL:
        column.room = roomy(rows.usual_bytes[c])
        return grow(<void **> &column.data, column.room)
    return True


# Allocate a column of `before` for its first value, in `row`. All rows before are null.
cdef bint begin_column(Rows *rows, Column *column, int32_t c, int64_t row) noexcept nogil:
    if row > 0 and not grow_validity(column, 0, rows.before.capacity):
        return False
    if not grow_column(rows, column, c, 0, rows.before.capacity):
        return False
    if row > 0:
        put_nulls(column, 0, row)
    return True


# Make room in a validity bitmap. Set all new bits: a row is valid until its bit is cleared.
cdef bint grow_validity(Column *column, int64_t before, int64_t capacity) noexcept nogil:
    cdef int64_t used = (before + 7) // 8 if column.validity != NULL else 0
    if not grow(<void **> &column.validity, (capacity + 7) // 8):
        return False
    memset(column.validity + used, 0xFF, (capacity + 7) // 8 - used)
    return True


cdef bint set_null(Column *column, Side *side, int64_t row) noexcept nogil:
    if column.data == NULL:
        return True
    if column.validity == NULL and not grow_validity(column, 0, side.capacity):
        return False
    put_null(column, row)
    return True


# Make room for `row` on a side, and append nulls for earlier rows without a tuple on this side.
cdef bint make_ready(Rows *rows, Side *side, int64_t row) noexcept nogil:
    if side.capacity <= row and not grow_side(rows, side, rows.capacity):
        return False
    return pad(rows, side, row)


# Append nulls up to `count` rows, for rows without a tuple on this side.
cdef bint pad(Rows *rows, Side *side, int64_t count) noexcept nogil:
    cdef Column *column
    cdef int32_t c
    if side.filled == count:
        return True
    if side.capacity < count and not grow_side(rows, side, count):
        return False
    for c in range(rows.width):
        column = &side.columns[c]
        if column.data == NULL:
            continue
        if column.validity == NULL and not grow_validity(column, 0, side.capacity):
            return False
        put_nulls(column, side.filled, count)
    side.filled = count
    return True


# Reset a column to the state before its first value.
cdef inline void forget_kind(Column *column) noexcept nogil:
    column.kind = 0
    column.code = SLOW


# Let the next batch decide the type of a FORM column anew.
cdef inline void forget_form(Column *column) noexcept nogil:
    if column.codes[1] == FORM:
        column.form = UNDECIDED
        forget_kind(column)


# Undo a row that was not counted: set its validity bits again, and forget the forms that it
# decided. The next row overwrites its values.
cdef void undo(Rows *rows, Side *side) noexcept nogil:
    cdef int32_t c
    for c in range(rows.width):
        if side.columns[c].validity != NULL and side.filled < side.capacity:
            side.columns[c].validity[side.filled >> 3] |= 1 << (side.filled & 7)
        if rows.form_rows[c] == rows.count:
            forget_form(&side.columns[c])


cdef bint grow_rows(Rows *rows) noexcept nogil:
    cdef int64_t capacity = rows.capacity * 2
    if rows.capacity == 0:
        capacity = rows.usual if rows.usual > FIRST_ROWS else FIRST_ROWS
    if not grow(<void **> &rows.flags, capacity):
        return False
    if not (
        grow(<void **> &rows.xids, capacity * 8) and grow(<void **> &rows.subxids, capacity * 8)
        and grow(<void **> &rows.lsns, capacity * 8)
        and grow(<void **> &rows.commit_lsns, capacity * 8)
        and grow(<void **> &rows.commit_times, capacity * 8)
        and grow(<void **> &rows.seqs, capacity * 8)
    ):
        return False
    if rows.unchanged_ends != NULL and not grow(<void **> &rows.unchanged_ends, (capacity + 1) * 4):
        return False
    rows.capacity = capacity
    return True


cdef void free_side(Rows *rows, Side *side) noexcept nogil:
    cdef int32_t c
    for c in range(rows.width):
        free(side.columns[c].validity)
        free(side.columns[c].data)
        free(side.columns[c].offsets)
    empty_side(rows, side)


cdef void empty_side(Rows *rows, Side *side) noexcept nogil:
    cdef int32_t c
    for c in range(rows.width):
        side.columns[c].validity = NULL
        side.columns[c].data = NULL
        side.columns[c].offsets = NULL
        side.columns[c].room = 0
        forget_form(&side.columns[c])
        if side == &rows.before and side.columns[c].codes[1] != SKIP:
            forget_kind(&side.columns[c])
    side.filled = 0
    side.capacity = 0


# --- relations -----------------------------------------------------------------------------------

cdef class RelationRows:
    """The rows of one version of a relation that arrived since its last record batch."""

    def __dealloc__(self):
        cdef int32_t c
        self.clear()
        free(self.rows.before.columns)
        free(self.rows.after.columns)
        free(self.rows.usual_bytes)
        free(self.rows.form_rows)
        free(<void *> self.rows.names)
        if self.rows.parts != NULL:
            for c in range(self.rows.width):
                free_parts(&self.rows.parts[c])
            free(self.rows.parts)

    cdef void clear(self) noexcept:
        free_side(&self.rows, &self.rows.before)
        free_side(&self.rows, &self.rows.after)
        free(self.rows.flags)
        free(self.rows.xids)
        free(self.rows.subxids)
        free(self.rows.lsns)
        free(self.rows.commit_lsns)
        free(self.rows.commit_times)
        free(self.rows.seqs)
        free(self.rows.unchanged_ends)
        free(self.rows.unchanged)
        forget_rows(&self.rows)


# Forget the memory of the rows without freeing it: an arena owns it now, or it has been freed.
cdef void forget_rows(Rows *rows) noexcept nogil:
    empty_side(rows, &rows.before)
    empty_side(rows, &rows.after)
    rows.flags = rows.xids = rows.subxids = NULL
    rows.lsns = rows.commit_lsns = NULL
    rows.commit_times = rows.seqs = NULL
    rows.unchanged_ends = rows.unchanged = NULL
    rows.count = rows.limit = rows.capacity = rows.bytes = 0
    rows.unchanged_count = rows.unchanged_bytes = 0
    rows.unchanged_room = rows.unchanged_filled = rows.reserved = 0
    rows.truncated = False
    if rows.has_before:
        rows.has_before = False
        rows.fixed -= rows.side_fixed


cdef RelationRows make_relation(object plan, object layout):
    cdef RelationRows made = RelationRows.__new__(RelationRows)
    cdef Py_ssize_t width = plan.width
    cdef Column *column
    cdef Py_ssize_t c
    made.plan = plan
    made.layout = layout
    made.rows.before.columns = <Column *> calloc(width + 1, sizeof(Column))
    made.rows.after.columns = <Column *> calloc(width + 1, sizeof(Column))
    made.rows.usual_bytes = <int64_t *> calloc(width + 1, sizeof(int64_t))
    made.rows.form_rows = <int64_t *> calloc(width + 1, sizeof(int64_t))
    made.rows.names = <const char **> calloc(width + 1, sizeof(char *))
    made.rows.parts = <Part *> calloc(width + 1, sizeof(Part))
    if (
        made.rows.before.columns == NULL or made.rows.after.columns == NULL
        or made.rows.usual_bytes == NULL or made.rows.form_rows == NULL or made.rows.names == NULL
        or made.rows.parts == NULL
    ):
        raise MemoryError
    made.rows.width = width
    made.rows.blocks = 64 + width * 8
    made.labels = {}
    made.rows.owner = <void *> made
    made.schemas = {}
    made.positions = [] if layout is None else [field.position for field in layout.columns]
    made.names = [shown_name(name).encode() for name in plan.names]
    for c in range(width):
        made.rows.names[c] = PyBytes_AS_STRING(made.names[c])
    made.rows.wanted = layout is not None
    for c in range(width):
        made.rows.after.columns[c].codes[1] = SKIP
        made.rows.after.columns[c].codes[0] = SKIP
    if layout is not None:
        made.rows.fixed = layout.row_bytes
        made.rows.side_fixed = layout.side_bytes
        for field in layout.columns:
            column = &made.rows.after.columns[field.position]
            column.codes[1] = FORM if field.by_format else field.text_code
            column.codes[0] = FORM if field.by_format else field.binary_code
            column.form_codes[1] = field.text_code
            column.form_codes[0] = field.binary_code
            shape_column(column, field)
            if field.is_nested or field.labels is not None:
                make_part(made, &made.rows.parts[field.position], field)
                if field.labels is not None:
                    column.labels = made.rows.parts[field.position].labels
                else:
                    column.part = &made.rows.parts[field.position]
    made.rows.after.columns[width].code = END
    memcpy(made.rows.before.columns, made.rows.after.columns, (width + 1) * sizeof(Column))
    return made


cdef int shape_column(Column *column, object field) except -1:
    column.width = field.width
    column.scale = max(field.scale, 0)
    column.limit = 10 ** min(field.precision, 18) if field.precision > 0 else 0
    column.field = <void *> field
    return 0


# Initialize the part of a nested field or an enum, and the parts of its children.
cdef int make_part(RelationRows relation, Part *part, object field) except -1:
    cdef Py_ssize_t count = len(field.children)
    cdef Py_ssize_t i
    cdef EnumTable table
    kind = field.format[:2]
    part.width = field.width
    part.shape = PGF_FIXED if field.width >= 0 else PGF_VARIABLE
    if kind == "+s":
        part.shape = PGF_STRUCT
    elif kind == "+w":
        part.shape = PGF_FIXED_LIST
        part.width = int(field.format[3:])
    elif count > 0:
        part.shape = PGF_LIST
    part.syntax = SYNTAXES[field.syntax]
    part.delimiter = ord(field.delimiter)
    part.codes[1] = field.text_code
    part.codes[0] = field.binary_code
    part.type_id = field.type_id
    shape_column(&part.cell, field)
    part.cell.offsets = part.cell_ends
    # For a part, the arena takes over seven blocks of memory in `before`, and seven in `after`:
    # validity, offsets, data, children, a dictionary and its two buffers.
    relation.rows.blocks += 2 * 7
    if field.labels is not None:
        table = relation.labels.get(field.labels)
        if table is None:
            table = relation.labels[field.labels] = EnumTable.__new__(EnumTable)
            table.fill(field.labels)
        part.labels = &table.table
        part.cell.labels = &table.table
    if count == 0:
        return 0
    part.children = <Part *> calloc(count, sizeof(Part))
    if part.children == NULL:
        raise MemoryError
    part.n_children = count
    for i in range(count):
        make_part(relation, &part.children[i], field.children[i])
    return 0


cdef void free_parts(Part *part) noexcept nogil:
    cdef int32_t i
    for i in range(part.n_children):
        free_parts(&part.children[i])
    free(part.children)


@cython.final
cdef class EnumTable:
    """The labels of an enum, in a hash table that needs no interpreter."""

    cdef int fill(self, labels) except -1:
        cdef bytes label
        # A list: another thread may add a label.
        cdef list names = list(labels.numbers)
        cdef Py_ssize_t count = len(names), size = 0, slots = 8
        cdef int32_t number = 0
        for label in names:
            size += PyBytes_GET_SIZE(label)
        while slots < 2 * count:
            slots *= 2
        self.forget()
        self.table.ends = <int32_t *> calloc(count + 1, 4)
        self.table.text = <uint8_t *> malloc(size + 1)
        self.table.slots = <int32_t *> calloc(slots, 4)
        if self.table.ends == NULL or self.table.text == NULL or self.table.slots == NULL:
            raise MemoryError
        self.table.count = count
        self.table.mask = slots - 1
        size = 0
        for label in names:
            memcpy(self.table.text + size, PyBytes_AS_STRING(label), PyBytes_GET_SIZE(label))
            slot_of(
                &self.table, <const uint8_t *> PyBytes_AS_STRING(label), PyBytes_GET_SIZE(label)
            )[0] = number + 1
            size += PyBytes_GET_SIZE(label)
            number += 1
            self.table.ends[number] = size
        return 0

    cdef void forget(self) noexcept:
        free(self.table.ends)
        free(self.table.text)
        free(self.table.slots)
        memset(&self.table, 0, sizeof(LabelTable))

    def __dealloc__(self):
        self.forget()


# Record that the next row lacks a column, which was not sent (unchanged TOAST).
cdef bint note_unchanged(Rows *rows, int32_t column) noexcept nogil:
    cdef int64_t i, room
    if rows.unchanged_ends == NULL:
        if not grow(<void **> &rows.unchanged_ends, (rows.capacity + 1) * 4):
            return False
        rows.unchanged_ends[0] = 0
    if rows.unchanged_count == rows.unchanged_room:
        room = rows.unchanged_room * 2 + 64
        if not grow(<void **> &rows.unchanged, room * 4):
            return False
        rows.unchanged_room = room
    for i in range(rows.unchanged_filled, rows.count):
        rows.unchanged_ends[i + 1] = rows.unchanged_ends[i]
    rows.unchanged_filled = rows.count
    rows.unchanged[rows.unchanged_count] = column
    rows.unchanged_count += 1
    rows.bytes += 4 + strlen(rows.names[column])
    rows.unchanged_bytes += 1 + strlen(rows.names[column])
    return True
