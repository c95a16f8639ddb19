"""Begin a stream: check or make its slot, and check the position from which it continues."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NamedTuple

from ..connections import ConnectionParameters, new_slot_advice
from ..errors import Argument, PgOutputError, RetryableError
from ..lsn import format_lsn
from .negotiation import negotiate
from .walsender import ReplicationConnection

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..capture_options import StreamOptions


class Started(NamedTuple):
    """A connection that has become a stream."""

    connection: ReplicationConnection
    position: int
    """The consumer gets the transactions that were committed at this LSN or later."""
    confirmed: int
    """The LSN up to which everything may be acknowledged when the stream begins."""
    protocol: int
    made_slot: bool
    """Whether the slot is new, so that no earlier stream has read it."""


class Source:
    """A slot of a server, and the options with which to read it.

    Parameters
    ----------
    parameters : ConnectionParameters
    slot : str
    publications : sequence of str
    options : StreamOptions
    create_slot, temporary : bool
        See :func:`pgoutput_fast.replication.connect`.
    advice : str
        More text for the hint of the error that the slot is beyond the position.
    compare : callable, optional
        Called with a connection and a position if the slot stands before that position. It raises
        an error if the slot would send other transactions again than those that came before.
    """

    def __init__(
        self,
        parameters: ConnectionParameters,
        slot: str,
        publications: Sequence[str],
        options: StreamOptions,
        *,
        create_slot: bool = False,
        temporary: bool = False,
        advice: str = "",
        compare: Callable[[ReplicationConnection, int], None] | None = None,
    ) -> None:
        self.slot = slot
        self._parameters = parameters
        self._publications = publications
        self._options = options
        self._create_slot = create_slot
        self._temporary = temporary
        self._advice = advice
        self._compare = compare
        self._system: str | None = None
        self._streams = False  # whether the last stream had the option streaming

    def start(
        self, position: int | None = None, timeline: int | None = None, received: int = 0
    ) -> Started:
        """Connect, check the slot or make it, and begin to stream.

        Parameters
        ----------
        position : int, optional
            The LSN from which to continue. The default is where the slot stands.
        timeline : int, optional
            The server's timeline when it sent the changes before `position`.
        received : int
            The LSN up to which frames were received before, if greater than `position`.

        Raises
        ------
        PgOutputError
            See :func:`pgoutput_fast.replication.connect`.
        """
        connection = ReplicationConnection(self._parameters)
        try:
            self._check_system(connection)
            connection.check_publications(self._publications)
            version = connection.server_version
            negotiate(
                self._options, self._publications, version
            )  # refuses options that the server does not know
            if connection.in_recovery and version < 160000:
                raise RetryableError(
                    "the server is a standby, where logical decoding needs PostgreSQL 16 or newer; "
                    "it works once the standby is promoted",
                    code="standby",
                )
            started, begin, options = self._plan_stream(connection, position, timeline, received)

            def retry_lsn() -> int:
                nonlocal started
                started, begin, _ = self._plan_stream(connection, position, timeline, received)
                return begin

            connection.start(self.slot, begin, options, retry_lsn)
            self._streams = "streaming" in options
        except BaseException:
            connection.close()
            raise
        # If somebody drops the slot later, do not make it again: changes would be missing.
        self._create_slot = False
        return started

    def stop_streaming(self) -> bool:
        """Turn the option streaming off for later streams; False if this changes nothing.

        A temporary slot ended with its connection, so it has no later streams.
        """
        if not self._streams or self._temporary:
            return False
        self._options = dataclasses.replace(self._options, streaming=False)
        return True

    def check(self, position: int, timeline: int | None) -> None:
        """Check whether a stream could continue at a position, without beginning it.

        Raises
        ------
        PgOutputError
            See `start`.
        """
        with ReplicationConnection(self._parameters) as connection:
            self._check_system(connection)
            self._plan_stream(connection, position, timeline, 0)

    def _plan_stream(
        self,
        connection: ReplicationConnection,
        position: int | None,
        timeline: int | None,
        received: int,
    ) -> tuple[Started, int, dict[str, str]]:
        """Check or make the slot, and check the position.

        Returns
        -------
        (Started, int, dict)
            The stream as it would begin now, the LSN for START_REPLICATION, and its options.
        """
        confirmed, marked, is_new_slot = self._take_slot(connection)
        negotiated = negotiate(
            self._options, self._publications, connection.server_version, marked=marked
        )
        if position is None:
            position = confirmed
        else:
            check_position(
                connection, self.slot, confirmed, position, timeline, received, self._advice
            )
            if confirmed < position and self._compare is not None:
                # On a connection of its own: if the server's decoding fails there, PostgreSQL 14
                # would send no Relations on that connection any more.
                with ReplicationConnection(self._parameters) as comparing:
                    self._compare(comparing, position)
        # With two_phase, begin where the slot stands: a transaction may have been prepared before
        # the position and be committed after it. The assembler drops transactions that were
        # committed before the position.
        begin, durable = (0, confirmed) if negotiated.two_phase else (position, position)
        started = Started(connection, position, durable, negotiated.protocol, is_new_slot)
        return started, begin, negotiated.options

    def again(self, position: int, timeline: int, received: int) -> Started:
        """Begin again after a connection was lost; see `start` for the arguments.

        Raises
        ------
        PgOutputError
            See `start`. Also if the slot was temporary, as it ended with the connection.
        """
        if self._temporary:
            raise PgOutputError(
                f"the connection is lost, and with it the temporary slot {self.slot!r}: changes "
                f"that did not arrive yet are lost, too",
                code="changes_missing",
                hint="Use a permanent slot, so that a stream can continue after a failure",
            )
        return self.start(position, timeline, received)

    def _check_system(self, connection: ReplicationConnection) -> None:
        if self._system is None:
            self._system = connection.system_identifier
        elif connection.system_identifier != self._system:
            raise PgOutputError(
                f"this is another server: its system identifier is "
                f"{connection.system_identifier}, and was {self._system} before. An LSN of one "
                f"server means nothing on the other",
                code="another_history",
                hint=new_slot_advice(),
            )

    def _take_slot(self, connection: ReplicationConnection) -> tuple[int, bool, bool]:
        """Read the state of the slot, or make it.

        Returns
        -------
        (int, bool, bool)
            The LSN where the slot stands, whether it is marked two_phase, and whether it was made.
        """
        name, two_phase = self.slot, bool(self._options.two_phase)
        state = None if self._temporary else connection.slot(name)
        if state is not None:
            return state.confirmed_flush_lsn or 0, state.two_phase, False
        if not self._temporary and not self._create_slot:
            raise missing_slot(name)
        created_slot = connection.make_slot(name, temporary=self._temporary, two_phase=two_phase)
        return created_slot.lsn, two_phase, True


def missing_slot(name: str) -> PgOutputError:
    """Make the error for a slot that does not exist."""
    return PgOutputError(
        f"no slot {name!r} on the server (SQLSTATE 42704)", code="no_slot",
        parameter="slot",
        hint=("Create it with ", Argument("create_slot", True), (" or SELECT "
              f"pg_create_logical_replication_slot('{name}', 'pgoutput'). If the slot was "
              "dropped, changes are lost: take new snapshots of all tables")),
    )  # fmt: skip


def check_position(
    connection: ReplicationConnection,
    slot: str,
    confirmed: int,
    position: int,
    timeline: int | None = None,
    received: int = 0,
    advice: str = "",
) -> None:
    """Refuse a position from which the server can't continue.

    Parameters
    ----------
    confirmed : int
        The LSN up to which the slot was acknowledged.
    position : int
        The LSN from which to continue.
    timeline : int, optional
        The server's timeline when it sent the changes before `position`.
    received : int
        The LSN up to which frames were received before, if greater than `position`.
    advice : str
        See `Source`.

    Raises
    ------
    RetryableError
        The server is a standby that has not received the log up to the position.
    PgOutputError
        The slot is beyond `position`, so that changes are lost. Or the server's log ends before the
        position, or belongs to another timeline: an earlier state was restored, or a standby that
        lagged was promoted.
    """
    if confirmed > position:
        # The server itself would begin later, without an error.
        raise PgOutputError(
            f"slot {slot!r} is at {format_lsn(confirmed)}, but the stream has to continue at "
            f"{format_lsn(position)}: the changes between are lost",
            code="changes_missing",
            hint=f"{new_slot_advice(slot)}{advice}",
        )
    received = max(position, received)
    if timeline is not None and timeline != connection.timeline:
        fork = connection.end_of_timeline(timeline)
        if fork is None or received > fork:
            where = "is no branch of" if fork is None else f"branched at {format_lsn(fork)} off"
            raise PgOutputError(
                f"the server is on timeline {connection.timeline} now, which {where} timeline "
                f"{timeline}: some changes received up to {format_lsn(received)} did not happen "
                f"there. A standby that lagged was promoted, or an earlier state was restored",
                code="another_history",
                hint=new_slot_advice(slot),
            )
    if received > connection.end_lsn:
        end = format_lsn(connection.end_lsn)
        if connection.in_recovery:
            raise RetryableError(
                f"the standby's log ends at {end}, but the stream has to continue at "
                f"{format_lsn(received)}: the standby has not received that yet",
                code="standby",
            )
        raise PgOutputError(
            f"the server's log ends at {end}, but the stream has to continue at "
            f"{format_lsn(received)}: an earlier state of the server was restored, or this is "
            f"another server",
            code="another_history",
            hint=new_slot_advice(slot),
        )
