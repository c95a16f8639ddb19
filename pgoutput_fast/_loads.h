/* Read big-endian numbers: frames and binary values have no others. */
#ifndef PGOUTPUT_FAST_LOADS_H
#define PGOUTPUT_FAST_LOADS_H

#include <stdint.h>

/* Shifts, not casts: frames are not aligned. Compilers turn the shifts into one byte swap. */
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
    return (uint64_t)at[0] << 56 | (uint64_t)at[1] << 48 | (uint64_t)at[2] << 40
        | (uint64_t)at[3] << 32 | (uint64_t)at[4] << 24 | (uint64_t)at[5] << 16
        | (uint64_t)at[6] << 8 | at[7];
}

#endif
