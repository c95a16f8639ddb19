"""Make a local Spark session with the settings that the readers of this package need."""

from __future__ import annotations

import contextlib
import os
import pkgutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from pgoutput_fast.errors import PgOutputError

from ._java import java_home

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

CONFIGURATION: Mapping[str, str] = {
    # Without this setting Spark matches the columns that a Python function returns by their
    # position, and compares neither names nor types.
    "spark.sql.execution.arrow.pyspark.validateSchema.enabled": "true",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "65536",
    # PostgreSQL's `time` is Spark's TIME, which is written to Parquet only with this setting.
    "spark.sql.timeType.enabled": "true",
    # 64-bit microseconds. The default INT96 is read as nanoseconds by others, and overflows there.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    # Show and parse timestamptz, a point in time, in UTC, whatever the machine's time zone.
    "spark.sql.session.timeZone": "UTC",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}
"""The settings of :func:`session`; its caller may override them."""

_PACKAGE = "pyspark_pgoutput"
_SESSIONS_WITH_SOURCE: WeakSet[SparkSession] = WeakSet()
"""The sessions that know the source: Spark warns if a source is registered twice."""


def session(
    master: str | None = "local[*]",
    app_name: str = "pgoutput_fast",
    configuration: Mapping[str, str] | None = None,
) -> SparkSession:
    """Make a Spark session with a Java that works, and with workers that run this Python.

    The session knows the source ``format("pgoutput")``, even if Spark does not find it by itself.

    Parameters
    ----------
    master : str or None
        Spark's master URL. None: as the environment and spark-submit say, else ``local[*]``.
    app_name : str
        The application's name.
    configuration : mapping of str to str, optional
        Spark's settings, which override those of :data:`CONFIGURATION`.

    Raises
    ------
    PgOutputError
        There is no Java 17 or newer.
    """
    running = plain_session(master, app_name, configuration)
    _register_source(running)
    return running


def plain_session(
    master: str | None, app_name: str, configuration: Mapping[str, str] | None = None
) -> SparkSession:
    """Return a session like :func:`session`; only Spark's own search makes it know the source."""
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName(app_name)
    for name, value in _settings(master, configuration).items():
        builder = builder.config(name, value)
    with _environment():
        return builder.getOrCreate()


def _register_source(running: Any) -> None:
    """Register the source if Spark does not find the package that names it.

    Spark searches the directories of the import path, and does not ask the import hook of an
    editable install. Registering lets Spark search once, which starts a Python process and takes a
    second. Nothing is registered if Spark finds the package.
    """
    from pyspark.errors import AnalysisException
    from pyspark.sql import SparkSession

    # A server of Spark Connect finds its own sources. PySpark 3 has no Python sources.
    is_own = isinstance(running, SparkSession) and hasattr(running, "dataSource")
    if not is_own or running in _SESSIONS_WITH_SOURCE or _is_on_import_path():
        return
    try:
        from .data_source import PgOutputDataSource
    except PgOutputError:
        return  # the source needs a newer PySpark; the rest of this package does not
    # The error means that Spark's own Python finds the source although this one does not.
    with contextlib.suppress(AnalysisException):
        running.dataSource.register(PgOutputDataSource)
    _SESSIONS_WITH_SOURCE.add(running)


def _is_on_import_path() -> bool:
    """Return whether Spark finds the package in the directories of the import path."""
    # Spark starts its Python in this working directory. It does not see a script's directory.
    is_safe = getattr(sys.flags, "safe_path", False)
    first = [] if is_safe else [path for path in sys.path[:1] if path not in {"", str(Path.cwd())}]
    places = sys.path[len(first) :]
    return any(module.name == _PACKAGE for module in pkgutil.iter_modules(places))


def begin_java(
    master: str | None, app_name: str, configuration: Mapping[str, str], output: int
) -> None:
    """Start the Java process of the session that the same arguments then make.

    Parameters
    ----------
    master, app_name, configuration
        As in :func:`session`.
    output : int
        The file descriptor for the output of Java and of its workers.

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
    # Java inherits standard error. A reader that waits for its end therefore waits for Java, too.
    descriptor = os.dup(2)
    try:
        with _environment():
            launch: Any = launch_gateway
            gateway = launch(conf, {"stdout": output, "stderr": output, "pass_fds": (descriptor,)})
            SparkContext._ensure_initialized(gateway=gateway)  # noqa: SLF001 - as Spark's own
    finally:
        os.close(descriptor)


def _settings(master: str | None, configuration: Mapping[str, str] | None) -> dict[str, str]:
    settings = {} if master is None else {"spark.master": master}
    return {**CONFIGURATION, **settings, **(configuration or {})}


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    """Set the variables that the JVM reads when it starts; restore the environment afterwards."""
    environment = {"JAVA_HOME": java_home(), "PYSPARK_PYTHON": sys.executable}
    previous = {name: os.environ[name] for name in environment if name in os.environ}
    os.environ.update(environment)
    try:
        yield
    finally:
        for name in environment:
            del os.environ[name]
        os.environ.update(previous)
