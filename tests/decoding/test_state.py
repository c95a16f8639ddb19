"""What a decoder knows between frames: relations, types, streams, transactions."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import pytest
from support.expected_errors import expect_error
from support.frames.make_frames import (
    OID,
    STREAM_STOP,
    begin,
    commit,
    insert,
    relation,
    stream_abort,
    stream_commit,
    stream_prepare,
    stream_start,
    truncate,
    type_frame,
)

import pgoutput_fast as pf
from pgoutput_fast import testing
from pgoutput_fast.errors import Argument

if TYPE_CHECKING:
    from types import ModuleType


def decode_all(decoder: Any, *frames: bytes) -> list[Any]:
    return [decoder.decode(frame) for frame in frames]


def snapshot(decoder: Any) -> dict[str, Any]:
    """All that a state says, to be compared."""
    state = decoder.state
    return {
        "relations": dict(state.relations),
        "types": dict(state.types),
        "plans": {oid: (plan.relation, plan.types) for oid, plan in state.plans.items()},
        "staged": {xid: list(staged.messages) for xid, staged in state.staged.items()},
        "open": state.open_xid,
        "transaction": (state.xid, state.commit_lsn, state.commit_time),
        "rows": (state.row, dict(state.rows)),
    }


def test_relation_names_its_columns(impl: ModuleType) -> None:
    decoder = impl.Decoder()
    announced, _, row = decode_all(decoder, relation("a", "b"), begin(7), insert(b"1", b"2"))
    assert row.relation is announced
    assert row.new.as_dict() == {"a": "1", "b": "2"}
    assert decoder.relations == {OID: announced}


def test_relation_sent_again_unchanged_is_the_same_object(impl: ModuleType) -> None:
    decoder = impl.Decoder()
    first, second = decode_all(decoder, relation("a"), relation("a"))
    assert second is first
    changed = decoder.decode(relation("a", "b"))
    assert changed != first
    assert decoder.relations[OID] is changed


def test_relation_sent_again_in_a_stream_is_the_same_object(impl: ModuleType) -> None:
    decoder = impl.Decoder()
    decode_all(decoder, stream_start(70), type_frame(16400, "", "int4", xid=70))
    first, _, second = decode_all(
        decoder, relation("a", xid=70, type_id=16400), insert(b"1", xid=70),
        relation("a", xid=70, type_id=16400),
    )  # fmt: skip
    assert second is first
    assert len(decoder.state.staged[70].messages) == 2
    other = decoder.decode(relation("a", xid=71, type_id=16400))
    assert other is not first
    decode_all(decoder, STREAM_STOP, stream_abort(70, 71), stream_start(70, first_segment=False))
    assert decoder.decode(insert(b"1", xid=70)).relation is first


def test_streamed_relation_counts_for_its_transaction_alone(impl: ModuleType) -> None:
    decoder = impl.Decoder()
    decode_all(decoder, relation("a"), stream_start(70), relation("a", "b", xid=71))
    assert decoder.decode(insert(b"1", b"2", xid=71)).new.as_dict() == {"a": "1", "b": "2"}
    assert [c.name for c in decoder.relations[OID].columns] == ["a"]
    decoder.decode(STREAM_STOP)
    # Another transaction, between two chunks, sees what was published.
    decode_all(decoder, begin(72), insert(b"3"), commit())
    decode_all(decoder, stream_start(80), relation("z", xid=80), insert(b"4", xid=80), STREAM_STOP)
    # Back in the first one: its own relation is there still.
    decoder.decode(stream_start(70, first_segment=False))
    assert decoder.decode(insert(b"5", b"6", xid=70)).new.as_dict() == {"a": "5", "b": "6"}
    decode_all(decoder, STREAM_STOP, stream_commit(70))
    published = decoder.relations[OID]
    assert [c.name for c in published.columns] == ["a", "b"]
    assert published.xid is None
    assert published == pf.decode(relation("a", "b"))
    # What the other one says is not, until it is committed.
    decoder.decode(stream_commit(80))
    assert [c.name for c in decoder.relations[OID].columns] == ["z"]


@pytest.mark.parametrize(
    "end", [stream_abort(70, 70), stream_prepare(70)], ids=["abort", "prepare"]
)
def test_abort_and_prepare_drop_what_the_stream_announced(impl: ModuleType, end: bytes) -> None:
    decoder = impl.Decoder()
    decode_all(decoder, stream_start(70), relation("a", xid=70), STREAM_STOP, end)
    assert decoder.relations == {}
    assert decoder.state.staged == {}
    with pytest.raises(pf.DecodeError) as caught:
        decoder.decode(insert(b"1"))
    assert (caught.value.code, caught.value.offset) == ("unknown_relation", 1)


def test_subtransaction_abort_takes_back_its_relation(impl: ModuleType) -> None:
    decoder = impl.Decoder()
    decode_all(decoder, stream_start(70), relation("a", xid=70), relation("a", "b", xid=71))
    decode_all(decoder, STREAM_STOP, stream_abort(70, 71), stream_start(70, first_segment=False))
    assert decoder.decode(insert(b"1", xid=70)).new.as_dict() == {"a": "1"}
    decode_all(decoder, STREAM_STOP, stream_commit(70))
    assert [c.name for c in decoder.relations[OID].columns] == ["a"]


def test_abort_of_an_unknown_transaction_is_ignored(impl: ModuleType) -> None:
    decoder = impl.Decoder()
    decoder.decode(relation("a"))
    before = snapshot(decoder)
    abort = decoder.decode(stream_abort(99, 99))
    assert (abort.xid, abort.subxid, abort.abort_lsn) == (99, 99, None)
    assert snapshot(decoder) == before


@pytest.mark.parametrize(
    "frame",
    [begin(1), commit(), stream_start(9), stream_commit(70), stream_abort(70, 70),
     stream_prepare(70),
     testing.begin_prepare(4), testing.prepare(4), testing.commit_prepared(4),
     testing.rollback_prepared(4)],
    ids=lambda frame: chr(frame[0]),
)  # fmt: skip
def test_frames_that_no_chunk_holds(impl: ModuleType, frame: bytes) -> None:
    decoder = impl.Decoder()
    decode_all(decoder, relation("a"), stream_start(70), relation("a", xid=70))
    before = snapshot(decoder)
    with pytest.raises(pf.DecodeError) as caught:
        decoder.decode(frame)
    assert (caught.value.code, caught.value.offset, caught.value.tag) == (
        "stream_order", 0, chr(frame[0]),
    )  # fmt: skip
    assert snapshot(decoder) == before
    decoder.decode(STREAM_STOP)
    assert decoder.decode(frame).frame == frame


def test_stream_stop_needs_an_open_chunk(impl: ModuleType) -> None:
    with pytest.raises(pf.DecodeError) as caught:
        impl.Decoder().decode(STREAM_STOP)
    assert (caught.value.code, caught.value.offset) == ("stream_order", 0)


def test_no_chunk_begins_inside_a_transaction(impl: ModuleType) -> None:
    decoder = impl.Decoder()
    decode_all(decoder, relation("a"), begin(7), insert(b"1"))
    before = snapshot(decoder)
    with expect_error(pf.DecodeError, code="stream_order", offset=0):
        decoder.decode(stream_start(70))
    assert snapshot(decoder) == before
    decode_all(decoder, commit(), stream_start(70))


def test_rows_are_counted_per_transaction(impl: ModuleType) -> None:
    decoder = impl.Decoder()
    decode_all(decoder, relation("a"), relation("a", oid=OID + 1))
    decode_all(decoder, begin(7, lsn=0x500, time=-3), insert(b"1"), truncate(OID, OID + 1))
    state = decoder.state
    assert (state.xid, state.commit_lsn, state.commit_time, state.row) == (7, 0x500, -3, 3)
    decoder.decode(insert(b"1"))
    assert decoder.state.row == 4
    decoder.decode(commit())
    state = decoder.state
    assert (state.xid, state.commit_lsn, state.commit_time, state.row) == (None, None, None, 0)
    # Streamed transactions go on counting in their next chunk, whatever comes between.
    decode_all(decoder, stream_start(70), insert(b"1", xid=70), insert(b"2", xid=71), STREAM_STOP)
    assert decoder.state.rows == {70: 2}
    decode_all(decoder, begin(8), insert(b"1"), commit(), stream_start(70, first_segment=False))
    assert (decoder.state.row, decoder.state.rows) == (2, {})
    decode_all(decoder, truncate(OID, OID + 1, xid=70), STREAM_STOP)
    assert decoder.state.rows == {70: 4}
    decoder.decode(stream_commit(70))
    assert decoder.state.rows == {}


def test_a_first_segment_begins_anew(impl: ModuleType) -> None:
    """After a reconnect the server sends an open transaction again, from its first change."""
    decoder = impl.Decoder()
    decode_all(decoder, stream_start(70), relation("a", xid=70), insert(b"1", xid=70), STREAM_STOP)
    assert decoder.state.rows == {70: 1}
    decoder.decode(stream_start(70, first_segment=True))
    assert (decoder.state.row, decoder.state.staged[70].messages) == (0, [])
    with expect_error(code="unknown_relation"):
        decoder.decode(insert(b"1", xid=70))
    with expect_error(code="trailing_bytes", options=[Argument("in_stream", True)]):
        impl.decode(stream_start(70) + b"x")


def test_prepared_transaction_has_no_commit_yet(impl: ModuleType) -> None:
    decoder = impl.Decoder()
    decode_all(decoder, relation("a"), testing.begin_prepare(44))
    decoder.decode(insert(b"1"))
    state = decoder.state
    assert (state.xid, state.commit_lsn, state.commit_time, state.row) == (44, None, None, 1)
    decoder.decode(testing.prepare(44))
    assert (decoder.state.xid, decoder.state.row) == (None, 0)


def test_relation_inside_a_prepared_transaction_counts_at_once(impl: ModuleType) -> None:
    decoder = impl.Decoder()
    decode_all(decoder, testing.begin_prepare(44), relation("a"))
    assert OID in decoder.relations


def test_reset_drops_streams_and_keeps_relations(impl: ModuleType) -> None:
    decoder = impl.Decoder()
    decode_all(decoder, relation("a"), stream_start(70), relation("a", "b", xid=70))
    decoder.reset()
    state = decoder.state
    assert (state.open_xid, state.staged, state.rows) == (None, {}, {})
    assert decoder.decode(insert(b"1")).new.as_dict() == {"a": "1"}
    decode_all(decoder, begin(9), insert(b"1"))
    decoder.reset()
    assert (decoder.state.xid, decoder.state.row) == (None, 0)


@pytest.mark.parametrize("bad", [insert(b"1", b"2"), b"I\0", b"", b"?", relation("a")[:-1], b"C"])
def test_an_error_leaves_the_decoder_as_it_was(impl: ModuleType, bad: bytes) -> None:
    decoder = impl.Decoder()
    decode_all(decoder, relation("a"), begin(7), insert(b"1"))
    before = snapshot(decoder)
    with pytest.raises(pf.DecodeError):
        decoder.decode(bad)
    assert snapshot(decoder) == before


def test_domain_comes_typed_by_its_type_message(impl: ModuleType) -> None:
    decoder = impl.Decoder()
    decode_all(decoder, type_frame(16400, "", "int4"), relation("a", type_id=16400))
    assert decoder.decode(insert(b"42")).new.values() == (42,)
    # An enum: its namespace is not pg_catalog, so its name means nothing here.
    decode_all(decoder, type_frame(16400, "public", "int4"), relation("a", type_id=16400))
    assert decoder.decode(insert(b"42")).new.values() == ("42",)


def test_type_changed_under_an_unchanged_relation(impl: ModuleType) -> None:
    decoder = impl.Decoder()
    decode_all(decoder, type_frame(16400, "", "int4"), relation("a", type_id=16400))
    first = decoder.decode(insert(b"42"))
    again = decode_all(
        decoder, type_frame(16400, "", "text"), relation("a", type_id=16400), insert(b"42")
    )
    assert again[1] is first.relation
    assert first.new.values() == (42,)
    assert again[2].new.values() == ("42",)


def test_streamed_types_are_published_with_their_relation(impl: ModuleType) -> None:
    decoder = impl.Decoder()
    decode_all(decoder, stream_start(70), type_frame(16400, "", "int4", xid=70))
    decode_all(decoder, relation("a", xid=70, type_id=16400))
    assert decoder.decode(insert(b"42", xid=70)).new.values() == (42,)
    assert decoder.state.types == {}
    decode_all(decoder, STREAM_STOP, stream_commit(70))
    assert decoder.state.types[16400].xid is None
    assert decoder.decode(insert(b"42")).new.values() == (42,)


def test_decoder_pickles_in_mid_stream(impl: ModuleType) -> None:
    decoder = impl.Decoder(pf.Policies(infinity="text"), "latin-1")
    decode_all(decoder, relation("a"), stream_start(70), relation("a", "b", xid=70))
    decoder.decode(insert(b"1", b"2", xid=70))
    copy = pickle.loads(pickle.dumps(decoder))
    assert snapshot(copy) == snapshot(decoder)
    assert copy.state.settings == decoder.state.settings
    row = copy.decode(insert(b"\xe9", b"2", xid=70))
    assert row.new.as_dict() == {"a": "é", "b": "2"}
    assert copy.state.row == decoder.state.row + 1


def test_decode_many_says_which_frame(impl: ModuleType) -> None:
    decoder = impl.Decoder()
    messages = decoder.decode_many([relation("a"), insert(b"1"), insert(b"1", b"2"), insert(b"3")])
    assert [type(next(messages)).__name__ for _ in range(2)] == ["Relation", "Insert"]
    with pytest.raises(pf.DecodeError) as caught:
        next(messages)
    assert (caught.value.frame, caught.value.code) == (2, "column_count")
    assert list(messages) == []
    assert decoder.decode(insert(b"3")).new.values() == ("3",)


def test_decode_many_leaves_other_errors_alone(impl: ModuleType) -> None:
    def frames() -> Any:
        yield relation("a")
        raise RuntimeError("of the source")

    messages = impl.Decoder().decode_many(frames())
    next(messages)
    with pytest.raises(RuntimeError, match="of the source"):
        next(messages)


def test_many_relations_in_traffic(impl: ModuleType) -> None:
    """More than are kept at hand, with OIDs that fall onto each other, and OID 0."""
    decoder = impl.Decoder()
    oids = [0, 1, 64, 65, 128, 4294967295, *range(1000, 1200)]
    for oid in oids:
        decoder.decode(relation(f"c{oid}", oid=oid))
    for oid in oids + oids[::-1]:
        row = decoder.decode(insert(b"x", oid=oid))
        assert row.new.as_dict() == {f"c{oid}": "x"}
        assert row.relation_id == oid
    with expect_error(pf.DecodeError, code="unknown_relation"):
        decoder.decode(insert(b"x", oid=2))


def test_tables_made_again_and_again_are_forgotten(impl: ModuleType) -> None:
    """A table that is dropped and made again has its name and another OID, 10,000 times over."""
    decoder = impl.Decoder()
    decoder.decode(type_frame(16400, "", "int4"))
    decoder.decode(relation("kept", oid=5, name="other", type_id=16400))
    for oid in range(20_000, 30_000):
        decoder.decode(type_frame(oid + 100_000, "", "int4"))
        decoder.decode(relation("a", oid=oid, type_id=oid + 100_000))
    assert 1000 < len(decoder.relations) <= 2002
    assert set(decoder.state.types) - {16400} <= {oid + 100_000 for oid in decoder.relations}
    assert decoder.state.plans.keys() == decoder.relations.keys()
    # The newest ones are known, also those that lost their name: their schema may be renamed.
    for oid in (29_999, 29_998, 29_500):
        assert decoder.decode(insert(b"1", oid=oid)).new.as_dict() == {"a": 1}
    assert decoder.decode(insert(b"2", oid=5)).new.as_dict() == {"kept": 2}
    with expect_error(pf.DecodeError, code="unknown_relation"):
        decoder.decode(insert(b"1", oid=20_000))


@pytest.mark.slow
def test_types_made_again_and_again_are_forgotten(impl: ModuleType) -> None:
    """One table whose column has a new type each time."""
    decoder = impl.Decoder()
    decode_all(decoder, type_frame(16400, "", "int4"), relation("kept", oid=5, type_id=16400))
    for oid in range(20_000, 25_000):
        decode_all(decoder, type_frame(oid, "", "int4"), relation("a", oid=6, type_id=oid))
        assert decoder.decode(insert(b"1", oid=6)).new.as_dict() == {"a": 1}
    assert len(decoder.state.types) <= 1003
    assert decoder.decode(insert(b"2", oid=5)).new.as_dict() == {"kept": 2}


@pytest.mark.slow
def test_names_that_tables_exchange_cost_none(impl: ModuleType) -> None:
    decoder = impl.Decoder()
    for i in range(3000):
        for oid, name in ((7, "a"), (8, "b")):
            decoder.decode(relation("c", oid=oid, name=name if i % 2 else f"{name}{i}"))
    assert set(decoder.relations) == {7, 8}
    for i in range(6000):
        decoder.decode(relation("c", oid=7 + i % 2, name="a"))
    assert set(decoder.relations) == {7, 8}


def test_a_stream_that_alters_its_table_keeps_the_last_of_each(impl: ModuleType) -> None:
    decoder = impl.Decoder()
    decode_all(decoder, stream_start(70))
    for i in range(5000):
        decoder.decode(relation(f"a{i % 2}", xid=70))
    assert len(decoder.state.staged[70].messages) == 1
    decode_all(decoder, relation("b", xid=71), STREAM_STOP, stream_commit(70))
    assert [column.name for column in decoder.relations[OID].columns] == ["b"]


def test_encodings(impl: ModuleType) -> None:
    decoder = impl.Decoder(encoding="WIN1252")
    decode_all(decoder, relation("a"))
    assert decoder.decode(insert(b"\x80")).new.texts() == ("€",)
    decoder = impl.Decoder(encoding="SJIS")
    decode_all(decoder, relation("a"))
    assert decoder.decode(insert(b"\x87\x40")).new.texts() == ("①",)
    with expect_error(code="bad_option"):
        impl.Decoder(encoding="klingon")
    # Names that are the server's alone.
    for name, sent, text in (
        ("WIN", b"\xc0", "А"), ("ALT", b"\x80", "А"), ("KOI8", b"\xe1", "А"),
        ("TCVN", b"\xd0", "Đ"),
        ("iso885915", b"\xa4", "€"), ("ISO88595", b"\xb0", "А"), ("Windows949", b"\x81\x41", "갂"),
        ("WIN936", b"\x81\x40", "丂"), ("mskanji", b"\x87\x40", "①"), ("windows_866", b"\x80", "А"),
    ):  # fmt: skip
        decoder = impl.Decoder(encoding=name)
        decode_all(decoder, relation("a"))
        assert decoder.decode(insert(sent)).new.texts() == (text,)
    for name in (
        "BIG5", "WIN950", "cp950", "EUC_JP", "euc-jp", "EUC_JIS_2004", "SHIFT_JIS_2004",
    ):  # fmt: skip
        with expect_error(code="not_supported"):
            impl.Decoder(encoding=name)
    with expect_error(code="bad_option"):
        impl.Decoder(encoding="utf-16")
    with expect_error(code="bad_option"):
        impl.Decoder(encoding="base64")
    with pytest.raises(TypeError):
        impl.Decoder(encoding=7)


def test_arguments_are_checked(impl: ModuleType) -> None:
    with pytest.raises(TypeError, match="policies"):
        impl.Decoder(policies={"infinity": "null"})
    with pytest.raises(TypeError, match="registry"):
        impl.Decoder(registry={})


def test_a_name_that_is_no_text_does_not_cost_the_frame(impl: ModuleType) -> None:
    frame = relation("a").replace(b"\1a\0", b"\1\xff\0")
    decoder = impl.Decoder()
    announced = decoder.decode(frame)
    assert announced.columns[0].name == "\udcff"
    assert decoder.decode(insert(b"1")).new["\udcff"] == "1"
    assert repr(announced).isprintable()
    assert r"\udcff" in repr(announced)
