"""Ask again and again, beside a stream, which tables are published.

A stream announces a table before its first change. It never says that a table has left the
publications, so only the catalogue shows this.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, NamedTuple, cast

import psycopg
from psycopg import sql

from ..connections import answered, doctor_command, server_error
from ..errors import PgOutputError, RetryableError, counted, printable
from ..lsn import parse_lsn
from ..publications import Publications, empty_publications, read_unidentified
from . import published

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..connections import ConnectionParameters
    from ..publications import CatalogRelation
    from .published import Member

_log = logging.getLogger(__name__)

_SHOWN = 10  # the most tables that a warning names

_LSN = """
SELECT CASE WHEN pg_catalog.pg_is_in_recovery() THEN pg_catalog.pg_last_wal_replay_lsn()
    ELSE pg_catalog.pg_current_wal_insert_lsn() END::text
"""


class Members(NamedTuple):
    """The tables that are published at some moment.

    Attributes
    ----------
    tables : dict of int to Member
        By relation id.
    lsn : int
        The end of the server's log, read after `tables`. Transactions that commit at this LSN or
        later committed after that moment.
    existing : frozenset of int or None
        OIDs of all tables of the database, published or not; None if they are not known.
    """

    tables: dict[int, Member]
    lsn: int
    existing: frozenset[int] | None = None

    @property
    def partitions(self) -> set[int]:
        """Relation ids of the partitions whose rows come as rows of their root."""
        return {oid for member in self.tables.values() for oid in member.partitions}


def read_members(parameters: ConnectionParameters, publications: Sequence[str]) -> Members:
    """Ask the server which tables are published.

    Raises
    ------
    PgOutputError
        A publication does not exist, or the server can't be reached or refuses.
    """
    with parameters.open(replication=False) as connection:
        try:
            with answered(connection.pgconn):
                connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
                members, existing = published.read_members(connection, publications)
                ((lsn,),) = cast("list[tuple[str]]", connection.execute(_LSN).fetchall())
                # Commit inside this block, so that an error becomes a PgOutputError.
                connection.execute("COMMIT")
        except psycopg.Error as error:
            doing = "can't ask which tables are published"
            raise server_error(doing, str(error), error.sqlstate) from error
    return Members({member.relation_id: member for member in members}, parse_lsn(lsn), existing)


def warn_of_publications(parameters: ConnectionParameters, names: Sequence[str]) -> int:
    """Warn of publications without tables, and of published tables without a replica identity.

    The stream shows neither: the server sends nothing, or refuses updates and deletes.

    Returns
    -------
    int
        The number of these publications and tables.

    Raises
    ------
    RetryableError
        The server can't be reached now.
    """
    try:
        with parameters.open(replication=False) as connection:
            try:
                with answered(connection.pgconn):
                    publications = Publications(connection, names)
                    unidentified = read_unidentified(connection, publications)
            except psycopg.Error as error:
                doing = "can't read the publications"
                raise server_error(doing, str(error), error.sqlstate) from error
    except RetryableError:
        raise
    except PgOutputError as error:
        _log.debug("%s", error)  # the stream reports what it needs itself
        return 0
    doctor = printable(doctor_command(names))
    if empty := empty_publications(publications):
        _log.warning(
            "%s without tables: %s. No changes come until you add tables. For the SQL, run: %s",
            counted(len(empty), "publication"), ", ".join(map(printable, empty)), doctor,
            extra={"event": "no_tables"},
        )  # fmt: skip
    if unidentified:
        _warn_of_identities(unidentified, doctor)
    return len(empty) + len(unidentified)


def _warn_of_identities(unidentified: Sequence[tuple[CatalogRelation, str]], doctor: str) -> None:
    statements = []
    for table, identity in unidentified[:_SHOWN]:
        name = sql.Identifier(table.namespace, table.name).as_string(None)
        statements.append(printable(f"ALTER TABLE ONLY {name} REPLICA IDENTITY {identity};"))
    more = len(unidentified) - _SHOWN
    _log.warning(
        "%s in the publications without a replica identity: the server refuses their updates and "
        "deletes. Give each a primary key, or run: %s %s, run: %s",
        counted(len(unidentified), "table"), " ".join(statements),
        f"For {more:,} more" if more > 0 else "To check the server", doctor,
        extra={"event": "identity"},
    )  # fmt: skip


class Watch:
    """Asks again and again which tables are published, in a thread of its own.

    Parameters
    ----------
    read : callable
        Asks once, and returns the answer.
    interval : float
        Seconds between two calls of `read`.
    """

    def __init__(self, read: Callable[[], Members], interval: float) -> None:
        self._read = read
        self._interval = interval
        self._latest: Members | None = None
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pgoutput_fast-watch", daemon=True)
        self._thread.start()

    def take(self) -> Members | None:
        """Return the newest answer; None if none came since the last call."""
        members, self._latest = self._latest, None
        return members

    def close(self) -> None:
        """Tell the thread to end, and do not wait for a running `read`."""
        self._ends.set()

    def _run(self) -> None:
        failed = ""
        while not self._ends.is_set():
            try:
                self._latest = self._read()
                failed = ""
            except PgOutputError as error:
                # The stream has its own connection, and reports a lost server itself.
                if str(error) != failed:
                    _log.warning("can't check whether tables joined the publications: %s", error)
                failed = str(error)
            self._ends.wait(self._interval)
