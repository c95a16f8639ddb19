"""Write a slot's changes to a directory of segments, and acknowledge them once they are durable."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from ..connections import ConnectionParameters, RetryableError
from ..directory.retention import Keep
from ..errors import PgOutputError
from ..lsn import format_lsn
from ..segments import SegmentWriter
from ..segments.format import check_options
from ..segments.prepared import PreparedTransactions
from .attempt import unless_stopped
from .beginning import Begun, begin_directory
from .client import check_assembling
from .copier import CopyTarget
from .link import Link, first_connection
from .membership import Members, read_members
from .receiver import Receiver
from .source import Source, Started
from .stream_options import Protocol, Streaming, StreamOptions, check_seconds
from .upkeep import Upkeep, UpkeepOptions

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Sequence

    from ..transactions.transaction import Transaction, TransactionGroup

# If the server's log moves on without changes for the slot, the position is stored in a file that
# is synced: not for every keepalive, but after this many seconds, or this many bytes of the log.
_ADVANCE_INTERVAL = 10.0
_ADVANCE_BYTES = 16 << 20
# A server that asks how far the capture is may wait for that to shut down. Then what is there is
# made durable at once, but not more often than once in so many seconds.
_ASKED_INTERVAL = 0.2
_POLL = 0.1  # seconds within which an order to end is heard while nothing comes
_IDLE_PROGRESS = 1.0  # seconds between two calls of `progress` while nothing comes

_log = logging.getLogger(__name__)


class CaptureProgress(NamedTuple):
    """How far a capture has come.

    Attributes
    ----------
    frames, transactions, bytes : int
        Frames that this run has taken, whole transactions, and bytes of the frames.
    received_lsn : int
        The end of the last transaction that was taken; or a later LSN, before which the server has
        said that nothing more comes.
    durable_lsn : int
        Everything before this LSN is in segments, and acknowledged.
    captured_lsn : int
        Everything that was committed before this LSN is in segments. It is beyond `durable_lsn` if
        the server has said that between the two there is nothing for the slot.
    commit_time : int or None
        When the last transaction was committed that is in segments, by the server's clock, in
        microseconds since 2000-01-01 UTC; None before this run has written one.
    changes, segments : int
        Insert, Update, Delete and Truncate messages that this run has taken; segments it has
        completed.
    open_transactions : int
        Transactions of which something came and that have not ended; prepared ones are among them.
    spilled_bytes : int
        Bytes of the files to which their frames were moved, as `max_memory` says.
    connected : bool
        Whether there is a connection that is not known to be lost.
    reconnects : int
        Connections that this run has made after one was lost.
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


def capture(
    dsn: str | None = None,
    *,
    slot: str,
    publications: Sequence[str],
    directory: str | os.PathLike[str],
    create_slot: bool = False,
    adopt_slot: bool = False,
    until_lsn: int | None = None,
    protocol: Protocol = "auto",
    streaming: Streaming = True,
    two_phase: bool | None = False,
    unknown_prepared: Literal["empty", "error"] | None = None,
    binary: bool = False,
    messages: bool = False,
    origin: str | None = None,
    segment_bytes: int = 16 << 20,
    max_delay: float = 1.0,
    compression: Literal["lz4", "zstd"] | None = None,
    max_memory: int = 64 << 20,
    silence_timeout: float | None = None,
    retry_for: float | None = None,
    snapshot: Literal["never", "initial", "only"] = "never",
    connections: int = 2,
    merge: bool = True,
    grace: float = 60.0,
    keep_seconds: float | None = None,
    keep_bytes: int | None = None,
    silent_after: float | None = None,
    give_up: bool = False,
    min_free: int = 256 << 20,
    progress: Callable[[CaptureProgress], None] | None = None,
    stop: threading.Event | None = None,
    **keywords: object,
) -> CaptureProgress:
    """Write a slot's changes to segments, from where the directory ends.

    It goes on until `until_lsn` or `stop`, or until Ctrl-C or an error. A connection that is lost,
    as when the server restarts, is made again. A segment ends with the first commit after
    `segment_bytes`, or when its oldest commit is `max_delay` old. Every version of the protocol
    lands in the form of version 1. However a call ends, even by a kill, the next one goes on, and
    no change is lost or written twice.

    Parameters
    ----------
    dsn : str, optional
        Connection string of libpq, or URL; by default as libpq's variables say.
    slot : str
    publications : list or tuple of str
        Names of publications, without quotes.
    directory : path
        The directory of segments (`pgoutput_fast.segments`), which is made if it does not exist.
    create_slot : bool
        Whether to make the slot if it does not exist. It is made only for a directory in which no
        capture has begun.
    adopt_slot : bool
        Whether a slot that exists already, for example one that was made with SQL, may begin a new
        directory. Otherwise it is refused: if another directory has what the slot brought so far,
        it would lack what comes into this one.
    until_lsn : int
        Capture exactly what was committed before this LSN, then end. `pg_current_wal_lsn()` gives
        the LSN for all that is committed, and on the server's disk, by now. A transaction is before
        it if its commit record begins before it, a non-transactional message if its record ends
        there or before. What comes after stays in the slot.
    protocol, streaming, two_phase, unknown_prepared, origin
        As of :func:`connect`. Prepared transactions land when they are committed; until then they
        are kept in the subdirectory ``prepared``.
    binary : bool
        Whether values come in binary format, if their types have one.
    messages : bool
        Whether logical messages (`pg_logical_emit_message`) come too.
    segment_bytes : int
        A segment ends with the first commit after so many bytes. A transaction that is larger is
        cut into parts of half as many again.
    max_delay : float
        Seconds after which a commit is durable in a segment, and acknowledged, busy or not.
    compression : {None, "lz4", "zstd"}
        How segments are compressed.
    max_memory : int
        Bytes of all transactions that have not ended. Beyond them, the largest goes to a file in
        `directory` that has no name.
    silence_timeout, retry_for : float
        As of :func:`connect`.
    snapshot : {"never", "initial", "only"}
        "initial": the rows that were there when the slot was made come too, and those of tables
        that join the publications later: see docs/segments.md. "only": the capture ends when the
        tables are copied, and a later one takes what came since. "never": no table is copied but
        on request.
    connections : int
        So many read tables that are copied, beside the one of the stream.
    merge : bool
        Whether small segments are merged, up to `segment_bytes`.
    grace : float
        Seconds for which a file stays after it was merged into another one, for readers that have
        listed the directory before.
    keep_seconds, keep_bytes : float, int
        Segments are deleted that every consumer of the directory has read, once they are so old, or
        the directory has more bytes. By default nothing is deleted.
    silent_after : float
        Consumers are reported that do not move for so many seconds.
    give_up : bool
        Whether such a consumer is removed, so that nothing is kept for it.
    min_free : int
        The capture ends with an error when the disk has fewer bytes free.
    progress : callable
        Called with a `CaptureProgress` after each batch of frames that came, and each second
        while none come, or while a large transaction is written.
    stop : threading.Event
        Ends the capture within some tenths of a second after it is set by another thread. Whole
        transactions that were received are made durable before.
    **keywords
        Parameters of libpq by name, over those of `dsn`.

    Returns
    -------
    CaptureProgress
        The numbers at the end.

    Raises
    ------
    RetryableError
        The slot is in use, or the server can't be reached now; or a connection was lost; and it was
        not made within `retry_for`, or before `stop` was set: call again to go on.
    PgOutputError
        The server refuses; there is no such publication, or no such slot; the slot is beyond the
        end of the directory; no capture has begun in the directory, and the slot is there already;
        the directory is another slot's or another capture's, or damaged; the server's log goes
        another way than when the directory was written; the disk refuses; or pyarrow or NumPy is
        not installed. No message has the password.
    TypeError
        An argument has a wrong type. Nothing was made.
    KeyboardInterrupt
        Ctrl-C was pressed. What was acknowledged is durable, and the slot has the rest: call again
        to go on.
    """
    _check_arguments(
        until_lsn,
        progress,
        stop,
        directory=(directory, (str, os.PathLike), "a path"),
        create_slot=(create_slot, bool, "a bool"),
        adopt_slot=(adopt_slot, bool, "a bool"),
        segment_bytes=(segment_bytes, int, "an int, of bytes"),
        max_delay=(max_delay, (int, float), "a number of seconds"),
        connections=(connections, int, "an int"),
        merge=(merge, bool, "a bool"),
        give_up=(give_up, bool, "a bool"),
        min_free=(min_free, int, "an int, of bytes"),
    )
    if not os.fspath(directory):
        raise PgOutputError("directory is empty; '.' is the current directory")
    check_options(segment_bytes, compression)
    check_assembling({"max_memory": max_memory}, unknown_prepared)
    if not max_delay >= 0:
        raise PgOutputError(f"max_delay={max_delay}: expected a number of seconds")
    check_seconds(
        silence_timeout=silence_timeout, retry_for=retry_for, grace=grace,
        keep_seconds=keep_seconds, silent_after=silent_after,
    )  # fmt: skip
    if snapshot not in ("never", "initial", "only"):
        raise PgOutputError(f"snapshot={snapshot!r}: expected 'never', 'initial' or 'only'")
    if connections < 1:
        raise PgOutputError(f"connections={connections}: at least one has to read")
    copies = snapshot != "never"
    upkeep_options = UpkeepOptions(
        copies, Keep(keep_seconds, keep_bytes), segment_bytes if merge else 0, grace, silent_after,
        give_up, min_free,
    )  # fmt: skip
    options = StreamOptions(
        publications, protocol=protocol, streaming=streaming, two_phase=two_phase, binary=binary,
        messages=messages, origin=origin,
    )  # fmt: skip
    parameters = ConnectionParameters(dsn, keywords)
    writing = {"segment_bytes": segment_bytes, "compression": compression}

    def begin() -> tuple[Members, Begun]:
        # Asked before the slot is made: what changes later is seen as a change.
        members = read_members(parameters, publications) if copies else {}
        return members, begin_directory(
            parameters, slot, options, Path(directory), writing, create_slot=create_slot,
            adopt_slot=adopt_slot, snapshot=copies, stop=stop,
        )  # fmt: skip

    members, begun = first_connection(begin, retry_for, stop)
    with contextlib.ExitStack() as held:
        writer = held.enter_context(begun.writer)
        copying = CopyTarget(
            parameters, begun.metadata, writer.directory, connections, writer.ipc_options
        )
        upkeep = held.enter_context(_begin_upkeep(begun, members, copying, upkeep_options))
        if snapshot == "only":
            upkeep.wait(stop)
            return CaptureProgress(0, 0, 0, writer.position, writer.position, writer.position)
        source = Source(parameters, slot, options)

        def start() -> Started:
            return unless_stopped(
                lambda: source.start(writer.position, writer.timeline or None),
                lambda made: made.connection.close(),
                stop,
            )

        started = first_connection(start, retry_for, stop)
        # Where the server begins before the directory's end, nothing beyond is acknowledged until
        # the stream has come there: a PREPARE in between has its end behind it.
        receiver = Receiver(started.connection, started.confirmed, silence_timeout)
        link = Link(
            receiver, started.protocol, source, silence_timeout=silence_timeout, retry_for=retry_for
        )
        try:
            unknown = unknown_prepared or ("empty" if writer.made_slot else "error")
            landing = _Landing(link, writer, upkeep, max_memory, max_delay, unknown, progress)
            done = landing.run(until_lsn, stop)
        finally:
            link.close()
        upkeep.wait(stop)
        return done


def _begin_upkeep(
    begun: Begun, members: Members, source: CopyTarget, options: UpkeepOptions
) -> Upkeep:
    """Begin what is done beside the stream; a slot that was made with a snapshot gives it."""
    if begun.made is None or begun.connection is None:
        return Upkeep(begun.writer, source, options)
    with begun.connection:
        opened = source.open(None, None, begun.made)
    return Upkeep(begun.writer, source, options, opened, members)


def _check_arguments(
    until_lsn: object,
    progress: object,
    stop: object,
    **arguments: tuple[object, type | tuple[type, ...], str],
) -> None:
    """Refuse arguments of other types before anything is made.

    Raises
    ------
    PgOutputError
        `until_lsn` is out of an LSN's range.
    TypeError
        An argument is of another type. In `arguments`, each has its value, the types that it may be
        of, and what errors call these.
    """
    if until_lsn is not None:
        what = "an int, as pgoutput_fast.parse_lsn makes it of '16/B374D848'"
        arguments["until_lsn"] = (until_lsn, int, what)
    for name, (value, types, what) in arguments.items():
        # In Python a bool is an int too, but none is meant here.
        if not isinstance(value, types) or (isinstance(value, bool) and types is not bool):
            raise TypeError(f"{name} must be {what}, not {type(value).__name__}")
    if isinstance(until_lsn, int):
        format_lsn(until_lsn)  # refuses what is out of range
    if progress is not None and not callable(progress):
        raise TypeError(f"progress must be callable, not {type(progress).__name__}")
    if stop is not None and not callable(getattr(stop, "is_set", None)):
        raise TypeError(f"stop must be a threading.Event, not {type(stop).__name__}")


class _Landing:
    """The loop of a capture: transactions go into segments, what is durable back to the server."""

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
        from .delivery import Delivery  # loads NumPy, as receiving does not

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
        for kept in self._prepared.load(writer.directory):
            assembler.restore(kept)
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
        # End LSN and commit time of the last transaction that the writer has; the commit time of
        # the last one that is durable.
        self._written: tuple[int, int | None] = (writer.position, None)
        self._commit_time: int | None = None
        self._until: int | None = None
        self._last_advance = self._told = time.monotonic()

    def run(self, until_lsn: int | None, stop: threading.Event | None) -> CaptureProgress:
        """Write what comes to segments, until `stop` or `until_lsn`."""
        from .delivery import Until

        told, self._until = 0, until_lsn
        try:
            for found in self._delivery.arrivals(Until(until_lsn, None, stop), self._patience):
                if found is None:
                    if self._frames > told or time.monotonic() - self._told >= _IDLE_PROGRESS:
                        told = self._frames
                        self._report()
                else:
                    self._land(found)
                self._upkeep.tick()
                opened = self._writer.opened
                if opened is not None and time.monotonic() - opened >= self._delay(found):
                    self._flush()
        except RetryableError as error:
            _log.warning("the capture ends: %s", error)
            self._flush()  # what came whole need not come again
            raise
        self._flush()
        if self._frames > told:
            self._report()
        return self._progress()

    def _patience(self) -> float:
        """Seconds for which to wait for more."""
        opened = self._writer.opened
        if opened is None:
            return _POLL
        return min(_POLL, max(0.0, opened + self._max_delay - time.monotonic()))

    def _land(self, found: Transaction | TransactionGroup) -> None:
        """Hand transactions to the writer."""
        self._follow_timeline()
        self._transactions += found.commits
        for run in found.runs():
            self._frames += len(run)
            self._bytes += run.size
            self._acknowledge(self._writer.write_run(run))
            if time.monotonic() - self._told >= _IDLE_PROGRESS:
                self._report()
        if found.commit_time is not None:
            self._written = found.end_lsn, found.commit_time

    def _delay(self, found: Transaction | TransactionGroup | None) -> float:
        """Seconds that a commit may wait for its segment to be completed.

        `found` is what came last; None if nothing waits.
        """
        if found is None and self._delivery.is_asked:
            return min(self._max_delay, _ASKED_INTERVAL)
        return self._max_delay

    def _follow_timeline(self) -> None:
        """Have what lands from here on say on which timeline the server is."""
        self._acknowledge(self._writer.set_timeline(self._link.receiver.connection.timeline))

    def _report(self) -> None:
        self._told = time.monotonic()
        if self._tell is not None:
            self._tell(self._progress())

    def _flush(self) -> None:
        """Complete the segment."""
        self._acknowledge(self._writer.flush())

    def _on_idle(self, lsn: int) -> None:
        """Store from time to time how far the server is while it has no changes for the slot."""
        now = time.monotonic()
        position = self._writer.position
        interval = _ASKED_INTERVAL if self._delivery.is_asked else _ADVANCE_INTERVAL
        if self._link.receiver.acknowledged < position <= lsn:
            self._acknowledge(position)
        elif now - self._last_advance > interval or lsn - position > _ADVANCE_BYTES:
            self._follow_timeline()
            self._acknowledge(self._writer.advance(lsn))
            self._last_advance = now

    def _acknowledge(self, position: int | None) -> None:
        if position is not None:
            receiver = self._link.receiver
            receiver.acknowledged = max(receiver.acknowledged, position)
            self._note_commit_time()
            self._prepared.forget(position)

    def _note_commit_time(self) -> None:
        """Note when the last transaction was committed that is durable."""
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
            reconnects=self._link.reconnects,
        )  # fmt: skip
