"""`pgoutput-fast doctor`: whether a server is ready for capture, and the SQL that repairs it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from ..doctor import LEVELS, examine
from ..errors import PgOutputError, printable
from ..replication.walsender import check_slot_name
from ._dsn import dsn_of, publications_option, server_command
from ._style import paint_for

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ..doctor import DoctorReport, Finding
    from ._style import Paint

_HEADINGS = {"error": "Errors", "warning": "Warnings", "info": "Worth knowing"}
_COLOURS = {"error": "error", "warning": "warning", "info": "heading"}


@server_command(
    examples=(
        "pgoutput-fast doctor --dsn postgresql:///shop",
        "pgoutput-fast doctor --publication shop --slot shop --strict",
    ),
)
@publications_option(
    help="Publication to examine; repeatable. [default: all]",
)
@click.option("--slot", metavar="NAME", help="Replication slot to examine.")
@click.option("--json", "as_object", is_flag=True, help="Print the report as a JSON object.")
@click.option("--strict", is_flag=True, help="Exit with 1 for warnings too.")
@click.pass_context
def command(
    context: click.Context,
    dsn: str | None,
    dsn_file: Path | None,
    publications: tuple[str, ...],
    slot: str | None,
    as_object: bool,
    strict: bool,
) -> int:
    """Check whether a server and its tables are ready for a capture, and say what to change.

    Doctor changes nothing. A finding has the SQL that fixes it, where SQL can. Exit codes: 0 no
    error (with --strict, no warning either); 1 an error.
    """
    if slot is not None:
        try:
            check_slot_name(slot)
        except PgOutputError as error:
            raise click.UsageError(str(error)) from error
    dsn = dsn_of(context, dsn, dsn_file)
    report = examine(dsn, list(publications) or None, slot)
    if as_object:
        print(report.to_json())
    else:
        for line in _lines(report, paint_for(sys.stdout)):
            print(line)
    failed = not report.ready or (strict and report.of_level("warning"))
    return 1 if failed else 0


def _lines(report: DoctorReport, paint: Paint) -> Iterator[str]:
    number = report.server_version
    counts = [
        f"{(count := len(report.of_level(level)))} {word}{'' if count == 1 else 's'}"
        for level, word in zip(LEVELS, ("error", "warning", "note"), strict=True)
    ]
    yield (
        f"PostgreSQL {number // 10000}.{number % 10000}, database {printable(report.database)}, "
        f"role {printable(report.role)}: {', '.join(counts)}"
    )
    for level in LEVELS:
        findings = report.of_level(level)
        if findings:
            yield ""
            yield paint(_HEADINGS[level], _COLOURS[level])
        for finding in findings:
            yield from _finding(finding, paint)


def _finding(finding: Finding, paint: Paint) -> Iterator[str]:
    yield ""
    yield f"  {paint(finding.id, 'column')}: {finding.found}"
    yield f"    {finding.meaning}"
    if finding.advice is not None:
        yield f"    {paint('Advice:', 'heading')} {finding.advice}."
    for statement in finding.sql:
        yield f"        {statement}"
