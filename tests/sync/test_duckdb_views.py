"""Views in a DuckDB file under the server's names."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.changelogs.made_directory import MadeDirectory, catalog_read

from pgoutput_fast import apply, testing
from pgoutput_fast.changelog.schema_history import HistoryWriter

duckdb = pytest.importorskip("duckdb")


@pytest.fixture
def made(tmp_path: Path) -> Iterator[MadeDirectory]:
    with contextlib.closing(MadeDirectory(tmp_path / "segments")) as found:
        yield found


def sync(made: MadeDirectory, path: Path) -> apply.SyncProgress:
    return apply.sync(
        target=f"duckdb:{path}", segments=made.directory, until="now", uncopied="empty"
    )


def rows(path: Path, *names: str) -> dict[str, Any]:
    """What views have, by their names without quotes, read under another name of the file."""
    with duckdb.connect() as connection:
        connection.execute(f"ATTACH '{path}' AS other (READ_ONLY)")
        connection.execute("USE other")
        return {name: connection.execute(f"FROM {name}").fetchall() for name in names}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stem", "schemas"),
    [
        ("x", {"public": "public", "select": "select_", "changes": "changes_", "state": "state_"}),
        ("x", {"state": "state_", "state_": "state__", "main": "main_"}),
        ("x", {"sales": "sales_", "Sales": "Sales", "pg_catalog": "pg_catalog_"}),
        ("shop", {"shop": "shop__", "Shop": "Shop_", "public": "public"}),
        ("public", {"public": "public_"}),
        ("changes", {"public": "public", "changes": "changes_"}),
    ],
)
def test_names_of_schemas(
    made: MadeDirectory,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    stem: str,
    schemas: dict[str, str],
) -> None:
    path = tmp_path / f"{stem}.duckdb"
    frames = []
    for i, namespace in enumerate(schemas):
        table = testing.Table("orders", {"id": "int4"}, 16400 + i, namespace=namespace)
        frames += [table.relation(), testing.insert(table, [i])]
    made.commit(1200, *frames)
    with caplog.at_level(logging.WARNING, "pgoutput_fast.apply.duckdb_views"):
        sync(made, path)
    views = {f"{name}.orders": i for i, name in enumerate(schemas.values())}
    assert {name: found[0][0] for name, found in rows(path, *views).items()} == views
    said = [one for one in caplog.records if one.name.endswith("duckdb_views")]
    assert len(said) == sum(name != given for given, name in schemas.items())


@pytest.mark.slow
def test_views_follow_their_tables(made: MadeDirectory, tmp_path: Path) -> None:
    """What is not ours in a schema stays."""
    path = tmp_path / "x.duckdb"
    table = testing.Table("orders", {"id": "int4"}, 16400, key=["id"])
    wider = testing.Table("orders", {"id": "int4", "n": "int4"}, 16400, key=["id"])
    history = HistoryWriter(made.directory, None)
    history.note(catalog_read(1100, table))
    made.commit(1200, table.relation(), testing.insert(table, [1]))
    sync(made, path)
    assert rows(path, "public.orders") == {"public.orders": [(1,)]}
    with duckdb.connect(str(path)) as connection:
        connection.execute("CREATE VIEW public.mine AS SELECT 7 AS seven")
        connection.execute("CREATE VIEW public.sales AS SELECT 8 AS eight")
    history.note(catalog_read(1250, wider, n="7"))
    made.commit(1300, wider.relation(), testing.insert(wider, [2, 8]))
    assert sync(made, path).stale == {}
    assert rows(path, "public.orders")["public.orders"] == [(1, 7), (2, 8)]
    renamed = testing.Table("sales", {"id": "int4", "n": "int4"}, 16400, key=["id"])
    made.commit(1400, renamed.relation(), testing.insert(renamed, [3, 9]))
    sync(made, path)
    found = rows(path, "public.sales", "public.sales_", "public.mine")
    assert found["public.sales_"] == [(1, 7), (2, 8), (3, 9)]
    assert (found["public.sales"], found["public.mine"]) == ([(8,)], [(7,)])
    with pytest.raises(duckdb.CatalogException):
        rows(path, "public.orders")


def test_a_new_table_has_the_name_of_a_dropped_one(made: MadeDirectory, tmp_path: Path) -> None:
    """Its view does, too, and the dropped table's gets another name."""
    path = tmp_path / "x.duckdb"
    for number in (16400, 16401):
        table = testing.Table("orders", {"id": "int4"}, number, key=["id"])
        lsn = 1200 + 100 * (number - 16400)
        made.commit(lsn, table.relation(), testing.insert(table, [number]))
        sync(made, path)
    assert rows(path, "public.orders", "public.orders_") == {
        "public.orders": [(16401,)], "public.orders_": [(16400,)]
    }  # fmt: skip
