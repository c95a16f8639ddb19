"""`pgoutput-fast sync --engine spark`, with a real server and a Spark of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pgoutput_fast import cli
from pgoutput_fast.embedded import EmbeddedServer
from pgoutput_fast.verify import verify

pytest.importorskip("deltalake")

pytestmark = [pytest.mark.integration, pytest.mark.spark]


def processes(session: int) -> list[str]:
    """What runs in a session: the names of its programs."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            before, _, after = path.read_text().rpartition(")")
        except OSError:
            continue
        if int(after.split()[3]) == session and after.split()[0] != "Z":
            found.append(before.partition("(")[2])
    return found


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc")
def test_the_command(
    pg16: EmbeddedServer, make_database: Callable[..., Any], tmp_path: Path
) -> None:
    database = make_database(pg16)
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, v text)",
        "INSERT INTO t SELECT i, repeat('x', 100) FROM generate_series(1, 100000) AS i",
        "CREATE PUBLICATION p FOR TABLE t",
    )
    lake = tmp_path / "lake"
    command = [
        sys.executable, "-m", "pgoutput_fast", "sync", "--dsn", database.dsn,
        "--slot", f"slot_{database.name}", "--publication", "p", "--to", str(lake),
        "--engine", "spark", "--master", "local[2]", "--log-format", "json",
        "--conf", "spark.sql.shuffle.partitions=3", "--interval", "0.1s", "--max-delay", "0.1s",
        "--log-interval", "0.2s",
    ]  # fmt: skip
    log = tmp_path / "log"
    with log.open("wb") as file, subprocess.Popen(
        command, stderr=file, start_new_session=True
    ) as process:  # fmt: skip

        def told() -> dict[str, Any]:
            """What it has logged last of its numbers."""
            assert process.poll() is None, log.read_text()
            lines = [line for line in log.read_text().splitlines() if line.startswith("{")]
            found = [one for one in map(json.loads, lines) if one["event"] == "progress"]
            return found[-1] if found else {"tables": {}}

        def wait(changes: int) -> None:
            end = time.monotonic() + 60
            while told()["tables"].get("public.t") != changes:
                assert time.monotonic() < end, log.read_text()
                time.sleep(0.05)

        wait(100_001)  # with the truncate before
        database.execute("UPDATE t SET v = 'new' WHERE id % 10 = 0")
        wait(110_001)
        # Ctrl-C goes to all processes of the terminal.
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(60) == 130, log.read_text()
        end = time.monotonic() + 30
        while (left := processes(process.pid)) and time.monotonic() < end:
            time.sleep(0.1)  # the JVM ends by itself, a moment later
        assert left == []
    report = verify(database.dsn, publications=["p"], target=str(lake))
    assert [(one.name, one.state, one.rows) for one in report.tables] == [("t", "equal", 100_000)]


def test_options_that_do_not_go_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["sync", "--segments", str(tmp_path), "--until", "now"]
    for options, text in (
        (["--to", f"duckdb:{tmp_path}/a", "--engine", "spark"], "--engine spark keeps Delta"),
        (["--to", str(tmp_path / "lake"), "--master", "local"], "--master is for --engine spark"),
        (["--to", str(tmp_path / "lake"), "--conf", "spark.a=b"], "--conf is for --engine spark"),
        (["--to", str(tmp_path / "lake"), "--conf", "spark.secret"], "expected spark.NAME=VALUE"),
    ):
        assert cli.main([*given, *options]) == 2
        found = capsys.readouterr().err
        assert text in " ".join(found.split())
        assert "spark.secret" not in found
