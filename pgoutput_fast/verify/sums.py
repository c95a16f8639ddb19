"""The interface through which both sides of a comparison give the rows of a table.

Each column of a row has a part (:mod:`.texts`). The *name* of a row is the MD5 of its key's parts;
in a table without a key, of all parts. The *digest* of a row is the MD5 of all parts.

MD5s spread evenly, and both sides compute the same ones, whatever the type and the collation of the
key. So a comparison sums up digests by ranges of names. It divides a range by further hexadecimal
digits of the names.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


class Sum(NamedTuple):
    """The number of rows in a range, and the sums of both halves of their digests.

    A half is a signed integer of 64 bits. A sum has as many bits as it needs.
    """

    rows: int
    first: int
    second: int


class Rows(Protocol):
    """The rows of one table on one side, at one moment."""

    def sums(self, digits: int, within: Sequence[str] | None) -> dict[str, Sum]:
        """Return the sum of each range that has rows, by the range's first digits.

        Parameters
        ----------
        digits : int
            Length of a range's beginning: all names of a range have the same first digits.
        within : sequence of str, optional
            Only names that begin with one of these texts, which all have the same length.
        """

    def digests(self, within: Sequence[str]) -> Iterator[tuple[str, str, int]]:
        """Yield name, digest and number of equal rows, for all rows in some ranges."""

    def named(self, names: Iterable[str]) -> Iterator[tuple[str, str, int]]:
        """Yield name, digest and number of equal rows, for the rows with some names."""

    def parts(self, names: Iterable[str]) -> Iterator[tuple[str, str, int]]:
        """Yield name, joined parts and number of equal rows, for the rows with some names."""


def md5(text: str) -> str:
    """Return the hexadecimal MD5 of a text in UTF-8, as the server has it."""
    return hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()


def halves(digest: str) -> tuple[int, int]:
    """Return both halves of a digest as signed integers."""
    first, second = int(digest[:16], 16), int(digest[16:], 16)
    return _signed(first), _signed(second)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number
