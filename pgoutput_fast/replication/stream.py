"""A stream of a slot's changes: frames as they come, acknowledged by who made them durable."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import PgOutputError
from ..lsn import format_lsn
from .link import Link
from .receiver import Taken
from .walsender import ReplicationConnection

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterator, Mapping

    from typing_extensions import Self

    from ..transactions import Transaction
    from .delivery import Delivery


class Received(NamedTuple):
    """One frame with the header of its XLogData, as iteration over a stream gives it."""

    lsn: int
    """Where the change begins in the server's log; 0 for Type and Relation, which have no place
    there."""
    wal_end: int
    """For pgoutput the same as `lsn`."""
    send_time: int
    """Microseconds since 2000-01-01 UTC, by the server's clock."""
    frame: bytes
    """One message, for :class:`~pgoutput_fast.Decoder` or
    :class:`~pgoutput_fast.ColumnarDecoder`."""


class Batch(NamedTuple):
    """What came together, as `ReplicationStream.receive` gives it."""

    frames: list[tuple[int, int, int, bytes]]
    """Plain tuples with the fields of `Received`: naming them would cost a quarter of receiving."""
    keepalive_lsn: int | None
    """The server has nothing before this LSN that it still has to send; None if it did not say so
    after the last frame. It may be acknowledged while no transaction is open and nothing waits to
    be made durable."""


class ReplicationStream:
    """What a server sends of a slot, in its order: whole transactions, or frames.

    Made by `connect`. Iterate over `transactions`; or for frames over the stream itself, or call
    `receive`. After what was taken is durable, call `acknowledge`. Close it, or use it as a context
    manager. Iteration raises what `receive` raises. ``docs/replication.md`` says more.
    """

    def __init__(
        self, link: Link, position: int = 0, assembling: Mapping[str, Any] | None = None
    ) -> None:
        self._link = link
        self._position = position
        self._assembling = assembling or {}
        self._gave_frames = False
        self._delivery: Delivery | None = None
        self._left_over: deque[tuple[int, int, int, bytes]] = deque()

    def __repr__(self) -> str:
        return f"<ReplicationStream of protocol {self.protocol} on {self.connection!r}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Received]:
        """Frames until the stream is closed.

        What an iteration that is left has not given comes with the next one, or `receive`.
        """
        while True:
            if not self._left_over:
                batch = self.receive()
                if batch is None:
                    return
                self._left_over.extend(batch.frames)
            while self._left_over:
                yield Received._make(self._left_over.popleft())

    @property
    def connection(self) -> ReplicationConnection:
        """The connection on which the stream comes."""
        return self._link.receiver.connection

    @property
    def protocol(self) -> int:
        """The version of the protocol that is spoken."""
        return self._link.protocol

    @property
    def timeline(self) -> int:
        """The server's timeline: another one after a standby was promoted or a backup restored."""
        return self.connection.timeline

    @property
    def acknowledged_lsn(self) -> int:
        """The greatest LSN that was acknowledged."""
        return self._link.receiver.acknowledged

    def transactions(
        self,
        stop_at: int | None = None,
        idle_timeout: float | None = None,
        stop: threading.Event | None = None,
    ) -> Iterator[Transaction]:
        """Whole transactions, in the order of their commits.

        A connection that is lost is made again, and the stream goes on after the last transaction
        that was acknowledged; none is given twice. What the server has nothing to send of is
        acknowledged by itself, once everything that was given is. An iteration that has ended may
        be followed by another one, which goes on where it has ended.

        Parameters
        ----------
        stop_at : int, optional
            An LSN: end after the last transaction that was committed before it.
        idle_timeout : float, optional
            Seconds: end when nothing has come for so long.
        stop : threading.Event, optional
            End soon after it is set, by a signal's handler, say; between two transactions.

        Raises
        ------
        RetryableError
            The connection is lost, and was not made again within `connect`'s `retry_for`.
        PgOutputError
            It can't be gone on, and the error says why and what to do; or frames were received from
            this stream before.
        TypeError
            An argument is of another type.
        """
        if stop_at is not None:
            if type(stop_at) is not int:
                raise TypeError(f"stop_at must be an int, an LSN, not {type(stop_at).__name__}")
            format_lsn(stop_at)  # refuses what is out of range
        if idle_timeout is not None and not isinstance(idle_timeout, (int, float)):
            raise TypeError(f"idle_timeout must be a number, not {type(idle_timeout).__name__}")
        if stop is not None and not callable(getattr(stop, "is_set", None)):
            raise TypeError(f"stop must be a threading.Event, not {type(stop).__name__}")
        if self._gave_frames:
            raise PgOutputError(
                "frames were received from this stream already: their transactions would be "
                "missing; connect again"
            )
        from ..transactions import Assembler
        from .delivery import Delivery, Until  # loads NumPy, as receiving does not

        if self._delivery is None:
            assembler = Assembler(**self._assembling)
            self._delivery = Delivery(self._link, assembler, self._position)
        return self._delivery.transactions(Until(stop_at, idle_timeout, stop))

    def receive(self, timeout: float | None = None) -> Batch | None:
        """Take what has come.

        Parameters
        ----------
        timeout : float or None
            Seconds; None waits as long as it takes.

        Returns
        -------
        Batch or None
            An empty one after the timeout; None once the stream was closed.

        Raises
        ------
        RetryableError
            The connection is lost, or the server has ended the stream, as one that restarts does:
            connect again, what was not acknowledged comes again.
        PgOutputError
            The server has ended the stream with an error that stays, or an earlier call was
            interrupted.
        """
        if self._delivery is not None:
            raise PgOutputError("the frames of this stream go into its transactions")
        if self._left_over:
            frames = list(self._left_over)
            self._left_over.clear()
            return Batch(frames, None)
        taken = Taken()
        if not self._link.receiver.receive(taken, timeout):
            return None
        self._gave_frames = self._gave_frames or bool(taken.frames)
        return Batch(taken.frames, taken.keepalive)

    def acknowledge(self, done: int | Transaction) -> None:
        """Tell the server that everything up to a position is durable: it won't send it again.

        Give a transaction, or its end LSN (that of a Commit); or a batch's `keepalive_lsn` while no
        transaction is open and nothing waits to be made durable. To give one again, or an earlier
        one, does no harm. The server is told within half a second, and when the stream is closed.

        Parameters
        ----------
        done : int or Transaction
            An LSN, or a transaction that this stream gave.

        Raises
        ------
        PgOutputError
            The LSN is beyond what was received, or out of an LSN's range.
        TypeError
            It is something else.
        """
        lsn = done if type(done) is int else _end_of(done)
        text, receiver = format_lsn(lsn), self._link.receiver
        limit = receiver.received
        if self._delivery is not None:
            self._delivery.check(lsn)
        elif lsn > limit:
            raise PgOutputError(
                f"{text} can't be acknowledged: the stream has received nothing beyond "
                f"{format_lsn(limit)}. Give the end LSN of a transaction (its `end_lsn`), "
                f"not a time or a number of your own: the server forgets all that is before it"
            )
        receiver.acknowledged = max(receiver.acknowledged, lsn)

    def ask_for_keepalive(self) -> None:
        """Ask the server how far it is: a keepalive comes soon, also when nothing happens."""
        self._link.receiver.ask_for_keepalive()

    def close(self) -> None:
        """Tell the server the last position, and end the connection.

        It does nothing in a process that was forked: the connection is its parent's.
        """
        self._link.close()


def _end_of(done: object) -> int:
    """The end LSN of a transaction.

    Raises
    ------
    TypeError
        It is no transaction.
    """
    from ..transactions import Transaction  # loads NumPy

    if not isinstance(done, Transaction):
        raise TypeError(
            f"a Transaction or an int, its end LSN, can be acknowledged, not {type(done).__name__}"
        )
    return done.end_lsn
