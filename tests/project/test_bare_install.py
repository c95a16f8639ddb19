"""The core without any extra, and what an extra's absence looks like."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.commands.builds import fresh_venv, run_python

# A Begin with final_lsn 0x102, commit_time 3 µs and xid 7.
DECODES = """
import sys
before = set(sys.modules)
import pgoutput_fast as pf
begin = pf.decode(b"B" + bytes.fromhex("0000000000000102" "0000000000000003" "00000007"))
assert (begin.final_lsn, begin.commit_time, begin.xid) == (0x102, 3, 7), begin
assert pf.format_lsn(begin.final_lsn) == "0/102"
assert pf.testing.encode(begin) == begin.frame == pf.testing.begin(7, 0x102, 3)
# Cython makes modules that no file is behind: they have no spec.
names = [name for name in sys.modules if getattr(sys.modules[name], "__spec__", None)]
print({name.partition(".")[0] for name in {*names} - before} - sys.stdlib_module_names)
"""
OWN = "{'pgoutput_fast'}\n"


@pytest.fixture(scope="module")
def bare(pure_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with the pure wheel and NumPy."""
    return fresh_venv(tmp_path_factory.mktemp("bare") / "venv", pure_wheel)


@pytest.mark.slow
def test_core_needs_nothing(bare: Path, tmp_path: Path) -> None:
    ran = run_python(
        "-W", "error", "-c", DECODES, python=bare, cwd=tmp_path, PGOUTPUT_FAST_IMPL="python"
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, OWN, "")


@pytest.mark.parametrize("impl", ["cython", "python"])
def test_import_brings_no_third_party_along(impl: str, tmp_path: Path) -> None:
    """Here they are all installed."""
    ran = run_python("-W", "error", "-c", DECODES, cwd=tmp_path, PGOUTPUT_FAST_IMPL=impl)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, OWN, "")


@pytest.mark.parametrize(
    ("arguments", "extra"),
    [
        (["-m", "pgoutput_fast", "--help"], "cli"),
        (["-c", "from pgoutput_fast.segments import *; segment_schema()"], "arrow"),
        (["-c", "import pgoutput_fast.replication"], "replication"),
        (["-c", "import pgoutput_fast.spark"], "spark"),
        (["-c", "from pgoutput_fast.apply import sync"], "arrow"),
        (["-c", "import pgoutput_fast.doctor"], "replication"),
        (["-c", "from pgoutput_fast.demo.run import *; run(5000, directory=Path())"], "demo"),
        (["-c", "import pgoutput_fast.testing.strategies"], "testing"),
    ],
)
def test_bare_install_names_the_extra_that_is_missing(
    arguments: list[str], extra: str, bare: Path, tmp_path: Path
) -> None:
    ran = run_python(*arguments, python=bare, cwd=tmp_path, PGOUTPUT_FAST_IMPL="python")
    assert ran.returncode == 1
    assert f"pgoutput-fast[{extra}]" in ran.stderr


READERS = """
import sys
sys.modules["psycopg"] = None  # as if it were not installed
from pgoutput_fast.apply import SyncProgress, fold, sync
from pgoutput_fast.apply import delta_target, duckdb_target, iceberg_table
from pgoutput_fast.spark import PgOutputDataSource, SparkEngine, current_state, read_segments
print(read_segments.__name__)
"""


@pytest.mark.slow
def test_readers_of_captures_need_no_connection(tmp_path: Path) -> None:
    """The extra `spark` is enough to read segments, as are those that executors have."""
    for module in ("pyspark", "deltalake", "duckdb", "pyiceberg"):
        pytest.importorskip(module)
    ran = run_python("-c", READERS, cwd=tmp_path)
    assert (ran.returncode, ran.stdout) == (0, "read_segments\n"), ran.stderr


def test_console_script_is_installed(bare: Path) -> None:
    script = bare.parent / "pgoutput-fast"
    assert script.read_text().startswith(f"#!{bare}\n")
