"""`pgoutput-fast snapshot`: ask the capture of a change log for new snapshots of tables."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..changelog.history import history_of
from ..changelog.known import known_tables
from ..changelog.requests import request_copy, requested
from ..changelog.snapshot_states import SnapshotStates
from ..errors import PgOutputError, printable
from ..lsn import format_lsn
from ..names import parse_name, sql_name
from ..options import seconds
from ..segments.listing import has_begun, not_begun
from ._help import GroupedCommand
from ._options import Value

if TYPE_CHECKING:
    from ..changelog.snapshot_states import TableSnapshots

_POLL = 0.2  # seconds between two checks for a finished snapshot


@click.command(
    cls=GroupedCommand,
    examples=("pgoutput-fast snapshot --dir captured --table public.orders --wait 10min",),
)
@click.option(
    "--dir",
    "directory",
    metavar="DIR",
    required=True,
    type=click.Path(path_type=Path),
    help="Change log of the capture.",
)
@click.option(
    "--table",
    "tables",
    multiple=True,
    required=True,
    metavar="SCHEMA.TABLE",
    help="Table, as SQL names it; repeatable.",
)
@click.option(
    "--wait",
    metavar="TIME",
    type=Value(seconds(zero=True)),
    help="Longest time to wait for the new snapshots.",
)
def command(directory: Path, tables: tuple[str, ...], wait: float | None) -> int:
    """Ask a capture for new snapshots of tables.

    The running capture, or the next one, takes the snapshots. Consumers wait for the snapshot of a
    table. Then they get a Truncate, the rows, and all changes since. A table's name is in SQL's
    form, such as public."My Table". A relation id is allowed too.
    """
    if not directory.is_dir() or not has_begun(directory):
        raise not_begun(directory)
    relation_ids = {table: _find(directory, table) for table in tables}
    before = SnapshotStates(directory).read()
    table_names = _table_names(directory)
    for relation_id in relation_ids.values():
        why = "pgoutput-fast snapshot asked for it"
        request_copy(directory, relation_id, table_names[relation_id], why)
    if wait is None:
        print(f"asked the capture of {directory} for new snapshots of {', '.join(tables)}")
        return 0
    deadline = time.monotonic() + wait
    while any(
        _whole(SnapshotStates(directory).read().get(relation_id)) <= _whole(before.get(relation_id))
        for relation_id in relation_ids.values()
    ):
        if time.monotonic() > deadline:
            asked = requested(directory)
            unheard = [table for table, relation_id in relation_ids.items() if relation_id in asked]
            why = f": no capture has read the request for {', '.join(unheard)}" if unheard else ""
            raise PgOutputError(
                f"not all snapshots are complete after {wait:g} s{why}",
                code="timed_out",
                hint="Check that the capture runs" if unheard else "See the log of the capture",
            )
        time.sleep(_POLL)
    after = SnapshotStates(directory).read()
    for table, relation_id in relation_ids.items():
        print(f"{table} has a snapshot as of {format_lsn(after[relation_id].snapshots[-1].lsn)}")
    return 0


def _find(directory: Path, table: str) -> int:
    """Return the relation id of a table.

    Raises
    ------
    PgOutputError
        The change log has no such table, or several.
    """
    table_names = _table_names(directory)
    wanted = None if table.isdecimal() else parse_name(table, "schema.table")
    relation_ids = [
        relation_id
        for relation_id, name in table_names.items()
        if name == wanted or str(relation_id) == table
    ]
    if len(relation_ids) == 1:
        return relation_ids[0]
    if relation_ids:
        ids = ", ".join(map(str, sorted(relation_ids)))
        name = "'" + sql_name(*table_names[relation_ids[0]]).replace("'", "''") + "'"
        raise PgOutputError(
            f"{directory} has several tables that were called {table!r}",
            code="bad_option",
            parameter="tables",
            table=table,
            hint=f"Give one of the relation ids {ids} instead. To see which table has the name "
            f"now: SELECT {name}::regclass::oid",
        )
    names = ", ".join(sorted(printable(sql_name(*name)) for name in table_names.values())) or "none"
    raise PgOutputError(
        f"{directory} has no table {table!r}; it has {names}", code="no_table", table=table
    )


def _table_names(directory: Path) -> dict[int, tuple[str, str]]:
    """Return the tables of the change log, by their present names."""
    table_names = known_tables(directory)
    history = history_of([directory])
    if history is not None:
        for table in history.newest_tables.tables:
            if table.relation_id in table_names:
                table_names[table.relation_id] = table.namespace, table.name
    return table_names


def _whole(state: TableSnapshots | None) -> int:
    return 0 if state is None else len(state.snapshots)
