"""Keep a target's tables up to date from a change log, window by window."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ..changelog.commits import has_commit
from ..changelog.consumers import Consumer, consumers, remove_consumer
from ..changelog.known import how_to_copy
from ..changelog.log import ChangeLog
from ..changelog.read_plan import Position
from ..changelog.requests import request_copy
from ..changelog.schema_history import HistoryEntry, entries
from ..errors import Argument, PgOutputError, RetryableError, counted
from ..lsn import format_lsn
from ..names import qualified
from ..policies import Policies
from ..segments.folders import BEGIN_NAME
from ..segments.listing import contents
from .continuity import check_position, origin_of, snapshot_name
from .options import WINDOW_BYTES
from .outcomes import ChangesMissing, Committed, Paused, PausedError, Stale, fold_outcomes
from .pauses import PauseLimit, SeparateTables
from .snapshot_requests import CUT_OFF, SnapshotRequests
from .targets import (
    LOST,
    OTHER_HISTORY,
    ConflictError,
    Gap,
    IncompleteError,
    StoppedError,
    TableState,
    Target,
    TargetError,
    TargetState,
    UnplannedError,
    window,
)
from .unpublished import UnpublishedTables, unpublished_tables
from .window_writer import WindowWriter

if TYPE_CHECKING:
    from ..changelog.read_plan import ReadPlan
    from ..changelog.view import View
    from ..replication import CaptureProgress
    from .duckdb_file import DuckdbFile
    from .options import SyncOptions
    from .outcomes import Outcome

_log = logging.getLogger(__name__)

_TOLD = 1.0  # seconds between two calls of `progress`
_MEASURED = 10.0  # seconds between two measurements of the backlog while the target is locked
_POLL = 0.05  # seconds between two checks whether to end, or to begin a window
# A window has a fixed cost: its files, commits, plans and positions. After a window of at least
# `_MUCH_BYTES`, more changes are likely. The next window then begins `_GATHER` seconds after this
# one began, at the earliest. With a backlog of small rows, that halved the cost of a change.
_MUCH_BYTES = 2 << 20
_GATHER = 1.0
# When a type may have been altered, a capture reads the catalogue, and writes segments meanwhile.
# So sync may have to wait until the schema history has the types of a window.
_TYPES_TIMEOUT = 30.0  # seconds
_TYPES_WAIT = 0.1  # seconds between two checks
# A change log that ends before the target's position is normal for a while: where several
# directories take turns, the capture of the next one first has to catch up.
_BEHIND = 10.0  # seconds


class SyncProgress(NamedTuple):
    """How far a sync has come.

    Attributes
    ----------
    lsn : int
        The tables have everything that was committed before this LSN. Tables that wait for a
        snapshot are the exception.
    commit_time : int or None
        Commit time of the newest change in the tables, in microseconds since 1970; None before the
        first change.
    changes, windows : int
        Changes and windows that this call has written. Each row of a snapshot counts as a change,
        its Truncate does not.
    write_seconds : float
        Seconds that the last window took.
    tables : dict of str to int
        Changes by table.
    stale : dict of str to str
        Stale tables, and why they are stale.
    waiting : tuple of str
        Tables that wait for their snapshot.
    seconds : dict of str to float
        Seconds spent on each table, in all windows of this call.
    table_states : tuple of TableState
        What the target has of each table.
    end_lsn : int
        The newest known end of the directory, an LSN.
    capture : CaptureProgress or None
        How far the capture has come. None while it does not stream, and if this call captures no
        slot.
    left : tuple of str
        Tables that are dropped or not published any more, by their names in the target. They stay
        as they are.
    change_seconds, state_seconds : float
        Seconds spent on change tables, and then on state tables, in all windows of this call.
    names : dict of int to str
        Relation id to the table's name in the target: of a DuckDB table, or of a directory.
    asked : tuple of str
        Stale tables for which a new snapshot is requested.
    paused : dict of str to str
        Paused tables, and why they are paused.
    over_limit : tuple of str
        Stale tables that got so many snapshots within a day that no other one is requested yet.
    """

    lsn: int
    commit_time: int | None
    changes: int
    windows: int
    write_seconds: float
    tables: dict[str, int]
    stale: dict[str, str]
    waiting: tuple[str, ...] = ()
    seconds: dict[str, float] = {}  # noqa: RUF012 - never changed
    table_states: tuple[TableState, ...] = ()
    end_lsn: int = 0
    capture: CaptureProgress | None = None
    left: tuple[str, ...] = ()
    change_seconds: float = 0.0
    state_seconds: float = 0.0
    names: dict[int, str] = {}  # noqa: RUF012 - never changed
    asked: tuple[str, ...] = ()
    paused: dict[str, str] = {}  # noqa: RUF012 - never changed
    over_limit: tuple[str, ...] = ()

    def __repr__(self) -> str:
        # In one line, as there may be a thousand tables.
        return (
            f"<SyncProgress at {format_lsn(self.lsn)}: {counted(len(self.table_states), 'table')}, "
            f"{len(self.paused)} paused, {len(self.stale)} stale>"
        )


class Engine(Protocol):
    """What writes windows in place of this process, such as Spark."""

    @property
    def window_bytes(self) -> int:
        """The default size of a window in bytes."""

    def check(self, target: Target) -> None:
        """Refuse a target that this engine can't write."""

    def begin(self, target: Target) -> None:
        """Begin a sync. It has the target for itself, so leftovers of earlier syncs may go."""

    def plan(
        self, view: View, position: Position, max_bytes: int, **options: Any
    ) -> ReadPlan | None:
        """Plan the next window as `View.plan` does, or a shorter one."""

    def writer(self, plan: ReadPlan, *arguments: Any) -> WindowWriter:
        """Return a writer for a read plan; `arguments` are those of `WindowWriter`."""


class Syncing:
    """One call of `sync`: it writes window after window until it is over.

    Parameters
    ----------
    log : ChangeLog
    target : Target
    name : str
        The target's name in errors.
    decode_for : {"portable", "spark", "arrow"}
        The target for which `ColumnarDecoder` decodes, which fixes the Arrow types.
    options : SyncOptions
    consumer : str
        The name of the consumer as which this sync reads the change log.
    progress : callable, optional
        Called with a `SyncProgress` before the first window, after each, and each second meanwhile.
    captured : callable, optional
        Returns the progress of the capture that writes the change log.
    engine : Engine, optional
        What writes windows; by default this process.
    file : DuckdbFile, optional
        The target's DuckDB file. While another process has it open, sync waits.
    """

    _followed: tuple[HistoryEntry, int] | None = None
    """The newest entry of the schema history that all tables follow, and the LSN of that check."""

    def __init__(
        self,
        log: ChangeLog,
        target: Target,
        name: str,
        decode_for: str,
        options: SyncOptions,
        consumer: str,
        progress: Callable[[SyncProgress], None] | None = None,
        captured: Callable[[], CaptureProgress | None] | None = None,
        engine: Engine | None = None,
        file: DuckdbFile | None = None,
    ) -> None:
        self._log, self._directory = log, log.directory
        self._engine = engine
        self._target = target
        self._name = name
        self._options = options
        usual = WINDOW_BYTES if engine is None else engine.window_bytes
        self._window_bytes = options.window_bytes or usual
        self._progress = progress
        self._captured = captured
        self._next_progress_time = 0.0
        view = self._log.view()
        self._target_state = target.open(origin_of(view))
        # `encoding` concerns values from the catalogue, such as defaults of added columns.
        self._decoding: dict[str, Any] = {
            "policies": target.remembered.policies or Policies(), "target": decode_for,
            "tables": options.tables, "on_error": "raise", "max_bytes": 16 << 20,
            "encoding": view.metadata.encoding,
        }  # fmt: skip
        self._is_unstored = False  # whether an outcome was folded since the last commit
        positions = {entry.name: entry.position for entry in consumers(log.directory)}
        if not self._target_state.lsn and consumer in positions:
            self._begin_anew(consumer, positions[consumer])
        self._consumer = Consumer(log.directory, consumer)
        cut_off = check_position(
            log, name, self._target_state, self._consumer.position, options.uncopied
        )
        tables = self._target_state.tables
        self._fold(Stale(tables[relation_id], CUT_OFF) for relation_id in cut_off)
        self._separate = SeparateTables(PauseLimit(options.pause_bytes, options.pause_time))
        self._pass_gaps()
        self._note_gaps()
        self._said: set[tuple[int, str]] = set()
        self._requests = SnapshotRequests(self._log, name, options, lambda: self._consumer.position)
        self._window = 0.0, 0  # begin (time.monotonic) and size in bytes of the last window
        self._unpublished = UnpublishedTables(self._log, options.tables or (), target.shown)
        self._counts: dict[str, int] = {}
        self._seconds, self._windows = 0.0, 0
        self._commit_time = self._newest()
        self._behind_since: float | None = None
        self._is_behind_reported = False
        self._is_compared = False  # whether `_compare` was done
        self._checked_lsn = 0  # before this LSN, nothing is left to write
        self._last_view: View | None = None
        # The last view, position and tables read apart for which the read plan was empty.
        self._read: tuple[View, Position, frozenset[int]] | None = None
        self._waiting: tuple[str, ...] = ()
        self._waiting_ids: set[int] = set()
        self._table_seconds: dict[str, float] = {}
        self._stage_seconds = (0.0, 0.0)
        self._end_lsn = 0
        self._is_stopped: Callable[[], bool] = lambda: False
        self._see(view)
        self._take_lost()
        self._change_policies()
        self._say_stale()
        self._say_gaps()
        self._pause_troubled()
        self._set_paused_apart()
        if file is not None:
            file.on_wait = self._wait
        self._next_measured = 0.0

    def _take_lost(self) -> None:
        """Refuse tables whose data was removed from the target or changed, or leave them stale.

        A table that was dropped or is not published any more can't get a snapshot, so it does not
        count as stale.
        """
        is_copied = self._requests.is_copied
        lost = {key: table_state for key, table_state in self._target_state.tables.items()
                if (table_state.stale or "").startswith(LOST) and not is_copied(key)}  # fmt: skip
        left = unpublished_tables(self._log.history(), list(lost))
        self._fold(Committed(lost.pop(relation_id)._replace(stale=None)) for relation_id in left)
        if lost and self._options.on_error == "stop":
            table_state = next(iter(lost.values()))
            raise IncompleteError(
                f"{qualified(table_state)}: {table_state.stale}; "
                f"{how_to_copy(self._directory, lost)}",
                table=qualified(table_state),
            )

    def _change_policies(self) -> None:
        """Change the target's policies to those of this call, and mark concerned tables stale."""
        remembered, policies = self._target.remembered, self._target_state.policies
        if policies is None or remembered.policies in (None, policies):
            return
        for relation_id, table_state in self._target_state.tables.items():
            why = (
                None
                if table_state.stale is not None
                else remembered.concerned(policies, table_state)
            )
            if why is not None:
                self._fold([Stale(table_state, why)])
                name = [table_state.namespace, table_state.name]
                request_copy(self._directory, relation_id, name, f"the sync to {self._name}: {why}")
        # Commit the stale tables first: a crash in between must not forget that they are stale.
        self._store()
        self._target.keep()

    def _wait(self) -> None:
        """Report progress while another process has the target open.

        Raises
        ------
        StoppedError
            The sync is stopped.
        PgOutputError
            The segments that wait in the change log have more than `pause_bytes`.
        """
        if self._is_stopped():
            raise StoppedError(f"the sync was stopped while it waited for {self._name}")
        self._tell()
        if time.monotonic() < self._next_measured:
            return
        self._next_measured = time.monotonic() + _MEASURED
        size = 0
        for segment in contents(self._directory).segments:
            with contextlib.suppress(FileNotFoundError):  # merged with other segments
                size += segment.path.stat().st_size if segment.end_lsn > self.lsn else 0
        if size > self._options.pause_bytes:
            raise PgOutputError(
                f"{size} bytes of segments in {self._directory} wait because another process has "
                f"{self._name} open, and the limit is {self._options.pause_bytes} bytes",
                code="in_use",
                parameter="pause_bytes",
                hint="Close the file there, and start sync again: nothing is lost",
                path=str(self._directory),
            )

    def _pass_gaps(self) -> None:
        """Move the consumer behind gaps that a call stored in the target before it was killed."""
        position = self._consumer.position
        ends = {
            relation_id: table_state.gaps[-1].end
            for relation_id, table_state in self._target_state.tables.items()
            if table_state.gaps and position.of(relation_id) < table_state.gaps[-1].end
        }
        if ends:
            self._consumer.advance(Position(position.lsn, {**position.tables, **ends}))

    def _note_gaps(self) -> None:
        """Record the changes that change tables miss, because the change log begins behind them.

        A later snapshot brings the rows, but not these changes.
        """
        position = self._consumer.position
        for relation_id, table_state in self._target_state.tables.items():
            at = position.of(relation_id)
            if table_state.stale is not None or table_state.lsn >= at:
                continue
            self._fold([ChangesMissing(table_state, Gap(table_state.lsn, at))])
            _log.warning(
                "the change table of %s lacks the changes from %s to %s, because %s no longer has "
                "them",
                qualified(table_state), format_lsn(table_state.lsn), format_lsn(at),
                self._directory,
            )  # fmt: skip

    def _begin_anew(self, consumer: str, position: Position) -> None:
        """Let a new target begin with the newest snapshots, though the consumer exists already."""
        remove_consumer(self._directory, consumer)
        # The consumer of a sync that was killed before its first commit is still at the begin.
        has_moved = (self._directory / BEGIN_NAME).exists() or position.lsn > self._log.view().begin
        if self._target_state.is_new and has_moved:
            _log.warning(
                "%s is a new target, but a sync has read %s for it before. If you did not delete "
                "the earlier target, check whether its disk is mounted",
                self._name, self._directory,
            )  # fmt: skip

    # --- windows ---------------------------------------------------------------------------------

    @property
    def lsn(self) -> int:
        """All changes committed before this LSN are in the tables, or wait for a snapshot."""
        return max(self._consumer.position.lsn, self._checked_lsn)

    def run(
        self,
        until_lsn: int | None,
        is_over: Callable[[], bool],
        is_stopped: Callable[[], bool],
        wait: Callable[[float], bool],
    ) -> SyncProgress:
        """Write window after window.

        Parameters
        ----------
        until_lsn : int or None
            End when the tables have all changes that were committed before this LSN.
        is_over : callable
            Whether no more changes will come. Called before the change log is read, so that no
            change is missed.
        is_stopped : callable
            Whether to end though there may be more changes.
        wait : callable
            Waits for a number of seconds; returns True early if there may be more changes, or a
            reason to end.
        """

        def is_enough() -> bool:
            return is_stopped() or (until_lsn is not None and self.lsn >= until_lsn)

        self._is_stopped = is_stopped
        if self._engine is not None:
            self._engine.begin(self._target)
        self._tell()
        while True:
            begin, is_idle = time.monotonic(), True
            ends = is_over()
            while not is_stopped() and self._write_available():
                is_idle = False
                if is_enough() and not (until_lsn and self._is_behind(until_lsn)):
                    break
                self._gather(lambda: is_over() or is_stopped())
            if ends or is_enough():
                if self._end_lsn < self._target_state.lsn:
                    self._say_behind(at_once=True)
                self._unpublished.check(self._target_state.tables, at_once=True)
                return self._current_progress()
            self._tell()
            # The next window begins an interval after the last one did.
            end = begin + self._options.interval
            while (left := end - time.monotonic()) > 0 and not (is_over() or is_stopped()):
                has_more = wait(min(left, _TOLD))
                self._tell()
                if has_more and is_idle:
                    break

    def _gather(self, is_ended: Callable[[], bool]) -> None:
        """After a large window that was not full, wait for more changes, until `is_ended`."""
        if _MUCH_BYTES <= self._window[1] < self._window_bytes:
            while time.monotonic() < self._window[0] + _GATHER and not is_ended():
                time.sleep(_POLL)
                self._tell()

    def _is_behind(self, lsn: int) -> bool:
        """Whether a table is behind an LSN, apart from paused tables and tables that wait."""
        tables = self._consumer.position.tables
        paused = {
            relation_id
            for relation_id in self._separate.tables
            if self._target_state.tables[relation_id].paused
        }
        waiting = self._waiting_ids | paused
        return any(at < lsn and relation_id not in waiting for relation_id, at in tables.items())

    def _write_available(self) -> bool:
        """Write a window of the changes that the log has; False if there is nothing to write."""
        view = self._log.view()
        self._see(view)
        if self._end_lsn < self._target_state.lsn:
            # Either the target got the later changes from another directory, or this directory and
            # the server were restored from backups. Both look alike until the change log has
            # reached the target's position, so write nothing before.
            self._say_behind()
            return False
        self._compare()
        try:
            return self._write_next(view)
        except StoppedError:
            return False

    def _write_next(self, view: View) -> bool:
        """Write a window of each table that is read apart and due, then one of all others."""
        is_written = False
        for relation_id in self._separate.due():
            if not self._is_stopped():
                is_written |= self._try_apart(view, relation_id)
        self._requests.ask(self._target_state.tables)
        return self._go_on(self._log.view()) or is_written

    def _plan(self, view: View, **options: Any) -> ReadPlan | None:
        """Return the read plan of the next window; None if there is nothing to read."""
        plan = view.plan if self._engine is None else functools.partial(self._engine.plan, view)
        return plan(self._consumer.position, self._window_bytes, **options)

    def _next(self, view: View) -> ReadPlan | None:
        """Return the read plan of the next window, without the tables that are read apart.

        With a thousand tables, even an empty plan takes a while. So an empty plan is made only once
        per view and position.
        """
        read = view, self._consumer.position, frozenset(self._separate.tables)
        if self._read is not None and self._read[0] is view and self._read[1:] == read[1:]:
            return None
        plan = self._plan(view, paused=self._separate.tables)
        if plan is None:
            self._read = read
        return plan

    def _go_on(self, view: View) -> bool:
        """Write a window without the tables that are read apart; False if there is nothing."""
        while (plan := self._next(view)) is not None:
            self._window = time.monotonic(), plan.size
            if self._attempt(view, plan, self._target_state):
                return True
        # The rest of the log concerns no table; the next window stores the position.
        self._checked_lsn = self._end_lsn
        self._follow_catalog(view)
        self._unpublished.check(self._target_state.tables)
        if self._is_unstored:
            self._store()
        return False

    def _attempt(self, view: View, plan: ReadPlan, target_state: TargetState) -> bool:
        """Write a window; False if it had to pause tables, and nothing was written."""
        begin = time.perf_counter()
        try:
            writer = self._write(view, plan, target_state)
        except PausedError as error:
            self._pause(error)
            return False
        self._is_unstored = False
        self._consumer.advance(plan.after)
        self._seconds = time.perf_counter() - begin
        self._note(writer)
        self._tell(at_once=True)
        return True

    def _follow_catalog(self, view: View) -> None:
        """Let names and columns follow the catalogue, for tables that have no new change."""
        history_entries = entries(self._directory)
        if not history_entries or self._followed == (history_entries[-1], self._end_lsn):
            return
        self._followed = history_entries[-1], self._end_lsn
        behind = {*self._waiting_ids, *self._separate.tables}
        at = Position(
            self._end_lsn,
            {relation_id: self._consumer.position.of(relation_id) for relation_id in behind},
        )
        writer = WindowWriter(*self._writer_arguments(self._target_state))
        try:
            if writer.has_news(at):
                with window(self._target):
                    self._target_state = writer.write_catalog(view, at)
                self._is_unstored = False
                self._note(writer)
        except PausedError as error:
            self._pause(error)

    def _writer_arguments(self, target_state: TargetState) -> tuple[Any, ...]:
        """Return the arguments of `WindowWriter`."""
        return self._log, self._target, target_state, self._decoding, self._options, self._tell

    # --- paused tables ---------------------------------------------------------------------------

    def _pause(self, error: PausedError) -> None:
        """Pause tables: their changes wait, and they are read apart from the others."""
        self._fold(error.paused)
        for outcome in error.paused:
            self._separate.add(outcome.table_state.relation_id)
        self._say_paused()

    def _pause_troubled(self) -> None:
        """Pause the tables that the target can't read or rename."""
        tables = self._target_state.tables
        paused = [Paused(table_state, error) for relation_id, error in self._target.troubles.items()
                  if (table_state := tables[relation_id]).paused is None]  # fmt: skip
        if paused and self._options.on_error == "stop":
            raise paused[0].error
        if paused:
            self._pause(PausedError(paused))

    def _fold(self, outcomes: Iterable[Outcome]) -> None:
        """Apply outcomes to the target state; the next commit stores it."""
        tables = fold_outcomes(self._target_state.tables, outcomes, time.time())
        self._is_unstored |= tables != self._target_state.tables
        self._target_state = self._target_state._replace(tables=tables)

    def _store(self) -> None:
        """Commit the target state without changes."""
        with window(self._target):
            self._target.commit(self._target_state)
        self._is_unstored = False

    def _try_apart(self, view: View, relation_id: int) -> bool:
        """Write a window of one table; False if it is still paused, or there is nothing."""
        table_state = self._target_state.tables[relation_id]
        try:
            self._target.retry(table_state)
        except RetryableError:
            raise
        except PgOutputError as error:
            self._pause(PausedError([Paused(table_state, error)]))
            self._give_up(view, relation_id)
            return False
        plan = self._plan(view, table=relation_id)
        if plan is None:
            self._rejoin(relation_id)
            return False
        committed = fold_outcomes(self._target_state.tables, [Committed(table_state)], time.time())
        if not self._attempt(view, plan, self._target_state._replace(tables=committed)):
            self._give_up(view, relation_id)
            return False
        if table_state.paused is not None:
            _log.info("%s is no longer paused", qualified(table_state))
        position = self._consumer.position
        if position.of(relation_id) >= position.lsn:
            self._rejoin(relation_id)
        else:
            self._separate.add(relation_id, at_once=True)
        return True

    def _rejoin(self, relation_id: int) -> None:
        """Read a table with the others again, and let it follow the catalogue."""
        self._separate.remove(relation_id)
        self._followed = None
        if self._target_state.tables[relation_id].paused is not None:
            self._fold([Committed(self._target_state.tables[relation_id])])

    def _give_up(self, view: View, relation_id: int) -> None:
        """Skip the changes of a table that was paused for too long: it becomes stale."""
        position, table_state = self._consumer.position, self._target_state.tables[relation_id]
        outcome = self._separate.stale_outcome(view, position, table_state)
        if outcome is None or outcome.gap is None:
            return
        self._fold([outcome])
        # The target first: after a kill here, `_pass_gaps` moves the consumer.
        self._store()
        ends = {**position.tables, relation_id: outcome.gap.end}
        self._consumer.advance(Position(position.lsn, ends))
        self._separate.remove(relation_id)
        self._say_stale()

    def _set_paused_apart(self) -> None:
        """Read those tables apart that an earlier call has paused."""
        for relation_id, table_state in self._target_state.tables.items():
            if table_state.paused is not None:
                self._separate.add(relation_id, at_once=True)
        # With other policies, a table may go on at once. If it does not, `_try_apart` warns.
        if not self._target.remembered.changes_policies:
            self._say_paused()

    def _say_paused(self) -> None:
        """Warn once of each paused table."""
        for relation_id, table_state in self._target_state.tables.items():
            if table_state.paused is None or (relation_id, table_state.paused.reason) in self._said:
                continue
            self._said.add((relation_id, table_state.paused.reason))
            _log.warning(
                "%s is paused: %s. Its changes from %s on wait in %s. Sync tries the table again "
                "each minute; other tables continue",
                qualified(table_state), table_state.paused.reason,
                format_lsn(self._consumer.position.of(relation_id)), self._directory,
            )  # fmt: skip

    # --- one window ------------------------------------------------------------------------------

    def _write(self, view: View, plan: ReadPlan, target_state: TargetState) -> WindowWriter:
        """Write a window, and return its writer.

        A value may be refused because its type was altered after the catalogue was read. Then wait
        for the next read of the catalogue, and write the window again.
        """
        try:
            return self._written(view, plan, target_state)
        except PgOutputError as error:
            paused = (
                [outcome.error for outcome in error.paused]
                if isinstance(error, PausedError)
                else []
            )
            codes = {getattr(cause, "code", None) for cause in paused or [error]}
            if "bad_value" not in codes or not self._has_types(plan):
                raise
        return self._written(view, plan, target_state)

    def _has_types(self, plan: ReadPlan) -> bool:
        """Wait until the schema history covers a window; return whether it does."""
        end = time.monotonic() + _TYPES_TIMEOUT
        while (history := self._log.history()) is not None:
            if history.confirmed >= plan.after.lsn:
                return True
            if self._is_stopped() or time.monotonic() > end:
                return False
            time.sleep(_TYPES_WAIT)
            self._tell()
        return False

    def _written(self, view: View, plan: ReadPlan, target_state: TargetState) -> WindowWriter:
        arguments = self._writer_arguments(target_state)
        try:
            if self._engine is not None:
                try:
                    return self._written_by(self._engine.writer(plan, *arguments), view, plan)
                except (RetryableError, ConflictError, TargetError, PausedError):
                    raise
                except PgOutputError as error:
                    # Executors do not say which table an error concerns. This process writes the
                    # window again and finds out.
                    is_planned = not isinstance(error, UnplannedError)
                    if is_planned and self._options.on_error == "stop":
                        raise
                    _log.info(
                        "the executors could not write a window, so this process writes it: %s",
                        error,
                    )
            return self._written_by(WindowWriter(*arguments), view, plan)
        except ConflictError as error:
            # Another job, or a task of a killed sync, may write a table for a while: try again.
            raise RetryableError(error.message, code=error.code, hint=error.hint) from error

    def _written_by(self, writer: WindowWriter, view: View, plan: ReadPlan) -> WindowWriter:
        with window(self._target):
            self._target_state = writer.write(view, plan)
        return writer

    def _say_behind(self, *, at_once: bool = False) -> None:
        """Warn once if the change log stays behind the target's position."""
        if self._behind_since is None:
            self._behind_since = time.monotonic()
        is_long = at_once or time.monotonic() - self._behind_since > _BEHIND
        if is_long and not self._is_behind_reported:
            self._is_behind_reported = True
            _log.warning(
                "%s has all changes before %s, but %s ends at %s: sync continues once the change "
                "log reaches the target",
                self._name, format_lsn(self._target_state.lsn), self._directory,
                format_lsn(self._end_lsn),
            )  # fmt: skip

    def _compare(self) -> None:
        """Check once that the change log has the target's newest transaction.

        Without this transaction, the change log has another history. Sync would skip the changes
        before the target's position, although the target lacks them.
        """
        if self._is_compared:
            return
        self._is_compared = True
        newest = self._target_state.newest
        if newest is None or has_commit(self._directory, newest) is not False:
            return
        if self._options.on_error == "stop":
            raise IncompleteError(
                f"{self._name} has the transaction that was committed at {format_lsn(newest.lsn)}, "
                f"but {self._directory} does not. Either an earlier state of the change log and of "
                "the server was restored, or this target belongs to another change log",
                code="another_history",
                path=str(self._directory),
                hint=("Give ", Argument("on_error", "pause"), ": sync then requests new snapshots"),
            )
        tables = self._target_state.tables
        gone = unpublished_tables(self._log.history(), list(tables))
        # Without `newest`: from here on, the target follows the history of the change log.
        self._target_state = TargetState(self._target_state.lsn, tables)
        self._fold(
            Stale(table_state, CUT_OFF if relation_id in gone else OTHER_HISTORY)
            for relation_id, table_state in tables.items()
        )
        self._say_stale()

    def _see(self, view: View) -> None:
        """Note the end of the change log, and the tables that wait for a snapshot."""
        if view is self._last_view:
            return
        self._last_view = view
        self._end_lsn = view.end
        names = []
        self._waiting_ids = {
            relation_id for relation_id, state in view.states.items()
            if state.waits_from is not None
        }  # fmt: skip
        for relation_id, state in view.states.items():
            if state.waits_from is not None:
                table_state = self._target_state.tables.get(relation_id)
                names.append(
                    snapshot_name(self._directory, state.all_snapshots[-1])
                    if table_state is None
                    else qualified(table_state)
                )
        self._waiting = tuple(names)

    def _tell(self, *, at_once: bool = False) -> None:
        """Report progress, at most once a second unless `at_once`."""
        now = time.monotonic()
        if self._progress is not None and (at_once or now >= self._next_progress_time):
            self._next_progress_time = now + _TOLD
            self._progress(self._current_progress())

    def _note(self, writer: WindowWriter) -> None:
        self._windows += 1
        for name, count in writer.counts.items():
            self._counts[name] = self._counts.get(name, 0) + count
        for name, seconds in writer.seconds.items():
            self._table_seconds[name] = self._table_seconds.get(name, 0.0) + seconds
        changes, states = self._stage_seconds
        self._stage_seconds = changes + writer.change_seconds, states + writer.state_seconds
        self._commit_time = self._newest()
        self._unpublished.check(self._target_state.tables)
        self._pause_troubled()
        self._say_stale()
        self._say_gaps()

    def _say_stale(self) -> None:
        """Warn once of each stale table, and request snapshots."""
        is_new = False
        for relation_id, table_state in self._target_state.tables.items():
            if table_state.stale is not None and (relation_id, table_state.stale) not in self._said:
                self._said.add((relation_id, table_state.stale))
                is_new = True
                # The name in the target: a new table may have the name of a dropped one.
                name = self._target.shown(table_state.stored_name)
                _log.warning("%s is not kept up to date: %s", name, table_state.stale)
        self._requests.ask(self._target_state.tables, at_once=is_new)

    def _say_gaps(self) -> None:
        """Warn once of each change table that another program has changed."""
        for relation_id, table_state in self._target_state.tables.items():
            if table_state.gap is None or (relation_id, str(table_state.gap)) in self._said:
                continue
            self._said.add((relation_id, str(table_state.gap)))
            _log.warning(
                "%s: another program changed its change table. Changes in it before %s may differ "
                "from the server's",
                qualified(table_state), format_lsn(table_state.gap),
            )  # fmt: skip

    def _newest(self) -> int | None:
        """Return the commit time of the newest change in the target."""
        times = [table_state.commit_time for table_state in self._target_state.tables.values()
                 if table_state.commit_time is not None]  # fmt: skip
        return max(times, default=None)

    def _current_progress(self) -> SyncProgress:
        names = {
            key: self._target.shown(table_state.stored_name)
            for key, table_state in self._target_state.tables.items()
        }
        left = self._unpublished.left  # these can't get a snapshot
        # A dropped table and its successor have the same name: the successor counts.
        own = {qualified(table_state): key for key, table_state in self._target_state.tables.items()
               if names[key] not in left}  # fmt: skip
        stale = {
            qualified(table_state): table_state.stale
            for key, table_state in self._target_state.tables.items()
            if table_state.stale is not None and own.get(qualified(table_state), key) == key
        }
        asked: list[str] = []
        over_limit: list[str] = []
        for key, table_state in self._target_state.tables.items():
            if self._requests.needs(table_state) and names[key] not in left:
                is_over = self._requests.is_over_limit(key)
                (over_limit if is_over else asked).append(qualified(table_state))
        return SyncProgress(
            self.lsn, self._commit_time, sum(self._counts.values()), self._windows, self._seconds,
            dict(self._counts), stale, self._waiting, dict(self._table_seconds),
            tuple(self._target_state.tables.values()), self._end_lsn,
            None if self._captured is None else self._captured(), left, *self._stage_seconds,
            names, tuple(asked),
            {qualified(table_state): table_state.paused.reason
             for table_state in self._target_state.tables.values()
             if table_state.paused is not None},
            tuple(over_limit),
        )  # fmt: skip
