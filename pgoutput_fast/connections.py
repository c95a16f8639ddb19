"""Connect to a server: the settings of every session, and hints for the server's errors.

The catalogue, the doctor and replication connect through this module. Errors never show a secret of
the connection string.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import shlex
import socket
import threading
from types import MappingProxyType
from typing import TYPE_CHECKING

from .errors import (
    CUT,
    Argument,
    PgOutputError,
    ReplicationError,
    RetryableError,
    printable,
    shortened,
)
from .options import near

try:
    import psycopg
    from psycopg import conninfo, pq, sql
except ImportError as error:
    raise PgOutputError(
        f"a connection to a server needs psycopg 3 ({error})",
        code="missing_package",
        hint="Install the extra pgoutput-fast[replication]",
    ) from error

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

SESSION_SETTINGS = {
    "client_encoding": "UTF8",
    "DateStyle": "ISO, MDY",
    "IntervalStyle": "postgres",
    "TimeZone": "UTC",
    "extra_float_digits": "3",
    "bytea_output": "hex",
}
"""The settings that decide how values look as text. Every session sets all of them.

Frames and copied rows come in the client_encoding that `frame_encoding` returns."""

_SECRETS = (
    "password", "sslpassword", "oauth_client_secret", "scram_client_key", "scram_server_key"
)  # fmt: skip

# With these, the client notices within a minute that a server is gone without having closed the
# connection. The operating system sends no keepalive probes while sent data are not confirmed, so
# tcp_user_timeout is needed too.
_LIVELINESS = {
    "connect_timeout": "10",  # seconds
    "keepalives_idle": "20",  # seconds
    "keepalives_interval": "10",  # seconds
    "keepalives_count": "3",
    "tcp_user_timeout": "60000",  # milliseconds
}

# After so many seconds without an answer, a server counts as lost. Keepalives do not notice a
# server that hangs, as its kernel answers them.
_ANSWER_TIMEOUT = 60.0

NEW_CONNECTION_ADVICE = "Open a new connection: it gets all changes that were not acknowledged"
"""The hint of an error after which a stream has to be opened again.

In a log, the text "connecting again in 0.1 s" may follow."""


def new_slot_advice(slot: str | None = None) -> str:
    """Return the hint of an error after which a slot can't continue, with SQL if it has a name."""
    how = "" if slot is None else f" (SELECT pg_drop_replication_slot('{slot}'))"
    return (
        f"Drop the slot{how} and move the change log away. Then start again with a new slot and "
        "new snapshots of all tables"
    )


ADVICE = {
    "28000": "Check that the role has the attribute REPLICATION, and that pg_hba.conf lets it in",
    "28P01": "Check the password and the user",
    "3D000": "Check the database's name",
    "42501": "Give the role the attribute REPLICATION, and rights on the published tables",
    "42601": "Leave out options that this version of the server may not support",
    "22023": "Leave out options that this version of the server may not support",
    "42704": "Check the names of the slot and the publications, in this database",
    "42710": "Give another name, or use the existing one",
    "53300": "Raise max_wal_senders, or end another replication connection",
    "53400": "Raise max_replication_slots, or drop a slot that nobody uses",
    "55000": (
        "If the server has deleted WAL that the slot needs, drop the slot and move the change log "
        "away. Then start again with a new slot and new snapshots of all tables"
    ),
    "55006": "End the process that reads the slot, or use a slot of your own",
    "57P01": (
        "The server shuts down, or an administrator ended the connection. Open a new connection "
        "when the server accepts connections"
    ),
    "58P01": f"The server has deleted WAL that the slot needs. {new_slot_advice()}",
}
"""Hints by SQLSTATE. The error itself has the server's own words."""


# Hints by a setting that the server's message names. The name is the same in every language, and
# the SQLSTATE alone has other causes too.
_SETTINGS_ADVICE = {
    "wal_level": "Set wal_level to logical in the server's configuration, and restart the server",
    "max_replication_slots": (
        "Set max_replication_slots in the server's configuration to at least the number of slots "
        "that you need, and restart the server"
    ),
    "temp_file_limit": "Raise temp_file_limit for the role: ALTER ROLE … SET temp_file_limit",
}
# The same for a missing attribute REPLICATION of the role. Before PostgreSQL 16, the messages have
# no such word that is the same in every language.
_ROLE = re.compile(r"\bREPLICATION\b|replication role")
_ROLE_ADVICE = "Give the role the attribute: ALTER ROLE … REPLICATION"

_POOLER_ADVICE = (
    "Give the host and port of the server itself: there seems to be a connection pooler, which "
    "does not pass on replication connections"
)
IDENTIFY_ADVICE = ADVICE | {"42601": _POOLER_ADVICE}
"""Hints by SQLSTATE for IDENTIFY_SYSTEM: a syntax error means that the mode is not replication."""

# While libpq connects, it gives no SQLSTATE, so the English text of the message has to do. A server
# with messages in another language gets no hint.
_CONNECTING_ADVICE = (
    (re.compile(r"password authentication failed|no password supplied"), ADVICE["28P01"]),
    (re.compile(r'database "[^"\n]*" does not exist'), ADVICE["3D000"]),
    (re.compile(r'role "[^"\n]*" does not exist'), "Check the user's name"),
    (
        re.compile(r"no pg_hba\.conf entry|pg_hba\.conf rejects"),
        (
            "Check host, user and database. If they are right, ask the server's administrator "
            "for a line in pg_hba.conf that lets this user connect from here to this database"
        ),
    ),
    # PgBouncer's message, which is the same in every language.
    (re.compile(r"unsupported startup parameter"), _POOLER_ADVICE),
)

PUBLICATION_ADVICE = (
    "Make the publication: it must exist before a change is written, and must not be dropped "
    f"while a slot needs it. {new_slot_advice()}"
)
_SHOWN = 8  # the most publications that an error names
STREAM_ADVICE = ADVICE | {"42704": PUBLICATION_ADVICE}
"""Hints by SQLSTATE for errors that end a stream, whose publications existed when it began."""

# The code of an error, by its SQLSTATE or the SQLSTATE's first two characters.
_CODES = {
    "08": "connection_lost",
    "0A000": "not_supported",
    "28": "connection_refused",
    "3D000": "connection_refused",
    "42501": "no_rights",
    "42710": "already_exists",
    "42P01": "no_table",
    "53400": "server_setting",
    "55006": "in_use",
    "57P01": "connection_lost",
    "57P02": "connection_lost",
    "57P03": "connection_lost",
    "57P04": "connection_refused",
    "57P05": "connection_lost",
    "58P01": "changes_missing",
}
SLOT_CODES = {"42704": "no_slot"}
"""More codes by SQLSTATE, for commands that name a slot."""
START_CODES = SLOT_CODES | {"55000": "changes_missing"}
"""The same for the command that starts a stream."""
STREAM_CODES = {"42704": "no_publication", "55000": "changes_missing"}
"""The same for errors that end a stream."""


# SQLSTATEs, or their first two characters, of errors that may pass by themselves: lost connections,
# conflicts, lacking resources, and a server that shuts down.
_RETRYABLE = frozenset({"08", "40", "53", "55006", "57P01", "57P02", "57P03", "57P05"})
# Exceptions: 53400 means that all slots are in use, and their number is a setting.
_FINAL = frozenset({"53400"})
# While libpq connects, it gives no SQLSTATE. Such an error counts as a network error, which may
# pass by itself, unless a line of its text matches `_FINAL_TEXT` and not `_PASSING_TEXT`.
_FINAL_TEXT = re.compile(
    r"password|authentication|pg_hba\.conf|does not exist|certificate|\balert\b|invalid|"
    r"not support|not permitted|permission denied|channel binding|GSSAPI|private key|"
    r"definition of service|service file|ALPN|not currently accepting|"
    r"replication (role|attribute)|unsupported startup parameter",
    re.IGNORECASE,
)
_PASSING_TEXT = re.compile(
    r"the database system is|due to timeout|too many (clients|connections)|"
    r"connection slots are reserved|exceeds max_wal_senders|terminating connection",
    re.IGNORECASE,
)
# Parts of a message that name hosts, directories, users or databases: they may have any words.
_NAMED = re.compile(r"""\"[^"\n]*"|\bhost:? '[^'\n]*'""")
# A line with the server's own words: in any language, two spaces follow the severity.
_SERVERS_WORDS = re.compile(r"failed: [^:\n]{1,40}:  \S.*")
# How long to try again after a refusal whose words this module does not know, in seconds.
_UNCLEAR_FOR = 60.0
# The part of a statement that libpq quotes in an error, and the line with a ^ below it. The
# statements belong to this package, and do not help the user.
_EXCERPT = re.compile(r"\n[^\n]*\n *\^ *(?=\n|$)")
CANT_CONNECT = "can't connect"
_PSYCOPG_PREFIXES = ("connection failed: ", "connection is bad: ")
_PING_TIMEOUT = 2  # seconds


def _is_retryable(text: str, sqlstate: str | None) -> bool:
    if sqlstate is None:
        lines = _NAMED.sub("", text).splitlines()
        return not any(
            _FINAL_TEXT.search(line) and not _PASSING_TEXT.search(line) for line in lines
        )
    return bool({sqlstate, sqlstate[:2]} & _RETRYABLE) and sqlstate not in _FINAL


def _is_unclear(text: str, connection_string: str) -> bool:
    """Return whether a failure to connect that counts as retryable may in fact be permanent.

    Before a session has settings, servers write messages in many languages. libpq's ping says
    whether a server accepts connections at the moment. If it does, but refused this connection in
    unknown words, it may have no connection left, or the password may be wrong.
    """
    words = _SERVERS_WORDS.findall(_NAMED.sub("", text))
    if all(_PASSING_TEXT.search(phrase) for phrase in words):
        return False
    # No other Python thread runs during the ping, so it has a short timeout.
    asked = conninfo.make_conninfo(connection_string, connect_timeout=_PING_TIMEOUT)
    return pq.PGconn.ping(asked.encode()) == pq.Ping.OK


def _code_of(text: str, sqlstate: str | None, codes: Mapping[str, str]) -> str:
    if any(name in text for name in _SETTINGS_ADVICE):
        return "server_setting"
    if _ROLE.search(text):
        return "no_rights"
    if sqlstate is None:
        return "connection_lost" if _is_retryable(text, None) else "connection_refused"
    all_codes = {**_CODES, **codes}
    matching_codes = (all_codes[key] for key in (sqlstate, sqlstate[:2]) if key in all_codes)
    return next(matching_codes, "server_refused")


def server_error(
    doing: str,
    text: str,
    sqlstate: str | None,
    advice: Mapping[str, str] = ADVICE,
    codes: Mapping[str, str] = MappingProxyType({}),
    table: str | None = None,
) -> ReplicationError:
    """Make the error for something that the server refused, with a hint.

    Parameters
    ----------
    doing : str
        What failed, such as "can't start …".
    text : str
        The server's or libpq's message, without secrets.
    sqlstate : str or None
        The SQLSTATE, if the error has one.
    advice : mapping of str to str
        Hints by SQLSTATE. The default is `ADVICE`.
    codes : mapping of str to str
        Codes of this package by SQLSTATE, which override the usual ones.
    table : str, optional
        The table concerned, ``namespace.name``.
    """
    text = shortened(text)
    named = next((hint for name, hint in _SETTINGS_ADVICE.items() if name in text), None)
    todo = named or (_ROLE_ADVICE if _ROLE.search(text) else advice.get(sqlstate or ""))
    if todo is None and sqlstate is None:
        todo = next((hint for words, hint in _CONNECTING_ADVICE if words.search(text)), None)
    code = f" (SQLSTATE {sqlstate})" if sqlstate else ""
    said = _in_one_line(_EXCERPT.sub("", text))
    if doing == CANT_CONNECT:
        doing, said = _said_once(said)
    kind = RetryableError if _is_retryable(text, sqlstate) else ReplicationError
    error = kind(
        f"{doing}: {said}{code}",
        code=_code_of(text, sqlstate, codes),
        hint=todo or (),
        table=table,
    )
    error.sqlstate = sqlstate
    return error


def _said_once(said: str) -> tuple[str, str]:
    """Return what failed and why, without the words with which psycopg and libpq repeat it.

    A text that does not begin with these words stays as it is, as do texts of other languages.
    """
    for prefix in _PSYCOPG_PREFIXES:
        said = said.removeprefix(prefix)
    server, failed, why = said.partition(" failed: ")
    if failed and server.startswith("connection to server "):
        return f"can't connect to {server.removeprefix('connection to ')}", why
    return CANT_CONNECT, said


def _in_one_line(text: str) -> str:
    """Join the lines of a text, with a semicolon after a line without punctuation at its end."""
    said = ""
    for line in filter(None, (" ".join(part.split()) for part in text.splitlines())):
        said += ("; " if said[-1:].isalnum() or said[-1:] in tuple(")\"'") else " ") * bool(said)
        said += line
    return said


def result_error(
    doing: str,
    result: pq.abc.PGresult,
    advice: Mapping[str, str] = ADVICE,
    codes: Mapping[str, str] = MappingProxyType({}),
    table: str | None = None,
) -> ReplicationError:
    """Make the error for a failed result; see `server_error` for the other arguments."""
    state = result.error_field(pq.DiagnosticField.SQLSTATE)
    primary = result.error_field(pq.DiagnosticField.MESSAGE_PRIMARY) or result.error_message
    detail = result.error_field(pq.DiagnosticField.MESSAGE_DETAIL)
    text = primary.decode("utf-8", "replace")
    if detail:
        text += f" ({detail.decode('utf-8', 'replace')})"
    sqlstate = state.decode("ascii", "replace") if state else None
    return server_error(doing, text, sqlstate, advice, codes, table)


@contextlib.contextmanager
def answered(pgconn: pq.abc.PGconn, works: float = 0.0) -> Iterator[None]:
    """Close the connection if the server does not answer a command in this block.

    Neither libpq nor psycopg has a timeout for an answer, so a timer's thread shuts the socket
    down.

    Parameters
    ----------
    pgconn : psycopg.pq.PGconn
    works : float
        Seconds for which the server may work on the command, in addition to the usual 60.

    Raises
    ------
    RetryableError
        The server did not answer in time.
    """
    silent = threading.Event()
    # The timer uses a duplicate of the descriptor, which stays open until the timer has ended.
    with socket.socket(fileno=os.dup(pgconn.socket)) as duplicate:

        def give_up() -> None:
            silent.set()
            with contextlib.suppress(OSError):  # the server may just have closed it
                duplicate.shutdown(socket.SHUT_RDWR)

        timer = threading.Timer(_ANSWER_TIMEOUT + works, give_up)
        timer.daemon = True
        timer.start()
        try:
            yield
        except (psycopg.Error, PgOutputError):
            if silent.is_set():
                raise RetryableError(
                    f"the server did not answer for {_ANSWER_TIMEOUT + works:.0f} s: the server or "
                    f"the network hangs",
                    code="connection_lost",
                    hint="Open a new connection",
                ) from None
            raise
        finally:
            timer.cancel()
            timer.join()


def frame_encoding(pgconn: pq.abc.PGconn) -> str:
    """Return the client_encoding for frames and copied rows: UTF8, or SQL_ASCII.

    A server converts to UTF8, except from a database in SQL_ASCII. There it knows no encoding to
    convert from, and would fail at the first bytes that are not UTF-8.
    """
    of_database = pgconn.parameter_status(b"server_encoding")
    return "SQL_ASCII" if of_database == b"SQL_ASCII" else SESSION_SETTINGS["client_encoding"]


class ConnectionParameters:
    """Where and how to connect. Its repr has no secrets.

    Parameters
    ----------
    dsn : str, optional
        Connection string of libpq, or URL. Missing parameters come from libpq's environment
        variables (PGHOST …), service files and password files.
    keywords : mapping, optional
        Parameters of libpq by name, which override those of `dsn`. None leaves a parameter out.
    arguments : iterable of str
        Names of the caller's own arguments. The error for an unknown keyword may suggest one.

    Raises
    ------
    PgOutputError
        The string can't be read, or a value looks as if it contained a password. The message shows
        at most the name of a parameter that libpq does not know, and no value.
    TypeError
        `dsn` is no str, or libpq has no parameter of that name.
    """

    @classmethod
    def of(
        cls,
        dsn: str | ConnectionParameters | None,
        keywords: Mapping[str, object],
        arguments: Iterable[str],
    ) -> ConnectionParameters:
        """Return `dsn` itself if it is a ConnectionParameters; otherwise make one."""
        if isinstance(dsn, ConnectionParameters) and not keywords:
            return dsn
        return cls(dsn, keywords, arguments)  # type: ignore[arg-type] # refuses other types

    def __init__(
        self,
        dsn: str | None = None,
        keywords: Mapping[str, object] | None = None,
        arguments: Iterable[str] = (),
    ) -> None:
        if dsn is not None and not isinstance(dsn, str):
            raise TypeError(f"the connection string must be a str, not {type(dsn).__name__}")
        values = {name: str(value) for name, value in (keywords or {}).items() if value is not None}
        libpq_names = {option.keyword.decode() for option in pq.Conninfo.get_defaults()}
        for name in values.keys() - libpq_names:
            hint = near(name, [*libpq_names, *arguments])
            raise TypeError(
                f"there is no argument {name!r}, and libpq has no parameter of this name. {hint}"
            )
        parameters, why = None, ""
        try:
            if any("\0" in text for text in (dsn or "", *values.values())):
                why = ": it has a NUL character, at which libpq would stop reading"
            else:
                parameters = conninfo.conninfo_to_dict(dsn or "", **values)
        except psycopg.Error as error:
            why = _unknown_parameter(str(error), dsn or "", libpq_names)
        if parameters is None:
            # Raised here, outside of `except`: libpq's error shows the string, and would be the
            # context of this one.
            raise PgOutputError(
                f"the connection string can't be read{why}",
                code="bad_option",
                parameter="dsn",
                hint="Write it as 'host=… dbname=…' or 'postgresql://user@host/dbname'. In a URL, "
                "write special characters as %XX",
            )
        _check_shown(dsn or "", parameters, values)
        # Remove these secrets from messages. Leave out very short ones, as ordinary words contain
        # them.
        self._secrets = [
            str(parameters[name]) for name in _SECRETS if len(str(parameters.get(name, ""))) > 3
        ]
        parameters["client_encoding"] = "UTF8"
        parameters.pop("replication", None)
        parameters.setdefault("fallback_application_name", "pgoutput_fast")
        # With a service, set no defaults: they would override the values of the service file.
        if "service" not in parameters and "PGSERVICE" not in os.environ:
            for name, value in _LIVELINESS.items():
                if name != "connect_timeout" or "PGCONNECT_TIMEOUT" not in os.environ:
                    parameters.setdefault(name, value)
        self._parameters = parameters

    def __repr__(self) -> str:
        shown = {name: self._parameters.get(name) for name in ("host", "port", "dbname", "user")}
        said = " ".join(f"{name}={value}" for name, value in shown.items() if value is not None)
        return f"<ConnectionParameters {said}>"

    @property
    def has_secret(self) -> bool:
        """Whether a password was given, in the string or as a keyword."""
        return any(self._parameters.get(name) for name in _SECRETS)

    def without_secrets(self, text: str) -> str:
        """Replace the secrets of these parameters in a text with ``***``."""
        for secret in self._secrets:
            text = text.replace(secret, "***")
            # A text that was cut may end with the first words of a secret that has spaces.
            for word in re.finditer(r"\s", secret):
                text = text.replace(f"{secret[: word.start()]}{CUT}", f"***{CUT}")
        return text

    def of_server(self, host: bytes, address: bytes, port: bytes) -> ConnectionParameters:
        """Return these parameters for one server, given by libpq's host, address and port."""
        parameters: dict[str, object] = {
            **self._parameters,
            "host": host.decode(),
            "hostaddr": address.decode() if address and not host.startswith(b"/") else None,
            "port": port.decode(),
            "target_session_attrs": None,
            "load_balance_hosts": None,
        }
        return ConnectionParameters(None, parameters)

    def open(self, *, replication: bool) -> psycopg.Connection[tuple[object, ...]]:
        """Connect with autocommit, and set `SESSION_SETTINGS`.

        Parameters
        ----------
        replication : bool
            Whether to connect in replication mode.

        Raises
        ------
        PgOutputError
            The server can't be reached or refuses the connection. The message has no secret.
        """
        mode = {"replication": "database"} if replication else {}
        connection_string = conninfo.make_conninfo("", **self._parameters, **mode)
        refused = None
        try:
            # Do not prepare statements: a walsender has only the simple query protocol.
            connection = psycopg.Connection.connect(
                connection_string,
                autocommit=True,
                prepare_threshold=None,
            )
        except psycopg.Error as error:
            text = self.without_secrets(str(error))
            refused = server_error(CANT_CONNECT, text, error.sqlstate)
            if isinstance(refused, RetryableError) and _is_unclear(text, connection_string):
                refused = RetryableError(
                    f"{refused.message}; this may not pass by itself: only messages in English say "
                    f"whether to try again",
                    code="connection_lost",
                    hint="Set lc_messages to C in the server's configuration",
                )
                refused.retry_for = _UNCLEAR_FOR
        if refused is not None:
            # Not inside `except`: psycopg's error, whose connection shows secrets, would be the
            # context of this one.
            raise refused
        # Without a handler, psycopg would keep all notifications in memory.
        connection.add_notify_handler(lambda _: None)
        try:
            with answered(connection.pgconn):
                for name, value in SESSION_SETTINGS.items():
                    connection.execute(
                        sql.SQL("SET {} = {}").format(
                            sql.Identifier(name.lower()), sql.Literal(value)
                        )
                    )
        except psycopg.Error as error:
            connection.close()
            raise server_error("can't set the session up", str(error), error.sqlstate) from error
        except BaseException:
            connection.close()
            raise
        return connection


def _unknown_parameter(said: str, dsn: str, libpq_names: Collection[str]) -> str:
    """Return text about an unknown parameter that libpq's message names, and a suggestion.

    Return no text if the name comes after a password, or may be part of one that was not quoted or
    escaped.
    """
    match = re.search(r'"([a-z_]+)"', said)
    if match is None:
        return ""
    before, parameter, _ = dsn.rpartition(f"{match[1]}=")
    # Another driver's string may have any word for a password, and has semicolons.
    behind_secret = any(secret in before for secret in (*_SECRETS, ";"))
    in_secret = "://" in before and "@" in dsn.partition("?")[2]
    if not parameter or behind_secret or in_secret:
        return ""
    close = difflib.get_close_matches(match[1], libpq_names, 1)
    suggestion = f", did you mean {close[0]!r}?" if close else ""
    return f": libpq has no parameter {match[1]!r}{suggestion}"


def _check_shown(dsn: str, parameters: Mapping[str, object], keywords: Collection[str]) -> None:
    """Refuse a host, port, user or database that may contain a password.

    libpq's messages, and `__repr__`, show these four. A password gets there if its special
    characters were not escaped, or with another driver's syntax, ``host=…;password=…``.

    Parameters
    ----------
    dsn : str
    parameters : mapping of str to object
        libpq's parameters, from `dsn` and from keywords.
    keywords : collection of str
        The parameters that the caller gave as keywords.

    Raises
    ------
    PgOutputError
        There is such a value. The message does not show it.
    """
    url = re.match(r"[a-z]+://([^?]*)", dsn)
    # In a URL, a raw @ may only end the user and password.
    in_url = url is not None and (url[1].count("@") > 1 or "@" in url[1].partition("/")[2])
    if in_url:
        raise PgOutputError(
            "the connection string has a host, port or database that is not valid",
            code="bad_option",
            parameter="dsn",
            hint=_SEPARATED,
        )
    for name in ("host", "hostaddr", "port", "user", "dbname", "service"):
        value = str(parameters.get(name) or "")
        if _may_have_a_password(name, value):
            is_keyword = name in keywords
            text = "it" if is_keyword else f"the value of {name}"
            raise PgOutputError(
                f"{text} contains other parameters, or characters that are not valid",
                code="bad_option",
                parameter=name if is_keyword else "dsn",
                hint=("Give each parameter alone, or all of them as ", Argument("dsn"))
                if is_keyword
                else _SEPARATED,
            )


_SEPARATED = (
    "In a URL, write special characters of the user and the password as %XX. In other connection "
    "strings, separate parameters with spaces, not semicolons"
)


def _may_have_a_password(name: str, value: str) -> bool:
    """Return whether a parameter's value has other parameters, or is no host or port."""
    if name in ("host", "hostaddr"):
        # A directory of sockets may have any name.
        hosts = [host for host in value.split(",") if not host.startswith("/")]
        if any(re.search(r"[@=;\s]", host) for host in hosts):
            return True
    if name == "port":
        return not re.fullmatch(r"[0-9,]*", value)
    return "://" in value or re.search(r";\s*\w+\s*=|\bpassword\s*=", value) is not None


def check_publication_names(publications: object) -> None:
    """Check that `publications` is a list of names.

    Raises
    ------
    PgOutputError
        The list is empty, or a name is not valid.
    TypeError
        `publications` is no list or tuple, or a name is no str.
    """
    expected = "publications must be a list of names, such as ['shop']"
    if not isinstance(publications, (list, tuple)):
        raise TypeError(f"{expected}, not {type(publications).__name__}")
    for name in publications:
        if not isinstance(name, str):
            raise TypeError(f"{expected}, and one of them is {type(name).__name__}")
        if not name or "\0" in name:
            raise PgOutputError(
                f"{name!r} can't be the name of a publication",
                code="bad_option",
                parameter="publications",
            )
    if not publications:
        raise PgOutputError("it names no publication", code="bad_option", parameter="publications")


def doctor_command(publications: Sequence[str]) -> str:
    """Return the command that examines publications."""
    names = "".join(f" --publication {shlex.quote(name)}" for name in publications)
    return f"pgoutput-fast doctor{names}"


def check_publications(
    connection: psycopg.Connection[tuple[object, ...]], publications: Sequence[str]
) -> None:
    """Check that all publications exist: PostgreSQL 18 sends only a warning for a missing one.

    Raises
    ------
    PgOutputError, TypeError
        A publication does not exist, or the server can't be asked. See also
        `check_publication_names`.
    """
    check_publication_names(publications)
    query = "SELECT pubname FROM pg_catalog.pg_publication ORDER BY pubname"
    try:
        with answered(connection.pgconn):
            existing = [str(name) for (name,) in connection.execute(query).fetchall()]
    except psycopg.Error as error:
        raise server_error("can't read the publications", str(error), error.sqlstate) from error
    missing = sorted({*publications}.difference(existing))
    if missing:
        quoted = any(name[:1] == name[-1:] == '"' for name in missing)
        raise PgOutputError(
            f"no publication {', '.join(map(repr, missing))} in database "
            f"{connection.info.dbname!r}, which has {_some(existing)}",
            code="no_publication",
            parameter="publications",
            hint="CREATE PUBLICATION, or give another name"
            + (", without the quotes that SQL needs" if quoted else ""),
        )


def _some(names: Sequence[str]) -> str:
    """Join the first names for an error, and say how many more there are."""
    shown = [printable(name) for name in names[:_SHOWN]]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "") if shown else "none"
