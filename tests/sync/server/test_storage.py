"""Delta tables in object storage that `apply.sync` keeps up to date, and `verify` of them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import paths

pytest.importorskip("moto")
pytest.importorskip("deltalake")

from pyarrow import fs
from support.expected_errors import expect_error

from pgoutput_fast import cli
from pgoutput_fast.apply import sync
from pgoutput_fast.embedded import EmbeddedServer
from pgoutput_fast.errors import RetryableError
from pgoutput_fast.verify import verify

pytestmark = pytest.mark.server

SECRET = "a-secret-that-nobody-may-see"
KEY_ID = "AKIAIOSFODNN7EXAMPLE"


@pytest.mark.slow
def test_tables_in_object_storage(
    pg16: EmbeddedServer, make_database: Callable[..., Any], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    database = make_database(pg16)
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, day date, v text)",
        "INSERT INTO t SELECT i, '2024-05-01', 'v' || i FROM generate_series(1, 100) AS i",
        "CREATE TABLE bag (x int)", "ALTER TABLE bag REPLICA IDENTITY FULL",
        "CREATE PUBLICATION p FOR ALL TABLES",
    )  # fmt: skip
    script = paths.SUPPORT / "targets" / "object_storage.py"
    with subprocess.Popen(
        [sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        assert server.stdin is not None
        endpoint = server.stdout.readline().strip()
        fs.S3FileSystem(
            endpoint_override=endpoint, access_key="k", secret_key="s", allow_bucket_creation=True
        ).create_dir("bucket")
        storage = {
            "AWS_ACCESS_KEY_ID": KEY_ID, "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1", "AWS_ENDPOINT_URL": endpoint, "AWS_ALLOW_HTTP": "true",
        }  # fmt: skip
        given: dict[str, Any] = {
            "slot": f"slot_{database.name}", "publications": ["p"], "target": "s3://bucket/lake",
            "directory": tmp_path / "segments", "partition_by": {"public.t": ["day"]},
            "storage_options": storage, "until": "now", "max_delay": 0.05,
        }  # fmt: skip
        sync(database.dsn, **given)
        database.execute(
            "UPDATE t SET id = id + 1000, day = NULL WHERE id < 4",
            "INSERT INTO bag VALUES (1), (1)",
            "DELETE FROM t WHERE id = 50",
        )
        ended = sync(database.dsn, **given)
        assert (ended.stale, ended.changes) == ({}, 6)
        checked = {"publications": ["p"], "target": "s3://bucket/lake",
                   "segments": str(tmp_path / "segments")}  # fmt: skip
        report = verify(database.dsn, **checked, storage_options=storage)
        assert {one.name: (one.state, one.rows) for one in report.tables} == {
            "t": ("equal", 99), "bag": ("equal", 2)
        }  # fmt: skip
        with expect_error(code="not_ours", path="s3://bucket/other"):
            verify(database.dsn, **{**checked, "target": "s3://bucket/other"},
                   storage_options=storage)  # fmt: skip
        for name, value in storage.items():
            monkeypatch.setenv(name, value)
        database.execute("INSERT INTO bag VALUES (2)")
        command = ["verify", "--dsn", database.dsn, "--publication", "p", "--timeout", "2",
                   "--target", "s3://bucket/lake", "--segments", checked["segments"]]  # fmt: skip
        assert cli.main(command) == 2  # it lacks the newest change
        assert "[timed_out]" in capsys.readouterr().err
        sync(database.dsn, **{**given, "storage_options": None})
        assert cli.main(command) == 0
        server.stdin.close()
        server.wait()
    # The storage may answer later.
    database.execute("INSERT INTO bag VALUES (3)")
    with expect_error(RetryableError, code="io_failed") as caught:
        sync(database.dsn, **given)
    assert SECRET not in str(caught.value)
    assert KEY_ID not in str(caught.value)
    assert "\x1b" not in str(caught.value)
