"""The file format of segments: names, columns, metadata and checksums.

docs/explanation/change-log-format.md specifies the format. The reader, the listing and the writer
all use the definitions of this module.
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
"""The most frames in a record batch. A reader loads and decodes one record batch at a time."""
BATCH_BYTES = 4 << 20
"""The most bytes of frames in a record batch. A larger frame gets a record batch of its own."""

METADATA_KEY = b"pgoutput_fast.segment"
CRC_KEY = b"pgoutput_fast.crc32"
END_KEY = b"pgoutput_fast.end"
LAST_PART = b"last"
OTHER_PART = b"more"
ANNOUNCED_LSN = 0
"""The value of the column `lsn` for every Relation and Type.

The server's log has no record for these messages. It does not matter whether the server sent them
or the writer repeated them at the beginning of a file.
"""
MAX_PART = 99999
# Advice about a damaged file. A capture can't write it again: the server does not send
# acknowledged changes a second time.
RESTORE = (
    "restore it from a backup; without a backup, start over with a new slot, an empty directory "
    "and new snapshots"
)

_COUNT = struct.Struct("<q")
_COUNTS = struct.Struct("<qq")


def require_pyarrow() -> Any:
    """Return the module pyarrow, with its IPC module imported.

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
    """Return the Arrow schema of every segment, without metadata.

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
    """Return the last record batch of a file: one row that holds the layout index."""
    pa = require_pyarrow()
    nulls = [pa.nulls(1, field.type) for field in segment_schema()]
    lsn, data = pa.array([0], pa.uint64()), pa.array([index], pa.binary())
    return pa.RecordBatch.from_arrays([lsn, *nulls[1:-1], data], schema=segment_schema())


def write_options(compression: str | None) -> pa.ipc.IpcWriteOptions:
    """Return the options with which pyarrow writes a file.

    Parameters
    ----------
    compression : {None, "lz4", "zstd"}
        How the buffers of record batches are compressed.
    """
    return require_pyarrow().ipc.IpcWriteOptions(compression=compression)


@dataclasses.dataclass(frozen=True)
class SegmentMetadata:
    """The description of a segment, stored as JSON in the metadata of its Arrow schema.

    Attributes
    ----------
    system_identifier : str
        Identifies the database cluster, as IDENTIFY_SYSTEM reports it.
    database, slot : str
        The database and the replication slot that the frames come from.
    publications : tuple of str
        The names of the publications, as passed to START_REPLICATION.
    server_version : int
        The server's version as a number of libpq: 180004 is 18.4.
    encoding : str
        The client_encoding of the session, by PostgreSQL's name: the encoding of all text in the
        frames.
    settings : dict of str to str
        Session settings that affect values in text format: DateStyle, IntervalStyle, TimeZone …
    options : dict of str to str
        The other options of START_REPLICATION: proto_version, binary …
    start_lsn : int
        The end of the segment before, or the LSN at which the capture began.
    timeline : int
        The server's timeline; 0 if unknown.
    snapshot : bool
        Whether the file belongs to a table's snapshot instead of a segment. The Inserts of such a
        file are the rows that the table had at `start_lsn`.
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
        """Return the attributes as JSON, with the format version and the name of the checksum.

        Raises
        ------
        PgOutputError
            `start_lsn` is outside the range of an LSN.
        """
        fields = dataclasses.asdict(self) | {"start_lsn": format_lsn(self.start_lsn)}
        return json.dumps({"format_version": FORMAT_VERSION, "checksum": "crc32", **fields})

    @classmethod
    def from_json(cls, text: str | bytes) -> SegmentMetadata:
        """Parse the JSON that `to_json` returns.

        Raises
        ------
        PgOutputError
            The text is malformed, or has another format version or another checksum.
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
                f"its metadata are not those of a segment ({error!r})", code="damaged"
            ) from error
        raise PgOutputError(
            f"its format version is {version!r} with checksum {checksum!r}, but this version of "
            f"pgoutput_fast reads {FORMAT_VERSION} with 'crc32'",
            code="not_supported",
            hint="Use the version of pgoutput_fast that wrote it, or capture into a new directory",
        )

    @property
    def asked(self) -> tuple[object, ...]:
        """The publications and options of the session. They decide which changes arrive."""
        return self.publications, self.options

    @property
    def is_binary(self) -> bool:
        """Whether the server sends values in binary format where a type has one."""
        return self.options.get("binary") == "true"

    def reads_as(self, other: SegmentMetadata) -> bool:
        """Return whether frames of both sessions decode alike, so that one file can hold both."""
        return (self.encoding, self.settings, self.options) == (
            other.encoding, other.settings, other.options
        )  # fmt: skip

    def differences(self, other: SegmentMetadata) -> list[str]:
        """Return, as texts, why segments of the two sessions can't share a directory."""
        return [
            f"{name} {getattr(other, name)!r} is not {getattr(self, name)!r}"
            for name in ("system_identifier", "database", "slot")
            if getattr(self, name) != getattr(other, name)
        ]


class Segment(NamedTuple):
    """One file of a segment, as the name of the file describes it.

    A transaction is in the segment if ``start_lsn <= commit LSN < end_lsn``. All parts of a segment
    have the same `start_lsn` and `end_lsn`.

    Attributes
    ----------
    start_lsn : int
        The end of the segment before, or the LSN at which the directory begins.
    end_lsn : int
        The start of the next segment.
    part : int
        The number of this part, from 0.
    parts : int
        The number of parts that the segment has.
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
            The name is not the name of a segment's file.
        """
        path = Path(path)
        segment = cls.named(path.parent, path.name)
        if segment is None:
            raise PgOutputError(
                f"{path} does not have the name of a segment: "
                "{start LSN}-{end LSN}-{part}-of-{parts}.arrow, with 16, 16, 5 and 5 digits. "
                "If it is a segment, restore its name; otherwise move it away",
                code="not_ours",
                path=str(path),
            )
        return segment

    @classmethod
    def named(cls, directory: Path, name: str) -> Segment | None:
        """Parse the name of a segment's file; return None if the name has another form."""
        match = SEGMENTS.match(name)
        if match is None or not match[1]:
            return None
        start, end, part, parts = match.groups()
        return cls(int(start, 16), int(end, 16), int(part), int(parts), directory, name)


def segment_name(start_lsn: int, end_lsn: int, part: int, parts: int) -> str:
    """Return the name of a segment's file, which `Segment.from_path` parses."""
    return f"{start_lsn:016X}-{end_lsn:016X}-{part:05d}-of-{parts:05d}.arrow"


def checksum(index: int, batch: pa.RecordBatch, more: bytes = b"") -> str | None:
    """Return the checksum of a record batch as text.

    The checksum leaves padding out, because Arrow libraries pad buffers differently.

    Parameters
    ----------
    index : int
        The batch's index in the file. The checksum covers the index too, so a reader notices lost,
        repeated and exchanged batches.
    batch : pyarrow.RecordBatch
    more : bytes
        More bytes for the checksum to cover. For the end mark: the file's metadata and the mark.

    Returns
    -------
    str or None
        8 hexadecimal digits; None if a buffer is shorter than the rows need.
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
    """Check the arguments of a :class:`SegmentWriter`.

    Raises
    ------
    PgOutputError
        `segment_bytes` is less than 1, or `compression` is unknown.
    """
    byte_count(1).check("segment_bytes", segment_bytes)
    if compression is not None:
        choice("lz4", "zstd").check("compression", compression)
