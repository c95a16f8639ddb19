"""The stream of a slot's changes for asyncio: a `ReplicationStream` in a thread.

For each wait of the consumer, the thread takes a step: it receives one group of transactions, or
gives up when nothing came for half a second. So it reads nothing ahead, and it rests soon after the
consumer has gone away. A step for each transaction would take ten times the processor time.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, TypeVar, cast

from ..connections import NEW_CONNECTION_ADVICE
from ..errors import PgOutputError

if TYPE_CHECKING:
    from typing_extensions import Self

    from ..transactions import Transaction, TransactionGroup
    from .stream import ReplicationStream

    _Arrival = Transaction | TransactionGroup

_Result = TypeVar("_Result")


def _work(calls: SimpleQueue[Callable[[], None] | None]) -> None:
    """Make calls up to a None; the thread of a stream."""
    while (call := calls.get()) is not None:
        call()
        del call  # during the next wait, it would keep the last transaction in memory


class _Iteration(AsyncIterator["_Arrival"]):
    """An iteration. Unlike an asynchronous generator, it goes on after a wait was cancelled."""

    def __init__(self, advance: Callable[[], Awaitable[_Arrival]]) -> None:
        self._advance = advance

    def __anext__(self) -> Awaitable[_Arrival]:
        return self._advance()


class AsyncReplicationStream:
    """The transactions that a server sends from a slot, for asyncio.

    `connect_async` makes a stream. Its methods do the same as those of `ReplicationStream`.
    """

    def __init__(self, connect: Callable[[], ReplicationStream], on_idle: object) -> None:
        self._connect, self._on_idle = connect, cast("Callable[[int], object]", on_idle)
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._stop = threading.Event()
        self._connecting: Future[ReplicationStream] | None = None
        self._step: Future[_Arrival | int | None] | None = None
        self._closing: Future[None] | None = None
        self._rest: deque[Transaction] = deque()  # of the last group
        self._owner: object = None  # stands for the newest iteration
        self._is_awaited = False

    async def __aenter__(self) -> Self:
        if self._connecting is None:
            self._connecting = self._call(self._connect)
            # A daemon, so that the interpreter does not wait for a server that does not answer.
            work = functools.partial(_work, self._calls)
            threading.Thread(target=work, name="pgoutput_fast-async", daemon=True).start()
        try:
            await asyncio.wrap_future(self._connecting)
        except BaseException:
            self._end()
            raise
        return self

    def __await__(self) -> Generator[Any, None, Self]:
        return self.__aenter__().__await__()

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    def __del__(self) -> None:
        self._end()

    def _call(self, function: Callable[[], _Result]) -> Future[_Result]:
        """Make a call in the thread. Cancelling a task that waits for it does not cancel it."""
        future: Future[_Result] = Future()
        future.set_running_or_notify_cancel()

        def run() -> None:
            try:
                future.set_result(function())
            except BaseException as error:  # noqa: BLE001 - the task that waits raises it
                future.set_exception(error)

        self._calls.put(run)
        return future

    @property
    def _stream(self) -> ReplicationStream:
        if self._connecting is not None and not self._stop.is_set():
            return self._connecting.result()
        text = "the stream is closed, or was not awaited"
        raise PgOutputError(text, code="unfit_input", hint=NEW_CONNECTION_ADVICE)

    @property
    def timeline(self) -> int:
        """The server's timeline: another one after a standby was promoted or a backup restored."""
        return self._stream.timeline

    @property
    def acknowledged_lsn(self) -> int:
        """The greatest acknowledged LSN."""
        return self._stream.acknowledged_lsn

    def transactions(self) -> AsyncIterator[Transaction]:
        """Iterate over whole transactions, in commit order, until the stream is closed.

        If a task is cancelled while it waits, no transaction is lost: continue with the same
        iteration, or begin another one. An iteration raises the errors of
        :meth:`ReplicationStream.transactions`. It also raises a PgOutputError if another iteration
        waits, or began after it.
        """
        return cast("AsyncIterator[Transaction]", self._iterate(splits_groups=True))

    def groups(self) -> AsyncIterator[Transaction | TransactionGroup]:
        """Iterate over the same transactions; those that came together form one group."""
        return self._iterate(splits_groups=False)

    def _iterate(self, *, splits_groups: bool) -> _Iteration:
        self._check_alone(self._owner)
        take_step = functools.partial(self._stream.step, self._stop)
        self._owner = owner = object()

        async def advance() -> _Arrival:
            self._check_alone(owner)
            self._is_awaited = True
            try:
                while not self._stop.is_set():
                    if self._rest:
                        return self._rest.popleft()
                    self._step = self._step or self._call(take_step)
                    arrival = await self._arrival_of(self._step)
                    if arrival is not None and not splits_groups:
                        return arrival
                    self._rest.extend(arrival.transactions() if arrival is not None else ())
                raise StopAsyncIteration
            finally:
                self._is_awaited = False

        return _Iteration(advance)

    def _check_alone(self, owner: object) -> None:
        """Refuse a second iteration: each would get only some of the transactions."""
        if self._is_awaited or owner is not self._owner:
            text = "another iteration over this stream takes its transactions"
            hint = "Iterate in one task, and hand the transactions to other tasks from there"
            raise PgOutputError(text, code="unfit_input", hint=hint)

    async def _arrival_of(self, step: Future[_Arrival | int | None]) -> _Arrival | None:
        try:
            arrival = await asyncio.wrap_future(step)
            if isinstance(arrival, int):
                stored = self._on_idle(arrival)
                if inspect.isawaitable(stored):
                    await stored
                await self.acknowledge(arrival)
                arrival = None
        except BaseException as error:
            if not isinstance(error, asyncio.CancelledError):  # then the next wait is for this step
                self._step = None
            raise
        self._step = None
        return arrival

    async def acknowledge(self, done: int | Transaction | TransactionGroup) -> None:
        """Tell the server that everything up to an LSN is durable: it won't send that again."""
        self._stream.acknowledge(done)

    async def close(self) -> None:
        """Send the last acknowledged position to the server, and close the connection.

        The thread begins within half a second, and goes on if this task is cancelled.
        """
        self._end()
        if self._closing is not None:
            await asyncio.wrap_future(self._closing)

    def _end(self) -> None:
        """Have the thread close the stream, and end."""
        self._stop.set()
        if (connecting := self._connecting) is not None and self._closing is None:
            self._closing = self._call(lambda: connecting.result().close())
            self._calls.put(None)
