"""What a consumer reads next: which stretch of each table, in which order, and where it then is.

Rules without a disk. A consumer has a position, up to where it has read everything, but for tables
that are elsewhere: a table that waits for a snapshot is held back where it began to wait.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .copies import Copy, TableState


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

    def has(self, commit_lsn: int) -> bool:
        """Whether a change is in it."""
        return (
            self.begins is not None
            and self.start <= commit_lsn < self.end
            and commit_lsn >= self.begins
        )


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
            inside = tuple(copy for copy in state.snapshots if start <= copy.lsn - 1 < stop)
            tables[relation_id] = Stretch(start, stop, state.begins, inside)
        if stop != end:
            elsewhere[relation_id] = stop
    return Reading(Stretch(position.lsn, end), tables, Position(end, elsewhere))


def first_position(states: Mapping[int, TableState], begin: int) -> Position:
    """Where a new consumer begins: each table at its newest snapshot.

    Parameters
    ----------
    states : mapping of int to TableState
    begin : int
        Where the first segment begins.
    """
    tables = {}
    for relation_id, state in states.items():
        if state.snapshots:
            tables[relation_id] = state.snapshots[-1].lsn - 1
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
        # What comes before its next snapshot is voided by it.
        if state is not None and state.held_from is not None:
            continue
        if begin > (waits[0] if waits else start):
            found.append(relation_id)
    return sorted(found)
