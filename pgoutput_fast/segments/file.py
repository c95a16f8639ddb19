"""Write one file of a segment."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from .._disk import create_file
from ..errors import PgOutputError
from .format import (
    CRC_KEY,
    END_KEY,
    LAST_PART,
    METADATA_KEY,
    OTHER_PART,
    checksum,
    end_batch,
    require_pyarrow,
    segment_schema,
)
from .layout_index import index_bytes
from .structure import Structure

if TYPE_CHECKING:
    from pathlib import Path

    import pyarrow as pa

    from .format import SegmentMetadata

_NOT_ACKNOWLEDGED = (
    "nothing is lost, because the slot keeps these changes; this is a defect of pgoutput_fast: "
    "report it with this text"
)


class SegmentFile:
    """A file of a segment that is being written.

    It checks each record batch as a reader does, and adds the checksum.

    Parameters
    ----------
    path : pathlib.Path
        The temporary name of the file, which must not exist.
    metadata : SegmentMetadata
    options : pyarrow.ipc.IpcWriteOptions, optional
    part : int
        The number of this part of the segment.

    Attributes
    ----------
    path : pathlib.Path

    Raises
    ------
    OSError
        The file can't be written. All methods raise this.
    PgOutputError
        Raised by `write` and `finish`: readers would refuse the file.
    """

    def __init__(
        self, path: Path, metadata: SegmentMetadata, options: Any = None, part: int = 0
    ) -> None:
        self._pa = require_pyarrow()
        self.path = path
        self._structure = Structure(path, metadata, part, _NOT_ACKNOWLEDGED)
        self._metadata = metadata.to_json().encode()
        self._file = create_file(path)
        schema = segment_schema().with_metadata({METADATA_KEY: self._metadata})
        self._arrow = self._pa.ipc.new_file(self._file, schema, options=options)
        self._begins_at = self._file.tell()
        self._batches = 0

    @property
    def size(self) -> int:
        """Bytes of the record batches written so far."""
        return self._file.tell() - self._begins_at

    def write(self, columns: list[Any]) -> None:
        """Write a record batch with its checksum."""
        batch = self._pa.RecordBatch.from_arrays(columns, schema=segment_schema())
        crc = self._checksum(batch)
        self._structure.check(batch)
        self._write(batch, {CRC_KEY: crc})

    def finish(self, *, last: bool) -> None:
        """Write the end mark with the layout index, and sync the file."""
        self._structure.end(is_last=last)
        end_mark = LAST_PART if last else OTHER_PART
        end = end_batch(index_bytes(self._structure.spans()))
        self._write(
            end, {CRC_KEY: self._checksum(end, self._metadata + end_mark), END_KEY: end_mark}
        )
        self._arrow.close()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def _checksum(self, batch: pa.RecordBatch, more: bytes = b"") -> bytes:
        """Return the checksum of the next record batch."""
        crc = checksum(self._batches, batch, more)
        if crc is None:
            raise PgOutputError(
                "a record batch of the segment has buffers that are too short", code="damaged"
            )
        return crc.encode()

    def _write(self, batch: pa.RecordBatch, custom: dict[bytes, bytes]) -> None:
        self._arrow.write_batch(batch, custom_metadata=custom)
        self._batches += 1

    def discard(self) -> None:
        """Close the incomplete file. The caller deletes it."""
        # Do not close the Arrow writer: that would write the footer.
        self._arrow = None
        self._file.close()
