"""What a capture does beside its stream: snapshots, merging, retention, consumers, disk space."""

from __future__ import annotations

import logging
import shlex
import shutil
import threading
import time
from typing import TYPE_CHECKING, Any, cast

from ..changelog.consumers import consumers, remove_consumer
from ..changelog.layouts_file import LayoutsWriter
from ..changelog.merging import delete_covered, merges
from ..changelog.requests import forget_request, requested
from ..changelog.retention import Keep, forget_dropped, retain
from ..changelog.snapshot_states import Snapshot, SnapshotStates
from ..changelog.uploading import CONSUMER_NAME
from ..errors import Argument, PgOutputError, counted, printable
from ..protocol.messages import decode_rare
from ..segments.format import write_options
from .copier import Copier
from .membership import Members, Watch

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ..capture_options import CaptureOptions
    from ..segments import SegmentWriter
    from ..transactions.runs import Run
    from ..types import TypeRegistry
    from .copier import CopyProgress, CopyTarget
    from .history import HistoryWatch
    from .snapshot import ServerSnapshot
    from .uploader import Uploader

_TICK = 1.0  # seconds between two checks of requests and of the published tables
_POLL = 0.05  # seconds between two checks whether the snapshots or the upload are done
_MERGE_INTERVAL = 5.0
_TIDY_INTERVAL = 10.0
# Tidying a directory takes at most this part of the time.
_TIDY_SHARE = 0.05
_WATCH_INTERVAL = 10.0
_WARNING_INTERVAL = 3600.0  # seconds between two warnings of the same consumer
_MUCH_UNREAD = 1 << 30  # warn of a consumer that is this many bytes of the log behind
_SILENT_AFTER = 2 * 86400.0  # seconds; a reader that runs once a day is not silent

_log = logging.getLogger(__name__)


def order_first(directory: Path, opened: ServerSnapshot) -> None:
    """Request a snapshot of each table that is published when the slot of a directory is made.

    Call this before the capture begins in the directory: so no consumer takes a table as complete
    whose rows are still missing.
    """
    names = {table.relation_id: [table.namespace, table.name] for table in opened.tables}
    tables = SnapshotStates(directory)
    tables.clear()  # an earlier try may have left states, whose slot was dropped again
    for relation_id in [*names, *opened.lost]:
        fields: dict[str, object] = {"table": names.get(relation_id, [])}
        # All rows of the snapshot were committed before the first change of the slot.
        tables.wait(relation_id, opened.lsn - 1, fields, first=True)


class Upkeep:
    """Looks after a change log while a capture writes to it.

    It requests and makes snapshots, merges segments, deletes what nobody needs, watches consumers,
    and watches the free space of the disk.

    Parameters
    ----------
    writer : SegmentWriter
    target : CopyTarget
    options : CaptureOptions
    members : Members
        The tables that were published before the slot was made, or before the capture began.
    opened : ServerSnapshot, optional
        The snapshot of the new slot, if this capture made it. Its tables wait.
    history : HistoryWatch, optional
        Writes the schema history.
    types : TypeRegistry, optional
        The types before the slot was made, or before the capture began.
    uploader : Uploader, optional
        Uploads the directory to object storage.
    """

    def __init__(
        self,
        writer: SegmentWriter,
        target: CopyTarget,
        options: CaptureOptions,
        members: Members,
        opened: ServerSnapshot | None = None,
        history: HistoryWatch | None = None,
        types: TypeRegistry | None = None,
        uploader: Uploader | None = None,
    ) -> None:
        self._writer = writer
        self._history = history
        self._uploader = uploader
        self._directory = writer.directory
        self._target = target
        self._options = options
        self._copies = options.snapshot != "never"
        self._check_space()
        self._tables = SnapshotStates(writer.directory)
        self._announced: dict[int, list[str]] = {}  # names of announced tables, by relation id
        self._tell_that_none_joins()
        # By relation id: the last snapshot, and the fields of its file.
        self._state_fields: dict[int, tuple[Snapshot, dict[str, object]]] = {}
        self._members = members
        waits = self._tables.waiting.keys()
        # The tables of the new slot whose first snapshots are not complete yet.
        self._first = set(waits) if opened is not None else set()
        self._copier = (
            Copier(target, self._tables, opened, members, types, history)
            if opened or waits
            else None
        )
        if self._copies:
            self._take_members(members)
        self._take_requests()
        self._watch = Watch(target.members, _WATCH_INTERVAL) if self._copies else None
        self._merger = (
            _MergeThread(self._directory, options.segment_bytes, write_options(target.compression))
            if options.merge
            else None
        )
        self._gatherer = LayoutsWriter(self._directory)
        self._next_tick = self._next_tidy = 0.0
        self._warned: dict[str, float] = {}  # time of the last warning, by consumer

    # --- tables

    def _tell_that_none_joins(self) -> None:
        """Warn if this capture makes no snapshots, but an earlier one made some here."""
        copied = sum(
            table_state.all_snapshots[-1].state != "gone"
            for table_state in self._tables.states.values()
        )
        if copied and not self._copies:
            _log.warning(
                "earlier captures took snapshots of %s, but this one takes none: a table that "
                "joins the publications from now on lacks its existing rows. Give %s to each "
                "capture of this directory",
                counted(copied, "table"),
                Argument("snapshot", "initial"),
            )

    @property
    def progress(self) -> CopyProgress | None:
        """How far the running snapshots have come; None if there are none."""
        return None if self._copier is None else self._copier.progress

    @property
    def copied_lsn(self) -> int:
        """Consumers read all complete snapshots once the change log reaches this LSN."""
        return 0 if self._copier is None else self._copier.lsn

    @property
    def waiting(self) -> int:
        """The number of tables that wait for a snapshot."""
        return len(self._tables.waiting)

    @property
    def uploaded_lsn(self) -> int | None:
        """Everything before this LSN is in object storage; None if the capture does not upload."""
        return None if self._uploader is None else self._uploader.position

    def wait(self, stop: threading.Event | None, tell: Callable[[], None]) -> None:
        """Wait until no table waits for a snapshot, or `stop` is set.

        Parameters
        ----------
        stop : threading.Event, optional
        tell : callable
            Called once a second.

        Raises
        ------
        PgOutputError
            Snapshots can't be made.
        """
        copier = self._copier
        if copier is not None:
            self._wait_for(copier, lambda: copier.error or copier.refusal, stop, tell)

    def _wait_for(
        self,
        worker: Copier | Uploader,
        failure: Callable[[], PgOutputError | None],
        stop: threading.Event | None,
        tell: Callable[[], None],
    ) -> None:
        """Wait until a worker's thread has nothing to do; raise what `failure` returns."""
        last_call = time.monotonic()
        while not worker.is_idle:
            if stop is not None and stop.is_set():
                return
            why = failure()
            if why is not None:
                raise why
            time.sleep(_POLL)
            if time.monotonic() - last_call >= _TICK:
                last_call = time.monotonic()
                tell()

    def see(self, frame: bytes) -> None:
        """Note a Relation or Type message, before any change of its transaction is written.

        The server announces a table before its first change on a connection, and again after the
        table or its publications were altered.
        """
        if self._history is not None:
            self._history.see(frame)
        if frame[:1] != b"R":
            return
        relation: Any = decode_rare(frame, in_stream=False, encoding="latin-1")
        self._announced[relation.relation_id] = [relation.namespace or "pg_catalog", relation.name]

    def record(self, run: Run) -> None:
        """Record the catalogue changes that frames announce, before any frame is written."""
        if self._history is not None:
            self._history.record(run)

    def order_copies(self, end_lsn: int) -> None:
        """Request the snapshots that announced tables need, before their changes are written.

        Parameters
        ----------
        end_lsn : int
            Everything that is written next was committed before this LSN.
        """
        if not self._announced or not self._copies:
            return
        # The stream may lag: a table that left the publications at a later LSN still comes. Its
        # changes before that LSN count, so keep the announcement for later.
        before, self._announced = self._announced, {}
        for relation_id in list(before):
            if self._left_at(relation_id) >= end_lsn:
                self._announced[relation_id] = before.pop(relation_id)
        if not before:
            return
        waiting = self._tables.waiting
        new = {oid: name for oid, name in before.items() if oid not in waiting}
        if new:
            self._request_changed(new)

    def _left_at(self, relation_id: int) -> int:
        """Return the LSN at which a table left the publications; 0 if it did not."""
        state = self._tables.states.get(relation_id)
        last = state.all_snapshots[-1] if state is not None else None
        return last.lsn if last is not None and last.state == "gone" else 0

    def _request_changed(self, announced: dict[int, list[str]]) -> None:
        """Request snapshots of announced tables that are new, or left and returned, or changed.

        The server announces a partition even if its changes come as changes of its root. The
        partition then needs no snapshot.
        """
        try:
            members = self._target.members()
        except PgOutputError as error:
            _log.warning("can't check how tables changed, so they get new snapshots: %s", error)
            members = Members({}, 0)
        for relation_id in announced.keys() - members.partitions:
            state = self._tables.states.get(relation_id)
            is_gone = state is not None and relation_id not in members.tables
            if is_gone and self._leave(relation_id, members.lsn, members):
                continue
            why = self._change(relation_id, members)
            if why is not None:
                self._order(relation_id, announced[relation_id], why)

    def _order(self, relation_id: int, table: list[str], why: str) -> None:
        """Request a snapshot of a table, unless it waits for one already."""
        state = self._tables.states.get(relation_id)
        if state is not None and state.waits_from is not None:
            return
        first = state is None or not state.snapshots
        self._tables.wait(relation_id, self._writer.position, {"table": table}, first=first)
        _log.info("table %s needs a snapshot: %s", ".".join(table), why)
        if self._copier is None:
            self._copier = Copier(self._target, self._tables, history=self._history)
        self._copier.wake()

    def _take_members(self, members: Members) -> None:
        """Request snapshots of tables that joined or changed; note tables that left."""
        earlier, self._members = self._members, members
        states = self._tables.states.copy()  # the copier changes them
        for member in members.tables.values():
            state = states.get(member.relation_id)
            if state is None or members.lsn > state.all_snapshots[-1].lsn:
                why = self._change(member.relation_id, members)
                if why is not None:
                    self._order(member.relation_id, [member.namespace, member.name], why)
        for relation_id in states.keys() - members.tables.keys():
            self._leave(relation_id, members.lsn, earlier)

    def _leave(self, relation_id: int, lsn: int, earlier: Members) -> bool:
        """Note that a table left the publications; return whether this is new.

        Changes before `lsn` count, as far as the stream has them. `earlier` has the table's name.
        """
        last = self._tables.states[relation_id].all_snapshots[-1]
        # The catalogue may have been read before the snapshot.
        if last.state != "snapshot" or lsn <= last.lsn:
            return False
        fields = self._tables.fields(last)
        member = earlier.tables.get(relation_id)
        if member is not None:
            name = f"{member.namespace}.{member.name}"
        else:  # it may have been renamed since its snapshot
            copied = cast("list[str]", fields.get("table") or [])  # empty if it is not known
            name = f"{'.'.join(copied)} (its name at its snapshot)"
        _log.info("table %s has left the publications", name)
        self._tables.leave(relation_id, lsn, fields)
        return True

    def _change(self, relation_id: int, members: Members) -> str | None:
        """Return why a table needs a new snapshot; None if it needs none."""
        state = self._tables.states.get(relation_id)
        if state is None:
            return "it is new"
        last = state.all_snapshots[-1]
        if last.state == "waiting":
            return None  # the copier reads the catalogue before its snapshot
        if last.state == "gone":
            return "it has returned to the publications"
        member = members.tables.get(relation_id)
        if member is None:
            return "its changes came, but it is not published any more, or this can't be checked"
        stored_fields = self._state_fields.get(relation_id)
        if stored_fields is None or stored_fields[0] != last:
            # The file of a snapshot does not change, so it is read once.
            stored_fields = self._state_fields[relation_id] = last, self._tables.fields(last)
        return member.change(stored_fields[1])

    def _take_requests(self) -> None:
        for relation_id, request in requested(self._directory).items():
            state = self._tables.states.get(relation_id)
            # A running snapshot may be older than the request: then the request stays.
            if state is None or state.waits_from is None:
                self._order(relation_id, request.table, request.why)
                forget_request(self._directory, relation_id)

    # --- periodic work

    def tick(self) -> None:
        """Do what is due, in the thread that writes segments.

        Raises
        ------
        PgOutputError
            The first snapshots can't be made, the merge or the upload has failed, or the disk is
            almost full or refuses.
        """
        now = time.monotonic()
        if now < self._next_tick:
            return
        self._next_tick = now + _TICK
        self._check_space()
        if self._history is not None:
            self._history.tick(max(self._writer.position, self.copied_lsn))
        try:
            if self._watch is not None and (members := self._watch.take()) is not None:
                self._take_members(members)
            self._take_requests()
            if now >= self._next_tidy:
                self._tidy()
                took = time.monotonic() - now
                self._next_tidy = now + max(_TIDY_INTERVAL, took / _TIDY_SHARE)
        except OSError as error:
            raise PgOutputError(
                f"can't maintain {self._directory}: {error.strerror or error}",
                code="io_failed",
                path=str(self._directory),
            ) from error
        if self._copier is not None:
            refused = self._copier.refused  # read before `broken_off`, which the thread sets first
            # A table whose COPY the server broke off is tried again, like a table that joins: it
            # does not end the capture.
            self._first = (self._first & self._tables.waiting.keys()) - self._copier.broken_off
            first = [refused[oid] for oid in self._first if oid in refused]
            if self._copier.error is not None and self._first:
                first.append(self._copier.error)
            if first:
                raise first[0]
        for worker in (self._merger, self._uploader):
            if worker is not None and worker.error is not None:
                raise worker.error

    def _check_space(self) -> None:
        try:
            free = shutil.disk_usage(self._directory).free
        except OSError as error:
            raise PgOutputError(
                f"can't read the free space of {self._directory}: {error.strerror or error}",
                code="io_failed",
                path=str(self._directory),
            ) from error
        if free < self._options.min_free:
            raise PgOutputError(
                f"the disk of {self._directory} has {free} bytes free, less than the limit of "
                f"{self._options.min_free}. No change is lost: the slot keeps all changes that are "
                f"not acknowledged",
                code="disk_full",
                path=str(self._directory),
                hint=(
                    "Free some space, or set a lower ",
                    Argument("keep_bytes"),
                    " or ",
                    Argument("min_free"),
                ),
            )

    def _tidy(self) -> None:
        """Delete files that nobody needs, unless segments are being merged at this moment."""
        self._check_consumers()
        if self._merger is None:
            self._delete()
        elif self._merger.lock.acquire(blocking=False):
            try:
                self._delete()
            finally:
                self._merger.lock.release()

    def _delete(self) -> None:
        # Before any segment is deleted: a reader that lists the segments with a table's last
        # changes also finds the state of that table.
        members, forgotten = self._members, []
        if members.existing is not None:
            forgotten = forget_dropped(self._directory, self._tables, members.existing, members.lsn)
        for relation_id in forgotten:
            self._state_fields.pop(relation_id, None)
        count = delete_covered(self._directory, self._options.grace)
        count += retain(
            self._directory,
            Keep(self._options.keep_seconds, self._options.keep_bytes),
            self._writer.store_position,
        )
        if count:
            _log.info("deleted %s that nobody needs any more", counted(count, "file"))
        self._gatherer.gather()

    def _check_consumers(self) -> None:
        """Warn of consumers that are far behind or silent; with `give_up`, remove silent ones."""
        silent_after = self._options.silent_after
        most = _SILENT_AFTER if silent_after is None else silent_after
        now = time.time()
        for consumer in consumers(self._directory):
            silent = now - consumer.seen
            if consumer.name == CONSUMER_NAME and self._uploader is not None:
                # An upload may take long without moving its position, and did not move before this
                # process began. So the time of its failures counts.
                silent = self._uploader.failing_for
            unread = self._writer.position - consumer.position.least
            if silent >= most and unread > 0 and self._options.give_up:
                self._give_up(consumer.name, silent)
            elif unread < _MUCH_UNREAD and (silent < most or unread <= 0):
                self._warned.pop(consumer.name, None)
            elif now - self._warned.get(consumer.name, 0.0) >= _WARNING_INTERVAL:
                self._warned[consumer.name] = now
                _log.warning(
                    "consumer %s has not moved for %.0f s and is %s bytes of the log behind: the "
                    "change log keeps all files that it has not read. If nobody uses this consumer "
                    "any more, remove it: pgoutput-fast consumers --dir %s remove %s",
                    consumer.name, silent, f"{unread:,}", shlex.quote(str(self._directory)),
                    consumer.name,
                )  # fmt: skip

    def _give_up(self, name: str, silent: float) -> None:
        """Remove a consumer that has not moved for `silent` seconds."""
        remove_consumer(self._directory, name)
        _log.warning("removed consumer %s, which has not moved for %.0f s", name, silent)
        if name == CONSUMER_NAME and self._uploader is not None:
            raise PgOutputError(
                f"the upload to {self._uploader.url} failed for {silent:.0f} s and is given up: "
                f"the change log keeps no more files for it",
                code="io_failed",
                hint=("Start again when the storage works, or without ", Argument("upload")),
            )

    def finish(self, stop: threading.Event | None, tell: Callable[[], None]) -> None:
        """Finish the schema history and the upload, at the end of a capture without an error.

        Parameters
        ----------
        stop : threading.Event, optional
            If it is set, do not wait for the upload.
        tell : callable
            Called once a second.

        Raises
        ------
        PgOutputError
            The schema history can't be written, or the directory can't be uploaded.
        """
        if self._history is not None:
            self._history.finish()
        uploader = self._uploader
        if uploader is not None:
            uploader.ask()
            self._wait_for(uploader, lambda: uploader.error, stop, tell)

    def close(self) -> None:
        """End all threads."""
        for worker in (self._watch, self._copier, self._merger, self._uploader):
            if worker is not None:
                worker.close()


class _MergeThread:
    """Merges small segments in a thread of its own.

    Attributes
    ----------
    lock : threading.Lock
        Held during a merge, as no segment may be deleted then.
    error : PgOutputError or None
        Why the thread ended.
    """

    def __init__(self, directory: Path, most: int, options: Any) -> None:
        self._directory = directory
        self._most = most
        self._options = options
        self.lock = threading.Lock()
        self.error: PgOutputError | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pgoutput_fast-merge", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._stop.wait(_MERGE_INTERVAL):
                steps = merges(self._directory, self._most, self._options)
                has_more = True
                while has_more and not self._stop.is_set():
                    with self.lock:
                        has_more = next(steps, None) is not None
        except Exception as error:  # noqa: BLE001 - raised in the capture's thread
            why = getattr(error, "strerror", None) or printable(str(error))
            code = "io_failed" if isinstance(error, OSError) else "internal"
            self.error = PgOutputError(
                f"can't merge segments of {self._directory}: {why}",
                code=getattr(error, "code", code),
                path=str(self._directory),
            )
