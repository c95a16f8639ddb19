"""Building and running the project in directories of its own, without the network."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

from support.paths import ROOT


def clean_environment(**settings: str) -> dict[str, str]:
    """The environment without anything that would decide for the test, plus `settings`."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("PGOUTPUT_FAST_") and name not in {"PYTHONPATH", "CC", "CFLAGS"}
    }
    return {**inherited, **settings}


def run_python(
    *arguments: str | Path, python: str | Path = sys.executable, cwd: Path = ROOT, **settings: str
) -> subprocess.CompletedProcess[str]:
    """Run a Python to its end; its output is captured, its exit status left to the caller."""
    return subprocess.run(
        [python, *arguments],
        cwd=cwd,
        env=clean_environment(**settings),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )


def build(kind: str, source: Path, out: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    """Build an sdist or a wheel of `source` into `out`, without the network."""
    return run_python(
        "-m", "build", f"--{kind}", "--no-isolation", "--outdir", out, source,
        cwd=source, **settings,
    )  # fmt: skip


def only_file(directory: Path, pattern: str) -> Path:
    """The one file of a directory that matches."""
    (found,) = directory.glob(pattern)
    return found


def wheel_names(wheel: Path) -> set[str]:
    """Names of the files in a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def wheel_metadata(wheel: Path) -> list[str]:
    """Lines of the METADATA of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return archive.read(name).decode().splitlines()


def fresh_venv(directory: Path, wheel: Path) -> Path:
    """Make an environment with one wheel and NumPy, without even pip; return its Python.

    NumPy is linked from the test environment: nothing has to be fetched.
    """
    made = run_python("-m", "venv", "--without-pip", directory)
    assert made.returncode == 0, made.stderr
    python = directory / "bin" / "python"
    installed = run_python(
        "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel
    )
    assert installed.returncode == 0, installed.stderr
    numpy = Path(str(find_spec("numpy").origin)).parent
    (site_packages,) = directory.glob("lib/python3.*/site-packages")
    for package in (numpy, numpy.with_name("numpy.libs")):
        if package.exists():
            (site_packages / package.name).symlink_to(package)
    return python
