"""Request new snapshots of stale tables from the capture, at most ten a day for each table."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from ..changelog.requests import request_copy
from ..names import qualified
from ..segments.folders import TABLES
from .table_plan import LEFT_UNCOPIED, UNSELECTED
from .targets import CHANGES_ALONE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from ..changelog.log import ChangeLog
    from ..changelog.read_plan import Position
    from ..changelog.snapshot_states import TableSnapshots
    from .options import SyncOptions
    from .targets import TableState

_log = logging.getLogger(__name__)

_AGAIN = 60.0  # seconds between two checks whether a table needs a snapshot
_SNAPSHOTS = 10
_SNAPSHOTS_WITHIN = 86400.0  # seconds
"""A table that got `_SNAPSHOTS` snapshots in this time gets no further request."""
_MANY = (
    f"it got {_SNAPSHOTS} snapshots within a day, so sync requests no other one until the oldest "
    "of them is a day old. Find out why its changes do not fit, or request a snapshot yourself "
    "with pgoutput-fast snapshot"
)
CUT_OFF = (
    "it was dropped or left the publications, and its last changes before that are not in this "
    "directory"
)
"""Reason of a stale table that can't get a snapshot, because it is dropped or not published."""


class SnapshotRequests:
    """The snapshot requests of a sync.

    Parameters
    ----------
    log : ChangeLog
    name : str
        The target's name in requests.
    options : SyncOptions
    position : callable
        Returns the sync's position.
    """

    def __init__(
        self, log: ChangeLog, name: str, options: SyncOptions, position: Callable[[], Position]
    ) -> None:
        self._log, self._directory, self._name = log, log.directory, name
        self._options, self._position = options, position
        self._asked: set[tuple[int, str]] = set()
        self._over_limit: set[int] = set()
        self._next = 0.0  # by time.monotonic

    def needs(self, table_state: TableState) -> bool:
        """Whether a table needs a snapshot that the capture can make."""
        as_wanted = table_state.stale == CHANGES_ALONE and self._options.uncopied == "changes"
        # A dropped table, or one that left the publications, can't get a snapshot. Sync would not
        # read that of a table with an unselected name.
        needs_none = as_wanted or table_state.stale in (None, LEFT_UNCOPIED, CUT_OFF, UNSELECTED)
        return self._options.on_error == "pause" and not needs_none

    def is_over_limit(self, relation_id: int) -> bool:
        """Whether a table got so many snapshots that no further one is requested yet."""
        return relation_id in self._over_limit

    def is_copied(self, relation_id: int) -> bool:
        """Whether a snapshot is under way, or complete and not read yet.

        An earlier sync may have requested it.
        """
        state = self._log.view().states.get(relation_id)
        if state is None:
            return False
        at = self._position().of(relation_id)
        return state.waits_from is not None or any(
            snapshot.lsn > at for snapshot in state.snapshots
        )

    def ask(self, tables: Mapping[int, TableState], *, at_once: bool = False) -> None:
        """Request snapshots of stale tables, once for each reason.

        Without `at_once`, it does so at most once a minute.
        """
        if time.monotonic() < self._next and not at_once:
            return
        self._next = time.monotonic() + _AGAIN
        before, self._over_limit = self._over_limit, set()
        for relation_id, table_state in tables.items():
            if table_state.stale is None or (relation_id, table_state.stale) in self._asked:
                continue
            if not self.needs(table_state) or self.is_copied(relation_id):
                continue
            if _has_many(self._directory, self._log.view().states.get(relation_id)):
                self._over_limit.add(relation_id)
                if relation_id not in before:
                    _log.warning("%s stays stale: %s", qualified(table_state), _MANY)
                continue
            self._asked.add((relation_id, table_state.stale))
            why = f"the sync to {self._name} requested it: {table_state.stale}"
            request_copy(
                self._directory, relation_id, [table_state.namespace, table_state.name], why
            )


def _has_many(directory: Path, state: TableSnapshots | None) -> bool:
    """Whether a table got `_SNAPSHOTS` snapshots within a day, so that another would not help."""
    if state is None:
        return False
    begin, count = time.time() - _SNAPSHOTS_WITHIN, 0
    for snapshot in state.snapshots[-_SNAPSHOTS:]:
        path = TABLES.path(directory) / snapshot.name
        count += path.exists() and path.stat().st_mtime >= begin
    return count >= _SNAPSHOTS
