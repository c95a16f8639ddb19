"""A sync, with or without the capture in it, that is killed at any moment.

    python syncer.py TARGET DSN OPTIONS

OPTIONS is JSON: what `sync` is given, and `quick` (whether what a capture does from time to time is
done all the time). With `segments` the options of a capture are another process's. `spark` says
where its executors are, `shares` whether they share the merge of each table. `trap` is the
directory by which the test asks for a kill between two tables' commits. As a service does it, a
sync that Spark's trouble has ended begins again, unless its JVM is gone.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import signal
import sys
import threading
from pathlib import Path

from pgoutput_fast.apply import SyncProgress, sync
from pgoutput_fast.errors import RetryableError
from pgoutput_fast.replication import upkeep

log = logging.getLogger("syncer")
OF_SYNC = ("segments", "interval", "window_bytes", "until", "iceberg")
"""Options of a sync that follows another capture."""


# Most of the time is that of starts: no compiler but the quick one, nor threads of a collector.
_JAVA = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
CONFIGURATION = {
    "spark.log.level": "OFF",
    "spark.driver.extraJavaOptions": _JAVA,
    "spark.executor.extraJavaOptions": _JAVA,
    "spark.sql.codegen.wholeStage": "false",
}


class Told:
    """Writes into the log how far the sync is."""

    def __init__(self) -> None:
        self._windows = -1

    def __call__(self, progress: SyncProgress) -> None:
        if progress.windows > self._windows:
            self._windows = progress.windows
            log.info("the sync has written %d windows", self._windows)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d %(message)s")
    faulthandler.register(signal.SIGUSR1)
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    dsn: str | None = sys.argv[2]
    options = json.loads(sys.argv[3])
    if options.pop("quick", False):
        for name in ("_TICK", "_MERGE_INTERVAL", "_TIDY_INTERVAL", "_WATCH_INTERVAL"):
            setattr(upkeep, name, 0.1)
    master, trap = options.pop("spark", None), options.pop("trap", None)
    shares = options.pop("shares", False)
    of_engine = {name: options.pop(name) for name in ("driver_bytes",) if name in options}
    if "segments" in options:
        dsn, options = None, {name: options[name] for name in OF_SYNC if name in options}
    if master is not None:
        import between
        from pyspark import cloudpickle

        from pgoutput_fast.spark import SparkEngine, sync_engine
        from pgoutput_fast.spark._jvm import is_gone
        from pgoutput_fast.spark._session import plain_session

        if shares:
            sync_engine._SHARED_BYTES = 1
        spark = plain_session(master, "pgoutput_fast", CONFIGURATION)
        engine = options["engine"] = SparkEngine(spark, **of_engine)
        # Executors have no module of this directory.
        cloudpickle.register_pickle_by_value(between)
        set_trap = between.Trap(Path(trap))
        between.set_in_driver(set_trap)
        engine.jobs = between.TrappedJobs(engine.jobs, set_trap)
    while True:
        try:
            print(
                sync(dsn, target=sys.argv[1], stop=ended, progress=Told(), **options),
                file=sys.stderr,
            )
            break
        except RetryableError:
            if master is None or is_gone():
                raise
            log.exception("once more")
