"""Checks of the server: settings, limits, standbys, and long transactions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import PgOutputError, counted, printable
from ..replication.negotiation import best_protocol
from ._examined import (
    listed,
    quoted_literal,
    shown_seconds,
    shown_size,
)
from .findings import Finding
from .kinds import LONG_TRANSACTION, SHORT_TIMEOUT, SMALL_KEEP, SMALL_MEMORY

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ._examined import Examined, Setting

_RESTART = "then restart the server"


def version(server: Examined) -> Iterator[Finding]:
    """Report the newest protocol version; check the database's encoding."""
    number = server.version
    release = f"{number // 10000}.{number % 10000}"
    yield Finding(
        "protocol", f"PostgreSQL {release} has pgoutput's protocol version {best_protocol(number)}"
    )
    if server.role.encoding == "SQL_ASCII":
        yield Finding(
            "encoding-sql-ascii",
            f"the encoding of database {printable(server.role.database)} is SQL_ASCII",
            advice="if texts may not be UTF-8, give --policy invalid_text=replace or "
            "invalid_text=binary. Or dump the database, and restore it into a database with "
            "encoding UTF8",
            objects=(server.role.database,),
        )


def _needed(server: Examined, name: str) -> Setting:
    setting = server.setting(name)
    if setting is None:
        raise PgOutputError(f"the server has no setting {name}", code="not_supported")
    return setting


def log_level(server: Examined) -> Iterator[Finding]:
    """Check whether wal_level is logical."""
    setting = _needed(server, "wal_level")
    if setting.value != "logical":
        yield Finding(
            "wal-level",
            f"wal_level is {setting.value}",
            server.set_setting("wal_level", "logical"),
            _RESTART + ("; set wal_level on the primary, too" if server.role.in_recovery else ""),
            ("wal_level",),
        )


def limits(server: Examined) -> Iterator[Finding]:
    """Check how many walsenders and slots are left."""
    for name, used_by, exhausted, few, what in (
        (
            "max_wal_senders",
            server.rows("SELECT count(*) FROM pg_catalog.pg_stat_replication"),
            "wal-senders-exhausted",
            "wal-senders-few",
            "walsender",
        ),
        (
            "max_replication_slots",
            server.rows("SELECT count(*) FROM pg_catalog.pg_replication_slots"),
            "slots-exhausted",
            "slots-few",
            "slot",
        ),
    ):
        if what == "slot" and server.slot is not None and _has_slot(server, server.slot):
            continue  # the slot exists, so the stream needs no new one
        most, used = int(_needed(server, name).value), used_by[0][0]
        if most - used > 1:
            continue
        yield Finding(
            exhausted if used >= most else few,
            f"{name} is {most}, and {counted(used, what)} {'is' if used == 1 else 'are'} in use",
            server.set_setting(name, str(max(2 * most, 10))),
            _RESTART,
            (name,),
        )


def _has_slot(server: Examined, name: str) -> bool:
    query = "SELECT 1 FROM pg_catalog.pg_replication_slots WHERE slot_name = %s"
    return bool(server.rows(query, name))


def retained_log(server: Examined) -> Iterator[Finding]:
    """Check how much log slots may keep."""
    setting = server.setting("max_slot_wal_keep_size")
    name = "max_slot_wal_keep_size"
    if setting is None:
        yield Finding(
            "wal-keep-unlimited",
            f"this version of PostgreSQL has no {name}",
            advice="watch how much log the slots keep, or update to PostgreSQL 13 or newer",
        )
    elif setting.size < 0:
        yield Finding(
            "wal-keep-unlimited",
            f"{name} is -1, so there is no limit",
            server.set_setting(name, "100GB"),
            "choose a size that the disk can hold; a slot that is further behind is then lost",
            (name,),
        )
    elif setting.size < SMALL_KEEP:
        yield Finding(
            "wal-keep-small",
            f"{name} is {shown_size(setting.size)}",
            server.set_setting(name, "100GB"),
            "choose a size that the disk can hold",
            (name,),
        )


def timeouts(server: Examined) -> Iterator[Finding]:
    """Check the timeouts of streams and slots."""
    sender = _needed(server, "wal_sender_timeout")
    if sender.seconds < SHORT_TIMEOUT:
        yield Finding(
            "wal-sender-timeout-short" if sender.seconds else "wal-sender-timeout-off",
            f"wal_sender_timeout is {sender.shown}",
            server.set_setting("wal_sender_timeout", "60s"),
            objects=("wal_sender_timeout",),
        )
    idle = server.setting("idle_replication_slot_timeout")
    if idle is not None and idle.seconds:
        yield Finding(
            "idle-slot-timeout",
            f"idle_replication_slot_timeout is {shown_seconds(idle.seconds)}",
            server.set_setting("idle_replication_slot_timeout", "0"),
            "or set it longer than a capture may be down",
            ("idle_replication_slot_timeout",),
        )


def memory(server: Examined) -> Iterator[Finding]:
    """Check the memory for decoding."""
    setting = server.setting("logical_decoding_work_mem")
    if setting is not None and setting.size < SMALL_MEMORY:
        yield Finding(
            "decoding-memory-small",
            f"logical_decoding_work_mem is {shown_size(setting.size)}",
            server.set_setting("logical_decoding_work_mem", "64MB"),
            "each stream may use this much memory",
            ("logical_decoding_work_mem",),
        )


def session_timeouts(server: Examined) -> Iterator[Finding]:
    """Check timeouts that could end the session of a snapshot."""
    for name in (
        "statement_timeout",
        "transaction_timeout",
        "idle_in_transaction_session_timeout",
        "idle_session_timeout",
    ):
        setting = server.setting(name)
        if setting is not None and setting.seconds:
            sql = server.set_for_role(name, "0")
            yield Finding(
                "session-timeout",
                f"{name} of role {printable(server.role.name)} is {shown_seconds(setting.seconds)}",
                sql,
                None if sql else f"remove {name} from the connection string's options",
                (name,),
            )


def standby(server: Examined) -> Iterator[Finding]:
    """Check what a standby needs for its own slots."""
    if not server.role.in_recovery:
        return
    yield Finding(
        "standby",
        "the server is a standby",
        advice="run the SQL about publications, tables and privileges on the primary",
    )
    if server.version < 160000:
        yield Finding(
            "standby-too-old",
            f"the server is a standby of PostgreSQL {server.version // 10000}",
            advice="capture from the primary",
        )
        return
    if _needed(server, "hot_standby_feedback").value != "on":
        yield Finding(
            "standby-feedback-off",
            "hot_standby_feedback is off",
            server.set_setting("hot_standby_feedback", "on"),
            objects=("hot_standby_feedback",),
        )
    query = "SELECT status, slot_name FROM pg_catalog.pg_stat_wal_receiver"
    for status, slot in server.rows(query):
        if status is None:
            yield Finding(
                "could-not-check",
                "could not check whether the standby follows its primary through a slot",
                server.grant("pg_read_all_stats"),
            )
        if status is None or slot:
            continue
        yield Finding(
            "standby-without-slot",
            "the standby follows its primary without a physical slot",
            advice="make a physical slot on the primary, and set primary_slot_name here",
            objects=("primary_slot_name",),
        )


_WRITING = """
SELECT a.pid, a.datname::text, a.usename::text,
    extract(epoch FROM clock_timestamp() - a.xact_start)::float8
FROM pg_catalog.pg_stat_activity AS a
WHERE a.backend_xid IS NOT NULL AND a.pid <> pg_catalog.pg_backend_pid()
ORDER BY a.xact_start NULLS LAST
"""


def transactions(server: Examined) -> Iterator[Finding]:
    """Find transactions that have written and been open for long."""
    hidden = 0
    for pid, database, role, seconds in server.rows(_WRITING):
        if seconds is None:
            hidden += 1
        elif seconds >= LONG_TRANSACTION:
            yield Finding(
                "long-transaction",
                f"process {pid} of role {printable(role or '')} in database "
                f"{printable(database or '')} has had a transaction open for "
                f"{shown_seconds(int(seconds))}",
                (f"SELECT pg_catalog.pg_terminate_backend({pid});",),
                "the statement ends the connection and rolls the transaction back. Or wait until "
                "the transaction ends",
                (str(pid),),
            )
    if hidden:
        yield Finding(
            "could-not-check",
            f"could not check for how long {counted(hidden, 'transaction')} of other roles "
            f"{'has' if hidden == 1 else 'have'} been open",
            server.grant("pg_read_all_stats"),
        )


_PREPARED = """
SELECT gid, database::text, owner::text, extract(epoch FROM clock_timestamp() - prepared)::float8
FROM pg_catalog.pg_prepared_xacts ORDER BY prepared, gid
"""


def prepared_transactions(server: Examined) -> Iterator[Finding]:
    """Find transactions that were prepared long ago and not ended."""
    for gid, database, owner, seconds in server.rows(_PREPARED):
        if seconds < LONG_TRANSACTION:
            continue
        here = database == server.role.database
        yield Finding(
            "prepared-transaction",
            f"transaction {quoted_literal(gid)} of role {printable(owner)} in database "
            f"{printable(database)} has been prepared for {shown_seconds(int(seconds))}",
            (f"ROLLBACK PREPARED {quoted_literal(gid)};",) if here else (),
            ("or run" if here else f"in database {listed([database])}, run ROLLBACK PREPARED or")
            + f" COMMIT PREPARED {quoted_literal(gid)}: ask whoever prepared it",
            (gid,),
        )
