"""What the C code knows of frames by itself, held against the table of messages."""

from __future__ import annotations

import pytest

from pgoutput_fast.decoding import _core
from pgoutput_fast.errors import MAX_FRAME_LENGTH
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


def test_the_longest_frame() -> None:
    assert _core.wire_limits() == (MAX_FRAME_LENGTH, 0x7FFF)
