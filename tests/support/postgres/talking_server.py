"""A server that says what a test wants: no PostgreSQL, but the bytes that one could send."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable

PARAMETERS = {
    "server_version": "18.0", "server_encoding": "UTF8", "client_encoding": "UTF8",
    "standard_conforming_strings": "on", "integer_datetimes": "on", "DateStyle": "ISO, MDY",
}  # fmt: skip


def message(tag: bytes, body: bytes) -> bytes:
    return tag + struct.pack("!i", len(body) + 4) + body


def notification(text: bytes = b"") -> bytes:
    return message(b"A", struct.pack("!i", 1) + b"channel\0" + text + b"\0")


def _said(tag: bytes, text: bytes, sqlstate: bytes) -> bytes:
    return message(tag, b"SERROR\0VERROR\0C" + sqlstate + b"\0M" + text + b"\0\0")


def notice(text: bytes, sqlstate: bytes = b"01000") -> bytes:
    return _said(b"N", text, sqlstate)


def error(text: bytes, sqlstate: bytes) -> bytes:
    return _said(b"E", text, sqlstate)


DONE = message(b"C", b"SET\0")
READY = message(b"Z", b"I")
COPY_OUT = message(b"H", struct.pack("!bhh", 1, 1, 1))
COPY_BOTH = message(b"W", struct.pack("!bh", 0, 0))
COPY_DONE = message(b"c", b"")


def copied(data: bytes) -> bytes:
    return message(b"d", data)


class TalkingServer:
    """Answers each query with the bytes that `answer` gives for it.

    Parameters
    ----------
    answer : callable
        Given the text of a query.
    greeting : bytes, optional
        In place of the answer to a client that connects.
    """

    def __init__(self, answer: Callable[[bytes], bytes], greeting: bytes | None = None) -> None:
        self._answer = answer
        self._greeting = greeting
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.dsn = (
            f"host=127.0.0.1 port={self._listener.getsockname()[1]} user=u dbname=d "
            "sslmode=disable gssencmode=disable"
        )
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._talk, args=(client,), daemon=True).start()

    def _talk(self, client: socket.socket) -> None:
        with client, client.makefile("rb") as coming, contextlib.suppress(OSError, struct.error):
            (length,) = struct.unpack("!i", coming.read(4))
            coming.read(length - 4)
            if self._greeting is not None:
                client.sendall(self._greeting)
                return
            told = [f"{name}\0{value}\0".encode() for name, value in PARAMETERS.items()]
            client.sendall(
                message(b"R", bytes(4)) + b"".join(message(b"S", one) for one in told) + READY
            )
            while tag := coming.read(1):
                (length,) = struct.unpack("!i", coming.read(4))
                body = coming.read(length - 4)
                if tag == b"Q":
                    client.sendall(self._answer(body))
                elif tag == b"c":
                    client.sendall(COPY_DONE + DONE + READY)
