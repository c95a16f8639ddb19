"""Names in DuckDB that are also a catalogue's or a schema's, and keys with odd names."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.changelogs.made_directory import MadeDirectory

from pgoutput_fast import testing
from pgoutput_fast.apply import sync

duckdb = pytest.importorskip("duckdb")

SCHEMAS = ("changes", "state", "main", "pgoutput_fast", "temp")


def captured(directory: Path, *tables: testing.Table) -> None:
    made = MadeDirectory(directory)
    for number, one in enumerate(tables):
        made.wait(one, 1000 + number, first=False)
    for number, one in enumerate(tables):
        made.copy(one, 1100 + number, [[1, "a"]])
    for number, one in enumerate(tables):
        frames = testing.update(one, [1, "b"]), testing.insert(one, [2, "c"])
        made.commit(1200 + 100 * number, one.relation(), *frames)
    made.close()


def tables_of_schemas() -> list[testing.Table]:
    columns = {"id": "int4", "v": "text"}
    return [
        testing.Table("t", columns, 16400 + number, namespace=schema)
        for number, schema in enumerate(SCHEMAS)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("stem", ["changes", "state", "main", "a.b", "memory", "_source"])
def test_a_target_may_have_any_name(tmp_path: Path, stem: str) -> None:
    captured(tmp_path / "log", *tables_of_schemas())
    path = tmp_path / f"{stem}.duckdb"
    for _ in range(2):
        sync(target=f"duckdb:{path}", segments=tmp_path / "log", until="now")
    with duckdb.connect() as connection:
        connection.execute(f"ATTACH '{path}' AS there (READ_ONLY)")
        for schema in SCHEMAS:
            rows = connection.execute(f'FROM there.state."{schema}.t" ORDER BY 1').fetchall()
            assert rows == [(1, "b"), (2, "c")]
            changes = connection.execute(f'SELECT op FROM there.changes."{schema}.t"').fetchall()
            assert len(changes) == 4


@pytest.mark.slow
@pytest.mark.parametrize("key", [".id", "a.b", "id ", '"', "$[0]", "é"])
@pytest.mark.parametrize("target", ["", "duckdb:"])
def test_a_key_may_have_any_name(tmp_path: Path, key: str, target: str) -> None:
    if not target:
        pytest.importorskip("deltalake")
    orders = testing.Table("t", {key: "int4", "v": "text"}, 16400, key=[key])
    captured(tmp_path / "log", orders)
    found = sync(target=f"{target}{tmp_path / 'there'}", segments=tmp_path / "log", until="now")
    assert (sum(found.tables.values()), found.stale) == (3, {})
