"""Write one window of changes to the tables of a target."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import time
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from ..changelog.changes import ChangeReader, Refusal
from ..changelog.commits import newest_commit
from ..changelog.stored_types import to_stored_type
from ..columnar.decoder import ColumnarDecoder
from ..columnar.selection import Selection
from ..errors import Argument, PgOutputError, RetryableError
from ..names import qualified
from ..protocol.encode import encode, encode_fields
from .evolution import TableInCatalog, relation_of
from .folding import NullKeyError
from .naming import free_name, renames, stored_table
from .outcomes import Paused, PausedError, fold_outcomes
from .row_stores import SpillFile
from .stored_changes import target_batch
from .table_plan import TableRules, plan_from_catalog, plan_new_table
from .table_window import TableWindow
from .targets import TableError, TableState, Target, TargetError, TargetState
from .unpublished import unpublished_tables

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from ..catalog import CatalogTable
    from ..changelog.history import TablesAt
    from ..changelog.log import ChangeLog
    from ..changelog.read_frames import FrameRun
    from ..changelog.read_plan import Position, ReadPlan
    from ..changelog.snapshot_states import Snapshot
    from ..changelog.view import View
    from ..errors import Hint
    from ..policies import Policies
    from ..segments.reader import CommitRecord
    from .options import SyncOptions
    from .table_plan import CatalogPlan

_log = logging.getLogger(__name__)

# A capture reads the catalogue after a new Relation, and meanwhile goes on with the stream.
_CATALOG_TIMEOUT = 10.0  # seconds
_CATALOG_WAIT = 0.1  # seconds between two checks
_TOLD = 0.5  # seconds between two calls of `tell`
_BY_POLICY = frozenset({"out_of_range", "bad_encoding"})
"""Error codes of refused values that another policy may let pass."""


class WindowWriter:
    """Writes one window.

    Parameters
    ----------
    log : ChangeLog
    target : Target
    target_state : TargetState
        The target state before the window.
    decoding : dict
        Arguments of :class:`ColumnarDecoder`.
    options : SyncOptions
    tell : callable
        Called now and then, to report progress.

    Attributes
    ----------
    counts : dict of str to int
        Written changes by table.
    seconds : dict of str to float
        Seconds spent on each state table.
    change_seconds, state_seconds : float
        Seconds spent on reading and on the change tables, and then on the state tables.
    """

    _table_window: Callable[..., TableWindow] = TableWindow

    def __init__(
        self,
        log: ChangeLog,
        target: Target,
        target_state: TargetState,
        decoding: dict[str, Any],
        options: SyncOptions,
        tell: Callable[[], None],
    ) -> None:
        self._log, self._directory = log, log.directory
        self._target = target
        self._options = options
        self._tell = tell
        self._lsn = target_state.lsn
        self._newest = target_state.newest
        self._table_states = dict(target_state.tables)
        self._open: dict[int, TableWindow] = {}
        self._paused: dict[int, Paused] = {}
        self._states = log.view().states
        self._history = log.history()
        refused = None if options.on_error == "stop" else self._pause_refused
        self._reader = ChangeReader(decoding, self._history, options.history, refused=refused)
        self._decoding = self._reader.decoding
        self._selection = Selection(options.tables)
        self._rules = TableRules.of(options, target.remembered, self._decoding["policies"])
        self._schemas: dict[int, tuple[Any, pa.Schema]] = {}
        self._spill_file = SpillFile()
        self.counts: dict[str, int] = {}
        self.seconds: dict[str, float] = {}
        self.change_seconds = self.state_seconds = 0.0

    def write(self, view: View, plan: ReadPlan) -> TargetState:
        """Write the window; return the target state after it.

        Raises
        ------
        PausedError
            Some tables can't be written; the others can go on without them. The window is not
            committed. If the target is not transactional, single tables may be: each table's own
            record says so.
        """
        with self._pausing_named():
            return self._write(view, plan)

    @contextlib.contextmanager
    def _pausing_named(self) -> Iterator[None]:
        """Turn an error that names its table into a pause of that table."""
        try:
            yield
        except TableError as error:
            if self._options.on_error == "stop":
                raise
            raise PausedError([Paused(self._before(error.table_state), error)]) from error

    def _write(self, view: View, plan: ReadPlan) -> TargetState:
        begin = time.perf_counter()
        self._take_all(view, plan)
        after = plan.after
        self._follow_catalog(view, after)
        self._write_open(after, begin)
        tables = {
            relation_id: table_state._replace(lsn=max(after.of(relation_id), table_state.lsn))
            for relation_id, table_state in self._table_states.items()
        }
        return self._commit(max(after.lsn, self._lsn), tables, self._newest_of(plan))

    def has_news(self, at: Position) -> bool:
        """Whether the catalogue has a name or columns of a table that no change has shown."""
        news = [*self._news(at)]
        tables = dict(self._table_states)
        for relation_id, table, _ in news:
            tables[relation_id] = _renamed(tables[relation_id], table, at.lsn)
        return bool(renames(tables)) or any(not plan.is_name for _, _, plan in news)

    def write_catalog(self, view: View, at: Position) -> TargetState:
        """Let tables without new changes follow the catalogue; return the target state.

        Parameters
        ----------
        view : View
        at : Position
            Each table has all changes before this position.

        Raises
        ------
        PausedError
            As in `write`.
        """
        with self._pausing_named():
            self._follow_catalog(view, at)
            ends = {relation_id: max(at.of(relation_id), window.table_state.lsn)
                    for relation_id, window in self._open.items()}  # fmt: skip
            self._write_open(at, time.perf_counter())
        tables = {relation_id: table_state._replace(lsn=ends.get(relation_id, table_state.lsn))
                  for relation_id, table_state in self._table_states.items()}  # fmt: skip
        return self._commit(self._lsn, tables, self._newest)

    def _write_open(self, after: Position, begin: float) -> None:
        """Commit the open tables: first the change tables, then the state tables."""
        # If a process was killed after its commit, the window is read again, and it may now end
        # earlier. A table's LSN must not move back, or changes would be applied twice.
        ends = {
            relation_id: max(after.of(relation_id), window.table_state.lsn)
            for relation_id, window in self._open.items()
        }
        for relation_id, window in self._open.items():
            if relation_id not in self._paused:
                with self._pausing(window.table_state):
                    window.take_gathered()
        self._check_paused()
        self._each(self._commit_changes, ends)
        self._check_paused()
        for window in self._open.values():
            if window.changes:
                self.counts[qualified(window.table_state)] = window.changes
        changed = time.perf_counter()
        self.change_seconds = changed - begin
        self._finish_all(ends)
        self._check_paused()
        self.state_seconds = time.perf_counter() - changed
        outcomes = [window.outcome for window in self._open.values()]
        self._table_states = fold_outcomes(self._table_states, outcomes, time.time())
        self._settle_names()

    def _commit(
        self, lsn: int, tables: dict[int, TableState], newest: CommitRecord | None
    ) -> TargetState:
        """Commit the window."""
        target_state = TargetState(lsn, tables, newest)
        self._target.commit(target_state)
        for window in self._open.values():
            for column in window.removed:
                _log.info(
                    "column %s of %s was removed from the state table; the change table keeps its "
                    "values", column, qualified(window.table_state),
                )  # fmt: skip
        return target_state

    def _take_all(self, view: View, plan: ReadPlan) -> None:
        """Read all changes of a plan, and give them to their tables."""
        for snapshot, reads in itertools.groupby(plan.reads, lambda read: read.snapshot):
            for read in reads:
                for frame_run in self._reader.frame_runs(read, view.metadata):
                    self._take(frame_run, snapshot)
                    self._tell()
            self._end_snapshot(snapshot)

    def _newest_of(self, plan: ReadPlan) -> CommitRecord | None:
        """Return the newest commit that was read, up to the end of this window."""
        if plan.after.lsn <= self._lsn:
            return self._newest  # the window was read before
        return newest_commit(plan.reads) or self._newest

    def _end_snapshot(self, snapshot: Snapshot | None) -> None:
        # Rows of a paused table may be missing.
        if snapshot is not None and snapshot.relation_id in self._open.keys() - self._paused.keys():
            window = self._open[snapshot.relation_id]
            with self._pausing(window.table_state):
                window.end_snapshot(snapshot)

    # --- paused tables ---------------------------------------------------------------------------

    @contextlib.contextmanager
    def _pausing(self, table: Any) -> Iterator[None]:
        """Pause a table if the block raises an error that concerns it alone."""
        try:
            yield
        except (RetryableError, TargetError, PausedError):
            raise
        except TableError as error:
            if self._options.on_error == "stop":
                raise
            raise PausedError([Paused(self._before(error.table_state), error)]) from error
        except (PgOutputError, pa.ArrowException, OSError) as error:
            if self._options.on_error == "stop":
                raise
            self._pause(table, error)
            if self._target.is_transactional:
                raise PausedError(self._paused.values()) from error

    def _pause_refused(self, _: FrameRun, refusals: list[Refusal]) -> None:
        """Pause the tables with refused values."""
        for refusal in refusals:
            self._pause(refusal.relation, refusal.error)

    def _pause(self, table: Any, error: Exception) -> None:
        """Pause a table, which is given as its Relation or its table state."""
        if isinstance(error, PgOutputError) and (
            isinstance(error, NullKeyError) or error.code in _BY_POLICY
        ):
            error.hint = _other_policies(error, self._decoding["policies"])
        if table.relation_id not in self._paused:
            self._paused[table.relation_id] = Paused(self._before(table), error)

    def _before(self, table: Any) -> TableState:
        """Return the table state before the window."""
        table_state = self._table_states.get(table.relation_id)
        if table_state is not None:
            return table_state
        window = self._open.get(table.relation_id)
        initial = self._initial_state(table) if window is None else window.table_state
        return TableState(
            table.relation_id, table.namespace, table.name, initial.stored_name, version=0
        )

    def _check_paused(self) -> None:
        """Give the window up if a table is paused."""
        if self._paused:
            raise PausedError(self._paused.values())

    def _each(self, do: Callable[[int, int], None], ends: dict[int, int]) -> None:
        """Call `do` for each table, for as many at a time as the target allows."""
        if self._target.threads <= 1:
            for relation_id, end in ends.items():
                do(relation_id, end)
                self._tell()
            return
        run_all(self._target.threads, do, ends.items(), self._tell)

    def _commit_changes(self, relation_id: int, end: int) -> None:
        window = self._open[relation_id]
        with self._pausing(window.table_state):
            window.commit_changes(end)

    def _finish_all(self, ends: dict[int, int]) -> None:
        """Apply the net changes to all state tables."""
        self._each(self._finish, ends)

    def _finish(self, relation_id: int, end: int) -> None:
        window = self._open[relation_id]
        begin = time.perf_counter()
        with self._pausing(window.table_state):
            window.commit_state(end)
        self.seconds[qualified(window.table_state)] = time.perf_counter() - begin

    def _take(self, frame_run: FrameRun, snapshot: Snapshot | None) -> None:
        for changes, decoded in self._reader.changes(frame_run):
            if changes.relation.relation_id in self._paused:
                continue
            lsn = decoded.column("commit_lsn")[0].as_py()
            table_state = self._table_state_of(changes.relation, lsn, snapshot)
            with self._pausing(changes.relation):
                batch = target_batch(changes, decoded, is_binary=frame_run.is_binary)
                schema = self._schema(changes.layout, batch.schema)
                window = self._table_of(changes.relation, table_state, lsn)
                catalog_at = functools.partial(self._known, changes.relation)
                if snapshot is not None:
                    window.add_snapshot(schema, batch, catalog_at, snapshot)
                else:
                    window.add(schema, batch, catalog_at)

    def _schema(self, layout: Any, schema: pa.Schema) -> pa.Schema:
        """Return the schema of a layout's batches, always as the same object."""
        entry = self._schemas.get(id(layout))
        if entry is None or not entry[1].equals(schema, check_metadata=True):
            entry = self._schemas[id(layout)] = layout, schema
        return entry[1]

    # --- tables ----------------------------------------------------------------------------------

    def _table(self, relation: Any, lsn: int, snapshot: Snapshot | None) -> TableWindow:
        """Return the table of a Relation, under the name that it has at an LSN."""
        return self._table_of(relation, self._table_state_of(relation, lsn, snapshot), lsn)

    def _table_state_of(self, relation: Any, lsn: int, snapshot: Snapshot | None) -> TableState:
        """Return the table state, or a new one for a table that begins at an LSN.

        A new table begins with a snapshot, or else with a change.
        """
        relation_id = relation.relation_id
        if relation_id in self._open:
            return self._open[relation_id].table_state
        table_state = self._table_states.get(relation_id)
        return (
            self._new(relation, lsn, snapshot)
            if table_state is None or not table_state.version
            else table_state
        )

    def _table_of(self, relation: Any, table_state: TableState, lsn: int) -> TableWindow:
        window = self._opened(table_state)
        if lsn >= window.table_state.schema_lsn:
            window.table_state = _renamed(window.table_state, relation, lsn)
        return window

    def _opened(self, table_state: TableState) -> TableWindow:
        """Return the table's part of the window, which the first call begins."""
        window = self._open.get(table_state.relation_id)
        if window is None:
            before = self._table_states.get(table_state.relation_id)
            window = self._open[table_state.relation_id] = self._table_window(
                self._target,
                table_state,
                self._rules,
                is_new=before is None or not before.version,
                spill_file=self._spill_file,
            )
        return window

    def _initial_state(self, relation: Any) -> TableState:
        """Return the first table state of a table, with a free name."""
        relation_id = relation.relation_id
        if relation_id in self._table_states:  # its first changes were paused
            return self._table_states[relation_id]._replace(
                version=1, namespace=relation.namespace, name=relation.name
            )
        used_names = {
            table_state.stored_name.casefold() for table_state in self._table_states.values()
        }
        used_names.update(
            window.table_state.stored_name.casefold() for window in self._open.values()
        )
        used_names.update(
            outcome.table_state.stored_name.casefold() for outcome in self._paused.values()
        )
        name = free_name(stored_table(relation.namespace, relation.name), relation_id, used_names)
        return TableState(relation_id, relation.namespace, relation.name, name)

    def _new(self, relation: Any, lsn: int, snapshot: Snapshot | None) -> TableState:
        state = self._states.get(relation.relation_id)
        snapshots = () if state is None else state.snapshots
        return plan_new_table(
            self._target.new_table_state(self._initial_state(relation)),
            self._rules,
            self._directory,
            has_snapshot=bool(snapshots),
            is_skipped=snapshot is None and any(other.lsn <= lsn for other in snapshots),
            has_left=lambda: self._has_left(relation.relation_id, lsn),
        )

    def _has_left(self, relation_id: int, lsn: int) -> bool:
        """Whether a table is dropped or no longer published, so that it can't get a snapshot."""
        history = self._log.history()
        return (
            history is not None
            and history.confirmed > lsn
            and bool(unpublished_tables(history, [relation_id]))
        )

    def _catalog_at(self, lsn: int) -> TablesAt | None:
        """Return the newest read of the catalogue at or before an LSN; None if there is none."""
        if self._history is None:
            return None
        tables_at = self._history.tables_at(lsn, "older")
        return tables_at if tables_at.entry else None

    def _news(self, at: Position) -> Iterator[tuple[int, CatalogTable, CatalogPlan]]:
        """Yield the tables that have to follow the catalogue, though no change tells it.

        Yields the relation id, the table in the catalogue, and its plan.
        """
        tables_at = self._catalog_at(at.lsn)
        published = {} if tables_at is None else tables_at.catalog.by_id()
        start = 0 if tables_at is None else min(tables_at.start, at.lsn)
        tables = {
            **self._table_states,
            **{key: window.table_state for key, window in self._open.items()},
        }
        for relation_id, table_state in tables.items():
            table = published.get(relation_id)
            if table is None:
                continue
            is_paused = table_state.paused is not None or relation_id in self._paused
            is_behind = table_state.stale is None and at.of(relation_id) < at.lsn
            if is_paused or is_behind:
                continue  # its next changes have its columns
            plan = plan_from_catalog(
                table_state, table, start, self._rules, is_selected=self._selection.wants(table)
            )
            if plan is not None:
                yield relation_id, table, plan

    def _follow_catalog(self, view: View, after: Position) -> None:
        """Let tables follow the catalogue if no change has shown their name or columns."""
        tables_at = self._catalog_at(after.lsn)
        if tables_at is None:
            return
        lsn = min(tables_at.start, after.lsn)
        for relation_id, table, plan in [*self._news(after)]:
            if not plan.is_name:
                with self._pausing(self._table_state_now(relation_id)):
                    window = self._opened(self._table_state_now(relation_id))
                    if window.is_beyond(after.lsn):
                        continue  # a killed process wrote more: it follows after that
                    if plan.stale is not None:
                        window.make_stale(plan.stale)
                    else:
                        schema, relation = self._foretold(view, table, after.lsn)
                        window.follow(schema, self._table_in_catalog(relation, tables_at))
            table_state = _renamed(self._table_state_now(relation_id), table, lsn)
            if relation_id in self._open:
                self._open[relation_id].table_state = table_state
            else:
                self._table_states[relation_id] = table_state

    def _table_state_now(self, relation_id: int) -> TableState:
        """Return the table state with the changes of this window."""
        window = self._open.get(relation_id)
        return self._table_states[relation_id] if window is None else window.table_state

    def _foretold(self, view: View, table: CatalogTable, lsn: int) -> tuple[pa.Schema, Any]:
        """Return the schema that changes of a table have at an LSN, and its Relation."""
        if self._reader.follower is not None:
            self._reader.follower.go_to(lsn)
        decoder = ColumnarDecoder(**{**self._decoding, "tables": None})
        nothing = [None for column in table.columns if column.is_published]
        frames = [
            relation_of(table),
            encode_fields("I", relation_id=table.relation_id, new=nothing),
        ]
        (changes,) = decoder.decode(frames)
        batch = target_batch(changes, pa.record_batch(changes), is_binary=view.metadata.is_binary)
        return batch.schema, changes.relation

    def _settle_names(self) -> None:
        """Rename tables whose name on the server has changed."""
        for relation_id, name in renames(self._table_states):
            self._table_states[relation_id] = self._target.rename(
                self._table_states[relation_id], name
            )

    def _known(self, relation: Any, lsn: int) -> TableInCatalog:
        """Return what the catalogue says of a table at a commit LSN.

        Wait until the catalogue was read after this commit. If that has timed out once, do not wait
        again before the next read.
        """
        end = time.monotonic() + _CATALOG_TIMEOUT
        while True:
            at = None if self._history is None else self._history.tables_at(lsn)
            table_in_catalog = self._table_in_catalog(relation, at)
            if (
                self._history is None
                or lsn < self._history.confirmed
                or table_in_catalog.now(relation.columns) is not None
                or self._history.confirmed == self._log.awaited
            ):
                return table_in_catalog
            if time.monotonic() > end:
                self._log.awaited = self._history.confirmed
                return table_in_catalog
            time.sleep(_CATALOG_WAIT)
            self._tell()
            self._history = self._log.history()

    def _table_in_catalog(self, relation: Any, at: TablesAt | None) -> TableInCatalog:
        """Return what a read of the catalogue says of a table."""
        history, relation_id = self._history, relation.relation_id

        def value(name: str, text: str | None) -> pa.Array:
            decoder = ColumnarDecoder(**{**self._decoding, "tables": None})
            sent = [
                text if text is not None and column.name == name else None
                for column in relation.columns
            ]
            frames = [encode(relation), encode_fields("I", relation_id=relation_id, new=sent)]
            (batch,) = decoder.decode(frames)
            row = pa.record_batch(batch).column("after")
            return to_stored_type(row.flatten()[row.type.get_field_index(name)])

        def earlier() -> Iterator[CatalogTable]:
            if history is not None and at is not None:
                yield from history.table_before(at.entry, relation_id)

        if at is None:
            return TableInCatalog(None, None, value, earlier)
        table = at.catalog.by_id().get(relation_id)
        before = table if at.entry < 2 else next(earlier(), None)
        return TableInCatalog(table, before, value, earlier, at.is_certain)


def _renamed(table_state: TableState, table: Any, lsn: int) -> TableState:
    """Return a table state with the table's name at an LSN, from its Relation or the catalogue."""
    return table_state._replace(namespace=table.namespace, name=table.name, schema_lsn=lsn)


def _other_policies(error: PgOutputError, policies: Policies) -> Hint:
    """Return a hint to let a refused value pass by another policy; keep the other policies."""
    name, value = error.policy or (None, None)
    if name is None and not isinstance(error, NullKeyError):
        return error.hint  # no policy lets the value pass
    if value is None:
        return (
            "Choose another policy for such values: give ",
            Argument("policies"),
            f" ({name or 'NAME'}=VALUE) and ",
            Argument("change_policies", True),
        )
    changed: dict[str, Any] = {str(name): value}
    return (
        "To let such values pass, give ",
        Argument("policies", dataclasses.replace(policies, **changed)),
        " and ",
        Argument("change_policies", True),
    )


def run_all(
    threads: int,
    do: Callable[..., None],
    arguments: Iterable[tuple[Any, ...]],
    tell: Callable[[], None],
) -> None:
    """Call a function with each of several arguments, in several threads.

    Parameters
    ----------
    threads : int
    do : callable
    arguments : iterable of tuple
        The arguments of each call.
    tell : callable
        Called twice a second meanwhile, and at the end.

    Raises
    ------
    Exception
        The first error that `do` has raised. Calls that had not begun by then are not made.
    """
    with ThreadPoolExecutor(threads) as pool:
        running = [pool.submit(do, *task_arguments) for task_arguments in arguments]
        try:
            done, left = wait(running, _TOLD, FIRST_EXCEPTION)
            while left and not any(future.exception() for future in done):
                tell()
                done, left = wait(running, _TOLD, FIRST_EXCEPTION)
        finally:
            for future in running:
                future.cancel()
        for future in running:
            if not future.cancelled():
                future.result()
    tell()
