"""Numeric columns without precision, and which precision and scale their values need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from psycopg import sql

_READ = 100_000
"""Rows of a table that are read at most."""
_LEAST, _MOST, _ROOM = 18, 38, 2
"""Digits of a proposed type; digits that it has beside those of the values that were read."""

_COLUMNS = """
SELECT n.nspname::text, c.relname::text,
    pg_catalog.array_agg(a.attname::text ORDER BY a.attnum)
FROM pg_catalog.pg_attribute AS a JOIN pg_catalog.pg_class AS c ON c.oid = a.attrelid
    JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
WHERE a.attrelid = ANY(%s::oid[]) AND a.atttypid = 'pg_catalog.numeric'::pg_catalog.regtype
    AND a.atttypmod = -1 AND a.attnum > 0 AND NOT a.attisdropped
GROUP BY 1, 2 ORDER BY 1, 2
"""
_SHAPES = """
SELECT coalesce(max(scale({c})), 0),
    coalesce(max(length(trunc(abs({c}))::text)) FILTER (WHERE scale({c}) IS NOT NULL), 0)
"""


class Numerics(NamedTuple):
    """Numeric columns of a table that have no precision.

    Attributes
    ----------
    namespace, name : str
    columns : tuple of str
    digits : int
        The most digits before the point, in the rows that were read.
    scale : int
        The most digits behind it.
    """

    namespace: str
    name: str
    columns: tuple[str, ...]
    digits: int
    scale: int

    @property
    def shown(self) -> str:
        """The table and its columns, as SQL has them."""
        table = sql.Identifier(self.namespace, self.name).as_string(None)
        columns = ", ".join(sql.Identifier(column).as_string(None) for column in self.columns)
        return f"{table} ({columns})"


def read_numerics(rows: Callable[..., list[Any]], oids: Sequence[int]) -> list[Numerics]:
    """Find the numeric columns without precision, and how many digits their values have.

    Parameters
    ----------
    rows : callable
        Runs a query with parameters, and returns its rows.
    oids : sequence of int
        The tables. The first 100,000 rows of each are read.
    """
    numerics = []
    for namespace, name, columns in rows(_COLUMNS, list(oids)):
        shapes = []
        for column in columns:
            of = sql.Identifier(column)
            source = sql.SQL(" FROM (SELECT {} FROM {} LIMIT {}) AS r").format(
                of, sql.Identifier(namespace, name), sql.Literal(_READ)
            )
            shapes += rows(sql.SQL(_SHAPES).format(c=of) + source)
        scale, digits = (max(sizes) for sizes in zip(*shapes, strict=True))
        numerics.append(Numerics(namespace, name, tuple(columns), digits, scale))
    return numerics


def proposed(numerics: Sequence[Numerics]) -> str | None:
    """Return the policy that has room for the values of all columns.

    None if no decimal has, or if the columns have no values yet.
    """
    digits, scale = max(table.digits for table in numerics), max(table.scale for table in numerics)
    if not digits or digits + scale > _MOST:
        return None
    return f"numeric={min(_MOST, max(_LEAST, digits + scale + _ROOM))},{scale}"


def advice(numerics: Sequence[Numerics]) -> str:
    """Return what to do about such columns."""
    policy = proposed(numerics)
    if not any(table.digits for table in numerics):
        return (
            "give sync --policy numeric=DIGITS,SCALE to get decimals. They have no values yet from "
            "which the number of digits could be proposed"
        )
    if policy is None:
        return (
            "their values have more digits than a decimal can hold: cast the text when you read it"
        )
    return (
        f"give sync --policy {policy} to get decimals. It fits the first {_READ:,} rows of each "
        "table; a value that does not fit is an error"
    )
