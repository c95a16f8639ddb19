"""Segments: what a writer makes of frames, what a reader refuses, how a directory is continued."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import json
import os
import random
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.ipc
import pytest

from pgoutput_fast import segments, testing
from pgoutput_fast.decoding.state import MOST_SUPERSEDED
from pgoutput_fast.errors import PgOutputError
from pgoutput_fast.segments import (
    Segment,
    SegmentMetadata,
    SegmentReader,
    SegmentWriter,
    list_segments,
    listing,
)
from pgoutput_fast.segments import writer as writing
from pgoutput_fast.segments.ipc import record_batch_blocks

if TYPE_CHECKING:
    from collections.abc import Iterable

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
Frames = list[tuple[int, bytes]]


def begin(commit_lsn: int, xid: int = 7, time: int = -5) -> bytes:
    return testing.begin(xid, commit_lsn, time)


def commit(commit_lsn: int, end_lsn: int) -> bytes:
    return testing.commit(commit_lsn, end_lsn, -5)


def relation(oid: int, name: str = "t") -> bytes:
    return testing.Table(name, {}, oid).relation()


def type_(oid: int) -> bytes:
    return testing.type_(testing.UserType(oid, "mood"))


def insert(oid: int = 1, value: bytes = b"x") -> bytes:
    return testing.insert(oid, [("t", value)])


def truncate(*oids: int) -> bytes:
    return testing.truncate(oids)


def message(lsn: int, content: bytes = b"c", *, transactional: bool = False) -> bytes:
    return testing.message("p", content, lsn, transactional)


def transaction(lsn: int, *body: bytes, xid: int = 7) -> Frames:
    """A transaction that commits at `lsn` and ends at `lsn + 10`."""
    return [
        (lsn - 5, begin(lsn, xid)),
        *((lsn - 5, frame) for frame in body),
        (lsn + 10, commit(lsn, lsn + 10)),
    ]


def writer(directory: Path, confirmed: int = 50, **options: Any) -> SegmentWriter:
    return SegmentWriter(directory, METADATA, confirmed_flush_lsn=confirmed, **options)


def write(out: SegmentWriter, *frames: Iterable[tuple[int, bytes]]) -> list[int]:
    """All frames; the positions that may be acknowledged."""
    positions = [out.write(lsn, frame) for group in frames for lsn, frame in group]
    return [position for position in positions if position is not None]


def rows(path: Path | Segment) -> list[dict[str, Any]]:
    with SegmentReader(path.path if isinstance(path, Segment) else path) as reader:
        return [row for batch in reader for row in batch.to_pylist()]


def data(segment: Segment) -> list[bytes]:
    return [row["data"] for row in rows(segment)]


def names(directory: Path) -> list[str]:
    """Of all but the position, which is always there."""
    found = sorted(path.name for path in directory.iterdir())
    found.remove("position.json")
    return found


def test_columns_name_and_metadata(tmp_path: Path) -> None:
    frames = [
        *transaction(
            100, type_(9), relation(1), insert(), truncate(1, 2), insert(), xid=4294967295
        ),
        (120, message(120)),
    ]
    with writer(tmp_path) as out:
        assert write(out, frames) == []
        assert names(tmp_path) == [".00000.arrow.tmp"]
        assert not out.is_idle
        assert out.flush() == 120
        assert out.flush() is None
        assert out.is_idle
        assert out.position == 120
    assert names(tmp_path) == ["0000000000000064-0000000000000078-00000.arrow"]
    (segment,) = list_segments(tmp_path)
    assert segment[:3] == (100, 120, 0)
    with SegmentReader(segment.path) as reader:
        assert reader.metadata == SegmentMetadata(**{**vars(METADATA), "start_lsn": 50})
        assert reader.is_last_part
        (batch,) = reader
    assert batch.schema.remove_metadata() == segments.segment_schema()
    within = {"commit_lsn": 100, "commit_time": -5, "xid": 4294967295}
    outside = {"commit_lsn": None, "commit_time": None, "xid": None}
    assert batch.to_pylist() == [
        {"lsn": lsn, **(within if lsn != 120 else outside), "seq": seq, "data": frame}
        for (lsn, frame), seq in zip(frames, [None, None, None, 0, 1, 3, None, None], strict=True)
    ]
    # As another reader would check it: documented, not only consistent.
    with pa.ipc.open_file(str(segment.path)) as file:
        found, custom = file.get_batch_with_custom_metadata(0)
        assert json.loads(file.schema.metadata[b"pgoutput_fast.segment"])["format_version"] == 2
        end, end_custom = file.get_batch_with_custom_metadata(1)
        text = file.schema.metadata[b"pgoutput_fast.segment"]
        assert file.num_record_batches == 2
    crc = zlib.crc32(struct.pack("<qq", 0, len(frames)))
    for column in found.columns:
        crc = zlib.crc32(struct.pack("<q", column.to_pylist().count(None)), crc)
        for buffer in column.buffers():
            if buffer is not None:
                crc = zlib.crc32(buffer, crc)
    assert custom[b"pgoutput_fast.crc32"] == f"{crc:08x}".encode()
    assert end.num_rows == 0
    crc = zlib.crc32(struct.pack("<qq6q", 1, 0, *[0] * 6) + text + b"last")
    assert end_custom == {
        b"pgoutput_fast.crc32": f"{crc:08x}".encode(),
        b"pgoutput_fast.end": b"last",
    }


def test_relations_in_force_are_repeated(tmp_path: Path) -> None:
    with writer(tmp_path) as out:
        write(out, transaction(100, type_(9), relation(1, "old"), relation(2), insert()))
        assert out.flush() == 110
        write(out, transaction(200, relation(1, "new"), insert()))
        assert out.flush() == 210
        write(out, [(300, message(300))])
        assert out.flush() == 300
    first, second, third = list_segments(tmp_path)
    assert data(first)[0] == begin(100)
    assert data(second)[:4] == [type_(9), relation(1, "old"), relation(2), begin(200)]
    assert data(third) == [type_(9), relation(1, "new"), relation(2), message(300)]
    assert [(row["lsn"], row["xid"]) for row in rows(second)[:4]] == [
        (0, None),
        (0, None),
        (0, None),
        (195, 7),
    ]


def test_tables_that_are_dropped_and_made_again_are_not_repeated_for_ever(tmp_path: Path) -> None:
    count = 3 * MOST_SUPERSEDED
    # A column of the type with the number of the table and 100000.
    made = [
        frame
        for oid in range(1, count + 1)
        for frame in (
            type_(100_000 + oid),
            relation(oid)[:-2] + struct.pack(">HB2sIi", 1, 0, b"c", 100_000 + oid, -1),
        )
    ]
    kept = relation(count + 1, "other")
    with writer(tmp_path) as out:
        write(out, transaction(100, *made, kept, insert(count)))
        out.flush()
        write(out, transaction(200, insert(count)))
        out.flush()
    *repeated, begun, row, end = data(list_segments(tmp_path)[1])
    assert [begun[:1], row, end[:1]] == [b"B", insert(count), b"C"]
    assert repeated[-2:] == [made[-1], kept]
    # Types first, and one for each relation that is left.
    assert len(repeated) % 2 == 1
    left = len(repeated) // 2
    assert repeated[:left] == made[-2 * left :: 2]
    assert repeated[left:-1] == made[-2 * left + 1 :: 2]
    assert MOST_SUPERSEDED <= left <= 2 * MOST_SUPERSEDED + 1


def test_segment_ends_at_the_first_commit_after_its_size(tmp_path: Path) -> None:
    with writer(tmp_path, segment_bytes=1400) as out:
        positions = write(
            out, *(transaction(100 * n, insert(value=b"x" * 300)) for n in range(1, 8))
        )
        assert positions == [310, 610]
        assert out.position == 610
    # What was not complete is gone with the writer: the server sends it again.
    assert [segment[:3] for segment in list_segments(tmp_path)] == [(100, 310, 0), (400, 610, 0)]
    assert len(names(tmp_path)) == 2


@pytest.mark.parametrize("count", range(36, 44))
def test_large_transaction_has_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Whatever the size of its last part, it ends with the transaction."""
    monkeypatch.setattr(writing, "BATCH_FRAMES", 4)
    inserts = [insert(value=b"%030d" % n) for n in range(count)]
    with writer(tmp_path, segment_bytes=2000) as out:
        assert write(out, transaction(100, relation(1), insert())) == []
        frames = transaction(200, relation(2), *inserts)
        assert write(out, frames[:-1]) == []
        assert out.in_transaction
        assert out.flush() is None
        assert list_segments(tmp_path) == []
        assert write(out, frames[-1:]) == [210]
        assert write(out, transaction(300, insert())) == []
        assert out.flush() == 310
    found = list_segments(tmp_path)
    assert len(found) > 3
    parts = found[:-1]
    assert [segment[:3] for segment in parts] == [(100, 210, n) for n in range(len(parts))]
    assert found[-1][:3] == (300, 310, 0)
    # Each part alone says what its frames mean.
    for segment in parts[1:]:
        assert data(segment)[:3] == [relation(1), relation(2), begin(200)]
        assert rows(segment)[2]["lsn"] == 195
    kept = [row for segment in parts for row in rows(segment) if row["data"] in inserts]
    assert [row["data"] for row in kept] == inserts
    assert [row["seq"] for row in kept] == list(range(count))
    assert {row["commit_lsn"] for row in kept} == {200}
    assert data(parts[-1])[-1] == commit(200, 210)
    for segment in parts:
        with SegmentReader(segment.path) as reader:
            assert reader.is_last_part == (segment == parts[-1])
            assert all(0 < batch.num_rows <= 5 for batch in reader)


def test_incomplete_parts_are_not_listed_and_deleted_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "BATCH_FRAMES", 4)
    with writer(tmp_path, segment_bytes=200) as out:
        big_enough = insert(value=b"x" * 100)
        assert write(out, transaction(100, big_enough), transaction(150, big_enough)) == [110, 160]
        big = transaction(200, *(insert(value=b"%030d" % n) for n in range(30)))
        assert write(out, big) == [210]
    found = list_segments(tmp_path)
    last = found[-1].path
    assert found[-1].part > 1
    # As after a crash between two renames.
    last.rename(tmp_path / f".{found[-1].part:05d}.arrow.tmp")
    complete = [segment for segment in found if segment.end_lsn != 210]
    assert list_segments(tmp_path) == complete
    with writer(tmp_path) as out:
        assert out.position == complete[-1].end_lsn
        assert names(tmp_path) == [segment.path.name for segment in complete]
        write(out, big)
        assert out.flush() == 210
    assert [segment.end_lsn for segment in list_segments(tmp_path)][-1] == 210
    # Not at the end it is damage, and nothing is deleted.
    list_segments(tmp_path)[0].path.rename(tmp_path / "kept")
    before = names(tmp_path)
    with writer(tmp_path) as out:
        write(out, transaction(300, insert()))
        out.flush()
    assert len(names(tmp_path)) == len(before) + 1


def test_missing_part_in_the_middle_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "BATCH_FRAMES", 4)
    with writer(tmp_path, segment_bytes=200) as out:
        write(out, transaction(100, *(insert(value=b"%030d" % n) for n in range(30))))
        write(out, transaction(200, insert()))
        out.flush()
    list_segments(tmp_path)[1].path.unlink()
    before = names(tmp_path)
    with pytest.raises(PgOutputError, match=r"-00000\.arrow is not complete: there are its parts"):
        list_segments(tmp_path)
    with pytest.raises(PgOutputError, match="is not complete"):
        writer(tmp_path)
    assert names(tmp_path) == before


def test_resume_goes_on_at_the_end(tmp_path: Path) -> None:
    with writer(tmp_path) as out:
        assert out.position == 50
        write(out, transaction(100, insert()))
        out.flush()
        write(out, transaction(200, insert()))
    assert names(tmp_path) == ["0000000000000064-000000000000006E-00000.arrow"]
    (tmp_path / ".00004.arrow.tmp").write_bytes(b"left by a kill")
    # The slot may be behind, as a status message can be lost; not beyond.
    with writer(tmp_path, confirmed=60) as out:
        assert out.position == 110
        assert len(names(tmp_path)) == 1
        write(out, transaction(200, insert()))
        out.flush()
    assert [segment.end_lsn for segment in list_segments(tmp_path)] == [110, 210]
    with pytest.raises(
        PgOutputError, match=r"at 0/D3, beyond the end 0/D2 .* another directory may have"
    ):
        writer(tmp_path, confirmed=211)


def test_slot_that_moves_before_the_first_segment_is_noticed(tmp_path: Path) -> None:
    with writer(tmp_path, confirmed=50) as out:
        write(out, transaction(100, insert()))
    with pytest.raises(PgOutputError, match="beyond the end 0/32"):
        writer(tmp_path, confirmed=51)


def test_idle_position_is_kept(tmp_path: Path) -> None:
    with writer(tmp_path) as out:
        write(out, transaction(100, insert()))
        assert out.advance(500) is None  # frames are pending
        out.flush()
        assert out.advance(110) is None  # nothing new
        assert out.advance(500) == 500
        assert out.position == 500
        write(out, transaction(600, insert())[:1])
        assert out.advance(700) is None
    with pytest.raises(PgOutputError, match="beyond the end 0/1F4"):
        writer(tmp_path, confirmed=501)
    with writer(tmp_path, confirmed=500) as out:
        assert out.position == 500
        write(out, transaction(600, insert()))
        out.flush()
    first, second = list_segments(tmp_path)
    with SegmentReader(second.path) as reader:
        # A chain without holes: from the last segment, not from the idle position.
        assert reader.metadata.start_lsn == first.end_lsn == 110
    (tmp_path / "position.json").write_text('{"position": "0/1F4"}')
    with pytest.raises(PgOutputError, match=r"can't read .*position\.json"):
        writer(tmp_path, confirmed=500)


def test_gap_and_overlap_are_found(tmp_path: Path) -> None:
    with writer(tmp_path) as out:
        for lsn in (100, 200, 300):
            write(out, transaction(lsn, insert()))
            out.flush()
    first, second, third = list_segments(tmp_path)
    second.path.rename(tmp_path / "moved")
    with pytest.raises(PgOutputError, match=r"missing between .*from 0/6E to 0/D2"):
        list_segments(tmp_path)
    (tmp_path / "moved").rename(second.path)
    # The oldest ones may be deleted.
    first.path.unlink()
    assert list_segments(tmp_path) == [second, third]
    overlapping = tmp_path / "00000000000000D0-00000000000000F0-00000.arrow"
    overlapping.write_bytes(second.path.read_bytes())
    with pytest.raises(PgOutputError, match="overlaps with"):
        list_segments(tmp_path)
    overlapping.rename(tmp_path / "segment.arrow")
    with pytest.raises(PgOutputError, match=r"segment\.arrow is no name of a segment"):
        list_segments(tmp_path)


def test_list_of_files_is_checked_as_a_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "BATCH_FRAMES", 4)
    with writer(tmp_path / "a", segment_bytes=200) as out:
        for lsn in (100, 200):
            write(out, transaction(lsn, insert()))
            out.flush()
        write(out, transaction(300, *(insert(value=b"%030d" % n) for n in range(30))))
    with SegmentWriter(
        tmp_path / "b", dataclasses.replace(METADATA, slot="other"), confirmed_flush_lsn=110
    ) as out:
        write(out, transaction(200, insert()))
        out.flush()
    (other,) = list_segments(tmp_path / "b")
    found = list_segments(tmp_path / "a")
    first, second, *parts = [segment.path for segment in found]
    assert len(parts) > 2
    # In any order, from any directories, as strings; one alone; none.
    assert list_segments([*parts[::-1], str(second), first]) == found
    copy = tmp_path / second.name
    copy.write_bytes(second.read_bytes())
    assert [segment.path for segment in list_segments([first, copy])] == [first, copy]
    assert list_segments(second) == list_segments([second]) == [found[1]]
    assert list_segments([]) == []
    for paths, match in [
        ([first, second, first], f"{first} is given twice"),
        ([second, copy], f"{second} is given twice, once as {copy}"),
        ([first, *parts], "is missing between .* from 0/6E to 0/D2; restore it, or leave out"),
        ([first, other.path], "does not go together with .*: slot 'other' is not 's'"),
        ([second, other.path], "does not go together with .*: slot"),
        (parts[:-1], "is not complete: .* a list of files needs all of them"),
        (parts[1:], "is not complete: .* a list of files needs all of them"),
        (parts[0], "is not complete: there are its parts 0, "),
        ([first, tmp_path / "b"], "b is a directory, and a list may hold files of segments only"),
        ([tmp_path / "gone"], "is no name of a segment"),
    ]:
        with pytest.raises(PgOutputError, match=match):
            list_segments(paths)  # type: ignore[arg-type]


def test_directory_is_one_slots_and_one_writers(tmp_path: Path) -> None:
    with writer(tmp_path) as out:
        write(out, transaction(100, insert()))
        out.flush()
        with pytest.raises(PgOutputError, match="another capture writes into"):
            writer(tmp_path)
    other = SegmentMetadata(**{**vars(METADATA), "slot": "other"})
    with pytest.raises(PgOutputError, match="are not of this slot: slot 's' is not 'other'"):
        SegmentWriter(tmp_path, other, confirmed_flush_lsn=50)
    # A refused writer does not keep the lock.
    writer(tmp_path).close()
    with pytest.raises(PgOutputError, match=r"can't use .*(Not a directory|File exists)"):
        writer(list_segments(tmp_path)[0].path)


@pytest.mark.parametrize(
    ("frames", "match"),
    [
        ([(1, insert())], "'I' outside of a transaction"),
        ([(1, truncate(1))], "'T' outside of a transaction"),
        ([(1, commit(100, 110))], "'C' without a Begin"),
        ([(1, begin(100)), (1, begin(100))], "'B' within a transaction"),
        ([(1, begin(100)), (1, commit(101, 111))], r"Commit at 0/65 follows .* 0/64"),
        ([(1, begin(49))], r"committed at 0/31, before 0/32"),
        ([(1, begin(100)), (1, b"S\0\0\0\1\1")], "'S' not of protocol version 1"),
        ([(1, begin(100)), (1, b"")], "tag '' not of protocol version 1"),
        (
            [(1, b"B\0\0")],
            "malformed frame at LSN 0/1: 'B' frame of 3 bytes, byte 1: final_lsn takes 8",
        ),
        (
            [(1, b"R\0")],
            "malformed frame at LSN 0/1: 'R' frame of 2 bytes, byte 1: relation_id takes 4",
        ),
        (
            [(95, begin(100)), (95, b"T\0\0\0\2\0\0\0\0\1")],
            "malformed frame at LSN 0/5F: 'T' frame of 10 bytes, byte 1: .* relations is 2, and at",
        ),
        (
            [(95, begin(100)), (95, b"T\x80\0\0\1\0\0\0\0\1")],
            "malformed frame at LSN 0/5F: 'T' frame of 10 bytes, byte 1: .* is -2147483647",
        ),
    ],
)
def test_frames_that_do_not_follow_are_refused(tmp_path: Path, frames: Frames, match: str) -> None:
    with writer(tmp_path) as out, pytest.raises(PgOutputError, match=match):
        write(out, frames)
    assert names(tmp_path) == []


@pytest.mark.parametrize("after", ["a refused frame", "a full disk", "an interrupt", "its end"])
def test_a_writer_that_failed_refuses_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: str
) -> None:
    """What it was given when it failed is in no segment, so nothing may follow."""

    def raise_(error: BaseException) -> None:
        raise error

    out = writer(tmp_path)
    write(out, transaction(100, insert()))
    if after == "a refused frame":
        why = r"failed before \(the server sent a frame with tag 'I' outside"
        with pytest.raises(PgOutputError, match="outside"):
            out.write(1, insert())
    elif after == "a full disk":
        why = r"failed before \(\[Errno 28\]"
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", lambda _: raise_(OSError(errno.ENOSPC, "full")))
            with pytest.raises(PgOutputError, match="can't write a segment"):
                out.flush()
    elif after == "an interrupt":
        why = r"failed before \(KeyboardInterrupt\)"
        with monkeypatch.context() as patched:
            patched.setattr(out, "_append", lambda *_: raise_(KeyboardInterrupt()))
            with pytest.raises(KeyboardInterrupt):
                out.write(1, begin(200))
    else:
        why = "it is closed"
        out.close()
    for use in (lambda: out.write(1, begin(200)), out.flush, lambda: out.advance(900)):
        with pytest.raises(PgOutputError, match=f"can't be used any more: (it )?{why}"):
            use()
    out.close()
    assert list_segments(tmp_path) == []
    with writer(tmp_path) as again:
        assert again.position == 50


def test_full_disk_is_an_error_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with writer(tmp_path) as out:
        write(out, transaction(100, insert()))
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(PgOutputError, match=r"can't write a segment in .*No space left"):
            out.flush()
    assert names(tmp_path) == []


def test_durable_before_it_is_acknowledged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is synced under its temporary name, then renamed, then the directory is synced."""
    calls: list[str] = []
    fsync, rename = os.fsync, type(tmp_path).rename

    def traced_fsync(descriptor: int) -> None:
        calls.append(
            "sync "
            + os.fsdecode(Path(f"/proc/self/fd/{descriptor}").readlink()).removeprefix(
                str(tmp_path)
            )
        )
        fsync(descriptor)

    def traced_rename(path: Path, target: Path) -> Any:
        calls.append(f"rename {path.name}")
        return rename(path, target)

    with writer(tmp_path) as out:
        write(out, transaction(100, insert()))
        monkeypatch.setattr(os, "fsync", traced_fsync)
        monkeypatch.setattr(type(tmp_path), "rename", traced_rename)
        out.flush()
        out.advance(500)
    assert calls == [
        *("sync /.00000.arrow.tmp", "rename .00000.arrow.tmp", "sync "),
        *("sync /.position.json.tmp", "rename .position.json.tmp", "sync "),
    ]


def test_names_of_other_parts_are_durable_before_the_last_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "BATCH_FRAMES", 4)
    synced: list[list[str]] = []
    fsync = writing.fsync_path

    def traced(directory: Path) -> None:
        synced.append(sorted(path.name for path in directory.glob("[0-9]*")))
        fsync(directory)

    with writer(tmp_path, segment_bytes=2000) as out:
        frames = transaction(100, *(insert(value=b"%030d" % n) for n in range(30)))
        write(out, frames[:-1])
        monkeypatch.setattr(writing, "fsync_path", traced)
        write(out, frames[-1:])
    named = [segment.path.name for segment in list_segments(tmp_path)]
    assert len(named) > 2
    assert synced == [named[:-1], named]


@pytest.fixture
def segment(tmp_path: Path) -> Path:
    with writer(tmp_path) as out:
        write(out, transaction(100, relation(1), *(insert(value=b"%09d" % n) for n in range(200))))
        out.flush()
    return list_segments(tmp_path)[0].path


def test_every_damaged_byte_of_the_data_is_found(segment: Path) -> None:
    content = segment.read_bytes()
    place = content.index(b"000000123")
    for offset in (place, content.index(insert(value=b"000000007"))):
        damaged = bytearray(content)
        damaged[offset] ^= 1
        segment.write_bytes(damaged)
        with pytest.raises(PgOutputError, match=f"{segment.name} is damaged: record batch 0 has"):
            rows(segment)
    segment.write_bytes(content)
    assert len(rows(segment)) == 203


@pytest.mark.parametrize("parts", [1, 2])
def test_no_flipped_bit_is_read_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parts: int
) -> None:
    """One anywhere gives this package's error, or the same rows (padding)."""
    monkeypatch.setattr(writing, "BATCH_FRAMES", 16)
    inserts = [insert(value=b"%09d" % n) for n in range(40)]
    with writer(tmp_path, segment_bytes=1 << 20 if parts == 1 else 2000) as out:
        write(out, transaction(100, relation(1), *inserts), [(200, message(200))])
        out.flush()
    listed = [segment.path for segment in list_segments(tmp_path)][:parts]
    path = listed[0]
    content = path.read_bytes()
    expected = rows(path)
    size = len(content)
    rng = random.Random(7)
    places = [*range(size - 10, size), *rng.sample(range(size - 1500, size), 150)]
    places += [*rng.sample(range(1500), 100), *rng.sample(range(size), 140)]
    found = 0
    for place in places:
        damaged = bytearray(content)
        damaged[place] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        try:
            with SegmentReader(path) as reader:
                assert reader.is_last_part == (parts == 1)
                read = [row for batch in reader for row in batch.to_pylist()]
        except PgOutputError as error:
            assert path.name in str(error)  # noqa: PT017
            assert str(error).isprintable()  # noqa: PT017
            found += 1
        else:
            assert read == expected
        # It is not left out either.
        with contextlib.suppress(PgOutputError):
            assert list_segments(tmp_path)[0].path == path
    assert found > len(places) / 3


def rewrite(path: Path, *, batches: list[int], metadata: bytes | None = None) -> None:
    """Other batches in the file, with a footer that is right for them."""
    with pa.ipc.open_file(str(path)) as file:
        schema = file.schema
        kept = [file.get_batch_with_custom_metadata(index) for index in batches]
    if metadata is not None:
        schema = schema.with_metadata({b"pgoutput_fast.segment": metadata})
    with pa.ipc.new_file(str(path), schema) as file:
        for batch, custom in kept:
            file.write_batch(batch, custom_metadata=custom)


@pytest.mark.parametrize("codec", ["zstd", "lz4"])
def test_compressed_segments_are_the_same(tmp_path: Path, codec: Any) -> None:
    frames = transaction(100, relation(1), *(insert(value=b"x" * n) for n in range(300)))
    for name, compression in (("plain", None), ("packed", codec)):
        with SegmentWriter(
            tmp_path / name, METADATA, confirmed_flush_lsn=50, compression=compression
        ) as out:
            write(out, frames)
            assert out.flush() == 110
    ((plain,), (packed,)) = (list_segments(tmp_path / name) for name in ("plain", "packed"))
    assert rows(packed) == rows(plain)
    assert len(rows(packed)) == len(frames)
    assert packed.path.stat().st_size < plain.path.stat().st_size / 2
    with pytest.raises(PgOutputError, match="compression='gzip': expected None, 'lz4' or 'zstd'"):
        SegmentWriter(tmp_path, METADATA, confirmed_flush_lsn=0, compression="gzip")  # type: ignore[arg-type]


def claims(path: Path, index: int, claimed: int) -> None:
    """Let the last buffer of a compressed record batch claim to unpack to so many bytes."""
    data = bytearray(path.read_bytes())
    with pa.OSFile(str(path)) as file:
        block = record_batch_blocks(file)[index]
    with pa.ipc.open_file(str(path)) as opened:
        size = opened.get_batch(index)["data"].buffers()[2].size
    at = data.rindex(struct.pack("<q", size))
    assert at > block.offset + block.size
    data[at : at + 8] = struct.pack("<q", claimed)
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("claimed", "match"),
    [
        (1 << 40, r"claims 3 rows in \d+ bytes, more than a segment's ever has"),
        (5 << 20, r"claims 3 rows in \d+ bytes, more than a segment's ever has"),
        (2_999, "is no segment, or is cut short or damaged"),
        (-2, "buffer 12 of the record batch claims -2 bytes"),
    ],
)
def test_what_compressed_batches_claim_is_checked_before_they_are_unpacked(
    tmp_path: Path, claimed: int, match: str
) -> None:
    with SegmentWriter(tmp_path, METADATA, confirmed_flush_lsn=50, compression="lz4") as out:
        write(out, transaction(100, insert(value=b"x" * 3000)))
        out.flush()
    (segment,) = list_segments(tmp_path)
    claims(segment.path, 0, claimed)
    with pytest.raises(PgOutputError, match=match), SegmentReader(segment.path) as reader:
        list(reader)


def test_dictionaries_are_refused(segment: Path) -> None:
    """Arrow unpacks them when it opens the file, and no column of a segment has any."""
    schema = pa.schema({"label": pa.dictionary(pa.int32(), pa.utf8())})
    with pa.ipc.new_file(str(segment), schema) as file:
        file.write_batch(pa.record_batch([pa.array(["a"]).dictionary_encode()], schema))
    with (
        pa.OSFile(str(segment)) as opened,
        pytest.raises(
            ValueError, match=r"^it has dictionaries, which no column of a segment uses$"
        ),
    ):
        record_batch_blocks(opened)


def test_a_bomb_takes_no_memory(segment: Path) -> None:
    with SegmentReader(segment) as reader:
        metadata = reader.metadata.to_json().encode()
    schema = segments.segment_schema().with_metadata({b"pgoutput_fast.segment": metadata})
    zeros = pa.array([0], pa.uint64()).take(pa.array([0] * (1 << 21)))
    bomb = pa.RecordBatch.from_arrays(
        [zeros, zeros, zeros.cast(pa.int64()), zeros.cast(pa.uint32()), zeros.cast(pa.int64()),
         pa.array([b""] * (1 << 21), pa.binary())],
        schema=schema,
    )  # fmt: skip
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_file(str(segment), schema, options=options) as file:
        file.write_batch(bomb)
    assert segment.stat().st_size < 100_000
    script = (
        "import sys, pyarrow as pa\n"
        "from pgoutput_fast.errors import PgOutputError\n"
        "from pgoutput_fast.segments import SegmentReader\n"
        "try:\n"
        "    list(SegmentReader(sys.argv[1]))\n"
        "except PgOutputError as e:\n"
        "    used = pa.default_memory_pool().max_memory()\n"
        "    print('more than a segment' in str(e), used < 1 << 20)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script, str(segment)], capture_output=True, text=True, check=True
    )
    assert ran.stdout == "True True\n"


@pytest.mark.parametrize(
    ("batches", "what"),
    [
        ([], "its footer has no record batches"),
        ([0, 1, 2], "the last of its 3 record batches is no end mark"),
        ([3], "the end mark with the metadata has checksum"),
        ([0, 1, 1, 3], "record batch 2 has checksum"),
        ([1, 0, 2, 3], "record batch 0 has checksum"),
    ],
)
def test_lost_batches_are_found_and_nothing_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batches: list[int], what: str
) -> None:
    monkeypatch.setattr(writing, "BATCH_FRAMES", 16)
    with writer(tmp_path) as out:
        write(out, transaction(100, *(insert(value=b"%09d" % n) for n in range(40))))
        assert out.flush() == 110
    (segment,) = list_segments(tmp_path)
    rewrite(segment.path, batches=batches)
    left = tmp_path / ".00000.arrow.tmp"
    left.write_bytes(b"left by a kill")
    content = segment.path.read_bytes()
    with pytest.raises(PgOutputError, match=rf"{segment.path.name} is damaged: {what}.*; restore"):
        rows(segment)
    if len(batches) < 4:
        for refusing in (list_segments, functools.partial(writer, confirmed=110)):
            with pytest.raises(PgOutputError, match=f"{segment.path.name} is damaged: {what}"):
                refusing(tmp_path)
        assert left.exists()
    else:  # seen when they are read
        assert list_segments(tmp_path) == [segment]
    assert segment.path.read_bytes() == content


def test_metadata_have_the_checksum_too(segment: Path) -> None:
    with SegmentReader(segment) as reader:
        metadata = reader.metadata
    other = dataclasses.replace(metadata, encoding="LATIN1")
    rewrite(segment, batches=[0, 1], metadata=other.to_json().encode())
    with pytest.raises(PgOutputError, match="the end mark with the metadata has checksum"):
        SegmentReader(segment)
    rewrite(segment, batches=[0, 1], metadata=metadata.to_json().encode())
    assert len(rows(segment)) == 203


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Segment]:
    """A segment up to 110, and one from 200 to 210 in several parts."""
    monkeypatch.setattr(writing, "BATCH_FRAMES", 4)
    with writer(tmp_path, segment_bytes=200) as out:
        write(out, transaction(100, insert(value=b"x" * 100)))
        assert write(out, transaction(200, *(insert(value=b"%030d" % n) for n in range(30)))) == [
            210
        ]
    found = list_segments(tmp_path)
    assert [segment.end_lsn for segment in found] == [110] + [210] * (len(found) - 1)
    return found[1:]


def test_last_part_that_is_gone_is_an_error(tmp_path: Path, parts: list[Segment]) -> None:
    """Where it was acknowledged; the server can't send it again."""
    parts[-1].path.unlink()
    (tmp_path / ".00000.arrow.tmp").write_bytes(b"of another capture")
    before = names(tmp_path)
    with pytest.raises(PgOutputError, match=r"000C8-.*-00000\.arrow is not complete: there are"):
        list_segments(tmp_path)
    for confirmed in (201, 210, 300):
        with pytest.raises(PgOutputError, match=r"is not complete: .* does not send it again"):
            writer(tmp_path, confirmed=confirmed)
    other = dataclasses.replace(METADATA, slot="other")
    with pytest.raises(PgOutputError, match="are not of this slot"):
        SegmentWriter(tmp_path, other, confirmed_flush_lsn=110)
    assert names(tmp_path) == before
    # It was not acknowledged: the server sends it again.
    with writer(tmp_path, confirmed=110) as out:
        assert out.position == 110
    assert names(tmp_path) == ["0000000000000064-000000000000006E-00000.arrow"]


def test_idle_position_counts_as_acknowledged(tmp_path: Path, parts: list[Segment]) -> None:
    with writer(tmp_path) as out:
        assert out.advance(300) == 300
    parts[-1].path.unlink()
    with pytest.raises(PgOutputError, match=r"is not complete: .* does not send it again"):
        writer(tmp_path, confirmed=110)


def test_damaged_part_among_others_is_found(tmp_path: Path, parts: list[Segment]) -> None:
    for segment in parts:
        content = segment.path.read_bytes()
        with pa.ipc.open_file(str(segment.path)) as file:
            count = file.num_record_batches
        rewrite(segment.path, batches=list(range(count - 1)))
        match = rf"{segment.path.name} is damaged: the last of its {count - 1} record batches"
        with pytest.raises(PgOutputError, match=match):
            list_segments(tmp_path)
        with pytest.raises(PgOutputError, match=match):
            writer(tmp_path)
        segment.path.write_bytes(content)
    assert len(list_segments(tmp_path)) == len(parts) + 1


def test_listing_while_the_last_part_gets_its_name(
    tmp_path: Path, parts: list[Segment], monkeypatch: pytest.MonkeyPatch
) -> None:
    last = parts[-1].path
    temporary = tmp_path / f".{parts[-1].part:05d}.arrow.tmp"
    last.rename(temporary)
    assert len(list_segments(tmp_path)) == 1
    listed = listing.chain

    def renamed_after(directory: Path) -> Any:
        found = listed(directory)
        if temporary.exists():
            temporary.rename(last)
        return found

    monkeypatch.setattr(listing, "chain", renamed_after)
    assert len(list_segments(tmp_path)) == len(parts) + 1


def test_without_numpy_it_is_read_and_not_written(segment: Path) -> None:
    script = (
        "import sys; sys.modules['numpy'] = None\n"
        "from pgoutput_fast.segments import *\n"
        "from pgoutput_fast.errors import PgOutputError\n"
        "(found,) = list_segments(sys.argv[1])\n"
        "with SegmentReader(found.path) as reader:\n"
        "    print(sum(batch.num_rows for batch in reader))\n"
        "    metadata = reader.metadata\n"
        "try:\n"
        "    SegmentWriter(sys.argv[1], metadata, confirmed_flush_lsn=0)\n"
        "except PgOutputError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(segment.parent)],
        check=True,
        capture_output=True,
        text=True,
    )
    count, error = done.stdout.splitlines()
    assert count == "203"
    assert error.startswith("segments are written with numpy (")
    assert error.endswith("; install numpy")


def test_file_cut_short_is_refused(segment: Path) -> None:
    content = segment.read_bytes()
    for size in (0, 3, 8, 100, len(content) // 2, len(content) - 1):
        segment.write_bytes(content[:size])
        with pytest.raises(PgOutputError, match=f"{segment.name} is no segment, or is cut short"):
            rows(segment)
        with pytest.raises(PgOutputError, match=segment.name):
            list_segments(segment.parent)


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "0000000000000064-000000000000006E-00000.arrow"
    with pytest.raises(PgOutputError, match=r"can't open segment .*No such file"):
        SegmentReader(path)
    with pytest.raises(PgOutputError, match="can't read directory"):
        list_segments(path)
    path.write_text("what is this")
    with pytest.raises(PgOutputError, match="is no segment"):
        SegmentReader(path)
    for metadata, match in [
        (None, "is an Arrow file, but no segment"),
        (b"[]", "its metadata are not a segment's"),
        (b'{"format_version": 1, "checksum": "crc32", "slot": "s"}', "are not a segment's"),
        (b'{"format_version": 3, "checksum": "crc32"}', r"version is 3 .* update pgoutput_fast"),
    ]:
        schema = segments.segment_schema()
        if metadata is not None:
            schema = schema.with_metadata({b"pgoutput_fast.segment": metadata})
        with pa.ipc.new_file(str(path), schema):
            pass
        with pytest.raises(PgOutputError, match=match):
            SegmentReader(path)
