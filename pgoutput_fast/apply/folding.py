"""The net effect of a table's changes: one row for each key that they touch.

The changes are gone through once, in their order. What follows them from row to row is in
``_folder.pyx`` and ``_pure_folder.py``, and sees keys and numbers of rows alone; the values are
taken from the batches by these numbers at the end. What no key needs any more is given up from time
to time, so the memory goes by the number of keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from .._impl import twin
from ..errors import Argument, PgOutputError
from ..lsn import format_lsn
from .keys import is_integer, keys_of, rows_as_bytes
from .steps import DELETE, INSERT, OCCUPIED, UNKNOWN, UPDATE, Followed
from .versions import Version, check_follows, version_of

_OPERATIONS = pa.array(["insert", "update", "delete", "read"])
_STEPS = np.array([INSERT, UPDATE, DELETE, INSERT], np.uint8)
_HEAD = {
    "commit_lsn": pa.uint64(),
    "seq": pa.int64(),
    "commit_time": pa.timestamp("us", "UTC"),
}
_PARTITIONS = (
    ". Of a partition its own replica identity decides what its changes bring, so that it needs "
    "that of the table whose name it has here: ALTER TABLE <partition> REPLICA IDENTITY"
)
_FEW_ROWS = 1 << 18
"""Up to so many stored changes are not worth looking for those that are needed no more."""
_ROWS_AT_ONCE = 1 << 17
"""Of the result; so no column of a batch passes the 2 GiB that its offsets can address."""


class NullKeyError(PgOutputError):
    """A change brings no value of a column of its table's key."""

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
    rows : pyarrow.Table
        One row for each key, in the order in which the changes first touch them:

        ``op``
            "upsert" or "delete".
        ``row``
            Struct of the columns' newest values; of a delete, only the key.
        ``expects``
            Whether the table had the key before: "present", "absent" or "any".
        ``unchanged``
            Names of the columns for which no change has a value: the row keeps its own, or gets the
            column's default if the row is new. Null if there are none.
        ``from_``
            Struct of the row's earlier key, if its key changed: the table must have that row. Else
            null. The earlier key has a row of its own.
        ``commit_lsn``, ``seq``, ``commit_time``
            Position and time of the key's last change.
        ``count``
            Only for a multiset: how many equal rows to add ("upsert") or remove ("delete").
    truncated_at : int or None
        Commit time of the last truncate, in microseconds since 1970.
    """

    table: str
    relation_id: int | None
    key: tuple[str, ...]
    truncated: bool
    rows: pa.Table
    truncated_at: int | None = None


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
    is_one = hasattr(changes, "__arrow_c_array__") or isinstance(changes, pa.Table)
    if not is_one and not isinstance(changes, Iterable):
        raise TypeError(
            f"changes must be an iterable of change batches, not {type(changes).__name__}"
        )
    for batch in [changes] if is_one else changes:
        folding.add(batch)
    return folding.finish()


class Folding:
    """A fold that goes on: batches are added one by one.

    Parameters
    ----------
    key : sequence of str, optional
        As :func:`fold` takes it.
    """

    def __init__(self, key: Sequence[str] | None = None) -> None:
        if isinstance(key, str):
            raise PgOutputError(
                f"{key!r} is one text, and a key is a sequence of names",
                code="bad_option",
                parameter="key",
                hint=("Give ", Argument("key", [key])),
            )
        self._given_key = None if key is None else tuple(key)
        self._last = (-1, -1)
        self._schema: pa.Schema | None = None
        self._going: tuple[Version, _Keyed | _Multiset] | None = None
        self._truncated_at: int | None = None

    def add(self, batch: Any) -> None:
        """Take the changes of a batch, which follow those before."""
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
        version, rows = self._met(batch.schema)
        if not batch.num_rows:
            return
        self._last = _check_order(version.table, batch, self._last)
        truncates = pc.equal(batch.column("op"), "truncate").to_numpy(zero_copy_only=False)
        if truncates.any():
            # Whatever was before the last of them is gone.
            rows.truncate()
            last = int(np.flatnonzero(truncates)[-1])
            self._truncated_at = batch.column("commit_time").cast(pa.int64())[last].as_py()
            batch = batch.slice(last + 1)
        if batch.num_rows:
            rows.add(_NetChanges(batch, version))

    def _met(self, schema: pa.Schema) -> tuple[Version, _Keyed | _Multiset]:
        """The version of a batch, and the rows of the table, which know it."""
        if self._going is not None and schema.equals(self._schema, check_metadata=True):
            return self._going
        version = version_of(schema)
        key = self._key_of(version)
        rows: _Keyed | _Multiset
        if self._going is None:
            rows = _Keyed(key) if key else _Multiset(version)
        else:
            old, rows = self._going
            check_follows(old, version)
            if key != rows.key:
                raise PgOutputError(
                    f"the key of {version.table} changed from ({', '.join(rows.key)}) to "
                    f"({', '.join(key)}): fold the changes before and after it apart",
                    code="unfit_schema",
                    table=version.table,
                )
        rows.meet(version)
        self._schema, self._going = schema, (version, rows)
        return self._going

    def _key_of(self, version: Version) -> tuple[str, ...]:
        key = self._given_key
        if key is None:
            # FULL flags all columns, whether they are a key or not.
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
        """What the changes did.

        Raises
        ------
        PgOutputError
            There was no batch, so nothing tells the columns.
        """
        if self._going is None:
            raise PgOutputError(
                "there are no batches to fold, not even one without rows", code="unfit_input"
            )
        version, rows = self._going
        truncated, table = rows.result()
        return NetChanges(
            version.table, version.relation_id, rows.key, truncated, table, self._truncated_at
        )


class _NetChanges:
    """The columns of a batch, as the fold reads them."""

    def __init__(self, batch: pa.RecordBatch, version: Version) -> None:
        self.table = version.table
        self.num_rows = batch.num_rows
        operations = pc.index_in(batch.column("op"), _OPERATIONS)
        if operations.null_count:
            unknown = batch.column("op")[_first(operations.is_null())].as_py()
            raise PgOutputError(
                f"{self.table}: there is no operation {unknown!r}",
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
        """Pairs of row and column of what was not sent, in order and each once."""
        if unchanged.null_count == len(unchanged):
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        columns = pc.index_in(unchanged.flatten(), pa.array(self.names, unchanged.type.value_type))
        rows = pc.list_parent_indices(unchanged).to_numpy()
        if columns.null_count:
            at = _first(columns.is_null())
            raise PgOutputError(
                f"{self.table}: a change does not bring the column "
                f"{unchanged.flatten()[at].as_py()!r}, which its table has not",
                code="unfit_input",
                table=self.table,
            )
        pairs = np.unique(np.stack([rows, columns.to_numpy()]).astype(np.int64), axis=1)
        wrong = self.steps[pairs[0]] != UPDATE
        if wrong.any():
            raise PgOutputError(
                f"{self.table}: {self.at(int(pairs[0][wrong][0]))} is no update, and leaves out "
                "the value of a column",
                code="unfit_input",
                table=self.table,
            )
        return np.ascontiguousarray(pairs[0]), np.ascontiguousarray(pairs[1])

    def _fill_from_old_rows(self) -> None:
        """Take what an update did not send from its old row, where that is whole.

        Such a value is stored out of line, so it is not NULL. An old row that has NULL for it is
        not whole, though it is called so: under publish_via_partition_root the root with REPLICA
        IDENTITY FULL tells the kind, and a partition with another identity what the row has.
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
        """Where a change is, for errors."""
        return _at(self.head["commit_lsn"][row].as_py(), self.head["seq"][row].as_py())

    def brings_old(self) -> Any:
        """Which rows bring something of the row before: booleans."""
        return self.kinds.is_valid().to_numpy(zero_copy_only=False)


def _check_order(table: str, batch: pa.RecordBatch, last: tuple[int, int]) -> tuple[int, int]:
    """Refuse changes that are not behind one another; returns where the last one is."""
    for name in ("commit_lsn", "seq"):
        if batch.column(name).null_count:
            raise PgOutputError(
                f"{table}: a change has no {name}. Its transaction may yet be rolled back",
                code="incomplete",
                table=table,
                hint="Take "
                "the changes from a transaction, from segments, or fill in their commit by "
                "with_commit()",
            )
    lsns = batch.column("commit_lsn").cast(pa.uint64()).to_numpy()
    seqs = batch.column("seq").to_numpy()
    rising = (lsns[1:] > lsns[:-1]) | ((lsns[1:] == lsns[:-1]) & (seqs[1:] > seqs[:-1]))
    begins = (int(lsns[0]), int(seqs[0]))
    if begins <= last or not rising.all():
        at = 0 if begins <= last else int(np.flatnonzero(~rising)[0]) + 1
        raise PgOutputError(
            f"{table}: {_at(int(lsns[at]), int(seqs[at]))} is not behind the one before it. "
            "Changes are folded in stream order, by commit LSN and seq, and each once",
            code="unfit_input",
            table=table,
        )
    return int(lsns[-1]), int(seqs[-1])


def _at(commit_lsn: int, seq: int) -> str:
    return f"change {seq} of the transaction committed at {format_lsn(commit_lsn)}"


def _fields(column: pa.StructArray) -> list[pa.Array]:
    """The columns of a struct, null where it is."""
    return list(column.flatten())


def _first(flags: pa.BooleanArray) -> int:
    """Where the first true one is."""
    return int(np.flatnonzero(flags.to_numpy(zero_copy_only=False))[0])


def _replaced(column: pa.Array, other: pa.Array, rows: Any) -> pa.Array:
    """A column that has another one's values in some rows."""
    count = len(column)
    numbers = np.arange(count)
    numbers[rows] += count
    return pa.concat_arrays([column, other]).take(pa.array(numbers))


def _taken(column: pa.ChunkedArray, numbers: Any) -> pa.Array:
    """Values by their rows' numbers, null for `UNKNOWN`."""
    wanted = pa.array(numbers, mask=numbers == UNKNOWN)
    taken = column.take(wanted)
    return taken.combine_chunks() if isinstance(taken, pa.ChunkedArray) else taken


class _Store:
    """Changes that were added, as columns by name.

    Columns that were dropped and made again under their names are two: a column is called by a
    number.
    """

    def __init__(self) -> None:
        self._pieces: list[pa.Table] = []
        self._schema = pa.schema([])
        self.count = 0
        self.few = _FEW_ROWS

    def set_columns(self, schema: pa.Schema) -> None:
        """Go on with these columns; those that were not there are null before."""
        if self._pieces:
            self._pieces = [_conformed(self.table(), schema)]
        self._schema = schema

    def append(self, columns: Sequence[pa.Array]) -> None:
        self._pieces.append(pa.Table.from_arrays(columns, schema=self._schema))
        self.count += self._pieces[-1].num_rows

    def table(self) -> pa.Table:
        """All of them, each column in one piece as far as that can be."""
        if not self._pieces:
            return self._schema.empty_table()
        if len(self._pieces) > 1:
            whole = pa.concat_tables(self._pieces)
            self._pieces = [whole.unify_dictionaries().combine_chunks()]
        return self._pieces[0]

    def keep(self, numbers: Any) -> None:
        """Give up all changes but some, which are numbered anew in their order."""
        self._pieces = [self.table().take(pa.array(numbers))]
        self.count = len(numbers)
        self.few = max(_FEW_ROWS, 4 * self.count)

    def set_column(self, position: int, column: pa.ChunkedArray) -> None:
        """Replace a column of all changes."""
        table = self.table()
        self._pieces = [table.set_column(position, table.schema.field(position), column)]

    def clear(self) -> None:
        """Give up all of them."""
        self._pieces, self.count = [], 0


def _conformed(table: pa.Table, schema: pa.Schema) -> pa.Table:
    columns = [
        table.column(field.name).cast(field.type)
        if field.name in table.column_names
        else pa.chunked_array([pa.nulls(table.num_rows, field.type)])
        for field in schema
    ]
    return pa.Table.from_arrays(columns, schema=schema)


# --- tables with a key ---------------------------------------------------------------------------


class _Keyed:
    """The rows of a table with a key."""

    def __init__(self, key: tuple[str, ...]) -> None:
        self.key = key
        self._store = _Store()
        # Of each column that ever was: its name and type. Those of the newest version, by position.
        self._columns: list[tuple[str, pa.DataType]] = []
        self._current: list[int] = []
        # Which columns each version had, and which version a stored change has.
        self._versions: list[set[int]] = []
        self._folder: Any = None

    def meet(self, version: Version) -> None:
        """Go on with other columns."""
        known = {self._columns[i][0]: i for i in self._current}
        current = []
        for column in version.columns:
            if column.name in known:
                current.append(known[column.name])
                self._columns[current[-1]] = (column.name, column.type)
            else:
                current.append(len(self._columns))
                self._columns.append((column.name, column.type))
        self._current = current
        self._versions.append(set(current))
        self._key_at = [current[self._position(version, name)] for name in self.key]
        key_types = [self._columns[i][1] for i in self._key_at]
        integers = is_integer(key_types)
        if self._folder is None:
            self._integers = integers
            self._folder = twin("apply._folder").Folder(len(self._columns), integers)
        else:
            self._folder.widen(len(self._columns))
        fields = [pa.field(str(i), type_) for i, (_, type_) in enumerate(self._columns)]
        fields += [pa.field(f"key {n}", type_) for n, type_ in enumerate(key_types)]
        fields += [pa.field(name, type_) for name, type_ in _HEAD.items()]
        fields += [pa.field("version", pa.int32())]
        self._store.set_columns(pa.schema(fields))

    @staticmethod
    def _position(version: Version, name: str) -> int:
        return [column.name for column in version.columns].index(name)

    def truncate(self) -> None:
        """Forget all rows, the target's too."""
        self._folder.truncate()
        self._store.clear()

    def add(self, changes: _NetChanges) -> None:
        """Take changes."""
        count, steps, old = changes.num_rows, changes.steps, changes.brings_old()
        at = [changes.names.index(name) for name in self.key]
        before = [changes.before[i] for i in at]
        brings = (steps == DELETE) | ((steps == UPDATE) & old)
        for name, i, column in zip(self.key, at, before, strict=True):
            # Of a delete the old row has the key, and of an update which does not send a key that
            # is stored out of line.
            if changes.after[i].null_count:
                empty = changes.after[i].is_null().to_numpy(zero_copy_only=False)
                changes.after[i] = _replaced(changes.after[i], column, np.flatnonzero(empty))
            lacks = changes.after[i].is_null().to_numpy(zero_copy_only=False)
            lacks |= brings & column.is_null().to_numpy(zero_copy_only=False)
            if lacks.any():
                where = changes.at(int(np.flatnonzero(lacks)[0]))
                raise NullKeyError(
                    f"{changes.table}: {where} brings no value of the key's column {name!r}; "
                    "without it nobody can tell which row it changes. Give the columns of the "
                    "table's replica identity as its key; if a policy makes NULL of this value, "
                    f"choose another one{_PARTITIONS}",
                    table=changes.table,
                )
        is_key = np.isin(changes.unsent_columns, at)
        unsent_rows = changes.unsent_rows[~is_key]
        unsent_columns = np.array(self._current, np.int64)[changes.unsent_columns[~is_key]]
        order = np.lexsort((unsent_columns, unsent_rows))
        moved = np.flatnonzero((steps == UPDATE) & old)
        found = self._folder.add(
            self._store.count,
            steps,
            keys_of([changes.after[i] for i in at], count),
            moved,
            keys_of([column.take(pa.array(moved)) for column in before], len(moved)),
            np.ascontiguousarray(unsent_rows[order]),
            np.ascontiguousarray(unsent_columns[order]),
        )
        if found >= 0:
            self._refuse(changes, found, at)
        self._store.append(
            [
                *self._in_order(changes.after, count),
                *before,
                *(changes.head[name].cast(type_) for name, type_ in _HEAD.items()),
                pa.array(np.full(count, len(self._versions) - 1, np.int32)),
            ]
        )
        if self._store.count > self._store.few:
            self._give_up()

    def _in_order(self, columns: list[pa.Array], count: int) -> list[pa.Array]:
        """Columns of the newest version in the order of the store, which may have more."""
        by_number = dict(zip(self._current, columns, strict=True))
        return [
            by_number[i] if i in by_number else pa.nulls(count, type_)
            for i, (_, type_) in enumerate(self._columns)
        ]

    def _refuse(self, changes: _NetChanges, row: int, at: list[int]) -> NoReturn:
        occupied = self._folder.misfit == OCCUPIED
        moved = not occupied and changes.steps[row] == UPDATE and changes.brings_old()[row]
        columns = changes.before if moved else changes.after
        values = ", ".join(repr(columns[i][row].as_py()) for i in at)
        what = (
            "by the changes before there is a row with this key already"
            if occupied
            else "by the changes before there is no row with this key"
        )
        raise PgOutputError(
            f"{changes.table}, row ({', '.join(self.key)}) = ({values}): {changes.at(row)} does "
            f"not fit, as {what}. Changes are missing, or these columns are not the table's key",
            code="unfit_row",
            table=changes.table,
        )

    def _give_up(self) -> None:
        """Give up the changes that no row needs any more."""
        used = self._folder.used(self._store.count).astype(bool)
        numbers = np.cumsum(used) - 1
        self._store.keep(np.flatnonzero(used))
        self._folder.renumber(numbers)

    def result(self) -> tuple[bool, pa.Table]:
        """Whether the table is emptied first, and the rows."""
        self._give_up()
        followed = self._folder.followed()
        count = len(followed.rows)
        schema = self._result_schema()
        batches = [
            self._rows(followed, slice(first, first + _ROWS_AT_ONCE), schema)
            for first in range(0, count, _ROWS_AT_ONCE)
        ]
        return self._folder.truncated, pa.Table.from_batches(batches, schema)

    def _result_schema(self) -> pa.Schema:
        types = self._store.table().schema
        row = [pa.field(self._columns[i][0], types.field(str(i)).type) for i in self._current]
        return _result_schema(row, [field for field in row if field.name in self.key])

    def _rows(self, followed: Followed, part: slice, schema: pa.Schema) -> pa.RecordBatch:
        store = self._store.table()
        rows, vectors, last = followed.rows[part], followed.vectors[part], followed.last[part]
        origins, held = followed.origins[part], followed.held[part].astype(bool)
        deleted, mixed = rows == UNKNOWN, vectors >= 0
        version_of_row = store.column("version").to_numpy()
        values, unsent = [], []
        for i in self._current:
            sources = rows.copy()
            sources[mixed] = followed.sources[vectors[mixed], i]
            if len(self._versions) > 1:
                had = np.array([i in version for version in self._versions])
                sources[(sources != UNKNOWN) & ~had[version_of_row[sources]]] = UNKNOWN
            unsent.append((sources == UNKNOWN) & ~deleted)
            column = store.column(str(i))
            if i in self._key_at:
                # The change that deleted a row, or took it away, brings the key in its old row.
                old = store.column(f"key {self._key_at.index(i)}")
                column = pa.chunked_array([*column.chunks, *old.chunks], column.type)
                sources[deleted] = last[deleted] + store.num_rows
            values.append(_taken(column, sources))
        expects = np.where(held, "present", "any" if self._folder.truncated else "absent")
        from_ = [
            _taken(store.column(f"key {self.key.index(field.name)}"), origins)
            for field in schema.field("from_").type
        ]
        return pa.RecordBatch.from_arrays(
            [
                pa.array(np.where(deleted, "delete", "upsert"), pa.string()),
                pa.StructArray.from_arrays(values, fields=list(schema.field("row").type)),
                pa.array(expects, pa.string()),
                _names_of(np.array(unsent).T.reshape(len(rows), -1), schema.field("row").type),
                pa.StructArray.from_arrays(
                    from_,
                    fields=list(schema.field("from_").type),
                    mask=pa.array(origins == UNKNOWN),
                ),
                *(_taken(store.column(name), last) for name in _HEAD),
            ],
            schema=schema,
        )


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


def _names_of(flags: Any, row: pa.StructType) -> pa.Array:
    """For each row the names of the columns whose flags are set; null where there is none."""
    counts = flags.sum(axis=1)
    names = pa.array([field.name for field in row], pa.string())
    items = names.take(pa.array(np.nonzero(flags)[1]))
    ends = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(ends), items, mask=pa.array(counts == 0))


# --- tables without a key ------------------------------------------------------------------------


class _Multiset:
    """The rows of a table without a key: how many of each come and go."""

    key: tuple[str, ...] = ()

    def __init__(self, version: Version) -> None:
        self._store = _Store()
        self._version = version
        self._truncated = False

    def meet(self, version: Version) -> None:
        """Go on with the columns of a version, which must be those of before."""
        old, new = ([one.name for one in each.columns] for each in (self._version, version))
        if old != new:
            raise PgOutputError(
                f"{version.table} has no key, and its columns changed between the changes: which "
                "rows before are like which ones after it can't be told. Fold the changes before "
                "and after it apart",
                code="unfit_schema",
                table=version.table,
            )
        self._version = version
        fields = [pa.field(str(i), column.type) for i, column in enumerate(version.columns)]
        fields += [pa.field(name, type_) for name, type_ in _HEAD.items()]
        self._store.set_columns(
            pa.schema([*fields, pa.field("like", pa.large_binary()), pa.field("count", pa.int64())])
        )

    def truncate(self) -> None:
        """Forget all rows, the target's too."""
        self._store.clear()
        self._truncated = True

    def add(self, changes: _NetChanges) -> None:
        """Take changes: a row goes, a row comes, or both."""
        steps = changes.steps
        whole = pc.equal(changes.kinds, "O").fill_null(False).to_numpy(zero_copy_only=False)
        lacks = (steps != INSERT) & ~whole
        lacks[changes.unsent_rows] = True
        if lacks.any():
            where = changes.at(int(np.flatnonzero(lacks)[0]))
            raise PgOutputError(
                f"{changes.table}: {where} does not bring the whole old row, and no columns are "
                "known as its key",
                code="no_key",
                hint=(
                    "Give ",
                    Argument("key"),
                    f", or let the table have REPLICA IDENTITY FULL{_PARTITIONS}",
                ),
                table=changes.table,
            )
        gone, come = np.flatnonzero(steps != INSERT), np.flatnonzero(steps != DELETE)
        # In the order of the changes, the old row of an update before its new one.
        order = np.argsort(np.concatenate([gone * 2, come * 2 + 1]))
        numbers = np.concatenate([gone, come])[order]
        counts = np.concatenate([np.full(len(gone), -1), np.ones(len(come), np.int64)])[order]
        side = np.concatenate([gone, come + changes.num_rows])[order]
        columns = [
            pa.concat_arrays([before, after]).take(pa.array(side))
            for before, after in zip(changes.before, changes.after, strict=True)
        ]
        head = [
            changes.head[name].cast(type_).take(pa.array(numbers)) for name, type_ in _HEAD.items()
        ]
        like = rows_as_bytes(columns, len(side))
        self._store.append([*columns, *head, like, pa.array(counts)])
        if self._store.count > self._store.few:
            self._give_up()

    def _give_up(self) -> None:
        """Of rows that are alike keep the last one, with the number of all of them."""
        store = self._store.table()
        numbered = pa.table(
            {
                "like": store.column("like"),
                "count": store.column("count"),
                "number": np.arange(store.num_rows),
            }
        )
        sums = numbered.group_by("like", use_threads=False).aggregate(
            [("count", "sum"), ("number", "max"), ("number", "min")]
        )
        sums = sums.filter(pc.not_equal(sums.column("count_sum"), 0)).sort_by("number_min")
        last = sums.column("number_max").to_numpy()
        self._store.keep(last)
        counts = store.schema.get_field_index("count")
        self._store.set_column(counts, sums.column("count_sum"))

    def result(self) -> tuple[bool, pa.Table]:
        """Whether the table is emptied first, and the rows."""
        self._give_up()
        store = self._store.table()
        row = [
            pa.field(column.name, store.schema.field(str(i)).type)
            for i, column in enumerate(self._version.columns)
        ]
        schema = _result_schema(row, [], pa.field("count", pa.int64()))
        batches = [
            self._rows(part, schema) for part in store.to_batches(max_chunksize=_ROWS_AT_ONCE)
        ]
        return self._truncated, pa.Table.from_batches(batches, schema)

    def _rows(self, part: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
        counts = part.column("count").to_numpy()
        if self._truncated and (counts < 0).any():
            raise PgOutputError(
                f"{self._version.table}: more rows like one go than come after the table was "
                "truncated: changes are missing",
                code="unfit_row",
                table=self._version.table,
            )
        row = schema.field("row").type
        columns = part.columns[: row.num_fields]
        return pa.RecordBatch.from_arrays(
            [
                pa.array(np.where(counts < 0, "delete", "upsert"), pa.string()),
                pa.StructArray.from_arrays(columns, fields=list(row)),
                pa.array(np.where(counts < 0, "present", "any"), pa.string()),
                pa.nulls(len(counts), schema.field("unchanged").type),
                pa.nulls(len(counts), schema.field("from_").type),
                *(part.column(name) for name in _HEAD),
                pa.array(np.abs(counts)),
            ],
            schema=schema,
        )
