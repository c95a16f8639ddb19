"""What both engines do for rare messages, written once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..decoding.plan import RelationPlan
from ..decoding.state import StreamState
from ..errors import UNKNOWN_HINT
from ..protocol.messages import Truncate, fail_unannounced
from .schema import version_of

NEW_VERSIONS = 1024
"""After this number of new versions of relations an engine forgets those that are out of date."""


def event_of(message: Any, open_xid: int | None, xid: int | None) -> tuple[int, ...]:
    """Return the fields of a message's event; 0 stands for a field that the message does not have.

    Parameters
    ----------
    message
        Any but Insert, Update, Delete and Begin.
    open_xid, xid : int or None
        The top-level xid of the stream chunk that was open before the message, and the xid of the
        transaction that was open.

    Returns
    -------
    tuple of int
        xid of the top-level transaction, subxid, commit_lsn, end_lsn, commit_time.
    """
    top = open_xid if open_xid is not None else xid
    own = getattr(message, "xid", None)
    if own is None or open_xid is not None:
        found = (top, own)
    else:
        found = (own, getattr(message, "subxid", None))
    names = ("commit_lsn", "end_lsn", "commit_time")
    return tuple([value or 0 for value in (*found, *[getattr(message, n, None) for n in names])])


def plans_of(message: Truncate, state: StreamState) -> list[RelationPlan]:
    """Return the plans of the tables that a TRUNCATE names.

    Raises
    ------
    DecodeError
        ``unknown_relation``: one was never announced.
    """
    plans = []
    for i, relation_id in enumerate(message.relation_ids):
        plan = state.plan(relation_id)
        if plan is None:
            fail_unannounced(message, i, UNKNOWN_HINT)
        plans.append(plan)
    return plans


def outdated(
    known: Iterable[tuple[object, ...]], with_rows: Iterable[RelationPlan], state: StreamState
) -> list[tuple[object, ...]]:
    """Return the versions of relations that are not announced any more and have no rows.

    Parameters
    ----------
    known : iterable of tuple
        Keys that :func:`pgoutput_fast.columnar.schema.version_of` made.
    with_rows : iterable of RelationPlan
    state : StreamState
    """
    plans = [*with_rows, *state.plans.values()]
    for staged in state.staged.values():
        plans += staged.plans.values()
    current = {version_of(plan) for plan in plans}
    return [version for version in known if version not in current]
