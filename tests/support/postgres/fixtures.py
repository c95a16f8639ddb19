"""Servers and databases for tests: one server per version and session."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from psycopg import sql
from support.waiting import wait_until

from pgoutput_fast.embedded import EmbeddedServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def pg16() -> Iterator[EmbeddedServer]:
    with EmbeddedServer(16, {"log_min_messages": "fatal"}) as server:
        yield server


@pytest.fixture(scope="session")
def pg18() -> Iterator[EmbeddedServer]:
    with EmbeddedServer(18, {"log_min_messages": "fatal"}) as server:
        yield server


@pytest.fixture(params=[pytest.param(16, marks=pytest.mark.slow), 18], ids="pg{}".format)
def server(request: pytest.FixtureRequest) -> EmbeddedServer:
    """Each server in turn."""
    found: EmbeddedServer = request.getfixturevalue(f"pg{request.param}")
    return found


class Database:
    """A database of its own, on a server that others use too."""

    def __init__(self, server: EmbeddedServer, name: str) -> None:
        self.server = server
        self.name = name
        self.dsn = server.dsn(name)

    def connect(self, **options: Any) -> psycopg.Connection[Any]:
        options = {"client_encoding": "UTF8", **options}
        return psycopg.connect(self.dsn, autocommit=True, **options)

    def execute(self, *statements: str) -> list[tuple[Any, ...]]:
        """Run statements, each a transaction; the rows of the last one."""
        rows: list[tuple[Any, ...]] = []
        with self.connect() as connection:
            for statement in statements:
                cursor = connection.execute(statement.encode())
                rows = cursor.fetchall() if cursor.description else []
        return rows

    def slots(self) -> dict[str, bool]:
        """Names of the database's slots, and whether each is in use."""
        return dict(
            self.execute(
                "SELECT slot_name, active FROM pg_replication_slots"
                " WHERE database = current_database()"
            )
        )


@pytest.fixture
def make_database() -> Iterator[Callable[..., Database]]:
    """`make_database(server, encoding="UTF8")`."""
    made: list[Database] = []

    def make(server: EmbeddedServer, encoding: str = "UTF8") -> Database:
        name = f"test_{next(_numbers)}"
        with psycopg.connect(server.dsn(), autocommit=True) as connection:
            connection.execute(
                sql.SQL("CREATE DATABASE {} TEMPLATE template0 ENCODING {}").format(
                    sql.Identifier(name), sql.Literal(encoding)
                )
            )
        made.append(Database(server, name))
        return made[-1]

    yield make
    for database in made:
        with psycopg.connect(database.server.dsn(), autocommit=True) as connection:
            # A test that failed may have left a walsender, and prepared transactions.
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s",
                [database.name],
            )
            wait_until(
                lambda connection=connection, database=database: (  # type: ignore[misc]
                    connection.execute(
                        "SELECT NOT EXISTS (SELECT FROM pg_replication_slots"
                        " WHERE active AND database = %s)",
                        [database.name],
                    ).fetchone()
                    == (True,)
                )
            )
            connection.execute(
                "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots"
                " WHERE database = %s",
                [database.name],
            )
            with psycopg.connect(database.dsn, autocommit=True) as own:
                for (gid,) in own.execute(
                    "SELECT gid FROM pg_prepared_xacts WHERE database = current_database()"
                ).fetchall():
                    own.execute(sql.SQL("ROLLBACK PREPARED {}").format(sql.Literal(gid)))
            connection.execute(
                sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(database.name))
            )


@pytest.fixture
def database(
    server: EmbeddedServer, make_database: Callable[[EmbeddedServer], Database]
) -> Database:
    """A new database on each server in turn."""
    return make_database(server)


@pytest.fixture
def database18(
    pg18: EmbeddedServer, make_database: Callable[[EmbeddedServer], Database]
) -> Database:
    """A new database on the newest server, for what no version changes."""
    return make_database(pg18)
