"""Columns of frames made by hand: what each has in it, where batches end, what is refused."""

from __future__ import annotations

import datetime
import gc
import itertools
import json
import os
import pickle
import random
import struct
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

import pytest
from support.expected_errors import expect_error

pytest.importorskip("pyarrow", reason="reads the batches, and the twin makes them with it")

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from support.columns.calls import OID, OTHER, R, batches_of, column, i, rows
from support.columns.columnar import IMPLEMENTATIONS, chosen
from support.frames.made_vectors import (
    NULL,
    SAME,
    TWO,
    binary,
    insert,
    relation,
    row,
    text,
    tuple_data,
)
from support.frames.make_frames import (
    STREAM_STOP,
    begin,
    commit,
    stream_abort,
    stream_commit,
    stream_start,
    truncate,
    type_frame,
)

import pgoutput_fast as pf
from pgoutput_fast import testing
from pgoutput_fast._impl import twin
from pgoutput_fast.columnar.arrays import OPERATIONS
from pgoutput_fast.columnar.schema import layout_of
from pgoutput_fast.columnar.selection import Selection

SHIFT = 946_684_800_000_000


@pytest.fixture(autouse=True, params=IMPLEMENTATIONS)
def implementation(request: pytest.FixtureRequest) -> Iterator[str]:
    with chosen(request.param):
        yield request.param


# --- columns -------------------------------------------------------------------------------------


def test_every_column() -> None:
    frames = [
        begin(7, 0x100, 5),
        R,
        i(1),
        row("U", b"K" + tuple_data(text("1"), NULL) + b"N" + tuple_data(text("2"), text("b"))),
        row("D", b"O" + tuple_data(text("2"), text("b"))),
        truncate(OID),
        commit(0x100),
    ]
    (batch,) = batches_of(frames, lsns=range(10, 17))
    read = pa.record_batch(batch)
    assert read["op"].to_pylist() == list(OPERATIONS.values())
    side = pa.struct([("id", pa.int32()), ("name", pa.utf8())])
    assert read.schema == pa.schema(
        [
            ("op", pa.utf8()),
            ("xid", pa.uint32()),
            ("subxid", pa.uint32()),
            ("lsn", pa.uint64()),
            ("commit_lsn", pa.uint64()),
            ("commit_time", pa.timestamp("us", "UTC")),
            ("seq", pa.int64()),
            ("old_kind", pa.utf8()),
            ("before", side),
            ("after", side),
            ("unchanged", pa.list_(pa.utf8())),
        ]
    )
    time = datetime.datetime(2000, 1, 1, 0, 0, 0, 5, tzinfo=datetime.timezone.utc)
    common = {"xid": 7, "subxid": None, "commit_lsn": 0x100, "commit_time": time, "unchanged": None}
    one, two = {"id": 1, "name": "a"}, {"id": 2, "name": "b"}
    key = {"id": 1, "name": None}
    expected = [
        {"op": "insert", "lsn": 12, "seq": 0, "old_kind": None, "before": None, "after": one},
        {"op": "update", "lsn": 13, "seq": 1, "old_kind": "K", "before": key, "after": two},
        {"op": "delete", "lsn": 14, "seq": 2, "old_kind": "O", "before": two, "after": None},
        {"op": "truncate", "lsn": 15, "seq": 3, "old_kind": None, "before": None, "after": None},
    ]
    assert read.to_pylist() == [{**common, **told} for told in expected]
    assert (batch.num_rows, len(batch), batch.relation.name) == (4, 4, "t")
    assert repr(batch) == "<ChangeBatch: 4 rows of public.t>"
    assert batch.nbytes > 0
    with pytest.raises(TypeError):
        pickle.dumps(batch)
    with pytest.raises(TypeError):
        type(batch)()


def test_spark_takes_longs() -> None:
    frames = [stream_start(9), relation(TWO, xid=9), i(1, xid=10), STREAM_STOP]
    (batch,) = batches_of(frames, lsns=[1, 2, 3, 4], target="spark")
    schema = pa.schema(batch)
    assert [schema.field(name).type for name in ("xid", "subxid", "lsn", "commit_lsn")] == [
        pa.int64()
    ] * 4
    assert [rows(batch)[0][name] for name in ("xid", "subxid", "lsn", "commit_lsn")] == [
        9, 10, 3, None,
    ]  # fmt: skip


def test_values_not_sent() -> None:
    frames = [
        R,
        row("U", b"N" + tuple_data(text("1"), SAME)),
        row("U", b"K" + tuple_data(text("1"), text("old")) + b"N" + tuple_data(text("2"), SAME)),
        row("U", b"O" + tuple_data(text("1"), text("old")) + b"N" + tuple_data(text("2"), SAME)),
        row("U", b"N" + tuple_data(SAME, SAME)),
        i(3),
    ]
    batches = batches_of(frames)
    assert column(batches, "unchanged") == [["name"], ["name"], ["name"], ["id", "name"], None]
    assert [after["name"] for after in column(batches, "after")] == [None, None, None, None, "a"]
    # A NULL is no value that was left out, so it does not stand for one.
    null = row("U", b"O" + tuple_data(text("1"), NULL) + b"N" + tuple_data(text("2"), SAME))
    assert column(batches_of([R, null], fill_unchanged=True), "unchanged") == [["name"]]
    batches = batches_of(frames, fill_unchanged=True)
    assert column(batches, "unchanged") == [["name"], ["name"], None, ["id", "name"], None]
    assert [after["name"] for after in column(batches, "after")] == [None, None, "old", None, "a"]


@pytest.mark.parametrize("seed", range(6))
def test_old_rows_among_others(seed: int) -> None:
    """Runs of rows without a tuple, of any length, in columns of each shape."""
    kinds: dict[str, Any] = {
        "id": "int4",
        "flag": "bool",
        "big": "int8",
        "price": ("numeric", (12 << 16 | 2) + 4),
        "note": "text",
        "parts": 1007,
        "other": 9_999,
    }
    table = testing.Table("t", kinds, OID, key=["id"])
    rng = random.Random(seed)

    def new_row() -> dict[str, Any]:
        made = {
            "flag": rng.random() < 0.5,
            "big": rng.getrandbits(40),
            "price": Decimal(rng.randrange(10**6)).scaleb(-2),
            "note": "ä" * rng.randrange(9) + "x" * rng.randrange(40),
            "parts": [rng.randrange(9) for _ in range(rng.randrange(3))],
            "other": "o" * rng.randrange(3),
        }
        values = {name: value for name, value in made.items() if rng.random() < 0.8}
        return dict.fromkeys(kinds) | {"id": rng.randrange(100)} | values

    def sent(row: dict[str, Any]) -> list[Any]:
        texts = {list: lambda parts: f"{{{','.join(map(str, parts))}}}", Decimal: str}
        return [texts.get(type(value), lambda value: value)(value) for value in row.values()]

    frames = [table.relation(), testing.begin(7)]
    expected = []
    old_kinds = ["K"] if seed == 0 else ["K", "K", "O"]
    for _ in range(12):
        tags, share = rng.choice(["IU", "U", "D", "IUD"]), rng.choice([0, 0.05, 0.5, 1])
        for _ in range(rng.choice([1, 7, 8, 9, 30])):
            tag, old, new = rng.choice(tags), new_row(), new_row()
            kind = rng.choice(old_kinds)
            if kind == "K":
                old = dict.fromkeys(kinds) | {"id": old["id"]}
            if tag == "D":
                frames.append(testing.delete(table, sent(old), kind))
                new = None
            elif tag == "U" and rng.random() < share:
                frames.append(testing.update(table, sent(new), sent(old), kind))
            else:
                make = testing.insert if tag == "I" else testing.update
                frames.append(make(table, sent(new)))
                old = None
            expected.append((old, new))
    # The second batch begins with nothing that the first one had.
    for max_rows in (1_000, 40):
        batches = batches_of(frames, max_rows=max_rows)
        for batch in batches:
            pa.record_batch(batch).validate(full=True)
        told = zip(column(batches, "before"), column(batches, "after"), strict=True)
        assert list(told) == expected


def test_an_old_row_is_whole() -> None:
    with expect_error(pf.DecodeError, code="bad_value", frame=1, offset=15):
        batches_of([R, row("D", b"O" + tuple_data(text("1"), SAME))])
    # Of a column that is not wanted nothing is asked.
    (batch,) = batches_of([R, row("D", b"O" + tuple_data(text("1"), SAME))], columns="id")
    assert rows(batch)[0]["before"] == {"id": 1}


def test_rows_of_all_tables_are_counted() -> None:
    frames = [
        begin(7),
        R,
        relation(TWO, OTHER, "u"),
        i(1),
        i(2, relation_id=OTHER),
        truncate(OTHER, OID),
        i(3),
        commit(),
        begin(8),
        i(4, relation_id=OTHER),
        commit(),
    ]
    t, u = batches_of(frames)
    assert (t.relation.name, u.relation.name) == ("t", "u")
    assert column([t], "seq") == [0, 3, 4]
    assert column([u], "seq") == [1, 2, 0]
    assert column([u], "op") == ["insert", "truncate", "insert"]
    (only,) = batches_of(frames, tables="public.t")
    assert column([only], "seq") == [0, 3, 4]


def test_streamed_rows_have_both_xids_and_no_commit() -> None:
    first = [stream_start(9), relation(TWO, xid=9), i(1, xid=9), i(2, xid=10), STREAM_STOP]
    second = [stream_start(9, 0), i(3, xid=11), truncate(OID, xid=11), STREAM_STOP]
    decoder = pf.ColumnarDecoder()
    batches = [*decoder.decode(first), *decoder.decode([begin(5), R, i(0), commit()])]
    batches += [*decoder.decode(second), *decoder.decode([stream_abort(9, 10), stream_commit(9)])]
    assert column(batches, "xid") == [9, 9, 5, 9, 9]
    assert column(batches, "subxid") == [9, 10, None, 11, 11]
    assert column(batches, "seq") == [0, 1, 0, 2, 3]
    assert column(batches, "commit_lsn") == [None, None, 0x100, None, None]
    assert [event[:4] for event in decoder.events] == [(0, "A", 9, 10), (1, "c", 9, None)]


def test_with_commit_fills_in_what_is_not_known() -> None:
    frames = [
        begin(5, 0x50, 6), R, i(0), commit(), stream_start(9), relation(TWO, xid=9), i(1, xid=9),
    ]  # fmt: skip
    (batch,) = batches_of(frames, max_bytes=1 << 30)
    filled = batch.with_commit(0x200, 8)
    assert column([filled], "commit_lsn") == [0x50, 0x200]
    times = pa.record_batch(filled).column("commit_time").cast(pa.int64()).to_pylist()
    assert times == [6 + SHIFT, 8 + SHIFT]
    assert column([batch], "commit_lsn") == [0x50, None]
    before, after = pa.record_batch(batch), pa.record_batch(filled)
    for name in before.schema.names:
        addresses = [
            [buffer and buffer.address for buffer in read.column(name).buffers()]
            for read in (before, after)
        ]
        shared = addresses[0] == addresses[1]
        assert shared == (name not in ("commit_lsn", "commit_time")), name
    for lsn, time in ((1 << 64, 0), (-1, 0), (0, 1 << 63), (0, (1 << 63) - SHIFT)):
        with pytest.raises(OverflowError):
            batch.with_commit(lsn, time)
    (spark,) = batches_of(frames, target="spark")
    with pytest.raises(OverflowError):
        spark.with_commit(1 << 63, 0)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["arrow", "spark", "portable"])
def test_as_read_makes_rows_of_a_snapshot(target: Any) -> None:
    frames = [R, i(1), truncate(OID), i(2), i(3)]
    (batch,) = batches_of(frames, target=target)
    read = batch.as_read(0x1FF, 8, 5 << 32)
    assert column([read], "op") == ["read", "truncate", "read", "read"]
    assert column([read], "xid") == [None] * 4
    assert column([read], "commit_lsn") == [0x1FF] * 4
    assert column([read], "seq") == [(5 << 32) + n for n in range(4)]
    before, after = pa.record_batch(batch), pa.record_batch(read)
    after.validate(full=True)
    times = after.column("commit_time").cast(pa.int64()).to_pylist()
    assert times == [8 + SHIFT] * 4
    assert after.schema.equals(before.schema, check_metadata=True)
    assert column([batch], "op") == ["insert", "truncate", "insert", "insert"]
    for name in ("subxid", "lsn", "old_kind", "before", "after", "unchanged"):
        assert after.column(name).equals(before.column(name)), name
        addresses = [
            [buffer and buffer.address for buffer in one.column(name).buffers()]
            for one in (before, after)
        ]
        assert addresses[0] == addresses[1], name
    # Again, and with a commit: what is shared outlives the batches in between.
    again = batch.as_read(1, 2, 3).as_read(4, 5, 6).with_commit(7, 8)
    del batch, read
    gc.collect()
    assert column([again], "op") == ["read", "truncate", "read", "read"]
    assert column([again], "seq") == [6, 7, 8, 9]
    assert column([again], "commit_lsn") == [4] * 4
    (empty,) = batches_of([R, i(1)], target=target)
    assert column([empty.as_read(0, 0, (1 << 63) - 1)], "seq") == [(1 << 63) - 1]


def test_as_read_refuses_what_no_snapshot_has() -> None:
    update = row("U", b"N" + tuple_data(text("2"), text("b")))
    (batch,) = batches_of([R, i(1), update])
    with expect_error(code="unfit_input"):
        batch.as_read(1, 2, 3)
    (batch,) = batches_of([R, i(1), i(2)])
    for arguments in ((1 << 64, 0, 0), (0, 1 << 63, 0), (0, 0, -1), (0, 0, (1 << 63) - 1)):
        with pytest.raises(OverflowError):
            batch.as_read(*arguments)
    for wrong in (("0/1", 0, 0), (0, 1.5, 0), (0, 0, True)):
        with pytest.raises(TypeError):
            batch.as_read(*wrong)


def test_metadata_of_a_batch() -> None:
    frames = [
        type_frame(16400, "app", "mood"),
        relation([("id", 23), ("m", 16400)], identity="f"),
        insert(text("1"), text("sad")),
    ]
    metadata = pa.schema(batches_of(frames)[0]).metadata
    told = {key.decode().removeprefix("pgoutput."): value for key, value in metadata.items()}
    columns = json.loads(told.pop("columns"))
    assert told == {
        "namespace": b"public",
        "relation": b"t",
        "relation_id": b"16385",
        "replica_identity": b"f",
        "key_columns": b'["id"]',
    }
    assert columns == [
        {"name": "id", "type_id": 23, "type_modifier": -1, "type": "int4", "key": True},
        {"name": "m", "type_id": 16400, "type_modifier": -1, "type": "app.mood", "key": False},
    ]


def test_names_that_are_no_text() -> None:
    odd = R.replace(b"name\0", b"caf\xe9\0")
    (batch,) = batches_of([odd, row("U", b"N" + tuple_data(text("1"), SAME))])
    (told,) = rows(batch)
    assert told["after"] == {"id": 1, "caf\\xe9": None}
    assert told["unchanged"] == ["caf\\xe9"]
    columns = json.loads(pa.schema(batch).metadata[b"pgoutput.columns"])
    assert columns[1]["name"] == "caf\\xe9"
    assert columns[1]["name_bytes"] == "636166e9"
    (again,) = batches_of([odd, i(1)], columns=["caf\\xe9"])
    assert rows(again)[0]["after"] == {"caf\\xe9": "a"}


def test_a_table_without_columns() -> None:
    (batch,) = batches_of([relation([]), insert(), insert()])
    assert column([batch], "after") == [{}, {}]
    assert column([batch], "before") == [None, None]


def test_1600_columns() -> None:
    many = relation([(f"c{n}", 23) for n in range(1600)])
    values = [text(str(n)) for n in range(1600)]
    (batch,) = batches_of([many, insert(*values), insert(*[NULL] * 1600)])
    after = pa.record_batch(batch).column("after")
    assert [after.field(n).to_pylist() for n in (0, 1599)] == [[0, None], [1599, None]]
    assert after.type.num_fields == 1600


def test_columns_of_unknown_types_have_the_form_of_their_values() -> None:
    unknown = relation([("id", 23), ("x", 99_999)])
    frames = [
        unknown,
        insert(text("1"), NULL),
        insert(text("2"), text("a")),
        insert(text("3"), binary(b"\xff")),
        insert(text("4"), NULL),
        insert(text("5"), text("b")),
    ]
    batches = batches_of(frames)
    assert [column([b], "after") for b in batches] == [
        [{"id": 1, "x": None}, {"id": 2, "x": "a"}],
        [{"id": 3, "x": b"\xff"}, {"id": 4, "x": None}],
        [{"id": 5, "x": "b"}],
    ]
    kinds = [pa.schema(batch).field("after").type.field("x").type for batch in batches]
    assert kinds == [pa.utf8(), pa.binary(), pa.utf8()]
    # The old row and the new one have one type.
    both = b"O" + tuple_data(text("1"), text("a")) + b"N" + tuple_data(text("1"), binary(b"b"))
    with expect_error(pf.DecodeError, code="bad_value"):
        batches_of([unknown, row("U", both)])


def test_a_row_that_is_refused_decides_nothing() -> None:
    unknown = relation([("x", 99_999), ("id", 23)])
    frames = [
        unknown,
        insert(NULL, text("0")),
        insert(text("a"), text("no number")),
        insert(binary(b"\1"), text("1")),
        insert(text("b"), text("2"))[:-1],
        insert(binary(b"\2"), text("3")),
    ]
    decoder = pf.ColumnarDecoder(on_error="collect")
    (batch,) = decoder.decode(frames)
    assert [after["x"] for after in column([batch], "after")] == [None, b"\1", b"\2"]
    assert [(bad.frame, bad.error.code) for bad in decoder.errors] == [
        (2, "bad_value"),
        (4, "bad_length"),
    ]


def test_a_modifier_that_no_server_sends() -> None:
    announced = testing.Table("t", {"n": (1700, 4)}).relation()
    (batch,) = batches_of([announced, insert(text("123456"))])
    assert pa.record_batch(batch).schema.field("after").type.field("n").type == pa.string()
    assert rows(batch)[0]["after"] == {"n": "123456"}


# --- batches -------------------------------------------------------------------------------------


def test_a_change_of_the_schema_starts_a_batch() -> None:
    wider = relation([*TWO, ("more", 16)])
    frames = [R, i(1), R, i(2), wider, insert(text("3"), NULL, text("t")), R, i(4)]
    batches = batches_of(frames)
    assert [[after["id"] for after in column([b], "after")] for b in batches] == [[1, 2], [3], [4]]
    assert [batch.relation.columns[-1].name for batch in batches] == ["name", "more", "name"]
    assert batches[0].layout is batches[2].layout


def test_batches_are_one_per_table_in_the_order_of_their_rows() -> None:
    other = relation(TWO, OTHER, "u")
    frames = [R, other, i(1, relation_id=OTHER), i(2), i(3, relation_id=OTHER), i(4)]
    batches = batches_of(frames)
    assert [b.relation.name for b in batches] == ["u", "t"]
    assert [after["id"] for after in column(batches, "after")] == [1, 3, 2, 4]


def test_max_rows() -> None:
    batches = batches_of([R, *[i(n) for n in range(5)], truncate(OID)], max_rows=2)
    assert [len(batch) for batch in batches] == [2, 2, 2]
    assert column(batches, "op") == ["insert"] * 5 + ["truncate"]


def test_max_bytes_counts_what_comes_out() -> None:
    # A row of int4 and utf8 takes 60 + 2 + 4 + 4 bytes, and its text.
    frames = [R, *[i(n, "x" * 30) for n in range(6)]]
    assert [len(b) for b in batches_of(frames, max_bytes=300)] == [3, 3]
    assert [len(b) for b in batches_of(frames, max_bytes=299)] == [2, 2, 2]
    # Spark's xids are of 8 bytes.
    assert [len(b) for b in batches_of(frames, max_bytes=324, target="spark")] == [3, 3]
    assert [len(b) for b in batches_of(frames, max_bytes=323, target="spark")] == [2, 2, 2]
    assert [len(b) for b in batches_of(frames, max_bytes=1)] == [1] * 6
    # 8 bytes of binary numeric are 131,072 digits of text.
    numeric = relation([("n", 1700)])
    huge = binary(struct.pack(">HhHHH", 1, 32767, 0, 0, 1))
    batches = batches_of([numeric, *[insert(huge)] * 3], max_bytes=300_000)
    assert [len(b) for b in batches] == [2, 1]
    assert [len(after["n"]) for after in column(batches, "after")] == [131_069] * 3


def test_max_bytes_counts_old_rows_too() -> None:
    # From the first old tuple on, all rows of a batch have their place in the columns of before:
    # 10 bytes more each, and the old tuple's text.
    old = b"O" + tuple_data(text("1"), text("y" * 30))
    update = row("U", old + b"N" + tuple_data(text("1"), text("x" * 30)), OID)
    frames = [R, i(1, "x" * 30), i(2, "x" * 30), update, i(3, "x" * 30), update]
    # Two rows of 100 bytes, one of 140 that makes 20 of the two, then one of 110.
    assert [len(b) for b in batches_of(frames, max_bytes=470)] == [4, 1]
    assert [len(b) for b in batches_of(frames, max_bytes=469)] == [3, 2]
    assert [len(b) for b in batches_of(frames, max_bytes=359)] == [2, 2, 1]
    # What a batch counted is forgotten with it.
    decoder = pf.ColumnarDecoder(max_bytes=300)
    assert [len(b) for b in decoder.decode([R, update])] == [1]
    assert [len(b) for b in decoder.decode([i(n, "x" * 30) for n in range(4)])] == [3, 1]


def test_a_row_of_zeros_is_of_no_relation() -> None:
    for frame in (b"I" + bytes(7), b"U" + bytes(60), R[:1] + bytes(7)):
        with pytest.raises(pf.DecodeError) as caught:
            batches_of([frame])
        assert caught.value.frame == 0


def test_truncate_counts_as_other_rows() -> None:
    old = b"O" + tuple_data(text("1"), text("y"))
    update = row("U", old + b"N" + tuple_data(text("1"), text("x")), OID)
    batches = batches_of([R, update, truncate(OID), i(1)], max_bytes=142)
    assert [column([batch], "op") for batch in batches] == [["update"], ["truncate", "insert"]]


MEMORY = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
takes_6_gb = pytest.mark.skipif(MEMORY < 12 << 30, reason="takes 6 GB of memory")


@pytest.mark.slow
@takes_6_gb
def test_offsets_of_32_bits_cut_a_batch(implementation: str) -> None:
    for size in (100_000_000,) if implementation == "python" else (100_000_000, 1_000_000):
        count = 2_200_000_000 // size
        big = insert(text("1"), text("a" * size))
        decoder = pf.ColumnarDecoder(max_bytes=1 << 40)
        found = []
        for batch in decoder.decode([R, *[big] * count]):
            name = pa.record_batch(batch).column("after").field("name")
            found.append(len(batch))
            assert pc.binary_length(name).unique().to_pylist() == [size]
        assert found == [0x7FFFFFFF // size, count - 0x7FFFFFFF // size]


@pytest.mark.slow
@takes_6_gb
def test_names_of_what_was_not_sent_cut_a_batch() -> None:
    name = "c" * 100_000_000
    update = row("U", b"N" + tuple_data(text("1"), SAME))
    batches = batches_of([relation([("id", 23), (name, 25)]), *[update] * 22], max_bytes=1 << 40)
    assert [len(batch) for batch in batches] == [21, 1]


def test_memory_is_not_reserved_for_all_tables_that_once_were_large() -> None:
    # Each had a batch of 4 MB; that their next ones are like it is not to be expected.
    large = "x" * 4_000_000
    oids = range(20_000, 20_040)
    decoder = pf.ColumnarDecoder(max_bytes=8 << 20)
    for oid in oids:
        list(decoder.decode([relation(TWO, oid), i(1, large, relation_id=oid)]))
    batches = list(decoder.decode([i(1, relation_id=oid) for oid in oids]))
    assert [len(batch) for batch in batches] == [1] * len(oids)
    assert sum(batch.nbytes for batch in batches) < 8 << 20


def test_what_is_full_is_given_out_of_all_tables() -> None:
    other = relation(TWO, OTHER, "u")
    frames = [R, other, i(1), i(2, relation_id=OTHER), truncate(OTHER), i(3)]
    batches = batches_of(frames, max_bytes=150)
    assert [(b.relation.name, len(b)) for b in batches] == [("t", 1), ("u", 1), ("u", 1), ("t", 1)]
    assert column(batches, "seq") == [0, 1, 2, 3]


def test_tables_without_rows_give_nothing() -> None:
    frames = [R, i(1), insert(text("x"), NULL), truncate(OID)]
    assert batches_of(frames[:2], tables="public.u") == []
    decoder = pf.ColumnarDecoder(on_error="collect")
    assert list(decoder.decode([R, frames[2]])) == []
    assert len(decoder.errors) == 1


def test_selected_columns() -> None:
    frames = [R, i(1), relation(TWO, OTHER, "u"), i(2, relation_id=OTHER)]
    batches = batches_of(frames, columns={"*.u": ["name"]})
    assert column(batches, "after") == [{"id": 1, "name": "a"}, {"name": "a"}]
    # What is not wanted is not looked at.
    assert column(batches_of([R, insert(text("x"), text("y"))], columns="name"), "after") == [
        {"name": "y"}
    ]
    with expect_error(code="no_table", table="public.t"):
        batches_of(frames, columns=["nope"])


def test_a_table_without_the_columns_ends_a_call_behind_the_rows_before_it() -> None:
    other = relation([("x", 25)], OTHER, "u")
    decoder = pf.ColumnarDecoder(columns=["id"])
    batches = decoder.decode([R, i(1), other, insert(text("a"), relation_id=OTHER), i(2)])
    assert [after["id"] for after in column([next(batches)], "after")] == [1]
    with expect_error(code="no_table", table="public.u"):
        next(batches)
    assert decoder.next_frame == 3
    assert column(list(decoder.decode([i(2)])), "seq") == [1]


def test_streams_of_batches() -> None:
    batches = batches_of([R, *[i(n) for n in range(3)]], max_rows=2)
    table = pa.table(pf.ChangeStream(batches))
    assert table.num_rows == 3
    assert table.schema.metadata[b"pgoutput.relation"] == b"t"
    assert table.column("after").num_chunks == 2
    assert pa.table(batches[0]).num_rows == 2
    other = batches_of([R, i(1)])
    with expect_error(code="unfit_input"):
        pf.ChangeStream([*batches, *other])
    with expect_error(code="unfit_input"):
        pf.ChangeStream([])


@pytest.mark.parametrize("target", ["arrow", "spark", "portable"])
def test_a_part_has_the_rows_and_shares_the_memory(target: Any) -> None:
    update = row("U", b"K" + tuple_data(text("1"), NULL) + b"N" + tuple_data(text("2"), SAME))
    frames = [
        begin(5, 0x50, 6),
        R,
        i(1),
        update,
        i(3),
        row("D", b"K" + tuple_data(text("3"), NULL)),
    ]
    (batch,) = batches_of(frames, target=target)
    whole = pa.record_batch(batch)
    for start, end in itertools.combinations(range(5), 2):
        part = batch.part(start, end)
        read = pa.record_batch(part)
        read.validate(full=True)
        assert read.equals(whole.slice(start, end - start), check_metadata=True)
        assert [one.null_count for one in read] == [
            one.null_count for one in whole.slice(start, end - start)
        ]
        assert (len(part), part.num_rows, part.nbytes) == (
            end - start, end - start, batch.nbytes * (end - start) // 4,
        )  # fmt: skip
        assert (part.layout, part.binary) == (batch.layout, batch.binary)
        for buffer, own in zip(whole["lsn"].buffers(), read["lsn"].buffers(), strict=True):
            assert (buffer and buffer.address) == (own and own.address)
    again = batch.part(1, 4).part(1, 3)
    del batch
    gc.collect()
    assert pa.record_batch(again).equals(whole.slice(2, 2))
    filled = again.with_commit(7, 8)
    assert pa.record_batch(filled).equals(whole.slice(2, 2))
    assert pa.record_batch(filled.part(1, 2)).equals(whole.slice(3, 1))


@pytest.mark.parametrize("target", ["arrow", "spark"])
def test_a_part_of_a_part_is_read_and_committed(target: Any) -> None:
    frames = [begin(5, 0x50, 6), R, i(0), commit(), stream_start(9), relation(TWO, xid=9)]
    (batch,) = batches_of([*frames, i(1, xid=9), i(2, xid=9)], target=target)
    parts = batch.part(0, 3).part(1, 3), batch.part(1, 2)
    filled = [part.with_commit(0x200, 8) for part in parts]
    assert [column([one], "commit_lsn") for one in filled] == [[0x200, 0x200], [0x200]]
    assert column([batch.part(0, 2).with_commit(0x200, 8)], "commit_lsn") == [0x50, 0x200]
    read = batch.part(1, 3).as_read(0x300, 9, 5).part(1, 2)
    assert [column([read], name) for name in ("op", "xid", "commit_lsn", "seq")] == [
        ["read"], [None], [0x300], [6],
    ]  # fmt: skip
    assert pa.record_batch(read)["after"].to_pylist() == [{"id": 2, "name": "a"}]


def test_a_part_has_no_other_rows() -> None:
    (batch,) = batches_of([R, i(1), i(2)])
    for start, end in ((-1, 1), (0, 3), (2, 1)):
        with pytest.raises(IndexError):
            batch.part(start, end)
    assert pa.record_batch(batch.part(2, 2)).num_rows == 0


@pytest.mark.slow
def test_batches_outlive_their_decoder_and_are_freed(implementation: str) -> None:
    compiled = implementation == "cython"  # the twin's memory is Python's
    live_arenas = twin("columnar._export").live_arenas if compiled else lambda: 0
    gc.collect()
    before = live_arenas()
    (batch,) = batches_of([R, i(1), row("U", b"N" + tuple_data(text("2"), SAME))])
    filled = batch.with_commit(1, 2)
    read, child = pa.record_batch(batch), pa.record_batch(filled).column("after").field(1)
    stream = pf.ChangeStream([batch]).__arrow_c_stream__()
    batch.__arrow_c_array__()  # capsules that nobody reads
    assert live_arenas() == before + 2 * compiled
    del batch, filled, stream
    assert read.column("after").to_pylist()[0] == {"id": 1, "name": "a"}
    assert child.to_pylist() == ["a", None]
    del read, child
    gc.collect()
    assert live_arenas() == before


# --- what is no row ------------------------------------------------------------------------------


def test_events() -> None:
    message = testing.message("p", b"hi", 0x90, 1)
    decoder = pf.ColumnarDecoder()
    frames = [begin(7, 0x100, 5), R, message, i(1), truncate(OID), commit(0x100, 0x130, 5)]
    assert len(list(decoder.decode(frames))) == 1
    told = [(e.frame, e.tag, e.xid, e.subxid) for e in decoder.events]
    assert told == [(1, "R", 7, None), (2, "M", 7, None), (4, "T", 7, None), (5, "C", 7, None)]
    assert decoder.events[1].message.content == b"hi"
    last = decoder.events[3]
    assert (last.message, last.commit_lsn, last.end_lsn, last.commit_time) == (
        None, 0x100, 0x130, 5,
    )  # fmt: skip
    assert decoder.events.array["xid"].tolist() == [7] * 4
    list(decoder.decode([commit()]))
    assert decoder.events[0].xid is None
    assert repr(decoder.events) == "<Events: 1>"


# --- errors --------------------------------------------------------------------------------------


def test_what_was_decoded_before_a_bad_frame_is_given_out() -> None:
    decoder = pf.ColumnarDecoder()
    found: list[Any] = []
    bad = insert(text("x"), NULL)
    with expect_error(pf.DecodeError, code="bad_value", frame=2):
        found.extend(decoder.decode([R, i(1), bad, i(2)]))
    assert decoder.next_frame == 2
    assert column(found, "seq") == [0]
    assert column(list(decoder.decode([i(2)])), "seq") == [1]


def test_collected_frames() -> None:
    decoder = pf.ColumnarDecoder(on_error="collect")
    bad = insert(text("x"), NULL)
    (batch,) = decoder.decode([R, i(1), bad, b"", i(2)], lsns=[1, 2, 3, 4, 5])
    assert column([batch], "seq") == [0, 2]
    assert decoder.next_frame == 5
    first, second = decoder.errors
    assert (first.frame, first.lsn, first.error.code, first.data) == (2, 3, "bad_value", bad)
    read = pa.record_batch(decoder.errors)
    assert read.drop_columns(["message"]).to_pylist() == [
        {"frame": 2, "lsn": 3, "tag": "I", "code": "bad_value", "offset": 13, "data": bad},
        {"frame": 3, "lsn": 4, "tag": None, "code": "empty_frame", "offset": 0, "data": b""},
    ]
    assert read.column("message")[0].as_py() == str(first.error)
    assert decoder.errors[1:] == [second]
    list(decoder.decode([]))
    assert len(decoder.errors) == 0


def test_after_a_bad_relation_it_is_unknown_until_the_next() -> None:
    decoder = pf.ColumnarDecoder(on_error="collect")
    frames = [R, i(1), R[:-1], i(2), R, i(3)]
    batches = list(decoder.decode(frames))
    assert [after["id"] for after in column(batches, "after")] == [1, 3]
    assert column(batches, "seq") == [0, 2]
    assert [(bad.frame, bad.error.code) for bad in decoder.errors] == [
        (2, "truncated"),
        (3, "unknown_relation"),
    ]


def test_collected_frames_count_their_rows() -> None:
    decoder = pf.ColumnarDecoder(on_error="collect")
    frames = [R, i(1), i(2, relation_id=OTHER), i(3), truncate(OTHER, OTHER + 1), i(4), b"T", i(5)]
    assert column(list(decoder.decode(frames)), "seq") == [0, 2, 5, 6]
    assert [bad.frame for bad in decoder.errors] == [2, 4, 6]


def test_a_bound_that_cannot_be_in_a_chunk_does_not_end_it() -> None:
    decoder = pf.ColumnarDecoder(on_error="collect")
    row = testing.in_stream(i(1), 50)
    announced = testing.in_stream(R, 50)
    for bad in (commit(), b"P", b"C"):
        decoder.reset()
        frames = [stream_start(50), announced, row, row, bad, row, STREAM_STOP]
        batches = list(decoder.decode(frames))
        assert column(batches, "seq") == [0, 1, 2]


@pytest.mark.parametrize(
    ("begun", "bad"), [(begin(50), commit()), (testing.begin_prepare(50), testing.prepare(50))]
)
def test_a_bad_end_of_a_transaction_ends_it(begun: bytes, bad: bytes) -> None:
    decoder = pf.ColumnarDecoder(on_error="collect")
    batches = list(decoder.decode([begun, R, i(1), bad[:5], i(2)]))
    assert column(batches, "xid") == [50, None]
    assert column(batches, "seq") == [0, 0]
    assert [(bad.frame, bad.error.code) for bad in decoder.errors] == [(3, "truncated")]


def test_after_a_bad_stream_commit_what_it_announced_is_unknown() -> None:
    decoder = pf.ColumnarDecoder(on_error="collect")
    other = relation([("id", 23), ("other", 25)])
    frames = [
        R, stream_start(50), testing.in_stream(other, 50), STREAM_STOP,
        stream_commit(50)[:-1], i(1), R, i(2),
    ]  # fmt: skip
    batches = list(decoder.decode(frames))
    assert [after["id"] for after in column(batches, "after")] == [2]
    assert [(bad.frame, bad.error.code) for bad in decoder.errors] == [
        (4, "truncated"), (5, "unknown_relation"),
    ]  # fmt: skip


def test_after_a_bad_type_relations_that_use_it_are_unknown() -> None:
    decoder = pf.ColumnarDecoder(on_error="collect")
    mood = type_frame(16400, "app", "mood")
    uses = relation([("id", 23), ("m", 16400)])
    frames = [mood[:-1], uses, i(1), mood, uses, i(2)]
    batches = list(decoder.decode(frames))
    assert [after["id"] for after in column(batches, "after")] == [2]
    assert [bad.frame for bad in decoder.errors] == [0, 2]


@pytest.mark.parametrize(
    ("before", "bad"),
    [
        ([], stream_start(9)[:-1]),
        ([], STREAM_STOP),
        ([stream_start(9)], STREAM_STOP + b"\0"),
        ([], begin(7)[:-1]),
    ],
)
def test_bounds_of_transactions_are_never_collected(before: list[bytes], bad: bytes) -> None:
    decoder = pf.ColumnarDecoder(on_error="collect")
    with pytest.raises(pf.DecodeError):
        list(decoder.decode([*before, bad]))
    assert decoder.next_frame == len(before)


@pytest.mark.parametrize(
    ("frames", "lsns", "frame", "offset"),
    [
        ([begin(7, 1 << 63)], None, 0, 1),
        ([R, i(1)], np.array([0, 1 << 63], np.uint64), 1, 0),
        ([R, truncate(OID)], np.array([0, 1 << 63], np.uint64), 1, 0),
        ([R, i(1), i(2)], np.array([0, 1, 1 << 63], np.uint64), 2, 0),
    ],
)
def test_lsns_past_a_long_are_out_of_sparks_range(
    frames: list[bytes], lsns: Any, frame: int, offset: int
) -> None:
    with expect_error(pf.DecodeError, code="out_of_range", frame=frame, offset=offset):
        batches_of(frames, lsns=lsns, target="spark")
    batches_of(frames, lsns=lsns)


def test_times_that_no_timestamp_holds() -> None:
    most = (1 << 63) - 1 - SHIFT
    (batch,) = batches_of([begin(7, 1, most), R, i(1)])
    times = pa.record_batch(batch).column("commit_time").cast(pa.int64()).to_pylist()
    assert times == [(1 << 63) - 1]
    with expect_error(pf.DecodeError, code="out_of_range", offset=9):
        batches_of([begin(7, 1, most + 1)])


@pytest.mark.parametrize(
    ("options", "parameter"),
    [
        ({"target": "polars"}, "target"),
        ({"on_error": "skip"}, "on_error"),
        ({"max_rows": 0}, "max_rows"),
        ({"max_bytes": -1}, "max_bytes"),
        ({"encoding": "nope"}, "encoding"),
    ],
)
def test_options_are_checked(options: dict[str, Any], parameter: str | None) -> None:
    with expect_error(code="bad_option", parameter=parameter):
        pf.ColumnarDecoder(**options)


@pytest.mark.parametrize(
    "options", [{"max_rows": 1.5}, {"tables": [1]}, {"columns": {"*": [b"id"]}}, {"policies": {}}]
)
def test_types_of_options_are_checked(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(TypeError, match=name):
        pf.ColumnarDecoder(**options)


@pytest.mark.parametrize(
    ("lsns", "error"),
    [([1], ValueError), ([1, -1], ValueError), ([1.5, 2], TypeError), (["a", "b"], TypeError)],
)
def test_lsns_are_checked(lsns: list[Any], error: type[Exception]) -> None:
    decoder = pf.ColumnarDecoder()
    with pytest.raises(error):
        decoder.decode([R, i(1)], lsns=lsns)
    assert column(list(decoder.decode([R, i(1)])), "lsn") == [None]


@pytest.mark.parametrize(
    ("choice", "value", "expected"),
    [
        ("clamp", "Infinity", Decimal("999.99")),
        ("clamp", "-Infinity", Decimal("-999.99")),
        ("null", "NaN", None),
        ("null", "-Infinity", None),
        ("clamp", "NaN", "out_of_range"),
        ("error", "NaN", "out_of_range"),
        ("error", "-Infinity", "out_of_range"),
        ("text", "NaN", "NaN"),
    ],
)
def test_what_a_decimal_does_not_hold(choice: str, value: str, expected: Any) -> None:
    numeric = relation([("n", 1700)])
    specials = {"NaN": 0xC000, "Infinity": 0xD000, "-Infinity": 0xF000}
    in_binary = struct.pack(">HhHH", 0, 0, specials[value], 0)
    for sent in (text(value), binary(in_binary)):
        frames = [numeric, insert(sent)]
        policies = pf.Policies(special_values=choice, numeric=(5, 2))
        if isinstance(expected, str) and choice != "text":
            policy = ("special_values", "null")
            with expect_error(pf.DecodeError, code=expected, frame=1, policy=policy) as caught:
                batches_of(frames, policies=policies)
            assert ("'clamp'" in str(caught.value)) == (value != "NaN")  # NaN has no nearest value
        else:
            assert column(batches_of(frames, policies=policies), "after") == [{"n": expected}]


@pytest.mark.parametrize(("type_name", "names"), [("numeric", True), ("numeric(5,2)", False)])
@pytest.mark.parametrize("value", ["1000", "0.001"])
def test_a_number_beyond_a_policy(value: str, type_name: str, names: bool) -> None:
    """The policy is named where it decides, and not where the column's own type does."""
    table = testing.Table("t", {"n": type_name})
    frames = [table.relation(), testing.insert(table, [value])]
    with pytest.raises(pf.DecodeError) as caught:
        batches_of(frames, policies=pf.Policies(numeric=(5, 2)))
    assert caught.value.code == "out_of_range"
    assert caught.value.column == "n"
    assert (" policy numeric " in str(caught.value)) == names


@pytest.mark.parametrize(
    ("oid", "value", "said"),
    [
        (1082, "infinity", "infinity"),
        (1114, "0044-03-15 12:00:00 BC", "BC"),
        (1184, "-infinity", "-infinity"),
        (1083, "24:00:00", "24:00:00"),
    ],
)
@pytest.mark.parametrize("target", ["arrow", "spark", "portable"])
def test_what_a_column_does_not_hold(oid: int, value: str, said: str, target: str) -> None:
    """The error speaks of what fits, not of Python, whose objects a column has none of."""
    policy = "infinity" if "infinity" in value else "out_of_range"
    with expect_error(pf.DecodeError, code="out_of_range", column="v") as caught:
        batches_of([relation([("v", oid)]), insert(text(value))], target=target)
    assert "Python" not in str(caught.value)
    for part in (f" {said} ", f" {policy} ", "'null'", "'clamp'"):
        assert part in str(caught.value)


def test_layouts_are_chosen_by_a_function() -> None:
    """What chooses columns for another reader: it is asked once for each version of a relation."""
    other = relation([("x", 23)], OTHER)
    asked = []

    def layouts(plan: Any) -> Any:
        asked.append(plan.relation.relation_id)
        if plan.relation.relation_id != OID:
            return None
        return layout_of(plan, "arrow", Selection(None, ["name"]))

    decoder = pf.ColumnarDecoder(layouts=layouts)
    frames = [R, other, i(1), insert(text("5"), relation_id=OTHER), i(2)]
    (changes,) = decoder.decode(frames)
    batch = pa.record_batch(changes)
    assert [field.name for field in batch.schema.field("after").type] == ["name"]
    assert batch.column("seq").to_pylist() == [0, 2]
    assert asked == [OID, OTHER]
    assert list(decoder.events.messages) == [0, 1]
    for beside in ({"tables": "public.*"}, {"columns": ["name"]}):
        with expect_error(parameter="layouts"):
            pf.ColumnarDecoder(layouts=layouts, **beside)


@pytest.mark.parametrize("target", ["arrow", "spark", "portable"])
@pytest.mark.parametrize("choice", ["error", "null", "clamp", "text"])
def test_the_last_moment_of_a_day_with_a_zone(target: str, choice: str) -> None:
    """Python's time cannot hold it; text can, whatever the policy says."""
    table = relation([("t", 1266), ("a", 1270)])
    frames = [
        table,
        insert(text("24:00:00+00"), text("{24:00:00-03:30,12:00:00.5+00}")),
        insert(
            binary(struct.pack(">qi", 86_400_000_000, 0)),
            binary(
                struct.pack(">IIIII", 1, 0, 1266, 2, 1)
                + struct.pack(">Iqi", 12, 86_400_000_000, 12_600)
                + struct.pack(">Iqi", 12, 43_200_500_000, 0)
            ),
        ),
    ]
    batches = batches_of(frames, target=target, policies=pf.Policies(out_of_range=choice))
    expected = {"t": "24:00:00+00", "a": ["24:00:00-03:30", "12:00:00.5+00"]}
    assert column(batches, "after") == [expected, expected]


def test_every_byte_of_a_char() -> None:
    """Also in arrays. Version 14 prints each byte as itself, later ones as octal digits."""
    shown = ["", *map(chr, range(1, 128)), *(f"\\{byte:03o}" for byte in range(128, 256))]
    raw = [bytes([byte]) for byte in range(256)]
    octal = [f"\\{byte:03o}".encode() for byte in range(256)]
    for sent in ([binary(one) for one in raw], [text(one) for one in (b"", *raw[1:])],
                 [text(one) for one in raw], [text(one) for one in octal]):  # fmt: skip
        frames = [relation([("c", 18)]), *map(insert, sent)]
        assert [one["c"] for one in column(batches_of(frames), "after")] == shown
    head = struct.pack(">IIIII", 1, 0, 18, 256, 1)
    array = binary(head + b"".join(struct.pack(">I", 1) + one for one in raw))
    assert column(batches_of([relation([("c", 1002)]), insert(array)]), "after") == [{"c": shown}]


@pytest.mark.parametrize(
    "sent",
    [
        binary(b""), binary(b"ab"), binary(rb"\351"), text("ab"), text("abc"), text(r"\351 "),
        text(r"\400"), text(r"\38"), text(r"\380"), text(r"\308"), text(r"\/00"), text("/351"),
        text("0351"), text(r"\35:"),
    ],
)  # fmt: skip
def test_what_is_no_char(sent: tuple[str, bytes]) -> None:
    decoder = pf.ColumnarDecoder(on_error="collect")
    batches = list(decoder.decode([relation([("c", 18)]), insert(text("x")), insert(sent)]))
    assert column(batches, "after") == [{"c": "x"}]
    (bad,) = decoder.errors
    assert (bad.frame, bad.error.code) == (2, "bad_value")


# --- values of any length ------------------------------------------------------------------------
#
# Compiled code reads them 16 or 32 bytes at a time, where there are as many in front of a value or
# behind it: in a buffer with all frames; where frames lie apart, by other ways.


def stored(type_oid: int, values: list[bytes], packed: bool) -> list[Any]:
    """What a column has of each value; the error's code of those that are refused."""
    frames = [relation([("value", type_oid)]), *(insert(text(value)) for value in values)]
    decoder = pf.ColumnarDecoder(on_error="collect")
    if packed:
        ends = np.cumsum([0, *map(len, frames)])
        batches = list(decoder.decode(b"".join(frames), ends))
    else:
        batches = list(decoder.decode(frames))
    found: list[Any] = [None] * len(values)
    for seq, after in zip(column(batches, "seq"), column(batches, "after"), strict=True):
        found[seq] = after["value"]
    for error in decoder.errors:
        found[error.frame - 1] = error.error.code
    return found


def read_as(read: Callable[[str], Any], value: bytes) -> Any:
    try:
        return read(value.decode())
    except UnicodeDecodeError:
        return "bad_encoding"
    except ValueError:
        return "bad_value"


@pytest.mark.parametrize("packed", [False, True])
def test_texts_of_every_length(packed: bool) -> None:
    """Characters of each length, whole and cut off, behind ASCII and in the midst of it."""
    parts = [b"", b"\x80", b"\xc0\x80", b"\xed\xa0\x80", b"\xff"]
    for character in ("é", "€", "🚚"):
        parts += [character.encode()[:n] for n in range(1, 5)]
    sizes = [*range(3), *range(13, 18), *range(29, 35), *range(61, 67)]
    values = [b"x" * n + part + b"y" * m for n in sizes for part in parts for m in (0, 1, 40)]
    assert stored(25, values, packed) == [read_as(str, value) for value in values]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("oid", "bits"), [(21, 16), (23, 32), (20, 64)])
def test_columns_of_integers_of_every_length(oid: int, bits: int, packed: bool) -> None:
    def read(value: str) -> int:
        number = int(value)
        if not -(2 ** (bits - 1)) <= number < 2 ** (bits - 1):
            raise ValueError
        return number

    limit = 2 ** (bits - 1)
    numbers = [limit, limit - 1, -limit, -limit - 1, 0]
    numbers += [sign * 10**n + more for n in range(21) for sign in (1, -1) for more in (0, -1, 7)]
    values = [str(number).encode() for number in numbers]
    values += [
        b"--5",
        b"-",
        b"5-",
        b"1" * 8 + b":" + b"1" * 8,
        b"1" * 8 + b"/" + b"1" * 8,
    ]
    assert stored(oid, values, packed) == [read_as(read, value) for value in values]


@pytest.mark.parametrize("packed", [False, True])
def test_floats_of_every_length(packed: bool) -> None:
    digits = "1234567890123456789012"
    texts = [
        f"{digits[:whole]}.{digits[:behind]}" for whole in range(1, 22) for behind in range(22)
    ]
    texts = [value.removesuffix(".") for value in texts]
    texts += ["0." + "0" * n + digits[:m] for n in range(20) for m in (1, 5, 17)]
    texts += ["0", "9007199254740993", "1e-05", "1.5e+300", "1.7976931348623157e+308", "5e-324"]
    texts += [f"-{value}" for value in texts]
    bad = ["--1.5", "-", "1.5.5", "1..5", "1.2.3456789012345678", "1.5x", "1:5", "1.5-", "1-5.5"]
    bad += ["--1.23456789012345678", "1.234567890123456-8", "12345678901234567.-"]
    told = stored(701, [value.encode() for value in [*texts, *bad]], packed)
    # As text, as -0.0 equals 0.0.
    assert list(map(repr, told[: len(texts)])) == [repr(float(value)) for value in texts]
    assert told[len(texts) :] == ["bad_value"] * len(bad)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("oid", "zone"), [(1114, ""), (1184, "+00")])
def test_timestamps_with_any_fraction(oid: int, zone: str, packed: bool) -> None:
    whole = "2024-02-29 23:59:58"
    day = datetime.datetime(2024, 2, 29, 23, 59, 58, tzinfo=datetime.timezone.utc if zone else None)
    texts, expected = [whole], [day]
    for n in range(1, 7):
        for fraction in ("1" * n, "9" * n, "0" * n, "0" * (n - 1) + "7"):
            texts.append(f"{whole}.{fraction}")
            expected.append(day.replace(microsecond=int(fraction.ljust(6, "0"))))
    bad = [
        f"{whole}.1234567",
        f"{whole}.12x",
        f"{whole}.-1",
        f"{whole},5",
        f"{whole}5",
    ]
    bad += [whole.replace(*one) for one in (("29", "30"), ("2024", "2023"), ("23:", "24:"))]
    bad += [whole.replace(*one) for one in (("02-", "13-"), (":59:", ":60:"), ("58", "61"))]
    bad += [whole[:i] + character + whole[i + 1 :] for i in range(19) for character in ";x"]
    told = stored(oid, [(value + zone).encode() for value in [*texts, *bad]], packed)
    assert told[: len(texts)] == expected
    assert told[len(texts) :] == ["bad_value"] * len(bad)
