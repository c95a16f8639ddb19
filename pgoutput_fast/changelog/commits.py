"""Detect a server and a change log that were restored to an earlier state together.

A restored server writes other transactions with the same LSNs. If a capture has continued since,
the LSNs of the change log do not show this to a reader that had read further before. Therefore the
reader stores the LSN and the time of the newest transaction it has read. No other transaction has
the same LSN and the same time in microseconds, so the reader looks for this commit.
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
    """Return the commit of the last transaction of reads; None if there is none.

    Files of snapshots do not count, because their rows may be far behind the stream. Only the last
    record batches of segments are read. If a segment can't be read, return None: reading its
    changes raises the error.
    """
    for read in reversed(reads):
        if read.snapshot is not None:
            continue
        for path in reversed(read.files):
            try:
                with SegmentReader(path) as reader:
                    commit = reader.newest_commit()
            except PgOutputError:
                return None
            if commit is not None:
                return commit
    return None


def has_commit(directory: Path, commit: CommitRecord) -> bool | None:
    """Return whether a change log has a commit; None if it does not cover the commit's LSN.

    Raises
    ------
    PgOutputError
        The directory, or one of its files, can't be read.
    """
    while True:
        listing = contents(directory)
        if not listing.begin <= commit.lsn < listing.end:
            return None
        segments = [
            segment
            for segment in listing.segments
            if segment.start_lsn <= commit.lsn < segment.end_lsn
        ]
        try:
            return any(_has(segment.path, commit) for segment in segments)
        except PgOutputError:
            if all(os.path.lexists(segment.path) for segment in segments):
                raise
        # The capture has merged or deleted a segment since the listing: list again.


def _has(path: Path, commit: CommitRecord) -> bool:
    import pyarrow.compute as pc

    with SegmentReader(path) as reader:
        for batch in reader:
            at_lsn = pc.equal(batch.column("commit_lsn"), commit.lsn)
            at_time = pc.equal(batch.column("commit_time"), commit.time)
            if pc.any(pc.and_(at_lsn, at_time)).as_py():
                return True
    return False
