/* Frames from outside, as the compiled modules read them. */
#ifndef PGOUTPUT_FAST_FRAMES_H
#define PGOUTPUT_FAST_FRAMES_H

#include <stddef.h>
#include <stdint.h>

/* --- big-endian loads ------------------------------------------------------------------------- */

static inline uint32_t pgf_load2(const uint8_t *at)
{
    return (uint32_t)at[0] << 8 | at[1];
}

static inline uint32_t pgf_load4(const uint8_t *at)
{
    return (uint32_t)at[0] << 24 | (uint32_t)at[1] << 16 | (uint32_t)at[2] << 8 | at[3];
}

static inline uint64_t pgf_load8(const uint8_t *at)
{
    return (uint64_t)pgf_load4(at) << 32 | pgf_load4(at + 4);
}

/* --- frames ----------------------------------------------------------------------------------- */

/* Longer ones would not fit into slices, and no server sends them. */
enum { PGF_MAX_FRAME = 0x3FFFFFFF };

/* Frames in one piece of memory, between offsets, or each at a place of its own. */
typedef struct {
    int64_t count;
    const int64_t *offsets; /* count + 1; NULL where pointers are */
    const uint8_t *base;
    const uint8_t *end;
    const uint8_t **pointers;
    const int64_t *lengths;
} pgf_source;

/* A frame, and the bytes around it that may be read. */
typedef struct {
    const uint8_t *at;
    int64_t length;
    const uint8_t *floor;
    const uint8_t *ceiling;
} pgf_frame;

static inline void pgf_take_frame(const pgf_source *source, int64_t i, pgf_frame *frame)
{
    if (source->offsets) {
        frame->at = source->base + source->offsets[i];
        frame->length = source->offsets[i + 1] - source->offsets[i];
        frame->floor = source->base;
        frame->ceiling = source->end;
    } else {
        frame->at = source->pointers[i];
        frame->length = source->lengths[i];
        frame->floor = frame->at;
        frame->ceiling = frame->at + frame->length;
    }
}

/* --- columns ---------------------------------------------------------------------------------- */

/* One column of a tuple: where its value begins in the frame, and its length and kind in one word,
 * length << 2 | kind.
 */
typedef struct {
    uint32_t offset;
    uint32_t length_and_kind;
} pgf_slice;

enum { PGF_KIND_NULL, PGF_KIND_UNCHANGED, PGF_KIND_TEXT, PGF_KIND_BINARY };

/* The slices of a tuple's columns; where the last one ends, NULL if one is malformed. */
static inline const uint8_t *pgf_take_slices(
    const uint8_t *frame, const uint8_t *at, const uint8_t *end, pgf_slice *slice, uint32_t count)
{
    for (const pgf_slice *last = slice + count; slice < last; slice++) {
        if (at >= end)
            return NULL;
        uint8_t kind = at[0];
        if (kind == 't' || kind == 'b') {
            if (end - at < 5)
                return NULL;
            uint32_t length = pgf_load4(at + 1);
            at += 5;
            /* Unsigned: a negative length is longer than any frame. */
            if (length > (size_t)(end - at))
                return NULL;
            slice->offset = (uint32_t)(at - frame);
            slice->length_and_kind = length << 2
                | (kind == 't' ? PGF_KIND_TEXT : PGF_KIND_BINARY);
            at += length;
        } else if (kind == 'n' || kind == 'u') {
            at++;
            slice->offset = (uint32_t)(at - frame);
            slice->length_and_kind = kind == 'n' ? PGF_KIND_NULL : PGF_KIND_UNCHANGED;
        } else {
            return NULL;
        }
    }
    return at;
}

#endif
