"""Write segments: put frames into files, resume a directory, say which LSN to acknowledge."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, cast

from .._disk import claim_directory, fsync_path, read_json_file, temporary_path, write_whole
from .._forms import MALFORMED, unreadable
from .._impl import implementation, twin
from ..errors import Argument, DecodeError, PgOutputError, printable
from ..lsn import format_lsn, parse_lsn
from ..protocol.wire import fields_reader
from .announced import Announced
from .file import SegmentFile
from .folders import POSITION_NAME, SEGMENTS, delete_unfinished
from .format import (
    ANNOUNCED_LSN,
    BATCH_BYTES,
    BATCH_FRAMES,
    MAX_PART,
    RESTORE,
    SegmentMetadata,
    check_options,
    require_pyarrow,
    segment_name,
    write_options,
)
from .listing import SegmentGroup, present

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Concatenate

    import numpy as np
    from typing_extensions import ParamSpec, Self

    from ..transactions.runs import Run

    _P = ParamSpec("_P")
_R = TypeVar("_R")

# Bytes that the other columns take in a file for each frame.
_BESIDE_FRAME = 40
# A file ends within a transaction once it is this many times as large as `segment_bytes`. A smaller
# file waits for the Commit.
_MOST_FULL = 1.5
# Frames of this many bytes in one buffer become a record batch of their own, to save a copy.
_LARGE = 256 << 10
# Each part of a transaction has at least this many bytes, even if `segment_bytes` is smaller: each
# part is a file, and numbers of parts end at MAX_PART.
_LEAST_PART = 256 << 10
_SEQ, _WITHIN = 3, 4  # indices of columns that `annotate` returns

# Reasons given by `annotate` for which this module raises a more detailed error.
_TOO_SHORT = "too short"
_TOO_EARLY = "of a transaction that was committed before what came already"
_OTHER_COMMIT = "of another transaction than the Begin before it"

_read_begin = fields_reader("B", "final_lsn", "xid")
_read_commit = fields_reader("C", "commit_lsn", "end_lsn")
_read_message = fields_reader("M", "lsn")


def _require_numpy() -> None:
    try:
        import numpy  # noqa: F401
    except ImportError as error:
        raise PgOutputError(
            f"writing segments needs numpy ({error})",
            code="missing_package",
            hint="Install numpy",
        ) from error


def _guarded(
    method: Callable[Concatenate[SegmentWriter, _P], _R],
) -> Callable[Concatenate[SegmentWriter, _P], _R]:
    """Decorate a method: refuse to run on a failed or closed writer, and mark it failed on errors.

    An OSError becomes a PgOutputError.
    """

    @functools.wraps(method)
    def wrapped(self: SegmentWriter, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        self._check_usable()
        try:
            return method(self, *args, **kwargs)
        except BaseException as error:
            self._failed(error)
            raise

    return wrapped


def _malformed(lsn: int, error: DecodeError) -> PgOutputError:
    text = f"the server sent a malformed frame at LSN {format_lsn(lsn)}: {error.message}"
    return PgOutputError(text, hint=error.hint).locate(error, None)


class _Piece(NamedTuple):
    """Frames of one run, with the values of the other columns of a segment."""

    run: Run
    columns: tuple[Any, ...]
    """The arrays that `annotate` returns."""
    commits: Any
    """Indices of the Commit frames."""

    def first_full(self, start: int, stop: int, room: int) -> int | None:
        """Return the index after the first Commit with which the frames take `room` bytes or more.

        The frames begin at `start`. Return None if there is no such Commit before `stop`.
        """
        run = self.run
        if int(run.offsets[stop] - run.offsets[start]) + _BESIDE_FRAME * (stop - start) < room:
            return None
        first = self.commits.searchsorted(start)
        for commit in self.commits[first : self.commits.searchsorted(stop)].tolist():
            size = int(run.offsets[commit + 1] - run.offsets[start])
            if size + _BESIDE_FRAME * (commit + 1 - start) >= room:
                after: int = commit + 1
                return after
        return None

    def first_beyond(self, start: int, stop: int, room: int) -> int:
        """Return the index after the first frame with which the frames take `room` bytes or more.

        The frames begin at `start`. Return `stop` if all frames before it take less.
        """
        run = self.run
        if int(run.offsets[stop] - run.offsets[start]) + _BESIDE_FRAME * (stop - start) < room:
            return stop
        low, high = start + 1, stop
        while low < high:
            middle = (low + high) // 2
            size = int(run.offsets[middle] - run.offsets[start]) + _BESIDE_FRAME * (middle - start)
            low, high = (low, middle) if size >= room else (middle + 1, high)
        return low

    def end_lsn(self, commit: int) -> int:
        """Return the end LSN in the Commit frame with an index."""
        return _read_commit(self.run.frame(commit))[1]

    def begin_before(self, index: int) -> tuple[int, bytes] | None:
        """Return LSN and frame of the Begin of the transaction that is open at an index.

        Return None if the Begin is not among these frames.
        """
        before = int(self.commits.searchsorted(index))
        first = int(self.commits[before - 1]) + 1 if before else 0
        for i in range(first, index):
            if self.run.data[int(self.run.offsets[i])] == ord("B"):
                return int(self.run.lsns[i]), self.run.frame(i)
            if self.columns[_WITHIN][i]:
                return None  # the transaction began before these frames
        return None


class SegmentWriter:
    """Writes frames of protocol version 1 to segments, in the order in which the server sends them.

    Use it as a context manager. On exit, the writer discards frames that are not durable yet: the
    server sends them again. Only one writer at a time may use a directory. After any error the
    writer refuses to go on, because frames may be missing.

    Parameters
    ----------
    directory : path
        The directory. It is created if it does not exist.
    metadata : SegmentMetadata
        The description of the session. The writer ignores its `start_lsn`.
    confirmed_flush_lsn : int
        The LSN up to which the slot was acknowledged. A directory without segments begins there.
    segment_bytes : int
        A segment ends with the first Commit after its file has this many bytes. A transaction
        larger than 1.5 times this size is split into parts of about that size, or of 256 KiB if
        that is more.
    made_slot : bool
        Whether the slot was created for this directory, so that the directory has everything that
        the slot ever sent. The directory stores this when it begins.
    lock : int, optional
        A file descriptor that already holds the directory's lock. The writer duplicates it; the
        caller closes its own.
    compression : {None, "lz4", "zstd"}
        How the buffers of segments are compressed.

    Attributes
    ----------
    directory : pathlib.Path
    made_slot : bool
        The value of this argument when the directory began.
    position : int
        The LSN up to which everything is durable: acknowledge it to the server. The next stream has
        to begin there.
    changes : int
        Insert, Update, Delete and Truncate messages that this writer has received.
    completed : int
        Segments that this writer has completed.

    Raises
    ------
    PgOutputError
        Another capture holds the directory. Its segments come from another slot or are damaged. The
        slot is beyond the end of the directory. A file can't be written. pyarrow or NumPy is not
        installed.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        metadata: SegmentMetadata,
        *,
        confirmed_flush_lsn: int,
        segment_bytes: int = 16 << 20,
        compression: Literal["lz4", "zstd"] | None = None,
        made_slot: bool = False,
        lock: int | None = None,
    ) -> None:
        check_options(segment_bytes, compression)
        self._pa = require_pyarrow()
        self._ipc_options = write_options(compression)
        _require_numpy()
        from ..transactions.runs import runs_of  # imports NumPy, which reading does not need

        self._runs_of = runs_of
        self._annotate = twin("segments._annotate").annotate
        self.directory = Path(directory)
        self._metadata = metadata
        self._segment_bytes = segment_bytes
        self.made_slot = made_slot
        if lock is None:
            self._lock = claim_directory(self.directory, "capture", "segments")
        else:
            self._lock = os.dup(lock)
        self._unusable: str | None = None  # the reason, after a failure or `close`
        self._file: SegmentFile | None = None
        self._temporary: list[Path] = []  # the parts of the open segment
        self._stored_end = 0
        # The LSN since which publications and options are the same as now.
        self._asked_since = 0
        try:
            self._resume(confirmed_flush_lsn)
        except BaseException as error:
            os.close(self._lock)
            self._failed(error)
            raise

        self.changes = self.completed = 0
        self._announced = Announced()
        # The open transaction: commit LSN, commit time, xid and the next seq. Then LSN and frame of
        # its Begin.
        self._open: tuple[int, int, int, int] | None = None
        self._begin: tuple[int, bytes] | None = None
        # The open segment: when it began (time.monotonic), or None if none is open.
        self._opened: float | None = None
        self._end_lsn = self.position
        self._part_bytes = 0
        self._new_batch()

    def __repr__(self) -> str:
        return f"<SegmentWriter {str(self.directory)!r} at {format_lsn(self.position)}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Discard frames that are not durable yet, and release the directory's lock."""
        if self._lock < 0:
            return
        try:
            if self._file is not None:
                self._file.discard()
                self._file = None
            for path in self._temporary:
                SEGMENTS.delete(self.directory, path.name, missing_ok=True)
            self._temporary = []
        finally:
            os.close(self._lock)
            self._lock = -1
            self._unusable = self._unusable or "it is closed"

    def _failed(self, error: BaseException) -> None:
        """Mark the writer as failed; raise an OSError as a PgOutputError."""
        self._unusable = f"it failed before ({printable(str(error)) or type(error).__name__})"
        if isinstance(error, OSError):
            raise PgOutputError(
                f"can't write a segment in {self.directory}: {error.strerror or error}. Nothing is "
                "lost: the slot keeps the changes",
                code="io_failed",
                path=str(self.directory),
            ) from error

    def _check_usable(self) -> None:
        """Raise an error if the writer has failed or was closed."""
        if self._unusable is not None:
            raise PgOutputError(
                f"this writer of {self.directory} can't be used any more: {self._unusable}",
                code="unfit_input",
                path=str(self.directory),
                hint="Create a new writer: it continues at the end of the directory",
            )

    # --- beginning

    def _resume(self, confirmed_flush_lsn: int) -> None:
        """Find the position to resume at, and delete unfinished files of a killed capture.

        Compare the directory with the slot first. Then only files are deleted whose frames the
        server sends again.
        """
        groups, unfinished = present(self.directory)
        self._timeline = groups[-1].metadata().timeline if groups else 0
        if groups or unfinished is not None:
            newest = unfinished or groups[-1]
            self._check_origin(newest.metadata(), self.directory)
        last_end = groups[-1].end_lsn if groups else None
        acknowledged = self._read_position()
        positions = [lsn for lsn in (last_end, acknowledged) if lsn is not None]
        self.position = max(positions, default=confirmed_flush_lsn)
        slot = f"slot {self._metadata.slot!r} is at {format_lsn(confirmed_flush_lsn)}"
        # A capture acknowledges whole segments only. So a slot beyond the start of the unfinished
        # segment was acknowledged up to its end or further.
        if unfinished is not None and (
            confirmed_flush_lsn > self.position or unfinished.end_lsn <= self.position
        ):
            raise PgOutputError(
                f"{unfinished.name} is not complete: it has the parts {unfinished.numbers} without "
                f"the last, and the server will not send the last part again, because {slot}, "
                f"after the start {format_lsn(unfinished.start_lsn)} of the segment; {RESTORE}",
                code="changes_missing",
                path=str(self.directory),
            )
        if confirmed_flush_lsn > self.position:
            raise PgOutputError(
                f"{slot}, after the end {format_lsn(self.position)} of {self.directory}: the "
                "changes in between are missing there. A capture into another directory may have "
                "them, another client has read the slot, or segments were deleted",
                code="changes_missing",
                path=str(self.directory),
                hint="Move the missing segments into the directory, or start over with an empty "
                "directory and new snapshots",
            )
        self._clean_up(unfinished)
        # The next segment starts at the end of the last one, even if the stored position is beyond
        # it: a keepalive has said that the server had nothing to send in between.
        self._start_lsn = self._stored_end or self.position if last_end is None else last_end
        self._asked_since = self._asked_since or self.position
        if not positions:
            # Without a stored position, nobody would notice if another reader advanced the slot
            # before the first segment is written.
            self._write_position(self.position)

    def _clean_up(self, unfinished: SegmentGroup | None) -> None:
        """Delete the parts of an unfinished segment, then temporary files.

        The order matters after a crash in between. The temporary file of the last part shows that
        the other parts belong to an unfinished segment.
        """
        if unfinished is not None:
            for segment in unfinished.parts:
                SEGMENTS.delete(self.directory, segment.name)
            fsync_path(self.directory)
        delete_unfinished(self.directory)
        fsync_path(self.directory)

    def _read_position(self) -> int | None:
        """Read position.json; return its LSN, or None if there is no such file."""
        path = self.directory / POSITION_NAME
        try:
            fields = json.loads(read_json_file(path))
            metadata = SegmentMetadata.from_json(json.dumps(fields["metadata"]))
            position = parse_lsn(fields["position"])
            self._stored_end = parse_lsn(fields["segments_end"])
            if metadata.asked == self._metadata.asked:
                self._asked_since = parse_lsn(fields["asked_since"])
            self.made_slot = fields["made_slot"] is True
            self._timeline = max(self._timeline, metadata.timeline)
        except FileNotFoundError:
            return None
        except (OSError, *MALFORMED) as error:
            raise unreadable(
                path,
                error,
                "which says how far the slot was acknowledged",
                "Restore it, or start over with a new slot and directory",
            ) from error
        self._check_origin(metadata, path)
        return position

    def _check_origin(self, metadata: SegmentMetadata, path: Path) -> None:
        """Raise an error if a file comes from another slot."""
        differences = self._metadata.differences(metadata)
        if differences:
            is_other = metadata.slot != self._metadata.slot
            go_on = (
                (", or continue here with ", Argument("slot", metadata.slot)) if is_other else ()
            )
            raise PgOutputError(
                f"{path} belongs to another slot or server: {'; '.join(differences)}",
                code="another_history",
                parameter="directory",
                hint=(
                    "Give another directory",
                    *go_on,
                ),
                path=str(path),
            )

    # --- frames

    def write(self, lsn: int, frame: bytes) -> int | None:
        """Write the next frame. For many frames, `write_frames` is much faster.

        Parameters
        ----------
        lsn : int
            The start LSN in the XLogData header of the frame.
        frame : bytes

        Returns
        -------
        int or None
            The new `position` if this completed a segment: acknowledge it to the server.

        Raises
        ------
        PgOutputError
            The frame is malformed, or protocol version 1 does not allow it here. A file can't be
            written. The writer has failed before, or is closed.
        """
        return self.write_frames([frame], [lsn])

    def write_frames(self, frames: Any, lsns: Any, offsets: Any = None) -> int | None:
        """Write the next frames.

        Parameters
        ----------
        frames, offsets
            As `data` and `offsets` of :func:`pgoutput_fast.decode_batch`.
        lsns : array of int
            The start LSN in the XLogData header of each frame.

        Returns
        -------
        int or None
            As `write`.

        Raises
        ------
        PgOutputError
            As `write`. Then none of these frames counts as written.
        TypeError, ValueError
            An argument has another type or form.
        """
        position = None
        for run in self._runs_of(frames, offsets, lsns):
            position = self.write_run(run) or position
        return position

    @_guarded
    def write_run(self, run: Run) -> int | None:
        """Write the frames of a run. Their bytes are not copied before a record batch is full."""
        columns, rare, commits, self._open, end_lsn, wrong = self._annotate(
            run.data, run.offsets, self._open, self._end_lsn
        )
        if wrong is not None:
            index, why = wrong
            raise self._out_of_order(run, index, why, end_lsn)
        piece = _Piece(run, columns, commits)
        self.changes += int((columns[_SEQ] >= 0).sum())
        position = None
        start = 0
        for index, tag in rare:
            position = self._take(piece, start, index) or position
            position = self._take_rare(piece, index, tag) or position
            start = index + 1
        position = self._take(piece, start, len(run)) or position
        self._end_lsn = end_lsn
        self._begin = self._begin_at(piece, len(run)) if self._open is not None else None
        return position

    def _out_of_order(self, run: Run, index: int, why: str, end_lsn: int) -> PgOutputError:
        """Return the error for a frame that may not come at this point of the stream."""
        frame, lsn = run.frame(index), int(run.lsns[index])
        try:
            if why == _TOO_SHORT:
                implementation.decode(frame, False)
            elif why == _TOO_EARLY:
                commit_lsn, xid = _read_begin(frame)
                return PgOutputError(
                    f"the server sent transaction {xid}, committed at {format_lsn(commit_lsn)}, "
                    f"although it had already sent everything before {format_lsn(end_lsn)}",
                    code="unfit_stream",
                )
            elif why == _OTHER_COMMIT and self._open is not None:
                return PgOutputError(
                    f"Commit at {format_lsn(_read_commit(frame)[0])} follows the Begin of the "
                    f"transaction that commits at {format_lsn(self._open[0])}",
                    code="unfit_stream",
                )
        except DecodeError as error:
            return _malformed(lsn, error)
        return PgOutputError(
            f"the server sent a frame with tag {frame[:1].decode('latin-1')!r} {why}, after LSN "
            f"{format_lsn(end_lsn)}; segments are of protocol version 1",
            code="unfit_stream",
        )

    def _take(self, piece: _Piece, start: int, end: int) -> int | None:
        """Write frames of transactions, among them no Relation and no Type.

        Returns
        -------
        int or None
            The new position, if this completed a segment.
        """
        position = None
        most = int(_MOST_FULL * self._segment_bytes)
        while start < end:
            self._open_segment()
            stop = self._fit(piece.run, start, end)
            stop = piece.first_beyond(start, stop, max(most - self._size, _LEAST_PART))
            # A segment of several parts ends with the large transaction that filled them.
            room = 0 if len(self._temporary) > 1 else self._segment_bytes - self._size
            full = piece.first_full(start, stop, room)
            stop = full or stop
            self._append(piece, start, stop)
            if self._pending_bytes >= _LARGE and len(self._pending) == 1:
                self._write_batch()  # now its bytes lie in one buffer, so nothing is copied
            if full:
                position = self._complete(piece.end_lsn(stop - 1))
            elif self._size >= most:
                self._write_batch()  # compression may make the file small enough
                if self._size >= most:
                    # A transaction is open here: a Commit would have ended the segment.
                    self._finish_part(last=False)
                    self._open_part(self._begin_at(piece, stop))
            start = stop
        return position

    def _take_rare(self, piece: _Piece, index: int, tag: int) -> int | None:
        """Write a Relation or Type, or a message outside of transactions."""
        frame = piece.run.frame(index)
        if tag == ord("M"):
            (lsn,) = _read_message(frame)
            self._open_segment()
        else:
            try:
                self._announced.take(frame)
            except DecodeError as error:
                lsn = int(piece.run.lsns[index])
                raise _malformed(lsn, error) from error
            if self._file is None:
                return None  # the next file begins with it
        self._fit(piece.run, index, index + 1)
        self._append(piece, index, index + 1)
        if tag == ord("M") and self._size >= self._segment_bytes:
            return self._complete(lsn)
        return None

    def _fit(self, run: Run, start: int, end: int) -> int:
        """Return the index up to which frames fit into the record batch; at least one fits."""
        while True:
            stop = min(end, start + BATCH_FRAMES - self._pending_frames)
            limit = int(run.offsets[start]) + BATCH_BYTES - self._pending_bytes
            if stop > start and int(run.offsets[stop]) > limit:
                stop = int(run.offsets.searchsorted(limit, "right")) - 1
            if stop > start:
                return stop
            if not self._pending_frames:
                return start + 1  # the frame alone is larger than BATCH_BYTES
            self._write_batch()

    def _begin_at(self, piece: _Piece, index: int) -> tuple[int, bytes] | None:
        """Return LSN and frame of the Begin of the transaction that is open at an index."""
        return piece.begin_before(index) or self._begin

    @property
    def in_transaction(self) -> bool:
        """Whether a transaction is open: its Commit has not arrived yet."""
        return self._open is not None

    @property
    def end_lsn(self) -> int:
        """The end LSN of the last complete transaction or later message, durable or not."""
        return self._end_lsn

    @property
    def timeline(self) -> int:
        """The server's timeline at the end of the directory; 0 if unknown."""
        return self._timeline

    @property
    def opened(self) -> float | None:
        """When the open segment began, by `time.monotonic`; None if no segment is open."""
        return self._opened

    @property
    def is_idle(self) -> bool:
        """Whether all frames that were written are durable."""
        return self._opened is None and self._open is None

    @_guarded
    def flush(self) -> int | None:
        """Complete the segment, unless a transaction is open.

        Returns
        -------
        int or None
            The new `position`: acknowledge it to the server. None if no frame was pending, or if a
            transaction is open.

        Raises
        ------
        PgOutputError
            A file can't be written. The writer has failed before, or is closed.
        """
        if self._open is not None or self._opened is None:
            return None
        return self._complete(self._end_lsn)

    def _complete(self, end_lsn: int) -> int:
        """Sync the segment's files, give them their final names, and return the new position."""
        self._finish_part(last=True)
        parts = len(self._temporary)
        for part, path in enumerate(self._temporary):
            if 0 < part == parts - 1:
                # Sync before the last rename. Otherwise, after a crash of the machine, the last
                # part might have its final name while another part lacks it.
                fsync_path(self.directory)
            path.rename(self.directory / segment_name(self._start_lsn, end_lsn, part, parts))
        fsync_path(self.directory)
        self._temporary = []
        self._opened = None
        self.position = self._start_lsn = end_lsn
        self.completed += 1
        self._timeline = self._metadata.timeline
        return end_lsn

    @_guarded
    def set_timeline(self, timeline: int) -> int | None:
        """Set the server's timeline for all frames from here on.

        Call it between two transactions. A new timeline completes the open segment.

        Returns
        -------
        int or None
            As `flush`.

        Raises
        ------
        PgOutputError
            As `flush`.
        """
        if timeline == self._metadata.timeline:
            return None
        position = self.flush()
        self._metadata = dataclasses.replace(self._metadata, timeline=timeline)
        return position

    @_guarded
    def advance(self, lsn: int) -> int | None:
        """Store durably that the server has nothing to send before an LSN.

        Parameters
        ----------
        lsn : int
            The LSN of a keepalive.

        Returns
        -------
        int or None
            The LSN: acknowledge it to the server. None if frames are pending, or if the LSN is not
            beyond `position`.

        Raises
        ------
        PgOutputError
            A file can't be written. The writer has failed before, or is closed.
        """
        if not self.is_idle or lsn <= self.position:
            return None
        self._write_position(lsn)
        self.position = self._end_lsn = lsn
        return lsn

    def store_position(self) -> None:
        """Write `position` to position.json, so that it does not depend on segments.

        Raises
        ------
        OSError
            The file can't be written.
        """
        self._write_position(self.position)

    def _write_position(self, lsn: int) -> None:
        fields = {
            "position": format_lsn(lsn),
            "segments_end": format_lsn(self._start_lsn),
            "asked_since": format_lsn(self._asked_since),
            "metadata": json.loads(self._metadata.to_json()),
            "made_slot": self.made_slot,
        }
        write_whole(self.directory / POSITION_NAME, [json.dumps(fields)])
        self._timeline = self._metadata.timeline

    # --- files

    def _new_batch(self) -> None:
        self._pending: list[tuple[_Piece, int, int]] = []
        self._pending_frames = self._pending_bytes = 0

    @property
    def _size(self) -> int:
        """Bytes of the file, with an estimate for the pending frames."""
        return self._part_bytes + self._pending_bytes + _BESIDE_FRAME * self._pending_frames

    def _append(self, piece: _Piece, start: int, end: int) -> None:
        """Add frames to the pending record batch."""
        self._pending.append((piece, start, end))
        self._pending_frames += end - start
        self._pending_bytes += int(piece.run.offsets[end] - piece.run.offsets[start])

    def _open_segment(self) -> None:
        """Open a segment if none is open."""
        if self._opened is None:
            self._opened = time.monotonic()
            self._open_part(None)

    def _open_part(self, begin: tuple[int, bytes] | None) -> None:
        """Open a file; write the Types and Relations in force, and the open transaction's Begin.

        Parameters
        ----------
        begin : (int, bytes) or None
            LSN and frame of the Begin of the transaction that continues in this file.
        """
        part = len(self._temporary)
        if part > MAX_PART:
            raise PgOutputError(
                f"a transaction needs more than {MAX_PART + 1} parts",
                code="out_of_memory",
                hint=("Give a larger ", Argument("segment_bytes")),
                path=str(self.directory),
            )
        path = temporary_path(self.directory / f"{part:05d}.arrow")
        self._temporary.append(path)
        metadata = dataclasses.replace(self._metadata, start_lsn=self._start_lsn)
        self._file = SegmentFile(path, metadata, self._ipc_options, part)
        self._part_bytes = 0
        self._new_batch()
        announced = list(self._announced.frames())
        frames = announced if begin is None else [*announced, begin[1]]
        lsns = [ANNOUNCED_LSN] * len(announced) + ([] if begin is None else [begin[0]])
        for run in self._runs_of(frames, None, lsns):
            piece = _Piece(run, self._annotate(run.data, run.offsets, None, 0)[0], [])
            start = 0
            while start < len(run):
                stop = self._fit(run, start, len(run))
                self._append(piece, start, stop)
                start = stop

    def _write_batch(self) -> None:
        """Write the pending frames to the file as a record batch."""
        import numpy as np

        pa = self._pa
        count = self._pending_frames
        if count == 0:
            return
        commit_lsn, commit_time, xid, seq, within = (
            np.concatenate([piece.columns[i][start:end] for piece, start, end in self._pending])
            for i in range(5)
        )
        lsns = np.concatenate([piece.run.lsns[start:end] for piece, start, end in self._pending])
        offsets = np.zeros(count + 1, np.int32)
        parts, size, row = [], 0, 0
        for piece, start, end in self._pending:
            ends = piece.run.offsets[start : end + 1]
            offsets[row + 1 : row + 1 + end - start] = ends[1:] - (ends[0] - size)
            parts.append(memoryview(piece.run.data)[int(ends[0]) : int(ends[-1])])
            size, row = size + len(parts[-1]), row + end - start
        data = parts[0] if len(parts) == 1 else b"".join(parts)

        def column(values: np.ndarray[Any, Any], type_: Any, valid: Any) -> Any:
            validity = None if valid.all() else pa.py_buffer(np.packbits(valid, bitorder="little"))
            return pa.Array.from_buffers(type_, count, [validity, pa.py_buffer(values)])

        self._current.write(
            [
                pa.Array.from_buffers(pa.uint64(), count, [None, pa.py_buffer(lsns)]),
                column(commit_lsn, pa.uint64(), within),
                column(commit_time, pa.int64(), within),
                column(xid, pa.uint32(), within),
                column(seq, pa.int64(), seq >= 0),
                pa.Array.from_buffers(
                    pa.binary(), count, [None, pa.py_buffer(offsets), pa.py_buffer(data)]
                ),
            ]
        )
        self._part_bytes = self._current.size
        self._new_batch()

    @property
    def _current(self) -> SegmentFile:
        """The file that is open."""
        return cast("SegmentFile", self._file)

    def _finish_part(self, *, last: bool) -> None:
        """Write pending frames and the end mark, and sync the file."""
        self._write_batch()
        self._current.finish(last=last)
        self._file = None
