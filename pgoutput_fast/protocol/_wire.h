/* Read the bytes of frames: the offsets of messages' fields, and the columns of tuples.
 *
 * Every function checks each bound before it reads. The exception is pgf_take_column: its caller
 * has checked the whole tuple.
 */
#ifndef PGOUTPUT_FAST_WIRE_H
#define PGOUTPUT_FAST_WIRE_H

#include "_loads.h"

#include <stddef.h>
#include <stdint.h>

/* --- messages --------------------------------------------------------------------------------- */

/* The longest frame in bytes: the same number as errors.MAX_FRAME_LENGTH. A pgf_slice has 30 bits
 * for the length of a value. No server sends a longer frame.
 */
enum { PGF_MAX_FRAME = 0x3FFFFFFF };

/* The most columns of a tuple, the same number as wire.MAX_COLUMNS: a signed 16-bit integer counts
 * the columns.
 */
enum { PGF_MAX_COLUMNS = 0x7FFF };

/* Offsets in bytes of the fields that C reads, outside stream chunks. Inside a stream chunk, the
 * messages I, U, D, R, Y, T and M have an xid behind their tag: add PGF_XID_SIZE to each offset.
 * `end` is the length of a message that has a fixed length. A test compares all offsets with the
 * table of messages in protocol/wire.py.
 */
#define PGF_WIRE_FIELDS(X) \
    X(BEGIN, 'B', final_lsn, 1) \
    X(BEGIN, 'B', commit_time, 9) \
    X(BEGIN, 'B', xid, 17) \
    X(BEGIN, 'B', end, 21) \
    X(COMMIT, 'C', flags, 1) \
    X(COMMIT, 'C', commit_lsn, 2) \
    X(COMMIT, 'C', end_lsn, 10) \
    X(COMMIT, 'C', commit_time, 18) \
    X(COMMIT, 'C', end, 26) \
    X(INSERT, 'I', relation_id, 1) \
    X(INSERT, 'I', new, 5) \
    X(UPDATE, 'U', relation_id, 1) \
    X(UPDATE, 'U', old, 5) \
    X(DELETE, 'D', relation_id, 1) \
    X(DELETE, 'D', old, 5) \
    X(RELATION, 'R', relation_id, 1) \
    X(TRUNCATE, 'T', relation_count, 1) \
    X(TRUNCATE, 'T', options, 5) \
    X(TRUNCATE, 'T', relation_ids, 6) \
    X(MESSAGE, 'M', lsn, 2) \
    X(MESSAGE, 'M', prefix, 10) \
    X(STREAM_START, 'S', xid, 1) \
    X(STREAM_COMMIT, 'c', xid, 1) \
    X(STREAM_ABORT, 'A', xid, 1) \
    X(BEGIN_PREPARE, 'b', xid, 25) \
    X(PREPARE, 'P', xid, 26) \
    X(STREAM_PREPARE, 'p', xid, 26) \
    X(COMMIT_PREPARED, 'K', xid, 26) \
    X(ROLLBACK_PREPARED, 'r', xid, 34)

enum {
#define PGF_FIELD(message, tag, field, offset) PGF_##message##_##field = offset,
    PGF_WIRE_FIELDS(PGF_FIELD)
#undef PGF_FIELD
    PGF_XID = 1, /* inside a stream chunk: the xid follows the tag */
    PGF_XID_SIZE = 4,
    /* Insert, Update and Delete begin with the same fields: relation, marker, tuple. */
    PGF_ROW_relation_id = PGF_INSERT_relation_id,
    PGF_ROW_marker = PGF_INSERT_new,
    PGF_ROW_tuple = PGF_ROW_marker + 1, /* the number of columns */
    PGF_TUPLE_HEAD = 3, /* bytes in front of a tuple's columns: marker, number of columns */
    PGF_VALUE_HEAD = 5, /* bytes in front of a column's value: kind, length */
    PGF_ROW_columns = PGF_ROW_marker + PGF_TUPLE_HEAD,
};

typedef struct {
    char tag;
    const char *name;
    int offset;
} pgf_wire_field;

/* --- columns ---------------------------------------------------------------------------------- */

/* One column of a tuple: the offset of its value in the frame, and length << 2 | kind. */
typedef struct {
    uint32_t offset;
    uint32_t length_and_kind;
} pgf_slice;

enum { PGF_KIND_NULL, PGF_KIND_UNCHANGED, PGF_KIND_TEXT, PGF_KIND_BINARY };

/* Read the column at `at` as a slice. Return where the next column begins; NULL: malformed. */
static inline const uint8_t *pgf_read_column(
    const uint8_t *frame, const uint8_t *at, const uint8_t *end, pgf_slice *column)
{
    if (at >= end)
        return NULL;
    uint8_t kind = at[0];
    if (kind == 't' || kind == 'b') {
        if (end - at < PGF_VALUE_HEAD)
            return NULL;
        uint32_t length = pgf_load4(at + 1);
        at += PGF_VALUE_HEAD;
        /* Unsigned: a negative length is longer than any frame. */
        if (length > (size_t)(end - at))
            return NULL;
        column->offset = (uint32_t)(at - frame);
        column->length_and_kind = length << 2 | (kind == 't' ? PGF_KIND_TEXT : PGF_KIND_BINARY);
        return at + length;
    }
    if (kind != 'n' && kind != 'u')
        return NULL;
    at++;
    column->offset = (uint32_t)(at - frame);
    column->length_and_kind = kind == 'n' ? PGF_KIND_NULL : PGF_KIND_UNCHANGED;
    return at;
}

/* Read `count` columns as slices. Return where the last column ends; NULL: one is malformed. */
static inline const uint8_t *pgf_read_slices(
    const uint8_t *frame, const uint8_t *at, const uint8_t *end, pgf_slice *slice, uint32_t count)
{
    for (const pgf_slice *last = slice + count; slice < last; slice++) {
        at = pgf_read_column(frame, at, end, slice);
        if (!at)
            return NULL;
    }
    return at;
}

/* Return where the tuple at `position` ends. Return -1 if the tuple is malformed, or if `width` is
 * not -1 and the tuple has another number of columns. `position` must not be greater than `end`.
 */
static inline ptrdiff_t pgf_walk_tuple(
    const uint8_t *frame, ptrdiff_t position, ptrdiff_t end, int32_t width)
{
    if (end - position < 2)
        return -1;
    const uint8_t *at = frame + position + 2, *frame_end = frame + end;
    uint32_t count = pgf_load2(frame + position);
    pgf_slice ignored;
    if (count > PGF_MAX_COLUMNS || (width >= 0 && count != (uint32_t)width))
        return -1;
    for (; count > 0; count--) {
        at = pgf_read_column(frame, at, frame_end, &ignored);
        if (!at)
            return -1;
    }
    return at - frame;
}

/* Read the column at `position` as a slice, and return where the next column begins. No bound is
 * checked: pgf_walk_tuple has checked the tuple before the frame's message was made.
 */
static inline ptrdiff_t pgf_take_column(
    const uint8_t *frame, ptrdiff_t position, pgf_slice *column)
{
    uint8_t kind = frame[position];
    if (kind == 't' || kind == 'b') {
        uint32_t length = pgf_load4(frame + position + 1);
        column->offset = (uint32_t)(position + PGF_VALUE_HEAD);
        if (kind == 't')
            column->length_and_kind = length << 2 | PGF_KIND_TEXT;
        else
            column->length_and_kind = length << 2 | PGF_KIND_BINARY;
        return position + PGF_VALUE_HEAD + length;
    }
    column->offset = (uint32_t)(position + 1);
    if (kind == 'n')
        column->length_and_kind = PGF_KIND_NULL;
    else
        column->length_and_kind = PGF_KIND_UNCHANGED;
    return position + 1;
}

#endif
