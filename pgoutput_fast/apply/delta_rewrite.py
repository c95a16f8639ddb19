"""The two steps of a merge that read the files of a state table.

`MergeFiles.find` finds rows, and `Rewrite.write` rewrites files. This process does both, or several
processes share the files. Memory holds a few row groups of a file at a time.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from .delta_types import conformed
from .row_stores import RowStore, SpillFile
from .targets import DELETED_AT

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from .delta_files import DeltaFileWriter
    from .delta_shape import Shape
    from .delta_table import File, LakeTable
    from .folding import NetChanges
    from .merge_keys import MergeKeys

_T = TypeVar("_T")
_ROWS_AT_ONCE = 1 << 16
"""Rows in a batch when equal rows of a multiset are repeated."""
_PREFETCHED = 2
"""Row groups that are read while another one is written."""
_FEW = 64
"""If a merge removes less than one in this many rows, the others are sliced and not copied."""


class Hits(NamedTuple):
    """The rows of a row group that have the keys of net rows.

    Attributes
    ----------
    file, group : int
        The numbers of the file and of its row group.
    rows : int64[n]
        Indexes of the rows in the group.
    keys : int64[n]
        Numbers of the net rows with the same keys.
    live : bool[n]
        Whether the row is not marked as deleted.
    """

    file: int
    group: int
    rows: Any
    keys: Any
    live: Any


class MergePart(NamedTuple):
    """The part of a merge that one process does: files to rewrite, and net rows to write.

    Attributes
    ----------
    files : list of (File, dict of int to Hits)
        Each file with its hits by row group. Groups without hits are left out.
    rows : int64[n]
        Numbers of the net rows, in ascending order.
    sources : int64[n]
        For a net row with values that were not sent: the number of the net row under whose key one
        of the files has these values. -1 if no file has them.
    unsent : tuple of str
        The columns with values that were not sent.
    """

    files: list[tuple[File, dict[int, Hits]]]
    rows: Any
    sources: Any
    unsent: tuple[str, ...]


class MergeFiles:
    """Reads files of a state table, and gives the rows the columns that the table will have.

    Parameters
    ----------
    table : LakeTable
        The table; `load` need not have been called.
    shape : Shape
    marker : str, optional
        The column that marks deleted rows. They then stay in the table.
    """

    def __init__(self, table: LakeTable, shape: Shape, marker: str | None) -> None:
        self._table = table
        self.shape = shape
        self.marker = marker

    def find(
        self, keys: MergeKeys, names: Sequence[str], files: Iterable[tuple[int, File]]
    ) -> Iterator[Hits]:
        """Find keys, which are in the columns `names`, in numbered files."""
        marked_in = [] if self.marker is None else [self.marker]
        for number, file in files:
            with self._table.open_file(file) as opened:
                for group in range(opened.num_row_groups):
                    rows = self._read(file, opened, group, [*names, *marked_in])
                    key_numbers = keys.places([rows.column(name) for name in names])
                    indices = np.flatnonzero(key_numbers >= 0)
                    if len(indices):
                        yield Hits(
                            number, group, indices, key_numbers[indices], self.live(rows)[indices]
                        )

    def live(self, rows: pa.RecordBatch) -> Any:
        """Return a boolean for each row: whether it is not marked as deleted."""
        if self.marker is None:
            return np.ones(rows.num_rows, bool)
        return rows.column(self.marker).is_null().to_numpy(zero_copy_only=False)

    def groups(self, file: File) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Iterate over the row groups of a file, with their numbers."""
        with self._table.open_file(file) as opened:
            for group in range(opened.num_row_groups):
                yield group, self._read(file, opened, group)

    def _read(
        self, file: File, opened: Any, group: int, names: Sequence[str] | None = None
    ) -> pa.RecordBatch:
        """Read a row group, with all or some of the columns that the table will have."""
        shape = self.shape
        if names is not None:
            fields = [shape.schema.field(name) for name in names]
            shape = shape._replace(schema=pa.schema(fields))
        if not shape.rewrites:
            return self._table.group(file, opened, group, shape.schema)
        sources = [source for field in shape.schema
                   if isinstance(source := shape.sources[field.name], str)]  # fmt: skip
        wanted = pa.schema([shape.there.field(source) for source in sources])
        rows = self._table.group(file, opened, group, wanted)
        return shape.adapted(rows)


class Rewrite:
    """Does the rewrite of a part of a merge.

    Parameters
    ----------
    files : MergeFiles
    net : NetChanges
    part : MergePart
    """

    def __init__(self, files: MergeFiles, net: NetChanges, part: MergePart) -> None:
        self._files = files
        self._shape, self._marker = files.shape, files.marker
        self._net = net
        self._part = part
        self._marks_all = net.truncated and files.marker is not None
        self._old: RowStore | None = None
        self._old_numbers: list[Any] = []

    def write(self, writer: DeltaFileWriter) -> None:
        """Rewrite the files, and write the net rows."""
        if self._marker is not None and any(hits for _, hits in self._part.files):
            self._deleted, self._times = self._deletions()
        for file, hits in self._part.files:
            self._copy(file, hits, writer)
            writer.end_of_file()
        if self._net.key:
            self._write_rows(writer)
        else:
            self._write_counted(writer)

    def _copy(self, file: File, hits_of: dict[int, Hits], writer: DeltaFileWriter) -> None:
        """Copy the rows of a file that stay; keep values of removed rows that net rows need."""
        for group, rows in _prefetched(self._files.groups(file)):
            hits = hits_of.get(group)
            if self._marks_all:
                rows = self._with_marks(rows, self._files.live(rows), self._net.truncated_at)
            if hits is None:
                writer.write(rows)
                continue
            if self._part.unsent:
                self._keep(rows, hits)
            if self._marker is not None:
                hits = self._write_marked(rows, hits, writer)
            writer.write(*_without(rows, hits.rows), size=rows.nbytes)

    def _deletions(self) -> tuple[Any, Any]:
        """Return for each net row whether it is a delete, and its commit time in microseconds."""
        pairs = [
            (
                pc.equal(rows.column("op"), "delete").to_numpy(zero_copy_only=False),
                rows.column("commit_time").cast(pa.int64()).to_numpy(),
            )
            for rows in self._net.batches()
        ]
        deleted, times = map(np.concatenate, zip(*pairs, strict=True))
        return deleted, times

    def _write_marked(self, rows: pa.RecordBatch, hits: Hits, writer: DeltaFileWriter) -> Hits:
        """Write deleted rows with a mark; return the hits whose rows are not to be copied."""
        # In a multiset, all hits are deletes; in a table with a key, some are updates.
        deleted = self._deleted[hits.keys]
        marked = deleted & hits.live
        if not self._marks_all and marked.any():
            at = self._times[hits.keys[marked]]
            gone = rows.take(pa.array(hits.rows[marked]))
            writer.write(self._with_marks(gone, np.ones(len(at), bool), at))
        # A row that was marked before stays as it is, except if a new row takes its key.
        goes = ~deleted if self._marks_all else ~deleted | hits.live
        return hits._replace(rows=hits.rows[goes], keys=hits.keys[goes], live=hits.live[goes])

    def _with_marks(self, rows: pa.RecordBatch, which: Any, times: Any) -> pa.RecordBatch:
        """Mark some rows as deleted at some times, in microseconds since 1970."""
        at = rows.schema.get_field_index(self._marker)
        deleted_at = pa.array(np.array(np.broadcast_to(times, rows.num_rows))).cast(DELETED_AT)
        columns = list(rows.columns)
        columns[at] = pc.if_else(pa.array(which), deleted_at, columns[at])
        return pa.RecordBatch.from_arrays(columns, schema=rows.schema)

    def _keep(self, rows: pa.RecordBatch, hits: Hits) -> None:
        needed = np.isin(hits.keys, self._part.sources)
        old = rows.select(self._part.unsent)
        if self._old is None:
            self._old = RowStore(SpillFile(), old.schema)
        self._old.append(old.take(pa.array(hits.rows[needed])).columns)
        self._old_numbers.append(hits.keys[needed])

    def _rows(self) -> Iterator[tuple[pa.RecordBatch, Any]]:
        """Iterate over the net rows of this part, with their sources."""
        first = 0
        for batch in self._net.batches():
            start, end = np.searchsorted(self._part.rows, [first, first + batch.num_rows])
            numbers = self._part.rows[start:end] - first
            first += batch.num_rows
            if len(numbers):
                whole = len(numbers) == batch.num_rows
                rows = batch if whole else batch.take(pa.array(numbers))
                yield rows, self._part.sources[start:end]

    def _write_rows(self, writer: DeltaFileWriter) -> None:
        """Write the new and changed rows of a table with a key."""
        indexes = np.full(self._net.num_rows + 1, -1, np.int64)  # the last item is for source -1
        if self._old_numbers:
            numbers = np.concatenate(self._old_numbers)
            indexes[numbers] = np.arange(len(numbers))
        for batch, sources in self._rows():
            rows = net_row(batch, self._shape.schema)
            if batch.column("unchanged").null_count < batch.num_rows:
                rows = self._completed(batch, rows, indexes[sources])
            writer.write(rows.filter(pc.equal(batch.column("op"), "upsert")))

    def _completed(self, batch: pa.RecordBatch, rows: pa.RecordBatch, at: Any) -> pa.RecordBatch:
        """Fill values that were not sent, from the old rows at `at`, or by defaults where -1."""
        unchanged = batch.column("unchanged")
        names = unchanged.flatten()
        parents = pc.list_parent_indices(unchanged).to_numpy()
        columns = list(rows.columns)
        reader = None if self._old is None else self._old.reader()
        for name in names.unique().to_pylist():
            lacking = parents[pc.equal(names, name).to_numpy(zero_copy_only=False)]
            i = rows.schema.get_field_index(name)
            parts = [columns[i], self._shape.defaults.get(name, pa.nulls(1, columns[i].type))]
            numbers = np.arange(len(rows))
            numbers[lacking] = len(rows)
            filled = lacking[at[lacking] >= 0]
            if reader is not None and len(filled):
                parts.append(reader.take(rows.schema.field(i), reader.find(at[filled])))
                numbers[filled] = len(rows) + 1 + np.arange(len(filled))
            columns[i] = pa.concat_arrays(parts).take(pa.array(numbers))
        return pa.RecordBatch.from_arrays(columns, schema=rows.schema)

    def _write_counted(self, writer: DeltaFileWriter) -> None:
        for batch, _ in self._rows():
            comes = pc.equal(batch.column("op"), "upsert")
            rows = net_row(batch, self._shape.schema).filter(comes)
            counts = batch.column("count").filter(comes).to_numpy()
            numbers = np.repeat(np.arange(len(counts)), counts)
            for first in range(0, len(numbers), _ROWS_AT_ONCE):
                writer.write(rows.take(pa.array(numbers[first : first + _ROWS_AT_ONCE])))


def net_row(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return the values of net rows, with the columns of a table."""
    row = batch.column("row")
    names = [field.name for field in row.type]
    return conformed(pa.RecordBatch.from_arrays(row.flatten(), names=names), schema)


def _without(rows: pa.RecordBatch, indexes: Any) -> Iterator[pa.RecordBatch]:
    """Yield rows without the rows at some ascending indexes."""
    if len(indexes) * _FEW > rows.num_rows:
        stays = np.ones(rows.num_rows, bool)
        stays[indexes] = False
        yield rows.filter(pa.array(stays))
        return
    # With few indexes, slices between them save a copy.
    first = 0
    for index in [*indexes.tolist(), rows.num_rows]:
        if index > first:
            yield rows.slice(first, index - first)
        first = index + 1


def _prefetched(rows: Iterator[_T]) -> Iterator[_T]:
    """Yield the items of an iterator, and compute the next items in a thread meanwhile."""
    with ThreadPoolExecutor(1, "pgoutput_fast-read") as pool:
        coming = deque(pool.submit(next, rows, None) for _ in range(_PREFETCHED))
        while (batch := coming.popleft().result()) is not None:
            coming.append(pool.submit(next, rows, None))
            yield batch
