"""Capture: a slot's changes into a directory of segments, acknowledged once they are durable."""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING, NamedTuple

from ..connections import RetryableError
from ..errors import PgOutputError
from ..lsn import format_lsn
from ..protocol.wire import fields_reader
from ..segments import SegmentMetadata, SegmentWriter
from ..segments.listing import has_begun
from .link import Link
from .receiver import Receiver
from .source import missing_slot
from .stream import ReplicationStream
from .stream_options import StreamOptions
from .walsender import ReplicationConnection, SlotState

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Sequence

# How far the server is where nothing is to be landed is kept in a file that is synced: not for
# every keepalive, but after so many seconds, or so many bytes of the server's log.
_ADVANCE_INTERVAL = 10.0
_ADVANCE_BYTES = 16 << 20
_SILENCE = 0.1  # seconds without a frame, after which the segment is completed
_IDLE_PROGRESS = 1.0  # seconds between two calls of `progress` while nothing comes

_log = logging.getLogger(__name__)

_read_begin = fields_reader("B", "final_lsn")
_read_message = fields_reader("M", "flags", "lsn")


class CaptureProgress(NamedTuple):
    """How far a capture is."""

    frames: int
    """Frames that this run has taken."""
    transactions: int
    """Whole transactions that this run has taken."""
    bytes: int
    """Bytes of the frames that this run has taken."""
    received_lsn: int
    """Where the last change that was taken begins in the server's log; or a later LSN, before which
    the server has said that nothing more comes."""
    durable_lsn: int
    """Everything before this LSN is in segments, and acknowledged."""


def capture(
    dsn: str | None = None,
    *,
    slot: str,
    publications: Sequence[str],
    directory: str | os.PathLike[str],
    create_slot: bool = False,
    adopt_slot: bool = False,
    until_lsn: int | None = None,
    binary: bool = False,
    messages: bool = False,
    segment_bytes: int = 16 << 20,
    progress: Callable[[CaptureProgress], None] | None = None,
    stop: threading.Event | None = None,
) -> CaptureProgress:
    """Land a slot's changes in segments, from where the directory ends.

    It goes on until `until_lsn` or `stop`, or until Ctrl-C or an error; an orderly end of the
    server is an error too, one that passes (`RetryableError`). A segment ends at a commit after
    `segment_bytes`, or when nothing comes for a tenth of a second. However a call ends, killed or
    not, the next one goes on without loss and without doubling.

    Parameters
    ----------
    dsn : str, optional
        Connection string of libpq, or URL; by default as libpq's variables say.
    slot : str
    publications : list or tuple of str
        Names of publications, as they are: they are quoted here.
    directory : path
        Of segments (`pgoutput_fast.segments`). Made if it is not there.
    create_slot : bool
        Make the slot if it is not there. Only for a directory in which no capture has begun.
    adopt_slot : bool
        Let a slot that is there already, one that was made with SQL, say, begin a directory in
        which there is nothing yet. It is refused otherwise: if another directory has what the slot
        brought so far, whatever came into this one would be missing there.
    until_lsn : int
        Land exactly what was committed before this LSN, then end: `pg_current_wal_lsn()` gives the
        one for all that is committed by now. What counts is where the commit record of a
        transaction begins, and where the record of a non-transactional message ends. What comes
        after stays in the slot.
    binary : bool
        Values in their types' binary form, where they have one.
    messages : bool
        Logical messages (`pg_logical_emit_message`) too.
    segment_bytes : int
        A segment ends with the first commit after so many bytes of frames. A transaction that is
        larger is cut into parts of twice as many.
    progress : callable
        Called with a `CaptureProgress` after each batch of frames that came, and each second
        while none come.
    stop : threading.Event
        Ends the capture from another thread, within some tenths of a second. What was received of
        whole transactions is made durable before.

    Returns
    -------
    CaptureProgress
        At the end.

    Raises
    ------
    RetryableError
        The server shuts down, restarts or crashed, the connection is lost, or the slot is in use:
        call again to go on.
    PgOutputError
        The server can't be reached or refuses; there is no such publication, or no such slot; the
        slot is beyond the end of the directory; no capture has begun in the directory, and the slot
        is there already; the directory is another slot's or another capture's, or damaged; the disk
        refuses; or pyarrow or NumPy is not installed. No message has the password.
    TypeError
        An argument is of another type. Nothing was made.
    KeyboardInterrupt
        Ctrl-C. What was acknowledged is durable, the slot has the rest: call again to go on.
    """
    _check_arguments(
        until_lsn,
        progress,
        stop,
        directory=(directory, (str, os.PathLike), "a path"),
        create_slot=(create_slot, bool, "a bool"),
        adopt_slot=(adopt_slot, bool, "a bool"),
        binary=(binary, bool, "a bool"),
        messages=(messages, bool, "a bool"),
        segment_bytes=(segment_bytes, int, "an int, of bytes"),
    )
    with ReplicationConnection(dsn) as connection:
        connection.check_publications(publications)
        wanted = StreamOptions(publications, protocol=1, binary=binary, messages=messages)
        state = connection.slot(slot)
        marked = state is not None and state.two_phase
        options = wanted.negotiate(connection.server_version, marked=marked).options
        _check_beginning(state, slot, directory, adopt_slot=adopt_slot)
        if state is not None:
            confirmed = state.confirmed_flush_lsn or 0
        elif create_slot:
            # If another has made it meanwhile, it is refused: that one is not of this directory.
            confirmed = connection.create_slot(slot)
        else:
            raise missing_slot(slot)
        metadata = SegmentMetadata(
            system_identifier=connection.system_identifier,
            database=connection.database,
            slot=slot,
            publications=tuple(publications),
            server_version=connection.server_version,
            encoding=connection.settings["client_encoding"],
            settings=connection.settings,
            options=dict(options),
        )
        try:
            writer = SegmentWriter(
                directory, metadata, confirmed_flush_lsn=confirmed, segment_bytes=segment_bytes
            )
        except BaseException:
            if state is None:  # the slot was made here, and would keep the server's log for ever
                connection.drop_slot(slot)
            raise
        with writer:
            connection.start(slot, writer.position, options)
            with ReplicationStream(Link(Receiver(connection, writer.position))) as stream:
                return _Landing(stream, writer, until_lsn, progress).run(stop)


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
        # A bool is an int, and meant as none.
        if not isinstance(value, types) or (isinstance(value, bool) and types is not bool):
            raise TypeError(f"{name} must be {what}, not {type(value).__name__}")
    if isinstance(until_lsn, int):
        format_lsn(until_lsn)  # refuses what is out of range
    if progress is not None and not callable(progress):
        raise TypeError(f"progress must be callable, not {type(progress).__name__}")
    if stop is not None and not callable(getattr(stop, "is_set", None)):
        raise TypeError(f"stop must be a threading.Event, not {type(stop).__name__}")


def _check_beginning(
    state: SlotState | None, slot: str, directory: str | os.PathLike[str], *, adopt_slot: bool
) -> None:
    """Refuse a slot without the directory that goes with it, and a directory without its slot.

    Raises
    ------
    PgOutputError
        The slot is there and the directory is new, or the directory is not and the slot is gone.
    """
    begun = has_begun(directory)
    if state is not None and not adopt_slot and not begun:
        raise PgOutputError(
            f"slot {slot!r} is there already, and no capture has begun in "
            f"{os.fspath(directory)}: give the directory that has what the slot brought so "
            f"far, or, if there is none, adopt_slot=True to begin where the slot stands, "
            f"{format_lsn(state.confirmed_flush_lsn or 0)}"
        )
    if state is None and begun:
        raise PgOutputError(
            f"the server has no slot {slot!r}, and a capture has begun in {os.fspath(directory)}: "
            f"give the slot with which it was begun; if that was dropped, begin with a new slot "
            f"and an empty directory, and copy the tables anew, as a slot that is made now brings "
            f"nothing of what was committed since this one's end"
        )


def _before(
    frames: list[tuple[int, int, int, bytes]], until_lsn: int
) -> list[tuple[int, int, int, bytes]]:
    """The frames up to the first of what was committed at an LSN or later."""
    for index, (_, _, _, frame) in enumerate(frames):
        if frame[:1] == b"B":
            beyond = _read_begin(frame)[0] >= until_lsn
        elif frame[:1] == b"M":
            flags, lsn = _read_message(frame)
            # Bit 0 says that it is transactional. Its LSN is where its record ends.
            beyond = not flags & 1 and lsn > until_lsn
        else:
            continue
        if beyond:
            return frames[:index]
    return frames


class _Landing:
    """The loop of a capture: frames go into segments, and what is durable back to the server."""

    def __init__(
        self,
        stream: ReplicationStream,
        writer: SegmentWriter,
        until_lsn: int | None,
        progress: Callable[[CaptureProgress], None] | None,
    ) -> None:
        self._stream = stream
        self._writer = writer
        self._until_lsn = until_lsn
        self._tell = progress
        # As in CaptureProgress.
        self._frames = self._transactions = self._bytes = 0
        self._received = writer.position
        # The server has told that nothing comes before it.
        self._server_lsn = writer.position
        self._last_advance = self._told = time.monotonic()

    def run(self, stop: threading.Event | None) -> CaptureProgress:
        """Land what comes, until `stop` or `until_lsn`."""
        while stop is None or not stop.is_set():
            try:
                batch = self._stream.receive(_SILENCE)
            except RetryableError as error:
                _log.warning("the capture ends: %s", error)
                # Whole transactions that came are kept: they need not come again.
                self._acknowledge(self._writer.flush())
                raise
            if batch is None:  # the stream was closed, by a signal's handler
                break
            wanted = batch.frames
            if self._until_lsn is not None:
                wanted = _before(wanted, self._until_lsn)
            self._land(wanted)
            if wanted or time.monotonic() - self._told >= _IDLE_PROGRESS:
                self._report()
            if len(wanted) < len(batch.frames):
                break
            if batch.keepalive_lsn is not None:
                self._on_keepalive(batch.keepalive_lsn)
            elif not wanted:
                self._on_silence()
            if self._is_done():
                break
        self._acknowledge(self._writer.flush())
        return self._progress()

    def _land(self, frames: list[tuple[int, int, int, bytes]]) -> None:
        """Hand frames to the writer."""
        write = self._writer.write
        for lsn, _, _, frame in frames:
            self._bytes += len(frame)
            if frame[:1] == b"C":
                self._transactions += 1
            position = write(lsn, frame)
            if position is not None:
                self._stream.acknowledge(position)
        if frames:
            self._frames += len(frames)
            self._received = max(self._received, frames[-1][0])

    def _report(self) -> None:
        self._told = time.monotonic()
        if self._tell is not None:
            self._tell(self._progress())

    def _on_silence(self) -> None:
        """Complete the segment; find out how far the server is if that may be the end."""
        self._acknowledge(self._writer.flush())
        if self._until_lsn is not None:
            self._stream.ask_for_keepalive()

    def _on_keepalive(self, lsn: int) -> None:
        """Keep how far the server is where nothing is to be landed, now and then."""
        self._server_lsn = self._received = max(self._received, lsn)
        if (
            time.monotonic() - self._last_advance > _ADVANCE_INTERVAL
            or self._server_lsn - self._writer.position > _ADVANCE_BYTES
        ):
            self._acknowledge(self._writer.advance(self._server_lsn))
            self._last_advance = time.monotonic()

    def _is_done(self) -> bool:
        """Whether all that was committed before `until_lsn` has come."""
        reached = max(self._writer.end_lsn, self._server_lsn)
        return (
            self._until_lsn is not None
            and reached >= self._until_lsn
            and not self._writer.in_transaction
        )

    def _acknowledge(self, position: int | None) -> None:
        if position is not None:
            self._stream.acknowledge(position)

    def _progress(self) -> CaptureProgress:
        return CaptureProgress(
            self._frames, self._transactions, self._bytes, self._received, self._writer.position
        )
