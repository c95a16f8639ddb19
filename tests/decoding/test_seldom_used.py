"""What users meet seldom: reprs, copies, comparisons, times of events, wrong arguments."""

from __future__ import annotations

import copy
import datetime
import pickle
from typing import TYPE_CHECKING, Any

import pytest
from support.expected_errors import expect_error
from support.frames.made_vectors import TWO, insert, relation, text
from support.frames.make_frames import begin, commit, stream_start

import pgoutput_fast as pf
from pgoutput_fast import testing
from pgoutput_fast.columnar.selection import Selection

if TYPE_CHECKING:
    from types import ModuleType

ROW = insert(text("1"), text("a"))


def test_repr_of_a_decoder_says_where_it_is(impl: ModuleType) -> None:
    decoder = impl.Decoder()
    assert repr(decoder) == "<Decoder: 0 relations>"
    decoder.decode(begin(7))
    decoder.decode(relation(TWO))
    assert repr(decoder) == "<Decoder: 1 relations, in transaction 7>"
    streaming = impl.Decoder()
    streaming.decode(stream_start(9))
    assert repr(streaming) == "<Decoder: 0 relations, in the stream chunk of xid 9>"


def test_repr_of_a_key_shows_only_what_was_sent(impl: ModuleType) -> None:
    """The server sends the other columns of such a tuple as NULL, whatever they are."""
    names = [f"c{number}" for number in range(30)]
    table = testing.Table("t", dict.fromkeys(names, "text"), key=["c1", "c29"])
    row = ["x", "7", *[None] * 27, "8"]
    key = [value if name in ("c1", "c29") else None for name, value in zip(names, row, strict=True)]
    decoder = impl.Decoder()
    decoder.decode(table.relation())
    for frame in (testing.delete(table, key), testing.update(table, row, key, "K")):
        assert repr(decoder.decode(frame).old) == "TupleData(c1='7', c29='8')"
        assert repr(impl.decode(frame).old) == "TupleData('7', '8')"
    nulls = ", ".join(f"{name}=NULL" for name in names[2:20])
    whole = f"TupleData(c0='x', c1='7', {nulls}, … 10 more)"
    assert repr(decoder.decode(testing.delete(table, row, "O")).old) == whole
    assert repr(decoder.decode(testing.insert(table, row)).new) == whole


def test_tuples_are_their_own_copies(impl: ModuleType) -> None:
    decoder = impl.Decoder()
    decoder.decode(relation(TWO))
    row = decoder.decode(ROW).new
    assert copy.copy(row) is row
    assert copy.deepcopy(row) is row
    assert row != ("1", "a")
    assert (row == ("1", "a")) is False


def test_ranges_are_checked_and_do_not_change() -> None:
    with pytest.raises(ValueError, match="bounds"):
        pf.Range(1, 2, "{}")
    span = pf.Range(1, 2)
    with pytest.raises(AttributeError, match="lower"):
        span.lower = 3
    assert span.lower == 1


def test_arrays_are_equal_with_their_bounds_alone() -> None:
    array = pf.Array([1, 2], (0,))
    assert array == pf.Array([1, 2], (0,))
    assert array != pf.Array([1, 2], (1,))
    assert array != [1, 2]
    assert array != (1, 2)
    for again in (pickle.loads(pickle.dumps(array)), copy.copy(array)):
        assert again == array
        assert again.lower_bounds == (0,)


@pytest.mark.parametrize(
    "arguments", [{"tables": []}, {"tables": "accounts"}, {"columns": {"accounts": ["id"]}}]
)
def test_selections_that_select_nothing(arguments: dict[str, Any]) -> None:
    (parameter,) = arguments
    with expect_error(code="bad_option", parameter=parameter):
        Selection(**{"tables": None, "columns": None, **arguments})


@pytest.mark.parametrize("arguments", [{"columns": 7}, {"columns": ["id", 7]}, {"tables": [7]}])
def test_selections_of_what_is_no_name(arguments: dict[str, Any]) -> None:
    (name,) = arguments
    with pytest.raises(TypeError, match=name):
        Selection(**{"tables": None, "columns": None, **arguments})


def test_events_tell_when_they_committed() -> None:
    pytest.importorskip("pyarrow", reason="the decoder of columns needs it")
    decoder = pf.ColumnarDecoder()
    assert list(decoder.decode([begin(7), commit(time=1_500_000)])) == []
    (event,) = decoder.events
    assert event.commit_datetime == datetime.datetime(
        2000, 1, 1, 0, 0, 1, 500_000, datetime.timezone.utc
    )
    list(decoder.decode([begin(7), commit(time=2**62)]))
    (event,) = decoder.events
    with expect_error(code="unfit_value"):
        _ = event.commit_datetime
    list(decoder.decode([stream_start(9), b"E"]))
    assert [one.commit_datetime for one in decoder.events] == [None] * len(decoder.events)


def test_malformed_frames_are_shown() -> None:
    pa = pytest.importorskip("pyarrow", reason="the decoder of columns needs it")
    decoder = pf.ColumnarDecoder(on_error="collect")
    list(decoder.decode([relation(TWO), insert(text("x"), text("a"))], lsns=[5, 6]))
    assert repr(decoder.errors) == "<ErrorBatch: 1 frames>"
    assert repr(decoder.errors[0]).startswith("BadFrame(frame=1, lsn=6, error=DecodeError(")
    names = ["frame", "lsn", "tag", "code", "offset", "message", "data"]
    assert sorted(pa.schema(decoder.errors).names) == sorted(names)


def test_lsns_and_commits_of_a_wrong_kind() -> None:
    pytest.importorskip("pyarrow", reason="the decoder of columns needs it")
    decoder = pf.ColumnarDecoder()
    (batch,) = decoder.decode([relation(TWO), ROW])
    with pytest.raises(TypeError, match="commit_lsn"):
        batch.with_commit("0/1", 0)
    with pytest.raises(TypeError, match="commit_time"):
        batch.with_commit(1, datetime.datetime(2000, 1, 1))
    for wrong in (-1, 2**64):
        with pytest.raises(ValueError, match="LSN"):
            list(decoder.decode([ROW, ROW], lsns=[wrong, 2**63]))


def test_a_batch_of_frames_has_its_own_offsets() -> None:
    frames = pf.decode_batch([ROW])
    with pytest.raises(TypeError, match="offsets"):
        list(pf.ColumnarDecoder().decode(frames, [0, 1]))
