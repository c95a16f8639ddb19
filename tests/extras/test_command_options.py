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

import pytest

pytest.importorskip("click")
pytest.importorskip("psycopg")
pytest.importorskip("pyarrow")

from pgoutput_fast import testing
from pgoutput_fast.cli import _POOL as POOL
from pgoutput_fast.cli import main, tail
from pgoutput_fast.cli._named import in_options


@pytest.mark.parametrize(
    ("command", "text", "shown"),
    [
        ("capture", "give adopt_slot=True to begin", "give --adopt-slot to begin"),
        ("capture", "capture with history=False", "capture with --no-history"),
        ("capture", "it needs history=True, too", "it needs --history, too"),
        ("capture", "only with adopt_slot=False", "only with no --adopt-slot"),
        ("capture", "max_delay=-1.5: expected", "--max-delay -1.5: expected"),
        ("capture", "upload='s3://a/b'", "--upload s3://a/b"),
        (
            "capture",
            "upload_endpoint= and upload_keep= need upload=",
            "--upload-endpoint and --upload-keep need --upload",
        ),
        ("capture", "until_lsn=5 in directory=", "--until 5 in --out"),
        ("capture", "protocol=5 and consumer=", "protocol=5 and consumer="),
        ("capture", "/a/slot=x x.slot=1 --slot=s slot=[", "/a/slot=x x.slot=1 --slot=s slot=["),
        ("inspect", 'history="newer" (registry=)', "--history newer (--types)"),
        ("inspect", 'with on_error="collect"; consumer= keeps',
         "with --on-error collect; --consumer keeps"),
        (
            "sync", "Policies(infinity=...) can be 'null'; Policies(json='text') keeps it",
            "--policy infinity=... can be 'null'; --policy json='text' keeps it",
        ),
        ("sync", "tables='a.b' matches", "--table a.b matches"),
        (
            "sync", "with tables=['*.a b', '*.x.y', 'x.y'], leave out tables=",
            "with --table '*.a b' --table x.y, leave out --table",
        ),
        ("verify", "timeout=nan: expected", "--timeout nan: expected"),
    ],
)  # fmt: skip
def test_options_stand_for_arguments(command: str, text: str, shown: str) -> None:
    found = importlib.import_module(f"pgoutput_fast.cli.{command}").command
    assert in_options(text, found) == shown


def test_errors_of_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each command that shows errors in a way of its own."""
    made = ["--dsn", "host=/nonexistent", "--publication", "p"]
    target = tmp_path / "target"
    target.mkdir()
    for given, code, text in [
        (
            ["verify", *made, "--target", str(target), "--timeout", "nan"],
            2,
            "--timeout nan: expected a number of seconds above 0",
        ),
        (
            ["inspect", __file__, "--to", "parquet", str(target), "--consumer", "c"],
            1,
            "--consumer needs one directory of segments",
        ),
    ]:
        assert main(given) == code
        assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (["--upload-keep", "local"], "--upload-endpoint and --upload-keep need --upload"),
        (["--upload-endpoint", "http://x"], "--upload-endpoint and --upload-keep need --upload"),
        (["--upload", "http://bucket/lake"], "http://bucket/lake is no place for copies: give s3:"),
        (["--upload", "s3://bucket"], "s3://bucket needs a prefix behind the bucket"),
        (["--upload", "s3://u:geheim@bucket/lake"], "the URL of the object storage has a user or "),
        (["--upload", "s3://bucket/lake", "--upload-endpoint", "x"], "x is no endpoint: give http"),
        (["--out", "s3://bucket/lake"], "and for a copy in object storage --upload s3://bucket/pr"),
        (["--out", ""], "--out is empty"),
        (["--give-up"], "--give-up needs --silent-after, the seconds after which a consumer"),
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


@pytest.mark.parametrize(
    ("given", "streaming"), [([], True), (["--streaming"], True), (["--no-streaming"], False)]
)
@pytest.mark.parametrize("name", ["capture", "sync"])
def test_streaming_is_an_option(name: str, given: list[str], streaming: bool) -> None:
    made = {"capture": ["--slot", "s", "--out", "x"], "sync": ["--to", "duckdb:x"]}[name]
    command = importlib.import_module(f"pgoutput_fast.cli.{name}").command
    arguments = ["--dsn", "host=/nonexistent", "--publication", "p", *made, *given]
    assert command.make_context(name, arguments).params["streaming"] is streaming


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
