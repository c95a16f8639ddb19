"""Keep the change tables of a sync in a PostgreSQL database.

    python examples/change_target.py CHANGE_LOG DSN

A capture writes the change log. Each change table has the columns commit_lsn, seq, op, before,
after and unchanged; the last three are jsonb. `unchanged` lists the columns whose value the server
did not send: they are null in `after`. The table pgoutput_fast_progress says how far all are.
"""

from __future__ import annotations

import hashlib
import json
import signal
import sys
import threading
from typing import Any

import psycopg
from psycopg import sql

from pgoutput_fast.apply import sync
from pgoutput_fast.targets import ChangeTarget


def short(name: str) -> str:
    """Return a name that PostgreSQL does not cut: it takes 63 bytes."""
    content = name.encode()
    if len(content) <= 63:
        return name
    start = content[:46].decode(errors="ignore")
    return f"{start}~{hashlib.sha256(content).hexdigest()[:16]}"


def as_json(value: Any) -> str | None:
    """Return a value as JSON. NaN becomes a text, as JSON has no number for it."""
    if value is None:
        return None
    text = json.dumps(value, default=str)
    return json.dumps(json.loads(text, parse_constant=str))


class PostgresTarget(ChangeTarget):
    """Change tables in a schema of a PostgreSQL database."""

    def __init__(self, dsn: str, schema: str = "changes") -> None:
        self.name = f"postgres {schema}"
        self._schema = schema
        self._connection = psycopg.connect(dsn, autocommit=True)
        self._run("CREATE SCHEMA IF NOT EXISTS {}", schema)
        self._run(
            "CREATE TABLE IF NOT EXISTS {}.pgoutput_fast_progress "
            "(one int PRIMARY KEY DEFAULT 1, text text)", schema,
        )  # fmt: skip

    def _run(self, query: Any, *names: str) -> Any:
        return self._connection.execute(sql.SQL(query).format(*map(sql.Identifier, names)))

    def load(self) -> str | None:
        """Return the text that is stored."""
        found = self._run("SELECT text FROM {}.pgoutput_fast_progress", self._schema).fetchone()
        return None if found is None else str(found[0])

    def begin(self) -> None:
        """Begin a transaction, which no other sync has meanwhile."""
        self._connection.execute("BEGIN")
        self._run("LOCK TABLE {}.pgoutput_fast_progress", self._schema)

    def prepare(self, table: str, schema: Any) -> bool:
        """Make a table. It has rows as jsonb, which takes columns of all types."""
        del schema
        self._run(
            "CREATE TABLE IF NOT EXISTS {}.{} (commit_lsn numeric, seq bigint, op text, "
            "before jsonb, after jsonb, unchanged jsonb, PRIMARY KEY (commit_lsn, seq))",
            self._schema, short(table),
        )  # fmt: skip
        return True

    def append(self, table: str, changes: Any) -> None:
        """Copy changes into a table."""
        names = map(sql.Identifier, (self._schema, short(table)))
        with self._connection.cursor().copy(
            sql.SQL("COPY {}.{} FROM STDIN").format(*names)
        ) as copy:
            for row in changes.to_pylist():
                parts = [row["before"], row["after"], row["unchanged"]]
                copy.write_row([row["commit_lsn"], row["seq"], row["op"], *map(as_json, parts)])

    def rename(self, table: str, name: str) -> None:
        """Rename a table."""
        names = self._schema, short(table), short(name)
        self._run("ALTER TABLE IF EXISTS {}.{} RENAME TO {}", *names)

    def commit(self, progress: str) -> None:
        """Store the text, and commit."""
        self._run("DELETE FROM {}.pgoutput_fast_progress", self._schema)
        store = sql.SQL("INSERT INTO {}.pgoutput_fast_progress (text) VALUES (%s)")
        self._connection.execute(store.format(sql.Identifier(self._schema)), [progress])
        self._connection.execute("COMMIT")

    def rollback(self) -> None:
        """Give up the transaction."""
        self._connection.rollback()

    def close(self) -> None:
        """Close the connection, which gives up a transaction too."""
        self._connection.close()


def main() -> None:
    """Run with the command line's arguments."""
    if len(sys.argv) != 3:
        sys.exit("usage: change_target.py CHANGE_LOG DSN")
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    change_log, dsn = sys.argv[1:]
    sync(segments=change_log, target=PostgresTarget(dsn), stop=stop)


if __name__ == "__main__":
    main()
