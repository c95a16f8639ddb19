"""Receive from one connection to a walsender, and tell the server what is durable.

`receive` reads the socket in the thread that calls it. Handing a frame to another thread would cost
as much as receiving it. Data that the consumer has not asked for stay in the server and in the
kernel's buffers. While the consumer works, a second thread sends status messages, so that a slow
consumer does not run into ``wal_sender_timeout``.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from array import array
from typing import TYPE_CHECKING

import psycopg
from psycopg import pq

from .._impl import twin
from ..connections import (
    NEW_CONNECTION_ADVICE,
    STREAM_ADVICE,
    STREAM_CODES,
    result_error,
    server_error,
)
from ..errors import PgOutputError, RetryableError
from ..protocol.copydata import parse_keepalive, status_update
from .waiter import (
    Waiter,
    forget_notifications,
    next_result,
    take_input,
    wait_for,
)
from .walsender import ReplicationConnection, left_out_error

if TYPE_CHECKING:
    from collections.abc import Callable

    _CopyData = tuple[int, int, int, memoryview | psycopg.Error | None]

_libpq_frames = twin("replication._libpq_frames")
take_copy_data = _libpq_frames.take_copy_data
pack_copy_data = _libpq_frames.pack_copy_data

# `receive` returns a batch of this many bytes at once, without waiting for more.
_BATCH_BYTES = 4 << 20
# Seconds for which `receive` collects data into one batch while they flow. One wait brings some
# hundred frames at most. A batch of so few frames costs the consumer more than the frames
# themselves.
_COLLECT = 0.02
# If at least `_MUCH_BYTES` came in that time, the stream lags or has much to bring. Then `receive`
# collects for `_COLLECT_MUCH` seconds: frames in larger batches cost the consumer less.
_MUCH_BYTES = 64 << 10
_COLLECT_MUCH = 0.1

_STATUS_INTERVAL = 10.0  # seconds between two status messages, at most
# The same while no receive() runs. It is short because nobody reads the server's requests for a
# status then, and somebody may have made wal_sender_timeout shorter.
_AWAY_INTERVAL = 1.0
_ANSWER_INTERVAL = 0.1  # seconds between two status messages that ask or answer
_ACKNOWLEDGE_INTERVAL = 0.5  # seconds between two status messages that only acknowledge more
_LEAST_SILENCE = 10.0  # seconds; the default silence_timeout is at least this long
_CLOSE_TIMEOUT = 2.0  # seconds for the server to end the stream


class ReceivedFrames:
    """The frames that one call of `receive` has received so far, as one tuple for each frame."""

    __slots__ = ("asked", "came", "frames", "keepalive", "since", "size")

    def __init__(self) -> None:
        self.frames: list[tuple[int, int, int, bytes]] = []
        """LSN, end of the WAL, send time, and bytes of each frame."""
        self.keepalive: int | None = None
        """The LSN of the keepalive that came after the last frame, if one did."""
        self.asked = False
        """Whether that keepalive asks for an answer."""
        self.size = 0
        """Bytes of all messages received, with their headers."""
        self.since = 0.0
        """When the first data came, on the clock of `time.monotonic`; 0.0 before that."""
        self.came = False
        """Whether something came since the last wait."""

    def __bool__(self) -> bool:
        return self.size > 0 or self.keepalive is not None

    def __len__(self) -> int:
        return len(self.frames)

    def cut(self, count: int) -> None:
        """Drop all frames after the first `count`."""
        del self.frames[count:]
        self.size = sum(len(frame) for *_, frame in self.frames)

    def take(self, pgconn: pq.abc.PGconn, most: int, drain: bool) -> _CopyData:
        """Take the messages that libpq has received; see `take_copy_data`."""
        copy_data: _CopyData = take_copy_data(pgconn, self.frames, most, drain)
        return copy_data


class ReceivedRun(ReceivedFrames):
    """The same as `ReceivedFrames`, with all frames in one buffer."""

    __slots__ = ("data", "ends", "lsns")

    def __init__(self) -> None:
        super().__init__()
        self.data = bytearray()
        self.ends = array("q", [0])
        """A 0, then the end of each frame in `data`."""
        self.lsns = array("Q")

    def __len__(self) -> int:
        return len(self.lsns)

    def cut(self, count: int) -> None:
        """Drop all frames after the first `count`."""
        del self.ends[count + 1 :], self.lsns[count:]
        del self.data[self.ends[-1] :]
        self.size = self.ends[-1]

    def take(self, pgconn: pq.abc.PGconn, most: int, drain: bool) -> _CopyData:
        """Take the messages that libpq has received; see `pack_copy_data`."""
        copy_data: _CopyData = pack_copy_data(pgconn, self.data, self.ends, self.lsns, most, drain)
        return copy_data


class Receiver:
    """Receives from one connection, and keeps the connection alive.

    Parameters
    ----------
    connection : ReplicationConnection
        A connection on which a stream has begun.
    start_lsn : int
        The LSN up to which everything is durable already.
    silence_timeout : float, optional
        Seconds after which a connection to a silent server counts as lost. By default twice the
        server's ``wal_sender_timeout``, but at least 10. If that timeout is 0, there is no limit.
    safe_lsn : callable, optional
        Takes the acknowledged LSN, and returns the LSN to report to the server as durable. By
        default both are the same. It is called from a second thread too.

    Attributes
    ----------
    received : int
        The greatest LSN received.
    safe_lsn : callable or None
    """

    def __init__(
        self,
        connection: ReplicationConnection,
        start_lsn: int,
        silence_timeout: float | None = None,
        safe_lsn: Callable[[int], int] | None = None,
    ) -> None:
        self.connection = connection
        self.received = self._acknowledged = start_lsn
        self.safe_lsn = safe_lsn
        self._pgconn = connection.pgconn
        # Only one thread at a time may use libpq's connection. The lock is re-entrant, as a signal
        # handler may call close() in the middle of receive().
        self._lock = threading.RLock()
        self._stop = threading.Event()
        self._error: PgOutputError | None = None
        self._ended = self._closed = False
        self._ask = self._answer = False
        # Send three statuses within the server's timeout, so that one may be late.
        timeout = connection.wal_sender_timeout
        self._status_interval = min(_STATUS_INTERVAL, timeout / 3) if timeout else _STATUS_INTERVAL
        if silence_timeout is None:
            self._silence_limit = max(2 * timeout, _LEAST_SILENCE) if timeout else None
        else:
            self._silence_limit = silence_timeout
        self._asked = 0.0
        self._process = os.getpid()
        self._waiter = Waiter(self._pgconn)
        self._batch: ReceivedFrames | None = None
        # Why the server leaves out changes, and how many frames of this receive() came before that.
        self._skips: tuple[PgOutputError, int] | None = None
        if connection.left_out is not None:
            self._skips = connection.left_out, 0
        self._pgconn.notice_handler = self._on_notice
        self._left = time.monotonic()  # when the last receive() ended
        try:
            self._send_status()
        except psycopg.Error as error:
            self._ended, self._error = True, _lost(error)
        self._keeper = threading.Thread(
            target=self._keep_alive, name="pgoutput_fast-keep-alive", daemon=True
        )
        self._keeper.start()

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._stop.is_set()

    @property
    def acknowledged(self) -> int:
        """The greatest acknowledged LSN."""
        return self._acknowledged

    def acknowledge(self, lsn: int) -> None:
        """Acknowledge everything before an LSN. An LSN before the greatest one has no effect."""
        self._acknowledged = max(self._acknowledged, lsn)

    def receive(self, batch: ReceivedFrames, timeout: float | None) -> bool:
        """Wait for data, and put them into `batch`.

        Parameters
        ----------
        batch : ReceivedFrames
            A new object, which this call fills.
        timeout : float or None
            Seconds to wait at most; None waits without end.

        Returns
        -------
        bool
            False if the stream was closed.

        Raises
        ------
        PgOutputError
            See :meth:`ReplicationStream.receive`.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            with self._lock:
                if self._stop.is_set():
                    return False
                if self._error is not None:
                    raise self._error
                # Nobody read from the server while the consumer worked. Do not count this time as
                # silence of the server.
                self._waiter.last_data += time.monotonic() - self._left
                received = self._receive(batch, deadline)
                if batch:
                    self._follow_timeline()
                self._left = time.monotonic()
                return received
        except BaseException as error:
            if self._error is None:
                # For example, Ctrl-C came after a frame was taken from libpq and before the
                # consumer got the frame.
                self._error = PgOutputError(
                    f"receiving was interrupted ({type(error).__name__}), so this stream may have "
                    "lost frames",
                    code="incomplete",
                    hint=NEW_CONNECTION_ADVICE,
                )
            raise

    def _follow_timeline(self) -> None:
        """Update the connection's timeline for the received data; if this fails, drop the data."""
        try:
            self.connection.follow_timeline()
        except RetryableError as error:
            self._error = self._error or error
            raise

    def ask_for_keepalive(self) -> None:
        """Ask the server for a keepalive with the LSN that it has reached."""
        self._ask = True

    def close(self) -> None:
        """Send the last acknowledged position to the server, and close the connection.

        In a forked process this does nothing, as the connection belongs to the parent process.
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

    def _receive(self, batch: ReceivedFrames, deadline: float | None) -> bool:
        """Receive until a batch is ready, the deadline has passed, or the stream has ended."""
        waited, self._batch = False, batch
        try:
            while not self._stop.is_set():
                length = self._take(batch, drain=waited)
                if batch.came:
                    # Here, and not only at a wait: a full batch is returned without another wait.
                    self._waiter.last_data = time.monotonic()
                if length < 0:
                    self._end()
                    break
                if self._is_time(batch, deadline, is_full=length > 0, waited=waited):
                    return True
                self._check_silence()
                self._send_status_if_due(self._status_interval)
                self._waiter.wait(deadline, collects=bool(batch), came=batch.came)
                waited, batch.came = True, False
        except (PgOutputError, psycopg.Error) as error:
            if not self._stop.is_set():
                # If the server only leaves out changes, it still accepts a last status at close().
                self._ended = self._skips is None
                self._error = error if isinstance(error, PgOutputError) else _lost(error)
        finally:
            self._batch = None
        if batch:
            return True  # the next receive() raises the error
        if self._error is not None:
            raise self._error from None
        return False

    def _take(self, batch: ReceivedFrames, *, drain: bool) -> int:
        """Add the data that libpq has received; with `drain`, all that the socket has.

        Returns
        -------
        int
            0 if libpq has no more yet, above 0 if the batch is large enough, -1 at the end.
        """
        while not self._stop.is_set():
            # A client spends nearly all of its time in this call.
            size, lsn, length, data = batch.take(self._pgconn, _BATCH_BYTES - batch.size, drain)
            forget_notifications(self._pgconn)
            if self._skips is not None:
                error, count = self._skips
                batch.cut(count)
                batch.keepalive = None
                raise error
            if size:
                batch.came = True
                batch.size += size
                batch.keepalive = None
                self.received = max(self.received, lsn)
            if isinstance(data, psycopg.Error):
                raise data
            if length <= 0 or data is None:
                return int(length)
            batch.came = True
            batch.keepalive, batch.asked = self._take_keepalive(data)
        return 0

    def _on_notice(self, result: pq.abc.PGresult) -> None:
        """Note the frame after which the server leaves out changes; later frames are dropped.

        libpq calls this function when it reads the notice, even while it sends a status. If no
        receive() runs then, all frames of the next receive() come after the notice.
        """
        error = left_out_error(result)
        if error is not None and self._skips is None:
            self._skips = error, 0 if self._batch is None else len(self._batch)

    def _is_time(
        self, batch: ReceivedFrames, deadline: float | None, *, is_full: bool, waited: bool
    ) -> bool:
        """Return whether to go back to the consumer now, even without data."""
        now = time.monotonic()
        is_late = deadline is not None and now >= deadline
        if not batch:
            return is_late and waited
        batch.since = batch.since or now
        collect, is_pause = _COLLECT, waited and not batch.came
        if batch.size >= _MUCH_BYTES:
            # A server that has much to send may pause for some milliseconds before it sends more.
            is_pause = is_pause and now - self._waiter.last_data >= _COLLECT
            collect = max(_COLLECT, _COLLECT_MUCH)
        return is_full or is_pause or is_late or now - batch.since >= collect

    def _take_keepalive(self, data: memoryview) -> tuple[int, bool]:
        """Answer a keepalive if it asks; return its LSN, and whether it asked."""
        try:
            keepalive = parse_keepalive(data)
        except PgOutputError as error:
            raise PgOutputError(f"the server sent {error.message}", code="unfit_stream") from None
        self.received = max(self.received, keepalive.lsn)
        # A server that shuts down answers every status with another request, until everything is
        # acknowledged. So if there is nothing new to report, wait before answering again.
        is_reported = keepalive.lsn <= self._reported_lsn and self._durable() <= self._status_lsn
        if keepalive.reply_requested and not (
            is_reported and time.monotonic() - self._status_time < _ANSWER_INTERVAL
        ):
            self._send_status()
        elif keepalive.reply_requested:
            self._answer = True
        return keepalive.lsn, keepalive.reply_requested

    def _end(self) -> None:
        """Set the error of a stream that the server ended: its own, or that of a shutdown."""
        self._ended = True
        result = next_result(self._pgconn)
        if result is not None and result.status == pq.ExecStatus.FATAL_ERROR:
            self._error = result_error(
                "the server ended the stream", result, STREAM_ADVICE, STREAM_CODES
            )
        else:
            self._error = RetryableError(
                "the server ended the stream without an error, as it does when it shuts down",
                code="connection_lost",
                hint=NEW_CONNECTION_ADVICE,
            )

    def _keep_alive(self) -> None:
        """Send the statuses that are due while no receive() runs; the keep-alive thread."""
        # Check twice in each status interval, so that a late status still keeps the timeout.
        while not self._stop.wait(min(_AWAY_INTERVAL, self._status_interval / 2)):
            if self._lock.acquire(blocking=False):
                try:
                    if not self._ended:
                        self._send_status_if_due(min(_AWAY_INTERVAL, self._status_interval))
                except psycopg.Error:
                    pass  # the next receive() reports the lost connection
                finally:
                    self._lock.release()

    def _durable(self) -> int:
        """Return the LSN to report to the server as durable."""
        return self.acknowledged if self.safe_lsn is None else self.safe_lsn(self.acknowledged)

    def _check_silence(self) -> None:
        """Ask a silent server for an answer, and give it up after `silence_timeout`.

        Raises
        ------
        RetryableError
            The server was silent for longer than the limit.
        """
        silence = time.monotonic() - self._waiter.last_data
        if self._silence_limit is not None and silence > self._silence_limit:
            raise RetryableError(
                f"the server sent nothing for {silence:.0f} s and did not answer: the server or "
                f"the network hangs",
                code="connection_lost",
                hint=NEW_CONNECTION_ADVICE,
            )
        limit = self._status_interval if self._silence_limit is None else self._silence_limit / 3
        if min(silence, time.monotonic() - self._asked) > min(limit, self._status_interval):
            self._asked = time.monotonic()
            self._ask = True

    def _send_status_if_due(self, interval: float) -> None:
        since = time.monotonic() - self._status_time
        if (
            since >= interval
            or (self._durable() > self._status_lsn and since >= _ACKNOWLEDGE_INTERVAL)
            or ((self._ask or self._answer) and since >= _ANSWER_INTERVAL)
        ):
            self._send_status()

    def _send_status(self) -> None:
        ask, self._ask, self._answer = self._ask, False, False
        self._status_time = time.monotonic()
        self._status_lsn = acknowledged = self._durable()
        self._reported_lsn = self.received
        self._pgconn.put_copy_data(status_update(self.received, acknowledged, ask=ask))
        self._pgconn.flush()

    def _finish(self) -> None:
        """Send the last status and end the stream; wait until the server has ended it too."""
        pgconn = self._pgconn
        deadline = time.monotonic() + _CLOSE_TIMEOUT
        with contextlib.suppress(psycopg.Error, OSError):
            self._waiter.rest()
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
                take_input(pgconn)


def _lost(error: psycopg.Error) -> PgOutputError:
    return server_error("the connection is lost", str(error), error.sqlstate)
