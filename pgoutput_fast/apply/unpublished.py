"""Compare a sync's tables with the newest catalogue: find departed tables and wrong patterns."""

from __future__ import annotations

import difflib
import logging
import time
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from ..changelog.known import known_tables
from ..errors import PgOutputError
from ..names import qualified, shown_name, shown_table
from ..segments.listing import has_begun
from .naming import stored_table

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from ..catalog import CatalogTable
    from ..changelog.history import History
    from ..changelog.log import ChangeLog
    from .targets import TableState

_log = logging.getLogger(__name__)

_WILDCARDS = frozenset("*?[")
_PAUSE = 1.0  # least seconds between two reads of the schema history


def unpublished_tables(history: History | None, relation_ids: list[int]) -> list[int]:
    """Return the tables that the newest catalogue does not have."""
    if history is None:
        return []
    published = history.newest_tables.by_id()
    return [relation_id for relation_id in relation_ids if relation_id not in published]


def mistaken(patterns: Iterable[str], shown: Collection[str]) -> Iterator[str]:
    """Yield a warning for each pattern that matches no published table, or if there is no table.

    Parameters
    ----------
    patterns : iterable of str
        The patterns of the selected tables.
    shown : collection of str
        The published tables, as patterns match them.
    """
    if not shown:
        yield "the publications have no table: no changes arrive until you add one"
        return
    patterns = [*patterns]
    for pattern in dict.fromkeys(pattern.removeprefix("*.") for pattern in patterns):
        # For a name with a dot, the command gives two patterns: the dot may be part of the name.
        same = [other for other in patterns if other.removeprefix("*.") == pattern]
        if not any(fnmatchcase(name, other) for name in shown for other in same):
            hint = "" if _WILDCARDS.intersection(pattern) else did_you_mean(pattern, shown)
            yield f"the pattern {pattern!r} matches no published table{hint}"


def check_tables(
    patterns: Sequence[str] | None, published: Collection[str], directory: Path
) -> None:
    """Refuse a selection that matches no table: it would keep a slot for an empty target.

    If nothing is published at all, no pattern counts as wrong.

    Parameters
    ----------
    patterns : sequence of str or None
        The patterns of the selected tables; None selects all.
    published : collection of str
        The published tables, as patterns match them.
    directory : pathlib.Path
        The change log. If a capture has begun there, it may have further tables.

    Raises
    ------
    PgOutputError
        No pattern matches a table.
    """
    if patterns is None or not published:
        return
    table_names = known_tables(directory).values() if has_begun(directory) else ()
    names = {*published, *(shown_name(".".join(pair)) for pair in table_names)}
    if not any(fnmatchcase(name, pattern) for name in names for pattern in patterns):
        raise PgOutputError(
            "no published table is selected, so sync did not start: "
            f"{'; '.join(mistaken(patterns, names))}",
            code="no_table",
        )


def did_you_mean(name: str, published: Iterable[str]) -> str:
    """Return a hint with the published table whose name is most similar, or an empty text."""
    names = {full.partition(".")[2]: full for full in published} if "." not in name else {}
    near = difflib.get_close_matches(name, names or published, 1)
    return f"; did you mean {names.get(near[0], near[0])}?" if near else ""


def check_partitions(
    partition_by: Mapping[str, Sequence[str]],
    tables: Iterable[CatalogTable],
    table_states: Iterable[TableState],
) -> None:
    """Refuse partition columns that do not exist, before tables are created with them.

    Parameters
    ----------
    partition_by : mapping of str to sequence of str
        Columns by table, ``namespace.name``.
    tables : iterable of CatalogTable
        The published tables.
    table_states : iterable of TableState
        The tables in the target. Some may not be published any more.

    Raises
    ------
    PgOutputError
        A table is not published, or has no such column.
    """
    published = {qualified(table): table for table in tables}
    target_names = {qualified(table_state) for table_state in table_states}
    for name, columns in partition_by.items():
        if name in target_names:
            continue  # the target checks the partitions of its tables itself
        table = published.get(name)
        if table is None:
            raise PgOutputError(
                f"{name} is not a published table; give schema.name{did_you_mean(name, published)}",
                code="no_table",
                table=name,
                parameter="partition_by",
            )
        published_names = [column.name for column in table.columns if column.is_published]
        for column in columns:
            if column not in published_names:
                raise PgOutputError(
                    f"{name} has no published column {column!r}; it has "
                    f"{', '.join(published_names) or 'none'}",
                    code="no_table",
                    parameter="partition_by",
                    table=name,
                )


class UnpublishedTables:
    """Warns once of tables that departed, and of patterns that match no table.

    Parameters
    ----------
    log : ChangeLog
    patterns : iterable of str
        The patterns of the selected tables.
    shown : callable
        `Target.shown`: returns the name under which users find a table in the target.

    Attributes
    ----------
    left : tuple of str
        Tables that are dropped or not published any more, by their names in the target.
    """

    def __init__(
        self, log: ChangeLog, patterns: Iterable[str], shown: Callable[[str], str]
    ) -> None:
        self._log = log
        self._shown = shown
        self._patterns: list[str] | None = [*patterns]
        self._next = 0.0
        self._gone: set[int] = set()
        self.left: tuple[str, ...] = ()

    def check(self, tables: Mapping[int, TableState], *, at_once: bool = False) -> None:
        """Compare tables with the newest catalogue, at most once a second unless `at_once`.

        Parameters
        ----------
        tables : mapping of int to TableState
            The table states by relation id.
        """
        now = time.monotonic()
        if now < self._next and not at_once:
            return
        self._next = now + _PAUSE
        history = self._log.history()
        if history is None:
            return
        catalog = history.newest_tables
        published = catalog.by_id()
        # A table may be newer than this read of the catalogue: compare with its snapshot's LSN.
        gone = {
            relation_id: table_state for relation_id, table_state in tables.items()
            if relation_id not in published and 0 < table_state.copy_lsn < history.newest_start
        }  # fmt: skip
        shown, names = {*map(shown_table, catalog.tables)}, {*map(qualified, catalog.tables)}
        for relation_id in sorted(gone.keys() - self._gone):
            table_state = gone[relation_id]
            name, stored_name = qualified(table_state), table_state.stored_name
            if name in names and stored_name == stored_table(
                table_state.namespace, table_state.name
            ):
                # A new table has this name, and will get it in the target, too.
                _log.warning(
                    "%s was dropped, and a new table has its name: the target keeps the dropped "
                    "table under another name", name,
                )  # fmt: skip
                continue
            happened = (
                "was dropped, and a new table has its name"
                if name in names
                else "is no longer published, or was dropped"
            )
            shown_tables = self._shown(stored_name)
            _log.warning(
                "%s %s; the target keeps its rows and changes in %s", name, happened, shown_tables
            )
        self._gone = set(gone)
        self.left = tuple(self._shown(table_state.stored_name) for table_state in gone.values())
        if self._patterns is not None:
            for warning in mistaken(self._patterns, shown):
                _log.warning("%s", warning)
        self._patterns = None  # warn only once
