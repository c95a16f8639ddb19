"""Find out which features decoders have, by running each on frames that need the feature."""

from __future__ import annotations

import importlib
import struct
from collections.abc import Callable, Iterator
from typing import Any

import pgoutput_fast as pf
from pgoutput_fast import testing

from . import baseline
from .harness import NotMeasured, optional_module

_TABLE = testing.Table("t", {"id": "int4", "at": "date"}, 7)
_RELATION = _TABLE.relation()
_BEGIN = testing.begin(3, 1, 2)
_ROW = testing.insert(_TABLE, ["1", None])

# Feature → frames for a decoder, in order. The last frame must be decoded as the feature says.
_FRAMES = {
    "unchanged TOAST told from NULL": [
        _RELATION, _BEGIN, _ROW, testing.insert(_TABLE, ["1", pf.UNCHANGED]),
    ],
    "typed values": [_RELATION, _BEGIN, testing.insert(_TABLE, ["1", "2024-02-29"])],
    "binary format, typed": [
        _RELATION, _BEGIN,
        testing.insert(_TABLE, [struct.pack(">i", 1), struct.pack(">i", 8825)]),
    ],
    "streamed transactions": [
        testing.stream_start(5), testing.in_stream(_RELATION, 5), testing.in_stream(_ROW, 5),
        testing.stream_stop(), testing.stream_commit(5, 1, 2, 3),
    ],
    "two-phase commit": [
        testing.begin_prepare(5, "gid", 1, 2, 3), testing.prepare(5, "gid", 1, 2, 3),
        testing.commit_prepared(5, "gid", 1, 2, 3),
    ],
    "Truncate": [_RELATION, _BEGIN, testing.truncate([_TABLE])],
    "Type, Origin, logical messages": [
        testing.type_(testing.UserType(9, "mood")), testing.origin("o", 1),
        testing.message("p", b"hi", 1),
    ],
    "refuses a frame that is cut": [_RELATION, _BEGIN, testing.insert(_TABLE, ["1", "1"])[:-1]],
    "refuses bytes left over": [_RELATION, _BEGIN, _ROW + b"x"],
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
