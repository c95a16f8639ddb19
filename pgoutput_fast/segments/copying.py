"""Merge consecutive segments into one file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..protocol.wire import relation_id_of
from .file import SegmentFile
from .format import BATCH_BYTES, BATCH_FRAMES, require_pyarrow, segment_schema
from .reader import SegmentReader
from .structure import ANNOUNCEMENTS, tags_of

if TYPE_CHECKING:
    from pathlib import Path

    from typing_extensions import Self


class SegmentCopy:
    """A merged segment: the frames of several one-part segments, one after the other, in one file.

    The copy leaves out each Type and Relation that a later segment only repeats.

    Use it as a context manager. When the block ends, the file is complete and synced; after an
    exception it has no end mark, and the caller deletes it.

    Parameters
    ----------
    path : pathlib.Path
        The temporary name of the file.
    options : pyarrow.ipc.IpcWriteOptions, optional
    """

    def __init__(self, path: Path, options: Any = None) -> None:
        self._pa = require_pyarrow()
        self._path = path
        self._options = options
        self._file: SegmentFile | None = None
        self._in_force: dict[tuple[bytes, int | None], bytes] = {}
        self._pending: list[Any] = []
        self._frames = self._bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *exc_info: object) -> None:
        if self._file is not None:
            if kind is None:
                self._flush()
                self._file.finish(last=True)
            else:
                self._file.discard()

    def add(self, path: Path) -> None:
        """Append the frames of a segment.

        Raises
        ------
        PgOutputError
            The segment can't be read, or is damaged.
        OSError
            The file can't be written.
        """
        with SegmentReader(path) as reader:
            if self._file is None:
                self._file = SegmentFile(self._path, reader.metadata, self._options)
            is_begin = True  # so far, the segment had only Types and Relations
            for batch in reader:
                is_begin = self._add(batch, is_begin)

    def _add(self, batch: Any, is_begin: bool) -> bool:
        """Append a batch, without Types and Relations at the segment's begin that only repeat."""
        import numpy as np

        data = batch.column("data")
        announces = np.isin(tags_of(data), ANNOUNCEMENTS)
        others = np.flatnonzero(~announces)
        first = int(others[0]) if len(others) else len(batch)
        is_wanted = np.ones(len(batch), bool)
        for index in np.flatnonzero(announces).tolist():
            frame = data[index].as_py()
            if is_begin and index < first:
                is_wanted[index] = self._in_force.get(_key(frame)) != frame
            self._in_force[_key(frame)] = frame
        self._take(batch if is_wanted.all() else batch.filter(self._pa.array(is_wanted)))
        return is_begin and first == len(batch)

    def _take(self, batch: Any) -> None:
        while batch.num_rows:
            room = min(BATCH_FRAMES - self._frames, batch.num_rows)
            fits = _fitting(batch, room, BATCH_BYTES - self._bytes)
            if not fits:
                if self._frames:
                    self._flush()
                    continue
                fits = 1  # the frame alone is larger than BATCH_BYTES
            part = batch.slice(0, fits)
            self._pending.append(part)
            self._frames += fits
            self._bytes += _data_bytes(part, 0, fits)
            batch = batch.slice(fits)

    def _flush(self) -> None:
        if self._pending and self._file is not None:
            table = self._pa.Table.from_batches(self._pending, segment_schema())
            # `take` copies the rows: the arrays of a slice would begin within their buffers.
            (batch,) = table.take(self._pa.array(range(len(table)))).combine_chunks().to_batches()
            self._file.write(batch.columns)
            self._pending = []
            self._frames = self._bytes = 0


def _key(frame: bytes) -> tuple[bytes, int | None]:
    """Return the tag and the OID of a Type or Relation frame."""
    return frame[:1], relation_id_of(frame, False)


def _data_bytes(batch: Any, start: int, end: int) -> int:
    """Return the bytes of the frames from `start` to before `end`."""
    import numpy as np

    column = batch.column("data")
    offsets = np.frombuffer(column.buffers()[1], np.int32)[column.offset :]
    return int(offsets[end] - offsets[start])


def _fitting(batch: Any, most: int, room: int) -> int:
    """Return how many leading frames fit into `room` bytes, at most `most`."""
    import numpy as np

    column = batch.column("data")
    offsets = np.frombuffer(column.buffers()[1], np.int32)[column.offset :][: most + 1]
    return int(np.searchsorted(offsets, offsets[0] + room, "right")) - 1
