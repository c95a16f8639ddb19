"""Single tables of a target that were put back or deleted between two syncs."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import Any

import duckdb
import pytest
from support.postgres.servers import now
from support.targets.synced_database import Synced
from support.targets.synced_tables import DuckdbTables, IcebergTables
from support.waiting import wait_until

from pgoutput_fast.cli import main
from pgoutput_fast.embedded import EmbeddedServer
from pgoutput_fast.replication import capture

pytest.importorskip("deltalake")

from deltalake import DeltaTable
from support.expected_errors import expect_error

pytestmark = [
    pytest.mark.server, pytest.mark.usefixtures("quick_upkeep")
]  # fmt: skip

COLUMNS = "id, v, n, d"
SLOW = [pytest.param("iceberg", marks=pytest.mark.slow)]


@pytest.fixture
def server(pg18: EmbeddedServer) -> EmbeddedServer:
    return pg18


def place_of(synced: Synced, kind: str) -> Path:
    """What has one of the two tables of `t`, by itself if that can be."""
    if kind == "changes" and isinstance(synced.tables, IcebergTables):
        return synced.tables.paths[-1]
    return synced.tables.path / kind / "public.t"


def put_back(place: Path, copy: Path) -> None:
    if place.is_dir():
        shutil.rmtree(place)
        shutil.copytree(copy, place)
    else:
        shutil.copy(copy, place)


def check_copied(synced: Synced, rows: int) -> None:
    """The rows are the server's, and what its change table comes to by itself is the same."""
    assert synced.settle() == []
    assert synced.compare("t", COLUMNS) == rows
    changes = synced.tables.changes("public.t").sort_by(
        [("commit_lsn", "ascending"), ("seq", "ascending")]
    )
    ops = changes.column("op").to_pylist()
    last = len(ops) - ops[::-1].index("truncate")
    assert ops[last:] == ["read"] * rows
    places = [(one["commit_lsn"], one["seq"]) for one in changes.to_pylist()]
    assert len(places) == len(set(places))


def version_of(place: Path) -> int:
    return DeltaTable(str(place)).version() if (place / "_delta_log").exists() else 0


def commit_behind(place: Path) -> None:
    """Have another program do something to a table that leaves its rows as they are."""
    table = DeltaTable(str(place))
    table.alter.set_table_description("of somebody")
    table.vacuum(0, dry_run=False, enforce_retention_duration=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tables", "what", "goes_on"),
    [("delta", "state", False), ("delta", "changes", True), ("delta", "restore behind", True)]
    + [
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            ("delta", "last entry", False), ("distributed", "state", True),
            ("delta", "restore", True), ("distributed", "restore behind", False),
            ("iceberg", "changes", False), ("distributed iceberg", "changes", True),
        )
    ],
    indirect=["tables"],
)  # fmt: skip
def test_a_table_that_was_put_back(
    synced: Synced, tmp_path: Path, what: str, goes_on: bool
) -> None:
    """It lacks what came since, whether more comes or not; it is copied again."""
    synced.sync()
    kind = "changes" if what.startswith("changes") else "state"
    place, copy = place_of(synced, kind), tmp_path / "copy"
    version = version_of(place)
    if place.is_dir():
        shutil.copytree(place, copy)
    else:
        shutil.copy(place, copy)
    synced.database.execute("UPDATE t SET n = 99 WHERE id < 20", "DELETE FROM t WHERE id = 30")
    assert synced.sync().stale == {}
    if what == "last entry":
        max((place / "_delta_log").glob("*.json")).unlink()
    elif what.startswith("restore"):
        DeltaTable(str(place)).restore(version)
        if what != "restore":
            commit_behind(place)
    else:
        put_back(place, copy)
    if goes_on:
        synced.database.execute(
            "INSERT INTO t VALUES (70, 'x', 1, 'd')", "UPDATE bag SET b = 'y' WHERE a = 1"
        )
    with expect_error(code="stale", table="public.t"):
        synced.sync(on_error="stop")
    synced.settle()
    check_copied(synced, 50 if goes_on else 49)
    synced.compare("bag", "a, b")


@pytest.mark.parametrize("tables", ["delta"], indirect=True)
def test_what_is_put_back_is_copied_by_order(synced: Synced) -> None:
    """Of a sync that asks for no copies, somebody can order one."""
    synced.sync()
    place = place_of(synced, "state")
    version = version_of(place)
    synced.database.execute("UPDATE t SET n = 99 WHERE id < 20")
    synced.sync()
    DeltaTable(str(place)).restore(version)
    with expect_error(code="stale", table="public.t"):
        synced.sync(on_error="stop")
    directory = synced.tables.path.with_name(f"{synced.tables.path.name}.segments")
    assert main(["snapshot", "--dir", str(directory), "--table", "public.t"]) == 0
    given = {key: synced.options[key] for key in ("slot", "publications")}
    capture(
        synced.database.dsn, directory=directory, until_lsn=now(synced.database.server), **given
    )
    assert synced.sync(on_error="stop").stale == {}
    check_copied(synced, 50)


@pytest.mark.slow
@pytest.mark.parametrize("tables", ["duckdb", "delta", *SLOW], indirect=True)
def test_a_change_table_that_was_deleted(synced: Synced) -> None:
    synced.sync()
    tables = synced.tables
    if isinstance(tables, DuckdbTables):
        with contextlib.closing(duckdb.connect(str(tables.path))) as connection:
            connection.execute('DROP TABLE changes."public.t"')
    elif isinstance(tables, IcebergTables):
        tables.opened().drop_table(("changes", "public.t"))
    else:
        shutil.rmtree(place_of(synced, "changes"))
    with expect_error(code="stale", table="public.t"):
        synced.sync(on_error="stop")
    synced.settle()
    check_copied(synced, 50)


@pytest.mark.slow
@pytest.mark.parametrize("tables", ["duckdb", "delta"], indirect=True)
def test_a_target_that_is_not_there(synced: Synced, caplog: pytest.LogCaptureFixture) -> None:
    """It may have been deleted, or its disk is not mounted: it begins anew, and says so."""
    synced.sync()
    synced.database.execute("INSERT INTO t VALUES (70, 'x', 1, 'd')")
    synced.sync()
    assert "is a new target" not in caplog.text
    synced.tables.remove()
    synced.settle()
    told = f"{synced.options['target']} is a new target, but a sync has read "
    assert told in caplog.text
    assert synced.compare("t", COLUMNS) == 51
    assert caplog.text.count("is a new target") == 1


@pytest.mark.parametrize("tables", ["delta"], indirect=True)
def test_tables_without_their_progress(synced: Synced) -> None:
    synced.sync()
    shutil.rmtree(synced.tables.path / "_progress")
    with expect_error(code="damaged", path=str(synced.tables.path)):
        synced.sync()
    assert not (synced.tables.path / "_progress").exists()


@pytest.mark.slow
@pytest.mark.parametrize("tables", ["duckdb", "delta"], indirect=True)
def test_a_target_of_which_no_table_has_come_yet(
    synced: Synced, caplog: pytest.LogCaptureFixture
) -> None:
    """It goes on, though what it has passed over is deleted."""
    given: dict[str, Any] = {
        "snapshot": "never", "uncopied": "empty", "tables": "public.t", "keep_seconds": 0.001,
    }  # fmt: skip
    synced.database.execute("DELETE FROM t")
    for row in range(4):
        synced.sync(**given)
        synced.database.execute(f"INSERT INTO bag VALUES ({row}, 'b')")
    assert "is a new target" not in caplog.text
    synced.database.execute("INSERT INTO t VALUES (1, 'x', 1, 'd')")
    assert synced.sync(**given).stale == {}
    assert synced.compare("t", COLUMNS) == 1


@pytest.mark.slow
@pytest.mark.parametrize("tables", ["duckdb", "delta"], indirect=True)
def test_tables_that_left_and_were_deleted(synced: Synced) -> None:
    """Nobody can copy them, and nobody has need of them."""
    synced.sync()
    synced.database.execute("DROP TABLE t", "INSERT INTO bag VALUES (9, 'b')")
    wait_until(lambda: synced.sync().left == ("public.t",))
    if isinstance(synced.tables, DuckdbTables):
        with contextlib.closing(duckdb.connect(str(synced.tables.path))) as connection:
            connection.execute('DROP TABLE changes."public.t"; DROP TABLE state."public.t"')
    else:
        for kind in ("changes", "state"):
            shutil.rmtree(place_of(synced, kind))
    synced.database.execute("INSERT INTO bag VALUES (10, 'b')")
    assert synced.sync(on_error="stop").stale == {}
    synced.compare("bag", "a, b")
