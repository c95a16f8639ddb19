"""What both sides of a comparison tell of a table's rows.

A row has the parts of its columns (:mod:`.texts`). Its *name* is the MD5 of the parts of its key,
or of all of them in a table without a key; its *digest* is the MD5 of all of them. Names are evenly
spread over all MD5s, on both sides in the same way whatever the type and the collation of the key.
So ranges of names are what is counted and summed, and a range is halved by one more bit of the name
(here by several hexadecimal digits at once).
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


class Sum(NamedTuple):
    """Of the rows in a range, their number and the sums of both halves of their digests.

    The halves are signed integers of 64 bits, and the sums have as many bits as they need.
    """

    rows: int
    first: int
    second: int


class Rows(Protocol):
    """The rows of one table on one side, at one moment."""

    def sums(self, digits: int, within: Sequence[str] | None) -> dict[str, Sum]:
        """The sum of each range that has rows.

        Parameters
        ----------
        digits : int
            A range is all names that begin with the same so many hexadecimal digits.
        within : sequence of str, optional
            Only names that begin with one of these, all of one length.
        """

    def digests(self, within: Sequence[str]) -> Iterator[tuple[str, str, int]]:
        """Name, digest and number of equal rows, of all rows in some ranges."""

    def named(self, names: Iterable[str]) -> Iterator[tuple[str, str, int]]:
        """The same of the rows of some names."""

    def parts(self, names: Iterable[str]) -> Iterator[tuple[str, str, int]]:
        """Name, parts of all columns, and number of equal rows, of the rows of some names."""


def md5(text: str) -> str:
    """The hexadecimal MD5 of a text in UTF-8, as the server makes it."""
    return hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()


def halves(digest: str) -> tuple[int, int]:
    """Both halves of a digest as signed integers."""
    first, second = int(digest[:16], 16), int(digest[16:], 16)
    return _signed(first), _signed(second)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number
