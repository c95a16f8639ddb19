"""Random interleavings of transactions, cut anywhere into reads, against a model of plain lists.

The steps write what a server sends with the builders of the test kit, frame by frame, and keep in
lists what must come of it. Then every transaction is compared whole: what is told of it, each of
its frames, so that Relations stand where they belong, its messages, and its rows with their LSNs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pgoutput_fast import testing
from pgoutput_fast.testing import Table, UserType
from pgoutput_fast.transactions import Assembler, Transaction

pa = pytest.importorskip("pyarrow", reason="the twin makes Arrow arrays with it")
from support.columns.columnar import IMPLEMENTATIONS, chosen  # noqa: E402 - it needs pyarrow

MOOD = UserType(16390, "mood")
TABLES = 4


@functools.cache
def table_of(number: int, version: int) -> Table:
    """A table after it was altered so many times; every other one has a type of a user."""
    columns = {"id": "int4", f"c{version}": MOOD if (number + version) % 2 else "text"}
    identity = "f" if number == 1 else "d"
    return Table(f"t{number}", columns, 16400 + number, replica_identity=identity)


SECOND = 1_000_000
EPOCH = 946_684_800 * SECOND
"""2000-01-01 in seconds and microseconds since 1970, from which Arrow counts."""


class Item(NamedTuple):
    """A change or a transactional message; `row` is its id, None if it has none."""

    frame: bytes
    lsn: int
    tables: tuple[Table, ...]
    subxid: int
    row: int | None = None


class Mark(NamedTuple):
    """A savepoint: where it began, and how the tables were then."""

    subxid: int
    at: int
    versions: list[int]


@dataclasses.dataclass
class Open:
    """A transaction, open or prepared, and what was made in it and not rolled back."""

    xid: int
    origin: str | None
    versions: list[int]
    items: list[Item] = dataclasses.field(default_factory=list)
    savepoints: list[Mark] = dataclasses.field(default_factory=list)
    sent: int = 0  # so many of the items were sent in chunks
    streamed: bool = False
    announced: dict[int, list[bytes]] = dataclasses.field(default_factory=dict)
    gid: str | None = None
    prepare: tuple[int, int, int] = (0, 0, 0)
    has_content: bool = True  # for a server that sends Prepare alone


class Expected(NamedTuple):
    """A transaction as it has to come."""

    told: tuple[Any, ...]
    frames: list[bytes]
    rows: list[tuple[Any, ...]]


class Interleaving:
    """A server with some transactions at a time, and what comes of its frames."""

    # --- what a server has

    def __init__(self, memory: int, at_prepare: bool, parallel: bool) -> None:
        self.memory, self.at_prepare, self.parallel = memory, at_prepare, parallel
        self.assemblers: dict[str, Assembler] = {}
        for name in IMPLEMENTATIONS:
            with chosen(name):
                self.assemblers[name] = Assembler(
                    memory, prepared="prepare" if at_prepare else "commit"
                )
        self.lsn, self.time, self.xid = 0x1000, SECOND, 100
        self.ids = self.forms = 0
        self.versions = [0] * TABLES
        self.users: list[set[int]] = [set() for _ in range(TABLES)]  # xids that have locks on it
        self.altering: list[int | None] = [None] * TABLES
        self.open: list[Open] = []
        self.prepared: list[Open] = []
        self.prepared_since = 0  # the first PREPARE since when there were always some
        self.announced: dict[int, list[bytes]] = {}  # by this connection
        self.known: dict[tuple[bytes, int], bytes] = {}  # Types and Relations that were delivered
        self.unread: list[tuple[int, bytes]] = []
        self.expected: list[Expected] = []
        self.again: list[Open] = []  # prepared after all that was delivered

    def record(self, size: int = 0x40) -> int:
        self.lsn += size
        return self.lsn

    def end_record(self) -> tuple[int, int, int]:
        """LSNs of the begin and of the end of the record that ends a transaction, and its time."""
        self.time += 1000
        return self.record(), self.record(0x30), self.time

    def new_xid(self) -> int:
        self.xid += 1
        return self.xid

    def send(self, frames: Iterable[tuple[int, bytes]]) -> None:
        self.unread += frames

    def one(self, which: int) -> Open:
        """One of the transactions that are open, a new one where there is none."""
        if not self.open:
            self.begin(which)
        return self.open[which % len(self.open)]

    # --- what is made

    def begin(self, which: int) -> None:
        if len(self.open) < 3:
            origin = (None, "far", None, "órigin")[which % 4]
            self.open.append(Open(self.new_xid(), origin, [*self.versions]))

    def usable(self, one: Open, number: int, alone: bool = False) -> bool:
        """Take a lock on a table, if no other transaction's is against it."""
        others = self.users[number] - {one.xid}
        if self.altering[number] not in (None, one.xid) or (alone and others):
            return False
        if self.altering[number] is None and not self.users[number]:
            one.versions[number] = self.versions[number]
        self.users[number].add(one.xid)
        return True

    def change(self, which: int) -> None:
        """Some changes of one transaction, of tables that it has used before or has not."""
        one = self.one(which)
        kinds = [(which >> shift) % 64 for shift in range(0, 6 * (1 + which % 4), 6)]
        subxid = one.savepoints[-1].subxid if one.savepoints else one.xid
        for drawn in kinds:
            self.ids += 1
            kind, number = "IIIUDTM"[drawn % 7], drawn % TABLES
            lsn = self.record()
            if kind == "M":
                frame = testing.message("in", b"%d" % self.ids, lsn, flags=1)
                one.items.append(Item(frame, lsn, (), subxid))
                continue
            if not self.usable(one, number):
                continue
            one.versions[number] = self.version(one, number)
            table = table_of(number, one.versions[number])
            values = [self.ids, "x" * (which % 40)]
            tables = (table,)
            if kind == "I":
                frame = testing.insert(table, values)
            elif kind == "U":
                frame = testing.update(table, values, values if which % 2 else None)
            elif kind == "D":
                frame = testing.delete(table, values)
            else:
                other = (number + 1) % TABLES
                if which % 2 and self.usable(one, other):
                    one.versions[other] = self.version(one, other)
                    tables = (table, table_of(other, one.versions[other]))
                frame = testing.truncate(tables)
            row = None if kind == "T" else self.ids
            one.items.append(Item(frame, lsn, tables, subxid, row))

    def version(self, one: Open, number: int) -> int:
        """Which version of a table a transaction sees that has a lock on it."""
        altered = self.altering[number] == one.xid
        return one.versions[number] if altered else self.versions[number]

    def alter(self, which: int) -> None:
        one, number = self.one(which), which % TABLES
        if self.usable(one, number, alone=True):
            self.altering[number] = one.xid
            self.forms += 1
            one.versions[number] = self.forms

    def savepoint(self, which: int) -> None:
        """Begin one; mostly something happens in it at once, and is streamed."""
        one = self.one(which)
        if len(one.savepoints) < 4:
            one.savepoints.append(Mark(self.new_xid(), len(one.items), [*one.versions]))
        if which >> 3 & 1:
            self.change(which)
        if which >> 4 & 1:
            self.stream(which)

    def release(self, which: int) -> None:
        if nested := [one for one in self.open if one.savepoints]:
            one = nested[which % len(nested)]
            del one.savepoints[which % len(one.savepoints) :]

    def roll_back(self, which: int) -> None:
        """Roll back to a savepoint, and what was begun inside of it."""
        nested = [one for one in self.open if one.savepoints]
        if not nested:
            return
        one = nested[which % len(nested)]
        level = which % len(one.savepoints)
        mark = one.savepoints[level]
        del one.savepoints[level:]
        self.record()
        rows = [i for i in range(mark.at, one.sent) if one.items[i].tables]
        # A message has the top-level xid: before the first row nothing tells that it is taken back.
        gone = list(dict.fromkeys(one.items[i].subxid for i in rows))
        if rows:
            # Servers announce everything again after an abort of a streamed subtransaction.
            one.announced.clear()
            if which % 2:
                gone.reverse()
            self.send((self.lsn, self.abort_of(one.xid, subxid)) for subxid in gone)
        del one.items[rows[0] if rows else max(mark.at, one.sent) :]
        one.sent = min(one.sent, len(one.items))
        for number, version in enumerate(mark.versions):
            if self.altering[number] == one.xid:
                one.versions[number] = version

    def abort_of(self, xid: int, subxid: int) -> bytes:
        told = (self.lsn, self.time) if self.parallel else (None, None)
        return testing.stream_abort(xid, subxid, *told)

    # --- what is sent

    def announcements(
        self, item: Item, announced: dict[int, list[bytes]], xid: int | None
    ) -> Iterable[tuple[int, bytes]]:
        for table in item.tables:
            if announced.get(table.relation_id) != table.announcement():
                announced[table.relation_id] = table.announcement()
                yield from ((0, frame) for frame in table.announcement(xid))

    def chunk(self, one: Open) -> list[tuple[int, bytes]]:
        """What was not sent of a transaction, as a stream chunk."""
        frames = [(0, testing.stream_start(one.xid, not one.streamed))]
        if one.origin is not None and not one.streamed:
            frames.append((0, testing.origin(one.origin)))
        for item in one.items[one.sent :]:
            xid = item.subxid if item.tables else one.xid
            frames += self.announcements(item, one.announced, xid)
            frames.append((item.lsn, testing.in_stream(item.frame, xid)))
        # Whoever alters a table, servers announce it again to the transactions that follow.
        for relation_id, announced in one.announced.items():
            if self.announced.get(relation_id) != announced:
                self.announced.pop(relation_id, None)
        frames.append((self.lsn, testing.stream_stop()))
        return frames

    def whole(self, one: Open, begin: bytes) -> list[tuple[int, bytes]]:
        """All of a transaction but its end."""
        frames = [(one.items[0].lsn if one.items else self.lsn, begin)]
        if one.origin is not None:
            frames.append((0, testing.origin(one.origin)))
        for item in one.items:
            frames += self.announcements(item, self.announced, None)
            frames.append((item.lsn, item.frame))
        return frames

    def stream(self, which: int) -> None:
        self.send_chunk(self.one(which), repeats=which % 3 == 0)

    def send_chunk(self, one: Open, repeats: bool) -> None:
        if repeats:
            one.announced.clear()
        self.send(self.chunk(one))
        one.sent, one.streamed = len(one.items), True

    def deliver(
        self, kind: str, xid: int | None, ends: tuple[int, int, int | None], one: Open | None,
        gid: str | None = None,
    ) -> None:  # fmt: skip
        """A transaction has to come; of some only their end is told."""
        lsn, end, time = ends
        origin = None if one is None else one.origin
        frames, rows = [], []
        if kind in ("commit", "prepare"):
            assert xid is not None
            assert time is not None
            frames.append(testing.begin(xid, lsn, time))
            if origin is not None:
                frames.append(testing.origin(origin))
            for item in [] if one is None else one.items:
                for table in item.tables:
                    for frame in table.announcement():
                        key = (frame[:1], int.from_bytes(frame[1:5], "big"))
                        if self.known.get(key) != frame:
                            self.known[key] = frame
                            frames.append(frame)
                for table in item.tables:
                    rows.append((len(rows), item.lsn, xid, lsn, time + EPOCH, table.name, item.row))
                frames.append(item.frame)
            frames.append(testing.commit(lsn, end, time))
        self.expected.append(Expected((kind, xid, lsn, end, time, origin, gid), frames, rows))
        if kind != "prepare":
            self.again.clear()

    def ended(self, one: Open, commits: bool) -> None:
        for number in range(TABLES):
            self.users[number].discard(one.xid)
            if self.altering[number] == one.xid:
                self.altering[number] = None
                if commits:
                    self.versions[number] = one.versions[number]

    def commit(self, which: int) -> None:
        one, repeats = self.one(which), which % 3 == 0
        self.open.remove(one)
        ends = self.end_record()
        if one.streamed:
            if one.sent < len(one.items):
                self.send_chunk(one, repeats)
            self.send([(ends[1], testing.stream_commit(one.xid, *ends))])
            self.announced |= one.announced
        else:
            if repeats:
                self.announced.clear()
            self.send(self.whole(one, testing.begin(one.xid, ends[0], ends[2])))
            self.send([(ends[1], testing.commit(*ends))])
        self.ended(one, commits=True)
        self.deliver("commit", one.xid, ends, one)

    def abort(self, which: int) -> None:
        one = self.one(which)
        self.open.remove(one)
        self.record()
        if one.streamed:
            subxids = dict.fromkeys(item.subxid for item in one.items[: one.sent])
            inner = [] if which % 2 else [xid for xid in subxids if xid != one.xid]
            self.send((self.lsn, self.abort_of(one.xid, xid)) for xid in [*inner, one.xid])
        elif which % 2:
            self.send([(self.lsn, self.abort_of(one.xid, one.xid))])  # it means nothing
        self.ended(one, commits=False)

    def stray_abort(self, which: int) -> None:
        """Of a subtransaction that never had a change, and of a transaction that nobody knows."""
        if streamed := [one for one in self.open if one.streamed]:
            one = streamed[which % len(streamed)]
            self.send([(self.lsn, self.abort_of(one.xid, self.new_xid()))])
        self.send([(self.lsn, self.abort_of(self.new_xid(), self.xid))])
        self.send([(self.lsn, self.abort_of(self.new_xid(), self.new_xid()))])

    def message(self, which: int) -> None:
        lsn = self.record()
        frame = testing.message("outside", b"%d" % which, lsn)
        self.send([(lsn, frame)])
        told = ("message", None, lsn, lsn, None, None, None)
        self.expected.append(Expected(told, [frame], []))
        self.again.clear()

    # --- prepared transactions

    def prepare(self, which: int) -> None:
        one, gid, repeats = self.one(which), ("", "same", "other")[which % 3], which % 2 == 0
        self.open.remove(one)
        one.gid, one.prepare = gid, self.end_record()
        if not self.prepared:
            self.prepared_since = one.prepare[0]
        self.prepared.append(one)
        self.again.append(one)
        one.has_content = bool(one.items) or one.streamed or bool(which % 2)
        self.send_prepared(one, repeats)
        if self.at_prepare:
            self.deliver("prepare", one.xid, one.prepare, one if one.has_content else None, gid)

    def send_prepared(self, one: Open, repeats: bool) -> None:
        assert one.gid is not None
        lsn, end, time = one.prepare
        told = (one.xid, one.gid, lsn, end, time)
        if one.streamed:
            if one.sent < len(one.items):
                self.send_chunk(one, repeats)
            self.send([(end, testing.stream_prepare(*told))])
            return
        if one.has_content:
            if repeats:
                self.announced.clear()
            self.send(self.whole(one, testing.begin_prepare(*told)))
        self.send([(end, testing.prepare(*told))])

    def commit_prepared(self, which: int) -> None:
        self.end_prepared(which, commits=True)

    def abort_prepared(self, which: int) -> None:
        self.end_prepared(which, commits=False)

    def end_prepared(self, which: int, *, commits: bool) -> None:
        if not self.prepared:
            return
        one = self.prepared.pop(which % len(self.prepared))
        if one in self.again:
            self.again.remove(one)
        assert one.gid is not None
        ends = self.end_record()
        if commits:
            self.send([(ends[1], testing.commit_prepared(one.xid, one.gid, *ends))])
        else:
            told = (one.prepare[1], ends[1], one.prepare[2], ends[2])
            self.send([(ends[1], testing.rollback_prepared(one.xid, one.gid, *told))])
        self.ended(one, commits)
        if self.at_prepare and commits:
            self.deliver("commit prepared", one.xid, ends, None, one.gid)
        elif self.at_prepare:
            self.deliver("rollback prepared", one.xid, (ends[1], ends[1], None), None, one.gid)
        elif commits:
            self.deliver("commit", one.xid, ends, one if one.has_content else None, one.gid)

    def end_unknown(self, which: int) -> None:
        """The end of a prepared transaction that never came."""
        self.prepared.append(Open(self.new_xid(), None, [], gid="same", has_content=False))
        self.end_prepared(len(self.prepared) - 1, commits=which % 2 == 0)

    # --- what is read

    def read(self, which: int) -> None:
        count = (1, 2, 3, 5, 8, 1000)[which % 6]
        part, self.unread = self.unread[:count], self.unread[count:]
        self.feed(part)

    def feed(self, part: list[tuple[int, bytes]]) -> None:
        frames, lsns = [frame for _, frame in part], [lsn for lsn, _ in part]
        count = 0
        for name, assembler in self.assemblers.items():
            with chosen(name):
                found = list(assembler.feed(frames, lsns))
                # What is not of frames stays in memory.
                movable = sum(stage.movable for stage in assembler._stages())
                assert assembler.memory <= self.memory or not movable
                assert len(found) <= len(self.expected)
                for one, wanted in zip(found, self.expected, strict=False):
                    compare(one, wanted)
            count = len(found)
        del self.expected[:count]

    def drain(self) -> None:
        """Everything is read; then nothing is left over but what has not ended."""
        self.feed(self.unread)
        self.unread = []
        assert not self.expected
        staged = not self.at_prepare and bool(self.prepared)
        streamed = any(one.streamed for one in self.open)
        for assembler in self.assemblers.values():
            assert assembler.safe_lsn(self.lsn) == (self.prepared_since if staged else self.lsn)
            assert assembler.in_flight is (streamed or staged)
            if not assembler.in_flight:
                assert assembler.memory == 0

    def reconnect(self, which: int) -> None:
        """A connection ends, maybe within what it sends of a transaction that it sends again."""
        self.drain()
        if self.open:
            one, count = self.one(which), which % 13
            frames = self.chunk(one)
            if not one.streamed and which % 2:
                frames = self.whole(one, testing.begin(one.xid, self.lsn, self.time))
            self.feed(frames[:count])
        for assembler in self.assemblers.values():
            assembler.reset()
        self.announced.clear()
        for one in [*self.open, *self.again]:
            one.announced.clear()
            one.sent, one.streamed = 0, False
        if not self.at_prepare:
            # Nothing was acknowledged beyond a PREPARE that was not delivered: it comes again.
            for one in self.again:
                self.send_prepared(one, repeats=False)


def compare(found: Transaction, wanted: Expected) -> None:
    """A transaction is the expected one: its attributes, and its content in all three ways."""
    told = (
        found.kind, found.xid, found.commit_lsn, found.end_lsn, found.commit_time, found.origin,
        found.gid,
    )  # fmt: skip
    assert told == wanted.told
    frames = list(found.frames())
    assert in_order(frames) == in_order(wanted.frames)
    inner = [frame for frame in frames if frame[:1] not in (b"B", b"C")]
    assert [message.frame for message in found] == inner
    rows: list[tuple[Any, ...]] = []
    for batch in found.batches():
        columns = pa.record_batch(batch)
        parts = [columns[name] for name in ("seq", "lsn", "xid", "commit_lsn", "commit_time")]
        parts[4] = parts[4].cast(pa.int64())
        for number, row in enumerate(zip(*(part.to_pylist() for part in parts), strict=True)):
            rows.append((*row, batch.relation.name, row_id(columns, number)))
    assert sorted(rows) == wanted.rows


def in_order(frames: list[bytes]) -> list[bytes]:
    """Announcements before a Truncate sorted: of several tables none has to be the first."""
    found: list[bytes] = []
    for frame in frames:
        if frame[:1] == b"T":
            start = len(found)
            while found[start - 1][:1] in (b"R", b"Y"):
                start -= 1
            found[start:] = sorted(found[start:])
        found.append(frame)
    return found


def row_id(columns: Any, number: int) -> int | None:
    """The id in the new row, else in the old one."""
    row = columns["after"][number].as_py() or columns["before"][number].as_py()
    return None if row is None else int(row["id"])


STEPS = (
    *[Interleaving.change] * 6, *[Interleaving.savepoint] * 3, *[Interleaving.roll_back] * 3,
    *[Interleaving.stream] * 4, *[Interleaving.commit] * 2, *[Interleaving.read] * 3,
    *[Interleaving.alter] * 2, *[Interleaving.prepare] * 3,
    Interleaving.begin, Interleaving.release, Interleaving.abort,
    Interleaving.stray_abort, Interleaving.message,
    Interleaving.commit_prepared, Interleaving.abort_prepared, Interleaving.end_unknown,
    Interleaving.reconnect,
)  # fmt: skip
"""What may happen, some of it more often. One that is not possible then does nothing."""


@pytest.mark.parametrize("examples", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_any_stream_cut_anywhere(examples: int) -> None:
    @settings(
        max_examples=examples,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(
        # By itself Hypothesis makes lists of some five elements, in which nothing comes together.
        st.lists(
            st.tuples(st.sampled_from(STEPS), st.integers(0, 2**24)), min_size=40, max_size=120
        ),
        st.sampled_from([0, 150, 300, 1000, 64 << 20]),
        st.booleans(),
        st.booleans(),
    )
    def run(
        steps: list[tuple[Callable[[Interleaving, int], None], int]],
        memory: int,
        at_prepare: bool,
        parallel: bool,
    ) -> None:
        interleaving = Interleaving(memory, at_prepare, parallel)
        for step, which in steps:
            step(interleaving, which)
        interleaving.drain()

    run()
