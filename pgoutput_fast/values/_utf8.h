/* Copy text to a column, and check that it is UTF-8.
 *
 * The parameter `after` is the number of bytes that may be read behind the value. Functions read
 * these bytes to load whole vectors, as the functions of _convert.h do in front of a value.
 */
#ifndef PGOUTPUT_FAST_UTF8_H
#define PGOUTPUT_FAST_UTF8_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "_simd.h"

enum { PGF_SHORT = 32 /* bytes; shorter text is copied without a branch on its length */ };

/* Copy up to PGF_SHORT bytes. Return whether these bytes are ASCII. PGF_SHORT bytes must be
 * readable at `at` and writable at `to`.
 *
 * This copies 16 bytes twice, though one copy is enough for most texts. With a branch, processors
 * mispredict lengths that vary around 16.
 */
static inline int pgf_copy_short(uint8_t *to, const uint8_t *at, size_t length)
{
#if PGF_SSE2
    __m128i first = _mm_loadu_si128((const __m128i *)at);
    __m128i second = _mm_loadu_si128((const __m128i *)(at + 16));
    _mm_storeu_si128((__m128i *)to, first);
    _mm_storeu_si128((__m128i *)(to + 16), second);
    uint64_t high = (uint32_t)_mm_movemask_epi8(first);
    high |= (uint64_t)(uint32_t)_mm_movemask_epi8(second) << 16;
    return !(high & ((UINT64_C(1) << length) - 1));
#else
    uint8_t seen = 0;
    for (size_t i = 0; i < length; i++)
        seen |= to[i] = at[i];
    return seen < 0x80;
#endif
}

/* Copy a value. Return whether it is ASCII. `length` + PGF_SHORT bytes must be writable at `to`. */
static inline int pgf_copy_text(uint8_t *to, const uint8_t *at, size_t length, size_t after)
{
#if PGF_SSE2
    if (length <= PGF_SHORT && length + after >= PGF_SHORT)
        return pgf_copy_short(to, at, length);
    if (length >= 16) {
        __m128i seen = _mm_setzero_si128();
        size_t i = 0;
        for (; i + 64 <= length; i += 64) {
            __m128i a = _mm_loadu_si128((const __m128i *)(at + i));
            __m128i b = _mm_loadu_si128((const __m128i *)(at + i + 16));
            __m128i c = _mm_loadu_si128((const __m128i *)(at + i + 32));
            __m128i d = _mm_loadu_si128((const __m128i *)(at + i + 48));
            _mm_storeu_si128((__m128i *)(to + i), a);
            _mm_storeu_si128((__m128i *)(to + i + 16), b);
            _mm_storeu_si128((__m128i *)(to + i + 32), c);
            _mm_storeu_si128((__m128i *)(to + i + 48), d);
            seen = _mm_or_si128(seen, _mm_or_si128(_mm_or_si128(a, b), _mm_or_si128(c, d)));
        }
        for (; i + 16 <= length; i += 16) {
            __m128i a = _mm_loadu_si128((const __m128i *)(at + i));
            _mm_storeu_si128((__m128i *)(to + i), a);
            seen = _mm_or_si128(seen, a);
        }
        if (i < length) {
            /* Copy the last 16 bytes. They overlap the copy before. */
            __m128i a = _mm_loadu_si128((const __m128i *)(at + length - 16));
            _mm_storeu_si128((__m128i *)(to + length - 16), a);
            seen = _mm_or_si128(seen, a);
        }
        return _mm_movemask_epi8(seen) == 0;
    }
#else
    (void)after;
#endif
    uint8_t seen = 0;
    for (size_t i = 0; i < length; i++)
        seen |= to[i] = at[i];
    return seen < 0x80;
}

static inline int pgf_is_utf8(const uint8_t *at, size_t length)
{
    const uint8_t *end = at + length;
    while (at < end) {
        uint8_t first = *at;
        if (first < 0x80) {
            uint64_t word;
            while (end - at >= 8) {
                memcpy(&word, at, 8);
                if (word & 0x8080808080808080ull)
                    break;
                at += 8;
            }
            while (at < end && *at < 0x80)
                at++;
        } else if (first < 0xE0) {
            if (first < 0xC2 || end - at < 2 || (at[1] & 0xC0) != 0x80)
                return 0;
            at += 2;
        } else if (first < 0xF0) {
            /* E0 80 to E0 9F are overlong forms, ED A0 to ED BF are surrogates. */
            if (end - at < 3 || (at[1] & 0xC0) != 0x80 || (at[2] & 0xC0) != 0x80
                || (first == 0xE0 && at[1] < 0xA0) || (first == 0xED && at[1] > 0x9F))
                return 0;
            at += 3;
        } else {
            if (first > 0xF4 || end - at < 4 || (at[1] & 0xC0) != 0x80 || (at[2] & 0xC0) != 0x80
                || (at[3] & 0xC0) != 0x80 || (first == 0xF0 && at[1] < 0x90)
                || (first == 0xF4 && at[1] > 0x8F))
                return 0;
            at += 4;
        }
    }
    return 1;
}

#if PGF_AVX2
/* The errors of two successive bytes, as bits. Three tables give the errors that are possible with
 * each half of the first byte and with the upper half of the second byte. The bytes have an error
 * if its bit is set in all three. Keiser and Lemire, "Validating UTF-8 in less than one
 * instruction per byte", 2020.
 */
enum {
    PGF_TOO_SHORT = 1, /* a lead byte, then a lead byte or ASCII */
    PGF_TOO_LONG = 2, /* ASCII, then a continuation byte */
    PGF_OVERLONG_3 = 4,
    PGF_TOO_LARGE = 8,
    PGF_SURROGATE = 16,
    PGF_OVERLONG_2 = 32,
    PGF_OVERLONG_4 = 64, /* F0 80 to F0 8F; also F5 and above before 80 to 8F */
    PGF_TWO_CONTINUATIONS = 128, /* valid only in a character of three or four bytes */
    PGF_ANY_LOW = PGF_TOO_SHORT | PGF_TOO_LONG | PGF_TWO_CONTINUATIONS,
    PGF_LOW_5 = PGF_ANY_LOW | PGF_TOO_LARGE | PGF_OVERLONG_4,
    PGF_CONTINUATION = PGF_TOO_LONG | PGF_OVERLONG_2 | PGF_TWO_CONTINUATIONS,
};

static const uint8_t PGF_FIRST_HIGH[16] = {
    PGF_TOO_LONG, PGF_TOO_LONG, PGF_TOO_LONG, PGF_TOO_LONG, PGF_TOO_LONG, PGF_TOO_LONG,
    PGF_TOO_LONG, PGF_TOO_LONG, PGF_TWO_CONTINUATIONS, PGF_TWO_CONTINUATIONS,
    PGF_TWO_CONTINUATIONS, PGF_TWO_CONTINUATIONS, PGF_TOO_SHORT | PGF_OVERLONG_2, PGF_TOO_SHORT,
    PGF_TOO_SHORT | PGF_OVERLONG_3 | PGF_SURROGATE, PGF_TOO_SHORT | PGF_TOO_LARGE | PGF_OVERLONG_4,
};
static const uint8_t PGF_FIRST_LOW[16] = {
    PGF_ANY_LOW | PGF_OVERLONG_2 | PGF_OVERLONG_3 | PGF_OVERLONG_4, PGF_ANY_LOW | PGF_OVERLONG_2,
    PGF_ANY_LOW, PGF_ANY_LOW, PGF_ANY_LOW | PGF_TOO_LARGE, PGF_LOW_5, PGF_LOW_5, PGF_LOW_5,
    PGF_LOW_5, PGF_LOW_5, PGF_LOW_5, PGF_LOW_5, PGF_LOW_5, PGF_LOW_5 | PGF_SURROGATE, PGF_LOW_5,
    PGF_LOW_5,
};
static const uint8_t PGF_SECOND_HIGH[16] = {
    PGF_TOO_SHORT, PGF_TOO_SHORT, PGF_TOO_SHORT, PGF_TOO_SHORT, PGF_TOO_SHORT, PGF_TOO_SHORT,
    PGF_TOO_SHORT, PGF_TOO_SHORT, PGF_CONTINUATION | PGF_OVERLONG_3 | PGF_OVERLONG_4,
    PGF_CONTINUATION | PGF_OVERLONG_3 | PGF_TOO_LARGE,
    PGF_CONTINUATION | PGF_SURROGATE | PGF_TOO_LARGE,
    PGF_CONTINUATION | PGF_SURROGATE | PGF_TOO_LARGE, PGF_TOO_SHORT, PGF_TOO_SHORT, PGF_TOO_SHORT,
    PGF_TOO_SHORT,
};
/* The greatest bytes at the end of a block that ends with a complete character. If a byte is
 * greater than the byte here, its character continues in the next block.
 */
static const uint8_t PGF_COMPLETE[32] = {
    255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255,
    255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 0xEF, 0xDF, 0xBF,
};

__attribute__((target("avx2"))) static inline __m256i pgf_table(const uint8_t *table, __m256i at)
{
    __m256i both = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)table));
    return _mm256_shuffle_epi8(both, at);
}

/* Return bytes that are not zero where one of the 32 bytes of `text` is wrong. `before` holds the
 * 32 bytes in front of `text`.
 */
__attribute__((target("avx2"))) static inline __m256i pgf_wrong_utf8(__m256i text, __m256i before)
{
    __m256i middle = _mm256_permute2x128_si256(before, text, 0x21);
    __m256i last = _mm256_alignr_epi8(text, middle, 15);
    __m256i last_but_one = _mm256_alignr_epi8(text, middle, 14);
    __m256i last_but_two = _mm256_alignr_epi8(text, middle, 13);
    __m256i low = _mm256_set1_epi8(15);
    __m256i wrong = _mm256_and_si256(
        _mm256_and_si256(
            pgf_table(PGF_FIRST_HIGH, _mm256_and_si256(_mm256_srli_epi16(last, 4), low)),
            pgf_table(PGF_FIRST_LOW, _mm256_and_si256(last, low))),
        pgf_table(PGF_SECOND_HIGH, _mm256_and_si256(_mm256_srli_epi16(text, 4), low)));
    /* Two continuation bytes in a row are valid before the third or fourth byte of a character. */
    __m256i third = _mm256_subs_epu8(last_but_one, _mm256_set1_epi8(0xE0 - 0x80));
    __m256i fourth = _mm256_subs_epu8(last_but_two, _mm256_set1_epi8(0xF0 - 0x80));
    __m256i expected =
        _mm256_and_si256(_mm256_or_si256(third, fourth), _mm256_set1_epi8((char)0x80));
    return _mm256_xor_si256(expected, wrong);
}

/* The 32 bytes at PGF_FIRST + 32 - n mask the first n of 32 bytes. */
static const uint8_t PGF_FIRST[64] = {
    255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255,
    255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255,
};

/* pgf_copy_utf8() in one pass over the text. */
__attribute__((target("avx2"), noinline)) static int pgf_copy_utf8_avx2(
    uint8_t *to, const uint8_t *at, size_t length, size_t after)
{
    __m256i before = _mm256_setzero_si256(), wrong = before, incomplete = before;
    __m256i complete = _mm256_loadu_si256((const __m256i *)PGF_COMPLETE);
    uint8_t rest[32] = {0};
    size_t i = 0;
    for (;;) {
        __m256i text;
        if (i + 32 <= length) {
            text = _mm256_loadu_si256((const __m256i *)(at + i));
            _mm256_storeu_si256((__m256i *)(to + i), text);
        } else {
            /* Zeros behind the end are ASCII: a character that is cut off is an error then. */
            size_t left = length - i;
            if (left + after >= 32) {
                text = _mm256_and_si256(
                    _mm256_loadu_si256((const __m256i *)(at + i)),
                    _mm256_loadu_si256((const __m256i *)(PGF_FIRST + 32 - left)));
            } else {
                memcpy(rest, at + i, left);
                text = _mm256_loadu_si256((const __m256i *)rest);
            }
            _mm256_storeu_si256((__m256i *)(to + i), text);
        }
        if (_mm256_movemask_epi8(text) == 0) {
            wrong = _mm256_or_si256(wrong, incomplete);
            incomplete = _mm256_setzero_si256();
        } else {
            wrong = _mm256_or_si256(wrong, pgf_wrong_utf8(text, before));
            incomplete = _mm256_subs_epu8(text, complete);
        }
        before = text;
        if (i + 32 > length)
            break;
        i += 32;
    }
    return _mm256_testz_si256(wrong, wrong);
}
#endif

/* Copy a value as pgf_copy_text does. Return whether it is UTF-8. */
static inline int pgf_copy_utf8(uint8_t *to, const uint8_t *at, size_t length, size_t after)
{
#if PGF_AVX2
    if (length + after >= 32 && __builtin_cpu_supports("avx2"))
        return pgf_copy_utf8_avx2(to, at, length, after);
#endif
    return pgf_copy_text(to, at, length, after) || pgf_is_utf8(at, length);
}

#endif
