"""Records of `mode=envelope` beside those that Debezium made of the same transactions."""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from pgoutput_fast.spark import PgOutputDataSource

pytestmark = [pytest.mark.spark]

DATA = Path(__file__).parents[1] / "data" / "debezium"
TOPICS = [f"shop.public.{name}" for name in ("kinds", "odd__name", "toast", "full_row")]
OTHER = {"r", "co", "vb", "pt", "tr", "tmtz", "tz", "mr", "bt", "mn", "iv", "y"}


def test_records_are_those_of_debezium(tmp_path: Path) -> None:
    lines = gzip.decompress((DATA / "debezium.txt.gz").read_bytes()).decode().split("\n")
    theirs = [
        (lines[i], json.loads(lines[i + 1]), json.loads(lines[i + 2]))
        for i in range(0, len(lines) - 2, 3)
    ]
    directory = shutil.copytree(DATA / "segments", tmp_path / "segments")
    given = {"mode": "envelope", "segments": str(directory), "topicPrefix": "shop",
             "tombstones": "true"}  # fmt: skip
    reader = PgOutputDataSource(given).reader(None)  # type: ignore[arg-type]
    rows: list[Any] = [
        one for part in reader.partitions() for batch in reader.read(part)
        for one in batch.to_pylist()
    ]  # fmt: skip
    rows.sort(key=lambda one: (one["commit_lsn"], one["seq"], one["part"]))
    ours = [
        (one["topic"], json.loads(one["key"] or "null"), json.loads(one["value"] or "null"))
        for one in rows
    ]
    for topic in TOPICS:
        wanted = [compared(one) for one in theirs if one[0] == topic]
        # The TRUNCATE before the rows of a snapshot is ours alone.
        assert [compared(one) for one in ours if one[0] == topic][1:] == wanted


def compared(record: Any) -> Any:
    """The parts of a record that are the same."""
    topic, key, value = record
    if value is None:
        return topic, key, None
    sides = [
        value[side] and {k: v for k, v in value[side].items() if k not in OTHER}
        for side in ("before", "after")
    ]
    return topic, key, value["op"], sides
