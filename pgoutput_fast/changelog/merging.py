"""Merge small consecutive segments into larger ones."""

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
"""This many segments of one class of size are merged into one."""
_SMALLEST = 4096  # bytes; a smaller segment counts as this large


def mergeable(
    sizes: Sequence[int], most: int, begins: Container[int] = (), start: int = 0
) -> tuple[int, int] | None:
    """Return the first `FAN` consecutive segments to merge: first index, and index after the last.

    The segments belong to one class of size: up to 64 KiB, up to 1 MiB, up to 16 MiB, … Therefore
    merging copies each frame at most once for each class, however long a change log grows.

    Parameters
    ----------
    sizes : sequence of int
        Bytes of the segments in order; 0 for a segment that can't be merged.
    most : int
        The most bytes of a merged segment.
    begins : container of int
        Indices of segments that can't share a file with the segment before.
    start : int
        The index at which to begin the search.

    Returns
    -------
    (int, int) or None
        None if there is nothing to merge.
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
            before = -1  # together they are larger than `most`
    return None


def merges(directory: Path, most: int, options: Any = None) -> Iterator[Segment]:
    """Merge small segments, one merge for each iteration. The original files stay.

    The directory is listed only once. So the cost of a merge does not depend on the number of
    segments. The caller is the directory's only writer, and deletes no segments during a merge.

    Parameters
    ----------
    directory : pathlib.Path
    most : int
        The most bytes of a merged segment.
    options : pyarrow.ipc.IpcWriteOptions, optional

    Yields
    ------
    Segment
        The merged segment.
    """
    groups, _ = present(directory)
    segments = [group.parts[0] for group in groups]
    sizes = [segment.path.stat().st_size if segment.parts == 1 else 0 for segment in segments]
    begins: set[int] = set()
    start = 0
    while (bounds := mergeable(sizes, most, begins, start)) is not None:
        first, end = bounds
        merged = segments[first:end]
        if merged[0].end_lsn <= begin_of(directory):
            return  # retention deleted the segments between two merges
        other = _other_session([segment.path for segment in merged])
        if other is not None:
            begins.add(first + other)
            continue
        path = directory / segment_name(merged[0].start_lsn, merged[-1].end_lsn, 0, 1)
        with becoming(path) as temporary, SegmentCopy(temporary, options) as copy:
            for segment in merged:
                copy.add(segment.path)
        fsync_path(directory)
        merged_segment = type(merged[0]).from_path(path)
        segments[first:end], sizes[first:end] = [merged_segment], [path.stat().st_size]
        gone = end - first - 1
        begins = {at if at <= first else at - gone for at in begins if not first < at < end}
        # The merged segment may complete `FAN` segments of the next class with those before it.
        start = max(0, first - FAN)
        yield merged_segment


def _other_session(paths: Sequence[Path]) -> int | None:
    """Return the index of the first file from another kind of session; None if there is none.

    A file has one description of a session for all its frames. So sessions whose frames decode
    differently can't share a file.
    """
    first: SegmentMetadata | None = None
    for number, path in enumerate(paths):
        with SegmentReader(path) as reader:
            if first is not None and not first.reads_as(reader.metadata):
                return number
            first = reader.metadata
    return None


def delete_covered(directory: Path, grace: float) -> int:
    """Delete the files that merged segments cover; return their number.

    A file is deleted once the merged segment is `grace` seconds old. Until then, readers that have
    listed the directory before the merge still find it.
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
