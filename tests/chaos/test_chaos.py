"""A few faults of each kind, and some seconds of pgbench; `make chaos` has them all."""

from __future__ import annotations

import subprocess
import sys
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


@pytest.mark.slow
@pytest.mark.integration
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
@pytest.mark.integration
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
@pytest.mark.integration
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
@pytest.mark.integration
@pytest.mark.parametrize(
    ("target", "engine"),
    [
        ("duckdb", "local"),
        ("delta", "local"),
        pytest.param("delta", "spark", marks=pytest.mark.spark),
    ],
)
def test_tables_are_the_servers_after_kills(target: str, engine: str) -> None:
    pytest.importorskip("duckdb" if target == "duckdb" else "deltalake")
    script = Path(__file__).with_name("sync.py")
    ended = subprocess.run(
        [sys.executable, str(script), f"--target={target}", f"--engine={engine}", "--kills=5"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"
    assert ": 5 faults, " in ended.stdout


@pytest.mark.slow
@pytest.mark.integration
def test_a_capture_with_copies_under_load() -> None:
    script = Path(__file__).with_name("live.py")
    ended = subprocess.run(
        [sys.executable, str(script), "--versions=18", "--scale=1", "--seconds=10"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"
    assert " rows as COPY has them" in ended.stdout
    assert ended.stdout.count(" rows are equal") == 2  # of the syncs into DuckDB and Delta tables
