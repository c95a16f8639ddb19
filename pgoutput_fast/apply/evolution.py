"""How a state table follows its table's columns: what is added, altered, and what nobody can know.

A stream tells the columns that a table has, not what ALTER TABLE did to the rows that were there.
What it left as it was follows from the types; what a new column holds in older rows, and which one
was renamed, is in the catalogue, which the capture has read. Where neither says it, the table has
to be copied again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from ..protocol.encode import encode_fields
from ..protocol.wire import Column as WireColumn
from .naming import free_column
from .targets import AddedColumn, Alteration, Removed, Renamed, Retyped, StoredColumn
from .versions import DIGITS, ColumnVersion, Version, keeps_values

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import pyarrow as pa

    from ..catalog import CatalogTable


class Known(NamedTuple):
    """What the catalogue knows of a table.

    Attributes
    ----------
    table : CatalogTable or None
        As it is when its columns have changed; None if that is not known.
    before : CatalogTable or None
        As it was when the catalogue was read before.
    value : callable
        Gives the value of a column, by its name and the text that the catalogue has; in an array of
        length 1.
    earlier : callable
        Iterates over the table as it was at each earlier read of the catalogue, newest first.
    is_certain : bool
        Whether `table` and no other state of the catalogue is possible.
    """

    table: CatalogTable | None
    before: CatalogTable | None
    value: Callable[[str, str | None], pa.Array]
    earlier: Callable[[], Iterator[CatalogTable]]
    is_certain: bool = True

    def now(self, columns: Iterable[Any]) -> CatalogTable | None:
        """The table in the catalogue that has these columns; None if neither has."""
        found = self._matching([(one.name, one.type_id, one.type_modifier) for one in columns])
        return found[0] if found else None

    def _matching(self, wanted: list[tuple[str, Any, Any]]) -> list[CatalogTable]:
        """Those in the catalogue that have these columns, in this order: alone, or among others."""
        alone, among = [], []
        for table in (self.table, self.before):
            if table is not None:
                there = [(one.name, one.type_id, one.type_modifier) for one in table.columns]
                if there == wanted:
                    alone.append(table)
                elif [one for one in there if one in wanted] == wanted:
                    among.append(table)
        return alone or among

    def was(self, column: StoredColumn) -> CatalogTable | None:
        """The table as it was when the catalogue was read last and the column had its former type.

        None if no read tells.
        """
        for table in self.earlier():
            for one in table.columns:
                is_it = one.name == column.name if column.number is None else (
                    one.number == column.number
                )  # fmt: skip
                if is_it and (one.type_id, one.type_modifier) == column[2:4]:
                    return table
        return None

    def without(self, number: int | None) -> CatalogTable | None:
        """The table as it was when the catalogue was read last and it lacked a column of a number.

        None if no read tells.
        """
        return next(
            (table for table in self.earlier()
             if number not in {one.number for one in table.columns}), None
        )  # fmt: skip

    def is_ambiguous(self, version: Version) -> bool:
        """Whether columns of these names and types may be one or other ones."""
        if self.is_certain:
            return False
        names = {one.name for one in version.columns}
        wanted = [(one.name, one.type_id, one.type_modifier) for one in version.columns]
        numbers = [
            {one.name: one.number for one in table.columns if one.name in names}
            for table in self._matching(wanted)
        ]
        return any(one != numbers[0] for one in numbers)

    def numbers(self, version: Version) -> dict[str, int | None]:
        """The numbers of columns by name; none if the catalogue is of another time."""
        table = self.now(version.columns)
        return {} if table is None else {one.name: one.number for one in table.columns}


def is_rewritten(table: CatalogTable | None, before: CatalogTable | None) -> bool:
    """Whether a table's rows may have been written anew between two reads of the catalogue.

    A partition that only one of them has tells nothing.
    """
    if table is None or before is None or not table.file_nodes:
        return True
    now, then = _file_nodes(table), _file_nodes(before)
    return any(now[oid] != then[oid] for oid in now.keys() & then.keys())


def _file_nodes(table: CatalogTable) -> dict[int, int]:
    """The file nodes of a table and of its partitions, by relation id."""
    return dict(zip((table.relation_id, *table.partition_ids), table.file_nodes, strict=False))


def replaced(held: Sequence[StoredColumn], table: CatalogTable) -> str | None:
    """A column that is a later one in the catalogue, of the same name; None if there is none."""
    numbers = {one.name: one.number for one in table.columns}
    for one in held:
        number = numbers.get(one.name)
        if one.number is not None and number is not None and number > one.number:
            return one.name
    return None


def differs(held: Sequence[StoredColumn], table: CatalogTable) -> bool:
    """Whether a table has other columns in the catalogue than a target has."""
    published = {
        (one.name, one.type_id, one.type_modifier) for one in table.columns if one.is_published
    }
    return {(one.name, one.type_id, one.type_modifier) for one in held} != published


def relation_of(table: CatalogTable) -> bytes:
    """The Relation frame that a server would send of a table, as the catalogue has it."""
    is_whole = table.replica_identity == "f"
    key = () if table.replica_identity == "n" else table.key
    return encode_fields(
        "R", relation_id=table.relation_id, namespace=table.namespace, name=table.name,
        replica_identity=table.replica_identity,
        columns=[
            WireColumn(int(is_whole or one.name in key), one.name, one.type_id, one.type_modifier)
            for one in table.columns if one.is_published
        ],
    )  # fmt: skip


class Evolved(NamedTuple):
    """What becomes of a state table when its table has other columns.

    Attributes
    ----------
    columns : tuple of StoredColumn
        Those that it then has.
    alterations : list of AddedColumn, Retyped, Removed or Renamed
    unknown : str or None
        Why its rows are not known any more; None: they are.
    """

    columns: tuple[StoredColumn, ...]
    alterations: list[Alteration]
    unknown: str | None


def new_columns(version: Version, known: Known | None = None) -> tuple[StoredColumn, ...]:
    """The columns of a new state table."""
    numbers = {} if known is None else known.numbers(version)
    columns: list[StoredColumn] = []
    for column in version.columns:
        columns.append(_column(column, free_column(column.name, columns), numbers))
    return tuple(columns)


def turns_digits(held: Sequence[StoredColumn], version: Version) -> bool:
    """Whether columns get digits where they had a text, or the other way round.

    One column of a change table can't tell the two apart.
    """
    had = {one.name: one.form.endswith(DIGITS) for one in held}
    return any(had.get(one.name, one.is_digits) != one.is_digits for one in version.columns)


def _column(column: ColumnVersion, stored: str, numbers: dict[str, int | None]) -> StoredColumn:
    form, number = column.form, numbers.get(column.name)
    return StoredColumn(
        column.name, stored, column.type_id or 0, _modifier(column), form, number=number
    )


def _modifier(column: ColumnVersion) -> int:
    return -1 if column.type_modifier is None else column.type_modifier


def evolve(held: Sequence[StoredColumn], version: Version, known: Known) -> Evolved:
    """Find out what to do to a state table.

    Parameters
    ----------
    held : sequence of StoredColumn
        The columns that it has.
    version : Version
        Those that the table has now.
    known : Known
    """
    evolution = _Evolution(held, version, known)
    unknown = evolution.run()
    if unknown is not None:
        return Evolved(
            tuple(held),
            [],
            f"{unknown}; the stream has no change for that, so the table has to be copied again",
        )
    return Evolved(tuple(evolution.columns), evolution.alterations, None)


class _Evolution:
    """Goes through the columns, and notes what to do."""

    def __init__(self, held: Sequence[StoredColumn], version: Version, known: Known) -> None:
        self.columns = list(held)
        self._gone: list[StoredColumn] = []
        self.alterations: list[Alteration] = []
        self._version = version
        self._known = known
        self._numbers = known.numbers(version)

    def run(self) -> str | None:
        """Do it; why the rows are not known any more, or None."""
        self._number()
        if self._known.is_ambiguous(self._version):
            return "columns were dropped or renamed, and others have their names"
        names = [one.name for one in self._version.columns]
        had = [one.name for one in self.columns]
        if (
            not self._numbers
            and self._known.table is not None
            and [name for name in names if name in had] != [name for name in had if name in names]
        ):
            return (
                "its columns have changed places, or names with each other, and no catalogue that "
                "was read says how"
            )
        follows = self._followed()
        self._gone = [one for one in self.columns if one.stored not in follows.values()]
        unknown = self._remove()
        if unknown is not None:
            return unknown
        names_of = {one.stored: one.name for one in self.columns}
        self._rename({stored: name for name, stored in follows.items() if names_of[stored] != name})
        for column in self._version.columns:
            at = next((i for i, one in enumerate(self.columns) if one.name == column.name), None)
            unknown = self._add(column) if at is None else self._keep(at, column)
            if unknown is not None:
                return unknown
        return None

    def _number(self) -> None:
        """Find the numbers of the columns that there were, if they were not known yet."""
        before = self._known.before
        if before is None:
            return
        numbers = {(one.name, one.type_id): one.number for one in before.columns}
        if all((one.name, one.type_id) in numbers for one in self.columns):
            self.columns = [
                one
                if one.number is not None
                else one._replace(number=numbers[one.name, one.type_id])
                for one in self.columns
            ]

    def _followed(self) -> dict[str, str]:
        """For the columns that were there before: how they are stored."""
        found = {}
        by_number = {one.number: one for one in self.columns if one.number is not None}
        by_name = {one.name: one for one in self.columns}
        for column in self._version.columns:
            number = self._numbers.get(column.name)
            if number is not None and number in by_number:
                found[column.name] = by_number[number].stored
            elif column.name in by_name:
                one = by_name[column.name]
                # One of another number is another column, under the name of one that was dropped.
                if number is None or one.number is None:
                    found[column.name] = one.stored
        return found

    def _remove(self) -> str | None:
        """Remove the columns that the table has no more."""
        for one in self._gone:
            before = self._known.was(one)
            if before is not None and one.name in before.key:
                return f"column {one.name} of its key was dropped"
            self.columns.remove(one)
            self.alterations.append(Removed(one.stored))
        return None

    def _rename(self, names: dict[str, str]) -> None:
        """Have columns, by how they are stored, under their new names."""
        moved = []
        for stored, name in names.items():  # all of them first, so that columns can change places
            moved.append((self._store(stored, f"{stored}~"), name))
        for stored, name in moved:
            at = self._at(stored)
            self.columns[at] = self.columns[at]._replace(name=name)
            self._store(stored, name)

    def _at(self, stored: str) -> int:
        return next(i for i, one in enumerate(self.columns) if one.stored == stored)

    def _store(self, stored: str, wanted: str) -> str:
        """Store a column under another name, which is free; the name."""
        name = free_column(wanted, self.columns)
        self.alterations.append(Renamed(stored, name))
        at = self._at(stored)
        self.columns[at] = self.columns[at]._replace(stored=name)
        return name

    def _keep(self, at: int, column: ColumnVersion) -> str | None:
        """Go on with a column."""
        old = self.columns[at]
        before, after = (old.type_id, old.type_modifier), (column.type_id or 0, _modifier(column))
        if before != after and not keeps_values(before, after):
            return (
                f"the type of column {column.name} was altered (from {before[0]}, modifier "
                f"{before[1]}, to {after[0]}, modifier {after[1]}), by which the server may have "
                "made other values of those that there were"
            )
        if before != after and is_rewritten(
            self._known.now(self._version.columns), self._known.was(old)
        ):
            return (
                f"the type of column {column.name} was altered (from {before[0]}, modifier "
                f"{before[1]}, to {after[0]}, modifier {after[1]}), and the server rewrote its rows"
            )
        made = _column(column, old.stored, self._numbers)
        if before == after and made.form != old.form:
            # A cast of the target's would make other texts of them than the decoder does.
            return (
                f"column {column.name} comes as {made.form} now, and came as {old.form}, as its "
                "type was altered, or other policies or another format were chosen: older rows "
                "have to come in the same form"
            )
        self.columns[at] = made if made.number is not None else made._replace(number=old.number)
        if made.form != old.form:
            self.alterations.append(Retyped(old.stored, column.type))
        return None

    def _skips(self, table: CatalogTable, number: int | None) -> bool:
        """Whether a number between those of the columns and that of a new one is nobody's."""
        had = [one.number for one in (*self.columns, *self._gone) if one.number is not None]
        if number is None or not had:
            return False
        had += [
            one.number
            for before in self._known.earlier()
            for one in before.columns
            if one.number is not None
        ]
        there = {one.number for one in table.columns}
        return any(one not in there for one in range(max(had) + 1, number))

    def _add(self, column: ColumnVersion) -> str | None:
        """Add a column, with what rows have in it that are older."""
        table = self._known.now(self._version.columns)
        if table is None:
            return (
                f"column {column.name} is new, and no catalogue that was read says what older rows "
                "have in it"
            )
        if any(one.number is None for one in self._gone):
            return (
                f"column {column.name} is new, and may be one that was renamed: the catalogue was "
                "not read before"
            )
        if self._skips(table, self._numbers.get(column.name)):
            return (
                f"column {column.name} is new, and so may be another one that was dropped before "
                "the catalogue was read, and may have had its name"
            )
        values, number = table.added_values, self._numbers.get(column.name)
        if column.name not in values or (
            values[column.name] is None and is_rewritten(table, self._known.without(number))
        ):
            return (
                f"column {column.name} is new, and the catalogue does not say what older rows have "
                "in it, as a default was computed for each, or the table was rewritten since"
            )
        stored = free_column(column.name, self.columns)
        self.columns.append(_column(column, stored, self._numbers))
        value = self._known.value(column.name, values[column.name])
        self.alterations.append(AddedColumn(stored, value))
        return None
