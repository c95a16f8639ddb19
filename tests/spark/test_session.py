"""What a session of this package knows of the source `pgoutput`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from support.expected_errors import expect_error

from pgoutput_fast.spark import _session, session

pytestmark = pytest.mark.spark


class Registered(list[Any]):
    """Stands for a session's `dataSource`."""

    def register(self, source: Any) -> None:
        self.append(source.name())


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A session without Java, and where Python looks for packages."""
    made = object.__new__(SparkSession)
    monkeypatch.setattr(SparkSession, "dataSource", Registered())
    monkeypatch.setattr(_session, "plain_session", lambda *_: made)
    return made


def test_the_source_is_registered_where_spark_does_not_find_it(
    running: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = tmp_path / "pyspark_pgoutput"
    package.mkdir()
    (package / "__init__.py").touch()
    # The directory of a script is first, and Spark does not look there.
    monkeypatch.setattr(sys, "path", [str(tmp_path), "/nowhere"])
    for _ in range(2):  # once, as Spark warns of a source that is replaced
        assert session() is running
        assert running.dataSource == ["pgoutput"]


def test_it_is_not_registered_where_spark_finds_it(
    running: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = tmp_path / "pyspark_pgoutput"
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.setattr(sys, "path", [str(Path.cwd()), str(tmp_path)])
    session()
    assert running.dataSource == []


def test_a_running_session_knows_it(spark: Any) -> None:
    assert session() is spark
    with expect_error(PySparkException, parameter="mode"):
        spark.read.format("pgoutput").load()
