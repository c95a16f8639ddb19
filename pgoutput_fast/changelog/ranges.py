"""Which changes and errors of a directory's files count, as its reading says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from ..protocol.wire import relation_id_of
from ..segments.structure import ANNOUNCEMENTS

if TYPE_CHECKING:
    from ..columnar._pure_batch import ChangeBatch
    from ..columnar.decoder import BadFrame
    from .read_frames import Chunk


def counted(changes: ChangeBatch, chunk: Chunk) -> Any:
    """Those of a table's decoded changes that count, as a record batch of pyarrow."""
    read = chunk.read
    if read.snapshot is not None:
        return _read(changes, chunk)
    batch = pa.record_batch(changes)
    start, end = read.range_of(changes.relation.relation_id)
    lsns = batch.column("commit_lsn")
    found = pc.min_max(lsns)
    first, last = found["min"].as_py(), found["max"].as_py()
    if first is not None and start <= first and last < end:
        return batch
    return batch.filter(_within(lsns, start, end))


def given_lsns(chunk: Chunk) -> Any:
    """The LSNs for the decoder, as an array; of rows of a snapshot, `seq` is given in their place.

    So each row gets its own, also if others are refused.
    """
    if chunk.read.snapshot is None:
        return chunk.lsns
    return chunk.beside.column("seq").fill_null(0).cast(pa.uint64()).to_numpy()


def _read(changes: ChangeBatch, chunk: Chunk) -> Any:
    """The rows of a snapshot. They were read, not inserted; `given_lsns` gave the LSNs."""
    # Of the last frame, as those that announce the table have none.
    commit_lsn, commit_time = (
        chunk.beside.column(name)[-1].as_py() for name in ("commit_lsn", "commit_time")
    )
    batch = pa.record_batch(changes.as_read(commit_lsn, commit_time, 0))
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    columns["seq"] = columns["lsn"].cast(pa.int64())
    columns["lsn"] = columns["commit_lsn"]
    return pa.RecordBatch.from_arrays(list(columns.values()), schema=batch.schema)


def _within(lsns: Any, start: int, end: int) -> Any:
    """Whether each LSN of a commit lies from `start` on and before `end`."""
    return pc.and_(
        pc.greater_equal(lsns, pa.scalar(start, pa.uint64())),
        pc.less(lsns, pa.scalar(end, pa.uint64())),
    )


def _event_counts(chunk: Chunk, bad: BadFrame) -> bool:
    """Whether a frame that is no row was not read before and is not left out."""
    read = chunk.read
    if read.again:
        return False
    start, end = read.others
    commit_lsn: int | None = chunk.beside.column("commit_lsn")[bad.frame].as_py()
    if commit_lsn is not None:
        return start <= commit_lsn < end
    # A message outside of a transaction lies before its LSN, which is where its record ends.
    is_announcement = bool(bad.data) and bad.data[0] in ANNOUNCEMENTS
    return is_announcement or start < int(chunk.lsns[bad.frame]) <= end


def frame_counts(chunk: Chunk, bad: BadFrame) -> bool:
    """Whether a frame that was refused counts."""
    read = chunk.read
    if read.snapshot is not None:
        return True
    relation_id = None
    if bad.data[:1] in (b"I", b"U", b"D") and len(bad.data) >= 5:
        relation_id = relation_id_of(bad.data, False)
    if relation_id is None:
        return _event_counts(chunk, bad)
    start, end = read.range_of(relation_id)
    commit: int | None = chunk.beside.column("commit_lsn")[bad.frame].as_py()
    return commit is None or start <= commit < end
