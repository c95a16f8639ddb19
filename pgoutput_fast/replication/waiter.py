"""Wait for data on libpq's socket, with as few wake-ups as the stream allows."""

from __future__ import annotations

import os
import select
import socket
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from psycopg import pq

# To wake up for each packet would cost the client more than all its other work. So the client wakes
# up at the first byte, and then collects data. On TCP, it asks the kernel to wake it up only for
# this many bytes (SO_RCVLOWAT). Fewer bytes may be left, so each poll is short. On unix sockets
# poll() ignores this mark, so the client sleeps between two reads.
_LOW_WATER = 64 << 10
_TCP_POLL = 0.005  # seconds
# The same after a pause in the stream: a single transaction then reaches the consumer sooner.
_FIRST_TCP_POLL = 0.002
# Seconds of the sleep on a unix socket. The socket's buffer holds some 280 small messages, so the
# server has to wait during a longer sleep: 1 ms halved the rate.
_UNIX_NAP = 0.0002
# The same for COPY, whose rows the server sends in blocks of 8 kB. The buffer holds more bytes of
# those, so the sleep may be longer.
COPY_NAP = 0.0005
# After this many seconds without data, the stream had a pause (see `_FIRST_TCP_POLL`).
IDLE_AFTER = 0.05
# The longest wait for a first byte, in seconds. A `stop`, or close() by another thread, may take
# effect so much later.
IDLE_POLL = 0.5


class Waiter:
    """Waits for data on libpq's socket, with as few wake-ups as the stream allows.

    Parameters
    ----------
    pgconn : psycopg.pq.PGconn
    nap : float
        Seconds to collect data on a unix socket.
    """

    def __init__(self, pgconn: pq.abc.PGconn, nap: float = _UNIX_NAP) -> None:
        self._pgconn = pgconn
        self._nap = nap
        self._descriptor = pgconn.socket
        self._poll = select.poll()
        self._poll.register(self._descriptor, select.POLLIN)
        self.last_data = time.monotonic()
        """When data last came, by `time.monotonic`. The code that takes the data sets it."""
        # A duplicate of the descriptor: closing the socket must not close libpq's connection.
        self._socket = socket.socket(fileno=os.dup(self._descriptor))
        self._is_unix = self._socket.family == socket.AF_UNIX
        self._has_tls = pgconn.ssl_in_use
        self._low_water = 1
        self._was_idle = True  # whether the last wait for a first byte came after a pause

    def rest(self) -> None:
        """Reset the low-water mark, so that the socket wakes a waiter at the first byte.

        Call this before any other code waits for the socket. With the mark, that code would not
        notice an answer of fewer bytes.
        """
        self._set_low_water(1)

    def close(self) -> None:
        """Close the duplicate of the descriptor."""
        self._socket.close()

    def wait(self, deadline: float | None, *, collects: bool, came: bool) -> None:
        """Wait for data, at most `IDLE_POLL` seconds, and let libpq read them.

        Parameters
        ----------
        deadline : float or None
            When to return at the latest, on the clock of `time.monotonic`.
        collects : bool
            Whether the caller has data already, and collects more. Otherwise wait for the first
            byte.
        came : bool
            Whether data came since the last wait.
        """
        now = time.monotonic()
        left = IDLE_POLL if deadline is None else min(max(deadline - now, 0.0), IDLE_POLL)
        if not collects:
            self._was_idle = now - self.last_data > IDLE_AFTER
            self._set_low_water(1)
            self._poll.poll(left * 1000)
        elif self._is_unix:
            time.sleep(min(self._nap, left))
        else:
            # With TLS, libpq takes one record at a time from the socket. If no whole message came,
            # the rest of a large message may be in the socket already, with fewer bytes than the
            # mark.
            self._set_low_water(_LOW_WATER if came or not self._has_tls else 1)
            self._poll.poll(min(_FIRST_TCP_POLL if self._was_idle else _TCP_POLL, left) * 1000)
            self._was_idle = False
        # Do this after a timeout too: bytes may have come, but fewer than the mark.
        take_input(self._pgconn)

    def _set_low_water(self, size: int) -> None:
        if not self._is_unix and size != self._low_water:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size)
            self._low_water = size


def take_input(pgconn: pq.abc.PGconn) -> None:
    """Let libpq read the socket, and throw away notifications, which libpq would keep."""
    pgconn.consume_input()
    forget_notifications(pgconn)


def forget_notifications(pgconn: pq.abc.PGconn) -> None:
    """Throw away notifications, which libpq keeps until somebody asks for them."""
    while pgconn.notifies() is not None:
        pass


def next_result(pgconn: pq.abc.PGconn) -> pq.abc.PGresult | None:
    """Return the next result of a command, None after the last; Ctrl-C can interrupt the wait.

    Raises
    ------
    psycopg.Error
        The connection is lost.
    """
    while pgconn.is_busy():
        wait_for(pgconn, select.POLLIN, 1.0)
        take_input(pgconn)
    return pgconn.get_result()


def wait_for(pgconn: pq.abc.PGconn, event: int, seconds: float) -> None:
    """Wait until libpq's socket can be read (`select.POLLIN`) or written (`select.POLLOUT`)."""
    poll = select.poll()  # not select(), which can't wait for descriptors above 1023
    poll.register(pgconn.socket, event)
    poll.poll(seconds * 1000)
