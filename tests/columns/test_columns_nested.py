"""Columns of nested types, of frames made by hand: what each holds, and what is refused."""

from __future__ import annotations

import datetime
import random
import struct
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import pytest
from support.expected_errors import expect_error
from support.nightly import nightly

pytest.importorskip("pyarrow", reason="reads the batches, and the twin makes them with it")

import pyarrow as pa
from support.columns.columnar import IMPLEMENTATIONS, chosen, differences
from support.columns.values import has_other_shape, same_value
from support.frames.made_vectors import NULL, SAME, binary, insert, relation, row, text, tuple_data

import pgoutput_fast as pf
from pgoutput_fast.columnar.schema import Layout, layout_of
from pgoutput_fast.columnar.selection import Selection
from pgoutput_fast.decoding.plan import RelationPlan
from pgoutput_fast.settings import make_settings
from pgoutput_fast.types import CatalogType, column_type

MOOD, MOODS, PAIR, PAIRS, HSTORE, VECTOR, HALFVEC, SPARSEVEC, ODD, BARE = range(20000, 20010)
UTC = datetime.timezone.utc


def registry(*more: CatalogType) -> pf.TypeRegistry:
    public = "public"
    return pf.TypeRegistry._of(
        [
            CatalogType(MOOD, public, "mood", "e", labels=("sad", "ok", "happy")),
            CatalogType(MOODS, public, "_mood", "b", MOOD),
            CatalogType(
                PAIR, public, "pair", "c", fields=(("n", 23, -1), ("t", 25, -1), ("m", MOOD, -1))
            ),
            CatalogType(PAIRS, public, "_pair", "b", PAIR),
            CatalogType(HSTORE, public, "hstore", "b", extension="hstore"),
            CatalogType(VECTOR, public, "vector", "b", extension="vector"),
            CatalogType(HALFVEC, public, "halfvec", "b", extension="vector"),
            CatalogType(SPARSEVEC, public, "sparsevec", "b", extension="vector"),
            CatalogType(ODD, public, "odd", "c", fields=(("i", 23, -1), ("x", 99_999, -1))),
            CatalogType(BARE, public, "bare", "c"),
            *more,
        ]
    )


@pytest.fixture(autouse=True, params=IMPLEMENTATIONS)
def implementation(request: pytest.FixtureRequest) -> Iterator[str]:
    with chosen(request.param):
        yield request.param


def announced(*type_ids: int, modifier: int = -1) -> bytes:
    made = relation([(f"c{i}", type_id) for i, type_id in enumerate(type_ids)])
    return made[:-4] + struct.pack(">i", modifier)


def batches_of(frames: list[bytes], **options: Any) -> list[pa.RecordBatch]:
    decoder = pf.ColumnarDecoder(registry=options.pop("types", None) or registry(), **options)
    found = []
    for batch in decoder.decode(frames):
        read = pa.record_batch(batch)
        read.validate(full=True)
        found.append(read)
    return found


def column(type_id: int, *values: bytes, modifier: int = -1, **options: Any) -> pa.Array:
    """The column of one type, of rows with these values."""
    frames = [announced(type_id, modifier=modifier), *map(insert, values)]
    (batch,) = batches_of(frames, **options)
    return batch.column("after").field(0)


def parts(*values: bytes | None) -> bytes:
    return b"".join(
        b"\xff\xff\xff\xff" if value is None else struct.pack(">i", len(value)) + value
        for value in values
    )


def array(oid: int, *values: bytes | None, lengths: Any = None, lowers: Any = None) -> bytes:
    lengths = ([len(values)] if values else []) if lengths is None else lengths
    lowers = [1] * len(lengths) if lowers is None else lowers
    head = struct.pack(">iiI", len(lengths), None in values, oid)
    bounds = zip(lengths, lowers, strict=True)
    return head + b"".join(struct.pack(">ii", *bound) for bound in bounds) + parts(*values)


def int4(number: int) -> bytes:
    return struct.pack(">i", number)


def composite(*fields: tuple[int, bytes | None]) -> bytes:
    return struct.pack(">i", len(fields)) + b"".join(
        struct.pack(">I", oid) + parts(value) for oid, value in fields
    )


def a_range(flags: int, *ends: bytes) -> bytes:
    return bytes([flags]) + parts(*ends)


def span(lower: Any, upper: Any, bounds: str = "[)") -> dict[str, Any]:
    return {
        "lower": lower, "upper": upper, "lower_inc": bounds[:1] == "[",
        "upper_inc": bounds[1:] == "]", "empty": not bounds,
    }  # fmt: skip


PAIR_TYPE = pa.struct(
    [("n", pa.int32()), ("t", pa.utf8()), ("m", pa.dictionary(pa.int32(), pa.utf8()))]
)
INT4RANGE = pa.struct(
    [
        ("lower", pa.int32()),
        ("upper", pa.int32()),
        *((name, pa.bool_()) for name in ("lower_inc", "upper_inc", "empty")),
    ]
)
DAY = datetime.date(2024, 2, 29)

VALUES: dict[str, tuple[int, str, bytes, pa.DataType, Any]] = {
    "int4[]": (
        1007, "{1,-2,NULL,2147483647}", array(23, int4(1), int4(-2), None, int4(2**31 - 1)),
        pa.list_(pa.int32()), [1, -2, None, 2**31 - 1],
    ),
    "empty int4[]": (1007, "{}", array(23), pa.list_(pa.int32()), []),
    "int8[]": (
        1016, "{-9223372036854775808,7}", array(20, struct.pack(">q", -(2**63)), bytes(7) + b"\7"),
        pa.list_(pa.int64()), [-(2**63), 7],
    ),
    "int2[]": (1005, "{-7,300}", array(21, b"\xff\xf9", b"\1\x2c"), pa.list_(pa.int16()),
               [-7, 300]),
    "bool[]": (1000, "{t,f,NULL,t}", array(16, b"\1", b"\0", None, b"\1"), pa.list_(pa.bool_()),
               [True, False, None, True]),
    "float8[]": (1022, "{1.5,-0.1}", array(701, struct.pack(">d", 1.5), struct.pack(">d", -0.1)),
                 pa.list_(pa.float64()), [1.5, -0.1]),
    "float4[]": (1021, "{1.5,NaN}", array(700, struct.pack(">f", 1.5), struct.pack(">f", 0.5)),
                 pa.list_(pa.float32()), None),
    "text[]": (
        1009, r'{plain,"",NULL,"NULL","a b","\"\\{},"," ",ü}',
        array(25, b"plain", b"", None, b"NULL", b"a b", b'"\\{},', b" ", "ü".encode()),
        pa.list_(pa.utf8()), ["plain", "", None, "NULL", "a b", '"\\{},', " ", "ü"],
    ),
    "long text[]": (1009, '{"' + r"\\" * 300 + '",' + "x" * 300 + "}",
                    array(25, b"\\" * 300, b"x" * 300), pa.list_(pa.utf8()),
                    ["\\" * 300, "x" * 300]),
    "bytea[]": (1001, r'{"\\x00ff","\\x"}', array(17, b"\0\xff", b""), pa.list_(pa.binary()),
                [b"\0\xff", b""]),
    "date[]": (1182, "{2024-02-29}", array(1082, int4(8825)), pa.list_(pa.date32()), [DAY]),
    "uuid[]": (2951, "{0f0f0f0f-0f0f-0f0f-0f0f-0f0f0f0f0f0f}", array(2950, b"\x0f" * 16),
               pa.list_(pa.uuid()), None),
    "jsonb[]": (3807, r'{"{\"a\": 1}"}', array(3802, b'\1{"a": 1}'), pa.list_(pa.json_()),
                ['{"a": 1}']),
    "inet[]": (1041, "{10.0.0.1}", array(869, b"\2\x20\0\4\x0a\0\0\1"), pa.list_(pa.utf8()),
               ["10.0.0.1"]),
    "int2vector": (22, "1 2", array(21, b"\0\1", b"\0\2", lowers=[0]), pa.list_(pa.int16()),
                   [1, 2]),
    "oidvector": (30, "", array(26), pa.list_(pa.uint32()), []),
    "int4range": (3904, "[1,5)", a_range(2, int4(1), int4(5)), INT4RANGE, span(1, 5)),
    "endless int4range": (3904, "(,5]", a_range(12, int4(5)), INT4RANGE, span(None, 5, "(]")),
    "empty int4range": (3904, "empty", b"\1", INT4RANGE, span(None, None, "")),
    "daterange": (3912, "[2024-02-29,)", a_range(18, int4(8825)), None, span(DAY, None)),
    "tsrange": (
        3908, '["2024-02-29 00:00:00",)', a_range(18, struct.pack(">q", 8825 * 86400 * 10**6)),
        None, span(datetime.datetime(2024, 2, 29), None),
    ),
    "int4multirange": (
        4451, "{[1,2),[5,)}",
        struct.pack(">i", 2) + parts(a_range(2, int4(1), int4(2)), a_range(18, int4(5))),
        pa.list_(INT4RANGE), [span(1, 2), span(5, None)],
    ),
    "empty int4multirange": (4451, "{}", bytes(4), pa.list_(INT4RANGE), []),
    "tsmultirange": (
        4533, '{("2024-02-29 00:00:00","2024-03-01 00:00:00"],("2024-03-02 00:00:00",)}',
        struct.pack(">i", 2)
        + parts(a_range(4, *(struct.pack(">q", day * 86400 * 10**6) for day in (8825, 8826))),
                a_range(16, struct.pack(">q", 8827 * 86400 * 10**6))),
        None,
        [span(datetime.datetime(2024, 2, 29), datetime.datetime(2024, 3, 1), "(]"),
         span(datetime.datetime(2024, 3, 2), None, "()")],
    ),
    "mood": (MOOD, "happy", b"happy", pa.dictionary(pa.int32(), pa.utf8()), "happy"),
    "mood[]": (MOODS, "{ok,NULL,sad}", array(MOOD, b"ok", None, b"sad"),
               pa.list_(pa.dictionary(pa.int32(), pa.utf8())), ["ok", None, "sad"]),
    "pair": (
        PAIR, r'(7,"a ""b"" \\",ok)', composite((23, int4(7)), (25, b'a "b" \\'), (MOOD, b"ok")),
        PAIR_TYPE, {"n": 7, "t": 'a "b" \\', "m": "ok"},
    ),
    "empty pair": (PAIR, "(,,)", composite((23, None), (25, None), (MOOD, None)), PAIR_TYPE,
                   {"n": None, "t": None, "m": None}),
    "composite without fields": (BARE, "()", composite(), pa.struct([]), {}),
    "pair[]": (
        PAIRS, r'{"(1,\"\",)",NULL,"(2,\"x y\",sad)"}',
        array(PAIR, composite((23, int4(1)), (25, b""), (MOOD, None)), None,
              composite((23, int4(2)), (25, b"x y"), (MOOD, b"sad"))),
        pa.list_(PAIR_TYPE), [{"n": 1, "t": "", "m": None}, None, {"n": 2, "t": "x y", "m": "sad"}],
    ),
    "hstore": (HSTORE, '"a"=>"1", "b"=>NULL', struct.pack(">i", 2) + parts(b"a", b"1", b"b", None),
               pa.map_(pa.utf8(), pa.utf8()), [("a", "1"), ("b", None)]),
    "vector": (VECTOR, "[1,-2.5]", struct.pack(">HHff", 2, 0, 1, -2.5), pa.list_(pa.float32()),
               [1.0, -2.5]),
    "halfvec": (HALFVEC, "[1,-2.5]", struct.pack(">HHee", 2, 0, 1, -2.5), pa.list_(pa.float32()),
                [1.0, -2.5]),
    "sparsevec": (
        SPARSEVEC, "{1:1.5,3:2}/5", struct.pack(">5i2f", 5, 2, 0, 0, 2, 1.5, 2),
        pa.struct([("dim", pa.int32()), ("indices", pa.list_(pa.int32())),
                   ("values", pa.list_(pa.float32()))]),
        {"dim": 5, "indices": [0, 2], "values": [1.5, 2.0]},
    ),
}  # fmt: skip
"""Name → OID, text, binary, Arrow type, Python value."""


@pytest.mark.parametrize("name", VALUES)
def test_text_and_binary(name: str) -> None:
    """A value of every type, NULLs and rows of before beside it."""
    type_id, shown, raw, kind, expected = VALUES[name]
    for value in (text(shown), binary(raw)):
        found = column(type_id, value, NULL, value)
        if kind is not None:
            assert found.type == kind
        if expected is not None:
            assert found.to_pylist() == [expected, None, expected]
    old = [row("D", b"O" + tuple_data(text(shown))), row("D", b"O" + tuple_data(binary(raw)))]
    (batch,) = batches_of([announced(type_id), *old])
    assert batch.column("after").to_pylist() == [None, None]
    if expected is not None:
        assert batch.column("before").field(0).to_pylist() == [expected, expected]


def test_a_signalling_nan_keeps_its_bits() -> None:
    nan = bytes.fromhex("7f8ccccd")
    for numbers in (column(700, binary(nan)), column(1021, binary(array(700, nan))).values):
        assert numbers.view(pa.uint32()).to_pylist() == [0x7F8CCCCD]


def test_other_targets() -> None:
    moods = column(MOODS, text("{ok}"), target="spark")
    assert moods.type == pa.list_(pa.utf8())
    assert column(VECTOR, text("[1,2]"), modifier=2, target="spark").type == pa.list_(pa.float32())
    oids = column(30, text("1 2"), target="spark")
    assert (oids.type, oids.to_pylist()) == (pa.list_(pa.int64()), [[1, 2]])
    intervals = column(1187, text('{"1 day"}'), target="portable")
    assert (intervals.type, intervals.to_pylist()) == (pa.list_(pa.utf8()), [["P1D"]])
    assert column(1187, text('{"1 day"}')).type == pa.list_(pa.month_day_nano_interval())
    numbers = column(1231, text("{1.50}"), policies=pf.Policies(numeric=(10, 3)))
    assert numbers.to_pylist() == [[Decimal("1.500")]]


def test_vectors_of_a_known_size() -> None:
    found = column(VECTOR, text("[1,2,3]"), NULL, text("[4,5,6]"), modifier=3)
    assert found.type == pa.list_(pa.float32(), 3)
    assert found.to_pylist() == [[1, 2, 3], None, [4, 5, 6]]
    raw = struct.pack(">HHee", 2, 0, 1, 2)
    assert column(HALFVEC, binary(raw), modifier=2).type == pa.list_(pa.float32(), 2)
    for value in (text("[1,2]"), binary(struct.pack(">HHff", 2, 0, 1, 2))):
        with expect_error(pf.DecodeError, code="out_of_range"):
            column(VECTOR, value, modifier=3)
    # Of which there is no value.
    (batch,) = batches_of([announced(VECTOR, modifier=3), row("D", b"K" + tuple_data(NULL))])
    assert batch.column("before").field(0).to_pylist() == [None]


# --- shapes of arrays -----------------------------------------------------------------------------


TWO_BY_TWO = array(23, *map(int4, range(4)), lengths=[2, 2])


@pytest.mark.parametrize(
    "value",
    [
        text("{{0,1},{2,3}}"), binary(TWO_BY_TWO), text("[0:1]={1,2}"),
        binary(array(23, int4(1), int4(2), lowers=[0])),
    ],
)  # fmt: skip
def test_arrays_of_another_shape(value: bytes) -> None:
    with expect_error(pf.DecodeError, code="out_of_range", frame=2, offset=13):
        column(1007, text("{1}"), value)
    as_text = column(1007, text("{1}"), value, policies=pf.Policies(arrays="text"))
    assert as_text.type == pa.utf8()
    assert as_text.to_pylist()[1] in ("{{0,1},{2,3}}", "[0:1]={1,2}")


def test_arrays_of_two_dimensions() -> None:
    policies = pf.Policies(arrays=2)
    values = [text("{{0,1},{2,NULL}}"), binary(TWO_BY_TWO), text("{}"), binary(array(23)), NULL]
    found = column(1007, *values, policies=policies)
    assert found.type == pa.list_(pa.list_(pa.int32()))
    assert found.to_pylist() == [[[0, 1], [2, None]], [[0, 1], [2, 3]], [], [], None]
    for value in (text("{1}"), text("{{{1}}}"), text("[0:0][1:1]={{1}}")):
        with expect_error(pf.DecodeError, code="out_of_range"):
            column(1007, value, policies=policies)


# --- policies -------------------------------------------------------------------------------------


def test_policies_within() -> None:
    dates, empty_end = text("{infinity,2024-02-29}"), text("[2024-02-29,infinity]")
    for value in (dates, binary(array(1082, int4(2**31 - 1), int4(8825)))):
        with pytest.raises(pf.DecodeError) as caught:
            column(1182, value)
        assert caught.value.code == "out_of_range"
        null = pf.Policies(infinity="null")
        assert column(1182, value, policies=null).to_pylist() == [[None, DAY]]
        clamp = pf.Policies(infinity="clamp")
        assert column(1182, value, policies=clamp).to_pylist() == [[datetime.date.max, DAY]]
        as_text = column(1182, value, policies=pf.Policies(infinity="text"))
        assert as_text.type == pa.list_(pa.utf8())
        assert as_text.to_pylist() == [["infinity", "2024-02-29"]]
    # An end that is null would be no end.
    assert column(3912, empty_end, policies=pf.Policies(infinity="null")).to_pylist() == [None]
    special = pf.Policies(numeric=(10, 2), special_values="null")
    assert column(1231, text("{NaN,1}"), policies=special).to_pylist() == [[None, Decimal("1.00")]]


# --- enums ----------------------------------------------------------------------------------------


def test_a_new_label_starts_a_batch() -> None:
    moods = ["ok", "new", "sad", "newer", "new"]
    frames = [announced(MOOD, MOODS), *(insert(text(m), text(f"{{{m}}}")) for m in moods)]
    batches = batches_of(frames)
    after = [batch.column("after") for batch in batches]
    assert [side.field(0).to_pylist() for side in after] == [
        ["ok"],
        ["new", "sad"],
        ["newer", "new"],
    ]
    assert [side.field(1).to_pylist() for side in after] == [
        [["ok"]], [["new"], ["sad"]], [["newer"], ["new"]],
    ]  # fmt: skip
    known = ["sad", "ok", "happy"]
    for n, side in enumerate(after):
        labels = [*known, "new", "newer"][: 3 + n]
        assert side.field(0).dictionary.to_pylist() == labels
        assert side.field(1).values.dictionary.to_pylist() == labels


def test_decoders_that_share_a_layout_share_its_labels() -> None:
    made: dict[str, Layout] = {}

    def layouts(plan: RelationPlan) -> Layout:
        return made.setdefault("the only one", layout_of(plan, "arrow", Selection()))

    one, other = (pf.ColumnarDecoder(registry=registry(), layouts=layouts) for _ in range(2))
    for decoder, moods in ((one, ["ok"]), (other, ["new", "ok"]), (one, ["new", "sad"])):
        frames = [announced(MOOD, MOODS), *(insert(text(m), text(f"{{{m}}}")) for m in moods)]
        (batch,) = map(pa.record_batch, decoder.decode(frames))
        batch.validate(full=True)
        assert batch.column("after").field(0).to_pylist() == moods
        assert batch.column("after").field(1).to_pylist() == [[m] for m in moods]


def test_a_label_of_a_bad_frame_is_not_learned() -> None:
    frames = [announced(MOOD), insert(text("ok")), insert(text("new"))[:-1], insert(text("sad"))]
    (batch,) = batches_of(frames, on_error="collect")
    found = batch.column("after").field(0)
    assert (found.to_pylist(), len(found.dictionary)) == (["ok", "sad"], 3)
    with pytest.raises(pf.DecodeError) as caught:
        column(MOOD, text("ok"), text(b"\xff"))
    assert caught.value.code == "bad_encoding"


def test_many_labels() -> None:
    labels = tuple(f"label {n}" for n in range(1000))
    many = registry(CatalogType(MOOD, "public", "mood", "e", labels=labels))
    values = [text(label) for label in labels[::-1]]
    assert column(MOOD, *values, types=many).to_pylist() == list(labels[::-1])


def test_without_a_catalogue() -> None:
    for value, kind in ((text("x"), pa.utf8()), (binary(b"x"), pa.binary())):
        for type_id in (MOOD, PAIR, HSTORE):
            assert column(type_id, value, types=pf.TypeRegistry()).type == kind


# --- rows -----------------------------------------------------------------------------------------


def test_a_row_that_is_refused_leaves_nothing() -> None:
    frames = [
        announced(1007, PAIR, 1009),
        insert(text("{1,2}"), text("(1,a,ok)"), text("{x}")),
        insert(text("{3,4}"), text("(2,b,sad)"), text("{x")),
        insert(text("{5}"), NULL, text("{y}")),
        insert(text("{6,x}"), text("(3,c,ok)"), text("{z}")),
        insert(NULL, text("(4,d,ok)"), text("{}")),
    ]
    (batch,) = batches_of(frames, on_error="collect")
    after = batch.column("after")
    assert after.field(0).to_pylist() == [[1, 2], [5], None]
    assert [pair and pair["n"] for pair in after.field(1).to_pylist()] == [1, None, 4]
    assert after.field(2).to_pylist() == [["x"], ["y"], []]


def test_nested_values_not_sent() -> None:
    old = tuple_data(text("{1}"), text("(1,a,ok)"))
    frames = [
        announced(1007, PAIR),
        row("U", b"O" + old + b"N" + tuple_data(SAME, SAME)),
        row("U", b"N" + tuple_data(text("{2}"), SAME)),
    ]
    (batch,) = batches_of(frames)
    assert batch.column("unchanged").to_pylist() == [["c0", "c1"], ["c1"]]
    assert batch.column("after").field(0).to_pylist() == [None, [2]]
    (batch,) = batches_of(frames, fill_unchanged=True)
    assert batch.column("unchanged").to_pylist() == [None, ["c1"]]
    assert batch.column("after").field(0).to_pylist() == [[1], [2]]
    assert batch.column("after").field(1).to_pylist() == [{"n": 1, "t": "a", "m": "ok"}, None]


def test_bytes_are_counted() -> None:
    """A part takes four bytes beside its own."""
    value = text("{1,2,3}")
    frames = [announced(1007), *[insert(value)] * 6]
    size = 60 + 1 + 4 + 3 * 8
    for rows in (1, 2, 3):
        batches = batches_of(frames, max_bytes=rows * size + size - 1)
        assert [batch.num_rows for batch in batches] == [rows] * (6 // rows)


def test_parts_of_unknown_types_have_the_form_of_their_values() -> None:
    raw = composite((23, int4(2)), (99_999, b"\xff"))
    frames = [announced(ODD), insert(text("(1,a)")), insert(binary(raw)), insert(NULL)]
    batches = batches_of(frames)
    found = [batch.column("after").field(0) for batch in batches]
    assert [one.to_pylist() for one in found] == [
        [{"i": 1, "x": "a"}], [{"i": 2, "x": b"\xff"}, None],
    ]  # fmt: skip
    assert [one.type.field("x").type for one in found] == [pa.utf8(), pa.binary()]


def test_columns_in_other_encodings() -> None:
    for encoding in ("latin-1", "cp949", "gb18030"):
        value = text('{ü,"ü ,"}'.encode(encoding, "replace"))
        expected = ["ü", "ü ,"] if encoding != "cp949" else ["?", "? ,"]
        assert column(1009, value, encoding=encoding).to_pylist() == [expected]
    # The second byte is one of an array's own signs.
    value = text("{俓|,a}".encode("gb18030"))
    assert column(1009, value, encoding="gb18030").to_pylist() == [["俓|", "a"]]


# --- registered types -----------------------------------------------------------------------------


def test_columns_of_registered_types() -> None:
    types = registry(CatalogType(16400, "public", "money2", "b"),
                     CatalogType(16401, "public", "_money2", "b", 16400))  # fmt: skip
    types.register("money2", text=lambda raw: int(raw) * 2, arrow="int64")
    types.register("hstore", text=lambda raw: {"raw": [raw]}, arrow=pa.struct(
        [("raw", pa.list_(pa.binary()))]
    ))  # fmt: skip
    assert column(16400, text("4"), NULL, types=types).to_pylist() == [8, None]
    found = column(16401, text("{4,NULL}"), types=types)
    assert (found.type, found.to_pylist()) == (pa.list_(pa.int64()), [[8, None]])
    assert column(HSTORE, text("x"), types=types).to_pylist() == [{"raw": [b"x"]}]
    with expect_error(pf.DecodeError, code="out_of_range"):
        column(16400, text(str(2**63)), types=types)
    with pytest.raises(pf.DecodeError) as caught:
        column(16400, text("x"), types=types)
    assert caught.value.code == "bad_value"


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (pa.bool_(), True), (pa.int8(), -1), (pa.uint8(), 255), (pa.uint16(), 65535),
        (pa.float16(), 1.5), (pa.date64(), DAY), (pa.time32("s"), datetime.time(1, 2, 3)),
        (pa.timestamp("ms", "UTC"), datetime.datetime(2024, 1, 1, tzinfo=UTC)),
        (pa.decimal128(10, 2), Decimal("-1.50")), (pa.decimal256(50, 2), Decimal("1.50")),
        (pa.binary(3), b"abc"), (pa.map_(pa.utf8(), pa.int32()), [("a", 1), ("b", None)]),
        (pa.list_(pa.int16(), 2), [1, None]), (pa.list_(pa.list_(pa.bool_())), [[True], [], None]),
    ],
)  # fmt: skip
def test_any_arrow_type_is_registered(kind: pa.DataType, value: Any) -> None:
    types = registry()
    types.register("mood", text=lambda raw: value if raw == b"x" else None, arrow=kind)
    found = column(MOOD, text("x"), text(""), text("x"), types=types)
    assert found.type == kind
    assert found.to_pylist() == [value, None, value]


@pytest.mark.parametrize("kind", ["floaty", pa.large_utf8(), 7])
def test_what_is_no_type_of_a_column(kind: Any) -> None:
    types = registry()
    types.register("mood", text=bytes, arrow=kind)
    with expect_error(parameter="arrow"):
        column(MOOD, text("x"), types=types)


def test_functions_without_a_type_are_not_asked() -> None:
    types = registry()
    types.register("int4", text=lambda raw: complex(int(raw)))
    assert column(23, text("7"), types=types).to_pylist() == [7]
    assert column(1007, text("{7}"), types=types).to_pylist() == [[7]]


# --- bad values -----------------------------------------------------------------------------------

SIGNS = [bytes([c]) for c in b'{}[]()",\\ :=Nntf09.-+eE\x00\x01\x07\xff\x80']


def mutated(chance: random.Random, value: bytes) -> bytes:
    for _ in range(chance.choice((0, 1, 1, 2))):
        at = chance.randrange(len(value) + 1)
        kind = chance.randrange(4)
        sign = chance.choice(SIGNS)
        if kind == 0:
            value = value[:at] + sign + value[at:]
        elif kind == 1:
            value = value[:at] + value[at + 1 :]
        elif kind == 2:
            value = value[:at] + sign + value[at + 1 :]
        else:
            end = chance.randrange(at, len(value) + 1)
            value = value[:at] + value[at:end] * 2 + value[end:]
    return value


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *nightly(*range(1, 6))])
def test_mutated_values(seed: int, implementation: str) -> None:
    """Columns and messages take the same values for the same, and refuse the others alike."""
    chance = random.Random(seed)
    types = registry()
    settings = make_settings(None, "utf-8", types)
    outcomes = set()
    for _ in range(1200):
        type_id, shown, raw, *_ = VALUES[chance.choice(list(VALUES))]
        in_text = chance.random() < 0.5
        value = mutated(chance, shown.encode() if in_text else raw)
        frame = insert((text if in_text else binary)(value))
        decoder = pf.Decoder(registry=types)
        decoder.decode(announced(type_id))
        message = decoder.decode(frame)
        refusal = refused = want = None
        try:
            (want,) = message.new.values()
        except pf.DecodeError as error:
            refusal = error
        try:
            found = batches_of([announced(type_id), frame])[-1].column("after").field(0)
        except pf.DecodeError as error:
            refused = error
        if refused is not None:
            outcomes.add(refused.code)
            if refusal is None:
                assert refused.code == "out_of_range", (value, refused)
                assert has_other_shape(want), (value, want)
            else:
                assert (refused.code, refused.offset) == (refusal.code, refusal.offset), value
                assert str(refused) == f"frame {refused.frame}: {refusal}"
            continue
        assert refusal is None, (value, refusal)
        outcomes.add("sound")
        kind = column_type(type_id, registry=types)
        assert same_value(found.to_pylist()[-1], found.type, want, kind, settings), (value, want)
    assert outcomes >= {"sound", "bad_value", "bad_encoding"}


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *nightly(1, 2, 3)])
def test_mutated_rows(seed: int, implementation: str) -> None:
    """Of many columns, by both engines."""
    if implementation != "cython":
        pytest.skip("both are asked at once")
    chance = random.Random(100 + seed)
    for _ in range(40):
        names = [chance.choice(list(VALUES)) for _ in range(chance.randrange(1, 5))]
        frames = [announced(*(VALUES[name][0] for name in names))]
        for _ in range(chance.randrange(1, 30)):
            cells = []
            for name in names:
                _, shown, raw, *_ = VALUES[name]
                plain = chance.choice((text(shown), binary(raw), NULL))
                if chance.random() < 0.1 and plain is not NULL:
                    kind, value = plain
                    plain = kind, mutated(chance, value)
                cells.append(plain)
            op = chance.choice("IIUD")
            if op == "I":
                frames.append(insert(*cells))
            elif op == "D":
                frames.append(row("D", b"O" + tuple_data(*cells)))
            else:
                new = [SAME if chance.random() < 0.2 else cell for cell in cells]
                frames.append(row("U", b"O" + tuple_data(*cells) + b"N" + tuple_data(*new)))
        options: dict[str, Any] = {
            "registry": registry(),
            "target": chance.choice(("arrow", "spark", "portable")),
            "on_error": "collect",
            "fill_unchanged": chance.random() < 0.5,
            "max_bytes": chance.choice((300, 1000, 1 << 20)),
            "policies": pf.Policies(arrays=chance.choice(("error", "text", 1, 2))),
        }
        found = differences([frames], **options)
        assert not found, ([frame.hex() for frame in frames], options, found)


@pytest.mark.parametrize("type_id", [22, 30])
@pytest.mark.parametrize(
    "value",
    [text("[1,2]"), binary(bytes.fromhex("00020000" + "0000ffff" + "00002710"))],
)  # fmt: skip
def test_vectors_of_the_catalogue_are_not_pgvectors(type_id: int, value: bytes) -> None:
    with pytest.raises(pf.DecodeError) as caught:
        batches_of([announced(type_id), insert(value)])
    assert (caught.value.code, caught.value.frame, caught.value.offset) == ("bad_value", 1, 13)
