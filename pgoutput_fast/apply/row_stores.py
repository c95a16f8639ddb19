"""Stores for the rows that a window needs until its end, in memory or, if large, in a file.

The file has no name, so that the operating system removes it even after a kill.
"""

from __future__ import annotations

import itertools
import mmap
import tempfile
import threading
import weakref
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from ..errors import RetryableError

if TYPE_CHECKING:
    from collections.abc import Sequence

_MOST_BYTES = 64 << 20
"""Maximum bytes of rows in memory, for all stores with the same spill file."""
_LEAST_ROWS = 1 << 12
"""Smaller batches are joined until they have this many rows."""


class _Spilled(NamedTuple):
    """A batch in the file. Fields: position, size."""

    position: int
    size: int


class SpillFile:
    """A temporary file for the rows of some stores, created when a store first needs it.

    It lies in the directory for temporary files (`TMPDIR`).
    """

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None
        self._size = 0
        self._memory = 0
        self._lock = threading.Lock()

    def count(self, size: int) -> bool:
        """Count bytes that a store keeps in memory; return whether it has to spill them."""
        with self._lock:
            self._memory += size
            return self._memory > _MOST_BYTES

    def write(self, batches: Sequence[pa.RecordBatch], size: int) -> list[_Spilled]:
        """Write batches, and subtract their counted `size` from the bytes in memory.

        Raises
        ------
        RetryableError
            The file can't be written.
        """
        spilled = []
        try:
            with self._lock:
                if self._file is None:
                    file = tempfile.TemporaryFile()  # noqa: SIM115
                    # When this object is collected, the file is closed, which deletes it.
                    weakref.finalize(self, file.close)
                    self._file = file
                for batch in batches:
                    sink = pa.BufferOutputStream()
                    with pa.ipc.new_stream(sink, batch.schema) as stream:
                        stream.write_batch(batch)
                    data = sink.getvalue()
                    self._file.write(data)
                    spilled.append(_Spilled(self._size, data.size))
                    self._size += data.size
                self._file.flush()
                self._memory -= size
        except OSError as error:
            where = tempfile.gettempdir()
            raise RetryableError(
                f"a window exceeds its memory, and {where} cannot store its rows: "
                f"{error.strerror or error}",
                code="io_failed",
                path=where,
                hint="Nothing is lost. Free space there, or set TMPDIR to another directory",
            ) from error
        return spilled

    def contents(self) -> pa.Buffer:
        """Map the file into memory, for as long as the returned buffer exists."""
        if self._file is None:
            return pa.py_buffer(b"")
        with self._lock:
            return pa.py_buffer(mmap.mmap(self._file.fileno(), self._size, access=mmap.ACCESS_READ))


class RowStore:
    """A store of rows, which are numbered from 0.

    Parameters
    ----------
    spill_file : SpillFile
    schema : pyarrow.Schema

    Attributes
    ----------
    schema : pyarrow.Schema
        The columns. It may get further columns, which are null in older rows.
    count, size : int
        Number of rows, and their bytes.
    """

    def __init__(self, spill_file: SpillFile, schema: pa.Schema) -> None:
        self.schema = schema
        self._spill_file = spill_file
        self._bytes_in_memory = 0
        self.clear()

    def clear(self) -> None:
        """Drop all rows; numbers begin with 0 again."""
        self._spill_file.count(-self._bytes_in_memory)
        self._batches: list[pa.RecordBatch | _Spilled] = []
        self._ends: list[int] = []  # by batch: the number of its last row plus 1
        self._in_memory = 0  # index of the first batch that is in memory
        self._bytes_in_memory = 0
        self._small: list[pa.RecordBatch] = []
        self.count = self.size = 0

    def append(self, columns: Sequence[pa.Array]) -> None:
        """Add rows."""
        rows = pa.RecordBatch.from_arrays(columns, schema=self.schema)
        if self._small and self._small[0].schema != self.schema:
            self._join()
        self._small.append(rows)
        self.count += rows.num_rows
        size = rows.nbytes
        self.size += size
        self._bytes_in_memory += size
        is_full = self._spill_file.count(size)
        if is_full or self.count - self._first_small >= _LEAST_ROWS:
            self._join()
        if is_full:
            batches = self._batches[self._in_memory :]
            spilled = self._spill_file.write(batches, self._bytes_in_memory)
            self._batches[self._in_memory :] = spilled
            self._in_memory, self._bytes_in_memory = len(self._batches), 0

    @property
    def _first_small(self) -> int:
        return self._ends[-1] if self._ends else 0

    def _join(self) -> None:
        """Join the small batches to one."""
        if self._small:
            batch = self._small[0] if len(self._small) == 1 else pa.concat_batches(self._small)
            self._batches.append(batch)
            self._ends.append(self.count)
            self._small = []

    def reader(self) -> RowReader:
        """Return a reader of the rows. It keeps each batch that it has read until it is dropped."""
        self._join()
        return RowReader(self._batches, self._ends, self._spill_file)


class FoundRows(NamedTuple):
    """The locations of rows in a store.

    Fields: size (number of rows); parts (number of a batch, and the rows in it); back (indexes that
    restore the wanted order; None if the order is right).
    """

    size: int
    parts: list[tuple[int, slice | pa.Array]]
    back: pa.Array | None


class RowReader:
    """Reads rows of a store. See `RowStore.reader`."""

    def __init__(self, batches: Sequence[Any], ends: Sequence[int], spill_file: SpillFile) -> None:
        self._batches = batches
        self._ends = np.array(ends, np.int64)
        self._spill_file = spill_file
        self._contents: pa.Buffer | None = None
        self._read: dict[int, pa.RecordBatch] = {}

    def find(self, numbers: Any, nulls: Any = None) -> FoundRows:
        """Find rows by their numbers.

        Parameters
        ----------
        numbers : numpy.ndarray of int
            The numbers. Ascending numbers that are close to each other are fastest.
        nulls : numpy.ndarray of bool, optional
            Where true, `take` returns null instead of the row's value.
        """
        if not len(numbers) or (nulls is not None and nulls.all()):
            return FoundRows(len(numbers), [], None)
        batches = np.searchsorted(self._ends, numbers, "right")
        back = None
        if (batches[1:] < batches[:-1]).any():
            order = np.argsort(batches, kind="stable")
            batches, numbers = batches[order], numbers[order]
            nulls = None if nulls is None else nulls[order]
            back = np.empty(len(order), np.int64)
            back[order] = np.arange(len(order))
        cuts = [0, *(np.flatnonzero(batches[1:] != batches[:-1]) + 1).tolist(), len(batches)]
        parts: list[tuple[int, slice | pa.Array]] = []
        for start, end in itertools.pairwise(cuts):
            batch = int(batches[start])
            rows = numbers[start:end] - (self._ends[batch - 1] if batch else 0)
            lacks = nulls is not None and nulls[start:end].any()
            if not lacks and rows[-1] - rows[0] == end - start - 1 and (rows[1:] > rows[:-1]).all():
                parts.append((batch, slice(int(rows[0]), int(rows[-1]) + 1)))
            else:
                parts.append((batch, pa.array(rows, mask=nulls[start:end] if lacks else None)))
        return FoundRows(len(numbers), parts, None if back is None else pa.array(back))

    def take(self, field: pa.Field, found_rows: FoundRows) -> pa.Array:
        """Return a column of the found rows, by the field's name and with the field's type."""
        if not found_rows.parts:
            return pa.nulls(found_rows.size, field.type)
        parts = []
        for batch, rows in found_rows.parts:
            column = self._column(batch, field)
            parts.append(column[rows] if isinstance(rows, slice) else column.take(rows))
        values = parts[0] if len(parts) == 1 else pa.concat_arrays(parts)
        return values if found_rows.back is None else values.take(found_rows.back)

    def _column(self, number: int, field: pa.Field) -> pa.Array:
        rows = self._read.get(number)
        if rows is None:
            rows = self._batches[number]
            if isinstance(rows, _Spilled):
                if self._contents is None:
                    self._contents = self._spill_file.contents()
                data = self._contents.slice(rows.position, rows.size)
                rows = pa.ipc.open_stream(data).read_next_batch()
            self._read[number] = rows
        at = rows.schema.get_field_index(field.name)
        if at < 0:
            return pa.nulls(rows.num_rows, field.type)
        column = rows.column(at)
        return column if column.type == field.type else column.cast(field.type)
