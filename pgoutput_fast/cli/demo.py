"""``pgoutput-fast demo``: a server under load, Delta tables that follow it, and the proof."""

from __future__ import annotations

import contextlib
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pgoutput_fast.demo.report import write_report
from pgoutput_fast.demo.run import Progress, Result, run
from pgoutput_fast.errors import PgOutputError, printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from typing_extensions import Self

_LEAST_CHANGES, _MOST_CHANGES = 5_000, 5_000_000
_LINES = 1.5  # seconds between two lines where there is no terminal
_REFRESH = 0.2  # seconds


class _Lines(Progress):
    """Lines about what is being done, one every so many seconds, for as long as the block takes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._begun = time.monotonic()
        self._phase = self._note = ""
        self._phase_begun = self._begun
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._every = _LINES

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._end_phase()

    def _run(self) -> None:
        while not self._over.wait(self._every):
            self._show()

    def _at(self) -> str:
        return f"{time.monotonic() - self._begun:5.1f} s"

    def _print(self, text: str, style: str = "") -> None:
        self._console.print(
            f"{self._at()}  {printable(text)}", style=style, highlight=False, soft_wrap=True
        )

    def _show(self) -> None:
        if self._phase:
            self._print(f"{self._phase}: {self._note}" if self._note else f"{self._phase} …")

    def _end_phase(self) -> None:
        if self._phase:
            taken = time.monotonic() - self._phase_begun
            self._print(f"✓ {self._phase} ({taken:.1f} s)", "green")
        self._phase = ""

    def phase(self, name: str) -> None:
        self._end_phase()
        self._phase_begun = time.monotonic()
        self._phase, self._note = name, ""

    def note(self, text: str) -> None:
        self._note = text

    def mark(self, text: str) -> None:
        self._print(f"  {text}", "yellow" if "kill" in text else "dim")


class _Live(_Lines):
    """A line of a terminal that changes, below those of what is done."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._every = _REFRESH
        self._status = console.status("")

    def __enter__(self) -> Self:
        self._status.start()
        super().__enter__()
        return self

    def __exit__(self, *args: object) -> None:
        super().__exit__(*args)
        self._status.stop()

    def _show(self) -> None:
        from rich.text import Text

        self._status.update(Text(f"{self._at()}  {self._phase}  {printable(self._note)}"))


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


def _table(result: Result) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(
        title="Delta tables, each compared with the server's, row by row",
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
    )
    table.add_column("table", no_wrap=True)
    for heading in ("rows", "changes", "changes MB", "rows MB"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("equal", justify="center", no_wrap=True)
    for entry in result.tables:
        contents = entry.contents
        table.add_row(
            entry.name,
            f"{entry.rows:,}",
            f"{contents.changes:,}",
            f"{contents.change_bytes / 1e6:.1f}",
            f"{contents.state_bytes / 1e6:.1f}",
            "[green]✓" if entry.state == "equal" else f"[red]{entry.state}",
        )
    table.add_section()
    tables = result.tables
    table.add_row(
        "all",
        f"{sum(t.rows for t in tables):,}",
        f"{result.changes:,}",
        f"{sum(t.contents.change_bytes for t in tables) / 1e6:.1f}",
        f"{sum(t.contents.state_bytes for t in tables) / 1e6:.1f}",
        "[green]✓" if result.is_right else "[red]no",
    )
    return table


def _figures(result: Result) -> Table:
    from rich.table import Table

    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(justify="right")
    table.add_column()
    rates = result.rates
    for rate, text in (
        (rates.capture, "changes/s captured into segments, while the backlog was worked off"),
        (rates.decode, "changes/s decoded into Arrow columns, by one thread"),
        (
            rates.change_tables,
            "changes/s into change tables, in the largest window",
        ),
        (rates.state_tables, "changes/s from there into state tables"),
    ):
        table.add_row(f"[bold]{rate:,.0f}[/bold]", text)
    table.add_row(
        f"[bold]{result.caught_up_seconds:.1f} s[/bold]",
        f"from the restart after kill -9 to the last of {result.backlog:,} changes that waited",
    )
    return table


class _Ended(KeyboardInterrupt):
    """A signal is to end the command, which then cleans up as after Ctrl-C."""


def _end(number: int, _frame: object) -> None:
    raise _Ended(number)


@click.command("demo", short_help="Server, load, Spark, kill -9, and the proof.")
@click.option(
    "--changes",
    type=click.IntRange(_LEAST_CHANGES, _MOST_CHANGES),
    default=500_000,
    show_default=True,
    help="About how many changes the demonstration's own tables get; pgbench's come on top.",
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
    """Start a PostgreSQL server, put load on it, have Delta tables follow it by Spark, kill that
    and start it again, and compare every row of the tables with the server's.

    Exits with 1 and names what is not equal, if something is not.
    """  # noqa: D205 - click's help is one paragraph
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
    with _directory(out, keep) as directory:
        with _Live(console) if console.is_terminal else _Lines(console) as progress:
            result = run(changes, directory=directory, seed=seed, progress=progress)
        write_report(result, report)
        console.print(_table(result))
        console.print()
        console.print(_figures(result))
        console.print()
        console.print(
            "types, by values that are not NULL: "
            + " · ".join(f"{name} {family.values:,}" for name, family in result.families.items()),
            highlight=False,
        )
        console.print(
            f"PostgreSQL {result.server_version}, Spark {result.spark_version}, decoder "
            f"[bold]{result.implementation}[/bold]"
            + (f" ({result.fallback_reason})" if result.fallback_reason else "")
        )
        if out is not None or keep:
            console.print(f"segments and tables: {directory}", soft_wrap=True)
        console.print(f"report: {report}", soft_wrap=True)
        console.print(f"{result.seconds:.0f} seconds in all")
        right = "bold green" if result.is_right else "bold red"
        console.print(printable(result.verdict), style=right, soft_wrap=True, highlight=False)
    return 0 if result.is_right else 1
