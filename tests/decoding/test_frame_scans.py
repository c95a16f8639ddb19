"""What is found in frames that lie in one buffer: both twins, and plain models of sound streams.

`whole` and `scan` find transactions and stream chunks, `annotate` says what stands beside each
frame in a segment. They take whatever a connection brings, so most frames here are no good ones.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from pgoutput_fast import _impl, testing
from pgoutput_fast.testing import Server, strategies

np = pytest.importorskip("numpy", reason="what is found are its arrays")

TAGS = b"BCORYIUDTMSEcAbPKrp\0?"
ROWS = b"IUDT"
TABLE = testing.Table("t", {"id": "int4"}, 16400)
SETTINGS = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
FEW = settings(SETTINGS, max_examples=20)
some_or_many = pytest.mark.parametrize(
    "examples",
    [pytest.param(FEW, id="few"), pytest.param(SETTINGS, id="many", marks=pytest.mark.slow)],
)


def twins(module: str, function: str) -> list[Any]:
    """A function of both implementations, the compiled one first."""
    return [getattr(_impl.twin(module, name), function) for name in ("cython", "python")]


class Buffer(NamedTuple):
    """Frames as the functions take them; what is before the first one is not theirs."""

    data: Any
    offsets: Any


def buffer_of(frames: list[bytes], before: bytes = b"", form: Any = bytes) -> Buffer:
    ends = itertools.accumulate(map(len, frames), initial=len(before))
    return Buffer(form(before + b"".join(frames)), np.array(list(ends), np.int64))


FORMS = (bytes, bytearray, memoryview)


# --- frames of any kind


def edited(frames: list[bytes], edits: list[tuple[str, int, int]]) -> list[bytes]:
    """Frames that were cut, emptied, retagged, doubled, exchanged, left out or made longer."""
    frames = [*frames]
    for kind, where, how in edits:
        if not frames:
            break
        i = where % len(frames)
        frame = frames[i]
        if kind == "cut":
            frames[i] = frame[: how % (len(frame) + 1)]
        elif kind == "empty":
            frames[i] = b""
        elif kind == "retag":
            frames[i] = TAGS[how % len(TAGS)].to_bytes(1, "big") + frame[1:]
        elif kind == "double":
            frames.insert(how % (len(frames) + 1), frame)
        elif kind == "exchange":
            j = how % len(frames)
            frames[i], frames[j] = frames[j], frame
        elif kind == "leave out":
            del frames[i]
        elif kind == "longer":
            frames[i] = frame + bytes(1 + how % 40)
        elif frame:
            frames[i] = frame[:1] + bytes([how % 256]) * (len(frame) - 1)
    return frames


EDITS = st.tuples(
    st.sampled_from(
        ("cut", "empty", "retag", "double", "exchange", "leave out", "longer", "fill")
    ),
    st.integers(0, 1000),
    st.integers(0, 1000),
)  # fmt: skip


@functools.cache
def streams() -> list[list[bytes]]:
    """Streams with some of everything, which Hypothesis changes: faster than to draw new ones."""
    found = []
    for streaming in (False, True):
        server = Server(lsn=(1 << 63) - 0x100, time=-5000, xid=2**32 - 2, version=14)
        far = testing.Table("far", {"id": "int4"}, 2**32 - 1)
        for number in range(4):
            with server.begin() as transaction:
                for row in range(number):
                    transaction.insert(TABLE, [row])
        first = server.begin("órigin")
        first.insert(TABLE, [1])
        inner = first.savepoint()
        first.update(TABLE, [2], [1])
        if streaming:
            first.stream()
        inner.rollback()
        first.truncate([TABLE, far])
        first.message("p", b"within")
        second = server.begin()
        second.delete(far, [3])
        server.message("p", b"outside")
        first.commit()
        if streaming:
            second.stream()
            second.insert(TABLE, [4])
            second.prepare("gid")
        second.commit()
        for number in range(3):
            with server.begin() as transaction:
                transaction.insert(TABLE, [number])
                transaction.truncate([TABLE, far])
        found.append(server.frames)
    return found


# Frames that are whole but for a byte.
NEARLY = [testing.begin(5)[:-1], testing.begin(5) + b"x", testing.commit()[:-1], b"I\0\0\1", b"T"]
NEARLY += [testing.commit() + b"x", testing.truncate([])[:-1], testing.message("", b"")[:9]]

any_frames = st.one_of(
    st.builds(
        lambda which, start, edits: edited(streams()[which][start:], edits),
        st.integers(0, 1), st.integers(0, 30), st.lists(EDITS, max_size=6),
    ),
    st.lists(strategies.frames("BCIUDTRYMO"), max_size=12),
    st.lists(st.sampled_from([
        b"", b"B", b"C", testing.begin(5), testing.commit(), testing.insert(1, ["x"]),
        testing.truncate([1, 2]), testing.message("p", b""), testing.begin(6, 0x90),
        b"I" + bytes(3), testing.stream_start(5), testing.stream_stop(), testing.commit(0x200),
        TABLE.relation(), *NEARLY,
    ]), max_size=12),
)  # fmt: skip


@SETTINGS
@example([b"I\0\0\1"] * 2 + [b"U\0\0\1", b"", b"I\0\0\1\0"] * 2, b"", bytes, 0)
@example([testing.begin(5), testing.insert(1, ["x"]), testing.commit() + b"x"], b"", bytes, 0)
@example(
    [testing.begin(5), testing.commit(), testing.begin(5), testing.commit()[:-1]], b"", bytes, 0
)
@example([testing.begin(5), testing.commit(), testing.begin(5) + b"x"], b"", bytes, 0)
@given(any_frames, st.binary(max_size=3), st.sampled_from(FORMS), st.integers(0, 30))
def test_both_twins_find_the_same_in_any_frames(
    frames: list[bytes], before: bytes, form: Any, start: int
) -> None:
    data, offsets = buffer_of(frames, before, form)
    start = min(start, len(frames))
    tables, ends = zip(
        *(whole(data, offsets, start) for whole in twins("transactions._scan", "whole")),
        strict=True,
    )
    assert ends[0] == ends[1]
    assert [table.dtype for table in tables] == [np.dtype(np.uint64)] * 2
    assert tables[0].shape == tables[1].shape == (len(tables[0]), 5)
    assert tables[0].tolist() == tables[1].tolist()
    for in_chunk in (False, True):
        first, second = (
            scan(data, offsets, start, in_chunk) for scan in twins("transactions._scan", "scan")
        )
        assert first == second
    packed = [
        [(bytes(one), found.dtype, found.tolist()) for one, found in pack(given, ends)]
        for pack in twins("transactions._scan", "packed")
        for given, ends in ((frames, None), (data, offsets))
    ]
    assert packed[0] == packed[2]
    assert packed[1] == packed[3]


open_transactions = st.one_of(
    st.none(),
    st.tuples(
        st.sampled_from((0x100, 0x200, 2**64 - 1)), st.integers(-(2**63), 2**63 - 1),
        st.integers(0, 2**32 - 1), st.integers(0, 2**62),
    ),
)  # fmt: skip


@pytest.mark.slow
@SETTINGS
@example([], None, 0, b"", bytes)
@example([testing.begin(5), b"T\x80\0\0\1\0\0\0\0\1", testing.insert(1, [])], None, 0, b"", bytes)
@example([testing.begin(5), b"T\0\0\0\0"], None, 0, b"", bytes)
@example([testing.begin(5), testing.truncate([1, 2])[:-1], testing.commit()], None, 0, b"", bytes)
@example([testing.begin(5, 2**64 - 1, -1), testing.commit(2**64 - 1, 0)], None, 0, b"", bytes)
@given(
    any_frames,
    open_transactions,
    st.sampled_from((0, 0x95, 0x100, 2**63, 2**64 - 1)),
    st.binary(max_size=3),
    st.sampled_from(FORMS),
)
def test_both_twins_annotate_any_frames_alike(
    frames: list[bytes],
    open_: tuple[int, int, int, int] | None,
    end_lsn: int,
    before: bytes,
    form: Any,
) -> None:
    data, offsets = buffer_of(frames, before, form)
    found = [
        annotate(data, offsets, open_, end_lsn)
        for annotate in twins("segments._annotate", "annotate")
    ]
    wrong = found[0][5]
    # Behind a fault nothing is said of frames.
    count = len(frames) if wrong is None else wrong[0]
    told = [
        (
            [(column.dtype, len(column), column[:count].tolist()) for column in columns],
            marks,
            (commits.dtype, commits.tolist()),
            *more,
        )
        for columns, marks, commits, *more in found
    ]
    assert told[0] == told[1]
    assert [dtype for dtype, *_ in told[0][0]] == [
        np.uint64, np.int64, np.uint32, np.int64, np.uint8,
    ]  # fmt: skip


# --- sound streams

plain_servers = strategies.servers(streaming=False, two_phase=False)


class Beside(NamedTuple):
    """What stands beside a frame in a segment."""

    commit_lsn: int
    commit_time: int
    xid: int
    seq: int
    within: int


def truth(server: Server) -> list[Beside]:
    """What stands beside each frame of a stream without chunks, as the server made them."""
    found = []
    committed = iter(server.committed)
    one = None
    for _, frame, seq in server.sent:
        if frame[:1] == b"B":
            one = next(committed)
        number = -1 if seq is None else seq
        if one is None:
            found.append(Beside(0, 0, 0, number, 0))
        else:
            found.append(Beside(one.commit_lsn, one.commit_time, one.xid, number, 1))
        if frame[:1] == b"C":
            one = None
    assert list(committed) == []
    return found


@pytest.mark.slow
@some_or_many
@pytest.mark.parametrize("implementation", ["cython", "python"])
def test_beside_each_frame_stands_what_the_server_meant(
    implementation: str, examples: settings
) -> None:
    annotate = _impl.twin("segments._annotate", implementation).annotate

    @examples
    @given(plain_servers, st.lists(st.integers(0, 60), max_size=6))
    def run(server: Server, cuts: list[int]) -> None:
        frames, beside = server.frames, truth(server)
        ends = sorted({min(cut, len(frames)) for cut in cuts} | {0, len(frames)})
        found, marked, committed = [], [], []
        open_: Any = None
        end_lsn = 0
        for start, end in itertools.pairwise(ends):
            buffer = buffer_of(frames[start:end])
            columns, marks, commits, open_, end_lsn, wrong = annotate(*buffer, open_, end_lsn)
            assert wrong is None
            found += [Beside(*row) for row in zip(*(c.tolist() for c in columns), strict=True)]
            marked += [(start + i, tag) for i, tag in marks]
            committed += [start + i for i in commits.tolist()]
            # Where a transaction goes on, the next seq does.
            inside = end < len(frames) and beside[end].within and frames[end][:1] != b"B"
            assert (open_ is not None) == inside
            if inside:
                assert open_[:3] == beside[end][:3]
                following = [one.seq for one in beside[end:] if one.xid == open_[2]]
                assert open_[3] == next((seq for seq in following if seq >= 0), open_[3])
        assert found == beside
        assert marked == [
            (i, frame[0])
            for i, frame in enumerate(frames)
            if frame[:1] in (b"R", b"Y") or (frame[:1] == b"M" and not beside[i].within)
        ]
        assert committed == [i for i, frame in enumerate(frames) if frame[:1] == b"C"]
        assert open_ is None
        told = [one.end_lsn for one in server.committed]
        told += [
            sent.lsn
            for sent, one in zip(server.sent, beside, strict=True)
            if sent.frame[:1] == b"M" and not one.within
        ]
        assert end_lsn == max(told, default=0)

    run()


def plain_whole(server: Server, start: int) -> tuple[list[tuple[int, ...]], int]:
    """The whole transactions of nothing but rows from a frame on, and where they end."""
    frames = server.frames
    committed = iter(server.committed[sum(frame[:1] == b"B" for frame in frames[:start]) :])
    found = []
    while start < len(frames) and frames[start][:1] == b"B":
        end = start + 1
        while frames[end][:1] in (b"I", b"U", b"D", b"T"):
            end += 1
        if frames[end][:1] != b"C":
            break
        one = next(committed)
        time = one.commit_time % (1 << 64)
        found.append((start, one.xid, one.commit_lsn, one.end_lsn, time))
        start = end + 1
    return found, start


@some_or_many
@pytest.mark.parametrize("implementation", ["cython", "python"])
def test_whole_transactions_are_those_that_were_committed(
    implementation: str, examples: settings
) -> None:
    whole = _impl.twin("transactions._scan", implementation).whole

    @examples
    @given(plain_servers)
    @example(many_small())
    def run(server: Server) -> None:
        frames = server.frames
        beside = truth(server)
        for start in range(len(frames) + 1):
            if start < len(frames) and beside[start].within and frames[start][:1] != b"B":
                continue  # in a transaction
            table, end = whole(*buffer_of(frames), start)
            found, wanted_end = plain_whole(server, start)
            assert [tuple(row) for row in table.tolist()] == found
            assert end == wanted_end
        # What has not come to its Commit is left for later.
        table, end = whole(*buffer_of(frames[:-1]), 0)
        found, _ = plain_whole(server, 0)
        assert [tuple(row) for row in table.tolist()] == [
            one for one in found if _end_of(frames, one[0]) < len(frames) - 1
        ]

    run()


def many_small() -> Server:
    """More transactions than the compiled table has room for at first, with old times."""
    server = Server(time=-(10**15))
    with server.begin() as transaction:
        transaction.insert(TABLE, [0])
    for number in range(400):
        with server.begin() as transaction:
            for row in range(number % 3 + 1):
                transaction.insert(TABLE, [row])
    server.sent[:4] = []
    server.committed[:1] = []
    return server


def _end_of(frames: list[bytes], begin: int) -> int:
    """The index of the Commit of the transaction that begins there."""
    return next(i for i in range(begin, len(frames)) if frames[i][:1] == b"C")


def plain_scan(
    frames: list[bytes], start: int, in_chunk: bool
) -> tuple[list[tuple[int, int]], int]:
    """What `scan` says of sound frames, from messages as the decoder gives them."""
    decode = _impl.twin("decoding._core", "cython").decode
    marks = []
    before = None
    for i in range(start, len(frames)):
        frame = frames[i]
        if frame[0] not in ROWS:
            marks.append((i, frame[0]))
            if frame[:1] in (b"C", b"S", b"E"):
                return marks, i + 1
        elif in_chunk and (xid := decode(frame, True).xid) != before:
            marks.append((i, frame[0]))
            before = xid
    return marks, len(frames)


@pytest.mark.slow
@some_or_many
@pytest.mark.parametrize("implementation", ["cython", "python"])
def test_scans_end_behind_what_ends_a_transaction_or_a_chunk(
    implementation: str, examples: settings
) -> None:
    scan = _impl.twin("transactions._scan", implementation).scan

    @examples
    @given(strategies.servers())
    def run(server: Server) -> None:
        frames = server.frames
        start, in_chunk = 0, False
        seen: list[int] = []
        while start < len(frames):
            marks, end = scan(*buffer_of(frames), start, in_chunk)
            assert (marks, end) == plain_scan(frames, start, in_chunk)
            assert start < end
            seen += range(start, end)
            last = frames[end - 1][:1]
            assert end == len(frames) or last in (b"C", b"S", b"E")
            in_chunk = last == b"S" or (in_chunk and last != b"E")
            start = end
        assert seen == list(range(len(frames)))

    run()
