"""Find what to read, segments or one recorded stream, in units of whole transactions."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from ..directory.copies import Tables
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
from ..lsn import format_lsn, parse_lsn
from ..segments import Segment, SegmentMetadata, SegmentReader, list_segments
from ..segments.folders import BEGIN_NAME
from ..segments.listing import Contents, metadata_of
from ..segments.reader import is_segment
from ..segments.recordings import Frame, Recording
from ..segments.structure import tags_of
from .progress import Progress, Walk, counts

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

# How much is decoded at once. The rows of each table become a batch of their own, so with many
# tables a smaller amount would make batches of few rows.
_CHUNK_BYTES = 16 << 20
_CHUNK_FRAMES = 131_072
# The same for files of a snapshot, which have one table each: some record batch of them at once.
_COPY_CHUNK_BYTES = 1 << 20
_DIGESTED = 1 << 20  # bytes at each end of a recording that its digest covers


class Chunk(NamedTuple):
    """Frames that are decoded at once."""

    path: Path
    encoding: str
    frames: Any
    lsns: Any
    size: int
    """Size in bytes."""
    step: Step | None = None
    """Which of the changes count; None: all."""
    beside: Any = None
    """A table of what stands beside the frames in a segment, or in a file of a snapshot."""
    is_binary: bool = False
    """Whether values are in binary format, if their types have one."""


class Unit(NamedTuple):
    """Files that are read together.

    One segment with its parts, one file of a snapshot, or a recording.
    """

    files: tuple[Path, ...]
    size: int
    """Size in bytes."""
    step: Step | None = None
    """Which of the changes count; None: all."""


class Plan(NamedTuple):
    """Units that are read next."""

    units: list[Unit]
    after: Progress | None
    """Where the export is behind them; None: at the end of a recording."""
    total: int
    """Bytes that are read until everything is there, these included."""


class SegmentSource:
    """Segments that follow each other, with the snapshots of tables if a directory is read.

    Parameters
    ----------
    look : callable
        Gives what there is to read. It is called for each part, as files are merged meanwhile.
    metadata : SegmentMetadata
        Of one of the segments, or of the directory.
    where : str
        What errors call the source.
    relation_id : int, optional
        The table that alone is read.

    Attributes
    ----------
    identity : dict
        Values that identify the source. They are stored in the manifest, and must be the same when
        an export goes on.
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
        self.identity: dict[str, Any] = {
            "kind": "segments",
            "system_identifier": metadata.system_identifier,
            "database": metadata.database,
            "slot": metadata.slot,
        }

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

    def begin(self) -> Progress:
        """Where a new export begins: each table at its newest snapshot.

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
        return Progress(position)

    def plan(
        self,
        manifest: dict[str, Any],
        progress: Progress | None,
        part_bytes: int,
        *,
        whole_copies: bool = False,
        until: int | Position | None = None,
        paused: Collection[int] = (),
        table: int | None = None,
    ) -> Plan | None:
        """What to read next: at least `part_bytes` if there is so much; None if nothing is left.

        Parameters
        ----------
        manifest : dict
            Its `start` says where the reader began; None: what comes before that does not matter.
        progress : Progress
        part_bytes : int
        whole_copies : bool
            Whether each snapshot of a table is read to its end.
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
            Something that is needed is deleted or missing, or comes before what was read first.
        """
        if progress is None:
            raise PgOutputError(
                "an export of segments has the end of a recording as its position",
                code="another_history",
            )
        found = self._look()
        position = progress.position
        self._check(found, manifest["start"], position)
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
        after: Progress | None = None
        size = total = 0
        for step in steps(reading, _needed(found, reading), found.files):
            copy = step.copy
            groups = [step.paths]
            first = 0
            if copy is not None:
                # Each file is a unit, as a table may be very large.
                first = progress.files_of(copy)
                groups = [(path,) for path in found.of(copy)[first:]] or [()]
            elif not _counts(step):
                groups = []
            for number, paths in enumerate(groups, first + 1):
                bytes_ = sum(path.stat().st_size for path in paths)
                total += bytes_
                if after is not None:
                    continue
                units.append(Unit(paths, bytes_, step))
                size += bytes_
                is_last = copy is None or number >= len(step.paths)
                if is_last:
                    _pass(walk, step)
                if size >= part_bytes and (copy is None or is_last):
                    after = Progress(walk.position)
                elif size >= part_bytes and copy is not None and not whole_copies:
                    copying = copy.relation_id, copy.generation, number
                    after = Progress(walk.position, copying)
            if not groups and after is None:
                _pass(walk, step)
        if not units:
            return None
        if after is None or size == total:
            after = Progress(reading.after)
        return Plan(units, after, total)

    def _check(self, found: Look, begun: str | None, position: Position) -> None:
        """Refuse a source that lacks what is needed, or that also has what comes before it."""
        segments, begin = found.contents.segments, found.contents.begin
        at = format_lsn(position.lsn)
        if begun is not None and segments and segments[0].end_lsn <= parse_lsn(begun):
            raise PgOutputError(
                f"the directory has everything from {begun} up to {at}, and {segments[0].path} "
                f"comes before that; export what is earlier to a directory of its own",
                code="bad_option",
                path=str(segments[0].path),
            )
        if begin > position.lsn:
            raise PgOutputError(
                f"the directory has everything up to {at}, and {self._where} goes on at "
                f"{format_lsn(begin)}: a segment between them is missing, give it too; if it was "
                f"deleted, begin with a new directory",
                code="changes_missing",
                hint=("A ", Argument("consumer"), " has kept what is needed"),
            )
        missing = lacking(position, found.states, begin)
        if missing:
            raise PgOutputError(
                f"of {counted(len(missing), 'table')} changes that the directory lacks are deleted "
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
            is_copy = unit.step is not None and unit.step.copy is not None
            enough = _COPY_CHUNK_BYTES if is_copy else _CHUNK_BYTES
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
    path: Path, metadata: SegmentMetadata, batches: list[Any], size: int, step: Step | None
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


class RecordingSource:
    """A recorded stream, from its start to its end; with the attributes of SegmentSource."""

    def __init__(self, path: Path) -> None:
        self._path = path
        Recording(path).close()
        size = path.stat().st_size
        digest = hashlib.sha256()
        with path.open("rb") as file:
            digest.update(file.read(_DIGESTED))
            file.seek(max(0, size - _DIGESTED))
            digest.update(file.read())
        self.identity: dict[str, Any] = {
            "kind": "recording",
            "name": path.name,
            "bytes": size,
            "sha256_of_ends": digest.hexdigest(),
        }

    def begin(self) -> None:
        """A recording has no position."""

    def plan(
        self, manifest: dict[str, Any], progress: Progress | None, part_bytes: int
    ) -> Plan | None:
        """The recording, unless it was read before; it is one part."""
        del progress, part_bytes
        size = int(self.identity["bytes"])
        is_read = manifest["position"] is not None
        return None if is_read else Plan([Unit((self._path,), size)], None, size)

    def chunks(self, unit: Unit) -> Iterator[Chunk]:
        """The frames."""
        (path,) = unit.files
        recording = Recording(path)
        try:
            pending: list[Frame] = []
            size = 0
            for frame in recording.frames():
                if not isinstance(frame, Frame):
                    continue
                pending.append(frame)
                size += len(frame.frame)
                if size >= _CHUNK_BYTES or len(pending) >= _CHUNK_FRAMES:
                    yield self._chunk(recording, pending, size)
                    pending, size = [], 0
            if pending:
                yield self._chunk(recording, pending, size)
        finally:
            recording.close()

    def _chunk(self, recording: Recording, frames: list[Frame], size: int) -> Chunk:
        lsns = [frame.lsn for frame in frames]
        known = None if None in lsns else pa.array(lsns, pa.uint64()).to_numpy()
        return Chunk(self._path, recording.encoding, [one.frame for one in frames], known, size)


Source = SegmentSource | RecordingSource


def open_source(paths: Iterable[str | os.PathLike[str]]) -> Source | None:
    """Open the segments or the recording that paths name; None for a directory without any yet.

    Raises
    ------
    PgOutputError
        The paths can't be read, are no segments or recording, or do not belong together.
    """
    given = [Path(path) for path in paths]
    if not given:
        raise PgOutputError("no file and no directory was given to read", code="bad_option")
    if len(given) == 1 and given[0].is_dir():
        directory = given[0]
        metadata = metadata_of(directory)
        if metadata is None:
            return None
        return SegmentSource(lambda: look(directory), metadata, str(directory))
    files = []
    for path in given:
        if path.is_dir() and Tables(path).read():
            raise PgOutputError(
                f"{path} has snapshots of tables, and nothing says how they go together with other "
                f"files",
                code="bad_option",
                path=str(path),
                hint="Give it by itself",
            )
        files += [one.path for one in list_segments(path)] if path.is_dir() else [path]
    recordings = [path for path in files if not is_segment(path)]
    if recordings and len(files) > 1:
        raise PgOutputError(
            f"{recordings[0]} is a recorded stream, and nothing says how it goes together with "
            f"other files",
            code="bad_option",
            path=str(recordings[0]),
            hint="Give it by itself, and a directory of its own for its tables",
        )
    if recordings:
        return RecordingSource(recordings[0])
    segments = list_segments(files) if files else []
    if not segments:
        return None
    with SegmentReader(segments[0].path) as reader:
        metadata = reader.metadata
    found = Contents(segments, metadata.start_lsn, segments[-1].end_lsn)
    return SegmentSource(lambda: Look(found, {}, {}), metadata, "the segments")
