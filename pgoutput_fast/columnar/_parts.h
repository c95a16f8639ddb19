/* Make the arrays of nested columns from packed values when a batch ends.
 *
 * columnar/packed.py describes packed values. The functions of fields, or _nested.h, made them,
 * not a server: their sizes are not checked again.
 */
#ifndef PGOUTPUT_FAST_PARTS_H
#define PGOUTPUT_FAST_PARTS_H

#include "_columns.h"

/* Make room for `room` validity bits. Set the new bits, from `before` on: valid. */
static int pgf_make_valid(pgf_part *part, int64_t before, int64_t room)
{
    if (!pgf_resize(&part->validity, pgf_bits(room)))
        return 0;
    memset(part->validity + pgf_bits(before), 0xFF, (size_t)(pgf_bits(room) - pgf_bits(before)));
    return 1;
}

/* Make room for `more` values. Return 0 without memory. */
static int pgf_reserve(pgf_part *part, int64_t more)
{
    int64_t room = part->room;
    if (part->count + more <= room)
        return 1;
    room = part->count + more > room * 2 ? part->count + more : room * 2;
    room = room < 64 ? 64 : room;
    if (part->shape == PGF_FIXED
        && !pgf_resize(&part->data, part->width ? room * part->width : pgf_bits(room)))
        return 0;
    if ((part->shape == PGF_VARIABLE || part->shape == PGF_LIST)
        && !pgf_resize(&part->offsets, (room + 1) * 4))
        return 0;
    if (part->validity && !pgf_make_valid(part, part->room, room))
        return 0;
    part->room = room;
    return 1;
}

/* Append a packed value of `size` bytes, or null if `size` is -1. Return 0 without memory. */
static int pgf_put(pgf_part *part, const uint8_t *at, int32_t size)
{
    int64_t row = part->count;
    const uint8_t *end = at + (size < 0 ? 0 : size);
    int32_t length = -1, i;
    int64_t used;
    pgf_part *child = part->children;
    if (row == part->room && !pgf_reserve(part, 1))
        return 0;
    if (size < 0) {
        if (!part->validity && !pgf_make_valid(part, 0, part->room))
            return 0;
        pgf_set_bit(part->validity, row, 0);
        part->nulls++;
    }
    part->count = row + 1;
    switch (part->shape) {
    case PGF_FIXED:
        if (part->width == 0)
            pgf_set_bit(part->data, row, size > 0 && at[0]);
        else if (size < 0)
            memset(part->data + row * part->width, 0, (size_t)part->width);
        else
            memcpy(part->data + row * part->width, at, (size_t)part->width);
        break;
    case PGF_VARIABLE:
        if (row == 0)
            part->offsets[0] = 0;
        used = part->offsets[row];
        if (used + (end - at) > part->data_room) {
            part->data_room = (used + (end - at)) * 2 + 64;
            if (!pgf_resize(&part->data, part->data_room))
                return 0;
        }
        if (end > at)
            memcpy(part->data + used, at, (size_t)(end - at));
        part->offsets[row + 1] = (int32_t)(used + (end - at));
        break;
    case PGF_LIST:
        if (row == 0)
            part->offsets[0] = 0;
        /* Each element has four bytes with its size, so that there are at most this many. */
        if (!pgf_reserve(child, (end - at) / 4))
            return 0;
        while (at < end) {
            memcpy(&length, at, 4);
            at += 4;
            if (length == 4 && child->shape == PGF_FIXED && child->width == 4)
                memcpy(child->data + 4 * child->count++, at, 4);
            else if (length == 8 && child->shape == PGF_FIXED && child->width == 8)
                memcpy(child->data + 8 * child->count++, at, 8);
            else if (!pgf_put(child, at, length))
                return 0;
            at += length < 0 ? 0 : length;
        }
        part->offsets[row + 1] = (int32_t)child->count;
        break;
    default:
        for (i = 0; i < (part->shape == PGF_STRUCT ? part->n_children : part->width); i++) {
            if (at < end) {
                memcpy(&length, at, 4);
                at += 4;
            }
            if (!pgf_put(child, at, length))
                return 0;
            at += length < 0 ? 0 : length;
            child += part->shape == PGF_STRUCT;
        }
    }
    return 1;
}

/* Make the array empty. Do not free its memory: an arena owns it now, or it has been freed. */
static void pgf_forget_part(pgf_part *part)
{
    part->count = part->nulls = part->room = part->data_room = 0;
    part->validity = part->data = NULL;
    part->offsets = NULL;
}

static void pgf_free_part(pgf_part *part)
{
    for (int32_t i = 0; i < part->n_children; i++)
        pgf_free_part(&part->children[i]);
    free(part->validity);
    free(part->data);
    free(part->offsets);
    pgf_forget_part(part);
}

#endif
