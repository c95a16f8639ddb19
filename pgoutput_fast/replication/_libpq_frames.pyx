# cython: annotation_typing=False
"""Take frames out of what libpq has received. The twin of ``_pure_libpq_frames.py``."""

from __future__ import annotations

cimport cpython.array as arrays
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytearray cimport PyByteArray_AS_STRING, PyByteArray_Resize
from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.stdint cimport int64_t, uint8_t, uint64_t
from libc.string cimport memcpy

from pgoutput_fast._loads cimport load_uint64

from ..protocol.copydata import XLOG_DATA, XLOG_DATA_TAG

# The header of XLogData, as pgoutput_fast.protocol.copydata describes it.
cdef enum:
    DATA_START = 1
    WAL_END = 9
    SEND_TIME = 17
    HEADER_SIZE = 25

if (XLOG_DATA.format, XLOG_DATA_TAG) != (">xQQq", c'w'):
    raise ImportError("the header of CopyData is not that of this extension; rebuild it")


def take_copy_data(get_copy_data: Any, list frames, Py_ssize_t most) -> tuple:
    """Take XLogData from libpq until something else comes, or `most` bytes were taken.

    The compiled twin describes arguments and result.
    """
    cdef Py_buffer view
    cdef Py_ssize_t size = 0
    cdef uint64_t lsn, wal_end, received = 0
    cdef const uint8_t *data
    cdef object answer, message, start
    while True:
        answer = get_copy_data(1)
        message = (<tuple?> answer)[1]
        if (<object> (<tuple> answer)[0]) <= 0:
            return size, received, answer[0], message
        PyObject_GetBuffer(message, &view, PyBUF_SIMPLE)
        try:
            data = <const uint8_t *> view.buf
            if view.len < HEADER_SIZE or data[0] != c'w':
                return size, received, answer[0], message
            lsn, wal_end = load_uint64(data + DATA_START), load_uint64(data + WAL_END)
            start = lsn
            frames.append((
                start,
                start if wal_end == lsn else wal_end,
                <int64_t> load_uint64(data + SEND_TIME),
                PyBytes_FromStringAndSize(
                    <const char *> data + HEADER_SIZE, view.len - HEADER_SIZE
                ),
            ))
            size += view.len
        finally:
            PyBuffer_Release(&view)
        received = max(received, lsn)
        if size >= most:
            return size, received, answer[0], None


def pack_copy_data(
    get_copy_data: Any, bytearray data, arrays.array ends, arrays.array lsns, Py_ssize_t most
) -> tuple:
    """Do what `take_copy_data` does, and put all frames into one buffer.

    The compiled twin describes arguments and result.
    """
    cdef Py_buffer view
    cdef Py_ssize_t size = 0, length
    cdef int64_t end = len(data)
    cdef uint64_t lsn, received = 0
    cdef const uint8_t *source
    cdef object answer, message
    if ends.itemsize != sizeof(int64_t) or lsns.itemsize != sizeof(uint64_t):
        raise TypeError("arrays of 8 bytes an item are expected")
    while True:
        answer = get_copy_data(1)
        message = (<tuple?> answer)[1]
        if (<object> (<tuple> answer)[0]) <= 0:
            return size, received, answer[0], message
        PyObject_GetBuffer(message, &view, PyBUF_SIMPLE)
        try:
            source = <const uint8_t *> view.buf
            if view.len < HEADER_SIZE or source[0] != c'w':
                return size, received, answer[0], message
            length = view.len - HEADER_SIZE
            lsn = load_uint64(source + DATA_START)
            PyByteArray_Resize(data, end + length)
            memcpy(PyByteArray_AS_STRING(data) + end, source + HEADER_SIZE, length)
            end += length
            arrays.extend_buffer(ends, <char *> &end, 1)
            arrays.extend_buffer(lsns, <char *> &lsn, 1)
            size += view.len
        finally:
            PyBuffer_Release(&view)
        received = max(received, lsn)
        if size >= most:
            return size, received, answer[0], None
