"""Directories with a history, made without a server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pgoutput_fast import testing
from pgoutput_fast.changelog.schema_history import CatalogRead, HistoryWriter
from pgoutput_fast.changelog.snapshot_states import SnapshotStates
from pgoutput_fast.changelog.snapshots import SnapshotFiles
from pgoutput_fast.segments import SegmentMetadata, SegmentWriter
from pgoutput_fast.types import TypeRegistry

__all__ = [
    "MOOD",
    "NEW",
    "OLD",
    "OTHER",
    "PAIR",
    "captured",
    "composite",
    "copied",
    "enum",
    "read",
    "registry",
    "transaction",
    "written",
]

METADATA = SegmentMetadata("1", "d", "s", ("p",), 180004, "UTF8", {}, {})
PAIR, MOOD, OTHER = 20_001, 20_002, 20_003


def composite(oid: int, *fields: str) -> dict[str, Any]:
    return {
        "oid": oid, "namespace": "public", "name": f"type{oid}", "kind": "c",
        "labels": [], "fields": [[name, 23, -1] for name in fields],
    }  # fmt: skip


def enum(*labels: str) -> dict[str, Any]:
    return composite(MOOD) | {"kind": "e", "labels": labels}


def registry(*types: dict[str, Any]) -> TypeRegistry:
    return TypeRegistry.from_json(json.dumps({"format_version": 1, "types": types}))


OLD, NEW = registry(composite(PAIR, "x")), registry(composite(PAIR, "y"))


def read(
    before: int,
    after: int,
    types: TypeRegistry = OLD,
    *,
    running: set[int] = frozenset(),  # type: ignore[assignment]
    unsure: set[int] = frozenset(),  # type: ignore[assignment]
    trigger: bool = False,
    name: str = "t",
) -> CatalogRead:
    tables = {
        "format_version": 1, "system_identifier": "1", "database": name, "publications": ["p"],
        "tables": [],
    }  # fmt: skip
    return CatalogRead(
        before, after, frozenset(running), frozenset(unsure), trigger, types, json.dumps(tables)
    )


def written(directory: Path, *reads: CatalogRead, messages_from: int | None = None) -> None:
    writer = HistoryWriter(directory, messages_from)
    for one in reads:
        writer.note(one)


def transaction(commit_lsn: int, *frames: bytes) -> list[bytes]:
    begun = testing.begin(7, commit_lsn, 5)
    return [begun, *frames, testing.commit(commit_lsn, commit_lsn + 8, 5)]


def captured(directory: Path, end: int, *rows: tuple[int, int, str]) -> None:
    """A directory with rows of a pair: their LSN, that of their commit, and their text."""
    table = testing.Table("t", {"p": PAIR}, 30_000)
    with SegmentWriter(directory, METADATA, confirmed_flush_lsn=50) as writer:
        for lsn, commit_lsn, text in rows:
            frames = transaction(commit_lsn, table.relation(), testing.insert(table, [text]))
            for at, frame in zip([commit_lsn, 0, lsn, commit_lsn], frames, strict=True):
                writer.write(at, frame)
        writer.flush()
        writer.advance(end)


def copied(directory: Path, lsn: int, types: object, *texts: str) -> None:
    """Have a directory hold a snapshot of that table: its rows, and what is stored as its types."""
    table = testing.Table("t", {"p": PAIR}, 30_000)
    tables = SnapshotStates(directory)
    fields: dict[str, object] = {"table": ["public", "t"]}
    order = tables.wait(table.relation_id, lsn - 1, fields, first=True)
    files = SnapshotFiles(directory, order, METADATA, lsn, 5, [table.relation()])
    files.begin()
    rows = [testing.insert(table, [text]) for text in texts]
    files.write(1, [(row, [0, len(row)]) for row in rows])
    tables.finish(order, lsn, {**fields, "files": files.finish(), "types": types})
