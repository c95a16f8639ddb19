"""`pgoutput-fast inspect --to`: write changes to files, with a progress bar."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import click

from .._disk import read_json_file
from ..errors import DecodeError, PgOutputError, counted, printable
from ..files import ExportedTable, ExportProgress, ExportResult, Format, export
from ..lsn import format_lsn
from ..names import qualified
from ..types import TypeRegistry
from ._options import table_patterns


def types_option(_: click.Context, __: click.Parameter, path: Path | None) -> TypeRegistry | None:
    """Read a registry from a file.

    Raises
    ------
    PgOutputError
        The file can't be read, or has no catalogue of types.
    """
    if path is None:
        return None
    try:
        return TypeRegistry.from_json(read_json_file(path))
    except PgOutputError as error:
        raise PgOutputError(
            f"{path}: {error.message}", code=error.code, hint=error.hint, path=str(path)
        ) from error
    except OSError as error:
        raise PgOutputError(
            f"can't read {path}: {error.strerror or error}",
            code="missing_path" if isinstance(error, FileNotFoundError) else "io_failed",
            path=str(path),
        ) from error


def run_export(
    paths: tuple[Path, ...],
    to: tuple[Format, Path],
    *,
    tables: tuple[str, ...],
    **options: Any,
) -> int:
    """Write the files, and print which tables the directory holds afterwards."""
    chosen, directory = to
    with _progress() as progress:
        try:
            result = export(
                paths,
                directory,
                chosen,
                tables=table_patterns(tables) or None,
                progress=progress,
                **options,
            )
        except PgOutputError as error:
            if not isinstance(error.__cause__, DecodeError):
                raise
            raise PgOutputError(
                f"{error.message}; the options for these are --policy NAME=VALUE, --types FILE and "
                "--on-error collect",
                hint=error.hint,
            ).locate(error.__cause__, error.frame, error.path) from error
    if result.position is None and not tables and all(path.is_dir() for path in paths):
        # If there were segments, there would be a position.
        print(f"nothing was captured yet, as there is no segment in {', '.join(map(str, paths))}")
        return 0
    if result.tables or not tables:
        for one in _lines(result, directory):
            print(one)
    if result.errors:
        frames = "1 frame was" if result.errors == 1 else f"{result.errors} frames were"
        raise PgOutputError(
            f"{frames} refused, and put in the table of errors in {directory}",
            code="frames_refused",
            path=str(directory),
        )
    if tables and not result.tables:
        raise PgOutputError(
            "there are no changes of the tables that were asked for, and nothing was made; without "
            "--to and --table, inspect shows which there are",
            code="no_table",
        )
    return 0


def is_of(tables: Iterable[str], patterns: Sequence[str]) -> bool:
    """Whether one of some tables matches one of some patterns; True without patterns."""
    return not patterns or any(
        fnmatchcase(table, pattern) for table in tables for pattern in patterns
    )


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[ExportProgress], None] | None]:
    """A progress bar on standard error, if that is a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    with Progress(
        BarColumn(),
        DownloadColumn(),
        TextColumn("{task.fields[rows]:,} rows, {task.fields[written]:,} written"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as bars:
        task = bars.add_task("", total=None, rows=0, written=0)

        def show(progress: ExportProgress) -> None:
            bars.update(
                task,
                completed=progress.bytes,
                total=progress.total_bytes,
                rows=progress.rows,
                written=progress.rows_written,
            )

        yield show


def _lines(result: ExportResult, directory: Path) -> Iterator[str]:
    names = [printable(_name(one)) for one in result.tables]
    width = max(map(len, names), default=0) + 2
    for name, one in zip(names, result.tables, strict=True):
        yield f"{name:<{width}}{one.rows:>12,}  {', '.join(path.name for path in one.files)}"
    parts = [f"{counted(result.rows, 'row')} added to {directory}"]
    if result.position is not None:
        parts.append(f"it has everything up to {format_lsn(result.position)}")
    if result.rolled_back:
        parts.append(f"{result.rolled_back:,} rolled back left out")
    if result.elsewhere:
        count = len(result.elsewhere)
        waits = "table waits" if count == 1 else "tables wait"
        parts.append(f"{count:,} {waits} for a snapshot")
    if result.undecided:
        parts.append(f"{result.undecided:,} of transactions whose end is not there")
    yield "; ".join(parts)


def _name(table: ExportedTable) -> str:
    version = f" v{table.version}" if table.version > 1 else ""
    return qualified(table) + version
