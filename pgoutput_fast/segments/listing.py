"""List segments, and check that they follow each other in one slot's stream."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .._disk import read_json_file
from .._forms import MALFORMED, of_form, unreadable
from ..errors import PgOutputError
from ..lsn import format_lsn, parse_lsn
from .folders import BEGIN_NAME, POSITION_NAME, SEGMENTS
from .format import RESTORE, Segment, SegmentMetadata
from .reader import SegmentReader

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


def _names(directory: Path) -> list[str]:
    """The names of all files; a directory may have very many, so that no path is made of each."""
    try:
        return os.listdir(directory)  # noqa: PTH208 - names are enough
    except OSError as error:
        raise PgOutputError(
            f"can't read directory {directory} of segments: {error.strerror}",
            code="missing_path" if isinstance(error, FileNotFoundError) else "io_failed",
            path=str(directory),
        ) from error


def listed(directory: Path) -> list[Segment]:
    """The files of segments in a directory, sorted, without those that are still being written."""
    return sorted(
        Segment.named(directory, name) or Segment.from_path(directory / name)  # which refuses it
        for name in _names(directory)
        if name.endswith(".arrow") and not name.startswith(".")
    )


class SegmentGroup(NamedTuple):
    """The parts of one segment."""

    parts: list[Segment]
    complete: bool
    has_last: bool
    """Whether its last part exists, which gets its name after all others."""

    @property
    def start_lsn(self) -> int:
        """Where the segment before ends."""
        return self.parts[0].start_lsn

    @property
    def end_lsn(self) -> int:
        """Where the next segment goes on."""
        return self.parts[0].end_lsn

    @property
    def name(self) -> str:
        """The segment as errors name it."""
        return f"segment {self.parts[0].path}"

    @property
    def numbers(self) -> str:
        """The numbers of the parts that exist, as errors list them."""
        return ", ".join(str(segment.part) for segment in self.parts)

    def metadata(self) -> SegmentMetadata:
        """The description of the segment, of which each file is opened.

        Raises
        ------
        PgOutputError
            A file can't be read, or is damaged.
        """
        for segment in self.parts:
            with SegmentReader(segment.path) as reader:
                metadata = reader.metadata
        return metadata


def _check_pair(before: SegmentReader, reader: SegmentReader) -> None:
    """Refuse two files of different slots."""
    differences = before.metadata.differences(reader.metadata)
    if differences:
        raise PgOutputError(
            f"{reader.path} does not go together with {before.path}: {'; '.join(differences)}",
            code="another_history",
            path=str(reader.path),
        )


def _check_files(segments: Iterable[Segment]) -> None:
    """Refuse files of which one is damaged, or of another slot than the one before it."""
    before: SegmentReader | None = None
    for segment in segments:
        with SegmentReader(segment.path) as reader:
            if before is not None:
                _check_pair(before, reader)
            before = reader


def _group(parts: list[Segment]) -> SegmentGroup:
    """The group of all files with one start and end.

    Raises
    ------
    PgOutputError
        A file is given twice.
    """
    for before, segment in itertools.pairwise(parts):
        if segment.part == before.part:
            once = f", once as {before.path}" if before.path != segment.path else ""
            raise PgOutputError(
                f"{segment.path} is given twice{once}", code="bad_option", path=str(segment.path)
            )
    numbers = [segment.part for segment in parts]
    count = parts[0].parts
    return SegmentGroup(parts, numbers == list(range(count)), numbers[-1] == count - 1)


def newest_forms(segments: list[Segment]) -> Iterator[SegmentGroup]:
    """Group sorted files into segments, without those that a merged one covers.

    A capture merges small segments that follow each other into one, and deletes them later.
    """
    ordered = sorted(segments, key=lambda one: (one.start_lsn, -one.end_lsn, one.part))
    covered: Segment | None = None
    for _, grouped in itertools.groupby(ordered, lambda one: (one.start_lsn, one.end_lsn)):
        parts = list(grouped)
        if covered is None or parts[0].end_lsn > covered.end_lsn:
            covered = parts[0]
            yield _group(parts)


def covered(segments: list[Segment]) -> Iterator[tuple[Segment, Segment]]:
    """Files that a merged one covers, each with that one."""
    kept = [segment for group in newest_forms(segments) for segment in group.parts]
    names = {segment.path for segment in kept}
    for segment in segments:
        if segment.path not in names:
            for one in kept:
                if one.start_lsn <= segment.start_lsn and segment.end_lsn <= one.end_lsn:
                    yield segment, one
                    break


def chain(segments: list[Segment]) -> tuple[list[SegmentGroup], SegmentGroup | None]:
    """The complete segments of files, and a last one that lacks its last part or None.

    Files are not opened.

    Raises
    ------
    PgOutputError
        Segments overlap, or one is missing between two others, or a part of one is.
    """
    groups = list(newest_forms(segments))
    for before, group in itertools.pairwise(groups):
        end = before.end_lsn
        if group.start_lsn < end:
            raise PgOutputError(
                f"{group.name} overlaps with {before.parts[0].path}: they are of two captures, "
                f"which can't be read as one",
                code="another_history",
                path=str(group.parts[0].path),
                hint="Move the files of one away",
            )
        if group.start_lsn > end:
            raise PgOutputError(
                f"a segment is missing between {before.parts[0].path} and {group.parts[0].path}: "
                f"from {format_lsn(end)} to {format_lsn(group.start_lsn)}",
                code="changes_missing",
                path=str(group.parts[0].path),
                hint="Restore it, or leave out the segments before it",
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
        f"before it is missing; a list of files needs all of them; if it is gone, {RESTORE}",
        code="incomplete",
        path=str(group.parts[0].path),
    )


def _is_last_part_unnamed(group: SegmentGroup) -> bool:
    """Whether the last part still has its temporary name: a capture renames it last."""
    found = map(SEGMENTS.unfinished, _names(group.parts[0].directory))
    return any(
        match and match["part"] and int(match["part"]) > group.parts[-1].part for match in found
    )


class Contents(NamedTuple):
    """The segments of a directory.

    Attributes
    ----------
    segments : list of Segment
        All parts of all complete segments, in commit order.
    begin, end : int
        Everything that was committed from `begin` on and before `end` is in them.
    """

    segments: list[Segment]
    begin: int
    end: int


def contents(directory: Path) -> Contents:
    """The complete segments of a directory.

    Raises
    ------
    PgOutputError
        As of `list_segments`.
    """
    while True:
        found = _contents(directory)
        ends = [*found.segments[:1], *found.segments[1:][-1:]]
        try:
            _check_files(ends)
        except PgOutputError:
            # The capture may have deleted the first one since, or merged it into another one.
            if all(os.path.lexists(segment.path) for segment in ends):
                raise
        else:
            return found


def _contents(directory: Path) -> Contents:
    """Do the same without opening a file."""
    # Before the segments are listed: it is stored once all that comes before it has its name.
    stored = directory / POSITION_NAME
    position, next_start = _stored(stored, "position"), _stored(stored, "segments_end")
    groups, unfinished = present(directory)
    while unfinished is not None and not _is_last_part_unnamed(unfinished):
        # The last part may have got its name since the directory was listed.
        before = unfinished
        groups, unfinished = present(directory)
        if unfinished == before:
            raise _incomplete(unfinished)
    segments = [segment for group in groups for segment in group.parts]
    end = max(position, groups[-1].end_lsn if groups else 0)
    begin = groups[0].start_lsn if groups else next_start
    return Contents(segments, begin, end)


def begin_of(directory: Path) -> int:
    """The LSN before which everything in a directory is deleted, or being deleted; 0: nothing."""
    return _stored(directory / BEGIN_NAME, "begin")


def _stored(path: Path, key: str) -> int:
    """An LSN from a file in JSON; 0 if there is no file."""
    try:
        fields = of_form(json.loads(read_json_file(path)), dict[str, Any], "fields")
        return parse_lsn(of_form(fields[key], str, key))
    except FileNotFoundError:
        return 0
    except (OSError, *MALFORMED) as error:
        raise unreadable(path, error) from error


def asked_since(directory: Path) -> int:
    """From where on the server was asked for what the stored position says; 0: all the time."""
    return _stored(directory / POSITION_NAME, "asked_since")


def stored_metadata(directory: Path) -> SegmentMetadata | None:
    """What the stored position says of the slot; None if there is no stored position.

    Raises
    ------
    PgOutputError
        It can't be read.
    """
    path = directory / POSITION_NAME
    try:
        fields = json.loads(read_json_file(path))
        return SegmentMetadata.from_json(json.dumps(fields["metadata"]))
    except FileNotFoundError:
        return None
    except (OSError, *MALFORMED) as error:
        raise unreadable(path, error) from error


def metadata_of(directory: Path) -> SegmentMetadata | None:
    """The description of what was captured into a directory; None if nothing was yet.

    Raises
    ------
    PgOutputError
        As of :func:`contents`, or a file can't be read.
    """
    while True:
        segments = contents(directory).segments
        if not segments:
            return stored_metadata(directory)
        try:
            with SegmentReader(segments[0].path) as reader:
                return reader.metadata
        except PgOutputError:
            # The capture may have deleted it since, or merged it into another one.
            if os.path.lexists(segments[0].path):
                raise


def present(directory: Path) -> tuple[list[SegmentGroup], SegmentGroup | None]:
    """The chain of a directory, as `chain` gives it, without what is being deleted."""
    before = ""
    while True:
        segments = listed(directory)
        begin = begin_of(directory)  # later: deletion begins after it is stored
        try:
            return chain([segment for segment in segments if segment.end_lsn > begin])
        except PgOutputError as error:
            # While files get their names, a directory may be read with a later one and without
            # the one before it. What is there when it is read again is in it.
            if str(error) == before:
                raise
            before = str(error)


def list_segments(
    path: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
) -> list[Segment]:
    """Return the files of complete segments in commit order.

    In a directory, only the first and the last file are opened. A damaged file is refused when it
    is read. In a list of files, each file is opened.

    Parameters
    ----------
    path : path or iterable of paths
        A directory, or one or several files, in any order and from any directories. In a directory,
        the last segment is left out while a capture still writes its parts.

    Returns
    -------
    list of Segment
        All parts of all segments; empty for a directory without segments.

    Raises
    ------
    PgOutputError
        The directory can't be read. A file has another name or is damaged. Files are of different
        slots. Segments overlap, or a segment or a part is missing. One of several paths is given
        twice, or is a directory. pyarrow is not installed.
    """
    if not isinstance(path, (str, os.PathLike)):
        return _list_files([Path(one) for one in path])
    directory = Path(path)
    if directory.is_file():
        return _list_files([directory])
    return contents(directory).segments


def _list_files(paths: list[Path]) -> list[Segment]:
    """Do the same for a list of files."""
    for path in paths:
        if path.is_dir():
            raise PgOutputError(
                f"{path} is a directory, and a list may hold files of segments only",
                code="bad_option",
                path=str(path),
                hint="Give one directory by itself, or the files of several that follow each other",
            )
    segments = sorted(Segment.from_path(path) for path in paths)
    _check_files(segments)
    groups, unfinished = chain(segments)
    if unfinished is not None:
        raise _incomplete(unfinished)
    return [segment for group in groups for segment in group.parts]


def has_begun(directory: str | os.PathLike[str]) -> bool:
    """Whether a capture has begun in a directory, which then has a stored position or segments.

    Raises
    ------
    PgOutputError
        The directory exists and can't be read.
    """
    directory = Path(directory)
    return directory.exists() and any(
        name == POSITION_NAME or name.endswith(".arrow") for name in _names(directory)
    )


def not_begun(directory: str | os.PathLike[str]) -> PgOutputError:
    """Return the error that no capture has begun in a directory, or that it is not there."""
    path = Path(directory)
    message = f"no capture has begun in {path}"
    if not path.exists():
        message = f"there is no directory {path}"
    elif not path.is_dir():
        message = f"{path} is not a directory"
    return PgOutputError(
        message, code="not_begun" if path.is_dir() else "missing_path", path=str(path)
    )
