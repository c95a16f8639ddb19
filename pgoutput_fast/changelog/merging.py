"""Merge small segments that follow each other into one."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

from .._disk import becoming, fsync_path
from ..segments.copying import SegmentCopy
from ..segments.folders import SEGMENTS
from ..segments.format import segment_name
from ..segments.listing import covered, listed, present
from ..segments.reader import SegmentReader

if TYPE_CHECKING:
    from collections.abc import Container, Sequence
    from pathlib import Path

    from ..segments import Segment, SegmentMetadata

FAN = 16
"""So many segments that are about as large as each other become one."""
_SMALLEST = 4096  # bytes: smaller ones count as being as large


def mergeable(
    sizes: Sequence[int], most: int, begins: Container[int] = ()
) -> tuple[int, int] | None:
    """The first stretch of segments to merge, as its first index and the one behind its last.

    They are of one class: each is at most `FAN` times as large as the smallest may be. So a frame
    is copied once for each class, however long a directory grows.

    Parameters
    ----------
    sizes : sequence of int
        Bytes of the segments in their order; 0 for those that can't be merged.
    most : int
        Bytes that a merged one may have.
    begins : container of int
        Where segments begin that do not go into one file with those before.
    """
    first, before = 0, -1
    for index, size in enumerate(sizes):
        kind = int(math.log(max(size, _SMALLEST) / _SMALLEST, FAN)) if size else -1
        if kind != before or index in begins:
            first, before = index, kind
        if kind >= 0 and index + 1 - first == FAN:
            if sum(sizes[first : index + 1]) <= most:
                return first, index + 1
            before = -1  # large enough
    return None


def merge(directory: Path, most: int, options: Any = None) -> Segment | None:
    """Merge one stretch of small segments; the files that it covers stay.

    The caller is the directory's only writer.

    Parameters
    ----------
    directory : pathlib.Path
    most : int
        Bytes that a merged one may have.
    options : pyarrow.ipc.IpcWriteOptions, optional

    Returns
    -------
    Segment or None
        The new one; None if there is nothing to merge.
    """
    groups, _ = present(directory)
    sizes = [
        group.parts[0].path.stat().st_size if group.parts[0].parts == 1 else 0 for group in groups
    ]
    begins: set[int] = set()
    while True:
        found = mergeable(sizes, most, begins)
        if found is None:
            return None
        merged = groups[found[0] : found[1]]
        other = _other_session([group.parts[0].path for group in merged])
        if other is None:
            break
        begins.add(found[0] + other)
    start, end = merged[0].start_lsn, merged[-1].end_lsn
    path = directory / segment_name(start, end, 0, 1)
    with becoming(path) as temporary, SegmentCopy(temporary, options) as copy:
        for group in merged:
            copy.add(group.parts[0].path)
    fsync_path(directory)
    return type(merged[0].parts[0]).from_path(path)


def _other_session(paths: Sequence[Path]) -> int | None:
    """The first file whose frames are to be read otherwise than those before; None: there is none.

    A file says once for all of its frames in which form they are.
    """
    first: SegmentMetadata | None = None
    for number, path in enumerate(paths):
        with SegmentReader(path) as reader:
            if first is not None and not first.reads_as(reader.metadata):
                return number
            first = reader.metadata
    return None


def delete_covered(directory: Path, grace: float) -> int:
    """Delete files that a merged one covers, once it is `grace` seconds old; their number.

    Readers that have listed the directory before still find them until then.
    """
    count = 0
    now = time.time()
    for segment, by in covered(listed(directory)):
        if now - by.path.stat().st_mtime >= grace:
            SEGMENTS.delete(directory, segment.name)
            count += 1
    if count:
        fsync_path(directory)
    return count
