"""The connection of a stream, and a new one after it was lost."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable

from ..connections import RetryableError
from .receiver import Receiver
from .source import Source

# Seconds before the first further try, and between two at most; each is twice as long as the one
# before, and made shorter by chance, so that many clients do not come at once.
_FIRST_WAIT = 0.1
_LONGEST_WAIT = 30.0
_POLL = 0.05  # seconds within which an order to end is heard

_log = logging.getLogger(__name__)


class Link:
    """What a stream reads from.

    Parameters
    ----------
    receiver : Receiver
    protocol : int
        The version that is spoken.
    source : Source, optional
        How to connect again. Without, a connection that is lost is the end.
    silence_timeout : float, optional
        As of `Receiver`.
    retry_for : float, optional
        Seconds for which it is tried to connect again; without, as long as it takes.

    Attributes
    ----------
    receiver : Receiver
        That of the connection that is there now.
    protocol : int
    is_closed : bool
    lost : RetryableError or None
        Why the connection was lost, until there is a new one.
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
        self._source = source
        self._silence_timeout = silence_timeout
        self._retry_for = retry_for
        self._wait = _FIRST_WAIT
        self._lost_since: float | None = None

    def works(self) -> None:
        """Something came: the next failure is a new one."""
        self._wait = _FIRST_WAIT
        self._lost_since = None

    def reconnect(self, error: RetryableError, received: int, is_ended: Callable[[], bool]) -> None:
        """Connect again, as often as it takes.

        What was acknowledged is not sent again. What is held back stays so.

        Parameters
        ----------
        error : RetryableError
            Why the connection was lost.
        received : int
            The end of what was received.
        is_ended : callable
            Whether to give up, without an error.

        Raises
        ------
        RetryableError
            There is no source, or `retry_for` has passed.
        PgOutputError
            It can't be gone on; the error says why.
        """
        if self._source is None:
            raise error
        old, self.lost = self.receiver, error
        old.close()
        self._lost_since = self._lost_since or time.monotonic()
        while True:
            wait = self._wait * random.uniform(0.5, 1.0)  # noqa: S311
            self._wait = min(2 * self._wait, _LONGEST_WAIT)
            if (
                self._retry_for is not None
                and time.monotonic() + wait - self._lost_since > self._retry_for
            ):
                raise error
            _log.warning("%s; connecting again in %.1f s", error, wait)
            until = time.monotonic() + wait
            while (left := until - time.monotonic()) > 0:
                if self.is_closed or is_ended():
                    return
                time.sleep(min(left, _POLL))
            try:
                started = self._source.again(old.acknowledged, old.connection.timeline, received)
            except RetryableError as again:
                error = self.lost = again
                continue
            new = Receiver(
                started.connection, old.acknowledged, self._silence_timeout, held=old.held
            )
            self.receiver, self.protocol, self.lost = new, started.protocol, None
            if self.is_closed:  # meanwhile, by the handler of a signal
                new.close()
            return

    def close(self) -> None:
        """Tell the server the last position, and end the connection."""
        self.is_closed = True
        self.receiver.close()
