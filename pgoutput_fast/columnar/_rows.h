/* The values of tuples into the columns of their relations: the loop that every row goes through.
 *
 * In C, as its speed hangs on what stays in registers: what is stored in a few instructions is in
 * the loop, what takes longer is a call, and what is unusual ends it, for the caller to see to.
 */
#ifndef PGOUTPUT_FAST_ROWS_H
#define PGOUTPUT_FAST_ROWS_H

#include "_columns.h"
#include "_convert.h"
#include "_input.h"
#include "_wire.h"

static pgf_power PGF_POWERS_OF_FIVE[PGF_GREATEST_POWER - PGF_LEAST_POWER + 1];

/* The number of a label, -1 if it has none. */
static PGF_OUTLINE int32_t pgf_label(const pgf_labels *labels, const uint8_t *at, size_t length)
{
    return *pgf_slot(labels, at, length) - 1;
}

static inline int pgf_put_decimal(pgf_column *column, int64_t row, int64_t value)
{
    uint64_t size = value >= 0 ? (uint64_t)value : 0 - (uint64_t)value;
    int64_t *at = (int64_t *)(column->data + row * column->width);
    if (column->limit != 0 && size >= column->limit)
        return 0;
    at[0] = value;
    at[1] = value >> 63;
    if (column->width == 32)
        at[2] = at[3] = value >> 63;
    return 1;
}

static PGF_OUTLINE int pgf_take_decimal(
    pgf_column *column, int64_t row, const uint8_t *at, size_t length, const uint8_t *floor)
{
    int64_t number;
    return pgf_decimal(at, length, (size_t)(at - floor), column->scale, &number)
        && pgf_put_decimal(column, row, number);
}

static PGF_OUTLINE int pgf_take_binary_decimal(
    pgf_column *column, int64_t row, const uint8_t *at, size_t length)
{
    int64_t number;
    return pgf_binary_decimal(at, length, column->scale, &number)
        && pgf_put_decimal(column, row, number);
}

static PGF_OUTLINE int pgf_take_timestamp(
    pgf_column *column, int64_t row, const uint8_t *at, size_t length, int zoned)
{
    return pgf_timestamp(at, length, zoned, (int64_t *)column->data + row);
}

static PGF_OUTLINE int pgf_take_date(
    pgf_column *column, int64_t row, const uint8_t *at, size_t length)
{
    return length == 10 && pgf_date(at, (int32_t *)column->data + row);
}

static PGF_OUTLINE int pgf_take_float(
    pgf_column *column, int64_t row, const uint8_t *at, size_t length)
{
    return pgf_float(at, length, PGF_POWERS_OF_FIVE, (double *)column->data + row);
}

static PGF_OUTLINE int pgf_take_uuid(
    pgf_column *column, int64_t row, const uint8_t *at, size_t length)
{
    return pgf_uuid(at, length, column->data + 16 * row);
}

/* Text that is not short; where there is room for it. */
static PGF_OUTLINE int pgf_take_text(
    pgf_column *column, int64_t row, const uint8_t *at, size_t length, const uint8_t *ceiling)
{
    int64_t used = column->offsets[row];
    if (used + (int64_t)length + SLACK > column->room)
        return 0;
    if (!pgf_copy_utf8(column->data + used, at, length, (size_t)(ceiling - at) - length))
        return 0;
    column->offsets[row + 1] = (int32_t)(used + (int64_t)length);
    return 1;
}

static inline uint64_t pgf_load_header(const uint8_t *at)
{
    return UINT64_C(0xFF) << 56 | pgf_load8(at);
}

/* Before a binary value of so many bytes: its kind and its length, in one look. */
#define PGF_IS_BINARY(size) \
    (end - at >= 5 + (size) && pgf_load8(at) >> 24 == ((uint64_t)'b' << 32 | (size)))

/* A value of any length. Unsigned: a negative length is longer than any frame. */
#define PGF_TAKE_LENGTH(of_kind) \
    if (end - at < 5 || at[0] != (of_kind)) \
        goto other; \
    length = pgf_load4(at + 1); \
    value = at + 5; \
    if (length > (size_t)(end - value)) \
        goto unusual

/* Values from `at` on, into `row` of the columns from *next on. It stops before what is unusual or
 * malformed, or at the end, and says where: in *next the column, the place as its result. What is
 * read lies between `at` and `end`, but for loads of 16 bytes, which keep to `floor` and `ceiling`.
 * `bytes` grows by the sizes of variable values.
 */
static PGF_INLINE const uint8_t *pgf_take_values(
    pgf_column **next, int64_t row, const uint8_t *at, const uint8_t *end, const uint8_t *floor,
    const uint8_t *ceiling, int64_t *bytes)
{
    pgf_column *column = *next;
    int64_t taken = 0;
    for (;; column++) {
        const uint8_t *value;
        uint32_t length;
        int64_t number;
        int32_t used, days;
        switch (column->code) {
        case SAME4:
            if (!PGF_IS_BINARY(4))
                goto other;
            ((uint32_t *)column->data)[row] = pgf_load4(at + 5);
            at += 9;
            continue;
        case SAME8:
            if (!PGF_IS_BINARY(8))
                goto other;
            ((uint64_t *)column->data)[row] = pgf_load8(at + 5);
            at += 13;
            continue;
        case DATE_BINARY:
            if (!PGF_IS_BINARY(4))
                goto other;
            days = (int32_t)pgf_load4(at + 5);
            if (days < PGF_LEAST_DAY || days > PGF_GREATEST_DAY)
                goto unusual;
            ((int32_t *)column->data)[row] = days + PGF_SHIFT_DAYS;
            at += 9;
            continue;
        case TIMESTAMP_BINARY:
            if (!PGF_IS_BINARY(8))
                goto other;
            number = (int64_t)pgf_load8(at + 5);
            if (number < PGF_LEAST_DAY * PGF_DAY || number >= (PGF_GREATEST_DAY + 1) * PGF_DAY)
                goto unusual;
            ((int64_t *)column->data)[row] = number + PGF_SHIFT_DAYS * PGF_DAY;
            at += 13;
            continue;
        case INT4_TEXT:
            PGF_TAKE_LENGTH('t');
            if (!pgf_integer(
                    value, length, (size_t)(value - floor), INT32_MIN, INT32_MAX, &number))
                goto unusual;
            ((int32_t *)column->data)[row] = (int32_t)number;
            break;
        case INT8_TEXT:
            PGF_TAKE_LENGTH('t');
            if (!pgf_integer(
                    value, length, (size_t)(value - floor), INT64_MIN, INT64_MAX, &number))
                goto unusual;
            ((int64_t *)column->data)[row] = number;
            break;
        case UTF8:
            PGF_TAKE_LENGTH(column->kind);
            used = column->offsets[row];
            if (length <= 16 && ceiling - value >= 16 && used + (int64_t)16 <= column->room
                && pgf_copy_short(column->data + used, value, length))
                column->offsets[row + 1] = used + (int32_t)length;
            else if (!pgf_take_text(column, row, value, length, ceiling))
                goto unusual;
            taken += length;
            break;
        case JSONB_BINARY:
            PGF_TAKE_LENGTH('b');
            if (length == 0 || value[0] != 1
                || !pgf_take_text(column, row, value + 1, length - 1, ceiling))
                goto unusual;
            taken += length - 1;
            break;
        case BOOL_TEXT:
            PGF_TAKE_LENGTH('t');
            if (length != 1 || (value[0] != 't' && value[0] != 'f'))
                goto unusual;
            pgf_set_bit(column->data, row, value[0] == 't');
            break;
        case BOOL_BINARY:
            PGF_TAKE_LENGTH('b');
            if (length != 1 || value[0] > 1)
                goto unusual;
            pgf_set_bit(column->data, row, value[0]);
            break;
        case BYTES:
            PGF_TAKE_LENGTH(column->kind);
            if (column->width != 16 || length != 16)
                goto unusual;
            memcpy(column->data + 16 * row, value, 16);
            break;
        case DECIMAL_TEXT:
            PGF_TAKE_LENGTH('t');
            if (!pgf_take_decimal(column, row, value, length, floor))
                goto unusual;
            break;
        case DECIMAL_BINARY:
            PGF_TAKE_LENGTH('b');
            if (!pgf_take_binary_decimal(column, row, value, length))
                goto unusual;
            break;
        case TIMESTAMP_TEXT:
        case TIMESTAMPTZ_TEXT:
            PGF_TAKE_LENGTH('t');
            if (!pgf_take_timestamp(column, row, value, length, column->code == TIMESTAMPTZ_TEXT))
                goto unusual;
            break;
        case DATE_TEXT:
            PGF_TAKE_LENGTH('t');
            if (!pgf_take_date(column, row, value, length))
                goto unusual;
            break;
        case FLOAT8_TEXT:
            PGF_TAKE_LENGTH('t');
            if (!pgf_take_float(column, row, value, length))
                goto unusual;
            break;
        case UUID_TEXT:
            PGF_TAKE_LENGTH('t');
            if (!pgf_take_uuid(column, row, value, length))
                goto unusual;
            break;
        case SKIP:
            PGF_TAKE_LENGTH(column->kind);
            break;
        case END:
            goto unusual;
        /* All there are: the compiler need not look. */
        case SLOW: case INT2_TEXT: case UINT4_TEXT: case UINT4_WIDE_TEXT: case SAME2:
        case UINT4_WIDE: case FLOAT4_TEXT: case NUMERIC_TEXT: case NUMERIC_BINARY: case ASCII:
        case BYTEA_TEXT: case UUID_UTF8_TEXT: case UUID_UTF8_BINARY: case TIME_TEXT:
        case TIME_BINARY: case TIME_NS_TEXT: case TIME_NS_BINARY: case INTERVAL_BINARY:
        case LABEL: case NESTED_TEXT: case NESTED_BINARY: case CONVERTER_COUNT: case FORM:
            goto other;
        default:
            PGF_UNREACHABLE();
            goto other;
        }
        at = value + length;
        continue;
    other:
        if (at == end || at[0] != 'n')
            goto unusual;
        if (column->validity)
            pgf_set_null(column, row);
        else if (column->code != SKIP)
            goto unusual;
        at++;
    }
unusual:
    *next = column;
    *bytes += taken;
    return at;
}

/* The same of any tuple, by whoever is in less of a hurry. */
static PGF_OUTLINE const uint8_t *pgf_take_more(
    pgf_column **next, int64_t row, const uint8_t *at, const uint8_t *end, const uint8_t *floor,
    const uint8_t *ceiling, int64_t *bytes)
{
    return pgf_take_values(next, row, at, end, floor, ceiling, bytes);
}

/* False if it is malformed, or has what the columns of its rows can't hold. */
static inline int pgf_begin(pgf_stream *stream, const uint8_t *at, int64_t length)
{
    if (length != 21 || stream->in_stream || (stream->wide && at[1] >= 0x80)
        || (int64_t)pgf_load8(at + 9) > INT64_MAX - PGF_SHIFT)
        return 0;
    stream->commit_lsn = pgf_load8(at + 1);
    stream->commit_time = (int64_t)pgf_load8(at + 9);
    stream->xid = pgf_load4(at + 17);
    stream->in_transaction = 1;
    stream->has_commit = 1;
    stream->seq = 0;
    pgf_settle(stream);
    return 1;
}

/* What stands beside the tuples of a row, which counts from now on. `at` is its frame. */
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
        /* TRUNCATE names its transaction in the same place. */
        if (stream->wide)
            ((int64_t *)rows->subxids)[row] = pgf_load4(at + 1);
        else
            ((uint32_t *)rows->subxids)[row] = pgf_load4(at + 1);
    }
    if (lsn)
        rows->lsns[row] = *lsn;
    rows->commit_lsns[row] = stream->row_commit_lsn;
    rows->commit_times[row] = stream->row_commit_time;
    rows->seqs[row] = stream->seq;
    rows->flags[row] = flags | stream->row_flags;
    rows->count = row + 1;
}

/* Where a row has stopped: in the column that comes next, at its place in the frame. */
typedef struct {
    pgf_rows *rows; /* NULL: it has not begun */
    pgf_column *column;
    const uint8_t *at;
    int64_t bytes; /* of variable values before */
} pgf_stop;

/* Take frames from `i` on for as long as they are Begin, or rows that are a new tuple and nothing
 * else, of relations at hand, with nothing unusual, and there is room. The result is the frame that
 * is neither, or `end`; a row that has begun goes on from `stop`.
 */
static PGF_OUTLINE int64_t pgf_take_rows(
    pgf_stream *stream, const pgf_source *source, int64_t i, int64_t end, const uint64_t *lsns,
    pgf_stop *stop)
{
    const int64_t xid_size = stream->in_stream ? 4 : 0;
    stop->rows = NULL;
    for (; i < end; i++) {
        pgf_frame frame;
        pgf_take_frame(source, i, &frame);
        /* Shorter and longer ones in one comparison. */
        if ((uint64_t)(frame.length - 8 - xid_size) > PGF_MAX_FRAME - 8 - (uint64_t)xid_size)
            break;
        uint8_t tag = frame.at[0];
        if (tag == 'I' || tag == 'U') {
            const pgf_cached *cached = &stream->cached[frame.at[4 + xid_size]];
            pgf_rows *rows = cached->rows;
            if (pgf_load_header(frame.at + xid_size) != cached->header
                || rows->count >= rows->limit || (stream->wide && lsns && lsns[i] >> 63))
                break;
            pgf_column *column = rows->after.columns;
            const uint8_t *frame_end = frame.at + frame.length;
            int64_t bytes = 0;
            const uint8_t *at = pgf_take_values(
                &column, rows->count, frame.at + 8 + xid_size, frame_end, frame.floor,
                frame.ceiling, &bytes);
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
