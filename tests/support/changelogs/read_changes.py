"""The changes of a change log, decoded as a sync decodes them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

import pgoutput_fast as pf
from pgoutput_fast.captured.changes import ChangeReader
from pgoutput_fast.captured.units import open_source
from pgoutput_fast.directory.reading import Position
from pgoutput_fast.history import HistoryFollower, HistoryPolicy, history_of


def batches_of(
    directory: Path,
    history: HistoryPolicy = "error",
    position: Position | None = None,
    **decoding: Any,
) -> Iterator[tuple[Any, pa.RecordBatch]]:
    """The batches from a position on, by default from the newest snapshots on, with Relations.

    `decoding` has arguments of the decoder.
    """
    source = open_source(directory)
    if source is None:
        return
    plan = source.plan(position or source.begin(), sys.maxsize)
    if plan is None:
        return
    decoding = {"policies": pf.Policies(), "target": "portable", **decoding}
    known, follower = history_of([directory]), None
    if known is not None and "registry" not in decoding:
        follower = HistoryFollower(known, history)
        decoding["registry"] = follower.registry
    reader = ChangeReader(decoding, follower)
    for unit in plan.units:
        for chunk in source.chunks(unit):
            for changes, batch in reader.changes(chunk):
                yield changes.relation, batch


def changes_of(
    directory: Path, history: HistoryPolicy = "error", **options: Any
) -> list[dict[str, Any]]:
    """The changes as rows, with the name of their table, in the order in which they are read."""
    return [
        {"table": relation.name, **row}
        for relation, batch in batches_of(directory, history, **options)
        for row in batch.to_pylist()
    ]
