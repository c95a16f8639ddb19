"""Where a reader is behind each step of a reading."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..directory.reading import Position

if TYPE_CHECKING:
    from ..directory.copies import Copy
    from ..directory.reading import Reading, Step


class Walk:
    """Where a consumer is after each step of a reading.

    Parameters
    ----------
    position : Position
        Where it is before the first one.
    reading : Reading
    """

    def __init__(self, position: Position, reading: Reading) -> None:
        self._start = position.lsn
        self._reading = reading
        self._reached = 0
        self._copied: dict[int, int] = {}
        # Tables that were copied within the last segment, and how far they are in it.
        self._inside: dict[int, int] = {}

    def pass_segment(self, step: Step, end: int) -> None:
        """A segment was read that ends at an LSN."""
        if step.again:
            self._inside.update(dict.fromkeys(step.windows, end))
        else:
            self._inside.clear()
            self._reached = end

    def pass_copy(self, copy: Copy) -> None:
        """A copy was read."""
        self._copied[copy.relation_id] = copy.lsn
        if copy.lsn < self._reached:
            self._inside[copy.relation_id] = copy.lsn

    @property
    def position(self) -> Position:
        """Where the consumer is."""
        rest = self._reading.rest
        lsn = max(self._start, min(self._reached, rest.end))
        tables = {}
        for relation_id, stretch in self._reading.tables.items():
            copied = self._copied.get(relation_id, 0)
            ends = [stretch.end, self._inside.get(relation_id, self._reached)]
            # The next copy is still to be read.
            ends += [copy.lsn - 1 for copy in stretch.snapshots if copy.lsn > copied]
            at = max(stretch.start, copied, min(ends))
            if at != lsn:
                tables[relation_id] = at
        return Position(lsn, tables)


def counts(step: Step, start: int, end: int) -> bool:
    """Whether anything counts of the segment from `start` to `end`."""
    windows = step.windows.values() if step.again else (step.others, *step.windows.values())
    return any(first < last and first < end and start < last for first, last in windows)
