"""A directory over a month, by a clock that runs faster: disk, memory and start stay as they are.

    python tests/chaos/month.py [--days N] [--transactions N] [--keep DAYS]

No server takes part. What a capture does each second is done for every one that has a commit:
segments are written, merged, and deleted once a consumer has read them and they are some days old.
For each day it prints the files and bytes that are there, the memory of the process, and how long a
capture and a consumer take to begin. It fails if the last days need more than those before.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

sys.path.append(str(Path(__file__).parents[1]))

from support.changelogs.written_segments import METADATA

from pgoutput_fast import testing
from pgoutput_fast.changelog.consumers import Consumer
from pgoutput_fast.changelog.merging import delete_covered, merges
from pgoutput_fast.changelog.retention import Keep, retain
from pgoutput_fast.segments import SegmentWriter

DAY = 86400.0
TABLE = testing.Table("events", {"id": "int8", "body": "text"})
BODY = "x" * 100
SEGMENT_BYTES = 1 << 20


class Clock:
    """The time that files and programs see."""

    def __init__(self) -> None:
        self.now = time.time()

    @contextlib.contextmanager
    def is_used(self) -> Iterator[None]:
        before, fsync = time.time, os.fsync
        time.time = lambda: self.now
        os.fsync = lambda _: None  # nothing is killed here, and a month has many
        try:
            yield
        finally:
            time.time, os.fsync = before, fsync

    def stamp(self, path: Path) -> None:
        """Give a file that was just written the clock's time."""
        os.utime(path, (self.now, self.now))


class Day(NamedTuple):
    """What a day's end was like: files, megabytes on disk and in memory, milliseconds to begin."""

    files: int
    disk: float
    memory: float
    begin: float


def memory() -> float:
    """Megabytes of this process."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def begin(directory: Path, end: int) -> SegmentWriter:
    """A capture begins."""
    return SegmentWriter(directory, METADATA, confirmed_flush_lsn=end, segment_bytes=SEGMENT_BYTES)


class Month:
    """The capture and its consumer."""

    def __init__(self, directory: Path, clock: Clock, keep: int) -> None:
        self.directory, self.clock, self.keep = directory, clock, keep
        self.lsn, self.number = 1000, 0
        self.writer = begin(directory, self.lsn)
        self.consumer = Consumer(directory, "reader")
        self.relation = TABLE.relation()
        self.read = 0

    def second(self, transactions: int) -> None:
        """The transactions of one second, in a segment."""
        for _ in range(transactions):
            self.number += 1
            self.lsn += 500
            commit, end = self.lsn - 100, self.lsn
            frames = [testing.begin(self.number % 4000, commit, self.number)]
            lsns = [commit]
            if self.number == 1:
                frames.append(self.relation)
                lsns.append(0)
            frames += [
                testing.insert(TABLE, [self.number, BODY]),
                testing.commit(commit, end, self.number),
            ]
            self.writer.write_frames(frames, [*lsns, commit, end])
        start = self.writer.position
        self.writer.flush()
        for path in self.directory.glob(f"{start:016X}-*"):
            self.clock.stamp(path)

    def tidy(self) -> None:
        """What the capture does from time to time, and the consumer."""
        for merged in merges(self.directory, SEGMENT_BYTES):
            self.clock.stamp(merged.path)
        delete_covered(self.directory, 60.0)
        retain(self.directory, Keep(seconds=self.keep * DAY), self.writer.store_position)
        plan = self.consumer.plan()
        if plan is not None:
            self.read += len(plan.reads)
            self.consumer.advance(plan.after)

    def day(self) -> Day:
        """The state at the end of a day, with a new capture."""
        self.writer.close()
        before = time.perf_counter()
        self.writer = begin(self.directory, self.lsn)
        Consumer(self.directory, "reader").plan()
        took = time.perf_counter() - before
        self.writer.write_frames([self.relation], [0])
        files = list(self.directory.rglob("*"))
        size = sum(path.stat().st_size for path in files if path.is_file())
        return Day(len(files), size / 1e6, memory(), 1000 * took)


def run(days: int, transactions: int, seconds: int, keep: int) -> list[Day]:
    """Days, each with so many seconds in which something is committed."""
    clock = Clock()
    found = []
    with tempfile.TemporaryDirectory() as name, clock.is_used():
        month = Month(Path(name) / "lake", clock, keep)
        each = transactions // (days * seconds)
        for number in range(days):
            for second in range(seconds):
                month.second(each)
                clock.now += DAY / seconds
                if second % 50 == 49:
                    month.tidy()
            month.tidy()
            found.append(month.day())
            print(
                f"day {number + 1}: {month.number:,} transactions, {found[-1].files:,} files, "
                f"{found[-1].disk:.1f} MB, memory {found[-1].memory:.0f} MB, "
                f"begins in {found[-1].begin:.0f} ms",
                flush=True,
            )
        month.writer.close()
    return found


def check(days: list[Day], keep: int) -> None:
    """The last days are as those before, when there was already as much as is kept."""
    last, before = days[-keep:], days[-2 * keep : -keep]
    assert len(days) > 3 * keep
    for field, slack in (("files", 1.2), ("disk", 1.1), ("memory", 1.1)):
        now, was = (
            statistics.median(getattr(day, field) for day in part) for part in (last, before)
        )
        assert now <= was * slack, f"{field}: {was:.1f}, and {now:.1f} some days later"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--days", type=int, default=30)
    parser.add_argument("--transactions", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=int, default=1000, help="of a day with commits")
    parser.add_argument("--keep", type=int, default=7, help="days for which segments are kept")
    given = parser.parse_args()
    check(run(given.days, given.transactions, given.seconds, given.keep), given.keep)


if __name__ == "__main__":
    main()
