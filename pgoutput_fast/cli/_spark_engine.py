"""The options of `sync` for Spark, and its engine."""

from __future__ import annotations

import contextlib
import signal
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from ..apply.syncing import Engine

_CONFIGURATION = {"spark.log.level": "ERROR"}
WINDOW_BYTES = 256 << 20
"""Of a window, if nothing else is asked for: executors write more at a time than one process."""


def _configuration(
    context: click.Context, parameter: click.Parameter, values: tuple[str, ...]
) -> dict[str, str]:
    """Spark's settings by their names."""
    del context, parameter
    found = {}
    for value in values:
        name, equals, setting = value.partition("=")
        if not (name.startswith("spark.") and equals):
            # It may have a key of an object storage.
            raise click.BadParameter("expected spark.NAME=VALUE; what was given is not shown")
        found[name] = setting
    return found


def spark_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options `--engine`, `--master` and `--conf`."""
    for option in reversed((
        click.option(
            "--engine",
            type=click.Choice(["local", "spark"]),
            default="local",
            show_default=True,
            help="What writes the tables: this process, or Spark's executors.",
        ),
        click.option(
            "--master",
            metavar="URL",
            help="Where Spark runs; by default as spark-submit says, or local[*].",
        ),
        click.option(
            "--conf",
            metavar="spark.NAME=VALUE",
            multiple=True,
            callback=_configuration,
            help="A setting of Spark.",
        ),
    )):  # fmt: skip
        command = option(command)
    return command


def check_engine(engine: str, target: str, master: str | None, conf: Mapping[str, str]) -> None:
    """Refuse options that do not go together.

    Raises
    ------
    click.UsageError
        They do not.
    """
    if engine == "spark":
        if target.startswith("duckdb:"):
            raise click.UsageError(
                "--engine spark keeps Delta tables, and a DuckDB file is written by one process: "
                "give a directory or a URL in --to"
            )
        return
    for name, given in (("--master", master), ("--conf", conf)):
        if given:
            raise click.UsageError(f"{name} is for --engine spark")


@contextlib.contextmanager
def running_engine(
    engine: str, master: str | None, conf: Mapping[str, str]
) -> Iterator[Engine | None]:
    """The engine, whose Spark ends with it; None for this process."""
    if engine != "spark":
        yield None
        return
    from ..spark import SparkEngine, session

    # Spark's own handler would end a job in the middle of a window.
    interrupted = signal.getsignal(signal.SIGINT)
    spark = session(master, "pgoutput-fast sync", {**_CONFIGURATION, **conf})
    signal.signal(signal.SIGINT, interrupted)
    try:
        yield SparkEngine(spark)
    finally:
        spark.stop()
