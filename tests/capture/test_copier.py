"""What ends the thread that copies tables."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("psycopg")

from pgoutput_fast.changelog.snapshot_states import SnapshotStates
from pgoutput_fast.errors import PgOutputError
from pgoutput_fast.replication import copier


def test_a_copier_whose_disk_is_full_says_what_the_system_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(self: SnapshotStates) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "snapshots/1.arrow")

    monkeypatch.setattr(SnapshotStates, "read", read)
    target: Any = SimpleNamespace(directory=tmp_path)
    copies = copier.Copier(target, SnapshotStates(tmp_path))
    copies._thread.join(30)
    said = f"[Errno {errno.ENOSPC}] {os.strerror(errno.ENOSPC)}: 'snapshots/1.arrow'"
    assert isinstance(copies.error, PgOutputError)
    assert copies.error.code == "io_failed"
    assert copies.error.message.endswith(f": {said}")
