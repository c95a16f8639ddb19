"""The function `connect`, which makes a stream of a slot's changes."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from ..connections import ConnectionParameters
from ..errors import PgOutputError
from ..lsn import check_lsn
from ..policies import Policies
from ..types import TypeRegistry
from .link import Link, first_connection
from .receiver import Receiver
from .source import Source
from .stream import ReplicationStream
from .stream_options import Protocol, Streaming, StreamOptions, check_seconds


def check_assembling(assembling: Mapping[str, Any], unknown_prepared: str | None) -> None:
    """Refuse wrong arguments of an Assembler before a connection is made.

    Where all are as they are by default, nothing is looked at: an Assembler loads NumPy, and who
    receives frames does not need it.

    Raises
    ------
    PgOutputError, TypeError
        As of :class:`pgoutput_fast.transactions.Assembler`.
    """
    defaults = inspect.signature(connect).parameters
    if unknown_prepared is not None or any(
        value is not defaults[name].default for name, value in assembling.items()
    ):
        from ..transactions import Assembler

        unknown: Any = "empty" if unknown_prepared is None else unknown_prepared
        Assembler(**assembling, unknown_prepared=unknown)


_BEYOND_ADVICE = (
    ". Only if no other program has read the slot, and this one did so without `on_idle`, the "
    "server had nothing there: without `start_lsn` the stream goes on"
)


def _check_position(
    start_lsn: object, start_timeline: object, on_idle: object, *, temporary: bool
) -> None:
    """Refuse wrong arguments that say where to go on.

    Raises
    ------
    PgOutputError, TypeError
        As of `connect`.
    """
    if start_timeline is not None and type(start_timeline) is not int:
        raise TypeError(f"start_timeline must be an int, not {type(start_timeline).__name__}")
    if start_lsn is not None:
        check_lsn("start_lsn", start_lsn)
        if temporary:
            raise PgOutputError("a temporary slot begins now: start_lsn can't be given with it")
    if on_idle is not None and not callable(on_idle):
        raise TypeError(f"on_idle must be callable, not {type(on_idle).__name__}")


def connect(
    dsn: str | None = None,
    *,
    slot: str,
    publications: Sequence[str],
    create_slot: bool = False,
    temporary: bool = False,
    protocol: Protocol = "auto",
    streaming: Streaming = True,
    two_phase: bool | None = False,
    binary: bool = False,
    messages: bool = False,
    origin: str | None = None,
    start_lsn: int | None = None,
    start_timeline: int | None = None,
    on_idle: Callable[[int], object] | None = None,
    silence_timeout: float | None = None,
    retry_for: float | None = None,
    max_memory: int = 64 << 20,
    spill_directory: str | os.PathLike[str] | None = None,
    prepared: Literal["commit", "prepare"] = "commit",
    unknown_prepared: Literal["empty", "error"] | None = None,
    policies: Policies | None = None,
    registry: TypeRegistry | None = None,
    target: Literal["arrow", "spark", "portable"] = "arrow",
    tables: str | Iterable[str] | None = None,
    columns: Iterable[str] | Mapping[str, Iterable[str]] | None = None,
    fill_unchanged: bool = False,
    **keywords: object,
) -> ReplicationStream:
    """Begin to receive a slot's changes.

    ``docs/replication.md`` says what the stream gives, and what may be acknowledged when.

    Parameters
    ----------
    dsn : str, optional
        Connection string of libpq, or URL. What it leaves out is taken from libpq's variables
        (PGHOST …), service files and password files.
    slot : str
    publications : list or tuple of str
        Names of publications, without quotes.
    create_slot : bool
        Make the slot if it is not there.
    temporary : bool
        Make a slot that ends with the connection. There must be no slot of this name.
    protocol : {"auto", 1, 2, 3, 4}
        The version of the protocol; by default the newest that the server knows.
    streaming : bool or {"on", "parallel"}
        Whether large transactions come while they are in progress, from protocol 2 on. True means
        the best way that the protocol has. Programs that look at frames themselves may want
        ``protocol=1``, in which each transaction comes whole.
    two_phase : bool or None
        Whether prepared transactions come when they are prepared (PostgreSQL 15 and newer). None
        means: as the slot was made. A slot that was once read with True stays so, and False is
        refused.
    binary : bool
        Whether values come in binary format, if their types have one (PostgreSQL 14 and newer).
    messages : bool
        Whether logical messages (`pg_logical_emit_message`) come too (PostgreSQL 14 and newer).
    origin : {None, "any", "none"}
        With "none", only changes come that were made on this server itself, and not replicated to
        it (PostgreSQL 16 and newer).
    start_lsn : int
        Where to go on: the end LSN of the last transaction that is durable. By default it is the
        LSN up to which the slot was acknowledged. With `two_phase`, frames come from that LSN on in
        any case.
    start_timeline : int
        The stream's `timeline` when that transaction came, if it was stored with the LSN. A server
        on whose timeline that transaction did not happen is refused then.
    on_idle : callable
        For programs that store their position with their data. `transactions` calls it with an LSN,
        once a second at most, while the server's log moves on without a change for the slot: store
        that LSN as the position. Only then it is acknowledged. Without it such LSNs are
        acknowledged at once, and a position that was stored before is behind the slot; but if
        `start_lsn` is given they are not acknowledged at all, and the server keeps its log until
        the next transaction.
    silence_timeout : float
        Seconds after which the connection to a server that does not answer is given up. By default
        twice the server's `wal_sender_timeout`; a server may be silent for half of that time while
        it decodes a large transaction.
    retry_for : float
        Seconds for which connecting is tried again, if the error may pass. By default a connection
        that `transactions` has lost is tried again without end, and the first one, here, is not.
    max_memory, spill_directory, prepared, unknown_prepared
        See :class:`pgoutput_fast.transactions.Assembler`, which makes the transactions.
        `unknown_prepared` is by default "empty" if the slot is made by this call, and "error"
        otherwise.
    policies, registry, target, tables, columns, fill_unchanged
        See :class:`pgoutput_fast.ColumnarDecoder`; these are for the columns and values of
        transactions.
    **keywords
        Parameters of libpq by name, which override those of `dsn`: ``host="…",
        sslmode="verify-full"``.

    Raises
    ------
    RetryableError
        The server can't be reached now, or the slot is in use; and this has not passed within
        `retry_for`.
    PgOutputError
        The server refuses, or does not know an option; there is no such slot or publication; the
        slot is invalidated, or is beyond `start_lsn`, so that changes are lost; or the server's log
        does not go as far as `start_lsn`. No message has the password.
    TypeError
        An argument is of another type.
    """
    options = StreamOptions(
        publications,
        protocol=protocol,
        streaming=streaming,
        two_phase=two_phase,
        binary=binary,
        messages=messages,
        origin=origin,
    )
    for name, value in (("create_slot", create_slot), ("temporary", temporary)):
        if type(value) is not bool:
            raise TypeError(f"{name} must be a bool, not {type(value).__name__}")
    check_seconds(silence_timeout=silence_timeout, retry_for=retry_for)
    _check_position(start_lsn, start_timeline, on_idle, temporary=temporary)
    assembling = {
        "max_memory": max_memory,
        "spill_directory": spill_directory,
        "prepared": prepared,
        "policies": policies,
        "registry": registry,
        "target": target,
        "tables": tables,
        "columns": columns,
        "fill_unchanged": fill_unchanged,
    }
    check_assembling(assembling, unknown_prepared)
    source = Source(
        ConnectionParameters(dsn, keywords),
        slot,
        options,
        create_slot=create_slot,
        temporary=temporary,
        advice=_BEYOND_ADVICE,
    )
    started = first_connection(lambda: source.start(start_lsn, start_timeline), retry_for)
    receiver = Receiver(started.connection, started.confirmed, silence_timeout)
    assembling["encoding"] = started.connection.settings["client_encoding"]
    assembling["unknown_prepared"] = unknown_prepared or ("empty" if started.made_slot else "error")
    link = Link(
        receiver,
        started.protocol,
        source,
        silence_timeout=silence_timeout,
        retry_for=retry_for,
    )
    keeps = start_lsn is not None
    return ReplicationStream(link, started.position, assembling, on_idle, keeps=keeps)
