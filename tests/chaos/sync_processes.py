"""The processes of a sync that is killed: its own, Spark's, and a capture's."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from between import EXECUTOR, Trap, Wanted
from chaos import Consumer, wait_for

LOOK = 300.0
"""Seconds in which a sync has to come to where the server is, on a machine that is busy."""
WINDOWS = (100_000, 1 << 20, 16 << 20)
"""Bytes."""
DAEMON = b"pyspark.daemon"
"""In the command line of a process that runs tasks of Spark, or that makes such processes."""

DRIVER = b"org.apache.spark.deploy.SparkSubmit"
"""In that of a driver's JVM."""


class Syncer(Consumer):
    """The sync's process."""

    chance: random.Random
    script = "syncer.py"

    def start(self, *, is_waited_for: bool = False) -> None:
        """Start it, with windows of another size than before.

        With small ones it may take longer than `LOOK` to come to where the server is.
        """
        self.options["window_bytes"] = WINDOWS[-1] if is_waited_for else self._window_bytes()
        self._begin = os.fstat(self.log.fileno()).st_size
        super().start()

    def _window_bytes(self) -> int:
        return self.chance.choice(WINDOWS)

    def has_said(self) -> bytes:
        """What it has written into the log since it was started."""
        # Not by seek(): the process writes where the file's one position is.
        return os.pread(self.log.fileno(), 1 << 22, self._begin)

    def works(self) -> bool:
        """Whether it has come so far as to ask the server."""
        return b"the sync has written" in self.has_said()

    def live(self) -> None:
        """Let it come to a moment by chance."""
        # Some are killed before they work; if most were, on a busy machine, none would get on.
        if self.chance.random() < 0.8:
            wait_for("a process that works", self.works, LOOK)
        time.sleep(self.chance.uniform(0.0, self.chance.choice((0.5, 2.5))))
        self.check()

    def tell_threads(self) -> None:
        """Have it write where its threads are."""
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGUSR1)
            time.sleep(1)

    def check(self) -> None:
        """It does not end by itself."""
        assert self.process is not None
        assert self.process.poll() is None, f"it has ended: {self.process.returncode}"

    def ended_well(self) -> None:
        """It has ended without an error."""
        assert self.process is not None
        assert self.process.returncode == 0, f"it has ended: {self.process.returncode}"

    def close(self) -> None:
        """Kill what is left."""
        self.kill()
        self.log.close()


class Capturer(Consumer):
    """A capture's process."""

    script = "capturer.py"


class Life(NamedTuple):
    """How a sync with Spark runs, from its start to the kill of its driver.

    Fields: master; driver_bytes (None: the default); is_following (whether the capture is a process
    of its own); faults (what it is done, the end last).
    """

    master: str
    driver_bytes: int | None
    is_following: bool
    faults: list[str]

    def __str__(self) -> str:
        size = "the default" if self.driver_bytes is None else self.driver_bytes
        where = "beside" if self.is_following else "in"
        return f"{self.master}, driver_bytes {size}, capture {where} the driver"

    @property
    def has_executors(self) -> bool:
        """Whether executors are processes of their own."""
        return self.master.startswith("local-cluster")


class SparkSyncer(Syncer):
    """The processes of a sync with Spark: driver, JVM, executors, and at times a capture."""

    life: Life

    def __init__(self, store: Path, dsn: str, segments: Path, **options: Any) -> None:
        super().__init__(store, dsn, **options)
        of_sync = ("interval", "iceberg")
        own = {name: value for name, value in self.options.items() if name not in of_sync}
        self._capture = Capturer(segments, dsn, create_slot=True, snapshot="initial", **own)
        self._segments = segments
        self._trap = Trap(segments.parent)
        self._kills = 0
        """Between commits."""
        self.options["trap"] = str(segments.parent)
        self._sessions: set[int] = set()
        """Of all its lives."""
        import pyspark

        # Executors of a local cluster write into its home, so it is given one of its own.
        home = segments.parent / "spark"
        home.mkdir()
        for path in Path(pyspark.__file__).parent.iterdir():
            home.joinpath(path.name).symlink_to(path)
        self._home = str(home)
        os.environ["SPARK_HOME"] = self._home
        os.environ["SPARK_LOCAL_DIRS"] = str(segments.parent / "local")

    # --- its life --------------------------------------------------------------------------------

    def start(self) -> None:
        """Start it for the life that it has now, with a capture of its own or without."""
        life = self.life
        is_running = self._capture.process is not None and self._capture.process.poll() is None
        for name in ("driver_bytes", "segments"):
            self.options.pop(name, None)
        self.options["spark"] = life.master
        # A merge that executors share is committed by the driver, not by a worker.
        is_between = any("between state tables" in fault for fault in life.faults[:-1])
        self.options["shares"] = not is_between and self.chance.random() < 0.5
        if life.driver_bytes is not None:
            self.options["driver_bytes"] = life.driver_bytes
        if life.is_following:
            self.options["segments"] = str(self._segments)
            if not is_running:
                self._capture.start()
        elif is_running:
            self._capture.kill()
        super().start()
        assert self.process is not None
        self._sessions.add(self.process.pid)

    def _window_bytes(self) -> int:
        return WINDOWS[-1]  # a window of Spark's takes a second, however small it is

    def works(self) -> bool:
        """See `Syncer`; one that follows a capture asks no server."""
        self.check()
        return super().works()

    def live(self) -> None:
        """See `Syncer`; some work for some windows, as the first one takes long."""
        if self.chance.random() < 0.8:
            wait_for("a process that works", self.works, LOOK)
            wanted = self._windows() + self.chance.choice((0, 0, 0, 1))
            wait_for("windows", lambda: self._windows() >= wanted, LOOK)
        time.sleep(self.chance.uniform(0.0, self.chance.choice((0.3, 1.5))))
        self.check()

    def has_written(self) -> bool:
        """Whether it has written a window."""
        return self._windows() > 1  # it also says that it begins

    def _windows(self) -> int:
        self.check()
        return self.has_said().count(b"the sync has written")

    def check(self) -> None:
        """See `Syncer`; nor does the capture."""
        super().check()
        if self.life.is_following:
            assert self._capture.process is not None
            code = self._capture.process.poll()
            assert code is None, f"the capture has ended: {code}\n{self._capture.said()[-3000:]}"

    def troubles(self) -> int:
        """How many errors that may pass there were; no process writes any more."""
        return self.said().count("once more")

    # --- its faults ------------------------------------------------------------------------------

    def kill(self) -> None:
        """Kill the driver with its JVM. What runs tasks goes on for a moment, as elsewhere."""
        assert self.process is not None
        for pid, command in processes_of({self.process.pid}):
            if DAEMON not in command and EXECUTOR not in command:
                kill(pid)
        super().kill()

    def kill_driver(self) -> bool:
        """Kill the driver with its JVM, by chance that one first; whether it was.

        What the driver can do without, as a window that it writes by itself, goes on meanwhile.
        """
        assert self.process is not None
        is_first = False
        if self.chance.random() < 0.5:
            found = [pid for pid, command in self._processes() if DRIVER in command]
            is_first = sum(map(kill, found)) > 0
            time.sleep(self.chance.uniform(0.0, 1.5))
        self.kill()
        return is_first

    def kill_workers(self) -> int:
        """Kill the processes that run tasks of Spark; how many they were."""
        self.check()
        return sum(kill(pid) for pid, command in self._processes() if DAEMON in command)

    def kill_executor(self) -> int:
        """Kill the JVM of one executor, by chance with all processes that run tasks."""
        self.check()
        found = [pid for pid, command in self._processes() if EXECUTOR in command]
        if not found:
            return 0
        if self.chance.random() < 0.5:
            self.kill_workers()
        return kill(self.chance.choice(sorted(found)))

    def kill_capture(self) -> None:
        """Kill the capture, and start it."""
        self._capture.kill()
        self._capture.start()

    def kill_between(self, where: str) -> None:
        """Kill a process between the commits of two tables."""
        self._kills += 1
        wanted = Wanted(where, self.chance.random(), self._kills)
        self._trap.set(wanted)
        is_driver = where in ("changes", "state")

        def has_come() -> bool:
            if is_driver:
                assert self.process is not None
                return self.process.poll() is not None
            self.check()
            return self._trap.done(wanted) is not None

        wait_for(f"a kill between two tables' commits ({where})", has_come, LOOK)
        done = self._trap.done(wanted)
        assert done is not None, f"it has ended: {self.process and self.process.returncode}"
        committed, left = done
        assert committed
        assert left
        if is_driver:
            self.kill()

    def close(self) -> None:
        """See `Syncer`."""
        super().close()
        if self._capture.process is not None:
            self._capture.kill()
        self._capture.log.close()
        for pid, _ in processes_of(self._sessions):
            with contextlib.suppress(OSError):
                # The number of a session that is over may be another program's by now.
                if self._home.encode() in Path("/proc", str(pid), "environ").read_bytes():
                    kill(pid)

    def _processes(self) -> list[tuple[int, bytes]]:
        assert self.process is not None
        return list(processes_of({self.process.pid}))


def processes_of(sessions: set[int]) -> Iterator[tuple[int, bytes]]:
    """The processes of some sessions, each with its command line."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            stat = path.read_text().rpartition(")")[2].split()
            if int(stat[3]) in sessions:
                yield int(path.parent.name), path.with_name("cmdline").read_bytes()


def kill(pid: int) -> bool:
    """Kill a process; whether it was there."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
        return True
    return False
