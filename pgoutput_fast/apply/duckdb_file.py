"""Open a DuckDB file for which other processes may have to be waited for, within some memory."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import PgOutputError, RetryableError

if TYPE_CHECKING:
    from collections.abc import Callable

_log = logging.getLogger(__name__)

_CGROUPS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
SUFFIXES = (".duckdb", ".db", ".ddb")
"""A target whose name ends so is meant as a DuckDB file, also if no file is there yet."""
LEAST_MEMORY = 64 << 20
"""With less DuckDB can't write a window of the usual size."""
_LEAST_DEFAULT = 384 << 20
_MOST_MEMORY = 4 << 30
_PART = 4
"""A part of the memory of the machine, or of the container, that is DuckDB's by default."""
_PAUSE = 0.05
"""Seconds between two attempts to open the file."""
_SAID_AFTER = 1.0
_SAID_EVERY = 60.0
_BUSY = ("Conflicting lock", "already attached by", "different configuration")
_NO_MEMORY = ("failed to pin block", "failed to allocate")


def default_memory() -> int:
    """Return how many bytes DuckDB may take: a quarter of what there is, 384 MB to 4 GB."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for name in _CGROUPS:
        try:
            total = min(total, int(Path(name).read_text(encoding="ascii")))
        except (OSError, ValueError):  # there is no such group, or it has no limit
            continue
    return min(max(total // _PART, _LEAST_DEFAULT), _MOST_MEMORY)


def check_memory(memory: int | None) -> None:
    """Refuse a memory limit that is no number of bytes, or too small."""
    if memory is not None and type(memory) is not int:
        raise TypeError(f"duckdb_memory must be an int, not {type(memory).__name__}")
    if memory is not None and memory < LEAST_MEMORY:
        raise PgOutputError(
            f"it must be {LEAST_MEMORY} bytes at least, not {memory}",
            parameter="duckdb_memory",
            code="bad_option",
        )


def is_busy(error: Exception) -> bool:
    """Whether the file is open elsewhere: in another process, or in this one."""
    return any(sign in str(error) for sign in _BUSY)


def lacks_memory(error: Exception) -> bool:
    """Whether a statement failed as DuckDB has no more memory; a commit has no class for that."""
    return type(error).__name__ == "OutOfMemoryException" or any(
        sign in str(error) for sign in _NO_MEMORY
    )


class DuckdbFile:
    """A DuckDB file that other processes open too.

    Parameters
    ----------
    path : pathlib.Path
    memory : int, optional
        The bytes that DuckDB may take; by default `default_memory`.
    lock_timeout : float, optional
        Seconds to wait for another process that has the file open. By default there is no end.

    Attributes
    ----------
    on_wait : callable
        Called again and again while another process is waited for. An exception ends the waiting.
    """

    def __init__(
        self, path: Path, memory: int | None = None, lock_timeout: float | None = None
    ) -> None:
        self.path = path
        self.memory = default_memory() if memory is None else memory
        self._lock_timeout = lock_timeout
        self.on_wait: Callable[[], None] = lambda: None

    def connect(self, duckdb: Any, *, read_only: bool = False) -> Any:
        """Open the file, as soon as no other process has it open.

        Raises
        ------
        RetryableError
            Another process has had it open for `lock_timeout`.
        """
        begin, said = time.monotonic(), _SAID_AFTER
        while True:
            try:
                return duckdb.connect(
                    str(self.path),
                    read_only=read_only,
                    config={
                        "memory_limit": f"{self.memory}B",
                        "temp_directory": f"{self.path}.tmp",
                        "autoinstall_known_extensions": False,
                        "preserve_insertion_order": False,
                    },
                )
            except duckdb.Error as error:
                if not is_busy(error):
                    raise
                seconds = time.monotonic() - begin
                if self._lock_timeout is not None and seconds >= self._lock_timeout:
                    raise RetryableError(
                        f"another process has had {self.path} open for "
                        f"{self._lock_timeout:g} seconds ({error})",
                        code="in_use",
                        parameter="lock_timeout",
                        hint="Close the file there and call sync again, which goes on",
                        path=str(self.path),
                    ) from error
                if seconds >= said:
                    said = seconds + _SAID_EVERY
                    _log.warning(
                        "%s has been open in another process for %.0f s: windows wait until it is "
                        "closed there, and the capture goes on (%s)",
                        self.path, seconds, error,
                    )  # fmt: skip
                self.on_wait()
                time.sleep(_PAUSE)
