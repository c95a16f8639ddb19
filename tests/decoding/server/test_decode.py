"""The whole way from a server through psycopg into a Decoder, against what triggers and COPY say.

A seeded random workload of two interleaved sessions writes three tables. Triggers log each change
with its values as text, in the transaction itself, so that what is rolled back is not in the log.
What is decoded must be the log, transaction by transaction, and the tables that follow from it must
be what COPY gives. Both implementations, text and binary tuples.
"""

from __future__ import annotations

import collections
import random
import uuid
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import psycopg
import pytest
from psycopg import sql
from support.expected_errors import expect_error

import pgoutput_fast as pf
from pgoutput_fast.catalog import Catalog, read_catalog
from pgoutput_fast.connections import SESSION_SETTINGS
from pgoutput_fast.replication import connect

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pgoutput_fast.embedded import EmbeddedServer

pytestmark = pytest.mark.server

COLUMNS = {
    "id": "int",
    "part": "text",
    "big": "text",
    "other_big": "text",
    "n": "numeric",
    "price": "numeric(12,2)",
    "f": "float8",
    "r": "float4",
    "small": "int2",
    "huge": "int8",
    "yes": "bool",
    "d": "date",
    "ts": "timestamp",
    "tz": "timestamptz",
    "t": "time",
    "span": "interval",
    "u": "uuid",
    "j": "json",
    "jb": "jsonb",
    "raw": "bytea",
    "list": "int[]",
    "words": "text[]",
    "c": '"char"',
    "mood": "mood",
    "positive": "positive",
    "address": "inet",
    "bits": "varbit",
    "range": "int4range",
}
KEYS = {"plain": ["id"], "pair": ["part", "id"], "whole": ["id"]}


def value(rng: random.Random, column: str) -> str | None:
    """A value's text, by chance NULL, an edge, or long enough to be stored out of line."""
    if column == "part":
        return rng.choice(["a", "b ß", "c'\"\\"])
    if rng.random() < 0.15:
        return None
    if column in ("big", "other_big"):
        size = rng.choice([0, 5, 3000, 9000])
        return "".join(rng.choices("0123456789äöü\n\t", k=size))
    number = rng.randrange(-(10**9), 10**9)
    seconds = rng.randrange(86400)
    clock = f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
    day = f"{rng.randrange(1000, 9999)}-{rng.randrange(1, 13):02}-{rng.randrange(1, 29):02}"
    fraction = rng.choice(["", ".5", ".000001", ".123456"])
    return {
        "n": rng.choice(["NaN", "0.00", "-1e20", f"{number}.{abs(number)}", "1e-30"]),
        "price": f"{number / 100:.2f}",
        "f": rng.choice(["NaN", "-Infinity", "-0", repr(rng.random()), f"{number}e200"]),
        "r": rng.choice(["Infinity", "0.1", repr(rng.random())]),
        "small": str(number % 65536 - 32768),
        "huge": str(number * 9_000_000_000),
        "yes": rng.choice("tf"),
        "d": day,
        "ts": f"{day} {clock}{fraction}",
        "tz": f"{day} {clock}{fraction}{rng.choice(['+00', '-08', '+05:30'])}",
        "t": f"{clock}{fraction}",
        "span": f"{number % 30} mons {-(number % 40)} days {clock}{fraction}",
        "u": str(uuid.UUID(int=rng.getrandbits(128))),
        "j": rng.choice(['{"a" : [1, null]}', '"\\u00e9"', "3.10", "null"]),
        "jb": rng.choice(['{"b": 1, "a": {"x": "é"}}', "[]", "null", "1.50"]),
        "raw": "\\x" + rng.randbytes(rng.choice([0, 1, 40])).hex(),
        "list": rng.choice(["{}", "{1,NULL,3}", "{{1,2},{3,4}}", "[0:1]={7,8}"]),
        "words": rng.choice(["{}", '{"a b","NULL",NULL,"q\\"\\\\"}', "{é}"]),
        "c": rng.choice(["", "x", "\\377"]),
        "mood": rng.choice(["sad", "it's ok"]),
        "positive": str(abs(number)),
        "address": rng.choice(["10.0.0.1", "10.1.0.0/16", "::1"]),
        "bits": rng.choice(["", "1", "1010101010101"]),
        "range": rng.choice(["empty", "[1,5)", "(,3)", "[2,)"]),
    }[column]


def setup() -> Iterator[str]:
    yield "CREATE TYPE mood AS ENUM ('sad', 'it''s ok')"
    yield "CREATE DOMAIN positive AS int CHECK (VALUE >= 0)"
    yield "CREATE TABLE log (id bigserial, xid bigint, name text, op text, old text[], new text[])"
    columns = ", ".join(f"{name} {type_}" for name, type_ in COLUMNS.items())
    for table, key in KEYS.items():
        yield f"CREATE TABLE {table} ({columns}, PRIMARY KEY ({', '.join(key)}))"
        yield f"ALTER TABLE {table} ALTER big SET STORAGE EXTERNAL"
        yield f"ALTER TABLE {table} ALTER other_big SET STORAGE EXTERNAL"
        yield from triggers(table, list(COLUMNS))
    yield "ALTER TABLE whole REPLICA IDENTITY FULL"
    yield f"CREATE PUBLICATION p FOR TABLE {', '.join(KEYS)}"


def triggers(table: str, columns: list[str]) -> Iterator[str]:
    # As the type's output function writes it, which a cast to text does not: 't', not 'true'.
    old, new = (
        ", ".join(
            f"CASE WHEN {row}.{c} IS NOT NULL THEN format('%s', {row}.{c}) END" for c in columns
        )
        for row in ("OLD", "NEW")
    )
    yield f"""
        CREATE OR REPLACE FUNCTION log_{table}() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            INSERT INTO log (xid, name, op, old, new) VALUES (
                pg_current_xact_id()::text::bigint, '{table}', TG_OP,
                CASE WHEN TG_OP IN ('UPDATE', 'DELETE') THEN ARRAY[{old}] END,
                CASE WHEN TG_OP IN ('UPDATE', 'INSERT') THEN ARRAY[{new}] END);
            RETURN NULL;
        END $$"""
    yield f"""CREATE OR REPLACE TRIGGER rows AFTER INSERT OR UPDATE OR DELETE ON {table}
        FOR EACH ROW EXECUTE FUNCTION log_{table}()"""
    yield f"""CREATE OR REPLACE TRIGGER emptied AFTER TRUNCATE ON {table}
        FOR EACH STATEMENT EXECUTE FUNCTION log_{table}()"""


class Session:
    """One of the two sessions. Its ids are its own, so that it never waits for the other."""

    def __init__(self, dsn: str, rng: random.Random, number: int) -> None:
        self.connection = psycopg.connect(dsn, autocommit=True)
        self.rng = rng
        self.number = number
        self.left = 0  # statements until the transaction ends
        for name, setting in SESSION_SETTINGS.items():
            self.connection.execute(
                sql.SQL("SET {} = {}").format(sql.Identifier(name.lower()), sql.Literal(setting))
            )

    def run(self, statement: str, *parameters: object) -> None:
        self.connection.execute(statement.encode(), parameters or None)

    def id(self) -> int:
        return self.rng.randrange(40) * 2 + self.number

    def step(self) -> None:
        rng = self.rng
        if self.left == 0:
            self.run("BEGIN")
            self.left = rng.randrange(1, 7)
            self.begun_savepoint = False
        elif self.left == 1:
            self.run("ROLLBACK" if rng.random() < 0.2 else "COMMIT")
            self.left = 0
            return
        elif rng.random() < 0.25:
            if self.begun_savepoint:
                self.run(rng.choice(["ROLLBACK TO s", "RELEASE s"]))
            else:
                self.run("SAVEPOINT s")
            self.begun_savepoint = not self.begun_savepoint
        self.left = max(1, self.left - 1)
        self.change(rng.choice(list(KEYS)))

    def change(self, table: str) -> None:
        rng = self.rng
        kind = rng.random()
        if kind < 0.4:
            names = list(COLUMNS)
            values = [str(self.id()), *(value(rng, name) for name in names[1:])]
            types = ", ".join(f"%s::{COLUMNS[name]}" for name in names)
            self.run(f"INSERT INTO {table} VALUES ({types}) ON CONFLICT DO NOTHING", *values)
        elif kind < 0.8:
            changed = rng.sample(list(COLUMNS)[2:], rng.randrange(1, 4))
            sets = [f"{name} = %s::{COLUMNS[name]}" for name in changed]
            values = [value(rng, name) for name in changed]
            if rng.random() < 0.4:
                # The key moves, by chance with big values that are not sent.
                sets.append(f"id = (SELECT max(id) + 2 FROM {table} WHERE id %% 2 = {self.number})")
                if rng.random() < 0.5:
                    sets, values = sets[-1:], []
            self.run(f"UPDATE {table} SET {', '.join(sets)} WHERE id = %s", *values, self.id())
        else:
            self.run(f"DELETE FROM {table} WHERE id = %s", self.id())


class Recorded(NamedTuple):
    """What the server sent and what it says was there."""

    frames: dict[bool, list[bytes]]  # by whether binary was asked for
    log: dict[int, list[tuple[str, str, list[str | None] | None, list[str | None] | None]]]
    copies: dict[str, list[tuple[str | None, ...]]]
    catalog: Catalog
    registry: pf.TypeRegistry


def receive(dsn: str, slot: str, end: int, *, binary: bool) -> list[bytes]:
    frames = []
    with connect(dsn, slot=slot, publications=["p"], binary=binary) as stream:
        while True:
            stream.ask_for_keepalive()
            batch = stream.receive(0.1)
            assert batch is not None
            frames += [frame for *_, frame in batch.frames]
            if batch.keepalive_lsn is not None and batch.keepalive_lsn >= end:
                return frames


@pytest.fixture(scope="module", params=[16, 18], ids="pg{}".format)
def recorded(request: pytest.FixtureRequest) -> Iterator[Recorded]:
    server = request.getfixturevalue(f"pg{request.param}")
    rng = random.Random(20240229)
    with psycopg.connect(server.dsn(), autocommit=True) as admin:
        admin.execute("CREATE DATABASE live")
        dsn = server.dsn("live")
        sessions = [Session(dsn, rng, number) for number in range(2)]
        first = sessions[0]
        for statement in setup():
            first.run(statement)
        for slot in ("live_text", "live_binary"):
            first.run(f"SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')")
        for number in range(900):
            if number in (300, 600):
                for session in sessions:
                    if session.left:
                        session.run("COMMIT")
                        session.left = 0
                if number == 300:
                    first.run("TRUNCATE plain, pair")
                    for table in KEYS:
                        first.change(table)
                else:
                    # Old rows take the default from the catalogue, no frame tells it.
                    for table in KEYS:
                        added = "ADD COLUMN late text DEFAULT 'it''s late', ADD COLUMN void int"
                        first.run(f"ALTER TABLE {table} {added}")
                        for statement in triggers(table, [*COLUMNS, "late", "void"]):
                            first.run(statement)
            rng.choice(sessions).step()
        for session in sessions:
            if session.left:
                session.run("COMMIT")
        log = collections.defaultdict(list)
        for xid, *rest in first.connection.execute(
            "SELECT xid, name, op, old, new FROM log ORDER BY id"
        ):
            log[xid].append(tuple(rest))
        copies = {}
        for table in KEYS:
            with first.connection.cursor().copy(f"COPY {table} TO STDOUT".encode()) as copy:
                copies[table] = list(copy.rows())
        (end,) = first.connection.execute("SELECT pg_current_wal_lsn()::text").fetchone() or ()
        yield Recorded(
            {
                binary: receive(dsn, slot, pf.parse_lsn(end), binary=binary)
                for slot, binary in (("live_text", False), ("live_binary", True))
            },
            dict(log),
            copies,
            read_catalog(dsn, ["p"]),
            pf.TypeRegistry.from_connection(first.connection),
        )
        for slot in ("live_text", "live_binary"):
            first.run(f"SELECT pg_drop_replication_slot('{slot}')")
        for session in sessions:
            session.connection.close()
        admin.execute("DROP DATABASE live")


def transactions(
    impl: ModuleType, frames: list[bytes], registry: pf.TypeRegistry
) -> Iterator[tuple[int, list[Any]]]:
    """Xid and row messages of each transaction."""
    decoder = impl.Decoder(registry=registry)
    xid, rows = 0, []
    for message in decoder.decode_many(frames):
        if isinstance(message, impl.Begin):
            xid, rows = message.xid, []
        elif isinstance(message, impl.Commit):
            yield xid, rows
        elif isinstance(message, (impl.Insert, impl.Update, impl.Delete, pf.Truncate)):
            rows.append(message)


def check_tuple(found: Any, columns: Any, expected: list[str | None], *, key: bool) -> None:
    assert len(found) == len(columns)
    for position, text in enumerate(found.texts()):
        if key and not columns[position].is_key:
            assert found.kind(position) == "n"
        else:
            assert text == expected[position], columns[position].name


@pytest.mark.everyday("18")
@pytest.mark.parametrize("binary", [False, True], ids=["text", "binary"])
def test_decoded_is_the_log_and_makes_the_tables(
    recorded: Recorded, impl: ModuleType, binary: bool
) -> None:
    tables: dict[str, dict[tuple[Any, ...], list[Any]]] = {name: {} for name in KEYS}
    counts: collections.Counter[str] = collections.Counter()
    seen = []
    for xid, rows in transactions(impl, recorded.frames[binary], recorded.registry):
        if not rows:
            continue  # 14 sends them empty, and DDL may
        seen.append(xid)
        expected = iter(recorded.log[xid])
        for message in rows:
            if isinstance(message, pf.Truncate):
                by_id = recorded.catalog.by_id()
                names = {by_id[oid].name for oid in message.relation_ids}
                assert {next(expected)[:2] for _ in names} == {(n, "TRUNCATE") for n in names}
                for name in names:
                    tables[name].clear()
                counts["truncate"] += 1
                continue
            name, op, old, new = next(expected)
            relation = message.relation
            columns = relation.columns
            assert (relation.name, type(message).__name__.upper()) == (name, op)
            keys = [[column.name for column in columns].index(column) for column in KEYS[name]]
            table = tables[name]
            moved = None
            if old is not None and getattr(message, "old", None) is not None:
                check_tuple(message.old, columns, old, key=message.old_kind == "K")
                moved = tuple(message.old.text(key) for key in keys)
                counts[message.old_kind] += 1
            if op == "DELETE":
                del table[moved]
                continue
            texts = list(message.new.texts())
            key_before = moved or tuple(texts[key] for key in keys)
            before = table.pop(key_before) if op == "UPDATE" else []
            for position, text in enumerate(texts):
                if text is pf.UNCHANGED:
                    counts["unchanged"] += 1
                    counts["unchanged in a moved row"] += key_before != tuple(
                        texts[key] for key in keys
                    )
                    assert old is not None
                    assert old[position] == new[position]
                    assert columns[position].name in ("big", "other_big")
                    texts[position] = before[position]
            assert texts == new
            table[tuple(texts[key] for key in keys)] = texts
        assert next(expected, None) is None
    assert set(seen) == set(recorded.log)
    for name, table in tables.items():
        missing = recorded.catalog.table(f"public.{name}").added_values
        late = [missing["late"], missing["void"]]
        rows = [[*row, *late[len(row) - len(COLUMNS) :]] for row in table.values()]
        assert sorted(map(repr, map(list, recorded.copies[name]))) == sorted(map(repr, rows))
        assert any(len(row) == len(COLUMNS) for row in table.values()), "no row is old enough"
    # The workload reaches what it is there for.
    assert min(counts[kind] for kind in ("truncate", "K", "O", "unchanged")) > 0
    assert counts["unchanged in a moved row"] > 0


def test_values_are_equal_from_text_and_binary(recorded: Recorded, impl: ModuleType) -> None:
    policies = pf.Policies(infinity="text", out_of_range="text")
    decoders = {
        binary: impl.Decoder(policies, registry=recorded.registry) for binary in (False, True)
    }
    compared = 0
    for frames in zip(recorded.frames[False], recorded.frames[True], strict=True):
        text, other = (decoders[binary].decode(frames[binary]) for binary in (False, True))
        if isinstance(text, (impl.Insert, impl.Update)):
            names = [column.name for column in text.relation.columns]
            for name, one, two in zip(names, text.new, other.new, strict=True):
                # By repr: NaN is not equal to itself.
                assert (type(one), repr(one)) == (type(two), repr(two)), name
                compared += 1
    assert compared > 6000


@pytest.mark.parametrize("binary", [False, True], ids=["text", "binary"])
def test_text_that_is_none_costs_its_value_alone(
    impl: ModuleType, pg18: EmbeddedServer, binary: bool
) -> None:
    """A database of SQL_ASCII holds any bytes, and sends them as they are."""
    with psycopg.connect(pg18.dsn(), autocommit=True) as admin:
        admin.execute("CREATE DATABASE anything ENCODING 'SQL_ASCII' LOCALE 'C' TEMPLATE template0")
        try:
            with psycopg.connect(pg18.dsn("anything"), autocommit=True) as connection:
                for statement in (
                    b"CREATE TYPE mood AS ENUM ('caf\xe9', 'ok')",
                    b'CREATE TABLE t (id int PRIMARY KEY, a text, b text[], "\xe9" mood, c "char")',
                    b"CREATE PUBLICATION p FOR TABLE t",
                    b"SELECT pg_create_logical_replication_slot('s', 'pgoutput')",
                    b"INSERT INTO t VALUES (1, 'caf\xe9', '{ok,\xe9}', 'caf\xe9', '\xe9')",
                    b"INSERT INTO t VALUES (2, 'ok', '{ok}', 'ok', 'k')",
                ):
                    connection.execute(statement)
                registry = pf.TypeRegistry.from_connection(connection)
                frames = [
                    row[0]
                    for row in connection.execute(
                        "SELECT data FROM pg_logical_slot_get_binary_changes('s', NULL, NULL, "
                        "'proto_version', '1', 'publication_names', 'p', 'binary', %s)",
                        [str(binary)],
                    )
                ]
                connection.execute("SELECT pg_drop_replication_slot('s')")
        finally:
            admin.execute("DROP DATABASE anything WITH (FORCE)")
    for encoding in ("SQL_ASCII", "UTF8"):
        messages = impl.Decoder(None, encoding, registry).decode_many(frames)
        bad, good = [message.new for message in messages if isinstance(message, impl.Insert)]
        assert good.values() == (2, "ok", ["ok"], "ok", b"k")
        assert (bad["id"], bad["c"], bad.raw(1)) == (1, b"\xe9", b"caf\xe9")
        for name in ("a", "b", "\udce9"):
            with expect_error(pf.DecodeError, code="bad_encoding"):
                bad[name]
        for attempt in (bad.values, bad.as_dict):
            with expect_error(pf.DecodeError, code="bad_encoding", column="a"):
                attempt()
        assert bad.raws()[3] == b"caf\xe9"
    latin1 = impl.Decoder(None, "LATIN1", registry).decode_many(frames)
    bad = next(message.new for message in latin1 if isinstance(message, impl.Insert))
    assert bad.values() == (1, "café", ["ok", "é"], "café", b"\xe9")
