"""Tables that are read apart from the others, because they are paused or have to catch up."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from rich.filesize import decimal

from ..lsn import format_lsn
from .outcomes import Stale
from .targets import Gap

if TYPE_CHECKING:
    from collections.abc import KeysView

    from ..changelog.read_plan import Position
    from ..changelog.view import View
    from .targets import TableState

_AGAIN = 60.0  # seconds from one try of a paused table to the next


class PauseLimit(NamedTuple):
    """The limits of what a change log keeps for a paused table. Fields: bytes, seconds."""

    bytes: int
    seconds: float


class SeparateTables:
    """The tables that are read apart, with the time of each one's next attempt."""

    def __init__(self, limit: PauseLimit) -> None:
        self._limit = limit
        self._next: dict[int, float] = {}  # relation id to time.monotonic

    @property
    def tables(self) -> KeysView[int]:
        """The relation ids of the tables."""
        return self._next.keys()

    def add(self, relation_id: int, *, at_once: bool = False) -> None:
        """Read a table apart; the next attempt is in a minute, or at once."""
        self._next[relation_id] = 0.0 if at_once else time.monotonic() + _AGAIN

    def remove(self, relation_id: int) -> None:
        """Read a table with the others again."""
        del self._next[relation_id]

    def due(self) -> list[int]:
        """Return the tables whose next attempt is due."""
        now = time.monotonic()
        return [relation_id for relation_id, at in self._next.items() if at <= now]

    def stale_outcome(
        self, view: View, position: Position, table_state: TableState
    ) -> Stale | None:
        """Return the outcome for a table that can't wait any longer; None if it can.

        A table does not wait if a newer snapshot is complete: its rows include the waiting changes.

        Parameters
        ----------
        view : View
            The change log now.
        position : Position
            The sync's position.
        table_state : TableState
            The table state of the paused table.
        """
        if table_state.paused is None:
            return None
        at = position.of(table_state.relation_id)
        state = view.states.get(table_state.relation_id)
        newer = 0 if state is None or not state.snapshots else state.snapshots[-1].lsn - 1
        if newer > at:
            why, end = "a newer snapshot is complete", newer
        else:
            since = time.time() - table_state.paused.since
            size = _bytes_for(view, position, at)
            if since > self._limit.seconds:
                why = f"it was paused for {since / 3600:.1f} hours, longer than pause_time"
            elif size > self._limit.bytes:
                why = f"the change log kept {decimal(size)} for it, more than pause_bytes"
            else:
                return None
            end = max(at, position.lsn, view.end)
            if state is not None and state.waits_from is not None:
                end = max(at, min(end, state.waits_from))
        gap = f"its changes from {format_lsn(at)} to {format_lsn(end)} were skipped"
        return Stale(
            table_state,
            f"{gap}, because {why}. It was paused: {table_state.paused.reason}",
            Gap(at, end),
        )


def _bytes_for(view: View, position: Position, at: int) -> int:
    """Return the bytes of segments that this sync needs only for one table."""
    segments = view.segments
    size = 0
    for segment in segments:
        if at < segment.end_lsn and segment.start_lsn < position.lsn:
            size += segment.path.stat().st_size
    return size
