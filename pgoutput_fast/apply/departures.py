"""What the newest catalogue says of a sync's tables: which have left, and which never came."""

from __future__ import annotations

import logging
import time
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from ..history import history_of
from ..names import qualified, shown_table

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping
    from pathlib import Path

    from .targets import Held

_log = logging.getLogger(__name__)

_PAUSE = 1.0  # seconds between two looks at the history, at least


def mistaken(
    patterns: Iterable[str],
    partitioned: Iterable[str],
    shown: Collection[str],
    names: Collection[str],
) -> Iterator[str]:
    """Tell of each table that is asked for and not published.

    Parameters
    ----------
    patterns : iterable of str
        Those of the tables that are wanted.
    partitioned : iterable of str
        ``namespace.name`` of tables for which partitions are given.
    shown, names : collection of str
        The published tables, as patterns match them, and as ``namespace.name``.
    """
    patterns = [*patterns]
    for one in dict.fromkeys(one.removeprefix("*.") for one in patterns):
        # Of a name with a dot the command makes two patterns, as it may lack its schema.
        same = [other for other in patterns if other.removeprefix("*.") == one]
        if not any(fnmatchcase(name, other) for name in shown for other in same):
            yield f"tables={one!r} matches no published table"
    for one in partitioned:
        if one not in names:
            yield f"partition_by= names {one}, which is no published table"


class Departures:
    """Tells once what a user should know of tables that are published, or are not.

    Parameters
    ----------
    directory : pathlib.Path
        The segments.
    patterns : iterable of str
        Those of the tables that are wanted.
    partitioned : iterable of str
        ``namespace.name`` of tables for which partitions are given.

    Attributes
    ----------
    left : tuple of str
        Tables that are dropped, or not published any more, by their names in the target.
    """

    def __init__(
        self, directory: Path, patterns: Iterable[str], partitioned: Iterable[str]
    ) -> None:
        self._directory = directory
        self._patterns, self._partitioned = [*patterns], [*partitioned]
        self._next = 0.0
        self._gone: set[int] = set()
        self.left: tuple[str, ...] = ()

    def look(self, tables: Mapping[int, Held], *, at_once: bool = False) -> None:
        """Compare with the newest catalogue, if it is time or at once.

        Parameters
        ----------
        tables : mapping of int to Held
            What the target has, by relation id.
        """
        now = time.monotonic()
        if now < self._next and not at_once:
            return
        self._next = now + _PAUSE
        history = history_of([self._directory])
        if history is None:
            return
        catalog = history.newest_tables
        there = catalog.by_id()
        # A table may have come since the catalogue was read; its snapshot tells when.
        gone = {
            relation_id: held for relation_id, held in tables.items()
            if relation_id not in there and 0 < held.copy_lsn < history.newest_start
        }  # fmt: skip
        shown, names = {*map(shown_table, catalog.tables)}, {*map(qualified, catalog.tables)}
        for relation_id in sorted(gone.keys() - self._gone):
            name, stored = qualified(gone[relation_id]), gone[relation_id].stored
            # One that has come since under this name is another table.
            happened = (
                "was dropped, and another one has its name"
                if name in names
                else "is not published any more, or was dropped"
            )
            _log.warning("%s %s; what it had stays in %s", name, happened, stored)
        self._gone = set(gone)
        self.left = tuple(held.stored for held in gone.values())
        for warning in mistaken(self._patterns, self._partitioned, shown, names):
            _log.warning("%s", warning)
        self._patterns, self._partitioned = [], []  # it is told once
