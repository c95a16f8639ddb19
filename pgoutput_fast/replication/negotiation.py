"""Choose the options of START_REPLICATION from a stream's options and the server's version."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ..capture_options import NEWEST_PROTOCOL, Streaming, StreamOptions
from ..errors import Argument, PgOutputError


class Negotiated(NamedTuple):
    """The chosen options.

    Fields: protocol (version of the protocol), two_phase, options (of START_REPLICATION, by name).
    """

    protocol: int
    two_phase: bool
    options: dict[str, str]


def negotiate(
    wanted: StreamOptions, publications: Sequence[str], server_version: int, *, marked: bool = False
) -> Negotiated:
    """Choose the options for a server.

    Parameters
    ----------
    wanted : StreamOptions
    publications : sequence of str
    server_version : int
        The server's version as libpq gives it, such as 180004.
    marked : bool
        Whether the slot is marked two_phase.

    Raises
    ------
    PgOutputError
        The server is too old for an option. Two options exclude each other, or one does not fit the
        slot.
    """
    best = best_protocol(server_version)
    protocol = best if wanted.protocol == "auto" else wanted.protocol
    if protocol > best:
        raise _too_old("protocol", protocol, 12 + protocol, server_version)
    options = {
        "proto_version": str(protocol),
        "publication_names": publication_names(publications),
    }
    streaming = _streaming_of(wanted.streaming, protocol, server_version)
    if streaming:
        options["streaming"] = streaming
    two_phase = _two_phase_of(wanted.two_phase, protocol, server_version, marked=marked)
    if two_phase:
        options["two_phase"] = "on"
    for name, is_wanted in (("binary", wanted.binary), ("messages", wanted.messages)):
        if is_wanted:
            if server_version < 140000:
                raise _too_old(name, True, 14, server_version)
            options[name] = "true"
    if wanted.origin is not None:
        if server_version < 160000:
            raise _too_old("origin", wanted.origin, 16, server_version)
        options["origin"] = wanted.origin
    return Negotiated(protocol, two_phase, options)


def _streaming_of(streaming: Streaming, protocol: int, server_version: int) -> str | None:
    """Return the value of the option streaming; None if transactions come whole."""
    wanted = streaming
    if wanted is True:
        return "parallel" if protocol >= 4 else "on" if protocol >= 2 else None
    needed = {"on": 2, "parallel": 4}.get(wanted or "", 0)
    if needed > protocol:
        if needed > best_protocol(server_version):
            raise _too_old("streaming", wanted, 12 + needed, server_version)
        raise PgOutputError(
            f"{wanted!r} needs version {needed} of the protocol, and {protocol} was given",
            code="bad_option",
            parameter="streaming",
            hint=("Give ", Argument("protocol", needed)),
        )
    return wanted or None


def _two_phase_of(
    two_phase: bool | None, protocol: int, server_version: int, *, marked: bool
) -> bool:
    # PostgreSQL 14 has two_phase slots, but its pgoutput can't send prepared transactions.
    marked = marked and server_version >= 150000
    if two_phase is False and marked:
        raise PgOutputError(
            "the slot was made with two_phase, which can't be turned off: the server sends "
            "prepared transactions when they are prepared",
            code="bad_option",
            parameter="two_phase",
            hint=(
                "Give ",
                Argument("two_phase", True),
                ", or None for the slot's own setting. Or give another slot",
            ),
        )
    wanted = marked if two_phase is None else two_phase
    if wanted and protocol < 3:
        if server_version < 150000:
            raise _too_old("two_phase", True, 15, server_version)
        raise PgOutputError(
            f"prepared transactions need version 3 of the protocol, and {protocol} was given",
            code="bad_option",
            parameter="two_phase",
            hint=("Give ", Argument("protocol", 3)),
        )
    return wanted


def best_protocol(server_version: int) -> int:
    """Return the newest protocol version that a server has."""
    return min(max(server_version // 10000 - 12, 1), NEWEST_PROTOCOL)


def publication_names(publications: Iterable[str]) -> str:
    """Return the value of the option publication_names: quoted identifiers with commas between."""
    return ",".join('"' + name.replace('"', '""') + '"' for name in publications)


def _too_old(name: str, value: object, needed: int, server_version: int) -> PgOutputError:
    version = f"{server_version // 10000}.{server_version % 10000}"
    return PgOutputError(
        f"{value!r} needs PostgreSQL {needed} or newer, and the server is {version}",
        code="not_supported",
        parameter=name,
    )
