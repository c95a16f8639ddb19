"""The change log: a directory that one capture writes, and any number of processes read.

`ChangeLog` is the door to it: `view` says what there is and what a reader reads next, `changes`
decodes it. The package also has snapshots, the schema history, consumers, merging, retention and
uploads. ``ChangeLog(path).consumer(name)`` is for programs that store changes themselves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .read_plan import Position

if TYPE_CHECKING:
    from .log import ChangeLog

__all__ = ["ChangeLog", "Position"]


def __getattr__(name: str) -> Any:
    # It needs pyarrow, which a stream without a change log does not.
    if name == "ChangeLog":
        from .log import ChangeLog

        return ChangeLog
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
