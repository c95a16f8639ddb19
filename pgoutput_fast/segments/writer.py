"""Writing segments: frames into files, a directory that is continued, what may be acknowledged."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from array import array
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from .._disk import claim_directory, fsync_path, write_whole
from ..decoding.state import MOST_UNUSED_TYPES, Names
from ..errors import DecodeError, PgOutputError, printable
from ..lsn import format_lsn, parse_lsn
from ..protocol.messages import Relation, Type, decode_rare
from ..protocol.wire import fields_reader
from .format import (
    ANNOUNCED_LSN,
    CRC_KEY,
    END_KEY,
    LAST_PART,
    MAX_PART,
    METADATA_KEY,
    OTHER_PART,
    POSITION_NAME,
    RESTORE,
    TEMPORARY,
    SegmentMetadata,
    checksum,
    require_pyarrow,
    segment_name,
    segment_schema,
)
from .listing import SegmentGroup, chain, listed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import BinaryIO, Concatenate

    import numpy as np
    from typing_extensions import ParamSpec, Self

    _P = ParamSpec("_P")
_R = TypeVar("_R")

# A record batch is what a reader holds in memory, and what it decodes at once.
_BATCH_FRAMES = 16384
_BATCH_BYTES = 4 << 20

_read_begin = fields_reader("B", "final_lsn", "commit_time", "xid")
_read_commit = fields_reader("C", "commit_lsn", "end_lsn")
_read_truncate = fields_reader("T", "relation_count")
_read_message = fields_reader("M", "lsn")

_ROW_TAGS = frozenset(b"IUD")
_ANNOUNCING_TAGS = frozenset(b"RY")


def _require_numpy() -> None:
    try:
        import numpy  # noqa: F401
    except ImportError as error:
        raise PgOutputError(f"segments are written with numpy ({error}); install numpy") from error


def _guarded(
    method: Callable[Concatenate[SegmentWriter, _P], _R],
) -> Callable[Concatenate[SegmentWriter, _P], _R]:
    """Make a method refuse a writer that has failed or was closed, and note its own failure.

    An error of the disk is raised as this package's.
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


class _Announced:
    """The Types and Relations of a session that are in force: every file begins with them.

    Relations of tables that are no more, and types that these alone used, are forgotten as a
    decoder forgets them, so that files do not grow with every table that is dropped and made again.
    """

    def __init__(self) -> None:
        self._types: dict[int, bytes] = {}
        self._relations: dict[int, Relation] = {}
        self._names = Names()
        self._most_types = MOST_UNUSED_TYPES

    def take(self, frame: bytes) -> None:
        """Take note of a Type or Relation, in place of the one that it replaces."""
        # Names are compared alone: in Latin-1 every byte is a letter.
        message = decode_rare(frame, in_stream=False, encoding="latin-1")
        if isinstance(message, Type):
            self._types[message.type_id] = frame
        elif isinstance(message, Relation):
            self._relations[message.relation_id] = message
            gone = [self._relations.pop(one) for one in self._names.give(message)]
            if gone:
                for type_id in _types_of(gone) - _types_of(self._relations.values()):
                    self._types.pop(type_id, None)
            if len(self._types) > self._most_types:
                used = self._types.keys() & _types_of(self._relations.values())
                self._types = {type_id: self._types[type_id] for type_id in used}
                self._most_types = len(used) + MOST_UNUSED_TYPES

    def frames(self) -> Iterator[bytes]:
        """What is in force, types before the relations that use them."""
        yield from self._types.values()
        yield from (relation.frame for relation in self._relations.values())


def _types_of(relations: Iterable[Relation]) -> set[int]:
    return {column.type_id for relation in relations for column in relation.columns}


class SegmentWriter:
    """Lands frames of protocol version 1, in the order in which the server sends them.

    Use it as a context manager: at the end, what is not durable yet is thrown away, as the server
    sends it again. One writer at a time may have a directory. After an error of any kind the writer
    refuses to go on, as frames may be missing in it.

    Parameters
    ----------
    directory : path
        Made if it is not there.
    metadata : SegmentMetadata
        What the session tells of itself; its `start_lsn` is not looked at.
    confirmed_flush_lsn : int
        Up to where the server has the slot acknowledged. A directory without segments begins there.
    segment_bytes : int
        A segment ends with the first commit after so many bytes of frames. A transaction that is
        larger is cut into parts of twice as many.

    Attributes
    ----------
    directory : pathlib.Path
    position : int
        LSN up to which everything is durable: it may be acknowledged, and the stream has to begin
        there.

    Raises
    ------
    PgOutputError
        Another capture has the directory, its segments are another slot's or damaged, the slot is
        beyond their end, the disk refuses, or pyarrow or NumPy is not installed.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        metadata: SegmentMetadata,
        *,
        confirmed_flush_lsn: int,
        segment_bytes: int = 16 << 20,
    ) -> None:
        if segment_bytes < 1:
            raise PgOutputError(f"segment_bytes must be 1 at least, not {segment_bytes}")
        self._pa = require_pyarrow()
        _require_numpy()
        self.directory = Path(directory)
        self._metadata = metadata
        self._segment_bytes = segment_bytes
        self._lock = claim_directory(self.directory, "capture", "segments")
        self._unusable: str | None = None  # why, once the writer has failed or was closed
        self._file: BinaryIO | None = None
        self._arrow: Any = None
        self._temporary: list[Path] = []  # of this segment's parts, the open one included
        try:
            self._resume(confirmed_flush_lsn)
        except BaseException as error:
            os.close(self._lock)
            self._failed(error)
            raise

        self._announced = _Announced()
        # Of the transaction: its Begin with the LSN of its header; None outside of one.
        self._begin: tuple[int, bytes] | None = None
        self._transaction: tuple[int, int, int] | None = None  # commit LSN, commit time, xid
        self._seq = 0
        # Of the segment.
        self._first_lsn: int | None = None
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
        """Throw away what is not durable yet, and let others have the directory."""
        if self._lock < 0:
            return
        try:
            # It is not closed: that would write the footer of a file that is deleted next.
            self._arrow = None
            if self._file is not None:
                self._file.close()
                self._file = None
            for path in self._temporary:
                path.unlink(missing_ok=True)
            self._temporary = []
        finally:
            os.close(self._lock)
            self._lock = -1
            self._unusable = self._unusable or "it is closed"

    def _failed(self, error: BaseException) -> None:
        """Note an error, after which the writer is refused, and raise it as ours if the disk's."""
        self._unusable = f"it failed before ({printable(str(error)) or type(error).__name__})"
        if isinstance(error, OSError):
            raise PgOutputError(
                f"can't write a segment in {self.directory}: {error.strerror or error}; nothing is "
                f"lost, the slot keeps what is not acknowledged"
            ) from error

    def _check_usable(self) -> None:
        """Refuse a writer that has failed or was closed."""
        if self._unusable is not None:
            raise PgOutputError(
                f"this writer of {self.directory} can't be used any more: {self._unusable}; make a "
                f"new one, which goes on where the directory ends"
            )

    # --- beginning

    def _resume(self, confirmed_flush_lsn: int) -> None:
        """Find where to go on, and delete what a capture that was killed has left.

        What the directory holds is checked against the slot first, so that nothing is deleted which
        the server does not send again.
        """
        groups, unfinished = chain(listed(self.directory))
        if groups or unfinished is not None:
            newest = unfinished or groups[-1]
            differences = self._metadata.differences(newest.metadata)
            if differences:
                raise PgOutputError(
                    f"the segments in {self.directory} are not of this slot: "
                    f"{'; '.join(differences)}; give another directory"
                )
        last_end = groups[-1].parts[0].end_lsn if groups else None
        acknowledged = self._read_position()
        known = [lsn for lsn in (last_end, acknowledged) if lsn is not None]
        self.position = max(known, default=confirmed_flush_lsn)
        slot = f"slot {self._metadata.slot!r} is at {format_lsn(confirmed_flush_lsn)}"
        if unfinished is not None:
            first = unfinished.parts[0].first_lsn
            if first < max(self.position, confirmed_flush_lsn):
                raise PgOutputError(
                    f"{unfinished.name} is not complete: there are its parts {unfinished.numbers}, "
                    f"without the last, and the server does not send it again: {slot}, beyond its "
                    f"start {format_lsn(first)}; {RESTORE}"
                )
        if confirmed_flush_lsn > self.position:
            raise PgOutputError(
                f"{slot}, beyond the end {format_lsn(self.position)} of what is in "
                f"{self.directory}: the changes between them are not in it: a capture into another "
                f"directory may have them, someone else has read the slot, or segments were "
                f"deleted; bring the segments from there, or begin with a new copy of the "
                f"tables and an empty directory"
            )
        self._clean_up(unfinished)
        if not known:
            # Else nobody would notice that the slot moved on before the first segment was written.
            self._write_position(self.position)
        # Where the next segment goes on: at the end of the last one, though the server may have
        # told since that nothing came behind it.
        self._start_lsn = self.position if last_end is None else last_end

    def _clean_up(self, unfinished: SegmentGroup | None) -> None:
        """Delete the parts of a segment without its last one, and temporary files.

        The parts go first: by the temporary file of their last one they are known as such.
        """
        if unfinished is not None:
            for segment in unfinished.parts:
                segment.path.unlink()
            fsync_path(self.directory)
        for path in self.directory.iterdir():
            if TEMPORARY.fullmatch(path.name):
                path.unlink()
        fsync_path(self.directory)

    def _read_position(self) -> int | None:
        """How far the slot was acknowledged where nothing was landed; None if it never was."""
        path = self.directory / POSITION_NAME
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            found = SegmentMetadata.from_json(json.dumps(fields["metadata"]))
            position = parse_lsn(fields["position"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, PgOutputError) as error:
            raise PgOutputError(
                f"can't read {path} ({error}); it says how far the slot was acknowledged: restore "
                f"it, or begin with a new slot and directory"
            ) from error
        differences = self._metadata.differences(found)
        if differences:
            raise PgOutputError(
                f"{path} is not of this slot: {'; '.join(differences)}; give another directory"
            )
        return position

    # --- frames

    def write(self, lsn: int, frame: bytes) -> int | None:
        """Take the next frame.

        Parameters
        ----------
        lsn : int
            The start LSN of its XLogData header.
        frame : bytes

        Returns
        -------
        int or None
            The new `position`, if a segment was completed: it may be acknowledged.

        Raises
        ------
        PgOutputError
            The frame is malformed or not what follows in protocol version 1, the disk refuses, the
            writer failed before, or it is closed.
        """
        # What `_guarded` does is written out here: its call would be made for every frame.
        if self._unusable is not None:
            self._check_usable()
        try:
            tag = frame[0] if frame else 0
            if tag in _ROW_TAGS:
                if self._begin is None:
                    raise self._out_of_order(frame, "outside of a transaction")
                self._append(lsn, self._seq, frame)
                self._seq += 1
                if self._pending_bytes < _BATCH_BYTES and len(self._frames) < _BATCH_FRAMES:
                    return None
            else:
                self._write_other(tag, lsn, frame)
            return self._cut()
        except DecodeError as error:
            self._failed(error)
            raise PgOutputError(
                f"the server sent a malformed frame at LSN {format_lsn(lsn)}: {error}"
            ) from error
        except BaseException as error:
            self._failed(error)
            raise

    def _write_other(self, tag: int, lsn: int, frame: bytes) -> None:
        """Take a frame that is none of Insert, Update, Delete."""
        if tag == ord("B"):
            self._on_begin(lsn, frame)
        elif tag == ord("C"):
            self._on_commit(lsn, frame)
        elif tag == ord("A"):
            # PostgreSQL 18 sends the abort of transactions that it never streamed, in protocol
            # version 1 too.
            return
        elif tag in _ANNOUNCING_TAGS:
            self._announced.take(frame)
            if self._arrow is not None:  # else it is written when a file is opened
                self._append(lsn, -1, frame)
        elif tag == ord("M") and self._begin is None:
            (message_lsn,) = _read_message(frame)
            self._open_at(message_lsn)
            self._append(lsn, -1, frame)
            self._end_lsn = max(self._end_lsn, message_lsn)
        elif self._begin is None:
            raise self._out_of_order(frame, "outside of a transaction")
        elif tag == ord("T"):
            (count,) = _read_truncate(frame)
            self._append(lsn, self._seq, frame)
            self._seq += count
        elif tag in (ord("M"), ord("O")):
            self._append(lsn, -1, frame)
        else:
            raise self._out_of_order(frame, "not of protocol version 1")

    def _out_of_order(self, frame: bytes, why: str) -> PgOutputError:
        return PgOutputError(
            f"the server sent a frame with tag {frame[:1].decode('latin-1')!r} {why}, after LSN "
            f"{format_lsn(self._end_lsn)}; segments are of protocol version 1"
        )

    def _on_begin(self, lsn: int, frame: bytes) -> None:
        if self._begin is not None:
            raise self._out_of_order(frame, "within a transaction")
        commit_lsn, commit_time, xid = _read_begin(frame)
        if commit_lsn < self._end_lsn:
            raise PgOutputError(
                f"the server sent the transaction {xid} that was committed at "
                f"{format_lsn(commit_lsn)}, before {format_lsn(self._end_lsn)} up to where it "
                f"has sent everything"
            )
        self._open_at(commit_lsn)
        self._begin = (lsn, frame)
        self._transaction = (commit_lsn, commit_time, xid)
        self._seq = 0
        self._runs.append((len(self._frames), self._transaction))
        self._append(lsn, -1, frame)

    def _on_commit(self, lsn: int, frame: bytes) -> None:
        if self._transaction is None:
            raise self._out_of_order(frame, "without a Begin")
        commit_lsn, end_lsn = _read_commit(frame)
        if commit_lsn != self._transaction[0]:
            raise PgOutputError(
                f"Commit at {format_lsn(commit_lsn)} follows the Begin of the transaction that "
                f"commits at {format_lsn(self._transaction[0])}"
            )
        self._append(lsn, -1, frame)
        self._begin = self._transaction = None
        self._runs.append((len(self._frames), None))
        self._end_lsn = end_lsn

    def _cut(self) -> int | None:
        """After a frame: write the batch, end the part or complete the segment if they are full."""
        if self._pending_bytes >= _BATCH_BYTES or len(self._frames) >= _BATCH_FRAMES:
            self._write_batch()
        if self._begin is not None:
            if self._part_bytes >= 2 * self._segment_bytes:
                self._finish_part(last=False)
                self._open_part()
        elif (
            len(self._temporary) > 1
            or self._part_bytes + self._pending_bytes >= self._segment_bytes
        ):
            return self.flush()
        return None

    @property
    def in_transaction(self) -> bool:
        """Whether a transaction's Commit is still to come."""
        return self._begin is not None

    @property
    def end_lsn(self) -> int:
        """LSN of the end of the last whole transaction that was written, durable or not."""
        return self._end_lsn

    @property
    def is_idle(self) -> bool:
        """Whether all frames that were written are durable."""
        return self._first_lsn is None and self._begin is None and not self._frames

    @_guarded
    def flush(self) -> int | None:
        """Complete the segment, as when nothing more comes; not within a transaction.

        Returns
        -------
        int or None
            The new `position`, which may be acknowledged; None if nothing was pending, or a
            transaction is open.

        Raises
        ------
        PgOutputError
            The disk refuses, the writer failed before, or it is closed.
        """
        if self._begin is not None or self._first_lsn is None:
            return None
        self._finish_part(last=True)
        for part, path in enumerate(self._temporary):
            if 0 < part == len(self._temporary) - 1:
                # So no crash of the machine leaves the last part with its name, and another
                # one without.
                fsync_path(self.directory)
            path.rename(self.directory / segment_name(self._first_lsn, self._end_lsn, part))
        fsync_path(self.directory)
        self._temporary = []
        self._first_lsn = None
        self.position = self._start_lsn = self._end_lsn
        return self.position

    @_guarded
    def advance(self, lsn: int) -> int | None:
        """Keep, durably, that the server has nothing to send before an LSN.

        Parameters
        ----------
        lsn : int
            The LSN of a keepalive.

        Returns
        -------
        int or None
            The LSN, which may be acknowledged; None if frames are pending, or it is not new.

        Raises
        ------
        PgOutputError
            The disk refuses, the writer failed before, or it is closed.
        """
        if not self.is_idle or lsn <= self.position:
            return None
        self._write_position(lsn)
        self.position = self._end_lsn = lsn
        return lsn

    def _write_position(self, lsn: int) -> None:
        fields = {
            "position": format_lsn(lsn),
            "metadata": json.loads(self._metadata.to_json()),
        }
        write_whole(self.directory / POSITION_NAME, [json.dumps(fields)])

    # --- files

    def _new_batch(self) -> None:
        self._lsns = array("Q")
        self._seqs = array("q")
        self._frames: list[bytes] = []
        self._pending_bytes = 0
        # The row from which on a transaction is open, and its values; None: none is open.
        self._runs: list[tuple[int, tuple[int, int, int] | None]] = [(0, self._transaction)]

    def _append(self, lsn: int, seq: int, frame: bytes) -> None:
        """Put a frame into the batch; `seq` is -1 for one without rows."""
        self._lsns.append(lsn)
        self._seqs.append(seq)
        self._frames.append(frame)
        self._pending_bytes += len(frame)

    def _open_at(self, lsn: int) -> None:
        """Begin a segment, whose first commit or message is at an LSN, if none has begun."""
        if self._first_lsn is None:
            self._first_lsn = lsn
            self._open_part()

    def _open_part(self) -> None:
        """Open a new file, which begins with what was announced before, and with the Begin."""
        part = len(self._temporary)
        if part > MAX_PART:
            raise PgOutputError(
                f"a transaction needs more than {MAX_PART + 1} parts; give a larger segment_bytes"
            )
        path = self.directory / f".{part:05d}.arrow.tmp"
        self._temporary.append(path)
        self._file = path.open("xb")
        metadata = dataclasses.replace(self._metadata, start_lsn=self._start_lsn)
        self._metadata_json = metadata.to_json().encode()
        schema = segment_schema().with_metadata({METADATA_KEY: self._metadata_json})
        self._arrow = self._pa.ipc.new_file(self._file, schema)
        self._batches = 0
        self._part_bytes = 0
        self._new_batch()
        self._runs = [(0, None)]
        for frame in self._announced.frames():
            self._append(ANNOUNCED_LSN, -1, frame)
        if self._begin is not None:
            self._runs.append((len(self._frames), self._transaction))
            self._append(self._begin[0], -1, self._begin[1])

    def _write_batch(self) -> None:
        """Write the pending frames to the file, as a record batch."""
        import numpy as np

        pa = self._pa
        count = len(self._frames)
        if count == 0:
            return
        starts = [start for start, _ in self._runs]
        lengths = np.diff([*starts, count])
        transactions = [transaction or (0, 0, 0) for _, transaction in self._runs]
        within = np.repeat([transaction is not None for _, transaction in self._runs], lengths)
        seqs = np.frombuffer(self._seqs, np.int64)

        def column(values: np.ndarray[Any, Any], type_: Any, valid: Any) -> Any:
            validity = None if valid.all() else pa.py_buffer(np.packbits(valid, bitorder="little"))
            return pa.Array.from_buffers(type_, count, [validity, pa.py_buffer(values)])

        def of_transaction(index: int, dtype: type[np.generic], type_: Any) -> Any:
            values = np.array([transaction[index] for transaction in transactions], dtype)
            return column(np.repeat(values, lengths), type_, within)

        self._write_arrow(
            [
                pa.Array.from_buffers(pa.uint64(), count, [None, pa.py_buffer(self._lsns)]),
                of_transaction(0, np.uint64, pa.uint64()),
                of_transaction(1, np.int64, pa.int64()),
                of_transaction(2, np.uint32, pa.uint32()),
                column(seqs, pa.int64(), seqs >= 0),
                pa.array(self._frames, pa.binary()),
            ]
        )
        self._part_bytes += self._pending_bytes
        self._new_batch()

    def _write_arrow(self, columns: list[Any], mark: bytes | None = None) -> None:
        """Write a record batch with its checksum; with a mark it is the file's last."""
        batch = self._pa.RecordBatch.from_arrays(columns, schema=segment_schema())
        more = b"" if mark is None else self._metadata_json + mark
        crc = checksum(self._batches, batch, more)
        if crc is None:
            raise PgOutputError("a record batch of the segment has buffers that are too short")
        custom = {CRC_KEY: crc.encode()} | ({} if mark is None else {END_KEY: mark})
        self._arrow.write_batch(batch, custom_metadata=custom)
        self._batches += 1

    def _finish_part(self, *, last: bool) -> None:
        """Write what is pending and the end mark, and have the file on disk."""
        self._write_batch()
        empty = [self._pa.array([], field.type) for field in segment_schema()]
        self._write_arrow(empty, LAST_PART if last else OTHER_PART)
        file = cast("BinaryIO", self._file)
        self._arrow.close()
        file.flush()
        os.fsync(file.fileno())
        file.close()
        self._arrow = self._file = None
