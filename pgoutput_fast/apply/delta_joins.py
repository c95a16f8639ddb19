"""What is done beside the windows, which go on meanwhile: small files of change tables are joined.

Change tables are only added to, so a join and an addition do not exclude each other. Rows of state
tables change, so their files are joined between two windows.
"""

from __future__ import annotations

import contextlib
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Joins:
    """Joins files of one table at a time, in a thread."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._job: Future[None] | None = None

    def begin(self, join: Callable[[], None]) -> bool:
        """Begin with a table; False: another one is not done.

        Raises
        ------
        PgOutputError
            As the one before had it.
        """
        if self._job is not None:
            if not self._job.done():
                return False
            self.wait()
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "pgoutput_fast-joins")
        self._job = self._thread.submit(join)
        return True

    def wait(self) -> None:
        """Wait for the one that has begun.

        Raises
        ------
        PgOutputError
            As it had it.
        """
        job, self._job = self._job, None
        if job is not None:
            job.result()

    def close(self) -> None:
        """Wait for the one that has begun, and begin no other. An error of it is not told."""
        with contextlib.suppress(Exception):
            self.wait()
        if self._thread is not None:
            self._thread.shutdown()
