"""Follow the rows of a table from change to change. The twin of ``_folder.pyx``."""

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
    """A row of the table, wherever its key takes it.

    `row` is the change that sent its values, `sources` for each column the change where they are
    not all the same. `home` is the key under which the table had it before the first change, None
    for a row that was inserted since; `origin` is the change that took it away from there.
    """

    __slots__ = ("home", "origin", "row", "sources")

    def __init__(self, home: Key | None) -> None:
        self.home = home
        self.row = self.origin = UNKNOWN
        self.sources: list[int] | None = None


class _RowPlace:
    """A key: whether the table had a row there, the row that is there now, its last change."""

    __slots__ = ("held", "last", "row")

    def __init__(self, held: bool) -> None:
        self.held = held
        self.row: _FoldedRow | None = None
        self.last = UNKNOWN


class Fold:
    """Goes through the changes of a table with a key.

    Parameters
    ----------
    width : int
        The number of columns.
    integers : bool
        Whether keys are integers, otherwise they are bytes.

    Attributes
    ----------
    truncated : bool
        Whether the table was emptied.
    misfit : int
        `FITS`, or how the change that :meth:`add` returned does not go with those before it.
    """

    def __init__(self, width: int, integers: bool) -> None:
        self.truncated = False
        self.misfit = FITS
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
        """Take changes in their order.

        Parameters
        ----------
        first : int
            The number of the first one; the others follow.
        steps : numpy.ndarray of uint8, of shape (n,)
        keys : Keys of n rows
            The key after each change; of a delete the key of the row.
        moved_rows : numpy.ndarray of int64, of shape (m,)
            Updates, counted from 0 and ascending, that bring the key before the change.
        moved_keys : Keys of m rows
            The keys before them, which may be the same as those after.
        unsent_rows, unsent_columns : numpy.ndarray of int64, of shape (k,)
            Updates, counted from 0, with the columns that they did not send; ascending, and each
            pair once.

        Returns
        -------
        int
            -1, or the first change that does not go with those before it, counted from 0. Nothing
            can be added then.
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
                found = self._there(old) if old == key else self._leave(old, number)
                if found is None or (old != key and not self._arrive(key, found, number)):
                    return i
                self._places[key].last = number
                self._sent(found, number, unsent.get(i, ()))
        return -1

    def truncate(self) -> None:
        """Forget all rows: the table is empty, and nothing was before."""
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
        """The row that has a key; None, and `misfit` says why, if there is none."""
        place = self._places.get(key)
        if place is None and not self.truncated:
            place = self._places[key] = _RowPlace(held=True)
            place.row = _FoldedRow(key)
        if place is None or place.row is None:
            self.misfit = VACANT
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
            place = self._places[key] = _RowPlace(held=False)
        if place.row is not None:
            self.misfit = OCCUPIED
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
        """Go on with more columns, which no change has sent so far."""
        for place in self._places.values():
            if place.row is not None and place.row.sources is not None:
                place.row.sources += [UNKNOWN] * (width - self._width)
        self._width = width

    def followed(self) -> Followed:
        """What became of the keys, in the order in which they were first touched.

        Keys that the table had not before, and has not now, are left out.
        """
        found: list[tuple[bool, bool, int, int, int]] = []
        sources: list[list[int]] = []
        for key, place in self._places.items():
            row = place.row
            if row is None:
                if place.held:
                    found.append((True, False, place.last, -1, UNKNOWN))
                continue
            vector = -1
            if row.sources is not None:
                vector = len(sources)
                sources.append(row.sources)
            origin = UNKNOWN if row.home == key else row.origin
            found.append((place.held, True, place.last, vector, origin))
        columns = np.array(found, np.int32).reshape(-1, 5).T.copy()
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
    """Return hashes of rows that are the same if the rows' bytes are, and else are not.

    They have 128 bits, and a seed of this process. So two of a billion rows have the same one with
    a chance of 1 in 10^20.

    Parameters
    ----------
    data, ends : numpy.ndarray
        The rows' bytes, as of `Keys`.

    Returns
    -------
    numpy.ndarray of uint64, of shape (n, 2)
    """
    found, at = data.tobytes(), ends.tolist()
    made = [
        hashlib.blake2b(found[start:end], digest_size=16, key=_SEED).digest()
        for start, end in itertools.pairwise(at)
    ]
    return np.frombuffer(b"".join(made), np.uint64).reshape(-1, 2)
