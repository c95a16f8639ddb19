"""What the strategies draw: every message comes back from its fields, every stream is taken."""

from __future__ import annotations

from types import ModuleType

import pytest

pytest.importorskip("hypothesis")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pgoutput_fast as pf
from pgoutput_fast import testing
from pgoutput_fast.protocol.wire import TAGS
from pgoutput_fast.testing import strategies

QUICK = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


@QUICK
@given(st.data(), st.booleans())
def test_every_frame_comes_back(impl: ModuleType, data: st.DataObject, in_stream: bool) -> None:
    frame = data.draw(strategies.frames(in_stream=in_stream))
    message = impl.decode(frame, in_stream)
    assert testing.encode(message) == frame
    assert not in_stream or message.tag in strategies.IN_STREAM


@pytest.mark.parametrize("tag", TAGS)
def test_each_message_is_drawn(tag: str) -> None:
    @settings(QUICK, max_examples=5)
    @given(strategies.messages(tag))
    def draw(message: object) -> None:
        assert message.tag == tag  # type: ignore[attr-defined]

    draw()


@QUICK
@given(st.data())
def test_tuples_have_the_width_that_is_asked_for(impl: ModuleType, data: st.DataObject) -> None:
    width = data.draw(st.integers(0, 5))
    row = data.draw(strategies.tuples(width, unchanged=False))
    assert len(row) == width
    found = impl.decode(testing.insert(1, row)).new
    assert len(found) == width
    assert "u" not in [found.kind(i) for i in range(width)]


@pytest.mark.slow
@QUICK
@given(strategies.tables())
def test_tables_are_announced(impl: ModuleType, table: testing.Table) -> None:
    *_, relation = [impl.decode(frame) for frame in table.announcement()]
    assert (relation.name, relation.relation_id) == (table.name, table.relation_id)
    assert relation.columns == table.columns
    flags = [column.flags for column in table.columns]
    assert {"f": all(flags), "n": not any(flags)}.get(
        table.replica_identity, any(flags) or not flags
    )


@QUICK
@given(strategies.servers())
def test_a_decoder_takes_what_a_server_sends(impl: ModuleType, server: testing.Server) -> None:
    decoder = impl.Decoder()
    messages = [decoder.decode(frame) for frame in server.frames]
    assert [testing.encode(message) for message in messages] == server.frames
    # What was committed is in what was sent, in order, whether it was streamed or not.
    assert list(outcome(messages, server.lsns)) == [
        (one.xid, one.commit_lsn, one.gid, [(change.lsn, change.frame) for change in one.changes])
        for one in server.committed
    ]


def outcome(messages: list, lsns: list[int]):
    """The committed transactions of a stream, as a client would put them together.

    Of each its xid, commit LSN, GID, and its changes with their LSNs, in protocol 1's form.
    """
    staged: dict[int, list] = {}
    prepared: dict[int, list] = {}
    current: list = []
    top = None
    for message, lsn in zip(messages, lsns, strict=True):
        tag = message.tag
        if tag in "Bb":
            top, current = message.xid, []
        elif tag == "S":
            top = message.xid
            current = staged[top] = [] if message.first_segment else staged[top]
        elif tag in "IUDT" or (tag == "M" and message.flags & 1):
            frame = message.frame
            plain = frame[:1] + frame[5:] if message.in_stream else frame
            subxid = message.xid if tag != "M" else None
            current.append((lsn, plain, subxid))
        elif tag == "A" and message.subxid == message.xid:
            staged.pop(message.xid, None)
        elif tag == "A":
            changes = staged[message.xid]
            first = [i for i, change in enumerate(changes) if change[2] == message.subxid]
            del changes[first[0] if first else len(changes) :]
        elif tag in "Pp":
            prepared[message.xid] = staged.pop(message.xid) if tag == "p" else current
        elif tag == "r":
            del prepared[message.xid]
        elif tag in "CcK":
            xid = top if tag == "C" else message.xid
            gid = message.gid if tag == "K" else None
            if tag == "C":
                changes = current
            else:
                changes = (staged if tag == "c" else prepared).pop(xid)
            yield xid, message.commit_lsn, gid, [(lsn, frame) for lsn, frame, _ in changes]


@pytest.mark.slow
@QUICK
@given(strategies.servers(streaming=False, two_phase=False))
def test_without_options_whole_transactions_are_sent(server: testing.Server) -> None:
    assert {frame[:1] for frame in server.frames} <= {bytes([tag]) for tag in b"BORYIUDTMC"}


@pytest.mark.slow
@settings(QUICK, max_examples=30)
@given(strategies.servers())
def test_columns_have_the_seqs_that_a_server_counts(server: testing.Server) -> None:
    pytest.importorskip("numpy")
    pa = pytest.importorskip("pyarrow")
    found = []
    for batch in pf.ColumnarDecoder().decode(server.frames, lsns=server.lsns):
        table = pa.record_batch(batch)
        found += zip(table["lsn"].to_pylist(), table["seq"].to_pylist(), strict=True)
    told = []
    messages = pf.Decoder().decode_many(server.frames)
    for sent, message in zip(server.sent, messages, strict=True):
        if sent.seq is not None:
            count = len(message.relation_ids) if message.tag == "T" else 1
            told += [(sent.lsn, sent.seq + i) for i in range(count)]
    assert sorted(found) == sorted(told)
