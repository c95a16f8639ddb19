"""A capture that is killed at any moment.

    python capturer.py DIRECTORY DSN OPTIONS

OPTIONS is JSON: what `capture` is given, and `limit` (the largest file that it may write, in
bytes).
"""

from __future__ import annotations

import json
import logging
import signal
import sys
import threading

from consumer import limit_files

from pgoutput_fast.replication import capture

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d %(message)s")
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    options = json.loads(sys.argv[3])
    limit_files(options.pop("limit", None))
    capture(sys.argv[2], directory=sys.argv[1], stop=ended, **options)
