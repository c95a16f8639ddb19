/* The structures of columns in a growing batch, which all C code shares. */
#ifndef PGOUTPUT_FAST_COLUMNS_H
#define PGOUTPUT_FAST_COLUMNS_H

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

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

/* All converters, in the order of CONVERTERS in pgoutput_fast/columnar/fields.py. The import of the
 * extension compares the names. pgf_convert in _converters.h says what each converter does.
 * pgf_take_values in _rows.h is made from these tables.
 *
 * SLOW comes first, because a new column has the code 0.
 */
#define PGF_RARE_CONVERTERS(X) \
    X(SLOW) X(INT2_TEXT) X(UINT4_TEXT) X(UINT4_WIDE_TEXT) X(SAME2) X(UINT4_WIDE) X(FLOAT4_TEXT) \
    X(NUMERIC_TEXT) X(NUMERIC_BINARY) X(ASCII) X(BYTES) X(BYTEA_TEXT) X(UUID_UTF8_TEXT) \
    X(UUID_UTF8_BINARY) X(TIME_TEXT) X(TIME_BINARY) X(TIME_NS_TEXT) X(TIME_NS_BINARY) \
    X(INTERVAL_BINARY) X(CHAR_TEXT) X(CHAR_BINARY) X(LABEL) X(NESTED_TEXT) X(NESTED_BINARY)

/* The frequent converters, with the values that they take:
 * - the kind, 't' or 'b'; 0: the kind of the column's last value;
 * - the length in bytes; PGF_ANY: the length stands in front of the value;
 * - the number of these bytes that are not stored; PGF_FIXED_WIDTH: the column has a fixed width,
 *   and its bytes are not counted.
 */
enum { PGF_ANY = 0, PGF_FIXED_WIDTH = -1 };
#define PGF_COMMON_CONVERTERS(X) \
    X(SKIP, 0, PGF_ANY, PGF_FIXED_WIDTH) \
    X(SAME4, 'b', 4, PGF_FIXED_WIDTH) \
    X(SAME8, 'b', 8, PGF_FIXED_WIDTH) \
    X(DATE_BINARY, 'b', 4, PGF_FIXED_WIDTH) \
    X(TIMESTAMP_BINARY, 'b', 8, PGF_FIXED_WIDTH) \
    X(INT4_TEXT, 't', PGF_ANY, PGF_FIXED_WIDTH) \
    X(INT8_TEXT, 't', PGF_ANY, PGF_FIXED_WIDTH) \
    X(BOOL_TEXT, 't', PGF_ANY, PGF_FIXED_WIDTH) \
    X(BOOL_BINARY, 'b', PGF_ANY, PGF_FIXED_WIDTH) \
    X(DECIMAL_TEXT, 't', PGF_ANY, PGF_FIXED_WIDTH) \
    X(DECIMAL_BINARY, 'b', PGF_ANY, PGF_FIXED_WIDTH) \
    X(TIMESTAMP_TEXT, 't', PGF_ANY, PGF_FIXED_WIDTH) \
    X(TIMESTAMPTZ_TEXT, 't', PGF_ANY, PGF_FIXED_WIDTH) \
    X(DATE_TEXT, 't', PGF_ANY, PGF_FIXED_WIDTH) \
    X(FLOAT8_TEXT, 't', PGF_ANY, PGF_FIXED_WIDTH) \
    X(UUID_TEXT, 't', PGF_ANY, PGF_FIXED_WIDTH) \
    X(UUID_BINARY, 'b', PGF_ANY, PGF_FIXED_WIDTH) \
    X(UTF8, 0, PGF_ANY, 0) \
    X(JSONB_BINARY, 'b', PGF_ANY, 1)

enum {
#define PGF_CODE(name, ...) name,
    PGF_RARE_CONVERTERS(PGF_CODE)
    PGF_COMMON_CONVERTERS(PGF_CODE)
#undef PGF_CODE
    CONVERTER_COUNT,
    FORM, /* the first value in a batch decides the column's type: text utf8, else binary */
    END, /* the code behind the last column */
};

/* The results of converters. */
enum {
    PGF_DONE,
    PGF_UNUSUAL, /* the field's function in Python decides what is stored, or refuses the value */
    PGF_NO_MEMORY,
    PGF_FULL, /* with the value, the column exceeds 32-bit offsets */
};

enum { SLACK = 32 /* bytes behind a value that pgf_copy_short may write */ };

/* Return how many bytes to allocate for a variable column of `size` bytes. 32-bit offsets limit the
 * result, so that a value for which there is room has an offset.
 */
static inline int64_t pgf_roomy(int64_t size)
{
    int64_t room = (size + SLACK) * 3 / 2 + 256;
    return room < INT32_MAX + (int64_t)SLACK ? room : INT32_MAX + (int64_t)SLACK;
}

typedef struct {
    uint8_t kind; /* 't' or 'b': the format of the last value; 0 before the first */
    uint8_t code; /* the converter for that format; SLOW before the first value */
    uint8_t codes[2]; /* the converters of binary values and of text */
    uint8_t form; /* of a FORM column: its type in this batch, as in enum Form */
    uint8_t form_codes[2]; /* of a FORM column: the converters of binary values and of text */
    int32_t width; /* bytes of a value; 0: one bit, -1: variable */
    uint32_t scale;
    uint8_t *validity; /* NULL until a value is null */
    uint8_t *data; /* NULL: the column is skipped, or a column of `before` without a value yet */
    int32_t *offsets;
    int64_t room; /* bytes allocated for `data` of a variable column */
    union {
        uint64_t limit; /* of a decimal: 10**precision, 10**18 at most */
        const struct pgf_labels *labels; /* of an enum */
        struct pgf_part *part; /* of a nested column */
    };
    void *field; /* borrowed from the layout */
} pgf_column;

/* The columns of `before` or of `after`, and one more column with the code END.
 *
 * Most old tuples are keys, so that most columns of `before` are null in all rows. A column of
 * `before` gets memory with its first value. Until then its `kind` is 0: no value has this kind,
 * so that the loop over values stops at the first one.
 */
typedef struct {
    pgf_column *columns;
    int64_t filled; /* rows in the columns; pad() appends later rows without a tuple as nulls */
    int64_t capacity; /* rows */
} pgf_side;

enum { PGF_INSERT, PGF_UPDATE, PGF_DELETE, PGF_TRUNCATE };

/* The flags of a row. */
enum {
    PGF_OP = 3, /* the bits of PGF_INSERT to PGF_TRUNCATE */
    PGF_OLD_KEY = 4,
    PGF_OLD_ROW = 8,
    PGF_IN_STREAM = 16,
    PGF_HAS_XID = 32,
    PGF_HAS_COMMIT = 64,
    PGF_HAS_AFTER = 128,
};

/* The rows of one version of a relation since its last batch. */
typedef struct {
    void *owner; /* the RelationRows */
    int wanted; /* whether the table is decoded */
    int32_t width; /* columns of the relation */
    int64_t count;
    int64_t limit; /* pgf_take_rows may append rows up to this count; 0: none */
    int64_t capacity;
    int64_t bytes; /* of variable values, and of the names of columns that were not sent */
    int64_t fixed; /* all other bytes of a row */
    int64_t side_fixed; /* the part of `fixed` for `after`; `before` takes the same number */
    int truncated; /* whether a row is a TRUNCATE */
    int has_before; /* whether a row has an old tuple: then `fixed` includes `before` */
    /* The columns beside `before` and `after`. */
    uint8_t *flags;
    uint8_t *xids; /* 4 bytes each, 8 bytes if the stream is `wide` */
    uint8_t *subxids; /* written only for rows in stream chunks */
    uint64_t *lsns;
    uint64_t *commit_lsns;
    int64_t *commit_times;
    int64_t *seqs;
    pgf_side before;
    pgf_side after;
    /* Columns of `after` that were not sent: row i has the column numbers in `unchanged` from
     * unchanged_ends[i] to unchanged_ends[i + 1]. The first `unchanged_filled` rows have ends.
     */
    int32_t *unchanged_ends;
    int64_t unchanged_filled;
    int32_t *unchanged;
    int64_t unchanged_count;
    int64_t unchanged_bytes; /* of their names, and one byte for each */
    int64_t unchanged_room;
    const char **names; /* of the relation's columns */
    struct pgf_part *parts; /* one per column, used for nested columns and enums */
    ptrdiff_t blocks; /* the most blocks of memory in the arena of a batch */
    /* From the last batch: the next batch is expected to be similar. */
    int64_t usual; /* rows */
    int64_t reserved; /* bytes of memory, the expected size of this batch */
    int64_t *usual_bytes; /* of variable values, one number per column */
    int64_t *form_rows; /* per FORM column: the row that decided its type in this batch */
} pgf_rows;

/* A cached relation, and the header of its rows with a new tuple and no old one: see pgf_header. */
typedef struct {
    uint64_t header;
    pgf_rows *rows;
} pgf_cached;

enum {
    PGF_CACHED = 256, /* slots of the cache; the last byte of an OID is its slot */
    PGF_CACHED_BY = PGF_ROW_relation_id + 3, /* this byte's offset outside stream chunks */
};

/* The state of the stream that rows need. */
typedef struct {
    int wide; /* for Spark, which has no unsigned numbers: xids of 64 bits, LSNs below 2**63 */
    int in_stream, in_transaction, has_commit;
    uint32_t open_xid, xid;
    uint64_t commit_lsn;
    int64_t commit_time;
    int64_t seq; /* number of the next row in the transaction */
    int64_t held; /* bytes of the collected rows of all relations */
    int64_t max_bytes;
    /* The values that all rows of the transaction share: see pgf_settle. */
    uint8_t row_flags;
    uint32_t row_xid;
    uint64_t row_commit_lsn;
    int64_t row_commit_time;
    pgf_cached cached[PGF_CACHED];
} pgf_stream;

/* Microseconds from 1970 to 2000. */
#define PGF_SHIFT INT64_C(946684800000000)

static inline void pgf_set_bit(uint8_t *bits, int64_t row, int value)
{
    uint8_t mask = (uint8_t)(1 << (row & 7));
    bits[row >> 3] = (uint8_t)(value ? bits[row >> 3] | mask : bits[row >> 3] & ~mask);
}

/* Clear the bits from `from` to `to` - 1. `to` must be greater than `from`. */
static inline void pgf_clear_bits(uint8_t *bits, int64_t from, int64_t to)
{
    int64_t first = from >> 3, last = (to - 1) >> 3;
    uint8_t head = (uint8_t)(0xFF << (from & 7)), tail = (uint8_t)(0xFF >> (7 - ((to - 1) & 7)));
    if (first == last) {
        bits[first] &= (uint8_t)~(head & tail);
        return;
    }
    bits[first] &= (uint8_t)~head;
    memset(bits + first + 1, 0, (size_t)(last - first - 1));
    bits[last] &= (uint8_t)~tail;
}

/* Set the bit of each row that has one of the flags in `mask`, in a bitmap of zeros. */
static inline void pgf_flag_bits(uint8_t *bits, const uint8_t *flags, int64_t count, uint8_t mask)
{
    const uint64_t each = UINT64_C(0x0101010101010101), low = each * 0x7F;
    int64_t i = 0;
    for (; i + 8 <= count; i += 8) {
        uint64_t found = pgf_load8(flags + i) & each * mask;
        /* Reduce each byte that is not zero to one bit. Then move these bits side by side: the bit
         * of the first row, in the highest byte, becomes the lowest bit.
         */
        found = (((found & low) + low) | found) >> 7 & each;
        bits[i >> 3] = (uint8_t)(found * UINT64_C(0x8040201008040201) >> 56);
    }
    for (; i < count; i++)
        bits[i >> 3] |= (uint8_t)((flags[i] & mask) != 0) << (i & 7);
}

/* Store null in a column that has a validity bitmap. */
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

/* Store null in the rows from `from` to `to` - 1. `to` must be greater than `from`. */
static inline void pgf_set_nulls(pgf_column *column, int64_t from, int64_t to)
{
    if (to - from == 1) {
        pgf_set_null(column, from); /* after each DELETE; memset() would cost a call */
        return;
    }
    pgf_clear_bits(column->validity, from, to);
    if (column->width > 0)
        memset(column->data + from * column->width, 0, (size_t)((to - from) * column->width));
    else if (column->width == 0)
        pgf_clear_bits(column->data, from, to);
    else
        for (int64_t row = from; row < to; row++)
            column->offsets[row + 1] = column->offsets[from];
}

/* --- enums ------------------------------------------------------------------------------------ */

/* The labels of an enum: ends and text as in an Arrow array of utf8, and a hash table from labels
 * to numbers.
 */
typedef struct pgf_labels {
    int32_t count;
    uint32_t mask; /* slots - 1 */
    int32_t *ends; /* count + 1 */
    uint8_t *text;
    int32_t *slots; /* the hash table: a label's number + 1; 0: free */
} pgf_labels;

static inline uint32_t pgf_hash(const uint8_t *at, size_t length)
{
    uint32_t hash = 2166136261u; /* FNV-1a */
    for (size_t i = 0; i < length; i++)
        hash = (hash ^ at[i]) * 16777619u;
    return hash ^ hash >> 15;
}

/* Return the slot of a label, or the free slot for it. */
static inline int32_t *pgf_slot(const pgf_labels *labels, const uint8_t *at, size_t length)
{
    uint32_t slot = pgf_hash(at, length) & labels->mask;
    while (labels->slots[slot]) {
        const int32_t *ends = labels->ends + labels->slots[slot] - 1;
        if ((size_t)(ends[1] - ends[0]) == length
            && memcmp(labels->text + ends[0], at, length) == 0)
            break;
        slot = (slot + 1) & labels->mask;
    }
    return labels->slots + slot;
}

/* --- parts ------------------------------------------------------------------------------------ */

enum { PGF_FIXED, PGF_VARIABLE, PGF_LIST, PGF_FIXED_LIST, PGF_STRUCT };

/* The syntaxes of nested values, in the order of SYNTAXES in pgoutput_fast/columnar/fields.py. The
 * import of the extension compares the names.
 */
#define PGF_SYNTAXES(X) X(NO_SYNTAX) X(ARRAY) X(RANGE) X(COMPOSITE) X(VECTOR) X(MULTIRANGE)

enum {
#define PGF_SYNTAX(name) PGF_##name,
    PGF_SYNTAXES(PGF_SYNTAX)
#undef PGF_SYNTAX
    PGF_SYNTAX_COUNT,
};

/* A nested column or an enum, or a part of a nested column. */
typedef struct pgf_part {
    uint8_t shape;
    int32_t width; /* bytes of a value; 0: one bit, -1: variable; of a PGF_FIXED_LIST its length */
    int32_t n_children;
    struct pgf_part *children;
    const pgf_labels *labels; /* NULL: not an enum */
    /* How to read values. */
    uint8_t syntax; /* one of PGF_SYNTAXES */
    uint8_t delimiter; /* of an array's elements */
    uint8_t codes[2]; /* the converters of binary values and of text */
    uint32_t type_id; /* the type's OID in binary arrays and composites; 0: unknown */
    /* A column of one row, in which a converter stores a value. Its memory is the end of the nested
     * column.
     */
    pgf_column cell;
    int32_t cell_ends[2];
    /* The array that is made when a batch ends. */
    int64_t count, nulls, room; /* values */
    int64_t data_room; /* bytes allocated for `data` of PGF_VARIABLE */
    uint8_t *validity; /* NULL until a value is null */
    uint8_t *data;
    int32_t *offsets;
} pgf_part;

/* The header of a row with a new tuple and no old one: eight bytes as one number. The first byte
 * is the tag, or the last byte of the xid in a stream chunk. The other bytes are the relation's
 * OID, the tuple's marker and the number of columns. The first byte varies, so that this function
 * and pgf_load_header set all its bits. Therefore no header is 0, which marks a free slot of the
 * cache.
 */
static inline uint64_t pgf_header(uint32_t relation_id, int32_t width)
{
    return UINT64_C(0xFF) << 56 | (uint64_t)relation_id << 24 | (uint64_t)'N' << 16
        | (uint64_t)width;
}

/* Compute the values that all rows of the transaction share, from the next row on. */
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

/* --- memory ----------------------------------------------------------------------------------- */

/* Resize a block to `size` + 1 bytes, so that no block is empty. Return 0 without memory. */
static inline int pgf_resize(void *block, int64_t size)
{
    void *moved = realloc(*(void **)block, (size_t)size + 1);
    if (!moved)
        return 0;
    *(void **)block = moved;
    return 1;
}

/* Return the bytes of a bitmap for `count` rows. */
static inline int64_t pgf_bits(int64_t count)
{
    return (count + 7) / 8;
}

#endif
