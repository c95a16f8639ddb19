"""A local Spark session with the settings that the readers of this package need."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

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
    if master is not None:
        builder = builder.master(master)
    for name, value in {**CONFIGURATION, **(configuration or {})}.items():
        builder = builder.config(name, value)
    # The JVM reads both variables when it starts. Afterwards the environment is restored.
    environment = {"JAVA_HOME": java_home(), "PYSPARK_PYTHON": sys.executable}
    previous = {name: os.environ[name] for name in environment if name in os.environ}
    os.environ.update(environment)
    try:
        return builder.getOrCreate()
    finally:
        for name in environment:
            del os.environ[name]
        os.environ.update(previous)
