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


def test_wheel(directory: Path) -> int:
    """Build, install and test the wheel in `directory`. Returns the exit code of the tests."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["cibuildwheel"]
    # The wheel is built from the sdist, so that no stray file of the checkout gets into it.
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", directory, ROOT]
    run(*build, **settings["environment"])
    (wheel,) = directory.glob("*.whl")
    print(f"Built {wheel.name}", flush=True)

    venv = directory / "venv"
    run(sys.executable, "-m", "venv", venv)
    groups = [f"--group={ROOT / 'pyproject.toml'}:{group}" for group in settings["test-groups"]]
    pip = [venv / "bin" / "python", "-m", "pip", "--disable-pip-version-check"]
    run(*pip, "install", "--upgrade", "pip>=25.1")
    run(*pip, "install", wheel, *groups)

    sources = directory / "sources"
    for name in settings["test-sources"]:
        source, target = ROOT / name, sources / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)
    environment = without_settings(**settings["test-environment"])
    environment["PATH"] = f"{venv / 'bin'}{os.pathsep}{environment['PATH']}"
    # cibuildwheel also runs the command by a shell.
    command = ["/bin/sh", "-c", settings["test-command"]]
    return subprocess.run(command, check=False, cwd=sources, env=environment).returncode


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="pgoutput-fast-wheel-") as temporary:
        sys.exit(test_wheel(Path(temporary)))
