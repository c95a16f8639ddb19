"""Views: immutable listings of a change log at one moment, from which reads are planned."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import Argument, PgOutputError, counted
from ..lsn import format_lsn
from ..segments import Segment
from ..segments.folders import BEGIN_NAME
from ..segments.listing import Contents, contents, list_segments, not_begun, stored_metadata
from ..segments.reader import SegmentReader
from .known import how_to_copy
from .layouts_file import LayoutsReader
from .read_plan import (
    Position,
    Read,
    ReadPlan,
    clipped,
    cut,
    first_position,
    lacking,
    next_ranges,
    ordered_reads,
    restricted,
)
from .snapshot_states import Snapshot, SnapshotStates, TableSnapshots
from .snapshots import snapshot_files, snapshot_path

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

    from ..segments import SegmentMetadata
    from .read_plan import ReadRanges


class View(NamedTuple):
    """An immutable listing of a change log at one moment.

    The files of a view can be read for some time: a capture deletes the segments that a merged
    segment covers only after `grace` seconds.

    Attributes
    ----------
    where : str
        The name of the change log in errors.
    metadata : SegmentMetadata
        The metadata of the newest segment.
    contents : Contents
        The complete segments.
    states : mapping of int to TableSnapshots
        The snapshots of each table, by relation id.
    files : mapping of (int, int) to list of pathlib.Path
        The files of complete snapshots, by relation id and snapshot number. Snapshots that
        are being deleted are left out.
    layouts_reader : LayoutsReader
        Lists the tables with changes in each segment.
    relation_id : int or None
        The only table to read; None: all tables.
    """

    where: str
    metadata: SegmentMetadata
    contents: Contents
    states: Mapping[int, TableSnapshots]
    files: Mapping[tuple[int, int], list[Path]]
    layouts_reader: LayoutsReader
    relation_id: int | None = None

    @property
    def begin(self) -> int:
        """The LSN at which the change log begins: earlier commits are deleted."""
        return self.contents.begin

    @property
    def end(self) -> int:
        """The LSN at which the change log ends: later commits are not in it yet."""
        return self.contents.end

    @property
    def segments(self) -> list[Segment]:
        """All parts of all segments, in commit order."""
        return self.contents.segments

    def before(self, lsn: int) -> View:
        """Return the view as it was at an LSN: without later commits and snapshots."""
        states = {}
        for relation_id, state in self.states.items():
            copies = tuple(snapshot for snapshot in state.all_snapshots if snapshot.lsn <= lsn)
            first = state.all_snapshots[0]
            if first.first and not any(snapshot.state == "snapshot" for snapshot in copies):
                # At that LSN, the table had no snapshot yet, so none of its changes count.
                copies = (first._replace(state="waiting", lsn=min(first.lsn, lsn)),)
            if copies:
                states[relation_id] = TableSnapshots(copies)
        return self._replace(contents=self.contents._replace(end=min(self.end, lsn)), states=states)

    def of_table(self, relation_id: int) -> View:
        """Return the view of one table. Files of other tables may then be missing."""
        states = {key: state for key, state in self.states.items() if key == relation_id}
        files = {key: paths for key, paths in self.files.items() if key[0] == relation_id}
        return self._replace(states=states, files=files, relation_id=relation_id)

    # --- positions

    def first_position(self) -> Position:
        """Return the position of a new reader: each table at its newest snapshot.

        Raises
        ------
        PgOutputError
            Changes since a table's newest snapshot are deleted.
        """
        position = first_position(self.states, self.begin)
        self._check_whole(position, "the changes since their snapshots")
        return position

    def position_at(self, lsn: int) -> Position:
        """Return the position from which a reader gets all commits and snapshots since an LSN.

        Raises
        ------
        PgOutputError
            Commits since the LSN are deleted.
        """
        if lsn >= self.begin:
            return Position(lsn, {})
        if (Path(self.where) / BEGIN_NAME).exists():
            raise PgOutputError(
                f"the changes committed from {format_lsn(lsn)} on, and before "
                f"{format_lsn(self.begin)}, are deleted from {self.where}",
                code="changes_missing",
                path=self.where,
            )
        # Snapshots at the begin of the change log: their rows have the LSN `begin` - 1.
        relation_ids = (
            relation_id for relation_id, state in self.states.items() if state.snapshots
        )
        return Position(self.begin, dict.fromkeys(relation_ids, lsn))

    def _check_whole(self, position: Position, what: str) -> None:
        """Raise an error if changes since a position are deleted."""
        missing = lacking(position, self.states, self.begin)
        if missing:
            raise PgOutputError(
                f"for {counted(len(missing), 'table')}, {self.where} no longer has {what}: "
                f"{how_to_copy(Path(self.where), missing)}",
                code="changes_missing",
                path=self.where,
                hint=("Read with a ", Argument("consumer"), ": the change log keeps what it needs"),
            )

    # --- read plans

    def plan(
        self,
        position: Position,
        max_bytes: int | None = None,
        *,
        until: Position | None = None,
        paused: Collection[int] = (),
        table: int | None = None,
    ) -> ReadPlan | None:
        """Return what to read next from a position; None if there is nothing new.

        Parameters
        ----------
        position : Position
            The position of the reader.
        max_bytes : int, optional
            The plan ends with the read that brings it to this many bytes of files. A snapshot is
            never split.
        until : Position, optional
            The end of an earlier plan for the same position. The new plan ends there too.
        paused : collection of int
            Relation ids of tables to skip. They keep their positions.
        table : int, optional
            The relation id of the only table to read. Other tables keep their positions.

        Raises
        ------
        PgOutputError
            Changes or files that the reader needs are deleted or missing.
        """
        if self.begin > position.lsn:
            raise PgOutputError(
                f"the reader has everything up to {format_lsn(position.lsn)}, but {self.where} "
                f"continues at {format_lsn(self.begin)}: a segment between them is missing",
                code="changes_missing",
                path=self.where,
                hint=("Read with a ", Argument("consumer"), ": the change log keeps what it needs"),
            )
        self._check_whole(position, "changes that the reader lacks")
        read_ranges = self._readable(self._ranges(position, until))
        read_ranges = restricted(read_ranges, position, paused, table)
        only = self.relation_id if table is None else table
        reads: list[Read] = []
        snapshots: list[Snapshot] = []
        size = reached = 0
        is_passed = False  # whether the position moves past a segment without changes of `only`
        after = read_ranges.after
        for group in ordered_reads(read_ranges, self._needed(read_ranges), self.snapshot_paths):
            if max_bytes is not None and size >= max_bytes:
                after = cut(read_ranges, position, reached, snapshots)
                break
            for read in group:
                if read.snapshot is None:
                    segment = Segment.from_path(read.files[0])
                    reached = segment.end_lsn
                    if not read.has_any(segment.start_lsn, segment.end_lsn):
                        continue
                    if only is not None and not self._has_changes(read, only):
                        is_passed = True
                        continue
                elif read.snapshot not in snapshots:
                    snapshots.append(read.snapshot)
                read = read._replace(size=sum(path.stat().st_size for path in read.files))
                reads.append(read)
                size += read.size
        return ReadPlan(reads, after) if reads or is_passed else None

    def position_before(self, position: Position, lsn: int) -> Position:
        """Return the position of a reader that has read up to an LSN, from a position before it.

        Its tables then have what they had to read before the LSN, with snapshots. Give it to `plan`
        as `until`.
        """
        read_ranges = self._readable(self._ranges(position, None))
        snapshots = [
            snapshot
            for commit_range in read_ranges.tables.values()
            for snapshot in commit_range.snapshots
            if snapshot.lsn - 1 < lsn
        ]
        return cut(read_ranges, position, lsn, snapshots)

    def _has_changes(self, read: Read, relation_id: int) -> bool:
        return any(relation_id in self.layouts_reader.relation_ids(path) for path in read.files)

    def _ranges(self, position: Position, until: Position | None) -> ReadRanges:
        if until is None:
            return next_ranges(position, self.states, self.end)
        # Leave out snapshots that came after the earlier plan: they would hold back changes that
        # it read.
        view = self.before(max([until.lsn, *until.tables.values()]))
        return clipped(next_ranges(position, view.states, min(self.end, until.lsn)), until)

    def _readable(self, read_ranges: ReadRanges) -> ReadRanges:
        """Leave out deleted snapshots, with the changes before the next snapshot.

        A newer snapshot of the table makes them superfluous. Reading then starts at the first
        snapshot after the last deleted one.

        Raises
        ------
        PgOutputError
            A snapshot is deleted, and the table has no newer one.
        """
        tables = dict(read_ranges.tables)
        for relation_id, commit_range in read_ranges.tables.items():
            deleted = [
                snapshot.lsn for snapshot in commit_range.snapshots if not self._has_files(snapshot)
            ]
            if not deleted:
                continue
            later = tuple(
                snapshot for snapshot in commit_range.snapshots if snapshot.lsn > deleted[-1]
            )
            newest = self.states[relation_id].snapshots[-1]
            if later:
                start = later[0].lsn - 1
                tables[relation_id] = commit_range._replace(start=start, snapshots=later)
            elif newest not in commit_range.snapshots and self._has_files(newest):
                tables[relation_id] = commit_range._replace(start=commit_range.end, snapshots=())
            else:
                raise _deleted(relation_id, self.where)
        return read_ranges._replace(tables=tables)

    def _needed(self, read_ranges: ReadRanges) -> Iterator[list[Segment]]:
        """Yield the segments with any of the ranges, each with all of its parts."""
        end = max(read_ranges.rest.end, read_ranges.end)
        needed = (
            segment
            for segment in self.segments
            if segment.end_lsn > read_ranges.start and segment.start_lsn < end
        )
        for _, parts in itertools.groupby(
            needed, lambda segment: (segment.start_lsn, segment.end_lsn)
        ):
            yield list(parts)

    # --- snapshots

    def _has_files(self, snapshot: Snapshot) -> bool:
        return (snapshot.relation_id, snapshot.number) in self.files

    def snapshot_paths(self, snapshot: Snapshot) -> list[Path]:
        """Return the files of a snapshot in the order of its rows.

        Raises
        ------
        PgOutputError
            A file is missing, or the snapshot's state file can't be read.
        """
        paths = self.files[snapshot.relation_id, snapshot.number]
        directory = paths[0].parent.parent
        fields: Any = SnapshotStates(directory).fields(snapshot)
        expected = [snapshot_path(directory, snapshot, i) for i in range(1 + len(fields["files"]))]
        lost = next((path for path in expected if path not in paths), None)
        if lost is None:
            return expected
        # Retention deletes the first file of a snapshot before the others.
        if not os.path.lexists(expected[0]):
            raise _deleted(snapshot.relation_id, str(directory))
        raise PgOutputError(
            f"a file of a snapshot is missing: {lost}",
            code="missing_path",
            path=str(lost),
            hint=f"Restore it, or {how_to_copy(directory, [snapshot.relation_id])}",
        )


class SnapshotsFound(NamedTuple):
    """The table states and the snapshot files of a change log, as in the fields of `View`."""

    states: Mapping[int, TableSnapshots]
    files: Mapping[tuple[int, int], list[Path]]


def find_snapshots(directory: Path) -> SnapshotsFound:
    """List the snapshots of a change log.

    Raises
    ------
    PgOutputError
        The folders of snapshots can't be read.
    """
    states = SnapshotStates(directory).read()
    try:
        copies = snapshot_files(directory)
    except OSError as error:
        raise PgOutputError(
            f"can't read snapshots of {directory}: {error.strerror}",
            code="io_failed",
            path=str(directory),
        ) from error
    # Retention deletes the file with the Truncate first: without it, a snapshot is being deleted.
    begins = {
        (snapshot.relation_id, snapshot.number): snapshot_path(directory, snapshot, 0)
        for state in states.values()
        for snapshot in state.snapshots
    }
    whole = {key: paths for key, paths in copies.items() if paths[0] == begins.get(key)}
    return SnapshotsFound(states, whole)


def view_of(
    path: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    find: Callable[[Path], SnapshotsFound] = find_snapshots,
) -> View:
    """Return a view of a change log, or of consecutive files of segments.

    Parameters
    ----------
    path : path or iterable of paths
        A directory, or files of segments.
    find : callable
        Lists the snapshots of a directory at the moment of the call.

    Raises
    ------
    PgOutputError
        No capture has begun in the directory. A file can't be read or is damaged. Files come from
        different slots, or a segment is missing.
    """
    if isinstance(path, (str, os.PathLike)) and Path(path).is_dir():
        return _view_of_directory(Path(path), find)
    segments = list_segments(path)
    if not segments:
        raise PgOutputError("no segment file was given", code="bad_option", parameter="path")
    with SegmentReader(segments[-1].path) as reader:
        metadata = reader.metadata
    listing = Contents(segments, segments[0].start_lsn, segments[-1].end_lsn)
    return View("the segments", metadata, listing, {}, {}, LayoutsReader(None))


def _view_of_directory(directory: Path, find: Callable[[Path], SnapshotsFound]) -> View:
    while True:
        listing = contents(directory)
        snapshots = find(directory)  # after the end was read: see `next_ranges`
        metadata = _newest_metadata(directory, listing)
        if metadata is not None:
            return View(str(directory), metadata, listing, *snapshots, LayoutsReader(directory))


def _newest_metadata(directory: Path, listing: Contents) -> SegmentMetadata | None:
    """Return the metadata of the newest segment; None if it was deleted since the listing."""
    if not listing.segments:
        metadata = stored_metadata(directory)
        if metadata is None:
            raise not_begun(directory)
        return metadata
    path = listing.segments[-1].path
    try:
        with SegmentReader(path) as reader:
            return reader.metadata
    except PgOutputError:
        # The capture may have deleted or merged the segment since it was listed: list again.
        if os.path.lexists(path):
            raise
        return None


def _deleted(relation_id: int, where: str) -> PgOutputError:
    return PgOutputError(
        f"the files of the snapshot of relation {relation_id} are deleted from {where}: "
        f"{how_to_copy(Path(where), [relation_id])}",
        code="changes_missing",
        path=where,
    )


def check_file(reader: SegmentReader, metadata: SegmentMetadata) -> None:
    """Raise an error if a file comes from another slot than the rest of the change log.

    Parameters
    ----------
    reader : SegmentReader
    metadata : SegmentMetadata
        The metadata of another file of the same directory.

    Raises
    ------
    PgOutputError
        The two files come from different clusters, databases or slots.
    """
    differences = metadata.differences(reader.metadata)
    if differences:
        raise PgOutputError(
            f"{reader.path} does not belong to the capture of the other files: "
            f"{'; '.join(differences)}",
            code="another_history",
            path=str(reader.path),
        )
