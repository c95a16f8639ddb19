# Make Python objects from the bytes of values, for frequent types.

from libc.stdint cimport uint8_t, uint64_t

cdef extern from "_convert.h" nogil:
    ctypedef struct pgf_power:
        uint64_t high
        uint64_t low

# The codecs that are compiled: names and numbers are those of CODES in values/base.py. GENERAL
# stands for all other codecs: the column's Python function decodes each value.
cdef enum Code:
    GENERAL = 0
    BOOL = 1
    INT2 = 2
    INT4 = 3
    INT8 = 4
    UINT4 = 5
    FLOAT8 = 6
    NUMERIC = 7
    TEXT = 8
    BYTEA = 9
    UUID = 10
    DATE = 11
    TIME = 12
    TIMESTAMP = 13
    TIMESTAMPTZ = 14
    JSONB = 15
    OTHER = 16

cdef object utf8_text(const char *text, Py_ssize_t length)
cdef object from_text(uint8_t code, const char *at, Py_ssize_t length, object slowly)
cdef object from_binary(uint8_t code, const char *at, Py_ssize_t length, object slowly)
cdef const pgf_power *powers_of_five() noexcept nogil

cdef enum:
    # Bytes that a frame has in front of every value, so that functions may read them: a row's
    # header, then the value's kind and length. _tuples.pyx compares this number with the layout of
    # frames.
    BEFORE = 13
