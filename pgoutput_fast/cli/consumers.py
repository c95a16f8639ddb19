"""`pgoutput-fast consumers`: list, add and remove the consumers of a change log."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from ..changelog.consumers import Consumer, consumers, remove_consumer
from ..errors import PgOutputError
from ..segments.listing import contents, not_begun
from ._consumer_positions import described_positions, table_positions
from ._help import GroupWithExamples


@click.group(
    cls=GroupWithExamples,
    examples=(
        "pgoutput-fast consumers --dir captured list",
        "pgoutput-fast consumers --dir captured add warehouse",
        "pgoutput-fast consumers --dir captured remove warehouse",
    ),
)
@click.option(
    "--dir",
    "directory",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="Directory of the change log. [required]",
)
@click.pass_context
def command(context: click.Context, directory: Path | None) -> None:
    """List, add or remove the consumers of a change log.

    The change log keeps every segment that a consumer still needs, so remove a consumer that no
    longer reads.
    """
    context.obj = directory


def _with_directory(function: Callable[..., int]) -> Callable[..., int]:
    """Pass the directory to a command of the group, which checks `--dir`.

    If the group itself checked `--dir`, its commands would show no help without a directory.
    """

    @functools.wraps(function)
    def called(*arguments: Any, **options: Any) -> int:
        context = click.get_current_context()
        directory = context.obj
        if directory is None:
            raise click.MissingParameter(ctx=context.parent, param=command.params[0])
        if not directory.is_dir():
            raise not_begun(directory)
        return function(directory, *arguments, **options)

    return called


@command.command("list", examples=("pgoutput-fast consumers --dir captured list --json",))
@click.option("--json", "as_objects", is_flag=True, help="Print a JSON object per line.")
@_with_directory
def list_(directory: Path, as_objects: bool) -> int:
    """List consumers and how far they have read.

    A table that waits for its snapshot has its own position. The bytes count from the lowest
    position.
    """
    end = contents(directory).end
    states = consumers(directory)
    positions = described_positions(directory, [state.position for state in states])
    rows: list[dict[str, Any]] = [
        {
            "name": state.name,
            **position,
            "bytes_behind": max(0, end - state.position.least),
            "seconds_since_moved": round(max(0.0, time.time() - state.seen), 1),
        }
        for state, position in zip(states, positions, strict=True)
    ]
    if as_objects:
        for row in rows:
            print(json.dumps(row))
        return 0
    width = max([len(row["name"]) for row in rows] + [len("name")])
    print(
        f"{'name':<{width}}  {'position':>17}  {'bytes behind':>16}  {'moved, s ago':>12}  "
        "tables at other positions"
    )
    for row in rows:
        line = (
            f"{row['name']:<{width}}  {row['position']:>17}  {row['bytes_behind']:>16,}  "
            f"{row['seconds_since_moved']:>12,.1f}  {table_positions(row)}"
        )
        print(line.rstrip())
    return 0


@command.command(examples=("pgoutput-fast consumers --dir captured add warehouse",))
@click.argument("name")
@_with_directory
def add(directory: Path, name: str) -> int:
    """Add a consumer. It begins with the newest snapshot of each table, else with all changes."""
    if any(state.name == name for state in consumers(directory)):
        raise PgOutputError(
            f"{directory} already has a consumer {name!r}",
            code="already_exists",
            path=str(directory),
        )
    added = Consumer(directory, name)
    (position,) = described_positions(directory, [added.position])
    tables = table_positions(position)
    print(f"{name} begins at {position['position']}" + (f", {tables}" if tables else ""))
    return 0


@command.command(examples=("pgoutput-fast consumers --dir captured remove warehouse",))
@click.argument("name")
@_with_directory
def remove(directory: Path, name: str) -> int:
    """Remove a consumer. The change log then keeps no files for it."""
    remove_consumer(directory, name)
    return 0
