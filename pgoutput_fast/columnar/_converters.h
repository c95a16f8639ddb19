/* Store values in columns: pgf_convert says what each converter does.
 *
 * A converter stores the value of `length` bytes at `at` in `row` of its column, and returns
 * PGF_DONE. Otherwise it leaves the column unchanged, and the result says why. The caller has made
 * room for the row. The converter makes room for the bytes of a variable value. Loads of 16 bytes
 * may read beyond the value, from `floor` to `ceiling`.
 *
 * memcpy() stores numbers, because numbers in packed nested values are not aligned.
 */
#ifndef PGOUTPUT_FAST_CONVERTERS_H
#define PGOUTPUT_FAST_CONVERTERS_H

#include "_columns.h"
#include "_convert.h"
#include "_utf8.h"
#include "_wire.h"

_Static_assert((int)SLACK >= (int)PGF_SHORT, "a short text's copy keeps to the room for it");
_Static_assert(PGF_SHIFT == PGF_SHIFT_DAYS * PGF_DAY, "one epoch in days and in microseconds");

/* _values.pyx fills the table. The import of _reader.pyx sets the pointer. */
static const pgf_power *pgf_powers_of_five;

/* The most microseconds of an interval: its column has nanoseconds, as an int64. */
#define PGF_MOST_MICROSECONDS INT64_C(9223372036854775)

/* Store a nested value: see _nested.h. */
static int pgf_pack_row(
    pgf_column *column, int64_t row, const uint8_t *at, size_t length, int binary,
    const uint8_t *floor, const uint8_t *ceiling);

/* --- room ------------------------------------------------------------------------------------- */

static PGF_OUTLINE int pgf_make_room(pgf_column *column, int64_t size)
{
    int64_t room = pgf_roomy(size);
    if (size > INT32_MAX)
        return PGF_FULL;
    if (!pgf_resize(&column->data, room))
        return PGF_NO_MEMORY;
    column->room = room;
    return PGF_DONE;
}

/* Make room in a variable column for a value of `length` bytes, and for SLACK. */
static inline int pgf_room(pgf_column *column, int64_t row, size_t length)
{
    int64_t size = column->offsets[row] + (int64_t)length;
    return size + SLACK <= column->room ? PGF_DONE : pgf_make_room(column, size);
}

/* Return where to write the value of `row` in a variable column. */
static inline uint8_t *pgf_end(const pgf_column *column, int64_t row)
{
    return column->data + column->offsets[row];
}

/* Store the end of the value that was written at pgf_end(). */
static inline int pgf_added(pgf_column *column, int64_t row, size_t length)
{
    column->offsets[row + 1] = column->offsets[row] + (int32_t)length;
    return PGF_DONE;
}

/* --- numbers ---------------------------------------------------------------------------------- */

static inline int pgf_put2(pgf_column *column, int64_t row, uint32_t value)
{
    uint16_t number = (uint16_t)value;
    memcpy(column->data + row * 2, &number, 2);
    return PGF_DONE;
}

static inline int pgf_put4(pgf_column *column, int64_t row, uint32_t value)
{
    memcpy(column->data + row * 4, &value, 4);
    return PGF_DONE;
}

static inline int pgf_put8(pgf_column *column, int64_t row, uint64_t value)
{
    memcpy(column->data + row * 8, &value, 8);
    return PGF_DONE;
}

/* Store a decimal. Its column's limit is at most 10**18, so that the number fits into an int64. */
static inline int pgf_put_decimal(pgf_column *column, int64_t row, int negative, uint64_t number)
{
    uint8_t *at = column->data + row * column->width;
    if (number >= column->limit)
        return PGF_UNUSUAL;
    int64_t value = negative ? -(int64_t)number : (int64_t)number;
    int64_t sign = value >> 63;
    memcpy(at, &value, 8);
    memcpy(at + 8, &sign, 8);
    if (column->width == 32) {
        memcpy(at + 16, &sign, 8);
        memcpy(at + 24, &sign, 8);
    }
    return PGF_DONE;
}

static PGF_OUTLINE int pgf_put_decimal_text(
    pgf_column *column, int64_t row, const uint8_t *at, size_t length, const uint8_t *floor)
{
    uint64_t number;
    int negative;
    if (!pgf_decimal_digits(
            at, length, (size_t)(at - floor), column->scale, &negative, &number))
        return PGF_UNUSUAL;
    return pgf_put_decimal(column, row, negative, number);
}

static PGF_OUTLINE int pgf_put_decimal_binary(
    pgf_column *column, int64_t row, const uint8_t *at, size_t length)
{
    uint64_t number;
    if (!pgf_numeric_digits(at, length, &number) || pgf_load2(at + 6) != column->scale)
        return PGF_UNUSUAL;
    return pgf_put_decimal(column, row, pgf_load2(at + 4) != 0, number);
}

static PGF_OUTLINE int pgf_put_timestamp(
    pgf_column *column, int64_t row, const uint8_t *at, size_t length, int zoned)
{
    int64_t value;
    return pgf_timestamp(at, length, zoned, &value) ? pgf_put8(column, row, (uint64_t)value)
                                                    : PGF_UNUSUAL;
}

static PGF_OUTLINE int pgf_put_date(
    pgf_column *column, int64_t row, const uint8_t *at, size_t length)
{
    int32_t days;
    return pgf_date(at, length, &days) ? pgf_put4(column, row, (uint32_t)days) : PGF_UNUSUAL;
}

static PGF_OUTLINE int pgf_put_float(
    pgf_column *column, int64_t row, const uint8_t *at, size_t length, const uint8_t *floor)
{
    double value;
    if (!pgf_float(at, length, (size_t)(at - floor), pgf_powers_of_five, &value))
        return PGF_UNUSUAL;
    memcpy(column->data + row * 8, &value, 8);
    return PGF_DONE;
}

static PGF_OUTLINE int pgf_put_uuid(
    pgf_column *column, int64_t row, const uint8_t *at, size_t length)
{
    return pgf_uuid(at, length, column->data + 16 * row) ? PGF_DONE : PGF_UNUSUAL;
}

/* --- values of any length --------------------------------------------------------------------- */

static int pgf_put_text_in_more_room(
    pgf_column *column, int64_t row, const uint8_t *at, size_t length, const uint8_t *ceiling);

/* Store text. Text that is not UTF-8 is unusual. */
static PGF_OUTLINE int pgf_put_text(
    pgf_column *column, int64_t row, const uint8_t *at, size_t length, const uint8_t *ceiling)
{
    int32_t used = column->offsets[row];
    /* This is a tail call: it saves no registers, so that a value with room costs nothing more. */
    if (used + (int64_t)length + SLACK > column->room)
        return pgf_put_text_in_more_room(column, row, at, length, ceiling);
    if (!pgf_copy_utf8(column->data + used, at, length, (size_t)(ceiling - at) - length))
        return PGF_UNUSUAL;
    column->offsets[row + 1] = used + (int32_t)length;
    return PGF_DONE;
}

static PGF_OUTLINE int pgf_put_text_in_more_room(
    pgf_column *column, int64_t row, const uint8_t *at, size_t length, const uint8_t *ceiling)
{
    int status = pgf_make_room(column, column->offsets[row] + (int64_t)length);
    return status == PGF_DONE ? pgf_put_text(column, row, at, length, ceiling) : status;
}

/* Store bytes unchanged. With `only_ascii`, a value that is not ASCII is unusual. */
static int pgf_put_bytes(
    pgf_column *column, int64_t row, const uint8_t *at, size_t length, const uint8_t *ceiling,
    int only_ascii)
{
    int status = pgf_room(column, row, length);
    if (status != PGF_DONE)
        return status;
    if (!pgf_copy_text(pgf_end(column, row), at, length, (size_t)(ceiling - at) - length)
        && only_ascii)
        return PGF_UNUSUAL;
    return pgf_added(column, row, length);
}

static int pgf_put_numeric_text(
    pgf_column *column, int64_t row, const uint8_t *at, size_t length)
{
    char text[PGF_NUMERIC_ROOM];
    size_t size = pgf_numeric_text(at, length, text);
    int status = size > 0 ? pgf_room(column, row, size) : PGF_UNUSUAL;
    if (status != PGF_DONE)
        return status;
    memcpy(pgf_end(column, row), text, size);
    return pgf_added(column, row, size);
}

static int pgf_put_hexadecimal(
    pgf_column *column, int64_t row, const uint8_t *at, size_t length)
{
    int status;
    if (length < 2 || length % 2 != 0 || at[0] != '\\' || at[1] != 'x')
        return PGF_UNUSUAL;
    length = (length - 2) / 2;
    status = pgf_room(column, row, length);
    if (status != PGF_DONE)
        return status;
    if (!pgf_hexadecimal(at + 2, length, pgf_end(column, row)))
        return PGF_UNUSUAL;
    return pgf_added(column, row, length);
}

/* Store the text of a UUID as a server prints it, in lower case. */
static int pgf_put_uuid_text(pgf_column *column, int64_t row, const uint8_t *bytes)
{
    int status = pgf_room(column, row, 36);
    if (status != PGF_DONE)
        return status;
    pgf_uuid_text(bytes, pgf_end(column, row));
    return pgf_added(column, row, 36);
}

/* Store the text of a "char" as servers from version 15 on print it: empty for 0, and a backslash
 * with three octal digits for a byte that is not ASCII.
 */
static int pgf_put_char(pgf_column *column, int64_t row, uint8_t byte)
{
    uint8_t octal[4] = {'\\', '0' + (byte >> 6), '0' + (byte >> 3 & 7), '0' + (byte & 7)};
    size_t length = byte < 0x80 ? byte != 0 : sizeof octal;
    int status = pgf_room(column, row, length);
    if (status != PGF_DONE)
        return status;
    memcpy(pgf_end(column, row), byte < 0x80 ? &byte : octal, length);
    return pgf_added(column, row, length);
}

/* Store a "char" in text format. PostgreSQL 14 sends each byte unchanged. */
static int pgf_put_char_text(pgf_column *column, int64_t row, const uint8_t *at, size_t length)
{
    if (length <= 1)
        return pgf_put_char(column, row, length ? at[0] : 0);
    if (length != 4 || at[0] != '\\' || at[1] < '0' || at[1] > '3' || at[2] < '0' || at[2] > '7'
        || at[3] < '0' || at[3] > '7')
        return PGF_UNUSUAL;
    return pgf_put_char(
        column, row, (uint8_t)((at[1] - '0') << 6 | (at[2] - '0') << 3 | (at[3] - '0')));
}

static int pgf_put_interval(pgf_column *column, int64_t row, const uint8_t *at)
{
    int64_t microseconds = (int64_t)pgf_load8(at);
    int32_t parts[2] = {(int32_t)pgf_load4(at + 12), (int32_t)pgf_load4(at + 8)}; /* months, days */
    /* An infinite interval has the least or the greatest number in each field. */
    if (microseconds <= -PGF_MOST_MICROSECONDS || microseconds >= PGF_MOST_MICROSECONDS
        || parts[0] < -INT32_MAX || parts[0] == INT32_MAX)
        return PGF_UNUSUAL;
    microseconds *= 1000;
    memcpy(column->data + row * 16, parts, 8);
    memcpy(column->data + row * 16 + 8, &microseconds, 8);
    return PGF_DONE;
}

/* --- converters ------------------------------------------------------------------------------- */

/* The converters of PGF_RARE_CONVERTERS. */
static PGF_OUTLINE int pgf_convert_rare(
    pgf_column *column, uint8_t code, int64_t row, const uint8_t *at, uint32_t length,
    const uint8_t *floor, const uint8_t *ceiling)
{
    size_t before = (size_t)(at - floor);
    int64_t number;
    double real;
    float single;
    uint8_t uuid[16];
    switch (code) {
    case INT2_TEXT:
        if (!pgf_integer(at, length, before, INT16_MIN, INT16_MAX, &number))
            return PGF_UNUSUAL;
        return pgf_put2(column, row, (uint32_t)number);
    case SAME2:
        return length == 2 ? pgf_put2(column, row, pgf_load2(at)) : PGF_UNUSUAL;
    case UINT4_TEXT:
        if (!pgf_integer(at, length, before, 0, UINT32_MAX, &number))
            return PGF_UNUSUAL;
        return pgf_put4(column, row, (uint32_t)number);
    case UINT4_WIDE_TEXT:
        if (!pgf_integer(at, length, before, 0, UINT32_MAX, &number))
            return PGF_UNUSUAL;
        return pgf_put8(column, row, (uint64_t)number);
    case UINT4_WIDE:
        return length == 4 ? pgf_put8(column, row, pgf_load4(at)) : PGF_UNUSUAL;
    case FLOAT4_TEXT:
        /* Numbers beyond this may exceed the greatest float32. */
        if (!pgf_float(at, length, before, pgf_powers_of_five, &real) || real < -3.4e38 || real > 3.4e38)
            return PGF_UNUSUAL;
        single = (float)real;
        memcpy(column->data + row * 4, &single, 4);
        return PGF_DONE;
    case NUMERIC_TEXT:
        if (!pgf_is_numeric(at, length))
            return PGF_UNUSUAL;
        return pgf_put_bytes(column, row, at, length, ceiling, 0);
    case NUMERIC_BINARY:
        return pgf_put_numeric_text(column, row, at, length);
    case ASCII:
        return pgf_put_bytes(column, row, at, length, ceiling, 1);
    case BYTES:
        return pgf_put_bytes(column, row, at, length, ceiling, 0);
    case BYTEA_TEXT:
        return pgf_put_hexadecimal(column, row, at, length);
    case UUID_UTF8_TEXT:
        return pgf_uuid(at, length, uuid) ? pgf_put_uuid_text(column, row, uuid) : PGF_UNUSUAL;
    case UUID_UTF8_BINARY:
        return length == 16 ? pgf_put_uuid_text(column, row, at) : PGF_UNUSUAL;
    case TIME_TEXT:
    case TIME_NS_TEXT:
        if (!pgf_time(at, length, &number))
            return PGF_UNUSUAL;
        return pgf_put8(column, row, (uint64_t)(number * (code == TIME_NS_TEXT ? 1000 : 1)));
    case TIME_BINARY:
    case TIME_NS_BINARY:
        number = length == 8 ? (int64_t)pgf_load8(at) : -1;
        if (number < 0 || number >= PGF_DAY)
            return PGF_UNUSUAL;
        return pgf_put8(column, row, (uint64_t)(number * (code == TIME_NS_BINARY ? 1000 : 1)));
    case INTERVAL_BINARY:
        return length == 16 ? pgf_put_interval(column, row, at) : PGF_UNUSUAL;
    case CHAR_TEXT:
        return pgf_put_char_text(column, row, at, length);
    case CHAR_BINARY:
        return length == 1 ? pgf_put_char(column, row, at[0]) : PGF_UNUSUAL;
    case LABEL:
        number = *pgf_slot(column->labels, at, length) - 1;
        return number >= 0 ? pgf_put4(column, row, (uint32_t)number) : PGF_UNUSUAL;
    case NESTED_TEXT:
    case NESTED_BINARY:
        return pgf_pack_row(column, row, at, length, code == NESTED_BINARY, floor, ceiling);
    default: /* SLOW */
        return PGF_UNUSUAL;
    }
}

/* All converters. Inlined with a constant `code`, this compiles to that converter alone. */
static PGF_INLINE int pgf_convert(
    pgf_column *column, uint8_t code, int64_t row, const uint8_t *at, uint32_t length,
    const uint8_t *floor, const uint8_t *ceiling)
{
    size_t before = (size_t)(at - floor);
    int64_t number;
    int32_t used, days;
    switch (code) {
    case SKIP:
        return PGF_DONE;
    case SAME4:
        return length == 4 ? pgf_put4(column, row, pgf_load4(at)) : PGF_UNUSUAL;
    case SAME8:
        return length == 8 ? pgf_put8(column, row, pgf_load8(at)) : PGF_UNUSUAL;
    case DATE_BINARY:
        if (length != 4)
            return PGF_UNUSUAL;
        days = (int32_t)pgf_load4(at);
        if (days < PGF_LEAST_DAY || days > PGF_GREATEST_DAY)
            return PGF_UNUSUAL;
        return pgf_put4(column, row, (uint32_t)(days + PGF_SHIFT_DAYS));
    case TIMESTAMP_BINARY:
        if (length != 8)
            return PGF_UNUSUAL;
        number = (int64_t)pgf_load8(at);
        if (number < PGF_LEAST_DAY * PGF_DAY || number >= (PGF_GREATEST_DAY + 1) * PGF_DAY)
            return PGF_UNUSUAL;
        return pgf_put8(column, row, (uint64_t)(number + PGF_SHIFT_DAYS * PGF_DAY));
    case INT4_TEXT:
        if (!pgf_integer(at, length, before, INT32_MIN, INT32_MAX, &number))
            return PGF_UNUSUAL;
        return pgf_put4(column, row, (uint32_t)number);
    case INT8_TEXT:
        if (!pgf_integer(at, length, before, INT64_MIN, INT64_MAX, &number))
            return PGF_UNUSUAL;
        return pgf_put8(column, row, (uint64_t)number);
    case BOOL_TEXT:
        if (length != 1 || (at[0] != 't' && at[0] != 'f'))
            return PGF_UNUSUAL;
        pgf_set_bit(column->data, row, at[0] == 't');
        return PGF_DONE;
    case BOOL_BINARY:
        if (length != 1 || at[0] > 1)
            return PGF_UNUSUAL;
        pgf_set_bit(column->data, row, at[0]);
        return PGF_DONE;
    case UTF8:
        used = column->offsets[row];
        if (length > PGF_SHORT || ceiling - at < PGF_SHORT
            || used + (int64_t)SLACK > column->room
            || !pgf_copy_short(column->data + used, at, length))
            return pgf_put_text(column, row, at, length, ceiling);
        column->offsets[row + 1] = used + (int32_t)length;
        return PGF_DONE;
    case JSONB_BINARY:
        if (length == 0 || at[0] != 1)
            return PGF_UNUSUAL;
        return pgf_put_text(column, row, at + 1, length - 1, ceiling);
    case UUID_BINARY:
        if (length != 16)
            return PGF_UNUSUAL;
        memcpy(column->data + 16 * row, at, 16);
        return PGF_DONE;
    case DECIMAL_TEXT:
        return pgf_put_decimal_text(column, row, at, length, floor);
    case DECIMAL_BINARY:
        return pgf_put_decimal_binary(column, row, at, length);
    case TIMESTAMP_TEXT:
        return pgf_put_timestamp(column, row, at, length, 0);
    case TIMESTAMPTZ_TEXT:
        return pgf_put_timestamp(column, row, at, length, 1);
    case DATE_TEXT:
        return pgf_put_date(column, row, at, length);
    case FLOAT8_TEXT:
        return pgf_put_float(column, row, at, length, floor);
    case UUID_TEXT:
        return pgf_put_uuid(column, row, at, length);
    default:
        return pgf_convert_rare(column, code, row, at, length, floor, ceiling);
    }
}

/* pgf_convert, not inlined. */
static PGF_OUTLINE int pgf_convert_one(
    pgf_column *column, uint8_t code, int64_t row, const uint8_t *at, uint32_t length,
    const uint8_t *floor, const uint8_t *ceiling)
{
    return pgf_convert(column, code, row, at, length, floor, ceiling);
}

#endif
