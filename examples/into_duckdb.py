"""Keep the tables of a publication in a duckdb database, each change exactly once.

    python into_duckdb.py postgresql:///shop shop shop.duckdb

Each table has the rows that the server's table has, in a schema and under a name that are the
server's. Tables need a primary key, or another index as replica identity, and are made here with
the columns that they have when their first change comes. What they held before the slot was made
has to be copied. The slot has the publication's name and is made at the first start.

Rows and position are stored in one transaction, so that this program may be killed and started
again at any moment. SIGTERM and Ctrl-C end it between two transactions. duckdb gives a file to one
process at a time: a second one ends before it has looked at the position.
"""

from __future__ import annotations

import argparse
import logging
import signal
import threading

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

import pgoutput_fast as pf
from pgoutput_fast.replication import connect


def quoted(*names: str) -> str:
    """A name in SQL, with its schema or struct before it."""
    return ".".join('"' + name.replace('"', '""') + '"' for name in names)


class Table:
    """One of the tables: applies its changes, of which most are taken many at once."""

    def __init__(self, store: duckdb.DuckDBPyConnection, relation: pf.Relation) -> None:
        if relation.replica_identity not in "di" or not any(c.is_key for c in relation.columns):
            raise SystemExit(f"{relation.namespace}.{relation.name} has no primary key")
        self._store = store
        self._schema = quoted(relation.namespace)
        self._name = quoted(relation.namespace, relation.name)
        self._columns = [column.name for column in relation.columns]
        self._keys = [column.name for column in relation.columns if column.is_key]

    def make(self, batch: pa.RecordBatch) -> None:
        """Make the table, unless it is there."""
        self._store.register("changes", pa.Table.from_batches([batch]))
        self._store.execute(f"CREATE SCHEMA IF NOT EXISTS {self._schema}")
        self._store.execute(
            f"CREATE TABLE IF NOT EXISTS {self._name} AS SELECT after.* FROM changes LIMIT 0"
        )
        described = self._store.execute(f"DESCRIBE {self._name}").fetchall()
        if [name for name, *_ in described] != self._columns:
            raise SystemExit(f"{self._name} has other columns on the server now")

    def apply(self, batch: pa.RecordBatch) -> None:
        """Apply changes, which are in the order of the stream."""
        # What needs the row that was there is applied by itself: an update that does not have all
        # values, or has changed the key, and a TRUNCATE.
        alone = pc.or_(
            pc.or_(pc.is_valid(batch["unchanged"]), pc.equal(batch["op"], "truncate")),
            pc.and_(pc.equal(batch["op"], "update"), pc.is_valid(batch["before"])),
        )
        start = 0
        for index in [*pc.indices_nonzero(alone).to_pylist(), len(batch)]:
            self._replace(batch.slice(start, index - start))
            if index < len(batch):
                self._change(batch.slice(index, 1))
            start = index + 1

    def _replace(self, batch: pa.RecordBatch) -> None:
        """Put the last row of each key in the place of the one that was there."""
        if not len(batch):
            return
        self._store.register("changes", pa.Table.from_batches([batch]))
        # These names are none of a batch's, as a column's own name may be.
        named = [f"key{i}" for i in range(len(self._keys))]
        values = ", ".join(
            f"coalesce({quoted('after', key)}, {quoted('before', key)}) AS {name}"
            for key, name in zip(self._keys, named, strict=True)
        )
        self._store.execute(
            f"CREATE OR REPLACE TEMP TABLE newest AS SELECT after, op, {values} FROM changes"
            f" QUALIFY row_number() OVER (PARTITION BY {', '.join(named)}"
            " ORDER BY commit_lsn DESC, seq DESC) = 1"
        )
        self._store.execute(
            f"DELETE FROM {self._name} WHERE ({', '.join(map(quoted, self._keys))})"
            f" IN (SELECT ({', '.join(named)}) FROM newest)"
        )
        self._store.execute(
            f"INSERT INTO {self._name} SELECT after.* FROM newest WHERE op <> 'delete'"
        )

    def _change(self, batch: pa.RecordBatch) -> None:
        """Apply one TRUNCATE, or one update of which only the values that were sent are set."""
        if batch["op"][0].as_py() == "truncate":
            self._store.execute(f"DELETE FROM {self._name}")
            return
        self._store.register("changes", pa.Table.from_batches([batch]))
        # A large value that the update left as it was is not sent. It is null in `after`, though it
        # is not NULL in the table, and is named in `unchanged`.
        unchanged = batch["unchanged"][0].as_py() or []
        old = "after" if batch["before"][0].as_py() is None else "before"
        setting = ", ".join(
            f"{quoted(name)} = {quoted('after', name)}"
            for name in self._columns
            if name not in unchanged
        )
        where = " AND ".join(
            f"{self._name}.{quoted(key)} = {quoted('changes', old, key)}" for key in self._keys
        )
        self._store.execute(f"UPDATE {self._name} SET {setting} FROM changes WHERE {where}")


def consume(dsn: str, publication: str, path: str, stop: threading.Event) -> None:
    """Store what comes until `stop` is set."""
    with duckdb.connect(path) as store:
        store.execute("CREATE TABLE IF NOT EXISTS position (lsn VARCHAR, timeline INTEGER)")
        known = store.execute("SELECT lsn, timeline FROM position").fetchone()
        lsn, timeline = known or (None, None)
        tables: dict[pf.Relation, Table] = {}

        def move(end_lsn: int) -> None:
            """Store a position, in the transaction that is open."""
            store.execute("DELETE FROM position")
            position = [pf.format_lsn(end_lsn), stream.timeline]
            store.execute("INSERT INTO position VALUES (?, ?)", position)

        with connect(
            dsn,
            slot=publication,
            publications=[publication],
            # A slot that is gone later is not made again: changes would be missing.
            create_slot=lsn is None,
            start_lsn=None if lsn is None else pf.parse_lsn(lsn),
            start_timeline=timeline,
            on_idle=move,
            target="portable",  # the Arrow types that duckdb reads
        ) as stream:
            # A group is many small transactions that came together, and costs little more than one.
            for group in stream.groups(stop=stop):
                store.begin()
                for changes in group.batches():
                    batch = pa.record_batch(changes)
                    table = tables.get(changes.relation)
                    if table is None:
                        table = tables[changes.relation] = Table(store, changes.relation)
                        table.make(batch)
                    table.apply(batch)
                move(group.end_lsn)
                store.commit()
                stream.acknowledge(group)


def main() -> None:
    """Run with the command line's arguments."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("dsn", help="the database to read from: a connection string or URL")
    parser.add_argument("publication", help="a publication of it")
    parser.add_argument("file", help="the duckdb database to write to")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    consume(arguments.dsn, arguments.publication, arguments.file, stop)


if __name__ == "__main__":
    main()
