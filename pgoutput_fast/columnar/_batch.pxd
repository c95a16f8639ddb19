# The rows of a relation as an Arrow record batch.

from libc.stdint cimport int64_t

from pgoutput_fast.columnar._columns cimport Rows
from pgoutput_fast.columnar._export cimport Arena, Node, Schema


cdef class ChangeBatch:
    cdef Arena *arena
    cdef Arena *commit_arena  # what with_commit(), as_read() or part() has made; else NULL
    cdef ChangeBatch base  # another batch, whose commit_arena this batch uses too; else None
    cdef Node root
    cdef Schema schema
    cdef readonly object layout
    cdef readonly tuple binary
    cdef bint wide
    cdef readonly int64_t num_rows
    cdef int64_t size

cdef bint finish(Rows *rows, ChangeBatch batch, bint has_lsns) noexcept nogil
