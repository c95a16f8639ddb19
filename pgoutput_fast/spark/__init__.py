"""PostgreSQL's changes as Spark DataFrames.

:func:`read_segments` and :func:`decode_frames` give the changes of a table,
:func:`current_state` the rows that the table holds after them.
"""

from __future__ import annotations

from ._session import session
from .reader import decode_frames, read_segments
from .state import current_state

__all__ = ["current_state", "decode_frames", "read_segments", "session"]
