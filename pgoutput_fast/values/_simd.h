/* Which vector instructions there are. */
#ifndef PGOUTPUT_FAST_SIMD_H
#define PGOUTPUT_FAST_SIMD_H

#if defined(__SSE2__) && defined(__x86_64__)
#include <emmintrin.h>
#define PGF_SSE2 1
#else
#define PGF_SSE2 0
#endif

/* Whether functions for AVX2 can be compiled; whether the processor has it is asked when they run.
 */
#if PGF_SSE2 && (defined(__GNUC__) || defined(__clang__))
#include <immintrin.h>
#define PGF_AVX2 1
#else
#define PGF_AVX2 0
#endif

#endif
