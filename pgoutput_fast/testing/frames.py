"""Make the frame of each kind of message, with defaults for the fields that a test leaves out.

LSNs are ints, times are microseconds since 2000-01-01 UTC. With the default None as `xid`, the
frame is one from outside stream chunks, with an xid it is one from inside. All functions raise a
PgOutputError if a value does not fit its field.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..errors import PgOutputError
from ..protocol.copydata import KEEPALIVE, KEEPALIVE_TAG, XLOG_DATA, XLOG_DATA_TAG
from ..protocol.encode import encode_fields
from ..protocol.wire import LAYOUTS, XID_SIZE
from .tables import Row, Table, UserType, text_of

COMMIT_RECORD = 0x30
"""Bytes of a plain commit's WAL record: by default `end_lsn` is `commit_lsn` plus this number."""


def begin(xid: int, final_lsn: int = 0x100, commit_time: int = 0) -> bytes:
    """Make a Begin.

    Parameters
    ----------
    xid : int
    final_lsn : int
        The LSN of the transaction's commit record.
    commit_time : int
        Microseconds since 2000-01-01 UTC.
    """
    return encode_fields("B", final_lsn=final_lsn, commit_time=commit_time, xid=xid)


def commit(
    commit_lsn: int = 0x100, end_lsn: int | None = None, commit_time: int = 0, flags: int = 0
) -> bytes:
    """Make a Commit.

    Parameters
    ----------
    commit_lsn : int
        The LSN of the commit record.
    end_lsn : int, optional
        The LSN after that record; by default `commit_lsn` plus `COMMIT_RECORD`.
    commit_time : int
        Microseconds since 2000-01-01 UTC.
    flags : int
        Unused by PostgreSQL: always 0 in its frames.
    """
    return encode_fields(
        "C",
        flags=flags,
        commit_lsn=commit_lsn,
        end_lsn=_end(commit_lsn, end_lsn),
        commit_time=commit_time,
    )


def origin(name: str, commit_lsn: int = 0) -> bytes:
    """Make an Origin.

    Parameters
    ----------
    name : str
        The name of the replication origin.
    commit_lsn : int
        The transaction's commit LSN on the server of its origin.
    """
    return encode_fields("O", commit_lsn=commit_lsn, name=name)


def relation(table: Table, xid: int | None = None) -> bytes:
    """Make a Relation, which announces a table.

    Parameters
    ----------
    table : Table
    xid : int, optional
        The xid of the subtransaction, inside a stream chunk.
    """
    return table.relation(xid)


def type_(user_type: UserType, xid: int | None = None) -> bytes:
    """Make a Type, which announces a type.

    Parameters
    ----------
    user_type : UserType
    xid : int, optional
        The xid of the subtransaction, inside a stream chunk.
    """
    return user_type.frame(xid)


def insert(table: Table | int, values: Row, xid: int | None = None) -> bytes:
    """Make an Insert.

    Parameters
    ----------
    table : Table or int
        The table, or its OID alone.
    values : sequence or mapping
        The row, as :meth:`Table.row` takes it. With an OID alone, a sequence of any length.
    xid : int, optional
        The xid of the subtransaction, inside a stream chunk.

    Raises
    ------
    PgOutputError
        The values don't fit the table.
    """
    relation_id, new = _row(table, values)
    return encode_fields("I", xid=xid, relation_id=relation_id, new=new)


def update(
    table: Table | int,
    values: Row,
    old: Row | None = None,
    old_kind: str | None = None,
    xid: int | None = None,
) -> bytes:
    """Make an Update.

    Parameters
    ----------
    table : Table or int
        The table, or its OID alone.
    values, old : sequence or mapping
        The row after the update and the row before it, as for :func:`insert`. By default the frame
        has no row from before.
    old_kind : {"K", "O"}, optional
        The part of `old` that is sent: "K" the key, "O" the whole row. The default is "O" for a
        table with the replica identity "f", else "K".
    xid : int, optional
        The xid of the subtransaction, inside a stream chunk.
    """
    relation_id, new = _row(table, values)
    kind, before = _old(table, old, old_kind)
    return encode_fields("U", xid=xid, relation_id=relation_id, old_kind=kind, old=before, new=new)


def delete(
    table: Table | int, old: Row, old_kind: str | None = None, xid: int | None = None
) -> bytes:
    """Make a Delete.

    Parameters
    ----------
    table : Table or int
        The table, or its OID alone.
    old : sequence or mapping
        The deleted row, as for :func:`insert`.
    old_kind : {"K", "O"}, optional
        The part of `old` that is sent, as for :func:`update`.
    xid : int, optional
        The xid of the subtransaction, inside a stream chunk.
    """
    relation_id, _ = _row(table, old)
    kind, before = _old(table, old, old_kind)
    return encode_fields("D", xid=xid, relation_id=relation_id, old_kind=kind, old=before)


def truncate(tables: Iterable[Table | int], options: int = 0, xid: int | None = None) -> bytes:
    """Make a Truncate.

    Parameters
    ----------
    tables : iterable of (Table or int)
        The tables, or their OIDs alone.
    options : int
        The sum of 1 for CASCADE and 2 for RESTART IDENTITY.
    xid : int, optional
        The xid of the subtransaction, inside a stream chunk.
    """
    ids = [table if isinstance(table, int) else table.relation_id for table in tables]
    return encode_fields("T", xid=xid, relation_ids=ids, options=options)


def message(
    prefix: str, content: bytes, lsn: int = 0x100, flags: int = 0, xid: int | None = None
) -> bytes:
    """Make a message of ``pg_logical_emit_message``.

    Parameters
    ----------
    prefix : str
    content : bytes
    lsn : int
        The LSN of the message.
    flags : int
        1 if the message is transactional, else 0.
    xid : int, optional
        The xid of the subtransaction, inside a stream chunk.
    """
    return encode_fields("M", xid=xid, flags=flags, lsn=lsn, prefix=prefix, content=content)


def stream_start(xid: int, first_segment: bool = True) -> bytes:
    """Make a Stream Start, which begins a stream chunk.

    Parameters
    ----------
    xid : int
    first_segment : bool
        Whether the chunk is the transaction's first one.
    """
    return encode_fields("S", xid=xid, first_segment=first_segment)


def stream_stop() -> bytes:
    """Make a Stream Stop, which ends a stream chunk."""
    return encode_fields("E")


def stream_commit(
    xid: int,
    commit_lsn: int = 0x100,
    end_lsn: int | None = None,
    commit_time: int = 0,
    flags: int = 0,
) -> bytes:
    """Make a Stream Commit.

    Parameters
    ----------
    xid : int
    commit_lsn, end_lsn, commit_time, flags
        As for :func:`commit`.
    """
    return encode_fields(
        "c",
        xid=xid,
        flags=flags,
        commit_lsn=commit_lsn,
        end_lsn=_end(commit_lsn, end_lsn),
        commit_time=commit_time,
    )


def stream_abort(
    xid: int,
    subxid: int | None = None,
    abort_lsn: int | None = None,
    abort_time: int | None = None,
) -> bytes:
    """Make a Stream Abort of a streamed transaction, or of one of its subtransactions.

    Parameters
    ----------
    xid : int
    subxid : int, optional
        The xid of the subtransaction; by default the whole transaction is aborted.
    abort_lsn, abort_time : int, optional
        The LSN and time of the abort. A server sends them only with ``streaming 'parallel'``.
    """
    return encode_fields(
        "A",
        xid=xid,
        subxid=xid if subxid is None else subxid,
        abort_lsn=abort_lsn,
        abort_time=abort_time,
    )


def begin_prepare(
    xid: int,
    gid: str = "gid",
    prepare_lsn: int = 0x100,
    end_lsn: int | None = None,
    prepare_time: int = 0,
) -> bytes:
    """Make a Begin Prepare.

    Parameters
    ----------
    xid : int
    gid : str
        The transaction's global identifier.
    prepare_lsn : int
        The LSN of the prepare record.
    end_lsn : int, optional
        The LSN after that record; by default `prepare_lsn` plus `COMMIT_RECORD`.
    prepare_time : int
        Microseconds since 2000-01-01 UTC.
    """
    return encode_fields(
        "b",
        prepare_lsn=prepare_lsn,
        end_lsn=_end(prepare_lsn, end_lsn),
        prepare_time=prepare_time,
        xid=xid,
        gid=gid,
    )


def prepare(
    xid: int,
    gid: str = "gid",
    prepare_lsn: int = 0x100,
    end_lsn: int | None = None,
    prepare_time: int = 0,
    flags: int = 0,
) -> bytes:
    """Make a Prepare.

    Parameters
    ----------
    xid, gid, prepare_lsn, end_lsn, prepare_time
        As for :func:`begin_prepare`.
    flags : int
        Unused by PostgreSQL: always 0 in its frames.
    """
    return _prepare("P", xid, gid, prepare_lsn, end_lsn, prepare_time, flags)


def stream_prepare(
    xid: int,
    gid: str = "gid",
    prepare_lsn: int = 0x100,
    end_lsn: int | None = None,
    prepare_time: int = 0,
    flags: int = 0,
) -> bytes:
    """Make a Stream Prepare.

    Parameters
    ----------
    xid, gid, prepare_lsn, end_lsn, prepare_time, flags
        As for :func:`prepare`.
    """
    return _prepare("p", xid, gid, prepare_lsn, end_lsn, prepare_time, flags)


def commit_prepared(
    xid: int,
    gid: str = "gid",
    commit_lsn: int = 0x200,
    end_lsn: int | None = None,
    commit_time: int = 0,
    flags: int = 0,
) -> bytes:
    """Make a Commit Prepared.

    Parameters
    ----------
    xid : int
    gid : str
        The transaction's global identifier.
    commit_lsn, end_lsn, commit_time, flags
        As for :func:`commit`.
    """
    return encode_fields(
        "K",
        flags=flags,
        commit_lsn=commit_lsn,
        end_lsn=_end(commit_lsn, end_lsn),
        commit_time=commit_time,
        xid=xid,
        gid=gid,
    )


def rollback_prepared(
    xid: int,
    gid: str = "gid",
    prepare_end_lsn: int = 0x130,
    rollback_end_lsn: int = 0x230,
    prepare_time: int = 0,
    rollback_time: int = 0,
    flags: int = 0,
) -> bytes:
    """Make a Rollback Prepared.

    Parameters
    ----------
    xid : int
    gid : str
        The transaction's global identifier.
    prepare_end_lsn, rollback_end_lsn : int
        The LSNs after the records of the prepare and the rollback.
    prepare_time, rollback_time : int
        Microseconds since 2000-01-01 UTC.
    flags : int
        Unused by PostgreSQL: always 0 in its frames.
    """
    return encode_fields(
        "r",
        flags=flags,
        prepare_end_lsn=prepare_end_lsn,
        rollback_end_lsn=rollback_end_lsn,
        prepare_time=prepare_time,
        rollback_time=rollback_time,
        xid=xid,
        gid=gid,
    )


def in_stream(frame: bytes, xid: int) -> bytes:
    """Convert a frame to the form inside a stream chunk: with the xid after its tag.

    An Origin has no xid inside a stream chunk either, so it is returned unchanged.

    Parameters
    ----------
    frame : bytes
    xid : int

    Raises
    ------
    PgOutputError
        `xid` is not a valid xid, or the message cannot be inside a stream chunk.
    """
    tag = chr(frame[0])
    if tag == "O":
        return frame
    if not LAYOUTS[tag] or LAYOUTS[tag][0][1] != "stream_xid":
        raise PgOutputError(f"a {tag!r} frame cannot be inside a stream chunk", code="unfit_input")
    if not 0 <= xid <= 0xFFFFFFFF:
        raise PgOutputError(f"{xid} is not an xid", code="unfit_input")
    return frame[:1] + xid.to_bytes(XID_SIZE, "big") + frame[1:]


def xlog_data(frame: bytes, lsn: int, wal_end: int | None = None, send_time: int = 0) -> bytes:
    """Make an XLogData message with a frame, as the content of a CopyData message.

    Parameters
    ----------
    frame : bytes
    lsn : int
        The start of the frame's WAL data.
    wal_end : int, optional
        By default `lsn`, as a server sends it.
    send_time : int
        Microseconds since 2000-01-01 UTC.
    """
    header = XLOG_DATA.pack(lsn, lsn if wal_end is None else wal_end, send_time)
    return bytes([XLOG_DATA_TAG]) + header[1:] + frame


def keepalive(wal_end: int, send_time: int = 0, reply: bool = False) -> bytes:
    """Make a keepalive, as the content of a CopyData message.

    Parameters
    ----------
    wal_end : int
        The end of the server's log.
    send_time : int
        Microseconds since 2000-01-01 UTC.
    reply : bool
        Whether to ask for a reply at once.
    """
    return bytes([KEEPALIVE_TAG]) + KEEPALIVE.pack(wal_end, send_time, reply)[1:]


def _end(lsn: int, end_lsn: int | None) -> int:
    return lsn + COMMIT_RECORD if end_lsn is None else end_lsn


def _prepare(
    tag: str,
    xid: int,
    gid: str,
    prepare_lsn: int,
    end_lsn: int | None,
    prepare_time: int,
    flags: int,
) -> bytes:
    return encode_fields(
        tag,
        flags=flags,
        prepare_lsn=prepare_lsn,
        end_lsn=_end(prepare_lsn, end_lsn),
        prepare_time=prepare_time,
        xid=xid,
        gid=gid,
    )


def _row(table: Table | int, values: Row) -> tuple[int, list[Any]]:
    if isinstance(table, Table):
        return table.relation_id, table.row(values)
    return table, [text_of(value) for value in values]


def _old(
    table: Table | int, old: Row | None, old_kind: str | None
) -> tuple[str | None, list[Any] | None]:
    if old is None:
        return old_kind, None
    if old_kind is None:
        old_kind = "O" if isinstance(table, Table) and table.replica_identity == "f" else "K"
    return old_kind, _row(table, old)[1]
