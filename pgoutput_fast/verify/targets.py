"""What is compared with the server: the interface of a target, and targets that hold changes.

A target tells up to which position it has everything, and gives the rows that each table has there.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from .._disk import read_json_file
from ..errors import PgOutputError
from ..files import export
from ..files._manifest import NAME, checked
from ..history import history_of
from ..lsn import parse_lsn
from ..policies import Policies
from ..segments.listing import contents, metadata_of
from .databases import ATTACHED, Database, types_of
from .fold import Change, FoldedRows, HistoryError, Store
from .texts import UNKNOWN, Held, NotComparable, Texts, TextsOf, literal, part, quoted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..segments import SegmentMetadata
    from ..types import TypeRegistry
    from .moment import ServerTable
    from .sums import Rows

_FORMATS = ("parquet", "duckdb")  # of exports
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


class Target(Protocol):
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
    furthest : int
        What `table` has given so far has no transaction whose commit lies at this LSN or beyond.
    """

    system_identifier: str
    database: str
    slot: str
    tables: dict[tuple[str, str], int]
    furthest: int

    def identify(self) -> None:
        """Find out from which server and slot it has its changes. Nothing long is read for that.

        Raises
        ------
        PgOutputError
            It can't be read, or the segments are not those of the export.
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

    def close(self) -> None:
        """Delete what was made for the comparison."""


class ExportTarget:
    """The files or the database of an export, whose changes are folded; see `Target`."""

    def __init__(self, path: Path, segments: str | None = None) -> None:
        self._path = path
        self._segments = None if segments is None else Path(segments)
        self.system_identifier = self.database = self.slot = ""
        self.tables: dict[tuple[str, str], int] = {}
        self._versions: dict[int, list[Any]] = {}
        self._elsewhere: dict[int, str] = {}
        self._policies = Policies()
        self._chosen: tuple[bool, bool] = (False, False)
        self._has_before = False
        self._held = contextlib.ExitStack()
        self._database = self._held.enter_context(contextlib.closing(Database(path)))
        self._store = self._held.enter_context(
            contextlib.closing(Store(self._database.directory / "rows"))
        )
        # Relation id → what was compared and folded, up to which LSN, and of how many changes.
        self._folded: dict[int, tuple[TargetTable, int, int]] = {}
        self._position = self.furthest = 0

    def close(self) -> None:
        """See `Target`."""
        self._held.close()

    def _manifest(self) -> dict[str, Any]:
        if not self._path.is_file():
            path = self._path / NAME
            try:
                return checked(read_json_file(path), str(path))
            except OSError as error:
                raise PgOutputError(f"can't read {path}: {error.strerror}") from error
        with self._database.attached() as connection:
            found = connection.execute(f"FROM {ATTACHED}.pgoutput_fast.manifest").fetchone()
        return checked(found[0] if found else "", f"the manifest in {self._path}")

    def limit_memory(self, memory: int) -> None:
        """Have duckdb take so many bytes at most."""
        self._database.limit_memory(memory)

    def identify(self) -> None:
        """See `Target`."""
        self._identify(self._manifest())

    def _identify(self, manifest: dict[str, Any]) -> None:
        if manifest["format"] not in _FORMATS:
            raise PgOutputError(
                f"{self._path} is an export in the format {manifest['format']!r}, which can't be "
                f"compared: export to {' or '.join(_FORMATS)}, or compare the directory of segments"
            )
        source = manifest["source"]
        if source["kind"] != "segments":
            raise PgOutputError(
                f"{self._path} is the export of a recorded stream, which has no position"
            )
        self.system_identifier, self.database = source["system_identifier"], source["database"]
        if self._segments is None:
            return
        self.slot = source["slot"]
        metadata = metadata_of(self._segments)
        for name in ("system_identifier", "database", "slot"):
            if metadata is not None and getattr(metadata, name) != source[name]:
                raise PgOutputError(
                    f"{self._path} was not made of the segments in {self._segments}: its "
                    f"{name.replace('_', ' ')} is {source[name]!r}, theirs "
                    f"{getattr(metadata, name)!r}"
                )

    def wants(self, table: ServerTable) -> bool:  # noqa: ARG002
        """See `Target`."""
        return True

    def refresh(self, confirmed: int, tell: Tell = ignored) -> int:  # noqa: ARG002
        """See `Target`."""
        begin = end = 0
        if self._segments is not None:
            found = contents(self._segments)
            begin, end = (found.segments[-1].end_lsn if found.segments else 0), found.end
            end = max(end, confirmed)
        manifest = self._manifest()
        self._identify(manifest)
        options = manifest["options"]
        given: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in options["policies"].items()
        }
        self._policies = Policies(**given)
        self._has_before = options["before"]
        self._chosen = options["tables"] is not None, options["columns"] is not None
        if manifest["errors"]:
            raise PgOutputError(
                f"{self._path} has a table of frames that were refused, so it lacks changes"
            )
        self.tables, self._versions = {}, {}
        for table in manifest["tables"]:
            for version in table["versions"]:
                self.tables[table["namespace"], table["name"]] = version["relation_id"]
                self._versions.setdefault(version["relation_id"], []).append(version)
        # Tables that are at another position, as they wait for a snapshot.
        self._elsewhere = {int(key): lsn for key, lsn in manifest["elsewhere"].items()}
        position = manifest["position"]
        self._position = 0 if position is None else parse_lsn(position)
        if self._segments is not None and self._position >= begin:
            # It has all segments, and nothing came between the last one and their end.
            self._position = max(self._position, end)
        self.furthest = self._position
        return self._position

    def _source(self, version: Any) -> str:
        """The rows of a version of a table, in a FROM."""
        if "table" in version:
            return f"{ATTACHED}." + ".".join(map(quoted, version["table"]))
        # duckdb takes a path for a pattern.
        path = re.sub(r"([\[*?])", r"[\1]", str(self._path))
        files = ", ".join(literal(f"{path}/{one['file']}") for one in version["parts"])
        return f"read_parquet([{files}])"

    def _types(self, connection: Any, version: Any) -> dict[str, Held]:
        return types_of(connection.sql(f"FROM {self._source(version)}"))

    def table(self, table: ServerTable) -> TargetTable:
        """See `Target`."""
        waits = self._elsewhere.get(table.table.relation_id)
        if waits is not None:
            raise NotComparable(f"it waits for its snapshot since {waits}")
        versions = self._versions.get(table.table.relation_id)
        if versions is None and self._chosen[0]:
            raise NotComparable("the export was made of chosen tables, and has nothing of it")
        newest = versions[-1] if versions else None
        held: dict[str, Held] = {}
        if newest:
            with self._database.attached() as connection:
                held = self._types(connection, newest)
        names = _names(newest, "after") if newest else {}
        texts: dict[str, Texts] = {}
        left_out: dict[str, str] = {}
        for column in table.columns:
            name = names.get(column)
            if name is None and newest and self._chosen[1]:
                left_out[column] = "the export was made of chosen columns"
                continue
            try:
                # Without a value in the target any form will do.
                kind = Held("varchar") if name is None else held[name]
                texts[column] = TextsOf(self._policies).column(
                    table.types[column], kind, quoted(column), quoted(name or column)
                )
            except NotComparable as error:
                left_out[column] = str(error)
        return TargetTable(texts, left_out)

    def rows(
        self,
        table: ServerTable,
        compared: TargetTable,
        part_of: Callable[[str, str | None], str],
        tell: Tell = ignored,
    ) -> FoldedRows:
        """See `Target`."""
        relation_id = table.table.relation_id
        columns = list(compared.texts)
        rows = FoldedRows(
            self._store, f"t{relation_id}", [columns.index(name) for name in table.key]
        )
        versions = self._versions.get(relation_id, [])
        total = sum(version["rows"] for version in versions)
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
        versions: list[Any],
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

    def _range(self, version: Any, done: int) -> str:
        """The rows of a version from an LSN on; an export may have added more by now."""
        return (
            f"FROM {self._source(version)} "
            f"WHERE commit_lsn >= {done} AND commit_lsn < {self._position}"
        )

    def _count(self, versions: list[Any], done: int) -> int:
        with self._database.attached() as connection:
            return sum(
                connection.execute(f"SELECT count(*) {self._range(version, done)}").fetchone()[0]
                for version in versions
            )

    def _changes(
        self,
        table: ServerTable,
        compared: TargetTable,
        versions: list[Any],
        done: int,
        part_of: Callable[[str, str | None], str],
        order: str,
    ) -> Iterator[Change]:
        width = len(compared.texts)
        with self._database.attached() as connection:
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
                    before = tuple(parts[width:]) if self._has_before else None
                    yield Change(op, old_kind, tuple(parts[:width]), before)

    def _select(
        self,
        table: ServerTable,
        compared: TargetTable,
        version: Any,
        held: dict[str, Held],
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
        for side in ("after", "before") if self._has_before else ("after",):
            names = _names(version, side)
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
                    own = TextsOf(self._policies).column(
                        table.types[column], held[name], quoted(column), quoted(name)
                    )
                except NotComparable:
                    own = Texts("", "")
                if own.server != texts.server:
                    selected.append(literal(f"{UNKNOWN},"))
                elif side == "after":
                    unsent = f"list_contains(unchanged, {literal(name)})"
                    selected.append(
                        f"CASE WHEN {unsent} THEN {literal(f'{UNKNOWN},')} "
                        f"ELSE {part(own.target)} END"
                    )
                else:
                    selected.append(part(own.target))
        shown = ", ".join(selected) or "''"
        return f"SELECT op, old_kind, commit_lsn, seq, {shown} {self._range(version, done)}"


def _counting(changes: Iterator[Change], tell: Tell) -> Iterator[Change]:
    for number, change in enumerate(changes):
        if number % _TELL == 0:
            tell(number)
        yield change


def _names(version: Any, side: str) -> dict[str, str]:
    """Column of the table → column of the files that has its values, after or before a change."""
    return {one["column"]: one["name"] for one in version["columns"] if one["part"] == side}


class DirectoryTarget:
    """A directory of segments, folded by an export of its own; see `Target`.

    All values that Arrow's types lack come as the server's text, so that nothing is lost.
    """

    def __init__(self, path: Path, types: Callable[[], TypeRegistry]) -> None:
        self._path = path
        self._types = types
        self.system_identifier = self.database = self.slot = ""
        self.tables: dict[tuple[str, str], int] = {}
        self._directory = Path(tempfile.mkdtemp(prefix="pgoutput_fast_verify_"))
        self._export = ExportTarget(self._directory / "export")
        self._options: dict[str, Any] | None = None
        self.furthest = 0

    def close(self) -> None:
        """See `Target`."""
        self._export.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def identify(self) -> None:
        """See `Target`."""
        self._identify(metadata_of(self._path))

    def _identify(self, metadata: SegmentMetadata | None) -> None:
        if metadata is not None:
            self.system_identifier, self.database = metadata.system_identifier, metadata.database
            self.slot = metadata.slot

    def wants(self, table: ServerTable) -> bool:  # noqa: ARG002
        """See `Target`."""
        return True

    def refresh(self, confirmed: int, tell: Tell = ignored) -> int:
        """See `Target`."""
        found = contents(self._path)
        if self._options is None:
            metadata = metadata_of(self._path)
            if metadata is None:
                return 0
            self._identify(metadata)
            self._options = self._chosen(metadata)
        path = self._directory / "export"
        export(
            self._path, path, before=True, progress=lambda done: tell(done.rows), **self._options
        )
        position = self._export.refresh(0) if (path / NAME).exists() else 0
        self.tables = self._export.tables
        self.furthest = max(position, found.end, confirmed)
        return self.furthest

    def _chosen(self, metadata: SegmentMetadata) -> dict[str, Any]:
        # Users' types come as text without a catalogue; from binary only a catalogue has it.
        is_binary = metadata.options.get("binary") == "true"
        text: Any = "text"
        return {
            "policies": Policies(
                infinity=text, out_of_range=text, special_values=text, arrays=text
            ),
            "registry": self._types() if is_binary and history_of([self._path]) is None else None,
            # What may have been altered is compared with what the server has now.
            "history": "newer",
        }

    def table(self, table: ServerTable) -> TargetTable:
        """See `Target`."""
        return self._export.table(table)

    def rows(
        self,
        table: ServerTable,
        compared: TargetTable,
        part_of: Callable[[str, str | None], str],
        tell: Tell = ignored,
    ) -> FoldedRows:
        """See `Target`."""
        return self._export.rows(table, compared, part_of, tell)


__all__ = ["DirectoryTarget", "ExportTarget", "Target", "TargetTable"]
