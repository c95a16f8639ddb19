"""Delta's connector for Spark: its two jars, which Maven fetches once, and the settings for it.

With PGOUTPUT_FAST_REQUIRE_JARS, as `make test-delta-spark` has it, they are fetched, and a test
that lacks them fails. Otherwise it is skipped if nobody has fetched them yet.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

JARS = ("io.delta:delta-spark_4.2_2.13:4.4.0", "io.delta:delta-storage:4.4.0")
DIRECTORY = Path(__file__).parents[2] / ".jars"
PLUGIN = "org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy"


class LackingError(Exception):
    """There is no connector here, and why."""


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
            _fetch(artifact, path)
        found.append(path)
    return found


def _fetch(artifact: str, path: Path) -> None:
    maven = shutil.which("mvn")
    if maven is None:
        raise LackingError(f"there is no mvn, which fetches {artifact}")
    path.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as directory:
        ended = subprocess.run(
            [maven, "-q", "-B", PLUGIN, f"-Dartifact={artifact}", f"-DoutputDirectory={directory}"],
            capture_output=True, text=True, check=False, timeout=600,
        )  # fmt: skip
        if ended.returncode:
            raise LackingError(
                f"mvn can't fetch {artifact}: {(ended.stdout or ended.stderr)[:300]}"
            )
        # Other processes of the tests may have fetched it meanwhile.
        (Path(directory) / path.name).replace(path)


def is_required() -> bool:
    """Whether a test without them is a failure."""
    return bool(os.environ.get("PGOUTPUT_FAST_REQUIRE_JARS"))
