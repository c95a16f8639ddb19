"""Keep the Python workers of Spark's executors from printing an error that is none."""

from __future__ import annotations

import sys
import traceback
from typing import Any

_CLOSED = (BrokenPipeError, ConnectionResetError)


class _Traceback:
    """The module `traceback`, with a `print_exc` that does not print errors of a closed socket."""

    def __getattr__(self, name: str) -> Any:
        return getattr(traceback, name)

    def print_exc(self, *arguments: Any, **options: Any) -> None:
        """Print the exception that is being handled, unless it is that of a closed socket."""
        if not isinstance(sys.exc_info()[1], _CLOSED):
            traceback.print_exc(*arguments, **options)


def end_quietly() -> None:
    """Let this worker print nothing if Spark has closed its socket, as it has enough rows.

    When a LIMIT is reached, as by every `show()`, Spark closes the socket while rows are still
    written to it. This is no error, but PySpark's daemon prints the traceback of the
    BrokenPipeError that ends the worker. All other exceptions are printed as before. Errors of the
    rows themselves are not printed here at all: they go to Spark through the socket.
    """
    daemon = sys.modules["__main__"]
    spec = getattr(daemon, "__spec__", None)
    if spec is not None and spec.name == "pyspark.daemon":
        setattr(daemon, "traceback", _Traceback())  # noqa: B010 - no attribute of every module
