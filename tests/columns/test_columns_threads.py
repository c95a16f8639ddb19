"""Threads that decode columns, and batches that go from one thread to another.

With or without the GIL, what threads share gives the right result or an error.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("pyarrow", reason="it reads the batches")

import pyarrow as pa
from support.columns.columnar import IMPLEMENTATIONS, chosen
from support.frames.make_frames import OID, begin, commit, insert
from support.threads import THREADS, frequent_switches, in_threads

import pgoutput_fast as pf
from pgoutput_fast._impl import twin

ROUNDS = 20
TABLE = pf.testing.Table("t", {"id": "int4", "name": "text", "price": "numeric(10,2)"}, OID)
FRAMES = [TABLE.relation()]
for xid in range(1, 11):
    FRAMES += [begin(xid), insert(b"%d" % xid, b"text" * xid, b"1.50"), commit()]
IDS = list(range(1, 11))

pytestmark = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


@pytest.fixture(autouse=True)
def implementation_of_columns(implementation: str) -> Iterator[None]:
    with frequent_switches(), chosen(implementation):
        yield


def ids(batch: Any) -> list[int]:
    """The values of the first column."""
    return [row["after"]["id"] for row in pa.record_batch(batch).to_pylist()]


def test_threads_with_columnar_decoders_of_their_own() -> None:
    def work() -> list[Any]:
        decoder = pf.ColumnarDecoder(max_rows=3)
        found = []
        for _ in range(ROUNDS):
            batches = [pa.record_batch(batch) for batch in decoder.decode(FRAMES)]
            found.append(pa.Table.from_batches(batches).to_pylist())
        return found

    expected = work()
    assert [row["after"]["id"] for row in expected[0]] == IDS
    assert in_threads(work) == [expected] * THREADS


def test_threads_that_share_a_columnar_decoder() -> None:
    """Each call has all of its rows, or is refused."""
    decoder = pf.ColumnarDecoder(max_rows=3)
    codes: set[str | None] = set()

    def work() -> list[list[int]]:
        found = []
        for _ in range(ROUNDS):
            try:
                batches = list(decoder.decode(FRAMES))
                repr(decoder), decoder.state, decoder.events
            except pf.PgOutputError as error:
                codes.add(error.code)
            else:
                found.append([number for batch in batches for number in ids(batch)])
        return found

    found = [one for results in in_threads(work) for one in results]
    assert found
    assert found == [IDS] * len(found)
    assert codes <= {"unfit_input"}
    assert [number for batch in decoder.decode(FRAMES) for number in ids(batch)] == IDS


def test_batches_from_thread_to_thread(implementation: str) -> None:
    """Each batch is read by all threads at once, and freed by the last, after its decoder."""
    compiled = implementation == "cython"
    live_arenas = twin("columnar._export").live_arenas if compiled else lambda: 0
    before = live_arenas()
    batches: queue.Queue[Any] = queue.Queue()

    def read() -> list[list[int]]:
        found = []
        for batch in iter(batches.get, None):
            parts = [batch.part(0, 1), batch.part(1, len(batch))]
            found.append([number for part in parts for number in ids(part)])
            assert ids(batch.with_commit(0x200, 7)) == ids(batch) == found[-1]
            assert ids(batch.as_read(0x200, 7, 0)) == found[-1]
            stream = pa.RecordBatchReader.from_stream(batch)
            assert stream.read_all().num_rows == batch.num_rows == len(found[-1])
        return found

    def decode_all() -> None:
        for _ in range(ROUNDS):
            for batch in pf.ColumnarDecoder(max_rows=5).decode(FRAMES):
                for _ in range(THREADS):
                    batches.put(batch)
        for _ in range(THREADS):
            batches.put(None)

    thread = threading.Thread(target=decode_all)
    thread.start()
    found = [one for results in in_threads(read) for one in results]
    thread.join()
    expected = [IDS[:5], IDS[5:]] * ROUNDS * THREADS
    assert sorted(found) == sorted(expected)
    assert live_arenas() == before


def test_frames_from_thread_to_thread() -> None:
    """All threads decode one result of decode_batch()."""
    frames = pf.decode_batch(FRAMES)

    def work() -> list[list[int]]:
        return [
            [number for batch in pf.ColumnarDecoder().decode(frames) for number in ids(batch)]
            for _ in range(ROUNDS)
        ]

    assert in_threads(work) == [[IDS] * ROUNDS] * THREADS
