"""One target and several directories, or a server of which an earlier state was restored."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.expected_errors import expect_error
from support.postgres.servers import CopiedServer, ImagedServer, NewServer, backup, execute, now
from support.targets.synced_database import Synced
from support.waiting import wait_until

from pgoutput_fast import apply
from pgoutput_fast.apply.targets import OTHER_HISTORY
from pgoutput_fast.embedded import find_server_bindir
from pgoutput_fast.replication import capture
from pgoutput_fast.verify import verify

pytest.importorskip("duckdb")
pytest.importorskip("deltalake")

pytestmark = [
    pytest.mark.server, pytest.mark.usefixtures("quick_upkeep")
]  # fmt: skip


@pytest.mark.slow
def test_a_snapshot_that_is_older_than_what_the_target_has(synced: Synced, tmp_path: Path) -> None:
    """The target passes over it, as its rows would take away what came since."""
    database, other = synced.database, tmp_path / "other"
    synced.sync()
    given: dict[str, Any] = {"slot": f"other_{database.name}", "publications": ["p"]}
    capture(
        database.dsn, directory=other, create_slot=True, snapshot="initial",
        until_lsn=now(database.server), **given,
    )  # fmt: skip
    database.execute("DELETE FROM t WHERE id = 2", "INSERT INTO t (id, d) VALUES (60, 'd')")
    synced.sync()
    target = {key: synced.options[key] for key in synced.tables.given}
    apply.sync(segments=other, until="now", **target)
    assert synced.compare("t", "id, v, n, d") == 50
    copies = [row["copy_lsn"] for row in synced.tables.progress().values()]
    database.execute("INSERT INTO t (id, d) VALUES (61, 'd')")
    assert synced.sync(**given, directory=other, on_error="stop").stale == {}
    assert synced.compare("t", "id, v, n, d") == 51
    assert [row["copy_lsn"] for row in synced.tables.progress().values()] == copies


@pytest.mark.slow
def test_a_server_that_was_restored(tmp_path: Path) -> None:
    """Its changes have LSNs that the target believes to have already."""
    bindir = find_server_bindir(18)
    settings = {"log_min_messages": "fatal"}
    with NewServer(18, settings) as server:
        execute(server, "CREATE TABLE t (id int PRIMARY KEY)", "CREATE PUBLICATION p FOR TABLE t")
        given: dict[str, Any] = {
            "publications": ["p"],
            "target": str(tmp_path / "lake"),
            "until": "now",
        }
        apply.sync(server.dsn(), slot="s", **given)
        restore = {"restore_command": "false", **settings}
        earlier = CopiedServer(backup(server), "recovery.signal", restore, bindir)
        rows = "INSERT INTO t SELECT generate_series(1, 3000)"
        execute(server, rows)
        apply.sync(server.dsn(), slot="s", **given)
        with earlier:
            wait_until(lambda: execute(earlier, "SELECT pg_is_in_recovery()") == [(False,)])
            execute(earlier, "INSERT INTO t VALUES (-1)")
            new: dict[str, Any] = {"slot": "new", "directory": tmp_path / "new", **given}
            with expect_error(code="another_history"):
                apply.sync(earlier.dsn(), **new)
            with expect_error(code="another_history"):
                verify(earlier.dsn(), publications=["p"], target=given["target"])
            assert execute(earlier, "SELECT slot_name FROM pg_replication_slots") == []
            assert not (tmp_path / "new").exists()
            # Later its log is long again; what it has is copied then.
            execute(earlier, "SELECT pg_switch_wal()", "INSERT INTO t VALUES (-2)")
            apply.sync(earlier.dsn(), **new)
            truth = execute(earlier, "SELECT id FROM t ORDER BY id")
    import deltalake

    found = deltalake.DeltaTable(str(tmp_path / "lake" / "state" / "public.t")).to_pyarrow_table()
    assert sorted((one,) for one in found.column("id").to_pylist()) == truth


@pytest.fixture
def imaged(tmp_path: Path) -> Iterator[ImagedServer]:
    with ImagedServer(tmp_path / "segments") as server:
        yield server


def compare_state(server: ImagedServer, lake: Path) -> None:
    import deltalake

    found = deltalake.DeltaTable(str(lake / "state" / "public.t")).to_pyarrow_table()
    truth = execute(server, "SELECT id FROM t ORDER BY id")
    assert sorted((one,) for one in found.column("id").to_pylist()) == truth


CHANGED = ("INSERT INTO t VALUES (100)", "DELETE FROM t WHERE id = 1")


def copies_of(lake: Path) -> list[int]:
    import deltalake

    found = deltalake.DeltaTable(str(lake / "_progress")).to_pyarrow_table()
    lsns: list[int] = found.column("copy_lsn").to_pylist()
    return lsns


@pytest.mark.slow
@pytest.mark.parametrize(
    "in_silence", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["changes", "in silence"]
)
def test_a_server_and_a_directory_that_were_put_back(
    imaged: ImagedServer, tmp_path: Path, caplog: pytest.LogCaptureFixture, in_silence: bool
) -> None:
    """As they are on one disk, of which there was an image; the target is elsewhere, and newer."""
    given: dict[str, Any] = {
        "slot": "s", "publications": ["p"], "target": str(tmp_path / "lake"),
        "directory": tmp_path / "segments", "until": "now",
    }  # fmt: skip
    apply.sync(imaged.dsn(), **given)
    imaged.keep()
    before = copies_of(tmp_path / "lake")
    execute(imaged, *CHANGED)
    apply.sync(imaged.dsn(), **given)
    assert copies_of(tmp_path / "lake") == before
    imaged.go_back(in_silence=in_silence)
    with expect_error(code="another_history", path=str(tmp_path / "segments")):
        apply.sync(imaged.dsn(), **given, on_error="stop")
    for row in (202, 203):
        apply.sync(imaged.dsn(), **given)
        assert f"public.t is not kept up to date: {OTHER_HISTORY}" in caplog.text
        if not in_silence:
            execute(imaged, f"INSERT INTO t VALUES ({row})")
    assert apply.sync(imaged.dsn(), **given).stale == {}
    compare_state(imaged, tmp_path / "lake")
    # What it found wrong is settled.
    copies = copies_of(tmp_path / "lake")
    assert apply.sync(imaged.dsn(), **given, on_error="stop").stale == {}
    assert copies_of(tmp_path / "lake") == copies


@pytest.mark.slow
@pytest.mark.parametrize("target", ["lake", "duckdb:tables.duckdb"])
def test_a_capture_that_went_on_in_what_was_put_back(
    imaged: ImagedServer, tmp_path: Path, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sync only reads: it sees that its target has a transaction that is not there."""
    monkeypatch.chdir(tmp_path)
    given: dict[str, Any] = {"target": target, "segments": tmp_path / "segments", "until": "now"}

    def go_on() -> None:
        capture(
            imaged.dsn(), slot="s", publications=["p"], directory=tmp_path / "segments",
            create_slot=True, snapshot="initial", until_lsn=now(imaged), keep_seconds=0.001,
        )  # fmt: skip

    go_on()
    apply.sync(**given)
    imaged.keep()
    execute(imaged, "INSERT INTO t VALUES (100)", "DELETE FROM t WHERE id = 1")
    go_on()
    apply.sync(**given)
    assert apply.sync(**given, on_error="stop").stale == {}  # it is there
    imaged.go_back()
    apply.sync(**given)  # the directory ends before, and nobody can tell
    execute(imaged, "INSERT INTO t VALUES (202)")
    go_on()
    with expect_error(code="another_history"):
        apply.sync(**given, on_error="stop")
    assert apply.sync(**given).stale == {"public.t": OTHER_HISTORY}
    execute(imaged, "INSERT INTO t VALUES (203)")
    go_on()
    assert apply.sync(**given).stale == {}
    if target == "lake":
        compare_state(imaged, tmp_path / "lake")
    else:
        import duckdb

        with contextlib.closing(duckdb.connect("tables.duckdb")) as connection:
            found = connection.execute('SELECT id FROM state."public.t" ORDER BY id').fetchall()
        assert found == execute(imaged, "SELECT id FROM t ORDER BY id")


@pytest.mark.slow
def test_two_directories_in_turn(synced: Synced, tmp_path: Path) -> None:
    """What one has brought the other one has too: no table is copied again."""
    database = synced.database
    synced.sync()
    other: dict[str, Any] = {"slot": f"other_{database.name}", "directory": tmp_path / "other"}
    for row, given in enumerate((other, {}, other, {}, other), 60):
        database.execute(f"INSERT INTO t (id, d) VALUES ({row}, 'd')")
        assert synced.sync(**given).stale == {}
        assert synced.compare("t", "id, v, n, d") == row - 9
    copies = [row["copy_lsn"] for row in synced.tables.progress().values()]
    assert synced.sync().stale == {}
    assert [row["copy_lsn"] for row in synced.tables.progress().values()] == copies
