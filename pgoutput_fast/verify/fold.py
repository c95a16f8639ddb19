"""Compute the rows of tables from the changes of a change log.

DuckDB computes the parts of all values, and gives the changes in stream order. SQLite stores the
rows in a file. So memory grows neither with a table nor with a transaction.
"""

from __future__ import annotations

import contextlib
import sqlite3
from typing import TYPE_CHECKING, Any, NamedTuple

from .sums import Sum, halves, md5
from .texts import UNKNOWN, split

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

_UNKNOWN_PART = f"{UNKNOWN},"
_AT_ONCE = 10_000  # maximum number of rows that are given to SQLite at a time
_MOST_LETTERS = 16 << 20  # maximum characters of these rows
_MOST_NAMES = 500  # maximum parameters of a statement


class KeyChange(NamedTuple):
    """A change of a row, with the parts of the compared columns."""

    op: str
    old_kind: str | None
    after: tuple[str, ...]
    """The new row. Columns that were not sent are unknown. Ignored in a delete."""
    before: tuple[str, ...]
    """The old row. If only its key was sent, the other columns are unknown."""


class HistoryError(Exception):
    """The changes do not determine the rows of the table; the message says why."""


class FoldedRowStore:
    """The rows of tables in an SQLite file, which is deleted with its directory.

    Parameters
    ----------
    path : pathlib.Path
        A file that does not exist.
    """

    def __init__(self, path: Path) -> None:
        self.connection = sqlite3.connect(path, isolation_level=None)
        for setting in ("journal_mode = OFF", "synchronous = OFF", "cache_size = -65536"):
            self.connection.execute(f"PRAGMA {setting}")

    def close(self) -> None:
        """Close the file."""
        self.connection.close()


class FoldedRows:
    """The rows of one table; see `sums.Rows`.

    Parameters
    ----------
    store : FoldedRowStore
    table : str
        The name of a table in the store, which is created if it does not exist.
    key : sequence of int
        Indexes of the key's columns, in the key's order; empty for a multiset.
    """

    def __init__(self, store: FoldedRowStore, table: str, key: Sequence[int]) -> None:
        self._run = store.connection.execute
        self._many = store.connection.executemany
        self._table, self._key = table, list(key)
        # `times` is the number of equal rows of a multiset. In a table with a key, it is above 1 if
        # a row was inserted whose key another row had already.
        self._run(
            f"CREATE TABLE IF NOT EXISTS {table} (name TEXT PRIMARY KEY, parts TEXT, times INTEGER,"
            " unknown INTEGER) WITHOUT ROWID"
        )
        self._put = (
            f"INSERT INTO {table} VALUES (?, ?, ?, ?) ON CONFLICT (name) DO UPDATE "  # noqa: S608
            "SET parts = excluded.parts, unknown = excluded.unknown, times = times + excluded.times"
        )
        self._pending: list[tuple[str, str, int, bool]] = []
        self._letters = 0  # characters of the pending parts

    def empty(self) -> None:
        """Delete all rows."""
        self._pending.clear()
        self._letters = 0
        self._run(f"DELETE FROM {self._table}")  # noqa: S608

    # --- changes ---------------------------------------------------------------------------------

    def apply(self, changes: Iterable[KeyChange]) -> None:
        """Apply changes in stream order.

        Raises
        ------
        HistoryError
            A change does not say which row it concerns.
        """
        apply = self._apply_keyed if self._key else self._apply_to_multiset
        self._run("BEGIN")  # otherwise each statement would be a transaction
        try:
            for change in changes:
                if change.op == "truncate":
                    self.empty()
                elif change.op in ("insert", "read"):
                    self._insert(change.after)
                else:
                    apply(change)
            self._flush()
        finally:
            self._run("COMMIT")

    def _name(self, row: Sequence[str]) -> str:
        if not self._key:
            return md5("".join(row))  # `incomplete` says if unknown values remain
        parts = [row[i] for i in self._key]
        if _UNKNOWN_PART in parts:
            raise HistoryError("a change lacks the key of its row")
        return md5("".join(parts))

    def _insert(self, row: Sequence[str]) -> None:
        parts = "".join(row)
        self._pending.append((self._name(row), parts, 1, _UNKNOWN_PART in row))
        self._letters += len(parts)
        if len(self._pending) >= _AT_ONCE or self._letters >= _MOST_LETTERS:
            self._flush()

    def _flush(self) -> None:
        self._many(self._put, self._pending)
        self._pending.clear()
        self._letters = 0

    def _apply_keyed(self, change: KeyChange) -> None:
        self._flush()
        old, new = change.before, list(change.after)
        if change.op == "delete":
            self._delete(self._name(old))
            return
        if change.old_kind is not None:
            for i in self._key if change.old_kind == "K" else range(len(new)):
                if new[i] == _UNKNOWN_PART:
                    new[i] = old[i]
        name = self._name(new)
        was = name if change.old_kind is None else self._name(old)
        if _UNKNOWN_PART in new:
            row = self._run(
                f"SELECT parts FROM {self._table} WHERE name = ?",  # noqa: S608
                [was],
            ).fetchone()
            if row is not None:
                old_parts = [f"{part}," for part in split(row[0])]
                new = [
                    old_parts[i] if part == _UNKNOWN_PART else part for i, part in enumerate(new)
                ]
        if was != name:
            self._delete(was)
            self._insert(new)
        else:
            self._run(
                f"INSERT OR REPLACE INTO {self._table} SELECT ?, ?, coalesce((SELECT times FROM "  # noqa: S608
                f"{self._table} WHERE name = ?), 1), ?",
                [name, "".join(new), name, _UNKNOWN_PART in new],
            )

    def _delete(self, name: str) -> None:
        self._run(f"DELETE FROM {self._table} WHERE name = ?", [name])  # noqa: S608

    def _apply_to_multiset(self, change: KeyChange) -> None:
        self._flush()
        old = change.before
        if change.old_kind != "O":
            raise HistoryError(
                "the table has no key, and a change lacks the old row: set REPLICA IDENTITY FULL, "
                "and take a new snapshot"
            )
        self._run(self._put, (self._name(old), "".join(old), -1, _UNKNOWN_PART in old))
        self._run(
            f"DELETE FROM {self._table} WHERE name = ? AND times = 0",  # noqa: S608
            [self._name(old)],
        )
        if change.op != "delete":
            pairs = zip(change.after, old, strict=True)
            self._insert([was if now == _UNKNOWN_PART else now for now, was in pairs])

    # --- rows ------------------------------------------------------------------------------------

    def incomplete(self) -> tuple[int, list[str]] | None:
        """Return the number of rows with values that no change has, and the parts of one row."""
        (number,) = self._run(
            f"SELECT count(*) FROM {self._table} WHERE unknown"  # noqa: S608
        ).fetchone()
        if not number:
            return None
        (parts,) = self._run(
            f"SELECT parts FROM {self._table} WHERE unknown LIMIT 1"  # noqa: S608
        ).fetchone()
        return number, split(parts)

    def sums(self, digits: int, within: Sequence[str] | None) -> dict[str, Sum]:
        """See `Rows`."""
        sums: dict[str, list[int]] = {}
        for name, digest, times in self._digested(within):
            totals = sums.setdefault(name[:digits], [0, 0, 0])
            first, second = halves(digest)
            totals[0] += times
            totals[1] += times * first
            totals[2] += times * second
        return {name: Sum(*totals) for name, totals in sums.items()}

    def digests(self, within: Sequence[str]) -> Iterator[tuple[str, str, int]]:
        """See `Rows`."""
        yield from self._digested(within)

    def named(self, names: Iterable[str]) -> Iterator[tuple[str, str, int]]:
        """See `Rows`."""
        for name, parts, times in self.parts(names):
            yield name, md5(parts), times

    def parts(self, names: Iterable[str]) -> Iterator[tuple[str, str, int]]:
        """See `Rows`."""
        wanted = list(names)
        for start in range(0, len(wanted), _MOST_NAMES):
            some = wanted[start : start + _MOST_NAMES]
            marks = ", ".join("?" * len(some))
            yield from self._run(
                f"SELECT name, parts, times FROM {self._table} WHERE name IN ({marks})",  # noqa: S608
                some,
            )

    def _digested(self, within: Sequence[str] | None) -> Iterator[tuple[str, str, int]]:
        query = f"SELECT name, parts, times FROM {self._table}"  # noqa: S608
        for beginning in within if within is not None else ("",):
            # "g" comes after all hexadecimal digits.
            cursor: Any = self._run(
                f"{query} WHERE name >= ? AND name < ?", [beginning, f"{beginning}g"]
            )
            with contextlib.closing(cursor):
                for name, parts, times in cursor:
                    yield name, md5(parts), times
