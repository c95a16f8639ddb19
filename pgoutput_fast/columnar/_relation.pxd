# Collect the rows of one version of a relation for its next batch.

from libc.stdint cimport int32_t, int64_t

from pgoutput_fast.columnar._columns cimport Column, LabelTable, Rows, Side

# The type of a column whose type follows its values: utf8 for text, binary for binary values.
# Each batch decides it with the column's first value.
cdef enum Form:
    UNDECIDED  # the batch has no value yet
    AS_TEXT
    AS_BINARY


cdef class RelationRows:
    cdef Rows rows
    cdef object layout  # None: the table is not decoded
    cdef object plan
    cdef list names
    cdef list positions  # of the columns that are decoded
    cdef dict schemas  # positions of the columns that are binary → Schema
    cdef dict labels  # Labels → EnumTable

    cdef void clear(self) noexcept


cdef class EnumTable:
    cdef LabelTable table

    cdef int fill(self, labels) except -1
    cdef void forget(self) noexcept

cdef RelationRows make_relation(object plan, object layout)
cdef bint begin_column(Rows *rows, Column *column, int32_t c, int64_t row) noexcept nogil
cdef bint set_null(Column *column, Side *side, int64_t row) noexcept nogil
cdef bint make_ready(Rows *rows, Side *side, int64_t row) noexcept nogil
cdef bint pad(Rows *rows, Side *side, int64_t count) noexcept nogil
cdef void undo(Rows *rows, Side *side) noexcept nogil
cdef bint grow_rows(Rows *rows) noexcept nogil
cdef bint note_unchanged(Rows *rows, int32_t column) noexcept nogil
cdef void free_side(Rows *rows, Side *side) noexcept nogil
cdef void forget_rows(Rows *rows) noexcept nogil
