"""The canonical texts of verify: equal for equal values, on the server and in each kind of target.

The server has the values, a capture or a sync makes the target. That values which differ have
texts that differ is asked of the server, whose own texts tell which values differ.
"""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb
import psycopg
import pytest
from support.nightly import nightly
from support.postgres.servers import found_servers
from support.values.type_values import NEWER, TYPES, VALUES

import pgoutput_fast as pf
from pgoutput_fast import cli
from pgoutput_fast.apply import sync
from pgoutput_fast.connections import ConnectionParameters
from pgoutput_fast.embedded import EmbeddedServer
from pgoutput_fast.errors import PgOutputError
from pgoutput_fast.replication import capture
from pgoutput_fast.types import BUILTIN_TYPES, TypeRegistry
from pgoutput_fast.verify import Report, verify
from pgoutput_fast.verify.moment import Moment
from pgoutput_fast.verify.opening import open_target
from pgoutput_fast.verify.texts import NOT_COMPARED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.server

OTHER_ARRAYS: dict[str, list[str]] = {
    "int4[]": ["{{1,2},{3,NULL}}", "[0:1]={1,2}", "[2:2]={1}", "{}"],
    "text[]": ["{{a},{b}}", "{{a,b}}", "{a,b}"],
}
"""Arrays that only text can hold."""

OF_EXTENSIONS: dict[str, tuple[str, list[str]]] = {
    "hstore": ("hstore", ["", "a=>1", "a=>NULL", 'a=>"NULL"',
                          '"a,b"=>"\\\\", aa=>1, b=>2', '""=>""']),
    "citext": ("citext", ["A", "a", ""]),
    "ltree": ("ltree", ["", "a.b"]),
    "cube": ("cube", ["(1)", "(1,2),(3,4)"]),
}  # fmt: skip

XML = ["<a/>", "text", "<a b='c'>ü</a>", "<a>\n</a>", "<a></a>", ""]

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
        # Nobody has seen the types when the rows were written, so a history would refuse them.
        capture(
            dsn, slot="s", publications=["p"], directory=self.segments, adopt_slot=True,
            until_lsn=pf.parse_lsn(end), binary=binary, schema_history=False,
        )  # fmt: skip

    def of(self, report: Report) -> dict[str, str]:
        """The types whose table is not equal, and what was said of it."""
        return {
            self.types[int(one.name[1:])]: f"{one.state} {one.why} {one.differences}"
            for one in report.tables
            if one.state != "equal"
        }

    def verify(self, target: str, **options: Any) -> Report:
        return verify(self.dsn, publications=["p"], target=target, timeout=5, **options)

    def sync(self, target: str, policies: pf.Policies | None = None) -> None:
        """Write the rows into a target, beside which a change log of its own comes to be."""
        sync(self.dsn, slot="made", publications=["p"], target=target, until="now",
             policies=policies)  # fmt: skip

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
    left_out |= {"xml", "unknown"}  # xml has a test of its own; no column is unknown
    assert {one.name for one in BUILTIN_TYPES} - tried == left_out


@pytest.mark.slow
@pytest.mark.parametrize("binary", [False, True], ids=["text", "binary"])
def test_a_directory_of_every_type_is_equal(
    server: EmbeddedServer, make_database: Callable[..., Any], tmp_path: Path, binary: bool
) -> None:
    made = made_of(server, make_database, tmp_path, binary=binary, arrays=True)
    assert made.of(made.verify(str(made.segments))) == {}


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
    target = f"duckdb:{tmp_path / 'null.duckdb'}"
    made.sync(target, NULLS)
    assert made.of(made.verify(target)) == {}
    for one in (str(made.segments), target):
        for type_, (printed, canonical, rows) in distinct(made, one).items():
            assert canonical == printed > 0, type_
            if one != target:
                expected = len(VALUES[type_]) + len(NEWER.get(type_, ()))
                assert rows == expected, type_


@contextlib.contextmanager
def server_with(statement: str) -> Iterator[EmbeddedServer]:
    """The first of the servers that are found which can run a statement, after it."""
    with contextlib.ExitStack() as held:
        for bindir in found_servers():
            try:
                one = held.enter_context(EmbeddedServer(bindir=bindir))
                with psycopg.connect(one.dsn(), autocommit=True) as connection:
                    connection.execute(statement.encode())
                break
            except (PgOutputError, psycopg.Error):
                continue
        else:
            pytest.skip(f"no server can run {statement}")
        yield one


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_EXTENSIONS)
def test_types_of_extensions_are_equal(name: str, tmp_path: Path) -> None:
    extension, values = OF_EXTENSIONS[name]
    with server_with(f"CREATE EXTENSION {extension}") as one:
        made = Made(one.dsn(), tmp_path, {name: values}, binary=False)
        assert made.of(made.verify(str(made.segments))) == {}


@pytest.mark.slow
@pytest.mark.parametrize("binary", [False, True], ids=["text", "binary"])
def test_xml_is_compared(tmp_path: Path, binary: bool) -> None:
    """Values that only differ in their letters differ, as xml has no equality."""
    with server_with("SELECT '<a/>'::xml") as one:
        given = {"xml": XML, "xml[]": ["{<a/>,NULL}", "{}"]}
        made = Made(one.dsn(), tmp_path, given, binary=binary)
        assert made.of(made.verify(str(made.segments))) == {}
        path = tmp_path / "tables.duckdb"
        made.sync(f"duckdb:{path}")
        assert made.of(made.verify(f"duckdb:{path}")) == {}
        with duckdb.connect(str(path)) as connection:
            connection.execute("UPDATE state.\"public.t0\" SET v = '<a />' WHERE id = 0")
        (found,) = (one for one in made.verify(f"duckdb:{path}").tables if one.state != "equal")
        (difference,) = found.differences
        assert (found.name, found.state, difference.key) == ("t0", "different", {"id": "0"})
        assert difference.columns == {"v": ("<a/>", "<a />")}


_ALIKE = ["a,b", "A,B", "a-b", "ab", "\\,", ""]
COLLATED: dict[str, list[str]] = {
    "text COLLATE ci": _ALIKE,
    "varchar(9) COLLATE ci": _ALIKE,
    "char(5) COLLATE ci": _ALIKE,
    "of_ci": _ALIKE,
    "text[] COLLATE ci": ['{"a,b",A,NULL}', "{}"],
    "pair": ['("a,b",A)', '("A,B",)'],
    "pair[]": ['{"(\\"a,b\\",a)"}'],
    "span": ["[a,b)", '["a,b",)', "empty"],
}
"""Types with a collation for which letters of both cases are equal, and punctuation is nothing."""


@pytest.mark.slow
def test_texts_are_compared_by_bytes_whatever_their_collation(tmp_path: Path) -> None:
    statement = (
        "CREATE COLLATION ci (provider = icu, locale = 'und-u-ka-shifted-ks-level2',"
        " deterministic = false)"
    )
    with server_with(statement) as one:
        with psycopg.connect(one.dsn(), autocommit=True) as connection:
            connection.execute("CREATE DOMAIN of_ci AS text COLLATE ci")
            connection.execute("CREATE TYPE pair AS (x text COLLATE ci, y text)")
            connection.execute("CREATE TYPE span AS RANGE (subtype = text, collation = ci)")
            connection.execute("CREATE TABLE k (id text COLLATE ci PRIMARY KEY, v int)")
        made = Made(one.dsn(), tmp_path, COLLATED, binary=False)
        assert made.of(made.verify(str(made.segments))) == {}
        path = tmp_path / "tables.duckdb"
        made.sync(f"duckdb:{path}")
        assert made.of(made.verify(f"duckdb:{path}")) == {}
        with duckdb.connect(str(path)) as connection:
            connection.execute("UPDATE state.\"public.t0\" SET v = 'A,b' WHERE id = 0")
        assert list(made.of(made.verify(f"duckdb:{path}"))) == ["text COLLATE ci"]

        state = {"publications": ["p"], "target": f"duckdb:{tmp_path / 'kept.duckdb'}"}
        with psycopg.connect(one.dsn(), autocommit=True) as connection:
            connection.execute("INSERT INTO k VALUES ('a,b', 1)")
            sync(one.dsn(), slot="state", until="now", **state)  # type: ignore[arg-type]
            connection.execute("UPDATE k SET id = 'A-B', v = 2")
            sync(one.dsn(), slot="state", until="now", **state)  # type: ignore[arg-type]
        assert {table.state for table in verify(one.dsn(), **state).tables} == {"equal"}  # type: ignore[arg-type]


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
    target = f"duckdb:{tmp_path / 'tables.duckdb'}"
    made.sync(target, policies)
    assert made.of(made.verify(target)) == {}
    # Another policy makes other values of them.
    other: Any = {"clamp": "null", "null": "clamp"}[choice]
    report = made.verify(target, policies=dataclasses.replace(policies, infinity=other))
    differing = made.of(report)
    assert set(differing) == {"date", "timestamp", "timestamptz", "tsrange", "date[]"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["duckdb", "delta"])
def test_a_target_that_was_written_with_policies(
    pg16: EmbeddedServer, make_database: Any, tmp_path: Path, kind: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """With others the target differs, and the report names policies as a possible cause."""
    database = make_database(pg16)
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, d date, n numeric(4,1))",
        "INSERT INTO t VALUES (1, 'infinity', 1), (2, '0044-03-15 BC', 2), (3, NULL, 'NaN')",
        "CREATE TABLE u (id int PRIMARY KEY, t text, f float8)",
        "INSERT INTO u VALUES (1, 'infinity', 'NaN')",
        "CREATE PUBLICATION p FOR TABLE t, u",
    )
    target = f"duckdb:{tmp_path / 'tables.duckdb'}" if kind == "duckdb" else str(tmp_path / "lake")
    given: dict[str, Any] = {"publications": ["p"], "target": target, "timeout": 10}
    policies = pf.Policies(infinity="null", out_of_range="clamp", special_values="null")
    sync(database.dsn, slot=f"slot_{database.name}", publications=["p"], target=target,
         policies=policies, until="now")  # fmt: skip
    assert verify(database.dsn, policies=policies, **given).exit_code == 0
    assert verify(database.dsn, **given).exit_code == 0  # by the policies that the target keeps
    report = verify(database.dsn, policies=pf.Policies(infinity="null"), **given)
    assert [(one.state, one.differing) for one in report.tables] == [("different", 2), ("equal", 0)]
    assert "the policies of the sync that wrote the target" in report.tables[0].why
    command = ["verify", "--dsn", database.dsn, "--publication", "p", "--target", target]
    assert cli.main([*command, "--policy", "infinity=null"]) == 1
    said = capsys.readouterr().out
    assert "3 in the target; 2 differ: the values that differ may have been changed" in said
    assert "d: server '0044-03-15 BC', target '0001-01-01'" in said
    words = ["infinity=null", "out_of_range=clamp", "special_values=null"]
    assert cli.main([*command, *(part for one in words for part in ("--policy", one))]) == 0
    if kind == "duckdb":
        with duckdb.connect(target.removeprefix("duckdb:")) as connection:
            connection.execute("""UPDATE state."public.u" SET t = 'other'""")
        one, other = verify(database.dsn, policies=policies, **given).tables
        assert (one.differing, other.differing, other.why) == (0, 1, "")  # no policy made this


@pytest.mark.slow
@pytest.mark.parametrize("out_of_range", ["text", *nightly("null", "clamp")])
@pytest.mark.parametrize("infinity", ["clamp", *nightly("null", "text")])
@pytest.mark.parametrize("kind", ["duckdb", "delta"])
def test_each_policy_changes_its_own_values(
    pg18: EmbeddedServer, make_database: Any, tmp_path: Path, kind: str, infinity: Any,
    out_of_range: Any,
) -> None:  # fmt: skip
    """Where one of them asks for text, the column is text, and the other one holds in it too."""
    database = make_database(pg18)
    database.execute(
        "CREATE TYPE pair AS (d date, iv interval)",
        "CREATE TABLE t (id int PRIMARY KEY, d date, ts timestamp, tz timestamptz, iv interval,"
        " n numeric(12,2), r daterange, a date[], tm time, tms time[], tt timetz, c pair)",
        *(
            f"INSERT INTO t VALUES ({key}, '{day}', '{day}', '{day}', '{length}', {number},"
            f" '[2000-01-01,{day}]', '{{{day},NULL}}', '{clock}', '{{{clock}}}', '{clock}+01',"
            f" ('{day}', '{length}'))"
            for key, day, length, number, clock in (
                (1, "infinity", "infinity", "'NaN'", "24:00"),
                (2, "10000-01-01", "-1 mon +2 days", "1", "12:00:00.5"),
                (3, "2024-02-29", "1 day", "NULL", "00:00"),
            )
        ),
        "INSERT INTO t (id, d, ts, tz, iv, a) VALUES"
        " (4, '-infinity', '-infinity', '-infinity', '-infinity', '{-infinity}'),"
        " (5, '0044-03-15 BC', '0044-03-15 BC', '0044-03-15 BC', '0', '{0044-03-15 BC}')",
        "CREATE PUBLICATION p FOR TABLE t",
    )
    target = f"duckdb:{tmp_path / 'tables.duckdb'}" if kind == "duckdb" else str(tmp_path / "lake")
    given: dict[str, Any] = {"publications": ["p"], "target": target}
    policies = pf.Policies(infinity=infinity, out_of_range=out_of_range, special_values="null")
    sync(database.dsn, slot=f"slot_{database.name}", policies=policies, until="now", **given)
    report = verify(database.dsn, timeout=10, **given)
    (table,) = report.tables
    assert (table.state, table.rows, table.differences) == ("equal", 5, ()), table.why
