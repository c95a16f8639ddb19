"""Read the schema history: which types and tables were in force at which LSN.

A capture writes the history, as docs/explanation/change-log-directory.md describes. A decoder of
segments takes the types from it that were in force when the values were written.

>>> from pgoutput_fast.changelog.history import History
>>> history = History("segments")  # doctest: +SKIP
>>> history.registry_at(parse_lsn("16/B374D848")).registry  # doctest: +SKIP
"""

from __future__ import annotations

import functools
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from ..catalog import Catalog, CatalogTable
from ..errors import Argument, PgOutputError
from ..lsn import check_lsn, format_lsn, parse_lsn
from ..options import choice
from ..segments.folders import HISTORY, SNAPSHOTS
from ..segments.listing import contents
from ..segments.structure import tags_of
from ..types import TypeRegistry
from .schema_history import (
    EntryContent,
    HistoryEntry,
    SchemaChange,
    change_lsns,
    confirmed,
    entries,
    read_change,
    read_entry,
    read_seen,
)
from .snapshot_states import SnapshotStates
from .snapshots import number_of
from .type_choice import TypeChooser, TypesInForce, columns_of

if TYPE_CHECKING:
    import pyarrow as pa

    from ..columnar.schema import Layout
    from ..types.registry import CatalogType
    from .snapshot_states import Snapshot, TableSnapshots

__all__ = ["POLICIES", "POLICY_HELP", "History", "HistoryPolicy", "TablesAt", "TypesAt"]

HistoryPolicy = Literal["error", "older", "newer"]
POLICIES: tuple[HistoryPolicy, ...] = get_args(HistoryPolicy)
"""How to decode a value if its type was altered at about the time when it was written."""
POLICY_HELP = (
    "For values written at about the time when their type was altered: decode them in the type's "
    "newer or older form, or end with an error."
)
"""The help text of the option."""

_END = (1 << 64) - 1
_FIRST_USER_OID = 16384
_OLD, _UNCERTAIN, _NEW = 0, 1, 2


def __dir__() -> list[str]:
    """Return the public names of this module, without imported ones."""
    return sorted(__all__)


# A sync reads the history again each second, and few entries are new then.
@functools.lru_cache(8)
def _entry(directory: Path, entry: HistoryEntry, _: tuple[int, int]) -> EntryContent:
    return read_entry(directory, entry)


@functools.lru_cache(8)
def _tables(directory: Path, entry: HistoryEntry, file: tuple[int, int]) -> Catalog:
    return Catalog.from_json(json.dumps(_entry(directory, entry, file).tables))


class TypesAt(NamedTuple):
    """The types in force at an LSN.

    Attributes
    ----------
    registry : TypeRegistry
    uncertain : dict of int to str
        OIDs and names of the types that may have had another definition at the LSN. Types that
        contain these types are not listed.
    lower, upper : int
        The LSNs between which the uncertain types were altered. Both are 0 if no type is uncertain.
        `upper` is 2**64 - 1 if the history ends before the LSN.
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
        Whether only one entry is possible at the LSN.
    entry : int
        The number of the entry, from 1; 0 before the first entry.
    start : int
        The LSN from which on the entry is known to be true.
    """

    catalog: Catalog
    is_certain: bool
    entry: int
    start: int


class HistoryPlace(NamedTuple):
    """The position of a change in the history: the entries that may be in force for it.

    Attributes
    ----------
    older, newer : int
        The numbers of the oldest and the newest possible entry, from 1. 0 is before the first
        entry; the number of entries + 1 is after the last one.
    applied : int
        If the event trigger has written messages: how many of the schema changes between the two
        entries were committed before this change. Else -1.
    own, state : int
        `own`: the index of the schema change that the change's own transaction made, or -1.
        `state`: whether the change comes before (0), among (1) or after (2) that alteration.
    """

    older: int
    newer: int
    applied: int
    own: int
    state: int


class _Boundary(NamedTuple):
    """The boundary between two entries.

    Fields: lower, upper (the LSNs between which the schema change was committed); older, newer (the
    entries; both are the same one before the first entry and after the last entry).
    """

    lower: int
    upper: int
    older: HistoryEntry
    newer: HistoryEntry


class History:
    """The schema history of a change log, as it was when this object was created.

    Parameters
    ----------
    directory : path
        The directory of the change log.

    Attributes
    ----------
    is_empty : bool
        Whether the change log has no schema history.

    Raises
    ------
    PgOutputError
        The history can't be read, or is damaged. Methods that open files raise this too.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._directory = Path(directory)
        self.is_empty = not entries(self._directory)
        # Keep this order. Then files that a capture writes meanwhile can't make an uncertain state
        # look certain.
        self._end = 0 if self.is_empty else contents(self._directory).end
        confirmation = read_seen(self._directory)
        self._entries = entries(self._directory)
        self._changes = change_lsns(self._directory)
        since = confirmation.messages_since
        self._since = _END if since is None else parse_lsn(since)
        self.is_empty = not self._entries
        self._read: dict[HistoryEntry, EntryContent] = {}
        self._catalogs: dict[HistoryEntry, Catalog] = {}
        self._types: dict[tuple[HistoryPlace, HistoryPolicy], TypesInForce] = {}
        self._copied: dict[tuple[int, int], TypeRegistry | None] = {}
        self._tables: dict[int, TableSnapshots] = {}
        if self._entries:
            newest = self._entries[-1]
            marks = (
                confirmation.marks
                if confirmation.entry == newest.name
                else (self._content(newest).mark,)
            )
            self._covered = bool(marks) and marks[-1].trigger
            self._boundaries = [_Boundary(0, self._entries[0].start, *self._entries[:1] * 2)]
            for before, after in itertools.pairwise(self._entries):
                self._boundaries.append(_Boundary(after.lower, after.start, before, after))
            self._boundaries.append(_Boundary(confirmed(marks), _END, newest, newest))

    def __repr__(self) -> str:
        return f"<History of {str(self._directory)!r}: {len(self._entries)} entries>"

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without caches: an executor needs few of many entries."""
        return {**self.__dict__, "_catalogs": {}, "_types": {}, "_copied": {}, "_tables": {}}

    @property
    def confirmed(self) -> int:
        """The LSN up to which the newest entry is known to be true; 0 without an entry."""
        return self._boundaries[-1].lower if self._entries else 0

    @property
    def newest_tables(self) -> Catalog:
        """The published tables of the newest entry."""
        return self._catalog(self._entries[-1])

    @property
    def newest_start(self) -> int:
        """The LSN from which on the newest entry is known to be true."""
        return self._entries[-1].start

    @property
    def newest(self) -> TypeRegistry:
        """The types of the newest entry."""
        return self._content(self._entries[-1]).registry

    def registry_at(self, lsn: int, policy: HistoryPolicy = "newer") -> TypesAt:
        """Return the types in force at the end of the transaction with a commit LSN.

        Parameters
        ----------
        lsn : int
        policy : {"newer", "older"}
            Which of two entries to take if either is possible.

        Raises
        ------
        PgOutputError
            The change log has no history, a file of it can't be read, or the number is no LSN.
        TypeError
            `lsn` is not an int.
        """
        place = self._place_of(lsn)
        types = self.types(place, policy)
        lower, upper = self.span(place) if types.uncertain else (0, 0)
        return TypesAt(types.registry, types.uncertain, lower, upper)

    def tables_at(self, lsn: int, policy: HistoryPolicy = "newer") -> TablesAt:
        """Return the published tables; parameters and errors are those of `registry_at`."""
        place = self._place_of(lsn)
        number = place.older if policy == "older" else place.newer
        entry = self._entry(number)
        return TablesAt(self._catalog(entry), place.older == place.newer, number, entry.start)

    def table_before(self, entry: int, relation_id: int) -> Iterator[CatalogTable]:
        """Yield a table's versions in the entries before a given one, the newest first.

        Stop at the first entry in which the table was not published.
        """
        for number in range(min(entry, len(self._entries) + 1) - 1, 0, -1):
            table = self._catalog(self._entry(number)).by_id().get(relation_id)
            if table is None:
                return
            yield table

    def _place_of(self, lsn: int) -> HistoryPlace:
        """Return the position of a transaction's end in the history."""
        import numpy as np

        check_lsn("lsn", lsn)
        if self.is_empty:
            raise PgOutputError(
                f"{self._directory} has no schema history: its capture kept none, or was of an "
                "earlier version",
                code="schema_unknown",
                path=str(self._directory),
                hint="Give a registry",
            )
        lsns = np.array([lsn], np.uint64)
        return HistoryPlace(*self.places(lsns, lsns)[:, 0].tolist())

    def _entry(self, number: int) -> HistoryEntry:
        """Return an entry by its number from 1; out of range, the first or the last entry."""
        return self._entries[min(max(number - 1, 0), len(self._entries) - 1)]

    def span(self, place: HistoryPlace) -> tuple[int, int]:
        """Return the LSNs between which the catalogue changed at an uncertain position."""
        return self._boundaries[place.older].lower, self._boundaries[place.newer - 1].upper

    def _content(self, entry: HistoryEntry) -> EntryContent:
        content = self._read.get(entry)
        if content is None:
            content = self._read[entry] = _entry(*self._file(entry))
        return content

    def _file(self, entry: HistoryEntry) -> tuple[Path, HistoryEntry, tuple[int, int]]:
        """Return the cache key of an entry; inode and time change if its file is written again."""
        try:
            status = (HISTORY.path(self._directory) / entry.name).stat()
        except OSError:
            return self._directory, entry, (0, 0)  # reading the file raises the error
        return self._directory, entry, (status.st_ino, status.st_mtime_ns)

    def _catalog(self, entry: HistoryEntry) -> Catalog:
        """Return the tables of an entry, cached: parsing thousands of columns takes long."""
        catalog = self._catalogs.get(entry)
        if catalog is None:
            catalog = self._catalogs[entry] = _tables(*self._file(entry))
        return catalog

    def types(self, place: HistoryPlace, policy: HistoryPolicy) -> TypesInForce:
        """Return the types at a position, merged from the two possible entries.

        If a type differs between the entries, messages of the event trigger may tell which
        definition was in force. Otherwise `policy` decides, and the type is uncertain.
        """
        cached_types = self._types.get((place, policy))
        if cached_types is not None:
            return cached_types
        first, last = self._entry(place.older), self._entry(place.newer)
        older, newer = self._content(first).registry, self._content(last).registry
        uncertain: dict[int, str] = {}
        before: set[int] = set()
        after: set[int] = set()
        if place.older != place.newer:
            uncertain = self._differing(first, last)
        if place.newer == place.older + 1 and place.applied >= 0:
            before, after = self._decided(place, uncertain)
        registry = TypeRegistry()
        for state in (newer, older) if policy == "older" else (older, newer):
            registry.merge(state)
        registry.merge(older.only(before)).merge(newer.only(after))
        uncertain = {oid: name for oid, name in uncertain.items() if oid not in before | after}
        types = self._types[place, policy] = TypesInForce(registry, uncertain)
        return types

    def states(self, place: HistoryPlace) -> tuple[TypesInForce, TypesInForce] | None:
        """Return the types before and after the schema change at an uncertain position.

        Return None unless exactly two states are possible. After the last entry, the next state is
        unknown. Between several entries there are two states only if exactly one of the changes
        concerns values.
        """
        entries = [self._entry(number) for number in range(place.older, place.newer + 1)]
        pairs = list(itertools.pairwise(entries))
        if any(older == newer for older, newer in pairs):
            return None
        if sum(bool(self._differing(*pair)) for pair in pairs) != 1:
            return None
        return self.types(place, "older"), self.types(place, "newer")

    def _decided(self, place: HistoryPlace, differing: Iterable[int]) -> tuple[set[int], set[int]]:
        """Return the types that are not altered yet, and those that are, according to messages."""
        boundary = self._boundaries[place.older]
        changes = self._changes_of(boundary)
        is_whole = boundary.upper <= self._end
        before, after = set(), set()
        for oid in differing:
            naming = [
                number
                for number, (_, change) in enumerate(changes)
                if change.types is None or oid in change.types
            ] or range(len(changes))
            states = {
                _NEW if number < place.applied else place.state if number == place.own else _OLD
                for number in naming
            }
            if states == {_OLD}:
                before.add(oid)
            elif states == {_NEW} and is_whole:
                after.add(oid)
        return before, after

    def _differing(self, older: HistoryEntry, newer: HistoryEntry) -> dict[int, str]:
        """Return OIDs and names of the types whose values two entries decode differently."""
        before = self._content(older).registry.catalog
        after = self._content(newer).registry.catalog
        if older == newer:  # only one entry is known: each type that can be altered may differ
            return {oid: _named(type_) for oid, type_ in before.items() if type_.kind == "c"}
        return {
            oid: _named(after.get(oid, before.get(oid)))
            for oid in before.keys() | after.keys()
            if _differs(before.get(oid), after.get(oid))
        }

    def copied(self, path: Path) -> TypeRegistry | None:
        """Return the types in force when a snapshot's rows were read.

        Return None if the path is not a file of a snapshot, if the snapshot is not complete, or if
        its types were not stored.

        Raises
        ------
        PgOutputError
            The snapshot's state file can't be read.
        """
        number = number_of(path)
        if number is None:
            return None
        key = number[:2]
        if key not in self._copied:
            tables = SnapshotStates(self._directory)
            snapshot = _snapshot(self._tables, *key)
            if snapshot is None:
                self._tables = tables.read()
                snapshot = _snapshot(self._tables, *key)
            self._copied[key] = None if snapshot is None else tables.types(snapshot)
        return self._copied[key]

    # --- the boundaries of entries

    def places(self, lsns: Any, commit_lsns: Any) -> Any:
        """Return the positions of changes in the history.

        Parameters
        ----------
        lsns : uint64[n]
            The LSNs of the changes themselves. A transaction may write a value before another
            transaction alters the type, and commit later. Such a value has the old form.
        commit_lsns : uint64[n]
            The commit LSNs of their transactions.

        Returns
        -------
        int64[5, n]
            The fields of `HistoryPlace`.
        """
        import numpy as np

        places = np.zeros((5, len(lsns)), np.int64)
        places[2] = -1
        least, most = int(lsns.min()), int(commit_lsns.max())
        for boundary in self._boundaries:
            if boundary.upper <= least:
                places[:2] += 1
            elif boundary.lower <= most:
                state, detail = self._states(boundary, lsns, commit_lsns)
                places[0] += state == _NEW
                places[1] += state >= _UNCERTAIN
                if detail is not None:
                    places[2:] = np.where(state == _UNCERTAIN, detail, places[2:])
        return places

    def _is_exact(self, boundary: _Boundary) -> bool:
        """Return whether the stream has a message for every schema change at a boundary."""
        if boundary.lower < self._since:
            return False
        if boundary.upper == _END:
            return self._covered
        return boundary.lower > 0 and self._content(boundary.newer).exact

    def _states(self, boundary: _Boundary, lsns: Any, commit_lsns: Any) -> tuple[Any, Any]:
        """Return for each change whether it is before or after a boundary, or uncertain.

        The second value has the fields `applied`, `own` and `state` of `HistoryPlace`; it is None
        if there are no messages of the event trigger.
        """
        import numpy as np

        lower, upper = boundary.lower, boundary.upper
        is_old = (commit_lsns < lower) | ((commit_lsns >= upper) & (lsns < lower))
        is_new = (lsns >= upper) & (commit_lsns >= upper)
        detail = None
        is_whole = upper <= self._end
        # Messages are known only up to the end that the change log had when its names were read.
        if (commit_lsns < self._end).all() and self._is_exact(boundary):
            changes = self._changes_of(boundary)
            if changes:
                at = np.array([lsn for lsn, _ in changes], np.uint64)
                first = np.array([parse_lsn(change.first) for _, change in changes], np.uint64)
                last = np.array([parse_lsn(change.last) for _, change in changes], np.uint64)
                applied = np.searchsorted(at, lsns)  # schema changes committed before the change
                own = np.minimum(np.searchsorted(at, commit_lsns), len(at) - 1)
                is_own = at[own] == commit_lsns
                # The LSN of a message is its end, so the next record may have the same LSN.
                state = np.where(
                    lsns >= last[own], _NEW, np.where(lsns < first[own], _OLD, _UNCERTAIN)
                )
                state = np.where(is_own, state, _OLD)
                detail = np.array([applied, np.where(is_own, own, -1), state])
                is_old |= (applied == 0) & (state == _OLD)
                total = applied + (state == _NEW)
                is_new = ~is_old & (is_new | (is_whole & (total == len(at))))
            elif not is_whole:
                is_old |= True
        return np.where(is_old, _OLD, np.where(is_new, _NEW, _UNCERTAIN)), detail

    def _changes_of(self, boundary: _Boundary) -> list[tuple[int, SchemaChange]]:
        """Return the transactions that may have made the difference at a boundary."""
        changes = [
            (lsn, read_change(self._directory, lsn))
            for lsn in self._changes
            if boundary.lower <= lsn < boundary.upper
        ]
        differing = self._differing(boundary.older, boundary.newer)
        concerned = [
            (lsn, change)
            for lsn, change in changes
            if change.types is None or not differing.keys().isdisjoint(change.types)
        ]
        # Two entries always differ, if only in tables: one of the transactions made the difference.
        return concerned if boundary.upper == _END else concerned or changes


def _snapshot(
    states: Mapping[int, TableSnapshots], relation_id: int, number: int
) -> Snapshot | None:
    """Return a complete snapshot by its number; None if it is not complete."""
    state = states.get(relation_id)
    snapshots = () if state is None else state.snapshots
    return next((snapshot for snapshot in snapshots if snapshot.number == number), None)


def _named(entry: CatalogType | None) -> str:
    return "" if entry is None else f"{entry.namespace}.{entry.name}"


def _differs(before: CatalogType | None, after: CatalogType | None) -> bool:
    """Return whether the values of two versions of a type may decode differently.

    New labels of an enum change nothing, because a value of an enum is its label. Among the types
    that exist in one state only, composites alone count: the server can alter what a composite
    contains, but not what other types contain.
    """
    if before is None or after is None:
        type_ = before or after
        return type_ is not None and type_.kind == "c"
    return before._replace(labels=()) != after._replace(labels=())


class HistoryFollower:
    """Keeps a registry at the types in force, while changes are decoded in order.

    Parameters
    ----------
    history : History
    policy : {"error", "older", "newer"}
        What to do with values whose type was altered at about the time when they were written.

    Attributes
    ----------
    registry : TypeRegistry
        The types for the part of the frames that is decoded next.
    """

    def __init__(self, history: History, policy: HistoryPolicy) -> None:
        self._history = history
        self._policy = policy
        self.registry = TypeRegistry()
        self._types: dict[int, tuple[int, ...]] = {}  # the column types of each relation
        self._announced: dict[bytes, bytes] = {}  # the newest Relations and Types
        self._place = HistoryPlace(0, 0, -1, -1, _OLD)
        self._types_in_force = TypesInForce(self.registry, {})

    def parts(
        self, data: Any, lsns: Any, commit_lsns: Any, path: Path, encoding: str
    ) -> Iterator[tuple[int, int]]:
        """Split frames into parts with one state of the types each.

        Decode a part before you ask for the next one: meanwhile `registry` has the part's types.

        Parameters
        ----------
        data : pyarrow.Array or pyarrow.ChunkedArray
            The column `data` of a segment.
        lsns : uint64[n]
            The column `lsn`, as an array of NumPy.
        commit_lsns : pyarrow.Array or pyarrow.ChunkedArray
            The column `commit_lsn`, with nulls.
        path : pathlib.Path
            The file that the frames come from.
        encoding : str
            The client_encoding of text in the frames.

        Yields
        ------
        tuple of int
            The index of the part's first frame, and of the next part's first frame.
        """
        import numpy as np

        tags = tags_of(data)
        snapshot_types = self._history.copied(path)
        # A Truncate counts as a row: it has no values, but its columns have types.
        rows = np.flatnonzero(np.isin(tags, [ord(tag) for tag in "IUDT"]))
        if snapshot_types is not None or not len(rows):
            self._learn(data, tags, 0, len(tags))
            if snapshot_types is not None:
                self._take(TypesInForce(snapshot_types, {}))
            yield 0, len(tags)
            return
        commits = commit_lsns.fill_null(0).to_numpy()[rows]
        row_lsns = lsns[rows]
        if (row_lsns == row_lsns[0]).all() and (commits == commits[0]).all():
            rows, row_lsns, commits = rows[:1], row_lsns[:1], commits[:1]  # as in a snapshot
        places = self._history.places(row_lsns, commits)
        cuts = (np.flatnonzero((places[:, 1:] != places[:, :-1]).any(axis=0)) + 1).tolist()
        starts = [0, *rows[cuts].tolist()]
        for begin, end, first in zip(starts, [*starts[1:], len(tags)], [0, *cuts], strict=True):
            self._place = HistoryPlace(*places[:, first].tolist())
            types = self._history.types(self._place, self._policy)
            states = self._history.states(self._place) if types.uncertain else None
            # All rows of a snapshot were read with the same types: never split its files.
            if states is None or number_of(path) is not None:
                self._learn(data, tags, begin, end)
                self._take(types)
                yield begin, end
            else:
                yield from self._by_values(data, tags, (begin, end), types, states, encoding)

    def go_to(self, commit_lsn: int) -> None:
        """Set `registry` to the types in force at a commit, without decoding its frames.

        Parameters
        ----------
        commit_lsn : int
        """
        import numpy as np

        lsns = np.array([commit_lsn], np.uint64)
        self._place = HistoryPlace(*self._history.places(lsns, lsns)[:, 0].tolist())
        self._take(self._history.types(self._place, self._policy))

    def _take(self, types: TypesInForce) -> None:
        """Put types into force."""
        self._types_in_force = types
        self.registry.replace_catalog(types.registry)

    def _by_values(
        self,
        data: Any,
        tags: Any,
        within: tuple[int, int],
        policy_types: TypesInForce,
        states: tuple[TypesInForce, TypesInForce],
        encoding: str,
    ) -> Iterator[tuple[int, int]]:
        """Split an uncertain part where a value can be decoded with only one of two states."""
        import numpy as np

        begin, end = within
        wanted = np.flatnonzero(np.isin(tags[begin:end], [ord(tag) for tag in "RYIUD"])) + begin
        fitting = TypeChooser(states, policy_types, encoding, self._announced.values())
        row_types = ((index, fitting.types(data[index].as_py())) for index in wanted.tolist())
        # Rows without a value of an uncertain type join the rows before them.
        runs = [
            (next(run)[0], types)
            for types, run in itertools.groupby(
                ((index, types) for index, types in row_types if types is not None),
                lambda pair: pair[1],
            )
        ]
        self._learn(data, tags, begin, end)
        runs = [(begin, runs[0][1] if runs else policy_types), *runs[1:]]
        ends = [*(first for first, _ in runs[1:]), end]
        for (first, types), last in zip(runs, ends, strict=True):
            self._take(types)
            yield first, last

    def split(self, batch: pa.RecordBatch, path: Path, encoding: str) -> Iterator[pa.RecordBatch]:
        """Yield the parts of a file's record batch, split as `parts` does."""
        data, lsns, commit_lsns = (batch.column(name) for name in ("data", "lsn", "commit_lsn"))
        for begin, end in self.parts(data, lsns.to_numpy(), commit_lsns, path, encoding):
            yield batch.slice(begin, end - begin)

    def _learn(self, data: Any, tags: Any, begin: int, end: int) -> None:
        """Note Relations and Types, and the column types of each relation."""
        import numpy as np

        announced = np.isin(tags[begin:end], [ord(tag) for tag in "RY"])
        for index in (begin + np.flatnonzero(announced)).tolist():
            frame = data[index].as_py()
            self._announced[frame[:5]] = frame
            if frame[:1] == b"R":
                relation_id, types = columns_of(frame)
                self._types[relation_id] = types

    def check(self, relation_id: int, where: object, columns: Iterable[int] | None = None) -> None:
        """Raise an error if rows of the current part may have been decoded with wrong types.

        Parameters
        ----------
        relation_id : int
        where : object
            The source of the rows in errors, such as a path.
        columns : iterable of int, optional
            The positions of the columns that have values; by default all columns.

        Raises
        ------
        PgOutputError
            The policy is "error", and the type of a column was altered at about the LSN of the
            rows, or is in no entry.
        """
        if self._policy != "error":
            return
        types = self._types.get(relation_id, ())
        used = types if columns is None else (types[i] for i in columns if i < len(types))
        contained = self.registry.contained(used)
        for oid in sorted(contained & self._types_in_force.uncertain.keys()):
            span = self._history.span(self._place)
            raise _refused(where, self._types_in_force.uncertain[oid], relation_id, *span)
        for oid in sorted(contained - self.registry.catalog.keys()):
            if oid >= _FIRST_USER_OID:
                raise PgOutputError(
                    f"{where}: relation {relation_id} has a column of the type with OID {oid}, "
                    "which the schema history lacks: the type was created between two reads of the "
                    "catalogue, and may have been dropped since",
                    code="schema_unknown",
                    parameter="history",
                    hint=(
                        "Read again later, or read the type's values as text with ",
                        Argument("history", "newer"),
                    ),
                )

    def check_batch(self, layout: Layout, batch: Any, where: object) -> None:
        """Check a batch of decoded changes as `check` does; skip columns that are all null.

        Parameters
        ----------
        layout : Layout
            The layout of the batch.
        batch : pyarrow.RecordBatch
        where : object
            As for `check`.
        """
        if self._policy != "error":
            return
        sides = [batch.column(name) for name in ("before", "after")]
        columns = [
            field.position
            for number, field in enumerate(layout.columns)
            if any(side.field(number).null_count < len(side) for side in sides)
        ]
        self.check(layout.plan.relation.relation_id, where, columns)


def _refused(where: object, name: str, relation_id: int, lower: int, upper: int) -> PgOutputError:
    newer, older = Argument("history", "newer"), Argument("history", "older")
    has = f"{where}: relation {relation_id} has a column of type {name}, and the type may have been"
    if upper == _END:
        return PgOutputError(
            f"{has} altered after {format_lsn(lower)}, the last read of the catalogue",
            code="schema_unknown",
            parameter="history",
            hint=(
                (
                    "Read again in a minute, after the capture has read the catalogue again, or "
                    "use the newest known state with "
                ),
                newer,
            ),
        )
    since = "before" if lower == 0 else f"between {format_lsn(lower)} and"
    return PgOutputError(
        f"{has} altered {since} {format_lsn(upper)}, where a value was written",
        code="schema_unknown",
        parameter="history",
        hint=(
            "Choose how to read such values: ", newer, " or ", older,
            ". With the event trigger of docs/reference/altered-types.md, later reads are exact",
        ),
    )  # fmt: skip


def history_of(paths: Iterable[str | os.PathLike[str]]) -> History | None:
    """Return the schema history of the change log that contains the paths.

    Return None if the change log has no history, or if the paths lie in several directories.

    Parameters
    ----------
    paths : iterable of paths
        Directories, or files of segments or snapshots.
    """
    directories = set()
    for path in map(Path, paths):
        directory = path if path.is_dir() else path.parent
        is_of_snapshot = directory.name == SNAPSHOTS.name and not path.is_dir()
        directories.add(directory.parent if is_of_snapshot else directory)
    if len(directories) != 1:
        return None
    history = History(directories.pop())
    return None if history.is_empty else history


def check_policy(policy: object) -> None:
    """Check the option `history`.

    Raises
    ------
    PgOutputError
        It is not one of `POLICIES`.
    """
    choice(*POLICIES).check("history", policy)
