"""Tables that are altered while `apply.sync` follows them; the truth is what SELECT says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from altered_tables import EVOLVED, REUSED
from synced_database import Synced, synced_with
from synced_tables import TABLES

pytest.importorskip("duckdb")
pytest.importorskip("deltalake")

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("quick_upkeep")]

PLACES = [(18, "duckdb"), (18, "delta")] + [
    pytest.param(*place, marks=pytest.mark.slow)
    for place in ((16, "duckdb"), (16, "delta"), (18, "distributed"), (18, "iceberg"))
]
"""Versions of the server do not differ in what an engine makes of a stream, so one has them all."""


@pytest.fixture
def synced(version: int, kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> Synced:
    make_database: Any = request.getfixturevalue("make_database")
    server = request.getfixturevalue(f"pg{version}")
    return synced_with(make_database(server), TABLES[kind](tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize(("version", "kind"), PLACES)
@pytest.mark.parametrize("is_one", [False, True])
@pytest.mark.parametrize("statements", REUSED)
def test_a_name_that_another_column_gets(synced: Synced, statements: str, is_one: bool) -> None:
    """Among changes, of which none tells it."""
    synced.sync()
    run = ["INSERT INTO t (id, v, d) VALUES (200, 'v', 'd')", *statements.split("; "),
           "INSERT INTO t (id, d) VALUES (202, 'e')"]  # fmt: skip
    synced.database.execute(*(["BEGIN; " + "; ".join(run) + "; COMMIT"] if is_one else run))
    synced.settle()
    names = synced.database.execute(
        "SELECT attname FROM pg_attribute WHERE attrelid = 't'::regclass AND attnum > 0 "
        "AND NOT attisdropped"
    )
    assert synced.compare("t", ", ".join(name for (name,) in names)) in (52, 53)


QUICK = (0, 3, 12)
"""Of these cases, into DuckDB."""


@pytest.mark.parametrize(
    ("statement", "columns"),
    [
        pytest.param(*case, id=case[0], marks=() if i in QUICK else pytest.mark.slow)
        for i, case in enumerate(EVOLVED)
    ],
)
@pytest.mark.parametrize(("version", "kind"), PLACES)
@pytest.mark.parametrize("again", [False, True])
def test_tables_that_are_altered(
    synced: Synced, statement: str, columns: str | None, again: bool
) -> None:
    """What can be followed is followed; else the table is copied again, and never is it wrong."""
    synced.sync()
    synced.database.execute(
        "UPDATE t SET n = n + 1 WHERE id < 5", *statement.split("; "),
    )  # fmt: skip
    table = "t2" if statement.endswith("t2") else "t"
    if again:
        synced.sync()
    synced.database.execute(
        f"UPDATE {table} SET id = -id WHERE id = 20",
        f"DELETE FROM {table} WHERE id = 21",
        f"INSERT INTO {table} (id, d) VALUES (999999, 'born')"
        if "RENAME d" not in statement
        else f"INSERT INTO {table} (id, v) VALUES (999999, 'born')",
    )
    reasons = synced.settle()
    names = synced.database.execute(
        f"SELECT attname FROM pg_attribute WHERE attrelid = '{table}'::regclass AND attnum > 0"
        " AND NOT attisdropped"
    )
    if columns is not None:
        assert reasons == []
        synced.compare(table, columns)
    else:
        assert len(reasons) == 1
        synced.compare(table, ", ".join(name for (name,) in names))
    if '"ID"' in statement:
        truth = synced.database.execute('SELECT id, "ID" FROM t')
        assert synced.rows("public.t", "id", "ID_") == sorted(truth, key=repr)
