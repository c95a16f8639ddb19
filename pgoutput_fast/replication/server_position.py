"""Ask where the server's log ends, and up to which LSN all present commits are."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

import psycopg

from ..connections import ConnectionParameters, answered, server_error
from ..errors import PgOutputError, RetryableError
from ..lsn import format_lsn, parse_lsn

if TYPE_CHECKING:
    _Connection = psycopg.Connection[tuple[object, ...]]

FRESH = 6.0  # seconds for which an answer counts as the present state
_FLUSH_POLL = 0.02  # seconds between two checks whether commits are on the server's disk

_POSITION = """
SELECT (CASE WHEN pg_catalog.pg_is_in_recovery() THEN pg_catalog.pg_last_wal_replay_lsn()
        ELSE pg_catalog.pg_current_wal_flush_lsn() END)::pg_catalog.text,
    pg_catalog.current_database()::pg_catalog.text,
    pg_catalog.date_part('epoch', pg_catalog.clock_timestamp())
"""
_ENDS = """
SELECT (CASE WHEN in_recovery THEN pg_catalog.pg_last_wal_replay_lsn()
        ELSE pg_catalog.pg_current_wal_insert_lsn() END)::pg_catalog.text,
    (CASE WHEN in_recovery THEN pg_catalog.pg_last_wal_replay_lsn()
        ELSE pg_catalog.pg_current_wal_flush_lsn() END)::pg_catalog.text,
    (SELECT setting FROM pg_catalog.pg_settings WHERE name = 'wal_writer_delay')
FROM pg_catalog.pg_is_in_recovery() in_recovery
"""


class ServerPosition(NamedTuple):
    """Where the server's log ended at some moment."""

    lsn: int
    database: str
    server_time: float
    """The server's clock then, in seconds since 1970."""
    asked: float
    """When the server was asked, on the clock of `time.monotonic`."""

    @property
    def is_fresh(self) -> bool:
        """Whether the answer is younger than `FRESH`."""
        return time.monotonic() - self.asked < FRESH

    @property
    def now(self) -> float:
        """The server's clock now, in seconds since 1970."""
        return self.server_time + time.monotonic() - self.asked


def _ask(connection: _Connection, query: str) -> tuple[object, ...]:
    try:
        with answered(connection.pgconn):
            (row,) = connection.execute(query.encode()).fetchall()
    except psycopg.Error as error:
        doing = "can't ask where the server's log ends"
        raise server_error(doing, str(error), error.sqlstate) from error
    return row


def _lsn(lsn: object) -> int:
    if lsn is None:
        raise RetryableError(
            "the server is in recovery, and has replayed nothing of its log yet", code="standby"
        )
    return parse_lsn(str(lsn))


def ask_position(connection: _Connection) -> ServerPosition:
    """Ask where the server's log ends now; on a standby, how far it has replayed.

    Raises
    ------
    PgOutputError
        The server refuses.
    """
    asked = time.monotonic()
    lsn, database, server_time = _ask(connection, _POSITION)
    return ServerPosition(_lsn(lsn), str(database), float(str(server_time)), asked)


def check_target(lsn: int, end: int, *, in_recovery: bool) -> None:
    """Refuse a target that has changes from beyond the end of the server's log.

    Parameters
    ----------
    lsn : int
        The target has everything that was committed before this LSN.
    end : int
        The LSN at which the server's log ends.
    in_recovery : bool
        Whether the server is a standby, which may still reach `lsn`.

    Raises
    ------
    RetryableError
        The server is a standby that has not replayed so far.
    PgOutputError
        The log of a primary ends before `lsn`.
    """
    if lsn <= end:
        return
    text = f"the target has changes up to {format_lsn(lsn)}, and the server's log ends at "
    if in_recovery:
        raise RetryableError(
            f"{text}{format_lsn(end)}: the standby has not replayed that far yet", code="standby"
        )
    raise PgOutputError(
        f"{text}{format_lsn(end)}: an earlier state of the server was restored, or a standby that "
        "lagged was promoted. The later changes in the target did not happen on this server",
        code="another_history",
        hint="Begin with a new slot, an empty directory for the change log, and a new target",
    )


def end_of_commits(parameters: ConnectionParameters) -> int:
    """Return an LSN that is greater than all present commits, and that the server sends up to.

    The server sends only log that is on its disk. A commit with ``synchronous_commit=off`` gets
    there up to three times ``wal_writer_delay`` later, so this function waits that long. It does
    not wait longer: the rest of the log belongs to open transactions, and the server need not write
    that rest to disk.

    Raises
    ------
    PgOutputError
        The server can't be reached, or refuses.
    """
    with parameters.open(replication=False) as connection:
        inserted, flushed, delay = _ask(connection, _ENDS)
        wanted, end = _lsn(inserted), _lsn(flushed)
        deadline = time.monotonic() + 3 * int(str(delay)) / 1000
        while end < wanted and time.monotonic() < deadline:
            time.sleep(_FLUSH_POLL)
            end = _lsn(_ask(connection, _ENDS)[1])
        return min(end, wanted)
