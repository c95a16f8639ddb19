"""What a table's log has of a file: how many rows, and the least and greatest values of columns."""

from __future__ import annotations

import datetime
from typing import Any

import pyarrow as pa

_SAMPLED = 4096
"""Rows by which it is decided how a file holds a column."""
_INDEXED = 32
"""Columns of which the log has the least and greatest values."""
_SHOWN_CHARACTERS = 32
"""Of texts among them."""
_LAST_CHARACTER = "\U0010ffff"


def statistics_of(schema: pa.Schema, metadata: Any) -> dict[str, Any]:
    """What the log has of a file: how many rows, and the values of columns."""
    least: dict[str, Any] = {}
    greatest: dict[str, Any] = {}
    nulls: dict[str, int] = {}
    leaf = 0
    for field in schema:
        if not pa.types.is_nested(field.type) and len(nulls) < _INDEXED:
            _add_statistics(field.name, metadata, leaf, least, greatest, nulls)
        leaf += len(_leaves(field))
    return {
        "numRecords": metadata.num_rows,
        "minValues": {name: _as_json(value) for name, value in least.items()},
        "maxValues": {name: _as_json(value, is_most=True) for name, value in greatest.items()},
        "nullCount": nulls,
    }


def _leaves(field: pa.Field, name: str | None = None) -> list[str]:
    """The names of a field's columns in a Parquet file."""
    name, type_ = name or field.name, field.type
    if pa.types.is_map(type_):
        parts = {"key_value.key": type_.key_field, "key_value.value": type_.item_field}
    elif pa.types.is_list(type_):
        parts = {"list.element": type_.value_field}
    elif pa.types.is_struct(type_):
        parts = {type_.field(i).name: type_.field(i) for i in range(type_.num_fields)}
    else:
        return [name]
    return [leaf for part, one in parts.items() for leaf in _leaves(one, f"{name}.{part}")]


def repeating(rows: pa.Table) -> list[str]:
    """The columns whose first values repeat, which files hold once; the rest is faster plain."""
    names: list[str] = []
    for name, column in zip(rows.column_names, rows.columns, strict=True):
        names += _repeating_in(name, column.slice(0, _SAMPLED).combine_chunks())
    return names


def _repeating_in(name: str, first: pa.Array) -> list[str]:
    type_ = first.type
    if pa.types.is_struct(type_):
        fields = [(type_.field(i).name, first.field(i)) for i in range(type_.num_fields)]
        return [leaf for one, of in fields for leaf in _repeating_in(f"{name}.{one}", of)]
    if pa.types.is_nested(type_):
        return _leaves(pa.field(name, type_))
    return [name] if 2 * len(first.unique()) <= len(first) else []


def _add_statistics(
    name: str,
    metadata: Any,
    leaf: int,
    least: dict[str, Any],
    greatest: dict[str, Any],
    nulls: dict[str, int],
) -> None:
    found = [metadata.row_group(i).column(leaf) for i in range(metadata.num_row_groups)]
    parts = [one.statistics for one in found]
    if any(one is None or not one.has_null_count for one in parts):
        return
    nulls[name] = sum(one.null_count for one in parts)
    # A group of nulls alone has no values; another one without them has some that are not known.
    valued = [
        one for one, group in zip(parts, found, strict=True) if one.null_count < group.num_values
    ]
    if not valued or not all(one.has_min_max for one in valued):
        return
    low, high = min(one.min for one in valued), max(one.max for one in valued)
    if isinstance(low, (int, str, datetime.date)) and not isinstance(low, bool):
        least[name], greatest[name] = low, high


def _as_json(value: Any, *, is_most: bool = False) -> Any:
    if isinstance(value, datetime.datetime):
        zone = "" if value.tzinfo is None else "Z"
        return value.replace(tzinfo=None).isoformat("T", "microseconds") + zone
    if isinstance(value, datetime.date):
        return value.isoformat()
    if isinstance(value, str) and len(value) > _SHOWN_CHARACTERS:
        shown = _SHOWN_CHARACTERS
        # Nothing with these first characters is greater than the last of all behind them, unless
        # it has that there itself.
        while is_most and value[shown : shown + 1] == _LAST_CHARACTER:
            shown += 1
        return value[:shown] + (_LAST_CHARACTER if is_most and shown < len(value) else "")
    return value
