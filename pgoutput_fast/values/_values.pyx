# cython: cdivision=True
"""Make Python objects from the bytes of values, compiled, for frequent types.

These functions decode usual values. Unusual values are infinity, a year before Christ, a number
that is too long, and malformed bytes. For them, the functions call the Python function that the
plan has for the column. It lies in :mod:`pgoutput_fast.values`, applies policies and raises errors.
"""

from __future__ import annotations

from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.datetime cimport date_new, datetime_new, import_datetime, time_new
from cpython.object cimport PyObject
from cpython.unicode cimport PyUnicode_DecodeUTF8
from libc.stdint cimport (
    INT16_MAX, INT16_MIN, INT32_MAX, INT32_MIN, INT64_MAX, INT64_MIN, UINT32_MAX, int16_t, int32_t,
    int64_t, uint8_t, uint32_t, uint64_t,
)
from libc.string cimport memcpy

from pgoutput_fast._loads cimport load_uint16, load_uint32, load_uint64

import datetime
import decimal
import uuid

from .base import CODES

cdef extern from "Python.h":
    ctypedef Py_ssize_t Py_hash_t
    object PyUnicode_New(Py_ssize_t size, Py_UCS4 maxchar)
    void *PyUnicode_DATA(object text)
    object PyObject_CallOneArg(object function, object argument)
    ctypedef struct PyTypeObject:
        Py_ssize_t tp_basicsize
        object (*tp_alloc)(PyTypeObject *cls, Py_ssize_t items)
        int (*tp_descr_set)(object descriptor, object instance, object value) except -1
    PyTypeObject *Py_TYPE(object value)
    object _PyLong_FromByteArray(const unsigned char *at, size_t n, int little, int signed)

import_datetime()

# Makes the same Decimals as Decimal(text): this context rounds nothing. It skips the constructor's
# parsing of arguments, a quarter of its time.
cdef object _decimal_of_text = decimal.Context(
    prec=decimal.MAX_PREC, Emin=decimal.MIN_EMIN, Emax=decimal.MAX_EMAX, capitals=1, clamp=0,
    flags=[], traps=[decimal.InvalidOperation],
).create_decimal
cdef PyTypeObject *_UUID_type = <PyTypeObject *> uuid.UUID
cdef object _int_of = uuid.UUID.__dict__["int"]
cdef object _is_safe_of = uuid.UUID.__dict__["is_safe"]
cdef object _UNKNOWN = uuid.SafeUUID.unknown
cdef object _UTC = datetime.timezone.utc

if CODES != {
    "bool": BOOL, "int2": INT2, "int4": INT4, "int8": INT8, "uint4": UINT4, "float8": FLOAT8,
    "numeric": NUMERIC, "text": TEXT, "json": TEXT, "bytea": BYTEA, "uuid": UUID, "date": DATE,
    "time": TIME, "timestamp": TIMESTAMP, "timestamptz": TIMESTAMPTZ, "jsonb": JSONB,
    "other": OTHER,
}:
    raise ImportError("the codes of values/base.py are not those of this extension; rebuild it")


# --- text ----------------------------------------------------------------------------------------

# Make a str of UTF-8. Raise UnicodeDecodeError if the bytes are not UTF-8.
cdef object utf8_text(const char *text, Py_ssize_t length):
    cdef object value
    # For 0 or 1 characters, PyUnicode_DecodeUTF8 returns objects that the interpreter has cached.
    if length < 2 or not is_ascii(<const uint8_t *> text, length):
        return PyUnicode_DecodeUTF8(text, length, NULL)
    # Measured: 13 ns; PyUnicode_DecodeUTF8 takes 16 to 19 ns.
    value = PyUnicode_New(length, 127)
    memcpy(PyUnicode_DATA(value), text, length)
    return value


cdef inline bint is_ascii(const uint8_t *text, Py_ssize_t length) noexcept nogil:
    cdef const uint8_t *last = text + length - 8
    cdef uint64_t word
    cdef uint64_t seen = 0
    if length >= 8:
        while text < last:
            memcpy(&word, text, 8)
            seen |= word
            text += 8
        # The last eight bytes. They overlap the word before.
        memcpy(&word, last, 8)
        return not (seen | word) & 0x8080808080808080u
    while length > 0:
        length -= 1
        seen |= text[length]
    return seen < 0x80


# Make a str. The caller has checked that the bytes are ASCII.
cdef inline object ascii_text(const char *text, Py_ssize_t length):
    cdef object value = PyUnicode_New(length, 127)
    memcpy(PyUnicode_DATA(value), text, length)
    return value


# --- functions shared with columns ---------------------------------------------------------------

cdef extern from "_convert.h" nogil:
    enum:
        PGF_LEAST_POWER
        PGF_GREATEST_POWER
        PGF_NUMERIC_ROOM
        PGF_LEAST_DAY
        PGF_GREATEST_DAY
    const int64_t DAY "PGF_DAY"
    const uint64_t[20] PGF_POWERS
    ctypedef struct CalendarDay "pgf_calendar_day":
        int32_t year, month, day
    ctypedef struct TimeOfDay "pgf_time_of_day":
        int32_t hour, minute, second, microsecond
    bint pgf_integer(
        const uint8_t *at, size_t length, size_t before, int64_t least, int64_t greatest,
        int64_t *value
    ) noexcept
    size_t pgf_behind_point(const uint8_t *at, size_t length) noexcept
    bint pgf_decimal_digits(
        const uint8_t *at, size_t length, size_t before, uint32_t scale, int *negative,
        uint64_t *number
    ) noexcept
    bint pgf_is_numeric(const uint8_t *at, size_t length) noexcept
    bint pgf_numeric_digits(const uint8_t *at, size_t length, uint64_t *number) noexcept
    bint pgf_read_day(const uint8_t *at, CalendarDay *day) noexcept
    bint pgf_read_time(const uint8_t *at, size_t length, TimeOfDay *time) noexcept
    bint pgf_read_timestamp(
        const uint8_t *at, size_t length, bint zoned, CalendarDay *day, TimeOfDay *time
    ) noexcept
    bint pgf_float(
        const uint8_t *at, size_t length, size_t before, const pgf_power *powers, double *value
    ) noexcept
    size_t pgf_numeric_text(const uint8_t *at, size_t length, char *text) noexcept
    bint pgf_uuid(const uint8_t *at, size_t length, uint8_t *bytes) noexcept

cdef pgf_power[651] _powers_of_five


# Fill the table of powers of ten with the first 128 bits of each power, without rounding.
cdef int fill_powers() except -1:
    cdef int i
    for i in range(PGF_GREATEST_POWER - PGF_LEAST_POWER + 1):
        power = i + PGF_LEAST_POWER
        if power >= 0:
            number = 10**power << 128
            number >>= number.bit_length() - 128
        else:
            divisor = 10**-power
            number = (1 << (divisor.bit_length() + 128)) // divisor
            number >>= number.bit_length() - 128
        _powers_of_five[i].high = number >> 64
        _powers_of_five[i].low = number & 0xFFFFFFFFFFFFFFFF
    return 0


fill_powers()


cdef const pgf_power *powers_of_five() noexcept nogil:
    return _powers_of_five


# --- dates and times -----------------------------------------------------------------------------

# Compute year, month and day of the date `days` days after 0001-01-01. The date must be in the
# range of Python's dates.
cdef inline void civil(int64_t days, int32_t *year, int32_t *month, int32_t *day) noexcept nogil:
    # Years of this calendar begin in March, so that the leap day is the last day of a year. Then
    # the first days of months lie on a line of slope 30.6. An era is 400 years: 146,097 days.
    cdef uint32_t shifted = <uint32_t> (days + 306)
    cdef uint32_t era = shifted // 146_097
    cdef uint32_t of_era = shifted % 146_097
    cdef uint32_t year_of_era = (
        (of_era - of_era // 1460 + of_era // 36_524 - of_era // 146_096) // 365
    )
    cdef uint32_t of_year = of_era - (365 * year_of_era + year_of_era // 4 - year_of_era // 100)
    cdef uint32_t march_month = (5 * of_year + 2) // 153
    day[0] = of_year - (153 * march_month + 2) // 5 + 1
    month[0] = march_month + 3 if march_month < 10 else march_month - 9
    year[0] = year_of_era + era * 400 + (month[0] <= 2)


cdef inline object datetime_of_us(int64_t value, object zone):
    cdef int64_t days = value // DAY
    cdef int64_t rest = value - days * DAY
    cdef int32_t year, month, day, seconds
    if rest < 0:
        rest += DAY
        days -= 1
    if not PGF_LEAST_DAY <= days <= PGF_GREATEST_DAY:
        return None
    civil(days - PGF_LEAST_DAY, &year, &month, &day)
    seconds = <int32_t> (rest // 1_000_000)
    return datetime_new(
        year, month, day, seconds // 3600, seconds // 60 % 60, seconds % 60,
        <int32_t> (rest % 1_000_000), zone,
    )


# --- uuid, numeric -------------------------------------------------------------------------------

cdef inline object make_uuid(const uint8_t *at):
    # The constructor takes 900 ns, because it accepts five kinds of arguments. Setting both slots
    # takes 60 ns.
    cdef object value = _UUID_type.tp_alloc(_UUID_type, 0)
    Py_TYPE(_int_of).tp_descr_set(_int_of, value, _PyLong_FromByteArray(at, 16, 0, 0))
    Py_TYPE(_is_safe_of).tp_descr_set(_is_safe_of, value, _UNKNOWN)
    return value


# The layout of a Decimal in CPython's _decimal. Making a Decimal from text takes 150 ns, a third of
# the time of a row with Decimals. Filling the structure takes 30 ns. CPython does not promise this
# layout: the import of this module checks it in two Decimals. If it differs, all Decimals are made
# from text.
cdef struct DecimalObject:
    PyObject head
    Py_hash_t hash  # -1: not computed yet
    # libmpdec's mpd_t: the coefficient is an integer, in words of 19 decimal digits.
    uint8_t flags
    Py_ssize_t exponent
    Py_ssize_t digits
    Py_ssize_t words
    Py_ssize_t allocated
    uint64_t *data  # `allocated` words; points to `room` if they fit
    uint64_t[4] room


cdef PyTypeObject *_Decimal_type = <PyTypeObject *> decimal.Decimal
cdef uint8_t _positive_flags, _negative_flags


# Check that Decimals have the layout of DecimalObject.
cdef bint decimals_are_known():
    global _positive_flags, _negative_flags
    positive, negative = decimal.Decimal("9000000000000000001"), decimal.Decimal("-0.042")
    if _Decimal_type.tp_basicsize != sizeof(DecimalObject):
        return False
    cdef DecimalObject *one = <DecimalObject *> <PyObject *> positive
    cdef DecimalObject *other = <DecimalObject *> <PyObject *> negative
    _positive_flags, _negative_flags = one.flags, other.flags
    return (
        one.hash == -1 and one.exponent == 0 and one.digits == 19 and one.words == 1
        and one.allocated == 4 and one.data == one.room and one.room[0] == 9000000000000000001u
        and other.hash == -1 and other.exponent == -3 and other.digits == 2 and other.words == 1
        and other.allocated == 4 and other.data == other.room and other.room[0] == 42
        and one.flags ^ other.flags == 1
    )


cdef bint _DECIMALS_ARE_KNOWN = decimals_are_known()

# Make the Decimal `number` * 10 ** -`scale`. `number` has at most 19 digits.
cdef inline object make_decimal(bint negative, uint64_t number, Py_ssize_t scale):
    cdef object value = _Decimal_type.tp_alloc(_Decimal_type, 0)
    cdef DecimalObject *made = <DecimalObject *> <PyObject *> value
    cdef Py_ssize_t digits = 1
    while number >= PGF_POWERS[digits]:
        digits += 1
    made.hash = -1
    made.flags = _negative_flags if negative else _positive_flags
    made.exponent = -scale
    made.digits = digits
    made.words = 1
    made.allocated = 4
    made.data = made.room
    made.room[0] = number
    return value


# Make a Decimal from text. Return None unless the text is a minus or none, digits, and optionally a
# point and more digits.
cdef inline object decimal_of_text(const uint8_t *at, Py_ssize_t length):
    cdef uint64_t number
    cdef int negative
    cdef size_t scale
    if _DECIMALS_ARE_KNOWN:
        scale = pgf_behind_point(at, length)
        if pgf_decimal_digits(at, length, BEFORE, scale, &negative, &number):
            return make_decimal(negative, number, scale)
    if not pgf_is_numeric(at, length):
        return None
    return PyObject_CallOneArg(_decimal_of_text, ascii_text(<const char *> at, length))


# Make a Decimal from a binary numeric. Return None if the value is unusual.
cdef inline object decimal_of_binary(const uint8_t *at, Py_ssize_t length):
    cdef char[PGF_NUMERIC_ROOM] text
    cdef uint64_t number
    cdef Py_ssize_t n
    if _DECIMALS_ARE_KNOWN and pgf_numeric_digits(at, length, &number):
        return make_decimal(load_uint16(at + 4) != 0 and number != 0, number, load_uint16(at + 6))
    n = pgf_numeric_text(at, length, text)
    if n == 0:
        return None
    return PyObject_CallOneArg(_decimal_of_text, ascii_text(text, n))


# --- values --------------------------------------------------------------------------------------

# The range of each integer type, by its code.
cdef int64_t[6] LEAST, GREATEST
LEAST[:] = [0, 0, INT16_MIN, INT32_MIN, INT64_MIN, 0]
GREATEST[:] = [0, 0, INT16_MAX, INT32_MAX, INT64_MAX, UINT32_MAX]


cdef object from_text(uint8_t code, const char *text, Py_ssize_t length, object slowly):
    cdef const uint8_t *at = <const uint8_t *> text
    cdef CalendarDay day
    cdef TimeOfDay time
    cdef int64_t number
    cdef double real
    cdef uint8_t[16] raw
    cdef object value
    if code == TEXT or code == JSONB or code == OTHER:
        return utf8_text(text, length)
    elif INT2 <= code <= UINT4:
        if pgf_integer(at, length, BEFORE, LEAST[code], GREATEST[code], &number):
            return number
    elif code == NUMERIC:
        value = decimal_of_text(at, length)
        if value is not None:
            return value
    elif code == BOOL:
        if length == 1:
            if at[0] == c't':
                return True
            if at[0] == c'f':
                return False
    elif code == TIMESTAMPTZ or code == TIMESTAMP:
        if pgf_read_timestamp(at, length, code == TIMESTAMPTZ, &day, &time):
            return datetime_new(
                day.year, day.month, day.day, time.hour, time.minute, time.second,
                time.microsecond, _UTC if code == TIMESTAMPTZ else None,
            )
    elif code == DATE:
        if length == 10 and pgf_read_day(at, &day):
            return date_new(day.year, day.month, day.day)
    elif code == UUID:
        if pgf_uuid(at, length, raw):
            return make_uuid(raw)
    elif code == FLOAT8:
        if pgf_float(at, length, BEFORE, _powers_of_five, &real):
            return real
    elif code == TIME:
        if pgf_read_time(at, length, &time):
            return time_new(time.hour, time.minute, time.second, time.microsecond, None)
    return PyObject_CallOneArg(slowly, PyBytes_FromStringAndSize(text, length))


cdef object from_binary(uint8_t code, const char *text, Py_ssize_t length, object slowly):
    cdef const uint8_t *at = <const uint8_t *> text
    cdef int32_t year, month, day, seconds
    cdef int64_t number
    cdef uint64_t bits
    cdef double real
    cdef object value
    if code == TEXT:
        return utf8_text(text, length)
    elif code == INT4:
        if length == 4:
            return <int32_t> load_uint32(at)
    elif code == INT8:
        if length == 8:
            return <int64_t> load_uint64(at)
    elif code == INT2:
        if length == 2:
            return <int16_t> load_uint16(at)
    elif code == NUMERIC:
        value = decimal_of_binary(at, length)
        if value is not None:
            return value
    elif code == BOOL:
        if length == 1:
            if at[0] == 1:
                return True
            if at[0] == 0:
                return False
    elif code == TIMESTAMPTZ or code == TIMESTAMP:
        if length == 8:
            value = datetime_of_us(
                <int64_t> load_uint64(at), _UTC if code == TIMESTAMPTZ else None
            )
            if value is not None:
                return value
    elif code == DATE:
        if length == 4:
            number = <int32_t> load_uint32(at)
            if PGF_LEAST_DAY <= number <= PGF_GREATEST_DAY:
                civil(number - PGF_LEAST_DAY, &year, &month, &day)
                return date_new(year, month, day)
    elif code == UUID:
        if length == 16:
            return make_uuid(at)
    elif code == FLOAT8:
        if length == 8:
            bits = load_uint64(at)
            memcpy(&real, &bits, 8)
            return real
    elif code == JSONB:
        if length > 0 and at[0] == 1:
            return utf8_text(text + 1, length - 1)
    elif code == BYTEA or code == OTHER:
        return PyBytes_FromStringAndSize(text, length)
    elif code == TIME:
        if length == 8:
            number = <int64_t> load_uint64(at)
            if 0 <= number < DAY:
                seconds = <int32_t> (number // 1_000_000)
                return time_new(
                    seconds // 3600, seconds // 60 % 60, seconds % 60,
                    <int32_t> (number % 1_000_000), None,
                )
    elif code == UINT4:
        if length == 4:
            return load_uint32(at)
    return PyObject_CallOneArg(slowly, PyBytes_FromStringAndSize(text, length))
