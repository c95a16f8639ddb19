"""A database of SQL_ASCII, whose texts are any bytes, from the server into DuckDB's tables."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from support.expected_errors import expect_error

import pgoutput_fast as pf
from pgoutput_fast import apply, replication
from pgoutput_fast.errors import Argument
from pgoutput_fast.verify import verify

duckdb = pytest.importorskip("duckdb")

pytestmark = pytest.mark.server

RAW = {1: b"caf\xe9", 2: "é".encode(), 3: "€".encode()[:2], 4: b"caf\xe9", 5: b"\xff\xfe", 6: b"ok"}
CHOICES: dict[Any, dict[int, Any]] = {
    "replace": {i: raw.decode(errors="replace") for i, raw in RAW.items()},
    "binary": RAW,
}


def literal(raw: bytes) -> bytes:
    return b"convert_from('\\x%s', 'SQL_ASCII')" % raw.hex().encode()


@pytest.fixture
def database(make_database: Any, pg18: Any) -> Any:
    made = make_database(pg18, "SQL_ASCII")
    run(
        made,
        b"CREATE TABLE t (id int PRIMARY KEY, v text, w varchar(9)[])",
        b"CREATE TABLE other (id int PRIMARY KEY)",
        "CREATE TABLE café (id int PRIMARY KEY)".encode(),
        b"CREATE PUBLICATION p FOR ALL TABLES",
        *(insert(i) for i in (1, 2, 3)),
    )
    return made


def insert(i: int) -> bytes:
    value = literal(RAW[i])
    return b"INSERT INTO t VALUES (%d, %s, ARRAY[%s])" % (i, value, value)


def run(database: Any, *statements: bytes) -> None:
    with database.connect() as connection:
        for statement in statements:
            connection.execute(statement)


def end_of(database: Any) -> int:
    ((lsn,),) = database.execute("SELECT pg_current_wal_lsn() - '0/0'")
    return int(lsn)


def rows(target: Path) -> dict[int, tuple[Any, ...]]:
    with contextlib.closing(duckdb.connect(str(target), read_only=True)) as connection:
        found = connection.execute('SELECT * FROM state."public.t"').fetchall()
    return {row[0]: row[1:] for row in found}


@pytest.mark.slow
@pytest.mark.parametrize("is_binary", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_text_of_any_bytes_in_duckdb(database: Any, tmp_path: Path, is_binary: bool) -> None:
    """What is captured once is read with each policy; the default refuses it, and names the way."""
    segments = tmp_path / "captured"
    given: dict[str, Any] = {
        "slot": f"s_{database.name}",
        "publications": ["p"],
        "create_slot": True,
    }
    replication.capture(
        database.dsn, directory=segments, until_lsn=end_of(database), snapshot="initial",
        binary=is_binary, **given,
    )  # fmt: skip
    run(
        database, insert(4), insert(5), b"UPDATE t SET v = v || 'x', w = NULL WHERE id = 1",
        b"INSERT INTO other VALUES (1)", "INSERT INTO café VALUES (1)".encode(),
        b"ALTER TABLE t ADD n text DEFAULT 'new'", insert(6), b"DELETE FROM t WHERE id = 3",
    )  # fmt: skip
    replication.capture(
        database.dsn, directory=segments, until_lsn=end_of(database), binary=is_binary, **given
    )
    end = end_of(database)
    with expect_error(
        code="bad_encoding", column="v", options=[Argument("invalid_text")]
    ) as caught:
        apply.sync(
            segments=segments, target=f"duckdb:{tmp_path}/error.duckdb", until=end, on_error="stop"
        )
    for word in ("public.t", "LSN"):
        assert word in str(caught.value)
    for choice, values in CHOICES.items():
        target = tmp_path / f"{choice}.duckdb"
        policies = pf.Policies(invalid_text=choice)
        apply.sync(segments=segments, target=f"duckdb:{target}", policies=policies, until=end)
        wanted: dict[int, tuple[Any, Any]] = {
            i: (one, [one]) for i, one in values.items() if i != 3
        }
        more = (b"x", b"new") if choice == "binary" else ("x", "new")
        wanted[1] = values[1] + more[0], None
        assert rows(target) == {i: (*value, more[1]) for i, value in wanted.items()}


def test_text_of_any_bytes_in_streams(database: Any) -> None:
    policies = pf.Policies(invalid_text="binary")
    with replication.snapshot(database.dsn, publications=["p"], policies=policies) as batches:
        found = [row for batch in batches for row in pa.record_batch(batch).to_pylist()]
    assert {row["after"]["id"]: row["after"]["v"] for row in found if row["after"]} == {
        i: RAW[i] for i in (1, 2, 3)
    }
    with replication.connect(
        database.dsn, slot=f"s_{database.name}", publications=["p"], create_slot=True,
        temporary=True, policies=policies,
    ) as stream:  # fmt: skip
        run(database, insert(4))
        transaction = next(iter(stream.transactions()))
        (batch,) = transaction.batches()
        assert pa.record_batch(batch).column("after").to_pylist()[0]["v"] == RAW[4]


@pytest.mark.slow
@pytest.mark.parametrize("choice", ["error", "replace", "binary"])
def test_verify_compares_bytes_and_refuses_one_table(
    database: Any, tmp_path: Path, choice: str
) -> None:
    target = f"duckdb:{tmp_path}/t.duckdb"
    policies = pf.Policies(invalid_text=choice)  # type: ignore[arg-type]
    given: dict[str, Any] = {"publications": ["p"], "target": target}
    sync = {**given, "slot": f"s_{database.name}", "until": "now", "policies": policies}
    apply.sync(database.dsn, **sync)
    run(database, insert(4), insert(6), b"INSERT INTO other VALUES (1)")
    paused = apply.sync(database.dsn, **sync).paused

    def found(**more: Any) -> dict[str, Any]:
        report = verify(database.dsn, **given, **more)
        return {one.name: one for one in report.tables}

    tables = found()
    assert (tables["other"].state, tables["café"].state) == ("equal", "equal")
    if choice != "binary":
        assert tables["t"].state == "not compared"
        assert paused.get("public.t", "exclude the column") in tables["t"].why
        assert [*paused] == ["public.t"] * (choice == "error")
        if choice == "replace":
            assert found(exclude=["public.t.v", "public.t.w"])["t"].state == "equal"
        return
    assert (tables["t"].state, tables["t"].rows) == ("equal", 5)
    with contextlib.closing(duckdb.connect(str(tmp_path / "t.duckdb"))) as connection:
        connection.execute("UPDATE state.\"public.t\" SET v = '\\xFF'::BLOB WHERE id = 4")
    (differing,) = found()["t"].differences
    assert (differing.key, differing.columns) == ({"id": "4"}, {"v": ("636166e9", "ff")})
