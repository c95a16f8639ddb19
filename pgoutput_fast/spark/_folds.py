"""Run on Spark's executors: apply a window's changes to state tables, from files of changes."""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from pgoutput_fast.apply.delta_merge import touched_bytes
from pgoutput_fast.apply.delta_shape import shape_of
from pgoutput_fast.apply.delta_target import DeltaTarget
from pgoutput_fast.apply.delta_types import conformed, stored_array, stored_schema, stored_type
from pgoutput_fast.apply.folding import Folding
from pgoutput_fast.apply.stored_changes import with_added
from pgoutput_fast.apply.table_window import as_incomplete, since
from pgoutput_fast.apply.targets import AddedColumn, ConflictError, IncompleteError

from ._merge_steps import write_net

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pgoutput_fast.apply.folding import NetChanges
    from pgoutput_fast.apply.targets import Alteration, TableState, TargetOrigin

    from ._merge_steps import NetFile, Staging

_ROWS = 1 << 16
"""Rows of a file that a task reads and folds at once."""
_ATTEMPTS = 3
"""Attempts to commit to a table if other tasks commit at the same time."""


class FoldedFile(NamedTuple):
    """A file of changes. Fields: path (in the target), size, schema (of the table's changes)."""

    path: str
    size: int
    schema: pa.Schema


class FoldedPart(NamedTuple):
    """Changes that are folded together.

    Fields: alterations (of the state table, made before these changes), key, end (all changes have
    a smaller commit LSN), schema (the columns after the last change), files.
    """

    alterations: Sequence[Alteration]
    key: tuple[str, ...] | None
    end: int
    schema: pa.Schema
    files: Sequence[FoldedFile]


class FoldTask(NamedTuple):
    """The changes of one state table in a window.

    Attributes
    ----------
    before, after : TableState
        What the target has of the table before and after these changes.
    first : pyarrow.Schema or None
        The columns of a new state table; None: the table is there already.
    parts : list of FoldedPart
    """

    before: TableState
    after: TableState
    first: pa.Schema | None
    parts: Sequence[FoldedPart]


class FoldTasks(NamedTuple):
    """The state tables of one Spark task.

    Fields: tables; target (the arguments of `DeltaTarget`, which may contain secrets); origin;
    staging (where the task writes net changes for the driver to merge; None: the task itself merges
    all tables).
    """

    tables: Sequence[FoldTask]
    target: dict[str, Any]
    origin: TargetOrigin
    staging: Staging | None = None

    def __repr__(self) -> str:
        return f"FoldTasks({len(self.tables)} tables)"


class LeftMerge(NamedTuple):
    """A merge that a task leaves to the driver because it may rewrite many bytes of files.

    Fields: net; alterations and table_state, the arguments of `StateWriter.apply`.
    """

    net: NetFile
    alterations: Sequence[Alteration]
    table_state: TableState


class Folded(NamedTuple):
    """The result for one table.

    Fields: relation_id; seconds; incomplete (why the changes do not fit the state table; None: they
    fit); left (the merge for the driver, if any); position (the LSN and the snapshot LSN that the
    state table's own log records).
    """

    relation_id: int
    seconds: float
    incomplete: IncompleteError | None
    left: LeftMerge | None
    position: tuple[int, int]


def fold_tables(tasks: FoldTasks) -> list[Folded]:
    """Apply the net changes to state tables.

    Spark may run a task again because it wrongly took the first run for lost. A table that already
    has the changes then stays as it is.

    Raises
    ------
    PgOutputError
        The files can't be read or written, or another program has written a table.
    """
    target = DeltaTarget(**tasks.target).attached(tasks.origin)
    if len(tasks.tables) == 1:
        return [_fold(target, tasks.tables[0], tasks.staging)]
    # A small table spends most of its time in waiting for the commit.
    with ThreadPoolExecutor(target.threads) as pool:
        return list(pool.map(lambda task: _fold(target, task, tasks.staging), tasks.tables))


def _fold(target: DeltaTarget, task: FoldTask, staging: Staging | None) -> Folded:
    """Apply one table's changes; try again on a conflict with a task of a driver that has ended."""
    for _ in range(_ATTEMPTS - 1):
        with contextlib.suppress(ConflictError):
            return _fold_once(target, task, staging)
    return _fold_once(target, task, staging)


def _fold_once(target: DeltaTarget, task: FoldTask, staging: Staging | None) -> Folded:
    begin = time.perf_counter()
    state = target.state(task.before)
    incomplete: IncompleteError | None = None
    left: LeftMerge | None = None
    try:
        if task.first is not None:
            state.create(task.first)
        for number, part in enumerate(task.parts, 1):
            folding = Folding(part.key)
            for file in part.files:
                folding.add(_empty(file.schema))
                for rows in _rows(target, file):
                    with as_incomplete(makes_null=True):  # the driver decides what follows
                        folding.add(since(rows, state.lsn))
            folding.add(_empty(part.schema))
            alterations = [_with_stored_type(alteration) for alteration in part.alterations]
            with as_incomplete(makes_null=True):  # the driver decides what follows
                net = with_added(folding.finish(), alterations)
            if not (net.rows.num_rows or net.truncated or alterations):
                continue
            after = task.after._replace(lsn=part.end)
            # Only the last part may wait for the driver: later parts need the rows of this one.
            is_last = number == len(task.parts)
            if is_last and staging is not None and _is_large(state, alterations, net, staging):
                net_file = write_net(target.place, net, staging.prefix)
                left = LeftMerge(net_file, alterations, after)
            else:
                state.apply(alterations, net, after)
        if target.maintains:
            state.table.maintain()
    except IncompleteError as error:
        incomplete = error
    seconds = time.perf_counter() - begin
    return Folded(task.before.relation_id, seconds, incomplete, left, state.own)


def _is_large(
    state: Any, alterations: Sequence[Alteration], net: NetChanges, staging: Staging
) -> bool:
    """Return whether the merge may rewrite so many bytes that all executors should share it."""
    table = state.table
    if not table.exists:
        return False
    shape = shape_of(table.schema, alterations)
    size = touched_bytes(table, shape, net, state.marker)
    return size > 0 and size >= staging.least_bytes


def _with_stored_type(alteration: Alteration) -> Alteration:
    """Return an alteration with its value in the type of the table's files."""
    if isinstance(alteration, AddedColumn):
        value = alteration.value
        return AddedColumn(alteration.column, stored_array(value, stored_type(value.type)))
    return alteration


def _schema(schema: pa.Schema) -> pa.Schema:
    return stored_schema(schema).with_metadata(schema.metadata)


def _empty(schema: pa.Schema) -> pa.RecordBatch:
    schema = _schema(schema)
    return pa.RecordBatch.from_arrays([pa.nulls(0, field.type) for field in schema], schema=schema)


def _rows(target: DeltaTarget, file: FoldedFile) -> Iterator[pa.RecordBatch]:
    """Yield the changes of a file with the columns and metadata that the table had then."""
    wanted = _schema(file.schema)
    with target.place.refusals(file.path):
        files = target.place.filesystem()
        with pq.ParquetFile(files.open_input_file(file.path), pre_buffer=True) as opened:
            for rows in opened.iter_batches(_ROWS):
                yield conformed(rows, wanted)
