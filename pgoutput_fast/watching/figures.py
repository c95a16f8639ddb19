"""The numbers that a running capture shows: how far behind it is, and how fast."""

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
    """What a capture shows at one moment."""

    progress: CaptureProgress
    lag_bytes: int | None
    """Bytes of the server's log behind what is captured; None while the server does not tell."""
    lag_seconds: float | None
    """All that was committed so long ago is captured; 0.0 if all is. None if it is not known."""

    @property
    def commit_timestamp(self) -> float | None:
        """When the last durable transaction was committed, in seconds since 1970; None if none."""
        commit_time = self.progress.commit_time
        return None if commit_time is None else _EPOCH + commit_time / 1e6

    @property
    def copy_seconds_left(self) -> float | None:
        """About how long the copies of tables still take that are being made; None if none are."""
        copying = self.progress.copying
        left = None if copying is None else copying.seconds_left
        return None if left is None else round(left, 1)

    @property
    def upload_lag_bytes(self) -> int | None:
        """Bytes of the server's log that are durable and not in the copy; None if not known."""
        progress = self.progress
        if not progress.uploaded_lsn:
            return None
        return max(0, progress.durable_lsn - progress.uploaded_lsn)

    def as_dict(self) -> dict[str, Any]:
        """The numbers by the names that docs/reference/log-records.md gives them."""
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
    """How far a capture is behind the server."""

    def __init__(self) -> None:
        # All that was committed before is captured, by the server's clock; None if no such time is
        # known.
        self._since: float | None = None

    def figures(self, progress: CaptureProgress, position: ServerPosition | None) -> Figures:
        """The numbers of this moment.

        The commit time of the last transaction alone does not tell the lag: it may be hours ago on
        an idle server. But where everything was captured when the server told its position, nothing
        is missing from before that.
        """
        committed = Figures(progress, None, None).commit_timestamp
        return Figures(progress, *self.behind(progress.captured_lsn, committed, position))

    def behind(
        self, lsn: int, committed: float | None, position: ServerPosition | None
    ) -> tuple[int | None, float | None]:
        """Bytes of the server's log behind an LSN, and seconds; None where they are not known.

        Parameters
        ----------
        lsn : int
            What was committed before is there.
        committed : float or None
            When the last transaction was committed that is there, in seconds since 1970.
        position : Position or None
            Where the server was last.
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
    """Changes, transactions and bytes of frames for each second."""

    changes_per_second: float
    transactions_per_second: float
    bytes_per_second: float


class Meter:
    """Measures rates between one call and the next."""

    def __init__(self) -> None:
        self._time = time.monotonic()
        self._counts = (0, 0, 0)

    def rates(self, progress: CaptureProgress) -> Rates:
        """The rates since the last call, or since this object was made."""
        now = time.monotonic()
        counts = progress.changes, progress.transactions, progress.bytes
        seconds = max(now - self._time, 1e-3)
        pairs = zip(counts, self._counts, strict=True)
        rates = Rates(*((new - old) / seconds for new, old in pairs))
        self._time, self._counts = now, counts
        return rates
