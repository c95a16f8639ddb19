"""Builds the wheel and tests it as cibuildwheel will, before a release finds out.

Which command tests it, over which files and in which environment, is read from the section of
cibuildwheel in pyproject.toml. The wheel and the test groups are installed into an environment that
has nothing else, and the command runs in a directory that holds nothing but the test sources.

    python tools/test_wheel.py

Needs the dependency group "build", and what pip installs the test groups from.
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
    """The environment without what was set for Python or the package, and with `more`."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PGOUTPUT_FAST_", "PYTHON", "PYTEST_"))
    }
    return kept | more


def run(*command: str | Path, **environment: str) -> None:
    """Run a program to its end; what it prints is shown if it fails, which ends this one too."""
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
    """Build, install and test in `directory`; the exit status of the tests."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["cibuildwheel"]
    # By way of the sdist: nothing that lies about in the checkout gets in.
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
    # The command is a line for a shell, as it is to cibuildwheel.
    command = ["/bin/sh", "-c", settings["test-command"]]
    return subprocess.run(command, check=False, cwd=sources, env=environment).returncode


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="pgoutput-fast-wheel-") as temporary:
        sys.exit(test_wheel(Path(temporary)))
