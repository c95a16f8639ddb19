"""What a capture tells of the consumers of its directory."""

from __future__ import annotations

import contextlib
import json
import time
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("psycopg")
pytest.importorskip("pyarrow")

from pgoutput_fast.capture_options import CaptureOptions
from pgoutput_fast.changelog.consumers import Consumer
from pgoutput_fast.changelog.read_plan import Position
from pgoutput_fast.replication import upkeep
from pgoutput_fast.replication.membership import Members
from pgoutput_fast.segments import SegmentMetadata, SegmentWriter

if TYPE_CHECKING:
    from pathlib import Path

METADATA = SegmentMetadata("1", "d", "s", ("p",), 180004, "UTF8", {}, {})
GIB = 1 << 30
END = 5 * GIB
DAY = 86400.0


def test_consumers_for_which_much_is_kept_are_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    positions = {
        # name: position, days since it moved
        "far": (Position(END - GIB, {}), 0.0),
        "near": (Position(END - GIB + 1, {}), 1.9),
        "silent": (Position(END - 1, {}), 2.1),
        "table": (Position(END, {16384: END - GIB}), 0.0),
        "done": (Position(END, {}), 30.0),
    }
    monkeypatch.setattr(upkeep, "_TIDY_INTERVAL", 0.0)
    monkeypatch.setattr(upkeep, "_TICK", 0.0)
    with SegmentWriter(tmp_path, METADATA, confirmed_flush_lsn=END) as writer:
        for name, (position, days) in positions.items():
            Consumer(tmp_path, name).advance(position)
            path = tmp_path / "consumers" / f"{name}.json"
            path.write_text(
                json.dumps({**json.loads(path.read_text()), "seen": time.time() - days * DAY})
            )
        target: Any = None  # nothing is copied
        options = CaptureOptions(merge=False, min_free=0)
        with contextlib.closing(upkeep.Upkeep(writer, target, options, Members({}, 0))) as made:
            for _ in range(3):
                made.tick()
    told = [one for one in caplog.messages if "consumer" in one]
    assert sorted(one.split()[1] for one in told) == ["far", "silent", "table"]
    assert all(one.endswith(f"consumers --dir {tmp_path} remove {one.split()[1]}") for one in told)
