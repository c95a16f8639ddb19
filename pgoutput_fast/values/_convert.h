/* Convert the bytes of a value in a tuple to the bytes of a column.
 *
 * _values.pyx uses the same functions to make the Python objects of messages.
 *
 * A function takes the value's first byte and its length in bytes. It returns 1, or 0 if the value
 * is unusual or malformed. After a 0 the caller calls a function in Python, which applies policies
 * and raises errors.
 *
 * The parameter `before` is the number of bytes that may be read in front of the value. Loads of
 * 16 bytes that begin in front of a value are three to five times as fast as loops (measured).
 * Functions without this parameter read only the value.
 *
 * This is C, not Cython, to use SSE2, which every x86-64 processor has. On other processors, loops
 * give the same results.
 */
#ifndef PGOUTPUT_FAST_CONVERT_H
#define PGOUTPUT_FAST_CONVERT_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "_loads.h"
#include "_simd.h"

/* --- digits ----------------------------------------------------------------------------------- */

static const uint64_t PGF_POWERS[20] = {
    1ull, 10ull, 100ull, 1000ull, 10000ull, 100000ull, 1000000ull, 10000000ull, 100000000ull,
    1000000000ull, 10000000000ull, 100000000000ull, 1000000000000ull, 10000000000000ull,
    100000000000000ull, 1000000000000000ull, 10000000000000000ull, 100000000000000000ull,
    1000000000000000000ull, 10000000000000000000ull,
};

static inline int pgf_digits_slow(const uint8_t *at, size_t length, uint64_t *number)
{
    uint64_t value = 0;
    for (size_t i = 0; i < length; i++) {
        uint32_t digit = (uint32_t)at[i] - '0';
        if (digit > 9)
            return 0;
        value = value * 10 + digit;
    }
    *number = value;
    return 1;
}

#if PGF_SSE2
/* The 16 bytes at PGF_LAST + n mask the last n of 16 bytes. */
static const uint8_t PGF_LAST[32] = {
    0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
    255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255,
};

/* Join digits 0 and 1, 2 and 3, and so on, to numbers of 16 bits. The first digit of a pair is the
 * tens.
 */
static inline __m128i pgf_pairs(__m128i digits)
{
    return _mm_add_epi16(
        _mm_mullo_epi16(_mm_and_si128(digits, _mm_set1_epi16(0xFF)), _mm_set1_epi16(10)),
        _mm_srli_epi16(digits, 8));
}

/* Read the bytes of `text` that `used` masks as digits of one number. */
static inline int pgf_sixteen_digits(__m128i text, __m128i used, uint64_t *number)
{
    __m128i digits = _mm_and_si128(_mm_sub_epi8(text, _mm_set1_epi8('0')), used);
    __m128i over = _mm_subs_epu8(digits, _mm_set1_epi8(9));
    if (_mm_movemask_epi8(_mm_cmpeq_epi8(over, _mm_setzero_si128())) != 0xFFFF)
        return 0;
    /* Join digits to numbers of two digits, then of four, then of eight. */
    __m128i fours = _mm_madd_epi16(pgf_pairs(digits), _mm_set1_epi32(0x00010064)); /* 100, 1 */
    fours = _mm_packs_epi32(fours, fours);
    __m128i eights = _mm_madd_epi16(fours, _mm_set1_epi32(0x00012710)); /* 10000, 1 */
    uint64_t both = (uint64_t)_mm_cvtsi128_si64(eights);
    *number = (both & 0xFFFFFFFF) * 100000000 + (both >> 32);
    return 1;
}
#endif

/* Read a text of 1 to 19 digits, and nothing else. */
static inline int pgf_digits(const uint8_t *at, size_t length, size_t before, uint64_t *number)
{
#if PGF_SSE2
    if (length <= 16 && before + length >= 16) {
        if (length == 0)
            return 0;
        return pgf_sixteen_digits(
            _mm_loadu_si128((const __m128i *)(at + length - 16)),
            _mm_loadu_si128((const __m128i *)(PGF_LAST + length)), number);
    }
#else
    (void)before;
#endif
    if (length - 1 > 18)
        return 0;
#if PGF_SSE2
    if (length > 16) {
        uint64_t head;
        if (!pgf_digits_slow(at, length - 16, &head)
            || !pgf_sixteen_digits(
                _mm_loadu_si128((const __m128i *)(at + length - 16)),
                _mm_loadu_si128((const __m128i *)(PGF_LAST + 16)), number))
            return 0;
        *number += head * PGF_POWERS[16];
        return 1;
    }
#endif
    return pgf_digits_slow(at, length, number);
}

/* Read a text of digits, with or without a minus, as a number from `least` to `greatest`. */
static inline int pgf_integer(
    const uint8_t *at, size_t length, size_t before, int64_t least, int64_t greatest,
    int64_t *value)
{
    uint64_t number;
    uint64_t negative = length > 0 && at[0] == '-';
    if (!pgf_digits(at + negative, length - negative, before + negative, &number))
        return 0;
    /* All bits are set for a minus. A branch on the sign would be mispredicted. */
    uint64_t minus = (uint64_t)0 - negative;
    uint64_t most = (uint64_t)greatest;
    most ^= (most ^ ((uint64_t)0 - (uint64_t)least)) & minus;
    *value = (int64_t)((number ^ minus) + negative);
    return number <= most;
}

/* Read a number with `scale` digits behind its point. Store its digits as one integer, and its
 * sign in `negative`. A number has at most 19 digits: more do not fit into a uint64.
 */
static inline int pgf_decimal_digits(
    const uint8_t *at, size_t length, size_t before, uint32_t scale, int *negative,
    uint64_t *number)
{
    *negative = length > 0 && at[0] == '-';
    at += *negative;
    length -= *negative;
    before += *negative;
    if (scale == 0)
        return pgf_digits(at, length, before, number);
    /* A digit before the point, the point, and the digits behind it. */
    if (length < (size_t)scale + 2 || length > 20 || at[length - scale - 1] != '.')
        return 0;
#if PGF_SSE2
    if (length <= 16 && before + length >= 16) {
        /* Shift the digits before the point by one byte, over the point. */
        __m128i text = _mm_loadu_si128((const __m128i *)(at + length - 16));
        __m128i fraction = _mm_loadu_si128((const __m128i *)(PGF_LAST + scale));
        __m128i joined = _mm_or_si128(
            _mm_and_si128(fraction, text),
            _mm_andnot_si128(fraction, _mm_slli_si128(text, 1)));
        return pgf_sixteen_digits(
            joined, _mm_loadu_si128((const __m128i *)(PGF_LAST + length - 1)), number);
    }
#endif
    uint64_t whole, fraction;
    if (!pgf_digits_slow(at, length - scale - 1, &whole)
        || !pgf_digits_slow(at + length - scale, scale, &fraction))
        return 0;
    *number = whole * PGF_POWERS[scale] + fraction;
    return 1;
}

/* Return the number of bytes behind the last point of a text; 0 without a point. */
static inline size_t pgf_behind_point(const uint8_t *at, size_t length)
{
    for (size_t i = length; i > 0; i--)
        if (at[i - 1] == '.')
            return length - i;
    return 0;
}

/* --- numeric ---------------------------------------------------------------------------------- */

/* Read a binary numeric as the integer |value| * 10**scale, below 10**19. */
static inline int pgf_numeric_digits(const uint8_t *at, size_t length, uint64_t *number)
{
    if (length < 8 || length > 18)
        return 0;
    uint32_t count = pgf_load2(at), sign = pgf_load2(at + 4), scale = pgf_load2(at + 6);
    int32_t weight = (int16_t)pgf_load2(at + 2);
    if (length != 8 + 2 * (size_t)count || ((sign & ~0x4000u) | (scale & ~0x3FFFu)))
        return 0;
    uint64_t value = 0;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t digits = pgf_load2(at + 8 + 2 * i);
        if (digits > 9999)
            return 0;
        value = value * 10000 + digits;
    }
    /* Five groups have 20 digits. */
    if (count == 5 && pgf_load2(at + 8) > 999)
        return 0;
    /* Digits of the scale behind the last group; negative if the scale ends within the group. */
    int32_t behind = (weight + 1 - (int32_t)count) * 4 + (int32_t)scale;
    if (behind != 0 && value != 0) {
        if (behind > 0) {
            if (behind > 18 || value >= PGF_POWERS[19 - behind])
                return 0;
            value *= PGF_POWERS[behind];
        } else {
            if (behind < -3 || value % PGF_POWERS[-behind] != 0)
                return 0; /* digits beyond the scale */
            value /= PGF_POWERS[-behind];
        }
    }
    *number = value;
    return 1;
}

/* Check that a text is a finite number as PostgreSQL's numeric_out prints it. */
static inline int pgf_is_numeric(const uint8_t *at, size_t length)
{
    size_t i = length > 0 && at[0] == '-';
    size_t first = i;
    while (i < length && (uint8_t)(at[i] - '0') <= 9)
        i++;
    if (i == first)
        return 0;
    if (i < length && at[i] == '.') {
        first = ++i;
        while (i < length && (uint8_t)(at[i] - '0') <= 9)
            i++;
        if (i == first)
            return 0;
    }
    return i == length;
}

enum { PGF_NUMERIC_ROOM = 80 };

static inline size_t pgf_four(char *text, uint32_t digit)
{
    text[0] = (char)('0' + digit / 1000);
    text[1] = (char)('0' + digit / 100 % 10);
    text[2] = (char)('0' + digit / 10 % 10);
    text[3] = (char)('0' + digit % 10);
    return 4;
}

/* Write the text of a binary numeric of up to 32 digits before and 32 behind the point. `text` has
 * PGF_NUMERIC_ROOM bytes. Return the length of the text, or 0.
 */
static inline size_t pgf_numeric_text(const uint8_t *at, size_t length, char *text)
{
    if (length < 8 || length > 24)
        return 0;
    int32_t count = (int32_t)pgf_load2(at);
    int32_t weight = (int16_t)pgf_load2(at + 2);
    uint32_t sign = pgf_load2(at + 4);
    int32_t scale = (int32_t)pgf_load2(at + 6);
    size_t n = 0;
    uint32_t seen = 0;
    if (length != 8 + 2 * (size_t)count || (sign & ~0x4000u) || scale > 32 || weight >= 8
        || weight < -8)
        return 0;
    if (sign)
        text[n++] = '-';
    for (int32_t group = 0; group <= weight; group++) {
        uint32_t digit = group < count ? pgf_load2(at + 8 + 2 * group) : 0;
        if (digit > 9999)
            return 0;
        seen |= digit;
        if (group > 0) {
            n += pgf_four(text + n, digit);
            continue;
        }
        if (digit == 0 && weight > 0)
            return 0; /* a leading group of zeros: no server sends it */
        if (digit >= 1000)
            text[n++] = (char)('0' + digit / 1000);
        if (digit >= 100)
            text[n++] = (char)('0' + digit / 100 % 10);
        if (digit >= 10)
            text[n++] = (char)('0' + digit / 10 % 10);
        text[n++] = (char)('0' + digit % 10);
    }
    if (weight < 0)
        text[n++] = '0';
    if (scale > 0)
        text[n++] = '.';
    size_t point = n;
    int32_t groups = (scale + 3) / 4;
    for (int32_t group = 0; group < groups; group++) {
        int32_t i = weight + 1 + group;
        uint32_t digit = i >= 0 && i < count ? pgf_load2(at + 8 + 2 * i) : 0;
        if (digit > 9999)
            return 0;
        seen |= digit;
        n += pgf_four(text + n, digit);
    }
    for (size_t i = point + (size_t)scale; i < n; i++)
        if (text[i] != '0')
            return 0; /* digits behind the scale */
    if (weight + 1 + groups < count || (sign && !seen))
        return 0;
    return point + (size_t)scale;
}

/* --- floats ----------------------------------------------------------------------------------- */

/* The first 128 bits of a power of ten, which are the first 128 bits of the same power of five. The
 * table goes from 10**PGF_LEAST_POWER to 10**PGF_GREATEST_POWER. fill_powers() in _values.pyx makes
 * it. Lemire, "Number Parsing at a Gigabyte per Second", 2021.
 */
enum { PGF_LEAST_POWER = -342, PGF_GREATEST_POWER = 308 };
typedef struct {
    uint64_t high, low;
} pgf_power;

/* Multiply two 64-bit numbers to one 128-bit number. */
static inline void pgf_multiply(uint64_t a, uint64_t b, uint64_t *high, uint64_t *low)
{
#if defined(__SIZEOF_INT128__)
    unsigned __int128 product = (unsigned __int128)a * b;
    *high = (uint64_t)(product >> 64);
    *low = (uint64_t)product;
#else
    uint64_t a0 = (uint32_t)a, a1 = a >> 32, b0 = (uint32_t)b, b1 = b >> 32;
    uint64_t p00 = a0 * b0, p01 = a0 * b1, p10 = a1 * b0, p11 = a1 * b1;
    uint64_t middle = p10 + (p00 >> 32) + (uint32_t)p01;
    *high = p11 + (middle >> 32) + (p01 >> 32);
    *low = middle << 32 | (uint32_t)p00;
#endif
}

static inline int pgf_leading_zeros(uint64_t word)
{
#if defined(__GNUC__) || defined(__clang__)
    return __builtin_clzll(word);
#else
    int n = 0;
    while (!(word >> 63)) {
        word <<= 1;
        n++;
    }
    return n;
#endif
}

/* Compute the double that is nearest to number * 10**power. Return 0 if the 128 bits of the power
 * do not decide it, if `number` is 0, or if the result is not a normal double.
 */
static inline int pgf_scaled_double(
    uint64_t number, int32_t power, const pgf_power *powers, double *value)
{
    uint64_t high, low, second, bits, mantissa;
    if (number == 0 || power < PGF_LEAST_POWER || power > PGF_GREATEST_POWER)
        return 0;
    int zeros = pgf_leading_zeros(number);
    number <<= zeros;
    pgf_power five = powers[power - PGF_LEAST_POWER];
    pgf_multiply(number, five.high, &high, &low);
    if ((high & 0x1FF) == 0x1FF) {
        uint64_t ignored;
        pgf_multiply(number, five.low, &second, &ignored);
        low += second;
        if (low < second)
            high++;
        /* The number lies too near to the middle between two doubles to round it. */
        if (low == UINT64_MAX && (high & 0x1FF) == 0x1FF)
            return 0;
    }
    int upper = (int)(high >> 63);
    mantissa = high >> (upper + 9);
    zeros += 1 ^ upper;
    /* The number may lie exactly in the middle between two doubles. */
    if (low == 0 && (high & 0x1FF) == 0 && (mantissa & 3) == 1)
        return 0;
    mantissa += mantissa & 1;
    mantissa >>= 1;
    if (mantissa >= (1ull << 53)) {
        mantissa = 1ull << 52;
        zeros--;
    }
    /* 217706 / 2**16 is so near to log2(10) that the result is right for all of these powers. */
    int64_t exponent = ((217706 * (int64_t)power) >> 16) + 1024 + 63 - zeros;
    if (exponent < 1 || exponent > 2046)
        return 0;
    bits = (mantissa & ~(1ull << 52)) | (uint64_t)exponent << 52;
    memcpy(value, &bits, 8);
    return 1;
}

/* Read a number of at most 19 digits without sign and exponent. Store its digits as one integer,
 * and the number of digits behind its point in `behind`.
 */
static inline int pgf_point_digits(
    const uint8_t *at, size_t length, size_t before, uint64_t *number, int32_t *behind)
{
#if PGF_SSE2
    if (length == 0 || length > 20 || before + length < 16)
        return 0;
    /* Find the point in the first and the last 16 bytes. */
    const __m128i point = _mm_set1_epi8('.');
    __m128i last = _mm_loadu_si128((const __m128i *)(at + length - 16));
    uint32_t found = (uint32_t)_mm_movemask_epi8(_mm_cmpeq_epi8(last, point));
    size_t whole = length;
    if (length <= 16) {
        found >>= 16 - length;
        if (found)
            whole = (size_t)__builtin_ctz(found);
    } else {
        uint32_t first = (uint32_t)_mm_movemask_epi8(
            _mm_cmpeq_epi8(_mm_loadu_si128((const __m128i *)at), point));
        found = found << (length - 16) | first;
        if (found)
            whole = (size_t)__builtin_ctz(found);
    }
    if (whole == length) {
        *behind = 0;
        return pgf_digits(at, length, before, number);
    }
    size_t scale = length - whole - 1;
    if (whole == 0 || scale == 0)
        return 0;
    *behind = (int32_t)scale;
    if (length <= 16) {
        int negative;
        return pgf_decimal_digits(at, length, before, (uint32_t)scale, &negative, number)
            && !negative; /* a second minus */
    }
    uint64_t head;
    if (!pgf_digits(at, whole, before, &head)
        || !pgf_digits(at + whole + 1, scale, before + whole + 1, number))
        return 0;
    *number += head * PGF_POWERS[scale];
    return 1;
#else
    (void)at, (void)length, (void)before, (void)number, (void)behind;
    return 0;
#endif
}

/* Read a finite decimal number of up to 19 significant digits, without sign. Point and exponent are
 * optional. Store it as `digits` * 10**`exponent`.
 */
static inline int pgf_float_digits(
    const uint8_t *at, size_t length, uint64_t *digits, int32_t *exponent)
{
    const uint8_t *end = at + length;
    uint64_t number = 0;
    int32_t power = 0, significant = 0;
    const uint8_t *first = at;
    for (; at < end && (uint8_t)(*at - '0') <= 9; at++) {
        number = number * 10 + (uint64_t)(*at - '0');
        significant += significant > 0 || number != 0;
    }
    if (at == first)
        return 0;
    if (at < end && *at == '.') {
        first = ++at;
        for (; at < end && (uint8_t)(*at - '0') <= 9; at++) {
            number = number * 10 + (uint64_t)(*at - '0');
            significant += significant > 0 || number != 0;
        }
        if (at == first)
            return 0;
        power = -(int32_t)(at - first);
    }
    if (significant > 19 || length > 400)
        return 0;
    if (at < end) {
        if (*at++ != 'e' || at == end)
            return 0;
        int down = *at == '-';
        if (*at == '-' || *at == '+')
            at++;
        if (at == end || end - at > 3)
            return 0;
        int32_t written = 0;
        for (; at < end; at++) {
            if ((uint8_t)(*at - '0') > 9)
                return 0;
            written = written * 10 + (*at - '0');
        }
        power += down ? -written : written;
    }
    *digits = number;
    *exponent = power;
    return 1;
}

/* Read a finite decimal number, with or without a minus, as a double. */
static inline int pgf_float(
    const uint8_t *at, size_t length, size_t before, const pgf_power *powers, double *value)
{
    static const double exact[23] = {
        1e0, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9, 1e10, 1e11, 1e12, 1e13, 1e14, 1e15,
        1e16, 1e17, 1e18, 1e19, 1e20, 1e21, 1e22,
    };
    int negative = length > 0 && at[0] == '-';
    uint64_t number;
    int32_t power;
    double result;
    at += negative;
    length -= (size_t)negative;
    if (pgf_point_digits(at, length, before + (size_t)negative, &number, &power))
        power = -power;
    else if (!pgf_float_digits(at, length, &number, &power))
        return 0;
    if (number == 0) {
        result = 0;
    } else if (number <= (1ull << 53) && power >= -22 && power <= 22) {
        /* Both numbers are exact as doubles, so that one operation rounds correctly (Clinger,
         * 1990).
         */
        result = (double)number;
        result = power < 0 ? result / exact[-power] : result * exact[power];
    } else if (!pgf_scaled_double(number, power, powers, &result)) {
        return 0;
    }
    *value = negative ? -result : result;
    return 1;
}

/* --- dates and times -------------------------------------------------------------------------- */

#define PGF_DAY INT64_C(86400000000) /* microseconds */

/* Days from 1970-01-01 to 2000-01-01; from 2000-01-01 to Python's first date, 0001-01-01; and to
 * its last date, 9999-12-31.
 */
enum { PGF_SHIFT_DAYS = 10957, PGF_LEAST_DAY = -730119, PGF_GREATEST_DAY = 2921939 };

/* Return two digits as a number; -1 if a byte is not a digit. */
static inline int32_t pgf_two(const uint8_t *at)
{
    uint32_t tens = (uint32_t)at[0] - '0', ones = (uint32_t)at[1] - '0';
    return tens > 9 || ones > 9 ? -1 : (int32_t)(tens * 10 + ones);
}

static inline int32_t pgf_days_in(int32_t year, int32_t month)
{
    static const uint8_t days[13] = {0, 31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31};
    return days[month]
        + (month == 2 && year % 4 == 0 && (year % 100 != 0 || year % 400 == 0));
}

/* A date and a time of day, in the numbers that Python's classes take. */
typedef struct {
    int32_t year, month, day;
} pgf_calendar_day;

typedef struct {
    int32_t hour, minute, second, microsecond;
} pgf_time_of_day;

/* Check that a date exists, and that its year is at least 1. */
static inline int pgf_is_day(const pgf_calendar_day *day)
{
    return day->year >= 1 && day->month >= 1 && day->month <= 12 && day->day >= 1
        && day->day <= pgf_days_in(day->year, day->month);
}

/* Read the ten bytes YYYY-MM-DD. The year must be at least 1. */
static inline int pgf_read_day(const uint8_t *at, pgf_calendar_day *day)
{
    int32_t century = pgf_two(at), year = pgf_two(at + 2);
    day->month = pgf_two(at + 5);
    day->day = pgf_two(at + 8);
    if ((century | year | day->month | day->day) < 0 || at[4] != '-' || at[7] != '-')
        return 0;
    day->year = year + century * 100;
    return pgf_is_day(day);
}

/* Read the fraction of a second: nothing, or a point and one to six digits. */
static inline int pgf_read_fraction(
    const uint8_t *at, size_t length, size_t before, pgf_time_of_day *time)
{
    static const int32_t scales[8] = {1000000, 1000000, 100000, 10000, 1000, 100, 10, 1};
    uint64_t fraction = 0;
    if (length > 7
        || (length > 0
            && (at[0] != '.' || !pgf_digits(at + 1, length - 1, before + 1, &fraction))))
        return 0;
    time->microsecond = (int32_t)fraction * scales[length];
    return 1;
}

/* Read HH:MM:SS[.ffffff]. */
static inline int pgf_read_time(const uint8_t *at, size_t length, pgf_time_of_day *time)
{
    if (length < 8 || at[2] != ':' || at[5] != ':')
        return 0;
    time->hour = pgf_two(at);
    time->minute = pgf_two(at + 3);
    time->second = pgf_two(at + 6);
    return (time->hour | time->minute | time->second) >= 0 && time->hour <= 23
        && time->minute <= 59 && time->second <= 59
        && pgf_read_fraction(at + 8, length - 8, 8, time);
}

#if PGF_SSE2
/* Read the 16 bytes YYYY-MM-DD HH:MM. */
static inline int pgf_read_minute(
    const uint8_t *at, pgf_calendar_day *day, pgf_time_of_day *time)
{
    const __m128i least = _mm_setr_epi8(
        '0', '0', '0', '0', '-', '0', '0', '-', '0', '0', ' ', '0', '0', ':', '0', '0');
    const __m128i range = _mm_setr_epi8(9, 9, 9, 9, 0, 9, 9, 0, 9, 9, 0, 9, 9, 0, 9, 9);
    __m128i digits = _mm_sub_epi8(_mm_loadu_si128((const __m128i *)at), least);
    __m128i over = _mm_subs_epu8(digits, range);
    if (_mm_movemask_epi8(_mm_cmpeq_epi8(over, _mm_setzero_si128())) != 0xFFFF)
        return 0;
    __m128i even = pgf_pairs(digits), odd = pgf_pairs(_mm_srli_si128(digits, 1));
    day->year = _mm_extract_epi16(even, 0) * 100 + _mm_extract_epi16(even, 1);
    day->month = _mm_extract_epi16(odd, 2);
    day->day = _mm_extract_epi16(even, 4);
    time->hour = _mm_extract_epi16(odd, 5);
    time->minute = _mm_extract_epi16(even, 7);
    return pgf_is_day(day) && time->hour <= 23 && time->minute <= 59;
}
#endif

/* Read YYYY-MM-DD HH:MM:SS[.ffffff]. If `zoned` is set, the text must end with +00. */
static inline int pgf_read_timestamp(
    const uint8_t *at, size_t length, int zoned, pgf_calendar_day *day, pgf_time_of_day *time)
{
    if (zoned) {
        if (length < 3 || memcmp(at + length - 3, "+00", 3) != 0)
            return 0;
        length -= 3;
    }
#if PGF_SSE2
    if (length < 19 || at[16] != ':' || !pgf_read_minute(at, day, time))
        return 0;
    time->second = pgf_two(at + 17);
    return time->second >= 0 && time->second <= 59
        && pgf_read_fraction(at + 19, length - 19, 19, time);
#else
    return length >= 19 && at[10] == ' ' && pgf_read_day(at, day)
        && pgf_read_time(at + 11, length - 11, time);
#endif
}

/* Return the days since 1970-01-01. */
static inline int32_t pgf_day_number(const pgf_calendar_day *day)
{
    /* Years begin in March here, so that the leap day is the last day of a year. Then
     * (153 * month + 2) / 5 days lie before a month.
     */
    int32_t early = day->month <= 2;
    int32_t year = day->year - early;
    int32_t from_march = day->month + (early ? 9 : -3);
    return 365 * year + year / 4 - year / 100 + year / 400 + (153 * from_march + 2) / 5 + day->day
        - 1 - 719468;
}

/* Return the microseconds since midnight. */
static inline int64_t pgf_microseconds(const pgf_time_of_day *time)
{
    int32_t seconds = (time->hour * 60 + time->minute) * 60 + time->second;
    return (int64_t)seconds * 1000000 + time->microsecond;
}

/* Read the text of a date as days since 1970-01-01, of a time as microseconds since midnight, and
 * of a timestamp as microseconds since 1970-01-01.
 */
static inline int pgf_date(const uint8_t *at, size_t length, int32_t *days)
{
    pgf_calendar_day day;
    if (length != 10 || !pgf_read_day(at, &day))
        return 0;
    *days = pgf_day_number(&day);
    return 1;
}

static inline int pgf_time(const uint8_t *at, size_t length, int64_t *microseconds)
{
    pgf_time_of_day time;
    if (!pgf_read_time(at, length, &time))
        return 0;
    *microseconds = pgf_microseconds(&time);
    return 1;
}

static inline int pgf_timestamp(const uint8_t *at, size_t length, int zoned, int64_t *microseconds)
{
    pgf_calendar_day day;
    pgf_time_of_day time;
    if (!pgf_read_timestamp(at, length, zoned, &day, &time))
        return 0;
    *microseconds = pgf_day_number(&day) * PGF_DAY + pgf_microseconds(&time);
    return 1;
}

/* --- hexadecimal ------------------------------------------------------------------------------ */

static inline int pgf_nibble(uint8_t character)
{
    uint32_t digit = (uint32_t)character - '0';
    uint32_t letter = ((uint32_t)character | 0x20) - 'a';
    return digit <= 9 ? (int)digit : letter <= 5 ? (int)letter + 10 : -1;
}

/* Read 2 * count hexadecimal digits as `count` bytes. */
static inline int pgf_hexadecimal(const uint8_t *at, size_t count, uint8_t *bytes)
{
    size_t i = 0;
#if PGF_SSE2
    for (; i + 8 <= count; i += 8) {
        __m128i text = _mm_loadu_si128((const __m128i *)(at + 2 * i));
        __m128i digit = _mm_sub_epi8(text, _mm_set1_epi8('0'));
        __m128i letter =
            _mm_sub_epi8(_mm_or_si128(text, _mm_set1_epi8(0x20)), _mm_set1_epi8('a'));
        __m128i is_digit = _mm_cmpeq_epi8(
            _mm_subs_epu8(digit, _mm_set1_epi8(9)), _mm_setzero_si128());
        __m128i is_letter = _mm_cmpeq_epi8(
            _mm_subs_epu8(letter, _mm_set1_epi8(5)), _mm_setzero_si128());
        if (_mm_movemask_epi8(_mm_or_si128(is_digit, is_letter)) != 0xFFFF)
            return 0;
        __m128i nibble = _mm_or_si128(
            _mm_and_si128(is_digit, digit),
            _mm_andnot_si128(is_digit, _mm_add_epi8(letter, _mm_set1_epi8(10))));
        /* Join two digits to a byte. The first digit is the higher half. */
        __m128i whole = _mm_or_si128(
            _mm_slli_epi16(_mm_and_si128(nibble, _mm_set1_epi16(0x0F)), 4),
            _mm_srli_epi16(nibble, 8));
        _mm_storel_epi64((__m128i *)(bytes + i), _mm_packus_epi16(whole, whole));
    }
#endif
    for (; i < count; i++) {
        int high = pgf_nibble(at[2 * i]), low = pgf_nibble(at[2 * i + 1]);
        if ((high | low) < 0)
            return 0;
        bytes[i] = (uint8_t)(high << 4 | low);
    }
    return 1;
}

static inline int pgf_uuid(const uint8_t *at, size_t length, uint8_t *bytes)
{
    uint8_t digits[32];
    if (length != 36 || at[8] != '-' || at[13] != '-' || at[18] != '-' || at[23] != '-')
        return 0;
    memcpy(digits, at, 8);
    memcpy(digits + 8, at + 9, 4);
    memcpy(digits + 12, at + 14, 4);
    memcpy(digits + 16, at + 19, 4);
    memcpy(digits + 20, at + 24, 12);
    return pgf_hexadecimal(digits, 16, bytes);
}

static inline void pgf_uuid_text(const uint8_t *bytes, uint8_t *text)
{
    static const char digits[] = "0123456789abcdef";
    for (int i = 0; i < 16; i++) {
        if (i == 4 || i == 6 || i == 8 || i == 10)
            *text++ = '-';
        *text++ = (uint8_t)digits[bytes[i] >> 4];
        *text++ = (uint8_t)digits[bytes[i] & 15];
    }
}

#endif
