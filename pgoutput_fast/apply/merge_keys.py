"""A lookup table for keys, or for whole rows of a table without a key, used by merges."""

from __future__ import annotations

import bisect
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from .delta_types import stored_array
from .keys import digests_of, is_integer, keys_of


class MergeKeys:
    """A lookup from the values of some columns to the number of the row that has them.

    It stores one integer or two hashes per row. For keys, it also stores the values of the first
    column, which `may_be_in` needs.

    Parameters
    ----------
    are_rows : bool
        Whether the columns are whole rows, in which values may be null, and not keys.

    Attributes
    ----------
    count : int
        Number of rows.
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
        """Add rows; all rows must be added before the first lookup."""
        self._types = [column.type for column in columns]
        self._numbers.append(self._numbered(columns))
        if not self._are_rows:
            self._first.append(columns[0])
        self.count += len(columns[0])

    def _numbered(self, columns: list[pa.Array]) -> Any:
        """Return one integer or two hashes for each row, as an array of shape (1 or 2, n)."""
        count = len(columns[0])
        if not self._are_rows and is_integer(self._types):
            return keys_of(columns, count).values.reshape(1, count)
        # pyarrow's own comparison does not do: the fold takes 0.0 and -0.0 for two keys.
        return digests_of(columns, count).T

    def places(self, columns: list[pa.Array]) -> Any:
        """Return, for each given row, the number of the equal row here, or -1."""
        arrays = [
            stored_array(column, type_) for column, type_ in zip(columns, self._types, strict=True)
        ]
        if self._order is None:
            numbers = np.concatenate(self._numbers, axis=1)
            self._order = np.argsort(numbers[0], kind="stable")
            self._numbers = [numbers[:, self._order]]
        (own,), wanted = self._numbers, self._numbered(arrays)
        last = self.count - 1
        at = np.minimum(np.searchsorted(own[0], wanted[0]), last)
        # Several rows may share the first hash: go on until both hashes are equal.
        while True:
            is_equal = (own[:, at] == wanted).all(axis=0)
            others = ~is_equal & (own[0, at] == wanted[0]) & (at < last)
            if not others.any():
                break
            at[others] += 1
        if not self._are_rows and arrays[0].null_count:
            is_equal &= arrays[0].is_valid().to_numpy(zero_copy_only=False)
        return np.where(is_equal, self._order[at], -1)

    def may_be_in(self, least: Any, greatest: Any) -> bool:
        """Whether a row may have a first key value between two bounds; None: no bound is known."""
        if least is None or greatest is None:
            return True
        if self._sorted is None:
            values = pa.concat_arrays(self._first)
            self._first = []
            self._sorted = values.take(pc.sort_indices(values)).drop_null()
        at = bisect.bisect_left(self._sorted, least, key=lambda value: value.as_py())
        return at < len(self._sorted) and bool(self._sorted[at].as_py() <= greatest)
