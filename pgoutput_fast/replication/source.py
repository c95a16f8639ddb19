"""Where a stream comes from, and how it is begun: the first time, and again after a failure."""

from __future__ import annotations

from typing import NamedTuple

from ..connections import ConnectionParameters, RetryableError
from ..errors import PgOutputError
from ..lsn import format_lsn
from .stream_options import StreamOptions
from .walsender import ReplicationConnection


class Started(NamedTuple):
    """A connection that has become a stream."""

    connection: ReplicationConnection
    position: int
    """The LSN from which on the consumer gets what was committed."""
    confirmed: int
    """What may be acknowledged from the beginning on."""
    protocol: int
    made_slot: bool
    """Whether the slot was made for it, so that nothing was ever sent of it before."""


class Source:
    """A slot of a server, and what is asked of it.

    Parameters
    ----------
    parameters : ConnectionParameters
    slot : str
    options : StreamOptions
    create_slot, temporary : bool
        As of :func:`pgoutput_fast.replication.connect`.
    """

    def __init__(
        self,
        parameters: ConnectionParameters,
        slot: str,
        options: StreamOptions,
        *,
        create_slot: bool = False,
        temporary: bool = False,
    ) -> None:
        self.slot = slot
        self._parameters = parameters
        self._options = options
        self._create_slot = create_slot
        self._temporary = temporary
        self._system: str | None = None

    def start(
        self, position: int | None = None, timeline: int | None = None, received: int = 0
    ) -> Started:
        """Connect, look at the slot, make it if that is wanted, and begin to stream.

        Parameters
        ----------
        position : int, optional
            The LSN where to go on; by default where the slot stands.
        timeline : int, optional
            The server's timeline when it sent what is before `position`.
        received : int
            The end of what was received before, if that is beyond `position`.

        Raises
        ------
        PgOutputError
            As of :func:`pgoutput_fast.replication.connect`.
        """
        connection = ReplicationConnection(self._parameters)
        try:
            self._check_system(connection)
            connection.check_publications(self._options.publications)
            version = connection.server_version
            self._options.negotiate(version)  # what it does not know is refused before all else
            if connection.in_recovery and version < 160000:
                raise RetryableError(
                    "the server is a standby, on which logical decoding needs PostgreSQL 16; it "
                    "works once the standby is promoted"
                )
            confirmed, marked, made = self._take_slot(connection)
            negotiated = self._options.negotiate(version, marked=marked)
            if position is None:
                position = confirmed
            else:
                check_position(connection, self.slot, confirmed, position, timeline, received)
            # With prepared transactions it begins where the slot stands: a prepared one that is not
            # committed may be before the position. What was committed before is left out here.
            begin = 0 if negotiated.two_phase else position
            connection.start(self.slot, begin, negotiated.options)
        except BaseException:
            connection.close()
            raise
        self._create_slot = False  # one that is gone is not made again: what it brought is missing
        return Started(
            connection,
            position,
            confirmed if negotiated.two_phase else position,
            negotiated.protocol,
            made,
        )

    def again(self, position: int, timeline: int, received: int) -> Started:
        """Begin again after a connection was lost; the arguments are those of `start`.

        Raises
        ------
        PgOutputError
            As of `start`; or the slot has gone with the connection.
        """
        if self._temporary:
            raise PgOutputError(
                f"the connection is lost, and with it the temporary slot {self.slot!r}: what it "
                f"has not brought is lost. Use a slot that stays to go on after a failure"
            )
        return self.start(position, timeline, received)

    def _check_system(self, connection: ReplicationConnection) -> None:
        if self._system is None:
            self._system = connection.system_identifier
        elif connection.system_identifier != self._system:
            raise PgOutputError(
                f"the server is another one now: its system identifier is "
                f"{connection.system_identifier}, and was {self._system}. The positions of one "
                f"mean nothing to the other: make a new slot, and copy the tables anew"
            )

    def _take_slot(self, connection: ReplicationConnection) -> tuple[int, bool, bool]:
        """Look at the slot, or make it.

        Returns
        -------
        (int, bool, bool)
            Where it stands, whether it is marked two_phase, and whether it was made.
        """
        name, two_phase = self.slot, self._options.makes_two_phase
        state = None if self._temporary else connection.slot(name)
        if state is not None:
            return state.confirmed_flush_lsn or 0, state.two_phase, False
        if not self._temporary and not self._create_slot:
            raise missing_slot(name)
        made = connection.make_slot(name, temporary=self._temporary, two_phase=two_phase)
        return made.lsn, two_phase, True


def missing_slot(name: str) -> PgOutputError:
    """The error for a slot that is not there."""
    return PgOutputError(
        f"no slot {name!r} on the server (SQLSTATE 42704); create it with create_slot=True or "
        f"SELECT pg_create_logical_replication_slot('{name}', 'pgoutput'); if there was one, what "
        f"was committed since then is lost to it: copy the tables anew"
    )


def check_position(
    connection: ReplicationConnection,
    slot: str,
    confirmed: int,
    position: int,
    timeline: int | None = None,
    received: int = 0,
) -> None:
    """Refuse a position from which the server can't go on.

    Parameters
    ----------
    confirmed : int
        Where the slot stands.
    position : int
        Where to go on.
    timeline : int, optional
        The server's timeline when it sent what is before `position`.
    received : int
        The end of what was received before, if that is beyond `position`.

    Raises
    ------
    PgOutputError
        What was committed between the two is lost; or the server's log has never come so far, or
        goes another way: it is an earlier state of it, or a standby that lagged.
    """
    if confirmed > position:
        # The server would silently begin later.
        raise PgOutputError(
            f"slot {slot!r} is at {format_lsn(confirmed)}, beyond {format_lsn(position)} "
            f"where to go on: the changes between them are lost; copy the tables anew"
        )
    received = max(position, received)
    if timeline is not None and timeline != connection.timeline:
        fork = connection.end_of_timeline(timeline)
        if fork is None or received > fork:
            where = "does not come from" if fork is None else f"left at {format_lsn(fork)}"
            raise PgOutputError(
                f"the server is on timeline {connection.timeline} now, which {where} timeline "
                f"{timeline}: what was received up to {format_lsn(received)} did not happen there. "
                f"A standby that lagged was promoted, or an earlier state was restored; make a "
                f"new slot, and copy the tables anew"
            )
    if received > connection.end_lsn:
        end = format_lsn(connection.end_lsn)
        if connection.in_recovery:
            raise RetryableError(
                f"the standby's log ends at {end}, before {format_lsn(received)} where to go on; "
                f"it has not come so far yet"
            )
        raise PgOutputError(
            f"the server's log ends at {end}, before {format_lsn(received)} where to go on: an "
            f"earlier state of it was restored, or this is another server. Make a new slot, and "
            f"copy the tables anew"
        )
