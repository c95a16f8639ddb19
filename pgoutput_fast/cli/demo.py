"""``pgoutput-fast demo``: make Spark tables of a server's changes, and compare the two."""

from __future__ import annotations

import contextlib
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pgoutput_fast.demo.report import write_report
from pgoutput_fast.demo.run import Progress, Result, run
from pgoutput_fast.errors import PgOutputError, counted

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID
    from rich.table import Table

_LEAST_CHANGES, _MOST_CHANGES = 5_000, 5_000_000


class _Bars(Progress):
    """A progress bar for each phase of the run."""

    def __init__(self, console: Console) -> None:
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            SpinnerColumn,
            TextColumn,
            TimeElapsedColumn,
        )
        from rich.progress import Progress as Bars

        self.bars = Bars(
            SpinnerColumn(finished_text="[green]✓"),
            TextColumn("{task.description:<28}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("[dim]{task.fields[note]}"),
            console=console,
        )
        self.task: TaskID | None = None

    def phase(self, name: str, total: int | None = None) -> None:
        self.end()
        self.task = self.bars.add_task(name, total=total, note="")

    def advance(self, done: int, note: str = "") -> None:
        if self.task is not None:
            self.bars.update(self.task, completed=done, note=note)

    def end(self) -> None:
        """Show the last phase as finished."""
        if self.task is not None:
            task = self.bars.tasks[self.task]
            total = task.total if task.total is not None else max(task.completed, 1)
            self.bars.update(self.task, total=total, completed=total, note="")


@contextlib.contextmanager
def _directory(out: Path | None, keep: bool) -> Iterator[Path]:
    if out is not None:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise PgOutputError(f"{out} is there already, and not an empty directory; give another")
        out.mkdir(parents=True, exist_ok=True)
        yield out
        return
    path = Path(tempfile.mkdtemp(prefix="pgoutput-fast-demo-"))
    try:
        yield path
    except BaseException:
        if keep:
            print(f"kept, as far as it came: {path}", file=sys.stderr)
        raise
    finally:
        if not keep:
            shutil.rmtree(path, ignore_errors=True)


def _rate(amount: int, seconds: float) -> str:
    return f"{amount / seconds:,.0f}" if seconds else "–"


def _table(result: Result) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(
        title="Tables, each compared with the server's COPY of it",
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
    )
    table.add_column("table", no_wrap=True)
    for heading in ("rows", "changes", "checks", "MB", "decode/s", "state/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("equal", justify="center", no_wrap=True)
    for entry in result.tables:
        table.add_row(
            entry.name,
            f"{entry.rows:,}",
            f"{entry.changes:,}",
            f"{entry.checks:,}",
            f"{(entry.change_bytes + entry.state_bytes) / 1e6:.1f}",
            _rate(entry.changes, entry.decode_seconds),
            _rate(entry.changes, entry.state_seconds),
            f"[red]{entry.differing:,} differ" if entry.differing else "[green]✓",
        )
    table.add_section()
    tables = result.tables
    table.add_row(
        "all",
        f"{sum(t.rows for t in tables):,}",
        f"{result.changes:,}",
        f"{sum(t.checks for t in tables):,}",
        f"{sum(t.change_bytes + t.state_bytes for t in tables) / 1e6:.1f}",
        _rate(result.changes, sum(t.decode_seconds for t in tables)),
        _rate(result.changes, sum(t.state_seconds for t in tables)),
        "[red]no" if result.difference else "[green]✓",
    )
    return table


class _Ended(KeyboardInterrupt):
    """A signal is to end the command, which then cleans up as after Ctrl-C."""


def _end(number: int, _frame: object) -> None:
    raise _Ended(number)


@click.command("demo", short_help="Server, capture, Spark, and the proof.")
@click.option(
    "--changes",
    type=click.IntRange(_LEAST_CHANGES, _MOST_CHANGES),
    default=200_000,
    show_default=True,
    help="How many changes the server makes, at least.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="A new directory for segments and tables; it is kept. Without, a temporary one is used.",
)
@click.option("--keep", is_flag=True, help="Keep the temporary directory.")
@click.option("--seed", type=int, default=1, show_default=True, help="Of the workload.")
@click.option(
    "--report",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("demo-report.html"),
    show_default=True,
    help="Where the picture of the run goes.",
)
def command(changes: int, out: Path | None, keep: bool, seed: int, report: Path) -> int:
    """Start a PostgreSQL server, change its tables, capture the changes, make Spark tables of them,
    and compare those with the server's own, row by row and column by column.

    Exits with 1 and names the first row that differs, if one does.
    """  # noqa: D205 - click's help is one paragraph
    # PySpark's own use of pandas causes warnings.
    warnings.filterwarnings("ignore", category=FutureWarning, module="pyspark")
    signal.signal(signal.SIGTERM, _end)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # it is ignored under nohup
        signal.signal(signal.SIGHUP, _end)
    if not report.absolute().parent.is_dir():
        raise PgOutputError(f"there is no directory for the report {report}")
    try:
        return _demo(changes, out, keep, seed, report)
    except _Ended as ended:
        # The exit code that shells use when a signal ended a command: 143 SIGTERM, 129 SIGHUP.
        raise click.exceptions.Exit(128 + ended.args[0]) from ended


def _demo(changes: int, out: Path | None, keep: bool, seed: int, report: Path) -> int:
    """Run the demonstration, print its results, and return the exit code."""
    from rich.console import Console

    console = Console()
    begun = time.monotonic()
    with _directory(out, keep) as directory:
        bars = _Bars(console)
        with bars.bars:
            result = run(changes, directory=directory, seed=seed, progress=bars)
            bars.end()
        write_report(result, report)
        console.print(_table(result))
        console.print(
            "compared, NULLs aside: "
            + " · ".join(f"{name} {family.values:,}" for name, family in result.families.items()),
            highlight=False,
        )
        console.print(
            f"PostgreSQL {result.server_version}, Spark {result.spark_version}, decoder "
            f"[bold]{result.implementation}[/bold]"
            + (f" ({result.fallback_reason})" if result.fallback_reason else "")
        )
        console.print(
            f"capture: {counted(result.frames, 'frame')} of "
            f"{counted(result.transactions, 'transaction')}, "
            f"{result.frame_bytes / 1e6:.1f} MB in {counted(result.segments, 'segment')}, "
            f"{_rate(result.frames, result.capture_seconds)} frames/s"
        )
        if out is not None or keep:
            console.print(f"segments and tables: {directory}", soft_wrap=True)
        console.print(f"report: {report}", soft_wrap=True)
        console.print(f"{time.monotonic() - begun:.0f} seconds in all")
    if result.difference is not None:
        print(f"pgoutput-fast: {result.difference}", file=sys.stderr)
        return 1
    return 0
