"""The examined server: queries for the checks, and SQL text for the findings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import psycopg
from psycopg import sql

from ..connections import answered, server_error
from ..errors import PgOutputError, printable
from ..publications import Publications, read_attributes, read_unique_indexes, row_filters

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import LiteralString

    from ..publications import Attribute, UniqueIndex

_SHOWN = 8  # the most names in a finding's text

# Settings of the doctor's session: its statements change nothing, and no wait is endless.
_SESSION = (
    "SET search_path = ''",
    "SET default_transaction_read_only = on",
    "SET statement_timeout = '50s'",
    "SET lock_timeout = '5s'",
)

_SETTINGS = """
SELECT name, setting, unit, source, context FROM pg_catalog.pg_settings WHERE name = ANY(%s)
"""

_ROLE = """
SELECT session_user::text, current_user::text, current_database()::text,
    pg_catalog.pg_is_in_recovery(), r.rolsuper, r.rolreplication,
    pg_catalog.has_database_privilege(current_database(), 'CREATE'),
    pg_catalog.pg_encoding_to_char(d.encoding)::text
FROM pg_catalog.pg_roles AS r, pg_catalog.pg_database AS d
WHERE r.rolname = session_user AND d.datname = current_database()
"""


class Setting(NamedTuple):
    """A setting of the server, as a session of the role has it by default.

    Fields: name, value (without unit), unit (None without one), source, context. All are columns of
    pg_settings.
    """

    name: str
    value: str
    unit: str | None
    source: str
    context: str

    @property
    def shown(self) -> str:
        """The value with its unit, for a text."""
        return f"{self.value} {self.unit}" if self.unit else self.value

    @property
    def seconds(self) -> float:
        """The value of a setting that is a time, in seconds."""
        return float(self.value) * {"ms": 0.001, "s": 1, "min": 60}[self.unit or "s"]

    @property
    def size(self) -> int:
        """The value of a setting that is a size, in bytes; negative for no limit."""
        return int(self.value) * {"B": 1, "kB": 1 << 10, "MB": 1 << 20}[self.unit or "B"]


class Role(NamedTuple):
    """The role and its database.

    Fields: name (session_user, which needs the attribute REPLICATION), current (current_user, whose
    privileges count), database, in_recovery (whether the server is a standby), superuser,
    replication, can_create (whether the role may make publications), encoding (of the database).
    """

    name: str
    current: str
    database: str
    in_recovery: bool
    superuser: bool
    replication: bool
    can_create: bool
    encoding: str


class Examined:
    """A server, with the publications and the slot that the caller gave.

    Parameters
    ----------
    connection : psycopg.Connection
        A connection that is not in replication mode.
    publications : sequence of str or None
        The names of the given publications.
    slot : str or None
        The name of the given slot.

    Attributes
    ----------
    publication_names : tuple of str or None
        The names of the given publications.
    slot : str or None
    version : int
        The server's version as libpq gives it.
    role : Role

    Raises
    ------
    PgOutputError
        The server can't be asked.
    """

    def __init__(
        self,
        connection: psycopg.Connection[tuple[object, ...]],
        publications: Sequence[str] | None,
        slot: str | None,
    ) -> None:
        self._connection = connection
        self.publication_names = None if publications is None else tuple(publications)
        self.slot = slot
        self.version = connection.info.server_version
        try:
            # Before `_SESSION`, which would hide the settings of the role.
            rows = self.rows(_SETTINGS, list(_EXAMINED))
            self._settings = {row[0]: Setting(*row) for row in rows}
            for command in _SESSION:
                self.rows(command)
            self.role = Role(*self.rows(_ROLE)[0])
        except psycopg.Error as error:
            raise server_error("can't ask the server", str(error), error.sqlstate) from error

    def rows(self, query: LiteralString, *parameters: object) -> list[Any]:
        """Run a query, and return its rows.

        Raises
        ------
        psycopg.Error
            The server refuses the query, for example because the role lacks a privilege.
        """
        with answered(self._connection.pgconn):
            cursor = self._connection.execute(query, parameters or None)
            return cursor.fetchall() if cursor.description else []

    def unique_indexes(self, oids: Sequence[int]) -> list[UniqueIndex]:
        """Return the unique indexes of tables; the errors are those of `rows`."""
        with answered(self._connection.pgconn):
            return read_unique_indexes(self._connection, oids)

    def objects(self, query: LiteralString, *parameters: object) -> list[dict[str, Any]]:
        """Run a query whose rows are one jsonb each, with the columns that this server has.

        Raises
        ------
        psycopg.Error
            As of `rows`.
        """
        return [row[0] for row in self.rows(query, *parameters)]

    def publications(self) -> Publications:
        """Read all publications of the database, and what they publish.

        Raises
        ------
        psycopg.Error
            As of `rows`.
        """
        with answered(self._connection.pgconn):
            return Publications(self._connection)

    def attributes(self, tables: Sequence[int]) -> dict[int, list[Attribute]]:
        """Read the columns of tables, by the tables' OIDs.

        Raises
        ------
        psycopg.Error
            As of `rows`.
        """
        with answered(self._connection.pgconn):
            return read_attributes(self._connection, tables)

    def row_filter(self, publication: int, table: int) -> str | None:
        """Read the row filter of a table as SQL; None if another session has locked the table.

        Raises
        ------
        psycopg.Error
            As of `rows`.
        """
        with answered(self._connection.pgconn):
            # Do not wait long: without the filter, only the SQL of a finding is missing.
            self._connection.execute("SET lock_timeout = 100")
            try:
                return "".join(row_filters(self._connection, table, [publication]))
            except psycopg.errors.LockNotAvailable:
                return None
            finally:
                self._connection.execute("SET lock_timeout = '5s'")

    def setting(self, name: str) -> Setting | None:
        """Return a setting; None if the server's version does not have it.

        Raises
        ------
        PgOutputError
            The role may not read the setting.
        """
        if name not in self._settings and self.version >= _EXAMINED[name]:
            raise PgOutputError(f"the role may not read the setting {name}", code="no_rights")
        return self._settings.get(name)

    def set_setting(self, name: str, value: str) -> tuple[str, ...]:
        """Return the statements that change a setting where it was set; empty if SQL can't."""
        setting = self._settings[name]
        set_clause = f"SET {name} = {quoted_literal(value)};"
        role, database = quoted(self.role.name), quoted(self.role.database)
        prefixes = {
            "global": "ALTER ROLE ALL ",
            "database": f"ALTER DATABASE {database} ",
            "user": f"ALTER ROLE {role} ",
            "database user": f"ALTER ROLE {role} IN DATABASE {database} ",
        }
        if setting.source in prefixes:
            return (prefixes[setting.source] + set_clause,)
        if setting.source in ("client", "command line", "environment variable", "override"):
            return ()
        changed = f"ALTER SYSTEM {set_clause}"
        return (
            (changed,)
            if setting.context == "postmaster"
            else (changed, "SELECT pg_catalog.pg_reload_conf();")
        )

    def set_for_role(self, name: str, value: str) -> tuple[str, ...]:
        """Return the statement that changes a setting for the role in the database."""
        if self._settings[name].source == "client":
            return ()
        role, database = quoted(self.role.name), quoted(self.role.database)
        set_clause = f"SET {name} = {quoted_literal(value)};"
        return (f"ALTER ROLE {role} IN DATABASE {database} {set_clause}",)

    def grant(self, granted: str) -> tuple[str, ...]:
        """Return the statement that makes the role a member of a role of the server."""
        return (f"GRANT {granted} TO {quoted(self.role.name)};",)


# The settings that checks use, each with the first server version that has it.
_EXAMINED = {
    "wal_level": 100000,
    "max_wal_senders": 100000,
    "max_replication_slots": 100000,
    "max_slot_wal_keep_size": 130000,
    "wal_sender_timeout": 100000,
    "idle_replication_slot_timeout": 180000,
    "logical_decoding_work_mem": 130000,
    "hot_standby_feedback": 100000,
    "statement_timeout": 100000,
    "idle_in_transaction_session_timeout": 100000,
    "idle_session_timeout": 140000,
    "transaction_timeout": 170000,
}


def quoted(*names: str) -> str:
    r"""Quote names for SQL, with dots between them: ``"public"."Odd name"``.

    Control characters, which a terminal would obey, become escapes such as ``U&"\001B"``.
    """
    return ".".join(_escaped(name, '"') for name in names)


def quoted_literal(value: str) -> str:
    """Quote a string for SQL, for both values of standard_conforming_strings."""
    if value.isprintable():
        return sql.Literal(value).as_string(None).strip()
    return _escaped(value, "'")


def _escaped(text: str, quote: str) -> str:
    if text.isprintable():
        return quote + text.replace(quote, quote * 2) + quote
    parts = (
        character * 2
        if character in ("\\", quote)
        else character
        if character.isprintable()
        else f"\\{ord(character):04X}"
        if ord(character) < 0x10000
        else f"\\+{ord(character):06X}"
        for character in text
    )
    return f"U&{quote}{''.join(parts)}{quote}"


def listed(names: Sequence[str]) -> str:
    """Join the first names for a sentence, and say how many more there are."""
    shown = ", ".join(map(printable, names[:_SHOWN]))
    more = len(names) - _SHOWN
    return f"{shown} and {more} more" if more > 0 else shown


def shown_size(size: int) -> str:
    """Format a number of bytes for a text, such as ``1.5 GiB``."""
    shown = float(size)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if abs(shown) < 1024:
            return f"{shown:.0f} bytes" if unit == "bytes" else f"{shown:.1f} {unit}"
        shown /= 1024
    return f"{shown:,.1f} TiB"


def shown_seconds(seconds: float) -> str:
    """Format a time in seconds for a text, such as ``3 h 20 min``."""
    if seconds < 120:
        return f"{seconds:g} s"
    minutes = int(seconds // 60)
    days, hours, minutes = minutes // 1440, minutes // 60 % 24, minutes % 60
    parts = [f"{days} d" if days else "", f"{hours} h" if hours else ""]
    return " ".join(part for part in [*parts, f"{minutes} min" if minutes else ""] if part)
