"""Segments: what a writer makes of frames, what a reader refuses, how a directory is continued."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import struct
import zlib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pytest
from support.changelogs.written_segments import (
    METADATA,
    Frames,
    begin,
    commit,
    data,
    insert,
    message,
    names,
    relation,
    rows,
    transaction,
    write,
    writer,
)
from support.expected_errors import expect_error

from pgoutput_fast import segments, testing
from pgoutput_fast._disk import temporary_path
from pgoutput_fast.decoding.state import MOST_SUPERSEDED
from pgoutput_fast.errors import Argument
from pgoutput_fast.segments import (
    SegmentMetadata,
    SegmentReader,
    SegmentWriter,
    list_segments,
    listing,
)
from pgoutput_fast.segments import writer as writing


def type_(oid: int) -> bytes:
    return testing.type_(testing.UserType(oid, "mood"))


def truncate(*oids: int) -> bytes:
    return testing.truncate(oids)


def test_the_timeline_may_change_meanwhile(tmp_path: Path) -> None:
    """Each segment says on which the server was that sent it, and so does the position."""
    first, second = transaction(100, relation(1), insert()), transaction(300, insert())
    one = dataclasses.replace(METADATA, timeline=1)
    with SegmentWriter(tmp_path, one, confirmed_flush_lsn=50) as out:
        assert write(out, first) == []
        assert out.set_timeline(1) is None
        end = out.set_timeline(2)
        assert end == out.position == out.end_lsn
        assert out.timeline == 1
        assert write(out, second) == []
        assert out.flush() == out.position
        assert (out.timeline, out.set_timeline(3)) == (2, None)
        assert out.advance(500) == 500
        assert out.timeline == 3
    timelines = []
    for segment in list_segments(tmp_path):
        with SegmentReader(segment.path) as reader:
            timelines.append(reader.metadata.timeline)
    assert timelines == [1, 2]
    with SegmentWriter(tmp_path, one, confirmed_flush_lsn=500) as out:
        assert (out.position, out.timeline) == (500, 3)


def test_columns_name_and_metadata(tmp_path: Path) -> None:
    frames = [
        *transaction(
            100,
            type_(9),
            relation(1),
            relation(2),
            insert(),
            truncate(1, 2),
            insert(),
            xid=2**32 - 1,
        ),
        (120, message(120)),
    ]
    with writer(tmp_path) as out:
        assert write(out, frames) == []
        assert [re.sub(r"[0-9a-f]{16}", "", name) for name in names(tmp_path)] == [
            ".00000.arrow..tmp"
        ]
        assert not out.is_idle
        assert out.flush() == 120
        assert out.flush() is None
        assert out.is_idle
        assert out.position == 120
    assert names(tmp_path) == ["0000000000000032-0000000000000078-00000-of-00001.arrow"]
    (segment,) = list_segments(tmp_path)
    assert segment[:4] == (50, 120, 0, 1)
    with SegmentReader(segment.path) as reader:
        assert reader.metadata == SegmentMetadata(**{**vars(METADATA), "start_lsn": 50})
        assert reader.is_last_part
        (batch,) = reader
    assert batch.schema.remove_metadata() == segments.segment_schema()
    within = {"commit_lsn": 100, "commit_time": -5, "xid": 4294967295}
    outside = {"commit_lsn": None, "commit_time": None, "xid": None}
    assert batch.to_pylist() == [
        {"lsn": lsn, **(within if lsn != 120 else outside), "seq": seq, "data": frame}
        for (lsn, frame), seq in zip(
            frames, [None, None, None, None, 0, 1, 3, None, None], strict=True
        )
    ]
    # As another reader would check it: documented, not only consistent.
    with pa.ipc.open_file(str(segment.path)) as file:
        found, custom = file.get_batch_with_custom_metadata(0)
        assert json.loads(file.schema.metadata[b"pgoutput_fast.segment"])["format_version"] == 3
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
    (index,) = end["data"].to_pylist()
    assert [one["changes"] for one in json.loads(index)] == [2, 0]
    content = struct.pack("<qqqQ", 1, 1, 0, 0)
    content += b"".join(struct.pack("<qB", 1, 0) + bytes(width) for width in (8, 8, 4, 8))
    content += struct.pack("<qii", 0, 0, len(index)) + index
    crc = zlib.crc32(content + text + b"last")
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
    # The newest last, so that of two that have a name one after the other the last one has it.
    assert data(third) == [type_(9), relation(2), relation(1, "new"), message(300)]
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
        write(out, transaction(200, insert(count), announces=False))
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
    assert [segment[:3] for segment in list_segments(tmp_path)] == [(50, 310, 0), (310, 610, 0)]
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
    assert [segment[:4] for segment in parts] == [
        (50, 210, n, len(parts)) for n in range(len(parts))
    ]
    assert found[-1][:4] == (210, 310, 0, 1)
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
    last.rename(temporary_path(tmp_path / f"{found[-1].part:05d}.arrow"))
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
    with expect_error(code="incomplete"):
        list_segments(tmp_path)
    with expect_error(code="incomplete"):
        writer(tmp_path)
    assert names(tmp_path) == before


def test_resume_goes_on_at_the_end(tmp_path: Path) -> None:
    with writer(tmp_path) as out:
        assert out.position == 50
        write(out, transaction(100, insert()))
        out.flush()
        write(out, transaction(200, insert()))
    assert names(tmp_path) == ["0000000000000032-000000000000006E-00000-of-00001.arrow"]
    temporary_path(tmp_path / "00004.arrow").write_bytes(b"left by a kill")
    # The slot may be behind, as a status message can be lost; not beyond.
    with writer(tmp_path, confirmed=60) as out:
        assert out.position == 110
        assert len(names(tmp_path)) == 1
        write(out, transaction(200, insert()))
        out.flush()
    assert [segment.end_lsn for segment in list_segments(tmp_path)] == [110, 210]
    with expect_error(code="changes_missing", path=str(tmp_path)):
        writer(tmp_path, confirmed=211)


def test_a_first_segment_that_is_deleted_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with writer(tmp_path) as out:
        for lsn in (100, 200):
            write(out, transaction(lsn, insert()))
            out.flush()
    contents = listing.contents
    deleted = []

    def seen(directory: Path) -> listing.Contents:
        found = contents(directory)
        if not deleted:
            deleted.append(found.segments[0].path)
            found.segments[0].path.unlink()
        return found

    monkeypatch.setattr(listing, "contents", seen)
    assert listing.metadata_of(tmp_path) == dataclasses.replace(METADATA, start_lsn=110)
    list_segments(tmp_path)[0].path.write_bytes(b"damaged")
    with expect_error(code="damaged"):
        listing.metadata_of(tmp_path)


def test_slot_that_moves_before_the_first_segment_is_noticed(tmp_path: Path) -> None:
    with writer(tmp_path, confirmed=50) as out:
        write(out, transaction(100, insert()))
    with expect_error(code="changes_missing", path=str(tmp_path)):
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
    with expect_error(code="changes_missing", path=str(tmp_path)):
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
    with expect_error(code="damaged", path=str(tmp_path / "position.json")):
        writer(tmp_path, confirmed=500)


def test_gap_and_overlap_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with writer(tmp_path) as out:
        for lsn in (100, 200, 300):
            write(out, transaction(lsn, insert()))
            out.flush()
    first, second, third = list_segments(tmp_path)
    second.path.rename(tmp_path / "moved")
    with expect_error(code="changes_missing", path=str(third.path)):
        list_segments(tmp_path)
    (tmp_path / "moved").rename(second.path)
    # A directory may be read with a file that has just come, and without the one before it.
    read = listing.listed
    with monkeypatch.context() as patch:
        seen = [[first, third]]
        patch.setattr(listing, "listed", lambda path: seen.pop() if seen else read(path))
        assert list_segments(tmp_path) == [first, second, third]
        assert seen == []
    # The oldest ones may be deleted.
    first.path.unlink()
    assert list_segments(tmp_path) == [second, third]
    overlapping = tmp_path / "00000000000000D0-00000000000000F0-00000-of-00001.arrow"
    overlapping.write_bytes(second.path.read_bytes())
    with expect_error(code="another_history"):
        list_segments(tmp_path)
    for name in ("segment.arrow", "00000000000000D0-00000000000000F0-00000.arrow"):
        overlapping = overlapping.rename(tmp_path / name)
        with expect_error(code="not_ours", path=str(overlapping)):
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
    for paths, code, path in [
        ([first, second, first], "bad_option", first),
        ([second, copy], "bad_option", second),
        ([first, *parts], "changes_missing", parts[0]),
        ([first, other.path], "another_history", other.path),
        ([second, other.path], "another_history", other.path),
        (parts[:-1], "incomplete", parts[0]),
        (parts[1:], "incomplete", parts[1]),
        (parts[0], "incomplete", parts[0]),
        ([first, tmp_path / "b"], "bad_option", tmp_path / "b"),
        ([tmp_path / "gone"], "not_ours", tmp_path / "gone"),
    ]:
        with expect_error(code=code, path=str(path)):
            list_segments(paths)  # type: ignore[arg-type]


def test_directory_is_one_slots_and_one_writers(tmp_path: Path) -> None:
    with writer(tmp_path) as out:
        write(out, transaction(100, insert()))
        out.flush()
        with expect_error(code="in_use", path=str(tmp_path)):
            writer(tmp_path)
    other = SegmentMetadata(**{**vars(METADATA), "slot": "other"})
    with expect_error(parameter="directory", path=str(tmp_path), options=[Argument("slot", "s")]):
        SegmentWriter(tmp_path, other, confirmed_flush_lsn=50)
    # A refused writer does not keep the lock.
    writer(tmp_path).close()
    with expect_error(code="io_failed", path=str(list_segments(tmp_path)[0].path)):
        writer(list_segments(tmp_path)[0].path)


@pytest.mark.parametrize(
    ("frames", "code", "offset"),
    [
        ([(1, insert())], "unfit_stream", None),
        ([(1, truncate(1))], "unfit_stream", None),
        ([(1, commit(100, 110))], "unfit_stream", None),
        ([(1, begin(100)), (1, begin(100))], "unfit_stream", None),
        ([(1, begin(100)), (1, commit(101, 111))], "unfit_stream", None),
        ([(1, begin(49))], "unfit_stream", None),
        ([(1, begin(100)), (1, b"S\0\0\0\1\1")], "unfit_stream", None),
        ([(1, begin(100)), (1, b"")], "unfit_stream", None),
        ([(1, b"B\0\0")], "truncated", 1),
        ([(1, b"R\0")], "truncated", 1),
        ([(95, begin(100)), (95, b"T\0\0\0\2\0\0\0\0\1")], "bad_count", 1),
        ([(95, begin(100)), (95, b"T\x80\0\0\1\0\0\0\0\1")], "bad_count", 1),
    ],
)
def test_frames_that_do_not_follow_are_refused(
    tmp_path: Path, frames: Frames, code: str, offset: int | None
) -> None:
    with writer(tmp_path) as out, expect_error(code=code, offset=offset):
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
        with expect_error(code="unfit_stream"):
            out.write(1, insert())
    elif after == "a full disk":
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", lambda _: raise_(OSError(errno.ENOSPC, "full")))
            with expect_error(code="io_failed", path=str(tmp_path)):
                out.flush()
    elif after == "an interrupt":
        with monkeypatch.context() as patched:
            patched.setattr(out, "_append", lambda *_: raise_(KeyboardInterrupt()))
            with pytest.raises(KeyboardInterrupt):
                out.write(1, begin(200))
    else:
        out.close()
    for use in (lambda: out.write(1, begin(200)), out.flush, lambda: out.advance(900)):
        with expect_error(code="unfit_input", path=str(tmp_path)):
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
        with expect_error(code="io_failed", path=str(tmp_path)):
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
    assert [re.sub(r"\.[0-9a-f]{16}\.", ".", call) for call in calls] == [
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
