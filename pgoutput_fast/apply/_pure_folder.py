"""The folder follows the rows of a table from change to change. The twin of ``_folder.pyx``."""

from __future__ import annotations

import hashlib
import itertools
import os
from typing import Any

import numpy as np

from .steps import (
    DELETE,
    FITS,
    INSERT,
    OCCUPIED,
    UNKNOWN,
    VACANT,
    Followed,
    Keys,
)

Key = int | bytes


class _FoldedRow:
    """A row of the table, under whichever key it has at the moment.

    `row` is the number of the change that last sent values. `sources` has, for each column, the
    change that sent its value; None if that is `row` for all of them. `home` is the key that the
    row had in the table before the first change; None for an inserted row. `origin` is the change
    that moved the row away from `home`, or deleted it.
    """

    __slots__ = ("home", "origin", "row", "sources")

    def __init__(self, home: Key | None) -> None:
        self.home = home
        self.row = self.origin = UNKNOWN
        self.sources: list[int] | None = None


class _RowPlace:
    """A key.

    Fields: is_in_table (the table had a row with the key before the first change), row (the row
    that has the key now), last (the last change of the key).
    """

    __slots__ = ("is_in_table", "last", "row")

    def __init__(self, is_in_table: bool) -> None:
        self.is_in_table = is_in_table
        self.row: _FoldedRow | None = None
        self.last = UNKNOWN


class Fold:
    """Follows the rows of a table with a key through its changes.

    Parameters
    ----------
    width : int
        The number of columns.
    integers : bool
        Whether keys are integers; otherwise they are bytes.

    Attributes
    ----------
    truncated : bool
        Whether the changes have truncated the table.
    fault : int
        `FITS`; or `OCCUPIED` or `VACANT`, for the change that :meth:`add` returned.
    """

    def __init__(self, width: int, integers: bool) -> None:
        self.truncated = False
        self.fault = FITS
        self._width, self._integers = width, integers
        self._places: dict[Key, _RowPlace] = {}

    def add(
        self,
        first: int,
        steps: Any,
        keys: Keys,
        moved_rows: Any,
        moved_keys: Keys,
        unsent_rows: Any,
        unsent_columns: Any,
    ) -> int:
        """Add changes in stream order.

        Parameters
        ----------
        first : int
            The number of the first change; the others count on from there.
        steps : numpy.ndarray of uint8, of shape (n,)
            `INSERT`, `UPDATE` or `DELETE` for each change.
        keys : Keys of n rows
            The key of the row after each change; for a delete, the key of the deleted row.
        moved_rows : numpy.ndarray of int64, of shape (m,)
            The updates that have the row's old key, as ascending indexes of changes.
        moved_keys : Keys of m rows
            The old keys of these updates. They may equal the new keys.
        unsent_rows, unsent_columns : numpy.ndarray of int64, of shape (k,)
            Pairs of an update, as index, and a column that it did not send; sorted and unique.

        Returns
        -------
        int
            -1, or the index of the first change that does not fit the earlier ones. After such a
            change, the fold can't be used any more.
        """
        now, before = self._listed(keys), self._listed(moved_keys)
        unsent: dict[int, set[int]] = {}
        for row, column in zip(unsent_rows.tolist(), unsent_columns.tolist(), strict=True):
            unsent.setdefault(row, set()).add(column)
        moved = dict(zip(moved_rows.tolist(), before, strict=True))
        for i, step in enumerate(steps.tolist()):
            number = first + i
            if step == INSERT:
                row = _FoldedRow(None)
                if not self._arrive(now[i], row, number):
                    return i
                self._sent(row, number, ())
            elif step == DELETE:
                if self._leave(now[i], number) is None:
                    return i
            else:
                key = now[i]
                old = moved.get(i, key)
                folded_row = self._there(old) if old == key else self._leave(old, number)
                if folded_row is None or (old != key and not self._arrive(key, folded_row, number)):
                    return i
                self._places[key].last = number
                self._sent(folded_row, number, unsent.get(i, ()))
        return -1

    def truncate(self) -> None:
        """Drop all rows: the table is empty, and what it had before does not matter."""
        self._places.clear()
        self.truncated = True

    def _listed(self, keys: Keys) -> list[Any]:
        values, ends = keys
        if self._integers:
            listed: list[Any] = values.tolist()
            return listed
        data, at = values.tobytes(), ends.tolist()
        return [data[at[i] : at[i + 1]] for i in range(len(at) - 1)]

    def _there(self, key: Key) -> _FoldedRow | None:
        """Return the row with a key; if there is none, set `fault` and return None."""
        place = self._places.get(key)
        if place is None and not self.truncated:
            place = self._places[key] = _RowPlace(is_in_table=True)
            place.row = _FoldedRow(key)
        if place is None or place.row is None:
            self.fault = VACANT
            return None
        return place.row

    def _leave(self, key: Key, number: int) -> _FoldedRow | None:
        row = self._there(key)
        if row is not None:
            place = self._places[key]
            place.row, place.last = None, number
            if row.home == key and row.origin == UNKNOWN:
                row.origin = number
        return row

    def _arrive(self, key: Key, row: _FoldedRow, number: int) -> bool:
        place = self._places.get(key)
        if place is None:
            place = self._places[key] = _RowPlace(is_in_table=False)
        if place.row is not None:
            self.fault = OCCUPIED
            return False
        place.row, place.last = row, number
        return True

    def _sent(self, row: _FoldedRow, number: int, unsent: Any) -> None:
        if not unsent:
            row.sources = None
        else:
            before = row.sources or [row.row] * self._width
            row.sources = [
                before[column] if column in unsent else number for column in range(self._width)
            ]
        row.row = number

    def widen(self, width: int) -> None:
        """Add columns, which no change has sent so far."""
        for place in self._places.values():
            if place.row is not None and place.row.sources is not None:
                place.row.sources += [UNKNOWN] * (width - self._width)
        self._width = width

    def followed(self) -> Followed:
        """Return the result for each key, in the order in which changes first touched the keys.

        Keys that the table had neither before nor after the changes are left out.
        """
        rows: list[tuple[bool, bool, int, int, int]] = []
        sources: list[list[int]] = []
        for key, place in self._places.items():
            row = place.row
            if row is None:
                if place.is_in_table:
                    rows.append((True, False, place.last, -1, UNKNOWN))
                continue
            vector = -1
            if row.sources is not None:
                vector = len(sources)
                sources.append(row.sources)
            origin = UNKNOWN if row.home == key else row.origin
            rows.append((place.is_in_table, True, place.last, vector, origin))
        columns = np.array(rows, np.int32).reshape(-1, 5).T.copy()
        return Followed(
            columns[0].astype(bool),
            columns[1].astype(bool),
            last=columns[2],
            vectors=columns[3],
            origins=columns[4],
            sources=np.array(sources, np.int32).reshape(-1, self._width),
        )


_SEED = os.urandom(16)


def digests(data: Any, ends: Any) -> Any:
    """Return a hash of 128 bits for each row. Rows with the same bytes have the same hash.

    The probability that any two of a billion different rows have the same hash is below 1 in 10^20.
    The seed is random for each process.

    Parameters
    ----------
    data, ends : numpy.ndarray
        The rows' bytes, in the form of `Keys`.

    Returns
    -------
    numpy.ndarray of uint64, of shape (n, 2)
    """
    content, at = data.tobytes(), ends.tolist()
    hashes = [
        hashlib.blake2b(content[start:end], digest_size=16, key=_SEED).digest()
        for start, end in itertools.pairwise(at)
    ]
    return np.frombuffer(b"".join(hashes), np.uint64).reshape(-1, 2)
