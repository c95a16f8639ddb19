"""Keep the frames of a transaction that has not ended: in memory, or moved to a file.

The file has no name, so that nothing is left of it when the process is killed.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from array import array
from collections.abc import Iterator
from typing import IO, NamedTuple

import numpy as np

from ..errors import Argument, PgOutputError
from .runs import Run

_BLOCK = 4 << 20
"""Bytes of frames that are read back from the file at once."""

_FRAME_OVERHEAD = 16
"""Bytes that each frame takes in addition to its own: an offset and an LSN."""

_NOTE_OVERHEAD = 128
"""Bytes that each subtransaction takes, and each Relation or Type in addition to its own bytes."""


class _Block(NamedTuple):
    """Frames in the file: their place, their number, and how many of them were not rolled back."""

    position: int
    size: int
    frames: int
    valid: int


class Stage:
    """The frames of one transaction, in the order in which they came.

    Attributes
    ----------
    in_stream : bool
        Whether the frames have the form that they have in stream chunks.
    origin : str or None
        The name of the transaction's replication origin.
    announced : list of (int, bytes)
        Index and frame, in the form outside of streams, of each Relation and Type.
    """

    def __init__(self, directory: str | os.PathLike[str] | None, *, in_stream: bool) -> None:
        self.in_stream = in_stream
        self.origin: str | None = None
        self.announced: list[tuple[int, bytes]] = []
        self._directory = directory
        self._first: dict[int, int] = {}  # subtransaction -> index of its first frame
        self._data = bytearray()
        self._ends = array("q")
        self._lsns = array("Q")
        self._file: IO[bytes] | None = None
        self._blocks: list[_Block] = []
        self._spilled = 0  # frames in the file that were not rolled back

    def __len__(self) -> int:
        return self._spilled + len(self._ends)

    def __repr__(self) -> str:
        return f"<Stage: {len(self)} frames, {self.memory} bytes of them in memory>"

    @property
    def memory(self) -> int:
        """Bytes of memory that the stage takes."""
        notes = len(self._first) + len(self.announced)
        size = sum(len(frame) for _, frame in self.announced)
        return self.movable + size + _NOTE_OVERHEAD * notes

    @property
    def movable(self) -> int:
        """Bytes of memory that its frames take, which `spill` moves into the file."""
        return len(self._data) + _FRAME_OVERHEAD * len(self._ends)

    @property
    def file_bytes(self) -> int:
        """Bytes of the file to which `spill` has moved frames; 0 if there is none."""
        return 0 if self._file is None else os.fstat(self._file.fileno()).st_size

    def add(self, run: Run) -> None:
        """Append frames. Their bytes are copied, as a run's buffer also has frames of others."""
        base = len(self._data) - int(run.offsets[0])
        first, last = int(run.offsets[0]), int(run.offsets[-1])
        self._data += memoryview(run.data)[first:last]
        self._ends.frombytes((run.offsets[1:] + base).astype(np.int64).tobytes())
        self._lsns.frombytes(run.lsns.tobytes())

    def note(self, subxid: int, index: int) -> None:
        """Note that a frame is of a subtransaction. Only the first one of each is remembered."""
        self._first.setdefault(subxid, index)

    def take_back(self, subxid: int) -> None:
        """Drop the frames of a subtransaction that was rolled back.

        Subtransactions nest, so all frames since its first one were made inside of it.
        """
        index = self._first.get(subxid)
        if index is None:
            return
        # Both are in the order of their indices.
        while self._first:
            xid, first = self._first.popitem()
            if first < index:
                self._first[xid] = first
                break
        while self.announced and self.announced[-1][0] >= index:
            self.announced.pop()
        if index < self._spilled:
            self._data.clear()
            del self._ends[:], self._lsns[:]
            while self._spilled > index:
                block = self._blocks.pop()
                self._spilled -= block.valid
                if self._spilled < index:
                    self._blocks.append(block._replace(valid=index - self._spilled))
                    self._spilled = index
            return
        remaining = index - self._spilled
        end = self._ends[remaining - 1] if remaining else 0
        del self._data[end:], self._ends[remaining:], self._lsns[remaining:]

    def end(self) -> None:
        """Forget the subtransactions, as none is rolled back any more."""
        self._first = {}

    def spill(self) -> None:
        """Move what is in memory into the file.

        Raises
        ------
        PgOutputError
            The file can't be written. Nothing has changed.
        """
        if not self._ends:
            return
        blocks = []
        try:
            if self._file is None:
                file = tempfile.TemporaryFile(dir=self._directory)  # noqa: SIM115
                # The file is closed when the stage is garbage, and is gone then.
                weakref.finalize(self, file.close)
                self._file = file
            position = self._file.seek(0, os.SEEK_END)
            for run in self._in_memory():
                offsets = (run.offsets - run.offsets[0]).tobytes()
                first, last = int(run.offsets[0]), int(run.offsets[-1])
                for part in (offsets, run.lsns.tobytes(), memoryview(run.data)[first:last]):
                    self._file.write(part)
                blocks.append(_Block(position, last - first, len(run), len(run)))
                position = self._file.tell()
            self._file.flush()
        except OSError as error:
            raise PgOutputError(
                "an open transaction needs more memory than allowed, and its frames can't be "
                f"written to {self._directory or tempfile.gettempdir()}: "
                f"{error.strerror or error}",
                code="io_failed",
                path=str(self._directory or tempfile.gettempdir()),
                hint=(
                    "Free space in that directory, or allow more memory with ",
                    Argument("max_memory"),
                ),
            ) from error
        self._blocks += blocks
        self._spilled += len(self._ends)
        self._data = bytearray()
        self._ends = array("q")
        self._lsns = array("Q")

    def runs(self) -> Iterator[Run]:
        """Yield the frames, in runs of some megabytes.

        Raises
        ------
        PgOutputError
            The file can't be read.
        """
        for block in self._blocks:
            yield self._read(block).part(0, block.valid)
        yield from self._in_memory()

    def _in_memory(self) -> Iterator[Run]:
        offsets = np.array([0, *self._ends], np.int64)
        lsns = np.array(self._lsns, np.uint64)
        start = 0
        while start < len(lsns):
            limit = offsets[start] + _BLOCK
            end = max(start + 1, int(np.searchsorted(offsets, limit, "right")) - 1)
            # A copy, as a buffer that somebody looks at could not grow any more; of no more than is
            # given at once.
            data = bytes(memoryview(self._data)[int(offsets[start]) : int(offsets[end])])
            yield Run(data, offsets[start : end + 1] - offsets[start], lsns[start:end])
            start = end

    def _read(self, block: _Block) -> Run:
        size = 8 * (block.frames + 1) + 8 * block.frames + block.size
        if self._file is None:
            raise PgOutputError("a transaction's frames were dropped", code="unfit_input")
        try:
            data = os.pread(self._file.fileno(), size, block.position)
        except OSError as error:
            raise PgOutputError(
                f"can't read a transaction's frames again: {error}", code="io_failed"
            ) from error
        if len(data) != size:
            raise PgOutputError(
                "can't read a transaction's frames again: their temporary file is cut short",
                code="damaged",
            )
        offsets = np.frombuffer(data, np.int64, block.frames + 1)
        lsns = np.frombuffer(data, np.uint64, block.frames, offset=8 * (block.frames + 1))
        return Run(memoryview(data)[size - block.size :], offsets, lsns)
