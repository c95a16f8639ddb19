"""The batches of transactions that came together: what each gives if it is decoded by itself."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pgoutput_fast as pf
from pgoutput_fast._impl import twin
from pgoutput_fast.testing import Server, Table, UserType, strategies
from pgoutput_fast.transactions import Assembler, Transaction, transaction
from pgoutput_fast.transactions.context import columnar_decoder
from pgoutput_fast.transactions.runs import Run
from pgoutput_fast.types.registry import CatalogType, TypeRegistry

pa = pytest.importorskip("pyarrow", reason="the twin makes Arrow arrays with it")
from support.columns.columnar import IMPLEMENTATIONS, chosen, exact  # noqa: E402 - it needs pyarrow
from support.frames.comparison import refused  # noqa: E402

ONE = Table("one", {"id": "int4", "note": "text"}, 16400, replica_identity="f")
TWO = Table("two", {"id": "int8"}, 16500)
SETTINGS = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(params=IMPLEMENTATIONS, autouse=True)
def implementation(request: pytest.FixtureRequest) -> Iterator[str]:
    with chosen(request.param):
        yield request.param


def described(batch: Any) -> tuple[Any, ...]:
    """A batch with its schema, what it says of itself, and its columns without their offsets."""
    columns = pa.record_batch(batch)
    columns.validate(full=True)
    own = columns.take(pa.array(range(len(columns))))
    return (
        repr(batch),
        batch.num_rows,
        batch.binary,
        repr(batch.relation),
        columns.schema.to_string(truncate_metadata=False, show_field_metadata=True),
        [column.null_count for column in columns.columns],
        [exact(column) for column in own.columns],
    )


def observed(batches: Iterator[Any]) -> tuple[list[Any], Any]:
    """What is given, and the error at its end."""
    found = []
    try:
        found.extend(map(described, batches))
    except pf.DecodeError as error:
        return found, refused(error)
    return found, None


def decoded_alone(one: Transaction, options: dict[str, Any]) -> Iterator[Any]:
    """What a decoder gives that reads nothing but this transaction."""
    decoder = columnar_decoder(one._before.state(), options)
    for run in one.runs():
        yield from decoder.decode(run.data, run.offsets, run.lsns)


def transactions_of(server: Server, frames: list[bytes] | None = None, **options: Any) -> Any:
    return list(Assembler(**options).feed(frames or server.frames, server.lsns))


def is_shared(one: Transaction) -> bool:
    """Whether the batches of a transaction are parts of larger ones."""
    assert isinstance(one._parts, tuple)
    group, index = one._parts
    return group.parts_of(index) is not None


OPTIONS = st.fixed_dictionaries(
    {
        "target": st.sampled_from(("arrow", "spark")),
        "max_rows": st.sampled_from((1, 2, 5, 65_536)),
        "max_bytes": st.sampled_from((200, 500, 2000, 64 << 20)),
        "on_error": st.sampled_from(("raise", "collect")),
        "fill_unchanged": st.booleans(),
    }
)


@pytest.mark.everyday("cython-in order")
@pytest.mark.parametrize("order", ["in order", "backwards"])
def test_batches_are_those_of_a_decoder_for_each(
    monkeypatch: pytest.MonkeyPatch, order: str
) -> None:
    """Of any stream, with rows that are cut short or have other values than their types."""

    @SETTINGS
    @given(
        strategies.servers(),
        OPTIONS,
        st.sampled_from((1, 300, 1 << 20)),
        st.lists(st.tuples(st.integers(0), st.integers(-20, -1)), max_size=3),
    )
    def run(
        server: Server, options: dict[str, Any], together: int, damages: list[tuple[int, int]]
    ) -> None:
        monkeypatch.setattr(transaction, "_DECODED_TOGETHER", together)
        frames = server.frames
        rows = [i for i, frame in enumerate(frames) if frame[:1] in (b"I", b"U", b"D", b"T")]
        for number, at in damages if rows else ():
            i = rows[number % len(rows)]
            damaged = bytearray(frames[i])
            if 10 - len(damaged) < at:
                damaged[at] ^= 0x11
            frames[i] = bytes(damaged)
        ones = transactions_of(server, frames, **options)
        expected = [observed(decoded_alone(one, options)) for one in ones]
        places = range(len(ones)) if order == "in order" else reversed(range(len(ones)))
        for i in [*places] * 2:
            assert observed(ones[i].batches()) == expected[i]

    run()


def small(count: int) -> Server:
    """A server with transactions over two tables, whose rows interleave."""
    server = Server()
    with server.begin() as opened:
        opened.truncate([ONE, TWO])
    for number in range(count):
        with server.begin() as opened:
            for table in (ONE, TWO) if number % 2 else (TWO, ONE, TWO):
                opened.insert(table, [number, "x"] if table is ONE else [number])
    return server


def test_one_decoding_is_for_all() -> None:
    first, *others = transactions_of(small(5))
    assert isinstance(first._parts, Run)
    assert all(map(is_shared, others))
    names = [[batch.relation.name for batch in one.batches()] for one in others]
    assert names == [["two", "one"], ["one", "two"]] * 2 + [["two", "one"]]


def test_large_transactions_are_decoded_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    server = small(3)
    with server.begin() as opened:
        opened.insert(ONE, [1, "y" * 500])
    with server.begin() as opened:
        opened.insert(ONE, [2, ""])
    monkeypatch.setattr(transaction, "_DECODED_TOGETHER", 500)
    _, *others = transactions_of(server)
    assert [is_shared(one) for one in others] == [True, True, True, False, False]


def test_an_error_is_that_of_its_transaction() -> None:
    server = small(4)
    frames = [*server.frames]
    place = [i for i, frame in enumerate(frames) if frame[:1] == b"I"][4]
    frames[place] = frames[place][:-1]
    _, *others = transactions_of(server, frames)
    found = [observed(one.batches()) for one in others]
    assert [error and (error[1], error[4]) for _, error in found] == [
        None, ("bad_length", 2), None, None,
    ]  # fmt: skip
    assert [[batch[1] for batch in batches] for batches, _ in found] == [
        [2, 1], [1], [2, 1], [1, 1],
    ]  # fmt: skip


def test_refused_rows_do_not_change_the_order_of_batches() -> None:
    server = small(4)
    frames = [*server.frames]
    place = [i for i, frame in enumerate(frames) if frame[:1] == b"I"][5]
    frames[place] = frames[place][:-1]  # of a table with a later row in its transaction
    _, *others = transactions_of(server, frames, on_error="collect")
    names = [[batch.relation.name for batch in one.batches()] for one in others]
    assert names == [["two", "one"], ["one", "two"]] * 2


def test_a_column_is_binary_only_where_it_has_a_value() -> None:
    table = Table("odd", {"id": "int4", "odd": UserType(16390, "odd")}, 16600)
    server = Server()
    for value in (None, None, b"\x01", None):
        with server.begin() as opened:
            opened.insert(table, ["1", value])
    found = [[batch.binary for batch in one.batches()] for one in transactions_of(server)]
    assert found == [[()], [()], [(1,)], [()]]


def test_commits_out_of_order_are_decoded_by_themselves() -> None:
    server = small(3)
    frames = [*server.frames]
    begins = [i for i, frame in enumerate(frames) if frame[:1] == b"B"]
    frames[begins[2]] = frames[begins[3]]
    _, *others = transactions_of(server, frames)
    assert not any(map(is_shared, others))
    assert [[len(batch) for batch in one.batches()] for one in others] == [[2, 1], [1, 1], [2, 1]]


def test_a_label_that_is_new_within_a_transaction() -> None:
    mood = CatalogType(16390, "public", "mood", "e", labels=("sad",))
    table = Table("moods", {"id": "int4", "mood": UserType(16390, "mood")}, 16600)
    server = Server()
    for labels in (["sad"], ["sad", "ok"], ["ok", "new", "sad"], ["new"]):
        with server.begin() as opened:
            for label in labels:
                opened.insert(table, [1, label])
    ones = transactions_of(server, registry=TypeRegistry._of([mood]))
    found = [
        [pa.record_batch(batch).column("after").field("mood") for batch in one.batches()]
        for one in ones
    ]
    # A decoder of each by itself, in their order, begins a batch at the new label.
    assert [[column.to_pylist() for column in columns] for columns in found] == [
        [["sad"]], [["sad", "ok"]], [["ok", "new", "sad"]], [["new"]],
    ]  # fmt: skip
    assert found[0][0].dictionary.to_pylist() == ["sad"]
    assert found[3][0].dictionary.to_pylist() == ["sad", "ok", "new"]
    assert is_shared(ones[3])


def test_a_transaction_that_was_read_is_pickled() -> None:
    one = transactions_of(small(3))[-1]
    expected = observed(one.batches())
    assert observed(pickle.loads(pickle.dumps(one)).batches()) == expected


def test_batches_outlive_their_transactions(implementation: str) -> None:
    compiled = implementation == "cython"  # the twin's memory is Python's
    live_arenas = twin("columnar._export").live_arenas if compiled else lambda: 0
    gc.collect()
    before = live_arenas()
    batch = next(transactions_of(small(3))[2].batches())
    expected = described(batch)
    gc.collect()
    assert live_arenas() == before + 2 * compiled  # that of all rows of the table, and its own
    assert described(batch) == expected
    column = pa.record_batch(batch).column("after").field("note")
    del batch
    gc.collect()
    assert column.to_pylist() == ["x"]
    del column
    gc.collect()
    assert live_arenas() == before
