# cython: annotation_typing=False
"""Take frames from libpq's buffer of received data. The twin of ``_pure_libpq_frames.py``."""

from __future__ import annotations

import ctypes
import functools
import sys

cimport cpython.array as arrays
cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytearray cimport PyByteArray_AS_STRING, PyByteArray_Resize
from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.stdint cimport int64_t, uint8_t, uint64_t, uintptr_t
from libc.string cimport memcpy

import psycopg
from psycopg import pq

from pgoutput_fast._loads cimport load_uint64

from ..protocol.copydata import XLOG_DATA, XLOG_DATA_TAG

# Offsets in the header of XLogData. protocol/copydata.py describes the header.
cdef enum:
    DATA_START = 1
    WAL_END = 9
    SEND_TIME = 17
    HEADER_SIZE = 25

if (XLOG_DATA.format, XLOG_DATA_TAG) != (">xQQq", c'w'):
    raise ImportError("the header of CopyData is not that of this extension; rebuild it")

# Functions of libpq: PQgetCopyData, PQconsumeInput, PQfreemem.
ctypedef int (*GetCopyData)(void *, char **, int) noexcept nogil
ctypedef int (*ConsumeInput)(void *) noexcept nogil
ctypedef void (*FreeMemory)(void *) noexcept nogil


@functools.cache
def _functions() -> tuple[int, int, int] | None:
    """Return the addresses of these functions in the libpq that psycopg was compiled with.

    Return None if they are not found. The methods of psycopg do the same, but make three objects
    for each frame.
    """
    module = sys.modules[pq.PGconn.__module__]
    if pq.__impl__ not in ("binary", "c"):
        return None
    try:
        libpq = ctypes.CDLL(module.__file__)
        if libpq.PQlibVersion() != pq.version():
            return None
        found = libpq.PQgetCopyData, libpq.PQconsumeInput, libpq.PQfreemem
    except (AttributeError, OSError):
        return None
    return tuple([ctypes.cast(one, ctypes.c_void_p).value for one in found])


@cython.final
cdef class _Source:
    """Reads CopyData messages, one after the other, from a connection of libpq.

    `at` and `length` are the last message. They are valid until the next call of next().
    """

    cdef object pgconn, get_copy_data
    cdef void *connection
    cdef GetCopyData get
    cdef ConsumeInput consume
    cdef FreeMemory free
    cdef Py_buffer view
    cdef char *message
    cdef bint has_view, drain, reads
    cdef const uint8_t *at
    cdef Py_ssize_t length
    cdef object error

    def __cinit__(self, pgconn, bint drain):
        self.pgconn = pgconn
        self.drain = self.reads = drain
        functions = _functions()
        if functions is None or not isinstance(pgconn, pq.PGconn):
            self.get_copy_data = pgconn.get_copy_data
            return
        self.get = <GetCopyData> <uintptr_t> functions[0]
        self.consume = <ConsumeInput> <uintptr_t> functions[1]
        self.free = <FreeMemory> <uintptr_t> functions[2]
        self.connection = <void *> <uintptr_t> (pgconn.pgconn_ptr or 0)
        if self.connection == NULL:
            raise psycopg.OperationalError("the connection is closed")

    def __dealloc__(self):
        self.forget()

    cdef void forget(self) noexcept:
        if self.has_view:
            PyBuffer_Release(&self.view)
            self.has_view = False
        if self.message != NULL:
            self.free(self.message)
            self.message = NULL

    # Read the next message. Return whether it is XLogData.
    cdef bint next(self) except -1:
        while True:
            self.forget()
            if self.connection != NULL:
                self.length = self.get(self.connection, &self.message, 1)
                self.at = <const uint8_t *> self.message
                if self.length < -1:
                    self.fail("cannot get copy data")
                    return False
            else:
                self.length, data = self.get_copy_data(1)
                PyObject_GetBuffer(data, &self.view, PyBUF_SIMPLE)
                self.has_view = True
                self.at = <const uint8_t *> self.view.buf
            if self.length != 0 or not self.reads:
                break
            self.reads = False
            if self.connection != NULL:
                if not self.consume(self.connection):
                    self.fail("consuming input failed")
                    return False
            else:
                try:
                    self.pgconn.consume_input()
                except psycopg.Error as error:
                    self.error = error
                    return False
        self.reads = self.drain
        return self.length >= HEADER_SIZE and self.at[0] == c'w'

    # Raise an error if a signal handler has closed the connection. Making objects may run handlers.
    cdef int check(self) except -1:
        if self.connection != NULL and self.pgconn.pgconn_ptr is None:
            self.connection = NULL
            raise psycopg.OperationalError("the connection is closed")
        return 0

    cdef int fail(self, what) except -1:
        self.length = 0
        said = self.pgconn.error_message.decode("utf-8", "replace").strip()
        self.error = psycopg.OperationalError(f"{what}: {said}")
        return 0

    # Return the last message, which is not XLogData, or the error.
    cdef object other(self):
        if self.error is not None:
            return self.error
        return memoryview(PyBytes_FromStringAndSize(<const char *> self.at, max(self.length, 0)))


def take_copy_data(pgconn: Any, list frames, Py_ssize_t most, bint drain) -> tuple:
    """Take XLogData messages from libpq until another message comes, or `most` bytes were taken.

    Parameters
    ----------
    pgconn : psycopg.pq.PGconn
    frames : list
        A tuple is appended for each message: LSN, end of the WAL, send time in microseconds since
        2000-01-01 UTC, and frame.
    most : int
        Bytes, headers included. The last message may exceed them.
    drain : bool
        Whether to read the socket again each time libpq's buffer is empty, until nothing comes. One
        read takes at most the size of libpq's buffer, or one TLS record.

    Returns
    -------
    (int, int, int, memoryview | psycopg.Error | None)
        The bytes that were taken, and the greatest LSN. The last result of `get_copy_data`: the
        length of the last message, 0 if no message has come, -1 at the end. The last message if it
        is not XLogData, or the error of libpq's read.
    """
    cdef _Source source = _Source(pgconn, drain)
    cdef Py_ssize_t size = 0
    cdef uint64_t lsn, wal_end, received = 0
    cdef object start
    while True:
        if not source.next():
            return size, received, source.length, source.other()
        lsn, wal_end = load_uint64(source.at + DATA_START), load_uint64(source.at + WAL_END)
        start = lsn
        frames.append((
            start,
            start if wal_end == lsn else wal_end,
            <int64_t> load_uint64(source.at + SEND_TIME),
            PyBytes_FromStringAndSize(
                <const char *> source.at + HEADER_SIZE, source.length - HEADER_SIZE
            ),
        ))
        source.check()
        size += source.length
        received = max(received, lsn)
        if size >= most:
            return size, received, source.length, None


def pack_copy_data(
    pgconn: Any, bytearray data, arrays.array ends, arrays.array lsns, Py_ssize_t most, bint drain
) -> tuple:
    """Do what `take_copy_data` does, and put all frames into one buffer.

    Parameters
    ----------
    pgconn, most, drain
        As in `take_copy_data`.
    data : bytearray
        The frames are appended.
    ends : array of int64
        The length of `data` after each frame is appended, in bytes.
    lsns : array of uint64
        The LSN of each frame is appended.

    Raises
    ------
    TypeError
        The items of `ends` or `lsns` do not have 8 bytes.
    """
    if ends.itemsize != sizeof(int64_t) or lsns.itemsize != sizeof(uint64_t):
        raise TypeError("arrays of 8 bytes an item are expected")
    cdef _Source source = _Source(pgconn, drain)
    cdef Py_ssize_t size = 0, length
    cdef int64_t end = len(data)
    cdef uint64_t lsn, received = 0
    while True:
        if not source.next():
            return size, received, source.length, source.other()
        length = source.length - HEADER_SIZE
        lsn = load_uint64(source.at + DATA_START)
        PyByteArray_Resize(data, end + length)
        memcpy(PyByteArray_AS_STRING(data) + end, source.at + HEADER_SIZE, length)
        end += length
        arrays.extend_buffer(ends, <char *> &end, 1)
        arrays.extend_buffer(lsns, <char *> &lsn, 1)
        size += source.length
        received = max(received, lsn)
        if size >= most:
            return size, received, source.length, None


def pack_copy_rows(pgconn: Any, bytearray data, Py_ssize_t most) -> int:
    """Append the data of a COPY TO to a buffer, until no more is there or `most` bytes were added.

    Other Python threads run meanwhile. They must not close the connection.

    Parameters
    ----------
    pgconn : psycopg.pq.PGconn
    data : bytearray
    most : int
        Bytes. The last message may exceed them.

    Returns
    -------
    int
        Greater than 0: there may be more data now. 0: wait for the socket. -1: the COPY has ended.

    Raises
    ------
    psycopg.Error
        libpq cannot read the connection.
    """
    cdef _Source source = _Source(pgconn, True)
    cdef Py_ssize_t first = len(data), capacity = first + most, end = first
    cdef Py_ssize_t length
    cdef char *into
    if source.connection == NULL:
        while True:
            source.next()
            if source.error is not None:
                raise source.error
            if source.length <= 0:
                return source.length
            data += source.at[:source.length]
            if len(data) >= capacity:
                return source.length
    PyByteArray_Resize(data, capacity)
    into = PyByteArray_AS_STRING(data)
    with nogil:
        length = take_rows(source, into, &end, capacity)
    if length > 0 and end < capacity:  # the last message does not fit into the buffer
        PyByteArray_Resize(data, end + length)
        memcpy(PyByteArray_AS_STRING(data) + end, source.message, length)
        end += length
    PyByteArray_Resize(data, end)
    if length < -1:
        source.fail("cannot get copy data")
        raise source.error
    return length


# Copy messages into the buffer as long as they fit. Return the length of the last message, which is
# not copied if it does not fit. Without a message, return the result of PQgetCopyData, or -2 if
# PQconsumeInput failed.
cdef Py_ssize_t take_rows(
    _Source source, char *into, Py_ssize_t *end, Py_ssize_t capacity
) noexcept nogil:
    cdef Py_ssize_t length
    cdef bint reads = True
    while True:
        if source.message != NULL:
            source.free(source.message)
            source.message = NULL
        length = source.get(source.connection, &source.message, 1)
        if length == 0 and reads:
            reads = False
            if not source.consume(source.connection):
                return -2
            continue
        if length <= 0 or length > capacity - end[0]:
            return length
        memcpy(into + end[0], source.message, length)
        end[0] += length
        if end[0] == capacity:
            return length
        reads = True
