"""The canonical texts of verify: equal for equal values, on the server and in each kind of target.

The server has the values, a capture and an export make the target. That values which differ have
texts that differ is asked of the server, whose own texts tell which values differ.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from servers import found_servers

import pgoutput_fast as pf
from pgoutput_fast import files
from pgoutput_fast.connections import ConnectionParameters
from pgoutput_fast.embedded import EmbeddedServer
from pgoutput_fast.errors import PgOutputError
from pgoutput_fast.replication import capture
from pgoutput_fast.types import BUILTIN_TYPES, TypeRegistry
from pgoutput_fast.verify import Report, verify
from pgoutput_fast.verify.moment import Moment
from pgoutput_fast.verify.targets import open_target
from pgoutput_fast.verify.texts import NOT_COMPARED

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.integration

TYPES = (
    "CREATE TYPE mood AS ENUM ('sad', '', 'a,b', '\\')",
    "CREATE DOMAIN price AS numeric(10,2)",
    "CREATE TYPE addr AS (street text, num price, tags text[], r int4range, at interval)",
    "CREATE TYPE nest AS (a addr, many addr[])",
    "CREATE TYPE textrange AS RANGE (subtype = text)",
)

VALUES: dict[str, list[str]] = {
    "bool": ["t", "f"],
    "int2": ["-32768", "0", "32767"],
    "int4": ["-2147483648", "0", "7"],
    "int8": ["-9223372036854775808", "9223372036854775807", "0"],
    "oid": ["0", "4294967295"],
    "xid": ["0", "4294967295"],
    "cid": ["1", "4294967295"],
    "xid8": ["0", "18446744073709551615"],
    "float4": ["NaN", "Infinity", "-Infinity", "0", "-0", "1e-45", "0.1", "3.4028235e38",
               "16777216"],
    "float8": ["NaN", "Infinity", "-Infinity", "0", "-0", "5e-324", "0.1", "0.30000000000000004",
               "1.7976931348623157e308", "9007199254740993", "1e20", "1e-7"],
    "numeric": ["NaN", "Infinity", "-Infinity", "0", "0.0", "1", "1.0", "-1.50", "1e-30", "1e40",
                "12345678901234567890.123456789"],
    "numeric(10,2)": ["NaN", "0", "-0.5", "99999999.99"],
    "numeric(3,3)": ["0", "-0.5", "0.001"],
    "numeric(38,0)": ["99999999999999999999999999999999999999", "-1"],
    "numeric(38,38)": ["0.00000000000000000000000000000000000001", "-0.5"],
    "numeric(5,-3)": ["123000", "-99999000", "0"],
    "numeric(3,5)": ["0.00123", "0"],
    "numeric(50,2)": ["1e40", "-0.01"],
    "numeric(77,1)": ["1e75", "-0.1"],
    "money": ["0", "-1", "0.05", "1234567.89", "-0.99", "92233720368547758.07"],
    "text": ["", " ", "N", "\\N", "\\U", "a,b", "\\", "\\,", ",", "NULL", "ünï 😀", "e\u0301", "é",
             "line\nbreak", "'quoted'", "%s"],
    "varchar(5)": ["", "a  ", "a"],
    "bpchar": ["a", "b"],
    "char(5)": ["a", "", "ü"],
    '"char"': ["", "a", "\\", "\\303", "\\377", ","],
    "name": ["", "a", "ü"],
    "bytea": ["\\x", "\\x00", "\\xff", "\\x5c78"],
    "date": ["infinity", "-infinity", "0001-01-01", "9999-12-31", "2024-02-29", "0044-03-15 BC",
             "12024-01-01", "4713-01-01 BC"],
    "timestamp": ["infinity", "-infinity", "0001-01-01 00:00:00", "9999-12-31 23:59:59.999999",
                  "2024-02-29 12:00:00.5", "1969-12-31 23:59:59.000001", "0044-03-15 01:02:03 BC",
                  "200000-01-01 00:00:00"],
    "timestamp(0)": ["2024-02-29 12:00:00"],
    "timestamptz": ["infinity", "-infinity", "2024-02-29 12:00:00.000001+05:30",
                    "1900-01-01 00:00:00+00", "0044-03-15 01:02:03+00 BC",
                    "0001-01-01 00:00:00+00"],
    "time": ["00:00:00", "12:34:56.000001", "23:59:59.999999", "24:00:00", "12:00:00.5"],
    "time(3)": ["12:34:56.123"],
    "timetz": ["00:00:00+00", "24:00:00-15:59", "12:00:00.5+05:30:15", "12:00:00-00:00:01"],
    "interval": ["0", "1 mon", "30 days", "720:00:00", "-1 mon +2 days -00:00:00.000001",
                 "1 year 2 mons -3 days 04:05:06.789", "-1 year -2 mons", "00:01", "-00:01:01",
                 "178000000 years", "-13 mons", "100:00:00", "00:00:00.5", "-00:00:00.5",
                 "11 mons", "1 year", "1 day", "-1 days +00:00:01"],
    "uuid": ["00000000-0000-0000-0000-000000000000", "A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11"],
    "json": ["null", '{"a":  1}', '{"a": 1}', '"\\u00e9"', "[]"],
    "jsonb": ["null", '{"b": 1, "a": [1.0, "x"]}', '"é"', "1e2", "100.0"],
    "jsonpath": ["$.a", '$."b c"[*]'],
    "tsvector": ["", "'a':1A,2 'b c'", "a b"],
    "tsquery": ["", "a & b", "!'x y'"],
    "inet": ["10.0.0.1", "10.0.0.1/8", "::1", "::ffff:1.2.3.4/96"],
    "cidr": ["10.0.0.0/8", "::/0"],
    "macaddr": ["08:00:2b:01:02:03"],
    "macaddr8": ["08:00:2b:01:02:03:04:05"],
    "bit(3)": ["000", "101"],
    "varbit": ["", "0", "00", "1"],
    "point": ["(0,-0)", "(0,0)", "(NaN,Infinity)", "(1e20,0.1)"],
    "lseg": ["[(0,0),(1,1)]"],
    "path": ["[(0,0),(1,1)]", "((0,0),(1,1))"],
    "box": ["(1,1),(0,0)"],
    "polygon": ["((0,0),(1,1),(1,0))"],
    "line": ["{1,-1,0}"],
    "circle": ["<(0,0),1>"],
    "pg_lsn": ["0/0", "FFFFFFFF/FFFFFFFF"],
    "tid": ["(0,1)", "(4294967295,65535)"],
    "pg_snapshot": ["10:20:10,14"],
    "txid_snapshot": ["10:20:10,14"],
    "refcursor": ["a", ""],
    "aclitem": ["postgres=r/postgres"],
    "int2vector": ["", "1 2 -3"],
    "oidvector": ["", "1 4294967295"],
    "int4[]": ["{}", "{NULL}", "{1,NULL,3}", "{1,3}"],
    "text[]": ["{}", '{""}', "{NULL}", '{"NULL"}', '{"a,b"}', "{a,b}", '{"\\\\N"}', '{"a\\\\,b"}'],
    "float8[]": ["{NaN,-0}", "{0}"],
    "numeric[]": ["{1.0,1.00}", "{1}"],
    "timestamptz[]": ['{"2024-02-29 12:00:00+00",NULL}'],
    "interval[]": ['{"1 mon","-1 days"}', "{NULL}"],
    "bytea[]": ['{"\\\\x00"}', "{NULL}"],
    "int4range": ["empty", "(,)", "[1,)", "(,5)", "[1,5)"],
    "numrange": ["empty", "[1.0,2.0]", "(1.0,2.0]", "[1.0,2.0)", "(,)", "[1.00,2.0]"],
    "tsrange": ["[2024-01-01,2024-01-02)", "[2024-01-01,)"],
    "tstzrange": ["[2024-01-01 00:00+00,2024-01-02 00:00+00)"],
    "daterange": ["[2024-01-01,2024-01-02)", "(,)"],
    "int8range": ["[1,9223372036854775807)"],
    "int4multirange": ["{}", "{[1,3)}", "{[1,3),[5,7)}", "{(,)}"],
    "nummultirange": ["{[1.5,2.5]}", "{}"],
    "tsmultirange": ["{[2024-01-01,2024-01-02)}"],
    "tstzmultirange": ["{[2024-01-01 00:00+00,)}"],
    "datemultirange": ["{[2024-01-01,2024-01-02)}"],
    "int8multirange": ["{[1,2)}"],
    "int4range[]": ['{"[1,2)",empty,NULL}', "{}"],
    "mood": ["sad", "", "a,b", "\\"],
    "mood[]": ['{sad,"",NULL}', '{"a,b"}'],
    "price": ["0.50", "NaN"],
    "price[]": ["{0.50,NULL}"],
    "addr": ["(,,,,)", '(a,1.00,"{x,NULL}","[1,2)","1 mon")', '("",,{},empty,)'],
    "addr[]": ['{"(,,,,)",NULL}', '{"(a,,,,\\"1 day\\")"}', "{}"],
    "nest": ["(,)", '("(a,,,,)","{""(b,,,,)"",NULL}")'],
    "textrange": ["[a,b)", "empty", '["a,b",)'],
}  # fmt: skip

OTHER_ARRAYS: dict[str, list[str]] = {
    "int4[]": ["{{1,2},{3,NULL}}", "[0:1]={1,2}", "[2:2]={1}", "{}"],
    "text[]": ["{{a},{b}}", "{{a,b}}", "{a,b}"],
}
"""Arrays that only text can hold."""

NEWER: dict[str, list[str]] = {"interval": ["infinity", "-infinity"]}
"""Values from PostgreSQL 17 on."""

OF_EXTENSIONS: dict[str, tuple[str, list[str]]] = {
    "hstore": ("hstore", ["", "a=>1", "a=>NULL", 'a=>"NULL"',
                          '"a,b"=>"\\\\", aa=>1, b=>2', '""=>""']),
    "citext": ("citext", ["A", "a", ""]),
    "ltree": ("ltree", ["", "a.b"]),
    "cube": ("cube", ["(1)", "(1,2),(3,4)"]),
}  # fmt: skip

TEXT = pf.Policies(infinity="text", out_of_range="text", special_values="text", arrays="text")
NULLS = pf.Policies(infinity="null", out_of_range="null", special_values="null")


class Made:
    """A database with a table for each type, and its segments."""

    def __init__(self, dsn: str, directory: Path, given: dict[str, list[str]], *, binary: bool):
        self.dsn = dsn
        self.types = list(given)
        self.segments = directory / "segments"
        with psycopg.connect(dsn, autocommit=True) as connection:
            for number, type_ in enumerate(self.types):
                connection.execute(
                    f"CREATE TABLE t{number} (id int PRIMARY KEY, v {type_})".encode()
                )
            connection.execute("CREATE PUBLICATION p FOR ALL TABLES")
            connection.execute("SELECT pg_create_logical_replication_slot('s', 'pgoutput')")
            for number, type_ in enumerate(self.types):
                for i, value in enumerate([*given[type_], None]):
                    connection.execute(
                        f"INSERT INTO t{number} VALUES (%s, %s::{type_})".encode(), [i, value]
                    )
            (end,) = connection.execute("SELECT pg_current_wal_lsn()::text").fetchone() or ("",)
        capture(
            dsn, slot="s", publications=["p"], directory=self.segments, adopt_slot=True,
            until_lsn=pf.parse_lsn(end), binary=binary,
        )  # fmt: skip

    def of(self, report: Report) -> dict[str, str]:
        """The types whose table is not equal, and what was said of it."""
        return {
            self.types[int(one.name[1:])]: f"{one.state} {one.why} {one.differences}"
            for one in report.tables
            if one.state != "equal"
        }

    def verify(self, target: str) -> Report:
        segments = None if target == str(self.segments) else str(self.segments)
        return verify(self.dsn, publications=["p"], target=target, segments=segments, timeout=5)

    def registry(self) -> pf.TypeRegistry:
        with psycopg.connect(self.dsn) as connection:
            return TypeRegistry.from_connection(connection)


def made_of(server: EmbeddedServer, make: Callable[..., Any], path: Path, **options: Any) -> Made:
    database = make(server)
    database.execute(*TYPES)
    given = {name: list(values) for name, values in VALUES.items()}
    if options["binary"]:
        given.pop("aclitem")  # without the catalogue of types nothing says that it comes as text
    for name, values in NEWER.items() if server.version >= 17 else ():
        given[name] += values
    if options.pop("arrays", False):
        for name, values in OTHER_ARRAYS.items():
            given[name] = given[name] + values
    return Made(database.dsn, path, given, **options)


def test_every_type_is_among_the_values() -> None:
    tried = {name.partition("(")[0].strip('"') for name in VALUES}
    tried |= {"char", "bpchar", "varchar"}
    left_out = {one.name for one in BUILTIN_TYPES if one.codec in ("reg", "other")}
    left_out |= {"xml", "unknown"}  # the embedded server has no libxml; no column is unknown
    assert {one.name for one in BUILTIN_TYPES} - tried == left_out


@pytest.mark.slow
@pytest.mark.parametrize("binary", [False, True], ids=["text", "binary"])
def test_a_directory_of_every_type_is_equal(
    server: EmbeddedServer, make_database: Callable[..., Any], tmp_path: Path, binary: bool
) -> None:
    made = made_of(server, make_database, tmp_path, binary=binary, arrays=True)
    assert made.of(made.verify(str(made.segments))) == {}


@pytest.mark.parametrize("format", ["parquet", pytest.param("duckdb", marks=pytest.mark.slow)])
def test_an_export_of_every_type_is_equal(
    pg18: EmbeddedServer, make_database: Callable[..., Any], tmp_path: Path, format: Any
) -> None:
    made = made_of(pg18, make_database, tmp_path, binary=False)
    policies = TEXT if format == "duckdb" else NULLS
    files.export(
        made.segments, tmp_path / "out", format, policies=policies, registry=made.registry()
    )
    assert made.of(made.verify(str(tmp_path / "out"))) == {}
    if format == "duckdb":
        assert made.of(made.verify(f"duckdb:{tmp_path / 'out' / 'changes.duckdb'}")) == {}


def distinct(made: Made, target: str) -> dict[str, tuple[int, int, int]]:
    """Of each type: how many texts the server prints, how many canonical ones, and how many rows.

    Only of values that have a canonical text, as a policy makes NULL of some.
    """
    found = {}
    with (
        contextlib.closing(Moment(ConnectionParameters(made.dsn), ["p"], 10.0)) as moment,
        contextlib.closing(open_target(target, None, made.registry)) as opened,
    ):
        opened.refresh(0)
        for table in moment.tables:
            text = opened.table(table).texts["v"].server
            query = (
                f"SELECT count(DISTINCT format('%s', v)), count(DISTINCT c), count(*) FROM "
                f"(SELECT v, {text} AS c FROM {table.source}) AS t WHERE c IS NOT NULL"
            )
            (row,) = moment.connection.execute(query.encode()).fetchall()
            found[made.types[int(table.table.name[1:])]] = row
    return found


@pytest.mark.slow
def test_values_that_differ_have_texts_that_differ(
    pg18: EmbeddedServer, make_database: Callable[..., Any], tmp_path: Path
) -> None:
    made = made_of(pg18, make_database, tmp_path, binary=False)
    for target, policies in (("text", TEXT), ("null", NULLS)):
        files.export(
            made.segments, tmp_path / target, "parquet", policies=policies,
            registry=made.registry(),
        )  # fmt: skip
        for type_, (printed, canonical, rows) in distinct(made, str(tmp_path / target)).items():
            assert canonical == printed > 0, type_
            if target == "text":
                expected = len(VALUES[type_]) + len(NEWER.get(type_, ()))
                assert rows == expected, type_


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_EXTENSIONS)
def test_types_of_extensions_are_equal(name: str, tmp_path: Path) -> None:
    extension, values = OF_EXTENSIONS[name]
    with contextlib.ExitStack() as held:
        for bindir in found_servers():
            try:
                one = held.enter_context(EmbeddedServer(bindir=bindir))
                with psycopg.connect(one.dsn(), autocommit=True) as connection:
                    connection.execute(f"CREATE EXTENSION {extension}".encode())
                break
            except (PgOutputError, psycopg.Error):
                continue
        else:
            pytest.skip(f"no server has the extension {extension}")
        made = Made(one.dsn(), tmp_path, {name: values}, binary=False)
        assert made.of(made.verify(str(made.segments))) == {}
        files.export(made.segments, tmp_path / "out", registry=made.registry())
        assert made.of(made.verify(str(tmp_path / "out"))) == {}


@pytest.mark.slow
def test_types_that_are_not_compared_say_so(
    pg18: EmbeddedServer, make_database: Callable[..., Any], tmp_path: Path
) -> None:
    database = make_database(pg18)
    made = Made(
        database.dsn, tmp_path, {"regclass": ["pg_class"], "regtype[]": ["{int4}"]}, binary=False
    )
    report = made.verify(str(made.segments))
    assert [one.state for one in report.tables] == ["not compared"] * 2
    assert all(NOT_COMPARED["reg"] in one.why for one in report.tables)
    assert report.exit_code == 2
    report = verify(
        made.dsn, publications=["p"], target=str(made.segments),
        exclude=["public.t0.v", "public.t1.v"],
    )  # fmt: skip
    assert (report.exit_code, report.tables[0].excluded) == (0, ("v",))


CLAMPED: dict[str, list[str]] = {
    "numeric": ["1.50", "1.5", "100", "0.0", "-0.001", "12000000000"],
    "date": VALUES["date"],
    "timestamp": VALUES["timestamp"],
    "timestamptz": VALUES["timestamptz"],
    "time": VALUES["time"],
    "int4[]": ["{{1,2},{3,NULL}}", "{}", "{{NULL},{1}}", "{{1,NULL}}"],
    "tsrange": ["[infinity,infinity]", "[2024-01-01,infinity)", "[2024-01-01,)"],
    "date[]": ["{{infinity},{2024-01-01}}", "{{NULL}}"],
    "datemultirange": ["{[2024-01-01,2024-01-02),[10000-01-01,10000-01-02)}"],
}


@pytest.mark.slow
@pytest.mark.parametrize("choice", ["clamp", "null"])
def test_values_that_a_policy_changed_are_equal(
    pg16: EmbeddedServer, make_database: Callable[..., Any], tmp_path: Path, choice: Any
) -> None:
    # NaN is near to no number, so it can't be clamped; a numeric(10,2) can't be infinite.
    given = {**CLAMPED, "numeric(10,2)": ["1", "NaN"] if choice == "null" else ["1"]}
    made = Made(make_database(pg16).dsn, tmp_path, given, binary=False)
    policies = pf.Policies(
        infinity=choice, out_of_range=choice, special_values=choice, arrays=2, numeric=(38, 9)
    )
    files.export(made.segments, tmp_path / "out", policies=policies)
    assert made.of(made.verify(str(tmp_path / "out"))) == {}
    # Another policy makes other values of them.
    other: Any = {"clamp": "null", "null": "clamp"}[choice]
    path = tmp_path / "out" / "_manifest.json"
    path.write_text(path.read_text().replace(f'"infinity": "{choice}"', f'"infinity": "{other}"'))
    differing = made.of(made.verify(str(tmp_path / "out")))
    assert set(differing) == {"date", "timestamp", "timestamptz", "tsrange", "date[]"}
