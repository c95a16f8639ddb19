"""The examples of the README, run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import psycopg
import pytest
from builds import ROOT, run_python

from pgoutput_fast.embedded import EmbeddedServer


def python_blocks(document: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", document.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("impl", ["cython", "python"])
def test_decoding_prints_what_its_comments_say(impl: str, number: int, tmp_path: Path) -> None:
    example = python_blocks(ROOT / "README.md")[number]
    expected = re.findall(r"^ *print\(.*\) +# (.*)$", example, re.MULTILINE)
    assert expected
    ran = run_python("-W", "error", "-c", example, cwd=tmp_path, PGOUTPUT_FAST_IMPL=impl)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.splitlines() == expected


@pytest.mark.integration
@pytest.mark.slow
@pytest.mark.spark
def test_capture_and_spark(tmp_path: Path) -> None:
    *_, capture, spark, typed = python_blocks(ROOT / "README.md")
    with EmbeddedServer(18) as server, psycopg.connect(server.dsn(), autocommit=True) as connection:
        for statement in (
            "CREATE TABLE accounts (id int PRIMARY KEY, balance numeric(12,2), note text)",
            "CREATE PUBLICATION shop FOR TABLE accounts",
            "SELECT pg_create_logical_replication_slot('shop', 'pgoutput')",
            "INSERT INTO accounts VALUES (1, 99.5, NULL), (2, 1, 'x')",
            "UPDATE accounts SET balance = 7 WHERE id = 2",
        ):
            connection.execute(statement)
        assert '"postgresql:///shop"' in capture
        capture = capture.replace('"postgresql:///shop"', repr(server.dsn()))
        ran = run_python("-c", capture, cwd=tmp_path)
        assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")

        assert '"postgresql:///shop"' in typed
        typed = typed.replace('"postgresql:///shop"', repr(server.dsn()))
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


def test_examples_of_all_documents_are_python() -> None:
    documents = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/*.md")]
    for document in documents:
        for block in python_blocks(document):
            compile(block, document, "exec")
