"""What the two implementations of the fold's inner loop share: its input's codes, its result."""

from __future__ import annotations

from typing import Any, NamedTuple

INSERT, UPDATE, DELETE = range(3)
"""What a change does. A row of a snapshot is inserted."""

FITS, OCCUPIED, VACANT = range(3)
"""Whether a change goes with those before it: a row came to a key that another row has, or a row is
changed or left where none is."""

UNKNOWN = -1
"""In place of a row's number: no row is known."""

MOST_CHANGES = (1 << 31) - 1
"""So many changes have numbers."""


class Keys(NamedTuple):
    """The keys of rows: integers, or bytes that lie one after the other.

    Attributes
    ----------
    values : numpy.ndarray
        int64 of shape (n,), or all bytes as uint8.
    ends : numpy.ndarray or None
        None for integers; otherwise int64 of shape (n + 1,): key i is
        ``values[ends[i] : ends[i + 1]]``.
    """

    values: Any
    ends: Any = None


class Followed(NamedTuple):
    """What became of the keys that were touched: arrays of the same length, one item for each.

    Rows are given by their numbers, and by `UNKNOWN`.

    Attributes
    ----------
    held : numpy.ndarray of bool
        Whether the table had a row under the key before the first change.
    there : numpy.ndarray of bool
        Whether a row has the key now.
    last : numpy.ndarray of int32
        The last change of the key's row, which sent its values; or the one that deleted it or took
        it to another key.
    vectors : numpy.ndarray of int32
        Where the row's columns were sent by several changes: a row of `sources`; otherwise -1.
    origins : numpy.ndarray of int32
        For a row that the table had under another key: the change that took it away from there.
        `UNKNOWN` for others.
    sources : numpy.ndarray of int32, of shape (n, width)
        For each column the change that sent it, or `UNKNOWN`.
    """

    held: Any
    there: Any
    last: Any
    vectors: Any
    origins: Any
    sources: Any
