"""The main loop of a capture: write transactions to segments, and acknowledge durable ones."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Literal, NamedTuple

from ..errors import RetryableError
from ..segments.prepared import PreparedTransactions
from .copier import CopyProgress
from .waiter import IDLE_POLL

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

    from ..segments import SegmentWriter
    from ..transactions.transaction import Transaction, TransactionGroup
    from .link import Link
    from .upkeep import Upkeep

# If the server's log grows without changes for the slot, the capture stores the position in a file
# with an fsync. It does so after this many seconds or bytes of log, not for every keepalive.
_ADVANCE_INTERVAL = 10.0
_ADVANCE_BYTES = 16 << 20
# A server that asks for the capture's position may be waiting to shut down. The capture then makes
# everything durable at once, but at most once in this many seconds.
_ASKED_INTERVAL = 0.2
_IDLE_PROGRESS = 1.0  # seconds between two calls of `progress` while nothing comes

_log = logging.getLogger(__name__)


class CaptureProgress(NamedTuple):
    """How far a capture has come.

    Attributes
    ----------
    frames, transactions, bytes : int
        Frames, whole transactions, and bytes of frames that this call has received.
    received_lsn : int
        End LSN of the last transaction that was received. A later LSN if the server has said that
        it sends nothing more before that LSN.
    durable_lsn : int
        Everything before this LSN is in segments, and acknowledged.
    captured_lsn : int
        Everything that was committed before this LSN is in segments. This LSN is greater than
        `durable_lsn` if the server has said that it has nothing for the slot between the two.
    commit_time : int or None
        Commit time of the last transaction in segments, by the server's clock, in microseconds
        since 2000-01-01 UTC; None before this call has written one.
    changes, segments : int
        Insert, Update, Delete and Truncate messages that this call has received, and segments that
        it has completed.
    open_transactions : int
        Transactions that have not ended: streamed ones that came in part, and prepared ones.
    spilled_bytes : int
        Bytes of these transactions that are in temporary files, because of `max_memory`.
    connected : bool
        Whether the capture has a connection. False from a loss until the next connection.
    reconnects : int
        Connections that this call has made after a connection was lost.
    waiting_tables : int
        Tables that wait for their snapshots.
    copying : CopyProgress or None
        How far the running snapshots have come; None if there are none.
    uploaded_lsn : int or None
        Everything before this LSN is in object storage. 0 until the capture has reached the
        storage. None if the capture does not upload.
    """

    frames: int
    transactions: int
    bytes: int
    received_lsn: int
    durable_lsn: int
    captured_lsn: int
    commit_time: int | None = None
    changes: int = 0
    segments: int = 0
    open_transactions: int = 0
    spilled_bytes: int = 0
    connected: bool = False
    reconnects: int = 0
    waiting_tables: int = 0
    copying: CopyProgress | None = None
    uploaded_lsn: int | None = None


class Landing:
    """Writes delivered transactions to segments, and acknowledges them once they are durable.

    Parameters
    ----------
    link : Link
    writer : SegmentWriter
    upkeep : Upkeep
    max_memory, max_delay, unknown_prepared, progress
        See `capture`.
    """

    def __init__(
        self,
        link: Link,
        writer: SegmentWriter,
        upkeep: Upkeep,
        max_memory: int,
        max_delay: float,
        unknown_prepared: Literal["empty", "error"],
        progress: Callable[[CaptureProgress], None] | None,
    ) -> None:
        from ..transactions import Assembler
        from .delivery import Delivery  # loads NumPy, which receiving frames does not need

        self._link = link
        self._writer = writer
        self._upkeep = upkeep
        self._max_delay = max_delay
        self._tell = progress
        self._prepared = PreparedTransactions(writer.directory, writer.position)
        assembler = Assembler(
            max_memory,
            unknown_prepared=unknown_prepared,
            keeper=self._prepared,
            spill_directory=writer.directory,
        )
        for prepared in self._prepared.load(writer.directory):
            assembler.restore(prepared)
        assembler.on_relation = upkeep.see
        self._assembler = assembler
        self._delivery = Delivery(
            link,
            assembler,
            writer.position,
            on_idle=self._on_idle,
            on_loss=self._flush,
        )
        # These are counted as CaptureProgress describes.
        self._frames = self._transactions = self._bytes = 0
        # `_written`: end LSN and commit time of the last transaction that the writer got.
        # `_commit_time`: commit time of the last durable transaction.
        self._written: tuple[int, int | None] = (writer.position, None)
        self._commit_time: int | None = None
        self._until: int | None = None
        self._last_advance = self._reported_at = time.monotonic()

    def run(self, until_lsn: int | None, stop: threading.Event | None) -> CaptureProgress:
        """Write segments until `stop`, or until `until_lsn` is reached and no table waits."""
        self._report()
        while True:
            self._stream(until_lsn, stop)
            self._upkeep.wait(stop, self._report)
            if until_lsn is None or self._upkeep.copied_lsn <= until_lsn:
                self._upkeep.finish(stop, self._report)
                return self._progress()
            # Consumers read a snapshot only when the change log reaches its LSN.
            until_lsn = self._upkeep.copied_lsn

    def _stream(self, until_lsn: int | None, stop: threading.Event | None) -> None:
        """Write segments until `stop` is set or `until_lsn` is reached."""
        from .delivery import Until

        reported_frames, self._until = 0, until_lsn
        try:
            for arrival in self._delivery.arrivals(Until(until_lsn, None, stop), self._patience):
                if arrival is None:
                    if (
                        self._frames > reported_frames
                        or time.monotonic() - self._reported_at >= _IDLE_PROGRESS
                    ):
                        reported_frames = self._frames
                        self._report()
                else:
                    self._land(arrival)
                self._upkeep.tick()
                opened = self._writer.opened
                if opened is not None and time.monotonic() - opened >= self._delay(arrival):
                    self._flush()
        except RetryableError as error:
            _log.warning("the capture ends: %s", error)
            self._flush()  # so that the server need not send whole transactions again
            raise
        self._flush()
        if until_lsn is not None and self._delivery.idle_lsn >= until_lsn:
            self._acknowledge(self._writer.advance(until_lsn))
        if self._frames > reported_frames:
            self._report()

    def _patience(self) -> float:
        """Return how many seconds to wait for more frames: no longer than `max_delay` allows."""
        opened = self._writer.opened
        if opened is None:
            return IDLE_POLL
        return min(IDLE_POLL, max(0.0, opened + self._max_delay - time.monotonic()))

    def _land(self, arrival: Transaction | TransactionGroup) -> None:
        """Write transactions, after the snapshots that they need were requested."""
        self._follow_timeline()
        self._upkeep.order_copies(arrival.end_lsn)
        self._transactions += arrival.commits
        for run in arrival.runs():
            self._frames += len(run)
            self._bytes += run.size
            self._upkeep.record(run)
            self._acknowledge(self._writer.write_run(run))
            if time.monotonic() - self._reported_at >= _IDLE_PROGRESS:
                self._report()
        if arrival.commit_time is not None:
            self._written = arrival.end_lsn, arrival.commit_time

    def _delay(self, arrival: Transaction | TransactionGroup | None) -> float:
        """Return how many seconds a commit may wait until its segment is completed.

        `arrival` is the last delivery; None if nothing more is there at the moment.
        """
        if arrival is None and self._delivery.is_asked:
            return min(self._max_delay, _ASKED_INTERVAL)
        return self._max_delay

    def _follow_timeline(self) -> None:
        """Record the server's timeline in the segments that are written from here on."""
        self._acknowledge(self._writer.set_timeline(self._link.receiver.connection.timeline))

    def _report(self) -> None:
        self._reported_at = time.monotonic()
        if self._tell is not None:
            self._tell(self._progress())

    def _flush(self) -> None:
        """Complete the open segment, and acknowledge it."""
        self._acknowledge(self._writer.flush())

    def _on_idle(self, lsn: int) -> None:
        """Store the LSN that the server has reached without changes for the slot, now and then."""
        now = time.monotonic()
        position = self._writer.position
        interval = _ASKED_INTERVAL if self._delivery.is_asked else _ADVANCE_INTERVAL
        if self._link.receiver.acknowledged < position <= lsn:
            self._acknowledge(position)
        elif (
            now - self._last_advance > interval
            or lsn - position > _ADVANCE_BYTES
            or position < self._upkeep.copied_lsn
        ):
            self._follow_timeline()
            self._acknowledge(self._writer.advance(lsn))
            self._last_advance = now

    def _acknowledge(self, position: int | None) -> None:
        if position is not None:
            receiver = self._link.receiver
            receiver.acknowledge(position)
            self._note_commit_time()
            self._prepared.forget(position)

    def _note_commit_time(self) -> None:
        """Set the commit time of the last durable transaction."""
        end_lsn, commit_time = self._written
        if end_lsn <= self._writer.position:
            self._commit_time = commit_time

    def _progress(self) -> CaptureProgress:
        server_lsn = 0 if self._delivery.waits else self._delivery.server_lsn
        if self._until is not None:
            server_lsn = min(server_lsn, self._until)
        received = max(self._delivery.delivered, server_lsn)
        durable = self._writer.position
        self._note_commit_time()
        assembler = self._assembler
        return CaptureProgress(
            self._frames, self._transactions, self._bytes, received, durable,
            captured_lsn=received if self._writer.opened is None else durable,
            commit_time=self._commit_time, changes=self._writer.changes,
            segments=self._writer.completed, open_transactions=assembler.open_transactions,
            spilled_bytes=assembler.spilled_bytes, connected=self._link.lost is None,
            reconnects=self._link.reconnects, waiting_tables=self._upkeep.waiting,
            copying=self._upkeep.progress, uploaded_lsn=self._upkeep.uploaded_lsn,
        )  # fmt: skip
