"""SQL for DuckDB: names, conditions, and the tables of a target's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

if TYPE_CHECKING:
    from collections.abc import Sequence

PROGRESS_TABLE = """
CREATE TABLE _progress (
    "schema" VARCHAR, "table" VARCHAR, relation_id UINTEGER, stored VARCHAR, version INTEGER,
    lsn UBIGINT, copy_lsn UBIGINT, commit_time TIMESTAMPTZ, stale VARCHAR, columns VARCHAR,
    paused VARCHAR, paused_since TIMESTAMPTZ, gaps VARCHAR, schema_lsn UBIGINT
)
"""
SOURCE_TABLE = """
CREATE TABLE _source (
    format INTEGER, system_identifier VARCHAR, database VARCHAR, lsn UBIGINT,
    soft_deletes VARCHAR, tables VARCHAR[], newest_lsn UBIGINT, newest_time BIGINT,
    policies VARCHAR[], keep VARCHAR
)
"""


def quoted(*names: str) -> str:
    """Return a quoted name, of one or several parts."""
    return ".".join('"' + name.replace('"', '""') + '"' for name in names)


def empty(schema: pa.Schema) -> pa.Table:
    """Return a table without rows. `Schema.empty_table` fails for lists of an extension type."""
    return pa.Table.from_arrays([pa.nulls(0, field.type) for field in schema], schema=schema)


def same(
    types: pa.StructType | pa.Schema,
    names: Sequence[str],
    others: Sequence[str] | None = None,
    *,
    nulls: bool = False,
) -> str:
    """Return the condition that rows `s` and `n` have the same values in some columns.

    The condition has to agree with the fold, which compares the bytes that `keys` makes of values.
    DuckDB differs in one point: it takes 0.0 and -0.0 as equal, also inside lists, structs and
    maps. So the condition also compares the signs of zeros.

    Parameters
    ----------
    types : pyarrow.StructType or pyarrow.Schema
        The types of the columns.
    names : sequence of str
        The columns of `s`.
    others : sequence of str, optional
        The columns of `n`; by default they have the same names.
    nulls : bool
        Whether NULL equals NULL.
    """
    conditions = []
    for name, other in zip(names, others or names, strict=True):
        left, right = f"s.{quoted(name)}", f"n.{quoted(other)}"
        conditions.append(f"{left} {'IS NOT DISTINCT FROM' if nulls else '='} {right}")
        signs, others_ = (_signs(types.field(name).type, side) for side in (left, right))
        if signs is not None:
            conditions.append(f"{signs} IS NOT DISTINCT FROM {others_}")
    return " AND ".join(conditions)


def _signs(type_: pa.DataType, value: str, depth: int = 0) -> str | None:
    """Return an expression that says which zeros in a value are negative; None without floats.

    The sign of NaN does not count, because the server's text of NaN has no sign.
    """
    types = pa.types
    if isinstance(type_, pa.BaseExtensionType):
        return _signs(type_.storage_type, value, depth)
    if types.is_floating(type_):
        return f"({value} = 0 AND signbit({value}))"
    if types.is_struct(type_):
        fields = [type_.field(i) for i in range(type_.num_fields)]
        candidates = [
            _signs(field.type, f"{value}.{quoted(field.name)}", depth) for field in fields
        ]
        signs = [sign for sign in candidates if sign is not None]
        return f"row({', '.join(signs)})" if signs else None
    if types.is_map(type_):
        keys = pa.list_(type_.key_type), f"map_keys({value})"
        items = pa.list_(type_.item_type), f"map_values({value})"
        signs = [sign for of in (keys, items) if (sign := _signs(*of, depth)) is not None]
        return f"row({', '.join(signs)})" if signs else None
    if types.is_list(type_) or types.is_large_list(type_) or types.is_fixed_size_list(type_):
        item = f"item{depth}"
        signs_of = _signs(type_.value_type, item, depth + 1)
        return None if signs_of is None else f"list_transform({value}, lambda {item}: {signs_of})"
    return None


def versioned(stored_name: str, version: int) -> str:
    """Return the name of a version of a change table."""
    return stored_name if version == 1 else f"{stored_name}.v{version}"
