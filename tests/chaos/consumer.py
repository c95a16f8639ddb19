"""A consumer that is killed at any moment: rows and position are stored in one transaction.

    python consumer.py STORE DSN OPTIONS

OPTIONS is JSON: what `connect` is given, `sleep` (seconds for which it dwells on each transaction
now and then), `pace` (seconds for which it dwells on every one, so that others wait that came
already) and `limit` (the largest file that it may write, in bytes).
"""

from __future__ import annotations

import json
import logging
import resource
import signal
import sqlite3
import sys
import threading
import time
from typing import Any

import pgoutput_fast as pf
from pgoutput_fast.replication import connect

TABLES = """
CREATE TABLE IF NOT EXISTS position (one INTEGER PRIMARY KEY CHECK (one = 1), lsn, timeline);
CREATE TABLE IF NOT EXISTS changes (number INTEGER PRIMARY KEY AUTOINCREMENT, id, part);
"""


def limit_files(limit: int | None) -> None:
    """Let no file that this process writes become larger."""
    if limit is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # writing fails with an error instead
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))


def consume(path: str, dsn: str, options: dict[str, Any], stop: threading.Event) -> None:
    sleep, pace = options.pop("sleep", 0.0), options.pop("pace", 0.0)
    limit_files(options.pop("limit", None))
    store = sqlite3.connect(path, timeout=60, isolation_level=None)
    store.execute("PRAGMA journal_mode = WAL")
    store.executescript(TABLES)
    known = store.execute("SELECT lsn, timeline FROM position").fetchone()
    position, timeline = known or (None, None)
    with connect(dsn, start_lsn=position, start_timeline=timeline, **options) as stream:
        for transaction in stream.transactions(stop=stop):
            rows = [
                (message.new["id"], message.new["part"])
                for message in transaction
                if isinstance(message, pf.Insert)
            ]
            with store:
                store.execute("BEGIN IMMEDIATE")
                # Another consumer may have had the slot between the look at the store and the
                # begin of the stream, and have stored what comes now.
                if store.execute("SELECT lsn, timeline FROM position").fetchone() != known:
                    raise SystemExit("another consumer has stored something: begin again")
                known = (transaction.end_lsn, stream.timeline)
                store.executemany("INSERT INTO changes (id, part) VALUES (?, ?)", rows)
                store.execute("INSERT OR REPLACE INTO position VALUES (1, ?, ?)", known)
            stream.acknowledge(transaction)
            time.sleep(sleep + pace)
            sleep = 0.0
    store.close()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d %(message)s")
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    consume(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), ended)
