"""Which tables publications have now, and since when: asked beside a stream, again and again.

A stream tells of a table when it has changes of it, and never that a table has left.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import psycopg

from ..connections import answered, check_publications, server_error
from ..errors import PgOutputError
from ..lsn import parse_lsn

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..connections import ConnectionParameters

_log = logging.getLogger(__name__)

# The rows of pg_publication_rel and pg_publication_namespace, by which a table, or a partitioned
# table that it belongs to, is in a publication, or the publication of all tables. If a table leaves
# and returns, or its columns or its row filter change, there is a new row with another OID.
_MEMBERS = """
SELECT c.oid::bigint, n.nspname::text, c.relname::text, ARRAY(
    SELECT DISTINCT m.oid::bigint FROM (
        SELECT r.oid FROM pg_catalog.pg_publication_rel AS r
        JOIN pg_catalog.pg_publication AS p ON p.oid = r.prpubid
        WHERE p.pubname = ANY(%(names)s) AND r.prrelid IN (
            SELECT c.oid UNION ALL SELECT relid::oid FROM {ancestors})
        {schemas}
        UNION ALL
        SELECT p.oid FROM pg_catalog.pg_publication AS p
        WHERE p.pubname = ANY(%(names)s) AND p.puballtables
    ) AS m ORDER BY 1)
FROM (SELECT DISTINCT schemaname, tablename FROM pg_catalog.pg_publication_tables
      WHERE pubname = ANY(%(names)s)) AS t
JOIN pg_catalog.pg_namespace AS n ON n.nspname = t.schemaname
JOIN pg_catalog.pg_class AS c ON c.relnamespace = n.oid AND c.relname = t.tablename
ORDER BY 2, 3
"""
_LSN = """
SELECT CASE WHEN pg_catalog.pg_is_in_recovery() THEN pg_catalog.pg_last_wal_replay_lsn()
    ELSE pg_catalog.pg_current_wal_insert_lsn() END::text
"""
_ANCESTORS = "pg_catalog.pg_partition_ancestors(c.oid) AS relid"
_SCHEMAS = """
        UNION ALL
        SELECT s.oid FROM pg_catalog.pg_publication_namespace AS s
        JOIN pg_catalog.pg_publication AS p ON p.oid = s.pnpubid
        WHERE p.pubname = ANY(%(names)s) AND s.pnnspid IN (
            SELECT a.relnamespace FROM pg_catalog.pg_class AS a
            WHERE a.oid = c.oid OR a.oid IN (SELECT relid::oid FROM {ancestors}))
"""


class Member(NamedTuple):
    """A table that is published.

    Attributes
    ----------
    relation_id : int
    namespace, name : str
    rows : tuple of int
        OIDs of the rows of the system's catalogue that put it into the publications. They are
        others once it has left and returned, or its row filter or columns were changed.
    """

    relation_id: int
    namespace: str
    name: str
    rows: tuple[int, ...]


class Members(NamedTuple):
    """The tables that are published at some moment.

    Attributes
    ----------
    tables : dict of int to Member
        By relation id.
    lsn : int
        The end of the server's log after that moment: what was committed behind it was committed
        later.
    """

    tables: dict[int, Member]
    lsn: int


def read_members(parameters: ConnectionParameters, publications: Sequence[str]) -> Members:
    """Ask which tables are published.

    Raises
    ------
    PgOutputError
        A publication is not there, or the server can't be reached or refuses.
    """
    with parameters.open(replication=False) as connection:
        check_publications(connection, publications)
        version = connection.info.server_version
        ancestors = _ANCESTORS if version >= 120000 else "(SELECT c.oid AS relid) AS a"
        schemas = _SCHEMAS.format(ancestors=ancestors) if version >= 150000 else ""
        query = _MEMBERS.format(ancestors=ancestors, schemas=schemas)
        try:
            with answered(connection.pgconn):
                rows: list[Any] = connection.execute(
                    query.encode(), {"names": list(publications)}
                ).fetchall()
                ((lsn,),) = cast("list[tuple[str]]", connection.execute(_LSN).fetchall())
        except psycopg.Error as error:
            doing = "can't ask which tables are published"
            raise server_error(doing, str(error), error.sqlstate) from error
    members = (Member(oid, schema, name, tuple(found)) for oid, schema, name, found in rows)
    return Members({one.relation_id: one for one in members}, parse_lsn(lsn))


class Watch:
    """Asks from time to time which tables are published, in a thread of its own.

    Parameters
    ----------
    read : callable
        Asks once.
    interval : float
        Seconds between two questions.
    """

    def __init__(self, read: Callable[[], Members], interval: float) -> None:
        self._read = read
        self._interval = interval
        self._latest: Members | None = None
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pgoutput_fast-watch", daemon=True)
        self._thread.start()

    def take(self) -> Members | None:
        """The newest answer; None if there was none since the last call."""
        found, self._latest = self._latest, None
        return found

    def close(self) -> None:
        """End the thread; a question that is on its way is not waited for."""
        self._ends.set()

    def _run(self) -> None:
        failed = ""
        while not self._ends.is_set():
            try:
                self._latest = self._read()
                failed = ""
            except PgOutputError as error:
                # The stream has its own connection, and tells if the server is away.
                if str(error) != failed:
                    _log.warning("can't see whether tables have joined: %s", error)
                failed = str(error)
            self._ends.wait(self._interval)
