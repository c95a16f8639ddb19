"""Read the catalogue again and again, beside a stream, and write the schema history from it."""

from __future__ import annotations

import logging
import threading
import time
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import psycopg

from ..catalog import catalog_of
from ..changelog.schema_history import CatalogRead, HistoryWriter
from ..connections import answered, server_error
from ..errors import Argument, PgOutputError, ReplicationError, RetryableError
from ..lsn import parse_lsn
from ..types import TypeRegistry

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from pathlib import Path

    from ..connections import ConnectionParameters
    from ..transactions.runs import Run

_INTERVAL = 60.0  # seconds between two reads that nothing asked for
_ASKED_INTERVAL = 1.0  # seconds between two reads that the stream asks for
# A read confirms the schema history up to its LSN. While segments reach further, read again after
# this many seconds.
_CONFIRM_INTERVAL = 10.0
_READ_TIMEOUT = 5.0  # seconds to wait for a read
_TRIES, _TRY_WAIT = 3, 0.05
# Functions of the server look types up as they are now, not as in the snapshot. If a type or table
# was dropped since, they fail with this code: "cache lookup failed", "could not open relation".
_DROPPED = "XX000"
_OLDEST_SERVER = 140000

_log = logging.getLogger(__name__)

# The first LSN is a lower bound of what the transaction sees, the second an upper bound. A standby
# may replay log that it has only just received, so its upper bound is the received LSN.
_LSNS = """
SELECT CASE WHEN pg_catalog.pg_is_in_recovery() THEN pg_catalog.pg_last_wal_replay_lsn()
    ELSE pg_catalog.pg_current_wal_insert_lsn() END::text,
    CASE WHEN pg_catalog.pg_is_in_recovery()
    THEN greatest(pg_catalog.pg_last_wal_receive_lsn(), pg_catalog.pg_last_wal_replay_lsn())
    ELSE pg_catalog.pg_current_wal_insert_lsn() END::text
"""
# Transactions that have not ended. The functions have these names in all versions from 10 on.
_RUNNING = """
SELECT ARRAY(SELECT pg_catalog.txid_snapshot_xip(pg_catalog.txid_current_snapshot()))
"""
_TRIGGERS = """
SELECT count(*) = 2 FROM pg_catalog.pg_event_trigger
WHERE evtname IN ('pgoutput_fast_ddl', 'pgoutput_fast_drop') AND evtenabled = 'A'
"""


def ddl_trigger_sql() -> str:
    """Return SQL that makes a database announce each change of its catalogue in the stream.

    Run the SQL as a superuser; you may run it again. It makes two event triggers, which write a
    logical message in each transaction that changes the catalogue. A capture with ``messages=True``
    learns from these messages exactly when a type or table changed: see
    docs/reference/altered-types.md.
    """
    return files("pgoutput_fast.replication").joinpath("ddl_trigger.sql").read_text("utf-8")


def read_state(
    parameters: ConnectionParameters,
    publications: Sequence[str],
    type_ids: Collection[int] = (),
    *,
    messages: bool = False,
) -> CatalogRead:
    """Read the types and tables of a database, and the LSNs before and after the read.

    Parameters
    ----------
    parameters : ConnectionParameters
    publications : list or tuple of str
    type_ids : collection of int
        Types to read in addition to the types of published columns.
    messages : bool
        Whether the stream has logical messages.

    Raises
    ------
    PgOutputError
        A publication does not exist. The server is older than PostgreSQL 14, can't be reached, or
        refuses.
    """
    with parameters.open(replication=False) as connection:
        if connection.info.server_version < _OLDEST_SERVER:
            raise PgOutputError(
                "the schema history needs PostgreSQL 14 or newer",
                code="not_supported",
                hint=("Capture with ", Argument("schema_history", False)),
            )
        try:
            with answered(connection.pgconn):
                for _ in range(_TRIES - 1):
                    try:
                        return _read(connection, publications, type_ids, messages)
                    except (psycopg.Error, ReplicationError) as error:
                        if error.sqlstate != _DROPPED:
                            raise
                        _log.debug("the catalogue is read once more: %s", error)
                        connection.execute("ROLLBACK")
                return _read(connection, publications, type_ids, messages)
        except psycopg.Error as error:
            doing = "can't read the types and tables"
            raise server_error(doing, str(error), error.sqlstate) from error


def _read(
    connection: Any, publications: Sequence[str], type_ids: Collection[int], messages: bool
) -> CatalogRead:
    # Before BEGIN, so that this LSN is not later than the snapshot of the transaction.
    before = parse_lsn(connection.execute(_LSNS).fetchone()[0])
    running_before = frozenset(connection.execute(_RUNNING).fetchone()[0])
    for _ in range(_TRIES):
        if running_before.isdisjoint(connection.execute(_RUNNING).fetchone()[0]):
            break
        time.sleep(_TRY_WAIT)
    connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
    running = frozenset(connection.execute(_RUNNING).fetchone()[0])
    trigger = messages and connection.execute(_TRIGGERS).fetchone()[0]
    tables = catalog_of(connection, publications)
    types = TypeRegistry.from_connection(connection)
    # Last: some functions of the server look things up as they are now, not in the snapshot.
    after = parse_lsn(connection.execute(_LSNS).fetchone()[1])
    connection.execute("COMMIT")
    used = [column.type_id for table in tables.tables for column in table.columns]
    types = types.within([*used, *type_ids])
    return CatalogRead(
        before, after, running, running & running_before, trigger, types, tables.to_json()
    )  # fmt: skip


def read_types(parameters: ConnectionParameters) -> TypeRegistry:
    """Read the types of a database; none from a server before PostgreSQL 14.

    Raises
    ------
    PgOutputError
        The server can't be reached or refuses.
    """
    with parameters.open(replication=False) as connection:
        if connection.info.server_version < _OLDEST_SERVER:
            return TypeRegistry()
        try:
            with answered(connection.pgconn):
                return TypeRegistry.from_connection(connection)
        except psycopg.Error as error:
            raise server_error("can't read the types", str(error), error.sqlstate) from error


def first_state(
    parameters: ConnectionParameters, publications: Sequence[str], *, messages: bool
) -> CatalogRead | None:
    """Read the state before a capture begins; None if the server refuses.

    `HistoryWatch` then reads again, and logs why the server refuses.

    Raises
    ------
    RetryableError
        The server can't be reached now.
    """
    try:
        return read_state(parameters, publications, messages=messages)
    except RetryableError:
        raise
    except PgOutputError as error:
        _log.debug("the history can't begin before the slot: %s", error)
        return None


class HistoryWatch:
    """Writes the schema history of a change log while a capture runs, in a thread of its own.

    Parameters
    ----------
    parameters : ConnectionParameters
    publications : list or tuple of str
    directory : pathlib.Path
    position : int
        The LSN at which the change log ends.
    messages : bool
        Whether the stream has logical messages.
    first : CatalogRead, optional
        The read from before the slot was made.

    Raises
    ------
    PgOutputError
        The existing schema history can't be read, or the disk refuses.
    """

    def __init__(
        self,
        parameters: ConnectionParameters,
        publications: Sequence[str],
        directory: Path,
        position: int,
        *,
        messages: bool,
        first: CatalogRead | None,
    ) -> None:
        self._parameters = parameters
        self._publications = publications
        self._messages = messages
        self._writer = HistoryWriter(directory, position if messages else None)
        if first is not None and self._writer.is_empty:
            self._writer.note(first)
        self._announced: dict[bytes, bytes] = {}
        self._read_at = 0.0
        # 1, so that the thread reads at once: the read from before the slot was made says nothing
        # about changes after the slot's beginning.
        self._asked, self._answered = 1, 0
        self._answers = threading.Condition()
        self._wake, self._ends, self._stop = (threading.Event() for _ in range(3))
        self._error: PgOutputError | None = None
        self._failed = ""
        self._thread = threading.Thread(target=self._run, name="pgoutput_fast-history", daemon=True)
        self._thread.start()

    def see(self, frame: bytes) -> None:
        """Ask for a read if a Relation or Type message is new, or differs from the last one."""
        if self._announced.get(frame[:5]) != frame:
            self._announced[frame[:5]] = frame
            self._ask()

    def record(self, run: Run) -> None:
        """Record the event triggers' messages, before any of these frames is written.

        Raises
        ------
        PgOutputError
            The disk refuses.
        """
        if self._messages:
            self._writer.record(run)

    def tick(self, position: int) -> None:
        """Ask for a read if segments reach further than the confirmed schema history.

        Parameters
        ----------
        position : int
            The LSN at which the change log ends.

        Raises
        ------
        PgOutputError
            The schema history can't be written.
        """
        if self._error is not None:
            raise self._error
        late = time.monotonic() - self._read_at >= _CONFIRM_INTERVAL
        if late and position > self._writer.confirmed and self._asked == self._answered:
            self._ask()

    def _ask(self) -> int:
        """Ask for a read, and return its number."""
        with self._answers:
            self._asked += 1
            asked = self._asked
        self._wake.set()
        return asked

    def catch_up(self) -> bool:
        """Wait up to `_READ_TIMEOUT` for a read that begins now; return whether it has ended."""
        asked = self._ask()
        with self._answers:
            return self._answers.wait_for(lambda: self._answered >= asked, _READ_TIMEOUT)

    def finish(self) -> None:
        """Read once more, after everything was captured; wait up to `_READ_TIMEOUT`."""
        self._ends.set()
        if not self.catch_up():
            _log.warning(
                "the server did not return its types and tables within %.0f s: the schema history "
                "is not complete up to the end, and the next capture completes it", _READ_TIMEOUT,
            )  # fmt: skip
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Tell the thread to end, and do not wait for a running read."""
        self._stop.set()
        self._ends.set()
        self._wake.set()

    def _run(self) -> None:
        while not self._stop.is_set():
            self._wake.clear()  # before `_asked` is read, so that no request is missed
            asked = self._asked
            try:
                self._look()
            except PgOutputError as error:
                self._error = error
            except Exception as error:  # noqa: BLE001 - raised in the capture's thread
                self._error = PgOutputError(
                    f"can't write the schema history: {error!r}", code="internal"
                )
            with self._answers:
                self._answered = asked
                self._answers.notify_all()
            if self._error is not None:
                return
            self._wait()

    def _wait(self) -> None:
        """Wait until the next read is due."""
        self._wake.wait(_INTERVAL)
        self._ends.wait(self._read_at + _ASKED_INTERVAL - time.monotonic())

    def _look(self) -> None:
        """Read the catalogue, and write what is new; log the same refusal only once."""
        self._read_at = time.monotonic()
        try:
            state = read_state(
                self._parameters, self._publications, self._writer.type_ids, messages=self._messages
            )
        except PgOutputError as error:
            # The stream has its own connection, and reports a lost server itself.
            if str(error) != self._failed:
                _log.warning("the schema history is not up to date: %s", error)
            self._failed = str(error)
            return
        self._failed = ""
        if not self._stop.is_set() and self._writer.note(state):
            _log.info("the schema history has new types or tables")
