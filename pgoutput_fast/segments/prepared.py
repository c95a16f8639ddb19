"""Prepared transactions, which a capture keeps in files until they are committed or rolled back.

The server sends the changes of a prepared transaction once, at its PREPARE. After the capture has
acknowledged an LSN beyond the PREPARE, a new connection brings only the commit. So the changes are
on disk before that, and stay until the segment with the commit is on disk too.
"""

from __future__ import annotations

import dataclasses
import json
import os
from typing import TYPE_CHECKING, Any

from .._disk import becoming, create_file, fsync_path
from .._forms import of_form
from ..errors import PgOutputError, printable
from .folders import PREPARED
from .format import CRC_KEY, END_KEY, LAST_PART, checksum, require_pyarrow

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ..transactions.assembler import Prepared

_METADATA_KEY = b"pgoutput_fast.prepared"
_FORMAT_VERSION = 2


@dataclasses.dataclass(frozen=True)
class _Header:
    """The description of a prepared transaction in its file; frames are in hexadecimal."""

    format_version: int
    xid: int
    gid: str
    lsn: int
    in_stream: bool
    origin: str | None
    announced_at: list[int]
    announced: list[str]
    known: list[str]


class PreparedTransactions:
    """The files of prepared transactions in a directory of segments.

    Parameters
    ----------
    directory : pathlib.Path
        The directory of the segments. The caller is its only writer.
    position : int
        Everything before this LSN is durable. The files of transactions that were committed or
        rolled back up to it are deleted.

    Raises
    ------
    PgOutputError
        The folder can't be read, or a file can't be deleted.
    """

    def __init__(self, directory: Path, position: int) -> None:
        self._of = directory
        self._directory = PREPARED.path(directory)
        self._position = position
        # Whether the stream has passed the position: the server sends nothing from before it.
        self._is_past = False
        self._paths: dict[tuple[int, str], Path] = {}
        self._ended: list[tuple[int, Path]] = []
        try:
            for name in PREPARED.names(directory):
                match = PREPARED.match(name)
                if match and match[3] and int(match[3], 16) <= position:
                    PREPARED.delete(directory, name)
        except OSError as error:
            raise self._refused(error) from error

    def _refused(self, error: OSError) -> PgOutputError:
        return PgOutputError(
            f"can't store prepared transactions in {self._directory}: {error.strerror or error}. "
            "Nothing is lost: the slot keeps the changes",
            code="io_failed",
            path=str(self._directory),
        )

    def load(self, spill_directory: Path | None) -> Iterator[Prepared]:
        """Yield the transactions that are neither committed nor rolled back, in order of PREPARE.

        Parameters
        ----------
        spill_directory : path, optional
            As for :class:`pgoutput_fast.transactions.Assembler`.

        Raises
        ------
        PgOutputError
            A file can't be read, or is damaged.
        """
        for name in PREPARED.names(self._of):
            path = self._directory / name
            prepared = _read(path, spill_directory)
            self._paths[prepared.xid, prepared.gid] = path
            yield prepared

    def keep(self, prepared: Prepared) -> None:
        """Write a prepared transaction to a synced file, unless it is not needed.

        The server sends a transaction again if the slot's acknowledged position allows it. There
        are three cases for a PREPARE before the position:

        - The transaction has a file: nothing has to be written.
        - It has no file, and the stream has passed the position: the transaction ended before the
          position too. A new file might stay forever, as the end may not come again.
        - It has no file, and the stream has just begun: the transaction may be new, because another
          session may have left it out. Its file is written.

        Raises
        ------
        PgOutputError
            The file can't be written.
        """
        is_there = (prepared.xid, prepared.gid) in self._paths
        if prepared.lsn < self._position and (is_there or self._is_past):
            return
        path = self._directory / f"{prepared.lsn:016X}-{prepared.xid:08X}.arrow"
        try:
            PREPARED.make(self._of)
            with becoming(path) as temporary:
                _write(temporary, prepared)
            fsync_path(self._directory)
        except OSError as error:
            raise self._refused(error) from error
        self._paths[prepared.xid, prepared.gid] = path

    def end(self, xid: int, gid: str, end_lsn: int) -> None:
        """Note that a transaction was committed or rolled back by a record that ends at `end_lsn`.

        Add that LSN to the file's name before anything up to the LSN becomes durable. So the next
        start knows whether the file is still needed. If everything up to the LSN is durable
        already, delete the file instead.

        Raises
        ------
        PgOutputError
            The file can't be renamed or deleted.
        """
        path = self._paths.pop((xid, gid), None)
        if path is None:
            return
        begin = path.name[: len("0123456789ABCDEF-01234567")]
        renamed = path.with_name(f"{begin}-{end_lsn:016X}.arrow")
        is_durable = end_lsn <= self._position
        try:
            if is_durable:
                PREPARED.delete(self._of, path.name)
            else:
                path.rename(renamed)
            fsync_path(self._directory)
        except OSError as error:
            raise self._refused(error) from error
        if not is_durable:
            self._ended.append((end_lsn, renamed))

    def forget(self, position: int) -> None:
        """Delete the files that are not needed any more, now that `position` is durable.

        Parameters
        ----------
        position : int
            Everything before this LSN is durable, and the stream has passed it.

        Raises
        ------
        PgOutputError
            A file can't be deleted.
        """
        self._position, self._is_past = position, True
        try:
            for end_lsn, path in self._ended:
                if end_lsn <= position:
                    PREPARED.delete(self._of, path.name, missing_ok=True)
        except OSError as error:
            raise self._refused(error) from error
        self._ended = [entry for entry in self._ended if entry[0] > position]


def _schema(header: bytes) -> Any:
    pa = require_pyarrow()
    return pa.schema(
        [
            pa.field("lsn", pa.uint64(), nullable=False),
            pa.field("data", pa.binary(), nullable=False),
        ],
        {_METADATA_KEY: header},
    )


def _write(path: Path, prepared: Prepared) -> None:
    """Write and sync a file under its temporary name."""
    import numpy as np

    pa = require_pyarrow()
    stage = prepared.stage
    header = json.dumps(
        dataclasses.asdict(
            _Header(
                _FORMAT_VERSION, prepared.xid, prepared.gid, prepared.lsn, stage.in_stream,
                stage.origin,
                [index for index, _ in stage.announced],
                [frame.hex() for _, frame in stage.announced],
                [frame.hex() for frame in prepared.prior_frames],
            )
        )
    ).encode()  # fmt: skip
    schema = _schema(header)

    def write(writer: Any, index: int, arrays: list[Any], more: bytes = b"") -> None:
        batch = pa.RecordBatch.from_arrays(arrays, schema=schema)
        custom = {CRC_KEY: (checksum(index, batch, more) or "").encode()}
        writer.write_batch(batch, custom_metadata=custom | ({END_KEY: LAST_PART} if more else {}))

    with create_file(path) as file:
        with pa.ipc.new_file(file, schema) as writer:
            index = 0
            for run in stage.runs():
                offsets = (run.offsets - run.offsets[0]).astype(np.int32)
                first, last = int(run.offsets[0]), int(run.offsets[-1])
                data = [
                    None,
                    pa.py_buffer(offsets),
                    pa.py_buffer(memoryview(run.data)[first:last]),
                ]
                lsns = pa.array(run.lsns, pa.uint64())
                write(writer, index, [lsns, pa.Array.from_buffers(pa.binary(), len(run), data)])
                index += 1
            empty = [pa.nulls(0, field.type) for field in schema]
            write(writer, index, empty, header + LAST_PART)
        file.flush()
        os.fsync(file.fileno())


def _read(path: Path, spill_directory: Path | None) -> Prepared:
    """Read a file that `_write` wrote.

    Raises
    ------
    PgOutputError
        The file can't be read, or is damaged.
    """
    import numpy as np

    from ..transactions.assembler import Prepared
    from ..transactions.runs import Run
    from ..transactions.staging import Stage

    pa = require_pyarrow()
    try:
        with pa.OSFile(str(path)) as file, pa.ipc.open_file(file) as reader:
            text = (reader.schema.metadata or {}).get(_METADATA_KEY, b"")
            if reader.schema.remove_metadata() != _schema(b"").remove_metadata():
                raise ValueError("it has other columns")
            header: _Header = of_form(json.loads(text), _Header)
            if header.format_version != _FORMAT_VERSION:
                raise ValueError(f"it is of format version {header.format_version}")
            stage = Stage(spill_directory, in_stream=header.in_stream)
            last = reader.num_record_batches - 1
            for index in range(last + 1):
                batch, custom = reader.get_batch_with_custom_metadata(index)
                more = text + LAST_PART if index == last else b""
                if (custom or {}).get(CRC_KEY) != (checksum(index, batch, more) or "").encode():
                    raise ValueError(f"record batch {index} has another checksum")
                if len(batch):
                    _, offsets, data = batch["data"].buffers()
                    ends = np.frombuffer(offsets, np.int32, len(batch) + 1).astype(np.int64)
                    stage.add(Run(data or b"", ends, batch["lsn"].to_numpy()))
                    stage.spill()
            if last < 0 or (custom or {}).get(END_KEY) != LAST_PART:
                raise ValueError("its end is missing")
            stage.origin = header.origin
            announced = map(bytes.fromhex, header.announced)
            stage.announced = list(zip(header.announced_at, announced, strict=True))
            prior_frames = [bytes.fromhex(frame) for frame in header.known]
            return Prepared(header.xid, header.gid, header.lsn, stage, prior_frames)
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        raise PgOutputError(
            f"can't read {path} ({printable(str(error))}), which has a prepared transaction that "
            "the server will not send again",
            code="damaged",
            path=str(path),
            hint="Restore it from a backup; without a backup, start over with a new slot, an empty "
            "directory and new snapshots",
        ) from error
