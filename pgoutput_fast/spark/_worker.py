"""Prepare the Python worker that runs a task."""

from __future__ import annotations

import gc
import sys
import traceback
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import TracebackType

_CLOSED = (BrokenPipeError, ConnectionResetError)
_FROZEN = "_pgoutput_fast_frozen"
"""Attribute of the daemon's module: the number of loaded modules at the last gc.freeze()."""


class _Traceback:
    """Stands in for the module `traceback`; its `print_exc` skips errors of a closed socket."""

    def __getattr__(self, name: str) -> Any:
        return getattr(traceback, name)

    def print_exc(self, *arguments: Any, **options: Any) -> None:
        """Print the exception being handled, unless its cause is a closed socket."""
        if not isinstance(sys.exc_info()[1], _CLOSED):
            traceback.print_exc(*arguments, **options)


def _is_running(module: str) -> bool:
    """Return whether this process was started to run a module."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec is not None and spec.name == module


def end_quietly() -> None:
    """Print no traceback when the query of a streaming source is stopped.

    Spark then closes the socket while the process reads or writes it, and PySpark tries to report
    that through the same socket. A BrokenPipeError ends the process, and Python would print its
    traceback. In other processes this function does nothing.
    """
    if not _is_running("pyspark.sql.streaming.python_streaming_source_runner"):
        return
    shown = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not issubclass(kind, _CLOSED):
            shown(kind, error, trace)

    sys.excepthook = show


def prepare() -> None:
    """Print no traceback when a LIMIT ends the worker, and make its garbage collections fast.

    When a LIMIT is reached, as in every `show()`, Spark closes the socket while the worker writes
    rows to it. This is no error, but PySpark's daemon prints the traceback of the BrokenPipeError
    that ends the worker. All other exceptions are printed as before. Errors of the rows themselves
    are never printed here: they go to Spark through the socket.

    After each task the daemon runs the garbage collector over all objects. With pandas, pyarrow and
    delta-rs loaded, this takes 60 ms, longer than many tasks. The objects of modules live as long
    as the worker, so this function freezes them. In other processes it does nothing.
    """
    if not _is_running("pyspark.daemon"):
        return
    daemon = sys.modules["__main__"]
    setattr(daemon, "traceback", _Traceback())  # noqa: B010 - no attribute of every module
    # Modules that a task imports are frozen when the next task begins.
    modules = len(sys.modules)
    if getattr(daemon, _FROZEN, 0) < modules:
        gc.freeze()
        setattr(daemon, _FROZEN, modules)
