"""The numbers of a running sync: the lag of its tables, and rates."""

from __future__ import annotations

import heapq
import time
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ..lsn import format_lsn
from .figures import Figures, Lag

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..apply import SyncProgress
    from ..replication.server_position import ServerPosition

_Number = TypeVar("_Number", int, float)
_SHOWN = 10  # tables


class SyncFigures(NamedTuple):
    """The numbers of a sync at one moment."""

    progress: SyncProgress
    lag_bytes: int | None
    """Bytes of log that the tables lack, up to the end of the server's log or, without a server, of
    the change log. None if not known."""
    lag_seconds: float | None
    """Lag in seconds: the tables have all older commits. 0.0 if they have all. None: not known."""
    capture: Figures | None
    """The numbers of the capture, if this sync runs one; None before it streams."""

    @property
    def commit_timestamp(self) -> float | None:
        """Commit time of the newest change in the tables, in seconds since 1970."""
        commit_time = self.progress.commit_time
        return None if commit_time is None else commit_time / 1e6

    def as_dict(self) -> dict[str, Any]:
        """Return the numbers by their names in docs/reference/log-records.md."""
        progress, capture = self.progress, self.capture
        numbers: dict[str, Any] = {
            "lag_bytes": self.lag_bytes,
            "lag_seconds": _rounded(self.lag_seconds),
            "changes": progress.changes,
            "windows": progress.windows,
            "write_seconds": round(progress.write_seconds, 3),
            "change_seconds": round(progress.change_seconds, 3),
            "state_seconds": round(progress.state_seconds, 3),
            "lsn": format_lsn(progress.lsn),
            "tables": _busiest(progress.tables),
            "table_seconds": {
                name: round(seconds, 3) for name, seconds in _busiest(progress.seconds).items()
            },
            "stale": dict(progress.stale),
            "paused": dict(progress.paused),
            "waiting": list(progress.waiting),
            "left": list(progress.left),
        }
        if capture is not None:
            numbers["capture"] = capture.as_dict()
        return numbers


def _busiest(tables: Mapping[str, _Number]) -> dict[str, _Number]:
    """Return the tables with the largest numbers, so that a log line stays short."""
    return dict(heapq.nlargest(_SHOWN, tables.items(), key=lambda pair: pair[1]))


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)


class SyncLag:
    """Computes the lag of the tables from each progress of a sync.

    Parameters
    ----------
    asks_server : bool
        Whether a server says where its log ends. Otherwise the end of the change log counts.
    """

    def __init__(self, *, asks_server: bool) -> None:
        self._asks_server = asks_server
        self._tables, self._capture = Lag(), Lag()

    def figures(self, progress: SyncProgress, position: ServerPosition | None) -> SyncFigures:
        """Return the numbers of this moment."""
        figures = SyncFigures(progress, None, None, None)
        committed, captured = figures.commit_timestamp, progress.capture
        if not self._asks_server:
            behind = max(0, progress.end_lsn - progress.lsn)
            seconds: float | None = 0.0
            if behind:
                seconds = None if committed is None else max(0.0, time.time() - committed)
            return figures._replace(lag_bytes=behind, lag_seconds=seconds)
        lsn, capture = progress.lsn, None
        if captured is not None:
            capture = self._capture.figures(captured, position)
            if lsn >= captured.durable_lsn:
                # The tables have the whole change log. Up to `captured_lsn`, the server has nothing
                # more for the slot.
                lsn = max(lsn, captured.captured_lsn)
        behind_server = self._tables.behind(lsn, committed, position)
        return SyncFigures(progress, *behind_server, capture)


class SyncRates(NamedTuple):
    """Changes per second, of all tables and of each table that had changes."""

    all: float
    tables: dict[str, float]


class SyncMeter:
    """Measures rates between one call and the next."""

    def __init__(self) -> None:
        self._time = time.monotonic()
        self._counts: dict[str, int] = {}

    def rates(self, progress: SyncProgress) -> SyncRates:
        """Return the rates since the last call, or since this object was made."""
        now = time.monotonic()
        seconds = max(now - self._time, 1e-3)
        tables = {
            name: (count - self._counts.get(name, 0)) / seconds
            for name, count in progress.tables.items()
            if count != self._counts.get(name, 0)
        }
        self._time, self._counts = now, dict(progress.tables)
        return SyncRates(sum(tables.values()), tables)
