"""Run on Spark's executors: fold a table's changes into its rows.

A task has all changes of some of the table's keys, in stream order. This module adds what the fold
does not know of a change DataFrame, for whole columns at once. First, it fills in columns that were
added after a row was written. Second, it stops at positions after which older rows are unknown.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pgoutput_fast.apply.folding import Folding
from pgoutput_fast.errors import Hint, PgOutputError

from ._worker import prepare

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

Position = tuple[int, int]
"""(commit LSN, seq) of a change."""

CHANGE = ("op", "commit_lsn", "seq", "old_kind", "before", "after", "unchanged")
"""The columns of the changes that a task gets."""

_BATCH_ROWS = 65_536
_UNSENT = (
    "its value is unknown: the column was added after the row, and neither a change nor the "
    "catalogue has the value"
)


class Break(NamedTuple):
    """A position after which the rows from before it are unknown, and the reason.

    None as `position` means: after all changes.
    """

    position: Position | None
    reason: str
    hint: Hint = ()


class Output(NamedTuple):
    """A column of the result: the name of the changes' column, or one value for all rows.

    Both are None if the values are unknown; then the result must have no row.
    """

    name: str
    source: str | None
    value: pa.Array | None


@dataclass(frozen=True)
class State:
    """The facts about a table that the tasks need.

    Attributes
    ----------
    namespace, name : str
    key : tuple of str
        The key's columns; empty: the table is a multiset of rows.
    columns : tuple of str
        The columns of the changes that the table still has.
    defaults : mapping of str to pyarrow.Array
        For columns that are newer than some changes: the value in older rows, in an array of length
        1.
    unknown : tuple of str
        Columns that are newer than some changes and whose value in older rows is unknown.
    born : mapping of str to Position
        Changes before this position lack the column: another column had its name.
    breaks : tuple of Break
        In the order of their positions.
    outputs : tuple of Output
    schema : pyarrow.Schema
        The schema of the result.
    """

    namespace: str
    name: str
    key: tuple[str, ...]
    columns: tuple[str, ...]
    outputs: tuple[Output, ...]
    schema: pa.Schema
    defaults: Mapping[str, pa.Array] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()
    born: Mapping[str, Position] = field(default_factory=dict)
    breaks: tuple[Break, ...] = ()

    @property
    def table(self) -> str:
        """The table's name in errors."""
        return f"{self.namespace}.{self.name}"

    def flag(self, name: str) -> str:
        """Return a column name that no column has, for the flag "the value of `name` is known"."""
        end = "?"
        while any(column.endswith(end) for column in self.columns):
            end += "?"
        return f"{name}{end}"


def rows_of(batches: Iterator[pa.RecordBatch], state: State) -> Iterator[pa.RecordBatch]:
    """Fold the changes of some keys into rows.

    Parameters
    ----------
    batches : iterator of pyarrow.RecordBatch
        All changes of these keys since the table was last empty, in stream order, with the columns
        of :data:`CHANGE`.
    state : State

    Raises
    ------
    PgOutputError
        Changes contradict each other, or a value is unknown; the error names the row.
    """
    rows = _RowsSoFar(state)
    for batch in batches:
        rows.add(batch)
    yield from rows.result()


class _RowsSoFar:
    """The rows of one task, as far as its changes were read."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._breaks = list(state.breaks)
        self._folding: Folding | None = None

    def add(self, batch: pa.RecordBatch) -> None:
        """Fold more changes."""
        if not batch.num_rows:
            return
        changes = _whole(batch, self._state)
        if self._folding is None:
            self._folding = Folding(self._state.key)
            # The table is empty before the first change. So rows that follow must be complete.
            self._folding.add(_emptied(changes.schema))
        while self._breaks and (place := self._breaks[0].position) is not None:
            count = int(_is_before(batch, place).sum())
            if count == changes.num_rows:
                break
            self._folding.add(changes.slice(0, count))
            self._check_empty(self._breaks.pop(0))
            changes, batch = changes.slice(count), batch.slice(count)
        self._folding.add(changes)

    def _check_empty(self, break_: Break) -> None:
        if self._folding is None:
            return
        net = self._folding.finish()
        if net.rows.num_rows:
            row = net.rows.column("row")[0].as_py()
            names = self._state.key or self._state.columns
            raise PgOutputError(
                f"{self._state.table}: {break_.reason}. So rows from before are unknown, such as "
                f"the {_shown(names, [row[name] for name in names])}",
                code="unfit_row",
                hint=break_.hint,
                table=self._state.table,
            )

    def result(self) -> Iterator[pa.RecordBatch]:
        """Yield the rows after all changes."""
        for break_ in self._breaks:
            self._check_empty(break_)
        if self._folding is None:
            return
        for batch in self._folding.finish().rows.to_batches(max_chunksize=_BATCH_ROWS):
            yield from self._finished(batch)

    def _finished(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        row = batch.column("row")
        fields = dict(zip([child.name for child in row.type], row.flatten(), strict=True))
        for name in self._state.unknown:
            known = fields[self._state.flag(name)]
            if pc.any(pc.invert(known)).as_py():
                raise _lost(self._state, name, fields, pc.index(known, False).as_py())
        count = len(row)
        columns = []
        for output, wanted in zip(self._state.outputs, self._state.schema, strict=True):
            if output.source is not None:
                column = fields[output.source]
            elif output.value is not None:
                column = output.value.take(pa.array(np.zeros(count, np.int64)))
            else:
                column = pa.nulls(count, wanted.type)  # there are no rows: a Break made sure
            columns.append(column if column.type == wanted.type else column.cast(wanted.type))
        rows = pa.RecordBatch.from_arrays(columns, schema=self._state.schema)
        if "count" not in batch.schema.names:
            yield rows
            return
        numbers = np.repeat(np.arange(count), batch.column("count").to_numpy())
        for start in range(0, len(numbers), _BATCH_ROWS):
            yield rows.take(pa.array(numbers[start : start + _BATCH_ROWS]))


def _shown(names: Sequence[str], values: Sequence[Any]) -> str:
    return f"row ({', '.join(names)}) = ({', '.join(map(repr, values))})"


def _lost(state: State, name: str, fields: Mapping[str, pa.Array], at: int) -> PgOutputError:
    key = state.key or [column for column in state.columns if column != name]
    values = [fields[column][at].as_py() for column in key]
    return PgOutputError(
        f"{state.table}, {_shown(key, values)}, column {name}: {_UNSENT}",
        code="unfit_row",
        hint="Take a new snapshot of the table",
        table=state.table,
    )


def _is_before(batch: pa.RecordBatch, place: Position) -> Any:
    """Return a mask of the changes before a position."""
    lsns, seqs = (batch.column(name).to_numpy() for name in ("commit_lsn", "seq"))
    return (lsns < place[0]) | ((lsns == place[0]) & (seqs < place[1]))


def _filled(column: pa.Array, rows: Any, value: pa.Array) -> pa.Array:
    """Return a column with a value in the rows of a mask."""
    numbers = np.where(rows, len(column), np.arange(len(column)))
    return pa.concat_arrays([column, value.cast(column.type)]).take(pa.array(numbers))


def _emptied(schema: pa.Schema) -> pa.RecordBatch:
    """Return a Truncate that comes before all changes."""
    columns = [pa.nulls(1, child.type) for child in schema]
    for name, value in (("op", "truncate"), ("commit_lsn", 0), ("seq", -1)):
        at = schema.get_field_index(name)
        columns[at] = pa.array([value], schema.field(at).type)
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _whole(batch: pa.RecordBatch, state: State) -> pa.RecordBatch:
    """Return changes as if the table always had its present columns, for the fold."""
    after, before = (_columns(batch.column(name), state.columns) for name in ("after", "before"))
    ops = batch.column("op")
    comes = _flags(pc.is_in(ops, pa.array(["insert", "read"], ops.type)))
    updates, whole = (
        _flags(pc.equal(batch.column(name), value))
        for name, value in (("op", "update"), ("old_kind", "O"))
    )
    unsent = _unsent(batch.column("unchanged"), state)
    nothing = np.zeros(batch.num_rows, bool)
    left, names = {}, [*state.columns]
    for i, name in enumerate(state.columns):
        lost = _is_before(batch, state.born[name]) if name in state.born else nothing
        missing = unsent.get(name, nothing) | lost
        lacks = nothing
        if name not in state.key and missing.any():
            # An old row of kind "O" is complete: a NULL in it means that the row is older than the
            # column. Without a complete old row, the value is unchanged TOAST: so it is for a
            # partition with another replica identity than its root.
            is_late = name in state.defaults or name in state.unknown
            lacks = missing & (comes | (whole & (lost | (is_late & _flags(before[i].is_null())))))
            if lost.any():  # the value of an older column of that name, which says nothing here
                after[i] = _filled(after[i], lost, pa.nulls(1, after[i].type))
            value = state.defaults.get(name, pa.nulls(1, after[i].type))
            after[i] = _filled(after[i], lacks & (comes | updates), value)
            before[i] = _filled(before[i], lacks & whole, value)
        left[name] = missing & updates & ~lacks
        if name in state.unknown:
            if not state.key and lacks.any():
                # Without a key, the fold needs all values to find equal rows.
                side = after if comes[at := int(np.flatnonzero(lacks)[0])] else before
                raise _lost(state, name, dict(zip(state.columns, side, strict=False)), at)
            names.append(state.flag(name))
            left[names[-1]] = left[name]
            after.append(pa.array(~lacks))
            before.append(pa.array(~lacks))
    return _batch(
        batch, state, names, before, after, _listed([left[name] for name in names], names)
    )


def _columns(tuples: pa.StructArray, names: Sequence[str]) -> list[pa.Array]:
    flat = dict(zip([child.name for child in tuples.type], tuples.flatten(), strict=True))
    return [flat[name] for name in names]


def _flags(flags: pa.BooleanArray) -> Any:
    return flags.fill_null(False).to_numpy(zero_copy_only=False)


def _unsent(unchanged: pa.ListArray, state: State) -> dict[str, Any]:
    """Return, for each column that some changes lack, a mask of these changes."""
    if unchanged.null_count == len(unchanged):
        return {}
    rows = pc.list_parent_indices(unchanged).to_numpy()
    at = pc.index_in(unchanged.flatten(), pa.array(state.columns, unchanged.type.value_type))
    at = at.fill_null(-1).to_numpy()
    flags_by_name = {}
    for i in np.unique(at[at >= 0]).tolist():
        flags_by_name[state.columns[i]] = flags = np.zeros(len(unchanged), bool)
        flags[rows[at == i]] = True
    return flags_by_name


def _listed(flags: Sequence[Any], names: Sequence[str]) -> pa.ListArray:
    """Return for each row the names of the columns with a flag; null if there are none."""
    stacked = np.array(flags).T
    counts = stacked.sum(axis=1)
    items = pa.array(names, pa.string()).take(pa.array(np.nonzero(stacked)[1]))
    ends = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(ends), items, mask=pa.array(counts == 0))


def _batch(
    batch: pa.RecordBatch,
    state: State,
    names: Sequence[str],
    before: Sequence[pa.Array],
    after: Sequence[pa.Array],
    unchanged: pa.ListArray,
) -> pa.RecordBatch:
    row = [pa.field(name, column.type) for name, column in zip(names, after, strict=True)]
    columns = {
        "op": batch.column("op").cast(pa.string()),
        "commit_lsn": batch.column("commit_lsn"),
        "commit_time": pa.nulls(batch.num_rows, pa.timestamp("us", "UTC")),
        "seq": batch.column("seq"),
        "old_kind": batch.column("old_kind").cast(pa.string()),
        "before": pa.StructArray.from_arrays(before, fields=row),
        "after": pa.StructArray.from_arrays(after, fields=row),
        "unchanged": unchanged,
    }
    named = {
        "namespace": state.namespace, "relation": state.name, "relation_id": "0",
        "replica_identity": "d", "key_columns": json.dumps(list(state.key)),
    }  # fmt: skip
    schema = pa.schema(
        [pa.field(name, column.type) for name, column in columns.items()],
        metadata={f"pgoutput.{name}": value for name, value in named.items()},
    )
    return pa.RecordBatch.from_arrays(list(columns.values()), schema=schema)


# --- keys that belong together -------------------------------------------------------------------


def united(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Group keys between which rows have moved, so that one task gets all of their changes.

    Parameters
    ----------
    batches : iterator of pyarrow.RecordBatch
        Two columns of int64: the hashes of a row's old and new key.

    Yields
    ------
    pyarrow.RecordBatch
        `hash` of a key, and `place`, which is the same for all keys of a group.
    """
    prepare()
    parts = [[column.to_numpy() for column in batch.columns] for batch in batches]
    if not parts:
        return
    ends = np.concatenate([np.concatenate(part) for part in zip(*parts, strict=True)])
    hashes, at = np.unique(ends, return_inverse=True)
    old_at, new_at = np.split(at, 2)
    place = np.arange(len(hashes))
    while True:
        first, second = place[old_at], place[new_at]
        if (first == second).all():
            break
        np.minimum.at(place, np.maximum(first, second), np.minimum(first, second))
        while not np.array_equal(place, place[place]):
            place = place[place]
    for start in range(0, len(hashes), _BATCH_ROWS):
        part = slice(start, start + _BATCH_ROWS)
        yield pa.RecordBatch.from_arrays(
            [pa.array(hashes[part]), pa.array(hashes[place[part]])], names=["hash", "place"]
        )
