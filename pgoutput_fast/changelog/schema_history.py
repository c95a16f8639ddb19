"""The history of types and tables in a directory: its files, and the rules by which they are made.

A stream does not tell how a type is made, nor that it was altered. So a capture reads the catalogue
beside it, of *now*, while the stream may be hours behind. An entry is one state of the catalogue.
Between the last LSN at which a state was still true and the first at which the next one was seen,
either may hold.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from .._disk import fsync_path, read_json_file, write_whole
from .._forms import MALFORMED, of_form, unreadable
from ..errors import PgOutputError
from ..lsn import format_lsn, parse_lsn
from ..protocol.messages import decode_rare
from ..segments.folders import HISTORY, SEEN_NAME
from ..types import TypeRegistry

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from ..transactions.runs import Run

DDL_PREFIX = "pgoutput_fast.ddl"
"""Prefix of the logical messages that the event trigger writes."""
FORMAT_VERSION = 1

_MOST_MARKS = 16
_MOST_TYPES = 1000  # that a transaction's change of types lists; more count as all types


@dataclass(frozen=True)
class Mark:
    """An LSN at which a state was seen to be true.

    Attributes
    ----------
    lsn : str
        What was committed before it was seen, but for `unsure`.
    unsure : tuple of int
        Transactions that had not ended by then, for all that could be seen. A transaction's commit
        is in the log before others see it, for example while a synchronous standby is waited for.
    trigger : bool
        Whether the event trigger has written a message for every change from here on.
    """

    lsn: str
    unsure: tuple[int, ...]
    trigger: bool

    @property
    def position(self) -> int:
        """The LSN as a number."""
        return parse_lsn(self.lsn)


class CatalogRead(NamedTuple):
    """What was read of the catalogue, in one snapshot.

    Attributes
    ----------
    before, after : int
        The server's LSN before the snapshot was taken, and after.
    running : frozenset of int
        Transactions that had not ended in the snapshot.
    unsure : frozenset of int
        Those of them that had begun when `before` was asked for.
    trigger : bool
        Whether the event trigger is there, and its messages come in the stream.
    types : TypeRegistry
    tables : str
        JSON of the tables.
    """

    before: int
    after: int
    running: frozenset[int]
    unsure: frozenset[int]
    trigger: bool
    types: TypeRegistry
    tables: str

    @property
    def mark(self) -> Mark:
        """Where its state was seen."""
        return Mark(format_lsn(self.before), tuple(sorted(self.unsure)), self.trigger)


class HistoryEntry(NamedTuple):
    """One state of the catalogue, as the name of its file tells of it.

    Attributes
    ----------
    lower : int
        The state before it was true up to here; 0 for the first one.
    start : int
        It was true from here on.
    """

    lower: int
    start: int

    @property
    def name(self) -> str:
        """The name of its file."""
        return f"{self.lower:016X}-{self.start:016X}.json"


@dataclass(frozen=True)
class StoredHistory:
    """The content of an entry's file.

    Attributes
    ----------
    exact : bool
        Whether messages of the event trigger tell when the state before it ended.
    mark : Mark
        Where it was seen first.
    types, tables : dict
        JSON of the types and of the tables.
    """

    format_version: int
    exact: bool
    mark: Mark
    types: dict[str, Any]
    tables: dict[str, Any]

    @property
    def registry(self) -> TypeRegistry:
        """Its types."""
        return TypeRegistry.from_json(json.dumps(self.types))


@dataclass(frozen=True)
class Seen:
    """The content of the file that tells how long the newest state has been seen.

    Attributes
    ----------
    entry : str or None
        The name of the entry's file.
    marks : tuple of Mark
        Where it was seen, oldest first. A later one with no more of `unsure` replaces earlier ones.
    messages_since : str or None
        The LSN from which on the stream has had logical messages without a break.
    """

    format_version: int = FORMAT_VERSION
    entry: str | None = None
    marks: tuple[Mark, ...] = ()
    messages_since: str | None = None


@dataclass(frozen=True)
class SchemaChange:
    """A transaction in the stream that changed the catalogue, as the event trigger told.

    Attributes
    ----------
    first, last : str
        LSNs of its first and its last message.
    types : tuple of int or None
        OIDs of the types that it changed; None if it may be any.
    """

    first: str
    last: str
    types: tuple[int, ...] | None
    format_version: int = FORMAT_VERSION


def entries(directory: Path) -> list[HistoryEntry]:
    """The entries of a directory of segments, oldest first.

    Raises
    ------
    PgOutputError
        The directory can't be read.
    """
    found = map(HISTORY.match, _names(directory))
    return sorted(
        (
            HistoryEntry(int(one["lower"], 16), int(one["start"], 16))
            for one in found
            if one and one["start"]
        ),
        key=lambda entry: entry.start,
    )


def change_lsns(directory: Path) -> list[int]:
    """The commit LSNs of the transactions that changed the catalogue.

    Raises
    ------
    PgOutputError
        The directory can't be read.
    """
    found = map(HISTORY.match, _names(directory))
    return sorted(int(one["ddl"], 16) for one in found if one and one["ddl"])


def _names(directory: Path) -> list[str]:
    try:
        return HISTORY.names(directory)
    except OSError as error:
        path = HISTORY.path(directory)
        raise PgOutputError(
            f"can't read {path}: {error.strerror}", code="io_failed", path=str(path)
        ) from error


def read_entry(directory: Path, entry: HistoryEntry) -> StoredHistory:
    """The content of an entry.

    Raises
    ------
    PgOutputError
        The file can't be read, or is of a newer format version.
    """
    stored: StoredHistory = _read(HISTORY.path(directory) / entry.name, StoredHistory)
    return stored


def read_change(directory: Path, commit_lsn: int) -> SchemaChange:
    """What a transaction changed; errors are those of `read_entry`."""
    change: SchemaChange = _read(_change_path(directory, commit_lsn), SchemaChange)
    return change


def read_seen(directory: Path) -> Seen:
    """How long the newest entry has been seen; errors are those of `read_entry`."""
    path = HISTORY.path(directory) / SEEN_NAME
    if not path.exists():
        return Seen()
    seen: Seen = _read(path, Seen)
    return seen


def _read(path: Path, form: type) -> Any:
    try:
        fields = of_form(json.loads(read_json_file(path)), dict[str, Any], "fields")
        version = fields.get("format_version")
        if version == FORMAT_VERSION:
            return of_form(fields, form)
    except (OSError, *MALFORMED) as error:
        raise unreadable(path, error, "which is of the schema history") from error
    raise PgOutputError(
        f"the format version of {path} is {version!r:.40}, this version of pgoutput_fast reads "
        f"{FORMAT_VERSION}; update pgoutput_fast",
        code="not_supported",
        path=str(path),
    )


def _change_path(directory: Path, commit_lsn: int) -> Path:
    return HISTORY.path(directory) / f"{commit_lsn:016X}.ddl.json"


def _write(directory: Path, name: str, content: StoredHistory | Seen | SchemaChange) -> None:
    path = HISTORY.path(directory)
    try:
        HISTORY.make(directory)
        write_whole(path / name, [json.dumps(content, default=vars)])
    except OSError as error:
        raise PgOutputError(
            f"can't write {path / name}: {error.strerror or error}",
            code="io_failed",
            path=str(path / name),
        ) from error


class HistoryWriter:
    """Writes the history of a directory, of which the caller is the only writer.

    `note` and `record` may be called by two threads.

    Parameters
    ----------
    directory : pathlib.Path
        That of the segments.
    messages_from : int, optional
        The LSN from which on the stream has logical messages now; None if it has none.

    Raises
    ------
    PgOutputError
        What is there can't be read, or the disk refuses.
    """

    def __init__(self, directory: Path, messages_from: int | None) -> None:
        self._directory = directory
        seen = read_seen(directory)
        self._since = None
        if messages_from is not None:
            self._since = seen.messages_since or format_lsn(messages_from)
        self._newest = max(entries(directory), key=lambda one: one.start, default=None)
        self._stored: StoredHistory | None = None
        self._marks: tuple[Mark, ...] = ()
        if self._newest is not None:
            self._stored = read_entry(directory, self._newest)
            # A kill may have come between the entry and this file.
            is_newest = seen.entry == self._newest.name
            self._marks = seen.marks if is_newest else (self._stored.mark,)
            if messages_from is None:
                self._marks = _without_trigger(self._marks)
        # The transaction in which a frame was that came last, and what it has changed so far.
        self._commit_lsn = 0
        self._change: SchemaChange | None = None
        if seen.messages_since != self._since:
            self._store()

    @property
    def is_empty(self) -> bool:
        """Whether there is no entry."""
        return self._newest is None

    @property
    def type_ids(self) -> frozenset[int]:
        """The types of the newest entry."""
        return frozenset(self._stored.registry.catalog) if self._stored else frozenset()

    @property
    def confirmed(self) -> int:
        """The LSN up to which the newest entry is known to be true; 0 without one."""
        return confirmed(self._marks)

    def note(self, read: CatalogRead) -> bool:
        """Take what was read: durable when this returns.

        Returns
        -------
        bool
            Whether it differs.

        Raises
        ------
        PgOutputError
            The disk refuses.
        """
        mark = read.mark
        if self._marks and read.before < self._marks[-1].position:
            return False  # of a server that lags behind the one that was asked before
        types, tables = json.loads(read.types.to_json()), json.loads(read.tables)
        stored = self._stored
        if stored is not None and (stored.types, _told(stored.tables)) == (types, _told(tables)):
            if stored.tables != tables:
                # A table was rewritten or truncated. What comes next is compared with its new file.
                self._stored = replace(stored, tables=tables)
                self._store_entry()
            self._take(mark)
            return False
        lower, exact, start = 0, False, read.after
        if self._newest is not None:
            last = self._last_true(self._newest, read)
            lower, exact = last.position, last.trigger and read.trigger
            start = max(start, self._newest.start + 1)
        self._newest = HistoryEntry(lower, start)
        self._stored = StoredHistory(FORMAT_VERSION, exact, mark, types, tables)
        self._store_entry()
        self._marks = ()
        self._take(mark)
        return True

    def _store_entry(self) -> None:
        """Store the newest entry: durable when this returns."""
        if self._newest is not None and self._stored is not None:
            _write(self._directory, self._newest.name, self._stored)

    def _take(self, mark: Mark) -> None:
        """Add a mark, drop those that it makes useless, and store them."""
        marks = self._marks if mark.trigger else _without_trigger(self._marks)
        kept = [one for one in marks if not set(mark.unsure) <= set(one.unsure)]
        self._marks = (*kept[: _MOST_MARKS - 1], mark)
        self._store()

    def _last_true(self, newest: HistoryEntry, read: CatalogRead) -> Mark:
        """Where the newest entry was last true, now that another state was read.

        A transaction that has not ended yet is not the one that altered anything.
        """
        for mark in reversed(self._marks):
            if read.running.issuperset(mark.unsure):
                return mark
        # Each mark has transactions that have ended since.
        return Mark(format_lsn(newest.lower), (), trigger=False)

    def _store(self) -> None:
        """Store how long the newest entry has been seen: durable when this returns."""
        name = None if self._newest is None else self._newest.name
        content = Seen(FORMAT_VERSION, name, self._marks, self._since)
        _write(self._directory, SEEN_NAME, content)

    def record(self, run: Run) -> None:
        """Record the changes of the catalogue that frames tell of, before any of them is written.

        Parameters
        ----------
        run : Run
            Frames of whole transactions in protocol 1's form, or a part of them.

        Raises
        ------
        PgOutputError
            The disk refuses.
        """
        import numpy as np

        tags = np.frombuffer(run.data, np.uint8)[run.offsets[:-1]]
        wanted = np.flatnonzero((tags == ord("B")) | (tags == ord("M")))
        changed = None
        for index in wanted.tolist():
            frame = run.frame(index)
            if frame[:1] == b"B":
                self._record(changed)
                changed = self._change = None
                self._commit_lsn = int.from_bytes(frame[1:9], "big")
                continue
            message: Any = decode_rare(frame, in_stream=False, encoding="latin-1")
            if message.transactional and message.prefix == DDL_PREFIX:
                changed = self._change = _changed(self._change, message.lsn, message.content)
        self._record(changed)

    def _record(self, change: SchemaChange | None) -> None:
        if change is not None:
            name = _change_path(self._directory, self._commit_lsn).name
            _write(self._directory, name, change)


def _changed(change: SchemaChange | None, lsn: int, content: bytes) -> SchemaChange:
    """What a transaction has changed, with one more message of the event trigger."""
    types: set[int] | None = None
    try:
        # Whoever may write logical messages may have written it.
        types = set(of_form(json.loads(content), dict[str, Any])["types"])
        if not all(type(oid) is int and 0 < oid < 1 << 32 for oid in types):
            types = None
    except MALFORMED:
        pass
    if change is not None:
        types = None if types is None or change.types is None else types.union(change.types)
    if types is not None and len(types) > _MOST_TYPES:
        types = None
    here = format_lsn(lsn)
    first = here if change is None else change.first
    return SchemaChange(first, here, None if types is None else tuple(sorted(types)))


def _without_trigger(marks: Iterable[Mark]) -> tuple[Mark, ...]:
    """The same marks, where a change may have come without a message."""
    return tuple(Mark(mark.lsn, mark.unsure, trigger=False) for mark in marks)


def confirmed(marks: Sequence[Mark]) -> int:
    """The LSN up to which a state is known to be true that was seen at these marks."""
    return max((mark.position for mark in marks if not mark.unsure), default=0)


def forget_before(directory: Path, lsn: int) -> int:
    """Delete what only concerns changes before an LSN; the number of files.

    The entry that is in force there stays, and so does what tells when it ends; and the entry
    before, as what altered a table is told by both.

    Raises
    ------
    OSError
        The disk refuses.
    """
    found = entries(directory)
    kept = next((one for one in reversed(found) if one.start <= lsn), None)
    if kept is None:
        return 0
    gone = [one.name for one in [one for one in found if one.start < kept.start][:-1]]
    gone += [
        _change_path(directory, commit_lsn).name
        for commit_lsn in change_lsns(directory)
        if commit_lsn < kept.start
    ]
    for name in gone:
        HISTORY.delete(directory, name)
    if gone:
        fsync_path(HISTORY.path(directory))
    return len(gone)


def _told(tables: dict[str, Any]) -> dict[str, Any]:
    """What makes another state of tables. A table that is truncated or rewritten is the same."""
    return {
        **tables,
        "tables": [{**one, "file_nodes": None} for one in tables["tables"]],
    }
