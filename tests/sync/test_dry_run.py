"""What a dry run says of each table is what the sync then does."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.changelogs.made_directory import MadeDirectory
from support.targets.synced_tables import TABLES, Tables

from pgoutput_fast import apply, testing
from pgoutput_fast.apply.dry_run import SyncPlan, plan_sync
from pgoutput_fast.apply.options import SyncOptions, TargetOptions
from pgoutput_fast.apply.synchronize import open_target

pytest.importorskip("duckdb")
pytest.importorskip("deltalake")

COLUMNS = {"id": "int4", "day": "date"}
DAYS = testing.Table("days", COLUMNS, 16390, key=["id"])
DATES = testing.Table("dates", COLUMNS, 16390, key=["id"])
OTHER = testing.Table("other", {"id": "int4", "note": "text"}, 16392, key=["id"])


@pytest.fixture(params=["duckdb", "delta"])
def tables(request: pytest.FixtureRequest, tmp_path: Path) -> Tables:
    return TABLES[request.param](tmp_path)


@pytest.fixture
def made(tmp_path: Path) -> Iterator[MadeDirectory]:
    with contextlib.closing(MadeDirectory(tmp_path / "segments")) as found:
        for table in (DAYS, OTHER):
            found.wait(table, 1000)
            found.copy(table, 1100, [[1, None]])
        yield found


def days(lsn: int, columns: dict[str, str], *row: Any) -> Callable[[MadeDirectory], None]:
    """A transaction after which the table has these columns, and one of another table."""
    table = testing.Table("days", columns, 16390, key=["id"])

    def commit(made: MadeDirectory) -> None:
        made.commit(lsn, table.relation(), testing.insert(table, list(row)))
        made.commit(lsn + 100, OTHER.relation(), testing.insert(OTHER, [lsn, "another"]))

    return commit


STEPS: dict[str, list[Callable[[MadeDirectory], None]]] = {
    "nothing": [],
    "changes": [days(2000, COLUMNS, 2, "2020-01-02")],
    "truncated": [lambda made: made.commit(2000, DAYS.relation(), testing.truncate([DAYS]))],
    "removed": [days(2000, {"id": "int4"}, 2)],
    "added": [days(2000, {**COLUMNS, "more": "int4"}, 2, "2020-01-02", 5)],
    "retyped": [days(2000, {"id": "int4", "day": "text"}, 2, "x")],
    "refused": [days(2000, COLUMNS, 2, "infinity"), days(3000, COLUMNS, 3, None)],
    "renamed": [
        lambda made: made.commit(2000, DATES.relation(), testing.insert(DATES, [2, None])),
    ],
}


def planned(made: MadeDirectory, tables: Tables) -> SyncPlan:
    target = str(tables.given["target"])
    opened = open_target(target, TargetOptions())
    with contextlib.closing(opened.target):
        return plan_sync(
            opened.target, target, opened.decode_for, made.directory, SyncOptions(),
            opened.consumer, None,
        )  # fmt: skip


@pytest.mark.parametrize("begins", ["new", "known"])
@pytest.mark.parametrize("steps", STEPS)
def test_a_dry_run_says_what_the_sync_does(
    begins: str, steps: str, made: MadeDirectory, tables: Tables
) -> None:
    def sync() -> apply.SyncProgress:
        return apply.sync(segments=made.directory, until="now", **tables.given)

    if begins == "known":
        sync()
    for step in STEPS[steps]:
        step(made)
    plan = planned(made, tables)
    progress = sync()
    assert sum(table.rows + table.changes for table in plan.tables) == progress.changes
    assert {table.name: table.refused for table in plan.tables if table.refused} == progress.paused
    said = {table.relation_id: table.after for table in plan.tables
            if table.after is not None and table.refused is None}  # fmt: skip
    held = {table.relation_id: table for table in progress.table_states if table.paused is None}
    assert said.keys() == held.keys()
    names = (
        "namespace",
        "name",
        "stored_name",
        "columns",
        "lsn",
        "copy_lsn",
        "commit_time",
        "stale",
    )
    for name in names:
        assert {key: getattr(table, name) for key, table in said.items()} == {
            key: getattr(table, name) for key, table in held.items()
        }
