"""List segments, and check that they follow each other in one slot's stream."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..errors import PgOutputError
from ..lsn import format_lsn
from .format import POSITION_NAME, RESTORE, TEMPORARY, Segment, SegmentMetadata
from .reader import SegmentReader

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


def _files(directory: Path) -> list[Path]:
    try:
        return list(directory.iterdir())
    except OSError as error:
        raise PgOutputError(
            f"can't read directory {directory} of segments: {error.strerror}"
        ) from error


def listed(directory: Path) -> list[Segment]:
    """The files of segments in a directory, sorted, without those that are still being written."""
    return sorted(
        Segment.from_path(path)
        for path in _files(directory)
        if path.suffix == ".arrow" and not path.name.startswith(".")
    )


class SegmentGroup(NamedTuple):
    """The parts of one segment."""

    parts: list[Segment]
    complete: bool
    has_last: bool
    """Whether its last part exists, which gets its name after all others."""
    metadata: SegmentMetadata

    @property
    def name(self) -> str:
        """The segment as errors name it."""
        return f"segment {self.parts[0].path}"

    @property
    def numbers(self) -> str:
        """The numbers of the parts that exist, as errors list them."""
        return ", ".join(str(segment.part) for segment in self.parts)


def _check_pair(before: SegmentReader, reader: SegmentReader) -> None:
    """Refuse two files of which the second can't follow the first."""
    differences = before.metadata.differences(reader.metadata)
    if differences:
        raise PgOutputError(
            f"{reader.path} does not go together with {before.path}: {'; '.join(differences)}"
        )
    if reader.path.name == before.path.name:
        once = f", once as {before.path}" if before.path != reader.path else ""
        raise PgOutputError(f"{reader.path} is given twice{once}")


def _groups(segments: list[Segment]) -> Iterator[SegmentGroup]:
    """Group sorted files into segments.

    Raises
    ------
    PgOutputError
        A file is damaged, is given twice, or is of another slot than the one before it.
    """
    before: SegmentReader | None = None
    for _, grouped in itertools.groupby(segments, lambda s: (s.first_lsn, s.end_lsn)):
        parts = list(grouped)
        last = []
        for segment in parts:
            with SegmentReader(segment.path) as reader:
                last.append(reader.is_last_part)
            if before is not None:
                _check_pair(before, reader)
            before = reader
        numbers = [segment.part for segment in parts]
        complete = numbers == list(range(len(parts))) and sum(last) == last[-1]
        yield SegmentGroup(parts, complete, any(last), reader.metadata)


def chain(segments: list[Segment]) -> tuple[list[SegmentGroup], SegmentGroup | None]:
    """The complete segments of sorted files, and a last one without its last part or None.

    Raises
    ------
    PgOutputError
        A file is damaged, files are of different slots, segments overlap, or one is missing between
        two others, or a part of one is.
    """
    groups = list(_groups(segments))
    for before, group in itertools.pairwise(groups):
        end = before.parts[0].end_lsn
        if group.parts[0].first_lsn < end or group.metadata.start_lsn < end:
            raise PgOutputError(
                f"{group.name} overlaps with {before.parts[0].path}: they are of two captures, "
                f"which can't be read as one; move the files of one away"
            )
        if group.metadata.start_lsn > end:
            raise PgOutputError(
                f"a segment is missing between {before.parts[0].path} and {group.parts[0].path}: "
                f"from {format_lsn(end)} to {format_lsn(group.metadata.start_lsn)}; restore it, "
                f"or leave out the segments before it"
            )
    unfinished = groups.pop() if groups and not groups[-1].has_last else None
    for group in groups:
        if not group.complete:
            raise _incomplete(group)
    return groups, unfinished


def _incomplete(group: SegmentGroup) -> PgOutputError:
    """The error for a segment of which a part is missing."""
    return PgOutputError(
        f"{group.name} is not complete: there are its parts {group.numbers}, and the last or one "
        f"before it is missing; a list of files needs all of them; if it is gone, {RESTORE}"
    )


def _is_last_part_unnamed(group: SegmentGroup) -> bool:
    """Whether the last part still has its temporary name: a capture renames it last."""
    found = (TEMPORARY.fullmatch(path.name) for path in _files(group.parts[0].path.parent))
    return any(match and match[1] and int(match[1]) > group.parts[-1].part for match in found)


def list_segments(
    path: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
) -> list[Segment]:
    """The files of complete segments in commit order: a stretch of one slot's stream.

    Parameters
    ----------
    path : path or iterable of paths
        A directory, whose segments are all listed; or one or several files, in any order and from
        any directories. In a directory, a segment at the end is left out if its last part still has
        its temporary name: a capture is just renaming its parts.

    Returns
    -------
    list of Segment
        All parts of all segments; empty for a directory without segments.

    Raises
    ------
    PgOutputError
        The directory can't be read, a file has another name or is damaged, files are of different
        slots, segments overlap, or one is missing between two others, or a part of one is; among
        several paths, one is given twice, or is a directory; or pyarrow is not installed.
    """
    if not isinstance(path, (str, os.PathLike)):
        return _list_files([Path(one) for one in path])
    directory = Path(path)
    if directory.is_file():
        return _list_files([directory])
    groups, unfinished = chain(listed(directory))
    while unfinished is not None and not _is_last_part_unnamed(unfinished):
        # The last part may have got its name since the directory was listed.
        before = unfinished
        groups, unfinished = chain(listed(directory))
        if unfinished == before:
            raise _incomplete(unfinished)
    return [segment for group in groups for segment in group.parts]


def _list_files(paths: list[Path]) -> list[Segment]:
    """Do the same for a list of files."""
    for path in paths:
        if path.is_dir():
            raise PgOutputError(
                f"{path} is a directory, and a list may hold files of segments only; give one "
                f"directory by itself, or the files of several that follow each other"
            )
    segments = sorted(Segment.from_path(path) for path in paths)
    _, unfinished = chain(segments)
    if unfinished is not None:
        raise _incomplete(unfinished)
    return segments


def has_begun(directory: str | os.PathLike[str]) -> bool:
    """Whether a capture has begun in a directory, which then has a stored position or segments.

    Raises
    ------
    PgOutputError
        The directory exists and can't be read.
    """
    directory = Path(directory)
    return directory.exists() and any(
        path.name == POSITION_NAME or path.suffix == ".arrow" for path in _files(directory)
    )
