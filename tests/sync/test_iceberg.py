"""Change tables in an Iceberg catalogue: what is refused, and what no error shows."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.changelogs.made_directory import MadeDirectory
from support.expected_errors import expect_error
from support.targets.synced_tables import IcebergTables

from pgoutput_fast import apply, testing
from pgoutput_fast.apply.delta_files import AddedFile
from pgoutput_fast.apply.delta_place import DeltaPlace
from pgoutput_fast.apply.iceberg_table import IcebergCatalog, IcebergTable
from pgoutput_fast.apply.targets import ConflictError
from pgoutput_fast.errors import Argument

pytest.importorskip("deltalake")
pytest.importorskip("pyiceberg")

THINGS = testing.Table("things", {"id": "int4", "small": "int2"}, 16390, key=["id"])


@pytest.fixture
def made(tmp_path: Path) -> Iterator[MadeDirectory]:
    with contextlib.closing(MadeDirectory(tmp_path / "segments")) as found:
        found.commit(1150, THINGS.relation(), testing.insert(THINGS, [2, 7]))
        yield found


def sync(made: MadeDirectory, tables: IcebergTables, **options: Any) -> None:
    given = {**tables.given, "uncopied": "empty", "until": "now", **options}
    apply.sync(segments=made.directory, **given)


def test_types_that_iceberg_has_not(made: MadeDirectory, tmp_path: Path) -> None:
    """The files keep the shorter integers, so that the next window's are the same."""
    tables = IcebergTables(tmp_path)
    sync(made, tables)
    made.commit(1250, THINGS.relation(), testing.insert(THINGS, [3, -8]))
    sync(made, tables)
    found = tables.changes("public.things")
    assert found.schema.field("after").type.field("small").type == pa.int32()
    assert sorted(row["small"] for row in found.column("after").to_pylist()) == [-8, 7]


def test_a_catalogue_has_a_name(made: MadeDirectory, tmp_path: Path) -> None:
    """By that of the sync a reader finds the tables, and by none else, as the page says."""
    from pyiceberg.catalog import load_catalog

    tables = IcebergTables(tmp_path)
    sync(made, tables, iceberg={"name": "shop", **tables.catalog})
    name = ("changes", "public.things")
    assert load_catalog("shop", **tables.catalog).load_table(name).scan().to_arrow().num_rows == 1
    for other in ("pgoutput_fast", "other"):
        assert not load_catalog(other, **tables.catalog).table_exists(name)


def test_a_target_keeps_to_its_kind(made: MadeDirectory, tmp_path: Path) -> None:
    tables = IcebergTables(tmp_path)
    sync(made, tables, iceberg=None)
    made.commit(1250, THINGS.relation(), testing.insert(THINGS, [3, 8]))
    with expect_error(code="bad_option", options=[Argument("iceberg")]):
        sync(made, tables)
    # Also a single one that was put there.
    catalog = IcebergCatalog(tables.catalog)
    one = IcebergTable(
        DeltaPlace(tables.target), "changes/public.things", "app", 6, catalog, "public.things"
    )
    with expect_error(code="bad_option", parameter="iceberg"):
        one.load()
    tables.remove()
    sync(made, tables)
    target = Argument("target", tables.target)
    for given, options in ({}, []), ({"target": f"parquet:{tables.path}"}, [target]):
        with expect_error(code="bad_option", options=[*options, Argument("iceberg")]):
            sync(made, tables, iceberg=None, **given)


def test_a_table_of_another_database(made: MadeDirectory, tmp_path: Path) -> None:
    tables = IcebergTables(tmp_path)
    sync(made, tables)
    catalog = IcebergCatalog(tables.catalog)
    other = IcebergTable(
        DeltaPlace(str(tmp_path / "lake")), "changes/public.things", "pgoutput_fast/other", 6,
        catalog, "public.things",
    )  # fmt: skip
    with expect_error(code="not_ours"):
        other.load()
    assert not other.is_its_own()


def test_another_program_that_writes_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog = IcebergCatalog(IcebergTables(tmp_path).catalog)
    place = DeltaPlace(str(tmp_path / "lake"))
    one, other = (IcebergTable(place, "changes/t", "app", 6, catalog, "t") for _ in range(2))
    one.load()
    one.create(pa.schema({"id": pa.int32()}), (0, 0))
    other.load()
    one.commit([], [], (5, 0))
    assert (one.position, other.position) == ((5, 0), (0, 0))
    with expect_error(ConflictError, code="conflict"):
        other.commit([], [], (6, 0))
    other.load()
    assert other.position == (5, 0)
    # The same between the look at the position and the commit.
    (tmp_path / "lake" / "changes" / "t").mkdir(parents=True, exist_ok=True)
    for name in "ab":
        pq.write_table(pa.table({"id": pa.array([1], pa.int32())}),
                       tmp_path / "lake" / "changes" / "t" / name)  # fmt: skip
    one.load()
    one.commit([AddedFile("a", 1, {}, "")], [], (7, 0))
    kind, looks = type(other._table), [lambda self: self]
    refresh = kind.refresh
    monkeypatch.setattr(kind, "refresh", lambda self: (looks.pop() if looks else refresh)(self))
    with expect_error(ConflictError, code="conflict"):
        other.commit([AddedFile("b", 1, {}, "")], [], (7, 0))
    monkeypatch.undo()
    other.load()
    assert (other.position, other._table.scan().to_arrow().num_rows) == ((7, 0), 1)


def test_no_error_shows_the_password_of_a_catalogue(made: MadeDirectory, tmp_path: Path) -> None:
    secret = "postgresql+none://me:some-secret@nowhere.invalid/catalogue"
    given = {"type": "sql", "uri": secret, "name": "shop"}
    assert "some-secret" not in repr(IcebergCatalog(given))
    with expect_error(code="io_failed") as raised:
        sync(made, IcebergTables(tmp_path), iceberg=given)
    assert "some-secret" not in str(raised.value)
    with expect_error(code="io_failed"):
        sync(made, IcebergTables(tmp_path), iceberg="nobody_has_it")


def test_arguments_that_are_refused(
    made: MadeDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = IcebergTables(tmp_path)
    with expect_error(code="bad_option", parameter="iceberg"):
        sync(made, tables, iceberg={"uri": 1})
    with expect_error(code="bad_option", parameter="iceberg"):
        sync(made, tables, iceberg="")
    with expect_error(code="bad_option", parameter="iceberg"):
        sync(made, tables, target=f"duckdb:{tmp_path / 'tables.duckdb'}")
    monkeypatch.setitem(sys.modules, "pyiceberg", None)
    with expect_error(code="missing_package"):
        sync(made, tables)
