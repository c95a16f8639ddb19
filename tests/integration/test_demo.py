"""The demonstration from its command line: it proves, it notices a wrong row, it cleans up."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from html import unescape
from pathlib import Path

import pytest

pytest.importorskip("pyspark")
pytest.importorskip("psycopg")

pytestmark = [pytest.mark.integration, pytest.mark.spark, pytest.mark.slow]

MARK = "PGOUTPUT_FAST_TEST_MARK"


class Place:
    """Where a demo runs: a directory for all its temporary files, and a mark on its processes."""

    def __init__(self, directory):
        self.directory = directory
        self.mark = uuid.uuid4().hex
        self.environment = {
            **os.environ,
            "TMPDIR": str(directory),
            "PYTHONWARNINGS": "ignore",
            MARK: self.mark,
        }

    def processes(self):
        """Command lines of the processes that were started from here and are still there."""
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if f"{MARK}={self.mark}".encode() in path.read_bytes():
                    found.append((path.parent / "cmdline").read_bytes().replace(b"\0", b" "))
            except OSError:
                continue
        return found

    def assert_nothing_is_left(self):
        assert self.processes() == []
        assert [path.name for path in self.directory.iterdir()] == []


@pytest.fixture
def place():
    # Not tmp_path: the server's user must get in, and a socket's path must be short.
    directory = Path(tempfile.mkdtemp(prefix="pf", dir="/tmp"))
    directory.chmod(0o755)
    yield Place(directory)
    shutil.rmtree(directory, ignore_errors=True)


def test_the_command_proves_all_tables_and_leaves_nothing(place, tmp_path):
    report = tmp_path / "report.html"
    run = subprocess.run(
        [
            *(sys.executable, "-m", "pgoutput_fast", "demo", "--changes", "5000", "--seed", "3"),
            *("--out", str(tmp_path / "out"), "--report", str(report)),
        ],
        capture_output=True,
        text=True,
        env={**place.environment, "PGOUTPUT_FAST_IMPL": "python", "COLUMNS": "120"},
        timeout=280,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stderr == ""
    place.assert_nothing_is_left()
    assert "decoder python" in run.stdout
    rows = re.findall(
        r"^ *(demo\.\w+) +([\d,]+) +([\d,]+) +([\d,]+) .*✓ *$", run.stdout, re.MULTILINE
    )
    assert [row[0] for row in rows] == [
        "demo.accounts",
        "demo.orders",
        "demo.documents",
        "demo.events",
        "demo.measurements",
        "demo.baskets",
    ]
    numbers = [[int(number.replace(",", "")) for number in row[1:]] for row in rows]
    assert sum(changes for _, changes, _ in numbers) >= 5000
    assert all(rows > 0 and changes > 0 and checks >= 3 * rows for rows, changes, checks in numbers)
    out = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert out == ["changes", "copies", "segments", "spark.log", "state"]
    html = unescape(report.read_text())
    assert "All 6 tables equal the server's" in html
    assert not re.search(r"(?:src|href)=|url\(|@import|<script", html)


def test_an_existing_directory_is_left_alone(tmp_path):
    (tmp_path / "mine").touch()
    run = subprocess.run(
        [sys.executable, "-m", "pgoutput_fast", "demo", "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 1
    assert "not an empty directory" in run.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


DRIVER = """
import sys, tempfile
from pathlib import Path
from pgoutput_fast.demo.run import Progress, run

class Loud(Progress):
    def phase(self, name, total=None):
        print("phase", name, flush=True)

def tamper(state):
    import pyarrow as pa, pyarrow.parquet as pq
    path = next(path for path in sorted((state / "demo.orders").glob("*.parquet")))
    table = pq.read_table(path)
    ids = table["id"].to_pylist()
    row = ids.index(min(ids))
    comments = table["comment"].to_pylist()
    comments[row] = "tampered"
    at = table.schema.names.index("comment")
    pq.write_table(table.set_column(at, "comment", pa.array(comments, pa.string())), path)
    for crc in path.parent.glob(".*.crc"):
        crc.unlink()
    print("tampered with", min(ids), flush=True)

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        result = run(5000, directory=Path(directory), progress=Loud(), tamper=tamper)
    print(result.difference, flush=True)
    print([(t.name, t.differing) for t in result.tables if t.differing], flush=True)
"""


def start(place, tmp_path):
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    return subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=place.environment,
        start_new_session=True,
    )


def test_a_wrong_value_is_found_and_named(place, tmp_path):
    demo = start(place, tmp_path)
    out, err = demo.communicate(timeout=280)
    assert demo.returncode == 0, err
    number = re.search(r"^tampered with (\d+)$", out, re.MULTILINE)[1]
    first, differing = out.splitlines()[-2:]
    assert first.startswith(f"demo.orders, row id={number}, column comment: the server has ")
    assert first.endswith(", the state table 'tampered'")
    assert differing == "[('demo.orders', 1)]"
    place.assert_nothing_is_left()


@pytest.mark.parametrize(
    ("phase", "delay"),
    [
        ("start PostgreSQL", 0.2),
        ("capture", 0.05),
        ("start Spark", 1.0),
        # In the phases behind it the same processes run.
        ("decode into change tables", 1.5),
    ],
)
def test_ctrl_c_leaves_nothing(place, tmp_path, phase, delay):
    demo = start(place, tmp_path)
    try:
        for line in demo.stdout:
            if line == f"phase {phase}\n":
                break
        time.sleep(delay)
        os.killpg(demo.pid, signal.SIGINT)  # as a terminal does: to all of them
        _, err = demo.communicate(timeout=60)
    finally:
        demo.kill()
        demo.wait()
    assert demo.returncode == -signal.SIGINT, err
    assert err.rstrip().endswith("KeyboardInterrupt"), err
    place.assert_nothing_is_left()
