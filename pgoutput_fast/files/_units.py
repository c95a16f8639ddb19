"""Find what to read, segments or one recorded stream, in units of whole transactions."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa

from pgoutput_fast.errors import PgOutputError
from pgoutput_fast.lsn import format_lsn, parse_lsn
from pgoutput_fast.segments import Segment, SegmentReader, list_segments
from pgoutput_fast.segments.format import ANNOUNCED_LSN
from pgoutput_fast.segments.reader import is_segment
from pgoutput_fast.segments.recordings import Frame, Recording

if TYPE_CHECKING:
    from collections.abc import Iterable

# How much is decoded at once. The rows of each table become a batch of their own, so with many
# tables a smaller amount would make batches of few rows.
_CHUNK_BYTES = 16 << 20
_CHUNK_FRAMES = 131_072
_DIGESTED = 1 << 20  # bytes at each end of a recording that its digest covers


class Chunk(NamedTuple):
    """Frames that are decoded at once."""

    path: Path
    encoding: str
    frames: Any
    lsns: Any
    size: int
    """Size in bytes."""


class Unit(NamedTuple):
    """Files of whole transactions: one segment with its parts, or a recording."""

    files: tuple[Path, ...]
    size: int
    """Size in bytes."""
    end: str
    """The position behind the unit, as text for the manifest."""


class SegmentSource:
    """Segments that follow each other.

    Attributes
    ----------
    start : str
        The LSN where they begin, as text.
    identity : dict
        Values that identify the source. They are stored in the manifest, and must be the same when
        an export goes on.
    """

    def __init__(self, segments: list[Segment]) -> None:
        groups = itertools.groupby(segments, lambda one: (one.start_lsn, one.end_lsn))
        self._groups = [(end, [one.path for one in parts]) for (_, end), parts in groups]
        with SegmentReader(segments[0].path) as reader:
            metadata = reader.metadata
        self.start = format_lsn(metadata.start_lsn)
        self.identity: dict[str, Any] = {
            "kind": "segments",
            "system_identifier": metadata.system_identifier,
            "database": metadata.database,
            "slot": metadata.slot,
        }

    def remaining(self, begun: str | None, position: str | None) -> list[Unit]:
        """The units behind `position`; what lies between `begun` and `position` was read before.

        Raises
        ------
        PgOutputError
            Segments are missing between the two, one lies on both sides of `position`, or some come
            before `begun`.
        """
        done = 0 if position is None else parse_lsn(position)
        if begun is not None and parse_lsn(self.start) < parse_lsn(begun):
            raise PgOutputError(
                f"the directory has everything from {begun} up to {position}, and "
                f"{self._groups[0][1][0]} comes before that; export what is earlier to a directory "
                "of its own"
            )
        groups = [(end, paths) for end, paths in self._groups if end > done]
        if position is not None and groups:
            first = groups[0][1][0]
            with SegmentReader(first) as reader:
                start = reader.metadata.start_lsn
            if start != done:
                why = (
                    "a segment between them is missing; give it too"
                    if start > done
                    else "they are of two captures, which can't be read as one"
                )
                raise PgOutputError(
                    f"the directory has everything up to {position}, and {first} goes on at "
                    f"{format_lsn(start)}: {why}"
                )
        return [
            Unit(tuple(paths), sum(path.stat().st_size for path in paths), format_lsn(end))
            for end, paths in groups
        ]

    def chunks(self, unit: Unit) -> Iterator[Chunk]:
        """The frames of a unit, as one stream."""
        for number, path in enumerate(unit.files):
            with SegmentReader(path) as reader:
                encoding = reader.metadata.encoding
                repeated = number > 0
                pending: list[Any] = []
                size = 0
                for batch in reader:
                    if repeated:
                        batch, repeated = _without_begin(path, batch), False
                    pending.append(batch.select(["data", "lsn"]))
                    size += batch.column("data").nbytes
                    if size >= _CHUNK_BYTES:
                        yield _chunk(path, encoding, pending, size)
                        pending, size = [], 0
                if pending:
                    yield _chunk(path, encoding, pending, size)


def _chunk(path: Path, encoding: str, batches: list[Any], size: int) -> Chunk:
    data, lsns = pa.Table.from_batches(batches).columns
    return Chunk(path, encoding, data, lsns.to_numpy(), size)


def _without_begin(path: Path, batch: Any) -> Any:
    """The first batch of a second or later part without the Begin, which each part repeats."""
    lsns = batch.column("lsn").to_pylist()
    at = next((i for i, lsn in enumerate(lsns) if lsn != ANNOUNCED_LSN), None)
    if at is None or batch.column("data")[at].as_py()[:1] != b"B":
        raise PgOutputError(f"{path} is a further part of a segment, and begins with no Begin")
    return batch.filter(pa.array([i != at for i in range(batch.num_rows)]))


class RecordingSource:
    """A recorded stream, from its start to its end; the attributes are those of SegmentSource."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.start = None
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

    def remaining(self, begun: str | None, position: str | None) -> list[Unit]:
        """The recording, unless it was read before."""
        size = int(self.identity["bytes"])
        del begun  # it is None, as a recording has no LSN where it begins
        return [] if position is not None else [Unit((self._path,), size, "end")]

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
    """Open the segments or the recording that paths name; None for a directory without segments.

    Raises
    ------
    PgOutputError
        The paths can't be read, are no segments or recording, or do not belong together.
    """
    given = [Path(path) for path in paths]
    if not given:
        raise PgOutputError("no file and no directory was given to read")
    if len(given) == 1 and given[0].is_dir():
        segments = list_segments(given[0])
    else:
        files = []
        for path in given:
            files += [one.path for one in list_segments(path)] if path.is_dir() else [path]
        recordings = [path for path in files if not is_segment(path)]
        if recordings and len(files) > 1:
            raise PgOutputError(
                f"{recordings[0]} is a recorded stream, and nothing says how it goes together with "
                f"other files: give it by itself, and a directory of its own for its tables"
            )
        if recordings:
            return RecordingSource(recordings[0])
        segments = list_segments(files) if files else []
    return SegmentSource(segments) if segments else None
