"""The files of snapshots: their names, and how to write them.

A snapshot file has the format of a segment's part: the Types and the Relation of the table, then
rows as Insert frames with `commit_lsn` and `seq`. File 0 has a Truncate instead of rows.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from .._disk import becoming, fsync_path
from ..protocol.encode import encode_fields
from ..segments.file import SegmentFile
from ..segments.folders import SNAPSHOTS
from ..segments.format import (
    ANNOUNCED_LSN,
    BATCH_BYTES,
    BATCH_FRAMES,
    require_pyarrow,
    segment_schema,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from ..segments import SegmentMetadata
    from .snapshot_states import Snapshot, TableSnapshots


def snapshot_path(directory: Path, snapshot: Snapshot, file_number: int) -> Path:
    """Return the path of a snapshot's file: 0 has the Truncate, each other one a range of rows."""
    name = f"{snapshot.relation_id:08X}-{snapshot.number:05d}-{file_number:08d}.arrow"
    return directory / SNAPSHOTS.name / name


def number_of(path: Path) -> tuple[int, int, int] | None:
    """Parse a snapshot file's name: relation id, snapshot's number, file's number; else None."""
    match = SNAPSHOTS.match(path.name)
    return match and (int(match[1], 16), int(match[2]), int(match[3]))


def snapshot_files(directory: Path) -> dict[tuple[int, int], list[Path]]:
    """Return all files by relation id and snapshot number, in the order of the rows."""
    files: dict[tuple[int, int], list[Path]] = {}
    folder = SNAPSHOTS.path(directory)
    for name in SNAPSHOTS.listed(directory):
        match = SNAPSHOTS.match(name)
        if match:
            key = int(match[1], 16), int(match[2])
            files.setdefault(key, []).append(folder / name)
    return files


def delete_unfinished(directory: Path, states: Mapping[int, TableSnapshots]) -> None:
    """Delete the files of incomplete snapshots, which a killed process has left.

    Raises
    ------
    OSError
        A file can't be deleted.
    """
    unfinished = {
        (key, snapshot.number)
        for key, state in states.items()
        for snapshot in state.all_snapshots
        if snapshot.state == "waiting"
    }
    for key, files in snapshot_files(directory).items():
        if key in unfinished:
            for file in files:
                SNAPSHOTS.delete(directory, file.name)
    if unfinished:
        fsync_path(SNAPSHOTS.make(directory))


class SnapshotFiles:
    """Writes the files of one snapshot. Several threads may write different files at once.

    Parameters
    ----------
    directory : pathlib.Path
        The directory of the change log.
    snapshot : Snapshot
        The waiting snapshot.
    metadata : SegmentMetadata
        The metadata of the session that reads the rows. `start_lsn` and `snapshot` are set here.
    lsn : int
        The consistent point of the snapshot.
    time : int
        When the snapshot was taken, in microseconds since 2000-01-01 UTC.
    announced : sequence of bytes
        The Type and Relation frames of the table. Each file begins with them.
    options : pyarrow.ipc.IpcWriteOptions, optional
    """

    def __init__(
        self,
        directory: Path,
        snapshot: Snapshot,
        metadata: SegmentMetadata,
        lsn: int,
        time: int,
        announced: Sequence[bytes],
        options: Any = None,
    ) -> None:
        self._directory = directory
        self._copy = snapshot
        self._metadata = dataclasses.replace(metadata, start_lsn=lsn - 1, snapshot=True)
        self._time = time
        self._announced = announced
        self._options = options
        self._rows: dict[int, int] = {}

    def begin(self) -> None:
        """Write file 0. It has a Truncate, which makes readers discard the table's earlier rows.

        Raises
        ------
        OSError
            The file can't be written.
        """
        SNAPSHOTS.make(self._directory)
        frame = encode_fields("T", options=0, relation_ids=[self._copy.relation_id])
        self.write(0, [(frame, [0, len(frame)])])

    def write(self, number: int, frames: Iterable[tuple[Any, Any]]) -> int:
        """Write one range of rows to a file, and sync the file.

        Parameters
        ----------
        number : int
            The number of the range, from 1. Number 0 is the file with the Truncate.
        frames : iterable of (buffer, array of int)
            Insert frames, with offsets as :func:`pgoutput_fast.decode_batch` takes them.

        Returns
        -------
        int
            The number of rows.

        Raises
        ------
        OSError
            The file can't be written.
        """
        path = snapshot_path(self._directory, self._copy, number)
        with becoming(path) as temporary:
            file = SegmentFile(temporary, self._metadata, self._options)
            rows = 0
            try:
                self._announce(file)
                for data, offsets in frames:
                    rows += self._write_rows(file, number << 32 | rows, data, offsets)
                file.finish(last=True)
            except BaseException:
                file.discard()
                raise
        self._rows[number] = rows
        return rows

    def finish(self) -> list[int]:
        """Sync the folder; return the number of rows of each file from number 1 on."""
        fsync_path(SNAPSHOTS.path(self._directory))
        return [self._rows[number] for number in range(1, len(self._rows))]

    def discard(self) -> None:
        """Delete the files that were written so far.

        Raises
        ------
        OSError
            A file can't be deleted.
        """
        for number in self._rows:
            SNAPSHOTS.delete(
                self._directory, snapshot_path(self._directory, self._copy, number).name
            )
        self._rows = {}

    def _announce(self, file: SegmentFile) -> None:
        pa = require_pyarrow()
        count = len(self._announced)
        nothing = [pa.nulls(count, type_) for type_ in segment_schema().types[1:5]]
        lsns = pa.array([ANNOUNCED_LSN] * count, pa.uint64())
        file.write([lsns, *nothing, pa.array(self._announced, pa.binary())])

    def _write_rows(self, file: SegmentFile, seq: int, data: Any, offsets: Any) -> int:
        """Write frames as record batches; return the number of rows."""
        import numpy as np

        pa = require_pyarrow()
        ends = np.asarray(offsets, np.int64)
        count = len(ends) - 1
        buffer = pa.py_buffer(data)
        start = 0
        while start < count:
            stop = min(count, start + BATCH_FRAMES)
            fits = int(ends.searchsorted(ends[start] + BATCH_BYTES, "right")) - 1
            stop = max(start + 1, min(stop, fits))
            rows = stop - start
            first, last = int(ends[start]), int(ends[stop])
            within = (ends[start : stop + 1] - first).astype(np.int32)
            # The LSN before the consistent point: the stream's changes begin at that point.
            lsns = pa.py_buffer(np.full(rows, self._metadata.start_lsn, np.uint64))
            times = pa.py_buffer(np.full(rows, self._time, np.int64))
            numbers = pa.py_buffer(np.arange(seq + start, seq + stop, dtype=np.int64))
            values = [pa.py_buffer(within), buffer.slice(first, last - first)]
            file.write(
                [
                    pa.Array.from_buffers(pa.uint64(), rows, [None, lsns]),
                    pa.Array.from_buffers(pa.uint64(), rows, [None, lsns]),
                    pa.Array.from_buffers(pa.int64(), rows, [None, times]),
                    pa.nulls(rows, pa.uint32()),
                    pa.Array.from_buffers(pa.int64(), rows, [None, numbers]),
                    pa.Array.from_buffers(pa.binary(), rows, [None, *values]),
                ]
            )
            start = stop
        return count
