"""Open a DuckDB file with a memory limit, and wait while another process has it open."""

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
"""Suffixes of a target's name that suggest a DuckDB file, even if the file does not exist."""
LEAST_MEMORY = 64 << 20
"""Smallest memory with which DuckDB can write a window of the usual size, in bytes."""
_LEAST_DEFAULT = 384 << 20
_MOST_MEMORY = 4 << 30
_PART = 4
"""By default, DuckDB gets one of this many parts of the machine's or container's memory."""
_PAUSE = 0.05
"""Seconds between two attempts to open the file."""
_SAID_AFTER = 1.0
_SAID_EVERY = 60.0
_BUSY = ("Conflicting lock", "already attached by", "different configuration")
_NO_MEMORY = ("failed to pin block", "failed to allocate")


def default_memory() -> int:
    """Return the default memory limit in bytes: a quarter of all memory, from 384 MB to 4 GB."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for name in _CGROUPS:
        try:
            total = min(total, int(Path(name).read_text(encoding="ascii")))
        except (OSError, ValueError):  # no such control group, or no limit
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
    """Whether opening the file failed because it is open already, here or in another process."""
    return any(sign in str(error) for sign in _BUSY)


def lacks_memory(error: Exception) -> bool:
    """Whether DuckDB ran out of memory; in a commit, only the error's text says so."""
    return type(error).__name__ == "OutOfMemoryException" or any(
        sign in str(error) for sign in _NO_MEMORY
    )


class DuckdbFile:
    """A DuckDB file that other processes open, too.

    Parameters
    ----------
    path : pathlib.Path
    memory : int, optional
        DuckDB's memory limit in bytes; by default `default_memory`.
    lock_timeout : float, optional
        Seconds to wait while another process has the file open. By default without limit.

    Attributes
    ----------
    on_wait : callable
        Called every 0.05 seconds during the wait. It ends the wait by an exception.
    """

    def __init__(
        self, path: Path, memory: int | None = None, lock_timeout: float | None = None
    ) -> None:
        self.path = path
        self.memory = default_memory() if memory is None else memory
        self._lock_timeout = lock_timeout
        self.on_wait: Callable[[], None] = lambda: None

    def connect(self, duckdb: Any, *, read_only: bool = False) -> Any:
        """Open the file as soon as no other process has it open.

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
                        hint="Close the file there, and start sync again: it continues",
                        path=str(self.path),
                    ) from error
                if seconds >= said:
                    said = seconds + _SAID_EVERY
                    _log.warning(
                        "%s has been open in another process for %.0f s: sync waits until it is "
                        "closed there, and the capture continues (%s)",
                        self.path, seconds, error,
                    )  # fmt: skip
                self.on_wait()
                time.sleep(_PAUSE)
