"""What a consumer reads next: which stretch of each table, in which order, and where it then is.

Rules without a disk. A consumer has a position, up to where it has read everything, but for tables
that are elsewhere: a table that waits for a snapshot is held back where it began to wait.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence
    from pathlib import Path

    from ..segments import Segment
    from .copies import Copy, TableState

_Window = tuple[int, int]
_EMPTY: _Window = (0, 0)


class Position(NamedTuple):
    """How far a consumer has read.

    Attributes
    ----------
    lsn : int
        It has what was committed before this LSN of all tables, but for those in `tables`.
    tables : dict of int to int
        The LSN for each relation id of a table that is elsewhere.
    """

    lsn: int
    tables: dict[int, int]

    def of(self, relation_id: int) -> int:
        """The LSN for one table."""
        return self.tables.get(relation_id, self.lsn)

    @property
    def least(self) -> int:
        """The least LSN of all: what is before it is not read again."""
        return min(self.lsn, *self.tables.values()) if self.tables else self.lsn


class Stretch(NamedTuple):
    """What is to be read of a table: what was committed from `start` on, and before `end`.

    Attributes
    ----------
    start, end : int
    begins : int or None
        Changes before this LSN are left out, as a snapshot has them; None: all are left out.
    snapshots : tuple of Copy
        Snapshots in the stretch. Each is read behind the changes before its LSN, and before those
        from there on, as ``(lsn - 1, …)``: first a Truncate, then the rows.
    """

    start: int
    end: int
    begins: int | None = 0
    snapshots: tuple[Copy, ...] = ()

    @property
    def window(self) -> _Window:
        """The changes that count: from the first commit LSN to before the second one."""
        if self.begins is None:
            return _EMPTY
        return max(self.start, self.begins), self.end


class Reading(NamedTuple):
    """What a consumer reads next.

    Attributes
    ----------
    rest : Stretch
        Of each table that is not in `tables`.
    tables : dict of int to Stretch
    after : Position
        Where the consumer is when it has read all.
    """

    rest: Stretch
    tables: dict[int, Stretch]
    after: Position

    def of(self, relation_id: int) -> Stretch:
        """The stretch of one table."""
        return self.tables.get(relation_id, self.rest)

    @property
    def start(self) -> int:
        """The least LSN that has to be read."""
        stretches = [one for one in (self.rest, *self.tables.values()) if one.start < one.end]
        return min((one.start for one in stretches), default=self.rest.end)

    @property
    def end(self) -> int:
        """The LSN before which all lies that has to be read."""
        stretches = [one for one in self.tables.values() if one.start < one.end]
        return max((one.end for one in stretches), default=self.rest.end)


def next_reading(position: Position, states: Mapping[int, TableState], end: int) -> Reading:
    """What to read from a position on, up to where the directory ends.

    Parameters
    ----------
    position : Position
    states : mapping of int to TableState
        What `Tables.read` gave **after** `end` was found: a table is marked before anything is
        durable that must wait for its snapshot.
    end : int
        Up to where everything is durable.
    """
    end = max(end, position.lsn)
    tables, elsewhere = {}, {}
    for relation_id in states.keys() | position.tables.keys():
        start = position.of(relation_id)
        state = states.get(relation_id)
        stop = max(start, end)
        if state is None:
            tables[relation_id] = Stretch(start, stop)
        else:
            if state.held_from is not None:
                stop = max(start, min(stop, state.held_from))
            elif state.snapshots and state.snapshots[-1].lsn > end:
                # What was held back until the copy was made is read together with it.
                stop = start
            begins, void = state.begins, state.void(start)
            if void is not None and void.start <= start:
                begins = void.end
                void = state.void(void.end) if void.end is not None else None
            if void is not None:
                stop = max(start, min(stop, void.start))
            inside = tuple(copy for copy in state.snapshots if start <= copy.lsn - 1 < stop)
            tables[relation_id] = Stretch(start, stop, begins, inside)
        if stop != end:
            elsewhere[relation_id] = stop
    return Reading(Stretch(position.lsn, end), tables, Position(end, elsewhere))


def without(reading: Reading, position: Position, relation_ids: Collection[int]) -> Reading:
    """The same, but nothing of some tables: they stay where they are.

    Parameters
    ----------
    reading : Reading
        What `next_reading` gave for a position.
    position : Position
    relation_ids : collection of int
    """
    starts = {relation_id: position.of(relation_id) for relation_id in relation_ids}
    empty = {relation_id: Stretch(at, at) for relation_id, at in starts.items()}
    after = Position(reading.after.lsn, {**reading.after.tables, **starts})
    return Reading(reading.rest, {**reading.tables, **empty}, after)


def alone(reading: Reading, position: Position, relation_id: int) -> Reading:
    """The same, but of one table alone: all others stay where they are.

    Parameters
    ----------
    reading, position
        As of `without`.
    relation_id : int
    """
    stretch = reading.of(relation_id)
    others = reading.tables.keys() - {relation_id}
    empty = {one: Stretch(position.of(one), position.of(one)) for one in others}
    after = Position(position.lsn, {**position.tables, relation_id: stretch.end})
    rest = Stretch(position.lsn, position.lsn)
    return Reading(rest, {**empty, relation_id: stretch}, after)


def clipped(reading: Reading, until: Position) -> Reading:
    """What of a reading comes before a position, at which an earlier reading ended.

    Parameters
    ----------
    reading : Reading
        What `next_reading` gave up to ``until.lsn``.
    until : Position
    """
    tables = {}
    for relation_id in reading.tables.keys() | until.tables.keys():
        stretch = reading.of(relation_id)
        end = max(stretch.start, min(stretch.end, until.of(relation_id)))
        inside = tuple(copy for copy in stretch.snapshots if copy.lsn - 1 < end)
        tables[relation_id] = stretch._replace(end=end, snapshots=inside)
    return Reading(reading.rest, tables, until)


def first_position(states: Mapping[int, TableState], begin: int) -> Position:
    """Where a new consumer begins: each table at its newest snapshot.

    A table that is gone is read as long as everything since its snapshot is there.

    Parameters
    ----------
    states : mapping of int to TableState
    begin : int
        Where the first segment begins.
    """
    tables = {}
    for relation_id, state in states.items():
        last = state.copies[-1]
        is_whole = bool(state.snapshots) and begin <= state.snapshots[-1].lsn
        if is_whole or (state.snapshots and last.state == "snapshot"):
            tables[relation_id] = state.snapshots[-1].lsn - 1
        elif last.state == "gone":
            tables[relation_id] = last.lsn
        elif state.held_from is not None:
            tables[relation_id] = state.held_from
    return Position(begin, tables)


def lacking(position: Position, states: Mapping[int, TableState], begin: int) -> list[int]:
    """Tables of which something that a consumer needs is gone, by relation id.

    Parameters
    ----------
    position : Position
    states : mapping of int to TableState
    begin : int
        Where the first segment begins that is still there.
    """
    found = []
    for relation_id in states.keys() | position.tables.keys():
        start = position.of(relation_id)
        state = states.get(relation_id)
        waits = [copy.lsn for copy in state.snapshots if copy.lsn - 1 >= start] if state else []
        # What comes before its next snapshot is voided by it; without one, nothing counts.
        if state is not None and (state.held_from is not None or state.begins is None):
            continue
        void = state.void(start) if state is not None else None
        if void is not None and void.start <= start and void.end is None:
            continue
        # Nothing comes of a table that is gone.
        last = state.copies[-1] if state is not None else None
        if last is not None and last.state == "gone" and start >= last.lsn:
            continue
        if begin > (waits[0] if waits else start):
            found.append(relation_id)
    return sorted(found)


class Step(NamedTuple):
    """Files that are read next: a segment's parts, or those of a copy of one table.

    Attributes
    ----------
    paths : tuple of pathlib.Path
        In their order, as one stream.
    copy : Copy or None
        The copy whose rows they are. All of them count.
    windows : mapping of int to (int, int)
        For relation ids: which changes count, from the first commit LSN to before the second one.
    others : (int, int)
        The same for all other tables.
    again : bool
        Whether an earlier step had the same segment: what belongs to no table was read then.
    """

    paths: tuple[Path, ...]
    copy: Copy | None
    windows: Mapping[int, _Window]
    others: _Window
    again: bool = False

    def window(self, relation_id: int) -> _Window:
        """Which changes of a table count, as of `windows`."""
        return self.windows.get(relation_id, self.others)


def steps(
    reading: Reading,
    segments: Sequence[Segment],
    files: Mapping[tuple[int, int], Sequence[Path]],
) -> Iterator[Step]:
    """How to read all of a reading, so that each table's changes come in their order.

    A segment in which a table was copied again comes twice: its other tables, and the changes
    before the copy; then the copy; then the changes behind it.

    Parameters
    ----------
    reading : Reading
    segments : sequence of Segment
        The segments that `Consumer.next` gives.
    files : mapping of (int, int) to sequence of pathlib.Path
        What `snapshot_files` gives.
    """
    waiting = sorted(
        (copy for stretch in reading.tables.values() for copy in stretch.snapshots),
        key=lambda copy: copy.lsn,
    )
    whole = {relation_id: stretch.window for relation_id, stretch in reading.tables.items()}

    def copies(before: int) -> Iterator[Step]:
        while waiting and waiting[0].lsn <= before:
            copy = waiting.pop(0)
            yield Step(tuple(files[copy.relation_id, copy.generation]), copy, {}, _EMPTY)

    for (start, end), grouped in itertools.groupby(
        segments, lambda one: (one.start_lsn, one.end_lsn)
    ):
        paths = tuple(one.path for one in grouped)
        yield from copies(start)
        inside = [copy for copy in waiting if copy.lsn < end]
        ends: dict[int, int] = {}
        for copy in inside:
            ends.setdefault(copy.relation_id, copy.lsn)
        windows = {
            # Where everything before a copy was read, the copy comes next.
            oid: _EMPTY
            if oid in ends and first >= ends[oid] - 1
            else (first, min(last, ends.get(oid, last)))
            for oid, (first, last) in whole.items()
        }
        yield Step(paths, None, windows, reading.rest.window)
        for index, copy in enumerate(inside):
            yield from copies(copy.lsn)
            later = [one.lsn for one in inside[index + 1 :] if one.relation_id == copy.relation_id]
            first, last = whole[copy.relation_id]
            window = max(first, copy.lsn), min(last, *later[:1], end)
            yield Step(paths, None, {copy.relation_id: window}, _EMPTY, again=True)
    yield from copies(max(reading.after.lsn, reading.end) + 1)
