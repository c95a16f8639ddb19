"""Capture: a slot's changes into a directory of segments, acknowledged once they are durable."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from ..segments import SegmentMetadata, SegmentWriter
from .connection import ReplicationConnection
from .stream import ReplicationStream, confirmed_flush_lsn, start_options

if TYPE_CHECKING:
    import os
    import threading
    from collections.abc import Callable, Sequence

# Idle positions are kept in a file that is synced: not for each keepalive. Seconds, bytes of WAL.
_ADVANCE_INTERVAL = 10.0
_ADVANCE_BYTES = 16 << 20
_SILENCE = 0.1  # seconds


class CaptureProgress(NamedTuple):
    """How far a capture is."""

    frames: int
    """Received in this run."""
    transactions: int
    """Whole ones, received in this run."""
    bytes: int
    """Of frames received in this run."""
    received_lsn: int
    """Start LSN of what came last."""
    durable_lsn: int
    """Everything before it is in segments, and acknowledged."""


def capture(
    dsn: str,
    *,
    slot: str,
    publications: Sequence[str],
    directory: str | os.PathLike[str],
    create_slot: bool = False,
    until_lsn: int | None = None,
    binary: bool = False,
    messages: bool = False,
    segment_bytes: int = 16 << 20,
    progress: Callable[[CaptureProgress], None] | None = None,
    stop: threading.Event | None = None,
) -> CaptureProgress:
    """Land a slot's changes in segments, from where the directory ends.

    It goes on until `until_lsn`, or `stop`, or an error. A segment ends at a commit after
    `segment_bytes`, or when nothing comes for a tenth of a second. After any end, also a kill, the
    next call goes on without loss and without doubling.

    Parameters
    ----------
    dsn : str
        Connection string of libpq, or URL.
    slot : str
    publications : sequence of str
    directory : path
        See `pgoutput_fast.segments`. Made if it is not there.
    create_slot : bool
        Make the slot if it is not there.
    until_lsn : int
        End when all that was committed before this LSN is durable; e.g. pg_current_wal_lsn().
    binary, messages : bool
        As for `connect`.
    segment_bytes : int
        As for `SegmentWriter`.
    progress : callable
        Called after each batch of frames that came.
    stop : threading.Event
        Ends the capture from another thread, within some tenths of a second. What was received of
        whole transactions is made durable before.

    Raises
    ------
    PgOutputError
        The server can't be reached or refuses, the slot is beyond the end of the directory, the
        directory is another slot's or another capture's, or the disk refuses.
    """
    with ReplicationConnection(dsn) as connection:
        connection.check_publications(publications)
        options = start_options(connection, publications, binary=binary, messages=messages)
        state = connection.slot(slot)
        confirmed = confirmed_flush_lsn(connection, slot, create=create_slot)
        metadata = SegmentMetadata(
            system_identifier=connection.system_identifier,
            database=connection.database,
            slot=slot,
            publications=tuple(publications),
            server_version=connection.server_version,
            encoding=connection.settings["client_encoding"],
            settings=connection.settings,
            options=dict(options),
        )
        try:
            writer = SegmentWriter(
                directory, metadata, confirmed_flush_lsn=confirmed, segment_bytes=segment_bytes
            )
        except BaseException:
            if state is None:  # made here; left behind it would keep the server's log for ever
                connection.drop_slot(slot)
            raise
        with writer:
            connection.start(slot, writer.position, options)
            with ReplicationStream(connection, writer.position) as stream:
                return _land(stream, writer, until_lsn, progress, stop)


def _land(
    stream: ReplicationStream,
    writer: SegmentWriter,
    until_lsn: int | None,
    progress: Callable[[CaptureProgress], None] | None,
    stop: threading.Event | None,
) -> CaptureProgress:
    frames = transactions = size = 0
    received = server_lsn = writer.position
    last_advance = time.monotonic()
    write = writer.write

    def acknowledge(position: int | None) -> None:
        if position is not None:
            stream.acknowledge(position)

    while stop is None or not stop.is_set():
        batch = stream.receive(_SILENCE)
        if batch is None:  # the server shuts down
            break
        for lsn, _, _, frame in batch.frames:
            size += len(frame)
            if frame[:1] == b"C":
                transactions += 1
            position = write(lsn, frame)
            if position is not None:
                stream.acknowledge(position)
        if batch.frames:
            frames += len(batch.frames)
            received = max(received, batch.frames[-1][0])
        elif batch.keepalive_lsn is None:
            acknowledge(writer.flush())
            if until_lsn is not None:
                stream.ask_for_keepalive()
        if batch.keepalive_lsn is not None:
            server_lsn = received = max(received, batch.keepalive_lsn)
            if (
                time.monotonic() - last_advance > _ADVANCE_INTERVAL
                or server_lsn - writer.position > _ADVANCE_BYTES
            ):
                acknowledge(writer.advance(server_lsn))
                last_advance = time.monotonic()
        if progress is not None and batch.frames:
            progress(CaptureProgress(frames, transactions, size, received, writer.position))
        reached = max(writer.end_lsn, server_lsn)
        if until_lsn is not None and reached >= until_lsn and not writer.in_transaction:
            break
    acknowledge(writer.flush())
    return CaptureProgress(frames, transactions, size, received, writer.position)
