"""List segments, and check that they are consecutive parts of one slot's stream."""

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
    """Return the names of all files. No Path is made of each: there may be very many."""
    try:
        return os.listdir(directory)  # noqa: PTH208 - names are enough
    except OSError as error:
        raise PgOutputError(
            f"can't read the segments in {directory}: {error.strerror}",
            code="missing_path" if isinstance(error, FileNotFoundError) else "io_failed",
            path=str(directory),
        ) from error


def listed(directory: Path) -> list[Segment]:
    """Return the files of segments in a directory, sorted; leave out temporary files."""
    return sorted(
        Segment.named(directory, name) or Segment.from_path(directory / name)  # the latter raises
        for name in _names(directory)
        if name.endswith(".arrow") and not name.startswith(".")
    )


class SegmentGroup(NamedTuple):
    """The parts of one segment."""

    parts: list[Segment]
    complete: bool
    has_last: bool
    """Whether the last part exists. The writer renames the last part after all others."""

    @property
    def start_lsn(self) -> int:
        """The end of the segment before."""
        return self.parts[0].start_lsn

    @property
    def end_lsn(self) -> int:
        """The start of the next segment."""
        return self.parts[0].end_lsn

    @property
    def name(self) -> str:
        """The name of the segment in errors."""
        return f"segment {self.parts[0].path}"

    @property
    def numbers(self) -> str:
        """The numbers of the existing parts, as a list for errors."""
        return ", ".join(str(segment.part) for segment in self.parts)

    def metadata(self) -> SegmentMetadata:
        """Return the metadata of the segment. This opens each part, and so checks its end mark.

        Raises
        ------
        PgOutputError
            A part can't be read, or is damaged.
        """
        for segment in self.parts:
            with SegmentReader(segment.path) as reader:
                metadata = reader.metadata
        return metadata


def _check_pair(before: SegmentReader, reader: SegmentReader) -> None:
    """Raise an error if two files come from different slots."""
    differences = before.metadata.differences(reader.metadata)
    if differences:
        raise PgOutputError(
            f"{reader.path} does not belong to the capture of {before.path}: "
            f"{'; '.join(differences)}",
            code="another_history",
            path=str(reader.path),
        )


def _check_files(segments: Iterable[Segment]) -> None:
    """Open each file; raise an error if one is damaged, or if the slots differ."""
    before: SegmentReader | None = None
    for segment in segments:
        with SegmentReader(segment.path) as reader:
            if before is not None:
                _check_pair(before, reader)
            before = reader


def _group(parts: list[Segment]) -> SegmentGroup:
    """Return the group of all files that share one start and end.

    Raises
    ------
    PgOutputError
        A part is given twice.
    """
    for before, segment in itertools.pairwise(parts):
        if segment.part == before.part:
            once = f", once as {before.path}" if before.path != segment.path else ""
            raise PgOutputError(
                f"{segment.path} is given twice{once}",
                code="bad_option",
                parameter="path",
                path=str(segment.path),
            )
    numbers = [segment.part for segment in parts]
    count = parts[0].parts
    return SegmentGroup(parts, numbers == list(range(count)), numbers[-1] == count - 1)


def newest_forms(segments: list[Segment]) -> Iterator[SegmentGroup]:
    """Group files into segments, and leave out the segments that a merged segment covers.

    A capture merges small consecutive segments into one segment, and deletes the small ones later.
    """
    ordered = sorted(
        segments, key=lambda segment: (segment.start_lsn, -segment.end_lsn, segment.part)
    )
    covered: Segment | None = None
    for _, grouped in itertools.groupby(
        ordered, lambda segment: (segment.start_lsn, segment.end_lsn)
    ):
        parts = list(grouped)
        if covered is None or parts[0].end_lsn > covered.end_lsn:
            covered = parts[0]
            yield _group(parts)


def covered(segments: list[Segment]) -> Iterator[tuple[Segment, Segment]]:
    """Yield each file that a merged segment covers, with the file of the merged segment."""
    newest = [segment for group in newest_forms(segments) for segment in group.parts]
    names = {segment.path for segment in newest}
    for segment in segments:
        if segment.path not in names:
            for merged in newest:
                if merged.start_lsn <= segment.start_lsn and segment.end_lsn <= merged.end_lsn:
                    yield segment, merged
                    break


def chain(segments: list[Segment]) -> tuple[list[SegmentGroup], SegmentGroup | None]:
    """Group files into consecutive segments, by their names alone: no file is opened.

    Returns
    -------
    list of SegmentGroup
        The complete segments.
    SegmentGroup or None
        The newest segment, if its last part is missing.

    Raises
    ------
    PgOutputError
        Segments overlap, a segment is missing between two others, or a part is missing.
    """
    groups = list(newest_forms(segments))
    for before, group in itertools.pairwise(groups):
        end = before.end_lsn
        if group.start_lsn < end:
            raise PgOutputError(
                f"{group.name} overlaps with {before.parts[0].path}: they are from two captures "
                "and can't be read together",
                code="another_history",
                path=str(group.parts[0].path),
                hint="Move the segments of one capture away",
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
    """Return the error for a segment with a missing part."""
    return PgOutputError(
        f"{group.name} is not complete: it has the parts {group.numbers}, but the last part or one "
        f"before it is missing. A list of files needs all parts; if the part is lost, {RESTORE}",
        code="incomplete",
        path=str(group.parts[0].path),
    )


def _is_last_part_unnamed(group: SegmentGroup) -> bool:
    """Return whether the last part still has its temporary name: a capture renames it last."""
    matches = map(SEGMENTS.unfinished, _names(group.parts[0].directory))
    return any(
        match and match["part"] and int(match["part"]) > group.parts[-1].part for match in matches
    )


class Contents(NamedTuple):
    """The segments of a directory.

    Attributes
    ----------
    segments : list of Segment
        All parts of all complete segments, in commit order.
    begin, end : int
        The segments hold every transaction with ``begin <= commit LSN < end``.
    """

    segments: list[Segment]
    begin: int
    end: int


def contents(directory: Path) -> Contents:
    """Return the complete segments of a directory.

    Raises
    ------
    PgOutputError
        As `list_segments`.
    """
    while True:
        listing = _contents(directory)
        ends = [*listing.segments[:1], *listing.segments[1:][-1:]]
        try:
            _check_files(ends)
        except PgOutputError:
            # The capture may have deleted or merged a segment since it was listed: list again.
            if all(os.path.lexists(segment.path) for segment in ends):
                raise
        else:
            return listing


def _contents(directory: Path) -> Contents:
    """Return the complete segments of a directory without opening any of them."""
    # Read the position before listing: everything before a stored position has its final name.
    path = directory / POSITION_NAME
    position, next_start = _lsn_in(path, "position"), _lsn_in(path, "segments_end")
    groups, unfinished = present(directory)
    while unfinished is not None and not _is_last_part_unnamed(unfinished):
        # The capture may have renamed the last part since the directory was listed: list again.
        before = unfinished
        groups, unfinished = present(directory)
        if unfinished == before:
            raise _incomplete(unfinished)
    segments = [segment for group in groups for segment in group.parts]
    end = max(position, groups[-1].end_lsn if groups else 0)
    begin = groups[0].start_lsn if groups else next_start
    return Contents(segments, begin, end)


def begin_of(directory: Path) -> int:
    """Return the LSN before which the capture deletes everything; 0 if it never deleted."""
    return _lsn_in(directory / BEGIN_NAME, "begin")


def _lsn_in(path: Path, key: str) -> int:
    """Read an LSN from a JSON file; return 0 if the file does not exist."""
    try:
        fields = of_form(json.loads(read_json_file(path)), dict[str, Any], "fields")
        return parse_lsn(of_form(fields[key], str, key))
    except FileNotFoundError:
        return 0
    except (OSError, *MALFORMED) as error:
        raise unreadable(path, error) from error


def asked_since(directory: Path) -> int:
    """Return the LSN since which publications and options are unchanged; 0 if none is stored."""
    return _lsn_in(directory / POSITION_NAME, "asked_since")


def stored_metadata(directory: Path) -> SegmentMetadata | None:
    """Return the session metadata in the stored position; None without a stored position.

    Raises
    ------
    PgOutputError
        The stored position can't be read.
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
    """Return the session metadata of a directory; None before a capture has begun in it.

    The metadata are those of the first segment, or of the stored position if there is no segment.

    Raises
    ------
    PgOutputError
        As :func:`contents`, or a file can't be read.
    """
    while True:
        segments = contents(directory).segments
        if not segments:
            return stored_metadata(directory)
        try:
            with SegmentReader(segments[0].path) as reader:
                return reader.metadata
        except PgOutputError:
            # The capture may have deleted or merged it since it was listed: list again.
            if os.path.lexists(segments[0].path):
                raise


def present(directory: Path) -> tuple[list[SegmentGroup], SegmentGroup | None]:
    """Return what `chain` returns for a directory, without the segments that are being deleted."""
    before = ""
    while True:
        segments = listed(directory)
        begin = begin_of(directory)  # after listing: it is stored before a deletion begins
        try:
            return chain([segment for segment in segments if segment.end_lsn > begin])
        except PgOutputError as error:
            # While a capture renames files, a listing may show a later file without the one before
            # it. List again, and raise the error only if it comes twice.
            if str(error) == before:
                raise
            before = str(error)


def list_segments(
    path: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
) -> list[Segment]:
    """Return the files of complete segments in commit order.

    In a directory, only the first and the last file are opened; other damaged files are noticed
    when a reader reads them. In a list of files, each file is opened.

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
        The directory can't be read. A file does not have the name of a segment, or is damaged.
        Files come from different slots. Segments overlap, or a segment or a part is missing. One of
        several paths is given twice, or is a directory. pyarrow is not installed.
    """
    if not isinstance(path, (str, os.PathLike)):
        return _list_files([Path(file) for file in path])
    directory = Path(path)
    if directory.is_file():
        return _list_files([directory])
    return contents(directory).segments


def _list_files(paths: list[Path]) -> list[Segment]:
    """Return the given files of complete segments in commit order."""
    for path in paths:
        if path.is_dir():
            raise PgOutputError(
                f"{path} is a directory, but a list may have only segment files",
                code="bad_option",
                parameter="path",
                path=str(path),
                hint="Give a single directory, or list the segment files of directories that "
                "follow each other",
            )
    segments = sorted(Segment.from_path(path) for path in paths)
    _check_files(segments)
    groups, unfinished = chain(segments)
    if unfinished is not None:
        raise _incomplete(unfinished)
    return [segment for group in groups for segment in group.parts]


def has_begun(directory: str | os.PathLike[str]) -> bool:
    """Return whether a directory has a stored position or segments: a capture has begun there.

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
    """Return the error for a path that is missing, no directory, or without a capture."""
    path = Path(directory)
    message = f"no capture has begun in {path}"
    if not path.exists():
        message = f"there is no directory {path}"
    elif not path.is_dir():
        message = f"{path} is not a directory"
    return PgOutputError(
        message, code="not_begun" if path.is_dir() else "missing_path", path=str(path)
    )
