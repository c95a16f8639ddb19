"""A TypeRegistry from the catalogue that is recorded beside a corpus' captures.

`catalog.json` in a scenario's truth.zip holds snapshots of ``pg_type`` and its neighbours; which
extension owns a type is in the CREATE EXTENSION statements of its script.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pgoutput_fast as pf
from pgoutput_fast.types import EXTENSION_TYPES

if TYPE_CHECKING:
    from collections.abc import Iterable

    from support.recordings.corpus_files import Truth

__all__ = ["FIRST_UNPINNED_OID", "registry_of"]

FIRST_UNPINNED_OID = 10000
_EXTENSION_OF = {entry.name: entry.extension for entry in EXTENSION_TYPES}


def registry_of(truth: Truth, snapshots: Iterable[dict[str, Any]] | None = None) -> pf.TypeRegistry:
    """What the catalogue says of users' types; of a type in several snapshots the last one.

    By default in all snapshots of it.
    """
    script = truth.read("script.sql").decode("utf-8", "surrogateescape")
    created = set(re.findall(r"CREATE EXTENSION (?:IF NOT EXISTS )?\"?(\w+)", script))
    types: dict[int, dict[str, Any]] = {}
    for snapshot in truth.catalog() if snapshots is None else snapshots:
        rows = {row["oid"]: row for row in snapshot["types"]}
        ranges = {
            other["oid"]: row["oid"]
            for row in rows.values()
            if row["typtype"] == "r"
            for other in rows.values()
            if other["typtype"] == "m" and other["name"] == multirange_name(row["name"])
        }
        for oid, row in rows.items():
            if oid < FIRST_UNPINNED_OID:
                continue
            element = 0
            if row["typtype"] == "d":
                element = row["typbasetype"]
            elif row["typtype"] == "r":
                element = row["range_subtype"]
            elif row["typtype"] == "m":
                element = ranges[oid]
            elif row["typelem"] and row["typcategory"] == "A":
                element = row["typelem"]
            extension = _EXTENSION_OF.get(row["name"], "")
            types[oid] = {
                "oid": oid,
                "namespace": row["schema"],
                "name": row["name"],
                "kind": row["typtype"],
                "element": element,
                "modifier": row["typtypmod"],
                "delimiter": row["typdelim"],
                "extension": extension if extension in created else "",
                "labels": row["enum_labels"] or [],
                "fields": [
                    [name, int(type_id), modifier]
                    for _, name, type_id, modifier in row["attributes"] or []
                ],
            }
    return pf.TypeRegistry.from_json(
        json.dumps({"format_version": 1, "types": list(types.values())})
    )


def multirange_name(name: str) -> str:
    """The name that the server gives to the multirange of a range."""
    if "range" in name:
        return name.replace("range", "multirange", 1)
    return f"{name}_multirange"
