"""Recorded streams: what came over one replication connection, as it came.

A recorded stream is an Arrow IPC file with the columns `start_lsn`, `server_time` and `payload`:
one frame in each row, or whole CopyData messages. Its schema's metadata ``pgcap`` is JSON that
tells the client_encoding, and in `method` whether the payload is CopyData ("walsender_raw").
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, NamedTuple

from ..copydata import XLOG_DATA, XLOG_DATA_TAG, Keepalive, parse_keepalive
from ..errors import PgOutputError
from .format import require_pyarrow

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class Frame(NamedTuple):
    """A frame, and the LSN and the time of the header around it."""

    lsn: int | None
    time: int | None
    frame: bytes


class Recording:
    """An Arrow IPC file of a recorded stream.

    Attributes
    ----------
    encoding : str
        The client_encoding of the session, as PostgreSQL names it.
    ended_with : str or None
        The error that ended the recording.

    Raises
    ------
    PgOutputError
        It is something else, or damaged.
    """

    def __init__(self, path: Path) -> None:
        pa = require_pyarrow()
        self._path = path
        self._arrow_errors: tuple[type[Exception], ...] = (pa.ArrowException, OSError, ValueError)
        self._file = pa.OSFile(str(path))
        try:
            self._reader = pa.ipc.open_file(self._file)
            schema = self._reader.schema
            metadata = json.loads((schema.metadata or {})[b"pgcap"])
            self.encoding = str(metadata["client_encoding"])
            self._is_copy_data = metadata.get("method") == "walsender_raw"
            self.ended_with = metadata.get("capture_error")
            if not {"start_lsn", "server_time", "payload"} <= set(schema.names):
                raise KeyError("the columns start_lsn, server_time and payload")
        except (*self._arrow_errors, KeyError, TypeError, AttributeError) as error:
            self._file.close()
            raise PgOutputError(
                f"{path} is neither a segment nor a recorded stream ({error})"
            ) from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def frames(self) -> Iterator[Frame | Keepalive]:
        """What came, in order. One record batch is in memory at a time."""
        for index in range(self._reader.num_record_batches):
            try:
                batch = self._reader.get_batch(index)
                columns = [
                    batch.column(name).to_pylist()
                    for name in ("start_lsn", "server_time", "payload")
                ]
            except self._arrow_errors as error:
                raise PgOutputError(f"{self._path} is damaged ({error})") from error
            for lsn, time, payload in zip(*columns, strict=True):
                if payload is None:
                    raise PgOutputError(f"{self._path} has a row without a payload")
                yield self._unwrap(payload) if self._is_copy_data else Frame(lsn, time, payload)

    def _unwrap(self, payload: bytes) -> Frame | Keepalive:
        """The frame in CopyData."""
        if len(payload) >= XLOG_DATA.size and payload[0] == XLOG_DATA_TAG:
            lsn, _, time = XLOG_DATA.unpack_from(payload)
            return Frame(lsn, time, payload[XLOG_DATA.size :])
        try:
            return parse_keepalive(payload)
        except PgOutputError as error:
            raise PgOutputError(f"{self._path} has {error}") from error
