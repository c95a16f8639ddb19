"""Load the frames of reads in runs of a size to decode at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from ..columnar.selection import Selection
from ..encodings import python_encoding
from ..protocol.messages import decode_rare
from ..segments.reader import SegmentReader
from ..segments.structure import tags_of
from .view import check_file

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from ..segments import SegmentMetadata
    from .read_plan import Read

# Bytes to decode at once. The rows of each table become a batch of their own, so with many tables
# smaller runs would make batches of few rows.
_RUN_BYTES = 16 << 20
# The same for files of snapshots. They have one table each, so smaller runs suffice.
_SNAPSHOT_RUN_BYTES = 1 << 20


class FrameRun(NamedTuple):
    """A run of frames to decode at once."""

    path: Path
    encoding: str
    frames: Any
    lsns: Any
    read: Read
    """The read, whose ranges say which changes to take."""
    beside: Any
    """The other columns of the file, as a table of pyarrow."""
    is_binary: bool
    """Whether the server sent values in binary format where a type has one."""


class WantedFiles:
    """Says which files have changes of some tables, without reading their row batches.

    Parameters
    ----------
    tables : iterable of str or None
        Patterns of tables; None for all.
    """

    def __init__(self, tables: Iterable[str] | None) -> None:
        self._selection = None if tables is None else Selection(tables)
        self._wants: dict[bytes, bool] = {}  # by Relation frame

    def has_any(self, read: Read) -> bool:
        """Return whether a file of a read has a change of the tables."""
        return self._selection is None or any(self._is_wanted(path) for path in read.files)

    def _is_wanted(self, path: Path) -> bool:
        with SegmentReader(path) as reader:
            encoding = python_encoding(reader.metadata.encoding)
            return any(self._is_of_table(span.relation, encoding) for span in reader.index)

    def _is_of_table(self, frame: bytes, encoding: str) -> bool:
        wants = self._wants.get(frame)
        if wants is None:
            relation: Any = decode_rare(frame, in_stream=False, encoding=encoding)
            wants = self._selection is None or self._selection.wants(relation)
            self._wants[frame] = wants
        return wants


def frame_runs(read: Read, metadata: SegmentMetadata) -> Iterator[FrameRun]:
    """Yield the frames of a read as one stream, in runs.

    Parameters
    ----------
    read : Read
    metadata : SegmentMetadata
        The metadata of another file of the same change log.

    Raises
    ------
    PgOutputError
        A file can't be read, is damaged, or comes from another slot.
    """
    enough = _RUN_BYTES if read.snapshot is None else _SNAPSHOT_RUN_BYTES
    for number, path in enumerate(read.files):
        with SegmentReader(path) as reader:
            check_file(reader, metadata)
            repeated = number > 0
            pending: list[Any] = []
            size = 0
            for batch in reader:
                if repeated:
                    whole, batch = batch, _without_begin(batch)
                    repeated = len(batch) == len(whole)
                pending.append(batch)
                size += batch.column("data").nbytes
                if size >= enough:
                    yield _frame_run(path, reader.metadata, pending, read)
                    pending, size = [], 0
            if pending:
                yield _frame_run(path, reader.metadata, pending, read)


def _frame_run(path: Path, metadata: SegmentMetadata, batches: list[Any], read: Read) -> FrameRun:
    table = pa.Table.from_batches(batches)
    return FrameRun(
        path, metadata.encoding, table.column("data"), table.column("lsn").to_numpy(), read,
        table.drop(["data"]), metadata.is_binary,
    )  # fmt: skip


def _without_begin(batch: Any) -> Any:
    """Return a batch without its first Begin: each further part repeats the transaction's Begin."""
    is_wanted = np.ones(len(batch), bool)
    is_wanted[np.flatnonzero(tags_of(batch.column("data")) == ord("B"))[:1]] = False
    return batch.filter(pa.array(is_wanted))
