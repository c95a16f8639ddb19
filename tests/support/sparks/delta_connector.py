"""Delta's connector for Spark: its two jars, which Maven fetches once, and the settings for it.

With PGOUTPUT_FAST_REQUIRE_JARS, as `make test-delta-spark` has it, they are fetched, and a test
that lacks them fails. Otherwise it is skipped if nobody has fetched them yet.
"""

from __future__ import annotations

import functools
from pathlib import Path

from support.sparks.maven_jars import DIRECTORY, LackingError, is_required, run_maven

__all__ = ["is_required", "settings"]

JARS = ("io.delta:delta-spark_4.2_2.13:4.4.0", "io.delta:delta-storage:4.4.0")
PLUGIN = "org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy"


@functools.cache
def settings() -> dict[str, str]:
    """The settings of a Spark with the connector; empty, with the reason, if there is none."""
    try:
        jars = _jars()
    except LackingError as error:
        return {"": str(error)}
    return {
        "spark.jars": ",".join(map(str, jars)),
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
        "spark.databricks.delta.snapshotPartitions": "2",
    }


def _jars() -> list[Path]:
    import pyspark

    if not pyspark.__version__.startswith("4.2."):
        raise LackingError(f"Delta has no connector for PySpark {pyspark.__version__}")
    found = []
    for artifact in JARS:
        _, name, version = artifact.split(":")
        path = DIRECTORY / f"{name}-{version}.jar"
        if not path.exists():
            if not is_required():
                raise LackingError(f"there is no {path.name}, which make test-delta-spark fetches")
            options = (f"-Dartifact={artifact}", "-DoutputDirectory={directory}")
            run_maven(PLUGIN, options, path)
        found.append(path)
    return found
