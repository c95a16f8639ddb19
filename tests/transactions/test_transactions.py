"""Whole transactions out of a stream's frames, against what the test kit's server committed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support.expected_errors import expect_error

import pgoutput_fast as pf
from pgoutput_fast import testing
from pgoutput_fast.testing import Server, Table
from pgoutput_fast.transactions import Assembler, Transaction

pa = pytest.importorskip("pyarrow", reason="the twin makes Arrow arrays with it")
from support.columns.columnar import IMPLEMENTATIONS, chosen  # noqa: E402 - it needs pyarrow

ACCOUNTS = Table("accounts", {"id": "int4", "note": "text"}, relation_id=16400)
WIDER = Table("accounts", {"id": "int4", "note": "text", "more": "int8"}, relation_id=16400)
ORDERS = Table("orders", {"id": "int8", "price": "numeric(10,2)"}, relation_id=16500)


@pytest.fixture(params=IMPLEMENTATIONS, autouse=True)
def implementation(request: pytest.FixtureRequest) -> Iterator[str]:
    with chosen(request.param):
        yield request.param


def cut(server: Server, assembler: Assembler, sizes: Iterator[int]) -> list[Transaction]:
    """The server's frames through an assembler, cut into calls of these sizes."""
    found: list[Transaction] = []
    start = 0
    while start < len(server.sent):
        end = start + next(sizes)
        found += assembler.feed(server.frames[start:end], server.lsns[start:end])
        start = end
    return found


def whole(server: Server, **options: Any) -> list[Transaction]:
    return list(Assembler(**options).feed(server.frames, server.lsns))


def content(transaction: Transaction) -> list[bytes]:
    """The frames of changes and messages."""
    return [
        frame for frame in transaction.frames() if frame[:1] not in (b"B", b"C", b"R", b"Y", b"O")
    ]


def told(transaction: Transaction) -> tuple[Any, ...]:
    return (
        transaction.xid, transaction.commit_lsn, transaction.end_lsn, transaction.commit_time,
        transaction.origin, transaction.gid,
    )  # fmt: skip


def expect(server: Server, found: list[Transaction]) -> None:
    """What was found is what was committed: its content in all three ways."""
    assert [told(one) for one in found] == [tuple(one)[:6] for one in server.committed]
    for one, truth in zip(found, server.committed, strict=True):
        assert content(one) == [change.frame for change in truth.changes]
        frames = list(one.frames())
        begin, commit = pf.decode(frames[0]), pf.decode(frames[-1])
        assert (begin.xid, begin.final_lsn, begin.commit_time) == (
            truth.xid, truth.commit_lsn, truth.commit_time,
        )  # fmt: skip
        assert (commit.commit_lsn, commit.end_lsn) == (truth.commit_lsn, truth.end_lsn)
        seqs = [
            (truth.commit_lsn, truth.commit_time, truth.xid, seq)
            for change in truth.changes if change.seq is not None
            for seq in range(change.seq, change.seq + len(change.tables))
        ]  # fmt: skip
        rows = []
        for batch in one.batches():
            columns = pa.record_batch(batch)
            times = columns["commit_time"].cast(pa.int64())
            parts = columns["commit_lsn"], times, columns["xid"], columns["seq"]
            rows += zip(*(part.to_pylist() for part in parts), strict=True)
        shift = 946_684_800_000_000
        assert sorted(rows) == [(lsn, time + shift, xid, seq) for lsn, time, xid, seq in seqs]
        tags = [message.tag for message in one if message.tag not in "RYO"]
        assert tags == [chr(change.frame[0]) for change in truth.changes]


def test_one_of_each_kind() -> None:
    server = Server(streaming="parallel")
    with server.begin() as plain:
        plain.insert(ACCOUNTS, [1, "a"])
        plain.message("p", b"\0content")
    with server.begin("far", 77) as streamed:
        streamed.insert(ACCOUNTS, [2, "b"])
        streamed.stream()
        with streamed.savepoint() as savepoint:
            streamed.insert(ORDERS, [1, "9.50"])
            streamed.stream()
            savepoint.rollback()
        streamed.truncate([ACCOUNTS, ORDERS])
    server.message("outside", b"now")
    prepared = server.begin()
    prepared.update(ACCOUNTS, [1, "c"])
    prepared.prepare("gid '1'")
    rolled_back = server.begin()
    rolled_back.insert(ACCOUNTS, [9, "never"])
    rolled_back.prepare("gone")
    rolled_back.abort()
    prepared.commit()
    found = whole(server)
    messages = [one for one in found if one.kind == "message"]
    expect(server, [one for one in found if one.kind == "commit"])
    assert [one.kind for one in found] == ["commit", "commit", "message", "commit"]
    assert [(one.xid, one.commit_time, next(iter(one)).content) for one in messages] == [
        (None, None, b"now")
    ]
    assert found[1].origin == "far"
    assert (found[3].gid, found[3].origin) == ("gid '1'", None)
    assert found[3].commit_datetime is not None


@pytest.mark.parametrize("memory", [0, 64 << 20])
def test_a_rolled_back_savepoint_takes_back_its_first_row_too(memory: int) -> None:
    """Its table was announced before it, so that its first frame is a row."""
    server = Server()
    transaction = server.begin()
    transaction.insert(ACCOUNTS, [1, "kept"])
    savepoint = transaction.savepoint()
    transaction.insert(ACCOUNTS, [2, "gone"])
    transaction.insert(ACCOUNTS, [3, "gone"])
    transaction.stream()
    savepoint.rollback()
    transaction.insert(ACCOUNTS, [4, "kept"])
    transaction.commit()
    expect(server, whole(server, max_memory=memory))
    for size in (1, 6):  # six frames are the whole chunk, which goes to the file as one block
        found = cut(server, Assembler(max_memory=memory), itertools.repeat(size))
        expect(server, found)
        assert b"".join(frame[:1] for frame in found[0].frames()) == b"BRIIC"


def test_prepared_ones_at_prepare() -> None:
    server = Server()
    first, second = server.begin(), server.begin()
    first.insert(ACCOUNTS, [1, "a"])
    first.prepare("one")
    second.insert(ACCOUNTS, [2, "b"])
    second.stream()
    second.prepare("two")
    second.abort()
    first.commit()
    found = whole(server, prepared="prepare")
    assert [(one.kind, one.gid, len(content(one))) for one in found] == [
        ("prepare", "one", 1), ("prepare", "two", 1), ("rollback prepared", "two", 0),
        ("commit prepared", "one", 0),
    ]  # fmt: skip
    assert [one.commit_lsn < one.end_lsn for one in found] == [True, True, False, True]
    assert next(iter(found[0].batches())).num_rows == 1
    assert not list(found[3].batches())
    assert not list(found[3])


def test_a_transaction_that_ends_at_zero_was_not_delivered_before() -> None:
    insert = testing.insert(ACCOUNTS, [1, "a"])
    frames = [testing.begin(7, 0), ACCOUNTS.relation(), insert, testing.commit(0, 0)]
    (found,) = Assembler().feed(frames)
    assert (found.end_lsn, content(found)) == (0, [insert])


def test_a_prepared_transaction_that_never_came() -> None:
    frames = [testing.commit_prepared(7, "old", 0x200, 0x230, 5)]
    (empty,) = Assembler().feed(frames)
    assert told(empty) == (7, 0x200, 0x230, 5, None, "old")
    assert content(empty) == []
    for known in (0, 0x22F):
        assembler = Assembler(unknown_prepared="error")
        assembler.known_lsn = known
        with expect_error(code="changes_missing"):
            list(assembler.feed(frames))
    assembler.known_lsn = 0x230
    assert list(assembler.feed(frames)) == []
    # It was delivered at its PREPARE, maybe to an earlier process.
    (end,) = Assembler(unknown_prepared="error", prepared="prepare").feed(frames)
    assert (end.kind, end.gid) == ("commit prepared", "old")


def test_the_end_of_what_was_delivered_to_an_earlier_process() -> None:
    """Its content was delivered at its PREPARE, and that was acknowledged."""
    frames = [
        testing.commit_prepared(7, "one", 0x200, 0x230, 5),
        testing.rollback_prepared(8, "two", 0x100, 0x260, 5, 5),
    ]
    assembler = Assembler(prepared="prepare", unknown_prepared="error")
    found = list(assembler.feed(frames))
    assert [(one.kind, one.xid, one.gid, one.end_lsn, content(one)) for one in found] == [
        ("commit prepared", 7, "one", 0x230, []), ("rollback prepared", 8, "two", 0x260, []),
    ]  # fmt: skip


@pytest.mark.parametrize("open_stream", [False, True])
def test_what_comes_again_still_announces_its_tables(open_stream: bool) -> None:
    """A connection announces a table once, perhaps in a transaction that is known already."""
    server = Server()
    for note in ("known", "known too", "new"):
        transaction = server.begin()
        transaction.insert(ACCOUNTS, [1, note])
        if open_stream:
            transaction.stream()
            transaction.insert(ACCOUNTS, [2, note])
        transaction.commit()
    assembler = Assembler()
    assembler.known_lsn = server.committed[1].end_lsn
    (found,) = assembler.feed(server.frames, server.lsns)
    assert told(found) == tuple(server.committed[2])[:6]
    decoder = pf.Decoder()  # as of a reader of files that has nothing else
    rows = [one for one in map(decoder.decode, found.frames()) if isinstance(one, pf.Insert)]
    assert [row.new["note"] for row in rows] == ["new"] * (1 + open_stream)
    assembler.known_lsn = server.committed[2].end_lsn
    assert list(assembler.feed(server.frames, server.lsns)) == []


def test_what_a_prepared_transaction_announced_holds_for_others() -> None:
    """A Relation between Begin Prepare and Prepare is not repeated, even if it is rolled back."""
    server = Server()
    prepared = server.begin()
    prepared.insert(ACCOUNTS, [1, "a"])
    prepared.prepare("one")
    with server.begin() as other:
        other.insert(ACCOUNTS, [2, "b"])
    prepared.abort()
    with server.begin() as third:
        third.insert(ACCOUNTS, [3, "c"])
    assert sum(frame[:1] == b"R" for frame in server.frames) == 1
    found = whole(server)
    expect(server, found)
    assert [[frame[:1] for frame in one.frames()] for one in found] == [
        [b"B", b"R", b"I", b"C"], [b"B", b"I", b"C"],
    ]  # fmt: skip


def prepared_frames(xid: int, *frames: bytes) -> list[bytes]:
    return [
        testing.begin_prepare(xid, "g", xid, xid + 1),
        *frames,
        testing.prepare(xid, "g", xid, xid + 1),
    ]


def tags_of(transaction: Transaction) -> bytes:
    return b"".join(frame[:1] for frame in transaction.frames())


def test_a_truncate_of_several_tables_that_a_prepared_transaction_announced() -> None:
    frames = prepared_frames(
        7, testing.relation(ACCOUNTS), testing.relation(ORDERS),
        testing.insert(ACCOUNTS, [1, "a"]),
    )  # fmt: skip
    frames += [testing.begin(9), testing.truncate([ACCOUNTS, ORDERS]), testing.commit()]
    (found,) = Assembler().feed(frames)
    assert tags_of(found) == b"BRRTC"


def test_what_prepared_transactions_announced_outlives_the_connection() -> None:
    """The second one used the first one's Relation; it is committed over another connection."""
    assembler = Assembler()
    frames = prepared_frames(
        7, testing.relation(ACCOUNTS), testing.insert(ACCOUNTS, [1, "a"])
    ) + prepared_frames(8, testing.insert(ACCOUNTS, [2, "b"]))
    assert not list(assembler.feed(frames))
    assembler.reset()
    (found,) = assembler.feed([testing.commit_prepared(8, "g")])
    assert tags_of(found) == b"BRIC"


def test_what_a_prepared_transaction_announced_is_out_of_date_after_another_one() -> None:
    """The first one altered the table and was rolled back; the second has it as it was before."""
    frames = [
        testing.begin(6), testing.relation(ACCOUNTS), testing.insert(ACCOUNTS, [1, "a"]),
        testing.commit(),
        *prepared_frames(7, testing.relation(WIDER), testing.insert(WIDER, [2, "b", 5])),
        testing.rollback_prepared(7, "g"),
        *prepared_frames(8, testing.relation(ACCOUNTS), testing.insert(ACCOUNTS, [3, "c"])),
        testing.begin(9), testing.insert(ACCOUNTS, [4, "d"]), testing.commit(),
    ]  # fmt: skip
    _, found = Assembler().feed(frames)
    assert tags_of(found) == b"BIC"


def test_a_type_stands_before_the_first_relation_that_has_it() -> None:
    """A later row's table was announced, with the same type, in a prepared transaction."""
    mood = testing.UserType(16390, "mood")
    one = Table("one", {"id": "int4", "mood": mood}, relation_id=16600)
    other = Table("other", {"id": "int4", "mood": mood}, relation_id=16700)
    frames = prepared_frames(7, *one.announcement(), testing.insert(one, [1, "ok"]))
    frames += [
        testing.begin(9), *other.announcement(), testing.insert(other, [2, "ok"]),
        testing.insert(one, [3, "ok"]), testing.commit(),
    ]  # fmt: skip
    (found,) = Assembler().feed(frames)
    assert tags_of(found) == b"BYRIRIC"


@pytest.mark.slow
def test_kept_transactions_are_decoded_by_what_was_announced_before_them() -> None:
    server = Server()
    for number in range(200):
        with server.begin() as transaction:
            transaction.insert(
                WIDER if number % 2 else ACCOUNTS, [number, "x", 5][: 2 + number % 2]
            )
    found = whole(server)
    random.Random(1).shuffle(found)
    for transaction in found:
        (message,) = [one for one in transaction if one.tag == "I"]
        number = message.new["id"]
        assert len(message.new) == 2 + number % 2
        (batch,) = transaction.batches()
        assert [column.name for column in batch.relation.columns][2:] == ["more"] * (number % 2)


def test_a_batch_iteration_that_is_left_harms_nothing() -> None:
    server = Server()
    for number in range(3):
        with server.begin() as transaction:
            transaction.insert(ACCOUNTS, [number, "x"])
            transaction.insert(ORDERS, [number, "1.00"])
    first, *others = whole(server)
    assert next(iter(first.batches())).num_rows == 1
    assert next(iter(first)).tag == "R"
    for one in others:
        assert sum(batch.num_rows for batch in one.batches()) == 2
        assert len(list(one)) >= 2
    assert sum(batch.num_rows for batch in first.batches()) == 2


def test_subtransactions_count_as_memory() -> None:
    """Each is remembered, as it may be rolled back; their frames make room for that."""
    server = Server()
    transaction = server.begin()
    for number in range(600):
        savepoint = transaction.savepoint()
        transaction.insert(ACCOUNTS, [number, "x"])
        if number == 300:
            transaction.stream()
        if number % 3 == 0:
            savepoint.rollback()
        else:
            savepoint.release()
    transaction.stream()
    assembler = Assembler(max_memory=40_000)
    assert not list(assembler.feed(server.frames, server.lsns))
    (stage,) = assembler._stages()
    assert len(stage) > 400  # in the file, though they alone are within the bound
    assert (stage.movable, len(stage._ends)) == (0, 0)
    assert assembler.memory > 400 * 100
    done = len(server.sent)
    transaction.commit()
    found = list(assembler.feed(server.frames[done:], server.lsns[done:]))
    expect(server, found)
    assert stage.memory < 1000  # none is rolled back after the commit


def test_memory_is_bounded_and_files_are_read_back() -> None:
    server = Server()
    large, small = server.begin(), server.begin()
    for number in range(3000):
        large.insert(ACCOUNTS, [number, "x" * 1000])
        if number % 100 == 0:
            small.insert(ORDERS, [number, "1.00"])
            small.stream()
            large.stream()
    with large.savepoint() as savepoint:
        large.insert(ACCOUNTS, [-1, "gone"])
        large.stream()
        savepoint.rollback()
    assembler = Assembler(max_memory=100_000)
    found = []
    for start in range(0, len(server.sent), 50):
        found += assembler.feed(server.frames[start : start + 50], server.lsns[start : start + 50])
        assert assembler.memory <= 100_000
    assert not found
    assert assembler.in_flight
    large.commit()
    small.commit()
    done = len(server.sent)
    found += assembler.feed(server.frames[done - 3 :], server.lsns[done - 3 :])
    expect(server, found)
    assert not assembler.in_flight


def test_reset_drops_what_was_not_committed_and_keeps_what_was_prepared() -> None:
    server = Server()
    prepared, streamed = server.begin(), server.begin()
    prepared.insert(ACCOUNTS, [1, "a"])
    prepared.prepare("kept")
    streamed.insert(ACCOUNTS, [2, "b"])
    streamed.stream()
    assembler = Assembler()
    assert not list(assembler.feed(server.frames, server.lsns))
    assembler.reset()
    server.reconnect()
    before = len(server.sent)
    prepared.commit()
    streamed.stream()
    streamed.insert(ACCOUNTS, [3, "c"])
    streamed.commit()
    expect(server, list(assembler.feed(server.frames[before:], server.lsns[before:])))


def test_frames_in_every_form_that_decode_batch_takes() -> None:
    server = Server()
    with server.begin() as transaction:
        transaction.insert(ACCOUNTS, [1, "a"])
    data, ends = b"".join(server.frames), np.cumsum([0, *map(len, server.frames)])
    array = pa.array(server.frames, pa.binary())
    chunked = pa.chunked_array([array[:2], array[2:]])
    for form in (server.frames, array, array.cast(pa.large_binary()), chunked, array[0:]):
        expect(server, list(Assembler().feed(form, server.lsns)))
    expect(server, list(Assembler().feed(bytearray(data), server.lsns, offsets=ends)))
    (transaction_without_lsns,) = Assembler().feed(server.frames)
    assert content(transaction_without_lsns) == [server.frames[2]]
    with pytest.raises(TypeError):
        Assembler().feed(7)
    with pytest.raises(ValueError, match="LSNs were given"):
        Assembler().feed(server.frames, [1])


BAD = [
    ([b""], 0, "empty_frame"),
    ([b"?"], 0, "unknown_tag"),
    ([b"I\0\0\0\1N\0\0"], 0, "stream_order"),
    ([testing.begin(7), b"B"], 1, "stream_order"),
    ([testing.begin(7), testing.commit()[:9]], 1, "truncated"),
    ([testing.begin(7)[:-1]], 0, "truncated"),
    ([testing.stream_start(7), testing.begin(7)], 1, "stream_order"),
    ([testing.stream_start(7), b"I\0\0"], 1, "truncated"),
    ([testing.stream_start(7, False)], 0, "stream_order"),
    ([testing.stream_stop()], 0, "stream_order"),
    ([testing.stream_commit(7)], 0, "stream_order"),
    ([testing.stream_prepare(7, "g", 1, 2, 3)], 0, "stream_order"),
    ([testing.begin(7), testing.prepare(7, "g", 1, 2, 3)], 1, "stream_order"),
    ([testing.commit()], 0, "stream_order"),
    ([testing.begin(7), testing.stream_start(8)], 1, "stream_order"),
    ([testing.message("p", b"", 5, flags=1)], 0, "stream_order"),
    ([testing.relation(ACCOUNTS)], 0, "stream_order"),
]


@pytest.mark.parametrize(("frames", "index", "code"), BAD)
def test_frames_that_are_refused(frames: list[bytes], index: int, code: str) -> None:
    server = Server()
    with server.begin() as transaction:
        transaction.insert(ACCOUNTS, [1, "a"])
    good = server.frames
    iterator = Assembler().feed([*good, *frames])
    assert content(next(iterator)) == [good[2]]
    with pytest.raises(pf.DecodeError) as caught:
        next(iterator)
    assert (caught.value.code, caught.value.frame) == (code, len(good) + index)


def test_aborts_of_what_was_never_streamed_mean_nothing() -> None:
    frames = [testing.stream_abort(7, 7), testing.stream_abort(7, 8)]
    assert not list(Assembler().feed(frames))


def test_arguments_of_an_assembler() -> None:
    for arguments in (
        {"max_memory": -1}, {"prepared": "now"}, {"unknown_prepared": "skip"}, {"target": "x"},
    ):  # fmt: skip
        with expect_error(code="bad_option", parameter=next(iter(arguments))):
            Assembler(**arguments)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        Assembler(max_memory=1.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        Transaction()


BEFORE = [
    testing.begin(6), testing.relation(ACCOUNTS), testing.insert(ACCOUNTS, [1, "a"]),
    testing.commit(),
]  # fmt: skip


@pytest.mark.parametrize("in_stream", [False, True])
def test_what_a_rolled_back_transaction_announced_and_gave_out_holds(in_stream: bool) -> None:
    """The table was altered before it, and the server announces the newer form once.

    Within stream chunks that does not count, so there another transaction announces it, too.
    """
    row = testing.insert(WIDER, [2, "b", 5])
    other = [testing.begin(8), row, testing.commit()]
    if in_stream:
        prepared = [
            testing.stream_start(7), *WIDER.announcement(7), testing.in_stream(row, 7),
            testing.stream_stop(), testing.stream_prepare(7, "g"),
            testing.begin(9), testing.relation(WIDER), row, testing.commit(),
        ]  # fmt: skip
    else:
        prepared = prepared_frames(7, testing.relation(WIDER), row)
    frames = [*BEFORE, *prepared, testing.rollback_prepared(7, "g"), *other]
    *_, rolled_back, last = Assembler(prepared="prepare").feed(frames)
    assert rolled_back.kind == "rollback prepared"
    assert list(last.frames())[1:-1] == [row]
    assert [message.new["more"] for message in last] == [5]
    (changes,) = last.batches()
    assert [column.name for column in changes.relation.columns] == ["id", "note", "more"]


@pytest.mark.parametrize("in_stream", [False, True])
def test_a_table_that_a_rolled_back_transaction_altered(in_stream: bool) -> None:
    """It was given out when it was prepared; the older form has to be given out again."""
    server = Server()
    for note in "abc":
        transaction = server.begin()
        transaction.insert(*((WIDER, [1, note, 5]) if note == "b" else (ACCOUNTS, [1, note])))
        if note == "b" and in_stream:
            transaction.stream()
        if note == "b":
            transaction.prepare("g")
            transaction.abort()
        else:
            transaction.commit()
    found = whole(server, prepared="prepare")
    assert [tags_of(one) for one in found] == [b"BRIC", b"BRIC", b"", b"BRIC"]
    (row,) = [one for one in found[3] if one.tag == "I"]
    assert row.new.as_dict() == {"id": 1, "note": "c"}


class KeptTransactions(list[Any]):
    """Keeps prepared transactions for another assembler."""

    def keep(self, prepared: Any) -> None:
        self.append(prepared)

    def end(self, xid: int, gid: str, end_lsn: int) -> None:
        pass


@pytest.mark.parametrize("ends", ["commit", "prepare", "commit prepared", "restored"])
@pytest.mark.parametrize("known", [False, True])
def test_a_transaction_with_rows_before_and_after_it_alters_a_table(ends: str, known: bool) -> None:
    """Only one that was rolled back announced how the table was before."""
    rows = [testing.insert(ACCOUNTS, [2, "b"]), testing.insert(WIDER, [3, "c", 5])]
    content = (rows[0], testing.relation(WIDER), rows[1])
    frames = BEFORE if known else []
    frames = [*frames, *prepared_frames(7, testing.relation(ACCOUNTS))]
    frames += [testing.rollback_prepared(7, "g")]
    if ends == "commit":
        frames += [testing.begin(8), *content, testing.commit()]
    else:
        frames += prepared_frames(8, *content)
    kept = KeptTransactions()
    assembler = Assembler(
        prepared="prepare" if ends == "prepare" else "commit",
        keeper=kept if ends == "restored" else None,
    )
    found = list(assembler.feed(frames))
    is_new = not known
    if ends == "prepare":
        is_new = False  # it was given out
    if ends == "restored":
        assembler, is_new = Assembler(), True
        assembler.restore(kept[-1])
    if "commit" in ends or ends == "restored":
        found += assembler.feed([] if ends == "commit" else [testing.commit_prepared(8, "g")])
    assert tags_of(found[-1]) == (b"BRIRIC" if is_new else b"BIRIC")
    inserted = [one.new.as_dict() for one in found[-1] if one.tag == "I"]
    assert inserted == [{"id": 2, "note": "b"}, {"id": 3, "note": "c", "more": 5}]


def test_a_kept_transaction_has_the_types_of_its_tables() -> None:
    mood, size = testing.UserType(20000, "mood"), testing.UserType(20001, "size")
    moods = Table("moods", {"id": "int4", "mood": mood}, relation_id=16600)
    sizes = Table("sizes", {"id": "int4", "size": size}, relation_id=16700)
    announced = [mood.frame(), moods.relation(), size.frame(), sizes.relation()]
    frames = [testing.begin(6), *announced, testing.insert(sizes, [1, "big"]), testing.commit()]
    frames += prepared_frames(8, testing.insert(moods, [2, "sad"]))
    kept = KeptTransactions()
    list(Assembler(keeper=kept).feed(frames))
    later = Assembler()
    later.restore(kept[-1])
    (found,) = later.feed([testing.commit_prepared(8, "g")])
    assert list(found.frames())[1:-2] == announced[:2]
    assert [one.new.as_dict() for one in found if one.tag == "I"] == [{"id": 2, "mood": "sad"}]
