"""What the C code knows of frames by itself, held against the table of messages."""

from __future__ import annotations

import pytest

from pgoutput_fast import testing
from pgoutput_fast.decoding import _core
from pgoutput_fast.protocol import wire
from pgoutput_fast.protocol.wire import LAYOUTS

SIZES = {"uint8": 1, "bool": 1, "char": 1, "uint32": 4, "truncate_count": 4, "lsn": 8, "time": 8,
         "stream_xid": 0}  # fmt: skip


def offsets(tag: str) -> dict[str, int]:
    """Where the fields of a message begin, up to the first one whose length varies."""
    found = {}
    at = 1
    for name, kind in LAYOUTS[tag]:
        found[name] = at
        if kind not in SIZES:
            return found
        at += SIZES[kind]
    return {**found, "end": at}


@pytest.mark.parametrize(("tag", "name"), _core.wire_offsets())
def test_offsets_of_c_are_those_of_the_table(tag: str, name: str) -> None:
    assert _core.wire_offsets()[tag, name] == offsets(tag)[name]


def test_rows_begin_alike() -> None:
    """As the C code takes it that they do."""
    new, old = offsets("I"), offsets("U")
    assert (new["relation_id"], new["new"]) == (old["relation_id"], old["old"])
    assert offsets("D") == old


@pytest.mark.parametrize("tag", "IUDRYTM")
def test_the_xid_of_a_stream_chunk_comes_first(tag: str) -> None:
    assert LAYOUTS[tag][0] == ("xid", "stream_xid")


@pytest.mark.parametrize("name", _core.wire_limits())
def test_numbers_of_c_are_those_of_python(name: str) -> None:
    assert _core.wire_limits()[name] == getattr(wire, name)


def test_the_heads_of_tuples_and_values() -> None:
    """Held against frames, as no table has them."""
    frame = testing.insert(7, [("t", b"four"), None])
    start = wire.offset_of("I", "new")
    assert frame[start : start + wire.TUPLE_HEAD] == b"N\0\2"
    first = start + wire.TUPLE_HEAD
    assert frame[first : first + wire.VALUE_HEAD] == b"t\0\0\0\4"
    assert frame[first + wire.VALUE_HEAD :] == b"fourn"


@pytest.mark.parametrize("tag", LAYOUTS)
def test_offsets_of_python_are_those_of_the_table(tag: str) -> None:
    for name, offset in offsets(tag).items():
        assert wire.offset_of(tag, name) == offset


@pytest.mark.parametrize(
    ("tag", "name", "outside", "inside"),
    [("I", "relation_id", 1, 5), ("U", "old", 5, 9), ("T", "relation_ids", 6, 10),
     ("B", "end", 21, 21)],
)  # fmt: skip
def test_an_xid_moves_what_is_behind_it(tag: str, name: str, outside: int, inside: int) -> None:
    assert wire.offset_of(tag, name) == outside
    assert wire.offset_of(tag, name, in_stream=True) == inside


def test_offsets_behind_fields_of_any_length_are_refused() -> None:
    with pytest.raises(KeyError):
        wire.offset_of("R", "replica_identity")


def test_the_relation_of_a_frame() -> None:
    frame = testing.insert(0x01020304, [("t", b"x")])
    assert wire.relation_id_of(frame, in_stream=False) == 0x01020304
    assert wire.relation_id_of(frame[:5], in_stream=False) == 0x01020304
    assert wire.relation_id_of(frame[:4], in_stream=False) is None
    assert wire.relation_id_of(frame[:8], in_stream=True) is None
