"""Run on Spark's executors: fold a table's changes into its rows.

A task has all changes of some of the table's keys, in stream order. It folds the changes of one
span after the other. Where a new span begins, it alters the rows as the server altered the table.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pgoutput_fast.apply.folding import Folding
from pgoutput_fast.apply.targets import AddedColumn, Removed, Renamed
from pgoutput_fast.errors import PgOutputError

from ._worker import prepare

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from pgoutput_fast.apply.targets import Alteration

Position = tuple[int, int]
"""(commit LSN, seq) of a change."""

CHANGE = ("op", "commit_lsn", "seq", "old_kind", "before", "after", "unchanged")
"""The columns of the changes that a task gets."""

_BATCH_ROWS = 65_536

Value = TypeVar("Value")


class StateSpan(NamedTuple):
    """A span of the table's changes.

    Attributes
    ----------
    begins : Position or None
        The position of its first change; None: after all changes.
    columns : mapping of str to str
        The columns of its changes, and their names in the state table.
    alterations : tuple of Alteration
        What happens to the rows from before it.
    unknown : str or None
        Why the rows from before it are not known; else None.
    is_other : bool
        Whether the changes are of another table, which had the table's name.
    """

    begins: Position | None
    columns: Mapping[str, str]
    alterations: tuple[Alteration, ...] = ()
    unknown: str | None = None
    is_other: bool = False


@dataclass(frozen=True)
class StateSpans:
    """The table, and the spans of its changes.

    Attributes
    ----------
    table : str
        The table's name in errors.
    key : tuple of str
        The key's columns; empty: the table is a multiset of rows.
    spans : tuple of StateSpan
        In stream order. The last one begins after all changes.
    schema : pyarrow.Schema
        The schema of the result.
    """

    table: str
    key: tuple[str, ...]
    spans: tuple[StateSpan, ...]
    schema: pa.Schema


def rows_of(batches: Iterable[pa.RecordBatch], state: StateSpans) -> Iterator[pa.RecordBatch]:
    """Fold the changes of some keys into rows.

    Parameters
    ----------
    batches : iterable of pyarrow.RecordBatch
        All changes of these keys since the table was last empty, in stream order, with the columns
        of :data:`CHANGE`.
    state : StateSpans

    Raises
    ------
    PgOutputError
        Changes contradict each other, or rows from before an alteration are not known; the error
        names a row.
    """
    rows = _RowsSoFar(state)
    for batch in batches:
        rows.add(batch)
    yield from rows.result()


class _RowsSoFar:
    """The rows of one task after the changes that it has read."""

    def __init__(self, state: StateSpans) -> None:
        self._state = state
        self._next = 0  # index of the next span
        self._folding: Folding | None = None  # of the changes since the last alteration
        self._altered: list[pa.RecordBatch] = []  # rows that no change of that folding has read

    def add(self, batch: pa.RecordBatch) -> None:
        """Fold more changes."""
        while batch.num_rows:
            begins = self._state.spans[self._next].begins
            count = batch.num_rows if begins is None else int(_is_before(batch, begins).sum())
            self._fold(batch.slice(0, count))
            batch = batch.slice(count)
            if batch.num_rows:
                self._begin_span()

    def _fold(self, batch: pa.RecordBatch) -> None:
        span = self._state.spans[self._next - 1]
        if not batch.num_rows or (self._next and span.is_other):
            return
        if not self._next:
            raise PgOutputError(
                f"{self._state.table}: the first changes lack the column relation, which describes "
                "the table",
                code="unfit_input",
                hint="Give all changes of the table, as the reader returned them",
                table=self._state.table,
            )
        if not set(self._state.key) <= {*span.columns.values()}:
            raise PgOutputError(
                f"{self._state.table}: the key has changed since some of the changes",
                code="unfit_row",
                hint="Take a new snapshot of the table",
                table=self._state.table,
            )
        changes = _changes(batch, span.columns, self._state)
        if self._folding is None:
            self._folding = Folding(self._state.key)
            # The table is empty before the first change, so a fold knows all columns of each row.
            for first in (_emptied(changes.schema), *self._reads(changes.schema)):
                self._folding.add(first)
        self._folding.add(changes)

    def _reads(self, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """Yield the altered rows as rows of a snapshot."""
        done = 0
        rows, self._altered = self._altered, []
        for batch in rows:
            yield _read(batch, schema, done)
            done += batch.num_rows

    def _begin_span(self) -> None:
        span = self._state.spans[self._next]
        self._next += 1
        if span.unknown is None and not span.alterations:
            return
        rows = [*self._rows()]
        if span.unknown is not None and rows:
            row = rows[0].slice(0, 1).to_pylist()[0]
            names = [name for name in self._state.key if name in row] or [*row]
            raise PgOutputError(
                f"{self._state.table}: {span.unknown}. A row from before is row "
                f"({', '.join(names)}) = ({', '.join(repr(row[name]) for name in names)})",
                code="unfit_row",
                hint="Take a new snapshot of the table",
                table=self._state.table,
            )
        self._folding = None
        self._altered = [_altered(batch, span.alterations) for batch in rows]

    def _rows(self) -> Iterator[pa.RecordBatch]:
        """Yield the rows so far."""
        yield from self._altered
        if self._folding is None:
            return
        for batch in self._folding.finish().batches():
            if not batch.num_rows:
                continue
            column = batch.column("row")
            rows = pa.RecordBatch.from_arrays(column.flatten(), schema=pa.schema(list(column.type)))
            counts = batch.column("count") if "count" in batch.schema.names else [1] * len(column)
            numbers = np.repeat(np.arange(len(column)), np.asarray(counts))
            for start in range(0, len(numbers), _BATCH_ROWS):
                yield rows.take(pa.array(numbers[start : start + _BATCH_ROWS]))

    def result(self) -> Iterator[pa.RecordBatch]:
        """Yield the rows after all changes."""
        while self._next < len(self._state.spans):
            self._begin_span()
        schema = self._state.schema
        for rows in self._rows():
            columns = [_as_type(rows.column(field.name), field.type) for field in schema]
            yield pa.RecordBatch.from_arrays(columns, schema=schema)


def altered(
    columns: Mapping[str, Value],
    alterations: Iterable[Alteration],
    added: Callable[[AddedColumn], Value],
) -> dict[str, Value]:
    """Return what belongs to each column of a table after alterations, by the column's name."""
    columns = dict(columns)
    for alteration in alterations:
        if isinstance(alteration, AddedColumn):
            columns[alteration.column] = added(alteration)
        elif isinstance(alteration, Removed):
            columns.pop(alteration.column, None)
        elif isinstance(alteration, Renamed) and alteration.column in columns:
            columns[alteration.name] = columns.pop(alteration.column)
    return columns


def _altered(rows: pa.RecordBatch, alterations: Iterable[Alteration]) -> pa.RecordBatch:
    """Return rows as the server's alterations of the table left them."""
    nothing = pa.array(np.zeros(rows.num_rows, np.int64))
    columns = altered(
        dict(zip(rows.schema.names, rows.columns, strict=True)),
        alterations,
        lambda alteration: alteration.value.take(nothing),
    )
    return pa.RecordBatch.from_arrays([*columns.values()], names=[*columns])


def _as_type(column: pa.Array, type_: pa.DataType) -> pa.Array:
    # A cast to the same type fails for a variant that is null.
    return column if column.type == type_ else column.cast(type_)


def _is_before(batch: pa.RecordBatch, place: Position) -> Any:
    """Return a mask of the changes before a position."""
    lsns, seqs = (batch.column(name).to_numpy() for name in ("commit_lsn", "seq"))
    return (lsns < place[0]) | ((lsns == place[0]) & (seqs < place[1]))


def _changes(
    batch: pa.RecordBatch, columns: Mapping[str, str], state: StateSpans
) -> pa.RecordBatch:
    """Return changes with the columns of their span alone, as the fold takes them."""
    row, sides = [], {}
    for side in ("before", "after"):
        tuples = batch.column(side)
        parts = dict(zip([field.name for field in tuples.type], tuples.flatten(), strict=True))
        row = [pa.field(stored_name, parts[name].type) for name, stored_name in columns.items()]
        sides[side] = pa.StructArray.from_arrays([parts[name] for name in columns], fields=row)
    return _batch(
        {
            "op": batch.column("op").cast(pa.string()),
            "commit_lsn": batch.column("commit_lsn"),
            "commit_time": pa.nulls(batch.num_rows, pa.timestamp("us", "UTC")),
            "seq": batch.column("seq"),
            "old_kind": batch.column("old_kind").cast(pa.string()),
            **sides,
            "unchanged": _unsent(batch.column("unchanged"), columns),
        },
        state,
    )  # fmt: skip


def _unsent(unchanged: pa.ListArray, columns: Mapping[str, str]) -> pa.ListArray:
    """Return which values of a span's columns were not sent, by their names in the state table."""
    names, stored_names = (
        pa.array(columns.keys(), pa.string()),
        pa.array(columns.values(), pa.string()),
    )
    at = pc.index_in(unchanged.flatten().cast(pa.string()), names)
    is_there = at.is_valid()
    rows = pc.list_parent_indices(unchanged).filter(is_there).to_numpy()
    counts = np.bincount(rows, minlength=len(unchanged))
    ends = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    items = stored_names.take(at.filter(is_there))
    return pa.ListArray.from_arrays(pa.array(ends), items, mask=pa.array(counts == 0))


def _batch(columns: Mapping[str, pa.Array], state: StateSpans) -> pa.RecordBatch:
    namespace, _, name = state.table.partition(".")
    named = {
        "namespace": namespace, "relation": name, "relation_id": "0", "replica_identity": "d",
        "key_columns": json.dumps(list(state.key)),
    }  # fmt: skip
    schema = pa.schema(
        [pa.field(name, column.type) for name, column in columns.items()],
        metadata={f"pgoutput.{name}": value for name, value in named.items()},
    )
    return pa.RecordBatch.from_arrays(list(columns.values()), schema=schema)


def _emptied(schema: pa.Schema) -> pa.RecordBatch:
    """Return a Truncate that comes before all changes."""
    columns = {"op": ["truncate"], "commit_lsn": [0], "seq": [-1]}
    return _filled(schema, columns, 1)


def _read(rows: pa.RecordBatch, schema: pa.Schema, first: int) -> pa.RecordBatch:
    """Return rows as changes of a snapshot that comes before all changes."""
    count, row = rows.num_rows, schema.field("after").type
    after = pa.StructArray.from_arrays(
        [_as_type(rows.column(field.name), field.type) for field in row], fields=list(row)
    )
    columns: dict[str, Any] = {
        "op": ["read"] * count, "commit_lsn": [0] * count,
        "seq": np.arange(first, first + count), "after": after,
    }  # fmt: skip
    return _filled(schema, columns, count)


def _filled(schema: pa.Schema, columns: Mapping[str, Any], count: int) -> pa.RecordBatch:
    """Return changes with these columns; the others are null."""
    return pa.RecordBatch.from_arrays(
        [
            pa.nulls(count, field.type) if field.name not in columns
            else columns[field.name] if isinstance(columns[field.name], pa.Array)
            else pa.array(columns[field.name], field.type)
            for field in schema
        ],
        schema=schema,
    )  # fmt: skip


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
