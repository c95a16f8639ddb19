"""What the history of a Delta table tells."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from support.changelogs.made_directory import MadeDirectory
from support.targets.synced_tables import DeltaTables

from pgoutput_fast import apply, testing

deltalake = pytest.importorskip("deltalake")

ACCOUNTS = testing.Table("accounts", {"id": "int4"}, 16390, key=["id"])
SECONDS = 5
"""Since 2000, of all commits of the made directory."""


@pytest.mark.parametrize("kind", ["state", "changes"])
def test_history_tells_lsn_and_commit_time(kind: str, tmp_path: Path) -> None:
    tables = DeltaTables(tmp_path)
    with contextlib.closing(MadeDirectory(tmp_path / "segments")) as made:
        made.wait(ACCOUNTS, 1000)
        made.copy(ACCOUNTS, 1100, [[1]])
        made.commit(2000, ACCOUNTS.relation(), testing.insert(ACCOUNTS, [2]))
        apply.sync(segments=made.directory, until="now", **tables.given)
        made.commit(3000, testing.delete(ACCOUNTS, [1]))
        apply.sync(segments=made.directory, until="now", **tables.given)
    history = deltalake.DeltaTable(str(tables.path / kind / "public.accounts")).history()
    told = [
        (one["pgoutput_fast.lsn"], one["pgoutput_fast.commit_time"])
        for one in reversed(history)
        if "pgoutput_fast.lsn" in one
    ]
    # A window ends behind the commit of its last transaction, which is 10 bytes long here.
    expected = ["0/7DA", "0/BC2"]
    assert [lsn for lsn, _ in told if lsn in expected] == expected
    assert {time for _, time in told} == {f"2000-01-01T00:00:0{SECONDS}+00:00"}
