"""Filters find what is there: for each type, kind of condition, reader and kind of file.

The rows come from a server. What a reader finds by a filter is what it finds if it looks at all
rows (see `filtering_readers`). Files are made by copies, windows, merges and joins.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from support.values.type_values import TYPES, VALUES

import pgoutput_fast as pf
from pgoutput_fast import apply
from pgoutput_fast.apply import delta_table
from pgoutput_fast.apply.delta_place import DeltaPlace
from pgoutput_fast.apply.delta_table import LakeTable

for _name in ("deltalake", "polars", "duckdb"):
    pytest.importorskip(_name)

from deltalake import DeltaTable  # noqa: E402
from support.targets import filtering_readers as readers  # noqa: E402
from support.targets.synced_tables import IcebergTables  # noqa: E402

pytestmark = pytest.mark.server

SOME = ("bool", "int4", "xid8", "float8", "numeric(10,2)", "text", "bytea", "date", "timestamptz")
"""A type for each type of a column that bounds may be of."""
POLICIES = pf.Policies(infinity="null", out_of_range="null", special_values="null", arrays="text")
"""Of values that have no column of their type."""


class Lake:
    """A table with a column for each type, and a target that has it."""

    def __init__(self, database: Any, root: Path, types: Iterable[str], **options: Any) -> None:
        self._database = database
        self._types = list(types)
        self.path = root / "lake"
        self._options: dict[str, Any] = {
            "slot": f"slot_{database.name}", "publications": ["p"], "target": str(self.path),
            "until": "now", "policies": POLICIES, **options,
        }  # fmt: skip
        columns = ", ".join(f"c{i} {name}" for i, name in enumerate(self._types))
        database.execute(
            *TYPES,
            f"CREATE TABLE t (id int PRIMARY KEY, {columns})",
            "CREATE PUBLICATION p FOR TABLE t",
        )

    def sync(self, **options: Any) -> None:
        assert apply.sync(self._database.dsn, **self._options, **options).stale == {}

    def _insert(self, *ids: int) -> None:
        columns = ", ".join(f"%s::{name}" for name in self._types)
        with self._database.connect() as connection, connection.transaction():
            for i in ids:
                row = [VALUES[name][i % len(VALUES[name])] for name in self._types]
                connection.execute(f"INSERT INTO t VALUES (%s, {columns})".encode(), [i, *row])

    def fill(self, rows: int, **options: Any) -> None:
        """A copy with rows and one of nulls alone, windows of two rows, and one that merges."""
        self._insert(0, 1)
        self._database.execute("INSERT INTO t (id) VALUES (-1)")
        self.sync(**options)
        for i in range(2, rows, 2):
            self._insert(i, i + 1)
            self.sync(**options)
        self._database.execute("INSERT INTO t (id) VALUES (-2)")
        self.sync(**options)
        self._database.execute("UPDATE t SET c0 = c0 WHERE id IN (1, 2)")
        self.sync(**options)


def check(found: dict[str, readers.Reader], rows: Any, *, most: int) -> int:
    """Ask each reader for each condition on the columns of rows; how many cases there were."""
    cases = 0
    differences = []
    asked = [*readers.conditions(rows, most=most)]
    for name, reader in found.items():
        conditions = [one for one in asked if not reader.inexpressible(one)]
        cases += len(conditions)
        differences += [f"{name}: {one}" for one in reader.wrong(conditions)]
    assert not differences, f"{len(differences)} of {cases} cases, such as {differences[:5]}"
    print(cases, "cases")
    return cases


def delta_rows(path: Path) -> Any:
    return DeltaTable(str(path)).to_pyarrow_table()


@pytest.mark.slow
def test_filters_of_a_state_table(database18: Any, tmp_path: Path) -> None:
    lake = Lake(database18, tmp_path, SOME)
    lake.fill(6)
    path = lake.path / "state" / "public.t"
    assert check(readers.delta_readers(path, ("id",)), delta_rows(path), most=1) > 250


@pytest.mark.slow
def test_filters_on_every_type(database18: Any, tmp_path: Path) -> None:
    lake = Lake(database18, tmp_path, VALUES)
    lake.fill(6)
    path = lake.path / "state" / "public.t"
    assert check(readers.delta_readers(path, ("id",)), delta_rows(path), most=1) > 3500


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["state", "changes"])
def test_filters_of_joined_files(
    database18: Any, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = Lake(database18, tmp_path, SOME)
    lake.fill(6)
    path = lake.path / kind / "public.t"
    key = ("id",) if kind == "state" else ("seq",)
    check(readers.delta_readers(path, key), delta_rows(path), most=2)
    monkeypatch.setattr(delta_table, "_PER_TIER", 2)
    log = (one.read_text() for one in (path / "_delta_log").glob("*.json"))
    apps = {json.loads(f'"{one}"') for text in log for one in re.findall(r'"appId":"(.*?)"', text)}
    table = LakeTable(DeltaPlace(str(lake.path)), f"{kind}/public.t", min(apps, key=len), 6)
    table.load()
    count = len(table.delta.file_uris())
    table.compact()
    assert len(DeltaTable(str(path)).file_uris()) < count
    check(readers.delta_readers(path, key), delta_rows(path), most=2)


@pytest.mark.slow
def test_filters_of_parquet_files(database18: Any, tmp_path: Path) -> None:
    import pyarrow.dataset as ds

    lake = Lake(database18, tmp_path, SOME, target=f"parquet:{tmp_path / 'lake'}")
    lake.fill(8)
    path = lake.path / "changes" / "public.t"
    rows = ds.dataset(str(path), format="parquet").to_table()
    check(readers.parquet_readers(path, ("seq",)), rows, most=3)


@pytest.mark.slow
def test_filters_of_iceberg_tables(
    database18: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLARS_ICEBERG_PLANNER", "pyiceberg")  # there is another, to be installed
    tables = IcebergTables(tmp_path)
    lake = Lake(database18, tmp_path, SOME, iceberg=tables.catalog)
    lake.fill(6)
    table = tables.opened().load_table(("changes", "public.t"))
    found = readers.iceberg_readers(table, ("seq",))
    check(found, table.scan().to_arrow(), most=2)


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.delta_spark
@pytest.mark.parametrize("shared_bytes", [1, 1 << 40])
def test_filters_of_tables_that_spark_writes(
    database18: Any, tmp_path: Path, delta_spark: Any, monkeypatch: pytest.MonkeyPatch,
    shared_bytes: int,
) -> None:  # fmt: skip
    from pgoutput_fast.spark import SparkEngine, sync_engine

    monkeypatch.setattr(sync_engine, "_SHARED_BYTES", shared_bytes)
    engine = functools.partial(SparkEngine, delta_spark, driver_bytes=0)
    lake = Lake(database18, tmp_path, SOME)
    lake.fill(6, engine=engine())
    path = lake.path / "state" / "public.t"
    frame = delta_spark.read.format("delta").load(str(path))
    found = {**readers.delta_readers(path, ("id",)), "spark": readers.Spark(frame, ("id",))}
    check(found, delta_rows(path), most=2)
