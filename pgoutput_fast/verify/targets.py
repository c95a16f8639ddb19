"""The interface of what verify compares with the server, and a change log as such a target.

A target gives its position, before which it has all transactions, and the rows of each table there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ..changelog.history import history_of
from ..errors import counted
from ..policies import Policies
from ..segments.listing import contents, metadata_of
from .databases import Database, types_of
from .fold import FoldedRows, FoldedRowStore, HistoryError, KeyChange
from .parquet_changes import ChangeFiles
from .texts import UNKNOWN, NotComparable, Texts, TextsOf, ValueStorage, literal, part, quoted

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ..segments import SegmentMetadata
    from ..types import TypeRegistry
    from .moment import ServerTable
    from .parquet_changes import ChangeVersion
    from .sums import Rows

_POLICIES = Policies(infinity="text", out_of_range="text", special_values="text", arrays="text")
_AT_ONCE = 100  # rows that are fetched from DuckDB at a time; they may be long
_TELL = 10_000  # changes between two calls of `tell`


Tell = Callable[[int], None]


def ignored(_: int) -> None:
    """Ignore the number of changes."""


class _UnorderedError(Exception):
    """The changes in files are not in stream order."""


class TargetTable(NamedTuple):
    """The columns of a table in a target.

    Attributes
    ----------
    texts : dict of str to Texts
        Canonical texts of the columns that can be compared. The server's value is the quoted name.
    left_out : dict of str to str
        The other columns, and why they can't be compared.
    """

    texts: dict[str, Texts]
    left_out: dict[str, str]


class VerifiedTarget(Protocol):
    """A change log, or the target of a sync, with tables of a server.

    Attributes
    ----------
    system_identifier, database : str
        The server and the database from which the changes came. Known after `identify`; "" if the
        target has nothing yet.
    slot : str
        The slot from which the changes came; "" if not known.
    tables : dict of (str, str) to int
        Namespace and name → relation id of each table. Known after `refresh`.
    paused : frozenset of int
        Relation ids of the paused tables. Known after `refresh`.
    furthest : int
        An upper limit: no row that `table` has read so far comes from a transaction with a commit
        LSN at or beyond this LSN.
    """

    system_identifier: str
    database: str
    slot: str
    tables: dict[tuple[str, str], int]
    paused: frozenset[int]
    furthest: int

    def identify(self) -> None:
        """Set the server and the slot from which the changes came. This is fast.

        Raises
        ------
        PgOutputError
            The target can't be read.
        """

    def wants(self, table: ServerTable) -> bool:
        """Return whether the target selects a table. Others are compared only if named."""

    def refresh(self, confirmed: int, tell: Tell = ignored) -> int:
        """Load the newest version. From now on, tables are read at this version or a later one.

        Parameters
        ----------
        confirmed : int
            The LSN before which the slot's reader has stored all changes, from just before the
            call.
        tell : callable
            Called with the number of changes that were read so far.

        Returns
        -------
        int
            The position: the target has all transactions with a commit LSN before it, and none at
            or beyond `furthest`. 0 while the target is empty.
        """

    def table(self, table: ServerTable) -> TargetTable:
        """Read a table of the target, and return its columns.

        Raises
        ------
        NotComparable
            The target does not have the table, or its rows there are not known.
        """

    def rows(
        self,
        table: ServerTable,
        compared: TargetTable,
        part_of: Callable[[str, str | None], str],
        tell: Tell = ignored,
    ) -> Rows:
        """Return the rows of a table.

        Parameters
        ----------
        table : ServerTable
        compared : TargetTable
            The result of `table`; columns may be removed.
        part_of : callable
            Takes a column and the text of a value from the catalogue; returns the value's part.
        tell : callable
            Called with the number of changes that were read so far.

        Raises
        ------
        NotComparable
            The rows are not known.
        """

    def limit_memory(self, memory: int) -> None:
        """Set DuckDB's memory limit in bytes."""

    def close(self) -> None:
        """Delete the temporary files of the comparison."""


class DirectoryTarget:
    """A change log as a target: its changes are written to Parquet files and folded.

    Values that Arrow's types lack are decoded to the server's text, so that nothing is lost. See
    `VerifiedTarget`.
    """

    def __init__(self, path: Path, types: Callable[[], TypeRegistry]) -> None:
        self._path = path
        self._types_of_server = types
        self.system_identifier = self.database = self.slot = ""
        self.tables: dict[tuple[str, str], int] = {}
        self.paused: frozenset[int] = frozenset()
        self._files: ChangeFiles | None = None
        self._resources = contextlib.ExitStack()
        self._database = self._resources.enter_context(contextlib.closing(Database(path)))
        self._store = self._resources.enter_context(
            contextlib.closing(FoldedRowStore(self._database.directory / "rows"))
        )
        # Relation id → compared columns, LSN before which changes are folded, number of changes.
        self._folded: dict[int, tuple[TargetTable, int, int]] = {}
        self._position = self.furthest = 0

    def close(self) -> None:
        """See `VerifiedTarget`."""
        self._resources.close()

    def limit_memory(self, memory: int) -> None:
        """See `VerifiedTarget`."""
        self._database.limit_memory(memory)

    def identify(self) -> None:
        """See `VerifiedTarget`."""
        self._identify(metadata_of(self._path))

    def _identify(self, metadata: SegmentMetadata | None) -> None:
        if metadata is not None:
            self.system_identifier, self.database = metadata.system_identifier, metadata.database
            self.slot = metadata.slot

    def wants(self, table: ServerTable) -> bool:  # noqa: ARG002
        """See `VerifiedTarget`."""
        return True

    def refresh(self, confirmed: int, tell: Tell = ignored) -> int:
        """See `VerifiedTarget`."""
        listing = contents(self._path)
        if self._files is None:
            metadata = metadata_of(self._path)
            if metadata is None:
                return 0
            self._identify(metadata)
            # Without a catalogue, values of user-defined types are decoded from text format only.
            # In binary format, they need the types of a catalogue.
            is_binary = metadata.options.get("binary") == "true"
            lacks_types = is_binary and history_of([self._path]) is None
            registry = self._types_of_server() if lacks_types else None
            directory = self._database.directory / "files"
            self._files = ChangeFiles(self._path, directory, _POLICIES, registry)
        self._files.read(tell)
        position = self._files.position
        self._position = 0 if position is None else position.lsn
        self.tables = {name: relation_id for relation_id, name in self._files.names.items()}
        self.furthest = max(self._position, listing.end, confirmed)
        return self.furthest

    def _versions(self, relation_id: int) -> list[ChangeVersion]:
        return [] if self._files is None else self._files.versions.get(relation_id, [])

    @staticmethod
    def _source(version: ChangeVersion) -> str:
        """Return the changes of a version of a table as an SQL source."""
        files = ", ".join(literal(str(path)) for path in version.files)
        return f"read_parquet([{files}])"

    def _types(self, connection: Any, version: ChangeVersion) -> dict[str, ValueStorage]:
        return types_of(connection.sql(f"FROM {self._source(version)}"))

    def table(self, table: ServerTable) -> TargetTable:
        """See `VerifiedTarget`."""
        why = None if self._files is None else self._files.why_not(table.table.relation_id)
        if why is not None:
            raise NotComparable(why)
        versions = self._versions(table.table.relation_id)
        storages: dict[str, ValueStorage] = {}
        names: dict[str, str] = {}
        if versions:
            with self._database.refusals():
                storages = self._types(self._database.connection, versions[-1])
            names = _names(versions[-1], "after")
        texts: dict[str, Texts] = {}
        left_out: dict[str, str] = {}
        for column in table.columns:
            name = names.get(column)
            try:
                # Without a column in the target, the storage does not matter.
                kind = ValueStorage("varchar") if name is None else storages[name]
                texts[column] = TextsOf(_POLICIES).column(
                    table.types[column], kind, quoted(column), quoted(name or column)
                )
            except NotComparable as error:
                left_out[column] = error.message
        return TargetTable(texts, left_out)

    def rows(
        self,
        table: ServerTable,
        compared: TargetTable,
        part_of: Callable[[str, str | None], str],
        tell: Tell = ignored,
    ) -> FoldedRows:
        """See `VerifiedTarget`."""
        relation_id = table.table.relation_id
        columns = list(compared.texts)
        rows = FoldedRows(
            self._store, f"t{relation_id}", [columns.index(name) for name in table.key]
        )
        versions = self._versions(relation_id)
        total = sum(version.rows for version in versions)
        before, done, folded = self._folded.get(relation_id, (None, 0, 0))
        if before is not None:
            # Only add the new changes, if all of them come after those that are folded.
            newer = self._count(versions, done) if before == compared else -1
            if newer != total - folded:
                rows.empty()
                done = 0
        self._folded.pop(relation_id, None)
        try:
            self._fold(rows, table, compared, versions, done, part_of, tell)
        except HistoryError as error:
            rows.empty()
            raise NotComparable(str(error)) from error
        self._folded[relation_id] = compared, self._position, total
        incomplete = rows.incomplete()
        if incomplete is not None:
            number, parts = incomplete
            lacking = [name for name, part in zip(columns, parts, strict=True) if part == UNKNOWN]
            raise NotComparable(
                f"the change log lacks values of {', '.join(lacking)} in "
                f"{counted(number, 'row')}: they were written before its first change, or the "
                "column was added or renamed later"
            )
        return rows

    def _fold(
        self,
        rows: FoldedRows,
        table: ServerTable,
        compared: TargetTable,
        versions: list[ChangeVersion],
        done: int,
        part_of: Callable[[str, str | None], str],
        tell: Tell,
    ) -> None:
        if not versions:
            return
        # The files are in order, unless the rows of a snapshot came late. So try without a sort
        # first: a sort of long rows takes all of DuckDB's memory.
        try:
            rows.apply(_counting(self._changes(table, compared, versions, done, part_of, ""), tell))
        except _UnorderedError:
            rows.empty()
            order = " ORDER BY commit_lsn, seq"
            rows.apply(_counting(self._changes(table, compared, versions, 0, part_of, order), tell))

    def _range(self, version: ChangeVersion, done: int) -> str:
        """Return the SQL clauses for a version's changes from an LSN up to the position."""
        return (
            f"FROM {self._source(version)} "
            f"WHERE commit_lsn >= {done} AND commit_lsn < {self._position}"
        )

    def _count(self, versions: list[ChangeVersion], done: int) -> int:
        with self._database.refusals():
            counts = " UNION ALL ".join(
                f"SELECT count(*) {self._range(version, done)}" for version in versions
            )
            rows = self._database.connection.execute(counts).fetchall()
        return sum(count for (count,) in rows)

    def _changes(
        self,
        table: ServerTable,
        compared: TargetTable,
        versions: list[ChangeVersion],
        done: int,
        part_of: Callable[[str, str | None], str],
        order: str,
    ) -> Iterator[KeyChange]:
        width = len(compared.texts)
        with self._database.refusals():
            connection = self._database.connection
            selects = [
                self._select(
                    table, compared, version, self._types(connection, version), done, part_of
                )
                for version in versions
            ]
            cursor = connection.execute(" UNION ALL ".join(selects) + order)
            latest = (0, 0)
            while some := cursor.fetchmany(_AT_ONCE):
                for op, old_kind, commit_lsn, seq, *parts in some:
                    if (commit_lsn, seq) < latest:
                        raise _UnorderedError
                    latest = commit_lsn, seq
                    yield KeyChange(op, old_kind, tuple(parts[:width]), tuple(parts[width:]))

    def _select(
        self,
        table: ServerTable,
        compared: TargetTable,
        version: ChangeVersion,
        storages: dict[str, ValueStorage],
        done: int,
        part_of: Callable[[str, str | None], str],
    ) -> str:
        """Return the query for the changes of one version of a table, with the parts of columns."""
        now = {column.name: column for column in table.table.columns}
        after = _names(version, "after")
        # If this version lacks a column, its rows have the value with which the column was added.
        # But if any column was renamed since, the missing column may have had another name.
        renamed = set(after) - set(now)
        selected = []
        for side in ("after", "before"):
            names = _names(version, side)
            is_old = side == "before"
            for column, texts in compared.texts.items():
                name = names.get(column)
                if name is None:
                    added = table.table.added_values
                    if renamed or column not in added:
                        selected.append(literal(f"{UNKNOWN},"))
                    else:
                        selected.append(literal(part_of(column, added[column])))
                    continue
                try:
                    own = TextsOf(_POLICIES).column(
                        table.types[column], storages[name], quoted(column), quoted(name)
                    )
                except NotComparable:
                    own = Texts("", "")
                if own.server != texts.server:
                    selected.append(literal(f"{UNKNOWN},"))
                elif is_old and column in version.key:
                    selected.append(part(own.target))
                else:
                    unsent = "old_kind = 'K'" if is_old else (
                        f"list_contains(unchanged, {literal(column)})"
                    )  # fmt: skip
                    selected.append(
                        f"CASE WHEN {unsent} THEN {literal(f'{UNKNOWN},')} "
                        f"ELSE {part(own.target)} END"
                    )
        shown = ", ".join(selected) or "''"
        return f"SELECT op, old_kind, commit_lsn, seq, {shown} {self._range(version, done)}"


def _counting(changes: Iterator[KeyChange], tell: Tell) -> Iterator[KeyChange]:
    for number, change in enumerate(changes):
        if number % _TELL == 0:
            tell(number)
        yield change


def _names(version: ChangeVersion, side: str) -> dict[str, str]:
    """Map the table's columns to the files' columns with the values after or before a change."""
    return {column: f"{side[0]}{i}" for i, column in enumerate(version.columns)}


__all__ = ["DirectoryTarget", "TargetTable", "VerifiedTarget"]
