"""The history of types and tables in a directory of segments: what held at which LSN.

A capture writes it, as docs/segments.md describes. Whatever decodes segments of the directory takes
the types from it: those that held when the values were written.

>>> from pgoutput_fast.history import History
>>> history = History("segments")  # doctest: +SKIP
>>> history.registry_at(parse_lsn("16/B374D848")).registry  # doctest: +SKIP
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from .catalog import Catalog
from .directory.history import (
    Change,
    Entry,
    Stored,
    change_lsns,
    confirmed,
    entries,
    read_change,
    read_entry,
    read_seen,
)
from .errors import PgOutputError
from .lsn import check_lsn, format_lsn, parse_lsn
from .protocol.messages import decode_rare
from .segments.format import ANNOUNCED_LSN
from .segments.listing import listed
from .types import TypeRegistry

if TYPE_CHECKING:
    from .types.registry import CatalogType

__all__ = ["POLICIES", "History", "HistoryPolicy", "TablesAt", "TypesAt"]

HistoryPolicy = Literal["error", "older", "newer"]
POLICIES: tuple[HistoryPolicy, ...] = get_args(HistoryPolicy)
"""What to do with a value of a type that was altered at about that time."""

_END = (1 << 64) - 1
_FIRST_USER_OID = 16384
_OLD, _UNCERTAIN, _NEW = 0, 1, 2


def __dir__() -> list[str]:
    """The public names, without those that this module imports."""
    return sorted(__all__)


class TypesAt(NamedTuple):
    """The types at an LSN.

    Attributes
    ----------
    registry : TypeRegistry
    uncertain : dict of int to str
        OIDs of the types that may have been others, with their names. Types that contain them are
        not listed.
    lower, upper : int
        The LSNs between which they were altered; both are 0 if nothing is uncertain, and `upper` is
        2**64 - 1 where the history ends before `lsn`.
    """

    registry: TypeRegistry
    uncertain: dict[int, str]
    lower: int
    upper: int


class TablesAt(NamedTuple):
    """The published tables at an LSN.

    Attributes
    ----------
    catalog : Catalog
    is_certain : bool
        Whether no other state was possible: the history has seen it before and after.
    """

    catalog: Catalog
    is_certain: bool


class _Boundary(NamedTuple):
    """Where one entry ends and the next one begins.

    Fields: lower, upper (LSNs between which the change was committed), older, newer (the entries;
    the same one where there is no other).
    """

    lower: int
    upper: int
    older: Entry
    newer: Entry


class History:
    """The history of types and tables of a directory, as it was when this was made.

    Parameters
    ----------
    directory : path
        A directory of segments.

    Attributes
    ----------
    is_empty : bool
        Whether no capture has written a history there.

    Raises
    ------
    PgOutputError
        It can't be read, or is damaged; also by the methods, which open files when they need them.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._directory = Path(directory)
        # In this order: what a capture writes meanwhile then makes nothing certain that is not.
        ends = [segment.end_lsn for segment in listed(self._directory)]
        self._end = max(ends, default=0)
        seen = read_seen(self._directory)
        self._entries = entries(self._directory)
        self._changes = change_lsns(self._directory)
        since = seen.messages_since
        self._since = _END if since is None else parse_lsn(since)
        self.is_empty = not self._entries
        self._read: dict[Entry, Stored] = {}
        self._registries: dict[tuple[Entry, Entry], TypeRegistry] = {}
        if self._entries:
            newest = self._entries[-1]
            marks = seen.marks if seen.entry == newest.name else (self._stored(newest).mark,)
            self._covered = bool(marks) and marks[-1].trigger
            self._boundaries = [_Boundary(0, self._entries[0].start, *self._entries[:1] * 2)]
            for before, after in itertools.pairwise(self._entries):
                self._boundaries.append(_Boundary(after.lower, after.start, before, after))
            self._boundaries.append(_Boundary(confirmed(marks), _END, newest, newest))

    def __repr__(self) -> str:
        return f"<History of {str(self._directory)!r}: {len(self._entries)} entries>"

    def __getstate__(self) -> dict[str, Any]:
        """Without what can be read again: executors read few of many entries."""
        return {**self.__dict__, "_registries": {}}

    def registry_at(self, lsn: int, policy: HistoryPolicy = "newer") -> TypesAt:
        """The types that a transaction with this commit LSN had.

        Parameters
        ----------
        lsn : int
        policy : {"newer", "older"}
            Which of two states the registry has where either is possible.

        Raises
        ------
        PgOutputError
            There is no history, a file of it can't be read, or the number is no LSN.
        TypeError
            `lsn` is no int.
        """
        older, newer = self._between(lsn)
        first, last = self.entry(older), self.entry(newer)
        registry = self.registry(first, last, policy)
        if older == newer:
            return TypesAt(registry, {}, 0, 0)
        return TypesAt(registry, self.uncertain(first, last), *self.span(older, newer))

    def tables_at(self, lsn: int, policy: HistoryPolicy = "newer") -> TablesAt:
        """The tables that were published then; parameters and errors are those of `registry_at`."""
        older, newer = self._between(lsn)
        stored = self._stored(self.entry(older if policy == "older" else newer))
        return TablesAt(Catalog.from_json(json.dumps(stored.tables)), is_certain=older == newer)

    def _between(self, lsn: int) -> tuple[int, int]:
        """The oldest and the newest entry that are possible, as `places` gives them."""
        import numpy as np

        check_lsn("lsn", lsn)
        if self.is_empty:
            raise PgOutputError(
                f"{self._directory} has no history of types and tables: captures of earlier "
                f"versions wrote none, and history=False keeps none; give a registry"
            )
        one = np.array([lsn], np.uint64)
        (older,), (newer,) = self.places(one, one)
        return older, newer

    def entry(self, place: int) -> Entry:
        """The entry of a place: the first one also before it, and so the last one behind it."""
        return self._entries[min(max(place - 1, 0), len(self._entries) - 1)]

    def span(self, older: int, newer: int) -> tuple[int, int]:
        """The LSNs between which the catalogue changed from one place to another."""
        return self._boundaries[older].lower, self._boundaries[newer - 1].upper

    def _stored(self, entry: Entry) -> Stored:
        found = self._read.get(entry)
        if found is None:
            found = self._read[entry] = read_entry(self._directory, entry)
        return found

    def registry(self, older: Entry, newer: Entry, policy: HistoryPolicy) -> TypeRegistry:
        """The types of both entries, and where they differ those of one of them."""
        first, last = (newer, older) if policy == "older" else (older, newer)
        found = self._registries.get((first, last))
        if found is None:
            found = TypeRegistry().merge(self._stored(first).registry)
            found.merge(self._stored(last).registry)
            self._registries[first, last] = found
        return found

    def uncertain(self, older: Entry, newer: Entry) -> dict[int, str]:
        """The types whose values two entries decode differently."""
        before = self._stored(older).registry.catalog
        after = self._stored(newer).registry.catalog
        if older == newer:  # no other entry is known, so that all that can be altered may have been
            return {oid: _named(one) for oid, one in before.items() if one.kind == "c"}
        return {
            oid: _named(after.get(oid, before.get(oid)))
            for oid in before.keys() | after.keys()
            if _differs(before.get(oid), after.get(oid))
        }

    # --- where entries begin and end

    def places(self, lsns: Any, commit_lsns: Any) -> tuple[list[int], list[int]]:
        """Which entries changes belong to.

        Parameters
        ----------
        lsns : uint64[n]
            Of the changes themselves. What a transaction wrote before another one altered a type
            has the old form, though it is committed later.
        commit_lsns : uint64[n]
            Of their transactions.

        Returns
        -------
        list of int, list of int
            For each change the place of the oldest and of the newest entry that is possible: counted
            from 1; 0 is before the first, and one more than there are is behind the last.
        """
        import numpy as np

        older = np.zeros(len(lsns), np.int64)
        newer = np.zeros(len(lsns), np.int64)
        least, most = int(lsns.min()), int(commit_lsns.max())
        for boundary in self._boundaries:
            if boundary.upper <= least:
                older += 1
                newer += 1
            elif boundary.lower <= most:
                state = self._states(boundary, lsns, commit_lsns)
                older += state == _NEW
                newer += state >= _UNCERTAIN
        return older.tolist(), newer.tolist()

    def _is_exact(self, boundary: _Boundary) -> bool:
        """Whether messages in the stream tell of every change."""
        if boundary.lower < self._since:
            return False
        if boundary.upper == _END:
            return self._covered
        return boundary.lower > 0 and self._stored(boundary.newer).exact

    def _states(self, boundary: _Boundary, lsns: Any, commit_lsns: Any) -> Any:
        """For each change, whether it lies before or behind a boundary, or that is uncertain."""
        import numpy as np

        lower, upper = boundary.lower, boundary.upper
        is_old = (commit_lsns < lower) | ((commit_lsns >= upper) & (lsns < lower))
        is_new = (lsns >= upper) & (commit_lsns >= upper)
        # Messages are known of what was in the directory when its names were read.
        known = commit_lsns < self._end
        if known.all() and self._is_exact(boundary):
            changes = self._changes_of(boundary)
            is_whole = upper <= self._end
            if changes:
                (first_lsn, first), (last_lsn, last) = changes[0], changes[-1]
                first_own, last_own = parse_lsn(first.first), parse_lsn(last.last)
                is_old |= commit_lsns < first_lsn
                is_old |= (commit_lsns > first_lsn) & (lsns < first_lsn)
                is_old |= (commit_lsns == first_lsn) & (lsns < first_own)
                if is_whole:
                    is_new |= (commit_lsns > last_lsn) & (lsns > last_lsn)
                    is_new |= (commit_lsns == last_lsn) & (lsns > last_own)
                    is_new &= ~is_old
            elif not is_whole:
                is_old |= True
        return np.where(is_old, _OLD, np.where(is_new, _NEW, _UNCERTAIN))

    def _changes_of(self, boundary: _Boundary) -> list[tuple[int, Change]]:
        """The transactions that may have changed what differs at a boundary."""
        found = [
            (lsn, read_change(self._directory, lsn))
            for lsn in self._changes
            if boundary.lower <= lsn < boundary.upper
        ]
        differing = self.uncertain(boundary.older, boundary.newer)
        concerned = [
            (lsn, one)
            for lsn, one in found
            if one.types is None or not differing.keys().isdisjoint(one.types)
        ]
        # The two differ, if only in tables, so that one of the transactions has changed something.
        return concerned if boundary.upper == _END else concerned or found


def _named(entry: CatalogType | None) -> str:
    return "" if entry is None else f"{entry.namespace}.{entry.name}"


def _differs(before: CatalogType | None, after: CatalogType | None) -> bool:
    """Whether values may be decoded differently.

    The value of an enum is its label, whichever labels there are. Only composites can be altered in
    what they contain: another type that is in one state alone was the same while it was there.
    """
    if before is None or after is None:
        found = before or after
        return found is not None and found.kind == "c"
    return dataclasses.replace(before, labels=()) != dataclasses.replace(after, labels=())


class Follower:
    """Has a registry follow the history while changes are decoded in their order.

    Parameters
    ----------
    history : History
    policy : {"error", "older", "newer"}
        What to do with values of types that were altered at about that time.

    Attributes
    ----------
    registry : TypeRegistry
        The types of the part that is to be decoded next.
    """

    def __init__(self, history: History, policy: HistoryPolicy) -> None:
        self._history = history
        self._policy = policy
        self.registry = TypeRegistry()
        self._current: TypeRegistry | None = None
        self._types: dict[int, tuple[int, ...]] = {}  # of the columns of each relation

    def parts(
        self, data: Any, lsns: Any, commit_lsns: Any, where: object
    ) -> Iterator[tuple[int, int]]:
        """Parts that are decoded by one state of the types each; `registry` has it meanwhile.

        Parameters
        ----------
        data : pyarrow.Array or pyarrow.ChunkedArray
            Frames in the form of a segment.
        lsns, commit_lsns : pyarrow arrays of uint64
            As in a segment; `commit_lsns` has nulls.
        where : object
            What errors call the place from which the frames come.

        Yields
        ------
        tuple of int
            Where the part begins, and where the next one does.

        Raises
        ------
        PgOutputError
            A type was altered at about the LSN of a value, and the policy is "error".
        """
        import numpy as np

        tags, relation_ids = _heads(data)
        rows = np.flatnonzero(np.isin(tags, [ord(tag) for tag in "IUD"]))
        if not len(rows):
            self._learn(data, tags, 0, len(tags))
            yield 0, len(tags)
            return
        row_lsns = np.asarray(lsns)[rows].astype(np.uint64)
        commits = commit_lsns.fill_null(0).to_numpy()[rows].astype(np.uint64)
        row_lsns = np.where(row_lsns == ANNOUNCED_LSN, commits, row_lsns)
        older, newer = self._history.places(row_lsns, commits)
        keys = np.array([older, newer])
        cuts = np.flatnonzero((keys[:, 1:] != keys[:, :-1]).any(axis=0)) + 1
        starts = [0, *rows[cuts].tolist()]
        for begin, end, place in zip(
            starts, [*starts[1:], len(tags)], [0, *cuts.tolist()], strict=True
        ):
            self._learn(data, tags, begin, end)
            wanted = rows[(rows >= begin) & (rows < end)]
            ids = np.unique(relation_ids[wanted]).tolist()
            self._follow(older[place], newer[place], ids, where)
            yield begin, end

    def _learn(self, data: Any, tags: Any, begin: int, end: int) -> None:
        """Note the types of the columns of relations that are announced."""
        import numpy as np

        for index in (begin + np.flatnonzero(tags[begin:end] == ord("R"))).tolist():
            frame = data[index].as_py()
            relation: Any = decode_rare(frame, in_stream=False, encoding="latin-1")
            self._types[relation.relation_id] = tuple(one.type_id for one in relation.columns)

    def _follow(self, older: int, newer: int, relation_ids: list[int], where: object) -> None:
        """Have the registry be that of a part, which has rows of these relations."""
        history = self._history
        first, last = history.entry(older), history.entry(newer)
        registry = history.registry(first, last, self._policy)
        if self._policy == "error":
            contained = {
                oid: relation_id
                for relation_id in relation_ids
                for oid in registry.contained(self._types.get(relation_id, ()))
            }
            uncertain = history.uncertain(first, last) if older != newer else {}
            for oid in sorted(contained.keys() & uncertain.keys()):
                found = history.span(older, newer)
                raise PgOutputError(_refused(where, uncertain[oid], contained[oid], *found))
            for oid in sorted(contained.keys() - registry.catalog.keys()):
                if oid >= _FIRST_USER_OID:
                    raise PgOutputError(
                        f"{where}: the history has no type with OID {oid}, which relation "
                        f"{contained[oid]} has a column of, as it was made, and perhaps dropped, "
                        f"between two reads of the catalogue; read again later, or choose "
                        f'history="newer" or "older", and its values are text'
                    )
        if registry is not self._current:
            self._current = registry
            self.registry.replace_catalog(registry)


def _refused(where: object, name: str, relation_id: int, lower: int, upper: int) -> str:
    if upper == _END:
        return (
            f"{where}: nothing says yet whether type {name}, which relation {relation_id} has a "
            f"column of, was altered after {format_lsn(lower)}, where the catalogue was read last; "
            f"read again when the capture has read it again, within a minute, or choose "
            f'history="newer" to take the newest state that is known'
        )
    since = "before" if lower == 0 else f"between {format_lsn(lower)} and"
    return (
        f"{where}: type {name}, which relation {relation_id} has a column of, may have been altered "
        f"{since} {format_lsn(upper)}, and a value was written there; choose "
        f'history="newer" or history="older", which say in which form such values are read. With '
        f"the event trigger of docs/types.md later changes are known exactly"
    )


def _heads(data: Any) -> tuple[Any, Any]:
    """The tag of each frame, and the number behind it: the relation id of a row."""
    import numpy as np

    tags, numbers = [], []
    for chunk in getattr(data, "chunks", [data]):
        if not len(chunk):
            continue
        _, offsets, values = chunk.buffers()
        begin = np.frombuffer(offsets, np.int32)[chunk.offset : chunk.offset + len(chunk)]
        # Frames of less than five bytes are no rows; what is read of them is not used.
        content = np.frombuffer(bytes(5) if values is None else values, np.uint8)
        tags.append(content[np.minimum(begin, len(content) - 1)])
        number = np.zeros(len(chunk), np.int64)
        for place in range(1, 5):
            number = number << 8 | content[np.minimum(begin + place, len(content) - 1)]
        numbers.append(number)
    if not tags:
        return np.zeros(0, np.uint8), np.zeros(0, np.int64)
    return np.concatenate(tags), np.concatenate(numbers)


def history_of(paths: Iterable[str | os.PathLike[str]]) -> History | None:
    """The history of the directory in which segments lie; None if there is none, or several.

    Parameters
    ----------
    paths : iterable of paths
        Directories, or files of segments.
    """
    directories = {path if path.is_dir() else path.parent for path in map(Path, paths)}
    if len(directories) != 1:
        return None
    history = History(directories.pop())
    return None if history.is_empty else history


def check_policy(policy: object) -> None:
    """Refuse what is no policy.

    Raises
    ------
    PgOutputError
        It is another value.
    """
    if policy not in POLICIES:
        raise PgOutputError(f"history={policy!r}: expected one of {', '.join(map(repr, POLICIES))}")


