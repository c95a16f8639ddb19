"""The functions `connect` and `connect_async`, which begin a stream of a slot's changes."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, ParamSpec, TypeVar

from ..capture_options import StreamOptions
from ..connections import ConnectionParameters, check_publication_names
from ..errors import PgOutputError
from ..lsn import check_lsn
from ..options import arguments_of, options_of
from ..policies import Policies
from ..types import TypeRegistry
from .async_stream import AsyncReplicationStream
from .link import Link, first_connection
from .receiver import Receiver
from .source import Source
from .stream import ReplicationStream

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def _check_assembling(assembling: Mapping[str, Any]) -> None:
    """Check the arguments of an Assembler before a connection is made.

    If all have their defaults, do nothing: an Assembler loads NumPy, which a consumer of frames
    does not need.

    Raises
    ------
    PgOutputError, TypeError
        See :class:`pgoutput_fast.transactions.Assembler`.
    """
    defaults = inspect.signature(connect).parameters
    if any(
        value is not defaults[name].default
        for name, value in assembling.items()
        if name in defaults
    ):
        from ..transactions import Assembler

        Assembler(**assembling)


_BEYOND_ADVICE = (
    ". If only this program reads the slot, and without `on_idle`, no change is lost: leave out "
    "`start_lsn` to continue"
)


def _check_position(
    start_lsn: object, start_timeline: object, on_idle: object, *, temporary: bool
) -> None:
    """Check the arguments that say where to continue.

    Raises
    ------
    PgOutputError, TypeError
        See `connect`.
    """
    if start_timeline is not None and type(start_timeline) is not int:
        raise TypeError(f"start_timeline must be an int, not {type(start_timeline).__name__}")
    if start_lsn is not None:
        check_lsn("start_lsn", start_lsn)
        if temporary:
            raise PgOutputError(
                "a temporary slot always begins now", code="bad_option", parameter="start_lsn"
            )
    if on_idle is not None and not callable(on_idle):
        raise TypeError(f"on_idle must be callable, not {type(on_idle).__name__}")


def connect(
    dsn: str | ConnectionParameters | None = None,
    *,
    slot: str,
    publications: Sequence[str],
    create_slot: bool = False,
    temporary: bool = False,
    start_lsn: int | None = None,
    start_timeline: int | None = None,
    on_idle: Callable[[int], object] | None = None,
    spill_directory: str | os.PathLike[str] | None = None,
    prepared: Literal["commit", "prepare"] = "commit",
    policies: Policies | None = None,
    registry: TypeRegistry | None = None,
    target: Literal["arrow", "spark", "portable"] = "arrow",
    tables: str | Iterable[str] | None = None,
    columns: Iterable[str] | Mapping[str, Iterable[str]] | None = None,
    fill_unchanged: bool = False,
    stream_options: StreamOptions | None = None,
    **keywords: object,
) -> ReplicationStream:
    """Connect, and begin a stream of the changes of a slot.

    ``docs/how-to/stream-in-python.md`` says what the stream returns, and when to acknowledge.

    Parameters
    ----------
    dsn : str, optional
        Connection string of libpq, or URL. Missing parameters come from libpq's environment
        variables (PGHOST …), service files and password files.
    slot : str
        The replication slot.
    publications : list or tuple of str
        Names of publications, without quotes.
    create_slot : bool
        Make the slot if it does not exist.
    temporary : bool
        Make a slot that the server drops with the connection. The name must be new.
    start_lsn : int
        Where to continue: the end LSN of the last durable transaction. The default is the LSN up to
        which the slot was acknowledged. With `two_phase`, frames always come from the default LSN
        on; `transactions` still begins at `start_lsn`.
    start_timeline : int
        The stream's `timeline` when the transaction of `start_lsn` came, if you stored it. The call
        refuses a server whose history does not have that transaction.
    on_idle : callable
        For programs that store their position with their data. If the server's log grows without a
        change for the slot, `transactions` calls this function with an LSN, at most once a second.
        Store that LSN as the position: the stream acknowledges it after the call. Without this
        function, the stream acknowledges such LSNs at once, and your stored position is then behind
        the slot. With `start_lsn` and without this function, the stream does not acknowledge them,
        and the server keeps its log until the next transaction.
    spill_directory, prepared
        See :class:`pgoutput_fast.transactions.Assembler`.
    policies, registry, target, tables, columns, fill_unchanged
        How transactions become columns and values: see :class:`pgoutput_fast.ColumnarDecoder`.
    stream_options : StreamOptions, optional
        How to read the slot.
    **keywords
        Fields of :class:`StreamOptions`, which override those of `stream_options`. Also parameters
        of libpq by name, which override those of `dsn`: ``host="…", sslmode="verify-full"``.

    Raises
    ------
    RetryableError
        The server can't be reached now, or the slot is in use, and this did not change within
        `retry_for`.
    PgOutputError
        The server refuses, or does not know an option. There is no such slot or publication. The
        slot is invalidated, or is beyond `start_lsn`, so that changes are lost. The server's log
        does not reach `start_lsn`. No message has the password.
    TypeError
        An argument is of another type.
    """
    options = options_of(StreamOptions, stream_options, keywords)
    check_publication_names(publications)
    for name, value in (("create_slot", create_slot), ("temporary", temporary)):
        if type(value) is not bool:
            raise TypeError(f"{name} must be a bool, not {type(value).__name__}")
    _check_position(start_lsn, start_timeline, on_idle, temporary=temporary)
    assembling = {
        "max_memory": options.max_memory,
        "spill_directory": spill_directory,
        "prepared": prepared,
        "policies": policies,
        "registry": registry,
        "target": target,
        "tables": tables,
        "columns": columns,
        "fill_unchanged": fill_unchanged,
    }
    _check_assembling(assembling)
    source = Source(
        ConnectionParameters.of(dsn, keywords, arguments_of(connect, StreamOptions)),
        slot,
        publications,
        options,
        create_slot=create_slot,
        temporary=temporary,
        advice=_BEYOND_ADVICE,
    )
    started = first_connection(lambda: source.start(start_lsn, start_timeline), options.retry_for)
    receiver = Receiver(started.connection, started.confirmed, options.silence_timeout)
    assembling["encoding"] = started.connection.settings["client_encoding"]
    unknown = "empty" if started.made_slot else "error"
    assembling["unknown_prepared"] = options.unknown_prepared or unknown
    link = Link(
        receiver,
        started.protocol,
        source,
        silence_timeout=options.silence_timeout,
        retry_for=options.retry_for,
    )
    keeps = start_lsn is not None
    return ReplicationStream(link, started.position, assembling, on_idle, keeps=keeps)


def _with_arguments_of(
    other: Callable[_Arguments, object],
) -> Callable[[Callable[..., _Result]], Callable[_Arguments, _Result]]:
    """Give a function the arguments of another one, for type checkers and `inspect.signature`."""
    return functools.wraps(other, assigned=(), updated=())


@_with_arguments_of(connect)
def connect_async(*arguments: Any, **keywords: Any) -> AsyncReplicationStream:
    """Connect, and begin a stream of the changes of a slot, for asyncio.

    The arguments and errors are those of :func:`connect`. Use the result in ``async with``, which
    closes the stream, or await it. ``docs/how-to/stream-in-python.md`` has examples.

    `on_idle` may be a coroutine function. The task that waits for a transaction calls it. If a task
    is cancelled while it connects, a thread finishes the attempt, and closes its connection.
    """
    stream = functools.partial(connect, *arguments, **keywords)
    return AsyncReplicationStream(stream, keywords.get("on_idle"))
