"""The checks that the frames of a file have to pass, used by writers and readers of segments.

A writer checks frames before it writes them, so no frame is acknowledged that readers would refuse.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .._impl import twin
from ..errors import PgOutputError
from .layout_index import LayoutCounter

if TYPE_CHECKING:
    from pathlib import Path

    import pyarrow as pa

    from .format import SegmentMetadata
    from .layout_index import Span

_BESIDE = ("commit_lsn", "commit_time", "xid", "seq")

ANNOUNCEMENTS = tuple(b"RY")
"""The tags of Relation and Type."""


class Structure:
    """Checks the record batches of one file, in order.

    Parameters
    ----------
    path : pathlib.Path
    metadata : SegmentMetadata
    part : int or None
        The number of this part of the segment; None if it is unknown.
    advice : str
        What to do about a damaged file, for the end of error texts.

    Raises
    ------
    PgOutputError
        Raised by the methods: a frame may not come at this point, or another column of its row
        contradicts the frames.
    """

    def __init__(
        self, path: Path, metadata: SegmentMetadata, part: int | None, advice: str
    ) -> None:
        self._path = path
        self._advice = advice
        self._is_snapshot = metadata.snapshot
        self._check = twin("segments._annotate").check
        start = metadata.start_lsn
        # The arguments of `check` that go from batch to batch.
        self._counter = LayoutCounter()
        self._stream_state: tuple[Any, ...]
        if metadata.snapshot:
            # A snapshot file has rows of one transaction, without Begin and Commit. -1: its first
            # row may have any `seq`.
            self._stream_state = ((start, 0, 0, -1), start, None)
        else:
            first = "begin or any" if part is None else "begin" if part else "any"
            self._stream_state = (None, start, first)
        self._batches = 0

    def check(self, batch: pa.RecordBatch) -> None:
        """Check the next record batch. `checksum` has checked already that its buffers suffice."""
        count = batch.num_rows
        if count:
            beside = [batch.column(name) for name in _BESIDE]
            data = batch.column("data")
            _, offsets, values = data.buffers()
            self._stream_state, wrong = self._check(
                count,
                tuple(column.buffers()[1] for column in beside),
                tuple(column.buffers()[0] if column.null_count else None for column in beside),
                b"" if values is None else values, offsets,
                self._stream_state, self._counter, self._is_snapshot,
            )  # fmt: skip
            if wrong is not None:
                index, why = wrong
                tag = data[index].as_py()[:1]
                raise self._error(
                    f"frame {index} of record batch {self._batches}, of tag {tag!r}, is {why}"
                )
        self._batches += 1

    def end(self, *, is_last: bool) -> None:
        """Check the end of the file.

        Parameters
        ----------
        is_last : bool
            Whether the file is the last part of its segment.
        """
        is_open = self._stream_state[0] is not None
        if not self._is_snapshot and is_open == is_last:
            raise self._error(
                "it ends within a transaction, and is the last part of its segment"
                if is_open
                else "it ends with a transaction, and further parts of its segment follow"
            )

    def spans(self) -> list[Span]:
        """Return the spans of all checked frames; raise the errors of `LayoutCounter.spans`."""
        return self._counter.spans()

    def _error(self, detail: str) -> PgOutputError:
        return PgOutputError(
            f"{self._path} can't be read as a segment: {detail}; {self._advice}",
            code="damaged",
            path=str(self._path),
        )


def tags_of(data: Any) -> Any:
    """Return the tag of each frame; 0 for an empty frame.

    Parameters
    ----------
    data : pyarrow.BinaryArray or pyarrow.ChunkedArray

    Returns
    -------
    uint8[n]
    """
    import numpy as np

    tag_arrays = [np.zeros(0, np.uint8)]
    for chunk in getattr(data, "chunks", [data]):
        if not len(chunk):
            continue
        _, offsets, values = chunk.buffers()
        ends = np.frombuffer(offsets, np.int32)[chunk.offset : chunk.offset + len(chunk) + 1]
        content = np.frombuffer(b"" if values is None else values, np.uint8)
        tags = np.zeros(len(chunk), np.uint8)
        has_any = ends[1:] > ends[:-1]
        tags[has_any] = content[ends[:-1][has_any]]
        tag_arrays.append(tags)
    return np.concatenate(tag_arrays)
