"""Take frames out of what libpq has received. The twin of ``_libpq_frames.pyx``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..protocol.copydata import XLOG_DATA, XLOG_DATA_TAG

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable


def take_copy_data(
    get_copy_data: Callable[[int], tuple[int, memoryview]],
    frames: list[tuple[int, int, int, bytes]],
    most: int,
) -> tuple[int, int, int, memoryview | None]:
    """Take XLogData from libpq until something else comes, or `most` bytes were taken.

    The compiled twin describes arguments and result.
    """
    size = received = 0
    while True:
        length, data = get_copy_data(1)
        if length < XLOG_DATA.size or data[0] != XLOG_DATA_TAG:
            return size, received, length, data
        lsn, wal_end, send_time = XLOG_DATA.unpack_from(data)
        # To slice bytes costs less than to slice a memoryview.
        frames.append((lsn, wal_end, send_time, data.tobytes()[XLOG_DATA.size :]))
        size += length
        if lsn > received:
            received = lsn
        if size >= most:
            return size, received, length, None


def pack_copy_data(
    get_copy_data: Callable[[int], tuple[int, memoryview]],
    data: bytearray,
    ends: array[int],
    lsns: array[int],
    most: int,
) -> tuple[int, int, int, memoryview | None]:
    """Do what `take_copy_data` does, and put all frames into one buffer.

    The compiled twin describes arguments and result.
    """
    size = received = 0
    if ends.itemsize != 8 or lsns.itemsize != 8:
        raise TypeError("arrays of 8 bytes an item are expected")
    while True:
        length, message = get_copy_data(1)
        if length < XLOG_DATA.size or message[0] != XLOG_DATA_TAG:
            return size, received, length, message
        lsn, _, _ = XLOG_DATA.unpack_from(message)
        data += message[XLOG_DATA.size :]
        ends.append(len(data))
        lsns.append(lsn)
        size += length
        if lsn > received:
            received = lsn
        if size >= most:
            return size, received, length, None
