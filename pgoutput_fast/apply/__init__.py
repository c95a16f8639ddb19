"""From changes to tables.

:func:`fold` finds out what a stretch of the stream does to a table: one row for each key.
"""

from __future__ import annotations

from .folding import NetChanges, fold

__all__ = ["NetChanges", "fold"]


def __dir__() -> list[str]:
    """The public names, without those that this module imports."""
    return sorted(__all__)
