"""Frames that no capture has, built byte by byte, with what is expected of them.

Fields are read by reference_parser.py; errors are written here by hand where a test means one
error, and by the reference parser where a frame is cut at each of its bytes. extract_vectors.py
writes them to made.json and sequences.json; its docstring names the keys. Beside those:

    made           true
    error          the DecodeError of the frame, from decode() and from a decoder: code, offset, tag
    decoder_error  what a decoder raises where decode() raises something else, or nothing and gives
                   `class` and `fields`

A sequence is a list of `steps` for one decoder: `frame` with `class` and `fields` or `error`, or
`reset`; and after each, where given, `relations`: what `decoder.relations` holds.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

from reference_parser import (
    OUTSIDE_ONLY,
    ReferenceStream,
    WireError,
    binary_value,
    parse,
    text_value,
)

Vector = dict[str, Any]

XID = 4294967295  # the greatest; xids wrap to 3
OID = 4294967295
LSN = 0xFFFFFFF0_F0000000
TIME = 848_546_465_533_693

# --- building blocks ----------------------------------------------------------------------------


def string(text: str | bytes) -> bytes:
    return (text.encode() if isinstance(text, str) else text) + b"\0"


def tuple_data(*columns: bytes) -> bytes:
    return struct.pack(">h", len(columns)) + b"".join(columns)


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return b"t" + struct.pack(">i", len(data)) + data


def binary(data: bytes) -> bytes:
    return b"b" + struct.pack(">i", len(data)) + data


NULL = b"n"
SAME = b"u"


def relation(
    columns: list[tuple[str, int]],
    relation_id: int = 16385,
    name: str = "t",
    identity: str = "d",
    xid: int | None = None,
    namespace: str = "public",
    keys: int = 1,
) -> bytes:
    head = b"R" if xid is None else b"R" + struct.pack(">I", xid)
    packed = [
        bytes([number < keys]) + string(column) + struct.pack(">Ii", type_id, -1)
        for number, (column, type_id) in enumerate(columns)
    ]
    return (
        head
        + struct.pack(">I", relation_id)
        + string(namespace)
        + string(name)
        + identity.encode()
        + struct.pack(">h", len(columns))
        + b"".join(packed)
    )


def row(tag: str, rest: bytes, relation_id: int = 16385, xid: int | None = None) -> bytes:
    head = b"" if xid is None else struct.pack(">I", xid)
    return tag.encode() + head + struct.pack(">I", relation_id) + rest


def insert(*columns: bytes, relation_id: int = 16385, xid: int | None = None) -> bytes:
    return row("I", b"N" + tuple_data(*columns), relation_id, xid)


def start(xid: int, first: int = 1) -> bytes:
    return b"S" + struct.pack(">IB", xid, first)


STOP = b"E"
TWO = [("id", 23), ("name", 25)]


def prepared(tag: str, gid: str) -> bytes:
    if tag == "b":
        return b"b" + struct.pack(">QQqI", LSN, LSN + 8, TIME, XID) + string(gid)
    if tag == "r":
        return b"r" + struct.pack(">BQQqqI", 0, LSN, LSN + 8, TIME, TIME + 1, XID) + string(gid)
    return tag.encode() + struct.pack(">BQQqI", 0, LSN, LSN + 8, TIME, XID) + string(gid)


# One well-formed frame of every kind, and whether it comes from inside a stream chunk.
WELL_FORMED: dict[str, tuple[bytes, bool]] = {
    "begin": (b"B" + struct.pack(">QqI", LSN, TIME, XID), False),
    "commit": (b"C" + struct.pack(">BQQq", 0, LSN, LSN + 8, TIME), False),
    "origin": (b"O" + struct.pack(">Q", LSN) + string("origin"), False),
    "origin-streamed": (b"O" + struct.pack(">Q", 0) + string("origin"), True),
    "relation": (relation(TWO), False),
    "relation-streamed": (relation(TWO, xid=XID), True),
    "type": (b"Y" + struct.pack(">I", 16400) + string("public") + string("mood"), False),
    "type-streamed": (
        b"Y" + struct.pack(">II", XID, 16400) + string("public") + string("mood"),
        True,
    ),
    "insert": (insert(text("1"), NULL), False),
    "insert-streamed": (insert(binary(b"\0\0\0\1"), text("é"), xid=XID), True),
    "update": (row("U", b"N" + tuple_data(text("1"), SAME)), False),
    "update-key": (
        row("U", b"K" + tuple_data(text("1"), NULL) + b"N" + tuple_data(text("2"), SAME)),
        False,
    ),
    "update-old-streamed": (
        row(
            "U",
            b"O" + tuple_data(text("1"), text("x")) + b"N" + tuple_data(text("1"), NULL),
            xid=XID,
        ),
        True,
    ),
    "delete-key": (row("D", b"K" + tuple_data(text("1"), NULL)), False),
    "delete-old-streamed": (row("D", b"O" + tuple_data(text("1"), text("")), xid=XID), True),
    "truncate": (b"T" + struct.pack(">iBII", 2, 3, 16385, OID), False),
    "truncate-streamed": (b"T" + struct.pack(">IiBI", XID, 1, 0, 16385), True),
    "message": (
        b"M" + struct.pack(">BQ", 1, LSN) + string("prefix") + struct.pack(">i", 3) + b"\0a\xff",
        False,
    ),
    "message-streamed": (
        b"M" + struct.pack(">IBQ", XID, 1, LSN) + string("") + struct.pack(">i", 0),
        True,
    ),
    "stream-start": (start(XID), False),
    "stream-stop": (STOP, True),
    "stream-commit": (b"c" + struct.pack(">IBQQq", XID, 0, LSN, LSN + 8, TIME), False),
    "stream-abort": (b"A" + struct.pack(">II", XID, XID - 1), False),
    "stream-abort-parallel": (b"A" + struct.pack(">IIQq", XID, XID, LSN, TIME), False),
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
    stray = b"A" + struct.pack(">II", 4711, 4711)
    options = {"proto_version": "1", "publication_names": '"pub"'}
    yield good("stray-abort", stray, "abort without a stream", server="18.4", options=options)
    lowest = struct.pack(">QqI", 0, -(2**63), 3)
    yield good("begin/lowest", b"B" + lowest, "time before 2000")
    highest = struct.pack(">QqI", 2**64 - 1, 2**63 - 1, XID)
    yield good("begin/highest", b"B" + highest, "LSN past 2**63")
    yield good("commit/flags", b"C" + struct.pack(">BQQq", 0xFF, 1, 2, -1), "unknown flags")
    yield good(
        "stream-commit/flags", b"c" + struct.pack(">IBQQq", 3, 0x80, 1, 2, -1), "unknown flags"
    )
    yield good("truncate/flags", b"T" + struct.pack(">iBI", 1, 0xFC, 16385), "unknown flags")
    yield good("truncate/none", b"T" + struct.pack(">iB", 0, 0))
    many = b"T" + struct.pack(">iB200I", 200, 1, *range(16384, 16584))
    yield good("truncate/many", many, "truncate of several relations")
    message = b"M" + struct.pack(">BQ", 0xFE, 0) + string("p") + struct.pack(">i", 0)
    yield good("message/flags", message, "unknown flags")
    no_text = (
        b"M" + struct.pack(">BQ", 0, 0) + string(b"pr\xe9fix") + struct.pack(">i", 1) + b"\xff"
    )
    yield good("message/prefix-no-text", no_text, "names that are no text")
    yield good("origin/no-name", b"O" + struct.pack(">Q", 0) + b"\0")
    yield good(
        "origin/no-text", b"O" + struct.pack(">Q", 0) + b"\xff\xfe\0", "names that are no text"
    )
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
    modifier = relation([("n", 1700)])[:-4] + struct.pack(">i", (10 << 16 | 2) + 4)
    yield good("relation/modifier", modifier)
    domain = b"Y" + struct.pack(">I", OID) + string("") + string("int4")
    yield good("type/domain", domain, "domain looks like its base type", "unsigned OIDs")
    for tag in "bPKrp":
        yield good(f"gid/empty-{tag}", prepared(tag, ""), "empty GID")
        yield good(f"gid/longest-{tag}", prepared(tag, "é'\"" * 49 + "abc"), "GID of 199 bytes")
    for tag in "PKr":
        yield good(
            f"unknown-prepared/{tag}", prepared(tag, "never seen"), "unknown prepared transaction"
        )
    for last in (b"\0", b"\1"):
        yield good(f"stream-start/{last[0]}", b"S" + struct.pack(">I", 3) + last)
    yield good(
        "stream-abort/subtransaction",
        b"A" + struct.pack(">II", 3, XID),
        "abort of a subtransaction",
    )
    lsn = b"A" + struct.pack(">IIQq", 3, 3, 2**64 - 1, -(2**63))
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
    edges: list[tuple[str, int, list[bytes]]] = [
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
    bad_values: list[tuple[str, int, list[bytes]]] = [
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
            data, kind = column[5:], chr(column[0])
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


def _one_value(name: str, type_id: int, column: bytes, value: list[str] | None) -> Vector:
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
        frame = insert(NULL, kind + b"\0\0\0\0")
        yield bad(f"kind/second-{kind.hex()}", frame, "bad_column_kind", 9)
        yield bad(f"kind/first-{kind.hex()}", insert(kind, NULL), "bad_column_kind", 8)
    # lengths of values
    for length in (-1, -(2**31), 2, 2**31 - 1):
        for kind in (b"t", b"b"):
            value = kind + struct.pack(">i", length) + b"x"
            name = f"length/{kind.decode()}{length}"
            yield bad(f"{name}-last", insert(NULL, value), "bad_length", 10)
            name = f"length/{kind.decode()}{length}-first"
            found = "bad_length" if length != 2 else "truncated"
            if found == "bad_length":
                yield bad(name, insert(value, NULL), found, 9)
    content = b"M" + struct.pack(">BQ", 0, 0) + string("p")
    for length in (-1, -(2**31), 2, 2**31 - 1):
        frame = content + struct.pack(">i", length) + b"x"
        yield bad(f"length/content{length}", frame, "bad_length", len(content))
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
    head = b"R" + struct.pack(">I", 16390) + string("public") + string("t") + b"d"
    for count in (-1, -(2**15), 2, 2**15 - 1):
        frame = head + struct.pack(">h", count) + b"\1a\0" + struct.pack(">Ii", 25, -1)
        yield bad(f"count/relation{count}", frame, "bad_count", len(head))
    for count in (-1, -(2**31), 2, 2**31 - 1, 0x4000_0001):
        frame = b"T" + struct.pack(">iBI", count, 0, 16385)
        yield bad(f"count/truncate{count}", frame, "bad_count", 1)
    yield bad("count/truncate-no-options", b"T" + struct.pack(">i", 1), "bad_count", 1)
    yield bad("count/truncate-options-missing", b"T" + struct.pack(">i", 0), "truncated", 5)
    # strings
    for name, frame, offset in (
        ("origin", b"O" + struct.pack(">Q", 0) + b"name", 9),
        ("origin-nothing", b"O" + struct.pack(">Q", 0), 9),
        ("relation-namespace", b"R" + struct.pack(">I", 1) + b"public", 5),
        ("relation-name", b"R" + struct.pack(">I", 1) + b"public\0t", 12),
        ("type-namespace", b"Y" + struct.pack(">I", 1) + b"public", 5),
        ("type-name", b"Y" + struct.pack(">I", 1) + b"\0int4", 6),
        ("message", b"M" + struct.pack(">BQ", 0, 0) + b"prefix", 10),
        ("gid-b", prepared("b", "gid")[:-1], 29),
        ("gid-P", prepared("P", "gid")[:-1], 30),
        ("gid-K", prepared("K", "gid")[:-1], 30),
        ("gid-r", prepared("r", "gid")[:-1], 38),
        ("gid-p", prepared("p", "")[:-1], 30),
    ):
        yield bad(f"string/{name}", frame, "unterminated_string", offset)
    column = head + struct.pack(">h", 1) + b"\1" + b"name without end"
    yield bad("string/relation-column", column, "unterminated_string", len(head) + 3)


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
        streamed = frame[:1] + struct.pack(">I", XID) + frame[1:]
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


# --- sequences ----------------------------------------------------------------------------------


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
    return b"c" + struct.pack(">IBQQq", xid, 0, 1, 2, 3)


def _abort(xid: int, subxid: int | None = None) -> bytes:
    return b"A" + struct.pack(">II", xid, xid if subxid is None else subxid)


_BEGIN = WELL_FORMED["begin"][0]
_COMMIT = WELL_FORMED["commit"][0]
_ROW = insert(text("1"), NULL)
_THREE = [*TWO, ("more", 20)]


def _of(xid: int) -> bytes:
    return insert(text("1"), NULL, xid=xid)


def _prepare(tag: str, xid: int) -> bytes:
    return tag.encode() + struct.pack(">BQQqI", 0, 1, 2, 3, xid) + string("gid")


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
            b"Y" + struct.pack(">II", 10, 16400) + string("") + string("int4"),
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
