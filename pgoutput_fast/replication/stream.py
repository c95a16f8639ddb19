"""A stream of frames from a walsender: received in a thread, acknowledged by who made them durable.

The thread answers the server's keepalives whatever the consumer does, so that a slow one does not
run into ``wal_sender_timeout``. What it has received and nobody has taken is bounded: then it stops
reading, and goes on telling the server that it is alive.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import psycopg
from psycopg import pq

from ..errors import PgOutputError
from ..lsn import format_lsn
from .connection import (
    ReplicationConnection,
    publication_names,
    result_error,
    server_error,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from typing_extensions import Self

_XLOG_DATA = struct.Struct(">xQQq")  # after the tag: data start, WAL end, send time
_KEEPALIVE = struct.Struct(">xQqB")  # WAL end, send time, whether an answer is asked for
_STATUS = struct.Struct(">cQQQqB")  # tag, written, flushed, applied, time, ask for an answer
_POSTGRES_EPOCH = 946684800  # seconds from 1970

# Bytes that the consumer gets at once, and that may wait for it.
_BATCH_BYTES = 1 << 20
_QUEUE_BYTES = 32 << 20
# While data flow, what comes within so many seconds goes together: a wait brings some hundred
# frames at most, of which what a consumer pays for each batch would be the greater part.
_COLLECT = 0.02

# Waking up for each packet costs the client more than anything else it does. On TCP the kernel
# waits for so many bytes; a poll is short, because the stream's tail is less. On unix sockets poll
# ignores that, so what has come is read, and then a nap is taken.
_LOW_WATER = 64 << 10
_TCP_POLL = 0.005  # seconds
# Seconds. A socket's buffer holds some 280 small messages: a nap of 1 ms halved the rate.
_UNIX_NAP = 0.0002
_IDLE_AFTER = 0.05  # seconds without data; then the first byte wakes
_IDLE_POLL = 0.1  # seconds; also how long close() waits for the thread

_STATUS_INTERVAL = 10.0  # seconds, at most
_ACKNOWLEDGE_INTERVAL = 0.5  # seconds between two status messages that only tell a new position
_CLOSE_TIMEOUT = 2.0  # seconds for the server to end the stream


class Received(NamedTuple):
    """One frame with its header."""

    lsn: int
    """Start LSN of the data (0 for Type and Relation)."""
    wal_end: int
    send_time: int
    """Microseconds since 2000-01-01 UTC, by the server's clock."""
    frame: bytes


class Batch(NamedTuple):
    """What came together."""

    frames: list[tuple[int, int, int, bytes]]
    """The fields of `Received`; plain tuples, as naming them costs a quarter of receiving."""
    keepalive_lsn: int | None
    """The server has nothing before this LSN that is still to come; it came after the frames."""


class ReplicationStream:
    """Frames of one session, in the order in which the server sends them.

    Made by `connect`. Iterate over it, or call `receive`; after what was taken is durable, call
    `acknowledge`. Close it, or use it as a context manager.
    """

    def __init__(self, connection: ReplicationConnection, start_lsn: int) -> None:
        self.connection = connection
        self._condition = threading.Condition()
        self._queue: deque[Batch] = deque()
        self._queued_bytes = 0
        self._sizes: deque[int] = deque()
        self._error: BaseException | None = None
        self._ended = False
        self._stop = threading.Event()
        self._acknowledged = start_lsn
        self._received = start_lsn
        self._ask = False
        # 3 answers per timeout: one may be late.
        timeout = connection.wal_sender_timeout
        self._status_interval = min(_STATUS_INTERVAL, timeout / 3) if timeout else _STATUS_INTERVAL
        self._thread = threading.Thread(target=self._run, name="pgoutput_fast-receive", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Received]:
        """Frames until the server ends the stream."""
        while True:
            batch = self.receive()
            if batch is None:
                return
            yield from map(Received._make, batch.frames)

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
            An empty one after the timeout; None if the server has ended the stream.

        Raises
        ------
        PgOutputError
            The connection is lost, or the server has ended the stream with an error.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._condition:
            while not self._queue:
                if self._error is not None:
                    raise self._error
                if self._ended:
                    return None
                # Not for ever at once: a wait without timeout can't be interrupted everywhere.
                left = 1.0 if deadline is None else deadline - time.monotonic()
                if left <= 0:
                    return Batch([], None)
                self._condition.wait(min(left, 1.0))
            batch = self._queue.popleft()
            self._queued_bytes -= self._sizes.popleft()
            self._condition.notify_all()
            return batch

    def acknowledge(self, lsn: int) -> None:
        """Tell the server that everything before an LSN is durable: it won't send it again.

        Give a transaction's end LSN, or a keepalive's when nothing is in flight. To give one again,
        or a smaller one, does no harm. The server is told within half a second, and at the end.
        """
        self._acknowledged = max(self._acknowledged, lsn)

    def ask_for_keepalive(self) -> None:
        """Have the server tell soon how far it is, also when nothing happens."""
        self._ask = True

    def close(self) -> None:
        """Tell the server the last position, and end the connection."""
        self._stop.set()
        with self._condition:
            self._condition.notify_all()
        self._thread.join()
        self.connection.close()

    # In the thread

    def _run(self) -> None:
        pgconn = self.connection.pgconn
        try:
            self._receive_all(pgconn)
            if self._stop.is_set():
                self._finish(pgconn)
        except PgOutputError as error:
            self._error = error
        except psycopg.Error as error:
            self._error = server_error("the connection is lost", str(error), error.sqlstate)
        except BaseException as error:  # noqa: BLE001 - raised again by receive()
            self._error = error
        finally:
            with self._condition:
                self._ended = True
                self._condition.notify_all()

    def _receive_all(self, pgconn: pq.abc.PGconn) -> None:
        waiter = _Waiter(pgconn)
        frames: list[tuple[int, int, int, bytes]] = []
        size = 0
        keepalive: int | None = None
        came = False  # since the last wait
        since = 0.0  # when the first frame came that was not handed over
        get_copy_data, unpack = pgconn.get_copy_data, _XLOG_DATA.unpack_from
        self._send_status(pgconn)
        try:
            while not self._stop.is_set():
                length, data = get_copy_data(1)
                # All that has come, as fast as can be: this loop is what a client costs.
                while length > 0:
                    came = True
                    # A copy of it all, and then of the frame: slices of a memoryview cost more.
                    raw = data.tobytes()
                    if raw[0] == 0x77:  # w
                        lsn, wal_end, send_time = unpack(raw)
                        frames.append((lsn, wal_end, send_time, raw[25:]))
                        size += length
                        keepalive = None
                        if lsn > self._received:
                            self._received = lsn
                        if size >= _BATCH_BYTES:
                            break
                    elif raw[0] == 0x6B:  # k
                        keepalive, _, answer = _KEEPALIVE.unpack_from(raw)
                        self._received = max(self._received, keepalive)
                        if answer:
                            self._send_status(pgconn)
                    else:
                        raise PgOutputError(
                            f"the server sent CopyData of an unknown kind, {raw[:1]!r}"
                        )
                    length, data = get_copy_data(1)
                if came and not since:
                    since = time.monotonic()
                if since and (
                    length or waiter.was_idle or not came or time.monotonic() - since >= _COLLECT
                ):
                    self._hand_over(pgconn, Batch(frames, keepalive), size)
                    frames, size, keepalive, since = [], 0, None, 0.0
                self._send_status_if_due(pgconn)
                if length == 0:
                    try:
                        waiter.wait(came)
                    except psycopg.Error:
                        if since:
                            self._hand_over(pgconn, Batch(frames, keepalive), size)
                        raise
                    came = False
                elif length < 0:
                    self._on_end(pgconn)
                    return
        finally:
            waiter.close()

    def _hand_over(self, pgconn: pq.abc.PGconn, batch: Batch, size: int) -> None:
        """Queue what was received; while there is no room, only keep the connection alive."""
        with self._condition:
            while self._queued_bytes > _QUEUE_BYTES and not self._stop.is_set():
                self._condition.wait(min(_IDLE_POLL, self._status_interval))
                self._send_status_if_due(pgconn)
            self._queue.append(batch)
            self._sizes.append(size)
            self._queued_bytes += size
            self._condition.notify_all()

    def _send_status_if_due(self, pgconn: pq.abc.PGconn) -> None:
        since = time.monotonic() - self._status_time
        if (
            since >= self._status_interval
            or (self._acknowledged > self._status_lsn and since >= _ACKNOWLEDGE_INTERVAL)
            or (self._ask and since >= _IDLE_POLL)
        ):
            self._send_status(pgconn)

    def _send_status(self, pgconn: pq.abc.PGconn) -> None:
        ask, self._ask = self._ask, False
        self._status_time = time.monotonic()
        self._status_lsn = acknowledged = self._acknowledged
        now = int((time.time() - _POSTGRES_EPOCH) * 1_000_000)
        written = max(self._received, acknowledged)
        pgconn.put_copy_data(_STATUS.pack(b"r", written, acknowledged, acknowledged, now, ask))
        pgconn.flush()

    def _on_end(self, pgconn: pq.abc.PGconn) -> None:
        result = pgconn.get_result()
        if result is not None and result.status == pq.ExecStatus.FATAL_ERROR:
            raise result_error("the server ended the stream", result)

    def _finish(self, pgconn: pq.abc.PGconn) -> None:
        """Tell the position, and wait until the server has read it: it ends the stream."""
        deadline = time.monotonic() + _CLOSE_TIMEOUT
        with contextlib.suppress(psycopg.Error):
            self._send_status(pgconn)
            pgconn.put_copy_end()
            while pgconn.flush() and time.monotonic() < deadline:
                select.select([], [pgconn.socket], [], 0.1)
            ended = False
            while time.monotonic() < deadline:
                if not ended:
                    length, _ = pgconn.get_copy_data(1)
                    if length:
                        ended = length < 0
                        continue
                elif not pgconn.is_busy():
                    return  # the command is complete, and the slot free
                select.select([pgconn.socket], [], [], 0.1)
                pgconn.consume_input()


class _Waiter:
    """Waits for data on libpq's socket, with as few wake-ups as the stream allows."""

    def __init__(self, pgconn: pq.abc.PGconn) -> None:
        self._pgconn = pgconn
        self._descriptor = pgconn.socket
        self._poll = select.poll()
        self._poll.register(self._descriptor, select.POLLIN)
        self._last_data = time.monotonic()
        # A duplicate: closing it leaves libpq's alone.
        self._socket = socket.socket(fileno=os.dup(self._descriptor))
        self._is_unix = self._socket.family == socket.AF_UNIX
        # With TLS, libpq may hold data that the socket no longer shows: never wait for more.
        self._coalesce = not self._is_unix and not pgconn.ssl_in_use
        self._low_water = 1
        self.was_idle = True
        """Whether the last wait was one for the first data after a while."""

    def close(self) -> None:
        self._socket.close()

    def wait(self, came: bool) -> None:
        """Wait for more, at most `_IDLE_POLL`, and let libpq read it.

        Parameters
        ----------
        came : bool
            Whether data came since the last call.
        """
        now = time.monotonic()
        if came:
            self._last_data = now
        self.was_idle = now - self._last_data > _IDLE_AFTER
        if self.was_idle:
            self._set_low_water(1)
            self._poll.poll(_IDLE_POLL * 1000)
        elif self._is_unix:
            time.sleep(_UNIX_NAP)
        else:
            self._set_low_water(_LOW_WATER)
            self._poll.poll(_TCP_POLL * 1000)
        # In any case: less than the low-water mark may be there.
        self._pgconn.consume_input()

    def _set_low_water(self, size: int) -> None:
        if self._coalesce and size != self._low_water:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size)
            self._low_water = size


def start_options(
    connection: ReplicationConnection,
    publications: Sequence[str],
    *,
    binary: bool,
    messages: bool,
) -> Mapping[str, str]:
    """Options of START_REPLICATION for protocol version 1."""
    options = {"proto_version": "1", "publication_names": publication_names(publications)}
    for name, wanted in (("binary", binary), ("messages", messages)):
        if wanted:
            if connection.server_version < 140000:
                raise PgOutputError(f"{name}=True needs PostgreSQL 14 or newer")
            options[name] = "true"
    return options


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

    Parameters
    ----------
    dsn : str
        Connection string of libpq, or URL.
    slot : str
    publications : sequence of str
        Names of publications, as they are: they are quoted here.
    create_slot : bool
        Make the slot if it is not there.
    temporary : bool
        Make a slot that ends with the connection; there must be none of this name.
    start_lsn : int
        Where to go on; by default where the slot stands.
    binary : bool
        Values in their types' binary form, where they have one.
    messages : bool
        Logical messages (`pg_logical_emit_message`) too.

    Raises
    ------
    PgOutputError
        The server can't be reached or refuses; there is no such slot or publication; the slot is in
        use; the slot is beyond `start_lsn`, so that changes are lost.
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


def confirmed_flush_lsn(connection: ReplicationConnection, slot: str, *, create: bool) -> int:
    """Where a slot stands; made before if asked for."""
    state = connection.slot(slot)
    if state is not None:
        return state.confirmed_flush_lsn
    if not create:
        raise PgOutputError(
            f"no slot {slot!r} on the server (SQLSTATE 42704); create it with create_slot=True or "
            f"SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')"
        )
    return connection.create_slot(slot)
