"""What PySpark 4.0 and 4.1 lack is told. With a newer one it is taken away for these tests."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pyspark.sql.datasource
import pytest
from pyspark.errors import ParseException
from pyspark.sql import types as T  # noqa: N812
from support.expected_errors import expect_error
from support.sparks.spark_frames import INT4, TIME, insert, land, relation, transaction

import pgoutput_fast.spark
from pgoutput_fast.errors import Argument
from pgoutput_fast.spark import read_segments

pytestmark = pytest.mark.spark


def test_columns_of_time_where_spark_has_none(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if hasattr(T, "TimeType"):
        parse = T.DataType.fromDDL

        def parsed(ddl: str) -> Any:
            if ddl == "time":
                raise ParseException("Syntax error at or near end of input.")
            return parse(ddl)

        monkeypatch.delattr(T, "TimeType")
        monkeypatch.setattr(T.DataType, "fromDDL", parsed)
    columns = {"id": INT4, "t": TIME}
    frames = [relation(1, "t", columns), *transaction(100, 7, insert(1, "1", "23:59:59.5"))]
    directory = land(tmp_path / "s", frames)
    with expect_error(code="not_supported", options=[Argument("schema")]):
        read_segments(spark, directory, "public.t")
    row = read_segments(spark, directory, "public.t", "id int, t string").collect()[0]
    assert row.after == (1, "23:59:59.5")


def test_the_source_tells_which_spark_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(pyspark.sql.datasource, "EqualTo", raising=False)
    for name in ("pgoutput_fast.spark.data_source", "pyspark_pgoutput"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with expect_error(code="missing_package"):
        _ = pgoutput_fast.spark.PgOutputDataSource
    # Spark imports it to look for sources, and does without all if it fails.
    from pyspark_pgoutput import DefaultSource

    assert DefaultSource.name() == "pgoutput"
    with expect_error(code="missing_package"):
        DefaultSource({})
    # What has found none is not kept for others.
    monkeypatch.delitem(sys.modules, "pyspark_pgoutput")
