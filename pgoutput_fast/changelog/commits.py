"""Whether a directory still has the history that a reader has read, by its newest transaction.

A server whose disk was put back to an earlier state writes another history from there on. Where the
directory was put back with it, and a capture has gone on since, no LSN tells that to who had read
further before. But the transaction that was the newest one then is not there, as no other one has
its LSN and its time in microseconds.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ..errors import PgOutputError
from ..segments import SegmentReader
from ..segments.listing import contents

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ..segments.reader import CommitRecord
    from .read_plan import Read


def newest_commit(reads: Sequence[Read]) -> CommitRecord | None:
    """That of the last transaction of reads; None: they have none, or nobody can tell.

    Files of snapshots do not count, as their rows may be far behind the stream. Of the others, only
    the last record batches are read. One that can't be read is an error where its changes are read.
    """
    for read in reversed(reads):
        if read.snapshot is not None:
            continue
        for path in reversed(read.files):
            try:
                with SegmentReader(path) as reader:
                    found = reader.newest_commit()
            except PgOutputError:
                return None
            if found is not None:
                return found
    return None


def has_commit(directory: Path, commit: CommitRecord) -> bool | None:
    """Whether a directory has a commit; None: it has not that part of the stream.

    Raises
    ------
    PgOutputError
        The directory, or a file of it, can't be read.
    """
    while True:
        found = contents(directory)
        if not found.begin <= commit.lsn < found.end:
            return None
        segments = [one for one in found.segments if one.start_lsn <= commit.lsn < one.end_lsn]
        try:
            return any(_has(one.path, commit) for one in segments)
        except PgOutputError:
            if all(os.path.lexists(one.path) for one in segments):
                raise
        # Some were merged since, or deleted: list them again.


def _has(path: Path, commit: CommitRecord) -> bool:
    import pyarrow.compute as pc

    with SegmentReader(path) as reader:
        for batch in reader:
            at_lsn = pc.equal(batch.column("commit_lsn"), commit.lsn)
            at_time = pc.equal(batch.column("commit_time"), commit.time)
            if pc.any(pc.and_(at_lsn, at_time)).as_py():
                return True
    return False
