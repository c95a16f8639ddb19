"""The embedded server: how it starts, what it is, and that nothing is left of it."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest
from support.expected_errors import expect_error
from support.postgres.servers import NewServer
from support.waiting import wait_until

import pgoutput_fast.embedded
from pgoutput_fast.embedded import EmbeddedServer, find_server_bindir

pytestmark = pytest.mark.server

IS_ROOT = os.geteuid() == 0
needs_root = pytest.mark.skipif(not IS_ROOT, reason="concerns root alone")


OWNER = """
import sys, time
from pgoutput_fast.embedded import EmbeddedServer
with EmbeddedServer({version}) as server:
    print(server.directory, server._keeper.pid, flush=True)
    time.sleep(60)
"""


def processes_of(directory: str) -> list[int]:
    """Processes that are running with the directory in their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if directory.encode() in command:
                found.append(int(entry.name))
    return found


def own_server(version: int = 18) -> tuple[subprocess.Popen[str], str, int]:
    """A process that holds a server, the server's directory, the keeper's process id."""
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER.format(version=version)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert owner.stdout is not None
    directory, keeper = owner.stdout.readline().split()
    assert processes_of(directory), "the test looks for the wrong thing"
    return owner, directory, int(keeper)


@pytest.mark.slow
@pytest.mark.parametrize("version", [16, 18])
def test_server_decodes_logically(version: int) -> None:
    with EmbeddedServer(version) as server:
        assert server.version == version
        with psycopg.connect(server.dsn(), autocommit=True) as connection:
            assert connection.info.server_version // 10000 == version
            for name, value in {
                "wal_level": "logical",
                "server_encoding": "UTF8",
                "TimeZone": "UTC",
                "listen_addresses": "",
                "max_prepared_transactions": "10",
            }.items():
                assert connection.execute(f"SHOW {name}").fetchone() == (value,)
            assert connection.execute(
                "SELECT datcollate FROM pg_database WHERE datname = 'postgres'"
            ).fetchone() == ("C",)
            connection.execute("SELECT pg_create_logical_replication_slot('s', 'pgoutput')")
        directory = server.directory
        assert directory.stat().st_mode & 0o777 == 0o700
    assert not directory.exists()
    assert not processes_of(str(directory))
    with expect_error(code="unfit_input"):
        server.dsn()


@pytest.mark.slow
def test_settings_are_given_and_can_be_altered() -> None:
    with (
        NewServer(18, {"wal_sender_timeout": "7s", "work_mem": 65, "jit": False}) as server,
        psycopg.connect(server.dsn(), autocommit=True) as connection,
    ):
        assert connection.execute("SHOW wal_sender_timeout").fetchone() == ("7s",)
        assert connection.execute("SHOW work_mem").fetchone() == ("65kB",)
        assert connection.execute("SHOW jit").fetchone() == ("off",)
        connection.execute("ALTER SYSTEM SET wal_sender_timeout = '9s'")
        connection.execute("SELECT pg_reload_conf()")
        wait_until(lambda: connection.execute("SHOW wal_sender_timeout").fetchone() == ("9s",))


@pytest.mark.slow
def test_quoted_setting_and_dsn_arrive_as_they_are() -> None:
    with NewServer(18, {"cluster_name": "it's \\ odd"}) as server:
        with psycopg.connect(server.dsn(), autocommit=True) as connection:
            assert connection.execute("SHOW cluster_name").fetchone() == ("it's \\ odd",)
            connection.execute('CREATE DATABASE "it\'s \\ odd"')
        with psycopg.connect(server.dsn("it's \\ odd")) as connection:
            assert connection.info.dbname == "it's \\ odd"
        with psycopg.connect(server.dsn(replication=True), autocommit=True) as connection:
            row = connection.execute("IDENTIFY_SYSTEM").fetchone()
            assert row is not None
            assert row[3] == "postgres"


def test_tcp_wants_the_password() -> None:
    with EmbeddedServer(18, tcp=True) as server:
        dsn = server.dsn(tcp=True)
        with psycopg.connect(dsn) as connection:
            assert connection.info.host == "127.0.0.1"
            password = connection.info.password
        with pytest.raises(psycopg.OperationalError):
            psycopg.connect(dsn, password="wrong")
        assert password not in repr(server)
        assert password not in server.dsn()


@pytest.mark.slow
def test_failed_start_says_why_and_leaves_nothing() -> None:
    server = EmbeddedServer(18, {"shared_buffers": "plenty"})
    with expect_error(code="process_failed") as caught:
        server.start()
    assert "shared_buffers" in str(caught.value)  # the end of its log
    assert not server.directory.exists()
    assert not processes_of(str(server.directory))
    assert "stopped" in repr(server)


def test_unknown_version_says_where_it_was_looked_for() -> None:
    with expect_error(code="missing_package") as caught:
        find_server_bindir(8)
    assert "/usr/lib/postgresql/8/bin" in str(caught.value)
    with expect_error(code="bad_option", path="/nonexistent"):
        EmbeddedServer(bindir="/nonexistent").start()


@pytest.mark.slow
def test_long_temporary_directory_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("d" * 120)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    with EmbeddedServer(18) as server, psycopg.connect(server.dsn()):
        assert long not in server.directory.parents
        assert list(long.iterdir()) == []


@needs_root
def test_root_runs_the_server_as_a_lesser_user() -> None:
    with EmbeddedServer(18) as server:
        owners = {
            pwd.getpwuid((Path("/proc") / str(pid)).stat().st_uid).pw_name
            for pid in processes_of(str(server.directory))
        }
    assert owners == {"nobody"}
    for name in ("root", "no-such-user"):
        with expect_error(parameter="user"):
            EmbeddedServer(18, user=name).start()


@pytest.mark.slow
@needs_root
def test_programs_that_the_lesser_user_cannot_reach_are_copied(tmp_path: Path) -> None:
    bindir = find_server_bindir(18)
    package = bindir.parent.parent
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    shutil.copytree(bindir.parent, private / package.name / bindir.parent.name)
    libraries = package.with_name(package.name + ".libs")
    if libraries.is_dir():
        shutil.copytree(libraries, private / libraries.name)
    for root, directories, files in os.walk(private):
        for name in directories + files:
            path = Path(root, name)
            if not path.is_symlink():
                path.chmod(path.stat().st_mode & 0o700)
    moved = private / package.name / bindir.parent.name / "bin"
    with EmbeddedServer(bindir=moved) as server, psycopg.connect(server.dsn()):
        assert (server.directory / "programs").is_dir()
        assert server.version == 18


@needs_root
def test_ordinary_user_needs_no_root() -> None:
    """In a process of another user, with any Python that this user can run."""
    nobody = pwd.getpwnam("nobody")
    project = Path(pgoutput_fast.embedded.__file__).parent.parent
    bindir = find_server_bindir(18)
    script = """
import os, socket, sys
sys.path.insert(0, sys.argv[1])
from pgoutput_fast.embedded import EmbeddedServer
if not os.access(sys.argv[2] + "/postgres", os.X_OK):
    sys.exit("out of reach")
if sys.argv[3] == "start":
    with EmbeddedServer(bindir=sys.argv[2]) as server, socket.socket(socket.AF_UNIX) as client:
        client.connect(f"{server.directory}/.s.PGSQL.{server.port}")
        print(server.version, server.directory.stat().st_uid)
"""

    def run(python: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["/bin/sh", "-c", '"$@"', "sh", python, "-B", "-I", "-c", script, *arguments],
            check=False,
            cwd="/",
            capture_output=True,
            text=True,
            user=nobody.pw_uid,
            group=nobody.pw_gid,
            extra_groups=[],
        )

    for python in (sys.executable, "/usr/bin/python3"):
        if run(python, str(project), str(bindir), "probe").returncode == 0:
            break
    else:
        pytest.skip("no other user can read this checkout and run a Python")
    done = run(python, str(project), str(bindir), "start")
    assert done.stderr == ""
    assert done.stdout.split() == ["18", str(nobody.pw_uid)]


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGKILL,
        *(pytest.param(n, marks=pytest.mark.slow) for n in (signal.SIGTERM, signal.SIGINT)),
    ],
    ids=lambda number: number.name,
)
def test_nothing_outlives_the_owner(number: signal.Signals) -> None:
    owner, directory, _ = own_server()
    owner.send_signal(number)
    owner.communicate(timeout=60)
    assert owner.returncode == -number
    wait_until(lambda: not processes_of(directory) and not Path(directory).exists())


@pytest.mark.slow
def test_interrupt_while_it_starts_leaves_nothing() -> None:
    script = """
import os, signal, sys, tempfile, threading
from pgoutput_fast.embedded import EmbeddedServer
tempfile.tempdir = sys.argv[1]
threading.Timer(float(sys.argv[2]), os.kill, (os.getpid(), signal.SIGINT)).start()
with EmbeddedServer(18):
    threading.Event().wait(60)
"""
    with tempfile.TemporaryDirectory(prefix="pf") as parent:
        Path(parent).chmod(0o755)
        for delay in ("0.01", "0.1", "0.3"):
            done = subprocess.run(
                [sys.executable, "-c", script, parent, delay],
                check=False,
                capture_output=True,
                text=True,
            )
            assert "KeyboardInterrupt" in done.stderr
            wait_until(lambda: not processes_of(parent) and not list(Path(parent).iterdir()))


def test_interrupt_when_its_directory_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    make = Path.mkdir

    def made(path: Path, mode: int = 0o777) -> None:
        make(path, mode)
        raise KeyboardInterrupt

    with tempfile.TemporaryDirectory(prefix="pf") as parent:
        monkeypatch.setattr(tempfile, "tempdir", parent)
        monkeypatch.setattr(Path, "mkdir", made)
        with pytest.raises(KeyboardInterrupt):
            EmbeddedServer(18).start()
        assert list(Path(parent).iterdir()) == []


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="a death signal is Linux's")
def test_server_does_not_outlive_its_keeper() -> None:
    owner, directory, keeper = own_server()
    os.kill(keeper, signal.SIGKILL)
    # The owner stays: it is the death signal that ends the server.
    wait_until(lambda: not processes_of(directory))
    owner.send_signal(signal.SIGINT)
    owner.communicate(timeout=60)
    assert not Path(directory).exists()


@pytest.mark.slow
def test_several_threads_may_stop_it_at_once() -> None:
    server = NewServer(18)
    server.start()
    with ThreadPoolExecutor(8) as threads:
        for ended in [threads.submit(server.stop) for _ in range(8)]:
            assert ended.result(60) is None
    assert not server.directory.exists()
    assert "database system is shut down" in server.log()


@pytest.mark.everyday("kill")
@pytest.mark.parametrize("mode", ["fast", "immediate", "kill"])
def test_it_is_restarted_with_its_data(mode: Any) -> None:
    with NewServer(18) as server:
        with psycopg.connect(server.dsn(), autocommit=True) as connection:
            connection.execute("CREATE TABLE t AS SELECT 1 AS id")
            server.restart(mode)
            with pytest.raises(psycopg.OperationalError):
                connection.execute("SELECT 1")
        with psycopg.connect(server.dsn(), autocommit=True) as connection:
            assert connection.execute("SELECT id FROM t").fetchone() == (1,)
        recovers = "database system was not properly shut down" in server.log()
        assert recovers is (mode != "fast")
        directory = str(server.directory)
    assert processes_of(directory) == []
    assert not Path(directory).exists()


@pytest.mark.slow
def test_what_can_not_be_restarted() -> None:
    server = NewServer(18)
    with expect_error(code="unfit_input"):
        server.restart()
    with server, expect_error(parameter="mode"):
        server.restart("slow")  # type: ignore[arg-type]
    with NewServer(18) as ended:
        os.kill(int((ended.directory / "data" / "postmaster.pid").read_text().split()[0]), 2)
        # It refuses connections and removes its file before that line.
        wait_until(lambda: "is shut down" in ended.log())
        with expect_error(code="process_failed") as caught:
            ended.restart()
        assert "is shut down" in str(caught.value)  # the end of its log
