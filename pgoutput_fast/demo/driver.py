"""Run the command `sync` in a process that can be killed and started again.

Each line of the command's log is a JSON object and reports the progress.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from pgoutput_fast.errors import PgOutputError
from pgoutput_fast.lsn import parse_lsn

from .workload import PUBLICATION, SLOT

if TYPE_CHECKING:
    from collections.abc import Callable

_MAX_CORES = 4
"""The largest number of cores for Spark; each takes a Python worker of some 200 MB."""
_INTERVAL = 0.5  # seconds between two lines with numbers
_END = 60.0  # seconds to wait until all processes have ended
_POLL = 0.05  # seconds


class Driver:
    """One run of the command.

    Parameters
    ----------
    dsn : str
    engine : {'local', 'spark'}
    target : str
        The target of the sync.
    directory : pathlib.Path
        Gets the change log in ``segments``, and ``sync.log``, to which each run appends.
    temporary : pathlib.Path
        For temporary files of the process and of Spark.
    on_line : callable
        Called with each line of the log, from another thread.
    """

    def __init__(
        self,
        dsn: str,
        engine: str,
        target: str,
        directory: Path,
        temporary: Path,
        on_line: Callable[[dict[str, Any]], None],
    ) -> None:
        self._on_line = on_line
        self._error = ""
        self._log = directory / "sync.log"
        self.lsn = 0
        """The tables have all commits before this LSN."""
        self.tables: set[str] = set()
        """The tables that are in the target."""
        self.waiting: list[str] = []
        """The tables that wait for their snapshots."""
        self.stale: dict[str, str] = {}
        """The tables that need new snapshots, and why."""
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "pgoutput_fast", "sync", "--engine", engine),
                *("--to", target, "--dir", str(directory / "segments")),
                *("--slot", SLOT, "--publication", PUBLICATION, "--log-format", "json"),
                *("--config", str(_options_file(directory)), "--interval", "0.5"),
                *(_settings(temporary) if engine == "spark" else ()),
            ],
            # While Java starts, PySpark has a temporary directory, which a kill would leave.
            env={**os.environ, "PGOUTPUT_FAST_DSN": dsn, "TMPDIR": str(temporary)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            # Signals to the session reach all of its processes. Ctrl-C reaches none of them.
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        lines = cast("IO[bytes]", self._process.stderr)
        with lines, self._log.open("ab") as log:
            for line in lines:
                log.write(line)
                log.flush()
                try:
                    record = json.loads(line)
                except ValueError:
                    continue
                if isinstance(record, dict):
                    self._take(record)

    def _take(self, record: dict[str, Any]) -> None:
        if record.get("event") == "error":
            self._error = str(record.get("message", ""))
        if isinstance(lsn := record.get("lsn"), str):
            self.lsn = parse_lsn(lsn)
        if isinstance(waiting := record.get("waiting"), list):
            self.waiting = waiting
        if isinstance(stale := record.get("stale"), dict):
            self.stale = stale
        if record.get("event") == "table":
            self.tables.add(str(record.get("table")))
        self._on_line(record)

    def has(self, lsn: int) -> bool:
        """Return whether all tables have the commits before an LSN."""
        return self.lsn >= lsn and not self.waiting and not self.stale

    def check(self) -> None:
        """Raise an error if the process has ended by itself.

        Raises
        ------
        PgOutputError
            The process has ended; the message contains the error from its log, if there is one.
        """
        code = self._process.poll()
        if code is not None:
            cause = self._error or f"it ended with exit code {code}"
            raise PgOutputError(
                f"the sync failed: {cause}; its log is {self._log}",
                code="process_failed",
                path=str(self._log),
            )

    def wait_until(self, is_so: Callable[[], bool], seconds: float, problem: str) -> None:
        """Wait until a condition holds.

        Raises
        ------
        PgOutputError
            The process has ended, or the wait takes longer than `seconds`.
        """
        end = time.monotonic() + seconds
        while not is_so():
            self.check()
            if time.monotonic() > end:
                raise PgOutputError(
                    f"{problem} within {seconds:.0f} seconds; the sync's log is {self._log}",
                    code="timed_out",
                    path=str(self._log),
                )
            time.sleep(_POLL)

    def kill(self) -> None:
        """Kill the process and Spark's JVM as ``kill -9`` does; Spark's workers then end, too."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._join()

    def stop(self) -> None:
        """Let the process end after the window that it is writing.

        Raises
        ------
        PgOutputError
            The process does not end, or ends with an error.
        """
        self._signal(signal.SIGTERM, group=False)
        try:
            code = self._process.wait(_END)
        except subprocess.TimeoutExpired:
            self.kill()
            raise PgOutputError(
                f"the sync did not end within {_END:.0f} seconds; its log is {self._log}",
                code="timed_out",
                path=str(self._log),
            ) from None
        if code:
            self._reader.join(_END)
            cause = self._error or f"exit code {code}"
            raise PgOutputError(
                f"the sync ended with an error: {cause}; its log is {self._log}",
                code="process_failed",
                path=str(self._log),
            )
        self._join()

    def _signal(self, number: signal.Signals, *, group: bool = True) -> None:
        try:
            (os.killpg if group else os.kill)(self._process.pid, number)
        except ProcessLookupError:
            pass  # the process has ended by itself

    def _join(self) -> None:
        """Wait until all processes of the session have ended; workers end after Spark's JVM."""
        self._reader.join(_END)
        end = time.monotonic() + _END
        while _has_processes(self._process.pid) and time.monotonic() < end:
            time.sleep(_POLL)


def _has_processes(session: int) -> bool:
    """Return whether a session has processes; without /proc, False."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # the process has ended
        if int(fields[3]) == session and fields[0] != "Z":
            return True
    return False


def _options_file(directory: Path) -> Path:
    path = directory / "sync.toml"
    path.write_text(f"log_interval = {_INTERVAL}\nmax_delay = 0.2\n")
    return path


def _settings(temporary: Path) -> list[str]:
    """Return Spark's settings as options of the command."""
    settings = {
        "spark.driver.memory": "1g",
        "spark.local.dir": str(temporary),
        "spark.sql.warehouse.dir": str(temporary / "warehouse"),
        # The JVM lives for a minute only. Its second compiler would take most of the CPU time.
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC "
        f"-XX:-UsePerfData -Djava.io.tmpdir={temporary}",
    }
    master = f"local[{min(os.cpu_count() or 1, _MAX_CORES)}]"
    conf = [part for name, value in settings.items() for part in ("--conf", f"{name}={value}")]
    return ["--master", master, *conf]


def reason(text: str) -> str:
    """Return the last line of a program's output that is not empty, for an error."""
    lines = [line.strip() for line in re.split(r"[\r\n]+", text) if line.strip()]
    return lines[-1] if lines else "it said nothing"
