"""Messages as readable lines and as JSON objects, for `inspect` and `tail`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import (
    UNCHANGED,
    Begin,
    BeginPrepare,
    CommitPrepared,
    DecodeError,
    Decoder,
    Delete,
    Insert,
    Prepare,
    Relation,
    RollbackPrepared,
    StreamAbort,
    StreamCommit,
    StreamPrepare,
    StreamStart,
    Truncate,
    Update,
    format_lsn,
)
from ..errors import printable
from ..names import qualified
from ..values import timestamp_form

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .. import TupleData

_CUT = 60  # characters of a value in a line

_OF_TRANSACTIONS = (
    *(Begin, BeginPrepare, Prepare, CommitPrepared, RollbackPrepared),
    *(StreamStart, StreamCommit, StreamPrepare, StreamAbort),
)
"""Their xid is the top-level transaction's, whatever came before."""


class Shown(NamedTuple):
    """One frame, decoded or not, and where it belongs."""

    lsn: int | None
    time: int | None
    """When the server sent it, microseconds since 2000-01-01 UTC."""
    frame: bytes
    message: Any
    """None if the frame could not be decoded."""
    error: DecodeError | None
    xid: int | None
    """Of the top-level transaction; None outside of one."""
    tables: tuple[str, ...]
    """Qualified names that the message concerns."""

    @property
    def tag(self) -> str:
        """The frame's tag; "" for an empty frame."""
        return self.frame[:1].decode("latin-1")


class Messages:
    """Decodes one stream of frames, and keeps what a single frame does not tell."""

    def __init__(self, encoding: str) -> None:
        self._decoder = Decoder(encoding=encoding)

    def decode(self, lsn: int | None, time: int | None, frame: bytes) -> Shown:
        """One frame. An error is in what is shown, not raised: the next frame may be sound."""
        state = self._decoder.state
        before = state.xid if state.open_xid is None else state.open_xid
        try:
            message: Any = self._decoder.decode(frame)
        except DecodeError as error:
            return Shown(lsn, time, frame, None, error, before, ())
        if isinstance(message, _OF_TRANSACTIONS):
            xid: int | None = message.xid
        else:
            xid = before
        return Shown(lsn, time, frame, message, None, xid, tuple(self._tables(message)))

    def _tables(self, message: Any) -> Iterator[str]:
        if isinstance(message, (Insert, Update, Delete)):
            yield qualified(message.relation)
        elif isinstance(message, Relation):
            yield qualified(message)
        elif isinstance(message, Truncate):
            state = self._decoder.state
            staged = state.staged.get(state.open_xid) if state.open_xid is not None else None
            for oid in message.relation_ids:
                plan = staged.plans.get(oid) if staged is not None else None
                relation = state.relations.get(oid) if plan is None else plan.relation
                yield str(oid) if relation is None else qualified(relation)


def line(shown: Shown, *, full: bool = False) -> str:
    """One line: LSN, transaction, message. Nothing in it is a control character."""
    lsn = "-" if shown.lsn is None else format_lsn(shown.lsn)
    xid = "-" if shown.xid is None else str(shown.xid)
    return f"{lsn} {xid} {_text(shown, full=full)}"


def _text(shown: Shown, *, full: bool) -> str:
    message = shown.message
    if shown.error is not None:
        return f"ERROR {shown.error.code} at byte {shown.error.offset}: {shown.error}"
    tables = ", ".join(map(printable, shown.tables))
    if isinstance(message, Insert):
        return f"INSERT {tables} {_tuple_text(message, message.new, full=full)}"
    if isinstance(message, Update):
        old = ""
        if message.old is not None:
            key = message.old_kind == "K"
            values = _tuple_text(message, message.old, key=key, full=full)
            old = f"old {'key ' if key else ''}({values}) "
        return f"UPDATE {tables} {old}{_tuple_text(message, message.new, full=full)}"
    if isinstance(message, Delete):
        key = message.old_kind == "K"
        return f"DELETE {tables} {_tuple_text(message, message.old, key=key, full=full)}"
    if isinstance(message, Truncate):
        options = " CASCADE" * message.cascade + " RESTART IDENTITY" * message.restart_identity
        return f"TRUNCATE {tables}{options}"
    return repr(message)


def _values(data: TupleData, relation: Relation, *, key: bool) -> Iterator[tuple[str, Any]]:
    """Names and values: str, None, UNCHANGED, or bytes of what has no text.

    Of the old key only the key's columns are known.
    """
    for position, column in enumerate(relation.columns):
        if key and data.kind(position) == "n" and not column.is_key:
            continue
        try:
            value: Any = data.text(position)
        except DecodeError:
            value = data.raw(position)
        yield column.name, value


def _tuple_text(message: Any, data: TupleData, *, full: bool, key: bool = False) -> str:
    parts = []
    for name, value in _values(data, message.relation, key=key):
        if value is None:
            text = "NULL"
        elif value is UNCHANGED:
            text = "UNCHANGED"
        elif isinstance(value, bytes):
            text = f"\\x{value[: None if full else _CUT // 2].hex()}"
            text += "…" * (not full and len(value) > _CUT // 2)
        else:
            text = repr(value if full else value[:_CUT]) + "…" * (not full and len(value) > _CUT)
        parts.append(f"{printable(name)}={text}")
    return " ".join(parts)


def as_json(shown: Shown) -> str:
    """One JSON object on one line, ASCII.

    A value of a column is a string (as the server writes it), null, ``{"unchanged": true}`` (it
    exists and was not sent), or ``{"hex": …}`` (bytes without a text). LSNs and times are strings
    as the server writes them.
    """
    message = shown.message
    fields: dict[str, Any] = {
        "lsn": None if shown.lsn is None else format_lsn(shown.lsn),
        "xid": shown.xid,
        "tag": shown.tag,
    }
    if shown.time is not None:
        fields["sent"] = timestamp_form(shown.time, "+00")
    if shown.error is not None:
        error = shown.error
        fields["error"] = {"code": error.code, "offset": error.offset, "message": str(error)}
        fields["frame"] = {"hex": shown.frame.hex()}
        return json.dumps(fields)
    fields["message"] = type(message).__name__
    if message.in_stream:
        fields["in_stream"] = True
    for name in message.__match_args__:
        value = getattr(message, name)
        if name == "xid":
            # Inside a stream the frame has the subtransaction's, or the same.
            if value is not None and value != shown.xid:
                fields["subxid"] = value
        elif name == "columns":
            fields[name] = [{**column._asdict(), "is_key": column.is_key} for column in value]
        elif name in ("old", "new"):
            if value is not None:
                key = name == "old" and message.old_kind == "K"
                fields[name] = {
                    column: _json_value(data)
                    for column, data in _values(value, message.relation, key=key)
                }
        elif name == "lsn" or name.endswith("_lsn"):
            fields["message_lsn" if name == "lsn" else name] = (
                None if value is None else format_lsn(value)
            )
        elif name.endswith("_time"):
            fields[name] = None if value is None else timestamp_form(value, "+00")
        else:
            fields[name] = _json_value(value) if isinstance(value, bytes) else value
    if isinstance(message, (Insert, Update, Delete)):
        fields["table"] = shown.tables[0]
    elif isinstance(message, Truncate):
        fields["tables"] = shown.tables
    return json.dumps(fields)


def _json_value(value: Any) -> Any:
    if value is UNCHANGED:
        return {"unchanged": True}
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    return value
