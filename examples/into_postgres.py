"""Keep the tables of another PostgreSQL equal to those of a publication, each change exactly once.

    python into_postgres.py postgresql://source/shop shop postgresql://target/shop

The tables have to be in the target, with the same names and with the rows that they had when the
slot was made. The slot has the publication's name and is made at the first start. The position
stands in the target, in the table `consumed`, and moves in the transaction that applies the
changes. So this program may be killed and started again at any moment. SIGTERM and Ctrl-C end it
between two transactions.
"""

from __future__ import annotations

import argparse
import logging
import signal
import threading
from typing import Any

import psycopg
from psycopg.sql import SQL, Composable, Composed, Identifier

import pgoutput_fast as pf
from pgoutput_fast.replication import connect

POSITION = "SELECT lsn, timeline FROM consumed WHERE slot = %s"


class Target:
    """The other PostgreSQL, and the tables that the source has announced."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self.connection = connection
        self._relations: dict[int, pf.Relation] = {}

    def apply(self, message: Any) -> None:
        """Do what a message tells."""
        match message:
            case pf.Relation():
                self._relations[message.relation_id] = message
            case pf.Insert(relation=relation, new=new):
                # OVERRIDING SYSTEM VALUE, as identity columns have the source's values.
                self._change(
                    SQL("INSERT INTO {} ({}) OVERRIDING SYSTEM VALUE VALUES ({})").format(
                        table(relation),
                        SQL(", ").join(Identifier(column.name) for column in relation.columns),
                        SQL(", ").join(SQL("%s") for _ in relation.columns),
                    ),
                    list(new.texts()),
                )
            case pf.Update(relation=relation, old=old, new=new):
                # A column whose value was not sent is left as it is: the update did not change it.
                # Without an old row, the key was not changed either.
                sent = [
                    (column.name, text)
                    for column, text in zip(relation.columns, new.texts(), strict=True)
                    if text is not pf.UNCHANGED and not (old is None and column.is_key)
                ]
                if sent:
                    where, key = which_row(relation, new if old is None else old)
                    setting = SQL(", ").join(SQL("{} = %s").format(Identifier(c)) for c, _ in sent)
                    self._change(
                        SQL("UPDATE {} SET {} WHERE {}").format(table(relation), setting, where),
                        [text for _, text in sent] + key,
                    )
            case pf.Delete(relation=relation, old=old):
                where, key = which_row(relation, old)
                self._change(SQL("DELETE FROM {} WHERE {}").format(table(relation), where), key)
            case pf.Truncate(relation_ids=numbers):
                tables = [table(self._relations[number]) for number in numbers]
                options = " RESTART IDENTITY" * message.restart_identity
                options += " CASCADE" * message.cascade
                truncating = SQL("TRUNCATE {}" + options).format(SQL(", ").join(tables))
                self.connection.execute(truncating)

    def _change(self, statement: Composed, values: list[Any]) -> None:
        # Values are given as text, without a type: the server reads them as the column's.
        changed = self.connection.execute(statement, values).rowcount
        if changed != 1:
            query = statement.as_string(self.connection)
            raise SystemExit(f"expected one row to change, not {changed}: {query}, {values}")


def table(relation: pf.Relation) -> Composable:
    """A table's name, quoted."""
    return Identifier(relation.namespace, relation.name)


def which_row(relation: pf.Relation, row: Any) -> tuple[Composable, list[Any]]:
    """The condition that finds a row by its key, and its values."""
    keys = [i for i, column in enumerate(relation.columns) if column.is_key]
    names = [Identifier(relation.columns[i].name) for i in keys]
    values = [row.text(i) for i in keys]
    if relation.replica_identity != "f":
        return SQL(" AND ").join(SQL("{} = %s").format(name) for name in names), values
    # With REPLICA IDENTITY FULL all columns are the key: some may be NULL, and of rows that are
    # equal only one is meant.
    equal = SQL(" AND ").join(SQL("{} IS NOT DISTINCT FROM %s").format(name) for name in names)
    one = SQL("ctid = (SELECT ctid FROM {} WHERE {} LIMIT 1)").format(table(relation), equal)
    return one, values


def consume(source: str, publication: str, target: str, stop: threading.Event) -> None:
    """Apply what comes until `stop` is set."""
    with psycopg.connect(target, autocommit=True) as connection:
        connection.execute(
            "CREATE TABLE IF NOT EXISTS consumed (slot text PRIMARY KEY, lsn text, timeline int)"
        )
        connection.execute("INSERT INTO consumed VALUES (%s) ON CONFLICT DO NOTHING", [publication])
        known = connection.execute(POSITION, [publication]).fetchone()
        lsn, timeline = known or (None, None)
        applying = Target(connection)

        def move(end_lsn: int, transaction: pf.transactions.Transaction | None = None) -> None:
            """Store a position, with what the transaction that ends there has done."""
            nonlocal known
            with connection.transaction():
                # While this program waited for the slot, another one may have applied what comes
                # now. So the position is looked up again, and locked.
                if connection.execute(f"{POSITION} FOR UPDATE", [publication]).fetchone() != known:
                    raise SystemExit("another consumer has moved the position: start again")
                known = (pf.format_lsn(end_lsn), stream.timeline)
                for message in transaction or ():
                    applying.apply(message)
                connection.execute(
                    "UPDATE consumed SET lsn = %s, timeline = %s WHERE slot = %s",
                    [*known, publication],
                )

        with connect(
            source,
            slot=publication,
            publications=[publication],
            # A slot that is gone later is not made again: changes would be missing.
            create_slot=lsn is None,
            start_lsn=None if lsn is None else pf.parse_lsn(lsn),
            start_timeline=timeline,
            on_idle=move,
        ) as stream:
            for transaction in stream.transactions(stop=stop):
                move(transaction.end_lsn, transaction)
                stream.acknowledge(transaction)


def main() -> None:
    """Run with the command line's arguments."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("source", help="the database to read from: a connection string or URL")
    parser.add_argument("publication", help="a publication of it")
    parser.add_argument("target", help="the database to write to")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    consume(arguments.source, arguments.publication, arguments.target, stop)


if __name__ == "__main__":
    main()
