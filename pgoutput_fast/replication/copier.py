"""Make the snapshots of waiting tables in a change log, in a thread beside the capture's stream."""

from __future__ import annotations

import json
import logging
import math
import random
import threading
import time
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ..changelog.snapshots import SnapshotFiles, delete_unfinished
from ..errors import PgOutputError, RetryableError, counted
from ..lsn import format_lsn
from ..protocol.messages import decode_rare
from ..segments.format import write_options
from .history import HistoryWatch, read_types
from .membership import Members, read_members
from .snapshot import ServerSnapshot, open_snapshot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from ..changelog.snapshot_states import Snapshot, SnapshotStates
    from ..connections import ConnectionParameters
    from ..segments import SegmentMetadata
    from ..types import TypeRegistry
    from .imported import SnapshotRange, SnapshotTable
    from .walsender import CreatedSlot

# Seconds before the next try after an error: the first time, and at most. After a refusal, such as
# a missing privilege, the copier waits for the longest time.
_FIRST_WAIT = 0.5
_LONGEST_WAIT = 60.0
_TELL_INTERVAL = 10.0  # seconds between two log lines about the progress of running snapshots
# Seconds between two reads of the catalogue that confirm copied tables, and the largest part of the
# time that these reads may take. A killed capture copies unconfirmed tables again.
_CONFIRM_INTERVAL = 1.0
_CONFIRM_SHARE = 0.05

_log = logging.getLogger(__name__)


class CopyProgress(NamedTuple):
    """How far the running snapshots have come.

    Attributes
    ----------
    tables, tables_done : int
        The number of tables in this round, and of those whose snapshots are complete.
    rows : int
        Rows that were copied.
    bytes, bytes_done : int
        Bytes of the tables on the server's disk without TOAST, and of the part that was copied.
    seconds_left : float or None
        An estimate from the pace so far; None before the first range is copied.
    """

    tables: int
    tables_done: int
    rows: int
    bytes: int
    bytes_done: int
    seconds_left: float | None


class CopyTarget(NamedTuple):
    """Where snapshots are written, and how they are made.

    Attributes
    ----------
    parameters : ConnectionParameters
    metadata : SegmentMetadata
        The metadata of the capture's session, with its publications and the format of values.
    directory : pathlib.Path
        The change log.
    connections : int
        How many connections copy at the same time.
    compression : {None, "lz4", "zstd"}
        The compression of the files.
    """

    parameters: ConnectionParameters
    metadata: SegmentMetadata
    directory: Path
    connections: int
    compression: Literal["lz4", "zstd"] | None

    def members(self) -> Members:
        """Read which tables are published now.

        Raises
        ------
        PgOutputError
            See `read_members`.
        """
        return read_members(self.parameters, self.metadata.publications)

    def types(self) -> TypeRegistry:
        """Read the types that exist now.

        Raises
        ------
        PgOutputError
            See `read_types`.
        """
        return read_types(self.parameters)

    def open(
        self,
        relation_ids: list[int] | None,
        stop: threading.Event | None,
        exported: CreatedSlot | None = None,
        refused: dict[int, PgOutputError] | None = None,
    ) -> ServerSnapshot:
        """Open a snapshot of some tables, or of all published ones; see `open_snapshot`.

        Raises
        ------
        PgOutputError
            See `open_snapshot`.
        """
        return open_snapshot(
            self.parameters,
            self.metadata.publications,
            relation_ids=relation_ids,
            binary=self.metadata.is_binary,
            connections=self.connections,
            exported=exported,
            stop=stop,
            refused=refused,
        )

    def files(
        self, order: Snapshot, opened: ServerSnapshot, announced: Sequence[bytes]
    ) -> SnapshotFiles:
        """Return the writer of one snapshot's files."""
        return SnapshotFiles(
            self.directory, order, self.metadata, opened.lsn, opened.time, announced,
            write_options(self.compression),
        )  # fmt: skip


class Copier:
    """Makes the snapshots of waiting tables, in a thread of its own, until it is closed.

    Parameters
    ----------
    target : CopyTarget
    tables : SnapshotStates
        The states of the directory's tables.
    opened : ServerSnapshot, optional
        The snapshot of the slot that the capture made. The first round uses it.
    members : Members, optional
        The tables that were published before `opened` was taken.
    types : TypeRegistry, optional
        The types before `opened` was taken. Without them, an altered type is not noticed.
    history : HistoryWatch, optional
        Writes the schema history.

    Attributes
    ----------
    progress : CopyProgress or None
        None while nothing is being copied.
    error : PgOutputError or None
        Why no snapshots can be made; None after the next success.
    refused : dict of int to PgOutputError
        By relation id: tables that the role may not read, or whose COPY the server broke off. They
        are tried again after some time. Other tables are copied meanwhile.
    broken_off : frozenset of int
        Relation ids of the tables whose COPY the server broke off, for example at a damaged row,
        since this object was made.
    lsn : int
        The greatest LSN of the rounds that ended. A consumer reads a snapshot once the change log
        reaches the snapshot's LSN.
    """

    def __init__(
        self,
        target: CopyTarget,
        tables: SnapshotStates,
        opened: ServerSnapshot | None = None,
        members: Members | None = None,
        types: TypeRegistry | None = None,
        history: HistoryWatch | None = None,
    ) -> None:
        self._target = target
        self._history = history
        self._tables = tables
        self._opened, self._members = opened, members or Members({}, 0)
        self._types = types
        self._failures = 0
        self._wake, self._stop = threading.Event(), threading.Event()
        # `_woken` counts the calls of `wake`. `_idle_since` is its value when the thread last found
        # that no table waited. The copier is idle while both are equal.
        self._woken, self._idle_since = 0, -1
        self.error: PgOutputError | None = None
        self.refused: dict[int, PgOutputError] = {}
        self.broken_off: frozenset[int] = frozenset()
        self._refused_until = 0.0
        self._is_stuck = False
        self.lsn = 0
        self.progress: CopyProgress | None = None
        self._thread = threading.Thread(target=self._run, name="pgoutput_fast-copy", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Tell the thread that a table waits."""
        self._woken += 1
        self._wake.set()

    @property
    def is_idle(self) -> bool:
        """Whether no table waits."""
        return self._idle_since == self._woken

    @property
    def refusal(self) -> PgOutputError | None:
        """The error of one waiting table, if all waiting tables are refused; otherwise None."""
        return next(iter(self.refused.values()), None) if self._is_stuck else None

    def close(self) -> None:
        """End the thread. The next capture makes unfinished snapshots from the beginning."""
        self._stop.set()
        self._wake.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            delete_unfinished(self._target.directory, self._tables.states.copy())
            while not self._stop.is_set():
                self._wake.clear()
                woken = self._woken
                if time.monotonic() >= self._refused_until:
                    self.refused = {}
                orders = self._tables.waiting
                allowed = {oid: order for oid, order in orders.items() if oid not in self.refused}
                self._is_stuck = bool(orders) and not allowed
                if allowed:
                    self._try(allowed)
                elif orders:
                    self._wake.wait(max(self._refused_until - time.monotonic(), 0.0))
                else:
                    self._idle_since = woken
                    self._wake.wait()
        except Exception as error:  # noqa: BLE001 - raised in the capture's thread
            # The text of an OSError, such as "No space left on device", is clearer alone.
            reason = str(error) if isinstance(error, OSError) else repr(error)
            code = "io_failed" if isinstance(error, OSError) else "internal"
            unexpected = PgOutputError(f"can't take snapshots of tables: {reason}", code=code)
            self.error = error if isinstance(error, PgOutputError) else unexpected
        finally:
            if self._opened is not None:
                self._opened.close()

    def _try(self, orders: dict[int, Snapshot]) -> None:
        """Make snapshots; after an error, log it and wait until the next try."""
        try:
            self._copy(orders)
            self.error, self._failures = None, 0
        except RetryableError as error:
            wait = min(_FIRST_WAIT * 2**self._failures, _LONGEST_WAIT)
            wait *= random.uniform(0.5, 1.0)  # noqa: S311
            self._failures += 1
            self._tell_failure(error, wait)
        except PgOutputError as error:
            self.error = error
            self._tell_failure(error, _LONGEST_WAIT)
        finally:
            self.progress = None

    def _tell_failure(self, error: PgOutputError, wait: float) -> None:
        if not self._stop.is_set():
            _log.warning("tables wait for their snapshots: %s; trying again in %.0f s", error, wait)
            self._stop.wait(wait)

    def _copy(self, orders: dict[int, Snapshot]) -> None:
        """Run one round: make snapshots at one LSN. Tables that can't be copied still wait."""
        opened, members, types = self._opened, self._members, self._types
        self._opened = self._types = None
        if opened is None:
            # Read before the snapshot is taken, so that a later change is noticed.
            members, types = self._target.members(), self._target.types()
            for relation_id in list(orders):
                if relation_id not in members.tables:
                    order = orders.pop(relation_id)
                    self._tables.leave(relation_id, members.lsn, self._tables.fields(order))
            if not orders:
                return
            if self._history is not None:
                self._history.catch_up()  # so that the types at the snapshot's LSN are known
            refused: dict[int, PgOutputError] = {}
            opened = self._target.open(list(orders), self._stop, refused=refused)
            self._note_refused(refused)
        copies = _Round(self._target, self._tables, opened, orders, members, types, self._note)
        try:
            with opened:
                broken_off = copies.run(self._stop)
        finally:
            copies.close()
        self.broken_off |= broken_off.keys()
        self._note_refused(broken_off)
        self.lsn = max(self.lsn, opened.lsn)

    def _note_refused(self, refused: dict[int, PgOutputError]) -> None:
        for error in refused.values():
            _log.warning(
                "a table waits for its snapshot: %s; trying again in %.0f s", error, _LONGEST_WAIT
            )
        if refused:
            self.refused = {**self.refused, **refused}
            self._refused_until = time.monotonic() + _LONGEST_WAIT

    def _note(self, progress: CopyProgress) -> None:
        self.progress = progress


class _Round:
    """One round: the snapshots that are made at one LSN."""

    def __init__(
        self,
        target: CopyTarget,
        tables: SnapshotStates,
        opened: ServerSnapshot,
        orders: dict[int, Snapshot],
        members: Members,
        types: TypeRegistry | None,
        note: Callable[[CopyProgress], None],
    ) -> None:
        self._target = target
        self._states = tables
        self._opened = opened
        self._members = members
        self._types = types
        self._note = note
        self._lock = threading.Lock()
        self._unconfirmed: list[SnapshotTable] = []
        self._tables = [table for table in opened.tables if table.relation_id in orders]
        self._orders = {table.relation_id: orders[table.relation_id] for table in self._tables}
        self._files = {
            table.relation_id: target.files(
                self._orders[table.relation_id], opened, table.announced
            )
            for table in self._tables
        }
        self._bytes = sum(table.bytes for table in self._tables)
        self._done = self._rows_done = self._bytes_done = 0
        self._began = self._logged_at = time.monotonic()
        self._confirm_at = self._began + _CONFIRM_INTERVAL

    def run(self, stop: threading.Event) -> dict[int, PgOutputError]:
        """Copy the tables; return the errors of tables whose COPY the server broke off."""
        for relation_id, why in self._opened.lost.items():
            _log.warning(
                "can't copy the table with relation id %d as of %s: %s. If the table is still "
                "published, it gets a later snapshot",
                relation_id, format_lsn(self._opened.lsn), why,
            )  # fmt: skip
        for files in self._files.values():
            files.begin()
        self._tell()
        _log.info(
            "copying %s as of %s, %s on the server",
            counted(len(self._tables), "table"), format_lsn(self._opened.lsn),
            counted(self._bytes, "byte"),
        )  # fmt: skip
        broken_off: dict[int, PgOutputError] = {}

        def refused(table: SnapshotTable, error: PgOutputError) -> None:
            broken_off[table.relation_id] = error
            if len(self._tables) > 1:  # the others may take long, so say now what happens next
                _log.warning("%s; trying again after the other tables", error)

        self._opened.copy(self._take, self._finished, stop, refused)
        self._confirm(is_last=True)
        return broken_off

    def close(self) -> None:
        """Delete the files of incomplete snapshots; no thread may write any more."""
        for files in self._files.values():
            files.discard()

    def _take(self, part: SnapshotRange, frames: Iterator[Any]) -> None:
        """Write the rows of one range; called in several threads."""
        relation_id = part.table.relation_id
        if relation_id not in self._files:
            return
        self._files[relation_id].write(part.number, self._counted(frames))
        with self._lock:
            self._bytes_done += part.table.bytes // part.table.ranges
            self._tell()

    def _counted(self, frames: Iterator[Any]) -> Iterator[tuple[Any, Any]]:
        for data, offsets, *_ in frames:
            yield data, offsets
            with self._lock:
                self._rows_done += len(offsets) - 1
                self._tell()
            self._confirm()

    def _finished(self, table: SnapshotTable) -> None:
        """Note that all rows of a table are in files; the catalogue has to confirm the table."""
        if table.relation_id in self._files:
            with self._lock:
                self._unconfirmed.append(table)
            self._confirm()

    def _confirm(self, *, is_last: bool = False) -> None:
        """Complete the snapshots of copied tables that are still published as before.

        One read of the catalogue confirms all tables that were copied before it. With a read for
        each table, the total time would grow with the square of the number of tables.
        """
        began = time.monotonic()
        with self._lock:
            if not self._unconfirmed or (began < self._confirm_at and not is_last):
                return
            tables, self._unconfirmed = self._unconfirmed, []
            self._confirm_at = math.inf
        members = self._target.members()
        types = None if self._types is None else self._target.types()
        took = time.monotonic() - began
        for table in tables:
            self._complete(table, members, types)
        self._confirm_at = time.monotonic() + max(_CONFIRM_INTERVAL, took / _CONFIRM_SHARE)

    def _complete(self, table: SnapshotTable, members: Members, types: TypeRegistry | None) -> None:
        """Complete the snapshot of a table, unless its rows do not match the stream.

        Parameters
        ----------
        table : SnapshotTable
        members : Members
            The published tables, read after the table was copied.
        types : TypeRegistry or None
            The types, read after the table was copied.
        """
        relation_id = table.relation_id
        member, now = (published.tables.get(relation_id) for published in (self._members, members))
        # Changes while the table was not published are neither in the snapshot nor in the stream.
        why: str | None = "it has left the publications"
        if member is not None and now is not None:
            why = now.change(member.state_fields)
        if why is None and self._is_altered(table, types):
            why = "one of its types was altered"
        if member is None or why is not None:
            _log.warning(
                "table %s.%s needs a new snapshot: %s while it was copied",
                table.namespace, table.name, why,
            )  # fmt: skip
            return
        files = self._files[relation_id].finish()
        fields: dict[str, object] = {
            "table": [table.namespace, table.name],
            **member.state_fields,
            "rows": sum(files),
            "files": files,
        }
        if self._types is not None:
            # The types were the same before the snapshot was taken and after the copy.
            fields["types"] = json.loads(self._types.within(_type_ids(table)).to_json())
        self._states.finish(self._orders[relation_id], self._opened.lsn, fields)
        del self._files[relation_id]
        with self._lock:
            self._done += 1
            self._tell()
        _log.info(
            "copied table %s.%s: %s as of %s",
            table.namespace, table.name, counted(sum(files), "row"),
            format_lsn(self._opened.lsn),
        )  # fmt: skip

    def _is_altered(self, table: SnapshotTable, types: TypeRegistry | None) -> bool:
        """Return whether a type was altered.

        COPY uses the types of now, not those of the snapshot.
        """
        if self._types is None or types is None:
            return False
        oids = _type_ids(table)
        # Ignore enums: a value is its label, so a new label changes no copied value.
        before, now = (
            {oid: type_ for oid, type_ in types.within(oids).catalog.items() if type_.kind != "e"}
            for types in (self._types, types)
        )
        return before != now

    def _tell(self) -> None:
        now = time.monotonic()
        left = None
        if self._bytes_done:
            left = (now - self._began) * (self._bytes - self._bytes_done) / self._bytes_done
        progress = CopyProgress(
            len(self._tables), self._done, self._rows_done, self._bytes, self._bytes_done, left
        )
        self._note(progress)
        if now - self._logged_at >= _TELL_INTERVAL:
            self._logged_at = now
            _log.info(
                "copied %d of %s, %s, %s of %s%s",
                progress.tables_done, counted(progress.tables, "table"),
                counted(progress.rows, "row"),
                f"{progress.bytes_done:,}", counted(progress.bytes, "byte"),
                "" if left is None else f", about {left:.0f} s left",
            )  # fmt: skip


def _type_ids(table: SnapshotTable) -> list[int]:
    """Return the OIDs of the types of a table's columns."""
    relation: Any = decode_rare(table.announced[-1], in_stream=False, encoding="latin-1")
    return [column.type_id for column in relation.columns]
