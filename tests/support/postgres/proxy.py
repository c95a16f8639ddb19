"""A proxy on loopback that cuts, delays, halves or keeps to itself what goes through it."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self


class Proxy:
    """Between clients and a server's unix socket.

    Attributes
    ----------
    port : int
    delay : float
        Seconds before each piece goes on; pieces are cut at random while it is not 0.
    refuses : bool
        Whether new connections are closed at once.
    silent_after : int or None
        How many queries of a connection the server is given before nothing goes through any more.
    connections : int
        How many came.
    """

    def __init__(self, server: str, seed: int = 0) -> None:
        self.delay = 0.0
        self.refuses = False
        self.silent_after: int | None = None
        self.connections = 0
        self._server = server
        self._random = random.Random(seed)
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._frozen: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._threads[0].join()
        self.cut()
        for thread in self._threads:
            thread.join()

    def cut(self) -> None:
        """End all connections, in the middle of whatever they carry."""
        pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for end in pair:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def freeze(self) -> None:
        """Nothing goes through the connections that are there any more."""
        for pair in self._pairs:
            self._frozen.update(pair)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            server = socket.socket(socket.AF_UNIX)
            try:
                if self.refuses:
                    raise ConnectionRefusedError
                server.connect(self._server)
            except OSError:
                client.close()
                server.close()
                continue
            self._pairs.append((client, server))
            done: list[None] = []
            for source, target in ((client, server), (server, client)):
                thread = threading.Thread(
                    target=self._carry, args=(source, target, done), daemon=True
                )
                self._threads.append(thread)
                thread.start()

    def _carry(self, source: socket.socket, target: socket.socket, done: list[None]) -> None:
        queries = 0
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                queries += data[:1] == b"Q"
                if self.silent_after is not None and queries > self.silent_after:
                    self._frozen.add(source)
                while data:
                    while source in self._frozen:
                        if (source, target) not in self._pairs and (
                            target, source,
                        ) not in self._pairs:  # fmt: skip
                            raise OSError
                        time.sleep(0.01)
                    size = len(data)
                    if self.delay:
                        time.sleep(self.delay)
                        size = self._random.randint(1, size)
                    target.sendall(data[:size])
                    data = data[size:]
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        done.append(None)
        if len(done) == 2:
            source.close()
            target.close()
