"""A transaction in the words of the plugin test_decoding, for tables of numbers and text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pgoutput_fast as pf

__all__ = ["Told", "told", "truth"]

Told = tuple["int | None", tuple[str, ...]]
"""The xid (None: outside of transactions), and a line for each change."""

_NAMES = {20: "bigint", 23: "integer", 25: "text"}


def told(transactions: Iterable[Any]) -> list[tuple[Any, tuple[str, ...]]]:
    """The transactions of a stream, each with its lines; those without any are left out."""
    found = []
    names: dict[int, str] = {}
    for transaction in transactions:
        lines = tuple(line for message in transaction for line in _lines(message, names))
        if lines:
            found.append((transaction, lines))
    return found


def _lines(message: Any, names: dict[int, str]) -> Iterator[str]:
    if isinstance(message, pf.Relation):
        names[message.relation_id] = f"{message.namespace}.{message.name}"
    elif isinstance(message, (pf.Insert, pf.Update, pf.Delete)):
        columns = message.relation.columns
        line = f"table {names[message.relation_id]}: {type(message).__name__.upper()}:"
        if not isinstance(message, pf.Insert) and message.old is not None:
            old = _columns(columns, message.old)
            line += f" old-key:{old} new-tuple:" if isinstance(message, pf.Update) else old
        if not isinstance(message, pf.Delete):
            line += _columns(columns, message.new, nulls=True)
        yield line
    elif isinstance(message, pf.Truncate):
        which = ", ".join(names[relation_id] for relation_id in message.relation_ids)
        flags = (" restart_seqs" if message.options & 2 else "") + (
            " cascade" if message.options & 1 else ""
        )
        yield f"table {which}: TRUNCATE:{flags or ' (no-flags)'}"
    elif isinstance(message, pf.LogicalMessage):
        yield (
            f"message: transactional: {message.flags & 1} prefix: {message.prefix}, "
            f"sz: {len(message.content)} content:{message.content.decode()}"
        )


def _columns(columns: Any, row: Any, *, nulls: bool = False) -> str:
    """Its columns; those without a value only where test_decoding shows them."""
    parts = []
    for at, column in enumerate(columns):
        value = row[at]
        if value is pf.UNCHANGED:
            shown = "unchanged-toast-datum"
        elif value is None:
            shown = "null"
        else:
            shown = str(value) if isinstance(value, int) else "'" + value.replace("'", "''") + "'"
        if nulls or value is not None:
            parts.append(f" {column.name}[{_NAMES[column.type_id]}]:{shown}")
    return "".join(parts)


def truth(database: Any, slot: str) -> list[Told]:
    """What test_decoding tells of a slot, up to now; it comes again with the next call."""
    rows = database.execute(f"SELECT data FROM pg_logical_slot_peek_changes('{slot}', NULL, NULL)")
    found: list[Told] = []
    xid, lines = None, []
    for (line,) in rows:
        if line.startswith("BEGIN "):
            xid, lines = int(line.split()[1]), []
        elif line.startswith("COMMIT "):
            if lines:
                found.append((xid, tuple(lines)))
            xid = None
        elif xid is None:
            found.append((None, (line,)))
        elif line.startswith("message: transactional: 0"):
            # One outside of transactions comes where it is, before those that are open.
            raise AssertionError(line)
        else:
            lines.append(line)
    return found
