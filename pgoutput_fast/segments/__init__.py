"""Segments: Arrow IPC files of pgoutput frames, with whole transactions in commit order.

A capture writes them with :class:`SegmentWriter`. Programs read them with :func:`list_segments` and
:class:`SegmentReader`, one by one and in any process. docs/explanation/change-log-format.md
specifies the files and their directory; only this package has code for them.
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
