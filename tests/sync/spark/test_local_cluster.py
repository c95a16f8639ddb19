"""Executors that are processes of their own, where no compiler is found."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from support import paths
from support.postgres.replayed import change_of, replay
from support.targets.synced_tables import DeltaTables

from pgoutput_fast.embedded import EmbeddedServer

pytest.importorskip("deltalake")

pytestmark = [
    pytest.mark.server, pytest.mark.spark, pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc"),
]  # fmt: skip

DRIVER = paths.SUPPORT / "sparks" / "cluster_driver.py"
COMPILER = re.compile(r"(.*-)?(cc|[cg]\+\+|c89|c99|gcc|clang|clang\+\+|tcc)(-[0-9.]+)?")


def without_compilers(directory: Path) -> Path:
    """A directory with the programs of PATH, but for compilers."""
    directory.mkdir()
    for place in os.environ["PATH"].split(os.pathsep):
        for program in sorted(Path(place).glob("*")):
            link = directory / program.name
            if COMPILER.fullmatch(program.name) is None and not link.is_symlink():
                link.symlink_to(program.resolve())
    return directory


def rows_of(path: Path) -> list[dict[str, Any]]:
    """The rows of a file, or of all files of a directory."""
    paths = [path] if path.is_file() else sorted(path.glob("*.parquet"))
    return [row for one in paths for row in pq.read_table(one).to_pylist()]


def test_a_cluster_without_a_compiler(
    pg16: EmbeddedServer, make_database: Callable[..., Any], tmp_path: Path
) -> None:
    database = make_database(pg16)
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, v text, n numeric(9, 2), big text)",
        "ALTER TABLE t ALTER big SET STORAGE EXTERNAL",
        "INSERT INTO t SELECT i, 'v' || i, i / 4.0, CASE WHEN i % 100 = 0"
        " THEN repeat('b', 9000) END FROM generate_series(1, 3000) AS i",
        "CREATE TABLE bag (a int, b text)", "ALTER TABLE bag REPLICA IDENTITY FULL",
        "INSERT INTO bag SELECT i % 3, 'x' FROM generate_series(1, 9) AS i",
        "CREATE PUBLICATION p FOR TABLE t, bag",
    )  # fmt: skip
    statements = (
        "UPDATE t SET n = n + 1 WHERE id % 50 = 0",  # big is not sent
        "UPDATE t SET id = id + 10000 WHERE id < 20",
        "DELETE FROM t WHERE id BETWEEN 1000 AND 1009",
        "INSERT INTO t SELECT -i, NULL, i, repeat('c', 100) FROM generate_series(1, 4000) AS i",
        "UPDATE bag SET b = NULL WHERE a = 1",
    )
    environment = {name: value for name, value in os.environ.items() if name not in ("CC", "CXX")}
    environment["PATH"] = str(without_compilers(tmp_path / "bin"))
    command = [sys.executable, DRIVER, database.dsn, f"slot_{database.name}", tmp_path, *statements]
    ended = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=280
    )
    assert ended.returncode == 0, ended.stderr
    told = json.loads(ended.stdout.splitlines()[-1])
    # Each task ran in a process of an executor, where nothing could have been compiled.
    assert {name for one in told["tasks"] for name in one["executor"]} == {"0", "1"}
    assert {json.dumps({**one, "executor": len(one["executor"])}) for one in told["tasks"]} == {
        json.dumps({"implementation": "cython", "engine": ".so", "compilers": [], "CC": None,
                    "executor": 1})
    }  # fmt: skip
    assert told["synced"] == [
        {"public.t": 3000, "public.bag": 9}, {"public.t": 4089, "public.bag": 3}
    ]  # fmt: skip

    truth = sorted(database.execute("SELECT * FROM t"), key=repr)
    tables = DeltaTables(tmp_path)
    for table, wanted in (("t", truth), ("bag", database.execute("SELECT * FROM bag"))):
        found = tables.state(f"public.{table}").to_pylist()
        assert Counter(tuple(row.values()) for row in found) == Counter(wanted)
    changes = tables.changes("public.t").to_pylist()
    assert replay(changes) == truth
    assert len(changes) == 3001 + 4089
    assert replay(rows_of(tmp_path / "segments.parquet")) == truth
    assert replay(rows_of(tmp_path / "table")) == truth
    files = [row for row in rows_of(tmp_path / "manifest") if row["table"] == "public.t"]
    assert len(files) > 1
    assert replay(row for file in files for row in rows_of(Path(file["path"]))) == truth
    records = [row for row in rows_of(tmp_path / "envelope") if row["topic"].endswith(".public.t")]
    as_text = [
        (id_, v, None if n is None else str(n), big) for id_, v, n, big in truth
    ]  # numbers come as text
    assert replay(map(change_of, records)) == sorted(as_text, key=repr)
    # All modes had several batches.
    assert all(len(list((tmp_path / mode).glob("*.parquet"))) > 1
               for mode in ("table", "envelope", "manifest"))  # fmt: skip
