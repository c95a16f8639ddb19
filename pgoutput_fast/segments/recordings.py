"""Read recorded streams: all frames that came over one replication connection.

Tests keep the streams of real servers as recordings, in all protocol versions. `inspect` prints
them, so docs/explanation/change-log-format.md specifies their format. This package writes none.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, NamedTuple

from .._forms import of_form
from ..errors import PgOutputError
from ..protocol.copydata import XLOG_DATA, XLOG_DATA_TAG, Keepalive, parse_keepalive
from .format import require_pyarrow

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Frame(NamedTuple):
    """A frame, with two fields of its XLogData header; they are None if not recorded."""

    lsn: int | None
    """The LSN at which the change begins in the server's log; 0 for Type and Relation."""
    time: int | None
    """When the server sent the frame, in microseconds since 2000-01-01 UTC."""
    frame: bytes


class Recording:
    """An Arrow IPC file of a recorded stream.

    Attributes
    ----------
    encoding : str
        The client_encoding of the session, as PostgreSQL names it.

    Raises
    ------
    PgOutputError
        The file can't be read, is not a recorded stream, or is damaged.
    """

    def __init__(self, path: Path) -> None:
        pa = require_pyarrow()
        self._path = path
        self._arrow_errors: tuple[type[Exception], ...] = (pa.ArrowException, OSError, ValueError)
        try:
            self._file = pa.OSFile(str(path))
        except OSError as error:
            raise PgOutputError(
                f"can't open {path}: {error.strerror or error}",
                code="missing_path" if isinstance(error, FileNotFoundError) else "io_failed",
                path=str(path),
            ) from error
        try:
            self._reader = pa.ipc.open_file(self._file)
            schema = self._reader.schema
            metadata = json.loads((schema.metadata or {})[b"pgcap"])
            self.encoding = of_form(metadata["client_encoding"], str, "client_encoding")
            self._is_copy_data = metadata.get("method") == "walsender_raw"
            columns = {"start_lsn": pa.uint64(), "server_time": pa.int64(), "payload": pa.binary()}
            for name, type_ in columns.items():
                if schema.field(name).type != type_:
                    raise TypeError(f"its column {name} is not {type_}")
        except (
            *self._arrow_errors,
            LookupError,
            TypeError,
            AttributeError,
            RecursionError,
        ) as error:
            self._file.close()
            why = f"it has no {error}" if isinstance(error, KeyError) else error
            raise PgOutputError(
                f"{path} is neither a segment nor a recorded stream ({why})",
                code="not_ours",
                path=str(path),
            ) from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def frames(self) -> Iterator[Frame | Keepalive]:
        """Yield the frames and keepalives in order. One record batch is in memory at a time.

        Raises
        ------
        PgOutputError
            The file is damaged, or has a row that is neither a frame nor a keepalive.
        """
        for index in range(self._reader.num_record_batches):
            try:
                batch = self._reader.get_batch(index)
                columns = [
                    batch.column(name).to_pylist()
                    for name in ("start_lsn", "server_time", "payload")
                ]
            except self._arrow_errors as error:
                raise PgOutputError(
                    f"{self._path} is damaged ({error})", code="damaged", path=str(self._path)
                ) from error
            for lsn, time, payload in zip(*columns, strict=True):
                if payload is None:
                    raise PgOutputError(
                        f"{self._path} has a row without a payload",
                        code="damaged",
                        path=str(self._path),
                    )
                yield self._unwrap(payload) if self._is_copy_data else Frame(lsn, time, payload)

    def _unwrap(self, payload: bytes) -> Frame | Keepalive:
        """Return the frame or the keepalive in a CopyData message."""
        if len(payload) >= XLOG_DATA.size and payload[0] == XLOG_DATA_TAG:
            lsn, _, time = XLOG_DATA.unpack_from(payload)
            return Frame(lsn, time, payload[XLOG_DATA.size :])
        try:
            return parse_keepalive(payload)
        except PgOutputError as error:
            raise PgOutputError(
                f"{self._path} has {error.message}", code="damaged", path=str(self._path)
            ) from error
