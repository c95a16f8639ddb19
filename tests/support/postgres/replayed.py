"""The rows that changes leave, and that each change is there once and fits those before it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pgoutput_fast.spark._envelopes import PLACEHOLDER

__all__ = ["change_of", "replay"]

_OPS = {"r": "read", "c": "insert", "u": "update", "d": "delete", "t": "truncate"}


def replay(changes: Iterable[Mapping[str, Any]], key: Sequence[str] = ("id",)) -> list[Any]:
    """The rows of a table, each a tuple of its values, in an order.

    A change that is there twice is refused, as is one of a row that no change before it made: so
    what is lost or doubled is found even where the rows in the end are the same.

    Parameters
    ----------
    changes : iterable of mapping
        With the columns of the source's changes, or those of `change_of`, in any order.
    key : sequence of str
        The columns that identify a row.
    """
    found = list(changes)
    ordered = {_place(change): change for change in found}
    assert len(ordered) == len(found), "a change is there twice"
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for _, change in sorted(ordered.items()):
        op, before, after = change["op"], change["before"], change["after"]
        if op == "truncate":
            rows.clear()
            continue
        held: dict[str, Any] = {}
        if op in ("update", "delete"):
            of = before or after
            held = rows.pop(tuple(of[name] for name in key))  # KeyError: it was lost
        if op != "delete":
            row = {**after, **{name: held[name] for name in change["unchanged"] or ()}}
            place = tuple(row[name] for name in key)
            assert place not in rows, f"a row under {place} is there already"
            rows[place] = row
    return sorted((tuple(row.values()) for row in rows.values()), key=repr)


def _place(change: Mapping[str, Any]) -> tuple[int, ...]:
    return change["commit_lsn"], change["seq"], change.get("part", 0)


def change_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """The change that a record of mode `envelope` tells."""
    value = json.loads(record["value"])
    before, after = value["before"], value["after"]
    op = _OPS[value["op"]]
    return {
        **{name: record[name] for name in ("commit_lsn", "seq", "part")},
        "op": op,
        # The key before an update is that behind it: where it changes, the record is another one.
        "before": before if op == "delete" else None,
        "after": after,
        "unchanged": [name for name, one in (after or {}).items() if one == PLACEHOLDER],
    }
