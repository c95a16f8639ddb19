"""Whole transactions of a stream, over as many connections as it takes."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ..connections import RetryableError
from ..errors import PgOutputError
from ..lsn import format_lsn
from ..transactions import Assembler, Transaction
from ..transactions.runs import Run
from .link import Link
from .receiver import PackedTaken

# Seconds within which an order to end is heard while nothing comes.
_POLL = 0.1

_log = logging.getLogger(__name__)


class Until(NamedTuple):
    """What ends an iteration; the arguments of :meth:`ReplicationStream.transactions`."""

    stop_at: int | None
    idle_timeout: float | None
    stop: threading.Event | None


class Delivery:
    """What `ReplicationStream.transactions` gives.

    Parameters
    ----------
    link : Link
    assembler : Assembler
    position : int
        What was committed before it is not delivered.

    Attributes
    ----------
    delivered : int
        The end LSN of the last transaction that was delivered; `position` before there was one.
    """

    def __init__(self, link: Link, assembler: Assembler, position: int) -> None:
        self.delivered = position
        self._link = link
        self._assembler = assembler
        self._begin = position
        self._waiting: deque[Transaction] = deque()
        # The end of the last transaction that came. The server sends those again that were not
        # acknowledged when the connection was lost.
        self._came = position
        self._server_lsn = 0  # the server has nothing more to send before it
        self._error: PgOutputError | None = None

    def transactions(self, until: Until) -> Iterator[Transaction]:
        """Those that come, until something ends the iteration."""
        last = time.monotonic()
        try:
            while not self._is_ended(until):
                while self._waiting and not self._is_beyond(self._waiting[0], until.stop_at):
                    transaction = self._waiting.popleft()
                    self.delivered = max(self.delivered, transaction.end_lsn)
                    yield transaction
                    last = time.monotonic()
                    if self._is_ended(until):
                        return
                if self._waiting or self._has_reached(until.stop_at):
                    return
                if self._error is not None:
                    raise self._error
                self._acknowledge_idle()
                timeout = _POLL
                if until.idle_timeout is not None:
                    left = last + until.idle_timeout - time.monotonic()
                    if left <= 0:
                        return
                    timeout = min(timeout, left)
                if self._take(timeout, until):
                    last = time.monotonic()
                elif until.stop_at is not None:
                    self._link.receiver.ask_for_keepalive()
        except (PgOutputError, GeneratorExit):
            raise
        except BaseException as error:
            # A transaction may have been on its way to the consumer.
            self._error = self._error or PgOutputError(
                f"the iteration was interrupted ({type(error).__name__}), so that this stream may "
                "have lost a transaction: connect again, what was not acknowledged comes again"
            )
            raise

    def _is_ended(self, until: Until) -> bool:
        return self._link.is_closed or (until.stop is not None and until.stop.is_set())

    @staticmethod
    def _is_beyond(transaction: Transaction, stop_at: int | None) -> bool:
        """Whether it was committed at an LSN or later. The LSN of a message is where it ends."""
        if stop_at is None:
            return False
        if transaction.kind == "message":
            return transaction.end_lsn > stop_at
        return transaction.commit_lsn >= stop_at

    def _has_reached(self, stop_at: int | None) -> bool:
        """Whether all that was committed before an LSN has come."""
        return stop_at is not None and max(self._came, self._server_lsn) >= stop_at

    def _acknowledge_idle(self) -> None:
        """Let the server forget what it had nothing to send of, if that is all that there was."""
        receiver = self._link.receiver
        if (
            self._server_lsn > receiver.acknowledged
            and self.delivered <= max(receiver.acknowledged, self._begin)
            and not self._assembler.in_flight
        ):
            receiver.acknowledged = self._server_lsn

    def _take(self, timeout: float, until: Until) -> bool:
        """Take what has come, and connect again if need be; False if nothing came."""
        taken = PackedTaken()
        try:
            if self._link.lost is not None:
                raise self._link.lost
            self._link.receiver.receive(taken, timeout)
        except RetryableError as error:
            # The server sends again what was not acknowledged, from its beginning on.
            self._assembler.reset()
            self._link.reconnect(error, self._came, lambda: self._is_ended(until))
            return True  # that was no silence
        if not taken:
            return False
        self._link.works()
        if taken.size:
            ends, lsns = np.frombuffer(taken.ends, np.int64), np.frombuffer(taken.lsns, np.uint64)
            run = Run(taken.data, ends, lsns)
            self._assembler.known_lsn = self._came
            try:
                for transaction in self._assembler.feed_runs([run]):
                    if transaction.end_lsn > self._came:
                        self._came = transaction.end_lsn
                        self._waiting.append(transaction)
            except PgOutputError as error:
                self._error = error  # once what came before it was delivered
            self._link.receiver.held = self._assembler.oldest_prepared_lsn
        # What an error left out came before the keepalive.
        if taken.keepalive is not None and self._error is None:
            self._server_lsn = taken.keepalive
        return bool(taken.size)

    def check(self, lsn: int) -> None:
        """Refuse to acknowledge what was not delivered.

        Raises
        ------
        PgOutputError
            It was not.
        """
        limit = max(self.delivered, self._link.receiver.acknowledged)
        if lsn > limit:
            raise PgOutputError(
                f"{format_lsn(lsn)} can't be acknowledged: nothing beyond {format_lsn(limit)} was "
                f"delivered. Give the transaction, or its `end_lsn`, not a time or a number of "
                f"your own: the server forgets all that is before it"
            )
