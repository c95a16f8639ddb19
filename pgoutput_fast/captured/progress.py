"""How far an export has come: a position, and what it has of a snapshot that is not read whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from ..directory.reading import Position
from ..lsn import format_lsn, parse_lsn

if TYPE_CHECKING:
    from ..directory.copies import Copy
    from ..directory.reading import Reading, Step


class Progress(NamedTuple):
    """How far an export has come.

    Attributes
    ----------
    position : Position
    copying : (int, int, int) or None
        Relation id and generation of the copy of which some files are read, and how many.
    """

    position: Position
    copying: tuple[int, int, int] | None = None

    def files_of(self, copy: Copy) -> int:
        """How many files of a copy are read."""
        if self.copying is None or self.copying[:2] != (copy.relation_id, copy.generation):
            return 0
        return self.copying[2]

    @classmethod
    def of(cls, manifest: dict[str, Any]) -> Progress:
        """That of a manifest.

        Raises
        ------
        PgOutputError
            An LSN has another form.
        ValueError
            A number has.
        """
        elsewhere = {int(key): parse_lsn(lsn) for key, lsn in manifest["elsewhere"].items()}
        found = manifest["copying"]
        copying = found and (found["relation_id"], found["generation"], found["files"])
        if copying is not None and copying[2] < 0:
            raise ValueError("less than no files of a snapshot are read")
        return cls(Position(parse_lsn(manifest["position"]), elsewhere), copying)

    def store(self, manifest: dict[str, Any]) -> None:
        """Put it into a manifest."""
        manifest["position"] = format_lsn(self.position.lsn)
        manifest["elsewhere"] = {
            str(relation_id): format_lsn(lsn) for relation_id, lsn in self.position.tables.items()
        }
        manifest["copying"] = self.copying and dict(
            zip(("relation_id", "generation", "files"), self.copying, strict=True)
        )


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
