/* What plain C does on the same frames: the limits that the engine is held against.
 *
 * Three loops over frames that lie one behind the other: a copy, a walk that notes every header and
 * every column, and the columns of one relation as typed Arrow buffers, those of old rows and those
 * of new ones. They know one relation, no value that is unusual (the walk no old tuple either), and
 * check the bounds of nothing but columns; buffers are the caller's and used again and again.
 */
#include "_convert.h"
#include "_utf8.h"
#include "_wire.h"

typedef struct {
    uint8_t tag, old_kind;
    uint16_t columns;
    uint32_t relation_id;
    uint32_t xid;
    uint32_t first_slice;
} header;

/* Of Begin and Commit. */
typedef struct {
    int64_t frame;
    uint64_t lsn, end_lsn;
    int64_t time;
} bound;

int64_t copy(const uint8_t *data, const int64_t *offsets, int64_t count, uint8_t *to)
{
    for (int64_t i = 0; i < count; i++)
        memcpy(to + offsets[i], data + offsets[i], (size_t)(offsets[i + 1] - offsets[i]));
    return offsets[count];
}

/* The number of slices. */
int64_t walk(
    const uint8_t *data, const int64_t *offsets, int64_t count, header *headers, pgf_slice *slices,
    bound *bounds)
{
    pgf_slice *first = slices;
    for (int64_t i = 0; i < count; i++) {
        const uint8_t *frame = data + offsets[i];
        const uint8_t *end = data + offsets[i + 1];
        uint8_t tag = frame[0];
        headers[i].tag = tag;
        headers[i].old_kind = 0;
        headers[i].columns = 0;
        headers[i].relation_id = 0;
        headers[i].xid = 0;
        headers[i].first_slice = (uint32_t)(slices - first);
        if (tag != 'I' && tag != 'U') {
            if (tag == 'B' && end - frame == 21) {
                bounds->frame = i;
                bounds->lsn = pgf_load8(frame + 1);
                bounds->end_lsn = 0;
                bounds->time = (int64_t)pgf_load8(frame + 9);
                headers[i].xid = pgf_load4(frame + 17);
                bounds++;
            } else if (tag == 'C' && end - frame == 26) {
                bounds->frame = i;
                bounds->lsn = pgf_load8(frame + 2);
                bounds->end_lsn = pgf_load8(frame + 10);
                bounds->time = (int64_t)pgf_load8(frame + 18);
                bounds++;
            }
            continue;
        }
        if (end - frame < 8)
            return -1;
        headers[i].relation_id = pgf_load4(frame + 1);
        if (frame[5] != 'N')
            return -1;
        uint32_t columns = pgf_load2(frame + 6);
        headers[i].columns = (uint16_t)columns;
        if (pgf_read_slices(frame, frame + 8, end, slices, columns) != end)
            return -1;
        slices += columns;
    }
    return slices - first;
}

/* Types of columns, as benchmarks/native.py numbers them. */
enum { BOOL, INT4, INT8, FLOAT8, NUMERIC_12_2, TEXT, UUID, DATE, TIMESTAMPTZ, JSONB };

typedef struct {
    int32_t type;
    uint8_t *validity;
    uint8_t *data;
    int32_t *offsets;
} column;

/* The columns of old rows or of new ones. */
typedef struct {
    column *columns;
    int64_t filled; /* rows that the columns have; later ones without a tuple here are missing */
} side;

static pgf_power powers[PGF_GREATEST_POWER - PGF_LEAST_POWER + 1];

void set_power(int32_t power, uint64_t high, uint64_t low)
{
    powers[power - PGF_LEAST_POWER].high = high;
    powers[power - PGF_LEAST_POWER].low = low;
}

static inline int numeric_12_2(
    const uint8_t *at, uint32_t length, size_t before, int binary, int64_t *number)
{
    uint64_t digits;
    int negative = binary && pgf_load2(at + 4) != 0;
    if (!(binary ? pgf_numeric_digits(at, length, &digits)
                 : pgf_decimal_digits(at, length, before, 2, &negative, &digits)))
        return 0;
    *number = negative ? -(int64_t)digits : (int64_t)digits;
    return 1;
}

static inline int convert(
    column *to, int64_t row, const uint8_t *at, uint32_t length, int binary, const uint8_t *floor,
    const uint8_t *ceiling)
{
    int64_t number;
    int32_t days;
    double real;
    int32_t used;
    size_t before = (size_t)(at - floor), after = (size_t)(ceiling - at - length);
    switch (to->type) {
    case BOOL:
        if (binary ? at[0] : at[0] == 't')
            to->data[row >> 3] |= (uint8_t)(1 << (row & 7));
        else
            to->data[row >> 3] &= (uint8_t) ~(1 << (row & 7));
        return 1;
    case INT4:
        if (binary)
            number = (int32_t)pgf_load4(at);
        else if (!pgf_integer(at, length, before, INT32_MIN, INT32_MAX, &number))
            return 0;
        ((int32_t *)to->data)[row] = (int32_t)number;
        return 1;
    case INT8:
        if (binary)
            number = (int64_t)pgf_load8(at);
        else if (!pgf_integer(at, length, before, INT64_MIN, INT64_MAX, &number))
            return 0;
        ((int64_t *)to->data)[row] = number;
        return 1;
    case FLOAT8:
        if (binary) {
            ((uint64_t *)to->data)[row] = pgf_load8(at);
            return 1;
        }
        if (!pgf_float(at, length, before, powers, &real))
            return 0;
        ((double *)to->data)[row] = real;
        return 1;
    case NUMERIC_12_2:
        if (!numeric_12_2(at, length, before, binary, &number))
            return 0;
        ((int64_t *)to->data)[2 * row] = number;
        ((int64_t *)to->data)[2 * row + 1] = number >> 63;
        return 1;
    case JSONB:
        if (binary) {
            at++;
            length--;
        } /* fall through */
    case TEXT:
        used = to->offsets[row];
        if (length <= 16 && after >= 16)
            memcpy(to->data + used, at, 16);
        else
            memcpy(to->data + used, at, length);
        to->offsets[row + 1] = used + (int32_t)length;
        return 1;
    case UUID:
        if (binary) {
            memcpy(to->data + 16 * row, at, 16);
            return 1;
        }
        return pgf_uuid(at, length, to->data + 16 * row);
    case DATE:
        if (binary)
            days = (int32_t)pgf_load4(at) + 10957;
        else if (!pgf_date(at, length, &days))
            return 0;
        ((int32_t *)to->data)[row] = days;
        return 1;
    case TIMESTAMPTZ:
        if (binary)
            number = (int64_t)pgf_load8(at) + 946684800000000;
        else if (!pgf_timestamp(at, length, 1, &number))
            return 0;
        ((int64_t *)to->data)[row] = number;
        return 1;
    }
    return 0;
}

/* Put nulls for the rows up to `count` that have no tuple on this side. */
static inline void fill(side *to, int64_t count, int32_t width)
{
    for (int32_t c = 0; c < width; c++) {
        column *at = &to->columns[c];
        for (int64_t row = to->filled; row < count; row++)
            at->validity[row >> 3] &= (uint8_t) ~(1 << (row & 7));
        if (at->offsets)
            for (int64_t row = to->filled; row < count; row++)
                at->offsets[row + 1] = at->offsets[to->filled];
    }
    to->filled = count;
}

/* Put a tuple into the columns of a side. The result is its end, or NULL. */
static inline const uint8_t *take(
    side *to, int64_t row, const uint8_t *at, const uint8_t *end, int32_t width,
    const uint8_t *floor, const uint8_t *ceiling)
{
    if (end - at < 2 || (int32_t)pgf_load2(at) != width)
        return NULL;
    at += 2;
    if (to->filled < row)
        fill(to, row, width);
    for (int32_t c = 0; c < width; c++) {
        if (at >= end)
            return NULL;
        uint8_t kind = *at++;
        column *column = &to->columns[c];
        if (kind == 't' || kind == 'b') {
            if (end - at < 4)
                return NULL;
            uint32_t length = pgf_load4(at);
            at += 4;
            if (length > (size_t)(end - at))
                return NULL;
            if (!convert(column, row, at, length, kind == 'b', floor, ceiling))
                return NULL;
            at += length;
        } else {
            column->validity[row >> 3] &= (uint8_t) ~(1 << (row & 7));
            if (column->offsets)
                column->offsets[row + 1] = column->offsets[row];
        }
    }
    to->filled = row + 1;
    return at;
}

/* The number of rows; the columns' buffers are large enough, and their validity bits are set. The
 * columns of `before` are left alone where no row has an old tuple.
 */
int64_t layout(
    const uint8_t *data, const int64_t *offsets, int64_t count, column *before, column *after,
    int32_t width)
{
    int64_t row = 0;
    const uint8_t *ceiling = data + offsets[count];
    side old = {before, 0}, new = {after, 0};
    for (int64_t i = 0; i < count; i++) {
        const uint8_t *at = data + offsets[i];
        const uint8_t *end = data + offsets[i + 1];
        uint8_t tag = at[0];
        if (tag != 'I' && tag != 'U' && tag != 'D')
            continue;
        if (end - at < 8)
            return -1;
        at += 5;
        if (*at == 'K') {
            at = take(&old, row, at + 1, end, width, data, ceiling);
            if (!at || (tag == 'D') != (at == end))
                return -1;
        }
        if (tag != 'D') {
            if (*at != 'N')
                return -1;
            at = take(&new, row, at + 1, end, width, data, ceiling);
        }
        if (at != end)
            return -1;
        row++;
    }
    if (old.filled)
        fill(&old, row, width);
    fill(&new, row, width);
    return row;
}
