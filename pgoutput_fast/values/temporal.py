"""Dates, times, timestamps and intervals."""

from __future__ import annotations

import datetime
import re
import struct
import sys
from typing import Any

from ..policies import Policies
from .base import Codec, CodecOf, expect_size, limited, show_bytes, wrong_size

UTC = datetime.timezone.utc
EPOCH = datetime.datetime(2000, 1, 1)
EPOCH_UTC = EPOCH.replace(tzinfo=UTC)
_EPOCH_ORDINAL = EPOCH.toordinal()
_DAY = 86_400_000_000  # microseconds

_int32 = struct.Struct(">i").unpack
_int64 = struct.Struct(">q").unpack

_DATE = re.compile(rb"(\d{4,7})-(\d\d)-(\d\d)( BC)?")
_TIME = re.compile(rb"(\d\d):(\d\d):(\d\d)(?:\.(\d{1,6}))?")
_TIMESTAMP = re.compile(
    rb"(\d{4,6})-(\d\d)-(\d\d) (\d\d):(\d\d):(\d\d)(?:\.(\d{1,6}))?"
    rb"(?:([+-])(\d\d)(?::(\d\d)(?::(\d\d))?)?)?( BC)?"
)
_FAST_ISO = sys.version_info >= (3, 11)  # fromisoformat reads "+00" and any number of digits
_STYLE = "; the session's DateStyle must be ISO"
_INFINITE = frozenset({b"infinity", b"-infinity"})


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
            if era is None and len(year) == 4:
                return datetime.date(int(year), int(month), int(day))
            _civil_check(int(month), int(day))
            clamp = least if era else greatest
            return limited(policies.out_of_range, "out_of_range", raw.decode(), clamp, "date")
        if raw in _INFINITE:
            clamp = least if raw[:1] == b"-" else greatest
            return limited(policies.infinity, "infinity", raw.decode(), clamp, "date")
        raise ValueError(f"{show_bytes(raw)} is no date{_STYLE}")

    def form(raw: bytes) -> str:
        expect_size(raw, 4, "date")
        days = _int32(raw)[0]
        if days in (0x7FFFFFFF, -0x80000000):
            return "infinity" if days > 0 else "-infinity"
        return "{}-{:02d}-{:02d}{}".format(*_civil(days))

    def binary(raw: bytes) -> Any:
        try:
            ordinal = _EPOCH_ORDINAL + _int32(raw)[0]
        except struct.error:
            raise wrong_size(raw, 4, "date") from None
        if 1 <= ordinal <= 3_652_059:
            return datetime.date.fromordinal(ordinal)
        return text(form(raw).encode())

    return Codec(text, binary, form)


def _time(policies: Policies) -> Codec:
    def midnight(shown: str) -> Any:
        return limited(policies.out_of_range, "out_of_range", shown, datetime.time.max, "time")

    def text(raw: bytes) -> Any:
        match = _TIME.fullmatch(raw)
        if match is None:
            raise ValueError(f"{show_bytes(raw)} is no time")
        hour, minute, second, fraction = match.groups()
        if hour == b"24" and not int(minute) and not int(second) and not int(fraction or 0):
            return midnight(raw.decode())
        return datetime.time(int(hour), int(minute), int(second), _microseconds(fraction))

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
    # Past six digits of a fraction, fromisoformat ignores whatever comes.
    longest = 29 if zoned else 26

    def text(raw: bytes) -> Any:
        if (
            len(raw) <= longest
            and raw[4:17:3] == b"-- ::"
            and (not zoned or raw[-3:] == b"+00")
            and 44 not in raw  # a comma, which fromisoformat takes for a point
        ):
            try:
                value = fromisoformat(raw.decode())
            except ValueError:
                return slow(raw)
            if value.tzinfo is zone:
                return value
        return slow(raw)

    def slow(raw: bytes) -> Any:
        match = _TIMESTAMP.fullmatch(raw)
        if match is None:
            if raw in _INFINITE:
                clamp = least if raw[:1] == b"-" else greatest
                return limited(policies.infinity, "infinity", raw.decode(), clamp, "datetime")
            raise ValueError(f"{show_bytes(raw)} is no {name}{_STYLE}")
        year, month, day, hour, minute, second, fraction, sign, *offset, era = match.groups()
        if zoned is (sign is None):
            raise ValueError(f"{show_bytes(raw)} is no {name}{_STYLE}")
        clamp = least if era else greatest
        shown = raw.decode()
        if era is not None or len(year) > 4:
            _civil_check(int(month), int(day))
            datetime.time(int(hour), int(minute), int(second))
            return limited(policies.out_of_range, "out_of_range", shown, clamp, "datetime")
        value = datetime.datetime(
            int(year), int(month), int(day), int(hour), int(minute), int(second),
            _microseconds(fraction), zone,
        )  # fmt: skip
        if zoned:
            hours, minutes, seconds = (int(part or 0) for part in offset)
            shift = datetime.timedelta(hours=hours, minutes=minutes, seconds=seconds)
            try:
                return value + shift if sign == b"-" else value - shift
            except OverflowError:
                clamp = greatest if sign == b"-" else least
                return limited(policies.out_of_range, "out_of_range", shown, clamp, "datetime")
        return value

    def form(raw: bytes) -> str:
        expect_size(raw, 8, name)
        value = _int64(raw)[0]
        if value in (0x7FFFFFFFFFFFFFFF, -0x8000000000000000):
            return "infinity" if value > 0 else "-infinity"
        return timestamp_form(value, "+00" if zoned else "")

    def binary(raw: bytes) -> Any:
        try:
            return epoch + timedelta(0, 0, _int64(raw)[0])
        except struct.error:
            raise wrong_size(raw, 8, name) from None
        except OverflowError:
            return text(form(raw).encode())

    return Codec(text if _FAST_ISO else slow, binary, form)


def timestamp_form(microseconds: int, zone: str = "") -> str:
    """`microseconds` since 2000-01-01 as the server prints a timestamp, in any year."""
    days, rest = divmod(microseconds, _DAY)
    year, month, day, era = _civil(days)
    return f"{year}-{month:02d}-{day:02d} {_clock(rest)}{zone}{era}"


def _microseconds(fraction: bytes | None) -> int:
    return int(fraction.ljust(6, b"0")) if fraction else 0


def _clock(microseconds: int) -> str:
    seconds, fraction = divmod(microseconds, 1_000_000)
    tail = f".{fraction:06d}".rstrip("0") if fraction else ""
    return f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}{tail}"


def _civil_check(month: int, day: int) -> None:
    """Refuse what is no month and day; in a year that Python cannot hold, 29 February passes."""
    datetime.date(2000, month, day)


def _civil(days: int) -> tuple[str, int, int, str]:
    """Year, month, day and era of the day `days` after 2000-01-01, in any year.

    Python's calendar ends at both sides of what PostgreSQL's holds, and the Gregorian one repeats
    itself every 400 years of 146,097 days.
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
    "timestamp": lambda policies, encoding: _timestamp(policies, False),
    "timestamptz": lambda policies, encoding: _timestamp(policies, True),
}
