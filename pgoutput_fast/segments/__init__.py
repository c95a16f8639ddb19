"""Segments: Arrow IPC files that hold pgoutput frames of whole transactions in commit order.

A capture writes segments with :class:`SegmentWriter`. Any process can find them with
:func:`list_segments` and read each one alone with :class:`SegmentReader`.
docs/explanation/change-log-format.md specifies the files.
"""

from __future__ import annotations

from .format import FORMAT_VERSION, Segment, SegmentMetadata, segment_schema
from .listing import list_segments
from .reader import SegmentReader
from .writer import SegmentWriter

__all__ = [
    "FORMAT_VERSION",
    "Segment",
    "SegmentMetadata",
    "SegmentReader",
    "SegmentWriter",
    "list_segments",
    "segment_schema",
]
