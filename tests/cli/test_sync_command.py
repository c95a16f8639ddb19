"""`pgoutput-fast sync` beside a real server: what is in the tables, how it ends, what it shows."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console
from rich.live import Live
from support.commands.builds import ROOT
from support.commands.option_files import config
from support.commands.running_command import Running
from support.expected_errors import expect_error
from support.waiting import wait_until

import pgoutput_fast as pf
from pgoutput_fast import apply
from pgoutput_fast.apply.continuity import snapshot_name
from pgoutput_fast.apply.targets import StateColumn, TableState
from pgoutput_fast.changelog.consumers import consumers
from pgoutput_fast.changelog.snapshot_states import Snapshot
from pgoutput_fast.cli import _position, main
from pgoutput_fast.cli import sync as sync_command
from pgoutput_fast.cli._sync_events import table_events
from pgoutput_fast.cli._sync_views import SyncLiveView, behind_text
from pgoutput_fast.replication import capture, upkeep
from pgoutput_fast.watching.metrics import SYNC_PREFIX
from pgoutput_fast.watching.sync_figures import SyncFigures

if TYPE_CHECKING:
    pass


duckdb = pytest.importorskip("duckdb")

pytestmark = pytest.mark.server

COMMAND = [sys.executable, "-m", "pgoutput_fast", "sync"]
# What the page says of syncs.
PAGE = (ROOT / "docs" / "reference" / "log-records.md").read_text().split("\n## ")[2]
JSON = ["--log-format", "json"]
# A name that is neither HTML nor SQL.
NAME = '<b onclick="x">&'


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_TICK", "_MERGE_INTERVAL", "_TIDY_INTERVAL", "_WATCH_INTERVAL"):
        monkeypatch.setattr(upkeep, name, 0.05)
    monkeypatch.setattr(_position, "_INTERVAL", 0.05)


@pytest.fixture
def published(database18: Any) -> Any:
    database18.execute(
        "CREATE TABLE t (id bigint PRIMARY KEY, body text)",
        "INSERT INTO t SELECT g, 'before' FROM generate_series(1, 20) g",
        "CREATE PUBLICATION p FOR ALL TABLES",
    )
    return database18


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Running:
    return Running("sync", capsys, monkeypatch)


def arguments(
    database: Any, file: Path, *more: object, dsn: str | None = None, **options: object
) -> list[str]:
    given = ["--dsn", dsn or database.dsn, "--slot", f"slot_{database.name}", "--publication", "p"]
    quick = config(**{"max_delay": 0.05, "interval": "50ms", **options})
    return [*given, "--to", f"duckdb:{file}", *quick, *map(str, more)]


def ask(file: Path, statement: str) -> list[Any]:
    with contextlib.closing(duckdb.connect(str(file), read_only=True)) as connection:
        found: list[Any] = connection.execute(statement).fetchall()
        return found


def rows(file: Path, table: str = "public.t") -> list[Any]:
    return ask(file, f'SELECT * FROM state."{table}" ORDER BY 1')


def held(database: Any) -> list[Any]:
    """What the server has."""
    found: list[Any] = database.execute("SELECT * FROM t ORDER BY 1")
    return found


def there(path: Path) -> dict[str, str]:
    """All files of a directory, and what is in them."""
    return {
        str(file.relative_to(path)): hashlib.sha256(file.read_bytes()).hexdigest()
        if file.is_file()
        else "a directory"
        for file in path.rglob("*")
    }


class Page(HTMLParser):
    """What a page shows, and what it would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.shown = ""
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.shown += data


def test_sync_until_now_has_what_the_server_has(
    published: Any, run: Running, tmp_path: Path
) -> None:
    """Twice, with columns, tables and rows that come between; each change once."""
    file, report = tmp_path / "shop.duckdb", tmp_path / "report.html"
    given = arguments(published, file, "--until", "now", "--report", report)
    run(given)
    assert rows(file) == held(published) != []
    assert "made slot" in run.text
    published.execute(
        "INSERT INTO t SELECT g, 'x' || g FROM generate_series(21, 500) g",
        "UPDATE t SET body = NULL WHERE id % 7 = 0; DELETE FROM t WHERE id % 5 = 0",
        "ALTER TABLE t ADD extra text DEFAULT 'more'",
        "INSERT INTO t VALUES (1000, 'late', 'other')",
        f'CREATE TABLE "{NAME.replace(chr(34), chr(34) * 2)}" (id int PRIMARY KEY)',
    )
    run([*given, *JSON])
    assert rows(file) == held(published)
    told = run.event("stop")
    assert told is not None
    inserted, updated, deleted = 480, 500 // 7, 100
    assert told["tables"]["public.t"] == inserted + updated + deleted + 1
    assert (told["stale"], told["waiting"]) == ({}, [])
    # The server may write log of its own after the last change, as it does every fifteen seconds;
    # that is less than a page, and the last transactions wrote several.
    assert 0 <= told["lag_bytes"] < 8192
    assert told["capture"]["transactions"] == 3
    once = 'SELECT count(*), count(DISTINCT (commit_lsn, seq)) FROM changes."public.t"'
    # The snapshot is a Truncate and the rows.
    copied = 1 + 20
    assert ask(file, once) == [(copied + told["tables"]["public.t"],) * 2]
    events = {(one["table"], one["message"]) for one in run.events() if one["event"] == "table"}
    assert ("public.t", "public.t has a new column extra") in events
    assert any(
        table == f"public.{NAME}" and text.startswith(f"public.{NAME} is new")
        for table, text in events
    )

    page = Page(report.read_text())
    assert "All tables are kept up to date." in page.shown
    assert "has a new column extra" in page.shown
    assert f"public.{NAME}" in page.shown
    assert "onclick" not in page.attributes
    # Nothing is loaded from elsewhere.
    assert not page.tags & {"script", "link", "img", "iframe", "b-onclick"}
    assert not page.attributes & {"src", "href"}
    assert "@import" not in report.read_text()
    assert "http-equiv" not in page.attributes  # it has ended


def test_dry_run_leaves_nothing_behind(
    published: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "shop.duckdb"
    given = arguments(published, file)
    assert main(["sync", *given, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert f"slot slot_{published.name} would be made" in said
    assert "public.t  not in the target; would get a snapshot" in said
    assert "warning" not in said
    assert there(tmp_path) == {}
    assert published.slots() == {}

    assert main(["sync", *given, "--until", "now"]) == 0
    published.execute("INSERT INTO t VALUES (100, 'x'), (101, 'y')")
    end = pf.parse_lsn(published.execute("SELECT pg_current_wal_lsn()::text")[0][0])
    directory = tmp_path / "shop.duckdb.segments"
    capture(published.dsn, slot=f"slot_{published.name}", publications=["p"], directory=directory,
            until_lsn=end)  # fmt: skip
    published.execute("CREATE TABLE u (id int PRIMARY KEY)")
    before, kept = there(tmp_path), consumers(directory)
    capsys.readouterr()
    assert main(["sync", *given, "--dry-run"]) == 0
    said = capsys.readouterr().out
    (lsn,) = {one["lsn"] for one in _progress(file)}
    assert re.search(rf"public\.t  up to {pf.format_lsn(lsn)} in the target; 2 changes from", said)
    assert re.search(r"public\.u  not in the target; would get a snapshot", said)
    assert there(tmp_path) == before

    # Another target of the directory, which has no consumer yet.
    other = ["--segments", str(directory), "--to", f"duckdb:{tmp_path / 'other.duckdb'}"]
    assert main(["sync", *other, "--dry-run"]) == 0
    assert "its snapshot of 20 rows" in capsys.readouterr().out
    assert there(tmp_path) == before
    assert consumers(directory) == kept
    # What it would warn of.
    assert main(["sync", *given, "--table", "t", "--dry-run"]) == 1
    errors = capsys.readouterr().err
    for part in (f"--table: {file} ", "[bad_option]"):
        assert part in errors
    lake = [*arguments(published, tmp_path / "lake", "--dir", str(tmp_path / "d")), "--dry-run"]
    lake[lake.index("--to") + 1] = str(tmp_path / "lake")
    lake += ["--table", "t", "--table", "q", "--adopt-slot"]
    assert main(["sync", *lake, "--partition-by", "public.t=id"]) == 0
    said = capsys.readouterr().out
    (warning,) = (line for line in said.splitlines() if line.startswith("warning"))
    assert "'q'" in warning
    for wrong, part in (("public.x=id", "public.x"), ("public.t=x", "'x'")):
        assert main(["sync", *lake, "--partition-by", wrong]) == 1
        errors = capsys.readouterr().err
        for one in ("--partition-by: ", part, "[no_table]"):
            assert one in errors
    # What the sync would refuse.
    assert main(["sync", *other[:2], "--to", "duckdb:nowhere/x.duckdb", "--dry-run"]) == 2
    assert "[missing_path]" in capsys.readouterr().err


@pytest.mark.slow
def test_dry_run_of_a_target_that_was_moved(
    published: Any, run: Running, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """It is another consumer there, which lacks what was deleted as the former one had it."""
    old, new = tmp_path / "old.duckdb", tmp_path / "new.duckdb"
    small = {"segment_bytes": 1, "keep_seconds": 0.1}
    for one in range(3):
        published.execute(f"INSERT INTO t VALUES ({100 + one}, 'x')")
        run(arguments(published, old, "--until", "now", **small))
    directory = tmp_path / "new.duckdb.segments"
    (tmp_path / "old.duckdb.segments").rename(directory)
    old.rename(new)
    assert (directory / "begin.json").exists()  # the first ones are deleted
    given, before = arguments(published, new), there(tmp_path)
    assert main(["sync", *given, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert re.search(
        r"public\.t  up to .* in the target.*; would get a new snapshot, because", said
    )
    assert there(tmp_path) == before
    assert main(["sync", *given, "--on-error", "stop", "--dry-run"]) == 1
    errors = capsys.readouterr().err
    for part in (f"snapshot --dir {directory} --table public.t", "[changes_missing]"):
        assert part in errors
    run([*given, "--until", "now"])
    assert rows(new) == held(published)
    assert main(["sync", *given, "--dry-run"]) == 0
    assert "would get a new snapshot" not in capsys.readouterr().out


def _progress(file: Path) -> list[dict[str, Any]]:
    found = ask(file, 'SELECT "table", lsn FROM _progress')
    return [{"table": table, "lsn": lsn} for table, lsn in found]


@pytest.mark.slow
def test_two_syncs_of_one_target(
    published: Any, run: Running, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second is refused by the target's name, whichever directory it reads."""
    file = tmp_path / "shop.duckdb"
    given = arguments(published, file, "--until", "now")
    run(given)
    directory = tmp_path / "shop.duckdb.segments"
    stop, began = threading.Event(), threading.Event()
    thread = threading.Thread(
        target=apply.sync,
        kwargs={"target": f"duckdb:{file}", "segments": directory, "stop": stop,
                "progress": lambda _: began.set()},
    )  # fmt: skip
    thread.start()
    try:
        assert began.wait(30)
        run(given, code=1)
        assert "[in_use]" in run.text
        second = ["--segments", str(directory), "--to", f"duckdb:{file}", "--until", "now"]
        run([*second, *config(consumer="other")], code=1)
        assert f"{file} [in_use]" in run.text
    finally:
        stop.set()
        thread.join()
    # Two targets of one directory are no matter.
    other = tmp_path / "other.duckdb"
    run(["--segments", str(directory), "--to", f"duckdb:{other}", "--until", "now"])
    assert rows(other) == rows(file) == held(published)
    capsys.readouterr()


def test_a_target_of_another_database(
    published: Any, make_database: Any, pg18: Any, run: Running, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    file = tmp_path / "shop.duckdb"
    run(arguments(published, file, "--until", "now"))
    other = make_database(pg18)
    other.execute("CREATE TABLE t (id int PRIMARY KEY)", "CREATE PUBLICATION p FOR ALL TABLES")
    given = arguments(other, file, "--dir", tmp_path / "other.segments", "--until", "now")
    run(given, code=1)
    assert main(["sync", *given, "--dry-run"]) == 1
    for errors in (run.text, capsys.readouterr().err):
        for part in (f"'{published.name}'", "[another_history]"):
            assert part in errors
    assert rows(file) == held(published)


@pytest.mark.slow
def test_a_directory_of_another_slot_or_database(
    published: Any, make_database: Any, pg18: Any, run: Running, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """They are refused before anything of the directory is read, or told of it."""
    file, name = tmp_path / "shop.duckdb", f"slot_{published.name}"
    directory = tmp_path / "shop.duckdb.segments"
    run(arguments(published, file, "--until", "now"))
    run(["--dsn", published.dsn, "--slot", f"{name}_2", "--publication", "p",
         "--to", f"duckdb:{tmp_path / 'second.duckdb'}", "--until", "now"])  # fmt: skip
    before = rows(file)
    published.execute("ALTER TABLE t ADD extra int", "INSERT INTO t VALUES (21, 'x', 1)")
    ((lsn,),) = published.execute("SELECT pg_current_wal_lsn()::text")
    capture(published.dsn, slot=name, publications=["p"], directory=directory,
            until_lsn=pf.parse_lsn(lsn))  # fmt: skip
    parts = [f"--slot: {directory} ", f"'{name}'", f"'{name}_2'", f"--slot {name} ", "--dir"]
    for target in (file, tmp_path / "third.duckdb"):
        given = ["--dsn", published.dsn, "--slot", f"{name}_2", "--publication", "p",
                 "--dir", str(directory), "--to", f"duckdb:{target}"]  # fmt: skip
        run([*given, "--until", "now", *JSON], code=1)
        error = run.event("error")
        assert error is not None
        assert error["code"] == "another_history"
        assert run.event("table") is None
        assert main(["sync", *given, "--dry-run"]) == 1
        for text in (error["message"], capsys.readouterr().err):
            for part in parts:
                assert part in text
    other = make_database(pg18)
    other.execute("CREATE TABLE t (id int PRIMARY KEY)", "CREATE PUBLICATION p FOR ALL TABLES")
    run([*arguments(published, file, "--until", "now", dsn=other.dsn), *JSON], code=1)
    error = run.event("error")
    assert error is not None
    assert error["code"] == "another_history"
    for part in (str(directory), f"'{published.name}'"):
        assert part in error["message"]
    assert run.event("table") is None
    assert rows(file) == before
    assert not (tmp_path / "third.duckdb").exists()
    run(arguments(published, file, "--until", "now"))
    assert rows(file) == held(published)


@pytest.mark.slow
def test_what_waits_and_what_is_stale(published: Any, run: Running, tmp_path: Path) -> None:
    """A table that is altered as no change tells: it is named with the reason, and copied again."""
    file, report = tmp_path / "shop.duckdb", tmp_path / "report.html"
    given = arguments(published, file, "--until", "now", "--report", report)
    run(given)
    published.execute("ALTER TABLE t ALTER id TYPE int", "INSERT INTO t VALUES (21, 'x')")
    run([*given, *JSON], code=3)
    told = run.event("stop")
    assert told is not None
    assert list(told["stale"]) == ["public.t"]
    assert "column id " in told["stale"]["public.t"]
    page = Page(report.read_text())
    assert "1 table not kept up to date" in page.shown
    assert told["stale"]["public.t"] in page.shown
    assert rows(file) == [row for row in held(published) if row[0] != 21]  # as it was
    assert told["message"].endswith(
        "; 1 table not up to date: public.t; the next call takes a snapshot of it"
    )

    def look() -> None:
        wait_until(lambda: "public.t has a new snapshot" in run.text)
        assert (
            f"table public.t needs a snapshot: the sync to duckdb:{file} requested it: "
            f"{told['stale']['public.t']}"
        ) in [one["message"] for one in run.events()]

    run([*arguments(published, file), *JSON], look)
    told = run.event("stop")
    assert told is not None
    assert (told["stale"], " not: " in told["message"]) == ({}, False)
    assert rows(file) == held(published)


def test_signals_end_it_after_a_window(published: Any, tmp_path: Path) -> None:
    """A process, while the server writes; the next call goes on."""
    file = tmp_path / "shop.duckdb"
    given = arguments(published, file)
    process = subprocess.Popen([*COMMAND, *given], stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: file.exists() and (tmp_path / "shop.duckdb.segments").exists())
        wait_until(lambda: True in published.slots().values())
        for number in range(100, 150):
            published.execute(f"INSERT INTO t VALUES ({number}, 'x')")
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    assert "the sync ends: " in errors
    assert "Traceback" not in errors
    assert main(["sync", *given, "--until", "now"]) == 0
    assert rows(file) == held(published)
    assert len(held(published)) == 70


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, signal.SIGKILL])
def test_other_signals(published: Any, tmp_path: Path, number: signal.Signals) -> None:
    file = tmp_path / "shop.duckdb"
    given = arguments(published, file)
    process = subprocess.Popen([*COMMAND, *given], stderr=subprocess.PIPE, text=True)
    stop = threading.Event()

    def write() -> None:
        with published.connect() as connection:
            at = 100
            while not stop.wait(0.01):
                connection.execute("INSERT INTO t VALUES (%s, 'x')", [at])
                at += 1

    writer = threading.Thread(target=write)
    try:
        wait_until(lambda: True in published.slots().values())
        writer.start()
        wait_until(lambda: published.execute("SELECT 1 FROM t OFFSET 200"))
        process.send_signal(number)
        _, errors = process.communicate(timeout=30)
    finally:
        stop.set()
        writer.join()
        process.kill()
        process.communicate()
    codes = {signal.SIGINT: 130, signal.SIGHUP: 0, signal.SIGKILL: -9}
    assert process.returncode == codes[number], errors
    wait_until(lambda: True not in published.slots().values())
    assert main(["sync", *given, "--until", "now"]) == 0
    assert rows(file) == held(published)


@pytest.mark.slow
def test_a_terminal_has_live_lines(published: Any, tmp_path: Path) -> None:
    primary, secondary = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "200", "LINES": "30"}
    process = subprocess.Popen(
        [*COMMAND, *arguments(published, tmp_path / "shop.duckdb")],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=secondary, env=environment,
    )  # fmt: skip
    os.close(secondary)
    shown = bytearray()

    def read(until: bytes) -> None:
        while until not in shown:
            assert len(shown) < 1 << 20, shown[-4096:]
            shown.extend(os.read(primary, 4096))

    read(b"20 changes")  # the rows of its snapshot
    published.execute("INSERT INTO t VALUES (100, 'x')")
    read(b"21 changes")
    published.execute("ALTER TABLE t ALTER id TYPE int", "INSERT INTO t VALUES (101, 'x')")
    read(b"public.t has a new snapshot")
    process.send_signal(signal.SIGTERM)
    while True:
        try:
            shown.extend(os.read(primary, 4096))
        except OSError:  # the terminal's other end is closed
            break
    os.close(primary)
    assert process.wait(timeout=30) == 0
    text = shown.decode()
    assert "lag 0 bytes, 0.0 s" in text
    assert re.search(r"  public\.t +\d+ changes +\d+/s +\d\.\d\d s", text)
    # The line of a table that is stale may be there for a moment only; the log's stays.
    assert re.search(r"public\.t is not kept up to date: .*column id ", text)
    assert "changes/s" in text
    assert shown.count(b"\x1b[?25l") == shown.count(b"\x1b[?25h") == 1
    assert "the sync ends: " in text


def test_the_log_has_lines_with_numbers(published: Any, run: Running, tmp_path: Path) -> None:
    file = tmp_path / "shop.duckdb"

    def look() -> None:
        wait_until(lambda: run.event("progress"))
        published.execute("INSERT INTO t VALUES (100, 'x')")
        wait_until(lambda: (run.event("progress") or {})["changes"] == 21)

    run([*arguments(published, file, log_interval=0.05), *JSON], look)
    names = [one["event"] for one in run.events()]
    assert names[0] == "start"
    assert names[-1] == "stop"
    progress = run.event("progress")
    assert progress is not None
    described = _table_of("key")
    assert described >= {key for one in run.events() for key in one}
    assert {one["event"] for one in run.events()} <= _table_of("event")
    assert pf.parse_lsn(progress["lsn"]) > 0
    assert progress["capture"]["connected"]


def _table_of(head: str) -> set[str]:
    """The names in the first column of the page's table."""
    (table,) = re.findall(rf"^\| {head} \|.*\n\|[-|]+\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    first = [line[: line.index("|", 1)] for line in table.splitlines()]
    return {name for cell in first for name in re.findall(r"`(\w+)`", cell)}


@pytest.mark.slow
def test_metrics(published: Any, run: Running, tmp_path: Path) -> None:
    """Of the tables, and of the capture beside them."""
    found: dict[str, float] = {}

    def scrape() -> dict[str, float]:
        url = run.event("metrics")["url"]  # type: ignore[index]
        with urllib.request.urlopen(url) as answer:
            lines = answer.read().decode().splitlines()
        found.clear()
        for line in lines:
            if not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                found[name] = float(value)
        return found

    def look() -> None:
        wait_until(lambda: run.event("metrics"))
        wait_until(lambda: scrape().get(f"{SYNC_PREFIX}changes_total") == 20)
        published.execute("INSERT INTO t SELECT g, 'x' FROM generate_series(100, 399) g")
        wait_until(lambda: scrape()[f"{SYNC_PREFIX}changes_total"] == 320)
        wait_until(lambda: scrape().get(f"{SYNC_PREFIX}lag_bytes") == 0)
        scrape()

    file = tmp_path / "shop.duckdb"
    run([*arguments(published, file, "--metrics-port", 0), *JSON], look)
    assert found[f'{SYNC_PREFIX}table_changes_total{{table="public.t"}}'] == 320
    assert found[f'{SYNC_PREFIX}table_write_seconds_total{{table="public.t"}}'] > 0
    assert found[f"{SYNC_PREFIX}up"] == 1
    assert found[f"{SYNC_PREFIX}stale_tables"] == found[f"{SYNC_PREFIX}waiting_tables"] == 0
    (lsn,) = {one["lsn"] for one in _progress(file)}
    assert found[f"{SYNC_PREFIX}lsn"] >= lsn
    assert found["pgoutput_fast_capture_up"] == 1
    info = f'{SYNC_PREFIX}info{{target="duckdb:{file}",version="{pf.__version__}"}}'
    assert found[info] == 1


@pytest.mark.slow
def test_a_service_manager_is_told_of_syncs(
    published: Any,
    run: Running,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(30)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        monkeypatch.setenv("WATCHDOG_USEC", "200000")
        monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
        told: list[str] = []

        def hear(expected: str) -> None:
            while not told or not told[-1].startswith(expected):
                told.append(manager.recv(4096).decode())

        def look() -> None:
            hear("READY=1")
            assert (tmp_path / "shop.duckdb").exists()
            for _ in range(2):
                hear("WATCHDOG=1")
                told.append("")
            hear("STATUS=lag ")

        run([*arguments(published, tmp_path / "shop.duckdb"), *JSON], look)
        told.append("")
        hear("STOPPING=1")
        assert told[0] == "STATUS=connecting"


def test_errors_and_their_exit_codes(
    published: Any, run: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "shop.duckdb"
    # 75: it may pass.
    gone = "host=/nonexistent password=s3cret"
    run([*arguments(published, file, dsn=gone), *JSON], code=75)
    assert run.event("error")["retryable"] is True  # type: ignore[index]
    assert "--dsn-file" in run.text
    assert "s3cret" not in run.text
    run([*arguments(published, file, dsn=gone, retry_for=1), *JSON], code=75)
    assert run.event("retry") is not None
    # 1: it does not, and the advice names options.
    published.execute(f"SELECT pg_create_logical_replication_slot('slot_{published.name}', "
                      "'pgoutput')")  # fmt: skip
    run([*arguments(published, file, "--until", "now"), *JSON], code=1)
    error = run.event("error")
    assert error is not None
    assert (error["code"], "--adopt-slot" in error["message"]) == ("not_ours", True)
    assert "For another target, give another --slot" in error["message"]
    assert "give its directory as --dir" in error["message"]
    run([*arguments(published, file, "--until", "now", "--snapshot", "never", "--adopt-slot")])
    published.execute("INSERT INTO t VALUES (100, 'x')")
    run(arguments(published, file, "--until", "now", "--snapshot", "never"), code=1)
    assert 'uncopied = "empty"' in run.text
    assert "--snapshot initial" in run.text
    never = ("--until", "now", "--snapshot", "never")
    run(arguments(published, file, *never, uncopied="empty"))
    assert rows(file) == [(100, "x")]

    def fail(*_: object, **__: object) -> None:
        raise ValueError("a fault of password=s3cret")

    from pgoutput_fast.cli import sync as sync_command

    monkeypatch.setattr(sync_command, "sync", fail)
    run([*arguments(published, file, dsn=f"{published.dsn} password=s3cret"), *JSON], code=1)
    error = run.event("error")
    assert error is not None
    assert error["level"] == "critical"
    assert "ValueError: a fault of password=***" in run.text
    assert "s3cret" not in run.text


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ([], ["--slot and --publication", "--segments"]),
        (["--slot", "s"], ["--slot and --publication", "--segments"]),
        (["--segments", "d", "--slot", "s"], ["--slot: ", "--segments [bad_option]"]),
        (["--segments", "d", "--dir", "s"], ["--dir: ", "--segments [bad_option]"]),
        (["--segments", "d", "--dsn", "x"], ["--dsn: ", "--segments [bad_option]"]),
        (["--segments", "d", *config(binary=True)], [" binary: ", "--segments [bad_option]"]),
        (["--segments", "d", "--snapshot", "never"], ["--snapshot: ", "--segments [bad_option]"]),
        (["--segments", "d", "password=s3cret"], ["--dsn"]),
        (["--segments", "d", "--until", "soon"], ["'--until'", "'soon'"]),
        (["--segments", "d", "--interval", "1x"], ["'--interval'", "'1x'"]),
        (["--segments", "d", "--engine", "spark"], ["--to: ", "--engine spark", "[bad_option]"]),
        (["--segments", "d", "--report", "/nonexistent/r.html"], ["--report: ", " /nonexistent\n"]),
        (["--segments", "d", "--policy", "x=y"], ["'--policy'", "'x=y'", "[bad_option]"]),
        (["--segments", "d", "--partition-by", "public.a="], ["'--partition-by'", "'public.a='"]),
        (["--segments", "d", "--to", "s3://u:s3cret@b/x"], ["AWS_ACCESS_KEY_ID", "[bad_option]"]),
        (["--segments", "d", "--to", "ducdb:x"], ["--to: ", "'ducdb:x'", "[bad_option]"]),
        (["--segments", "d", "--to", "duckdb:"], ["--to: ", "'duckdb:'", "[bad_option]"]),
        (["--segments", "d", "--soft-deletes", ""], ["'--soft-deletes': ''"]),
        (["--segments", "d", "--partition-by", "s.a=b"], ["--partition-by: ", "[bad_option]"]),
        (["--slot", "S", "--publication", "p"], ["--slot: ", "'S'", "[bad_option]"]),
    ],
)
def test_wrong_usage_of_sync(
    given: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sync", "--to", "duckdb:x.duckdb", *given]) == 2
    errors = capsys.readouterr().err
    for part in parts:
        assert part in errors
    assert "s3cret" not in errors


@pytest.mark.slow
def test_a_stop_ends_it_though_more_is_there(published: Any, tmp_path: Path) -> None:
    """Window for window, of a directory that has several; then until an LSN that is to come."""
    directory, file = tmp_path / "lake", tmp_path / "shop.duckdb"
    slot: dict[str, Any] = {"slot": "s", "publications": ["p"], "directory": directory}

    def captured() -> int:
        ((end,),) = published.execute("SELECT pg_current_wal_lsn()::text")
        capture(published.dsn, **slot, create_slot=True, until_lsn=pf.parse_lsn(end), merge=False)
        return pf.parse_lsn(end)

    captured()
    for number in range(100, 105):
        published.execute(f"INSERT INTO t VALUES ({number}, 'x')")
        captured()
    stop = threading.Event()
    told: list[apply.SyncProgress] = []

    def note(progress: apply.SyncProgress) -> None:
        told.append(progress)
        if progress.windows == 2:
            stop.set()

    options: dict[str, Any] = {
        "segments": directory, "target": f"duckdb:{file}", "window_bytes": 1, "interval": 0.05,
        "uncopied": "empty",
    }  # fmt: skip
    ended = apply.sync(**options, stop=stop, progress=note)
    assert (told[0].windows, ended.windows, ended.changes) == (0, 2, 2)
    assert ended.end_lsn > ended.lsn
    assert [row[0] for row in rows(file)] == [100, 101]

    # An LSN that the directory reaches later, without a change.
    ended = apply.sync(**options, until="now")
    assert ended.lsn == ended.end_lsn
    end = ended.end_lsn + 1
    found: list[apply.SyncProgress] = []
    thread = threading.Thread(target=lambda: found.append(apply.sync(**options, until=end)))
    thread.start()
    thread.join(0.3)
    assert thread.is_alive()
    published.execute("CREATE TABLE unpublished (a int)")
    published.execute("SELECT pg_switch_wal()")
    assert captured() >= end
    thread.join(30)
    assert found[0].lsn >= end


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["deleted", "restored"])
def test_a_target_that_lacks_what_is_deleted(published: Any, tmp_path: Path, kind: str) -> None:
    """The directory keeps nothing for it: its tables are copied again, without further ado."""
    file = tmp_path / "shop.duckdb"
    options: dict[str, Any] = {
        "slot": f"slot_{published.name}", "publications": ["p"], "target": f"duckdb:{file}",
        "keep_seconds": 0.05, "max_delay": 0.05, "interval": 0.05,
    }  # fmt: skip
    apply.sync(published.dsn, **options, until="now")
    backup = file.read_bytes()
    published.execute("INSERT INTO t VALUES (100, 'x')")
    apply.sync(published.dsn, **options, until="now")
    assert (100, "x") in rows(file)
    stop = threading.Event()
    thread = threading.Thread(target=apply.sync, args=[published.dsn],
                              kwargs={**options, "stop": stop})  # fmt: skip
    thread.start()
    try:
        segments = tmp_path / "shop.duckdb.segments"
        wait_until(lambda: not list(segments.glob("*.arrow")))
    finally:
        stop.set()
        thread.join()
    file.unlink()
    if kind == "restored":
        file.write_bytes(backup)
    with expect_error(code="changes_missing"):
        apply.sync(published.dsn, **options, until="now", on_error="stop")
    apply.sync(published.dsn, **options, until="now")
    assert rows(file) == held(published)
    once = 'SELECT count(*), count(DISTINCT (commit_lsn, seq)) FROM changes."public.t"'
    ((count, distinct),) = ask(file, once)
    assert count == distinct > 21


@pytest.mark.slow
def test_a_reader_in_the_same_process_is_waited_for(published: Any, tmp_path: Path) -> None:
    """DuckDB refuses it another way than one of another process."""
    file = tmp_path / "shop.duckdb"
    options: dict[str, Any] = {
        "slot": f"slot_{published.name}", "publications": ["p"], "target": f"duckdb:{file}",
        "until": "now",
    }  # fmt: skip
    apply.sync(published.dsn, **options)
    published.execute("INSERT INTO t VALUES (100, 'x')")
    found: list[apply.SyncProgress] = []
    thread = threading.Thread(target=lambda: found.append(apply.sync(published.dsn, **options)))
    with contextlib.closing(duckdb.connect(str(file), read_only=True)):
        thread.start()
        thread.join(1)
        assert thread.is_alive()
    thread.join(30)
    assert found[0].changes == 1
    assert rows(file) == held(published)


def test_the_lines_of_a_terminal() -> None:
    """The busiest tables, and the reasons of those that are not up to date, within its width."""
    tables = {f"public.t{number}": number * 1000 for number in range(1, 8)}
    progress = apply.SyncProgress(
        0x10, None, sum(tables.values()), 3, 0.5, tables, {"public.t1": "why it is"},
        ("public.later\n",), {"public.t7": 1.25},
    )  # fmt: skip
    console = Console(file=io.StringIO(), width=70, force_terminal=True, height=30, no_color=True)
    with Live(console=console, auto_refresh=False) as live:
        SyncLiveView(live).end(SyncFigures(progress, 1234, 0.5, None))
    assert isinstance(console.file, io.StringIO)
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue()).splitlines()
    assert max(map(len, lines)) <= 70
    assert lines[0].startswith("lag 1.2 kB, 0.5 s │ ")
    first = next(i for i, line in enumerate(lines) if line.startswith("  public.t7 "))
    shown = [line.split() for line in lines[first : first + 8]]
    assert [line[0] for line in shown[:5]] == [f"public.t{number}" for number in (7, 6, 5, 4, 3)]
    assert shown[0][1:3] == ["7,000", "changes"]
    assert shown[0][-2:] == ["1.25", "s"]
    assert lines[first + 5 : first + 8] == [
        "  and 2 tables more", "  public.t1: why it is",
        "  public.later\\n waits for its snapshot",
    ]  # fmt: skip


def test_a_line_of_the_log_has_the_busiest_tables() -> None:
    tables = {f"t{number}": number for number in range(1000)}
    progress = having()._replace(tables=tables, seconds=dict.fromkeys(tables, 0.5))
    told = SyncFigures(progress, None, None, None).as_dict()
    assert told["tables"] == {f"t{number}": number for number in range(990, 1000)}
    assert len(told["table_seconds"]) == 10


@pytest.mark.parametrize(
    ("stale", "asked", "waiting", "text"),
    [
        ("", "", "", ""),
        ("a", "a", "", "; 1 table not up to date: a; C takes a snapshot of it"),
        ("a", "", "", "; 1 table not up to date: a"),
        ("ba", "a", "", "; 2 tables not up to date: a, b; C takes a snapshot of 1 of them"),
        ("ab", "a", "b", "; 2 tables not up to date: a, b; C takes snapshots of them"),
        (
            "ab",
            "ab",
            "ced",
            "; 5 tables not up to date: a, b, c and 2 more; C takes snapshots of them",
        ),
    ],
)
def test_tables_that_are_not_up_to_date_are_named_at_the_end(
    stale: str, asked: str, waiting: str, text: str
) -> None:
    progress = having()._replace(
        stale=dict.fromkeys(stale, "why"), asked=tuple(asked), waiting=tuple(waiting)
    )
    assert behind_text(progress, "C") == text


def having(*tables: TableState) -> apply.SyncProgress:
    """How far a sync into DuckDB is that has tables."""
    names = {one.relation_id: one.stored_name for one in tables}
    return apply.SyncProgress(0, None, 0, 0, 0.0, {}, {}, table_states=tables, names=names)


def test_the_progress_of_many_tables_is_shown_in_one_line() -> None:
    tables = [TableState(number, "public", f"t{number}", "public.t") for number in range(1000)]
    progress = having(*tables)._replace(lsn=0x16, stale={"a": "why"}, paused={"b": "", "c": ""})
    assert repr(progress) == "<SyncProgress at 0/16: 1,000 tables, 2 paused, 1 stale>"


def test_what_happens_to_tables() -> None:
    column = StateColumn("a", "a", 23, -1, "int32", number=1)
    old = TableState(1, "public", "t", "public.t", lsn=5, columns=(column,))
    for new, texts in [
        (old, []),
        (old._replace(lsn=6), []),
        (old._replace(name="u", stored_name="public.u"), [
            "was public.t before", "is now public.u in the target, and was public.t before",
        ]),
        (old._replace(columns=(column, column._replace(name="b", number=2))),
         ["has a new column b"]),
        (old._replace(columns=(column._replace(name="b"),)),
         ["has column b, which was a before"]),
        (old._replace(columns=(column._replace(name="b", number=2),)),
         ["has a new column b", "has no column a any more"]),
        (old._replace(columns=(column._replace(form="int64"),)),
         ["now has column a as int64, before as int32"]),
        (old._replace(copy_lsn=0x10, columns=()), ["has its snapshot, as of 0/10"]),
        (old._replace(stale="why", columns=(column._replace(form="int64"),)), []),
    ]:  # fmt: skip
        assert [one.text for one in table_events(having(old), having(new))] == texts
    another = old._replace(relation_id=2, stored_name="public.t~2")
    made = list(table_events(having(), having(old, another)))
    assert [one.text for one in made] == ["is new", "is new; its name in the target is public.t~2"]


def test_a_copy_that_is_finished_meanwhile(tmp_path: Path) -> None:
    """The file that says a table waits is gone once it is copied."""
    assert snapshot_name(tmp_path, Snapshot(5, 1, True, "waiting", 1)) == "5"


@pytest.mark.slow
def test_a_report_of_what_ends_by_an_error(published: Any, run: Running, tmp_path: Path) -> None:
    file, report = tmp_path / "shop.duckdb", tmp_path / "report.html"
    given = arguments(published, file, "--until", "now", "--report", report)
    run(given)
    published.execute("ALTER TABLE t ADD day date", "INSERT INTO t VALUES (99, 'x', 'infinity')")
    run([*given, "--on-error", "stop"], code=1)
    (_, shown) = report.read_text().split("<body>")
    page = Page(shown).shown
    lsn = pf.format_lsn(_progress(file)[0]["lsn"])
    head, _, rest = page.partition("changes written")
    assert re.search(r"The sync ended by an error at 20\d\d-.* UTC: .*infinity", head)
    assert f"The tables are as of {lsn}" in head
    assert "The next call continues from there. The error does not pass by itself" in head
    assert f"as of {lsn}" in rest
    assert "the sync ended by an error" in rest
    assert "up to date" not in page
    assert "the policy infinity can be" in head
    assert "Policies(" not in page
    published.execute("UPDATE t SET day = NULL")
    run([*given, "--policy", "infinity=null", "--change-policies"])
    assert "All tables are kept up to date." in report.read_text()


def test_a_report_of_what_ends_before_it_begins(
    published: Any, run: Running, tmp_path: Path
) -> None:
    """A page of a call before, by which all was well, does not stay."""
    file, report = tmp_path / "shop.duckdb", tmp_path / "report.html"
    given = arguments(published, file, "--until", "now", "--report", report)
    run(given)
    run([*given, "--table", "t"], code=1)
    page = Page(report.read_text()).shown
    assert "The sync ended by an error" in page
    for part in (f"--table: {file} ", "[bad_option]"):
        assert part in page
    assert "It ended before it read the tables" in page
    assert "kept up to date" not in page


def test_a_report_of_what_a_fault_ends(
    published: Any, run: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, progress: Any, **__: Any) -> None:
        progress(apply.SyncProgress(16, None, 0, 0, 0.0, {}, {}, waiting=("public.t",)))
        raise KeyError("<x>")

    monkeypatch.setattr(sync_command, "sync", fails)
    report = tmp_path / "report.html"
    run(arguments(published, tmp_path / "shop.duckdb", "--report", report), code=1)
    page = Page(report.read_text()).shown
    assert "an internal error (KeyError('<x>')), see the log" in page
    assert "The tables are as of 0/10, and get no more changes. Not up to date: 1 table" in page


@pytest.mark.slow
def test_tables_that_are_all_misspelled(
    published: Any, run: Running, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """No slot is made that nobody would read; one pattern that matches is enough."""
    lake = tmp_path / "lake"
    given = arguments(published, tmp_path / "x", "--until", "now", "--table", "public.q")
    given[given.index("--to") + 1] = str(lake)
    published.execute("CREATE TABLE orders (id int PRIMARY KEY)")
    wrong = [*given, "--table", "public.ordres"]
    said = "public.orders?"
    run(wrong, code=1)
    assert said in run.text
    assert "'public.q'" in run.text
    assert "[no_table]" in run.text
    assert published.slots() == {}
    with expect_error(code="no_table"):
        apply.sync(
            published.dsn, target=lake, slot="s", publications=["p"], tables=["public.ordres"]
        )
    assert published.slots() == {}
    assert main(["sync", *wrong, "--dry-run"]) == 1
    assert said in capsys.readouterr().err

    run([*wrong, "--table", "t"])
    assert said in run.text
    # What the target has by then may have left.
    published.execute("DROP TABLE t")
    run([*wrong, "--table", "t"])
    # That a directory was begun for a target before this one is no reason to go on.
    new = [str(tmp_path / "lake2") if one == str(lake) else one for one in wrong]
    new += ["--dir", str(tmp_path / "lake.segments")]
    run(new, code=1)
    assert said in run.text
    assert main(["sync", *new, "--dry-run"]) == 1
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_a_table_is_wanted_before_any_is_published(
    database18: Any, run: Running, tmp_path: Path
) -> None:
    database18.execute("CREATE PUBLICATION p FOR ALL TABLES")
    file = tmp_path / "shop.duckdb"
    given = arguments(database18, file, "--until", "now", "--table", "t")
    run(given)
    assert "the publications have no table: no changes arrive until you add one" in run.text
    database18.execute("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    run(given)
    assert rows(file) == [(1,)]


@pytest.mark.parametrize("kind", ["delta", "duckdb"])
def test_a_refused_sync_leaves_no_directory(
    published: Any, run: Running, tmp_path: Path, kind: str
) -> None:
    """The slot is there already, and not the target's."""
    published.execute(
        f"SELECT pg_create_logical_replication_slot('slot_{published.name}', 'pgoutput')"
    )
    target = tmp_path / "lake9"
    given = arguments(published, target, "--until", "now")
    given[given.index("--to") + 1] = str(target) if kind == "delta" else f"duckdb:{target}"
    run(given, code=1)
    assert "[not_ours]" in run.text
    assert there(tmp_path) == {}
    if kind == "delta":  # one that a user has made stays
        target.mkdir()
        run(given, code=1)
        assert there(tmp_path) == {"lake9": "a directory"}
