"""Makes bad frames out of good ones, and streams out of order, from a seed."""

from __future__ import annotations

import random
import struct
from typing import Any

from support.frames.made_sequences import RESET
from support.frames.made_vectors import (
    NULL,
    SAME,
    STOP,
    TWO,
    WELL_FORMED,
    binary,
    insert,
    prepared,
    relation,
    row,
    start,
    text,
    tuple_data,
)

from pgoutput_fast import testing

EDGES_16 = (-1, 0, 1, 2, 3, 127, 255, 1600, 32767, -32768)
EDGES_32 = (-1, 0, 1, 2, 4, 255, 65535, 2**24, 2**30, 2**31 - 1, -(2**31), -5)
EDGE_BYTES = b"\0\1\x7f\x80\xfe\xffntubNKO"
TAGS = b"BCORYIUDTMSEcAbPKrp"


def mutated(chance: random.Random, frame: bytes, others: list[bytes], places: list[int]) -> bytes:
    """`frame` with one to three changes; `places` are where its counts and lengths stand."""
    data = bytearray(frame)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        if not data:
            break
        _mutate(chance, data, others, places)
    return bytes(data)


def _mutate(chance: random.Random, data: bytearray, others: list[bytes], places: list[int]) -> None:
    at = chance.randrange(len(data))
    what = chance.randrange(12)
    if what == 0:  # a bit
        data[at] ^= 1 << chance.randrange(8)
    elif what == 1:
        data[at] = chance.choice(EDGE_BYTES)
    elif what == 2:  # cut short
        del data[at:]
    elif what == 3:  # cut out
        del data[at : at + chance.choice((1, 1, 2, 4, 8, 100))]
    elif what == 4:  # put in
        more = bytes(chance.choice(EDGE_BYTES) for _ in range(chance.choice((1, 1, 2, 4, 8))))
        data[at:at] = more
    elif what == 5:  # random tail
        data += chance.randbytes(chance.choice((1, 1, 2, 8, 16, 17)))
    elif what == 6:
        value = chance.choice((*EDGES_16, len(data) - at - 2, len(data) - at - 1))
        data[at : at + 2] = struct.pack(">H", value & 0xFFFF)
    elif what == 7:
        value = chance.choice((*EDGES_32, len(data) - at - 4, len(data) - at - 3))
        data[at : at + 4] = struct.pack(">I", value & 0xFFFFFFFF)
    elif what == 8:  # the end of another frame behind the beginning of this one
        other = chance.choice(others)
        data[at:] = other[chance.randrange(len(other) + 1) :]
    elif what == 9:
        data[0] = chance.choice(TAGS)
    elif what == 10:  # random bytes in the middle
        length = min(chance.choice((1, 2, 4, 8)), len(data) - at)
        data[at : at + length] = chance.randbytes(length)
    elif places:  # a length or count that is nearly right
        place = chance.choice(places)
        if place + 4 <= len(data):
            (length,) = struct.unpack_from(">i", data, place)
            length += chance.choice((-1, 1, -2, 2, 256, -(2**31)))
            data[place : place + 4] = struct.pack(">I", length & 0xFFFFFFFF)


def length_places(vector: dict[str, Any]) -> list[int]:
    """Where the lengths of the tuples' values stand in the vector's frame."""
    return [
        offset - 4
        for data in vector.get("tuples", {}).values()
        for offset in data["offsets"]
        if offset is not None
    ]


XIDS = (10, 11, 20)
RELATION_IDS = (16385, 16386)
COLUMNS = (
    [],
    [("id", 23)],
    TWO,
    [("id", 16400), ("name", 25)],
    [("id", 20), ("at", 1184), ("n", 1700)],
    [("same", 25), ("same", 23)],
)


def stream_frame(chance: random.Random, inside: int | None) -> bytes:
    """A frame that may come next, or may not; `inside` is the xid of the open chunk."""
    xid = chance.choice(XIDS)
    # mostly what belongs there, so that a sequence goes on
    streamed = (inside if chance.random() < 0.8 else xid) if inside is not None else None
    if chance.random() < 0.03:
        streamed = None if streamed is not None else xid
    relation_id = chance.choice(RELATION_IDS)
    what = chance.randrange(20)
    if what <= 5:
        width = chance.choice((1, 2, 2, 2, 3, 0))
        values = (text("1"), NULL, SAME, binary(b"\0\0\0\1"), text("x"), text(b"\xff"), text(""))
        columns = [chance.choice(values) for _ in range(width)]
        if what <= 2:
            return insert(*columns, relation_id=relation_id, xid=streamed)
        if what == 3:
            rest = chance.choice((b"K", b"O")) + tuple_data(*columns)
            return row("D", rest, relation_id, streamed)
        rest = b"N" + tuple_data(*columns)
        if what == 5:
            rest = chance.choice((b"K", b"O")) + tuple_data(*columns) + rest
        return row("U", rest, relation_id, streamed)
    if what <= 8:
        columns = chance.choice(COLUMNS)
        identity = chance.choice("dfin")
        return relation(columns, relation_id, identity=identity, xid=streamed)
    if what == 9:
        name = chance.choice(("int4", "text", "mood"))
        return testing.type_(testing.UserType(16400, name, ""), streamed)
    if what == 10:
        return start(xid, bool(chance.randrange(2)))
    if what in (11, 12):
        return STOP if inside is not None or chance.random() < 0.2 else start(xid)
    if what == 13:
        return testing.stream_commit(xid, 1, 2, 3)
    if what == 14:
        subxid = chance.choice((xid, xid, 11, 12))
        return testing.stream_abort(xid, subxid, *chance.choice(((), (), (1, 2))))
    if what == 15:
        return testing.stream_prepare(xid, "gid", 1, 2, 3)
    if what == 16:
        return chance.choice((WELL_FORMED["begin"][0], WELL_FORMED["commit"][0]))
    if what == 17:
        return prepared(chance.choice("bPKr"), "gid")
    if what == 18:
        return testing.truncate([relation_id], xid=streamed)
    return RESET if chance.random() < 0.2 else chance.choice((b"", b"?", b"I", b"O" + bytes(9)))
