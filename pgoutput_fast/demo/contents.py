"""What the tables of the demonstration hold: changes by kind, values by families of types."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pgoutput_fast.names import sql_name

if TYPE_CHECKING:
    from collections.abc import Iterable

    import psycopg


@dataclass
class Family:
    """How much of one family of types is in the server's tables.

    Attributes
    ----------
    columns, values, nulls : int
        The number of columns, of values that are not NULL, and of NULLs.
    """

    columns: int = 0
    values: int = 0
    nulls: int = 0


@dataclass
class Contents:
    """What a change table and its state table hold.

    Attributes
    ----------
    operations : dict of str to int
        Changes by what they do.
    doubled : int
        Changes of the stream that are there more than once, by their commit and number.
    change_bytes, state_bytes : int
        Of the files of their newest versions.
    """

    operations: dict[str, int] = field(default_factory=dict)
    doubled: int = 0
    change_bytes: int = 0
    state_bytes: int = 0

    @property
    def changes(self) -> int:
        """All of them."""
        return sum(self.operations.values())


def contents_of(tables: Path, name: str) -> Contents:
    """Count what the Delta tables of one table hold.

    Parameters
    ----------
    tables : pathlib.Path
        The target of the sync.
    name : str
        ``namespace.name`` of the table, without characters that a path can't hold.
    """
    import duckdb
    from deltalake import DeltaTable

    changes, state = (DeltaTable(str(tables / kind / name)) for kind in ("changes", "state"))
    files = changes.file_uris()
    found = Contents(change_bytes=_size(changes), state_bytes=_size(state))
    if files:
        with duckdb.connect() as connection:
            rows = connection.read_parquet(files).project("op, commit_lsn, seq")
            found.operations = dict(rows.aggregate("op, count(*)", "op").order("op").fetchall())
            # A copied row has the LSN of its snapshot, and a truncate no number.
            counted = (
                rows.filter("op NOT IN ('read', 'truncate')")
                .aggregate("count(*) - count(DISTINCT (commit_lsn, seq))")
                .fetchall()
            )
            found.doubled = counted[0][0]
    return found


def _size(table: Any) -> int:
    return int(sum(table.get_add_actions(flatten=True).column("size_bytes").to_pylist()))


# --- families of types ---------------------------------------------------------------------------


class _Column(NamedTuple):
    name: str
    type: str
    kind: str
    """The type's ``typtype``, or "a" for an array."""
    bare: bool
    """Whether its type has no modifier."""


_COLUMNS = """
SELECT a.attname, t.typname,
    CASE WHEN t.typcategory = 'A' AND t.typtype = 'b' THEN 'a' ELSE t.typtype END,
    a.atttypmod < 0
FROM pg_catalog.pg_attribute AS a
JOIN pg_catalog.pg_type AS t ON t.oid = a.atttypid
WHERE a.attrelid = %s::regclass AND a.attnum > 0 AND NOT a.attisdropped
ORDER BY a.attnum
"""


def families_of(connection: psycopg.Connection[Any], tables: Iterable[str]) -> dict[str, Family]:
    """Count the values of a server's tables, by the families of their types.

    Parameters
    ----------
    connection : psycopg.Connection
    tables : iterable of str
        ``namespace.name`` of each.
    """
    from psycopg import sql

    found: dict[str, Family] = {}
    for table in tables:
        name = sql.Identifier(*table.split(".", 1))
        columns = [
            _Column(*row) for row in connection.execute(_COLUMNS, [sql_name(*table.split(".", 1))])
        ]
        counts = sql.SQL(", ").join(
            sql.SQL("count({})").format(sql.Identifier(column.name)) for column in columns
        )
        statement = sql.SQL("SELECT count(*), {} FROM {}").format(counts, name)
        ((rows, *values),) = connection.execute(statement).fetchall()
        for column, count in zip(columns, values, strict=True):
            entry = found.setdefault(_family(column), Family())
            entry.columns += 1
            entry.values += count
            entry.nulls += rows - count
    return dict(sorted(found.items()))


_FAMILIES = {
    **dict.fromkeys(("int2", "int4", "int8"), "int2, int4, int8"),
    **dict.fromkeys(("oid", "xid", "cid", "xid8"), "oid, xid, cid, xid8"),
    **dict.fromkeys(("float4", "float8"), "float4, float8"),
    **dict.fromkeys(("text", "varchar", "bpchar", "name"), "text, varchar, char, name"),
    **dict.fromkeys(("json", "jsonb"), "json, jsonb"),
    **dict.fromkeys(("timestamp", "timestamptz"), "timestamp, timestamptz"),
    **dict.fromkeys(("time", "timetz"), "time, timetz"),
    **dict.fromkeys(("inet", "cidr", "macaddr", "macaddr8"), "network addresses"),
    **dict.fromkeys(("point", "line", "lseg", "box", "path", "polygon", "circle"), "geometric"),
    **dict.fromkeys(("bit", "varbit"), "bit, varbit"),
    **dict.fromkeys(("tsvector", "tsquery"), "tsvector, tsquery"),
    **dict.fromkeys(("pg_lsn", "pg_snapshot", "tid"), "pg_lsn, pg_snapshot, tid"),
    **dict.fromkeys(("regclass", "regtype"), "reg*"),
    **dict.fromkeys(("vector", "halfvec", "sparsevec"), "pgvector"),
    "char": '"char"',
}
_KINDS = {
    "a": "arrays", "c": "composites", "d": "domains", "e": "enums", "r": "ranges",
    "m": "multiranges",
}  # fmt: skip


def _family(column: _Column) -> str:
    """The family of types under which the report counts a column's values."""
    if column.type == "numeric":
        return "numeric without precision" if column.bare else "numeric(p,s)"
    return _KINDS.get(column.kind) or _FAMILIES.get(column.type, column.type)
