"""A consumer that has everything exactly once: rows and position are stored in one transaction.

    python minimal_consumer.py postgresql:///shop shop consumed.sqlite

It reads the publication through a slot of its name, which it makes at its first start, and writes
each change as a line of JSON into a table of SQLite. It may be killed and started again at any
moment. SIGTERM and Ctrl-C end it between two transactions.
"""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import sqlite3
import sys
import threading

import pyarrow as pa

import pgoutput_fast as pf
from pgoutput_fast.replication import connect

TABLES = """
CREATE TABLE IF NOT EXISTS position (one INTEGER PRIMARY KEY CHECK (one = 1), lsn, timeline);
CREATE TABLE IF NOT EXISTS changes (commit_lsn, seq, relation, op, row);
"""
POSITION = "SELECT lsn, timeline FROM position"


def consume(dsn: str, publication: str, path: str, stop: threading.Event) -> None:
    """Store what comes until `stop` is set."""
    with contextlib.closing(sqlite3.connect(path, timeout=60, isolation_level=None)) as store:
        store.executescript(TABLES)
        # Before there is a position, nothing was stored, and all that the slot has is still to
        # come. A slot that is gone later is not made again: what was committed meanwhile would be
        # missing.
        known = store.execute(POSITION).fetchone()
        lsn, timeline = known or (None, None)

        def move(end_lsn: int, transaction: pf.transactions.Transaction | None = None) -> None:
            """Store a position, with the changes of the transaction that ends there."""
            nonlocal known
            with store:  # one transaction: all of it, or nothing
                store.execute("BEGIN IMMEDIATE")
                # While this program waited for the slot, another one with the same file may have
                # stored what comes now. So the position is looked up again, in the transaction
                # that moves it.
                if store.execute(POSITION).fetchone() != known:
                    sys.exit("another consumer has written to the file: start again")
                known = (pf.format_lsn(end_lsn), stream.timeline)
                if transaction is not None:
                    write(store, transaction)
                store.execute("INSERT OR REPLACE INTO position VALUES (1, ?, ?)", known)

        with connect(
            dsn,
            slot=publication,
            publications=[publication],
            create_slot=lsn is None,
            start_lsn=None if lsn is None else pf.parse_lsn(lsn),
            start_timeline=timeline,
            on_idle=move,
        ) as stream:
            for transaction in stream.transactions(stop=stop):
                move(transaction.end_lsn, transaction)
                stream.acknowledge(transaction)


def write(store: sqlite3.Connection, transaction: pf.transactions.Transaction) -> None:
    """Insert the changes of a transaction."""
    for changes in transaction.batches():
        name = f"{changes.relation.namespace}.{changes.relation.name}"
        store.executemany(
            "INSERT INTO changes VALUES (?, ?, ?, ?, ?)",
            (
                (
                    pf.format_lsn(row["commit_lsn"]),
                    row["seq"],
                    name,
                    row["op"],
                    json.dumps(row["after"] or row["before"], default=str),
                )
                for row in pa.record_batch(changes).to_pylist()
            ),
        )


def main() -> None:
    """Run with the command line's arguments."""
    if len(sys.argv) != 4:
        sys.exit("usage: minimal_consumer.py DSN PUBLICATION FILE")
    logging.basicConfig(level=logging.INFO)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    dsn, publication, path = sys.argv[1:]
    consume(dsn, publication, path, stop)


if __name__ == "__main__":
    main()
