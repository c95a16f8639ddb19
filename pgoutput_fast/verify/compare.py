"""Compare the rows of one table: first ranges, then the rows in the ranges that differ."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from .result import Difference
from .sums import Sum, halves
from .texts import plain, shown, split

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ..types import ColumnType
    from .sums import Rows

_DIGITS = 3  # a step adds 3 digits, which divides a range into 4,096
_DEEPEST = 15
_RANGES = 64  # differing ranges that are divided further; more are skipped
_ROWS = 200_000  # about the number of rows that are compared one by one

_Counted = dict[str, dict[str, int]]


class Comparison(NamedTuple):
    """The rows that differ.

    Attributes
    ----------
    names : set of str
        Names of the rows.
    is_least : bool
        Whether more ranges differ, whose rows were not compared.
    rows, target_rows : int
        Number of all rows on the server and in the target.
    """

    names: set[str]
    is_least: bool
    rows: int
    target_rows: int


def compare_all(server: Rows, target: Rows, without: set[str]) -> Comparison:
    """Compare all rows of a table, except the rows with some names.

    Parameters
    ----------
    server, target : Rows
    without : set of str
        Names of the excepted rows, which are subtracted from the sums.
    """
    totals: list[int] = []
    sides = [(side, list(side.named(without)) if without else []) for side in (server, target)]
    within: list[str] | None = None
    is_least = False
    digits = 0
    while True:
        digits += _DIGITS
        sums = [side.sums(digits, within) for side, _ in sides]
        if within is None:
            totals = [sum(sum_.rows for sum_ in side.values()) for side in sums]
        here, there = (
            _less(side, left_out, digits) for side, (_, left_out) in zip(sums, sides, strict=True)
        )
        empty = Sum(0, 0, 0)
        within = [
            name
            for name in sorted({*here, *there})
            if here.get(name, empty) != there.get(name, empty)
        ]
        if len(within) > _RANGES:
            is_least, within = True, within[:_RANGES]
        rows = sum(max(here.get(name, empty).rows, there.get(name, empty).rows) for name in within)
        if rows <= _ROWS or digits >= _DEEPEST:
            break
    names = (
        _differing(_counted(server.digests(within)), _counted(target.digests(within)))
        if within
        else set()
    )
    return Comparison(names - without, is_least, *totals)


def _less(
    sums: dict[str, Sum], rows: Iterable[tuple[str, str, int]], digits: int
) -> dict[str, Sum]:
    """Subtract rows from sums, and return the sums."""
    for name, digest, times in rows:
        before = sums.get(name[:digits])
        if before is not None:
            first, second = halves(digest)
            sums[name[:digits]] = Sum(
                before.rows - times, before.first - times * first, before.second - times * second
            )
    return sums


def compare_named(server: Rows, target: Rows, names: Iterable[str]) -> set[str]:
    """Return the names among some whose rows differ."""
    wanted = list(names)
    differing: set[str] = set()
    for start in range(0, len(wanted), _ROWS):
        some = wanted[start : start + _ROWS]
        differing |= _differing(_counted(server.named(some)), _counted(target.named(some)))
    return differing


def _counted(rows: Iterable[tuple[str, str, int]]) -> _Counted:
    counts: _Counted = {}
    for name, digest, times in rows:
        of_name = counts.setdefault(name, {})
        of_name[digest] = of_name.get(digest, 0) + times
    return counts


def _differing(here: _Counted, there: _Counted) -> set[str]:
    return {name for name in {*here, *there} if here.get(name) != there.get(name)}


def differences(
    server: Rows,
    target: Rows,
    names: Iterable[str],
    columns: Mapping[str, ColumnType],
    key: Sequence[str],
) -> list[Difference]:
    """Describe the differences of the rows with some names.

    Parameters
    ----------
    server, target : Rows
    names : iterable of str
    columns : mapping of str to ColumnType
        The compared columns, in the order of the parts.
    key : sequence of str
        Empty for a multiset.
    """
    wanted = sorted(names)
    here, there = _counted(server.parts(wanted)), _counted(target.parts(wanted))
    return [_difference(here.get(name, {}), there.get(name, {}), columns, key) for name in wanted]


def _difference(
    here: dict[str, int],
    there: dict[str, int],
    columns: Mapping[str, ColumnType],
    key: Sequence[str],
) -> Difference:
    times = sum(here.values()), sum(there.values())
    rows = [
        {
            name: shown(type_, plain(part))
            for (name, type_), part in zip(columns.items(), split(parts), strict=True)
        }
        for parts in (next(iter(here), None), next(iter(there), None))
        if parts is not None
    ]
    row_key = {name: rows[0][name] for name in key or columns} if rows else {}
    if not times[1]:
        return Difference("missing", row_key, {}, times)
    if not times[0]:
        return Difference("extra", row_key, {}, times)
    if times[0] != times[1]:
        return Difference("doubled" if times[1] > times[0] else "too few", row_key, {}, times)
    differing = {
        name: (rows[0][name], rows[1][name]) for name in columns if rows[0][name] != rows[1][name]
    }
    return Difference("different", row_key, differing, times)
