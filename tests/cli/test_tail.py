"""`pgoutput-fast tail`, as a process beside a real server."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from support.waiting import wait_until

import pgoutput_fast as pf

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


pytestmark = pytest.mark.server


class Tail:
    """The command, once its slot is there."""

    def __init__(self, database: Any, *options: str, environment: Any = None) -> None:
        server = ["--dsn", database.dsn] if environment is None else []
        arguments = [*server, "--publication", "p", *options]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pgoutput_fast", "tail", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        assert "tail of p" in self.process.stderr.readline()
        self.lines = iter(self.process.stdout.readline, "")

    def end(self, number: int = signal.SIGINT) -> tuple[int, str]:
        """Exit code, and what was printed of errors."""
        self.process.send_signal(number)
        _, errors = self.process.communicate(timeout=30)
        return self.process.returncode, errors


@pytest.fixture
def tail(database: Any) -> Iterator[Callable[..., Tail]]:
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, body text)",
        "CREATE PUBLICATION p FOR TABLE t",
        "INSERT INTO t VALUES (0, 'before')",
    )
    begun: list[Tail] = []

    def begin(*options: str, environment: Any = None) -> Tail:
        begun.append(Tail(database, *options, environment=environment))
        return begun[-1]

    yield begin
    for one in begun:
        one.process.kill()
        one.process.communicate()


def test_lines_until_interrupted(database: Any, tail: Callable[..., Tail]) -> None:
    shown = tail()
    ((slot, temporary, active),) = database.execute(
        "SELECT slot_name, temporary, active FROM pg_replication_slots"
        " WHERE database = current_database()"
    )
    assert (slot.startswith("pgoutput_fast_tail_"), temporary, active) == (True, True, True)
    database.execute("INSERT INTO t VALUES (1, 'x')", "DELETE FROM t WHERE id = 0")
    found = [next(shown.lines).split(maxsplit=2)[2] for _ in range(7)]
    assert [line.rpartition(") ")[2] for line in found if line.startswith("Commit")] == (
        ["1 change\n"] * 2
    )
    assert [line.split("(")[0] for line in found] == [
        *("Begin", "Relation", "INSERT public.t id='1' body='x'\n", "Commit"),
        *("Begin", "DELETE public.t id='0'\n", "Commit"),
    ]
    database.execute(
        "BEGIN; INSERT INTO t VALUES (2, 'x'), (3, 'x'); SAVEPOINT a; INSERT INTO t VALUES (4, '');"
        " ROLLBACK TO a; UPDATE t SET body = 'y' WHERE id = 2; COMMIT"
    )
    *_, end = (next(shown.lines) for _ in range(5))
    ((now,),) = database.execute("SELECT pg_current_wal_lsn()::text")
    (commit_lsn,) = re.findall(
        r" Commit\(.*commit_lsn=(\S+), .*, commit_time=20\S+ \S+\) 3 changes", end
    )
    assert pf.parse_lsn(commit_lsn) < pf.parse_lsn(now)
    assert shown.end() == (0, "")
    wait_until(lambda: database.slots() == {})


def test_json_and_binary(database: Any, tail: Callable[..., Tail]) -> None:
    shown = tail("--json", "--binary", "--messages")
    database.execute(
        "INSERT INTO t VALUES (1, 'é')", "SELECT pg_logical_emit_message(true, 'note', 'x')"
    )
    found = [json.loads(next(shown.lines)) for _ in range(7)]
    assert [one["tag"] for one in found] == list("BRICBMC")
    assert found[2]["new"] == {"id": "1", "body": "é"}
    assert found[2]["sent"].startswith("20")
    assert found[5]["prefix"] == "note"
    assert shown.end() == (0, "")


def test_a_server_that_the_environment_names(database: Any, tail: Callable[..., Tail]) -> None:
    """By libpq's own variables, as psql takes them; rows as JSON has their values."""
    named = psycopg.conninfo.conninfo_to_dict(database.dsn)
    assert set(named) <= {"host", "port", "user", "dbname", "password"}
    variables = {
        "PGDATABASE" if name == "dbname" else f"PG{name.upper()}": str(value)
        for name, value in named.items()
    }
    shown = tail("--json", "--values", "typed", environment={**os.environ, **variables})
    database.execute("INSERT INTO t VALUES (1, NULL)")
    found = [json.loads(next(shown.lines)) for _ in range(3)]
    assert found[2]["new"] == {"id": 1, "body": None}
    assert shown.end() == (0, "")


def test_users_types_are_the_servers(database: Any, tail: Callable[..., Tail]) -> None:
    database.execute(
        "CREATE TYPE place AS (name text, at int)",
        "ALTER TABLE t ADD home place",
        "CREATE TYPE colour AS ENUM ('red')",
        "ALTER TABLE t ADD colours colour[]",
    )
    typed = tail("--json", "--values", "typed")
    binary = tail("--json", "--binary")
    database.execute("INSERT INTO t VALUES (1, 'x', ('Rome', 3), '{red}')")

    def inserted(shown: Tail) -> Any:
        found = (json.loads(line) for line in shown.lines)
        return next(one["new"] for one in found if one["tag"] == "I")

    row = {"id": 1, "body": "x", "home": {"name": "Rome", "at": 3}, "colours": ["red"]}
    assert inserted(typed) == row
    assert inserted(binary) == {"id": "1", "body": "x", "home": "(Rome,3)", "colours": "{red}"}
    assert typed.end() == binary.end() == (0, "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda n: n.name)
def test_slot_goes_however_it_ends(
    database: Any, tail: Callable[..., Tail], number: signal.Signals
) -> None:
    shown = tail()
    assert list(database.slots().values()) == [True]
    assert shown.end(number)[0] == -number
    wait_until(lambda: database.slots() == {})


def test_reader_that_has_enough(database: Any, tail: Callable[..., Tail]) -> None:
    shown = tail()
    assert shown.process.stdout is not None
    shown.process.stdout.close()
    database.execute("INSERT INTO t VALUES (1, 'x')")
    assert shown.process.wait(timeout=30) == 141
    assert shown.process.stderr is not None
    assert shown.process.stderr.read() == ""
    wait_until(lambda: database.slots() == {})


def test_server_that_ends_the_connection(database: Any, tail: Callable[..., Tail]) -> None:
    shown = tail()
    database.execute(
        "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots"
        " WHERE database = current_database()"
    )
    _, errors = shown.process.communicate(timeout=30)
    assert shown.process.returncode == 1
    assert errors.startswith("pgoutput-fast: ")
    assert "57P01" in errors
    assert errors.count("\n") == 1


@pytest.mark.slow
def test_errors_are_one_line(database18: Any) -> None:
    for dsn, code in [
        (database18.dsn, "no_publication"),
        (database18.dsn + " password=s3cret sslmode=nonsense", "connection_refused"),
        ("postgresql://u:s3cret@x@y/z", "bad_option"),
        ("host=/nonexistent password=s3cret", "connection_lost"),
    ]:
        done = subprocess.run(
            [sys.executable, "-m", "pgoutput_fast", "tail", "--publication", "p"],
            check=False,
            capture_output=True,
            text=True,
            env={**os.environ, "PGOUTPUT_FAST_DSN": dsn},
        )
        assert (done.returncode, done.stdout) == (1, "")
        assert f"[{code}]" in done.stderr
        assert "s3cret" not in done.stderr
        assert "Traceback" not in done.stderr
        assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_a_password_on_the_command_line() -> None:
    def told(dsn: str, **environ: str) -> str:
        done = subprocess.run(
            [
                sys.executable, "-m", "pgoutput_fast", "tail", "--publication", "p",
                *(["--dsn", dsn] if not environ else []),
            ],
            check=False,
            capture_output=True,
            text=True,
            env={**os.environ, **environ},
        )  # fmt: skip
        assert done.returncode == 1
        assert "s3cret" not in done.stderr
        return done.stderr

    warning = "--dsn-file"  # the way to hide it
    assert warning in told("host=/nonexistent password=s3cret")
    assert warning in told("postgresql://u:s3cret@%2Fnonexistent/d")
    assert warning not in told("host=/nonexistent")
    assert warning not in told("", PGOUTPUT_FAST_DSN="host=/nonexistent password=s3cret")


def test_it_is_warned_of_what_never_comes(database: Any) -> None:
    database.execute("CREATE TABLE t (id int)", "CREATE PUBLICATION p FOR TABLE t",
                     "CREATE PUBLICATION empty")  # fmt: skip
    shown = Tail(database, "--publication", "empty")
    assert shown.process.stderr is not None
    try:
        warnings = [shown.process.stderr.readline() for _ in range(2)]
        assert "empty" in warnings[0]
        assert 'ALTER TABLE ONLY "public"."t" REPLICA IDENTITY FULL;' in warnings[1]
        assert all("pgoutput-fast doctor --publication p" in one for one in warnings)
    finally:
        shown.end()
