"""Rows that the server tells apart, or calls equal, in a target: equality is that of the bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.targets.synced_database import Synced
from support.targets.synced_tables import DeltaTables, DuckdbTables

from pgoutput_fast import numerics
from pgoutput_fast.verify import verify

pytest.importorskip("duckdb")
pytest.importorskip("deltalake")

pytestmark = [pytest.mark.server, pytest.mark.usefixtures("quick_upkeep")]


class Pair(NamedTuple):
    """Two values of a type that some database takes as equal, as SQL has them."""

    type: str
    one: str
    other: str


PAIRS = (
    Pair("float8", "'0'", "'-0'"),
    Pair("float4", "'0'", "'-0'"),
    Pair("float8", "'NaN'", "-('NaN'::float8)"),
    Pair("float4", "'NaN'", "-('NaN'::float4)"),
    Pair("float8[]", "'{1,0,NULL}'", "'{1,-0,NULL}'"),
    Pair("float4[]", "'{NaN}'", "ARRAY[-('NaN'::float4)]"),
    Pair("spot", "'(0,a,\"{0}\")'", "'(0,a,\"{-0}\")'"),
    Pair("spot[]", "'{\"(0,a,)\"}'", "'{\"(-0,a,)\"}'"),
    Pair("floats", "'[0,1]'", "'[-0,1]'"),
    Pair("numeric", "'1.0'", "'1.00'"),
    Pair("numeric[]", "'{1.0}'", "'{1.00}'"),
    Pair("numeric(5,2)", "'-0'", "'0'"),
    Pair("bpchar", "'a'", "'a '"),
    Pair("char(3)", "'a'", "'a '"),
    Pair("text", "''", "' '"),
    Pair("text", "'e\u0301'", "'\u00e9'"),
    Pair("interval", "'1 month'", "'30 days'"),
    Pair("timetz", "'01:00+01'", "'00:00+00'"),
    Pair("jsonb", "'{\"a\": 1.0}'", "'{\"a\": 1.00}'"),
    Pair("json", "'{\"a\":1}'", "'{\"a\": 1}'"),
    Pair("varbit", "'0'", "'00'"),
    Pair("uuid", f"'{'0' * 32}'", f"'{'0' * 31}1'"),
    Pair("uuid[]", f"'{{{'0' * 32}}}'", f"'{{{'0' * 31}1}}'"),
    Pair("bytea", "'\\x00'", "'\\x0000'"),
    Pair("inet", "'10.0.0.1'", "'10.0.0.1/32'"),
)
_UNORDERED = ("json", "spot[]")
"""Types that are no keys here: of json there is no equality, and a key of these is like others."""


def _make(database: Any) -> None:
    statements = [
        "CREATE TYPE spot AS (x float8, t text, more float8[])",
        "CREATE TYPE floats AS RANGE (subtype = float8)",
        "CREATE PUBLICATION p FOR ALL TABLES",
    ]
    for i, (type_, one, other) in enumerate(PAIRS):
        statements += [
            f"CREATE TABLE r{i} (id int PRIMARY KEY, v {type_})",
            f"INSERT INTO r{i} VALUES (1, {one}), (2, {other})",
            f"CREATE TABLE b{i} (v {type_}, w int)",
            f"ALTER TABLE b{i} REPLICA IDENTITY FULL",
            f"INSERT INTO b{i} SELECT v, 1 FROM r{i}, generate_series(1, 3)",
        ]
        if type_ not in _UNORDERED:
            statements += [
                f"CREATE TABLE k{i} (v {type_} PRIMARY KEY, w int)",
                f"INSERT INTO k{i} SELECT v, 1 FROM r{i} ORDER BY id ON CONFLICT DO NOTHING",
            ]
    database.execute(*statements)


def _differing(synced: Synced, kinds: str) -> list[Any]:
    """Tables whose rows are not the server's, by what the target has of each of the two values."""
    found: list[Any] = []
    names = [(kind, i) for i in range(len(PAIRS)) for kind in "r" + _kinds_of(i, kinds)]
    queries = (
        f"SELECT '{kind}', {i}, format('%s', v), {'id' if kind == 'r' else 'w'} FROM {kind}{i}"
        for kind, i in names
    )
    truth: dict[Any, list[tuple[str, int]]] = {name: [] for name in names}
    for kind, i, text, number in synced.database.execute(" UNION ALL ".join(queries)):
        truth[kind, i].append((text, number))
    for i, pair in enumerate(PAIRS):
        texts = {id_: text for text, id_ in truth["r", i]}
        own = {texts[id_]: repr(v) for id_, v in synced.rows(f"public.r{i}", "id", "v")}
        for kind in _kinds_of(i, kinds):
            rows = sorted((own[text], w) for text, w in truth[kind, i])
            there = sorted((repr(v), w) for v, w in synced.rows(f"public.{kind}{i}", "v", "w"))
            if there != rows:
                found.append((f"{kind}{i}", pair, there, rows))
    return found


def _kinds_of(i: int, kinds: str) -> str:
    return kinds.replace("k", "") if PAIRS[i].type in _UNORDERED else kinds


def _change(database: Any, statement: str, kinds: str) -> None:
    """Run a statement for each table, with the values of its pair."""
    database.execute(
        *(
            statement.format(
                t=f"{kind}{i}", r=f"r{i}", one=f"{one}::{type_}", other=f"{other}::{type_}"
            )
            for i, (type_, one, other) in enumerate(PAIRS)
            for kind in _kinds_of(i, kinds)
        )
    )


@pytest.mark.slow
@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize("made", [DuckdbTables, DeltaTables])
def test_the_bytes_of_the_server_are_what_is_equal(
    made: Any, binary: bool, make_database: Any, pg18: Any, tmp_path: Path
) -> None:
    database = make_database(pg18)
    _make(database)
    synced = Synced(database, made(tmp_path))
    synced.options["binary"] = binary
    synced.sync()
    assert _differing(synced, "bk") == []
    same = "format('%s', v) = format('%s', (SELECT v FROM {r} WHERE id = 2))"
    first = f"ctid = (SELECT min(ctid) FROM {{t}} WHERE {same})"
    for statement, kinds in (
        (f"DELETE FROM {{t}} WHERE {first}", "b"),
        (f"UPDATE {{t}} SET v = {{one}}, w = 2 WHERE {first}", "b"),
        (f"DELETE FROM {{t}} WHERE {first}", "b"),
        # Each of the two in place of the other, as a key.
        ("DELETE FROM {t}; INSERT INTO {t} VALUES ({one}, 3)", "k"),
        ("UPDATE {t} SET v = {other}, w = 4", "k"),
        ("UPDATE {t} SET w = 5", "k"),
        ("DELETE FROM {t}; INSERT INTO {t} VALUES ({one}, 6)", "k"),
        ("DELETE FROM {t}", "k"),
        ("INSERT INTO {t} VALUES ({other}, 7)", "bk"),
    ):
        _change(database, statement, kinds)
        assert synced.sync(on_error="stop").stale == {}, statement
        assert _differing(synced, kinds) == [], statement
    report = verify(database.dsn, publications=["p"], target=synced.tables.target)
    assert {one.state for one in report.tables} == {"equal"}, report.tables


@pytest.mark.parametrize(
    ("values", "policy"),
    [
        ("(1.5), (NULL), ('NaN')", "numeric=18,1"),
        ("(123456789012345678.12)", "numeric=22,2"),
        ("(1e37)", "numeric=38,0"),
        ("(1e37), (0.01)", None),
        ("(0.0001)", "numeric=18,4"),
        ("(NULL)", None),
        ("(0)", "numeric=18,0"),
    ],
)
def test_a_policy_is_proposed_for_numerics_without_precision(
    values: str, policy: str | None, make_database: Any, pg18: Any
) -> None:
    database = make_database(pg18)
    database.execute(
        'CREATE TABLE n (id int, "A b" numeric, c numeric, d numeric(9,2))',
        f'INSERT INTO n ("A b") VALUES {values}',
        "CREATE TABLE none (id int, d numeric(5,1), v text)",
    )
    ids = [oid for (oid,) in database.execute(
        "SELECT oid::bigint FROM pg_class WHERE relname IN ('n', 'none')"
    )]  # fmt: skip
    with database.connect() as connection:
        (found,) = numerics.read_numerics(
            lambda query, *given: connection.execute(query, given or None).fetchall(), ids
        )
    assert (found.name, found.columns) == ("n", ("A b", "c"))
    assert numerics.proposed([found]) == policy
