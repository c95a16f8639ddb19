"""`pgoutput-fast sync --dry-run`: what a sync would do, as text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.filesize import decimal

from ..apply.departures import check_partitions
from ..apply.dry_run import ask_server, plan_sync
from ..apply.synchronize import checked_options, open_target, published_tables
from ..connections import ConnectionParameters
from ..errors import counted, printable
from ..lsn import format_lsn
from ..replication.walsender import check_slot_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ..apply.dry_run import SyncPlan, TablePlan
    from ..apply.synchronize import OpenedTarget
    from ..apply.window_writer import SyncOptions

_OPTIONS = (
    "tables", "policies", "history", "schema_changes", "on_error", "uncopied", "interval",
    "window_bytes", "pause_bytes", "pause_time",
)  # fmt: skip

OF_THE_TARGET = (
    "soft_deletes", "partition_by", "retention_hours", "maintenance", "iceberg", "changes",
    "duckdb_memory", "lock_timeout", "change_policies",
)  # fmt: skip
"""The options that are the target's alone."""


def check_arguments(arguments: dict[str, Any]) -> tuple[SyncOptions, OpenedTarget]:
    """The options and the target of a sync with these arguments; nothing is read or made.

    Raises
    ------
    PgOutputError
        An argument is wrong.
    """
    options = checked_options(None, *(arguments[name] for name in _OPTIONS))
    opened = open_target(
        arguments["target"], tables=options.tables, policies=arguments["policies"],
        **{name: arguments[name] for name in OF_THE_TARGET},
    )  # fmt: skip
    if arguments["segments"] is None:
        check_slot_name(arguments["slot"])
        opened.directory(arguments["directory"])
    return options, opened


def print_plan(dsn: str | None, arguments: dict[str, Any], change: Callable[[str], str]) -> int:
    """Print what a sync with these arguments would do, and return the exit code.

    Parameters
    ----------
    dsn : str or None
    arguments : dict
    change : callable
        What is done to warnings, which name arguments.

    Raises
    ------
    PgOutputError
        It could not begin.
    """
    options, opened = check_arguments(arguments)
    partition_by = arguments["partition_by"]
    asked = None
    if arguments["segments"] is None:
        directory = opened.directory(arguments["directory"])
        asked = ask_server(
            ConnectionParameters(dsn), arguments["slot"], arguments["publications"], directory,
            adopt_slot=arguments.get("adopt_slot", False),
        )  # fmt: skip
        if partition_by:
            published = published_tables(ConnectionParameters(dsn), arguments["publications"])
            check_partitions(
                partition_by, published, opened.target.peek(asked.origin).tables.values()
            )
    else:
        directory = Path(arguments["segments"])
    consumer = arguments["consumer"] or opened.consumer
    plan = plan_sync(
        opened.target, arguments["target"], opened.decode_for, directory, options, consumer, asked
    )
    for line in _lines(plan, arguments, change, opened.target.shown):
        click.echo(line)
    return 0


def _lines(
    plan: SyncPlan,
    arguments: dict[str, Any],
    change: Callable[[str], str],
    shown: Callable[[str], str],
) -> Iterator[str]:
    if plan.slot is not None:
        confirmed = plan.slot.confirmed_lsn or 0
        behind = decimal(max(0, plan.slot.server_lsn - confirmed))
        yield (
            f"slot {plan.slot.name} is there, and goes on at {format_lsn(confirmed)}; the server's "
            f"log is {behind} beyond that"
            if plan.slot.exists
            else f"slot {plan.slot.name} would be made"
        )
    if plan.has_begun:
        yield (
            f"{plan.directory} is read from {format_lsn(plan.lsn)} on, and ends at "
            f"{format_lsn(plan.end_lsn)}"
        )
    else:
        yield f"{plan.directory} would be made, and the slot captured there"
    for warning in plan.mistaken:
        yield f"warning: {change(warning)}"
    has = any(one.held is not None for one in plan.tables)
    yield f"{arguments['target']} {'is continued' if has else 'would begin anew'}"
    if not plan.tables:
        yield "no table is there yet"
    names = [printable(one.name) for one in plan.tables]
    width = max(map(len, names), default=0)
    for name, one in zip(names, plan.tables, strict=True):
        said = "; ".join((_target(one, shown), *_comes(plan, one, arguments)))
        yield f"  {name:<{width}}  {said}"
    yield "nothing was written"


def _target(one: TablePlan, shown: Callable[[str], str]) -> str:
    held = one.held
    if held is None:
        return "not in the target"
    name = shown(held.stored)
    stored = "" if name == one.name else f"as {printable(name)}, "
    at = f"{stored}up to {format_lsn(held.lsn)} in the target"
    if held.paused is not None:
        return f"{at}, paused: {printable(held.paused.reason)}"
    return at if held.stale is None else f"{at}, not kept up to date: {printable(held.stale)}"


def _comes(plan: SyncPlan, one: TablePlan, arguments: dict[str, Any]) -> Iterator[str]:
    if one.copy_lsn is not None:
        yield f"its snapshot of {counted(one.rows, 'row')} as of {format_lsn(one.copy_lsn)}"
    if plan.has_begun and (one.held is not None or one.has_snapshot or one.changes):
        yield f"{counted(one.changes, 'change')} from {format_lsn(one.lsn)} on"
    if one.is_lost:
        yield "would be copied again, as the directory lacks changes of it"
    elif one.waits:
        yield "waits until it is copied"
    elif one.has_snapshot or one.held is not None:
        pass
    elif plan.slot is not None and not one.changes and arguments["snapshot"] == "initial":
        yield "would be copied"
    else:
        uncopied = arguments["uncopied"]
        yield {
            "error": "no snapshot: an error at its first change (--uncopied)",
            "empty": "no snapshot: it is taken as empty when the capture began (--uncopied)",
            "changes": "no snapshot: its changes alone are kept (--uncopied)",
        }[uncopied]
    if one.is_published is False:
        yield "not published any more"
