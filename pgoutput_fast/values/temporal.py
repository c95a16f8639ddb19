"""Decode dates, times, timestamps and intervals; text in any DateStyle that is unambiguous."""

from __future__ import annotations

import datetime
import re
import struct
import sys
from typing import Any

from ..objects import Interval
from ..policies import Policies
from .base import Codec, CodecOf, expect_size, limited, show_bytes, wrong_size

UTC = datetime.timezone.utc
EPOCH = datetime.datetime(2000, 1, 1)
EPOCH_UTC = EPOCH.replace(tzinfo=UTC)
_EPOCH_ORDINAL = EPOCH.toordinal()
_DAY = 86_400_000_000  # microseconds

_int32 = struct.Struct(">i").unpack
_int64 = struct.Struct(">q").unpack

# `re` compiles the patterns of rare forms when they are first used, and keeps them: compiling all
# of them here would take a tenth of the package's import.
_CLOCK = rb"(\d\d):(\d\d):(\d\d)(?:\.(\d{1,6}))?"
_DATE = re.compile(rb"(\d{4,7})-(\d\d)-(\d\d)( BC)?")
_GERMAN_DATE = rb"(\d\d)\.(\d\d)\.(\d{4,7})( BC)?"
_TIME = re.compile(_CLOCK)
_TIMETZ = re.compile(_CLOCK + rb"([+-])(\d\d)(?::(\d\d)(?::(\d\d))?)?")
_TIMESTAMP = re.compile(
    rb"(\d{4,6})-(\d\d)-(\d\d) " + _CLOCK + rb"(?:([+-])(\d{2,3})(?::(\d\d)(?::(\d\d))?)?)?( BC)?"
)
# The time zone in the DateStyles German, SQL and Postgres: an offset or an abbreviation, which can
# consist of digits too, as +0545.
_ZONE = rb"(?: ?(?:([+-])(\d\d)(?::?(\d\d)(?::?(\d\d))?)?|([A-Za-z]{3,})))?( BC)?"
_GERMAN_TIMESTAMP = rb"(\d\d)\.(\d\d)\.(\d{4,6}) " + _CLOCK + _ZONE
_POSTGRES_TIMESTAMP = (
    rb"(?:Sun|Mon|Tue|Wed|Thu|Fri|Sat) (?:(\d\d) ([A-Z][a-z]{2})|([A-Z][a-z]{2}) (\d\d)) "
    + _CLOCK + rb" (\d{4,6})" + _ZONE
)  # fmt: skip
_MONTHS = {
    name: number + 1
    for number, name in enumerate(b"Jan Feb Mar Apr May Jun Jul Aug Sep Oct Nov Dec".split())
}
# In the DateStyle SQL, and for dates in the DateStyle Postgres, the day or the month comes first.
_SQL_DATE = rb"(\d\d)([-/])(\d\d)\2(\d{4,7})( BC)?"
_SQL_TIMESTAMP = rb"(\d\d)/(\d\d)/(\d{4,6}) " + _CLOCK + _ZONE
_DAY_OR_MONTH_FIRST = rb"\d\d([-/])\d\d\1\d{4,7}(?: .*)?"
_FIRST_UNKNOWN = (
    "; whether its day or its month comes first is known to the session's DateStyle alone, "
    "which must be ISO"
)
_FAST_ISO = sys.version_info >= (3, 11)  # fromisoformat reads "+00" and any number of digits
_STYLE = "; the session's DateStyle must be ISO"
_INFINITE = frozenset({b"infinity", b"-infinity"})
# What fits, for errors. These are the limits of Python's classes, and columns have the same.
_DATES = "a date of the years 1 to 9999"
_TIMESTAMPS = "a timestamp of the years 1 to 9999"
_FINITE_DATES, _FINITE_TIMESTAMPS = "a finite date", "a finite timestamp"
_TIMES = "a time before 24:00"
_INTERVALS = "a finite interval"


def _date(policies: Policies) -> Codec:
    least, greatest = datetime.date.min, datetime.date.max

    fromisoformat = datetime.date.fromisoformat

    def text(raw: bytes) -> Any:
        if len(raw) == 10 and raw[4:8:3] == b"--":
            try:
                return fromisoformat(raw.decode())
            except ValueError:
                pass
        match = _DATE.fullmatch(raw)
        if match is not None:
            year, month, day, era = match.groups()
        elif (match := re.fullmatch(_GERMAN_DATE, raw)) is not None:
            day, month, year, era = match.groups()
        elif (match := re.fullmatch(_SQL_DATE, raw)) is not None:
            first, _, second, year, era = match.groups()
            day, month = _day_and_month(first, second, raw, "date")
        if match is not None:
            days = _days(int(year), int(month), int(day), era is not None, raw, "date")
            if not _LEAST_DAY <= days < _DATE_END:
                raise _no_such(raw, "date", _BEYOND_SERVER)
            if 1 <= _EPOCH_ORDINAL + days <= _LAST_ORDINAL:
                return datetime.date.fromordinal(_EPOCH_ORDINAL + days)
            clamp = least if era else greatest
            return limited(policies.out_of_range, "out_of_range", raw.decode(), clamp, _DATES)
        if raw in _INFINITE:
            clamp = least if raw[:1] == b"-" else greatest
            return limited(policies.infinity, "infinity", raw.decode(), clamp, _FINITE_DATES)
        raise _no_value(raw, "date")

    def form(raw: bytes) -> str:
        expect_size(raw, 4, "date")
        days = _int32(raw)[0]
        if days in (0x7FFFFFFF, -0x80000000):
            return "infinity" if days > 0 else "-infinity"
        if not _LEAST_DAY <= days < _DATE_END:
            raise ValueError(f"a binary date {days} days from 2000-01-01, {_BEYOND_SERVER}")
        return "{}-{:02d}-{:02d}{}".format(*_civil(days))

    def binary(raw: bytes) -> Any:
        try:
            ordinal = _EPOCH_ORDINAL + _int32(raw)[0]
        except struct.error:
            raise wrong_size(raw, 4, "date") from None
        if 1 <= ordinal <= _LAST_ORDINAL:
            return datetime.date.fromordinal(ordinal)
        return text(form(raw).encode())

    return Codec(text, binary, form)


def _time(policies: Policies) -> Codec:
    def midnight(shown: str) -> Any:
        return limited(policies.out_of_range, "out_of_range", shown, datetime.time.max, _TIMES)

    def text(raw: bytes) -> Any:
        match = _TIME.fullmatch(raw)
        if match is None:
            raise ValueError(f"{show_bytes(raw)} is no time")
        hour, minute, second, fraction = match.groups()
        if hour == b"24" and not int(minute) and not int(second) and not int(fraction or 0):
            return midnight(raw.decode())
        return _time_of(int(hour), int(minute), int(second), _microseconds(fraction), raw, "time")

    def form(raw: bytes) -> str:
        expect_size(raw, 8, "time")
        value = _int64(raw)[0]
        if not 0 <= value <= _DAY:
            raise ValueError(f"a binary time of {value} microseconds; a day has {_DAY}")
        return _clock(value)

    def binary(raw: bytes) -> Any:
        return text(form(raw).encode())

    return Codec(text, binary, form)


def _timestamp(policies: Policies, zoned: bool) -> Codec:
    name = "timestamptz" if zoned else "timestamp"
    timedelta = datetime.timedelta
    epoch = EPOCH_UTC if zoned else EPOCH
    zone = UTC if zoned else None
    least = datetime.datetime.min.replace(tzinfo=zone)
    greatest = datetime.datetime.max.replace(tzinfo=zone)
    fromisoformat = datetime.datetime.fromisoformat
    # fromisoformat ignores what follows six digits of a fraction, so longer texts don't go there.
    longest = 29 if zoned else 26

    def text(raw: bytes) -> Any:
        if (
            len(raw) <= longest
            and raw[4:17:3] == b"-- ::"
            # It also ignores digits between the seconds and the zone.
            and (not zoned or (raw[-3:] == b"+00" and raw[19:20] in b"+."))
            and 44 not in raw  # a comma, which fromisoformat accepts in place of a point
            and raw[11:13] != b"24"  # from Python 3.14 on, 24:00 is 0:00 of the next day
        ):
            try:
                value = fromisoformat(raw.decode())
            except ValueError:
                return slow(raw)
            if value.tzinfo is zone:
                return value
        return slow(raw)

    def slow(raw: bytes) -> Any:
        if raw in _INFINITE:
            clamp = least if raw[:1] == b"-" else greatest
            return limited(policies.infinity, "infinity", raw.decode(), clamp, _FINITE_TIMESTAMPS)
        year, month, day, clock, shift, bc = _timestamp_fields(raw, name)
        if zoned is (shift is None):
            raise _no_value(raw, name)
        if not bc and year <= 9999:
            # Nearly all values end here. The others are computed without Python's calendar.
            try:
                usual = datetime.datetime(year, month, day, *clock, zone)
                return usual - timedelta(0, shift) if shift else usual
            except (ValueError, OverflowError):
                pass
        days = _days(year, month, day, bc, raw, name)
        value = days * _DAY + _clock_of(clock, raw, name) - (shift or 0) * 1_000_000
        if not _LEAST_TIMESTAMP <= value < _TIMESTAMP_END:
            raise _no_such(raw, name, _BEYOND_SERVER)
        try:
            return epoch + timedelta(0, 0, value)
        except OverflowError:
            clamp = least if value < 0 else greatest
            return limited(policies.out_of_range, "out_of_range", raw.decode(), clamp, _TIMESTAMPS)

    def form(raw: bytes) -> str:
        expect_size(raw, 8, name)
        value = _int64(raw)[0]
        if value in (0x7FFFFFFFFFFFFFFF, -0x8000000000000000):
            return "infinity" if value > 0 else "-infinity"
        if not _LEAST_TIMESTAMP <= value < _TIMESTAMP_END:
            raise ValueError(f"a binary {name} {value} microseconds from 2000, {_BEYOND_SERVER}")
        return timestamp_form(value, "+00" if zoned else "")

    def binary(raw: bytes) -> Any:
        try:
            return epoch + timedelta(0, 0, _int64(raw)[0])
        except struct.error:
            raise wrong_size(raw, 8, name) from None
        except OverflowError:
            return text(form(raw).encode())

    return Codec(text if _FAST_ISO else slow, binary, form)


_LAST_ORDINAL = datetime.date.max.toordinal()
# The server's limits (IS_VALID_DATE, IS_VALID_TIMESTAMP): dates from 4714-11-24 BC to
# 5874897-12-31, timestamps to 294276-12-31.
_LEAST_DAY, _DATE_END = -2_451_545, 2_145_031_949
_LEAST_TIMESTAMP, _TIMESTAMP_END = _LEAST_DAY * _DAY, 9_223_371_331_200_000_000
_BEYOND_SERVER = "beyond the server's calendar"


def _no_such(raw: bytes, name: str, reason: object) -> ValueError:
    """Make the error for a text that has the form of a value, but is not valid for `reason`."""
    return ValueError(f"{show_bytes(raw)} is no {name}: {reason}")


def _no_value(raw: bytes, name: str) -> ValueError:
    """Make the error for a text that is no date or timestamp, or whose DateStyle is not clear."""
    reason = _FIRST_UNKNOWN if re.fullmatch(_DAY_OR_MONTH_FIRST, raw) else _STYLE
    return ValueError(f"{show_bytes(raw)} is no {name}{reason}")


def _day_and_month(first: bytes, second: bytes, raw: bytes, name: str) -> tuple[bytes, bytes]:
    """Which of two numbers is the day and which the month, if only one order is possible.

    So it is for 31/12 and 12/31, and for 5/5, where the order makes no difference.
    """
    if second > b"12" or first == second:
        return second, first
    if first > b"12":
        return first, second
    raise _no_value(raw, name)


def _timestamp_fields(
    raw: bytes, name: str
) -> tuple[int, int, int, tuple[int, int, int, int], int | None, bool]:
    """Year, month, day, time of day, seconds east of UTC (None without a zone), and whether BC.

    The text can have the DateStyle ISO, German, Postgres (which names the month), or SQL if its
    numbers tell day and month apart.
    """
    abbreviation: bytes | None = None
    if (match := _TIMESTAMP.fullmatch(raw)) is not None:
        year, month, day, *clock, sign, hours, minutes, seconds, era = match.groups()
    elif (match := re.fullmatch(_GERMAN_TIMESTAMP, raw)) is not None:
        day, month, year, *clock, sign, hours, minutes, seconds, abbreviation, era = match.groups()
    elif (match := re.fullmatch(_SQL_TIMESTAMP, raw)) is not None:
        first, second, year, *clock, sign, hours, minutes, seconds, abbreviation, era = (
            match.groups()
        )
        day, month = _day_and_month(first, second, raw, name)
    elif (match := re.fullmatch(_POSTGRES_TIMESTAMP, raw)) is not None:
        day, month, month2, day2, *clock, year, sign, hours, minutes, seconds, abbreviation, era = (
            match.groups()
        )
        day, month = day or day2, _MONTHS.get(month or month2, 0)
    else:
        raise _no_value(raw, name)
    shift = None
    if sign is not None:
        shift = _offset(sign, hours, minutes, seconds, raw, name)
    elif abbreviation in (b"UTC", b"GMT"):  # for the server too, these two have one meaning
        shift = 0
    elif abbreviation is not None:
        raise ValueError(
            f"{show_bytes(raw)} has the abbreviation of a time zone, which several zones share; "
            "the session's DateStyle must be ISO or its TimeZone UTC"
        )
    hour, minute, second, fraction = clock
    time = int(hour), int(minute), int(second), _microseconds(fraction)
    return int(year), int(month), int(day), time, shift, era is not None


# The greatest offset that a server accepts as TimeZone is under a week, as in UTC+167. It prints
# timestamps with such an offset, although it does not read offsets of 16 hours or more.
_MOST_HOURS = 167


def _offset(
    sign: bytes, hours: bytes, minutes: bytes | None, seconds: bytes | None, raw: bytes, name: str
) -> int:
    """The seconds east of UTC of the time zone in a text."""
    parts = int(hours), int(minutes or 0), int(seconds or 0)
    if parts[0] > _MOST_HOURS or parts[1] > 59 or parts[2] > 59:
        raise _no_such(raw, name, "its offset from UTC is not valid")
    size = (parts[0] * 60 + parts[1]) * 60 + parts[2]
    return -size if sign == b"-" else size


def _timetz(policies: Policies) -> Codec:
    def make(clock: tuple[int, int, int, int], shift: int, shown: str) -> Any:
        if abs(shift) >= _WIDEST:
            raise ValueError(f"{shown!r} is no timetz: its zone is 16 hours or more off UTC")
        zone = datetime.timezone(datetime.timedelta(seconds=shift))
        if clock == (24, 0, 0, 0):
            clamp = datetime.time.max.replace(tzinfo=zone)
            return limited(policies.out_of_range, "out_of_range", shown, clamp, _TIMES)
        return _time_of(*clock, shown.encode(), "timetz", zone)

    def text(raw: bytes) -> Any:
        match = _TIMETZ.fullmatch(raw)
        if match is None:
            raise ValueError(f"{show_bytes(raw)} is no timetz")
        hour, minute, second, fraction, sign, hours, minutes, seconds = match.groups()
        clock = int(hour), int(minute), int(second), _microseconds(fraction)
        shift = _offset(sign, hours, minutes, seconds, raw, "timetz")
        return make(clock, shift, raw.decode())

    def parts(raw: bytes) -> tuple[int, int]:
        """Microseconds of the day and seconds west of UTC."""
        expect_size(raw, 12, "timetz")
        value, west = _timetz_parts(raw)
        if not 0 <= value <= _DAY:
            raise ValueError(f"a binary timetz of {value} microseconds; a day has {_DAY}")
        if abs(west) >= _WIDEST:
            raise ValueError(f"a binary timetz {west} seconds west of UTC; expected under 16 hours")
        return value, west

    def form(raw: bytes) -> str:
        value, west = parts(raw)
        minutes, seconds = divmod(abs(west), 60)
        hours, minutes = divmod(minutes, 60)
        zone = f"{'-' if west > 0 else '+'}{hours:02d}"
        if seconds:
            zone += f":{minutes:02d}:{seconds:02d}"
        elif minutes:
            zone += f":{minutes:02d}"
        return _clock(value) + zone

    def binary(raw: bytes) -> Any:
        value, west = parts(raw)
        seconds, fraction = divmod(value, 1_000_000)
        clock = seconds // 3600, seconds // 60 % 60, seconds % 60, fraction
        return make(clock, -west, form(raw))

    return Codec(text, binary, form)


_timetz_parts = struct.Struct(">qi").unpack
_WIDEST = 16 * 3600  # seconds; the zone of a timetz is less off UTC

# The form of a text tells its IntervalStyle. In the style postgres every part follows a space,
# which is also put before the first part.
_INTERVAL_CLOCK = rb"([+-]?)(\d{1,10}):([0-5]\d):([0-5]\d)(?:\.(\d{1,6}))?"
_INTERVAL_POSTGRES = re.compile(
    rb"(?: ([+-]?\d{1,9}) years?)?(?: ([+-]?\d{1,2}) mons?)?(?: ([+-]?\d{1,10}) days?)?"
    rb"(?: " + _INTERVAL_CLOCK + rb")?"
)  # fmt: skip
_INTERVAL_VERBOSE = (
    rb"@(?: 0|(?: (-?\d{1,9}) years?)?(?: (-?\d{1,2}) mons?)?(?: (-?\d{1,10}) days?)?"
    rb"(?: (-?\d{1,10}) hours?)?(?: (-?\d{1,2}) mins?)?"
    rb"(?: (-?)(\d{1,2})(?:\.(\d{1,6}))? secs?)?)( ago)?"
)
_INTERVAL_ISO = (
    rb"P(?:(-?\d{1,9})Y)?(?:(-?\d{1,2})M)?(?:(-?\d{1,10})D)?"
    rb"(?:T(?:(-?\d{1,10})H)?(?:(-?\d{1,2})M)?(?:(-?)(\d{1,2})(?:\.(\d{1,6}))?S)?)?"
)
# In the IntervalStyle sql_standard, one sign in front applies to the whole interval, unless every
# part has a sign.
_INTERVAL_SQL_SIGNED = rb"([+-])(\d{1,9})-(\d{1,2}) ([+-]\d{1,10}) (?=[+-])" + _INTERVAL_CLOCK
_INTERVAL_SQL = rb"(-?)(?:(\d{1,9})-(\d{1,2})|(\d{1,10}) (?=\d)" + _INTERVAL_CLOCK + rb"|(0))"
_INFINITE_PARTS = {
    b"infinity": Interval(0x7FFFFFFF, 0x7FFFFFFF, 0x7FFFFFFFFFFFFFFF),
    b"-infinity": Interval(-0x80000000, -0x80000000, -0x8000000000000000),
}
_interval_parts = struct.Struct(">qii").unpack


def _duration(
    sign: bytes, hours: bytes, minutes: bytes, seconds: bytes, fraction: bytes | None
) -> int:
    """Microseconds of an interval's hours, minutes and seconds, with one sign for all."""
    size = (int(hours) * 3600 + int(minutes) * 60 + int(seconds)) * 1_000_000
    size += _microseconds(fraction)
    return -size if sign == b"-" else size


def _signed_parts(
    years: bytes | None, months: bytes | None, days: bytes | None, hours: bytes | None,
    minutes: bytes | None, sign: bytes | None, seconds: bytes | None, fraction: bytes | None,
) -> tuple[int, int, int]:  # fmt: skip
    """Months, days and microseconds of an interval each of whose parts has its own sign."""
    microseconds = (int(hours or 0) * 60 + int(minutes or 0)) * 60_000_000
    if seconds is not None:
        microseconds += _duration(sign or b"", b"0", b"0", seconds, fraction)
    return int(years or 0) * 12 + int(months or 0), int(days or 0), microseconds


def _interval_fields(raw: bytes) -> tuple[int, int, int]:
    """Months, days and microseconds of an interval's text in any of the four IntervalStyles."""
    match = _INTERVAL_POSTGRES.fullmatch(b" " + raw)
    if match is not None and raw:
        years, months, days, *clock = match.groups()
        microseconds = _duration(*clock) if clock[1] is not None else 0
        return int(years or 0) * 12 + int(months or 0), int(days or 0), microseconds
    first = raw[:1]
    if first == b"P":
        match = re.fullmatch(_INTERVAL_ISO, raw)
        if match is not None and raw[-1:] not in (b"P", b"T"):
            return _signed_parts(*match.groups())
    elif first == b"@":
        match = re.fullmatch(_INTERVAL_VERBOSE, raw)
        if match is not None and raw != b"@" and raw != b"@ ago":
            *parts, ago = match.groups()
            months, days, microseconds = _signed_parts(*parts)
            return (-months, -days, -microseconds) if ago else (months, days, microseconds)
    elif (match := re.fullmatch(_INTERVAL_SQL_SIGNED, raw)) is not None:
        sign, years, months, days, *clock = match.groups()
        size = int(years) * 12 + int(months)
        return -size if sign == b"-" else size, int(days), _duration(*clock)
    elif (match := re.fullmatch(_INTERVAL_SQL, raw)) is not None:
        sign, years, months, days, *clock, _ = match.groups()
        size = int(years or 0) * 12 + int(months or 0)
        microseconds = _duration(*clock) if clock[1] is not None else 0
        if sign:
            return -size, -int(days or 0), -microseconds
        return size, int(days or 0), microseconds
    raise ValueError(
        f"{show_bytes(raw)} is no interval in any IntervalStyle; the session's should be postgres"
    )


def _interval(policies: Policies) -> Codec:
    def infinite(name: bytes, note: str = "") -> Any:
        clamp = _INFINITE_PARTS[name]
        return limited(policies.infinity, "infinity", name.decode(), clamp, _INTERVALS, note)

    def text(raw: bytes) -> Any:
        if raw in _INFINITE_PARTS:
            return infinite(raw)
        months, days, microseconds = _interval_fields(raw)
        try:
            _interval_pack(microseconds, days, months)
        except struct.error:
            raise ValueError(f"{show_bytes(raw)} does not fit into interval") from None
        return Interval(months, days, microseconds)

    def parts(raw: bytes) -> Interval | bytes:
        expect_size(raw, 16, "interval")
        microseconds, days, months = _interval_parts(raw)
        # These extremes are the infinite intervals from PostgreSQL 17 on, and were the greatest and
        # the least finite ones before. Nothing in a frame tells the server's version.
        if months in (0x7FFFFFFF, -0x80000000):
            for name, extreme in _INFINITE_PARTS.items():
                if (months, days, microseconds) == (
                    extreme.months, extreme.days, extreme.microseconds,
                ):  # fmt: skip
                    return name
        return Interval(months, days, microseconds)

    def form(raw: bytes) -> str:
        value = parts(raw)
        return value.decode() if isinstance(value, bytes) else interval_form(value)

    def binary(raw: bytes) -> Any:
        value = parts(raw)
        return infinite(value, _BEFORE_17) if isinstance(value, bytes) else value

    return Codec(text, binary, form)


_interval_pack = struct.Struct(">qii").pack
_BEFORE_17 = (
    "; before PostgreSQL 17, which has no infinite intervals, these bytes are the finite one whose "
    "months, days and microseconds are all the extremes, which 'clamp' makes of them"
)


def interval_form(value: Interval) -> str:
    """Return `value` in IntervalStyle postgres, which prints a plus sign after a negative part."""
    years, months = divmod(abs(value.months), 12)
    if value.months < 0:
        years, months = -years, -months
    shown = []
    after_negative = False
    for number, unit in ((years, "year"), (months, "mon"), (value.days, "day")):
        if number:
            plus = "+" if after_negative and number > 0 else ""
            shown.append(f"{plus}{number} {unit}{'' if number == 1 else 's'}")
            after_negative = number < 0
    if value.microseconds or not shown:
        sign = "-" if value.microseconds < 0 else "+" if after_negative else ""
        shown.append(sign + _clock(abs(value.microseconds)))
    return " ".join(shown)


def timestamp_form(microseconds: int, zone: str = "") -> str:
    """Return `microseconds` since 2000-01-01 as the server prints a timestamp, in any year."""
    days, rest = divmod(microseconds, _DAY)
    year, month, day, era = _civil(days)
    return f"{year}-{month:02d}-{day:02d} {_clock(rest)}{zone}{era}"


def _microseconds(fraction: bytes | None) -> int:
    return int(fraction.ljust(6, b"0")) if fraction else 0


def _clock(microseconds: int) -> str:
    seconds, fraction = divmod(microseconds, 1_000_000)
    tail = f".{fraction:06d}".rstrip("0") if fraction else ""
    return f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}{tail}"


def _clock_of(clock: tuple[int, int, int, int], raw: bytes, name: str) -> int:
    """Microseconds from midnight to a time, whose text is `raw`. Raises a ValueError if invalid."""
    hour, minute, second, fraction = clock
    _time_of(*clock, raw, name)
    return ((hour * 60 + minute) * 60 + second) * 1_000_000 + fraction


def _time_of(
    hour: int,
    minute: int,
    second: int,
    fraction: int,
    raw: bytes,
    name: str,
    zone: datetime.timezone | None = None,
) -> datetime.time:
    """The time with these parts, whose text is `raw`. Raises a ValueError if it is invalid."""
    try:
        return datetime.time(hour, minute, second, fraction, zone)
    except ValueError as error:
        raise _no_such(raw, name, error) from None


def _days(year: int, month: int, day: int, bc: bool, raw: bytes, name: str) -> int:
    """Days from 2000-01-01 to a date in any year, whose text is `raw`. Raises a ValueError."""
    if not year:
        raise _no_such(raw, name, "there is no year 0")
    # As in _civil, the calendar repeats every 400 years, so the 400 years from 2000 on stand for
    # all others.
    cycles, of_cycle = divmod(1 - year if bc else year, 400)
    try:
        stand_in = datetime.date(2000 + of_cycle, month, day)
    except ValueError as error:
        raise _no_such(raw, name, error) from None
    return stand_in.toordinal() - _EPOCH_ORDINAL + 146_097 * (cycles - 5)


def _civil(days: int) -> tuple[str, int, int, str]:
    """Year, month, day and era (" BC" or "") of the day `days` after 2000-01-01, in any year.

    Python's calendar has fewer years than PostgreSQL's. But the Gregorian calendar repeats itself
    every 400 years, which are 146,097 days.
    """
    cycles, rest = divmod(days, 146_097)
    date = datetime.date.fromordinal(_EPOCH_ORDINAL + rest)
    year = date.year + 400 * cycles
    era = ""
    if year <= 0:
        year, era = 1 - year, " BC"
    return f"{year:04d}", date.month, date.day, era


CODECS: dict[str, CodecOf] = {
    "date": lambda policies, encoding: _date(policies),
    "time": lambda policies, encoding: _time(policies),
    "timetz": lambda policies, encoding: _timetz(policies),
    "interval": lambda policies, encoding: _interval(policies),
    "timestamp": lambda policies, encoding: _timestamp(policies, False),
    "timestamptz": lambda policies, encoding: _timestamp(policies, True),
}


def interval_iso(value: Interval) -> str:
    """Return `value` in ISO 8601, with a sign for each negative part: P1Y2M-3DT4H5M6.789S."""
    years, months = divmod(abs(value.months), 12)
    sign = "-" if value.months < 0 else ""
    shown = "".join(
        f"{sign}{number}{unit}" for number, unit in ((years, "Y"), (months, "M")) if number
    )
    if value.days:
        shown += f"{value.days}D"
    if value.microseconds or not shown:
        sign = "-" if value.microseconds < 0 else ""
        seconds, fraction = divmod(abs(value.microseconds), 1_000_000)
        minutes, seconds = divmod(seconds, 60)
        hours, minutes = divmod(minutes, 60)
        shown += "T" + "".join(
            f"{sign}{number}{unit}" for number, unit in ((hours, "H"), (minutes, "M")) if number
        )
        tail = f".{fraction:06d}".rstrip("0") if fraction else ""
        if seconds or tail or shown[-1] == "T":
            shown += f"{sign}{seconds}{tail}S"
    return "P" + shown
