"""The house itself: make's own tools, and what has to be said in several places."""

from __future__ import annotations

import ast
import collections
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.commands.builds import ROOT, clean_environment, run_python

FIND_PYTHON = ROOT / "tools" / "find-python"


def executable(path: Path, script: str) -> Path:
    path.write_text("#!/bin/sh\n" + script)
    path.chmod(0o755)
    return path


def find_python(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run tools/find-python where only the Pythons in `directory` can be found."""
    directory.joinpath("sh").symlink_to("/bin/sh")
    return subprocess.run(
        [FIND_PYTHON, *arguments],
        env={"PATH": str(directory), "PYENV_ROOT": str(directory / "none")},
        capture_output=True,
        text=True,
        check=False,
    )


def python_that_is(path: Path, minor: int) -> Path:
    """An executable that answers as a CPython 3.`minor` would."""
    return executable(
        path,
        f'[ "${{3:-{minor}}}" = {minor} ] && [ {minor} -ge 10 ] && echo "$0"\n',
    )


def test_python_too_old_is_passed_over(tmp_path: Path) -> None:
    python_that_is(tmp_path / "python3", 8)
    python_that_is(tmp_path / "python3.8", 8)
    python_that_is(tmp_path / "python3.10", 10)
    newest = python_that_is(tmp_path / "python3.12", 12)
    # A pyenv shim of a version that is not selected.
    executable(tmp_path / "python3.13", "exit 127\n")
    assert find_python(tmp_path, "python3").stdout == f"{newest}\n"


def test_python_that_is_asked_for_is_taken(tmp_path: Path) -> None:
    asked = python_that_is(tmp_path / "python3", 11)
    python_that_is(tmp_path / "python3.12", 12)
    assert find_python(tmp_path, "python3").stdout == f"{asked}\n"


@pytest.mark.parametrize("asked", ["python3.11", "python3.9", "pypy3", "/nowhere/python"])
def test_python_that_is_asked_for_and_unsuitable_is_not_replaced(
    asked: str, tmp_path: Path
) -> None:
    python_that_is(tmp_path / "python3", 12)
    python_that_is(tmp_path / "python3.12", 12)
    executable(tmp_path / "python3.11", "exit 127\n")
    python_that_is(tmp_path / "python3.9", 9)
    ran = find_python(tmp_path, asked)
    assert (ran.returncode, ran.stdout) == (1, "")
    assert asked in ran.stderr


def test_all_pythons(tmp_path: Path) -> None:
    found = [python_that_is(tmp_path / f"python3.{minor}", minor) for minor in (10, 12)]
    assert find_python(tmp_path, "--all").stdout.split() == [str(path) for path in found]


def test_no_python(tmp_path: Path) -> None:
    ran = find_python(tmp_path, "python3")
    assert (ran.returncode, ran.stdout) == (1, "")
    assert "No CPython >= 3.10" in ran.stderr


@pytest.mark.parametrize(("compiler", "status"), [("", 0), ("no-such-compiler", 1), ("false", 1)])
def test_compiler_is_tried(compiler: str, status: int) -> None:
    settings = {"CC": compiler} if compiler else {}
    assert run_python("tools/can_compile.py", **settings).returncode == status


LINT_IMPORTS = [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"]
CHECK_CIRCLES = [sys.executable, "tools/check_circles.py"]


@pytest.mark.everyday("command0", "command5")
@pytest.mark.parametrize(
    ("command", "file", "line", "said"),
    [
        (
            LINT_IMPORTS, "decoding/state.py", "from ..replication import connect",
            "pgoutput_fast.replication",
        ),
        (
            LINT_IMPORTS, "lsn.py", "def late():\n    from .protocol.wire import Cursor",
            "pgoutput_fast.protocol",
        ),
        (
            CHECK_CIRCLES, "values/_values.pyx", "import os, pgoutput_fast.columnar.decoder",
            "imports pgoutput_fast.columnar.decoder, which lies above it",
        ),
        (
            CHECK_CIRCLES, "values/text.py", "import importlib\nimportlib.import_module(name)",
            "imports a module of the package by a literal name",
        ),
        (
            CHECK_CIRCLES, "values/_utf8.h", '#include "../columnar/_columns.h"',
            "_utf8.h includes _columns.h, which lies above it",
        ),
        (CHECK_CIRCLES, "columnar/_reader.pyx", "def f():\n    from . import decoder", "a circle"),
        (CHECK_CIRCLES, "protocol/wire.py", "from .messages import Message", "a circle"),
        (
            CHECK_CIRCLES, "decoding/_core.pyx", "from ..spark import session",
            "imports pgoutput_fast.spark",
        ),
        (
            CHECK_CIRCLES, "protocol/_wire.pxd", "from ..decoding._tuples cimport TupleData",
            "a circle",
        ),
        (
            CHECK_CIRCLES, "decoding/_tuples.pxd", "from ..spark cimport x",
            "imports pgoutput_fast.spark",
        ),
        (
            CHECK_CIRCLES, "protocol/encode.py", "from ..decoding import _core",
            "imports pgoutput_fast.decoding._core by name",
        ),
        (
            CHECK_CIRCLES, "names.py", "def late():\n    from .columnar import _pure_batch",
            "imports pgoutput_fast.columnar._pure_batch by name",
        ),
        (
            CHECK_CIRCLES, "decoding/_core.pyx", "from . import _pure",
            "imports pgoutput_fast.decoding._pure by name",
        ),
        (
            CHECK_CIRCLES, "lsn.py", 'importlib.import_module("pgoutput_fast.decoding._core")',
            "lsn imports a module of the package by a literal name",
        ),
    ],
)  # fmt: skip
def test_forbidden_imports_are_found(
    command: list[str], file: str, line: str, said: str, tmp_path: Path
) -> None:
    def check() -> subprocess.CompletedProcess[str]:
        environment = {**clean_environment(), "PYTHONPATH": str(tmp_path)}
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )

    without = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(ROOT / "pgoutput_fast", tmp_path / "pgoutput_fast", ignore=without)
    shutil.copytree(ROOT / "tools", tmp_path / "tools")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    sound = check()
    assert sound.returncode == 0, sound.stdout
    with (tmp_path / "pgoutput_fast" / file).open("a") as code:
        code.write(f"\n\n{line}\n")
    broken = check()
    assert broken.returncode == 1
    assert said in broken.stdout


def test_the_map_names_every_module() -> None:
    text = (ROOT / "docs" / "explanation" / "map-of-modules.md").read_text()
    cells = re.findall(r"^\| ([^|*]+) \|", text, re.MULTILINE)
    named = set(re.findall(r"\w+", " ".join(cells)))
    package = ROOT / "pgoutput_fast"
    modules = {
        path.relative_to(package).with_suffix("")
        for path in package.rglob("*")
        if path.suffix in (".py", ".pyx", ".h") and path.name not in ("__init__.py", "__main__.py")
    }
    assert len(modules) > 80
    # A twin stands beside the compiled module of its name.
    twins = {path for path in modules if path.name.startswith("_pure_")}
    assert [str(path) for path in sorted(modules - twins) if path.name not in named] == []


# Two modules of one name that are no twins, and why that is so.
SAME_NAMES = {
    "capture": "the function, and the command around it",
    "consumers": "those who read a directory, and the command that lists them",
    "history": "the history that readers open, its rules, and what asks the server for it",
    "nested": "one job, nested values: C writes them into columns, Python makes objects of them",
    "options": "what every option is made of, and the options of a sync and its target",
    "reader": "the compiled loop over frames, and the one who reads a segment beside its writer",
    "snapshot": "tables read at one point, and the command that asks a capture for that",
    "state": "what a decoder knows, and the current-state tables of Spark",
    "targets": "what tables are kept up to date in, and what is compared with the server",
    "wire": "the C constants of the one table of the wire",
}


def test_no_two_modules_have_one_name() -> None:
    """The name of a module says its job: a search for it by name finds one place.

    A compiled module, its twin in Python and its C header share their name: they have one job.
    """
    places: dict[str, set[Path]] = {}
    for path in (ROOT / "pgoutput_fast").rglob("*"):
        if path.suffix in (".py", ".pyx", ".h") and not path.stem.endswith("__"):
            name = path.stem.removeprefix("_").removeprefix("pure_")
            twin = path.parent if path.stem.startswith("_") else path.with_suffix("")
            places.setdefault(name, set()).add(twin)
    assert len(places) > 80
    assert {name for name, found in places.items() if len(found) > 1} == SAME_NAMES.keys()


def test_make_help_names_every_target() -> None:
    makefile = (ROOT / "Makefile").read_text()
    (targets,) = re.findall(r"^\.PHONY: (help .*)$", makefile, re.MULTILINE)
    environment = {**clean_environment(), "MAKEFLAGS": "", "MAKELEVEL": ""}
    helped = subprocess.run(
        ["make", "-C", ROOT], env=environment, capture_output=True, text=True, check=True
    )
    named = set(re.findall(r"^make ([a-z-]+)", helped.stdout, re.MULTILINE))
    assert named | {"help"} == set(targets.split())


def test_make_builds_deleted_modules_again(tmp_path: Path) -> None:
    """Nothing else has changed since make built them, by the times of its stamps."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in (
        "tools/find-python", "pyproject.toml", "setup.py", "pgoutput_fast/lower/_one.pyx",
        "pgoutput_fast/_two.pyx", ".venv/.environment", ".venv/.dependencies",
        ".venv/.modules", ".venv/.extension",
    ):  # fmt: skip
        tmp_path.joinpath(name).parent.mkdir(parents=True, exist_ok=True)
        tmp_path.joinpath(name).touch()
    built = [tmp_path / "pgoutput_fast" / name for name in ("lower/_one.abi3.so", "_two.abi3.so")]

    def is_up_to_date() -> bool:
        command = ["make", "--question", "-C", tmp_path, ".venv/.extension"]
        environment = {**clean_environment(), "MAKEFLAGS": "", "MAKELEVEL": ""}
        return subprocess.run(command, env=environment, check=False).returncode == 0

    assert not is_up_to_date()
    for module in built:
        module.touch()
    assert is_up_to_date()
    for module in built:
        module.unlink()
        assert not is_up_to_date()
        module.touch()


def test_supported_pythons_are_the_same_everywhere() -> None:
    def minors(path: str, pattern: str) -> list[str]:
        return re.findall(pattern, (ROOT / path).read_text(), re.MULTILINE)

    (looked_for,) = minors("tools/find-python", r'^minors="(.*)"$')
    expected = looked_for.split()
    pyproject = "pyproject.toml"
    assert minors(pyproject, r'^ *"Programming Language :: Python :: 3\.(\d+)",$') == expected
    assert minors(pyproject, r"\bcp3(\d+)-\*") == expected
    assert minors(pyproject, r'^requires-python = ">=3\.(\d+)"$') == expected[:1]
    workflow = ROOT / ".github" / "workflows" / "ci.yml"
    if workflow.exists():  # an sdist is without it
        (matrix,) = minors(".github/workflows/ci.yml", r"^ +python: \[(.*)\]$")
        assert re.findall(r'"3\.(\d+)"', matrix) == expected


def extras() -> dict[str, list[str]]:
    """The extras of pyproject.toml; their lists are also Python's."""
    text = (ROOT / "pyproject.toml").read_text()
    section = text.partition("[project.optional-dependencies]\n")[2].partition("\n[")[0]
    found = re.findall(r"^([\w-]+) = (\[.*?\])$", section, re.DOTALL | re.MULTILINE)
    return {name: ast.literal_eval(listed) for name, listed in found}


def test_all_has_each_extra_and_the_narrow_requirements_first() -> None:
    """Nearer requirements come first to pip: it shall not fetch a PySpark that it can't keep."""
    of_extra = extras()
    depths: dict[str, int] = {}
    asked, reached, depth = ["all"], {"all"}, 0
    while asked:
        listed = [one for name in asked for one in of_extra[name]]
        asked, depth = [], depth + 1
        for one in listed:
            if own := re.fullmatch(r"pgoutput-fast\[(.*)\]", one):
                asked += [name for name in own[1].split(",") if name not in reached]
                reached.update(asked)
            else:
                depths.setdefault(one, depth)
    assert reached == set(of_extra)
    assert (depths["pyspark<4.3"], depths["pandas<3"]) == (2, 2)
    assert (depths["pyspark>=4.2,<4.4"], depths["pandas>=2.2"]) == (3, 3)


def test_the_page_of_extras_has_each() -> None:
    page = ROOT / "docs" / "reference" / "extras.md"
    table = page.read_text().partition("| extra | brings |")[2]
    named = re.findall(r"^\| `([\w-]+)` \|", table.partition("\n\n")[0], re.MULTILINE)
    assert sorted(named) == sorted(extras())


def test_what_is_in_the_repository() -> None:
    """What a run leaves in the working directory is easily added by mistake."""
    if not ROOT.joinpath(".git").exists():
        pytest.skip("this is not a clone")
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    paths = [Path(name) for name in listed.split("\0") if name and ROOT.joinpath(name).exists()]
    assert {path.parts[0] for path in paths} == {
        *(".ci", ".dockerignore", ".github", ".gitignore", "CHANGELOG.md", "CONTRIBUTING.md"),
        *("Dockerfile", "LICENSE"),
        *("MANIFEST.in", "Makefile", "README.md", "SECURITY.md", "benchmarks", "docs", "examples"),
        *("pgoutput_fast", "pyproject.toml", "pyspark_pgoutput", "setup.py", "tests", "tools"),
    }
    written = {
        *(".cfg", ".go", ".h", ".in", ".java", ".md", ".mod", ".pxd", ".py", ".pyx", ".rs"),
        *(".service", ".sh", ".sql", ".sum", ".toml", ".typed", ".xml", ".yaml", ".yml", ""),
    }
    # C is made by Cython, but for a rival in benchmarks and for fuzz targets.
    data = ("tests/data/", "tests/vectors/", "benchmarks/captures/", "benchmarks/report/")
    assert [
        path.as_posix() for path in paths
        if path.suffix not in written and not path.as_posix().startswith(data)
    ] == ["benchmarks/guard.json", "benchmarks/native.c", "tests/fuzz/core_targets.c"]  # fmt: skip
    assert sum(ROOT.joinpath(path).stat().st_size for path in paths
               if path.as_posix().startswith(data[:2])) < 8 << 20  # fmt: skip


def test_one_name_is_one_test() -> None:
    """A name in the report of a failed run says where to look, and `-k` chooses one test by it."""
    paths = list((ROOT / "tests").glob("*/test_*.py"))
    files = collections.Counter(path.name for path in paths)
    functions = collections.Counter(
        node.name
        for path in paths
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and node.name.startswith("test_")
    )
    assert len(functions) > 500
    assert [name for name, count in (files + functions).items() if count > 1] == []


def test_each_class_has_a_name_of_its_own() -> None:
    """But for twins, of which one is in Cython."""
    names = collections.Counter(
        node.name.lstrip("_")
        for path in (ROOT / "pgoutput_fast").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    )
    assert {name for name, number in names.items() if number > 1} == set()
