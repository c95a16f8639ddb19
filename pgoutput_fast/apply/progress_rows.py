"""Convert table states to rows of a target's table `_progress`, and back."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from .targets import Gap, Pause, StateColumn, TableState

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


def progress_fields(table_state: TableState) -> dict[str, Any]:
    """Return a table state as fields, which are also valid JSON."""
    return {
        "schema": table_state.namespace, "table": table_state.name,
        "relation_id": table_state.relation_id, "stored": table_state.stored_name,
        "version": table_state.version, "lsn": table_state.lsn, "copy_lsn": table_state.copy_lsn,
        "commit_time": table_state.commit_time, "stale": table_state.stale,
        "columns": json.dumps(table_state.columns),
        "paused": None if table_state.paused is None else table_state.paused.reason,
        "paused_since": None if table_state.paused is None else int(table_state.paused.since * 1e6),
        "gaps": json.dumps(table_state.gaps), "schema_lsn": table_state.schema_lsn,
    }  # fmt: skip


def table_state_of(fields: dict[str, Any]) -> TableState:
    """Return the table state of some `progress_fields`, which may also have `gap`."""
    paused = fields["paused"]
    return TableState(
        fields["relation_id"], fields["schema"], fields["table"], fields["stored"],
        fields["version"], fields["lsn"], fields["copy_lsn"], fields["commit_time"],
        fields["stale"],
        tuple(StateColumn(*column) for column in json.loads(fields["columns"])),
        fields.get("gap"),
        None if paused is None else Pause(paused, fields["paused_since"] / 1e6),
        tuple(Gap(*gap) for gap in json.loads(fields["gaps"])),
        fields["schema_lsn"],
    )  # fmt: skip


def progress_rows(tables: Iterable[TableState]) -> pa.RecordBatch:
    """Return a row for each table."""
    return pa.RecordBatch.from_pylist([*map(progress_fields, tables)], PROGRESS_SCHEMA)


def table_states_of(rows: pa.Table | pa.RecordBatch) -> Iterator[tuple[TableState, dict[str, Any]]]:
    """Yield the table state of each row, and the row itself, which may have more columns.

    Rows of DuckDB have no `gap`.
    """
    for name in ("commit_time", "paused_since"):
        at = rows.schema.get_field_index(name)
        moments = rows.column(name).cast(_MOMENT).cast(pa.int64())
        rows = rows.set_column(at, pa.field(name, pa.int64()), moments)
    for row in rows.to_pylist():
        yield table_state_of(row), row
