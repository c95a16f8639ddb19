"""One target and several directories, or a server of which an earlier state was restored."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from servers import CopiedServer, NewServer, backup, execute, now, put_back
from synced_database import Synced

import pgoutput_fast as pf
from pgoutput_fast import apply
from pgoutput_fast.embedded import find_server_bindir
from pgoutput_fast.replication import capture
from pgoutput_fast.verify import verify

pytest.importorskip("duckdb")
pytest.importorskip("deltalake")

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("quick_upkeep")]


def test_a_copy_that_is_older_than_what_the_target_has(synced: Synced, tmp_path: Path) -> None:
    """It would take away what another directory has brought since."""
    database, other = synced.database, tmp_path / "other"
    synced.sync()
    given: dict[str, Any] = {"slot": f"other_{database.name}", "publications": ["p"]}
    capture(
        database.dsn, directory=other, create_slot=True, snapshot="initial",
        until_lsn=now(database.server), **given,
    )  # fmt: skip
    database.execute("DELETE FROM t WHERE id = 2", "INSERT INTO t (id, d) VALUES (60, 'd')")
    synced.sync()
    # Nothing can be asked of a capture that does not run.
    target = {key: synced.options[key] for key in synced.tables.given}
    with pytest.raises(
        pf.PgOutputError, match=r"have them copied again: .* --table public\.t\b.*; or give"
    ) as e:
        apply.sync(segments=other, until="now", **target)
    assert "the copy there is older, as of " in str(e.value)
    assert synced.compare("t", "id, v, n, d") == 50
    database.execute("INSERT INTO t (id, d) VALUES (61, 'd')")
    synced.sync(**given, directory=other)
    assert synced.compare("t", "id, v, n, d") == 51
    database.execute("DELETE FROM t WHERE id = 61")
    synced.sync(**given, directory=other)
    assert synced.compare("t", "id, v, n, d") == 50


def test_a_server_that_was_restored(tmp_path: Path, wait_until: Callable[..., None]) -> None:
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
            with pytest.raises(pf.PgOutputError, match=r"an earlier state of the server was rest"):
                apply.sync(earlier.dsn(), **new)
            with pytest.raises(pf.PgOutputError, match=r"an earlier state of the server was rest"):
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


def test_a_server_and_a_directory_that_were_put_back(tmp_path: Path) -> None:
    """As they are on one disk, of which there was an image; the target is elsewhere, and newer."""
    import deltalake

    with NewServer(18, {"log_min_messages": "fatal"}) as server:
        execute(
            server,
            "CREATE TABLE t (id int PRIMARY KEY)",
            "CREATE TABLE other (id int)",
            "CREATE PUBLICATION p FOR TABLE t",
        )
        directory = tmp_path / "segments"
        given: dict[str, Any] = {
            "publications": ["p"],
            "target": str(tmp_path / "lake"),
            "directory": directory,
            "until": "now",
        }
        execute(server, "INSERT INTO t SELECT generate_series(1, 9)")
        apply.sync(server.dsn(), slot="s", **given)
        execute(server, "CHECKPOINT")
        image = backup(server, slots=True)
        shutil.copytree(directory, tmp_path / "kept")
        execute(server, "INSERT INTO t VALUES (100)", "DELETE FROM t WHERE id = 1")
        apply.sync(server.dsn(), slot="s", **given)
        end = now(server)
        put_back(server, image)
        shutil.rmtree(directory)
        (tmp_path / "kept").rename(directory)
        execute(server, "INSERT INTO t VALUES (200)")
        while now(server) <= end:
            execute(server, "SELECT pg_switch_wal()", "INSERT INTO other VALUES (0)")
        execute(server, "INSERT INTO t VALUES (201)")
        with pytest.raises(
            pf.PgOutputError, match=r"an earlier state of the directory was put back"
        ):
            apply.sync(server.dsn(), slot="s", **given, unknown="error")
        for row in (202, 203):
            apply.sync(server.dsn(), slot="s", **given)
            execute(server, f"INSERT INTO t VALUES ({row})")
        assert apply.sync(server.dsn(), slot="s", **given).stale == {}
        truth = execute(server, "SELECT id FROM t ORDER BY id")
    found = deltalake.DeltaTable(str(tmp_path / "lake" / "state" / "public.t")).to_pyarrow_table()
    assert sorted((one,) for one in found.column("id").to_pylist()) == truth
