"""Deliver whole transactions of a stream, and reconnect after each lost connection."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar, cast

import numpy as np

from ..connections import NEW_CONNECTION_ADVICE
from ..errors import PgOutputError
from ..transactions import Assembler, Transaction
from ..transactions.runs import Run
from ..transactions.transaction import TransactionGroup
from .link import Link
from .receiver import ReceivedRun
from .waiter import IDLE_POLL

_Arrival = TypeVar("_Arrival", Transaction, Transaction | TransactionGroup)


class Until(NamedTuple):
    """When an iteration ends: the arguments of :meth:`ReplicationStream.transactions`."""

    stop_at: int | None
    idle_timeout: float | None
    stop: threading.Event | None


class Delivery:
    """Whole transactions of a stream, in commit order, across all its connections.

    Parameters
    ----------
    link : Link
    assembler : Assembler
    position : int
        Transactions that were committed before this LSN are not delivered.
    on_idle : callable, optional
        Called with an LSN before which the server has nothing more to send. It is called only while
        no transaction is in flight and everything that was delivered is acknowledged. Without
        `on_idle`, the LSN is acknowledged at once.
    on_loss : callable, optional
        Called after a connection was lost, before the next one is made.

    Attributes
    ----------
    on_idle : callable or None
    delivered : int
        The end LSN of the last transaction that was delivered; `position` before the first one.
    server_lsn : int
        The LSN of the last keepalive: the server has nothing more to send before it. 0 before the
        first one.
    is_asked : bool
        Whether that keepalive asked for an answer, and nothing came since. A server that shuts down
        asks until everything that it has sent is acknowledged.
    """

    def __init__(
        self,
        link: Link,
        assembler: Assembler,
        position: int,
        *,
        on_idle: Callable[[int], None] | None = None,
        on_loss: Callable[[], None] | None = None,
    ) -> None:
        self.delivered = position
        self.server_lsn = 0
        self.is_asked = False
        self._link = link
        self._assembler = assembler
        self._begin = position
        link.receiver.safe_lsn = assembler.safe_lsn
        self.on_idle, self._on_loss = on_idle, on_loss
        self._waiting: deque[Transaction | TransactionGroup] = deque()
        # What was taken from `_waiting` and comes one by one. A list of all transactions of a group
        # would make Python's garbage collector run often.
        self._singles: Iterator[Transaction] = iter(())
        # The end LSN of the last transaction that came. After a reconnect, the server sends again
        # all transactions that were not acknowledged; the assembler drops those up to this LSN.
        self._came = position
        self._error: PgOutputError | None = None

    def transactions(self, until: Until) -> Iterator[Transaction]:
        """Yield transactions, one by one, until `until` ends the iteration."""
        return self._iterate(until, self._next_transaction)

    def groups(self, until: Until) -> Iterator[Transaction | TransactionGroup]:
        """Yield the same transactions; those that came together form one group."""
        return self._iterate(until, self._next)

    def _iterate(
        self, until: Until, next_: Callable[[int | None], _Arrival | None]
    ) -> Iterator[_Arrival]:
        """Yield what `next_` returns, until `until` ends the iteration."""
        last = time.monotonic()
        # What an earlier iteration has left, as `stop_at` may be another now.
        self._waiting.extendleft(reversed(list(self._singles)))
        try:
            while not self._is_ended(until):
                while (arrival := next_(until.stop_at)) is not None:
                    self.delivered = max(self.delivered, arrival.end_lsn)
                    yield arrival
                    last = time.monotonic()
                    if self._is_ended(until):
                        return
                self._acknowledge_idle()
                if self._waiting or self._has_reached(until.stop_at):
                    return
                timeout = IDLE_POLL
                if until.idle_timeout is not None:
                    left = last + until.idle_timeout - time.monotonic()
                    if left <= 0:
                        return
                    timeout = min(timeout, left)
                if self._advance(timeout, until):
                    last = time.monotonic()
        except (PgOutputError, GeneratorExit):
            raise
        except BaseException as error:
            # Ctrl-C, for example, may have come while a transaction was on its way to the consumer.
            self._error = self._error or PgOutputError(
                f"the iteration was interrupted ({type(error).__name__}), so this stream may have "
                "lost a transaction",
                code="incomplete",
                hint=NEW_CONNECTION_ADVICE,
            )
            raise

    @property
    def waits(self) -> bool:
        """Whether a transaction came that was not delivered yet."""
        return bool(self._waiting)

    def _next_transaction(self, stop_at: int | None) -> Transaction | None:
        """Return the next transaction, one by one of what `_next` returns."""
        transaction = next(self._singles, None)
        if transaction is None and (arrival := self._next(stop_at)) is not None:
            self._singles = arrival.transactions()
            transaction = next(self._singles)
        return transaction

    def arrivals(
        self, until: Until, patience: Callable[[], float]
    ) -> Iterator[Transaction | TransactionGroup | None]:
        """Yield transactions and groups, until `until` ends the iteration.

        Yield None when nothing more is there at the moment, before each wait for more. `patience`
        then returns the longest time to wait, in seconds.
        """
        while not self._is_ended(until):
            while (arrival := self._next(until.stop_at)) is not None:
                self.delivered = max(self.delivered, arrival.end_lsn)
                yield arrival
                if self._is_ended(until):
                    return
            self._acknowledge_idle()
            if self._waiting or self._has_reached(until.stop_at):
                return
            yield None
            self._advance(patience(), until)

    def _next(self, stop_at: int | None) -> Transaction | TransactionGroup | None:
        """Return the next transaction or group that was committed before `stop_at`.

        For a non-transactional message, the end of its record counts: it may end at `stop_at`.
        None if nothing waits, or only what comes later.
        """
        if not self._waiting:
            return None
        arrival = self._waiting[0]
        if stop_at is None:
            return self._waiting.popleft()
        if isinstance(arrival, TransactionGroup):
            before = arrival.before(stop_at)
            if before is arrival:
                return self._waiting.popleft()
            if before is not None:
                self._waiting[0] = cast("TransactionGroup", arrival.beyond(before.end_lsn))
            return before
        if arrival.kind == "message":
            is_beyond = arrival.end_lsn > stop_at
        else:
            is_beyond = arrival.commit_lsn >= stop_at
        return None if is_beyond else self._waiting.popleft()

    def _advance(self, timeout: float, until: Until) -> bool:
        """Wait for more; False if nothing came.

        Raises
        ------
        PgOutputError
            Frames that came before could not be assembled. Everything before them was delivered.
        """
        if self._error is not None:
            raise self._error
        if self._take(timeout, until):
            return True
        if until.stop_at is not None:
            self._link.receiver.ask_for_keepalive()
        return False

    def _is_ended(self, until: Until) -> bool:
        return self._link.is_closed or (until.stop is not None and until.stop.is_set())

    def _has_reached(self, stop_at: int | None) -> bool:
        """Return whether everything that was committed before an LSN has come."""
        return stop_at is not None and max(self._came, self.server_lsn) >= stop_at

    @property
    def idle_lsn(self) -> int:
        """The LSN before which all is delivered; 0 while a transaction waits or is in flight."""
        busy = self._waiting or self._assembler.in_flight
        return 0 if busy else self.server_lsn

    def _acknowledge_idle(self) -> None:
        """Acknowledge log without changes for the slot, once every delivery is acknowledged."""
        receiver = self._link.receiver
        lsn = self.idle_lsn
        if lsn > receiver.acknowledged and self.delivered <= max(
            receiver.acknowledged, self._begin
        ):
            if self.on_idle is None:
                receiver.acknowledge(lsn)
            else:
                self.on_idle(lsn)

    def _take(self, timeout: float, until: Until) -> bool:
        """Receive frames and assemble them, or reconnect after a loss; False if nothing came."""
        batch = ReceivedRun()
        try:
            if self._link.lost is not None:
                raise self._link.lost
            self._link.receiver.receive(batch, timeout)
        except PgOutputError as error:
            loss = self._link.loss(error)
            if self._link.lost is None:
                if self._on_loss is not None:
                    self._on_loss()
                # The server sends unfinished transactions again, from their beginning.
                self._assembler.reset()
                # The next connection may lead to another server, such as a promoted standby, whose
                # log need not reach as far.
                self.server_lsn = min(self.server_lsn, self._link.receiver.acknowledged)
                self.is_asked = False
            end = time.monotonic() + timeout
            self._link.reconnect(
                loss, self._came, lambda: self._is_ended(until) or time.monotonic() >= end
            )
            return False
        if not batch:
            return False
        self._link.works()
        if batch.size:
            ends, lsns = np.frombuffer(batch.ends, np.int64), np.frombuffer(batch.lsns, np.uint64)
            run = Run(batch.data, ends, lsns)
            self._assembler.known_lsn = self._came
            try:
                for arrival in self._assembler.feed_groups([run]):
                    self._came = max(self._came, arrival.end_lsn)
                    self._waiting.append(arrival)
            except PgOutputError as error:
                self._error = error  # `_advance` raises it, after what came before is delivered
        # After an error, frames before the keepalive are missing, so its LSN does not count.
        has_keepalive = batch.keepalive is not None and self._error is None
        self.is_asked = has_keepalive and batch.asked
        if has_keepalive:
            self.server_lsn = cast("int", batch.keepalive)
        return bool(batch.size)
