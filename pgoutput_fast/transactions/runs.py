"""Runs: frames that came one after the other, in one buffer, without an object for each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from .._impl import twin
from ..columnar.arrays import lsns_of


class Run:
    """Frames in one buffer.

    Attributes
    ----------
    data : buffer
    offsets : int64[n + 1]
        Where in `data` each frame begins; they need not begin at 0.
    lsns : uint64[n]
        The LSN in each frame's XLogData header; 0 where there is none.
    """

    __slots__ = ("data", "lsns", "offsets")

    def __init__(self, data: Any, offsets: Any, lsns: Any) -> None:
        self.data = data
        self.offsets = offsets
        self.lsns = lsns

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __repr__(self) -> str:
        return f"<Run: {len(self)} frames, {self.size} bytes>"

    @property
    def size(self) -> int:
        """Bytes of the frames."""
        return int(self.offsets[-1] - self.offsets[0])

    def frame(self, i: int) -> bytes:
        """Return a frame by its index."""
        return bytes(self.data[int(self.offsets[i]) : int(self.offsets[i + 1])])

    def frames(self) -> Iterator[bytes]:
        """Yield the frames, one after the other."""
        return map(self.frame, range(len(self)))

    def first_change_lsn(self) -> int | None:
        """Return the LSN of the first frame that is no Begin, Relation or Type, or None.

        Servers send a Begin with this LSN, and without one if an Origin follows.
        """
        for i, start in enumerate(self.offsets[:-1].tolist()):
            if self.data[start] not in b"BRY":
                return int(self.lsns[i])
        return None

    def part(self, start: int, end: int) -> Run:
        """Return the frames from `start` to before `end`; their bytes are shared."""
        return Run(self.data, self.offsets[start : end + 1], self.lsns[start:end])


def runs_of(data: Any, offsets: Any, lsns: Any) -> list[Run]:
    """Return frames as :func:`pgoutput_fast.decode_batch` takes them, as runs.

    Parameters
    ----------
    data, offsets
        Frames as :func:`pgoutput_fast.decode_batch` takes them.
    lsns : array of int, optional
        The LSN of each frame; by default all are 0.

    Raises
    ------
    TypeError, ValueError
        The arguments are of no supported form.
    PgOutputError
        A frame is null.
    """
    buffers = twin("transactions._scan").packed(data, offsets)
    count = sum(len(ends) - 1 for _, ends in buffers)
    numbers = np.zeros(count, np.uint64) if lsns is None else lsns_of(lsns, count)
    runs, first = [], 0
    for buffer, ends in buffers:
        after = first + len(ends) - 1
        runs.append(Run(buffer, ends, numbers[first:after]))
        first = after
    return runs
