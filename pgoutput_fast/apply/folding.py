"""The net changes of a table: one row for each key that its changes touch.

A fold reads the changes once, in stream order. The folder (``_folder.pyx``, ``_pure_folder.py``)
follows each row from change to change, and works only with keys and the numbers of changes. The
values go to a `RowStore`, which spills to a file, and are read back by these numbers at the end. So
memory grows with the number of keys only: about 60 bytes each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from .._impl import twin
from ..errors import Argument, PgOutputError
from ..lsn import format_lsn
from .keys import digests_of, is_integer, keys_of
from .row_stores import RowReader, RowStore, SpillFile
from .steps import DELETE, INSERT, MOST_CHANGES, OCCUPIED, UNKNOWN, UPDATE, Followed
from .versions import Version, check_follows, version_of

_OPERATIONS = pa.array(["insert", "update", "delete", "read"])
_STEPS = np.array([INSERT, UPDATE, DELETE, INSERT], np.uint8)
_HEAD = {
    "commit_lsn": pa.uint64(),
    "seq": pa.int64(),
    "commit_time": pa.timestamp("us", "UTC"),
}
_PARTITIONS = (
    ". A partition has its own replica identity, which must be that of the partitioned table: "
    "ALTER TABLE <partition> REPLICA IDENTITY"
)
_ROWS_AT_ONCE = 1 << 16
_BYTES_AT_ONCE = 16 << 20
"""About the largest size of a batch of the result."""


class NullKeyError(PgOutputError):
    """A change has no value for a key column."""

    code = "null_key"


class NetChanges(NamedTuple):
    """The net effect of changes on a table.

    Attributes
    ----------
    table : str
        The table's name in the newest change, ``namespace.name``.
    relation_id : int or None
        The table's OID; None if the batches lack it.
    key : tuple of str
        The columns that identify a row. Empty: the table is a multiset of rows.
    truncated : bool
        Empty the table first. `rows` then has all of its rows.
    schema : pyarrow.Schema
        The columns of `rows`.
    num_rows : int
    batches : callable
        Returns an iterator over `rows` as record batches. Use it if memory cannot hold all rows. It
        may be called again.
    truncated_at : int or None
        Commit time of the last truncate, in microseconds since 1970.
    rows : pyarrow.Table
        All batches together: one row for each key, in the order of the last changes.

        ``op``
            "upsert" or "delete".
        ``row``
            Struct of the columns' newest values; of a delete, only the key.
        ``expects``
            Whether the table had the key before: "present", "absent" or "any".
        ``unchanged``
            Names of the columns for which no change has a value. An existing row keeps its value,
            and a new row gets the column's default. Null if there are none.
        ``from_``
            Struct of the row's earlier key, if its key changed: the table must have that row. Else
            null. `rows` also has a row for the earlier key.
        ``commit_lsn``, ``seq``, ``commit_time``
            Position and time of the key's last change.
        ``count``
            Only for a multiset: how many equal rows to add ("upsert") or remove ("delete").
    """

    table: str
    relation_id: int | None
    key: tuple[str, ...]
    truncated: bool
    schema: pa.Schema
    num_rows: int
    batches: Callable[[], Iterator[pa.RecordBatch]]
    truncated_at: int | None = None

    @property
    def rows(self) -> pa.Table:
        """See the class."""
        return pa.Table.from_batches(self.batches(), self.schema)


def fold(changes: Iterable[Any], key: Sequence[str] | None = None) -> NetChanges:
    """Compute the net changes of one table.

    Parameters
    ----------
    changes : iterable of ChangeBatch
        Batches of one table, in stream order, with their commits. pyarrow's record batches and
        tables of the same columns work too. They are read once, and not kept.
    key : sequence of str, optional
        The columns that identify a row, never null. The default is the replica identity. With
        REPLICA IDENTITY FULL, give the primary key if it is not deferrable. Without a key, the
        table is a multiset of rows.

    Returns
    -------
    NetChanges

    Raises
    ------
    PgOutputError
        The changes are of several tables, out of order, not committed, or lack old rows. Or a
        change concerns a row that earlier changes removed. The error names the row.

    Examples
    --------
    >>> net = pf.apply.fold(transaction.batches())  # doctest: +SKIP
    >>> net.rows.column("op").to_pylist()  # doctest: +SKIP
    ['upsert', 'delete']
    """
    folding = Folding(key)
    is_batch = hasattr(changes, "__arrow_c_array__") or isinstance(changes, pa.Table)
    if not is_batch and not isinstance(changes, Iterable):
        raise TypeError(
            f"changes must be an iterable of change batches, not {type(changes).__name__}"
        )
    for batch in [changes] if is_batch else changes:
        folding.add(batch)
    return folding.finish()


class Folding:
    """A fold to which batches are added one by one.

    Parameters
    ----------
    key : sequence of str, optional
        See :func:`fold`.
    spill_file : SpillFile, optional
        The file for rows that memory should not hold; several tables may share one. The default is
        a file of its own.
    """

    def __init__(
        self, key: Sequence[str] | None = None, spill_file: SpillFile | None = None
    ) -> None:
        if isinstance(key, str):
            raise PgOutputError(
                f"{key!r} is a single text, but a key is a sequence of names",
                code="bad_option",
                parameter="key",
                hint=("Give ", Argument("key", [key])),
            )
        self._explicit_key = None if key is None else tuple(key)
        self._spill_file = spill_file or SpillFile()
        self._last = (-1, -1)
        self._schema: pa.Schema | None = None
        self._current: tuple[Version, _Keyed | _Multiset] | None = None
        self._truncated_at: int | None = None

    def add(self, batch: Any) -> None:
        """Add a batch, whose changes follow those added before."""
        if isinstance(batch, pa.Table):
            for part in batch.to_batches():
                self._add(part)
        elif not hasattr(batch, "__arrow_c_array__"):
            raise TypeError(
                "changes must be ChangeBatches, or pyarrow's record batches and tables, not "
                f"{type(batch).__name__}"
            )
        else:
            self._add(pa.record_batch(batch))

    def _add(self, batch: pa.RecordBatch) -> None:
        version, rows = self._prepared(batch.schema)
        if not batch.num_rows:
            return
        self._last = _check_order(version.table, batch, self._last)
        truncates = pc.equal(batch.column("op"), "truncate").to_numpy(zero_copy_only=False)
        if truncates.any():
            # The last truncate makes all earlier changes irrelevant.
            rows.truncate()
            last = int(np.flatnonzero(truncates)[-1])
            self._truncated_at = batch.column("commit_time").cast(pa.int64())[last].as_py()
            batch = batch.slice(last + 1)
        if batch.num_rows:
            rows.add(_NetChangeColumns(batch, version))

    def _prepared(self, schema: pa.Schema) -> tuple[Version, _Keyed | _Multiset]:
        """Return the version of a batch, and the table's rows, prepared for this version."""
        if self._current is not None and schema.equals(self._schema, check_metadata=True):
            return self._current
        version = version_of(schema)
        key = self._key_of(version)
        rows: _Keyed | _Multiset
        if self._current is None:
            store = RowStore(self._spill_file, pa.schema([]))
            rows = _Keyed(key, store) if key else _Multiset(version, store)
        else:
            old, rows = self._current
            check_follows(old, version)
            if key != rows.key:
                raise PgOutputError(
                    f"the key of {version.table} changed from ({', '.join(rows.key)}) to "
                    f"({', '.join(key)}): fold the changes before and after this separately",
                    code="unfit_schema",
                    table=version.table,
                )
        rows.meet(version)
        self._schema, self._current = schema, (version, rows)
        return self._current

    def _key_of(self, version: Version) -> tuple[str, ...]:
        key = self._explicit_key
        if key is None:
            # With REPLICA IDENTITY FULL, the Relation flags all columns, so the flags say nothing.
            key = () if version.replica_identity in ("f", "n") else version.key
        names = {column.name for column in version.columns}
        if lacking := [name for name in key if name not in names]:
            raise PgOutputError(
                f"{version.table} has no column {lacking[0]!r} in its changes",
                code="bad_option",
                parameter="key",
                table=version.table,
            )
        if len(set(key)) != len(key):
            raise PgOutputError(
                f"it names a column twice: {', '.join(key)}", code="bad_option", parameter="key"
            )
        return key

    def finish(self) -> NetChanges:
        """Return the net changes so far. More batches may be added later.

        Raises
        ------
        PgOutputError
            No batch was added, so the columns are not known.
        """
        if self._current is None:
            raise PgOutputError(
                "there are no batches to fold: give at least one, which may be empty",
                code="unfit_input",
            )
        version, rows = self._current
        result = rows.result()
        return NetChanges(
            version.table, version.relation_id, rows.key, rows.truncated, result.schema,
            result.num_rows, result.batches, self._truncated_at,
        )  # fmt: skip

    def forget(self) -> None:
        """Free the memory of the keys, after the last batch. Results stay valid."""
        self._current = None


class _NetChangeColumns:
    """The columns of a change batch, prepared for a fold."""

    def __init__(self, batch: pa.RecordBatch, version: Version) -> None:
        self.table = version.table
        self.num_rows = batch.num_rows
        operations = pc.index_in(batch.column("op"), _OPERATIONS)
        if operations.null_count:
            unknown = batch.column("op")[_first(operations.is_null())].as_py()
            raise PgOutputError(
                f"{self.table}: unknown operation {unknown!r}",
                code="unfit_input",
                table=self.table,
            )
        self.steps = _STEPS[operations.to_numpy()]
        self.head = {name: batch.column(name) for name in _HEAD}
        self.names = [column.name for column in version.columns]
        self.after = _fields(batch.column("after"))
        self.before = _fields(batch.column("before"))
        self.kinds = batch.column("old_kind")
        self.unsent_rows, self.unsent_columns = self._unsent(batch.column("unchanged"))
        if len(self.unsent_rows):
            self._fill_from_old_rows()

    def _unsent(self, unchanged: pa.Array) -> tuple[Any, Any]:
        """Return the rows and columns of the values that were not sent, as sorted unique pairs."""
        if unchanged.null_count == len(unchanged):
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        columns = pc.index_in(unchanged.flatten(), pa.array(self.names, unchanged.type.value_type))
        rows = pc.list_parent_indices(unchanged).to_numpy()
        if columns.null_count:
            at = _first(columns.is_null())
            raise PgOutputError(
                f"{self.table}: a change leaves out column {unchanged.flatten()[at].as_py()!r}, "
                "but the table has no such column",
                code="unfit_input",
                table=self.table,
            )
        pairs = np.unique(np.stack([rows, columns.to_numpy()]).astype(np.int64), axis=1)
        wrong = self.steps[pairs[0]] != UPDATE
        if wrong.any():
            raise PgOutputError(
                f"{self.table}: {self.at(int(pairs[0][wrong][0]))} is not an update, but leaves "
                "out the value of a column",
                code="unfit_input",
                table=self.table,
            )
        return np.ascontiguousarray(pairs[0]), np.ascontiguousarray(pairs[1])

    def _fill_from_old_rows(self) -> None:
        """Take a value that an update did not send from the update's old row, if that is whole.

        A value that was not sent is stored out of line (TOAST), so it is not NULL. If the old row
        has NULL there, the row is not whole, although its kind says so. That happens under
        publish_via_partition_root: a root with REPLICA IDENTITY FULL sets the kind, and a partition
        with another replica identity decides which values the row has.
        """
        whole = pc.equal(self.kinds, "O").fill_null(False).to_numpy(zero_copy_only=False)
        filled = whole[self.unsent_rows]
        for column in np.unique(self.unsent_columns[filled]).tolist():
            has = self.before[column].is_valid().to_numpy(zero_copy_only=False)
            filled &= (self.unsent_columns != column) | has[self.unsent_rows]
            rows = self.unsent_rows[filled & (self.unsent_columns == column)]
            self.after[column] = _replaced(self.after[column], self.before[column], rows)
        self.unsent_rows = self.unsent_rows[~filled]
        self.unsent_columns = self.unsent_columns[~filled]

    def at(self, row: int) -> str:
        """Return the position of a change, for errors."""
        return _at(self.head["commit_lsn"][row].as_py(), self.head["seq"][row].as_py())

    def brings_old(self) -> Any:
        """Return a boolean for each change: whether it has an old row or an old key."""
        return self.kinds.is_valid().to_numpy(zero_copy_only=False)


def _check_order(table: str, batch: pa.RecordBatch, last: tuple[int, int]) -> tuple[int, int]:
    """Refuse changes that are not in stream order; return the position of the last change."""
    for name in ("commit_lsn", "seq"):
        if batch.column(name).null_count:
            raise PgOutputError(
                f"{table}: a change has no {name}: its transaction may still be rolled back",
                code="incomplete",
                table=table,
                hint="Take the changes from a transaction or from segments, or set their commit "
                "with with_commit()",
            )
    lsns = batch.column("commit_lsn").cast(pa.uint64()).to_numpy()
    seqs = batch.column("seq").to_numpy()
    rising = (lsns[1:] > lsns[:-1]) | ((lsns[1:] == lsns[:-1]) & (seqs[1:] > seqs[:-1]))
    begins = (int(lsns[0]), int(seqs[0]))
    if begins <= last or not rising.all():
        at = 0 if begins <= last else int(np.flatnonzero(~rising)[0]) + 1
        raise PgOutputError(
            f"{table}: {_at(int(lsns[at]), int(seqs[at]))} is out of order. Give changes in stream "
            "order, by commit LSN and seq, and each change once",
            code="unfit_input",
            table=table,
        )
    return int(lsns[-1]), int(seqs[-1])


def _at(commit_lsn: int, seq: int) -> str:
    return f"change {seq} of the transaction committed at {format_lsn(commit_lsn)}"


def _fields(column: pa.StructArray) -> list[pa.Array]:
    """Return the columns of a struct, null where the struct is null."""
    return list(column.flatten())


def _first(flags: pa.BooleanArray) -> int:
    """Return the index of the first true flag."""
    return int(np.flatnonzero(flags.to_numpy(zero_copy_only=False))[0])


def _replaced(column: pa.Array, other: pa.Array, rows: Any) -> pa.Array:
    """Return a column with the values of another column in some rows."""
    count = len(column)
    numbers = np.arange(count)
    numbers[rows] += count
    return pa.concat_arrays([column, other]).take(pa.array(numbers))


class _ResultRows:
    """The rows of net changes, read from a store in batches.

    Parameters
    ----------
    store : RowStore
    schema : pyarrow.Schema
    num_rows : int
    rows : callable
        Takes a reader of the store and a slice of the result's rows; returns the columns of these
        rows.
    """

    def __init__(
        self,
        store: RowStore,
        schema: pa.Schema,
        num_rows: int,
        rows: Callable[[RowReader, slice], list[pa.Array]],
    ) -> None:
        self._store, self._rows = store, rows
        self.schema, self.num_rows = schema, num_rows

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Iterate over all rows in batches."""
        size = max(self._store.size // max(self._store.count, 1), 1)
        step = max(min(_ROWS_AT_ONCE, _BYTES_AT_ONCE // size), 1)
        for first in range(0, self.num_rows, step):
            columns = self._rows(self._store.reader(), slice(first, first + step))
            yield pa.RecordBatch.from_arrays(columns, schema=self.schema)


# --- tables with a key ---------------------------------------------------------------------------


class _Keyed:
    """The rows of a table with a key."""

    def __init__(self, key: tuple[str, ...], store: RowStore) -> None:
        self.key = key
        self._store = store
        # Name and type of each column of all versions. The store names columns by their index here,
        # because a column that was dropped and created again is another column.
        self._columns: list[tuple[str, pa.DataType]] = []
        # For each column of the newest version, its index in `_columns`.
        self._current: list[int] = []
        # For each version, its columns and the number of its first change.
        self._versions: list[tuple[set[int], int]] = []
        self._folder: Any = None

    @property
    def truncated(self) -> bool:
        """Whether the table has to be emptied first."""
        return bool(self._folder.truncated)

    def meet(self, version: Version) -> None:
        """Prepare for changes with the columns of a version."""
        indices = {self._columns[i][0]: i for i in self._current}
        current = []
        for column in version.columns:
            if column.name in indices:
                current.append(indices[column.name])
                self._columns[current[-1]] = (column.name, column.type)
            else:
                current.append(len(self._columns))
                self._columns.append((column.name, column.type))
        self._current = current
        self._versions.append((set(current), self._store.count))
        self._key_at = [current[self._position(version, name)] for name in self.key]
        key_types = [self._columns[i][1] for i in self._key_at]
        integers = is_integer(key_types)
        if self._folder is None:
            self._integers = integers
            self._folder = twin("apply._folder").Fold(len(self._columns), integers)
        else:
            self._folder.widen(len(self._columns))
        fields = [pa.field(str(i), type_) for i, (_, type_) in enumerate(self._columns)]
        fields += [pa.field(f"key {n}", type_) for n, type_ in enumerate(key_types)]
        fields += [pa.field(name, type_) for name, type_ in _HEAD.items()]
        self._store.schema = pa.schema(fields)

    @staticmethod
    def _position(version: Version, name: str) -> int:
        return [column.name for column in version.columns].index(name)

    def truncate(self) -> None:
        """Drop all rows; the target's rows have to go, too."""
        self._folder.truncate()
        self._store.clear()
        self._versions = [(columns, 0) for columns, _ in self._versions]

    def add(self, changes: _NetChangeColumns) -> None:
        """Add changes."""
        count, steps, old = changes.num_rows, changes.steps, changes.brings_old()
        if self._store.count + count > MOST_CHANGES:
            raise PgOutputError(
                f"{changes.table}: one transaction, or one window, has more than {MOST_CHANGES:,} "
                "changes of this table",
                code="not_supported",
                table=changes.table,
                hint=(
                    "Request a new snapshot of the table, or give a smaller ",
                    Argument("window_bytes"),
                ),
            )
        at = [changes.names.index(name) for name in self.key]
        before = [changes.before[i] for i in at]
        brings = (steps == DELETE) | ((steps == UPDATE) & old)
        for name, i, column in zip(self.key, at, before, strict=True):
            # The old row has the key if the change is a delete, or an update that does not send a
            # key value that is stored out of line.
            if changes.after[i].null_count:
                empty = changes.after[i].is_null().to_numpy(zero_copy_only=False)
                changes.after[i] = _replaced(changes.after[i], column, np.flatnonzero(empty))
            lacks = changes.after[i].is_null().to_numpy(zero_copy_only=False)
            lacks |= brings & column.is_null().to_numpy(zero_copy_only=False)
            if lacks.any():
                where = changes.at(int(np.flatnonzero(lacks)[0]))
                raise NullKeyError(
                    f"{changes.table}: {where} has no value in the key column {name!r}, so sync "
                    "cannot find the row that it changes. Give the columns of the table's replica "
                    "identity as its key; if a policy replaces this value by NULL, choose another "
                    f"policy{_PARTITIONS}",
                    table=changes.table,
                )
        is_key = np.isin(changes.unsent_columns, at)
        unsent_rows = changes.unsent_rows[~is_key]
        unsent_columns = np.array(self._current, np.int64)[changes.unsent_columns[~is_key]]
        order = np.lexsort((unsent_columns, unsent_rows))
        moved = np.flatnonzero((steps == UPDATE) & old)
        row = self._folder.add(
            self._store.count,
            steps,
            keys_of([changes.after[i] for i in at], count),
            moved,
            keys_of([column.take(pa.array(moved)) for column in before], len(moved)),
            np.ascontiguousarray(unsent_rows[order]),
            np.ascontiguousarray(unsent_columns[order]),
        )
        if row >= 0:
            self._refuse(changes, row, at)
        self._store.append(
            [
                *self._in_order(changes.after, count),
                *before,
                *(changes.head[name].cast(type_) for name, type_ in _HEAD.items()),
            ]
        )

    def _in_order(self, columns: list[pa.Array], count: int) -> list[pa.Array]:
        """Return columns of the newest version in the store's order; others are null."""
        by_number = dict(zip(self._current, columns, strict=True))
        return [
            by_number[i] if i in by_number else pa.nulls(count, type_)
            for i, (_, type_) in enumerate(self._columns)
        ]

    def _refuse(self, changes: _NetChangeColumns, row: int, at: list[int]) -> NoReturn:
        occupied = self._folder.fault == OCCUPIED
        moved = not occupied and changes.steps[row] == UPDATE and changes.brings_old()[row]
        columns = changes.before if moved else changes.after
        values = ", ".join(repr(columns[i][row].as_py()) for i in at)
        reason = (
            "after the changes before it, a row with this key exists already"
            if occupied
            else "after the changes before it, no row with this key exists"
        )
        raise PgOutputError(
            f"{changes.table}, row ({', '.join(self.key)}) = ({values}): {changes.at(row)} does "
            f"not fit: {reason}. Changes are missing, or these columns are not the table's key",
            code="unfit_row",
            table=changes.table,
        )

    def result(self) -> _ResultRows:
        """Return the rows of the net changes."""
        followed = self._folder.followed()
        if (followed.last[1:] < followed.last[:-1]).any():
            # In this order, the store is read from its begin to its end.
            order = np.argsort(followed.last, kind="stable")
            *arrays, sources = followed
            followed = Followed._make((*(array[order] for array in arrays), sources))
        row = [pa.field(self._columns[i][0], self._columns[i][1]) for i in self._current]
        schema = _result_schema(row, [field for field in row if field.name in self.key])
        # Not a method of this class: its reference to the folder would keep that in memory.
        rows = _KeyedRows(
            followed, schema, self._current, self._key_at, [*self._versions],
            "any" if self.truncated else "absent",
        )  # fmt: skip
        return _ResultRows(self._store, schema, len(followed.last), rows.columns)


class _KeyedRows(NamedTuple):
    """Reads the rows of a table with a key from the store; for the fields see `_Keyed`."""

    followed: Followed
    schema: pa.Schema
    current: list[int]
    key_at: list[int]
    versions: list[tuple[set[int], int]]
    absent: str

    def columns(self, reader: RowReader, part: slice) -> list[pa.Array]:
        """Return the columns of some rows of the result."""
        last, is_present = self.followed.last[part], self.followed.there[part]
        found_rows = reader.find(last)
        upserts = reader.find(last, ~is_present)
        row = list(self.schema.field("row").type)
        values, unsent = [], []
        for i, field in zip(self.current, row, strict=True):
            lacks, sources = self._lacking(i, part)
            at = upserts
            if lacks is not None:
                at = reader.find(np.where(lacks, last, sources), lacks | ~is_present)
            value = reader.take(field.with_name(str(i)), at)
            if i in self.key_at and not is_present.all():
                # A delete, or an update that moves the row to another key, has the key in its old
                # row.
                old = reader.take(field.with_name(f"key {self.key_at.index(i)}"), found_rows)
                value = _replaced(value, old, np.flatnonzero(~is_present))
            values.append(value)
            unsent.append(np.zeros(len(last), bool) if lacks is None else lacks & is_present)
        origins = self.followed.origins[part]
        came = reader.find(np.where(origins == UNKNOWN, last, origins), origins == UNKNOWN)
        from_ = list(self.schema.field("from_").type)
        names = [field.name for field in row]
        numbers = [self.key_at.index(self.current[names.index(field.name)]) for field in from_]
        keys = [
            reader.take(field.with_name(f"key {number}"), came)
            for field, number in zip(from_, numbers, strict=True)
        ]
        return [
            _chosen(is_present, "upsert", "delete"),
            pa.StructArray.from_arrays(values, fields=row),
            _chosen(self.followed.is_in_table[part], "present", self.absent),
            _names_of(np.array(unsent).T.reshape(len(last), -1), self.schema.field("row").type),
            pa.StructArray.from_arrays(keys, fields=from_, mask=pa.array(origins == UNKNOWN)),
            *(reader.take(pa.field(name, type_), found_rows) for name, type_ in _HEAD.items()),
        ]

    def _lacking(self, column: int, part: slice) -> tuple[Any, Any]:
        """Return which rows lack a value of a column, and the change that sent each other value.

        Returns None twice if the last change of each row has sent the value.
        """
        sources, vectors = self.followed.last[part], self.followed.vectors[part]
        mixed = vectors >= 0
        if mixed.any():
            sources = sources.copy()
            sources[mixed] = self.followed.sources[vectors[mixed], column]
        elif len(self.versions) == 1:
            return None, None
        begins = np.array([begin for _, begin in self.versions])
        has_column = np.array([column in columns for columns, _ in self.versions])
        return (sources == UNKNOWN) | ~has_column[
            np.searchsorted(begins, sources, "right") - 1
        ], sources


def _result_schema(row: list[pa.Field], key: list[pa.Field], *more: pa.Field) -> pa.Schema:
    return pa.schema(
        [
            pa.field("op", pa.string()),
            pa.field("row", pa.struct(row)),
            pa.field("expects", pa.string()),
            pa.field("unchanged", pa.list_(pa.string())),
            pa.field("from_", pa.struct(key)),
            *(pa.field(name, type_) for name, type_ in _HEAD.items()),
            *more,
        ]
    )


def _chosen(flags: Any, yes: str, no: str) -> pa.Array:
    """Return one of two words for each flag."""
    return pc.if_else(pa.array(flags), yes, no)


def _names_of(flags: Any, row: pa.StructType) -> pa.Array:
    """Return for each row the names of the columns whose flags are set; null if there are none."""
    counts = flags.sum(axis=1)
    names = pa.array([field.name for field in row], pa.string())
    items = names.take(pa.array(np.nonzero(flags)[1]))
    ends = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(ends), items, mask=pa.array(counts == 0))


# --- tables without a key ------------------------------------------------------------------------


class _Multiset:
    """The rows of a table without a key: how many equal rows are added and removed."""

    key: tuple[str, ...] = ()

    def __init__(self, version: Version, store: RowStore) -> None:
        self._store = store
        self._version = version
        # For each row in the store: a digest, which equal rows share; 1 if added, -1 if removed.
        self._digests: list[Any] = []
        self._counts: list[Any] = []
        self.truncated = False

    def meet(self, version: Version) -> None:
        """Prepare for changes with the columns of a version, which must be the same as before."""
        old, new = ([column.name for column in each.columns] for each in (self._version, version))
        if old != new:
            raise PgOutputError(
                f"{version.table} has no key, and its columns changed between the changes, so rows "
                "from before cannot be matched with rows from after. Fold the changes before and "
                "after it separately",
                code="unfit_schema",
                table=version.table,
            )
        self._version = version
        fields = [pa.field(str(i), column.type) for i, column in enumerate(version.columns)]
        fields += [pa.field(name, type_) for name, type_ in _HEAD.items()]
        self._store.schema = pa.schema(fields)

    def truncate(self) -> None:
        """Drop all rows; the target's rows have to go, too."""
        self._store.clear()
        self._digests, self._counts = [], []
        self.truncated = True

    def add(self, changes: _NetChangeColumns) -> None:
        """Add changes; a change removes a row, adds a row, or does both."""
        steps = changes.steps
        whole = pc.equal(changes.kinds, "O").fill_null(False).to_numpy(zero_copy_only=False)
        lacks = (steps != INSERT) & ~whole
        lacks[changes.unsent_rows] = True
        if lacks.any():
            where = changes.at(int(np.flatnonzero(lacks)[0]))
            raise PgOutputError(
                f"{changes.table}: {where} does not have the whole old row, and the table's key is "
                "unknown",
                code="no_key",
                hint=(
                    "Give ",
                    Argument("key"),
                    f", or set REPLICA IDENTITY FULL on the table{_PARTITIONS}",
                ),
                table=changes.table,
            )
        gone, come = np.flatnonzero(steps != INSERT), np.flatnonzero(steps != DELETE)
        # In the order of the changes, the old row of an update before its new one.
        order = np.argsort(np.concatenate([gone * 2, come * 2 + 1]))
        numbers = np.concatenate([gone, come])[order]
        counts = np.repeat(np.array([-1, 1], np.int8), [len(gone), len(come)])[order]
        side = np.concatenate([gone, come + changes.num_rows])[order]
        columns = [
            pa.concat_arrays([before, after]).take(pa.array(side))
            for before, after in zip(changes.before, changes.after, strict=True)
        ]
        head = [
            changes.head[name].cast(type_).take(pa.array(numbers)) for name, type_ in _HEAD.items()
        ]
        self._store.append([*columns, *head])
        self._digests.append(digests_of(columns, len(side)))
        self._counts.append(counts)

    def _alike(self) -> tuple[Any, Any]:
        """Return, for each set of equal rows, the last row and how many are added (<0: removed)."""
        if not self._counts:
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        digests = np.concatenate(self._digests)
        order = np.lexsort((digests[:, 1], digests[:, 0]))
        digests = digests[order]
        begins = np.ones(len(order), bool)
        begins[1:] = (digests[1:] != digests[:-1]).any(axis=1)
        first = np.flatnonzero(begins)
        counts = np.add.reduceat(np.concatenate(self._counts)[order], first, dtype=np.int64)
        last = np.maximum.reduceat(order, first)
        order = np.argsort(last)
        order = order[counts[order] != 0]
        return last[order], counts[order]

    def result(self) -> _ResultRows:
        """Return the rows of the net changes."""
        row = [pa.field(column.name, column.type) for column in self._version.columns]
        schema = _result_schema(row, [], pa.field("count", pa.int64()))
        last, counts = self._alike()
        if self.truncated and (counts < 0).any():
            raise PgOutputError(
                f"{self._version.table}: after a TRUNCATE, more rows are deleted than were "
                "inserted: changes are missing",
                code="unfit_row",
                table=self._version.table,
            )

        def columns(reader: RowReader, part: slice) -> list[pa.Array]:
            found_rows, count = reader.find(last[part]), counts[part]
            values = [
                reader.take(field.with_name(str(i)), found_rows) for i, field in enumerate(row)
            ]
            return [
                _chosen(count < 0, "delete", "upsert"),
                pa.StructArray.from_arrays(values, fields=row),
                _chosen(count < 0, "present", "any"),
                pa.nulls(len(count), schema.field("unchanged").type),
                pa.nulls(len(count), schema.field("from_").type),
                *(reader.take(pa.field(name, type_), found_rows) for name, type_ in _HEAD.items()),
                pa.array(np.abs(count)),
            ]

        return _ResultRows(self._store, schema, len(last), columns)
