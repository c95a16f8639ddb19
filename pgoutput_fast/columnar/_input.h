/* Find frames in memory. */
#ifndef PGOUTPUT_FAST_INPUT_H
#define PGOUTPUT_FAST_INPUT_H

#include <stdint.h>

/* Frames in one buffer: frame i lies from offsets[i] to offsets[i + 1], in bytes from `base`. If
 * `offsets` is NULL, each frame has its own pointer and length.
 */
typedef struct {
    int64_t count;
    const int64_t *offsets; /* count + 1 */
    const uint8_t *base;
    const uint8_t *end;
    const uint8_t **pointers;
    const int64_t *lengths;
} pgf_source;

/* A frame. The bytes from `floor` to `ceiling` may be read: the frame and its neighbours. */
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

#endif
