"""Check that a change log goes on where a target is, and lacks no changes in between."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from ..changelog.consumers import consumers
from ..changelog.known import how_to_copy
from ..changelog.read_plan import first_position, lacking
from ..changelog.snapshot_states import SnapshotStates
from ..errors import Argument, PgOutputError
from ..lsn import format_lsn
from ..names import qualified
from ..segments.folders import BEGIN_NAME
from .targets import TargetOrigin
from .unpublished import unpublished_tables

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ..changelog.log import ChangeLog
    from ..changelog.read_plan import Position
    from ..changelog.snapshot_states import Snapshot, TableSnapshots
    from ..changelog.view import View
    from .options import Uncopied
    from .targets import TargetState


def check_position(
    log: ChangeLog, name: str, target_state: TargetState, position: Position, uncopied: Uncopied
) -> list[int]:
    """Refuse a change log that lacks changes which the target needs next.

    Parameters
    ----------
    log : ChangeLog
    name : str
        The target's name in errors.
    target_state : TargetState
        The target state.
    position : Position
        The position from which the change log is read for this target.
    uncopied : {"error", "empty", "changes"}

    Returns
    -------
    list of int
        Relation ids of tables that lack changes, but are not published any more. They can't get a
        snapshot, so they are no error.

    Raises
    ------
    PgOutputError
        Other tables lack changes, or `uncopied` is "empty" and the first segments are deleted.
    """
    directory = log.directory
    if not target_state.lsn and uncopied == "empty" and (directory / BEGIN_NAME).exists():
        raise PgOutputError(
            f"the first segments of {directory} are deleted: a table without a snapshot may have "
            "had rows before the changes that are left",
            code="changes_missing",
            path=str(directory),
            parameter="uncopied",
            hint=("Request a snapshot of each table, or give ", Argument("uncopied", "changes")),
        )
    lacks = _behind(log.view().states, target_state, position)
    gone = unpublished_tables(log.history(), lacks)
    behind = [relation_id for relation_id in lacks if relation_id not in gone]
    if behind:
        table_state = target_state.tables[behind[0]]
        raise PgOutputError(
            f"{name} has the changes of {table_state.namespace}.{table_state.name} before "
            f"{format_lsn(table_state.lsn)}, "
            f"but sync would read {directory} from {format_lsn(position.of(behind[0]))} on: the "
            "changes in between would be lost",
            code="changes_missing",
            hint=f"Restore the change log, or {how_to_copy(directory, behind)}",
            table=qualified(table_state),
            path=str(directory),
        )
    return gone


def _behind(
    states: Mapping[int, TableSnapshots], target_state: TargetState, position: Position
) -> list[int]:
    """Return the tables whose position is beyond the target's LSN; not if a snapshot comes."""
    relation_ids = []
    for relation_id, table_state in target_state.tables.items():
        at = position.of(relation_id)
        state = states.get(relation_id)
        comes = state is not None and (
            state.waits_from is not None
            or any(
                snapshot.lsn > table_state.copy_lsn and snapshot.lsn - 1 >= at
                for snapshot in state.snapshots
            )
        )
        if table_state.lsn < at and not comes and table_state.stale is None:
            relation_ids.append(relation_id)
    return relation_ids


def lost_tables(log: ChangeLog, target_state: TargetState, consumer: str) -> list[int]:
    """Return the relation ids of tables with changes that neither change log nor target has.

    These tables need a new snapshot before a sync can begin.
    """
    view = log.view()
    positions = (
        {entry.name: entry.position for entry in consumers(log.directory)}
        if target_state.lsn
        else {}
    )
    position = positions.get(consumer)
    lost: set[int] = set()
    if position is None:
        begin = view.begin
        position = first_position(view.states, begin)
        lost.update(lacking(position, view.states, begin))
    behind = _behind(view.states, target_state, position)
    gone = unpublished_tables(log.history(), behind)
    return sorted(lost.union(relation_id for relation_id in behind if relation_id not in gone))


def origin_of(view: View) -> TargetOrigin:
    """Return the database whose changes a change log has."""
    return TargetOrigin(view.metadata.system_identifier, view.metadata.database)


def snapshot_name(directory: Path, snapshot: Snapshot) -> str:
    """Return the name of a snapshot's table; or its relation id, if the name is not known."""
    try:
        table_name: Any = SnapshotStates(directory).fields(snapshot).get("table")
    except PgOutputError:  # the snapshot's state has changed, and with it the file's name
        table_name = None
    return ".".join(table_name) if table_name else str(snapshot.relation_id)


def consumer_name(target: str) -> str:
    """Return the default name of the consumer that reads a change log for a target."""
    return f"sync_{hashlib.sha256(target.encode()).hexdigest()[:12]}"
