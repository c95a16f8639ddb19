"""A consumer for asyncio that has everything exactly once, in SQLite.

    python asyncio_consumer.py postgresql:///shop shop consumed.sqlite

It does the same as minimal_consumer.py, and leaves the event loop to other tasks while it waits. It
may be killed and started again at any moment. SIGTERM and Ctrl-C cancel the task, which ends
between two transactions: while it stores one, it awaits nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import sqlite3
import sys

import pyarrow as pa

import pgoutput_fast as pf
from pgoutput_fast.replication import connect_async

TABLES = """
CREATE TABLE IF NOT EXISTS position (one INTEGER PRIMARY KEY CHECK (one = 1), lsn, timeline);
CREATE TABLE IF NOT EXISTS changes (commit_lsn, seq, relation, op, row);
"""
POSITION = "SELECT lsn, timeline FROM position"


async def consume(dsn: str, publication: str, store: sqlite3.Connection) -> None:
    """Store what comes until the task is cancelled."""
    # Before there is a position, nothing was stored, and the slot has all that is still to come. A
    # slot that is gone later is not made again: changes would be missing.
    known = store.execute(POSITION).fetchone()
    lsn, timeline = known or (None, None)

    def move(end_lsn: int, transaction: pf.transactions.Transaction | None = None) -> None:
        """Store a position, with the changes of the transaction that ends there."""
        nonlocal known
        with store:  # one transaction: all of it, or nothing
            store.execute("BEGIN IMMEDIATE")
            # While this program waited for the slot, another one with the same file may have moved
            # the position.
            if store.execute(POSITION).fetchone() != known:
                sys.exit("another consumer has written to the file: start again")
            known = (pf.format_lsn(end_lsn), stream.timeline)
            if transaction is not None:
                write(store, transaction)
            store.execute("INSERT OR REPLACE INTO position VALUES (1, ?, ?)", known)

    async with connect_async(
        dsn,
        slot=publication,
        publications=[publication],
        create_slot=lsn is None,
        start_lsn=None if lsn is None else pf.parse_lsn(lsn),
        start_timeline=timeline,
        on_idle=move,
    ) as stream:
        async for transaction in stream.transactions():
            move(transaction.end_lsn, transaction)
            await stream.acknowledge(transaction)


def write(store: sqlite3.Connection, transaction: pf.transactions.Transaction) -> None:
    """Insert the changes of a transaction."""
    for changes in transaction.batches():
        name = f"{changes.relation.namespace}.{changes.relation.name}"
        for row in pa.record_batch(changes).to_pylist():
            values = json.dumps(row["after"] or row["before"], default=str)
            place = pf.format_lsn(row["commit_lsn"]), row["seq"]
            store.execute(
                "INSERT INTO changes VALUES (?, ?, ?, ?, ?)", (*place, name, row["op"], values)
            )


async def run(dsn: str, publication: str, path: str) -> None:
    """Consume until a signal comes. Start tasks of your own beside `consume`."""
    with contextlib.closing(sqlite3.connect(path, timeout=60, isolation_level=None)) as store:
        store.executescript(TABLES)
        consuming = asyncio.create_task(consume(dsn, publication, store))
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, consuming.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await consuming


def main() -> None:
    """Run with the command line's arguments."""
    if len(sys.argv) != 4:
        sys.exit("usage: asyncio_consumer.py DSN PUBLICATION FILE")
    logging.basicConfig(level=logging.INFO)
    asyncio.run(run(*sys.argv[1:]))


if __name__ == "__main__":
    main()
