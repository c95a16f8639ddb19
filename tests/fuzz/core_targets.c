/* libFuzzer targets for the C headers, without Python. Build with -DTARGET=tuples, values, nested or
 * rows; fuzz.py makes powers.h, python_targets.py the seeds.
 *
 * The sanitizers find reads and writes outside of memory. Beyond that, a target aborts if two ways
 * to the same result differ: vectors against loops, a value alone in memory against the same value
 * between other bytes, a reader that checks against one that does not.
 */
#include <stdio.h>
#include <stdlib.h>

#include "_nested.h"
#include "_parts.h"
#include "_rows.h"

#include "powers.h"

#define CHECK(condition) \
    do { \
        if (!(condition)) { \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
            abort(); \
        } \
    } while (0)

enum { AROUND = 32 /* bytes on each side of a value that has neighbours */ };

/* A value in a block of memory that ends with it, and begins with it unless it has neighbours. */
typedef struct {
    uint8_t *block;
    const uint8_t *at, *floor, *ceiling;
} place;

static place put_alone(const uint8_t *data, size_t size)
{
    place put = {.block = malloc(size + !size)};
    if (size)
        memcpy(put.block, data, size);
    put.at = put.floor = put.block;
    put.ceiling = put.block + size;
    return put;
}

static place put_between(const uint8_t *data, size_t size, uint8_t neighbour)
{
    place put = {.block = malloc(size + 2 * AROUND)};
    memset(put.block, neighbour, size + 2 * AROUND);
    if (size)
        memcpy(put.block + AROUND, data, size);
    put.at = put.block + AROUND;
    put.floor = put.block;
    put.ceiling = put.block + size + 2 * AROUND;
    return put;
}

/* --- tuples: the columns of a row ------------------------------------------------------------- */

static int tuples(const uint8_t *data, size_t size)
{
    static pgf_slice slices[PGF_MAX_COLUMNS + 1];
    place frame = put_alone(data, size);
    ptrdiff_t end = pgf_walk_tuple(frame.at, 0, (ptrdiff_t)size, -1), at = 2;
    if (size >= 2) {
        uint32_t count = pgf_load2(frame.at);
        CHECK(pgf_walk_tuple(frame.at, 0, (ptrdiff_t)size, (int32_t)count) == end);
        if (count <= PGF_MAX_COLUMNS) {
            const uint8_t *behind =
                pgf_read_slices(frame.at, frame.at + 2, frame.ceiling, slices, count);
            CHECK(behind ? behind - frame.at == end : end == -1);
        }
        for (uint32_t i = 0; end >= 0 && i < count; i++) {
            pgf_slice column;
            at = pgf_take_column(frame.at, at, &column);
            CHECK(memcmp(&column, &slices[i], sizeof column) == 0);
            CHECK(column.offset + (size_t)(column.length_and_kind >> 2) <= size);
        }
        CHECK(end < 0 || at == end);
    } else {
        CHECK(end == -1);
    }
    free(frame.block);
    return 0;
}

/* --- values: each converter ------------------------------------------------------------------- */

static int32_t width_of(uint8_t code)
{
    switch (code) {
    case BOOL_TEXT: case BOOL_BINARY: case SKIP:
        return 0;
    case INT2_TEXT: case SAME2:
        return 2;
    case UINT4_TEXT: case FLOAT4_TEXT: case SAME4: case INT4_TEXT: case DATE_TEXT:
    case DATE_BINARY: case LABEL:
        return 4;
    case UINT4_WIDE_TEXT: case UINT4_WIDE: case TIME_TEXT: case TIME_BINARY: case TIME_NS_TEXT:
    case TIME_NS_BINARY: case SAME8: case TIMESTAMP_BINARY: case INT8_TEXT: case TIMESTAMP_TEXT:
    case TIMESTAMPTZ_TEXT: case FLOAT8_TEXT:
        return 8;
    case INTERVAL_BINARY: case UUID_TEXT: case UUID_BINARY: case DECIMAL_TEXT:
    case DECIMAL_BINARY:
        return 16;
    default:
        return -1;
    }
}

static pgf_labels labels;

static void make_labels(void)
{
    static const char *names[] = {"sad", "ok", "happy", ""};
    static int32_t ends[5], slots[8];
    static uint8_t text[16];
    labels = (pgf_labels){.count = 4, .mask = 7, .ends = ends, .text = text, .slots = slots};
    for (int32_t i = 0; i < 4; i++) {
        size_t length = strlen(names[i]);
        memcpy(text + ends[i], names[i], length);
        ends[i + 1] = ends[i] + (int32_t)length;
        *pgf_slot(&labels, text + ends[i], length) = i + 1;
    }
}

/* A column of `rows` rows for a converter. Its memory ends where it may not be written. */
static void make_column(pgf_column *column, uint8_t code, int32_t width, int64_t rows)
{
    *column = (pgf_column){.code = code, .width = width, .scale = 2};
    if (code == LABEL)
        column->labels = &labels;
    else
        column->limit = 1000000000000000000;
    column->data = calloc(1, (size_t)(width > 0 ? rows * width : width ? SLACK + 1 : rows / 8 + 1));
    column->room = SLACK;
    column->offsets = calloc((size_t)rows + 1, 4);
}

/* What a value in a column has to be, by other code. */
static void check_value(uint8_t code, const pgf_column *column, const uint8_t *at, size_t length)
{
    char text[64] = {0};
    double real;
    int64_t number, time;
    int32_t days;
    memcpy(&number, column->data, column->width == 8 ? 8 : 0);
    memcpy(text, at, length < sizeof text ? length : 0);
    switch (code) {
    case INT8_TEXT:
        CHECK(length < sizeof text && strtoll(text, NULL, 10) == number);
        break;
    case FLOAT8_TEXT:
        real = strtod(text, NULL);
        CHECK(length >= sizeof text || memcmp(&real, &number, 8) == 0);
        break;
    case TIMESTAMP_TEXT:
    case TIMESTAMPTZ_TEXT:
        length -= code == TIMESTAMPTZ_TEXT ? 3 : 0;
        CHECK(length >= 19 && pgf_date(at, 10, &days) && at[10] == ' '
              && pgf_time(at + 11, length - 11, &time) && days * PGF_DAY + time == number);
        break;
    }
}

static int values(const uint8_t *data, size_t size)
{
    if (size < 2)
        return 0;
    /* Columns are kept, as to make them takes longer than to fill them. */
    static pgf_column all[2][2][CONVERTER_COUNT];
    uint8_t code = data[0] % CONVERTER_COUNT, flags = data[1];
    const uint8_t *value = data + 2;
    uint32_t length = (uint32_t)(size - 2);
    int is_decimal = code == DECIMAL_TEXT || code == DECIMAL_BINARY, is_wide = is_decimal && flags & 1;
    int32_t width = is_wide ? 32 : width_of(code);
    if (code == NESTED_TEXT || code == NESTED_BINARY)
        return 0;
    place places[2] = {put_alone(value, length), put_between(value, length, flags)};
    pgf_column *columns[2];
    int status[2];
    for (int i = 0; i < 2; i++) {
        columns[i] = &all[i][is_wide][code];
        if (!columns[i]->data)
            make_column(columns[i], code, width, 1);
        columns[i]->offsets[1] = 0;
        columns[i]->scale = flags >> 1 & 15;
        if (is_decimal)
            columns[i]->limit = flags & 32 ? 100000 : 1000000000000000000;
        status[i] = pgf_convert_one(
            columns[i], code, 0, places[i].at, length, places[i].floor, places[i].ceiling);
        CHECK(status[i] == PGF_DONE || status[i] == PGF_UNUSUAL);
        CHECK(status[i] == PGF_DONE || columns[i]->offsets[1] == 0);
        if (status[i] == PGF_DONE)
            check_value(code, columns[i], value, length);
    }
    if (code == UTF8)
        CHECK((status[0] == PGF_DONE) == pgf_is_utf8(value, length));
    CHECK(status[0] == status[1]);
    if (status[0] == PGF_DONE) {
        int32_t used = width < 0 ? columns[0]->offsets[1] : width ? width : 1;
        CHECK(columns[0]->offsets[1] == columns[1]->offsets[1]);
        CHECK(memcmp(columns[0]->data, columns[1]->data, (size_t)used) == 0);
    }
    free(places[0].block);
    free(places[1].block);
    return 0;
}

/* --- nested: arrays, ranges, composites, vectors ---------------------------------------------- */

static pgf_part *make_scalar(pgf_part *part, uint8_t text, uint8_t binary)
{
    part->width = width_of(text);
    part->shape = part->width < 0 ? PGF_VARIABLE : PGF_FIXED;
    part->codes[0] = binary;
    part->codes[1] = text;
    part->cell = (pgf_column){.width = part->width, .scale = 2, .limit = 1000000000000000000};
    part->cell.offsets = part->cell_ends;
    return part;
}

/* A part of `count` children, which are copies of those given. */
static pgf_part *make_part(
    pgf_part *part, uint8_t shape, uint8_t syntax, int32_t count, pgf_part *children)
{
    *part = (pgf_part){.shape = shape, .width = -1, .syntax = syntax, .delimiter = ','};
    part->n_children = count;
    part->children = calloc((size_t)count, sizeof *children);
    for (int32_t i = 0; i < count; i++) {
        part->children[i] = children[i];
        if (children[i].cell.offsets)
            part->children[i].cell.offsets = part->children[i].cell_ends;
    }
    return part;
}

enum { TREES = 9 };
static pgf_part trees[TREES];

static void make_trees(void)
{
    pgf_part scalars[5] = {{0}}, bounds[5] = {{0}};
    make_scalar(&scalars[0], INT4_TEXT, SAME4);
    make_scalar(&scalars[1], UTF8, UTF8);
    make_scalar(&scalars[2], BOOL_TEXT, BOOL_BINARY);
    make_scalar(&scalars[3], NUMERIC_TEXT, NUMERIC_BINARY);
    make_scalar(&scalars[4], FLOAT8_TEXT, SAME8);
    scalars[0].type_id = 23;
    for (int i = 0; i < 5; i++)
        make_scalar(&bounds[i], i < 2 ? INT4_TEXT : BOOL_TEXT, i < 2 ? SAME4 : BOOL_BINARY);
    make_part(&trees[0], PGF_LIST, PGF_ARRAY, 1, &scalars[0]);
    make_part(&trees[1], PGF_LIST, PGF_ARRAY, 1, &scalars[1]);
    make_part(&trees[2], PGF_STRUCT, PGF_RANGE, 5, bounds);
    make_part(&trees[3], PGF_STRUCT, PGF_COMPOSITE, 5, scalars);
    make_part(&trees[4], PGF_LIST, PGF_MULTIRANGE, 1, &trees[2]);
    make_part(&trees[5], PGF_LIST, PGF_ARRAY, 1, &trees[3]);
    pgf_part *element = make_scalar(&scalars[0], FLOAT4_TEXT, SAME4);
    make_part(&trees[6], PGF_LIST, PGF_VECTOR, 1, element);
    make_part(&trees[7], PGF_FIXED_LIST, PGF_VECTOR, 1, element)->width = 3;
    pgf_part fields[2] = {trees[1], trees[2]};
    make_part(&trees[8], PGF_STRUCT, PGF_COMPOSITE, 2, fields);
}

static int nested(const uint8_t *data, size_t size)
{
    if (size < 2)
        return 0;
    pgf_part *part = &trees[data[0] % TREES];
    uint8_t binary = data[0] >> 7;
    const uint8_t *value = data + 2;
    size_t length = size - 2;
    place places[2] = {put_alone(value, length), put_between(value, length, data[1])};
    static pgf_column columns[2];
    int status[2];
    for (int i = 0; i < 2; i++) {
        if (!columns[i].data)
            make_column(&columns[i], NESTED_TEXT, -1, 1);
        columns[i].code = binary ? NESTED_BINARY : NESTED_TEXT;
        columns[i].part = part;
        columns[i].offsets[1] = 0;
        status[i] = pgf_convert_one(
            &columns[i], columns[i].code, 0, places[i].at, (uint32_t)length, places[i].floor,
            places[i].ceiling);
        CHECK(status[i] == PGF_DONE || status[i] == PGF_UNUSUAL);
        CHECK(status[i] == PGF_DONE || columns[i].offsets[1] == 0);
    }
    CHECK(status[0] == status[1]);
    if (status[0] == PGF_DONE) {
        int32_t used = columns[0].offsets[1];
        CHECK(columns[1].offsets[1] == used);
        CHECK(memcmp(columns[0].data, columns[1].data, (size_t)used) == 0);
        /* A copy of its own finds what reads beyond the packed value. */
        place packed = put_alone(columns[0].data, (size_t)used);
        CHECK(pgf_put(part, packed.at, used) && pgf_put(part, packed.at, -1));
        CHECK(pgf_put(part, packed.at, used) && part->count == 3 && part->nulls == 1);
        free(packed.block);
        pgf_free_part(part);
    }
    free(places[0].block);
    free(places[1].block);
    return 0;
}

/* --- rows: the loop over frames --------------------------------------------------------------- */

enum { MOST_ROWS = 16, MOST_FRAMES = 32, MOST_WIDTH = 9 };

/* The converters of some relations. Their OIDs are their numbers. */
static const struct {
    char kind;
    uint8_t codes[MOST_WIDTH];
} RELATIONS[] = {
    {'t', {INT4_TEXT, UTF8, END}},
    {'b', {SAME4, SAME8, TIMESTAMP_BINARY, BOOL_BINARY, UUID_BINARY, JSONB_BINARY, UTF8, SAME2, END}},
    {'t', {TIMESTAMP_TEXT, FLOAT8_TEXT, DECIMAL_TEXT, BOOL_TEXT, DATE_TEXT, INT8_TEXT, BYTEA_TEXT, SKIP, END}},
    {'t', {UTF8, UTF8, UTF8, END}},
};
enum { RELATION_COUNT = sizeof RELATIONS / sizeof *RELATIONS };

static void make_rows(pgf_rows *rows, int number)
{
    int32_t width = 0;
    while (RELATIONS[number].codes[width] != END)
        width++;
    *rows = (pgf_rows){.wanted = 1, .width = width, .limit = MOST_ROWS, .capacity = MOST_ROWS};
    rows->fixed = 50;
    rows->after.columns = calloc((size_t)width + 1, sizeof(pgf_column));
    for (int32_t c = 0; c < width; c++) {
        pgf_column *column = &rows->after.columns[c];
        uint8_t code = RELATIONS[number].codes[c];
        make_column(column, code, width_of(code), MOST_ROWS);
        column->kind = (uint8_t)RELATIONS[number].kind;
        if (c != 1) /* column 1 has no validity bitmap yet, so that the loop stops at its null */
            column->validity = calloc(1, MOST_ROWS / 8);
    }
    rows->after.columns[width].code = END;
    rows->flags = malloc(MOST_ROWS);
    rows->xids = malloc(MOST_ROWS * 8);
    rows->subxids = malloc(MOST_ROWS * 8);
    rows->lsns = malloc(MOST_ROWS * 8);
    rows->commit_lsns = malloc(MOST_ROWS * 8);
    rows->commit_times = malloc(MOST_ROWS * 8);
    rows->seqs = malloc(MOST_ROWS * 8);
}

/* Check the ends of values, and make the rows empty. */
static void end_rows(pgf_rows *rows)
{
    CHECK(rows->count <= rows->limit);
    for (int32_t c = 0; c < rows->width; c++) {
        const pgf_column *column = &rows->after.columns[c];
        for (int64_t row = 0; column->width < 0 && row < rows->count; row++)
            CHECK(column->offsets[row] <= column->offsets[row + 1]
                  && column->offsets[row + 1] <= column->room);
    }
    rows->count = rows->bytes = rows->after.filled = 0;
}

/* A byte of flags, then frames, each behind a byte with its length. */
static int rows(const uint8_t *data, size_t size)
{
    static pgf_stream stream;
    static pgf_rows relations[RELATION_COUNT];
    int64_t offsets[MOST_FRAMES + 1] = {0}, count = 0;
    uint64_t lsns[MOST_FRAMES] = {1};
    if (size < 1)
        return 0;
    stream = (pgf_stream){.wide = data[0] & 1, .in_stream = data[0] >> 1 & 1, .open_xid = 7};
    stream.max_bytes = data[0] & 4 ? 100 : 100000;
    uint8_t *base = malloc(size);
    for (size_t at = 1; at < size && count < MOST_FRAMES; count++) {
        size_t length = data[at++];
        length = length < size - at ? length : size - at;
        memcpy(base + offsets[count], data + at, length);
        offsets[count + 1] = offsets[count] + (int64_t)length;
        at += length;
    }
    /* The last frame ends with the memory that may be read. */
    base = realloc(base, (size_t)offsets[count] + !offsets[count]);
    pgf_source source = {.count = count, .offsets = offsets, .base = base};
    source.end = base + offsets[count];
    for (int i = 0; i < RELATION_COUNT; i++) {
        if (!relations[i].width)
            make_rows(&relations[i], i);
        stream.cached[i].header = pgf_header((uint32_t)i, relations[i].width);
        stream.cached[i].rows = &relations[i];
    }
    pgf_settle(&stream);
    pgf_stop stop;
    int64_t first = stream.in_stream ? PGF_XID_SIZE : 0, taken = 0, total = 0;
    int64_t end = pgf_take_rows(&stream, &source, 0, count, data[0] & 8 ? NULL : lsns, &stop);
    CHECK(end >= 0 && end <= count);
    for (int64_t i = 0; i < end; i++) {
        const uint8_t *frame = base + offsets[i];
        int64_t length = offsets[i + 1] - offsets[i];
        if (frame[0] == 'B')
            continue;
        taken++;
        CHECK(pgf_walk_tuple(frame, PGF_ROW_tuple + first, length, -1) == length);
    }
    for (int i = 0; i < RELATION_COUNT; i++) {
        total += relations[i].count;
        end_rows(&relations[i]);
    }
    CHECK(total == taken);
    free(base);
    return 0;
}

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    (void)argc, (void)argv;
    pgf_powers_of_five = POWERS;
    make_labels();
    make_trees();
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    return TARGET(data, size);
}
