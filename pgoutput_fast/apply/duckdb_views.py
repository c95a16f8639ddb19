"""Views under the server's names, in a DuckDB file: `public.orders` for `state."public.orders"`."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from .duckdb_sql import quoted
from .naming import stored_table

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from .targets import TableState

_log = logging.getLogger(__name__)

_OWN = ("changes", "state", "main", "temp", "system", "pg_catalog", "information_schema")
_COMMENT_PREFIX = "rows of "
"""Beginning of the comment on a view of sync; the stored name of the state table follows."""


def remake_views(
    run: Callable[[str], Any],
    catalog: str,
    table_names: Collection[tuple[str, str]],
    tables: Iterable[TableState],
    altered: Collection[str],
) -> None:
    """Create a view of each state table under the server's names, in a window's transaction.

    A schema gets `_` after its name if DuckDB reserves the name, sync uses it, it is the name of
    the file, or it differs from another schema only in case. A view gets `_` after its name if
    something else in the schema has the name.

    Parameters
    ----------
    run : callable
        Executes a statement.
    catalog : str
        DuckDB's name of the file.
    table_names : collection of (str, str)
        Schema and name of all tables of the file.
    tables : iterable of TableState
    altered : collection of str
        Stored names of state tables that were created, altered or renamed in the window.
    """
    if catalog.casefold() == "state":
        return  # in the text of a view, DuckDB would take this catalogue for the schema
    views = run(
        "SELECT schema_name, view_name, comment FROM duckdb_views() "
        "WHERE NOT internal AND database_name = current_database()"
    ).fetchall()
    own = {(schema, name): comment.removeprefix(_COMMENT_PREFIX) for schema, name, comment in views
           if comment is not None and comment.startswith(_COMMENT_PREFIX)}  # fmt: skip
    shown = [
        table_state for table_state in tables if ("state", table_state.stored_name) in table_names
    ]
    if not altered and {*own.values()} == {table_state.stored_name for table_state in shown}:
        return
    others = [
        *table_names,
        *((schema, name) for schema, name, _ in views if (schema, name) not in own),
    ]
    wanted = _names(run, catalog, shown, others)
    for key, stored_name in own.items():
        if wanted.get(key) != stored_name:
            run(f"DROP VIEW {quoted(catalog, *key)}")
    for key, stored_name in wanted.items():
        if own.get(key) != stored_name or stored_name in altered:
            view = quoted(catalog, *key)
            run(f"CREATE SCHEMA IF NOT EXISTS {quoted(catalog, key[0])}")
            run(f"CREATE OR REPLACE VIEW {view} AS FROM {quoted(catalog, 'state', stored_name)}")
            text = "'" + (_COMMENT_PREFIX + stored_name).replace("'", "''") + "'"
            run(f"COMMENT ON VIEW {view} IS {text}")


def _names(
    run: Callable[[str], Any],
    catalog: str,
    tables: list[TableState],
    others: Collection[tuple[str, str]],
) -> dict[tuple[str, str], str]:
    """Return the stored name of the state table for each view, by schema and name."""
    schema_names = {name for (name,) in run(
        "SELECT schema_name FROM duckdb_schemas() WHERE database_name = current_database()"
    ).fetchall()}  # fmt: skip
    reserved = {name for (name,) in run(
        "SELECT keyword_name FROM duckdb_keywords() WHERE keyword_category = 'reserved'"
    ).fetchall()}  # fmt: skip
    used_names = {*_OWN, catalog.casefold(), *reserved}
    schemas: dict[str, str] = {}
    # Existing schemas go first: they keep their names if a new one differs only in case.
    for namespace in sorted(
        {table_state.namespace for table_state in tables},
        key=lambda namespace: (namespace not in schema_names, namespace),
    ):
        name = schemas[namespace] = _free(namespace, used_names)
        used_names.add(name.casefold())
        if name != namespace and name not in schema_names:
            _log.warning(
                "the views of the server's schema %s are in the schema %s of %s, because DuckDB "
                "uses the other name itself",
                namespace, name, catalog,
            )  # fmt: skip
    views: dict[tuple[str, str], str] = {}
    used: dict[str, set[str]] = {}
    for schema, name in others:
        used.setdefault(schema.casefold(), set()).add(name.casefold())
    # Of several tables with one name, the newest has the plain stored name: see `renames`. It gets
    # the plain view, too.
    for table_state in sorted(
        tables, key=lambda table: (table.stored_name != _plain(table), table.relation_id)
    ):
        schema = schemas[table_state.namespace]
        names = used.setdefault(schema.casefold(), set())
        name = _free(table_state.name, names)
        names.add(name.casefold())
        views[schema, name] = table_state.stored_name
    return views


def _plain(table: TableState) -> str:
    return stored_table(table.namespace, table.name)


def _free(name: str, used_names: Collection[str]) -> str:
    while name.casefold() in used_names:
        name += "_"
    return name
