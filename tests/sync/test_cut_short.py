"""Windows whose process was killed after the target's commit."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
from support.changelogs.made_directory import KilledError, MadeDirectory
from support.targets.synced_tables import DuckdbTables

from pgoutput_fast import apply, testing
from pgoutput_fast.apply import syncing

pytest.importorskip("duckdb")

WIDE = testing.Table("t", {"id": "int4", "a": "text", "b": "text"}, 16390, key=["id"])
NARROW = testing.Table("t", {"id": "int4", "a": "text"}, 16390, key=["id"])


def test_changes_before_an_alteration_are_not_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table has been altered when the same window comes again."""
    tables = DuckdbTables(tmp_path)

    def killed(*_: Any) -> None:
        raise KilledError

    with contextlib.closing(MadeDirectory(tmp_path / "segments")) as made:
        made.wait(WIDE, 1000)
        made.copy(WIDE, 1100, [])
        apply.sync(segments=made.directory, until="now", **tables.given)
        made.commit(2000, WIDE.relation(), testing.insert(WIDE, [1, "x", "y"]))
        made.commit(3000, NARROW.relation(), testing.insert(NARROW, [2, "z"]))
        with monkeypatch.context() as patch:
            patch.setattr(syncing.Consumer, "advance", killed)
            with pytest.raises(KilledError):
                apply.sync(segments=made.directory, until="now", **tables.given)
        assert tables.state("public.t").num_rows == 2
        apply.sync(segments=made.directory, until="now", **tables.given)
    assert tables.progress()[WIDE.relation_id]["stale"] is None
    assert sorted(tables.state("public.t").to_pylist(), key=str) == [
        {"id": 1, "a": "x"}, {"id": 2, "a": "z"},
    ]  # fmt: skip
    changes = tables.changes("public.t").column("commit_lsn").to_pylist()
    assert changes == [1099, 2000, 3000]
