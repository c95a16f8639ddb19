"""Replication connections: session settings, slots, START_REPLICATION, and what errors mean."""

from __future__ import annotations

import re
import select
import time
from typing import TYPE_CHECKING, NamedTuple

import psycopg
from psycopg import conninfo, pq, sql

from ..errors import PgOutputError
from ..lsn import format_lsn, parse_lsn

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from typing_extensions import Self

SESSION_SETTINGS = {
    "client_encoding": "UTF8",
    "DateStyle": "ISO, MDY",
    "IntervalStyle": "postgres",
    "TimeZone": "UTC",
    "extra_float_digits": "3",
    "bytea_output": "hex",
}
"""What decides how values look as text. Every session sets all of it."""

# After a disconnect the server notices only after some 300 ms that a slot is free. Seconds.
_BUSY_WAITS = (0.1, 0.2, 0.4, 0.8, 1.5, 3.0)
_SLOT_NAME = re.compile(r"[a-z0-9_]{1,63}", re.ASCII)
_SECRETS = ("password", "sslpassword", "oauth_client_secret")


class SlotState(NamedTuple):
    """A logical slot, as pg_replication_slots shows it."""

    plugin: str
    database: str
    confirmed_flush_lsn: int
    active_pid: int | None
    wal_status: str | None


# What to do, by SQLSTATE. The server's own words come before it.
_ADVICE = {
    "28000": "the role may need the attribute REPLICATION, or a line in pg_hba.conf",
    "28P01": "check the user and the password",
    "3D000": "check the database's name",
    "42501": "the role needs the attribute REPLICATION and rights on the published tables",
    "42601": "the server may be too old for an option that was asked for",
    "22023": "the server may be too old for an option that was asked for",
    "42704": "check the names of the slot and the publications, in this database",
    "53300": "raise max_wal_senders, or end another replication connection",
    "53400": "raise max_replication_slots, or drop a slot that nobody uses",
    "55000": (
        "a slot whose WAL is gone can't be used any more: drop it, make a new one, and begin with "
        "a new snapshot"
    ),
    "55006": "another process reads the slot: end it, or use a slot of your own",
    "57P01": "the server shuts down or an administrator ended the connection; start again later",
    "58P01": "WAL that the slot needs is gone: make a new slot, and begin with a new snapshot",
}


_WAL_LEVEL = "set wal_level to logical in the server's configuration, and restart it"


class ReplicationError(PgOutputError):
    """What the server refused.

    Attributes
    ----------
    sqlstate : str or None
        PostgreSQL's error code; None where libpq gave none.
    """

    sqlstate: str | None = None


def server_error(doing: str, text: str, sqlstate: str | None) -> ReplicationError:
    """The error for something the server refused.

    Parameters
    ----------
    doing : str
        What was tried: "can't start …".
    text : str
        The server's or libpq's message, without secrets.
    sqlstate : str or None
        The error's code, where it has one.
    """
    # PostgreSQL says in the same state, and in any language, that wal_level is too low.
    advice = _WAL_LEVEL if "wal_level" in text else _ADVICE.get(sqlstate or "")
    code = f" (SQLSTATE {sqlstate})" if sqlstate else ""
    said = " ".join(text.split())  # libpq breaks lines
    error = ReplicationError(f"{doing}: {said}{code}" + (f"; {advice}" if advice else ""))
    error.sqlstate = sqlstate
    return error


def result_error(doing: str, result: pq.abc.PGresult) -> ReplicationError:
    """The error of a failed result."""
    state = result.error_field(pq.DiagnosticField.SQLSTATE)
    primary = result.error_field(pq.DiagnosticField.MESSAGE_PRIMARY) or result.error_message
    detail = result.error_field(pq.DiagnosticField.MESSAGE_DETAIL)
    text = primary.decode("utf-8", "replace")
    if detail:
        text += f" ({detail.decode('utf-8', 'replace')})"
    return server_error(doing, text, state.decode() if state else None)


def _conninfo(dsn: str, *, replication: bool) -> tuple[str, list[str]]:
    """Complete connection string, and the secrets in it. Errors never show a part of it.

    A password with characters that are not escaped ends up in the host or port, which libpq's
    messages show: so these are looked at first.
    """
    if not isinstance(dsn, str):
        raise TypeError(f"the connection string must be a str, not {type(dsn).__name__}")
    try:
        parameters = conninfo.conninfo_to_dict(dsn)
    except psycopg.Error:
        raise PgOutputError(
            "the connection string can't be read; write it as 'host=… dbname=…' or "
            "'postgresql://user@host/dbname', special characters in a URL as %XX"
        ) from None
    host, port = str(parameters.get("host", "")), str(parameters.get("port", ""))
    url = re.match(r"[a-z]+://([^?]*)", dsn)
    if "@" in host or not re.fullmatch(r"[0-9,]*", port) or (url and url[1].count("@") > 1):
        raise PgOutputError(
            "the connection string has a host or port that can't be one; special characters in a "
            "URL's user and password are written as %XX"
        )
    # A shorter one would be found in any word.
    secrets = [str(parameters[name]) for name in _SECRETS if len(str(parameters.get(name, ""))) > 3]
    parameters["client_encoding"] = "UTF8"
    parameters.pop("replication", None)
    if replication:
        parameters["replication"] = "database"
    parameters.setdefault("fallback_application_name", "pgoutput_fast")
    return conninfo.make_conninfo("", **parameters), secrets


def open_connection(dsn: str, *, replication: bool) -> psycopg.Connection[tuple[object, ...]]:
    """Connect, and set `SESSION_SETTINGS`. Each statement is a transaction.

    Raises
    ------
    PgOutputError
        The server can't be reached or refuses. No message has the password.
    """
    conninfo_, secrets = _conninfo(dsn, replication=replication)
    try:
        # Nothing is prepared: a walsender knows the simple protocol alone.
        connection = psycopg.Connection.connect(conninfo_, autocommit=True, prepare_threshold=None)
    except psycopg.Error as error:
        text = str(error)
        for secret in secrets:
            text = text.replace(secret, "***")
        raise server_error("can't connect", text, error.sqlstate) from None
    try:
        for name, value in SESSION_SETTINGS.items():
            connection.execute(
                sql.SQL("SET {} = {}").format(sql.Identifier(name.lower()), sql.Literal(value))
            )
    except psycopg.Error as error:
        connection.close()
        raise server_error("can't set the session up", str(error), error.sqlstate) from error
    except BaseException:
        connection.close()
        raise
    return connection


class ReplicationConnection:
    """A connection in replication mode to one database, with `SESSION_SETTINGS` set.

    Parameters
    ----------
    dsn : str
        Connection string of libpq, or URL; ``replication`` and ``client_encoding`` are given here.

    Attributes
    ----------
    system_identifier, database : str
        As IDENTIFY_SYSTEM tells them.
    server_version : int
        As libpq's: 180004 is 18.4.
    settings : dict of str to str
        The session settings, as the server shows them.

    Raises
    ------
    PgOutputError
        The server can't be reached or refuses. No message has the password.
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
            # Seconds; 0: none.
            self.wal_sender_timeout = int(str(timeout[0][0])) / 1000
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
        """The connection in libpq's terms."""
        return self._connection.pgconn

    def query(self, command: str | sql.Composable) -> list[tuple[object, ...]]:
        """Run one command; its rows, values as text or as psycopg makes them."""
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
            It is another kind of slot, of another database, or its WAL is gone.
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
        """Make a slot for pgoutput; without a snapshot. The LSN at which it begins.

        It waits until transactions that are running have ended.
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
        return parse_lsn(str(rows[0][1]))

    def drop_slot(self, name: str) -> None:
        """Drop a slot; the server no longer keeps its log for it."""
        check_slot_name(name)
        self.query(sql.SQL("DROP_REPLICATION_SLOT {}").format(sql.Identifier(name)))

    def check_publications(self, publications: Sequence[str]) -> None:
        """Refuse publications that are not there; see `check_publications`."""
        check_publications(self._connection, publications)

    def start(self, slot: str, lsn: int, options: Mapping[str, str]) -> None:
        """START_REPLICATION: from here on the connection is a stream, in COPY mode.

        A slot that is in use is tried again for some seconds.

        Raises
        ------
        PgOutputError
            The server refuses. Its SQLSTATE is in the message.
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
                return
            error = result_error(f"can't start replication from slot {slot!r}", result)
            while pgconn.get_result() is not None:
                pass
            if error.sqlstate != "55006" or wait is None:
                raise error
            time.sleep(wait)

    def _result(self) -> pq.abc.PGresult:
        """Wait for the result of a command, so that Ctrl-C can end it."""
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


def check_publications(
    connection: psycopg.Connection[tuple[object, ...]], publications: Sequence[str]
) -> None:
    """Refuse publications that are not there: 18 and later would silently wait for them."""
    if (
        not isinstance(publications, (list, tuple))
        or not publications
        or not all(isinstance(name, str) for name in publications)
    ):
        raise PgOutputError("publications must be a list of one name or more, each a str")
    query = sql.SQL("SELECT pubname FROM pg_catalog.pg_publication WHERE pubname IN ({})").format(
        sql.SQL(", ").join(sql.Literal(name) for name in publications)
    )
    rows = connection.execute(query).fetchall()
    missing = sorted(set(publications) - {str(row[0]) for row in rows})
    if missing:
        raise PgOutputError(
            f"no publication {', '.join(repr(name) for name in missing)} in database "
            f"{connection.info.dbname!r}; CREATE PUBLICATION, or give another name"
        )


def wait_for(pgconn: pq.abc.PGconn, event: int, seconds: float) -> None:
    """Wait until libpq's socket can be read (`select.POLLIN`) or written (`select.POLLOUT`)."""
    poll = select.poll()  # select() knows no descriptor above 1023
    poll.register(pgconn.socket, event)
    poll.poll(seconds * 1000)


def check_slot_name(name: str) -> None:
    """Refuse what can't be the name of a slot."""
    if not isinstance(name, str):
        raise TypeError(f"the name of a slot must be a str, not {type(name).__name__}")
    if not _SLOT_NAME.fullmatch(name):
        raise PgOutputError(
            f"{name!r} is no name of a slot: 1 to 63 lower-case letters, digits and underscores"
        )


def _literal(value: str) -> str:
    """A string of the replication grammar: only quotes are doubled, backslashes are themselves."""
    if "\0" in value:
        raise PgOutputError(f"an option of START_REPLICATION has a NUL byte: {value!r}")
    return "'" + value.replace("'", "''") + "'"


def publication_names(publications: Iterable[str]) -> str:
    """The value of the option publication_names: quoted identifiers with commas between."""
    return ",".join('"' + name.replace('"', '""') + '"' for name in publications)
