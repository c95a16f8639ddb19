"""A simulated server, and a capture of what its slot sends into a directory, step by step."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from support.changelogs.written_segments import METADATA, writer

from pgoutput_fast import TypeRegistry, testing
from pgoutput_fast.catalog import Catalog, CatalogColumn, CatalogTable
from pgoutput_fast.changelog.schema_history import CatalogRead
from pgoutput_fast.changelog.snapshot_states import SnapshotStates
from pgoutput_fast.changelog.snapshots import SnapshotFiles, delete_unfinished
from pgoutput_fast.segments import SegmentWriter
from pgoutput_fast.segments.prepared import PreparedTransactions
from pgoutput_fast.transactions import Assembler

OIDS = [16384, 16385, 16386]
Rows = dict[int, str]


class KilledError(BaseException):
    """The process was killed."""


class Change(NamedTuple):
    oid: int
    op: str
    key: int
    value: str


class Event(NamedTuple):
    """What the slot sends at an LSN."""

    lsn: int
    frames: list[bytes]


def table(oid: int) -> testing.Table:
    return testing.Table(f"t{oid}", {"id": "int4", "v": "text"}, oid)


class World:
    """The server."""

    def __init__(self) -> None:
        self.lsn = 1000
        self.xid = 700
        self.log: list[tuple[int, list[Change]]] = []  # by commit LSN
        self.events: list[Event] = []
        self.published: set[int] = set()
        self.gaps: dict[int, list[int]] = {}  # LSNs from which on a table was not published
        self.joined: dict[int, int] = dict.fromkeys(OIDS, 0)  # how often a table was published
        self.prepared: list[tuple[int, str, list[Change]]] = []

    def advance(self) -> int:
        self.lsn += 8
        return self.lsn

    def take_xid(self) -> int:
        self.xid += 1
        return self.xid

    def frames(self, changes: list[Change]) -> list[bytes]:
        found = []
        for oid, op, key, value in changes:
            if oid not in self.published:
                continue
            found.append(table(oid).relation())
            if op == "insert":
                found.append(testing.insert(table(oid), [key, value]))
            elif op == "update":
                found.append(testing.update(table(oid), [key, value]))
            elif op == "delete":
                found.append(testing.delete(table(oid), [key, None], "K"))
            else:
                found.append(testing.truncate([oid]))
        return found

    def commit(self, changes: list[Change]) -> None:
        xid, commit_lsn = self.take_xid(), self.advance()
        end = self.advance()
        self.log.append((commit_lsn, changes))
        body = self.frames(changes)
        if body:
            frames = [testing.begin(xid, commit_lsn, 5), *body, testing.commit(commit_lsn, end, 5)]
            self.events.append(Event(commit_lsn, frames))

    def prepare(self, changes: list[Change]) -> None:
        xid, lsn = self.take_xid(), self.advance()
        end, gid = self.advance(), f"g{xid}"
        body = self.frames(changes)
        if not body:
            return
        begun = testing.begin_prepare(xid, gid, lsn, end, 5)
        self.events.append(Event(lsn, [begun, *body, testing.prepare(xid, gid, lsn, end, 5)]))
        self.prepared.append((xid, gid, changes))

    def end_prepared(self, index: int, *, committed: bool) -> None:
        xid, gid, changes = self.prepared.pop(index)
        lsn = self.advance()
        end = self.advance()
        if committed:
            self.log.append((lsn, changes))
            frame = testing.commit_prepared(xid, gid, lsn, end, 5)
        else:
            frame = testing.rollback_prepared(xid, gid, lsn - 8, end, 5, 5)
        self.events.append(Event(lsn, [frame]))

    def rows(self, oid: int, before: int) -> Rows:
        """A table's rows after all transactions that were committed before an LSN."""
        found: Rows = {}
        for commit_lsn, changes in self.log:
            if commit_lsn < before:
                for change in changes:
                    if change.oid == oid:
                        apply(found, change.op, change.key, change.value)
        return found


def apply(rows: Rows, op: str, key: int, value: str) -> None:
    if op == "truncate":
        rows.clear()
    elif op == "delete":
        rows.pop(key, None)
    else:
        rows[key] = value


class Capture:
    """What a capture does with a directory, step by step."""

    def __init__(self, directory: Path, world: World, confirmed: int) -> None:
        self.directory = directory
        self.world = world
        self.writer = SegmentWriter(
            directory, METADATA, confirmed_flush_lsn=confirmed, segment_bytes=1 << 20
        )
        try:
            self.begin(confirmed)
        except BaseException:
            self.close()
            raise

    def begin(self, confirmed: int) -> None:
        directory, world = self.directory, self.world
        self.tables = SnapshotStates(directory)
        states = self.tables.read()
        self.known = {
            oid for oid, state in states.items() if state.all_snapshots[-1].state != "gone"
        }
        delete_unfinished(directory, self.tables.read())
        self.keeper = PreparedTransactions(directory, self.writer.position)
        self.assembler = Assembler(keeper=self.keeper, unknown_prepared="error")
        for kept in self.keeper.load(None):
            self.assembler.restore(kept)
        self.assembler.known_lsn = self.writer.position
        self.next = next(
            (i for i, event in enumerate(world.events) if event.lsn >= confirmed),
            len(world.events),
        )
        self.copying: dict[int, Iterator[None]] = {}
        self.files: dict[int, SnapshotFiles] = {}
        # The point of the snapshot that was exported when the slot was made, until it is lost, and
        # the tables that are copied as of it.
        self.exported = 0
        self.initial: set[int] = set()

    def begin_with_snapshot(self, oids: set[int]) -> None:
        """Have tables copied that were published when the slot was made."""
        self.exported = self.writer.position
        self.initial = set(oids)
        for oid in sorted(oids):
            self.tables.wait(oid, self.exported - 1, {}, first=True)
            self.known.add(oid)

    def receive(self) -> None:
        if self.next == len(self.world.events):
            return
        event = self.world.events[self.next]
        self.next += 1
        lsns = [0 if frame[:1] == b"R" else event.lsn for frame in event.frames]
        for found in self.assembler.feed(event.frames, lsns):
            for run in found.runs():
                for frame in run.frames():
                    if frame[:1] == b"R":
                        self.join(int.from_bytes(frame[1:5], "big"))
                self.acknowledge(self.writer.write_run(run))

    def join(self, oid: int) -> None:
        """Have a table wait that is not known, or that has left and returned."""
        if oid not in self.known:
            self.tables.wait(oid, self.writer.position, {}, first=True)
            self.known.add(oid)
            return
        last = self.tables.read()[oid].all_snapshots[-1]
        if last.state == "snapshot":
            joined = self.tables.fields(last)["joined"]
            if joined != self.world.joined[oid]:
                self.again(oid)

    def again(self, oid: int) -> None:
        """Have a table copied again; a copy that is being made is given up, as it is too old."""
        state = self.tables.read().get(oid)
        if state is None:
            return
        self.initial.discard(oid)
        self.copying.pop(oid, None)
        if oid in self.files:
            self.files.pop(oid).discard()
        if state.waits_from is None:
            self.tables.wait(oid, self.writer.position, {}, first=False)

    def flush(self) -> None:
        self.acknowledge(self.writer.flush())

    def idle(self) -> None:
        """A keepalive when everything was sent; the server's log has gone on without changes."""
        if self.next == len(self.world.events):
            self.acknowledge(self.writer.advance(self.world.advance()))

    def acknowledge(self, position: int | None) -> None:
        if position is not None:
            self.keeper.forget(position)

    def copy(self, oid: int) -> Iterator[None]:
        """Copy a table that waits."""
        order = self.tables.read()[oid].all_snapshots[-1]
        is_initial = oid in self.initial
        self.initial.discard(oid)
        if oid not in self.world.published and not is_initial:
            self.tables.leave(oid, self.world.lsn, {})
            self.known.discard(oid)
            return
        joined = self.world.joined[oid] if not is_initial else 0  # read before the snapshot
        point = self.exported if is_initial else self.world.advance()
        rows = sorted(self.world.rows(oid, point).items())
        yield
        half = len(rows) // 2
        announced = [table(oid).relation()]
        files = SnapshotFiles(self.directory, order, METADATA, point, 5, announced)
        self.files[oid] = files
        files.begin()
        for number, part in enumerate([rows[:half], rows[half:]], 1):
            yield
            frames = [testing.insert(table(oid), [key, value]) for key, value in part]
            ends = [0, *itertools.accumulate(map(len, frames))]
            files.write(number, [(b"".join(frames), ends)])
        yield
        if oid not in self.world.published or joined != self.world.joined[oid]:
            # What changed while it was not published is neither in the copy nor in the stream.
            files.discard()
        else:
            self.tables.finish(order, point, {"joined": joined, "files": files.finish()})
        del self.files[oid]

    def close(self) -> None:
        with contextlib.suppress(KilledError):
            self.writer.close()


# --- known values --------------------------------------------------------------------------------

TIME = 5_000_000  # microseconds since 2000


class MadeDirectory:
    """A directory, written as a capture does it."""

    def __init__(self, directory: Path, begin: int = 1000) -> None:
        self.directory = directory
        self.metadata = METADATA
        self.writer = writer(directory, confirmed=begin)
        self.tables = SnapshotStates(self.directory)

    def go_on(self, *, binary: bool) -> None:
        """Have the capture go on in a session of this form."""
        position = self.writer.position
        self.writer.close()
        options = {**METADATA.options, **({"binary": "true"} if binary else {})}
        self.metadata = dataclasses.replace(METADATA, options=options)
        self.writer = SegmentWriter(self.directory, self.metadata, confirmed_flush_lsn=position)

    def close(self) -> None:
        self.writer.close()

    def commit(self, lsn: int, *frames: bytes) -> None:
        """A segment of one transaction, which ends at `lsn + 10`."""
        self.write((lsn, testing.begin(7, lsn, TIME)))
        self.write(*((0 if frame[:1] == b"R" else lsn - 5, frame) for frame in frames))
        self.write((lsn + 10, testing.commit(lsn, lsn + 10, TIME)))
        self.writer.flush()

    def write(self, *frames: tuple[int, bytes]) -> None:
        for lsn, frame in frames:
            self.writer.write(lsn, frame)

    def wait(self, table: testing.Table, lsn: int, *, first: bool = True) -> None:
        fields: dict[str, object] = {"table": [table.namespace, table.name]}
        self.tables.wait(table.relation_id, lsn, fields, first=first)

    def copy(self, table: testing.Table, lsn: int, *ranges: list[list[Any]]) -> None:
        """The rows of a table that waits, as of `lsn`; a file for each range."""
        frames = [[testing.insert(table, row) for row in rows] for rows in ranges]
        self.copy_frames(table, lsn, *frames)

    def copy_frames(self, table: testing.Table, lsn: int, *ranges: list[bytes]) -> None:
        """The same with the frames of the rows."""
        order = self.tables.read()[table.relation_id].all_snapshots[-1]
        made = SnapshotFiles(self.directory, order, self.metadata, lsn, TIME, [table.relation()])
        made.begin()
        for number, frames in enumerate(ranges, 1):
            ends = [0, *itertools.accumulate(map(len, frames))]
            made.write(number, [(b"".join(frames), ends)])
        counts = made.finish()
        assert counts == [*map(len, ranges)]
        fields: dict[str, object] = {
            "table": [table.namespace, table.name], "rows": sum(counts), "files": counts
        }  # fmt: skip
        self.tables.finish(order, lsn, fields)


def catalog_read(lsn: int, *tables: testing.Table, **missing: str) -> CatalogRead:
    """The catalogue with tables, and what columns hold in rows that are older than they."""
    found = []
    for table in tables:
        columns = tuple(
            CatalogColumn(
                name, type_id, "", -1, False, False, "", name in missing, missing.get(name), number
            )
            for number, (_, name, type_id, _) in enumerate(table.columns, 1)
        )
        found.append(CatalogTable(
            table.relation_id, table.namespace, table.name, "r", "d", None, (), ("id",), (),
            columns,
        ))  # fmt: skip
    tables_json = Catalog("1", "d", ("p",), tuple(found)).to_json()
    return CatalogRead(lsn, lsn, frozenset(), frozenset(), False, TypeRegistry(), tables_json)
