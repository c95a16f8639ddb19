"""What a target has of its tables, as rows of its table `_progress`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from .targets import Gap, Held, Pause, StoredColumn

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_MOMENT = pa.timestamp("us", "UTC")

PROGRESS_SCHEMA = pa.schema(
    {
        "schema": pa.string(),
        "table": pa.string(),
        "relation_id": pa.int64(),
        "stored": pa.string(),
        "version": pa.int32(),
        "lsn": pa.int64(),
        "copy_lsn": pa.int64(),
        "commit_time": _MOMENT,
        "stale": pa.string(),
        "columns": pa.string(),
        "paused": pa.string(),
        "paused_since": _MOMENT,
        "gaps": pa.string(),
        "schema_lsn": pa.int64(),
    }
)


def progress_rows(tables: Iterable[Held]) -> pa.RecordBatch:
    """Return a row for each table."""
    rows = [
        {
            "schema": one.namespace, "table": one.name, "relation_id": one.relation_id,
            "stored": one.stored, "version": one.version, "lsn": one.lsn,
            "copy_lsn": one.copy_lsn, "commit_time": one.commit_time, "stale": one.stale,
            "columns": json.dumps(one.columns),
            "paused": None if one.paused is None else one.paused.reason,
            "paused_since": None if one.paused is None else int(one.paused.since * 1e6),
            "gaps": json.dumps(one.gaps), "schema_lsn": one.schema_lsn,
        }
        for one in tables
    ]  # fmt: skip
    return pa.RecordBatch.from_pylist(rows, PROGRESS_SCHEMA)


def held_tables(rows: pa.Table | pa.RecordBatch) -> Iterator[tuple[Held, dict[str, Any]]]:
    """Yield what each row says, with the row itself, which may have more columns.

    Rows of DuckDB have no `gap`.
    """
    for name in ("commit_time", "paused_since"):
        at = rows.schema.get_field_index(name)
        moments = rows.column(name).cast(_MOMENT).cast(pa.int64())
        rows = rows.set_column(at, pa.field(name, pa.int64()), moments)
    for row in rows.to_pylist():
        paused = row["paused"]
        yield Held(
            row["relation_id"], row["schema"], row["table"], row["stored"], row["version"],
            row["lsn"], row["copy_lsn"], row["commit_time"], row["stale"],
            tuple(StoredColumn(*one) for one in json.loads(row["columns"])),
            row.get("gap"),
            None if paused is None else Pause(paused, row["paused_since"] / 1e6),
            tuple(Gap(*one) for one in json.loads(row["gaps"])),
            row["schema_lsn"],
        ), row  # fmt: skip
