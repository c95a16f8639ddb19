"""A local Spark session with the settings that the readers of this package need."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ._java import java_home

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

CONFIGURATION: Mapping[str, str] = {
    # Without this setting Spark does not compare the names and types of the columns that a Python
    # function returns: it takes them by their position.
    "spark.sql.execution.arrow.pyspark.validateSchema.enabled": "true",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "65536",
    # PostgreSQL's `time` is Spark's TIME, which is written to Parquet only with this setting.
    "spark.sql.timeType.enabled": "true",
    # 64-bit microseconds. The default is INT96, which others read as nanoseconds, with overflows.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    # A timestamptz is a point in time. It is shown and parsed in UTC, whatever the machine's zone.
    "spark.sql.session.timeZone": "UTC",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}
"""The settings of :func:`session`, which its caller may override."""


def session(
    master: str | None = "local[*]",
    app_name: str = "pgoutput_fast",
    configuration: Mapping[str, str] | None = None,
) -> SparkSession:
    """Make a Spark session with a Java that works, and with workers that run this Python.

    Parameters
    ----------
    master : str or None
        Spark's master URL. None: as the environment and spark-submit say, or ``local[*]``.
    app_name : str
        The application's name.
    configuration : mapping of str to str, optional
        Spark's settings; they override those of :data:`CONFIGURATION`.

    Raises
    ------
    PgOutputError
        There is no Java 17 or newer.
    """
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName(app_name)
    for name, value in _settings(master, configuration).items():
        builder = builder.config(name, value)
    with _environment():
        return builder.getOrCreate()


def begin_java(
    master: str | None, app_name: str, configuration: Mapping[str, str], output: int
) -> None:
    """Begin the Java of a session that is made next by the same arguments.

    Parameters
    ----------
    master, app_name, configuration
        As of :func:`session`.
    output : int
        The file descriptor of what it prints, and of what its workers print.

    Raises
    ------
    PgOutputError
        There is no Java 17 or newer.
    """
    from pyspark import SparkConf, SparkContext
    from pyspark.java_gateway import launch_gateway

    conf = SparkConf().setAppName(app_name)
    for name, value in _settings(master, configuration).items():
        conf.set(name, value)
    # Who reads this process's standard error to its end waits for Java too, as if it wrote there.
    held = os.dup(2)
    try:
        with _environment():
            launch: Any = launch_gateway
            gateway = launch(conf, {"stdout": output, "stderr": output, "pass_fds": (held,)})
            SparkContext._ensure_initialized(gateway=gateway)  # noqa: SLF001 - as Spark's own
    finally:
        os.close(held)


def _settings(master: str | None, configuration: Mapping[str, str] | None) -> dict[str, str]:
    given = {} if master is None else {"spark.master": master}
    return {**CONFIGURATION, **given, **(configuration or {})}


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    """What the JVM reads when it starts; afterwards the environment is restored."""
    environment = {"JAVA_HOME": java_home(), "PYSPARK_PYTHON": sys.executable}
    previous = {name: os.environ[name] for name in environment if name in os.environ}
    os.environ.update(environment)
    try:
        yield
    finally:
        for name in environment:
            del os.environ[name]
        os.environ.update(previous)
