"""`pgoutput-fast verify`: compare a target with the server's tables."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from ..apply.duckdb_file import LEAST_MEMORY
from ..errors import PgOutputError, counted, printable, without_passwords
from ..lsn import format_lsn
from ..options import byte_count, seconds
from ..verify import Difference, Report, TableResult, VerifyProgress, verify
from ..watching.logs import RecordFormatter, logged, write_line
from ._dsn import dsn_of, publications_option, server_command
from ._options import Value, policies_option, shown_by
from ._spark_engine import check_options, running_engine, spark_options
from ._style import Paint, paint_for

_SHOWN = 200  # the largest number of characters of a value
_INTERVAL = 5.0  # seconds between two lines of progress


@server_command(
    groups={
        "Server": "dsn dsn_file publications",
        "Target": "target segments duckdb_memory policies",
        "What to compare": "tables exclude",
        "Spark": "engine master conf",
        "Limits": "timeout rounds",
        "Output": "shown as_object",
    },
    examples=(
        "pgoutput-fast verify --publication shop --target duckdb:shop.duckdb",
        "pgoutput-fast verify --publication shop --target lake --table public.orders",
    ),
)
@publications_option(required=True, help="Publication of the tables; repeatable.")
@click.option(
    "--target",
    required=True,
    metavar="duckdb:FILE|DIR|URL",
    help="Target of a sync, or a change log.",
)
@click.option(
    "--segments",
    metavar="DIR",
    help="Change log. [default: TARGET.segments]",
)
@click.option(
    "--table",
    "tables",
    multiple=True,
    metavar="SCHEMA.TABLE",
    help="Only this table; repeatable.",
)
@click.option(
    "--exclude",
    multiple=True,
    metavar="SCHEMA.TABLE.COLUMN",
    help="Column to leave out; repeatable.",
)
@click.option(
    "--timeout",
    type=Value(seconds()),
    default=60.0,
    show_default=True,
    metavar="TIME",
    help="Longest wait for the target to catch up.",
)
@click.option(
    "--rounds",
    type=click.IntRange(1),
    metavar="N",
    default=10,
    show_default=True,
    help="Times to read changing rows again.",
)
@click.option(
    "--show",
    "shown",
    type=click.IntRange(0),
    metavar="N",
    default=10,
    show_default=True,
    help="Most rows to print for a table that differs.",
)
@policies_option("Policy of the sync; repeatable.")
@click.option(
    "--duckdb-memory",
    type=Value(byte_count(LEAST_MEMORY)),
    metavar="BYTES",
    help="Memory of DuckDB. [default: 1/4 of RAM]",
)
@spark_options
@click.option("--json", "as_object", is_flag=True, help="Print the result as a JSON object.")
@click.pass_context
def command(
    context: click.Context,
    /,
    dsn: str | None,
    dsn_file: Path | None,
    publications: tuple[str, ...],
    tables: tuple[str, ...],
    engine: str,
    master: str | None,
    conf: dict[str, str],
    as_object: bool,
    **options: Any,
) -> int:
    """Compare each row of a target with the tables of the server.

    Names of tables and columns are in SQL's form, such as public."My Table".

    Exit codes: 0 all tables are equal; 1 a table differs; 2 a table could not be compared, its rows
    kept changing, or an error.
    """
    check_options(engine, master, conf)
    paint = paint_for(sys.stdout)
    try:
        dsn = dsn_of(context, dsn, dsn_file)
        with (
            logged(RecordFormatter("text"), level=logging.WARNING)
            if engine == "spark"
            else contextlib.nullcontext(),
            running_engine("verify", engine, master, conf) as options["engine"],
            _progress() as progress,
        ):
            report = verify(
                dsn,
                publications=list(publications),
                tables=tables or None,
                progress=progress,
                **options,
            )
    except PgOutputError as error:
        painted = paint_for(sys.stderr)("pgoutput-fast:", "error")
        text = without_passwords(error.text(shown_by(context.command)))
        print(f"{painted} {printable(text)}", file=sys.stderr)
        return 2
    if as_object:
        print(json.dumps(_as_object(report)))
    else:
        for line in _lines(report, paint):
            print(line)
    return report.exit_code


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[VerifyProgress], None]]:
    """Show the progress on standard error: in a live line on a terminal, else in lines."""
    if sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        from rich.console import Console
        from rich.markup import escape

        with Console(stderr=True).status("connecting") as status:
            yield lambda progress: status.update(escape(_doing(progress)))
        return
    last_time = time.monotonic()

    def log(progress: VerifyProgress) -> None:
        nonlocal last_time
        if time.monotonic() - last_time >= _INTERVAL:
            last_time = time.monotonic()
            write_line(_doing(progress))

    yield log


def _doing(progress: VerifyProgress) -> str:
    which = f" {printable(progress.table)}" if progress.table else ""
    done = f", {progress.done} of {counted(progress.total, 'table')}" if progress.total else ""
    rows = f", {counted(progress.rows, 'change')}" if progress.rows else ""
    return f"{progress.doing}{which}{done}{rows}"


def _as_object(report: Report) -> dict[str, Any]:
    return {
        "exit_code": report.exit_code,
        "lsn": format_lsn(report.lsn),
        "position": format_lsn(report.position),
        "tables": [dataclasses.asdict(table) for table in report.tables],
        "only_in_target": list(report.only_in_target),
    }


def _lines(report: Report, paint: Paint) -> Iterator[str]:
    names = [printable(f"{table.namespace}.{table.name}") for table in report.tables]
    width = max(map(len, names), default=0) + 2
    for name, table in zip(names, report.tables, strict=True):
        style = {"equal": "insert", "different": "delete"}.get(table.state, "update")
        yield f"{name:<{width}}{paint(table.state, style)}{_said(table)}"
        for difference in table.differences:
            yield f"    {_difference(difference)}"
        if (more := table.differing - len(table.differences)) > 0:
            yield f"    and {more:,} more"
    if not report.tables:
        yield "the publications have no tables, so nothing was compared"
    for name in report.only_in_target:
        yield f"{printable(name)} is in the target only, and is not published"
    yield (f"the server at {format_lsn(report.lsn)}, the target at {format_lsn(report.position)}")


def _said(table: TableResult) -> str:
    if table.state == "not compared":
        return f": {printable(table.why)}"
    said = f", {counted(table.rows, 'row')}"
    if table.differing:
        least = "at least " if table.differing_is_least else ""
        said += f", {table.target_rows:,} in the target; {least}{table.differing:,} differ"
    if table.looked_again:
        said += f", {table.looked_again:,} read again"
    if table.unsettled:
        said += f", {table.unsettled:,} unsettled"
    if table.excluded:
        said += f", without {', '.join(map(printable, table.excluded))}"
    return said + (f": {printable(table.why)}" if table.why else "")


def _difference(difference: Difference) -> str:
    key = ", ".join(f"{printable(name)}={_value(value)}" for name, value in difference.key.items())
    if difference.kind == "different":
        columns = "; ".join(
            f"{printable(name)}: server {_value(here)}, target {_value(there)}"
            for name, (here, there) in difference.columns.items()
        )
        return f"{key}: {columns}"
    if difference.kind in ("missing", "extra"):
        return f"{key}: {difference.kind} in the target"
    here, there = difference.times
    return f"{key}: {difference.kind}, {here} on the server, {there} in the target"


def _value(text: str | None) -> str:
    if text is None:
        return "NULL"
    shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}… ({len(text)} characters)"
    return repr(printable(shown))
