"""Receive changes by logical replication, with psycopg 3: connections, streams, slots, capture.

>>> from pgoutput_fast.replication import connect
>>> with connect(dsn, publications=["p"], slot="s", create_slot=True) as stream:
...     for received in stream:
...         print(received.lsn, received.frame)

`capture` writes a slot's changes to a change log. ``docs/how-to/stream-in-python.md`` describes
streams.
"""

from __future__ import annotations

from .. import connections as _connections  # noqa: F401 - its error names the missing extra
from ..errors import ReplicationError, RetryableError
from . import slots
from .async_stream import AsyncReplicationStream
from .capture import capture
from .client import connect, connect_async
from .history import ddl_trigger_sql
from .landing import CaptureProgress
from .reads import SnapshotBatches, snapshot
from .stream import Batch, Received, ReplicationStream
from .walsender import CreatedSlot, ReplicationConnection, SlotState

__all__ = [
    "AsyncReplicationStream",
    "Batch",
    "CaptureProgress",
    "CreatedSlot",
    "Received",
    "ReplicationConnection",
    "ReplicationError",
    "ReplicationStream",
    "RetryableError",
    "SlotState",
    "SnapshotBatches",
    "capture",
    "connect",
    "connect_async",
    "ddl_trigger_sql",
    "slots",
    "snapshot",
]
