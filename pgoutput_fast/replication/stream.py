"""A stream of frames from a walsender: acknowledged by who made them durable.

`receive` reads the socket in the thread that calls it: a frame that goes from one thread to another
costs as much again as receiving it. What the consumer has not asked for stays in the server and in
the kernel's buffers. While it does something else, a thread tells the server that it is alive, so
that a slow one does not run into ``wal_sender_timeout``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import psycopg
from psycopg import pq

from .._impl import twin
from ..connections import STREAM_ADVICE, RetryableError, result_error, server_error
from ..copydata import parse_keepalive, status_update
from ..errors import PgOutputError
from ..lsn import format_lsn
from .waiter import IDLE_POLL, Waiter
from .walsender import (
    ReplicationConnection,
    confirmed_flush_lsn,
    start_options,
    wait_for,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from typing_extensions import Self

    from ..transactions import Transaction

_log = logging.getLogger(__name__)

take_copy_data = twin("replication._copydata").take_copy_data

# A batch is handed over once it has so many bytes.
_BATCH_BYTES = 1 << 20
# While data flow, what comes within so many seconds is one batch. Each wait brings some hundred
# frames at most, and a consumer would pay more for a batch of so few than for its frames.
_COLLECT = 0.02

_STATUS_INTERVAL = 10.0  # seconds between two status messages, at most
# The same while nobody receives: a server that asks for a status, as its timeout may have become
# shorter meanwhile, is not heard then. Seconds.
_AWAY_INTERVAL = 1.0
_ACKNOWLEDGE_INTERVAL = 0.5  # seconds between two status messages that only tell a new position
_CLOSE_TIMEOUT = 2.0  # seconds for the server to end the stream


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
    """Frames of one session, in the order in which the server sends them.

    Made by `connect`. Iterate over it, or call `receive`; after what was taken is durable, call
    `acknowledge`. Close it, or use it as a context manager. Iteration raises what `receive` raises.
    ``docs/replication.md`` says more.
    """

    def __init__(self, connection: ReplicationConnection, start_lsn: int) -> None:
        self.connection = connection
        self._pgconn = connection.pgconn
        # One thread at a time may use libpq's connection. The lock is re-entrant, as a signal's
        # handler may close the stream in the middle of receive().
        self._lock = threading.RLock()
        self._stop = threading.Event()
        self._error: PgOutputError | None = None
        self._ended = self._closed = False
        self._acknowledged = start_lsn
        self._received = start_lsn
        self._ask = self._answer = False
        # Three statuses within the server's timeout, so that one may be late.
        timeout = connection.wal_sender_timeout
        self._status_interval = min(_STATUS_INTERVAL, timeout / 3) if timeout else _STATUS_INTERVAL
        self._left_over: deque[tuple[int, int, int, bytes]] = deque()
        self._process = os.getpid()
        self._waiter = Waiter(self._pgconn)
        self._left = time.monotonic()  # when the last receive() ended
        try:
            self._send_status()
        except psycopg.Error as error:
            self._ended, self._error = True, _lost(error)
        self._keeper = threading.Thread(
            target=self._keep_alive, name="pgoutput_fast-keep-alive", daemon=True
        )
        self._keeper.start()

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
    def acknowledged_lsn(self) -> int:
        """The greatest LSN that was acknowledged."""
        return self._acknowledged

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
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            with self._lock:
                if self._left_over:
                    frames = list(self._left_over)
                    self._left_over.clear()
                    return Batch(frames, None)
                if self._stop.is_set():
                    return None
                if self._error is not None:
                    raise self._error
                # The time that the consumer took for itself is no silence of the server's.
                self._waiter.last_data += time.monotonic() - self._left
                batch = self._receive(deadline)
                self._left = time.monotonic()
                return batch
        except BaseException as error:
            if self._error is None:
                # Ctrl-C, say, came after a frame was taken from libpq, before it was handed over.
                self._error = PgOutputError(
                    f"receiving was interrupted ({type(error).__name__}), so that this stream may "
                    "have lost frames: connect again, what was not acknowledged comes again"
                )
            raise

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
        if lsn > self._received:
            format_lsn(lsn)  # refuses what is out of range
            raise PgOutputError(
                f"{format_lsn(lsn)} can't be acknowledged: the stream has received nothing beyond "
                f"{format_lsn(self._received)}. Give the end LSN of a transaction (its `end_lsn`), "
                f"not a time or a number of your own: the server forgets all that is before it"
            )
        format_lsn(lsn)
        self._acknowledged = max(self._acknowledged, lsn)

    def ask_for_keepalive(self) -> None:
        """Ask the server how far it is: a keepalive comes soon, also when nothing happens."""
        self._ask = True

    def close(self) -> None:
        """Tell the server the last position, and end the connection.

        It does nothing in a process that was forked: the connection is its parent's.
        """
        if os.getpid() != self._process:
            return
        self._stop.set()
        if self._keeper is not threading.current_thread():
            self._keeper.join()
        with self._lock:
            if not self._closed:
                self._closed = True
                if not self._ended:
                    self._finish()
                self._waiter.close()
                self.connection.close()

    def _receive(self, deadline: float | None) -> Batch | None:
        """What `receive` does when nothing is left over and the stream has not ended before."""
        taken = _Taken()
        waited = False
        try:
            while not self._stop.is_set():
                length = self._take(taken)
                if taken.came:
                    # Here, as a batch that is handed over at once never comes to the next wait.
                    self._waiter.last_data = time.monotonic()
                if length < 0:
                    self._end()
                    break
                if self._is_time(taken, deadline, is_full=length > 0, waited=waited):
                    return taken.batch()
                self._send_status_if_due(self._status_interval)
                self._waiter.wait(deadline)
                waited, taken.came = True, False
        except (PgOutputError, psycopg.Error) as error:
            if not self._stop.is_set():
                self._ended = True
                self._error = error if isinstance(error, PgOutputError) else _lost(error)
        if taken:
            return taken.batch()  # what is wrong comes with the next call
        if self._error is not None:
            raise self._error from None
        return None

    def _take(self, taken: _Taken) -> int:
        """Add what libpq has received.

        Returns
        -------
        int
            0 if libpq has no more yet, above 0 if the batch is large enough, -1 at the end.
        """
        get_copy_data = self._pgconn.get_copy_data
        while not self._stop.is_set():
            # Nearly all that a client costs is spent in this call.
            size, lsn, length, data = take_copy_data(
                get_copy_data, taken.frames, _BATCH_BYTES - taken.size
            )
            if size:
                taken.came = True
                taken.size += size
                taken.keepalive = None
                self._received = max(self._received, lsn)
            if length <= 0 or data is None:
                return int(length)
            taken.came = True
            taken.keepalive = self._take_keepalive(data)
        return 0

    def _is_time(
        self, taken: _Taken, deadline: float | None, *, is_full: bool, waited: bool
    ) -> bool:
        """Whether the consumer is given what was taken, nothing included, or more is waited for."""
        now = time.monotonic()
        is_late = deadline is not None and now >= deadline
        if not taken:
            return is_late and waited
        taken.since = taken.since or now
        is_pause = waited and (self._waiter.was_idle or not taken.came)
        return is_full or is_pause or is_late or now - taken.since >= _COLLECT

    def _take_keepalive(self, data: memoryview) -> int:
        try:
            keepalive = parse_keepalive(data)
        except PgOutputError as error:
            raise PgOutputError(f"the server sent {error}") from None
        self._received = max(self._received, keepalive.lsn)
        # A server that shuts down asks again at every answer, until all is acknowledged.
        told = keepalive.lsn <= self._told_lsn and self._acknowledged <= self._status_lsn
        if keepalive.reply_requested and not (
            told and time.monotonic() - self._status_time < IDLE_POLL
        ):
            self._send_status()
        elif keepalive.reply_requested:
            self._answer = True
        return keepalive.lsn

    def _end(self) -> None:
        """The server has ended the stream; without an error of its own if it shuts down."""
        self._ended = True
        result = self._pgconn.get_result()
        if result is not None and result.status == pq.ExecStatus.FATAL_ERROR:
            self._error = result_error("the server ended the stream", result, STREAM_ADVICE)
        else:
            self._error = RetryableError(
                "the server ended the stream without an error, as it does when it shuts down; "
                "connect again, what was not acknowledged comes again"
            )
        _log.info("%s", self._error)

    def _keep_alive(self) -> None:
        """In a thread of its own: send the statuses that are due while nobody receives."""
        # So often that within the server's timeout one of two may be late.
        while not self._stop.wait(min(_ACKNOWLEDGE_INTERVAL, self._status_interval / 2)):
            if self._lock.acquire(blocking=False):
                try:
                    if not self._ended:
                        self._send_status_if_due(min(_AWAY_INTERVAL, self._status_interval))
                except psycopg.Error:
                    pass  # the next receive() finds the connection lost
                finally:
                    self._lock.release()

    def _send_status_if_due(self, interval: float) -> None:
        since = time.monotonic() - self._status_time
        if (
            since >= interval
            or (self._acknowledged > self._status_lsn and since >= _ACKNOWLEDGE_INTERVAL)
            or ((self._ask or self._answer) and since >= IDLE_POLL)
        ):
            self._send_status()

    def _send_status(self) -> None:
        ask, self._ask, self._answer = self._ask, False, False
        self._status_time = time.monotonic()
        self._status_lsn = acknowledged = self._acknowledged
        self._told_lsn = self._received
        self._pgconn.put_copy_data(status_update(self._received, acknowledged, ask=ask))
        self._pgconn.flush()

    def _finish(self) -> None:
        """Tell the last position and end the stream; wait until the server has ended it too."""
        pgconn = self._pgconn
        deadline = time.monotonic() + _CLOSE_TIMEOUT
        with contextlib.suppress(psycopg.Error):
            self._send_status()
            pgconn.put_copy_end()
            while pgconn.flush() and time.monotonic() < deadline:
                wait_for(pgconn, select.POLLOUT, 0.1)
            ended = False
            while time.monotonic() < deadline:
                if not ended:
                    length, _ = pgconn.get_copy_data(1)
                    if length:
                        ended = length < 0
                        continue
                elif not pgconn.is_busy():
                    return  # the command is complete, and the slot free
                wait_for(pgconn, select.POLLIN, 0.1)
                pgconn.consume_input()


class _Taken:
    """What one call of `receive` has taken so far."""

    __slots__ = ("came", "frames", "keepalive", "since", "size")

    def __init__(self) -> None:
        self.frames: list[tuple[int, int, int, bytes]] = []
        self.keepalive: int | None = None
        """The LSN of a keepalive behind the last frame."""
        self.size = 0
        """Bytes."""
        self.since = 0.0
        """When the consumer would have been given the first of it; 0.0 before there was any."""
        self.came = False
        """Whether something came since the last wait."""

    def __bool__(self) -> bool:
        return bool(self.frames) or self.keepalive is not None

    def batch(self) -> Batch:
        return Batch(self.frames, self.keepalive)


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


def _lost(error: psycopg.Error) -> PgOutputError:
    return server_error("the connection is lost", str(error), error.sqlstate)


def connect(
    dsn: str,
    *,
    slot: str,
    publications: Sequence[str],
    create_slot: bool = False,
    temporary: bool = False,
    start_lsn: int | None = None,
    binary: bool = False,
    messages: bool = False,
) -> ReplicationStream:
    """Begin to receive a slot's changes, in protocol version 1: whole transactions.

    ``docs/replication.md`` says what the stream gives, and what may be acknowledged when.

    Parameters
    ----------
    dsn : str
        Connection string of libpq, or URL.
    slot : str
    publications : list or tuple of str
        Names of publications, as they are: they are quoted here.
    create_slot : bool
        Make the slot if it is not there.
    temporary : bool
        Make a slot that ends with the connection; there must be none of this name.
    start_lsn : int
        Where to go on: by default, at the LSN up to which the slot was acknowledged.
    binary : bool
        Values in their types' binary form, where they have one.
    messages : bool
        Logical messages (`pg_logical_emit_message`) too.

    Raises
    ------
    PgOutputError
        The server can't be reached or refuses; there is no such slot or publication; the slot is in
        use; the slot is beyond `start_lsn`, so that changes are lost. No message has the password.
    TypeError
        `dsn` or `slot` is no str.
    """
    connection = ReplicationConnection(dsn)
    try:
        connection.check_publications(publications)
        options = start_options(connection, publications, binary=binary, messages=messages)
        if temporary:
            confirmed = connection.create_slot(slot, temporary=True)
        else:
            confirmed = confirmed_flush_lsn(connection, slot, create=create_slot)
        if start_lsn is None:
            start_lsn = confirmed
        if confirmed > start_lsn:
            # The server would silently begin later.
            raise PgOutputError(
                f"slot {slot!r} is at {format_lsn(confirmed)}, beyond {format_lsn(start_lsn)} "
                f"where to go on: the changes between them are lost; begin with a new snapshot"
            )
        connection.start(slot, start_lsn, options)
        return ReplicationStream(connection, start_lsn)
    except BaseException:
        connection.close()
        raise
