"""The outcome of a window for each table, and its effect on the target state.

A sync commits a table, pauses it, finds it stale, or finds that changes are missing. Only
`fold_outcomes` applies outcomes to the target state, so their meaning is decided in one place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ..errors import PgOutputError
from ..names import qualified
from .targets import Gap, Pause, TableState

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


class Committed(NamedTuple):
    """The changes of a table are committed. Field: table_state (after the window)."""

    table_state: TableState


class Paused(NamedTuple):
    """A table stays as it was before the window, and its changes wait in the change log.

    Attributes
    ----------
    table_state : TableState
        The table state before the window; its version is 0 if the target has no such table.
    error : Exception
        Why the table can't be written.
    """

    table_state: TableState
    error: Exception


class Stale(NamedTuple):
    """The rows of a table are not known any more: the table needs a new snapshot.

    Attributes
    ----------
    table_state : TableState
        The table state after the window.
    reason : str
    gap : Gap or None
        The changes that the change table will never get; None if it has all of them.
    """

    table_state: TableState
    reason: str
    gap: Gap | None = None


class ChangesMissing(NamedTuple):
    """A change table lacks changes that the change log no longer has.

    Attributes
    ----------
    table_state : TableState
        The table state before.
    gap : Gap
    """

    table_state: TableState
    gap: Gap


Outcome = Committed | Paused | Stale | ChangesMissing


class PausedError(PgOutputError):
    """Some tables can't be written, and nothing of the window is committed.

    Attributes
    ----------
    paused : list of Paused
    """

    code = "paused"

    def __init__(self, paused: Iterable[Paused]) -> None:
        self.paused = [*paused]
        super().__init__(
            "; ".join(
                f"{qualified(outcome.table_state)}: {outcome.error}" for outcome in self.paused
            )
        )


def fold_outcomes(
    tables: Mapping[int, TableState], outcomes: Iterable[Outcome], now: float
) -> dict[int, TableState]:
    """Return the table states after some outcomes.

    Parameters
    ----------
    tables : mapping of int to TableState
        The table states before, by relation id.
    outcomes : iterable of Outcome
        In their order.
    now : float
        Seconds since 1970.
    """
    table_states = dict(tables)
    for outcome in outcomes:
        table_state = outcome.table_state
        if isinstance(outcome, Paused):
            before = table_states.get(table_state.relation_id, table_state)
            since = now if before.paused is None else before.paused.since
            table_state = before._replace(paused=Pause(str(outcome.error), since))
        elif isinstance(outcome, Committed):
            table_state = table_state._replace(paused=None)
        else:
            if outcome.gap is not None:
                table_state = table_state._replace(
                    gaps=(*table_state.gaps, outcome.gap),
                    lsn=max(table_state.lsn, outcome.gap.end),
                )
            if isinstance(outcome, Stale):
                table_state = table_state._replace(stale=outcome.reason, paused=None)
        table_states[table_state.relation_id] = table_state
    return table_states
