"""The command's errors name its options, where those of the functions name their arguments."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("click")
pytest.importorskip("psycopg")
pytest.importorskip("pyarrow")


from support.commands.option_files import config

import pgoutput_fast as pf
from pgoutput_fast import testing
from pgoutput_fast.cli import _POOL as POOL
from pgoutput_fast.cli import main, tail
from pgoutput_fast.cli._dsn import naming_doctor
from pgoutput_fast.cli._options import shown_by
from pgoutput_fast.errors import Argument, PgOutputError, ReplicationError, RetryableError


@pytest.mark.parametrize(
    ("name", "argument", "shown"),
    [
        ("capture", Argument("adopt_slot", True), "--adopt-slot"),
        ("capture", Argument("adopt_slot", False), "no --adopt-slot"),
        ("capture", Argument("streaming", False), "streaming = false"),
        ("capture", Argument("upload", "s3://a/b"), "--upload s3://a/b"),
        ("capture", Argument("upload"), "--upload"),
        ("capture", Argument("until_lsn", 5), "--until 5"),
        ("capture", Argument("directory"), "--out"),
        ("capture", Argument("protocol", 5), "protocol = 5"),
        ("capture", Argument("schema_history"), "schema_history"),
        ("inspect", Argument("registry"), "--types"),
        ("sync", Argument("tables", "a.b"), "--table a.b"),
        ("sync", Argument("tables", ["*.a b", "*.x.y", "x.y"]), "--table '*.a b' --table x.y"),
        ("sync", Argument("policies", pf.Policies(json="parse")), "--policy json=parse"),
        ("sync", Argument("slot", "it's"), "--slot 'it'\"'\"'s'"),
    ],
)  # fmt: skip
def test_a_command_shows_its_own_options(name: str, argument: Argument, shown: str) -> None:
    command = importlib.import_module(f"pgoutput_fast.cli.{name}").command
    assert shown_by(command)(argument) == shown


def test_errors_of_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each command that shows errors in a way of its own."""
    made = ["--dsn", "host=/nonexistent", "--publication", "p"]
    target = tmp_path / "target"
    target.mkdir()
    for given, code, text in [
        (
            ["verify", *made, "--target", str(target), "--timeout", "nan"],
            2,
            "'--timeout'",
        ),
    ]:
        assert main(given) == code
        assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (config(upload_keep="local"), "upload_keep: it needs an upload"),
        (config(upload_endpoint="http://x"), "upload_endpoint: it needs an upload"),
        (["--upload", "http://bucket/lake"], "http://bucket/lake is not a URL of S3"),
        (["--upload", "s3://bucket"], "s3://bucket needs a prefix after the bucket"),
        (["--upload", "s3://u:geheim@bucket/lake"], "the URL of the object storage has a user or "),
        (
            ["--upload", "s3://bucket/lake", *config(upload_endpoint="x")],
            "x is not an endpoint",
        ),
        (["--out", "s3://bucket/lake"], "to object storage, also give --upload s3://bucket/pr"),
        (["--out", ""], "--out: it is empty"),
        (config(give_up=True), "give_up: it needs the time"),
        (config(max_delay=float("nan")), "max_delay: nan is not a number of seconds"),
        (config(segment_bytes="1XB"), "segment_bytes: '1XB' is not a number of bytes"),
        (config(merge="maybe"), "merge: 'maybe' is not a bool"),
        (config(connections="two"), "connections: 'two' is not a number"),
        (config(max_dealy=1), "max_dealy: there is no such option. Did you mean max_delay?"),
        (config(dsn="host=h"), "dsn: it is not allowed in the file. Give --dsn, --dsn-file"),
        (["--config", "/nonexistent/x.toml"], "can't read /nonexistent/x.toml: No such file"),
        (["--metrics-port", "x"], "'x' is not a number from 0 to 65535"),
    ],
)
def test_options_that_have_no_sense_are_wrong_usage(
    given: list[str], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are refused before the log begins, and before anything is connected to or made."""
    lake = tmp_path / "lake"
    made = ["--dsn", "host=/nonexistent", "--publication", "p", "--slot", "s", "--out", str(lake)]
    assert main(["capture", *made, "--log-format", "json", *given]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    *usage, error = said.err.splitlines()
    assert error.startswith("Error: ")
    assert text in error
    assert usage[0].startswith("Usage: pgoutput-fast capture ")
    assert not any(line.startswith("{") for line in usage)  # as those of the log
    assert "geheim" not in said.err
    assert not lake.exists()


def test_a_flag_goes_over_the_file(tmp_path: Path) -> None:
    from pgoutput_fast.capture_options import CaptureOptions
    from pgoutput_fast.cli._options import chosen
    from pgoutput_fast.cli.capture import command

    path = tmp_path / "options.toml"
    path.write_text(
        'slot = "s"\npublications = ["p", "q"]\nsnapshot = "initial"\nadopt_slot = false\n'
        'max_delay = "100ms"\nlog_interval = 1\nmerge = false\n'
    )
    given = ["--out", "x", "--config", str(path), "--slot", "t", "--adopt-slot"]
    with command.make_context("capture", given) as context:
        flags = dict(context.params)
        found = chosen(context, flags, CaptureOptions)
    assert (flags["slot"], flags["publications"]) == ("t", ("p", "q"))
    assert found == {
        "snapshot": "initial", "adopt_slot": True, "max_delay": 0.1, "merge": False
    }  # fmt: skip


class Stream:
    """Stands for the stream of a connection: it has one batch."""

    def __init__(self, server: testing.Server) -> None:
        self.connection = SimpleNamespace(settings={"client_encoding": "UTF8"})
        frames = [
            (lsn, lsn, 0, frame) for lsn, frame in zip(server.lsns, server.frames, strict=True)
        ]
        self._batches = [SimpleNamespace(frames=frames, keepalive_lsn=None)]
        self.acknowledged: list[int] = []

    def receive(self) -> SimpleNamespace | None:
        return self._batches.pop() if self._batches else None

    def acknowledge(self, lsn: int) -> None:
        self.acknowledged.append(lsn)


@pytest.mark.parametrize(
    ("patterns", "found"),
    [
        (["orders"], "AB"),
        (["public.o*"], "A"),
        (["*.o*", "items"], "ABC"),
        (["none"], ""),
        ([], "ABC"),
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_tail_shows_only_the_tables_that_are_wanted(
    patterns: list[str],
    found: str,
    as_json: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    columns = {"id": "text"}
    server = testing.Server()
    for value, name, schema in (
        ("A", "orders", "public"), ("B", "orders", "shop"), ("C", "items", "shop"),
    ):  # fmt: skip
        table = testing.Table(name, columns, 16384 + ord(value), namespace=schema)
        with server.begin() as transaction:
            transaction.insert(table, [value])
    stream = Stream(server)
    monkeypatch.setattr(tail, "connect", lambda *_, **__: contextlib.nullcontext(stream))
    monkeypatch.setattr(tail, "warn_of_publications", lambda *_: 0)
    given = [one for pattern in patterns for one in ("--table", pattern)]
    given += ["--json"] if as_json else []
    assert main(["tail", "--dsn", "host=h", "--publication", "p", *given]) == 0
    shown = capsys.readouterr().out
    pattern = r'"new": {"id": "(.)"}' if as_json else r" INSERT .* id='(.)'"
    assert "".join(re.findall(pattern, shown)) == found
    # Each transaction is acknowledged, also one of which nothing is shown.
    assert len(stream.acknowledged) == 3
    if patterns:
        assert not re.search(r"Begin|Commit", shown)


@pytest.mark.parametrize("option", ["--slot", "--segments", "--report", "--until", "--dsn-file",
                                    "--policy", "--partition-by", "--publication"])  # fmt: skip
@pytest.mark.parametrize("dsn", ["postgresql://u:geheim@h/d", "host=h password='ge heim' user=u"])
def test_a_password_in_another_option_is_not_shown(
    option: str,
    dsn: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)  # the report is a file of the name that is given
    given = ["--to", f"duckdb:{tmp_path / 'x.duckdb'}", "--dsn", "host=/nonexistent"]
    given += [] if option == "--segments" else ["--slot", "s", "--publication", "p"]
    given = [*given, option, dsn]
    if option in ("--segments", "--dsn-file"):
        given = [one for one in given if one not in ("--dsn", "host=/nonexistent")]
    assert main(["sync", *given]) > 0
    assert main(["verify", "--dsn", "x=y", "--publication", "p", "--target", dsn]) > 0
    assert main(["verify", "--dsn", "host=h", "--publication", "p", "--target", dsn]) > 0
    captured = capsys.readouterr()
    assert "heim" not in captured.out + captured.err
    assert "***" in captured.err


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere pyarrow may lack jemalloc")
@pytest.mark.parametrize(
    ("name", "given", "backend"),
    [("sync", {}, "jemalloc"), ("sync", {POOL: "system"}, "system"), ("consumers", {}, None)],
)
def test_which_allocator_a_sync_has(name: str, given: dict[str, str], backend: str | None) -> None:
    """It keeps little of what was freed; nothing of that goes to the processes that it starts."""
    program = (
        "import os, sys; from pgoutput_fast import cli; cli._imported(sys.argv[1])\n"
        "import pyarrow; print(pyarrow.default_memory_pool().backend_name)\n"
        "print(os.environ.get(sys.argv[2]))"
    )
    environment = {key: value for key, value in os.environ.items() if key != POOL} | given
    ended = subprocess.run(
        [sys.executable, "-c", program, name, POOL],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    found, left = ended.stdout.split()
    assert left == str(given.get(POOL))
    if backend is None:
        assert found != "jemalloc"
    else:
        assert (found, ended.stderr) == (backend, "")


@pytest.mark.parametrize(
    ("kind", "code", "sqlstate", "hint"),
    [
        (ReplicationError, None, "55000", ("doctor --publication 'a b' to see all",)),
        (ReplicationError, None, "57014", ()),
        (RetryableError, "no_rights", "42501", ()),
        (PgOutputError, "no_publication", None, ("doctor --publication 'a b' to see all",)),
        (PgOutputError, "no_rights", None, ("doctor --publication 'a b' to see all",)),
        (PgOutputError, "bad_option", None, ()),
    ],
)
def test_the_error_of_a_server_that_is_not_ready_names_doctor(
    kind: type[Any], code: Any, sqlstate: str | None, hint: tuple[str, ...]
) -> None:
    error = kind("the server refused", code=code)
    error.sqlstate = sqlstate
    with pytest.raises(kind) as caught, naming_doctor(["a b"]):
        raise error
    assert len(caught.value.hint) == len(hint)
    assert all(part in str(one) for part, one in zip(hint, caught.value.hint, strict=True))
