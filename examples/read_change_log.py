"""Store the changes of a change log in SQLite, each exactly once.

    python examples/read_change_log.py CHANGE_LOG FILE

A capture writes the change log. This program stores changes and position in one transaction of
SQLite, so it may be killed at any moment, and goes on where it was. If FILE is deleted, remove the
consumer too: pgoutput-fast consumers --dir CHANGE_LOG remove sqlite
"""

from __future__ import annotations

import contextlib
import json
import signal
import sqlite3
import sys
import threading

import pgoutput_fast as pf
from pgoutput_fast.changelog import ChangeLog, Position


def consume(change_log: str, path: str, stop: threading.Event) -> None:
    """Store changes until `stop` is set."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as store:
        store.execute("CREATE TABLE IF NOT EXISTS position (one INTEGER PRIMARY KEY, text)")
        store.execute(
            "CREATE TABLE IF NOT EXISTS changes (commit_lsn, seq, relation, op, row, unchanged)"
        )
        known = store.execute("SELECT text FROM position").fetchone()
        position = None if known is None else Position.from_json(known[0])
        with ChangeLog(change_log).consumer("sqlite", position=position) as consumer:
            for found in consumer.follow(stop):
                with store:  # one transaction of SQLite: all of it, or nothing
                    store.execute("BEGIN IMMEDIATE")
                    for changes, batch in found:
                        name = f"{changes.relation.namespace}.{changes.relation.name}"
                        for row in batch.to_pylist():
                            values = json.dumps(row["after"] or row["before"], default=str)
                            store.execute(
                                "INSERT INTO changes VALUES (?, ?, ?, ?, ?, ?)",
                                (pf.format_lsn(row["commit_lsn"]), row["seq"], name, row["op"],
                                 values, json.dumps(row["unchanged"])),
                            )  # fmt: skip
                    store.execute(
                        "INSERT OR REPLACE INTO position VALUES (1, ?)",
                        (found.position.to_json(),),
                    )
                consumer.advance(found.position)  # the change log may delete what is stored


def main() -> None:
    """Run with the command line's arguments."""
    if len(sys.argv) != 3:
        sys.exit("usage: read_change_log.py CHANGE_LOG FILE")
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    change_log, path = sys.argv[1:]
    consume(change_log, path, stop)


if __name__ == "__main__":
    main()
