"""An sdist and wheels, each built once."""

from __future__ import annotations

import shutil
import tarfile
from pathlib import Path

import pytest
from support.commands.builds import ROOT, build, only_file


@pytest.fixture(scope="session")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An sdist of a copy of the tree: a build in the tree would leave files in it."""
    directory = tmp_path_factory.mktemp("sdist")
    copy = shutil.copytree(
        ROOT,
        directory / "tree",
        ignore=shutil.ignore_patterns(
            ".git", ".venv*", "build", "dist", "*.egg-info", "*.so", "__pycache__", ".*_cache",
            ".hypothesis",
        ),
    )  # fmt: skip
    # What a build in the source directory would leave there must not get into the sdist.
    (copy / "pgoutput_fast" / "_core.c").write_text("#error generated\n")
    built = build("sdist", copy, directory, PGOUTPUT_FAST_NO_EXT="1")
    assert built.returncode == 0, built.stderr
    return only_file(directory, "*.tar.gz")


@pytest.fixture(scope="session")
def unpacked(sdist: Path) -> Path:
    """The sdist, unpacked."""
    with tarfile.open(sdist) as archive:
        archive.extractall(sdist.parent / "unpacked", filter="data")
    return only_file(sdist.parent / "unpacked", "pgoutput_fast-*")


@pytest.fixture(scope="session")
def pure_wheel(unpacked: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel without extensions."""
    out = tmp_path_factory.mktemp("pure")
    built = build("wheel", unpacked, out, PGOUTPUT_FAST_NO_EXT="1")
    assert built.returncode == 0, built.stderr
    return only_file(out, "*.whl")


@pytest.fixture(scope="session")
def compiled_wheel(unpacked: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel with the extension required."""
    out = tmp_path_factory.mktemp("compiled")
    built = build("wheel", unpacked, out, PGOUTPUT_FAST_REQUIRE_EXT="1")
    assert built.returncode == 0, built.stderr
    return only_file(out, "*.whl")
