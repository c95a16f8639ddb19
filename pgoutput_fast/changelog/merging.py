"""Merge small segments that follow each other into one."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

from .._disk import becoming, fsync_path
from ..segments.copying import SegmentCopy
from ..segments.folders import SEGMENTS
from ..segments.format import segment_name
from ..segments.listing import begin_of, covered, listed, present
from ..segments.reader import SegmentReader

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Sequence
    from pathlib import Path

    from ..segments import Segment, SegmentMetadata

FAN = 16
"""So many segments that are about as large as each other become one."""
_SMALLEST = 4096  # bytes: smaller ones count as being as large


def mergeable(
    sizes: Sequence[int], most: int, begins: Container[int] = (), start: int = 0
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
    start : int
        The index from which on it is looked for.
    """
    first, before = start, -1
    for index in range(start, len(sizes)):
        size = sizes[index]
        kind = int(math.log(max(size, _SMALLEST) / _SMALLEST, FAN)) if size else -1
        if kind != before or index in begins:
            first, before = index, kind
        if kind >= 0 and index + 1 - first == FAN:
            if sum(sizes[first : index + 1]) <= most:
                return first, index + 1
            before = -1  # large enough
    return None


def merges(directory: Path, most: int, options: Any = None) -> Iterator[Segment]:
    """Merge stretches of small segments, one at each step; the files that they cover stay.

    The directory is listed once, so that a step costs the same however many segments there are.
    The caller is the directory's only writer, and deletes no segments during a step.

    Parameters
    ----------
    directory : pathlib.Path
    most : int
        Bytes that a merged one may have.
    options : pyarrow.ipc.IpcWriteOptions, optional

    Yields
    ------
    Segment
        The new one.
    """
    groups, _ = present(directory)
    segments = [group.parts[0] for group in groups]
    sizes = [one.path.stat().st_size if one.parts == 1 else 0 for one in segments]
    begins: set[int] = set()
    start = 0
    while (found := mergeable(sizes, most, begins, start)) is not None:
        first, end = found
        merged = segments[first:end]
        if merged[0].end_lsn <= begin_of(directory):
            return  # it was deleted since
        other = _other_session([one.path for one in merged])
        if other is not None:
            begins.add(first + other)
            continue
        path = directory / segment_name(merged[0].start_lsn, merged[-1].end_lsn, 0, 1)
        with becoming(path) as temporary, SegmentCopy(temporary, options) as copy:
            for one in merged:
                copy.add(one.path)
        fsync_path(directory)
        made = type(merged[0]).from_path(path)
        segments[first:end], sizes[first:end] = [made], [path.stat().st_size]
        gone = end - first - 1
        begins = {at if at <= first else at - gone for at in begins if not first < at < end}
        # With those before it may be a stretch of the next class.
        start = max(0, first - FAN)
        yield made


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
