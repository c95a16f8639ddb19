"""A few faults of each kind, and some seconds of pgbench; `make chaos` has them all."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

FEW = {
    "client-kills": 10,
    "server-kills": 4,
    "cuts": 15,
    "disk-full": 2,
    "slow": 1,
    "two-clients": 6,
    "capture-kills": 10,
    "capture-server-kills": 4,
    "capture-cuts": 15,
    "capture-disk-full": 2,
    "two-captures": 6,
}

SEED = 1
"""Of the faults that are the same in each run of the tests."""


def test_each_kind_of_fault_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """In lives of a sync with Spark in which it can come."""
    pytest.importorskip("pyspark")
    for directory in (".", ".."):
        monkeypatch.syspath_prepend(Path(__file__).parent / directory)
    import spark_lives

    for seed in range(200):
        for faults in (9, 20, 100):
            lives = spark_lives.planned(random.Random(seed), faults)
            came = Counter(kind for life in lives for kind in life.faults)
            assert came.total() == faults
            assert came.keys() == spark_lives.KINDS.keys()
            assert not lives[0].is_following
            for life in lives:
                kinds = set(life.faults)
                assert [kind in spark_lives.ENDS for kind in life.faults].index(True) == (
                    len(life.faults) - 1
                )
                assert "capture" not in kinds or life.is_following
                assert "executor" not in kinds or life.has_executors
                assert "worker" not in kinds or life.driver_bytes == 0
                assert "driver between state tables" not in kinds or life.driver_bytes is None


@pytest.mark.slow
@pytest.mark.server
@pytest.mark.parametrize("kind", FEW)
def test_nothing_is_lost_doubled_or_out_of_order(kind: str) -> None:
    counts = [f"--{name}={FEW[name] if name == kind else 0}" for name in FEW]
    script = Path(__file__).with_name("chaos.py")
    ended = subprocess.run(
        [sys.executable, str(script), *counts], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"
    assert f": {FEW[kind]} faults, " in ended.stdout or kind == "slow"


@pytest.mark.slow
@pytest.mark.server
@pytest.mark.skipif(sys.platform != "linux", reason="memory is looked up in /proc")
def test_memory_stays_flat_under_pgbench() -> None:
    script = Path(__file__).with_name("steady.py")
    ended = subprocess.run(
        [sys.executable, str(script), "--seconds=15", "--scale=1"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"
    assert ended.stdout.count(": median of the first 5 s") == 2


@pytest.mark.slow
@pytest.mark.server
@pytest.mark.parametrize(
    "arguments",
    [
        ["directory.py", "--kills=12"],
        ["month.py", "--days=10", "--keep=3", "--transactions=20000", "--seconds=100"],
    ],
    ids=lambda given: given[0],
)
def test_a_directory_holds(arguments: list[str]) -> None:
    """Under kills, and over weeks."""
    pytest.importorskip("moto")
    script = Path(__file__).with_name(arguments[0])
    ended = subprocess.run(
        [sys.executable, str(script), *arguments[1:]], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"
    assert "12 faults" in ended.stdout or "day 10: 20,000 transactions" in ended.stdout


@pytest.mark.slow
@pytest.mark.server
@pytest.mark.parametrize(
    ("target", "engine", "kills"),
    [
        ("duckdb", "local", 5),
        ("delta", "local", 5),
        ("parquet", "local", 5),
        # Each kind of fault once.
        pytest.param("delta", "spark", 9, marks=pytest.mark.spark),
    ],
)
def test_tables_are_the_servers_after_kills(target: str, engine: str, kills: int) -> None:
    """By a seed that is always the same, or `CHAOS_SEED`; `make chaos` takes another each time."""
    pytest.importorskip("duckdb" if target == "duckdb" else "deltalake")
    script = Path(__file__).with_name("sync.py")
    seed = os.environ.get("CHAOS_SEED") or SEED
    given = [f"--target={target}", f"--engine={engine}", f"--kills={kills}", f"--seed={seed}"]
    ended = subprocess.run(
        [sys.executable, str(script), *given], capture_output=True, text=True, check=False
    )
    # Which begins with the seed, and ends with the command that repeats a failure.
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"
    assert f": {kills} faults" in ended.stdout


@pytest.mark.slow
@pytest.mark.server
def test_a_capture_with_copies_under_load() -> None:
    script = Path(__file__).with_name("live.py")
    ended = subprocess.run(
        [sys.executable, str(script), "--versions=18", "--scale=1", "--seconds=10"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"
    assert " rows as COPY has them" in ended.stdout
    assert ended.stdout.count(" rows are equal") == 2  # of the syncs into DuckDB and Delta tables
