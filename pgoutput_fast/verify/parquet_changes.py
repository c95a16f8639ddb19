"""Write the changes of a change log to Parquet files, which DuckDB reads for a comparison.

The files are temporary. Their position is only in memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from ..changelog.changes import ChangeReader
from ..changelog.log import ChangeLog
from ..changelog.stored_types import to_stored_type
from ..errors import PgOutputError
from ..lsn import format_lsn
from ..names import shown_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from ..changelog.read_plan import Position
    from ..changelog.snapshot_states import TableSnapshots
    from ..policies import Policies
    from ..types import TypeRegistry

_HEAD = ("op", "old_kind", "commit_lsn", "seq", "unchanged")
"""The columns of a change in the files, beside the columns of the table."""
_PENDING = 128 << 20
"""Maximum bytes of changes in memory, for all tables together."""
_PART_BYTES = 1 << 30
"""Bytes of a read plan. A plan for more would name files that a capture merges meanwhile."""


@dataclasses.dataclass
class ChangeVersion:
    """The changes of a table that have the same columns.

    Attributes
    ----------
    columns : tuple of str
        The names on the server. In the files, column i is ``a{i}`` after a change, and ``b{i}``
        before it.
    key : frozenset of str
        The key columns, which an old row has if only its key was sent.
    files : list of pathlib.Path
        In stream order.
    rows : int
        Number of changes.
    pending_bytes : int
        Bytes of changes in memory.
    """

    columns: tuple[str, ...]
    key: frozenset[str]
    files: list[Path] = dataclasses.field(default_factory=list)
    rows: int = 0
    pending_bytes: int = 0
    _pending: list[pa.RecordBatch] = dataclasses.field(default_factory=list)

    def add(self, changes: pa.RecordBatch) -> None:
        """Add changes, which stay in memory until `flush`."""
        columns = {name: changes.column(name) for name in _HEAD}
        for side in ("after", "before"):
            parts = enumerate(changes.column(side).flatten())
            columns |= {f"{side[0]}{i}": values for i, values in parts}
        batch = pa.RecordBatch.from_pydict(
            {name: to_stored_type(values) for name, values in columns.items()}
        )
        self._pending.append(batch)
        self.rows += batch.num_rows
        self.pending_bytes += batch.nbytes

    def flush(self, path: Path) -> None:
        """Write the changes in memory to a new file."""
        if not self._pending:
            return
        with pq.ParquetWriter(path, self._pending[0].schema, compression="lz4") as writer:
            writer.write_table(pa.Table.from_batches(self._pending))
        self.files.append(path)
        self._pending, self.pending_bytes = [], 0


class ChangeFiles:
    """The files of a change log.

    Parameters
    ----------
    path : pathlib.Path
        The change log.
    directory : pathlib.Path
        The directory for the files; it must not exist.
    policies : Policies
    registry : TypeRegistry, optional
        The user-defined types, if the change log has no schema history.

    Attributes
    ----------
    position : Position or None
        The position before which the files have all changes; None before the first read.
    names : dict of int to (str, str)
        The last namespace and name of each table, by relation id.
    versions : dict of int to list of ChangeVersion
        By relation id; the version with the newest changes is the last one.
    """

    def __init__(
        self, path: Path, directory: Path, policies: Policies, registry: TypeRegistry | None
    ) -> None:
        self._log, self._directory = ChangeLog(path), directory
        self._decoding: dict[str, Any] = {
            "policies": policies, "target": "portable", "registry": registry, "on_error": "raise",
            "max_bytes": 16 << 20,
        }  # fmt: skip
        self.position: Position | None = None
        self._states: Mapping[int, TableSnapshots] = {}
        self._versions_by_schema: dict[tuple[int, pa.DataType, bytes], ChangeVersion] = {}
        self._count = 0  # of files
        self._pending_bytes = 0
        self.names: dict[int, tuple[str, str]] = {}
        self.versions: dict[int, list[ChangeVersion]] = {}
        directory.mkdir()

    def why_not(self, relation_id: int) -> str | None:
        """Return why a table's rows are not known yet; None if they are.

        Without a snapshot, a table's rows are known only if the change log has no first snapshots
        at all: then each table began empty, and the log has all of its changes.
        """
        state = self._states.get(relation_id)
        newest = None if state is None else state.all_snapshots[-1]
        if newest is None or newest.state == "gone":
            begin_empty = not any(state.all_snapshots[0].first for state in self._states.values())
            return None if begin_empty else "the change log has no snapshot of it yet"
        if newest.state == "waiting" or self.position is None or newest.lsn > self.position.lsn:
            return f"it has been waiting for its snapshot since {format_lsn(newest.lsn)}"
        return None

    def read(self, tell: Callable[[int], None]) -> None:
        """Write the new changes of the change log since the last call.

        Parameters
        ----------
        tell : callable
            Called with the number of changes that this call has read.

        Raises
        ------
        PgOutputError
            The change log can't be read, lacks changes, or a file can't be written.
        """
        if not self._log.has_begun:
            return
        view = self._log.view()
        self._states = view.states
        position = view.first_position() if self.position is None else self.position
        # "newer": the values are compared with the server's present types.
        reader, rows = ChangeReader(self._decoding, self._log.history(), "newer"), 0
        with self._refusals():
            while (plan := view.plan(position, _PART_BYTES)) is not None:
                for read in plan.reads:
                    for frame_run in reader.frame_runs(read, view.metadata):
                        for changes, batch in reader.changes(frame_run):
                            self._take(changes.relation, batch)
                            rows += batch.num_rows
                            tell(rows)
                position = plan.after
            for version in self._versions_by_schema.values():
                self._flush(version)
        self.position = position

    def _take(self, relation: Any, batch: pa.RecordBatch) -> None:
        relation_id = relation.relation_id
        self.names[relation_id] = shown_name(relation.namespace), shown_name(relation.name)
        version = self._version(relation_id, batch.schema)
        before = version.pending_bytes
        version.add(batch)
        self._pending_bytes += version.pending_bytes - before
        while self._pending_bytes > _PENDING:
            self._flush(
                max(self._versions_by_schema.values(), key=lambda version: version.pending_bytes)
            )

    def _version(self, relation_id: int, schema: pa.Schema) -> ChangeVersion:
        """Return the version for changes of a schema, and make it the table's last one."""
        row, described = schema.field("after").type, schema.metadata[b"pgoutput.columns"]
        version = self._versions_by_schema.get((relation_id, row, described))
        if version is None:
            key = frozenset(column["name"] for column in json.loads(described) if column["key"])
            version = ChangeVersion(tuple(field.name for field in row), key)
            self._versions_by_schema[relation_id, row, described] = version
        others = [other for other in self.versions.get(relation_id, []) if other is not version]
        self.versions[relation_id] = [*others, version]
        return version

    def _flush(self, version: ChangeVersion) -> None:
        self._count += 1
        self._pending_bytes -= version.pending_bytes
        version.flush(self._directory / f"{self._count}.parquet")

    @contextlib.contextmanager
    def _refusals(self) -> Iterator[None]:
        """Translate errors of the operating system to `PgOutputError`."""
        try:
            yield
        except OSError as error:
            where = str(self._directory)
            raise PgOutputError(
                f"can't write into {where}: {error.strerror or error}", code="io_failed", path=where
            ) from error
