"""Connect in a second thread, so that the caller can give up at any time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from ..errors import RetryableError

_POLL = 0.05  # seconds between two checks whether to give up

_Made = TypeVar("_Made")


class Attempt(Generic[_Made]):
    """A try to connect, in a thread that starts at once. A silent server may delay it for long.

    Parameters
    ----------
    make : callable
        Connects, and returns the connection. It runs in the thread.
    close : callable
        Takes what `make` returned, and closes it. It is called if the caller has abandoned the try.
    """

    def __init__(self, make: Callable[[], _Made], close: Callable[[_Made], None]) -> None:
        self._make, self._close = make, close
        self._done = threading.Event()
        self._result: _Made | None = None
        self._error: BaseException | None = None
        self._abandoned = False
        # Re-entrant, as a signal handler may call `abandon` at any moment.
        self._lock = threading.RLock()
        threading.Thread(target=self._run, name="pgoutput_fast-connect", daemon=True).start()

    def _run(self) -> None:
        try:
            self._result = self._make()
        except BaseException as error:  # noqa: BLE001 - the thread that waits raises it
            self._error = error
        with self._lock:
            self._done.set()
            if self._abandoned:
                self._discard()

    def wait(self, seconds: float) -> bool:
        """Wait at most `seconds`; return whether the try has ended."""
        return self._done.wait(seconds)

    def result(self) -> _Made:
        """Return what `make` returned, or raise its error. Call this after the try has ended."""
        with self._lock:
            if self._error is not None:
                raise self._error
            result, self._result = self._result, None
        if result is None:
            raise RetryableError("the stream was closed while it connected", code="stopped")
        return result

    def abandon(self) -> None:
        """Give up: close what `make` returned, now or when it returns."""
        with self._lock:
            self._abandoned = True
            self._discard()

    def _discard(self) -> None:
        result, self._result = self._result, None
        if result is not None:
            self._close(result)


def unless_stopped(
    make: Callable[[], _Made], close: Callable[[_Made], None], stop: threading.Event | None
) -> _Made:
    """Return what `make` returns, unless `stop` is set first; see `Attempt` for the arguments.

    Raises
    ------
    RetryableError
        `stop` was set before `make` returned.
    """
    if stop is None:
        return make()
    attempt = Attempt(make, close)
    try:
        while not attempt.wait(_POLL):
            if stop.is_set():
                raise RetryableError("stopped before there was a connection", code="stopped")
        return attempt.result()
    except BaseException:
        attempt.abandon()
        raise
