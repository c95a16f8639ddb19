"""Make frames, tables and whole streams without a server, to test programs that read pgoutput.

A function for each message makes its frame (:func:`begin`, :func:`insert` and so on), and
:func:`encode` makes the frame of a decoded message. A :class:`Server` sends whole transactions as
PostgreSQL does, and knows what a consumer must have received in the end. The Hypothesis strategies
in ``pgoutput_fast.testing.strategies`` need the extra ``pgoutput-fast[testing]``.
"""

from __future__ import annotations

from ..protocol.encode import encode, encode_fields, encode_tuple
from .frames import (
    begin,
    begin_prepare,
    commit,
    commit_prepared,
    delete,
    in_stream,
    insert,
    keepalive,
    message,
    origin,
    prepare,
    relation,
    rollback_prepared,
    stream_abort,
    stream_commit,
    stream_prepare,
    stream_start,
    stream_stop,
    truncate,
    type_,
    update,
    xlog_data,
)
from .server import CommittedTransaction, MadeChange, MadeTransaction, Savepoint, Sent, Server
from .tables import Table, UserType

__all__ = [
    "CommittedTransaction",
    "MadeChange",
    "MadeTransaction",
    "Savepoint",
    "Sent",
    "Server",
    "Table",
    "UserType",
    "begin",
    "begin_prepare",
    "commit",
    "commit_prepared",
    "delete",
    "encode",
    "encode_fields",
    "encode_tuple",
    "in_stream",
    "insert",
    "keepalive",
    "message",
    "origin",
    "prepare",
    "relation",
    "rollback_prepared",
    "stream_abort",
    "stream_commit",
    "stream_prepare",
    "stream_start",
    "stream_stop",
    "truncate",
    "type_",
    "update",
    "xlog_data",
]
