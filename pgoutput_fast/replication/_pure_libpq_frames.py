"""Take frames from libpq's buffer of received data. The twin of ``_libpq_frames.pyx``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import psycopg

from ..protocol.copydata import XLOG_DATA, XLOG_DATA_TAG

if TYPE_CHECKING:
    from array import array

    from psycopg import pq


def take_copy_data(
    pgconn: pq.abc.PGconn,
    frames: list[tuple[int, int, int, bytes]],
    most: int,
    drain: bool,
) -> tuple[int, int, int, memoryview | psycopg.Error | None]:
    """Take XLogData messages from libpq until another message comes, or `most` bytes were taken.

    The compiled twin describes arguments and result.
    """
    size = received = 0
    reads = drain
    while True:
        length, data = pgconn.get_copy_data(1)
        if length == 0 and reads:
            reads = False
            try:
                pgconn.consume_input()
            except psycopg.Error as error:
                return size, received, 0, error
            continue
        if length < XLOG_DATA.size or data[0] != XLOG_DATA_TAG:
            return size, received, length, data
        lsn, wal_end, send_time = XLOG_DATA.unpack_from(data)
        # Slicing bytes costs less than slicing a memoryview.
        frames.append((lsn, wal_end, send_time, data.tobytes()[XLOG_DATA.size :]))
        size += length
        reads = drain
        if lsn > received:
            received = lsn
        if size >= most:
            return size, received, length, None


def pack_copy_data(
    pgconn: pq.abc.PGconn,
    data: bytearray,
    ends: array[int],
    lsns: array[int],
    most: int,
    drain: bool,
) -> tuple[int, int, int, memoryview | psycopg.Error | None]:
    """Do what `take_copy_data` does, and put all frames into one buffer.

    The compiled twin describes arguments and result.
    """
    size = received = 0
    reads = drain
    if ends.itemsize != 8 or lsns.itemsize != 8:
        raise TypeError("arrays of 8 bytes an item are expected")
    while True:
        length, message = pgconn.get_copy_data(1)
        if length == 0 and reads:
            reads = False
            try:
                pgconn.consume_input()
            except psycopg.Error as error:
                return size, received, 0, error
            continue
        if length < XLOG_DATA.size or message[0] != XLOG_DATA_TAG:
            return size, received, length, message
        lsn, _, _ = XLOG_DATA.unpack_from(message)
        data += message[XLOG_DATA.size :]
        ends.append(len(data))
        lsns.append(lsn)
        size += length
        reads = drain
        if lsn > received:
            received = lsn
        if size >= most:
            return size, received, length, None


def pack_copy_rows(pgconn: pq.abc.PGconn, data: bytearray, most: int) -> int:
    """Append the data of a COPY TO to a buffer, until no more is there or `most` bytes were added.

    The compiled twin describes arguments and result.
    """
    capacity = len(data) + most
    reads = True
    while True:
        length, message = pgconn.get_copy_data(1)
        if length == 0 and reads:
            reads = False
            pgconn.consume_input()
            continue
        if length <= 0:
            return length
        data += message
        reads = True
        if len(data) >= capacity:
            return length
