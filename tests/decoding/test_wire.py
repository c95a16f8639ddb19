"""Single numbers of a frame, read by the wire table."""

from __future__ import annotations

from types import ModuleType

import pytest
from support.expected_errors import expect_error

import pgoutput_fast as pf
from pgoutput_fast.protocol.wire import fields_reader

COMMIT = b"C\x05" + bytes.fromhex("00000000000000aa 00000000000000bb ffffffffffffffff") + b"more"


def test_fields_are_read_where_the_table_has_them() -> None:
    assert fields_reader("C", "flags", "commit_lsn", "end_lsn", "commit_time")(COMMIT) == (
        5, 0xAA, 0xBB, -1,
    )  # fmt: skip
    assert fields_reader("C", "end_lsn")(COMMIT) == (0xBB,)
    assert fields_reader("R", "relation_id")(b"R\xff\xff\xff\xff") == (0xFFFFFFFF,)


@pytest.mark.parametrize(
    ("size", "offset", "field"), [(1, 1, "flags"), (9, 2, "commit_lsn"), (17, 10, "end_lsn")]
)
def test_a_frame_that_ends_before_is_refused_at_the_field(
    size: int, offset: int, field: str
) -> None:
    with expect_error(pf.DecodeError, code="truncated", offset=offset, tag="C"):
        fields_reader("C", "end_lsn")(COMMIT[:size])


@pytest.mark.parametrize(("flags", "first"), [(0, False), (1, True), (2, False), (0xFF, True)])
def test_a_flag_is_the_lowest_bit(impl: ModuleType, flags: int, first: bool) -> None:
    assert impl.decode(b"S\0\0\0\7" + bytes([flags])).first_segment is first


def test_a_frame_is_a_contiguous_buffer(impl: ModuleType) -> None:
    """A strided one would be gathered into bytes that were never next to each other."""
    strided = memoryview(b"E?E?")[::2]
    for decode in (impl.decode, impl.Decoder().decode):
        with pytest.raises(TypeError):
            decode(strided)
    assert impl.decode(memoryview(b"?E")[1:]).frame == b"E"
