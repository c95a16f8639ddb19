"""What a sync has written, read by the libraries of its formats."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow.dataset import dataset
from pyarrow.fs import S3FileSystem
from pyarrow.parquet import read_schema
from support import paths

from pgoutput_fast.apply import delta_target, duckdb_target
from pgoutput_fast.apply.delta_place import directory_of
from pgoutput_fast.apply.duckdb_sql import quoted, versioned
from pgoutput_fast.apply.parquet_table import ParquetTable

PROGRESS = (
    "schema", "table", "relation_id", "stored", "version", "lsn", "copy_lsn", "stale", "paused",
    "gaps",
)  # fmt: skip


class Places:
    """Where tables are, of which a backup can be made."""

    paths: list[Path]
    target: str
    has_state = has_changes = True
    """Whether there are state tables, and change tables."""

    @property
    def verified(self) -> dict[str, Any]:
        """What `verify` is given."""
        return {"target": self.target}

    def close(self) -> None:
        """Nobody looks at them any more."""

    def back_up(self) -> None:
        for path in self.paths:
            _copy(path, path.with_name(f"backup of {path.name}"))

    def restore(self) -> None:
        for path in self.paths:
            _copy(path.with_name(f"backup of {path.name}"), path)

    def remove(self) -> None:
        for path in self.paths:
            _remove(path)


def _copy(path: Path, place: Path) -> None:
    _remove(place)
    if path.is_dir():
        shutil.copytree(path, place)
    else:
        shutil.copy(path, place)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _by_relation(progress: pa.Table) -> dict[int, dict[str, Any]]:
    """The rows of `_progress` by relation id, of which each has one."""
    found = {row["relation_id"]: row for row in progress.to_pylist()}
    assert len(found) == progress.num_rows
    return found


class DuckdbTables(Places):
    """The tables in a DuckDB file."""

    steps = (
        (duckdb_target.DuckdbTarget, "commit"),
        (duckdb_target._DuckdbState, "apply"),
        (duckdb_target._DuckdbState, "append"),
        (duckdb_target._DuckdbChanges, "flush"),
    )
    """Where a process may be killed."""

    def __init__(self, root: Path) -> None:
        self.path = root / "tables.duckdb"
        self.paths = [self.path]
        self.target = f"duckdb:{self.path}"
        self.given: dict[str, Any] = {"target": self.target}

    @contextlib.contextmanager
    def open(self) -> Iterator[Any]:
        import duckdb

        with contextlib.closing(duckdb.connect(str(self.path), read_only=True)) as connection:
            yield connection

    def _table(self, query: str) -> pa.Table:
        with self.open() as connection:
            return connection.sql(query).to_arrow_table()

    def progress(self) -> dict[int, dict[str, Any]]:
        if not self.path.exists():
            return {}
        columns = ", ".join(f'"{name}"' for name in PROGRESS)
        return _by_relation(self._table(f"SELECT {columns} FROM _progress"))

    def state(self, stored: str) -> pa.Table:
        return self._table(f"FROM state.{quoted(stored)}")

    def changes(self, stored: str, version: int = 1) -> pa.Table:
        changes = f"changes.{quoted(versioned(stored, version))}"
        return self._table(f"FROM {changes} ORDER BY commit_lsn, seq")  # DuckDB keeps no order

    def has(self, kind: str, stored: str) -> bool:
        with self.open() as connection:
            query = "SELECT count(*) FROM duckdb_tables() WHERE schema_name = ? AND table_name = ?"
            ((count,),) = connection.execute(query, [kind, stored]).fetchall()
            return bool(count)


class DeltaTables(Places):
    """Delta tables in a directory."""

    steps = (
        (delta_target.DeltaTarget, "commit"),
        (delta_target.DeltaState, "apply"),
        (delta_target.DeltaState, "append"),
        (delta_target.DeltaState, "loaded"),
        (delta_target.DeltaChanges, "commit"),
        (delta_target.LakeTable, "commit"),
    )

    def __init__(self, root: Path) -> None:
        self.path = root / "lake"
        self.paths = [self.path]
        self.target = str(self.path)
        self.given: dict[str, Any] = {"target": self.target}

    def _table(self, place: str) -> pa.Table:
        """The rows of a table, as its log says which files it has."""
        import deltalake

        path = self.path / place
        return deltalake.DeltaTable(str(path)).to_pyarrow_table()

    def progress(self) -> dict[int, dict[str, Any]]:
        if not (self.path / "_progress").exists():
            return {}
        return _by_relation(self._table("_progress").select(PROGRESS))

    def state(self, stored: str) -> pa.Table:
        return self._table(f"state/{directory_of(stored)}")

    def changes(self, stored: str, version: int = 1) -> pa.Table:
        return self._table(f"changes/{directory_of(versioned(stored, version))}")

    def has(self, kind: str, stored: str) -> bool:
        return (self.path / kind / directory_of(stored) / "_delta_log").exists()


class DistributedTables(DeltaTables):
    """The same, written as by executors elsewhere, whose tasks run twice."""

    def __init__(self, root: Path) -> None:
        from support.targets.in_process import InProcessEngine

        super().__init__(root)
        self.given["engine"] = InProcessEngine(twice=True, stages=True)


class DuckdbRows(DuckdbTables):
    """State tables alone."""

    has_changes = False

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.given["keep"] = "state"


class DuckdbChanges(DuckdbTables):
    """Change tables alone."""

    has_state = False

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.given["keep"] = "changes"


class DeltaRows(DeltaTables):
    """State tables alone."""

    has_changes = False

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.given["keep"] = "state"


class IcebergTables(DeltaTables):
    """Change tables in an Iceberg catalogue."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.catalog = {"type": "sql", "uri": f"sqlite:///{root / 'catalog.db'}"}
        self.paths.append(root / "catalog.db")
        self.given["iceberg"] = self.catalog

    def opened(self) -> Any:
        """The catalogue."""
        from pyiceberg.catalog import load_catalog

        return load_catalog("pgoutput_fast", **self.catalog)

    def changes(self, stored: str, version: int = 1) -> pa.Table:
        table = self.opened().load_table(("changes", versioned(stored, version)))
        return table.scan().to_arrow()

    def has(self, kind: str, stored: str) -> bool:
        if kind == "state":
            return super().has(kind, stored)
        catalog = self.opened()
        return bool(
            catalog.namespace_exists("changes") and catalog.table_exists(("changes", stored))
        )


class ParquetTables(DeltaTables):
    """Change tables alone, as plain files."""

    has_state = False
    steps = (
        *DeltaTables.steps,
        (ParquetTable, "commit"),
        (ParquetTable, "_put"),
        (ParquetTable, "_settle"),
        (ParquetTable, "_move"),
    )

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.target = self.given["target"] = f"parquet:{self.path}"

    def changes(self, stored: str, version: int = 1) -> pa.Table:
        """As the documentation says: the newest file has all columns."""
        directory = self.path / "changes" / directory_of(versioned(stored, version))
        files = sorted(map(str, directory.glob("*.parquet")))
        return dataset(files, schema=read_schema(files[-1])).to_table()

    def has(self, kind: str, stored: str) -> bool:
        return any((self.path / kind / directory_of(stored)).glob("*.parquet"))


class StoredTables(DeltaTables):
    """Delta tables in object storage, beside which the directory of a capture is."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        script = paths.SUPPORT / "targets" / "object_storage.py"
        self._server = subprocess.Popen(
            [sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._server.stdout is not None
        endpoint = self._server.stdout.readline().strip()
        S3FileSystem(
            endpoint_override=endpoint, access_key="k", secret_key="s", allow_bucket_creation=True
        ).create_dir("bucket")
        self.target, self._segments = "s3://bucket/lake", root / "segments"
        self._options = {
            "AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s", "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": endpoint, "AWS_ALLOW_HTTP": "true",
        }  # fmt: skip
        self.given = {
            "target": self.target, "directory": self._segments, "storage_options": self._options,
        }  # fmt: skip

    @property
    def verified(self) -> dict[str, Any]:
        return {
            "target": self.target, "segments": str(self._segments),
            "storage_options": self._options,
        }  # fmt: skip

    def close(self) -> None:
        for pipe in (self._server.stdin, self._server.stdout):
            assert pipe is not None
            pipe.close()
        self._server.wait()

    def _table(self, place: str) -> pa.Table:
        import deltalake

        uri = f"{self.target}/{place}"
        return deltalake.DeltaTable(uri, storage_options=self._options).to_pyarrow_table()


class DistributedParquetTables(ParquetTables):
    """The same by executors."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.given["engine"] = DistributedTables(root).given["engine"]


class DistributedIcebergTables(IcebergTables):
    """Tables of the catalogue, of files that executors have written."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.given["engine"] = DistributedTables(root).given["engine"]


TABLES = {
    "duckdb": DuckdbTables, "delta": DeltaTables, "distributed": DistributedTables,
    "iceberg": IcebergTables, "distributed iceberg": DistributedIcebergTables,
    "parquet": ParquetTables, "distributed parquet": DistributedParquetTables,
}  # fmt: skip
KEPT = {"duckdb rows": DuckdbRows, "duckdb changes": DuckdbChanges, "delta rows": DeltaRows}
"""Those with a part of the tables."""
ALL_KINDS = [
    name if name in ("duckdb", "delta") else pytest.param(name, marks=pytest.mark.slow)
    for name, kind in TABLES.items()
    if kind.has_state
]
"""Of those that have state tables."""
KINDS = ALL_KINDS[:4]
"""Enough where it is state tables that count, and where a server makes each test slow."""
Tables = DuckdbTables | DeltaTables
