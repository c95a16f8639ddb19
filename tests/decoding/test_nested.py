"""Values made of values, from text and from binary: what a server writes, and what none does.

The forms are those of a server; `server/test_registry.py` asks one.
"""

from __future__ import annotations

import copy
import json
import operator
import pickle
import re
import struct
import time
import tracemalloc
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest
from support.expected_errors import expect_error
from support.frames.make_frames import OID, relation, type_frame

import pgoutput_fast as pf
from pgoutput_fast import testing
from pgoutput_fast.values import nested

if TYPE_CHECKING:
    from types import ModuleType

ADDR, MOOD, DNUM, ADDRS, TEXTRANGE, TEXTMULTI, DARR, DARRS, ODD, NONE, ONE, NEST = range(
    16400, 16412
)


def catalog_type(oid: int, name: str, kind: str, **fields: Any) -> dict[str, Any]:
    return {
        "oid": oid, "namespace": "public", "name": name, "kind": kind, "labels": [], "fields": [],
        **fields,
    }  # fmt: skip


TYPES = [
    catalog_type(ADDR, "addr", "c", fields=[["street", 25, -1], ["num", 23, -1],
                                            ["tags", 1009, -1]]),
    catalog_type(MOOD, "mood", "e", labels=["sad", "ok"]),
    catalog_type(DNUM, "dnum", "d", element=1700, modifier=655366),
    catalog_type(ADDRS, "_addr", "b", element=ADDR),
    catalog_type(TEXTRANGE, "textrange", "r", element=25),
    catalog_type(TEXTMULTI, "textmultirange", "m", element=TEXTRANGE),
    catalog_type(DARR, "darr", "d", element=1007),
    catalog_type(DARRS, "_darr", "b", element=DARR),
    catalog_type(ODD, "odd type", "c", fields=[["class", 23, -1], ["_x", 23, -1], ["a b", 23, -1],
                                               ["a-b", 23, -1], ["1st", 23, -1], ["ü", 23, -1]]),
    catalog_type(NONE, "none", "c"),
    catalog_type(ONE, "one", "c", fields=[["x", 23, -1]]),
    catalog_type(NEST, "nest", "c", fields=[["a", ADDR, -1], ["m", MOOD, -1], ["many", ADDRS, -1],
                                            ["n", DNUM, -1]]),
]  # fmt: skip
REGISTRY = pf.TypeRegistry.from_json(json.dumps({"format_version": 1, "types": TYPES}))


def row_of(
    impl: ModuleType,
    type_id: int,
    value: bytes,
    kind: bytes = b"t",
    policies: pf.Policies | None = None,
    encoding: str = "utf-8",
    registry: pf.TypeRegistry | None = REGISTRY,
) -> Any:
    decoder = impl.Decoder(policies, encoding, registry)
    decoder.decode(relation("c", type_id=type_id))
    return decoder.decode(testing.insert(OID, [(kind.decode(), value)])).new


def i32(*values: int) -> bytes:
    return struct.pack(f">{len(values)}i", *values)


def part(value: bytes | None) -> bytes:
    return i32(-1) if value is None else i32(len(value)) + value


def array(oid: int, bounds: list[tuple[int, int]], *values: bytes | None) -> bytes:
    """A binary array; `bounds` are length and lower bound of each dimension."""
    head = i32(len(bounds), int(None in values), oid)
    return head + b"".join(i32(*bound) for bound in bounds) + b"".join(map(part, values))


def record(*fields: tuple[int, bytes | None]) -> bytes:
    return i32(len(fields)) + b"".join(i32(oid) + part(value) for oid, value in fields)


def addr(*values: Any) -> Any:
    return nested.restore_composite("addr", ("street", "num", "tags"), values)


Array, Range = pf.Array, pf.Range
ONE_ADDR = record((25, b'a "b", \\c'), (23, i32(7)), (1009, array(25, [(2, 1)], b"x,y", None)))
ONE_ADDR_TEXT = b'("a ""b"", \\\\c",7,"{""x,y"",NULL}")'
ONE_ADDR_VALUE = addr('a "b", \\c', 7, ["x,y", None])

# type, the server's text, the binary form, the Python value
VALUES: list[tuple[int, bytes, bytes, Any]] = [
    (1007, b"{}", array(23, []), []),
    (1007, b"{1,2,3}", array(23, [(3, 1)], i32(1), i32(2), i32(3)), [1, 2, 3]),
    (1007, b"{1,NULL}", array(23, [(2, 1)], i32(1), None), [1, None]),
    (1007, b"{NULL}", array(23, [(1, 1)], None), [None]),
    (1007, b"{{1,2},{3,NULL}}", array(23, [(2, 1), (2, 1)], i32(1), i32(2), i32(3), None),
     [[1, 2], [3, None]]),
    (1007, b"[-2:0]={1,2,3}", array(23, [(3, -2)], i32(1), i32(2), i32(3)),
     Array([1, 2, 3], (-2,))),
    (1007, b"[0:0][5:6][-1:0]={{{1,2},{3,NULL}}}",
     array(23, [(1, 0), (2, 5), (2, -1)], i32(1), i32(2), i32(3), None),
     Array([[[1, 2], [3, None]]], (0, 5, -1))),
    (1007, b"[1:1][2:2]={{9}}", array(23, [(1, 1), (1, 2)], i32(9)), Array([[9]], (1, 2))),
    (1007, b"{{{{{{1}}}}}}", array(23, [(1, 1)] * 6, i32(1)), [[[[[[1]]]]]]),
    (1009, b"{a,b}", array(25, [(2, 1)], b"a", b"b"), ["a", "b"]),
    (1009, b'{"",NULL,"NULL","null","a b","a\\"b","a\\\\b","{","}",",",;,"\n","\x0b",nul}',
     array(25, [(14, 1)], b"", None, b"NULL", b"null", b"a b", b'a"b', b"a\\b", b"{", b"}", b",",
           b";", b"\n", b"\x0b", b"nul"),
     None),
    (1009, '{grüße,"\\\\\\\\\\""}'.encode(), array(25, [(2, 1)], "grüße".encode(), b'\\\\"'),
     ["grüße", '\\\\"']),
    (1000, b"{t,f,NULL}", array(16, [(3, 1)], b"\1", b"\0", None), [True, False, None]),
    (1020, b"{(1,1),(0,0);(3,3),(2,2)}",
     array(603, [(2, 1)], struct.pack(">4d", 1, 1, 0, 0), struct.pack(">4d", 3, 3, 2, 2)),
     ["(1,1),(0,0)", "(3,3),(2,2)"]),
    (1017, b'{"(1,2)"}', array(600, [(1, 1)], struct.pack(">2d", 1, 2)), ["(1,2)"]),
    (22, b"1 2 -3", array(21, [(3, 0)], b"\0\1", b"\0\2", b"\xff\xfd"), [1, 2, -3]),
    (22, b"", array(21, [(0, 0)]), []),
    (30, b"4294967295", array(26, [(1, 0)], b"\xff" * 4), [4294967295]),
    (1006, b'{"1 2","",NULL}',
     array(22, [(3, 1)], array(21, [(2, 0)], b"\0\1", b"\0\2"), array(21, [(0, 0)]), None),
     [[1, 2], [], None]),
    (DARR, b"[2:2]={5}", array(23, [(1, 2)], i32(5)), Array([5], (2,))),
    (DARRS, b'{"{1,2}",NULL,"{}"}',
     array(DARR, [(3, 1)], array(23, [(2, 1)], i32(1), i32(2)), None, array(23, [])),
     [[1, 2], None, []]),
    (3904, b"[1,5)", b"\x02" + part(i32(1)) + part(i32(5)), Range(1, 5)),
    (3904, b"empty", b"\x01", Range(empty=True)),
    (3904, b"(,5)", b"\x08" + part(i32(5)), Range(None, 5, "()")),
    (3904, b"[5,)", b"\x12" + part(i32(5)), Range(5, None)),
    (3904, b"(,)", b"\x18", Range(None, None, "()")),
    (3906, b"(1.50,2.5]", b"\x04" + part(struct.pack(">hhHH2h", 2, 0, 0, 2, 1, 5000))
     + part(struct.pack(">hhHH2h", 2, 0, 0, 1, 2, 5000)),
     Range(Decimal("1.50"), Decimal("2.5"), "(]")),
    (TEXTRANGE, b'["","a ""b\\\\,"]', b"\x06" + part(b"") + part(b'a "b\\,'),
     Range("", 'a "b\\,', "[]")),
    (TEXTRANGE, b'["(","]")', b"\x02" + part(b"(") + part(b"]"), Range("(", "]")),
    (4451, b"{}", i32(0), []),
    (4451, b"{(,0),[10,20)}",
     i32(2) + part(b"\x08" + part(i32(0))) + part(b"\x02" + part(i32(10)) + part(i32(20))),
     [Range(None, 0, "()"), Range(10, 20)]),
    (TEXTMULTI, b'{["},{",b)}', i32(1) + part(b"\x02" + part(b"},{") + part(b"b")),
     [Range("},{", "b")]),
    (6150, b'{"{[1,2)}","{}"}',
     array(4451, [(2, 1)], i32(1) + part(b"\x02" + part(i32(1)) + part(i32(2))), i32(0)),
     [[Range(1, 2)], []]),
    (ADDR, ONE_ADDR_TEXT, ONE_ADDR, ONE_ADDR_VALUE),
    (ADDR, b"(,,)", record((25, None), (23, None), (1009, None)), addr(None, None, None)),
    (ADDR, b'("",,{})', record((25, b""), (23, None), (1009, array(25, []))), addr("", None, [])),
    (NONE, b"()", i32(0), nested.restore_composite("none", (), ())),
    (ONE, b"()", record((23, None)), nested.restore_composite("one", ("x",), (None,))),
    (ONE, b"(4)", record((23, i32(4))), nested.restore_composite("one", ("x",), (4,))),
    (MOOD, b"sad", b"sad", "sad"),
    (MOOD, b"added later", b"added later", "added later"),
    (DNUM, b"1.50", struct.pack(">hhHH2h", 2, 0, 0, 2, 1, 5000), Decimal("1.50")),
    (ADDRS, b'{"(x,1,)",NULL}',
     array(ADDR, [(2, 1)], record((25, b"x"), (23, i32(1)), (1009, None)), None),
     [addr("x", 1, None), None]),
    (NEST, b'("(x,1,)",ok,"{""(y,,)""}",1.50)',
     record((ADDR, record((25, b"x"), (23, i32(1)), (1009, None))), (MOOD, b"ok"),
            (ADDRS, array(ADDR, [(1, 1)], record((25, b"y"), (23, None), (1009, None)))),
            (DNUM, struct.pack(">hhHH2h", 2, 0, 0, 2, 1, 5000))),
     nested.restore_composite(
         "nest", ("a", "m", "many", "n"),
         (addr("x", 1, None), "ok", [addr("y", None, None)], Decimal("1.50")))),
]  # fmt: skip


@pytest.mark.parametrize(("type_id", "text", "binary", "value"), VALUES, ids=str)
def test_nested_text_equals_binary(
    impl: ModuleType, type_id: int, text: bytes, binary: bytes, value: Any
) -> None:
    from_text = row_of(impl, type_id, text)
    from_binary = row_of(impl, type_id, binary, b"b")
    assert repr(from_text[0]) == repr(from_binary[0])
    assert type(from_text[0]) is type(from_binary[0])
    if value is not None:
        assert from_text[0] == value
        assert repr(from_text[0]) == repr(value)
        assert type(from_text[0]) is type(value)
    assert from_binary.text(0) == text.decode()
    assert from_binary.values() == (from_binary["c"],)
    assert pickle.loads(pickle.dumps(from_text))[0] == from_text[0]


def test_quoted_elements(impl: ModuleType) -> None:
    text, binary = next((row[1], row[2]) for row in VALUES if row[1].startswith(b'{"",NULL'))
    expected = [
        "",
        None,
        "NULL",
        "null",
        "a b",
        'a"b',
        "a\\b",
        "{",
        "}",
        ",",
        ";",
        "\n",
        "\v",
        "nul",
    ]
    assert row_of(impl, 1009, text)[0] == expected
    assert row_of(impl, 1009, binary, b"b")[0] == expected


def test_values_of_composites(impl: ModuleType) -> None:
    value = row_of(impl, ADDR, ONE_ADDR_TEXT)[0]
    assert (value.street, value.num, value.tags) == ('a "b", \\c', 7, ["x,y", None])
    assert value == ('a "b", \\c', 7, ["x,y", None])
    assert repr(value).startswith("addr(street=")
    again = row_of(impl, ADDR, b"(,1,)")[0]
    assert type(again) is type(value)
    for same in (pickle.loads(pickle.dumps(value)), copy.deepcopy(value), value._replace()):
        assert same == value
        assert type(same) is type(value)


def test_names_of_fields_become_identifiers(impl: ModuleType) -> None:
    value = row_of(impl, ODD, b"(1,2,3,4,5,6)")[0]
    # a keyword and a name that came before are named by their positions
    assert value._fields == ("_0", "f_x", "a_b", "_3", "f1st", "ü")
    assert type(value).__name__ == "odd_type"
    assert pickle.loads(pickle.dumps(value)) == (1, 2, 3, 4, 5, 6)
    made = nested.composite_class("", ("ﬁ", "fi", "", "١", "__reduce__"))
    assert made._fields == ("fi", "_1", "f_", "f١", "f__reduce__")
    assert made(*range(5)) == (0, 1, 2, 3, 4)


# type, text that no server writes
BAD_TEXT: list[tuple[int, bytes]] = [
    *[(1007, text) for text in (
        b"", b"{", b"}", b"1", b"{1", b"1}", b"{1}}", b"{{1}", b"{1,}", b"{,1}", b"{1,,2}", b"{,}",
        b"{{}}", b"{{1},2}", b"{1,{2}}", b"{{1},{2,3}}", b"{{{1}},{2}}", b"{1}{2}", b"{1} ",
        b" {1}", b"{1 }", b"{ 1}", b'{"1}', b'{"1"2}', b'{1"2"}', b'{"1" }', b"{null}", b"{Null,1}",
        b"{a}", b"{99999999999}", b"{{{{{{{1}}}}}}}", b"[1:2]={1}", b"[1:1]=1", b"[1:1]=", b"[1:1]",
        b"[1:1]{1}", b"[1:1][1:1]={1}", b"[2:1]={}", b"[a:1]={1}", b"[1]={1}", b"[0:0]={}",
        b"[1:1]=,", b"{1};", b"{1;2}", b"{\\1}", b"[1:99999999999]={1}",
    )],
    (1009, b"{null}"),
    (1009, b'{"a\\n"}'), (1009, b"{a\\b}"), (1009, b"{a b}"), (1009, b'{a,"b'), (1009, b'{"'),
    (1020, b"{(1,1),(0,0),(1,1),(0,0)}"),
    (22, b"1  2"), (22, b" 1"), (22, b"{1}"),
    *[(3904, text) for text in (
        b"", b"[1,2", b"1,2)", b"[1;2)", b"[1,2,3)", b"[,1)", b"(1,]", b"(,]", b"[,)", b"Empty",
        b"[ 1,2)", b"[1,2) ", b'["1,2)', b"[a,2)", b"(1)", b"()",
    )],
    (TEXTRANGE, b'["a"b,c)'), (TEXTRANGE, b'["a\\n",c)'), (TEXTRANGE, b"[(,c)"),
    *[(4451, text) for text in (
        b"", b"{", b"{[1,2)", b"{[1,2),}", b"{,}", b"[1,2)", b"{[1,2)}}", b"{[1,2)}x", b"{empty}",
        b"{[1,2) ,[3,4)}", b"{[1,2)[3,4)}", b"}", b"{[1,2),",
    )],
    *[(ADDR, text) for text in (
        b"", b"(", b")", b"()", b"(a,1)", b"(a,1,,)", b"(a,1,{}", b"a,1,{})", b"(a,1,{})x",
        b"(a,x,{})", b'("a,1,{})', b'("a"b,1,{})', b"(a b,1,)", b'("a\\n",1,)', b"(a,1,{)",
        b'(a,1,")', b"((a),1,)",
    )],
    (NONE, b"(1)"), (NONE, b"(,)"), (ONE, b"(,)"), (ONE, b""),
]  # fmt: skip


@pytest.mark.parametrize(("type_id", "text"), BAD_TEXT, ids=str)
def test_text_that_no_server_writes(impl: ModuleType, type_id: int, text: bytes) -> None:
    row = row_of(impl, type_id, text)
    with expect_error(pf.DecodeError, code="bad_value", offset=13, column="c"):
        row.values()
    assert row.raw(0) == text


SOUND = [row for row in VALUES if row[0] not in (MOOD, DNUM)]


@pytest.mark.parametrize(("type_id", "binary"), [(r[0], r[2]) for r in SOUND], ids=str)
def test_cut_binary_values(impl: ModuleType, type_id: int, binary: bytes) -> None:
    for end in range(len(binary)):
        row = row_of(impl, type_id, binary[:end], b"b")
        for read in (row.values, row.texts):
            with pytest.raises(pf.DecodeError) as caught:
                read()
            assert caught.value.code == "bad_value", end
    row = row_of(impl, type_id, binary + b"\0", b"b")
    with pytest.raises(pf.DecodeError):
        row.values()


# type, binary value, what the error says
BAD_BINARY: list[tuple[int, bytes, str]] = [
    (1007, i32(7, 0, 23) + i32(1, 1) * 7 + part(i32(1)), "7 dimensions"),
    (1007, i32(-1, 0, 23), "-1 dimensions"),
    (1007, i32(1, 2, 23, 1, 1) + part(i32(1)), "flags 2"),
    (1007, i32(1, 0, 25, 1, 1) + part(b"a"), "OID 25, expected 23"),
    (1007, i32(1, 0, 23, 0x7FFFFFFF, 1), "2147483647 elements"),
    (1007, i32(1, 0, 23, -1, 1), "-1 elements"),
    (1007, i32(2, 0, 23, -1, 1, -1, 1) + part(None), "-1 elements"),
    (1007, i32(6, 0, 23) + i32(0x7FFFFFFF, 1) * 6, "2147483647 elements"),
    (1007, array(23, [(1, 1)], b"\0\0\0"), "int4"),
    (1007, i32(1, 0, 23, 1, 1, -2), "length -2"),
    (1007, i32(1, 0, 23, 1, 1, 0x7FFFFFFF), "length 2147483647"),
    (22, array(21, [(1, 1)], b"\0\1"), "begins at 0"),
    (22, array(21, [(1, 0), (1, 0)], b"\0\1"), "begins at 0"),
    (3904, b"\x20", "flags 0x20"),
    (3904, b"\x03" + part(i32(1)) + part(i32(2)), "flags 0x03"),
    (3904, b"\x0a" + part(i32(2)), "flags 0x0A"),
    (3904, b"\x14" + part(i32(2)), "flags 0x14"),
    (3904, b"\x02" + part(None) + part(i32(2)), "NULL"),
    (4451, i32(-1), "4294967295 ranges"),
    (4451, i32(1) + part(b"\x01"), "empty"),
    (4451, i32(1) + part(None) + b"\0", "NULL"),
    (ADDR, record((25, b"x"), (23, i32(1))), "has 2 fields, public.addr had 3"),
    (ADDR, record((25, b"x"), (23, i32(1)), (1009, None), (25, None)), "the value is older"),
    (ADDR, record((25, b"x"), (25, b"1"), (1009, None)),
     "field 'num' of public.addr is of the type"),
    (ADDR, i32(0x7FFFFFFF), "has 2147483647 fields"),
    (ADDR, i32(-1), "has -1 fields"),
]  # fmt: skip


@pytest.mark.parametrize(("type_id", "binary", "words"), BAD_BINARY, ids=str)
def test_binary_values_that_no_server_sends(
    impl: ModuleType, type_id: int, binary: bytes, words: str
) -> None:
    row = row_of(impl, type_id, binary, b"b")
    for read in (row.values, row.texts):
        with pytest.raises(pf.DecodeError) as caught:
            read()
        assert (caught.value.code, caught.value.offset) == ("bad_value", 13)
        assert words in str(caught.value)


def test_small_values_take_little_memory(impl: ModuleType) -> None:
    tracemalloc.start()
    try:
        for _, binary, _ in BAD_BINARY:
            for type_id in (1007, 22, 3904, 4451, ADDR):
                with pytest.raises(pf.DecodeError):
                    row_of(impl, type_id, binary[:24], b"b").values()
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("text", [b"{" * 100_000, b'{"' + b"\\" * 99_999, b"{" + b"a," * 50_000,
                                  b'("' + b'""' * 50_000, b"(" + b"," * 99_999,
                                  b"{" + b"[1,2)," * 16_000, b'{"' + b'\\"' * 50_000])  # fmt: skip
def test_long_nonsense_is_refused_soon(impl: ModuleType, text: bytes) -> None:
    for type_id in (1009, ADDR, TEXTRANGE, TEXTMULTI, NEST):
        begun = time.perf_counter()
        with pytest.raises(pf.DecodeError):
            row_of(impl, type_id, text).values()
        assert time.perf_counter() - begun < 20  # quadratic time would be minutes


def test_domains_ranges_and_arrays_need_no_catalogue(impl: ModuleType) -> None:
    decoder = impl.Decoder()
    for frame in (type_frame(16500, "", "_int4"), relation("c", type_id=16500)):
        decoder.decode(frame)
    assert decoder.decode(testing.insert(OID, ["{1,NULL}"])).new[0] == [1, None]
    assert row_of(impl, 3904, b"[1,2)", registry=None)[0] == Range(1, 2)
    assert row_of(impl, ADDR, b"(a,1,)", registry=None)[0] == "(a,1,)"
    assert row_of(impl, ADDR, ONE_ADDR, b"b", registry=None)[0] == ONE_ADDR


def test_policies_reach_the_parts(impl: ModuleType) -> None:
    text = b"{infinity,2024-01-01}"
    with expect_error(pf.DecodeError, code="out_of_range", column="c"):
        row_of(impl, 1182, text).values()
    value = row_of(impl, 1182, text, policies=pf.Policies(infinity="null"))[0]
    assert value[0] is None
    assert str(value[1]) == "2024-01-01"
    # None for an end would mean that there is no end.
    null = pf.Policies(infinity="null")
    assert row_of(impl, 3912, b"[2024-01-01,infinity)", policies=null)[0] is None
    two = b"{[2024-01-01,2024-01-02),[2025-01-01,infinity)}"
    assert row_of(impl, 4535, two, policies=null)[0][1] is None
    kept = row_of(impl, 3912, b"[2024-01-01,)", policies=null)[0]
    assert kept.upper is None
    assert row_of(impl, 3807, b'{"{\\"a\\": 1}"}', policies=pf.Policies(json="parse"))[0] == [
        {"a": 1}
    ]


def test_other_encodings(impl: ModuleType) -> None:
    assert row_of(impl, 1009, "{ä,ß}".encode("latin-1"), encoding="LATIN1")[0] == ["ä", "ß"]
    # The second byte of each of these is a backslash, a brace or a bar.
    for word in ("表", "ポ", "弌", "能"):
        encoded = f'{{"{word}, {word}",{word}}}'.encode("cp932")
        assert row_of(impl, 1009, encoded, encoding="cp932")[0] == [f"{word}, {word}", word]
        value = row_of(impl, ADDR, f'("{word} x",1,)'.encode("cp932"), encoding="cp932")[0]
        assert value.street == f"{word} x"
        binary = array(25, [(1, 1)], word.encode("cp932"))
        row = row_of(impl, 1009, binary, b"b", encoding="cp932")
        assert (row[0], row.text(0)) == ([word], f"{{{word}}}")
    for encoding, value in (("utf-8", b"{\xff}"), ("cp932", b"{\x81\xff}")):
        row = row_of(impl, 1009, value, encoding=encoding)
        with pytest.raises(pf.DecodeError) as caught:
            row.values()
        assert caught.value.code == "bad_encoding"
        assert row.raw(0) == value


def test_registered_parts(impl: ModuleType) -> None:
    registry = pf.TypeRegistry().merge(REGISTRY)
    registry.register("public.mood", text=bytes.upper, binary=bytes.title)
    registry.register("pg_catalog.int4", text=lambda raw: -int(raw))
    registry.register(ADDR, text=lambda raw: ("addr", raw))
    value = row_of(impl, NEST, b'("(x,1,)",ok,"{""(y,,)""}",1)', registry=registry)[0]
    assert value == (("addr", b"(x,1,)"), b"OK", [("addr", b"(y,,)")], Decimal(1))
    assert row_of(impl, MOOD, b"ok", b"b", registry=registry)[0] == b"Ok"
    assert row_of(impl, 1007, b"{1,2}", registry=registry)[0] == [-1, -2]
    assert row_of(impl, 3904, b"[1,2)", registry=registry)[0] == Range(-1, -2)
    assert row_of(impl, 1007, array(23, [(1, 1)], i32(5)), b"b", registry=registry)[0] == [5]


RANGES = [
    {"empty": True}, {"lower": 1, "upper": 3}, {"lower": 1, "upper": 3, "bounds": "[]"},
    {"lower": 1, "upper": 3, "bounds": "(]"}, {"upper": 3}, {"lower": 1}, {},
    {"upper": 3, "bounds": "[]"}, {"lower": 1, "bounds": "(]"}, {"lower": 2, "upper": 5},
    {"lower": 5, "upper": 2}, {"lower": 2, "upper": 2, "bounds": "()"},
]  # fmt: skip


def test_ranges_are_as_psycopgs() -> None:
    theirs = pytest.importorskip("psycopg.types.range").Range
    operators = (operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne)
    for one in RANGES:
        mine, other = Range(**one), theirs(**one)
        for part_name in (
            "lower", "upper", "bounds", "isempty", "lower_inc", "upper_inc", "lower_inf",
            "upper_inf", "__str__", "__bool__", "__repr__",
        ):  # fmt: skip
            found, expected = getattr(mine, part_name), getattr(other, part_name)
            assert (found() if callable(found) else found) == (
                expected() if callable(expected) else expected
            ), (one, part_name)
        assert [n in mine for n in range(7)] == [n in other for n in range(7)], one
        assert pickle.loads(pickle.dumps(mine)) == copy.deepcopy(mine) == mine
        assert hash(pickle.loads(pickle.dumps(mine))) == hash(mine)
        for two in RANGES:
            for compare in operators:
                assert compare(mine, Range(**two)) == compare(other, theirs(**two)), (one, two)
    for compare in operators[:4]:
        with pytest.raises(TypeError):
            compare(Range(1, 2), 3)
    assert sorted([Range(2, 3), Range(empty=True), Range(1, None)]) == [
        Range(empty=True), Range(1, None), Range(2, 3),
    ]  # fmt: skip
    assert Range(empty=True) != Range()


def test_an_error_within_a_composite_names_the_field(impl: ModuleType) -> None:
    deep = record((ADDR, record((25, b"a"), (23, i32(1, 2)), (1009, None))), (MOOD, None),
                  (ADDRS, None), (DNUM, None))  # fmt: skip
    for type_id, kind, value, code, path in (
        (ADDR, b"t", b"(a,x,)", "bad_value", ["addr", "num"]),
        (ADDR, b"t", b"(\xff,1,)", "bad_encoding", ["addr", "street"]),
        (NEST, b"t", b'("(a,x,)",,,)', "bad_value", ["nest", "a", "num"]),
        (NEST, b"t", b'(,,"{""(a,x,)""}",)', "bad_value", ["nest", "many", "num"]),
        (ADDR, b"b", record((25, b"a"), (23, b"\1"), (1009, None)), "bad_value", ["addr", "num"]),
        (NEST, b"b", deep, "bad_value", ["nest", "a", "num"]),
    ):
        row = row_of(impl, type_id, value, kind)
        for attempt in (lambda row=row: row[0], row.values):
            with pytest.raises(pf.DecodeError) as caught:
                attempt()
            assert caught.value.code == code
            named = str(caught.value).partition("public.t")[2].partition(":")[0]
            assert [word for word in re.findall(r"\w+", named) if word != "field"] == path
