"""The rules of a capture's directory, by random steps against a dict: no server takes part.

A simulated server has tables, transactions and a slot. A capture writes what the slot sends to a
directory, copies tables that join, merges and deletes files. Consumers read the directory into
tables of their own. Each of them is killed at any operation of the disk. Whatever happens, the
tables of a consumer are those of the server at the LSN up to which it has read them.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.changelogs.made_directory import OIDS, Capture, Change, KilledError, Rows, World, apply
from support.changelogs.merged import merge

import pgoutput_fast as pf
from pgoutput_fast.changelog import merging
from pgoutput_fast.changelog.consumers import Consumer, consumers, remove_consumer
from pgoutput_fast.changelog.merging import delete_covered
from pgoutput_fast.changelog.read_plan import ReadPlan
from pgoutput_fast.changelog.retention import Keep, retain
from pgoutput_fast.errors import PgOutputError
from pgoutput_fast.segments import SegmentReader, listing

KEYS = st.integers(0, 3)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["receive", "receive", "flush", "idle", "copy", "copy", "again", "merge", "retain",
             "delete_covered"]
        ),
        st.sampled_from(OIDS),
    ),
    min_size=1,
    max_size=8,
)  # fmt: skip


class Disk:
    """Operations of the disk, of which one may be the last of its process."""

    def __init__(self) -> None:
        self.left: int | None = None  # operations up to the kill
        self.before = False  # whether the last one does not take place
        self.dead = False
        self._patches = pytest.MonkeyPatch()
        for name in ("rename", "unlink", "fsync", "mkdir"):
            self._patches.setattr(os, name, self._counted(getattr(os, name)))

    def _counted(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **keywords: Any) -> Any:
            if self.dead:
                raise KilledError
            if self.left is None:
                return operation(*args, **keywords)
            self.left -= 1
            self.dead = self.left < 0
            if not (self.dead and self.before):
                operation(*args, **keywords)
            if self.dead:
                raise KilledError
            return None

        return counted

    @contextlib.contextmanager
    def killing(self, after: int | None, *, before: bool) -> Iterator[None]:
        """Kill whatever runs in this block after some operations; None: not at all."""
        self.left, self.before, self.dead = after, before, False
        try:
            yield
        finally:
            self.left = None

    def restart(self) -> None:
        self.dead = False

    def close(self) -> None:
        self._patches.undo()


def changes_in(path: Path) -> Iterator[tuple[int, int, int, str, int, str]]:
    """commit_lsn, seq, oid, op, key and value of each change of a file."""
    decoder = pf.Decoder()
    with SegmentReader(path) as reader:
        for batch in reader:
            for row in batch.to_pylist():
                message = decoder.decode(row["data"])
                where = row["commit_lsn"], row["seq"]
                if isinstance(message, pf.Truncate):
                    for offset, oid in enumerate(message.relation_ids):
                        yield where[0], where[1] + offset, oid, "truncate", 0, ""
                elif isinstance(message, pf.Delete):
                    values = message.old.values()
                    yield *where, message.relation.relation_id, "delete", values[0], ""
                elif isinstance(message, (pf.Insert, pf.Update)):
                    values = message.new.values()
                    op = type(message).__name__.lower()
                    yield *where, message.relation.relation_id, op, values[0], values[1]


class Target:
    """A consumer's copy of one table, whose position moves with its rows."""

    def __init__(self) -> None:
        self.rows: Rows = {}
        self.position = 0
        self.snapshot = 0
        self.begun = False
        self.changes: set[tuple[int, int]] = set()


class Reader:
    """A consumer, with tables of its own."""

    def __init__(self, directory: Path, name: str) -> None:
        self.directory = directory
        self.name = name
        self.targets: dict[int, Target] = {}

    def consume(
        self, stop_after: int | None, during: Callable[[int], None] = lambda _: None
    ) -> None:
        """Take what is there.

        Parameters
        ----------
        stop_after : int or None
            How many tables are taken before it is killed; None: all.
        during : callable
            What others do between two of its looks at the directory.
        """
        consumer = Consumer(self.directory, self.name)
        with pytest.MonkeyPatch.context() as patch:
            present = listing.present

            def meanwhile(directory: Path) -> Any:
                patch.undo()
                during(0)
                found = present(directory)
                during(1)
                return found

            patch.setattr(listing, "present", meanwhile)
            plan = consumer.plan()
        during(2)
        if plan is None:
            return
        found: dict[int, list[tuple[int, int, str, int, str]]] = {}
        for read in plan.reads:
            for path in read.files:
                for commit_lsn, seq, oid, *change in changes_in(path):
                    start, end = read.range_of(oid)
                    if read.snapshot is not None or start <= commit_lsn < end:
                        found.setdefault(oid, []).append((commit_lsn, seq, *change))
        for number, oid in enumerate(OIDS):
            if number == stop_after:
                return
            assert found.get(oid, []) == sorted(found.get(oid, []))
            self.take(oid, plan, found.get(oid, []))
        consumer.advance(plan.after)

    def take(self, oid: int, plan: ReadPlan, changes: list[tuple[int, int, str, int, str]]) -> None:
        target = self.targets.setdefault(oid, Target())
        snapshots = (read.snapshot for read in plan.reads)
        points = {copy.lsn for copy in snapshots if copy is not None and copy.relation_id == oid}
        for commit_lsn, seq, op, key, value in changes:
            if commit_lsn + 1 in points:
                if commit_lsn + 1 <= target.snapshot:
                    continue
            elif commit_lsn < max(points, default=0):
                continue  # a Truncate comes behind it
            elif commit_lsn < target.position:
                continue
            else:
                assert target.begun  # what comes before the first snapshot is in it
            assert (commit_lsn, seq) not in target.changes
            target.changes.add((commit_lsn, seq))
            if op == "update" and target.begun:
                assert key in target.rows
            apply(target.rows, op, key, value)
            target.begun = target.begun or commit_lsn + 1 in points
        target.snapshot = max([target.snapshot, *points])
        target.position = max(target.position, plan.after.of(oid))


class DirectoryMachine(RuleBasedStateMachine):
    """The steps."""

    def __init__(self) -> None:
        super().__init__()
        self.holder = tempfile.TemporaryDirectory()
        self.directory = Path(self.holder.name) / "d"
        self.disk = Disk()
        self.patches = pytest.MonkeyPatch()
        self.patches.setattr(merging, "FAN", 2)
        self.patches.setattr(merging, "_SMALLEST", 1 << 30)
        self.world = World()
        self.capture: Capture | None = None
        self.confirmed = self.world.lsn
        self.readers: dict[str, Reader] = {}
        self.grace = 0.0  # seconds that covered files are kept

    def teardown(self) -> None:
        try:
            self.settle()
        finally:
            if self.capture is not None:
                self.capture.close()
            self.disk.close()
            self.patches.undo()
            self.holder.cleanup()

    @initialize(
        oids=st.sets(st.sampled_from(OIDS), min_size=1), initial=st.booleans(), filled=st.booleans()
    )
    def begin(self, oids: set[int], initial: bool, filled: bool) -> None:
        self.world.published = oids
        if filled:
            self.world.commit([Change(oid, "insert", 0, "before") for oid in OIDS])
            self.confirmed = self.world.advance()
        capture = self.start()
        if initial:
            capture.begin_with_snapshot(oids)
        else:
            for oid in sorted(oids):
                capture.join(oid)

    def start(self) -> Capture:
        if self.capture is None:
            self.capture = Capture(self.directory, self.world, self.confirmed)
        return self.capture

    # --- the server

    @rule(
        changes=st.lists(
            st.tuples(
                st.sampled_from(OIDS), st.sampled_from(["put", "put", "delete", "truncate"]), KEYS
            ),
            min_size=1,
            max_size=4,
        ),
        how=st.sampled_from(["commit", "commit", "prepare"]),
    )
    def transaction(self, changes: list[tuple[int, str, int]], how: str) -> None:
        # A prepared transaction locks what it has written: no other writes there.
        taken = {(one.oid, one.key) for _, _, done in self.world.prepared for one in done}
        locked = {one.oid for _, _, done in self.world.prepared for one in done}
        made = []
        now = {oid: self.world.rows(oid, self.world.lsn + 1) for oid in OIDS}
        for oid, op, key in changes:
            if (oid, key) in taken or (op == "truncate" and (oid in locked or how == "prepare")):
                continue
            if op == "put":
                op = "update" if key in now[oid] else "insert"
            elif op == "delete" and key not in now[oid]:
                continue
            value = f"v{self.world.xid}"
            apply(now[oid], op, key, value)
            made.append(Change(oid, op, key, value))
        if how == "commit":
            self.world.commit(made)
        else:
            self.world.prepare(made)

    @precondition(lambda self: self.world.prepared)
    @rule(index=st.integers(0, 5), committed=st.booleans())
    def end_prepared(self, index: int, committed: bool) -> None:
        self.world.end_prepared(index % len(self.world.prepared), committed=committed)

    @rule(oid=st.sampled_from(OIDS))
    def publication(self, oid: int) -> None:
        """A table joins or leaves; the capture hears of it when it sends something again."""
        if any(one.oid == oid for _, _, done in self.world.prepared for one in done):
            return
        if oid in self.world.published:
            self.world.published.remove(oid)
            self.world.gaps.setdefault(oid, []).append(self.world.lsn)
            return
        self.world.joined[oid] += oid in self.world.gaps
        self.world.published.add(oid)

    # --- the capture

    @rule(
        steps=STEPS,
        kill=st.none() | st.integers(0, 25),
        before=st.booleans(),
        confirms=st.booleans(),
    )
    def work(
        self, steps: list[tuple[str, int]], kill: int | None, before: bool, confirms: bool
    ) -> None:
        with self.disk.killing(kill, before=before):
            try:
                capture = self.start()
                for step, oid in steps:
                    self.step(capture, step, oid)
            except KilledError:
                pass
        if confirms and self.capture is not None and not self.disk.dead:
            self.confirmed = max(self.confirmed, self.capture.writer.position)
        if self.disk.dead:
            if self.capture is not None:
                self.capture.close()
            self.capture = None
            self.disk.restart()

    def step(self, capture: Capture, step: str, oid: int) -> None:
        if step == "copy":
            running = capture.copying.get(oid)
            if running is None:
                state = capture.tables.read().get(oid)
                if state is None or state.waits_from is None:
                    return
                running = capture.copying[oid] = capture.copy(oid)
            if next(running, "ended") == "ended":
                del capture.copying[oid]
        elif step == "again":
            capture.again(oid)
        elif step == "merge":
            merge(self.directory, 1 << 20)
        elif step == "delete_covered":
            delete_covered(self.directory, self.grace)
        elif step == "retain":
            retain(self.directory, Keep(bytes=0), capture.writer.store_position)
        else:
            getattr(capture, step)()

    # --- consumers

    @rule(
        name=st.sampled_from(["a", "b"]),
        stop_after=st.none() | st.integers(0, 2),
        kill=st.none() | st.integers(0, 3),
        before=st.booleans(),
        during=st.none() | st.lists(STEPS, min_size=3, max_size=3),
    )
    def consume(
        self,
        name: str,
        stop_after: int | None,
        kill: int | None,
        before: bool,
        during: list[list[tuple[str, int]]] | None,
    ) -> None:
        if not self.directory.exists():
            return
        reader = self.readers.get(name) or Reader(self.directory, name)
        new = name not in {one.name for one in consumers(self.directory)}

        def others(number: int) -> None:
            left, self.disk.left, self.grace = self.disk.left, None, 3600.0
            if during and self.capture:
                # What was received becomes durable, and so does an idle position behind it.
                for step, oid in [*during[number], ("flush", 0), ("idle", 0)]:
                    self.step(self.capture, step, oid)
            self.disk.left, self.grace = left, 0.0

        with self.disk.killing(kill, before=before):
            try:
                reader.consume(stop_after, others)
            except KilledError:
                pass
            except PgOutputError as error:
                if not new or error.code != "changes_missing":
                    raise
                return
        self.disk.restart()
        self.readers[name] = reader

    @rule(name=st.sampled_from(["a", "b"]))
    def remove(self, name: str) -> None:
        if name in {one.name for one in consumers(self.directory)}:
            remove_consumer(self.directory, name)
        self.readers.pop(name, None)

    # --- what must hold

    @invariant()
    def tables_are_those_of_the_server(self) -> None:
        for reader in self.readers.values():
            for oid, target in reader.targets.items():
                gaps = self.world.gaps.get(oid, [])
                if not target.begun or any(
                    target.snapshot <= gap < target.position for gap in gaps
                ):
                    continue
                assert target.rows == self.world.rows(oid, target.position), (reader.name, oid)

    def settle(self) -> None:
        """Let everything end that has begun; each consumer then has all."""
        self.disk.restart()
        capture = self.start()
        while capture.next < len(self.world.events):
            capture.receive()
        for oid in OIDS:
            self.world.advance()
            for running in [capture.copying.pop(oid)] if oid in capture.copying else []:
                for _ in running:
                    pass
            if (state := capture.tables.read().get(oid)) and state.waits_from is not None:
                for _ in capture.copy(oid):
                    pass
        self.world.advance()
        capture.flush()
        capture.idle()
        for name in list(self.readers):
            reader = self.readers[name]
            reader.consume(None)
            reader.consume(None)
            self.tables_are_those_of_the_server()
            for oid in self.world.published & capture.known:
                if self.world.gaps.get(oid):
                    continue
                target = reader.targets[oid]
                assert target.begun, (name, oid, capture.tables.read(), consumers(self.directory))
                assert target.rows == self.world.rows(oid, self.world.lsn + 1)


def settings_of(examples: int) -> settings:
    return settings(
        max_examples=examples,
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


# What is killed leaves its files open.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
class TestDirectory(DirectoryMachine.TestCase):  # type: ignore[name-defined, misc]
    settings = settings_of(20)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
class TestDirectoryAtLength(DirectoryMachine.TestCase):  # type: ignore[name-defined, misc]
    settings = settings_of(250)
