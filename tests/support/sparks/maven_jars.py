"""Jars that tests need and that Maven fetches once, into a directory that git does not see.

With PGOUTPUT_FAST_REQUIRE_JARS, as the targets of make have it that are for such tests, they are
fetched, and a test that lacks them fails. Otherwise it is skipped if nobody has fetched them yet.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from support import paths

__all__ = ["DIRECTORY", "LackingError", "is_required", "run_maven", "with_dependencies"]

DIRECTORY = paths.ROOT / ".jars"
_PLUGIN = "org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy-dependencies"
_POM = """<project xmlns="http://maven.apache.org/POM/4.0.0">
<modelVersion>4.0.0</modelVersion><groupId>a</groupId><artifactId>b</artifactId><version>1</version>
<dependencies><dependency><groupId>{}</groupId><artifactId>{}</artifactId><version>{}</version>
</dependency></dependencies></project>
"""


class LackingError(Exception):
    """There are no jars here, and why."""


def is_required() -> bool:
    """Whether a test without them is a failure."""
    return bool(os.environ.get("PGOUTPUT_FAST_REQUIRE_JARS"))


def with_dependencies(artifact: str, *, target: str) -> list[Path]:
    """The jars of an artifact, ``group:name:version``, and of all that it needs.

    Raises
    ------
    LackingError
        They are not here, and not to be fetched, or can't be; `target` is what make calls it.
    """
    directory = DIRECTORY / artifact.replace(":", "-")
    if not directory.exists():
        if not is_required():
            raise LackingError(f"there is no {directory.name}, which make {target} fetches")
        with tempfile.TemporaryDirectory() as made:
            pom = Path(made, "pom.xml")
            pom.write_text(_POM.format(*artifact.split(":")))
            output = "-DoutputDirectory={directory}/all"
            options = ("-f", str(pom), "-DincludeScope=runtime", output)
            run_maven(_PLUGIN, options, directory, found="all")
    return sorted(directory.glob("*.jar"))


def run_maven(goal: str, options: Sequence[str], path: Path, *, found: str | None = None) -> None:
    """Have Maven write into a directory, and move what it wrote to a path.

    Parameters
    ----------
    goal : str
    options : sequence of str
        In which ``{directory}`` is the directory.
    path : pathlib.Path
    found : str, optional
        The name in it of what is moved, if it is not that of the path.

    Raises
    ------
    LackingError
        There is no Maven, or it can't fetch them.
    """
    maven = shutil.which("mvn")
    if maven is None:
        raise LackingError(f"there is no mvn, which fetches {path.name}")
    path.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as directory:
        given = [option.format(directory=directory) for option in options]
        ended = subprocess.run(
            [maven, "-q", "-B", goal, *given],
            capture_output=True, text=True, check=False, timeout=600,
        )  # fmt: skip
        if ended.returncode:
            told = (ended.stdout or ended.stderr)[:300]
            raise LackingError(f"mvn can't fetch {path.name}: {told}")
        # Other processes of the tests may have fetched it meanwhile.
        if not (path.is_dir() and any(path.iterdir())):
            (Path(directory) / (found or path.name)).replace(path)
