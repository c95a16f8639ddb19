"""CopyData between a walsender and its client, without I/O: the headers around frames.

The server sends XLogData, with a frame in each, and keepalives; the client answers with standby
status updates. They are described in "Streaming Replication Protocol" of PostgreSQL's
documentation, https://www.postgresql.org/docs/current/protocol-replication.html.
"""

from __future__ import annotations

import struct
import time
from typing import NamedTuple

from ..errors import PgOutputError
from ..values import EPOCH_UTC

XLOG_DATA_TAG = 0x77  # "w"
XLOG_DATA = struct.Struct(">xQQq")
"""The header of XLogData: the tag, LSN of the data's start, LSN of the end of the WAL, send time.
The frame comes behind it."""

KEEPALIVE_TAG = 0x6B  # "k"
KEEPALIVE = struct.Struct(">xQqB")
"""A keepalive: the tag, LSN of the end of the WAL, send time, whether an answer is asked for."""

_STATUS = struct.Struct(">cQQQqB")  # tag "r", LSNs written, flushed, applied, time, ask for answer
_EPOCH = EPOCH_UTC.timestamp()


class Keepalive(NamedTuple):
    """A keepalive: the server is alive, and has come so far."""

    lsn: int
    """The server has nothing before this LSN that is still to be sent."""
    time: int
    """When it was sent, in microseconds since 2000-01-01 UTC, by the server's clock."""
    reply_requested: bool
    """Whether the server ends the connection if no status update comes soon."""


def parse_keepalive(data: bytes | memoryview) -> Keepalive:
    """Parse the CopyData of a keepalive.

    Raises
    ------
    PgOutputError
        The bytes are no keepalive.
    """
    if len(data) != KEEPALIVE.size or data[0] != KEEPALIVE_TAG:
        raise PgOutputError(
            f"CopyData that is neither a keepalive nor XLogData: {len(data)} bytes, the first "
            f"{bytes(data[:1])!r}",
            code="unfit_input",
        )
    lsn, sent, reply = KEEPALIVE.unpack(data)
    return Keepalive(lsn, sent, bool(reply))


def status_update(received: int, durable: int, *, ask: bool) -> bytes:
    """Make the CopyData of a standby status update with the current time.

    Parameters
    ----------
    received : int
        The LSN up to which everything was received.
    durable : int
        The LSN up to which everything is durable: the server never sends it again.
    ask : bool
        Whether the server is asked for a keepalive.
    """
    now = int((time.time() - _EPOCH) * 1_000_000)
    return _STATUS.pack(b"r", max(received, durable), durable, durable, now, ask)
