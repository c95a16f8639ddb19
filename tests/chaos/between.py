"""Kills between two tables' commits, where the test asks for one.

The test writes a file that says where. The first process there that has committed a table and has
another one left makes a file that says which these are, and kills itself or its executor. As that
file is made once, there is one kill for each that is asked for.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

EXECUTOR = b"CoarseGrainedExecutorBackend"
"""In the command line of a JVM that is an executor's."""


class Wanted(NamedTuple):
    """A kill that is asked for.

    Fields: where ("changes" and "state": in the driver, between such tables; "worker" and
    "executor": in a task that folds changes into state tables); at (how far among the tables, from
    0 to 1); number (of each another one, as a task is run again after its kill).
    """

    where: str
    at: float
    number: int


class Trap:
    """The files by which a kill is asked for, and by which it is said to have come."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._wanted = directory / "kill-wanted.json"

    def set(self, wanted: Wanted) -> None:
        new = self._wanted.with_suffix(".new")
        new.write_text(json.dumps(wanted))
        new.replace(self._wanted)

    def wanted(self) -> Wanted | None:
        """What is asked for, and has not come yet."""
        with contextlib.suppress(FileNotFoundError):
            wanted = Wanted(*json.loads(self._wanted.read_text()))
            return None if self.done(wanted) else wanted
        return None

    def take(self, wanted: Wanted, committed: list[str], left: list[str]) -> bool:
        """Whether the kill is this process's: it has to come now."""
        new = self._directory / f"kill-{os.getpid()}.new"
        new.write_text(json.dumps((committed, left)))
        try:
            os.link(new, self._done(wanted))
        except FileExistsError:
            return False
        finally:
            new.unlink()
        return True

    def done(self, wanted: Wanted) -> tuple[list[str], list[str]] | None:
        """The tables that were committed before the kill, and those that were not."""
        with contextlib.suppress(FileNotFoundError):
            committed, left = json.loads(self._done(wanted).read_text())
            return committed, left
        return None

    def _done(self, wanted: Wanted) -> Path:
        return self._directory / f"kill-{wanted.number}.json"


class Tables:
    """Tables that are committed one after the other, with a kill after some of them.

    Which have something to commit is told by the commits themselves.
    """

    def __init__(
        self, trap: Trap, wanted: Wanted, names: list[str], kill: Callable[[], None]
    ) -> None:
        self._trap = trap
        self._wanted = wanted
        self._kill = kill
        self._after = 1 + int(wanted.at * (len(names) - 1))
        self._left = names
        self._committed: list[str] = []
        self._lock = threading.Lock()

    def do(self, name: str, do: Callable[[], Any]) -> Any:
        """Do one of them."""
        from pgoutput_fast.apply.delta_table import LakeTable

        # Tables of Iceberg have a commit of their own.
        kinds: list[Any] = [
            one for one in (LakeTable, *LakeTable.__subclasses__()) if "commit" in vars(one)
        ]
        own = [one.commit for one in kinds]
        commits = []

        def counted(commit: Callable[..., None]) -> Callable[..., None]:
            def done(*given: Any, **more: Any) -> None:
                commit(*given, **more)
                commits.append(given)

            return done

        with self._lock:
            for kind, commit in zip(kinds, own, strict=True):
                kind.commit = counted(commit)
            try:
                found = do()
            finally:
                for kind, commit in zip(kinds, own, strict=True):
                    kind.commit = commit
            if name in self._left:
                self._left.remove(name)
                self._committed += [name] * bool(commits)
            is_here = len(self._committed) >= self._after and self._left
            if is_here and self._trap.take(self._wanted, self._committed, self._left):
                self._kill()
        return found


def kill_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_executor() -> None:
    """Kill the JVM in which this task runs, and this process."""
    pid = os.getpid()
    while pid > 1:
        process = Path("/proc", str(pid))
        if EXECUTOR in process.joinpath("cmdline").read_bytes():
            os.kill(pid, signal.SIGKILL)
            break
        pid = int(process.joinpath("stat").read_text().rpartition(")")[2].split()[1])
    kill_process()


def set_in_driver(trap: Trap) -> None:
    """Have this process kill itself between the tables whose windows it commits."""
    from pgoutput_fast.apply.window_writer import WindowWriter

    each = WindowWriter._each

    def trapped(self: WindowWriter, do: Callable[[int, int], None], ends: dict[int, int]) -> None:
        wanted = trap.wanted()
        where = {"_commit_changes": "changes", "_finish": "state"}[do.__name__]
        names = [str(one) for one in ends if self._open[one].changes]
        if wanted is None or wanted.where != where or len(names) < 2:
            each(self, do, ends)
            return
        tables = Tables(trap, wanted, names, kill_process)
        each(self, lambda one, end: tables.do(str(one), lambda: do(one, end)), ends)

    WindowWriter._each = trapped  # type: ignore[method-assign]


def folded(trap: Trap, wanted: Wanted, tasks: Any) -> Any:
    """What `fold_tables` does, on an executor, which is killed between two tables."""
    from pgoutput_fast.spark import _folds

    fold = _folds._fold
    names = [str(one.before.relation_id) for one in tasks.tables]
    kill = kill_executor if wanted.where == "executor" else kill_process
    tables = Tables(trap, wanted, names, kill)
    _folds._fold = lambda target, one, staging: tables.do(
        str(one.before.relation_id), lambda: fold(target, one, staging)
    )
    try:
        return _folds.fold_tables(tasks)
    finally:
        _folds._fold = fold


class TrappedJobs:
    """Jobs in whose folds a process is killed between the commits of two state tables."""

    def __init__(self, jobs: Any, trap: Trap) -> None:
        self._jobs = jobs
        self._trap = trap

    @property
    def cores(self) -> int:
        return int(self._jobs.cores)

    def run(
        self, what: str, function: Callable[[Any], Any], tasks: Any, tell: Callable[[], None]
    ) -> list[Any]:
        wanted = self._trap.wanted()
        if (
            function.__name__ == "fold_tables"
            and wanted is not None
            and wanted.where in ("worker", "executor")
        ):
            function = functools.partial(folded, self._trap, wanted)
        found: list[Any] = self._jobs.run(what, function, tasks, tell)
        return found
