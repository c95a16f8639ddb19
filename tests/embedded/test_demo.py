"""The demonstration from its command line: it proves, it notices a wrong row, it cleans up."""

from __future__ import annotations

import contextlib
import itertools
import json
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
from support.expected_errors import expect_error
from support.waiting import wait_until

pytest.importorskip("pyspark")
pytest.importorskip("deltalake")
pytest.importorskip("duckdb")
pytest.importorskip("psycopg")

import duckdb
from click.testing import CliRunner
from deltalake import DeltaTable

from pgoutput_fast.cli.demo import command
from pgoutput_fast.demo import report
from pgoutput_fast.demo.driver import Driver
from pgoutput_fast.demo.run import Result, TableRun, changes_of
from pgoutput_fast.demo.workload import TABLES

pytestmark = [pytest.mark.server, pytest.mark.spark]

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
                *("--out", str(directory / "out"), "--report", str(directory / "report.html")),
            ],
            capture_output=True,
            text=True,
            env={**place.environment, "PGOUTPUT_FAST_IMPL": "python", "COLUMNS": "120"},
            timeout=480,
        )
        assert run.returncode == 0, run.stdout + run.stderr
        place.assert_nothing_is_left()
    return run, directory / "out", (directory / "report.html").read_text()


@pytest.mark.slow
def test_the_command_proves_all_tables_and_leaves_nothing(demo):
    run, directory, html = demo
    assert run.stderr == ""
    assert "decoder python" in run.stdout
    rows = re.findall(r"^ *(\w+\.\w+) +([\d,]+) +([\d,]+) .*✓ *$", run.stdout, re.MULTILINE)
    assert [row[0] for row in rows] == list(TABLES)
    assert len(TABLES) == 11
    numbers = {name: [int(text.replace(",", "")) for text in found] for name, *found in rows}
    assert all(rows > 0 and changes > 0 for rows, changes in numbers.values())
    assert numbers["public.pgbench_accounts"][0] == 100_000
    assert numbers["public.pgbench_accounts"][1] >= 200_000  # the snapshot's, and the backlog's
    for name, (count, _) in numbers.items():
        assert DeltaTable(str(directory / "tables" / "state" / name)).count() == count
    assert sorted(path.name for path in directory.iterdir()) == [
        "segments", "sync.log", "sync.toml", "tables",
    ]  # fmt: skip
    assert "All 11 tables equal the server's, and each of " in unescape(html)
    assert not re.search(r"(?:src|href)=|url\(|@import|<script", html)


@pytest.mark.slow
def test_it_goes_on_where_it_was_killed(demo):
    run, directory, _ = demo
    marks = [
        "  kill -9 of the sync", "  the sync is started again; 1",
        "demo.orders has a new column note", "the tables have caught up",
    ]  # fmt: skip
    places = [run.stdout.index(text) for text in marks]
    assert places == sorted(places)
    times = [float(found) for found in re.findall(r"^ *(\d+\.\d) s  ", run.stdout, re.MULTILINE)]
    assert len(times) > 20
    waits = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert max(waits) < 4, "a line every 1.5 seconds, more on a busy machine"
    log = [json.loads(line) for line in (directory / "sync.log").read_text().splitlines()
           if line.startswith("{")]  # fmt: skip
    assert [line["event"] for line in log].count("start") == 2
    assert [line["event"] for line in log].count("stop") == 1  # the first one was killed


@pytest.mark.slow
def test_changes_that_are_there_twice_are_counted(demo, tmp_path):
    _, directory, _ = demo
    path = tmp_path / "changes" / "demo.baskets"
    shutil.copytree(directory / "tables" / "changes" / "demo.baskets", path)
    count, doubled = changes_of(str(tmp_path), "demo.baskets")
    assert doubled == 0
    table = DeltaTable(str(path))
    wrong = table.to_pyarrow_table()
    from deltalake import write_deltalake

    inserted = wrong.filter([op == "insert" for op in wrong.column("op").to_pylist()])
    write_deltalake(table, inserted.slice(0, 2), mode="append")
    assert changes_of(str(tmp_path), "demo.baskets") == (count + 2, 2)


@pytest.mark.slow
def test_without_spark_the_tables_are_in_duckdb(place, tmp_path):
    run = subprocess.run(
        [
            *(sys.executable, "-m", "pgoutput_fast", "demo", "--engine", "local"),
            *("--changes", "5000", "--out", str(tmp_path / "out")),
            *("--report", str(tmp_path / "report.html")),
        ],
        capture_output=True, text=True, env=place.environment, timeout=240,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    place.assert_nothing_is_left()
    assert "All 11 tables equal the server's" in run.stdout
    target = tmp_path / "out" / "tables.duckdb"
    with duckdb.connect(str(target)) as connection:
        (count,) = connection.execute('SELECT count(*) FROM state."demo.baskets"').fetchone()
        connection.execute(
            'INSERT INTO changes."demo.baskets" FROM changes."demo.baskets" '
            "WHERE op = 'insert' LIMIT 2"
        )
    assert count > 0
    assert changes_of(f"duckdb:{target}", "demo.baskets")[1] == 2


def result(**more):
    made = Result("18", "Spark 4", seconds=120.0, exit_code=0, **more)
    made.tables = [TableRun("demo.t", "", 3, "equal", changes=3)]
    return made


def test_the_report_of_a_run():
    made = result(
        events=[(4.0, "kill -9 <of> it")],
        lags=[(1.0, 0.5), (1.5, 1.0), (3.0, None), (60.0, 4.0), (120.0, 0.0)],
    )
    page = report.make_report(made)
    assert "All 1 tables equal the server's, and each of 3 changes is there" in unescape(page)
    assert "kill -9 &lt;of&gt; it" in page
    # Slots of a second: the largest lag of each, and nothing where none is known.
    bars = re.findall(r'<rect x="([\d.]+)%" y="([\d.]+)%"', page)
    assert bars == [("0.833", "75.0"), ("50.000", "0.0"), ("99.167", "99.0")]
    # In the dark each colour is another one.
    light, dark = (
        re.findall("(--[a-z]+): ", one) for one in re.findall(":root {(.*?)}", page, re.DOTALL)
    )
    assert light == dark


@pytest.mark.parametrize(
    ("state", "why", "doubled", "verdict"),
    [
        ("different", "row 1", 0, "Not proved: demo.t is different (row 1)."),
        ("not compared", "", 0, "Not proved: demo.t is not compared."),
        ("equal", "", 2, "Not exactly once: 2 changes are in a change table twice."),
    ],
)
def test_the_command_fails_where_a_table_is_wrong(
    monkeypatch, tmp_path, state, why, doubled, verdict
):
    made = result()
    made.exit_code = 0 if state == "equal" else 1
    made.tables[0].state, made.tables[0].why = state, why
    made.tables[0].doubled = doubled
    monkeypatch.setattr("pgoutput_fast.cli.demo.run", lambda *_, **__: made)
    page = tmp_path / "report.html"
    found = CliRunner().invoke(command, ["--report", str(page)], standalone_mode=False)
    assert found.return_value == 1, found.output
    assert verdict in found.output
    assert f'<p class="verdict bad">{verdict}' in unescape(page.read_text())


def test_an_existing_directory_is_left_alone(tmp_path):
    (tmp_path / "mine").touch()
    run = subprocess.run(
        [sys.executable, "-m", "pgoutput_fast", "demo", "--out", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 1
    assert "[already_exists]" in run.stderr
    assert str(tmp_path) in run.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.slow
def test_a_sync_that_ends_by_itself_is_told_with_its_reason(tmp_path, monkeypatch):
    monkeypatch.setenv("PGCONNECT_TIMEOUT", "2")
    lines = []
    driver = Driver(
        f"host={tmp_path} dbname=none", "local", f"duckdb:{tmp_path}/t", tmp_path, tmp_path,
        lines.append,
    )  # fmt: skip
    try:
        with expect_error(code="process_failed", path=str(tmp_path / "sync.log")):
            driver.wait_until(lambda: False, 60, "expected nothing")
    finally:
        driver.kill()
    assert [line["event"] for line in lines][-1] == "error"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "phase", "delay"),
    [
        (signal.SIGINT, "start PostgreSQL", 0.2),
        (signal.SIGINT, "start the sync", 2.0),
        (signal.SIGINT, "live load", 1.0),
        (signal.SIGTERM, "live load", 1.5),
        (signal.SIGHUP, "start again", 1.0),
    ],
    ids=lambda one: getattr(one, "name", None),
)
def test_signals_end_the_command_and_leave_nothing(place, tmp_path, number, phase, delay):
    """They come to all processes of the command's group, as those of a terminal do."""
    demo = subprocess.Popen(
        [
            *(sys.executable, "-m", "pgoutput_fast", "demo", "--changes", "5000"),
            *("--out", str(tmp_path / "out"), "--report", str(tmp_path / "report.html")),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=place.environment,
        start_new_session=True,
    )
    before = {
        "start PostgreSQL": None, "start the sync": "first rows", "live load": "start the sync",
        "start again": "changes without",
    }[phase]  # fmt: skip
    try:
        if before is None:
            # The server's directory is the first thing that is made. Before it Python still loads
            # the program, for as long as a busy machine takes, and ends by a signal in its own way.
            wait_until(lambda: any(place.directory.iterdir()))
        else:
            for line in demo.stdout:
                if "✓" in line and before in line:
                    break
        time.sleep(delay)
        os.killpg(demo.pid, number)
        _, err = demo.communicate(timeout=60)
    finally:
        demo.kill()
        demo.wait()
    assert demo.returncode == 128 + number, err
    assert "Traceback" not in err
    place.assert_nothing_is_left()
