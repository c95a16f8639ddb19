"""Find what to read of a change log, in units of whole transactions."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from ..directory.known import how_to_copy
from ..directory.looking import Look, check_file, look, readable
from ..directory.reading import (
    Position,
    Reading,
    Step,
    alone,
    clipped,
    first_position,
    lacking,
    next_reading,
    steps,
    without,
)
from ..errors import Argument, PgOutputError, counted
from ..lsn import format_lsn
from ..segments import Segment, SegmentMetadata, SegmentReader
from ..segments.folders import BEGIN_NAME
from ..segments.listing import metadata_of
from ..segments.structure import tags_of
from .progress import Walk, counts

if TYPE_CHECKING:
    from collections.abc import Collection

# How much is decoded at once. The rows of each table become a batch of their own, so with many
# tables a smaller amount would make batches of few rows.
_CHUNK_BYTES = 16 << 20
# The same for files of a snapshot, which have one table each: some record batch of them at once.
_COPY_CHUNK_BYTES = 1 << 20


class Chunk(NamedTuple):
    """Frames that are decoded at once."""

    path: Path
    encoding: str
    frames: Any
    lsns: Any
    size: int
    """Size in bytes."""
    step: Step
    """Which of the changes count."""
    beside: Any
    """A table of what stands beside the frames in a segment, or in a file of a snapshot."""
    is_binary: bool
    """Whether values are in binary format, if their types have one."""


class Unit(NamedTuple):
    """Files that are read together: one segment with its parts, or one file of a snapshot."""

    files: tuple[Path, ...]
    size: int
    """Size in bytes."""
    step: Step
    """Which of the changes count."""


class Plan(NamedTuple):
    """Units that are read next."""

    units: list[Unit]
    after: Position
    """Where the reader is behind them."""


class SegmentSource:
    """A change log's segments, and the snapshots of tables.

    Parameters
    ----------
    look : callable
        Gives what there is to read. It is called for each part, as files are merged meanwhile.
    metadata : SegmentMetadata
    where : str
        The directory.
    relation_id : int, optional
        The table that alone is read.

    Attributes
    ----------
    seen : Look
        What there was when the source was opened.
    metadata : SegmentMetadata
    """

    def __init__(
        self,
        look: Callable[[], Look],
        metadata: SegmentMetadata,
        where: str,
        relation_id: int | None = None,
    ) -> None:
        self._look = look
        self.relation_id = relation_id
        self.metadata = metadata
        self._where = where
        # It reads up to the end that it sees now, though more may come meanwhile.
        self.seen = look()

    def before(self, lsn: int) -> SegmentSource:
        """The same for who reads what was committed before an LSN, and none of the copies since."""
        look = self._look
        given = self.metadata, self._where, self.relation_id
        return SegmentSource(lambda: look().before(lsn), *given)

    def of_table(self, relation_id: int) -> SegmentSource:
        """The same for who reads this table alone: what others lack does not matter."""
        look = self._look
        return SegmentSource(
            lambda: look().of_table(relation_id), self.metadata, self._where, relation_id
        )

    def from_lsn(self, lsn: int) -> Position:
        """Where what was committed from an LSN on begins, and the copies since.

        Raises
        ------
        PgOutputError
            Some of it is deleted.
        """
        begin = self.seen.contents.begin
        if lsn >= begin:
            return Position(lsn, {})
        if (Path(self._where) / BEGIN_NAME).exists():
            raise PgOutputError(
                f"what was committed from {format_lsn(lsn)} on, and before {format_lsn(begin)}, is "
                f"deleted from {self._where}",
                code="changes_missing",
                path=self._where,
            )
        # The rows of a first copy have the LSN before the first segment's.
        copied = (one for one, state in self.seen.states.items() if state.snapshots)
        return Position(begin, dict.fromkeys(copied, lsn))

    def begin(self) -> Position:
        """Where a new reader begins: each table at its newest snapshot.

        Raises
        ------
        PgOutputError
            What comes after the snapshots is deleted already.
        """
        found = self._look()
        begin = found.contents.begin
        position = first_position(found.states, begin)
        missing = lacking(position, found.states, begin)
        if missing:
            raise PgOutputError(
                f"of {counted(len(missing), 'table')} the changes since their snapshots are "
                f"deleted from {self._where}: {how_to_copy(Path(self._where), missing)}",
                code="changes_missing",
                path=self._where,
            )
        return position

    def plan(
        self,
        position: Position,
        part_bytes: int,
        *,
        until: int | Position | None = None,
        paused: Collection[int] = (),
        table: int | None = None,
    ) -> Plan | None:
        """What to read next: at least `part_bytes` if there is so much; None if nothing is left.

        Parameters
        ----------
        position : Position
            Where the reader is.
        part_bytes : int
            A snapshot of a table is read to its end.
        until : int or Position, optional
            What was committed from this LSN on is not read; or all is read up to the position where
            an earlier plan of the same source ended, however large it is.
        paused : collection of int
            Relation ids of tables of which nothing is read.
        table : int, optional
            The relation id of the table of which alone something is read.

        Raises
        ------
        PgOutputError
            Something that is needed is deleted or missing.
        """
        found = self._look()
        self._check(found, position)
        end = self.seen.contents.end
        if until is not None:
            end = min(end, until.lsn if isinstance(until, Position) else until)
        if isinstance(until, Position):
            # Copies since are none of it; they would hold back what the earlier plan had.
            seen = found.before(max([until.lsn, *until.tables.values()]))
            reading = clipped(next_reading(position, seen.states, end), until)
            reading, part_bytes = _not_voided(reading, found), sys.maxsize
        else:
            reading = next_reading(position, found.states, end)
        reading = without(reading, position, paused)
        if table is not None:
            reading = alone(reading, position, table)
        reading = readable(reading, found, self._where)
        walk = Walk(position, reading)
        units: list[Unit] = []
        after: Position | None = None
        size = 0
        for step in steps(reading, _needed(found, reading), found.files):
            copy = step.copy
            groups = [step.paths]
            if copy is not None:
                # Each file is a unit, as a table may be very large.
                groups = [(path,) for path in found.of(copy)] or [()]
            elif not _counts(step):
                groups = []
            for number, paths in enumerate(groups, 1):
                if after is not None:
                    return Plan(units, after)
                bytes_ = sum(path.stat().st_size for path in paths)
                units.append(Unit(paths, bytes_, step))
                size += bytes_
                is_last = copy is None or number >= len(step.paths)
                if is_last:
                    _pass(walk, step)
                if size >= part_bytes and is_last:
                    after = walk.position
            if not groups and after is None:
                _pass(walk, step)
        return Plan(units, reading.after) if units else None

    def _check(self, found: Look, position: Position) -> None:
        """Refuse a source that lacks what is needed."""
        begin = found.contents.begin
        if begin > position.lsn:
            raise PgOutputError(
                f"the reader has everything up to {format_lsn(position.lsn)}, and {self._where} "
                f"goes on at {format_lsn(begin)}: a segment between them is missing",
                code="changes_missing",
                hint=("A ", Argument("consumer"), " keeps what is needed"),
            )
        missing = lacking(position, found.states, begin)
        if missing:
            raise PgOutputError(
                f"of {counted(len(missing), 'table')} changes that the reader lacks are deleted "
                f"from {self._where}: {how_to_copy(Path(self._where), missing)}",
                code="changes_missing",
                path=self._where,
                hint=("A ", Argument("consumer"), " keeps what is needed"),
            )

    def chunks(self, unit: Unit) -> Iterator[Chunk]:
        """The frames of a unit, as one stream."""
        return chunks(unit, self.metadata)


def chunks(unit: Unit, metadata: SegmentMetadata) -> Iterator[Chunk]:
    """The frames of a unit of segments, as one stream.

    Parameters
    ----------
    unit : Unit
    metadata : SegmentMetadata
        Of another file of the same directory.
    """
    for number, path in enumerate(unit.files):
        with SegmentReader(path) as reader:
            check_file(reader, metadata)
            enough = _CHUNK_BYTES if unit.step.copy is None else _COPY_CHUNK_BYTES
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
                    yield _chunk(path, reader.metadata, pending, size, unit.step)
                    pending, size = [], 0
            if pending:
                yield _chunk(path, reader.metadata, pending, size, unit.step)


def _not_voided(reading: Reading, found: Look) -> Reading:
    """A reading without tables of which a copy is deleted, as one behind the reading voids it."""
    tables = dict(reading.tables)
    for relation_id, stretch in reading.tables.items():
        last = found.states[relation_id].snapshots[-1] if stretch.snapshots else None
        if last is None or last in stretch.snapshots:
            continue
        keys = {(copy.relation_id, copy.generation) for copy in stretch.snapshots}
        if not keys <= found.files.keys() and (relation_id, last.generation) in found.files:
            tables[relation_id] = stretch._replace(start=stretch.end, snapshots=())
    return reading._replace(tables=tables)


def _needed(found: Look, reading: Reading) -> list[Segment]:
    return [
        one
        for one in found.contents.segments
        if one.end_lsn > reading.start and one.start_lsn < max(reading.rest.end, reading.end)
    ]


def _counts(step: Step) -> bool:
    segment = Segment.from_path(step.paths[0])
    return counts(step, segment.start_lsn, segment.end_lsn)


def _pass(walk: Walk, step: Step) -> None:
    if step.copy is not None:
        walk.pass_copy(step.copy)
    else:
        walk.pass_segment(step, Segment.from_path(step.paths[0]).end_lsn)


def _chunk(
    path: Path, metadata: SegmentMetadata, batches: list[Any], size: int, step: Step
) -> Chunk:
    found = pa.Table.from_batches(batches)
    lsns = found.column("lsn").to_numpy()
    return Chunk(
        path, metadata.encoding, found.column("data"), lsns, size, step, found.drop(["data"]),
        metadata.is_binary,
    )  # fmt: skip


def _without_begin(batch: Any) -> Any:
    """A batch without its first Begin, which each part repeats behind what is announced."""
    is_wanted = np.ones(len(batch), bool)
    is_wanted[np.flatnonzero(tags_of(batch.column("data")) == ord("B"))[:1]] = False
    return batch.filter(pa.array(is_wanted))


def open_source(directory: str | os.PathLike[str]) -> SegmentSource | None:
    """Open a change log; None if it has no segment and no snapshot yet.

    Raises
    ------
    PgOutputError
        The directory can't be read, or is no change log.
    """
    path = Path(directory)
    metadata = metadata_of(path)
    if metadata is None:
        return None
    return SegmentSource(lambda: look(path), metadata, str(path))
