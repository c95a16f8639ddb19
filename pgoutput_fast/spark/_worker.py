"""In the Python workers of Spark's executors: what they print when Spark stops listening."""

from __future__ import annotations

import sys
import traceback
from typing import Any

_CLOSED = (BrokenPipeError, ConnectionResetError)


class _Traceback:
    """The module `traceback`, whose `print_exc` says nothing of a socket that was closed."""

    def __getattr__(self, name: str) -> Any:
        return getattr(traceback, name)

    def print_exc(self, *arguments: Any, **options: Any) -> None:
        """Print the exception that is handled, if it is another."""
        if not isinstance(sys.exc_info()[1], _CLOSED):
            traceback.print_exc(*arguments, **options)


def end_quietly() -> None:
    """Let this worker say nothing where Spark has closed its socket, as it has rows enough.

    A LIMIT that is reached, as by every `show()`, ends Spark's side while rows are still written.
    This is no error, but the daemon that the worker comes from prints the traceback of the
    BrokenPipeError that ends the worker. It prints all others as before: those of the rows are no
    matter of its, they go to Spark through the socket.
    """
    daemon = sys.modules["__main__"]
    spec = getattr(daemon, "__spec__", None)
    if spec is not None and spec.name == "pyspark.daemon":
        setattr(daemon, "traceback", _Traceback())  # noqa: B010 - no attribute of every module
