/* Say which vector instructions the compiler can use. */
#ifndef PGOUTPUT_FAST_SIMD_H
#define PGOUTPUT_FAST_SIMD_H

#if defined(__SSE2__) && defined(__x86_64__)
#include <emmintrin.h>
#define PGF_SSE2 1
#else
#define PGF_SSE2 0
#endif

/* Whether the compiler can build functions for AVX2. Ask __builtin_cpu_supports before a call. */
#if PGF_SSE2 && (defined(__GNUC__) || defined(__clang__))
#include <immintrin.h>
#define PGF_AVX2 1
#else
#define PGF_AVX2 0
#endif

#endif
