"""Sequences of frames that no capture has, for one decoder each, with what is expected of them.

A sequence is a list of `steps` for one decoder: `frame` with `class` and `fields` or `error`, or
`reset`; and after each, where given, `relations`: what `decoder.relations` holds.
extract_vectors.py writes them to sequences.json.
"""

from __future__ import annotations

from typing import Any

from support.frames.made_vectors import (
    NULL,
    PREPARED,
    STOP,
    TWO,
    WELL_FORMED,
    insert,
    prepared,
    relation,
    start,
    text,
)
from support.frames.reference_parser import (
    ReferenceStream,
    WireError,
)

from pgoutput_fast import testing


def made_sequences() -> list[dict[str, Any]]:
    return [sequence(name, steps, *facts) for name, (steps, facts) in _SEQUENCES.items()]


RESET = b"reset"


def sequence(name: str, frames: list[bytes], *facts: str) -> dict[str, Any]:
    """Each frame with what the reference says of it, and of the relations after it."""
    stream = ReferenceStream()
    steps = []
    for frame in frames:
        step: dict[str, Any]
        if frame == RESET:
            stream.reset()
            step = {"reset": True}
        else:
            step = {"frame": frame.hex()}
            try:
                message = stream.feed(frame)
            except WireError as error:
                step["error"] = {"code": error.code, "offset": error.offset, "tag": error.tag}
            else:
                step["class"] = message["class"]
                step["fields"] = message["fields"]
                step["in_stream"] = message["in_stream"]
                if "relation" in message:
                    names = [column[1] for column in message["relation"]["columns"]]
                    relation_name = message["relation"]["name"]
                    step["relation"] = [message["relation"]["namespace"], relation_name, names]
        step["relations"] = stream.published()
        steps.append(step)
    return {"id": f"made/{name}", "made": True, "facts": list(facts), "steps": steps}


def _commit(xid: int) -> bytes:
    return testing.stream_commit(xid, 1, 2, 3)


def _abort(xid: int, subxid: int | None = None) -> bytes:
    return testing.stream_abort(xid, subxid)


_BEGIN = WELL_FORMED["begin"][0]
_COMMIT = WELL_FORMED["commit"][0]
_ROW = insert(text("1"), NULL)
_THREE = [*TWO, ("more", 20)]


def _of(xid: int) -> bytes:
    return insert(text("1"), NULL, xid=xid)


def _prepare(tag: str, xid: int) -> bytes:
    return PREPARED[tag](xid, "gid", 1, 2, 3)


_SEQUENCES: dict[str, tuple[list[bytes], tuple[str, ...]]] = {
    "streamed-relation/commit": (
        [
            start(10), relation(TWO, xid=10), _of(10), STOP,
            _BEGIN, _ROW, _COMMIT,
            start(10, 0), _of(10), STOP, _commit(10),
            _BEGIN, _ROW, _COMMIT,
        ],
        ("a relation sent in a stream is the stream's own until it commits",),
    ),
    "streamed-relation/abort": (
        [
            start(10), relation(TWO, xid=10), _of(10), STOP, _abort(10),
            _BEGIN, _ROW, relation(TWO), _ROW, _COMMIT,
            start(10), _of(10), STOP, _abort(10),
        ],
        ("a relation sent in a stream goes with the top-level abort",),
    ),
    "streamed-relation/abort-of-another": (
        [start(10), relation(TWO, xid=10), STOP, _abort(11), start(10, 0), _of(10), STOP],
        ("abort without a stream",),
    ),
    "streamed-relation/abort-of-a-subtransaction": (
        [
            start(10), relation(TWO, xid=10), _of(11), STOP, _abort(10, 11),
            start(10, 0), _of(10), STOP, _commit(10), _BEGIN, _ROW, _COMMIT,
        ],
        ("abort of a subtransaction",),
    ),
    "streamed-relation/prepare": (
        [
            start(10), relation(TWO, xid=10), _of(10), STOP, _prepare("p", 10),
            _BEGIN, _ROW, _COMMIT,
            start(10), _of(10), STOP, _abort(10),
            _prepare("K", 10),
            _BEGIN, _ROW, relation(TWO), _ROW, _COMMIT,
        ],
        ("a relation sent in a stream goes with Stream Prepare",),
    ),
    "streamed-relation/two-streams": (
        [
            relation(TWO),
            start(10), relation(_THREE, xid=10), insert(NULL, NULL, NULL, xid=10), STOP,
            start(20), _of(20), relation([("x", 25)], xid=20), insert(NULL, xid=20), STOP,
            start(10, 0), insert(NULL, NULL, NULL, xid=10), _of(10), STOP,
            _BEGIN, _ROW, insert(NULL, NULL, NULL), _COMMIT,
            _commit(20), _BEGIN, insert(NULL), _ROW, _COMMIT,
            _commit(10), _BEGIN, insert(NULL, NULL, NULL), _COMMIT,
        ],
        ("a relation sent in a stream is the stream's own until it commits",),
    ),
    "streamed-type/commit": (
        [
            start(10),
            testing.type_(testing.UserType(16400, "int4", ""), 10),
            relation([("d", 16400)], xid=10),
            insert(text("5"), xid=10),
            STOP,
            _commit(10),
            _BEGIN,
            insert(text("6")),
            _COMMIT,
        ],
        ("domain looks like its base type",),
    ),
    "prepared-relation/rolled-back": (
        [
            prepared("b", "gid"), relation(TWO), _ROW, prepared("P", "gid"), prepared("r", "gid"),
            _BEGIN, _ROW, _COMMIT,
        ],
        ("a relation sent in a prepared transaction stays when that is rolled back",),
    ),
    "prepared/unknown": (
        [prepared("K", "a"), prepared("r", "b"), prepared("P", "c"), _prepare("p", 5)],
        ("unknown prepared transaction",),
    ),
    "prepared/empty": (
        [prepared("b", ""), prepared("P", ""), prepared("K", "")],
        ("empty prepared transaction", "empty GID"),
    ),
    "relation/replaced": (
        [
            _BEGIN, relation(TWO), _ROW, relation(_THREE), _ROW, insert(NULL, NULL, NULL),
            relation(_THREE), relation(TWO, name="renamed"), _ROW, _COMMIT,
        ],
        ("a relation outside streams counts at once",),
    ),
    "relation/same-name-another-oid": (
        [_BEGIN, relation(TWO, 1), relation(_THREE, 2), insert(NULL, NULL, relation_id=1), _COMMIT],
        ("same name, another OID",),
    ),
    "chunks/empty": (
        [start(10), STOP, start(10, 0), STOP, _commit(10), start(11), STOP, _abort(11)],
        ("empty first chunk",),
    ),
    "chunks/order": (
        [
            STOP, start(10), start(10), start(11), _BEGIN, _COMMIT, _commit(10), _abort(10),
            prepared("b", "g"), prepared("P", "g"), prepared("K", "g"), prepared("r", "g"),
            prepared("p", "g"), relation(TWO, xid=10), _of(10), STOP, STOP, _commit(10),
        ],
        ("an error leaves the decoder as it was",),
    ),
    "chunks/errors-inside": (
        [
            relation(TWO),
            start(10), b"", b"?", _of(10)[:-1], _of(10) + b"\0", insert(NULL, xid=10),
            insert(NULL, relation_id=9, xid=10), relation(_THREE, xid=10)[:-1], _of(10), STOP,
            relation(_THREE)[:-1], _ROW,
        ],
        ("an error leaves the decoder as it was",),
    ),
    "abort/never-streamed": (
        [_abort(99), _BEGIN, relation(TWO), _ROW, _COMMIT, _abort(99, 98), _BEGIN, _ROW, _COMMIT],
        ("abort without a stream",),
    ),
    "reset/open-chunk": (
        [relation(TWO), start(10), relation(_THREE, xid=10), RESET, _ROW, STOP, start(10), _of(10)],
        ("a new connection",),
    ),
    "reset/closed-chunk": (
        [
            start(10), relation(TWO, xid=10), STOP, RESET,
            _commit(10), _BEGIN, _ROW, relation(TWO), _ROW, RESET, _BEGIN, _ROW,
        ],
        ("a new connection",),
    ),
}  # fmt: skip
