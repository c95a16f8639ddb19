"""The stored names of tables and columns in targets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..names import distinct_names

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from .targets import StateColumn, TableState

_ESCAPED = frozenset('%./\\:*?"<>|\x7f') | frozenset(map(chr, range(32)))
_LONGEST = 200
"""Maximum bytes of a stored name. File names may have 255, and some add a suffix to the name."""


def stored_table(namespace: str, name: str) -> str:
    """Return the name of a table in a target.

    Dots and characters that a path can't have become ``%XX``.
    """
    return f"{_escaped(namespace)}.{_escaped(name)}"


def _escaped(name: str) -> str:
    return "".join(f"%{ord(char):02X}" if char in _ESCAPED else char for char in name)


def free_name(wanted: str, relation_id: int, used_names: Collection[str]) -> str:
    """Return the wanted name, or a unique one if the name is in use or too long.

    Parameters
    ----------
    wanted : str
    relation_id : int
        Makes the name unique.
    used_names : collection of str
        Case-folded names that are in use.
    """
    if len(wanted.encode()) > _LONGEST:
        wanted = wanted.encode()[:_LONGEST].decode(errors="ignore")
        return f"{wanted}~{relation_id}"
    return wanted if wanted.casefold() not in used_names else f"{wanted}~{relation_id}"


def free_column(name: str, columns: Sequence[StateColumn]) -> str:
    """Return a stored name for a column that every target can tell from the other columns."""
    # A column `rowid` would hide the row number by which DuckDB finds rows.
    return distinct_names([name], ["rowid", *(column.stored_name for column in columns)])[0]


def renames(tables: Mapping[int, TableState]) -> list[tuple[int, str]]:
    """Return the renames that give all tables their present names, in order.

    When a name is reused, the newest table gets it; the earlier table was dropped, and gets another
    name. If names differ only in case, the table that is already stored keeps its name.

    Parameters
    ----------
    tables : mapping of int to TableState

    Returns
    -------
    list of (int, str)
        Relation id and stored name. Each name is free once the renames before it are done.
    """
    last: dict[str, TableState] = {}
    for table_state in tables.values():
        other = last.setdefault(_wanted(table_state), table_state)
        if (table_state.schema_lsn, table_state.relation_id) > (
            other.schema_lsn,
            other.relation_id,
        ):
            last[_wanted(table_state)] = table_state
    owners: dict[str, int] = {}
    for name, table_state in last.items():
        if table_state.stored_name == name or name.casefold() not in owners:
            owners[name.casefold()] = table_state.relation_id
    final = {}
    for relation_id, table_state in tables.items():
        wanted = _wanted(table_state)
        is_owner = owners.get(wanted.casefold()) == relation_id
        final[relation_id] = free_name(wanted, relation_id, () if is_owner else {wanted.casefold()})
    steps: list[tuple[int, str]] = []
    now = {relation_id: table_state.stored_name for relation_id, table_state in tables.items()}
    waiting = [relation_id for relation_id in tables if now[relation_id] != final[relation_id]]
    while waiting:
        relation_ids = {name.casefold(): relation_id for relation_id, name in now.items()}
        relation_id = next(
            (
                candidate
                for candidate in waiting
                if relation_ids.get(final[candidate].casefold(), candidate) == candidate
            ),
            waiting[0],
        )
        new = final[relation_id]
        if relation_ids.get(new.casefold(), relation_id) != relation_id:
            new = f"{now[relation_id]}~{relation_id}"  # a temporary name: tables swap names
        steps.append((relation_id, new))
        now[relation_id] = new
        if new == final[relation_id]:
            waiting.remove(relation_id)
    return steps


def _wanted(table_state: TableState) -> str:
    return stored_table(table_state.namespace, table_state.name)
