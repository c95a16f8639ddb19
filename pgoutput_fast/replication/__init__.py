"""The client side of logical replication, on psycopg 3's `pq`: connections, streams, capture.

>>> from pgoutput_fast.replication import connect
>>> with connect(dsn, publications=["p"], slot="s", create_slot=True) as stream:
...     for received in stream:
...         print(received.lsn, received.frame)

`capture` lands a slot's changes in segments.
"""

from __future__ import annotations

try:
    import psycopg as _psycopg  # noqa: F401
except ImportError as error:
    from ..errors import PgOutputError

    raise PgOutputError(
        f"replication needs psycopg 3 ({error}); install the extra pgoutput-fast[replication]"
    ) from error

from .capture import CaptureProgress, capture
from .connection import ReplicationConnection, ReplicationError, SlotState
from .stream import Received, ReplicationStream, connect

__all__ = [
    "CaptureProgress",
    "Received",
    "ReplicationConnection",
    "ReplicationError",
    "ReplicationStream",
    "SlotState",
    "capture",
    "connect",
]
