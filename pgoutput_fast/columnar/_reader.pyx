# cython: annotation_typing=False, cdivision=True
"""Frames into the columns of their relations, without the interpreter.

A row's values go from the frame to the ends of its relation's columns, each by the converter that
the relation's layout names. Where a converter finds a value unusual, the function of the column's
field says what the column stores. A row counts when all of it is there, so that one that is refused
leaves nothing behind. The twin of this is a part of ``_pure_engine.py``.
"""

from __future__ import annotations

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport INT32_MAX, int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport free
from libc.string cimport memcpy, strlen

from pgoutput_fast._wire cimport MAX_FRAME, load_uint16, load_uint32, load_uint64, walk_tuple
from pgoutput_fast.columnar._columns cimport (
    ASCII, BYTEA_TEXT, BYTES, CONVERTER_COUNT, DELETE, FLOAT4_TEXT, FORM, HAS_AFTER, INSERT,
    INT2_TEXT, INTERVAL_BINARY, JSONB_BINARY, LABEL, NESTED_BINARY, NESTED_TEXT, NUMERIC_BINARY,
    NUMERIC_TEXT, OLD_KEY, OLD_ROW, PGF_VECTOR, SAME2, SHIFT, SKIP, SLACK, TIME_BINARY,
    TIME_NS_BINARY, TIME_NS_TEXT, TIME_TEXT, UINT4_TEXT, UINT4_WIDE, UINT4_WIDE_TEXT, UPDATE, UTF8,
    UUID_UTF8_BINARY, UUID_UTF8_TEXT, Cached, Column, LabelTable, Rows, Side, Stream, roomy, settle,
)
from pgoutput_fast.columnar._input cimport Frame, Source, take_frame
from pgoutput_fast.columnar._memory cimport grow
from pgoutput_fast.columnar._relation cimport (
    AS_BINARY, AS_TEXT, UNDECIDED, grow_rows, make_ready, note_unchanged, set_null, undo,
)

from .arrays import ITEM_SIZES, TWO_FORMS, UNSENT_BEFORE
from .fields import CONVERTERS, EPOCH_SHIFT, SYNTAXES
from .packed import NewLabel

cdef extern from "_convert.h" nogil:
    enum:
        PGF_NUMERIC_ROOM
        PGF_LEAST_POWER
        PGF_GREATEST_POWER
    ctypedef struct pgf_power:
        uint64_t high
        uint64_t low
    const uint64_t[20] PGF_POWERS
    bint pgf_integer(
        const uint8_t *at, size_t length, size_t before, int64_t least, int64_t greatest,
        int64_t *value,
    ) noexcept
    bint pgf_is_numeric(const uint8_t *at, size_t length) noexcept
    size_t pgf_numeric_text(const uint8_t *at, size_t length, char *text) noexcept
    bint pgf_float(
        const uint8_t *at, size_t length, const pgf_power *powers, double *value
    ) noexcept
    size_t pgf_time(const uint8_t *at, size_t length, int64_t *microseconds) noexcept
    bint pgf_hexadecimal(const uint8_t *at, size_t count, uint8_t *bytes) noexcept
    bint pgf_uuid(const uint8_t *at, size_t length, uint8_t *bytes) noexcept
    void pgf_uuid_text(const uint8_t *bytes, uint8_t *text) noexcept
    bint pgf_copy_utf8(uint8_t *to, const uint8_t *at, size_t length, size_t after) noexcept
    bint pgf_copy_text(uint8_t *to, const uint8_t *at, size_t length, size_t after) noexcept

cdef extern from *:
    bint likely(bint condition) noexcept nogil
    bint unlikely(bint condition) noexcept nogil

cdef extern from "_rows.h" nogil:
    pgf_power[651] POWERS_OF_FIVE "PGF_POWERS_OF_FIVE"
    ctypedef struct Stop "pgf_stop":
        Rows *rows
        Column *column
        const uint8_t *at
        int64_t bytes
    const uint8_t *take_values "pgf_take_more"(
        Column **next, int64_t row, const uint8_t *at, const uint8_t *end, const uint8_t *floor,
        const uint8_t *ceiling, int64_t *bytes
    ) noexcept
    int32_t number_of "pgf_label"(
        const LabelTable *labels, const uint8_t *at, size_t length
    ) noexcept
    void put_beside "pgf_put_beside"(
        const Stream *stream, Rows *rows, uint8_t flags, const uint8_t *at, const uint64_t *lsn
    ) noexcept
    int64_t take_rows "pgf_take_rows"(
        Stream *stream, const Source *source, int64_t i, int64_t end, const uint64_t *lsns,
        Stop *stop
    ) noexcept


cdef extern from "_nested.h" nogil:
    enum:
        PGF_DONE, PGF_UNUSUAL, PGF_NO_MEMORY, PGF_FULL
    ctypedef int (*StoreCell "pgf_store")(
        Column *column, uint8_t code, const uint8_t *at, uint32_t length, const uint8_t *floor,
        const uint8_t *ceiling
    ) noexcept
    int pack_row "pgf_pack_row"(
        Column *column, int64_t row, const uint8_t *at, size_t length, bint binary,
        const uint8_t *floor, const uint8_t *ceiling, StoreCell store
    ) noexcept

if [
    CONVERTERS["skip"], CONVERTERS["utf8"], CONVERTERS["interval_binary"], len(CONVERTERS),
    SYNTAXES["vector"],
] != [SKIP, UTF8, INTERVAL_BINARY, CONVERTER_COUNT, PGF_VECTOR]:
    raise ImportError(
        "the converters of pgoutput_fast.columnar.fields are not this extension's; rebuild it"
    )
if SHIFT != EPOCH_SHIFT:
    raise ImportError("the epoch of this extension is not that of pgoutput_fast.columnar.fields")
if ITEM_SIZES["events"] != sizeof(Event):
    raise ImportError(
        "the layouts of pgoutput_fast.columnar.arrays are not those of this extension; rebuild it"
    )

cdef int64_t DAY = 86_400_000_000
cdef int64_t MOST_MICROSECONDS = 9_223_372_036_854_775  # of an interval, whose column has ns


# 128 bits of 10**power from its first one on, the rest cut off.
cdef int fill_powers() except -1:
    cdef int i
    for i in range(PGF_GREATEST_POWER - PGF_LEAST_POWER + 1):
        power = i + PGF_LEAST_POWER
        if power >= 0:
            number = 10**power << 128
            number >>= number.bit_length() - 128
        else:
            divisor = 10**-power
            number = (1 << (divisor.bit_length() + 128)) // divisor
            number >>= number.bit_length() - 128
        POWERS_OF_FIVE[i].high = number >> 64
        POWERS_OF_FIVE[i].low = number & 0xFFFFFFFFFFFFFFFF
    return 0


fill_powers()


# --- values --------------------------------------------------------------------------------------

# Where the bytes of the next value of a variable column go; NULL if there is no room, `status` then
# says why.
cdef inline uint8_t *variable(
    Column *column, int64_t row, int64_t length, Status *status
) noexcept nogil:
    cdef int64_t used = column.offsets[row]
    if used + length + SLACK > column.room:
        status[0] = make_room(column, used + length)
        if status[0] != DONE:
            return NULL
    return column.data + used


cdef Status make_room(Column *column, int64_t size) noexcept nogil:
    cdef int64_t room = roomy(size)
    if size > INT32_MAX:
        return FULL
    if not grow(<void **> &column.data, room):
        return NO_MEMORY
    column.room = room
    return DONE


# Store a value of the types that rows are not full of; DONE, or what stands in its way. FAULT
# leaves it to the layout's functions.
cdef Status store_other(
    Column *column, uint8_t code, int64_t row, const uint8_t *at, uint32_t length,
    const uint8_t *floor, const uint8_t *ceiling,
) noexcept nogil:
    cdef size_t before = at - floor
    cdef size_t after = ceiling - (at + length)
    cdef int64_t number
    cdef int32_t days  # or months, or a number of an enum's
    cdef double real
    cdef uint8_t *to
    cdef size_t size
    cdef Status status = DONE
    cdef char[PGF_NUMERIC_ROOM] text
    if code == NESTED_TEXT or code == NESTED_BINARY:
        return store_nested(column, code == NESTED_BINARY, row, at, length, floor, ceiling)
    if code == UTF8:
        to = variable(column, row, length, &status)
        if to == NULL:
            return status
        if pgf_copy_utf8(to, at, length, after):
            column.offsets[row + 1] = column.offsets[row] + <int32_t> length
            return DONE
    elif code == BYTES:
        if column.width < 0:
            to = variable(column, row, length, &status)
            if to == NULL:
                return status
            pgf_copy_text(to, at, length, after)
            column.offsets[row + 1] = column.offsets[row] + <int32_t> length
            return DONE
        if length == <uint32_t> column.width:
            memcpy(column.data + row * length, at, length)
            return DONE
    elif code == FLOAT4_TEXT:
        # Past the greatest float32 it is for the slow way to refuse.
        if pgf_float(at, length, POWERS_OF_FIVE, &real) and -3.4e38 <= real <= 3.4e38:
            (<float *> column.data)[row] = <float> real
            return DONE
    elif code == JSONB_BINARY:
        if length > 0 and at[0] == 1:
            to = variable(column, row, length - 1, &status)
            if to == NULL:
                return status
            if pgf_copy_utf8(to, at + 1, length - 1, after):
                column.offsets[row + 1] = column.offsets[row] + <int32_t> (length - 1)
                return DONE
    elif code == INT2_TEXT:
        if pgf_integer(at, length, before, -0x8000, 0x7FFF, &number):
            (<int16_t *> column.data)[row] = <int16_t> number
            return DONE
    elif code == SAME2:
        if length == 2:
            (<uint16_t *> column.data)[row] = load_uint16(at)
            return DONE
    elif code == NUMERIC_TEXT:
        if pgf_is_numeric(at, length):
            to = variable(column, row, length, &status)
            if to == NULL:
                return status
            pgf_copy_text(to, at, length, after)
            column.offsets[row + 1] = column.offsets[row] + <int32_t> length
            return DONE
    elif code == NUMERIC_BINARY:
        size = pgf_numeric_text(at, length, text)
        if size > 0:
            to = variable(column, row, size, &status)
            if to == NULL:
                return status
            memcpy(to, text, size)
            column.offsets[row + 1] = column.offsets[row] + <int32_t> size
            return DONE
    elif code == ASCII:
        to = variable(column, row, length, &status)
        if to == NULL:
            return status
        if pgf_copy_text(to, at, length, after):
            column.offsets[row + 1] = column.offsets[row] + <int32_t> length
            return DONE
    elif code == BYTEA_TEXT:
        if length >= 2 and length % 2 == 0 and at[0] == c'\\' and at[1] == c'x':
            to = variable(column, row, (length - 2) // 2, &status)
            if to == NULL:
                return status
            if pgf_hexadecimal(at + 2, (length - 2) // 2, to):
                column.offsets[row + 1] = column.offsets[row] + <int32_t> ((length - 2) // 2)
                return DONE
    elif code == UUID_UTF8_TEXT or code == UUID_UTF8_BINARY:
        if code == UUID_UTF8_BINARY:
            if length != 16:
                return FAULT
        elif not pgf_uuid(at, length, <uint8_t *> text):
            return FAULT
        to = variable(column, row, 36, &status)
        if to == NULL:
            return status
        # Written anew, as a server prints it: in small letters.
        pgf_uuid_text(at if code == UUID_UTF8_BINARY else <uint8_t *> text, to)
        column.offsets[row + 1] = column.offsets[row] + 36
        return DONE
    elif code == TIME_TEXT or code == TIME_NS_TEXT:
        if length >= 8 and pgf_time(at, length, &number) == length:
            (<int64_t *> column.data)[row] = number * (1000 if code == TIME_NS_TEXT else 1)
            return DONE
    elif code == TIME_BINARY or code == TIME_NS_BINARY:
        if length == 8:
            number = <int64_t> load_uint64(at)
            if 0 <= number < DAY:
                (<int64_t *> column.data)[row] = number * (1000 if code == TIME_NS_BINARY else 1)
                return DONE
    elif code == LABEL:
        days = number_of(<const LabelTable *> column.labels, at, length)
        if days >= 0:
            (<int32_t *> column.data)[row] = days
            return DONE
    elif code == UINT4_TEXT:
        if pgf_integer(at, length, before, 0, 0xFFFFFFFF, &number):
            (<uint32_t *> column.data)[row] = <uint32_t> number
            return DONE
    elif code == UINT4_WIDE_TEXT:
        if pgf_integer(at, length, before, 0, 0xFFFFFFFF, &number):
            (<int64_t *> column.data)[row] = number
            return DONE
    elif code == UINT4_WIDE:
        if length == 4:
            (<int64_t *> column.data)[row] = load_uint32(at)
            return DONE
    elif code == INTERVAL_BINARY:
        if length == 16:
            number = <int64_t> load_uint64(at)
            days = <int32_t> load_uint32(at + 12)
            # Infinite ones have the extremes in all parts.
            if (
                -MOST_MICROSECONDS < number < MOST_MICROSECONDS
                and -0x7FFFFFFF <= days < 0x7FFFFFFF
            ):
                (<int32_t *> column.data)[row * 4] = days
                (<int32_t *> column.data)[row * 4 + 1] = <int32_t> load_uint32(at + 8)
                (<int64_t *> column.data)[row * 2 + 1] = number * 1000
                return DONE
    return FAULT


# The same as the C of nested values calls it, of which each part has a column of one row.
cdef int store_cell(
    Column *column, uint8_t code, const uint8_t *at, uint32_t length, const uint8_t *floor,
    const uint8_t *ceiling,
) noexcept nogil:
    cdef Status status = store_other(column, code, 0, at, length, floor, ceiling)
    if status == DONE:
        return PGF_DONE
    return PGF_NO_MEMORY if status == NO_MEMORY else PGF_FULL if status == FULL else PGF_UNUSUAL


cdef Status store_nested(
    Column *column, bint binary, int64_t row, const uint8_t *at, uint32_t length,
    const uint8_t *floor, const uint8_t *ceiling,
) noexcept nogil:
    cdef int status = pack_row(column, row, at, length, binary, floor, ceiling, store_cell)
    if status == PGF_DONE:
        return DONE
    return NO_MEMORY if status == PGF_NO_MEMORY else FULL if status == PGF_FULL else FAULT


# --- frames to rows ------------------------------------------------------------------------------

cdef class Reader:
    """Reads frames into rows, and knows where the frames have led as far as rows need it."""

    def __dealloc__(self):
        free(self.events.at)


# Rows of frames up to `end`, or to one that is for Python.
cdef Status read_rows(Reader self, const Source *source, Py_ssize_t end) noexcept nogil:
    cdef Frame frame
    cdef Stop stop
    cdef Status status
    cdef const uint64_t *lsns = NULL
    if self.lsns != NULL:
        lsns = self.lsns + self.before
    while True:
        self.at = take_rows(&self.stream, source, self.at, end, lsns, &stop)
        if self.at == end:
            return DONE
        take_frame(source, self.at, &frame)
        if stop.rows != NULL:
            self.stopped = stop.rows
            status = go_on(self, &stop, &frame)
        else:
            status = read_frame(self, &frame)
        if status != DONE:
            return status
        self.at += 1


# The frame that the loop over rows has left.
cdef Status read_frame(Reader self, const Frame *frame) noexcept nogil:
    cdef int32_t xid_size = 4 if self.stream.in_stream else 0
    cdef Cached *cached
    cdef uint8_t tag
    if frame.length == 0 or frame.length > MAX_FRAME:
        return FAULT
    tag = frame.at[0]
    if tag == c'I' or tag == c'U' or tag == c'D':
        if frame.length < 8 + xid_size:
            return FAULT
        cached = &self.stream.cached[frame.at[4 + xid_size]]
        self.wanted_id = load_uint32(frame.at + 1 + xid_size)
        if cached.rows == NULL or self.wanted_id != <uint32_t> (cached.header >> 24):
            return UNKNOWN
        self.stopped = cached.rows
        return read_change(self, cached.rows, frame, tag, 5 + xid_size)
    if tag == c'B':
        return FAULT
    if tag == c'C':
        if frame.length != 26 or self.stream.in_stream:
            return FAULT
        return commit(self, frame)
    return RARE


cdef Status commit(Reader self, const Frame *frame) noexcept nogil:
    if not event(
        self, c'C', self.stream.xid if self.stream.in_transaction else 0, 0,
        load_uint64(frame.at + 2), load_uint64(frame.at + 10),
        <int64_t> load_uint64(frame.at + 18),
    ):
        return NO_MEMORY
    self.stream.in_transaction = False
    self.stream.has_commit = False
    self.stream.seq = 0
    settle(&self.stream)
    return DONE


# A row that is a new tuple and nothing else, from where the loop has stopped.
cdef Status go_on(Reader self, const Stop *stop, const Frame *frame) noexcept nogil:
    cdef Rows *rows = stop.rows
    cdef int64_t bytes_before = rows.bytes
    cdef int64_t unchanged_before = rows.unchanged_count
    cdef Py_ssize_t position = stop.at - frame.at
    cdef Status status
    rows.bytes += stop.bytes
    status = read_rest(self, rows, &rows.after, frame, &position, stop.column, 0)
    if status == DONE and position != frame.length:
        status = FAULT
    if status != DONE:
        return give_up(self, rows, status, bytes_before, unchanged_before)
    return finish_row(
        self, rows, frame, (INSERT if frame.at[0] == c'I' else UPDATE) | HAS_AFTER, bytes_before,
        unchanged_before,
    )


# Any Insert, Update or Delete; `position` is its first tuple's marker.
cdef Status read_change(
    Reader self, Rows *rows, const Frame *frame, uint8_t tag, Py_ssize_t position
) noexcept nogil:
    cdef const uint8_t *data = frame.at
    cdef Py_ssize_t end = frame.length
    cdef Py_ssize_t old = 0
    cdef Py_ssize_t filler = 0
    cdef Side *side = &rows.after
    cdef uint8_t marker = data[position]
    cdef uint8_t flags
    cdef int64_t bytes_before = rows.bytes
    cdef int64_t unchanged_before = rows.unchanged_count
    cdef int64_t row = rows.count
    cdef Status status = DONE
    if self.stream.wide and self.lsns != NULL and self.lsns[self.before + self.at] >> 63:
        return FAULT
    position += 1
    if not rows.wanted:
        return pass_over(self, rows, frame, tag, marker, position)
    if row == rows.capacity and not grow_rows(rows):
        return NO_MEMORY
    if row == self.max_rows:
        return FULL_ROWS
    flags = DELETE if tag == c'D' else (INSERT if tag == c'I' else UPDATE) | HAS_AFTER
    if tag != c'I' and (marker == c'K' or marker == c'O'):
        flags |= OLD_KEY if marker == c'K' else OLD_ROW
        old = position
        side = &rows.before
    # The old tuple, if there is one, then the new one.
    while True:
        if side == &rows.after and (marker != c'N' or tag == c'D'):
            return give_up(self, rows, FAULT, bytes_before, unchanged_before)
        if not make_ready(rows, side, row):
            return give_up(self, rows, NO_MEMORY, bytes_before, unchanged_before)
        status = read_tuple(self, rows, side, frame, &position, filler)
        if status != DONE:
            return give_up(self, rows, status, bytes_before, unchanged_before)
        if side == &rows.after or tag == c'D':
            break
        if position >= end:
            return give_up(self, rows, FAULT, bytes_before, unchanged_before)
        marker = data[position]
        position += 1
        side = &rows.after
        if self.fill_unchanged and flags & OLD_ROW:
            filler = old
    if position != end:
        return give_up(self, rows, FAULT, bytes_before, unchanged_before)
    status = finish_row(self, rows, frame, flags, bytes_before, unchanged_before)
    # As long as every row has a new tuple, the columns need no look until they are full.
    rows.limit = 0
    if rows.after.filled == rows.count:
        rows.limit = min(rows.capacity, rows.after.capacity, self.max_rows)
    return status


# A row that was read to its end counts from now on, if there is room for it.
cdef Status finish_row(
    Reader self, Rows *rows, const Frame *frame, uint8_t flags, int64_t bytes_before,
    int64_t unchanged_before,
) noexcept nogil:
    cdef int64_t row = rows.count
    cdef int64_t held = self.stream.held + rows.bytes - bytes_before + rows.fixed
    cdef bint is_first_old = flags & (OLD_KEY | OLD_ROW) and not rows.has_before
    # From the first old tuple on, all rows have their place in the columns of `before`.
    if is_first_old:
        held += rows.side_fixed * (row + 1)
    if (
        held > self.stream.max_bytes or rows.unchanged_bytes > INT32_MAX
    ) and self.stream.held > 0:
        return give_up(self, rows, FULL, bytes_before, unchanged_before)
    self.stream.held = held
    if is_first_old:
        rows.has_before = True
        rows.fixed += rows.side_fixed
    if flags & (OLD_KEY | OLD_ROW):
        rows.before.filled = row + 1
    if flags & HAS_AFTER:
        rows.after.filled = row + 1
    if rows.unchanged_count > unchanged_before:
        rows.unchanged_ends[row + 1] = <int32_t> rows.unchanged_count
        rows.unchanged_filled = row + 1
    put_row(self, rows, flags, frame)
    return DONE


# What stands beside the tuples of a row, which counts from now on.
cdef void put_row(Reader self, Rows *rows, uint8_t flags, const Frame *frame) noexcept nogil:
    cdef const uint64_t *lsn = NULL
    if self.lsns != NULL:
        lsn = self.lsns + self.before + self.at
    put_beside(&self.stream, rows, flags, frame.at, lsn)
    self.stream.seq += 1


# Undo what a row has left behind.
cdef Status give_up(
    Reader self, Rows *rows, Status status, int64_t bytes_before, int64_t unchanged_before
) noexcept nogil:
    cdef int64_t i
    rows.bytes = bytes_before
    for i in range(unchanged_before, rows.unchanged_count):
        rows.unchanged_bytes -= 1 + strlen(rows.names[rows.unchanged[i]])
    rows.unchanged_count = unchanged_before
    undo(rows, &rows.before)
    undo(rows, &rows.after)
    return status


# A row of a table that is not wanted: it must be sound all the same, and is counted.
cdef Status pass_over(
    Reader self, Rows *rows, const Frame *frame, uint8_t tag, uint8_t marker, Py_ssize_t position
) noexcept nogil:
    cdef const uint8_t *data = frame.at
    cdef Py_ssize_t end = frame.length
    position = walk_tuple(data, position, end, rows.width)
    if tag != c'I' and (marker == c'K' or marker == c'O'):
        if tag == c'U':
            if position < 0 or position >= end or data[position] != c'N':
                return FAULT
            position = walk_tuple(data, position + 1, end, rows.width)
    elif marker != c'N' or tag == c'D':
        return FAULT
    if position != end:
        return FAULT
    self.stream.seq += 1
    return DONE


# The columns of a tuple; `old` is where the old row is whose values stand for those not sent.
cdef inline Status read_tuple(
    Reader self, Rows *rows, Side *side, const Frame *frame, Py_ssize_t *position, Py_ssize_t old
) noexcept nogil:
    cdef const uint8_t *at = frame.at + position[0]
    cdef const uint8_t *end = frame.at + frame.length
    cdef Column *column = side.columns
    cdef Column *last = column + rows.width
    if unlikely(end - at < 2 or <int32_t> load_uint16(at) != rows.width):
        return FAULT
    at = take_values(&column, rows.count, at + 2, end, frame.floor, frame.ceiling, &rows.bytes)
    position[0] = at - frame.at
    if likely(column == last):
        return DONE
    return read_rest(self, rows, side, frame, position, column, old)


# The columns of a tuple from one on that is malformed, or nothing that rows are full of.
cdef Status read_rest(
    Reader self, Rows *rows, Side *side, const Frame *frame, Py_ssize_t *position, Column *column,
    Py_ssize_t old,
) noexcept nogil:
    cdef const uint8_t *at = frame.at + position[0]
    cdef const uint8_t *end = frame.at + frame.length
    cdef Column *last = side.columns + rows.width
    cdef uint32_t length
    cdef Status status
    while column < last:
        if at >= end:
            return FAULT
        if at[0] == c't' or at[0] == c'b':
            if end - at < 5:
                return FAULT
            length = load_uint32(at + 1)
            # Unsigned: a negative length is longer than any frame.
            if length > <size_t> (end - at - 5):
                return FAULT
            if at[0] != column.kind:
                column.kind = at[0]
                column.code = column.codes[at[0] == c't']
            else:
                status = store_value(
                    self, rows, column, column - side.columns, at + 5, length, at[0] == c'b', frame
                )
                if status != DONE:
                    return status
                at += 5 + length
                column += 1
        elif at[0] == c'n':
            if column.codes[1] != SKIP and not set_null(column, side, rows.count):
                return NO_MEMORY
            at += 1
            column += 1
        elif at[0] == c'u':
            at += 1
            if column.codes[1] != SKIP:
                status = unsent(
                    self, rows, side, column - side.columns, frame, at - frame.at, old
                )
                if status != DONE:
                    return status
            column += 1
        else:
            return FAULT
        at = take_values(&column, rows.count, at, end, frame.floor, frame.ceiling, &rows.bytes)
    position[0] = at - frame.at
    return DONE


# A value of any type.
cdef Status store_value(
    Reader self, Rows *rows, Column *column, int32_t c, const uint8_t *at, uint32_t length,
    bint binary, const Frame *frame,
) noexcept nogil:
    cdef int64_t row = rows.count
    cdef uint8_t *form
    cdef uint8_t code = column.codes[0 if binary else 1]
    cdef Status status
    if code == FORM:
        code = column.form_codes[0 if binary else 1]
        # One form for the old and the new row, as they have one type.
        form = &rows.after.columns[c].form
        if form[0] != (AS_BINARY if binary else AS_TEXT):
            if form[0] != UNDECIDED:
                return other_form(self, rows, c, at - frame.at)
            form[0] = AS_BINARY if binary else AS_TEXT
            rows.form_rows[c] = row
        column.code = code
    status = store_other(column, code, row, at, length, frame.floor, frame.ceiling)
    if status == FAULT:
        status = store_slowly(self, rows, column, c, at, length, binary, frame)
    if status == DONE and column.width < 0:
        rows.bytes += column.offsets[row + 1] - column.offsets[row]
    return status


# A column that was not sent.
cdef Status unsent(
    Reader self, Rows *rows, Side *side, int32_t c, const Frame *frame, Py_ssize_t at,
    Py_ssize_t old,
) noexcept nogil:
    cdef const uint8_t *data = frame.at
    cdef Py_ssize_t position = old + 2
    cdef uint32_t length
    cdef int32_t _i
    if side == &rows.before:
        return unsent_before(self, c, at)
    if old > 0:
        # The old row was found sound a moment ago.
        for _i in range(c):
            if data[position] == c't' or data[position] == c'b':
                position += 5 + load_uint32(data + position + 1)
            else:
                position += 1
        if data[position] == c't' or data[position] == c'b':
            length = load_uint32(data + position + 1)
            return store_value(
                self, rows, &side.columns[c], c, data + position + 5, length,
                data[position] == c'b', frame,
            )
    if not note_unchanged(rows, c) or not set_null(&side.columns[c], side, rows.count):
        return NO_MEMORY
    return DONE


cdef Status other_form(Reader self, Rows *rows, int32_t c, int64_t offset) noexcept with gil:
    if rows.count > 0:
        return OTHER_FORM
    self.error = ValueError(TWO_FORMS)
    self.error_column = c
    self.error_offset = offset
    return FAULT


cdef Status unsent_before(Reader self, int32_t c, int64_t offset) noexcept with gil:
    self.error = ValueError(UNSENT_BEFORE)
    self.error_column = c
    self.error_offset = offset
    return FAULT


# A value that no converter takes, or for which there is none.
cdef Status store_slowly(
    Reader self, Rows *rows, Column *column, int32_t c, const uint8_t *at, uint32_t length,
    bint binary, const Frame *frame,
) noexcept with gil:
    cdef bytes stored
    cdef uint8_t *to
    cdef int64_t row = rows.count
    cdef Status status = DONE
    cdef Side *side = &rows.after
    if column == &rows.before.columns[c]:
        side = &rows.before
    try:
        field = <object> column.field
        raw = PyBytes_FromStringAndSize(<const char *> at, length)
        stored = field.binary(raw) if binary else field.text(raw)
    except BaseException as error:
        self.error = error
        if isinstance(error, NewLabel):
            return NEW_LABEL
        self.error_column = c
        self.error_offset = at - frame.at
        return FAULT
    if stored is None:
        return DONE if set_null(column, side, row) else NO_MEMORY
    if column.width == 0:
        if PyBytes_AS_STRING(stored)[0]:
            column.data[row >> 3] |= 1 << (row & 7)
        else:
            column.data[row >> 3] &= ~(1 << (row & 7))
    elif column.width > 0:
        memcpy(column.data + row * column.width, PyBytes_AS_STRING(stored), column.width)
    else:
        to = variable(column, row, PyBytes_GET_SIZE(stored), &status)
        if to != NULL:
            memcpy(to, PyBytes_AS_STRING(stored), PyBytes_GET_SIZE(stored))
            column.offsets[row + 1] = column.offsets[row] + <int32_t> PyBytes_GET_SIZE(stored)
    return status


# Note an event of the frame that comes next.
cdef bint event(
    Reader self, uint8_t tag, uint32_t xid, uint32_t subxid, uint64_t commit_lsn, uint64_t end_lsn,
    int64_t commit_time,
) noexcept nogil:
    cdef Event *event
    cdef int64_t room
    cdef int i
    if self.events.count == self.events.room:
        room = self.events.room * 2 + 64
        if not grow(<void **> &self.events.at, room * sizeof(Event)):
            return False
        self.events.room = room
    event = self.events.at + self.events.count
    event.frame = self.before + self.at
    event.commit_lsn = commit_lsn
    event.end_lsn = end_lsn
    event.commit_time = commit_time
    event.xid = xid
    event.subxid = subxid
    event.tag = tag
    for i in range(7):
        event.unused[i] = 0
    self.events.count += 1
    return True
