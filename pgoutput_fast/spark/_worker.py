"""What tasks have the Python worker do in which they run."""

from __future__ import annotations

import gc
import sys
import traceback
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import TracebackType

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


def _is_running(module: str) -> bool:
    """Whether this process was started to run a module."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec is not None and spec.name == module


def end_quietly() -> None:
    """Let a source's process print no error that is none when its query is stopped.

    Spark closes the socket while the process waits for it, or writes to it, and PySpark tries to
    tell Spark of that through the same socket. What ends the process then is a BrokenPipeError,
    whose traceback Python would print. Elsewhere nothing is done.
    """
    if not _is_running("pyspark.sql.streaming.python_streaming_source_runner"):
        return
    shown = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not issubclass(kind, _CLOSED):
            shown(kind, error, trace)

    sys.excepthook = show


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
    if not _is_running("pyspark.daemon"):
        return
    daemon = sys.modules["__main__"]
    setattr(daemon, "traceback", _Traceback())  # noqa: B010 - no attribute of every module
    # Modules that a task has imported are passed over from the next one on.
    modules = len(sys.modules)
    if getattr(daemon, _FROZEN, 0) < modules:
        gc.freeze()
        setattr(daemon, _FROZEN, modules)
