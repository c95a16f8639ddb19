"""What is built: sdist and wheels, with the extension, without it, and when it can't be built."""

from __future__ import annotations

import shutil
import tarfile
import zipfile
from pathlib import Path

import pytest
from support.commands.builds import (
    ROOT,
    build,
    fresh_venv,
    only_file,
    run_python,
    wheel_metadata,
    wheel_names,
)

import pgoutput_fast

NAMES_IMPLEMENTATION = "import pgoutput_fast as pf; print(pf.IMPLEMENTATION, pf.FALLBACK_REASON)"


@pytest.mark.slow
def test_sdist_has_sources_and_tests_and_nothing_generated(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    expected = {
        "pgoutput_fast/decoding/_core.pyx",
        "pgoutput_fast/py.typed",
        "setup.py",
        "pyproject.toml",
    }
    expected |= {"LICENSE", "README.md", "Makefile", "tools/find-python", "tests/conftest.py"}
    expected |= {
        str(path.relative_to(ROOT))
        for pattern in ("*.pyx", "*.pxd", "*.h")
        for path in ROOT.glob(f"pgoutput_fast/{pattern}")
    }
    assert expected <= names
    assert not [name for name in names if name.endswith((".c", ".so", ".pyc"))]


@pytest.mark.slow
def test_pure_wheel(pure_wheel: Path) -> None:
    assert pure_wheel.name.endswith("-py3-none-any.whl")
    modules = {path.name for path in (ROOT / "pgoutput_fast").glob("*.py")}
    names = wheel_names(pure_wheel)
    assert {f"pgoutput_fast/{module}" for module in modules} | {"pgoutput_fast/py.typed"} <= names
    assert not [name for name in names if name.endswith((".so", ".pyx", ".pxd", ".c"))]
    # Neither tests nor tools become top-level packages of who installs it.
    top = {name.partition("/")[0].partition("-")[0] for name in names}
    assert top == {"pgoutput_fast", "pyspark_pgoutput"}


FINDS_THE_SOURCE = """
from pyspark.errors import AnalysisException
from pgoutput_fast.spark import session

spark = session("local[1]", configuration={"spark.log.level": "OFF"})
try:
    spark.read.format("pgoutput").load()
except AnalysisException as error:
    print("pgoutput_fast error" in str(error))
"""


@pytest.mark.slow
@pytest.mark.spark
def test_spark_finds_the_source_by_itself(pure_wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(pure_wheel) as wheel:
        wheel.extractall(tmp_path / "installed")
    ran = run_python(
        "-c", FINDS_THE_SOURCE, cwd=tmp_path, PYTHONPATH=str(tmp_path / "installed"),
        PGOUTPUT_FAST_IMPL="python",
    )  # fmt: skip
    assert (ran.returncode, ran.stdout) == (0, "True\n"), ran.stderr


def test_metadata_of_a_wheel(pure_wheel: Path) -> None:
    metadata = wheel_metadata(pure_wheel)
    assert f"Version: {pgoutput_fast.__version__}" in metadata
    assert "License-Expression: Apache-2.0" in metadata
    assert "Requires-Python: >=3.10" in metadata
    required = [line for line in metadata if line.startswith("Requires-Dist: ")]
    assert [line for line in required if "extra ==" not in line] == ["Requires-Dist: numpy>=1.22"]
    extras = {line.removeprefix("Provides-Extra: ") for line in metadata if "Provides-E" in line}
    assert extras == {
        "replication", "arrow", "spark", "cli", "metrics", "demo", "demo-local", "delta", "duckdb",
        "iceberg", "testing", "all",
    }  # fmt: skip


@pytest.mark.slow
def test_compiled_wheel_from_the_sdist(compiled_wheel: Path, tmp_path: Path) -> None:
    assert not compiled_wheel.name.endswith("-any.whl")
    names = wheel_names(compiled_wheel)
    assert [name for name in names if name.startswith("pgoutput_fast/decoding/_core.")]
    assert not [name for name in names if name.endswith((".pyx", ".pxd", ".c"))]

    python = fresh_venv(tmp_path / "venv", compiled_wheel)
    ran = run_python("-W", "error", "-c", NAMES_IMPLEMENTATION, python=python, cwd=tmp_path)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "cython None\n", "")


@pytest.fixture
def translated(compiled_wheel: Path, unpacked: Path, tmp_path: Path) -> Path:
    """The unpacked sdist with the generated C (it takes a while), and without its objects."""
    assert compiled_wheel.exists()
    ignored = shutil.ignore_patterns("lib.*", "temp.*", "bdist.*", "*.egg-info")
    return Path(shutil.copytree(unpacked, tmp_path / "translated", ignore=ignored))


@pytest.mark.slow
def test_failed_extension_is_an_error_where_it_is_required(
    translated: Path, tmp_path: Path
) -> None:
    settings = {"CC": "no-such-compiler", "PGOUTPUT_FAST_REQUIRE_EXT": "1"}
    built = build("wheel", translated, tmp_path / "out", **settings)
    assert built.returncode != 0
    assert "no-such-compiler" in built.stdout + built.stderr
    assert not list(tmp_path.glob("out/*"))


@pytest.mark.slow
def test_failed_extension_leaves_the_twin_otherwise(translated: Path, tmp_path: Path) -> None:
    built = build("wheel", translated, tmp_path / "out", CC="no-such-compiler")
    assert built.returncode == 0, built.stderr
    assert 'building extension "pgoutput_fast.decoding._core" failed' in built.stdout + built.stderr
    wheel = only_file(tmp_path / "out", "*.whl")
    assert not [name for name in wheel_names(wheel) if name.endswith(".so")]

    python = fresh_venv(tmp_path / "venv", wheel)
    ran = run_python("-c", NAMES_IMPLEMENTATION, python=python, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("python ")
    assert "None" not in ran.stdout
    assert "Warning" in ran.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        (
            {"PGOUTPUT_FAST_NO_EXT": "1", "PGOUTPUT_FAST_REQUIRE_EXT": "1"},
            "PGOUTPUT_FAST_NO_EXT and PGOUTPUT_FAST_REQUIRE_EXT: set only one",
        ),
        ({"PGOUTPUT_FAST_REQUIRE_EXT": "yes"}, "PGOUTPUT_FAST_REQUIRE_EXT must be 0 or 1"),
        ({"PGOUTPUT_FAST_DEBUG": "true"}, "PGOUTPUT_FAST_DEBUG must be 0 or 1"),
    ],
)
def test_switches_that_make_no_sense_are_refused(
    settings: dict[str, str], complaint: str, unpacked: Path
) -> None:
    ran = run_python("setup.py", "--name", cwd=unpacked, **settings)
    assert ran.returncode != 0
    assert complaint in ran.stderr
