"""The change log: a directory that one capture writes and any number of processes read.

A view lists the change log, a read plan says what to read next, and a `ChangeReader` decodes it.
``ChangeLog(path).consumer(name)`` is for programs that store the changes themselves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .read_plan import Position

if TYPE_CHECKING:
    from .log import ChangeLog

__all__ = ["ChangeLog", "Position"]


def __getattr__(name: str) -> Any:
    # Import it on demand: it needs pyarrow, and a stream without a change log does not.
    if name == "ChangeLog":
        from .log import ChangeLog

        return ChangeLog
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
