"""Code and commands of documents that need more than a server."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from pyarrow import fs
from support import paths
from support.commands.builds import ROOT, run_python
from support.commands.documents import blocks, fresh_server, on, python_blocks, run_shell

pytestmark = [pytest.mark.slow, pytest.mark.server]

GUIDES = ROOT / "docs" / "how-to"
ROWS = "INSERT INTO accounts VALUES (1, 99.50, NULL), (2, 1, 'x')"

TARGETS = """
pgoutput-fast capture --dsn postgresql:///shop --slot a --publication shop --out segments \\
    --snapshot initial --until now
pgoutput-fast sync --dsn postgresql:///shop --slot b --publication shop --to duckdb:shop.duckdb
pgoutput-fast sync --dsn postgresql:///shop --slot c --publication shop --to lake
"""


@pytest.mark.spark
def test_verify(tmp_path: Path) -> None:
    """Each command and both examples, with targets of each kind."""
    page = GUIDES / "verify.md"
    example, by_engine = python_blocks(page)
    commands, by_command = blocks("sh", page)
    with fresh_server() as server, psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute(ROWS)
        ran = run_shell(TARGETS, server.dsn(), tmp_path)
        assert ran.returncode == 0, ran.stderr
        for command in commands.splitlines():
            ran = run_shell(command, server.dsn(), tmp_path)
            assert ran.returncode == 0, (command, ran.stdout, ran.stderr)
        (table,) = json.loads(ran.stdout)["tables"]
        assert (table["name"], table["state"], table["rows"]) == ("accounts", "equal", 2)
        ran = run_shell(by_command, server.dsn(), tmp_path)
        assert ran.returncode == 0, ran.stderr
        ran = run_python("-c", on(server, f"{by_engine}print(report.exit_code)"), cwd=tmp_path)
        assert (ran.returncode, ran.stdout) == (0, "0\n"), ran.stderr
        ran = run_python("-W", "error", "-c", on(server, example), cwd=tmp_path)
        assert (ran.returncode, ran.stdout, ran.stderr) == (0, "accounts equal 2 ()\n", "")


def test_tables_in_a_catalogue(tmp_path: Path) -> None:
    for module in ("deltalake", "pyiceberg"):
        pytest.importorskip(module)
    command, *_ = blocks("sh", GUIDES / "change-tables.md")
    with fresh_server() as server, psycopg.connect(server.dsn(), autocommit=True) as connection:
        connection.execute(ROWS)
        ran = run_shell(command, server.dsn(), tmp_path)
        assert ran.returncode == 0, ran.stderr
        connection.execute("DELETE FROM accounts WHERE id = 1")
        ran = run_shell(command, server.dsn(), tmp_path)
        assert ran.returncode == 0, ran.stderr
    reading = """
from pyiceberg.catalog import load_catalog
catalog = load_catalog("shop", uri="sqlite:///lake/shop.db")
table = catalog.load_table(("changes", "public.accounts"))
print(sorted(table.scan().to_arrow().column("op").to_pylist()))
"""
    ran = run_python("-c", reading, cwd=tmp_path)
    assert (ran.returncode, ran.stdout) == (0, "['delete', 'read', 'read', 'truncate']\n"), (
        ran.stderr
    )


@contextlib.contextmanager
def object_storage() -> Iterator[tuple[str, fs.S3FileSystem]]:
    """Storage of this machine: its endpoint, and what it has."""
    pytest.importorskip("moto")
    script = paths.SUPPORT / "targets" / "object_storage.py"
    with subprocess.Popen(
        [sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as storage:
        assert storage.stdout is not None
        assert storage.stdin is not None
        endpoint = storage.stdout.readline().strip()
        yield (
            endpoint,
            fs.S3FileSystem(
                endpoint_override=endpoint,
                access_key="k",
                secret_key="s",
                allow_bucket_creation=True,
            ),
        )
        storage.stdin.close()


@pytest.mark.spark
def test_a_cluster(tmp_path: Path) -> None:
    """The command, with a master and storage of this machine."""
    pytest.importorskip("deltalake")
    (command,) = blocks("sh", GUIDES / "object-storage-and-spark-cluster.md")
    for given, here in (
        ("KEY_ID=…", "KEY_ID=some-key"), ("ACCESS_KEY=…", "ACCESS_KEY=some-secret"),
        ("/var/lib/shop.segments", "shop.segments"),
        ("spark://master.example:7077", "local[2]"),
    ):  # fmt: skip
        assert given in command
        command = command.replace(given, here)
    with object_storage() as (endpoint, files), fresh_server() as server:
        files.create_dir("lake")
        with psycopg.connect(server.dsn(), autocommit=True) as connection:
            connection.execute(ROWS)
        ran = run_shell(
            command, server.dsn(), tmp_path, AWS_ENDPOINT_URL=endpoint, AWS_ALLOW_HTTP="true"
        )
        assert ran.returncode == 0, ran.stderr
        assert "2 changes in 1 window" in ran.stderr
        assert "some-secret" not in ran.stderr
        found = files.get_file_info(fs.FileSelector("lake/shop", recursive=True))
    assert {one.path.split("/")[2] for one in found if one.is_file} == {
        "_progress", "changes", "state"
    }  # fmt: skip


def test_a_copy_in_object_storage(tmp_path: Path) -> None:
    """A change log that has its snapshots is copied, too."""
    first, *_, upload = blocks("sh", GUIDES / "capture.md")
    with object_storage() as (endpoint, files), fresh_server() as server:
        files.create_dir("bucket")
        with psycopg.connect(server.dsn(), autocommit=True) as connection:
            connection.execute(ROWS)
            assert run_shell(first, server.dsn(), tmp_path).returncode == 0
            connection.execute("DELETE FROM accounts WHERE id = 1")
        keys = {
            "AWS_ACCESS_KEY_ID": "k",
            "AWS_SECRET_ACCESS_KEY": "s",
            "AWS_REGION": "eu-central-1",
        }
        ran = run_shell(upload, server.dsn(), tmp_path, AWS_ENDPOINT_URL=endpoint, **keys)
        assert ran.returncode == 0, ran.stderr
        found = files.get_file_info(fs.FileSelector("bucket/shop/lake", recursive=True))
    here = {path.name for path in (tmp_path / "lake").rglob("*.arrow")}
    assert here
    assert here <= {Path(one.path).name for one in found}


def test_the_history_of_altered_types(tmp_path: Path) -> None:
    """The history of a capture with the event trigger, which knows what was altered when."""
    history, trigger = python_blocks(ROOT / "docs" / "reference" / "altered-types.md")
    capture = TARGETS.partition("pgoutput-fast sync")[0].replace("segments", "lake")
    (tmp_path / "messages.toml").write_text("messages = true\n")
    with fresh_server() as server, psycopg.connect(server.dsn(), autocommit=True) as connection:
        ran = run_python("-W", "error", "-c", on(server, trigger), cwd=tmp_path)
        assert (ran.returncode, ran.stderr) == (0, "")
        ran = run_shell(f"{capture.rstrip()} --config messages.toml", server.dsn(), tmp_path)
        assert ran.returncode == 0, ran.stderr
        connection.execute(ROWS)
        connection.execute("ALTER TABLE accounts ADD more int")
        ran = run_shell(f"{capture.rstrip()} --config messages.toml", server.dsn(), tmp_path)
        assert ran.returncode == 0, ran.stderr
    assert len(list((tmp_path / "lake" / "history").glob("*.ddl.json"))) == 1
    shown = f"{history}print(sorted(types.uncertain))\n"
    ran = run_python("-W", "error", "-c", shown, cwd=tmp_path)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "['accounts']\n[]\n", "")
