"""The exception family of this package, and the catalogue of what can be wrong with a frame.

Both implementations raise through :func:`fail`. So a bad frame gives the same class, code, offset
and sentence, no matter which implementation decoded it.
"""

from __future__ import annotations

import contextlib
import re
from contextvars import ContextVar
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from typing_extensions import Self

MAX_FRAME_LENGTH = 0x3FFFFFFF
"""Bytes of the longest frame: a server can't allocate more (``MaxAllocSize``, 1 GiB - 1)."""


_ALONE = object()


class Argument:
    """An option in a hint. Python, the command and Spark each write it in their own way.

    Parameters
    ----------
    name : str
        The keyword in Python.
    value : object, optional
        A value to show with the option; by default the option is shown without a value.
    """

    def __init__(self, name: str, value: object = _ALONE) -> None:
        self.name = name
        # A user may have passed a DSN for another option.
        self.value = without_passwords(value) if isinstance(value, str) else value

    @property
    def has_value(self) -> bool:
        """Whether the option is shown with a value."""
        return self.value is not _ALONE

    def __str__(self) -> str:
        return f"{self.name}={self.value!r}" if self.has_value else f"{self.name}="

    def __repr__(self) -> str:
        return f"Argument({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Argument) and (self.name, self.value) == (other.name, other.value)

    __hash__ = None  # type: ignore[assignment] # a value may be a list

    def __reduce__(self) -> tuple[object, ...]:
        return Argument, (self.name, self.value) if self.has_value else (self.name,)


_shown: ContextVar[Callable[[Argument], str]] = ContextVar("_shown", default=str)


@contextlib.contextmanager
def options_shown_as(shown: Callable[[Argument], str]) -> Iterator[None]:
    """Write options in texts of errors as a front end writes them, within the block."""
    token = _shown.set(shown)
    try:
        yield
    finally:
        _shown.reset(token)


class PgOutputError(Exception):
    """Base class of the errors of this package, for bad input and bad options alike.

    Parameters
    ----------
    message : str
        What happened, with the table, the file or the position, and why. It names no option.
    code : str, optional
        The kind of the error, as listed in the reference; by default the code of the class. Codes
        are stable, texts may change.
    parameter : str, optional
        The option that is wrong.
    hint : str or sequence of (str or Argument), optional
        What to do, as a sentence without a full stop.
    table, path : str, optional
        See the attributes.

    Attributes
    ----------
    code, parameter, hint
        The parameters; the hint is a tuple. Each front end assembles the text with :meth:`text`. An
        error about a frame has the code of its :class:`DecodeError`.
    table : str or None
        The table of the error, ``namespace.name``.
    path : str or None
        The file of the error, or of the refused frame.
    offset, tag
        As in :class:`DecodeError`, for the refused frame.
    frame : int or None
        Index of the frame in the batch of frames that was decoded.
    column : str or None
        The name of the column whose value is refused.
    policy : tuple of (str, str or None), or None
        Name and value of a policy that lets the refused value pass. The value is None if it depends
        on the data.
    """

    parameter: str | None = None
    hint: tuple[str | Argument, ...] = ()
    table: str | None = None
    code: str | None = None
    offset: int | None = None
    tag: str | None = None
    frame: int | None = None
    path: str | None = None
    column: str | None = None
    policy: tuple[str, str | None] | None = None

    def __init__(
        self,
        message: str = "",
        *,
        code: str | None = None,
        parameter: str | None = None,
        hint: str | Sequence[str | Argument] = (),
        table: str | None = None,
        path: str | None = None,
    ) -> None:
        super().__init__(message)
        if code is not None:
            self.code = code
        if parameter is not None:
            self.parameter = parameter
        if hint:
            self.hint = (hint,) if isinstance(hint, str) else tuple(hint)
        if table is not None:
            self.table = table
        if path is not None:
            self.path = path

    @property
    def message(self) -> str:
        """What happened, and why."""
        return str(self.args[0]) if self.args else ""

    def text(self, shown: Callable[[Argument], str] | None = None) -> str:
        """Assemble the error's text.

        Parameters
        ----------
        shown : callable, optional
            Writes an option for a front end. The default is the function of `options_shown_as`, or
            else Python's keyword.
        """
        shown = shown or _shown.get()
        wrong = "" if self.parameter is None else shown(Argument(self.parameter))
        hint = "".join(part if isinstance(part, str) else shown(part) for part in self.hint)
        text = f"{wrong.removesuffix('=')}: {self.message}" if wrong else self.message
        if self.code:
            text = f"{text.removesuffix('.')} [{self.code}]"
        return f"{text.removesuffix('.')}. {hint}" if hint else text

    def __str__(self) -> str:
        return self.text()

    def locate(self, error: DecodeError, frame: int | None, path: str | None = None) -> Self:
        """Copy the attributes of a refused frame to this error.

        Parameters
        ----------
        error : DecodeError
        frame : int or None
        path : str, optional

        Returns
        -------
        PgOutputError
            This error.
        """
        self.code, self.offset, self.tag = error.code, error.offset, error.tag
        self.column, self.policy = error.column, error.policy
        self.frame, self.path = frame, path
        return self


class ReplicationError(PgOutputError):
    """The server refused something, or the connection is lost.

    Attributes
    ----------
    sqlstate : str or None
        PostgreSQL's error code; None if libpq gave none.
    """

    sqlstate: str | None = None


class RetryableError(ReplicationError):
    """A temporary error: the same call may succeed later, with a new connection.

    The server restarts, crashed or has no connection left, the network failed, or another process
    reads the slot. Every other error is final: its message says why, and what to do.

    Attributes
    ----------
    retry_for : float or None
        None if the error certainly passes. Otherwise the error may be lasting: take it as final if
        it has not passed after this number of seconds.
    """

    retry_for: float | None = None


class DecodeError(PgOutputError, ValueError):
    """A frame, or a value in one, that cannot be decoded.

    Attributes
    ----------
    code : str
        What is wrong: one of the keys of :data:`SENTENCES`.
    offset : int
        Position of the wrong field's first byte, from 0 to the frame's length.
    tag : str or None
        The frame's first byte as a character; None for an empty frame.
    frame : int or None
        Index of the frame among the frames of one call; None if the call decodes a single frame.
    """

    code: str
    offset: int
    tag: str | None
    frame: int | None

    def __init__(
        self, message: str, *, code: str, offset: int, tag: str | None, frame: int | None = None
    ) -> None:
        super().__init__(message, code=code)
        self.offset = offset
        self.tag = tag
        self.frame = frame

    @property
    def message(self) -> str:
        """What happened, with the frame's index if there is one."""
        where = f"frame {self.frame}: " if self.frame is not None else ""
        return where + super().message

    def __reduce__(self) -> tuple[object, ...]:
        return _restore_error, (
            type(self),
            self.args[0],
            self.code,
            self.offset,
            self.tag,
            self.frame,
            {k: v for k, v in self.__dict__.items() if k not in _OWN_ATTRIBUTES},
        )


_OWN_ATTRIBUTES = frozenset({"code", "offset", "tag", "frame"})


def _restore_error(
    cls: type[DecodeError],
    message: str,
    code: str,
    offset: int,
    tag: str | None,
    frame: int | None,
    extra: dict[str, object],
) -> DecodeError:
    error = cls(message, code=code, offset=offset, tag=tag, frame=frame)
    error.__dict__.update(extra)  # notes, and attributes that a caller has set
    return error


SENTENCES: dict[str, str] = {
    "empty_frame": "the frame has no bytes; every pgoutput message begins with a tag byte",
    "unknown_tag": "expected one of the tags {expected}, found {found}; "
    "is this a pgoutput frame, without the CopyData and XLogData headers around it?",
    "truncated": "{field} takes {expected} bytes, {found} are left; the frame was cut short, "
    "or it comes from inside a stream chunk and was decoded as if it did not, or vice versa",
    "trailing_bytes": "expected the end of the frame, found {found} bytes left over",
    "bad_marker": "expected {expected}, found {found}",
    "bad_column_kind": "column {column}: expected the kind 'n', 'u', 't' or 'b', found {found}",
    "bad_length": "{field} is {found}, and at most {expected} bytes are possible there",
    "bad_count": "{field} is {found}, and at most {expected} fit into what is left of the frame",
    "unterminated_string": "{field} has no NUL byte at its end",
    "unknown_relation": "relation {relation_id} was never announced",
    "column_count": "the tuple has {found} columns, its relation {relation} has {expected}",
    "stream_order": "{found}",
    "bad_encoding": "column {column}: the value is no text in {encoding}",
    "bad_value": "column {column}: {found}",
    "out_of_range": "{column}: {found}",
    "no_text_form": "column {column}: {found}",
}
"""The sentence of each error code: what was expected, and what was there instead."""

CODES: dict[str, str] = {
    "bad_option": "an option that is not allowed, or options that exclude each other",
    "missing_package": "a package or program that the call needs is missing or too old",
    "missing_path": "a file or a directory that does not exist",
    "not_ours": "a file, directory, table or slot that something else made",
    "damaged": "a file or a table whose content is not what was written",
    "io_failed": "the operating system, storage, a catalogue or an engine failed to read or write",
    "already_exists": "something of that name exists already",
    "in_use": "another process has the slot, the directory, the file or the table",
    "connection_lost": "the connection to the server failed or was closed",
    "connection_refused": "the server refuses the user, password, database or certificate, or "
    "pg_hba.conf does not allow the connection",
    "server_refused": "the server refused a statement",
    "no_rights": "the role lacks a right or an attribute",
    "standby": "the server is a standby that has not reached the position, or is not promoted yet",
    "server_setting": "a setting of the server, the database or the role does not allow it",
    "no_slot": "the slot does not exist",
    "no_publication": "the publication does not exist",
    "no_table": "a table or column does not exist or is not published, or no message matches",
    "no_key": "a table has no key, or its changes lack the key",
    "no_snapshot": "a table has no snapshot, so its rows before its first change are unknown",
    "no_consumer": "the change log has no such consumer",
    "not_begun": "no capture has begun in the directory, or a table has nothing there yet",
    "another_history": "the source is not the one of before: another server, timeline, slot or "
    "change log, or a table that was made again",
    "changes_missing": "changes that have to be read are no longer there",
    "schema_unknown": "the schema history lacks the table's columns or the type at that moment",
    "unfit_schema": "a type, a column or an alteration that the target does not support",
    "unfit_value": "a value that the target or a Python type cannot hold",
    "unfit_row": "a change that does not fit the row in the target",
    "unfit_stream": "the server sent bytes that are no message, or messages in an impossible order",
    "null_key": "a key without a value: a policy makes it NULL, or the value was not sent",
    "paused": "a table is paused; the reason says why",
    "stale": "a table is stale and needs a new snapshot",
    "conflict": "another writer, or an alteration of a table, came in between",
    "incomplete": "a stream, a transaction, a window or a snapshot is incomplete",
    "unfit_input": "an argument or object of the wrong type or form, or calls in a wrong order",
    "out_of_memory": "a limit of memory or size is reached",
    "disk_full": "the disk is full, or has less free space than required",
    "process_failed": "a process that this package started has failed",
    "timed_out": "something did not happen within the time limit",
    "stopped": "the call was asked to stop, or what it reads was closed meanwhile",
    "not_supported": "something that this version, platform, server or target does not support",
    "frames_refused": "frames were refused; the output has each of them",
    "not_comparable": "a table, column or value that verify cannot compare",
    "internal": "an unexpected error, which is a bug",
}
"""The meaning of each error code of the errors that are not about a frame."""

VALUE_CODES = frozenset({"bad_encoding", "bad_value", "out_of_range", "no_text_form"})
"""The codes of refused values in frames that are otherwise valid."""

Hint = tuple[str | Argument, ...]

_HINTS: dict[str, Hint] = {
    "trailing_bytes": ("A frame from inside a stream chunk needs ", Argument("in_stream", True))
}
"""What to do about an error code, if that does not depend on the frame."""
UNKNOWN_HINT: Hint = (
    "Decode the frames from the start of the connection, or the table's Relation first",
)
ENCODING_HINT: Hint = (
    "raw() gives its bytes, and ",
    Argument("encoding"),
    " of the decoder must be the client_encoding of the session",
)
SQL_ASCII_HINT: Hint = (
    "raw() gives its bytes, and the policy ",
    Argument("invalid_text"),
    " can be 'replace' (U+FFFD in its place) or 'binary' (bytes for all values of text types)",
)
"""The hints of ``bad_encoding``."""
STATELESS_HINT: Hint = (
    "Names and types come with its Relation message, and decode() keeps none: use a Decoder",
)
"""The hints of ``unknown_relation``."""


def fail(code: str, frame: bytes, offset: int, *, hint: Hint = (), **details: object) -> NoReturn:
    """Raise the :class:`DecodeError` of `code` at byte `offset` of `frame`."""
    tag = chr(frame[0]) if frame else None
    name = f"{tag!r} frame" if tag is not None else "frame"
    sentence = SENTENCES[code].format_map(details)
    error = DecodeError(
        f"{name} of {len(frame)} bytes, byte {offset}: {sentence}",
        code=code,
        offset=offset,
        tag=tag,
    )
    error.hint = hint or _HINTS.get(code, ())
    raise error


def printable(name: str) -> str:
    """Return `name`, escaped if it has control characters or bytes that are no valid text."""
    return name if name.isprintable() else repr(name)[1:-1]


def counted(number: int, noun: str) -> str:
    """Return a number with a noun: ``1 table``, ``2,000 tables``."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def frame_bytes(frame: object) -> bytes:
    """Return the frame as `bytes`: a `bytes` object itself, or a copy of any other buffer.

    Messages keep their frames. The owner of a memoryview may change its bytes, even if the view is
    read-only. So only objects of exactly the class `bytes` are kept without a copy.

    Raises
    ------
    TypeError
        `frame` is not a contiguous buffer.
    """
    if type(frame) is bytes:
        return frame
    try:
        view = memoryview(frame)  # type: ignore[arg-type]
    except ValueError as error:  # a released memoryview
        raise TypeError(f"a frame must be a readable buffer: {error}") from None
    except TypeError:
        raise TypeError(
            f"a frame must be bytes or another contiguous buffer, not {type(frame).__name__}"
        ) from None
    with view:
        if not view.c_contiguous:
            raise TypeError("a frame must be a contiguous buffer")
        return view.tobytes()


def refuse_another_thread() -> NoReturn:
    """Raise the error for a decoder that another thread uses at the same time.

    Raises
    ------
    PgOutputError
    """
    raise PgOutputError(
        "another thread decodes with this decoder", code="unfit_input", hint="Give each its own"
    )


MOST_SERVER_TEXT = 8192
"""The largest number of characters of a server's text that are shown."""
CUT = " …"
"""Stands where a text was cut."""

# Each expression takes linear time for any text: a repetition never starts again inside the match
# of another repetition.
_WORD = re.compile(r"\S+")
_LAST_WORD = re.compile(r"(?<!\S)\S*\Z")
_USER = re.compile(r"[A-Za-z0-9+.-]:/{1,3}[^/:@]*:")
_SECRET = re.compile(
    r"(?:password|passwd|oauth_client_secret|scram_(?:client|server)_key)\s*=\s*", re.IGNORECASE
)
_VALUES = {
    "'": re.compile(r"'(?:[^'\\]|\\.)*(?:'|\\?\Z)", re.DOTALL),
    '"': re.compile(r'"(?:[^"\\]|\\.)*(?:"|\\?\Z)', re.DOTALL),
}
_VALUE = re.compile(r"(?:[^\s\\]|\\.)+", re.DOTALL)


def without_passwords(text: str) -> str:
    """Replace in a text what looks like the password of a URL or of a connection string.

    A user may pass a connection string where a command expects something else, and the command's
    error would repeat it. A quoted password without a closing quote reaches to the end of the text.
    """
    text = _WORD.sub(lambda word: _without_url_password(word[0]), text)
    parts, end = [], 0
    while (match := _SECRET.search(text, end)) is not None:
        start = match.end()
        value = _VALUES.get(text[start : start + 1], _VALUE).match(text, start)
        parts.append(text[end:start] + ("" if value is None else "***"))
        end = start if value is None else value.end()
        if value is not None and value.re is _VALUE:
            end = start + len(value[0].rstrip("'\""))  # quotes around the whole string
    return "".join(parts) + text[end:]


def _without_url_password(word: str) -> str:
    at = word.rfind("@")
    user = _USER.search(word, 0, at) if at > 0 else None
    return word if user is None else f"{word[: user.end()]}***{word[at:]}"


def shortened(text: str) -> str:
    """Return a server's text without passwords, cut if it is too long.

    The cut may fall into a password, so the whole last word is removed.
    """
    if len(text) > MOST_SERVER_TEXT:
        text = _LAST_WORD.sub("", text[:MOST_SERVER_TEXT]) + CUT
    return without_passwords(text)
