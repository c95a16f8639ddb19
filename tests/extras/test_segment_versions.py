"""Segments of format version 1, which captures wrote before 2: they are read and continued.

`tests/data/segments_1` is a directory as the last writer of version 1 made it from `before()`.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pyarrow as pa
import pytest

import pgoutput_fast as pf
from pgoutput_fast.segments import SegmentMetadata, SegmentReader, SegmentWriter, list_segments
from pgoutput_fast.testing import Server, Table, UserType

DIRECTORY = Path(__file__).parents[1] / "data" / "segments_1"
METADATA = SegmentMetadata(
    system_identifier="7000000000000000001",
    database="shop",
    slot="s",
    publications=("p",),
    server_version=180004,
    encoding="UTF8",
    settings={"DateStyle": "ISO, MDY"},
    options={"proto_version": "1"},
)
ACCOUNTS = Table("accounts", {"id": "int4", "mood": UserType(16390, "mood")}, 16400)


def before() -> Server:
    """What the server had sent when the directory was written."""
    server = Server(lsn=0x1000, xid=700, time=800_000_000_000_000)
    with server.begin("far") as transaction:
        transaction.insert(ACCOUNTS, [1, "happy"])
        transaction.update(ACCOUNTS, [2, "sad"], [1, "happy"])
    with server.begin() as transaction:
        transaction.truncate([ACCOUNTS])
        transaction.message("p", b"within")
    server.message("p", b"outside")
    return server


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A copy that may be written to."""
    return Path(shutil.copytree(DIRECTORY, tmp_path / "segments"))


def version(path: Path) -> int:
    with pa.ipc.open_file(str(path)) as file:
        fields = json.loads(file.schema.metadata[b"pgoutput_fast.segment"])
    assert ("timeline" in fields) == (fields["format_version"] > 1)
    return int(fields["format_version"])


def test_version_1_is_read() -> None:
    (segment,) = list_segments(DIRECTORY)
    assert version(segment.path) == 1
    assert segment[:3] == (0x10C8, 0x1208, 0)
    with SegmentReader(segment.path) as reader:
        assert reader.metadata == dataclasses.replace(METADATA, start_lsn=0x1000)
        assert (reader.metadata.timeline, reader.is_last_part) == (0, True)
        (batch,) = reader
    server = before()
    first, second = server.committed
    whose = [first] * 7 + [second] * 4 + [None]
    assert batch.to_pylist() == [
        {
            "lsn": sent.lsn,
            "commit_lsn": one and one.commit_lsn,
            "commit_time": one and one.commit_time,
            "xid": one and one.xid,
            "seq": sent.seq,
            "data": sent.frame,
        }
        for sent, one in zip(server.sent, whose, strict=True)
    ]
    rows = [
        row
        for changes in pf.ColumnarDecoder().decode(batch["data"], lsns=batch["lsn"])
        for row in pa.record_batch(changes).to_pylist()
    ]
    assert [(row["op"], row["xid"], row["seq"], row["after"]) for row in rows] == [
        ("insert", 700, 0, {"id": 1, "mood": "happy"}),
        ("update", 700, 1, {"id": 2, "mood": "sad"}),
        ("truncate", 701, 0, None),
    ]


def test_a_writer_continues_version_1(directory: Path) -> None:
    (old,) = list_segments(directory)
    content = old.path.read_bytes()
    server = before()
    end, count = server.lsn, len(server.sent)
    server.reconnect()
    with server.begin() as transaction:
        transaction.insert(ACCOUNTS, [3, "happy"])
    now = dataclasses.replace(METADATA, timeline=2)
    with SegmentWriter(directory, now, confirmed_flush_lsn=0x1000) as out:
        assert (out.position, out.timeline) == (end, 0)
        out.write_frames(server.frames[count:], server.lsns[count:])
        assert out.flush() == server.lsn
        assert out.advance(server.lsn + 8) == server.lsn + 8
    first, second = list_segments(directory)
    assert first == old
    assert old.path.read_bytes() == content
    assert second[:4] == (end, server.lsn, 0, 1)
    assert [version(one.path) for one in (first, second)] == [1, 2]
    with SegmentReader(second.path) as reader:
        assert reader.metadata == dataclasses.replace(now, start_lsn=end)
        (batch,) = reader
    assert batch["data"].to_pylist() == server.frames[count:]
    # Its position, which was of version 1 too, is written anew.
    stored = json.loads((directory / "position.json").read_text())
    assert stored["metadata"]["format_version"] == 2
    with SegmentWriter(directory, now, confirmed_flush_lsn=server.lsn) as out:
        assert (out.position, out.timeline) == (server.lsn + 8, 2)


def test_a_position_of_version_1_alone_is_continued(directory: Path) -> None:
    """As it is before the first segment."""
    (old,) = list_segments(directory)
    old.path.unlink()
    with SegmentWriter(directory, METADATA, confirmed_flush_lsn=0x1000) as out:
        assert (out.position, out.timeline) == (0x1000, 0)


def test_another_slot_does_not_continue_it(directory: Path) -> None:
    other = dataclasses.replace(METADATA, slot="other")
    with pytest.raises(pf.PgOutputError, match="are not of this slot: slot 's' is not 'other'"):
        SegmentWriter(directory, other, confirmed_flush_lsn=0x1000)
