"""Write the schema history: the states of the catalogue over time, and the rules for their LSNs.

The stream says neither how a type is defined nor that it was altered. So a capture also reads the
catalogue. It sees the catalogue of *now*, while the stream may be hours behind. A history entry is
one state of the catalogue. The state was replaced at an unknown LSN between two known ones: the
last LSN at which it was true, and the first LSN at which the next state was seen. In between,
either state may hold.
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
"""The prefix of the logical messages that the event trigger writes."""
FORMAT_VERSION = 1

_MOST_MARKS = 16
_MOST_TYPES = 1000  # listed for one transaction; a transaction with more counts as any type


@dataclass(frozen=True)
class Mark:
    """An LSN at which a read of the catalogue saw a state.

    Attributes
    ----------
    lsn : str
        The read saw all transactions that were committed before this LSN, except for `unsure`.
    unsure : tuple of int
        The xids of transactions that looked unfinished, although their commits may be before `lsn`.
        The server's log has a commit before other sessions see it, for example while the server
        waits for a synchronous standby.
    trigger : bool
        Whether the event trigger has written a message for every change since this LSN.
    """

    lsn: str
    unsure: tuple[int, ...]
    trigger: bool

    @property
    def position(self) -> int:
        """The LSN as a number."""
        return parse_lsn(self.lsn)


class CatalogRead(NamedTuple):
    """One read of the catalogue, in one snapshot of the server.

    Attributes
    ----------
    before, after : int
        The server's LSN before and after it took the snapshot.
    running : frozenset of int
        The xids of transactions that had not ended in the snapshot.
    unsure : frozenset of int
        The subset of `running` that had begun when `before` was read.
    trigger : bool
        Whether the event trigger exists, and the stream has its messages.
    types : TypeRegistry
    tables : str
        The tables as JSON.
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
        """The mark of this read."""
        return Mark(format_lsn(self.before), tuple(sorted(self.unsure)), self.trigger)


class HistoryEntry(NamedTuple):
    """One state of the catalogue, with the LSNs in its file name.

    Attributes
    ----------
    lower : int
        The LSN up to which the state before was true; 0 for the first entry.
    start : int
        The LSN from which on this state was true.
    """

    lower: int
    start: int

    @property
    def name(self) -> str:
        """The name of the entry's file."""
        return f"{self.lower:016X}-{self.start:016X}.json"


@dataclass(frozen=True)
class EntryContent:
    """The content of an entry's file.

    Attributes
    ----------
    exact : bool
        Whether messages of the event trigger tell when the state before ended.
    mark : Mark
        The first mark of this state.
    types, tables : dict
        The types and the tables as JSON.
    """

    format_version: int
    exact: bool
    mark: Mark
    types: dict[str, Any]
    tables: dict[str, Any]

    @property
    def registry(self) -> TypeRegistry:
        """The types of the entry."""
        return TypeRegistry.from_json(json.dumps(self.types))


@dataclass(frozen=True)
class Seen:
    """The content of seen.json: up to which LSN the newest entry was seen.

    Attributes
    ----------
    entry : str or None
        The name of the newest entry's file.
    marks : tuple of Mark
        The marks of the newest entry, oldest first. A mark replaces each earlier one whose `unsure`
        contains its own.
    messages_since : str or None
        The LSN since which the stream has had logical messages without a gap.
    """

    format_version: int = FORMAT_VERSION
    entry: str | None = None
    marks: tuple[Mark, ...] = ()
    messages_since: str | None = None


@dataclass(frozen=True)
class SchemaChange:
    """A transaction that changed the catalogue, according to messages of the event trigger.

    Attributes
    ----------
    first, last : str
        LSNs of the transaction's first and last message.
    types : tuple of int or None
        OIDs of the types that the transaction changed; None if it may have changed any type.
    """

    first: str
    last: str
    types: tuple[int, ...] | None
    format_version: int = FORMAT_VERSION


def entries(directory: Path) -> list[HistoryEntry]:
    """Return the entries of a change log, oldest first.

    Raises
    ------
    PgOutputError
        The directory can't be read.
    """
    matches = map(HISTORY.match, _names(directory))
    return sorted(
        (
            HistoryEntry(int(match["lower"], 16), int(match["start"], 16))
            for match in matches
            if match and match["start"]
        ),
        key=lambda entry: entry.start,
    )


def change_lsns(directory: Path) -> list[int]:
    """Return the commit LSNs of the transactions that changed the catalogue, in order.

    Raises
    ------
    PgOutputError
        The directory can't be read.
    """
    matches = map(HISTORY.match, _names(directory))
    return sorted(int(match["ddl"], 16) for match in matches if match and match["ddl"])


def _names(directory: Path) -> list[str]:
    try:
        return HISTORY.names(directory)
    except OSError as error:
        path = HISTORY.path(directory)
        raise PgOutputError(
            f"can't read {path}: {error.strerror}", code="io_failed", path=str(path)
        ) from error


def read_entry(directory: Path, entry: HistoryEntry) -> EntryContent:
    """Read the content of an entry.

    Raises
    ------
    PgOutputError
        The file can't be read, is malformed, or has another format version.
    """
    content: EntryContent = _read(HISTORY.path(directory) / entry.name, EntryContent)
    return content


def read_change(directory: Path, commit_lsn: int) -> SchemaChange:
    """Read what a transaction changed; raise errors as `read_entry` does."""
    change: SchemaChange = _read(_change_path(directory, commit_lsn), SchemaChange)
    return change


def read_seen(directory: Path) -> Seen:
    """Read seen.json, empty if it does not exist; raise errors as `read_entry` does."""
    path = HISTORY.path(directory) / SEEN_NAME
    if not path.exists():
        return Seen()
    confirmation: Seen = _read(path, Seen)
    return confirmation


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


def _write(directory: Path, name: str, content: EntryContent | Seen | SchemaChange) -> None:
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
    """Writes the schema history of a change log. The caller is the directory's only writer.

    Two threads may call `note` and `record` at the same time.

    Parameters
    ----------
    directory : pathlib.Path
        The directory of the change log.
    messages_from : int, optional
        The LSN from which on this stream has logical messages; None if it has none.

    Raises
    ------
    PgOutputError
        The existing history can't be read, or a file can't be written.
    """

    def __init__(self, directory: Path, messages_from: int | None) -> None:
        self._directory = directory
        confirmation = read_seen(directory)
        self._since = None
        if messages_from is not None:
            self._since = confirmation.messages_since or format_lsn(messages_from)
        self._newest = max(entries(directory), key=lambda entry: entry.start, default=None)
        self._newest_content: EntryContent | None = None
        self._marks: tuple[Mark, ...] = ()
        if self._newest is not None:
            self._newest_content = read_entry(directory, self._newest)
            # After a kill, seen.json may still describe the entry before.
            is_newest = confirmation.entry == self._newest.name
            self._marks = confirmation.marks if is_newest else (self._newest_content.mark,)
            if messages_from is None:
                self._marks = _without_trigger(self._marks)
        # The transaction of the newest frame, and its changes of the catalogue so far.
        self._commit_lsn = 0
        self._change: SchemaChange | None = None
        if confirmation.messages_since != self._since:
            self._store()

    @property
    def is_empty(self) -> bool:
        """Whether the history has no entry."""
        return self._newest is None

    @property
    def type_ids(self) -> frozenset[int]:
        """The OIDs of the newest entry's types."""
        return (
            frozenset(self._newest_content.registry.catalog)
            if self._newest_content
            else frozenset()
        )

    @property
    def confirmed(self) -> int:
        """The LSN up to which the newest entry is known to be true; 0 without an entry."""
        return confirmed(self._marks)

    def note(self, read: CatalogRead) -> bool:
        """Store a read of the catalogue durably.

        Returns
        -------
        bool
            Whether the catalogue differs from the newest entry, so that there is a new entry.

        Raises
        ------
        PgOutputError
            A file can't be written.
        """
        mark = read.mark
        if self._marks and read.before < self._marks[-1].position:
            return False  # this server lags behind the server of the last read
        types, tables = json.loads(read.types.to_json()), json.loads(read.tables)
        content = self._newest_content
        if content is not None and (content.types, _without_file_nodes(content.tables)) == (
            types,
            _without_file_nodes(tables),
        ):
            if content.tables != tables:
                # A table was rewritten or truncated. Compare the next read with its new file node.
                self._newest_content = replace(content, tables=tables)
                self._store_entry()
            self._take(mark)
            return False
        lower, exact, start = 0, False, read.after
        if self._newest is not None:
            last = self._last_true(self._newest, read)
            lower, exact = last.position, last.trigger and read.trigger
            start = max(start, self._newest.start + 1)
        self._newest = HistoryEntry(lower, start)
        self._newest_content = EntryContent(FORMAT_VERSION, exact, mark, types, tables)
        self._store_entry()
        self._marks = ()
        self._take(mark)
        return True

    def _store_entry(self) -> None:
        """Store the newest entry durably."""
        if self._newest is not None and self._newest_content is not None:
            _write(self._directory, self._newest.name, self._newest_content)

    def _take(self, mark: Mark) -> None:
        """Add a mark, drop the marks that it replaces, and store all durably."""
        marks = self._marks if mark.trigger else _without_trigger(self._marks)
        earlier_marks = [
            earlier for earlier in marks if not set(mark.unsure) <= set(earlier.unsure)
        ]
        self._marks = (*earlier_marks[: _MOST_MARKS - 1], mark)
        self._store()

    def _last_true(self, newest: HistoryEntry, read: CatalogRead) -> Mark:
        """Return the last mark at which the newest entry was true, after another state was read.

        An unsure transaction that still runs can't have made the change. So a mark counts if all
        of its unsure transactions still run.
        """
        for mark in reversed(self._marks):
            if read.running.issuperset(mark.unsure):
                return mark
        # Each mark has an unsure transaction that has ended since and may have made the change.
        return Mark(format_lsn(newest.lower), (), trigger=False)

    def _store(self) -> None:
        """Store the marks of the newest entry durably in seen.json."""
        name = None if self._newest is None else self._newest.name
        content = Seen(FORMAT_VERSION, name, self._marks, self._since)
        _write(self._directory, SEEN_NAME, content)

    def record(self, run: Run) -> None:
        """Store the changes of the catalogue that frames report. Call it before writing the frames.

        Parameters
        ----------
        run : Run
            Frames of protocol version 1. A transaction may continue in the next run.

        Raises
        ------
        PgOutputError
            A file can't be written.
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
    """Add a message of the event trigger to the changes of its transaction."""
    types: set[int] | None = None
    try:
        # Any user who may write logical messages can forge this one: trust nothing in it.
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
    """Return the marks with `trigger` false: a change may have come without a message."""
    return tuple(Mark(mark.lsn, mark.unsure, trigger=False) for mark in marks)


def confirmed(marks: Sequence[Mark]) -> int:
    """Return the LSN up to which a state with these marks is known to be true."""
    return max((mark.position for mark in marks if not mark.unsure), default=0)


def forget_before(directory: Path, lsn: int) -> int:
    """Delete the files that only concern changes before an LSN; return how many.

    The entry in force at the LSN stays, with the schema changes since. The entry before it stays
    too: comparing the two shows how a table was altered.

    Raises
    ------
    OSError
        A file can't be deleted.
    """
    all_entries = entries(directory)
    entry_in_force = next((entry for entry in reversed(all_entries) if entry.start <= lsn), None)
    if entry_in_force is None:
        return 0
    obsolete_names = [
        entry.name
        for entry in [entry for entry in all_entries if entry.start < entry_in_force.start][:-1]
    ]
    obsolete_names += [
        _change_path(directory, commit_lsn).name
        for commit_lsn in change_lsns(directory)
        if commit_lsn < entry_in_force.start
    ]
    for name in obsolete_names:
        HISTORY.delete(directory, name)
    if obsolete_names:
        fsync_path(HISTORY.path(directory))
    return len(obsolete_names)


def _without_file_nodes(tables: dict[str, Any]) -> dict[str, Any]:
    """Return the tables without file nodes: a truncated or rewritten table is no new state."""
    return {
        **tables,
        "tables": [{**table, "file_nodes": None} for table in tables["tables"]],
    }
