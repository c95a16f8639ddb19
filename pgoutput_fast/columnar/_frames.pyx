# cython: annotation_typing=False, cdivision=True
"""Many frames at once, compiled: what they come in, and their headers and column slices as arrays.

The twin is in ``_pure_frames.py``.
"""

from __future__ import annotations

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_FillInfo, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.mem cimport PyMem_RawFree, PyMem_RawMalloc
from cpython.pycapsule cimport PyCapsule_GetPointer
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memcmp, memcpy

from pgoutput_fast._core cimport (
    ColumnSlice, load_uint16, load_uint32, load_uint64, take_slices,
)

from .._core import decode
from .arrays import (
    ITEM_SIZES, FrameBatch, array_of, check_offsets, null_frame, refuse_input, refuse_offset,
)
from ..errors import DecodeError, frame_bytes
from ..messages import decode_rare
from ..state import StreamState
from ..settings import make_settings

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

cdef extern from *:
    """
    #if defined(__GNUC__) || defined(__clang__)
    #define PGF_PREFETCH(address) __builtin_prefetch(address)
    #else
    #define PGF_PREFETCH(address) ((void)0)
    #endif
    """
    void prefetch "PGF_PREFETCH"(const void *address) noexcept nogil
    bint likely(bint condition) noexcept nogil
    bint unlikely(bint condition) noexcept nogil

cdef enum:
    EXPECTED_SLICES = 1 << 22
    MOST_EXPECTED = 20 << 20  # bytes; glibc learns nothing from blocks of more than 32 MiB


# --- where frames come from ----------------------------------------------------------------------

cdef class Piece:
    """Frames that lie together, and what keeps their memory."""

    def __dealloc__(self):
        free(self.owned)

    cdef bytes frame(self, Py_ssize_t i):
        cdef Frame frame
        take_frame(&self.source, i, &frame)
        return PyBytes_FromStringAndSize(<const char *> frame.at, frame.length)


cdef class Memory:
    """Memory of this module's making, as a buffer."""

    def __dealloc__(self):
        free(self.at)

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        PyBuffer_FillInfo(buffer, self, self.at, self.size, 0, flags)


@cython.final
cdef class _View:
    """A buffer, held for as long as its bytes are looked at."""

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
    """An array that was handed over through the C data interface."""

    cdef ArrowArray array

    def __dealloc__(self):
        if self.array.release != NULL:
            self.array.release(&self.array)


cdef list pieces_of(object data, object offsets):
    """The frames in `data`, as of :func:`decode_batch`."""
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


# Refuse offsets that fall, or leave the buffer.
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
    # Of its own: a list can change while another thread runs.
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
    given.release = NULL  # it has moved
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


# `before`: frames that come before these in the stream.
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
    # What lies before the first frame and behind the last is not ours to look at.
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


# --- memory --------------------------------------------------------------------------------------

cdef int64_t _expected = 0


# As many bytes will be freed, and asked for again by the next batch. glibc gives back what lies
# idle beyond twice the largest block that it saw freed, while a batch is many blocks; and to fault
# pages in anew takes longer than to fill them.
cdef void expect_memory(int64_t size) noexcept nogil:
    global _expected
    if size > MOST_EXPECTED:
        size = MOST_EXPECTED
    if size > _expected:
        _expected = size + (size >> 1)
        # malloc(), but by a way that compilers do not see through: they would take it away.
        PyMem_RawFree(PyMem_RawMalloc(_expected))


# --- headers and slices --------------------------------------------------------------------------

# As pgoutput_fast.columnar.arrays describes them to NumPy.
cdef struct FrameHead:
    uint8_t tag
    uint8_t old_kind
    uint16_t old_columns
    uint16_t new_columns
    uint16_t unused
    uint32_t relation_id
    uint32_t xid
    uint64_t first_slice

cdef struct BeginHead:
    int64_t frame
    uint64_t final_lsn
    int64_t commit_time
    uint32_t xid
    uint32_t unused

cdef struct CommitHead:
    int64_t frame
    uint64_t commit_lsn
    uint64_t end_lsn
    int64_t commit_time
    uint8_t flags
    uint8_t[7] unused

cdef struct Rare:
    int64_t frame
    bint in_stream

if [ITEM_SIZES[name] for name in ("heads", "slices", "begins", "commits")] != [
    sizeof(FrameHead), sizeof(ColumnSlice), sizeof(BeginHead), sizeof(CommitHead),
]:
    raise ImportError(
        "the items of pgoutput_fast.columnar.arrays are not this extension's; rebuild it"
    )

# An array that grows.
cdef struct Growing:
    void *at
    size_t item
    size_t count
    size_t capacity


cdef int room(Growing *array, size_t more) noexcept nogil:
    cdef size_t capacity
    cdef void *moved
    if array.count + more <= array.capacity:
        return 0
    capacity = array.capacity * 2
    if capacity < array.count + more:
        capacity = array.count + more
    if capacity < 64:
        capacity = 64
    moved = realloc(array.at, capacity * array.item)
    if moved == NULL:
        return -1
    array.at = moved
    array.capacity = capacity
    return 0


cdef object numpy_of(Growing *array, str name):
    cdef Memory memory = Memory.__new__(Memory)
    cdef void *shrunk
    if array.count < array.capacity:
        shrunk = realloc(array.at, array.count * array.item + 1)
        if shrunk != NULL:
            array.at = shrunk
    memory.at = array.at
    memory.size = array.count * array.item
    array.at = NULL
    return array_of(name, memory)


# Fetch the head of a frame: where frames are large, or lie anywhere, no processor foresees it.
cdef inline void prefetch_frame(const Source *source, Py_ssize_t i) noexcept nogil:
    if i < source.count:
        if source.offsets != NULL:
            prefetch(source.base + source.offsets[i])
        else:
            prefetch(source.pointers[i])


@cython.final
cdef class _Walk:
    """The walk through all frames, and what it has found."""

    cdef Growing heads, slices, begins, commits, rare
    cdef bint in_stream
    cdef bint in_transaction
    cdef bint no_memory
    cdef uint32_t open_xid
    cdef uint32_t xid  # of the transaction

    def __cinit__(self):
        self.heads.item = sizeof(FrameHead)
        self.slices.item = sizeof(ColumnSlice)
        self.begins.item = sizeof(BeginHead)
        self.commits.item = sizeof(CommitHead)
        self.rare.item = sizeof(Rare)

    def __dealloc__(self):
        free(self.heads.at)
        free(self.slices.at)
        free(self.begins.at)
        free(self.commits.at)
        free(self.rare.at)

    # Walk through a piece; the frame where it stopped, at its end if there is no fault.
    cdef Py_ssize_t walk(self, const Source *source) noexcept nogil:
        cdef Frame frame
        cdef FrameHead *head
        cdef Rare *rare
        cdef ColumnSlice *slice
        cdef ColumnSlice *limit
        cdef const uint8_t *at
        cdef const uint8_t *end
        cdef Py_ssize_t i
        cdef uint32_t columns
        cdef uint8_t tag
        if room(&self.heads, source.count) < 0 or self.expect_slices(source) < 0:
            self.no_memory = True
            return 0
        head = <FrameHead *> self.heads.at + self.heads.count
        slice = <ColumnSlice *> self.slices.at + self.slices.count
        limit = <ColumnSlice *> self.slices.at + self.slices.capacity
        for i in range(source.count):
            take_frame(source, i, &frame)
            if unlikely(frame.length == 0 or frame.length > MAX_FRAME):
                break
            prefetch_frame(source, i + 8)
            tag = frame.at[0]
            head.tag = tag
            head.old_kind = 0
            head.old_columns = 0
            head.new_columns = 0
            head.unused = 0
            head.relation_id = 0
            head.xid = 0
            head.first_slice = slice - <ColumnSlice *> self.slices.at
            if likely(tag == c'I' or tag == c'U' or tag == c'D'):
                at = frame.at
                end = at + frame.length
                # A new tuple and nothing else, as most rows are.
                if likely(
                    not self.in_stream and frame.length >= 8 and at[5] == c'N' and tag != c'D'
                ):
                    columns = load_uint16(at + 6)
                    if likely(columns <= <size_t> (limit - slice)):
                        head.relation_id = load_uint32(at + 1)
                        head.new_columns = <uint16_t> columns
                        if unlikely(
                            columns > 0x7FFF
                            or take_slices(at, at + 8, end, slice, columns) != end
                        ):
                            break
                        slice += columns
                        head += 1
                        continue
                self.slices.count = head.first_slice
                if not self.row(&frame, head):
                    self.slices.count = head.first_slice
                    break
                slice = <ColumnSlice *> self.slices.at + self.slices.count
                limit = <ColumnSlice *> self.slices.at + self.slices.capacity
            else:
                self.heads.count = head - <FrameHead *> self.heads.at
                if tag == c'B' or tag == c'C':
                    if not self.bound(&frame, head):
                        break
                else:
                    if room(&self.rare, 1) < 0:
                        self.no_memory = True
                        break
                    rare = <Rare *> self.rare.at + self.rare.count
                    rare.frame = self.heads.count
                    rare.in_stream = self.in_stream
                    if not self.other(&frame, head):
                        break
                    self.rare.count += 1
            head += 1
        else:
            i = source.count
        self.heads.count = head - <FrameHead *> self.heads.at
        self.slices.count = slice - <ColumnSlice *> self.slices.at
        return i

    # Room for as many slices as there are likely to be: to move them costs more than memory that
    # nobody writes to.
    cdef int expect_slices(self, const Source *source) noexcept nogil:
        cdef size_t bytes = 0
        cdef Py_ssize_t i
        if source.offsets != NULL:
            bytes = source.offsets[source.count] - source.offsets[0]
        else:
            for i in range(source.count):
                bytes += source.lengths[i]
        if bytes // 8 > EXPECTED_SLICES:
            bytes = EXPECTED_SLICES * 8
        expect_memory(bytes + source.count * sizeof(FrameHead))
        return room(&self.slices, bytes // 8)

    cdef bint row(self, const Frame *frame, FrameHead *head) noexcept nogil:
        cdef const uint8_t *data = frame.at
        cdef const uint8_t *end = data + frame.length
        cdef const uint8_t *at = data + 1
        cdef uint8_t marker
        if self.in_stream:
            if frame.length < 10:
                return False
            head.xid = load_uint32(at)
            at += 4
        if end - at < 5:
            return False
        head.relation_id = load_uint32(at)
        marker = at[4]
        at += 5
        if marker != c'N':
            if (marker != c'K' and marker != c'O') or head.tag == c'I':
                return False
            head.old_kind = marker
            at = self.columns(data, at, end, &head.old_columns)
            if head.tag == c'D' or at == NULL:
                return at == end
            if at == end or at[0] != c'N':
                return False
            at += 1
        elif head.tag == c'D':
            return False
        return self.columns(data, at, end, &head.new_columns) == end

    # Slices of a tuple's columns; where it ends, NULL if it is malformed.
    cdef const uint8_t *columns(
        self, const uint8_t *frame, const uint8_t *at, const uint8_t *end, uint16_t *columns
    ) noexcept nogil:
        cdef uint32_t count
        if end - at < 2:
            return NULL
        count = load_uint16(at)
        at += 2
        if count > 0x7FFF or count > <size_t> (end - at):
            return NULL
        if room(&self.slices, count) < 0:
            self.no_memory = True
            return NULL
        at = take_slices(
            frame, at, end, <ColumnSlice *> self.slices.at + self.slices.count, count
        )
        if at != NULL:
            columns[0] = <uint16_t> count
            self.slices.count += count
        return at

    cdef bint bound(self, const Frame *frame, FrameHead *head) noexcept nogil:
        cdef const uint8_t *data = frame.at
        cdef BeginHead *begin
        cdef CommitHead *commit
        if self.in_stream:
            return False
        if head.tag == c'B':
            if frame.length != 21:
                return False
            if room(&self.begins, 1) < 0:
                self.no_memory = True
                return False
            begin = <BeginHead *> self.begins.at + self.begins.count
            begin.frame = self.heads.count
            begin.final_lsn = load_uint64(data + 1)
            begin.commit_time = <int64_t> load_uint64(data + 9)
            begin.xid = head.xid = self.xid = load_uint32(data + 17)
            begin.unused = 0
            self.begins.count += 1
            self.in_transaction = True
        else:
            if frame.length != 26:
                return False
            if room(&self.commits, 1) < 0:
                self.no_memory = True
                return False
            commit = <CommitHead *> self.commits.at + self.commits.count
            commit.frame = self.heads.count
            commit.flags = data[1]
            commit.commit_lsn = load_uint64(data + 2)
            commit.end_lsn = load_uint64(data + 10)
            commit.commit_time = <int64_t> load_uint64(data + 18)
            commit.unused[:] = [0, 0, 0, 0, 0, 0, 0]
            self.commits.count += 1
            self.in_transaction = False
        return True

    # What no row is made of: its place in the order, and the numbers that stand in its front. The
    # Python decoder reads the whole of it afterwards.
    cdef bint other(self, const Frame *frame, FrameHead *head) noexcept nogil:
        cdef const uint8_t *data = frame.at
        cdef uint8_t tag = head.tag
        cdef Py_ssize_t at = -1
        if tag == c'R' or tag == c'Y' or tag == c'T' or tag == c'M':
            if self.in_stream:
                at = 1
            if tag == c'R' and frame.length >= (9 if self.in_stream else 5):
                head.relation_id = load_uint32(data + (5 if self.in_stream else 1))
        elif tag == c'E':
            if not self.in_stream:
                return False
            self.in_stream = False
        elif tag != c'O':
            if self.in_stream:
                return False
            if tag == c'S':
                if self.in_transaction or frame.length < 5:
                    return False
                self.in_stream = True
                self.open_xid = load_uint32(data + 1)
                at = 1
            elif tag == c'c' or tag == c'A':
                at = 1
            elif tag == c'b':
                at = 25
                self.in_transaction = True
                self.xid = load_uint32(data + 25) if frame.length >= 29 else 0
            elif tag == c'P' or tag == c'p' or tag == c'K':
                at = 26
                if tag == c'P':
                    self.in_transaction = False
            elif tag == c'r':
                at = 34
            else:
                return False
        if at >= 0 and frame.length >= at + 4:
            head.xid = load_uint32(data + at)
        return True


def decode_batch(data: Any, offsets: Any = None, in_stream: int | bool = False) -> FrameBatch:
    """As :func:`pgoutput_fast.decode_batch`, which calls it."""
    cdef list pieces = pieces_of(data, offsets)
    cdef Piece piece
    cdef _Walk walk = _Walk.__new__(_Walk)
    cdef Py_ssize_t at = 0, before = 0
    walk.in_stream = in_stream is not False
    walk.open_xid = in_stream
    cdef bint sound = True
    for piece in pieces:
        with nogil:
            at = walk.walk(&piece.source)
        if walk.no_memory:
            raise MemoryError
        sound = at == piece.source.count
        if not sound:
            break
        before += at
    messages = rare_messages(pieces, walk)
    if not sound:
        explain(piece.frame(at), before + at, walk)
    cdef object opened = False
    if walk.in_stream:
        # A chunk that was open before, of an xid that nobody told.
        unknown = in_stream is True and not any(m.tag == "S" for m in messages.values())
        opened = True if unknown else walk.open_xid
    return FrameBatch(
        pieces,
        numpy_of(&walk.heads, "heads"),
        numpy_of(&walk.slices, "slices"),
        numpy_of(&walk.begins, "begins"),
        numpy_of(&walk.commits, "commits"),
        messages,
        opened,
    )


# What the Python decoder reads, up to where the walk has stopped.
cdef dict rare_messages(list pieces, _Walk walk):
    cdef Rare *rare = <Rare *> walk.rare.at
    cdef Rare *end = rare + walk.rare.count
    cdef Piece piece
    cdef Py_ssize_t before = 0
    cdef dict messages = {}
    for piece in pieces:
        while rare < end and rare.frame < before + piece.source.count:
            try:
                messages[rare.frame] = decode_rare(
                    piece.frame(rare.frame - before), bool(rare.in_stream), "utf-8"
                )
            except DecodeError as error:
                error.frame = rare.frame
                raise
            rare += 1
        before += piece.source.count
    return messages


# Raise the error of the frame that the walk has stopped at.
cdef int explain(bytes frame, Py_ssize_t index, _Walk walk) except -1:
    state = StreamState(make_settings())
    state.open_xid = walk.open_xid if walk.in_stream else None
    state.xid = walk.xid if walk.in_transaction else None
    try:
        state.check_order(frame)
        decode(frame, bool(walk.in_stream))
    except DecodeError as error:
        error.frame = index
        raise
    raise AssertionError(f"the walk refused a sound frame: {frame!r}")


# --- what libpq has received ---------------------------------------------------------------------

def take_copy_data(get_copy_data: Any, list frames, Py_ssize_t most) -> tuple:
    """Take XLogData from libpq until there is something else, or so many bytes were taken.

    Parameters
    ----------
    get_copy_data : callable
        psycopg's ``PGconn.get_copy_data``.
    frames : list
        Appended to: start LSN, WAL end, send time and frame of each.
    most : int

    Returns
    -------
    tuple
        Bytes that were taken, the greatest start LSN, and what `get_copy_data` gave last: a length
        and data that are something else. The data are None where the last was taken too.
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
            if view.len < 25 or data[0] != c'w':
                return size, received, answer[0], message
            lsn, wal_end = load_uint64(data + 1), load_uint64(data + 9)
            start = lsn
            frames.append((
                start,
                start if wal_end == lsn else wal_end,
                <int64_t> load_uint64(data + 17),
                PyBytes_FromStringAndSize(<const char *> data + 25, view.len - 25),
            ))
            size += view.len
        finally:
            PyBuffer_Release(&view)
        received = max(received, lsn)
        if size >= most:
            return size, received, answer[0], None
