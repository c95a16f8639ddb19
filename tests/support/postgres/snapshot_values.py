"""Values of every type, as a snapshot and as a stream bring them."""

from __future__ import annotations

import contextlib
import itertools
from typing import TYPE_CHECKING, Any

import psycopg
import pyarrow as pa
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from support.postgres.snapshots import peek
from support.values.random_values import NO_ARRAYS, VALUES, array

import pgoutput_fast as pf
from pgoutput_fast.replication import snapshot

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["USER_TYPES", "check_values", "columns_of"]

USER_TYPES = (
    "CREATE TYPE mood AS ENUM ('sad', '', 'with space', 'q''y\"z', 'NULL', 'ünï', '{},')",
    "CREATE DOMAIN price AS numeric(10,2)",
    "CREATE DOMAIN ints AS int[]",
    "CREATE TYPE addr AS (street text, num price, tags text[], r int4range, m mood)",
    "CREATE TYPE nest AS (a addr, many addr[], at timestamptz)",
    "CREATE TYPE textrange AS RANGE (subtype = text)",
    "CREATE DOMAIN feeling AS mood",
    "CREATE DOMAIN home AS addr",
    "CREATE DOMAIN span AS int4range",
    "CREATE DOMAIN cheap AS price",
)
EXTENSIONS = ("vector", "hstore", "citext", "ltree", "cube", "seg", "isn", "intarray")
POLICIES = pf.Policies(infinity="text", out_of_range="text", special_values="text", arrays="text")
EXAMPLES = 4
ROWS = 3


def columns_of(batches: Iterable[Any]) -> dict[str, tuple[dict[str, str], list[dict[str, Any]]]]:
    """By table the Arrow type of each column, and the rows in the order of their id."""
    found: dict[str, tuple[dict[str, str], list[dict[str, Any]]]] = {}
    for batch in batches:
        read = pa.record_batch(batch)
        if read.column("op").to_pylist() == ["truncate"]:
            continue
        after = read.column("after")
        types = {field.name: str(field.type) for field in after.type}
        known, rows = found.setdefault(batch.relation.name, (types, []))
        assert known == types
        rows += after.to_pylist()
    for _, rows in found.values():
        rows.sort(key=lambda one: one["id"])
    return found


def _insert(connection: psycopg.Connection[Any], name: str, table: str) -> None:
    kinds, of = [name], [VALUES[name]]
    if name not in NO_ARRAYS:
        kinds.append(f"{name}[]")
        of.append(array(VALUES[name], ";" if name == "box" else ","))
    wanted = ", ".join(f"%s::{kind}" for kind in kinds)
    query = f"INSERT INTO {table} VALUES (%s, {wanted})".encode()
    ids = itertools.count()

    @seed(18)
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    @given(st.lists(st.tuples(*of), min_size=ROWS, max_size=ROWS))
    def insert(rows: list[tuple[str, ...]]) -> None:
        for row in rows:
            with contextlib.suppress(psycopg.DataError):  # older servers have no infinite interval
                connection.execute(query, [next(ids), *row])

    insert()


def check_values(database: Any) -> int:
    """Values of every type that a server has: how many types that were."""
    made: dict[str, str] = {}  # the name of a type → that of its table
    with database.connect() as connection:
        for extension in EXTENSIONS:
            with contextlib.suppress(
                psycopg.errors.FeatureNotSupported, psycopg.errors.UndefinedFile
            ):
                connection.execute(f"CREATE EXTENSION {extension}".encode())
        for statement in ("CREATE TABLE t (id int)", *USER_TYPES):
            connection.execute(statement.encode())
        for n, name in enumerate(VALUES):
            arrays = f", a {name}[]" if name not in NO_ARRAYS else ""
            with contextlib.suppress(psycopg.errors.UndefinedObject):
                connection.execute(f"CREATE TABLE t{n} (id int, v {name}{arrays})".encode())
                made[name] = f"t{n}"
        connection.execute("CREATE PUBLICATION p FOR ALL TABLES")
        slot = f"{database.name}_v"
        connection.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [slot])
        for name, table in list(made.items()):
            try:
                connection.execute(f"INSERT INTO {table} VALUES (-1, NULL)".encode())
                connection.execute(f"SELECT '<a/>'::{name}".encode())
            except psycopg.errors.FeatureNotSupported:
                del made[name]  # this server was built without it
            except psycopg.Error:
                pass  # it is no value of this type
        for name, table in made.items():
            _insert(connection, name, table)
        registry = pf.TypeRegistry.from_connection(connection)
    for binary in (False, True):
        frames = peek(database, slot, "p", binary=binary)
        for known in (None, registry):
            decoder = pf.ColumnarDecoder(POLICIES, registry=known)
            streamed = columns_of(decoder.decode(frames))
            with snapshot(
                database.dsn, ["p"], binary=binary, policies=POLICIES, registry=known
            ) as batches:
                found = columns_of(batches)
            assert set(found) == set(streamed) >= set(made.values())
            for name, table in made.items():
                assert found[table][0] == streamed[table][0], (name, binary, known)
                assert repr(found[table][1]) == repr(streamed[table][1]), (name, binary, known)
                assert len(found[table][1]) > ROWS
    return len(made)
