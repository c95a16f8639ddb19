"""Compare the transactions that a slot would send again with those that a change log has.

Somebody may restore a server's disk to an earlier state. Its slots are then as they were at that
time, and the server writes another history from there on. Once its log is longer than the change
log, no LSN shows this. But the slot then stands before the end of the change log. This also happens
after a crash of the capture or the server, and then the transactions in between are the same. So
this module compares them.
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

from ..connections import new_slot_advice
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
# SQLSTATEs with which the server can't say what the slot would send again: the role may not ask; a
# publication was made after the slot's LSN, so that it does not exist there; the server has no disk
# space or memory for the answer; or somebody has cancelled the query.
_UNKNOWABLE = frozenset({"42501", "42704", "53100", "53200", "53400", "57014"})
# For each transaction: the xid; commit LSN and time, from its Begin or Commit Prepared; and whether
# it has a change or a logical message. Changes of a prepared one may have come with its PREPARE.
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
    """The identity of a transaction: two are the same if all three fields are equal."""

    lsn: int
    time: int
    xid: int


class _ComparedTransaction(NamedTuple):
    """A transaction of the change log, or one that the server would send."""

    commit: _ResentCommit
    is_captured: bool
    """Whether it comes from the change log."""
    has_changes: bool


class _Resending(NamedTuple):
    """A slot that stands before the end of the change log."""

    connection: ReplicationConnection
    slot: SlotState
    directory: Path


class _CapturedRange(NamedTuple):
    """A part of the change log that was captured with the same publications and options."""

    begin: int
    end: int
    metadata: SegmentMetadata
    segments: list[Segment]


def check_resent(
    connection: ReplicationConnection, slot: str, directory: Path, position: int
) -> None:
    """Refuse a slot that would send other transactions again than the change log has.

    Parameters
    ----------
    connection : ReplicationConnection
        A connection on which no stream has begun.
    slot : str
    directory : Path
        A change log of this slot.
    position : int
        The LSN at which the change log ends.

    Raises
    ------
    RetryableError
        The slot is in use.
    PgOutputError
        The server has committed a transaction before `position` that the change log lacks, or has
        not committed one that the change log has. Or the change log or the server can't be read.
    """
    state = connection.unused_slot(slot)
    confirmed = None if state is None else state.confirmed_flush_lsn
    if state is None or confirmed is None or confirmed >= position:
        return
    resending = _Resending(connection, state, directory)
    _log.info(
        "slot %s is at %s, before the end of the change log at %s: comparing the transactions "
        "that the server would send again",
        slot, format_lsn(confirmed), format_lsn(position),
    )  # fmt: skip
    while True:
        listing = contents(directory)
        begin = max(confirmed, listing.begin)  # earlier segments were deleted
        segments = [segment for segment in listing.segments if segment.end_lsn > begin]
        try:
            _compare(resending, _log_ranges(directory, segments, begin, position))
        except PgOutputError:
            if all(os.path.lexists(segment.path) for segment in segments):
                raise
        else:
            return
        # Some segments were merged or deleted meanwhile: list them again.


def _compare(resending: _Resending, log_ranges: Iterator[_CapturedRange]) -> None:
    """Compare ranges, the last one first, until one has a transaction that is the same.

    Raises
    ------
    PgOutputError
        See `check_resent`.
    """
    unknown = None
    for log_range in log_ranges:
        try:
            if _is_same(resending, log_range):
                break
        except PgOutputError as error:
            if getattr(error, "sqlstate", None) not in _UNKNOWABLE:
                raise
            unknown = error
    if unknown is not None:
        _log.warning(
            "can't check whether an earlier state of the server was restored: the server does not "
            "show what slot %s would send again: %s", resending.slot.name, unknown,
        )  # fmt: skip


def _log_ranges(
    directory: Path, segments: list[Segment], begin: int, position: int
) -> Iterator[_CapturedRange]:
    """Yield the ranges between two LSNs, the last one first."""
    last = max([begin, *(segment.end_lsn for segment in segments[-1:])])
    stored = stored_metadata(directory)
    if last < position and stored is not None:
        yield _CapturedRange(max(last, asked_since(directory)), position, stored, [])
    end, before = last, None
    range_segments: list[Segment] = []
    for segment in reversed(segments):
        with SegmentReader(segment.path) as reader:
            metadata = reader.metadata
        if before is not None and metadata.asked != before.asked:
            yield _CapturedRange(segment.end_lsn, end, before, range_segments)
            end, range_segments = segment.end_lsn, []
        range_segments, before = [segment, *range_segments], metadata
    if before is not None:
        yield _CapturedRange(begin, end, before, range_segments)


def _is_same(resending: _Resending, log_range: _CapturedRange) -> bool:
    """Return whether a range has a common transaction after which neither side has others.

    The two histories are then the same up to that transaction, even if publications that changed
    meanwhile make earlier ones look different. False if the range has no transaction with
    changes.

    Raises
    ------
    PgOutputError
        After the last common transaction, one side has a transaction that the other lacks.
    """
    same, other = False, None
    with _resent(resending, log_range) as resent:
        both = heapq.merge(
            _captured(log_range), resent, key=lambda transaction: transaction.commit.lsn
        )
        for _, group in itertools.groupby(both, key=lambda transaction: transaction.commit.lsn):
            first, *more = group
            if more and more[0].commit == first.commit:
                same, other = True, None
            elif other is None and (more or first.has_changes):
                other = first
    if other is None:
        return same
    at = f"transaction {other.commit.xid} at {format_lsn(other.commit.lsn)}"
    difference = (
        f"{resending.directory} has {at}, which the server did not commit"
        if other.is_captured
        else f"the server has committed {at}, which {resending.directory} lacks"
    )
    raise PgOutputError(
        f"{difference}: an earlier state of the server was restored, together with slot "
        f"{resending.slot.name!r}. The change log up to {format_lsn(log_range.end)} does not fit "
        f"the server any more",
        code="another_history",
        hint=new_slot_advice(resending.slot.name),
        path=str(resending.directory),
    )


def _captured(log_range: _CapturedRange) -> Iterator[_ComparedTransaction]:
    """Yield the transactions of a range of the change log, each one once."""
    for commit, parts in itertools.groupby(
        _captured_parts(log_range), key=lambda part: part.commit
    ):
        yield _ComparedTransaction(commit, True, any(part.has_changes for part in parts))


def _captured_parts(log_range: _CapturedRange) -> Iterator[_ComparedTransaction]:
    """Yield the same; a transaction in several record batches comes once for each batch."""
    import numpy as np

    for segment in log_range.segments:
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
                    if lsn >= log_range.begin:
                        yield _ComparedTransaction(_ResentCommit(lsn, time, xid), True, has_changes)


@contextlib.contextmanager
def _resent(
    resending: _Resending, log_range: _CapturedRange
) -> Iterator[Iterator[_ComparedTransaction]]:
    """Ask the server which transactions of a range it would send again; yields an iterator."""
    connection, slot = resending.connection, resending.slot
    # The SQL function streams no transaction in parts. A slot marked two_phase sends the changes of
    # a prepared transaction at its PREPARE, and a Commit Prepared at its end, whichever option the
    # captured session had.
    two_phase = slot.two_phase and connection.server_version >= 150000
    options = {**log_range.metadata.options, "proto_version": "3" if two_phase else "1"}
    options.pop("streaming", None)
    options.pop("two_phase", None)
    if two_phase:
        options["two_phase"] = "on"
    command = _QUERY.format(
        begin=ord("B"), committed=ord("K"), tags=_TAGS, slot=slot.name,
        end=format_lsn(log_range.end), options=[*itertools.chain.from_iterable(options.items())],
    )  # fmt: skip
    # The server decodes that part of its log, which may take long.
    for setting, since in (("statement_timeout", 0), ("transaction_timeout", 170000)):
        if connection.server_version >= since:
            connection.query(f"SET {setting} = 0")
    connection.query("BEGIN")
    try:
        connection.query(command, waits=True)
        yield _fetched(connection, log_range)
    finally:
        with contextlib.suppress(PgOutputError):  # the connection may be lost
            connection.query("ROLLBACK")


def _fetched(
    connection: ReplicationConnection, log_range: _CapturedRange
) -> Iterator[_ComparedTransaction]:
    while rows := connection.query(f"FETCH {_FETCHED} FROM resent", waits=True):
        for xid, commit, has_changes in rows:
            lsn, time = struct.unpack(">Qq", bytes.fromhex(str(commit)))
            if log_range.begin <= lsn < log_range.end:
                yield _ComparedTransaction(
                    _ResentCommit(lsn, time, int(str(xid))), False, has_changes is True
                )
