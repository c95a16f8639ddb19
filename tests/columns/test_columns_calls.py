"""Calls of a columnar decoder: the forms of their input, what they keep, threads, pickling."""

from __future__ import annotations

import gc
import os
import pickle
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import pytest

pytest.importorskip("pyarrow", reason="reads the batches, and the twin makes them with it")

import numpy as np
import pyarrow as pa
from support.columns.calls import OID, OTHER, R, batches_of, column, i, rows
from support.columns.columnar import IMPLEMENTATIONS, chosen
from support.expected_errors import expect_error
from support.frames.made_vectors import NULL, SAME, binary, insert, relation, row, text, tuple_data
from support.frames.make_frames import (
    STREAM_STOP,
    begin,
    commit,
    stream_start,
)

import pgoutput_fast as pf
from pgoutput_fast.columnar.schema import Layout

ANOTHER_THREAD = "another thread decodes with this decoder [unfit_input]. Give each its own"


@pytest.fixture(autouse=True, params=IMPLEMENTATIONS)
def implementation(request: pytest.FixtureRequest) -> Iterator[str]:
    with chosen(request.param):
        yield request.param


# --- what a decoder knows ------------------------------------------------------------------------


def test_batches_that_were_not_taken_stop_a_decoder() -> None:
    decoder = pf.ColumnarDecoder(max_rows=1)
    taken = decoder.decode([R, i(1), i(2)])
    next(taken)
    with expect_error(code="unfit_input"):
        decoder.decode([i(3)])
    # They are there to be taken still.
    assert [len(batch) for batch in taken] == [1]
    assert column(list(decoder.decode([i(3)])), "seq") == [2]
    # Nobody looks at these.
    decoder.decode([i(4)])
    with expect_error(code="unfit_input"):
        decoder.decode([i(5)])
    decoder.reset()
    taken = decoder.decode([R, i(1), i(2)])
    next(taken)
    taken.close()
    with expect_error(code="unfit_input"):
        decoder.decode([i(3)])


def test_reset_ends_a_call() -> None:
    decoder = pf.ColumnarDecoder(max_rows=1)
    old = decoder.decode([R, i(1), i(2)])
    next(old)
    decoder.reset()
    new = decoder.decode([R, i(3), i(4)])
    assert list(old) == []
    old.close()
    assert [after["id"] for after in column(list(new), "after")] == [3, 4]


def test_a_thread_does_not_disturb_another() -> None:
    decoder = pf.ColumnarDecoder()
    frames = [R] + [i(n) for n in range(2_000)]
    refused = []
    started = threading.Event()

    def disturb() -> None:
        started.set()
        for call in (lambda: decoder.decode(frames), decoder.reset) * 200:
            try:
                call()
            except pf.PgOutputError:
                refused.append(call)

    batches = decoder.decode(frames)
    thread = threading.Thread(target=disturb)
    thread.start()
    started.wait()
    found = list(batches)
    thread.join()
    assert refused
    # All of them, or none if the other thread was first.
    assert sum(map(len, found)) in (0, 2_000)


def test_what_a_decoder_shows_is_refused_while_another_thread_decodes() -> None:
    """The engine's memory moves then: what is read of it may be gone."""
    refused: dict[str, str] = {}
    calls = {
        "events": lambda: decoder.events,
        "state": lambda: decoder.state,
        "pickling": lambda: pickle.dumps(decoder),
        "reset": lambda: decoder.reset(),
    }

    def disturb() -> None:
        for name, call in calls.items():
            try:
                call()
            except pf.PgOutputError as error:
                refused[name] = str(error)

    def disturbed(raw: bytes) -> int:
        # A function of a user's own type runs in the midst of the engine.
        thread = threading.Thread(target=disturb)
        thread.start()
        thread.join()
        return int(raw)

    registry = pf.TypeRegistry()
    registry.register(23, text=disturbed, binary=disturbed, arrow="int32")
    decoder = pf.ColumnarDecoder(registry=registry)
    (batch,) = decoder.decode([R, begin(7), i(1), commit()])
    assert refused == dict.fromkeys(calls, ANOTHER_THREAD)
    assert rows(batch)[0]["after"] == {"id": 1, "name": "a"}
    assert [event.tag for event in decoder.events] == ["R", "C"]
    assert set(decoder.state.relations) == {OID}
    assert repr(decoder) == "<ColumnarDecoder: target arrow, 1 relations>"


CLOSED_WHILE_OTHERS_DECODE = """
import threading
import pgoutput_fast as pf
from pgoutput_fast import testing

table = testing.Table("t", {"id": "int4"})
# The last frame is none that the compiled engine reads by itself.
frames = [testing.relation(table)] + [testing.insert(table, [n]) for n in range(20_000)]
frames.append(testing.message("prefix", b"content"))
running, closed = threading.Event(), threading.Event()

def number(raw):
    # A function of a user's own type runs in the midst of the engine.
    if threading.current_thread() is other and not running.is_set():
        running.set()
        closed.wait(10)
    return int(raw)

class Slow:
    def __init__(self, engine):
        self.engine = engine

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def drop(self):
        self.engine.drop()
        if other.ident is None:
            other.start()
            running.wait(10)

def disturb():
    try:
        decoder.reset()
        print(sum(batch.num_rows for batch in decoder.decode(list(frames))))
    except pf.PgOutputError as error:
        print(error)
    running.set()

other = threading.Thread(target=disturb)
registry = pf.TypeRegistry()
registry.register(23, text=number, binary=number, arrow="int32")
decoder = pf.ColumnarDecoder(registry=registry, max_rows=50)
decoder._engine = Slow(decoder._engine)
batches = decoder.decode(list(frames))
next(batches)
batches.close()
closed.set()
other.join()
decoder.reset()
print(sum(batch.num_rows for batch in decoder.decode(frames)))
"""


@pytest.mark.slow
def test_a_call_that_is_closed_takes_no_frames_from_another_threads_call(
    implementation: str,
) -> None:
    """The engine would read memory that is freed: hence the other process."""
    process = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", CLOSED_WHILE_OTHERS_DECODE],
        capture_output=True,
        env={**os.environ, "PGOUTPUT_FAST_IMPL": implementation},
        timeout=60,
        check=False,
        text=True,
    )
    assert (process.returncode, process.stdout.splitlines()) == (
        0,
        [ANOTHER_THREAD, "20000"],
    ), process.stderr


def test_a_finalizer_of_the_frames_may_call_the_decoder() -> None:
    """It is refused: the engine is in the midst of forgetting them."""
    refused: list[str] = []

    class Data(bytearray):
        def __del__(self) -> None:
            for call in (decoder.reset, lambda: decoder.decode([])):
                try:
                    call()
                except pf.PgOutputError as error:
                    refused.append(str(error))

    decoder = pf.ColumnarDecoder()
    frames = [R, i(1)]
    offsets = np.cumsum([0, *map(len, frames)])
    (batch,) = decoder.decode(Data(b"".join(frames)), offsets)
    assert rows(batch)[0]["after"] == {"id": 1, "name": "a"}
    assert refused == [ANOTHER_THREAD] * 2


def test_frames_that_wait_for_another_thread_do_not_let_it_wait() -> None:
    refused: list[str] = []

    def ask() -> None:
        try:
            decoder.reset()
        except pf.PgOutputError as error:
            refused.append(str(error))

    def frames() -> Iterator[bytes]:
        yield R
        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(10)
        yield i(1)

    decoder = pf.ColumnarDecoder()
    (batch,) = decoder.decode(frames())
    assert batch.num_rows == 1
    assert refused == [ANOTHER_THREAD]


def known_layouts() -> int:
    gc.collect()
    return sum(type(thing) is Layout for thing in gc.get_objects())


@pytest.mark.slow
def test_a_table_that_is_altered_again_and_again_takes_no_more_memory() -> None:
    before = known_layouts()
    decoder = pf.ColumnarDecoder()
    kept = relation([("kept", 23)], OTHER, "u")
    first = list(decoder.decode([kept, insert(text("0"), relation_id=OTHER)]))
    for n in range(2_500):
        batches = list(decoder.decode([relation([(f"c{n}", 23)]), insert(text(str(n)))]))
        assert [rows(batch)[0]["after"] for batch in batches] == [{f"c{n}": n}]
        if n % 250 == 249:
            assert known_layouts() - before <= 1_024 + 2
    # What is announced stays: its batches go into one stream.
    again = list(decoder.decode([insert(text("1"), relation_id=OTHER)]))
    assert pa.table(pf.ChangeStream(first + again)).num_rows == 2


@pytest.mark.slow
def test_tables_made_again_and_again_take_no_more_memory() -> None:
    before = known_layouts()
    decoder = pf.ColumnarDecoder()
    for oid in range(20_000, 25_000):
        made = relation([("id", 23)], oid)
        (batch,) = decoder.decode([made, insert(text("1"), relation_id=oid)])
        assert batch.num_rows == 1
    # Of tables that are gone a decoder knows 2,002 at most.
    assert known_layouts() - before <= 1_024 + 2_002 + 2


def test_reset_drops_what_was_open() -> None:
    decoder = pf.ColumnarDecoder()
    list(decoder.decode([begin(7), R, i(1)]))
    decoder.reset()
    assert column(list(decoder.decode([i(2)])), "xid") == [None]
    list(decoder.decode([stream_start(9)]))
    decoder.reset()
    assert decoder.state.open_xid is None


def test_a_decoder_goes_on_from_another() -> None:
    messages = pf.Decoder(pf.Policies(numeric=(6, 2)), "latin1")
    for frame in (begin(7, 0x70, 1), relation([("n", 1700)]), insert(text("1"))):
        messages.decode(frame)
    decoder = pf.ColumnarDecoder(decoder=messages)
    (batch,) = decoder.decode([insert(text("2"))])
    told = rows(batch)[0]
    assert (told["xid"], told["commit_lsn"], told["seq"]) == (7, 0x70, 1)
    assert told["after"] == {"n": Decimal("2.00")}
    assert messages.state.row == 1
    (other,) = pf.ColumnarDecoder(pf.Policies(), messages).decode([insert(text("2"))])
    assert rows(other)[0]["after"] == {"n": "2"}


@pytest.mark.parametrize("unpickling", IMPLEMENTATIONS)
def test_pickled(unpickling: str) -> None:
    decoder = pf.ColumnarDecoder(target="spark", max_rows=1, tables="public.t")
    list(decoder.decode([begin(7, 0x70, 1), R, i(1)]))
    with chosen(unpickling):
        again = pickle.loads(pickle.dumps(decoder))
        assert type(again._engine).__module__.endswith(
            {"cython": "._engine", "python": "._pure_engine"}[unpickling]
        )
        batches = list(again.decode([i(2), i(3), commit()]))
        assert column(batches, "seq") == [1, 2]
        assert column(batches, "xid") == [7, 7]
        assert pa.schema(batches[0]).field("xid").type == pa.int64()
        assert [e.xid for e in again.events] == [7]
    assert repr(again) == "<ColumnarDecoder: target spark, 1 relations>"


# --- what frames come in -------------------------------------------------------------------------

FRAMES = [begin(7), R, i(1, "a" * 20), i(2), commit()]
PACKED = b"".join(FRAMES)
OFFSETS = [0, *np.cumsum([len(frame) for frame in FRAMES]).tolist()]


class Foreign:
    """An Arrow array that is not pyarrow's own, as an array or as a stream."""

    def __init__(self, array: Any) -> None:
        name = "__arrow_c_stream__" if hasattr(array, "__arrow_c_stream__") else "__arrow_c_array__"
        setattr(type(self), name, lambda self, requested=None: getattr(array, name)())


def foreign(array: Any) -> Any:
    return type("Foreign", (Foreign,), {})(array)


INPUTS: dict[str, Any] = {
    "list": lambda: (FRAMES, None),
    "buffers": lambda: ([bytearray(FRAMES[0]), *map(memoryview, FRAMES[1:])], None),
    "generator": lambda: (iter(FRAMES), None),
    "packed": lambda: (PACKED, OFFSETS),
    "packed array": lambda: (
        np.frombuffer(b"??" + PACKED, np.uint8),
        np.array(OFFSETS, np.uint32) + 2,
    ),
    "binary": lambda: (pa.array(FRAMES), None),
    "large": lambda: (pa.array(FRAMES, pa.large_binary()), None),
    "view": lambda: (pa.array(FRAMES, pa.binary_view()), None),
    "sliced": lambda: (pa.array([b"?", None, *FRAMES, b"?"]).slice(2, 5), None),
    "sliced large": lambda: (pa.array([b"?", *FRAMES], pa.large_binary()).slice(1), None),
    "sliced view": lambda: (pa.array([b"?", *FRAMES], pa.binary_view()).slice(1), None),
    "chunked": lambda: (pa.chunked_array([FRAMES[:1], [], FRAMES[1:]], pa.binary()), None),
    "foreign": lambda: (foreign(pa.array(FRAMES)), None),
    "foreign stream": lambda: (foreign(pa.chunked_array([FRAMES[:2], FRAMES[2:]])), None),
    "batch": lambda: (pf.decode_batch(FRAMES), None),
}


@pytest.mark.parametrize("name", INPUTS)
def test_frames_come_in_many_ways(name: str) -> None:
    (batch,) = pf.ColumnarDecoder().decode(*INPUTS[name]())
    assert column([batch], "after") == [{"id": 1, "name": "a" * 20}, {"id": 2, "name": "a"}]
    if name == "generator":
        return
    assert pf.decode_batch(*INPUTS[name]()).tags.tobytes() == b"BRIIC" or name == "batch"


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), pa.binary_view()], ids=str)
def test_a_null_is_no_frame(kind: Any) -> None:
    for data, index in (
        (pa.array([FRAMES[0], None], kind), 1),
        (pa.array([None, FRAMES[0], None], kind).slice(1), 1),
        (pa.chunked_array([pa.array(FRAMES, kind), pa.array([b"", None], kind)]), 6),
    ):
        with expect_error(code="unfit_input", frame=index):
            pf.decode_batch(data)
        with expect_error(code="unfit_input", frame=index):
            pf.ColumnarDecoder().decode(data)


@pytest.mark.parametrize(
    ("data", "offsets", "error"),
    [
        (PACKED, [0, 5, 4], ValueError),
        (PACKED, [-1, 5], ValueError),
        (PACKED, [0, 150], ValueError),
        (PACKED, [], ValueError),
        (PACKED, [0.5, 2], ValueError),
        (PACKED, np.zeros((2, 2), int), ValueError),
        (PACKED, np.array([1 << 63], np.uint64), ValueError),
        (memoryview(PACKED)[::2], [0], TypeError),
        (5, [0], TypeError),
        (PACKED, None, TypeError),
        ([5], None, TypeError),
        (5, None, TypeError),
        (pa.array(["a"]), None, TypeError),
        (pa.array([1]), None, TypeError),
    ],
)
def test_unsound_input(data: Any, offsets: Any, error: type[Exception]) -> None:
    for decode in (pf.decode_batch, pf.ColumnarDecoder().decode):
        with pytest.raises(error):
            decode(data, offsets)


def test_arrow_offsets_that_fall() -> None:
    offsets, values = (pa.py_buffer(b) for b in (struct.pack("=3i", 0, 5, 2), PACKED))
    unsound = pa.Array.from_buffers(pa.binary(), 2, [None, offsets, values])
    with pytest.raises(ValueError, match=r"offset"):
        pf.decode_batch(unsound)


def test_without_pyarrow_the_twin_says_so(
    implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (batch,) = batches_of([R, i(1)])
    data = foreign(pa.array(FRAMES))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    if implementation == "cython":
        assert len(batch.__arrow_c_array__()) == 2
        assert len(pf.decode_batch(data)) == 5
        return
    for call in (batch.__arrow_c_array__, lambda: pf.decode_batch(data)):
        with expect_error(code="missing_package"):
            call()
    assert len(pf.decode_batch(FRAMES)) == 5


def test_headers_and_slices() -> None:
    old = b"O" + tuple_data(text("1"), NULL) + b"N" + tuple_data(SAME, binary(b"abc"))
    frames = pf.decode_batch([begin(7, 0x70, 6), R, row("U", old), commit(0x70, 0x90, 6)])
    assert frames.tags.tolist() == list(b"BRUC")
    assert frames.xids.tolist() == [7, 0, 0, 0]
    assert frames.relation_ids.tolist() == [0, OID, OID, 0]
    assert frames.old_kinds.tolist() == [0, 0, ord("O"), 0]
    assert (frames.old_columns.tolist(), frames.new_columns.tolist()) == ([0, 0, 2, 0],) * 2
    assert frames.first_slices.tolist() == [0, 0, 0, 4]
    offsets, lengths = frames.slices["offset"], frames.slices["length_and_kind"]
    assert offsets.tolist() == [13, 15, 19, 24]
    assert [(int(n) >> 2, int(n) & 3) for n in lengths] == [(1, 2), (0, 0), (0, 1), (3, 3)]
    assert frames.begins.tolist() == [(0, 0x70, 6, 7, 0)]
    assert frames.commits.tolist()[0][:5] == (3, 0x70, 0x90, 6, 0)
    assert list(frames.messages) == [1]
    assert frames.messages[1].name == "t"
    assert (len(frames), repr(frames)) == (4, "<FrameBatch: 4 frames, 4 columns>")


def test_the_open_chunk_is_handed_on() -> None:
    first = pf.decode_batch([stream_start(9), i(1, xid=10)])
    assert (first.in_stream, first.xids.tolist()) == (9, [9, 10])
    assert pf.decode_batch([i(2, xid=10)], None, first.in_stream).in_stream == 9
    assert pf.decode_batch([i(2, xid=10)], None, True).in_stream is True
    assert pf.decode_batch([STREAM_STOP], None, True).in_stream is False
    with expect_error(pf.DecodeError, code="stream_order", frame=1):
        pf.decode_batch([i(2, xid=10), begin(7)], None, 9)
    with pytest.raises(OverflowError):
        pf.decode_batch([], None, 1 << 32)
