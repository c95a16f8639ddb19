"""Names in targets: those of tables, and those of columns where letters' case is folded."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from .targets import Column
    from .versions import Version

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


def free_column(name: str, columns: Sequence[Column]) -> str:
    """A name for a column that differs from those of other columns also where case is folded."""
    taken = {column.stored.casefold() for column in columns}
    while name.casefold() in taken:
        name += "_"
    return name


def stored_names(version: Version, columns: Sequence[Column]) -> list[str]:
    """The names that the columns of changes have in the target, as its columns say."""
    known = {column.name: column.stored for column in columns if not column.is_dropped}
    return [known[column.name] for column in version.columns]
