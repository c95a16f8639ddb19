# cython: annotation_typing=False
"""Read many frames from one buffer, a list, or Arrow arrays. The twin of ``_pure_input.py``."""

from __future__ import annotations

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.pycapsule cimport PyCapsule_GetPointer
from libc.stdint cimport int32_t, int64_t, uint8_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcmp, memcpy

from ..errors import frame_bytes
from .arrays import FrameBatch, check_offsets, null_frame, refuse_input, refuse_offset

cdef extern from "Python.h":
    bint PyBytes_CheckExact(object value)

cdef extern from "_arrow.h":
    struct ArrowSchema:
        const char *format
        void (*release)(ArrowSchema *) noexcept
    struct ArrowArray:
        int64_t length
        int64_t null_count
        int64_t offset
        int64_t n_buffers
        const void **buffers
        void (*release)(ArrowArray *) noexcept
    struct ArrowArrayStream:
        int (*get_schema)(ArrowArrayStream *, ArrowSchema *) noexcept
        int (*get_next)(ArrowArrayStream *, ArrowArray *) noexcept
        const char *(*get_last_error)(ArrowArrayStream *) noexcept
        void (*release)(ArrowArrayStream *) noexcept


cdef class Piece:
    """Frames in one buffer or one list, and the owner of their memory."""

    def __dealloc__(self):
        free(self.owned)

    cdef bytes frame(self, Py_ssize_t i):
        cdef Frame frame
        take_frame(&self.source, i, &frame)
        return PyBytes_FromStringAndSize(<const char *> frame.at, frame.length)


@cython.final
cdef class _View:
    """A locked buffer. It is released with this object."""

    cdef Py_buffer buffer
    cdef bint held

    def __dealloc__(self):
        if self.held:
            PyBuffer_Release(&self.buffer)


cdef _View view_of(object data):
    cdef _View view = _View.__new__(_View)
    try:
        PyObject_GetBuffer(data, &view.buffer, PyBUF_SIMPLE)
    except BufferError as error:
        raise TypeError(f"frames must lie in a contiguous buffer: {error}") from None
    view.held = True
    return view


@cython.final
cdef class _ArrowArray:
    """Owns an array that was moved through the Arrow C data interface."""

    cdef ArrowArray array

    def __dealloc__(self):
        if self.array.release != NULL:
            self.array.release(&self.array)


cdef list pieces_of(object data, object offsets):
    """Return the frames that :func:`pgoutput_fast.decode_batch` takes as `data` and `offsets`."""
    if isinstance(data, FrameBatch):
        if offsets is not None:
            raise TypeError("a decode_batch() result has its offsets")
        return data.pieces
    if offsets is not None:
        return [packed(data, offsets)]
    if hasattr(data, "__arrow_c_array__"):
        return [arrow_array(data)]
    if hasattr(data, "__arrow_c_stream__"):
        return arrow_stream(data)
    refuse_input(data)
    return [listed(data)]


cdef Piece packed(object data, object offsets):
    cdef Piece piece = Piece.__new__(Piece)
    cdef _View view = view_of(data)
    checked = check_offsets(offsets)
    cdef _View numbers = view_of(checked)
    piece.owner = (view, numbers)
    piece.source.count = numbers.buffer.len // 8 - 1
    piece.source.offsets = <const int64_t *> numbers.buffer.buf
    piece.source.base = <const uint8_t *> view.buffer.buf
    piece.source.end = piece.source.base + view.buffer.len
    check_rising(&piece.source, view.buffer.len)
    return piece


# Refuse an offset that is smaller than the offset before, or lies outside the buffer.
cdef int check_rising(const Source *source, int64_t size) except -1:
    cdef Py_ssize_t i
    cdef int64_t last = 0
    cdef int64_t wrong = 0
    for i in range(source.count + 1):
        wrong |= source.offsets[i] - last
        last = source.offsets[i]
    if wrong < 0 or last > size:
        last = 0
        for i in range(source.count + 1):
            if source.offsets[i] < last or source.offsets[i] > size:
                refuse_offset(i, source.offsets[i], last, size)
            last = source.offsets[i]
    return 0


cdef Piece listed(object data):
    cdef Piece piece = Piece.__new__(Piece)
    # Copy a list to a tuple: another thread can change a list at any time.
    cdef tuple frames = tuple(data)
    cdef Py_ssize_t count = len(frames)
    cdef Py_ssize_t i
    cdef object frame
    cdef list copies = None
    for i in range(count):
        if not PyBytes_CheckExact(frames[i]):
            if copies is None:
                copies = list(frames)
            copies[i] = frame_bytes(frames[i])
    if copies is not None:
        frames = tuple(copies)
    piece.owned = malloc(count * 16 + 1)
    if piece.owned == NULL:
        raise MemoryError
    piece.owner = frames
    piece.source.count = count
    cdef const uint8_t **pointers = <const uint8_t **> piece.owned
    cdef int64_t *lengths = <int64_t *> (pointers + count)
    for i in range(count):
        frame = frames[i]
        pointers[i] = <const uint8_t *> PyBytes_AS_STRING(frame)
        lengths[i] = PyBytes_GET_SIZE(frame)
    piece.source.pointers = pointers
    piece.source.lengths = lengths
    return piece


cdef Piece arrow_array(object data):
    schema_capsule, array_capsule = data.__arrow_c_array__()
    cdef ArrowSchema *schema = <ArrowSchema *> PyCapsule_GetPointer(schema_capsule, "arrow_schema")
    cdef ArrowArray *given = <ArrowArray *> PyCapsule_GetPointer(array_capsule, "arrow_array")
    cdef _ArrowArray array = _ArrowArray.__new__(_ArrowArray)
    array.array = given[0]
    given.release = NULL  # the interface asks for this after an array was moved
    return arrow_piece(schema.format, array, 0)


cdef list arrow_stream(object data):
    capsule = data.__arrow_c_stream__()
    cdef ArrowArrayStream *stream = <ArrowArrayStream *> PyCapsule_GetPointer(
        capsule, "arrow_array_stream"
    )
    cdef ArrowSchema schema
    cdef _ArrowArray array
    cdef const char *reason
    cdef list pieces = []
    cdef Py_ssize_t before = 0
    cdef int failed = stream.get_schema(stream, &schema)
    if failed == 0:
        try:
            while True:
                array = _ArrowArray.__new__(_ArrowArray)
                failed = stream.get_next(stream, &array.array)
                if failed != 0 or array.array.release == NULL:
                    break
                pieces.append(arrow_piece(schema.format, array, before))
                before += array.array.length
        finally:
            schema.release(&schema)
    if failed != 0:
        reason = stream.get_last_error(stream)
        shown = reason.decode("utf-8", "replace") if reason != NULL else f"error {failed}"
        raise OSError(failed, f"the Arrow stream of frames ended: {shown}")
    return pieces


# Make a piece of an Arrow array. `before`, the number of frames in earlier arrays, is for errors.
cdef Piece arrow_piece(const char *format, _ArrowArray owner, Py_ssize_t before):
    cdef Piece piece = Piece.__new__(Piece)
    cdef ArrowArray *array = &owner.array
    cdef Py_ssize_t count = array.length
    cdef Py_ssize_t i
    cdef const uint8_t *bits
    cdef const int32_t *short_offsets
    cdef int64_t *offsets
    cdef uint8_t letter = <uint8_t> format[0]
    piece.owner = owner
    piece.source.count = count
    if not (memcmp(format, "z", 2) == 0 or memcmp(format, "Z", 2) == 0
            or memcmp(format, "vz", 3) == 0):
        refuse_input(format.decode())
    if array.null_count != 0 and array.buffers[0] != NULL:
        bits = <const uint8_t *> array.buffers[0]
        for i in range(array.offset, array.offset + count):
            if not bits[i >> 3] >> (i & 7) & 1:
                null_frame(before + i - array.offset)
    if letter == c'v':
        fill_views(piece, array)
        return piece
    if letter == c'Z' and count > 0:
        piece.source.offsets = <const int64_t *> array.buffers[1] + array.offset
    else:
        piece.owned = calloc(count + 1, 8)
        if piece.owned == NULL:
            raise MemoryError
        offsets = <int64_t *> piece.owned
        if count > 0:
            short_offsets = <const int32_t *> array.buffers[1] + array.offset
            for i in range(count + 1):
                offsets[i] = short_offsets[i]
        piece.source.offsets = offsets
    piece.source.base = <const uint8_t *> array.buffers[2]
    # Do not read behind the last frame: that memory may belong to another array.
    piece.source.end = piece.source.base + piece.source.offsets[count]
    check_rising(&piece.source, piece.source.offsets[count])
    return piece


cdef int fill_views(Piece piece, ArrowArray *array) except -1:
    cdef Py_ssize_t count = array.length
    cdef const uint8_t *views = <const uint8_t *> array.buffers[1] + 16 * array.offset
    cdef const uint8_t *view
    cdef int32_t length, buffer, offset
    cdef Py_ssize_t i
    piece.owned = malloc(count * 16 + 1)
    if piece.owned == NULL:
        raise MemoryError
    cdef const uint8_t **pointers = <const uint8_t **> piece.owned
    cdef int64_t *lengths = <int64_t *> (pointers + count)
    for i in range(count):
        view = views + 16 * i
        memcpy(&length, view, 4)
        lengths[i] = length
        if length <= 12:
            pointers[i] = view + 4
        else:
            memcpy(&buffer, view + 8, 4)
            memcpy(&offset, view + 12, 4)
            if length < 0 or buffer < 0 or buffer >= array.n_buffers - 3 or offset < 0:
                raise ValueError(f"the view of frame {i} points outside of its array")
            pointers[i] = <const uint8_t *> array.buffers[2 + buffer] + offset
    piece.source.pointers = pointers
    piece.source.lengths = lengths
    return 0
