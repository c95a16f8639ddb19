"""One step of a capture's merges."""

from __future__ import annotations

from pathlib import Path

from pgoutput_fast.changelog.merging import merges
from pgoutput_fast.segments import Segment


def merge(directory: Path, most: int) -> Segment | None:
    """Merge the first stretch of small segments; None if there is none."""
    return next(merges(directory, most), None)
