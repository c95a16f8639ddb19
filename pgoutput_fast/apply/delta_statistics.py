"""Statistics of files: the bounds by which readers and merges skip files of a Delta table.

A bound is written only if it is right for every reader. Readers differ:

- delta-rs 1.6 takes a column without bounds, in a file with bounds of other columns, for a column
  without values. A filter of its pyarrow dataset then finds no rows.
- JSON has no NaN, and readers compare floats in several ways.
- Spark cuts timestamps to milliseconds, and delta-rs can't read a date beyond the year 9999.

So a property of the table names the columns that have bounds. Readers ignore bounds of other
columns, and other writers, such as Spark's MERGE and OPTIMIZE, write none. The named columns are
integers and texts, whose bounds are right for every reader.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

BOUNDED_COLUMNS = "delta.dataSkippingStatsColumns"
"""The table property that names the columns with bounds in all files."""
_MOST_BOUNDED = 32
_SHOWN_CHARACTERS = 32
"""Length in characters to which a bound of a text is cut."""
_LAST_CHARACTER = "\U0010ffff"
_QUOTED = re.compile("`((?:[^`]|``)*)`")
_SAMPLED = 4096
"""Number of rows from which the encoding of a column is chosen."""


def bounded_columns(schema: pa.Schema, partition_by: Collection[str] = ()) -> list[str]:
    """Return the columns that have bounds in a file, in the order of the schema.

    Parameters
    ----------
    schema : pyarrow.Schema
        The schema of the table or of the file.
    partition_by : collection of str
        The partition columns, which files lack.
    """
    names = [
        field.name
        for field in schema
        if field.name not in partition_by
        and (pa.types.is_signed_integer(field.type) or pa.types.is_string(field.type))
    ]
    return names[:_MOST_BOUNDED]


def property_of(names: Sequence[str]) -> str:
    """Return the value of the property that names columns."""
    return ",".join("`" + name.replace("`", "``") + "`" for name in names)


def names_in(text: str) -> list[str]:
    """Return the columns that a value of the property names; the inverse of `property_of`."""
    return [name.replace("``", "`") for name in _QUOTED.findall(text)]


class FileStatistics:
    """The statistics of a file, computed while its rows are written.

    Parameters
    ----------
    schema : pyarrow.Schema
        The schema of the file.
    """

    def __init__(self, schema: pa.Schema) -> None:
        self._rows = 0
        self._nulls = dict.fromkeys(bounded_columns(schema), 0)
        self._least: dict[str, Any] = {}
        self._greatest: dict[str, Any] = {}

    def add(self, rows: pa.Table) -> None:
        """Add rows that were written."""
        self._rows += rows.num_rows
        for name in self._nulls:
            column = rows.column(name)
            self._nulls[name] += column.null_count
            least, greatest = pc.min_max(column).values()
            if not least.is_valid:
                continue
            low, high = _least_of(least.as_py()), _greatest_of(greatest.as_py())
            self._least[name] = min(self._least.get(name, low), low)
            self._greatest[name] = max(self._greatest.get(name, high), high)

    def __str__(self) -> str:
        """Return the statistics as JSON for the log."""
        statistics = {
            "numRecords": self._rows,
            "minValues": self._least,
            "maxValues": self._greatest,
            "nullCount": self._nulls,
        }
        # delta-rs 1.6 reads the escape of a character such as U+20BB7 as U+10BB7.
        return json.dumps(statistics, ensure_ascii=False)


def _least_of(value: Any) -> Any:
    return value[:_SHOWN_CHARACTERS] if isinstance(value, str) else value


def _greatest_of(value: Any) -> Any:
    if not isinstance(value, str) or len(value) <= _SHOWN_CHARACTERS:
        return value
    # Cut the text and append U+10FFFF: no text with the same beginning is greater, unless it has
    # U+10FFFF itself at this point. So first go on behind all U+10FFFF.
    shown = _SHOWN_CHARACTERS
    while value[shown : shown + 1] == _LAST_CHARACTER:
        shown += 1
    return value[:shown] + (_LAST_CHARACTER if shown < len(value) else "")


def bounded_leaves(schema: pa.Schema) -> list[str]:
    """Return the columns of a Parquet file that have bounds in its footer: all but floats.

    Bounds ignore NaN. So readers would skip rows with NaN, although NaN may match a condition that
    no value between the bounds does, such as "not equal" or, for some readers, "greater".
    """
    leaves = [leaf for field in schema for leaf in _leaves(field)]
    return [name for name, type_ in leaves if not pa.types.is_floating(type_)]


def _leaves(field: pa.Field, name: str | None = None) -> list[tuple[str, pa.DataType]]:
    """Return the names and types of a field's leaf columns in a Parquet file."""
    name, type_ = name or field.name, field.type
    if pa.types.is_map(type_):
        parts = {"key_value.key": type_.key_field, "key_value.value": type_.item_field}
    elif pa.types.is_list(type_):
        parts = {"list.element": type_.value_field}
    elif pa.types.is_struct(type_):
        parts = {type_.field(i).name: type_.field(i) for i in range(type_.num_fields)}
    else:
        return [(name, type_)]
    return [leaf for part, child in parts.items() for leaf in _leaves(child, f"{name}.{part}")]


def repeating(rows: pa.Table) -> list[str]:
    """Return the columns whose first values repeat: a dictionary pays only for these."""
    names: list[str] = []
    for name, column in zip(rows.column_names, rows.columns, strict=True):
        names += _repeating_in(name, column.slice(0, _SAMPLED).combine_chunks())
    return names


def _repeating_in(name: str, first: pa.Array) -> list[str]:
    type_ = first.type
    if pa.types.is_struct(type_):
        fields = [(type_.field(i).name, first.field(i)) for i in range(type_.num_fields)]
        return [leaf for child, of in fields for leaf in _repeating_in(f"{name}.{child}", of)]
    if pa.types.is_nested(type_):
        return [leaf for leaf, _ in _leaves(pa.field(name, type_))]
    return [name] if 2 * len(first.unique()) <= len(first) else []
