/* The loop over rows: store the values of tuples in the columns of relations.
 *
 * This is C, because its speed depends on what the compiler keeps in registers. The loop itself
 * stores values that take a few instructions. Other values take a call. The loop stops at anything
 * unusual, and the caller handles it.
 */
#ifndef PGOUTPUT_FAST_ROWS_H
#define PGOUTPUT_FAST_ROWS_H

#include "_converters.h"
#include "_input.h"
#include "_wire.h"

/* One more result, beside those of converters: the value is null, unchanged, or of another kind. */
enum { PGF_NO_VALUE = -1 };

/* Load the first eight bytes of a row, to compare them with pgf_header of a relation. */
static inline uint64_t pgf_load_header(const uint8_t *at)
{
    return UINT64_C(0xFF) << 56 | pgf_load8(at);
}

/* pgf_take_sized and pgf_take_any store the value at *at in `row` of its column with the converter
 * `code`, move *at behind the value, and return PGF_DONE. Any other result means that the column
 * has not changed. Inlined with a constant `code`, they compile to this converter alone.
 */

/* Store a binary value of `size` bytes. One comparison checks its kind and its length. */
static PGF_INLINE int pgf_take_sized(
    pgf_column *column, uint8_t code, uint32_t size, int64_t row, const uint8_t **at,
    const uint8_t *end)
{
    const uint8_t *value = *at + PGF_VALUE_HEAD;
    if (end - *at < PGF_VALUE_HEAD + (ptrdiff_t)size
        || pgf_load8(*at) >> 24 != ((uint64_t)'b' << 32 | size))
        return PGF_NO_VALUE;
    int status = pgf_convert(column, code, row, value, size, value, value);
    if (status == PGF_DONE)
        *at = value + size;
    return status;
}

/* Store a value of any length. Put the length, in bytes, into *length. */
static PGF_INLINE int pgf_take_any(
    pgf_column *column, uint8_t code, uint8_t kind, int64_t row, const uint8_t **at,
    const uint8_t *end, const uint8_t *floor, const uint8_t *ceiling, uint32_t *length)
{
    const uint8_t *value = *at + PGF_VALUE_HEAD;
    if (end - *at < PGF_VALUE_HEAD || **at != kind)
        return PGF_NO_VALUE;
    *length = pgf_load4(*at + 1);
    /* Unsigned: a negative length is longer than any frame. */
    if (*length > (size_t)(end - value))
        return PGF_UNUSUAL;
    int status = pgf_convert(column, code, row, value, *length, floor, ceiling);
    if (status == PGF_DONE)
        *at = value + *length;
    return status;
}

/* Store null. Return 0 if the column has no validity bitmap yet: the caller makes it. */
static PGF_INLINE int pgf_take_null(pgf_column *column, int64_t row)
{
    if (!column->validity)
        return !column->data;
    pgf_set_null(column, row);
    return 1;
}

/* Store the values from `at` on in `row` of the columns from *next on. Stop behind the last
 * column, or at a value that is unusual or malformed. Return where the next value is, and set
 * *next to its column.
 *
 * This reads the bytes from `at` to `end`. Loads of 16 bytes may read from `floor` to `ceiling`.
 * *bytes grows by the sizes of variable values.
 */
static PGF_INLINE const uint8_t *pgf_take_values(
    pgf_column **next, int64_t row, const uint8_t *at, const uint8_t *end, const uint8_t *floor,
    const uint8_t *ceiling, int64_t *bytes)
{
    pgf_column *column = *next;
    int64_t taken = 0;
    for (;; column++) {
        uint32_t length;
        int status;
        switch (column->code) {
/* The loop contains the code of each frequent converter. The case continues with the next column,
 * or leaves the switch if no value was stored.
 */
#define PGF_CASE_THAT_CONTINUES_OR_BREAKS(name, kind_taken, size, unstored) \
    case name: \
        if (size != PGF_ANY) \
            status = pgf_take_sized(column, name, size, row, &at, end); \
        else \
            status = pgf_take_any( \
                column, name, kind_taken ? kind_taken : column->kind, row, &at, end, floor, \
                ceiling, &length); \
        if (status == PGF_DONE) { \
            if (unstored != PGF_FIXED_WIDTH) \
                taken += length - unstored; \
            continue; \
        } \
        break;
            PGF_COMMON_CONVERTERS(PGF_CASE_THAT_CONTINUES_OR_BREAKS)
#undef PGF_CASE_THAT_CONTINUES_OR_BREAKS
        case END:
            status = PGF_UNUSUAL;
            break;
        default:
            PGF_UNREACHABLE();
            /* fall through */
        /* With all codes as cases, the compiler leaves out the check of the code's range. */
#define PGF_CASE(name) case name:
            PGF_RARE_CONVERTERS(PGF_CASE)
#undef PGF_CASE
        case CONVERTER_COUNT:
        case FORM:
            status = pgf_take_any(
                column, column->code, column->kind, row, &at, end, floor, ceiling, &length);
            if (status == PGF_DONE) {
                if (column->width < 0)
                    taken += column->offsets[row + 1] - column->offsets[row];
                continue;
            }
        }
        if (status != PGF_NO_VALUE || at == end || at[0] != 'n' || !pgf_take_null(column, row))
            break;
        at++;
    }
    *next = column;
    *bytes += taken;
    return at;
}

/* pgf_take_values, not inlined, for tuples outside the loop over rows. */
static PGF_OUTLINE const uint8_t *pgf_take_more(
    pgf_column **next, int64_t row, const uint8_t *at, const uint8_t *end, const uint8_t *floor,
    const uint8_t *ceiling, int64_t *bytes)
{
    return pgf_take_values(next, row, at, end, floor, ceiling, bytes);
}

/* Read a Begin. Return 0 if it is malformed, can't come now, or if columns cannot store its LSN or
 * time.
 */
static inline int pgf_begin(pgf_stream *stream, const uint8_t *at, int64_t length)
{
    if (length != PGF_BEGIN_end || stream->in_stream
        || (stream->wide && at[PGF_BEGIN_final_lsn] >= 0x80)
        || (int64_t)pgf_load8(at + PGF_BEGIN_commit_time) > INT64_MAX - PGF_SHIFT)
        return 0;
    stream->commit_lsn = pgf_load8(at + PGF_BEGIN_final_lsn);
    stream->commit_time = (int64_t)pgf_load8(at + PGF_BEGIN_commit_time);
    stream->xid = pgf_load4(at + PGF_BEGIN_xid);
    stream->in_transaction = 1;
    stream->has_commit = 1;
    stream->seq = 0;
    pgf_settle(stream);
    return 1;
}

/* Store the columns beside the tuples of a row, and count the row. `at` is its frame. */
static inline void pgf_put_beside(
    const pgf_stream *stream, pgf_rows *rows, uint8_t flags, const uint8_t *at,
    const uint64_t *lsn)
{
    int64_t row = rows->count;
    if (stream->wide)
        ((int64_t *)rows->xids)[row] = stream->row_xid;
    else
        ((uint32_t *)rows->xids)[row] = stream->row_xid;
    if (stream->in_stream) {
        /* A Truncate has its xid at the same offset. */
        if (stream->wide)
            ((int64_t *)rows->subxids)[row] = pgf_load4(at + PGF_XID);
        else
            ((uint32_t *)rows->subxids)[row] = pgf_load4(at + PGF_XID);
    }
    if (lsn)
        rows->lsns[row] = *lsn;
    rows->commit_lsns[row] = stream->row_commit_lsn;
    rows->commit_times[row] = stream->row_commit_time;
    rows->seqs[row] = stream->seq;
    rows->flags[row] = flags | stream->row_flags;
    rows->count = row + 1;
}

/* Where the loop over rows stopped inside a row. */
typedef struct {
    pgf_rows *rows; /* NULL: between rows */
    pgf_column *column; /* the next column */
    const uint8_t *at; /* the value of this column */
    int64_t bytes; /* of the variable values in the columns before */
} pgf_stop;

/* Read frames from `i` on, and return the index of the first frame that is not read, or `end`.
 *
 * The loop reads a Begin, and a row of a cached relation with a new tuple and no old one. It stops
 * at another frame, at an unusual value, and if there is no more room. If it stopped inside a row,
 * *stop says where to continue.
 */
static PGF_OUTLINE int64_t pgf_take_rows(
    pgf_stream *stream, const pgf_source *source, int64_t i, int64_t end, const uint64_t *lsns,
    pgf_stop *stop)
{
    const int64_t xid_size = stream->in_stream ? PGF_XID_SIZE : 0;
    const int64_t shortest = PGF_ROW_columns + xid_size;
    stop->rows = NULL;
    for (; i < end; i++) {
        pgf_frame frame;
        pgf_take_frame(source, i, &frame);
        /* One comparison finds frames that are too short and too long. */
        if ((uint64_t)(frame.length - shortest) > PGF_MAX_FRAME - (uint64_t)shortest)
            break;
        uint8_t tag = frame.at[0];
        if (tag == 'I' || tag == 'U') {
            const pgf_cached *cached = &stream->cached[frame.at[PGF_CACHED_BY + xid_size]];
            pgf_rows *rows = cached->rows;
            if (pgf_load_header(frame.at + xid_size) != cached->header
                || rows->count >= rows->limit || (stream->wide && lsns && lsns[i] >> 63))
                break;
            pgf_column *column = rows->after.columns;
            const uint8_t *frame_end = frame.at + frame.length;
            int64_t bytes = 0;
            const uint8_t *at = pgf_take_values(
                &column, rows->count, frame.at + shortest, frame_end, frame.floor, frame.ceiling,
                &bytes);
            int64_t held = stream->held + bytes + rows->fixed;
            if (column->code != END || at != frame_end
                || (held > stream->max_bytes && stream->held > 0)) {
                stop->rows = rows;
                stop->column = column;
                stop->at = at;
                stop->bytes = bytes;
                break;
            }
            stream->held = held;
            rows->bytes += bytes;
            rows->after.filled = rows->count + 1;
            pgf_put_beside(
                stream, rows, (tag == 'I' ? PGF_INSERT : PGF_UPDATE) | PGF_HAS_AFTER, frame.at,
                lsns ? lsns + i : NULL);
            stream->seq++;
        } else if (tag != 'B' || !pgf_begin(stream, frame.at, frame.length)) {
            break;
        }
    }
    return i;
}

#endif
