"""``pgoutput-fast demo``: sync a server under load, kill the sync, and compare all rows."""

from __future__ import annotations

import contextlib
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pgoutput_fast.demo.report import make_report
from pgoutput_fast.demo.run import DemoProgress, Result, run
from pgoutput_fast.errors import PgOutputError, printable
from pgoutput_fast.html_page import write_page
from pgoutput_fast.options import count

from ._help import GroupedCommand
from ._options import Value

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from typing_extensions import Self

_LEAST_CHANGES, _MOST_CHANGES = 5_000, 5_000_000
_CHANGES = {"spark": 500_000, "local": 20_000}
_LINES = 1.5  # seconds between two lines if there is no terminal


class _PhaseLines(DemoProgress):
    """Prints lines about the progress at intervals, for the length of the block."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._start = time.monotonic()
        self._phase = self._note = ""
        self._phase_start = self._start
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._end_phase()

    def _run(self) -> None:
        while not self._over.wait(_LINES):
            if self._phase:
                self._print(f"{self._phase}: {self._note}" if self._note else f"{self._phase} …")

    def _print(self, text: str, style: str = "") -> None:
        line = f"{time.monotonic() - self._start:5.1f} s  {printable(text)}"
        self._console.print(line, style=style, markup=False, highlight=False, soft_wrap=True)

    def _end_phase(self) -> None:
        if self._phase:
            seconds = time.monotonic() - self._phase_start
            self._print(f"✓ {self._phase} ({seconds:.1f} s)", "green")
        self._phase = ""

    def phase(self, name: str) -> None:
        self._end_phase()
        self._phase_start = time.monotonic()
        self._phase, self._note = name, ""

    def note(self, text: str) -> None:
        self._note = text

    def event(self, text: str) -> None:
        self._print(f"  {text}", "yellow" if "kill" in text else "dim")


@contextlib.contextmanager
def _directory(out: Path | None) -> Iterator[Path]:
    if out is None:
        directory = Path(tempfile.mkdtemp(prefix="pgoutput-fast-demo-"))
        try:
            yield directory
        except PgOutputError:
            raise  # its text names a log there
        except BaseException:
            shutil.rmtree(directory)
            raise
        shutil.rmtree(directory)
        return
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise PgOutputError(
            f"{out} exists already, and is not an empty directory",
            code="already_exists",
            path=str(out),
            hint="Give a new directory as --out",
        )
    out.mkdir(parents=True, exist_ok=True)
    yield out


def _table(result: Result) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    table.add_column("table", no_wrap=True)
    for heading in ("rows", "changes"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("equal", justify="center", no_wrap=True)
    for compared in result.tables:
        equal = "[green]✓" if compared.state == "equal" else f"[red]{compared.state}"
        table.add_row(compared.name, f"{compared.rows:,}", f"{compared.changes:,}", equal)
    return table


class _Ended(KeyboardInterrupt):
    """A signal ends the command, which then cleans up as after Ctrl-C."""


def _end(number: int, _frame: object) -> None:
    raise _Ended(number)


@click.command(
    "demo",
    cls=GroupedCommand,
    examples=("pgoutput-fast demo --engine local",),
    short_help="Run a server, load, a sync and a kill, and compare the tables.",
)
@click.option(
    "--engine",
    type=click.Choice(["spark", "local"]),
    default="spark",
    show_default=True,
    help="Write Delta with Spark, or DuckDB.",
)
@click.option(
    "--changes",
    type=Value(count(_LEAST_CHANGES, _MOST_CHANGES)),
    metavar="N",
    help="About N changes. [default: 500000, local: 20000]",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="New directory. [default: a temporary one]",
)
@click.option(
    "--report",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("demo-report.html"),
    show_default=True,
    help="HTML report.",
)
def command(engine: str, changes: int | None, out: Path | None, report: Path) -> int:
    """Start a PostgreSQL server under load, sync its tables, kill the sync, start it again, and
    compare every row of the tables with the server's.

    --changes counts changes of the demo's own tables; pgbench adds more. Exits with 1 and names
    the table if a table differs.
    """  # noqa: D205 - click's help is one paragraph
    signal.signal(signal.SIGTERM, _end)
    # Keep ignoring SIGHUP if it is ignored, as under nohup.
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, _end)
    if not report.absolute().parent.is_dir():
        raise PgOutputError(
            f"there is no directory for the report {report}", code="missing_path", path=str(report)
        )
    try:
        return _demo(engine, changes or _CHANGES[engine], out, report)
    except _Ended as ended:
        # The exit code that shells use when a signal ended a command: 143 SIGTERM, 129 SIGHUP.
        raise click.exceptions.Exit(128 + ended.args[0]) from ended


def _demo(engine: str, changes: int, out: Path | None, report: Path) -> int:
    """Run the demonstration, print its results, and return the exit code."""
    from rich.console import Console

    console = Console()
    with _directory(out) as directory:
        with _PhaseLines(console) as progress:
            result = run(changes, directory=directory, engine=engine, progress=progress)
        write_page(make_report(result), report)
    console.print(_table(result))
    lines = [
        f"backlog of {result.backlog:,} changes: {result.caught_up_seconds:.1f} s from the restart",
        result.versions,
        *([] if out is None else [f"change log and tables: {out}"]),
        f"report: {report}",
        f"{result.seconds:.0f} seconds in all",
    ]
    for line in lines:
        console.print(printable(line), markup=False, highlight=False, soft_wrap=True)
    right = "bold green" if result.is_right else "bold red"
    console.print(
        printable(result.verdict), style=right, markup=False, highlight=False, soft_wrap=True
    )
    return 0 if result.is_right else 1
