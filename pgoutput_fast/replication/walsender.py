"""The commands of a walsender: IDENTIFY_SYSTEM, those of slots, and START_REPLICATION.

A walsender is the server's process behind a connection in replication mode.
"""

from __future__ import annotations

import logging
import re
import select
import time
from typing import TYPE_CHECKING, NamedTuple

import psycopg
from psycopg import pq, sql

from ..connections import (
    SESSION_SETTINGS,
    check_publications,
    open_connection,
    result_error,
    server_error,
)
from ..errors import PgOutputError
from ..lsn import format_lsn, parse_lsn

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from typing_extensions import Self

# Seconds between tries to take a slot that is in use: when its last reader has gone, the server
# notices it only some 300 ms later.
_BUSY_WAITS = (0.1, 0.2, 0.4, 0.8, 1.5, 3.0)
_log = logging.getLogger(__name__)

_SLOT_NAME = re.compile(r"[a-z0-9_]{1,63}", re.ASCII)


class SlotState(NamedTuple):
    """A logical slot, as pg_replication_slots shows it.

    Fields: plugin, database, confirmed_flush_lsn (up to where it was acknowledged), active_pid (of
    the process that reads it, or None), wal_status (None before PostgreSQL 13).
    """

    plugin: str
    database: str
    confirmed_flush_lsn: int
    active_pid: int | None
    wal_status: str | None


class ReplicationConnection:
    """A connection in replication mode to one database, with `SESSION_SETTINGS` set.

    Parameters
    ----------
    dsn : str
        Connection string of libpq, or URL. What it says of ``replication`` and ``client_encoding``
        is not looked at.

    Attributes
    ----------
    system_identifier, database : str
        What IDENTIFY_SYSTEM tells.
    server_version : int
        The server's version as libpq has it: 180004 is 18.4.
    settings : dict of str to str
        The session settings, as the server shows them.
    wal_sender_timeout : float
        Seconds after which the server gives a silent client up; 0 for never.

    Raises
    ------
    PgOutputError
        The connection string can't be read, or the server can't be reached or refuses. No message
        has the password.
    TypeError
        `dsn` is no str.
    """

    def __init__(self, dsn: str) -> None:
        self._connection = open_connection(dsn, replication=True)
        try:
            self.server_version = self._connection.info.server_version
            self.settings = {name: self._one(f"SHOW {name}") for name in SESSION_SETTINGS}
            rows = self.query("IDENTIFY_SYSTEM")
            self.system_identifier = str(rows[0][0])
            self.database = str(rows[0][3])
            timeout = self.query(
                "SELECT setting FROM pg_catalog.pg_settings WHERE name = 'wal_sender_timeout'"
            )
            self.wal_sender_timeout = int(str(timeout[0][0])) / 1000
            _log.info(
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
        """Close the connection; temporary slots go with it."""
        self._connection.close()

    @property
    def pgconn(self) -> pq.abc.PGconn:
        """The connection of libpq that psycopg's stands on."""
        return self._connection.pgconn

    def query(self, command: str | sql.Composable) -> list[tuple[object, ...]]:
        """Run one command of the walsender, or of SQL.

        Returns
        -------
        list of tuple
            Its rows, with values as psycopg makes them.

        Raises
        ------
        PgOutputError
            The server refuses, or the connection is lost.
        """
        composed = command if isinstance(command, sql.Composable) else sql.SQL(command)
        text = composed.as_string(self._connection)
        try:
            cursor = self._connection.execute(text.encode())
            return cursor.fetchall() if cursor.description else []
        except psycopg.Error as error:
            what = " ".join(text.split()[:2])
            raise server_error(f"{what} failed", str(error), error.sqlstate) from error

    def _one(self, command: str) -> str:
        return str(self.query(command)[0][0])

    def slot(self, name: str) -> SlotState | None:
        """The state of a slot; None if there is none of this name.

        Raises
        ------
        PgOutputError
            It is another kind of slot, of another database, or its WAL is gone; the name can't be
            one; or the server can't be asked.
        TypeError
            `name` is no str.
        """
        check_slot_name(name)
        wal_status = "wal_status" if self.server_version >= 130000 else "NULL"
        rows = self.query(
            sql.SQL(
                "SELECT plugin, database, confirmed_flush_lsn::text, active_pid, "
                + wal_status
                + " "
                "FROM pg_catalog.pg_replication_slots WHERE slot_name = {}"
            ).format(sql.Literal(name))
        )
        if not rows:
            return None
        plugin, database, confirmed, active_pid, status = rows[0]
        if plugin != "pgoutput" or database != self.database:
            raise PgOutputError(
                f"slot {name!r} is of plugin {plugin!r} and database {database!r}, not of "
                f"'pgoutput' and {self.database!r}; give another slot"
            )
        if status == "lost" or confirmed is None:
            raise PgOutputError(
                f"slot {name!r} is invalidated, WAL that it needs is gone: drop it, make a new "
                f"one, and begin with a new snapshot"
            )
        return SlotState(
            str(plugin),
            str(database),
            parse_lsn(str(confirmed)),
            int(str(active_pid)) if active_pid is not None else None,
            str(status) if status is not None else None,
        )

    def create_slot(self, name: str, *, temporary: bool = False) -> int:
        """Make a slot for pgoutput, without a snapshot.

        It waits until transactions that are running have ended.

        Returns
        -------
        int
            The LSN at which the slot begins.

        Raises
        ------
        PgOutputError
            There is one of this name, the name can't be one, or the server refuses.
        TypeError
            `name` is no str.
        """
        check_slot_name(name)
        old = self.server_version < 150000
        rows = self.query(
            sql.SQL("CREATE_REPLICATION_SLOT {} {} LOGICAL pgoutput {}").format(
                sql.Identifier(name),
                sql.SQL("TEMPORARY" if temporary else ""),
                sql.SQL("NOEXPORT_SNAPSHOT" if old else "(SNAPSHOT 'nothing')"),
            )
        )
        _log.info("made slot %s, which begins at %s", name, rows[0][1])
        return parse_lsn(str(rows[0][1]))

    def drop_slot(self, name: str) -> None:
        """Drop a slot, so that the server no longer keeps its log for it.

        Raises
        ------
        PgOutputError
            There is none of this name, it is in use, or the server refuses.
        TypeError
            `name` is no str.
        """
        check_slot_name(name)
        self.query(sql.SQL("DROP_REPLICATION_SLOT {}").format(sql.Identifier(name)))
        _log.info("dropped slot %s", name)

    def check_publications(self, publications: Sequence[str]) -> None:
        """Refuse publications that are not there.

        Raises
        ------
        PgOutputError
            One is not there, `publications` is no list of names, or the server can't be asked.
        """
        check_publications(self._connection, publications)

    def start(self, slot: str, lsn: int, options: Mapping[str, str]) -> None:
        """START_REPLICATION: from here on the connection is a stream, in COPY mode.

        A slot that is in use is tried again for some seconds.

        Parameters
        ----------
        slot : str
        lsn : int
            Where to begin; the server begins later if the slot was acknowledged further.
        options : mapping of str to str
            As `start_options` makes them.

        Raises
        ------
        PgOutputError
            The server refuses, or the connection is lost.
        TypeError
            `slot` is no str.
        """
        check_slot_name(slot)
        given = ", ".join(f'"{name}" {_literal(value)}' for name, value in options.items())
        command = f'START_REPLICATION SLOT "{slot}" LOGICAL {format_lsn(lsn)} ({given})'
        pgconn = self.pgconn
        for wait in (*_BUSY_WAITS, None):
            pgconn.send_query(command.encode())
            result = self._result()
            if result.status == pq.ExecStatus.COPY_BOTH:
                pgconn.nonblocking = 1
                _log.info("%s", command)
                return
            error = result_error(f"can't start replication from slot {slot!r}", result)
            while pgconn.get_result() is not None:
                pass
            if error.sqlstate != "55006" or wait is None:
                raise error
            _log.info("%s; trying again in %s s", error, wait)
            time.sleep(wait)

    def _result(self) -> pq.abc.PGresult:
        """The result of a command; while it is waited for, Ctrl-C is heard."""
        pgconn = self.pgconn
        try:
            while pgconn.is_busy():
                wait_for(pgconn, select.POLLIN, 1.0)
                pgconn.consume_input()
            result = pgconn.get_result()
        except psycopg.Error as error:
            raise server_error("the connection is lost", str(error), error.sqlstate) from error
        if result is None:
            raise PgOutputError("the server sent no result to START_REPLICATION")
        return result


def wait_for(pgconn: pq.abc.PGconn, event: int, seconds: float) -> None:
    """Wait until libpq's socket can be read (`select.POLLIN`) or written (`select.POLLOUT`)."""
    poll = select.poll()  # select() knows no descriptor above 1023
    poll.register(pgconn.socket, event)
    poll.poll(seconds * 1000)


def check_slot_name(name: str) -> None:
    """Refuse what can't be the name of a slot.

    Raises
    ------
    PgOutputError
        It has other characters than the server allows, or is too long.
    TypeError
        It is no str.
    """
    if not isinstance(name, str):
        raise TypeError(f"the name of a slot must be a str, not {type(name).__name__}")
    if not _SLOT_NAME.fullmatch(name):
        raise PgOutputError(
            f"{name!r} is no name of a slot: 1 to 63 lower-case letters, digits and underscores"
        )


def _literal(value: str) -> str:
    """A string as START_REPLICATION takes it: quotes are doubled, backslashes are left alone."""
    if "\0" in value:
        raise PgOutputError(f"an option of START_REPLICATION has a NUL byte: {value!r}")
    return "'" + value.replace("'", "''") + "'"


def publication_names(publications: Iterable[str]) -> str:
    """The value of the option publication_names: quoted identifiers with commas between."""
    return ",".join('"' + name.replace('"', '""') + '"' for name in publications)


def start_options(
    connection: ReplicationConnection,
    publications: Sequence[str],
    *,
    binary: bool,
    messages: bool,
) -> Mapping[str, str]:
    """Options of START_REPLICATION for protocol version 1.

    Raises
    ------
    PgOutputError
        The server is too old for one.
    """
    options = {"proto_version": "1", "publication_names": publication_names(publications)}
    for name, wanted in (("binary", binary), ("messages", messages)):
        if wanted:
            if connection.server_version < 140000:
                raise PgOutputError(f"{name}=True needs PostgreSQL 14 or newer")
            options[name] = "true"
    return options


def confirmed_flush_lsn(connection: ReplicationConnection, slot: str, *, create: bool) -> int:
    """Up to where a slot was acknowledged; with `create` it is made if it is not there.

    Raises
    ------
    PgOutputError
        There is no such slot, it can't be used, or the server refuses.
    TypeError
        `slot` is no str.
    """
    state = connection.slot(slot)
    if state is not None:
        return state.confirmed_flush_lsn
    if not create:
        raise PgOutputError(
            f"no slot {slot!r} on the server (SQLSTATE 42704); create it with create_slot=True or "
            f"SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')"
        )
    return connection.create_slot(slot)
