/* The values of tuples into the columns of their relations: the loop that every row goes through.
 *
 * In C, as its speed hangs on what stays in registers: what is stored in a few instructions is in
 * the loop, what takes longer is a call, and what is unusual ends it, for the caller to see to.
 */
#ifndef PGOUTPUT_FAST_ROWS_H
#define PGOUTPUT_FAST_ROWS_H

#include "_convert.h"
#include "_input.h"
#include "_wire.h"

#if defined(__GNUC__) || defined(__clang__)
#define PGF_OUTLINE __attribute__((noinline))
#define PGF_INLINE inline __attribute__((always_inline))
#define PGF_UNREACHABLE() __builtin_unreachable()
#else
#define PGF_OUTLINE
#define PGF_INLINE inline
#define PGF_UNREACHABLE() ((void)0)
#endif

/* As pgoutput_fast.columnar.fields numbers them. */
enum {
    SLOW, SKIP, BOOL_TEXT, BOOL_BINARY, INT2_TEXT, INT4_TEXT, INT8_TEXT, UINT4_TEXT,
    UINT4_WIDE_TEXT, SAME2, SAME4, SAME8, UINT4_WIDE, FLOAT4_TEXT, FLOAT8_TEXT, DECIMAL_TEXT,
    DECIMAL_BINARY, NUMERIC_TEXT, NUMERIC_BINARY, UTF8, ASCII, JSONB_BINARY, BYTES, BYTEA_TEXT,
    UUID_TEXT, UUID_UTF8_TEXT, UUID_UTF8_BINARY, DATE_TEXT, DATE_BINARY, TIME_TEXT, TIME_BINARY,
    TIME_NS_TEXT, TIME_NS_BINARY, TIMESTAMP_TEXT, TIMESTAMPTZ_TEXT, TIMESTAMP_BINARY,
    INTERVAL_BINARY, LABEL, NESTED_TEXT, NESTED_BINARY, CONVERTER_COUNT,
    FORM, /* by the format of the value: utf8 or binary */
    END, /* behind the last column */
};

enum { SLACK = 16 /* bytes behind a value that a copy of 16 may write */ };

/* Bytes to make room for where a variable column has so many: never more than offsets of 32 bits can
 * count, so that what has room has an offset.
 */
static inline int64_t pgf_roomy(int64_t size)
{
    int64_t room = (size + SLACK) * 3 / 2 + 256;
    return room < INT32_MAX + (int64_t)SLACK ? room : INT32_MAX + (int64_t)SLACK;
}

typedef struct {
    uint8_t kind; /* of the values that come: 't' or 'b', as of the last one; 0 before it */
    uint8_t code; /* the converter of such; SLOW before the first */
    uint8_t codes[2]; /* the converters of binary values and of text */
    uint8_t form; /* of a column by format: what came first */
    uint8_t form_codes[2]; /* of a column by format: how values are stored, as in `codes` */
    int32_t width; /* bytes of a value; 0 a bit, -1 variable */
    uint32_t scale;
    uint8_t *validity; /* NULL for as long as nothing is null */
    uint8_t *data;
    int32_t *offsets;
    int64_t room; /* bytes in `data` of a variable column */
    union {
        uint64_t limit; /* of a decimal of up to 18 digits: 10**precision; else 0 */
        const struct pgf_labels *labels; /* of an enum */
        struct pgf_part *part; /* of a nested column */
    };
    void *field; /* borrowed from the layout */
} pgf_column;

/* The columns of `before` or of `after`. */
typedef struct {
    pgf_column *columns;
    int64_t filled; /* rows that the columns have; the rows of the batch catch up */
    int64_t capacity; /* rows */
} pgf_side;

enum { PGF_INSERT, PGF_UPDATE, PGF_DELETE, PGF_TRUNCATE };

/* Of a row. */
enum {
    PGF_OP = 3, /* the bits of an op */
    PGF_OLD_KEY = 4,
    PGF_OLD_ROW = 8,
    PGF_IN_STREAM = 16,
    PGF_HAS_XID = 32,
    PGF_HAS_COMMIT = 64,
    PGF_HAS_AFTER = 128,
};

/* The rows of one version of a relation that have come since its last batch. */
typedef struct {
    void *owner; /* the _Relation */
    int wanted;
    int32_t width; /* of the relation */
    int64_t count;
    int64_t limit; /* rows of which a new tuple can be stored without more ado */
    int64_t capacity;
    int64_t bytes; /* of variable values, and what counts beside `fixed` */
    int64_t fixed; /* bytes that a row counts beside those */
    int64_t side_fixed; /* of these, those of its `after`; its `before` has as many */
    int truncated; /* whether there is a TRUNCATE among them */
    int has_before; /* whether one has an old tuple: all count their places in `before` then */
    /* What stands beside the tuples. */
    uint8_t *flags;
    uint8_t *xids; /* of 4 or 8 bytes, by the target */
    uint8_t *subxids; /* of rows in streams alone */
    uint64_t *lsns;
    uint64_t *commit_lsns;
    int64_t *commit_times;
    int64_t *seqs;
    pgf_side before;
    pgf_side after;
    /* Columns of `after` that were not sent: per row where they end, and which they are. */
    int32_t *unchanged_ends;
    int64_t unchanged_filled;
    int32_t *unchanged;
    int64_t unchanged_count;
    int64_t unchanged_bytes; /* of their names, and one for each */
    int64_t unchanged_room;
    const char **names; /* of the relation's columns */
    struct pgf_part *parts; /* per column: of a nested one or an enum what it is made of */
    ptrdiff_t blocks; /* of memory that a batch can own */
    /* The last batch, as the next one will be like it. */
    int64_t usual;
    int64_t reserved; /* bytes of memory, in expectation of that */
    int64_t *usual_bytes; /* per column */
    int64_t *form_rows; /* per column: the row by which its form was decided */
} pgf_rows;

/* A relation at hand, and the header of those of its rows that are a new tuple and nothing else. */
typedef struct {
    uint64_t header;
    pgf_rows *rows;
} pgf_cached;

enum { PGF_CACHED = 256 }; /* by the last byte of their OIDs */

/* Where the frames have led, as far as rows need it. */
typedef struct {
    int wide; /* xids and LSNs are Spark's longs */
    int in_stream, in_transaction, has_commit;
    uint32_t open_xid, xid;
    uint64_t commit_lsn;
    int64_t commit_time;
    int64_t seq; /* of the row that comes next */
    int64_t held; /* bytes of the rows of all relations */
    int64_t max_bytes;
    /* What the rows of the transaction have in common. */
    uint8_t row_flags;
    uint32_t row_xid;
    uint64_t row_commit_lsn;
    int64_t row_commit_time;
    pgf_cached cached[PGF_CACHED];
} pgf_stream;

/* Microseconds from 1970 to 2000. */
#define PGF_SHIFT INT64_C(946684800000000)

/* Days and microseconds of 1970 to 2000, and from there what Python's dates can hold. */
enum { PGF_SHIFT_DAYS = 10957, PGF_LEAST_DAY = -730119, PGF_GREATEST_DAY = 2921939 };
#define PGF_DAY INT64_C(86400000000)

static pgf_power PGF_POWERS_OF_FIVE[PGF_GREATEST_POWER - PGF_LEAST_POWER + 1];

static inline void pgf_set_bit(uint8_t *bits, int64_t row, int value)
{
    uint8_t mask = (uint8_t)(1 << (row & 7));
    bits[row >> 3] = (uint8_t)(value ? bits[row >> 3] | mask : bits[row >> 3] & ~mask);
}

/* Null, in a column that has its validity. */
static inline void pgf_set_null(pgf_column *column, int64_t row)
{
    pgf_set_bit(column->validity, row, 0);
    if (column->width == 8)
        ((uint64_t *)column->data)[row] = 0;
    else if (column->width == 4)
        ((uint32_t *)column->data)[row] = 0;
    else if (column->width > 0)
        memset(column->data + row * column->width, 0, (size_t)column->width);
    else if (column->width == 0)
        pgf_set_bit(column->data, row, 0);
    else
        column->offsets[row + 1] = column->offsets[row];
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

/* The header of a row that is a new tuple and nothing else: its relation's OID, the tuple's marker
 * and how many columns it has. The byte before them, the tag or the last one of an xid, is set, so
 * that zeros are no header of any frame.
 */
static inline uint64_t pgf_header(uint32_t relation_id, int32_t width)
{
    return UINT64_C(0xFF) << 56 | (uint64_t)relation_id << 24 | (uint64_t)'N' << 16
        | (uint64_t)width;
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

/* What the rows to come have in common. */
static inline void pgf_settle(pgf_stream *stream)
{
    stream->row_flags = 0;
    stream->row_xid = 0;
    stream->row_commit_lsn = 0;
    stream->row_commit_time = 0;
    if (stream->in_stream) {
        stream->row_flags = PGF_IN_STREAM | PGF_HAS_XID;
        stream->row_xid = stream->open_xid;
    } else if (stream->in_transaction) {
        stream->row_flags = PGF_HAS_XID;
        stream->row_xid = stream->xid;
        if (stream->has_commit) {
            stream->row_flags = PGF_HAS_XID | PGF_HAS_COMMIT;
            stream->row_commit_lsn = stream->commit_lsn;
            stream->row_commit_time = stream->commit_time + PGF_SHIFT;
        }
    }
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
