"""A sync, with the capture in it, that is killed at any moment.

    python syncer.py TARGET DSN OPTIONS

OPTIONS is JSON: what `sync` is given, and `quick` (whether what a capture does from time to time is
done all the time), and `spark` (where its executors are). As a service does it, a sync that Spark's
trouble has ended begins again.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import signal
import sys
import threading

from pgoutput_fast.apply import sync
from pgoutput_fast.connections import RetryableError
from pgoutput_fast.replication import upkeep

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d %(message)s")
    faulthandler.register(signal.SIGUSR1)
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    options = json.loads(sys.argv[3])
    if options.pop("quick", False):
        for name in ("_TICK", "_MERGE_INTERVAL", "_TIDY_INTERVAL", "_WATCH_INTERVAL"):
            setattr(upkeep, name, 0.1)
    master, driver_bytes = options.pop("spark", None), options.pop("driver_bytes", 0)
    if master is not None:
        from pgoutput_fast.spark import SparkEngine, session

        spark = session(master, configuration={"spark.log.level": "OFF"})
        options["engine"] = SparkEngine(spark, driver_bytes=driver_bytes)
    while True:
        try:
            print(sync(sys.argv[2], target=sys.argv[1], stop=ended, **options), file=sys.stderr)
            break
        except RetryableError:
            if master is None:
                raise
            logging.getLogger("syncer").exception("once more")
