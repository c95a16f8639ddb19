"""What net changes do to the files of a Delta table.

Files that have a row which goes or gets other values are written anew without it, and the rows that
come are written behind. It is done in two passes: the first reads the keys alone, and refuses what
does not fit; the second copies. Of both only a group of rows is in memory.
"""

from __future__ import annotations

import bisect
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from .delta_types import conformed, stored_array, stored_type
from .keys import digests_of, is_integer, keys_of
from .row_stores import RowStore, SpillFile
from .targets import DELETED_AT, AddedColumn, IncompleteError, Removed, Renamed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from .delta_files import DeltaFileWriter
    from .delta_table import File, LakeTable
    from .folding import NetChanges
    from .targets import Alteration

_T = TypeVar("_T")
SHOWN = 3
"""Rows that an error names."""
_ROWS_AT_ONCE = 1 << 16
"""Of those that come several times."""
_AHEAD = 2
"""Groups of rows that are read while one is written."""
_FEW = 64
"""If fewer than each so many rows goes, the others are not copied in memory."""


class Shape(NamedTuple):
    """The columns that a table gets, and where the rows that it has take them from.

    Attributes
    ----------
    schema : pyarrow.Schema
    sources : dict of str to str, or to pyarrow.Array
        The column of the files, or the one value, by the column's name.
    defaults : dict of str to pyarrow.Array
        What rows have in columns that were added after them.
    rewrites : bool
        Whether all files are written anew.
    """

    schema: pa.Schema
    sources: dict[str, str | pa.Array]
    defaults: dict[str, pa.Array]
    rewrites: bool

    def adapted(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Rows of the files, with the columns of the schema."""
        if not self.rewrites:
            return conformed(rows, self.schema)
        columns = []
        for field in self.schema:
            source = self.sources[field.name]
            if isinstance(source, str):
                columns.append(stored_array(rows.column(source), field.type))
            else:
                columns.append(pa.repeat(source[0], rows.num_rows))
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)


def shape_of(schema: pa.Schema, alterations: Sequence[Alteration]) -> Shape:
    """What the columns of a table become. An alteration that it has already does nothing."""
    types = {field.name: field.type for field in schema}
    sources: dict[str, str | pa.Array] = {name: name for name in types}
    defaults = {}
    rewrites = False
    for one in alterations:
        if isinstance(one, AddedColumn):
            type_ = stored_type(one.value.type)
            value = defaults[one.column] = stored_array(one.value, type_)
            if types.get(one.column) == type_:
                continue
            types[one.column], sources[one.column] = type_, value
            rewrites |= not value.null_count
        elif isinstance(one, Removed):
            rewrites |= types.pop(one.column, None) is not None
            sources.pop(one.column, None)
        elif isinstance(one, Renamed):
            if one.column in types:
                rewrites = True
                types = {one.name if name == one.column else name: of for name, of in types.items()}
                sources[one.name] = sources.pop(one.column)
                if one.column in defaults:
                    defaults[one.name] = defaults.pop(one.column)
        elif one.column in types:
            type_ = stored_type(one.type)
            rewrites |= types[one.column] != type_
            types[one.column] = type_
    fields = [pa.field(name, type_) for name, type_ in types.items()]
    return Shape(pa.schema(fields), sources, defaults, rewrites)


class MergeKeys:
    """Rows of some columns, each found by its values.

    It keeps a number for each row, or two hashes, and not the values.

    Parameters
    ----------
    are_rows : bool
        Whether these are whole rows, in which values may be null.

    Attributes
    ----------
    count : int
    """

    def __init__(self, *, are_rows: bool = False) -> None:
        self._are_rows = are_rows
        self._types: list[pa.DataType] = []
        self._numbers: list[Any] = []
        self._order: Any = None
        self._first: list[pa.Array] = []
        self._sorted: pa.Array | None = None
        self.count = 0

    def add(self, columns: list[pa.Array]) -> None:
        """Take more rows; all come before others are looked for."""
        self._types = [column.type for column in columns]
        self._numbers.append(self._numbered(columns))
        if not self._are_rows:
            self._first.append(columns[0])
        self.count += len(columns[0])

    def _numbered(self, columns: list[pa.Array]) -> Any:
        """For each row one number or two, as an array of shape (1 or 2, n)."""
        count = len(columns[0])
        if not self._are_rows and is_integer(self._types):
            return keys_of(columns, count).values.reshape(1, count)
        # Not pyarrow's own comparison: 0.0 and -0.0 are two keys to the fold.
        return digests_of(columns, count).T

    def places(self, columns: list[pa.Array]) -> Any:
        """For each row the number of the one that is equal, or -1."""
        given = [stored_array(one, type_) for one, type_ in zip(columns, self._types, strict=True)]
        if self._order is None:
            numbers = np.concatenate(self._numbers, axis=1)
            self._order = np.argsort(numbers[0], kind="stable")
            self._numbers = [numbers[:, self._order]]
        (own,), wanted = self._numbers, self._numbered(given)
        last = self.count - 1
        at = np.minimum(np.searchsorted(own[0], wanted[0]), last)
        # Where several have the same first number, the second one tells.
        while True:
            found = (own[:, at] == wanted).all(axis=0)
            others = ~found & (own[0, at] == wanted[0]) & (at < last)
            if not others.any():
                break
            at[others] += 1
        if not self._are_rows and given[0].null_count:
            found &= given[0].is_valid().to_numpy(zero_copy_only=False)
        return np.where(found, self._order[at], -1)

    def may_be_in(self, least: Any, greatest: Any) -> bool:
        """Whether the first column of a row may lie between two values."""
        if least is None or greatest is None:
            return True
        if self._sorted is None:
            values = pa.concat_arrays(self._first)
            self._first = []
            self._sorted = values.take(pc.sort_indices(values)).drop_null()
        at = bisect.bisect_left(self._sorted, least, key=lambda value: value.as_py())
        return at < len(self._sorted) and bool(self._sorted[at].as_py() <= greatest)


class Hits(NamedTuple):
    """Rows that are there: in which file and group, at which places there, and of which key.

    `live` says which of them are not marked as deleted.
    """

    file: int
    group: int
    rows: Any
    keys: Any
    live: Any


def may_hold(file: File, keys: MergeKeys, column: str) -> bool:
    """Whether a file may have rows of some keys, by what the log says of their first column."""
    if column in file.partition:
        value = file.partition[column]
        return keys.may_be_in(value, value)
    return keys.may_be_in(file.least.get(column), file.greatest.get(column))


def net_values(batch: pa.RecordBatch, name: str, type_: pa.DataType, of: str = "row") -> pa.Array:
    """A column of net rows, or of the keys that they had, as a table has it."""
    struct = batch.column(of)
    at = struct.type.get_field_index(name)
    return stored_array(struct.flatten()[at], type_)


def net_row(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Net rows with the columns of a table."""
    row = batch.column("row")
    names = [field.name for field in row.type]
    return conformed(pa.RecordBatch.from_arrays(row.flatten(), names=names), schema)


def misfit(
    table: str, name: str, uri: str, what: str, names: Sequence[str], columns: Sequence[pa.Array]
) -> IncompleteError:
    """The error for changes that do not fit what is there.

    Parameters
    ----------
    table, name, uri : str
        The server's table, the target's name for it, and where that is.
    what : str
        What is wrong.
    names, columns
        The columns by which the rows are named, and their values in the first rows, one more than
        are shown if there are more.
    """
    shown = [column.to_pylist() for column in columns]
    texts = ["(" + ", ".join(map(repr, values)) + ")" for values in zip(*shown, strict=True)]
    more = " and more" if len(texts) > SHOWN else ""
    return IncompleteError(
        f"the changes of {table} do not fit its table {name!r} in {uri}: {what} "
        f"({', '.join(names)}) = {'; '.join(texts[:SHOWN])}{more}. Changes are missing, or the "
        "table began without the rows that were there",
        code="unfit_row",
        table=table,
        hint="Copy the table again",
    )


class Merge:
    """A merge of net changes into a table.

    Parameters
    ----------
    table : LakeTable
    shape : Shape
    net : NetChanges
    name : str
        What errors call the table.
    marker : str, optional
        The column in which deleted rows are marked, which stay then.

    Attributes
    ----------
    files : list of File
        Those that are written anew.
    """

    def __init__(
        self, table: LakeTable, shape: Shape, net: NetChanges, name: str, marker: str | None = None
    ) -> None:
        self._table = table
        self._shape = shape
        self._net = net
        self._name = name
        self._marker = marker
        # Rows that a truncate has marked stay.
        self._empties = net.truncated and marker is None
        self._marks_all = net.truncated and marker is not None
        self._there = [] if self._empties else table.files()
        self._hits: dict[tuple[int, int], Hits] = {}
        self._old: RowStore | None = None
        self._old_numbers: list[Any] = []
        names = [field.name for field in net.schema.field("row").type]
        if lacking := [one for one in names if one not in shape.schema.names]:
            raise IncompleteError(
                f"the table {name!r} in {table.place.uri} has no column {lacking[0]!r}, and nobody "
                "says what its rows have there: copy it again"
            )
        if net.num_rows:
            if net.key:
                self._find_by_key()
            else:
                self._find_alike()
        touched = {file for file, _ in self._hits}
        rewrites = shape.rewrites or self._marks_all
        self.files = [file for i, file in enumerate(self._there) if rewrites or i in touched]

    # --- what is there ---------------------------------------------------------------------------

    def _columns(
        self, rows: pa.RecordBatch, names: Sequence[str], of: str = "row"
    ) -> list[pa.Array]:
        """Columns of net rows."""
        schema = self._shape.schema
        return [net_values(rows, name, schema.field(name).type, of) for name in names]

    def _find_by_key(self) -> None:
        """Find the rows with the keys of the net rows, and refuse what does not fit."""
        net, keys = self._net, MergeKeys()
        found = []
        for rows in net.batches():
            keys.add(self._columns(rows, net.key))
            expects = rows.column("expects")
            flags = [pc.equal(expects, "present"), pc.equal(expects, "absent"),
                     rows.column("unchanged").is_valid()]  # fmt: skip
            found.append([one.to_numpy(zero_copy_only=False) for one in flags])
        be_present, be_absent, lacks = map(np.concatenate, zip(*found, strict=True))
        present = np.zeros(keys.count, bool)
        for hits in self._find(keys, net.key, self._is_possible(keys, net.key[0])):
            self._hits[hits.file, hits.group] = hits
            if not self._marks_all:
                present[hits.keys[hits.live]] = True
        if not net.truncated:
            for wrong, what in (
                (be_present & ~present, "it has no row with"),
                (be_absent & present, "it has a row already with"),
            ):
                if wrong.any():
                    self._refuse(np.flatnonzero(wrong), net.key, what)
        self._unsent: set[str] = set()
        self._sources = np.full(keys.count, -1, np.int64)
        if lacks.any():
            self._find_sources(keys, present, lacks, be_present)

    def _is_possible(self, keys: MergeKeys, name: str) -> Callable[[File], bool]:
        source = self._shape.sources.get(name)

        def possible(file: File) -> bool:
            if not isinstance(source, str) or self._shape.rewrites:
                return True
            return may_hold(file, keys, source)

        return possible

    def _find(
        self, keys: MergeKeys, names: Sequence[str], possible: Callable[[File], bool]
    ) -> Iterator[Hits]:
        for number, file in enumerate(self._there):
            if not possible(file):
                continue
            with self._table.open_file(file) as opened:
                for group in range(opened.num_row_groups):
                    rows = self._read(file, opened, group, [*names, *self._marked_in])
                    places = keys.places([rows.column(name) for name in names])
                    found = np.flatnonzero(places >= 0)
                    if len(found):
                        yield Hits(number, group, found, places[found], self._live(rows)[found])

    @property
    def _marked_in(self) -> list[str]:
        """The column in which deleted rows are marked, if there is one."""
        return [] if self._marker is None else [self._marker]

    def _live(self, rows: pa.RecordBatch) -> Any:
        """Which rows are not marked as deleted."""
        if self._marker is None:
            return np.ones(rows.num_rows, bool)
        return rows.column(self._marker).is_null().to_numpy(zero_copy_only=False)

    def _read(
        self, file: File, opened: Any, group: int, names: Sequence[str] | None = None
    ) -> pa.RecordBatch:
        """Rows of a file, with the columns that the table gets, or some of them."""
        shape = self._shape
        if names is not None:
            fields = [shape.schema.field(name) for name in names]
            shape = shape._replace(schema=pa.schema(fields))
        if not shape.rewrites:
            return self._table.group(file, opened, group, shape.schema)
        there = self._table.schema
        sources = [one for field in shape.schema
                   if isinstance(one := shape.sources[field.name], str)]  # fmt: skip
        wanted = pa.schema([there.field(one) for one in sources])
        rows = self._table.group(file, opened, group, wanted)
        return shape.adapted(rows)

    def _find_sources(self, keys: MergeKeys, present: Any, lacks: Any, be_present: Any) -> None:
        """Find for each net row that lacks values the key under which the table has them."""
        sources, first = self._sources, 0
        sources[lacks & be_present] = np.flatnonzero(lacks & be_present)
        for rows in self._net.batches():
            part = slice(first, first + rows.num_rows)
            first += rows.num_rows
            self._unsent.update(rows.column("unchanged").flatten().unique().to_pylist())
            moved = rows.column("from_").is_valid().to_numpy(zero_copy_only=False) & lacks[part]
            if moved.any():
                old = keys.places(self._columns(rows, self._net.key, "from_"))
                sources[part][moved] = old[moved]
                there = (old >= 0) & present[old]
                if (moved & ~there).any():
                    missing = part.start + np.flatnonzero(moved & ~there)
                    self._refuse(missing, self._net.key, "it has no row with", "from_")
        # A row that is new has none.
        sources[sources >= 0] = np.where(present[sources[sources >= 0]], sources[sources >= 0], -1)

    def _find_alike(self) -> None:
        """Find as many rows of each kind as go, and refuse if there are fewer."""
        names = [field.name for field in self._net.schema.field("row").type]
        keys, first = MergeKeys(are_rows=True), 0
        kinds, counts = [], []
        for rows in self._net.batches():
            gone = pc.equal(rows.column("op"), "delete").to_numpy(zero_copy_only=False)
            at = pa.array(np.flatnonzero(gone))
            keys.add([column.take(at) for column in self._columns(rows, names)])
            kinds.append(first + at.to_numpy())
            counts.append(rows.column("count").take(at).to_numpy())
            first += rows.num_rows
        if not keys.count:
            return
        self._kinds, left = np.concatenate(kinds), np.concatenate(counts)
        for hits in self._find(keys, names, lambda file: True):
            order = np.argsort(hits.keys, kind="stable")
            order = order[hits.live[order]]
            rows, kinds = hits.rows[order], hits.keys[order]
            # Of each kind the first ones, as many as are left to go.
            first = np.searchsorted(kinds, kinds)
            goes = np.arange(len(kinds)) - first < left[kinds]
            rows, kinds = rows[goes], kinds[goes]
            np.subtract.at(left, kinds, 1)
            if len(rows):
                place = np.argsort(rows)
                self._hits[hits.file, hits.group] = hits._replace(
                    rows=rows[place], keys=kinds[place], live=np.ones(len(place), bool)
                )
            if not left.any():
                return
        self._refuse(self._kinds[left > 0], names, "it has fewer rows like")

    def _refuse(self, numbers: Any, names: Sequence[str], what: str, of: str = "row") -> None:
        numbers, first, parts = numbers[: SHOWN + 1], 0, []
        for rows in self._net.batches():
            at = numbers[(numbers >= first) & (numbers < first + rows.num_rows)] - first
            parts.append([column.take(pa.array(at)) for column in self._columns(rows, names, of)])
            first += rows.num_rows
        columns = [pa.concat_arrays(part) for part in zip(*parts, strict=True)]
        raise misfit(self._net.table, self._name, self._table.place.uri, what, names, columns)

    # --- what comes of it ------------------------------------------------------------------------

    def write(self, writer: DeltaFileWriter) -> None:
        """Write the files anew, and the rows that come."""
        if self._marker is not None and self._hits:
            self._deleted, self._times = self._deletions()
        wanted = set(map(id, self.files))
        for number, file in enumerate(self._there):
            if id(file) in wanted:
                self._copy(number, file, writer)
                writer.end_of_file()
        if self._net.key:
            self._write_rows(writer)
        else:
            self._write_counted(writer)

    def _copy(self, number: int, file: File, writer: DeltaFileWriter) -> None:
        """Write the rows of a file that stay, and keep what others need of those that go."""
        for group, rows in _ahead(self._groups(file)):
            hits = self._hits.get((number, group))
            if self._marks_all:
                rows = self._with_marks(rows, self._live(rows), self._net.truncated_at)
            if hits is None:
                writer.write(rows)
                continue
            if self._net.key and self._unsent:
                self._keep(rows, hits)
            if self._marker is not None:
                hits = self._write_marked(rows, hits, writer)
            writer.write(*_without(rows, hits.rows), size=rows.nbytes)

    def _deletions(self) -> tuple[Any, Any]:
        """For all net rows whether the row is deleted, and when, in microseconds."""
        found = [
            (
                pc.equal(rows.column("op"), "delete").to_numpy(zero_copy_only=False),
                rows.column("commit_time").cast(pa.int64()).to_numpy(),
            )
            for rows in self._net.batches()
        ]
        deleted, times = map(np.concatenate, zip(*found, strict=True))
        return deleted, times

    def _write_marked(self, rows: pa.RecordBatch, hits: Hits, writer: DeltaFileWriter) -> Hits:
        """Write those that are deleted, with a mark; what goes from the rows."""
        # Of a multiset those that were found are deleted; with a key some get other values.
        numbers = hits.keys if self._net.key else self._kinds[hits.keys]
        deleted = self._deleted[numbers]
        marked = deleted & hits.live
        if not self._marks_all and marked.any():
            at = self._times[numbers[marked]]
            gone = rows.take(pa.array(hits.rows[marked]))
            writer.write(self._with_marks(gone, np.ones(len(at), bool), at))
        # Rows that are deleted already stay as they are.
        goes = ~deleted if self._marks_all else ~deleted | hits.live
        return hits._replace(rows=hits.rows[goes], keys=hits.keys[goes], live=hits.live[goes])

    def _with_marks(self, rows: pa.RecordBatch, which: Any, times: Any) -> pa.RecordBatch:
        """Rows of which some are marked as deleted at a time, in microseconds."""
        at = rows.schema.get_field_index(self._marker)
        given = pa.array(np.array(np.broadcast_to(times, rows.num_rows))).cast(DELETED_AT)
        columns = list(rows.columns)
        columns[at] = pc.if_else(pa.array(which), given, columns[at])
        return pa.RecordBatch.from_arrays(columns, schema=rows.schema)

    def _groups(self, file: File) -> Iterator[tuple[int, pa.RecordBatch]]:
        with self._table.open_file(file) as opened:
            for group in range(opened.num_row_groups):
                yield group, self._read(file, opened, group)

    def _keep(self, rows: pa.RecordBatch, hits: Hits) -> None:
        needed = np.isin(hits.keys, self._sources)
        old = rows.select(sorted(self._unsent))
        if self._old is None:
            self._old = RowStore(SpillFile(), old.schema)
        self._old.append(old.take(pa.array(hits.rows[needed])).columns)
        self._old_numbers.append(hits.keys[needed])

    def _write_rows(self, writer: DeltaFileWriter) -> None:
        """Write the rows that are there afterwards."""
        places = np.full(self._net.num_rows + 1, -1, np.int64)  # the last one is for -1
        if self._old_numbers:
            numbers = np.concatenate(self._old_numbers)
            places[numbers] = np.arange(len(numbers))
        first = 0
        for batch in self._net.batches():
            rows = net_row(batch, self._shape.schema)
            if batch.column("unchanged").null_count < batch.num_rows:
                at = places[self._sources[first : first + batch.num_rows]]
                rows = self._completed(batch, rows, at)
            first += batch.num_rows
            writer.write(rows.filter(pc.equal(batch.column("op"), "upsert")))

    def _completed(self, batch: pa.RecordBatch, rows: pa.RecordBatch, at: Any) -> pa.RecordBatch:
        """Rows with the values that were not sent, from the kept row that `at` says, or -1."""
        unchanged = batch.column("unchanged")
        names = unchanged.flatten()
        parents = pc.list_parent_indices(unchanged).to_numpy()
        columns = list(rows.columns)
        reader = None if self._old is None else self._old.reader()
        for name in names.unique().to_pylist():
            lacking = parents[pc.equal(names, name).to_numpy(zero_copy_only=False)]
            i = rows.schema.get_field_index(name)
            parts = [columns[i], self._shape.defaults.get(name, pa.nulls(1, columns[i].type))]
            numbers = np.arange(len(rows))
            numbers[lacking] = len(rows)
            known = lacking[at[lacking] >= 0]
            if reader is not None and len(known):
                parts.append(reader.take(rows.schema.field(i), reader.find(at[known])))
                numbers[known] = len(rows) + 1 + np.arange(len(known))
            columns[i] = pa.concat_arrays(parts).take(pa.array(numbers))
        return pa.RecordBatch.from_arrays(columns, schema=rows.schema)

    def _write_counted(self, writer: DeltaFileWriter) -> None:
        for batch in self._net.batches():
            comes = pc.equal(batch.column("op"), "upsert")
            rows = net_row(batch, self._shape.schema).filter(comes)
            counts = batch.column("count").filter(comes).to_numpy()
            numbers = np.repeat(np.arange(len(counts)), counts)
            for first in range(0, len(numbers), _ROWS_AT_ONCE):
                writer.write(rows.take(pa.array(numbers[first : first + _ROWS_AT_ONCE])))


def _without(rows: pa.RecordBatch, places: Any) -> Iterator[pa.RecordBatch]:
    """Rows without those at some places, in rising order."""
    if len(places) * _FEW > rows.num_rows:
        stays = np.ones(rows.num_rows, bool)
        stays[places] = False
        yield rows.filter(pa.array(stays))
        return
    # What lies between a few of them needs no copy.
    first = 0
    for place in [*places.tolist(), rows.num_rows]:
        if place > first:
            yield rows.slice(first, place - first)
        first = place + 1


def _ahead(rows: Iterator[_T]) -> Iterator[_T]:
    """What an iterator gives, of which the next ones are made while one is used."""
    with ThreadPoolExecutor(1, "pgoutput_fast-read") as pool:
        coming = deque(pool.submit(next, rows, None) for _ in range(_AHEAD))
        while (found := coming.popleft().result()) is not None:
            coming.append(pool.submit(next, rows, None))
            yield found
