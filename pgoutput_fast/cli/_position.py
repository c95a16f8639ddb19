"""How far the server's log is, by its own word.

A stream tells that only once the server has read so far: of what is still before it, and how much
that is, nothing comes. So the server is asked, through a connection of its own.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

import psycopg

from ..errors import PgOutputError
from ..replication.server_position import FRESH, ServerPosition, ask_position

if TYPE_CHECKING:
    from ..connections import ConnectionParameters

_INTERVAL = FRESH / 3  # seconds between two questions
_CLOSE_TIMEOUT = 1.0  # seconds that the end waits for a question that is asked

_log = logging.getLogger(__name__)


class PositionWatch:
    """Asks the server every other second, in a thread of its own.

    A server that refuses this connection is no error, as it may still serve the stream.

    Parameters
    ----------
    parameters : ConnectionParameters

    Attributes
    ----------
    latest : Position or None
        The last answer.
    """

    def __init__(self, parameters: ConnectionParameters) -> None:
        self.latest: ServerPosition | None = None
        self._parameters = parameters
        self._tells = False
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name="pgoutput_fast-position", daemon=True
        )

    def start(self) -> None:
        """Begin to ask."""
        self._thread.start()

    def tell_refusals(self) -> None:
        """Log from now on when the server refuses.

        Before the stream has begun, its own connection is refused for the same reason, and that is
        the error with which the command ends.
        """
        self._tells = True

    def close(self) -> None:
        """End it, once it was started. A question that is asked meanwhile is not waited for."""
        self._stop.set()
        self._thread.join(_CLOSE_TIMEOUT)

    def _run(self) -> None:
        refused = False
        while not self._stop.is_set():
            try:
                with self._parameters.open(replication=False) as connection:
                    while not self._stop.is_set():
                        self.latest = ask_position(connection)
                        refused = False
                        self._stop.wait(_INTERVAL)
            except (PgOutputError, psycopg.Error) as error:
                if self._tells and not refused and not self._stop.is_set():
                    _log.warning("%s; the lag is not known until it is answered", error)
                    refused = True
                self._stop.wait(_INTERVAL)
