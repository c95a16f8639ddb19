"""Find out which features decoders have, by running each on frames that need the feature."""

from __future__ import annotations

import importlib
import struct
from collections.abc import Callable, Iterator
from typing import Any

from . import baseline
from .harness import NotMeasured, optional_module

_RELATION = (
    struct.pack(">cI", b"R", 7) + b"public\0t\0" + struct.pack(">ch", b"d", 2)
    + b"\x01id\0" + struct.pack(">Ii", 23, -1) + b"\x00at\0" + struct.pack(">Ii", 1082, -1)
)  # fmt: skip
_BEGIN = struct.pack(">cQqI", b"B", 1, 2, 3)


def _insert(*columns: bytes, xid: bytes = b"") -> bytes:
    head = b"I" + xid + struct.pack(">IcH", 7, b"N", len(columns))
    return head + b"".join(columns)


def _value(kind: bytes, data: bytes) -> bytes:
    return kind + struct.pack(">i", len(data)) + data


_TEXT_1 = _value(b"t", b"1")
_XID = struct.pack(">I", 5)

# Feature → frames for a decoder, in order. The last frame must be decoded as the feature says.
_FRAMES = {
    "unchanged TOAST told from NULL": [_RELATION, _BEGIN, _insert(_TEXT_1, b"n"),
                                       _insert(_TEXT_1, b"u")],
    "typed values": [_RELATION, _BEGIN, _insert(_TEXT_1, _value(b"t", b"2024-02-29"))],
    "binary format, typed": [
        _RELATION, _BEGIN,
        _insert(_value(b"b", struct.pack(">i", 1)), _value(b"b", struct.pack(">i", 8825))),
    ],
    "streamed transactions": [
        b"S" + _XID + b"\x01", b"R" + _XID + _RELATION[1:], _insert(_TEXT_1, b"n", xid=_XID),
        b"E", b"c" + _XID + b"\0" + struct.pack(">QQq", 1, 2, 3),
    ],
    "two-phase commit": [
        struct.pack(">cQQqI", b"b", 1, 2, 3, 5) + b"gid\0",
        struct.pack(">cBQQqI", b"P", 0, 1, 2, 3, 5) + b"gid\0",
        struct.pack(">cBQQqI", b"K", 0, 1, 2, 3, 5) + b"gid\0",
    ],
    "Truncate": [_RELATION, _BEGIN, struct.pack(">cIBI", b"T", 1, 0, 7)],
    "Type, Origin, logical messages": [
        struct.pack(">cI", b"Y", 9) + b"public\0mood\0", struct.pack(">cQ", b"O", 1) + b"o\0",
        struct.pack(">cBQ", b"M", 0, 1) + b"p\0" + struct.pack(">I", 2) + b"hi",
    ],
    "refuses a frame that is cut": [_RELATION, _BEGIN, _insert(_TEXT_1, _TEXT_1)[:-1]],
    "refuses bytes left over": [_RELATION, _BEGIN, _insert(_TEXT_1, b"n") + b"x"],
}  # fmt: skip


def _ours(name: str) -> Callable[[list[bytes], bool], list[Any]]:
    module = importlib.import_module(name)

    def decode(frames: list[bytes], typed: bool) -> list[Any]:
        decoder = module.Decoder()
        messages = [decoder.decode(frame) for frame in frames]
        return [
            (message.new.values() if typed else message.new.texts())
            if type(message).__name__ == "Insert"
            else message
            for message in messages
        ]

    return decode


def _baseline(frames: list[bytes], typed: bool) -> list[Any]:
    decoder = baseline.Decoder("typed" if typed else "texts")
    messages = [decoder.decode(frame) for frame in frames]
    return [tuple(getattr(message, "new", (message,))) for message in messages]


def _pypgoutput(frames: list[bytes], _typed: bool) -> list[Any]:
    decoders = optional_module("pypgoutput.decoders")
    names = ("Begin", "Commit", "Delete", "Insert", "Relation", "Truncate", "Update")
    classes = {name[0]: getattr(decoders, name) for name in names}
    messages = [classes[chr(frame[0])](frame) for frame in frames]
    return [
        tuple(column.col_data for column in message.new_tuple.column_data)
        if hasattr(message, "new_tuple")
        else message
        for message in messages
    ]


def _walflux(frames: list[bytes], typed: bool) -> list[Any]:
    module = optional_module("walflux.protocol")
    messages = [module.decode_message(frame) for frame in frames]
    return [
        tuple(
            module.convert_value(value, oid) if typed else value
            for value, oid in zip(message.new, (23, 1082), strict=True)
        )
        if hasattr(message, "new")
        else message
        for message in messages
    ]


DECODERS: dict[str, Callable[[list[bytes], bool], list[Any]]] = {
    "pgoutput_fast": _ours("pgoutput_fast"),
    "plain struct decoder": _baseline,
    "pypgoutput": _pypgoutput,
    "walflux": _walflux,
}


def _does(decode: Callable[[list[bytes], bool], list[Any]], feature: str) -> bool:
    import datetime

    frames = _FRAMES[feature]
    typed = "typed" in feature
    refuses = feature.startswith("refuses")
    try:
        found = decode(frames, typed)
    except NotMeasured:
        raise
    except Exception:  # noqa: BLE001 - any exception shows that the decoder refuses the frames
        return refuses
    if refuses:
        return False
    if typed:
        return bool(found[-1] == (1, datetime.date(2024, 2, 29)))
    if feature.startswith("unchanged"):
        return bool(found[-1][1] != found[-2][1])
    return True


def rows() -> Iterator[list[str]]:
    """The rows of a table: a header, then for each feature which decoders have it."""
    yield ["", *DECODERS]
    for feature in _FRAMES:
        line = [feature]
        for decode in DECODERS.values():
            try:
                line.append("yes" if _does(decode, feature) else "no")
            except NotMeasured:
                line.append("not installed")
        yield line
