"""What tasks have the Python worker do in which they run."""

from __future__ import annotations

import gc
import sys
import traceback
from typing import Any

_CLOSED = (BrokenPipeError, ConnectionResetError)
_FROZEN = "_pgoutput_fast_frozen"
"""Of the daemon's module: how many modules were there when the collector was last told."""


class _Traceback:
    """The module `traceback`, with a `print_exc` that does not print errors of a closed socket."""

    def __getattr__(self, name: str) -> Any:
        return getattr(traceback, name)

    def print_exc(self, *arguments: Any, **options: Any) -> None:
        """Print the exception that is being handled, unless it is that of a closed socket."""
        if not isinstance(sys.exc_info()[1], _CLOSED):
            traceback.print_exc(*arguments, **options)


def prepare() -> None:
    """Let this worker print no error that is none, and clean up quickly behind each task.

    When a LIMIT is reached, as by every `show()`, Spark closes the socket while rows are still
    written to it. This is no error, but PySpark's daemon prints the traceback of the
    BrokenPipeError that ends the worker. All other exceptions are printed as before. Errors of the
    rows themselves are not printed here at all: they go to Spark through the socket.

    Behind each task the daemon has the garbage collector look at all objects, which takes 60 ms
    where pandas, pyarrow and delta-rs are loaded: more than many a task. What modules have made
    stays until the worker ends, so the collector passes over it. Elsewhere nothing is done.
    """
    daemon = sys.modules["__main__"]
    spec = getattr(daemon, "__spec__", None)
    if spec is None or spec.name != "pyspark.daemon":
        return
    setattr(daemon, "traceback", _Traceback())  # noqa: B010 - no attribute of every module
    # Modules that a task has imported are passed over from the next one on.
    modules = len(sys.modules)
    if getattr(daemon, _FROZEN, 0) < modules:
        gc.freeze()
        setattr(daemon, _FROZEN, modules)
