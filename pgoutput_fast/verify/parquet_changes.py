"""The changes of a change log in Parquet files, which duckdb reads for one comparison.

Nothing is kept beyond the process: how far the files are stands in memory.
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
from ..changelog.read_frames import chunks
from ..changelog.stored import stored
from ..errors import PgOutputError
from ..lsn import format_lsn
from ..names import shown_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from ..changelog.copies import TableState
    from ..changelog.read_plan import Position
    from ..policies import Policies
    from ..types import TypeRegistry

_HEAD = ("op", "old_kind", "commit_lsn", "seq", "unchanged")
"""The columns of a change that the files have beside those of the table."""
_PENDING = 128 << 20
"""Bytes of changes of all tables that wait in memory."""
_PART_BYTES = 1 << 30
"""So much is planned at a time, as files are merged meanwhile."""


@dataclasses.dataclass
class ChangeVersion:
    """The changes of a table that have the same columns.

    Attributes
    ----------
    columns : tuple of str
        The names on the server. In the files the i-th column is ``a{i}`` after a change, and
        ``b{i}`` before it.
    key : frozenset of str
        The columns that an old row has which is a key.
    files : list of pathlib.Path
        In the order of the stream.
    rows : int
        The changes that came.
    pending_bytes : int
        Bytes of changes that wait in memory.
    """

    columns: tuple[str, ...]
    key: frozenset[str]
    files: list[Path] = dataclasses.field(default_factory=list)
    rows: int = 0
    pending_bytes: int = 0
    _pending: list[pa.RecordBatch] = dataclasses.field(default_factory=list)

    def add(self, changes: pa.RecordBatch) -> None:
        """Take changes, which wait until `flush`."""
        columns = {name: changes.column(name) for name in _HEAD}
        for side in ("after", "before"):
            parts = enumerate(changes.column(side).flatten())
            columns |= {f"{side[0]}{i}": values for i, values in parts}
        made = pa.RecordBatch.from_pydict({name: stored(one) for name, one in columns.items()})
        self._pending.append(made)
        self.rows += made.num_rows
        self.pending_bytes += made.nbytes

    def flush(self, path: Path) -> None:
        """Write what waits into a new file."""
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
        Where the files are made; it must not exist.
    policies : Policies
    registry : TypeRegistry, optional
        The users' types, if the change log has no schema history.

    Attributes
    ----------
    position : Position or None
        Up to where the files have everything; None: nothing was read yet.
    names : dict of int to (str, str)
        Namespace and name that each table had last, by relation id.
    versions : dict of int to list of ChangeVersion
        By relation id, in the order in which they came last.
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
        self._states: Mapping[int, TableState] = {}
        self._known: dict[tuple[int, pa.DataType, bytes], ChangeVersion] = {}
        self._count = 0  # of files
        self._pending_bytes = 0
        self.names: dict[int, tuple[str, str]] = {}
        self.versions: dict[int, list[ChangeVersion]] = {}
        directory.mkdir()

    def why_not(self, relation_id: int) -> str | None:
        """Return why a table's rows are not known yet; None: they are.

        A change log without first snapshots has all changes of each table, which began empty.
        """
        state = self._states.get(relation_id)
        newest = None if state is None else state.copies[-1]
        if newest is None or newest.state == "gone":
            begin_empty = not any(one.copies[0].first for one in self._states.values())
            return None if begin_empty else "the change log has no snapshot of it yet"
        if newest.state == "waiting" or self.position is None or newest.lsn > self.position.lsn:
            return f"it waits for its snapshot since {format_lsn(newest.lsn)}"
        return None

    def read(self, tell: Callable[[int], None]) -> None:
        """Write what the change log has got since the last call.

        Parameters
        ----------
        tell : callable
            Is called with the number of changes that this call has read.

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
        # What may have been altered is compared with what the server has now.
        reader, rows = ChangeReader(self._decoding, self._log.history(), "newer"), 0
        with self._refusals():
            while (plan := view.plan(position, _PART_BYTES)) is not None:
                for read in plan.reads:
                    for chunk in chunks(read, view.metadata):
                        for changes, batch in reader.changes(chunk):
                            self._take(changes.relation, batch)
                            rows += batch.num_rows
                            tell(rows)
                position = plan.after
            for version in self._known.values():
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
            self._flush(max(self._known.values(), key=lambda one: one.pending_bytes))

    def _version(self, relation_id: int, schema: pa.Schema) -> ChangeVersion:
        """The version that changes of a schema belong to; it is the table's last one now."""
        row, described = schema.field("after").type, schema.metadata[b"pgoutput.columns"]
        version = self._known.get((relation_id, row, described))
        if version is None:
            key = frozenset(one["name"] for one in json.loads(described) if one["key"])
            version = ChangeVersion(tuple(field.name for field in row), key)
            self._known[relation_id, row, described] = version
        others = [one for one in self.versions.get(relation_id, []) if one is not version]
        self.versions[relation_id] = [*others, version]
        return version

    def _flush(self, version: ChangeVersion) -> None:
        self._count += 1
        self._pending_bytes -= version.pending_bytes
        version.flush(self._directory / f"{self._count}.parquet")

    @contextlib.contextmanager
    def _refusals(self) -> Iterator[None]:
        """Raise errors of the operating system as this package's."""
        try:
            yield
        except OSError as error:
            where = str(self._directory)
            raise PgOutputError(
                f"can't write into {where}: {error.strerror or error}", code="io_failed", path=where
            ) from error
