"""A local Spark session with the settings that the readers of this package need."""

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

_PACKAGE = "pyspark_pgoutput"
_KNOWING: WeakSet[SparkSession] = WeakSet()
"""The sessions in which the source was registered: once more is a warning of Spark's."""


def session(
    master: str | None = "local[*]",
    app_name: str = "pgoutput_fast",
    configuration: Mapping[str, str] | None = None,
) -> SparkSession:
    """Make a Spark session with a Java that works, and with workers that run this Python.

    It knows the source ``format("pgoutput")``, also where Spark does not find that by itself.

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
    running = plain_session(master, app_name, configuration)
    _make_known(running)
    return running


def plain_session(
    master: str | None, app_name: str, configuration: Mapping[str, str] | None = None
) -> SparkSession:
    """The session of :func:`session`, which knows the source only if Spark finds it by itself."""
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName(app_name)
    for name, value in _settings(master, configuration).items():
        builder = builder.config(name, value)
    with _environment():
        return builder.getOrCreate()


def _make_known(running: Any) -> None:
    """Register the source where Spark does not find the package that names it.

    Spark looks for packages in the directories of the import path, and does not ask the finder of
    an editable install. There registering has Spark look once, which begins a Python process and
    takes a second; where the package is found it costs nothing.
    """
    from pyspark.errors import AnalysisException
    from pyspark.sql import SparkSession

    # With Spark Connect the server finds its own. PySpark 3 has no such sources.
    is_own = isinstance(running, SparkSession) and hasattr(running, "dataSource")
    if not is_own or running in _KNOWING or _is_found():
        return
    try:
        from .data_source import PgOutputDataSource
    except PgOutputError:
        return  # this PySpark is too old for the source, and not for the rest
    # It is known if Spark's own Python finds it and this one does not.
    with contextlib.suppress(AnalysisException):
        running.dataSource.register(PgOutputDataSource)
    _KNOWING.add(running)


def _is_found() -> bool:
    """Whether Spark finds the package, which looks where Python does by itself."""
    # Spark's Python is begun where this process runs, and does not know where a script is.
    is_safe = getattr(sys.flags, "safe_path", False)
    first = [] if is_safe else [one for one in sys.path[:1] if one not in {"", str(Path.cwd())}]
    places = sys.path[len(first) :]
    return any(one.name == _PACKAGE for one in pkgutil.iter_modules(places))


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
