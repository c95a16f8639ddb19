"""Names in targets: those of tables, and those of columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..names import distinct_names

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from .targets import Held, StoredColumn

_ESCAPED = frozenset('%./\\:*?"<>|\x7f') | frozenset(map(chr, range(32)))
_LONGEST = 200
"""Bytes of a stored name; files may have 255, and what belongs to a table has more."""


def stored_table(namespace: str, name: str) -> str:
    """The name that a table has in a target.

    What a path can't have, and a dot inside of a name, is ``%XX``.
    """
    return f"{_escaped(namespace)}.{_escaped(name)}"


def _escaped(name: str) -> str:
    return "".join(f"%{ord(char):02X}" if char in _ESCAPED else char for char in name)


def free_name(wanted: str, relation_id: int, taken: Collection[str]) -> str:
    """A name that no other table has, also where case is folded.

    Parameters
    ----------
    wanted : str
    relation_id : int
        What makes the name another one.
    taken : collection of str
        Folded names.
    """
    if len(wanted.encode()) > _LONGEST:
        wanted = wanted.encode()[:_LONGEST].decode(errors="ignore")
        return f"{wanted}~{relation_id}"
    return wanted if wanted.casefold() not in taken else f"{wanted}~{relation_id}"


def free_column(name: str, columns: Sequence[StoredColumn]) -> str:
    """A name for a column that every target tells from those of other columns."""
    # DuckDB finds rows by their `rowid`, which a column of this name would hide.
    return distinct_names([name], ["rowid", *(column.stored for column in columns)])[0]


def renames(held: Mapping[int, Held]) -> list[tuple[int, str]]:
    """How tables come to the names that they have now, one after the other.

    A name belongs to the table that had it last: one that had it before was dropped, and is stored
    under another name. Of names that differ in case alone, the one that is stored stays.

    Parameters
    ----------
    held : mapping of int to Held

    Returns
    -------
    list of (int, str)
        Relation id and stored name; each name is free when its turn comes.
    """
    last: dict[str, Held] = {}
    for one in held.values():
        other = last.setdefault(_wanted(one), one)
        if (one.schema_lsn, one.relation_id) > (other.schema_lsn, other.relation_id):
            last[_wanted(one)] = one
    owners: dict[str, int] = {}
    for name, one in last.items():
        if one.stored == name or name.casefold() not in owners:
            owners[name.casefold()] = one.relation_id
    final = {}
    for relation_id, one in held.items():
        wanted = _wanted(one)
        is_owner = owners.get(wanted.casefold()) == relation_id
        final[relation_id] = free_name(wanted, relation_id, () if is_owner else {wanted.casefold()})
    steps: list[tuple[int, str]] = []
    now = {relation_id: one.stored for relation_id, one in held.items()}
    waiting = [relation_id for relation_id in held if now[relation_id] != final[relation_id]]
    while waiting:
        taken = {name.casefold(): relation_id for relation_id, name in now.items()}
        relation_id = next(
            (one for one in waiting if taken.get(final[one].casefold(), one) == one), waiting[0]
        )
        new = final[relation_id]
        if taken.get(new.casefold(), relation_id) != relation_id:
            new = f"{now[relation_id]}~{relation_id}"  # two tables have changed places
        steps.append((relation_id, new))
        now[relation_id] = new
        if new == final[relation_id]:
            waiting.remove(relation_id)
    return steps


def _wanted(one: Held) -> str:
    return stored_table(one.namespace, one.name)
