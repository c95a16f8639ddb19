"""The numbers of a running capture: lag and rates."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

from ..lsn import format_lsn
from ..values import EPOCH_UTC

if TYPE_CHECKING:
    from ..replication import CaptureProgress
    from ..replication.server_position import ServerPosition

_EPOCH = EPOCH_UTC.timestamp()


class Figures(NamedTuple):
    """The numbers of a capture at one moment."""

    progress: CaptureProgress
    lag_bytes: int | None
    """Bytes of the server's log that are not captured yet; None without a recent answer."""
    lag_seconds: float | None
    """Lag in seconds: all older commits are captured. 0.0 if all are; None if it is not known."""

    @property
    def commit_timestamp(self) -> float | None:
        """Commit time of the last durable transaction, in seconds since 1970; None if none."""
        commit_time = self.progress.commit_time
        return None if commit_time is None else _EPOCH + commit_time / 1e6

    @property
    def copy_seconds_left(self) -> float | None:
        """Estimated seconds until the running snapshots are complete; None if none runs."""
        copying = self.progress.copying
        left = None if copying is None else copying.seconds_left
        return None if left is None else round(left, 1)

    @property
    def upload_lag_bytes(self) -> int | None:
        """Bytes of log that are durable here, but not in object storage; None if not known."""
        progress = self.progress
        if not progress.uploaded_lsn:
            return None
        return max(0, progress.durable_lsn - progress.uploaded_lsn)

    def as_dict(self) -> dict[str, Any]:
        """Return the numbers by their names in docs/reference/log-records.md."""
        progress = self.progress
        seconds = self.lag_seconds
        return {
            "lag_bytes": self.lag_bytes,
            "lag_seconds": None if seconds is None else round(seconds, 3),
            "changes": progress.changes,
            "transactions": progress.transactions,
            "bytes": progress.bytes,
            "segments": progress.segments,
            "open_transactions": progress.open_transactions,
            "spilled_bytes": progress.spilled_bytes,
            "connected": progress.connected,
            "reconnects": progress.reconnects,
            "waiting_tables": progress.waiting_tables,
            "copied_rows": None if progress.copying is None else progress.copying.rows,
            "copy_seconds_left": self.copy_seconds_left,
            "upload_lag_bytes": self.upload_lag_bytes,
            "received_lsn": format_lsn(progress.received_lsn),
            "durable_lsn": format_lsn(progress.durable_lsn),
        }


class Lag:
    """Computes the lag behind the server."""

    def __init__(self) -> None:
        # Everything that was committed before this time, on the server's clock, is captured. None
        # if no such time is known.
        self._since: float | None = None

    def figures(self, progress: CaptureProgress, position: ServerPosition | None) -> Figures:
        """Return the numbers of this moment.

        The commit time of the last transaction alone does not give the lag: on an idle server, it
        may be hours old. So the server's answers count too: if everything before the answered LSN
        is captured, then everything that was committed before the answer is captured.
        """
        committed = Figures(progress, None, None).commit_timestamp
        return Figures(progress, *self.behind(progress.captured_lsn, committed, position))

    def behind(
        self, lsn: int, committed: float | None, position: ServerPosition | None
    ) -> tuple[int | None, float | None]:
        """Return the lag behind the server, in bytes and in seconds; None if not known.

        Parameters
        ----------
        lsn : int
            Everything that was committed before this LSN has arrived.
        committed : float or None
            Commit time of the last transaction that has arrived, in seconds since 1970.
        position : ServerPosition or None
            The server's last answer.
        """
        if committed is not None:
            self._note(committed)
        if position is None:
            return None, None
        behind = max(0, position.lsn - lsn)
        if not behind:
            self._note(position.server_time)
            if position.is_fresh:
                return 0, 0.0
        seconds = None if self._since is None else max(0.0, position.now - self._since)
        return behind if position.is_fresh else None, seconds

    def _note(self, moment: float) -> None:
        self._since = moment if self._since is None else max(self._since, moment)


class Rates(NamedTuple):
    """Changes, transactions, and bytes of frames per second."""

    changes_per_second: float
    transactions_per_second: float
    bytes_per_second: float


class Meter:
    """Measures rates between one call and the next."""

    def __init__(self) -> None:
        self._time = time.monotonic()
        self._counts = (0, 0, 0)

    def rates(self, progress: CaptureProgress) -> Rates:
        """Return the rates since the last call, or since this object was made."""
        now = time.monotonic()
        counts = progress.changes, progress.transactions, progress.bytes
        seconds = max(now - self._time, 1e-3)
        pairs = zip(counts, self._counts, strict=True)
        rates = Rates(*((new - old) / seconds for new, old in pairs))
        self._time, self._counts = now, counts
        return rates
