"""A directory that a simulated capture writes, and that is read each time there is some more."""

from __future__ import annotations

import random
from pathlib import Path

from support.changelogs.made_directory import OIDS, Capture, Change, World, apply
from support.changelogs.merged import merge

from pgoutput_fast.changelog.merging import delete_covered
from pgoutput_fast.changelog.retention import Keep, retain


class Simulation:
    """A server, its capture, and what happens to the directory, at random.

    Subclasses read it.
    """

    def __init__(self, root: Path, seed: int) -> None:
        self.chance = random.Random(seed)
        self.root, self.directory = root, root / "segments"
        self.world = World()
        self.world.published = set(OIDS[: self.chance.randrange(1, 4)])
        self.world.commit([Change(oid, "insert", 0, "before") for oid in OIDS])
        confirmed = self.world.advance()
        self.capture = Capture(self.directory, self.world, confirmed)
        if self.chance.random() < 0.7:
            self.capture.begin_with_snapshot(self.world.published)
        self.counts = dict.fromkeys(("reads", "copies", "elsewhere", "refused"), 0)

    def transaction(self) -> None:
        made = []
        now = {oid: self.world.rows(oid, self.world.lsn + 1) for oid in OIDS}
        for _ in range(self.chance.randrange(1, 5)):
            oid, key = self.chance.choice(OIDS), self.chance.randrange(4)
            op = self.chance.choice(["put", "put", "put", "delete", "truncate"])
            if op == "delete" and key not in now[oid]:
                continue
            if op == "put":
                op = "update" if key in now[oid] else "insert"
            change = Change(oid, op, key, f"v{self.world.xid}")
            apply(now[oid], *change[1:])
            made.append(change)
        self.world.commit(made)

    def copy(self, oid: int) -> None:
        running = self.capture.copying.get(oid)
        if running is None:
            state = self.capture.tables.read().get(oid)
            if state is None or state.waits_from is None:
                return
            running = self.capture.copying[oid] = self.capture.copy(oid)
        if next(running, "ended") == "ended":
            del self.capture.copying[oid]
            self.counts["copies"] += 1

    def step(self) -> None:
        oid = self.chance.choice(OIDS)
        what = self.chance.choice(
            ["transaction"] * 4 + ["receive"] * 4 + ["flush", "flush", "idle"] + ["copy"] * 5
            + ["again", "merge", "delete", "retain", "publish", "read", "read"]
        )  # fmt: skip
        if what == "transaction":
            self.transaction()
        elif what == "copy":
            self.copy(oid)
        elif what == "again":
            self.capture.again(oid)
        elif what == "merge":
            merge(self.directory, 1 << 20)
        elif what == "delete":
            delete_covered(self.directory, 0)
        elif what == "retain":
            retain(self.directory, Keep(bytes=2000), self.capture.writer.store_position)
        elif what == "publish":
            self.world.published.add(oid)
        elif what == "read":
            self.read()
        else:
            getattr(self.capture, what)()

    def read(self) -> None:
        """Read what is new, and compare it with the server's tables."""
        raise NotImplementedError

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    def settle(self) -> None:
        """Capture all that is left."""
        while self.capture.next < len(self.world.events):
            self.capture.receive()
        self.capture.flush()
        for oid in OIDS:
            self.capture.again(oid) if self.chance.random() < 0.3 else None
            for _ in range(6):
                self.copy(oid)
        self.world.advance()
        self.capture.idle()
        self.transaction()
        while self.capture.next < len(self.world.events):
            self.capture.receive()
        self.capture.flush()
