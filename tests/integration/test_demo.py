"""The demonstration from its command line: it proves, it notices a wrong row, it cleans up."""

from __future__ import annotations

import contextlib
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

import pyarrow as pa
import pyarrow.parquet as pq
from click.testing import CliRunner

import pgoutput_fast as pf
from pgoutput_fast.cli import main
from pgoutput_fast.cli.demo import command
from pgoutput_fast.demo import report, verify
from pgoutput_fast.demo import run as run_module
from pgoutput_fast.demo.run import Result, TableResult

pytestmark = [pytest.mark.integration, pytest.mark.spark]

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


@contextlib.contextmanager
def made_place():
    # Not tmp_path: the server's user must get in, and a socket's path must be short.
    directory = Path(tempfile.mkdtemp(prefix="pf", dir="/tmp"))
    directory.chmod(0o755)
    yield Place(directory)
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def place():
    with made_place() as made:
        yield made


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """A run of the command, which takes most of a minute: its output, its files, its report."""
    directory = tmp_path_factory.mktemp("demo")
    with made_place() as place:
        run = subprocess.run(
            [
                *(sys.executable, "-m", "pgoutput_fast", "demo", "--changes", "5000"),
                *("--seed", "3", "--out", str(directory / "out")),
                *("--report", str(directory / "report.html")),
            ],
            capture_output=True,
            text=True,
            env={**place.environment, "PGOUTPUT_FAST_IMPL": "python", "COLUMNS": "120"},
            timeout=280,
        )
        assert run.returncode == 0, run.stdout + run.stderr
        place.assert_nothing_is_left()
    return run, directory / "out", (directory / "report.html").read_text()


@pytest.mark.slow
def test_the_command_proves_all_tables_and_leaves_nothing(demo):
    run, directory, report = demo
    assert run.stderr == ""
    assert "decoder python" in run.stdout
    rows = re.findall(
        r"^ *(demo\.\w+) +([\d,]+) +([\d,]+) +([\d,]+) .*✓ *$", run.stdout, re.MULTILINE
    )
    assert [row[0] for row in rows] == [
        "demo.accounts",
        "demo.orders",
        "demo.wide",
        "demo.documents",
        "demo.events",
        "demo.measurements",
        "demo.baskets",
    ]
    numbers = [[int(number.replace(",", "")) for number in row[1:]] for row in rows]
    assert sum(changes for _, changes, _ in numbers) >= 5000
    assert all(rows > 0 and changes > 0 and checks >= 3 * rows for rows, changes, checks in numbers)
    out = sorted(path.name for path in directory.iterdir())
    assert out == ["changes", "copies", "segments", "spark.log", "state"]
    html = unescape(report)
    assert "All 7 tables equal the server's" in html
    assert not re.search(r"(?:src|href)=|url\(|@import|<script", html)
    families = re.findall(r"<tr><td>([^<]+)</td><td>(\d+)</td><td>([\d,]+)</td>", html)
    assert [name for name, _, _ in families] == FAMILIES
    assert all(int(values.replace(",", "")) >= 30 for _, _, values in families)


FAMILIES = [
    '"char"', "arrays", "bit, varbit", "bool", "bytea", "composites", "date", "domains", "enums",
    "float4, float8", "geometric", "int2, int4, int8", "interval", "json, jsonb", "jsonpath",
    "money", "multiranges", "network addresses", "numeric without precision", "numeric(p,s)",
    "oid, xid, cid, xid8", "pg_lsn, pg_snapshot, tid", "pgvector", "ranges", "reg*",
    "text, varchar, char, name", "time, timetz", "timestamp, timestamptz", "tsvector, tsquery",
    "uuid",
]  # fmt: skip


@pytest.mark.slow
def test_the_wide_table_has_sparks_types(demo):
    _, directory, _ = demo
    schema = pq.read_table(directory / "state" / "demo.wide").schema
    found = {field.name: str(field.type) for field in schema}
    assert found["grid"].count("list<") == 2
    assert found["numbers"].startswith("list<element: int32>")
    assert found["full_transaction"] == "decimal128(20, 0)"
    assert found["ints"].startswith("struct<lower: int32, upper: int32, lower_inc: bool")
    assert found["many_ints"].startswith("list<element: struct<lower: int32")
    assert found["place"].startswith("struct<name: string, at: struct<x: double")
    assert found["embedding"] == "list<element: float>"
    assert found["span"] == found["mood"] == found["uid"] == "string"
    assert found["fee"] == "decimal128(10, 2)"


@pytest.mark.slow
def test_two_tables_in_the_sparks_of_the_tests(spark, monkeypatch, tmp_path):
    """What stands for the demonstration where it would take too long: a part, in this process."""
    monkeypatch.setattr(run_module, "_spark", lambda *_: contextlib.nullcontext(spark))
    two = [table for table in run_module.TABLES if table[0] in {"demo.accounts", "demo.baskets"}]
    monkeypatch.setattr(run_module, "TABLES", two)
    (tmp_path / "out").mkdir()
    result = run_module.run(20, directory=tmp_path / "out", seed=4)
    assert result.difference is None
    assert [table.name for table in result.tables] == ["demo.accounts", "demo.baskets"]
    assert all(0 < table.rows <= table.changes for table in result.tables)
    assert all(table.checks >= 3 * table.rows for table in result.tables)
    assert "All 2 tables equal the server's" in unescape(report.make_report(result))


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

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        run(5000, directory=Path(directory), progress=Loud())
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


def compared(spark, demo, tmp_path, table, column, value):
    """What comes of the proof if a value of the state table's least id is another one."""
    _, directory, _ = demo
    wrong = tmp_path / "state.parquet"
    rows = pq.read_table(directory / "state" / table)
    ids = rows["id"].to_pylist()
    values = rows[column].to_pylist()
    row = ids.index(min(ids))
    values[row] = value(values[row])
    field = rows.schema.field(column)
    at = rows.schema.names.index(column)
    pq.write_table(rows.set_column(at, field, pa.array(values, field.type)), wrong)
    state = spark.read.parquet(str(wrong))
    copy = directory / "copies" / f"{table}.csv"
    server = verify.server_rows(spark, copy, tmp_path / "copy.parquet", state.schema)
    return min(ids), rows.num_rows, verify.compare(table, server, state, ["id"])


@pytest.mark.slow
def test_a_wrong_value_is_found_and_named(spark, demo, tmp_path):
    number, rows, found = compared(
        spark, demo, tmp_path, "demo.orders", "comment", lambda _: "tampered"
    )
    assert (found.rows, found.differing) == (rows, 1)
    assert re.fullmatch(
        rf"demo\.orders, row id={number}, column comment: the server has .*, the state table "
        "'tampered'",
        str(found.first),
        re.DOTALL,
    )


@pytest.mark.slow
def test_a_wrong_part_of_a_nested_value_is_found(spark, demo, tmp_path):
    def without_sign(values):
        assert str(values[1]) == "-0.0"
        return [abs(values[1]) if i == 1 else value for i, value in enumerate(values)]

    number, _, found = compared(spark, demo, tmp_path, "demo.wide", "reals", without_sign)
    assert found.differing == 1
    assert str(found.first).startswith(f"demo.wide, row id={number}, column reals: ")


def test_a_difference_that_python_does_not_see_is_told():
    row = (1, "a")
    with pytest.raises(pf.PgOutputError, match="row id=1: Spark finds"):
        verify._difference("demo.t", "id=1", ["id", "name"], row, row)


def test_the_command_fails_where_a_table_differs(monkeypatch, tmp_path):
    result = Result("python", None, "18", "4", 1, tables=[TableResult("demo.t", "")])
    result.tables[0].difference = verify.Difference("demo.t", "id=1", "a", "1", "2")
    result.tables[0].differing = 1
    monkeypatch.setattr("pgoutput_fast.cli.demo.run", lambda *_, **__: result)
    report = tmp_path / "report.html"
    found = CliRunner().invoke(command, ["--report", str(report)], standalone_mode=False)
    assert found.return_value == 1, found.output
    named = "demo.t, row id=1, column a: the server has 1, the state table 2"
    assert named in found.output
    assert named in unescape(report.read_text())


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt, 130), (pf.PgOutputError, 1)])
def test_a_directory_to_keep_is_named_however_it_ends(monkeypatch, tmp_path, capsys, error, code):
    def run(*_, **__):
        raise error

    monkeypatch.setattr("pgoutput_fast.cli.demo.run", run)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    report = tmp_path / "report.html"
    for options in (["--keep"], []):
        assert main(["demo", *options, "--report", str(report)]) == code
        (kept,) = tmp_path.iterdir()
        named = f"kept, as far as it came: {kept}\n"
        assert (named in capsys.readouterr().err) == bool(options)
    assert kept.is_dir()


@pytest.mark.slow
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
    assert "while sending command" not in err  # as py4j would log it
    place.assert_nothing_is_left()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=lambda n: n.name)
def test_signals_end_the_command_without_a_word(place, tmp_path, number):
    """It comes to all processes, Spark's JVM among them, whose connections then break."""
    out = tmp_path / "out"
    demo = subprocess.Popen(
        [
            *(sys.executable, "-m", "pgoutput_fast", "demo", "--changes", "5000"),
            *("--out", str(out), "--report", str(tmp_path / "report.html")),
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=place.environment,
        start_new_session=True,
    )
    try:
        while demo.poll() is None and not (out / "changes").exists():
            time.sleep(0.05)
        os.killpg(demo.pid, number)
        _, err = demo.communicate(timeout=60)
    finally:
        demo.kill()
        demo.wait()
    assert (demo.returncode, err) == (128 + number, "")
    place.assert_nothing_is_left()
