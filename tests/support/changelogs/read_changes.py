"""The changes of a change log, decoded as a sync decodes them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

import pgoutput_fast as pf
from pgoutput_fast.changelog.changes import ChangeReader
from pgoutput_fast.changelog.history import HistoryPolicy, history_of
from pgoutput_fast.changelog.read_frames import frame_runs
from pgoutput_fast.changelog.read_plan import Position
from pgoutput_fast.changelog.view import view_of
from pgoutput_fast.segments.listing import has_begun


def batches_of(
    directory: Path,
    history: HistoryPolicy = "error",
    position: Position | None = None,
    **decoding: Any,
) -> Iterator[tuple[Any, pa.RecordBatch]]:
    """The batches from a position on, by default from the newest snapshots on, with Relations.

    `decoding` has arguments of the decoder.
    """
    if not has_begun(directory):
        return
    view = view_of(directory)
    plan = view.plan(position or view.first_position())
    if plan is None:
        return
    decoding = {"policies": pf.Policies(), "target": "portable", **decoding}
    reader = ChangeReader(decoding, history_of([directory]), history)
    for read in plan.reads:
        for frame_run in frame_runs(read, view.metadata):
            for changes, batch in reader.changes(frame_run):
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
