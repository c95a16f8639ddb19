"""Join small files of change tables in a thread, while sync writes windows.

Sync only appends to change tables, so a join and an append do not conflict. Merges replace files of
state tables, so sync joins these between two windows.
"""

from __future__ import annotations

import contextlib
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class Joins:
    """A thread that joins the files of one table at a time."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._job: Future[None] | None = None

    def begin(self, join: Callable[[], None]) -> bool:
        """Begin to join a table's files; False if the join before is still running.

        Raises
        ------
        PgOutputError
            The join before has failed.
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
        """Wait for the running join.

        Raises
        ------
        PgOutputError
            The join has failed.
        """
        job, self._job = self._job, None
        if job is not None:
            job.result()

    def close(self) -> None:
        """Wait for the running join, ignore its error, and end the thread."""
        with contextlib.suppress(Exception):
            self.wait()
        if self._thread is not None:
            self._thread.shutdown()
