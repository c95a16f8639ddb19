"""Frames made of fields: every vector comes back, and what does not fit is refused by name."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from support.expected_errors import expect_error
from support.frames.class_table import FIELDS, TAGS
from support.frames.vector_files import read_sequences, read_vectors

import pgoutput_fast as pf
from pgoutput_fast.testing import encode, encode_fields, encode_tuple

GOOD = {v["id"]: (v["frame"], v["in_stream"]) for v in read_vectors() if "error" not in v}
NAMES = {tag: name for name, tag in TAGS.items()}


def fields_of(message: Any) -> dict[str, Any]:
    """The fields of a message, tuples as (kind, bytes) of each column: no frame is among them."""
    fields = {name: getattr(message, name) for name in FIELDS[type(message).__name__]}
    for name in {"old", "new"} & fields.keys():
        if fields[name] is not None:
            data = fields[name]
            fields[name] = [(data.kind(i), data.raw(i)) for i in range(len(data))]
    return fields


def test_every_vector_comes_back(impl: ModuleType) -> None:
    for name, (frame, in_stream) in GOOD.items():
        message = impl.decode(frame, in_stream)
        assert encode(message) == frame, name
        assert encode_fields(message.tag, **fields_of(message)) == frame, name
    assert len(GOOD) > 1000


def test_the_vectors_have_every_message(impl: ModuleType) -> None:
    tags = {chr(frame[0]) for frame, _ in GOOD.values()}
    assert tags == set(TAGS.values())
    streamed = {chr(frame[0]) for frame, in_stream in GOOD.values() if in_stream}
    assert streamed >= set("RYIUDTMOE")


def test_every_frame_of_the_sequences_comes_back(impl: ModuleType) -> None:
    count = 0
    for sequence in read_sequences():
        decoder = impl.Decoder()
        for step in sequence["steps"]:
            if "reset" in step:
                decoder.reset()
            elif "error" not in step:
                message = decoder.decode(step["frame"])
                assert encode(message) == step["frame"]
                count += 1
    assert count > 100


@pytest.mark.parametrize("name", FIELDS)
def test_the_frame_of_a_message_is_not_looked_at(impl: ModuleType, name: str) -> None:
    """An object with a message's fields and another frame is encoded by its fields."""
    frame, in_stream = next(one for one in GOOD.values() if chr(one[0][0]) == TAGS[name])
    message = impl.decode(frame, in_stream)
    copied = SimpleNamespace(tag=message.tag, frame=b"another", **fields_of(message))
    assert encode(copied) == frame


def test_a_changed_field_changes_the_frame(impl: ModuleType) -> None:
    frame = encode_fields("B", final_lsn=0x102, commit_time=-3, xid=7)
    assert frame == b"B" + bytes.fromhex("0000000000000102 fffffffffffffffd 00000007")
    begin = impl.decode(frame)
    changed = encode_fields("B", final_lsn=begin.final_lsn, commit_time=begin.commit_time, xid=8)
    assert changed == frame[:-1] + b"\x08"


def test_inside_of_a_stream_and_outside(impl: ModuleType) -> None:
    fields: dict[str, Any] = {"relation_id": 5, "new": ["a", None]}
    plain = encode_fields("I", **fields)
    assert plain == b"I\0\0\0\5N\0\2t\0\0\0\1an"
    assert encode_fields("I", xid=None, **fields) == plain
    assert encode_fields("I", xid=0xFFFFFFFF, **fields) == b"I\xff\xff\xff\xff" + plain[1:]
    with pytest.raises(TypeError, match="xid"):
        encode_fields("O", xid=5, name="o", commit_lsn=0)


def test_stream_abort_has_its_lsn_and_time_or_not(impl: ModuleType) -> None:
    short = encode_fields("A", xid=1, subxid=2)
    assert short == b"A\0\0\0\1\0\0\0\2"
    long = encode_fields("A", xid=1, subxid=2, abort_lsn=3, abort_time=-1)
    assert long == short + bytes(7) + b"\3" + b"\xff" * 8
    assert [encode(impl.decode(frame)) for frame in (short, long)] == [short, long]
    for half in ({"abort_lsn": 3}, {"abort_time": 3}):
        with expect_error(code="unfit_input"):
            encode_fields("A", xid=1, subxid=2, **half)


def test_tuples(impl: ModuleType) -> None:
    columns = [None, pf.UNCHANGED, "é", b"\0\xff", ("t", b"\xff"), ("b", b""), ("t", "x")]
    data = encode_tuple([*columns, ("n", None), ("u", pf.UNCHANGED)])
    assert data == (
        b"\0\x09" + b"n" + b"u" + b"t\0\0\0\2\xc3\xa9" + b"b\0\0\0\2\0\xff" + b"t\0\0\0\1\xff"
        b"b\0\0\0\0" + b"t\0\0\0\1x" + b"n" + b"u"
    )
    row = impl.decode(b"I\0\0\0\1N" + data).new
    assert encode(row) == encode_tuple(row) == data
    assert encode_tuple(["é"], "latin-1") == b"\0\1t\0\0\0\1\xe9"
    assert encode_tuple(iter([])) == b"\0\0"
    update = encode_fields("U", relation_id=1, old=row, old_kind="O", new=[bytearray(b"y")])
    assert update == b"U\0\0\0\1O" + data + b"N\0\1b\0\0\0\1y"


def test_names_in_other_encodings(impl: ModuleType) -> None:
    frame = encode_fields("O", "latin-1", commit_lsn=0, name="ö\udcff")
    assert frame == b"O" + bytes(8) + b"\xf6\xff\0"
    decoder = impl.Decoder(encoding="latin-1")
    assert encode(decoder.decode(frame)) == frame
    assert decoder.decode(frame).name == "öÿ"


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "xid, too large": ("B", {"final_lsn": 1, "commit_time": 1, "xid": 1 << 32}),
    "xid, negative": ("S", {"xid": -1, "first_segment": True}),
    "xid, in a stream": ("I", {"xid": 1 << 32, "relation_id": 1, "new": []}),
    "xid, text": ("B", {"final_lsn": 1, "commit_time": 1, "xid": "7"}),
    "lsn": ("O", {"commit_lsn": 1 << 64, "name": ""}),
    "time": ("B", {"final_lsn": 1, "commit_time": 1 << 63, "xid": 1}),
    "flags": ("C", {"flags": 256, "commit_lsn": 1, "end_lsn": 1, "commit_time": 1}),
    "name with NUL": ("O", {"commit_lsn": 1, "name": "a\0b"}),
    "name, bytes": ("O", {"commit_lsn": 1, "name": b"a"}),
    "name, a surrogate": ("O", {"commit_lsn": 1, "name": "\ud800"}),
    "identity": ("R", {"relation_id": 1, "namespace": "", "name": "t", "replica_identity": "dd",
                       "columns": ()}),
    "a column": ("R", {"relation_id": 1, "namespace": "", "name": "t", "replica_identity": "d",
                       "columns": [(0, "a", 23)]}),
    "a column's type": ("R", {"relation_id": 1, "namespace": "", "name": "t",
                              "replica_identity": "d", "columns": [(0, "a", -1, -1)]}),
    "too many columns": ("R", {"relation_id": 1, "namespace": "", "name": "t",
                               "replica_identity": "d", "columns": [(0, "a", 23, -1)] * 0x8000}),
    "too many values": ("I", {"relation_id": 1, "new": [None] * 0x8000}),
    "a value": ("I", {"relation_id": 1, "new": [None, 5]}),
    "a kind": ("I", {"relation_id": 1, "new": [("x", b"")]}),
    "text as binary": ("I", {"relation_id": 1, "new": [("b", "x")]}),
    "a row as text": ("I", {"relation_id": 1, "new": "ab"}),
    "old without kind": ("D", {"relation_id": 1, "old": [], "old_kind": None}),
    "another kind": ("U", {"relation_id": 1, "old": [], "old_kind": "N", "new": []}),
    "an OID": ("T", {"relation_ids": [1, 1 << 32], "options": 0}),
    "content": ("M", {"flags": 0, "lsn": 0, "prefix": "", "content": "text"}),
    "tag": ("?", {}),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused(case: str) -> None:
    tag, fields = REFUSED[case]
    with expect_error(code="unfit_input"):
        encode_fields(tag, **fields)


def test_a_field_too_few_and_one_too_many() -> None:
    with pytest.raises(TypeError, match="commit_time"):
        encode_fields("B", final_lsn=1, xid=1)
    with pytest.raises(TypeError, match="xid"):
        encode_fields("E", xid=1)
    with pytest.raises(TypeError, match="old"):
        encode_fields("I", relation_id=1, new=[], old=None)


def test_what_is_neither_message_nor_tuple() -> None:
    for thing in (b"E", None, ("a",), pf):
        with pytest.raises(TypeError):
            encode(thing)


def test_a_frame_that_is_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pgoutput_fast.protocol.encode.MAX_FRAME_LENGTH", 20)
    fields: dict[str, Any] = {"flags": 0, "lsn": 0, "prefix": ""}
    assert len(encode_fields("M", content=b"12345", **fields)) == 20
    with expect_error(code="out_of_memory"):
        encode_fields("M", content=b"123456", **fields)
