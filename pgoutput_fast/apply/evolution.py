"""How a state table follows its table's columns: what is added, altered, and what nobody can know.

A stream tells the columns that a table has, not what ALTER TABLE did to the rows that were there.
What it left as it was follows from the types; what a new column holds in older rows is in the
catalogue, which the capture has read. Where neither says it, the table has to be copied again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from .naming import free_column
from .targets import Added, Alteration, Column, Removed, Retyped
from .versions import ColumnVersion, Version, keeps_values

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import pyarrow as pa

    from ..catalog import CatalogTable


class Evolved(NamedTuple):
    """What becomes of a state table when its table has other columns.

    Attributes
    ----------
    columns : tuple of Column
        Those that it then has.
    alterations : list of Added, Retyped or Removed
    unknown : str or None
        Why its rows are not known any more; None: they are.
    """

    columns: tuple[Column, ...]
    alterations: list[Alteration]
    unknown: str | None


def new_columns(version: Version) -> tuple[Column, ...]:
    """The columns of a new state table."""
    columns: list[Column] = []
    for column in version.columns:
        columns.append(_column(column, free_column(column.name, columns)))
    return tuple(columns)


def _column(column: ColumnVersion, stored: str) -> Column:
    form = str(column.type)
    return Column(column.name, stored, column.type_id or 0, _modifier(column), form)


def _modifier(column: ColumnVersion) -> int:
    return -1 if column.type_modifier is None else column.type_modifier


def evolve(
    held: Sequence[Column],
    version: Version,
    table: CatalogTable | None,
    value: Callable[[str, str | None], pa.Array],
) -> Evolved:
    """Find out what to do to a state table.

    Parameters
    ----------
    held : sequence of Column
        The columns that it has.
    version : Version
        Those that the table has now.
    table : CatalogTable or None
        The table as the catalogue has it now; None if that is not known.
    value : callable
        Gives the value of a column, by its name and the text that the catalogue has; in an array of
        length 1.
    """
    columns = list(held)
    alterations: list[Alteration] = []
    at = {column.name: i for i, column in enumerate(columns) if not column.is_dropped}
    names = {column.name for column in version.columns}
    for name, i in at.items():
        if name not in names:
            columns[i] = columns[i]._replace(is_dropped=True)
    for column in version.columns:
        if column.name in at:
            i = at[column.name]
            old = columns[i]
            before, after = (old.type_id, old.type_modifier), (column.type_id, _modifier(column))
            if before != after and not keeps_values(before, (after[0] or 0, after[1])):
                return Evolved(tuple(held), [], _retyped(version, old, column))
            columns[i] = _column(column, old.stored)
            if columns[i].form != old.form:
                alterations.append(Retyped(old.stored, column.type))
            continue
        dropped = next((one for one in columns if one.is_dropped and one.name == column.name), None)
        if dropped is not None:
            # It was dropped and made again: what was there is another column's.
            columns.remove(dropped)
            alterations.append(Removed(dropped.stored))
            at = {one.name: i for i, one in enumerate(columns) if not one.is_dropped}
        values = None if table is None else table.added_values
        if values is None or column.name not in values:
            return Evolved(tuple(held), [], _added(version, column, known=table is not None))
        stored = free_column(column.name, columns)
        columns.append(_column(column, stored))
        alterations.append(Added(stored, value(column.name, values[column.name])))
    return Evolved(tuple(columns), alterations, None)


def _retyped(version: Version, old: Column, new: ColumnVersion) -> str:
    return (
        f"the type of column {new.name} was altered (from {old.type_id}, modifier "
        f"{old.type_modifier}, to {new.type_id}, modifier {_modifier(new)}), by which the server "
        f"may have made other values of those that {version.table} had; no change tells them"
    )


def _added(version: Version, column: ColumnVersion, *, known: bool) -> str:
    why = (
        "the catalogue does not say what they hold, as a default was computed for each row, or the "
        "table was rewritten since"
        if known
        else "no catalogue that was read says what they hold"
    )
    return f"{version.table} has a new column {column.name}, and for rows that are older {why}"
