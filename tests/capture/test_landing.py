"""What a capture makes durable before its time, for a server that asks how far it is."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("psycopg")
pytest.importorskip("pyarrow")

from support.postgres.made_connection import Connection

from pgoutput_fast import testing
from pgoutput_fast.capture_options import CaptureOptions
from pgoutput_fast.replication.landing import Landing
from pgoutput_fast.replication.link import Link
from pgoutput_fast.replication.membership import Members
from pgoutput_fast.replication.receiver import Receiver
from pgoutput_fast.replication.upkeep import Upkeep
from pgoutput_fast.segments import SegmentMetadata, SegmentWriter, list_segments

if TYPE_CHECKING:
    from pathlib import Path

TABLE = testing.Table("t", {"id": "int4"})
METADATA = SegmentMetadata("1", "d", "s", ("p",), 180004, "UTF8", {}, {})


class Stop:
    """Ends the capture once everything is durable, or after ten seconds."""

    def __init__(self, writer: SegmentWriter, lsn: int) -> None:
        self.writer, self.lsn = writer, lsn
        self.until = time.monotonic() + 10.0
        self.segments = 0

    def is_set(self) -> bool:
        self.segments = len(list_segments(self.writer.directory))
        return self.writer.position >= self.lsn or time.monotonic() > self.until


@pytest.mark.parametrize("has_rows", [False, True], ids=["nothing", "a transaction"])
@pytest.mark.parametrize("asks", [0, 1])
def test_what_a_server_waits_for_is_made_durable(
    tmp_path: Path, *, has_rows: bool, asks: int
) -> None:
    server = testing.Server()
    begin = server.lsn
    if has_rows:
        with server.begin() as transaction:
            transaction.insert(TABLE, [1])
    end = server.lsn + 1000
    connection: Any = Connection([list(server.copy_data()), [testing.keepalive(end, 1, asks)]])
    connection.timeline = 1
    link = Link(Receiver(connection, begin), 4)
    try:
        with SegmentWriter(tmp_path, METADATA, confirmed_flush_lsn=begin) as writer:
            stop: Any = Stop(writer, end)
            target: Any = None  # nothing is copied
            options = CaptureOptions(merge=False, min_free=0)
            with contextlib.closing(Upkeep(writer, target, options, Members({}, 0))) as upkeep:
                landing = Landing(link, writer, upkeep, 64 << 20, 1e9, "empty", None)
                landing.run(None, stop)
            # Without the question that takes max_delay, or some seconds of idleness.
            assert (writer.position == end) == bool(asks)
            assert stop.segments == (asks and has_rows)
    finally:
        link.close()
    assert len(list_segments(tmp_path)) == has_rows  # the end of the capture, at the latest
