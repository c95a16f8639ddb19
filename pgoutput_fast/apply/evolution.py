"""How the columns of a state table follow those of the server's table.

The stream has the new columns of a table, but not what ALTER TABLE did to existing rows. The types
say whether values stayed as they are. The catalogue, which the capture has read, says which column
was renamed, and which value older rows have in a new column. If neither gives the answer, the state
table is stale and needs a new snapshot.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from ..protocol.encode import encode_fields
from ..protocol.wire import Column as WireColumn
from .naming import free_column
from .targets import AddedColumn, Alteration, Removed, Renamed, Retyped, StateColumn
from .versions import DIGITS, ColumnVersion, Version, keeps_values, shown_type

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import pyarrow as pa

    from ..catalog import CatalogTable


class TableInCatalog(NamedTuple):
    """A table in several reads of the catalogue.

    Attributes
    ----------
    table : CatalogTable or None
        The table after its columns have changed; None if no read has it.
    before : CatalogTable or None
        The table in the read before that.
    value : callable
        Takes a column's name and a value's text from the catalogue; returns the value as an array
        of length 1.
    earlier : callable
        Iterates over the table in all earlier reads, newest first.
    is_certain : bool
        Whether `table` is the only state that the table can have at this point of the stream.
    """

    table: CatalogTable | None
    before: CatalogTable | None
    value: Callable[[str, str | None], pa.Array]
    earlier: Callable[[], Iterator[CatalogTable]]
    is_certain: bool = True

    def now(self, columns: Iterable[Any]) -> CatalogTable | None:
        """Return `table` or `before`, whichever has these columns; None if neither has."""
        tables = self._matching(
            [(column.name, column.type_id, column.type_modifier) for column in columns]
        )
        return tables[0] if tables else None

    def _matching(self, wanted: list[tuple[str, Any, Any]]) -> list[CatalogTable]:
        """Return the catalogue's tables with these columns in this order; exact matches go first.

        Tables with further columns are returned only if no table has exactly these columns.
        """
        alone, among = [], []
        for table in (self.table, self.before):
            if table is not None:
                columns = [
                    (column.name, column.type_id, column.type_modifier) for column in table.columns
                ]
                if columns == wanted:
                    alone.append(table)
                elif [column for column in columns if column in wanted] == wanted:
                    among.append(table)
        return alone or among

    def was(self, column: StateColumn) -> CatalogTable | None:
        """Return the table in the last read in which a column had its former type; None if none."""
        for table in self.earlier():
            for candidate in table.columns:
                is_it = candidate.name == column.name if column.number is None else (
                    candidate.number == column.number
                )  # fmt: skip
                if is_it and (candidate.type_id, candidate.type_modifier) == column[2:4]:
                    return table
        return None

    def without(self, number: int | None) -> CatalogTable | None:
        """Return the table in the last read that lacked the column with a number; None if none."""
        return next(
            (table for table in self.earlier()
             if number not in {column.number for column in table.columns}), None
        )  # fmt: skip

    def is_ambiguous(self, version: Version) -> bool:
        """Whether the catalogue leaves open which columns these are: the numbers differ by read."""
        if self.is_certain:
            return False
        names = {column.name for column in version.columns}
        wanted = [(column.name, column.type_id, column.type_modifier) for column in version.columns]
        numbers = [
            {column.name: column.number for column in table.columns if column.name in names}
            for table in self._matching(wanted)
        ]
        return any(column_numbers != numbers[0] for column_numbers in numbers)

    def numbers(self, version: Version) -> dict[str, int | None]:
        """Return the numbers of columns by name; none if no read of the catalogue matches."""
        table = self.now(version.columns)
        return {} if table is None else {column.name: column.number for column in table.columns}


def is_rewritten(table: CatalogTable | None, before: CatalogTable | None) -> bool:
    """Whether the server may have rewritten a table's rows between two reads of the catalogue.

    A rewrite changes the table's file node. Partitions that only one read has are ignored.
    """
    if table is None or before is None or not table.file_nodes:
        return True
    now, then = _file_nodes(table), _file_nodes(before)
    return any(now[oid] != then[oid] for oid in now.keys() & then.keys())


def _file_nodes(table: CatalogTable) -> dict[int, int]:
    """Return the file nodes of a table and its partitions, by relation id."""
    return dict(zip((table.relation_id, *table.partition_ids), table.file_nodes, strict=False))


def replaced(columns: Sequence[StateColumn], table: CatalogTable) -> str | None:
    """Return a column that was dropped and created again, by its higher number; None if none."""
    numbers = {column.name: column.number for column in table.columns}
    for column in columns:
        number = numbers.get(column.name)
        if column.number is not None and number is not None and number > column.number:
            return column.name
    return None


def differs(columns: Sequence[StateColumn], table: CatalogTable) -> bool:
    """Whether the target's columns differ from the published columns in the catalogue."""
    published = {
        (column.name, column.type_id, column.type_modifier)
        for column in table.columns
        if column.is_published
    }
    return {(column.name, column.type_id, column.type_modifier) for column in columns} != published


def relation_of(table: CatalogTable) -> bytes:
    """Return the Relation frame that the server would send for a table of the catalogue."""
    is_whole = table.replica_identity == "f"
    key = () if table.replica_identity == "n" else table.key
    return encode_fields(
        "R", relation_id=table.relation_id, namespace=table.namespace, name=table.name,
        replica_identity=table.replica_identity,
        columns=[
            WireColumn(
                int(is_whole or column.name in key), column.name, column.type_id,
                column.type_modifier,
            )
            for column in table.columns if column.is_published
        ],
    )  # fmt: skip


class Evolved(NamedTuple):
    """The changes to a state table after the server's table got other columns.

    Attributes
    ----------
    columns : tuple of StateColumn
        The state table's columns afterwards.
    alterations : list of AddedColumn, Retyped, Removed or Renamed
    unknown : str or None
        Why the state table becomes stale; else None.
    """

    columns: tuple[StateColumn, ...]
    alterations: list[Alteration]
    unknown: str | None


def new_columns(
    version: Version, table_in_catalog: TableInCatalog | None = None
) -> tuple[StateColumn, ...]:
    """Return the columns of a new state table."""
    numbers = {} if table_in_catalog is None else table_in_catalog.numbers(version)
    columns: list[StateColumn] = []
    for column in version.columns:
        columns.append(_column(column, free_column(column.name, columns), numbers))
    return tuple(columns)


def turns_digits(columns: Sequence[StateColumn], version: Version) -> bool:
    """Whether a column changes from plain text to digits, or back.

    One column of a change table can't hold both, because nothing in it tells them apart.
    """
    digits_before = {column.name: column.form.endswith(DIGITS) for column in columns}
    return any(
        digits_before.get(column.name, column.is_digits) != column.is_digits
        for column in version.columns
    )


def _in_same_order(columns: Sequence[ColumnVersion], others: Sequence[StateColumn]) -> bool:
    """Whether the names that both have come in the same order."""
    names, other_names = ({column.name: None for column in each} for each in (columns, others))
    return [name for name in names if name in other_names] == [
        name for name in other_names if name in names
    ]


def _column(column: ColumnVersion, stored_name: str, numbers: dict[str, int | None]) -> StateColumn:
    form, number = column.form, numbers.get(column.name)
    return StateColumn(
        column.name, stored_name, column.type_id or 0, _modifier(column), form, number=number
    )


def _modifier(column: ColumnVersion) -> int:
    return -1 if column.type_modifier is None else column.type_modifier


def evolve(
    columns: Sequence[StateColumn], version: Version, table_in_catalog: TableInCatalog
) -> Evolved:
    """Compute the alterations of a state table, or why it becomes stale.

    Parameters
    ----------
    columns : sequence of StateColumn
        The columns of the state table.
    version : Version
        The columns of the server's table now.
    table_in_catalog : TableInCatalog
    """
    evolution = _Evolution(columns, version, table_in_catalog)
    unknown = evolution.run()
    if unknown is not None:
        return Evolved(
            tuple(columns),
            [],
            f"{unknown}. The stream does not show the effect on existing rows, so the table needs "
            "a new snapshot",
        )
    return Evolved(tuple(evolution.columns), evolution.alterations, None)


class _Evolution:
    """Collects the alterations of one state table."""

    def __init__(
        self, columns: Sequence[StateColumn], version: Version, table_in_catalog: TableInCatalog
    ) -> None:
        self.columns = list(columns)
        self._gone: list[StateColumn] = []
        self.alterations: list[Alteration] = []
        self._version = version
        self._in_catalog = table_in_catalog
        self._numbers = table_in_catalog.numbers(version)

    def run(self) -> str | None:
        """Collect the alterations; return why the table becomes stale, or None."""
        self._number()
        if self._in_catalog.is_ambiguous(self._version):
            return "columns were dropped or renamed, and other columns have their names"
        if (
            not self._numbers
            and self._in_catalog.table is not None
            and not _in_same_order(self._version.columns, self.columns)
        ):
            return (
                "its columns changed their order or exchanged their names, and no read of the "
                "catalogue says how"
            )
        follows = self._followed()
        self._gone = [
            column for column in self.columns if column.stored_name not in follows.values()
        ]
        unknown = self._remove()
        if unknown is not None:
            return unknown
        names_of = {column.stored_name: column.name for column in self.columns}
        self._rename(
            {
                stored_name: name
                for name, stored_name in follows.items()
                if names_of[stored_name] != name
            }
        )
        indexes = {column.name: index for index, column in enumerate(self.columns)}
        for column in self._version.columns:
            at = indexes.get(column.name)
            unknown = self._add(column) if at is None else self._keep(at, column)
            if unknown is not None:
                return unknown
        return None

    def _number(self) -> None:
        """Fill in missing numbers of the state table's columns, from the read `before`."""
        before = self._in_catalog.before
        if before is None:
            return
        numbers = {(column.name, column.type_id): column.number for column in before.columns}
        if all((column.name, column.type_id) in numbers for column in self.columns):
            self.columns = [
                column
                if column.number is not None
                else column._replace(number=numbers[column.name, column.type_id])
                for column in self.columns
            ]

    def _followed(self) -> dict[str, str]:
        """Return the stored names of the columns that the state table already has, by name."""
        stored_names = {}
        by_number = {column.number: column for column in self.columns if column.number is not None}
        by_name = {column.name: column for column in self.columns}
        for column in self._version.columns:
            number = self._numbers.get(column.name)
            if number is not None and number in by_number:
                stored_names[column.name] = by_number[number].stored_name
            elif column.name in by_name:
                old = by_name[column.name]
                # With another number, this is a new column under the name of a dropped one.
                if number is None or old.number is None:
                    stored_names[column.name] = old.stored_name
        return stored_names

    def _remove(self) -> str | None:
        """Remove the columns that the server's table no longer has."""
        for column in self._gone:
            before = self._in_catalog.was(column)
            if before is not None and column.name in before.key:
                return f"its key column {column.name} was dropped"
            self.columns.remove(column)
            self.alterations.append(Removed(column.stored_name))
        return None

    def _rename(self, names: dict[str, str]) -> None:
        """Rename columns, given by their stored names."""
        moved = []
        for stored_name, name in names.items():  # first to temporary names: columns may swap names
            moved.append((self._store(stored_name, f"{stored_name}~"), name))
        for stored_name, name in moved:
            at = self._at(stored_name)
            self.columns[at] = self.columns[at]._replace(name=name)
            self._store(stored_name, name)

    def _at(self, stored_name: str) -> int:
        return next(i for i, column in enumerate(self.columns) if column.stored_name == stored_name)

    def _store(self, stored_name: str, wanted: str) -> str:
        """Store a column under a free name like the wanted one, and return that name."""
        name = free_column(wanted, self.columns)
        self.alterations.append(Renamed(stored_name, name))
        at = self._at(stored_name)
        self.columns[at] = self.columns[at]._replace(stored_name=name)
        return name

    def _keep(self, at: int, column: ColumnVersion) -> str | None:
        """Update an existing column to its new version; return why the table becomes stale."""
        old = self.columns[at]
        before, after = (old.type_id, old.type_modifier), (column.type_id or 0, _modifier(column))
        if before != after and not keeps_values(before, after):
            return (
                f"the type of column {column.name} was altered from {shown_type(*before)} to "
                f"{shown_type(*after)}, and the server may have converted existing values"
            )
        if before != after and is_rewritten(
            self._in_catalog.now(self._version.columns), self._in_catalog.was(old)
        ):
            return (
                f"the type of column {column.name} was altered from {shown_type(*before)} to "
                f"{shown_type(*after)}, and the server rewrote the table"
            )
        new = _column(column, old.stored_name, self._numbers)
        if before == after and new.form != old.form:
            # The target can't convert older values: its casts give other texts than the decoder.
            return (
                f"new rows have column {column.name} as {new.form}, and older rows have it as "
                f"{old.form}, because its type was altered, or the policies or the format changed"
            )
        self.columns[at] = new if new.number is not None else new._replace(number=old.number)
        if new.form != old.form:
            self.alterations.append(Retyped(old.stored_name, column.type))
        return None

    def _skips(self, table: CatalogTable, number: int | None) -> bool:
        """Whether a column between the known ones and a new one was created and dropped unseen."""
        old_numbers = [
            column.number for column in (*self.columns, *self._gone) if column.number is not None
        ]
        if number is None or not old_numbers:
            return False
        old_numbers += [
            column.number
            for before in self._in_catalog.earlier()
            for column in before.columns
            if column.number is not None
        ]
        numbers = {column.number for column in table.columns}
        return any(candidate not in numbers for candidate in range(max(old_numbers) + 1, number))

    def _add(self, column: ColumnVersion) -> str | None:
        """Add a column with its value in older rows; return why the table becomes stale."""
        table = self._in_catalog.now(self._version.columns)
        if table is None:
            return (
                f"column {column.name} is new, and no read of the catalogue says which value older "
                "rows have in it"
            )
        if any(old.number is None for old in self._gone):
            return (
                f"column {column.name} is new or a renamed column: the catalogue was not read "
                "before the change"
            )
        if self._skips(table, self._numbers.get(column.name)):
            return (
                f"column {column.name} is new, and another column may have had its name before: it "
                "was created and dropped between two reads of the catalogue"
            )
        values, number = table.added_values, self._numbers.get(column.name)
        if column.name not in values or (
            values[column.name] is None and is_rewritten(table, self._in_catalog.without(number))
        ):
            return (
                f"column {column.name} is new, and the catalogue does not say which value older "
                "rows have in it: the server computed a default for each row, or rewrote the table "
                "later"
            )
        stored_name = free_column(column.name, self.columns)
        self.columns.append(_column(column, stored_name, self._numbers))
        value = self._in_catalog.value(column.name, values[column.name])
        self.alterations.append(AddedColumn(stored_name, value))
        return None
