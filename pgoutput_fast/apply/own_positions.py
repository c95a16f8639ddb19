"""How far a table's two tables in a target are by their own logs, and whether one was put back.

A target's `_progress` says up to where each table was looked at. The log of a Delta table says up
to where that one has changes, which may be long before, as none came. So an earlier state of a
single table, such as a copy from a backup, would pass for one to which nothing happened since.
`_progress` therefore also has how far each table's own log was.

That of Delta's RESTORE, or of a rollback of Iceberg's, goes on, and the position stays as it is. So
a mark of the log is kept too, from which on it is looked for such a commit.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, NamedTuple

from .delta_table import OwnPosition
from .targets import CHANGES_ALONE, CHANGES_DELETED, CHANGES_PUT_BACK, DELETED, PUT_BACK

if TYPE_CHECKING:
    from .delta_table import Table
    from .targets import Held


class Positioned:
    """A writer of a table, which knows how far that is."""

    own: OwnPosition

    @property
    def lsn(self) -> int:
        """See `ChangeWriter`."""
        return self.own.lsn

    @property
    def copy_lsn(self) -> int:
        """See `ChangeWriter`."""
        return self.own.copy_lsn


class OwnPositions(NamedTuple):
    """How far a table's two tables are.

    Attributes
    ----------
    changes, state : OwnPosition or None
        Of the newest change table, and of the table of rows; None: it is not known.
    """

    changes: OwnPosition | None = None
    state: OwnPosition | None = None

    @classmethod
    def parse(cls, text: str | None) -> OwnPositions:
        """What `_progress` has; targets of former versions have nothing."""
        return cls(*(one and OwnPosition(*one) for one in json.loads(text))) if text else cls()

    def __str__(self) -> str:
        return json.dumps(self)

    def moved(self, kind: str, position: OwnPosition) -> OwnPositions:
        """With another position of the table that is "changes", or "state"."""
        return self._replace(**{kind: position})

    def look(self, held: Held, changes: Table, state: Table) -> tuple[OwnPositions, str | None]:
        """How far the two are now, and why one is not what it was; None: it is.

        Parameters
        ----------
        held : Held
        changes, state : Table
            They need not be loaded yet.
        """
        for table in (changes, state):
            table.load()
        found, lost = OwnPositions(changes.own, state.own), None
        if held.stale is None and _has_lost(state, self.state):
            lost = PUT_BACK if state.exists else DELETED
        elif held.stale in (None, CHANGES_ALONE) and _has_lost(changes, self.changes):
            lost = CHANGES_PUT_BACK if changes.exists else CHANGES_DELETED
        return found, lost


def _has_lost(table: Table, known: OwnPosition | None) -> bool:
    """Whether a table has less than it had."""
    if table.is_put_back(None if known is None else known.mark):
        return True
    lsn, copy_lsn = table.position
    return known is not None and (lsn < known.lsn or copy_lsn < known.copy_lsn)
