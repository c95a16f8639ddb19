"""Streams for asyncio: the transactions of a stream, whatever is cancelled and closed meanwhile."""

from __future__ import annotations

import asyncio
import functools
import gc
import random
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, cast

import pytest
from support.expected_errors import expect_error
from support.postgres.fixtures import Database
from support.postgres.proxy import Proxy
from support.waiting import wait_until

import pgoutput_fast as pf
from pgoutput_fast.replication import RetryableError, connect, connect_async, slots
from pgoutput_fast.replication.async_stream import AsyncReplicationStream

pytestmark = pytest.mark.server

NAME = "pgoutput_fast-async"


@pytest.fixture
def given(database18: Database) -> dict[str, Any]:
    """The arguments of a stream of a table `t`."""
    return arguments(database18)


def arguments(database: Database) -> dict[str, Any]:
    slot = f"s_{database.name}"
    database.execute(
        "CREATE TABLE t (id int, note text)",
        "CREATE TABLE other (id int)",
        "CREATE PUBLICATION p FOR TABLE t",
        f"SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')",
    )
    return {"dsn": database.dsn, "slot": slot, "publications": ["p"]}


def runs(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test in an event loop. The threads of its streams are gone at the end."""

    @functools.wraps(test)
    def run(*fixtures: Any, **named: Any) -> None:
        before = len(workers())
        asyncio.run(asyncio.wait_for(test(*fixtures, **named), 60))
        wait_until(lambda: len(workers()) == before)

    return run


def workers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == NAME]


def insert(database: Database, *ids: int) -> None:
    database.execute(*(f"INSERT INTO t VALUES ({number}, 'x')" for number in ids))


def ids_of(*transactions: Any) -> list[int]:
    return [
        message.new["id"]
        for arrival in transactions
        for transaction in arrival.transactions()
        for message in transaction
        if isinstance(message, pf.Insert)
    ]


async def take(iteration: AsyncIterator[Any], count: int) -> list[int]:
    """The ids of as many transactions."""
    return [number for _ in range(count) for number in ids_of(await anext(iteration))]


async def wait_for(condition: Callable[[], object]) -> None:
    await asyncio.to_thread(wait_until, condition)


def test_transactions_are_those_of_the_synchronous_stream(database: Database) -> None:
    """Small ones, which come in groups, a large one in a file, and one that alters the table."""
    given = arguments(database)
    insert(database, *range(30))
    database.execute(
        "INSERT INTO t SELECT g, repeat('y', 100) FROM generate_series(100, 20099) g",
        "ALTER TABLE t ADD more int",
        "INSERT INTO t SELECT 30, 'x', 1",
    )
    insert(database, *range(31, 60))
    given |= {"max_memory": 200_000, "options": "-c logical_decoding_work_mem=64kB"}
    with connect(**given) as stream:
        expected = [
            (transaction.xid, transaction.end_lsn, list(transaction.frames()))
            for transaction in stream.transactions(idle_timeout=1.0)
        ]
    assert len(expected) == 61

    async def read(how: str) -> list[Any]:
        found: list[Any] = []
        async with connect_async(**given) as stream:
            async for arrival in getattr(stream, how)():
                found += arrival.transactions()
                if len(found) == len(expected):
                    break
        return [(one.xid, one.end_lsn, list(one.frames())) for one in found]

    assert asyncio.run(read("transactions")) == expected
    assert asyncio.run(read("groups")) == expected


@runs
async def test_what_was_acknowledged_is_on_the_server(database18: Database, given: Any) -> None:
    insert(database18, 1, 2, 3)
    confirmed = "SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE database = "
    async with connect_async(**given) as stream:
        iteration = stream.transactions()
        await anext(iteration)
        second = await anext(iteration)
        await stream.acknowledge(second)
        assert stream.acknowledged_lsn == second.end_lsn
    ((lsn,),) = database18.execute(confirmed + f"'{database18.name}'")
    assert pf.parse_lsn(lsn) == second.end_lsn
    assert database18.slots() == {given["slot"]: False}
    stream = await connect_async(**given)
    assert await take(stream.transactions(), 1) == [3]
    with expect_error(code="unfit_input"):
        await stream.acknowledge(2**40)
    await stream.close()
    await stream.close()
    with expect_error(code="unfit_input"):
        stream.transactions()
    with expect_error(code="unfit_input"):
        await stream.acknowledge(second)


@runs
async def test_what_came_for_a_cancelled_task_comes_first(database18: Database, given: Any) -> None:
    async with connect_async(**given) as stream:
        iteration = stream.transactions()
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(anext(iteration), 0.05)
        insert(database18, 1)
        assert stream._step is not None
        await wait_for(stream._step.done)
        assert stream._step.result() is not None  # the thread has it, and nobody waits for it
        insert(database18, 2)
        assert await take(iteration, 2) == [1, 2]
        waiting = asyncio.ensure_future(anext(iteration))
        await asyncio.sleep(0.05)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        insert(database18, 3)
        assert await take(stream.groups(), 1) == [3]


@runs
async def test_a_task_that_is_cancelled_in_a_transaction(database18: Database, given: Any) -> None:
    """The first half of a transaction that the server streams came before, the rest comes after."""
    given |= {"options": "-c logical_decoding_work_mem=64kB"}
    half = b"INSERT INTO t SELECT g, repeat('x', 100) FROM generate_series(1, 5000) g"
    async with connect_async(**given) as stream:
        with database18.connect() as connection:
            connection.execute("BEGIN")
            connection.execute(half)
            has_begun = False
            while not has_begun:
                with pytest.raises(asyncio.TimeoutError):
                    await asyncio.wait_for(anext(stream.transactions()), 0.1)
                delivery = cast(Any, stream._stream._delivery)
                has_begun = delivery is not None and bool(delivery._assembler.in_flight)
            connection.execute(half)
            connection.execute("COMMIT")
        insert(database18, 0)
        assert await take(stream.transactions(), 2) == [*range(1, 5001), *range(1, 5001), 0]


@runs
async def test_tasks_cancelled_at_any_moment(database18: Database, given: Any) -> None:
    """Groups and transactions in turn, by tasks that live for some milliseconds."""
    count, chance = 600, random.Random(5)
    found: list[int] = []

    async def consume(stream: AsyncReplicationStream) -> None:
        async for arrival in chance.choice((stream.transactions, stream.groups))():
            found.extend(ids_of(arrival))
            await stream.acknowledge(arrival)
            if chance.random() < 0.1:
                await asyncio.sleep(0.001)

    writing = threading.Thread(target=insert, args=(database18, *range(count)))
    writing.start()
    async with connect_async(**given) as stream:
        while len(found) < count:
            task = asyncio.ensure_future(consume(stream))
            await asyncio.sleep(chance.choice((0, 0.001, 0.01, 0.05)))
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
    writing.join()
    assert found == list(range(count))


def test_an_error_comes_at_its_place_and_is_that_of_the_synchronous_stream(
    database18: Database, given: Any
) -> None:
    """The slot is dropped before the stream connects again."""
    given |= {"retry_for": 10.0}

    def drop() -> None:
        pid = f"(SELECT active_pid FROM pg_replication_slots WHERE slot_name = '{given['slot']}')"
        database18.execute(f"SELECT pg_terminate_backend({pid})")
        wait_until(lambda: not any(database18.slots().values()))
        slots.drop(given["dsn"], given["slot"])

    insert(database18, 1, 2)
    found: list[list[int]] = []

    def fail_synchronously() -> None:
        with connect(**given) as stream:
            for transaction in stream.transactions():
                found.append(ids_of(transaction))
                if len(found) == 2:
                    drop()

    with pytest.raises(pf.PgOutputError) as expected:
        fail_synchronously()
    slots.create(given["dsn"], given["slot"])
    insert(database18, 1, 2)

    async def fail_for_asyncio() -> None:
        async with connect_async(**given) as stream:
            async for transaction in stream.transactions():
                found.append(ids_of(transaction))
                if len(found) == 4:
                    await asyncio.to_thread(drop)

    with expect_error(type(expected.value), code=expected.value.code):
        asyncio.run(fail_for_asyncio())
    assert found == [[1], [2], [1], [2]]


@runs
async def test_an_error_of_connect(given: Any) -> None:
    with expect_error(code="no_slot"):
        await connect_async(**given | {"slot": "missing"})
    with expect_error(code="no_slot"):
        async with connect_async(**given | {"slot": "missing"}):
            pass
    with pytest.raises(TypeError):
        await connect_async(**given | {"temporary": 1})
    never_awaited = connect_async(**given)
    with expect_error(code="unfit_input"):
        never_awaited.transactions()


@runs
async def test_a_slow_consumer_slows_down_the_server(database18: Database, given: Any) -> None:
    """The server keeps what the consumer has not asked for, but for one batch and socket buffers.

    The stream answers the server's keepalives all the time.
    """
    sent = (
        "SELECT pg_wal_lsn_diff(pg_current_wal_lsn(), sent_lsn), pid FROM pg_stat_replication"
        f" JOIN pg_replication_slots ON pid = active_pid WHERE slot_name = '{given['slot']}'"
    )
    big = "INSERT INTO t SELECT g, repeat('x', 1000) FROM generate_series(1, 1000) g"
    async with connect_async(**given, options="-c wal_sender_timeout=1s") as stream:
        iteration = stream.transactions()
        await asyncio.to_thread(database18.execute, *[big] * 40)
        await anext(iteration)
        ((_, pid),) = await asyncio.to_thread(database18.execute, sent)
        await asyncio.sleep(2.5)
        ((behind, same),) = await asyncio.to_thread(database18.execute, sent)
        assert behind > 20_000_000
        assert same == pid
        assert len(await take(iteration, 39)) == 39_000
        ((_, same),) = await asyncio.to_thread(database18.execute, sent)
        assert same == pid


@runs
async def test_closing_ends_an_iteration_that_waits(database18: Database, given: Any) -> None:
    async def consume() -> list[int]:
        return ids_of(*[transaction async for transaction in stream.transactions()])

    stream = await connect_async(**given)
    insert(database18, 1)
    waiting = asyncio.ensure_future(consume())
    await asyncio.sleep(0.1)
    await stream.close()
    assert await waiting in ([], [1])
    assert database18.slots() == {given["slot"]: False}


@runs
async def test_closing_goes_on_without_its_task(database18: Database, given: Any) -> None:
    stream = await connect_async(**given)
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(anext(stream.transactions()), 0.01)
    closing = asyncio.ensure_future(stream.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    await wait_for(lambda: database18.slots() == {given["slot"]: False})


@runs
async def test_a_stream_that_nobody_has_is_closed(database18: Database, given: Any) -> None:
    gc.disable()  # the stream is in no cycle
    try:
        stream = await connect_async(**given)
        insert(database18, 1)
        assert await take(stream.transactions(), 1) == [1]
        del stream
        await wait_for(lambda: database18.slots() == {given["slot"]: False})
    finally:
        gc.enable()


@runs
async def test_connecting_that_is_cancelled(database18: Database, given: Any) -> None:
    """The connection is made all the same, and closed."""
    may_connect, is_connected = threading.Event(), threading.Event()

    def slowly() -> Any:
        may_connect.wait()
        stream = connect(**given)
        is_connected.set()
        return stream

    stream = AsyncReplicationStream(slowly, None)
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(stream.__aenter__(), 0.05)
    may_connect.set()
    await wait_for(is_connected.is_set)
    await wait_for(lambda: database18.slots() == {given["slot"]: False})


@runs
async def test_two_tasks_do_not_share_a_stream(database18: Database, given: Any) -> None:
    async with connect_async(**given) as stream:
        first = stream.transactions()
        waiting = asyncio.ensure_future(anext(first))
        await asyncio.sleep(0.05)
        with expect_error(code="unfit_input"):
            await anext(first)
        with expect_error(code="unfit_input"):
            stream.groups()
        insert(database18, 1, 2)
        assert ids_of(await waiting) == [1]
        second = stream.transactions()  # while the first task works
        with expect_error(code="unfit_input"):
            await anext(first)
        assert await take(second, 1) == [2]


def test_one_event_loop_after_another(database18: Database, given: Any) -> None:
    streams: list[Any] = []

    async def begin() -> None:
        streams.append(await connect_async(**given))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(anext(streams[0].transactions()), 0.01)

    async def go_on() -> list[int]:
        found = await take(streams[0].transactions(), 2)
        await streams[0].close()
        return found

    asyncio.run(begin())
    insert(database18, 1, 2)
    assert asyncio.run(go_on()) == [1, 2]


@pytest.mark.parametrize("ends", ["return", "raise SystemExit(0)"])
def test_a_program_ends_without_closing(given: Any, ends: str) -> None:
    """Nothing is printed, and nothing hangs."""
    program = f"""
import asyncio
from pgoutput_fast.replication import connect_async

async def wait(stream):
    async for transaction in stream.transactions():
        pass

async def main():
    global stream, task
    stream = await connect_async(**{given!r})
    task = asyncio.ensure_future(wait(stream))
    await asyncio.sleep(0.1)
    {ends}

asyncio.run(main())
"""
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=60
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")


@pytest.mark.parametrize("is_coroutine", [False, True])
def test_the_waiting_task_stores_the_position(
    database18: Database, given: Any, is_coroutine: bool
) -> None:
    """An LSN is acknowledged after it was stored, and comes again if its task was cancelled."""
    tries: list[int] = []
    stored: list[int] = []
    given |= {"options": "-c wal_sender_timeout=1s"}
    loop_thread = threading.current_thread()

    def store(lsn: int) -> None:
        assert threading.current_thread() is loop_thread
        tries.append(lsn)
        if len(tries) == 1:
            raise asyncio.CancelledError
        stored.append(lsn)

    async def store_slowly(lsn: int) -> None:
        store(lsn)
        assert stream.acknowledged_lsn < lsn
        await asyncio.sleep(0.01)

    stream: Any = None

    async def run() -> int:
        nonlocal stream
        on_idle = store_slowly if is_coroutine else store
        async with connect_async(**given, on_idle=on_idle) as stream:
            iteration = stream.transactions()
            (transaction,) = [await anext(iteration)]
            await stream.acknowledge(transaction)
            database18.execute("INSERT INTO other VALUES (1)", "SELECT pg_switch_wal()")
            with pytest.raises(asyncio.CancelledError):
                await anext(iteration)
            assert stream.acknowledged_lsn == transaction.end_lsn
            waiting = asyncio.ensure_future(anext(iteration))
            await wait_for(lambda: stored and stream.acknowledged_lsn >= stored[-1])
            insert(database18, 2)
            assert ids_of(await waiting) == [2]
            return int(transaction.end_lsn)

    insert(database18, 1)
    end_lsn = asyncio.run(run())
    assert tries[1] == tries[0] > end_lsn


@runs
async def test_a_lost_connection_is_made_again_behind_it(database18: Database, given: Any) -> None:
    insert(database18, 1)
    server = database18.server
    given |= {"host": "127.0.0.1", "sslmode": "disable", "retry_for": 0.3}
    with Proxy(str(server.directory / f".s.PGSQL.{server.port}")) as proxy:
        async with connect_async(**given, port=proxy.port) as stream:
            iteration = stream.transactions()
            assert await take(iteration, 1) == [1]
            proxy.cut()
            insert(database18, 2)
            assert await take(iteration, 1) == [2]
            proxy.refuses = True
            proxy.cut()
            insert(database18, 3)
            with expect_error(RetryableError, code="connection_lost"):
                await anext(iteration)
            proxy.refuses = False
            assert await take(iteration, 1) == [3]
