"""Make an Arrow record batch of a relation's rows, in plain Python: the twin of ``_batch.pyx``."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from ..names import qualified
from ._pure_export import export, record_batch
from ._pure_relation import RelationRows
from .arrays import (
    OPERATIONS,
    READ,
    ArrayBuffers,
    commit_of,
    first_seq_of,
    fixed_column,
    pyarrow,
    refuse_part,
    refuse_read,
    variable_column,
)
from .pyarrow_bridge import schema_of
from .schema import Layout

if TYPE_CHECKING:
    from ..protocol.messages import Relation


class ChangeBatch:
    """Changed rows of one version of a relation, as an Arrow record batch.

    Libraries that support the Arrow PyCapsule interface read it without a copy, such as
    ``pyarrow.record_batch(changes)`` and ``polars.DataFrame(changes)``. A batch stays valid after
    its decoder is gone.
    """

    __slots__ = ("_columns", "_nbytes", "_target", "binary", "layout", "num_rows")
    layout: Layout
    binary: tuple[int, ...]
    num_rows: int
    _columns: ArrayBuffers
    _nbytes: int
    _target: str

    def __init__(self) -> None:
        raise TypeError("a ChangeBatch is made by decoding frames")

    def __len__(self) -> int:
        return self.num_rows

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a ChangeBatch is not pickled; what pyarrow.record_batch() makes of it can be"
        )

    def __repr__(self) -> str:
        return f"<ChangeBatch: {self.num_rows} rows of {qualified(self.relation)}>"

    @property
    def relation(self) -> Relation:
        """The Relation message that describes the rows."""
        return self.layout.plan.relation

    @property
    def nbytes(self) -> int:
        """Bytes of the batch's buffers; of a part, its share of them by rows."""
        return self._nbytes

    def __arrow_c_schema__(self) -> object:
        """Return the schema as a capsule of the Arrow C data interface."""
        return schema_of(self.layout.schema(self.binary)).__arrow_c_schema__()

    def __arrow_c_array__(self, requested_schema: object = None) -> tuple[object, object]:
        """Return capsules of schema and batch, and ignore `requested_schema`, as is allowed."""
        return export(self.layout.schema(self.binary), self._columns)

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """Return a stream of this batch alone. :class:`ChangeStream` makes a stream of several."""
        return export_stream([self])

    def with_commit(self, commit_lsn: int, commit_time: int) -> ChangeBatch:
        """Return the same rows, with commit LSN and commit time filled in where they are null.

        They are null in rows of a streamed transaction, because the server sends its commit only at
        the end. The new batch shares all other buffers with this batch.

        Parameters
        ----------
        commit_lsn : int
            LSN of the commit record.
        commit_time : int
            In microseconds since 2000-01-01 UTC.

        Raises
        ------
        TypeError
            An argument is not an int.
        OverflowError
            A value does not fit into its column.
        """
        commit = commit_of(commit_lsn, commit_time, self._target)
        columns = list(self._columns.children)
        for i, letter, value in ((4, "u8", commit[0]), (5, "i8", commit[1])):
            bits, data = columns[i].buffers
            rows = slice(columns[i].offset, columns[i].offset + self.num_rows)
            values = np.frombuffer(data or b"", letter)[rows].copy()
            if bits is not None:
                known = np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little")
                values[known[rows] == 0] = value
            columns[i] = ArrayBuffers(self.num_rows, 0, (None, values.tobytes()))
        return _made(self.layout, self.binary, self._target, tuple(columns))

    def as_read(self, commit_lsn: int, commit_time: int, first_seq: int) -> ChangeBatch:
        """Return the same rows as rows of a snapshot: with the operation "read", not "insert".

        Their xid is null, and their `seq` counts up from `first_seq`. A TRUNCATE stays a TRUNCATE:
        it deletes the rows from before the snapshot. The new batch shares all other buffers with
        this batch.

        Parameters
        ----------
        commit_lsn : int
            Stored in all rows.
        commit_time : int
            Stored in all rows, in microseconds since 2000-01-01 UTC.
        first_seq : int
            The `seq` of the first row.

        Raises
        ------
        PgOutputError
            ``unfit_input``: a row is an update or a delete.
        TypeError
            An argument is not an int.
        OverflowError
            A value does not fit into its column.
        """
        lsn, time = commit_of(commit_lsn, commit_time, self._target)
        count = self.num_rows
        first = first_seq_of(first_seq, count)
        columns = list(self._columns.children)
        _, offsets, text = columns[0].buffers
        rows = slice(columns[0].offset, columns[0].offset + count + 1)
        ends = np.frombuffer(offsets or b"", np.int32)[rows].tolist()
        operations: list[bytes | None] = []
        for row, (begin, end) in enumerate(itertools.pairwise(ends)):
            operation = (text or b"")[begin:end]
            if operation not in _READ:
                refuse_read(row, operation)
            operations.append(_READ[operation])
        unsigned4, unsigned8 = _unsigned(self._target)
        columns[0] = variable_column(operations)
        columns[1] = fixed_column(unsigned4, [None] * count)
        columns[4] = fixed_column(unsigned8, [lsn] * count)
        columns[5] = fixed_column("q", [time] * count)
        columns[6] = fixed_column("q", range(first, first + count))
        return _made(self.layout, self.binary, self._target, tuple(columns))

    def part(self, start: int, end: int) -> ChangeBatch:
        """Return the rows from `start` to before `end` as a batch that shares all buffers.

        Parameters
        ----------
        start, end : int
            Indices of rows.

        Raises
        ------
        IndexError
            There are no such rows.
        """
        if not 0 <= start <= end <= self.num_rows:
            refuse_part(start, end, self.num_rows)
        columns = tuple(_part(column, start, end) for column in self._columns.children)
        part = _made(self.layout, self.binary, self._target, columns)
        part._nbytes = self._nbytes * part.num_rows // max(self.num_rows, 1)
        return part


_READ = {
    name.encode(): (name if name == OPERATIONS["T"] else READ).encode()
    for name in (OPERATIONS["I"], OPERATIONS["T"], READ)
}
"""Operations of rows that a snapshot can have → those that they have there."""


def _unsigned(target: str) -> tuple[str, str]:
    """The letters of columns of 32 and 64 bits without a sign; Spark has none of them."""
    return ("q", "q") if target == "spark" else ("I", "Q")


def batch_of(relation: RelationRows, target: str) -> ChangeBatch:
    """Make a record batch of a relation's rows."""
    head = list(zip(*relation.heads, strict=True))
    unsigned4, unsigned8 = _unsigned(target)
    columns = (
        variable_column(head[0]),
        fixed_column(unsigned4, head[1]),
        fixed_column(unsigned4, head[2]),
        fixed_column(unsigned8, head[3]),
        fixed_column(unsigned8, head[4]),
        fixed_column("q", head[5]),
        fixed_column("q", head[6]),
        variable_column(head[7]),
        relation.before.column(),
        relation.after.column(),
        relation.unchanged_column(),
    )
    binary = tuple(sorted(i for i, is_binary in relation.forms.items() if is_binary))
    return _made(relation.layout, binary, target, columns)


def _made(
    layout: Layout, binary: tuple[int, ...], target: str, columns: tuple[ArrayBuffers, ...]
) -> ChangeBatch:
    batch = ChangeBatch.__new__(ChangeBatch)
    batch.layout = layout
    batch.binary = binary
    batch.num_rows = columns[0].length
    batch._target = target
    batch._columns = ArrayBuffers(batch.num_rows, 0, (None,), columns)
    batch._nbytes = _size(batch._columns)
    return batch


def _size(column: ArrayBuffers) -> int:
    return sum(len(buffer or b"") for buffer in column.buffers) + sum(map(_size, column.children))


def _part(column: ArrayBuffers, start: int, end: int) -> ArrayBuffers:
    first, nulls = column.offset + start, column.null_count
    if nulls == column.length:
        nulls = end - start
    elif nulls:
        bits = np.unpackbits(np.frombuffer(column.buffers[0] or b"", np.uint8), bitorder="little")
        nulls = int(np.count_nonzero(bits[first : column.offset + end] == 0))
    return column._replace(length=end - start, null_count=nulls, offset=first)


def rows_by_commit(batch: ChangeBatch, commit_lsns: Any) -> list[tuple[int, int, int, int]]:
    """Find the rows of each transaction, in a batch whose rows all have a commit LSN.

    Parameters
    ----------
    batch : ChangeBatch
    commit_lsns : uint64[k]
        The commit LSNs of the transactions, each greater than the one before.

    Returns
    -------
    list of (int, int, int, int)
        For each transaction with rows: its index in `commit_lsns`, the `seq` of its first row, and
        the indices of its first row and of the row behind its last.
    """
    columns = batch._columns.children
    lsns = np.frombuffer(columns[4].buffers[1] or b"", np.uint64)
    seqs = np.frombuffer(columns[6].buffers[1] or b"", np.int64)
    starts = np.flatnonzero(np.append(True, lsns[1:] != lsns[:-1]))
    ends = np.append(starts[1:], len(lsns))
    indices = np.searchsorted(commit_lsns, lsns[starts])
    parts = (numbers.tolist() for numbers in (indices, seqs[starts], starts, ends))
    return list(zip(*parts, strict=True))


def export_stream(batches: list[ChangeBatch]) -> object:
    """Export one or more batches, all with the same schema, as the capsule of an Arrow stream."""
    field = batches[0].layout.schema(batches[0].binary)
    made = (record_batch(field, batch._columns) for batch in list(batches))
    reader = pyarrow().RecordBatchReader.from_batches(schema_of(field), made)
    return reader.__arrow_c_stream__()
