/* Pack nested values in text or binary format. columnar/packed.py describes the packed form.
 *
 * Like converters, the functions return PGF_DONE, which is 0, or the reason why the value was not
 * packed.
 */
#ifndef PGOUTPUT_FAST_NESTED_H
#define PGOUTPUT_FAST_NESTED_H

#include "_converters.h"

/* --- packing ---------------------------------------------------------------------------------- */

/* A packer appends a packed value to a variable column. */
typedef struct {
    pgf_column *column;
    int64_t used; /* bytes of the column, including the bytes packed so far */
    /* The bytes that may be read around the value. */
    const uint8_t *floor, *ceiling;
} pgf_packer;

static int pgf_pack(
    pgf_packer *packer, pgf_part *part, const uint8_t *at, size_t length, int binary);

/* Make room for `more` bytes, and for SLACK. */
static inline int pgf_pack_room(pgf_packer *packer, int64_t more)
{
    int64_t size = packer->used + more;
    return size + SLACK <= packer->column->room ? PGF_DONE : pgf_make_room(packer->column, size);
}

static inline int pgf_pack_bytes(pgf_packer *packer, const void *at, int32_t size)
{
    int status = pgf_pack_room(packer, size);
    if (status == PGF_DONE) {
        memcpy(packer->column->data + packer->used, at, (size_t)size);
        packer->used += size;
    }
    return status;
}

static inline int pgf_pack_null(pgf_packer *packer)
{
    int32_t size = -1;
    return pgf_pack_bytes(packer, &size, 4);
}

static inline int pgf_pack_flag(pgf_packer *packer, int flag)
{
    uint8_t packed[5];
    int32_t size = 1;
    memcpy(packed, &size, 4);
    packed[4] = (uint8_t)flag;
    return pgf_pack_bytes(packer, packed, 5);
}

/* Pack a value that is not nested. Its converter stores it in the part's cell, a column of one row,
 * whose memory is set to the end of the packed bytes.
 */
static int pgf_pack_scalar(
    pgf_packer *packer, pgf_part *part, const uint8_t *at, size_t length, int binary)
{
    pgf_column *column = packer->column, *cell = &part->cell;
    int status;
    if (part->width < 0) {
        cell->data = column->data;
        cell->room = column->room;
        cell->offsets[0] = (int32_t)packer->used;
    } else {
        status = pgf_pack_room(packer, part->width + 1);
        if (status != PGF_DONE)
            return status;
        cell->data = column->data + packer->used;
        cell->data[0] = 0; /* a bool sets only one bit */
    }
    status = pgf_convert_one(
        cell, part->codes[!binary], 0, at, (uint32_t)length, packer->floor, packer->ceiling);
    if (part->width < 0) {
        column->data = cell->data;
        column->room = cell->room;
    }
    if (status == PGF_DONE) {
        if (part->width < 0)
            packer->used = cell->offsets[1];
        else
            packer->used += part->width ? part->width : 1;
    }
    return status;
}

/* Pack a part, with its size in front of it. */
static int pgf_pack_part(
    pgf_packer *packer, pgf_part *part, const uint8_t *at, size_t length, int binary)
{
    int64_t place = packer->used;
    int32_t size = 0;
    int status = pgf_pack_bytes(packer, &size, 4);
    if (status == PGF_DONE)
        status = pgf_pack(packer, part, at, length, binary);
    if (status != PGF_DONE)
        return status;
    size = (int32_t)(packer->used - place - 4);
    memcpy(packer->column->data + place, &size, 4);
    return PGF_DONE;
}

/* --- text ------------------------------------------------------------------------------------- */

/* The bytes that a word without quotes cannot contain: 1 marks them for arrays, 2 for ranges, 4 for
 * composites. In an array, a word cannot contain the delimiter either.
 */
static const uint8_t PGF_SPECIAL[256] = {
    ['\t'] = 7, ['\n'] = 7, ['\v'] = 7, ['\f'] = 7, ['\r'] = 7, [' '] = 7, ['"'] = 7, ['\\'] = 7,
    ['{'] = 1, ['}'] = 1, ['('] = 6, [')'] = 6, [','] = 6, ['['] = 2, [']'] = 2,
};

/* Find the closing quote of a word. `at` is behind the opening quote. Return NULL without a
 * closing quote, or if a backslash escapes another byte than expected. Store the number of
 * escaping bytes in *escapes.
 *
 * A backslash escapes a backslash. In arrays a backslash also escapes a quote. In ranges and
 * composites (`doubled`) a second quote escapes a quote.
 */
static const uint8_t *pgf_quote(
    const uint8_t *at, const uint8_t *end, int doubled, size_t *escapes)
{
    for (*escapes = 0; at < end; at++) {
        if (*at == '\\') {
            if (end - at < 2 || (at[1] != '\\' && (doubled || at[1] != '"')))
                return NULL;
            at++;
            ++*escapes;
        } else if (*at == '"') {
            if (!doubled || end - at < 2 || at[1] != '"')
                return at;
            at++;
            ++*escapes;
        }
    }
    return NULL;
}

/* Pack a part from between quotes, without its escaping bytes. */
static int pgf_pack_quoted(
    pgf_packer *packer, pgf_part *part, const uint8_t *at, size_t length, size_t escapes)
{
    if (escapes == 0)
        return pgf_pack_part(packer, part, at, length, 0);
    uint8_t few[256];
    uint8_t *word = length <= sizeof few ? few : malloc(length);
    if (!word)
        return PGF_NO_MEMORY;
    size_t n = 0;
    few[0] = 0; /* against a warning: compilers do not see that the loop writes it */
    for (size_t i = 0; i < length; i++) {
        if (at[i] == '\\' || at[i] == '"')
            i++;
        word[n++] = at[i];
    }
    pgf_packer inside = *packer;
    inside.floor = word;
    inside.ceiling = word + n;
    int status = pgf_pack_part(&inside, part, word, n, 0);
    packer->used = inside.used;
    if (word != few)
        free(word);
    return status;
}

/* Pack a bound of a range or a field of a composite, and move *at behind it. It is a word in
 * quotes, or a word that ends before a byte that PGF_SPECIAL marks with `special`. An empty word
 * without quotes is NULL: then *is_there is set to 0.
 */
static int pgf_pack_word(
    pgf_packer *packer, pgf_part *part, const uint8_t **at, const uint8_t *end, uint8_t special,
    int *is_there)
{
    const uint8_t *first = *at, *last = first;
    size_t escapes;
    *is_there = 1;
    if (first < end && *first == '"') {
        last = pgf_quote(first + 1, end, 1, &escapes);
        if (!last)
            return PGF_UNUSUAL;
        *at = last + 1;
        return pgf_pack_quoted(packer, part, first + 1, (size_t)(last - first - 1), escapes);
    }
    while (last < end && !(PGF_SPECIAL[*last] & special))
        last++;
    *at = last;
    if (first < last)
        return pgf_pack_part(packer, part, first, (size_t)(last - first), 0);
    *is_there = 0;
    return pgf_pack_null(packer);
}

/* Pack an array of one dimension whose subscripts begin at 1. Other arrays are unusual. */
static int pgf_pack_array_text(
    pgf_packer *packer, pgf_part *part, const uint8_t *at, size_t length)
{
    const uint8_t *end = at + length - 1, *first;
    pgf_part *element = part->children;
    size_t escapes;
    int status;
    if (length < 2 || at[0] != '{' || end[0] != '}')
        return PGF_UNUSUAL;
    if (length == 2)
        return PGF_DONE;
    for (;;) {
        first = ++at;
        if (at < end && *at == '"') {
            at = pgf_quote(first + 1, end, 0, &escapes);
            if (!at)
                return PGF_UNUSUAL;
            status = pgf_pack_quoted(
                packer, element, first + 1, (size_t)(at - first - 1), escapes);
            at++;
        } else {
            while (at < end && *at != part->delimiter && !(PGF_SPECIAL[*at] & 1))
                at++;
            if (at == first)
                return PGF_UNUSUAL;
            if (at - first == 4 && (first[0] | 0x20) == 'n' && (first[1] | 0x20) == 'u'
                && (first[2] | 0x20) == 'l' && (first[3] | 0x20) == 'l') {
                if (memcmp(first, "NULL", 4) != 0)
                    return PGF_UNUSUAL;
                status = pgf_pack_null(packer);
            } else {
                status = pgf_pack_part(packer, element, first, (size_t)(at - first), 0);
            }
        }
        if (status != PGF_DONE)
            return status;
        if (at == end)
            return PGF_DONE;
        if (*at != part->delimiter)
            return PGF_UNUSUAL;
    }
}

static int pgf_pack_range_flags(pgf_packer *packer, int lower_inc, int upper_inc, int is_empty)
{
    int status;
    if ((status = pgf_pack_flag(packer, lower_inc)) || (status = pgf_pack_flag(packer, upper_inc)))
        return status;
    return pgf_pack_flag(packer, is_empty);
}

static int pgf_pack_empty_range(pgf_packer *packer)
{
    int status;
    if ((status = pgf_pack_null(packer)) || (status = pgf_pack_null(packer)))
        return status;
    return pgf_pack_range_flags(packer, 0, 0, 1);
}

/* Pack a range that is not empty, and move *at behind it. */
static int pgf_pack_bounds(
    pgf_packer *packer, pgf_part *part, const uint8_t **at, const uint8_t *end)
{
    int lower, upper, lower_inc, upper_inc, status;
    if (*at == end || (**at != '[' && **at != '('))
        return PGF_UNUSUAL;
    lower_inc = *(*at)++ == '[';
    if ((status = pgf_pack_word(packer, &part->children[0], at, end, 2, &lower)))
        return status;
    if (*at == end || *(*at)++ != ',')
        return PGF_UNUSUAL;
    if ((status = pgf_pack_word(packer, &part->children[1], at, end, 2, &upper)))
        return status;
    if (*at == end || (**at != ']' && **at != ')'))
        return PGF_UNUSUAL;
    upper_inc = *(*at)++ == ']';
    if ((lower_inc && !lower) || (upper_inc && !upper))
        return PGF_UNUSUAL;
    return pgf_pack_range_flags(packer, lower_inc, upper_inc, 0);
}

static int pgf_pack_range_text(
    pgf_packer *packer, pgf_part *part, const uint8_t *at, size_t length)
{
    const uint8_t *end = at + length;
    int status;
    if (length == 5 && memcmp(at, "empty", 5) == 0)
        return pgf_pack_empty_range(packer);
    status = pgf_pack_bounds(packer, part, &at, end);
    return status == PGF_DONE && at != end ? PGF_UNUSUAL : status;
}

static int pgf_pack_multirange_text(
    pgf_packer *packer, pgf_part *part, const uint8_t *at, size_t length)
{
    const uint8_t *end = at + length - 1;
    int64_t place;
    int32_t size = 0;
    int status;
    if (length < 2 || *at++ != '{' || *end != '}' || part->children->syntax != PGF_RANGE)
        return PGF_UNUSUAL;
    if (at == end)
        return PGF_DONE;
    for (;;) {
        place = packer->used;
        if ((status = pgf_pack_bytes(packer, &size, 4))
            || (status = pgf_pack_bounds(packer, part->children, &at, end)))
            return status;
        size = (int32_t)(packer->used - place - 4);
        memcpy(packer->column->data + place, &size, 4);
        if (at == end)
            return PGF_DONE;
        if (*at++ != ',')
            return PGF_UNUSUAL;
    }
}

static int pgf_pack_composite_text(
    pgf_packer *packer, pgf_part *part, const uint8_t *at, size_t length)
{
    const uint8_t *end = at + length - 1;
    int is_there, status;
    if (length < 2 || *at++ != '(' || end[0] != ')' || part->n_children == 0)
        return PGF_UNUSUAL;
    for (int32_t i = 0; i < part->n_children; i++) {
        if (i > 0 && (at == end || *at++ != ','))
            return PGF_UNUSUAL;
        if ((status = pgf_pack_word(packer, &part->children[i], &at, end, 4, &is_there)))
            return status;
    }
    return at == end ? PGF_DONE : PGF_UNUSUAL;
}

static int pgf_pack_vector_text(
    pgf_packer *packer, pgf_part *part, const uint8_t *at, size_t length)
{
    const uint8_t *end = at + length - 1, *first;
    int32_t count = 0;
    int status;
    if (length < 3 || at[0] != '[' || end[0] != ']')
        return PGF_UNUSUAL;
    while (at < end) {
        first = ++at;
        while (at < end && *at != ',')
            at++;
        status = pgf_pack_part(packer, part->children, first, (size_t)(at - first), 0);
        if (status != PGF_DONE)
            return status;
        count++;
    }
    return count <= 16000 && (part->shape != PGF_FIXED_LIST || count == part->width)
        ? PGF_DONE : PGF_UNUSUAL;
}

/* --- binary values ---------------------------------------------------------------------------- */

/* Pack a part behind its big-endian length of four bytes, and move *at behind it. The length -1 is
 * NULL.
 */
static int pgf_pack_sized(
    pgf_packer *packer, pgf_part *part, const uint8_t **at, const uint8_t *end, int *is_there)
{
    uint32_t length;
    if (end - *at < 4)
        return PGF_UNUSUAL;
    length = pgf_load4(*at);
    *at += 4;
    *is_there = length != 0xFFFFFFFF;
    if (!*is_there)
        return pgf_pack_null(packer);
    /* Unsigned: a negative length is longer than any value. */
    if (length > (size_t)(end - *at))
        return PGF_UNUSUAL;
    *at += length;
    return pgf_pack_part(packer, part, *at - length, length, 1);
}

static int pgf_pack_array_binary(
    pgf_packer *packer, pgf_part *part, const uint8_t *at, size_t length)
{
    const uint8_t *end = at + length;
    pgf_part *element = part->children;
    uint32_t dimensions, count;
    int is_there, status;
    if (length < 12 || pgf_load4(at + 4) > 1
        || (element->type_id && pgf_load4(at + 8) != element->type_id))
        return PGF_UNUSUAL;
    dimensions = pgf_load4(at);
    if (dimensions == 0)
        return length == 12 ? PGF_DONE : PGF_UNUSUAL;
    if (dimensions != 1 || length < 20 || pgf_load4(at + 16) != 1)
        return PGF_UNUSUAL;
    count = pgf_load4(at + 12);
    at += 20;
    if (count == 0 || count > (size_t)(end - at) / 4)
        return PGF_UNUSUAL;
    for (; count > 0; count--)
        if ((status = pgf_pack_sized(packer, element, &at, end, &is_there)))
            return status;
    return at == end ? PGF_DONE : PGF_UNUSUAL;
}

static int pgf_pack_range_binary(
    pgf_packer *packer, pgf_part *part, const uint8_t *at, size_t length)
{
    enum { IS_EMPTY = 1, LOWER_INC = 2, UPPER_INC = 4, NO_LOWER = 8, NO_UPPER = 16 };
    const uint8_t *end = at + length;
    int flags, is_there = 1, status;
    if (length < 1)
        return PGF_UNUSUAL;
    flags = *at++;
    if (flags == IS_EMPTY)
        return at == end ? pgf_pack_empty_range(packer) : PGF_UNUSUAL;
    if (flags & ~(LOWER_INC | UPPER_INC | NO_LOWER | NO_UPPER)
        || (flags & LOWER_INC && flags & NO_LOWER) || (flags & UPPER_INC && flags & NO_UPPER))
        return PGF_UNUSUAL;
    for (int i = 0; i < 2; i++) {
        if (flags & (i ? NO_UPPER : NO_LOWER))
            status = pgf_pack_null(packer);
        else
            status = pgf_pack_sized(packer, &part->children[i], &at, end, &is_there);
        if (status != PGF_DONE)
            return status;
        if (!is_there)
            return PGF_UNUSUAL;
    }
    if (at != end)
        return PGF_UNUSUAL;
    return pgf_pack_range_flags(packer, !!(flags & LOWER_INC), !!(flags & UPPER_INC), 0);
}

static int pgf_pack_multirange_binary(
    pgf_packer *packer, pgf_part *part, const uint8_t *at, size_t length)
{
    enum { IS_EMPTY = 1 };
    const uint8_t *end = at + length;
    uint32_t count;
    int is_there, status;
    if (length < 4)
        return PGF_UNUSUAL;
    count = pgf_load4(at);
    at += 4;
    for (; count > 0; count--) {
        /* The flags of a range follow its length. No range in a multirange is empty. */
        if (end - at < 5 || at[4] == IS_EMPTY)
            return PGF_UNUSUAL;
        if ((status = pgf_pack_sized(packer, part->children, &at, end, &is_there)))
            return status;
        if (!is_there)
            return PGF_UNUSUAL;
    }
    return at == end ? PGF_DONE : PGF_UNUSUAL;
}

static int pgf_pack_composite_binary(
    pgf_packer *packer, pgf_part *part, const uint8_t *at, size_t length)
{
    const uint8_t *end = at + length;
    int is_there, status;
    if (length < 4 || pgf_load4(at) != (uint32_t)part->n_children)
        return PGF_UNUSUAL;
    at += 4;
    for (int32_t i = 0; i < part->n_children; i++) {
        pgf_part *field = &part->children[i];
        if (end - at < 4 || (field->type_id && pgf_load4(at) != field->type_id))
            return PGF_UNUSUAL;
        at += 4;
        if ((status = pgf_pack_sized(packer, field, &at, end, &is_there)))
            return status;
    }
    return at == end ? PGF_DONE : PGF_UNUSUAL;
}

static int pgf_pack_vector_binary(
    pgf_packer *packer, pgf_part *part, const uint8_t *at, size_t length)
{
    uint32_t count = length < 4 ? 0 : pgf_load2(at);
    int32_t size = 4;
    uint32_t number;
    uint8_t *to;
    int status;
    if (count == 0 || count > 16000 || length != 4 + 4 * (size_t)count || pgf_load2(at + 2) != 0
        || (part->shape == PGF_FIXED_LIST && count != (uint32_t)part->width))
        return PGF_UNUSUAL;
    if ((status = pgf_pack_room(packer, 8 * (int64_t)count)))
        return status;
    to = packer->column->data + packer->used;
    for (uint32_t i = 0; i < count; i++, to += 8) {
        number = pgf_load4(at + 4 + 4 * i);
        if ((number & 0x7F800000) == 0x7F800000) /* NaN or infinity */
            return PGF_UNUSUAL;
        memcpy(to, &size, 4);
        memcpy(to + 4, &number, 4);
    }
    packer->used += 8 * (int64_t)count;
    return PGF_DONE;
}

/* Pack a value. A value that is not nested is packed as a column of its type stores it. */
static int pgf_pack(
    pgf_packer *packer, pgf_part *part, const uint8_t *at, size_t length, int binary)
{
    switch (part->syntax) {
    case PGF_ARRAY:
        return (binary ? pgf_pack_array_binary : pgf_pack_array_text)(packer, part, at, length);
    case PGF_RANGE:
        return (binary ? pgf_pack_range_binary : pgf_pack_range_text)(packer, part, at, length);
    case PGF_COMPOSITE:
        return (binary ? pgf_pack_composite_binary : pgf_pack_composite_text)(
            packer, part, at, length);
    case PGF_MULTIRANGE:
        return (binary ? pgf_pack_multirange_binary : pgf_pack_multirange_text)(
            packer, part, at, length);
    case PGF_VECTOR:
        return (binary ? pgf_pack_vector_binary : pgf_pack_vector_text)(packer, part, at, length);
    default:
        return pgf_pack_scalar(packer, part, at, length, binary);
    }
}

/* Store a value in `row` of a nested column. */
static int pgf_pack_row(
    pgf_column *column, int64_t row, const uint8_t *at, size_t length, int binary,
    const uint8_t *floor, const uint8_t *ceiling)
{
    pgf_packer packer = {column, column->offsets[row], floor, ceiling};
    int status = pgf_pack(&packer, column->part, at, length, binary);
    if (status == PGF_DONE)
        column->offsets[row + 1] = (int32_t)packer.used;
    return status;
}

#endif
