"""What is compared with the server: the interface of a target, and a change log as a target.

A target tells up to which position it has everything, and gives the rows that each table has there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ..changelog.history import history_of
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
_AT_ONCE = 100  # rows that are taken from duckdb at once; they may be long
_TELL = 10_000  # changes after which it is told how many were read


Tell = Callable[[int], None]


def ignored(_: int) -> None:
    """Do nothing with a number."""


class _UnorderedError(Exception):
    """The rows of files are not in the order in which their changes were committed."""


class TargetTable(NamedTuple):
    """How a target has a table.

    Attributes
    ----------
    texts : dict of str to Texts
        Of the columns that can be compared, with `quoted` of the name as the server's value.
    left_out : dict of str to str
        The other columns, and why they can't be.
    """

    texts: dict[str, Texts]
    left_out: dict[str, str]


class VerifiedTarget(Protocol):
    """Something that holds tables of a server.

    Attributes
    ----------
    system_identifier, database : str
        Those of the server from which its changes came. They are known after `identify`, or "" if
        it has nothing yet.
    slot : str
        The slot that brought them; "" if it does not matter.
    tables : dict of (str, str) to int
        Namespace and name → relation id, of the tables in it. Known after `refresh`.
    paused : frozenset of int
        Relation ids of the tables that are paused. Known after `refresh`.
    furthest : int
        What `table` has given so far has no transaction whose commit lies at this LSN or beyond.
    """

    system_identifier: str
    database: str
    slot: str
    tables: dict[tuple[str, str], int]
    paused: frozenset[int]
    furthest: int

    def identify(self) -> None:
        """Find out from which server and slot it has its changes. Nothing long is read for that.

        Raises
        ------
        PgOutputError
            It can't be read.
        """

    def wants(self, table: ServerTable) -> bool:
        """Whether it was made for a table; others are compared if the caller names them."""

    def refresh(self, confirmed: int, tell: Tell = ignored) -> int:
        """Look at the newest version. Tables are read at this one from now on, or at later ones.

        Parameters
        ----------
        confirmed : int
            The LSN up to which the slot's reader has stored everything. It was asked before.
        tell : callable
            Is called with the number of changes that were read so far.

        Returns
        -------
        int
            The position: it has the transactions whose commit lies before it, and none beyond
            `furthest`. 0 while it has nothing.
        """

    def table(self, table: ServerTable) -> TargetTable:
        """How it has a table of the server.

        Raises
        ------
        NotComparable
            It does not have the table, or can't say what its rows are.
        """

    def rows(
        self,
        table: ServerTable,
        compared: TargetTable,
        part_of: Callable[[str, str | None], str],
        tell: Tell = ignored,
    ) -> Rows:
        """The rows of a table.

        Parameters
        ----------
        table : ServerTable
        compared : TargetTable
            What `table` gave for it.
        part_of : callable
            Makes the part of a value of a column, of which the catalogue has the text.
        tell : callable
            Is called with the number of changes that were read so far.

        Raises
        ------
        NotComparable
            The target can't say what its rows are.
        """

    def limit_memory(self, memory: int) -> None:
        """Have DuckDB take so many bytes at most."""

    def close(self) -> None:
        """Delete what was made for the comparison."""


class DirectoryTarget:
    """A change log, whose changes are written to Parquet and folded; see `VerifiedTarget`.

    All values that Arrow's types lack come as the server's text, so that nothing is lost.
    """

    def __init__(self, path: Path, types: Callable[[], TypeRegistry]) -> None:
        self._path = path
        self._types_of_server = types
        self.system_identifier = self.database = self.slot = ""
        self.tables: dict[tuple[str, str], int] = {}
        self.paused: frozenset[int] = frozenset()
        self._files: ChangeFiles | None = None
        self._held = contextlib.ExitStack()
        self._database = self._held.enter_context(contextlib.closing(Database(path)))
        self._store = self._held.enter_context(
            contextlib.closing(FoldedRowStore(self._database.directory / "rows"))
        )
        # Relation id → what was compared and folded, up to which LSN, and of how many changes.
        self._folded: dict[int, tuple[TargetTable, int, int]] = {}
        self._position = self.furthest = 0

    def close(self) -> None:
        """See `VerifiedTarget`."""
        self._held.close()

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
        found = contents(self._path)
        if self._files is None:
            metadata = metadata_of(self._path)
            if metadata is None:
                return 0
            self._identify(metadata)
            # Users' types come as text without a catalogue; from binary only a catalogue has it.
            is_binary = metadata.options.get("binary") == "true"
            lacks_types = is_binary and history_of([self._path]) is None
            registry = self._types_of_server() if lacks_types else None
            directory = self._database.directory / "files"
            self._files = ChangeFiles(self._path, directory, _POLICIES, registry)
        self._files.read(tell)
        position = self._files.position
        self._position = 0 if position is None else position.lsn
        self.tables = {name: relation_id for relation_id, name in self._files.names.items()}
        self.furthest = max(self._position, found.end, confirmed)
        return self.furthest

    def _versions(self, relation_id: int) -> list[ChangeVersion]:
        return [] if self._files is None else self._files.versions.get(relation_id, [])

    @staticmethod
    def _source(version: ChangeVersion) -> str:
        """The rows of a version of a table, in a FROM."""
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
        held: dict[str, ValueStorage] = {}
        names: dict[str, str] = {}
        if versions:
            with self._database.refusals():
                held = self._types(self._database.connection, versions[-1])
            names = _names(versions[-1], "after")
        texts: dict[str, Texts] = {}
        left_out: dict[str, str] = {}
        for column in table.columns:
            name = names.get(column)
            try:
                # Without a value in the target any form will do.
                kind = ValueStorage("varchar") if name is None else held[name]
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
            # What came since then can be added, if all of it comes after what was folded.
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
        found = rows.incomplete()
        if found is not None:
            number, parts = found
            lacking = [name for name, one in zip(columns, parts, strict=True) if one == UNKNOWN]
            raise NotComparable(
                f"no change in the target brings all values of {number:,} of its rows: those of "
                f"{', '.join(lacking)} were written before its first change, or the column was "
                "added or renamed since"
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
        # Files have their rows in order, unless a snapshot's came late. Sorting takes duckdb's
        # memory, and of long rows all of it.
        try:
            rows.apply(_counting(self._changes(table, compared, versions, done, part_of, ""), tell))
        except _UnorderedError:
            rows.empty()
            order = " ORDER BY commit_lsn, seq"
            rows.apply(_counting(self._changes(table, compared, versions, 0, part_of, order), tell))

    def _range(self, version: ChangeVersion, done: int) -> str:
        """The rows of a version from an LSN on."""
        return (
            f"FROM {self._source(version)} "
            f"WHERE commit_lsn >= {done} AND commit_lsn < {self._position}"
        )

    def _count(self, versions: list[ChangeVersion], done: int) -> int:
        with self._database.refusals():
            counts = " UNION ALL ".join(
                f"SELECT count(*) {self._range(version, done)}" for version in versions
            )
            found = self._database.connection.execute(counts).fetchall()
        return sum(count for (count,) in found)

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
            found = connection.execute(" UNION ALL ".join(selects) + order)
            latest = (0, 0)
            while some := found.fetchmany(_AT_ONCE):
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
        held: dict[str, ValueStorage],
        done: int,
        part_of: Callable[[str, str | None], str],
    ) -> str:
        """The changes of one version of a table, with the parts of the columns."""
        now = {one.name: one for one in table.table.columns}
        after = _names(version, "after")
        # Of a column that lacks here, the rows have the value that it was added with; unless the
        # column had another name then.
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
                        table.types[column], held[name], quoted(column), quoted(name)
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
    """Column of the table → column of the files that has its values, after or before a change."""
    return {column: f"{side[0]}{i}" for i, column in enumerate(version.columns)}


__all__ = ["DirectoryTarget", "TargetTable", "VerifiedTarget"]
