/* The values of a tuple into the columns of a relation: the loop that every row goes through.
 *
 * In C, as its speed hangs on what stays in registers: what is stored in a few instructions is in
 * the loop, what takes longer is a call, and what is unusual ends it, for the caller to see to.
 */
#ifndef PGOUTPUT_FAST_ROWS_H
#define PGOUTPUT_FAST_ROWS_H

#include "_convert.h"

#if defined(__GNUC__) || defined(__clang__)
#define PGF_OUTLINE __attribute__((noinline))
#else
#define PGF_OUTLINE
#endif

/* As pgoutput_fast.layout numbers them. */
enum {
    SLOW, SKIP, BOOL_TEXT, BOOL_BINARY, INT2_TEXT, INT4_TEXT, INT8_TEXT, UINT4_TEXT,
    UINT4_WIDE_TEXT, SAME2, SAME4, SAME8, UINT4_WIDE, FLOAT4_TEXT, FLOAT8_TEXT, DECIMAL_TEXT,
    DECIMAL_BINARY, NUMERIC_TEXT, NUMERIC_BINARY, UTF8, ASCII, JSONB_BINARY, BYTES, BYTEA_TEXT,
    UUID_TEXT, UUID_UTF8_TEXT, UUID_UTF8_BINARY, DATE_TEXT, DATE_BINARY, TIME_TEXT, TIME_BINARY,
    TIME_NS_TEXT, TIME_NS_BINARY, TIMESTAMP_TEXT, TIMESTAMPTZ_TEXT, TIMESTAMP_BINARY,
    INTERVAL_BINARY, LABEL, NESTED_TEXT, NESTED_BINARY, CONVERTER_COUNT,
    FORM, /* by the format of the value: utf8 or binary */
};

enum { SLACK = 16 /* bytes behind a value that a copy of 16 may write */ };

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

/* Values from `at` on, into `row` of the columns from *next on and up to `last`. It stops before
 * what is unusual or malformed, and says where: in *next the column, the place as its result. What
 * is read lies between `at` and `end`, but for loads of 16 bytes, which keep to `floor` and
 * `ceiling`. `bytes` grows by the sizes of variable values.
 */
static PGF_OUTLINE const uint8_t *pgf_take_values(
    pgf_column **next, pgf_column *last, int64_t row, const uint8_t *at, const uint8_t *end,
    const uint8_t *floor, const uint8_t *ceiling, int64_t *bytes)
{
    pgf_column *column = *next;
    int64_t taken = 0;
    for (; column < last; column++) {
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
            if (length <= 16 && ceiling - value >= 16 && used + 16 <= column->room
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
        default:
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

#endif
