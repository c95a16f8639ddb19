"""Rows of COPY in binary format as Insert frames, and frames without their xids, by both twins."""

from __future__ import annotations

import inspect
import itertools
import random
import struct
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from support.expected_errors import expect_error

import pgoutput_fast as pf
from pgoutput_fast import _impl, testing, transcode
from pgoutput_fast.transcode import inserts_of_copy, without_xids

pytest.importorskip("numpy")

HEADER = b"PGCOPY\n\xff\r\n\0" + bytes(8)
TRAILER = b"\xff\xff"


@pytest.fixture(autouse=True)
def chosen(impl: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each implementation in turn is the one that is called."""
    monkeypatch.setattr(_impl, "IMPLEMENTATION", impl.IMPLEMENTATION)


def copy_row(*values: bytes | None) -> bytes:
    data = struct.pack(">h", len(values))
    for value in values:
        data += struct.pack(">i", -1) if value is None else struct.pack(">i", len(value)) + value
    return data


def split(made: transcode.InsertFrames | transcode.PackedFrames) -> list[bytes]:
    """The frames one by one; between their offsets lies all of the buffer."""
    assert made.offsets.dtype == "int64"
    ends = made.offsets.tolist()
    assert (ends[0], ends[-1]) == (0, len(made.data))
    return [made.data[begin:end] for begin, end in itertools.pairwise(ends)]


def test_the_implementation_that_is_asked_for_is_called(impl: ModuleType) -> None:
    name = {"cython": "_bulk", "python": "_pure_bulk"}[impl.IMPLEMENTATION]
    assert _impl.twin("transcode._bulk").__name__ == f"pgoutput_fast.transcode.{name}"


@pytest.mark.parametrize("xid", [None, 7])
def test_rows_become_inserts(impl: ModuleType, xid: int | None) -> None:
    rows = [(b"\0\0\0\1", b"text"), (None, None), (b"", b"x" * 1000), (b"\0\0\0\2", None)]
    data = b"".join(copy_row(*row) for row in rows)
    made = inserts_of_copy(data, 16385, "bt", xid=xid)
    assert (made.consumed, made.ended) == (len(data), False)
    expected = [
        testing.insert(16385, [value if value is None else (kind, value)
                               for kind, value in zip("bt", row, strict=True)], xid)
        for row in rows
    ]  # fmt: skip
    assert split(made) == expected
    first = impl.decode(expected[0], xid is not None)
    assert (first.xid, first.relation_id, first.new.raws()) == (xid, 16385, rows[0])
    assert (first.new.kind(0), first.new.kind(1)) == ("b", "t")


def test_what_comes_out_is_what_decode_batch_takes(impl: ModuleType) -> None:
    rows = [copy_row(struct.pack(">i", i), None if i % 3 else b"x" * i) for i in range(100)]
    made = inserts_of_copy(HEADER + b"".join(rows) + TRAILER, 16385, "bb", header=True)
    assert made.ended
    batch = pf.decode_batch(made.data, made.offsets)
    assert batch.tags.tobytes() == b"I" * 100
    assert batch.relation_ids.tolist() == [16385] * 100
    kinds = (batch.slices["length_and_kind"] & 3).reshape(100, 2)
    assert kinds[:, 1].tolist() == [0 if i % 3 else 3 for i in range(100)]


@pytest.mark.parametrize("values", [(), (b"ab", None, b"", b"0123456789abcdef01234567890")])
def test_a_row_that_is_cut_off_is_left_for_the_next_call(values: tuple[bytes | None, ...]) -> None:
    """Cut before each byte, what was not consumed is put in front of the rest."""
    rows = HEADER + copy_row(*values) * 3 + TRAILER
    formats = "b" * len(values)
    (whole,) = {*split(inserts_of_copy(rows, 5, formats, header=True))}
    for cut in range(len(rows)):
        frames, rest, position = [], b"", 0
        for piece in (rows[:cut], rows[cut:]):
            data = rest + piece
            made = inserts_of_copy(data, 5, formats, header=position == 0)
            frames += split(made)
            position += made.consumed
            rest = data[made.consumed :]
        assert (frames, rest, position, made.ended) == ([whole] * 3, b"", len(rows), True)


def test_a_header_with_an_extension() -> None:
    header = b"PGCOPY\n\xff\r\n\0" + struct.pack(">Ii", 0xFFFF, 3) + b"ext"
    rows = copy_row(b"x")
    made = inserts_of_copy(header + rows, 5, "t", header=True)
    assert split(made) == [testing.insert(5, ["x"])]
    assert made.consumed == len(header + rows)
    for cut in range(len(header)):
        made = inserts_of_copy(header[:cut], 5, "t", header=True)
        assert (split(made), made.consumed, made.ended) == ([], 0, False)


@pytest.mark.parametrize("width", [0, 1, 7, 1600, 32767])
def test_rows_of_nulls(width: int) -> None:
    """Their frames are the shortest beside their rows, those of no column the longest."""
    data = copy_row(*[None] * width) * 5
    made = inserts_of_copy(data + data[:-1], 5, "b" * width, xid=1)
    assert split(made) == [testing.insert(5, [None] * width, 1)] * 9
    assert made.consumed == 9 * len(data) // 5


def test_random_rows_in_random_pieces() -> None:
    chance = random.Random(5)
    for _ in range(200):
        width = chance.randrange(12)
        formats = "".join(chance.choice("bt") for _ in range(width))
        rows = [
            [
                None if chance.random() < 0.3
                else chance.randbytes(chance.choice((0, 1, 11, 12, 13, 16, 17, 40)))
                for _ in range(width)
            ]
            for _ in range(chance.randrange(30))
        ]  # fmt: skip
        data = b"".join(copy_row(*row) for row in rows) + TRAILER
        expected = [
            testing.insert(
                9, [v if v is None else (k, v) for k, v in zip(formats, row, strict=True)]
            )
            for row in rows
        ]
        found, at, rest = [], 0, b""
        ended = False
        while not ended:
            step = chance.choice((1, 5, 50, 500))
            rest += data[at : at + step]
            at += step
            made = inserts_of_copy(rest, 9, formats)
            found += split(made)
            rest, ended = rest[made.consumed :], made.ended
        assert (found, rest) == (expected, b"")


BIG = 0x3FFFFFFF
BAD: dict[str, tuple[bytes, str, int]] = {
    "fewer columns": (copy_row(b"x") + copy_row(), "b", 7),
    "more columns": (copy_row(b"x", b"y"), "b", 0),
    "a negative count": (b"\xff\xfe", "b", 0),
    "a negative length": (copy_row(b"x", None)[:-4] + b"\xff\xff\xff\xfe", "bb", 7),
    "the least length": (b"\0\1\x80\0\0\0", "b", 2),
    "the greatest length": (b"\0\1\x7f\xff\xff\xff", "b", 2),
    "a length that no frame holds": (b"\0\2\0\0\0\1x" + struct.pack(">i", BIG - 18), "bb", 7),
    "bytes behind the trailer": (copy_row(b"x") + TRAILER + b"\0", "b", 9),
    "text": (b"1\ta\n", "bb", 0),
}


@pytest.mark.parametrize("case", BAD)
def test_malformed_rows(case: str) -> None:
    data, formats, offset = BAD[case]
    with expect_error(code="unfit_input", offset=offset):
        inserts_of_copy(data, 5, formats)


def test_the_longest_length_that_a_frame_holds_is_waited_for() -> None:
    data = b"\0\2\0\0\0\1x" + struct.pack(">i", BIG - 19)
    assert inserts_of_copy(data, 5, "bb").consumed == 0


@pytest.mark.parametrize(
    ("header", "offset"),
    [
        (b"1\tone", 0),
        (HEADER[:11] + struct.pack(">Ii", 1 << 16, 0), 11),
        (HEADER[:15] + b"\xff\xff\xff\xff", 15),
        (HEADER[:15] + struct.pack(">i", BIG + 1), 15),
    ],
)
def test_malformed_headers(header: bytes, offset: int) -> None:
    with expect_error(code="unfit_input", offset=offset):
        inserts_of_copy(header, 5, "b", header=True)


def test_mutated_rows_give_the_same_by_both(both: tuple[ModuleType, ModuleType]) -> None:
    chance = random.Random(6)
    rows = copy_row(b"abcd", None, b"0123456789abcdef") * 3 + copy_row(None, b"", b"xy") + TRAILER
    edges = (b"\xff\xff\xff\xff", b"\xff\xff\xff\xfe", b"\x7f\xff\xff\xff", b"\0\0\0\x10", b"\0\3")
    twins = [_impl.twin("transcode._bulk", module.IMPLEMENTATION) for module in both]
    refused = 0
    for _ in range(3000):
        data = bytearray(rows)
        for _ in range(chance.randrange(1, 3)):
            at = chance.randrange(len(data))
            edge = chance.choice(edges)
            if chance.random() < 0.5:
                data[at : at + len(edge)] = edge
            elif chance.random() < 0.5:
                del data[at:]
            else:
                data[at : at + 1] = bytes([chance.randrange(256)])
            if not data:
                break
        one, other = (outcome(twin.copy_rows, bytes(data), 0, b"I\0\0\0\5N\0\3", b"btb")
                      for twin in twins)  # fmt: skip
        assert one == other
        refused += isinstance(one, str)
    assert 300 < refused < 2700


def outcome(call: Any, *arguments: Any) -> Any:
    """What a call gives, or what it raises."""
    try:
        return call(*arguments)
    except pf.PgOutputError as error:
        return f"{type(error).__name__} {error}"


def test_arguments() -> None:
    with expect_error(parameter="formats"):
        inserts_of_copy(b"", 5, "bx")
    with expect_error(code="unfit_input"):
        inserts_of_copy(b"", -1, "b")
    with expect_error(code="unfit_input"):
        inserts_of_copy(b"", 1, "b" * 0x8000)
    for data in ("text", None, 5):
        with pytest.raises(TypeError):
            inserts_of_copy(data, 5, "b")
        with pytest.raises(TypeError):
            without_xids(data, [0])
    for formats in (None, ["b"], b"b"):
        with pytest.raises(TypeError, match="formats"):
            inserts_of_copy(b"", 5, formats)  # type: ignore[arg-type]


def test_a_strided_buffer_is_refused() -> None:
    rows = memoryview(bytes(2 * len(copy_row(b"x"))))[::2]
    for header in (False, True):
        with pytest.raises(TypeError, match="data"):
            inserts_of_copy(rows, 5, "b", header=header)
    with pytest.raises(TypeError, match="data"):
        without_xids(rows, [0, len(rows)])


def test_any_buffer_has_copy_rows() -> None:
    data = copy_row(b"x") * 2
    expected = inserts_of_copy(data, 5, "b")
    for given in (bytearray(data), memoryview(b"__" + data)[2:], memoryview(data).cast("H")):
        made = inserts_of_copy(given, 5, "b")
        assert (made.data, made.consumed) == (expected.data, expected.consumed)


# --- frames without xids --------------------------------------------------------------------------


def streamed_frames() -> Iterator[tuple[bytes, bytes]]:
    """Frames from inside a stream chunk, and as they are outside."""
    table = testing.Table("t", {"id": "int4", "m": testing.UserType(16400, "mood")})
    plain = [
        *table.announcement(),
        testing.insert(table, [1, "a"]),
        testing.update(table, [1, "a"], [2, None]),
        testing.delete(table, [1, None]),
        testing.truncate([table]),
        testing.message("p", b"x" * 1000),
        testing.origin("o"),
    ]
    for frame in plain:
        yield testing.in_stream(frame, 0x01020304), frame


def packed(frames: list[bytes]) -> tuple[bytes, list[int]]:
    ends = [0]
    for frame in frames:
        ends.append(ends[-1] + len(frame))
    return b"".join(frames), ends


def test_xids_are_cut_out() -> None:
    inside, plain = (list(frames) for frames in zip(*streamed_frames(), strict=True))
    assert split(without_xids(*packed(inside))) == plain
    # A part of a buffer: what is before its first offset is no frame.
    data, offsets = packed(inside)
    assert split(without_xids(b"??" + data + b"?", [end + 2 for end in offsets[2:]])) == plain[2:]
    assert split(without_xids(data, [5])) == []


def test_a_streamed_transaction_has_protocol_1s_form(impl: ModuleType) -> None:
    server = testing.Server()
    table = testing.Table("t", {"id": "int4"})
    with server.begin() as transaction:
        for i in range(10):
            transaction.insert(table, [i])
            if i == 5:
                transaction.stream()
    chunks = [frame for frame in server.frames if frame[:1] not in b"SEc"]
    made = split(without_xids(*packed(chunks)))
    (committed,) = server.committed
    assert made == [table.relation(), *(change.frame for change in committed.changes)]


@pytest.mark.parametrize("tag", "BCSEcAbPpKr?\0\xff")
def test_what_has_no_place_inside_a_stream_chunk(tag: str) -> None:
    frame = testing.in_stream(testing.insert(5, []), 7)
    other = tag.encode("latin-1") + bytes(300)
    with expect_error(pf.DecodeError, code="stream_order", offset=0, tag=tag, frame=1):
        without_xids(*packed([frame, other, b""]))


@pytest.mark.parametrize(
    ("frame", "code", "offset", "tag"),
    [(b"", "empty_frame", 0, None), (b"I", "truncated", 1, "I"), (b"M\0\0\0", "truncated", 1, "M")],
)
def test_frames_too_short(frame: bytes, code: str, offset: int, tag: str | None) -> None:
    with pytest.raises(pf.DecodeError) as caught:
        without_xids(*packed([frame]))
    error = caught.value
    assert (error.code, error.offset, error.tag, error.frame) == (code, offset, tag, 0)


def test_offsets_that_fall_or_leave_the_buffer() -> None:
    for offsets in ([0, 2, 1], [0, 9], [-1, 3]):
        with pytest.raises(ValueError, match="offset"):
            without_xids(bytes(8), offsets)
    with pytest.raises(ValueError, match="offsets"):
        without_xids(b"", [])


@pytest.mark.parametrize("name", ["copy_rows", "cut_xids"])
def test_bulk_twins_are_alike(name: str) -> None:
    compiled, plain = (
        getattr(_impl.twin("transcode._bulk", which), name) for which in ("cython", "python")
    )
    assert compiled is not plain
    assert inspect.getdoc(compiled) == inspect.getdoc(plain)
    assert inspect.signature(compiled) == inspect.signature(plain)
