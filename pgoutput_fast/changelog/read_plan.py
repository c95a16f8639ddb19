"""Plan what a reader reads next: the range of each table, the order of the reads, and their end.

The rules need no disk. A consumer has one position for all tables, with exceptions: a table that
waits for a snapshot keeps the position at which it began to wait.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

from .._forms import MALFORMED
from ..errors import PgOutputError
from ..lsn import format_lsn, parse_lsn

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from ..segments import Segment
    from .snapshot_states import Snapshot, TableSnapshots

_Range = tuple[int, int]
_EMPTY: _Range = (0, 0)


class Position(NamedTuple):
    """How far a consumer has read.

    Attributes
    ----------
    lsn : int
        The consumer has everything that was committed before this LSN, except for `tables`.
    tables : dict of int to int
        Relation id to LSN, for tables with another position.
    """

    lsn: int
    tables: dict[int, int]

    def of(self, relation_id: int) -> int:
        """Return the LSN of one table."""
        return self.tables.get(relation_id, self.lsn)

    @property
    def least(self) -> int:
        """The least LSN of all tables: the consumer needs nothing before it."""
        return min(self.lsn, *self.tables.values()) if self.tables else self.lsn

    def fields(self) -> dict[str, Any]:
        """Return the position as an object for JSON."""
        tables = {str(key): format_lsn(lsn) for key, lsn in self.tables.items()}
        return {"position": format_lsn(self.lsn), "tables": tables}

    @classmethod
    def of_fields(cls, fields: Mapping[str, Any]) -> Position:
        """Return the position that `fields` wrote; raise one of `MALFORMED` for another object."""
        tables = {int(key): parse_lsn(lsn) for key, lsn in fields["tables"].items()}
        return cls(parse_lsn(fields["position"]), tables)

    def to_json(self) -> str:
        """Return the position as text to store."""
        return json.dumps(self.fields())

    @classmethod
    def from_json(cls, text: str) -> Position:
        """Return the position of a text that `to_json` made.

        Raises
        ------
        PgOutputError
            The text is not a position.
        """
        try:
            return cls.of_fields(json.loads(text))
        except MALFORMED as error:
            raise PgOutputError(f"this is no position: {error}", code="unfit_input") from error


class CommitRange(NamedTuple):
    """The range to read of one table: its commits from `start` on and before `end`.

    Attributes
    ----------
    start, end : int
        Commit LSNs.
    begins : int or None
        Leave out changes before this LSN, because a snapshot contains them; None: leave out all.
    snapshots : tuple of Snapshot
        The snapshots to read in this range. Each comes after the changes before its LSN, and before
        the changes from its LSN on: first a Truncate, then the rows, all with commit LSN `lsn` - 1.
    """

    start: int
    end: int
    begins: int | None = 0
    snapshots: tuple[Snapshot, ...] = ()

    @property
    def window(self) -> _Range:
        """The range of changes that count: from the first commit LSN to before the second."""
        if self.begins is None:
            return _EMPTY
        return max(self.start, self.begins), self.end


class ReadRanges(NamedTuple):
    """The range to read next of each table.

    Attributes
    ----------
    rest : CommitRange
        The range of every table that is not in `tables`.
    tables : dict of int to CommitRange
        By relation id.
    after : Position
        The consumer's position after these ranges.
    """

    rest: CommitRange
    tables: dict[int, CommitRange]
    after: Position

    def of(self, relation_id: int) -> CommitRange:
        """Return the range of one table."""
        return self.tables.get(relation_id, self.rest)

    @property
    def start(self) -> int:
        """The least start of all ranges that are not empty."""
        commit_ranges = [
            commit_range
            for commit_range in (self.rest, *self.tables.values())
            if commit_range.start < commit_range.end
        ]
        return min((commit_range.start for commit_range in commit_ranges), default=self.rest.end)

    @property
    def end(self) -> int:
        """The greatest end of the ranges in `tables` that are not empty."""
        commit_ranges = [
            commit_range
            for commit_range in self.tables.values()
            if commit_range.start < commit_range.end
        ]
        return max((commit_range.end for commit_range in commit_ranges), default=self.rest.end)


def next_ranges(position: Position, states: Mapping[int, TableSnapshots], end: int) -> ReadRanges:
    """Return the ranges to read from a position up to the end of the change log.

    Parameters
    ----------
    position : Position
    states : mapping of int to TableSnapshots
        The result of `SnapshotStates.read`, read **after** `end`. A capture stores that a table
        waits for a snapshot before it writes changes that have to wait, so these states cover all
        of them.
    end : int
        The LSN up to which everything is durable.
    """
    end = max(end, position.lsn)
    tables, table_positions = {}, {}
    for relation_id in states.keys() | position.tables.keys():
        start = position.of(relation_id)
        state = states.get(relation_id)
        stop = max(start, end)
        if state is None:
            tables[relation_id] = CommitRange(start, stop)
        else:
            if state.snapshots and state.snapshots[-1].lsn > end:
                # The snapshot is beyond the end: read the waiting changes together with it later.
                stop = start
            elif state.waits_from is not None:
                stop = max(start, min(stop, state.waits_from))
            begins, void = state.begins, state.void(start)
            if void is not None and void.start <= start:
                begins = void.end
                void = state.void(void.end) if void.end is not None else None
            if void is not None:
                stop = max(start, min(stop, void.start))
            inside = tuple(
                snapshot for snapshot in state.snapshots if start <= snapshot.lsn - 1 < stop
            )
            tables[relation_id] = CommitRange(start, stop, begins, inside)
        if stop != end:
            table_positions[relation_id] = stop
    return ReadRanges(CommitRange(position.lsn, end), tables, Position(end, table_positions))


def restricted(
    read_ranges: ReadRanges, position: Position, paused: Collection[int], table: int | None
) -> ReadRanges:
    """Leave out paused tables, or all tables but one. They keep their positions.

    Parameters
    ----------
    read_ranges : ReadRanges
        The result of `next_ranges` for the position.
    position : Position
    paused : collection of int
        Relation ids of tables to leave out.
    table : int or None
        The relation id of the only table to read.
    """
    rest, after = read_ranges.rest, read_ranges.after
    left_out = set(paused)
    if table is not None:
        left_out |= read_ranges.tables.keys() - {table}
        commit_range = read_ranges.of(table)
        rest = CommitRange(position.lsn, position.lsn)
        read_ranges = read_ranges._replace(tables={**read_ranges.tables, table: commit_range})
        after = Position(position.lsn, {**position.tables, table: commit_range.end})
    starts = {relation_id: position.of(relation_id) for relation_id in left_out}
    empty = {relation_id: CommitRange(at, at) for relation_id, at in starts.items()}
    after = Position(after.lsn, {**after.tables, **starts})
    return ReadRanges(rest, {**read_ranges.tables, **empty}, after)


def clipped(read_ranges: ReadRanges, until: Position) -> ReadRanges:
    """Cut ranges off at the position at which an earlier plan ended.

    Parameters
    ----------
    read_ranges : ReadRanges
        The result of `next_ranges` with the end ``until.lsn``.
    until : Position
    """
    tables = {}
    for relation_id in read_ranges.tables.keys() | until.tables.keys():
        commit_range = read_ranges.of(relation_id)
        end = max(commit_range.start, min(commit_range.end, until.of(relation_id)))
        inside = tuple(snapshot for snapshot in commit_range.snapshots if snapshot.lsn - 1 < end)
        tables[relation_id] = commit_range._replace(end=end, snapshots=inside)
    return ReadRanges(read_ranges.rest, tables, until)


def first_position(states: Mapping[int, TableSnapshots], begin: int) -> Position:
    """Return the position of a new consumer: each table at its newest snapshot.

    The consumer also reads a table that was dropped or has left the publications, as long as all
    changes since the table's newest snapshot are still there.

    Parameters
    ----------
    states : mapping of int to TableSnapshots
    begin : int
        The LSN at which the first segment begins.
    """
    tables = {}
    for relation_id, state in states.items():
        last = state.all_snapshots[-1]
        is_whole = bool(state.snapshots) and begin <= state.snapshots[-1].lsn
        if is_whole or (state.snapshots and last.state == "snapshot"):
            tables[relation_id] = state.snapshots[-1].lsn - 1
        elif last.state == "gone":
            tables[relation_id] = last.lsn
        elif state.waits_from is not None:
            tables[relation_id] = state.waits_from
    return Position(begin, tables)


def lacking(position: Position, states: Mapping[int, TableSnapshots], begin: int) -> list[int]:
    """Return the relation ids of tables whose changes a consumer needs and the log has deleted.

    Parameters
    ----------
    position : Position
    states : mapping of int to TableSnapshots
    begin : int
        The LSN at which the first segment begins.
    """
    relation_ids = []
    for relation_id in states.keys() | position.tables.keys():
        start = position.of(relation_id)
        state = states.get(relation_id)
        waits = (
            [snapshot.lsn for snapshot in state.snapshots if snapshot.lsn - 1 >= start]
            if state
            else []
        )
        # The next snapshot replaces all changes before it. While a table waits for its snapshot, or
        # has never had one, no change counts.
        if state is not None and (state.waits_from is not None or state.begins is None):
            continue
        void = state.void(start) if state is not None else None
        if void is not None and void.start <= start and void.end is None:
            continue
        # A table that was dropped or has left the publications has no further changes.
        last = state.all_snapshots[-1] if state is not None else None
        if last is not None and last.state == "gone" and start >= last.lsn:
            continue
        if begin > (waits[0] if waits else start):
            relation_ids.append(relation_id)
    return sorted(relation_ids)


class Read(NamedTuple):
    """One read: all parts of a segment, or one file of a snapshot, with the changes to take.

    Attributes
    ----------
    files : tuple of pathlib.Path
        The files in order. Together they are one stream.
    size : int
        Bytes of the files.
    snapshot : Snapshot or None
        The snapshot to which the file belongs. All of its rows are read.
    ranges : mapping of int to (int, int)
        For each relation id, the changes to read: from the first commit LSN to before the second.
    others : (int, int)
        The changes to read of all other tables.
    again : bool
        Whether an earlier read of the plan has the same segment. That read has the frames that
        belong to no table.
    """

    files: tuple[Path, ...]
    size: int
    snapshot: Snapshot | None
    ranges: Mapping[int, _Range]
    others: _Range
    again: bool = False

    def range_of(self, relation_id: int) -> _Range:
        """Return the range of a table's changes to read, in the form of `ranges`."""
        return self.ranges.get(relation_id, self.others)

    def has_any(self, start: int, end: int) -> bool:
        """Return whether the read takes any change of a segment from `start` to `end`."""
        ranges = self.ranges.values() if self.again else (self.others, *self.ranges.values())
        return any(first < last and first < end and start < last for first, last in ranges)


class ReadPlan(NamedTuple):
    """The reads that lie between two positions.

    Attributes
    ----------
    reads : list of Read
        In an order that keeps the changes of each table in order.
    after : Position
        The reader's position after these reads.
    """

    reads: list[Read]
    after: Position

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(read.size for read in self.reads)

    def of_table(self, relation_id: int) -> list[Read]:
        """Return the reads that one table needs, each with a single file."""
        reads = []
        for read in self.reads:
            if read.snapshot is not None and read.snapshot.relation_id != relation_id:
                continue
            first, last = read.range_of(relation_id)
            if read.snapshot is not None or first < last:
                # The parts of a segment have about the same size.
                table_read = read._replace(
                    size=read.size // len(read.files), ranges={relation_id: (first, last)}
                )
                reads += [table_read._replace(files=(path,)) for path in read.files]
        return reads


def ordered_reads(
    read_ranges: ReadRanges,
    segments: Iterable[Sequence[Segment]],
    files: Callable[[Snapshot], Sequence[Path]],
) -> Iterator[list[Read]]:
    """Yield the reads of ranges in an order that keeps each table's changes in order.

    If a table's snapshot lies within a segment, the segment is read twice. The first read takes the
    other tables, and the table's changes before the snapshot. Then come the snapshot and a second
    read, which takes the table's changes after the snapshot.

    Reads that are yielded together may not be separated. Their sizes are 0. A read of a segment may
    turn out to be empty.

    Parameters
    ----------
    read_ranges : ReadRanges
    segments : iterable of sequences of Segment
        The segments with any of the ranges, each with all of its parts.
    files : callable
        Returns the files of a snapshot.
    """
    waiting = sorted(
        (
            snapshot
            for commit_range in read_ranges.tables.values()
            for snapshot in commit_range.snapshots
        ),
        key=lambda snapshot: snapshot.lsn,
    )
    whole = {
        relation_id: commit_range.window for relation_id, commit_range in read_ranges.tables.items()
    }

    def snapshot_reads(snapshot: Snapshot) -> list[Read]:
        return [Read((path,), 0, snapshot, {}, _EMPTY) for path in files(snapshot)]

    for parts in segments:
        start, end = parts[0].start_lsn, parts[0].end_lsn
        paths = tuple(part.path for part in parts)
        while waiting and waiting[0].lsn <= start:
            yield snapshot_reads(waiting.pop(0))
        inside = [snapshot for snapshot in waiting if snapshot.lsn < end]
        del waiting[: len(inside)]
        ends: dict[int, int] = {}
        for snapshot in inside:
            ends.setdefault(snapshot.relation_id, snapshot.lsn)
        ranges = {
            # If the table's changes before the snapshot are read already, the snapshot comes next.
            oid: _EMPTY
            if oid in ends and first >= ends[oid] - 1
            else (first, min(last, ends.get(oid, last)))
            for oid, (first, last) in whole.items()
        }
        yield [Read(paths, 0, None, ranges, read_ranges.rest.window)]
        for index, snapshot in enumerate(inside):
            later = [
                other.lsn
                for other in inside[index + 1 :]
                if other.relation_id == snapshot.relation_id
            ]
            first, last = whole[snapshot.relation_id]
            range_ = max(first, snapshot.lsn), min(last, *later[:1], end)
            behind = Read(paths, 0, None, {snapshot.relation_id: range_}, _EMPTY, again=True)
            yield [*snapshot_reads(snapshot), behind]
    for snapshot in waiting:
        yield snapshot_reads(snapshot)


def cut(
    read_ranges: ReadRanges, position: Position, end: int, snapshots: Collection[Snapshot]
) -> Position:
    """Return the position of a reader that has read only the first reads of ranges.

    Parameters
    ----------
    read_ranges : ReadRanges
        The result of `next_ranges` for the position.
    position : Position
    end : int
        The end LSN of the last segment that was read; 0 if none was.
    snapshots : collection of Snapshot
        The snapshots that were read.
    """
    lsn = max(position.lsn, min(end, read_ranges.rest.end))
    tables = {}
    for relation_id, commit_range in read_ranges.tables.items():
        read_lsns = [snapshot.lsn for snapshot in commit_range.snapshots if snapshot in snapshots]
        unread_lsns = [
            snapshot.lsn - 1 for snapshot in commit_range.snapshots if snapshot not in snapshots
        ]
        at = max([commit_range.start, *read_lsns, min([commit_range.end, end, *unread_lsns])])
        if at != lsn:
            tables[relation_id] = at
    return Position(lsn, tables)
