# cython: annotation_typing=False, cdivision=True
"""Make Insert frames of rows of COPY, and cut xids out of frames, compiled.

The twin is in ``_pure_bulk.py``.
"""

from __future__ import annotations

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from cpython.object cimport PyObject
from cpython.ref cimport Py_XDECREF
from libc.stdint cimport int16_t, int32_t, int64_t, uint8_t
from libc.string cimport memcpy

from pgoutput_fast._loads cimport load_uint16, load_uint32
from pgoutput_fast.protocol._wire cimport MAX_FRAME, VALUE_HEAD
from pgoutput_fast.columnar._memory cimport expect_memory

from .faults import refuse_copy, refuse_frame

cdef extern from "Python.h":
    PyObject *PyBytes_FromStringAndSize(const char *value, Py_ssize_t size) except NULL
    int _PyBytes_Resize(PyObject **value, Py_ssize_t size) except -1

cdef enum:
    # Bytes. A shorter value, including its length field, is copied as this many bytes: a copy of a
    # fixed size takes two moves, a copy of a variable size takes a call.
    SHORT = 16

cdef enum Fault:
    NONE
    COLUMNS
    LENGTH
    FRAME
    END


# A bytes object that is shortened after its contents are written. Computing the size in advance
# would take a second walk, and another thread could change the input between both.
@cython.final
cdef class _Bytes:
    cdef PyObject *value

    def __cinit__(self, Py_ssize_t most):
        self.value = PyBytes_FromStringAndSize(NULL, most)

    def __dealloc__(self):
        Py_XDECREF(self.value)

    cdef void *at(self):
        return PyBytes_AS_STRING(<object> self.value)

    # Shorten the object to `size` bytes, and return it.
    cdef bytes taken(self, Py_ssize_t size):
        _PyBytes_Resize(&self.value, size)
        return <bytes> self.value


# The progress of reading and writing, and the first fault.
cdef struct Rows:
    const uint8_t *end
    const uint8_t *at  # the end of the last complete row
    const uint8_t *head
    Py_ssize_t head_length
    const uint8_t *formats
    int32_t width
    uint8_t *made
    int64_t *offsets
    Py_ssize_t count
    bint ended
    Fault fault
    const uint8_t *place
    int64_t found
    int32_t column


def copy_rows(data: Any, start: int, head: bytes, formats: bytes) -> tuple[bytes, bytes, int, bool]:
    """Make Insert frames of rows in COPY's binary format.

    Parameters
    ----------
    data : buffer
    start : int
        The byte of `data` at which the first row begins.
    head : bytes
        The beginning of each frame, up to the number of columns inclusive.
    formats : bytes
        For each column the kind byte of its values, "t" or "b".

    Returns
    -------
    bytes
        The frames.
    bytes
        Their offsets as int64[n + 1].
    int
        The byte of `data` behind the last complete row, or behind COPY's trailer.
    bool
        Whether COPY's trailer was reached.

    Raises
    ------
    PgOutputError
        A row is malformed, or its frame would be too long.
    """
    cdef Py_buffer view
    cdef Rows rows
    cdef bytes head_bytes = head
    cdef bytes format_bytes = formats
    cdef _Bytes made, offsets
    cdef Py_ssize_t from_byte = start
    cdef Py_ssize_t size, most_rows, most
    rows.head = <const uint8_t *> PyBytes_AS_STRING(head_bytes)
    rows.head_length = PyBytes_GET_SIZE(head_bytes)
    rows.formats = <const uint8_t *> PyBytes_AS_STRING(format_bytes)
    rows.width = <int32_t> PyBytes_GET_SIZE(format_bytes)
    rows.count = 0
    rows.ended = False
    rows.fault = NONE
    rows.column = 0
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        size = view.len - from_byte
        # A row has at least its count and the lengths of its columns. A frame is longer than its
        # row by the head without the count, and by one byte for the kind of each column. One more
        # row may be cut off after its frame was begun.
        most_rows = size // (2 + 4 * rows.width)
        most = size + (most_rows + 1) * (rows.head_length - 2 + rows.width) + SHORT
        expect_memory(most + 8 * most_rows)
        made = _Bytes(most)
        offsets = _Bytes(8 * (most_rows + 1))
        rows.at = <const uint8_t *> view.buf + from_byte
        rows.end = <const uint8_t *> view.buf + view.len
        rows.made = <uint8_t *> made.at()
        rows.offsets = <int64_t *> offsets.at()
        with nogil:
            transcode(&rows)
        if rows.fault != NONE:
            refuse(&rows, <const uint8_t *> view.buf)
        consumed = rows.at - <const uint8_t *> view.buf
    finally:
        PyBuffer_Release(&view)
    size = rows.offsets[rows.count]
    return made.taken(size), offsets.taken(8 * (rows.count + 1)), consumed, bool(rows.ended)


cdef int refuse(Rows *rows, const uint8_t *begin) except -1:
    position = rows.place - begin
    if rows.fault == COLUMNS:
        refuse_copy("columns", position, rows.found, expected=rows.width)
    if rows.fault == END:
        refuse_copy("end", position, rows.found)
    code = "length" if rows.fault == LENGTH else "frame"
    refuse_copy(code, position, rows.found, column=rows.column)


cdef void transcode(Rows *rows) noexcept nogil:
    cdef const uint8_t *at = rows.at
    cdef uint8_t *made = rows.made
    cdef int16_t count
    rows.offsets[0] = 0
    while rows.end - at >= 2:
        count = <int16_t> load_uint16(at)
        if count == -1:
            if rows.end - at > 2:
                set_fault(rows, END, at + 2, rows.end - at - 2)
            rows.ended = True
            rows.at = at + 2
            return
        if count != rows.width:
            set_fault(rows, COLUMNS, at, count)
            return
        at += 2
        made = take_row(rows, &at, made)
        if made == NULL:
            return
        rows.at = at
        rows.count += 1
        rows.offsets[rows.count] = made - rows.made


# Write the frame of a row, behind the row's count, and move `row` to its end. Return the end of the
# frame; NULL: the row is cut off or has a fault.
cdef inline uint8_t *take_row(Rows *rows, const uint8_t **row, uint8_t *frame) noexcept nogil:
    cdef const uint8_t *at = row[0]
    cdef const uint8_t *end = rows.end
    cdef uint8_t *made = frame + rows.head_length
    cdef int32_t length
    cdef int32_t column
    memcpy(frame, rows.head, rows.head_length)
    for column in range(rows.width):
        if end - at < 4:
            return NULL
        length = <int32_t> load_uint32(at)
        if length == -1:
            made[0] = c'n'
            made += 1
            at += 4
            continue
        rows.column = column
        if length < 0:
            set_fault(rows, LENGTH, at, length)
            return NULL
        if (made - frame) + VALUE_HEAD + <int64_t> length > MAX_FRAME:
            set_fault(rows, FRAME, at, length)
            return NULL
        if end - at - 4 < length:
            return NULL
        made[0] = rows.formats[column]
        # COPY and frames have the same length field: copy it together with the value.
        if length <= SHORT - 4 and end - at >= SHORT:
            memcpy(made + 1, at, SHORT)
        else:
            memcpy(made + 1, at, 4 + length)
        made += VALUE_HEAD + length
        at += 4 + length
    row[0] = at
    return made


cdef void set_fault(
    Rows *rows, Fault fault, const uint8_t *place, int64_t found
) noexcept nogil:
    rows.fault = fault
    rows.place = place
    rows.found = found


def cut_xids(data: Any, offsets: Any, lengths: bytes) -> tuple[bytes, bytes]:
    """Cut the xids out of frames.

    Parameters
    ----------
    data : buffer
    offsets : int64[n + 1]
    lengths : bytes
        For each tag the length of the xid behind it, in bytes. 255: frames with this tag are
        refused.

    Returns
    -------
    bytes
        The frames without their xids.
    bytes
        Their offsets as int64[n + 1].

    Raises
    ------
    DecodeError
        A frame is too short, or its tag is refused.
    """
    cdef Py_buffer view, numbers
    cdef bytes table = lengths
    cdef const uint8_t *xid_lengths = <const uint8_t *> PyBytes_AS_STRING(table)
    cdef const uint8_t *frames
    cdef const int64_t *given
    cdef uint8_t *to
    cdef int64_t *to_ends
    cdef Py_ssize_t count, bad
    cdef _Bytes made, ends
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        PyObject_GetBuffer(offsets, &numbers, PyBUF_SIMPLE)
        try:
            count = numbers.len // 8 - 1
            frames = <const uint8_t *> view.buf
            given = <const int64_t *> numbers.buf
            expect_memory(given[count] - given[0] + 8 * count)
            made = _Bytes(given[count] - given[0])
            ends = _Bytes(8 * (count + 1))
            to = <uint8_t *> made.at()
            to_ends = <int64_t *> ends.at()
            with nogil:
                bad = cut(frames, given, count, xid_lengths, to, to_ends)
            if bad >= 0:
                frame = (<const char *> frames)[given[bad]:given[bad + 1]]
                refuse_frame(frame, bad, table[frame[0]] if frame else 0)
        finally:
            PyBuffer_Release(&numbers)
    finally:
        PyBuffer_Release(&view)
    return made.taken(to_ends[count]), ends.taken(8 * (count + 1))


# Copy frames without their xids. Return the index of the first frame that is refused, or -1.
cdef Py_ssize_t cut(
    const uint8_t *data, const int64_t *offsets, Py_ssize_t count, const uint8_t *lengths,
    uint8_t *made, int64_t *ends
) noexcept nogil:
    cdef uint8_t *to = made
    cdef const uint8_t *frame
    cdef uint8_t xid_length
    cdef int64_t left
    cdef Py_ssize_t i
    ends[0] = 0
    for i in range(count):
        frame = data + offsets[i]
        left = offsets[i + 1] - offsets[i] - 1
        if left < 0:
            return i
        to[0] = frame[0]
        xid_length = lengths[to[0]]
        left -= xid_length
        if left < 0 or xid_length == 0xFF:
            return i
        memcpy(to + 1, frame + 1 + xid_length, left)
        to += 1 + left
        ends[i + 1] = to - made
    return -1
