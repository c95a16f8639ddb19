"""Wait for data on libpq's socket, with as few wake-ups as the stream allows."""

from __future__ import annotations

import os
import select
import socket
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from psycopg import pq

# To wake up for each packet would cost the client more than all else that it does. So the first
# byte wakes it, and then it collects. On TCP the kernel is asked to wake it only for this many
# bytes, and each poll is short, as fewer may be left. On unix sockets poll() has no such mark, so
# that the client reads what has come and then sleeps.
_LOW_WATER = 64 << 10
_TCP_POLL = 0.005  # seconds
# The same where the first byte came after a while: what comes alone is handed over soon.
_FIRST_TCP_POLL = 0.002
# Seconds of this sleep. A unix socket's buffer holds some 280 small messages, so that the server
# has to wait during a longer sleep: one of 1 ms halved the rate.
_UNIX_NAP = 0.0002
# Of COPY the server sends 8 kB at once, of which the buffer holds more bytes.
COPY_NAP = 0.0005
# After this many seconds without data, what comes next may come alone.
IDLE_AFTER = 0.05
# Seconds that such a wait takes at most. close() may have to wait so long for another thread.
IDLE_POLL = 0.1


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
        """When data came for the last time. The code that takes the data sets it."""
        # The socket has a duplicate of the descriptor, so that closing it leaves libpq's open.
        self._socket = socket.socket(fileno=os.dup(self._descriptor))
        self._is_unix = self._socket.family == socket.AF_UNIX
        self._has_tls = pgconn.ssl_in_use
        self._low_water = 1
        self._was_idle = True  # whether the last wait for the first byte was one after a while

    def rest(self) -> None:
        """Let the socket wake whoever else waits for it at the first byte again.

        It has to be called before anything but this class waits: an answer that is smaller than the
        mark would never be noticed.
        """
        self._set_low_water(1)

    def close(self) -> None:
        """Close the duplicate of the descriptor."""
        self._socket.close()

    def wait(self, deadline: float | None, *, collects: bool, came: bool) -> None:
        """Wait for data, at most `IDLE_POLL`, and let libpq read them.

        Parameters
        ----------
        deadline : float or None
            When to return at the latest, by `time.monotonic`.
        collects : bool
            Whether something was taken that is to be handed over; else the first byte is waited
            for.
        came : bool
            Whether something was taken since the last wait.
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
            # With TLS, libpq takes one record at a time from the socket. So if no message came, the
            # rest of a large one may be there already, and it may be less than the mark.
            self._set_low_water(_LOW_WATER if came or not self._has_tls else 1)
            self._poll.poll(min(_FIRST_TCP_POLL if self._was_idle else _TCP_POLL, left) * 1000)
            self._was_idle = False
        # This is done after a timeout too, as fewer bytes may be there than the poll waited for.
        take_input(self._pgconn)

    def _set_low_water(self, size: int) -> None:
        if not self._is_unix and size != self._low_water:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size)
            self._low_water = size


def take_input(pgconn: pq.abc.PGconn) -> None:
    """Have libpq take what the socket has, and throw away notifications, which it would keep."""
    pgconn.consume_input()
    forget_notifications(pgconn)


def forget_notifications(pgconn: pq.abc.PGconn) -> None:
    """Throw away notifications, which libpq keeps until somebody asks for them."""
    while pgconn.notifies() is not None:
        pass


def next_result(pgconn: pq.abc.PGconn) -> pq.abc.PGresult | None:
    """The next result of a command, None behind the last; while it is waited for, Ctrl-C is heard.

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
    poll = select.poll()  # which select() can't do for descriptors above 1023
    poll.register(pgconn.socket, event)
    poll.poll(seconds * 1000)
