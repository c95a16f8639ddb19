"""Delta state tables whose rows are read by parallel tasks, such as on Spark's executors.

Each task reads some files of a table. As in one process, DuckDB computes the canonical texts and
their sums. The sums of all tasks add up to the sums of the table.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.dataset as ds

from ..apply.delta_place import DeltaPlace, require_deltalake
from ..errors import PgOutputError
from .databases import Database
from .states import STATE_ROWS, DeltaStates, StateRows, TargetTables
from .sums import Rows, Sum

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from ..apply.targets import TableState
    from ..spark._jobs import Jobs

_TASK_BYTES = 256 << 20
"""Maximum bytes of a task's files. Larger tables have more tasks than there are cores."""
_ROWS = 1 << 14
"""Rows that are read at a time."""
_MEMORY = 512 << 20
"""DuckDB's memory limit in a task, in bytes."""


class VerifyEngine(Protocol):
    """What runs tasks in parallel, such as a :class:`pgoutput_fast.spark.SparkEngine`.

    Attributes
    ----------
    jobs : Jobs
    driver_bytes : int
        Largest table, in bytes of its files, that this process reads itself.
    """

    @property
    def jobs(self) -> Jobs:
        """What runs functions in parallel."""

    @property
    def driver_bytes(self) -> int:
        """Largest table, in bytes of its files, that this process reads itself."""


class StateFiles(NamedTuple):
    """Some files of a Delta table at one version.

    Fields: uri; version; files (paths in the table); options (storage options of delta-rs, which
    may have secrets, so they are not in the repr).
    """

    uri: str
    version: int
    files: tuple[str, ...]
    options: dict[str, str]

    def __repr__(self) -> str:
        return f"StateFiles({self.uri!r}, {self.version}, {len(self.files)} files)"


class StateTask(NamedTuple):
    """A call of a method of `sums.Rows` for the rows in some files.

    Attributes
    ----------
    of : StateFiles
    columns : tuple of str
        The columns to read; empty: all.
    source : str
        The rows as an SQL source, in which `STATE_ROWS` names the rows of the files.
    parts : dict of str to str
        See `StateRows`.
    key : tuple of str
    method : {"sums", "digests", "named", "parts"}
        The method of `sums.Rows`.
    arguments : tuple
        The method's arguments.
    """

    of: StateFiles
    columns: tuple[str, ...]
    source: str
    parts: dict[str, str]
    key: tuple[str, ...]
    method: Literal["sums", "digests", "named", "parts"]
    arguments: tuple[Any, ...]


def ask_rows(task: StateTask) -> Any:
    """Run a task: return the result of its method, as a dict or a list.

    Raises
    ------
    PgOutputError
        The files can't be read.
    """
    place = DeltaPlace(task.of.uri, task.of.options)
    path = place.path or Path(place.uri)
    # One thread, because other tasks use the other cores.
    with (
        contextlib.closing(Database(path, threads=1, memory=_MEMORY)) as database,
        place.refusals("the tables"),
    ):
        database.connection.execute("SET preserve_insertion_order = false")
        # A reader gives the rows only once, which is enough for one query. From a dataset, DuckDB
        # would read far ahead, which takes memory.
        scanner = _dataset(task.of, place).scanner(
            columns=list(task.columns) or None, batch_size=_ROWS, batch_readahead=1,
            fragment_readahead=1, use_threads=False,
        )  # fmt: skip
        named = {STATE_ROWS: scanner.to_reader()}
        rows = StateRows(database, task.source, task.parts, task.key, named)
        answer = getattr(rows, task.method)(*task.arguments)
        return answer if isinstance(answer, dict) else list(answer)


def _dataset(of: StateFiles, place: DeltaPlace) -> Any:
    """Return some files of a table as a dataset."""
    table = require_deltalake().DeltaTable(
        place.uri, version=of.version, storage_options=place.options
    )
    whole, wanted = table.to_pyarrow_dataset(), set(of.files)
    fragments = [fragment for fragment in whole.get_fragments() if fragment.path in wanted]
    if len(fragments) != len(wanted):
        raise PgOutputError(
            f"{place.uri}: {len(wanted) - len(fragments)} of {len(wanted)} files of version "
            f"{of.version} are missing now",
            code="damaged",
            path=place.uri,
        )
    return ds.FileSystemDataset(fragments, whole.schema, whole.format, whole.filesystem)


class DistributedRows:
    """The rows of a table, read by several tasks; see `sums.Rows`.

    Parameters
    ----------
    jobs : Jobs
    groups : sequence of StateFiles
        The files of each task.
    columns, source, parts, key
        See `StateTask`.
    """

    def __init__(
        self,
        jobs: Jobs,
        groups: Sequence[StateFiles],
        columns: Sequence[str],
        source: str,
        parts: Mapping[str, str],
        key: Sequence[str],
    ) -> None:
        self._jobs, self._groups, self._columns = jobs, groups, tuple(columns)
        self._source, self._parts, self._key = source, dict(parts), tuple(key)

    def sums(self, digits: int, within: Sequence[str] | None) -> dict[str, Sum]:
        """See `Rows`."""
        total: dict[str, Sum] = {}
        for answer in self._ask("sums", digits, within):
            for name, sum_ in answer.items():
                was = total.get(name, Sum(0, 0, 0))
                total[name] = Sum(
                    was.rows + sum_.rows, was.first + sum_.first, was.second + sum_.second
                )
        return total

    def digests(self, within: Sequence[str]) -> Iterator[tuple[str, str, int]]:
        """See `Rows`."""
        return self._distinct_rows("digests", within)

    def named(self, names: Iterable[str]) -> Iterator[tuple[str, str, int]]:
        """See `Rows`."""
        return self._distinct_rows("named", list(names))

    def parts(self, names: Iterable[str]) -> Iterator[tuple[str, str, int]]:
        """See `Rows`."""
        return self._distinct_rows("parts", list(names))

    def _distinct_rows(
        self, method: Literal["digests", "named", "parts"], names: Sequence[str]
    ) -> Iterator[tuple[str, str, int]]:
        for rows in self._ask(method, names):
            yield from rows

    def _ask(
        self, method: Literal["sums", "digests", "named", "parts"], *arguments: Any
    ) -> list[Any]:
        tasks = [
            StateTask(group, self._columns, self._source, self._parts, self._key, method, arguments)
            for group in self._groups
        ]
        return self._jobs.run("compare the rows of a table", ask_rows, tasks, lambda: None)


class DistributedStates(DeltaStates):
    """The state tables of a Delta target. An engine reads the large ones.

    Parameters
    ----------
    place, segments
        See `DeltaStates`.
    engine : VerifyEngine
    """

    def __init__(self, place: DeltaPlace, segments: Path | None, engine: VerifyEngine) -> None:
        self._engine = engine
        self._options = place.options
        self._table_read: Any = None
        self._source_read = ""
        self._marker: str | None = None
        # Relation id → the files of each task, and the SQL source; small tables are not here.
        self._files: dict[int, tuple[list[StateFiles], str]] = {}
        super().__init__(place, segments)

    def _state(self, table_state: TableState, source: TargetTables) -> str:
        self._marker = source.soft_deletes
        self._source_read = super()._state(table_state, source)
        return self._source_read

    def _loaded(self, table_state: TableState, source: TargetTables) -> Any:
        self._table_read = super()._loaded(table_state, source)
        return self._table_read

    def _copy(self, relation_id: int, wanted: str) -> None:
        table, self._table_read = self._table_read, None
        self._files.pop(relation_id, None)
        sizes = {} if table is None else _sizes(table)
        if sum(sizes.values()) <= self._engine.driver_bytes:
            super()._copy(relation_id, wanted)
            return
        uri, version = str(table.table_uri), table.version()
        groups = [
            StateFiles(uri, version, group, self._options)
            for group in grouped_files(sizes, self._engine.jobs.cores)
        ]
        self._files[relation_id] = groups, self._source_read

    def _rows(self, relation_id: int, parts: dict[str, str], key: Sequence[str]) -> Rows:
        if relation_id not in self._files:
            return super()._rows(relation_id, parts, key)
        groups, source = self._files[relation_id]
        columns = [name for name in self._names[relation_id].values() if name is not None]
        if columns and self._marker is not None:
            columns.append(self._marker)
        return DistributedRows(self._engine.jobs, groups, columns, source, parts, key)


def _sizes(table: Any) -> dict[str, int]:
    """Return the bytes of each file of a Delta table, by its path in the table's dataset."""
    actions = pa.table(table.get_add_actions()).to_pylist()
    sizes = {unquote(action["path"]): action["size_bytes"] for action in actions}
    paths = [fragment.path for fragment in table.to_pyarrow_dataset().get_fragments()]
    return {path: sizes.get(unquote(path), 1) for path in paths}


def grouped_files(sizes: Mapping[str, int], cores: int) -> list[tuple[str, ...]]:
    """Divide files into groups of about the same size: one for each core, more for a large table.

    Parameters
    ----------
    sizes : mapping of str to int
        Bytes by path.
    cores : int
    """
    count = min(len(sizes), max(cores, -(-sum(sizes.values()) // _TASK_BYTES)))
    groups: list[list[str]] = [[] for _ in range(count)]
    weights = [0] * count
    for path, size in sorted(sizes.items(), key=lambda pair: (-pair[1], pair[0])):
        at = weights.index(min(weights))
        groups[at].append(path)
        weights[at] += size
    return [tuple(group) for group in groups]
