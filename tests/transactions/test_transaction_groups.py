"""Transactions that came together, as one group: the same as those that it is made of."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pgoutput_fast as pf
from pgoutput_fast import testing
from pgoutput_fast.testing import Server, Table, strategies
from pgoutput_fast.transactions import Assembler
from pgoutput_fast.transactions.runs import runs_of
from pgoutput_fast.transactions.transaction import TransactionGroup

pa = pytest.importorskip("pyarrow", reason="the twin makes Arrow arrays with it")
from support.columns.columnar import IMPLEMENTATIONS, chosen  # noqa: E402 - it needs pyarrow

ONE = Table("one", {"id": "int4", "note": "text"}, 16400)
TWO = Table("two", {"id": "int8"}, 16500)
SETTINGS = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(params=IMPLEMENTATIONS, autouse=True)
def implementation(request: pytest.FixtureRequest) -> Iterator[str]:
    with chosen(request.param):
        yield request.param


def server_of(sizes: list[int], **options: Any) -> Server:
    """A server that announces its tables, and then commits a transaction of each size."""
    server = Server(**options)
    with server.begin() as transaction:
        transaction.truncate([ONE, TWO])
    for number, size in enumerate(sizes):
        with server.begin() as transaction:
            for i in range(size):
                what = (number + i) % 4
                if what == 0:
                    transaction.insert(TWO, [number])
                elif what == 1:
                    transaction.truncate([ONE, TWO])
                elif what == 2:
                    transaction.update(ONE, [number, "new"], [number, "old"])
                else:
                    transaction.delete(ONE, [i, None])
    return server


def group_of(server: Server) -> TransactionGroup:
    """All but its first transaction."""
    first, group = Assembler().feed_groups(runs_of(server.frames, None, server.lsns))
    assert isinstance(first, pf.transactions.Transaction)
    assert isinstance(group, TransactionGroup)
    return group


def told(one: Any) -> tuple[Any, ...]:
    return (one.kind, one.xid, one.commit_lsn, one.end_lsn, one.commit_time, one.origin, one.gid)


def rows(found: Any) -> list[tuple[Any, ...]]:
    """The rows of batches, in the order of all changes."""
    made = []
    for batch in found:
        table = batch.relation.name
        made += [(table, *row.items()) for row in pa.record_batch(batch).to_pylist()]
    return sorted(made, key=lambda row: (dict(row[1:])["commit_lsn"], dict(row[1:])["seq"]))


def check(group: TransactionGroup, committed: list[Any]) -> None:
    """A group is made of these transactions."""
    ones = list(group.transactions())
    assert [told(one) for one in ones] == [
        ("commit", one.xid, one.commit_lsn, one.end_lsn, one.commit_time, None, None)
        for one in committed
    ]
    assert (len(group), group.commits, group.end_lsn) == (
        len(committed), len(committed), committed[-1].end_lsn,
    )  # fmt: skip
    assert all(one.commits == 1 for one in ones)
    frames = list(group.frames())
    assert frames == [frame for one in ones for frame in one.frames()]
    assert frames == [
        frame
        for one in committed
        for frame in (
            testing.begin(one.xid, one.commit_lsn, one.commit_time),
            *(change.frame for change in one.changes),
            testing.commit(one.commit_lsn, one.end_lsn, one.commit_time),
        )
    ]
    (run,) = group.runs()
    assert list(run.frames()) == frames
    lsns = [int(lsn) for one in ones for run in one.runs() for lsn in run.lsns]
    assert lsns == [
        lsn
        for one in committed
        for lsn in (
            # Before 15 there are transactions without a change.
            one.changes[0].lsn if one.changes else one.commit_lsn,
            *(change.lsn for change in one.changes),
            one.end_lsn,
        )
    ]
    assert run.lsns.tolist() == lsns
    single = [row for one in ones for row in rows(one.batches())]
    assert rows(group.batches()) == single
    assert [(row[0], *_of(row)) for row in single] == [
        (table.name, one.xid, change.lsn, one.commit_lsn, change.seq + number)
        for one in committed
        for change in one.changes
        for number, table in enumerate(change.tables)
    ]
    # They can be read again, and in another order.
    last = ones[-1]
    assert [message.frame for message in last] == [change.frame for change in committed[-1].changes]
    assert rows(group.batches()) == single


def _of(row: tuple[Any, ...]) -> tuple[Any, ...]:
    fields = dict(row[1:])
    return tuple(fields[name] for name in ("xid", "lsn", "commit_lsn", "seq"))


def test_a_group_is_its_transactions() -> None:
    server = server_of([1, 2, 0, 3, 5], version=14, lsn=2**63 - 0x400, time=-(10**15))
    group = group_of(server)
    check(group, server.committed[1:])
    assert repr(group) == f"<TransactionGroup: 5 transactions in {group.run!r}>"
    times = [one.commit_time for one in server.committed]
    assert [one.commit_time for one in group.transactions()] == times[1:]
    assert max(times) < 0


def test_of_one_transaction_too() -> None:
    server = server_of([2])
    check(group_of(server), server.committed[1:])


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [[1], [1, 2], [1, 0, 2, 3, 1, 1]])
def test_parts_of_a_group(sizes: list[int]) -> None:
    server = server_of(sizes, version=14)
    group, committed = group_of(server), server.committed[1:]
    edges = [lsn for one in committed for lsn in (one.commit_lsn, one.end_lsn)]
    for lsn in sorted({0, 2**64 - 1, *(edge + step for edge in edges for step in (-1, 0, 1))}):
        for part, wanted in (
            (group.beyond(lsn), [one for one in committed if one.end_lsn > lsn]),
            (group.before(lsn), [one for one in committed if one.commit_lsn < lsn]),
        ):
            assert (part is None) == (not wanted)
            assert (part is group) == (wanted == committed)
            if part is not None:
                check(part, wanted)
    # A part of a part counts its frames from its own beginning.
    for first, last in itertools.combinations(committed, 2):
        part = group.beyond(first.end_lsn)
        assert part is not None
        assert (part.before(first.commit_lsn), part.beyond(group.end_lsn)) == (None, None)
        part = part.before(last.end_lsn)
        assert part is not None
        check(part, [one for one in committed if first.end_lsn < one.end_lsn][: len(part)])
        assert part.end_lsn == last.end_lsn


def test_only_what_announces_nothing_comes_in_groups() -> None:
    server = server_of([1, 1])
    far = server.begin("far")
    far.insert(ONE, [1, "x"])
    with server.begin() as transaction:
        transaction.insert(ONE, [2, "x"])
    streamed = server.begin()
    streamed.insert(ONE, [3, "x"])
    far.commit()
    with server.begin() as transaction:
        transaction.message("p", b"within")
    server.message("p", b"outside")
    streamed.stream()
    with server.begin() as transaction:
        transaction.insert(ONE, [4, "x"])
    streamed.commit()
    with server.begin() as transaction:
        transaction.insert(Table("two", {"id": "int8", "more": "text"}, 16500), [5, "x"])
    with server.begin() as transaction:
        transaction.insert(ONE, [6, "x"])
    found = list(Assembler().feed_groups(runs_of(server.frames, None, server.lsns)))
    # How many are in a group; None for a transaction or a message by itself.
    assert [len(one) if isinstance(one, TransactionGroup) else None for one in found] == [
        None, 3, None, None, None, 1, None, None, 1,
    ]  # fmt: skip
    ones = [one for either in found for one in either.transactions()]
    assert [told(one)[1:4] for one in ones if one.kind == "commit"] == [
        (one.xid, one.commit_lsn, one.end_lsn) for one in server.committed
    ]


@pytest.mark.everyday("cython-in order")
@pytest.mark.parametrize("order", ["in order", "backwards"])
def test_groups_are_the_transactions_of_any_stream(order: str) -> None:
    """However its frames are cut into calls; each group's rows come at once."""

    @SETTINGS
    @given(strategies.servers(), st.lists(st.integers(1, 40), min_size=1, max_size=8))
    def run(server: Server, sizes: list[int]) -> None:
        expected = list(Assembler().feed(server.frames, server.lsns))
        assembler = Assembler()
        found: list[Any] = []
        start = 0
        for size in itertools.cycle(sizes):
            if start >= len(server.sent):
                break
            end = start + size
            frames, lsns = server.frames[start:end], server.lsns[start:end]
            found += assembler.feed_groups(runs_of(frames, None, lsns))
            start = end
        ones = [one for either in found for one in either.transactions()]
        assert [told(one) for one in ones] == [told(one) for one in expected]
        assert [list(one.frames()) for one in ones] == [list(one.frames()) for one in expected]
        for either in found if order == "in order" else reversed(found):
            singles = [row for one in either.transactions() for row in rows_of(one)]
            assert rows_of(either) == singles

    run()


def rows_of(one: Any) -> list[tuple[Any, ...]]:
    """The rows as far as any two decoders have to agree, in their order."""
    found: list[tuple[Any, ...]] = []
    for batch in one.batches():
        columns = pa.record_batch(batch)
        names = ("commit_lsn", "seq", "lsn", "xid", "op")
        parts = (columns[name].to_pylist() for name in names)
        found += zip(*parts, itertools.repeat(batch.relation.name), strict=False)
    return sorted(found, key=lambda row: (row[0] or 0, row[1]))
