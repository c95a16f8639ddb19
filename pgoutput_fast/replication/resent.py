"""Compare what a slot would send again with what a directory has of it already.

A server whose disk was put back to an earlier state has its slots as they were then, and writes
another history from there on. Once its log is longer than the directory's end, no LSN tells that.
But its slot then stands before that end, as it does after a crash of the capture or of the server,
and the transactions that were committed in between have to be those that the directory has.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import os
import struct
from typing import TYPE_CHECKING, NamedTuple

from psycopg import sql

from ..errors import PgOutputError
from ..lsn import format_lsn
from ..segments import SegmentReader
from ..segments.listing import asked_since, contents, stored_metadata

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ..segments import Segment, SegmentMetadata
    from .walsender import ReplicationConnection, SlotState

_FETCHED = 10_000  # transactions that are in memory at once
# With these codes (SQLSTATE) it can't be told what comes again: the role may not ask; a publication
# was made after the place where the slot stands, so that the server has none there; it has no room
# or memory for the answer; or somebody has cancelled it.
_UNKNOWABLE = frozenset({"42501", "42704", "53100", "53200", "53400", "57014"})
# Of each transaction: its xid, commit LSN and time, as its Begin or its Commit Prepared has them,
# and whether a change or a message comes with it. If it was prepared, they may have come before.
_QUERY = sql.SQL("""
DECLARE resent CURSOR FOR
SELECT xid::text, found[1], has_changes FROM (
    SELECT xid, pg_catalog.bool_or(tag NOT IN ({begin}, {committed})) AS has_changes,
        pg_catalog.array_agg(
            pg_catalog.encode(
                CASE tag WHEN {begin} THEN pg_catalog.substr(data, 2, 16)
                ELSE pg_catalog.substr(data, 3, 8) || pg_catalog.substr(data, 19, 8) END,
                'hex'
            )
        ) FILTER (WHERE tag IN ({begin}, {committed})) AS found
    FROM pg_catalog.pg_logical_slot_peek_binary_changes(
        {slot}, {end}, NULL, VARIADIC {options}::text[]
    ), LATERAL pg_catalog.get_byte(data, 0) AS tag
    WHERE tag = ANY ({tags}::integer[])
    GROUP BY xid
) AS resent
WHERE found IS NOT NULL
ORDER BY found[1] COLLATE "C"
""")
_TAGS = "{" + ",".join(str(tag) for tag in b"BKIUDTM") + "}"

_log = logging.getLogger(__name__)


class _ResentCommit(NamedTuple):
    """A transaction: equal in all three, it is the same one."""

    lsn: int
    time: int
    xid: int


class _FoundTransaction(NamedTuple):
    """A transaction, in the directory or on the server."""

    commit: _ResentCommit
    is_held: bool
    """Whether it is in the directory."""
    has_changes: bool


class _Resending(NamedTuple):
    """A slot that stands before a directory's end."""

    connection: ReplicationConnection
    slot: SlotState
    directory: Path


class _CapturedStretch(NamedTuple):
    """A part of a directory that came with the same publications and options."""

    begin: int
    end: int
    metadata: SegmentMetadata
    segments: list[Segment]


def check_resent(
    connection: ReplicationConnection, slot: str, directory: Path, position: int
) -> None:
    """Refuse a slot that would send again something else than what a directory has.

    Parameters
    ----------
    connection : ReplicationConnection
        One on which no stream has begun.
    slot : str
    directory : Path
        A directory of segments of this slot.
    position : int
        Everything before this LSN is in it.

    Raises
    ------
    RetryableError
        The slot is in use.
    PgOutputError
        A transaction before `position` is not in the directory, or one that is there was not
        committed by this server; or the directory or the server can't be read.
    """
    state = connection.unused_slot(slot)
    confirmed = None if state is None else state.confirmed_flush_lsn
    if state is None or confirmed is None or confirmed >= position:
        return
    resending = _Resending(connection, state, directory)
    _log.info(
        "slot %s stands at %s, before the directory's end %s: comparing what it would send again",
        slot, format_lsn(confirmed), format_lsn(position),
    )  # fmt: skip
    while True:
        found = contents(directory)
        begin = max(confirmed, found.begin)  # what comes before that was deleted
        segments = [one for one in found.segments if one.end_lsn > begin]
        try:
            _compare(resending, _stretches(directory, segments, begin, position))
        except PgOutputError:
            if all(os.path.lexists(one.path) for one in segments):
                raise
        else:
            return
        # Some were merged since, or deleted: list them again.


def _compare(resending: _Resending, stretches: Iterator[_CapturedStretch]) -> None:
    """Compare stretches from the last one on, until there is a transaction that is the same.

    Raises
    ------
    PgOutputError
        As of `check_resent`.
    """
    unknown = None
    for stretch in stretches:
        try:
            if _is_same(resending, stretch):
                break
        except PgOutputError as error:
            if getattr(error, "sqlstate", None) not in _UNKNOWABLE:
                raise
            unknown = error
    if unknown is not None:
        _log.warning(
            "it is not known whether an earlier state of the server was restored, as it does not "
            "tell what slot %s would send again: %s", resending.slot.name, unknown,
        )  # fmt: skip


def _stretches(
    directory: Path, segments: list[Segment], begin: int, position: int
) -> Iterator[_CapturedStretch]:
    """What is between two LSNs, from the end on."""
    last = max([begin, *(segment.end_lsn for segment in segments[-1:])])
    stored = stored_metadata(directory)
    if last < position and stored is not None:
        yield _CapturedStretch(max(last, asked_since(directory)), position, stored, [])
    end, before = last, None
    found: list[Segment] = []
    for segment in reversed(segments):
        with SegmentReader(segment.path) as reader:
            metadata = reader.metadata
        if before is not None and metadata.asked != before.asked:
            yield _CapturedStretch(segment.end_lsn, end, before, found)
            end, found = segment.end_lsn, []
        found, before = [segment, *found], metadata
    if before is not None:
        yield _CapturedStretch(begin, end, before, found)


def _is_same(resending: _Resending, stretch: _CapturedStretch) -> bool:
    """Whether the last transaction of a stretch is the same here and there; False: it has none.

    If it is, what comes before it was the same too, whatever a publication made of it meanwhile.

    Raises
    ------
    PgOutputError
        There are others behind the last one that is the same.
    """
    same, other = False, None
    with _resent(resending, stretch) as resent:
        both = heapq.merge(_held(stretch), resent, key=lambda found: found.commit.lsn)
        for _, found in itertools.groupby(both, key=lambda found: found.commit.lsn):
            one, *more = found
            if more and more[0].commit == one.commit:
                same, other = True, None
            elif other is None and (more or one.has_changes):
                other = one
    if other is None:
        return same
    at = f"transaction {other.commit.xid} at {format_lsn(other.commit.lsn)}"
    told = (
        f"{resending.directory} has {at}, which the server did not commit"
        if other.is_held
        else f"the server has committed {at}, which {resending.directory} lacks"
    )
    raise PgOutputError(
        f"{told}: an earlier state of the server was restored, together with slot "
        f"{resending.slot.name!r}, so that what the directory has up to {format_lsn(stretch.end)} "
        f"is not what happened there",
        code="another_history",
        hint="Make a new slot and a new directory, and copy the tables anew",
        path=str(resending.directory),
    )


def _held(stretch: _CapturedStretch) -> Iterator[_FoundTransaction]:
    """The transactions that a directory has."""
    for commit, parts in itertools.groupby(_held_parts(stretch), key=lambda part: part.commit):
        yield _FoundTransaction(commit, True, any(part.has_changes for part in parts))


def _held_parts(stretch: _CapturedStretch) -> Iterator[_FoundTransaction]:
    """The same, with one that is in several record batches as often."""
    import numpy as np

    for segment in stretch.segments:
        with SegmentReader(segment.path) as reader:
            for batch in reader:
                inside = batch.filter(batch.column("commit_lsn").is_valid())
                lsns, times, xids = (
                    inside.column(name).to_numpy() for name in ("commit_lsn", "commit_time", "xid")
                )
                first = np.flatnonzero(lsns[1:] != lsns[:-1]) + 1
                first = np.concatenate([np.zeros(min(1, len(lsns)), np.int64), first])
                numbered = inside.column("seq").is_valid().to_numpy(zero_copy_only=False)
                changes = np.logical_or.reduceat(numbered, first) if len(first) else first
                for lsn, time, xid, has_changes in zip(
                    lsns[first].tolist(), times[first].tolist(), xids[first].tolist(),
                    changes.tolist(), strict=True,
                ):  # fmt: skip
                    if lsn >= stretch.begin:
                        yield _FoundTransaction(_ResentCommit(lsn, time, xid), True, has_changes)


@contextlib.contextmanager
def _resent(
    resending: _Resending, stretch: _CapturedStretch
) -> Iterator[Iterator[_FoundTransaction]]:
    """The transactions that the server would send again."""
    connection, slot = resending.connection, resending.slot
    # The function gives no transaction in parts. From a slot that is marked so, the changes of a
    # prepared one come at its PREPARE, and a Commit Prepared at its end, whatever the session said.
    two_phase = slot.two_phase and connection.server_version >= 150000
    options = {**stretch.metadata.options, "proto_version": "3" if two_phase else "1"}
    options.pop("streaming", None)
    options.pop("two_phase", None)
    if two_phase:
        options["two_phase"] = "on"
    command = _QUERY.format(
        begin=ord("B"), committed=ord("K"), tags=_TAGS, slot=slot.name,
        end=format_lsn(stretch.end), options=[*itertools.chain.from_iterable(options.items())],
    )  # fmt: skip
    # It takes as long as the server needs to decode that part of its log.
    for setting, since in (("statement_timeout", 0), ("transaction_timeout", 170000)):
        if connection.server_version >= since:
            connection.query(f"SET {setting} = 0")
    connection.query("BEGIN")
    try:
        connection.query(command, waits=True)
        yield _fetched(connection, stretch)
    finally:
        with contextlib.suppress(PgOutputError):  # the connection is lost
            connection.query("ROLLBACK")


def _fetched(
    connection: ReplicationConnection, stretch: _CapturedStretch
) -> Iterator[_FoundTransaction]:
    while rows := connection.query(f"FETCH {_FETCHED} FROM resent", waits=True):
        for xid, found, has_changes in rows:
            lsn, time = struct.unpack(">Qq", bytes.fromhex(str(found)))
            if stretch.begin <= lsn < stretch.end:
                yield _FoundTransaction(
                    _ResentCommit(lsn, time, int(str(xid))), False, has_changes is True
                )
