"""Keep a target's tables up to date from a directory of segments, window by window."""

from __future__ import annotations

import functools
import hashlib
import itertools
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import pyarrow as pa

from ..captured.changes import ChangeReader
from ..captured.progress import Progress
from ..captured.stored import stored
from ..captured.units import SegmentSource, open_source
from ..columnar.decoder import ColumnarDecoder
from ..directory.consumers import Consumer, consumers, remove_consumer
from ..directory.copies import Tables
from ..directory.known import how_to_copy
from ..directory.looking import look
from ..directory.reading import first_position, lacking
from ..directory.requests import request_copy
from ..errors import PgOutputError
from ..history import Follower, History, HistoryPolicy, history_of
from ..lsn import format_lsn
from ..names import qualified
from ..protocol.encode import encode, encode_fields
from ..segments.format import BEGIN_NAME
from .departures import Departures
from .evolution import Known, replaced
from .naming import free_name, renames, stored_table
from .stored_changes import with_a_column
from .table_window import TableWindow
from .targets import DELETED, Held, IncompleteError, Origin, Stored, Target, window

if TYPE_CHECKING:
    from ..captured.units import Chunk, Plan, Unit
    from ..directory.copies import Copy, TableState
    from ..directory.reading import Position
    from ..policies import Policies
    from ..replication import CaptureProgress

_log = logging.getLogger(__name__)

_TOLD = 1.0  # seconds between two calls of `progress`, at most
# A capture reads the catalogue when it meets a new Relation, and does not wait for that.
_CATALOG_TIMEOUT = 10.0  # seconds
_CATALOG_WAIT = 0.1  # seconds between two looks
_CUT_OFF = (
    "it was dropped or left the publications, and its last changes before that are not in this "
    "directory"
)
_LEFT_UNCOPIED = (
    "it has no snapshot, and was dropped or left the publications before one could be made; its "
    "changes are kept"
)

Unknown = Literal["copy", "error"]
Uncopied = Literal["error", "empty", "changes"]


class SyncOptions(NamedTuple):
    """How tables are kept up to date.

    Fields: see :func:`sync`.
    """

    tables: tuple[str, ...] | None
    policies: Policies
    history: HistoryPolicy
    schema_changes: Literal["evolve", "fail"]
    unknown: Unknown
    uncopied: Uncopied
    interval: float
    window_bytes: int


class SyncProgress(NamedTuple):
    """How far a sync has come.

    Attributes
    ----------
    lsn : int
        The tables have what was committed before this LSN, but for those that wait for a snapshot.
    commit_time : int or None
        When the newest change was committed that is in the tables, in microseconds since 1970;
        None before the first one.
    changes, windows : int
        Changes that this call has written, and windows.
    write_seconds : float
        How long the last window took to be written.
    tables : dict of str to int
        Changes by table.
    stale : dict of str to str
        Tables whose rows are not kept up to date, and why.
    waiting : tuple of str
        Tables whose changes are held back until the capture has copied them.
    seconds : dict of str to float
        How long each table took to be written, in all windows of this call.
    held : tuple of Held
        What the target has of each table.
    end_lsn : int
        Where the directory ended when it was last looked at.
    capture : CaptureProgress or None
        How far the capture is, if the slot is captured by this call, and once it streams.
    left : tuple of str
        Tables that are dropped, or not published any more, and stay as they are: their names in
        the target.
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
    held: tuple[Held, ...] = ()
    end_lsn: int = 0
    capture: CaptureProgress | None = None
    left: tuple[str, ...] = ()


def consumer_name(target: str) -> str:
    """The name under which a sync into a target reads a directory."""
    return f"sync_{hashlib.sha256(target.encode()).hexdigest()[:12]}"


class Syncing:
    """A sync that goes on.

    Parameters
    ----------
    directory : pathlib.Path
        The segments.
    target : Target
    name : str
        What errors call the target.
    decode_for : {"portable", "spark", "arrow"}
        The decoder's target whose columns the target takes.
    options : SyncOptions
    consumer : str
        The name under which it reads the directory.
    progress : callable, optional
        Called with a `SyncProgress` before the first window, after each, and each second meanwhile.
    captured : callable, optional
        How far the capture is whose directory it is.
    """

    def __init__(
        self,
        directory: Path,
        target: Target,
        name: str,
        decode_for: str,
        options: SyncOptions,
        consumer: str,
        progress: Callable[[SyncProgress], None] | None = None,
        captured: Callable[[], CaptureProgress | None] | None = None,
    ) -> None:
        self._directory = directory
        self._target = target
        self._name = name
        self._options = options
        self._progress = progress
        self._captured = captured
        self._next_told = 0.0
        self._decoding: dict[str, Any] = {
            "policies": options.policies, "target": decode_for, "tables": options.tables,
            "on_error": "raise", "max_bytes": 16 << 20,
        }  # fmt: skip
        source = self._source()
        self._stored = target.open(origin_of(source))
        if not self._stored.lsn and consumer in {one.name for one in consumers(directory)}:
            # The target was deleted, or nothing came yet: it begins with the newest snapshots.
            remove_consumer(directory, consumer)
        self._consumer = Consumer(directory, consumer)
        cut_off = check_position(
            directory, name, self._stored, self._consumer.position, options.uncopied
        )
        for relation_id in cut_off:
            held = self._stored.tables[relation_id]
            self._stored.tables[relation_id] = held._replace(stale=_CUT_OFF)
        self._said: set[tuple[int, str]] = set()
        self._departures = Departures(directory, options.tables or ())
        self._counts: dict[str, int] = {}
        self._seconds = 0.0
        self._windows = 0
        self._commit_time = self._newest()
        self._looked = 0  # up to where there was nothing to write
        self._waiting: tuple[str, ...] = ()
        self._held_back: set[int] = set()
        self._table_seconds: dict[str, float] = {}
        self._end_lsn = 0
        self._see(source)
        gone = [one for one in self._stored.tables.values() if one.stale == DELETED]
        if gone and options.unknown == "error":
            raise IncompleteError(f"{qualified(gone[0])}: {DELETED}: copy it again")
        self._say_stale()

    def _source(self) -> SegmentSource:
        source = open_source([self._directory])
        if not isinstance(source, SegmentSource):
            raise PgOutputError(f"no capture has begun in {self._directory}")
        return source

    # --- windows ---------------------------------------------------------------------------------

    @property
    def lsn(self) -> int:
        """What was committed before this LSN is in the tables, or waits for a snapshot."""
        return max(self._consumer.position.lsn, self._looked)

    def run(
        self,
        until_lsn: int | None,
        is_over: Callable[[], bool],
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> SyncProgress:
        """Write window after window.

        Parameters
        ----------
        until_lsn : int or None
            It ends when it has what was committed before.
        is_over : callable
            Whether nothing more comes; asked before it is looked at what is there.
        is_stopped : callable
            Whether to end though there may be more.
        """

        def is_enough() -> bool:
            return is_stopped() or (until_lsn is not None and self.lsn >= until_lsn)

        self._tell()
        while True:
            begin = time.monotonic()
            ends = is_over()
            while not is_stopped() and self._step():
                if is_enough() and not (until_lsn and self._is_behind(until_lsn)):
                    break
            if ends or is_enough():
                self._departures.look(self._stored.tables, at_once=True)
                return self._told()
            self._tell()
            # The next window begins an interval after the last one did.
            end = begin + self._options.interval
            while time.monotonic() < end and not (is_over() or is_stopped()):
                time.sleep(min(0.05, max(0.0, end - time.monotonic())))
                self._tell()

    def _is_behind(self, lsn: int) -> bool:
        """Whether there is a table of which less was read, other than those that wait."""
        tables = self._consumer.position.tables
        return any(at < lsn and one not in self._held_back for one, at in tables.items())

    def _step(self) -> bool:
        """Write what is there, up to a size; False if there is nothing."""
        source = self._source()
        self._see(source)
        before = self._consumer.position
        plan = source.plan(
            {"start": None}, Progress(before), self._options.window_bytes, whole_copies=True
        )
        if plan is None:
            # Nothing in it counts; the position is stored with what comes next.
            self._looked = self._end_lsn
            self._departures.look(self._stored.tables)
            return False
        begin = time.perf_counter()
        one = _Window(
            self._directory, self._target, self._stored, self._decoding, self._options, self._tell
        )
        with window(self._target):
            self._stored = one.write(source, plan)
        self._consumer.advance(_after(plan))
        self._seconds = time.perf_counter() - begin
        self._note(one)
        self._tell(at_once=True)
        return True

    def _see(self, source: SegmentSource) -> None:
        """Note where the directory ends, and which tables wait in it."""
        self._end_lsn = source.seen.contents.end
        names = []
        self._held_back = {
            relation_id for relation_id, state in source.seen.states.items()
            if state.held_from is not None
        }  # fmt: skip
        for relation_id, state in source.seen.states.items():
            if state.held_from is not None:
                held = self._stored.tables.get(relation_id)
                names.append(
                    copied_name(self._directory, state.copies[-1])
                    if held is None
                    else qualified(held)
                )
        self._waiting = tuple(names)

    def _tell(self, *, at_once: bool = False) -> None:
        """Tell how far it is, if it is time."""
        now = time.monotonic()
        if self._progress is not None and (at_once or now >= self._next_told):
            self._next_told = now + _TOLD
            self._progress(self._told())

    def _note(self, one: _Window) -> None:
        self._windows += 1
        for name, count in one.counts.items():
            self._counts[name] = self._counts.get(name, 0) + count
        for name, seconds in one.seconds.items():
            self._table_seconds[name] = self._table_seconds.get(name, 0.0) + seconds
        self._commit_time = self._newest()
        self._departures.look(self._stored.tables)
        self._say_stale()

    def _say_stale(self) -> None:
        """Tell once of tables that are not kept up to date, and ask for their copies."""
        for relation_id, held in self._stored.tables.items():
            if held.stale is None or (relation_id, held.stale) in self._said:
                continue
            self._said.add((relation_id, held.stale))
            _log.warning("%s.%s is not kept up to date: %s", held.namespace, held.name, held.stale)
            if self._options.unknown == "copy" and (held.stale not in (_LEFT_UNCOPIED, _CUT_OFF)):
                request_copy(self._directory, relation_id, [held.namespace, held.name])

    def _newest(self) -> int | None:
        """When the newest change was committed that the target has."""
        times = [held.commit_time for held in self._stored.tables.values()
                 if held.commit_time is not None]  # fmt: skip
        return max(times, default=None)

    def _told(self) -> SyncProgress:
        stale = {qualified(held): held.stale for held in self._stored.tables.values()
                 if held.stale is not None}  # fmt: skip
        return SyncProgress(
            self.lsn, self._commit_time, sum(self._counts.values()), self._windows, self._seconds,
            dict(self._counts), stale, self._waiting, dict(self._table_seconds),
            tuple(self._stored.tables.values()), self._end_lsn,
            None if self._captured is None else self._captured(), self._departures.left,
        )  # fmt: skip


class _Window:
    """What is written together."""

    def __init__(
        self,
        directory: Path,
        target: Target,
        stored: Stored,
        decoding: dict[str, Any],
        options: SyncOptions,
        tell: Callable[[], None],
    ) -> None:
        self._directory = directory
        self._target = target
        self._options = options
        self._tell = tell
        self._lsn = stored.lsn
        self._held = dict(stored.tables)
        self._open: dict[int, TableWindow] = {}
        self._states = look(directory).states
        self._history = history_of([directory])
        self._follower: Follower | None = None
        if self._history is not None:
            self._follower = Follower(self._history, options.history)
            decoding = {**decoding, "registry": self._follower.registry}
        self._decoding = decoding
        self._schemas: dict[int, tuple[Any, pa.Schema]] = {}
        self.counts: dict[str, int] = {}
        self.seconds: dict[str, float] = {}

    def write(self, source: SegmentSource, plan: Plan) -> Stored:
        """Write everything; what the target has then."""
        reader = ChangeReader(self._decoding, self._follower)
        for copy, units in itertools.groupby(plan.units, _copy_of):
            for unit in units:
                for chunk in source.chunks(unit):
                    self._take(reader, chunk, copy)
                    self._tell()
            if copy is not None and copy.relation_id in self._open:
                self._open[copy.relation_id].end_copy(copy)
        after = _after(plan)
        # A window that is read again, as a process was killed behind its commit, may end before
        # what the target has: it never goes back, else what lies between would be taken twice.
        ends = {
            relation_id: max(after.of(relation_id), one.held.lsn)
            for relation_id, one in self._open.items()
        }
        for relation_id, one in self._open.items():
            one.commit_changes(ends[relation_id])
            self.counts[qualified(one.held)] = one.changes
        if self._target.threads > 1:
            with ThreadPoolExecutor(self._target.threads) as pool:
                for _ in pool.map(self._finish, self._open, ends.values()):
                    self._tell()
        else:
            for relation_id, end in ends.items():
                self._finish(relation_id, end)
                self._tell()
        for relation_id, one in self._open.items():
            self._held[relation_id] = one.held
        self._settle_names()
        self._check_columns(after)
        tables = {
            relation_id: held._replace(lsn=max(after.of(relation_id), held.lsn))
            for relation_id, held in self._held.items()
        }
        stored = Stored(max(after.lsn, self._lsn), tables)
        self._target.commit(stored)
        return stored

    def _finish(self, relation_id: int, end: int) -> None:
        one = self._open[relation_id]
        begin = time.perf_counter()
        one.commit_state(end)
        self.seconds[qualified(one.held)] = time.perf_counter() - begin

    def _take(self, reader: ChangeReader, chunk: Chunk, copy: Copy | None) -> None:
        for changes, decoded in reader.changes(chunk):
            batch = with_a_column(decoded)
            schema = self._schema(changes.layout, batch.schema)
            one = self._table(changes.relation, batch.column("commit_lsn")[0].as_py())
            known = functools.partial(self._known, changes)
            if copy is not None:
                one.add_copied(schema, batch, known, copy)
            else:
                one.add(schema, batch, known)

    def _schema(self, layout: Any, schema: pa.Schema) -> pa.Schema:
        """The schema of a layout's batches, always the same object."""
        known = self._schemas.get(id(layout))
        if known is None or not known[1].equals(schema, check_metadata=True):
            known = self._schemas[id(layout)] = layout, schema
        return known[1]

    # --- tables ----------------------------------------------------------------------------------

    def _table(self, relation: Any, lsn: int) -> TableWindow:
        """The table of a relation; its name is what the relation now says at an LSN."""
        relation_id = relation.relation_id
        one = self._open.get(relation_id)
        if one is None:
            held = self._held.get(relation_id)
            one = TableWindow(
                self._target,
                held or self._new(relation, lsn),
                is_new=held is None,
                evolves=self._options.schema_changes == "evolve",
                stops=self._options.unknown == "copy",
            )
            self._open[relation_id] = one
        if (one.held.namespace, one.held.name) != (relation.namespace, relation.name):
            one.held = one.held._replace(namespace=relation.namespace, name=relation.name)
        return one

    def _new(self, relation: Any, lsn: int) -> Held:
        relation_id = relation.relation_id
        taken = {held.stored.casefold() for held in self._held.values()}
        taken.update(one.held.stored.casefold() for one in self._open.values())
        name = free_name(stored_table(relation.namespace, relation.name), relation_id, taken)
        held = Held(relation_id, relation.namespace, relation.name, name)
        state = self._states.get(relation_id)
        if state is not None and state.snapshots:
            return held
        if self._options.uncopied == "error" and self._has_left(relation_id, lsn):
            return held._replace(stale=_LEFT_UNCOPIED)
        if self._options.uncopied == "error":
            raise PgOutputError(
                f"{qualified(relation)} has no snapshot in {self._directory}, so nobody knows the "
                "rows that it had before its first change there. Capture with snapshot='initial', "
                f"or {how_to_copy(self._directory, [relation_id])}; uncopied='empty' says that "
                "there were none, uncopied='changes' keeps its changes alone"
            )
        if self._options.uncopied == "changes":
            return held._replace(stale="its rows before the capture are not known")
        return held

    def _has_left(self, relation_id: int, lsn: int) -> bool:
        """Whether a table is no longer published, and nobody can copy it any more."""
        history = history_of([self._directory])
        return (
            history is not None
            and history.confirmed > lsn
            and bool(_departed(history, [relation_id]))
        )

    def _check_columns(self, after: Position) -> None:
        """Stop tables of which changes were taken by columns that were others by then.

        Nothing in a stream tells that a column was dropped and another one made under its name. The
        catalogue does, which may be read later than that.
        """
        history = history_of([self._directory])
        if history is None or history.is_empty:
            return
        catalog = history.newest_tables.by_id()
        for relation_id, held in self._held.items():
            table = catalog.get(relation_id)
            if table is None or held.stale is not None:
                continue
            if after.of(relation_id) < history.newest_start:
                continue
            if (name := replaced(held.columns, table)) is not None:
                reason = (
                    f"column {name} was dropped or renamed, and another one has its name; changes "
                    "since were taken as those of the former one"
                )
                if self._options.unknown == "error":
                    raise IncompleteError(f"{qualified(held)}: {reason}: copy it again")
                self._held[relation_id] = held._replace(stale=reason)

    def _settle_names(self) -> None:
        """Have each table under the name that it has now."""
        for relation_id, name in renames(self._held, list(self._open)):
            held = self._held[relation_id]
            self._target.rename(held, name)
            self._held[relation_id] = held._replace(stored=name)

    def _known(self, changes: Any, lsn: int) -> Known:
        """What is known of a table when a transaction was committed."""
        relation = changes.relation

        def value(name: str, text: str | None) -> pa.Array:
            decoder = ColumnarDecoder(**{**self._decoding, "tables": None})
            sent = [
                text if text is not None and column.name == name else None
                for column in relation.columns
            ]
            frames = [
                encode(relation),
                encode_fields("I", relation_id=relation.relation_id, new=sent),
            ]
            (batch,) = decoder.decode(frames)
            row = pa.record_batch(batch).column("after")
            return stored(row.flatten()[row.type.get_field_index(name)])

        end = time.monotonic() + _CATALOG_TIMEOUT
        while True:
            if self._history is None:
                return Known(None, None, value)
            at = self._history.tables_at(lsn)
            table, before = (
                one.by_id().get(relation.relation_id)
                for one in (at.catalog, self._history.tables_before(lsn))
            )
            known = Known(table, before, value, at.is_certain)
            if (
                lsn < self._history.confirmed
                or known.now(relation.columns) is not None
                or time.monotonic() > end
            ):
                return known
            time.sleep(_CATALOG_WAIT)
            self._tell()
            self._history = history_of([self._directory])


def check_position(
    directory: Path, name: str, stored: Stored, position: Position, uncopied: Uncopied
) -> list[int]:
    """Refuse a directory that lacks changes which the target has not.

    Of tables that are not published any more nobody can make a copy: those are returned.

    Parameters
    ----------
    directory : pathlib.Path
    name : str
        What errors call the target.
    stored : Stored
        What the target has.
    position : Position
        Where the directory goes on for it.
    uncopied : {"error", "empty", "changes"}
    """
    if not stored.lsn and uncopied == "empty" and (directory / BEGIN_NAME).exists():
        raise PgOutputError(
            f"the first segments of {directory} are deleted, so tables without a snapshot do not "
            "begin empty there: have them copied, or give uncopied='changes'"
        )
    lacks = _behind(look(directory).states, stored, position)
    gone = _departed(history_of([directory]), lacks)
    behind = [one for one in lacks if one not in gone]
    if behind:
        one = stored.tables[behind[0]]
        raise PgOutputError(
            f"{name} has the changes of {one.namespace}.{one.name} before {format_lsn(one.lsn)}, "
            f"and {directory} goes on for it at {format_lsn(position.of(behind[0]))}: what lies "
            f"between is not there. {how_to_copy(directory, behind)}"
        )
    return gone


def _departed(history: History | None, relation_ids: list[int]) -> list[int]:
    """Those of tables that the newest catalogue does not have."""
    if history is None:
        return []
    published = history.newest_tables.by_id()
    return [one for one in relation_ids if one not in published]


def _behind(states: Mapping[int, TableState], stored: Stored, position: Position) -> list[int]:
    """Tables that the directory goes on with beyond what the target has, by relation id."""
    found = []
    for relation_id, held in stored.tables.items():
        at = position.of(relation_id)
        state = states.get(relation_id)
        comes = state is not None and (
            state.held_from is not None
            or any(copy.lsn > held.copy_lsn and copy.lsn - 1 >= at for copy in state.snapshots)
        )
        if held.lsn < at and not comes and held.stale is None:
            found.append(relation_id)
    return found


def lost_tables(directory: Path, stored: Stored, consumer: str) -> list[int]:
    """Tables of which the directory lacks changes that the target has not, by relation id.

    They have to be copied again before a sync can begin.
    """
    found = look(directory)
    known = {one.name: one.position for one in consumers(directory)} if stored.lsn else {}
    position = known.get(consumer)
    lost: set[int] = set()
    if position is None:
        begin = found.contents.begin
        position = first_position(found.states, begin)
        lost.update(lacking(position, found.states, begin))
    behind = _behind(found.states, stored, position)
    gone = _departed(history_of([directory]), behind)
    return sorted(lost.union(one for one in behind if one not in gone))


def origin_of(source: SegmentSource) -> Origin:
    """The database from which a directory's changes come."""
    return Origin(source.identity["system_identifier"], source.identity["database"])


def copied_name(directory: Path, copy: Copy) -> str:
    """The name of a table that is copied; its relation id, if that is all that is known."""
    try:
        known: Any = Tables(directory).fields(copy).get("table")
    except PgOutputError:  # the copy was finished meanwhile, and has another file
        known = None
    return ".".join(known) if known else str(copy.relation_id)


def _after(plan: Plan) -> Position:
    """Where a reader of segments is behind a plan."""
    if plan.after is None:
        raise PgOutputError("the plan is that of a recording")
    return plan.after.position


def _copy_of(unit: Unit) -> Copy | None:
    return None if unit.step is None else unit.step.copy
