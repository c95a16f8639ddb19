"""Build the wheel and test it as cibuildwheel will in a release.

The test command, the test sources and the environment variables are those of cibuildwheel's section
in pyproject.toml. The wheel and the test groups are installed into an empty virtual environment.
The command runs in a directory that has only the test sources.

    python tools/test_wheel.py

It needs the dependency group "build", and a package index for the test groups.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]


def without_settings(**more: str) -> dict[str, str]:
    """The environment variables except those for Python, pytest or the package, and `more`."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PGOUTPUT_FAST_", "PYTHON", "PYTEST_"))
    }
    return kept | more


def run(*command: str | Path, **environment: str) -> None:
    """Run a program. If it fails, print its output and exit."""
    done = subprocess.run(
        command,
        check=False,
        env=without_settings(**environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"{done.stdout}\nfailed: {' '.join(map(str, command))}")


def settings() -> dict[str, Any]:
    """The section of cibuildwheel in pyproject.toml."""
    section: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    return dict(section["cibuildwheel"])


def test_installed(wheel: Path, python: str, directory: Path) -> int:
    """Install a wheel and test it. Returns the exit code of the tests."""
    section = settings()
    venv = directory / "venv"
    run(python, "-m", "venv", venv)
    groups = [f"--group={ROOT / 'pyproject.toml'}:{group}" for group in section["test-groups"]]
    pip = [venv / "bin" / "python", "-m", "pip", "--disable-pip-version-check"]
    run(*pip, "install", "--upgrade", "pip>=25.1")
    run(*pip, "install", wheel, *groups)

    sources = directory / "sources"
    for name in section["test-sources"]:
        source, target = ROOT / name, sources / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)
    environment = without_settings(**section["test-environment"])
    environment["PATH"] = f"{venv / 'bin'}{os.pathsep}{environment['PATH']}"
    # cibuildwheel also runs the command by a shell.
    command = ["/bin/sh", "-c", section["test-command"]]
    return subprocess.run(command, check=False, cwd=sources, env=environment).returncode


def main(directory: Path) -> int:
    """Build, install and test the wheel in `directory`. Returns the exit code of the tests."""
    # The wheel is built from the sdist, so that no stray file of the checkout gets into it.
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", directory, ROOT]
    run(*build, **settings()["environment"])
    (wheel,) = directory.glob("*.whl")
    print(f"Built {wheel.name}", flush=True)
    return test_installed(wheel, sys.executable, directory)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="pgoutput-fast-wheel-") as temporary:
        sys.exit(main(Path(temporary)))
