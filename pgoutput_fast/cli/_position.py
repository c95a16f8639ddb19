"""Ask the server for the end of its log.

A replication stream gives positions only of what the server has read. It does not say how much of
the log is left. So this module asks the server through another connection.
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

_INTERVAL = FRESH / 3  # seconds between two queries
_CLOSE_TIMEOUT = 1.0  # seconds that close() waits for a running query

_log = logging.getLogger(__name__)


class PositionWatch:
    """Asks the server for its position at intervals, in a thread.

    A server that refuses this connection causes no error, because it may still serve the stream.

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
        """Start the thread."""
        self._thread.start()

    def tell_refusals(self) -> None:
        """Log from now on if the server refuses the connection.

        Before the stream has begun, the server refuses the stream's connection for the same reason.
        The command then ends with that error.
        """
        self._tells = True

    def close(self) -> None:
        """Stop the thread, which was started; wait only shortly for a running query."""
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
                    _log.warning("%s; the lag is unknown until the server answers", error)
                    refused = True
                self._stop.wait(_INTERVAL)
