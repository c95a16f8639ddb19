# cython: annotation_typing=False, cdivision=True
"""Store rows of frames in the columns of their relations, without the interpreter.

The layout of a relation names a converter for each column, which appends the row's value. For a
value that is unusual to the converter, the field's function in Python decides what the column
stores. A row is counted after its last value, so that a refused row leaves nothing behind. The twin
of this module is a part of ``_pure_engine.py``.
"""

from __future__ import annotations

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport INT32_MAX, int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free
from libc.string cimport memcpy, strlen

from pgoutput_fast.values._values cimport pgf_power, powers_of_five
from pgoutput_fast._loads cimport load_uint16, load_uint32, load_uint64
from pgoutput_fast.protocol._wire cimport (
    COMMIT_END_LSN, COMMIT_LENGTH, COMMIT_LSN, COMMIT_TIME, MAX_FRAME, ROW_COLUMNS, ROW_MARKER,
    ROW_RELATION_ID, VALUE_HEAD, XID_SIZE, walk_tuple,
)
from pgoutput_fast.columnar._columns cimport (
    CACHED_BY, CONVERTER_COUNT, DELETE, FORM, HAS_AFTER, INSERT, OLD_KEY, OLD_ROW, SHIFT, SKIP,
    SYNTAX_COUNT, UPDATE, Cached, Column, Rows, Side, Stream, settle,
)
from pgoutput_fast.columnar._input cimport Frame, Source, take_frame
from pgoutput_fast.columnar._memory cimport grow
from pgoutput_fast.columnar._relation cimport (
    AS_BINARY, AS_TEXT, UNDECIDED, begin_column, grow_rows, make_ready, note_unchanged, set_null,
    undo,
)

from .arrays import ITEM_SIZES, TWO_FORMS, UNSENT_BEFORE
from .fields import CONVERTERS, EPOCH_SHIFT, SYNTAXES
from .packed import NewLabel

cdef extern from *:
    bint likely(bint condition) noexcept nogil
    bint unlikely(bint condition) noexcept nogil

cdef extern from *:
    """
    #define PGF_NAME(name, ...) #name,
    static const char *const pgf_converter_names[] = {
        PGF_RARE_CONVERTERS(PGF_NAME) PGF_COMMON_CONVERTERS(PGF_NAME)
    };
    static const char *const pgf_syntax_names[] = {PGF_SYNTAXES(PGF_NAME)};
    #undef PGF_NAME
    """
    const char *pgf_converter_names[]
    const char *pgf_syntax_names[]

cdef extern from "_rows.h" nogil:
    ctypedef struct Stop "pgf_stop":
        Rows *rows
        Column *column
        const uint8_t *at
        int64_t bytes
    const uint8_t *take_values "pgf_take_more"(
        Column **next, int64_t row, const uint8_t *at, const uint8_t *end, const uint8_t *floor,
        const uint8_t *ceiling, int64_t *bytes
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
    const pgf_power *pgf_powers_of_five
    int pgf_room(Column *column, int64_t row, size_t length) noexcept
    int pgf_convert_one(
        Column *column, uint8_t code, int64_t row, const uint8_t *at, uint32_t length,
        const uint8_t *floor, const uint8_t *ceiling
    ) noexcept

pgf_powers_of_five = powers_of_five()

if [pgf_converter_names[i].decode().lower() for i in range(CONVERTER_COUNT)] != list(CONVERTERS):
    raise ImportError("this extension has other converters than columnar.fields; rebuild it")
if [pgf_syntax_names[i].decode().lower() for i in range(1, SYNTAX_COUNT)] != list(SYNTAXES)[1:]:
    raise ImportError("this extension has other syntaxes than columnar.fields; rebuild it")
if SHIFT != EPOCH_SHIFT:
    raise ImportError("this extension has another epoch than columnar.fields; rebuild it")
if ITEM_SIZES["events"] != sizeof(Event):
    raise ImportError(
        "the layouts of pgoutput_fast.columnar.arrays are not those of this extension; rebuild it"
    )


# --- frames to rows ------------------------------------------------------------------------------

cdef class Reader:
    """Reads frames into rows, and follows the transactions of the stream."""

    def __dealloc__(self):
        free(self.events.at)


# Read frames up to `end`. Return DONE, or the reason why the frame at `self.at` was not read.
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


# Read a frame that the loop over rows does not handle.
cdef Status read_frame(Reader self, const Frame *frame) noexcept nogil:
    cdef int32_t xid_size = XID_SIZE if self.stream.in_stream else 0
    cdef Cached *cached
    cdef uint8_t tag
    if frame.length == 0 or frame.length > MAX_FRAME:
        return FAULT
    tag = frame.at[0]
    if tag == c'I' or tag == c'U' or tag == c'D':
        if frame.length < ROW_COLUMNS + xid_size:
            return FAULT
        cached = &self.stream.cached[frame.at[CACHED_BY + xid_size]]
        self.wanted_id = load_uint32(frame.at + ROW_RELATION_ID + xid_size)
        if cached.rows == NULL or self.wanted_id != <uint32_t> (cached.header >> 24):
            return UNKNOWN
        self.stopped = cached.rows
        return read_change(self, cached.rows, frame, tag, ROW_MARKER + xid_size)
    if tag == c'B':
        return FAULT
    if tag == c'C':
        if frame.length != COMMIT_LENGTH or self.stream.in_stream:
            return FAULT
        return commit(self, frame)
    return RARE


cdef Status commit(Reader self, const Frame *frame) noexcept nogil:
    if not event(
        self, c'C', self.stream.xid if self.stream.in_transaction else 0, 0,
        load_uint64(frame.at + COMMIT_LSN), load_uint64(frame.at + COMMIT_END_LSN),
        <int64_t> load_uint64(frame.at + COMMIT_TIME),
    ):
        return NO_MEMORY
    self.stream.in_transaction = False
    self.stream.has_commit = False
    self.stream.seq = 0
    settle(&self.stream)
    return DONE


# Read the rest of a row with a new tuple alone, from the column where the loop over rows stopped.
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


# Read an Insert, Update or Delete. `position` is the marker of its first tuple.
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
    # Read the old tuple, if the row has one, then the new tuple.
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
    # The loop over rows can append to `after` only if `after` has all rows. A DELETE has no new
    # tuple: if `after` lacks no other row, append a null for it.
    if status == DONE and tag == c'D' and row > 0 and rows.after.filled == row:
        make_ready(rows, &rows.after, row + 1)  # without memory, the next row reports it
    rows.limit = 0
    if rows.after.filled == rows.count:
        rows.limit = min(rows.capacity, rows.after.capacity, self.max_rows)
    return status


# Count a row after its last value, unless it exceeds the limits of a batch.
cdef Status finish_row(
    Reader self, Rows *rows, const Frame *frame, uint8_t flags, int64_t bytes_before,
    int64_t unchanged_before,
) noexcept nogil:
    cdef int64_t row = rows.count
    cdef int64_t held = self.stream.held + rows.bytes - bytes_before + rows.fixed
    cdef bint is_first_old = flags & (OLD_KEY | OLD_ROW) and not rows.has_before
    # After the first old tuple, every row of the batch takes memory in the columns of `before`.
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


# Count a row, and store the columns beside its tuples.
cdef void put_row(Reader self, Rows *rows, uint8_t flags, const Frame *frame) noexcept nogil:
    cdef const uint64_t *lsn = NULL
    if self.lsns != NULL:
        lsn = self.lsns + self.before + self.at
    put_beside(&self.stream, rows, flags, frame.at, lsn)
    self.stream.seq += 1


# Undo a row that was not counted, and return `status`.
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


# Check a row of a table that is not decoded. The row is not stored, but counts in `seq`.
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


# Read the columns of a tuple. `old` is the position of the old tuple, which fills values that were
# not sent; 0: leave them null.
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


# Read the columns of a tuple from `column` on. The loop over usual values stopped there, at a value
# that is unusual or malformed.
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
            if end - at < VALUE_HEAD:
                return FAULT
            length = load_uint32(at + 1)
            # Unsigned: a negative length is longer than any frame.
            if length > <size_t> (end - at - VALUE_HEAD):
                return FAULT
            if at[0] != column.kind:
                if column.data == NULL and column.codes[1] != SKIP and not begin_column(
                    rows, column, column - side.columns, rows.count
                ):
                    return NO_MEMORY
                column.kind = at[0]
                column.code = column.codes[at[0] == c't']
            else:
                status = store_value(
                    self, rows, column, column - side.columns, at + VALUE_HEAD, length,
                    at[0] == c'b', frame,
                )
                if status != DONE:
                    return status
                at += VALUE_HEAD + length
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


# Return the status for a converter's result. FAULT means that the value is unusual.
cdef inline Status status_of(int result) noexcept nogil:
    if result == PGF_DONE:
        return DONE
    return NO_MEMORY if result == PGF_NO_MEMORY else FULL if result == PGF_FULL else FAULT


# Store a value with its converter. If it is unusual, store it with the field's function in Python.
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
        # `before` and `after` have the same schema: the form of `after` applies to both.
        form = &rows.after.columns[c].form
        if form[0] != (AS_BINARY if binary else AS_TEXT):
            if form[0] != UNDECIDED:
                return other_form(self, rows, c, at - frame.at)
            form[0] = AS_BINARY if binary else AS_TEXT
            rows.form_rows[c] = row
        column.code = code
    status = status_of(
        pgf_convert_one(column, code, row, at, length, frame.floor, frame.ceiling)
    )
    if status == FAULT:
        status = store_slowly(self, rows, column, c, at, length, binary, frame)
    if status == DONE and column.width < 0:
        rows.bytes += column.offsets[row + 1] - column.offsets[row]
    return status


# Store a column that was not sent: its value in the old row, or null.
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
        # No bounds are checked: the old tuple was read before.
        for _i in range(c):
            if data[position] == c't' or data[position] == c'b':
                position += VALUE_HEAD + load_uint32(data + position + 1)
            else:
                position += 1
        if data[position] == c't' or data[position] == c'b':
            length = load_uint32(data + position + 1)
            return store_value(
                self, rows, &side.columns[c], c, data + position + VALUE_HEAD, length,
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


# Store a value with the field's function in Python.
cdef Status store_slowly(
    Reader self, Rows *rows, Column *column, int32_t c, const uint8_t *at, uint32_t length,
    bint binary, const Frame *frame,
) noexcept with gil:
    cdef bytes stored
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
        status = status_of(pgf_room(column, row, PyBytes_GET_SIZE(stored)))
        if status == DONE:
            memcpy(
                column.data + column.offsets[row], PyBytes_AS_STRING(stored),
                PyBytes_GET_SIZE(stored),
            )
            column.offsets[row + 1] = column.offsets[row] + <int32_t> PyBytes_GET_SIZE(stored)
    return status


# Record the next frame as an event. Return False without memory.
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
