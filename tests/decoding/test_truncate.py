"""The relations of a Truncate, as those of rows are."""

from __future__ import annotations

import pickle

import pytest
from support.expected_errors import expect_error

import pgoutput_fast as pf
from pgoutput_fast import testing

ONE = testing.Table("one", {"id": "int4"})
OTHER = testing.Table("other", {"id": "int4", "note": "text"}, 16386)


@pytest.mark.parametrize("streamed", [False, True])
def test_relations_are_those_that_were_announced(impl, streamed):
    server = testing.Server()
    with server.begin() as transaction:
        transaction.truncate([OTHER, ONE])
        if streamed:
            transaction.stream()
    messages = list(impl.Decoder().decode_many(server.frames))
    announced = {one.name: one for one in messages if isinstance(one, pf.Relation)}
    (truncate,) = [one for one in messages if isinstance(one, pf.Truncate)]
    assert truncate.in_stream == streamed
    assert [one.name for one in truncate.relations] == ["other", "one"]
    assert truncate.relations == (announced["other"], announced["one"])
    again = pickle.loads(pickle.dumps(truncate))
    assert again == truncate
    assert again.relations == truncate.relations


def test_relations_are_as_they_were_when_it_came(impl):
    decoder = impl.Decoder()
    decoder.decode(ONE.relation())
    truncate = decoder.decode(testing.truncate([ONE]))
    renamed = testing.Table("two", {"id": "int4"}, relation_id=ONE.relation_id)
    decoder.decode(renamed.relation())
    assert truncate.relations[0].name == "one"


def test_a_relation_that_was_not_announced(impl):
    decoder = impl.Decoder()
    decoder.decode(ONE.relation())
    frame = testing.truncate([ONE, OTHER])
    truncate = decoder.decode(frame)
    assert truncate.relation_ids == (ONE.relation_id, OTHER.relation_id)
    with pytest.raises(pf.DecodeError) as caught:
        truncate.relations  # noqa: B018
    assert (caught.value.code, caught.value.offset) == ("unknown_relation", len(frame) - 4)


def test_without_a_decoder(impl):
    frame = testing.truncate([ONE, OTHER])
    for truncate in (impl.decode(frame), pickle.loads(pickle.dumps(impl.decode(frame)))):
        with expect_error(pf.DecodeError, code="unknown_relation", offset=len(frame) - 8):
            truncate.relations  # noqa: B018
    assert impl.decode(testing.truncate([])).relations == ()
