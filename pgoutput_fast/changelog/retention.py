"""Delete old segments and snapshots that no consumer needs any more."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, NamedTuple

from .._disk import fsync_path, write_whole
from ..lsn import format_lsn
from ..segments.folders import BEGIN_NAME, SEGMENTS, SNAPSHOTS
from ..segments.listing import SegmentGroup, begin_of, listed, present
from .consumers import consumers, locked
from .schema_history import forget_before
from .snapshot_states import SnapshotStates, TableSnapshots
from .snapshots import snapshot_files

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from pathlib import Path

    from .read_plan import Position


class Keep(NamedTuple):
    """How long to keep segments after all consumers have read them.

    Fields: seconds (the age to keep, or None); bytes (the newest bytes to keep, or None). A segment
    is deleted once it exceeds one of the two. With both None, all segments are kept.
    """

    seconds: float | None = None
    bytes: int | None = None


def needed_from(positions: list[Position], states: Mapping[int, TableSnapshots]) -> int | None:
    """Return the LSN from which on consumers or waiting tables need segments; None if none do."""
    lsns = [state.waits_from for state in states.values() if state.waits_from is not None]
    return min([*lsns, *(position.least for position in positions)], default=None)


def retain(directory: Path, keep: Keep, store_position: Callable[[], None]) -> int:
    """Delete segments, snapshots and schema history that are not needed; return how many files.

    The caller is the directory's only writer.

    Parameters
    ----------
    directory : pathlib.Path
    keep : Keep
    store_position : callable
        Stores the end of the change log durably. It is called before the newest segment is deleted,
        whose name says the end until then.
    """
    if keep == Keep():
        return 0
    with locked(directory):
        positions = [consumer.position for consumer in consumers(directory)]
        states = SnapshotStates(directory).read()
        groups, _ = present(directory)
        obsolete_groups = _spent(groups, keep, needed_from(positions, states))
        if obsolete_groups and len(obsolete_groups) == len(groups):
            store_position()
        begin = begin_of(directory)
        if obsolete_groups:
            begin = obsolete_groups[-1].end_lsn
            write_whole(directory / BEGIN_NAME, [json.dumps({"begin": format_lsn(begin)})])
        count = 0
        # This also deletes segments that an earlier, interrupted call has left.
        for segment in listed(directory):
            if segment.end_lsn <= begin:
                SEGMENTS.delete(directory, segment.name)
                count += 1
        if count:
            fsync_path(directory)
        files = snapshot_files(directory)
        for (relation_id, number), paths in [*files.items()]:
            state = states.get(relation_id)
            if state is None:
                continue
            snapshots = [snapshot for snapshot in state.snapshots if snapshot.number == number]
            if not snapshots or any(
                position.of(relation_id) <= snapshots[0].lsn - 1 for position in positions
            ):
                continue
            if snapshots[0] != state.snapshots[-1] or begin > snapshots[0].lsn:
                # Delete the first file first: readers then know that the snapshot is being deleted.
                SNAPSHOTS.delete(directory, paths[0].name)
                fsync_path(paths[0].parent)
                for path in paths[1:]:
                    SNAPSHOTS.delete(directory, path.name)
                count += len(paths)
                del files[relation_id, number]
        snapshot_lsns = {
            snapshot.lsn
            for relation_id, state in states.items()
            for snapshot in state.snapshots
            if (relation_id, snapshot.number) in files
        }
        return count + forget_before(directory, min({begin, *snapshot_lsns}))


def forget_dropped(
    directory: Path, tables: SnapshotStates, existing: Collection[int], as_of: int
) -> list[int]:
    """Delete the states of dropped tables that have nothing left to read.

    A table that only left the publications keeps its states: it may return, and then its next
    snapshot gets the next number. The caller is the directory's only writer.

    Parameters
    ----------
    directory : pathlib.Path
    tables : SnapshotStates
    existing : collection of int
        OIDs of all tables of the database.
    as_of : int
        The LSN at which `existing` was complete.

    Returns
    -------
    list of int
        The relation ids of the tables whose states were deleted.
    """
    with locked(directory):
        end = min(begin_of(directory), as_of)
        dropped = [
            (relation_id, state.all_snapshots[-1].lsn)
            for relation_id, state in tables.states.copy().items()
            if state.all_snapshots[-1].state == "gone"
            and state.all_snapshots[-1].lsn <= end
            and relation_id not in existing
        ]
        if not dropped:
            return []
        with_files = {relation_id for relation_id, _ in snapshot_files(directory)}
        positions = [consumer.position for consumer in consumers(directory)]
        forgotten = [
            relation_id
            for relation_id, lsn in dropped
            if relation_id not in with_files
            and all(
                position.lsn >= lsn and relation_id not in position.tables for position in positions
            )
        ]
        tables.forget(forgotten)
    return forgotten


def _spent(groups: list[SegmentGroup], keep: Keep, needed: int | None) -> list[SegmentGroup]:
    """Return the oldest segments, up to the first one that is needed or has to be kept."""
    obsolete_groups = []
    remaining_bytes = None
    if keep.bytes is not None:
        remaining_bytes = sum(
            segment.path.stat().st_size for group in groups for segment in group.parts
        )
    now = time.time()
    for group in groups:
        if needed is not None and group.end_lsn > needed:
            break
        size = sum(segment.path.stat().st_size for segment in group.parts)
        old = keep.seconds is not None and (
            now - group.parts[-1].path.stat().st_mtime >= keep.seconds
        )
        many = (
            remaining_bytes is not None
            and keep.bytes is not None
            and remaining_bytes - size >= keep.bytes
        )
        if not (old or many):
            break
        if remaining_bytes is not None:
            remaining_bytes -= size
        obsolete_groups.append(group)
    return obsolete_groups
