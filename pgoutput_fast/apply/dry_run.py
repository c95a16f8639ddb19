"""Plan what a sync would do, and write nothing: neither a slot nor a file."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..changelog.consumers import consumers
from ..changelog.log import ChangeLog
from ..changelog.read_plan import Position, first_position
from ..names import qualified, shown_name
from ..policies import Policies
from ..segments.listing import not_begun
from .continuity import check_position, lost_tables, origin_of, snapshot_name
from .embedded_capture import check_slot
from .options import WINDOW_BYTES, SyncOptions
from .outcomes import Paused, PausedError
from .targets import NoChanges, TableState, Target, TargetOrigin, TargetState, window
from .unpublished import check_tables, mistaken
from .window_writer import WindowWriter

if TYPE_CHECKING:
    import os
    from collections.abc import Sequence

    import pyarrow as pa

    from ..changelog.view import View
    from ..connections import ConnectionParameters
    from ..errors import PgOutputError
    from .folding import NetChanges
    from .targets import Alteration


class TablePlan(NamedTuple):
    """What a sync would do with a table.

    Attributes
    ----------
    relation_id : int
    name : str
    before : TableState or None
        The table state in the target; None if the table is new there.
    after : TableState or None
        The table state after the sync; None if the change log has nothing of the table.
    lsn : int
        Sync would read the table's changes from this LSN on; 0 without a change log.
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
        Why the table would be paused: a value is refused. Rows and changes of that window and of
        later ones are not counted.
    """

    relation_id: int
    name: str
    before: TableState | None = None
    after: TableState | None = None
    lsn: int = 0
    rows: int = 0
    changes: int = 0
    waits: bool = False
    has_snapshot: bool = False
    is_published: bool | None = None
    is_lost: bool = False
    refused: str | None = None

    @property
    def copy_lsn(self) -> int | None:
        """LSN of the newest snapshot that sync would write; None if it would write none."""
        before = 0 if self.before is None else self.before.copy_lsn
        return None if self.after is None or self.after.copy_lsn == before else self.after.copy_lsn


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
        target_state = target.peek(asked.origin)
        if not target_state.tables:
            check_tables(options.tables, [*map(shown_name, published.values())], directory)
        tables = {
            relation_id: TablePlan(relation_id, published[relation_id], is_published=True)
            for relation_id in published
        }
        tables |= _of_target(target_state, tables)
        return SyncPlan(
            directory, False, slot, 0, 0, _sorted(tables, options), _mistaken(asked, options)
        )
    target_state = target.peek(origin_of(view))
    if asked is not None and not target_state.tables:
        check_tables(options.tables, [*map(shown_name, published.values())], directory)
    lost: list[int] = []
    if asked is not None and options.on_error == "pause":
        lost = lost_tables(log, target_state, consumer)
    positions = (
        {entry.name: entry.position for entry in consumers(directory)} if target_state.lsn else {}
    )
    if consumer in positions:
        position = positions[consumer]
    elif lost:
        position = first_position(view.states, view.begin)
    else:
        position = view.first_position()
    if lost:  # these tables are not read before their snapshots
        ends = dict.fromkeys(lost, view.end)
        position = Position(position.lsn, {**position.tables, **ends})
    else:
        check_position(log, str(name), target_state, position, options.uncopied)
    written = _write(log, view, position, decode_for, options, target, target_state)
    states = view.states
    names = {**_copied_names(directory, view), **published}
    tables = {}
    for relation_id in names.keys() | written.tables.keys() | written.paused.keys():
        before, after = target_state.tables.get(relation_id), written.tables.get(relation_id)
        paused, state = written.paused.get(relation_id), states.get(relation_id)
        shown = after or before or (paused.table_state if paused else None)
        tables[relation_id] = TablePlan(
            relation_id,
            qualified(shown) if shown else names[relation_id],
            before=before,
            after=after,
            lsn=position.of(relation_id),
            rows=written.rows[relation_id],
            changes=written.changes[relation_id],
            waits=state is not None and state.waits_from is not None,
            has_snapshot=state is not None and bool(state.snapshots),
            is_published=None if asked is None else relation_id in published,
            is_lost=relation_id in lost,
            refused=None if paused is None else str(paused.error),
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


def _of_target(target_state: TargetState, tables: dict[int, TablePlan]) -> dict[int, TablePlan]:
    return {
        relation_id: tables.get(
            relation_id, TablePlan(relation_id, qualified(table_state))
        )._replace(before=table_state)
        for relation_id, table_state in target_state.tables.items()
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
        relation_id: snapshot_name(directory, state.all_snapshots[-1])
        for relation_id, state in view.states.items()
        if state.all_snapshots[-1].state != "gone"
    }


class _DryRun(NamedTuple):
    """The end of a dry run.

    Fields by relation id: tables (the table states then), rows, changes (how many rows of snapshots
    and changes were written), paused (the tables that would be paused).
    """

    tables: dict[int, TableState]
    rows: Counter[int]
    changes: Counter[int]
    paused: dict[int, Paused]


def _write(
    log: ChangeLog,
    view: View,
    position: Position,
    decode_for: str,
    options: SyncOptions,
    target: Target,
    target_state: TargetState,
) -> _DryRun:
    """Write all windows, as a sync would, to a target that only counts."""
    decoding: dict[str, Any] = {
        "policies": target.remembered.policies or Policies(), "target": decode_for,
        "tables": options.tables, "on_error": "raise", "max_bytes": 16 << 20,
        "encoding": view.metadata.encoding,
    }  # fmt: skip
    if options.uncopied == "error":
        options = dataclasses.replace(options, uncopied="empty")  # the plan says that it is one
    if (history := log.history()) is not None:
        log.awaited = history.confirmed  # do not wait for a capture
    counting: Any = _CountingTarget(target)
    paused: dict[int, Paused] = {}
    while plan := view.plan(position, WINDOW_BYTES, paused=paused):
        writer = WindowWriter(log, counting, target_state, decoding, options, lambda: None)
        try:
            with window(counting):
                target_state = writer.write(view, plan)
        except PausedError as error:
            paused.update((outcome.table_state.relation_id, outcome) for outcome in error.paused)
        else:
            position = plan.after
    return _DryRun(target_state.tables, counting.rows, counting.counts, paused)


class _CountingTarget:
    """A `Target` that counts what a sync would write, and writes nothing.

    Parameters
    ----------
    target : Target
        The sync's target.

    Attributes
    ----------
    rows, counts : Counter of int
        Rows of snapshots, and changes, of all committed windows by relation id.
    """

    threads = 1
    is_transactional = True

    def __init__(self, target: Target) -> None:
        self.remembered = target.remembered
        self.shown = target.shown
        self.troubles: dict[int, PgOutputError] = {}
        self.rows: Counter[int] = Counter()
        self.counts: Counter[int] = Counter()
        self._window: list[_CountedChanges] = []

    def begin(self) -> None:
        """See `Target`."""
        self._window = []

    def changes(self, table_state: TableState) -> _CountedChanges:
        """See `Target`."""
        self._window.append(_CountedChanges(table_state))
        return self._window[-1]

    def state(self, table_state: TableState) -> _NoState:
        """See `Target`."""
        return _NoState(table_state)

    def new_table_state(self, table_state: TableState) -> TableState:
        """See `Target`."""
        return table_state

    def rename(self, table_state: TableState, stored_name: str) -> TableState:
        """See `Target`."""
        return table_state._replace(stored_name=stored_name)

    def commit(self, target_state: TargetState) -> None:
        """See `Target`."""
        del target_state
        for writer in self._window:
            self.rows[writer.relation_id] += writer.rows
            self.counts[writer.relation_id] += writer.changes

    def abort(self) -> None:
        """See `Target`."""


class _CountedChanges(NoChanges):
    """A `ChangeWriter` that counts changes and the rows of snapshots."""

    def __init__(self, table_state: TableState) -> None:
        super().__init__(table_state)
        self.relation_id = table_state.relation_id
        self.rows = self.changes = 0

    def append(self, changes: pa.RecordBatch) -> None:
        """See `ChangeWriter`."""
        rows = changes.column("op").to_pylist().count("read")
        self.rows += rows
        self.changes += changes.num_rows - rows

    def commit(self, table_state: TableState) -> None:
        """See `ChangeWriter`. A snapshot counts as its rows, without its Truncate."""
        self.changes -= table_state.copy_lsn > self.copy_lsn


class _NoState:
    """A `StateWriter` that drops everything."""

    def __init__(self, table_state: TableState) -> None:
        self.lsn, self.copy_lsn = table_state.lsn, table_state.copy_lsn

    def load(self, schema: pa.Schema) -> None:
        """See `StateWriter`."""

    def append(self, rows: pa.RecordBatch) -> None:
        """See `StateWriter`."""

    def loaded(self, table_state: TableState) -> None:
        """See `StateWriter`."""

    def create(self, schema: pa.Schema) -> None:
        """See `StateWriter`."""

    def apply(
        self, alterations: Sequence[Alteration], net: NetChanges, table_state: TableState
    ) -> None:
        """See `StateWriter`."""
