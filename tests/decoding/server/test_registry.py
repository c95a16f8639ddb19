"""Types of users on a live server: looked up, decoded, and compared with what psycopg SELECTs."""

from __future__ import annotations

import asyncio
import pickle
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import psycopg
import psycopg.rows
import pytest
from psycopg.types import TypeInfo
from psycopg.types.composite import CompositeInfo, register_composite
from psycopg.types.multirange import Multirange, MultirangeInfo, register_multirange
from psycopg.types.range import Range, RangeInfo, register_range
from support.expected_errors import expect_error

import pgoutput_fast as pf

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from conftest import Database

    from pgoutput_fast.embedded import EmbeddedServer

TYPES = """
CREATE SCHEMA "Odd ""schema";
CREATE TYPE mood AS ENUM ('sad', 'ok', '', 'with space', 'q''y"z', 'NULL', 'ünï', '{}');
ALTER TYPE mood ADD VALUE 'between' BEFORE 'ok';
CREATE TYPE "Odd ""schema"."Weird, type" AS ENUM ('A', 'a');
CREATE DOMAIN posint AS int CHECK (VALUE > 0);
CREATE DOMAIN small AS posint;
CREATE DOMAIN price AS numeric(10,2);
CREATE DOMAIN halfprice AS price;
CREATE DOMAIN prices AS numeric(6,1)[];
CREATE DOMAIN feeling AS mood;
CREATE TYPE addr AS (street text, gone int, num price, tags text[], r int4range, d date);
ALTER TYPE addr DROP ATTRIBUTE gone;
CREATE TYPE nest AS (a addr, e mood, many addr[], b bool, "a field" posint);
CREATE DOMAIN daddr AS addr;
CREATE TYPE nothing AS ();
CREATE TABLE rows_of (x int, y text);
CREATE TABLE unused_rows (x int, y text);
CREATE TYPE textrange AS RANGE (subtype = text);
CREATE TYPE pricerange AS RANGE (subtype = price, multirange_type_name = many_prices);
"""
"""Statements, one a line, that make a type of each kind."""

# column, its type, values as SQL; each value is a row with NULL everywhere else
COLUMNS: list[tuple[str, str, list[str]]] = [
    ("a", "int[]", ["'{}'", "'{1,NULL,-3}'", "'{{1,2},{3,4}}'", "'[-1:1]={1,2,3}'",
                    "'[0:0][5:6][2:3]={{{1,2},{NULL,4}}}'"]),
    ("t", "text[]", [
        r"""ARRAY['', NULL, 'NULL', 'null', 'a b', 'a"b', E'a\\b', '{', '}', ',', E'\n', 'ü']""",
        "ARRAY[[E'\\x0b', E'\\u00a0'], [E'\\u0085', repeat('x', 3000)]]"]),
    ("bx", "box[]", ["'{(1,1),(0,0);(3,4),(2,2)}'", "'{{(1,1),(0,0)};{NULL}}'"]),
    ("pt", "point[]", ["'{\"(1,2)\",\"(0.5,-1e30)\"}'"]),
    ("iv", "int2vector", ["''", "'1 -2 3'"]),
    ("ov", "oidvector", ["''", "'1 4294967295'"]),
    ("iva", "int2vector[]", ["ARRAY['1 2'::int2vector, '', NULL]"]),
    ("m", "mood", ["'sad'", "''", "'q''y\"z'", "'between'", "'ünï'"]),
    ("ma", "mood[]", ["ARRAY['sad', '', NULL, 'NULL', '{}']::mood[]"]),
    ("w", '"Odd ""schema"."Weird, type"', ["'A'"]),
    ("wa", '"Odd ""schema"."Weird, type"[]', ["'{A,NULL,a}'"]),
    ("s", "small", ["7"]),
    ("sa", "small[]", ["'{1,NULL}'"]),
    ("hp", "halfprice", ["12.5"]),
    ("hpa", "halfprice[]", ["'{12.5,NULL}'"]),
    ("pa", "prices", ["'{1,2.25}'", "'[5:5]={3}'"]),
    ("paa", "prices[]", ["'{\"{1,NULL}\",NULL,\"{}\"}'"]),
    ("f", "feeling", ["'ok'"]),
    ("ad", "addr", [
        "ROW(NULL, NULL, NULL, NULL, NULL)",
        r"""ROW('', 1, '{}', 'empty', '2024-02-29')""",
        r"""ROW('x,y(z) "q" \ ', 1.5, ARRAY['a,b', NULL, '"', ''], '[1,5)', '0001-01-01')"""]),
    ("ada", "addr[]", [
        "ARRAY[ROW('(,)', 2, '{a}', '(,)', NULL)::addr, NULL]"]),
    ("ne", "nest", [
        ("ROW(ROW('a \"b\\', 1, '{\"x y\"}', '[1,2]', NULL), 'q''y\"z', "
        "ARRAY[ROW('s', 1, NULL, NULL, NULL)::addr, NULL], true, 3)"),
        "ROW(NULL, NULL, '{}', NULL, NULL)"]),
    ("da", "daddr", ["ROW('x', 2, '{}', NULL, NULL)"]),
    ("no", "nothing", ["ROW()::nothing"]),
    ("ro", "rows_of", ["ROW(1, 'two')"]),
    ("r4", "int4range", ["'[1,5)'", "'empty'", "'(,5)'", "'[5,)'", "'(,)'"]),
    ("rt", "tstzrange", ["'[2024-01-01 00:00:00+00,2024-06-01 12:00:00.5+00)'"]),
    ("rd", "daterange[]", ["ARRAY['[2024-01-01,2024-02-01)'::daterange, 'empty', NULL]"]),
    ("tr", "textrange", ["'[a,b)'", "'[\"\",\"a \"\"b\\\\,\"]'", "'(\"(\",\"]\")'", "'(,)'"]),
    ("tra", "textrange[]", ["ARRAY['[a,b)'::textrange, '[\"\",\"z \"\"\"]']"]),
    ("mr", "int8multirange", ["'{}'", "'{(,0),[10,20)}'"]),
    ("mt", "textmultirange", ["'{[a,b),[\"c,}\",\"d\\\\\"\"\"]}'"]),
    ("pr", "pricerange", ["'[1,2.5]'"]),
    ("mp", "many_prices", ["'{[1,2.5],(3,)}'"]),
    ("mpa", "many_prices[]", ["ARRAY['{[1,2.5]}'::many_prices, NULL, '{}']"]),
]  # fmt: skip


def make_types(database: Database) -> None:
    database.execute(*TYPES.strip().splitlines())
    columns = ", ".join(f"{name} {type_}" for name, type_, _ in COLUMNS)
    database.execute(
        f"CREATE TABLE t (id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, {columns})",
        "CREATE PUBLICATION p FOR TABLE t",
        "SELECT pg_create_logical_replication_slot('s', 'pgoutput')",
    )


def frames_of(database: Database, *, binary: bool) -> list[bytes]:
    with database.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        rows = connection.execute(
            "SELECT data FROM pg_logical_slot_peek_binary_changes('s', NULL, NULL, "
            "'proto_version', '1', 'publication_names', 'p', 'binary', %s)",
            ["true" if binary else "false"],
        ).fetchall()
    return [row[0] for row in rows]


def inserts(impl: ModuleType, frames: list[bytes], registry: pf.TypeRegistry | None) -> list[Any]:
    decoder = impl.Decoder(registry=registry)
    return [m.new for m in decoder.decode_many(frames) if isinstance(m, impl.Insert)]


def look_up(database: Database) -> pf.TypeRegistry:
    with database.connect() as connection:
        return pf.TypeRegistry.from_connection(connection)


def as_ours(value: Any) -> Any:
    """A value of psycopg's with our ranges in the place of its own."""
    if isinstance(value, Range):
        if value.isempty:
            return pf.Range(empty=True)
        return pf.Range(value.lower, value.upper, value.bounds)
    if isinstance(value, (list, Multirange)):
        return [as_ours(part) for part in value]
    if isinstance(value, tuple):
        return tuple([as_ours(part) for part in value])
    return value


def know_types(connection: psycopg.Connection[Any]) -> None:
    """Tell psycopg of the types. It has no way to learn of domains within other types by itself."""
    for name, base in (("posint", "int4"), ("small", "int4"), ("price", "numeric"),
                       ("halfprice", "numeric")):  # fmt: skip
        domain = TypeInfo.fetch(connection, name)
        assert domain is not None
        domain.register(connection)
        base_loader = connection.adapters.get_loader(
            connection.adapters.types[base].oid, psycopg.pq.Format.TEXT
        )
        assert base_loader is not None
        connection.adapters.register_loader(domain.oid, base_loader)
    for name in ("mood", '"Odd ""schema"."Weird, type"'):
        enum = TypeInfo.fetch(connection, name)
        assert enum is not None
        enum.register(connection)
    for name in ("addr", "nest", "rows_of"):
        register_composite(CompositeInfo.fetch(connection, name), connection)  # type: ignore[arg-type]
    for name in ("textrange", "pricerange"):
        register_range(RangeInfo.fetch(connection, name), connection)  # type: ignore[arg-type]
    for name in ("textmultirange", "many_prices"):
        register_multirange(MultirangeInfo.fetch(connection, name), connection)  # type: ignore[arg-type]


# psycopg leaves these as text: vectors, arrays of a domain over arrays, composites without fields.
NOT_PSYCOPGS = {"iv", "ov", "iva", "paa", "no"}


def test_every_kind_of_type(both: tuple[ModuleType, ModuleType], database18: Database) -> None:
    make_types(database18)
    for name, _, values in COLUMNS:
        for value in values:
            database18.execute(f"INSERT INTO t ({name}) VALUES ({value})")
    with database18.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        know_types(connection)
        selected = connection.execute("SELECT * FROM t ORDER BY id").fetchall()
    registry = look_up(database18)
    travelled = pf.TypeRegistry.from_json(pickle.loads(pickle.dumps(registry)).to_json())
    assert travelled == registry
    frames = {binary: frames_of(database18, binary=binary) for binary in (False, True)}
    for impl in both:
        texts, binaries = (inserts(impl, frames[binary], travelled) for binary in (False, True))
        cases = [(name, value) for name, _, values in COLUMNS for value in values]
        assert len(texts) == len(binaries) == len(selected) == len(cases)
        for text, binary, row, (name, _) in zip(texts, binaries, selected, cases, strict=True):
            at = [column for column, _, _ in COLUMNS].index(name) + 1
            assert (text.kind(at), binary.kind(at)) == ("t", "b")
            value = text[name]
            assert repr(binary[name]) == repr(value), name
            assert type(binary[name]) is type(value)
            assert binary.text(at) == text.text(at), name
            if name not in NOT_PSYCOPGS:
                assert as_ours(row[at]) == plain(value), name
            if name in ("ad", "ne", "ro"):
                assert type(value)._fields == type(row[at])._fields


def plain(value: Any) -> Any:
    """An array without its bounds, which psycopg drops."""
    return list(value) if type(value) is pf.Array else value


def test_what_is_looked_up(database18: Database) -> None:
    make_types(database18)
    database18.execute("CREATE EXTENSION vector")
    registry = look_up(database18)
    types = {found.name: found for found in registry.catalog.values()}
    assert types["mood"].labels == (
        "sad", "between", "ok", "", "with space", "q'y\"z", "NULL", "ünï", "{}",
    )  # fmt: skip
    assert [name for name, *_ in types["addr"].fields] == ["street", "num", "tags", "r", "d"]
    assert types["addr"].fields[1][1] == types["price"].oid
    assert (types["price"].element, types["price"].modifier) == (1700, 655366)
    assert types["halfprice"].modifier == -1
    assert registry.known(types["halfprice"].oid).modifier == 655366
    assert types["_addr"].element == types["addr"].oid
    assert types["pricerange"].element == types["price"].oid
    assert types["many_prices"].element == types["pricerange"].oid
    assert types["Weird, type"].namespace == 'Odd "schema'
    assert types["vector"].extension == "vector"
    assert types["mood"].extension == ""
    # Of the tables' row types the one that a column has, and what is in every database.
    assert "rows_of" in types
    assert not {"unused_rows", "_unused_rows", "t", "pg_class", "_pg_class"} & set(types)
    assert types["sql_identifier"].namespace == "information_schema"
    assert len(registry.to_json()) < 40_000
    assert registry.known(types["vector"].oid).entry is not None
    assert registry.known(types["_vector"].oid).element is not None


def test_the_connection_is_left_as_it_was(database18: Database) -> None:
    database18.execute("CREATE TYPE mood AS ENUM ('sad')")
    expected = look_up(database18)
    with psycopg.connect(database18.dsn, row_factory=psycopg.rows.dict_row) as connection:
        assert pf.TypeRegistry.from_connection(connection) == expected
        assert connection.info.transaction_status == psycopg.pq.TransactionStatus.IDLE
        connection.execute("CREATE TYPE own AS (x int)")
        assert "own" in {
            found.name for found in pf.TypeRegistry.from_connection(connection).catalog.values()
        }
        assert connection.info.transaction_status == psycopg.pq.TransactionStatus.INTRANS
        connection.rollback()


def test_types_that_are_altered_while_frames_arrive(impl: ModuleType, database18: Database) -> None:
    database18.execute(
        "CREATE TYPE mood AS ENUM ('sad')",
        "CREATE TYPE pair AS (x int, y int)",
        "CREATE TABLE t (m mood, p pair)",
        "CREATE PUBLICATION p FOR TABLE t",
        "SELECT pg_create_logical_replication_slot('s', 'pgoutput')",
        "INSERT INTO t VALUES ('sad', '(1,2)')",
    )
    registry = look_up(database18)
    database18.execute(
        "ALTER TYPE mood ADD VALUE 'happy'",
        "ALTER TYPE pair ADD ATTRIBUTE z text CASCADE",
        "INSERT INTO t VALUES ('happy', '(3,4,five)')",
    )
    for binary in (False, True):
        first, second = inserts(impl, frames_of(database18, binary=binary), registry)
        assert first.values() == ("sad", (1, 2))
        assert second["m"] == "happy"
        with expect_error(pf.DecodeError, code="bad_value", column="p"):
            second.values()
    with database18.connect() as connection:
        registry.update_from(connection)
    assert second["p"] == (3, 4, "five")
    assert second["p"].z == "five"
    with expect_error(pf.DecodeError, code="bad_value", column="p"):
        first.values()
    # A renamed type keeps its old name in the stream, which says no more of it.
    database18.execute("ALTER TYPE mood RENAME TO feeling", "INSERT INTO t VALUES ('happy', NULL)")
    with database18.connect() as connection:
        registry.update_from(connection)
    for binary, expected in ((False, "happy"), (True, b"happy")):
        assert inserts(impl, frames_of(database18, binary=binary), registry)[2]["m"] == expected


def test_types_that_are_altered_and_nothing_shows_it(
    impl: ModuleType, database18: Database
) -> None:
    """What the documentation of TypeRegistry says of each way to alter a type."""
    database18.execute(
        "CREATE TYPE mood AS ENUM ('sad', 'ok')",
        "CREATE DOMAIN price AS numeric(10,2)",
        "CREATE TYPE span AS RANGE (subtype = int4)",
        "CREATE TYPE pair AS (x int, y int)",
        "CREATE TYPE mixed AS (x int, y int)",
        "CREATE TYPE less AS (x int, y int)",
        "CREATE TABLE t (m mood, d price, s span, p pair, q mixed, l less)",
        "CREATE PUBLICATION p FOR TABLE t",
        "SELECT pg_create_logical_replication_slot('s', 'pgoutput')",
        "INSERT INTO t VALUES ('sad', 1, '[1,2)', '(1,2)', '(1,2)', '(1,2)')",
    )
    registry = look_up(database18)
    with database18.connect() as connection:
        assert registry.update_from(connection) == ()
    database18.execute(
        "ALTER TYPE mood RENAME VALUE 'sad' TO 'blue'",
        "ALTER DOMAIN price ADD CHECK (VALUE > 0)",
        "ALTER TABLE t DROP COLUMN s",
        "DROP TYPE span",
        "CREATE TYPE span AS RANGE (subtype = text)",
        "ALTER TABLE t ADD COLUMN s span",
        "ALTER TYPE pair DROP ATTRIBUTE y, ADD ATTRIBUTE z int",
        "ALTER TYPE mixed DROP ATTRIBUTE y, ADD ATTRIBUTE z text",
        "ALTER TYPE less DROP ATTRIBUTE y",
        "INSERT INTO t VALUES ('blue', 1.5, '(3,4)', '(3,4)', '(3)', '[a,b)')",
    )
    stale = pf.TypeRegistry.from_json(registry.to_json())
    with database18.connect() as connection:
        altered = registry.update_from(connection)
    assert [found.name for found in altered] == ["mood", "pair", "mixed", "less"]
    for binary in (False, True):
        frames = frames_of(database18, binary=binary)
        new = inserts(impl, frames, stale)[1]
        assert (new["m"], new["d"]) == ("blue", Decimal("1.50"))
        # Another OID, of which the catalogue does not know.
        assert new["s"] == (new.raw(5) if binary else "[a,b)")
        assert new["p"] == (3, 4)
        assert new["p"]._fields == ("x", "y")  # which it is not, and nothing says so
        with expect_error(pf.DecodeError, code="bad_value", column="l"):
            new["l"]
        if binary:
            with expect_error(pf.DecodeError, code="bad_value", column="q"):
                new["q"]
        else:
            assert new["q"]._fields == ("x", "y")
        new = inserts(impl, frames, registry)[1]
        assert (new["s"], new["p"], new["l"]) == (pf.Range("a", "b"), (3, 4), (3,))
        assert (new["p"]._fields, new["q"]._fields) == (("x", "z"), ("x", "z"))
        assert new["q"].z == "4"


def test_one_type_that_nests_too_deep_costs_no_other(
    impl: ModuleType, database18: Database
) -> None:
    database18.execute(
        "CREATE TYPE c0 AS (x int)",
        *[f"CREATE TYPE c{i} AS (x c{i - 1})" for i in range(1, 33)],
        "CREATE TYPE pair AS (x int, y int)",
        "CREATE TABLE t (deep c32, low c1, p pair)",
        "CREATE PUBLICATION p FOR TABLE t",
        "SELECT pg_create_logical_replication_slot('s', 'pgoutput')",
        "INSERT INTO t VALUES (ROW(NULL), ROW(ROW(1)), ROW(1, 2))",
    )
    registry = look_up(database18)
    for binary in (False, True):
        (new,) = inserts(impl, frames_of(database18, binary=binary), registry)
        assert (new["low"], new["p"]) == (((1,),), (1, 2))
        assert new["deep"] == (new.raw(0) if binary else "()")


def test_an_asynchronous_connection_is_refused(database18: Database) -> None:
    async def look_up_there() -> None:
        async with await psycopg.AsyncConnection.connect(database18.dsn) as connection:
            with pytest.raises(TypeError):
                pf.TypeRegistry.from_connection(connection)

    asyncio.run(look_up_there())


def test_other_servers(pg16: EmbeddedServer, make_database: Callable[..., Database]) -> None:
    database = make_database(pg16)
    make_types(database)
    database.execute("INSERT INTO t (ne) VALUES (ROW(NULL, 'ok', NULL, true, 3))")
    registry = look_up(database)
    for binary in (False, True):
        (row,) = inserts(pf, frames_of(database, binary=binary), registry)  # type: ignore[arg-type]
        assert row["ne"] == (None, "ok", None, True, 3)
