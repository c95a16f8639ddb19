"""An engine whose tasks run in this process, pickled as Spark would have them."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Sequence
from typing import Any

from pgoutput_fast.apply.window_writer import WindowWriter
from pgoutput_fast.changelog.read_plan import Position, ReadPlan
from pgoutput_fast.changelog.view import View
from pgoutput_fast.errors import PgOutputError
from pgoutput_fast.spark._distributed import DistributedWindow
from pgoutput_fast.spark._jobs import outcome, unpickled
from pgoutput_fast.spark._layouts import is_for_driver, window_plan
from pgoutput_fast.spark._merge_steps import spark_steps


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
        self, *, twice: bool = False, stages: bool = False, shared_bytes: int | None = None
    ) -> None:
        self.jobs = InProcessJobs(twice=twice)
        self._stages = stages
        self._shared_bytes = shared_bytes
        self.windows: list[DistributedWindow] = []

    def check(self, target: Any) -> None:
        """It takes each."""

    def begin(self, target: Any) -> None:
        """Nothing is left of another one."""
        if self._shared_bytes is not None:
            target.steps = functools.partial(spark_steps, self.jobs, self._shared_bytes)

    def plan(
        self, view: View, position: Position, max_bytes: int, **options: Any
    ) -> ReadPlan | None:
        """Plan a window for tasks, however small it is."""
        return window_plan(view, position, max_bytes, self.driver_bytes, **options)

    def writer(self, plan: ReadPlan, *given: Any) -> WindowWriter:
        if is_for_driver(plan, self.driver_bytes):
            return WindowWriter(*given)
        self.windows.append(
            DistributedWindow(
                self.jobs, *given, stages=self._stages, shared_bytes=self._shared_bytes
            )
        )
        return self.windows[-1]
