"""Format messages as readable lines and as JSON objects, for `inspect` and `tail`."""

from __future__ import annotations

import json
import math
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast, get_args

import click

from .. import (
    UNCHANGED,
    Begin,
    BeginPrepare,
    Commit,
    CommitPrepared,
    DecodeError,
    Decoder,
    Delete,
    Insert,
    Prepare,
    Range,
    Relation,
    RollbackPrepared,
    StreamAbort,
    StreamCommit,
    StreamPrepare,
    StreamStart,
    Truncate,
    Update,
    format_lsn,
    json_default,
)
from ..errors import printable
from ..names import qualified
from ..values import timestamp_form
from ._style import Paint, plain

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .. import Policies, TupleData, TypeRegistry

_CUT = 60  # the largest number of characters of a value in a line

Values = Literal["text", "typed"]
"""The form of a row's values in JSON: the server's text, or typed."""

values_option = click.option(
    "--values",
    type=click.Choice(get_args(Values)),
    help="Form of values with --json. [default: text]",
)

_OF_TRANSACTIONS = (
    *(Begin, BeginPrepare, Prepare, CommitPrepared, RollbackPrepared),
    *(StreamStart, StreamCommit, StreamPrepare, StreamAbort),
)
"""Messages whose field xid is always the xid of the top-level transaction."""


class Shown(NamedTuple):
    """A frame with its message or error, its transaction, and its tables."""

    lsn: int | None
    time: int | None
    """The time when the server sent the frame, in microseconds since 2000-01-01 UTC."""
    frame: bytes
    message: Any
    """The decoded message; None if the frame could not be decoded."""
    error: DecodeError | None
    xid: int | None
    """The xid of the top-level transaction; None outside of one."""
    tables: tuple[str, ...]
    """The qualified names of the tables that the message concerns."""
    changes: int | None = None
    """For a message that ends a transaction: the number of its rows, without those rolled back.

    A Truncate counts once for each table. None if the number is unknown.
    """
    is_read: bool = False
    """Whether the message is an Insert for a row of a table's snapshot."""

    @property
    def tag(self) -> str:
        """The frame's tag; "" for an empty frame."""
        return self.frame[:1].decode("latin-1")

    @property
    def name(self) -> str:
        """The message's name; "Read" for a row of a snapshot."""
        return "Read" if self.is_read else type(self.message).__name__


class Messages:
    """Decodes the frames of one stream, and finds each frame's transaction and tables.

    `continues` says whether the frames may begin in the middle of a transaction, as files of
    segments do. `read` says whether the Inserts are the rows of a snapshot.
    """

    def __init__(
        self,
        encoding: str,
        policies: Policies | None = None,
        registry: TypeRegistry | None = None,
        *,
        continues: bool = False,
        read: bool = False,
    ) -> None:
        self._read = read
        self._decoder = Decoder(policies, encoding=encoding, registry=registry)
        self._counts = _Counts(continues=continues)

    def decode(
        self, lsn: int | None, time: int | None, frame: bytes, seq: int | None = None
    ) -> Shown:
        """Decode a frame. Return an error instead of raising it: the next frame may be valid.

        `seq` is the position of the frame's first row in its transaction, if it is known.
        """
        state = self._decoder.state
        before = state.xid if state.open_xid is None else state.open_xid
        try:
            message: Any = self._decoder.decode(frame)
        except DecodeError as error:
            self._counts = _Counts()
            return Shown(lsn, time, frame, None, error, before, ())
        if isinstance(message, _OF_TRANSACTIONS):
            xid: int | None = message.xid
        else:
            xid = before
        changes = self._counts.take(message, xid, seq)
        is_read = self._read and isinstance(message, Insert)
        tables = tuple(self._tables(message))
        return Shown(lsn, time, frame, message, None, xid, tables, changes, is_read)

    def _tables(self, message: Any) -> Iterator[str]:
        if isinstance(message, (Insert, Update, Delete)):
            yield qualified(message.relation)
        elif isinstance(message, Relation):
            yield qualified(message)
        elif isinstance(message, Truncate):
            for oid in message.relation_ids:
                plan = self._decoder.state.plan(oid)
                yield str(oid) if plan is None else qualified(plan.relation)


class _Counts:
    """Counts the rows of each transaction until its end.

    Parameters
    ----------
    continues : bool
        Whether the first Begin may repeat one, in the middle of its transaction.
    """

    def __init__(self, *, continues: bool = False) -> None:
        self._continues = continues
        # The rows of the open transaction; None if it began before the first frame.
        self._open: int | None = None
        # The rows of streamed transactions, by subtransaction in the order of their first rows.
        self._streams: dict[int, dict[int, int]] = {}
        self._prepared: dict[tuple[int, str], int] = {}

    def take(self, message: Any, xid: int | None, seq: int | None) -> int | None:
        """Count a message; if it ends a transaction, return the number of its rows, else None."""
        if isinstance(message, (Insert, Update, Delete, Truncate)):
            rows = len(message.relation_ids) if isinstance(message, Truncate) else 1
            if message.in_stream:
                counts = self._streams.get(cast("int", xid))
                if counts is not None:
                    subxid = cast("int", message.xid)
                    counts[subxid] = counts.get(subxid, 0) + rows
            elif seq is not None:
                self._open = seq + rows
            elif self._open is not None:
                self._open += rows
        elif isinstance(message, (Begin, BeginPrepare)):
            self._open = None if self._continues else 0
            self._continues = False
        elif isinstance(message, StreamStart):
            if message.first_segment:
                self._streams[message.xid] = {}
        elif isinstance(message, StreamAbort):
            self._take_back(message)
        elif isinstance(message, CommitPrepared):
            return self._prepared.pop((message.xid, message.gid), None)
        elif isinstance(message, RollbackPrepared):
            self._prepared.pop((message.xid, message.gid), None)
        elif isinstance(message, (Commit, Prepare, StreamCommit, StreamPrepare)):
            return self._end(message)
        return None

    def _take_back(self, abort: StreamAbort) -> None:
        if abort.subxid == abort.xid:
            self._streams.pop(abort.xid, None)
            return
        counts = self._streams.get(abort.xid, {})
        # Subtransactions nest: the later ones are inside this one.
        while abort.subxid in counts:
            counts.popitem()

    def _end(self, message: Commit | Prepare | StreamCommit | StreamPrepare) -> int | None:
        if isinstance(message, (StreamCommit, StreamPrepare)):
            counts = self._streams.pop(message.xid, None)
            rows = None if counts is None else sum(counts.values())
        else:
            rows, self._open = self._open, None
        if rows is not None and isinstance(message, (Prepare, StreamPrepare)):
            self._prepared[message.xid, message.gid] = rows
        return rows


class Lines:
    """Formats each message as a line.

    Parameters
    ----------
    full : bool
        Whether long values are shown in full.
    paint : callable
        Colours the parts of a line.
    """

    def __init__(self, *, full: bool = False, paint: Paint = plain) -> None:
        self._full = full
        self._paint = paint

    def __call__(self, shown: Shown) -> str:
        """Return a line: LSN, transaction, message. Control characters in values are escaped."""
        lsn = "-" if shown.lsn is None else format_lsn(shown.lsn)
        xid = "-" if shown.xid is None else str(shown.xid)
        return f"{self._paint(f'{lsn} {xid}', 'place')} {self._text(shown)}"

    def _text(self, shown: Shown) -> str:
        message, paint = shown.message, self._paint
        if shown.error is not None:
            code = paint(f"ERROR {shown.error.code}", "error")
            return f"{code} at byte {shown.error.offset}: {shown.error}"
        tables = ", ".join(paint(printable(table), "table") for table in shown.tables)
        if isinstance(message, Insert):
            what = paint("READ" if shown.is_read else "INSERT", "insert")
            return f"{what} {tables} {self._tuple(message, message.new)}"
        if isinstance(message, Update):
            old = ""
            if message.old is not None:
                key = message.old_kind == "K"
                values = self._tuple(message, message.old, key=key)
                old = f"old {'key ' if key else ''}({values}) "
            return f"{paint('UPDATE', 'update')} {tables} {old}{self._tuple(message, message.new)}"
        if isinstance(message, Delete):
            key = message.old_kind == "K"
            values = self._tuple(message, message.old, key=key)
            return f"{paint('DELETE', 'delete')} {tables} {values}"
        if isinstance(message, Truncate):
            options = " CASCADE" * message.cascade + " RESTART IDENTITY" * message.restart_identity
            return f"{paint('TRUNCATE', 'truncate')} {tables}{options}"
        name, fields = type(message).__name__, repr(message)
        line = paint(name, "message") + fields.removeprefix(name)
        if shown.changes is not None:
            line += f" {shown.changes:,} change{'s' * (shown.changes != 1)}"
        return line

    def _tuple(self, message: Any, data: TupleData, *, key: bool = False) -> str:
        return " ".join(
            f"{self._paint(_column(name), 'column')}={self._value(value)}"
            for name, value in _values(data, message.relation, key=key)
        )

    def _value(self, value: Any) -> str:
        full = self._full
        if value is None:
            return self._paint("NULL", "no value")
        if value is UNCHANGED:
            return self._paint("UNCHANGED", "no value")
        if isinstance(value, bytes):
            text = f"\\x{value[: None if full else _CUT // 2].hex()}"
            return text + "…" * (not full and len(value) > _CUT // 2)
        return repr(value if full else value[:_CUT]) + "…" * (not full and len(value) > _CUT)


def _column(name: str) -> str:
    """Return a column's name, in SQL's quotes if the line would be ambiguous without them."""
    if not name or any(sign.isspace() or sign in "\"'=()" for sign in name):
        name = '"' + name.replace('"', '""') + '"'
    return printable(name)


def _values(
    data: TupleData, relation: Relation, *, key: bool, typed: bool = False
) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of a row's columns.

    A value is a str, None, UNCHANGED, or bytes if it has no text. If `typed`, it is the Python
    value of its type, or its text if Python cannot represent it. If `key`, only the columns of the
    key are yielded, because the row has no others.
    """
    for position, column in enumerate(relation.columns):
        if key and data.kind(position) == "n" and not column.is_key:
            continue
        value: Any
        try:
            value = _typed(data, position) if typed else data.text(position)
        except DecodeError:
            value = data.raw(position)
        yield column.name, value


def _typed(data: TupleData, position: int) -> Any:
    try:
        return _finite(data[position])
    except DecodeError:
        return data.text(position)


def _finite(value: Any) -> Any:
    """Replace NaN and Infinity in a value by strings, because JSON lacks them.

    Composites become dicts with the names of their fields.
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else str(Decimal(value))  # as PostgreSQL writes it
    if isinstance(value, Range):
        return _finite(json_default(value))
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return _finite(value._asdict())
    if isinstance(value, list):
        return [_finite(part) for part in value]
    return value


def as_json(shown: Shown, *, typed: bool = False) -> str:
    """Return the message as a JSON object, on one line and in ASCII.

    The value of a column is a string (the server's text), null, ``{"unchanged": true}`` (the server
    did not send the value), or ``{"hex": …}`` (bytes that have no text). If `typed`, booleans,
    arrays, composites, and numbers that JSON represents exactly are JSON's own. All other values
    are converted by :func:`~pgoutput_fast.json_default`. The LSNs and times of the message itself
    are strings, as the server prints them.
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
    fields["message"] = shown.name
    if message.in_stream:
        fields["in_stream"] = True
    for name in message.__match_args__:
        value = getattr(message, name)
        if name == "xid":
            # Inside a stream chunk, the frame has the xid of the subtransaction.
            if value is not None and value != shown.xid:
                fields["subxid"] = value
        elif name == "columns":
            fields[name] = [{**column._asdict(), "is_key": column.is_key} for column in value]
        elif name in ("old", "new"):
            if value is not None:
                key = name == "old" and message.old_kind == "K"
                fields[name] = dict(_values(value, message.relation, key=key, typed=typed))
        elif name == "lsn" or name.endswith("_lsn"):
            fields["message_lsn" if name == "lsn" else name] = (
                None if value is None else format_lsn(value)
            )
        elif name.endswith("_time"):
            fields[name] = None if value is None else timestamp_form(value, "+00")
        else:
            fields[name] = value
    if shown.changes is not None:
        fields["changes"] = shown.changes
    if isinstance(message, (Insert, Update, Delete)):
        fields["table"] = shown.tables[0]
    elif isinstance(message, Truncate):
        fields["tables"] = shown.tables
    return json.dumps(fields, default=json_default)
