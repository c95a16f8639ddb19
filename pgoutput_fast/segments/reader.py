"""Read one file of a segment, and check each record batch."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from .._forms import MALFORMED
from ..errors import PgOutputError, printable
from ..lsn import format_lsn
from .format import (
    CRC_KEY,
    END_KEY,
    LAST_PART,
    METADATA_KEY,
    RESTORE,
    Segment,
    SegmentMetadata,
    checksum,
    require_pyarrow,
    segment_schema,
)
from .layout_index import read_index
from .structure import Structure

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator

    import pyarrow as pa
    from typing_extensions import Self

    from .layout_index import Span


class CommitRecord(NamedTuple):
    """The commit of a transaction.

    Fields: lsn; time (in microseconds since 2000-01-01 UTC).
    """

    lsn: int
    time: int


class SegmentReader:
    """Reads the record batches of one file of a segment, and checks checksums and frames.

    Use it as a context manager and iterate over it. It holds one batch in memory at a time.

    Parameters
    ----------
    path : path

    Attributes
    ----------
    path : pathlib.Path
    metadata : SegmentMetadata
    is_last_part : bool
        Whether the file is the last, or only, part of its segment.

    Raises
    ------
    PgOutputError
        The file can't be read, is not a segment, has another format version, is cut short or is
        damaged; or pyarrow is not installed. Metadata and the number of batches are checked when
        the file is opened, each batch when it is read.
    """

    path: Path
    metadata: SegmentMetadata
    is_last_part: bool

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        pa = require_pyarrow()
        # Do not map the file into memory: if a mapped file shrinks, the process is killed.
        try:
            self._file = pa.OSFile(str(self.path))
        except OSError as error:
            raise PgOutputError(
                f"can't open segment {self.path}: {error.strerror or error}",
                code="missing_path" if isinstance(error, FileNotFoundError) else "io_failed",
                path=str(self.path),
            ) from error
        try:
            with self._errors():
                self._reader = pa.ipc.open_file(self._file)
                schema = self._reader.schema
                metadata = (schema.metadata or {}).get(METADATA_KEY)
            if metadata is None or not schema.remove_metadata().equals(segment_schema()):
                raise PgOutputError(
                    f"{self.path} is an Arrow file, but not a segment, or a damaged one: its "
                    "schema or metadata differ",
                    code="not_ours",
                    path=str(self.path),
                    hint="Give a file that a capture wrote",
                )
            try:
                self.metadata = SegmentMetadata.from_json(metadata)
            except PgOutputError as error:
                raise PgOutputError(
                    f"can't read segment {self.path}: {error.message}",
                    code=error.code,
                    path=str(self.path),
                ) from error
            self._batches, self.is_last_part, self._index = self._check_end(metadata)
            named = Segment.named(self.path.parent, self.path.name)
            self._part = None if named is None else named.part
            if named is not None and named.start_lsn != self.metadata.start_lsn:
                raise PgOutputError(
                    f"{self.path} has the name of another segment: its metadata say that it starts "
                    f"at {format_lsn(self.metadata.start_lsn)}",
                    code="damaged",
                    path=str(self.path),
                    hint="Restore its own name",
                )
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
                f"{self.path} is not a segment, or is cut short or damaged "
                f"({printable(str(error))}); {RESTORE}",
                code="damaged",
                path=str(self.path),
            ) from error

    def _damaged(self, detail: str) -> PgOutputError:
        return PgOutputError(
            f"{self.path} is damaged: {detail}; {RESTORE}", code="damaged", path=str(self.path)
        )

    def _batch(self, index: int) -> tuple[pa.RecordBatch, dict[bytes, bytes]]:
        with self._errors():
            batch, custom = self._reader.get_batch_with_custom_metadata(index)
            # pyarrow ends the process when it reads a value with a negative length.
            batch.validate()
            return batch, dict(custom or {})

    def _check(
        self, index: int, batch: pa.RecordBatch, custom: dict[bytes, bytes], more: bytes = b""
    ) -> None:
        actual = checksum(index, batch, more)
        expected = custom.get(CRC_KEY, b"").decode("ascii", "replace")
        if actual != expected:
            part = "the end mark with the metadata" if more else f"record batch {index}"
            # In a damaged file, this may be any bytes of any length.
            shown = printable(expected[:16]) or "one"
            raise self._damaged(f"{part} has checksum {actual}, expected {shown}")

    def _check_end(self, metadata: bytes) -> tuple[int, bool, bytes]:
        """Check the end mark of the file.

        Returns
        -------
        int
            The number of batches before the end mark.
        bool
            Whether the file is the last part of its segment.
        bytes
            The layout index.

        Raises
        ------
        PgOutputError
            There is no end mark, or its checksum is wrong.
        """
        last = self._reader.num_record_batches - 1
        if last < 0:
            raise self._damaged("its footer lists no record batches, but each segment has one")
        batch, custom = self._batch(last)
        end_mark = custom.get(END_KEY)
        if end_mark is None or len(batch) != 1:
            raise self._damaged(
                f"the last of its {last + 1} record batches is not an end mark, so further record "
                "batches may be missing"
            )
        self._check(last, batch, custom, metadata + end_mark)
        return last, end_mark == LAST_PART, batch.column("data")[0].as_py() or b""

    @property
    def index(self) -> list[Span]:
        """The layout index of the file: the spans of the tables that have changes in it.

        Raises
        ------
        PgOutputError
            The layout index is damaged.
        """
        try:
            return read_index(self._index)
        except MALFORMED as error:
            raise self._damaged(
                f"its layout index is not valid ({printable(str(error))})"
            ) from error

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
        structure = Structure(self.path, self.metadata, self._part, RESTORE)
        for index in range(self._batches):
            batch, custom = self._batch(index)
            self._check(index, batch, custom)
            with self._errors():
                structure.check(batch)
            yield batch
        structure.end(is_last=self.is_last_part)

    def newest_commit(self) -> CommitRecord | None:
        """Return the commit of the last transaction; None if the file has no commit.

        Read batches from the end of the file until one has a commit LSN.
        """
        for index in reversed(range(self._batches)):
            batch, custom = self._batch(index)
            self._check(index, batch, custom)
            lsns, times = (batch.column(name).drop_null() for name in ("commit_lsn", "commit_time"))
            if len(lsns):
                return CommitRecord(lsns[-1].as_py(), times[-1].as_py())
        return None


def is_segment(path: Path) -> bool:
    """Return whether an Arrow IPC file is a segment. Other files may be recorded streams.

    Raises
    ------
    PgOutputError
        The file can't be read, or is not an Arrow IPC file.
    """
    pa = require_pyarrow()
    try:
        with path.open("rb"), pa.OSFile(str(path)) as file, pa.ipc.open_file(file) as reader:
            return METADATA_KEY in (reader.schema.metadata or {})
    except OSError as error:
        raise PgOutputError(
            f"can't read {path}: {error.strerror or error}",
            code="missing_path" if isinstance(error, FileNotFoundError) else "io_failed",
            path=str(path),
        ) from error
    except (ValueError, pa.ArrowException) as error:
        raise PgOutputError(
            f"{path} is not an Arrow IPC file, or is cut short or damaged "
            f"({printable(str(error))})",
            code="damaged",
            path=str(path),
        ) from error
