"""Which decoded changes and errors lie in the commit ranges of a read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from ..protocol.wire import relation_id_of
from ..segments.structure import ANNOUNCEMENTS

if TYPE_CHECKING:
    from ..columnar._pure_batch import ChangeBatch
    from ..columnar.decoder import BadFrame
    from .read_frames import FrameRun


def counted(changes: ChangeBatch, frame_run: FrameRun) -> Any:
    """Return the changes in the commit range of the read, as a record batch of pyarrow."""
    read = frame_run.read
    if read.snapshot is not None:
        return _read(changes, frame_run)
    batch = pa.record_batch(changes)
    start, end = read.range_of(changes.relation.relation_id)
    lsns = batch.column("commit_lsn")
    bounds = pc.min_max(lsns)
    first, last = bounds["min"].as_py(), bounds["max"].as_py()
    if first is not None and start <= first and last < end:
        return batch
    return batch.filter(_within(lsns, start, end))


def frame_lsns(frame_run: FrameRun) -> Any:
    """Return the LSN of each frame for the decoder, as an array.

    For rows of a snapshot, it is `seq` instead. So each row keeps its own `seq`, even if the
    decoder refuses other rows; `_read` moves the value to the column `seq`.
    """
    if frame_run.read.snapshot is None:
        return frame_run.lsns
    return frame_run.beside.column("seq").fill_null(0).cast(pa.uint64()).to_numpy()


def _read(changes: ChangeBatch, frame_run: FrameRun) -> Any:
    """Return the rows of a snapshot with the operation "read", and with `seq` from the LSNs."""
    # Take the values of the last frame: Type and Relation frames have none.
    commit_lsn, commit_time = (
        frame_run.beside.column(name)[-1].as_py() for name in ("commit_lsn", "commit_time")
    )
    batch = pa.record_batch(changes.as_read(commit_lsn, commit_time, 0))
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    columns["seq"] = columns["lsn"].cast(pa.int64())
    columns["lsn"] = columns["commit_lsn"]
    return pa.RecordBatch.from_arrays(list(columns.values()), schema=batch.schema)


def _within(lsns: Any, start: int, end: int) -> Any:
    """Return for each commit LSN whether it is at least `start` and less than `end`."""
    return pc.and_(
        pc.greater_equal(lsns, pa.scalar(start, pa.uint64())),
        pc.less(lsns, pa.scalar(end, pa.uint64())),
    )


def _event_counts(frame_run: FrameRun, bad: BadFrame) -> bool:
    """Return whether a refused frame that is no row lies in the range of the read."""
    read = frame_run.read
    if read.again:
        return False
    start, end = read.others
    commit_lsn: int | None = frame_run.beside.column("commit_lsn")[bad.frame].as_py()
    if commit_lsn is not None:
        return start <= commit_lsn < end
    # A message outside of a transaction has the LSN at which its record ends.
    is_announcement = bool(bad.data) and bad.data[0] in ANNOUNCEMENTS
    return is_announcement or start < int(frame_run.lsns[bad.frame]) <= end


def frame_counts(frame_run: FrameRun, bad: BadFrame) -> bool:
    """Return whether a refused frame lies in the range of the read, so that its error counts."""
    read = frame_run.read
    if read.snapshot is not None:
        return True
    relation_id = None
    if bad.data[:1] in (b"I", b"U", b"D") and len(bad.data) >= 5:
        relation_id = relation_id_of(bad.data, False)
    if relation_id is None:
        return _event_counts(frame_run, bad)
    start, end = read.range_of(relation_id)
    commit: int | None = frame_run.beside.column("commit_lsn")[bad.frame].as_py()
    return commit is None or start <= commit < end
