"""An engine whose tasks run in this process, pickled as Spark would have them."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

from pgoutput_fast.apply.window_writer import WindowWriter
from pgoutput_fast.changelog.read_plan import ReadPlan
from pgoutput_fast.errors import PgOutputError
from pgoutput_fast.spark._distributed import DistributedWindow
from pgoutput_fast.spark._jobs import outcome, unpickled
from pgoutput_fast.spark._merges import Merger


class InProcessJobs:
    """See `Jobs`. With `twice` each task runs two times, as if Spark had lost its result."""

    cores = 2

    def __init__(self, *, twice: bool = False) -> None:
        self._times = 2 if twice else 1
        self.tasks: list[Any] = []

    def run(
        self,
        what: str,
        function: Callable[[Any], Any],
        tasks: Sequence[Any],
        tell: Callable[[], None],
    ) -> list[Any]:
        del what
        tell()
        found = []
        for task in tasks:
            self.tasks.append(task)
            for _ in range(self._times):
                result = unpickled(outcome(function, pickle.dumps(task)))
            if isinstance(result, PgOutputError):
                raise result
            found.append(result)
        return found


class InProcessEngine:
    """See `Engine`."""

    driver_bytes = 0
    window_bytes = 64 << 20

    def __init__(
        self, *, twice: bool = False, stages: bool = False, merger: Merger | None = None
    ) -> None:
        self.jobs = InProcessJobs(twice=twice)
        self._stages = stages
        self._merger = merger
        self.windows: list[DistributedWindow] = []

    def check(self, target: Any) -> None:
        """It takes each."""

    def begin(self, target: Any) -> None:
        """Nothing is left of another one."""

    def writer(self, plan: ReadPlan, *given: Any) -> WindowWriter:
        del plan
        self.windows.append(
            DistributedWindow(self.jobs, *given, stages=self._stages, merger=self._merger)
        )
        return self.windows[-1]
