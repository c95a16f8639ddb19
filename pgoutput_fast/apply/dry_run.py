"""Plan what a sync would do, and write nothing: neither a slot nor a file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..changelog.changes import ChangeReader, Refusal
from ..changelog.consumers import consumers
from ..changelog.log import ChangeLog
from ..changelog.read_frames import chunks
from ..changelog.read_plan import Position, first_position
from ..names import qualified, shown_name
from ..policies import Policies
from ..segments.listing import not_begun
from .continuity import check_position, copied_name, lost_tables, origin_of
from .departures import check_tables, mistaken
from .embedded_capture import check_slot
from .options import SyncOptions
from .targets import Held, Stored, Target, TargetOrigin

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    from ..changelog.read_frames import Chunk
    from ..changelog.view import View
    from ..connections import ConnectionParameters


class TablePlan(NamedTuple):
    """What a sync would do with a table.

    Attributes
    ----------
    relation_id : int
    name : str
    held : Held or None
        The table state in the target; None if the table is new there.
    lsn : int
        Sync would read the table's changes from this LSN on; 0 without a change log.
    copy_lsn : int or None
        LSN of the newest snapshot that sync would write; None if it would write none.
    rows, changes : int
        Rows of snapshots, and changes, that the change log has for the target.
    waits : bool
        Whether the table waits for a snapshot.
    has_snapshot : bool
        Whether the change log has a complete snapshot of the table.
    is_published : bool or None
        Whether a publication has the table; None if no server was asked.
    is_lost : bool
        Whether the table needs a new snapshot first, because the change log lacks changes of it.
    refused : str or None
        Why the table would be paused: a value is refused. Rows and changes from there on are not
        counted.
    """

    relation_id: int
    name: str
    held: Held | None = None
    lsn: int = 0
    copy_lsn: int | None = None
    rows: int = 0
    changes: int = 0
    waits: bool = False
    has_snapshot: bool = False
    is_published: bool | None = None
    is_lost: bool = False
    refused: str | None = None


class SlotPlan(NamedTuple):
    """The slot that a sync would capture.

    Attributes
    ----------
    name : str
    exists : bool
    confirmed_lsn : int or None
        The LSN from which on the slot sends changes; None if it does not exist.
    server_lsn : int
        The end of the server's log.
    """

    name: str
    exists: bool
    confirmed_lsn: int | None
    server_lsn: int


class SyncPlan(NamedTuple):
    """What a sync would do.

    Attributes
    ----------
    directory : pathlib.Path
        The change log.
    has_begun : bool
        Whether a capture has begun there.
    slot : SlotPlan or None
        None if the change log is that of another capture.
    lsn, end_lsn : int
        The position from which sync would read the change log, and the log's end; 0 without a log.
    tables : list of TablePlan
        Sorted by name.
    mistaken : list of str
        Warnings of patterns that match no published table; empty if no server was asked.
    """

    directory: Path
    has_begun: bool
    slot: SlotPlan | None
    lsn: int
    end_lsn: int
    tables: list[TablePlan]
    mistaken: list[str]


class Asked(NamedTuple):
    """The answer of a server. Fields: origin, slot, published (names by relation id)."""

    origin: TargetOrigin
    slot: SlotPlan
    published: dict[int, str]


def ask_server(
    parameters: ConnectionParameters, slot: str, publications: Sequence[str], directory: Path,
    *, adopt_slot: bool,
) -> Asked:  # fmt: skip
    """Ask the server for the state of a slot and for the published tables.

    Raises
    ------
    PgOutputError
        The server can't be reached or refuses, a publication does not exist, or the slot does not
        belong to the directory.
    """
    from ..replication.beginning import check_beginning
    from ..replication.membership import read_members
    from ..replication.walsender import ReplicationConnection

    check_slot(directory, slot)
    with ReplicationConnection(parameters) as connection:
        connection.check_publications(publications)
        state = connection.slot(slot)
        check_beginning(state, slot, directory, adopt_slot=adopt_slot)
        origin = TargetOrigin(connection.system_identifier, connection.database)
        server_lsn = connection.current_lsn()
    members = read_members(parameters, publications).tables
    confirmed = None if state is None else state.confirmed_flush_lsn
    published = {relation_id: qualified(table) for relation_id, table in members.items()}
    return Asked(origin, SlotPlan(slot, state is not None, confirmed, server_lsn), published)


def plan_sync(
    target: Target,
    name: str | os.PathLike[str],
    decode_for: str,
    directory: Path,
    options: SyncOptions,
    consumer: str,
    asked: Asked | None,
) -> SyncPlan:
    """Plan what a sync would do now.

    Parameters
    ----------
    target, name, decode_for, directory, options, consumer
        See `Syncing`.
    asked : Asked or None
        The server's answer, if the sync would capture a slot.

    Raises
    ------
    PgOutputError
        The sync could not begin, for the same reason.
    """
    slot = None if asked is None else asked.slot
    published = {} if asked is None else asked.published
    log = ChangeLog(directory)
    view = log.view() if log.has_begun else None
    if view is None:
        if asked is None:
            raise not_begun(directory)
        stored = target.peek(asked.origin)
        if not stored.tables:
            check_tables(options.tables, [*map(shown_name, published.values())], directory)
        tables = {
            relation_id: TablePlan(relation_id, published[relation_id], is_published=True)
            for relation_id in published
        }
        tables |= _of_target(stored, tables)
        return SyncPlan(
            directory, False, slot, 0, 0, _sorted(tables, options), _mistaken(asked, options)
        )
    stored = target.peek(origin_of(view))
    if asked is not None and not stored.tables:
        check_tables(options.tables, [*map(shown_name, published.values())], directory)
    lost: list[int] = []
    if asked is not None and options.on_error == "pause":
        lost = lost_tables(log, stored, consumer)
    known = {entry.name: entry.position for entry in consumers(directory)} if stored.lsn else {}
    if consumer in known:
        position = known[consumer]
    elif lost:
        position = first_position(view.states, view.begin)
    else:
        position = view.first_position()
    if lost:  # these tables are not read before their snapshots
        ends = dict.fromkeys(lost, view.end)
        position = Position(position.lsn, {**position.tables, **ends})
    else:
        check_position(log, str(name), stored, position, options.uncopied)
    counted = _count(
        log, view, position, decode_for, options, target.kept.policies or Policies(), stored
    )
    states = view.states
    names = {**_copied_names(directory, view), **published}
    tables = {}
    for relation_id in names.keys() | counted.keys() | stored.tables.keys():
        table_state, state = stored.tables.get(relation_id), states.get(relation_id)
        plan = counted.get(relation_id)
        shown = plan.name if plan else qualified(table_state) if table_state else names[relation_id]
        tables[relation_id] = (plan or TablePlan(relation_id, shown))._replace(
            held=table_state,
            lsn=position.of(relation_id),
            waits=state is not None and state.held_from is not None,
            has_snapshot=state is not None and bool(state.snapshots),
            is_published=None if asked is None else relation_id in published,
            is_lost=relation_id in lost,
        )
    end = view.end
    return SyncPlan(
        directory, True, slot, position.lsn, end, _sorted(tables, options),
        _mistaken(asked, options),
    )  # fmt: skip


def _mistaken(asked: Asked | None, options: SyncOptions) -> list[str]:
    if asked is None:
        return []
    return [*mistaken(options.tables or (), [*map(shown_name, asked.published.values())])]


def _of_target(stored: Stored, tables: dict[int, TablePlan]) -> dict[int, TablePlan]:
    return {
        relation_id: tables.get(
            relation_id, TablePlan(relation_id, qualified(table_state))
        )._replace(held=table_state)
        for relation_id, table_state in stored.tables.items()
    }


def _sorted(tables: dict[int, TablePlan], options: SyncOptions) -> list[TablePlan]:
    from fnmatch import fnmatchcase

    plans = [
        plan
        for plan in tables.values()
        if options.tables is None or any(fnmatchcase(plan.name, each) for each in options.tables)
    ]
    return sorted(plans, key=lambda plan: (plan.name, plan.relation_id))


def _copied_names(directory: Path, view: View) -> dict[int, str]:
    """Return the names of tables that have a snapshot or wait for one."""
    return {
        relation_id: copied_name(directory, state.copies[-1])
        for relation_id, state in view.states.items()
        if state.copies[-1].state != "gone"
    }


def _count(
    log: ChangeLog,
    view: View,
    position: Any,
    decode_for: str,
    options: SyncOptions,
    policies: Policies,
    stored: Stored,
) -> dict[int, TablePlan]:
    """Count rows and changes of each table. This decodes everything, as a sync would."""
    plan = view.plan(position)
    plans: dict[int, TablePlan] = {}
    if plan is None:
        return plans
    decoding: dict[str, Any] = {
        "policies": policies, "target": decode_for, "tables": options.tables,
        "on_error": "raise", "max_bytes": 16 << 20,
    }  # fmt: skip

    def pause(_: Chunk, refusals: list[Refusal]) -> None:
        for refusal in refusals:
            relation_id = refusal.relation.relation_id
            plan_of = plans.get(relation_id) or TablePlan(relation_id, qualified(refusal.relation))
            if plan_of.refused is None:
                plans[relation_id] = plan_of._replace(refused=str(refusal.error))

    stops = options.on_error == "stop"
    refused = None if stops else pause
    reader = ChangeReader(decoding, log.history(), options.history, refused)
    for read in plan.reads:
        copy = read.snapshot
        for chunk in chunks(read, view.metadata):
            for changes, batch in reader.changes(chunk):
                relation = changes.relation
                relation_id = relation.relation_id
                table_state = stored.tables.get(relation_id)
                table_plan = plans.get(relation_id) or TablePlan(relation_id, "")
                if table_plan.refused is not None:
                    continue
                table_plan = table_plan._replace(name=qualified(relation))
                if copy is None:
                    lsn = 0 if table_state is None else table_state.lsn
                    come = sum(at >= lsn for at in batch.column("commit_lsn").to_pylist())
                    table_plan = table_plan._replace(changes=table_plan.changes + come)
                elif (
                    table_state is None
                    or copy.lsn > table_state.copy_lsn
                    or table_state.stale is not None
                ):
                    rows = batch.column("op").to_pylist().count("read")
                    table_plan = table_plan._replace(rows=table_plan.rows + rows, copy_lsn=copy.lsn)
                plans[relation_id] = table_plan
    return plans
