"""Frames for tests of what no capture has: the test kit's, in fewer words."""

from __future__ import annotations

from pgoutput_fast import testing
from pgoutput_fast.testing import Table, UserType, stream_abort, stream_start

__all__ = [
    "OID",
    "STREAM_STOP",
    "begin",
    "commit",
    "insert",
    "relation",
    "stream_abort",
    "stream_commit",
    "stream_prepare",
    "stream_start",
    "truncate",
    "type_frame",
]

OID = 16385
STREAM_STOP = testing.stream_stop()


def begin(xid: int, lsn: int = 0x100, time: int = 5) -> bytes:
    return testing.begin(xid, lsn, time)


def commit(lsn: int = 0x100, end: int = 0x130, time: int = 5) -> bytes:
    return testing.commit(lsn, end, time)


def relation(
    *columns: str, oid: int = OID, xid: int | None = None, type_id: int = 25, name: str = "t"
) -> bytes:
    """A table all columns of which are of one type, and of its key."""
    return Table(name, dict.fromkeys(columns, type_id), oid, key=columns).relation(xid)


def type_frame(type_id: int, namespace: str, name: str, xid: int | None = None) -> bytes:
    return testing.type_(UserType(type_id, name, namespace), xid)


def insert(*values: bytes, oid: int = OID, xid: int | None = None) -> bytes:
    """A row of text values."""
    return testing.insert(oid, [("t", value) for value in values], xid)


def stream_commit(xid: int) -> bytes:
    return testing.stream_commit(xid, 0x200, commit_time=7)


def stream_prepare(xid: int) -> bytes:
    return testing.stream_prepare(xid, "gid", 0x200, prepare_time=7)


def truncate(*oids: int, xid: int | None = None) -> bytes:
    return testing.truncate(oids, xid=xid)
