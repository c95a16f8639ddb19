"""The merge of net changes into a Delta table.

A merge rewrites each file that has a removed or changed row, without this row, and writes the new
rows to further files. It reads files in two passes. The first one reads only key columns, and
refuses net changes that do not fit the table. The second one copies rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from .delta_rewrite import MergeFiles, MergePart, Rewrite
from .delta_types import stored_array
from .merge_keys import MergeKeys
from .targets import IncompleteError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from .delta_files import DeltaFileWriter, Written
    from .delta_rewrite import Hits
    from .delta_shape import Shape
    from .delta_table import File, LakeTable
    from .folding import NetChanges

_T = TypeVar("_T")
_SHOWN = 3
"""Number of rows that an error shows."""


def _may_hold(file: File, keys: MergeKeys, column: str) -> bool:
    """Whether a file may have rows with some keys, by its bounds of the first key column."""
    if column in file.partition:
        value = file.partition[column]
        return keys.may_be_in(value, value)
    return keys.may_be_in(file.least.get(column), file.greatest.get(column))


class MergeSteps(Protocol):
    """The two steps of a merge that read files, done by this process or by executors."""

    def find(
        self, merge: Merge, keys: MergeKeys, names: Sequence[str], files: list[tuple[int, File]]
    ) -> Iterable[Hits]:
        """Find keys in numbered files, like `MergeFiles.find`."""

    def rewrite(self, merge: Merge, writer: DeltaFileWriter) -> Written:
        """Rewrite the merge's files and write its net rows; this process does so by `writer`."""


class LocalSteps:
    """`MergeSteps` that this process does."""

    def find(
        self, merge: Merge, keys: MergeKeys, names: Sequence[str], files: list[tuple[int, File]]
    ) -> Iterable[Hits]:
        """See `MergeSteps`."""
        return merge.merge_files.find(keys, names, files)

    def rewrite(self, merge: Merge, writer: DeltaFileWriter) -> Written:
        """See `MergeSteps`."""
        (part,) = merge.parts(1)
        Rewrite(merge.merge_files, merge.net, part).write(writer)
        return writer.finish()


class Merge:
    """A merge of net changes into a table.

    Parameters
    ----------
    table : LakeTable
    shape : Shape
    net : NetChanges
    name : str
        The table's name in errors.
    marker : str, optional
        The column that marks deleted rows. They then stay in the table.
    steps : MergeSteps

    Attributes
    ----------
    files : list of File
        The files that the merge rewrites.
    """

    def __init__(
        self, table: LakeTable, shape: Shape, net: NetChanges, name: str, marker: str | None,
        steps: MergeSteps,
    ) -> None:  # fmt: skip
        self.table = table
        self.net = net
        self.merge_files = MergeFiles(table, shape, marker)
        self._shape = shape
        self._name = name
        self._steps = steps
        # With a marker, a truncate marks all rows as deleted, and they stay.
        empties = net.truncated and marker is None
        self._marks_all = net.truncated and marker is not None
        self._there = [] if empties else table.files()
        self._hits: dict[int, dict[int, Hits]] = {}  # by file and group
        self._unsent: set[str] = set()
        self._sources = np.full(net.num_rows, -1, np.int64)
        names = [field.name for field in net.schema.field("row").type]
        if lacking := [column for column in names if column not in shape.schema.names]:
            raise IncompleteError(
                f"the table {name!r} in {table.place.uri} has no column {lacking[0]!r}, and the "
                "value of this column in its rows is unknown. The table needs a new snapshot"
            )
        if net.num_rows:
            if net.key:
                self._find_by_key()
            else:
                self._find_alike(names)
        rewrites = shape.rewrites or self._marks_all
        self._touched = [i for i in range(len(self._there)) if rewrites or i in self._hits]
        self.files = [self._there[i] for i in self._touched]

    # --- what is there ---------------------------------------------------------------------------

    def _find_by_key(self) -> None:
        """Find the table's rows with the keys of the net rows; refuse net rows that do not fit."""
        net = self.net
        keys, (be_present, be_absent, lacks) = keyed(net, self._shape.schema)
        present = np.zeros(keys.count, bool)
        files = [*enumerate(self._there)]
        source = self._shape.sources.get(net.key[0])
        if isinstance(source, str) and not self._shape.rewrites:
            files = [(i, file) for i, file in files if _may_hold(file, keys, source)]
        for hits in self._steps.find(self, keys, net.key, files):
            self._hits.setdefault(hits.file, {})[hits.group] = hits
            if not self._marks_all:
                present[hits.keys[hits.live]] = True
        if not net.truncated:
            for wrong, problem in (
                (be_present & ~present, "it has no row with"),
                (be_absent & present, "it already has a row with"),
            ):
                if wrong.any():
                    self._refuse(np.flatnonzero(wrong), net.key, problem)
        if lacks.any():
            self._find_sources(keys, present, lacks, be_present)

    def _find_sources(self, keys: MergeKeys, present: Any, lacks: Any, be_present: Any) -> None:
        """Find, for each net row that lacks values, the key under which the table has them."""
        sources, first = self._sources, 0
        sources[lacks & be_present] = np.flatnonzero(lacks & be_present)
        for rows in self.net.batches():
            part = slice(first, first + rows.num_rows)
            first += rows.num_rows
            self._unsent.update(rows.column("unchanged").flatten().unique().to_pylist())
            moved = rows.column("from_").is_valid().to_numpy(zero_copy_only=False) & lacks[part]
            if moved.any():
                old = keys.places(_columns(rows, self.net.key, self._shape.schema, "from_"))
                sources[part][moved] = old[moved]
                has_old = (old >= 0) & present[old]
                if (moved & ~has_old).any():
                    missing = part.start + np.flatnonzero(moved & ~has_old)
                    self._refuse(missing, self.net.key, "it has no row with", "from_")
        # A new row has no source: the table has no row with its key.
        sources[sources >= 0] = np.where(present[sources[sources >= 0]], sources[sources >= 0], -1)

    def _find_alike(self, names: Sequence[str]) -> None:
        """Find as many equal rows as the net rows remove; refuse if the table has fewer."""
        keys, numbers, left = counted(self.net, self._shape.schema)
        if not keys.count:
            return
        for hits in self._steps.find(self, keys, names, [*enumerate(self._there)]):
            order = np.argsort(hits.keys, kind="stable")
            order = order[hits.live[order]]
            rows, kinds = hits.rows[order], hits.keys[order]
            # Take the first rows among equal ones, as many as still have to be removed.
            first = np.searchsorted(kinds, kinds)
            goes = np.arange(len(kinds)) - first < left[kinds]
            rows, kinds = rows[goes], kinds[goes]
            np.subtract.at(left, kinds, 1)
            if len(rows):
                ascending = np.argsort(rows)
                self._hits.setdefault(hits.file, {})[hits.group] = hits._replace(
                    rows=rows[ascending],
                    keys=numbers[kinds[ascending]],
                    live=np.ones(len(ascending), bool),
                )
            if not left.any():
                return
        self._refuse(numbers[left > 0], names, "it has too few rows with")

    def _refuse(self, numbers: Any, names: Sequence[str], problem: str, of: str = "row") -> None:
        """Raise the error for net rows that do not fit the table; it shows some of them."""
        shown, first, parts = numbers[:_SHOWN], 0, []
        for rows in self.net.batches():
            at = shown[(shown >= first) & (shown < first + rows.num_rows)] - first
            columns = _columns(rows, names, self._shape.schema, of)
            parts.append([column.take(pa.array(at)) for column in columns])
            first += rows.num_rows
        values = [pa.concat_arrays(part).to_pylist() for part in zip(*parts, strict=True)]
        texts = ["(" + ", ".join(map(repr, row)) + ")" for row in zip(*values, strict=True)]
        more = " and more" if len(numbers) > _SHOWN else ""
        raise IncompleteError(
            f"the changes of {self.net.table} do not fit its state table {self._name!r} in "
            f"{self.table.place.uri}: {problem} ({', '.join(names)}) = {'; '.join(texts)}{more}. "
            "Changes are missing, or the table began without its existing rows",
            code="unfit_row",
            table=self.net.table,
            hint="Request a new snapshot of the table",
        )

    # --- what comes of it ------------------------------------------------------------------------

    def parts(self, count: int) -> list[MergePart]:
        """Split the files to rewrite, and all net rows, into parts of about the same size.

        A net row with values that were not sent goes to the part whose files have these values.

        Parameters
        ----------
        count : int
            Maximum number of parts. There are never more parts than files, but at least one.
        """
        sizes = [file.size for file in self.files]
        groups = balanced(self._touched, sizes, count) or [[]]
        # The part of each net row.
        part_of = np.arange(self.net.num_rows) * len(groups) // max(self.net.num_rows, 1)
        if self._unsent:
            holders = np.full(self.net.num_rows, -1, np.int64)
            for number, group in enumerate(groups):
                for file in group:
                    for hits in self._hits.get(file, {}).values():
                        holders[hits.keys[hits.live]] = number
            has_source = self._sources >= 0
            part_of[has_source] = holders[self._sources[has_source]]
        parts = []
        for number, group in enumerate(groups):
            files = [(self._there[i], self._hits.get(i, {})) for i in group]
            rows = np.flatnonzero(part_of == number)
            unsent = tuple(sorted(self._unsent))
            parts.append(MergePart(files, rows, self._sources[rows], unsent))
        return parts

    def write(self, writer: DeltaFileWriter) -> Written:
        """Rewrite the files and write the net rows; return the new files."""
        return self._steps.rewrite(self, writer)


def keyed(net: NetChanges, schema: pa.Schema) -> tuple[MergeKeys, list[Any]]:
    """Return the keys of net rows, and flags: must be present, must be absent, lacks values."""
    keys, batch_flags = MergeKeys(), []
    for rows in net.batches():
        keys.add(_columns(rows, net.key, schema))
        expects = rows.column("expects")
        flags = [pc.equal(expects, "present"), pc.equal(expects, "absent"),
                 rows.column("unchanged").is_valid()]  # fmt: skip
        batch_flags.append([flag.to_numpy(zero_copy_only=False) for flag in flags])
    return keys, [np.concatenate(arrays) for arrays in zip(*batch_flags, strict=True)]


def counted(net: NetChanges, schema: pa.Schema) -> tuple[MergeKeys, Any, Any]:
    """Return the rows that a multiset's net rows remove, their numbers, and how many of each."""
    names = [field.name for field in net.schema.field("row").type]
    keys, first = MergeKeys(are_rows=True), 0
    numbers, counts = [], []
    for rows in net.batches():
        gone = pc.equal(rows.column("op"), "delete").to_numpy(zero_copy_only=False)
        at = pa.array(np.flatnonzero(gone))
        keys.add([column.take(at) for column in _columns(rows, names, schema)])
        numbers.append(first + at.to_numpy())
        counts.append(rows.column("count").take(at).to_numpy())
        first += rows.num_rows
    return keys, np.concatenate(numbers), np.concatenate(counts)


def touched_bytes(table: LakeTable, shape: Shape, net: NetChanges, marker: str | None) -> int:
    """Return an upper limit for the bytes that a merge rewrites.

    It compares keys with the bounds in the table's log, and reads no file.
    """
    if net.truncated and marker is None:
        return 0
    files = table.files()
    source = shape.sources.get(net.key[0]) if net.key else None
    if isinstance(source, str) and not (shape.rewrites or net.truncated):
        keys = MergeKeys()
        for rows in net.batches():
            keys.add(_columns(rows, net.key[:1], shape.schema))
        files = [file for file in files if _may_hold(file, keys, source)]
    return sum(file.size for file in files)


def balanced(items: Sequence[_T], sizes: Sequence[int], count: int) -> list[list[_T]]:
    """Divide items into `count` groups of about the same size; never more groups than items."""
    groups: list[list[_T]] = [[] for _ in range(min(count, len(items)))]
    weights = [0] * len(groups)
    for size, item in sorted(zip(sizes, items, strict=True), key=lambda pair: -pair[0]):
        at = weights.index(min(weights))
        groups[at].append(item)
        weights[at] += size
    return groups


def _columns(
    rows: pa.RecordBatch, names: Sequence[str], schema: pa.Schema, of: str = "row"
) -> list[pa.Array]:
    """Return columns of the struct `row` or `from_` of net rows, with the table's types."""
    struct = rows.column(of)
    fields = struct.flatten()
    return [
        stored_array(fields[struct.type.get_field_index(name)], schema.field(name).type)
        for name in names
    ]
