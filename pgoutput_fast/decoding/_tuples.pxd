# The tuples of rows, and the compiled form of their relation's plan.

from libc.stdint cimport int32_t, uint8_t, uint32_t

from cpython.bytes cimport PyBytes_AS_STRING

from pgoutput_fast.protocol._wire cimport XID_SIZE, ColumnSlice


cdef class Plan:
    # The RelationPlan, and copies of its attributes. codes, text and binary are None until the
    # first value is decoded.
    cdef object plan
    cdef bytes codes
    cdef tuple text
    cdef tuple binary
    cdef int32_t width
    cdef bint utf8


cdef class TupleData:
    cdef bytes _frame
    cdef Plan _plan  # None if the frame was decoded without a Decoder
    # The ColumnSlices of all columns, and one more for the end of the tuple; None until a single
    # column is accessed.
    cdef bytes _slices
    cdef uint32_t _start
    cdef uint32_t _width
    cdef bint _in_stream
    cdef bint _is_old

    cdef object _is_key(self)
    cdef bytes _wire(self)
    cdef Py_ssize_t _index(self, key) except -1
    cdef ColumnSlice _column(self, Py_ssize_t i) except *
    cdef object _raw(self, ColumnSlice column)
    cdef object _text(self, Py_ssize_t i, ColumnSlice column)

cdef Plan compiled(object plan)
cdef object plan_of(Plan plan)
cdef object fail_stateless(bytes frame, bint in_stream)
cdef TupleData make_tuple(bytes frame, bint in_stream, Plan plan, uint32_t start, bint is_old)


# Bytes to add to a row's offsets: inside a stream chunk, an xid follows the tag.
cdef inline Py_ssize_t xid_size(bint in_stream) noexcept nogil:
    return XID_SIZE if in_stream else 0


cdef inline const uint8_t *data_of(bytes frame) except NULL:
    # Insert.__new__(Insert) makes a message without a frame. It must raise, not crash.
    if frame is None:
        raise TypeError("the message was not made by decoding a frame")
    return <const uint8_t *> PyBytes_AS_STRING(frame)
