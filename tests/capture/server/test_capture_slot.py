"""A capture's slot: made, gone, or refused by the server; and what errors say is to be done."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from support.expected_errors import expect_error

import pgoutput_fast as pf
from pgoutput_fast._disk import claim_directory
from pgoutput_fast.connections import ConnectionParameters
from pgoutput_fast.embedded import EmbeddedServer
from pgoutput_fast.errors import Argument
from pgoutput_fast.replication import (
    CaptureProgress,
    ReplicationConnection,
    ReplicationError,
    RetryableError,
    capture,
    connect,
    walsender,
)
from pgoutput_fast.replication.delivery import Delivery

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.server


def slots(database: Any) -> list[str]:
    rows = database.execute("SELECT slot_name::text FROM pg_replication_slots ORDER BY 1")
    return [name for (name,) in rows]


def land(database: Any, directory: Path, slot: str) -> None:
    ((lsn,),) = database.execute("SELECT pg_current_wal_lsn()::text")
    capture(
        database.dsn,
        slot=slot,
        publications=["p"],
        directory=directory,
        create_slot=True,
        until_lsn=pf.parse_lsn(lsn),
    )


@pytest.mark.slow
def test_refused_by_the_directory(database: Any, tmp_path: Path) -> None:
    """A capture leaves no slot behind that it made itself."""
    database.execute("CREATE TABLE t (id int)", "CREATE PUBLICATION p FOR TABLE t")
    land(database, tmp_path / "a", "slot_a")
    before = slots(database)
    assert "slot_a" in before
    with expect_error(code="no_slot", path=str(tmp_path / "a")):
        land(database, tmp_path / "a", "slot_b")
    assert slots(database) == before
    # Made and dropped again.
    lock = claim_directory(tmp_path / "b", "capture", "segments")
    with expect_error(code="in_use", path=str(tmp_path / "b")):
        land(database, tmp_path / "b", "slot_b")
    os.close(lock)
    assert slots(database) == before
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(pf.PgOutputError):
        land(database, file, "slot_c")
    assert slots(database) == before
    # One that was there before stays.
    land(database, tmp_path / "d", "slot_d")
    with expect_error(parameter="directory", options=[Argument("slot", "slot_a")]):
        land(database, tmp_path / "a", "slot_d")
    assert "slot_d" in slots(database)
    for slot in ("slot_a", "slot_d"):
        database.execute(f"SELECT pg_drop_replication_slot('{slot}')")


@pytest.mark.parametrize("create_slot", [True, False])
def test_a_slot_that_was_dropped_is_not_made_again_for_its_directory(
    database: Any, tmp_path: Path, create_slot: bool
) -> None:
    """It would begin later, and what was committed between the two would be nowhere."""
    database.execute("CREATE TABLE t (id int)", "CREATE PUBLICATION p FOR TABLE t")
    directory = tmp_path / "a"
    land(database, directory, "slot_e")
    database.execute("SELECT pg_drop_replication_slot('slot_e')", "INSERT INTO t VALUES (1)")
    before = slots(database)
    with expect_error(code="no_slot", path=str(directory)):
        capture(
            database.dsn, slot="slot_e", publications=["p"], directory=directory,
            create_slot=create_slot,
        )  # fmt: skip
    assert slots(database) == before


# A process that is killed at once after it has made its slot.
KILLED = """
import os, sys
from pgoutput_fast.replication import ReplicationConnection, capture
made = ReplicationConnection.make_slot
ReplicationConnection.make_slot = lambda *a, **k: (made(*a, **k), os._exit(9))
dsn, directory = sys.argv[1:]
capture(dsn, slot="slot_k", publications=["p"], directory=directory, create_slot=True)
"""


def test_killed_after_it_has_made_the_slot_it_knows_it(database18: Any, tmp_path: Path) -> None:
    database18.execute("CREATE TABLE t (id int)", "CREATE PUBLICATION p FOR TABLE t")
    directory = tmp_path / "a"
    ended = subprocess.run([sys.executable, "-c", KILLED, database18.dsn, directory], check=False)
    assert (ended.returncode, slots(database18)) == (9, ["slot_k"])
    # No other directory takes it.
    with expect_error(code="not_ours", path=str(tmp_path / "b")):
        land(database18, tmp_path / "b", "slot_k")
    database18.execute("INSERT INTO t VALUES (1)")
    land(database18, directory, "slot_k")
    named = sorted(path.name for path in directory.iterdir())
    assert [name for name in named if not name.endswith(".arrow")] == ["history", "position.json"]
    assert len(named) == 3
    # Which prepared transactions it has seen depends on it.
    assert json.loads((directory / "position.json").read_text())["made_slot"] is True
    database18.execute("SELECT pg_drop_replication_slot('slot_k')")


@pytest.mark.slow
@pytest.mark.parametrize("snapshot", ["never", "initial", "only"])
def test_an_adopted_slot_that_is_in_use(
    database18: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, snapshot: str
) -> None:
    """Nothing is left behind that a later call would take for a directory that has begun."""
    database18.execute(
        "CREATE TABLE t (id int)",
        "CREATE PUBLICATION p FOR TABLE t",
        "SELECT pg_create_logical_replication_slot('slot_u', 'pgoutput')",
    )
    options: Any = {"slot": "slot_u", "publications": ["p"]}
    monkeypatch.setattr(walsender, "_BUSY_WAITS", (0.01,))
    with connect(database18.dsn, **options):
        query = "SELECT active_pid FROM pg_replication_slots WHERE slot_name = 'slot_u'"
        ((pid,),) = database18.execute(query)
        with expect_error(RetryableError, code="in_use", sqlstate="55006") as caught:
            capture(
                database18.dsn, directory=tmp_path / "a", adopt_slot=True, snapshot=snapshot,
                **options,
            )  # fmt: skip
        assert str(pid) in str(caught.value)
    assert list(tmp_path.iterdir()) == []
    # Its last reader has only just gone.
    monkeypatch.undo()
    database18.execute("INSERT INTO t VALUES (1)")
    ((lsn,),) = database18.execute("SELECT pg_current_wal_lsn()::text")
    capture(
        database18.dsn, directory=tmp_path / "a", adopt_slot=True, snapshot=snapshot,
        until_lsn=pf.parse_lsn(lsn), **options,
    )  # fmt: skip
    assert (tmp_path / "a" / "position.json").exists()
    database18.execute("SELECT pg_drop_replication_slot('slot_u')")


def test_a_publication_that_was_made_again(pg16: Any, tmp_path: Path) -> None:
    """18 passes over such changes with a warning in its log."""
    with psycopg.connect(pg16.dsn(), autocommit=True) as connection:
        for statement in (
            b"CREATE TABLE again (id int)",
            b"CREATE PUBLICATION again FOR TABLE again",
            b"SELECT pg_create_logical_replication_slot('again', 'pgoutput')",
            b"DROP PUBLICATION again",
            b"INSERT INTO again VALUES (1)",
            b"CREATE PUBLICATION again FOR TABLE again",
        ):
            connection.execute(statement)
        options: Any = {"slot": "again", "publications": ["again"], "directory": tmp_path}
        with expect_error(ReplicationError, code="no_publication", sqlstate="42704"):
            capture(pg16.dsn(), adopt_slot=True, **options)
        connection.execute("SELECT pg_drop_replication_slot('again')")
        connection.execute("DROP PUBLICATION again")
        connection.execute("DROP TABLE again")


@pytest.mark.slow
def test_a_server_without_slots_is_told_what_to_set(tmp_path: Path) -> None:
    with EmbeddedServer(18, {"max_replication_slots": 0}) as server:
        with psycopg.connect(server.dsn(), autocommit=True) as connection:
            connection.execute("CREATE PUBLICATION p FOR ALL TABLES")
        with expect_error(ReplicationError, code="server_setting", sqlstate="55000") as caught:
            capture(
                server.dsn(), slot="s", publications=["p"], directory=tmp_path, create_slot=True
            )
    assert "max_replication_slots" in str(caught.value)
    assert "new slot" not in str(caught.value)


def test_an_idle_capture_waits_even_without_delay(
    database: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With max_delay=0 each transaction is durable at once, and then there is nothing to do."""
    database.execute("CREATE TABLE t (id int)", "CREATE PUBLICATION p FOR TABLE t")
    waited: list[float] = []
    stop = threading.Event()
    advance = Delivery._advance

    def noting(self: Delivery, timeout: float, until: Any) -> bool:
        waited.append(timeout)
        if len(waited) == 3:
            database.execute("INSERT INTO t VALUES (1)")
        return advance(self, timeout, until)

    def tell(progress: CaptureProgress) -> None:
        if progress.transactions:
            assert progress.durable_lsn == progress.received_lsn
            stop.set()

    monkeypatch.setattr(Delivery, "_advance", noting)
    capture(
        database.dsn, slot="patient", publications=["p"], directory=tmp_path, create_slot=True,
        max_delay=0, progress=tell, stop=stop,
    )  # fmt: skip
    assert min(waited) > 0.05


def test_a_role_that_lacks_the_attribute(database: Any) -> None:
    role = f"plain_{database.name}"
    database.execute(f"CREATE ROLE {role} LOGIN")
    try:
        with expect_error(ReplicationError, code="no_rights"):
            ReplicationConnection(ConnectionParameters(database.dsn, {"user": role}))
    finally:
        database.execute(f"DROP ROLE {role}")
