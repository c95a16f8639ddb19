"""A database, and the tables of each kind of target that a sync makes of it: fixtures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.targets.altered_tables import MADE
from support.targets.synced_tables import KINDS, TABLES, Tables

from pgoutput_fast import apply
from pgoutput_fast.replication import upkeep


@pytest.fixture
def quick_upkeep(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_TICK", "_MERGE_INTERVAL", "_TIDY_INTERVAL", "_WATCH_INTERVAL"):
        monkeypatch.setattr(upkeep, name, 0.05)


class Synced:
    """A database, and a target that has its tables."""

    def __init__(self, database: Any, tables: Tables) -> None:
        self.database = database
        self.tables = tables
        self.options: dict[str, Any] = {
            "slot": f"slot_{database.name}", "publications": ["p"], **tables.given,
            "max_delay": 0.05, "interval": 0.05,
        }  # fmt: skip

    def sync(self, **options: Any) -> apply.SyncProgress:
        return apply.sync(self.database.dsn, **{"until": "now", **self.options, **options})

    def settle(self) -> list[str]:
        """Sync until nothing waits for a copy; why tables were copied again."""
        reasons: list[str] = []
        for _ in range(5):
            stale = self.sync().stale
            if not stale:
                return reasons
            reasons += stale.values()
        raise AssertionError(reasons)

    def rows(self, stored: str, *columns: str) -> list[tuple[Any, ...]]:
        found = self.tables.state(stored).select(columns).to_pylist()
        return sorted((tuple(row.values()) for row in found), key=repr)

    def compare(self, table: str, columns: str) -> int:
        """The rows of a table, which are the server's; how many they are."""
        names = columns.split(", ")
        quoted = ", ".join(f'"{name}"' for name in names)
        truth = self.database.execute(f'SELECT {quoted} FROM "{table}"')
        assert self.rows(f"public.{table}", *names) == sorted(truth, key=repr)
        changes = self.tables.changes(f"public.{table}").select(["commit_lsn", "seq"]).to_pylist()
        assert len({(row["commit_lsn"], row["seq"]) for row in changes}) == len(changes) > 0
        return len(truth)


@pytest.fixture(params=KINDS)
def tables(request: pytest.FixtureRequest, tmp_path: Path) -> Tables:
    return TABLES[request.param](tmp_path)


def synced_with(database: Any, tables: Tables) -> Synced:
    """A new database that has tables of some kinds, which a sync writes as `tables`."""
    database.execute(
        *MADE,
        "CREATE TABLE bag (a int, b text)",
        "ALTER TABLE bag REPLICA IDENTITY FULL",
        "INSERT INTO bag SELECT g % 3, NULLIF(g % 2, 0)::text FROM generate_series(1, 20) g",
        "CREATE PUBLICATION p FOR ALL TABLES",
    )
    return Synced(database, tables)


@pytest.fixture
def synced(make_database: Any, server: Any, tables: Tables) -> Synced:
    return synced_with(make_database(server), tables)
