"""The stream of a slot's changes: transactions or frames, and their acknowledgement."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from ..connections import NEW_CONNECTION_ADVICE
from ..errors import PgOutputError
from ..lsn import check_lsn, format_lsn
from ..options import seconds
from .link import Link
from .receiver import ReceivedFrames
from .waiter import IDLE_POLL
from .walsender import ReplicationConnection

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterator, Mapping

    from typing_extensions import Self

    from ..transactions import Transaction, TransactionGroup
    from .delivery import Delivery, Until


# Seconds between two calls of `on_idle`.
_IDLE_INTERVAL = 1.0


class Received(NamedTuple):
    """One frame with the header of its XLogData, as iteration over a stream gives it.

    Attributes
    ----------
    lsn : int
        Where the change begins in the server's log; 0 for Type and Relation messages, as they are
        not in the log.
    wal_end : int
        For pgoutput the same as `lsn`.
    send_time : int
        Microseconds since 2000-01-01 UTC, by the server's clock.
    frame : bytes
        One message, for :class:`~pgoutput_fast.Decoder` or
        :class:`~pgoutput_fast.ColumnarDecoder`.
    """

    lsn: int
    wal_end: int
    send_time: int
    frame: bytes


class Batch(NamedTuple):
    """The frames that one call of `ReplicationStream.receive` received.

    Attributes
    ----------
    frames : list of tuple
        Plain tuples with the fields of `Received`. Making a `Received` for each frame would take a
        quarter more time.
    keepalive_lsn : int or None
        The server has sent everything before this LSN. None if no keepalive came after the last
        frame. Acknowledge the LSN only while no transaction is open and all received frames are
        durable.
    """

    frames: list[tuple[int, int, int, bytes]]
    keepalive_lsn: int | None


class ReplicationStream:
    """The changes that a server sends from a slot, in order: whole transactions, or frames.

    `connect` makes a stream. For transactions, iterate over `transactions`. For frames, iterate
    over the stream itself, which raises the errors of `receive`, or call `receive`. Call
    `acknowledge` once the received changes are durable. Close the stream, or use it as a context
    manager. See ``docs/how-to/stream-in-python.md``.
    """

    def __init__(
        self,
        link: Link,
        position: int = 0,
        assembling: Mapping[str, Any] | None = None,
        on_idle: Callable[[int], object] | None = None,
        *,
        keeps: bool = False,
    ) -> None:
        self._link = link
        self._position = position
        self._assembling = assembling or {}
        self._on_idle = on_idle
        self._keeps = keeps  # whether the consumer stores its own position
        self._idle_reported_at = time.monotonic()
        self._gave_frames = False
        self._delivery: Delivery | None = None
        self._left_over: deque[tuple[int, int, int, bytes]] = deque()

    def __repr__(self) -> str:
        closed = "closed " if self._link.is_closed else ""
        return f"<{closed}ReplicationStream of protocol {self.protocol} on {self.connection!r}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Received]:
        """Yield frames until the stream is closed.

        If you leave an iteration early, the next iteration or `receive` returns the other frames
        that were received.
        """
        self._check_open()
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
        """The present connection; the stream has another one after a reconnect."""
        return self._link.receiver.connection

    @property
    def protocol(self) -> int:
        """The version of the pgoutput protocol in use."""
        return self._link.protocol

    @property
    def timeline(self) -> int:
        """The server's timeline: another one after a standby was promoted or a backup restored."""
        return self.connection.timeline

    @property
    def acknowledged_lsn(self) -> int:
        """The greatest acknowledged LSN."""
        return self._link.receiver.acknowledged

    def transactions(
        self,
        stop_at: int | None = None,
        idle_timeout: float | None = None,
        stop: threading.Event | None = None,
    ) -> Iterator[Transaction]:
        """Yield whole transactions, in commit order.

        When the connection is lost, the stream reconnects and continues; it yields no transaction
        twice. If a part of the server's log has no changes for the slot, the stream acknowledges
        that part by itself, once you have acknowledged all transactions before it (see `on_idle` of
        `connect`). After an iteration has ended, the next one continues there.

        Parameters
        ----------
        stop_at : int, optional
            End after the last transaction that was committed before this LSN.
        idle_timeout : float, optional
            End when nothing has come for this many seconds.
        stop : threading.Event, optional
            Set it, for example in a signal handler, to end soon, between two transactions.

        Raises
        ------
        RetryableError
            The connection is lost, and the stream could not reconnect within the `retry_for` of
            `connect`.
        PgOutputError
            The stream can't continue; the error says why, and what to do. The stream is closed, or
            frames were received from it before. An argument is out of range.
        TypeError
            An argument has a wrong type.
        """
        return self._begin_delivery().transactions(_until(stop_at, idle_timeout, stop))

    def groups(
        self,
        stop_at: int | None = None,
        idle_timeout: float | None = None,
        stop: threading.Event | None = None,
    ) -> Iterator[Transaction | TransactionGroup]:
        """Yield the same transactions; those that came together form one group.

        The `batches` of a group have the rows of all its transactions, in order. For small
        transactions, this costs much less than batches of each transaction. A transaction that
        announces a relation, was streamed, or was prepared comes by itself, as a `Transaction`.
        Both classes have `batches`, `frames`, `transactions`, `commits` and `end_lsn`, and
        `acknowledge` takes both. Only a `Transaction` has messages, `xid` and `commit_lsn`. The
        method `transactions` of a group yields its transactions, one by one.

        Parameters and errors are those of :meth:`transactions`.
        """
        return self._begin_delivery().groups(_until(stop_at, idle_timeout, stop))

    def step(self, stop: threading.Event) -> Transaction | TransactionGroup | int | None:
        """Return what `groups` yields next, or None if nothing came for half a second.

        If `on_idle` is due, return its LSN instead of calling it, so that the caller calls it in a
        thread of its own choice, and then acknowledges the LSN. `connect_async` uses this method.

        :meta private:
        """
        delivery = self._begin_delivery()
        idle_lsns: list[int] = []
        if self._on_idle is not None:
            delivery.on_idle = idle_lsns.append
        arrival = next(delivery.groups(_until(None, IDLE_POLL, stop)), None)
        now = time.monotonic()
        if arrival is None and idle_lsns and now - self._idle_reported_at >= _IDLE_INTERVAL:
            self._idle_reported_at = now
            return idle_lsns[-1]
        return arrival

    def _check_open(self) -> None:
        """Refuse to iterate over a closed stream: an empty iteration would look like its end.

        Raises
        ------
        PgOutputError
            The stream is closed.
        """
        if self._link.is_closed:
            raise PgOutputError(
                "the stream is closed, and has no more frames",
                code="unfit_input",
                hint=NEW_CONNECTION_ADVICE,
            )

    def _begin_delivery(self) -> Delivery:
        """Return the delivery that `transactions` and `groups` share.

        Raises
        ------
        PgOutputError
            The stream is closed, or frames were received from it before.
        """
        self._check_open()
        if self._gave_frames:
            raise PgOutputError(
                "`receive()` has returned frames of this stream already: their transactions would "
                "be missing",
                code="unfit_input",
                hint=NEW_CONNECTION_ADVICE,
            )
        from ..transactions import Assembler
        from .delivery import Delivery  # loads NumPy, which receiving frames does not need

        if self._delivery is None:
            assembler = Assembler(**self._assembling)
            on_idle = self._tell_idle if self._keeps or self._on_idle is not None else None
            self._delivery = Delivery(self._link, assembler, self._position, on_idle=on_idle)
        return self._delivery

    def _tell_idle(self, lsn: int) -> None:
        """Have the consumer store an LSN before which no change is left; then acknowledge it."""
        now = time.monotonic()
        if self._on_idle is not None and now - self._idle_reported_at >= _IDLE_INTERVAL:
            self._idle_reported_at = now
            self._on_idle(lsn)
            self._link.receiver.acknowledge(lsn)

    def receive(self, timeout: float | None = None) -> Batch | None:
        """Wait for frames, and return those that came.

        Parameters
        ----------
        timeout : float or None
            Seconds to wait at most; None waits without end.

        Returns
        -------
        Batch or None
            After the timeout, a batch without frames. None once the stream was closed.

        Raises
        ------
        RetryableError
            The connection is lost, or the server has ended the stream, for example for a restart.
            Connect again: the server sends again what was not acknowledged.
        PgOutputError
            The server has ended the stream with a permanent error, or an earlier call was
            interrupted. Or an iteration over transactions has begun on this stream.
        """
        if self._delivery is not None:
            raise PgOutputError(
                "this stream returns transactions already, and needs its frames for them",
                code="unfit_input",
                hint="Iterate over `transactions()`, or connect with another slot for frames",
            )
        if self._left_over:
            frames = list(self._left_over)
            self._left_over.clear()
            return Batch(frames, None)
        batch = ReceivedFrames()
        if not self._link.receiver.receive(batch, timeout):
            return None
        self._gave_frames = self._gave_frames or bool(batch.frames)
        return Batch(batch.frames, batch.keepalive)

    def acknowledge(self, done: int | Transaction | TransactionGroup) -> None:
        """Tell the server that everything up to an LSN is durable: it won't send that again.

        Give a transaction, or its end LSN (from its Commit). While no transaction is open and all
        received frames are durable, you may also give a batch's `keepalive_lsn`. You may repeat a
        position, or give an earlier one: this has no effect. The stream sends the position to the
        server within half a second, and when you close the stream.

        Parameters
        ----------
        done : int, pgoutput_fast.transactions.Transaction or TransactionGroup
            An LSN, or a transaction or group of this stream.

        Raises
        ------
        PgOutputError
            The LSN is beyond what was received or delivered, or is no LSN. Or the stream is closed.
        TypeError
            `done` is neither an int nor a transaction.
        """
        lsn = done if type(done) is int else getattr(done, "end_lsn", None)
        if type(lsn) is not int:
            raise TypeError(
                f"acknowledge() takes a transaction or an int, its end LSN, not "
                f"{type(done).__name__}"
            )
        receiver = self._link.receiver
        if self._link.is_closed:
            raise PgOutputError(
                "the stream is closed, and can't acknowledge anything",
                code="unfit_input",
                hint=NEW_CONNECTION_ADVICE,
            )
        if self._delivery is None:
            limit, done_so_far = receiver.received, "received"
        else:
            delivery = self._delivery
            limit = max(delivery.delivered, delivery.idle_lsn, receiver.acknowledged)
            done_so_far = "delivered"
        if not 0 <= lsn <= limit:
            raise PgOutputError(
                f"{format_lsn(lsn)} can't be acknowledged: nothing beyond {format_lsn(limit)} was "
                + done_so_far,
                code="unfit_input",
                hint="Give the transaction, or its `end_lsn`: the server forgets all changes "
                "before an acknowledged LSN",
            )
        receiver.acknowledge(lsn)

    def ask_for_keepalive(self) -> None:
        """Ask the server for a keepalive, which it then sends soon, even if nothing happens."""
        self._link.receiver.ask_for_keepalive()

    def close(self) -> None:
        """Send the last acknowledged position to the server, and close the connection.

        In a forked process this does nothing, as the connection belongs to the parent process.
        """
        self._link.close()


def _until(stop_at: object, idle_timeout: object, stop: object) -> Until:
    """Check the arguments that end an iteration.

    Raises
    ------
    TypeError, PgOutputError
        An argument has a wrong type, or is out of range.
    """
    from .delivery import Until  # loads NumPy, which receiving frames does not need

    if stop_at is not None:
        check_lsn("stop_at", stop_at)
    if idle_timeout is not None:
        seconds(zero=True).check("idle_timeout", idle_timeout)
    if stop is not None and not callable(getattr(stop, "is_set", None)):
        raise TypeError(f"stop must be a threading.Event, not {type(stop).__name__}")
    return Until(
        cast("int | None", stop_at),
        cast("float | None", idle_timeout),
        cast("threading.Event | None", stop),
    )
