"""Passwords that libpq takes from the driver's environment are in nothing that Spark shows."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from support import paths

from pgoutput_fast.embedded import EmbeddedServer

pytest.importorskip("deltalake")

pytestmark = [pytest.mark.server, pytest.mark.spark, pytest.mark.slow]

DRIVER = paths.SUPPORT / "sparks" / "secret_driver.py"


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedServer]:
    """One that asks for a password."""
    with EmbeddedServer(18, {"log_min_messages": "fatal"}, tcp=True) as running:
        yield running


def environment(way: str, server: EmbeddedServer, tmp_path: Path, secret: str, wrong: str) -> tuple[
    dict[str, str], str, str
]:  # fmt: skip
    """Variables, and the connection strings of a role and of one that the server refuses."""
    base = f"host=127.0.0.1 port={server.port} dbname=postgres"
    user, other = f"{base} user=reader_{way}", f"{base} user=postgres"
    if way == "variable":
        return {"PGPASSWORD": secret}, user, other
    path = tmp_path / "private" / way
    path.parent.mkdir()
    path.touch(0o600)
    if way == "passfile":
        place = f"127.0.0.1:{server.port}:*"
        path.write_text(f"{place}:reader_{way}:{secret}\n{place}:postgres:{wrong}\n")
        return {"PGPASSFILE": str(path)}, user, other
    path.write_text("".join(
        f"[{name}]\n" + "\n".join(f"{dsn} password={password}".split()) + "\n"
        for name, dsn, password in (("shop", user, secret), ("refused", other, wrong))
    ))  # fmt: skip
    return {"PGSERVICEFILE": str(path)}, "service=shop", "service=refused"


@pytest.mark.parametrize("way", ["variable", "passfile", "service"])
def test_a_password_is_nowhere(server: EmbeddedServer, tmp_path: Path, way: str) -> None:
    secret, wrong = secrets.token_hex(16), secrets.token_hex(16)
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        for statement in (
            f"CREATE ROLE reader_{way} LOGIN REPLICATION PASSWORD '{secret}'",
            "CREATE TABLE IF NOT EXISTS t AS SELECT g AS id FROM generate_series(1, 30) AS g",
            "DROP PUBLICATION IF EXISTS p", "CREATE PUBLICATION p FOR TABLE t",
            f"GRANT SELECT ON t TO reader_{way}",
        ):  # fmt: skip
            connection.execute(statement.encode())
    given, dsn, refused = environment(way, server, tmp_path, secret, wrong)
    root = tmp_path / "root"
    root.mkdir()
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
    ended = subprocess.run(
        [sys.executable, DRIVER, dsn, refused, f"slot_{way}", root], env={**variables, **given},
        capture_output=True, text=True, check=False, timeout=200,
    )  # fmt: skip
    texts = {"stdout": ended.stdout, "stderr": ended.stderr}
    for path in root.rglob("*"):
        if path.is_file():
            texts[str(path.relative_to(root))] = path.read_bytes().decode("utf-8", "replace")
    assert [name for name, text in texts.items() if secret in text or wrong in text] == []
    assert ended.returncode == 0, ended.stderr
    # It did read, by the password alone.
    assert json.loads(ended.stdout.splitlines()[-1]) == [31, {"public.t": 30}]
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(f"host=127.0.0.1 port={server.port} dbname=postgres user=reader_{way}",
                        passfile="/nonexistent")  # fmt: skip
    # What was looked through is what it is taken for.
    shown = {name.removeprefix("shown/"): text for name, text in texts.items()
             if name.startswith("shown/")}  # fmt: skip
    for name in ("refused wrong", "refused sync"):
        assert "password authentication failed" in shown[name]
    assert "dsn: " in shown["refused in options"]
    assert "[bad_option]" in shown["refused in options"]
    assert "in-options" not in "".join(texts.values())
    assert "pgoutput" in shown["frame right"]
    assert "pgoutput" in shown["query"]
    assert "right" in shown["progress"]
    assert any("StreamingQuery" in text and "right" in text for text in shown.values())
    assert any("spark.eventLog.enabled" in text for text in shown.values())
    (events,) = (text for name, text in texts.items() if name.startswith("events/") and
                 "SparkListenerApplicationStart" in text)  # fmt: skip
    assert "SparkListenerSQLExecutionStart" in events
    assert any(name.startswith("right.checkpoint/offsets/") for name in texts)
    assert "INFO:pgoutput_fast" in ended.stderr
