"""A capture that is killed at any moment.

    python capturer.py DIRECTORY DSN OPTIONS

OPTIONS is JSON: what `capture` is given, `limit` (the largest file that it may write, in bytes),
and `quick` (whether what is done from time to time is done all the time).
"""

from __future__ import annotations

import json
import logging
import signal
import sys
import threading

from consumer import limit_files

from pgoutput_fast.changelog import uploading
from pgoutput_fast.replication import capture, upkeep, uploader

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d %(message)s")
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    options = json.loads(sys.argv[3])
    limit_files(options.pop("limit", None))
    if options.pop("quick", False):
        for name in ("_TICK", "_MERGE_INTERVAL", "_TIDY_INTERVAL", "_WATCH_INTERVAL"):
            setattr(upkeep, name, 0.1)
        uploader._INTERVAL = 0.1
        uploading._ROUND = 0.2
    capture(sys.argv[2], directory=sys.argv[1], stop=ended, **options)
