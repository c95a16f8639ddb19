"""Make, drop, list and advance replication slots.

The functions take a connection (:class:`pgoutput_fast.replication.ReplicationConnection`) or a
connection string. With a string, they open a connection for the call.

>>> from pgoutput_fast.replication import slots
>>> slots.create(dsn, "shop")
>>> [slot.name for slot in slots.list(dsn)]
['shop']
>>> slots.drop(dsn, "shop")
"""

from __future__ import annotations

import builtins
import contextlib
from collections.abc import Iterator

from ..errors import PgOutputError
from ..lsn import check_lsn, format_lsn
from .walsender import CreatedSlot, ReplicationConnection, SlotState

__all__ = ["CreatedSlot", "SlotState", "advance", "create", "drop", "list"]

Server = ReplicationConnection | str | None


@contextlib.contextmanager
def _connected(server: Server) -> Iterator[ReplicationConnection]:
    if isinstance(server, ReplicationConnection):
        yield server
    else:
        with ReplicationConnection(server) as connection:
            yield connection


def create(
    server: Server,
    name: str,
    *,
    temporary: bool = False,
    two_phase: bool = False,
    failover: bool = False,
    snapshot: bool = False,
) -> CreatedSlot:
    """Make a slot for pgoutput. The server first waits for the end of all running transactions.

    Parameters
    ----------
    server : ReplicationConnection or str or None
        A connection, or a connection string of libpq. None uses libpq's environment variables.
    name : str
    temporary : bool
        Whether the server drops the slot with the connection. Then give a connection as `server`.
    two_phase : bool
        Whether to send prepared transactions when they are prepared (PostgreSQL 15 and newer).
    failover : bool
        Whether standbys keep a copy of the slot (PostgreSQL 17 and newer).
    snapshot : bool
        Whether to export a snapshot of everything that was committed before the slot begins. It
        lasts until the next command on the connection, so give a connection as `server`.

    Raises
    ------
    PgOutputError
        A slot of this name exists, the name is not allowed, or the server refuses or is too old.
    TypeError
        `name` is no str.
    """
    if (temporary or snapshot) and not isinstance(server, ReplicationConnection):
        raise PgOutputError(
            "a temporary slot and an exported snapshot end with their connection",
            code="unfit_input",
            hint="Give a ReplicationConnection",
        )
    with _connected(server) as connection:
        return connection.make_slot(
            name, temporary=temporary, two_phase=two_phase, failover=failover, snapshot=snapshot
        )


def drop(server: Server, name: str) -> None:
    """Drop a slot, so that the server no longer keeps its log for the slot.

    Raises
    ------
    PgOutputError
        There is no slot of this name, it is in use, or the server refuses.
    TypeError
        `name` is no str.
    """
    with _connected(server) as connection:
        connection.drop_slot(name)


def list(server: Server) -> builtins.list[SlotState]:  # noqa: A001
    """Return all logical slots of the server, by name, also of other databases and plugins.

    Raises
    ------
    PgOutputError
        The server can't be asked.
    """
    with _connected(server) as connection:
        return connection.slots()


def advance(server: Server, name: str, lsn: int) -> int:
    """Move a slot to an LSN without reading it: it no longer sends earlier commits.

    Returns
    -------
    int
        The LSN to which the server moved the slot.

    Raises
    ------
    PgOutputError
        There is no such slot, or it can't be used. The slot is already beyond the LSN, or the
        server's log ends before the LSN. The server refuses.
    TypeError
        `name` is no str, or `lsn` no int.
    """
    check_lsn("lsn", lsn)
    with _connected(server) as connection:
        state = connection.slot(name)
        if state is None:
            raise PgOutputError(f"no slot {name!r} on the server (SQLSTATE 42704)", code="no_slot")
        if lsn < (state.confirmed_flush_lsn or 0):
            raise PgOutputError(
                f"slot {name!r} is at {format_lsn(state.confirmed_flush_lsn or 0)}, beyond "
                f"{format_lsn(lsn)}, and can't be moved back",
                code="bad_option",
                parameter="lsn",
            )
        end = connection.current_lsn()
        if lsn > end:
            raise PgOutputError(
                f"the server's log ends at {format_lsn(end)}, before {format_lsn(lsn)}",
                code="bad_option",
                parameter="lsn",
            )
        return connection.advance_slot(name, lsn)
