# cython: annotation_typing=False, cdivision=True
"""Decode the headers of many frames, and the offsets of their columns, into arrays.

The twin is in ``_pure_headers.py``.
"""

from __future__ import annotations

cimport cython
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport free

from pgoutput_fast._loads cimport load_uint16, load_uint32, load_uint64
from pgoutput_fast.protocol._wire cimport (
    BEGIN_COMMIT_TIME, BEGIN_FINAL_LSN, BEGIN_LENGTH, BEGIN_PREPARE_XID, BEGIN_XID, COMMIT_END_LSN,
    COMMIT_FLAGS, COMMIT_LENGTH, COMMIT_LSN, COMMIT_PREPARED_XID, COMMIT_TIME, MAX_COLUMNS,
    MAX_FRAME, PREPARE_XID, RELATION_ID, ROLLBACK_PREPARED_XID, ROW_COLUMNS, ROW_MARKER,
    ROW_RELATION_ID, ROW_TUPLE, STREAM_ABORT_XID, STREAM_COMMIT_XID, STREAM_PREPARE_XID,
    STREAM_START_XID, XID, XID_SIZE, ColumnSlice, read_slices,
)
from pgoutput_fast.columnar._input cimport Frame, Piece, Source, pieces_of, take_frame
from pgoutput_fast.columnar._memory cimport Growing, expect_memory, numpy_of, room

from ..decoding._core import decode
from ..decoding.diagnose import refuse_changed
from ..errors import DecodeError
from ..protocol.messages import decode_rare
from ..settings import make_settings
from ..decoding.state import StreamState
from .arrays import ITEM_SIZES, FrameBatch

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


# The items of a FrameBatch's arrays. columnar/arrays.py describes the same layout to NumPy.
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


# Load the head of a frame into the cache ahead of time. Processors prefetch only neighbouring
# memory, which misses the heads of large frames, and frames in a list.
cdef inline void prefetch_frame(const Source *source, Py_ssize_t i) noexcept nogil:
    if i < source.count:
        if source.offsets != NULL:
            prefetch(source.base + source.offsets[i])
        else:
            prefetch(source.pointers[i])


@cython.final
cdef class _Walk:
    """Walks through all frames, and collects the items of a FrameBatch."""

    cdef Growing heads, slices, begins, commits, rare
    cdef bint in_stream
    cdef bint in_transaction
    cdef bint no_memory
    cdef uint32_t open_xid
    cdef uint32_t xid  # of the open transaction outside stream chunks, if `in_transaction`

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

    # Walk through the frames of a piece. Return the index of the first malformed frame; without
    # one, the number of frames.
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
                # Most rows have only a new tuple. Read it here, to save a call.
                if likely(
                    not self.in_stream and frame.length >= ROW_COLUMNS and at[ROW_MARKER] == c'N'
                    and tag != c'D'
                ):
                    columns = load_uint16(at + ROW_TUPLE)
                    if likely(columns <= <size_t> (limit - slice)):
                        head.relation_id = load_uint32(at + ROW_RELATION_ID)
                        head.new_columns = <uint16_t> columns
                        if unlikely(
                            columns > MAX_COLUMNS
                            or read_slices(at, at + ROW_COLUMNS, end, slice, columns) != end
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

    # Make room for one slice per eight bytes of frames, which is usually enough. Moving slices
    # later costs time. Memory that is never written costs none.
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
        cdef const uint8_t *at = data
        cdef uint8_t marker
        if self.in_stream:
            at += XID_SIZE
        if end - at < ROW_TUPLE:
            return False
        if self.in_stream:
            head.xid = load_uint32(data + XID)
        head.relation_id = load_uint32(at + ROW_RELATION_ID)
        marker = at[ROW_MARKER]
        at += ROW_TUPLE
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

    # Append the slices of a tuple's columns. Return where the tuple ends; NULL: it is malformed.
    cdef const uint8_t *columns(
        self, const uint8_t *frame, const uint8_t *at, const uint8_t *end, uint16_t *columns
    ) noexcept nogil:
        cdef uint32_t count
        if end - at < 2:
            return NULL
        count = load_uint16(at)
        at += 2
        if count > MAX_COLUMNS or count > <size_t> (end - at):
            return NULL
        if room(&self.slices, count) < 0:
            self.no_memory = True
            return NULL
        at = read_slices(
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
            if frame.length != BEGIN_LENGTH:
                return False
            if room(&self.begins, 1) < 0:
                self.no_memory = True
                return False
            begin = <BeginHead *> self.begins.at + self.begins.count
            begin.frame = self.heads.count
            begin.final_lsn = load_uint64(data + BEGIN_FINAL_LSN)
            begin.commit_time = <int64_t> load_uint64(data + BEGIN_COMMIT_TIME)
            begin.xid = head.xid = self.xid = load_uint32(data + BEGIN_XID)
            begin.unused = 0
            self.begins.count += 1
            self.in_transaction = True
        else:
            if frame.length != COMMIT_LENGTH:
                return False
            if room(&self.commits, 1) < 0:
                self.no_memory = True
                return False
            commit = <CommitHead *> self.commits.at + self.commits.count
            commit.frame = self.heads.count
            commit.flags = data[COMMIT_FLAGS]
            commit.commit_lsn = load_uint64(data + COMMIT_LSN)
            commit.end_lsn = load_uint64(data + COMMIT_END_LSN)
            commit.commit_time = <int64_t> load_uint64(data + COMMIT_TIME)
            commit.unused[:] = [0, 0, 0, 0, 0, 0, 0]
            self.commits.count += 1
            self.in_transaction = False
        return True

    # Read the xid and relation of a frame other than a row, Begin and Commit. Return False if it is
    # malformed or can't come now. The Python decoder reads the rest afterwards.
    cdef bint other(self, const Frame *frame, FrameHead *head) noexcept nogil:
        cdef const uint8_t *data = frame.at
        cdef uint8_t tag = head.tag
        cdef Py_ssize_t at = -1, relation_id
        if tag == c'R' or tag == c'Y' or tag == c'T' or tag == c'M':
            relation_id = RELATION_ID
            if self.in_stream:
                at = XID
                relation_id += XID_SIZE
            if tag == c'R' and frame.length >= relation_id + 4:
                head.relation_id = load_uint32(data + relation_id)
        elif tag == c'E':
            if not self.in_stream:
                return False
            self.in_stream = False
        elif tag != c'O':
            if self.in_stream:
                return False
            if tag == c'S':
                at = STREAM_START_XID
                if self.in_transaction or frame.length < at + 4:
                    return False
                self.in_stream = True
                self.open_xid = load_uint32(data + at)
            elif tag == c'c':
                at = STREAM_COMMIT_XID
            elif tag == c'A':
                at = STREAM_ABORT_XID
            elif tag == c'b':
                at = BEGIN_PREPARE_XID
                self.in_transaction = True
                self.xid = load_uint32(data + at) if frame.length >= at + 4 else 0
            elif tag == c'P':
                at = PREPARE_XID
                self.in_transaction = False
            elif tag == c'p':
                at = STREAM_PREPARE_XID
            elif tag == c'K':
                at = COMMIT_PREPARED_XID
            elif tag == c'r':
                at = ROLLBACK_PREPARED_XID
            else:
                return False
        if at >= 0 and frame.length >= at + 4:
            head.xid = load_uint32(data + at)
        return True


def decode_batch(data: Any, offsets: Any = None, in_stream: int | bool = False) -> FrameBatch:
    """Implement :func:`pgoutput_fast.decode_batch`, which documents arguments and errors."""
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
        # in_stream=True opens a stream chunk without an xid. Without a Stream Start, it is unknown.
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


# Decode the rare messages up to the frame where the walk stopped. Return them by index of frame.
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


# Raise the error of the frame where the walk stopped.
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
    refuse_changed()
