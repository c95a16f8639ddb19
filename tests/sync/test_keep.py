"""Targets that keep the rows of tables alone, or their changes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.changelogs.made_directory import MadeDirectory
from support.expected_errors import expect_error
from support.targets.synced_tables import DeltaTables, DuckdbTables, Tables

from pgoutput_fast import apply, testing

pytest.importorskip("duckdb")
pytest.importorskip("deltalake")

THINGS = testing.Table("things", {"id": "int4", "note": "text"}, 16390, key=["id"])


@pytest.fixture
def made(tmp_path: Path) -> Iterator[MadeDirectory]:
    with contextlib.closing(MadeDirectory(tmp_path / "segments")) as found:
        found.wait(THINGS, 1000)
        found.copy(THINGS, 1100, [[1, "a"]])
        found.commit(1200, THINGS.relation(), testing.insert(THINGS, [2, "b"]))
        yield found


@pytest.fixture(params=[DuckdbTables, DeltaTables])
def tables(request: pytest.FixtureRequest, tmp_path: Path) -> Tables:
    found: Tables = request.param(tmp_path)
    return found


def sync(made: MadeDirectory, tables: Tables, **options: Any) -> apply.SyncProgress:
    return apply.sync(segments=made.directory, until="now", **tables.given, **options)


@pytest.mark.parametrize("keep", ["state", "changes"])
def test_a_target_keeps_a_part_of_the_tables(
    made: MadeDirectory, tables: Tables, keep: Any
) -> None:
    ended = sync(made, tables, keep=keep)
    assert (ended.changes, ended.stale) == (2, {})
    made.commit(1300, THINGS.relation(), testing.update(THINGS, [1, "A"]))
    sync(made, tables)  # which goes on as the target was begun
    assert tables.has("state", "public.things") == (keep == "state")
    assert tables.has("changes", "public.things") == (keep == "changes")
    if keep == "state":
        found = sorted(tables.state("public.things").to_pylist(), key=lambda row: row["id"])
        assert found == [{"id": 1, "note": "A"}, {"id": 2, "note": "b"}]
    else:
        found = [row["op"] for row in tables.changes("public.things").to_pylist()]
        assert sorted(found) == ["insert", "read", "truncate", "update"]
    other = "changes" if keep == "state" else "state"
    for wanted in (other, "both"):
        with expect_error(code="bad_option", parameter="keep"):
            sync(made, tables, keep=wanted)


def test_changes_alone_need_no_snapshot(made: MadeDirectory, tables: Tables) -> None:
    other = testing.Table("other", {"id": "int4"}, 16391, key=["id"])
    made.commit(1300, other.relation(), testing.insert(other, [7]))
    assert sync(made, tables, keep="changes").tables["public.other"] == 1


def test_what_does_not_go_with_a_part_of_the_tables(
    made: MadeDirectory, tables: Tables, tmp_path: Path
) -> None:
    with expect_error(code="bad_option", parameter="soft_deletes"):
        sync(made, tables, keep="changes", soft_deletes="gone")
    with expect_error(code="bad_option", parameter="keep"):
        apply.sync(
            segments=made.directory, until="now", target=f"parquet:{tmp_path / 'files'}",
            keep="state",
        )  # fmt: skip
    assert not tables.path.exists() or tables.progress() == {}
