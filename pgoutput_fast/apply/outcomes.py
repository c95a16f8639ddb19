"""What became of each table in a window, and how that changes what a target has of the tables.

A window commits a table, or pauses it, or finds its rows lost. One function folds these outcomes
into the state of the target, so that no other place decides what an outcome means.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ..errors import PgOutputError
from ..names import qualified
from .targets import Gap, Held, Pause

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


class Committed(NamedTuple):
    """The changes of a table stand. Field: held (what the target has of the table now)."""

    held: Held


class Paused(NamedTuple):
    """A table stays as it was before the window, and its changes wait in the change log.

    Attributes
    ----------
    held : Held
        What the target had of the table before the window; version 0: nothing.
    error : Exception
        Why the table can't go on.
    """

    held: Held
    error: Exception


class Stale(NamedTuple):
    """The rows of a table are not known any more: the table needs a new snapshot.

    Attributes
    ----------
    held : Held
        What the target has of the table now.
    reason : str
    gap : Gap or None
        The changes that the table will never get; None: the change table has all of them.
    """

    held: Held
    reason: str
    gap: Gap | None = None


Outcome = Committed | Paused | Stale


class PausedError(PgOutputError):
    """Some tables can't go on, and nothing of the window stands.

    Attributes
    ----------
    paused : list of Paused
    """

    code = "paused"

    def __init__(self, paused: Iterable[Paused]) -> None:
        self.paused = [*paused]
        super().__init__("; ".join(f"{qualified(one.held)}: {one.error}" for one in self.paused))


def fold_outcomes(
    tables: Mapping[int, Held], outcomes: Iterable[Outcome], now: float
) -> dict[int, Held]:
    """Return what a target has of its tables after some outcomes.

    Parameters
    ----------
    tables : mapping of int to Held
        What it had, by relation id.
    outcomes : iterable of Outcome
        In their order.
    now : float
        Seconds since 1970.
    """
    found = dict(tables)
    for outcome in outcomes:
        held = outcome.held
        if isinstance(outcome, Paused):
            before = found.get(held.relation_id, held)
            since = now if before.paused is None else before.paused.since
            held = before._replace(paused=Pause(str(outcome.error), since))
        elif isinstance(outcome, Stale):
            gaps = held.gaps if outcome.gap is None else (*held.gaps, outcome.gap)
            lsn = held.lsn if outcome.gap is None else max(held.lsn, outcome.gap.end)
            held = held._replace(stale=outcome.reason, paused=None, gaps=gaps, lsn=lsn)
        else:
            held = held._replace(paused=None)
        found[held.relation_id] = held
    return found
