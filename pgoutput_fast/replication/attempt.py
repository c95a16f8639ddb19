"""Connect in a thread of its own, so that an order to end is heard meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from ..errors import RetryableError

_POLL = 0.05  # seconds between two looks whether to give up

_Made = TypeVar("_Made")


class Attempt(Generic[_Made]):
    """Something that connects: it begins at once, and may take as long as a server is silent.

    Parameters
    ----------
    make : callable
        Connects. It runs in another thread.
    close : callable
        Closes what `make` has made, if nobody wants it any more.
    """

    def __init__(self, make: Callable[[], _Made], close: Callable[[_Made], None]) -> None:
        self._make, self._close = make, close
        self._done = threading.Event()
        self._made: _Made | None = None
        self._error: BaseException | None = None
        self._abandoned = False
        # It is re-entrant, as a signal's handler may abandon this at any moment.
        self._lock = threading.RLock()
        threading.Thread(target=self._run, name="pgoutput_fast-connect", daemon=True).start()

    def _run(self) -> None:
        try:
            self._made = self._make()
        except BaseException as error:  # noqa: BLE001 - the thread that waits raises it
            self._error = error
        with self._lock:
            self._done.set()
            if self._abandoned:
                self._discard()

    def wait(self, seconds: float) -> bool:
        """Wait at most so long; whether it has ended."""
        return self._done.wait(seconds)

    def result(self) -> _Made:
        """What was made, once it has ended; an error is raised here."""
        with self._lock:
            if self._error is not None:
                raise self._error
            made, self._made = self._made, None
        if made is None:
            raise RetryableError("the stream was closed while it connected", code="stopped")
        return made

    def abandon(self) -> None:
        """Close what was made, or will be."""
        with self._lock:
            self._abandoned = True
            self._discard()

    def _discard(self) -> None:
        made, self._made = self._made, None
        if made is not None:
            self._close(made)


def unless_stopped(
    make: Callable[[], _Made], close: Callable[[_Made], None], stop: threading.Event | None
) -> _Made:
    """What `make` makes; the arguments are those of `Attempt`.

    Raises
    ------
    RetryableError
        `stop` was set meanwhile.
    """
    if stop is None:
        return make()
    attempt = Attempt(make, close)
    try:
        while not attempt.wait(_POLL):
            if stop.is_set():
                raise RetryableError(
                    "it was told to end before there was a connection", code="stopped"
                )
        return attempt.result()
    except BaseException:
        attempt.abandon()
        raise
