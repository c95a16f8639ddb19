"""Keys that are looked for in a table's files, or rows of a table without a key."""

from __future__ import annotations

import bisect
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from .delta_types import stored_array
from .keys import digests_of, is_integer, keys_of


class MergeKeys:
    """Rows of some columns, each found by its values.

    It keeps a number for each row, or two hashes, and not the values.

    Parameters
    ----------
    are_rows : bool
        Whether these are whole rows, in which values may be null.

    Attributes
    ----------
    count : int
    """

    def __init__(self, *, are_rows: bool = False) -> None:
        self._are_rows = are_rows
        self._types: list[pa.DataType] = []
        self._numbers: list[Any] = []
        self._order: Any = None
        self._first: list[pa.Array] = []
        self._sorted: pa.Array | None = None
        self.count = 0

    def add(self, columns: list[pa.Array]) -> None:
        """Take more rows; all come before others are looked for."""
        self._types = [column.type for column in columns]
        self._numbers.append(self._numbered(columns))
        if not self._are_rows:
            self._first.append(columns[0])
        self.count += len(columns[0])

    def _numbered(self, columns: list[pa.Array]) -> Any:
        """For each row one number or two, as an array of shape (1 or 2, n)."""
        count = len(columns[0])
        if not self._are_rows and is_integer(self._types):
            return keys_of(columns, count).values.reshape(1, count)
        # Not pyarrow's own comparison: 0.0 and -0.0 are two keys to the fold.
        return digests_of(columns, count).T

    def places(self, columns: list[pa.Array]) -> Any:
        """For each row the number of the one that is equal, or -1."""
        given = [stored_array(one, type_) for one, type_ in zip(columns, self._types, strict=True)]
        if self._order is None:
            numbers = np.concatenate(self._numbers, axis=1)
            self._order = np.argsort(numbers[0], kind="stable")
            self._numbers = [numbers[:, self._order]]
        (own,), wanted = self._numbers, self._numbered(given)
        last = self.count - 1
        at = np.minimum(np.searchsorted(own[0], wanted[0]), last)
        # Where several have the same first number, the second one tells.
        while True:
            found = (own[:, at] == wanted).all(axis=0)
            others = ~found & (own[0, at] == wanted[0]) & (at < last)
            if not others.any():
                break
            at[others] += 1
        if not self._are_rows and given[0].null_count:
            found &= given[0].is_valid().to_numpy(zero_copy_only=False)
        return np.where(found, self._order[at], -1)

    def may_be_in(self, least: Any, greatest: Any) -> bool:
        """Whether the first column of a row may lie between two values."""
        if least is None or greatest is None:
            return True
        if self._sorted is None:
            values = pa.concat_arrays(self._first)
            self._first = []
            self._sorted = values.take(pc.sort_indices(values)).drop_null()
        at = bisect.bisect_left(self._sorted, least, key=lambda value: value.as_py())
        return at < len(self._sorted) and bool(self._sorted[at].as_py() <= greatest)
