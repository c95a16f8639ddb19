"""The test kit: frames by function, tables, and what a server sends of whole transactions."""

from __future__ import annotations

import inspect
import struct
from types import ModuleType
from typing import Any

import pytest
from support.expected_errors import expect_error
from support.frames.class_table import FIELDS, TAGS

import pgoutput_fast as pf
from pgoutput_fast import testing
from pgoutput_fast.testing import Server, Table, UserType

ACCOUNTS = Table("accounts", {"id": "int4", "note": "text"}, 16385)
WHOLE = Table("whole", {"id": "int4"}, 16390, replica_identity="f")


# --- frames and tables ----------------------------------------------------------------------------

MADE: dict[str, tuple[bytes, dict[str, Any]]] = {
    "Begin": (testing.begin(7, 0x50, -1), {"xid": 7, "final_lsn": 0x50, "commit_time": -1}),
    "Commit": (testing.commit(0x50, commit_time=9, flags=1),
               {"flags": 1, "commit_lsn": 0x50, "end_lsn": 0x80, "commit_time": 9}),
    "Origin": (testing.origin("o", 5), {"commit_lsn": 5, "name": "o"}),
    "Relation": (testing.relation(ACCOUNTS),
                 {"xid": None, "relation_id": 16385, "namespace": "public", "name": "accounts",
                  "replica_identity": "d", "columns": ((1, "id", 23, -1), (0, "note", 25, -1))}),
    "Type": (testing.type_(UserType(16400, "mood"), 9),
             {"xid": 9, "type_id": 16400, "namespace": "public", "name": "mood"}),
    "Insert": (testing.insert(ACCOUNTS, [1, "a"], 9),
               {"xid": 9, "relation_id": 16385, "new": ("1", "a")}),
    "Update": (testing.update(ACCOUNTS, {"id": 2, "note": pf.UNCHANGED}, {"id": 1}),
               {"xid": None, "relation_id": 16385, "old_kind": "K", "old": ("1", None),
                "new": ("2", pf.UNCHANGED)}),
    "Delete": (testing.delete(WHOLE, [1]),
               {"xid": None, "relation_id": 16390, "old_kind": "O", "old": ("1",)}),
    "Truncate": (testing.truncate([ACCOUNTS, 5], 3),
                 {"xid": None, "relation_ids": (16385, 5), "options": 3}),
    "LogicalMessage": (testing.message("p", b"\0", 5, 1),
                       {"xid": None, "flags": 1, "lsn": 5, "prefix": "p", "content": b"\0"}),
    "StreamStart": (testing.stream_start(7, False), {"xid": 7, "first_segment": False}),
    "StreamStop": (testing.stream_stop(), {}),
    "StreamCommit": (testing.stream_commit(7, 0x50, 0x51, 9),
                     {"xid": 7, "flags": 0, "commit_lsn": 0x50, "end_lsn": 0x51, "commit_time": 9}),
    "StreamAbort": (testing.stream_abort(7),
                    {"xid": 7, "subxid": 7, "abort_lsn": None, "abort_time": None}),
    "BeginPrepare": (testing.begin_prepare(7, "g", 0x50),
                     {"prepare_lsn": 0x50, "end_lsn": 0x80, "prepare_time": 0, "xid": 7,
                      "gid": "g"}),
    "Prepare": (testing.prepare(7, "g", 0x50, 0x60, 9),
                {"flags": 0, "prepare_lsn": 0x50, "end_lsn": 0x60, "prepare_time": 9, "xid": 7,
                 "gid": "g"}),
    "StreamPrepare": (testing.stream_prepare(7, "", 0x50),
                      {"flags": 0, "prepare_lsn": 0x50, "end_lsn": 0x80, "prepare_time": 0,
                       "xid": 7, "gid": ""}),
    "CommitPrepared": (testing.commit_prepared(7),
                       {"flags": 0, "commit_lsn": 0x200, "end_lsn": 0x230, "commit_time": 0,
                        "xid": 7, "gid": "gid"}),
    "RollbackPrepared": (testing.rollback_prepared(7, "g", 1, 2, 3, 4, 5),
                         {"flags": 5, "prepare_end_lsn": 1, "rollback_end_lsn": 2,
                          "prepare_time": 3, "rollback_time": 4, "xid": 7, "gid": "g"}),
}  # fmt: skip


@pytest.mark.parametrize("name", FIELDS)
def test_a_function_for_each_message(impl: ModuleType, name: str) -> None:
    frame, expected = MADE[name]
    message = impl.decode(frame, expected.get("xid") is not None and name in ("Insert", "Type"))
    assert type(message).__name__ == name
    found = {field: getattr(message, field) for field in FIELDS[name]}
    for field in {"old", "new"} & found.keys():
        found[field] = found[field].texts()
    assert found == expected


def test_the_kit_has_what_its_first_page_names() -> None:
    assert [name for name in testing.__all__ if not inspect.getdoc(getattr(testing, name))] == []
    assert pf.testing is testing
    with pytest.raises(AttributeError, match="tests"):
        _ = pf.tests  # type: ignore[attr-defined]


def test_types_of_columns(impl: ModuleType) -> None:
    mood = UserType(16400, "mood")
    table = Table(
        "t",
        {
            "a": "numeric(12,2)", "b": "varchar(20)", "c": "bpchar(3)", "d": "timestamp(3)",
            "e": 16500, "f": (16501, 7), "g": mood, "h": "numeric(3,-2)", "i": ("int4", 9),
        },
        key=["b", "c"],
        namespace="other",
    )  # fmt: skip
    (announced, relation) = map(impl.decode, table.announcement())
    assert (announced.type_id, announced.namespace, announced.name) == (16400, "public", "mood")
    assert (relation.namespace, relation.name) == ("other", "t")
    assert [tuple(column) for column in relation.columns] == [
        (0, "a", 1700, (12 << 16 | 2) + 4), (1, "b", 1043, 24), (1, "c", 1042, 7),
        (0, "d", 1114, 3), (0, "e", 16500, -1), (0, "f", 16501, 7), (0, "g", 16400, -1),
        (0, "h", 1700, (3 << 16 | 2046) + 4), (0, "i", 23, 9),
    ]  # fmt: skip
    assert repr(table).startswith("Table(other.t: a numeric, b varchar key, c bpchar key, ")


@pytest.mark.parametrize(
    ("identity", "keys"), [("d", [1, 0]), ("i", [1, 0]), ("f", [1, 1]), ("n", [0, 0])]
)
def test_the_key_is_as_the_replica_identity_says(identity: str, keys: list[int]) -> None:
    table = Table("t", {"a": "int4", "b": "int4"}, replica_identity=identity)
    assert [column.flags for column in table.columns] == keys


def test_rows_of_python_values(impl: ModuleType) -> None:
    table = Table("t", dict.fromkeys("abcdefgh", "text"))
    values = [True, -5, 1.5, 1e300, "é", b"\0", ("t", b"\xff"), None]
    row = impl.decode(testing.insert(table, values)).new
    assert [row.kind(i) for i in range(8)] == list("tttttbtn")
    assert row.raws() == (b"t", b"-5", b"1.5", b"1e+300", "é".encode(), b"\0", b"\xff", None)
    floats = [float("nan"), float("inf"), -float("inf"), 2.0]
    assert impl.decode(testing.insert(5, floats)).new.texts() == (
        "NaN", "Infinity", "-Infinity", "2",
    )  # fmt: skip
    assert impl.decode(testing.insert(table, {"h": "x"})).new.texts() == (None,) * 7 + ("x",)


def test_mistakes_are_named() -> None:
    for call in (
        lambda: Table("t", {"a": "int5"}),
        lambda: Table("t", {"a": "int4"}, key=["b"]),
        lambda: ACCOUNTS.row([1]),
        lambda: ACCOUNTS.row({"x": 1}),
        lambda: testing.insert(ACCOUNTS, [1, object()]),
        lambda: testing.in_stream(testing.begin(1), 5),
        lambda: testing.in_stream(testing.insert(1, []), -1),
    ):
        with expect_error(code="unfit_input"):
            call()


def test_frames_from_inside_of_a_stream(impl: ModuleType) -> None:
    for name in ("Relation", "Update", "Delete", "Truncate", "LogicalMessage"):
        frame = MADE[name][0]
        inside = testing.in_stream(frame, 77)
        assert impl.decode(inside, True).xid == 77
        assert inside == frame[:1] + b"\0\0\0\x4d" + frame[1:]
    assert testing.in_stream(MADE["Origin"][0], 77) == MADE["Origin"][0]


def test_bodies_of_copy_data() -> None:
    assert testing.xlog_data(b"E", 5) == b"w" + struct.pack(">QQq", 5, 5, 0) + b"E"
    assert testing.xlog_data(b"", 5, 6, -7) == b"w" + struct.pack(">QQq", 5, 6, -7)
    assert testing.keepalive(5, 6, True) == b"k" + struct.pack(">QqB", 5, 6, 1)


# --- what a server sends --------------------------------------------------------------------------


def shown(server: Server) -> list[str]:
    """Each frame in short: tag, xids, and the first value of a row."""
    decoder = pf.Decoder()
    lines = []
    for frame in server.frames:
        message = decoder.decode(frame)
        parts = [message.tag]
        if message.tag in "SAcpbPKrB" or (message.in_stream and message.tag in "RYIUDTM"):
            parts.append(str(message.xid))
        if message.tag == "A":
            parts.append(str(message.subxid))
        if message.tag == "S":
            parts.append("first" if message.first_segment else "more")
        if message.tag in "IU":
            parts.append(message.new.text(0))
        lines.append(" ".join(parts))
    return lines


def check(server: Server) -> None:
    """The stream is one that decoders take, its seqs are those that columns have, LSNs agree."""
    told = []
    top = None
    messages = list(pf.Decoder().decode_many(server.frames))
    for sent, message in zip(server.sent, messages, strict=True):
        if message.tag in "BbS":
            top = message.xid
        if message.tag in "RY":
            assert sent.lsn == 0
        elif message.tag in "CPKcp":
            assert sent.lsn == message.end_lsn
        elif message.tag == "M":
            assert sent.lsn == message.lsn
        if message.tag in "IUDT":
            assert sent.seq is not None
            ids = message.relation_ids if message.tag == "T" else [message.relation_id]
            for i, relation_id in enumerate(ids):
                told.append((sent.lsn, sent.seq + i, top, message.xid, relation_id))
        else:
            assert sent.seq is None
    ends = [one.commit_lsn for one in server.committed]
    assert ends == sorted(set(ends))
    assert all(one.end_lsn > one.commit_lsn for one in server.committed)
    assert sorted(columns_of(server), key=str) == sorted(told, key=str)


def columns_of(server: Server) -> list[tuple[Any, ...]]:
    """LSN, seq, xid, subxid and relation of each row as the columns of a ColumnarDecoder."""
    pa = pytest.importorskip("pyarrow")
    rows: list[tuple[Any, ...]] = []
    for batch in pf.ColumnarDecoder().decode(server.frames, lsns=server.lsns):
        table = pa.record_batch(batch)
        names = ("lsn", "seq", "xid", "subxid")
        columns = [table.column(name).to_pylist() for name in names]
        rows += zip(*columns, [batch.relation.relation_id] * len(table), strict=True)
    return rows


def changes(server: Server) -> list[list[tuple[int | None, str]]]:
    """Of each committed transaction the seq and the tag and first value of its changes."""
    found = []
    for one in server.committed:
        messages = [(change.seq, pf.decode(change.frame)) for change in one.changes]
        found.append(
            [
                (seq, message.tag + (message.new.text(0) if message.tag in "IU" else ""))
                for seq, message in messages
            ]
        )
    return found


def test_a_plain_transaction() -> None:
    server = Server(lsn=0x1000, xid=7, time=0)
    with server.begin() as transaction:
        transaction.insert(ACCOUNTS, [1, "a"])
        transaction.truncate([ACCOUNTS, WHOLE])
        transaction.message("p", b"x")
        transaction.delete(WHOLE, [5])
    assert shown(server) == ["B 7", "R", "I 1", "R", "T", "M", "D", "C"]
    begin, _, insert, _, _, message, _, commit = pf.Decoder().decode_many(server.frames)
    assert [sent.seq for sent in server.sent] == [None, None, 0, None, 1, None, 3, None]
    # Begin has the LSN of the first change, Commit that of its end.
    assert server.lsns[:3] == [0x1000, 0, 0x1000]
    assert begin.final_lsn == commit.commit_lsn < commit.end_lsn == server.lsns[-1] == server.lsn
    # A message has the LSN where its record ends, and the next one begins.
    assert server.lsns[5] == message.lsn == server.lsns[6]
    assert begin.commit_time == commit.commit_time == 1000
    assert insert.new.texts() == ("1", "a")
    assert changes(server) == [[(0, "I1"), (1, "T"), (None, "M"), (3, "D")]]
    (one,) = server.committed
    assert one[:6] == (7, commit.commit_lsn, commit.end_lsn, 1000, None, None)
    assert [change.lsn for change in one.changes] == [
        lsn for lsn, frame in zip(server.lsns, server.frames, strict=True) if frame[:1] in b"ITMD"
    ]
    check(server)


def test_a_relation_is_announced_once_and_when_it_changes() -> None:
    server = Server(xid=7)
    mood = Table("accounts", {"id": "int4", "m": UserType(16400, "mood")}, 16385)
    for table in (ACCOUNTS, ACCOUNTS, mood, mood):
        with server.begin() as transaction:
            transaction.insert(table, [1, "a"])
    assert "".join(line[0] for line in shown(server)) == "BRICBICBYRICBIC"
    server.reconnect()
    with server.begin() as transaction:
        transaction.insert(mood, [1, "a"])
    assert [line[0] for line in shown(server)][-5:] == list("BYRIC")
    check(server)


def test_transactions_interleave_in_the_log() -> None:
    server = Server(xid=7)
    early, late = server.begin(), server.begin()
    early.insert(ACCOUNTS, [1, None])
    late.insert(ACCOUNTS, [2, None])
    early.insert(ACCOUNTS, [3, None])
    late.commit()
    early.commit()
    assert shown(server) == ["B 8", "R", "I 2", "C", "B 7", "I 1", "I 3", "C"]
    # Single LSNs go back, those of commits do not.
    assert server.lsns[5] < server.lsns[2] < server.lsns[6]
    check(server)


def test_a_transaction_that_ends_in_an_exception_is_not_sent() -> None:
    server = Server()
    with pytest.raises(ZeroDivisionError), server.begin() as transaction:
        transaction.insert(ACCOUNTS, [1 // 0, None])
    assert (server.sent, server.committed) == ([], [])
    with expect_error(code="unfit_input"):
        transaction.commit()


@pytest.mark.parametrize(("version", "tags"), [(14, ["B 700", "C"]), (15, [])])
def test_empty_transactions(version: int, tags: list[str]) -> None:
    server = Server(version=version)
    with server.begin():
        pass
    assert shown(server) == tags
    assert len(server.committed) == len(tags) // 2
    check(server)


def test_origins() -> None:
    server = Server(lsn=0x1000)
    with server.begin(origin="o", origin_lsn=0x77) as transaction:
        transaction.insert(WHOLE, [1])
    streamed = server.begin(origin="o", origin_lsn=0x77)
    streamed.insert(WHOLE, [2])
    streamed.stream()
    streamed.insert(WHOLE, [3])
    streamed.commit()
    assert [line[0] for line in shown(server)] == list("BORICSORIESIEc")
    messages = list(pf.Decoder().decode_many(server.frames))
    # Begin and the first Stream Start leave their LSN to the Origin.
    assert (server.lsns[0], server.lsns[1], messages[1].commit_lsn) == (0, 0x1000, 0x77)
    assert (server.lsns[5], server.lsns[6], messages[6].commit_lsn) == (0, server.lsns[8], 0)
    assert server.lsns[10] == server.lsns[11] > 0
    assert [one.origin for one in server.committed] == ["o", "o"]
    check(server)


def test_a_streamed_transaction_with_subtransactions() -> None:
    server = Server(xid=7)
    big = server.begin()
    big.insert(ACCOUNTS, [1, None])
    big.stream()
    with big.savepoint():
        big.insert(ACCOUNTS, [2, None])
    with server.begin() as between:
        between.insert(ACCOUNTS, [100, None])
    gone = big.savepoint()
    big.insert(ACCOUNTS, [3, None])
    with big.savepoint():
        big.insert(ACCOUNTS, [4, None])
    big.stream()
    big.insert(ACCOUNTS, [5, None])
    gone.rollback()
    unsent = big.savepoint()
    big.insert(ACCOUNTS, [6, None])
    unsent.rollback()
    big.insert(ACCOUNTS, [7, None])
    big.stream()
    big.stream()
    big.commit()
    assert shown(server) == [
        "S 7 first", "R 7", "I 7 1", "E",
        "B 9", "R", "I 100", "C",
        "S 7 more", "I 8 2", "I 10 3", "I 11 4", "E",
        "A 7 11", "A 7 10",
        "S 7 more", "R 7", "I 7 7", "E",
        "S 7 more", "E",
        "c 7",
    ]  # fmt: skip
    assert changes(server) == [[(0, "I100")], [(0, "I1"), (1, "I2"), (2, "I7")]]
    assert [change.subxid for change in server.committed[1].changes] == [7, 8, 7]
    # As the frames come, rows are counted that are taken back later.
    assert [sent.seq for sent in server.sent if sent.seq is not None] == [0, 0, 1, 2, 3, 4]
    assert server.frames[14] == testing.stream_abort(7, 10)
    check(server)


def test_a_relation_in_a_stream_counts_outside_once_it_is_committed() -> None:
    server = Server(xid=7)
    for end in ("commit", "abort"):
        streamed = server.begin()
        streamed.insert(WHOLE, [1])
        streamed.stream()
        getattr(streamed, end)()
        with server.begin() as plain:
            plain.insert(WHOLE if end == "commit" else ACCOUNTS, [2, None][: 1 + (end == "abort")])
    assert [line[0] for line in shown(server)] == list("SRIEcBICSRIEABRIC")
    check(server)


def test_an_abort_takes_back_each_streamed_subtransaction() -> None:
    server = Server(xid=7, streaming="parallel")
    big = server.begin()
    big.insert(WHOLE, [1])
    with big.savepoint():
        big.insert(WHOLE, [2])
    big.savepoint()
    big.insert(WHOLE, [3])
    big.stream()
    big.savepoint()
    big.insert(WHOLE, [4])
    big.abort()
    assert shown(server)[-3:] == ["A 7 8", "A 7 9", "A 7 7"]
    last = pf.decode(server.frames[-1])
    assert last.abort_lsn == server.lsns[-1] == server.lsn
    assert last.abort_time == server.time
    assert server.committed == []
    check(server)


def test_a_message_before_the_first_row_of_a_subtransaction_stays() -> None:
    """Its frame has the xid of the whole transaction, so that nobody can take it back."""
    server = Server(xid=7)
    big = server.begin()
    big.insert(WHOLE, [1])
    gone = big.savepoint()
    big.message("p", b"stays")
    big.insert(WHOLE, [2])
    big.message("p", b"goes")
    big.stream()
    gone.rollback()
    big.commit()
    assert shown(server) == [
        "S 7 first",
        "R 7",
        "I 7 1",
        "M 7",
        "I 8 2",
        "M 7",
        "E",
        "A 7 8",
        "c 7",
    ]
    assert changes(server) == [[(0, "I1"), (None, "M")]]
    assert pf.decode(server.committed[0].changes[1].frame).content == b"stays"


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("end", ["commit", "abort"])
def test_prepared_transactions(streamed: bool, end: str) -> None:
    server = Server(xid=7, lsn=0x1000)
    prepared = server.begin()
    prepared.insert(WHOLE, [1])
    if streamed:
        prepared.stream()
        prepared.insert(WHOLE, [2])
    prepared.prepare("g")
    with expect_error(code="unfit_input"):
        prepared.insert(WHOLE, [3])
    with server.begin() as between:
        between.insert(WHOLE, [100])
    getattr(prepared, end)()
    head = (
        ["S 7 first", "R 7", "I 7 1", "E", "S 7 more", "I 7 2", "E", "p 7", "B 8", "R"]
        if streamed
        else ["b 7", "R", "I 1", "P 7", "B 8"]
    )
    assert shown(server) == [*head, "I 100", "C", "K 7" if end == "commit" else "r 7"]
    prepare, last = (pf.decode(server.frames[i]) for i in (7 if streamed else 3, -1))
    if end == "commit":
        assert changes(server)[1] == [(0, "I1"), (1, "I2")][: 1 + streamed]
        told = server.committed[1]
        assert (told.gid, told.commit_lsn, told.end_lsn) == ("g", last.commit_lsn, last.end_lsn)
    else:
        assert len(server.committed) == 1
        assert last.prepare_end_lsn == prepare.end_lsn
        assert last.rollback_end_lsn == server.lsn
        assert last.prepare_time == prepare.prepare_time < last.rollback_time
    assert last.gid == prepare.gid == "g"
    check(server)


def test_an_empty_prepared_transaction() -> None:
    server = Server(xid=7)
    with server.begin() as empty:
        empty.prepare("")
    assert shown(server) == ["b 7", "P 7"]
    empty.commit()
    assert shown(server)[2:] == ["K 7"]
    assert changes(server) == [[]]
    check(server)


def test_a_new_connection_sends_open_transactions_again() -> None:
    server = Server(xid=7)
    big = server.begin()
    big.insert(WHOLE, [1])
    gone = big.savepoint()
    big.insert(WHOLE, [2])
    big.stream()
    gone.rollback()
    before = len(server.sent)
    server.reconnect()
    big.insert(WHOLE, [3])
    big.stream()
    big.commit()
    assert shown(server)[before:] == ["S 7 first", "R 7", "I 7 1", "I 7 3", "E", "c 7"]
    assert [sent.seq for sent in server.sent[before:]] == [None, None, 0, 1, None, None]
    assert changes(server) == [[(0, "I1"), (1, "I3")]]


def test_messages_outside_of_transactions() -> None:
    server = Server(lsn=0x1000)
    server.message("p", b"x")
    message = pf.decode(server.frames[0])
    assert (message.flags, message.lsn, message.content) == (0, server.lsn, b"x")
    assert server.lsns == [server.lsn]
    body = testing.xlog_data(server.frames[0], server.lsn, send_time=server.time)
    assert list(server.copy_data()) == [body]


def test_savepoints_end_once() -> None:
    big = Server(xid=7).begin()
    outer = big.savepoint()
    inner = big.savepoint()
    outer.release()
    for end in (inner.release, inner.rollback, outer.rollback):
        with expect_error(code="unfit_input"):
            end()
    with pytest.raises(ZeroDivisionError), big.savepoint():
        big.insert(WHOLE, [1 // 0])
    big.commit()


def test_xids_wrap() -> None:
    server = Server(xid=0xFFFFFFFF)
    assert [server.begin().xid, server.begin().xid] == [0xFFFFFFFF, 3]


def test_every_message_is_sent(impl: ModuleType) -> None:
    """A decoder that knows nothing takes all of it, and there are all of the 19 messages."""
    server = Server(streaming="parallel")
    mood = Table("m", {"id": "int4", "m": UserType(16400, "mood")}, 16395)
    for end in ("commit", "abort", "prepare"):
        for streamed in (False, True):
            transaction = server.begin(origin="o")
            transaction.insert(mood, [1, "ok"])
            transaction.update(mood, [2, "ok"], [1, None])
            transaction.delete(mood, [2, None])
            transaction.truncate([mood])
            transaction.message("p", b"x")
            if streamed:
                transaction.stream()
            if end == "prepare":
                transaction.prepare(f"g{streamed}")
                (transaction.abort if streamed else transaction.commit)()
            else:
                getattr(transaction, end)()
    decoder = impl.Decoder()
    messages = [decoder.decode(frame) for frame in server.frames]
    assert {type(message).__name__ for message in messages} == set(TAGS)
    assert [testing.encode(message) for message in messages] == server.frames
    assert len(server.committed) == 3
    check(server)
