"""Codes and types that the two implementations of the folder share."""

from __future__ import annotations

from typing import Any, NamedTuple

INSERT, UPDATE, DELETE = range(3)
"""Operations of changes. A row of a snapshot counts as an insert."""

FITS, OCCUPIED, VACANT = range(3)
"""Whether a change fits the earlier ones. OCCUPIED: a row's new key is in use. VACANT: there is no
row with the key of an update or a delete."""

UNKNOWN = -1
"""Stands in place of a change's number: no such change is known."""

MOST_CHANGES = (1 << 31) - 1
"""Maximum number of changes in a fold: their numbers are int32."""


class Keys(NamedTuple):
    """The keys of rows: integers, or byte strings in one buffer.

    Attributes
    ----------
    values : numpy.ndarray
        int64 of shape (n,); or the buffer as uint8.
    ends : numpy.ndarray or None
        None for integers; otherwise int64 of shape (n + 1,): key i is
        ``values[ends[i] : ends[i + 1]]``.
    """

    values: Any
    ends: Any = None


class Followed(NamedTuple):
    """The result of a folder: arrays with one item for each key that the changes touch.

    Changes are given by their numbers in the fold; `UNKNOWN` stands for none. Only `sources` has
    fewer items: one for each row whose columns were sent by several changes.

    Attributes
    ----------
    is_in_table : numpy.ndarray of bool
        Whether the table had a row with the key before the first change.
    there : numpy.ndarray of bool
        Whether a row has the key after the last change.
    last : numpy.ndarray of int32
        The last change of the row with the key: an insert or update, a delete, or an update that
        moved the row to another key.
    vectors : numpy.ndarray of int32
        The row's index in `sources` if several changes have sent its columns; otherwise -1.
    origins : numpy.ndarray of int32
        The change that moved the row away from the key that it had in the table; `UNKNOWN` if the
        key did not change.
    sources : numpy.ndarray of int32, of shape (n, width)
        For each column the change that sent its value, or `UNKNOWN`.
    """

    is_in_table: Any
    there: Any
    last: Any
    vectors: Any
    origins: Any
    sources: Any
