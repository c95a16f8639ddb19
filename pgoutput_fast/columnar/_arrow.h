/* The structures of the Arrow C data interface, and an atomic reference count.
 * https://arrow.apache.org/docs/format/CDataInterface.html
 */
#ifndef PGOUTPUT_FAST_ARROW_H
#define PGOUTPUT_FAST_ARROW_H

#include <stdint.h>

#ifndef ARROW_C_DATA_INTERFACE
#define ARROW_C_DATA_INTERFACE

#define ARROW_FLAG_DICTIONARY_ORDERED 1
#define ARROW_FLAG_NULLABLE 2
#define ARROW_FLAG_MAP_KEYS_SORTED 4

struct ArrowSchema {
    const char *format;
    const char *name;
    const char *metadata;
    int64_t flags;
    int64_t n_children;
    struct ArrowSchema **children;
    struct ArrowSchema *dictionary;
    void (*release)(struct ArrowSchema *);
    void *private_data;
};

struct ArrowArray {
    int64_t length;
    int64_t null_count;
    int64_t offset;
    int64_t n_buffers;
    int64_t n_children;
    const void **buffers;
    struct ArrowArray **children;
    struct ArrowArray *dictionary;
    void (*release)(struct ArrowArray *);
    void *private_data;
};

#endif

#ifndef ARROW_C_STREAM_INTERFACE
#define ARROW_C_STREAM_INTERFACE

struct ArrowArrayStream {
    int (*get_schema)(struct ArrowArrayStream *, struct ArrowSchema *);
    int (*get_next)(struct ArrowArrayStream *, struct ArrowArray *);
    const char *(*get_last_error)(struct ArrowArrayStream *);
    void (*release)(struct ArrowArrayStream *);
    void *private_data;
};

#endif

/* Add to a reference count, and return the sum. This is atomic: any thread of any consumer may
 * free a batch.
 */
#if defined(_MSC_VER)
#include <intrin.h>
static inline int64_t pgf_add(int64_t *count, int64_t change)
{
    return _InterlockedExchangeAdd64(count, change) + change;
}
#else
static inline int64_t pgf_add(int64_t *count, int64_t change)
{
    return __atomic_add_fetch(count, change, __ATOMIC_ACQ_REL);
}
#endif

#endif
