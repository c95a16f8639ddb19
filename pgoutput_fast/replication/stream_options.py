"""The options of a stream, and what START_REPLICATION is given for them on a server's version."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from ..connections import check_publication_names
from ..errors import PgOutputError

Protocol = Literal["auto"] | int
Streaming = Literal["on", "parallel"] | bool

_NEWEST_PROTOCOL = 4


class Negotiated(NamedTuple):
    """The options for a server of a certain version.

    Fields: protocol (the version of the protocol), two_phase, options (those of START_REPLICATION,
    name to value).
    """

    protocol: int
    two_phase: bool
    options: dict[str, str]


class StreamOptions:
    """Which changes a stream brings, and how.

    The arguments are those of :func:`pgoutput_fast.replication.connect`.

    Raises
    ------
    PgOutputError, TypeError
        An argument is not allowed, or has a wrong type.
    """

    def __init__(
        self,
        publications: Sequence[str],
        *,
        protocol: Protocol = "auto",
        streaming: Streaming = True,
        two_phase: bool | None = False,
        binary: bool = False,
        messages: bool = False,
        origin: str | None = None,
    ) -> None:
        check_publication_names(publications)
        if protocol != "auto" and (
            type(protocol) is not int or not 1 <= protocol <= _NEWEST_PROTOCOL
        ):
            raise PgOutputError(f"protocol={protocol!r}: expected 'auto', or 1 to 4")
        if type(streaming) is not bool and streaming not in ("on", "parallel"):
            raise PgOutputError(f"streaming={streaming!r}: expected a bool, 'on' or 'parallel'")
        if two_phase is not None and type(two_phase) is not bool:
            raise TypeError(f"two_phase must be a bool or None, not {type(two_phase).__name__}")
        for name, value in (("binary", binary), ("messages", messages)):
            if type(value) is not bool:
                raise TypeError(f"{name} must be a bool, not {type(value).__name__}")
        if origin not in (None, "any", "none"):
            raise PgOutputError(f"origin={origin!r}: expected None, 'any' or 'none'")
        self.publications = publications
        self._protocol = protocol
        self._streaming = streaming
        self._two_phase = two_phase
        self._binary = binary
        self._messages = messages
        self._origin = origin

    def negotiate(self, server_version: int, *, marked: bool = False) -> Negotiated:
        """Choose the options for a server.

        Parameters
        ----------
        server_version : int
            The server's version as libpq gives it, such as 180004.
        marked : bool
            Whether the slot is marked two_phase.

        Raises
        ------
        PgOutputError
            The server does not know an option, or the options exclude each other or the slot.
        """
        best = best_protocol(server_version)
        protocol = best if self._protocol == "auto" else self._protocol
        if protocol > best:
            raise _too_old(f"protocol={protocol}", 12 + protocol, server_version)
        options = {
            "proto_version": str(protocol),
            "publication_names": publication_names(self.publications),
        }
        streaming = self._streaming_of(protocol, server_version)
        if streaming:
            options["streaming"] = streaming
        two_phase = self._two_phase_of(protocol, server_version, marked=marked)
        if two_phase:
            options["two_phase"] = "on"
        for name, wanted in (("binary", self._binary), ("messages", self._messages)):
            if wanted:
                if server_version < 140000:
                    raise _too_old(f"{name}=True", 14, server_version)
                options[name] = "true"
        if self._origin is not None:
            if server_version < 160000:
                raise _too_old(f"origin={self._origin!r}", 16, server_version)
            options["origin"] = self._origin
        return Negotiated(protocol, two_phase, options)

    def stop_streaming(self) -> None:
        """Have each transaction come whole from the next stream on."""
        self._streaming = False

    @property
    def makes_two_phase(self) -> bool:
        """Whether a slot that is made for the stream is marked two_phase."""
        return bool(self._two_phase)

    def _streaming_of(self, protocol: int, server_version: int) -> str | None:
        """The value of the option streaming; None if transactions come whole."""
        wanted = self._streaming
        if wanted is True:
            return "parallel" if protocol >= 4 else "on" if protocol >= 2 else None
        needed = {"on": 2, "parallel": 4}.get(wanted or "", 0)
        if needed > protocol:
            if needed > best_protocol(server_version):
                raise _too_old(f"streaming={wanted!r}", 12 + needed, server_version)
            raise PgOutputError(
                f"streaming={wanted!r} needs protocol={needed}, and protocol={protocol} was given"
            )
        return wanted or None

    def _two_phase_of(self, protocol: int, server_version: int, *, marked: bool) -> bool:
        # PostgreSQL 14 has such slots, but its pgoutput does not know prepared transactions.
        marked = marked and server_version >= 150000
        if self._two_phase is False and marked:
            raise PgOutputError(
                "the slot is marked two_phase, which stays: the server sends prepared transactions "
                "when they are prepared. Give two_phase=True, or None for what the slot is; or "
                "another slot"
            )
        wanted = marked if self._two_phase is None else self._two_phase
        if wanted and protocol < 3:
            if server_version < 150000:
                raise _too_old("two_phase=True", 15, server_version)
            raise PgOutputError(
                f"prepared transactions need protocol=3, and protocol={protocol} was given"
            )
        return wanted


def best_protocol(server_version: int) -> int:
    """The newest protocol version that a server knows."""
    return min(max(server_version // 10000 - 12, 1), _NEWEST_PROTOCOL)


def publication_names(publications: Iterable[str]) -> str:
    """The value of the option publication_names: quoted identifiers with commas between."""
    return ",".join('"' + name.replace('"', '""') + '"' for name in publications)


def _too_old(what: str, needed: int, server_version: int) -> PgOutputError:
    found = f"{server_version // 10000}.{server_version % 10000}"
    return PgOutputError(f"{what} needs PostgreSQL {needed} or newer, and the server is {found}")


def check_seconds(**given: object) -> None:
    """Refuse arguments that are neither None nor a number of seconds above 0.

    Raises
    ------
    PgOutputError
        One is something else.
    """
    for name, seconds in given.items():
        if seconds is not None and (type(seconds) not in (int, float) or not seconds > 0):  # type: ignore[operator]
            raise PgOutputError(f"{name}={seconds!r}: expected a number of seconds")
