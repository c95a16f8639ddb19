"""`sync` with Spark: the same tables, but executors write the windows."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from pgoutput_fast.apply import sync as sync_with
from pgoutput_fast.apply.window_writer import WindowWriter
from pgoutput_fast.options import byte_count, flag

from ._distributed import DistributedWindow, checked_target
from ._jobs import SparkJobs
from ._layouts import is_for_driver, window_plan
from ._merge_steps import spark_steps
from ._staged_files import clear

if TYPE_CHECKING:
    import os

    from pyspark.sql import SparkSession

    from pgoutput_fast.apply import SyncProgress
    from pgoutput_fast.apply.targets import Target
    from pgoutput_fast.changelog.read_plan import Position, ReadPlan
    from pgoutput_fast.changelog.view import View

    from ._jobs import Jobs

_DRIVER_BYTES = 32 << 20
"""The driver writes narrow changes of this size in the half second that two jobs cost."""
_WINDOW_BYTES = 256 << 20
"""Executors write larger windows than one process."""
_SHARED_BYTES = 256 << 20
"""Size of rewritten files from which two jobs cost less time than the other cores save."""
_FEW_CORES = 2
_DRIVER_BYTES_OF_FEW = 256 << 20
"""More than a window has there, except for a large transaction, which is never cut."""
_WINDOW_BYTES_OF_FEW = 64 << 20


class SparkEngine:
    """Write the windows of a sync, or verify its tables, on Spark's executors.

    For each window, one job decodes the segments and writes the files of all change tables and the
    rows of snapshots. The driver registers the files. A second job computes each table's net
    changes and merges them. If a merge rewrites many files of one table, all executors share it.
    Executors need this package with the extra ``delta``, and access to the target.

    Parameters
    ----------
    spark : SparkSession
    driver_bytes : int, optional
        The driver itself writes windows, and verifies tables, of up to this many bytes, because
        Spark's jobs cost about half a second. The default is 32 MiB, or 256 MiB if Spark runs in
        the driver's process on at most two cores.
    stage : bool, optional
        Whether the driver copies the segments of each window into the target's storage, for
        executors that cannot read them at the driver's path. The default is true if the target is a
        URL and Spark runs on several machines.

    Attributes
    ----------
    driver_bytes : int
    window_bytes : int
        Default size of a window, in bytes of frames: 256 MiB, or 64 MiB if Spark runs in the
        driver's process on at most two cores.
    jobs : Jobs
        Runs functions on the executors.
    """

    def __init__(
        self,
        spark: SparkSession,
        *,
        driver_bytes: int | None = None,
        stage: bool | None = None,
    ) -> None:
        if driver_bytes is not None:
            byte_count().check("driver_bytes", driver_bytes)
        if stage is not None:
            flag().check("stage", stage)
        self._spark = spark
        self._stage = stage
        self._stages = False
        self.jobs: Jobs = SparkJobs(spark)
        master = self._master()
        are_threads = master.startswith("local") and not master.startswith("local-cluster")
        has_few = are_threads and self.jobs.cores <= _FEW_CORES
        self.window_bytes = _WINDOW_BYTES_OF_FEW if has_few else _WINDOW_BYTES
        if driver_bytes is None:
            driver_bytes = _DRIVER_BYTES_OF_FEW if has_few else _DRIVER_BYTES
        self.driver_bytes = driver_bytes
        # With one core there is no other core to share a merge with.
        self._shared_bytes = _SHARED_BYTES if self.jobs.cores > 1 else None

    def __repr__(self) -> str:
        return f"SparkEngine({self._master()!r})"

    def _master(self) -> str:
        return str(self._spark.sparkContext.master)

    def check(self, target: Target) -> None:
        """See `Engine`."""
        place = checked_target(target).place
        self._stages = self._stage is True
        if self._stage is None:
            is_here = self._master().startswith("local")
            self._stages = place.path is None and not is_here

    def begin(self, target: Target) -> None:
        """See `Engine`."""
        # Only now does this sync own the target: before, another sync may use the staged files.
        delta_target = checked_target(target)
        clear(delta_target.place)
        if self._shared_bytes is not None:
            delta_target.steps = functools.partial(spark_steps, self.jobs, self._shared_bytes)

    def plan(
        self, view: View, position: Position, max_bytes: int, **options: Any
    ) -> ReadPlan | None:
        """See `Engine`."""
        return window_plan(view, position, max_bytes, self.driver_bytes, **options)

    def writer(self, plan: ReadPlan, *arguments: Any) -> WindowWriter:
        """See `Engine`."""
        if is_for_driver(plan, self.driver_bytes):
            return WindowWriter(*arguments)
        return DistributedWindow(
            self.jobs, *arguments, stages=self._stages, shared_bytes=self._shared_bytes
        )


def sync(
    spark: SparkSession,
    dsn: str | None = None,
    *,
    target: str | os.PathLike[str],
    driver_bytes: int | None = None,
    stage: bool | None = None,
    **options: Any,
) -> SyncProgress:
    """Keep Delta tables up to date with a server with Spark, and apply each change exactly once.

    Both this function and :func:`pgoutput_fast.apply.sync` can continue each other's target.

    Parameters
    ----------
    spark : SparkSession
    dsn : str, optional
        libpq's connection string, or a URL; by default libpq's environment variables.
    target : str or path
        A directory, or ``s3://bucket/prefix``. With ``parquet:`` before it: change tables only.
    driver_bytes, stage
        As in :class:`SparkEngine`.
    **options
        The other arguments of :func:`pgoutput_fast.apply.sync`.

    Returns
    -------
    SyncProgress

    Raises
    ------
    PgOutputError, TypeError
        As in :func:`pgoutput_fast.apply.sync`.
    """
    engine = SparkEngine(spark, driver_bytes=driver_bytes, stage=stage)
    return sync_with(dsn, target=target, engine=engine, **options)
