"""Find the events of a sync's tables, other than changes, by comparing their table states."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ..lsn import format_lsn
from ..names import qualified

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ..apply.syncing import SyncProgress
    from ..apply.targets import StateColumn, TableState


class TableEvent(NamedTuple):
    """An event of a table. Fields: table (its name), text (what happened, after the name)."""

    table: str
    text: str


def table_events(before: SyncProgress, after: SyncProgress) -> Iterator[TableEvent]:
    """Yield the events of tables between two target states.

    Tables that became stale are left out, because the sync itself warns of them.
    """
    old_states = {table.relation_id: table for table in before.table_states if table.version}
    for new in after.table_states:
        if not new.version:
            continue  # not written yet: its first changes are paused
        old, name = old_states.get(new.relation_id), after.names[new.relation_id]
        if old is None:
            same = name == qualified(new)
            texts = ["is new" if same else f"is new; its name in the target is {name}"]
        else:
            texts = [*_texts(old, new, before.names[new.relation_id], name)]
        for text in texts:
            yield TableEvent(qualified(new), text)


def _texts(old: TableState, new: TableState, name_before: str, name: str) -> Iterator[str]:
    if qualified(old) != qualified(new):
        yield f"was {qualified(old)} before"
    if name_before != name:
        yield f"is now {name} in the target, and was {name_before} before"
    if new.copy_lsn > old.copy_lsn:
        which = "a new snapshot" if old.copy_lsn else "its snapshot"
        yield f"has {which}, as of {format_lsn(new.copy_lsn)}"
    elif old.columns and new.stale is None:
        yield from column_events(old.columns, new.columns)
    if new.version > old.version:
        yield (
            f"has new columns that do not fit its change table: its changes continue in version "
            f"{new.version} of the change table"
        )


def column_events(old: Sequence[StateColumn], new: Sequence[StateColumn]) -> Iterator[str]:
    """Yield how the columns of a state table have changed, for people."""
    before = {column.name: column for column in old}
    names = {column.name for column in new}
    # Columns are compared by their number on the server. A number with a new name is a rename.
    renamed = {
        column.number: column for column in old if column.number and column.name not in names
    }
    for column in new:
        name, was = column.name, before.get(column.name)
        if was is None and column.number in renamed:
            yield f"has column {name}, which was {renamed[column.number].name} before"
        elif was is None:
            yield f"has a new column {name}"
        elif column.form != was.form:
            yield f"now has column {name} as {column.form}, before as {was.form}"
    numbers = {column.number for column in new if column.number}
    for column in old:
        if column.name not in names and column.number not in numbers:
            yield f"has no column {column.name} any more"
