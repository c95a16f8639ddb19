"""read_segments takes the types from the history of a directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from support.changelogs.made_history import NEW, OLD, captured, copied, read, written
from support.expected_errors import expect_error

from pgoutput_fast.errors import Argument
from pgoutput_fast.spark import PgOutputDataSource, read_segments

pytestmark = pytest.mark.spark


@pytest.mark.slow
def test_changes_have_the_types_of_their_time(spark: Any, tmp_path: Path) -> None:
    captured(tmp_path, 1000, (140, 150, "(1)"), (240, 250, "(2)"), (440, 450, "(3)"))
    written(tmp_path, read(60, 70), read(200, 210), read(300, 310, NEW), read(900, 910, NEW))
    with expect_error(PySparkException, parameter="history"):
        read_segments(spark, tmp_path, "public.t", "p string").collect()
    # The text of both forms is the same.
    found = read_segments(spark, tmp_path, "public.t", "p string", history="newer")
    assert [row.after.p for row in found.orderBy("commit_lsn").collect()] == ["(1)", "(2)", "(3)"]
    newest = tmp_path / "newest"
    captured(newest, 1000, (140, 150, "(1)"))
    written(newest, read(60, 70, OLD), read(200, 210, OLD))
    assert read_segments(spark, newest, "public.t").collect()[0].after.p.asDict() == {"x": 1}


def test_the_rows_of_a_copy_have_its_types(spark: Any, tmp_path: Path) -> None:
    captured(tmp_path, 1000, (940, 950, "(2)"))
    copied(tmp_path, 60, json.loads(OLD.to_json()), "(1)")
    written(tmp_path, read(200, 210, NEW), read(960, 970, NEW))
    found = read_segments(spark, tmp_path, "public.t", "p string").orderBy("commit_lsn", "seq")
    assert [(row.op, row.after and row.after.p) for row in found.collect()] == [
        ("truncate", None), ("read", "(1)"), ("insert", "(2)"),
    ]  # fmt: skip
    snapshot = tmp_path / "snapshot"
    captured(snapshot, 1000)
    copied(snapshot, 60, json.loads(OLD.to_json()), "(1)")
    written(snapshot, read(200, 210, OLD))
    found = read_segments(spark, snapshot, "public.t").where("op = 'read'")
    assert [row.after.p.asDict() for row in found.collect()] == [{"x": 1}]


@pytest.mark.slow
def test_the_source_takes_types_from_a_file(spark: Any, tmp_path: Path) -> None:
    spark.dataSource.register(PgOutputDataSource)
    directory, types = tmp_path / "s", tmp_path / "types.json"
    captured(directory, 1000, (140, 150, "(1)"))
    source = spark.read.format("pgoutput").option("table", "public.t")
    assert [row.after.p for row in source.load(str(directory)).collect()] == ["(1)"]
    types.write_text(OLD.to_json())
    found = source.option("registry", str(types)).load(str(directory))
    assert [row.after.p.asDict() for row in found.collect()] == [{"x": 1}]
    types.write_text("{}")
    with expect_error(PySparkException, parameter="registry"):
        source.option("registry", str(types)).load(str(directory))
    for_files = spark.read.format("pgoutput").options(mode="manifest", output="o", registry=types)
    types.write_text(OLD.to_json())
    with expect_error(PySparkException, parameter="mode", options=[Argument("registry")]):
        for_files.load(str(directory))
