"""Report the state of a program to a service manager, by systemd's protocol sd_notify.

sd_notify(3) describes the protocol: datagrams with lines NAME=value, sent to the socket that the
environment variable NOTIFY_SOCKET names. Without the variable, this module does nothing.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import time


class Notifier:
    """Sends states to the service manager.

    A state that can't be sent is dropped, because nobody listens then.
    """

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._is_ready = False
        # Not 0.0: the monotonic clock may begin at the start of the machine.
        self._last_beat = -math.inf
        self._interval = _watchdog_interval()
        address = os.environ.get("NOTIFY_SOCKET", "")
        if address[:1] not in ("/", "@"):
            return
        if address[0] == "@":  # an abstract name, not a file
            address = "\0" + address[1:]
        notify_socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        notify_socket.setblocking(False)  # a service manager that hangs must not stop the program
        try:
            notify_socket.connect(address)
        except OSError:
            notify_socket.close()
        else:
            self._socket = notify_socket

    def close(self) -> None:
        """Close the socket."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def ready(self) -> None:
        """Report that the service has begun its work. Calls after the first do nothing."""
        if not self._is_ready:
            self._is_ready = True
            self._send("READY=1")

    def status(self, text: str) -> None:
        """Report the text for `systemctl status`."""
        self._send(f"STATUS={' '.join(text.split())}")

    def beat(self) -> None:
        """Report that the service works. The loop that does the work calls this often.

        The manager gets two such messages within its timeout, after which it takes the service for
        hung.
        """
        now = time.monotonic()
        if self._interval is not None and now - self._last_beat >= self._interval:
            self._last_beat = now
            self._send("WATCHDOG=1")

    def stopping(self) -> None:
        """Report that the service ends."""
        self._send("STOPPING=1")

    def _send(self, state: str) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.send(state.encode())


def _watchdog_interval() -> float | None:
    """Return the seconds between two beats; None if the service manager expects none."""
    limit, process = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID", "")
    if not limit.isdecimal() or int(limit) == 0 or process not in ("", str(os.getpid())):
        return None
    return int(limit) / 1e6 / 2
