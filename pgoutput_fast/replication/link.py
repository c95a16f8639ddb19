"""Keep the connection of a stream, and reconnect after it was lost."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from ..errors import PgOutputError, ReplicationError, RetryableError
from .attempt import Attempt
from .receiver import Receiver
from .source import Source, Started

if TYPE_CHECKING:
    import threading

# Seconds to wait before the second try to connect, and at most between two tries. Each wait is
# twice as long as the last one, less a random part, so that many clients do not connect at once.
_FIRST_WAIT = 0.1
_LONGEST_WAIT = 30.0
_POLL = 0.05  # seconds between two checks whether to give up

_log = logging.getLogger(__name__)

_Made = TypeVar("_Made")


class Retries:
    """Decides how long to wait between tries to connect, and when to give up.

    Parameters
    ----------
    retry_for : float, optional
        Seconds after the first failure until the last try. By default there is no limit.

    Attributes
    ----------
    next_try : float
        When to try again, on the clock of `time.monotonic`.
    """

    def __init__(self, retry_for: float | None) -> None:
        self._retry_for = retry_for
        self.begin_anew()

    def begin_anew(self) -> None:
        """Note a success: after the next failure, waits and limits begin from the start."""
        self._wait = _FIRST_WAIT
        self._since: float | None = None
        self._unclear_since: float | None = None
        self.next_try = 0.0

    def plan(self, error: RetryableError) -> None:
        """Set `next_try` after an error.

        An error may have its own `retry_for`, because it may not pass. That limit counts from the
        first of consecutive errors that have one.

        Raises
        ------
        RetryableError
            `error`, if the next try would come after a limit.
        """
        now = time.monotonic()
        self._since = self._since or now
        if error.retry_for is None:
            self._unclear_since = None
        else:
            self._unclear_since = self._unclear_since or now
        wait = self._wait * random.uniform(0.5, 1.0)  # noqa: S311
        self._wait = min(2 * self._wait, _LONGEST_WAIT)
        for since, limit in (
            (self._since, self._retry_for),
            (self._unclear_since, error.retry_for),
        ):
            if since is not None and limit is not None and now + wait - since > limit:
                raise error
        _log.warning("%s; connecting again in %.1f s", error, wait, extra={"event": "retry"})
        self.next_try = now + wait


def first_connection(
    connect: Callable[[], _Made], retry_for: float | None, stop: threading.Event | None = None
) -> _Made:
    """Return what `connect` returns; try again after an error only if `retry_for` is given.

    Without `retry_for`, a lost connection is tried again without end, but not the first connection:
    with a mistyped host or port, the caller would wait for ever and see no error.

    Raises
    ------
    RetryableError
        `retry_for` has passed or was not given, or `stop` is set.
    """
    retries = Retries(retry_for or 0.0)
    while True:
        try:
            return connect()
        except RetryableError as error:
            if stop is not None and stop.is_set():
                raise
            retries.plan(error)
            while (left := retries.next_try - time.monotonic()) > 0:
                if stop is not None and stop.is_set():
                    raise
                time.sleep(min(left, _POLL))


class Link:
    """The connection from which a stream reads. It can reconnect.

    Parameters
    ----------
    receiver : Receiver
    protocol : int
        The version of the protocol.
    source : Source, optional
        How to connect again. Without a source, a lost connection is an error.
    silence_timeout : float, optional
        See `Receiver`.
    retry_for : float, optional
        Seconds for which to try to reconnect. By default there is no limit.

    Attributes
    ----------
    receiver : Receiver
        The receiver of the present connection.
    protocol : int
    is_closed : bool
    lost : RetryableError or None
        Why the connection was lost, until there is a new one.
    reconnects : int
        How many connections were made after a loss.
    """

    def __init__(
        self,
        receiver: Receiver,
        protocol: int = 1,
        source: Source | None = None,
        *,
        silence_timeout: float | None = None,
        retry_for: float | None = None,
    ) -> None:
        self.receiver = receiver
        self.protocol = protocol
        self.is_closed = False
        self.lost: RetryableError | None = None
        self.reconnects = 0
        self._source = source
        self._silence_timeout = silence_timeout
        self._retries = Retries(retry_for)
        self._attempt: Attempt[Started] | None = None

    def works(self) -> None:
        """Note that data came, so that the next failure is treated as a first one."""
        self._retries.begin_anew()

    def loss(self, error: PgOutputError) -> RetryableError:
        """Return `error` as a RetryableError if the stream can reconnect after it.

        PostgreSQL may fail with an internal error (SQLSTATE XX…) while it decodes a transaction in
        progress, for example one with DDL and a rolled-back savepoint. It decodes the same
        transaction without an error after the transaction has ended. So after the first internal
        error, the stream continues without streaming of transactions in progress. This client
        can't distinguish these internal errors from others.

        Raises
        ------
        PgOutputError
            `error`, if a new connection would not help.
        """
        if isinstance(error, RetryableError):
            return error
        is_internal = isinstance(error, ReplicationError) and (error.sqlstate or "")[:2] == "XX"
        if not is_internal or self._source is None or not self._source.stop_streaming():
            raise error
        return RetryableError(
            f"{error.message}: this may fail only for transactions in progress, so the stream "
            "continues without streaming",
            code="server_refused",
        )

    def reconnect(self, error: RetryableError, received: int, is_ended: Callable[[], bool]) -> None:
        """Try to reconnect until this succeeds, or until `is_ended` returns True.

        If the call ends without a connection, `lost` is still set, and another call continues the
        same try. The server does not send acknowledged changes again. The new receiver has the
        `safe_lsn` of the old one.

        Parameters
        ----------
        error : RetryableError
            Why the connection was lost.
        received : int
            The LSN up to which frames were received.
        is_ended : callable
            Returns whether to give up, without an error.

        Raises
        ------
        RetryableError
            There is no source, or `retry_for` has passed.
        PgOutputError
            The stream can't go on; the error says why.
        """
        if self._source is None:
            raise error
        old = self.receiver
        if self.lost is None:
            self.lost = error
            old.close()
            self._retries.plan(error)
        while not self.is_closed:
            if self._attempt is None:
                left = self._retries.next_try - time.monotonic()
                if left > 0:
                    time.sleep(min(left, _POLL))
                else:
                    self._attempt = self._connect(self._source, old, received)
            elif self._attempt.wait(_POLL):
                attempt, self._attempt = self._attempt, None
                try:
                    started = attempt.result()
                except RetryableError as again:
                    self.lost = again
                    self._retries.plan(again)
                    continue
                new = Receiver(
                    started.connection, old.acknowledged, self._silence_timeout, old.safe_lsn
                )
                self.receiver, self.protocol, self.lost = new, started.protocol, None
                self.reconnects += 1
                break
            if is_ended():
                break
        if self.is_closed:  # a signal handler may have called close() meanwhile
            self.close()

    @staticmethod
    def _connect(source: Source, old: Receiver, received: int) -> Attempt[Started]:
        acknowledged, timeline = old.acknowledged, old.connection.timeline
        return Attempt(
            lambda: source.again(acknowledged, timeline, received),
            lambda started: started.connection.close(),
        )

    def close(self) -> None:
        """Send the last acknowledged position to the server, and close the connection."""
        self.is_closed = True
        self._abandon()
        self.receiver.close()

    def _abandon(self) -> None:
        if self._attempt is not None:
            self._attempt.abandon()
