"""The form of segments: names, columns, metadata and checksums.

docs/explanation/change-log-format.md specifies them.

Reader, listing and writer take all of these from here.
"""

from __future__ import annotations

import dataclasses
import json
import os
import struct
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .._forms import MALFORMED, of_form
from ..errors import PgOutputError
from ..lsn import format_lsn, parse_lsn
from ..options import byte_count, choice
from .folders import SEGMENTS

if TYPE_CHECKING:
    import pyarrow as pa

FORMAT_VERSION = 3

BATCH_FRAMES = 16384
"""The most frames of a record batch, which is what a reader holds in memory and decodes at once."""
BATCH_BYTES = 4 << 20
"""The most bytes of its frames, but where it is one frame alone."""

METADATA_KEY = b"pgoutput_fast.segment"
CRC_KEY = b"pgoutput_fast.crc32"
END_KEY = b"pgoutput_fast.end"
LAST_PART = b"last"
OTHER_PART = b"more"
ANNOUNCED_LSN = 0
"""The value of the column `lsn` for a Relation or Type, both for those that the server sends and
for those that are repeated at the beginning of a file. They have no place in the server's log."""
MAX_PART = 99999
# Advice about a damaged file. It can't be captured again, as the server has forgotten what was
# acknowledged.
RESTORE = (
    "restore it from a copy; without one, begin with a new slot, a new copy of the tables and an "
    "empty directory"
)

_COUNT = struct.Struct("<q")
_COUNTS = struct.Struct("<qq")


def require_pyarrow() -> Any:
    """The module pyarrow, with its IPC formats loaded.

    Raises
    ------
    PgOutputError
        pyarrow is not installed.
    """
    try:
        import pyarrow as pa
        import pyarrow.ipc
    except ImportError as error:
        raise PgOutputError(
            f"segments need pyarrow ({error})",
            code="missing_package",
            hint="Install the extra pgoutput-fast[arrow]",
        ) from error
    return pa


def segment_schema() -> pa.Schema:
    """The Arrow schema of every segment, without its metadata.

    Raises
    ------
    PgOutputError
        pyarrow is not installed.
    """
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


def end_batch(index: bytes) -> pa.RecordBatch:
    """Return the record batch with which each file ends: one row with the layout index."""
    pa = require_pyarrow()
    nulls = [pa.nulls(1, field.type) for field in segment_schema()]
    lsn, data = pa.array([0], pa.uint64()), pa.array([index], pa.binary())
    return pa.RecordBatch.from_arrays([lsn, *nulls[1:-1], data], schema=segment_schema())


def write_options(compression: str | None) -> pa.ipc.IpcWriteOptions:
    """How files are written.

    Parameters
    ----------
    compression : {None, "lz4", "zstd"}
    """
    return require_pyarrow().ipc.IpcWriteOptions(compression=compression)


@dataclasses.dataclass(frozen=True)
class SegmentMetadata:
    """The description of a segment, which is in its schema's metadata.

    Attributes
    ----------
    system_identifier : str
        Identifies the database cluster; IDENTIFY_SYSTEM tells it.
    database, slot : str
        The database and the slot from which the frames come.
    publications : tuple of str
        Their names, as they were given to START_REPLICATION.
    server_version : int
        The server's version as libpq has it: 180004 is 18.4.
    encoding : str
        The client_encoding of the session, by PostgreSQL's name: the encoding of all text in the
        frames.
    settings : dict of str to str
        Session settings that shape text values: DateStyle, IntervalStyle, TimeZone …
    options : dict of str to str
        Other options given to START_REPLICATION: proto_version, binary …
    start_lsn : int
        Where this segment goes on: the end of the one before, or where the capture began.
    timeline : int
        The server's timeline; 0 if it is not known.
    snapshot : bool
        Whether the file belongs to a table's snapshot, and is no segment. Its Inserts are the rows
        that were there at `start_lsn`.
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
    timeline: int = 0
    snapshot: bool = False

    def to_json(self) -> str:
        """The attributes as JSON, with the format's version and the checksum's name.

        Raises
        ------
        PgOutputError
            `start_lsn` is out of an LSN's range.
        """
        fields = dataclasses.asdict(self) | {"start_lsn": format_lsn(self.start_lsn)}
        return json.dumps({"format_version": FORMAT_VERSION, "checksum": "crc32", **fields})

    @classmethod
    def from_json(cls, text: str | bytes) -> SegmentMetadata:
        """Read what `to_json` wrote.

        Raises
        ------
        PgOutputError
            The text has another form, or is of another format version.
        """
        try:
            fields = json.loads(text)
            version = fields.pop("format_version")
            checksum = fields.pop("checksum")
            if version == FORMAT_VERSION and checksum == "crc32":
                fields["start_lsn"] = parse_lsn(fields["start_lsn"])
                metadata: SegmentMetadata = of_form(fields, cls)
                return metadata
        except MALFORMED as error:
            raise PgOutputError(
                f"its metadata are not a segment's ({error!r})", code="damaged"
            ) from error
        raise PgOutputError(
            f"its format version is {version!r} with checksum {checksum!r}, this version of "
            f"pgoutput_fast reads {FORMAT_VERSION} with 'crc32'; update pgoutput_fast",
            code="not_supported",
        )

    @property
    def asked(self) -> tuple[object, ...]:
        """What the server was asked for, which decides what it brings."""
        return self.publications, self.options

    @property
    def is_binary(self) -> bool:
        """Whether values are in binary format, if their types have one."""
        return self.options.get("binary") == "true"

    def reads_as(self, other: SegmentMetadata) -> bool:
        """Whether frames of the two sessions mean the same, so that one file can have both."""
        return (self.encoding, self.settings, self.options) == (
            other.encoding, other.settings, other.options
        )  # fmt: skip

    def differences(self, other: SegmentMetadata) -> list[str]:
        """The reasons why segments of the two can't be in one directory, as text."""
        return [
            f"{name} {getattr(other, name)!r} is not {getattr(self, name)!r}"
            for name in ("system_identifier", "database", "slot")
            if getattr(self, name) != getattr(other, name)
        ]


class Segment(NamedTuple):
    """One file of a directory of segments, as its name describes it.

    A transaction is in the segment if ``start_lsn <= its commit LSN < end_lsn``; parts of one
    segment have both in common.

    Attributes
    ----------
    start_lsn : int
        The end of the segment before, or where the directory begins.
    end_lsn : int
    part : int
        From 0.
    parts : int
        How many parts the segment has.
    directory : pathlib.Path
    name : str
    """

    start_lsn: int
    end_lsn: int
    part: int
    parts: int
    directory: Path
    name: str

    @property
    def path(self) -> Path:
        """The file's path."""
        return self.directory / self.name

    @classmethod
    def from_path(cls, path: str | os.PathLike[str]) -> Segment:
        """Parse the name of a segment's file.

        Raises
        ------
        PgOutputError
            The name is not that of a segment.
        """
        path = Path(path)
        segment = cls.named(path.parent, path.name)
        if segment is None:
            raise PgOutputError(
                f"{path} is no name of a segment, which is "
                f"{{start LSN}}-{{end LSN}}-{{part}}-of-{{parts}}.arrow with 16, 16, 5 and 5 "
                "digits: if it is one, give it its name back, else move it away",
                code="not_ours",
                path=str(path),
            )
        return segment

    @classmethod
    def named(cls, directory: Path, name: str) -> Segment | None:
        """Do the same; None if the name is not that of a segment."""
        match = SEGMENTS.match(name)
        if match is None or not match[1]:
            return None
        start, end, part, parts = match.groups()
        return cls(int(start, 16), int(end, 16), int(part), int(parts), directory, name)


def segment_name(start_lsn: int, end_lsn: int, part: int, parts: int) -> str:
    """The name of a segment's file, which `Segment.from_path` parses."""
    return f"{start_lsn:016X}-{end_lsn:016X}-{part:05d}-of-{parts:05d}.arrow"


def checksum(index: int, batch: pa.RecordBatch, more: bytes = b"") -> str | None:
    """The checksum of a record batch as text; None if its buffers are shorter than its rows need.

    Padding is left out, as Arrow libraries differ in it.

    Parameters
    ----------
    index : int
        The batch's index in the file. It is part of the checksum, so that lost, doubled and
        exchanged batches are noticed.
    batch : pyarrow.RecordBatch
    more : bytes
        More bytes that the checksum covers: for the end mark, the file's metadata.
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


def check_options(segment_bytes: int, compression: str | None) -> None:
    """Refuse wrong arguments of a :class:`SegmentWriter`.

    Raises
    ------
    PgOutputError
        `segment_bytes` is less than 1, or there is no such `compression`.
    """
    byte_count(1).check("segment_bytes", segment_bytes)
    if compression is not None:
        choice("lz4", "zstd").check("compression", compression)
