"""Segments: pgoutput frames landed in Arrow IPC files, as whole transactions in commit order.

This module alone knows their names, columns, metadata, checksums, where one ends and how a
directory of them is continued. A segment holds frames of protocol version 1: each transaction from
its Begin to its Commit, transactions one after the other, and non-transactional logical messages
between them. No reader needs to know more than one file: every file begins with the Types and
Relations in force.

**Name.** ``{first:016X}-{end:016X}-{part:05d}.arrow``. `first` is the LSN of the first commit
record, or of the first non-transactional message if that comes before. `end` is where to go on: the
end LSN of the last commit, or the LSN of a non-transactional message after it, which is where that
message's record ends. So a transaction belongs to a segment if and only if ``first <= commit LSN <
end``. Transactions larger
than a segment span several parts with one `first` and `end`; each further part begins with the
transaction's Begin, again, after the Types and Relations.

**Columns.** `lsn` (uint64: of the XLogData header; 0 for Type and Relation), `commit_lsn` (uint64),
`commit_time` (int64: microseconds since 2000-01-01 UTC, as in the frame) and `xid` (uint32) of the
transaction, null outside of one; `seq` (int64: position of the frame's first row in its
transaction, from 0, null for frames without rows; a Truncate of k relations has k rows), `data`
(binary: the frame).
What is repeated at the start of a file has lsn 0 and nulls; a repeated Begin is as it was.

**Metadata.** The schema's key ``pgoutput_fast.segment`` is the JSON of `SegmentMetadata`. Each
record batch's custom metadata has ``pgoutput_fast.crc32``: `zlib.crc32`, as 8 hexadecimal digits,
over the batch's index in the file, the number of rows, and of each column the number of nulls
(8 bytes each, little endian) and the buffers (validity if there are nulls, offsets, values). Each
file's last batch is empty and has ``pgoutput_fast.end``, ``last`` in the last part of a segment and
``more`` in the others; its checksum goes on over the value of ``pgoutput_fast.segment`` and this
one. So batches that are lost, doubled or in another order are seen, and so are damaged metadata.

**Durability.** A file is written under a temporary name, fsynced and renamed, and the directory is
fsynced; of several parts the last is renamed last, after another fsync of the directory. Only then
does the writer name the end LSN that may be acknowledged to the server. So parts without their last
one were never acknowledged, if nobody deleted it; any other file that is damaged was.
On an idle database the server's position moves without frames:
``position.json`` keeps what was acknowledged so, and where the directory began. Segments that are
no longer needed may be deleted, oldest first; the last one stays: it says where to go on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import functools
import itertools
import json
import os
import re
import struct
import zlib
from array import array
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

from .errors import PgOutputError, printable
from .lsn import format_lsn, parse_lsn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import BinaryIO

    import pyarrow as pa
    from typing_extensions import ParamSpec, Self

    _P = ParamSpec("_P")
_R = TypeVar("_R")

__all__ = [
    "FORMAT_VERSION",
    "Segment",
    "SegmentMetadata",
    "SegmentReader",
    "SegmentWriter",
    "list_segments",
    "segment_schema",
]

FORMAT_VERSION = 1

_METADATA_KEY = b"pgoutput_fast.segment"
_CRC_KEY = b"pgoutput_fast.crc32"
_END_KEY = b"pgoutput_fast.end"
_NAME = re.compile(r"([0-9A-F]{16})-([0-9A-F]{16})-([0-9]{5})\.arrow", re.ASCII)
_ROW_TAGS = frozenset(b"IUD")
_TEMPORARY = re.compile(r"\.([0-9]{5})\.arrow\.tmp|\.position\.json\.tmp", re.ASCII)
_POSITION_NAME = "position.json"
_MAX_PART = 99999
_LAST_PART = b"last"
_OTHER_PART = b"more"
# The server has forgotten what was acknowledged: it can't be captured again.
_RESTORE = (
    "restore it from a copy; without one, begin with a new slot, snapshot and empty directory"
)

# A record batch is what a reader holds in memory, and what it decodes at once.
_BATCH_FRAMES = 16384
_BATCH_BYTES = 4 << 20

_BEGIN = struct.Struct(">qqI")  # after the tag: final LSN, commit time, xid
_COMMIT = struct.Struct(">BQQq")  # flags, commit LSN, end LSN, commit time
_UINT32 = struct.Struct(">I")
_MESSAGE = struct.Struct(">BQ")  # flags, LSN
_COUNT = struct.Struct("<q")
_COUNTS = struct.Struct("<qq")


def require_pyarrow() -> Any:
    """The module pyarrow with its IPC formats; an error that says what to do if it is missing."""
    try:
        import pyarrow as pa
        import pyarrow.ipc
    except ImportError as error:
        raise PgOutputError(
            f"segments need pyarrow ({error}); install the extra pgoutput-fast[arrow]"
        ) from error
    return pa


def _require_numpy() -> None:
    try:
        import numpy  # noqa: F401
    except ImportError as error:
        raise PgOutputError(f"segments are written with numpy ({error}); install numpy") from error


def segment_schema() -> pa.Schema:
    """Arrow schema of every segment, without its metadata."""
    pa = require_pyarrow()
    return pa.schema(
        [
            pa.field("lsn", pa.uint64(), nullable=False),
            pa.field("commit_lsn", pa.uint64()),
            pa.field("commit_time", pa.int64()),
            pa.field("xid", pa.uint32()),
            pa.field("seq", pa.int64()),
            pa.field("data", pa.binary(), nullable=False),
        ]
    )


@dataclasses.dataclass(frozen=True)
class SegmentMetadata:
    """What a segment says of itself.

    Attributes
    ----------
    system_identifier : str
        Of the database cluster, as IDENTIFY_SYSTEM tells it.
    database, slot : str
        Where the frames come from.
    publications : tuple of str
        As given to START_REPLICATION.
    server_version : int
        As libpq's: 180004 is 18.4.
    encoding : str
        The client_encoding of the session: of all text in the frames, as PostgreSQL names it.
    settings : dict of str to str
        Session settings that shape text values: DateStyle, IntervalStyle, TimeZone …
    options : dict of str to str
        Other options given to START_REPLICATION: proto_version, binary …
    start_lsn : int
        Where this segment goes on: the end of the one before, or where the capture began.
    """

    system_identifier: str
    database: str
    slot: str
    publications: tuple[str, ...]
    server_version: int
    encoding: str
    settings: dict[str, str]
    options: dict[str, str]
    start_lsn: int = 0

    def to_json(self) -> str:
        """JSON with the format's version and the checksum's name beside the attributes."""
        fields = dataclasses.asdict(self) | {"start_lsn": format_lsn(self.start_lsn)}
        return json.dumps({"format_version": FORMAT_VERSION, "checksum": "crc32", **fields})

    @classmethod
    def from_json(cls, text: str | bytes) -> SegmentMetadata:
        """Read what `to_json` wrote.

        Raises
        ------
        PgOutputError
            It is not of this form, or of a newer format version.
        """
        try:
            fields = json.loads(text)
            version = fields.pop("format_version")
            checksum = fields.pop("checksum")
            if version == FORMAT_VERSION and checksum == "crc32":
                fields["start_lsn"] = parse_lsn(fields["start_lsn"])
                fields["publications"] = tuple(fields["publications"])
                return cls(**fields)
        except (ValueError, KeyError, TypeError, AttributeError, PgOutputError) as error:
            raise PgOutputError(f"its metadata are not a segment's ({error!r})") from error
        raise PgOutputError(
            f"its format version is {version!r} with checksum {checksum!r}, this version of "
            f"pgoutput_fast reads {FORMAT_VERSION} with 'crc32'; update pgoutput_fast"
        )

    def differences(self, other: SegmentMetadata) -> list[str]:
        """Sentences on why segments of the two can't stand in one directory."""
        return [
            f"{name} {getattr(other, name)!r} is not {getattr(self, name)!r}"
            for name in ("system_identifier", "database", "slot")
            if getattr(self, name) != getattr(other, name)
        ]


class Segment(NamedTuple):
    """One file of a directory of segments, as its name describes it."""

    first_lsn: int
    end_lsn: int
    part: int
    path: Path

    @classmethod
    def from_path(cls, path: str | os.PathLike[str]) -> Segment:
        """Parse the name of a segment's file.

        Raises
        ------
        PgOutputError
            It is no name of a segment.
        """
        path = Path(path)
        match = _NAME.fullmatch(path.name)
        if match is None:
            raise PgOutputError(
                f"{path} is no name of a segment, which is "
                f"{{first LSN}}-{{end LSN}}-{{part}}.arrow with 16, 16 and 5 digits"
            )
        return cls(int(match[1], 16), int(match[2], 16), int(match[3]), path)


def _segment_name(first_lsn: int, end_lsn: int, part: int) -> str:
    return f"{first_lsn:016X}-{end_lsn:016X}-{part:05d}.arrow"


def _checksum(index: int, batch: pa.RecordBatch, more: bytes = b"") -> str | None:
    """The CRC of a file's batch as text; None if its buffers are too short for what they say.

    Each column counts with the exact bytes that its values take: how much padding follows is
    the Arrow library's choice. `more` is what the end batch answers for.
    """
    rows = batch.num_rows
    crc = zlib.crc32(_COUNTS.pack(index, rows))
    for column in batch.columns:
        validity, *buffers = column.buffers()
        nulls = column.null_count
        crc = zlib.crc32(_COUNT.pack(nulls), crc)
        parts = []
        if nulls:
            parts.append((validity, (rows + 7) // 8))
        if len(buffers) == 1:
            parts.append((buffers[0], rows * column.type.bit_width // 8))
        elif rows:
            offsets, values = buffers
            size = (rows + 1) * 4
            if offsets is None or offsets.size < size:
                return None
            length = int.from_bytes(memoryview(offsets)[size - 4 : size], "little")
            parts += [(offsets, size), (values, length)]
        for buffer, size in parts:
            if size:
                if buffer is None or buffer.size < size:
                    return None
                crc = zlib.crc32(memoryview(buffer)[:size], crc)
    return f"{zlib.crc32(more, crc):08x}"


class SegmentReader:
    """The record batches of one segment, each checked against its checksum.

    Use it as a context manager and iterate over it. One batch is in memory at a time.

    Attributes
    ----------
    path : pathlib.Path
    metadata : SegmentMetadata
    is_last_part : bool
        Whether the file is the last, or only, part of its segment.

    Raises
    ------
    PgOutputError
        The file is no segment, of another version, cut short or damaged. The error names the file.
        Metadata and the number of batches are checked at once, a batch when it is read.
    """

    path: Path
    metadata: SegmentMetadata
    is_last_part: bool

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        pa = require_pyarrow()
        # Not mapped into memory: a file that shrinks under a map kills the process.
        try:
            self._file = pa.OSFile(str(self.path))
        except OSError as error:
            raise PgOutputError(
                f"can't open segment {self.path}: {error.strerror or error}"
            ) from error
        try:
            with self._errors():
                self._reader = pa.ipc.open_file(self._file)
                schema = self._reader.schema
                found = (schema.metadata or {}).get(_METADATA_KEY)
            if found is None or not schema.remove_metadata().equals(segment_schema()):
                raise PgOutputError(
                    f"{self.path} is an Arrow file, but no segment, or a damaged one: its schema "
                    f"or metadata are others; give a file that a capture wrote"
                )
            try:
                self.metadata = SegmentMetadata.from_json(found)
            except PgOutputError as error:
                raise PgOutputError(f"can't read segment {self.path}: {error}") from error
            self._batches, self.is_last_part = self._check_end(found)
        except BaseException:
            self._file.close()
            raise

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        pa = require_pyarrow()
        try:
            yield
        except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
            raise PgOutputError(
                f"{self.path} is no segment, or is cut short or damaged "
                f"({printable(str(error))}); {_RESTORE}"
            ) from error

    def _damaged(self, what: str) -> PgOutputError:
        return PgOutputError(f"{self.path} is damaged: {what}; {_RESTORE}")

    def _batch(self, index: int) -> tuple[pa.RecordBatch, dict[bytes, bytes]]:
        with self._errors():
            batch, custom = self._reader.get_batch_with_custom_metadata(index)
            return batch, dict(custom or {})

    def _check(
        self, index: int, batch: pa.RecordBatch, custom: dict[bytes, bytes], more: bytes = b""
    ) -> None:
        found = _checksum(index, batch, more)
        expected = custom.get(_CRC_KEY, b"").decode("ascii", "replace")
        if found != expected:
            what = "the end mark with the metadata" if more else f"record batch {index}"
            # Of a damaged file: it may be anything.
            shown = printable(expected[:16]) or "one"
            raise self._damaged(f"{what} has checksum {found}, expected {shown}")

    def _check_end(self, metadata: bytes) -> tuple[int, bool]:
        """How many batches the footer has before the end mark, and if the mark is a last part's."""
        with self._errors():
            last = self._reader.num_record_batches - 1
        if last < 0:
            raise self._damaged("its footer has no record batches, where each segment has one")
        batch, custom = self._batch(last)
        mark = custom.get(_END_KEY)
        if mark is None:
            raise self._damaged(
                f"the last of its {last + 1} record batches is no end mark, so that others may "
                f"be missing"
            )
        self._check(last, batch, custom, metadata + mark)
        return last, mark == _LAST_PART

    def __repr__(self) -> str:
        return f"<SegmentReader {str(self.path)!r}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        for index in range(self._batches):
            batch, custom = self._batch(index)
            self._check(index, batch, custom)
            yield batch


def _files(directory: Path) -> list[Path]:
    try:
        return list(directory.iterdir())
    except OSError as error:
        raise PgOutputError(
            f"can't read directory {directory} of segments: {error.strerror}"
        ) from error


def _listed(directory: Path) -> list[Segment]:
    return sorted(
        Segment.from_path(path)
        for path in _files(directory)
        if path.suffix == ".arrow" and not path.name.startswith(".")
    )


class _Group(NamedTuple):
    """The parts of one segment."""

    parts: list[Segment]
    complete: bool
    has_last: bool
    """Whether its last part is there: it was renamed when all others had been."""
    metadata: SegmentMetadata

    @property
    def name(self) -> str:
        return f"segment {self.parts[0].path}"

    @property
    def numbers(self) -> str:
        return ", ".join(str(segment.part) for segment in self.parts)


def _check_pair(before: SegmentReader, reader: SegmentReader) -> None:
    """Refuse two files of which the second can't follow the first."""
    differences = before.metadata.differences(reader.metadata)
    if differences:
        raise PgOutputError(
            f"{reader.path} does not go together with {before.path}: {'; '.join(differences)}"
        )
    if reader.path.name == before.path.name:
        once = f", once as {before.path}" if before.path != reader.path else ""
        raise PgOutputError(f"{reader.path} is given twice{once}")


def _groups(segments: list[Segment]) -> Iterator[_Group]:
    """The segments of sorted files that are of one slot."""
    before: SegmentReader | None = None
    for _, grouped in itertools.groupby(segments, lambda s: (s.first_lsn, s.end_lsn)):
        parts = list(grouped)
        last = []
        for segment in parts:
            with SegmentReader(segment.path) as reader:
                last.append(reader.is_last_part)
            if before is not None:
                _check_pair(before, reader)
            before = reader
        numbers = [segment.part for segment in parts]
        complete = numbers == list(range(len(parts))) and sum(last) == last[-1]
        yield _Group(parts, complete, any(last), reader.metadata)


def _chain(segments: list[Segment]) -> tuple[list[_Group], _Group | None]:
    """The complete segments, and what is there of one at the end without its last part.

    Raises
    ------
    PgOutputError
        As `list_segments` says.
    """
    groups = list(_groups(segments))
    for before, group in itertools.pairwise(groups):
        end = before.parts[0].end_lsn
        if group.parts[0].first_lsn < end or group.metadata.start_lsn < end:
            raise PgOutputError(
                f"{group.name} overlaps with {before.parts[0].path}: they are of two captures, "
                f"which can't be read as one; move the files of one away"
            )
        if group.metadata.start_lsn > end:
            raise PgOutputError(
                f"a segment is missing between {before.parts[0].path} and {group.parts[0].path}: "
                f"from {format_lsn(end)} to {format_lsn(group.metadata.start_lsn)}; restore it, "
                f"or leave out the segments before it"
            )
    unfinished = groups.pop() if groups and not groups[-1].has_last else None
    for group in groups:
        if not group.complete:
            raise _incomplete(group)
    return groups, unfinished


def _incomplete(group: _Group) -> PgOutputError:
    return PgOutputError(
        f"{group.name} is not complete: there are its parts {group.numbers}, and the last or one "
        f"before it is missing; a list of files needs all of them; if it is gone, {_RESTORE}"
    )


def _is_last_part_unnamed(group: _Group) -> bool:
    """Whether the last part has its temporary name still, as a capture names it last."""
    found = (_TEMPORARY.fullmatch(path.name) for path in _files(group.parts[0].path.parent))
    return any(match and match[1] and int(match[1]) > group.parts[-1].part for match in found)


def list_segments(
    path: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
) -> list[Segment]:
    """Complete segments, with all their parts, in commit order: a stretch of one slot's stream.

    Parameters
    ----------
    path : path or iterable of paths
        A directory, of which all are listed; or files, one or several, in any order and from any
        directories. A segment in a directory whose parts a capture is just publishing, at the end,
        is left out: one whose last part has its temporary name still.

    Raises
    ------
    PgOutputError
        The directory can't be read, a file has another name or is damaged, files are of different
        slots, segments overlap, or one is missing between two others, or a part; among several
        paths, one is given twice, or is a directory.
    """
    if not isinstance(path, (str, os.PathLike)):
        return _list_files([Path(one) for one in path])
    directory = Path(path)
    if directory.is_file():
        return _list_files([directory])
    groups, unfinished = _chain(_listed(directory))
    while unfinished is not None and not _is_last_part_unnamed(unfinished):
        # The last part may have got its name since the directory was listed.
        before = unfinished
        groups, unfinished = _chain(_listed(directory))
        if unfinished == before:
            raise _incomplete(unfinished)
    return [segment for group in groups for segment in group.parts]


def _list_files(paths: list[Path]) -> list[Segment]:
    for path in paths:
        if path.is_dir():
            raise PgOutputError(
                f"{path} is a directory, and a list may hold files of segments only; give one "
                f"directory by itself, or the files of several that follow each other"
            )
    segments = sorted(Segment.from_path(path) for path in paths)
    _, unfinished = _chain(segments)
    if unfinished is not None:
        raise _incomplete(unfinished)
    return segments


def has_begun(directory: str | os.PathLike[str]) -> bool:
    """Whether a capture has begun in a directory: it has a position, or segments.

    Raises
    ------
    PgOutputError
        It is there and can't be read.
    """
    directory = Path(directory)
    return directory.exists() and any(
        path.name == _POSITION_NAME or path.suffix == ".arrow" for path in _files(directory)
    )


def fsync_path(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _disk(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """Give what the disk refuses as this package's error."""

    @functools.wraps(method)
    def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return method(*args, **kwargs)
        except OSError as error:
            directory = cast("SegmentWriter", args[0]).directory
            raise PgOutputError(
                f"can't write a segment in {directory}: {error.strerror or error}; nothing is "
                f"lost, the slot keeps what is not acknowledged"
            ) from error

    return wrapped


class SegmentWriter:
    """Lands frames of protocol version 1, in the order in which the server sends them.

    Use it as a context manager: at the end, what is not durable yet is thrown away, as the server
    sends it again. One writer at a time may have a directory. After an error it can't go on.

    Parameters
    ----------
    directory : path
        Made if it is not there.
    metadata : SegmentMetadata
        Of the session; its `start_lsn` is not looked at.
    confirmed_flush_lsn : int
        The slot's. A directory without segments begins there.
    segment_bytes : int
        A segment ends with the first commit after so many bytes of frames; a part, within a
        transaction, after twice as many.

    Raises
    ------
    PgOutputError
        Another capture has the directory, its segments are another slot's, or the slot is beyond
        their end.
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
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            fsync_path(self.directory.parent)
            self._lock = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise PgOutputError(
                f"can't use {self.directory} for segments: {error.strerror}"
            ) from error
        self._file: BinaryIO | None = None
        self._arrow: Any = None
        self._temporary: list[Path] = []  # of this segment's parts, the open one included
        try:
            self._take_lock()
            self._resume(confirmed_flush_lsn)
        except BaseException:
            os.close(self._lock)
            raise

        # Of the session: by relation id and by type OID, as the server sent them.
        self._relations: dict[int, bytes] = {}
        self._types: dict[int, bytes] = {}
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
            # Its only use is to write the footer of a file that is deleted next.
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

    # Start

    def _take_lock(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                raise PgOutputError(
                    f"another capture writes into {self.directory}; stop it, or give another "
                    f"directory"
                ) from None
            raise PgOutputError(
                f"can't lock {self.directory} ({error.strerror}); segments need a local directory"
            ) from error

    def _resume(self, confirmed_flush_lsn: int) -> None:
        """Find where to go on, and delete what a capture that was killed has left.

        Nothing is deleted before it is sure that the server sends it again.
        """
        groups, unfinished = _chain(_listed(self.directory))
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
                    f"start {format_lsn(first)}; {_RESTORE}"
                )
        if confirmed_flush_lsn > self.position:
            raise PgOutputError(
                f"{slot}, beyond the end {format_lsn(self.position)} of what is in "
                f"{self.directory}: the changes between them are not in it: a capture into another "
                f"directory may have them, someone else has read the slot, or segments were "
                f"deleted; bring the segments from there, or begin with a new snapshot and an "
                f"empty directory"
            )
        self._clean_up(unfinished)
        if not known:
            # So that a slot that moves on before the first segment is noticed too.
            self._write_position(self.position)
        # Of the next segment. An idle position does not count: there is no segment up to it.
        self._start_lsn = self.position if last_end is None else last_end

    @_disk
    def _clean_up(self, unfinished: _Group | None) -> None:
        """Delete parts without their last one, then temporary files, which tell what they are."""
        if unfinished is not None:
            for segment in unfinished.parts:
                segment.path.unlink()
            fsync_path(self.directory)
        for path in self.directory.iterdir():
            if _TEMPORARY.fullmatch(path.name):
                path.unlink()
        fsync_path(self.directory)

    def _read_position(self) -> int | None:
        path = self.directory / _POSITION_NAME
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

    # Frames

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
            The frame is not what follows in protocol version 1, or the disk refuses.
        """
        tag = frame[0] if frame else 0
        if tag in _ROW_TAGS:
            if self._begin is None:
                raise self._out_of_order(frame, "outside of a transaction")
            self._append(lsn, self._seq, frame)
            self._seq += 1
            if self._pending_bytes < _BATCH_BYTES and len(self._frames) < _BATCH_FRAMES:
                return None
        else:
            try:
                self._write_other(tag, lsn, frame)
            except struct.error as error:
                raise PgOutputError(
                    f"frame {chr(tag)!r} at LSN {format_lsn(lsn)} is too short: {len(frame)} bytes"
                ) from error
        return self._cut()

    def _write_other(self, tag: int, lsn: int, frame: bytes) -> None:
        if tag == ord("B"):
            self._on_begin(lsn, frame)
        elif tag == ord("C"):
            self._on_commit(lsn, frame)
        elif tag == ord("A"):
            # 18 sends the abort of a transaction that it never streamed, in protocol 1 too.
            return
        elif tag in (ord("R"), ord("Y")):
            (key,) = _UINT32.unpack_from(frame, 1)
            (self._relations if tag == ord("R") else self._types)[key] = frame
            if self._arrow is not None:  # else it is written when a file is opened
                self._append(lsn, -1, frame)
        elif tag == ord("M") and self._begin is None:
            _, message_lsn = _MESSAGE.unpack_from(frame, 1)
            self._open_at(message_lsn)
            self._append(lsn, -1, frame)
            self._end_lsn = max(self._end_lsn, message_lsn)
        elif self._begin is None:
            raise self._out_of_order(frame, "outside of a transaction")
        elif tag == ord("T"):
            (count,) = _UINT32.unpack_from(frame, 1)
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
        commit_lsn, commit_time, xid = _BEGIN.unpack_from(frame, 1)
        commit_lsn &= 0xFFFFFFFFFFFFFFFF
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
        _, commit_lsn, end_lsn, _ = _COMMIT.unpack_from(frame, 1)
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
        """End of what was written, durable or not: of the last whole transaction."""
        return self._end_lsn

    @property
    def is_idle(self) -> bool:
        """Whether all frames that were written are durable."""
        return self._first_lsn is None and self._begin is None and not self._frames

    @_disk
    def flush(self) -> int | None:
        """Complete the segment after its last transaction, as on silence.

        Returns
        -------
        int or None
            The new `position`, which may be acknowledged; None if nothing was pending, or a
            transaction is open.
        """
        if self._begin is not None or self._first_lsn is None:
            return None
        self._finish_part(last=True)
        for part, path in enumerate(self._temporary):
            if 0 < part == len(self._temporary) - 1:
                # No crash of the machine leaves the last part with its name and another without.
                fsync_path(self.directory)
            path.rename(self.directory / _segment_name(self._first_lsn, self._end_lsn, part))
        fsync_path(self.directory)
        self._temporary = []
        self._first_lsn = None
        self.position = self._start_lsn = self._end_lsn
        return self.position

    def advance(self, lsn: int) -> int | None:
        """Keep, durably, that the server has nothing for us before an LSN.

        Parameters
        ----------
        lsn : int
            Of a keepalive.

        Returns
        -------
        int or None
            The LSN, which may be acknowledged; None where frames are pending or it is not new.
        """
        if not self.is_idle or lsn <= self.position:
            return None
        self._write_position(lsn)
        self.position = self._end_lsn = lsn
        return lsn

    @_disk
    def _write_position(self, lsn: int) -> None:
        path = self.directory / _POSITION_NAME
        temporary = self.directory / f".{_POSITION_NAME}.tmp"
        fields = {
            "position": format_lsn(lsn),
            "metadata": json.loads(self._metadata.to_json()),
        }
        with temporary.open("w", encoding="utf-8") as file:
            json.dump(fields, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
        fsync_path(self.directory)

    # Files

    def _new_batch(self) -> None:
        self._lsns = array("Q")
        self._seqs = array("q")
        self._frames: list[bytes] = []
        self._pending_bytes = 0
        # From which row on which transaction.
        self._runs: list[tuple[int, tuple[int, int, int] | None]] = [(0, self._transaction)]

    def _append(self, lsn: int, seq: int, frame: bytes) -> None:
        self._lsns.append(lsn)
        self._seqs.append(seq)
        self._frames.append(frame)
        self._pending_bytes += len(frame)

    def _open_at(self, lsn: int) -> None:
        if self._first_lsn is None:
            self._first_lsn = lsn
            self._open_part()

    @_disk
    def _open_part(self) -> None:
        """A new file, with what was announced before it."""
        part = len(self._temporary)
        if part > _MAX_PART:
            raise PgOutputError(
                f"a transaction needs more than {_MAX_PART + 1} parts; give a larger segment_bytes"
            )
        path = self.directory / f".{part:05d}.arrow.tmp"
        self._temporary.append(path)
        self._file = path.open("xb")
        metadata = dataclasses.replace(self._metadata, start_lsn=self._start_lsn)
        self._metadata_json = metadata.to_json().encode()
        schema = segment_schema().with_metadata({_METADATA_KEY: self._metadata_json})
        self._arrow = self._pa.ipc.new_file(self._file, schema)
        self._batches = 0
        self._part_bytes = 0
        self._new_batch()
        self._runs = [(0, None)]
        for frame in [*self._types.values(), *self._relations.values()]:
            self._append(0, -1, frame)
        if self._begin is not None:
            self._runs.append((len(self._frames), self._transaction))
            self._append(self._begin[0], -1, self._begin[1])

    def _write_batch(self) -> None:
        """Hand the pending frames to the file."""
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

    @_disk
    def _write_arrow(self, columns: list[Any], mark: bytes | None = None) -> None:
        """A batch; with a mark it is the end's."""
        batch = self._pa.RecordBatch.from_arrays(columns, schema=segment_schema())
        more = b"" if mark is None else self._metadata_json + mark
        crc = _checksum(self._batches, batch, more)
        if crc is None:
            raise PgOutputError("a record batch of the segment has buffers that are too short")
        custom = {_CRC_KEY: crc.encode()} | ({} if mark is None else {_END_KEY: mark})
        self._arrow.write_batch(batch, custom_metadata=custom)
        self._batches += 1

    @_disk
    def _finish_part(self, *, last: bool) -> None:
        self._write_batch()
        empty = [self._pa.array([], field.type) for field in segment_schema()]
        self._write_arrow(empty, _LAST_PART if last else _OTHER_PART)
        file = cast("BinaryIO", self._file)
        self._arrow.close()
        file.flush()
        os.fsync(file.fileno())
        file.close()
        self._arrow = self._file = None
