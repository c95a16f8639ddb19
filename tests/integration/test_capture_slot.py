"""A capture that is refused leaves no slot behind that it made itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import pgoutput_fast as pf
from pgoutput_fast.replication import capture

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.integration


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


def test_refused_by_the_directory(database: Any, tmp_path: Path) -> None:
    database.execute("CREATE TABLE t (id int)", "CREATE PUBLICATION p FOR TABLE t")
    land(database, tmp_path / "a", "slot_a")
    before = slots(database)
    assert "slot_a" in before
    with pytest.raises(pf.PgOutputError, match="not of this slot"):
        land(database, tmp_path / "a", "slot_b")
    assert slots(database) == before
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(pf.PgOutputError):
        land(database, file, "slot_c")
    assert slots(database) == before
    # One that was there before stays.
    land(database, tmp_path / "d", "slot_d")
    with pytest.raises(pf.PgOutputError, match="not of this slot"):
        land(database, tmp_path / "a", "slot_d")
    assert "slot_d" in slots(database)
    for slot in ("slot_a", "slot_d"):
        database.execute(f"SELECT pg_drop_replication_slot('{slot}')")
