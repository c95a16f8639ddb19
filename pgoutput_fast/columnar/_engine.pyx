# cython: annotation_typing=False, cdivision=True
"""The rows of many frames as Arrow columns, compiled: the twin of ``_pure_engine.py``.

One pass over the frames, without the interpreter: a row's values go from the frame to the ends of
its relation's columns, each by the converter that the relation's layout names. Where a converter
finds a value unusual, a function of :mod:`pgoutput_fast.columnar.mapping` says what the column
stores, and where a frame is malformed, :mod:`pgoutput_fast.diagnose` says what is wrong. A row
counts when all of it is there, so that one that is refused leaves nothing behind.

The columns of a batch lie in one arena: memory that belongs to the batch and to every array that
was exported from it, and is freed with the last of them, by whichever thread that is.
"""

from __future__ import annotations

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.exc cimport PyErr_CheckSignals
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_New
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.errno cimport EINVAL, ENOMEM
from libc.stdint cimport (
    INT32_MAX, int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t,
)
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memcpy, memset, strlen

from pgoutput_fast._wire cimport MAX_FRAME, load_uint16, load_uint32, load_uint64, walk_tuple
from pgoutput_fast.columnar._input cimport Frame, Piece, Source, pieces_of, take_frame
from pgoutput_fast.columnar._memory cimport Memory, expect_memory

from .._core import decode, restore
from .arrays import (
    ITEM_SIZES, MOST_ROWS, TWO_FORMS, UNSENT_BEFORE, array_of, commit_of, lsns_of, metadata_bytes,
    refuse_time,
)
from ..diagnose import UNKNOWN_HINT, diagnose
from ..errors import DecodeError, fail
from .fields import CONVERTERS, EPOCH_SHIFT, LABEL_FIELD, SYNTAXES
from ..names import shown_name
from .schema import version_of
from .packed import NewLabel
from ..plan import refuse_value

cdef extern from "_arrow.h" nogil:
    enum:
        ARROW_FLAG_NULLABLE
    struct ArrowSchema:
        const char *format
        const char *name
        const char *metadata
        int64_t flags
        int64_t n_children
        ArrowSchema **children
        ArrowSchema *dictionary
        void (*release)(ArrowSchema *) noexcept nogil
        void *private_data
    struct ArrowArray:
        int64_t length
        int64_t null_count
        int64_t offset
        int64_t n_buffers
        int64_t n_children
        const void **buffers
        ArrowArray **children
        ArrowArray *dictionary
        void (*release)(ArrowArray *) noexcept nogil
        void *private_data
    struct ArrowArrayStream:
        int (*get_schema)(ArrowArrayStream *, ArrowSchema *) noexcept
        int (*get_next)(ArrowArrayStream *, ArrowArray *) noexcept
        const char *(*get_last_error)(ArrowArrayStream *) noexcept
        void (*release)(ArrowArrayStream *) noexcept
        void *private_data
    int64_t pgf_add(int64_t *count, int64_t change) noexcept

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
    enum:
        SLACK
        CONVERTER_COUNT, SLOW, SKIP, UTF8, ASCII, BYTES, FORM
        INT2_TEXT, UINT4_TEXT, UINT4_WIDE_TEXT, SAME2, UINT4_WIDE, FLOAT4_TEXT
        NUMERIC_TEXT, NUMERIC_BINARY, JSONB_BINARY, BYTEA_TEXT
        UUID_UTF8_TEXT, UUID_UTF8_BINARY, END
        TIME_TEXT, TIME_BINARY, TIME_NS_TEXT, TIME_NS_BINARY, INTERVAL_BINARY, LABEL
        NESTED_TEXT, NESTED_BINARY
    ctypedef struct Column "pgf_column":
        uint8_t kind
        uint8_t code
        uint8_t[2] codes
        uint8_t form
        uint8_t[2] form_codes
        int32_t width
        uint32_t scale
        uint8_t *validity
        uint8_t *data
        int32_t *offsets
        int64_t room
        uint64_t limit
        const void *labels  # a LabelTable
        void *part  # a Part
        void *field
    pgf_power[651] POWERS_OF_FIVE "PGF_POWERS_OF_FIVE"
    int64_t roomy "pgf_roomy"(int64_t size) noexcept
    void put_null "pgf_set_null"(Column *column, int64_t row) noexcept

cdef extern from "_nested.h" nogil:
    enum:
        PGF_FIXED, PGF_VARIABLE, PGF_LIST, PGF_FIXED_LIST, PGF_STRUCT
        PGF_VECTOR
        PGF_DONE, PGF_UNUSUAL, PGF_NO_MEMORY, PGF_FULL
    ctypedef struct LabelTable "pgf_labels":
        int32_t count
        uint32_t mask
        int32_t *ends
        uint8_t *text
        int32_t *slots
    int32_t *slot_of "pgf_slot"(
        const LabelTable *labels, const uint8_t *at, size_t length
    ) noexcept
    int32_t number_of "pgf_label"(
        const LabelTable *labels, const uint8_t *at, size_t length
    ) noexcept
    ctypedef struct Part "pgf_part":
        uint8_t shape
        int32_t width
        int32_t n_children
        Part *children
        const LabelTable *labels
        uint8_t syntax
        uint8_t delimiter
        uint8_t[2] codes
        uint32_t type_id
        Column[2] cell
        int32_t[2] cell_ends
        uint64_t[4] cell_bytes
        int64_t count, nulls, room, data_room
        uint8_t *validity
        uint8_t *data
        int32_t *offsets
    bint put_part "pgf_put"(Part *part, const uint8_t *at, int32_t size) noexcept
    void forget_part "pgf_forget_part"(Part *part) noexcept
    void free_part "pgf_free_part"(Part *part) noexcept
    ctypedef int (*StoreCell "pgf_store")(
        Column *column, uint8_t code, const uint8_t *at, uint32_t length, const uint8_t *floor,
        const uint8_t *ceiling
    ) noexcept
    int pack_row "pgf_pack_row"(
        Column *column, int64_t row, const uint8_t *at, size_t length, bint binary,
        const uint8_t *floor, const uint8_t *ceiling, StoreCell store
    ) noexcept

cdef extern from "_rows.h" nogil:
    enum:
        INSERT "PGF_INSERT"
        UPDATE "PGF_UPDATE"
        DELETE "PGF_DELETE"
        TRUNCATE "PGF_TRUNCATE"
        OP "PGF_OP"
        OLD_KEY "PGF_OLD_KEY"
        OLD_ROW "PGF_OLD_ROW"
        IN_STREAM "PGF_IN_STREAM"
        HAS_XID "PGF_HAS_XID"
        HAS_COMMIT "PGF_HAS_COMMIT"
        HAS_AFTER "PGF_HAS_AFTER"
        CACHED "PGF_CACHED"
    const int64_t SHIFT "PGF_SHIFT"
    ctypedef struct Side "pgf_side":
        Column *columns
        int64_t filled
        int64_t capacity
    ctypedef struct Rows "pgf_rows":
        void *owner
        bint wanted
        int32_t width
        int64_t count, limit, capacity
        int64_t bytes, fixed, side_fixed
        bint truncated, has_before
        uint8_t *flags
        uint8_t *xids
        uint8_t *subxids
        uint64_t *lsns
        uint64_t *commit_lsns
        int64_t *commit_times
        int64_t *seqs
        Side before, after
        int32_t *unchanged_ends
        int64_t unchanged_filled
        int32_t *unchanged
        int64_t unchanged_count, unchanged_bytes
        int64_t unchanged_room
        const char **names
        Part *parts
        Py_ssize_t blocks
        int64_t usual, reserved
        int64_t *usual_bytes
        int64_t *form_rows
    ctypedef struct Cached "pgf_cached":
        uint64_t header
        Rows *rows
    ctypedef struct Stream "pgf_stream":
        bint wide, in_stream, in_transaction, has_commit
        uint32_t open_xid, xid
        uint64_t commit_lsn
        int64_t commit_time, seq, held, max_bytes
        Cached[256] cached
    ctypedef struct Stop "pgf_stop":
        Rows *rows
        Column *column
        const uint8_t *at
        int64_t bytes
    uint64_t header_of "pgf_header"(uint32_t relation_id, int32_t width) noexcept
    const uint8_t *take_values "pgf_take_more"(
        Column **next, int64_t row, const uint8_t *at, const uint8_t *end, const uint8_t *floor,
        const uint8_t *ceiling, int64_t *bytes
    ) noexcept
    void settle "pgf_settle"(Stream *stream) noexcept
    void put_beside "pgf_put_beside"(
        const Stream *stream, Rows *rows, uint8_t flags, const uint8_t *at, const uint64_t *lsn
    ) noexcept
    int64_t take_rows "pgf_take_rows"(
        Stream *stream, const Source *source, int64_t i, int64_t end, const uint64_t *lsns,
        Stop *stop
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

cdef int64_t DAY = 86_400_000_000
cdef int64_t MOST_MICROSECONDS = 9_223_372_036_854_775  # of an interval, whose column has ns

cdef enum:
    FIRST_ROWS = 16
    SHRUNK = 65_536  # bytes that may lie idle at a column's end
    CHECKED = 65_536  # frames between two looks for Ctrl-C


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


# --- arenas --------------------------------------------------------------------------------------

cdef struct Arena:
    int64_t references
    int64_t size
    Py_ssize_t count
    void **blocks

cdef int64_t _live_arenas = 0


def live_arenas() -> int:
    """How many batches have not been freed yet."""
    return _live_arenas


cdef Arena *make_arena(Py_ssize_t most) noexcept nogil:
    cdef Arena *arena = <Arena *> calloc(1, sizeof(Arena))
    if arena == NULL:
        return NULL
    arena.blocks = <void **> malloc((most + 1) * sizeof(void *))
    if arena.blocks == NULL:
        free(arena)
        return NULL
    arena.references = 1
    pgf_add(&_live_arenas, 1)
    return arena


cdef void keep(Arena *arena) noexcept nogil:
    pgf_add(&arena.references, 1)


cdef void drop(Arena *arena) noexcept nogil:
    cdef Py_ssize_t i
    if arena == NULL or pgf_add(&arena.references, -1) > 0:
        return
    for i in range(arena.count):
        free(arena.blocks[i])
    free(arena.blocks)
    free(arena)
    pgf_add(&_live_arenas, -1)


# The arena takes over a block.
cdef void *own(Arena *arena, void *block, int64_t size) noexcept nogil:
    if block != NULL:
        arena.blocks[arena.count] = block
        arena.count += 1
        arena.size += size
    return block


# --- columns under construction ------------------------------------------------------------------

cdef enum Form:
    UNDECIDED
    AS_TEXT
    AS_BINARY

# An event as pgoutput_fast.columnar.arrays describes it to NumPy.
cdef struct Event:
    int64_t frame
    uint64_t commit_lsn
    uint64_t end_lsn
    int64_t commit_time
    uint32_t xid
    uint32_t subxid
    uint8_t tag
    uint8_t[7] unused

cdef struct EventArray:
    Event *at
    int64_t count
    int64_t room

if ITEM_SIZES["events"] != sizeof(Event):
    raise ImportError(
        "the layouts of pgoutput_fast.columnar.arrays are not those of this extension; rebuild it"
    )

cdef enum Status:
    DONE
    RARE  # a frame for the Python decoder
    UNKNOWN  # a relation that is not at hand
    FULL  # the row would pass max_bytes, or what offsets of 32 bits can count
    FULL_ROWS
    OTHER_FORM  # a value in the other format than its column
    NEW_LABEL  # of an enum, which its dictionary lacks
    FAULT
    NO_MEMORY


cdef bint grow(void **block, int64_t size) noexcept nogil:
    cdef void *moved = realloc(block[0], size + 1)
    if moved == NULL:
        return False
    block[0] = moved
    return True


# Room for `rows` in the columns of a side.
cdef bint grow_side(Rows *rows, Side *side, int64_t capacity) noexcept nogil:
    cdef Column *column
    cdef int32_t c
    for c in range(rows.width):
        column = &side.columns[c]
        if column.codes[1] == SKIP:
            continue
        if column.width < 0:
            if not grow(<void **> &column.offsets, (capacity + 1) * 4):
                return False
            if side.capacity == 0:
                column.offsets[0] = 0
            if column.data == NULL:
                column.room = roomy(rows.usual_bytes[c])
                if not grow(<void **> &column.data, column.room):
                    return False
        elif column.width == 0:
            if not grow(<void **> &column.data, (capacity + 7) // 8 + SLACK):
                return False
        elif not grow(<void **> &column.data, capacity * column.width + SLACK):
            return False
        if column.validity != NULL and not grow_validity(column, side.capacity, capacity):
            return False
    side.capacity = capacity
    return True


# Validity bits are set, but for those that were cleared.
cdef bint grow_validity(Column *column, int64_t before, int64_t capacity) noexcept nogil:
    cdef int64_t used = (before + 7) // 8 if column.validity != NULL else 0
    if not grow(<void **> &column.validity, (capacity + 7) // 8):
        return False
    memset(column.validity + used, 0xFF, (capacity + 7) // 8 - used)
    return True


cdef bint set_null(Column *column, Side *side, int64_t row) noexcept nogil:
    if column.validity == NULL and not grow_validity(column, 0, side.capacity):
        return False
    put_null(column, row)
    return True


# Room for a row on this side, and nulls for the rows before it that have no tuple here.
cdef bint make_ready(Rows *rows, Side *side, int64_t row) noexcept nogil:
    if side.capacity <= row and not grow_side(rows, side, rows.capacity):
        return False
    return pad(rows, side, row)


# Nulls for the rows up to `count` that have no tuple on this side.
cdef bint pad(Rows *rows, Side *side, int64_t count) noexcept nogil:
    cdef int64_t i
    cdef int32_t c
    if side.filled == count:
        return True
    if side.capacity < count and not grow_side(rows, side, count):
        return False
    for c in range(rows.width):
        if side.columns[c].codes[1] != SKIP:
            for i in range(side.filled, count):
                if not set_null(&side.columns[c], side, i):
                    return False
    side.filled = count
    return True


# The converter of a column by format is of one batch.
cdef inline void forget_form(Column *column) noexcept nogil:
    if column.codes[1] == FORM:
        column.form = UNDECIDED
        column.kind = 0
        column.code = SLOW


# A row that was not finished leaves no trace: bits of validity and forms are as before.
cdef void undo(Rows *rows, Side *side) noexcept nogil:
    cdef int32_t c
    for c in range(rows.width):
        if side.columns[c].validity != NULL and side.filled < side.capacity:
            side.columns[c].validity[side.filled >> 3] |= 1 << (side.filled & 7)
        if rows.form_rows[c] == rows.count:
            forget_form(&side.columns[c])


cdef bint grow_rows(Rows *rows) noexcept nogil:
    cdef int64_t capacity = rows.capacity * 2
    if rows.capacity == 0:
        capacity = rows.usual if rows.usual > FIRST_ROWS else FIRST_ROWS
    if not grow(<void **> &rows.flags, capacity):
        return False
    if not (
        grow(<void **> &rows.xids, capacity * 8) and grow(<void **> &rows.subxids, capacity * 8)
        and grow(<void **> &rows.lsns, capacity * 8)
        and grow(<void **> &rows.commit_lsns, capacity * 8)
        and grow(<void **> &rows.commit_times, capacity * 8)
        and grow(<void **> &rows.seqs, capacity * 8)
    ):
        return False
    if rows.unchanged_ends != NULL and not grow(<void **> &rows.unchanged_ends, (capacity + 1) * 4):
        return False
    rows.capacity = capacity
    return True


cdef void free_side(Rows *rows, Side *side) noexcept nogil:
    cdef int32_t c
    for c in range(rows.width):
        free(side.columns[c].validity)
        free(side.columns[c].data)
        free(side.columns[c].offsets)
    empty_side(rows, side)


cdef void empty_side(Rows *rows, Side *side) noexcept nogil:
    cdef int32_t c
    for c in range(rows.width):
        side.columns[c].validity = NULL
        side.columns[c].data = NULL
        side.columns[c].offsets = NULL
        side.columns[c].room = 0
        forget_form(&side.columns[c])
    side.filled = 0
    side.capacity = 0


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


# Give back what a column of so many bytes will not need.
cdef void shrink(Column *column, int64_t used) noexcept nogil:
    if column.room > 2 * used + SHRUNK and grow(<void **> &column.data, used + SLACK):
        column.room = used + SLACK


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


# --- the rows of a relation ----------------------------------------------------------------------

cdef class _Relation:
    """The rows of one version of a relation that have come since its last batch."""

    cdef Rows rows
    cdef object layout  # None: its rows are not wanted
    cdef object plan
    cdef list names
    cdef list positions  # of the columns that are wanted
    cdef dict schemas  # by the columns that are binary
    cdef dict labels  # Labels → _LabelTable

    def __dealloc__(self):
        cdef int32_t c
        self.clear()
        free(self.rows.before.columns)
        free(self.rows.after.columns)
        free(self.rows.usual_bytes)
        free(self.rows.form_rows)
        free(<void *> self.rows.names)
        if self.rows.parts != NULL:
            for c in range(self.rows.width):
                free_parts(&self.rows.parts[c])
            free(self.rows.parts)

    cdef void clear(self) noexcept:
        free_side(&self.rows, &self.rows.before)
        free_side(&self.rows, &self.rows.after)
        free(self.rows.flags)
        free(self.rows.xids)
        free(self.rows.subxids)
        free(self.rows.lsns)
        free(self.rows.commit_lsns)
        free(self.rows.commit_times)
        free(self.rows.seqs)
        free(self.rows.unchanged_ends)
        free(self.rows.unchanged)
        forget_rows(&self.rows)


# What an arena has taken over is not a relation's any more.
cdef void forget_rows(Rows *rows) noexcept nogil:
    empty_side(rows, &rows.before)
    empty_side(rows, &rows.after)
    rows.flags = rows.xids = rows.subxids = NULL
    rows.lsns = rows.commit_lsns = NULL
    rows.commit_times = rows.seqs = NULL
    rows.unchanged_ends = rows.unchanged = NULL
    rows.count = rows.limit = rows.capacity = rows.bytes = 0
    rows.unchanged_count = rows.unchanged_bytes = 0
    rows.unchanged_room = rows.unchanged_filled = rows.reserved = 0
    rows.truncated = False
    if rows.has_before:
        rows.has_before = False
        rows.fixed -= rows.side_fixed


cdef _Relation make_relation(object plan, object layout):
    cdef _Relation made = _Relation.__new__(_Relation)
    cdef Py_ssize_t width = plan.width
    cdef Column *column
    cdef Py_ssize_t c
    made.plan = plan
    made.layout = layout
    made.rows.before.columns = <Column *> calloc(width + 1, sizeof(Column))
    made.rows.after.columns = <Column *> calloc(width + 1, sizeof(Column))
    made.rows.usual_bytes = <int64_t *> calloc(width + 1, sizeof(int64_t))
    made.rows.form_rows = <int64_t *> calloc(width + 1, sizeof(int64_t))
    made.rows.names = <const char **> calloc(width + 1, sizeof(char *))
    made.rows.parts = <Part *> calloc(width + 1, sizeof(Part))
    if (
        made.rows.before.columns == NULL or made.rows.after.columns == NULL
        or made.rows.usual_bytes == NULL or made.rows.form_rows == NULL or made.rows.names == NULL
        or made.rows.parts == NULL
    ):
        raise MemoryError
    made.rows.width = width
    made.rows.blocks = 64 + width * 8
    made.labels = {}
    made.rows.owner = <void *> made
    made.schemas = {}
    made.positions = [] if layout is None else [field.position for field in layout.columns]
    made.names = [shown_name(name).encode() for name in plan.names]
    for c in range(width):
        made.rows.names[c] = PyBytes_AS_STRING(made.names[c])
    made.rows.wanted = layout is not None
    for c in range(width):
        made.rows.after.columns[c].codes[1] = SKIP
        made.rows.after.columns[c].codes[0] = SKIP
    if layout is not None:
        made.rows.fixed = layout.row_bytes
        made.rows.side_fixed = layout.side_bytes
        for field in layout.columns:
            column = &made.rows.after.columns[field.position]
            column.codes[1] = FORM if field.by_format else field.text_code
            column.codes[0] = FORM if field.by_format else field.binary_code
            column.form_codes[1] = field.text_code
            column.form_codes[0] = field.binary_code
            shape_column(column, field)
            if field.is_nested or field.labels is not None:
                make_part(made, &made.rows.parts[field.position], field)
                if field.labels is not None:
                    column.labels = made.rows.parts[field.position].labels
                else:
                    column.part = &made.rows.parts[field.position]
    made.rows.after.columns[width].code = END
    memcpy(made.rows.before.columns, made.rows.after.columns, (width + 1) * sizeof(Column))
    return made


cdef int shape_column(Column *column, object field) except -1:
    column.width = field.width
    column.scale = max(field.scale, 0)
    column.limit = 10**field.precision if 0 < field.precision <= 18 else 0
    column.field = <void *> field
    return 0


# What the columns of a field are made of.
cdef int make_part(_Relation relation, Part *part, object field) except -1:
    cdef Py_ssize_t count = len(field.children)
    cdef Py_ssize_t i
    cdef _LabelTable table
    kind = field.format[:2]
    part.width = field.width
    part.shape = PGF_FIXED if field.width >= 0 else PGF_VARIABLE
    if kind == "+s":
        part.shape = PGF_STRUCT
    elif kind == "+w":
        part.shape = PGF_FIXED_LIST
        part.width = int(field.format[3:])
    elif count > 0:
        part.shape = PGF_LIST
    part.syntax = SYNTAXES[field.syntax]
    part.delimiter = ord(field.delimiter)
    part.codes[1] = field.text_code
    part.codes[0] = field.binary_code
    part.type_id = field.type_id
    shape_column(&part.cell[0], field)
    part.cell[1].code = END
    part.cell[0].offsets = part.cell_ends
    if field.width >= 0:
        part.cell[0].data = <uint8_t *> part.cell_bytes
    # On either side validity, offsets, data, children, and a dictionary with its two buffers.
    relation.rows.blocks += 2 * 7
    if field.labels is not None:
        table = relation.labels.get(field.labels)
        if table is None:
            table = relation.labels[field.labels] = _LabelTable.__new__(_LabelTable)
            table.fill(field.labels)
        part.labels = &table.table
        part.cell[0].labels = &table.table
    if count == 0:
        return 0
    part.children = <Part *> calloc(count, sizeof(Part))
    if part.children == NULL:
        raise MemoryError
    part.n_children = count
    for i in range(count):
        make_part(relation, &part.children[i], field.children[i])
    return 0


cdef void free_parts(Part *part) noexcept nogil:
    cdef int32_t i
    for i in range(part.n_children):
        free_parts(&part.children[i])
    free(part.children)
    if part.width < 0:
        free(part.cell[0].data)


@cython.final
cdef class _LabelTable:
    """The labels of an enum, which are looked up without the interpreter."""

    cdef LabelTable table

    cdef int fill(self, labels) except -1:
        cdef bytes label
        cdef Py_ssize_t count = len(labels.numbers), size = 0, slots = 8
        cdef int32_t number = 0
        for label in labels.numbers:
            size += PyBytes_GET_SIZE(label)
        while slots < 2 * count:
            slots *= 2
        self.forget()
        self.table.ends = <int32_t *> calloc(count + 1, 4)
        self.table.text = <uint8_t *> malloc(size + 1)
        self.table.slots = <int32_t *> calloc(slots, 4)
        if self.table.ends == NULL or self.table.text == NULL or self.table.slots == NULL:
            raise MemoryError
        self.table.count = count
        self.table.mask = slots - 1
        size = 0
        for label in labels.numbers:
            memcpy(self.table.text + size, PyBytes_AS_STRING(label), PyBytes_GET_SIZE(label))
            slot_of(
                &self.table, <const uint8_t *> PyBytes_AS_STRING(label), PyBytes_GET_SIZE(label)
            )[0] = number + 1
            size += PyBytes_GET_SIZE(label)
            number += 1
            self.table.ends[number] = size
        return 0

    cdef void forget(self) noexcept:
        free(self.table.ends)
        free(self.table.text)
        free(self.table.slots)
        memset(&self.table, 0, sizeof(LabelTable))

    def __dealloc__(self):
        self.forget()


# The relation's columns note that one of the row was not sent.
cdef bint note_unchanged(Rows *rows, int32_t column) noexcept nogil:
    cdef int64_t i, room
    if rows.unchanged_ends == NULL:
        if not grow(<void **> &rows.unchanged_ends, (rows.capacity + 1) * 4):
            return False
        rows.unchanged_ends[0] = 0
    if rows.unchanged_count == rows.unchanged_room:
        room = rows.unchanged_room * 2 + 64
        if not grow(<void **> &rows.unchanged, room * 4):
            return False
        rows.unchanged_room = room
    for i in range(rows.unchanged_filled, rows.count):
        rows.unchanged_ends[i + 1] = rows.unchanged_ends[i]
    rows.unchanged_filled = rows.count
    rows.unchanged[rows.unchanged_count] = column
    rows.unchanged_count += 1
    rows.bytes += 4 + strlen(rows.names[column])
    rows.unchanged_bytes += 1 + strlen(rows.names[column])
    return True


# --- the engine ----------------------------------------------------------------------------------

@cython.final
cdef class Engine:
    """Decodes frames into rows of Arrow columns, for :class:`pgoutput_fast.ColumnarDecoder`.

    Parameters
    ----------
    state : StreamState
    options : pgoutput_fast.columnar.options.Options
    """

    cdef readonly object state
    cdef object options
    cdef bint fill_unchanged
    cdef int64_t max_rows
    # The frames of this call, and the one that comes next.
    cdef list pieces
    cdef Py_ssize_t piece_index, at, before
    cdef Piece piece
    cdef object lsns_owner
    cdef const uint64_t *lsns
    cdef Stream stream
    # Relations by plan, and those that have rows.
    cdef dict known
    cdef dict open
    cdef int64_t reserved  # bytes of memory for their rows, in expectation of as many as usual
    # What a run leaves behind when it stops.
    cdef uint32_t wanted_id
    cdef Rows *stopped
    cdef object error
    cdef int32_t error_column
    cdef int64_t error_offset
    cdef list ready
    cdef EventArray events
    cdef readonly dict messages  # by frame: what is neither a row, nor Begin, nor Commit

    def __init__(self, state, options):
        self.options = options
        self.stream.wide = options.target == "spark"
        self.fill_unchanged = options.fill_unchanged
        self.max_rows = min(options.max_rows, MOST_ROWS)
        self.stream.max_bytes = options.max_bytes
        self.known = {}
        self.open = {}
        self.pieces = []
        self.ready = []
        self.messages = {}
        self.adopt(state)

    def __dealloc__(self):
        free(self.events.at)

    # --- what the leading class asks for

    def load(self, data, offsets, lsns):
        """Take frames, without decoding any yet."""
        cdef Py_ssize_t count = 0
        cdef Piece piece
        cdef list pieces = pieces_of(data, offsets)
        for piece in pieces:
            count += piece.source.count
        cdef const uint64_t[::1] view
        self.lsns = NULL
        self.lsns_owner = None
        if lsns is not None:
            view = self.lsns_owner = lsns_of(lsns, count)
            if count > 0:
                self.lsns = &view[0]
        self.pieces = pieces
        self.piece_index = self.at = self.before = 0
        self.piece = pieces[0] if pieces else None
        self.events.count = 0
        self.messages = {}

    def unload(self):
        """Forget the frames."""
        self.pieces = []
        self.piece = None
        self.lsns = NULL
        self.lsns_owner = None

    @property
    def position(self):
        """Index of the next frame."""
        return self.before + self.at

    def frame(self):
        """The next frame."""
        return self.piece.frame(self.at)

    def lsn(self):
        """The LSN of the next frame; None if no LSNs were given."""
        return self.lsns[self.before + self.at] if self.lsns != NULL else None

    def skip(self, rows):
        """Skip the next frame, which was refused; `rows` is how many rows it would have made."""
        self.stream.seq += rows
        self.at += 1

    def run(self):
        """Decode until record batches are complete, and return them; None after the last frame.

        Raises
        ------
        DecodeError
            The next frame is malformed or can't be stored. The engine is as it was before it.
        """
        cdef Status status
        cdef Py_ssize_t stop
        while self.piece is not None:
            if self.at == self.piece.source.count:
                self.next_piece()
                continue
            stop = min(self.at + CHECKED, self.piece.source.count)
            with nogil:
                status = read_rows(self, &self.piece.source, stop)
            if status == DONE:
                PyErr_CheckSignals()
            elif status == RARE:
                self.rare()
            elif status == UNKNOWN:
                self.find()
            elif status == FULL:
                return self.flush()
            elif status == FULL_ROWS or status == OTHER_FORM:
                if status == OTHER_FORM:
                    self.check()
                return [self.close(<_Relation> self.stopped.owner)]
            elif status == NEW_LABEL:
                self.learn(<_Relation> self.stopped.owner)
            elif status == NO_MEMORY:
                raise MemoryError
            else:
                self.refuse()
            if self.ready:
                ready, self.ready = self.ready, []
                return ready
        return None

    def flush(self):
        """Make record batches of all rows that are held, in the order of their first rows."""
        batches = [self.close(<_Relation> relation) for relation in list(self.open.values())]
        # Of a table that is not wanted, or whose only row was refused, there is none.
        return [batch for batch in batches if batch is not None]

    def drop(self):
        """Forget all rows that were not yet returned in a batch."""
        for relation in self.open.values():
            (<_Relation> relation).clear()
        self.open = {}
        self.ready = []
        self.stream.held = self.reserved = 0
        memset(self.stream.cached, 0, sizeof(self.stream.cached))

    def take_events(self):
        """The events (frames other than Begin, Insert, Update and Delete), as an array."""
        cdef Memory memory = Memory.__new__(Memory)
        memory.size = self.events.count * sizeof(Event)
        memory.at = malloc(memory.size + 1)
        if memory.at == NULL:
            raise MemoryError
        if memory.size > 0:
            memcpy(memory.at, self.events.at, memory.size)
        return array_of("events", memory)

    def adopt(self, state):
        """Go on from a stream state."""
        self.state = state
        self.stream.in_stream = state.open_xid is not None
        self.stream.open_xid = state.open_xid or 0
        self.stream.in_transaction = state.xid is not None
        self.stream.xid = state.xid or 0
        self.stream.has_commit = state.commit_lsn is not None
        self.stream.commit_lsn = state.commit_lsn or 0
        self.stream.commit_time = state.commit_time or 0
        self.stream.seq = state.row
        settle(&self.stream)
        memset(self.stream.cached, 0, sizeof(self.stream.cached))

    def sync(self):
        """Write what the engine keeps by itself back into the state."""
        state = self.state
        state.xid = self.stream.xid if self.stream.in_transaction else None
        state.commit_lsn = self.stream.commit_lsn if self.stream.has_commit else None
        state.commit_time = self.stream.commit_time if self.stream.has_commit else None
        state.row = self.stream.seq

    # --- frames

    cdef int next_piece(self) except -1:
        self.before += self.at
        self.at = 0
        self.piece_index += 1
        if self.piece_index < len(self.pieces):
            self.piece = self.pieces[self.piece_index]
        else:
            self.piece = None
        return 0

    # --- what is not for C

    # A frame that the Python decoder reads.
    cdef int rare(self) except -1:
        cdef bytes frame = self.piece.frame(self.at)
        cdef Py_ssize_t index = self.before + self.at
        cdef uint8_t tag = PyBytes_AS_STRING(frame)[0]
        cdef int64_t row = self.stream.seq
        self.sync()
        state = self.state
        open_xid = state.open_xid
        in_transaction = state.xid
        try:
            if tag == c'T':
                state.check_order(frame)
                message = decode(frame, open_xid is not None)
                self.truncate(message)
            else:
                message = state.receive(frame)
        except DecodeError as error:
            self.stream.seq = row
            error.frame = index
            raise
        if tag == c'R' or tag == c'Y':
            memset(self.stream.cached, 0, sizeof(self.stream.cached))
        elif tag != c'M' and tag != c'O' and tag != c'T':
            self.adopt(state)
        top = open_xid if open_xid is not None else in_transaction
        xid = getattr(message, "xid", None)
        if xid is None or open_xid is not None:
            subxid, xid = xid, top
        else:
            subxid = getattr(message, "subxid", None)
        if not event(
            self, tag, xid or 0, subxid or 0, getattr(message, "commit_lsn", None) or 0,
            getattr(message, "end_lsn", None) or 0, getattr(message, "commit_time", None) or 0,
        ):
            raise MemoryError
        self.messages[index] = message
        self.at += 1
        return 0

    # A row for each table that a TRUNCATE names. All of them must be known.
    cdef int truncate(self, message) except -1:
        cdef Rows *rows
        cdef Frame given
        state = self.state
        frame = message.frame
        start = 10 if message.in_stream else 6
        plans = []
        for i, relation_id in enumerate(message.relation_ids):
            plan = state.plan(relation_id)
            plans.append(plan)
            if plan is None:
                fail(
                    "unknown_relation", frame, start + 4 * i, relation_id=relation_id,
                    hint=UNKNOWN_HINT,
                )
        if self.stream.wide and self.lsns != NULL and self.lsns[self.before + self.at] >> 63:
            refuse_time(frame, 0, "lsn", self.lsns[self.before + self.at])
        take_frame(&self.piece.source, self.at, &given)
        for plan in plans:
            rows = &(self.relation_of(plan)).rows
            if not rows.wanted:
                self.stream.seq += 1
                continue
            if rows.count == self.max_rows:
                self.ready.append(self.close(<_Relation> rows.owner))
                self.relation_of(plan)
            elif self.stream.held > 0 and self.stream.held + rows.fixed > self.stream.max_bytes:
                self.ready += self.flush()
                self.relation_of(plan)
            if rows.count == rows.capacity and not grow_rows(rows):
                raise MemoryError
            self.stream.held += rows.fixed
            rows.truncated = True
            rows.limit = 0  # the columns of `after` are behind from now on
            put_row(self, rows, TRUNCATE, &given)
        return 0

    # The relation of the row that comes next.
    cdef int find(self) except -1:
        cdef _Relation relation
        plan = self.state.plan(self.wanted_id)
        if plan is None:
            self.refuse()
        relation = self.relation_of(plan)
        self.stream.cached[self.wanted_id & (CACHED - 1)].rows = &relation.rows
        self.stream.cached[self.wanted_id & (CACHED - 1)].header = header_of(
            self.wanted_id, relation.rows.width
        )
        return 0

    # The rows of a plan's version of its relation, which are open from now on. Those of another
    # version end: they come first.
    cdef _Relation relation_of(self, plan):
        cdef _Relation relation, other
        relation_id = plan.relation.relation_id
        key = version_of(plan)
        relation = self.known.get(key)
        if relation is None:
            relation = make_relation(plan, self.options.layout(plan))
            self.known[key] = relation
        other = self.open.get(relation_id)
        if other is not relation:
            if other is not None:
                batch = self.close(other)
                if batch is not None:
                    self.ready.append(batch)
            self.open[relation_id] = relation
            self.reserve(&relation.rows)
        return relation

    # A relation's batch will be like its last one, if that leaves room for those of the others.
    cdef void reserve(self, Rows *rows) noexcept:
        cdef int64_t usual = rows.usual * rows.fixed
        cdef int32_t c
        for c in range(rows.width):
            usual += rows.usual_bytes[c]
        if self.reserved + usual > self.stream.max_bytes:
            usual = rows.usual = 0
            memset(rows.usual_bytes, 0, rows.width * sizeof(int64_t))
        rows.reserved = usual
        self.reserved += usual

    # The rows of a relation as a batch; None if it has none.
    cdef object close(self, _Relation relation):
        cdef ChangeBatch batch
        cdef Rows *rows = &relation.rows
        cdef Column *column
        cdef int32_t c
        cdef bint made
        self.open.pop(relation.plan.relation.relation_id, None)
        memset(self.stream.cached, 0, sizeof(self.stream.cached))
        self.stream.held -= rows.bytes + rows.count * rows.fixed
        self.reserved -= rows.reserved
        if rows.count == 0:
            relation.clear()
            return None
        batch = ChangeBatch.__new__(ChangeBatch)
        batch.layout = relation.layout
        batch.wide = self.stream.wide
        batch.num_rows = rows.count
        binary = []
        for i, position in enumerate(relation.positions):
            c = position
            if rows.after.columns[c].form == AS_BINARY:
                binary.append(i)
        batch.binary = tuple(binary)
        batch.schema = relation.schemas.get(batch.binary)
        if batch.schema is None:
            batch.schema = schema_of(batch.layout.schema(batch.binary))
            relation.schemas[batch.binary] = batch.schema
        rows.usual = rows.count
        for c in range(rows.width):
            column = &rows.after.columns[c]
            if column.width < 0 and column.offsets != NULL:
                rows.usual_bytes[c] = column.offsets[rows.after.filled]
        with nogil:
            made = finish(rows, batch, self.lsns != NULL)
        if not made:
            raise MemoryError
        return batch

    # A label that an enum's dictionary lacks is in that of the next batch.
    cdef int learn(self, _Relation relation) except -1:
        new, self.error = self.error, None
        self.check()
        batch = self.close(relation)
        if batch is not None:
            self.ready.append(batch)
        new.labels.add(new.label)
        (<_LabelTable> relation.labels[new.labels]).fill(new.labels)
        return 0

    # Raise the error of the frame that comes next.
    cdef int refuse(self) except -1:
        error, self.error = self.error, None
        if error is not None and not isinstance(error, Exception):
            raise error
        plan = self.check()
        frame = self.frame()
        try:
            if error is not None:
                refuse_value(frame, self.error_offset, self.error_column, error, plan)
            refuse_time(frame, 0, "lsn", self.lsn())
        except DecodeError as refused:
            refused.frame = self.position
            raise

    # Raise the error of the frame that comes next if it is malformed; else it is a row, and this is
    # its relation's plan.
    cdef object check(self):
        cdef bytes frame = self.piece.frame(self.at)
        self.sync()
        state = self.state
        in_stream = state.open_xid is not None
        try:
            state.check_order(frame)
            if frame[:1] not in (b"I", b"U", b"D"):
                message = decode(frame, in_stream)
                if self.stream.wide and message.final_lsn >> 63:
                    refuse_time(frame, 1, "commit_lsn", message.final_lsn)
                refuse_time(frame, 9, "commit_time", message.commit_time)
            start = 5 if in_stream else 1
            plan = None
            if len(frame) >= start + 4:
                plan = state.plan(int.from_bytes(frame[start:start + 4], "big"))
            if plan is None:
                diagnose(frame, in_stream, state.plan)
            restore(frame, in_stream, plan)
        except DecodeError as refused:
            refused.frame = self.position
            raise
        return plan


# --- frames to rows -------------------------------------------------------------------------------


# Rows of frames up to `end`, or to one that is for Python.
cdef Status read_rows(Engine self, const Source *source, Py_ssize_t end) noexcept nogil:
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
cdef Status read_frame(Engine self, const Frame *frame) noexcept nogil:
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


cdef Status commit(Engine self, const Frame *frame) noexcept nogil:
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
cdef Status go_on(Engine self, const Stop *stop, const Frame *frame) noexcept nogil:
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
    Engine self, Rows *rows, const Frame *frame, uint8_t tag, Py_ssize_t position
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
    Engine self, Rows *rows, const Frame *frame, uint8_t flags, int64_t bytes_before,
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
cdef void put_row(Engine self, Rows *rows, uint8_t flags, const Frame *frame) noexcept nogil:
    cdef const uint64_t *lsn = NULL
    if self.lsns != NULL:
        lsn = self.lsns + self.before + self.at
    put_beside(&self.stream, rows, flags, frame.at, lsn)
    self.stream.seq += 1


# Undo what a row has left behind.
cdef Status give_up(
    Engine self, Rows *rows, Status status, int64_t bytes_before, int64_t unchanged_before
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
    Engine self, Rows *rows, const Frame *frame, uint8_t tag, uint8_t marker, Py_ssize_t position
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
    Engine self, Rows *rows, Side *side, const Frame *frame, Py_ssize_t *position, Py_ssize_t old
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
    Engine self, Rows *rows, Side *side, const Frame *frame, Py_ssize_t *position, Column *column,
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
    Engine self, Rows *rows, Column *column, int32_t c, const uint8_t *at, uint32_t length,
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
    Engine self, Rows *rows, Side *side, int32_t c, const Frame *frame, Py_ssize_t at,
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


cdef Status other_form(Engine self, Rows *rows, int32_t c, int64_t offset) noexcept with gil:
    if rows.count > 0:
        return OTHER_FORM
    self.error = ValueError(TWO_FORMS)
    self.error_column = c
    self.error_offset = offset
    return FAULT


cdef Status unsent_before(Engine self, int32_t c, int64_t offset) noexcept with gil:
    self.error = ValueError(UNSENT_BEFORE)
    self.error_column = c
    self.error_offset = offset
    return FAULT


# A value that no converter takes, or for which there is none.
cdef Status store_slowly(
    Engine self, Rows *rows, Column *column, int32_t c, const uint8_t *at, uint32_t length,
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
    Engine self, uint8_t tag, uint32_t xid, uint32_t subxid, uint64_t commit_lsn, uint64_t end_lsn,
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


# --- batches -------------------------------------------------------------------------------------

ctypedef const void *Address
ctypedef const char *Name

# An Arrow array.
cdef struct Node:
    int64_t length
    int64_t null_count
    int32_t n_buffers
    int32_t n_children
    Address[3] buffers
    Node *children
    Node *dictionary
    Arena *arena

cdef enum:
    HEADS = 8  # columns before `before`
    COLUMNS = 11


cdef int64_t count_null(const uint8_t *validity, int64_t length) noexcept nogil:
    cdef int64_t valid = 0, i
    cdef uint8_t bits
    for i in range(length >> 3):
        bits = validity[i]
        valid += POPULATION[bits]
    for i in range(length & ~7, length):
        valid += validity[i >> 3] >> (i & 7) & 1
    return length - valid


cdef uint8_t[256] POPULATION
for _i in range(256):
    POPULATION[_i] = _i.bit_count() if hasattr(_i, "bit_count") else bin(_i).count("1")


cdef struct Finish:
    Rows *rows
    Arena *arena
    int64_t length
    const uint8_t *zeros  # enough for any column without a value
    uint8_t any
    uint8_t all


# Bits of the rows that have one of `mask` in their flags: NULL if all do, zeros if none does.
# False: no memory.
cdef bint bits_of(Finish *f, uint8_t mask, const uint8_t **found) noexcept nogil:
    cdef uint8_t *bits
    cdef int64_t i
    found[0] = NULL
    if not f.any & mask:
        found[0] = f.zeros
    elif not f.all & mask:
        bits = <uint8_t *> own(f.arena, calloc(f.length // 8 + 1, 1), f.length // 8 + 1)
        if bits == NULL:
            return False
        for i in range(f.length):
            bits[i >> 3] |= (f.rows.flags[i] & mask != 0) << (i & 7)
        found[0] = bits
    return True


cdef void plain(
    Finish *f, Node *node, const uint8_t *validity, const void *data, int64_t null_count
) noexcept nogil:
    node.arena = f.arena
    node.length = f.length
    node.n_buffers = 2
    node.buffers[0] = validity
    node.buffers[1] = data
    node.null_count = null_count


cdef int64_t nulls_of(Finish *f, const uint8_t *validity) noexcept nogil:
    if validity == NULL:
        return 0
    if validity == f.zeros:
        return f.length
    return count_null(validity, f.length)


# A column of eight bytes or four per row that is null but where `mask` says.
cdef bint head(Finish *f, Node *node, uint8_t mask, void *data, int64_t size) noexcept nogil:
    cdef const uint8_t *validity = NULL
    if mask:
        if not f.any & mask:
            free(data)
            plain(f, node, f.zeros, f.zeros, f.length)
            return True
        if not bits_of(f, mask, &validity):
            free(data)
            return False
    own(f.arena, data, f.length * size)
    plain(f, node, validity, data, nulls_of(f, validity))
    return True


# Zeros where a row is in no stream.
cdef void fill_subxids(Finish *f, int64_t size) noexcept nogil:
    cdef int64_t i
    if f.any & IN_STREAM and not f.all & IN_STREAM:
        for i in range(f.length):
            if not f.rows.flags[i] & IN_STREAM:
                memset(f.rows.subxids + i * size, 0, size)


# op: what names the rows' kinds, all of six letters but truncate.
cdef bint op_column(Finish *f, Node *node) noexcept nogil:
    cdef int64_t i, at = 0
    cdef int32_t *ends = <int32_t *> own(
        f.arena, malloc((f.length + 1) * 4), (f.length + 1) * 4
    )
    cdef char *text = <char *> own(f.arena, malloc(f.length * 8 + 8), f.length * 8 + 8)
    cdef uint8_t op
    if ends == NULL or text == NULL:
        return False
    if not f.rows.truncated:
        for i in range(f.length):
            memcpy(text + 6 * i, OPS[f.rows.flags[i] & OP], 8)
        for i in range(f.length + 1):
            ends[i] = <int32_t> (6 * i)
    else:
        for i in range(f.length):
            op = f.rows.flags[i] & OP
            ends[i] = <int32_t> at
            memcpy(text + at, OPS[op], 8)
            at += 8 if op == TRUNCATE else 6
        ends[f.length] = <int32_t> at
    plain(f, node, NULL, ends, 0)
    node.n_buffers = 3
    node.buffers[2] = text
    return True


cdef Name[4] OPS
OPS[:] = [b"insert\0\0", b"update\0\0", b"delete\0\0", b"truncate"]


cdef bint old_kind_column(Finish *f, Node *node) noexcept nogil:
    cdef int64_t i
    cdef int32_t at = 0
    cdef int32_t *ends
    cdef char *text
    cdef const uint8_t *validity = NULL
    cdef uint8_t flags
    if not f.any & (OLD_KEY | OLD_ROW):
        plain(f, node, f.zeros, f.zeros, f.length)
        node.n_buffers = 3
        node.buffers[2] = f.zeros
        return True
    ends = <int32_t *> own(f.arena, malloc((f.length + 1) * 4), (f.length + 1) * 4)
    text = <char *> own(f.arena, malloc(f.length + 1), f.length + 1)
    if ends == NULL or text == NULL or not bits_of(f, OLD_KEY | OLD_ROW, &validity):
        return False
    for i in range(f.length):
        flags = f.rows.flags[i]
        ends[i] = at
        if flags & (OLD_KEY | OLD_ROW):
            text[at] = c'K' if flags & OLD_KEY else c'O'
            at += 1
    ends[f.length] = at
    plain(f, node, validity, ends, nulls_of(f, validity))
    node.n_buffers = 3
    node.buffers[2] = text
    return True


# The struct of a side, which the rows with one of `mask` have. The columns' memory goes over to the
# arena.
cdef bint side_column(Finish *f, Node *node, Side *side, uint8_t mask) noexcept nogil:
    cdef Rows *rows = f.rows
    cdef Column *column
    cdef Part *part
    cdef Node *child
    cdef int32_t c, n = 0
    cdef const uint8_t *present = NULL
    cdef bint used = side.filled > 0
    if not bits_of(f, mask, &present):
        return False
    if used and not pad(rows, side, f.length):
        return False
    for c in range(rows.width):
        n += side.columns[c].codes[1] != SKIP
    plain(f, node, present, NULL, nulls_of(f, present))
    node.n_buffers = 1
    node.n_children = n
    node.children = <Node *> own(f.arena, calloc(n + 1, sizeof(Node)), (n + 1) * sizeof(Node))
    if node.children == NULL:
        return False
    n = 0
    for c in range(rows.width):
        column = &side.columns[c]
        if column.codes[1] == SKIP:
            continue
        child = &node.children[n]
        n += 1
        part = &rows.parts[c]
        if part.shape >= PGF_LIST:
            if used and not nested_column(f, child, part, column):
                return False
            if not used and not no_values(f, child, part, f.length):
                return False
            continue
        if part.labels != NULL and not dictionary(f, child, part.labels):
            return False
        if not used:
            plain(f, child, f.zeros, f.zeros, f.length)
            if column.width < 0:
                child.n_buffers = 3
                child.buffers[2] = f.zeros
            continue
        if column.width < 0:
            shrink(column, column.offsets[f.length])
        own(f.arena, column.validity, f.length // 8 + 1)
        own(f.arena, column.data, 0)
        own(f.arena, column.offsets, 0)
        plain(
            f, child, column.validity, column.offsets if column.width < 0 else <void *> column.data,
            nulls_of(f, column.validity),
        )
        if column.width < 0:
            child.n_buffers = 3
            child.buffers[2] = column.data
            f.arena.size += column.room + 4 * f.length
        else:
            f.arena.size += f.length * column.width
    return True


# A nested column, of values that were kept packed.
cdef bint nested_column(Finish *f, Node *node, Part *part, Column *column) noexcept nogil:
    cdef int64_t i
    cdef int32_t size
    cdef bint sound = True
    for i in range(f.length):
        size = column.offsets[i + 1] - column.offsets[i]
        if column.validity != NULL and not column.validity[i >> 3] >> (i & 7) & 1:
            size = -1
        if not put_part(part, column.data + column.offsets[i], size):
            sound = False
            break
    free(column.validity)
    free(column.data)
    free(column.offsets)
    column.validity = column.data = NULL
    column.offsets = NULL
    sound = sound and part_column(f, node, part)
    if not sound:
        free_part(part)
    return sound


# A part as a column. Its memory goes over to the arena.
cdef bint part_column(Finish *f, Node *node, Part *part) noexcept nogil:
    cdef int32_t i
    cdef bint sound = True
    node.arena = f.arena
    node.length = part.count
    node.null_count = part.nulls
    node.n_buffers = 1
    node.buffers[0] = own(f.arena, part.validity, (part.count + 7) // 8)
    if part.shape == PGF_FIXED:
        node.n_buffers = 2
        node.buffers[1] = own(f.arena, part.data, (part.count * part.width * 8 + 7) // 8)
    elif part.shape == PGF_VARIABLE or part.shape == PGF_LIST:
        node.n_buffers = 2 if part.shape == PGF_LIST else 3
        node.buffers[1] = own(f.arena, part.offsets, 4 * (part.count + 1))
        node.buffers[2] = own(f.arena, part.data, part.data_room)
    # Of no value there may be no memory.
    for i in range(1, node.n_buffers):
        if node.buffers[i] == NULL:
            node.buffers[i] = f.zeros
    forget_part(part)
    if part.labels != NULL and not dictionary(f, node, part.labels):
        return False
    if not part_children(f, node, part):
        return False
    for i in range(part.n_children):
        sound = sound and part_column(f, &node.children[i], &part.children[i])
    return sound


# A part of which there is no value, as a column of nulls.
cdef bint no_values(Finish *f, Node *node, Part *part, int64_t length) noexcept nogil:
    cdef int32_t i
    cdef int64_t below = length
    node.arena = f.arena
    node.length = node.null_count = length
    node.buffers[0] = node.buffers[1] = node.buffers[2] = f.zeros
    node.n_buffers = 3 if part.shape == PGF_VARIABLE else 2
    if part.shape == PGF_STRUCT or part.shape == PGF_FIXED_LIST:
        node.n_buffers = 1
    if part.shape == PGF_LIST:
        below = 0
    elif part.shape == PGF_FIXED_LIST:
        below = length * part.width
    if length == 0:
        node.buffers[0] = NULL
    if part.labels != NULL and not dictionary(f, node, part.labels):
        return False
    if not part_children(f, node, part):
        return False
    for i in range(part.n_children):
        if not no_values(f, &node.children[i], &part.children[i], below):
            return False
    return True


cdef bint part_children(Finish *f, Node *node, Part *part) noexcept nogil:
    cdef int64_t size = part.n_children * sizeof(Node)
    if part.n_children == 0:
        return True
    node.n_children = part.n_children
    node.children = <Node *> own(f.arena, calloc(part.n_children, sizeof(Node)), size)
    return node.children != NULL


# Bytes that a row takes at most in any buffer of a part that has no value.
cdef int64_t widest_of(const Part *part) noexcept nogil:
    cdef int32_t i
    cdef int64_t widest = max(4, part.width)
    cdef int64_t times = part.width if part.shape == PGF_FIXED_LIST else 1
    for i in range(part.n_children):
        widest = max(widest, times * widest_of(&part.children[i]))
    return widest


# The labels that the numbers of a column mean.
cdef bint dictionary(Finish *f, Node *node, const LabelTable *labels) noexcept nogil:
    cdef int64_t size = labels.ends[labels.count]
    cdef Node *made = <Node *> own(f.arena, calloc(1, sizeof(Node)), sizeof(Node))
    cdef int32_t *ends = <int32_t *> own(
        f.arena, malloc((labels.count + 1) * 4), (labels.count + 1) * 4
    )
    cdef uint8_t *text = <uint8_t *> own(f.arena, malloc(size + 1), size + 1)
    if made == NULL or ends == NULL or text == NULL:
        return False
    memcpy(ends, labels.ends, (labels.count + 1) * 4)
    memcpy(text, labels.text, size)
    plain(f, made, NULL, ends, 0)
    made.length = labels.count
    made.n_buffers = 3
    made.buffers[2] = text
    node.dictionary = made
    return True


cdef bint unchanged_column(Finish *f, Node *node) noexcept nogil:
    cdef Rows *rows = f.rows
    cdef Node *child = <Node *> own(f.arena, calloc(1, sizeof(Node)), sizeof(Node))
    cdef uint8_t *bits
    cdef int32_t *ends
    cdef char *text
    cdef int64_t i, size = 0
    cdef int32_t at = 0, name_length
    if child == NULL:
        return False
    node.n_children = 1
    node.children = child
    if rows.unchanged_count == 0:
        plain(f, node, f.zeros, f.zeros, f.length)
        plain(f, child, NULL, f.zeros, 0)
        child.length = 0
        child.n_buffers = 3
        child.buffers[2] = f.zeros
        return True
    bits = <uint8_t *> own(f.arena, calloc(f.length // 8 + 1, 1), f.length // 8 + 1)
    if bits == NULL:
        return False
    for i in range(rows.unchanged_filled, f.length):
        rows.unchanged_ends[i + 1] = rows.unchanged_ends[i]
    rows.unchanged_filled = f.length
    for i in range(f.length):
        bits[i >> 3] |= (rows.unchanged_ends[i + 1] > rows.unchanged_ends[i]) << (i & 7)
    own(f.arena, rows.unchanged_ends, (f.length + 1) * 4)
    plain(f, node, bits, rows.unchanged_ends, nulls_of(f, bits))
    rows.unchanged_ends = NULL
    for i in range(rows.unchanged_count):
        size += strlen(rows.names[rows.unchanged[i]])
    ends = <int32_t *> own(
        f.arena, malloc((rows.unchanged_count + 1) * 4), (rows.unchanged_count + 1) * 4
    )
    text = <char *> own(f.arena, malloc(size + 1), size + 1)
    if ends == NULL or text == NULL:
        return False
    for i in range(rows.unchanged_count):
        ends[i] = at
        name_length = <int32_t> strlen(rows.names[rows.unchanged[i]])
        memcpy(text + at, rows.names[rows.unchanged[i]], name_length)
        at += name_length
    ends[rows.unchanged_count] = at
    plain(f, child, NULL, ends, 0)
    child.length = rows.unchanged_count
    child.n_buffers = 3
    child.buffers[2] = text
    return True


cdef void gather_flags(
    const uint8_t *flags, int64_t count, uint8_t *any, uint8_t *all
) noexcept nogil:
    cdef uint8_t one = 0, each = 0xFF  # not by their pointers: compilers then take many at a time
    cdef int64_t i
    for i in range(count):
        one |= flags[i]
        each &= flags[i]
    any[0] = one
    all[0] = each


# Hand the rows over to a batch. False: no memory, and the rows are lost with it.
cdef bint finish(Rows *rows, ChangeBatch batch, bint has_lsns) noexcept nogil:
    cdef Finish f
    cdef Node *nodes
    cdef int64_t widest = 8, size
    cdef int32_t c
    cdef bint sound
    f.rows = rows
    f.length = rows.count
    f.arena = make_arena(rows.blocks)
    if f.arena == NULL:
        return False
    batch.arena = f.arena
    for c in range(rows.width):
        size = widest_of(&rows.parts[c]) if rows.parts[c].shape >= PGF_LIST else 0
        widest = max(widest, size, <int64_t> rows.after.columns[c].width)
    size = (f.length + 1) * widest
    # Pages of zeros that nobody writes to take no memory.
    f.zeros = <const uint8_t *> own(f.arena, calloc(size, 1), 0)
    nodes = <Node *> own(f.arena, calloc(COLUMNS, sizeof(Node)), COLUMNS * sizeof(Node))
    if f.zeros == NULL or nodes == NULL:
        return False
    gather_flags(rows.flags, f.length, &f.any, &f.all)
    size = 8 if batch.wide else 4
    fill_subxids(&f, size)
    sound = (
        op_column(&f, nodes)
        and head(&f, nodes + 1, HAS_XID, rows.xids, size)
        and head(&f, nodes + 2, IN_STREAM, rows.subxids, size)
    )
    rows.xids = rows.subxids = NULL
    if has_lsns:
        sound = sound and head(&f, nodes + 3, 0, rows.lsns, 8)
    else:
        free(rows.lsns)
        plain(&f, nodes + 3, f.zeros, f.zeros, f.length)
    rows.lsns = NULL
    sound = (
        sound
        and head(&f, nodes + 4, HAS_COMMIT, rows.commit_lsns, 8)
        and head(&f, nodes + 5, HAS_COMMIT, rows.commit_times, 8)
        and head(&f, nodes + 6, 0, rows.seqs, 8)
        and old_kind_column(&f, nodes + 7)
        and side_column(&f, nodes + 8, &rows.before, OLD_KEY | OLD_ROW)
        and side_column(&f, nodes + 9, &rows.after, HAS_AFTER)
        and unchanged_column(&f, nodes + 10)
    )
    free(rows.flags)
    free(rows.unchanged_ends)
    free(rows.unchanged)
    if rows.before.filled == 0:
        free_side(rows, &rows.before)
    if rows.after.filled == 0:
        free_side(rows, &rows.after)
    forget_rows(rows)
    if not sound:
        return False
    batch.root.length = f.length
    batch.root.null_count = 0
    batch.root.n_buffers = 1
    batch.root.n_children = COLUMNS
    batch.root.children = nodes
    batch.root.arena = f.arena
    expect_memory(f.arena.size)
    return True


# --- export --------------------------------------------------------------------------------------

cdef struct Exported:
    Arena *arena
    ArrowArray *children
    ArrowArray **pointers
    ArrowArray dictionary
    Address[3] buffers


cdef void release_array(ArrowArray *array) noexcept nogil:
    cdef Exported *exported = <Exported *> array.private_data
    cdef int64_t i
    for i in range(array.n_children):
        if array.children[i].release != NULL:
            array.children[i].release(array.children[i])
    if array.dictionary != NULL and array.dictionary.release != NULL:
        array.dictionary.release(array.dictionary)
    drop(exported.arena)
    free(exported.children)
    free(exported.pointers)
    free(exported)
    array.release = NULL


cdef bint export_array(const Node *node, ArrowArray *array) noexcept nogil:
    cdef Exported *exported = <Exported *> calloc(1, sizeof(Exported))
    cdef int32_t i
    memset(array, 0, sizeof(ArrowArray))
    if exported == NULL:
        return False
    exported.children = <ArrowArray *> calloc(node.n_children + 1, sizeof(ArrowArray))
    exported.pointers = <ArrowArray **> calloc(node.n_children + 1, sizeof(ArrowArray *))
    if exported.children == NULL or exported.pointers == NULL:
        free(exported.children)
        free(exported.pointers)
        free(exported)
        return False
    exported.arena = node.arena
    keep(node.arena)
    for i in range(3):
        exported.buffers[i] = node.buffers[i]
    array.length = node.length
    array.null_count = node.null_count
    array.n_buffers = node.n_buffers
    array.buffers = exported.buffers
    array.private_data = exported
    array.release = release_array
    array.children = exported.pointers
    for i in range(node.n_children):
        exported.pointers[i] = &exported.children[i]
        array.n_children = i + 1
        if not export_array(&node.children[i], exported.pointers[i]):
            array.release(array)
            return False
    if node.dictionary != NULL:
        array.dictionary = &exported.dictionary
        if not export_array(node.dictionary, array.dictionary):
            array.release(array)
            return False
    return True


cdef void release_schema(ArrowSchema *schema) noexcept nogil:
    cdef int64_t i
    for i in range(schema.n_children):
        if schema.children[i].release != NULL:
            schema.children[i].release(schema.children[i])
        free(schema.children[i])
    free(schema.children)
    if schema.dictionary != NULL:
        if schema.dictionary.release != NULL:
            schema.dictionary.release(schema.dictionary)
        free(schema.dictionary)
    free(<void *> schema.format)
    free(<void *> schema.name)
    free(<void *> schema.metadata)
    schema.release = NULL


cdef char *copied(const char *text, Py_ssize_t size) except NULL:
    cdef char *copy = <char *> malloc(size + 1)
    if copy == NULL:
        raise MemoryError
    memcpy(copy, text, size)
    copy[size] = 0
    return copy


cdef char *copied_bytes(bytes text) except NULL:
    return copied(PyBytes_AS_STRING(text), PyBytes_GET_SIZE(text))


cdef int export_schema(object field, ArrowSchema *schema) except -1:
    memset(schema, 0, sizeof(ArrowSchema))
    schema.release = release_schema
    cdef Py_ssize_t count = len(field.children)
    try:
        schema.format = copied_bytes(field.format.encode())
        schema.name = copied_bytes(field.name.encode())
        if field.metadata:
            schema.metadata = copied_bytes(metadata_bytes(field.metadata))
        schema.flags = ARROW_FLAG_NULLABLE if field.nullable else 0
        schema.children = <ArrowSchema **> calloc(count + 1, sizeof(ArrowSchema *))
        if schema.children == NULL:
            raise MemoryError
        for child in field.children:
            schema.children[schema.n_children] = <ArrowSchema *> calloc(1, sizeof(ArrowSchema))
            if schema.children[schema.n_children] == NULL:
                raise MemoryError
            schema.n_children += 1
            export_schema(child, schema.children[schema.n_children - 1])
        if field.labels is not None:
            schema.dictionary = <ArrowSchema *> calloc(1, sizeof(ArrowSchema))
            if schema.dictionary == NULL:
                raise MemoryError
            export_schema(LABEL_FIELD, schema.dictionary)
    except BaseException:
        schema.release(schema)
        raise
    return 0


cdef void free_schema_capsule(object capsule) noexcept:
    cdef ArrowSchema *schema = <ArrowSchema *> PyCapsule_GetPointer(capsule, "arrow_schema")
    if schema.release != NULL:
        schema.release(schema)
    free(schema)


cdef void free_array_capsule(object capsule) noexcept:
    cdef ArrowArray *array = <ArrowArray *> PyCapsule_GetPointer(capsule, "arrow_array")
    if array.release != NULL:
        array.release(array)
    free(array)


@cython.final
cdef class _Schema:
    """A schema that is copied for whoever asks: far quicker than to make it anew."""

    cdef ArrowSchema schema

    def __dealloc__(self):
        if self.schema.release != NULL:
            self.schema.release(&self.schema)


cdef _Schema schema_of(object field):
    cdef _Schema made = _Schema.__new__(_Schema)
    export_schema(field, &made.schema)
    return made


cdef int copy_schema(const ArrowSchema *schema, ArrowSchema *to) except -1:
    cdef int64_t i
    memset(to, 0, sizeof(ArrowSchema))
    to.release = release_schema
    try:
        to.format = copied(schema.format, strlen(schema.format))
        to.name = copied(schema.name, strlen(schema.name))
        if schema.metadata != NULL:
            to.metadata = copied(schema.metadata, metadata_size(schema.metadata))
        to.flags = schema.flags
        to.children = <ArrowSchema **> calloc(schema.n_children + 1, sizeof(ArrowSchema *))
        if to.children == NULL:
            raise MemoryError
        for i in range(schema.n_children):
            to.children[i] = <ArrowSchema *> calloc(1, sizeof(ArrowSchema))
            if to.children[i] == NULL:
                raise MemoryError
            to.n_children = i + 1
            copy_schema(schema.children[i], to.children[i])
        if schema.dictionary != NULL:
            to.dictionary = <ArrowSchema *> calloc(1, sizeof(ArrowSchema))
            if to.dictionary == NULL:
                raise MemoryError
            copy_schema(schema.dictionary, to.dictionary)
    except BaseException:
        to.release(to)
        raise
    return 0


cdef int64_t metadata_size(const char *metadata) noexcept nogil:
    cdef int32_t pairs, length
    cdef int64_t at = 4
    cdef int32_t _i
    memcpy(&pairs, metadata, 4)
    for _i in range(2 * pairs):
        memcpy(&length, metadata + at, 4)
        at += 4 + length
    return at


cdef object schema_capsule(_Schema known):
    cdef ArrowSchema *schema = <ArrowSchema *> calloc(1, sizeof(ArrowSchema))
    if schema == NULL:
        raise MemoryError
    try:
        copy_schema(&known.schema, schema)
        return PyCapsule_New(schema, "arrow_schema", free_schema_capsule)
    except BaseException:
        free(schema)
        raise


@cython.final
cdef class ChangeBatch:
    """Changed rows of one version of a relation, as an Arrow record batch.

    A library that supports the Arrow PyCapsule interface reads it without a copy:
    ``pyarrow.record_batch(changes)``, ``polars.DataFrame(changes)``. It stays valid when its
    decoder is gone.
    """

    cdef Arena *arena
    cdef Arena *commit_arena  # of with_commit()
    cdef Node root
    cdef _Schema schema
    cdef readonly object layout
    cdef readonly tuple binary
    cdef bint wide
    cdef readonly int64_t num_rows

    def __init__(self):
        raise TypeError("a ChangeBatch is made by decoding frames")

    def __dealloc__(self):
        drop(self.arena)
        drop(self.commit_arena)

    def __len__(self):
        return self.num_rows

    def __reduce__(self):
        raise TypeError(
            "a ChangeBatch is not pickled; what pyarrow.record_batch() makes of it can be"
        )

    def __repr__(self):
        relation = self.relation
        return f"<ChangeBatch: {self.num_rows} rows of {relation.namespace}.{relation.name}>"

    @property
    def relation(self):
        """The Relation message that describes the rows."""
        return self.layout.plan.relation

    @property
    def nbytes(self):
        """Bytes of memory that the batch holds."""
        return self.arena.size

    def __arrow_c_schema__(self):
        """The schema, as a capsule of the Arrow C data interface."""
        return schema_capsule(self.schema)

    def __arrow_c_array__(self, requested_schema=None):
        """Schema and batch as capsules. `requested_schema` is ignored, as the interface allows."""
        cdef ArrowArray *array
        schema = self.__arrow_c_schema__()
        array = <ArrowArray *> calloc(1, sizeof(ArrowArray))
        if array == NULL or not export_array(&self.root, array):
            free(array)
            raise MemoryError
        return schema, PyCapsule_New(array, "arrow_array", free_array_capsule)

    def __arrow_c_stream__(self, requested_schema=None):
        """A stream with this batch alone; :class:`ChangeStream` makes a stream of several."""
        return export_stream([self])

    def with_commit(self, commit_lsn: int, commit_time: int) -> ChangeBatch:
        """The same rows with commit LSN and commit time filled in where they are null.

        Rows of a streamed transaction have nulls there, as their commit is known only at the end
        of the transaction. The new batch shares all other buffers with this one.

        Parameters
        ----------
        commit_lsn : int
        commit_time : int
            In microseconds since 2000-01-01.

        Raises
        ------
        TypeError
            An argument is no int.
        OverflowError
            A value does not fit into its column.
        """
        cdef ChangeBatch made = ChangeBatch.__new__(ChangeBatch)
        cdef int64_t i
        cdef Node *nodes
        cdef uint64_t *lsns
        cdef int64_t *times
        cdef const uint8_t *validity
        cdef uint64_t lsn
        cdef int64_t time
        lsn, time = commit_of(commit_lsn, commit_time, "spark" if self.wide else "arrow")
        made.layout = self.layout
        made.schema = self.schema
        made.binary = self.binary
        made.wide = self.wide
        made.num_rows = self.num_rows
        made.root = self.root
        keep(self.arena)
        made.arena = self.arena
        made.commit_arena = make_arena(3)
        if made.commit_arena == NULL:
            raise MemoryError
        nodes = <Node *> own(
            made.commit_arena, malloc(COLUMNS * sizeof(Node)), COLUMNS * sizeof(Node)
        )
        lsns = <uint64_t *> own(made.commit_arena, malloc(self.num_rows * 8), self.num_rows * 8)
        times = <int64_t *> own(made.commit_arena, malloc(self.num_rows * 8), self.num_rows * 8)
        if nodes == NULL or lsns == NULL or times == NULL:
            raise MemoryError
        memcpy(nodes, self.root.children, COLUMNS * sizeof(Node))
        validity = <const uint8_t *> nodes[4].buffers[0]
        for i in range(self.num_rows):
            if validity == NULL or validity[i >> 3] >> (i & 7) & 1:
                lsns[i] = (<const uint64_t *> nodes[4].buffers[1])[i]
                times[i] = (<const int64_t *> nodes[5].buffers[1])[i]
            else:
                lsns[i] = lsn
                times[i] = time
        for i in range(4, 6):
            nodes[i].arena = made.commit_arena
            nodes[i].buffers[0] = NULL
            nodes[i].null_count = 0
        nodes[4].buffers[1] = lsns
        nodes[5].buffers[1] = times
        made.root.children = nodes
        return made


def export(field: Field, column: Column) -> tuple[object, object]:
    """Export a column whose buffers are bytes as the capsules of its Arrow schema and array.

    Parameters
    ----------
    field : Field
    column : pgoutput_fast.columnar.arrays.Column
    """
    cdef Arena *arena = make_arena(count_blocks(column))
    cdef ArrowArray *array
    cdef Node root
    if arena == NULL:
        raise MemoryError
    try:
        copy_column(column, &root, arena)
        schema = schema_capsule(schema_of(field))
        array = <ArrowArray *> calloc(1, sizeof(ArrowArray))
        if array == NULL or not export_array(&root, array):
            free(array)
            raise MemoryError
        return schema, PyCapsule_New(array, "arrow_array", free_array_capsule)
    finally:
        drop(arena)


cdef Py_ssize_t count_blocks(object column):
    return 4 + sum([count_blocks(child) for child in column.children])


cdef int copy_column(object column, Node *node, Arena *arena) except -1:
    cdef bytes buffer
    cdef void *copy
    cdef Py_ssize_t i
    memset(node, 0, sizeof(Node))
    node.length = column.length
    node.null_count = column.null_count
    node.arena = arena
    node.n_buffers = len(column.buffers)
    for i in range(node.n_buffers):
        buffer = column.buffers[i]
        if buffer is not None:
            copy = own(arena, malloc(PyBytes_GET_SIZE(buffer) + 1), PyBytes_GET_SIZE(buffer))
            if copy == NULL:
                raise MemoryError
            memcpy(copy, PyBytes_AS_STRING(buffer), PyBytes_GET_SIZE(buffer))
            node.buffers[i] = copy
    node.n_children = len(column.children)
    node.children = <Node *> own(arena, calloc(node.n_children + 1, sizeof(Node)), 0)
    if node.children == NULL:
        raise MemoryError
    for i in range(node.n_children):
        copy_column(column.children[i], &node.children[i], arena)
    return 0


# --- streams -------------------------------------------------------------------------------------

cdef struct Streamed:
    void *batches  # a list, owned
    int64_t next


cdef void release_stream(ArrowArrayStream *stream) noexcept with gil:
    cdef Streamed *streamed = <Streamed *> stream.private_data
    Py_DECREF(<object> streamed.batches)
    free(streamed)
    stream.release = NULL


cdef int stream_schema(ArrowArrayStream *stream, ArrowSchema *schema) noexcept with gil:
    cdef Streamed *streamed = <Streamed *> stream.private_data
    cdef ChangeBatch batch
    try:
        batch = (<list> streamed.batches)[0]
        copy_schema(&batch.schema.schema, schema)
    except MemoryError:
        return ENOMEM
    except Exception:
        return EINVAL
    return 0


cdef int stream_next(ArrowArrayStream *stream, ArrowArray *array) noexcept with gil:
    cdef Streamed *streamed = <Streamed *> stream.private_data
    cdef list batches = <list> streamed.batches
    cdef ChangeBatch batch
    if streamed.next == len(batches):
        memset(array, 0, sizeof(ArrowArray))
        return 0
    batch = batches[streamed.next]
    streamed.next += 1
    return 0 if export_array(&batch.root, array) else ENOMEM


cdef const char *stream_error(ArrowArrayStream *stream) noexcept nogil:
    return NULL


cdef void free_stream_capsule(object capsule) noexcept:
    cdef ArrowArrayStream *stream = <ArrowArrayStream *> PyCapsule_GetPointer(
        capsule, "arrow_array_stream"
    )
    if stream.release != NULL:
        stream.release(stream)
    free(stream)


def export_stream(batches: list[ChangeBatch]) -> object:
    """Export one or more batches, all with the same schema, as the capsule of an Arrow stream."""
    cdef ArrowArrayStream *stream = <ArrowArrayStream *> calloc(1, sizeof(ArrowArrayStream))
    cdef Streamed *streamed = <Streamed *> calloc(1, sizeof(Streamed))
    cdef list kept = list(batches)
    if stream == NULL or streamed == NULL:
        free(stream)
        free(streamed)
        raise MemoryError
    Py_INCREF(kept)
    streamed.batches = <void *> kept
    stream.get_schema = stream_schema
    stream.get_next = stream_next
    stream.get_last_error = stream_error
    stream.release = release_stream
    stream.private_data = streamed
    return PyCapsule_New(stream, "arrow_array_stream", free_stream_capsule)
