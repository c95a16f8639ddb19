"""Frames that no capture has, built byte by byte, with what is expected of them.

Fields are read by reference_parser.py; errors are written here by hand where a test means one
error, and by the reference parser where a frame is cut at each of its bytes. extract_vectors.py
writes them to made.json; its docstring names the keys. Beside those:

    made           true
    error          the DecodeError of the frame, from decode() and from a decoder: code, offset, tag
    decoder_error  what a decoder raises where decode() raises something else, or nothing and gives
                   `class` and `fields`
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

from support.frames.reference_parser import (
    OUTSIDE_ONLY,
    WireError,
    binary_value,
    parse,
    text_value,
)

import pgoutput_fast as pf
from pgoutput_fast import testing

Vector = dict[str, Any]

XID = 4294967295  # the greatest; xids wrap to 3
OID = 4294967295
LSN = 0xFFFFFFF0_F0000000
TIME = 848_546_465_533_693
MOOD = testing.UserType(16400, "mood")

# --- building blocks ----------------------------------------------------------------------------
#
# Well-formed frames are made by the package's test kit; what is wrong with the others is patched
# into their bytes.

Value = Any  # as testing.encode_tuple() takes it

NULL = None
SAME = pf.UNCHANGED


def text(value: str | bytes) -> tuple[str, bytes]:
    return "t", value.encode() if isinstance(value, str) else value


def binary(data: bytes) -> tuple[str, bytes]:
    return "b", data


def tuple_data(*columns: Value) -> bytes:
    return testing.encode_tuple(columns)


def relation(
    columns: list[tuple[str, int]],
    relation_id: int = 16385,
    name: str = "t",
    identity: str = "d",
    xid: int | None = None,
    namespace: str = "public",
    keys: int = 1,
) -> bytes:
    """A table with the first `keys` columns for its key; names may come twice, as in no table."""
    return testing.encode_fields(
        "R",
        xid=xid,
        relation_id=relation_id,
        namespace=namespace,
        name=name,
        replica_identity=identity,
        columns=[
            (number < keys, column, type_id, -1) for number, (column, type_id) in enumerate(columns)
        ],
    )


def row(tag: str, rest: bytes, relation_id: int = 16385, xid: int | None = None) -> bytes:
    """A row message with anything behind the relation's OID."""
    head = testing.insert(relation_id, [], xid)[1:-3]
    return tag.encode() + head + rest


def insert(*columns: Value, relation_id: int = 16385, xid: int | None = None) -> bytes:
    return testing.insert(relation_id, columns, xid)


def start(xid: int, first: bool = True) -> bytes:
    return testing.stream_start(xid, first)


STOP = testing.stream_stop()
TWO = [("id", 23), ("name", 25)]


def prepared(tag: str, gid: str) -> bytes:
    if tag == "b":
        return testing.begin_prepare(XID, gid, LSN, LSN + 8, TIME)
    if tag == "r":
        return testing.rollback_prepared(XID, gid, LSN, LSN + 8, TIME, TIME + 1)
    return PREPARED[tag](XID, gid, LSN, LSN + 8, TIME)


PREPARED = {
    "P": testing.prepare,
    "p": testing.stream_prepare,
    "K": testing.commit_prepared,
}


def patched(frame: bytes, at: int, data: bytes) -> bytes:
    """The frame with other bytes from byte `at` on."""
    return frame[:at] + data + frame[at + len(data) :]


# One well-formed frame of every kind, and whether it comes from inside a stream segment.
WELL_FORMED: dict[str, tuple[bytes, bool]] = {
    "begin": (testing.begin(XID, LSN, TIME), False),
    "commit": (testing.commit(LSN, LSN + 8, TIME), False),
    "origin": (testing.origin("origin", LSN), False),
    "origin-streamed": (testing.origin("origin"), True),
    "relation": (relation(TWO), False),
    "relation-streamed": (relation(TWO, xid=XID), True),
    "type": (testing.type_(MOOD), False),
    "type-streamed": (testing.type_(MOOD, XID), True),
    "insert": (insert(text("1"), NULL), False),
    "insert-streamed": (insert(binary(b"\0\0\0\1"), text("é"), xid=XID), True),
    "update": (testing.update(16385, [text("1"), SAME]), False),
    "update-key": (testing.update(16385, [text("2"), SAME], [text("1"), NULL], "K"), False),
    "update-old-streamed": (
        testing.update(16385, [text("1"), NULL], [text("1"), text("x")], "O", XID),
        True,
    ),
    "delete-key": (testing.delete(16385, [text("1"), NULL], "K"), False),
    "delete-old-streamed": (testing.delete(16385, [text("1"), text("")], "O", XID), True),
    "truncate": (testing.truncate([16385, OID], 3), False),
    "truncate-streamed": (testing.truncate([16385], xid=XID), True),
    "message": (testing.message("prefix", b"\0a\xff", LSN, 1), False),
    "message-streamed": (testing.message("", b"", LSN, 1, XID), True),
    "stream-start": (start(XID), False),
    "stream-stop": (STOP, True),
    "stream-commit": (testing.stream_commit(XID, LSN, LSN + 8, TIME), False),
    "stream-abort": (testing.stream_abort(XID, XID - 1), False),
    "stream-abort-parallel": (testing.stream_abort(XID, XID, LSN, TIME), False),
    "begin-prepare": (prepared("b", "gid"), False),
    "prepare": (prepared("P", "gid"), False),
    "commit-prepared": (prepared("K", "gid"), False),
    "rollback-prepared": (prepared("r", "gid"), False),
    "stream-prepare": (prepared("p", "gid"), False),
}


# --- single frames ------------------------------------------------------------------------------


def good(name: str, frame: bytes, *facts: str, in_stream: bool = False, **more: Any) -> Vector:
    """A frame that decodes; `before` is the plainest context that a decoder needs for it."""
    message = parse(frame, in_stream)
    vector: Vector = {"id": f"made/{name}", "made": True}
    if facts:
        vector["facts"] = list(facts)
    vector.update(in_stream=in_stream, before=[], frame=frame.hex(), **more)
    vector["class"] = message["class"]
    vector["fields"] = message["fields"]
    if message["tuples"]:
        vector["tuples"] = {
            key: {"columns": data["columns"]} for key, data in message["tuples"].items()
        }
    if in_stream:
        vector["before"] = [start(XID).hex()]
    if message["tuples"] and "relation" not in more:
        count = len(next(iter(message["tuples"].values()))["columns"])
        columns = TWO if count == 2 else [(f"c{n}", 25) for n in range(count)]
        relation_id = message["fields"]["relation_id"]
        vector["before"].insert(0, relation(columns, relation_id).hex())
        vector["relation"] = ["public", "t"]
    return vector


def bad(
    name: str, frame: bytes, code: str, offset: int, *, in_stream: bool = False, **more: Any
) -> Vector:
    tag = chr(frame[0]) if frame else None
    before = [relation(TWO).hex()]
    if in_stream:
        before.append(start(XID).hex())
    return {
        "id": f"made/{name}",
        "made": True,
        "in_stream": in_stream,
        "before": before,
        "frame": frame.hex(),
        "error": {"code": code, "offset": offset, "tag": tag},
        **more,
    }


def refused(name: str, frame: bytes, in_stream: bool) -> Vector | None:
    """The vector of a frame that the reference parser refuses; None if it takes it."""
    try:
        parse(frame, in_stream)
    except WireError as error:
        return bad(name, frame, error.code, error.offset, in_stream=in_stream)
    return None


def made_vectors() -> list[Vector]:
    return [*_edges(), *_values(), *_errors(), *_cuts(), *_context_errors()]


def _edges() -> Iterator[Vector]:
    for name, (frame, in_stream) in WELL_FORMED.items():
        yield good(f"well-formed/{name}", frame, in_stream=in_stream)
    stray = testing.stream_abort(4711)
    options = {"proto_version": "1", "publication_names": '"pub"'}
    yield good("stray-abort", stray, "abort without a stream", server="18.4", options=options)
    lowest = testing.begin(3, 0, -(2**63))
    yield good("begin/lowest", lowest, "time before 2000")
    highest = testing.begin(XID, 2**64 - 1, 2**63 - 1)
    yield good("begin/highest", highest, "LSN past 2**63")
    yield good("commit/flags", testing.commit(1, 2, -1, 0xFF), "unknown flags")
    yield good("stream-commit/flags", testing.stream_commit(3, 1, 2, -1, 0x80), "unknown flags")
    yield good("truncate/flags", testing.truncate([16385], 0xFC), "unknown flags")
    yield good("truncate/none", testing.truncate([]))
    many = testing.truncate(range(16384, 16584), 1)
    yield good("truncate/many", many, "truncate of several relations")
    message = testing.message("p", b"", 0, 0xFE)
    yield good("message/flags", message, "unknown flags")
    no_text = testing.message("pr\udce9fix", b"\xff", 0)
    yield good("message/prefix-no-text", no_text, "names that are no text")
    yield good("origin/no-name", testing.origin(""))
    yield good("origin/no-text", testing.origin("\udcff\udcfe"), "names that are no text")
    yield good("relation/no-columns", relation([]), "no columns")
    flagged = relation(TWO).replace(b"\x01id\0", b"\xfeid\0")
    yield good("relation/flags", flagged, "unknown flags")
    yield good("relation/identity", relation(TWO, identity="?"))
    yield good(
        "relation/full", relation(TWO, identity="f", keys=2), "full identity flags every column"
    )
    yield good("relation/greatest-ids", relation([("o", OID)], OID), "unsigned OIDs")
    named = (
        relation(TWO).replace(b"public\0t\0", b"sch\xe9ma\0t\xff\0").replace(b"name\0", b"n\xe4\0")
    )
    yield good("relation/names-no-text", named, "names that are no text")
    yield good("relation/pg-catalog", relation(TWO, namespace=""))
    modifier = testing.Table("t", {"n": "numeric(10,2)"}).relation()
    yield good("relation/modifier", modifier)
    domain = testing.type_(testing.UserType(OID, "int4", ""))
    yield good("type/domain", domain, "domain looks like its base type", "unsigned OIDs")
    for tag in "bPKrp":
        yield good(f"gid/empty-{tag}", prepared(tag, ""), "empty GID")
        yield good(f"gid/longest-{tag}", prepared(tag, "é'\"" * 49 + "abc"), "GID of 199 bytes")
    for tag in "PKr":
        yield good(
            f"unknown-prepared/{tag}", prepared(tag, "never seen"), "unknown prepared transaction"
        )
    for first in (0, 1):
        yield good(f"stream-start/{first}", start(3, bool(first)))
    yield good(
        "stream-abort/subtransaction",
        testing.stream_abort(3, XID),
        "abort of a subtransaction",
    )
    lsn = testing.stream_abort(3, 3, 2**64 - 1, -(2**63))
    yield good("stream-abort/extremes", lsn, "abort with LSN in parallel streaming")
    yield good("insert/no-columns", insert(), "tuple without columns")
    yield good("insert/empty-values", insert(text(""), binary(b"")), "empty value")
    yield good(
        "insert/all-kinds",
        insert(NULL, SAME, text("x"), binary(b"x")),
        "text and binary in one tuple",
    )
    yield good("insert/greatest-ids", insert(text("1"), NULL, relation_id=OID), "unsigned OIDs")
    yield good(
        "insert/greatest-xid", insert(text("1"), NULL, xid=XID), "unsigned xids", in_stream=True
    )
    yield good("insert/least-xid", insert(text("1"), NULL, xid=3), "unsigned xids", in_stream=True)
    key = b"K" + tuple_data(text("1"), NULL) + b"N" + tuple_data(text("10"), SAME)
    yield good(
        "update/moves-unchanged",
        row("U", key),
        "changed key with an unchanged value",
        "key tuple of full width",
    )
    same = b"K" + tuple_data(text("1"), NULL) + b"N" + tuple_data(text("1"), text("x"))
    yield good("update/key-unchanged", row("U", same), "K without a changed key")
    old = b"O" + tuple_data(text("1"), text("toasted")) + b"N" + tuple_data(text("1"), SAME)
    yield good(
        "update/old-fills-unchanged", row("U", old), "unchanged value, filled in the old row"
    )


def _values() -> Iterator[Vector]:
    """One column each, in a relation of one column: what a typed value is."""
    edges: list[tuple[str, int, list[tuple[str, bytes]]]] = [
        ("bool", 16, [text("t"), text("f"), binary(b"\1"), binary(b"\0")]),
        ("int2", 21, [text("-32768"), text("32767"), binary(b"\x80\0"), binary(b"\x7f\xff")]),
        ("int4", 23, [text("-2147483648"), binary(b"\x80\0\0\0"), binary(b"\x7f\xff\xff\xff")]),
        ("int8", 20, [text(str(-(2**63))), text(str(2**63 - 1)), binary(b"\x80" + b"\0" * 7)]),
        ("oid", 26, [text("4294967295"), binary(b"\xff" * 4)]),
        ("xid", 28, [text("4294967295"), binary(b"\xff" * 4)]),
        ("xid8", 5069, [text(str(2**64 - 1)), binary(b"\xff" * 8)]),
        (
            "float4",
            700,
            [
                *map(text, ("NaN", "Infinity", "-Infinity", "-0", "1.1", "3.4028235e+38", "1e-45")),
                *(
                    binary(struct.pack(">f", value))
                    for value in (float("nan"), float("-inf"), -0.0, 1.1)
                ),
            ],
        ),
        (
            "float8",
            701,
            [
                *map(text, ("NaN", "Infinity", "-0", "1.1", "5e-324", "1.7976931348623157e+308")),
                *(binary(struct.pack(">d", value)) for value in (float("inf"), -0.0, 1.1, 5e-324)),
            ],
        ),
        (
            "numeric",
            1700,
            [
                *map(
                    text,
                    (
                        "NaN",
                        "Infinity",
                        "-Infinity",
                        "0",
                        "0.00",
                        "-1.10",
                        "1" + "0" * 60,
                        "0." + "0" * 40 + "1",
                    ),
                ),
                binary(struct.pack(">hhHh", 0, 0, 0, 0)),
                binary(struct.pack(">hhHh", 0, 0, 0, 2)),
                binary(struct.pack(">hhHh", 0, 0, 0xC000, 0)),
                binary(struct.pack(">hhHh", 0, 0, 0xD000, 0)),
                binary(struct.pack(">hhHh", 0, 0, 0xF000, 0)),
                binary(struct.pack(">hhHhhh", 2, 0, 0x4000, 2, 1, 1000)),
                binary(struct.pack(">hhHhh", 1, 15, 0, 0, 1)),
                binary(struct.pack(">hhHhh", 1, -3, 0, 12, 7)),
                binary(struct.pack(">hhHhhhh", 3, 1, 0, 3, 12, 3456, 7890)),
            ],
        ),
        ("text", 25, [text(""), text("é😀"), binary("é😀".encode()), text(b"a\0b")]),
        ("varchar", 1043, [text("x"), binary(b"x")]),
        ("bpchar", 1042, [text("x    "), binary(b"x    ")]),
        ("name", 19, [text("n"), binary(b"n")]),
        ("json", 114, [text('{"a": 1}'), binary(b'{"a": 1}')]),
        ("jsonb", 3802, [text('{"a": 1}'), binary(b'\1{"a": 1}')]),
        ("bytea", 17, [text("\\x"), text("\\x00fF"), binary(b""), binary(b"\0\xff")]),
        (
            "char",
            18,
            [text("a"), text(""), text("\\377"), text(b"\xff"), binary(b"\0"), binary(b"\xff")],
        ),
        (
            "uuid",
            2950,
            [text("00000000-0000-0000-0000-0000000000ff"), binary(bytes(range(16)))],
        ),
        (
            "date",
            1082,
            [
                *map(
                    text, ("0001-01-01", "9999-12-31", "10000-01-01", "0044-03-15 BC", "infinity")
                ),
                *(
                    binary(struct.pack(">i", value))
                    for value in (0, -1, -730119, 2921939, -730120, 2921940, 2**31 - 1, -(2**31))
                ),
            ],
        ),
        (
            "time",
            1083,
            [
                *map(text, ("00:00:00", "23:59:59.999999", "12:34:56.5", "24:00:00")),
                *(
                    binary(struct.pack(">q", value))
                    for value in (0, 86_399_999_999, 86_400_000_000)
                ),
            ],
        ),
        (
            "timestamp",
            1114,
            [
                *map(
                    text,
                    ("0001-01-01 00:00:00", "9999-12-31 23:59:59.999999", "2000-01-01 00:00:00.1"),
                ),
                *map(text, ("infinity", "-infinity", "294276-12-31 23:59:59.999999")),
                *(
                    binary(struct.pack(">q", value))
                    for value in (0, -1, 252455615999999999, 252455616000000000)
                ),
                *(
                    binary(struct.pack(">q", value))
                    for value in (-63082281600000000, -63082281600000001, 2**63 - 1, -(2**63))
                ),
            ],
        ),
        (
            "timestamptz",
            1184,
            [
                *map(text, ("1999-12-31 23:59:59.99+00", "infinity", "4713-01-01 00:00:00+00 BC")),
                *(binary(struct.pack(">q", value)) for value in (0, 1, -1, 2**63 - 1)),
            ],
        ),
    ]
    bad_values: list[tuple[str, int, list[tuple[str, bytes]]]] = [
        ("bool", 16, [text("x"), text(""), binary(b""), binary(b"\0\0")]),
        ("int2", 21, [text(""), text("abc"), binary(b"\0"), binary(b"\0\0\0")]),
        ("int4", 23, [text("1.5"), text("0x1"), binary(b"\0\0\0"), binary(b"")]),
        ("int8", 20, [text("--1"), binary(b"\0" * 7), binary(b"\0" * 9)]),
        ("oid", 26, [text("x"), binary(b"\0" * 3)]),
        ("float4", 700, [text("one"), text(""), binary(b"\0" * 3)]),
        ("float8", 701, [text("1,5"), binary(b"\0" * 4)]),
        (
            "numeric",
            1700,
            [
                text("1e"),
                text(""),
                binary(b""),
                binary(b"\0" * 7),
                binary(struct.pack(">hhHh", 1, 0, 0, 0)),  # a digit group too few
                binary(struct.pack(">hhHhh", 0, 0, 0, 0, 1)),  # one too many
                binary(struct.pack(">hhHh", -1, 0, 0, 0)),
                binary(struct.pack(">hhHh", 0, 0, 0x1234, 0)),  # no such sign
                binary(struct.pack(">hhHhh", 1, 0, 0, 0, 10000)),  # no such digit group
            ],
        ),
        ("uuid", 2950, [text("no uuid"), binary(b"\0" * 15), binary(b"\0" * 17)]),
        ("jsonb", 3802, [binary(b""), binary(b"\2{}")]),
        ("bytea", 17, [text("\\x0"), text("\\xzz")]),
        ("date", 1082, [text(""), text("2024-13-01"), binary(b"\0" * 3)]),
        ("time", 1083, [text("noon"), binary(b"\0" * 4)]),
        ("timestamp", 1114, [text("2024-02-30 00:00:00"), binary(b"\0" * 4)]),
        ("timestamptz", 1184, [text("yesterday"), binary(b"\0" * 9)]),
    ]
    for name, type_id, columns in edges:
        for number, column in enumerate(columns):
            kind, data = column
            value = (
                text_value(type_id, data, "utf-8")
                if kind == "t"
                else binary_value(type_id, data, "utf-8")
            )
            yield _one_value(f"value/{name}/{number}", type_id, column, value)
    for name, type_id, columns in bad_values:
        for number, column in enumerate(columns):
            yield _one_value(f"bad-value/{name}/{number}", type_id, column, ["error", "bad_value"])
    for name, type_id in (("text", 25), ("varchar", 1043), ("json", 114), ("user", 16999)):
        for what, raw in (
            ("cut", b"ab\xc3"),
            ("latin-1", b"gr\xfc\xdfe"),
            ("surrogate", b"\xed\xa0\x80"),
        ):
            yield _one_value(
                f"bad-encoding/{name}/{what}", type_id, text(raw), ["error", "bad_encoding"]
            )
    yield _one_value("bad-encoding/text/binary", 25, binary(b"\xff"), ["error", "bad_encoding"])


def _one_value(name: str, type_id: int, column: Value, value: list[str] | None) -> Vector:
    vector = good(name, insert(column), relation=["public", "t"])
    vector["before"] = [relation([("v", type_id)]).hex()]
    if value is not None:
        vector["tuples"]["new"]["values"] = {"0": value}
    return vector


def _errors() -> Iterator[Vector]:
    yield bad("empty", b"", "empty_frame", 0)
    for tag in (b"X", b"\0", b"\xff", b"i", b"w", b"k", b" "):
        yield bad(f"tag/{tag.hex()}", tag + b"\0" * 30, "unknown_tag", 0)
        yield bad(f"tag/{tag.hex()}-alone", tag, "unknown_tag", 0)
    for name, (frame, in_stream) in WELL_FORMED.items():
        if name == "stream-abort":
            continue  # what follows would be the LSN
        for more in (b"\0", b"E", b"\0" * 16):
            yield bad(
                f"trailing/{name}-{len(more)}{more[:1].hex()}",
                frame + more,
                "trailing_bytes",
                len(frame),
                in_stream=in_stream,
            )
    abort = WELL_FORMED["stream-abort"][0]
    for more in range(1, 16):
        offset = 9 if more < 8 else 17
        yield bad(f"abort/{more}-more", abort + b"\0" * more, "truncated", offset)
    yield bad("abort/17-more", abort + b"\0" * 17, "trailing_bytes", 25)
    # markers
    one = tuple_data(text("1"), NULL)
    for marker in (b"K", b"O", b"n", b"\0", b"\xff"):
        yield bad(f"marker/insert-{marker.hex()}", row("I", marker + one), "bad_marker", 5)
        streamed = row("I", marker + one, xid=XID)
        yield bad(
            f"marker/insert-{marker.hex()}-streamed", streamed, "bad_marker", 9, in_stream=True
        )
    for marker in (b"N", b"k", b"\0"):
        yield bad(f"marker/delete-{marker.hex()}", row("D", marker + one), "bad_marker", 5)
    for marker in (b"X", b"k", b"\0"):
        yield bad(f"marker/update-{marker.hex()}", row("U", marker + one), "bad_marker", 5)
    for marker in (b"K", b"O", b"\0"):
        frame = row("U", b"K" + one + marker + one)
        yield bad(f"marker/update-new-{marker.hex()}", frame, "bad_marker", 6 + len(one))
    # kinds of columns
    for kind in (b"N", b"T", b"B", b"x", b"\0", b"\xff"):
        frame = patched(insert(NULL, binary(b"")), 9, kind)
        yield bad(f"kind/second-{kind.hex()}", frame, "bad_column_kind", 9)
        frame = patched(insert(NULL, NULL), 8, kind)
        yield bad(f"kind/first-{kind.hex()}", frame, "bad_column_kind", 8)
    # lengths of values
    for length in (-1, -(2**31), 2, 2**31 - 1):
        told = struct.pack(">i", length)
        for kind in ("t", "b"):
            name = f"length/{kind}{length}"
            frame = patched(insert(NULL, (kind, b"x")), 10, told)
            yield bad(f"{name}-last", frame, "bad_length", 10)
            if length != 2:
                frame = patched(insert((kind, b"x"), NULL), 9, told)
                yield bad(f"{name}-first", frame, "bad_length", 9)
    message = testing.message("p", b"x", 0)
    place = len(message) - 5
    for length in (-1, -(2**31), 2, 2**31 - 1):
        frame = patched(message, place, struct.pack(">i", length))
        yield bad(f"length/content{length}", frame, "bad_length", place)
    # counts
    for count in (-1, -(2**15), 3, 2**15 - 1):
        data = struct.pack(">h", count) + b"nn"
        yield bad(f"count/insert{count}", row("I", b"N" + data), "bad_count", 6)
        yield bad(f"count/delete{count}", row("D", b"K" + data), "bad_count", 6)
        yield bad(
            f"count/insert{count}-streamed",
            row("I", b"N" + data, xid=XID),
            "bad_count",
            10,
            in_stream=True,
        )
        frame = row("U", b"O" + one + b"N" + data)
        yield bad(f"count/update-new{count}", frame, "bad_count", 7 + len(one))
    place = len(relation([], 16390)) - 2
    for count in (-1, -(2**15), 2, 2**15 - 1):
        frame = patched(relation([("a", 25)], 16390, keys=1), place, struct.pack(">h", count))
        yield bad(f"count/relation{count}", frame, "bad_count", place)
    for count in (-1, -(2**31), 2, 2**31 - 1, 0x4000_0001):
        frame = patched(testing.truncate([16385]), 1, struct.pack(">i", count))
        yield bad(f"count/truncate{count}", frame, "bad_count", 1)
    yield bad("count/truncate-no-options", testing.truncate([5])[:5], "bad_count", 1)
    yield bad("count/truncate-options-missing", testing.truncate([])[:5], "truncated", 5)
    # strings
    for name, frame, offset in (
        ("origin", testing.origin("name")[:-1], 9),
        ("origin-nothing", testing.origin("")[:-1], 9),
        ("relation-namespace", relation([], 1)[:11], 5),
        ("relation-name", relation([], 1)[:13], 12),
        ("type-namespace", testing.type_(testing.UserType(1, "int4"))[:11], 5),
        ("type-name", testing.type_(testing.UserType(1, "int4", ""))[:-1], 6),
        ("message", testing.message("prefix", b"", 0)[:16], 10),
        ("gid-b", prepared("b", "gid")[:-1], 29),
        ("gid-P", prepared("P", "gid")[:-1], 30),
        ("gid-K", prepared("K", "gid")[:-1], 30),
        ("gid-r", prepared("r", "gid")[:-1], 38),
        ("gid-p", prepared("p", "")[:-1], 30),
    ):
        yield bad(f"string/{name}", frame, "unterminated_string", offset)
    column = relation([("name without end", 25)], 16390)[:-9]
    yield bad("string/relation-column", column, "unterminated_string", place + 3)


def _cuts() -> Iterator[Vector]:
    """Every well-formed frame, cut before each of its bytes, and read the wrong way round."""
    for name, (frame, in_stream) in WELL_FORMED.items():
        for length in range(1, len(frame)):
            vector = refused(f"cut/{name}-{length}", frame[:length], in_stream)
            if vector is not None:
                yield vector
        if chr(frame[0]) not in OUTSIDE_ONLY and frame != STOP:
            vector = refused(f"wrong-context/{name}", frame, not in_stream)
            if vector is not None:
                if chr(frame[0]) in "IUD":
                    # what is read as the relation's OID is none that a decoder knows
                    at = 1 if in_stream else 5
                    unknown = {"code": "unknown_relation", "offset": at, "tag": chr(frame[0])}
                    vector["decoder_error"] = unknown
                yield vector


def _context_errors() -> Iterator[Vector]:
    """What decode() takes, and a decoder refuses."""

    def refused_by_decoder(
        name: str,
        frame: bytes,
        before: list[bytes],
        code: str,
        offset: int,
        *facts: str,
        in_stream: bool = False,
    ) -> Vector:
        vector = good(name, frame, *facts, in_stream=in_stream)
        vector["before"] = [piece.hex() for piece in before]
        vector.pop("relation", None)
        vector["decoder_error"] = {"code": code, "offset": offset, "tag": chr(frame[0])}
        return vector

    rows = {
        "insert": insert(text("1"), NULL),
        "update": row("U", b"N" + tuple_data(text("1"), NULL)),
        "update-key": row("U", b"K" + tuple_data(NULL, NULL) + b"N" + tuple_data(NULL, NULL)),
        "delete": row("D", b"O" + tuple_data(text("1"), NULL)),
    }
    for name, frame in rows.items():
        other = relation(TWO, 16386)
        yield refused_by_decoder(f"unknown/{name}", frame, [], "unknown_relation", 1)
        yield refused_by_decoder(f"unknown/{name}-other", frame, [other], "unknown_relation", 1)
        streamed = testing.in_stream(frame, XID)
        yield refused_by_decoder(
            f"unknown/{name}-streamed",
            streamed,
            [start(XID)],
            "unknown_relation",
            5,
            in_stream=True,
        )
        for width in (1, 3):
            told = relation([(f"c{n}", 25) for n in range(width)])
            yield refused_by_decoder(
                f"width/{name}-{width}", frame, [told], "column_count", 6, "tuple of another width"
            )
    narrow = b"K" + tuple_data(text("1")) + b"N" + tuple_data(text("2"), NULL)
    yield refused_by_decoder(
        "width/update-old", row("U", narrow), [relation(TWO)], "column_count", 6
    )
    wide = b"O" + tuple_data(text("1"), NULL) + b"N" + tuple_data(text("2"), NULL, NULL)
    yield refused_by_decoder(
        "width/update-new", row("U", wide), [relation(TWO)], "column_count", 16
    )
    empty = insert()
    yield refused_by_decoder("width/no-columns", empty, [relation(TWO)], "column_count", 6)
    for name, (frame, in_stream) in WELL_FORMED.items():
        tag = chr(frame[0])
        if tag in OUTSIDE_ONLY:
            yield refused_by_decoder(f"order/{name}", frame, [start(7)], "stream_order", 0)
        elif tag == "E":
            yield refused_by_decoder(
                f"order/{name}", frame, [], "stream_order", 0, in_stream=in_stream
            )
