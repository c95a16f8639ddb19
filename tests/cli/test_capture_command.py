"""`pgoutput-fast capture` beside a real server: what it lands, how it ends, what it shows."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import psycopg
import pytest
from support.commands.builds import ROOT
from support.commands.option_files import config
from support.commands.running_command import Running
from support.waiting import wait_until

import pgoutput_fast as pf
from pgoutput_fast.cli import _position, main
from pgoutput_fast.cli import capture as capture_command
from pgoutput_fast.options import byte_count
from pgoutput_fast.replication import connect, walsender
from pgoutput_fast.segments import SegmentReader, list_segments
from pgoutput_fast.watching.metrics import METRICS, PREFIX

if TYPE_CHECKING:
    pass


pytestmark = pytest.mark.server

COMMAND = [sys.executable, "-m", "pgoutput_fast", "capture"]
# What the page says of captures.
PAGE = (ROOT / "docs" / "reference" / "log-records.md").read_text().split("\n## ")[1]


@pytest.fixture
def published(database18: Any) -> Any:
    database18.execute(
        "CREATE TABLE t (id bigint PRIMARY KEY, body text)", "CREATE PUBLICATION p FOR TABLE t"
    )
    return database18


def arguments(database: Any, directory: Path, *more: object, dsn: str | None = None) -> list[str]:
    given = ["--dsn", dsn or database.dsn, "--slot", f"slot_{database.name}", "--publication", "p"]
    return [*given, "--out", str(directory), *map(str, more)]


def rows(directory: Path) -> dict[int, str | None]:
    """What the table holds after all that is in the directory, each change once."""
    found: dict[int, str | None] = {}
    for segment in list_segments(directory):
        decoder = pf.Decoder()
        with SegmentReader(segment.path) as reader:
            for batch in reader:
                for message in decoder.decode_many(batch["data"].to_pylist()):
                    if isinstance(message, pf.Insert):
                        assert message.new["id"] not in found
                        found[message.new["id"]] = message.new["body"]
                    elif isinstance(message, pf.Update):
                        found[message.new["id"]] = message.new["body"]
                    elif isinstance(message, pf.Delete):
                        del found[message.old["id"]]
    return found


def held(database: Any) -> dict[int, str | None]:
    """What the server's COPY says of the table."""
    with database.connect() as connection, connection.cursor().copy("COPY t TO STDOUT") as copy:
        copy.set_types(["int8", "text"])
        return dict(copy.rows())


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Running:
    return Running("capture", capsys, monkeypatch)


JSON = ["--log-format", "json"]


def test_until_now_has_what_the_server_has(published: Any, run: Running, tmp_path: Path) -> None:
    directory = tmp_path / "out"
    given = arguments(published, directory, "--until", "now")
    run(given)
    assert "made slot" in run.text
    published.execute(
        "INSERT INTO t SELECT g, 'x' || g FROM generate_series(1, 500) g",
        "UPDATE t SET body = NULL WHERE id % 7 = 0; DELETE FROM t WHERE id % 5 = 0",
        # It is on the server's disk some time after it is committed.
        "SET synchronous_commit = off; INSERT INTO t VALUES (1000, 'late')",
    )
    run([*given, *JSON, *config(compression="lz4", segment_bytes="4kB")])
    assert rows(directory) == held(published)
    assert 1000 in rows(directory)
    told = run.event("stop")
    assert told is not None
    assert (told["transactions"], told["changes"]) == (3, 500 + 71 + 100 + 1)
    # A segment may have several parts.
    ends = {segment.end_lsn for segment in list_segments(directory)}
    assert told["segments"] == len(ends) == 3
    ((confirmed,),) = published.execute(
        "SELECT confirmed_flush_lsn::text FROM pg_replication_slots"
        f" WHERE slot_name = 'slot_{published.name}'"
    )
    assert told["durable_lsn"] == confirmed
    # Nothing more, and an LSN that has come already.
    run([*given[:-1], confirmed, *JSON])
    assert run.event("stop")["changes"] == 0  # type: ignore[index]


def test_a_commit_that_waits_for_its_flush_is_waited_for(published: Any) -> None:
    """Where its end is on disk later than all that `synchronous_commit` has waited for."""
    from pgoutput_fast.connections import ConnectionParameters
    from pgoutput_fast.replication.server_position import end_of_commits

    with published.connect() as connection:
        connection.execute("SET synchronous_commit = off")
        connection.execute("INSERT INTO t VALUES (1, 'x')")
        (inserted,) = connection.execute("SELECT pg_current_wal_insert_lsn()::text").fetchone()
    end = end_of_commits(ConnectionParameters(published.dsn))
    ((flushed,),) = published.execute("SELECT pg_current_wal_flush_lsn()::text")
    # In a page's first bytes, the two differ by its header.
    assert pf.parse_lsn(inserted) - 40 <= end <= pf.parse_lsn(flushed)


def test_terminated_and_called_again(published: Any, tmp_path: Path) -> None:
    """A process, ended while the server writes; twice, the second time by Ctrl-C."""
    directory = tmp_path / "out"
    stop = threading.Event()

    def write() -> None:
        with published.connect() as connection:
            number = 0
            while not stop.wait(0.01):
                connection.execute("INSERT INTO t VALUES (%s, 'x')", [number])
                number += 1

    writer = threading.Thread(target=write)
    given = [*COMMAND, *arguments(published, directory, *config(max_delay=0.1))]
    try:
        for number, code, least in ((signal.SIGTERM, 0, 1), (signal.SIGINT, 130, 3)):
            process = subprocess.Popen(given, stderr=subprocess.PIPE, text=True)
            if number == signal.SIGTERM:
                wait_until(lambda: True in published.slots().values())
                writer.start()
            wait_until(lambda least=least: len(list(directory.glob("0*.arrow"))) >= least)  # type: ignore[misc]
            process.send_signal(number)
            _, errors = process.communicate(timeout=30)
            assert process.returncode == code, errors
            assert "the capture ends" in errors
            assert "Traceback" not in errors
    finally:
        stop.set()
        writer.join()
    assert main(["capture", *arguments(published, directory, "--until", "now")]) == 0
    assert rows(directory) == held(published) != {}


def test_refusals_and_their_exit_codes(
    published: Any,
    run: Running,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """75 where it may pass, 1 where it does not, 2 where the call is wrong."""
    monkeypatch.setattr(walsender, "_BUSY_WAITS", ())
    directory = tmp_path / "out"
    given = [*arguments(published, directory), *JSON, "--until", "now"]
    run(given)
    with connect(published.dsn, slot=f"slot_{published.name}", publications=["p"]):
        run(given, code=75)
    error = run.event("error")
    assert error is not None
    assert (error["level"], error["retryable"]) == ("error", True)
    assert "55006" in error["message"]
    assert run.event("stop") is None

    new = [*arguments(published, tmp_path / "new"), *JSON, "--until", "now"]
    run(new, code=1)
    error = run.event("error")
    assert error is not None
    assert (error["code"], "--adopt-slot" in error["message"]) == ("not_ours", True)
    run([*new, "--adopt-slot"])
    published.execute(f"SELECT pg_drop_replication_slot('slot_{published.name}')")
    none = [*arguments(published, tmp_path / "none"), *JSON, "--until", "now"]
    run([*none, *config(create_slot=False)], code=1)
    error = run.event("error")
    assert (error["retryable"], error["code"]) == (False, "no_slot")  # type: ignore[index]
    assert published.slots() == {}

    for more, parts in [
        (["--until", "yesterday"], ["'--until'", "'yesterday'"]),
        (config(segment_bytes="16MiB"), ["'--config'", " segment_bytes: ", "'16MiB'"]),
        (config(max_delay=-1), ["'--config'", " max_delay: ", " -1 "]),
        (["--dsn-file", "x"], ["--dsn ", "--dsn-file"]),
        (["host=/nonexistent", "password=s3cret"], ["--dsn"]),
    ]:
        assert main(["capture", *none, *more]) == 2
        errors = capsys.readouterr().err
        for part in parts:
            assert part in errors
        assert "s3cret" not in errors


def test_numbers_of_bytes_are_as_in_the_servers_settings(pg18: Any) -> None:
    setting = "SELECT setting::bigint FROM pg_settings WHERE name = 'work_mem'"
    with psycopg.connect(pg18.dsn(), autocommit=True) as connection:
        for given in ("100kB", "1.5MB", " 1 GB ", "1TB", "1.0005MB", "70000B", "2.GB"):
            connection.execute("SELECT set_config('work_mem', %s, false)", [given])
            ((kilobytes,),) = connection.execute(setting).fetchall()
            assert round(byte_count().from_text("", given) / 1024) == kilobytes
        for given in ("1mb", "1 KB", "1MiB", "", "x"):
            with pytest.raises(psycopg.errors.InvalidParameterValue):
                connection.execute("SELECT set_config('work_mem', %s, false)", [given])
            with pytest.raises(pf.PgOutputError):
                byte_count().from_text("", given)


def test_a_server_that_refuses_is_told_once(
    published: Any,
    run: Running,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the stream is refused, by its error alone; with advice."""
    directory = tmp_path / "out"
    given = arguments(published, directory, *JSON, dsn=f"{published.dsn} dbname=nowhere")
    run(given, code=1)
    assert [one["event"] for one in run.events()] == ["start", "error"]
    assert "[connection_refused]. " in run.event("error")["message"]  # type: ignore[index]

    # Where only the question is refused how far the log is, the capture goes on, and says so once.
    asked = 0

    def refuse(*_: object) -> None:
        nonlocal asked
        asked += 1
        raise pf.PgOutputError("refused")

    monkeypatch.setattr(_position, "_INTERVAL", 0.02)
    monkeypatch.setattr(_position, "ask_position", refuse)
    said = "refused; the lag is unknown until the server answers"

    def look() -> None:
        wait_until(lambda: said in run.text)
        before = asked
        wait_until(lambda: asked > before + 2)

    run([*arguments(published, directory), *JSON], look)
    assert [one["message"] for one in run.events() if one["level"] == "warning"] == [said]


def test_no_secret_is_shown(
    published: Any,
    run: Running,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither of a DSN on the command line, of which a warning tells, nor of one in a file."""
    out = tmp_path / "out"
    file = tmp_path / "dsn"
    for dsn, status, code in [
        ("host=/nonexistent password=s3cret", 75, "connection_lost"),
        ("postgresql://u:s3cret@%2Fnonexistent/d", 75, "connection_lost"),
        (f"{published.dsn} password=s3cret sslmode=nonsense", 1, "connection_refused"),
        ("postgresql://u:s3cret@x@y/z", 1, "bad_option"),
        ("host=x passwort=s3cret", 1, "bad_option"),
    ]:
        run([*arguments(published, out, dsn=dsn), *JSON], code=status)
        assert run.event("error")["code"] == code  # type: ignore[index]
        is_read = "x@y" not in dsn and "passwort" not in dsn
        assert ("--dsn-file" in run.text) == is_read
        assert "s3cret" not in run.text
        file.write_text(f"{dsn}\n")
        file.chmod(0o600)
        given = arguments(published, out)
        run(["--dsn-file", str(file), *given[2:], *JSON], code=status)
        assert run.event("error")["code"] == code  # type: ignore[index]
        assert "PGOUTPUT_FAST_DSN" not in run.text
        assert "s3cret" not in run.text

    # A fault of the program, whose traceback has the DSN in it.
    def fail(*_: object, **__: object) -> None:
        raise ValueError(f"can't go on with {published.dsn} password=s3cret")

    monkeypatch.setattr(capture_command, "capture", fail)
    for form in ("json", "text"):
        dsn = f"{published.dsn} password=s3cret"
        run([*arguments(published, out, dsn=dsn), "--log-format", form], code=1)
        assert "can't go on with" in run.text
        assert "password=***" in run.text
        assert "s3cret" not in run.text
        if form == "json":
            assert "ValueError" in run.event("error")["traceback"]  # type: ignore[index]
    assert not out.exists()


def test_a_dsn_in_a_file(published: Any, run: Running, tmp_path: Path) -> None:
    file, out = tmp_path / "dsn", tmp_path / "out"
    given = ["--dsn-file", str(file), *arguments(published, out)[2:], "--until", "now", *JSON]

    def refused() -> str:
        run(given, code=1)
        error = run.event("error")
        assert error is not None
        assert str(file) in error["message"]
        return f"{error['code']}: {error['message']}"

    assert refused().startswith("missing_path")
    file.touch(0o600)
    assert refused().startswith("bad_option: --dsn-file")
    file.write_bytes(b"password=\xff\xfe")
    assert refused().startswith("bad_option: --dsn-file")
    file.write_text(f"{published.dsn}\n")
    file.chmod(0o604)
    assert refused().endswith(f"chmod 600 {file}")
    assert not out.exists()
    file.chmod(0o600)
    run(given)
    assert out.exists()


@pytest.mark.slow
def test_lines_of_json(published: Any, run: Running, tmp_path: Path) -> None:
    """Each is an object with the keys that the page names; a lost connection is told."""

    def look() -> None:
        wait_until(lambda: run.event("streaming"))
        published.execute("INSERT INTO t VALUES (1, 'x')")
        wait_until(lambda: (run.event("progress") or {"changes": 0})["changes"] == 1)
        published.execute(
            "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots"
            " WHERE database = current_database()"
        )
        wait_until(lambda: run.event("reconnected"))
        wait_until(lambda: run.event("progress")["reconnects"] == 1)  # type: ignore[index]

    run([*arguments(published, tmp_path / "out"), *JSON, *config(log_interval=0.1)], look)
    names = [one["event"] for one in run.events()]
    order = ("start", "slot_made", "streaming", "retry", "reconnected", "stop")
    assert [name for name in names if name in order] == list(order)
    documented = table_of("event")
    assert set(names) <= documented.keys()
    described = table_of("key")
    for one in run.events():
        assert {"ts", "level", "event", "message", "logger"} <= one.keys() <= described.keys()
    progress = run.event("progress")
    assert progress is not None
    numbers = {key for key, events in described.items() if "progress" in events}
    assert progress.keys() - {"ts", "level", "event", "message", "logger"} == numbers
    assert progress["connected"] is True
    # Without JSON, the same in plain lines.
    run([*arguments(published, tmp_path / "out"), "--until", "now"])
    for line in run.text.splitlines():
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z (INFO|WARNING) .+", line)


def table_of(first: str) -> dict[str, str]:
    """The lines of the page's table whose first heading is this: name → the rest."""
    (table,) = re.findall(rf"^\| {first} \|.*\n\|[-|]+\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    found = {}
    for line in table.splitlines():
        names, _, rest = line.strip("| ").partition("|")
        found |= dict.fromkeys(re.findall(r"`(\w+)`", names), rest)
    return found


@pytest.mark.slow
def test_metrics_are_the_servers_facts(published: Any, run: Running, tmp_path: Path) -> None:
    """An open transaction that is streamed, its commit, and a connection that is lost."""
    published.execute(
        f"ALTER DATABASE {published.name} SET logical_decoding_work_mem = '64kB'",
    )
    slot = f"slot_{published.name}"
    found: dict[str, float] = {}
    labels: list[str] = []

    def scrape() -> dict[str, float]:
        url = run.event("metrics")["url"]  # type: ignore[index]
        with urllib.request.urlopen(url) as answer:
            lines = answer.read().decode().splitlines()
        found.clear()
        for line in lines:
            if line.startswith(PREFIX):
                name, _, value = line.rpartition(" ")
                found[name.removeprefix(PREFIX).partition("{")[0]] = float(value)
                labels.extend([name] if "{" in name else [])
        return found

    def look() -> None:
        wait_until(lambda: run.event("metrics"))
        wait_until(lambda: scrape()["up"])
        wait_until(lambda: scrape().get("lag_bytes") == 0)
        assert found["lag_seconds"] == 0
        with psycopg.connect(published.dsn) as connection:
            connection.execute("INSERT INTO t SELECT g, 'x' FROM generate_series(1, 4000) g")
            wait_until(lambda: scrape()["spilled_bytes"])
            assert found["open_transactions"] == 1
            assert found["transactions_total"] == found["changes_total"] == 0
        # What the lag is measured against may have been asked for before the commit: the lag alone
        # does not tell that the segment is complete.
        wait_until(lambda: scrape()["segments_total"])
        wait_until(lambda: scrape().get("lag_bytes") == 0)  # left out while it is not known
        assert (found["changes_total"], found["segments_total"]) == (4000, 1)
        assert found["open_transactions"] == found["spilled_bytes"] == 0
        ((confirmed, committed),) = published.execute(
            "SELECT confirmed_flush_lsn - '0/0', extract(epoch FROM now()) - 60"
            f" FROM pg_replication_slots WHERE slot_name = '{slot}'"
        )
        assert found["durable_lsn"] >= confirmed > 0
        assert found["last_commit_timestamp_seconds"] > committed
        published.execute(
            f"SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots"
            f" WHERE slot_name = '{slot}'"
        )
        wait_until(lambda: scrape()["reconnects_total"] == 1)

    more = ["--metrics-port", 0, *config(max_memory=0, max_delay=0.1), *JSON]
    run(arguments(published, tmp_path / "out", *more), look)
    # Nothing is uploaded.
    assert found.keys() >= {kind.name for kind in METRICS} - {"upload_lag_bytes"}
    assert "upload_lag_bytes" not in found
    assert found["bytes_total"] == run.event("stop")["bytes"] > 4000 * 10  # type: ignore[index]
    version = f'version="{pf.__version__}"'
    (label,) = set(labels)
    assert label == (f'{PREFIX}info{{database="{published.name}",slot="{slot}",{version}}}')


def test_a_port_that_is_taken_is_refused_first(
    published: Any, run: Running, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        given = arguments(published, tmp_path / "out", "--metrics-port", port, *JSON)
        run(given, code=1)
    assert "[io_failed]" in run.text
    assert [one["event"] for one in run.events()] == ["error"]
    assert not (tmp_path / "out").exists()
    assert published.slots() == {}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["path", "abstract"])
def test_a_service_manager_is_told(
    published: Any,
    run: Running,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        name = f"@pgoutput-fast-{os.getpid()}" if kind == "abstract" else str(tmp_path / "notify")
        manager.bind(name.replace("@", "\0") if kind == "abstract" else name)
        manager.settimeout(30)
        monkeypatch.setenv("NOTIFY_SOCKET", name)
        monkeypatch.setenv("WATCHDOG_USEC", "200000")
        monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
        told: list[str] = []

        def hear(expected: str) -> None:
            while not told or not told[-1].startswith(expected):
                told.append(manager.recv(4096).decode())

        def look() -> None:
            hear("READY=1")
            ((active,),) = published.execute(
                "SELECT active FROM pg_replication_slots WHERE database = current_database()"
            )
            assert active
            assert "WATCHDOG=1" not in told
            for _ in range(2):
                hear("WATCHDOG=1")
                told.append("")
            assert any(one.startswith("STATUS=lag ") for one in told)

        run([*arguments(published, tmp_path / "out"), *JSON], look)
        told.append("")
        hear("STOPPING=1")
        assert told[0] == "STATUS=connecting"


def test_the_watchdog_is_not_told_while_the_loop_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but `beat` sends it, and no more often than twice in its time."""
    from pgoutput_fast.cli import _systemd
    from pgoutput_fast.cli._systemd import Notifier

    clock = Mock(return_value=10.0)  # the machine has just been started
    monkeypatch.setattr(_systemd, "time", SimpleNamespace(monotonic=clock))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(f"\0pgoutput-fast-beat-{os.getpid()}")
        manager.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", f"@pgoutput-fast-beat-{os.getpid()}")
        monkeypatch.setenv("WATCHDOG_USEC", "3600000000")
        monkeypatch.delenv("WATCHDOG_PID", raising=False)
        with contextlib.closing(Notifier()) as notifier:
            for _ in range(3):
                notifier.beat()
                notifier.ready()
            assert [manager.recv(100), manager.recv(100)] == [b"WATCHDOG=1", b"READY=1"]
            with pytest.raises(BlockingIOError):
                manager.recv(100)
            for now, told in ((1809.0, False), (1810.0, True), (1811.0, False)):
                clock.return_value = now
                notifier.beat()
                if told:
                    assert manager.recv(100) == b"WATCHDOG=1"
                with pytest.raises(BlockingIOError):
                    manager.recv(100)
        # Another process's, and none.
        monkeypatch.setenv("WATCHDOG_PID", "1")
        with contextlib.closing(Notifier()) as other:
            other.beat()
            with pytest.raises(BlockingIOError):
                manager.recv(100)


@pytest.mark.slow
def test_a_terminal_has_a_live_line(published: Any, tmp_path: Path) -> None:
    primary, secondary = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "200"}
    process = subprocess.Popen(
        [*COMMAND, *arguments(published, tmp_path / "out")],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=secondary, env=environment,
    )  # fmt: skip
    os.close(secondary)
    shown = bytearray()

    def read(until: bytes) -> None:
        while until not in shown:
            shown.extend(os.read(primary, 4096))

    read(b"lag ")
    published.execute("INSERT INTO t VALUES (1, 'x')")
    read(b"1 segment")
    process.send_signal(signal.SIGTERM)
    while True:
        try:
            shown.extend(os.read(primary, 4096))
        except OSError:  # the terminal's other end is closed
            break
    os.close(primary)
    assert process.wait(timeout=30) == 0
    assert b"changes/s" in shown
    # The cursor is hidden and shown again; the line is left, and the next one begins.
    assert shown.count(b"\x1b[?25l") == shown.count(b"\x1b[?25h") == 1
    assert shown.index(b"\x1b[?25l") < shown.index(b"\x1b[?25h")
    assert b"the capture ends: 1 change of 1 transaction in 1 segment," in shown
