"""A connection in replication mode, and its commands for slots, timelines and streams.

The server's process behind such a connection is a walsender.
"""

from __future__ import annotations

import contextlib
import logging
import math
import re
import select
import time
from typing import TYPE_CHECKING, NamedTuple

import psycopg
from psycopg import pq, sql

from ..connections import (
    ADVICE,
    IDENTIFY_ADVICE,
    PUBLICATION_ADVICE,
    SESSION_SETTINGS,
    SLOT_CODES,
    START_CODES,
    ConnectionParameters,
    answered,
    check_publications,
    frame_encoding,
    new_slot_advice,
    result_error,
    server_error,
)
from ..errors import MOST_SERVER_TEXT, PgOutputError, RetryableError, printable, shortened
from ..lsn import format_lsn, parse_lsn
from .waiter import next_result, take_input, wait_for

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Mapping, Sequence

    from typing_extensions import Self

# Seconds between tries to read a slot that is in use. The server notices only some 300 ms later
# that the last reader is gone.
_BUSY_WAITS = (0.1, 0.2, 0.4, 0.8, 1.5, 3.0)
_IN_RECOVERY = "SELECT pg_catalog.pg_is_in_recovery()"
# After so many seconds, log which transactions CREATE_REPLICATION_SLOT waits for; then again.
_TELL_AFTER = 2.0
_TELL_AGAIN = 10.0
# The transactions whose end a process awaits while it makes a slot. Another process runs such a
# transaction, or the transaction is prepared.
_WAITED_FOR = """
SELECT w.transactionid::text, h.pid, a.usename::text, p.gid
FROM pg_catalog.pg_locks AS w
LEFT JOIN pg_catalog.pg_locks AS h
    ON h.locktype = 'transactionid' AND h.transactionid = w.transactionid AND h.granted
LEFT JOIN pg_catalog.pg_stat_activity AS a ON a.pid = h.pid
LEFT JOIN pg_catalog.pg_prepared_xacts AS p ON p.transaction = w.transactionid
WHERE w.pid = %s AND NOT w.granted AND w.locktype = 'transactionid'
"""
_CANCEL_TIMEOUT = 2.0  # seconds for the server to cancel a command
_log = logging.getLogger(__name__)

# A line of a timeline's history file: a timeline, and the LSN at which the server left it.
_HISTORY_LINE = re.compile(r"^\s*(\d+)\s+([0-9A-F]+/[0-9A-F]+)", re.MULTILINE)
_MOST_NOTICES = 20  # notices that are logged in one interval
_NOTICE_INTERVAL = 60.0  # seconds
_SLOT_NAME = re.compile(r"[a-z0-9_]{1,63}", re.ASCII)


class SlotState(NamedTuple):
    """A replication slot, as pg_replication_slots shows it.

    Attributes
    ----------
    plugin, database, name : str
    confirmed_flush_lsn : int or None
        The LSN up to which the slot was acknowledged; None while the server makes the slot.
    active_pid : int or None
        The server process that reads the slot; None if nobody reads it.
    wal_status : str or None
        Whether the server still has the WAL that the slot needs. "reserved" and "extended": the
        server has it. "unreserved": the server may remove it soon. "lost": it is gone. None before
        PostgreSQL 13.
    temporary : bool
        Whether the slot ends with the connection that made it.
    restart_lsn : int or None
        The LSN from which the server keeps its log for the slot; None if it keeps none.
    two_phase : bool
        Whether the server sends prepared transactions when they are prepared.
    failover : bool
        Whether standbys keep a copy of the slot.
    synced : bool
        Whether the slot is such a copy, on a standby.
    invalidation_reason : str or None
        Why the slot can't be used any more, in the server's word; None if it can be used.
    """

    plugin: str | None
    database: str | None
    confirmed_flush_lsn: int | None
    active_pid: int | None
    wal_status: str | None
    name: str = ""
    temporary: bool = False
    restart_lsn: int | None = None
    two_phase: bool = False
    failover: bool = False
    synced: bool = False
    invalidation_reason: str | None = None


# Columns of pg_replication_slots: each with the first server version that has it, and the
# expression in its place for older servers.
_SLOT_COLUMNS = (
    ("plugin", 100000, ""),
    ("database", 100000, ""),
    ("confirmed_flush_lsn::text", 100000, ""),
    ("active_pid", 100000, ""),
    ("wal_status", 130000, "NULL"),
    ("slot_name::text", 100000, ""),
    ("temporary", 100000, ""),
    ("restart_lsn::text", 100000, ""),
    ("two_phase", 140000, "false"),
    ("failover", 170000, "false"),
    ("synced", 170000, "false"),
    ("invalidation_reason", 170000, "CASE WHEN {} = 'lost' THEN 'wal_removed' END"),
)
# Explanations of the server's invalidation reasons.
_INVALID = {
    "wal_removed": "the server has deleted WAL that it needs: max_slot_wal_keep_size was too small",
    "rows_removed": "catalogue rows that it needs are gone: set hot_standby_feedback to on",
    "wal_level_insufficient": "wal_level of the primary is no longer logical",
    "idle_timeout": "nobody read it for idle_replication_slot_timeout",
}


class CreatedSlot(NamedTuple):
    """A new slot.

    Attributes
    ----------
    name : str
    lsn : int
        The LSN where the slot begins: it brings all transactions that commit from there on.
    snapshot : str or None
        The name of an exported snapshot, for SET TRANSACTION SNAPSHOT. It has everything that was
        committed before `lsn`, and lasts until the next command on the connection that made the
        slot. None if no snapshot was exported.
    """

    name: str
    lsn: int
    snapshot: str | None


class ReplicationConnection:
    """A connection in replication mode to one database, with `SESSION_SETTINGS` set.

    Parameters
    ----------
    dsn : str or ConnectionParameters, optional
        Connection string of libpq, or URL. Its ``replication`` and ``client_encoding`` are ignored.
    **keywords
        Parameters of libpq by name, which override those of `dsn`: ``host="…"``.

    Attributes
    ----------
    system_identifier, database : str
    timeline : int
    end_lsn : int
        The answer to IDENTIFY_SYSTEM. `end_lsn` is where the server's log ended when the connection
        was made. `follow_timeline` updates `timeline`.
    in_recovery : bool
        Whether the server is a standby.
    server_version : int
        The server's version as libpq gives it: 180004 is 18.4.
    settings : dict of str to str
        The session settings, as the server shows them, with the client_encoding of the stream.
    wal_sender_timeout : float
        Seconds after which the server ends a silent client's connection; 0 for never.
    left_out : PgOutputError or None
        The error for changes that the server leaves out of the stream; see `left_out_error`.

    Raises
    ------
    PgOutputError
        The connection string can't be read, or the server can't be reached or refuses. No message
        has the password.
    TypeError
        `dsn` is no str, or libpq has no parameter of that name.
    """

    def __init__(self, dsn: str | ConnectionParameters | None = None, **keywords: object) -> None:
        if not isinstance(dsn, ConnectionParameters):
            dsn = ConnectionParameters(dsn, keywords)
        self.left_out: PgOutputError | None = None
        self._parameters = dsn
        self._beside: ReplicationConnection | None = None
        self._connection = dsn.open(replication=True)
        try:
            self.server_version = self._connection.info.server_version
            self.settings = {name: self._first_value(f"SHOW {name}") for name in SESSION_SETTINGS}
            self.settings["client_encoding"] = frame_encoding(self.pgconn)
            rows = self.query("IDENTIFY_SYSTEM", advice=IDENTIFY_ADVICE)
            self.system_identifier = str(rows[0][0])
            self.timeline = int(str(rows[0][1]))
            self.end_lsn = parse_lsn(str(rows[0][2]))
            self.database = str(rows[0][3])
            self.in_recovery = self._first_value(_IN_RECOVERY) == "True"
            self._started = self._first_value("SELECT pg_catalog.pg_postmaster_start_time()")
            timeout = self.query(
                "SELECT setting FROM pg_catalog.pg_settings WHERE name = 'wal_sender_timeout'"
            )
            self.wal_sender_timeout = int(str(timeout[0][0])) / 1000
            _log.debug(
                "connected to database %r of system %s, server version %d",
                self.database, self.system_identifier, self.server_version,
            )  # fmt: skip
        except BaseException:
            self._connection.close()
            raise

    def __repr__(self) -> str:
        return f"<ReplicationConnection to {self.database!r} of system {self.system_identifier}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; the server then drops its temporary slots."""
        if self._beside is not None:
            self._beside.close()
        self._connection.close()

    @property
    def pgconn(self) -> pq.abc.PGconn:
        """The libpq connection that psycopg uses."""
        return self._connection.pgconn

    def query(
        self,
        command: str | sql.Composable,
        *,
        waits: bool = False,
        advice: Mapping[str, str] | None = None,
    ) -> list[tuple[object, ...]]:
        """Run one command of the replication protocol, or one SQL command.

        Parameters
        ----------
        waits : bool
            The server may take any time for the command. By default, a server that does not answer
            counts as lost.
        advice : mapping, optional
            Hints for errors, by SQLSTATE, instead of the usual ones.

        Returns
        -------
        list of tuple
            The rows of the result, with values as psycopg returns them.

        Raises
        ------
        PgOutputError
            The server refuses, does not answer, or the connection is lost.
        """
        composed = command if isinstance(command, sql.Composable) else sql.SQL(command)
        text = composed.as_string(self._connection)
        try:
            with contextlib.nullcontext() if waits else answered(self.pgconn):
                cursor = self._connection.execute(text.encode())
            return cursor.fetchall() if cursor.description else []
        except psycopg.Error as error:
            words = " ".join(text.split()[:2])
            raise server_error(
                f"{words} failed", str(error), error.sqlstate, advice or ADVICE, SLOT_CODES
            ) from error

    def _first_value(self, command: str) -> str:
        return str(self.query(command)[0][0])

    def follow_timeline(self) -> None:
        """Set `timeline` to the present timeline of a standby.

        When a standby is promoted, or follows another primary, its streams continue and do not say
        so. So this method asks on a second connection to the same server. Everything that the
        stream brought before the call belongs to the history of the new `timeline`. On a primary,
        this method does nothing.

        Raises
        ------
        RetryableError
            The server can't be asked.
        """
        if not self.in_recovery:
            return
        try:
            if self._beside is None:
                self._beside = self._connect_beside()
            timeline = int(str(self._beside.query("IDENTIFY_SYSTEM")[0][1]))
            if timeline != self.timeline:
                _log.info("the server is on timeline %d now", timeline)
                self.in_recovery = self._beside.query(_IN_RECOVERY) == [(True,)]
                self.timeline = timeline
        except PgOutputError as error:
            raise RetryableError(
                f"can't ask the standby for its timeline: {error.message}",
                code=error.code,
                hint=error.hint,
            ) from error
        if not self.in_recovery:
            self._beside.close()

    def _connect_beside(self) -> ReplicationConnection:
        """Open a second connection to the same server.

        Raises
        ------
        PgOutputError
            The server can't be reached, or another one answers.
        """
        used = self.pgconn
        same = self._parameters.of_server(used.host, used.hostaddr, used.port)
        beside = ReplicationConnection(same)
        if beside._started != self._started or beside.system_identifier != self.system_identifier:
            beside.close()
            raise PgOutputError(
                "a second connection reached another server",
                code="another_history",
                hint="Give a host name or an address of one server only",
            )
        return beside

    def slots(self, name: str | None = None) -> list[SlotState]:
        """Return the server's logical slots, by name; with `name`, only the slot of that name.

        Raises
        ------
        PgOutputError
            The server can't be asked.
        """
        columns = [
            column if self.server_version >= since else instead.format("wal_status")
            for column, since, instead in _SLOT_COLUMNS
        ]
        if self.server_version < 130000:
            columns[-1] = "NULL"
        query = f"SELECT {', '.join(columns)} FROM pg_catalog.pg_replication_slots"  # noqa: S608
        which = sql.SQL("") if name is None else sql.SQL(" WHERE slot_name = {}").format(name)
        slots = []
        for row in self.query(sql.SQL(query) + which + sql.SQL(" ORDER BY slot_name")):
            state = SlotState._make(row)
            slots.append(
                state._replace(
                    confirmed_flush_lsn=_lsn(state.confirmed_flush_lsn),
                    restart_lsn=_lsn(state.restart_lsn),
                )
            )
        return slots if name is not None else [slot for slot in slots if slot.plugin is not None]

    def slot(self, name: str) -> SlotState | None:
        """Return the state of a slot; None if it does not exist.

        Raises
        ------
        RetryableError
            The server is still making the slot, or the slot is a standby's copy of the primary's.
        PgOutputError
            The slot is physical, of another plugin or database, or invalidated. The name is not
            allowed, or the server can't be asked.
        TypeError
            `name` is no str.
        """
        check_slot_name(name)
        for state in self.slots(name):
            if state.plugin is None:
                raise PgOutputError(
                    f"slot {name!r} is a physical slot, for a standby, and sends no changes of "
                    f"tables",
                    code="not_ours",
                    hint="Give a logical slot of pgoutput",
                )
            if state.plugin != "pgoutput" or state.database != self.database:
                raise PgOutputError(
                    f"slot {name!r} is for plugin {state.plugin!r} and database "
                    f"{state.database!r}, not for 'pgoutput' and {self.database!r}",
                    code="not_ours",
                    hint="Give another slot",
                )
            reason = state.invalidation_reason
            if reason is not None or state.wal_status == "lost":
                why = _INVALID.get(reason or "wal_removed", f"the server says {reason!r}")
                raise PgOutputError(
                    f"slot {name!r} is invalidated ({why})",
                    code="changes_missing",
                    hint=new_slot_advice(name),
                )
            if state.confirmed_flush_lsn is None:
                raise RetryableError(
                    f"slot {name!r} is just being made; wait until it is ready", code="in_use"
                )
            if state.synced and self.in_recovery:
                raise RetryableError(
                    f"slot {name!r} is this standby's copy of the primary's slot, which can be "
                    f"used once the standby is promoted",
                    code="standby",
                )
            return state
        return None

    def unused_slot(self, name: str) -> SlotState | None:
        """Return the state of a slot that nobody reads; None if the slot does not exist.

        If the slot is in use, wait some seconds until it is free.

        Raises
        ------
        RetryableError
            The slot is still in use.
        PgOutputError
            See `slot`.
        """
        state = self.slot(name)
        for wait in _BUSY_WAITS:
            if state is None or state.active_pid is None:
                break
            time.sleep(wait)
            state = self.slot(name)
        if state is not None and state.active_pid is not None:
            raise server_error(
                f"can't begin with slot {name!r}",
                f"it is in use by the server's process {state.active_pid}",
                "55006",
            )
        return state

    def create_slot(self, name: str, *, temporary: bool = False) -> int:
        """Make a slot for pgoutput, without a snapshot.

        The server first waits for the end of all transactions that run now.

        Returns
        -------
        int
            The LSN at which the slot begins.

        Raises
        ------
        PgOutputError
            A slot of this name exists, the name is not allowed, or the server refuses.
        TypeError
            `name` is no str.
        """
        return self.make_slot(name, temporary=temporary).lsn

    def make_slot(
        self,
        name: str,
        *,
        temporary: bool = False,
        two_phase: bool = False,
        failover: bool = False,
        snapshot: bool = False,
        stop: threading.Event | None = None,
        timeout: float | None = None,
    ) -> CreatedSlot:
        """Make a slot; :func:`pgoutput_fast.replication.slots.create` describes the options.

        The server first waits for the end of all transactions that run now. After two seconds, this
        method logs which transactions those are.

        Parameters
        ----------
        stop : threading.Event, optional
            Set it to give up.
        timeout : float, optional
            Seconds after which to give up. By default there is no limit.

        Raises
        ------
        RetryableError
            `stop` was set, or `timeout` has passed, before the slot was made.
        PgOutputError
            A slot of this name exists, the name is not allowed, or the server refuses or is too
            old.
        TypeError
            `name` is no str.
        """
        check_slot_name(name)
        for option, wanted, since in (("two_phase", two_phase, 15), ("failover", failover, 17)):
            if wanted and self.server_version < since * 10000:
                raise PgOutputError(
                    f"it needs PostgreSQL {since} or newer", code="not_supported", parameter=option
                )
        if self.server_version < 150000:
            option_list = "EXPORT_SNAPSHOT" if snapshot else "NOEXPORT_SNAPSHOT"
        else:
            option_list = f"(SNAPSHOT '{'export' if snapshot else 'nothing'}'"
            option_list += ", TWO_PHASE true" if two_phase else ""
            option_list += ", FAILOVER true)" if failover else ")"
        kind = "TEMPORARY LOGICAL pgoutput" if temporary else "LOGICAL pgoutput"
        result = self._make_slot(
            name, f'CREATE_REPLICATION_SLOT "{name}" {kind} {option_list}'.encode(), stop, timeout
        )
        lsn, exported = (result.get_value(0, column) for column in (1, 2))
        begin = (lsn or b"").decode()
        _log.info("made slot %s, which begins at %s", name, begin, extra={"event": "slot_made"})
        return CreatedSlot(name, parse_lsn(begin), exported.decode() if exported else None)

    def _make_slot(
        self, name: str, command: bytes, stop: threading.Event | None, timeout: float | None
    ) -> pq.abc.PGresult:
        """Send the command, wait for its end, and log what the server waits for."""
        pgconn = self.pgconn
        now = time.monotonic()
        tell, deadline = now + _TELL_AFTER, now + (math.inf if timeout is None else timeout)
        logged_wait = result = None
        try:
            pgconn.send_query(command)
            while pgconn.is_busy():
                if stop is not None and stop.is_set():
                    raise RetryableError(f"stopped before slot {name!r} was made", code="stopped")
                now = time.monotonic()
                if now > min(tell, deadline):
                    waits_for = self._waited_for()
                    if now > deadline:
                        raise RetryableError(
                            f"slot {name!r} was not made within {timeout} s: the server waits for "
                            f"{waits_for}. End it, or give a longer timeout",
                            code="timed_out",
                        )
                    tell = time.monotonic() + _TELL_AGAIN
                    if waits_for != logged_wait:
                        logged_wait = waits_for
                        _log.warning(
                            "the server makes slot %s when all running transactions have ended; "
                            "it waits for %s",
                            name, waits_for,
                        )  # fmt: skip
                wait_for(pgconn, select.POLLIN, 0.1)
                take_input(pgconn)
            while (more := next_result(pgconn)) is not None:
                result = result or more
        except psycopg.Error as error:
            raise server_error("the connection is lost", str(error), error.sqlstate) from error
        except BaseException:
            self._cancel()
            raise
        if result is None or result.status != pq.ExecStatus.TUPLES_OK:
            doing = f"can't make slot {name!r}"
            raise (
                result_error(doing, result)
                if result
                else PgOutputError(f"{doing}: no result", code="server_refused")
            )
        return result

    def _waited_for(self) -> str:
        """Ask on a second connection for whose transactions' end this connection waits."""
        used = self.pgconn
        same = self._parameters.of_server(used.host, used.hostaddr, used.port)
        try:
            with same.open(replication=False) as beside, answered(beside.pgconn):
                transactions = beside.execute(_WAITED_FOR, [used.backend_pid]).fetchall()
        except (psycopg.Error, PgOutputError) as error:
            _log.info("can't ask what the slot waits for: %s", error)
            transactions = []
        waits_for = []
        for xid, pid, user, gid in transactions:
            if gid is not None:
                waits_for.append(f"prepared transaction {gid!r} (xid {xid})")
            elif pid is not None:
                waits_for.append(f"transaction {xid} of process {pid}, user {user!r}")
            else:
                waits_for.append(f"transaction {xid}")
        return ", ".join(waits_for) or (
            "transactions that pg_stat_activity and pg_prepared_xacts show"
        )

    def _cancel(self) -> None:
        """Cancel the running command, and wait up to `_CANCEL_TIMEOUT` for its end."""
        end = time.monotonic() + _CANCEL_TIMEOUT
        with contextlib.suppress(psycopg.Error):
            self.pgconn.get_cancel().cancel()
            while self.pgconn.is_busy() and time.monotonic() < end:
                wait_for(self.pgconn, select.POLLIN, 0.1)
                take_input(self.pgconn)

    def advance_slot(self, name: str, lsn: int) -> int:
        """Move a slot to an LSN; see :func:`pgoutput_fast.replication.slots.advance`.

        Raises
        ------
        PgOutputError
            The name or the LSN is not valid, or the server refuses.
        TypeError
            `name` is no str, or `lsn` no int.
        """
        check_slot_name(name)
        rows = self.query(
            sql.SQL(
                "SELECT end_lsn::text FROM pg_catalog.pg_replication_slot_advance({}, {}::pg_lsn)"
            ).format(name, format_lsn(lsn)),
            waits=True,
        )
        _log.info("advanced slot %s to %s", name, rows[0][0])
        return parse_lsn(str(rows[0][0]))

    def current_lsn(self) -> int:
        """Ask for the LSN at which the server's log ends now.

        Raises
        ------
        PgOutputError
            The server can't be asked.
        """
        return parse_lsn(str(self.query("IDENTIFY_SYSTEM")[0][2]))

    def end_of_timeline(self, timeline: int) -> int | None:
        """Return the LSN at which the server left a timeline; None if it was never on it.

        Raises
        ------
        PgOutputError
            The server can't be asked.
        """
        if self.timeline == 1:
            return None
        content = self.query(f"TIMELINE_HISTORY {self.timeline}")[0][1]
        text = content.decode() if isinstance(content, bytes) else str(content)
        for number, lsn in _HISTORY_LINE.findall(text):
            if int(number) == timeline:
                return parse_lsn(lsn)
        return None

    def drop_slot(self, name: str) -> None:
        """Drop a slot, so that the server no longer keeps its log for the slot.

        Raises
        ------
        PgOutputError
            There is no slot of this name, it is in use, or the server refuses.
        TypeError
            `name` is no str.
        """
        check_slot_name(name)
        self.query(sql.SQL("DROP_REPLICATION_SLOT {}").format(sql.Identifier(name)))
        _log.info("dropped slot %s", name)

    def check_publications(self, publications: Sequence[str]) -> None:
        """Check that all publications exist.

        Raises
        ------
        PgOutputError
            A publication does not exist, `publications` is no list of names, or the server can't be
            asked.
        """
        check_publications(self._connection, publications)

    def start(
        self,
        slot: str,
        lsn: int,
        options: Mapping[str, str],
        retry_lsn: Callable[[], int] | None = None,
    ) -> None:
        """Run START_REPLICATION: the connection is a stream from then on, in COPY mode.

        If the slot is in use, try again for some seconds.

        Parameters
        ----------
        slot : str
        lsn : int
            Where to begin. The server begins later if the slot was acknowledged up to a later LSN.
        options : mapping of str to str
            The options of the plugin, by name.
        retry_lsn : callable, optional
            Returns the LSN for another try: meanwhile, another reader may have moved the slot on.

        Raises
        ------
        PgOutputError
            The server refuses, the connection is lost, or `retry_lsn` raises this error.
        TypeError
            `slot` is no str.
        """
        check_slot_name(slot)
        option_list = ", ".join(
            f'"{name}" {_literal(name, value)}' for name, value in options.items()
        )
        pgconn = self.pgconn
        # The configuration of the server, role or database may suppress warnings, and `_on_notice`
        # needs them.
        self.query("SET client_min_messages = notice")
        self.query(f"SET client_encoding = '{self.settings['client_encoding']}'")
        # While libpq reads the answer, it may already get a notice that follows the answer.
        pgconn.notice_handler = self._on_notice
        logged_refusal = ""
        for wait in (*_BUSY_WAITS, None):
            command = f'START_REPLICATION SLOT "{slot}" LOGICAL {format_lsn(lsn)} ({option_list})'
            try:
                with answered(pgconn):
                    pgconn.send_query(command.encode())
                    result = next_result(pgconn)
            except psycopg.Error as error:
                raise server_error("the connection is lost", str(error), error.sqlstate) from error
            if result is None:
                raise PgOutputError(
                    "the server sent no result to START_REPLICATION", code="server_refused"
                )
            if result.status == pq.ExecStatus.COPY_BOTH:
                pgconn.nonblocking = 1
                _log.debug("%s", command)
                return
            refused = result_error(
                f"can't start replication from slot {slot!r}", result, codes=START_CODES
            )
            with contextlib.suppress(psycopg.Error):  # the next command reports a lost connection
                while next_result(pgconn) is not None:
                    pass
            if refused.sqlstate != "55006" or wait is None:
                raise refused
            still = f"slot {slot!r} is still in use" if str(refused) == logged_refusal else refused
            _log.info("%s; trying again in %s s", still, wait)
            logged_refusal = str(refused)
            time.sleep(wait)
            if retry_lsn is not None:
                lsn = retry_lsn()

    def _on_notice(self, result: pq.abc.PGresult) -> None:
        self.left_out = self.left_out or left_out_error(result)


def left_out_error(notice: pq.abc.PGresult) -> PgOutputError | None:
    """Make the error for changes that the server leaves out; log any other notice, return None.

    From PostgreSQL 18 on, the server does not end the stream if a publication does not exist. It
    sends a warning, and continues without the publication's changes.
    """
    if notice.error_field(pq.DiagnosticField.SOURCE_FUNCTION) == b"LoadPublications":
        doing = "the server leaves out the changes of a publication"
        return result_error(
            doing, notice, {"55000": PUBLICATION_ADVICE}, codes={"55000": "no_publication"}
        )
    _notices.tell(notice.error_field(pq.DiagnosticField.MESSAGE_PRIMARY) or b"")
    return None


class _Notices:
    """Logs the notices of servers, at most `_MOST_NOTICES` in a minute."""

    def __init__(self) -> None:
        self._until = 0.0
        self._count = 0

    def tell(self, said: bytes) -> None:
        """Log a notice, unless there were too many in this interval."""
        now = time.monotonic()
        if now >= self._until:
            if self._count > _MOST_NOTICES:
                _log.info("the server sent %d more notices", self._count - _MOST_NOTICES)
            self._until, self._count = now + _NOTICE_INTERVAL, 0
        self._count += 1
        if self._count <= _MOST_NOTICES:
            text = said[: 4 * MOST_SERVER_TEXT + 4].decode("utf-8", "replace")
            _log.info("the server says: %s", printable(shortened(text)))


_notices = _Notices()


def check_slot_name(name: str) -> None:
    """Check that a name can be the name of a slot.

    Raises
    ------
    PgOutputError
        The name has characters that the server does not allow, is empty, or is too long.
    TypeError
        `name` is no str.
    """
    if not isinstance(name, str):
        raise TypeError(f"the name of a slot must be a str, not {type(name).__name__}")
    if not _SLOT_NAME.fullmatch(name):
        raise PgOutputError(
            f"{name!r} is not a slot name: use 1 to 63 lower-case letters, digits and underscores",
            code="bad_option",
            parameter="slot",
        )


def _literal(name: str, value: str) -> str:
    """Quote a string for START_REPLICATION, which doubles quotes, but not backslashes."""
    if "\0" in value:
        raise PgOutputError(
            f"{name} has a NUL byte: {value!r}", code="bad_option", parameter="options"
        )
    return "'" + value.replace("'", "''") + "'"


def _lsn(text: object) -> int | None:
    return None if text is None else parse_lsn(str(text))
