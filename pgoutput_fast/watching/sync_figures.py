"""The numbers that a running sync shows: how far its tables are behind, and how fast they come."""

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
    """What a sync shows at one moment."""

    progress: SyncProgress
    lag_bytes: int | None
    """Bytes of the server's log, or of the directory's, behind what the tables have; None if that
    is not known."""
    lag_seconds: float | None
    """The tables have all that was committed so long ago; 0.0 if all there is. None if that is not
    known."""
    capture: Figures | None
    """Those of the capture, if it is the command's own; None before it streams."""

    @property
    def commit_timestamp(self) -> float | None:
        """When the newest change in the tables was committed, in seconds since 1970."""
        commit_time = self.progress.commit_time
        return None if commit_time is None else commit_time / 1e6

    def as_dict(self) -> dict[str, Any]:
        """The numbers by the names that docs/reference/log-records.md gives them."""
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
                name: round(one, 3) for name, one in _busiest(progress.seconds).items()
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
    """The tables with the largest numbers: a line of the log is not as long as there are tables."""
    return dict(heapq.nlargest(_SHOWN, tables.items(), key=lambda one: one[1]))


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)


class SyncLag:
    """Finds out how far the tables are behind, from one progress to the next.

    Parameters
    ----------
    asks_server : bool
        Whether there is a server that says how far its log is; else the directory's end counts.
    """

    def __init__(self, *, asks_server: bool) -> None:
        self._asks_server = asks_server
        self._tables, self._capture = Lag(), Lag()

    def figures(self, progress: SyncProgress, position: ServerPosition | None) -> SyncFigures:
        """The numbers of this moment."""
        found = SyncFigures(progress, None, None, None)
        committed, captured = found.commit_timestamp, progress.capture
        if not self._asks_server:
            behind = max(0, progress.end_lsn - progress.lsn)
            seconds: float | None = 0.0
            if behind:
                seconds = None if committed is None else max(0.0, time.time() - committed)
            return found._replace(lag_bytes=behind, lag_seconds=seconds)
        lsn, capture = progress.lsn, None
        if captured is not None:
            capture = self._capture.figures(captured, position)
            if lsn >= captured.durable_lsn:
                # The tables have all that is in the directory, and more is there than that.
                lsn = max(lsn, captured.captured_lsn)
        behind_server = self._tables.behind(lsn, committed, position)
        return SyncFigures(progress, *behind_server, capture)


class SyncRates(NamedTuple):
    """Changes for each second, of all tables and of each that has some."""

    all: float
    tables: dict[str, float]


class SyncMeter:
    """Measures rates between one call and the next."""

    def __init__(self) -> None:
        self._time = time.monotonic()
        self._counts: dict[str, int] = {}

    def rates(self, progress: SyncProgress) -> SyncRates:
        """The rates since the last call, or since this object was made."""
        now = time.monotonic()
        seconds = max(now - self._time, 1e-3)
        tables = {
            name: (count - self._counts.get(name, 0)) / seconds
            for name, count in progress.tables.items()
            if count != self._counts.get(name, 0)
        }
        self._time, self._counts = now, dict(progress.tables)
        return SyncRates(sum(tables.values()), tables)
