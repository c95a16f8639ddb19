"""Random values of every type that the server has: sent as text and as binary, and back to it.

The server makes both forms of each value by logical decoding, both are decoded to one value, and
what the renderer prints of it the server takes for the value that it has.

Each type is tried on the first server that has it: the embedded one, then those that are found. A
type that none of them has is skipped by name.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import psycopg
import psycopg.rows
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from support.nightly import cases
from support.postgres.servers import found_servers
from support.postgres.snapshot_values import USER_TYPES
from support.values.random_values import (
    FROM_BINARY_DIFFERENT,
    NO_ARRAYS,
    NO_BINARY,
    NO_EQUALITY,
    VALUES,
    array,
)
from support.values.render import Renderer

import pgoutput_fast as pf
from pgoutput_fast.embedded import EmbeddedServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

OLDEST = 14  # with the option `binary`
EXAMPLES = 6
OFTEN = [
    "bool", "bytea", "int4", "float8", "numeric", "text", "date", "time", "timestamptz", "interval",
    "uuid", "jsonb", "inet", "int4range", "money",
]  # fmt: skip
"""Types whose values are made in each run, not each night alone."""
EXTENSIONS = {
    "vector": ["vector", "vector(3)", "halfvec", "sparsevec"],
    "postgis": ["geometry", "geography"],
    "hstore": ["hstore"],
    "citext": ["citext"],
    "ltree": ["ltree", "lquery", "ltxtquery"],
    "cube": ["cube"],
    "seg": ["seg"],
    "isn": ["ean13", "isbn"],
    "intarray": ["query_int"],
}
"""Of each extension the types; not all servers have it."""
CATALOG = """
SELECT t.oid::int8, t.typname AS name, t.typtype::text, t.typelem::int8, t.typcategory::text,
    t.typdelim::text, t.typbasetype::int8, r.rngsubtype::int8 AS range_subtype,
    m.rngtypid::int8 AS range_oid, format_type(t.oid, NULL) AS format_type,
    (SELECT json_agg(json_build_array(a.attnum, a.attname, a.atttypid::int8, a.atttypmod)
        ORDER BY a.attnum) FROM pg_attribute a
        WHERE a.attrelid = t.typrelid AND a.attnum > 0 AND NOT a.attisdropped) AS attributes
FROM pg_type t LEFT JOIN pg_range r ON r.rngtypid = t.oid
    LEFT JOIN pg_range m ON m.rngmultitypid = t.oid
"""


class Live:
    """A database with a slot, a table per type, and what its catalogue says."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self.connection = connection
        connection.execute("SET TimeZone = 'UTC'")
        for statement in USER_TYPES:
            connection.execute(statement.encode())
        self.missing = set()
        for extension, names in EXTENSIONS.items():
            try:
                connection.execute(f"CREATE EXTENSION {extension}".encode())
            except psycopg.errors.FeatureNotSupported:
                self.missing.update(names)
        try:
            connection.execute("SELECT '<a/>'::xml")
        except psycopg.errors.FeatureNotSupported:
            self.missing.add("xml")
        connection.execute("CREATE PUBLICATION p FOR ALL TABLES")
        connection.execute("SELECT pg_create_logical_replication_slot('s', 'pgoutput')")
        with connection.cursor(row_factory=psycopg.rows.dict_row) as cursor:
            self.render = Renderer(cursor.execute(CATALOG).fetchall())
        self.registry = pf.TypeRegistry.from_connection(connection)

    def frames(self, function: str, *, binary: bool) -> list[bytes]:
        rows = self.connection.execute(
            f"SELECT data FROM pg_logical_slot_{function}_binary_changes('s', NULL, NULL, "
            f"'proto_version', '1', 'publication_names', 'p', 'binary', '{binary}')".encode()
        )
        return [row[0] for row in rows]


@contextlib.contextmanager
def database(server: EmbeddedServer) -> Iterator[Live]:
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute("CREATE DATABASE roundtrip")
    with psycopg.connect(
        server.dsn("roundtrip"), autocommit=True, prepare_threshold=None
    ) as connection:
        yield Live(connection)
        connection.execute("SELECT pg_drop_replication_slot('s')")
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute("DROP DATABASE roundtrip WITH (FORCE)")


class Servers:
    """The databases, each made when a type is the first that those before it do not have."""

    def __init__(self, first: Live, enter: Callable[[Any], Any]) -> None:
        self.lives = [first]
        self.refused: list[str] = []
        self.waiting = found_servers()
        self.enter = enter

    def with_type(self, name: str) -> Live | None:
        for live in self.lives:
            if name not in live.missing:
                return live
        while self.waiting:
            bindir = self.waiting.pop(0)
            try:
                server = self.enter(EmbeddedServer(bindir=bindir))
            except pf.PgOutputError as error:
                self.refused.append(f"{bindir}: {error}")
                continue
            if server.version < OLDEST:
                self.refused.append(f"{bindir}: PostgreSQL {server.version}")
                continue
            self.lives.append(self.enter(database(server)))
            if name not in self.lives[-1].missing:
                return self.lives[-1]
        return None


@pytest.fixture(scope="module")
def servers(pg18: EmbeddedServer) -> Iterator[Servers]:
    with contextlib.ExitStack() as stack:
        yield Servers(stack.enter_context(database(pg18)), stack.enter_context)


POLICIES = pf.Policies(infinity="text", out_of_range="text")


@pytest.mark.slow
@pytest.mark.parametrize("name", cases(VALUES, OFTEN))
def test_random_values_there_and_back(
    servers: Servers, both: tuple[ModuleType, ModuleType], name: str
) -> None:
    live = servers.with_type(name)
    if live is None:
        refused = "".join(f"; not used: {reason}" for reason in servers.refused)
        pytest.skip(f"none of the {len(servers.lives)} servers found has {name}{refused}")
    arrays = name not in NO_ARRAYS
    columns = {"v": name} | ({"a": f"{name}[]"} if arrays else {})
    delimiter = ";" if name == "box" else ","
    execute = live.connection.execute
    definitions = ", ".join(f"{column} {of}" for column, of in columns.items())
    execute("DROP TABLE IF EXISTS t")
    execute(f"CREATE TABLE t (id int, {definitions})".encode())
    strategy = st.tuples(VALUES[name], *[array(VALUES[name], delimiter)] * arrays)

    @seed(18)
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, Phase.shrink],
    )
    @given(st.lists(strategy, min_size=4, max_size=8))
    def check(rows: list[tuple[str, ...]]) -> None:
        values = ", ".join(f"%s::{of}" for of in columns.values())
        with live.connection.cursor() as cursor:
            cursor.execute("TRUNCATE t")
            insert = f"INSERT INTO t VALUES (%s, {values})".encode()
            cursor.executemany(insert, [(n, *row) for n, row in enumerate(rows)])
        shown = ", ".join(f"format('%s', {column})" for column in columns)
        texts = execute(f"SELECT {shown} FROM t ORDER BY id".encode()).fetchall()
        as_text = live.frames("peek", binary=False)
        as_binary = live.frames("get", binary=True)
        back: set[tuple[str, str, int]] = set()
        for impl in both:
            decoded = []
            for frames in (as_text, as_binary):
                decoder = impl.Decoder(POLICIES, registry=live.registry)
                messages = decoder.decode_many(frames)
                decoded.append([m for m in messages if isinstance(m, impl.Insert)])
            assert len(decoded[0]) == len(decoded[1]) == len(rows)
            for number, (text, binary) in enumerate(zip(*decoded, strict=True)):
                for at, column in enumerate(text.relation.columns[1:], 1):
                    sent = "t" if name in NO_BINARY else "b"
                    assert (text.new.kind(at), binary.new.kind(at)) == ("t", sent)
                    one, other = text.new[at], binary.new[at]
                    printed = live.render(one, column.type_id)
                    assert printed == texts[number][at - 1]
                    if name in FROM_BINARY_DIFFERENT:
                        printed = live.render(other, column.type_id)
                    else:
                        assert (type(one), repr(one)) == (type(other), repr(other))
                    back.add((printed, column.name, number))
        for column_name, of in columns.items():
            # a value that the server reads, prints the same and holds to be equal
            equal = f"%s::{of} IS NOT DISTINCT FROM {column_name}"
            if name in NO_EQUALITY:
                equal = f"format('%%s', %s::{of}) = format('%%s', {column_name})"
            query = f"SELECT {equal} FROM t WHERE id = %s".encode()
            for printed, of_column, number in sorted(back):
                if of_column == column_name:
                    assert execute(query, [printed, number]).fetchone() == (True,), printed

    check()
