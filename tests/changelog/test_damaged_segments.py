"""Damaged and rewritten segments: what a reader refuses, and that nothing is read over."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import random
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.ipc
import pytest
from support.changelogs.written_segments import (
    METADATA,
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

from pgoutput_fast import segments
from pgoutput_fast._disk import temporary_path
from pgoutput_fast.errors import PgOutputError
from pgoutput_fast.segments import (
    Segment,
    SegmentReader,
    SegmentWriter,
    list_segments,
    listing,
)
from pgoutput_fast.segments import writer as writing


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
        with expect_error(code="damaged", path=str(segment)):
            rows(segment)
    segment.write_bytes(content)
    assert len(rows(segment)) == 203


@pytest.mark.everyday("[1]")
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
    with expect_error(parameter="compression"):
        SegmentWriter(tmp_path, METADATA, confirmed_flush_lsn=0, compression="gzip")  # type: ignore[arg-type]


@pytest.mark.parametrize("claimed", [1 << 62, 2_999, -2])
def test_a_damaged_size_of_a_compressed_buffer_is_refused(tmp_path: Path, claimed: int) -> None:
    with SegmentWriter(tmp_path, METADATA, confirmed_flush_lsn=50, compression="lz4") as out:
        write(out, transaction(100, insert(value=b"x" * 3000)))
        out.flush()
    path = list_segments(tmp_path)[0].path
    with pa.ipc.open_file(str(path)) as opened:
        size = opened.get_batch(0)["data"].buffers()[2].size
    data = bytearray(path.read_bytes())
    at = data.rindex(struct.pack("<q", size))
    data[at : at + 8] = struct.pack("<q", claimed)
    path.write_bytes(data)
    with expect_error(code="damaged", path=str(path)):
        rows(path)


def test_a_layout_index_of_negative_length_is_refused(
    segment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if the checksum fits: pyarrow ends the process when it reads such a value."""
    monkeypatch.setattr(SegmentReader, "_check", lambda *_: None)
    with SegmentReader(segment) as reader:
        size = len(reader._index)
    data = bytearray(segment.read_bytes())
    at = data.rindex(struct.pack("<ii", 0, size))
    data[at : at + 8] = struct.pack("<ii", size + 1, size)
    segment.write_bytes(data)
    with expect_error(code="damaged", path=str(segment)):
        SegmentReader(segment)


@pytest.mark.parametrize(
    "batches",
    [[], [0, 1, 2], [3], [0, 1, 1, 3], [1, 0, 2, 3]],
    ids=["no batches", "no end mark", "the end mark alone", "one twice", "two changed places"],
)
def test_lost_batches_are_found_and_nothing_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batches: list[int]
) -> None:
    monkeypatch.setattr(writing, "BATCH_FRAMES", 16)
    with writer(tmp_path) as out:
        write(out, transaction(100, *(insert(value=b"%09d" % n) for n in range(40))))
        assert out.flush() == 110
    (segment,) = list_segments(tmp_path)
    rewrite(segment.path, batches=batches)
    left = temporary_path(tmp_path / "00000.arrow")
    left.write_bytes(b"left by a kill")
    content = segment.path.read_bytes()
    with expect_error(code="damaged", path=str(segment.path)):
        rows(segment)
    if len(batches) < 4:
        for refusing in (list_segments, functools.partial(writer, confirmed=110)):
            with expect_error(code="damaged", path=str(segment.path)):
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
    with expect_error(code="damaged", path=str(segment)):
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
    temporary_path(tmp_path / "00000.arrow").write_bytes(b"of another capture")
    before = names(tmp_path)
    with expect_error(code="incomplete", path=str(parts[0].path)):
        list_segments(tmp_path)
    for confirmed in (201, 210, 300):
        with expect_error(code="changes_missing", path=str(tmp_path)):
            writer(tmp_path, confirmed=confirmed)
    other = dataclasses.replace(METADATA, slot="other")
    with expect_error(parameter="directory", path=str(tmp_path)):
        SegmentWriter(tmp_path, other, confirmed_flush_lsn=110)
    assert names(tmp_path) == before
    # It was not acknowledged: the server sends it again.
    with writer(tmp_path, confirmed=110) as out:
        assert out.position == 110
    assert names(tmp_path) == ["0000000000000032-000000000000006E-00000-of-00001.arrow"]


def test_idle_position_counts_as_acknowledged(tmp_path: Path, parts: list[Segment]) -> None:
    with writer(tmp_path) as out:
        assert out.advance(300) == 300
    parts[-1].path.unlink()
    with expect_error(code="changes_missing", path=str(tmp_path)):
        writer(tmp_path, confirmed=110)


def test_damaged_part_among_others_is_found(tmp_path: Path, parts: list[Segment]) -> None:
    for segment in parts:
        content = segment.path.read_bytes()
        with pa.ipc.open_file(str(segment.path)) as file:
            count = file.num_record_batches
        rewrite(segment.path, batches=list(range(count - 1)))
        with expect_error(code="damaged", path=str(segment.path)):
            list_segments([one.path for one in parts])
        with expect_error(code="damaged", path=str(segment.path)):
            writer(tmp_path)
        segment.path.write_bytes(content)
    assert len(list_segments(tmp_path)) == len(parts) + 1


def test_listing_while_the_last_part_gets_its_name(
    tmp_path: Path, parts: list[Segment], monkeypatch: pytest.MonkeyPatch
) -> None:
    last = parts[-1].path
    temporary = temporary_path(tmp_path / f"{parts[-1].part:05d}.arrow")
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
    assert error.startswith("writing segments needs numpy (")
    assert error.endswith(". Install numpy")


def test_file_cut_short_is_refused(segment: Path) -> None:
    content = segment.read_bytes()
    for size in (0, 3, 8, 100, len(content) // 2, len(content) - 1):
        segment.write_bytes(content[:size])
        with expect_error(code="damaged", path=str(segment)):
            rows(segment)
        with expect_error(code="damaged", path=str(segment)):
            list_segments(segment.parent)


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "0000000000000064-000000000000006E-00000-of-00001.arrow"
    with expect_error(code="missing_path", path=str(path)):
        SegmentReader(path)
    with expect_error(code="missing_path", path=str(path)):
        list_segments(path)
    path.write_text("what is this")
    with expect_error(code="damaged", path=str(path)):
        SegmentReader(path)
    for metadata, code in [
        (None, "not_ours"),
        (b"[]", "damaged"),
        (b'{"format_version": 3, "checksum": "crc32", "slot": "s"}', "damaged"),
        (b'{"format_version": 4, "checksum": "crc32"}', "not_supported"),
        (b'{"format_version": 2, "checksum": "crc32"}', "not_supported"),
    ]:
        schema = segments.segment_schema()
        if metadata is not None:
            schema = schema.with_metadata({b"pgoutput_fast.segment": metadata})
        with pa.ipc.new_file(str(path), schema):
            pass
        with expect_error(code=code, path=str(path)):
            SegmentReader(path)
