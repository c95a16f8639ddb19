"""Segments: pgoutput frames landed in Arrow IPC files, as whole transactions in commit order.

A capture writes them (:class:`SegmentWriter`); whoever wants the changes reads them
(:func:`list_segments`, :class:`SegmentReader`), one by one and in any process. docs/segments.md
specifies the files and their directory. This package alone knows both.
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
