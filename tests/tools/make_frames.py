"""Frames made by hand, for tests of what no capture has."""

from __future__ import annotations

import struct

OID = 16385


def begin(xid: int, lsn: int = 0x100, time: int = 5) -> bytes:
    return b"B" + struct.pack(">QqI", lsn, time, xid)


def commit(lsn: int = 0x100, end: int = 0x130, time: int = 5) -> bytes:
    return b"C" + struct.pack(">BQQq", 0, lsn, end, time)


def with_xid(tag: bytes, xid: int | None, body: bytes) -> bytes:
    return tag + (struct.pack(">I", xid) if xid is not None else b"") + body


def relation(
    *columns: str, oid: int = OID, xid: int | None = None, type_id: int = 25, name: str = "t"
) -> bytes:
    body = struct.pack(">I", oid) + b"public\0" + name.encode() + b"\0d"
    body += struct.pack(">h", len(columns))
    for column in columns:
        body += b"\1" + column.encode() + b"\0" + struct.pack(">Ii", type_id, -1)
    return with_xid(b"R", xid, body)


def type_frame(type_id: int, namespace: str, name: str, xid: int | None = None) -> bytes:
    body = struct.pack(">I", type_id) + namespace.encode() + b"\0" + name.encode() + b"\0"
    return with_xid(b"Y", xid, body)


def columns(*values: bytes) -> bytes:
    body = struct.pack(">h", len(values))
    for value in values:
        body += b"t" + struct.pack(">i", len(value)) + value
    return body


def insert(*values: bytes, oid: int = OID, xid: int | None = None) -> bytes:
    return with_xid(b"I", xid, struct.pack(">I", oid) + b"N" + columns(*values))


def stream_start(xid: int, first: int = 1) -> bytes:
    return b"S" + struct.pack(">IB", xid, first)


def stream_commit(xid: int) -> bytes:
    return b"c" + struct.pack(">IBQQq", xid, 0, 0x200, 0x230, 7)


def stream_abort(xid: int, subxid: int) -> bytes:
    return b"A" + struct.pack(">II", xid, subxid)


def stream_prepare(xid: int) -> bytes:
    return b"p" + struct.pack(">BQQqI", 0, 0x200, 0x230, 7, xid) + b"gid\0"


def truncate(*oids: int, xid: int | None = None) -> bytes:
    return with_xid(b"T", xid, struct.pack(f">iB{len(oids)}I", len(oids), 0, *oids))


STREAM_STOP = b"E"
